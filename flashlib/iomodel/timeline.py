"""Who waits for whom inside one multiprocessor: agents, units, barriers with phases, a clock.

    trace = run({"producer": producer(), "group 0": consumer(0)})
    trace.clocks, trace.busy("tensor cores"), trace.intervals

An *agent* is a Python generator that yields what it does next: :class:`Copy`, :class:`Issue`,
:class:`Finish`, :class:`Compute`, :class:`Pause`, :class:`Wait`, :class:`Arrive`. Copies and products run on
their own once they are issued; everything else holds up its agent. There are three *units*:

copy engine     takes the copies in their order, one at a time; each arrives at a barrier when it is done
tensor cores    the products of one agent run in their order; agents that have one share the unit equally, or,
                with ``shared=False``, the product that was issued first has it alone
softmax units   exponentials and the other arithmetic of agents, shared equally

A :class:`Barrier` is an mbarrier: it counts arrivals, and completes a phase when all have come. A
:class:`Slot` is a piece of shared memory; a copy into a slot that somebody has still to read, and a product
that reads something else than it expects, raise :class:`Hazard`. Agents that wait for each other raise
:class:`Deadlock`. Clocks are exact fractions, so that closed forms can be compared with ``==``.

:func:`forward` is FlashAttention's forward pass in the steps of the chapter *Hopper* (``kernels/hopper.py``).
It stands with the other models of this package, which count words: here the clocks are counted in which those
words move and are computed with. Needs the standard library and nothing else.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

UNITS = ("copy engine", "tensor cores", "softmax units")
STEPS = ("copies", "specialised", "overlapped", "turns", "persistent")


class Deadlock(RuntimeError):
    """Nobody can go on. The message says who waits for what."""


class Hazard(RuntimeError):
    """A slot was overwritten before it was read, or read before it was filled."""


class Machine(NamedTuple):
    """Rates of one multiprocessor, in units a clock, and times in clocks.

    The rates are those of NVIDIA's documents for compute capability 9.0, as the chapter cites them.
    copy_bytes is one multiprocessor's part of what the L2 cache of the generation before could deliver. The
    last three are assumptions: what passes between the request of a tile and its first byte, between the
    launch of a program and its first instruction, and the end of a program, from its last product on.
    """

    flops: int = 4096
    exponentials: int = 16
    copy_bytes: Fraction = Fraction(5120, 132)
    latency: int = 700
    launch: int = 1000
    finish: int = 1000


HOPPER = Machine()


class Work(NamedTuple):
    """Clocks for one block of keys: one product and one softmax of one group, the copies of K (or V) and of
    a group's queries.
    """

    product: Fraction
    softmax: Fraction
    copy: Fraction
    queries: Fraction


ROWS = 64  # queries of a warp group: the rows of one wgmma


def work(d, block_k, machine=HOPPER, rest=False):
    """The clocks of :class:`Work` for head dimension d, 64 queries a group and block_k keys, two bytes each.

    rest: whether the softmax counts, one after the other, the multiply-add, the maximum, the sum and the
    rounding of each score and the multiplications that rescale O (128, 64, 128, 64 and 128 a clock), and not
    the exponentials alone. Raises ValueError for a size below 1.
    """
    for name, size in (("d", d), ("block_k", block_k)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    softmax = Fraction(ROWS * block_k, machine.exponentials)
    if rest:
        softmax += ROWS * (block_k * Fraction(3, 64) + Fraction(d, 128))
    return Work(
        Fraction(2 * ROWS * block_k * d, machine.flops),
        softmax,
        Fraction(2 * block_k * d) / machine.copy_bytes,
        Fraction(2 * ROWS * d) / machine.copy_bytes,
    )


# ------------------------------------------------------------------------------------------------------------
# What agents wait at, and what they do


class Barrier:
    """Counts arrivals; with the last of ``count`` the phase is complete and the next one begins.

    ``passes(parity)`` is what a wait asks: is the phase of this parity complete? The phases are 0, 1, 2, ...,
    and a barrier knows of the current one only whether its number is even. A fresh barrier is in phase 0, so
    parity 1, that of the phase before it, passes at once. ValueError for a count below 1.
    """

    def __init__(self, name, count=1):
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        self.name, self.count, self.phase, self.arrived = name, count, 0, 0

    def arrive(self):
        """One arrival."""
        self.arrived += 1
        if self.arrived == self.count:
            self.phase, self.arrived = self.phase + 1, 0

    def passes(self, parity):
        """Whether a wait with this parity goes on."""
        return self.phase % 2 != parity


class Slot:
    """A piece of shared memory: what it holds, how many products have still to read it."""

    def __init__(self, name):
        self.name, self.holds, self.unread, self.filling = name, None, 0, False


@dataclass(frozen=True)
class Wait:
    """Hold until the phase of this parity of the barrier is complete."""

    barrier: Barrier
    parity: int


@dataclass(frozen=True)
class Arrive:
    """Arrive at the barrier, and go on."""

    barrier: Barrier


@dataclass(frozen=True)
class Copy:
    """Ask the copy engine for a tile, and go on; the engine arrives at the barrier when it is in the slot.

    ``readers`` products will read it there before the next copy may come.
    """

    label: str
    clocks: Fraction
    barrier: Barrier
    slot: Slot
    readers: int


@dataclass(frozen=True)
class Issue:
    """Hand a product to the tensor cores, and go on. It reads the slots, {slot: what must lie in it}."""

    kind: str
    label: str
    clocks: Fraction
    reads: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Finish:
    """Hold until at most ``pending`` products of this agent are not finished."""

    pending: int = 0


@dataclass(frozen=True)
class Compute:
    """Work on the softmax units."""

    label: str
    clocks: Fraction


@dataclass(frozen=True)
class Pause:
    """Time that passes without any unit, such as the launch of a program."""

    kind: str
    clocks: Fraction


class Interval(NamedTuple):
    """What an agent did between two clocks. On a unit: which one, and how much of it the agent had."""

    agent: str
    kind: str
    label: str
    begin: Fraction
    end: Fraction
    unit: str = ""
    share: Fraction = Fraction(0)


# ------------------------------------------------------------------------------------------------------------
# The clock


class Trace:
    """What happened: ``intervals`` in the order of their ends, and ``clocks``, when all was done."""

    def __init__(self, intervals, clocks):
        self.intervals, self.clocks = intervals, clocks

    def busy(self, unit):
        """The part of the time in which the unit worked. ValueError for a unit that there is not."""
        if unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {unit!r}")
        return sum((x.end - x.begin) * x.share for x in self.intervals if x.unit == unit) / self.clocks

    def waited(self, agent):
        """The clocks in which an agent could not go on."""
        return sum(x.end - x.begin for x in self.intervals if x.agent == agent and x.kind == "wait")

    def rows(self):
        """[(agent, kind, label, begin, end)] with each job in one piece, for ``flashlib.plot.timeline``."""
        pieces = {}
        for x in self.intervals:
            key = (x.agent, x.kind, x.label, x.unit)
            before = pieces.setdefault(key, [])
            if before and before[-1][1] == x.begin:
                before[-1][1] = x.end
            else:
                before.append([x.begin, x.end])
        return [
            (agent, kind, label, float(begin), float(end))
            for (agent, kind, label, _), parts in pieces.items()
            for begin, end in parts
        ]


class _Job:
    """Something on a unit: the clocks that are left, and what happens when it is done."""

    def __init__(self, agent, kind, label, clocks, unit, ready, done):
        self.agent, self.kind, self.label, self.left = agent, kind, label, Fraction(clocks)
        self.unit, self.ready, self.done, self.held = unit, ready, done, 0


class _Agent:
    """A generator, and what it is held up by: the operation that it waits with, and since when."""

    def __init__(self, name, program):
        self.name, self.program, self.queue = name, program, []
        self.held_by, self.since, self.over = None, Fraction(0), False


def run(programs, machine=HOPPER, shared=True):
    """Run agents, ``{name: generator}``, until all are done; returns the :class:`Trace`.

    shared      whether agents share the tensor cores equally, or the product that was issued first has them

    Raises :class:`Deadlock` when nobody can go on, :class:`Hazard` for a wrong use of a slot, and TypeError
    for what is no operation.
    """
    agents = [_Agent(name, program) for name, program in programs.items()]
    jobs, intervals, now = [], [], Fraction(0)
    while True:
        moved = True
        while moved:
            moved = any(_advance(agent, jobs, intervals, now, machine) for agent in agents)
        if not jobs:
            break
        shares = _shares(jobs, now, shared)
        ends = [now + job.left / share for job, share in shares.items()]
        ends += [job.ready for job in jobs if job.ready > now]
        step = min(ends)
        for job, share in shares.items():
            job.left -= (step - now) * share
            if job.unit:
                span = (job.kind, job.label, now, step, job.unit, share)
                intervals.append(Interval(job.agent.name, *span))
            else:
                intervals.append(Interval(job.agent.name, job.kind, job.label, now, step))
        now = step
        for job in [job for job in shares if job.left == 0]:
            jobs.remove(job)
            job.done()
    stuck = [agent for agent in agents if not agent.over]
    if stuck:
        raise Deadlock("nobody can go on: " + "; ".join(_complaint(agent) for agent in stuck))
    return Trace(intervals, now)


def _advance(agent, jobs, intervals, now, machine):
    """Let an agent do what takes no time until something holds it; whether it did anything."""
    moved = False
    while not agent.over:
        held = agent.held_by
        if held is not None:
            if not _free(agent, held):
                return moved
            if now > agent.since and isinstance(held, (Wait, Finish)):
                label = held.barrier.name if isinstance(held, Wait) else "products"
                intervals.append(Interval(agent.name, "wait", label, agent.since, now))
            agent.held_by = None
        moved = True
        try:
            action = next(agent.program)
        except StopIteration:
            agent.over = True
            return True
        _begin(agent, action, jobs, now, machine)
    return moved


def _free(agent, held):
    """Whether what holds an agent is over."""
    if isinstance(held, Wait):
        return held.barrier.passes(held.parity)
    if isinstance(held, Finish):
        return len(agent.queue) <= held.pending
    return held.left == 0


def _begin(agent, action, jobs, now, machine):
    """Start an operation; an agent that it may hold up remembers it."""
    agent.since = now
    if isinstance(action, (Wait, Finish)):
        agent.held_by = action
    elif isinstance(action, Arrive):
        action.barrier.arrive()
    elif isinstance(action, (Compute, Pause)):
        unit = "softmax units" if isinstance(action, Compute) else ""
        kind, label = ("softmax", action.label) if unit else (action.kind, "")
        agent.held_by = _Job(agent, kind, label, action.clocks, unit, now, lambda: None)
        if action.clocks:
            jobs.append(agent.held_by)
    elif isinstance(action, Copy):
        slot = action.slot
        if slot.unread or slot.filling:
            state = "is still being filled" if slot.filling else f"has to be read {slot.unread} times more"
            raise Hazard(f"{agent.name} copies {action.label} into {slot.name}, which {state}")
        slot.holds, slot.filling = None, True

        def arrived():
            slot.holds, slot.unread, slot.filling = action.label, action.readers, False
            action.barrier.arrive()

        ready = now + machine.latency
        jobs.append(_Job(agent, "copy", action.label, action.clocks, "copy engine", ready, arrived))
    elif isinstance(action, Issue):
        for slot, wanted in action.reads.items():
            if slot.holds != wanted:
                what = slot.holds or "nothing that is complete"
                raise Hazard(f"{agent.name} reads {wanted} from {slot.name}, which holds {what}")

        def read():
            agent.queue.pop(0)
            for slot in action.reads:
                slot.unread -= 1

        job = _Job(agent, action.kind, action.label, action.clocks, "tensor cores", now, read)
        agent.queue.append(job)
        jobs.append(job)
    else:
        raise TypeError(f"{agent.name} yielded {action!r}, which is no operation of this module")


def _shares(jobs, now, shared):
    """{job: its share of its unit} of the jobs that run now."""
    shares = {job: Fraction(1) for job in jobs if not job.unit}
    copies = [job for job in jobs if job.unit == "copy engine"]
    if copies and copies[0].ready <= now:
        shares[copies[0]] = Fraction(1)
    products = [job for job in jobs if job.unit == "tensor cores" and job is job.agent.queue[0]]
    softmax = [job for job in jobs if job.unit == "softmax units"]
    for group in (products if shared else products[:1], softmax):
        shares |= {job: Fraction(1, len(group)) for job in group}
    return shares


def _complaint(agent):
    held = agent.held_by
    if isinstance(held, Wait):
        barrier = held.barrier
        return (
            f"{agent.name} waits at {barrier.name} for the end of a phase of parity {held.parity}, which is "
            f"in phase {barrier.phase} with {barrier.arrived} of {barrier.count} arrivals"
        )
    return f"{agent.name} waits for products"


# ------------------------------------------------------------------------------------------------------------
# The forward pass


class SharedMemory:
    """The shared memory of a program: a ring of slots for K, one for V, a slot for each group of queries."""

    def __init__(self, groups, slots):
        self.slots = {x: [Slot(f"{x}[{i}]") for i in range(slots)] for x in "KV"}
        self.ready = {x: [Barrier(f"{x} ready[{i}]") for i in range(slots)] for x in "KV"}
        self.free = {x: [Barrier(f"{x} free[{i}]", groups) for i in range(slots)] for x in "KV"}
        self.queries = [Slot(f"Q[{g}]") for g in range(groups)]
        self.queries_ready = [Barrier(f"Q ready[{g}]") for g in range(groups)]
        self.queries_free = [Barrier(f"Q free[{g}]") for g in range(groups)]
        self.turn = [Barrier(f"turn[{g}]") for g in range(groups)]
        self.turn[0].arrive()  # nobody passes the first turn on
        self.together = Barrier("together", groups)
        self.groups, self.size = groups, slots

    def place(self, x, block):
        """Slot, its two barriers, and parity of the phase, of a block of K or V."""
        i = block % self.size
        return self.slots[x][i], self.ready[x][i], self.free[x][i], block // self.size % 2

    def copy(self, x, block, clocks):
        """The copy of a block into its slot."""
        slot, ready, _, _ = self.place(x, block)
        return Copy(f"{x}{block}", clocks, ready, slot, self.groups)

    def copy_queries(self, tile, group, clocks, readers):
        """The copy of a group's queries of a tile."""
        slot, ready = self.queries[group], self.queries_ready[group]
        return Copy(f"Q{tile}.{group}", clocks, ready, slot, readers)


def producer(shared, tiles, costs):
    """The producer's program: queries and blocks of keys and values, each when its slot is free."""
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
    """A group of the step `copies`: group 0 asks for the copies, and all meet after each block."""
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
    """A group of the step `specialised`: scores, softmax, output, block after block."""
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
    """A group of the other steps: the scores of a block are issued before the output of the one before.

    turns       "" for none; else products are issued in turns, and a turn is passed on when they are
                "issued" or when the "scores" are there
    own         whether the output has a place of its own, so that the queries' slot is free early
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


def forward(step, tiles, *, d, block_k, groups=2, slots=2, rest=False, machine=HOPPER, shared=True,
            turns="scores", own=True, late=0):  # fmt: skip
    """Attention of one multiprocessor, in one of the STEPS; returns the :class:`Trace`.

    tiles       for each tile of 64 * groups queries that the multiprocessor gets, its blocks of keys
    d, block_k  head dimension and keys of a block; elements have two bytes
    groups      of warps that compute, each with 64 queries
    slots       of the ring of keys, and of that of values; `copies` always has two
    rest        as for :func:`work`
    shared      as for :func:`run`
    turns       when a turn is passed on in the step `turns`: "scores" or "issued"
    own         as for :func:`overlapping`
    late        clocks by which group 1 starts later, in the steps that have a producer

    The first four steps start a program for each tile, one after the other. `persistent` is `overlapped` in
    one program for all tiles, whose producer runs ahead into the next one. Raises ValueError for an unknown
    step or an unknown moment for turns, for no tile and for a size below 1; Deadlock and Hazard as
    :func:`run` does.
    """
    if step not in STEPS:
        raise ValueError(f"step must be one of {', '.join(STEPS)}, got {step!r}")
    if turns not in ("issued", "scores"):
        raise ValueError(f"turns must be 'issued' or 'scores', got {turns!r}")
    tiles = list(tiles)
    if not tiles or min(tiles) < 1:
        raise ValueError(f"tiles must name at least one tile, each of at least one block, got {tiles}")
    if groups < 1 or slots < 1:
        raise ValueError(f"groups and slots must be at least 1, got {groups} and {slots}")
    costs = work(d, block_k, machine, rest)
    intervals, start = [], Fraction(0)
    for walk in [tiles] if step == "persistent" else [[blocks] for blocks in tiles]:
        memory = SharedMemory(groups, 2 if step == "copies" else slots)
        agents = {}
        if step != "copies":
            agents["producer"] = _launched(producer(memory, walk, costs), machine)
        for g in range(groups):
            behind = late if g == 1 else 0
            if step == "copies":
                program = in_step(memory, g, walk[0], costs, machine)
            elif step == "specialised":
                program = one_by_one(memory, g, walk[0], costs, machine, behind)
            else:
                order = turns if step == "turns" else ""
                program = overlapping(memory, g, walk, costs, machine, order, own, behind)
            agents[f"group {g}"] = program
        trace = run(agents, machine, shared)
        intervals += [x._replace(begin=x.begin + start, end=x.end + start) for x in trace.intervals]
        start += trace.clocks
    return Trace(intervals, start)


def _launched(program, machine):
    """A program behind the launch of its block of threads."""
    yield Pause("launch", machine.launch)
    yield from program


def clocks_per_block(step, costs, groups=2):
    """The closed form: clocks for one block of keys and ``groups`` groups, far from both ends of a tile.

    costs is a :class:`Work`. Equations eq-hopper-apart, eq-hopper-inside and eq-hopper-turns of the chapter,
    each no less than the clocks of the copies. Raises ValueError for an unknown step.
    """
    if step not in STEPS:
        raise ValueError(f"step must be one of {', '.join(STEPS)}, got {step!r}")
    products, softmax = 2 * groups * costs.product, groups * costs.softmax
    if step in ("copies", "specialised"):
        computing = products + softmax
    elif step == "turns":
        computing = max(products, softmax)
    else:
        computing = products / 2 + max(products / 2, softmax)
    return max(computing, 2 * costs.copy)
