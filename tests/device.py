"""The device that tests run on, and what replaces a Hopper GPU on others."""

from types import FunctionType, SimpleNamespace

import interpreter  # noqa: F401 (it makes Triton's faster)
import pytest
import torch

from flashlib.kernels import backward, flash2, masks, masks_backward

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# The kernels of step hopper run on compute capability 9.0 only.
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)


def on_hopper(test):
    """A test that needs a GPU for the kernels of step hopper."""
    reason = "needs a GPU of compute capability 9.0"
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason=reason)(test))


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


def other_forward(q, k, v, score_mod, packing=None):
    if packing is None and unchanged(score_mod):
        return _ran[0](q, k, v, score_mod.causal, score_mod.scale)
    return _ran[1](q, k, v, score_mod, packing)


def other_backward(q, k, v, o, lse, do, dlse, score_mod, deterministic=True):
    arguments = q, k, v, o, lse, do, dlse
    if unchanged(score_mod):
        how = score_mod.causal, score_mod.scale, deterministic
        return _ran[2](*arguments, *how)
    *found, _, dsinks = _ran[3](*arguments, score_mod, None, False)
    return found if score_mod.sinks is None else (*found, dsinks)


def unchanged(score_mod):
    """Whether a ScoreMod asks for no more than a scale and perhaps a causal mask."""
    parts = score_mod.window, score_mod.mask, score_mod.sinks
    return all(x is None for x in parts) and not score_mod.changed
