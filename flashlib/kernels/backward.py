"""The backward pass without any T x T matrix: P is computed again, block by block, from Q, K and L.

Chapter *The backward pass*; Dao et al., "FlashAttention" (NeurIPS 2022), Algorithm 4, and Dao,
"FlashAttention-2" (ICLR 2024), Algorithm 2. A first kernel writes D = rowsum(dO o O)
(``eq-gradients-delta``) and L in base 2. P_ij = exp(S_ij - L_i) then needs neither a maximum nor a sum, and
the rest stands in the chapter *Gradients by hand*: dV = P^T dO, dP = dO V^T, dS = P o (dP - D),
dQ = scale dS K, dK = scale dS^T Q.

There are two forms. Split: one kernel owns a block of keys and collects dK and dV from every query that sees
it, another owns a block of queries and collects dQ. Every sum is made in one place and in one order, so two
runs agree in every bit; S and dP are computed twice, seven products in all. Fused: the kernel that owns a
block of keys also adds its part of dQ to a buffer in memory, by atomic additions. That makes five products,
but the order of these additions is the order in which programs happen to run.

Blocks whose queries all see all keys are read without a mask. Blocks of which no query sees a key are never
read.
"""

import math

import torch
import triton
import triton.language as tl

from flashlib.kernels import on_device, padded, widened
from flashlib.kernels.launch import Configuration, configuration, descriptor, value_columns
from flashlib.kernels.tiles import add_tile, load_tile, probabilities, store_tile, visible

LOG2_E = math.log2(math.e)
LOG2_E_IN_KERNEL = tl.constexpr(LOG2_E)


@triton.jit
def delta_kernel(do, do_strides, o, o_strides, lse, lse_strides, dlse, dlse_strides, delta, lse2,
                 H, T, ROWS, d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program writes D_i = sum_k dO_ik O_ik - dL_i, and L_i in base 2, for a block of rows.

    A head has ROWS rows, a multiple of BLOCK_T, of which those from T on are padding.
    """
    blocks = ROWS // BLOCK_T
    row, head = tl.program_id(0) % blocks * BLOCK_T, tl.program_id(0) // blocks
    b, h = head // H, head % H
    i = (row + tl.arange(0, BLOCK_T)).to(tl.int64)  # [BLOCK_T]
    do_tile = load_tile(do, do_strides, b, h, row, 0, T, d, BLOCK_T, BLOCK_D)  # [BLOCK_T, BLOCK_D]
    o_tile = load_tile(o, o_strides, b, h, row, 0, T, d, BLOCK_T, BLOCK_D)  # [BLOCK_T, BLOCK_D]
    lse += b.to(tl.int64) * lse_strides[0] + h.to(tl.int64) * lse_strides[1]
    dlse += b.to(tl.int64) * dlse_strides[0] + h.to(tl.int64) * dlse_strides[1]
    lse_rows = tl.load(lse + i * lse_strides[2], mask=i < T, other=-float("inf"))  # [BLOCK_T], natural
    dlse_rows = tl.load(dlse + i * dlse_strides[2], mask=i < T, other=0.0)  # [BLOCK_T]
    # A query that sees no key has L = -inf, which would make its row of P infinite. With +inf the row is
    # zero, and so is that of padding.
    blind = lse_rows == -float("inf")  # [BLOCK_T]
    lse2_rows = tl.where(blind, float("inf"), lse_rows * LOG2_E_IN_KERNEL)  # [BLOCK_T]
    products = do_tile.to(tl.float32) * o_tile.to(tl.float32)  # [BLOCK_T, BLOCK_D]
    rows = head.to(tl.int64) * ROWS + i  # [BLOCK_T]
    tl.store(delta + rows, tl.sum(products, 1) - dlse_rows)
    tl.store(lse2 + rows, lse2_rows)


@triton.jit
def collect(dk, dv, k_tile, v_tile, q, q_strides, do, do_strides, delta, lse2, b, h, row, first,
            scale_log2, T_q, d, d_v, MASKED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
            BLOCK_DV: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """One step of the inner loop over queries: the block that starts at row adds to dK and dV; dS too.

    The matrices of scores stand transposed, keys in rows, as P^T and dS^T meet dO and Q.
    """
    i = row + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    q_tile = load_tile(q, q_strides, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D, DESCRIPTOR)  # [BLOCK_Q, BLOCK_D]
    do_tile = load_tile(do, do_strides, b, h, row, 0, T_q, d_v,
                        BLOCK_Q, BLOCK_DV, DESCRIPTOR)  # [BLOCK_Q, BLOCK_DV]
    lse_rows = tl.load(lse2 + i)  # [BLOCK_Q]
    d_rows = tl.load(delta + i)  # [BLOCK_Q]
    s = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q], unscaled
    seen = first[:, None] <= i[None, :]  # [BLOCK_K, BLOCK_Q], used where MASKED
    p = probabilities(s, lse_rows[None, :], scale_log2, seen, MASKED)  # [BLOCK_K, BLOCK_Q]
    dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision="ieee")  # [BLOCK_K, BLOCK_DV]
    dp = tl.dot(v_tile, do_tile.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q]
    ds = (p * (dp - d_rows[None, :])).to(q_tile.dtype)  # [BLOCK_K, BLOCK_Q]
    dk = tl.dot(ds, q_tile, dk, input_precision="ieee")  # [BLOCK_K, BLOCK_D], unscaled
    return dk, dv, ds


@triton.jit
def bounds(col, T_q, T_k, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """With the mask, queries before `start` see no key of the block at col, those from `full` on see all."""
    start = tl.maximum(col + T_q - T_k, 0) // BLOCK_Q * BLOCK_Q
    full = tl.cdiv(tl.maximum(col + BLOCK_K - 1 + T_q - T_k, 0), BLOCK_Q) * BLOCK_Q
    return start, full


@triton.jit
def following(h, row, first, end, BLOCK_Q: tl.constexpr):
    """The block of queries after the one at row of head h: the next one before end, or the next head's
    first.
    """
    row += BLOCK_Q
    return tl.where(row < end, h, h + 1), tl.where(row < end, row, first)


@triton.jit
def keys_kernel(q, q_strides, k, k_strides, v, v_strides, do, do_strides, delta, lse2,
                dk, dk_strides, dv, dv_strides, scale, scale_log2, H_kv, GROUP, ROWS, T_q, T_k, d, d_v,
                CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_DV: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """One program writes one block of rows of dK and of dV, from all queries of the group that see them.

    Rows after the last key are computed like the others, and not stored.
    """
    blocks = tl.cdiv(T_k, BLOCK_K)
    # With a causal mask the first blocks of keys are seen by the most queries: the longest start first.
    col = tl.program_id(0) % blocks * BLOCK_K
    head = tl.program_id(0) // blocks
    b, h_kv = head // H_kv, head % H_kv

    first = col + T_q - T_k + tl.arange(0, BLOCK_K)  # [BLOCK_K], the first query that sees a key
    start, full = 0, 0
    if CAUSAL:
        start, full = bounds(col, T_q, T_k, BLOCK_Q, BLOCK_K)
        # With 256 columns there are no registers for a second loop: every block is masked.
        full = T_q if BLOCK_D > 128 else full

    k_tile = load_tile(k, k_strides, b, h_kv, col, 0, T_k, d,
                       BLOCK_K, BLOCK_D, DESCRIPTOR)  # [BLOCK_K, BLOCK_D]
    v_tile = load_tile(v, v_strides, b, h_kv, col, 0, T_k, d_v,
                       BLOCK_K, BLOCK_DV, DESCRIPTOR)  # [BLOCK_K, BLOCK_DV]
    dk_acc = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)  # [BLOCK_K, BLOCK_D]
    dv_acc = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)  # [BLOCK_K, BLOCK_DV]
    # One loop over all heads of the group: a loop around the loop would take fifty registers.
    if CAUSAL:
        h, row, last = h_kv * GROUP, start, tl.minimum(full, T_q)
        for _ in tl.range(0, GROUP * tl.cdiv(last - start, BLOCK_Q)):
            rows = (b * H_kv * GROUP + h).to(tl.int64) * ROWS
            dk_acc, dv_acc, _ = collect(
                dk_acc, dv_acc, k_tile, v_tile, q, q_strides, do, do_strides, delta + rows, lse2 + rows,
                b, h, row, first, scale_log2, T_q, d, d_v, True, BLOCK_Q, BLOCK_D, BLOCK_DV, DESCRIPTOR)
            h, row = following(h, row, start, last, BLOCK_Q)
    if not CAUSAL or BLOCK_D <= 128:
        h, row, steps = h_kv * GROUP, full, GROUP * tl.cdiv(T_q - full, BLOCK_Q)
        # Without a mask there is at least one step. Where the compiler cannot tell, it copies dK and dV for a
        # loop that is skipped, and ptxas then waits for every single product.
        for _ in tl.range(0, steps if CAUSAL else tl.maximum(steps, 1)):
            rows = (b * H_kv * GROUP + h).to(tl.int64) * ROWS
            dk_acc, dv_acc, _ = collect(
                dk_acc, dv_acc, k_tile, v_tile, q, q_strides, do, do_strides, delta + rows, lse2 + rows,
                b, h, row, first, scale_log2, T_q, d, d_v, False, BLOCK_Q, BLOCK_D, BLOCK_DV, DESCRIPTOR)
            h, row = following(h, row, full, T_q, BLOCK_Q)
    store_tile(dk, dk_strides, dk_acc * scale, b, h_kv, col, 0, T_k, d, BLOCK_K, BLOCK_D)
    store_tile(dv, dv_strides, dv_acc, b, h_kv, col, 0, T_k, d_v, BLOCK_K, BLOCK_DV)


@triton.jit
def fused_kernel(q, q_strides, k, k_strides, v, v_strides, do, do_strides, delta, lse2, dq, dq_strides,
                 dk, dk_strides, dv, dv_strides, scale, scale_log2, H_kv, GROUP, ROWS, T_q, T_k, d, d_v,
                 CAUSAL: tl.constexpr, RAGGED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                 BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """As keys_kernel; and every step adds scale dS K to a block of dQ in memory, where zeros stood.

    In that sum rows after the last key have no part.
    """
    blocks = tl.cdiv(T_k, BLOCK_K)
    col = tl.program_id(0) % blocks * BLOCK_K
    head = tl.program_id(0) // blocks
    b, h_kv = head // H_kv, head % H_kv

    j = col + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    first = j + T_q - T_k  # [BLOCK_K]
    start, full = 0, 0
    if CAUSAL:
        start, full = bounds(col, T_q, T_k, BLOCK_Q, BLOCK_K)

    k_tile = load_tile(k, k_strides, b, h_kv, col, 0, T_k, d,
                       BLOCK_K, BLOCK_D, DESCRIPTOR)  # [BLOCK_K, BLOCK_D]
    v_tile = load_tile(v, v_strides, b, h_kv, col, 0, T_k, d_v,
                       BLOCK_K, BLOCK_DV, DESCRIPTOR)  # [BLOCK_K, BLOCK_DV]
    dk_acc = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)  # [BLOCK_K, BLOCK_D]
    dv_acc = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)  # [BLOCK_K, BLOCK_DV]
    if CAUSAL:
        h, row, last = h_kv * GROUP, start, tl.minimum(full, T_q)
        for _ in tl.range(0, GROUP * tl.cdiv(last - start, BLOCK_Q)):
            rows = (b * H_kv * GROUP + h).to(tl.int64) * ROWS
            dk_acc, dv_acc, ds = collect(
                dk_acc, dv_acc, k_tile, v_tile, q, q_strides, do, do_strides, delta + rows, lse2 + rows,
                b, h, row, first, scale_log2, T_q, d, d_v, True, BLOCK_Q, BLOCK_D, BLOCK_DV, DESCRIPTOR)
            dq_tile = tl.dot(ds.T, k_tile, input_precision="ieee")  # [BLOCK_Q, BLOCK_D]
            add_tile(dq, dq_strides, dq_tile * scale, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D)
            h, row = following(h, row, start, last, BLOCK_Q)
    h, row, steps = h_kv * GROUP, full, GROUP * tl.cdiv(T_q - full, BLOCK_Q)
    for _ in tl.range(0, steps if CAUSAL else tl.maximum(steps, 1)):
        rows = (b * H_kv * GROUP + h).to(tl.int64) * ROWS
        dk_acc, dv_acc, ds = collect(
            dk_acc, dv_acc, k_tile, v_tile, q, q_strides, do, do_strides, delta + rows, lse2 + rows,
            b, h, row, first, scale_log2, T_q, d, d_v, False, BLOCK_Q, BLOCK_D, BLOCK_DV, DESCRIPTOR)
        if RAGGED:
            ds = tl.where((j < T_k)[:, None], ds, 0.0)  # [BLOCK_K, BLOCK_Q]
        dq_tile = tl.dot(ds.T, k_tile, input_precision="ieee")  # [BLOCK_Q, BLOCK_D]
        add_tile(dq, dq_strides, dq_tile * scale, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D)
        h, row = following(h, row, full, T_q, BLOCK_Q)
    store_tile(dk, dk_strides, dk_acc * scale, b, h_kv, col, 0, T_k, d, BLOCK_K, BLOCK_D)
    store_tile(dv, dv_strides, dv_acc, b, h_kv, col, 0, T_k, d_v, BLOCK_K, BLOCK_DV)


@triton.jit
def descend(dq, q_tile, do_tile, d_rows, lse_rows, k, k_strides, v, v_strides, b, h, i, j, scale_log2,
            T_q, T_k, d, d_v, CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK_K: tl.constexpr,
            BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """One step of the inner loop over keys: the block that starts at j adds to dQ."""
    k_tile = load_tile(k, k_strides, b, h, j, 0, T_k, d, BLOCK_K, BLOCK_D, DESCRIPTOR)  # [BLOCK_K, BLOCK_D]
    v_tile = load_tile(v, v_strides, b, h, j, 0, T_k, d_v,
                       BLOCK_K, BLOCK_DV, DESCRIPTOR)  # [BLOCK_K, BLOCK_DV]
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K], unscaled
    seen = visible(i, j + tl.arange(0, BLOCK_K), T_q, T_k, CAUSAL)  # [BLOCK_Q, BLOCK_K], used where MASKED
    p = probabilities(s, lse_rows[:, None], scale_log2, seen, MASKED)  # [BLOCK_Q, BLOCK_K]
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
    ds = (p * (dp - d_rows[:, None])).to(k_tile.dtype)  # [BLOCK_Q, BLOCK_K]
    return tl.dot(ds, k_tile, dq, input_precision="ieee")  # [BLOCK_Q, BLOCK_D], unscaled


@triton.jit
def queries_kernel(q, q_strides, k, k_strides, v, v_strides, do, do_strides, delta, lse2, dq, dq_strides,
                   scale, scale_log2, H, GROUP, ROWS, T_q, T_k, d, d_v,
                   CAUSAL: tl.constexpr, RAGGED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """One program writes one block of rows of dQ, from all keys that these rows see."""
    blocks = tl.cdiv(T_q, BLOCK_Q)
    # With a causal mask the last blocks of queries see the most keys: the longest start first.
    block = blocks - 1 - tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks
    b, h = head // H, head % H

    row = block * BLOCK_Q
    i = row + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    # Keys before `full` are seen by every query of the block, keys from `end` on by none.
    full, end = T_k // BLOCK_K * BLOCK_K, T_k
    if CAUSAL:
        full = tl.minimum(full, tl.maximum(row + 1 + T_k - T_q, 0) // BLOCK_K * BLOCK_K)
        end = tl.minimum(end, tl.maximum(row + BLOCK_Q + T_k - T_q, 0))

    q_tile = load_tile(q, q_strides, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D, DESCRIPTOR)  # [BLOCK_Q, BLOCK_D]
    do_tile = load_tile(do, do_strides, b, h, row, 0, T_q, d_v,
                        BLOCK_Q, BLOCK_DV, DESCRIPTOR)  # [BLOCK_Q, BLOCK_DV]
    rows = head.to(tl.int64) * ROWS + i  # [BLOCK_Q]
    lse_rows = tl.load(lse2 + rows)  # [BLOCK_Q]
    d_rows = tl.load(delta + rows)  # [BLOCK_Q]
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)  # [BLOCK_Q, BLOCK_D]
    for j in tl.range(0, full, BLOCK_K):
        acc = descend(acc, q_tile, do_tile, d_rows, lse_rows, k, k_strides, v, v_strides, b, h // GROUP,
                      i, j, scale_log2, T_q, T_k, d, d_v,
                      CAUSAL, False, BLOCK_K, BLOCK_D, BLOCK_DV, DESCRIPTOR)  # [BLOCK_Q, BLOCK_D]
    if CAUSAL or RAGGED:
        for j in tl.range(full, end, BLOCK_K):
            acc = descend(acc, q_tile, do_tile, d_rows, lse_rows, k, k_strides, v, v_strides, b, h // GROUP,
                          i, j, scale_log2, T_q, T_k, d, d_v,
                          CAUSAL, True, BLOCK_K, BLOCK_D, BLOCK_DV, DESCRIPTOR)  # [BLOCK_Q, BLOCK_D]
    store_tile(dq, dq_strides, acc * scale, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D)


# The rows for 16 bits compile without spills, save where tests/test_compile_backward.py names one, and with
# products that overlap what comes between them. Those with descriptors are the fastest of a sweep on an H200:
# a program keeps dK and dV, or dQ, in registers beside the scores, so tiles have about 64 rows. The others
# fit 99 KiB of shared memory. Without tensor cores (float32, whose products are
# exact, and sm_75, for which Triton has none) tiles are small: every factor passes through registers.
TENSOR_CORES = (80, 86, 89, 90, 100, 120)
SMALL = (
    Configuration((75,), 16, 256, 16, 16, 8, 1, False, 50_000),
    Configuration((75, *TENSOR_CORES), 32, 64, 32, 32, 8, 1, False, 37_000),
    Configuration((75, *TENSOR_CORES), 32, 128, 16, 32, 8, 1, False, 52_000),
    Configuration(TENSOR_CORES, 32, 256, 16, 16, 8, 1, False, 67_000),
)
KEYS = (
    Configuration((90,), 16, 64, 64, 64, 4, 3, True, 68_000),
    Configuration((90,), 16, 128, 64, 64, 4, 2, True, 100_000),
    Configuration((90,), 16, 256, 64, 64, 8, 2, True, 198_000),
    Configuration(TENSOR_CORES, 16, 64, 32, 64, 4, 2, False, 101_000),
    Configuration(TENSOR_CORES, 16, 128, 32, 64, 8, 2, False, 101_000),
    Configuration(TENSOR_CORES, 16, 256, 32, 32, 8, 1, False, 101_000),
    *SMALL,
    Configuration((75,), 32, 256, 16, 8, 8, 1, False, 50_000),
)
QUERIES = (
    Configuration((90,), 16, 64, 64, 64, 4, 3, True, 68_000, causal=False),
    Configuration((90,), 16, 64, 64, 64, 4, 2, True, 51_000, causal=True),
    Configuration((90,), 16, 128, 128, 64, 8, 3, True, 165_000),
    Configuration((90,), 16, 256, 64, 32, 4, 3, True, 165_000),
    Configuration(TENSOR_CORES, 16, 64, 64, 64, 4, 2, False, 101_000),
    Configuration((80, 86, 89, 90, 120), 16, 128, 64, 64, 8, 2, False, 101_000),
    Configuration((100,), 16, 128, 64, 64, 8, 2, False, 116_000),
    Configuration(TENSOR_CORES, 16, 256, 32, 32, 8, 1, False, 101_000),
    *SMALL,
    Configuration((75,), 32, 256, 16, 16, 8, 1, False, 65_536),
)
# More rows of keys to a program mean fewer additions to dQ in memory; the product that makes them takes room.
# In float32 with d = 256 that room is more than sm_75 has: there the fused form is refused.
FUSED = (
    Configuration((90,), 16, 64, 64, 64, 4, 3, True, 84_000),
    Configuration((90,), 16, 128, 32, 128, 8, 2, True, 107_000),
    Configuration(TENSOR_CORES, 16, 64, 32, 64, 4, 2, False, 101_000),
    Configuration(TENSOR_CORES, 16, 128, 32, 64, 8, 2, False, 101_000),
    Configuration(TENSOR_CORES, 16, 256, 32, 32, 8, 1, False, 101_000),
    *SMALL,
)
LARGEST_BLOCK_Q = max(row.BLOCK_Q for row in (*KEYS, *QUERIES, *FUSED))


def launch_delta(o, lse, do, dlse, delta, lse2):
    """Launch the kernel that fills delta and lse2, contiguous [B, H, ROWS] in float32, from the tensors
    [B, H, T_q, d_v] and [B, H, T_q] of the forward pass and their gradients.
    """
    B, H, T_q, d_v = o.shape
    ROWS = delta.shape[2]
    with on_device(o):
        return delta_kernel[(B * H * ROWS // 32,)](
            do, do.stride(), o, o.stride(), lse, lse.stride(), dlse, dlse.stride(), delta, lse2,
            H, T_q, ROWS, d_v, BLOCK_T=32, BLOCK_D=padded(d_v),
        )  # fmt: skip


def launch_keys(q, k, v, do, delta, lse2, dq, dk, dv, causal, scale, config):
    """Launch the kernel that fills dk and dv, in the shapes of k and v; where dq is not None, the fused one,
    which adds to dq.
    """
    B, _, T_q, d = q.shape
    _, H_kv, T_k, d_v = v.shape
    kernel, results, compiled_for = keys_kernel, (dk, dk.stride(), dv, dv.stride()), {}
    if dq is not None:
        kernel, results = fused_kernel, (dq, dq.stride(), *results)
        compiled_for = {"RAGGED": T_k % config.BLOCK_K != 0}
    with on_device(q):
        return kernel[(B * H_kv * triton.cdiv(T_k, config.BLOCK_K),)](
            *operands(q, k, v, do, config), delta, lse2, *results, scale, scale * LOG2_E,
            H_kv, q.shape[1] // H_kv, delta.shape[2], T_q, T_k, d, d_v,
            **compiled_for, **constants(causal, d, d_v, config),
        )  # fmt: skip


def launch_queries(q, k, v, do, delta, lse2, dq, causal, scale, config):
    """Launch the kernel that fills dq, [B, H, T_q, d]; delta and lse2 as launch_delta fills them."""
    B, H, T_q, d = q.shape
    _, H_kv, T_k, d_v = v.shape
    with on_device(q):
        return queries_kernel[(B * H * triton.cdiv(T_q, config.BLOCK_Q),)](
            *operands(q, k, v, do, config), delta, lse2, dq, dq.stride(), scale, scale * LOG2_E,
            H, H // H_kv, delta.shape[2], T_q, T_k, d, d_v, RAGGED=T_k % config.BLOCK_K != 0,
            **constants(causal, d, d_v, config),
        )  # fmt: skip


def operands(q, k, v, do, config):
    """The four tensors that every kernel reads, each with its strides."""
    BLOCK_D, BLOCK_DV = columns(q.shape[3], v.shape[3])
    rows = (config.BLOCK_Q, config.BLOCK_K, config.BLOCK_K, config.BLOCK_Q)
    widths = (BLOCK_D, BLOCK_D, BLOCK_DV, BLOCK_DV)
    found = []
    for x, *tile in zip((q, k, v, do), rows, widths, strict=True):
        found += [descriptor(x, *tile) if config.descriptor else x, x.stride()]
    return found


def columns(d, d_v):
    """The padded widths of tiles of q, k and of v, do. In the backward pass both are second factors, and as
    narrow beside the other as flashlib.kernels.launch.value_columns allows.
    """
    return value_columns(d_v, d), value_columns(d, d_v)


def constants(causal, d, d_v, config):
    """What every kernel is compiled for."""
    BLOCK_D, BLOCK_DV = columns(d, d_v)
    return {
        "CAUSAL": causal,
        "BLOCK_Q": config.BLOCK_Q,
        "BLOCK_K": config.BLOCK_K,
        "BLOCK_D": BLOCK_D,
        "BLOCK_DV": BLOCK_DV,
        "DESCRIPTOR": config.descriptor,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def backward(q, k, v, o, lse, do, dlse, causal, scale, deterministic=True):
    """``(dq, dk, dv)`` in the shapes and dtypes of q, k, v, contiguous, without any T x T matrix.

    q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]``, v ``[B, H_kv, T_k, d_v]``; o ``[B, H, T_q, d_v]`` and
    lse ``[B, H, T_q]`` (float32, natural logarithm) as the forward gave them; do and dlse, the gradients with
    respect to o and lse, in their shapes; any strides, scale finite.
    deterministic: the split form, the same in every bit on every run; otherwise the fused form, whose dQ is
    added up in a float32 buffer in no particular order.
    A query that sees no key takes and gives exactly nothing; dK and dV are summed over the heads of a group.
    Raises ValueError where no configuration fits the device. On a CPU bfloat16 is widened to float32 and the
    results rounded.
    """
    dtype = q.dtype
    q, k, v, o, do = widened(q, k, v, o, do)
    B, H, T_q, _ = q.shape
    # Padding after the last row, so that a block of queries needs no mask for its D and L.
    rows = triton.cdiv(T_q, LARGEST_BLOCK_Q) * LARGEST_BLOCK_Q
    delta, lse2 = (torch.empty(B, H, rows, dtype=torch.float32, device=q.device) for _ in range(2))
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    if deterministic:
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)

    tensors = (q, k, v, do)
    if delta.numel():
        launch_delta(o, lse, do, dlse, delta, lse2)
    if not T_q:
        dk.zero_()
        dv.zero_()
    elif dk.numel():
        table = KEYS if deterministic else FUSED
        config = configuration("backward, dK and dV", table, tensors, causal)
        added = None if deterministic else dq
        launch_keys(q, k, v, do, delta, lse2, added, dk, dv, causal, scale, config)
    if dq.numel() and deterministic:
        config = configuration("backward, dQ", QUERIES, tensors, causal)
        launch_queries(q, k, v, do, delta, lse2, dq, causal, scale, config)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
