"""Random histories of calls (histories.py), and that they notice what a plan could
miss.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device import HOPPER
from histories import BROKEN, run

from flashlib import plans


@pytest.fixture(autouse=True)
def no_plans():
    plans.PLANS.clear()
    yield
    plans.PLANS.clear()
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("calls", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_a_call_is_right_whatever_was_called_before(calls):
    run(calls, steps=20)


@pytest.mark.slow
def test_calls_are_right_while_plans_are_forgotten(monkeypatch):
    monkeypatch.setattr(plans, "MOST_KEPT", 3)
    run(200, steps=40)


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(plans, "MOST_KEPT", 4)
    seen = []

    class Counted(dict):
        def __setitem__(self, key, plan):
            super().__setitem__(key, plan)
            seen.append(len(self))

    monkeypatch.setattr(plans, "PLANS", Counted())
    run(10, steps=10)
    assert max(seen) == 4


MARKS = dict.fromkeys(BROKEN, (pytest.mark.slow,)) | {
    "strides": (),
    "alignment": (pytest.mark.gpu,),
    "compiled kernels": (pytest.mark.gpu,),
    "tensor maps": (pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),),
    "zeros": (pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=MARKS[x]) for x in BROKEN])
def test_histories_notice_what_is_broken(name):
    """In a process of its own: a wrong plan may write anywhere."""
    program = Path(__file__).with_name("histories.py")
    arguments = ["--broken", name, "--calls", "4000"]
    found = subprocess.run(
        [sys.executable, program, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode != 0, found.stdout
    assert "usage:" not in found.stderr and "ImportError" not in found.stderr
