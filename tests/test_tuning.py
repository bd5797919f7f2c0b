"""The tuning of flash2, ``tune=True``."""

from types import SimpleNamespace

import pytest
import torch
from device import DEVICE

from flashlib import plans, testing
from flashlib.kernels import flash2, tables

pytestmark = pytest.mark.usefixtures("nan_filled")


class Tuning:
    """A device that only notes launches, and a timer that says what it is told."""

    def __init__(self, monkeypatch, capability=90, shared_bytes=232_448):
        self.timed, self.launched, self.ms = [], [], {}
        major, minor = divmod(capability, 10)
        device = SimpleNamespace(
            major=major, minor=minor, shared_memory_per_block_optin=shared_bytes
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
        monkeypatch.setattr(flash2, "INTERPRETED", False)
        monkeypatch.setattr(
            flash2,
            "launch_forward",
            lambda *arguments: self.launched.append(arguments[-1]),
        )
        monkeypatch.setattr(tables, "INTERPRETED", False)
        monkeypatch.setattr(tables, "timed_ms", self.time)
        monkeypatch.setattr(tables, "FASTEST", {})

    def time(self, run):
        run()
        self.timed.append(self.launched.pop())
        return self.ms.get(self.timed[-1], 1.0)

    def forward(self, tune=True, causal=False, d=64, T=256, **kind):
        """The rows that were timed, and the one that was launched in the end."""
        self.timed, self.launched = [], []
        plans.PLANS.clear()
        q, k, v = testing.make_qkv(1, 1, T, d, **{"dtype": torch.float16} | kind)
        flash2.forward(q, k, v, causal, 0.1, tune=tune)
        (launched,) = self.launched
        return self.timed, launched


@pytest.mark.parametrize("d, place", [(64, 1), (128, 3)])
def test_tuning_times_each_tile_that_fits_and_keeps_the_fastest(monkeypatch, d, place):
    """At d = 64 rows for wider heads are candidates; some have the same tiles."""
    tuning = Tuning(monkeypatch)
    fast = flash2.FURTHER_TILES[place]
    tuning.ms[fast] = 0.5
    timed, launched = tuning.forward(d=d)
    rows = flash2.CONFIGURATIONS + flash2.FURTHER_TILES
    rows = [row for row in rows if 90 in row.architectures and row.bits == 16]
    fitting = {row for row in rows if row.d >= d}
    assert set(timed) <= fitting
    tiles = {row[3:8] for row in timed}
    assert tiles == {row[3:8] for row in fitting} and len(tiles) == len(timed)
    assert {row.descriptor for row in timed} == {False, True}
    plain, first = tuning.forward(d=d, tune=False)
    assert launched == fast and plain == [] and timed[0] == first


def test_a_problem_is_timed_once(monkeypatch):
    tuning = Tuning(monkeypatch)
    assert tuning.forward()[0]
    for same in ({}, {"T": 250}, {"T": 129}, {"d": 40}):
        assert not tuning.forward(**same)[0], same
    for other in (
        {"T": 128}, {"T": 257}, {"causal": True}, {"d": 128}, {"layout": "strided"},
        {"dtype": torch.float32},
    ):  # fmt: skip
        assert tuning.forward(**other)[0], other
        assert not tuning.forward(**other)[0], other


@pytest.mark.parametrize(
    "capability, shared_bytes", [(86, 101_376), (75, 65_536), (120, 101_376)]
)
def test_tuning_stays_within_the_device(monkeypatch, capability, shared_bytes):
    tuning = Tuning(monkeypatch, capability, shared_bytes)
    timed, _ = tuning.forward(d=128)
    assert timed and all(
        row.shared_bytes <= shared_bytes and capability in row.architectures
        for row in timed
    )
    tuning = Tuning(monkeypatch, capability, 1000)
    with pytest.raises(ValueError, match="q: expected a GPU with a tile of flash2 for"):
        tuning.forward(d=128)


def test_tuning_leaves_tensors_without_descriptors_alone(monkeypatch):
    timed, _ = Tuning(monkeypatch).forward(layout="unaligned")
    assert timed and not any(row.descriptor for row in timed)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "unaligned"])
def test_what_tuning_chooses_is_right(causal, layout):
    options = {"dtype": torch.bfloat16, "device": DEVICE, "layout": layout}
    q, k, v = testing.make_qkv(1, 4, 1000, 64, H_kv=2, **options)
    for _ in range(2):
        o, lse = flash2.forward(q, k, v, causal, 0.125, tune=True)
        testing.assert_within_budget(q, k, v, o, lse, causal=causal)


def test_random_tensors_may_have_no_rows():
    """Those of a view, whose strides are larger than the elements that it reads."""
    x, specs = torch.zeros(1, 1, 8, 64)[:, :, :0, :16], []
    plans.Plan(specs.append, (x,))
    found = tables.random_like(specs[0])
    assert found.shape == x.shape and found.stride() == x.stride()
