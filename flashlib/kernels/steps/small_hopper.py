"""The smallest forward kernel with the three ideas of Hopper: one producer, one
consumer, one head, no mask.

Chapter *Hopper*. A program computes 64 rows of O and L. Its producer is a warp that
starts the copies, its consumer a group of four warps that computes. A block of keys and
its values share a slot and its barriers. The kernels of flashlib.kernels.steps.hopper
add heads, a second consumer, masks and ragged ends.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlib.kernels.gluon_tiles import accumulator, make_barriers
from flashlib.kernels.tiles import LN_2, LOG2_E

ROWS = gl.constexpr(64)  # of queries: the height of a product of one warp group
BLOCK_K = gl.constexpr(128)
SLOTS = gl.constexpr(2)  # with one, block i + 1 waits for block i and that for i + 1


@gluon.jit
def produce(q, k, v, shared, blocks):
    """Copy Q once, and each block of K and V as soon as its slot is empty."""
    q_tile, k_slots, v_slots, q_ready, ready, empty = shared
    row = gl.program_id(0) * ROWS
    mbarrier.expect(q_ready, q.block_type.nbytes)
    tma.async_copy_global_to_shared(q, [row, 0], q_ready, q_tile)
    for i in range(blocks):
        slot, at = i % SLOTS, [i * BLOCK_K, 0]
        mbarrier.wait(empty.index(slot), (i // SLOTS + 1) & 1)
        filled = ready.index(slot)
        mbarrier.expect(filled, k.block_type.nbytes + v.block_type.nbytes)
        tma.async_copy_global_to_shared(k, at, filled, k_slots.index(slot))
        tma.async_copy_global_to_shared(v, at, filled, v_slots.index(slot))


@gluon.jit
def start_scores(q_tile, k_slots, ready, i):
    """Wait for block i, and start S = Q K^T, [ROWS, BLOCK_K]."""
    mbarrier.wait(ready.index(i % SLOTS), i // SLOTS & 1)
    k_tile = k_slots.index(i % SLOTS).permute((1, 0))  # [D, BLOCK_K]
    s = gl.zeros([ROWS, BLOCK_K], gl.float32, accumulator(BLOCK_K))
    return warpgroup_mma(q_tile, k_tile, s, use_acc=False, is_async=True)


@gluon.jit
def start_values(acc, bits, v_slots, i):
    """Start acc += P V, [ROWS, D], for block i."""
    factor: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    p = gl.convert_layout(bits.to(v_slots.dtype, bitcast=True), factor)
    acc = warpgroup_mma_init(acc)
    return warpgroup_mma(p, v_slots.index(i % SLOTS), acc, is_async=True)


@gluon.jit
def online_softmax(s, m, l, scale_log2, dtype: gl.constexpr):
    """The bits of the weights, the factor of earlier sums, and the new m and l."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - m_new[:, None])  # [ROWS, BLOCK_K]
    alpha = gl.exp2(m - m_new)
    # Integers, since Triton 3.6 and 3.7 swap 16-bit floats that a loop carries.
    bits = p.to(dtype).to(gl.int16, bitcast=True)
    return bits, alpha, m_new, l * alpha + gl.sum(p, 1)


@gluon.jit
def consume(o, lse, scale_log2, shared, blocks, D: gl.constexpr):
    """The softmax of block i under the output of block i - 1."""
    q_tile, k_slots, v_slots, q_ready, ready, empty = shared
    dtype: gl.constexpr = v_slots.dtype
    layout: gl.constexpr = accumulator(D)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    s_rows: gl.constexpr = gl.SliceLayout(1, accumulator(BLOCK_K))
    m = gl.full([ROWS], -float("inf"), gl.float32, s_rows)  # in base 2
    l = gl.zeros([ROWS], gl.float32, s_rows)
    acc = gl.zeros([ROWS, D], gl.float32, layout)
    mbarrier.wait(q_ready, 0)
    s = warpgroup_mma_wait(0, [start_scores(q_tile, k_slots, ready, 0)])
    bits, alpha, m, l = online_softmax(s, m, l, scale_log2, dtype)
    for i in range(1, blocks):
        s = start_scores(q_tile, k_slots, ready, i)
        running = start_values(acc, bits, v_slots, i - 1)
        s = warpgroup_mma_wait(1, [s])  # P V is still running
        bits, alpha, m, l = online_softmax(s, m, l, scale_log2, dtype)
        acc = warpgroup_mma_wait(0, [running])
        mbarrier.arrive(empty.index((i - 1) % SLOTS), count=1)
        acc = acc * gl.convert_layout(alpha, rows)[:, None]
    acc = warpgroup_mma_wait(0, [start_values(acc, bits, v_slots, blocks - 1)])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, rows)
    offsets = row[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    acc = acc / gl.convert_layout(l, rows)[:, None]
    gl.store(o + offsets, acc.to(dtype))
    gl.store(lse + row, gl.convert_layout((m + gl.log2(l)) * LN_2, rows))


@gluon.jit
def small_kernel(q, k, v, o, lse, scale_log2, blocks, D: gl.constexpr):
    """ROWS rows of O and L, by four warps that compute and one that copies."""
    q_tile = gl.allocate_shared_memory(q.dtype, [ROWS, D], q.layout)
    k_slots = gl.allocate_shared_memory(k.dtype, [SLOTS, BLOCK_K, D], k.layout)
    v_slots = gl.allocate_shared_memory(v.dtype, [SLOTS, BLOCK_K, D], v.layout)
    q_ready = make_barriers(1, 1).index(0)
    ready, empty = make_barriers(SLOTS, 1), make_barriers(SLOTS, 1)
    shared = q_tile, k_slots, v_slots, q_ready, ready, empty
    gl.warp_specialize([
        (consume, (o, lse, scale_log2, shared, blocks, D)),
        (produce, (q, k, v, shared, blocks)),
    ], [1], [24])  # fmt: skip


def launch(q, k, v, o, lse, scale):
    """Launch the kernel for q [T_q, d], k and v [T_k, d], contiguous; T_q is a multiple
    of 64 and T_k of 128, scale > 0.
    """
    T_q, d = q.shape
    element = gl.float16 if q.dtype == torch.float16 else gl.bfloat16

    def described(x, rows):
        layout = gl.NVMMASharedLayout.get_default_for([rows, d], element)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, d], layout)

    keys, values = described(k, BLOCK_K.value), described(v, BLOCK_K.value)
    tensors = described(q, ROWS.value), keys, values, o, lse
    blocks = len(k) // BLOCK_K.value
    grid = (T_q // ROWS.value,)
    small_kernel[grid](*tensors, scale * LOG2_E.value, blocks, d, num_warps=4)
