"""The public door: checks the inputs, picks a kernel by name, and joins each forward to its backward.

This is the only module that joins steps. Every forward and every backward is a ``torch.library.custom_op``,
so that autograd, torch.compile and fake tensors know them. Kernels are imported inside the calls: where
Triton is missing, this module imports and the first call says what to do.
"""

import torch

from flashlib import checks, decoding, masked

METHODS = ("auto", "standard", "flash1", "flash2", "hopper")


@torch.library.custom_op("flashlib::standard", mutates_args=())
def _standard(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flashlib.kernels import standard

    return standard.forward(q, k, v, causal, scale)


@torch.library.custom_op("flashlib::standard_backward", mutates_args=())
def _standard_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: torch.Tensor, o: torch.Tensor, do: torch.Tensor,
    dlse: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from flashlib.kernels import gradients

    return gradients.backward(q, k, v, p, o, do, dlse, scale)


@torch.library.custom_op("flashlib::flash1", mutates_args=())
def _flash1(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    from flashlib.kernels import flash1

    return flash1.forward(q, k, v, causal, scale)


@torch.library.custom_op("flashlib::flash2", mutates_args=())
def _flash2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    deterministic: bool,
    tune: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    from flashlib.kernels import flash2

    return flash2.forward(q, k, v, causal, scale, tune)


@torch.library.custom_op("flashlib::hopper", mutates_args=())
def _hopper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, deterministic: bool,
    required: bool
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """hopper where it can run, else flash2 or, where hopper is required, ValueError. That is decided here,
    since addresses, of which a descriptor asks much, are not known while torch.compile traces.
    """
    from flashlib.kernels import copies, flash2, hopper

    refused = copies.refusal(q, k, v)
    if refused is None:
        return hopper.forward(q, k, v, causal, scale)
    if required:
        raise ValueError(f"method: 'hopper' expected {refused}")
    return flash2.forward(q, k, v, causal, scale)


@torch.library.custom_op("flashlib::hopper_backward", mutates_args=())
def _hopper_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    dlse: torch.Tensor, causal: bool, scale: float, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """hopper's backward where it can run, else the tiled one: both start from the same o and lse."""
    from flashlib.kernels import backward, copies, hopper_backward

    checks.determinism(deterministic)
    if copies.refusal(q, k, v, hopper_backward.WIDTHS) is None:
        return hopper_backward.backward(q, k, v, o, lse, do, dlse, causal, scale, deterministic)
    return backward.backward(q, k, v, o, lse, do, dlse, causal, scale, deterministic)


@torch.library.custom_op("flashlib::flash_backward", mutates_args=())
def _flash_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    dlse: torch.Tensor, causal: bool, scale: float, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from flashlib.kernels import backward

    checks.determinism(deterministic)
    return backward.backward(q, k, v, o, lse, do, dlse, causal, scale, deterministic)


def _new_output(q, v):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _new_gradients(q, k, v, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


@_standard.register_fake
def _(q, k, v, causal, scale):
    return *_new_output(q, v), q.new_empty(*q.shape[:3], k.shape[2])


def _new_flash_output(q, k, v, *_):
    return _new_output(q, v)


_flash1.register_fake(_new_flash_output)
_flash2.register_fake(_new_flash_output)
_hopper.register_fake(_new_flash_output)
_standard_backward.register_fake(_new_gradients)
_flash_backward.register_fake(_new_gradients)
_hopper_backward.register_fake(_new_gradients)


def _save_standard(ctx, inputs, output):
    q, k, v, _, ctx.scale = inputs
    o, _, p = output
    ctx.mark_non_differentiable(p)
    ctx.save_for_backward(q, k, v, p, o)


def _differentiate_standard(ctx, do, dlse, _):
    q, k, v, p, o = ctx.saved_tensors
    return *_standard_backward(q, k, v, p, o, do, dlse, ctx.scale), None, None


def _save_flash(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.scale, ctx.deterministic, *_ = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate_flash1(ctx, do, dlse):
    options = ctx.causal, ctx.scale, ctx.deterministic
    return *_flash_backward(*ctx.saved_tensors, do, dlse, *options), None, None, None


def _differentiate_flash2(ctx, do, dlse):
    return *_differentiate_flash1(ctx, do, dlse), None


def _differentiate_hopper(ctx, do, dlse):
    options = ctx.causal, ctx.scale, ctx.deterministic
    return *_hopper_backward(*ctx.saved_tensors, do, dlse, *options), None, None, None, None


def _refuse_double_backward(ctx, *grads):
    raise NotImplementedError("flashlib.attention: double backward is not supported")


def _refuse_vmap(info, in_dims, *args):
    raise NotImplementedError("flashlib.attention: vmap is not supported; batch along B of [B, H, T, d]")


_standard.register_autograd(_differentiate_standard, setup_context=_save_standard)
_flash1.register_autograd(_differentiate_flash1, setup_context=_save_flash)
_flash2.register_autograd(_differentiate_flash2, setup_context=_save_flash)
_hopper.register_autograd(_differentiate_hopper, setup_context=_save_flash)
_forwards = (_standard, _flash1, _flash2, _hopper, masked.forward)
_backwards = (_standard_backward, _flash_backward, _hopper_backward, masked.backward)
for _backward in _backwards:
    _backward.register_autograd(_refuse_double_backward)
for _op in (*_forwards, *_backwards):
    _op.register_vmap(_refuse_vmap)


def _autocast(x):
    """x in the dtype of the autocast region around the call; what attention cannot take stays as it is."""
    eligible = isinstance(x, torch.Tensor) and x.dtype in checks.DTYPES and x.device.type in checks.DEVICES
    if eligible and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _refuse_forward_mode(*tensors):
    """Raise NotImplementedError for a tensor with a tangent, which a custom op would drop without a word."""
    if torch.compiler.is_compiling():
        return
    if any(torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("flashlib.attention: forward-mode differentiation is not supported")


def attention(
    q, k, v, *, causal=False, window=None, softcap=None, alibi_slopes=None, scale=None, method="auto",
    return_lse=False, deterministic=True, tune=False
):  # fmt: skip
    """Exact attention, softmax(scale * Q K^T) V, for every batch and head.

    Parameters
    ----------
    q : tensor ``[B, H, T_q, d]``
        Queries; float32, float16 or bfloat16, on a CUDA device or the CPU, any strides, 16 <= d <= 256.
    k : tensor ``[B, H_kv, T_k, d]``
        Keys, in the dtype and on the device of q. H must be a multiple of H_kv: query head h reads key head h
        // (H / H_kv).
    v : tensor ``[B, H_kv, T_k, d_v]``
        Values; d_v may differ from d, 16 <= d_v <= 256.
    causal : bool
        Query i sees key j only if j <= i + T_k - T_q: the mask is aligned to the bottom-right corner.
    window : (left, right) or None
        With its position p = i + T_k - T_q, query i sees key j only if p - left <= j <= p + right; a side
        that is None has no limit. causal is right = 0. Blocks that lie outside are never read.
    softcap : float or None
        c > 0 replaces each score s by c tanh(s / c).
    alibi_slopes : tensor ``[H]`` or ``[B, H]``, float32, or None
        ALiBi: slope |p - j| is taken off each score, after the softcap. Finite; slopes get no gradient.
    scale : float or None
        Factor of the scores; None means 1/sqrt(d).
    method : "auto", "standard", "flash1", "flash2" or "hopper"
        "standard" materialises S and P in device memory, forward and backward. "flash1" and "flash2" are the
        tiled forward with online softmax, with keys and with queries in the outer loop; both keep the
        log-sum-exp and share the tiled backward. Their memory is O(T). "hopper" is the forward of "flash2",
        and for d = 64 and 128 the backward, written for a GPU of compute capability 9.0. It takes float16 or
        bfloat16, d = d_v = 64, 128 or 256, a last stride of 1, other strides and addresses in multiples of
        16 bytes. "auto" is "hopper" where that can run, "flash2" elsewhere and for what
        only "flash2" takes: a window, a softcap, slopes, tune.
    return_lse : bool
        Also return the log-sum-exp of each row of scores.
    deterministic : bool
        The gradients agree in every bit from run to run. False allows a backward pass of five products
        instead of seven, which adds up dQ in no particular order. "standard", a window, a softcap and slopes
        have no such form and stay deterministic.
    tune : bool
        Time the tiles of the forward pass at the first call for a kind of problem and keep the fastest;
        "flash2", which "auto" then is, on a GPU only, without a window, a softcap or slopes.

    Returns
    -------
    o : tensor ``[B, H, T_q, d_v]`` in the dtype of q, or ``(o, lse)`` with lse ``[B, H, T_q]`` float32,
    natural logarithm.
        A query that sees no key (T_k = 0 included) has o = 0, lse = -inf and zero gradients.

    Differentiable once, backwards, through o and lse; works under ``torch.compile(fullgraph=True)``, not
    under the transforms of ``torch.func``. Under autocast the inputs are cast to its dtype. On the CPU the
    kernels run in Triton's interpreter, where bfloat16 is computed in float32 and rounded.

    Raises TypeError or ValueError naming the argument, also for deterministic=False under
    ``torch.use_deterministic_algorithms(True)``; NotImplementedError for double backward, forward-mode
    differentiation and vmap.
    Source: chapters *Standard attention* (``eq-standard-attention``), *Gradients by hand* and *The backward
    pass*; Dao et al. (2022), Algorithms 1 and 4, for "flash1"; Dao (2024), Algorithms 1 and 2, for "flash2";
    chapter *Hopper*; Shah et al. (2024), for "hopper"; chapter *Masks* for window, softcap and slopes.
    """
    from flashlib import kernels

    checks.flag("causal", causal)
    checks.flag("return_lse", return_lse)
    checks.choice("method", method, METHODS)
    checks.flag("deterministic", deterministic)
    checks.flag("tune", tune)
    if tune and method not in ("auto", "flash2"):
        raise ValueError(f"tune: expected False for method {method!r}, which has one tile, got True")
    changes = {"window": window, "softcap": softcap, "alibi_slopes": alibi_slopes}
    for name in (name for name, value in changes.items() if value is not None):
        if method not in ("auto", "flash2"):
            raise ValueError(f"{name}: expected None for method {method!r}, only flash2 takes it")
        if tune:
            raise ValueError(f"tune: expected False with {name}, whose tiles are not timed, got True")
    q, k, v = _autocast(q), _autocast(k), _autocast(v)
    checks.tensors(q=q, k=k, v=v)
    checks.attention_shapes(q, k, v)
    kernels.runnable("q", q)
    _refuse_forward_mode(q, k, v)
    scale = checks.finite_scale(scale, q.shape[3])
    if method == "standard":
        o, lse, _ = _standard(q, k, v, causal, scale)
        return (o, lse) if return_lse else o
    if any(value is not None for value in changes.values()):
        numbers = masked.numbers(causal, window, softcap)
        masked.slopes(alibi_slopes, q, *q.shape[:2])
        o, lse = masked.forward(q, k, v, alibi_slopes, None, None, 0, 0, *numbers, scale)
        return (o, lse) if return_lse else o
    checks.determinism(deterministic)
    if method == "flash1":
        o, lse = _flash1(q, k, v, causal, scale, deterministic)
    elif method == "flash2" or tune:
        o, lse = _flash2(q, k, v, causal, scale, deterministic, tune)
    else:
        o, lse = _hopper(q, k, v, causal, scale, deterministic, method == "hopper")
    return (o, lse) if return_lse else o


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal=False, window=None,
    softcap=None, alibi_slopes=None, scale=None, return_lse=False
):  # fmt: skip
    """Exact attention within each of B sequences that are packed one after the other, without padding.

    Parameters
    ----------
    q, k, v : tensors ``[total_q, H, d]``, ``[total_k, H_kv, d]``, ``[total_k, H_kv, d_v]``
        Queries, keys and values of all sequences, one after the other; else as in :func:`attention`.
    cu_seqlens_q, cu_seqlens_k : tensors ``[B + 1]``, int32, on the device of q
        Where sequences begin: sequence b owns the rows cu_seqlens[b] to cu_seqlens[b + 1] - 1. The first is
        0, the last the number of rows; a length may be 0.
    max_seqlen_q, max_seqlen_k : int
        At least the longest lengths: so many blocks are started for each sequence.
    causal, window, softcap, alibi_slopes, scale, return_lse :
        As in :func:`attention`, for each sequence with its own lengths.

    Returns
    -------
    o : tensor ``[total_q, H, d_v]`` in the dtype of q, or ``(o, lse)`` with lse ``[H, total_q]`` float32,
    natural logarithm.
        A query that sees no key has o = 0, lse = -inf and zero gradients.

    Differentiable once, deterministically; autocast, torch.compile and the interpreter as in
    :func:`attention`.

    Raises TypeError, ValueError and NotImplementedError as :func:`attention`. The values in cu_seqlens are
    checked on a copy on the host, which waits until the device has made them: tens of microseconds, and no
    work is queued meanwhile. Under torch.compile and while a CUDA graph is captured they are trusted.
    Source: chapter *Masks* (``eq-masks-packed``).
    """
    from flashlib import kernels

    checks.flag("causal", causal)
    checks.flag("return_lse", return_lse)
    numbers = masked.numbers(causal, window, softcap)
    q, k, v = _autocast(q), _autocast(k), _autocast(v)
    checks.tensors("[total, H, d]", q=q, k=k, v=v)
    masked.packed_shapes(q, k, v)
    kernels.runnable("q", q)
    _refuse_forward_mode(q, k, v)
    scale = checks.finite_scale(scale, q.shape[2])
    masked.sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q, k)
    masked.slopes(alibi_slopes, q, cu_seqlens_q.shape[0] - 1, q.shape[1])
    o, lse = masked.forward(
        q, k, v, alibi_slopes, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), max_seqlen_q,
        max_seqlen_k, *numbers, scale,
    )  # fmt: skip
    return (o, lse) if return_lse else o


def decode(
    q, k_cache, v_cache, *, seq_lens, block_table=None, splits="auto", scale=None, window=None,
    return_lse=False
):  # fmt: skip
    """Exact attention of the last few positions of each sequence against its cache of keys and values.

    Parameters
    ----------
    q : tensor ``[B, H, T_q, d]``
        Queries of the last T_q of the seq_lens[b] keys of sequence b; each sees the keys up to its own
        position. Dtypes, devices, strides and head dimensions as in :func:`attention`.
    k_cache, v_cache : tensors ``[B, H_kv, T_max, d]`` and ``[B, H_kv, T_max, d_v]``
        Keys and values, in the dtype and on the device of q. With a block_table ``[pages, H_kv, page_size,
        d]`` and ``[pages, H_kv, page_size, d_v]``, page_size one of 16, 32, 64, 128, 256. The queries of a
        group, H / H_kv heads of T_q, share one reading of the cache.
    seq_lens : tensor ``[B]``, int32
        How many keys each sequence has, those of q included. What a cache holds behind them may be anything.
    block_table : tensor ``[B, max_pages]``, int32, or None
        The keys n page_size to (n + 1) page_size - 1 of sequence b lie in the page block_table[b, n]. Entries
        behind the last page of a sequence are not read. Sequences may share pages.
    splits : "auto" or int, 1 to 128
        In how many parts, side by side, the keys of a sequence are read; the parts are merged. "auto" goes by
        the longest sequence that the cache can hold.
    scale : float or None
        Factor of the scores; None means 1/sqrt(d).
    window : (left, right) or None
        A query at position p sees only keys p - left <= j; a left side of None has no limit. The right side
        changes nothing: no query sees a key behind its own.
    return_lse : bool
        Also return the log-sum-exp of each row of scores.

    Returns
    -------
    o : tensor ``[B, H, T_q, d_v]`` in the dtype of q, or ``(o, lse)`` with lse ``[B, H, T_q]`` float32,
    natural logarithm.
        A query that sees no key (an empty sequence, or fewer keys than queries) has o = 0 and lse = -inf.

    Nothing waits for the device, so a CUDA graph can capture the call. That is why the values in seq_lens and
    block_table are trusted: a wrong one reads what is not the sequence's. Works under
    ``torch.compile(fullgraph=True)``; autocast leaves the caches, and so the call, alone.

    Raises TypeError or ValueError naming the argument; NotImplementedError where a gradient is asked for.
    Source: chapter *Decoding* (``eq-decoding-merge``, ``eq-decoding-table``); Dao et al., "Flash-Decoding"
    (2023); Kwon et al., "PagedAttention" (2023).
    """
    from flashlib import kernels

    checks.flag("return_lse", return_lse)
    checks.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    decoding.cache_shapes(q, k_cache, v_cache, paged=block_table is not None)
    kernels.runnable("q", q)
    decoding.integers("seq_lens", seq_lens, q, "[B]")
    if block_table is not None:
        decoding.integers("block_table", block_table, q, "[B, max_pages]")
    left, _, _ = masked.numbers(True, window, None)
    _refuse_forward_mode(q, k_cache, v_cache)
    o, lse = decoding.forward(
        q, k_cache, v_cache, seq_lens.contiguous(), block_table, decoding.number_of_splits(splits), left,
        checks.finite_scale(scale, q.shape[3]),
    )  # fmt: skip
    return (o, lse) if return_lse else o
