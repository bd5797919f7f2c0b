"""From the kernel of Triton to that of Hopper, one change at a time: four forward kernels in Gluon.

Chapter *Hopper*; Shah et al., "FlashAttention-3" (NeurIPS 2024), section 3. Each step keeps what the ones
before it changed:

copies       two groups of four warps compute 64 rows of queries each. The copy engine fills two slots with
             blocks of K and V; the warps that compute also start the copies.
specialised  a producer, a warp of its own, starts the copies; barriers keep it and the consumers in step.
overlapped   Q K^T of the next block is started before P V of this one, which runs below the exponentials.
turns        the consumers take turns at starting their products, so that while one computes exponentials the
             products of the other run ("ping-pong").

A program computes one tile of queries. flashlib.kernels.hopper goes on from the third step: its programs stay
and draw tile after tile.
"""

import math

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

from flashlib.kernels import on_device
from flashlib.kernels.copies import descriptor, filled

STEPS = ("copies", "specialised", "overlapped", "turns")
LOG2_E = math.log2(math.e)
LN_2 = gl.constexpr(math.log(2.0))
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)
BLOCK_Q = gl.constexpr(128)
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its name in Triton 3.6, and since 3.7


@gluon.jit
def place(H, T_q, T_k, CAUSAL: gl.constexpr, BLOCK_K: gl.constexpr):
    """Batch, head and first query of this program's tile, how many blocks of keys all its queries see, how
    many any does.
    """
    blocks = gl.cdiv(T_q, BLOCK_Q)
    head, row = gl.program_id(0) // blocks, (blocks - 1 - gl.program_id(0) % blocks) * BLOCK_Q
    full, end = T_k // BLOCK_K, gl.cdiv(T_k, BLOCK_K)
    if CAUSAL:
        full = gl.minimum(full, gl.maximum(row + 1 + T_k - T_q, 0) // BLOCK_K)
        end = gl.minimum(end, gl.cdiv(gl.maximum(row + BLOCK_Q + T_k - T_q, 1), BLOCK_K))
    return head // H, head % H, row, full, end


@gluon.jit
def online_softmax(s, m, l, scale_log2, sight, col, MASKED: gl.constexpr):
    """Fold the raw scores s [rows, BLOCK_K] of the keys from col on into m and l [rows]; a query sees the
    keys before its sight [rows].
    """
    if MASKED:
        j = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))  # [BLOCK_K]
        s = gl.where(j[None, :] < (sight - col)[:, None], s, -float("inf"))  # [rows, BLOCK_K]
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)  # [rows]
    shift = gl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new  # [rows]
    p = gl.exp2(s * scale_log2 - shift[:, None])  # [rows, BLOCK_K]
    alpha = gl.exp2(m - shift)  # [rows]
    return p, alpha, m_new, l * alpha + gl.sum(p, 1)


@gluon.jit
def seen(row, T_q, T_k, CAUSAL: gl.constexpr, rows: gl.constexpr, layout: gl.constexpr):
    """How many keys each query from row on sees, [rows]."""
    sight = gl.full([rows], T_k, gl.int32, layout)  # [rows]
    if CAUSAL:
        sight = gl.minimum(sight, row + gl.arange(0, rows, layout) + (T_k - T_q + 1))  # [rows]
    return sight


@gluon.jit
def finish(acc, m, l, o, o_tile, lse, b, h, row, H, T_q, rows: gl.constexpr):
    """Divide, and store `rows` rows of O, by way of shared memory, and of L."""
    l = gl.where(l == 0.0, 1.0, l)  # [rows]; a query that sees no key has l = 0, O = 0 and L = -inf
    i = row + gl.arange(0, rows, l.type.layout)  # [rows]
    gl.store(lse + (b * H + h).to(gl.int64) * T_q + i, (m + gl.log2(l)) * LN_2, mask=i < T_q)
    acc = acc / gl.convert_layout(l, gl.SliceLayout(1, acc.type.layout))[:, None]  # [rows, D]
    o_tile.store(acc.to(o_tile.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(o, [b, h, row, 0], o_tile)
    tma.store_wait(0)


@gluon.jit
def copy(x, b, h, row, slots, ready, slot):
    """Start copying a tile of x into a slot."""
    mbarrier.expect(ready.index(slot), x.block_type.nbytes)
    tma.async_copy_global_to_shared(x, [b, h, row, 0], ready.index(slot), slots.index(slot))


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """n barriers whose phases each end with the count-th arrival.

    Only for use: the compiler gives the memory of a barrier that nobody waits at to a tile as well, and its
    first value may land there after the tile has.
    """
    made = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def ring(dtype: gl.constexpr, SLOTS: gl.constexpr, rows: gl.constexpr, D: gl.constexpr):
    """Slots for tiles [rows, D] in shared memory, and their barriers: (slots, ready)."""
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, D], dtype)
    return gl.allocate_shared_memory(dtype, [SLOTS, rows, D], tile), barriers(SLOTS, 1)


@gluon.jit
def attend_together(acc, m, l, q_tile, k_ring, v_ring, j, end, sight, k, v, b, h, scale_log2,
                    MASKED: gl.constexpr, SLOTS: gl.constexpr, s_layout: gl.constexpr,
                    factor: gl.constexpr):
    """One step of the inner loop over keys, by all warps, which then start copies into the slot set free."""
    k_slots, k_ready, v_slots, v_ready = k_ring[0], k_ring[1], v_ring[0], v_ring[1]
    BLOCK_K: gl.constexpr = k_slots.shape[1]
    slot, phase = j % SLOTS, j // SLOTS & 1
    nothing = gl.zeros([BLOCK_Q, BLOCK_K], gl.float32, s_layout)  # [BLOCK_Q, BLOCK_K], not read
    mbarrier.wait(k_ready.index(slot), phase)
    k_tile = k_slots.index(slot)  # [BLOCK_K, D]
    s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False)  # [BLOCK_Q, BLOCK_K]
    p, alpha, m, l = online_softmax(s, m, l, scale_log2, sight, j * BLOCK_K, MASKED)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]  # [BLOCK_Q, D]
    mbarrier.wait(v_ready.index(slot), phase)
    p = gl.convert_layout(p.to(k_slots.dtype), factor)  # [BLOCK_Q, BLOCK_K]
    acc = warpgroup_mma(p, v_slots.index(slot), acc)  # [BLOCK_Q, D]
    thread_barrier()  # a slot may be filled again once all warps are done with it
    if j + SLOTS < end:
        copy(k, b, h, (j + SLOTS) * BLOCK_K, k_slots, k_ready, slot)
        copy(v, b, h, (j + SLOTS) * BLOCK_K, v_slots, v_ready, slot)
    return acc, m, l


@gluon.jit(do_not_specialize=["H", "GROUP", "T_q", "T_k"])
def together_kernel(q, k, v, o, lse, scale_log2, H, GROUP, T_q, T_k, CAUSAL: gl.constexpr,
                    BLOCK_K: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr):
    """One tile of O and of L by eight warps that all do the same: the step "copies"."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_K, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    q_tiles, q_ready = ring(q.dtype, 1, BLOCK_Q, D)
    k_ring = ring(k.dtype, SLOTS, BLOCK_K, D)
    v_ring = ring(v.dtype, SLOTS, BLOCK_K, D)
    b, h, row, full, end = place(H, T_q, T_k, CAUSAL, BLOCK_K)
    copy(q, b, h, row, q_tiles, q_ready, 0)
    for j in gl.static_range(SLOTS):
        if j < end:
            copy(k, b, h // GROUP, j * BLOCK_K, k_ring[0], k_ring[1], j)
            copy(v, b, h // GROUP, j * BLOCK_K, v_ring[0], v_ring[1], j)

    sight = seen(row, T_q, T_k, CAUSAL, BLOCK_Q, rows_layout)  # [BLOCK_Q]
    m = gl.full([BLOCK_Q], -float("inf"), gl.float32, rows_layout)  # [BLOCK_Q], base 2
    l = gl.zeros([BLOCK_Q], gl.float32, rows_layout)  # [BLOCK_Q]
    acc = gl.zeros([BLOCK_Q, D], gl.float32, layout)  # [BLOCK_Q, D]
    q_tile = q_tiles.index(0)  # [BLOCK_Q, D]
    mbarrier.wait(q_ready.index(0), 0)
    for j in range(full):
        acc, m, l = attend_together(acc, m, l, q_tile, k_ring, v_ring, j, end, sight, k, v, b, h // GROUP,
                                    scale_log2, False, SLOTS, s_layout, factor)
    for j in range(full, end):
        acc, m, l = attend_together(acc, m, l, q_tile, k_ring, v_ring, j, end, sight, k, v, b, h // GROUP,
                                    scale_log2, True, SLOTS, s_layout, factor)
    finish(acc, m, l, o, q_tile, lse, b, h, row, H, T_q, BLOCK_Q)


@gluon.jit
def produce(q, k, v, q_ring, k_ring, v_ring, H, GROUP, T_q, T_k, CAUSAL: gl.constexpr, SLOTS: gl.constexpr):
    """The producer: Q once, then all blocks of K and V, each when its slot is free."""
    q_tiles, q_ready = q_ring
    k_slots, k_ready, k_free = k_ring
    v_slots, v_ready, v_free = v_ring
    BLOCK_K: gl.constexpr = k_slots.shape[1]
    b, h, row, _full, end = place(H, T_q, T_k, CAUSAL, BLOCK_K)
    for c in gl.static_range(CONSUMERS):
        copy(q, b, h, row + c * ROWS, q_tiles, q_ready, c)
    for j in range(end):
        slot, phase = j % SLOTS, j // SLOTS & 1
        mbarrier.wait(k_free.index(slot), phase ^ 1)
        copy(k, b, h // GROUP, j * BLOCK_K, k_slots, k_ready, slot)
        mbarrier.wait(v_free.index(slot), phase ^ 1)
        copy(v, b, h // GROUP, j * BLOCK_K, v_slots, v_ready, slot)


@gluon.jit
def scores(q_tile, k_ring, j, s_layout: gl.constexpr, SLOTS: gl.constexpr):
    """Start S = Q K^T for block j of the keys, [ROWS, BLOCK_K]."""
    k_slots, k_ready = k_ring[0], k_ring[1]
    BLOCK_K: gl.constexpr = k_slots.shape[1]
    nothing = gl.zeros([ROWS, BLOCK_K], gl.float32, s_layout)  # [ROWS, BLOCK_K], not read
    mbarrier.wait(k_ready.index(j % SLOTS), j // SLOTS & 1)
    k_tile = k_slots.index(j % SLOTS)  # [BLOCK_K, D]
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def add_values(acc, bits, v_ring, j, factor: gl.constexpr, SLOTS: gl.constexpr):
    """Start acc += P V for block j of the values, [ROWS, D]."""
    v_slots, v_ready = v_ring[0], v_ring[1]
    p = gl.convert_layout(bits.to(v_slots.dtype, bitcast=True), factor)  # [ROWS, BLOCK_K]
    mbarrier.wait(v_ready.index(j % SLOTS), j // SLOTS & 1)
    return warpgroup_mma(p, v_slots.index(j % SLOTS), acc, is_async=True)


@gluon.jit
def attend(c: gl.constexpr, bits, o, m, l, q_tile, k_ring, v_ring, turn, j, sight, scale_log2,
           MASKED: gl.constexpr, OVERLAPPED: gl.constexpr, TURNS: gl.constexpr, SLOTS: gl.constexpr,
           factor: gl.constexpr):
    """One step of the inner loop over keys, by one consumer. If OVERLAPPED, P V is of the block before."""
    s_layout: gl.constexpr = m.type.layout.parent
    dtype: gl.constexpr = k_ring[0].dtype
    BLOCK_K: gl.constexpr = k_ring[0].shape[1]
    if TURNS:
        mbarrier.wait(turn.index(c), (j + 1) & 1)
    s = scores(q_tile, k_ring, j, s_layout, SLOTS)
    if OVERLAPPED:
        acc = add_values(warpgroup_mma_init(o), bits, v_ring, j - 1, factor, SLOTS)
        if TURNS:
            mbarrier.arrive(turn.index(1 - c), count=1)
        s = warpgroup_mma_wait(1, [s])  # [ROWS, BLOCK_K]; P V goes on running
    else:
        s = warpgroup_mma_wait(0, [s])  # [ROWS, BLOCK_K]
    mbarrier.arrive(k_ring[2].index(j % SLOTS), count=1)
    p, alpha, m, l = online_softmax(s, m, l, scale_log2, sight, j * BLOCK_K, MASKED)
    if OVERLAPPED:
        o = warpgroup_mma_wait(0, [acc])  # [ROWS, D]
        mbarrier.arrive(v_ring[2].index((j - 1) % SLOTS), count=1)
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None]  # [ROWS, D]
    bits = p.to(dtype).to(gl.int16, bitcast=True)  # [ROWS, BLOCK_K]
    if not OVERLAPPED:
        acc = add_values(warpgroup_mma_init(o), bits, v_ring, j, factor, SLOTS)
        o = warpgroup_mma_wait(0, [acc])  # [ROWS, D]
        mbarrier.arrive(v_ring[2].index(j % SLOTS), count=1)
    return bits, o, m, l


@gluon.jit
def consume(c: gl.constexpr, o_out, lse, scale_log2, q_ring, k_ring, v_ring, turn, H, T_q, T_k,
            CAUSAL: gl.constexpr, OVERLAPPED: gl.constexpr, TURNS: gl.constexpr, D: gl.constexpr,
            SLOTS: gl.constexpr):
    """Consumer c: rows c ROWS and following of this program's tile of O and of L."""
    BLOCK_K: gl.constexpr = k_ring[0].shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    b, h, row, full, end = place(H, T_q, T_k, CAUSAL, BLOCK_K)
    row += c * ROWS
    sight = seen(row, T_q, T_k, CAUSAL, ROWS, rows_layout)  # [ROWS]
    m = gl.full([ROWS], -float("inf"), gl.float32, rows_layout)  # [ROWS], base 2
    l = gl.zeros([ROWS], gl.float32, rows_layout)  # [ROWS]
    o = gl.zeros([ROWS, D], gl.float32, layout)  # [ROWS, D]
    bits = gl.zeros([ROWS, BLOCK_K], gl.int16, s_layout)  # [ROWS, BLOCK_K]
    q_tile = q_ring[0].index(c)  # [ROWS, D]
    mbarrier.wait(q_ring[1].index(c), 0)
    start = 0
    if OVERLAPPED:
        # The first block of keys; its product P V waits for the next step.
        start = 1
        s = warpgroup_mma_wait(0, [scores(q_tile, k_ring, 0, s_layout, SLOTS)])  # [ROWS, BLOCK_K]
        mbarrier.arrive(k_ring[2].index(0), count=1)
        p, _alpha, m, l = online_softmax(s, m, l, scale_log2, sight, 0, True)
        bits = p.to(k_ring[0].dtype).to(gl.int16, bitcast=True)  # [ROWS, BLOCK_K]
    for j in range(start, full):
        bits, o, m, l = attend(c, bits, o, m, l, q_tile, k_ring, v_ring, turn, j, sight, scale_log2, False,
                               OVERLAPPED, TURNS, SLOTS, factor)
    for j in range(gl.maximum(full, start), end):
        bits, o, m, l = attend(c, bits, o, m, l, q_tile, k_ring, v_ring, turn, j, sight, scale_log2, True,
                               OVERLAPPED, TURNS, SLOTS, factor)
    if OVERLAPPED:
        o = warpgroup_mma_wait(0, [add_values(warpgroup_mma_init(o), bits, v_ring, end - 1, factor, SLOTS)])
    finish(o, m, l, o_out, q_tile, lse, b, h, row, H, T_q, ROWS)


@gluon.jit(do_not_specialize=["H", "GROUP", "T_q", "T_k"])
def apart_kernel(q, k, v, o, lse, scale_log2, H, GROUP, T_q, T_k, CAUSAL: gl.constexpr,
                 OVERLAPPED: gl.constexpr, TURNS: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr,
                 SLOTS: gl.constexpr):
    """One tile of O and of L by a producer and two consumers: the steps from "specialised" on."""
    q_ring = ring(q.dtype, CONSUMERS, ROWS, D)
    k_slots, k_ready = ring(k.dtype, SLOTS, BLOCK_K, D)
    v_slots, v_ready = ring(v.dtype, SLOTS, BLOCK_K, D)
    k_ring = (k_slots, k_ready, barriers(SLOTS, CONSUMERS))  # (slots, ready, free)
    v_ring = (v_slots, v_ready, barriers(SLOTS, CONSUMERS))
    turn = q_ring[1]  # stands for no turns
    if TURNS:
        turn = barriers(CONSUMERS, 1)
        mbarrier.arrive(turn.index(0), count=1)  # without this first turn both would wait for ever
    gl.warp_specialize([
        (consume, (0, o, lse, scale_log2, q_ring, k_ring, v_ring, turn, H, T_q, T_k,
                   CAUSAL, OVERLAPPED, TURNS, D, SLOTS)),
        (consume, (1, o, lse, scale_log2, q_ring, k_ring, v_ring, turn, H, T_q, T_k,
                   CAUSAL, OVERLAPPED, TURNS, D, SLOTS)),
        (produce, (q, k, v, q_ring, k_ring, v_ring, H, GROUP, T_q, T_k, CAUSAL, SLOTS)),
    ], [4, 1], [240, 24])


# {d: (BLOCK_K, SLOTS)}, the same for all steps: what is compared is the step.
TILES = {64: (128, 2), 128: (128, 2), 256: (64, 2)}


def launch(q, k, v, o, lse, causal, scale, step):
    """Launch one step; scale > 0, no tensor empty."""
    B, H, T_q, d = q.shape
    T_k = k.shape[2]
    BLOCK_K, SLOTS = TILES[d]
    grid = (B * H * triton.cdiv(T_q, BLOCK_Q.value),)
    number = STEPS.index(step)
    rows = BLOCK_Q.value if step == "copies" else ROWS.value
    arguments = (
        descriptor(q, rows), descriptor(k, BLOCK_K), descriptor(v, BLOCK_K), descriptor(o, rows), lse,
        scale * LOG2_E, H, H // k.shape[1], T_q, T_k,
    )  # fmt: skip
    tile = {"CAUSAL": causal, "BLOCK_K": BLOCK_K, "D": d, "SLOTS": SLOTS}
    with on_device(q):
        if step == "copies":
            return together_kernel[grid](*arguments, **tile, num_warps=8)
        changes = {"OVERLAPPED": number >= STEPS.index("overlapped"), "TURNS": step == "turns"}
        return apart_kernel[grid](*arguments, **tile, **changes, num_warps=4, maxnreg=168)


def forward(q, k, v, causal, scale, step):
    """O and the log-sum-exp by one of STEPS, on a Hopper GPU, of tensors that
    ``flashlib.kernels.copies.refusal`` lets through.

    q ``[B, H, T_q, d]``, k and v ``[B, H_kv, T_k, d]``, float16 or bfloat16, d one of 64, 128, 256, scale
    finite.
    Returns ``(o, lse)``: o ``[B, H, T_q, d]`` in the dtype of q, contiguous; lse ``[B, H, T_q]`` in float32,
    natural logarithm.
    Raises ValueError for an unknown step.
    """
    if step not in STEPS:
        raise ValueError(f"step: expected one of {', '.join(STEPS)}, got {step!r}")
    return filled(q, k, scale, lambda q, o, lse, scale: launch(q, k, v, o, lse, causal, scale, step))
