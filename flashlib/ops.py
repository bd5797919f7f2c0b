"""The differentiable operators: each forward with its backward.

There are two ways to the same kernels. While PyTorch traces or transforms a call, and
under dispatch modes, the operators registered with ``torch.library`` run, which
autograd, torch.compile and fake tensors know. Otherwise :class:`Step` replays a plan
(:mod:`flashlib.plans`) without them, for a gradient in an ``autograd.Function``, which
costs the host less; standard attention has no Step. Operators trust their arguments,
which :mod:`flashlib.checks` has seen. They import kernels inside the call, so that this
module imports where Triton is missing. A launcher's name, such as ``flash``, becomes
that of its operator or Step.
"""

import typing

import torch
from torch import Tensor

from flashlib import checks, plans

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
LIBRARY = torch.library.Library("flashlib", "FRAGMENT")


def _refuse_double_backward(ctx, *gradients):
    raise NotImplementedError("flashlib.attention: double backward is not supported")


def _refuse_vmap(info, in_dims, *args):
    cure = "batch along B of [B, H, T, d]"
    raise NotImplementedError(f"flashlib.attention: vmap is not supported; {cure}")


def operator(launcher, fake, gradient=_refuse_double_backward, save=None):
    """Register a launcher as an operator with its name, and return that. fake returns
    what the launcher would, for fake tensors; gradient differentiates it, from what save
    keeps.

    Autograd calls a second operator. That is the one in a compiled graph, from which
    AOTAutograd has removed the first: without a rule for autograd, its call is cheaper.
    """
    name = launcher.__name__
    count = sum(x in (Tensor, Tensor | None) for x in launcher.__annotations__.values())

    def run(*arguments):
        tensors, options = arguments[:count], arguments[count:]
        given = plans.kind(*tensors)
        return plans.run(launcher, given, tensors, options)

    schema = torch.library.infer_schema(launcher, mutates_args=())

    def register(name):
        full = f"flashlib::{name}"
        torch.library.define(full, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(full, checks.DEVICES, run)
        torch.library.register_fake(full, fake)
        return getattr(torch.ops.flashlib, name).default

    inner = register(f"{name}_below_autograd")

    def forward(ctx, *arguments):
        outputs = inner(*arguments)
        if save is not None:
            save(ctx, arguments, outputs)
        return outputs

    methods = {"forward": staticmethod(forward), "backward": staticmethod(gradient)}
    function = type(name, (torch.autograd.Function,), methods)

    def autograd(*arguments):
        needed = torch._C._any_requires_grad(*arguments[:count])
        call = function.apply if torch.is_grad_enabled() and needed else inner
        return call(*arguments)

    outer = register(name)
    LIBRARY.impl(name, autograd, "Autograd")
    return outer


def _fake_forward(q, k, v, *_):
    return plans.new_results(q, v)


def _fake_contiguous(q, k, v, *_):
    """As _fake_forward; o is contiguous."""
    o = q.new_empty(*q.shape[:-1], v.shape[-1])
    return o, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _fake_standard(q, k, v, *_):
    return *_fake_contiguous(q, k, v), q.new_empty(*q.shape[:3], k.shape[2])


def _fake_backward(q, k, v, *_):
    return tuple(plans.empty_like(x, x.shape[-1]) for x in (q, k, v))


def autocast(*tensors):
    """The tensors in the dtype of the autocast region that they are in; unchanged
    outside of one, and what attention cannot take at all.
    """
    if not torch._C._is_any_autocast_enabled():
        return tensors

    def cast(x):
        if not isinstance(x, Tensor) or x.dtype not in checks.DTYPES:
            return x
        kind = x.device.type
        inside = kind in checks.DEVICES and torch.is_autocast_enabled(kind)
        return x.to(torch.get_autocast_dtype(kind)) if inside else x

    return tuple(map(cast, tensors))


class Step:
    """A launcher ``forward``, which returns ``(o, lse)``, and the launcher of its
    gradients ``(dq, dk, dv)``; both are ``(*tensors, *options)``.

    The first of the ``count`` tensors of forward are q, k and v. backward takes the
    tensors of forward, what it returned, the gradients of that (of lse perhaps None)
    and the options.
    """

    def __init__(self, count, forward, backward):
        self.count, self.forward, self.backward = count, forward, backward
        self.backward_operator = operator(backward, _fake_backward)
        self.operator = operator(forward, _fake_forward, self.differentiate, self.save)
        for op in (self.operator, self.backward_operator):
            torch.library.register_vmap(op, _refuse_vmap)

    def __call__(self, given, tensors, options):
        """The forward, differentiable; given is ``plans.kind`` of the tensors."""
        if given is None:
            return self.operator(*tensors, *options)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
            return _apply(self, given, options, *tensors)
        return plans.run(self.forward, given, tensors, options)

    def save(self, ctx, inputs, output):
        """Keep what the gradient needs."""
        ctx.save_for_backward(*inputs[: self.count], *output)
        ctx.options = inputs[self.count :]
        ctx.set_materialize_grads(False)

    def gradients(self, ctx, do, dlse):
        """The gradients of all tensors of the forward."""
        if do is None:
            do = torch.zeros_like(ctx.saved_tensors[self.count])
        tensors = (*ctx.saved_tensors, do, dlse)
        given = None if torch.is_grad_enabled() else plans.kind(*tensors)
        if given is None:
            found = self.backward_operator(*tensors, *ctx.options)
        else:
            found = plans.run(self.backward, given, tensors, ctx.options)
        return *found, *(None,) * (self.count - len(found))

    def differentiate(self, ctx, *gradients):
        """The gradients of all inputs of the operator."""
        return *self.gradients(ctx, *gradients), *(None,) * len(ctx.options)


class _Eager(torch.autograd.Function):
    """A Step without the dispatcher."""

    @staticmethod
    def forward(ctx, step, given, options, *tensors):
        outputs = plans.run(step.forward, given, tensors, options)
        step.save(ctx, (*tensors, *options), outputs)
        ctx.step = step
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, None, *ctx.step.gradients(ctx, *gradients)


# Function.apply without its checks for torch.func, which plans.kind has made.
_apply = super(torch.autograd.Function, _Eager).apply


class Composite:
    """A function of other operators, as one operator in the graph of torch.compile. What
    the function checks is not traced then: every check would be a guard of later calls.
    """

    def __init__(self, name, function):
        def run(*arguments):
            try:
                return function(*arguments)
            except (TypeError, ValueError) as error:
                if type(arguments[0]) in plans.PLAIN:
                    raise
                # At this, torch.compile breaks its graph: the call runs again without
                # it and raises the error itself.
                raise NotImplementedError(str(error)) from error

        *types, _ = function.__annotations__.values()
        self.types = [typing.get_args(x) or x for x in types]
        schema = torch.library.infer_schema(function, mutates_args=())
        LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        LIBRARY.impl(name, run, "CompositeImplicitAutograd")
        self.operator = getattr(torch.ops.flashlib, name).default
        torch.library.register_vmap(self.operator, _refuse_vmap)

    def takes(self, *arguments):
        """Whether torch.compile traces the call and the arguments have the annotated
        types: the operator would convert others.
        """
        return torch.compiler.is_dynamo_compiling() and all(
            map(isinstance, arguments, self.types)
        )


# -- standard attention, which keeps P


def standard(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Triple:
    """``(o, lse, p)``, p ``[B, H, T_q, T_k]``."""
    from flashlib.kernels import standard

    return standard.forward(q, k, v, causal, scale)


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


standard_backward = operator(standard_backward, _fake_backward)
standard = operator(standard, _fake_standard, _differentiate_standard, _save_standard)
for op in (standard, standard_backward):
    torch.library.register_vmap(op, _refuse_vmap)

# -- tiled attention: flash1, flash2 and hopper


def flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, method: str,
    deterministic: bool,
) -> Pair:  # fmt: skip
    """``(o, lse)`` by "flash1", "flash2", "tuned" (flash2), "hopper" or "auto".

    hopper is chosen here, in the call, because TMA descriptors constrain addresses,
    which torch.compile does not know while tracing. deterministic is not used here: the
    backward operator gets the options of its forward. Raises ValueError if "hopper" is
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


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    dlse: Tensor | None, causal: bool, scale: float, method: str, deterministic: bool,
) -> Triple:  # fmt: skip
    """``(dq, dk, dv)``; o and lse may come from any method."""
    from flashlib.kernels import backward, host

    checks.check_determinism(deterministic)
    if dlse is None:
        dlse = plans.zeros(lse.shape, lse.dtype, lse.device)
    given = q, k, v, o, lse, do, dlse, causal, scale
    if method in ("auto", "hopper") and host.hopper_refusal(q, k, v) is None:
        from flashlib.kernels import hopper_backward

        return hopper_backward.backward(*given, deterministic=deterministic)
    return backward.backward(*given, deterministic)


flash = Step(3, flash, flash_backward)

# -- masks, changed scores and packed sequences: tensors [B, H, T, d], or with starts_q
# and starts_k (int32 [B + 1]) packed ones [total, H, d], whose longest sequences have
# at most longest_q and longest_k rows


def _packing(starts_q, *rest):
    from flashlib.kernels import scores

    return None if starts_q is None else scores.Packing(starts_q, *rest)


def masked(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, starts_q: Tensor | None,
    starts_k: Tensor | None, longest_q: int, longest_k: int, left: int, right: int,
    softcap: float, scale: float, method: str,
) -> Pair:  # fmt: skip
    """``(o, lse)``, lse ``[B, H, T_q]`` or ``[H, total_q]``; a softcap of 0 is none. The
    method is "flash2", "hopper" or "auto". Raises ValueError as flash.
    """
    from flashlib.kernels import host, masks, scores

    score_mod = scores.ScoreMod(scale, left, right, softcap, slopes)
    packing = _packing(starts_q, starts_k, longest_q, longest_k)
    if method != "flash2":
        refused = score_mod.hopper_refusal(packing is not None)
        refused = refused or host.hopper_refusal(q, k, v)
        if refused is None:
            from flashlib.kernels import hopper

            window = score_mod.window
            return hopper.forward(q, k, v, right == 0, scale, window, packing)
        if method == "hopper":
            raise ValueError(f"method: 'hopper' expected {refused}")
    return masks.forward(q, k, v, score_mod, packing)


def masked_backward(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, starts_q: Tensor | None,
    starts_k: Tensor | None, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None,
    longest_q: int, longest_k: int, left: int, right: int, softcap: float, scale: float,
    method: str,
) -> Triple:  # fmt: skip
    """``(dq, dk, dv)`` in the shapes of q, k and v."""
    from flashlib.kernels import host, masks, scores

    score_mod = scores.ScoreMod(scale, left, right, softcap, slopes)
    packing = _packing(starts_q, starts_k, longest_q, longest_k)
    if dlse is None:
        dlse = plans.zeros(lse.shape, lse.dtype, lse.device)
    if method != "flash2" and packing is None and score_mod.hopper_refusal() is None:
        from flashlib.kernels import hopper_backward

        if host.hopper_refusal(q, k, v) is None:
            given = q, k, v, o, lse, do, dlse, True, scale
            return hopper_backward.backward(*given, left=score_mod.window)
    return masks.backward(q, k, v, o, lse, do, dlse, score_mod, packing)


masked = Step(6, masked, masked_backward)

# -- decoding, which has no gradient


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


_decode_operator = operator(decode, _fake_contiguous, _refuse_decode_backward)


def run_decode(given, tensors, options):
    """decode(*tensors, *options), as :class:`Step` runs a forward."""
    if given is None or (
        torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)
    ):
        return _decode_operator(*tensors, *options)
    return plans.run(decode, given, tensors, options)
