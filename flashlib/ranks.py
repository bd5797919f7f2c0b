"""The ranks of a process group: whom a rank sends to, errors that say which operation
failed, and how ranks agree on the arguments of a call (chapter *Ring attention*).
"""

import contextlib
import struct
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from flashlib import checks, copies, internals
from flashlib.plain_checks import wrong
from flashlib.reference import ring as reference

HOSTS = weakref.WeakKeyDictionary()  # {a group of GPUs: its ranks' group of hosts}


def has_gloo(group):
    """Whether hosts of the group talk without waiting for their GPUs."""
    return "gloo" in dist.get_backend_config(group)


def timeout_of(group):
    """How long a rank waits for the others, a timedelta."""
    device = torch.device("cpu" if has_gloo(group) else "cuda")
    return internals.timeout_of(group, device)


def hosts(group):
    """A group of the same ranks in which hosts talk without waiting for their GPUs."""
    if has_gloo(group):
        return group
    if group not in HOSTS:
        HOSTS[group] = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="gloo",
            timeout=timeout_of(group),
            use_local_synchronization=True,
        )
    return HOSTS[group]


def transport_name(group):
    """How a group passes shards on, in words; None if it has not chosen."""
    chosen = copies.CHOSEN.get(group or dist.group.WORLD)
    return None if chosen is None else str(chosen)


def check_group(group, name="group"):
    """The group is None, or has this rank. Raises TypeError or ValueError."""
    if group is None:
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise wrong(name, "one that has this rank", "a group of other ranks")
    if not isinstance(group, dist.ProcessGroup):
        expected = "a torch.distributed.ProcessGroup or None"
        raise wrong(name, expected, type(group).__name__, TypeError)
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        raise wrong(name, "one that exists", "a destroyed group") from None


def group_of(mesh):
    """The group of a mesh. Raises TypeError or ValueError."""
    if not isinstance(mesh, dist.device_mesh.DeviceMesh):
        raise wrong("mesh", "a DeviceMesh or None", type(mesh).__name__, TypeError)
    if mesh.ndim != 1:
        raise wrong("mesh", "one dimension", mesh.ndim)
    if mesh.get_coordinate() is None:
        raise wrong("mesh", "one that has this rank", "a mesh of other ranks")
    group = mesh.get_group()
    check_group(group, "mesh")
    return group


class LayerGroup:
    """The group of a layer. Copies of the layer share it, and it cannot be pickled."""

    def __init__(self, group):
        self.group = group

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        expected = "None in a layer that is pickled (save its state_dict instead)"
        raise wrong("group", expected, type(self.group).__name__, TypeError)


class Neighbors:
    """The neighbors of this rank in a group, for a call of a public function.
    divisions has how each of these functions attends.
    """

    def __init__(self, group, function, divisions):
        self.group, self.function = group or dist.group.WORLD, function
        self.divisions = divisions
        self.rank, self.size = self.group.rank(), self.group.size()
        ranks = dist.get_process_group_ranks(self.group)
        self.next = ranks[(self.rank + 1) % self.size]
        self.previous = ranks[(self.rank - 1) % self.size]

    def source(self, step):
        """The rank whose keys are here in a step."""
        return (self.rank - step) % self.size

    def pass_on(self, *tensors):
        """Begin to send tensors to the next rank and to receive the previous rank's;
        returns a function that waits for both and returns what has arrived.
        """
        device = tensors[0].device
        # Where a message is sent from has no kernel either: the reference says it.
        tensors = [reference.to_send(x, self.group) for x in tensors]
        received = [torch.empty_like(x) for x in tensors]
        calls = [(dist.isend, x, self.next) for x in tensors]
        calls += [(dist.irecv, x, self.previous) for x in received]
        with self.named("pass keys on"):
            work = dist.batch_isend_irecv([dist.P2POp(*x, self.group) for x in calls])

        def arrive():
            with self.named("pass keys on"):
                for item in work:
                    item.wait()
            return [x.to(device) for x in received]

        return arrive

    def travel(self, *keys):
        """How keys that this rank has reach the others, step by step: :class:`Pulls` or
        :class:`Messages`.
        """
        if self.size > 1 and self.transport(keys[0].device).reason is None:
            published = self.publish("keys", keys)
            published.start()
            return Pulls(self, published)
        return Messages(self)

    def transport(self, device):
        """How the group moves shards, a :class:`flashlib.copies.Transport`, chosen at
        the first call, which all ranks make.
        """
        group = self.group
        if group not in copies.CHOSEN:
            with self.named("choose a transport"):
                given = group, hosts(group), device, timeout_of(group)
                copies.CHOSEN[group] = copies.choose(*given)
        return copies.CHOSEN[group]

    def publish(self, channel, tensors):
        """Let the other ranks copy tensors, through the channel of this name."""
        with self.named("pass keys on"):
            return getattr(copies.CHOSEN[self.group], channel).publish(tensors)

    def pull(self, published, rank):
        """Begin to copy what a rank has published; returns a function that returns it
        to the stream of the caller.
        """
        with self.named("pass keys on"):
            return published.pull(rank)

    @contextlib.contextmanager
    def named(self, doing):
        """Within this context, a RuntimeError of the group says what this rank could
        not do.
        """
        try:
            yield
        except RuntimeError as error:
            message = f"{self.function}: rank {self.rank} could not {doing}: {error}"
            raise RuntimeError(message) from error


class Messages(NamedTuple):
    """Keys pass from neighbor to neighbor."""

    ring: Neighbors

    def begin(self, step, keys):
        """Pass on the keys that are here, and receive those of a step; returns a
        function that returns these.
        """
        arrive = self.ring.pass_on(*keys)
        if keys[0].is_cuda:
            # The Hopper kernel occupies every multiprocessor until it ends. Ten
            # microseconds let NCCL's kernel, launched before it, start before it.
            internals.occupy_stream(20_000)
        return arrive

    def end(self):
        """Nothing is left to do."""


class Pulls(NamedTuple):
    """Keys are copied from the rank that has published them."""

    ring: Neighbors
    published: copies.Published

    def begin(self, step, keys):
        """Begin to copy the keys of a step; returns a function that returns them."""
        return self.ring.pull(self.published, self.ring.source(step))

    def end(self):
        """The stream of the caller waits for all copies."""
        self.published.close()


# Divisions have the names of the public functions; this one is that of ring_attention
# where it exchanges rows for heads.
BY_HEADS = 'ring_attention(method="ulysses")'
METHODS = ("ring", "ulysses", "auto")
# What all ranks must agree on, in this order. The first part decides what they send.
SIZES = ("B", "H", "H_kv", "T_q", "T_k", "d", "d_v")
SENT = ("function", *SIZES, "dtype", "device")
NEEDED = tuple(f"{name}.requires_grad" for name in ("q", "k", "v", "sinks"))
SAID = (*SENT, "causal", "sinks", *NEEDED, "mask", "scale")
CHOICES = {  # of what is said as an index or as a bool
    "function": ("ring_attention", BY_HEADS, "ulysses_attention"),
    "dtype": checks.DTYPES,
    "device": checks.DEVICES,
    **dict.fromkeys(("causal", *NEEDED), (False, True)),
    "sinks": ("None", "a tensor"),
}


def as_integers(said):
    """What a rank says, each value as an integer of 64 bits."""
    *values, scale = said
    for n, name in enumerate(SAID[:-1]):
        if name in CHOICES:
            values[n] = CHOICES[name].index(values[n])
    return [*values, struct.unpack("q", struct.pack("d", scale))[0]]


def in_words(name, x):
    """What an integer of :func:`as_integers` stands for."""
    if name == "scale":
        return struct.unpack("d", struct.pack("q", x))[0]
    if name == "mask":
        return f"one with key {x:x}" if x else "None"
    return CHOICES[name][x] if name in CHOICES else x


LAST = weakref.WeakKeyDictionary()  # {a group: what its last call sent, and where}


def tell(ring, said):
    """Begin to tell the other ranks what this one says, None if it has an error.
    Returns a function that waits for them and returns a list for each rank: whether it
    has an error, and what it says.
    """
    nothing = [0] * len(SAID)
    mine = torch.tensor([said is None, *(said or nothing)], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(ring.size)]
    with ring.named("compare arguments"):
        work = dist.all_gather(everyone, mine, hosts(ring.group), async_op=True)

    def hear():
        with ring.named("compare arguments"):
            work.wait()
        return torch.stack(everyone).tolist()

    return hear


def problem_of(ring, everyone):
    """The error of a call, by what the ranks say of it, or None."""
    for rank, (failed, *_) in enumerate(everyone):
        if failed:
            return RuntimeError(f"{ring.function}: rank {rank} refused its arguments")
    for name, *values in zip(("error", *SAID), *everyone, strict=True):
        if len(set(values)) > 1:
            expected = f"the same {name} on all ranks"
            if name in ("T_q", "T_k"):
                expected += f" (pad each shard to {max(values)})"
            return wrong(ring.function, expected, [in_words(name, x) for x in values])
    return None


def compare(ring, said, device):
    """Begin to compare what the ranks say. Returns ``(begins, finish)``: whether this
    rank may begin its call before it has heard the others, and a function that waits
    for them and raises, on every rank, where one has an error or says something else.

    A rank may begin if its function, sizes and dtype are those of the last call. All
    ranks that begin then send what the others expect.
    """
    sent, (last, _) = said[: len(SENT)], LAST.get(ring.group, (None, None))
    begins, hear = sent == last, tell(ring, said)

    def finish():
        everyone = hear()
        problem = problem_of(ring, everyone)
        if problem is None:
            LAST[ring.group] = sent, device
            return
        if not begins:
            take_part(ring, everyone)
        raise problem

    return begins, finish


def refuse(ring):
    """Tell the other ranks that this one has an error."""
    take_part(ring, tell(ring, None)())


def take_part(ring, everyone):
    """If any rank has begun its call, like the last one, take part in it with zeros: it
    waits for what this rank would send.
    """
    last, device = LAST.get(ring.group, (None, None))
    if last not in [said[: len(SENT)] for failed, *said in everyone if not failed]:
        return
    function, B, H, H_kv, T_q, T_k, d, d_v, dtype, _ = map(in_words, SENT, last)
    zeros = [
        torch.zeros(B, *shape, dtype=dtype, device=device)
        for shape in ((H, T_q, d), (H_kv, T_k, d), (H_kv, T_k, d_v))
    ]
    # The error of the arguments matters more than one of sending.
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        ring.divisions[function].attend(ring, *zeros, False, 1.0, None, None)
