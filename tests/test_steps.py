"""The kernels that change one idea at a time: each does what its step says."""

import itertools
import math
from collections import Counter

import pytest
import torch
from device import DEVICE, on_cpu
from expected import same

from flashlib import testing
from flashlib.kernels import flash2, tables
from flashlib.kernels.steps import flash2 as steps
from flashlib.reference.standard import causal_mask

pytestmark = pytest.mark.usefixtures("nan_filled")


@pytest.fixture(params=steps.STEPS)
def step(request):
    return request.param


def test_an_unknown_step_is_refused():
    q, k, v = testing.make_qkv(1, 1, 4, 16, device=DEVICE)
    message = r"step: expected one of swapped, .*, skipping, got 'x'"
    with pytest.raises(ValueError, match=message):
        steps.forward(q, k, v, False, 0.25, "x")


@on_cpu
@pytest.mark.parametrize("causal", [False, True])
def test_what_does_not_change_the_arithmetic_changes_no_bit(causal):
    """Such as which program computes a block, and which blocks are skipped."""
    q, k, v = testing.make_qkv(1, 2, 130, 16, T_k=150, H_kv=1)
    found = {step: steps.forward(q, k, v, causal, 0.25, step) for step in steps.STEPS}
    found["flash2"] = flash2.forward(q, k, v, causal, 0.25)
    for a, b in (
        ("swapped", "parallel"),
        ("deferred", "skipping"),
        ("skipping", "flash2"),
    ):
        assert same(found[a], found[b]), (a, b)
    assert not torch.equal(found["parallel"][0], found["deferred"][0])


BLOCK_Q, BLOCK_K, D, D_V = 16, 32, 64, 128


def counted(monkeypatch, step, T_q, T_k, causal, heads):
    """Launch a step with these blocks and judge its results; count the tiles of Q, K, V
    read, and the blocks folded with and without mask.
    """
    counts, load, fold = Counter(), steps.load_tile, steps.online_softmax
    of = {(BLOCK_Q, D): "q", (BLOCK_K, D): "k", (BLOCK_K, D_V): "v"}

    def load_tile(*arguments):
        counts[of[tuple(int(x) for x in arguments[-2:])]] += 1
        return load(*arguments)

    def online_softmax(*arguments):
        counts["masked" if arguments[-1] else "unmasked"] += 1
        return fold(*arguments)

    monkeypatch.setattr(steps, "load_tile", load_tile)
    monkeypatch.setattr(steps, "online_softmax", online_softmax)
    q, k, v = testing.make_qkv(1, heads, T_q, D, T_k=T_k, d_v=D_V)
    o, m = torch.empty(1, heads, T_q, D_V), torch.empty(1, heads, T_q)
    l = torch.empty_like(m) if step in ("swapped", "parallel") else None
    row = tables.INTERPRETER._replace(BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K)
    steps.launch_forward(q, k, v, o, m, l, causal, 0.125, step, row)
    lse = m if l is None else (m + torch.log2(l)) * math.log(2)
    testing.assert_within_budget(q, k, v, o, lse, causal=causal)
    return counts


def by_hand(T_q, T_k, causal):
    """The number of blocks, of those seen, and of those seen only in part."""
    mask = causal_mask(T_q, T_k) if causal else torch.ones(T_q, T_k, dtype=torch.bool)
    starts = itertools.product(range(0, T_q, BLOCK_Q), range(0, T_k, BLOCK_K))
    tiles = [mask[i : i + BLOCK_Q, j : j + BLOCK_K] for i, j in starts]
    read = [tile for tile in tiles if tile.any()]
    return (
        len(tiles),
        len(read),
        sum(not tile.all() or tile.shape[1] < BLOCK_K for tile in read),
    )


@on_cpu
@pytest.mark.parametrize(
    "T_q, T_k", [(64, 64), (70, 70), (64, 96), (130, 40), (40, 130), (1, 70), (70, 1)]
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


@on_cpu
def test_one_program_a_head_then_one_a_block(monkeypatch, step):
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(steps, "forward_kernel", Kernel())
    q, k, v = testing.make_qkv(2, 3, 130, 16)
    steps.forward(q, k, v, True, 0.25, step)
    assert grids == ([(6,)] if step == "swapped" else [(18,)])
