"""The backward pass of expanded attention for Hopper (sm_90), in Gluon: keys are wider
than values, d = 192 and d_v = 128.

Chapter *Latent attention*; the sums and the order of dQ are those of
hopper_backward.py, fused. A consumer owns 64 keys, all 192 columns of their dK and the
128 of their dV, two thirds of its registers, so the numbers of a step take turns in the
rest: P is kept in 16 bits only. Tiles of 192 columns, which Triton refuses, are two: of
128 columns and of 64. A part of dQ has three blocks of 64 columns: each consumer
computes one of them and half of the third. A step takes its queries in two halves.

The barriers, for a program that takes N blocks of queries:

=========== ========================== =================================================
barrier     a phase ends with          who waits for it
=========== ========================== =================================================
arrived     the copy of K and V        both consumers, before the first step
ring.ready  the copy of block n        both consumers, for step n; SLOTS of these
ring.empty  both consumers have read   the producer, before it copies block n + SLOTS
            block n                    into the same slot
ds_ready    both consumers have        both consumers, before they read it for a part of
            stored dS^T of block n     dQ
ds_read     both consumers have read   both consumers, before they overwrite it with
            dS^T of block n            that of block n + 1
parts.ready both consumers have        the adder, before it adds the part
            stored part n of dQ
parts.empty part n has left shared     both consumers, before they overwrite it with
            memory                     part n + 1
=========== ========================== =================================================

Phase N of ds_ready, which belongs to no block, ends when both consumers are done with K
and V, since they store dK and dV in their place.
"""

import dataclasses
from typing import Any, NamedTuple

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

from flashlib import plans
from flashlib.kernels.descriptors import gluon_descriptor, row_descriptor
from flashlib.kernels.gluon_backward import (
    BLOCK,
    CONSUMERS,
    EVERY_PART,
    WARPS,
    BackwardSizes,
    allocate_sums,
    make_rows,
    meet,
    prepare_rows,
    read_rows,
    split_layout,
    store_keys,
)
from flashlib.kernels.gluon_keys import block_of, keys_by_formula
from flashlib.kernels.gluon_order import (
    add_or_store,
    choose_order,
    count_part,
    next_turn,
    take_ticket,
)
from flashlib.kernels.gluon_tiles import (
    ROWS,
    Ring,
    accumulator,
    make_barriers,
    make_slots,
)
from flashlib.kernels.tiles import LOG2_E, Rows
from flashlib.plans import new_like

FIRST, REST = gl.constexpr(128), gl.constexpr(64)  # columns of the tiles of Q and of K
COLUMNS = gl.constexpr(64)  # of a block of dQ
BLOCKS = gl.constexpr(3)  # of a part of dQ: 192 columns
BLOCK_Q = gl.constexpr(64)
BLOCK_K = gl.constexpr(BLOCK)
SLOTS = gl.constexpr(2)
HALF = gl.constexpr(32)  # of the queries of a step
SHARE = gl.constexpr(32)  # of the columns of the third block of dQ, a consumer's


class ExpandedShared(NamedTuple):
    """The shared memory of a program."""

    own: tuple  # K, its rest, and V: [BLOCK_K, FIRST], [BLOCK_K, REST], [BLOCK_K, D_V]
    arrived: Any  # their barrier
    ring: Ring  # slots for Q, its rest, and dO
    statistics: tuple  # slots for lse2 and delta of the same rows
    ds: Any  # dS^T, [BLOCK_K, BLOCK_Q]
    ds_ready: Any  # the barrier where consumers have stored it
    ds_read: Any  # and where they have read it
    parts: Ring  # of dQ, one slot of BLOCKS blocks


@gluon.jit
def triple_in(slots, slot):
    """The tiles of three tensors in the slots with this number."""
    return slots[0].index(slot), slots[1].index(slot), slots[2].index(slot)


@gluon.jit
def copy_three(tensors, b, h, row, ready, tiles):
    """Start copying blocks of Q or K, of its rest, and of dO or V."""
    first, rest, other = tensors
    tma.async_copy_global_to_shared(first, (b, h, row, 0), ready, tiles[0])
    tma.async_copy_global_to_shared(rest, (b, h, row, FIRST), ready, tiles[1])
    tma.async_copy_global_to_shared(other, (b, h, row, 0), ready, tiles[2])


@gluon.jit
def produce(keys, queries, lse2, delta, sizes, block, shared):
    """Copy a block of K and V once, then all queries that see it."""
    b, h_kv, GROUP = block.b, block.h, sizes.GROUP
    loaded: gl.constexpr = 2 * BLOCK_K * (FIRST + REST + FIRST)
    mbarrier.expect(shared.arrived, loaded)
    copy_three(keys, b, h_kv, block.col, shared.arrived, shared.own)
    ring, statistics, H = shared.ring, shared.statistics, sizes.H_kv * GROUP
    for n in range(GROUP * block.blocks):
        g, i = block_of(n, block, GROUP, BLOCK_Q)
        h, slot = h_kv * GROUP + g, n % SLOTS
        mbarrier.wait(ring.empty.index(slot), (n // SLOTS & 1) ^ 1)
        ready = ring.ready.index(slot)
        mbarrier.expect(ready, 2 * BLOCK_Q * (FIRST + REST + FIRST) + 8 * BLOCK_Q)
        copy_three(queries, b, h, i, ready, triple_in(ring.slots, slot))
        corner = b * H + h, i
        lse_slot, delta_slot = statistics[0].index(slot), statistics[1].index(slot)
        tma.async_copy_global_to_shared(lse2, corner, ready, lse_slot)
        tma.async_copy_global_to_shared(delta, corner, ready, delta_slot)


@gluon.jit
def start(a, b, acc, use_acc: gl.constexpr = True):
    """Start acc += a b, or acc = a b."""
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def add_half(
    c: gl.constexpr, half: gl.constexpr, dk, dk_rest, dv, n, row, invariants, shared,
    MASKED: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Half of the queries of block n, at row, adds to dK and dV and stores its dS^T."""
    own, seen_from, real, scale_log2, sizes = invariants
    layout: gl.constexpr = accumulator(HALF)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    factor: gl.constexpr = gl.DotOperandLayout(0, accumulator(FIRST), 2)
    rest_factor: gl.constexpr = gl.DotOperandLayout(0, accumulator(REST), 2)
    slot = n % SLOTS
    q_tile, q_rest, do_tile = triple_in(shared.ring.slots, slot)
    q_tile = q_tile.slice(half * HALF, HALF)  # [HALF, FIRST]
    q_rest = q_rest.slice(half * HALF, HALF)  # [HALF, REST]
    do_tile = do_tile.slice(half * HALF, HALF)  # [HALF, D_V]
    k_tile, k_rest, v_tile = own  # [ROWS, FIRST], [ROWS, REST], [ROWS, D_V]
    unread = gl.zeros([ROWS, HALF], gl.float32, layout)  # [ROWS, HALF]
    s = start(k_tile, q_tile.permute((1, 0)), unread, False)  # [ROWS, HALF]
    s = start(k_rest, q_rest.permute((1, 0)), s)
    dp = start(v_tile, do_tile.permute((1, 0)), unread, False)  # [ROWS, HALF]
    lse_rows = read_rows(shared.statistics[0], slot, half, HALF)  # [HALF]
    s = warpgroup_mma_wait(1, [s])  # [ROWS, HALF], unscaled; dP is still running
    p = gl.exp2(s * scale_log2 - lse_rows[None, :])  # [ROWS, HALF]
    if MASKED:
        i = half * HALF + gl.arange(0, HALF, columns)  # [HALF]
        seen = (seen_from - row)[:, None] <= i[None, :]  # [ROWS, HALF]
        if sizes.left is not None:
            seen = seen & (i[None, :] <= (seen_from + sizes.left - row)[:, None])
        p = gl.where(seen, p, 0.0)  # [ROWS, HALF]
    if RAGGED:  # keys after the last one must not enter a sum over keys
        p = gl.where(real[:, None], p, 0.0)  # [ROWS, HALF]
    p_factor = gl.convert_layout(p.to(q_tile.dtype), factor)  # [ROWS, HALF]
    dv = start(p_factor, do_tile, dv)  # [ROWS, D_V]
    dp = warpgroup_mma_wait(1, [dp])  # [ROWS, HALF]; dV is still running
    delta_rows = read_rows(shared.statistics[1], slot, half, HALF)  # [HALF]
    ds = (p * (dp - delta_rows[None, :])).to(q_tile.dtype)  # [ROWS, HALF]
    if half == 0:  # both consumers have read the last block's
        mbarrier.wait(shared.ds_read, (n & 1) ^ 1)
    rows = shared.ds.slice(c * ROWS, ROWS)  # [ROWS, BLOCK_Q]
    rows.slice(half * HALF, HALF, dim=1).store(ds)
    dk = start(gl.convert_layout(ds, factor), q_tile, dk)  # [ROWS, FIRST], unscaled
    dk_rest = start(gl.convert_layout(ds, rest_factor), q_rest, dk_rest)
    return dk, dk_rest, dv


@gluon.jit
def add_queries(
    c: gl.constexpr, dk, dk_rest, dv, n, row, columns_of_k, invariants, shared,
    MASKED: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """One step of the loop over queries: block n, at row, adds to dK and dV and gives a
    part of dQ.
    """
    slot = n % SLOTS
    mbarrier.wait(shared.ring.ready.index(slot), n // SLOTS & 1)
    for half in gl.static_range(2):
        dk, dk_rest, dv = add_half(
            c, half, dk, dk_rest, dv, n, row, invariants, shared, MASKED, RAGGED
        )
    # Both consumers read what both have stored.
    fence_async_shared()
    meet(shared.ds_ready, n)
    ds_tile = shared.ds.permute((1, 0))  # [BLOCK_Q, BLOCK_K]
    unread = gl.zeros([BLOCK_Q, COLUMNS], gl.float32, accumulator(COLUMNS))
    unread_rest = gl.zeros([BLOCK_Q, SHARE], gl.float32, accumulator(SHARE))
    part = start(ds_tile, columns_of_k[0], unread, False)  # [BLOCK_Q, COLUMNS]
    dk, dk_rest, dv = warpgroup_mma_wait(1, [dk, dk_rest, dv])
    mbarrier.arrive(shared.ring.empty.index(slot))
    rest = start(ds_tile, columns_of_k[1], unread_rest, False)  # [BLOCK_Q, SHARE]
    part = warpgroup_mma_wait(1, [part])  # it is stored while the rest is computed
    mbarrier.wait(shared.parts.empty.index(0), (n & 1) ^ 1)
    shared.parts.slots.index(c).store(part)
    rest = warpgroup_mma_wait(0, [rest])
    mbarrier.arrive(shared.ds_read)
    shared.parts.slots.index(BLOCKS - 1).slice(c * SHARE, SHARE, dim=1).store(rest)
    fence_async_shared()
    mbarrier.arrive(shared.parts.ready.index(0))
    return dk, dk_rest, dv


@gluon.jit
def consume(
    c: gl.constexpr, outputs, scale, scale_log2, sizes, block, shared,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Compute rows c ROWS and following of a block of dK and dV, and store them."""
    k_all, rest_all, v_all = shared.own
    k_tile = k_all.slice(c * ROWS, ROWS)  # [ROWS, FIRST]
    k_rest = rest_all.slice(c * ROWS, ROWS)  # [ROWS, REST]
    v_tile = v_all.slice(c * ROWS, ROWS)  # [ROWS, D_V]
    columns_of_k = (
        k_all.slice(c * COLUMNS, COLUMNS, dim=1),  # [BLOCK_K, COLUMNS]
        rest_all.slice(c * SHARE, SHARE, dim=1),  # [BLOCK_K, SHARE]
    )
    rows: gl.constexpr = gl.SliceLayout(1, accumulator(HALF))
    j = block.col + c * ROWS + gl.arange(0, ROWS, rows)  # [ROWS]
    # The first query that sees a key, and whether the key exists.
    seen_from, real = j + sizes.T_q - sizes.T_k, j < sizes.T_k  # [ROWS] each
    dk = gl.zeros([ROWS, FIRST], gl.float32, accumulator(FIRST))  # [ROWS, FIRST]
    dk_rest = gl.zeros([ROWS, REST], gl.float32, accumulator(REST))  # [ROWS, REST]
    dv = gl.zeros([ROWS, FIRST], gl.float32, accumulator(FIRST))  # [ROWS, D_V]
    mbarrier.wait(shared.arrived, 0)
    own = k_tile, k_rest, v_tile
    invariants = own, seen_from, real, scale_log2, sizes
    # There are no registers for two loops: with a causal mask, every block is masked.
    steps = sizes.GROUP * block.blocks
    for n in range(steps):
        i = block_of(n, block, sizes.GROUP, BLOCK_Q)[1]
        dk, dk_rest, dv = add_queries(
            c, dk, dk_rest, dv, n, i, columns_of_k, invariants, shared, CAUSAL, RAGGED
        )
    sums, cols = (dk, dk_rest, dv), (0, FIRST, 0)
    store_keys(c, outputs, sums, cols, scale, steps, block, shared)


@gluon.jit
def add_parts(dq_sums, counters, sizes, block, shared):
    """Add what this program computes of dQ: each part in its turn or, where any order
    will do, once the first part is there, which is stored. As gluon_order.add_parts,
    but alone, with one slot, and for parts that are rows and columns of dQ.
    """
    slots, ready, empty = shared.parts
    steps = sizes.GROUP * block.blocks
    row_next, counter_next, turn_next = next_turn(
        0, counters, sizes, block, BLOCK_Q, BLOCK_K
    )
    done = gl.load(counter_next, volatile=True)
    for n in range(steps):
        row, counter, turn = row_next, counter_next, turn_next
        needed = gl.minimum(turn, sizes.awaited)
        while done < needed:
            done = gl.load(counter, volatile=True)
        mbarrier.wait(ready.index(0), n & 1)
        for x in gl.static_range(BLOCKS):
            add_or_store(dq_sums, (row, x * COLUMNS), slots.index(x), turn)
        # The next count is on its way while this part is.
        n_next = gl.minimum(n + 1, steps - 1)
        row_next, counter_next, turn_next = next_turn(
            n_next, counters, sizes, block, BLOCK_Q, BLOCK_K
        )
        done = gl.load(counter_next, volatile=True)
        tma.store_wait(0)
        mbarrier.arrive(empty.index(0))
        if turn < sizes.awaited:
            count_part(counter)


@gluon.jit(do_not_specialize=BackwardSizes._fields)
def expanded_keys_kernel(
    q, q_rest, k, k_rest, v, do, lse2, delta, dk, dk_rest, dv, dq_sums, counters,
    scale, scale_log2,
    H_kv, GROUP, PADDED, T_q, T_k, left, B, section, mixed, paired, awaited,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program writes one block of rows of dK and of dV, from all queries of the
    group that see them, and adds its parts of their dQ, each in its turn.

    q to dv are descriptors, of tiles of FIRST columns and of the rest. dq_sums is the
    descriptor of the sums of dQ, with tiles [BLOCK_Q, COLUMNS]. counters are as in
    hopper_backward.keys_kernel. H_kv to awaited are the first fields of BackwardSizes.
    The others are of masks, which this kernel does not take, and of ALiBi.
    """
    sizes = BackwardSizes(
        H_kv, GROUP, PADDED, T_q, T_k, left, B, section, mixed, paired, awaited
    )
    programs = gl.cdiv(sizes.T_k, BLOCK_K)
    number, head, falling, upward = take_ticket(counters, programs, sizes, CAUSAL)
    # Of the bounds, consume needs only row and blocks: with a causal mask it masks
    # every block.
    block = keys_by_formula(
        number, head, falling, upward, sizes, BLOCK_Q, BLOCK_K, CAUSAL
    )

    k_first = make_slots(k.dtype, 1, BLOCK_K, FIRST).index(0)
    v_tile = make_slots(v.dtype, 1, BLOCK_K, FIRST).index(0)
    shape: gl.constexpr = [BLOCK_K, REST]
    k_second = gl.allocate_shared_memory(k.dtype, shape, split_layout(SHARE))
    slots = (
        make_slots(q.dtype, SLOTS, BLOCK_Q, FIRST),
        make_slots(q.dtype, SLOTS, BLOCK_Q, REST),
        make_slots(do.dtype, SLOTS, BLOCK_Q, FIRST),
    )
    ring = Ring(slots, make_barriers(SLOTS, 1), make_barriers(SLOTS, CONSUMERS))
    statistics = make_rows(lse2, SLOTS), make_rows(delta, SLOTS)
    ds = gl.allocate_shared_memory(k.dtype, [BLOCK_K, BLOCK_Q], split_layout(HALF))
    ds_ready = make_barriers(1, CONSUMERS).index(0)
    ds_read = make_barriers(1, CONSUMERS).index(0)
    tiles = make_slots(gl.float32, BLOCKS, BLOCK_Q, COLUMNS)
    parts = Ring(tiles, make_barriers(1, CONSUMERS), make_barriers(1, 1))
    arrived = make_barriers(1, 1).index(0)
    own = k_first, k_second, v_tile
    shared = ExpandedShared(
        own, arrived, ring, statistics, ds, ds_ready, ds_read, parts
    )
    outputs, keys, queries = (dk, dk_rest, dv), (k, k_rest, v), (q, q_rest, do)
    gl.warp_specialize([
        (consume, (0, outputs, scale, scale_log2, sizes, block, shared,
                   CAUSAL, RAGGED)),
        (consume, (1, outputs, scale, scale_log2, sizes, block, shared,
                   CAUSAL, RAGGED)),
        (produce, (keys, queries, lse2, delta, sizes, block, shared)),
        (add_parts, (dq_sums, counters, sizes, block, shared)),
    ], [4, 1, 1], [
        CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS,
    ])  # fmt: skip


def rest_descriptor(x, rows):
    """A descriptor of the rest of K or dK, ``[B, H, T, d]``, whose tiles are also read
    in parts of SHARE columns.
    """
    plain = gluon_descriptor(x, rows, REST.value)
    return dataclasses.replace(plain, layout=split_layout(SHARE.value, 4))


@plans.planned
def launch_keys(
    q, k, v, do, delta, lse2, dk, dv, score_mod, dq_sums, counters, deterministic=True
):  # fmt: skip
    """Launch the kernel that fills dk and dv. It also fills dq_sums ``[B H PADDED,
    192]``, float32, with dQ, unscaled, in rows and columns, but not blocks of queries
    that see no key. The other arguments are as in ``hopper_backward.launch_keys``.
    """
    B, H, T_q, d = q.shape
    H_kv, T_k = k.shape[1:3]
    scale, causal, left = score_mod.scale, score_mod.causal, score_mod.window
    section, mixed, paired = choose_order(q, k, BLOCK, causal, left)
    shape = [BLOCK_Q.value, COLUMNS.value]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.float32)
    dq_sums = TensorDescriptor(dq_sums, [dq_sums.shape[0], d], [d, 1], shape, layout)
    rows, first = BLOCK_Q.value, FIRST.value
    plans.launch(
        expanded_keys_kernel, q, B * H_kv * triton.cdiv(T_k, BLOCK),
        gluon_descriptor(q, rows, first), gluon_descriptor(q, rows, REST.value),
        gluon_descriptor(k, BLOCK, first), rest_descriptor(k, BLOCK),
        gluon_descriptor(v, BLOCK), gluon_descriptor(do, rows),
        row_descriptor(lse2, rows), row_descriptor(delta, rows),
        gluon_descriptor(dk, ROWS.value, first), rest_descriptor(dk, ROWS.value),
        gluon_descriptor(dv, ROWS.value), dq_sums, counters,
        scale, scale * LOG2_E.value,
        H_kv, H // H_kv, delta.shape[2], T_q, T_k, left, B, section, mixed, paired,
        EVERY_PART if deterministic else 1,
        CAUSAL=causal, RAGGED=T_k % BLOCK != 0, **WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "T", "PADDED"])
def expanded_finish_kernel(
    dq_sums, dq, scale, first_row, H, T, PADDED,
    TILE_ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """One program scales and rounds a block of dQ; rows before first_row see no key."""
    blocks = tl.cdiv(T, TILE_ROWS)
    row, head = tl.program_id(0) % blocks * TILE_ROWS, tl.program_id(0) // blocks
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    i = (row + tl.arange(0, TILE_ROWS)).to(tl.int64)[:, None]  # [TILE_ROWS, 1]
    k = tl.arange(0, BLOCK_D)[None, :]
    dq_sums += (head.to(tl.int64) * PADDED + i) * D + k  # [TILE_ROWS, D]
    tile = tl.load(dq_sums, mask=(i >= first_row) & (k < D), other=0.0) * scale
    at = b * dq.strides[0] + h * dq.strides[1] + i * dq.strides[2] + k * dq.strides[3]
    tile = tile.to(dq.ptr.dtype.element_ty)
    tl.store(dq.ptr + at, tile, mask=(i < T) & (k < D))


@plans.planned
def launch_finish(dq_sums, dq, score_mod, padded, T_k):
    """Launch the kernel that fills dq from what launch_keys summed."""
    B, H, T_q, d = dq.shape
    first_row = max(T_q - T_k, 0) if score_mod.causal else 0
    plans.launch(
        expanded_finish_kernel, dq, B * H * triton.cdiv(T_q, ROWS.value),
        dq_sums, Rows(dq, dq.stride()), score_mod.scale, first_row, H, T_q, padded,
        ROWS.value, d, triton.next_power_of_2(d),
    )  # fmt: skip


@plans.planned
def backward(q, k, v, o, lse, do, dlse, score_mod, deterministic=True):
    """``(dq, dk, dv)``, as :func:`flashlib.kernels.hopper_backward.backward`, for d =
    192 and d_v = 128.
    """
    if q.numel() == 0 or k.numel() == 0:
        return tuple(x.zero_() for x in new_like(q, k, v))
    dq_sums, counters = allocate_sums(q, lse)
    do, delta, lse2 = prepare_rows(q, o, lse, do, dlse, counters)
    dq, dk, dv = new_like(q, k, v)
    launch_keys(
        q, k, v, do, delta, lse2, dk, dv, score_mod, dq_sums, counters, deterministic
    )
    launch_finish(dq_sums, dq, score_mod, delta.shape[2], k.shape[2])
    return dq, dk, dv
