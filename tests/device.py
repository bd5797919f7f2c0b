"""The device that tests run on, and what replaces a Hopper GPU on others."""

from types import FunctionType, SimpleNamespace

import interpreter  # noqa: F401 (it makes Triton's faster)
import pytest
import torch

from flashlib.kernels import backward, flash2, masks, masks_backward
from flashlib.kernels.scores import ScoreMod
from flashlib.plain_checks import UNLIMITED

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# The kernels of step hopper run on compute capability 9.0 only.
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)

on_cpu = pytest.mark.skipif(CUDA, reason="for the interpreter")
# What torch.compile is given: autograd and tracing alone, and on a GPU the compiler
# too.
each_backend = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]
)


def as_python(functions, **names):
    """The jit functions of these names as Python, among names that they see."""
    for name in functions:
        fn = names[name].fn
        names[name] = FunctionType(fn.__code__, names, None, fn.__defaults__)
    return SimpleNamespace(**names)


# Where there is no Hopper GPU, flash2 and the kernels of masks replace the kernels of
# step hopper. They are bound here, so that a test can replace them in their modules.
_ran = flash2.forward, masks.forward, backward.backward, masks_backward.backward


def other_forward(
    q, k, v, causal, scale, left=None, packing=None, mask=None, sinks=None, slopes=None,
    softcap=0.0, function=None, bias=None,
):  # fmt: skip
    more = left, packing, mask, sinks, slopes, function, bias
    if not softcap and all(x is None for x in more):
        return _ran[0](q, k, v, causal, scale)
    left = UNLIMITED if left is None else left
    right = 0 if causal else UNLIMITED
    changes = {"mask": mask, "sinks": sinks, "function": function, "bias": bias}
    score_mod = ScoreMod(scale, left, right, softcap, slopes, **changes)
    return _ran[1](q, k, v, score_mod, packing)


def other_backward(
    q, k, v, o, lse, do, dlse, causal, scale, left=None, deterministic=True, mask=None,
    sinks=None, slopes=None, softcap=0.0, function=None, bias=None,
):  # fmt: skip
    arguments = q, k, v, o, lse, do, dlse
    more = left, mask, sinks, slopes, function, bias
    if not softcap and all(x is None for x in more):
        return _ran[2](*arguments, causal, scale, deterministic)
    left = UNLIMITED if left is None else left
    right = 0 if causal else UNLIMITED
    changes = {"mask": mask, "sinks": sinks, "function": function, "bias": bias}
    score_mod = ScoreMod(scale, left, right, softcap, slopes, **changes)
    *found, _, dsinks = _ran[3](*arguments, score_mod, None, False)
    return found if sinks is None else (*found, dsinks)
