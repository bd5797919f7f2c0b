"""Hopper's kernel for a ring: which blocks its producer loads and its consumers mask.

No CPU runs Gluon. The functions that decide about blocks compute with integers only, so
Python runs them here, with a stand-in for Gluon's functions.
"""

import itertools
import types

import numpy as np
import pytest

from flashlib.kernels import gluon_forward, gluon_tasks, hopper_ring
from flashlib.reference.ring import zigzag_positions
from flashlib.ring_passes import parts_of

CONSUMERS = 2
HEADS, GROUP, D = 4, 2, 64


class Counter:
    """The tiles that one program draws."""

    def __init__(self):
        self.drawn = -1

    def draw(self, *_, **__):
        self.drawn += 1
        return self.drawn


def stand_ins(loads):
    """Names that the kernel's functions use, of which loads records the copies."""

    gl = types.SimpleNamespace(
        cdiv=lambda a, b: -(-a // b),
        where=lambda x, a, b: np.where(x, a, b) if isinstance(x, np.ndarray) else
        (a if x else b),
        minimum=np.minimum,
        maximum=np.maximum,
        static_range=range,
        program_id=lambda axis: 0,
        num_programs=lambda axis: 1,
        atomic_add=Counter().draw,
        int64=None,
    )  # fmt: skip
    return {
        "gl": gl,
        "ROWS": 64,
        "RingTask": hopper_ring.RingTask,
        "Blocks": hopper_ring.Blocks,
        "range": lambda *x: range(*map(int, x)),
        "refill": lambda x, b, h, row, *_: loads.append((x, int(b), int(h), int(row))),
        "wait_for": lambda flag, timeout: loads.append(("flag", int(flag))),
        "push": lambda n, *_: loads.append(("tile", int(n))),
    }


def functions(loads):
    """The kernel's functions in Python."""
    names = stand_ins(loads)
    sources = {"block_counts": gluon_forward, "head_and_block": gluon_tasks}
    for name in (
        "task_at", "blocks_of", "load_keys", "load_whole", "produce", "masked_block",
        "block_counts", "head_and_block",
    ):  # fmt: skip
        code = getattr(sources.get(name, hopper_ring), name).fn.__code__
        names[name] = types.FunctionType(code, names)
    return types.SimpleNamespace(**names)


class Flag(np.int64):
    """A flag's number, which the kernel converts to an address."""

    def to(self, dtype):
        return self


class Pointer:
    """Where the flags begin."""

    def __add__(self, n):
        return Flag(n)


def ring(BLOCK_K):
    slots = types.SimpleNamespace
    return slots(
        q=slots(slots=np.empty((CONSUMERS, 64, D))),
        k=slots(slots=np.empty((2, BLOCK_K, D))),
        v=None,
        queue=None,
    )


def sizes_of(rank, size, rows_q, rows_k, chunks, parts):
    per_head = chunks * -(-rows_q // (64 * CONSUMERS))
    heads_kv = HEADS // GROUP
    return hopper_ring.RingSizes(
        HEADS * per_head, HEADS, HEADS // parts, GROUP, rows_q, rows_k, rank, size,
        parts, heads_kv // parts, 10**9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "rows_q", "rows_k", "causal", "BLOCK_K", "parts"),
    [
        (2, 256, 256, True, 128, 1), (4, 256, 256, True, 128, 2),
        (3, 130, 130, True, 128, 1), (3, 130, 130, True, 64, 2),
        (2, 40, 40, True, 128, 2), (4, 1, 1, True, 64, 1), (2, 192, 192, True, 64, 1),
        (3, 100, 256, False, 128, 2), (4, 70, 130, False, 64, 1),
        (2, 129, 40, False, 128, 2),
    ],
)  # fmt: skip
def test_every_visible_pair_is_computed_once(
    size, rows_q, rows_k, causal, BLOCK_K, parts
):
    chunks, ragged = 2 if causal else 1, rows_k % BLOCK_K != 0
    keys = chunks * rows_k
    for rank in range(size):
        sizes, loads = sizes_of(rank, size, rows_q, rows_k, chunks, parts), []
        run = functions(loads)
        run.produce(
            "q", ("k", "v"), "others", Pointer(), None, sizes, ring(BLOCK_K), causal,
            ragged, chunks,
        )  # fmt: skip
        starts = [n for n, load in enumerate(loads) if load[0] == "tile"]
        assert [loads[n][1] for n in starts] == list(range(sizes.tiles + 1))
        counted = np.zeros((HEADS, chunks * rows_q, size, keys), int)
        for start, end in itertools.pairwise(starts):
            n, tile = loads[start][1], loads[start + 1 : end]
            count_tile(run, n, tile, sizes, counted, causal, BLOCK_K)
        wanted = np.ones(counted.shape, int)
        if causal:
            places = [
                zigzag_positions(keys * size, x, size).numpy() for x in range(size)
            ]
            for source in range(size):
                seen = places[source][None] <= places[rank][:, None]
                wanted[:, :, source] = seen
        assert (counted == wanted).all()


def count_tile(run, n, loads, sizes, counted, causal, BLOCK_K):
    """Add the pairs of tile n, as the consumers mask the blocks that were loaded."""
    chunks, BLOCK_Q = 2 if causal else 1, 64 * CONSUMERS
    task = run.task_at(n, sizes, chunks, BLOCK_Q)
    blocks = run.blocks_of(task, sizes, causal, BLOCK_Q, BLOCK_K)
    queries = [load for load in loads if load[0] == "q"]
    assert queries == [
        ("q", task.h, task.chunk, task.row + c * 64) for c in range(CONSUMERS)
    ]
    i = task.row + np.arange(BLOCK_Q)
    real = i < sizes.rows_q
    flags, number = set(), 0
    pairs = [load for load in loads if load[0] != "q"]
    while pairs:
        first = pairs.pop(0)
        if first[0] == "flag":
            flags.add(first[1])
            continue
        source, head, chunk, row = where(first, pairs.pop(0), sizes, flags, task)
        seen = np.full(BLOCK_Q, sizes.rows_k)
        if number >= blocks.unmasked:
            col, seen = run.masked_block(
                number - blocks.unmasked, i, blocks, sizes, causal, BLOCK_K
            )
            assert col == row
        else:
            assert row + BLOCK_K <= sizes.rows_k
        for j in range(row, row + BLOCK_K):
            visible = real & (j < seen)
            if visible.any():
                at = task.chunk * sizes.rows_q + i[visible]
                counted[task.h, at, source, chunk * sizes.rows_k + j] += 1
        assert head == task.h // GROUP
        number += 1
    assert number == blocks.unmasked + blocks.masked and number > 0


def where(of_k, of_v, sizes, flags, task):
    """(rank, head, chunk, row) of the block of keys; the values are of the same."""
    name, head, chunk, row = of_k
    assert of_v[2:] == (chunk, row)
    if name == "k":
        assert of_v[:2] == ("v", head)
        return sizes.rank, head, chunk, row
    assert name == of_v[0] == "others" and of_v[1] == head + sizes.part_heads
    number, within = divmod(head, 2 * sizes.part_heads)
    assert number in flags and within < sizes.part_heads
    step, part = divmod(number, sizes.parts)
    source = (sizes.rank - 1 - step) % sizes.size
    return source, part * sizes.part_heads + within, chunk, row


def test_a_shard_arrives_in_parts_that_are_worth_a_copy():
    assert parts_of(16, 2**25 - 1) == 1
    assert parts_of(16, 2**25) == 2 and parts_of(16, 2**30) == 4
    assert parts_of(6, 2**30) == 2 and parts_of(3, 2**30) == 1


def test_no_visible_key_is_left_to_a_flag_that_nobody_sets():
    sizes, loads = sizes_of(1, 4, 256, 256, 2, 2), []
    functions(loads).produce(
        "q", ("k", "v"), "others", Pointer(), None, sizes, ring(128), True, False, 2
    )
    assert {x[1] for x in loads if x[0] == "flag"} == set(range(3 * sizes.parts))
