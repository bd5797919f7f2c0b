"""Queries, keys and values in eight bits, after Shah et al., "FlashAttention-3" (2024),
and Zhang et al., "SageAttention" (2024).

    found = flashlib.fp8.quantize(q, k, v)
    found.q, found.q_scales   # float8_e4m3fn [B, H, T_q, d] and float32 [B, H, T_q]

``flashlib.decode`` reads a cache in eight bits: see
:class:`flashlib.kvcache.PagedKVCache`.
"""

from typing import NamedTuple

import torch

from flashlib import cache_checks, checks
from flashlib.reference import fp8 as reference


class Quantized(NamedTuple):
    """Attention's inputs in torch.float8_e4m3fn, contiguous, with scales in float32. A
    number is a value times the scale of its row or block.

    q         ``[B, H, T_q, d]``
    q_scales  ``[B, H, T_q]``, one for each query
    k         ``[B, H_kv, T_k, d]``
    k_scales  ``[B, H_kv, blocks]``, one for each block of 64 keys
    v         ``[B, H_kv, d_v, 64 blocks]``, transposed, 0 from T_k on; of each 16 keys,
              in the order of ``flashlib.reference.fp8.key_order``
    v_scales  ``[B, H_kv, blocks]``
    shift     ``[B, H, T_q]``: times the scale of the scores, what the log-sum-exp of
              each query is too small by, since the keys are without their mean; None if
              they are not smoothed
    """

    q: torch.Tensor
    q_scales: torch.Tensor
    k: torch.Tensor
    k_scales: torch.Tensor
    v: torch.Tensor
    v_scales: torch.Tensor
    shift: torch.Tensor | None = None


def quantize(q, k, v, *, transform=True, smooth=True, seed=0):
    """Round q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]`` and v ``[B, H_kv, T_k, d_v]``
    in float16 or bfloat16 to eight bits, a :class:`Quantized`.

    transform   multiply queries and keys by the same random orthogonal matrix, of the
                signs that the seed draws and Hadamard matrices; d is a multiple of 16
    smooth      subtract the mean of the keys of each head

    Neither changes attention before rounding: see ``transform`` and ``smooth`` in
    :mod:`flashlib.reference.fp8`. On GPUs before compute capability 8.9, which do not
    have the type, it raises ValueError; for a gradient NotImplementedError; TypeError
    or ValueError that names any other argument.
    """
    checks.check_flags(transform=transform, smooth=smooth)
    checks.check_qkv(q, k, v)
    cache_checks.check_eight_bits("q", q.device)
    cache_checks.check_quantization(q, k, seed)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError("flashlib.fp8.quantize: it has no gradient")
    from flashlib.kernels import fp8 as kernels

    sign = reference.signs(q.shape[3], seed, q.device) if transform else None
    return Quantized(*kernels.quantize(q, k, v, sign, smooth))
