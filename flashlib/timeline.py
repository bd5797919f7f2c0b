"""Who waits for whom inside one multiprocessor: agents, units, barriers with phases, a
clock.

    trace = run({"producer": producer(), "group 0": consumer(0)})
    trace.clocks, trace.busy("tensor cores"), trace.intervals

An *agent* is a Python generator that yields what it does next: :class:`Copy`,
:class:`Issue`, :class:`Finish`, :class:`Compute`, :class:`Pause`, :class:`Wait`,
:class:`Arrive`. Copies and products run on their own once they are issued; everything
else holds up its agent. There are three *units*:

copy engine     takes the copies in their order, one at a time
tensor cores    run the products of one agent in their order, and are shared as
                :func:`run` says
softmax units   exponentials and the other arithmetic of agents, shared equally

A :class:`Barrier` is an mbarrier, a :class:`Slot` a piece of shared memory. A copy into
a slot that has still to be read, and a product that reads something else than it
expects, raise :class:`Hazard`; agents that wait for each other raise :class:`Deadlock`.
Clocks are exact fractions, so that closed forms can be compared with ``==``.

:mod:`flashlib.iomodel.hopper` runs FlashAttention's forward pass on it.
:func:`recorded` gives a :class:`Trace` of what a GPU did.
"""

import itertools
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from flashlib.plain_checks import check_count

UNITS = ("copy engine", "tensor cores", "softmax units")


class Deadlock(RuntimeError):
    """No agent can go on. The message says which agent waits for what."""


class Hazard(RuntimeError):
    """A slot was overwritten before it was read, or read before it was filled."""


class Machine(NamedTuple):
    """Rates of one multiprocessor, in units a clock, and times in clocks.

    The rates are those of NVIDIA's documents for compute capability 9.0, as the chapter
    cites them. copy_bytes is one multiprocessor's part of what the L2 cache of the
    generation before could deliver. The last three are assumptions: what passes between
    the request of a tile and its first byte, between the launch of a program and its
    first instruction, and the end of a program, from its last product on.
    """

    flops: int = 4096
    exponentials: int = 16
    copy_bytes: Fraction = Fraction(5120, 132)
    latency: int = 700
    launch: int = 1000
    finish: int = 1000


HOPPER = Machine()


# -- What agents wait at, and what they do


class Barrier:
    """Counts arrivals; with the last of ``count`` the phase is complete and the next
    one begins.

    ``passes(parity)`` is what a wait asks: is the phase of this parity complete? The
    phases are 0, 1, 2, ..., and a barrier knows of the current one only whether its
    number is even. A fresh barrier is in phase 0, so parity 1, that of the phase before
    it, passes at once. ValueError for a count below 1.
    """

    def __init__(self, name, count=1):
        check_count("count", count)
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
    """A piece of shared memory for one tile.

    holds       label of the tile that is complete in it, or None
    unread      how many products have still to read it
    filling     whether a copy into it is under way
    """

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
    """Ask the copy engine for a tile, and go on; the engine arrives at the barrier when
    it is in the slot.

    ``readers`` products will read it there before the next copy may come.
    """

    label: str
    clocks: Fraction
    barrier: Barrier
    slot: Slot
    readers: int


@dataclass(frozen=True)
class Issue:
    """Hand a product to the tensor cores, and go on; reads: {slot: its content}."""

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
    """What an agent did between two clocks; its share of the unit, if it was on one."""

    agent: str
    kind: str
    label: str
    begin: Fraction
    end: Fraction
    unit: str = ""
    share: Fraction = Fraction(0)


# -- The clock


class Trace:
    """What happened: ``intervals`` in the order of their ends, ``clocks`` in all."""

    def __init__(self, intervals, clocks):
        self.intervals, self.clocks = intervals, clocks

    def busy(self, unit):
        """The fraction of all clocks, 0 to 1, in which a unit worked. Raises ValueError
        unless it is one of UNITS.
        """
        if unit not in UNITS:
            raise ValueError(f"unit: expected one of {', '.join(UNITS)}, got {unit!r}")
        used = [x for x in self.intervals if x.unit == unit]
        return sum((x.end - x.begin) * x.share for x in used) / self.clocks

    def rows(self):
        """[(agent, kind, label, begin, end)] for ``flashlib.plot.timeline``."""
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
    """Something on a unit: the clocks that are left, and what happens at its end."""

    def __init__(self, agent, kind, label, clocks, unit, ready, done=lambda: None):
        self.agent, self.kind, self.label, self.unit = agent, kind, label, unit
        self.left, self.ready, self.done = Fraction(clocks), ready, done


class _Agent:
    """A generator, and the operation that it waits with, and since when."""

    def __init__(self, name, program):
        self.name, self.program, self.queue = name, program, []
        self.held_by, self.since, self.over = None, Fraction(0), False


def run(programs, machine=HOPPER, shared=True):
    """Run agents, ``{name: generator}``, until all are done; returns the
    :class:`Trace`.

    shared      whether agents share the tensor cores equally, or the product that was
                issued first has them

    Raises Deadlock, Hazard, and TypeError for anything that is not an operation.
    """
    agents = [_Agent(name, program) for name, program in programs.items()]
    jobs, intervals, now = [], [], Fraction(0)
    while True:
        while any(_advance(agent, jobs, intervals, now, machine) for agent in agents):
            pass
        if not jobs:
            break
        shares = _shares(jobs, now, shared)
        ends = [now + job.left / share for job, share in shares.items()]
        ends += [job.ready for job in jobs if job.ready > now]
        step = min(ends)
        for job, share in shares.items():
            job.left -= (step - now) * share
            on_unit = (job.unit, share) if job.unit else ()
            span = (job.kind, job.label, now, step, *on_unit)
            intervals.append(Interval(job.agent.name, *span))
        now = step
        for job in [job for job in shares if job.left == 0]:
            jobs.remove(job)
            job.done()
    stuck = [_complaint(agent) for agent in agents if not agent.over]
    if stuck:
        raise Deadlock("\n  ".join(["nobody can go on:", *stuck]))
    return Trace(intervals, now)


def _advance(agent, jobs, intervals, now, machine):
    """Let an agent do what takes no time, and return whether it did anything."""
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
    """Whether an agent can go on after what has held it."""
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
        agent.held_by = _Job(agent, kind, label, action.clocks, unit, now)
        if action.clocks:
            jobs.append(agent.held_by)
    elif isinstance(action, Copy):
        jobs.append(_copy(agent, action, now + machine.latency))
    elif isinstance(action, Issue):
        jobs.append(_issue(agent, action, now))
    else:
        raise TypeError(
            f"{agent.name} yielded {action!r}, which is no operation of this module"
        )


def _copy(agent, action, ready):
    """The job of a copy whose first byte comes when it is ready."""
    slot = action.slot
    if slot.filling or slot.unread:
        unread = f"has to be read {slot.unread} times more"
        state = "is still being filled" if slot.filling else unread
        into = f"copies {action.label} into {slot.name}, which {state}"
        raise Hazard(f"{agent.name} {into}")
    slot.holds, slot.filling = None, True

    def arrived():
        slot.holds, slot.unread, slot.filling = action.label, action.readers, False
        action.barrier.arrive()

    work = ("copy", action.label, action.clocks, "copy engine")
    return _Job(agent, *work, ready, arrived)


def _issue(agent, action, now):
    """The job of a product, last in the queue of its agent."""
    for slot, wanted in action.reads.items():
        if slot.holds != wanted:
            held = slot.holds or "nothing that is complete"
            raise Hazard(
                f"{agent.name} reads {wanted} from {slot.name}, which holds {held}"
            )

    def read():
        agent.queue.pop(0)
        for slot in action.reads:
            slot.unread -= 1

    work = (action.kind, action.label, action.clocks, "tensor cores")
    agent.queue.append(_Job(agent, *work, now, read))
    return agent.queue[-1]


def _shares(jobs, now, shared):
    """{job: its share of its unit} of the jobs that run now."""
    shares = {job: Fraction(1) for job in jobs if not job.unit}
    copies = [job for job in jobs if job.unit == "copy engine"]
    if copies and copies[0].ready <= now:
        shares[copies[0]] = Fraction(1)
    products = [job for job in jobs if job.unit == "tensor cores"]
    products = [job for job in products if job is job.agent.queue[0]]
    softmax = [job for job in jobs if job.unit == "softmax units"]
    for group in (products if shared else products[:1], softmax):
        shares |= {job: Fraction(1, len(group)) for job in group}
    return shares


def _complaint(agent):
    held = agent.held_by
    if isinstance(held, Wait):
        barrier = held.barrier
        state = f"phase {barrier.phase}, {barrier.arrived} of {barrier.count} arrivals"
        wanted = f"a phase of parity {held.parity} to end"
        return f"{agent.name} waits at {barrier.name} ({state}) for {wanted}"
    return f"{agent.name} waits for products"


# -- What a GPU did

# {where a kernel for Hopper waits: what for}, as benchmarks/traces.py names the places.
AWAITED = {
    "refill: ring.empty": "slot",
    "push: queue.empty": "queue",
    "pop: queue.ready": "tile",
    "consume: shared.q.ready": "Q",
    "consume: q_ring.ready": "Q",
    "attend: turn": "turn",
    "start_scores: k_ring.ready": "K",
    "start_values: v_ring.ready": "V",
    "consume: start_scores": "S",
    "attend: s": "S",
    "attend: acc": "PV",
    "attend_keeping: s": "S",
    "attend_keeping: acc": "PV",
    "consume: acc": "O",
    "consume: store_wait": "store",
    "finish: store_wait": "store",
}
# What a role does after a wait, until the next one begins.
AFTER = dict.fromkeys(("S", "PV"), "softmax") | dict.fromkeys("KV", "issue")
AFTER |= dict.fromkeys(("O", "store"), "finish")


def recorded(roles, scopes):
    """The :class:`Trace` of one program of the forward kernel for Hopper, from a cell
    of the record traces.

    roles       {agent: [[number of the scope, first clock, last clock]]}, the waits of
                each role in their order
    scopes      the names of the scopes, each one of AWAITED

    A group that does not wait issues products (after the waits for K and V), computes
    weights, or ends a tile (after the last product). Nobody sees a product end, but it
    has ended when the wait for it is over. The scores are drawn until then, and the
    output, which comes after them, from there on. No interval has a unit. ValueError
    for an unknown scope.
    """
    if unknown := set(scopes) - AWAITED.keys():
        known = ", ".join(AWAITED)
        raise ValueError(f"scopes: expected some of {known}, got {sorted(unknown)}")
    intervals = []
    for agent, spans in roles.items():
        issued = {}  # {product: since when it is in flight}
        waits = [(AWAITED[scopes[n]], begin, end) for n, begin, end in spans]
        for (label, begin, end), following in itertools.pairwise([*waits, None]):
            intervals.append(Interval(agent, "wait", label, begin, end))
            if label == "K":
                issued["QK"] = end
            elif label == "V":
                issued["PV"] = end
            elif label == "S":
                intervals.append(Interval(agent, "QK", "", issued.pop("QK"), end))
                issued["PV"] = end
            elif label in ("PV", "O"):
                intervals.append(Interval(agent, "PV", "", issued.pop("PV"), end))
            if following and label in AFTER and following[1] > end:
                intervals.append(Interval(agent, AFTER[label], "", end, following[1]))
    intervals.sort(key=lambda x: x.end)
    return Trace(intervals, max(x.end for x in intervals))
