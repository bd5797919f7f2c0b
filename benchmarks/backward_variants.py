"""Other orders of work for the backward pass at d = 64 and 128, next to that of the
library: ``python -m benchmarks.backward_variants`` judges and times them in one run, on
a Hopper GPU, in 150 seconds at most. Each variant also has what those before it have:

ahead  the scores of the next block are started before a part of dQ is stored, and K
       and V keep no registers
lines  parts of dQ are stored as threads hold them, in 16 bytes and without conflicts,
       and are contiguous in memory; there are two adders at d = 128 too, which free
       the slot of a part as soon as it was read, and, in any order, count only the
       first part
apart  d = 128: a causal mask costs only the blocks that it cuts, since blocks without
       a mask have a loop of their own; d = 64: a block has 128 queries, in two halves
"""

import functools
import importlib.util
import itertools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
import types

import torch

from benchmarks import fa4, passes, timing
from flashlib import plans, testing
from flashlib.kernels import gluon_backward, hopper, hopper_backward

# isort: split
import triton  # flashlib.kernels must import Triton first
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlib.kernels.gluon_backward import (
    CONSUMERS,
    at,
    block_of,
    make_pair,
    make_rows,
    own_keys,
    read_row,
)
from flashlib.kernels.gluon_halves import read_half
from flashlib.kernels.gluon_order import (
    adder,
    deferred,
    give_part,
    next_turn,
    part_stored,
    start_adding,
    start_part,
    store_part,
    take_place,
    wait_until_added,
)
from flashlib.kernels.gluon_scores import changed_keys, times_derivative
from flashlib.kernels.gluon_tiles import (
    ROWS,
    Ring,
    accumulator,
    make_barriers,
    make_slots,
)
from flashlib.kernels.hopper_backward import (
    FUSED,
    BackwardSizes,
    Shared,
    add_queries,
    keys_consumer,
    keys_producer,
)
from flashlib.kernels.tiles import Rows

LINE = gl.constexpr(32)  # float32 numbers, 128 bytes
ADDERS = gl.constexpr(2)
SPLIT = gl.constexpr(False)  # whether blocks without a mask have a loop at d = 128

REPEATS, LARGE_REPEATS = 30, 10
JUDGED_IN, LATEST = 110, 170  # seconds
ORDERS = "fixed", "any"
# (H, H_kv, T_q, T_k)
SIZES = (4, 2, 1000, 1000), (2, 2, 130, 700), (2, 1, 300, 65), (8, 1, 257, 257)
SHAPES = [
    passes.Shape(16384 // T, 2048 // d, T, d, causal)
    for d, causal, T in itertools.product((128, 64), (True, False), (16384, 4096))
]
SHAPES[4:4] = [passes.Shape(16384 // T, 16, T, 128, True, 4) for T in (16384, 4096)]


@gluon.jit
def own_again(c: gl.constexpr, tile, n):
    """Rows c ROWS and following of a tile [BLOCK_K, D], of K or V, in a way that
    depends on the step n: descriptors of what does not would be kept in registers, two
    for every 16 columns. The whole tile has another name first: of these rows alone,
    the second 64 columns would be looked for after ROWS rows of the first, not BLOCK_K.
    """
    slots = tile._reinterpret(
        tile.dtype, [1, tile.shape[0], tile.shape[1]], tile.layout
    )
    return slots.index(n >> 30).slice(c * ROWS, ROWS)


@gluon.jit
def start_scores(c: gl.constexpr, own, n, steps, shared):
    """Start S^T = K Q^T of the n-th block of queries, [ROWS, BLOCK_Q]; after the last
    block, of what a slot still holds.
    """
    ring = shared.ring
    SLOTS: gl.constexpr = ring.slots[0].shape[0]
    BLOCK_Q: gl.constexpr = ring.slots[0].shape[1]
    slot = n % SLOTS
    mbarrier.wait(ring.ready.index(slot), n // SLOTS & 1, pred=n < steps)
    unread = gl.zeros([ROWS, BLOCK_Q], gl.float32, accumulator(BLOCK_Q))
    q_tile = ring.slots[0].index(slot).permute((1, 0))  # [D, BLOCK_Q]
    k_tile = own[0]
    if ring.slots[0].shape[2] == 128:
        k_tile = own_again(c, shared.own[0], n)
    return warpgroup_mma(k_tile, q_tile, unread, use_acc=False, is_async=True)


@gluon.jit
def add_either(
    c: gl.constexpr, dk, dv, s, n, row, invariants, change,
    MASKED: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """add_halves at d = 64, else add_ahead."""
    more = dk, dv, s, n, row, invariants, change
    if dk.shape[1] == 64:
        dk, dv, s = add_halves(c, *more, MASKED, RAGGED)
    else:
        dk, dv, s = add_ahead(c, *more, MASKED, RAGGED)
    return dk, dv, s


@gluon.jit
def add_ahead(
    c: gl.constexpr, dk, dv, s, n, row, invariants, change,
    MASKED: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """hopper_backward.add_queries of scores that were started, and starts those of the
    next block before it waits for the products with this one.
    """
    own, k_columns, seen_from, real, scale_log2, sizes, shared, block = invariants
    q_slots, do_slots = shared.ring.slots
    DEFERRED: gl.constexpr = deferred(q_slots.shape[2])
    SLOTS: gl.constexpr = q_slots.shape[0]
    BLOCK_Q: gl.constexpr = q_slots.shape[1]
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(BLOCK_Q))
    factor: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    slot = n % SLOTS
    q_tile, do_tile = q_slots.index(slot), do_slots.index(slot)  # [BLOCK_Q, D] each
    unread = gl.zeros([ROWS, BLOCK_Q], gl.float32, accumulator(BLOCK_Q))
    v_tile = own[1]
    if q_slots.shape[2] == 128:
        v_tile = own_again(c, shared.own[1], n)
    dp = warpgroup_mma(
        v_tile, do_tile.permute((1, 0)), unread, use_acc=False, is_async=True
    )  # [ROWS, BLOCK_Q]
    lse_rows = read_row(shared.statistics[0], slot, columns)  # [BLOCK_Q]
    h, col = block.h * sizes.GROUP + n % sizes.GROUP, block.col + c * ROWS
    place = block.b, h, col, row + sizes.T_k - sizes.T_q
    s, derivative = changed_keys(s, *place, sizes, scale_log2, change)
    p = gl.exp2(s - lse_rows[None, :])  # [ROWS, BLOCK_Q]
    if MASKED:
        i = gl.arange(0, BLOCK_Q, columns)  # [BLOCK_Q]
        seen = (seen_from - row)[:, None] <= i[None, :]  # [ROWS, BLOCK_Q]
        if sizes.left is not None:
            seen = seen & (i[None, :] <= (seen_from + sizes.left - row)[:, None])
        p = gl.where(seen, p, 0.0)  # [ROWS, BLOCK_Q]
    if RAGGED:  # keys after the last one must not enter a sum over keys
        p = gl.where(real[:, None], p, 0.0)  # [ROWS, BLOCK_Q]
    p_factor = gl.convert_layout(p.to(q_tile.dtype), factor)  # [ROWS, BLOCK_Q]
    p = times_derivative(p, derivative, change)
    before = gl.maximum(n - 1, 0)  # what the first step computes of it is not used
    if DEFERRED:
        part = start_part(n - 1, k_columns, shared)  # [BLOCK_Q, COLUMNS]
        dv = warpgroup_mma(p_factor, do_tile, dv, is_async=True)  # [ROWS, D]
        dp, part = warpgroup_mma_wait(1, [dp, part])  # dV is still running
    else:
        dv = warpgroup_mma(p_factor, do_tile, dv, is_async=True)  # [ROWS, D]
        dp = warpgroup_mma_wait(1, [dp])  # [ROWS, BLOCK_Q]; dV is still running
    delta_rows = read_row(shared.statistics[1], slot, columns)  # [BLOCK_Q]
    ds = (p * (dp - delta_rows[None, :])).to(q_tile.dtype)  # [ROWS, BLOCK_Q]
    if DEFERRED:
        store_part(c, part, before, shared.parts)
    shared.ds.index(n % 2).slice(c * ROWS, ROWS).store(ds)
    fence_async_shared()
    mbarrier.arrive(shared.ds_ready)
    if DEFERRED:
        part_stored(before, shared.parts, n > 0)
    ds_factor = gl.convert_layout(ds, factor)  # [ROWS, BLOCK_Q]
    dk = warpgroup_mma(ds_factor, q_tile, dk, is_async=True)  # [ROWS, D], unscaled
    steps = sizes.GROUP * block.blocks
    if DEFERRED:
        s = start_scores(c, own, n + 1, steps, shared)
        dk, dv = warpgroup_mma_wait(1, [dk, dv])
        mbarrier.arrive(shared.ring.empty.index(slot))
    else:
        part = start_part(n, k_columns, shared)  # [BLOCK_Q, COLUMNS]
        dk, dv = warpgroup_mma_wait(1, [dk, dv])
        mbarrier.arrive(shared.ring.empty.index(slot))
        s = start_scores(c, own, n + 1, steps, shared)
        part = warpgroup_mma_wait(1, [part])
        give_part(c, part, n, shared.parts)
    # ptxas lets no product run from one round of a loop into the next if its sums are
    # read there: dP starts when these scores are there.
    s = warpgroup_mma_wait(0, [s])  # [ROWS, BLOCK_Q], unscaled
    return dk, dv, s


@gluon.jit
def start_own_part(c: gl.constexpr, n, k_columns, shared):
    """start_part, or, of a block of 128 queries, all columns of its half c."""
    if shared.ring.slots[0].shape[1] == 2 * ROWS:
        mbarrier.wait(shared.ds_ready, n & 1)
        part = start_half_part(c, n, shared)
    else:
        part = start_part(n, k_columns, shared)
    return part


@gluon.jit
def start_half_part(c: gl.constexpr, n, shared):
    """Start dS K for half c of the n-th block of queries, [ROWS, D]; dS is there."""
    ds_tile = shared.ds.index(n & 1).slice(c * ROWS, ROWS, dim=1)  # [BLOCK_K, ROWS]
    k_tile = shared.own[0]  # [BLOCK_K, D]
    shape: gl.constexpr = [ROWS, k_tile.shape[1]]
    part = gl.zeros(shape, gl.float32, accumulator(shape[1]))  # [ROWS, D]
    return warpgroup_mma(
        ds_tile.permute((1, 0)), k_tile, part, use_acc=False, is_async=True
    )


@gluon.jit
def add_halves(
    c: gl.constexpr, dk, dv, s, n, row, invariants, change,
    MASKED: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """add_ahead for a block of 128 queries, in two halves: groups meet, and are given
    slots, half as often, and a part of dQ has 64 columns.
    """
    own, _, seen_from, real, scale_log2, sizes, shared, block = invariants
    q_slots, do_slots = shared.ring.slots
    SLOTS: gl.constexpr = q_slots.shape[0]
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(ROWS))
    factor: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    slot = n % SLOTS
    steps = sizes.GROUP * block.blocks
    before = gl.maximum(n - 1, 0)  # what the first step computes of it is not used
    for half in gl.static_range(2):
        q_tile = q_slots.index(slot).slice(half * ROWS, ROWS)  # [ROWS, D]
        do_tile = do_slots.index(slot).slice(half * ROWS, ROWS)  # [ROWS, D]
        unread = gl.zeros([ROWS, ROWS], gl.float32, accumulator(ROWS))
        dp = warpgroup_mma(
            own[1], do_tile.permute((1, 0)), unread, use_acc=False, is_async=True
        )  # [ROWS, ROWS], keys in rows
        lse_rows = read_half(shared.statistics[0], slot, half, columns)  # [ROWS]
        at_row = row + half * ROWS
        h, col = block.h * sizes.GROUP + n % sizes.GROUP, block.col + c * ROWS
        place = block.b, h, col, at_row + sizes.T_k - sizes.T_q
        s, derivative = changed_keys(s, *place, sizes, scale_log2, change)
        p = gl.exp2(s - lse_rows[None, :])
        if MASKED:
            i = gl.arange(0, ROWS, columns)  # [ROWS]
            seen = (seen_from - at_row)[:, None] <= i[None, :]
            if sizes.left is not None:
                last = (seen_from + sizes.left - at_row)[:, None]
                seen = seen & (i[None, :] <= last)
            p = gl.where(seen, p, 0.0)
        if RAGGED:
            p = gl.where(real[:, None], p, 0.0)
        p_factor = gl.convert_layout(p.to(q_tile.dtype), factor)
        p = times_derivative(p, derivative, change)
        dv = warpgroup_mma(p_factor, do_tile, dv, is_async=True)  # [ROWS, D]
        dp = warpgroup_mma_wait(1, [dp])
        delta_rows = read_half(shared.statistics[1], slot, half, columns)  # [ROWS]
        ds = (p * (dp - delta_rows[None, :])).to(q_tile.dtype)
        if half == 0:
            # The other consumer has read this slot when its dS of the last block is
            # there.
            mbarrier.wait(shared.ds_ready, (n - 1) & 1)
        ds_rows = shared.ds.index(n % 2).slice(c * ROWS, ROWS)  # [ROWS, BLOCK_Q]
        ds_rows.slice(half * ROWS, ROWS, dim=1).store(ds)
        if half == 1:
            fence_async_shared()
            mbarrier.arrive(shared.ds_ready)
        ds_factor = gl.convert_layout(ds, factor)
        dk = warpgroup_mma(ds_factor, q_tile, dk, is_async=True)  # [ROWS, D], unscaled
        if half == 0:
            part = start_half_part(c, n - 1, shared)  # [ROWS, D]
            dk, dv = warpgroup_mma_wait(1, [dk, dv])
            s = start_half_scores(own, q_slots.index(slot).slice(ROWS, ROWS))
            part = warpgroup_mma_wait(1, [part])
            store_part(c, part, before, shared.parts)
            fence_async_shared()
            part_stored(before, shared.parts, n > 0)
        else:
            following = (n + 1) % SLOTS
            ready = shared.ring.ready.index(following)
            mbarrier.wait(ready, (n + 1) // SLOTS & 1, pred=n + 1 < steps)
            s = start_half_scores(own, q_slots.index(following).slice(0, ROWS))
            dk, dv = warpgroup_mma_wait(1, [dk, dv])
            mbarrier.arrive(shared.ring.empty.index(slot))
        s = warpgroup_mma_wait(0, [s])  # [ROWS, ROWS], unscaled
    return dk, dv, s


@gluon.jit
def start_half_scores(own, q_half):
    """Start S^T = K Q^T of half a block of queries, [ROWS, ROWS]."""
    unread = gl.zeros([ROWS, ROWS], gl.float32, accumulator(ROWS))
    q_half = q_half.permute((1, 0))  # [D, ROWS]
    return warpgroup_mma(own[0], q_half, unread, use_acc=False, is_async=True)


@gluon.jit
def consumer_ahead(
    c: gl.constexpr, dk_out, dv_out, scale, scale_log2, change, sizes, block, shared,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """hopper_backward.keys_consumer with add_ahead."""
    BLOCK_Q: gl.constexpr = shared.ring.slots[0].shape[1]
    D: gl.constexpr = shared.own[0].shape[1]
    COLUMNS: gl.constexpr = D // CONSUMERS  # of dQ, that a consumer adds
    s_layout: gl.constexpr = accumulator(ROWS)
    layout: gl.constexpr = accumulator(D)
    b, h_kv, col = block.b, block.h, block.col
    GROUP, T_q, T_k = sizes.GROUP, sizes.T_q, sizes.T_k
    k_tile = shared.own[0].slice(c * ROWS, ROWS)  # [ROWS, D]
    v_tile = shared.own[1].slice(c * ROWS, ROWS)  # [ROWS, D]
    k_columns = shared.own[0].slice(c * COLUMNS, COLUMNS, dim=1)  # [BLOCK_K, COLUMNS]
    j = col + c * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))  # [ROWS]
    seen_from, real = j + T_q - T_k, j < T_k  # [ROWS] each
    dk = gl.zeros([ROWS, D], gl.float32, layout)  # [ROWS, D]
    dv = gl.zeros([ROWS, D], gl.float32, layout)  # [ROWS, D]
    mbarrier.wait(shared.arrived, 0)
    own = k_tile, v_tile
    if D == 64:
        in_registers: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
        own = k_tile.load(in_registers), v_tile.load(in_registers)
    invariants = own, k_columns, seen_from, real, scale_log2, sizes, shared, block
    steps, full, first = GROUP * block.blocks, GROUP * block.full, 0
    if BLOCK_Q == 2 * ROWS:
        mbarrier.wait(shared.ring.ready.index(0), 0, pred=steps > 0)
        s = start_half_scores(own, shared.ring.slots[0].index(0).slice(0, ROWS))
    else:
        s = start_scores(c, own, 0, steps, shared)  # [ROWS, BLOCK_Q]
    s = warpgroup_mma_wait(0, [s])
    APART: gl.constexpr = D == 64 or SPLIT
    if CAUSAL and APART:
        first = GROUP * block.band * block.upward
        for n in range(first):
            i = block_of(n, block, GROUP, BLOCK_Q)[1]
            dk, dv, s = add_queries(
                c, dk, dv, s, n, i, invariants, change, True, RAGGED
            )
    if not CAUSAL or APART:
        for n in range(first, first + full):
            i = block_of(n, block, GROUP, BLOCK_Q)[1]
            dk, dv, s = add_queries(
                c, dk, dv, s, n, i, invariants, change, False, RAGGED
            )
        first += full
    if CAUSAL:
        for n in range(first, steps):
            i = block_of(n, block, GROUP, BLOCK_Q)[1]
            dk, dv, s = add_queries(
                c, dk, dv, s, n, i, invariants, change, True, RAGGED
            )
    if deferred(D) and steps > 0:  # a window may leave these keys unseen
        part = start_own_part(c, steps - 1, k_columns, shared)  # [BLOCK_Q, COLUMNS]
        part = warpgroup_mma_wait(0, [part])
        give_part(c, part, steps - 1, shared.parts)
    # The other consumer may still read these rows of K.
    mbarrier.arrive(shared.ds_ready)
    mbarrier.wait(shared.ds_ready, steps & 1)
    k_tile.store((dk * scale).to(k_tile.dtype))
    v_tile.store(dv.to(v_tile.dtype))
    fence_async_shared()
    col += c * ROWS
    tma.async_copy_shared_to_global(dk_out, [b, h_kv, col, 0], k_tile)
    tma.async_copy_shared_to_global(dv_out, [b, h_kv, col, 0], v_tile)
    tma.store_wait(0)


@gluon.jit
def as_lines(tile):
    """A slot [BLOCK_Q, COLUMNS] for a part of dQ as lines of LINE numbers."""
    lines: gl.constexpr = tile.shape[0] * tile.shape[1] // LINE
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [lines, LINE], gl.float32
    )
    return tile._reinterpret(gl.float32, [lines, LINE], layout)


@gluon.jit
def store_lines(c: gl.constexpr, part, n, parts):
    """gluon_order.store_part in the order in which threads hold a product: four numbers
    of a thread, two of each of two rows, are next to each other, then come those of the
    next thread. So a thread stores 16 bytes at once, and no two are in the same bank.
    """
    PARTS: gl.constexpr = parts.slots.shape[0] // CONSUMERS
    COLUMNS: gl.constexpr = part.shape[1]
    lines: gl.constexpr = part.shape[0] * COLUMNS // LINE
    # Rows are 16 warp + 8 half + r, columns 8 j + 2 quarter + even.
    part = gl.reshape(part, [4, 2, 8, COLUMNS // 8, 4, 2])
    part = gl.reshape(gl.permute(part, (3, 0, 2, 4, 1, 5)), [lines, LINE])
    mbarrier.wait(parts.empty.index(n % PARTS), (n // PARTS & 1) ^ 1)
    as_lines(parts.slots.index(n % PARTS * CONSUMERS + c)).store(part)


@gluon.jit
def give_lines(c: gl.constexpr, part, n, parts):
    """gluon_order.give_part with store_lines."""
    store_lines(c, part, n, parts)
    fence_async_shared()
    part_stored(n, parts)


@gluon.jit
def adder_of_lines(a: gl.constexpr, held, turns, sizes, block, shared):
    """gluon_order.adder for held as lines, [B H PADDED D / LINE, LINE]; a slot is free
    once it was read, and parts that nobody waits for are not counted.
    """
    slots, ready, empty = shared.parts
    BLOCK_Q: gl.constexpr = shared.ring.slots[0].shape[1]
    D: gl.constexpr = shared.ring.slots[0].shape[2]
    BLOCK_K: gl.constexpr = shared.own[0].shape[0]
    PARTS: gl.constexpr = slots.shape[0] // CONSUMERS
    LINES: gl.constexpr = BLOCK_Q * D // CONSUMERS // LINE  # of a part
    steps = sizes.GROUP * block.blocks
    following = gl.maximum(gl.minimum(a, steps - 1), 0)  # there may be no step
    later, count, then = next_turn(following, turns, sizes, block, BLOCK_Q, BLOCK_K)
    done = gl.load(count, volatile=True)
    for n in range(a, steps, ADDERS):
        place, turn = later, then
        before = gl.minimum(turn, sizes.awaited)
        while done < before:
            done = gl.load(count, volatile=True)
        mbarrier.wait(ready.index(n % PARTS), n // PARTS & 1)
        for c in gl.static_range(CONSUMERS):
            part = as_lines(slots.index(n % PARTS * CONSUMERS + c))  # [LINES, LINE]
            line = place * (D // LINE) + c * LINES
            if turn == 0:
                tma.async_copy_shared_to_global(held, [line, 0], part)
            else:
                start_adding(held, [line, 0], part)
        own, following = count, gl.minimum(n + ADDERS, steps - 1)
        later, count, then = next_turn(following, turns, sizes, block, BLOCK_Q, BLOCK_K)
        done = gl.load(count, volatile=True)
        tma.store_wait(0)
        mbarrier.arrive(empty.index(n % PARTS))
        if turn < sizes.awaited:
            wait_until_added()
            gl.atomic_add(own, 1, sem="release")


@triton.jit(do_not_specialize=["first", "T", "PADDED"])
def finish_lines_kernel(
    held, dq, scale, first, H, T, PADDED,
    ROWS: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """gluon_order.finish_kernel for held as lines."""
    blocks = tl.cdiv(T, ROWS)
    row, head = tl.program_id(0) % blocks * ROWS, tl.program_id(0) // blocks
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    held += (head.to(tl.int64) * PADDED + row) * D
    tile = tl.load(held + tl.arange(0, ROWS * D))
    # Consumer, if each has half of the columns, j, warp, r, quarter, half, even, as
    # store_lines has them.
    tile = tl.reshape(tile, [ACROSS, D // ACROSS // 8, 4, 8, 4, 2, 2])
    tile = tl.permute(tile, (2, 5, 3, 0, 1, 4, 6))
    i = (row + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # [ROWS, 1]
    tile = tl.where(i >= first, tl.reshape(tile, [ROWS, D]) * scale, 0.0)
    k = tl.arange(0, D)[None, :]
    at = b * dq.strides[0] + h * dq.strides[1] + i * dq.strides[2] + k * dq.strides[3]
    tl.store(dq.ptr + at, tile.to(dq.ptr.dtype.element_ty), mask=i < T)


@gluon.jit
def own_bands(
    number, head, falling, upward, sizes,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, CAUSAL: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """gluon_backward.own_keys with the band as at d = 64."""
    return gluon_backward.own_keys(
        number, head, falling, upward, sizes, BLOCK_Q, BLOCK_K, CAUSAL, 64
    )


@gluon.jit(do_not_specialize=BackwardSizes._fields)
def keys_kernel(
    q, k, v, do, lse2, delta, dk, dv, held, turns, scale, scale_log2, change,
    heads, GROUP, PADDED, T_q, T_k, left, B, section, mixed, paired, awaited,
    slopes, slope_batch, slope_head,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, SLOTS: gl.constexpr,
    PARTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """hopper_backward.keys_kernel, always with two adders."""
    sizes = BackwardSizes(
        heads, GROUP, PADDED, T_q, T_k, left, B, section, mixed, paired, awaited,
        slopes, slope_batch, slope_head,
    )  # fmt: skip
    BLOCK_Q: gl.constexpr = q.block_type.shape[2]
    BLOCK_K: gl.constexpr = k.block_type.shape[2]
    D: gl.constexpr = q.block_type.shape[3]
    programs = gl.cdiv(sizes.T_k, BLOCK_K)
    taken = take_place(turns, programs, sizes, CAUSAL)
    block = own_keys(*taken, sizes, BLOCK_Q, BLOCK_K, CAUSAL, D)

    own = at(make_pair(k, v, 1), 0)
    slots = make_pair(q, do, SLOTS)
    statistics = make_rows(lse2, SLOTS), make_rows(delta, SLOTS)
    ds = make_slots(k.dtype, 2, BLOCK_K, BLOCK_Q)
    arrived = make_barriers(1, 1).index(0)
    ring = Ring(slots, make_barriers(SLOTS, 1), make_barriers(SLOTS, CONSUMERS))
    ds_ready = make_barriers(1, CONSUMERS).index(0)
    tiles = make_slots(gl.float32, PARTS * CONSUMERS, BLOCK_Q, D // CONSUMERS)
    parts = Ring(tiles, make_barriers(PARTS, CONSUMERS), make_barriers(PARTS, 1))
    shared = Shared(own, arrived, ring, statistics, ds, ds_ready, ds, ds_ready, parts)
    gl.warp_specialize([
        (keys_consumer, (0, dk, dv, scale, scale_log2, change,
                         sizes, block, shared, CAUSAL, RAGGED)),
        (keys_consumer, (1, dk, dv, scale, scale_log2, change,
                         sizes, block, shared, CAUSAL, RAGGED)),
        (keys_producer, (q, k, v, do, lse2, delta, sizes, block, shared)),
        (adder, (0, held, turns, sizes, block, shared)),
        (adder, (1, held, turns, sizes, block, shared)),
    ], [4, 1, 1, 1], [
        CONSUMER_REGISTERS,
        PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS,
    ])  # fmt: skip


def lines_descriptor(held, shape, strides, block, layout):
    """The descriptor of held that adder_of_lines takes, in place of that of rows."""
    lines, own = (math.prod(x) // LINE.value for x in (shape, block))
    layout = gl.NVMMASharedLayout.get_default_for([own, LINE.value], gl.float32)
    shape = [lines, LINE.value]
    return TensorDescriptor(held, shape, [LINE.value, 1], [own, LINE.value], layout)


@plans.planned
def launch_finish_lines(held, dq, padded, causal, scale, T_k, halves=False):
    """gluon_order.launch_finish for held as lines."""
    B, H, T_q, d = dq.shape
    first = max(T_q - T_k, 0) if causal else 0
    plans.launch(
        finish_lines_kernel, dq, B * H * triton.cdiv(T_q, ROWS.value),
        held, Rows(dq, dq.stride()), scale, first, H, T_q, padded, ROWS.value, d,
        ACROSS=1 if halves and d == 64 else 2,
    )  # fmt: skip


def changed(name, **functions):
    """A second module like hopper_backward, with these functions in place of its own;
    they see each other by those names.
    """
    name = f"{hopper_backward.__name__}_{name}"
    spec = importlib.util.spec_from_file_location(name, hopper_backward.__file__)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = vars(module)
    names.update({x: y for x, y in globals().items() if x not in names})
    for place, function in functions.items():
        if isinstance(function, triton.JITFunction):
            fn = function.fn
            copy = types.FunctionType(fn.__code__, names, place, fn.__defaults__)
            copy.__annotations__, copy.__module__ = fn.__annotations__, name
            function = gluon.jit(copy, do_not_specialize=function.do_not_specialize)
        names[place] = function
    return module


AHEAD = {"add_queries": add_ahead, "keys_consumer": consumer_ahead}
LINES = AHEAD | {
    "store_part": store_lines, "give_part": give_lines, "adder": adder_of_lines,
    "keys_kernel": keys_kernel, "TensorDescriptor": lines_descriptor,
    "launch_finish": launch_finish_lines,
}  # fmt: skip
APART = LINES | {
    "own_keys": own_bands, "SPLIT": gl.constexpr(True),
    "add_queries": add_either, "add_ahead": add_ahead, "add_halves": add_halves,
    "FUSED": FUSED | {64: (128, 2, 2)},
    "launch_finish": functools.partial(launch_finish_lines, halves=True),
}  # fmt: skip
VARIANTS = {
    "library": hopper_backward,
    "ahead": changed("ahead", **AHEAD),
    "lines": changed("lines", **LINES),
    "apart": changed("apart", **APART),
}


def arguments(shape):
    """What backward takes, of normal inputs."""
    q, k, v, do = shape.inputs("contiguous")
    scale = shape.d**-0.5
    o, lse = hopper.forward(q, k, v, shape.causal, scale)
    return q, k, v, o, lse, do, torch.zeros_like(lse), shape.causal, scale


def judge_small(module, d, sizes, causal, left=None):
    """Raise AssertionError unless gradients are right, repeat in every bit, and are
    right in any order too.
    """
    H, H_kv, T_q, T_k = sizes
    kind = {"dtype": timing.DTYPE, "device": timing.DEVICE}
    q, k, v = testing.make_qkv(2, H, T_q, d, T_k=T_k, H_kv=H_kv, **kind)
    do, scale = torch.randn(2, H, T_q, d, **kind), d**-0.5
    o, lse = hopper.forward(q, k, v, causal, scale, left)
    given = q, k, v, o, lse, do, torch.zeros_like(lse), causal, scale, left
    options = {"scale": scale}
    options |= {"causal": causal} if left is None else {"window": (left, 0)}
    found = module.backward(*given)
    for results in (found, module.backward(*given, deterministic=False)):
        testing.assert_gradients_within_budget(q, k, v, do, *results, **options)
    for _ in range(REPEATS):
        assert all(map(torch.equal, found, module.backward(*given))), "two runs differ"


def judge_large(module, shape):
    """The same of a shape that is timed, next to the library's gradients; whether they
    have the same bits.
    """
    given = arguments(shape)
    wanted, found = (x.backward(*given) for x in (hopper_backward, module))
    for results in (found, module.backward(*given, deterministic=False)):
        for x, y in zip(results, wanted, strict=True):
            error = (x.float() - y.float()).norm() / y.float().norm()
            assert error < 2e-3, f"{shape}: {error:.1e} from the library's"
    for _ in range(LARGE_REPEATS):
        assert all(map(torch.equal, found, module.backward(*given))), "two runs differ"
    return all(map(torch.equal, found, wanted))


def judge(name, d):
    """Judge a variant at this d, in this process."""
    module, same = VARIANTS[name], True
    for sizes, causal in itertools.product(SIZES, (False, True)):
        judge_small(module, d, sizes, causal)
    judge_small(module, d, SIZES[0], True, left=100)
    for shape in (x for x in SHAPES if x.d == d):
        same = judge_large(module, shape) and same
        timing.release()
    bits = "the library's bits" if same else "bits of its own"
    print(f"{name}, d = {d}: right, and the same in every run: {bits}", flush=True)


def load_fa4():
    """Make FA-4 importable where it was brought; whether it is here."""
    for folder in ("../shared/fa4", "shared/fa4", ".fa4c"):
        if pathlib.Path(folder).is_dir():
            sys.path.append(folder)
    try:
        import fa4 as brought

        brought.load()
    except Exception as error:
        print(f"without FA-4: {type(error).__name__}: {error}"[:200], flush=True)
        return False
    return fa4.missing() is None


def call_fa4(method, shape):
    """The backward pass of one of FA-4's methods."""
    q, k, v, do = shape.inputs("strided")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = fa4.attend(method, q, k, v, shape.causal)
    return functools.partial(torch.autograd.grad, o, (q, k, v), do, retain_graph=True)


def prepare_fa4(place):
    """Compile FA-4's kernels for shapes like this one; they are kept on disk."""
    if load_fa4():
        shape = SHAPES[place]._replace(B=1, H=4, T=512)
        for method in fa4.METHODS:
            call_fa4(method, shape)()
        torch.cuda.synchronize()


def calls(names, shape, rivals):
    """{(name, order): the backward pass of a variant, or of FA-4}."""
    given, found = arguments(shape), {}
    for name in names:
        call = functools.partial(VARIANTS[name].backward, *given)
        found[name, "fixed"] = call
        found[name, "any"] = functools.partial(call, deterministic=False)
    for method, order in zip(fa4.METHODS if rivals else (), ORDERS, strict=False):
        call, reason = timing.attempt(call_fa4, method, shape)
        if reason is None:
            found["fa4", order] = call
        else:
            print(f"{method}: {reason}", flush=True)
    return found


def time_all(begin, right):
    """Print the rates of those that are right, [[name, d]], in interleaved rounds, and
    the clock of each.
    """
    rivals = load_fa4()
    for shape in SHAPES:
        names = [name for name, d in right if d == shape.d]
        if time.time() - begin > LATEST:
            print(f"no time left for {shape}", flush=True)
            continue
        found = calls(names, shape, rivals)
        rates, clocks = {x: [] for x in found}, {}
        flops = shape.flops(passes.BACKWARD)
        for call in found.values():  # compiled before the first round
            call()
        for x, call in timing.rounds(found):
            ms = timing.time_ms(call)
            rates[x].append(flops / ms / 1e9)
            if len(rates[x]) == timing.ROUNDS:
                clocks[x] = timing.clock_mhz(lambda call=call: call, ms)
        print(f"\n{shape}: TFLOP/s (each round) at MHz", flush=True)
        fastest = max(
            (statistics.median(rates[x]) for x in rates if x[0] == "fa4"), default=None
        )
        for x in sorted(rates, key=lambda x: x[1] != "fixed"):
            rate = statistics.median(rates[x])
            same = rates.get(("fa4", x[1]))
            share = f"{rate / statistics.median(same):5.2f} of FA-4" if same else ""
            share += f", {rate / fastest:4.2f} of its fastest" if fastest else ""
            each = " ".join(f"{y:.0f}" for y in rates[x])
            print(f"  {x[0]:8} {x[1]:6} {rate:6.0f} ({each}) {clocks[x]:5} {share}")
        del found
        timing.release()
    print(f"{time.time() - begin:.0f} s in all", flush=True)


def start(seconds, *words):
    """A process of this module that is ended after so many seconds."""
    command = ["timeout", "-k", "2", str(seconds), sys.executable, "-u", "-m"]
    return subprocess.Popen(
        [*command, "benchmarks.backward_variants", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def main():
    """Judge each variant in a process of its own, then time what is right."""
    begin = time.time()
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "/tmp/fa4_kernels")
    kinds = {(x.d, x.causal, x.group): n for n, x in enumerate(SHAPES)}
    judged = list(itertools.product(VARIANTS, (64, 128)))
    judges = [start(JUDGED_IN, "judge", *x) for x in judged]
    others = [start(JUDGED_IN, "fa4", n) for n in kinds.values()]
    right = []
    for (name, d), process in zip(judged, judges, strict=True):
        said = process.communicate()[0].strip().splitlines()
        if process.returncode == 0:
            right.append((name, d))
            print(said[-1], flush=True)
        else:  # 124 or 137: it was ended
            print(f"{name}, d = {d}, {process.returncode}:", *said[-6:], sep="\n")
    for process in others:
        said = process.communicate()[0].strip().splitlines()
        if process.returncode != 0 or said:
            print(f"FA-4, {process.returncode}:", *said[-1:], flush=True)
    print(f"{time.time() - begin:.0f} s to judge", flush=True)
    process = start(LATEST + 30, "time", begin, json.dumps(right))
    for line in process.stdout:
        print(line, end="", flush=True)
    process.wait()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "judge":
        judge(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "fa4":
        prepare_fa4(int(sys.argv[2]))
    else:
        time_all(float(sys.argv[2]), json.loads(sys.argv[3]))
