"""FlashAttention's forward pass on the clock of :mod:`flashlib.timeline`, in the steps
of the chapter *Hopper* (``kernels/hopper.py``).

    trace = forward("turns", [8], d=64, block_k=128)
    trace.clocks, trace.busy("tensor cores")

The other models count the words that move; this one counts the clocks in which they
move and are computed with. Needs the standard library and ``flashlib.timeline``.
"""

from fractions import Fraction
from itertools import chain
from typing import NamedTuple

from flashlib import timeline
from flashlib.timeline import Arrive, Compute, Copy, Finish, Issue, Pause, Wait

from .forms import check_sizes

STEPS = ("copies", "specialized", "overlapped", "turns", "persistent")
ROWS = 64  # queries of a warp group: the rows of one wgmma


class Work(NamedTuple):
    """Clocks for one block of keys: one product and one softmax of one group, the
    copies of K (or V) and of a group's queries.
    """

    product: Fraction
    softmax: Fraction
    copy: Fraction
    queries: Fraction


def work(d, block_k, machine=timeline.HOPPER, rest=False):
    """The clocks of :class:`Work` for head dimension d, 64 queries a group and block_k
    keys, two bytes each.

    rest: whether the softmax counts, one after the other, the multiply-add, the
    maximum, the sum and the rounding of each score and the multiplications that rescale
    O (128, 64, 128, 64 and 128 a clock), and not the exponentials alone. Raises
    ValueError for a size below 1.
    """
    check_sizes(d=d, block_k=block_k)
    softmax = Fraction(ROWS * block_k, machine.exponentials)
    if rest:
        softmax += ROWS * (block_k * Fraction(3, 64) + Fraction(d, 128))
    return Work(
        Fraction(2 * ROWS * block_k * d, machine.flops),
        softmax,
        Fraction(2 * block_k * d) / machine.copy_bytes,
        Fraction(2 * ROWS * d) / machine.copy_bytes,
    )


class SharedMemory:
    """A ring of slots for K, one for V, and a slot for each group of queries."""

    def __init__(self, groups, slots):
        def ring(kind, name, *count):
            names = {x: [f"{x}{name}[{i}]" for i in range(slots)] for x in "KV"}
            return {x: [kind(name, *count) for name in names[x]] for x in names}

        self.slots = ring(timeline.Slot, "")
        self.ready = ring(timeline.Barrier, " ready")
        self.free = ring(timeline.Barrier, " free", groups)
        self.queries = [timeline.Slot(f"Q[{g}]") for g in range(groups)]
        self.queries_ready = [timeline.Barrier(f"Q ready[{g}]") for g in range(groups)]
        self.queries_free = [timeline.Barrier(f"Q free[{g}]") for g in range(groups)]
        self.turn = [timeline.Barrier(f"turn[{g}]") for g in range(groups)]
        self.turn[0].arrive()  # nobody passes the first turn on
        self.together = timeline.Barrier("together", groups)
        self.groups, self.size = groups, slots

    def place(self, x, block):
        """Slot, its two barriers, and parity of the phase, of a block of K or V."""
        i, phase = block % self.size, block // self.size % 2
        return self.slots[x][i], self.ready[x][i], self.free[x][i], phase

    def copy(self, x, block, clocks):
        """The copy of a block into its slot."""
        slot, ready, _, _ = self.place(x, block)
        return Copy(f"{x}{block}", clocks, ready, slot, self.groups)

    def copy_queries(self, tile, group, clocks, readers):
        """The copy of a group's queries of a tile."""
        slot, ready = self.queries[group], self.queries_ready[group]
        return Copy(f"Q{tile}.{group}", clocks, ready, slot, readers)


def producer(shared, tiles, costs):
    """The producer's program: queries and blocks of keys and values, each when its slot
    is free.
    """
    block = 0
    for tile, blocks in enumerate(tiles):
        for group in range(shared.groups):
            yield Wait(shared.queries_free[group], tile % 2 ^ 1)
            yield shared.copy_queries(tile, group, costs.queries, blocks)
        for _ in range(blocks):
            for x in "KV":
                _, _, free, phase = shared.place(x, block)
                yield Wait(free, phase ^ 1)
                yield shared.copy(x, block, costs.copy)
            block += 1


def scores(shared, group, tile, block, costs):
    """Wait for a block of keys and issue its product with the queries."""
    slot, ready, _, phase = shared.place("K", block)
    yield Wait(ready, phase)
    reads = {shared.queries[group]: f"Q{tile}.{group}", slot: f"K{block}"}
    yield Issue("QK", f"{block}", costs.product, reads)


def output(shared, block, costs):
    """Wait for a block of values and issue its product with the weights."""
    slot, ready, _, phase = shared.place("V", block)
    yield Wait(ready, phase)
    yield Issue("PV", f"{block}", costs.product, {slot: f"V{block}"})


def release(shared, x, block):
    """Say that this group has read the block."""
    return Arrive(shared.place(x, block)[2])


def in_step(shared, group, blocks, costs, machine):
    """A group of the step `copies`: group 0 asks, all meet after each block."""
    yield Pause("launch", machine.launch)
    if group == 0:
        for other in range(shared.groups):
            yield shared.copy_queries(0, other, costs.queries, blocks)
        for x in "KV":
            yield shared.copy(x, 0, costs.copy)
    yield Wait(shared.queries_ready[group], 0)
    for block in range(blocks):
        if group == 0 and block + 1 < blocks:
            for x in "KV":
                yield shared.copy(x, block + 1, costs.copy)
        yield from scores(shared, group, 0, block, costs)
        yield Finish()
        yield Compute(f"S{block}", costs.softmax)
        yield from output(shared, block, costs)
        yield Finish()
        yield Arrive(shared.together)
        yield Wait(shared.together, block % 2)
    yield Pause("finish", machine.finish)


def one_by_one(shared, group, blocks, costs, machine, late=0):
    """A group of the step `specialized`: scores, softmax, output, block after block."""
    yield Pause("launch", machine.launch + late)
    yield Wait(shared.queries_ready[group], 0)
    for block in range(blocks):
        yield from scores(shared, group, 0, block, costs)
        yield Finish()
        yield release(shared, "K", block)
        yield Compute(f"S{block}", costs.softmax)
        yield from output(shared, block, costs)
        yield Finish()
        yield release(shared, "V", block)
    yield Pause("finish", machine.finish)


def overlapping(shared, group, tiles, costs, machine, turns="", own=True, late=0):
    """A group of the other steps: the scores of a block are issued before the output of
    the one before.

    turns       "" for none; else products are issued in turns, and a turn is passed on
                when they are "issued" or when the "scores" are there
    own         whether the output has a place of its own, so that the queries' slot is
                free early
    """
    yield Pause("launch", machine.launch + late)
    block, turn = 0, 0
    for tile, blocks in enumerate(tiles):
        yield Wait(shared.queries_ready[group], tile % 2)
        yield from scores(shared, group, tile, block, costs)
        yield Finish()
        yield release(shared, "K", block)
        yield Compute(f"S{block}", costs.softmax)
        block += 1
        for _ in range(1, blocks):
            if turns:
                yield Wait(shared.turn[group], turn % 2)
            yield from scores(shared, group, tile, block, costs)
            yield from output(shared, block - 1, costs)
            if turns == "issued":
                yield Arrive(shared.turn[(group + 1) % shared.groups])
            yield Finish(1)
            if turns == "scores":
                yield Arrive(shared.turn[(group + 1) % shared.groups])
            yield release(shared, "K", block)
            yield Compute(f"S{block}", costs.softmax)
            yield Finish()
            yield release(shared, "V", block - 1)
            block, turn = block + 1, turn + 1
        if own:
            yield Arrive(shared.queries_free[group])
        yield from output(shared, block - 1, costs)
        yield Finish()
        yield release(shared, "V", block - 1)
        yield Pause("finish", machine.finish)
        if not own:
            yield Arrive(shared.queries_free[group])


def forward(step, tiles, *, d, block_k, groups=2, slots=2, rest=False,
            machine=timeline.HOPPER, shared=True, turns="scores", own=True,
            late=0):  # fmt: skip
    """Attention of one multiprocessor, in one of the STEPS; returns its
    :class:`~flashlib.timeline.Trace`.

    tiles       for each tile of 64 * groups queries that the multiprocessor gets, its
                blocks of keys
    d, block_k  head dimension and keys of a block; elements have two bytes
    groups      of warps that compute, each with 64 queries
    slots       of the ring of keys, and of that of values; `copies` always has two
    rest        as for :func:`work`
    shared      as for :func:`run`
    turns       when a turn is passed on in the step `turns`: "scores" or "issued"
    own         as for :func:`overlapping`
    late        clocks by which group 1 starts later, in the steps that have a producer

    The first four steps start a program for each tile, one after the other.
    `persistent` is `overlapped` in one program for all tiles, whose producer runs ahead
    into the next one. Raises ValueError for an unknown step or an unknown moment for
    turns, for no tile and for a size below 1; Deadlock and Hazard as :func:`run` does.
    """
    if step not in STEPS:
        raise ValueError(f"step: expected one of {', '.join(STEPS)}, got {step!r}")
    if turns not in ("issued", "scores"):
        raise ValueError(f"turns: expected 'issued' or 'scores', got {turns!r}")
    tiles = list(tiles)
    if not tiles or min(tiles) < 1:
        raise ValueError(f"tiles: expected tiles of at least one block, got {tiles}")
    check_sizes(groups=groups, slots=slots)
    costs = work(d, block_k, machine, rest)
    intervals, start = [], Fraction(0)
    for walk in [tiles] if step == "persistent" else [[blocks] for blocks in tiles]:
        memory = SharedMemory(groups, 2 if step == "copies" else slots)
        agents = {}
        if step != "copies":
            start_up = Pause("launch", machine.launch)
            agents["producer"] = chain([start_up], producer(memory, walk, costs))
        for g in range(groups):
            behind = late if g == 1 else 0
            if step == "copies":
                program = in_step(memory, g, walk[0], costs, machine)
            elif step == "specialized":
                program = one_by_one(memory, g, walk[0], costs, machine, behind)
            else:
                order = turns if step == "turns" else ""
                options = (costs, machine, order, own, behind)
                program = overlapping(memory, g, walk, *options)
            agents[f"group {g}"] = program
        trace = timeline.run(agents, machine, shared)
        for x in trace.intervals:
            intervals.append(x._replace(begin=x.begin + start, end=x.end + start))
        start += trace.clocks
    return timeline.Trace(intervals, start)
