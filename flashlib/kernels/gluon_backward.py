"""Pieces that the kernels of the backward pass for Hopper share: what they are told
about the problem and what is prepared for them, slots for tiles of two tensors, the
statistics of queries, the first two products, and the end.

Chapter *Hopper*, its depth.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from flashlib.kernels.backward import DELTA_ROWS, launch_delta
from flashlib.kernels.descriptors import describable
from flashlib.kernels.gluon_bias import copy_bias
from flashlib.kernels.gluon_keys import store_note
from flashlib.kernels.gluon_tiles import ROWS, Ring, accumulator, make_slots

CONSUMERS = gl.constexpr(2)  # of a program
BLOCK = 128  # rows of a result that a program owns, of dK and dV 64 if d = 256
PAD = 128  # delta and lse2 are padded to a multiple of it
EVERY_PART = 2**31 - 1  # of dQ is awaited: more than there are
# Twelve warps have 168 registers per thread; the last four, of which one is the
# producer and in the fused form two are adders, give most of theirs to the others.
WARPS = {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24}
WARPS |= {"num_warps": 4, "maxnreg": 168}


class BackwardSizes(NamedTuple):
    """What the kernels that compute dK and dV are told about the problem."""

    H_out: int  # heads of the result: H for dQ, H_kv for dK and dV
    GROUP: int
    PADDED: int  # the length of delta and lse2
    T_q: int
    T_k: int
    left: int | None  # keys before its own that a query sees, if limited
    B: int
    # Of the fused form only:
    section: int = 1  # heads whose programs start together
    # 1 if, with a causal mask and no window, sections alternate between beginning with
    # the last keys and with the first.
    mixed: int = 0
    # 1 if the second half of a section reads queries upward; None with lists.
    paired: int | None = 0
    # A part of dQ waits for at most this many earlier ones; None with lists: for all.
    awaited: int | None = 0
    # Of a mask that is a function only:
    cached: int | None = None  # blocks of queries, dO and dQ that fit in the L2 cache
    lists: torch.Tensor | None = None  # of tile_lists.in_order
    per_batch: int | None = None  # lists of heads from one batch to the next
    per_head: int | None = None  # and from one head to the next: 0 if they share one
    width: int | None = None  # numbers of a list
    sharing: int | None = None  # heads of the group that share an entry of the list
    slopes: torch.Tensor | None = None  # of ALiBi, and their strides
    slope_batch: int | None = None
    slope_head: int | None = None


class BackwardShared(NamedTuple):
    """The shared memory of a program of hopper_backward.keys_kernel."""

    notes: tuple | None  # what gluon_keys.make_notes returns, if there are lists
    own: tuple  # the two tiles [rows, D] that belong to its result
    arrived: gl.shared_memory_descriptor  # their barrier
    ring: Ring  # slots for a pair of tiles of the other side
    statistics: tuple  # slots for lse2 and delta of the same rows
    ds: gl.shared_memory_descriptor  # two slots [BLOCK_K, BLOCK_Q]
    ds_ready: gl.shared_memory_descriptor  # the barrier where consumers meet
    p: gl.shared_memory_descriptor | None  # the same for P, if D = 256
    p_ready: gl.shared_memory_descriptor | None
    parts: Ring | None  # of dQ, one for each consumer in a slot, as lines, if D < 256
    # Two barriers, of a bias that is copied to ds.
    bias_ready: gl.shared_memory_descriptor | None


@gluon.jit
def make_pair(x, y, SLOTS: gl.constexpr):
    """Slots for tiles of x, and for tiles of y, which has the same blocks."""
    rows: gl.constexpr = x.block_type.shape[2]
    D: gl.constexpr = x.block_type.shape[3]
    return make_slots(x.dtype, SLOTS, rows, D), make_slots(y.dtype, SLOTS, rows, D)


@gluon.jit
def make_rows(x, SLOTS: gl.constexpr):
    """Slots for blocks [1, rows] of statistics."""
    shape: gl.constexpr = [SLOTS, 1, x.block_type.shape[1]]
    return gl.allocate_shared_memory(x.dtype, shape, x.layout)


@gluon.jit
def pair_in(slots, slot):
    """The tiles of two tensors in the slots with this number."""
    return slots[0].index(slot), slots[1].index(slot)


@gluon.jit
def read_rows(slots, slot, n: gl.constexpr, rows: gl.constexpr = ROWS):
    """The n-th part, of this many rows, of the statistics in a slot [1, BLOCK_Q], in
    registers as a row next to a product [ROWS, rows].
    """
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    row = slots.index(slot)._reinterpret(gl.float32, [slots.shape[2]], plain)
    return row.slice(n * rows, rows).load(gl.SliceLayout(0, accumulator(rows)))


@gluon.constexpr_function
def split_layout(columns, rank=2):
    """The layout of a tile of 16-bit numbers that is also written or read in parts of
    this many columns: the columns of a part are swizzled as one.
    """
    return gl.NVMMASharedLayout(2 * columns, element_bitwidth=16, rank=rank)


@gluon.jit
def meet(barrier, n):
    """Wait until both consumers are here, at the n-th use of the barrier."""
    mbarrier.arrive(barrier)
    mbarrier.wait(barrier, n & 1)


@gluon.jit
def start_pair(own, slots, slot):
    """Start S = Q K^T and dP = dO V^T, where (Q, dO) are own and (K, V) are in a slot,
    or, the other way round, S^T = K Q^T and dP^T = V dO^T; [ROWS, COLUMNS] each.
    """
    COLUMNS: gl.constexpr = slots[0].shape[1]
    layout: gl.constexpr = accumulator(COLUMNS)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)  # [ROWS, COLUMNS], not read
    a, b = pair_in(slots, slot)  # [COLUMNS, D] each
    a, b = a.permute((1, 0)), b.permute((1, 0))  # [D, COLUMNS] each
    s = warpgroup_mma(own[0], a, acc, use_acc=False, is_async=True)  # [ROWS, COLUMNS]
    dp = warpgroup_mma(own[1], b, acc, use_acc=False, is_async=True)  # [ROWS, COLUMNS]
    return s, dp


@gluon.jit
def copy_pair(tensors, corner, ready, slots):
    """Start copying the blocks of two tensors at a corner into two slots."""
    tma.async_copy_global_to_shared(tensors[0], corner, ready, slots[0])
    tma.async_copy_global_to_shared(tensors[1], corner, ready, slots[1])


@gluon.jit
def copy_queries(tensors, n, h, row, partial, H, block, shared):
    """Start copying the block of queries of head h at row into slot n % SLOTS once it
    is free, and its bias; partial is 1 if a list says that some pairs are hidden.
    """
    q, do, lse2, delta, bias = tensors
    b, ring, statistics = block.b, shared.ring, shared.statistics
    SLOTS: gl.constexpr = ring.slots[0].shape[0]
    slot = n % SLOTS
    mbarrier.wait(ring.empty.index(slot), (n // SLOTS & 1) ^ 1)
    if shared.notes is not None:
        store_note(2 * row + partial, shared.notes[0], slot)
        store_note(h, shared.notes[1], slot)
    ready = ring.ready.index(slot)
    mbarrier.expect(ready, 2 * q.block_type.nbytes + 2 * lse2.block_type.nbytes)
    copy_pair((q, do), (b, h, row, 0), ready, pair_in(ring.slots, slot))
    copy_pair((lse2, delta), (b * H + h, row), ready, pair_in(statistics, slot))
    if bias is not None:
        copy_bias(bias, n, (b, h, row, block.col), shared)


@gluon.jit
def store_keys(c: gl.constexpr, outputs, sums, cols, scale, steps, block, shared):
    """Store rows c ROWS and following of a block of dK, which gets its scale here, and
    of dV, after these steps.

    sums are one or two tiles of columns of dK, then dV, [ROWS, columns] each; shared
    .own has tiles and outputs descriptors for the same; cols are their first columns.
    """
    # The other consumer may still read these rows of K.
    meet(shared.ds_ready, steps)
    COUNT: gl.constexpr = len(sums)
    for n in gl.static_range(COUNT):
        total = sums[n]  # [ROWS, columns]
        if n < COUNT - 1:
            total = total * scale
        tile = shared.own[n].slice(c * ROWS, ROWS)  # [ROWS, columns]
        tile.store(total.to(tile.dtype))
    fence_async_shared()
    for n in gl.static_range(COUNT):
        tile = shared.own[n].slice(c * ROWS, ROWS)  # [ROWS, columns]
        corner = [block.b, block.h, block.col + c * ROWS, cols[n]]
        tma.async_copy_shared_to_global(outputs[n], corner, tile)
    tma.store_wait(0)


def prepare_backward(q, o, lse, do, dlse, fused=True):
    """``(do, delta, lse2, dq_sums, counters)``, which a backward kernel takes in
    addition to q, k and v.

    do is dO, copied if the copy engine (TMA) cannot read it. delta and lse2 are D and L
    in base 2, float32 ``[B, H, PADDED]``, where PADDED is a multiple of PAD. If fused,
    dq_sums is a new buffer in which the kernel adds up dQ, float32 ``[B H PADDED, d]``,
    and counters are zeros with which it counts the parts, int32; otherwise both are
    None.
    """
    (B, H, T_q, d), dq_sums, counters = q.shape, None, None
    do = do if describable(do) else do.contiguous()
    padded = triton.cdiv(T_q, PAD) * PAD
    delta, lse2 = (lse.new_empty(B, H, padded) for _ in range(2))
    if fused:
        dq_sums = lse.new_empty(B * H * padded, d)
        # More than needed: each program of delta_kernel zeros one.
        counters = lse.new_empty(delta.numel() // DELTA_ROWS, dtype=torch.int32)
    launch_delta(o, lse, do, dlse, delta, lse2, counters)
    return do, delta, lse2, dq_sums, counters
