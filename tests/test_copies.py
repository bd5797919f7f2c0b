"""Channels of copies: what ranks pull is what was published for the pass, whatever was
called before, in whichever order the streams of the ranks execute.

The ranks' streams are lists of operations here, which a random scheduler executes.
"""

import contextlib
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from flashlib import copies

RANKS = 3


class Stream:
    """Operations that execute in order. One that returns False waits."""

    def __init__(self):
        self.waiting, self.done = [], 0

    def enqueue(self, operation):
        self.waiting.append(operation)
        return len(self.waiting) + self.done

    def wait_for(self, other, count):
        """Wait until another stream has executed this many operations."""
        self.enqueue(lambda: other.done >= count)

    def run_one(self):
        """Execute the next operation if it is not one that waits."""
        if not self.waiting or self.waiting[0]() is False:
            return False
        self.waiting.pop(0)
        self.done += 1
        return True

    @property
    def length(self):
        return self.done + len(self.waiting)


class World:
    """The memories of the ranks, with signals from each rank, and which ranks know all
    memories of a generation.
    """

    def __init__(self, rng):
        self.rng, self.streams = rng, []
        self.memories, self.signals, self.met = {}, {}, {}


class Engine:
    """What copies.Engine does, on streams that a scheduler runs."""

    device = torch.device("cpu")

    def __init__(self, world, rank, callers):
        self.world, self.rank = world, rank
        self.default, self.caller = callers[0], [callers[0]]
        self.stream, self.graph = Stream(), False
        self.own = [self.stream, *callers]
        world.streams += self.own
        self.generation, self.pinned = 0, set()  # of its memory

    def pin(self):
        self.pinned.add(self.generation)

    def capturing(self):
        return self.graph

    def allocate(self, nbytes):
        memory, signals = torch.zeros(nbytes, dtype=torch.uint8), [0] * RANKS

        def zero():
            memory.zero_()
            signals[:] = [0] * RANKS

        self.default.enqueue(zero)
        return memory, signals

    def finish(self):
        run(self.world.streams, self.world.rng, self.own)

    def exchange(self, memory):
        old, self.generation = self.generation, self.generation + 1
        now = self.generation, self.rank
        self.world.memories[now], self.world.signals[now] = memory
        # The host waits for the other ranks; here, what it enqueues later waits.
        met = self.world.met.setdefault(self.generation, set())
        met.add(self.rank)
        if len(met) == RANKS and old not in self.pinned:
            for rank in range(RANKS):
                self.world.memories.pop((old, rank), None)
        for stream in self.own:
            stream.enqueue(lambda: len(met) == RANKS)

    @contextlib.contextmanager
    def enqueuing(self, behind_caller=True):
        if behind_caller:
            self.stream.wait_for(self.caller[0], self.caller[0].length)
        yield

    def bytes_of(self, rank, first, count):
        return self.generation, rank, first, count

    def resolve(self, x):
        if isinstance(x, torch.Tensor):
            return x
        *where, first, count = x
        return self.world.memories[tuple(where)][first : first + count]

    def copy(self, to, source):
        def operation():
            self.resolve(to).copy_(self.resolve(source))

        self.stream.enqueue(operation)

    def flag(self, flags, n):
        self.stream.enqueue(lambda: flags.__setitem__(n, 1))

    def barrier(self):
        """As the kernel of PyTorch: a signal to each rank, when that rank has taken the
        one before, and one from each, which is taken.
        """
        signals, generation, rank = self.world.signals, self.generation, self.rank
        to_send = set(range(RANKS)) - {rank}
        to_take = set(to_send)

        def arrive():
            for other in list(to_send):
                if not signals[generation, other][rank]:
                    signals[generation, other][rank] = 1
                    to_send.remove(other)
            for other in to_take - to_send:
                if signals[generation, rank][other]:
                    signals[generation, rank][other] = 0
                    to_take.remove(other)
            return not to_take

        self.stream.enqueue(arrive)

    def mark(self):
        return self.stream.length

    def hold_caller(self, mark):
        self.caller[0].wait_for(self.stream, mark)


class Hang(Exception):
    """All streams wait for each other."""


def run(streams, rng, until):
    """Execute operations in a random order that the streams allow, some streams far
    ahead of others, until these streams have executed all of theirs.
    """
    while any(x.waiting for x in until):
        rng.shuffle(streams)
        moved = 0
        for stream in streams:
            for _ in range(rng.choice((0, 1, 100))):
                if not stream.run_one():
                    break
                moved += 1
        if not moved and not any(x.run_one() for x in streams):
            raise Hang


class Ranks:
    """Ranks with one channel, each with two streams to call from."""

    def __init__(self, rng):
        self.rng, self.world = rng, World(rng)
        self.callers = [[Stream(), Stream()] for _ in range(RANKS)]
        engines = [Engine(self.world, r, self.callers[r]) for r in range(RANKS)]
        self.current = [engine.caller for engine in engines]
        self.channels = [copies.Channel(engine) for engine in engines]
        self.checks, self.number = [], 0

    def settle(self):
        """All operations that are enqueued end."""
        run(self.world.streams, self.rng, self.world.streams)

    def call(self, stream, size, at_once):
        """A pass of all ranks: each pulls what all others have published."""
        self.number += 1
        passes = []
        for rank, channel in enumerate(self.channels):
            self.current[rank][0] = self.callers[rank][stream]
            x = torch.zeros(size, dtype=torch.uint8)
            filled = (17 * self.number + rank) % 251
            self.current[rank][0].enqueue(lambda x=x, n=filled: x.fill_(n) is x)
            passes.append(channel.publish([x]))
        for rank, published in enumerate(passes):
            others = [(rank + step) % RANKS for step in range(1, RANKS)]
            wanted = [(17 * self.number + other) % 251 for other in others]
            caller = self.current[rank][0]
            if at_once:
                memory = torch.zeros(RANKS - 1, 2, size // 2, dtype=torch.uint8)
                flags = torch.zeros(2 * (RANKS - 1), dtype=torch.uint32)
                published.pull_parts(others, memory, flags)
                for n, part in itertools.product(range(RANKS - 1), range(2)):

                    def seen(x=memory[n, part], n=2 * n + part, to=wanted[n], f=flags):
                        if not f[n]:
                            return False  # as a kernel that waits for its flag
                        self.checks.append(x.eq(to).all().item())

                    caller.enqueue(seen)
            else:
                for other, number in zip(others, wanted, strict=True):
                    arrive = published.pull(other)
                    (x,) = arrive()
                    caller.enqueue(
                        lambda x=x, to=number: self.checks.append(x.eq(to).all().item())
                    )
            published.close()


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    monkeypatch.setattr(copies, "GRANULE", 16)


def history(seed):
    """Whether every pull of a random history has seen what it should."""
    rng = random.Random(seed)
    ranks = Ranks(rng)
    for _ in range(rng.randrange(2, 12)):
        ranks.call(rng.randrange(2), 2 * rng.randrange(1, 30), rng.random() < 0.5)
        if rng.random() < 0.2:
            ranks.settle()
    ranks.settle()
    assert ranks.checks
    return all(ranks.checks)


@pytest.mark.parametrize("seed", range(60))
def test_every_pull_sees_its_own_pass(seed):
    assert history(seed)


def test_without_the_default_stream_signals_would_be_zeroed(monkeypatch):
    def finish(self):
        run(self.world.streams, self.world.rng, [self.stream])

    monkeypatch.setattr(Engine, "finish", finish)
    with pytest.raises(Hang):
        for seed in range(60):
            history(seed)


def test_one_slot_would_be_overwritten(monkeypatch):
    class OneSlot(copies.Channel):
        passes = property(lambda self: 0, lambda self, n: None)

    monkeypatch.setattr(copies, "Channel", OneSlot)
    assert not all(history(seed) for seed in range(60))


def test_without_barriers_slots_would_be_read_too_early(monkeypatch):
    monkeypatch.setattr(Engine, "barrier", lambda self: None)
    assert not all(history(seed) for seed in range(60))


def with_graph(seed):
    """Whether a captured pass and others see what they should, in a random order. A
    replay enqueues what was captured: the operations of a pass with the memory and the
    slot of that time.
    """
    rng = random.Random(seed)
    ranks = Ranks(rng)
    ranks.call(0, 20, False)
    if rng.random() < 0.5:
        ranks.call(0, 20, False)

    def replay():
        """Enqueue the captured pass, with what it needs to know of its time."""
        now = []
        for channel, then in zip(ranks.channels, captured, strict=True):
            engine = channel.engine
            now.append((channel.passes, channel.capacity, engine.generation))
            channel.passes, channel.capacity, engine.generation = then
            engine.graph = True
        ranks.call(0, 20, at_once)
        for channel, state in zip(ranks.channels, now, strict=True):
            channel.passes, channel.capacity, channel.engine.generation = state
            channel.engine.graph = False

    at_once = rng.random() < 0.5
    captured = [(x.passes, x.capacity, x.engine.generation) for x in ranks.channels]
    for channel in ranks.channels:
        channel.engine.pin()
    for _ in range(rng.randrange(2, 9)):
        if rng.random() < 0.5:
            ranks.call(0, rng.choice((20, 20, 60)), rng.random() < 0.5)
        else:
            replay()
    ranks.settle()
    return all(ranks.checks)


@pytest.mark.parametrize("seed", range(60))
def test_a_graph_and_other_calls_see_their_own_passes(seed):
    assert with_graph(seed)


@pytest.mark.parametrize("which", ["before", "after"])
def test_a_graph_needs_both_of_its_barriers(which, monkeypatch):
    right, count = Engine.barrier, {}

    def barrier(self):
        number = count[self] = count.get(self, 0) + self.graph
        if not self.graph or number % 3 != {"before": 1, "after": 0}[which]:
            right(self)

    monkeypatch.setattr(Engine, "barrier", barrier)
    assert not all(with_graph(seed) for seed in range(60))


def test_growing_during_a_capture_is_refused():
    ranks = Ranks(random.Random(0))
    for channel in ranks.channels:
        channel.engine.graph = True
    with pytest.raises(RuntimeError, match="call once before"):
        ranks.call(0, 20, False)


def test_tensors_keep_their_places():
    tensors = [torch.arange(3, dtype=torch.int16), torch.arange(4.0).view(2, 2)]
    layout = copies.Layout.of(tensors)
    assert layout.places == (0, 16) and layout.nbytes == 32
    memory = torch.zeros(32, dtype=torch.uint8)
    for x, place in zip(tensors, layout.places, strict=True):
        memory[place : place + x.nbytes] = x.reshape(-1).view(torch.uint8)
    for x, y in zip(tensors, layout.tensors(memory), strict=True):
        assert torch.equal(x, y)


def test_ranks_on_cpus_send_messages():
    chosen = copies.choose(None, None, torch.device("cpu"), None)
    assert chosen.keys is None and str(chosen) == "messages: the tensors are on a CPU"


class Meeting:
    """Ranks in threads that wait for each other, each of them at a place."""

    def __init__(self):
        self.said = [None] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=10)

    def wait(self, rank, place, x=None):
        """What all ranks say. Raises Hang where they wait at different places."""
        self.said[rank] = place, x
        self.barrier.wait()
        places, found = zip(*self.said, strict=True)
        self.barrier.wait()
        if len(set(places)) > 1:
            raise Hang
        return found


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
@pytest.mark.parametrize("fails", ["boot_id", "allocate", "exchange", None])
def test_no_rank_waits_for_one_without_memory(fails, error, monkeypatch):
    meeting = Meeting()

    class EngineOfRank:
        def __init__(self, rank, device, timeout_ms):
            self.rank = rank

        def allocate(self, nbytes):
            self.fail("allocate")

        def finish(self):
            pass

        def exchange(self, memory):
            meeting.wait(self.rank, "exchange")
            self.fail("exchange")

        def fail(self, step):
            if step == fails and self.rank == 1:
                raise error("out of memory\nmore")

    def gathered(x, rank):
        return meeting.wait(rank, "gathered", x)

    def choose(rank):
        return copies.choose(rank, rank, torch.device("cuda"), timedelta(seconds=1))

    group = {"get_backend_config": lambda _: "nccl", "get_world_size": lambda _: RANKS}
    hopper = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(copies, "dist", SimpleNamespace(**group))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: hopper)
    monkeypatch.setattr(copies, "FEWEST", RANKS)
    monkeypatch.setattr(copies, "Engine", EngineOfRank)
    monkeypatch.setattr(copies, "obstacle", lambda device: None)
    monkeypatch.setattr(copies, "gathered", gathered)
    if fails == "boot_id":
        monkeypatch.setattr(copies, "BOOT", copies.Path("/nowhere"))
    with ThreadPoolExecutor(RANKS) as threads:
        chosen = list(threads.map(choose, range(RANKS)))
    if fails is None:
        assert {str(x) for x in chosen} == {"copies"}
        assert all(x.hopper and x.keys.capacity for x in chosen)
    else:
        said = "messages: symmetric memory: out of memory"
        if fails == "boot_id":
            said = "messages: /nowhere cannot be read"
        assert {str(x) for x in chosen} == {said}
        assert all(x.keys is x.sums is None for x in chosen)
