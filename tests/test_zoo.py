"""Wrong kernels, one patched line each, must be rejected; the same harness must pass the real ones."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import DEVICE

from flashlib import testing

pytestmark = pytest.mark.usefixtures("nan_filled")

ZOO = [pytest.param(wrong, id=f"{wrong.step}: {wrong.name}") for wrong in testing.WRONG_KERNELS]
STEPS = ("standard", "gradients", "flash1", "flash2", "backward", "masks")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # some mistakes overflow, and NumPy says so
@pytest.mark.parametrize("wrong", ZOO)
def test_wrong_kernel_is_caught(wrong):
    with testing.wrong_module(wrong) as module, pytest.raises(AssertionError) as caught:
        testing.judge_step(wrong.step, module, wrong.shape, device=DEVICE)
    assert re.match(rf"{wrong.caught_in}\[", str(caught.value)), caught.value


@pytest.mark.parametrize(
    "step, shape", sorted({(wrong.step, wrong.shape) for wrong in testing.WRONG_KERNELS})
)
def test_right_kernel_passes_the_same_harness(step, shape):
    some = next(wrong for wrong in testing.WRONG_KERNELS if wrong.step == step)
    with testing.wrong_module(dataclasses.replace(some, new=some.old)) as module:
        testing.judge_step(step, module, shape, device=DEVICE)


def test_every_step_has_wrong_kernels():
    assert {wrong.step for wrong in testing.WRONG_KERNELS} == set(STEPS)
    names = [(wrong.step, wrong.name) for wrong in testing.WRONG_KERNELS]
    assert len(names) == len(set(names))


def test_a_patch_is_one_line_and_must_fit():
    for wrong in testing.WRONG_KERNELS:
        assert "\n" not in wrong.old + wrong.new and wrong.old != wrong.new
    unfit = dataclasses.replace(testing.WRONG_KERNELS[0], old="tl.")
    with pytest.raises(ValueError, match="expected once"), testing.wrong_module(unfit):
        pass


def test_the_real_modules_stay_as_they_are():
    from flashlib.kernels import flash2, tiles

    before = flash2.load_tile, tiles.visible
    with testing.wrong_module(tile_patch()) as module:
        assert module is not flash2 and module.load_tile is not flash2.load_tile
    from flashlib.kernels import flash2 as flash2_after
    from flashlib.kernels import tiles as tiles_after

    assert (flash2_after.load_tile, tiles_after.visible) == before


def tile_patch():
    """A wrong kernel of flash2 whose mistake is in a piece that all kernels share."""
    return next(
        wrong for wrong in testing.WRONG_KERNELS if (wrong.step, wrong.module) == ("flash2", "tiles")
    )


FIRST_OF_ALL = """
from test_zoo import testing, tile_patch
with testing.wrong_module(tile_patch()) as wrong:
    pass
from flashlib.kernels import flash2, tiles
assert flash2.load_tile is tiles.load_tile is not wrong.load_tile
"""


def test_a_wrong_piece_does_not_stay_in_what_was_imported_first_with_it():
    command = [sys.executable, "-c", FIRST_OF_ALL]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_table_lists_every_wrong_kernel():
    rows = testing.zoo_table().splitlines()
    assert len(rows) == 2 + len(testing.WRONG_KERNELS)
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 7 for row in rows)
