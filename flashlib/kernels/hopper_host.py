"""What launchers of the Hopper kernels share: which tensors these can take, and the
results of a forward pass.
"""

import torch

from flashlib.kernels import INTERPRETED
from flashlib.kernels.descriptors import describable
from flashlib.plans import new_results

HOPPER_WIDTHS = (64, 128, 256)
# d and d_v of latent attention, expanded: keys have 64 rotary columns next to 128
# others.
EXPANDED = 192, 128
# Columns of a row of the cache and of its latent, absorbed.
ABSORBED = 576, 512
ABSORBED_PAGES = 64, 128, 256  # rows: blocks of 64 rows are never from two pages


def device_refusal(q):
    """Why no Hopper kernel can take q, as hopper_refusal says it, whatever its shape;
    None where one may.
    """
    if INTERPRETED:
        return "a Hopper GPU, got Triton's interpreter, which cannot run Gluon"
    major, minor = torch.cuda.get_device_capability(q.device)
    if (major, minor) != (9, 0):
        return f"a Hopper GPU (compute capability 9.0), got {major}.{minor}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"float16 or bfloat16, got {q.dtype}"
    return None


def address_refusal(name, x):
    """Why the copy engine cannot read x, as hopper_refusal says it, or None."""
    if x.numel() == 0 or describable(x):
        return None
    return (
        f"{name} with last stride 1, the other strides and the address multiples of 16 "
        f"bytes, got strides {tuple(x.stride())} at an address {x.data_ptr() % 16} "
        "bytes past a multiple of 16"
    )


def hopper_refusal(q, k, v):
    """Why the Hopper kernels cannot take q, k, v ``[B, H, T, d]``, or packed, as the
    end of an error message ("expected …, got …"); None where they can.
    """
    refused = device_refusal(q)
    if refused is not None:
        return refused
    d, d_v = q.shape[-1], v.shape[-1]
    if (d not in HOPPER_WIDTHS or d_v != d) and (d, d_v) != EXPANDED:
        allowed = ", ".join(map(str, HOPPER_WIDTHS))
        return (
            f"d = d_v, one of {allowed}, or d = 192 with d_v = 128, got d = {d}, "
            f"d_v = {d_v}"
        )
    refusals = (address_refusal(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    return next((refused for refused in refusals if refused is not None), None)


def absorbed_refusal(q, cache, block_table, d_c):
    """Why the Hopper kernel of absorbed latent attention cannot take q ``[B, H, T_q,
    d_c + d_r]`` and a cache, as hopper_refusal says it; None where it can.
    """
    refused = device_refusal(q)
    if refused is not None:
        return refused
    d, latent = ABSORBED
    if (q.shape[-1], d_c) != ABSORBED:
        return (
            f"d_c = {latent} next to {d - latent} rotary columns, got d_c = {d_c} next "
            f"to {q.shape[-1] - d_c}"
        )
    if cache.dtype != q.dtype:
        return f"a cache in {q.dtype}, got {cache.dtype}"
    if block_table is not None and cache.shape[1] not in ABSORBED_PAGES:
        allowed = ", ".join(map(str, ABSORBED_PAGES))
        return f"pages of {allowed} rows, got {cache.shape[1]}"
    return address_refusal("cache", cache)


def hopper_forward(q, k, scale, fill, v=None):
    """O ``[B, H, T_q, d_v]`` in the dtype and memory order of q and L ``[B, H, T_q]``
    in float32, contiguous, both new, which fill(q, o, lse, scale) computes; of packed q
    ``[total_q, H, d]`` O ``[total_q, H, d_v]`` and L ``[H, total_q]``. v is needed
    where d_v is not d.

    It is called with tensors that are not empty and a positive scale: the kernels take
    the maximum of a row before they scale, and 0 times -inf, the score of a key that is
    not seen, is NaN.
    """
    if scale <= 0.0:
        negated = -q  # new, so it can be overwritten
        q, scale = (negated, -scale) if scale else (negated.zero_(), 1.0)
    o, lse = new_results(q, q if v is None else v)
    if k.numel() == 0:
        return o.zero_(), lse.fill_(-float("inf"))
    if lse.numel():
        fill(q, o, lse, scale)
    return o, lse
