"""The kernels that a chapter changes one idea at a time: each is right, and each does what its step says."""

import itertools
import math
from collections import Counter

import pytest
import torch
from cases import CUDA, DEVICE, FACTORS, each_level, pairwise

from flashlib import testing
from flashlib.kernels import flash2
from flashlib.kernels.steps import flash2 as steps
from flashlib.reference.standard import causal_mask

pytestmark = pytest.mark.usefixtures("nan_filled")
CASES = pairwise(FACTORS, seed=7) if CUDA else each_level(FACTORS, seed=1)
interpreted = pytest.mark.skipif(CUDA, reason="counts what the interpreter calls")


@pytest.fixture(params=steps.STEPS)
def step(request):
    return request.param


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case, step):
    q, k, v = case.inputs()
    before = [x.clone() for x in (q, k, v)]
    o, lse = steps.forward(q, k, v, case.causal, case.scale_value, step)
    testing.assert_within_budget(q, k, v, o, lse, causal=case.causal, scale=case.scale)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize("T_q, T_k", [(130, 3), (130, 66), (65, 64), (64, 65), (1, 130), (130, 1), (128, 64)])
def test_causal_mask_at_the_edges_of_blocks(step, T_q, T_k):
    q, k, v = testing.make_qkv(1, 2, T_q, 16, T_k=T_k, device=DEVICE)
    o, lse = steps.forward(q, k, v, True, 0.25, step)
    testing.assert_within_budget(q, k, v, o, lse, causal=True, scale=0.25)
    blind = max(T_q - T_k, 0)
    assert (o[:, :, :blind] == 0).all() and (lse[:, :, :blind] == -math.inf).all()


@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 0, 5, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty(step, sizes, causal):
    B, H, T_q, T_k = sizes
    q, k, v = (torch.zeros(B, H, T, 16, device=DEVICE) for T in (T_q, T_k, T_k))
    o, lse = steps.forward(q, k, v, causal, 0.25, step)
    assert o.shape == (B, H, T_q, 16) and (o == 0).all()
    assert lse.shape == (B, H, T_q) and (lse == -math.inf).all()


def test_an_unknown_step_is_refused():
    q, k, v = testing.make_qkv(1, 1, 4, 16, device=DEVICE)
    with pytest.raises(ValueError, match=r"step: expected one of swapped, .*, skipping, got 'x'"):
        steps.forward(q, k, v, False, 0.25, "x")


@pytest.mark.skipif(CUDA, reason="bfloat16 is widened on a CPU only")
def test_bfloat16_on_a_cpu_is_float32_rounded(step):
    q, k, v = testing.make_qkv(1, 2, 17, 40, T_k=33, dtype=torch.bfloat16)
    o, lse = steps.forward(q, k, v, True, 0.2, step)
    o32, lse32 = steps.forward(q.float(), k.float(), v.float(), True, 0.2, step)
    assert torch.equal(o, o32.bfloat16()) and torch.equal(lse, lse32)


@interpreted
@pytest.mark.parametrize("causal", [False, True])
def test_what_does_not_change_the_arithmetic_changes_no_bit(causal):
    """Who computes a block, and which blocks are passed over, leave every number as it is."""
    q, k, v = testing.make_qkv(1, 2, 130, 16, T_k=150, H_kv=1)
    found = {step: steps.forward(q, k, v, causal, 0.25, step) for step in steps.STEPS}
    found["flash2"] = flash2.forward(q, k, v, causal, 0.25)
    for a, b in (("swapped", "parallel"), ("deferred", "skipping"), ("skipping", "flash2")):
        assert all(torch.equal(x, y) for x, y in zip(found[a], found[b], strict=True)), (a, b)
    assert not torch.equal(found["parallel"][0], found["deferred"][0])


# ------------------------------------------------------------------------------------ what a step does

BLOCK_Q, BLOCK_K, D, D_V = 16, 32, 64, 128


def counted(monkeypatch, step, T_q, T_k, causal, heads=2):
    """Launch a step and count: tiles of Q, K, V that are read, blocks folded in with and without a mask."""
    counts, original_load, original_fold = Counter(), steps.load_tile, steps.online_softmax
    of = {(BLOCK_Q, D): "q", (BLOCK_K, D): "k", (BLOCK_K, D_V): "v"}

    def load_tile(*arguments):
        counts[of[tuple(int(x) for x in arguments[-2:])]] += 1
        return original_load(*arguments)

    def online_softmax(*arguments):
        counts["masked" if arguments[-1] else "unmasked"] += 1
        return original_fold(*arguments)

    monkeypatch.setattr(steps, "load_tile", load_tile)
    monkeypatch.setattr(steps, "online_softmax", online_softmax)
    q, k, v = testing.make_qkv(1, heads, T_q, D, T_k=T_k, d_v=D_V)
    o, m = torch.empty(1, heads, T_q, D_V), torch.empty(1, heads, T_q)
    l = torch.empty_like(m) if step in ("swapped", "parallel") else None
    steps.launch(q, k, v, o, m, l, causal, 0.125, step, (BLOCK_Q, BLOCK_K, 4, 1))
    lse = m if l is None else (m + torch.log2(l)) * math.log(2)
    testing.assert_within_budget(q, k, v, o, lse, causal=causal)
    return counts


def by_hand(T_q, T_k, causal):
    """Blocks that some query sees, and those of them that every query of the block does not see in full."""
    mask = causal_mask(T_q, T_k) if causal else torch.ones(T_q, T_k, dtype=torch.bool)
    starts = itertools.product(range(0, T_q, BLOCK_Q), range(0, T_k, BLOCK_K))
    tiles = [mask[i : i + BLOCK_Q, j : j + BLOCK_K] for i, j in starts]
    read = [tile for tile in tiles if tile.any()]
    return len(tiles), len(read), sum(not tile.all() or tile.shape[1] < BLOCK_K for tile in read)


@interpreted
@pytest.mark.parametrize(
    "T_q, T_k", [(64, 64), (70, 70), (96, 64), (64, 96), (130, 40), (40, 130), (16, 32), (1, 70), (70, 1)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_that_are_read_and_masked(monkeypatch, step, T_q, T_k, causal):
    heads = 2
    counts = counted(monkeypatch, step, T_q, T_k, causal, heads)
    everything, seen, partly = (heads * n for n in by_hand(T_q, T_k, causal))
    if step == "skipping":
        assert (counts["masked"], counts["unmasked"]) == (partly, seen - partly)
    elif causal:
        assert (counts["masked"], counts["unmasked"]) == (everything, 0)
    else:
        assert (counts["masked"], counts["unmasked"]) == (partly, everything - partly)
    assert counts["k"] == counts["v"] == counts["masked"] + counts["unmasked"]
    assert counts["q"] == heads * math.ceil(T_q / BLOCK_Q)


def test_skipping_reads_about_half():
    """The shapes above are small; here the band is a small part."""
    everything, seen, partly = by_hand(640, 640, True)
    assert (everything, seen, partly) == (40 * 20, 420, 40)


@interpreted
def test_one_program_a_head_then_one_a_block(monkeypatch, step):
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(steps, "forward_kernel", Kernel())
    q, k, v = testing.make_qkv(2, 3, 130, 16)
    steps.forward(q, k, v, True, 0.25, step)
    assert grids == [(6,)] if step == "swapped" else [(18,)]


@interpreted
def test_what_is_stored_for_a_row(step):
    """Two statistics before the division is deferred: the maximum in base 2 and a normaliser, in which the
    weight of the largest score is one. Then one, the log-sum-exp.
    """
    T = 40
    q, k, v = testing.make_qkv(1, 1, T, D, d_v=D_V)
    o, m = torch.empty(1, 1, T, D_V), torch.empty(1, 1, T)
    l = torch.empty_like(m) if step in ("swapped", "parallel") else None
    steps.launch(q, k, v, o, m, l, False, 0.125, step, (BLOCK_Q, BLOCK_K, 4, 1))
    if l is not None:
        assert ((l >= 1) & (l <= T)).all()
    lse = m if l is None else (m + torch.log2(l)) * math.log(2)
    testing.assert_within_budget(q, k, v, o, lse)
