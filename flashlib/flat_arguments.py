"""The fields of NamedTuples as the arguments of operators, which take tensors, numbers
and strings only.

:func:`masked_arguments` lists what a ScoreMod and a Packing of
:mod:`flashlib.score_mods` hold, tensors first. In a launcher,
:func:`score_mod_and_packing` builds them again.
"""

import functools
import inspect
from typing import NamedTuple

from torch import Tensor

from flashlib import score_mods

POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def flattened(function):
    """Decorate a function that takes NamedTuples, so that it takes each of their fields
    as an argument, as an operator must. NamedTuples are found by their annotations.
    """
    annotated = inspect.signature(function)
    kinds = {name: x.annotation for name, x in annotated.parameters.items()}

    def parameters(name, kind):
        if not hasattr(kind, "_fields"):
            return [inspect.Parameter(name, POSITIONAL, annotation=kind)]
        return [x for field in kind.__annotations__.items() for x in parameters(*field)]

    def take(kind, rest):
        if not hasattr(kind, "_fields"):
            return next(rest)
        return kind(*[take(x, rest) for x in kind.__annotations__.values()])

    flat = [x for pair in kinds.items() for x in parameters(*pair)]
    signature = annotated.replace(parameters=flat)

    @functools.wraps(function)
    def call(*arguments):
        rest = iter(signature.bind(*arguments).args)
        return function(*[take(kind, rest) for kind in kinds.values()])

    call.__signature__ = signature
    return call


class Captured(NamedTuple):
    """The tensors that the functions of a mask and of a score read: those of the mask,
    then those of the score, then None up to ``checks.MOST_CAPTURED``.
    """

    captured_0: Tensor | None = None
    captured_1: Tensor | None = None
    captured_2: Tensor | None = None
    captured_3: Tensor | None = None
    captured_4: Tensor | None = None
    captured_5: Tensor | None = None


class TileLists(NamedTuple):
    """The lists that the caller made for a mask, as ``score_mods.Lists``."""

    o_lists: Tensor | None = None
    dkdv_lists: Tensor | None = None
    dq_lists: Tensor | None = None
    hopper_o_lists: Tensor | None = None
    hopper_gradients_lists: Tensor | None = None


class MaskedTensors(NamedTuple):
    """What masked attention reads next to q, k and v."""

    bias: Tensor | None
    sinks: Tensor | None
    slopes: Tensor | None
    starts_q: Tensor | None
    starts_k: Tensor | None
    seed: Tensor | None
    captured: Captured
    lists: TileLists

    def flat(self):
        """The tensors one by one, as operators take them."""
        return *self[:-2], *self.captured, *self.lists


class MaskedOptions(NamedTuple):
    """What masked attention is told next to its tensors."""

    longest_q: int  # 0 without packed sequences
    longest_k: int
    left: int
    right: int
    softcap: float  # 0 for none
    scale: float
    mask_key: str  # empty for none
    by_batch: bool  # whether the mask can differ between batches
    by_head: bool
    function_key: str  # of a score, empty for none
    gathers: bool
    dropout: float
    bias_gradient: bool  # whether the backward operator returns it
    method: str  # "flash2", "hopper" or "auto"


def keys_and_captured(mask, function):
    """What operators take in place of a MaskOf and a FunctionOf, each of which may be
    None.

    Returns ``(keys, captured)``. keys are ``(mask_key, depends, function_key,
    gathers)``: the key of the mask, whether it depends on the batch and on the head,
    the key of the function, and whether that reads a tensor for each pair. An empty key
    means that there is no mask or function. captured is a Captured.
    """
    mask_key, depends, of_mask, _ = mask or ("", (False, False), (), None)
    function_key, gathers, of_function = function or ("", False, ())
    captured = Captured(*of_mask, *of_function)
    return (mask_key, depends, function_key, gathers), captured


def masked_arguments(score_mod, packing=None, method="auto"):
    """``(tensors, options)`` of ``masked`` after q, k and v, for a ScoreMod and a
    Packing or None: the tensors that a MaskedTensors holds, one by one, and a
    MaskedOptions.
    """
    x, bias, mask = score_mod, score_mod.bias, score_mod.mask
    starts_q, starts_k, longest_q, longest_k = packing or (None, None, 0, 0)
    keys, captured = keys_and_captured(mask, x.function)
    mask_key, (by_batch, by_head), function_key, gathers = keys
    lists = TileLists() if mask is None else mask.lists
    bias_gradient = bias is not None and bias.requires_grad
    tensors = MaskedTensors(
        bias=bias, sinks=x.sinks, slopes=x.slopes, starts_q=starts_q,
        starts_k=starts_k, seed=x.seed, captured=captured, lists=lists,
    )  # fmt: skip
    options = MaskedOptions(
        longest_q=longest_q, longest_k=longest_k, left=x.left, right=x.right,
        softcap=x.softcap, scale=x.scale, mask_key=mask_key, by_batch=by_batch,
        by_head=by_head, function_key=function_key, gathers=gathers,
        dropout=x.dropout, bias_gradient=bias_gradient, method=method,
    )  # fmt: skip
    return tensors.flat(), options


def score_mod_and_packing(extra, options):
    """The ScoreMod and the Packing or None that a MaskedTensors and a MaskedOptions
    describe: the inverse of :func:`masked_arguments`.
    """
    depends = options.by_batch, options.by_head
    keys = options.mask_key, depends, options.function_key, options.gathers
    lists = score_mods.Lists(*extra.lists)
    mask, function = score_mods.mask_and_function(*keys, extra.captured, lists)
    score_mod = score_mods.ScoreMod(
        scale=options.scale,
        left=options.left,
        right=options.right,
        softcap=options.softcap,
        slopes=extra.slopes,
        bias=extra.bias,
        sinks=None if extra.sinks is None else extra.sinks.contiguous(),
        mask=mask,
        seed=extra.seed,
        dropout=options.dropout,
        function=function,
    )
    longest = options.longest_q, options.longest_k
    return score_mod, score_mods.packing_or_none(
        extra.starts_q, extra.starts_k, *longest
    )
