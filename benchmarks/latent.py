"""Times of latent attention, expanded and absorbed: the record latent.

Expanded (``cells``): 192 columns of queries and keys and 128 of values, forward and
backward, as the other passes time their shapes.

Absorbed (``absorbed``): one step of decoding, d_c = 512 and 64 rotary columns, in
shuffled pages, timed as the pass decoding times its steps: Triton's kernel, and on a
Hopper GPU the one for Hopper. Next to each time is the roof: the time that the
operations take at the rate of a large matrix product, or the rows of the cache at the
rate of a large copy, whichever is longer, both rates of the same run.
"""

import functools
import math
from typing import NamedTuple

import torch

import flashlib
from benchmarks import decoding, fa4, passes, runs, speed, timing
from flashlib.testing import assert_within_budget

D_C, D_R, D, D_V = 512, 64, 192, 128
# By "auto", and by Triton's kernel where "auto" takes the one for Hopper.
OURS, IN_TRITON = "decode_latent", "decode_latent-triton"
PAGE = 64
SCALE = D**-0.5
LARGEST_PART = 16  # heads that are judged together
# (H, B, T): compute binds 128 heads, memory 16, and single sequences are few programs.
STEPS = (
    *((128, B, T) for B in (32, 64, 128) for T in (4096, 8192, 16384)),
    (16, 64, 8192), (16, 1, 65536), (128, 1, 65536),
)  # fmt: skip
FLOP_RULE = (
    "forward: 2 B H T^2 (d + d_v) operations, or half that with a causal mask; "
    "backward: 2.5 times that; absorbed: 2 B H T (2 d_c + d_r)"
)
TIMING = f"cells: {speed.TIMING}; absorbed: {decoding.TIMING}"


class Expanded(passes.Shape):
    """A Shape whose values have D_V columns."""

    __slots__ = ()

    def flops(self, direction):
        return super().flops(direction) * (self.d + D_V) / (2 * self.d)

    def inputs(self, layout):
        """As Shape.inputs, v and do with their own width."""
        q, k, *_ = super().inputs(layout)
        *_, v, do = passes.Shape(*self._replace(d=D_V)).inputs(layout)
        return [q, k, v, do]


class Job(NamedTuple):
    """A method on B sequences of T rows, with H heads of queries."""

    method: str
    H: int
    B: int
    T: int

    @property
    def bytes(self):
        """The rows of the cache."""
        return self.B * self.T * (D_C + D_R) * timing.DTYPE.itemsize

    @property
    def flops(self):
        return 2 * self.B * self.H * self.T * (2 * D_C + D_R)

    @property
    def calls(self):
        return max(1, min(64, 2**29 // self.bytes))

    def roof_us(self, ceilings):
        """Microseconds at the rates of a matrix product and of a copy."""
        compute = self.flops / ceilings["matmul_tflops"] / 1e6
        return compute, self.bytes / ceilings["copy_tbs"] / 1e6

    def identity(self):
        return {"method": self.method, "H": self.H, "B": self.B, "T_k": self.T}


class Cache(NamedTuple):
    """q ``[B, H, 1, d_c + d_r]``, pages ``[pages, PAGE, d_c + d_r]`` in a random order,
    the lengths, and the block table ``[B, T / PAGE]``.
    """

    q: torch.Tensor
    pages: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


def shapes(quick=False):
    """The expanded shapes, B T = TOKENS and 16 heads."""
    T = 1024 if quick else 8192
    return [Expanded(passes.TOKENS // T, 16, T, D, causal) for causal in (False, True)]


def expanded(methods, quick=False, rival=False):
    """[jobs of one shape], each ``(shape, job)``; rival: with FA-4."""
    found = []
    for shape in shapes(quick):
        for direction in (passes.FORWARD, passes.BACKWARD):
            # In a forward pass, FA-4's order of dQ means nothing.
            forward = direction == passes.FORWARD
            others = fa4.METHODS[: 1 if forward else None] if rival else ()
            some = (*methods, *others)
            jobs = [passes.Job(method, direction, "contiguous") for method in some]
            found.append([(shape, job) for job in jobs])
    return found


def on_hopper():
    """Whether the kernel for Hopper can run here."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def absorbed(quick=False):
    """[jobs of one shape]."""
    steps = ((16, 2, 4096),) if quick else STEPS
    methods = (OURS, *(IN_TRITON,) * on_hopper(), *passes.RIVALS)
    return [[Job(method, *step) for method in methods] for step in steps]


def plan(quick=False, rival=None):
    """[(part of the record, jobs that are compared)], the bars first: a run may end
    early. rival: whether FA-4 is there to be compared with.
    """
    rival = fa4.missing() is None if rival is None else rival
    ours = [("cells", x) for x in expanded(("auto", "sdpa-cudnn"), quick, rival)]
    steps = [("absorbed", jobs) for jobs in absorbed(quick)]
    tiled = [("cells", jobs) for jobs in expanded(("flash2",), quick)]
    return [*ours, *steps, *tiled]


class Kernels(NamedTuple):
    """What speed.compile_all compiles: the kernels of "auto"."""

    jobs: list

    def groups(self):
        return {(shape, job.direction): [job] for shape, job in self.jobs}

    def memory_jobs(self):
        return []


def cache(job, seed):
    """Normal numbers; the pages of all sequences in one random order."""
    generator = torch.Generator(timing.DEVICE).manual_seed(seed)
    options = {"generator": generator, "device": timing.DEVICE}
    width, pages = D_C + D_R, job.B * job.T // PAGE
    q = torch.randn(job.B, job.H, 1, width, dtype=timing.DTYPE, **options)
    rows = torch.randn(pages, PAGE, width, dtype=timing.DTYPE, **options)
    table = torch.randperm(pages, **options).to(torch.int32).view(job.B, -1)
    lengths = torch.full((job.B,), job.T, dtype=torch.int32, device=timing.DEVICE)
    return Cache(q, rows, lengths, table)


def attend(job, x):
    """One step: o ``[B, H, 1, d_c]``. `passes.pinned` chooses the kernel of a rival,
    which reads the rows as if they were those of a contiguous cache.
    """
    if job.method in (OURS, IN_TRITON):
        pages = {"seq_lens": x.seq_lens, "block_table": x.block_table}
        pages["method"] = "latent" if job.method == IN_TRITON else "auto"
        return flashlib.decode_latent(x.q, x.pages, d_c=D_C, scale=SCALE, **pages)
    rows = x.pages.view(job.B, 1, job.T, D_C + D_R)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(x.q, rows, rows[..., :D_C], scale=SCALE, enable_gqa=True)


def judge(job, x):
    """Raise AssertionError unless the first heads of the first sequence and the last
    heads of the last are within the budget of flashlib.testing.
    """
    o = attend(job, x)
    some = min(LARGEST_PART, job.H)
    for b, heads in ((0, slice(0, some)), (job.B - 1, slice(job.H - some, job.H))):
        rows = x.pages.view(job.B, job.T, D_C + D_R)[b]
        if job.method in (OURS, IN_TRITON):
            rows = x.pages[x.block_table[b].long()].view(job.T, D_C + D_R)
        k, q = rows[None, None], x.q[b : b + 1, heads]
        found = o[b : b + 1, heads].contiguous()
        assert_within_budget(q, k, k[..., :D_C], found, scale=SCALE)


def measure(jobs, ceilings):
    """The cells of one absorbed shape."""
    cells = {job: job.identity() for job in jobs}
    caches = [cache(jobs[0], seed) for seed in range(jobs[0].calls)]
    speed.time_steps(cells, caches, judge, attend)
    for job, cell in cells.items():
        if "us" in cell:
            compute, memory = job.roof_us(ceilings)
            cell["tflops"] = timing.digits(job.flops / cell["us"] / 1e6)
            cell["bound"] = "compute" if compute > memory else "memory"
            cell["of_roof"] = timing.digits(max(compute, memory) / cell["us"])
    return list(cells.values())


def run(quick, say, path=None, end=math.inf):
    """(record as a dict, lines that say what of ours has failed and what is left): see
    benchmarks/runs.py.
    """
    if reason := fa4.missing():
        say(f"latent: FA-4 is left out: {reason}")
    dtype = str(timing.DTYPE).removeprefix("torch.")
    grid = {"tokens": passes.TOKENS, "d": D, "d_v": D_V, "d_c": D_C, "d_r": D_R}
    fresh = {
        "pass": "latent", **timing.environment(), "flop_rule": FLOP_RULE,
        "timing": TIMING,
        "grid": {**grid, "page": PAGE, "dtype": dtype, "rounds": timing.ROUNDS},
        "ceilings": None,
    }  # fmt: skip
    one, tasks, ours = runs.Run(fresh, say, path, end), [], []
    for part, jobs in plan(quick):
        if part == "cells":
            tasks.append(speed.timed(jobs[0][0], [job for _, job in jobs]))
            ours += [pair for pair in jobs if pair[1].method == "auto"]
        else:
            action = functools.partial(measure, jobs, one.record["ceilings"])
            tasks.append(runs.Task(part, [job.identity() for job in jobs], action))
    if left := one.left(tasks):
        speed.compile_all(Kernels(ours))
    one.measure(left)
    return one.result(tasks)
