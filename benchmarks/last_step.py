"""From `overlapped` to `persistent` of chapter Hopper, one change at a time, and what
its softmax costs, for the record ablations.

"hopper" in that record is hopper's kernel with the maximum of every block, which the
chapter and the record hopper call `persistent`. Every variant is this kernel with one
thing changed, or `overlapped`; KEEP is the kernel that ``flashlib.attention`` runs. Up
to commit 156cf7b, it did not check its sums. A variant is judged before it is timed.
"""

import itertools
import re
import struct
import subprocess
import tempfile
from pathlib import Path

import torch

from benchmarks import timing
from flashlib import plans, score_mods
from flashlib.kernels import hopper
from flashlib.kernels.hopper import (
    before_next_wait,
    change_tile,
    new_maximum,
    release,
    start_scores,
    start_values,
    thread_sums,
    warpgroup_mma_init,
    warpgroup_mma_wait,
    weights,
)
from flashlib.kernels.steps import hopper as steps
from flashlib.testing import assert_within_budget

# isort: split
import triton  # flashlib.kernels must import it first
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WIDTHS, LENGTHS = (64, 128, 256), (4096, 16384)
HEADS, QUERIES = 8, 128  # what is judged: the last ones


@gluon.jit
def not_pinned(m):
    """In place of before_next_wait: nothing keeps ptxas from moving the wait."""
    return m


@gluon.jit
def attend_late(
    bits, acc, m, l, invariants, change, count, col,
    MASKED: gl.constexpr, RAGGED: gl.constexpr = False,
):  # fmt: skip
    """In place of hopper.attend, without windows and a bias: the wait for P V comes
    after the exponentials, held there by a store that needs their sums.
    """
    q_tile, k_ring, v_ring, queries, sizes, scale_log2 = invariants
    s = start_scores(q_tile, k_ring, count)
    acc = start_values(acc, bits, v_ring, count - 1)
    s = warpgroup_mma_wait(1, [s])  # [ROWS, BLOCK_K]
    s = change_tile(s, None, queries, col, sizes, change)
    s, m_new = new_maximum(s, m, scale_log2, queries.seen, col, MASKED)
    p, alpha = weights(s, m, m_new, scale_log2)
    sums = thread_sums(p)  # [ROWS, 4]
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + sums
    l = before_next_wait(l)
    o = warpgroup_mma_wait(0, [acc])  # [ROWS, D]
    release(k_ring, count)
    release(v_ring, count - 1)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))  # [ROWS]
    o = o * alpha[:, None]  # [ROWS, D]
    bits = p.to(k_ring.slots.dtype).to(gl.int16, bitcast=True)  # [ROWS, BLOCK_K]
    return bits, warpgroup_mma_init(o), m_new, l


@gluon.jit
def larger(x):
    """The larger of each number [rows, columns] and the one half the columns on."""
    rows: gl.constexpr = x.shape[0]
    half: gl.constexpr = x.shape[1] // 2
    first, second = gl.split(gl.permute(gl.reshape(x, [rows, 2, half]), (0, 2, 1)))
    return gl.maximum(first, second)


@gluon.jit
def maximum_by_halves(s, m, scale_log2, seen, col, MASKED: gl.constexpr):
    """In place of new_maximum: a thread compares the halves of its numbers of a row, of
    which no comparison waits for another, then those of what is left, to the end.
    """
    if MASKED:
        j = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))  # [BLOCK_K]
        s = gl.where(j[None, :] < (seen - col)[:, None], s, -float("inf"))
    eight = larger(larger(larger(s)))
    if s.shape[1] == 128:
        eight = larger(eight)
    largest = gl.convert_layout(gl.max(eight, 1), gl.SliceLayout(1, s.type.layout))
    return s, gl.maximum(m, largest * scale_log2)


# 2^x for -1/2 <= x <= 1/2, the highest coefficient first, to a relative 7.5e-8.
COEFFICIENTS = (
    1.327647141e-3, 9.67554133e-3, 5.550713275e-2, 0.2402211972, 0.6931469671, 1.0
)  # fmt: skip


def with_polynomial():
    """PTX for four exponentials in base 2, the last of them by a polynomial."""
    three = [f"ex2.approx.ftz.f32 ${n}, ${n + 4};" for n in range(3)]
    # Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits.
    split = [
        "max.NaN.f32 x, $7, 0fC2FE0000;", "add.f32 n, x, 0f4B400000;",
        "sub.f32 y, n, 0f4B400000;", "sub.f32 x, x, y;",
    ]  # fmt: skip
    first, *rest = (f"0f{struct.pack('>f', c).hex().upper()}" for c in COEFFICIENTS)
    sum_up = [f"mov.f32 y, {first};", *(f"fma.rn.f32 y, y, x, {c};" for c in rest)]
    scale = ["shl.b32 e, n, 23;", "add.s32 e, e, 0x3F800000;", "mul.f32 $3, y, e;"]
    registers = "{ .reg .f32 x, n, y; .reg .b32 e;"
    return " ".join([registers, *three, *split, *sum_up, *scale, "}"])


FOUR = gl.constexpr(with_polynomial())


@gluon.jit
def weights_by_polynomial(s, m, m_new, scale_log2):
    """In place of weights: every fourth exponential is a polynomial."""
    p = gl.inline_asm_elementwise(
        FOUR, "=f,=f,=f,=f,f,f,f,f", [s * scale_log2 - m_new[:, None]],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip
    return p, gl.exp2(m - m_new)


THREAD_SUMS = thread_sums


@gluon.jit
def row_sums(p):
    """In place of thread_sums: the sums of whole rows, which takes shuffles in every
    block. Each of the four threads of a row keeps a quarter.
    """
    sums = THREAD_SUMS(p)  # [ROWS, 4]
    return gl.zeros_like(sums) + (0.25 * gl.sum(sums, 1))[:, None]


LAUNCH = plans.launch


def one_program_each(kernel, x, programs, *arguments, **options):
    """In place of plans.launch: as many programs as tiles. None finds a second one."""
    tiles = arguments[kernel.arg_names.index("tiles")]
    LAUNCH(kernel, x, tiles, *arguments, **options)


ORDER, FINAL, EACH = "overlapped", "hopper", "a program for each tile"
FREE, LATE = "wait where ptxas puts it", "wait after the exponentials"
SUMS, SHARED_Q = "sums of rows in every block", "Q in shared memory"
WAITS = {FINAL: {}, FREE: {(hopper, "before_next_wait"): not_pinned}}
WAITS |= {LATE: {(hopper, "attend"): attend_late}}
CHANGES = WAITS | {
    ORDER: {},
    EACH: {(plans, "launch"): one_program_each},
    SUMS: {(hopper, "thread_sums"): row_sums},
    SHARED_Q: {},
}
# Of the softmax.
KEEP, HALVES = "no maximum after the first block", "maximum by halves"
POLYNOMIAL = "every fourth exponential by a polynomial"
SOFTMAX = {
    KEEP: {},
    HALVES: {(hopper, "new_maximum"): maximum_by_halves},
    POLYNOMIAL: {(hopper, "weights"): weights_by_polynomial},
}
CHANGES |= SOFTMAX


def shapes(quick=False):
    """[(T, d, causal)]: with a causal mask only where tiles do not depend on T."""
    if quick:
        return [(LENGTHS[0], 128, False)]
    full = list(itertools.product(LENGTHS, WIDTHS, (False,)))
    return full + list(itertools.product(LENGTHS, WIDTHS[1:], (True,)))


def compared(T, d, causal):
    """The variants that are compared at a shape."""
    found = [ORDER, FINAL, EACH]
    if min(LENGTHS) == T and not causal:
        found += [FREE, LATE, SUMS]
        found += [SHARED_Q] if hopper.choose_tile(d, T, causal).HOLD_Q else []
    return found


def question(causal):
    return "last step, causal" if causal else "last step"


def tile_of(name, T, d, causal):
    """The ForwardTile of a variant of the final kernel."""
    tile = hopper.choose_tile(d, T, causal)
    return tile._replace(HOLD_Q=False) if name == SHARED_Q else tile


def launched(name, read, results, causal):
    """A call that fills the results, o and lse, by the variant of this name."""
    T, d = read[0].shape[2:]
    how = causal, d**-0.5
    if name == ORDER:
        return lambda: steps.launch_forward(*read, *results, *how, name)
    how = score_mods.unchanged(*how), None, tile_of(name, T, d, causal), name == KEEP
    return lambda: hopper.launch_forward(*read, *results, *how)


def described(name, T, d, causal):
    """The tile of a variant, in words."""
    groups, keys, slots, hold = 2, *steps.TILES[d], False
    if name != ORDER:
        groups, keys, slots, hold = tile_of(name, T, d, causal)
    held = ", Q in registers" if hold else ""
    return f"{64 * groups} x {keys}, {slots} slots{held}"


def judge(call, read, results, causal):
    """Raise AssertionError unless a call fills the results, of which the last queries
    of the last heads are judged, within the budget.
    """
    for x in results:
        x.fill_(float("nan"))
    call()
    assert not any(x.isnan().any() for x in results), "rows that were not computed"
    q, k, v, o, lse = (x.flatten(0, 1)[None, -HEADS:] for x in (*read, *results))
    q, o, lse = (x[:, :, -QUERIES:] for x in (q, o, lse))
    assert_within_budget(q, k, v, o, lse, causal=causal)


# -- the machine code

COUNTED = {"maxima": "FMNMX", "exponentials": r"MUFU\.EX2", "multiplications": "FMUL"}
COUNTED |= {"roundings": "F2FP"}  # of two numbers each
# The first loop: from the wait for the scores to that for P V, and from there on.
LOOP = r"(?s)DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0(.*?)\bBRA\b"
# A product: the first of four registers of its left factor, if that is in registers,
# and what the factor V has alone.
PRODUCT = r"HGMMA\.\S+ R\d+, (?:R(\d+), )?gdesc\[UR\d+\](\.tnspB)?"


def counted(cubin):
    """What a warp does from its scores to its next products, in the machine code of a
    kernel: ``{what: [instructions before the wait for P V, after it]}``, and as
    `overwritten`, of the registers with rounded weights, those that P V reads.
    """
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        sass = subprocess.check_output([program, "-sass", path], text=True)
    loop = re.search(LOOP, sass)
    found = {
        name: [len(re.findall(rf"\b{code}\b", part)) for part in loop.groups()]
        for name, code in COUNTED.items()
    }
    products = reversed(re.findall(PRODUCT, sass[: loop.start()]))
    read = {
        int(first) + n
        for first, _ in itertools.takewhile(lambda x: x[1], products)
        for n in range(4)
    }
    rounded = {int(n) for n in re.findall(r"\bF2FP\S* R(\d+)", loop[0])}
    return found | {"overwritten": len(rounded & read)}


def machine_code(d, name, compiled_with):
    """The cell of one place of the wait: what ``counted`` finds in the kernel."""
    found = []

    def keep(kernel, x, programs, *arguments, **options):
        found.append(kernel.warmup(*arguments, grid=(programs,), **options))

    q, k, v, o = (
        torch.empty(1, 2, LENGTHS[0], d, dtype=timing.DTYPE, device=timing.DEVICE)
        for _ in range(4)
    )
    call = launched(name, (q, k, v), (o, o.new_empty(o.shape[:3])), False)
    with compiled_with(CHANGES[name] | {(plans, "launch"): keep}):
        call()
    return {"variant": name, "d": d} | counted(found[0].asm["cubin"])


def code_cells(compiled_with, widths=WIDTHS):
    """``machine_code`` of these widths and every place of the wait."""
    jobs = itertools.product(widths, WAITS)
    return [machine_code(d, name, compiled_with) for d, name in jobs]
