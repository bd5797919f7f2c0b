"""The backward pass of wide heads (d = 256) for Hopper (sm_90), in Gluon.

Chapter *Hopper*, its depth; the sums are those of hopper_backward.py. Here dQ has a
kernel of its own, so two kernels compute seven products instead of five. Both have the
division of labor of hopper.py: one producer, a warp that only starts copies (TMA) into
a ring of slots, and two consumers, groups of four warps. Every sum has one order, so
two runs agree in every bit.

keys_kernel computes dK and dV. At d = 256 the registers of a warp group hold no row of
both in full. Both consumers therefore own the same ROWS keys, and each computes its
share, one half, of everything else: of S^T and dP^T the columns of SHARE queries, of dK
and dV COLUMNS columns. The scores are transposed, with keys in rows, so a consumer's
own shares of P^T and dS^T enter its products as first factors, straight from registers.
It also hands them to the other consumer, through shared memory. While it multiplies its
own share, the other one's arrives.

The barriers of keys_kernel, for a program that takes N blocks of queries:

=========== ========================== =================================================
barrier     a phase ends with          who waits for it
=========== ========================== =================================================
arrived     the copy of K and V        both consumers, before the first step
ring.ready  the copy of block n        both consumers, for step n; SLOTS of these
ring.empty  both consumers have read   the producer, before it copies block n + SLOTS
            block n                    into the same slot
p_ready     both consumers have        both consumers, before they read each other's
            stored P^T of block n      shares
ds_ready    both consumers have        the same
            stored dS^T of block n
=========== ========================== =================================================

Two slots for P^T, and two for dS^T, are enough: a consumer that has waited for phase
n - 1 of p_ready knows that the other one has finished step n - 2. Phase N of p_ready,
which belongs to no block, ends when both consumers are done with K and V, since they
store dK and dV in their place. Phase N of ds_ready ends when both have stored them.

queries_kernel computes dQ. Each consumer owns ROWS queries, and its dS is the first
factor of their dQ. The barriers are arrived, for Q and dO, and those of the ring, whose
blocks are keys.
"""

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlib import plans
from flashlib.kernels import score_gradients
from flashlib.kernels.descriptors import gluon_descriptor, row_descriptor
from flashlib.kernels.gluon_backward import (
    BLOCK,
    CONSUMERS,
    PAD,
    WARPS,
    copy_block,
    copy_pair,
    make_pair,
    make_rows,
    meet,
    pair_in,
    prepare_rows,
    read_rows,
    split_layout,
)
from flashlib.kernels.gluon_keys import block_of, keys_by_formula
from flashlib.kernels.gluon_tiles import ROWS, Ring, accumulator, make_barriers
from flashlib.kernels.tiles import LOG2_E
from flashlib.plans import new_like

# Rows of a slot, and slots: of keys_kernel and of queries_kernel.
KEYS, QUERIES = (64, 2), (32, 2)

# -- dK and dV


class KeySizes(NamedTuple):
    """What keys_kernel is told about the problem."""

    H_kv: int
    GROUP: int
    T_q: int
    T_k: int
    left: int | None  # keys before its own that a query sees, if limited


class KeysShared(NamedTuple):
    """The shared memory of a program of keys_kernel."""

    own: tuple  # the tiles [ROWS, D] of K and V
    arrived: gl.shared_memory_descriptor  # their barrier
    ring: Ring  # slots for a tile of Q and one of dO
    statistics: tuple  # slots for lse2 and delta of the same rows
    ds: gl.shared_memory_descriptor  # two slots for dS^T [ROWS, BLOCK_Q]
    ds_ready: gl.shared_memory_descriptor  # the barrier where both shares are there
    p: gl.shared_memory_descriptor  # the same for P^T
    p_ready: gl.shared_memory_descriptor


@gluon.jit
def make_shared_tiles(dtype: gl.constexpr, columns: gl.constexpr):
    """Two slots for tiles [ROWS, columns], of which each consumer writes its share."""
    layout: gl.constexpr = split_layout(columns // CONSUMERS)
    return gl.allocate_shared_memory(dtype, [2, ROWS, columns], layout)


@gluon.jit
def produce_queries(q, k, v, do, lse2, delta, sizes, block, shared):
    """Copy a block of K and V once, then all queries that see it."""
    BLOCK_Q: gl.constexpr = q.block_type.shape[2]
    b, ring, GROUP, H = block.b, shared.ring, sizes.GROUP, sizes.H_kv * sizes.GROUP
    SLOTS: gl.constexpr = ring.slots[0].shape[0]
    mbarrier.expect(shared.arrived, 2 * k.block_type.nbytes)
    copy_pair((k, v), (b, block.h, block.col, 0), shared.arrived, shared.own)
    for n in range(GROUP * block.blocks):
        g, i = block_of(n, block, GROUP, BLOCK_Q)
        h, slot = block.h * GROUP + g, n % SLOTS
        mbarrier.wait(ring.empty.index(slot), (n // SLOTS & 1) ^ 1)
        copy_block((q, do, lse2, delta), b, h, i, H, slot, shared)


@gluon.jit
def hand_over(share, tile, c: gl.constexpr, ready):
    """Store a share [ROWS, SHARE], that of consumer c, in its columns of a tile, and
    tell the other consumer.
    """
    SHARE: gl.constexpr = share.shape[1]
    tile.slice(c * SHARE, SHARE, dim=1).store(share)
    fence_async_shared()
    mbarrier.arrive(ready)


@gluon.jit
def add_product(c: gl.constexpr, acc, share, tile, rows, ready, phase):
    """Start acc += tile rows, where consumer c's share of the columns of the tile
    [ROWS, BLOCK_Q] is in registers, and the other one is awaited; rows [BLOCK_Q,
    COLUMNS].
    """
    SHARE: gl.constexpr = tile.shape[1] // CONSUMERS
    OTHER: gl.constexpr = 1 - c
    factor: gl.constexpr = gl.DotOperandLayout(0, accumulator(rows.shape[1]), 2)
    own = gl.convert_layout(share, factor)  # [ROWS, SHARE]
    own_rows = rows.slice(c * SHARE, SHARE)  # [SHARE, COLUMNS]
    acc = warpgroup_mma(own, own_rows, acc, is_async=True)
    mbarrier.wait(ready, phase)
    other = tile.slice(OTHER * SHARE, SHARE, dim=1)  # [ROWS, SHARE]
    other_rows = rows.slice(OTHER * SHARE, SHARE)  # [SHARE, COLUMNS]
    return warpgroup_mma(other, other_rows, acc, is_async=True)


@gluon.jit
def add_queries(c: gl.constexpr, dk, dv, n, row, invariants, MASKED: gl.constexpr):
    """One step of the loop over queries: block n, at row, adds to dK and dV."""
    seen_from, scale_log2, sizes, shared = invariants
    q_slots = shared.ring.slots[0]
    SLOTS: gl.constexpr = q_slots.shape[0]
    SHARE: gl.constexpr = q_slots.shape[1] // CONSUMERS
    COLUMNS: gl.constexpr = q_slots.shape[2] // CONSUMERS
    layout: gl.constexpr = accumulator(SHARE)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    slot = n % SLOTS
    q_tile, do_tile = pair_in(shared.ring.slots, slot)  # [BLOCK_Q, D] each
    # -- scores of this consumer's share of the queries
    mbarrier.wait(shared.ring.ready.index(slot), n // SLOTS & 1)
    unread = gl.zeros([ROWS, SHARE], gl.float32, layout)  # [ROWS, SHARE]
    q_share = q_tile.slice(c * SHARE, SHARE).permute((1, 0))  # [D, SHARE]
    do_share = do_tile.slice(c * SHARE, SHARE).permute((1, 0))  # [D, SHARE]
    k_tile, v_tile = shared.own  # [ROWS, D] each
    s = warpgroup_mma(
        k_tile, q_share, unread, use_acc=False, is_async=True
    )  # [ROWS, SHARE]
    dp = warpgroup_mma(
        v_tile, do_share, unread, use_acc=False, is_async=True
    )  # [ROWS, SHARE]
    s = warpgroup_mma_wait(1, [s])  # [ROWS, SHARE], unscaled; dP is still running
    lse_rows = read_rows(shared.statistics[0], slot, c, SHARE)  # [SHARE]
    p = gl.exp2(s * scale_log2 - lse_rows[None, :])  # [ROWS, SHARE]
    if MASKED:
        i = c * SHARE + gl.arange(0, SHARE, columns)  # [SHARE]
        seen = (seen_from - row)[:, None] <= i[None, :]  # [ROWS, SHARE]
        if sizes.left is not None:
            seen = seen & (i[None, :] <= (seen_from + sizes.left - row)[:, None])
        p = gl.where(seen, p, 0.0)  # [ROWS, SHARE]
    # -- this consumer's columns of dV, of all queries
    p_share = p.to(q_tile.dtype)  # [ROWS, SHARE]
    p_tile = shared.p.index(n % 2)  # [ROWS, BLOCK_Q]
    hand_over(p_share, p_tile, c, shared.p_ready)
    do_columns = do_tile.slice(c * COLUMNS, COLUMNS, dim=1)  # [BLOCK_Q, COLUMNS]
    dv = add_product(c, dv, p_share, p_tile, do_columns, shared.p_ready, n & 1)
    # -- and of dK
    dp = warpgroup_mma_wait(2, [dp])  # [ROWS, SHARE]; dV is still running
    delta_rows = read_rows(shared.statistics[1], slot, c, SHARE)  # [SHARE]
    ds_share = (p * (dp - delta_rows[None, :])).to(q_tile.dtype)  # [ROWS, SHARE]
    ds_tile = shared.ds.index(n % 2)  # [ROWS, BLOCK_Q]
    hand_over(ds_share, ds_tile, c, shared.ds_ready)
    q_columns = q_tile.slice(c * COLUMNS, COLUMNS, dim=1)  # [BLOCK_Q, COLUMNS]
    dk = add_product(c, dk, ds_share, ds_tile, q_columns, shared.ds_ready, n & 1)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    mbarrier.arrive(shared.ring.empty.index(slot))
    return dk, dv


@gluon.jit
def consume_queries(
    c: gl.constexpr, dk_out, dv_out, scale, scale_log2, sizes, block, shared,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute this consumer's columns of a block of dK and dV; consumer 0 stores dK,
    the other one dV.
    """
    BLOCK_Q: gl.constexpr = shared.ring.slots[0].shape[1]
    COLUMNS: gl.constexpr = shared.own[0].shape[1] // CONSUMERS
    s_layout: gl.constexpr = accumulator(BLOCK_Q // CONSUMERS)
    layout: gl.constexpr = accumulator(COLUMNS)
    b, h_kv, col = block.b, block.h, block.col
    GROUP, T_q, T_k = sizes.GROUP, sizes.T_q, sizes.T_k
    steps, full = GROUP * block.blocks, GROUP * block.full
    if sizes.left is not None:
        full = 0  # a window has a second band, at its end, so all blocks are masked
    j = col + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))  # [ROWS]
    seen_from = j + T_q - T_k  # [ROWS], the first query that sees a key
    dk = gl.zeros([ROWS, COLUMNS], gl.float32, layout)  # [ROWS, COLUMNS]
    dv = gl.zeros([ROWS, COLUMNS], gl.float32, layout)  # [ROWS, COLUMNS]
    mbarrier.wait(shared.arrived, 0)
    invariants = (seen_from, scale_log2, sizes, shared)
    for n in range(full):
        i = block_of(n, block, GROUP, BLOCK_Q)[1]
        dk, dv = add_queries(c, dk, dv, n, i, invariants, False)
    if CAUSAL:
        for n in range(full, steps):
            i = block_of(n, block, GROUP, BLOCK_Q)[1]
            dk, dv = add_queries(c, dk, dv, n, i, invariants, True)
    # The other consumer may still read K and V, which the results replace.
    meet(shared.p_ready, steps)
    k_tile, v_tile = shared.own  # [ROWS, D] each
    k_columns = k_tile.slice(c * COLUMNS, COLUMNS, dim=1)  # [ROWS, COLUMNS]
    v_columns = v_tile.slice(c * COLUMNS, COLUMNS, dim=1)  # [ROWS, COLUMNS]
    k_columns.store((dk * scale).to(k_tile.dtype))
    v_columns.store(dv.to(v_tile.dtype))
    fence_async_shared()
    meet(shared.ds_ready, steps)
    if c == 0:
        tma.async_copy_shared_to_global(dk_out, [b, h_kv, col, 0], k_tile)
    else:
        tma.async_copy_shared_to_global(dv_out, [b, h_kv, col, 0], v_tile)
    tma.store_wait(0)


# Triton would compile further versions for multiples of 16 and for 1 if the sizes came
# in a tuple, so both kernels take them one by one.
@gluon.jit(do_not_specialize=KeySizes._fields)
def keys_kernel(
    q, k, v, do, lse2, delta, dk, dv, scale, scale_log2,
    H_kv, GROUP, T_q, T_k, left,
    CAUSAL: gl.constexpr, SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program writes one block of rows of dK and of dV, from all queries of the
    group that see them. q to dv are descriptors, H_kv to left the fields of KeySizes.
    """
    sizes = KeySizes(H_kv, GROUP, T_q, T_k, left)
    BLOCK_Q: gl.constexpr = q.block_type.shape[2]
    programs = gl.cdiv(T_k, ROWS)
    # With a causal mask most queries see the first keys: the longest programs start
    # first.
    number, head = gl.program_id(0) % programs, gl.program_id(0) // programs
    block = keys_by_formula(number, head, 0, 0, sizes, BLOCK_Q, ROWS, CAUSAL)

    own = pair_in(make_pair(k, v, 1), 0)
    slots = make_pair(q, do, SLOTS)
    statistics = make_rows(lse2, SLOTS), make_rows(delta, SLOTS)
    p = make_shared_tiles(k.dtype, BLOCK_Q)
    ds = make_shared_tiles(k.dtype, BLOCK_Q)
    arrived = make_barriers(1, 1).index(0)
    ring = Ring(slots, make_barriers(SLOTS, 1), make_barriers(SLOTS, CONSUMERS))
    ds_ready = make_barriers(1, CONSUMERS).index(0)
    p_ready = make_barriers(1, CONSUMERS).index(0)
    shared = KeysShared(own, arrived, ring, statistics, ds, ds_ready, p, p_ready)
    gl.warp_specialize([
        (consume_queries, (0, dk, dv, scale, scale_log2, sizes, block, shared, CAUSAL)),
        (consume_queries, (1, dk, dv, scale, scale_log2, sizes, block, shared, CAUSAL)),
        (produce_queries, (q, k, v, do, lse2, delta, sizes, block, shared)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# -- dQ


class QuerySizes(NamedTuple):
    """What queries_kernel is told about the problem."""

    H: int
    GROUP: int
    PADDED: int  # the length of delta and lse2
    T_q: int
    T_k: int
    left: int | None  # keys before its own that a query sees, if limited


class QueriesShared(NamedTuple):
    """The shared memory of a program of queries_kernel."""

    own: tuple  # the tiles [BLOCK, D] of Q and dO
    arrived: gl.shared_memory_descriptor  # their barrier
    ring: Ring  # slots for a tile of K and one of V


@gluon.jit
def produce_keys(q, k, v, do, b, h, h_kv, row, first_block, blocks, shared):
    """Copy a block of Q and dO once, then all keys and values that it sees."""
    ring = shared.ring
    SLOTS: gl.constexpr = ring.slots[0].shape[0]
    mbarrier.expect(shared.arrived, 2 * q.block_type.nbytes)
    copy_pair((q, do), (b, h, row, 0), shared.arrived, shared.own)
    for n in range(blocks - first_block):
        slot, col = n % SLOTS, (first_block + n) * k.block_type.shape[2]
        mbarrier.wait(ring.empty.index(slot), (n // SLOTS & 1) ^ 1)
        ready = ring.ready.index(slot)
        mbarrier.expect(ready, 2 * k.block_type.nbytes)
        copy_pair((k, v), (b, h_kv, col, 0), ready, pair_in(ring.slots, slot))


@gluon.jit
def start_pair(own, slots, slot):
    """Start S = Q K^T and dP = dO V^T, [ROWS, COLUMNS] each, where own are the tiles of
    Q and dO, and K and V are in a slot.
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
def add_keys(
    dq, n, i, invariants, sizes, ring, CAUSAL: gl.constexpr, MASKED: gl.constexpr
):
    """One step of the inner loop over keys: block first_block + n adds to dQ."""
    lse_rows, delta_rows, own, first_block, scale_log2 = invariants
    SLOTS: gl.constexpr = ring.slots[0].shape[0]
    BLOCK_K: gl.constexpr = ring.slots[0].shape[1]
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(BLOCK_K))
    factor: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    slot = n % SLOTS
    k_tile = ring.slots[0].index(slot)  # [BLOCK_K, D]
    mbarrier.wait(ring.ready.index(slot), n // SLOTS & 1)
    s, dp = start_pair(own, ring.slots, slot)  # [ROWS, BLOCK_K] each
    s = warpgroup_mma_wait(1, [s])  # [ROWS, BLOCK_K], unscaled; dP is still running
    p = gl.exp2(s * scale_log2 - lse_rows[:, None])  # [ROWS, BLOCK_K]
    if MASKED:
        T_q, T_k = sizes.T_q, sizes.T_k
        j = (first_block + n) * BLOCK_K + gl.arange(0, BLOCK_K, columns)  # [BLOCK_K]
        seen = (j < T_k)[None, :]  # [1, BLOCK_K]
        if CAUSAL:
            seen = seen & (j[None, :] <= i[:, None] + (T_k - T_q))  # [ROWS, BLOCK_K]
        if sizes.left is not None:
            seen = seen & (j[None, :] >= i[:, None] + (T_k - T_q - sizes.left))
        p = gl.where(seen, p, 0.0)  # [ROWS, BLOCK_K]
    dp = warpgroup_mma_wait(0, [dp])  # [ROWS, BLOCK_K]
    ds = (p * (dp - delta_rows[:, None])).to(k_tile.dtype)  # [ROWS, BLOCK_K]
    ds_factor = gl.convert_layout(ds, factor)  # [ROWS, BLOCK_K]
    dq = warpgroup_mma(ds_factor, k_tile, dq, is_async=True)  # [ROWS, D], unscaled
    dq = warpgroup_mma_wait(0, [dq])
    mbarrier.arrive(ring.empty.index(slot))
    return dq


@gluon.jit
def consume_keys(
    c: gl.constexpr, dq_out, lse2, delta, b, h, row, first_block, full_end, blocks,
    scale, scale_log2, sizes, shared, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Compute rows c ROWS and following of a block of dQ, and store them."""
    ring = shared.ring
    s_layout: gl.constexpr = accumulator(ring.slots[0].shape[1])
    D: gl.constexpr = ring.slots[0].shape[2]
    q_tile = shared.own[0].slice(c * ROWS, ROWS)  # [ROWS, D]
    do_tile = shared.own[1].slice(c * ROWS, ROWS)  # [ROWS, D]
    i = row + c * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))  # [ROWS]
    # Rows after the last query are in the padding.
    offsets = (b * sizes.H + h).to(gl.int64) * sizes.PADDED + i  # [ROWS]
    lse_rows, delta_rows = gl.load(lse2 + offsets), gl.load(delta + offsets)
    dq = gl.zeros([ROWS, D], gl.float32, accumulator(D))  # [ROWS, D]
    mbarrier.wait(shared.arrived, 0)
    invariants = (lse_rows, delta_rows, (q_tile, do_tile), first_block, scale_log2)
    full_end -= first_block
    for n in range(full_end):
        dq = add_keys(dq, n, i, invariants, sizes, ring, CAUSAL, False)
    if CAUSAL or RAGGED:
        for n in range(full_end, blocks - first_block):
            dq = add_keys(dq, n, i, invariants, sizes, ring, CAUSAL, True)
    # The result replaces these rows of Q.
    q_tile.store((dq * scale).to(q_tile.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_out, [b, h, row + c * ROWS, 0], q_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=QuerySizes._fields)
def queries_kernel(
    q, k, v, do, lse2, delta, dq, scale, scale_log2,
    H, GROUP, PADDED, T_q, T_k, left,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program writes one block of rows of dQ, from all keys that these rows see. H
    to left are the fields of QuerySizes.
    """
    sizes = QuerySizes(H, GROUP, PADDED, T_q, T_k, left)
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    BLOCK_K: gl.constexpr = k.block_type.shape[2]
    programs = gl.cdiv(T_q, BLOCK_Q)
    # With a causal mask the last queries see the most keys: the longest start first.
    row = (programs - 1 - gl.program_id(0) % programs) * BLOCK_Q
    head = gl.program_id(0) // programs
    b, h = head // sizes.H, head % sizes.H
    # Every query of this block sees the first `full_end` blocks of keys, and none sees
    # those from `blocks` on.
    full_end, blocks = T_k // BLOCK_K, gl.cdiv(T_k, BLOCK_K)
    if CAUSAL:
        full_end = gl.minimum(full_end, gl.maximum(row + 1 + T_k - T_q, 0) // BLOCK_K)
        visible_end = gl.maximum(row + BLOCK_Q + T_k - T_q, 0)
        blocks = gl.minimum(blocks, gl.cdiv(visible_end, BLOCK_K))
    first_block = 0
    if sizes.left is not None:  # masked from the first block on: few need no mask
        first_block = gl.maximum(row + T_k - T_q - sizes.left, 0) // BLOCK_K
        full_end = first_block

    own = pair_in(make_pair(q, do, 1), 0)
    slots = make_pair(k, v, SLOTS)
    arrived = make_barriers(1, 1).index(0)
    ring = Ring(slots, make_barriers(SLOTS, 1), make_barriers(SLOTS, CONSUMERS))
    shared = QueriesShared(own, arrived, ring)
    gl.warp_specialize([
        (consume_keys, (0, dq, lse2, delta, b, h, row, first_block, full_end,
                        blocks, scale, scale_log2, sizes, shared, CAUSAL, RAGGED)),
        (consume_keys, (1, dq, lse2, delta, b, h, row, first_block, full_end,
                        blocks, scale, scale_log2, sizes, shared, CAUSAL, RAGGED)),
        (produce_keys, (q, k, v, do, b, h, h // sizes.GROUP, row, first_block,
                        blocks, shared)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@plans.planned
def launch_keys(q, k, v, do, delta, lse2, dk, dv, score_mod, tile):
    """Launch the kernel that fills dk and dv.

    q and do ``[B, H, T_q, 256]``, k, v, dk and dv ``[B, H_kv, T_k, 256]``, all
    describable; delta and lse2, float32 ``[B, H, PADDED]``, from prepare_rows. tile is
    KEYS or another like it.
    """
    (B, H, T_q, _), (H_kv, T_k) = q.shape, k.shape[1:3]
    BLOCK_Q, SLOTS = tile
    plans.launch(
        keys_kernel, q, B * H_kv * triton.cdiv(T_k, ROWS.value),
        gluon_descriptor(q, BLOCK_Q), gluon_descriptor(k, ROWS.value),
        gluon_descriptor(v, ROWS.value), gluon_descriptor(do, BLOCK_Q),
        row_descriptor(lse2, BLOCK_Q), row_descriptor(delta, BLOCK_Q),
        gluon_descriptor(dk, ROWS.value), gluon_descriptor(dv, ROWS.value),
        score_mod.scale, score_mod.scale * LOG2_E.value,
        *KeySizes(H_kv, H // H_kv, T_q, T_k, score_mod.window),
        CAUSAL=score_mod.causal, SLOTS=SLOTS, **WARPS,
    )  # fmt: skip


@plans.planned
def launch_queries(q, k, v, do, delta, lse2, dq, score_mod, tile):
    """Launch the kernel that fills dq; tile is QUERIES or another like it, and the rest
    as in launch_keys.
    """
    B, H, T_q, _ = q.shape
    H_kv, T_k = k.shape[1:3]
    BLOCK_K, SLOTS = tile
    plans.launch(
        queries_kernel, q, B * H * triton.cdiv(T_q, BLOCK),
        gluon_descriptor(q, BLOCK), gluon_descriptor(k, BLOCK_K),
        gluon_descriptor(v, BLOCK_K), gluon_descriptor(do, BLOCK),
        lse2, delta, gluon_descriptor(dq, ROWS.value),
        score_mod.scale, score_mod.scale * LOG2_E.value,
        *QuerySizes(H, H // H_kv, delta.shape[2], T_q, T_k, score_mod.window),
        CAUSAL=score_mod.causal, RAGGED=T_k % BLOCK_K != 0, SLOTS=SLOTS, **WARPS,
    )  # fmt: skip


@plans.planned
def backward(q, k, v, o, lse, do, dlse, score_mod):
    """``(dq, dk, dv)``, as :func:`flashlib.kernels.hopper_backward.backward`, for d =
    256; with sinks also dsinks.
    """
    if q.numel() == 0 or k.numel() == 0:
        return tuple(x.zero_() for x in new_like(q, k, v))
    do, delta, lse2 = prepare_rows(q, o, lse, do, dlse)
    dq, dk, dv = new_like(q, k, v)
    inputs = q, k, v, do, delta, lse2
    launch_keys(*inputs, dk, dv, score_mod, KEYS)
    launch_queries(*inputs, dq, score_mod, QUERIES)
    return score_gradients.with_sinks((dq, dk, dv), q, delta, lse2, score_mod, PAD)
