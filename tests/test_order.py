"""The order in which Hopper's backward pass adds parts of dQ, and what its roles
compute, without a GPU: the kernel's own functions run as Python, for one program after
another.
"""

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from device import as_python, on_cpu
from roles import BACKWARD, LISTED, WIDE, Threads

from flashlib import score_mods, testing
from flashlib.kernels import (
    flash2,
    gluon_backward,
    gluon_fused,
    gluon_keys,
    gluon_order,
    gluon_scores,
    hopper_backward,
    hopper_wide,
    masks,
)
from flashlib.masks import prefix, window

BLOCK_K, PADDING = gluon_backward.BLOCK, gluon_backward.PAD
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
    ("take_ticket", "keys_by_formula", "next_turn", "block_of"),
    **vars(gluon_keys) | vars(gluon_order) | {"gl": LANGUAGE},
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
    sizes = gluon_backward.BackwardSizes(
        H_kv, H // H_kv, padded, T_q, T_k, left, B, *order, None
    )
    ticket, programs = itertools.count(), cdiv(T_k, BLOCK_K)
    for _ in range(B * H_kv * programs):
        taken = KERNEL.take_ticket(ticket, programs, sizes, causal)
        block = KERNEL.keys_by_formula(*taken, sizes, BLOCK_Q, BLOCK_K, causal)
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


# -- gradients, with the roles as threads


def threads(monkeypatch):
    """keys_kernel as threads, on a GPU of two multiprocessors."""
    modules = gluon_scores, gluon_backward, gluon_keys, gluon_order, gluon_fused
    modules += (hopper_backward,)
    names = {key: x for module in modules for key, x in vars(module).items()}
    kernel = Threads("keys_kernel", (*BACKWARD, *LISTED), names)
    kernel.arg_names = hopper_backward.keys_kernel.arg_names
    monkeypatch.setattr(hopper_backward, "keys_kernel", kernel)
    few = SimpleNamespace(multi_processor_count=2, L2_cache_size=2**26)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
    return kernel


def judge_gradients(d, T_q, T_k, causal, left, deterministic):
    """Run the backward pass, whose kernels are threads, and judge its results."""
    q, k, v = testing.make_qkv(1, 2, T_q, d, T_k=T_k, H_kv=1, dtype=torch.float16)
    do, dlse = torch.randn(q.shape).half(), torch.randn(q.shape[:3])
    score_mod = score_mods.unchanged(causal, -0.1, left)
    if left is None:
        mask, (o, lse) = {"causal": causal}, flash2.forward(q, k, v, causal, -0.1)
    else:
        mask, (o, lse) = {"window": (left, 0)}, masks.forward(q, k, v, score_mod, None)
    arguments = q, k, v, o, lse, do, dlse, score_mod, deterministic
    found = hopper_backward.backward(*arguments)
    options = mask | {"scale": -0.1, "dlse": dlse}
    testing.assert_gradients_within_budget(q, k, v, do, *found, **options)


@on_cpu
@pytest.mark.parametrize(
    ("T_q", "T_k", "causal", "left", "deterministic"),
    [
        (130, 200, False, None, True),
        (300, 200, True, None, False),
        (300, 300, True, 50, True),
    ],
)
@pytest.mark.parametrize("d", hopper_backward.FUSED)
def test_gradients_of_threads(d, T_q, T_k, causal, left, deterministic, monkeypatch):
    """Barriers, phases, slots and sums, whatever the order of the roles."""
    kernel = threads(monkeypatch)
    judge_gradients(d, T_q, T_k, causal, left, deterministic)
    assert kernel.programs == cdiv(T_k, BLOCK_K)


@on_cpu
@pytest.mark.parametrize(("T_q", "T_k", "left"), [(300, 200, None), (270, 300, 200)])
def test_gradients_of_threads_of_wide_heads(T_q, T_k, left, monkeypatch):
    """The same of the two kernels of d = 256."""
    names = vars(gluon_backward) | vars(gluon_keys) | vars(hopper_wide)
    for name in ("keys_kernel", "queries_kernel"):
        kernel = Threads(name, WIDE, names)
        kernel.arg_names = getattr(hopper_wide, name).arg_names
        monkeypatch.setattr(hopper_wide, name, kernel)
    judge_gradients(256, T_q, T_k, True, left, True)
    assert hopper_wide.keys_kernel.programs == cdiv(T_k, hopper_wide.ROWS.value)
    assert hopper_wide.queries_kernel.programs == 2 * cdiv(T_q, gluon_backward.BLOCK)


@on_cpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", hopper_backward.FUSED)
def test_gradients_of_a_list_of_threads(d, causal, monkeypatch):
    """The same, where blocks of queries come from the list of a mask."""
    kernel = threads(monkeypatch)
    q, k, v = testing.make_qkv(2, 2, 300, d, T_k=200, H_kv=1, dtype=torch.float16)
    do, dlse = torch.randn(q.shape).half(), torch.randn(q.shape[:3])
    mask = prefix(30) & window(120, 60)
    score_mod = score_mods.unchanged(causal, 0.1)._replace(
        mask=score_mods.mask_of(mask)
    )
    o, lse = masks.forward(q, k, v, score_mod, None)
    found = hopper_backward.backward(q, k, v, o, lse, do, dlse, score_mod)
    options = {"causal": causal, "scale": 0.1, "mask": mask, "dlse": dlse}
    testing.assert_gradients_within_budget(q, k, v, do, *found, **options)
    assert kernel.programs == 2 * 2
