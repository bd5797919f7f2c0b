"""Time one step of decoding on a CUDA GPU and write a record.

    python benchmarks/decoding.py            writes flashlib/records/decoding.json

One query a sequence, 32 heads on 8 heads of keys, d = 128, bfloat16, every sequence of a batch equally long.
What is asked is how many bytes of keys and values a second a step reads, against what a large copy reads and
writes in the same run. Each result is judged on some heads against the float64 reference first.

A step takes microseconds, so that a call from Python measures Python. Each time is that of a CUDA graph: it
holds as many calls as caches of half a gigabyte together (one at least, 64 at the most), each call with a
cache of its own, as the layers of a model have. So no call finds its keys in the L2 cache. Three rounds, all
methods of a shape in turn.

Beside flashlib.decode, contiguous and in shuffled pages, stand PyTorch's pinned kernels and, on four shapes,
its FlexAttention, whose kernel for few queries splits the keys too.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import sys
import time

import run
import torch
from torch.nn.attention import flex_attention

import flashlib
from flashlib import records
from flashlib.reference import decoding as reference
from flashlib.testing import assert_within_budget

OUTPUT = run.ROOT / "flashlib" / "records" / "decoding.json"
DTYPE = torch.bfloat16
FILES = run.passes.kernel_files("decoding")
H, H_KV, D = 32, 8, 128
OURS, FLEX = "decode", "flex"
RIVALS = tuple(run.RIVALS)
LENGTHS = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20)
LARGEST_BYTES = 75e9  # of keys and values: a batch of 64 does not reach a million
PAGED = ((1, 2**14), (1, 2**16), (1, 2**18), (8, 2**14), (8, 2**16), (64, 2**14))
FLEXIBLE = ((1, 2**14), (1, 2**16), (8, 2**14), (8, 2**16))
PAGES = (16, 64, 256)
TIMING = (
    "median of triton.testing.do_bench (CUDA events, L2 flushed before each replay) of a CUDA graph of "
    f"`calls` steps with a cache each, divided by `calls`; {run.ROUNDS} interleaved rounds"
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A method on B sequences of T keys; page is the keys of a page, 0 for a contiguous cache."""

    method: str
    B: int
    T: int
    page: int = 0

    def __str__(self):
        cache = f"pages of {self.page}" if self.page else "contiguous"
        return f"{self.method}, B = {self.B}, T = {self.T}, {cache}"

    @property
    def bytes(self):
        """Keys and values of one step."""
        return 2 * self.B * H_KV * self.T * D * DTYPE.itemsize

    @property
    def calls(self):
        return max(1, min(64, 2**29 // self.bytes))

    def identity(self):
        return {"method": self.method, "B": self.B, "T_k": self.T, "page": self.page}


def plan(quick=False):
    """[(B, T), jobs]: what is timed in turn, because it is compared. quick: three small shapes."""
    shapes = [(B, T) for B in (1, 8, 64) for T in LENGTHS]
    if quick:
        shapes = [(1, 2**12), (1, 2**14), (8, 2**14)]
    groups = []
    for B, T in shapes:
        jobs = [Job(method, B, T) for method in (OURS, *RIVALS)]
        if jobs[0].bytes > LARGEST_BYTES:
            continue
        if (B, T) in PAGED:
            jobs += [Job(OURS, B, T, page) for page in PAGES]
        if (B, T) in FLEXIBLE:
            jobs.append(Job(FLEX, B, T))
        groups.append(((B, T), jobs))
    return groups


@dataclasses.dataclass
class Inputs:
    """q ``[B, H, 1, d]``, a cache, the lengths and, for pages, a block table ``[B, T / page]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None


def inputs(B, T, page, device, seed):
    """Normal numbers; the pages of all sequences in one random order."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (B * T // page, H_KV, page, D) if page else (B, H_KV, T, D)
    q, k, v = (
        torch.empty(size, dtype=DTYPE, device=device).normal_(generator=generator)
        for size in ((B, H, 1, D), shape, shape)
    )
    table = None
    if page:
        order = torch.randperm(shape[0], generator=generator, device=device)
        table = order.to(torch.int32).view(B, T // page)
    return Inputs(q, k, v, torch.full((B,), T, dtype=torch.int32, device=device), table)


@functools.cache
def flexible():
    """FlexAttention, compiled for each shape."""
    return torch.compile(flex_attention.flex_attention, dynamic=False)


def attend(job, x):
    """One step: o ``[B, H, 1, d]``. A rival is the one that the surrounding ``run.pinned`` names."""
    if job.method == OURS:
        return flashlib.decode(x.q, x.k, x.v, seq_lens=x.seq_lens, block_table=x.block_table)
    if job.method == FLEX:
        return flexible()(x.q, x.k, x.v, enable_gqa=True)
    return torch.nn.functional.scaled_dot_product_attention(x.q, x.k, x.v, enable_gqa=True)


def judge(job, x):
    """Raise AssertionError unless the first and the last group of heads of the first and the last sequence
    are within the budget of flashlib.testing.
    """
    o = attend(job, x)
    group = H // H_KV
    for b, h in {(0, 0), (job.B - 1, H_KV - 1)}:
        heads = slice(h * group, (h + 1) * group)
        k, v = (reference.rows(y[:, h : h + 1], b, job.T, x.block_table)[None] for y in (x.k, x.v))
        assert_within_budget(x.q[b : b + 1, heads], k, v, o[b : b + 1, heads].contiguous())


def steps(job, caches):
    """The calls that a graph holds: one for each cache."""

    def action():
        return [attend(job, x) for x in caches]

    return action


def measure(jobs, device, say):
    """(cells of one shape, our failures)."""
    cells, failures = {job: job.identity() for job in jobs}, []
    for page in dict.fromkeys(job.page for job in jobs):  # one kind of cache at a time in memory
        some = [job for job in jobs if job.page == page]
        caches = [inputs(some[0].B, some[0].T, page, device, seed) for seed in range(some[0].calls)]
        ready = {}
        for job in some:
            with run.pinned(job.method):
                _, reason = run.attempt(judge, job, caches[0])
                if reason is None:
                    ready[job], reason = run.attempt(run.captured, functools.partial(steps, job, caches))
            if reason is not None:
                cells[job]["error"] = reason
                say(f"  {job}: {reason}")
                if job.method == OURS:
                    failures.append(f"{job}: {reason}")
        for turn in range(run.ROUNDS):
            order = list(ready)
            for job in order[turn:] + order[:turn]:
                us = run.time_ms(ready[job]) * 1e3 / job.calls
                cells[job].setdefault("round_us", []).append(run.digits(us))
        for job in ready:
            us = statistics.median(cells[job]["round_us"])
            cells[job] |= {"calls": job.calls, "bytes": job.bytes, "us": us}
            cells[job]["tbs"] = run.digits(job.bytes / us / 1e6)
        del caches, ready
        run.release()
    return list(cells.values()), failures


def table(record):
    """The cells as text."""
    copy = record["ceilings"]["copy_tbs"]
    head = f"{'method':12}{'B':>4}{'T':>9}{'page':>6}{'us':>10}{'TB/s':>8}{'/ copy':>8}"
    lines = [f"copy {copy:.2f} TB/s", head]
    for c in record["cells"]:
        head = f"{c['method']:12}{c['B']:4}{c['T_k']:9}{c['page']:6}"
        if "error" in c:
            lines.append(f"{head}  {c['error'][:80]}")
        else:
            lines.append(f"{head}{c['us']:10.2f}{c['tbs']:8.3f}{c['tbs'] / copy:8.3f}")
    return "\n".join(lines)


def bench(groups, device, say):
    """(record as a dict, lines that say where our results are wrong or failed)."""
    files = records.file_hashes(FILES)  # now: an edit during the run must not pass for what was measured
    record = {
        "pass": "decoding",
        **run.environment(),
        "files": files,
        "timing": TIMING,
        "ceilings": run.ceilings(device),
        "grid": {
            "H": H, "H_kv": H_KV, "T_q": 1, "d": D, "dtype": str(DTYPE).removeprefix("torch."),
            "rounds": run.ROUNDS,
            "jobs": [list(dataclasses.astuple(job)) for _, jobs in groups for job in jobs],
        },
        "cells": [],
    }  # fmt: skip
    failures = []
    for (B, T), jobs in groups:
        cells, failed = measure(jobs, device, say)
        record["cells"] += cells
        failures += failed
        rates = (f"{c['method']}{c['page'] or ''} {c.get('us', '-')} us" for c in cells)
        say(f"B = {B}, T = {T}: " + ", ".join(rates))
    return record, failures


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=pathlib.Path, help="where to write; default: flashlib/records/decoding.json"
    )
    parser.add_argument("--quick", action="store_true", help="three shapes; written only with --output")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("decoding.py: no CUDA GPU found; speeds are measured on a GPU only")
    output = options.output or (None if options.quick else OUTPUT)
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        parser.error(f"--output: expected a file in an existing folder, got {output}")
    start = time.monotonic()

    def say(text):
        print(f"[{time.monotonic() - start:4.0f} s] {text}", flush=True)

    record, failures = bench(plan(options.quick), run.DEVICE, say)
    if output is not None:
        run.write(record, output)
        say(f"wrote {output}")
    print(table(record), flush=True)
    records.Decoding("measured", record)  # raises if what was written cannot be read back
    if failures:
        sys.exit("decoding.py: these were not timed:\n  " + "\n  ".join(failures))


if __name__ == "__main__":
    main()
