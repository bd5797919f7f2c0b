"""FlashAttention, forward: keys outside, queries inside, O divided and stored at every step.

Chapter *FlashAttention*; Dao et al., "FlashAttention" (NeurIPS 2022), Algorithm 1. A program owns one head:
the first FlashAttention is parallel over batch and heads only (Dao, "FlashAttention-2", ICLR 2024, section
3.2). It takes a block of keys and values and walks over the queries with it. What is known of a query, its
output O, maximum m and normaliser l, lies in device memory, is read and written at every step, and is final
when the last block of keys has passed. Nothing of size T x T exists.

Blocks of queries that see some keys of the block are read with a mask, those that see every key without.
Blocks of queries that see none are never read.
"""

import math

import torch
import triton
import triton.language as tl

from flashlib.kernels import INTERPRETED, on_device, padded, widened
from flashlib.kernels.launch import value_columns
from flashlib.kernels.tiles import load_tile, online_softmax, store_tile, visible

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@triton.jit
def attend(o, o_strides, m, l, q, q_strides, k_tile, v_tile, b, h, row, j, scale_log2, T_q, T_k, d, d_v,
           CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
           BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):
    """One step of the inner loop: the block of queries that starts at row."""
    i = row + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    q_tile = load_tile(q, q_strides, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
    acc = load_tile(o, o_strides, b, h, row, 0, T_q, d_v, BLOCK_Q, BLOCK_DV)  # [BLOCK_Q, BLOCK_DV]
    m_old = tl.load(m + i, mask=i < T_q, other=-float("inf"))  # [BLOCK_Q], base 2
    l_old = tl.load(l + i, mask=i < T_q, other=0.0)  # [BLOCK_Q]
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K], unscaled
    seen = visible(i, j + tl.arange(0, BLOCK_K), T_q, T_k, CAUSAL)  # [BLOCK_Q, BLOCK_K], used where MASKED
    p, alpha, m_new, l_new = online_softmax(s, m_old, l_old, scale_log2, seen, MASKED)
    acc = acc * (l_old * alpha)[:, None]  # [BLOCK_Q, BLOCK_DV], no longer divided
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")  # [BLOCK_Q, BLOCK_DV]
    l_safe = tl.where(l_new == 0.0, 1.0, l_new)  # [BLOCK_Q]; a query that has seen no key has l = 0 and O = 0
    # Divided as often as stored: the approximate division of a GPU would be off by a unit each time.
    acc = tl.div_rn(acc, l_safe[:, None])  # [BLOCK_Q, BLOCK_DV]
    # A thread may store what another one loads: all have loaded before any stores.
    tl.debug_barrier()
    store_tile(o, o_strides, acc, b, h, row, 0, T_q, d_v, BLOCK_Q, BLOCK_DV)
    tl.store(m + i, m_new, mask=i < T_q)
    tl.store(l + i, l_new, mask=i < T_q)


@triton.jit
def forward_kernel(q, q_strides, k, k_strides, v, v_strides, o, o_strides, m, l, scale_log2,
                   H, GROUP, T_q, T_k, d, d_v,
                   CAUSAL: tl.constexpr, RAGGED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):
    """One program updates O, m and l of one head in place, once for every block of keys that a query sees."""
    head = tl.program_id(0)
    b, h = head // H, head % H
    m += head.to(tl.int64) * T_q
    l += head.to(tl.int64) * T_q

    for j in tl.range(0, T_k, BLOCK_K):
        # Queries before `start` see no key of the block, queries from `full` on see every one.
        start, full = 0, 0
        if CAUSAL:
            start = tl.maximum(j + T_q - T_k, 0) // BLOCK_Q * BLOCK_Q
            full = tl.cdiv(tl.maximum(j + BLOCK_K - 1 + T_q - T_k, 0), BLOCK_Q) * BLOCK_Q
        if RAGGED:
            full = tl.where(j + BLOCK_K > T_k, T_q, full)

        # O, m and l were stored with the block of keys before. Triton chooses the layouts of a load and of a
        # store apart, so a thread may load what another one stored, and it puts no barrier in between.
        tl.debug_barrier()
        k_tile = load_tile(k, k_strides, b, h // GROUP, j, 0, T_k, d, BLOCK_K, BLOCK_D)  # [BLOCK_K, BLOCK_D]
        v_tile = load_tile(v, v_strides, b, h // GROUP, j, 0, T_k, d_v,
                           BLOCK_K, BLOCK_DV)  # [BLOCK_K, BLOCK_DV]
        if CAUSAL or RAGGED:
            for row in tl.range(start, tl.minimum(full, T_q), BLOCK_Q):
                attend(o, o_strides, m, l, q, q_strides, k_tile, v_tile, b, h, row, j, scale_log2,
                       T_q, T_k, d, d_v, CAUSAL, True, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV)
        for row in tl.range(full, T_q, BLOCK_Q):
            attend(o, o_strides, m, l, q, q_strides, k_tile, v_tile, b, h, row, j, scale_log2,
                   T_q, T_k, d, d_v, CAUSAL, False, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV)


# {largest padded head dimension: (BLOCK_Q, BLOCK_K, num_warps)}. Every row fits the shared memory of every
# device that it is meant for and, save what tests/test_compile.py names, compiles without spills. A tile of O
# passes through registers as it is loaded and as it is multiplied: few rows where it is wide. Without tensor
# cores every factor of a product passes through registers too.
TENSOR_CORES = {128: (64, 64, 4), 256: (32, 64, 8)}
NO_TENSOR_CORES = {64: (32, 32, 4), 128: (16, 32, 4), 256: (16, 16, 8)}
# Every step of the interpreter costs milliseconds, whatever its size: large tiles, few steps.
INTERPRETER = (64, 64, 4)


def configuration(bits, d, capability):
    """``(BLOCK_Q, BLOCK_K, num_warps)`` for elements of so many bits, padded head dimension d, and compute
    capability times ten.

    Triton uses tensor cores for 16 bits from compute capability 8.0 on; float32 products are exact here.
    """
    table = TENSOR_CORES if bits == 16 and capability >= 80 else NO_TENSOR_CORES
    return next(tile for largest, tile in table.items() if d <= largest)


def launch(q, k, v, o, m, l, causal, scale, tile):
    """Launch with one ``(BLOCK_Q, BLOCK_K, num_warps)``; q, k, v in their computed dtype, scale >= 0, only
    T_k may be 0. Updates o, m and l, which come as those of no key, in float32.
    """
    B, H, T_q, d = q.shape
    T_k, d_v = v.shape[2:]
    BLOCK_Q, BLOCK_K, num_warps = tile
    # One stage: the barrier in each step keeps the next one's loads from starting early.
    with on_device(q):
        return forward_kernel[(B * H,)](
            q, q.stride(), k, k.stride(), v, v.stride(), o, o.stride(), m, l,
            scale * LOG2_E, H, H // k.shape[1], T_q, T_k, d, d_v,
            CAUSAL=causal, RAGGED=T_k % BLOCK_K != 0, BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K,
            BLOCK_D=padded(d), BLOCK_DV=value_columns(d, d_v), num_warps=num_warps, num_stages=1,
        )  # fmt: skip


def forward(q, k, v, causal, scale):
    """O and the log-sum-exp without any T x T matrix.

    q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]``, v ``[B, H_kv, T_k, d_v]``, any strides, scale
    finite.
    Returns ``(o, lse)``: o ``[B, H, T_q, d_v]`` in the dtype of q, contiguous; lse ``[B, H, T_q]``
    in float32, natural logarithm. On a CPU bfloat16 is widened to float32 and the result rounded.
    """
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    if scale < 0.0:
        q, scale = -q, -scale  # the kernel takes the maximum before it scales
    B, H, T_q, d = q.shape
    d_v = v.shape[3]
    # O is rounded whenever it is stored, T_k / BLOCK_K times: float32 until the end, as in the code published
    # with the paper.
    o = torch.zeros(B, H, T_q, d_v, dtype=torch.float32, device=q.device)
    m = torch.full((B, H, T_q), -math.inf, dtype=torch.float32, device=q.device)
    l = torch.zeros(B, H, T_q, dtype=torch.float32, device=q.device)
    if l.numel():
        tile = INTERPRETER
        if not INTERPRETED:
            major, minor = torch.cuda.get_device_capability(q.device)
            tile = configuration(q.element_size() * 8, max(padded(d), padded(d_v)), major * 10 + minor)
        launch(q, k, v, o, m, l, causal, scale, tile)
    return o.to(dtype), (m + torch.log2(l)) * LN_2
