"""Copies between ranks without GPUs: what flashlib.copies.Engine does, by files that
all ranks map, and what Hopper's kernel for a ring computes, in PyTorch.
"""

import contextlib
import math
from types import SimpleNamespace

import torch
import torch.distributed as dist

from flashlib import copies, plans, ring_passes
from flashlib.kernels import hopper_ring


class Engine:
    """An engine whose operations are done when they are called."""

    timeout_ms = 1000

    def __init__(self, group, device, folder, name):
        self.group, self.device, self.rank = group, device, group.rank()
        self.folder, self.name, self.generation = folder, name, 0
        self.pulled_bytes = 0

    def capturing(self):
        return False

    def map(self, rank):
        path = self.folder / f"{self.name}-{self.generation}-{rank}"
        return torch.from_file(str(path), True, self.nbytes, dtype=torch.uint8)

    def allocate(self, nbytes):
        self.generation, self.nbytes = self.generation + 1, nbytes
        return self.map(self.rank).fill_(255)  # NaN in all formats

    def finish(self):
        """Everything is done."""

    def exchange(self, memory):
        dist.barrier(self.group)
        self.memories = [self.map(rank) for rank in range(self.group.size())]

    @contextlib.contextmanager
    def enqueuing(self, behind_caller=True):
        yield

    def bytes_of(self, rank, first, count):
        return rank, self.memories[rank][first : first + count]

    def copy(self, to, source):
        if isinstance(source, tuple):
            rank, source = source
            assert rank != self.rank
            self.pulled_bytes += source.nbytes
            to.copy_(source)
        else:
            to[1].copy_(source)

    def flag(self, flags, n):
        flags.view(torch.int32)[n] = 1

    def barrier(self):
        dist.barrier(self.group)

    def mark(self):
        return None

    def hold_caller(self, mark):
        assert mark is None


def install(group, device, folder, name, hopper=False):
    """The ranks of a group copy from each other; returns the engines."""
    engines = [Engine(group, device, folder, f"{name}-{x}") for x in ("keys", "sums")]
    channels = [copies.Channel(engine) for engine in engines]
    copies.CHOSEN[group] = copies.Transport(*channels, None, hopper)
    return engines


def uninstall(group):
    """The ranks of a group send messages again."""
    del copies.CHOSEN[group]


def kernel(q, k, v, others, flags, scale, arrival):
    """What hopper_ring.forward returns."""
    rank, size, parts, _ = arrival
    (heads, chunks, rows_q, d), rows_k = q.shape, k.shape[2]
    assert flags.view(torch.int32).eq(1).all() and len(flags) == (size - 1) * parts
    part_heads = k.shape[0] // parts
    shards = others.view(size - 1, parts, 2, part_heads, chunks, rows_k, d)
    shards = shards.transpose(1, 2).reshape(size - 1, 2, *k.shape)
    shards = torch.cat([torch.stack([k, v])[None], shards])
    ranks = [(rank - step) % size for step in range(size)]
    if chunks == 2:
        of_chunks = torch.tensor([[x, 2 * size - 1 - x] for x in ranks])
        at_k = of_chunks[:, :, None] * rows_k + torch.arange(rows_k)
        at_q = of_chunks[0][:, None] * rows_q + torch.arange(rows_q)
        seen = at_k.reshape(1, -1) <= at_q.reshape(-1, 1)
    else:
        seen = torch.ones(rows_q, size * rows_k, dtype=torch.bool)
    keys, values = shards.permute(1, 2, 0, 3, 4, 5).reshape(2, len(k), -1, d).double()
    group = heads // len(k)
    keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
    s = q.reshape(heads, -1, d).double() @ keys.mT * scale
    s = s.masked_fill(~seen, -math.inf)
    o = (s.softmax(-1) @ values).to(q.dtype).view(q.shape)
    return o, s.logsumexp(-1).float().view(q.shape[:3])


@contextlib.contextmanager
def kernel_in_pytorch():
    """The kernel for all shards at once is the one here."""

    def run(launcher, tensors, options):
        mine = launcher is hopper_ring.forward
        return (
            kernel(*tensors, *options)
            if mine
            else plans.run(launcher, tensors, options)
        )

    ring_passes.plans = SimpleNamespace(run=run)
    yield
    ring_passes.plans = plans
