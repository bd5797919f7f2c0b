"""The differentiable operators: each forward with its backward.

Every operator is a ``torch.library.custom_op``, so that autograd, torch.compile and
fake tensors know it. Operators trust their arguments, which :mod:`flashlib.checks` has
seen. They import kernels inside the call, so that this module imports where Triton is
missing.
"""

import torch
from torch import Tensor

from flashlib import checks

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def _refuse_double_backward(ctx, *gradients):
    raise NotImplementedError("flashlib.attention: double backward is not supported")


def _refuse_vmap(info, in_dims, *args):
    raise NotImplementedError(
        "flashlib.attention: vmap is not supported; batch along B of [B, H, T, d]"
    )


def operator(fake):
    """A decorator that registers a function as the operator of its name, with what it
    returns for fake tensors. Its backward is refused until one is registered.
    """

    def register(function):
        name = f"flashlib::{function.__name__}"
        op = torch.library.custom_op(name, function, mutates_args=())
        op.register_fake(fake)
        op.register_autograd(_refuse_double_backward)
        op.register_vmap(_refuse_vmap)
        return op

    return register


def _fake_forward(q, k, v, *_):
    """o and lse for q ``[B, H, T, d]`` or packed ``[total, H, d]``."""
    rows = q.shape[:3] if q.ndim == 4 else (q.shape[1], q.shape[0])
    o = q.new_empty(*q.shape[:-1], v.shape[-1])
    return o, q.new_empty(rows, dtype=torch.float32)


def _fake_standard(q, k, v, *_):
    return *_fake_forward(q, k, v), q.new_empty(*q.shape[:3], k.shape[2])


def _fake_backward(q, k, v, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def autocast(x):
    """x in the dtype of the autocast region it is in; unchanged outside of one, or if
    attention cannot take x at all.
    """
    if not isinstance(x, Tensor) or x.dtype not in checks.DTYPES:
        return x
    device = x.device.type
    if device not in checks.DEVICES or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _differentiable(forward, backward, tensors):
    """Register the operator ``backward`` as the gradient of the operator ``forward``.

    The first ``tensors`` inputs of forward are tensors, beginning with q, k and v; the
    others are options. backward takes those tensors, the outputs of forward, their
    gradients and the options, and returns ``(dq, dk, dv)``.
    """

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:tensors], *output)
        ctx.options = inputs[tensors:]

    def differentiate(ctx, *gradients):
        found = backward(*ctx.saved_tensors, *gradients, *ctx.options)
        without_gradient = tensors - len(found) + len(ctx.options)
        return *found, *(None,) * without_gradient

    forward.register_autograd(differentiate, setup_context=save)


# -- standard attention, which keeps P


@operator(_fake_standard)
def standard(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Triple:
    """``(o, lse, p)``, p ``[B, H, T_q, T_k]``."""
    from flashlib.kernels import standard

    return standard.forward(q, k, v, causal, scale)


@operator(_fake_backward)
def standard_backward(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, o: Tensor, do: Tensor, dlse: Tensor,
    scale: float,
) -> Triple:  # fmt: skip
    """``(dq, dk, dv)`` in the shapes of q, k, v, from p ``[B, H, T_q, T_k]``; do and
    dlse in the shapes of o and lse.
    """
    from flashlib.kernels import gradients

    return gradients.backward(q, k, v, p, o, do, dlse, scale)


def _save_standard(ctx, inputs, output):
    q, k, v, _, ctx.scale = inputs
    o, _, p = output
    ctx.mark_non_differentiable(p)
    ctx.save_for_backward(q, k, v, p, o)


def _differentiate_standard(ctx, do, dlse, _):
    return *standard_backward(*ctx.saved_tensors, do, dlse, ctx.scale), None, None


standard.register_autograd(_differentiate_standard, setup_context=_save_standard)

# -- tiled attention: flash1, flash2 and hopper


@operator(_fake_forward)
def flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, method: str,
    deterministic: bool,
) -> Pair:  # fmt: skip
    """``(o, lse)`` by "flash1", "flash2", "tuned" (flash2), "hopper" or "auto".

    hopper is chosen here, in the call, because TMA descriptors constrain addresses,
    which torch.compile does not know while tracing. deterministic is not used here: the
    backward operator gets the options of its forward. Raises ValueError where "hopper" is
    asked for and cannot run.
    """
    from flashlib.kernels import flash1, flash2, host

    if method == "flash1":
        return flash1.forward(q, k, v, causal, scale)
    if method in ("auto", "hopper"):
        refused = host.hopper_refusal(q, k, v)
        if refused is None:
            from flashlib.kernels import hopper

            return hopper.forward(q, k, v, causal, scale)
        if method == "hopper":
            raise ValueError(f"method: 'hopper' expected {refused}")
    return flash2.forward(q, k, v, causal, scale, tune=method == "tuned")


@operator(_fake_backward)
def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor,
    causal: bool, scale: float, method: str, deterministic: bool,
) -> Triple:  # fmt: skip
    """``(dq, dk, dv)`` from the o and lse of any method: all return the same two."""
    from flashlib.kernels import backward, host

    checks.check_determinism(deterministic)
    run = backward.backward
    if method in ("auto", "hopper"):
        from flashlib.kernels import hopper_backward

        if host.hopper_refusal(q, k, v, hopper_backward.WIDTHS) is None:
            run = hopper_backward.backward
    return run(q, k, v, o, lse, do, dlse, causal, scale, deterministic)


_differentiable(flash, flash_backward, tensors=3)

# -- masks, changed scores and packed sequences: tensors [B, H, T, d], or with starts_q
# and starts_k (int32 [B + 1]) packed ones [total, H, d], whose longest sequences have
# at most longest_q and longest_k rows


def _packing(starts_q, *rest):
    from flashlib.kernels import scores

    return None if starts_q is None else scores.Packing(starts_q, *rest)


@operator(_fake_forward)
def masked(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, starts_q: Tensor | None,
    starts_k: Tensor | None, longest_q: int, longest_k: int, left: int, right: int,
    softcap: float, scale: float,
) -> Pair:  # fmt: skip
    """``(o, lse)``, lse ``[B, H, T_q]`` or ``[H, total_q]``; a softcap of 0 is none."""
    from flashlib.kernels import masks, scores

    score_mod = scores.ScoreMod(scale, left, right, softcap, slopes)
    packing = _packing(starts_q, starts_k, longest_q, longest_k)
    return masks.forward(q, k, v, score_mod, packing)


@operator(_fake_backward)
def masked_backward(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, starts_q: Tensor | None,
    starts_k: Tensor | None, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor,
    longest_q: int, longest_k: int, left: int, right: int, softcap: float, scale: float,
) -> Triple:  # fmt: skip
    """``(dq, dk, dv)`` in the shapes of q, k and v."""
    from flashlib.kernels import masks, scores

    score_mod = scores.ScoreMod(scale, left, right, softcap, slopes)
    packing = _packing(starts_q, starts_k, longest_q, longest_k)
    return masks.backward(q, k, v, o, lse, do, dlse, score_mod, packing)


_differentiable(masked, masked_backward, tensors=6)

# -- decoding, which has no gradient: nothing is learned from a cache


@torch.library.custom_op("flashlib::decode", mutates_args=())
def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor,
    block_table: Tensor | None, splits: int, left: int, scale: float,
) -> Pair:  # fmt: skip
    """``(o, lse)``; 0 splits stands for "auto"."""
    from flashlib.kernels import decoding

    cache = k_cache, v_cache, seq_lens, block_table
    return decoding.forward(q, *cache, splits, left, scale)


def _refuse_decode_backward(ctx, *gradients):
    message = "flashlib.decode: it has no gradient; flashlib.attention has"
    raise NotImplementedError(message)


decode.register_fake(_fake_forward)
decode.register_autograd(_refuse_decode_backward)
