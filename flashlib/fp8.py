"""Queries, keys and values in eight bits, after Shah et al., "FlashAttention-3" (2024),
and Zhang et al., "SageAttention" (2024).

    o = flashlib.fp8.attention(q, k, v, causal=True)   # q, k and v in 16 bits, as o
    quantized = flashlib.fp8.quantize(q, k, v)         # the two steps of it
    o = flashlib.fp8.attend(quantized, causal=True)

``flashlib.decode`` reads a cache in eight bits: see
:class:`flashlib.kvcache.PagedKVCache`.
"""

import functools
from typing import NamedTuple

import torch

from flashlib import cache_checks, checks, internals
from flashlib.plain_checks import wrong
from flashlib.reference import fp8 as reference

# Of the forms that the reference has, the kernels compute this one: keys and values in
# blocks of 128, and l from the rounded weights.
BLOCK = 128
RECIPE = reference.FULL._replace(k=BLOCK, v=BLOCK)


class Quantized(NamedTuple):
    """Attention's inputs in torch.float8_e4m3fn, contiguous, with scales in float32. A
    number is a value times the scale of its row or block.

    q         ``[B, H, T_q, d]``
    q_scales  ``[B, H, T_q]``, one for each query
    k         ``[B, H_kv, T_k, d]``
    k_scales  ``[B, H_kv, blocks]``, one for each block of 128 keys
    v         ``[B, H_kv, d_v, 128 blocks]``, transposed, 0 from T_k on; of each 16
              keys, in the order of ``flashlib.reference.fp8.key_order``
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


# A copy to a GPU waits for it. A CUDA graph reads what its capture found here, so
# nothing is ever forgotten.
kept_signs = functools.cache(reference.signs)


def signs(d, seed, device):
    """The signs of the reference, kept for later calls. While PyTorch traces a call or
    a dispatch mode is active, they may be a fake tensor without values, so they are not
    kept.
    """
    make = reference.signs if internals.needs_dispatcher() else kept_signs
    return make(d, seed, device)


def quantize(q, k, v, *, transform=True, smooth=True, seed=0):
    """Round q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]`` and v ``[B, H_kv, T_k, d_v]``
    in float16 or bfloat16 to eight bits, a :class:`Quantized`.

    With ``transform``, queries and keys are multiplied by the same random orthogonal
    matrix, of the signs that the seed draws and Hadamard matrices; d is a multiple of
    16. With ``smooth``, the mean of the keys of each head is subtracted from them.
    Neither changes attention before rounding: see ``transform`` and ``smooth`` in
    :mod:`flashlib.reference.fp8`. The signs of each seed, 4 d bytes, stay on the device
    for later calls. On GPUs before compute capability 8.9, which do not have the type,
    it raises ValueError; for a gradient NotImplementedError; TypeError or ValueError
    that names any other argument.
    """
    checks.check_flags(transform=transform, smooth=smooth)
    checks.check_qkv(q, k, v)
    cache_checks.check_eight_bits("q", q.device)
    cache_checks.check_quantization(q, k, seed)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError("flashlib.fp8.quantize: it has no gradient")
    from flashlib.kernels import fp8 as kernels

    sign = signs(q.shape[3], seed, q.device) if transform else None
    return Quantized(*kernels.quantize(q, k, v, sign, smooth))


def attention(
    q, k, v, *, causal=False, scale=None, transform=True, smooth=True, seed=0,
    return_lse=False,
):  # fmt: skip
    """Attention in eight bits: :func:`quantize`, then :func:`attend`.

    q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]`` and v ``[B, H_kv, T_k, d]`` in float16
    or bfloat16; causal, scale and return_lse as in ``flashlib.attention``. Returns o
    ``[B, H, T_q, d]`` in the dtype of q or ``(o, lse)``, lse ``[B, H, T_q]`` in
    float32.

    The error to expect is that of ``flashlib.reference.fp8.deviation`` with
    :data:`RECIPE` and blocks of 128 keys. Raises what the two functions raise.
    """
    checks.check_flags(causal=causal, return_lse=return_lse)
    scale = checks.check_scale(scale, q)
    checks.check_qkv(q, k, v)
    check_hopper(q.device, q.shape[3], v.shape[3])
    quantized = quantize(q, k, v, transform=transform, smooth=smooth, seed=seed)
    options = {"causal": causal, "scale": scale, "dtype": q.dtype}
    return attend(quantized, **options, return_lse=return_lse)


def attend(x, *, causal=False, scale=None, dtype=torch.bfloat16, return_lse=False):
    """Attention of a :class:`Quantized`, o in float16 or bfloat16, as ``dtype`` says.

    On a GPU it needs compute capability 9.0 and d = d_v = 64, 128 or 256, and two calls
    agree in every bit. On a CPU PyTorch computes what ``flashlib.reference.fp8`` does,
    for any widths. Raises ValueError where it cannot run, and TypeError or ValueError
    that names any other argument.
    """
    checks.check_flags(causal=causal, return_lse=return_lse)
    check_quantized(x)
    scale = checks.check_scale(scale, x.q)
    if dtype not in (torch.float16, torch.bfloat16):
        raise wrong("dtype", "torch.float16 or torch.bfloat16", dtype, TypeError)
    if x.q.is_cuda:
        check_hopper(x.q.device, x.q.shape[3], x.v.shape[2])
    if x.q.is_cuda and x.q.numel():
        from flashlib.kernels import hopper_fp8

        if scale <= 0.0:  # the kernel takes the maximum before it scales
            x, scale = times(x, -1.0 if scale else 0.0), -scale or 1.0
        o, lse = hopper_fp8.forward(*x, causal, scale, dtype)
    else:
        o, lse = in_pytorch(x, causal, scale)
        o = o.to(dtype)
    return (o, lse) if return_lse else o


def times(x, sign):
    """A :class:`Quantized` with queries times -1 or 0."""
    shift = None if x.shift is None else sign * x.shift
    return x._replace(q=(sign * x.q.float()).to(x.q.dtype), shift=shift)


def in_pytorch(x, causal, scale):
    """``(o, lse)`` in float32 of a :class:`Quantized`, by the reference."""
    T_k = x.k.shape[2]
    values = x.v.float().mT
    order = reference.key_order(values.shape[2]).to(values.device)
    values = torch.empty_like(values).index_copy_(2, order, values)[:, :, :T_k]
    of_k, of_v = (
        y.repeat_interleave(BLOCK, dim=2)[:, :, :T_k, None]
        for y in (x.k_scales, x.v_scales)
    )
    o, lse = reference.attend(
        reference.Rounded(x.q.float(), x.q_scales[..., None]),
        reference.Rounded(x.k.float(), of_k), reference.Rounded(values, of_v),
        causal=causal, scale=scale, block_k=BLOCK, sums_rounded=RECIPE.sums_rounded,
    )  # fmt: skip
    return o, lse if x.shift is None else lse + scale * x.shift


def check_hopper(device, d, d_v):
    """The kernel runs on this device, for these widths. Raises ValueError."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        got = ".".join(map(str, capability))
        got += "; flashlib.reference.fp8 has the same attention in PyTorch"
        raise wrong("q", "a Hopper GPU (compute capability 9.0)", got)
    from flashlib.kernels.hopper_host import HOPPER_WIDTHS

    if d != d_v or d not in HOPPER_WIDTHS:
        widths = ", ".join(map(str, HOPPER_WIDTHS))
        raise wrong("q", f"d = d_v, one of {widths}", f"d = {d}, d_v = {d_v}")


def check_quantized(x):
    """x is a Quantized whose tensors fit each other. Raises TypeError or ValueError."""
    if not isinstance(x, Quantized):
        raise wrong("x", "a flashlib.fp8.Quantized", type(x).__name__, TypeError)
    for name in ("q", "k", "v"):
        tensor = getattr(x, name)
        checks.check_tensor(name, tensor, x.q, dtype=torch.float8_e4m3fn)
        checks.check_dimensions(name, tensor, "[B, H, T, d]")
    (B, H, T_q, d), (_, H_kv, T_k, _) = x.q.shape, x.k.shape
    blocks, d_v = -(-T_k // BLOCK), x.v.shape[2]
    sizes = {
        "q": (B, H, T_q, d),
        "k": (B, H_kv, T_k, d), "v": (B, H_kv, d_v, blocks * BLOCK),
        "q_scales": (B, H, T_q), "k_scales": (B, H_kv, blocks),
        "v_scales": (B, H_kv, blocks), "shift": (B, H, T_q),
    }  # fmt: skip
    for name, expected in sizes.items():
        tensor = getattr(x, name)
        if name == "shift" and tensor is None:
            continue
        if name not in ("q", "k", "v"):
            checks.check_tensor(name, tensor, x.q, dtype=torch.float32)
        if tuple(tensor.shape) != expected:
            raise wrong(name, f"sizes {list(expected)}", list(tensor.shape))
        if not tensor.is_contiguous():
            raise wrong(name, "a contiguous tensor", f"strides {tensor.stride()}")
    cache_checks.require_rows("k", x.k)
    if H_kv == 0 or H % H_kv:
        raise wrong("k", f"a number of heads that divides the {H} of q", H_kv)
