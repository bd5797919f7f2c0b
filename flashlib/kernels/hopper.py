"""FlashAttention-2, forward, for Hopper (sm_90), in Gluon: copies and products run
asynchronously.

Chapter *Hopper*; the algorithm is that of flash2, the division of labor that of Shah
et al., "FlashAttention-3" (NeurIPS 2024), Algorithm 2; Gluon is Triton's dialect for
such kernels. A program has one producer, a warp that only starts copies (TMA), and one,
two or three consumers, groups of four warps that own 64 rows of queries each. K and V
pass through rings of slots in shared memory. A slot has two barriers: the copy engine
completes `ready`, the consumers complete `empty`; gluon_forward.py has a table of all.

A consumer starts S = Q K^T of the next block before it adds P V of this one, and
finds the maximum of the next block while that product runs. The kernel is persistent:
as many programs as fit on the GPU take tiles from a shared counter, longest first.

With KEEP, most blocks keep the maximum of a tile's first one (gluon_keep.py).
"""

import math
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from flashlib import plans
from flashlib.kernels import score_arguments, tile_lists
from flashlib.kernels.descriptors import descriptors_of_columns, gluon_descriptor
from flashlib.kernels.gluon_bias import (
    bias_descriptor,
    bias_of,
    make_bias_ring,
    refill_bias,
)
from flashlib.kernels.gluon_forward import (
    attend_first,
    before_next_wait,
    block_counts,
    coordinates,
    log_sum_exp,
    make_queue,
    make_ring,
    new_maximum,
    pop,
    push,
    refill,
    release,
    skip,
    start_scores,
    start_values,
    thread_sums,
    tile_in,
    visible_keys,
    weights,
)
from flashlib.kernels.gluon_keep import (
    LARGEST_SUM,
    attend_keeping,
    has_overflowed,
    keeps_maximum,
    store_checked,
)
from flashlib.kernels.gluon_lists import (
    Queries,
    column,
    hide_scores,
    list_bounds,
    list_of_task,
)
from flashlib.kernels.gluon_scores import (
    change_tile,
    gluon_change,
    in_raw_scores,
    load_slope,
)
from flashlib.kernels.gluon_tasks import task_at, window_start
from flashlib.kernels.gluon_tiles import ROWS, Ring, accumulator
from flashlib.kernels.hopper_host import copies_bias, hopper_forward
from flashlib.kernels.hopper_tiles import PROGRAMS, choose_tile
from flashlib.kernels.tiles import LOWEST, with_sink

# With a causal mask, programs work on a section of the heads at a time. A section has
# about four tiles for each program, but not many more heads than this. With fewer
# tiles, some programs find nothing left to do at the end. With more heads, their K and
# V do not fit in the L2 cache.
SECTION_HEADS = 16


class ForwardSizes(NamedTuple):
    """What the launcher knows about the problem."""

    tiles: int
    heads: int  # B H
    section: int  # heads that are worked on at a time
    H: int
    GROUP: int
    T_q: int  # packed, of all sequences
    T_k: int
    left: int | None  # keys before its own that a query sees, if limited
    starts_q: torch.Tensor | None = None  # the first rows of packed sequences
    starts_k: torch.Tensor | None = None
    sequences: int | None = None
    lists: torch.Tensor | None = None  # of the blocks of keys that a mask leaves
    per_batch: int | None = None  # lists of heads from one batch to the next
    per_head: int | None = None  # and from one head to the next: 0 if they share one
    sinks: torch.Tensor | None = None  # [H]
    slopes: torch.Tensor | None = None  # of ALiBi, float32 [H] or [B, H]
    slope_batch: int | None = None  # their strides
    slope_head: int | None = None
    overflowed: torch.Tensor | None = None  # [1], int32: whether a row has


class ForwardShared(NamedTuple):
    """The shared memory of a program."""

    q: Ring  # a slot for each consumer
    k: Ring
    v: Ring
    queue: Ring  # indices of tiles, from the producer to the consumers
    o: gl.shared_memory_descriptor  # tiles of O on their way out
    bias: Ring | None  # tiles of a bias, one for each consumer in a slot


@gluon.jit
def produce(
    q, k, v, bias, lse, counter, sizes, shared, CAUSAL: gl.constexpr,
    REPEAT: gl.constexpr,
):  # fmt: skip
    """The producer: for each tile Q once, then the blocks of K and V that any of its
    queries sees, and the tiles of the bias for them. REPEAT: only tiles in which a row
    has overflowed.
    """
    CONSUMERS: gl.constexpr = shared.q.slots.shape[0]
    SLOTS: gl.constexpr = shared.k.slots.shape[0]
    BLOCK_K: gl.constexpr = shared.k.slots.shape[1]
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    count, turn, n = 0, 0, gl.program_id(0)
    while n < sizes.tiles:
        later = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        task, wanted = task_at(n, sizes, CAUSAL, BLOCK_Q), True
        if REPEAT:
            wanted = has_overflowed(lse, task, CONSUMERS)
        if wanted:
            push(n, turn, shared.queue)
            row, h, h_k = task.row, task.h, task.h // sizes.GROUP
            if sizes.lists is not None:
                blocks = list_of_task(task, sizes, BLOCK_Q, BLOCK_K)
                first, end = 0, list_bounds(blocks)[1]
                following = gl.load(blocks + 2)
            else:
                end = block_counts(row, BLOCK_Q, task.T_q, task.T_k, CAUSAL, BLOCK_K)[1]
                first = window_start(row, BLOCK_Q, end, task, sizes.left, BLOCK_K)[0]
            for c in gl.static_range(CONSUMERS):
                refill(q, task.q, h, row + c * ROWS, shared.q, c, turn & 1)
            for j in range(first, end):
                slot, phase = count % SLOTS, count // SLOTS & 1
                block = j
                if sizes.lists is not None:
                    # The next number is on its way while this warp waits for slots.
                    block = following
                    following = gl.load(blocks + 2 + gl.minimum(j + 1, end - 1))
                col = block * BLOCK_K
                refill(k, task.k, h_k, col, shared.k, slot, phase)
                if bias is not None:
                    refill_bias(bias, task.q, h, row, col, shared.bias, count)
                refill(v, task.k, h_k, col, shared.v, slot, phase)
                count += 1
            turn += 1
        n = later
    push(n, turn, shared.queue)


@gluon.jit
def attend(
    bits, acc, m, l, invariants, change, count, col,
    MASKED: gl.constexpr, RAGGED: gl.constexpr = False,
):  # fmt: skip
    """One step of the inner loop: scores and weights of the count-th block, and P V of
    the one before.
    """
    q_tile, k_ring, v_ring, queries, sizes, scale_log2 = invariants
    s = start_scores(q_tile, k_ring, count)
    acc = start_values(acc, bits, v_ring, count - 1)
    # On its way while both products run.
    BLOCK_K: gl.constexpr = k_ring.slots.shape[1]
    INSIDE: gl.constexpr = not (MASKED and RAGGED)
    bias = bias_of(queries, count, col, sizes, change, BLOCK_K, INSIDE)
    s = warpgroup_mma_wait(1, [s])  # [ROWS, BLOCK_K]; P V is still running
    s = change_tile(s, bias, queries, col, sizes, change)
    if MASKED:
        s = hide_scores(s, queries, col, sizes, change)
    s, m_new = new_maximum(s, m, scale_log2, queries.seen, col, MASKED)
    m_new = before_next_wait(m_new)
    o = warpgroup_mma_wait(0, [acc])  # [ROWS, D]
    release(k_ring, count)
    release(v_ring, count - 1)
    p, alpha = weights(s, m, m_new, scale_log2)
    sums = thread_sums(p)  # [ROWS, 4]
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + sums
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))  # [ROWS]
    o = o * alpha[:, None]  # [ROWS, D]
    # As integers: of 16-bit floats that a loop carries, Triton 3.6 and 3.7 swap the
    # halves of every pair.
    bits = p.to(k_ring.slots.dtype).to(gl.int16, bitcast=True)  # [ROWS, BLOCK_K]
    return bits, warpgroup_mma_init(o), m_new, l


@gluon.jit
def consume(
    c: gl.constexpr, o, lse, scale_log2, sizes, change, shared,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, HOLD_Q: gl.constexpr,
    KEEP: gl.constexpr,
):  # fmt: skip
    """Consumer c: rows c ROWS and following of O and of L, tile by tile."""
    BLOCK_Q: gl.constexpr = shared.q.slots.shape[0] * ROWS
    D: gl.constexpr = shared.v.slots.shape[2]
    BLOCK_K: gl.constexpr = shared.k.slots.shape[1]
    s_layout: gl.constexpr = accumulator(BLOCK_K)
    layout: gl.constexpr = accumulator(D)
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    k_ring, v_ring = shared.k, shared.v
    q_slot, o_tile = shared.q.slots.index(c), shared.o.index(c)  # [ROWS, D]
    count, turn = 0, 0
    n = pop(turn, shared.queue)
    while n < sizes.tiles:
        task = task_at(n, sizes, CAUSAL, BLOCK_Q)
        row, T_q, T_k = task.row, task.T_q, task.T_k
        if sizes.lists is None:
            last = block_counts(row, BLOCK_Q, T_q, T_k, CAUSAL, BLOCK_K)[1]
            begin = window_start(row, BLOCK_Q, last, task, sizes.left, BLOCK_K)[0]
        row += c * ROWS
        blocks = None
        if sizes.lists is not None:
            # All consumers pass through the same blocks.
            blocks = list_of_task(task, sizes, BLOCK_Q, BLOCK_K)
            full_end, end = list_bounds(blocks)
            first, full_start = 0, 0
        else:
            full_end, end = block_counts(row, ROWS, T_q, T_k, CAUSAL, BLOCK_K)
            first, full_start = window_start(row, ROWS, end, task, sizes.left, BLOCK_K)
            if sizes.left is not None:
                count = skip(first - begin, count, shared)
        i = row + gl.arange(0, ROWS, rows_layout)  # [ROWS]
        seen = visible_keys(row, ROWS, T_q, T_k, CAUSAL, rows_layout)  # [ROWS]
        slope = 0.0
        if sizes.slopes is not None:
            slope = load_slope(sizes, task.q, task.h)
            slope = in_raw_scores(slope, scale_log2, change)
        first_position = row + T_k - T_q
        queries = Queries(task.q, task.h, first_position, seen, slope, c, shared.bias)
        m = gl.full([ROWS], LOWEST, gl.float32, rows_layout)  # [ROWS], base 2
        acc = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, layout))  # [ROWS, D]

        # The first block of keys; its product P V waits for the next step.
        mbarrier.wait(shared.q.ready.index(c), turn & 1)
        if HOLD_Q:
            q_tile = q_slot.load(gl.DotOperandLayout(0, s_layout, 2))  # [ROWS, D]
            # Without the fence the copy engine may overwrite what is still being read.
            fence_async_shared()
            # The next Q is copied while this tile is computed.
            mbarrier.arrive(shared.q.empty.index(c), count=1)
        else:
            q_tile = tile_in(shared.q, c)  # [ROWS, D], or two parts
        s = warpgroup_mma_wait(0, [start_scores(q_tile, k_ring, count)])
        release(k_ring, count)
        col = column(first, blocks, BLOCK_K)
        bias = bias_of(queries, count, col, sizes, change, BLOCK_K, not RAGGED)
        s = change_tile(s, bias, queries, col, sizes, change)
        if (full_end > first) & (full_start <= first):
            p, m, l = attend_first(s, m, scale_log2, seen, col, False)
        else:
            s = hide_scores(s, queries, col, sizes, change)
            p, m, l = attend_first(s, m, scale_log2, seen, col, True)
        bits = p.to(q_slot.dtype).to(gl.int16, bitcast=True)  # [ROWS, BLOCK_K]
        count += 1
        invariants = (q_tile, k_ring, v_ring, queries, sizes, scale_log2)
        start = first + 1
        if sizes.left is not None:
            for j in range(start, gl.minimum(full_start, end)):
                col = j * BLOCK_K
                bits, acc, m, l = attend(
                    bits, acc, m, l, invariants, change, count, col, True, RAGGED
                )
                count += 1
            start = gl.maximum(start, full_start)
        for j in range(start, full_end):
            col = j * BLOCK_K
            added = sizes.slopes is not None or change.bias is not None
            if added or change.natural is not None:
                # nothing else asks where a full block is
                col = column(j, blocks, BLOCK_K)
            if KEEP:
                bits, acc, l = attend_keeping(
                    bits, acc, m, l, invariants, change, count, col
                )
            else:
                bits, acc, m, l = attend(
                    bits, acc, m, l, invariants, change, count, col, False, RAGGED
                )
            count += 1
        if KEEP:  # a later block could scale an overflowed sum down to a harmless one
            l = gl.where(l < LARGEST_SUM, l, float("inf"))  # [ROWS, 4]
        if CAUSAL or RAGGED or sizes.lists is not None:
            for j in range(gl.maximum(full_end, start), end):
                col = column(j, blocks, BLOCK_K)
                bits, acc, m, l = attend(
                    bits, acc, m, l, invariants, change, count, col, True, RAGGED
                )
                count += 1

        acc = start_values(acc, bits, v_ring, count - 1)
        l = gl.convert_layout(gl.sum(l, 1), rows_layout)  # [ROWS]
        if sizes.sinks is not None:
            m, l, factor = with_sink(m, l, gl.load(sizes.sinks + task.h))  # [ROWS] each
        # A query that sees no key has l = 0, O = 0 and L = -inf.
        lse_rows, l = log_sum_exp(m, l)  # [ROWS] both
        if not KEEP:
            gl.store(lse + task.lse + i, lse_rows, mask=i < T_q)
        o_rows = warpgroup_mma_wait(0, [acc])  # [ROWS, D]
        if KEEP:
            rows = lse + task.lse
            store_checked(rows, lse_rows, l, o_rows, sizes.overflowed, i, T_q)
        release(v_ring, count - 1)
        if CAUSAL and sizes.lists is None:
            count = skip(last - end, count, shared)
        inverse = 1.0 / l  # [ROWS]
        if sizes.sinks is not None:
            inverse *= factor
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, layout))  # [ROWS]
        o_rows = o_rows * inverse[:, None]  # [ROWS, D]
        tma.store_wait(0)  # until the tile before has left shared memory
        o_tile.store(o_rows.to(o_tile.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o, coordinates(o, task.q, task.h, row), o_tile)
        if not HOLD_Q:
            tma.store_wait(0)
            mbarrier.arrive(shared.q.empty.index(c), count=1)
        turn += 1
        n = pop(turn, shared.queue)
    tma.store_wait(0)


# Triton would compile further versions for multiples of 16 and for 1 if the sizes came
# in a tuple, so the kernel takes them one by one.
@gluon.jit(do_not_specialize=ForwardSizes._fields)
def forward_kernel(
    q, q_rest, k, k_rest, v, bias, o, lse, counter, scale_log2, change,
    tiles, heads, section, H, GROUP, T_q, T_k, left, starts_q, starts_k, sequences,
    lists, per_batch, per_head, sinks, slopes, slope_batch, slope_head, overflowed,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, tile: gl.constexpr, D: gl.constexpr,
    KEEP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Programs take tiles [CONSUMERS ROWS, D_V] of O and of L until none is left.

    Where D is 192, q and k read 128 columns, and q_rest and k_rest the others. bias is
    a descriptor, or None where there is none or consumers read it. scale_log2 is for
    base 2, and change is a GluonChange. tiles to overflowed are the fields of
    ForwardSizes. With overflowed and without KEEP, only tiles in which a row has
    overflowed are computed.
    """
    REPEAT: gl.constexpr = overflowed is not None and not KEEP
    if REPEAT:
        tiles *= gl.load(overflowed)  # 0 or 1
    CONSUMERS: gl.constexpr = tile.CONSUMERS
    SLOTS: gl.constexpr = tile.SLOTS
    BLOCK_K: gl.constexpr = tile.BLOCK_K
    HOLD_Q: gl.constexpr = tile.HOLD_Q
    q_ring = make_ring(q.dtype, CONSUMERS, ROWS, D, 1)
    k_ring = make_ring(k.dtype, SLOTS, BLOCK_K, D, CONSUMERS)
    D_V: gl.constexpr = o.block_type.shape[-1]
    v_ring = make_ring(v.dtype, SLOTS, BLOCK_K, D_V, CONSUMERS)
    if q_rest is not None:
        q, k = (q, q_rest), (k, k_rest)
    o_tiles = q_ring.slots  # if Q stays in shared memory, O replaces it there
    if HOLD_Q:
        shape: gl.constexpr = [CONSUMERS, ROWS, D]
        o_tiles = gl.allocate_shared_memory(o.dtype, shape, o_tiles.layout)
    sizes = ForwardSizes(
        tiles, heads, section, H, GROUP, T_q, T_k, left, starts_q, starts_k, sequences,
        lists, per_batch, per_head, sinks, slopes, slope_batch, slope_head, overflowed,
    )  # fmt: skip
    bias_ring = None
    if bias is not None:
        bias_ring = make_bias_ring(bias.dtype, CONSUMERS, BLOCK_K)
    queue = make_queue(CONSUMERS)
    shared = ForwardShared(q_ring, k_ring, v_ring, queue, o_tiles, bias_ring)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (0, o, lse, scale_log2, sizes, change, shared,
                       CAUSAL, RAGGED, HOLD_Q, KEEP)),
            (produce, (q, k, v, bias, lse, counter, sizes, shared, CAUSAL, REPEAT)),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (0, o, lse, scale_log2, sizes, change, shared,
                       CAUSAL, RAGGED, HOLD_Q, KEEP)),
            (consume, (1, o, lse, scale_log2, sizes, change, shared,
                       CAUSAL, RAGGED, HOLD_Q, KEEP)),
            (produce, (q, k, v, bias, lse, counter, sizes, shared, CAUSAL, REPEAT)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, o, lse, scale_log2, sizes, change, shared,
                       CAUSAL, RAGGED, HOLD_Q, KEEP)),
            (consume, (1, o, lse, scale_log2, sizes, change, shared,
                       CAUSAL, RAGGED, HOLD_Q, KEEP)),
            (consume, (2, o, lse, scale_log2, sizes, change, shared,
                       CAUSAL, RAGGED, HOLD_Q, KEEP)),
            (produce, (q, k, v, bias, lse, counter, sizes, shared, CAUSAL, REPEAT)),
        ], [4, 4, 1], [
            CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS,
        ])  # fmt: skip


@plans.planned
def launch_forward(q, k, v, o, lse, score_mod, packing, tile, keep=False):
    """Launch with one ForwardTile; scale > 0, no tensor empty. keep: launch with the
    first maximum, and once more for what has overflowed.
    """
    mask = score_mod.mask
    T, H = (-2, -3) if packing is None else (0, 1)
    T_q, T_k, H, group = q.shape[T], k.shape[T], q.shape[H], q.shape[H] // k.shape[H]
    BLOCK_Q = tile.CONSUMERS * ROWS.value
    programs, options = PROGRAMS[tile.CONSUMERS]
    if packing is None:
        heads, blocks, longest = q.shape[0] * H, triton.cdiv(T_q, BLOCK_Q), T_k
        starts_q = starts_k = sequences = None
    else:
        starts_q, starts_k = packing.starts_q, packing.starts_k
        sequences = starts_q.shape[0] - 1
        heads, blocks, longest = H, T_q // BLOCK_Q + sequences, packing.longest_k
    tiles = heads * blocks
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    enough = 4 * programs * processors / triton.cdiv(max(1, longest), BLOCK_Q)
    # A power of two, which divides many numbers of heads. Of the others, the last
    # section would be small, so all of them get about the same number.
    section = min(SECTION_HEADS, 2 ** max(0, round(math.log2(enough))) * group)
    section = triton.cdiv(heads, max(1, heads // section))
    lists = per_batch = per_head = None
    if mask is not None:
        B, n = score_arguments.batch_and_sizes(q, k, v, packing)
        lists = tile_lists.found(
            tile_lists.of_queries, "hopper_o", q, score_mod, packing, B, n, BLOCK_Q,
            tile.BLOCK_K,
        )  # fmt: skip
        by_batch, by_head = mask.depends
        per_batch, per_head = lists.shape[1] if by_batch else 0, int(by_head)
    overflowed = plans.zeros((1,), torch.int32, q) if keep else None
    for KEEP in (True, False) if keep else (False,):
        plans.launch(
            forward_kernel, q, min(tiles, programs * processors),
            *descriptors_of_columns(q, ROWS.value),
            *descriptors_of_columns(k, tile.BLOCK_K),
            gluon_descriptor(v, tile.BLOCK_K),
            bias_descriptor(score_mod.bias, q, k, tile.BLOCK_K),
            gluon_descriptor(o, ROWS.value), lse,
            plans.zeros((1,), torch.int32, q),
            *gluon_change(score_mod),
            *ForwardSizes(
                tiles, heads, section, H, group, T_q, T_k, score_mod.window,
                starts_q, starts_k, sequences, lists, per_batch, per_head,
                score_mod.sinks,
                *score_arguments.slopes_and_strides(score_mod.slopes), overflowed,
            ),
            CAUSAL=score_mod.causal,
            RAGGED=packing is not None or T_k % tile.BLOCK_K != 0,
            tile=tile, D=q.shape[-1], KEEP=KEEP, num_warps=4, **options,
        )  # fmt: skip


@plans.planned
def forward(q, k, v, score_mod, packing=None):
    """O and the log-sum-exp, on a Hopper GPU, by a ScoreMod and a Packing or None,
    where ``hopper_host.forward_refusal`` is None.

    q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]`` and v ``[B, H_kv, T_k, d_v]``, float16
    or bfloat16, d = d_v one of 64, 128, 256, or d = 192 with d_v = 128, scale finite.
    Returns ``(o, lse)``: o ``[B, H, T_q, d_v]`` in the dtype of q and its memory order;
    lse ``[B, H, T_q]`` in float32, natural logarithm. With a packing the tensors are
    ``[total, H, d]``, and lse ``[H, total_q]``. Two runs agree in every bit, whichever
    program takes which tile.
    """
    T_q = q.shape[2] if packing is None else packing.longest_q
    costly = score_mod._replace(slopes=None).changed  # ALiBi fits in every tile
    masked, causal = score_mod.mask is not None, score_mod.causal
    tile = choose_tile(
        q.shape[-1], T_q, causal, score_mod.window, packed=packing is not None,
        masked=masked, changed=costly,
        biased=score_mod.bias is not None and copies_bias(q, k, score_mod.bias),
        narrow=masked and score_mod.mask.narrow(causal),
    )  # fmt: skip

    def fill(q, o, lse, scale):
        scaled = score_mod._replace(scale=scale)
        keep = keeps_maximum(q, k, score_mod, packing)
        launch_forward(q, k, v, o, lse, scaled, packing, tile, keep)

    return hopper_forward(q, k, score_mod.scale, fill, v)
