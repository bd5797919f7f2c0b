"""The order in which Hopper's backward pass adds parts of dQ, without a GPU: the
kernel's own functions run as Python, for one program after another.
"""

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from device import as_python

from flashlib.kernels import gluon_backward, gluon_order, hopper_backward

BLOCK_K, PADDING = hopper_backward.BLOCK, hopper_backward.PAD
cdiv = hopper_backward.triton.cdiv
LANGUAGE = SimpleNamespace(
    minimum=min,
    maximum=max,
    cdiv=cdiv,
    atomic_add=lambda ticket, one, sem: next(ticket),
)


def rows(start, size, T):
    """The rows of a block of size rows, of which the last may be cut at T."""
    return range(start, min(start + size, T))


KERNEL = as_python(
    ("take_place", "own_keys", "next_turn", "block_of"),
    **vars(gluon_backward) | vars(gluon_order) | {"gl": LANGUAGE},
)


def parts(B, H, H_kv, T_q, T_k, d, causal, left):
    """(count, turn, head, queries, keys, masked) of all parts, one program after
    another in the order of their tickets.
    """
    q, k = (
        torch.empty(B, h, T, d, dtype=torch.bfloat16, device="meta")
        for h, T in ((H, T_q), (H_kv, T_k))
    )
    BLOCK_Q = hopper_backward.FUSED[d][0]
    padded = cdiv(T_q, PADDING) * PADDING
    order = gluon_order.choose_order(q, k, BLOCK_K, causal, left)
    sizes = hopper_backward.BackwardSizes(
        H_kv, H // H_kv, padded, T_q, T_k, left, B, *order
    )
    ticket, programs = itertools.count(), cdiv(T_k, BLOCK_K)
    for _ in range(B * H_kv * programs):
        taken = KERNEL.take_place(ticket, programs, sizes, causal)
        block = KERNEL.own_keys(*taken, sizes, BLOCK_Q, BLOCK_K, causal, d)
        assert block.band + block.full <= block.blocks
        first = sizes.GROUP * block.band * block.upward
        unmasked = range(first, first + sizes.GROUP * block.full)
        for n in range(sizes.GROUP * block.blocks):
            place, count, turn = KERNEL.next_turn(n, 0, sizes, block, BLOCK_Q, BLOCK_K)
            head, row = divmod(place, padded)
            queries, keys = rows(row, BLOCK_Q, T_q), rows(block.col, BLOCK_K, T_k)
            yield count, turn, head, queries, keys, n not in unmasked


def problem(rng, mask, monkeypatch):
    """B, H, H_kv, T_q, T_k and left, for a GPU that is large or not."""
    machine = SimpleNamespace(
        multi_processor_count=rng.choice((3, 132)), L2_cache_size=rng.choice((0, 2**26))
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: machine)
    B, H_kv, group = rng.randint(1, 3), rng.randint(1, 4), rng.choice((1, 2, 3, 8))
    # Blocks have 64 or 128 rows: lengths at their ends, one to each side, and between.
    longest, step = rng.choice((2, 10, 40)), rng.choice((64, 61))
    T_q, T_k, left = (
        max(0, rng.randint(0, longest) * step + rng.randint(-1, 1)) for _ in range(3)
    )
    left = left if mask == "window" else None
    return B, H_kv * group, H_kv, max(1, T_q), max(1, T_k), left


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("d", hopper_backward.FUSED)
def test_no_program_waits_for_a_later_one(d, mask, monkeypatch):
    """Every part is added once, and blocks that are not masked need no mask."""
    rng = random.Random(f"{d}, {mask}")
    for _ in range(100):
        B, H, H_kv, T_q, T_k, left = problem(rng, mask, monkeypatch)
        sizes = B, H, H_kv, T_q, T_k, d, mask != "full", left
        counts, added, offset = Counter(), set(), T_k - T_q
        # Key j is visible to query i where earliest <= j - i <= latest.
        earliest = -T_q if left is None else offset - left
        latest = T_k if mask == "full" else offset
        for count, turn, head, queries, keys, masked in parts(*sizes):
            assert counts[count] == turn, sizes
            counts[count] += 1
            assert (head, queries, keys) not in added, sizes
            added.add((head, queries, keys))
            nearest, farthest = keys[0] - queries[-1], keys[-1] - queries[0]
            assert masked or earliest <= nearest <= farthest <= latest, sizes
        BLOCK_Q = hopper_backward.FUSED[d][0]
        for row, col in itertools.product(
            range(0, T_q, BLOCK_Q), range(0, T_k, BLOCK_K)
        ):
            queries, keys = rows(row, BLOCK_Q, T_q), rows(col, BLOCK_K, T_k)
            if keys[0] - queries[-1] <= latest and keys[-1] - queries[0] >= earliest:
                assert all((h, queries, keys) in added for h in range(B * H)), sizes
