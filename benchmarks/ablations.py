"""What one change does to a kernel, with everything else as it was: the record
ablations.

division  flash2's second step divides each tile exactly, or approximately, or once
loops     flash1, and the same with the loops swapped, with the same tiles
backward  dK and dV; with dQ computed too, stored, added up; and the two kernels
decoding  a step in one part, in several, and its two kernels alone

Some changes replace a function of Triton's language while a kernel is compiled, so that
kernels need no switches: every variant is compiled in a cache of its own, and timed as
the replay of a CUDA graph that was captured then.
"""

import contextlib
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks import decoding as decoding_benchmark
from benchmarks import timing
from flashlib import plans
from flashlib.kernels import backward, decoding, flash1, tables
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


class Variant(NamedTuple):
    """A question, what is changed, at which sizes; the tile, the call, how many calls
    it stands for, and the functions of triton.language that it is compiled with.
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

    def identity(self):
        return {name: getattr(self, name) for name in FIELDS}


def names(quick=False):
    """The identities of all variants."""
    widths, shapes = (WIDTHS[-1:], SHAPES[:1]) if quick else (WIDTHS, SHAPES)
    long = [("division", x) for x in DIVISION] + [("loops", x) for x in LOOPS]
    long += [("backward", x) for x in ("two kernels", *PARTS)]
    rows = [(*x, TOKENS // T, T, d) for d in widths for x in long]
    rows += [(ATOMIC[0], x, TOKENS // T, T, d) for d in ATOMIC[1] for x in PARTS]
    rows += [
        ("decoding", x, *shape, decoding_benchmark.D) for shape in shapes for x in STEP
    ]
    return [dict(zip(FIELDS, row, strict=True)) for row in rows]


@contextlib.contextmanager
def compiled_with(changes):
    """Compile kernels with these functions of triton.language, and forget them after.

    Triton does not know that they have changed: they have a folder of its cache for
    themselves.
    """
    before = {name: getattr(tl, name) for name in changes}
    folder = knobs.cache.dir
    if changes:
        knobs.cache.dir = "-".join((folder, *(x.__name__ for x in changes.values())))
        forget()
    for name, value in changes.items():
        setattr(tl, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(tl, name, value)
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

    fast = {"div_rn": tl.fdiv}
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
            changes = {"atomic_add": change} if change else {}
            place = (question, name, *sizes, tile(row))
            found.append(Variant(*place, call, changes=changes))
    return found


def decoding_variants(B, keys):
    """The question decoding: one query for each sequence."""
    job = decoding_benchmark.Job("decode", B, keys)
    caches = [decoding_benchmark.cache(B, keys, 0, seed) for seed in range(job.calls)]
    x = caches[0]
    row = decoding.configuration(x.k, x.v)
    splits = decoding.automatic(x.q, x.k, keys, row)
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


def plan(quick=False):
    """Functions that each give variants to compare with one another."""
    widths, shapes = (WIDTHS[-1:], SHAPES[:1]) if quick else (WIDTHS, SHAPES)
    found = [lambda d=d: forward_variants(d) for d in widths]
    found += [lambda d=d: backward_variants(d) for d in widths]
    return found + [lambda x=x: decoding_variants(*x) for x in shapes]


def measure(variants, say):
    """The cells of variants, and lines that say what failed."""
    cells, failed, replays = [], [], {}
    for number, variant in enumerate(variants):
        with compiled_with(variant.changes):
            replay, error = timing.attempt(timing.captured, lambda v=variant: v.call)
        about = {"tile": variant.tile, "calls": variant.calls}
        cells.append(variant.identity() | about)
        if error:
            cells[-1]["error"] = error
            failed.append(f"{variant.question}, {variant.variant}: {error}")
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
        say(f"{', '.join(map(str, variants[number].identity().values()))}: {us:.1f} us")
    return cells, failed


def run(quick, say):
    """(the record, lines that say what failed)."""
    record = {"pass": "ablations", **timing.environment(), "timing": TIMING}
    record["ceilings"] = timing.ceilings()
    record["grid"] = {"tokens": TOKENS, "width": WIDTH, "dtype": "bfloat16"}
    record["cells"], failed = [], []
    for make in plan(quick):
        cells, wrong = measure(make(), say)
        record["cells"] += cells
        failed += wrong
        timing.release()
    return record, failed
