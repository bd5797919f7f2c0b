"""Copies between the GPUs of one host by their copy engines (chapter *Ring attention*).

A rank publishes tensors: it copies them into memory that the other ranks can read, and
passes a barrier. Then each rank pulls what it needs. A pull is a plain copy on a stream
of its own, which the copy engines execute: it takes no multiprocessor and no time of
the host, and all pulls of a pass can be enqueued at once.

A :class:`Channel` has two slots, which its passes use in turn. A slot is written again
two passes later. In between, every rank has passed the barrier of the pass between,
which it enqueued behind its own pulls, so nobody reads the slot any more. This does not
depend on what the passes are, or on the streams they are called from.

A CUDA graph may run any number of times, so a pass that is captured counts as none: two
more barriers, before its first write and after its last pull, separate it from all
others. Its memory is kept when larger shards need other memory.
"""

import contextlib
import os
import socket
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from flashlib import internals

ALIGNMENT = 16  # bytes of every tensor that is published
GRANULE = 2**21  # bytes that a slot is a multiple of
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Engine:
    """The copy engines of this rank's GPU, on a stream of their own, and memory that
    all ranks of a group can read.
    """

    def __init__(self, group, device, timeout_ms):
        self.group, self.device, self.timeout_ms = group, device, timeout_ms
        self.rank = group.rank()
        # The block of a barrier starts before the waiting blocks of other streams.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.memory = self.handle = None
        self.pinned = []  # memory that CUDA graphs use

    def pin(self):
        """Keep the memory for a CUDA graph, also when it is replaced."""
        if not self.pinned or self.pinned[-1][0] is not self.memory:
            self.pinned.append((self.memory, self.handle))

    def capturing(self):
        """Whether a CUDA graph is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def allocate(self, nbytes):
        """New memory, which PyTorch zeroes behind what the default stream has, with the
        signals of its barriers.
        """
        # A program that uses multicast can put the GPUs of a host out of service.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        make = internals.symmetric_memory()._SymmetricMemory.empty_strided_p2p
        return make((nbytes,), (1,), torch.uint8, self.device)

    def finish(self):
        """Wait until the GPU has done all that this rank has enqueued."""
        torch.cuda.synchronize(self.device)

    def exchange(self, memory):
        """Wait for the other ranks, and use this memory, and theirs, from now on."""
        self.handle = internals.symmetric_memory().rendezvous(memory, self.group)
        self.memory = memory

    @contextlib.contextmanager
    def enqueuing(self, behind_caller=True):
        """Within this context, work is enqueued on this stream, after all that the
        caller's stream has now.
        """
        if behind_caller:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def bytes_of(self, rank, first, count):
        """Bytes of the memory of a rank."""
        if rank == self.rank:
            return self.memory[first : first + count]
        return self.handle.get_buffer(rank, (count,), torch.uint8, first)

    def copy(self, to, source):
        """Copy bytes."""
        to.copy_(source)

    def flag(self, flags, n):
        """Write 1 to flags[n], uint32, when what was enqueued before is done."""
        write = internals.symmetric_memory()._SymmetricMemory
        if self.capturing():
            write.memset32(flags, offset=n, val=1, count=1)
        else:  # with a fence of the whole system before the write
            write.stream_write_value32(flags, n, 1)

    def barrier(self):
        """Wait until all ranks are here. After the timeout the GPU stops with an error,
        which every later call of CUDA raises.
        """
        self.handle.barrier(channel=0, timeout_ms=self.timeout_ms)

    def mark(self):
        """What is enqueued so far, for :meth:`hold_caller`."""
        return self.stream.record_event()

    def hold_caller(self, mark):
        """The caller's stream waits for a mark."""
        torch.cuda.current_stream(self.device).wait_event(mark)


class Channel:
    """Two slots of an engine's memory, and how many passes have used them."""

    def __init__(self, engine):
        self.engine, self.passes, self.capacity = engine, 0, 0

    def reserve(self, nbytes):
        """Make slots of at least this many bytes. All ranks call it.

        Raises RuntimeError while a CUDA graph is being captured.
        """
        if nbytes <= self.capacity:
            return
        if self.engine.capturing():
            message = "shards of this size have no buffers yet: call once before"
            raise RuntimeError(f"{message} the capture of a CUDA graph")
        self.exchange(*self.allocate(nbytes))

    def allocate(self, nbytes):
        """``(capacity, memory)`` for slots of at least this many bytes."""
        capacity = -(-nbytes // GRANULE) * GRANULE
        return capacity, self.engine.allocate(2 * capacity)

    def exchange(self, capacity, memory):
        """Use this memory, and that of the other ranks, from now on. All ranks call
        it.
        """
        # A rank that knows the new memory may signal its first barrier at once. If the
        # memory were zeroed after that, this rank would wait for the signal for ever
        # (https://github.com/pytorch/pytorch/pull/192308). And all pulls from the old
        # memory, which is freed, must have ended.
        self.engine.finish()
        self.engine.exchange(memory)
        self.capacity = capacity

    def publish(self, tensors):
        """Begin a pass: let the other ranks read contiguous tensors. All ranks call it,
        with tensors of the same sizes. Returns a :class:`Published`.
        """
        tensors = tuple(tensors)
        layout = Layout.of(tensors)
        self.reserve(layout.nbytes)
        engine, first = self.engine, self.passes % 2 * self.capacity
        captured = engine.capturing()
        self.passes += not captured
        with engine.enqueuing():
            if captured:
                engine.pin()
                engine.barrier()
            for x, place in zip(tensors, layout.places, strict=True):
                to = engine.bytes_of(engine.rank, first + place, x.nbytes)
                engine.copy(to, x.reshape(-1).view(torch.uint8))
            engine.barrier()
            ready = engine.mark()
        return Published(engine, first, layout, tensors, ready, captured)


class Layout(NamedTuple):
    """Where tensors are in a slot."""

    shapes: tuple  # (sizes, dtype)
    places: tuple
    nbytes: int

    @classmethod
    def of(cls, tensors):
        """The Layout of tensors one behind the other, each at a multiple of
        ALIGNMENT.
        """
        places, end = [], 0
        for x in tensors:
            places.append(end)
            end += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
        shapes = tuple((x.shape, x.dtype) for x in tensors)
        return cls(shapes, tuple(places), end)

    def tensors(self, memory):
        """The tensors in bytes that have this layout."""
        found = []
        for (shape, dtype), place in zip(self.shapes, self.places, strict=True):
            end = place + shape.numel() * dtype.itemsize
            found.append(memory[place:end].view(dtype).view(shape))
        return found


class Published(NamedTuple):
    """What the ranks have published in a pass."""

    engine: Engine
    first: int  # of the slot, in the memory
    layout: Layout
    tensors: tuple  # not freed while they are copied
    ready: object  # the mark behind the barrier
    captured: bool

    def start(self):
        """The caller's stream waits for the barrier: a kernel on all multiprocessors
        would keep out the kernel of the barrier.
        """
        self.engine.hold_caller(self.ready)

    def pull(self, rank):
        """Begin to copy what a rank has published, when the caller's stream has come
        here. Returns a function that makes the caller's stream wait, and returns the
        tensors.
        """
        engine, nbytes = self.engine, self.layout.nbytes
        # The allocator may give memory that a kernel of the caller's stream still uses.
        memory = torch.empty(nbytes, dtype=torch.uint8, device=engine.device)
        with engine.enqueuing():
            engine.copy(memory, engine.bytes_of(rank, self.first, nbytes))
            done = engine.mark()

        def arrive():
            engine.hold_caller(done)
            return self.layout.tensors(memory)

        return arrive

    def pull_parts(self, ranks, memory, flags):
        """Copy what ranks have published to memory ``[ranks, parts, bytes]``: the first
        part of each rank, then the second. Each copy is followed by flags[n], uint32,
        for the n-th part of memory. The caller's stream waits for the barrier only.
        """
        engine, size = self.engine, memory.shape[2]
        with engine.enqueuing():
            for part in range(memory.shape[1]):
                for n, rank in enumerate(ranks):
                    source = engine.bytes_of(rank, self.first + part * size, size)
                    engine.copy(memory[n, part], source)
                    engine.flag(flags, n * memory.shape[1] + part)
        # A kernel that waits for flags on all multiprocessors would keep out the kernel
        # of the barrier.
        engine.hold_caller(self.ready)

    def close(self):
        """End the pass: the caller's stream waits for all its pulls."""
        with self.engine.enqueuing(behind_caller=False):
            if self.captured:
                self.engine.barrier()
            done = self.engine.mark()
        self.engine.hold_caller(done)


# -- which ranks can copy from each other


class Transport(NamedTuple):
    """How the ranks of a group get keys and sums: through channels, or by messages if
    there is a reason not to copy.
    """

    keys: Channel | None
    sums: Channel | None
    reason: str | None
    hopper: bool = False  # whether all GPUs have compute capability 9.0

    def __str__(self):
        if self.reason is None:
            return "copies"
        return f"messages: {self.reason}"


CHOSEN = weakref.WeakKeyDictionary()  # {a group: its Transport}
# Ranks for which copies are worth their memory, which is more than that of messages.
# Between two H200s they are not faster, between four they are (the record ring);
# between three nobody has measured.
FEWEST = 4


def choose(group, hosts, device, timeout):
    """The Transport of a group: copies if all ranks are on one host and get symmetric
    memory. All ranks call it, and exchange what they find through hosts, a group of
    the same ranks.
    """
    if device.type != "cuda":
        return Transport(None, None, "the tensors are on a CPU")
    if "nccl" not in dist.get_backend_config(group):
        return Transport(None, None, "the group is not NCCL's")
    if dist.get_world_size(group) < FEWEST:
        return Transport(None, None, f"there are fewer than {FEWEST} ranks")
    # All ranks return the same so far. What follows may differ, so they exchange it.
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    about = socket.gethostname(), boot_id(), capability
    reason = obstacle(device) if about[1] else f"{BOOT} cannot be read"
    reasons, everyone = zip(*gathered((reason, about), hosts), strict=True)
    reason = next((x for x in reasons if x is not None), None)
    if reason is None and len({x[:2] for x in everyone}) > 1:
        reason = "the ranks are on several hosts"
    if reason is not None:
        return Transport(None, None, reason)
    timeout_ms = int(timeout.total_seconds() * 1000)
    channels = [Channel(Engine(group, device, timeout_ms)) for _ in range(2)]
    # A rank that gets no memory says so before the others wait for it in exchange.
    made, reason = tried(lambda: [x.allocate(GRANULE) for x in channels], hosts)
    for n, channel in enumerate(channels):
        if reason is None:
            _, reason = tried(lambda x=channel, n=n: x.exchange(*made[n]), hosts)
    if reason is not None:
        return Transport(None, None, reason)
    return Transport(*channels, None, {x[2] for x in everyone} == {(9, 0)})


# What PyTorch raises where it cannot share memory, in one version or another.
FAILURES = RuntimeError, AssertionError, AttributeError, OSError, TypeError, ValueError


def tried(step, hosts):
    """``(result, reason)``: what a step returns, and why it failed on the first rank on
    which it did, or None. All ranks call it, and none returns before all have tried.
    """
    result = reason = None
    try:
        result = step()
    except FAILURES as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        reason = f"symmetric memory: {first}"
    return result, next((x for x in gathered(reason, hosts) if x is not None), None)


def boot_id():
    """The identifier of the current boot of the host, or None."""
    try:
        return BOOT.read_text("utf-8")
    except OSError:
        return None


def obstacle(device):
    """Why this rank has no memory that others can read, or None."""
    try:
        backend = internals.symmetric_memory().get_backend(device)
    except (ImportError, AttributeError, RuntimeError):
        return "this PyTorch has no symmetric memory"
    if backend != "CUDA":
        return f"the backend of symmetric memory is {backend}, not CUDA"
    return None


def gathered(x, hosts):
    """A list of what each rank says."""
    found = [None] * dist.get_world_size(hosts)
    dist.all_gather_object(found, x, group=hosts)
    return found
