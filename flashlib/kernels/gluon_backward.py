"""Pieces that the kernels of the backward pass for Hopper share: what is prepared
before their launch, the sizes that the kernels which add up dQ get, slots for tiles of
two tensors, copies to these slots, the statistics of queries, and the final stores.

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
)

from flashlib.kernels.backward import DELTA_ROWS, launch_delta
from flashlib.kernels.descriptors import describable
from flashlib.kernels.gluon_tiles import ROWS, accumulator, make_slots

CONSUMERS = gl.constexpr(2)  # of a program
BLOCK = 128  # rows of a result that a program owns, ROWS for each consumer
PAD = 128  # delta and lse2 are padded to a multiple of it
EVERY_PART = 2**31 - 1  # `awaited` for all earlier parts of dQ: there are fewer
# Twelve warps have 168 registers per thread; the last four, of which one is the
# producer and some are adders, give most of theirs to the others.
WARPS = {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24}
WARPS |= {"num_warps": 4, "maxnreg": 168}


class BackwardSizes(NamedTuple):
    """What a kernel that computes dK, dV and parts of dQ is told about the problem."""

    H_kv: int
    GROUP: int
    PADDED: int  # the length of delta and lse2
    T_q: int
    T_k: int
    left: int | None  # keys before its own that a query sees, if limited
    B: int
    section: int  # heads whose programs start together
    # 1 if, with a causal mask and no window, sections alternate between beginning with
    # the last keys and with the first.
    mixed: int
    # 1 if the second half of a section reads queries upward; None with lists.
    paired: int | None
    # A part of dQ waits for at most this many earlier ones; None with lists: for all.
    awaited: int | None
    # Of hopper_backward.py only, the first six with a mask that is a function:
    cached: int | None = None  # blocks of queries, dO and dQ that fit in the L2 cache
    lists: torch.Tensor | None = None  # of tile_lists.in_order
    per_batch: int | None = None  # lists of heads from one batch to the next
    per_head: int | None = None  # and from one head to the next: 0 if they share one
    width: int | None = None  # numbers of a list
    sharing: int | None = None  # heads of the group that share an entry of the list
    slopes: torch.Tensor | None = None  # of ALiBi, and their strides
    slope_batch: int | None = None
    slope_head: int | None = None


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
def copy_pair(tensors, corner, ready, slots):
    """Start copying the blocks of two tensors at a corner into two slots."""
    tma.async_copy_global_to_shared(tensors[0], corner, ready, slots[0])
    tma.async_copy_global_to_shared(tensors[1], corner, ready, slots[1])


@gluon.jit
def copy_block(tensors, b, h, row, H, slot, shared):
    """Start copying the block of Q and dO of head h at row, with the statistics of its
    queries, into a slot that is free.
    """
    q, do, lse2, delta = tensors
    ready = shared.ring.ready.index(slot)
    mbarrier.expect(ready, 2 * q.block_type.nbytes + 2 * lse2.block_type.nbytes)
    copy_pair((q, do), (b, h, row, 0), ready, pair_in(shared.ring.slots, slot))
    copy_pair((lse2, delta), (b * H + h, row), ready, pair_in(shared.statistics, slot))


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


def pad_length(T):
    """T, rounded up to a multiple of PAD: the length of delta and lse2."""
    return triton.cdiv(T, PAD) * PAD


def allocate_sums(q, lse):
    """``(dq_sums, counters)``: a buffer in which a kernel adds up dQ, float32 ``[B H
    PADDED, d]``, and int32 numbers with which it counts the parts, once prepare_rows
    has set them to 0.
    """
    B, H, T_q, d = q.shape
    rows = B * H * pad_length(T_q)
    # More counters than needed: each program of delta_kernel zeros one.
    counters = lse.new_empty(rows // DELTA_ROWS, dtype=torch.int32)
    return lse.new_empty(rows, d), counters


def prepare_rows(q, o, lse, do, dlse, counters=None):
    """``(do, delta, lse2)``, which a backward kernel takes in addition to q, k and v.

    do is dO, copied if the copy engine (TMA) cannot read it. delta and lse2 are D and L
    in base 2, float32 ``[B, H, PADDED]``, where PADDED is a multiple of PAD. The same
    launch sets counters to 0, if there are any.
    """
    B, H, T_q, _ = q.shape
    do = do if describable(do) else do.contiguous()
    delta, lse2 = (lse.new_empty(B, H, pad_length(T_q)) for _ in range(2))
    launch_delta(o, lse, do, dlse, delta, lse2, counters)
    return do, delta, lse2
