"""The differentiable operators: each forward with its backward.

There are two ways to the same plan (:mod:`flashlib.plans`). While PyTorch traces or
transforms a call, and under dispatch modes, it runs in operators registered with
``torch.library``, which autograd, torch.compile and fake tensors know. Otherwise
:class:`Differentiable` runs it without them, for a gradient in an
``autograd.Function``, which costs the host less. Operators take tensors, numbers and
strings only, and so do their launchers (:mod:`flashlib.flat_arguments`). A launcher
begins with the checks of its tensors and imports kernels inside the call, so that this
module imports where Triton is missing.
"""

import functools
import inspect
import typing

import torch
from torch import Tensor

from flashlib import cache_checks, checks, internals, plans, score_mods
from flashlib.flat_arguments import (
    Captured,
    MaskedOptions,
    MaskedTensors,
    flattened,
    keys_and_captured,
    masked_arguments,
    score_mod_and_packing,
)

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
LIBRARY = torch.library.Library("flashlib", "FRAGMENT")


def _refuse_double_backward(of, ctx, *gradients):
    raise NotImplementedError(f"flashlib.{of}: double backward is not supported")


def _refuse_gradient(of, ctx, *gradients):
    message = f"flashlib.{of}: it has no gradient; use flashlib.attention"
    raise NotImplementedError(message)


def refuse_transforms(of="attention", *_):
    """Raise the NotImplementedError of a call inside of a transform of torch.func."""
    cure = "use torch.autograd.grad, and batch along B of [B, H, T, d]"
    raise NotImplementedError(f"flashlib.{of}: torch.func is not supported; {cure}")


def tensors_of(launcher):
    """How many parameters of a launcher are tensors or None; these come first."""
    parameters = inspect.signature(launcher).parameters.values()
    return sum(x.annotation in (Tensor, Tensor | None) for x in parameters)


def operator(name, launcher, fake, of, gradient, save=None):
    """Register a launcher as the operator ``flashlib::name``, and return the operator.
    For fake tensors, fake returns what the launcher would. gradient computes the
    gradients from what save has kept. Errors name the public function ``of``.

    There is a second operator, ``name_below_autograd``, which the first one calls. Only
    the second is in a compiled graph, since AOTAutograd has differentiated the first:
    without a rule for autograd, its call is cheaper.
    """
    schema = torch.library.infer_schema(launcher, mutates_args=())
    count = tensors_of(launcher)

    def run(*arguments):
        return plans.run(launcher, arguments[:count], arguments[count:])

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
        needed = torch.is_grad_enabled() and internals.any_requires_grad(*arguments)
        if needed and internals.transforms_active():
            refuse_transforms(of)
        return (function.apply if needed else inner)(*arguments)

    outer = register(name)
    LIBRARY.impl(name, autograd, "Autograd")
    torch.library.register_vmap(outer, functools.partial(refuse_transforms, of))
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
    return plans.new_like(q, k, v)


def autocast(*tensors):
    """The tensors in the dtype of the autocast region around the call. Without one, or
    where attention cannot take a tensor, it is unchanged.
    """
    if not internals.any_autocast():
        return tensors

    def cast(x):
        if not isinstance(x, Tensor) or x.dtype not in checks.DTYPES:
            return x
        device = x.device.type
        inside = device in checks.DEVICES and torch.is_autocast_enabled(device)
        return x.to(torch.get_autocast_dtype(device)) if inside else x

    return tuple(map(cast, tensors))


class Differentiable:
    """A function with a gradient, made of two launchers.

    ``forward(q, k, v, *more tensors, *options)`` returns ``(o, lse)``, and perhaps P.
    ``backward(*tensors, *results, do, dlse, *options)`` returns ``(dq, dk, dv)``, and
    perhaps the gradients of the tensors that follow. It gets the tensors and options of
    the forward call, all that this call returned, and the gradients of o and lse; dlse
    may be None. If backward is None, asking for a gradient raises NotImplementedError.

    check raises an error unless the tensors fit each other. fake and fake_backward
    return what the launchers would, for fake tensors. Errors name the public function
    ``of``.
    """

    def __init__(
        self, name, check, forward, backward, fake, fake_backward=_fake_backward,
        of="attention",
    ):  # fmt: skip
        self.count, self.check = tensors_of(forward), check
        self.forward, self.backward = forward, backward
        if backward is None:
            refuse = functools.partial(_refuse_gradient, of)
            self.operator = operator(name, forward, fake, of, refuse)
        else:
            differentiate = self.differentiate, self.save
            self.operator = operator(name, forward, fake, of, *differentiate)
            refuse = functools.partial(_refuse_double_backward, of)
            self.backward_operator = operator(
                f"{name}_backward", backward, fake_backward, of, refuse
            )

    def __call__(self, *arguments):
        """``(o, lse)``, differentiable."""
        tensors, options = arguments[: self.count], arguments[self.count :]
        if not plans.plain(*tensors):
            # now, since an operator that is traced will run later
            self.check(*tensors)
            return self.operator(*arguments)[:2]
        if not (torch.is_grad_enabled() and internals.any_requires_grad(*tensors)):
            return plans.run(self.forward, tensors, options)[:2]
        if self.backward is None:
            return self.operator(*arguments)[:2]
        return _apply(self, *arguments)[:2]

    def save(self, ctx, arguments, results):
        """Keep what the gradient needs."""
        ctx.save_for_backward(*arguments[: self.count], *results)
        ctx.mark_non_differentiable(*results[2:])
        ctx.options = arguments[self.count :]
        ctx.set_materialize_grads(False)

    def gradients(self, ctx, do, dlse):
        """The gradients of all tensors of the forward."""
        saved = ctx.saved_tensors  # read once: a checkpoint unpacks them at each read
        do = torch.zeros_like(saved[self.count]) if do is None else do
        tensors = (*saved, do, dlse)
        batched = any(x is not None and internals.is_batched(x) for x in (do, dlse))
        if torch.is_grad_enabled() or batched or not plans.plain(*tensors):
            grads = self.backward_operator(*tensors, *ctx.options)
        else:
            grads = plans.run(self.backward, tensors, ctx.options)
        # A tensor that is None has no gradient.
        grads = [None if x is None else g for g, x in zip(grads, saved, strict=False)]
        return *grads, *(None,) * (self.count - len(grads))

    def differentiate(self, ctx, do, dlse, *_):
        """The gradients of all arguments of the operator."""
        return *self.gradients(ctx, do, dlse), *(None,) * len(ctx.options)


class _Eager(torch.autograd.Function):
    """A Differentiable without the dispatcher."""

    @staticmethod
    def forward(ctx, function, *arguments):
        tensors, options = arguments[: function.count], arguments[function.count :]
        results = plans.run(function.forward, tensors, options)
        function.save(ctx, arguments, results)
        ctx.function = function
        return results

    @staticmethod
    def backward(ctx, *gradients):
        return None, *ctx.function.differentiate(ctx, *gradients)


_apply = internals.apply_of(_Eager)


class Composite:
    """A function of other operators, as one operator in the graph of torch.compile. The
    checks in the function are then not traced, and do not become guards that every
    later call evaluates.
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
        refuse = functools.partial(refuse_transforms, name)
        torch.library.register_vmap(self.operator, refuse)

    def takes(self, *arguments):
        """Whether torch.compile traces the call and the arguments have the annotated
        types: the operator would convert others.
        """
        return torch.compiler.is_dynamo_compiling() and all(
            map(isinstance, arguments, self.types)
        )


# -- standard attention, which keeps P


def standard_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> Triple:
    """``(o, lse, p)``, p ``[B, H, T_q, T_k]``."""
    from flashlib.kernels import standard

    checks.check_qkv(q, k, v)
    return standard.forward(q, k, v, causal, scale)


def standard_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, p: Tensor, do: Tensor,
    dlse: Tensor | None, causal: bool, scale: float,
) -> Triple:  # fmt: skip
    """``(dq, dk, dv)`` in the shapes of q, k and v."""
    from flashlib.kernels import gradients

    if dlse is None:  # its rows are subtracted, so they need memory of their own
        dlse = lse.new_empty(lse.shape).zero_()
    return gradients.backward(q, k, v, p, o, do, dlse, scale)


standard = Differentiable(
    "standard", checks.check_qkv, standard_forward, standard_backward, _fake_standard
)

# -- tiled attention: flash1, flash2 and hopper


def on_hopper(method, refusal, *arguments):
    """Whether a method runs the kernels for Hopper, which take these arguments unless
    refusal, a function of kernels/hopper_host.py, has a reason. Raises ValueError with
    the reason if "hopper" is asked for.
    """
    if method not in ("auto", "hopper"):
        return False
    refused = refusal(*arguments)
    if refused is not None and method == "hopper":
        raise ValueError(f"method: 'hopper' expected {refused}")
    return refused is None


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, method: str,
    deterministic: bool,
) -> Pair:  # fmt: skip
    """``(o, lse)`` by "flash1", "flash2", "tuned" (flash2), "hopper" or "auto".

    hopper is chosen here, in the call, because TMA descriptors constrain addresses,
    which torch.compile does not know while tracing. deterministic is not used here: the
    backward operator gets the options of its forward. Raises ValueError if "hopper" is
    asked for and cannot run.
    """
    from flashlib.kernels import flash1, flash2, hopper_host

    checks.check_qkv(q, k, v)
    if method == "flash1":
        return flash1.forward(q, k, v, causal, scale)
    score_mod = score_mods.unchanged(causal, scale)
    if on_hopper(method, hopper_host.forward_refusal, q, k, v, score_mod):
        from flashlib.kernels import hopper

        return hopper.forward(q, k, v, score_mod)
    return flash2.forward(q, k, v, causal, scale, tune=method == "tuned")


def _hopper_backward(q):
    """The launcher of the gradients on Hopper for queries of this width."""
    from flashlib.kernels import hopper_backward, hopper_expanded, hopper_host

    expanded = q.shape[-1] == hopper_host.EXPANDED[0]
    return (hopper_expanded if expanded else hopper_backward).backward


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    dlse: Tensor | None, causal: bool, scale: float, method: str,
    deterministic: bool,
) -> Triple:  # fmt: skip
    """``(dq, dk, dv)``; o and lse may come from any method."""
    from flashlib.kernels import backward, hopper_host

    checks.check_determinism(deterministic)
    dlse = plans.zeros(lse.shape, lse.dtype, lse) if dlse is None else dlse
    tensors = q, k, v, o, lse, do, dlse
    score_mod = score_mods.unchanged(causal, scale)
    wanted = method in ("auto", "hopper")
    if wanted and hopper_host.backward_refusal(q, k, v, score_mod) is None:
        return _hopper_backward(q)(*tensors, score_mod, deterministic)
    return backward.backward(*tensors, causal, scale, deterministic)


flash = Differentiable(
    "flash", checks.check_qkv, flash_forward, flash_backward, _fake_forward
)

# -- masks, changed scores and packed sequences: tensors [B, H, T, d], or with starts_q
# and starts_k (int32 [B + 1]) packed ones [total, H, d], whose longest sequences have
# at most longest_q and longest_k rows


@flattened
def masked_forward(
    q: Tensor, k: Tensor, v: Tensor, extra: MaskedTensors, options: MaskedOptions
) -> Pair:
    """``(o, lse)``, lse ``[B, H, T_q]`` or ``[H, total_q]``. Raises ValueError as
    flash.
    """
    from flashlib.kernels import hopper_host, masks

    checks.check_masked(q, k, v, *extra.flat())
    score_mod, packing = score_mod_and_packing(extra, options)
    problem, method = (q, k, v, score_mod, packing), options.method
    if method == "auto" and hopper_host.slower(q, k, score_mod):
        method = "flash2"
    if on_hopper(method, hopper_host.forward_refusal, *problem):
        from flashlib.kernels import hopper

        return hopper.forward(*problem)
    return masks.forward(*problem)


@flattened
def masked_backward(
    q: Tensor, k: Tensor, v: Tensor, extra: MaskedTensors, o: Tensor, lse: Tensor,
    do: Tensor, dlse: Tensor | None, options: MaskedOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``(dq, dk, dv, dbias, dsinks)`` in the shapes of the tensors, dbias and dsinks
    empty where there are none or they are not asked for.
    """
    from flashlib.kernels import hopper_host, masks_backward

    score_mod, packing = score_mod_and_packing(extra, options)
    no_dlse = dlse is None
    dlse = plans.zeros(lse.shape, lse.dtype, lse) if no_dlse else dlse
    refusal, tensors = hopper_host.backward_refusal, (q, k, v, o, lse, do, dlse)
    if options.method == "flash2" or refusal(q, k, v, score_mod, packing) is not None:
        bias_gradient = options.bias_gradient
        return masks_backward.backward(*tensors, score_mod, packing, bias_gradient)
    dq, dk, dv, *dsinks = _hopper_backward(q)(*tensors, score_mod)
    dbias = q.new_empty(0)
    if extra.bias is not None and options.bias_gradient:
        # Another launch, which needs zeros of its own.
        dlse = plans.zeros(lse.shape, lse.dtype, lse) if no_dlse else dlse
        tensors = q, k, v, o, lse, do, dlse
        dbias = masks_backward.gradient_of_bias(*tensors, score_mod)
    return dq, dk, dv, dbias, *(dsinks or (q.new_empty(0),))


@flattened
def _fake_masked_backward(
    q, k, v, extra: MaskedTensors, o, lse, do, dlse, options: MaskedOptions
):
    wanted = extra.bias if options.bias_gradient else None
    more = (
        q.new_empty(0)
        if x is None
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (wanted, extra.sinks)
    )
    return *_fake_backward(q, k, v), *more


# The same launchers twice, since errors name the function that was called.
masked, packed = (
    Differentiable(
        name, checks.check_masked, masked_forward, masked_backward, _fake_forward,
        _fake_masked_backward, of=of,
    )
    for name, of in (("masked", "attention"), ("packed", "attention_varlen"))
)  # fmt: skip


def attend_masked(q, k, v, score_mod, packing, method):
    """``(o, lse)`` by a ScoreMod and a Packing or None, differentiable."""
    tensors, options = masked_arguments(score_mod, packing, method)
    attend = masked if packing is None else packed
    return attend(q, k, v, *tensors, *options)


# -- decoding, which has no gradient


@flattened
def decode_forward(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor,
    block_table: Tensor | None, k_scales: Tensor | None, v_scales: Tensor | None,
    sinks: Tensor | None, captured: Captured, splits: int, left: int, scale: float,
    mask_key: str, function_key: str, gathers: bool,
) -> Pair:  # fmt: skip
    """``(o, lse)``; 0 splits stands for "auto", and an empty key for no mask or
    score.
    """
    from flashlib.kernels import decoding

    cache, scales = (k_cache, v_cache, seq_lens, block_table), (k_scales, v_scales)
    cache_checks.check_cache(q, *cache, *scales, sinks, *captured)
    mask, function = score_mods.mask_and_function(
        mask_key, (False, False), function_key, gathers, captured, score_mods.Lists()
    )
    sinks = None if sinks is None else sinks.contiguous()
    changes = decoding.Changes(mask, function, sinks)
    return decoding.forward(q, *cache, splits, left, scale, changes, scales)


decode_cache = Differentiable(
    "decode", cache_checks.check_cache, decode_forward, None, _fake_contiguous,
    of="decode",
)  # fmt: skip


def decode(q, cache, sinks, splits, left, scale, *of):
    """``(o, lse)`` against a cache, ``(k_cache, v_cache, seq_lens, block_table,
    k_scales, v_scales)``, by a MaskOf or None and a FunctionOf or None.
    """
    keys, captured = keys_and_captured(*of)
    options = splits, left, scale, keys[0], *keys[2:]
    return decode_cache(q, *cache, sinks, *captured, *options)


def decode_latent_forward(
    q: Tensor, cache: Tensor, seq_lens: Tensor, block_table: Tensor | None,
    scales: Tensor | None, splits: int, d_c: int, scale: float, method: str,
) -> Pair:  # fmt: skip
    """``(o, lse)``, o of latents, by "latent", "hopper" or "auto"; 0 splits stands for
    "auto". Raises ValueError as flash.
    """
    from flashlib.kernels import hopper_host, latent

    cache_checks.check_latent_cache(q, cache, seq_lens, block_table, scales)
    cache_checks.check_latent_pairs(cache, d_c)
    refusal = hopper_host.absorbed_refusal
    if on_hopper(method, refusal, q, cache, block_table, d_c):
        from flashlib.kernels import hopper_absorbed

        return hopper_absorbed.forward(
            q, cache, seq_lens, block_table, splits, d_c, scale
        )
    return latent.forward(q, cache, seq_lens, block_table, splits, d_c, scale, scales)


def _fake_latent(
    q, cache, seq_lens, block_table, scales, splits, d_c, scale, method
):  # fmt: skip
    o = q.new_empty(*q.shape[:-1], d_c)
    return o, q.new_empty(q.shape[:-1], dtype=torch.float32)


decode_latent = Differentiable(
    "decode_latent", cache_checks.check_latent_cache, decode_latent_forward, None,
    _fake_latent, of="decode_latent",
)  # fmt: skip
