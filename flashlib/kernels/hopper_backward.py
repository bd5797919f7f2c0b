"""The backward pass for Hopper (sm_90) in Gluon, Triton's dialect for such kernels:
copies and products run asynchronously.

Chapter *Hopper*; the sums are those of the chapter *The backward pass*. From L and
D = rowsum(dO o O) follow P = exp(S - L), dV = P^T dO, dP = dO V^T,
dS = P o (dP - D), dQ = scale dS K and dK = scale dS^T Q. The division of labor is that
of hopper.py: one producer, a warp that only starts copies (TMA) into a ring of slots,
and two consumers, groups of four warps, that own 64 rows of the result each (of dK and
dV at d = 256 half of the columns: gluon_wide.py). The fused form has two more warps,
the adders.

There are two forms. Split, at d = 256: one kernel computes dK and dV, another dQ.
Fused: the first kernel also computes dQ, part by part, which saves two products of
seven (gluon_fused.py), and the copy engine adds the parts in memory (gluon_order.py).
Every sum has one order, so two runs agree in every bit, unless dQ may be added up in
any order. Which blocks of queries a program takes follows from the lengths, a causal
mask and a window or, for a mask that is a function, is in a list (gluon_keys.py).

The scores of keys_kernel are transposed, with keys in rows. So dK and dV there, and dQ
in queries_kernel, take the P and dS that a consumer has computed as first factors,
straight from registers. What comes from both consumers is read from shared memory: dS
for a part of dQ, and at d = 256 the other consumer's share of P and of dS.

The barriers of keys_kernel, for a program that takes N blocks of queries:

=========== ========================== =================================================
barrier     a phase ends with          who waits for it
=========== ========================== =================================================
arrived     the copy of K and V        both consumers, before the first step
ring.ready  the copy of block n        both consumers, for step n; SLOTS of these
ring.empty  both consumers have read   the producer, before it copies block n + SLOTS
            block n
ds_ready    both consumers have        both consumers, before they read it
            stored dS^T of block n
p_ready     the same for P, d = 256    both consumers
parts.ready both consumers have        one adder, before it adds the part; PART_SLOTS of
            stored a part of dQ        these. With a bias that is copied the producer,
                                       too: gluon_bias.py
bias_ready  the copy of the bias of    both consumers, before they subtract it from L;
            block n                    two of these, if it is copied
parts.empty the part has left shared   both consumers, before they store another one in
            memory                     its slot
=========== ========================== =================================================

Phase N of ds_ready, which belongs to no block, ends when both consumers are done with K
and V, since they store dK and dV in their place. At d = 256, phase N of p_ready does,
and that of ds_ready ends when all columns of dK and dV are stored. At d = 64 a consumer
also waits for phase n - 1 of ds_ready before it overwrites dS^T of block n - 2. For n =
0 that passes at once: there is no phase -1.
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
from flashlib.kernels import score_arguments, score_gradients
from flashlib.kernels.descriptors import gluon_descriptor, row_descriptor
from flashlib.kernels.gluon_backward import (
    BLOCK,
    CONSUMERS,
    EVERY_PART,
    PAD,
    WARPS,
    BackwardShared,
    BackwardSizes,
    copy_pair,
    copy_queries,
    make_pair,
    make_rows,
    pair_in,
    prepare_backward,
    start_pair,
    store_keys,
)
from flashlib.kernels.gluon_bias import (
    bias_descriptor,
    less_bias,
    less_copied_bias,
)
from flashlib.kernels.gluon_fused import (
    FUSED,
    add_half,
    give_last_part,
    own_factors,
    start_first_scores,
    start_half,
)
from flashlib.kernels.gluon_keys import (
    block_of,
    count_steps,
    entry_at,
    head_in,
    keys_by_formula,
    keys_by_list,
    make_notes,
    queries_of,
    row_in,
    with_lists,
    without_hidden,
)
from flashlib.kernels.gluon_order import (
    add_parts,
    choose_order,
    launch_finish,
    lines_descriptor,
    make_parts,
    take_ticket,
)
from flashlib.kernels.gluon_scores import (
    change_transposed,
    gluon_change,
)
from flashlib.kernels.gluon_tiles import (
    ROWS,
    Ring,
    accumulator,
    make_barriers,
    make_slots,
)
from flashlib.kernels.gluon_wide import consume_wide, make_shared_tiles
from flashlib.kernels.tiles import LOG2_E
from flashlib.plans import new_like


@gluon.jit
def produce_queries(q, k, v, do, lse2, delta, bias, sizes, block, shared):
    """Copy a block of K and V once, then all queries that see it, with their bias."""
    BLOCK_Q: gl.constexpr = q.block_type.shape[2]
    GROUP, H = sizes.GROUP, sizes.H_out * sizes.GROUP
    mbarrier.expect(shared.arrived, 2 * k.block_type.nbytes)
    corner = block.b, block.h, block.col, 0
    copy_pair((k, v), corner, shared.arrived, shared.own)
    tensors = q, do, lse2, delta, bias
    if sizes.lists is None:
        for n in range(count_steps(block, sizes)):
            g, i = block_of(n, block, GROUP, BLOCK_Q)
            copy_queries(tensors, n, block.h * GROUP + g, i, 0, H, block, shared)
    else:
        # A list is read once for all heads that share an entry, and one entry ahead: it
        # is on its way while this warp waits for slots.
        n, following = 0, queries_of(entry_at(0, block), 0, block, sizes, BLOCK_Q)
        for number in range(block.blocks):
            i, partial, h = following
            entry = entry_at(number + 1, block)
            following = queries_of(entry, 0, block, sizes, BLOCK_Q)
            for g in range(sizes.sharing):
                copy_queries(tensors, n, h + g, i, partial, H, block, shared)
                n += 1


@gluon.jit
def add_queries(
    c: gl.constexpr, dk, dv, s, n, invariants, change,
    MASKED: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """One step of the loop over queries: block n, whose first scores are s [ROWS,
    ROWS], adds to dK and dV [ROWS, D]; returns them and the first scores of the next
    block. It also gives a part of dQ: at d = 64 that of block n - 1, else its own.
    """
    own, seen_from, real, steps, scale_log2, sizes, shared, block = invariants
    BLOCK_Q: gl.constexpr = shared.ring.slots[0].shape[1]
    notes, row = shared.notes, 0
    LISTED: gl.constexpr = notes is not None
    INSIDE: gl.constexpr = not (LISTED or RAGGED)
    if not LISTED:
        row = block_of(n, block, sizes.GROUP, BLOCK_Q)[1]
    for half in gl.static_range(BLOCK_Q // ROWS):
        i = row + half * ROWS  # the first query of this half
        dp, lse_rows = start_half(c, own, n, half, shared)  # [ROWS, ROWS], [1, ROWS]
        col = block.col + c * ROWS
        # Notes are read where they are needed, again and again: registers cannot hold
        # them.
        if shared.bias_ready is not None:
            lse_rows = less_copied_bias(c, lse_rows, n, half, shared)
        elif change.bias is not None:
            h = head_in(n, sizes, block, notes)
            i = row_in(n, i, half, notes)[0]
            lse_rows = less_bias(lse_rows, block.b, h, i, col, sizes, change, INSIDE)
        i, tile = row_in(n, i, half, notes)
        h = head_in(n, sizes, block, notes)
        position = i + sizes.T_k - sizes.T_q
        s, derivative = change_transposed(
            s, block.b, h, col, position, sizes, scale_log2, change
        )
        p = gl.exp2(s - lse_rows)  # [ROWS, ROWS], keys in rows
        if LISTED:
            if tile % 2 != 0:
                mask_head = head_in(n, sizes, block, notes)
                p = without_hidden(
                    p, i, col, block.b, mask_head, sizes, change.mask, MASKED
                )
        elif MASKED:
            queries = gl.arange(0, ROWS, gl.SliceLayout(0, accumulator(ROWS)))  # [ROWS]
            seen = (seen_from - i)[:, None] <= queries[None, :]  # [ROWS, ROWS]
            if sizes.left is not None:
                last = (seen_from + sizes.left - i)[:, None]  # [ROWS, 1]
                seen = seen & (queries[None, :] <= last)
            p = gl.where(seen, p, 0.0)  # [ROWS, ROWS]
        if RAGGED:  # keys after the last one must not enter a sum over keys
            p = gl.where(real[:, None], p, 0.0)  # [ROWS, ROWS]
        dk, dv, s = add_half(
            c, half, dk, dv, p, dp, derivative, n, steps, own, change, shared
        )
    return dk, dv, s


@gluon.jit
def consume_queries(
    c: gl.constexpr, dk_out, dv_out, scale, scale_log2, change, sizes, block, shared,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Compute rows c ROWS and following of a block of dK and dV, and store them."""
    D: gl.constexpr = shared.own[0].shape[1]
    GROUP, T_q, T_k = sizes.GROUP, sizes.T_q, sizes.T_k
    keys: gl.constexpr = gl.SliceLayout(1, accumulator(ROWS))
    j = block.col + c * ROWS + gl.arange(0, ROWS, keys)  # [ROWS]
    # The first query that sees a key, and whether the key exists.
    seen_from, real = j + T_q - T_k, j < T_k  # [ROWS] each
    dk = gl.zeros([ROWS, D], gl.float32, accumulator(D))  # [ROWS, D]
    dv = gl.zeros([ROWS, D], gl.float32, accumulator(D))  # [ROWS, D]
    mbarrier.wait(shared.arrived, 0)
    own = own_factors(c, shared.own)
    # The band comes last, or, if upward, first: band_steps steps. A list has none: its
    # notes say which blocks need a mask, of which the causal one is then a part.
    BANDED: gl.constexpr = CAUSAL and sizes.lists is None
    MASKED: gl.constexpr = CAUSAL and not BANDED
    steps, band_steps = count_steps(block, sizes), 0
    full = steps
    if sizes.lists is None:
        full = GROUP * block.full
    invariants = own, seen_from, real, steps, scale_log2, sizes, shared, block
    s = start_first_scores(c, own, 0, steps, shared)  # [ROWS, ROWS], unscaled
    s = warpgroup_mma_wait(0, [s])
    if BANDED:
        band_steps = GROUP * block.band * block.upward
        for n in range(band_steps):
            dk, dv, s = add_queries(c, dk, dv, s, n, invariants, change, True, RAGGED)
    for n in range(band_steps, band_steps + full):
        dk, dv, s = add_queries(c, dk, dv, s, n, invariants, change, MASKED, RAGGED)
    if BANDED:
        for n in range(band_steps + full, steps):
            dk, dv, s = add_queries(c, dk, dv, s, n, invariants, change, True, RAGGED)
    give_last_part(c, steps, shared)
    outputs = dk_out, dv_out
    store_keys(c, outputs, (dk, dv), (0, 0), scale, steps, block, shared)


# Triton would compile further versions for multiples of 16 and for 1 if the sizes came
# in a tuple, so the kernels take them one by one.
@gluon.jit(do_not_specialize=BackwardSizes._fields)
def keys_kernel(
    q, k, v, do, lse2, delta, bias, dk, dv, dq_sums, counters,
    scale, scale_log2, change,
    H_out, GROUP, PADDED, T_q, T_k, left, B, section, mixed, paired, awaited,
    cached, lists, per_batch, per_head, width, sharing,
    slopes, slope_batch, slope_head,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, SLOTS: gl.constexpr,
    PART_SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program writes one block of rows of dK and of dV, from all queries of the
    group that see them, and, unless D = 256, adds its parts of their dQ, each in its
    turn.

    q to dv are descriptors, and so is dq_sums, of lines. counters are the ticket and
    the numbers of parts; at D = 256 both are None. bias is None where there is none or
    consumers read it. change is a GluonChange. H_out to slope_head are the fields of
    BackwardSizes: slopes are a tensor or None, and so are lists; with lists change has
    a mask.
    """
    sizes = BackwardSizes(
        H_out, GROUP, PADDED, T_q, T_k, left, B, section, mixed, paired, awaited,
        cached, lists, per_batch, per_head, width, sharing,
        slopes, slope_batch, slope_head,
    )  # fmt: skip
    BLOCK_Q: gl.constexpr = q.block_type.shape[2]
    BLOCK_K: gl.constexpr = k.block_type.shape[2]
    D: gl.constexpr = q.block_type.shape[3]
    WIDE: gl.constexpr = D == 256
    programs = gl.cdiv(sizes.T_k, BLOCK_K)
    # At d = 256, where there are no tickets. With a causal mask most queries see the
    # first keys: the longest programs start first.
    number, head = gl.program_id(0) % programs, gl.program_id(0) // programs
    falling, upward = 0, 0
    if not WIDE:
        number, head, falling, upward = take_ticket(counters, programs, sizes, CAUSAL)
    if sizes.lists is not None:
        block = keys_by_list(number, head, falling, sizes, BLOCK_K)
    else:
        block = keys_by_formula(
            number, head, falling, upward, sizes, BLOCK_Q, BLOCK_K, CAUSAL, D
        )

    own = pair_in(make_pair(k, v, 1), 0)
    slots = make_pair(q, do, SLOTS)
    statistics = make_rows(lse2, SLOTS), make_rows(delta, SLOTS)
    p = make_shared_tiles(k.dtype, BLOCK_Q) if WIDE else None
    if WIDE:
        ds = make_shared_tiles(k.dtype, BLOCK_Q)
    else:
        ds = make_slots(k.dtype, 2, BLOCK_K, BLOCK_Q)
    arrived = make_barriers(1, 1).index(0)
    ring = Ring(slots, make_barriers(SLOTS, 1), make_barriers(SLOTS, CONSUMERS))
    ds_ready = make_barriers(1, CONSUMERS).index(0)
    p_ready = make_barriers(1, CONSUMERS).index(0) if WIDE else None
    parts = make_parts(PART_SLOTS) if not WIDE else None
    bias_ready = make_barriers(2, 1) if bias is not None else None
    notes = make_notes(SLOTS) if sizes.lists is not None else None
    shared = BackwardShared(
        notes, own, arrived, ring, statistics, ds, ds_ready, p, p_ready, parts,
        bias_ready,
    )  # fmt: skip
    if WIDE:
        gl.warp_specialize([
            (consume_wide, (0, dk, dv, scale, scale_log2,
                            sizes, block, shared, CAUSAL)),
            (consume_wide, (1, dk, dv, scale, scale_log2,
                            sizes, block, shared, CAUSAL)),
            (produce_queries, (q, k, v, do, lse2, delta, bias, sizes, block, shared)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_queries, (0, dk, dv, scale, scale_log2, change,
                               sizes, block, shared, CAUSAL, RAGGED)),
            (consume_queries, (1, dk, dv, scale, scale_log2, change,
                               sizes, block, shared, CAUSAL, RAGGED)),
            (produce_queries, (q, k, v, do, lse2, delta, bias, sizes, block, shared)),
            (add_parts, (0, dq_sums, counters, sizes, block, shared)),
            (add_parts, (1, dq_sums, counters, sizes, block, shared)),
        ], [4, 1, 1, 1], [
            CONSUMER_REGISTERS,
            PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS,
        ])  # fmt: skip


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


# {d: (rows of a slot, slots, and in keys_kernel slots for parts of dQ)}, as FUSED.
KEYS = {256: (64, 2, 0)}
QUERIES = {256: (32, 2)}
# {d: the sides of the tiles that lists are made of}
SIDES = {d: (tile[0], BLOCK) for d, tile in FUSED.items()}


@plans.planned
def launch_keys(
    q, k, v, do, delta, lse2, dk, dv, score_mod, tile, dq_sums=None, counters=None,
    deterministic=True,
):  # fmt: skip
    """Launch the kernel that fills dk and dv; with dq_sums, the fused one.

    q and do ``[B, H, T_q, d]``, k, v, dk and dv ``[B, H_kv, T_k, d]``, all describable;
    delta and lse2, float32 ``[B, H, PADDED]``, from launch_delta. tile is (BLOCK_Q,
    SLOTS, PART_SLOTS), a row of FUSED with dq_sums and of KEYS without. The fused
    kernel fills dq_sums, float32 ``[B H PADDED, d]``, with dQ, unscaled, in lines as
    gluon_order.store_part has them, but not blocks of queries that see no key. It
    needs counters: zeros, int32, at least one more than dq_sums has blocks of queries.
    The other arguments are as in backward.
    """
    scale, causal, left = score_mod.scale, score_mod.causal, score_mod.window
    mask, (B, H, T_q, d), (H_kv, T_k) = score_mod.mask, q.shape, k.shape[1:3]
    BLOCK_Q, SLOTS, PART_SLOTS = tile
    BLOCK_K = BLOCK if d < 256 else ROWS.value
    slopes, slope_batch, slope_head = score_arguments.slopes_and_strides(
        score_mod.slopes
    )
    sizes = BackwardSizes(
        H_kv, H // H_kv, delta.shape[2], T_q, T_k, left, B,
        slopes=slopes, slope_batch=slope_batch, slope_head=slope_head,
    )  # fmt: skip
    if dq_sums is not None:
        longest_first = causal and mask is None
        section, mixed, paired = choose_order(q, k, BLOCK_K, longest_first, left)
        awaited = EVERY_PART if deterministic else 1
        sizes = sizes._replace(
            section=section, mixed=mixed, paired=paired, awaited=awaited
        )
        dq_sums = lines_descriptor(dq_sums)
    if mask is not None:
        sizes = with_lists(sizes, q, k, score_mod, BLOCK_Q, BLOCK_K)
    plans.launch(
        keys_kernel, q, B * H_kv * triton.cdiv(T_k, BLOCK_K),
        gluon_descriptor(q, BLOCK_Q), gluon_descriptor(k, BLOCK_K),
        gluon_descriptor(v, BLOCK_K), gluon_descriptor(do, BLOCK_Q),
        row_descriptor(lse2, BLOCK_Q), row_descriptor(delta, BLOCK_Q),
        bias_descriptor(score_mod.bias, q, k, ROWS.value),
        gluon_descriptor(dk, ROWS.value), gluon_descriptor(dv, ROWS.value),
        dq_sums, counters, scale, *gluon_change(score_mod), *sizes,
        CAUSAL=causal, RAGGED=d < 256 and T_k % BLOCK_K != 0 and mask is None,
        SLOTS=SLOTS, PART_SLOTS=PART_SLOTS, **WARPS,
    )  # fmt: skip


@plans.planned
def launch_queries(q, k, v, do, delta, lse2, dq, score_mod, tile):
    """Launch the kernel that fills dq at d = 256; tile is (BLOCK_K, SLOTS), a row of
    QUERIES, and the rest as in launch_keys.
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
def backward(q, k, v, o, lse, do, dlse, score_mod, deterministic=True):
    """``(dq, dk, dv)`` in the shapes, dtypes and memory order of q, k, v, by a
    ScoreMod, where ``hopper_host.backward_refusal`` is None; with sinks also dsinks.

    q ``[B, H, T_q, d]``, k and v ``[B, H_kv, T_k, d]``, float16 or bfloat16, d one of
    64, 128, 256; o ``[B, H, T_q, d]`` and lse ``[B, H, T_q]`` (float32, natural
    logarithm) as the forward gave them; do and dlse, the gradients with respect to o
    and lse, in their shapes; these four with any strides, scale finite. If not
    deterministic, the fused form, for d = 64 and 128, adds up dQ in any order, unless
    there is a mask that is a function. A query that sees no key has zero gradient; dK
    and dV are summed over the heads of a group.
    """
    B, _, T_q, d = q.shape
    if q.numel() == 0 or k.numel() == 0:
        return tuple(x.zero_() for x in new_like(q, k, v))
    fused = d < 256
    do, delta, lse2, dq_sums, counters = prepare_backward(q, o, lse, do, dlse, fused)
    dq, dk, dv = new_like(q, k, v)
    inputs = q, k, v, do, delta, lse2
    if not fused:
        launch_keys(*inputs, dk, dv, score_mod, KEYS[d])
        launch_queries(*inputs, dq, score_mod, QUERIES[d])
    else:
        launch_keys(
            *inputs, dk, dv, score_mod, FUSED[d], dq_sums, counters, deterministic
        )
        launch_finish(
            dq_sums, dq, score_mod, delta.shape[2], k.shape[2], FUSED[d][0],
            None if score_mod.mask is None else counters,
        )  # fmt: skip
    if score_mod.sinks is None:
        return dq, dk, dv
    dsinks = score_gradients.of_sinks(delta, lse2, B, T_q, score_mod, None, PAD)
    return dq, dk, dv, dsinks
