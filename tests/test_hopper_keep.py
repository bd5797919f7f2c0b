"""The maximum of a tile's first block kept for later ones, in the kernel for compute
capability 9.0 with its roles as threads. tests/test_hopper.py judges it on a GPU.
"""

import math
from types import SimpleNamespace

import pytest
import roles
import torch
from device import on_cpu
from hopper_threads import FORWARD_MODULES, threads

from flashlib import plans, score_mods, testing
from flashlib.kernels import gluon_keep, hopper
from flashlib.reference import standard

pytestmark = on_cpu
SCALE = 0.1
KEPT, EXACT = True, False


class Noting(roles.Threads):
    """Notes of each launch whether it kept maxima, and the rows that it left."""

    def __getitem__(self, grid):
        launch = super().__getitem__(grid)

        def noted(*arguments, **options):
            launch(*arguments, **options)
            lse = arguments[self.arg_names.index("lse")]
            self.left.append((options["KEEP"], lse.isnan().clone()))

        return noted


@pytest.fixture
def left(monkeypatch):
    """What a Noting kernel notes, which keeps maxima at any length."""
    monkeypatch.setattr(roles, "Threads", Noting)
    threads("forward_kernel", hopper, roles.FORWARD, FORWARD_MODULES, monkeypatch)
    monkeypatch.setattr(gluon_keep, "KEEP_FROM", 0)
    monkeypatch.setattr(gluon_keep, "KEEP_SCORES", 0)
    monkeypatch.setattr(plans, "PLANS", {})  # plans have the kernels of other tests
    hopper.forward_kernel.left = []
    return hopper.forward_kernel.left


def rising(rise, d, T_q=300, T_k=330):
    """q, k and v: the scores of most queries rise by this much over the keys, those of
    the others fall.
    """
    q, k, v = testing.make_qkv(1, 2, T_q, d, T_k=T_k, H_kv=1, dtype=torch.bfloat16)
    k[..., 0] = torch.linspace(0, rise, T_k)
    q[..., 0] = 1.0 / SCALE
    q[:, 1, 150:, 0] = -1.0
    return q, k, v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rise", [0.0, 60.0, 300.0, 5000.0])
@pytest.mark.parametrize("d", [64, 128])
def test_scores_that_rise(d, rise, causal, left):
    """From no overflow over a few rows to nearly all, of which none is left at last."""
    q, k, v = rising(rise, d)
    o, lse = hopper.forward(q, k, v, score_mods.unchanged(causal, SCALE))
    testing.assert_within_budget(q, k, v, o, lse, causal=causal, scale=SCALE)
    assert [kept for kept, _ in left] == [KEPT, EXACT]
    rows = left[0][1]
    assert rows.any() == (rise > 100) and not rows[:, 1, 150:].any()


def test_sums_of_large_values_are_computed_again(left):
    """No weight is large, but their products with v are, before O is divided."""
    q, k, v = rising(60.0, 64)
    v *= 1e30
    o, lse = hopper.forward(q, k, v, score_mods.unchanged(False, SCALE))
    testing.assert_within_budget(q, k, v, o, lse, scale=SCALE)
    assert left[0][1].any() and not left[1][1].any()


@pytest.mark.parametrize("above", [80.0, 115.0])
def test_a_large_sum_that_a_later_block_would_rescale(above, left):
    """The weights of the second block are 2^above, and those of the third, which the
    mask cuts, 2^12.5 times as large. The factor of the first two sums would be 0, but
    they are 2% of the row.
    """
    T = 384
    q, k, v = testing.make_qkv(1, 1, T, 64, dtype=torch.bfloat16)
    q[:], k[:] = 0.0, 0.0
    q[..., 0] = 1.0 / SCALE
    for block, score in enumerate((0.0, above, above + 12.5)):
        k[:, :, 128 * block :][:, :, :128, 0] = score * math.log(2)
    o, lse = hopper.forward(q, k, v, score_mods.unchanged(True, SCALE))
    wide = [x.double() for x in (q, k, v)]
    exact = standard.attention(*wide, causal=True, scale=SCALE)
    # L is about 88, of which float32 has 17 binary digits after the point.
    torch.testing.assert_close(lse.double(), exact[1], rtol=0.0, atol=2**-15)
    torch.testing.assert_close(o.double(), exact[0], rtol=2**-7, atol=2**-8)
    # The mask cuts the third block of this row, whose sum is harmless again after it.
    assert left[0][1][0, 0, 260] == (above > 100)


def test_a_query_with_nan_stays_nan(left):
    q, k, v = rising(0.0, 64)
    q[0, 1, 70, 3] = math.nan
    o, _ = hopper.forward(q, k, v, score_mods.unchanged(False, SCALE))
    for _, rows in left:
        assert rows.nonzero().tolist() == [[0, 1, 70]]
    assert o.isnan().any(-1).nonzero().tolist() == [[0, 1, 70]]


def test_where_it_is_kept(monkeypatch):
    """In bfloat16, in large problems, and where nothing is added to scores."""
    machine = SimpleNamespace(multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: machine)

    causal, full = (score_mods.unchanged(x, SCALE) for x in (True, False))

    def kept(B, T, how, dtype=torch.bfloat16):
        x = torch.empty(B, 25, T, 64, dtype=dtype, device="meta")
        return gluon_keep.keeps_maximum(x, x, how)

    assert kept(4, 2048, causal) and kept(2, 2048, full)
    assert kept(2, 2048, full._replace(softcap=9.0))
    assert not kept(2, 2048, causal) and not kept(1, 2048, full)
    assert not kept(100, 1024, full) and not kept(4, 2048, full, torch.float16)
    sliding = score_mods.unchanged(True, SCALE, 100)
    sloped, biased = (full._replace(**{x: torch.empty(2)}) for x in ("slopes", "bias"))
    for how in (sliding, sloped, biased):
        assert not kept(4, 2048, how)
    packing = score_mods.Packing(None, None, 4096, 4096)
    x = torch.empty(16384, 25, 64, dtype=torch.bfloat16, device="meta")
    assert gluon_keep.keeps_maximum(x, x, full, packing)
    assert not gluon_keep.keeps_maximum(x, x, full, packing._replace(longest_k=1024))
