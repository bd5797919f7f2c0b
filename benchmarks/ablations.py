"""What one change does to a kernel, with everything else as it was: the record
ablations.

division  flash2's second step divides each tile exactly, or approximately, or once
loops     flash1, and the same with the loops swapped, with the same tiles
backward  dK and dV; with dQ computed too, stored, added up; and the two kernels
decoding  a step in one part, in several, and its two kernels alone
float32 dV  why its error is that of one long sum
last step  the final kernel of chapter Hopper, and one thing of it undone (last_step.py)
softmax  the same kernel with one thing of its softmax changed

Some changes replace a function of Triton's language, or of a kernel, while a kernel is
compiled, so that kernels need no switches: every variant is compiled in a cache of its
own, and timed as the replay of a CUDA graph that was captured then. Each part of the
plan is first compiled in a process of its own, all parts at the same time.
"""

import contextlib
import functools
import itertools
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import decoding as decoding_benchmark
from benchmarks import last_step, runs, timing
from flashlib import plans
from flashlib.kernels import backward, decoding, flash1, tables
from flashlib.kernels import flash2 as forward
from flashlib.kernels.flash1 import LOWEST
from flashlib.kernels.steps import flash2
from flashlib.plain_checks import UNLIMITED

# isort: split
import triton  # flashlib.kernels must import it first
import triton.language as tl
from triton import knobs

TOKENS, WIDTH, T = 16384, 2048, 4096
WIDTHS = (64, 128)
TIMING = (
    "median of triton.testing.do_bench (CUDA events, L2 flushed before each replay) of "
    f"a CUDA graph; {timing.ROUNDS} interleaved rounds, each in an order drawn anew; "
    "clock_mhz: while these replays ran"
)


FIELDS = ("question", "variant", "B", "T", "d")
DIVISION = ("exact, every tile", "approximate, every tile", "approximate, once")
LOOPS = ("flash1", "flash1, approximate division", "swapped")
LOOPS += ("swapped, tiles of its own",)
PARTS = ("dK and dV", "dQ computed", "dQ stored", "dQ added")
ATOMIC = ("backward, tiles of the atomic kernel", (128,))  # at d = 64 they are the same
STEP = ("one part", "step", "parts alone", "parts alone, one key", "merge alone")
SHAPES = ((1, 1024), (1, 16384), (1, 65536), (64, 1024))  # B and keys of decoding
SUMMED = ("backward", "exact L and D", "products of blocks apart", "heads apart")
SUMMED += ("PyTorch, memory-efficient",)
SUMMED_T, SUMMED_D, SUMMED_HEADS, GROUP = 2048, 128, 16, 4  # of float32 dV
LONGEST = 240  # seconds that compiling may take


class Variant(NamedTuple):
    """A question, what is changed, at which sizes; the tile, the call, how many calls
    it stands for, what it is compiled with, ``{(module, name): value}``, and a call
    that judges it before it is timed and returns more fields of its cell, or None.
    """

    question: str
    variant: str
    B: int
    T: int
    d: int
    tile: str
    call: Callable
    calls: int = 1
    changes: dict = {}  # noqa: RUF012 - a NamedTuple has no factories
    judge: Callable = lambda: None

    def identity(self):
        return {name: getattr(self, name) for name in FIELDS}


@contextlib.contextmanager
def compiled_with(changes):
    """Compile kernels with these values of ``{(module, name): value}``, and forget them
    after.

    Triton does not know that its functions, or those that a kernel calls, have changed:
    kernels with them have a folder of its cache for themselves.
    """
    before = {key: getattr(*key) for key in changes}
    folder = knobs.cache.dir
    compiled = [x for (owner, _), x in changes.items() if owner is not plans]
    if changes:
        knobs.cache.dir = "-".join((folder, *(x.__name__ for x in compiled)))
        forget()
    for key, value in changes.items():
        setattr(*key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            setattr(*key, value)
        if changes:
            knobs.cache.dir = folder
            forget()


def forget():
    """Forget what was compiled in this process."""
    plans.PLANS.clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("flashlib.kernels"):
            for value in vars(module).values():
                if isinstance(value, triton.JITFunction):
                    value.device_caches.clear()


@triton.jit
def stored(pointer, value, mask, sem: tl.constexpr):
    """In place of an atomic addition: overwrite."""
    tl.store(pointer, value, mask=mask)


@triton.jit
def computed(pointer, value, mask, sem: tl.constexpr):
    """In place of an atomic addition: nothing, for a value that was computed."""
    tl.store(pointer, value, mask=mask & (value > 3e38))


def tensors(d, count, seed=0):
    generator = torch.Generator(timing.DEVICE).manual_seed(seed)
    options = {"generator": generator, "device": timing.DEVICE, "dtype": timing.DTYPE}
    shape = TOKENS // T, WIDTH // d, T, d
    return [torch.randn(shape, **options) for _ in range(count)]


def tile(row):
    return f"{row.BLOCK_Q} x {row.BLOCK_K}, {row.num_warps} warps"


def forward_variants(d):
    """The questions division and loops."""
    q, k, v = tensors(d, 3)
    read, how = (q, k, v), (False, d**-0.5)
    row = tables.configuration("flash2", flash2.CONFIGURATIONS, read, False)
    first = tables.configuration("flash1", flash1.CONFIGURATIONS, read, False)
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    sums = torch.zeros_like(q, dtype=torch.float32)
    m, l = torch.full_like(lse, LOWEST.value), torch.zeros_like(lse)

    def step(name, config):
        normalizer = None if name == "deferred" else torch.empty_like(lse)
        results = o, lse, normalizer
        return lambda: flash2.launch_forward(*read, *results, *how, name, config)

    def loops():
        flash1.launch_forward(*read, sums, m, l, *how, first)

    fast = {(tl, "div_rn"): tl.fdiv}
    rows = [("division", x, row, step("parallel", row)) for x in DIVISION[:2]]
    rows.append(("division", DIVISION[2], row, step("deferred", row)))
    rows += [("loops", x, first, loops) for x in LOOPS[:2]]
    rows.append(("loops", LOOPS[2], first, step("swapped", first)))
    rows.append(("loops", LOOPS[3], row, step("swapped", row)))
    return [
        Variant(question, name, TOKENS // T, T, d, tile(config), call)._replace(
            changes=fast if "approximate" in name and "once" not in name else {}
        )
        for question, name, config, call in rows
    ]


def backward_variants(d):
    """The question backward, and that with the tiles of the atomic kernel."""
    read = tensors(d, 4)
    q, k, v = read[:3]
    lse = torch.zeros(q.shape[:3], device=q.device)
    delta, lse2 = torch.zeros_like(lse), torch.full_like(lse, 12.0)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    sums, how = torch.zeros_like(q, dtype=torch.float32), (False, d**-0.5)
    two = tables.configuration("backward, dK and dV", backward.KEYS, read, False)
    one = tables.configuration("backward, dK and dV", backward.FUSED, read, False)
    last = tables.configuration("backward, dQ", backward.QUERIES, read, False)

    def keys(added, row):
        rest = delta, lse2, added, dk, dv, *how, row
        return lambda: backward.launch_keys(*read, *rest)

    def both():
        keys(None, two)()
        backward.launch_queries(*read, delta, lse2, dq, *how, last)

    sizes = TOKENS // T, T, d
    found = [Variant("backward", "two kernels", *sizes, tile(two), both)]
    for question, row in (("backward", two), (ATOMIC[0], one)):
        if question == ATOMIC[0] and d not in ATOMIC[1]:
            continue
        for name, change in zip(PARTS, (None, computed, stored, None), strict=True):
            call = keys(None if name == PARTS[0] else sums, row)
            changes = {(tl, "atomic_add"): change} if change else {}
            place = (question, name, *sizes, tile(row))
            found.append(Variant(*place, call, changes=changes))
    return found


def decoding_variants(B, keys):
    """The question decoding: one query for each sequence."""
    job = decoding_benchmark.Job("decode", B, keys)
    caches = [decoding_benchmark.cache(B, keys, 0, seed) for seed in range(job.calls)]
    x = caches[0]
    row = decoding.configuration(x.k, x.v)
    splits = decoding.choose_splits(x.q, x.k, keys, row)
    o, lse = torch.empty_like(x.q), x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    shape = *lse.shape, splits
    parts = lse.new_empty(*shape, x.q.shape[3]), lse.new_empty(shape)
    one = torch.ones_like(x.seq_lens)
    how = UNLIMITED, x.q.shape[3] ** -0.5, row

    def split(results, lengths=None, merged=False):
        def call():
            for y in caches:
                kept = y.seq_lens if lengths is None else lengths
                decoding.launch_splits(y.q, y.k, y.v, None, kept, *results, *how)
                if merged:
                    decoding.launch_merge(*parts, o, lse)

        return call

    def merge():
        for _ in caches:
            decoding.launch_merge(*parts, o, lse)

    calls = (
        split((o, lse)),
        split(parts, merged=True),
        split(parts),
        split(parts, one),
        merge,
    )
    place = B, keys, x.q.shape[3], f"{splits} parts"
    return [
        Variant("decoding", name, *place, call, job.calls)
        for name, call in zip(STEP, calls, strict=True)
    ]


DOT = tl.dot


@triton.jit
def dot_apart(a, b, acc=None, input_precision: tl.constexpr = "ieee"):
    """In place of tl.dot: the product of two blocks is summed before it is added."""
    part = DOT(a, b, input_precision=input_precision)
    if acc is not None:
        # Triton turns a sum with a product into a product that adds.
        part = tl.fma(part, tl.full(part.shape, 1.0, part.dtype), acc)
    return part


def summed_variants():
    """The question float32 dV: a row of dV sums over the queries of all heads that
    share a key.
    """
    generator = torch.Generator(timing.DEVICE).manual_seed(0)
    make = functools.partial(torch.randn, generator=generator, device=timing.DEVICE)
    q, do = (make(1, SUMMED_HEADS, SUMMED_T, SUMMED_D) for _ in range(2))
    k, v = (make(1, SUMMED_HEADS // GROUP, SUMMED_T, SUMMED_D) for _ in range(2))
    scale = SUMMED_D**-0.5
    repeated = [x.repeat_interleave(GROUP, 1) for x in (k, v)]
    s = (q.double() @ repeated[0].double().mT) * scale
    s.masked_fill_(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), -math.inf)
    lse64, p = s.logsumexp(-1), s.softmax(-1)
    delta64 = (p @ repeated[1].double() * do.double()).sum(-1)
    exact = (p.mT @ do.double()).unflatten(1, (-1, GROUP)).sum(2)
    del s, p
    o, lse = forward.forward(q, k, v, True, scale)
    row = tables.configuration(
        "backward, dK and dV", backward.KEYS, (q, k, v, do), True
    )
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    backward.launch_delta(o, lse, do, torch.zeros_like(lse), delta, lse2)
    own = delta64.float(), (lse64 * math.log2(math.e)).float()
    results = {
        x.shape[1]: [torch.empty_like(x) for _ in range(2)] for x in (k, repeated[0])
    }

    def keys(key, value, rows):
        dk, dv = results[key.shape[1]]
        read = q, key, value, do, *rows
        backward.launch_keys(*read, None, dk, dv, True, scale, row)
        return dv

    def rival():
        leaves = [x.detach().requires_grad_() for x in (q, *repeated)]
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            found = torch.nn.functional.scaled_dot_product_attention(
                *leaves, is_causal=True
            )
            return torch.autograd.grad(found, leaves, do)[2]

    calls = (
        lambda: keys(k, v, (delta, lse2)),
        lambda: keys(k, v, own),
        lambda: keys(k, v, (delta, lse2)),
        lambda: keys(*repeated, (delta, lse2)),
        rival,
    )

    def judge(call):
        dv = call().double()
        if dv.shape[1] == SUMMED_HEADS:
            dv = dv.float().unflatten(1, (-1, GROUP)).sum(2).double()
        rows = (dv - exact).square().mean(-1).sqrt()
        assert rows.max() < 1e-4, f"off by {rows.max():.1e}"
        return {"dtype": "float32", "worst_row": timing.digits(float(rows.max()))}

    place = 1, SUMMED_T, SUMMED_D, tile(row)
    return [
        Variant("float32 dV", name, *place, call)._replace(
            changes={(tl, "dot"): dot_apart} if name == SUMMED[2] else {},
            judge=functools.partial(judge, call),
        )
        for name, call in zip(SUMMED, calls, strict=True)
    ]


def last_step_variants(question, names, T, d, causal):
    """The questions last step; last step, causal; and softmax."""
    generator = torch.Generator(timing.DEVICE).manual_seed(0)
    options = {"generator": generator, "device": timing.DEVICE, "dtype": timing.DTYPE}
    shape = TOKENS // T, WIDTH // d, T, d
    read = [torch.randn(shape, **options) for _ in range(3)]
    o = torch.empty_like(read[0])
    results = o, o.new_empty(o.shape[:3], dtype=torch.float32)
    found = []
    for name in names:
        call = last_step.launched(name, read, results, causal)
        place = question, name, TOKENS // T, T, d
        text = last_step.described(name, T, d, causal)
        changes = last_step.CHANGES[name]
        judge = functools.partial(last_step.judge, call, read, results, causal)
        found.append(Variant(*place, text, call, 1, changes, judge))
    return found


class Part(NamedTuple):
    """Variants to compare with one another: what makes them, and the values of FIELDS
    that they have.
    """

    make: Callable
    arguments: tuple
    rows: list

    def identities(self):
        return [dict(zip(FIELDS, row, strict=True)) for row in self.rows]


def plan(quick=False, hopper=True):
    """The Parts; hopper: with those that need a Hopper GPU."""
    widths, shapes = (WIDTHS[-1:], SHAPES[:1]) if quick else (WIDTHS, SHAPES)
    parts = []

    def add(make, arguments, pairs, *place):
        parts.append(Part(make, arguments, [(*pair, *place) for pair in pairs]))

    for d in widths:
        pairs = [("division", x) for x in DIVISION] + [("loops", x) for x in LOOPS]
        add(forward_variants, (d,), pairs, TOKENS // T, T, d)
    for d in widths:
        pairs = [("backward", x) for x in ("two kernels", *PARTS)]
        pairs += [(ATOMIC[0], x) for x in PARTS if d in ATOMIC[1]]
        add(backward_variants, (d,), pairs, TOKENS // T, T, d)
    for shape in shapes:
        pairs = [("decoding", x) for x in STEP]
        add(decoding_variants, shape, pairs, *shape, decoding_benchmark.D)
    pairs = [("float32 dV", x) for x in SUMMED]
    add(summed_variants, (), pairs, 1, SUMMED_T, SUMMED_D)
    for shape in last_step.shapes(quick) if hopper else ():
        n, d, causal = shape
        questions = {last_step.question(causal): last_step.compared(*shape)}
        if d in WIDTHS and not causal:
            questions["softmax"] = [last_step.FINAL, *last_step.SOFTMAX]
        for question, names in questions.items():
            pairs = itertools.product([question], names)
            add(last_step_variants, (question, names, *shape), pairs, TOKENS // n, n, d)
    return parts


def names(quick=False):
    """The identities of all variants."""
    return [x for part in plan(quick) for x in part.identities()]


def compile_part(part):
    """Compile the kernels of a part of the plan, for Triton's cache on disk."""
    for variant in part.make(*part.arguments):
        with compiled_with(variant.changes):
            timing.attempt(variant.call)
    torch.cuda.synchronize()


def compile_parts(parts):
    """Compile all parts at the same time, each in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(len(parts)) as pool:
        pool.map_async(compile_part, parts, chunksize=1).get(LONGEST)


def measure(variants):
    """The cells of variants."""
    cells, replays = [], {}
    for number, variant in enumerate(variants):
        with compiled_with(variant.changes):
            more, error = timing.attempt(variant.judge)
            if not error:
                capture = functools.partial(timing.captured, lambda v=variant: v.call)
                replay, error = timing.attempt(capture)
        about = {"tile": variant.tile, "calls": variant.calls}
        cells.append(variant.identity() | about | (more or {}))
        if error:
            cells[-1]["error"] = error
            continue
        replays[number] = replay
        cells[-1]["graph_us"] = []
    for number, replay in timing.rounds(replays):
        us = 1e3 * timing.time_ms(replay) / variants[number].calls
        cells[number]["graph_us"].append(timing.digits(us))
    for number, replay in replays.items():
        us = statistics.median(cells[number]["graph_us"])
        mhz = timing.clock_mhz(
            lambda replay=replay: replay, us * variants[number].calls / 1e3
        )
        cells[number] |= {"us": us, "clock_mhz": mhz}
    return cells


def dated(part):
    """The cells of a part of the plan, with the day on which they were measured."""
    date = timing.environment()["date"]
    return [cell | {"date": date} for cell in measure(part.make(*part.arguments))]


def run(quick, say, path=None, end=math.inf):
    """(the record, lines that say what has failed and what is left): see
    benchmarks/runs.py.
    """
    fresh = {"pass": "ablations", **timing.environment(), "timing": TIMING}
    grid = {"tokens": TOKENS, "width": WIDTH, "dtype": "bfloat16"}
    fresh |= {"ceilings": None, "grid": grid}
    one = runs.Run(fresh, say, path, end)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    parts = plan(quick, hopper)
    tasks = [
        runs.Task("cells", part.identities(), functools.partial(dated, part))
        for part in parts
    ]
    if hopper:
        pairs = itertools.product(last_step.WAITS, WIDTHS)
        names = [{"variant": variant, "d": d} for variant, d in pairs]
        action = functools.partial(last_step.code_cells, compiled_with)
        tasks.append(runs.Task("code", names, action))
    left = one.left(tasks)
    some = [part for part, task in zip(parts, tasks, strict=False) if task in left]
    if len(some) > 1:
        _, error = timing.attempt(compile_parts, some)
        say(f"compiled, with {error or 'no error'}")
    one.measure(left)
    return one.result(tasks)
