"""Latent attention, absorbed, for Hopper (sm_90), in Gluon: a few queries against a
cache of latents.

Chapter *Latent attention* (``eq-latent-absorb``, ``eq-latent-output``); the algorithm
is that of latent.py, the division of labor that of DeepSeek-AI's FlashMLA (2025). O of
64 queries has 512 columns, half of all registers of a multiprocessor. So two consumers
share one tile of queries: the first computes the scores and their weights, hands the
weights to the second through shared memory, and each adds the products with half of the
columns of the latents. A block of rows is in shared memory once, as keys and as values.

Rows after the end of a sequence arrive as zeros, whatever the cache has there: a weight
of 0 times NaN would be NaN (pages_descriptors).

The barriers, for a program that passes through N blocks, N >= 1:

======== ======================= ========================== ============================
barrier  a phase ends with       who waits, for which phase completed phases
======== ======================= ========================== ============================
q.ready  the copy of Q           consumer 0, for 0          1
ready    the copy of block n     both consumers, in step n  N, in two slots
empty    both consumers, when    the producer, before it    N, in two slots; for the
         they have added block n copies block n + 2         last two, nobody waits
scaled   consumer 0 has stored   consumer 1, in step n      N + 1, the last one for
         the factors of O                                   1 / l
weighed  consumer 0 has stored   consumer 1, in step n      N
         the weights P
used     consumer 1 has read     consumer 0, before it      N
         both                    stores the next factors
======== ======================= ========================== ============================

Phase n of the last three has the parity of n, and that of a slot the one of n // 2. No
barrier is two phases ahead of one that waits for it: consumer 0 stores the factors of
step n + 1, and with them ends phase n + 1 of `scaled`, only after phase n of `used`,
which consumer 1 ends after it has waited for phase n of both others.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlib import plans
from flashlib.kernels.cached import capacity_of
from flashlib.kernels.decoding import LARGEST_SPLITS, launch_merge, new_parts
from flashlib.kernels.descriptors import WRAP, describable, gluon_descriptor
from flashlib.kernels.gluon_forward import (
    WideRing,
    copy,
    log_sum_exp,
    make_ring,
    refill,
    release,
    start_scores,
    thread_sums,
    tile_in,
)
from flashlib.kernels.gluon_tiles import (
    ROWS,
    accumulator,
    make_barriers,
    make_slots,
)
from flashlib.kernels.hopper_host import ABSORBED, with_positive_scale
from flashlib.kernels.tiles import LOG2_E, LOWEST

D_C = gl.constexpr(ABSORBED[1])  # columns of a latent
D = gl.constexpr(ABSORBED[0])  # and of a row of the cache, with the rotary ones
COLUMNS = gl.constexpr(ABSORBED[1] // 2)  # of the latents, those of a consumer
BLOCK_K = gl.constexpr(64)
SLOTS = gl.constexpr(2)  # for blocks of rows: with Q, all of the shared memory
CONSUMERS = gl.constexpr(2)


class SplitTask(NamedTuple):
    """The queries of a program, and the blocks of rows of its split."""

    b: Any
    row: Any  # the first query of the tile
    split: Any
    length: Any  # of the sequence
    start: Any  # the first row of the split
    blocks: Any  # at least one: a split without rows reads zeros and masks them
    full: Any  # those that every query of the tile sees


class AbsorbedShared(NamedTuple):
    """The shared memory of a program."""

    q: WideRing  # one slot
    ring: WideRing  # blocks of rows
    p: Any  # weights, [ROWS, BLOCK_K]
    factors: Any  # of O, [ROWS]: from the last maximum to the next one, then 1 / l
    scaled: Any
    weighed: Any
    used: Any


@gluon.jit
def own_task(seq_lens, queries, T_q, splits):
    """The SplitTask of this program. The programs of all tiles of queries of a split
    are neighbors, so that all but one of them find its rows in the L2 cache.
    """
    tiles = gl.cdiv(queries, ROWS)
    tile, part = gl.program_id(0) % tiles, gl.program_id(0) // tiles
    split, b = part % splits, part // splits
    length = gl.load(seq_lens + b)
    share = gl.cdiv(gl.cdiv(length, BLOCK_K), splits) * BLOCK_K
    start = share * split
    stop = gl.minimum(start + share, length)
    blocks = gl.maximum(gl.cdiv(stop - start, BLOCK_K), 1)
    full = gl.minimum(gl.maximum(length - T_q + 1 - start, 0) // BLOCK_K, blocks)
    return SplitTask(b, tile * ROWS, split, length, start, blocks, full)


@gluon.jit
def page_of_block(table, task, n, strides, PAGE: gl.constexpr):
    """The page of block n. For a block that the split does not have, no entry of the
    table is read; the page is then 0, and none of its rows is read.
    """
    j = task.start + n * BLOCK_K
    entry = task.b.to(gl.int64) * strides[0] + (j // PAGE).to(gl.int64) * strides[1]
    inside = (n < task.blocks) & (j < task.length)
    return gl.load(table + entry, mask=inside, other=0)


@gluon.jit
def produce(q, rows, table, strides, task, shared, PAGE: gl.constexpr):
    """The producer: Q once, then the blocks of rows of the split."""
    page, end = task.b, task.length
    if PAGE > 0:
        page = page_of_block(table, task, 0, strides, PAGE)
    copy(q, task.b, 0, task.row, shared.q, 0)
    for n in range(task.blocks):
        own, at = page, task.start + n * BLOCK_K
        if PAGE > 0:
            # The next page is on its way while this warp waits for the slot.
            page = page_of_block(table, task, n + 1, strides, PAGE)
            end = gl.maximum(gl.minimum(task.length - at // PAGE * PAGE, PAGE), 0)
            at = at % PAGE
        refill(rows, (0, end), own, at, shared.ring, n % SLOTS, n // SLOTS & 1)


@gluon.jit
def start_output(c: gl.constexpr, acc, p, ring, n):
    """Start acc += P C for consumer c's columns of block n, [ROWS, COLUMNS]; P is in
    registers or in shared memory.
    """
    latents = ring.slots.index(n % SLOTS)  # [BLOCK_K, D_C]
    columns = latents.slice(c * COLUMNS, COLUMNS, dim=1)  # [BLOCK_K, COLUMNS]
    return warpgroup_mma(p, columns, acc, is_async=True)


@gluon.jit
def scaled_rows(acc, factors):
    """acc [ROWS, COLUMNS] times the factors [ROWS] of its rows."""
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.convert_layout(factors, layout)[:, None]


@gluon.jit
def attend(acc, m, l, n, q_tile, task, seen, scale_log2, shared):
    """One step of consumer 0: the scores and the weights of block n, and its columns
    of the sum.
    """
    ring = shared.ring
    s = warpgroup_mma_wait(0, [start_scores(q_tile, ring, n)])  # [ROWS, BLOCK_K]
    if n >= task.full:
        j = gl.arange(0, BLOCK_K, gl.SliceLayout(0, s.type.layout))  # [BLOCK_K]
        j += task.start + n * BLOCK_K
        s = gl.where(j[None, :] < seen[:, None], s, -float("inf"))  # [ROWS, BLOCK_K]
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)  # [ROWS]
    alpha = gl.exp2(m - m_new)  # [ROWS]
    mbarrier.wait(shared.used, (n & 1) ^ 1)
    shared.factors.store(alpha)
    mbarrier.arrive(shared.scaled)
    p = gl.exp2(s * scale_log2 - m_new[:, None])  # [ROWS, BLOCK_K]
    bits = p.to(ring.slots.dtype)  # [ROWS, BLOCK_K]
    shared.p.store(bits)
    fence_async_shared()
    mbarrier.arrive(shared.weighed)
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None]
    l += thread_sums(p)  # [ROWS, 4]
    factor: gl.constexpr = gl.DotOperandLayout(0, accumulator(COLUMNS), 2)
    bits = gl.convert_layout(bits, factor)
    acc = start_output(0, scaled_rows(acc, alpha), bits, ring, n)
    acc = warpgroup_mma_wait(0, [acc])  # [ROWS, COLUMNS]
    release(ring, n)
    return acc, m_new, l


@gluon.jit
def store_output(c: gl.constexpr, o, acc, inverse, task, queries, splits):
    """Store consumer c's columns of a tile of O, acc [ROWS, COLUMNS] times 1 / l."""
    layout: gl.constexpr = acc.type.layout
    row = task.row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))  # [ROWS]
    cols = c * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))  # [COLUMNS]
    part = (task.b.to(gl.int64) * queries + row) * splits + task.split  # [ROWS]
    tile = scaled_rows(acc, inverse).to(o.dtype.element_ty)  # [ROWS, COLUMNS]
    inside = (row < queries)[:, None]
    gl.store(o + part[:, None] * D_C + cols[None, :], tile, mask=inside)


@gluon.jit
def weigh(o, lse, scale_log2, queries, T_q, splits, task, shared):
    """Consumer 0: scores, weights, the first half of the columns of O, and L."""
    s_layout: gl.constexpr = accumulator(BLOCK_K)
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    row = task.row + gl.arange(0, ROWS, rows_layout)  # [ROWS]
    seen = task.length - T_q + 1 + row % T_q  # [ROWS], rows that a query sees
    m = gl.full([ROWS], LOWEST, gl.float32, rows_layout)  # [ROWS], base 2
    l = thread_sums(gl.zeros([ROWS, BLOCK_K], gl.float32, s_layout))  # [ROWS, 4]
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))  # [ROWS, COLUMNS]
    mbarrier.wait(shared.q.ready.index(0), 0)
    q_tile = tile_in(shared.q, 0)  # [ROWS, D_C] and the rotary columns
    for n in range(task.blocks):
        acc, m, l = attend(acc, m, l, n, q_tile, task, seen, scale_log2, shared)
    # A query that sees no row has l = 0, O = 0 and L = -inf.
    lse_rows, l = log_sum_exp(m, gl.convert_layout(gl.sum(l, 1), rows_layout))
    inverse = 1.0 / l  # [ROWS]
    mbarrier.wait(shared.used, (task.blocks & 1) ^ 1)
    shared.factors.store(inverse)
    mbarrier.arrive(shared.scaled)
    part = (task.b.to(gl.int64) * queries + row) * splits + task.split  # [ROWS]
    gl.store(lse + part, lse_rows, mask=row < queries)
    store_output(0, o, acc, inverse, task, queries, splits)


@gluon.jit
def add(o, queries, splits, task, shared):
    """Consumer 1: the second half of the columns of O."""
    layout: gl.constexpr = accumulator(COLUMNS)
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    ring = shared.ring
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)  # [ROWS, COLUMNS]
    for n in range(task.blocks):
        mbarrier.wait(shared.scaled, n & 1)
        acc = scaled_rows(acc, shared.factors.load(rows_layout))
        mbarrier.wait(shared.weighed, n & 1)
        mbarrier.wait(ring.ready.index(n % SLOTS), n // SLOTS & 1)
        acc = start_output(1, acc, shared.p, ring, n)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(shared.used)
        release(ring, n)
    mbarrier.wait(shared.scaled, task.blocks & 1)
    inverse = shared.factors.load(rows_layout)  # [ROWS]
    store_output(1, o, acc, inverse, task, queries, splits)


@gluon.jit(do_not_specialize=["queries", "T_q", "splits", "of_batch", "of_page"])
def absorbed_kernel(
    q, q_rest, rows, rows_rest, table, seq_lens, o, lse, scale_log2,
    queries, T_q, splits, of_batch, of_page,
    PAGE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program writes O, of latents, and L of one tile of queries against one split
    of the rows of their sequence.

    q and rows read the latents, q_rest and rows_rest the rotary columns; o [B, queries,
    splits, D_C] and lse [B, queries, splits] are contiguous. The table of pages has the
    strides of_batch and of_page.
    """
    task = own_task(seq_lens, queries, T_q, splits)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = AbsorbedShared(
        make_ring(q.dtype, 1, ROWS, D, 0),
        make_ring(q.dtype, SLOTS, BLOCK_K, D, CONSUMERS),
        make_slots(q.dtype, 1, ROWS, BLOCK_K).index(0),
        gl.allocate_shared_memory(gl.float32, [ROWS], plain),
        make_barriers(1, 1).index(0),
        make_barriers(1, 1).index(0),
        make_barriers(1, 1).index(0),
    )
    strides = of_batch, of_page
    q, rows = (q, q_rest), (rows, rows_rest)
    gl.warp_specialize([
        (weigh, (o, lse, scale_log2, queries, T_q, splits, task, shared)),
        (add, (o, queries, splits, task, shared)),
        (produce, (q, rows, table, strides, task, shared, PAGE)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# A program begins with maxnreg registers per thread; the producer gives most of its own
# to the consumers.
WARPS = {"CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40, "maxnreg": 168}
# What a program does before its first block and after its last one, and what the merge
# takes, in the time of a block. One sequence on an H200 took about 4 and 2, which give
# the same splits there; the numbers of splits for other calls were not timed.
START, MERGE = 2, 3


def choose_splits(q, capacity):
    """The number of splits for q ``[B, H, T_q, d_c + d_r]`` and a cache that holds up
    to ``capacity`` rows of a sequence: the fewest that take the least time. A program
    takes a multiprocessor, and programs run in waves.
    """
    B, H, T_q, _ = q.shape
    tiles = B * triton.cdiv(H * T_q, ROWS.value)
    blocks = max(1, triton.cdiv(capacity, BLOCK_K.value))
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count

    def time(splits):
        waves = triton.cdiv(tiles * splits, processors)
        merge = MERGE if splits > 1 else 0
        return waves * (triton.cdiv(blocks, splits) + START) + merge

    return min(range(1, min(LARGEST_SPLITS, blocks) + 1), key=time)


def flat(q):
    """q ``[B, H, T_q, d]``, or a contiguous copy of it, whose rows ``[B, H T_q]`` of d
    columns have one stride.
    """
    _, H, T_q, _ = q.shape
    _, head, row, _ = q.stride()
    if not describable(q) or (H > 1 and T_q > 1 and head != T_q * row):
        q = q.new_empty(q.shape).copy_(q)
    return q


def queries_descriptors(q):
    """Gluon descriptors of the rows of q, as flat returns it: tiles [1, 1, ROWS, cols]
    of the columns of latents and of the rotary ones.
    """
    B, H, T_q, d = q.shape
    row = q.stride(2) if T_q > 1 else q.stride(1)
    # Strides of dimensions of one as in descriptors.descriptor.
    strides = [q.stride(0) if B > 1 else 16, 16, row if H * T_q > 1 else 16, 1]
    changes = {"shape": [B, 1, H * T_q, d], "strides": strides}
    return [
        dataclasses.replace(gluon_descriptor(q, ROWS.value, cols), **changes)
        for cols in (D_C.value, d - D_C.value)
    ]


def pages_descriptors(cache):
    """Gluon descriptors of pages ``[pages, PAGE, d]``, tiles [1, 1, 1, BLOCK_K, cols]
    of the columns of latents and of the rotary ones.

    They read zeros after the first e rows of a page: they are those of packed
    sequences (descriptors.packed_descriptor), where the pages take the place of the
    heads. Row r of a page is at the coordinates (WRAP, e, page, WRAP - e + r).
    """
    pages, PAGE, d = cache.shape
    page = cache.stride(0) if pages > 1 else 16
    row = cache.stride(1) if PAGE > 1 else 16
    both = []
    for cols in (D_C.value, d - D_C.value):
        packed = gluon_descriptor(cache, BLOCK_K.value, cols)
        shape = [*packed.shape[:2], pages, WRAP, d]
        strides = [2**34 - row, row, page, row, 1]
        both.append(dataclasses.replace(packed, shape=shape, strides=strides))
    return both


@plans.planned
def launch_splits(q, cache, block_table, seq_lens, o, lse, scale):
    """Launch one program for each tile of queries and split; q ``[B, H, T_q, 576]``,
    cache ``[B, T_max, 576]`` or pages, neither empty, scale > 0.

    o ``[B, H, T_q, splits, 512]`` and lse ``[B, H, T_q, splits]`` are contiguous; one
    split needs no dimension.
    """
    B, H, T_q, _ = q.shape
    queries, splits = H * T_q, lse.numel() // (B * H * T_q)
    q = flat(q)
    paged = block_table is not None
    table = block_table if paged else seq_lens  # not read without pages
    strides = block_table.stride() if paged else (0, 0)
    plans.launch(
        absorbed_kernel, q, B * triton.cdiv(queries, ROWS.value) * splits,
        *queries_descriptors(q), *pages_descriptors(cache), table, seq_lens, o, lse,
        scale * LOG2_E.value, queries, T_q, splits, *strides,
        PAGE=cache.shape[1] if paged else 0, num_warps=4, **WARPS,
    )  # fmt: skip


@plans.planned
def forward(q, cache, seq_lens, block_table, splits, d_c, scale):
    """``(o, lse)``, as :func:`flashlib.kernels.latent.forward`, on a Hopper GPU, of
    tensors that ``flashlib.kernels.hopper_host.absorbed_refusal`` accepts.
    """
    seq_lens = seq_lens.contiguous()
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    o = q.new_empty(*lse.shape, d_c)
    if not lse.numel():
        return o, lse
    if not cache.numel():
        return o.zero_(), lse.fill_(-float("inf"))
    q, scale = with_positive_scale(q, scale)
    splits = splits or choose_splits(q, capacity_of(cache.shape[1], block_table))
    parts = new_parts(o, lse, splits)
    launch_splits(q, cache, block_table, seq_lens, *parts, scale)
    if splits > 1:
        launch_merge(*parts, o, lse)
    return o, lse
