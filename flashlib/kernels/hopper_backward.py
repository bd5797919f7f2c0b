"""The backward pass for Hopper (sm_90) in Gluon, Triton's dialect for such kernels:
copies and products run asynchronously.

Chapter *Hopper*; the sums are those of the chapter *The backward pass*. From L and
D = rowsum(dO o O) follow P = exp(S - L), dV = P^T dO, dP = dO V^T,
dS = P o (dP - D), dQ = scale dS K and dK = scale dS^T Q. The division of labor is that
of hopper.py: one producer, a warp that only starts copies (TMA) into a ring of slots,
and two consumers, groups of four warps, that own 64 rows of dK and dV each. Two more
warps are the adders.

For d = 64 and 128 one kernel, keys_kernel, computes dK and dV, and dQ part by part,
which saves two of the seven products that two kernels compute (gluon_fused.py). The
adders let the copy engine add the parts in memory (gluon_order.py). Every sum has one
order, so two runs agree in every bit, unless dQ may be added up in any order. Which
blocks of queries a program takes follows from the lengths, a causal mask and a window
or, for a mask that is a function, is in a list (gluon_keys.py). Wide heads, d = 256,
have two kernels (hopper_wide.py), and expanded keys, d = 192, one of their own
(hopper_expanded.py).

The scores are transposed, with keys in rows. So dK and dV take the P and dS that a
consumer has computed as first factors, straight from registers. For a part of dQ, dS
comes from both consumers and is read from shared memory.

The barriers, for a program that takes N blocks of queries:

=========== ========================== =================================================
barrier     a phase ends with          who waits for it
=========== ========================== =================================================
arrived     the copy of K and V        both consumers, before the first step
ring.ready  the copy of block n        both consumers, for step n; SLOTS of these
ring.empty  both consumers have read   the producer, before it copies block n + SLOTS
            block n
ds_ready    both consumers have        both consumers, before they read it
            stored dS^T of block n
parts.ready both consumers have        one adder, before it adds the part; PART_SLOTS of
            stored a part of dQ        these. With a bias that is copied the producer,
                                       too: gluon_bias.py
bias_ready  the copy of the bias of    both consumers, before they subtract it from L;
            block n                    two of these, if it is copied
parts.empty the part has left shared   both consumers, before they store another one in
            memory                     its slot
=========== ========================== =================================================

Phase N of ds_ready, which belongs to no block, ends when both consumers are done with K
and V, since they store dK and dV in their place. At d = 64 a consumer also waits for
phase n - 1 of ds_ready before it overwrites dS^T of block n - 2. For n = 0 that passes
at once: there is no phase -1.
"""

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_wait,
)

from flashlib import plans
from flashlib.kernels import hopper_wide, score_arguments, score_gradients
from flashlib.kernels.descriptors import gluon_descriptor, row_descriptor
from flashlib.kernels.gluon_backward import (
    BLOCK,
    CONSUMERS,
    EVERY_PART,
    PAD,
    WARPS,
    BackwardSizes,
    allocate_sums,
    copy_block,
    copy_pair,
    make_pair,
    make_rows,
    pair_in,
    prepare_rows,
    store_keys,
)
from flashlib.kernels.gluon_bias import (
    bias_descriptor,
    copy_bias,
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
    store_note,
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
from flashlib.kernels.gluon_scores import change_transposed, gluon_change
from flashlib.kernels.gluon_tiles import (
    ROWS,
    Ring,
    accumulator,
    make_barriers,
    make_slots,
)
from flashlib.plans import new_like


class BackwardShared(NamedTuple):
    """The shared memory of a program."""

    notes: tuple | None  # what gluon_keys.make_notes returns, if there are lists
    own: tuple  # the tiles [BLOCK_K, D] of K and V
    arrived: gl.shared_memory_descriptor  # their barrier
    ring: Ring  # slots for a tile of Q and one of dO
    statistics: tuple  # slots for lse2 and delta of the same rows
    ds: gl.shared_memory_descriptor  # two slots for dS^T [BLOCK_K, BLOCK_Q]
    ds_ready: gl.shared_memory_descriptor  # the barrier where consumers meet
    parts: Ring  # of dQ, one for each consumer in a slot, as lines
    # Two barriers, of a bias that is copied to ds; None if none is.
    bias_ready: gl.shared_memory_descriptor | None


@gluon.jit
def copy_queries(tensors, n, h, row, partial, H, block, shared):
    """Start copying the block of queries of head h at row into slot n % SLOTS once it
    is free, and its bias; partial is 1 if a list says that some pairs are hidden.
    """
    q, do, lse2, delta, bias = tensors
    b, ring = block.b, shared.ring
    SLOTS: gl.constexpr = ring.slots[0].shape[0]
    slot = n % SLOTS
    mbarrier.wait(ring.empty.index(slot), (n // SLOTS & 1) ^ 1)
    if shared.notes is not None:
        store_note(2 * row + partial, shared.notes[0], slot)
        store_note(h, shared.notes[1], slot)
    copy_block((q, do, lse2, delta), b, h, row, H, slot, shared)
    if bias is not None:
        copy_bias(bias, n, (b, h, row, block.col), shared)


@gluon.jit
def produce_queries(q, k, v, do, lse2, delta, bias, sizes, block, shared):
    """Copy a block of K and V once, then all queries that see it, with their bias."""
    BLOCK_Q: gl.constexpr = q.block_type.shape[2]
    GROUP, H = sizes.GROUP, sizes.H_kv * sizes.GROUP
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
# in a tuple, so the kernel takes them one by one.
@gluon.jit(do_not_specialize=BackwardSizes._fields)
def keys_kernel(
    q, k, v, do, lse2, delta, bias, dk, dv, dq_sums, counters,
    scale, scale_log2, change,
    H_kv, GROUP, PADDED, T_q, T_k, left, B, section, mixed, paired, awaited,
    cached, lists, per_batch, per_head, width, sharing,
    slopes, slope_batch, slope_head,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, SLOTS: gl.constexpr,
    PART_SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program writes one block of rows of dK and of dV, from all queries of the
    group that see them, and adds its parts of their dQ, each in its turn.

    q to dv are descriptors, and so is dq_sums, of lines. counters are the ticket and
    the numbers of parts. bias is None where there is none or consumers read it. change
    is a GluonChange. H_kv to slope_head are the fields of BackwardSizes: slopes are a
    tensor or None, and so are lists; with lists change has a mask.
    """
    sizes = BackwardSizes(
        H_kv, GROUP, PADDED, T_q, T_k, left, B, section, mixed, paired, awaited,
        cached, lists, per_batch, per_head, width, sharing,
        slopes, slope_batch, slope_head,
    )  # fmt: skip
    BLOCK_Q: gl.constexpr = q.block_type.shape[2]
    BLOCK_K: gl.constexpr = k.block_type.shape[2]
    programs = gl.cdiv(sizes.T_k, BLOCK_K)
    number, head, falling, upward = take_ticket(counters, programs, sizes, CAUSAL)
    if sizes.lists is not None:
        block = keys_by_list(number, head, falling, sizes, BLOCK_K)
    else:
        block = keys_by_formula(
            number, head, falling, upward, sizes, BLOCK_Q, BLOCK_K, CAUSAL
        )

    own = pair_in(make_pair(k, v, 1), 0)
    slots = make_pair(q, do, SLOTS)
    statistics = make_rows(lse2, SLOTS), make_rows(delta, SLOTS)
    ds = make_slots(k.dtype, 2, BLOCK_K, BLOCK_Q)
    arrived = make_barriers(1, 1).index(0)
    ring = Ring(slots, make_barriers(SLOTS, 1), make_barriers(SLOTS, CONSUMERS))
    ds_ready = make_barriers(1, CONSUMERS).index(0)
    parts = make_parts(PART_SLOTS)
    bias_ready = make_barriers(2, 1) if bias is not None else None
    notes = make_notes(SLOTS) if sizes.lists is not None else None
    shared = BackwardShared(
        notes, own, arrived, ring, statistics, ds, ds_ready, parts, bias_ready
    )
    gl.warp_specialize([
        (consume_queries, (0, dk, dv, scale, scale_log2, change,
                           sizes, block, shared, CAUSAL, RAGGED)),
        (consume_queries, (1, dk, dv, scale, scale_log2, change,
                           sizes, block, shared, CAUSAL, RAGGED)),
        (produce_queries, (q, k, v, do, lse2, delta, bias, sizes, block, shared)),
        (add_parts, (0, dq_sums, counters, sizes, block, shared)),
        (add_parts, (1, dq_sums, counters, sizes, block, shared)),
    ], [4, 1, 1, 1], [
        CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS,
    ])  # fmt: skip


# {d: the sides of the tiles that lists are made of}
SIDES = {d: (tile[0], BLOCK) for d, tile in FUSED.items()}


@plans.planned
def launch_keys(
    q, k, v, do, delta, lse2, dk, dv, score_mod, tile, dq_sums, counters,
    deterministic=True,
):  # fmt: skip
    """Launch the kernel that fills dk, dv and dq_sums.

    q and do ``[B, H, T_q, d]``, k, v, dk and dv ``[B, H_kv, T_k, d]``, all describable;
    delta and lse2, float32 ``[B, H, PADDED]``, from prepare_rows. tile is (BLOCK_Q,
    SLOTS, PART_SLOTS), a row of FUSED. dq_sums, float32 ``[B H PADDED, d]``, gets dQ,
    unscaled, in lines as gluon_order.store_part has them, except blocks of queries that
    see no key. counters are zeros, int32, at least one more than dq_sums has blocks of
    queries. The other arguments are as in backward.
    """
    scale, causal, left = score_mod.scale, score_mod.causal, score_mod.window
    mask, (B, H, T_q, _), (H_kv, T_k) = score_mod.mask, q.shape, k.shape[1:3]
    BLOCK_Q, SLOTS, PART_SLOTS = tile
    longest_first = causal and mask is None
    section, mixed, paired = choose_order(q, k, BLOCK, longest_first, left)
    slopes, slope_batch, slope_head = score_arguments.slopes_and_strides(
        score_mod.slopes
    )
    sizes = BackwardSizes(
        H_kv, H // H_kv, delta.shape[2], T_q, T_k, left, B, section, mixed, paired,
        EVERY_PART if deterministic else 1,
        slopes=slopes, slope_batch=slope_batch, slope_head=slope_head,
    )  # fmt: skip
    if mask is not None:
        sizes = with_lists(sizes, q, k, score_mod, BLOCK_Q, BLOCK)
    plans.launch(
        keys_kernel, q, B * H_kv * triton.cdiv(T_k, BLOCK),
        gluon_descriptor(q, BLOCK_Q), gluon_descriptor(k, BLOCK),
        gluon_descriptor(v, BLOCK), gluon_descriptor(do, BLOCK_Q),
        row_descriptor(lse2, BLOCK_Q), row_descriptor(delta, BLOCK_Q),
        bias_descriptor(score_mod.bias, q, k, ROWS.value),
        gluon_descriptor(dk, ROWS.value), gluon_descriptor(dv, ROWS.value),
        lines_descriptor(dq_sums), counters, scale, *gluon_change(score_mod), *sizes,
        CAUSAL=causal, RAGGED=T_k % BLOCK != 0 and mask is None,
        SLOTS=SLOTS, PART_SLOTS=PART_SLOTS, **WARPS,
    )  # fmt: skip


@plans.planned
def backward(q, k, v, o, lse, do, dlse, score_mod, deterministic=True):
    """``(dq, dk, dv)`` in the shapes, dtypes and memory order of q, k, v, by a
    ScoreMod, where ``hopper_host.backward_refusal`` is None; with sinks also dsinks.

    q ``[B, H, T_q, d]``, k and v ``[B, H_kv, T_k, d]``, float16 or bfloat16, d one of
    64, 128, 256; o ``[B, H, T_q, d]`` and lse ``[B, H, T_q]`` (float32, natural
    logarithm) as the forward gave them; do and dlse, the gradients with respect to o
    and lse, in their shapes; these four with any strides, scale finite. If not
    deterministic, dQ is added up in any order, unless d = 256 or there is a mask that
    is a function. A query that sees no key has zero gradient; dK and dV are summed over
    the heads of a group.
    """
    d = q.shape[-1]
    if d == 256:
        return hopper_wide.backward(q, k, v, o, lse, do, dlse, score_mod)
    if q.numel() == 0 or k.numel() == 0:
        return tuple(x.zero_() for x in new_like(q, k, v))
    dq_sums, counters = allocate_sums(q, lse)
    do, delta, lse2 = prepare_rows(q, o, lse, do, dlse, counters)
    dq, dk, dv = new_like(q, k, v)
    launch_keys(
        q, k, v, do, delta, lse2, dk, dv, score_mod, FUSED[d], dq_sums, counters,
        deterministic,
    )  # fmt: skip
    launch_finish(
        dq_sums, dq, score_mod, delta.shape[2], k.shape[2], FUSED[d][0],
        None if score_mod.mask is None else counters,
    )  # fmt: skip
    return score_gradients.with_sinks((dq, dk, dv), q, delta, lse2, score_mod, PAD)
