"""Attention in eight bits, forward, for Hopper (sm_90), in Gluon.

Chapter *Eight bits*; after Shah et al., "FlashAttention-3" (NeurIPS 2024), section 3.3.
The division of labor is that of hopper.py: a producer starts copies, and two consumers
own 64 rows of queries each, with the softmax of a block under the product P V of the
one before.

Of a sum of products of eight bits the tensor cores keep 14 bits, and cut off the rest:
a sum of 16,384 numbers in [0, 1] loses 27 % (``benchmarks/probes.py``). P V of each
block therefore starts from zero, and the multiply-add that rescales O adds it in
float32. At d = 128 that was as fast as a single sum on tensor cores (857 TFLOP/s next
to 848, H200). At d = 256 registers hold only parts of the product next to O, and no
scores. The sums of the rows of P are a product, too, with a factor of ones: they are
those of the rounded weights, and cost no additions in float32.
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
    warpgroup_mma_wait,
)

from flashlib import plans
from flashlib.kernels.gluon_forward import (
    before_next_wait,
    block_counts,
    make_queue,
    make_ring,
    new_maximum,
    pop,
    push,
    refill,
    release,
    skip,
    visible_keys,
)
from flashlib.kernels.gluon_fp8 import (
    EXPONENT,
    LEAST_SCORE_SCALE,
    EightBitSizes,
    Scales,
    accumulator,
    copy_values,
    half_of_sums,
    make_ones,
    rounded,
    start_scores,
    start_sums,
    start_values,
)
from flashlib.kernels.gluon_tasks import head_and_block
from flashlib.kernels.gluon_tiles import ROWS
from flashlib.kernels.hopper import SECTION_HEADS, ForwardShared
from flashlib.kernels.tiles import LN_2, LOG2_E, LOWEST

CONSUMERS = gl.constexpr(2)
PART = gl.constexpr(64)  # columns of O that are added at once, of 256


@gluon.jit
def produce(q, k, v, counter, sizes, shared, CAUSAL: gl.constexpr):
    """The producer: for each tile Q once, then the blocks of K and V that any of its
    queries sees.
    """
    SLOTS: gl.constexpr = shared.k.slots.shape[0]
    BLOCK_K: gl.constexpr = shared.k.slots.shape[1]
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    count, turn, n = 0, 0, gl.program_id(0)
    while n < sizes.tiles:
        later = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        push(n, turn, shared.queue)
        head, block = head_and_block(n, gl.cdiv(sizes.T_q, BLOCK_Q), sizes, CAUSAL)
        row, b, h = block * BLOCK_Q, head // sizes.H, head % sizes.H
        _, end = block_counts(row, BLOCK_Q, sizes.T_q, sizes.T_k, CAUSAL, BLOCK_K)
        for c in gl.static_range(CONSUMERS):
            refill(q, b, h, row + c * ROWS, shared.q, c, turn & 1)
        for j in range(end):
            slot, phase, h_kv = count % SLOTS, count // SLOTS & 1, h // sizes.GROUP
            refill(k, b, h_kv, j * BLOCK_K, shared.k, slot, phase)
            copy_values(v, b, h_kv, j * BLOCK_K, shared.v, slot, phase)
            count += 1
        n = later
        turn += 1
    push(n, turn, shared.queue)


@gluon.jit
def weights(s, scale, m):
    """The weights, times 2^EXPONENT, [ROWS, BLOCK_K], of scores under a scale [ROWS]
    and the maximum m [ROWS], in base 2.
    """
    return gl.exp2(s * scale[:, None] - (m - EXPONENT)[:, None])


@gluon.jit
def attend(carried, invariants, count, j, MASKED: gl.constexpr):
    """One step of the inner loop for d up to 128: scores and weights of block j of
    keys, under P V of the one before and the sums of its weights.

    acc is O of all blocks before that one, in units of `unit`, a scale of values. It is
    still to be multiplied by `factor`. l [ROWS, 4] are the sums of the same blocks.
    """
    fours, acc, m, l, factor, unit, scale_k, scale_v = carried
    q_tile, shared, ones, seen, scale_q, scales_k, scales_v, last = invariants
    k_ring, v_ring = shared.k, shared.v
    D: gl.constexpr = v_ring.slots.shape[1]
    BLOCK_K: gl.constexpr = k_ring.slots.shape[1]
    s = start_scores(q_tile, k_ring, count)
    part = start_values(fours, v_ring, count - 1, 0, D)
    sums = start_sums(fours, ones)
    scale = gl.maximum(scale_q * scale_k, LEAST_SCORE_SCALE)  # [ROWS], of the scores
    # The next scales are on their way during this step.
    following = gl.minimum(j + 1, last)
    next_k, next_v = gl.load(scales_k + following), gl.load(scales_v + following)
    s = warpgroup_mma_wait(2, [s])  # [ROWS, BLOCK_K]; both others are still running
    release(k_ring, count)
    s, m_new = new_maximum(s, m, scale, seen, j * BLOCK_K, MASKED)
    alpha = gl.exp2(m - m_new)  # [ROWS]
    p = weights(s, scale, m_new)  # [ROWS, BLOCK_K]
    m_new = before_next_wait(m_new)
    part, sums = warpgroup_mma_wait(0, [part, sums])  # [ROWS, D], [ROWS, 8]
    release(v_ring, count - 1)
    # Not earlier: both products read the registers of the weights before.
    fours = rounded(p)
    acc = acc * factor[:, None] + part
    l += half_of_sums(sums)
    l *= gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None]
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, accumulator(D)))
    factor *= unit / scale_v
    return fours, acc, m_new, l, factor, scale_v, next_k, next_v


@gluon.jit
def add_values(n: gl.constexpr, acc, fours, factor, v_ring, count):
    """The n-th PART columns of O, [ROWS, PART], with P V of a block."""
    part = start_values(fours, v_ring, count, n * PART, PART)
    return acc * factor[:, None] + warpgroup_mma_wait(0, [part])


@gluon.jit
def attend_in_parts(carried, invariants, count, j, MASKED: gl.constexpr):
    """One step of the inner loop for d = 256, where registers hold O and either a part
    of the product P V or scores. So no product of this consumer runs during its
    softmax, only those of the other consumer.
    """
    acc, m, l, unit, scale_k, scale_v = carried
    q_tile, shared, ones, seen, scale_q, scales_k, scales_v, last = invariants
    k_ring, v_ring = shared.k, shared.v
    BLOCK_K: gl.constexpr = k_ring.slots.shape[1]
    s = start_scores(q_tile, k_ring, count)
    scale = gl.maximum(scale_q * scale_k, LEAST_SCORE_SCALE)  # [ROWS], of the scores
    following = gl.minimum(j + 1, last)
    next_k, next_v = gl.load(scales_k + following), gl.load(scales_v + following)
    s = warpgroup_mma_wait(0, [s])  # [ROWS, BLOCK_K]
    release(k_ring, count)
    s, m_new = new_maximum(s, m, scale, seen, j * BLOCK_K, MASKED)
    alpha = gl.exp2(m - m_new)  # [ROWS]
    p = weights(s, scale, m_new)  # [ROWS, BLOCK_K]
    fours = rounded(p)
    sums = warpgroup_mma_wait(0, [start_sums(fours, ones)])  # [ROWS, 8]
    l *= gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None]
    l += half_of_sums(sums)  # [ROWS, 4]
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, accumulator(PART)))
    factor *= unit / scale_v
    acc = (
        add_values(0, acc[0], fours, factor, v_ring, count),
        add_values(1, acc[1], fours, factor, v_ring, count),
        add_values(2, acc[2], fours, factor, v_ring, count),
        add_values(3, acc[3], fours, factor, v_ring, count),
    )
    release(v_ring, count)
    return acc, m_new, l, scale_v, next_k, next_v


@gluon.jit
def consume(
    c: gl.constexpr, o, lse, scales, scale_log2, sizes, shared, ones,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, HOLD_Q: gl.constexpr,
):  # fmt: skip
    """Consumer c: rows c ROWS and following of O and of L, tile by tile."""
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    BLOCK_K: gl.constexpr = shared.k.slots.shape[1]
    D: gl.constexpr = shared.q.slots.shape[2]
    s_layout: gl.constexpr = accumulator(BLOCK_K)
    COLUMNS: gl.constexpr = D if D <= 128 else PART  # of O in one tensor
    layout: gl.constexpr = accumulator(COLUMNS)
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    k_ring, v_ring = shared.k, shared.v
    q_slot, o_tile = shared.q.slots.index(c), shared.o.index(c)  # [ROWS, D]
    T_q, T_k = sizes.T_q, sizes.T_k
    count, turn = 0, 0
    n = pop(turn, shared.queue)
    while n < sizes.tiles:
        head, block = head_and_block(n, gl.cdiv(T_q, BLOCK_Q), sizes, CAUSAL)
        row = block * BLOCK_Q
        last = block_counts(row, BLOCK_Q, T_q, T_k, CAUSAL, BLOCK_K)[1]
        row += c * ROWS
        full_end, end = block_counts(row, ROWS, T_q, T_k, CAUSAL, BLOCK_K)
        i = row + gl.arange(0, ROWS, rows_layout)  # [ROWS]
        seen = visible_keys(row, ROWS, T_q, T_k, CAUSAL, rows_layout)  # [ROWS]
        of_row = head.to(gl.int64) * T_q + i  # [ROWS]
        of_head = (head // sizes.GROUP).to(gl.int64) * sizes.blocks
        scales_k, scales_v = scales.k + of_head, scales.v + of_head
        scale_k, scale_v = gl.load(scales_k), gl.load(scales_v)
        scale_q = gl.load(scales.q + of_row, mask=i < T_q, other=1.0) * scale_log2
        m = gl.full([ROWS], LOWEST, gl.float32, rows_layout)  # [ROWS], base 2

        # The first block of keys; its product P V waits for the next step.
        mbarrier.wait(shared.q.ready.index(c), turn & 1)
        if HOLD_Q:
            q_tile = q_slot.load(gl.DotOperandLayout(0, s_layout, 4))  # [ROWS, D]
            # Without the fence the copy engine may overwrite what is still being read.
            fence_async_shared()
            # The next Q is copied while this tile is computed.
            mbarrier.arrive(shared.q.empty.index(c), count=1)
        else:
            q_tile = q_slot  # [ROWS, D]
        invariants = (
            q_tile, shared, ones, seen, scale_q, scales_k, scales_v, sizes.blocks - 1
        )  # fmt: skip
        l = half_of_sums(gl.zeros([ROWS, 8], gl.float32, accumulator(8)))  # [ROWS, 4]
        if D <= 128:
            s = warpgroup_mma_wait(0, [start_scores(q_tile, k_ring, count)])
            release(k_ring, count)
            scale = gl.maximum(scale_q * scale_k, LEAST_SCORE_SCALE)  # [ROWS]
            s, m = new_maximum(s, m, scale, seen, 0, CAUSAL or RAGGED)
            p = weights(s, scale, m)  # [ROWS, BLOCK_K]
            acc = gl.zeros([ROWS, D], gl.float32, accumulator(D))  # [ROWS, D]
            factor = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, accumulator(D)))
            following = gl.minimum(1, sizes.blocks - 1)
            next_k = gl.load(scales_k + following)
            next_v = gl.load(scales_v + following)
            carried = (
                rounded(p), acc, m, l, factor, scale_v, next_k, next_v
            )  # fmt: skip
            count += 1
            for j in range(1, full_end):
                carried = attend(carried, invariants, count, j, False)
                count += 1
            if CAUSAL or RAGGED:
                for j in range(gl.maximum(full_end, 1), end):
                    carried = attend(carried, invariants, count, j, True)
                    count += 1
            fours, acc, m, l, factor, unit, _next_k, _next_v = carried
            part = start_values(fours, v_ring, count - 1, 0, D)
            sums = start_sums(fours, ones)
            part, sums = warpgroup_mma_wait(0, [part, sums])  # [ROWS, D], [ROWS, 8]
            release(v_ring, count - 1)
            o_parts = (acc * factor[:, None] + part,)  # [ROWS, D]
            l += half_of_sums(sums)
        else:
            part = gl.zeros([ROWS, COLUMNS], gl.float32, layout)  # [ROWS, COLUMNS]
            acc = part, part, part, part
            carried = acc, m, l, scale_v, scale_k, scale_v
            for j in range(full_end):
                carried = attend_in_parts(carried, invariants, count, j, False)
                count += 1
            if CAUSAL or RAGGED:
                for j in range(full_end, end):
                    carried = attend_in_parts(carried, invariants, count, j, True)
                    count += 1
            o_parts, m, l, unit, _next_k, _next_v = carried
        if CAUSAL:
            count = skip(last - end, count, shared)
        l = gl.convert_layout(gl.max(l, 1), rows_layout)  # [ROWS], of equal columns
        # A query that sees no key has l = 0, O = 0 and L = -inf.
        l_safe = gl.where(l == 0.0, 1.0, l)  # [ROWS]
        lse_rows = (m - EXPONENT + gl.log2(l_safe)) * LN_2  # [ROWS]
        if scales.shift is not None:
            shift = gl.load(scales.shift + of_row, mask=i < T_q, other=0.0)
            lse_rows += shift * (scale_log2 * LN_2)
        lse_rows = gl.where(l == 0.0, -float("inf"), lse_rows)
        gl.store(lse + of_row, lse_rows, mask=i < T_q)
        inverse = gl.convert_layout(unit / l_safe, gl.SliceLayout(1, layout))  # [ROWS]
        tma.store_wait(0)  # until the tile before has left shared memory
        for n in gl.static_range(D // COLUMNS):
            o_columns = o_tile.slice(n * COLUMNS, COLUMNS, dim=1)  # [ROWS, COLUMNS]
            o_columns.store((o_parts[n] * inverse[:, None]).to(o_tile.dtype))
        fence_async_shared()
        b, h = head // sizes.H, head % sizes.H
        tma.async_copy_shared_to_global(o, [b, h, row, 0], o_tile)
        if not HOLD_Q:
            mbarrier.arrive(shared.q.empty.index(c), count=1)
        turn += 1
        n = pop(turn, shared.queue)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=EightBitSizes._fields)
def forward_kernel(
    q, k, v, o, lse, counter, scales_q, scales_k, scales_v, shift, scale_log2,
    tiles, heads, section, H, GROUP, T_q, T_k, blocks,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, tile: gl.constexpr, D: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Programs take tiles [CONSUMERS ROWS, D] of O and of L until none is left;
    scale_log2 is for base 2.
    """
    BLOCK_K: gl.constexpr = tile.BLOCK_K
    SLOTS: gl.constexpr = tile.SLOTS
    HOLD_Q: gl.constexpr = tile.HOLD_Q
    q_ring = make_ring(q.dtype, CONSUMERS, ROWS, D, 1)
    k_ring = make_ring(k.dtype, SLOTS, BLOCK_K, D, CONSUMERS)
    v_ring = make_ring(v.dtype, SLOTS, D, BLOCK_K, CONSUMERS)
    o_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], o.dtype)
    o_tiles = gl.allocate_shared_memory(o.dtype, [CONSUMERS, ROWS, D], o_layout)
    scales = Scales(scales_q, scales_k, scales_v, shift)
    sizes = EightBitSizes(tiles, heads, section, H, GROUP, T_q, T_k, blocks)
    ones = make_ones(v.dtype, BLOCK_K)  # [8, BLOCK_K]
    shared = ForwardShared(q_ring, k_ring, v_ring, make_queue(CONSUMERS), o_tiles, None)
    gl.warp_specialize([
        (consume, (0, o, lse, scales, scale_log2, sizes, shared, ones,
                   CAUSAL, RAGGED, HOLD_Q)),
        (consume, (1, o, lse, scales, scale_log2, sizes, shared, ones,
                   CAUSAL, RAGGED, HOLD_Q)),
        (produce, (q, k, v, counter, sizes, shared, CAUSAL)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


class EightBitTile(NamedTuple):
    """How a program computes: the keys of a block, the slots for blocks of K and of V,
    and whether consumers hold Q in registers.
    """

    BLOCK_K: int
    SLOTS: int
    HOLD_Q: bool


# From d = 128 on, registers hold sums in place of Q.
TILES = {
    64: EightBitTile(128, 4, True),
    128: EightBitTile(128, 4, False),
    256: EightBitTile(128, 2, False),
}
OPTIONS = {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24, "maxnreg": 168}


@plans.planned
def launch_forward(q, k, v, o, lse, scales, causal, scale, tile):
    """Launch with one EightBitTile; scale > 0, no tensor empty; scales as Scales."""
    (B, H, T_q, d), (_, H_kv, T_k, _) = q.shape, k.shape
    BLOCK_Q = CONSUMERS.value * ROWS.value
    tiles = B * H * triton.cdiv(T_q, BLOCK_Q)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    section = min(B * H, SECTION_HEADS)
    plans.launch(
        forward_kernel, q, min(tiles, processors),
        *descriptors(q, k, v, o, tile), lse, plans.zeros((1,), torch.int32, q),
        *scales, scale * LOG2_E.value,
        *EightBitSizes(
            tiles, B * H, section, H, H // H_kv, T_q, T_k, scales[1].shape[2]
        ),
        CAUSAL=causal, RAGGED=T_k % tile.BLOCK_K != 0, tile=tile, D=d,
        num_warps=4, **OPTIONS,
    )  # fmt: skip


def descriptors(q, k, v, o, tile):
    """Descriptors of tiles of Q, K, the transposed V and O."""
    from triton.experimental.gluon.nvidia import hopper

    from flashlib.kernels.descriptors import descriptor

    elements = {
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.float16: gl.float16,
        torch.bfloat16: gl.bfloat16,
    }

    def described(x, rows, cols):
        plain = descriptor(x, rows, cols)
        shape = plain.block_shape
        layout = gl.NVMMASharedLayout.get_default_for(shape, elements[x.dtype])
        return hopper.TensorDescriptor(x, plain.shape, plain.strides, shape, layout)

    d, keys = q.shape[3], tile.BLOCK_K
    return (
        described(q, ROWS.value, d), described(k, keys, d), described(v, d, keys),
        described(o, ROWS.value, d),
    )  # fmt: skip


@plans.planned
def forward(q, q_scales, k, k_scales, v, v_scales, shift, causal, scale, dtype):
    """``(o, lse)`` on a Hopper GPU of what :class:`flashlib.fp8.Quantized` holds, for
    scale > 0; o in ``dtype``, contiguous as lse.
    """
    o = q.new_empty(q.shape, dtype=dtype)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    scales = Scales(q_scales, k_scales, v_scales, shift)
    launch_forward(q, k, v, o, lse, scales, causal, scale, TILES[q.shape[3]])
    return o, lse
