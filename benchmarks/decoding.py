"""Times of one step of decoding: the record decoding.

One query a sequence, 32 heads on 8 heads of keys, d = 128, bfloat16, every sequence of
a batch equally long. What counts is the rate at which a step reads keys and values,
compared with a large copy of the same run.

A step takes microseconds, so a call from Python would measure Python. Each time is that
of a CUDA graph, which holds as many calls as caches of half a gigabyte together (at
most 64), each with a cache of its own as the layers of a model have. No call finds its
keys in the L2 cache.

flashlib.decode, contiguous and in shuffled pages, is compared with PyTorch's pinned
kernels and on four shapes with FlexAttention, whose kernel for few queries splits the
keys, too.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch.nn.attention import flex_attention

import flashlib
from benchmarks import passes, runs, speed, timing
from flashlib.reference import decoding as reference
from flashlib.testing import assert_within_budget

H, H_KV, D = 32, 8, 128
OURS, FLEX = "decode", "flex"
LENGTHS = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20)
LARGEST_BYTES = 75e9  # of keys and values: a batch of 64 does not reach a million
PAGED = ((1, 2**14), (1, 2**16), (1, 2**18), (8, 2**14), (8, 2**16), (64, 2**14))
FLEXIBLE = ((1, 2**14), (1, 2**16), (8, 2**14), (8, 2**16))
PAGES = (16, 64, 256)
TIMING = (
    "median of triton.testing.do_bench (CUDA events, L2 flushed before each replay) of "
    "a CUDA graph of `calls` steps with a cache each, divided by `calls`; "
    f"{timing.ROUNDS} interleaved rounds, each in an order drawn anew"
)


class Job(NamedTuple):
    """A method on B sequences of T keys; page is the keys of a page, 0 for a contiguous
    cache.
    """

    method: str
    B: int
    T: int
    page: int = 0

    @property
    def bytes(self):
        """Keys and values of one step."""
        return 2 * self.B * H_KV * self.T * D * timing.DTYPE.itemsize

    @property
    def calls(self):
        return max(1, min(64, 2**29 // self.bytes))

    def identity(self):
        return {"method": self.method, "B": self.B, "T_k": self.T, "page": self.page}


def plan(quick=False):
    """[jobs of one shape]: what is compared. quick: three small shapes."""
    shapes = [(B, T) for B in (1, 8, 64) for T in LENGTHS]
    if quick:
        shapes = [(1, 2**12), (1, 2**14), (8, 2**14)]
    groups = []
    for B, T in shapes:
        jobs = [Job(method, B, T) for method in (OURS, *passes.RIVALS)]
        if jobs[0].bytes > LARGEST_BYTES:
            continue
        if (B, T) in PAGED:
            jobs += [Job(OURS, B, T, page) for page in PAGES]
        if (B, T) in FLEXIBLE:
            jobs.append(Job(FLEX, B, T))
        groups.append(jobs)
    return groups


class Cache(NamedTuple):
    """q ``[B, H, 1, d]``, a cache, the lengths and, for pages, a block table
    ``[B, T / page]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None


def cache(B, T, page, seed):
    """Normal numbers; the pages of all sequences in one random order."""
    generator = torch.Generator(timing.DEVICE).manual_seed(seed)
    options = {"generator": generator, "device": timing.DEVICE}
    shape = (B * T // page, H_KV, page, D) if page else (B, H_KV, T, D)
    q, k, v = (
        torch.randn(size, dtype=timing.DTYPE, **options)
        for size in ((B, H, 1, D), shape, shape)
    )
    table = None
    if page:
        order = torch.randperm(shape[0], **options)
        table = order.to(torch.int32).view(B, T // page)
    lengths = torch.full((B,), T, dtype=torch.int32, device=timing.DEVICE)
    return Cache(q, k, v, lengths, table)


@functools.cache
def flexible():
    """FlexAttention, compiled for each shape."""
    return torch.compile(flex_attention.flex_attention, dynamic=False)


def attend(job, x):
    """One step: o ``[B, H, 1, d]``. `passes.pinned` chooses the kernel of a rival."""
    if job.method == OURS:
        lengths, table = x.seq_lens, x.block_table
        return flashlib.decode(x.q, x.k, x.v, seq_lens=lengths, block_table=table)
    if job.method == FLEX:
        return flexible()(x.q, x.k, x.v, enable_gqa=True)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(x.q, x.k, x.v, enable_gqa=True)


def judge(job, x):
    """Raise AssertionError unless the first group of heads of the first sequence and
    the last group of the last are within the budget of flashlib.testing.
    """
    o = attend(job, x)
    group = H // H_KV
    for b, h in {(0, 0), (job.B - 1, H_KV - 1)}:
        heads = slice(h * group, (h + 1) * group)
        one = slice(b, b + 1)
        k, v = (
            reference.rows(y[:, h : h + 1], b, job.T, x.block_table)[None]
            for y in (x.k, x.v)
        )
        assert_within_budget(x.q[one, heads], k, v, o[one, heads].contiguous())


def measure(jobs):
    """The cells of one shape."""
    cells = {job: job.identity() for job in jobs}
    for page in dict.fromkeys(job.page for job in jobs):  # one cache in memory at once
        some = {job: cell for job, cell in cells.items() if job.page == page}
        seeds = range(next(iter(some)).calls)
        caches = [cache(jobs[0].B, jobs[0].T, page, seed) for seed in seeds]
        speed.time_steps(some, caches, judge, attend)
        del caches
        timing.release()
    return list(cells.values())


def run(quick, say, path=None, end=math.inf):
    """(record as a dict, lines that say what of ours has failed and what is left): see
    benchmarks/runs.py.
    """
    dtype = str(timing.DTYPE).removeprefix("torch.")
    grid = {"H": H, "H_kv": H_KV, "T_q": 1, "d": D, "dtype": dtype}
    fresh = {
        "pass": "decoding",
        **timing.environment(),
        "timing": TIMING,
        "ceilings": None,
        "grid": {**grid, "rounds": timing.ROUNDS},
    }
    one = runs.Run(fresh, say, path, end)
    tasks = [
        runs.Task(
            "cells", [x.identity() for x in jobs], functools.partial(measure, jobs)
        )
        for jobs in plan(quick)
    ]
    one.measure(one.left(tasks))
    return one.result(tasks)
