"""Every wrong kernel of the zoo is caught, and the real kernels pass the same judge."""

import importlib
import re

import pytest
from device import DEVICE, HOPPER

from flashlib import zoo
from flashlib.kernels import hopper, hopper_backward, masks, masks_backward

pytestmark = pytest.mark.usefixtures("nan_filled")

RUNNABLE = [x for x in zoo.WRONG_KERNELS if HOPPER or "hopper" not in x.step]


# NumPy warns where a mistake overflows.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("wrong", RUNNABLE, ids=str)
def test_wrong_kernel_is_caught(wrong):
    with zoo.wrong_module(wrong) as module, pytest.raises(AssertionError) as caught:
        zoo.judge(wrong.step, module, wrong.shape, DEVICE)
    assert re.match(rf"{wrong.caught_in}\[", str(caught.value)), caught.value


@pytest.mark.parametrize("step, shape", sorted({(w.step, w.shape) for w in RUNNABLE}))
def test_right_kernel_passes_the_same_judge(step, shape):
    module = importlib.import_module(f"flashlib.kernels.{step}")
    zoo.judge(step, module, shape, DEVICE)


@pytest.mark.parametrize("step", [hopper, hopper_backward])
def test_the_judge_calls_hoppers_passes_as_they_are(step, monkeypatch):
    """Without a Hopper GPU, other kernels stand in, which take the same arguments."""

    def backward(q, k, v, o, lse, do, dlse, score_mod, deterministic=True):
        return masks_backward.backward(q, k, v, o, lse, do, dlse, score_mod)[:3]

    monkeypatch.setattr(hopper, "forward", masks.forward)
    monkeypatch.setattr(hopper_backward, "backward", backward)
    zoo.judge(step.__name__.rpartition(".")[2], step, "hopper, causal", DEVICE)


def test_every_entry_fits_its_kernel():
    assert len(set(map(str, zoo.WRONG_KERNELS))) == len(zoo.WRONG_KERNELS)
    for wrong in zoo.WRONG_KERNELS:
        source = (zoo.KERNELS / wrong.file).read_text()
        assert wrong.shape in zoo.SHAPES
        patched = zoo.replace_once(source, wrong.old, wrong.new)
        assert compile(patched, wrong.file, "exec")


def test_a_patch_must_fit_exactly_once():
    assert zoo.replace_once("x = f(\n    a,\n    b,\n)", "f(a, b)", "g") == "x = g"
    for source in ("", "f(a, b) + f(a, b)"):
        with pytest.raises(ValueError, match="expected 'f\\(a, b\\)' once"):
            zoo.replace_once(source, "f(a, b)", "g")
