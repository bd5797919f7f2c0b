"""The backward pass for Hopper (sm_90) in Triton's Gluon dialect: copies and products run by themselves.

Chapter *Hopper*; the sums are those of the chapter *The backward pass*: from L, in base 2, and D =
rowsum(dO o O) follow P = exp(S - L), dV = P^T dO, dP = dO V^T, dS = P o (dP - D), dQ = scale dS K and
dK = scale dS^T Q. What is new is who does what. A program has one producer, a warp that only starts copies
(TMA) into a ring of slots, and two consumers, groups of four warps, that own 64 rows of the result each.
Barriers in shared memory tell the consumers that a slot is full, and the producer that both are done with it.
Products (wgmma) are started and awaited later: exponentials of one consumer run below products of both.

There are two forms. Split: one kernel collects dK and dV, another dQ. Every sum is made in one place and in
one order, so two runs agree in every bit. Fused: the first kernel also adds its part of dQ to a buffer in
memory, which saves two products of seven, but in the order in which programs happen to run.

The scores of keys_kernel stand transposed, keys in rows, those of queries_kernel do not. In both, P and dS
are then first factors of the next product straight from the registers in which they were computed.
"""

import math

import torch
import triton
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

from flashlib.kernels import on_device
from flashlib.kernels.backward import launch_delta
from flashlib.kernels.copies import descriptor
from flashlib.kernels.launch import describable

LOG2_E = math.log2(math.e)
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a result that one consumer owns: the height of a product
BLOCK = 128  # rows of a result that a program owns
PAD = 128  # the padded length of delta and lse2 is a multiple of it, and of every slot's


@gluon.jit
def tile_of(slots, slot):
    """A slot [1, 1, rows, D] of a ring as a matrix [rows, D]."""
    return slots.index(slot).reshape([slots.shape[3], slots.shape[4]])


@gluon.jit
def rows_of(tile, c: gl.constexpr):
    """The rows of consumer c in a tile [1, 1, rows, D], [ROWS, D]."""
    return tile.reshape([tile.shape[2], tile.shape[3]]).slice(c * ROWS, ROWS)


@gluon.jit
def numbers_of(slots, slot, layout: gl.constexpr):
    """A slot [1, rows] of a ring of numbers, one for each row, in registers, [rows]."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return slots.index(slot)._reinterpret(gl.float32, [slots.shape[2]], plain).load(layout)


@gluon.jit
def start(own, slots, slot, layout: gl.constexpr):
    """Start S = Q K^T and dP = dO V^T, where (Q, dO) are own and (K, V) stand in a slot, or, the other way
    round, S^T = K Q^T and dP^T = V dO^T; [ROWS, COLUMNS] each.
    """
    COLUMNS: gl.constexpr = slots[0].shape[3]
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout)  # [ROWS, COLUMNS]
    others = tile_of(slots[0], slot).permute((1, 0)), tile_of(slots[1], slot).permute((1, 0))  # [D, COLUMNS]
    s = warpgroup_mma(own[0], others[0], zeros, use_acc=False, is_async=True)  # [ROWS, COLUMNS]
    dp = warpgroup_mma(own[1], others[1], zeros, use_acc=False, is_async=True)  # [ROWS, COLUMNS]
    return s, dp


@gluon.jit
def place(n, count, row, shift, BLOCK_Q: gl.constexpr):
    """Head in the group, and row, of the n-th block, where every head has count blocks from a row on."""
    return n // count, row + (n + shift) % count * BLOCK_Q


@gluon.jit
def copy_queries(n, b, h, row, H, q, do, lse2, delta, slots, statistics, ready, free, SLOTS: gl.constexpr):
    """Fill slot n % SLOTS with the block of queries at row, once it is free."""
    slot = n % SLOTS
    # The first filling of a slot waits for the phase before the first, which counts as over.
    mbarrier.wait(free.index(slot), (n // SLOTS & 1) ^ 1)
    full = ready.index(slot)
    mbarrier.expect(full, 2 * q.block_type.nbytes + 2 * lse2.block_type.nbytes)
    tma.async_copy_global_to_shared(q, [b, h, row, 0], full, slots[0].index(slot))
    tma.async_copy_global_to_shared(do, [b, h, row, 0], full, slots[1].index(slot))
    tma.async_copy_global_to_shared(lse2, [b * H + h, row], full, statistics[0].index(slot))
    tma.async_copy_global_to_shared(delta, [b * H + h, row], full, statistics[1].index(slot))


@gluon.jit
def keys_producer(q, k, v, do, lse2, delta, tiles, slots, statistics, barriers, block, H_kv, GROUP,
                  SLOTS: gl.constexpr):
    """Copy the block of keys at col and their values once, then all queries that see them, block by block."""
    BLOCK_Q: gl.constexpr = q.block_type.shape[2]
    b, h_kv, col, row, band, rest, shift = block
    h = h_kv * GROUP
    tiles_ready, ready, free, _ = barriers
    mbarrier.expect(tiles_ready, 2 * k.block_type.nbytes)
    tma.async_copy_global_to_shared(k, [b, h_kv, col, 0], tiles_ready, tiles[0])
    tma.async_copy_global_to_shared(v, [b, h_kv, col, 0], tiles_ready, tiles[1])
    for n in range(GROUP * band):
        g, i = place(n, band, row, 0, BLOCK_Q)
        copy_queries(n, b, h + g, i, H_kv * GROUP, q, do, lse2, delta, slots, statistics, ready, free, SLOTS)
    for n in range(GROUP * rest):
        g, i = place(n, rest, row + band * BLOCK_Q, shift, BLOCK_Q)
        copy_queries(GROUP * band + n, b, h + g, i, H_kv * GROUP, q, do, lse2, delta, slots, statistics,
                     ready, free, SLOTS)


@gluon.jit
def as_held(tile, layout: gl.constexpr):
    """A result [ROWS, columns] of one product as a vector, in the order in which the threads hold it.

    A thread has row 16 warp + 8 j + lane // 4 and column 8 i + 2 (lane % 4) + k for all i, j and k.
    """
    columns: gl.constexpr = tile.shape[1]
    # From warp, j, lane, i, lane, k to i, warp, lane, lane, j, k.
    tile = tile.reshape([4, 2, 8, columns // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))  # [I, 4, 8, 4, 2, 2]
    return gl.convert_layout(tile.reshape([ROWS * columns]), layout, assert_trivial=True)


@gluon.jit
def collect(dk, dv, dq, n, row, seen_from, real, c: gl.constexpr, own, k_columns, slots, statistics, ds_slots,
            barriers, scale_log2, MASKED: gl.constexpr, RAGGED: gl.constexpr, FUSED: gl.constexpr,
            SLOTS: gl.constexpr):
    """One step of the inner loop over queries: block n, which starts at row, adds to dK and dV, and, where
    FUSED, to dQ in memory.
    """
    BLOCK_Q: gl.constexpr = slots[0].shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    factor: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    _, ready, free, ds_ready = barriers
    slot = n % SLOTS
    q_tile, do_tile = tile_of(slots[0], slot), tile_of(slots[1], slot)  # [BLOCK_Q, D] each
    mbarrier.wait(ready.index(slot), n // SLOTS & 1)
    s, dp = start(own, slots, slot, s_layout)  # [ROWS, BLOCK_Q] each
    lse_rows = numbers_of(statistics[0], slot, columns)  # [BLOCK_Q]
    s = warpgroup_mma_wait(1, [s])  # [ROWS, BLOCK_Q], unscaled; dP is still running
    p = gl.exp2(s * scale_log2 - lse_rows[None, :])  # [ROWS, BLOCK_Q]
    if MASKED:
        i = gl.arange(0, BLOCK_Q, columns)  # [BLOCK_Q]
        p = gl.where((seen_from - row)[:, None] <= i[None, :], p, 0.0)  # [ROWS, BLOCK_Q]
    if RAGGED and FUSED:  # in a sum over keys those after the last have no part
        p = gl.where(real[:, None], p, 0.0)  # [ROWS, BLOCK_Q]
    dv = warpgroup_mma(gl.convert_layout(p.to(q_tile.dtype), factor), do_tile, dv, is_async=True)  # [ROWS, D]
    dp = warpgroup_mma_wait(1, [dp])  # [ROWS, BLOCK_Q]; dV is still running
    delta_rows = numbers_of(statistics[1], slot, columns)  # [BLOCK_Q]
    ds = (p * (dp - delta_rows[None, :])).to(q_tile.dtype)  # [ROWS, BLOCK_Q]
    if FUSED:
        # Both consumers read what both leave here. The other one last read this slot two blocks ago, before
        # it left its rows of the last block.
        ds_tile = ds_slots.index(n % 2)  # [BLOCK_K, BLOCK_Q]
        ds_tile.slice(c * ROWS, ROWS).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_ready)
    dk = warpgroup_mma(gl.convert_layout(ds, factor), q_tile, dk, is_async=True)  # [ROWS, D], unscaled
    if FUSED:
        dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, k_columns.shape[1], 16])
        flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        COLUMNS: gl.constexpr = k_columns.shape[1]
        part = gl.zeros([BLOCK_Q, COLUMNS], gl.float32, dq_layout)  # [BLOCK_Q, COLUMNS]
        mbarrier.wait(ds_ready, n & 1)
        part = warpgroup_mma(ds_tile.permute((1, 0)), k_columns, part,
                             use_acc=False, is_async=True)  # [BLOCK_Q, COLUMNS]
        dk, dv, part = warpgroup_mma_wait(0, [dk, dv, part])
        # In this order an instruction adds four numbers of a thread, and a warp fills whole sectors.
        dq += gl.arange(0, BLOCK_Q * COLUMNS, flat)  # [BLOCK_Q * COLUMNS]
        gl.atomic_add(dq, as_held(part, flat), sem="relaxed")
    else:
        dk, dv = warpgroup_mma_wait(0, [dk, dv])
    mbarrier.arrive(free.index(slot))
    return dk, dv


@gluon.jit
def keys_consumer(c: gl.constexpr, dq, dk_out, dv_out, tiles, slots, statistics, ds_slots, barriers, block,
                  H_kv, GROUP, PADDED, T_q, T_k, scale, scale_log2, CAUSAL: gl.constexpr,
                  RAGGED: gl.constexpr, FUSED: gl.constexpr, SLOTS: gl.constexpr, D: gl.constexpr):
    """Collect rows c ROWS and following of a block of dK and dV, and store them."""
    BLOCK_Q: gl.constexpr = slots[0].shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    b, h_kv, col, row, band, rest, shift = block
    h = h_kv * GROUP
    k_tile, v_tile = rows_of(tiles[0], c), rows_of(tiles[1], c)  # [ROWS, D] each
    COLUMNS: gl.constexpr = D // CONSUMERS  # of dQ, that a consumer adds
    k_columns = tiles[0].reshape([CONSUMERS * ROWS, D])  # [BLOCK_K, D]
    k_columns = k_columns.slice(c * COLUMNS, COLUMNS, dim=1)  # [BLOCK_K, COLUMNS]
    j = col + c * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))  # [ROWS]
    seen_from, real = j + T_q - T_k, j < T_k  # [ROWS] each, the first query that sees a key
    dk = gl.zeros([ROWS, D], gl.float32, layout)  # [ROWS, D]
    dv = gl.zeros([ROWS, D], gl.float32, layout)  # [ROWS, D]
    dq += c * BLOCK_Q * COLUMNS
    mbarrier.wait(barriers[0], 0)
    own = k_tile, v_tile
    if D == 64:
        # Products of 64 rows and columns with both factors in shared memory need all that it can read. There
        # are registers for these factors only where the results are narrow.
        in_registers: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
        own = k_tile.load(in_registers), v_tile.load(in_registers)
    if CAUSAL:
        for n in range(GROUP * band):
            g, i = place(n, band, row, 0, BLOCK_Q)
            part = dq + ((b * H_kv * GROUP + h + g).to(gl.int64) * PADDED + i) * D
            dk, dv = collect(dk, dv, part, n, i, seen_from, real, c, own, k_columns, slots, statistics,
                             ds_slots, barriers, scale_log2, True, RAGGED, FUSED, SLOTS)
    if not CAUSAL or D == 64:
        for m in range(GROUP * rest):
            n = GROUP * band + m
            g, i = place(m, rest, row + band * BLOCK_Q, shift, BLOCK_Q)
            part = dq + ((b * H_kv * GROUP + h + g).to(gl.int64) * PADDED + i) * D
            dk, dv = collect(dk, dv, part, n, i, seen_from, real, c, own, k_columns, slots, statistics,
                             ds_slots, barriers, scale_log2, False, RAGGED, FUSED, SLOTS)
    if FUSED:  # the other consumer may still read these rows of K
        mbarrier.arrive(barriers[3])
        mbarrier.wait(barriers[3], GROUP * (band + rest) & 1)
    # Nobody reads these rows of K and V any more: the results leave from there.
    k_tile.store((dk * scale).to(k_tile.dtype))
    v_tile.store(dv.to(v_tile.dtype))
    fence_async_shared()
    col += c * ROWS
    tma.async_copy_shared_to_global(dk_out, [b, h_kv, col, 0], tiles[0].slice(c * ROWS, ROWS, dim=2))
    tma.async_copy_shared_to_global(dv_out, [b, h_kv, col, 0], tiles[1].slice(c * ROWS, ROWS, dim=2))
    tma.store_wait(0)


@gluon.constexpr_function
def in_slots(shape, SLOTS):
    """The shape of SLOTS blocks."""
    return [SLOTS, *shape]


@gluon.jit
def ring(tensor, SLOTS: gl.constexpr):
    """Shared memory for SLOTS blocks of a tensor."""
    return gl.allocate_shared_memory(tensor.dtype, in_slots(tensor.block_type.shape, SLOTS), tensor.layout)


@gluon.jit
def barrier_ring(SLOTS: gl.constexpr, count: gl.constexpr):
    """SLOTS barriers, whose phases end after count arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=count)
    return barriers


@gluon.jit
def keys_kernel(q, k, v, do, lse2, delta, dq, dk, dv, scale, scale_log2, H_kv, GROUP, PADDED, T_q, T_k,
                CAUSAL: gl.constexpr, RAGGED: gl.constexpr, FUSED: gl.constexpr, SLOTS: gl.constexpr,
                CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr):
    """One program writes one block of rows of dK and of dV, from all queries of the group that see them."""
    BLOCK_Q: gl.constexpr = q.block_type.shape[2]
    BLOCK_K: gl.constexpr = CONSUMERS * ROWS
    D: gl.constexpr = q.block_type.shape[3]
    programs = gl.cdiv(T_k, BLOCK_K)
    # With a causal mask the first blocks of keys are seen by the most queries: the longest start first.
    col = gl.program_id(0) % programs * BLOCK_K
    head = gl.program_id(0) // programs
    b, h_kv = head // H_kv, head % H_kv
    # Queries before row see no key of this block, the next band blocks some keys, the rest all keys.
    row, band = 0, 0
    if CAUSAL:
        row = gl.maximum(col + T_q - T_k, 0) // BLOCK_Q * BLOCK_Q
        band = gl.cdiv(gl.maximum(gl.minimum(col + BLOCK_K - 1 + T_q - T_k, T_q) - row, 0), BLOCK_Q)
    blocks = gl.cdiv(gl.maximum(T_q - row, 0), BLOCK_Q)
    if CAUSAL and D > 64:  # there are no registers for a second loop: every block is masked
        band = blocks
    rest = blocks - band
    # Without a mask the programs of a head would add to the same rows of dQ at once: each starts elsewhere.
    shift = 0
    if FUSED and not CAUSAL:
        shift = col // BLOCK_K * rest // programs

    tiles = ring(k, 1).index(0), ring(v, 1).index(0)
    slots, statistics = (ring(q, SLOTS), ring(do, SLOTS)), (ring(lse2, SLOTS), ring(delta, SLOTS))
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], k.dtype)
    # Not used, and small, where dQ is not added.
    ds_shape: gl.constexpr = [2, BLOCK_K, BLOCK_Q] if FUSED else [1, 16, BLOCK_Q]
    ds_slots = gl.allocate_shared_memory(k.dtype, ds_shape, ds_layout)
    barriers = (barrier_ring(1, 1).index(0), barrier_ring(SLOTS, 1), barrier_ring(SLOTS, CONSUMERS),
                barrier_ring(1, CONSUMERS).index(0))
    block = (b, h_kv, col, row, band, rest, shift)
    gl.warp_specialize([
        (keys_consumer, (0, dq, dk, dv, tiles, slots, statistics, ds_slots, barriers, block, H_kv, GROUP,
                         PADDED, T_q, T_k, scale, scale_log2, CAUSAL, RAGGED, FUSED, SLOTS, D)),
        (keys_consumer, (1, dq, dk, dv, tiles, slots, statistics, ds_slots, barriers, block, H_kv, GROUP,
                         PADDED, T_q, T_k, scale, scale_log2, CAUSAL, RAGGED, FUSED, SLOTS, D)),
        (keys_producer, (q, k, v, do, lse2, delta, tiles, slots, statistics, barriers, block, H_kv, GROUP,
                         SLOTS)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@gluon.jit
def queries_producer(q, k, v, do, tiles, slots, barriers, b, h, h_kv, row, blocks, SLOTS: gl.constexpr):
    """Copy the block of queries at row and their dO once, then all keys and values that they see."""
    tiles_ready, ready, free = barriers
    mbarrier.expect(tiles_ready, 2 * q.block_type.nbytes)
    tma.async_copy_global_to_shared(q, [b, h, row, 0], tiles_ready, tiles[0])
    tma.async_copy_global_to_shared(do, [b, h, row, 0], tiles_ready, tiles[1])
    for n in range(blocks):
        slot, col = n % SLOTS, n * k.block_type.shape[2]
        mbarrier.wait(free.index(slot), (n // SLOTS & 1) ^ 1)
        mbarrier.expect(ready.index(slot), 2 * k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [b, h_kv, col, 0], ready.index(slot), slots[0].index(slot))
        tma.async_copy_global_to_shared(v, [b, h_kv, col, 0], ready.index(slot), slots[1].index(slot))


@gluon.jit
def descend(dq, n, i, lse_rows, delta_rows, own, slots, barriers, scale_log2, T_q, T_k, CAUSAL: gl.constexpr,
            MASKED: gl.constexpr, SLOTS: gl.constexpr):
    """One step of the inner loop over keys: block n adds to dQ."""
    BLOCK_K: gl.constexpr = slots[0].shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    _, ready, free = barriers
    slot = n % SLOTS
    k_tile = tile_of(slots[0], slot)  # [BLOCK_K, D]
    mbarrier.wait(ready.index(slot), n // SLOTS & 1)
    s, dp = start(own, slots, slot, s_layout)  # [ROWS, BLOCK_K] each
    s = warpgroup_mma_wait(1, [s])  # [ROWS, BLOCK_K], unscaled; dP is still running
    p = gl.exp2(s * scale_log2 - lse_rows[:, None])  # [ROWS, BLOCK_K]
    if MASKED:
        j = n * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, s_layout))  # [BLOCK_K]
        seen = (j < T_k)[None, :]  # [1, BLOCK_K]
        if CAUSAL:
            seen = seen & (j[None, :] <= i[:, None] + (T_k - T_q))  # [ROWS, BLOCK_K]
        p = gl.where(seen, p, 0.0)  # [ROWS, BLOCK_K]
    dp = warpgroup_mma_wait(0, [dp])  # [ROWS, BLOCK_K]
    ds = (p * (dp - delta_rows[:, None])).to(k_tile.dtype)  # [ROWS, BLOCK_K]
    dq = warpgroup_mma(gl.convert_layout(ds, factor), k_tile, dq, is_async=True)  # [ROWS, D], unscaled
    dq = warpgroup_mma_wait(0, [dq])
    mbarrier.arrive(free.index(slot))
    return dq


@gluon.jit
def queries_consumer(c: gl.constexpr, dq_out, lse2, delta, tiles, slots, barriers, b, h, H, row, full, blocks,
                     PADDED, T_q, T_k, scale, scale_log2, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
                     SLOTS: gl.constexpr, D: gl.constexpr):
    """Collect rows c ROWS and following of a block of dQ, and store them."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, slots[0].shape[3], 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q_tile, do_tile = rows_of(tiles[0], c), rows_of(tiles[1], c)  # [ROWS, D] each
    i = row + c * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))  # [ROWS]
    numbers = (b * H + h).to(gl.int64) * PADDED + i  # [ROWS], within the padding of the last block
    lse_rows, delta_rows = gl.load(lse2 + numbers), gl.load(delta + numbers)  # [ROWS] each
    dq = gl.zeros([ROWS, D], gl.float32, layout)  # [ROWS, D]
    mbarrier.wait(barriers[0], 0)
    own = q_tile, do_tile
    for n in range(full):
        dq = descend(dq, n, i, lse_rows, delta_rows, own, slots, barriers, scale_log2, T_q, T_k,
                     CAUSAL, False, SLOTS)
    if CAUSAL or RAGGED:
        for n in range(full, blocks):
            dq = descend(dq, n, i, lse_rows, delta_rows, own, slots, barriers, scale_log2, T_q, T_k,
                         CAUSAL, True, SLOTS)
    # Nobody reads these rows of Q any more: the result leaves from there.
    q_tile.store((dq * scale).to(q_tile.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_out, [b, h, row + c * ROWS, 0], tiles[0].slice(c * ROWS, ROWS, dim=2))
    tma.store_wait(0)


@gluon.jit
def queries_kernel(q, k, v, do, lse2, delta, dq, scale, scale_log2, H, GROUP, PADDED, T_q, T_k,
                   CAUSAL: gl.constexpr, RAGGED: gl.constexpr, SLOTS: gl.constexpr,
                   CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr):
    """One program writes one block of rows of dQ, from all keys that these rows see."""
    BLOCK_K: gl.constexpr = k.block_type.shape[2]
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    D: gl.constexpr = k.block_type.shape[3]
    programs = gl.cdiv(T_q, BLOCK_Q)
    # With a causal mask the last blocks of queries see the most keys: the longest start first.
    row = (programs - 1 - gl.program_id(0) % programs) * BLOCK_Q
    head = gl.program_id(0) // programs
    b, h = head // H, head % H
    # The first `full` blocks of keys are seen by every query of this block, those from `blocks` on by none.
    full, blocks = T_k // BLOCK_K, gl.cdiv(T_k, BLOCK_K)
    if CAUSAL:
        full = gl.minimum(full, gl.maximum(row + 1 + T_k - T_q, 0) // BLOCK_K)
        blocks = gl.minimum(blocks, gl.cdiv(gl.maximum(row + BLOCK_Q + T_k - T_q, 0), BLOCK_K))

    tiles, slots = (ring(q, 1).index(0), ring(do, 1).index(0)), (ring(k, SLOTS), ring(v, SLOTS))
    barriers = barrier_ring(1, 1).index(0), barrier_ring(SLOTS, 1), barrier_ring(SLOTS, CONSUMERS)
    gl.warp_specialize([
        (queries_consumer, (0, dq, lse2, delta, tiles, slots, barriers, b, h, H, row, full, blocks,
                            PADDED, T_q, T_k, scale, scale_log2, CAUSAL, RAGGED, SLOTS, D)),
        (queries_consumer, (1, dq, lse2, delta, tiles, slots, barriers, b, h, H, row, full, blocks,
                            PADDED, T_q, T_k, scale, scale_log2, CAUSAL, RAGGED, SLOTS, D)),
        (queries_producer, (q, k, v, do, tiles, slots, barriers, b, h, h // GROUP, row, blocks, SLOTS)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@triton.jit
def finish_kernel(held, dq, scale, T, PADDED, ROWS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr):
    """One program brings a block of dQ from the order of as_held, PARTS of its columns one after the other,
    into rows, scaled and rounded.
    """
    blocks = tl.cdiv(T, ROWS)
    row, head = tl.program_id(0) % blocks * ROWS, tl.program_id(0) // blocks
    COLUMNS: tl.constexpr = D // PARTS
    held += (head.to(tl.int64) * PADDED + row) * D + tl.arange(0, ROWS * COLUMNS)  # [ROWS * COLUMNS]
    i = row + tl.arange(0, ROWS)  # [ROWS]
    rows = dq + (head.to(tl.int64) * T + i)[:, None] * D + tl.arange(0, COLUMNS)[None, :]  # [ROWS, COLUMNS]
    for part in tl.static_range(PARTS):
        tile = tl.load(held + part * ROWS * COLUMNS).reshape(COLUMNS // 8, 4, 8, 4, 2, 2)
        tile = tile.permute(1, 4, 2, 0, 3, 5).reshape(ROWS, COLUMNS)  # [ROWS, COLUMNS]
        tl.store(rows + part * COLUMNS, (tile * scale).to(dq.dtype.element_ty), mask=(i < T)[:, None])


WIDTHS = (64, 128)
# {d: (rows of a slot, slots)}, the fastest of a sweep on an H200. A consumer keeps its results beside S and
# dP in registers; what is spilled with d = 128, at most 16 bytes, is spilled outside of the loops.
KEYS = {64: (64, 4), 128: (64, 4)}
FUSED = {64: (64, 2), 128: (64, 2)}
QUERIES = {64: (128, 3), 128: (64, 4)}
# Twelve warps have 168 registers a thread, of which the last four, the producer's, hand most to the others.
WARPS = {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24, "num_warps": 4, "maxnreg": 168}


def numbers_descriptor(x, rows):
    """A descriptor of x ``[B, H, PADDED]``, contiguous, float32, with tiles [1, rows]."""
    x = x.flatten(0, 1)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows], gl.NVMMASharedLayout(0, 32, 2))


def launch_keys(q, k, v, do, delta, lse2, dk, dv, causal, scale, tile, held=None):
    """Launch the kernel that fills dk and dv, contiguous, in the shapes of k and v; where held is not None,
    the fused one, which adds dQ, unscaled, to held: zeros in float32, B * H * PADDED * d of them.
    """
    B, H, T_q, _ = q.shape
    H_kv, T_k = k.shape[1:3]
    BLOCK_Q, SLOTS = tile
    fused = held is not None
    with on_device(q):
        return keys_kernel[(B * H_kv * triton.cdiv(T_k, BLOCK),)](
            descriptor(q, BLOCK_Q), descriptor(k, BLOCK), descriptor(v, BLOCK), descriptor(do, BLOCK_Q),
            numbers_descriptor(lse2, BLOCK_Q), numbers_descriptor(delta, BLOCK_Q),
            held if fused else delta, descriptor(dk, ROWS.value), descriptor(dv, ROWS.value),
            scale, scale * LOG2_E, H_kv, H // H_kv, delta.shape[2], T_q, T_k,
            CAUSAL=causal, RAGGED=T_k % BLOCK != 0, FUSED=fused, SLOTS=SLOTS, **WARPS,
        )  # fmt: skip


def launch_queries(q, k, v, do, delta, lse2, dq, causal, scale, tile):
    """Launch the kernel that fills dq, contiguous [B, H, T_q, d], with delta and lse2 from launch_delta."""
    B, H, T_q, _ = q.shape
    H_kv, T_k = k.shape[1:3]
    BLOCK_K, SLOTS = tile
    with on_device(q):
        return queries_kernel[(B * H * triton.cdiv(T_q, BLOCK),)](
            descriptor(q, BLOCK), descriptor(k, BLOCK_K), descriptor(v, BLOCK_K), descriptor(do, BLOCK),
            lse2, delta, descriptor(dq, ROWS.value), scale, scale * LOG2_E,
            H, H // H_kv, delta.shape[2], T_q, T_k,
            CAUSAL=causal, RAGGED=T_k % BLOCK_K != 0, SLOTS=SLOTS, **WARPS,
        )  # fmt: skip


def launch_finish(held, dq, delta, scale):
    """Launch the kernel that fills dq, contiguous [B, H, T_q, d], from what the fused kernel added up."""
    B, H, T_q, d = dq.shape
    with on_device(dq):
        return finish_kernel[(B * H * triton.cdiv(T_q, ROWS.value),)](
            held, dq, scale, T_q, delta.shape[2], ROWS.value, d, CONSUMERS.value,
        )  # fmt: skip


def backward(q, k, v, o, lse, do, dlse, causal, scale, deterministic=True):
    """``(dq, dk, dv)`` in the shapes and dtypes of q, k, v, contiguous, without any T x T matrix, for tensors
    that ``flashlib.kernels.copies.refusal`` lets through with WIDTHS.

    q ``[B, H, T_q, d]``, k and v ``[B, H_kv, T_k, d]``, float16 or bfloat16, d one of 64, 128; o
    ``[B, H, T_q, d]`` and lse ``[B, H, T_q]`` (float32, natural logarithm) as the forward gave them; do and
    dlse, the gradients with respect to o and lse, in their shapes; these four with any strides, scale finite.
    deterministic: the split form, the same in every bit on every run; otherwise the fused form where it is
    the faster one (d = 64, and d = 128 without a mask), whose dQ is added up in a float32 buffer in no
    particular order.
    A query that sees no key takes and gives exactly nothing; dK and dV are summed over the heads of a group.
    """
    B, H, T_q, d = q.shape
    if q.numel() == 0 or k.numel() == 0:
        return tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    do = do if describable(do) else do.contiguous()
    padded = triton.cdiv(T_q, PAD) * PAD
    delta, lse2 = (torch.empty(B, H, padded, dtype=torch.float32, device=q.device) for _ in range(2))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    launch_delta(o, lse, do, dlse, delta, lse2)
    if deterministic or (d == 128 and causal):
        launch_keys(q, k, v, do, delta, lse2, dk, dv, causal, scale, KEYS[d])
        launch_queries(q, k, v, do, delta, lse2, dq, causal, scale, QUERIES[d])
    else:
        held = torch.zeros(B * H * padded * d, dtype=torch.float32, device=q.device)
        launch_keys(q, k, v, do, delta, lse2, dk, dv, causal, scale, FUSED[d], held)
        launch_finish(held, dq, delta, scale)
    return dq, dk, dv
