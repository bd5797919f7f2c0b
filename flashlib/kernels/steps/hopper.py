"""From the Triton kernel to the Hopper kernel, one change at a time: four forward
kernels in Gluon.

Chapter *Hopper*; Shah et al., "FlashAttention-3" (NeurIPS 2024), section 3. Each step
keeps what the ones before it changed:

copies       Two groups of four warps compute 64 rows of queries each. The copy engine
             fills two slots with blocks of K and V; the warps that compute also start
             the copies.
specialized  A producer, a warp of its own, starts the copies. Barriers synchronize it
             with the consumers.
overlapped   Q K^T of the next block is started before P V of this one, which runs while
             the exponentials are computed.
turns        The consumers take turns at starting their products, so that while one
             computes exponentials the products of the other run ("ping-pong").

A program computes one tile of queries. flashlib.kernels.hopper continues from the third
step with persistent programs, which take one tile after another.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from flashlib import plans
from flashlib.kernels.descriptors import gluon_descriptor
from flashlib.kernels.gluon_forward import (
    block_counts,
    copy,
    log_sum_exp,
    make_ring,
    new_maximum,
    refill,
    release,
    start_scores,
    start_values,
    visible_keys,
    weights,
)
from flashlib.kernels.gluon_tiles import ROWS, accumulator, make_barriers
from flashlib.kernels.hopper_host import hopper_forward
from flashlib.kernels.tiles import LOG2_E, LOWEST

STEPS = ("copies", "specialized", "overlapped", "turns")
CONSUMERS = gl.constexpr(2)
BLOCK_Q = gl.constexpr(128)
# Its name in Triton 3.6, and since 3.7.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


class StepSizes(NamedTuple):
    """Query heads, query heads per head of keys, lengths."""

    H: int
    GROUP: int
    T_q: int
    T_k: int


@gluon.jit
def position(sizes, CAUSAL: gl.constexpr, BLOCK_K: gl.constexpr):
    """Batch, head and first query of this program's tile, and the block_counts of the
    tile.
    """
    T_q, T_k = sizes.T_q, sizes.T_k
    blocks = gl.cdiv(T_q, BLOCK_Q)
    head = gl.program_id(0) // blocks
    row = (blocks - 1 - gl.program_id(0) % blocks) * BLOCK_Q
    full_end, end = block_counts(row, BLOCK_Q, T_q, T_k, CAUSAL, BLOCK_K)
    return head // sizes.H, head % sizes.H, row, full_end, end


@gluon.jit
def finish(acc, m, l, o, o_tile, lse, b, h, row, sizes):
    """Divide, and store the rows of O, through shared memory, and of L."""
    # A query that sees no key has l = 0, O = 0 and L = -inf.
    lse_rows, l = log_sum_exp(m, l)  # [rows] both
    i = row + gl.arange(0, o_tile.shape[0], l.type.layout)  # [rows]
    lse += (b * sizes.H + h).to(gl.int64) * sizes.T_q
    gl.store(lse + i, lse_rows, mask=i < sizes.T_q)
    l = gl.convert_layout(l, gl.SliceLayout(1, acc.type.layout))  # [rows]
    acc = acc / l[:, None]  # [rows, D]
    o_tile.store(acc.to(o_tile.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(o, [b, h, row, 0], o_tile)
    tma.store_wait(0)


@gluon.jit
def online_softmax(s, m, l, scale_log2, seen, col, MASKED: gl.constexpr):
    """Fold the raw scores s [rows, BLOCK_K] of the keys from col on into m and l
    [rows]. Returns the weights, the factor for earlier sums, and the new m and l.
    """
    s, m_new = new_maximum(s, m, scale_log2, seen, col, MASKED)
    p, alpha = weights(s, m, m_new, scale_log2)
    return p, alpha, m_new, l * alpha + gl.sum(p, 1)


@gluon.jit
def attend_together(acc, m, l, invariants, j, end, MASKED: gl.constexpr):
    """One step of the inner loop over keys, by all warps, which then start copies into
    the slot they have read.
    """
    q_tile, k, v, b, h, k_ring, v_ring, seen, scale_log2 = invariants
    SLOTS: gl.constexpr = k_ring.slots.shape[0]
    BLOCK_K: gl.constexpr = k_ring.slots.shape[1]
    s_layout: gl.constexpr = m.type.layout.parent
    factor: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    slot, phase = j % SLOTS, j // SLOTS & 1
    unread = gl.zeros([BLOCK_Q, BLOCK_K], gl.float32, s_layout)  # [BLOCK_Q, BLOCK_K]
    mbarrier.wait(k_ring.ready.index(slot), phase)
    k_tile = k_ring.slots.index(slot).permute((1, 0))  # [D, BLOCK_K]
    s = warpgroup_mma(q_tile, k_tile, unread, use_acc=False)  # [BLOCK_Q, BLOCK_K]
    p, alpha, m, l = online_softmax(s, m, l, scale_log2, seen, j * BLOCK_K, MASKED)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))  # [BLOCK_Q]
    acc = acc * alpha[:, None]  # [BLOCK_Q, D]
    mbarrier.wait(v_ring.ready.index(slot), phase)
    p = gl.convert_layout(p.to(k_ring.slots.dtype), factor)  # [BLOCK_Q, BLOCK_K]
    acc = warpgroup_mma(p, v_ring.slots.index(slot), acc)  # [BLOCK_Q, D]
    thread_barrier()  # a slot may be refilled once all warps have read it
    if j + SLOTS < end:
        copy(k, b, h, (j + SLOTS) * BLOCK_K, k_ring, slot)
        copy(v, b, h, (j + SLOTS) * BLOCK_K, v_ring, slot)
    return acc, m, l


@gluon.jit(do_not_specialize=StepSizes._fields)
def together_kernel(
    q, k, v, o, lse, scale_log2, H, GROUP, T_q, T_k,
    CAUSAL: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """One tile of O and of L by eight warps with the same role: the step "copies"."""
    rows_layout: gl.constexpr = gl.SliceLayout(1, accumulator(BLOCK_K, 8))
    q_ring = make_ring(q.dtype, 1, BLOCK_Q, D, 0)
    k_ring = make_ring(k.dtype, SLOTS, BLOCK_K, D, 0)
    v_ring = make_ring(v.dtype, SLOTS, BLOCK_K, D, 0)
    sizes = StepSizes(H, GROUP, T_q, T_k)
    b, h, row, full_end, end = position(sizes, CAUSAL, BLOCK_K)
    copy(q, b, h, row, q_ring, 0)
    for j in gl.static_range(SLOTS):
        if j < end:
            copy(k, b, h // GROUP, j * BLOCK_K, k_ring, j)
            copy(v, b, h // GROUP, j * BLOCK_K, v_ring, j)

    seen = visible_keys(row, BLOCK_Q, T_q, T_k, CAUSAL, rows_layout)  # [BLOCK_Q]
    m = gl.full([BLOCK_Q], LOWEST, gl.float32, rows_layout)  # [BLOCK_Q], base 2
    l = gl.zeros([BLOCK_Q], gl.float32, rows_layout)  # [BLOCK_Q]
    acc = gl.zeros([BLOCK_Q, D], gl.float32, accumulator(D, 8))  # [BLOCK_Q, D]
    q_tile = q_ring.slots.index(0)  # [BLOCK_Q, D]
    mbarrier.wait(q_ring.ready.index(0), 0)
    invariants = (q_tile, k, v, b, h // GROUP, k_ring, v_ring, seen, scale_log2)
    for j in range(full_end):
        acc, m, l = attend_together(acc, m, l, invariants, j, end, False)
    for j in range(full_end, end):
        acc, m, l = attend_together(acc, m, l, invariants, j, end, True)
    finish(acc, m, l, o, q_tile, lse, b, h, row, sizes)


@gluon.jit
def produce(q, k, v, q_ring, k_ring, v_ring, sizes, CAUSAL: gl.constexpr):
    """The producer: Q once, then all blocks of K and V, each when its slot is empty."""
    SLOTS: gl.constexpr = k_ring.slots.shape[0]
    BLOCK_K: gl.constexpr = k_ring.slots.shape[1]
    b, h, row, _full_end, end = position(sizes, CAUSAL, BLOCK_K)
    for c in gl.static_range(CONSUMERS):
        copy(q, b, h, row + c * ROWS, q_ring, c)
    for j in range(end):
        slot, phase = j % SLOTS, j // SLOTS & 1
        refill(k, b, h // sizes.GROUP, j * BLOCK_K, k_ring, slot, phase)
        refill(v, b, h // sizes.GROUP, j * BLOCK_K, v_ring, slot, phase)


@gluon.jit
def attend(
    c: gl.constexpr, bits, o, m, l, invariants, j,
    MASKED: gl.constexpr, OVERLAPPED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One step of the inner loop over keys, by one consumer. If OVERLAPPED, P V is that
    of the block before.
    """
    q_tile, k_ring, v_ring, turn, seen, scale_log2 = invariants
    BLOCK_K: gl.constexpr = k_ring.slots.shape[1]
    if TURNS:
        mbarrier.wait(turn.index(c), (j + 1) & 1)
    s = start_scores(q_tile, k_ring, j)
    if OVERLAPPED:
        acc = start_values(warpgroup_mma_init(o), bits, v_ring, j - 1)
        if TURNS:
            mbarrier.arrive(turn.index(1 - c), count=1)
        s = warpgroup_mma_wait(1, [s])  # [ROWS, BLOCK_K]; P V is still running
    else:
        s = warpgroup_mma_wait(0, [s])  # [ROWS, BLOCK_K]
    release(k_ring, j)
    p, alpha, m, l = online_softmax(s, m, l, scale_log2, seen, j * BLOCK_K, MASKED)
    if OVERLAPPED:
        o = warpgroup_mma_wait(0, [acc])  # [ROWS, D]
        release(v_ring, j - 1)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))  # [ROWS]
    o = o * alpha[:, None]  # [ROWS, D]
    bits = p.to(k_ring.slots.dtype).to(gl.int16, bitcast=True)  # [ROWS, BLOCK_K]
    if not OVERLAPPED:
        acc = start_values(warpgroup_mma_init(o), bits, v_ring, j)
        o = warpgroup_mma_wait(0, [acc])  # [ROWS, D]
        release(v_ring, j)
    return bits, o, m, l


@gluon.jit
def consume(
    c: gl.constexpr, o_out, lse, scale_log2, q_ring, k_ring, v_ring, turn, sizes,
    CAUSAL: gl.constexpr, OVERLAPPED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Consumer c: rows c ROWS and following of this program's tile of O and of L."""
    BLOCK_K: gl.constexpr = k_ring.slots.shape[1]
    D: gl.constexpr = k_ring.slots.shape[2]
    s_layout: gl.constexpr = accumulator(BLOCK_K)
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    b, h, row, full_end, end = position(sizes, CAUSAL, BLOCK_K)
    row += c * ROWS
    T_q, T_k = sizes.T_q, sizes.T_k
    seen = visible_keys(row, ROWS, T_q, T_k, CAUSAL, rows_layout)  # [ROWS]
    m = gl.full([ROWS], LOWEST, gl.float32, rows_layout)  # [ROWS], base 2
    l = gl.zeros([ROWS], gl.float32, rows_layout)  # [ROWS]
    o = gl.zeros([ROWS, D], gl.float32, accumulator(D))  # [ROWS, D]
    bits = gl.zeros([ROWS, BLOCK_K], gl.int16, s_layout)  # [ROWS, BLOCK_K]
    q_tile = q_ring.slots.index(c)  # [ROWS, D]
    mbarrier.wait(q_ring.ready.index(c), 0)
    invariants = (q_tile, k_ring, v_ring, turn, seen, scale_log2)
    start = 0
    if OVERLAPPED:
        # The first block of keys; its product P V waits for the next step.
        start = 1
        s = warpgroup_mma_wait(0, [start_scores(q_tile, k_ring, 0)])
        release(k_ring, 0)
        p, _alpha, m, l = online_softmax(s, m, l, scale_log2, seen, 0, True)
        bits = p.to(k_ring.slots.dtype).to(gl.int16, bitcast=True)  # [ROWS, BLOCK_K]
    for j in range(start, full_end):
        bits, o, m, l = attend(
            c, bits, o, m, l, invariants, j, False, OVERLAPPED, TURNS
        )
    for j in range(gl.maximum(full_end, start), end):
        bits, o, m, l = attend(c, bits, o, m, l, invariants, j, True, OVERLAPPED, TURNS)
    if OVERLAPPED:
        acc = start_values(warpgroup_mma_init(o), bits, v_ring, end - 1)
        o = warpgroup_mma_wait(0, [acc])
    finish(o, m, l, o_out, q_tile, lse, b, h, row, sizes)


@gluon.jit(do_not_specialize=StepSizes._fields)
def apart_kernel(
    q, k, v, o, lse, scale_log2, H, GROUP, T_q, T_k,
    CAUSAL: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
    OVERLAPPED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One tile of O and of L by a producer and two consumers: the steps from
    "specialized" on.
    """
    q_ring = make_ring(q.dtype, CONSUMERS, ROWS, D, 0)
    k_ring = make_ring(k.dtype, SLOTS, BLOCK_K, D, CONSUMERS)
    v_ring = make_ring(v.dtype, SLOTS, BLOCK_K, D, CONSUMERS)
    turn = q_ring.ready  # not used without turns
    if TURNS:
        turn = make_barriers(CONSUMERS, 1)
        # Without this first turn both consumers would wait for ever.
        mbarrier.arrive(turn.index(0), count=1)
    sizes = StepSizes(H, GROUP, T_q, T_k)
    gl.warp_specialize([
        (consume, (0, o, lse, scale_log2, q_ring, k_ring, v_ring, turn, sizes,
                   CAUSAL, OVERLAPPED, TURNS)),
        (consume, (1, o, lse, scale_log2, q_ring, k_ring, v_ring, turn, sizes,
                   CAUSAL, OVERLAPPED, TURNS)),
        (produce, (q, k, v, q_ring, k_ring, v_ring, sizes, CAUSAL)),
    ], [4, 1], [240, 24])  # fmt: skip


# {d: (BLOCK_K, SLOTS)}, the same for all steps, since the steps are what is compared.
TILES = {64: (128, 2), 128: (128, 2), 256: (64, 2)}


@plans.planned
def launch_forward(q, k, v, o, lse, causal, scale, step):
    """Launch one step; scale > 0, no tensor empty."""
    B, H, T_q, d = q.shape
    BLOCK_K, SLOTS = TILES[d]
    programs = B * H * triton.cdiv(T_q, BLOCK_Q.value)
    rows = BLOCK_Q.value if step == "copies" else ROWS.value
    arguments = (
        gluon_descriptor(q, rows), gluon_descriptor(k, BLOCK_K),
        gluon_descriptor(v, BLOCK_K), gluon_descriptor(o, rows), lse,
        scale * LOG2_E.value, *StepSizes(H, H // k.shape[1], T_q, k.shape[2]), causal,
        BLOCK_K, d, SLOTS,
    )  # fmt: skip
    if step == "copies":
        plans.launch(together_kernel, q, programs, *arguments, num_warps=8)
    else:
        arguments += (step != "specialized", step == "turns")
        options = {"num_warps": 4, "maxnreg": 168}
        plans.launch(apart_kernel, q, programs, *arguments, **options)


@plans.planned
def forward(q, k, v, causal, scale, step):
    """O and the log-sum-exp by one of STEPS, on a Hopper GPU, of tensors that
    ``flashlib.kernels.hopper_host.tensor_refusal`` accepts.

    q ``[B, H, T_q, d]``, k and v ``[B, H_kv, T_k, d]``, float16 or bfloat16, d one of
    64, 128, 256, scale finite. Returns ``(o, lse)``: o ``[B, H, T_q, d]`` in the dtype
    of q, contiguous; lse ``[B, H, T_q]`` in float32, natural logarithm. Raises
    ValueError for an unknown step.
    """
    if step not in STEPS:
        raise ValueError(f"step: expected one of {', '.join(STEPS)}, got {step!r}")

    def fill(q, o, lse, scale):
        launch_forward(q, k, v, o, lse, causal, scale, step)

    return hopper_forward(q, k, scale, fill)
