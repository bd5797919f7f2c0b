"""Attention with a mask, changed scores or packed sequences, as differentiable operators.

``flashlib.api`` is the door: it checks what comes in and calls these. As there, every forward and every
backward is a ``torch.library.custom_op``, and kernels are imported inside the calls.

The operators take tensors ``[B, H, T, d]`` or, where starts_q and starts_k (int32 ``[B + 1]``) are given,
packed ones ``[total, H, d]``; longest_q and longest_k are then the lengths of the longest sequences, or more,
and otherwise 0. A side of the window without a limit is -1, and a softcap of 0 is none.
"""

import itertools

import torch

from flashlib import checks


@torch.library.custom_op("flashlib::masked", mutates_args=())
def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None,
    starts_q: torch.Tensor | None, starts_k: torch.Tensor | None, longest_q: int, longest_k: int,
    left: int, right: int, softcap: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(o, lse)``: o in the shape of q with the last size of v, lse float32 ``[B, H, T_q]`` or ``[H,
    total_q]``.
    """
    from flashlib.kernels import masks

    return masks.forward(
        q, k, v, _scoring(left, right, softcap, slopes, scale),
        _packing(starts_q, starts_k, longest_q, longest_k),
    )  # fmt: skip


@torch.library.custom_op("flashlib::masked_backward", mutates_args=())
def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None,
    starts_q: torch.Tensor | None, starts_k: torch.Tensor | None, o: torch.Tensor, lse: torch.Tensor,
    do: torch.Tensor, dlse: torch.Tensor, longest_q: int, longest_k: int, left: int, right: int,
    softcap: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(dq, dk, dv)`` in the shapes of q, k and v."""
    from flashlib.kernels import masks

    return masks.backward(
        q, k, v, o, lse, do, dlse, _scoring(left, right, softcap, slopes, scale),
        _packing(starts_q, starts_k, longest_q, longest_k),
    )  # fmt: skip


def _scoring(left, right, softcap, slopes, scale):
    from flashlib.kernels import masks

    left, right = (masks.UNLIMITED if side < 0 else min(side, masks.UNLIMITED) for side in (left, right))
    return masks.Scoring(scale, left, right, softcap, slopes)


def _packing(starts_q, starts_k, longest_q, longest_k):
    from flashlib.kernels import masks

    return None if starts_q is None else masks.Packing(starts_q, starts_k, longest_q, longest_k)


@forward.register_fake
def _(q, k, v, slopes, starts_q, *_):
    rows = q.shape[:3] if starts_q is None else (q.shape[1], q.shape[0])
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(rows, dtype=torch.float32)


@backward.register_fake
def _(q, k, v, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]


def _differentiate(ctx, do, dlse):
    return *backward(*ctx.saved_tensors, do, dlse, *ctx.options), *(None,) * 9


forward.register_autograd(_differentiate, setup_context=_save)


# ------------------------------------------------------------------------------------ arguments


def numbers(causal, window, softcap):
    """Window and softcap as the operators take them: ``(left, right, softcap)``.

    Raises ValueError unless window is None or two sides, each None or an integer of at least 0, and unless
    softcap is None or above 0; TypeError for a softcap that is no number.
    """
    message = f"window: expected (left, right), each None or an integer of at least 0, got {window!r}"
    if window is not None and not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise ValueError(message)
    sides = []
    for side in (None, None) if window is None else window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            raise ValueError(message)
        sides.append(-1 if side is None else side)
    value = 0.0 if softcap is None else checks.finite_number("softcap", softcap)
    if softcap is not None and value <= 0.0:
        raise ValueError(f"softcap: expected a number above 0, got {value}")
    return sides[0], 0 if causal else sides[1], value


def slopes(alibi_slopes, q, B, H):
    """Raise unless alibi_slopes is None or a float32 tensor ``[H]`` or ``[B, H]`` on the device of q that
    asks for no gradient: TypeError for another type or dtype, ValueError for the rest.
    """
    if alibi_slopes is None:
        return
    if not isinstance(alibi_slopes, torch.Tensor):
        raise TypeError(f"alibi_slopes: expected a torch.Tensor, got {type(alibi_slopes).__name__}")
    if alibi_slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes: expected dtype torch.float32, got {alibi_slopes.dtype}")
    if alibi_slopes.device != q.device:
        raise ValueError(f"alibi_slopes: expected the device of q, {q.device}, got {alibi_slopes.device}")
    sizes, heads = alibi_slopes.ndim, alibi_slopes.shape[-1] if alibi_slopes.ndim else 0
    if sizes not in (1, 2) or heads != H or (sizes == 2 and alibi_slopes.shape[0] != B):
        raise ValueError(
            f"alibi_slopes: expected [H] or [B, H] with B = {B}, H = {H}, got {list(alibi_slopes.shape)}"
        )
    if alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes: expected constants, which get no gradient, got requires_grad=True")


def packed_shapes(q, k, v):
    """q ``[total_q, H, d]``, k ``[total_k, H_kv, d]``, v ``[total_k, H_kv, d_v]``, else as
    ``checks.attention_shapes``. Raises ValueError naming the argument.
    """
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"v: expected [total_k, H_kv, d_v] with the sizes of k {list(k.shape)}, got {list(v.shape)}"
        )
    checks.attention_shapes(*(x.transpose(0, 1)[None] for x in (q, k, v)))


def sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q, k):
    """Raise unless the sequences are what ``flashlib.attention_varlen`` says: TypeError for a wrong type,
    ValueError for wrong shapes and values.
    """
    given = {"q": (cu_seqlens_q, max_seqlen_q, q), "k": (cu_seqlens_k, max_seqlen_k, k)}
    for name, (starts, longest, x) in given.items():
        if not isinstance(starts, torch.Tensor):
            raise TypeError(f"cu_seqlens_{name}: expected a torch.Tensor, got {type(starts).__name__}")
        if starts.dtype != torch.int32:
            raise TypeError(f"cu_seqlens_{name}: expected dtype torch.int32, got {starts.dtype}")
        if starts.device != x.device:
            raise ValueError(f"cu_seqlens_{name}: expected the device of q, {x.device}, got {starts.device}")
        if starts.ndim != 1 or starts.shape[0] < 1:
            raise ValueError(f"cu_seqlens_{name}: expected [B + 1], got {list(starts.shape)}")
        checks.count(f"max_seqlen_{name}", longest, least=0)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        expected, came = list(cu_seqlens_q.shape), list(cu_seqlens_k.shape)
        raise ValueError(f"cu_seqlens_k: expected the shape of cu_seqlens_q, {expected}, got {came}")
    if torch.compiler.is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    # One copy for both: it waits for whatever the device still has to do.
    both = torch.stack([cu_seqlens_q, cu_seqlens_k]).tolist()
    for (name, (_, longest, x)), starts in zip(given.items(), both, strict=True):
        lengths = [after - before for before, after in itertools.pairwise(starts)]
        if starts[0] != 0 or starts[-1] != x.shape[0] or min(lengths, default=0) < 0:
            raise ValueError(
                f"cu_seqlens_{name}: expected 0 first, {x.shape[0]} (the rows of {name}) last and nothing "
                f"that decreases, got {starts}"
            )
        if max(lengths, default=0) > longest:
            raise ValueError(
                f"max_seqlen_{name}: expected at least {max(lengths)}, the longest sequence, got {longest}"
            )
