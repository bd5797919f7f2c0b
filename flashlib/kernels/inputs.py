"""Inputs as kernels take them: their dtype and sizes, and new tensors for results."""

import torch

from flashlib.kernels import INTERPRETED
from flashlib.kernels.tiles import Sizes
from flashlib.plans import new_results


def computed_dtype(dtype):
    """The dtype in which a kernel computes on tensors of the given dtype: the same,
    except that bfloat16 becomes float32 under the interpreter, which would multiply
    its bit patterns. The launcher rounds the result.
    """
    return torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype


def widened(*tensors):
    """The tensors in their computed dtype; no copy where that is their own."""
    return tuple(x.to(computed_dtype(x.dtype)) for x in tensors)


def sizes(q, k, v):
    """The Sizes of a problem."""
    (_, H, T_q, d), (_, H_kv, T_k, d_v) = q.shape, v.shape
    return Sizes(H, H // H_kv, T_q, T_k, d, d_v)


def forward_tensors(q, k, v, scale):
    """``(q, k, v, scale, o, lse)`` as forward kernels take them, of batches or packed:
    q, k, v in their computed dtype, scale at least 0, o and lse new.
    """
    q, k, v = widened(q, k, v)
    if scale < 0.0:
        q, scale = -q, -scale  # the kernels take the maximum before they scale
    return q, k, v, scale, *new_results(q, v)
