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


class Variant(NamedTuple):
    """A question, what is changed, at which sizes, the call, and the functions of
    triton.language that it is compiled with.
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


FIELDS = ("question", "variant", "B", "T", "d", "tile")


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

    def step(name, config):
        l = None if name == "deferred" else torch.empty_like(lse)
        return lambda: flash2.launch_forward(*read, o, lse, l, *how, name, config)

    def loops():
        sums = torch.zeros_like(q, dtype=torch.float32)
        m, l = torch.full_like(lse, LOWEST.value), torch.zeros_like(lse)
        return lambda: flash1.launch_forward(*read, sums, m, l, *how, first)

    sizes = TOKENS // T, T, d
    fast = {"div_rn": tl.fdiv}
    return [
        Variant(
            "division", "exact, every tile", *sizes, tile(row), step("parallel", row)
        ),
        Variant(
            "division",
            "approximate, every tile",
            *sizes,
            tile(row),
            step("parallel", row),
            changes=fast,
        ),
        Variant(
            "division", "approximate, once", *sizes, tile(row), step("deferred", row)
        ),
        Variant("loops", "flash1", *sizes, tile(first), loops()),
        Variant(
            "loops",
            "flash1, approximate division",
            *sizes,
            tile(first),
            loops(),
            changes=fast,
        ),
        Variant("loops", "swapped", *sizes, tile(first), step("swapped", first)),
        Variant("loops", "swapped", *sizes, tile(row), step("swapped", row)),
    ]


def backward_variants(d):
    """The question backward."""
    read = tensors(d, 4)
    q, k, v = read[:3]
    lse = torch.zeros(q.shape[:3], device=q.device)
    delta, lse2 = torch.zeros_like(lse), torch.full_like(lse, 12.0)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    sums = torch.zeros_like(q, dtype=torch.float32)
    how, sizes = (False, d**-0.5), (TOKENS // T, T, d)
    two = tables.configuration("backward, dK and dV", backward.KEYS, read, False)
    one = tables.configuration("backward, dK and dV", backward.FUSED, read, False)
    last = tables.configuration("backward, dQ", backward.QUERIES, read, False)

    def keys(added, row):
        return lambda: backward.launch_keys(
            *read, delta, lse2, added, dk, dv, *how, row
        )

    def both():
        keys(None, two)()
        backward.launch_queries(*read, delta, lse2, dq, *how, last)

    found = [Variant("backward", "two kernels", *sizes, tile(two), both)]
    for row in {tile(row): row for row in (two, one)}.values():
        place = (*sizes, tile(row))
        found += [
            Variant("backward", "dK and dV", *place, keys(None, row)),
            Variant(
                "backward",
                "dQ computed",
                *place,
                keys(sums, row),
                changes={"atomic_add": computed},
            ),
            Variant(
                "backward",
                "dQ stored",
                *place,
                keys(sums, row),
                changes={"atomic_add": stored},
            ),
            Variant("backward", "dQ added", *place, keys(sums, row)),
        ]
    return found


def decoding_variants(B, keys):
    """The question decoding: one query for each sequence."""
    job = decoding_benchmark.Job("decode", B, keys)
    caches = [decoding_benchmark.cache(B, keys, 0, seed) for seed in range(job.calls)]
    x = caches[0]
    row = decoding.configuration(x.k, x.v)
    splits = decoding.automatic(x.q, x.k, keys, row)
    o, lse = torch.empty_like(x.q), x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    parts = (
        lse.new_empty(*lse.shape, splits, x.q.shape[3]),
        lse.new_empty(*lse.shape, splits),
    )
    one = torch.ones_like(x.seq_lens)
    how = UNLIMITED, x.q.shape[3] ** -0.5, row

    def split(results, lengths=None):
        def call():
            for y in caches:
                kept = y.seq_lens if lengths is None else lengths
                decoding.launch_splits(y.q, y.k, y.v, None, kept, *results, *how)

        return call

    def merge():
        for _ in caches:
            decoding.launch_merge(*parts, o, lse)

    def step():
        for y in caches:
            decoding.launch_splits(y.q, y.k, y.v, None, y.seq_lens, *parts, *how)
            decoding.launch_merge(*parts, o, lse)

    place = B, keys, x.q.shape[3], f"{splits} parts"
    named = {
        "one part": split((o, lse)),
        "step": step,
        "parts alone": split(parts),
        "parts alone, one key": split(parts, one),
        "merge alone": merge,
    }
    if splits == 1:
        named = {"one part": named["one part"], "one key": split((o, lse), one)}
    return [
        Variant("decoding", name, *place, call, job.calls)
        for name, call in named.items()
    ]


def plan(quick=False):
    """Functions that each give variants to compare with one another."""
    found = []
    for d in WIDTHS[-1:] if quick else WIDTHS:
        found += [lambda d=d: forward_variants(d), lambda d=d: backward_variants(d)]
    for B, keys in (
        ((1, 1024),) if quick else ((1, 1024), (1, 16384), (1, 65536), (64, 1024))
    ):
        found.append(lambda B=B, keys=keys: decoding_variants(B, keys))
    return found


def measure(variants, say):
    """The cells of variants, and lines that say what failed."""
    cells, failed, replays = [], [], {}
    for number, variant in enumerate(variants):
        with compiled_with(variant.changes):
            replay, error = timing.attempt(timing.captured, lambda v=variant: v.call)
        cells.append(variant.identity() | {"calls": variant.calls})
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
