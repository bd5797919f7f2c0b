"""Attention in eight bits next to bfloat16: the record fp8.

cells    forward passes over B T = TOKENS tokens, H d = WIDTH: "hopper" in bfloat16,
         "fp8" of inputs in eight bits, and "fp8+quantize" of inputs in bfloat16
errors   rms(o - o64) / rms(o64), o64 in float64, of ROWS queries and LENGTH keys:
         bfloat16, what flashlib.fp8.attention computes with all that keeps its error
         small and without parts of it, and one scale for each tensor (by
         flashlib.reference.fp8); ``expected`` is what flashlib.reference.fp8.deviation
         says. Inputs are INPUTS.
caches   steps of decoding from a cache of CACHE_BYTES in eight bits, and from the same
         one in bfloat16
"""

import functools
import math
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch

import flashlib.fp8
from benchmarks import runs, timing
from flashlib.kvcache import in_eight_bits
from flashlib.reference import fp8 as reference
from flashlib.reference import standard

TOKENS, WIDTH = 16384, 2048
LENGTHS, WIDTHS = (16384,), (64, 128, 256)
METHODS = ("hopper", "fp8", "fp8+quantize")
ROWS, LENGTH, HEADS = 256, 4096, 2
CACHE = {"B": 16, "H": 32, "H_kv": 8, "T": 16384, "d": 128}
PAGES = (0, 64)
TIMING = (
    "median of triton.testing.do_bench (CUDA events, L2 flushed before each call); "
    f"{timing.ROUNDS} interleaved rounds, each in an order drawn anew"
)
FLOP_RULE = "4 B H T^2 d, half of it with a causal mask"


def normal(generator, d):
    """Standard normal q, k and v."""
    sizes = [(1, HEADS, T, d) for T in (ROWS, LENGTH, LENGTH)]
    options = {"generator": generator, "dtype": torch.float64}
    return [torch.randn(size, **options) for size in sizes]


def outliers(generator, d):
    """FlashAttention-3's test: one number in a thousand gets another one added, with
    standard deviation 10 (Shah et al., 2024, section 4.3).
    """
    found = []
    for x in normal(generator, d):
        more = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        rare = torch.rand(x.shape, generator=generator, dtype=x.dtype) < 0.001
        found.append(x + 10.0 * more * rare)
    return found


def columns(generator, d):
    """The same two columns of queries and of keys are larger, as in trained models."""
    q, k, v = normal(generator, d)
    large = torch.ones(d, dtype=q.dtype)
    large[5], large[40] = 20**0.5, 12**0.5
    return q * large, k * large, v


def far(generator, d):
    """All keys of a head have a vector in common, ten times as long as their own."""
    q, k, v = normal(generator, d)
    return q, k + 10.0 * torch.randn(1, HEADS, 1, d, generator=generator).double(), v


INPUTS = {"normal": normal, "outliers": outliers, "columns": columns, "far keys": far}
RECIPES = {
    "full": {},
    "no transform": {"transform": False},
    "no smoothing": {"smooth": False},
    "scales alone": {"transform": False, "smooth": False},
}


class Job(NamedTuple):
    """A method on T tokens of TOKENS."""

    method: str
    T: int
    d: int
    causal: bool

    def identity(self):
        sizes = {"T": self.T, "d": self.d, "causal": self.causal}
        return {"method": self.method, "B": TOKENS // self.T, **sizes}

    @property
    def flops(self):
        return 4 * TOKENS * self.T * WIDTH / (2 if self.causal else 1)


def plan(quick=False):
    """[jobs of one shape]. quick: d = 128 alone."""
    widths = [d for d in WIDTHS if d == 128 or not quick]
    shapes = [(T, d, causal) for T in LENGTHS for causal in (0, 1) for d in widths]
    return [
        [Job(method, T, d, bool(causal)) for method in METHODS]
        for T, d, causal in shapes
    ]


def draw(*size, seed):
    """Standard normal numbers on the device."""
    generator = torch.Generator(timing.DEVICE).manual_seed(seed)
    options = {"generator": generator, "device": timing.DEVICE, "dtype": timing.DTYPE}
    return torch.randn(*size, **options)


def call(job, q, k, v, found):
    """The call of a method."""
    options = {"causal": job.causal}
    if job.method == "fp8":
        return functools.partial(flashlib.fp8.attend, found, **options)
    eight = job.method == "fp8+quantize"
    attention = flashlib.fp8.attention if eight else flashlib.attention
    return functools.partial(attention, q, k, v, **options)


def measure(jobs):
    """The cells of one shape."""
    B, T, d = TOKENS // jobs[0].T, jobs[0].T, jobs[0].d
    q, k, v = (draw(B, WIDTH // d, T, d, seed=n) for n in range(3))
    found = flashlib.fp8.quantize(q, k, v)
    calls = {job: call(job, q, k, v, found) for job in jobs}
    cells = {job: job.identity() | {"round_ms": []} for job in jobs}
    for action in calls.values():
        action()
    for job, action in timing.rounds(calls):
        cells[job]["round_ms"].append(timing.digits(timing.time_ms(action)))
    for job, cell in cells.items():
        cell["ms"] = statistics.median(cell["round_ms"])
        cell["tflops"] = timing.digits(job.flops / cell["ms"] / 1e9)
        make = functools.partial(call, job, q, k, v, found)
        cell["clock_mhz"] = timing.clock_mhz(make, cell["ms"])
    return list(cells.values())


def relative(o, wanted):
    """The root mean square of an error, relative to that of what is wanted."""
    ratio = (o - wanted).square().mean() / wanted.square().mean()
    return timing.digits(ratio.sqrt().item())


def measure_errors(name, d):
    """The cells of inputs of one name; they are rounded to 16 bits first."""
    q, k, v = INPUTS[name](torch.Generator().manual_seed(0), d)
    q, k, v = (x.to(timing.DTYPE).to(timing.DEVICE) for x in (q, k, v))
    wide = [x.double() for x in (q, k, v)]
    wanted, _ = standard.attention(*wide)
    plain, _ = reference.attention(*wide, recipe=reference.PLAIN)
    found = {
        "bfloat16": flashlib.attention(q, k, v),
        "one scale per tensor": plain,
        **{x: flashlib.fp8.attention(q, k, v, **how) for x, how in RECIPES.items()},
    }
    cells = [
        {"recipe": x, "inputs": name, "d": d, "rms": relative(o.double(), wanted)}
        for x, o in found.items()
    ]
    of_full = {"recipe": flashlib.fp8.RECIPE, "block_k": flashlib.fp8.BLOCK}
    expected, _ = reference.deviation(*wide, **of_full)
    for cell in cells:
        if cell["recipe"] == "full":
            ratio = expected.square().mean() / wanted.square().mean()
            cell["expected"] = timing.digits(ratio.sqrt().item())
    return cells


def caches(page):
    """{dtype of the cache: (a step of decoding, the bytes that it reads)}."""
    B, H, H_kv, T, d = CACHE.values()
    size = (B * T // page, H_kv, page, d) if page else (B, H_kv, T, d)
    q, k, v = draw(B, H, 1, d, seed=0), draw(*size, seed=1), draw(*size, seed=2)
    options = {"seq_lens": torch.full((B,), T, dtype=torch.int32, device=q.device)}
    if page:
        pages = torch.randperm(size[0], device=q.device).to(torch.int32)
        options["block_table"] = pages.view(B, -1)
    (k8, of_k), (v8, of_v) = in_eight_bits(k), in_eight_bits(v)
    scales = {"k_scales": of_k, "v_scales": of_v}
    decode, read = functools.partial(flashlib.decode, q), [(k, v), (k8, v8, of_k, of_v)]
    bytes_of = [sum(x.nbytes for x in tensors) for tensors in read]
    steps = (
        functools.partial(decode, k, v, **options),
        functools.partial(decode, k8, v8, **options, **scales),
    )
    names = (str(x.dtype).removeprefix("torch.") for x in (k, k8))
    return dict(zip(names, zip(steps, bytes_of, strict=True), strict=True))


def measure_caches(page):
    """The cells of caches with pages of this many keys, 0 for contiguous ones."""
    made = caches(page)
    cells = {x: {"cache": x, "page": page, "bytes": made[x][1]} for x in made}
    actions = {x: step for x, (step, _) in made.items()}
    for action in actions.values():
        action()
    for name, action in timing.rounds(actions):
        us = timing.digits(1e3 * timing.time_ms(action))
        cells[name].setdefault("round_us", []).append(us)
    for cell in cells.values():
        cell["us"] = statistics.median(cell["round_us"])
        cell["tbs"] = timing.digits(cell["bytes"] / cell["us"] / 1e6)
    return list(cells.values())


def compile_one(part, *key):
    """Launch what a part of the record times once, in a process that ends."""
    if part == "cells":
        d, causal = key
        T = max(LENGTHS)
        # Triton compiles for the number of heads, and other numbers.
        q, k, v = (draw(TOKENS // T, WIDTH // d, T, d, seed=n) for n in range(3))
        flashlib.attention(q, k, v, causal=causal)
        flashlib.fp8.attention(q, k, v, causal=causal)
    elif part == "errors":
        measure_errors("normal", *key)
    else:
        for step, _ in caches(*key).values():
            step()
    torch.cuda.synchronize()


def compile_all(quick):
    """Compile the kernels on all cores: a call then loads them from Triton's cache."""
    widths = sorted({jobs[0].d for jobs in plan(quick)})
    work = [("cells", d, causal) for d in widths for causal in (False, True)]
    work += [("errors", d) for d in widths] + [("caches", page) for page in PAGES]
    context = multiprocessing.get_context("spawn")  # a fork shares the CUDA context
    workers = min(len(work), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for found in [pool.submit(compile_one, *job) for job in work]:
            found.exception()  # a failure shows again where it is measured


def tasks(quick):
    """What is measured together, the shapes of the bars first."""
    found = []
    for jobs in plan(quick):
        action = functools.partial(measure, jobs)
        found.append(runs.Task("cells", [job.identity() for job in jobs], action))
    widths = sorted({jobs[0].d for jobs in plan(quick)})
    recipes = "bfloat16", "one scale per tensor", *RECIPES
    for name in list(INPUTS)[:1] if quick else INPUTS:
        for d in widths:
            names = [{"recipe": x, "inputs": name, "d": d} for x in recipes]
            action = functools.partial(measure_errors, name, d)
            found.append(runs.Task("errors", names, action))
    dtypes = str(timing.DTYPE).removeprefix("torch."), "float8_e4m3fn"
    for page in PAGES:
        names = [{"cache": x, "page": page} for x in dtypes]
        action = functools.partial(measure_caches, page)
        found.append(runs.Task("caches", names, action))
    return found


def run(quick, say, path=None, end=math.inf):
    """(record as a dict, lines that say what is left): see benchmarks/runs.py. quick:
    d = 128 and one kind of inputs.
    """
    fresh = {
        "pass": "fp8",
        **timing.environment(),
        "timing": TIMING,
        "flop_rule": FLOP_RULE,
        "grid": {"tokens": TOKENS, "width": WIDTH, "rows": ROWS, "keys": LENGTH},
        "decoding": CACHE,
    }
    one, work = runs.Run(fresh, say, path, end), tasks(quick)
    if left := one.left(work):
        say("fp8: compiling on all cores")
        compile_all(quick)
    one.measure(left)
    return one.result(work)
