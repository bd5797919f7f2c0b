"""FlashAttention, forward: keys outside, queries inside, O divided and stored at every step.

Chapter *FlashAttention* (``alg-flash1-forward``); Dao et al., "FlashAttention" (NeurIPS 2022), Algorithm 1; the
lecture slides' Algorithm 4. A program owns one head: the first FlashAttention is parallel over batch and heads
only (Dao, "FlashAttention-2", ICLR 2024, section 3.2). It takes a block of keys and values and walks over the
queries with it. What a query knows, its output O, maximum m and normaliser l, lies in device memory, is read
and written at every step, and is finished when the last block of keys has passed. Nothing of size T x T exists.

Blocks of queries that see every key of the block are read without a mask, after those that see some of them.
Blocks of queries that see none are never read.
"""

import math

import torch
import triton
import triton.language as tl

from flashlib.kernels import INTERPRETED, on_device, widened
from flashlib.kernels.tiles import load_tile, online_softmax, store_tile, visible

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@triton.jit
def attend(q, q_strides, k_tile, v_tile, o, o_strides, m, l, b, h, row, j, scale_log2, T_q, T_k, d, d_v,
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
    acc = acc * (l_old * alpha)[:, None]  # [BLOCK_Q, BLOCK_DV]
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")  # [BLOCK_Q, BLOCK_DV]
    l_safe = tl.where(l_new == 0.0, 1.0, l_new)  # [BLOCK_Q]; a query that has seen no key has l = 0 and O = 0
    tl.debug_barrier()
    store_tile(o, o_strides, acc / l_safe[:, None], b, h, row, 0, T_q, d_v, BLOCK_Q, BLOCK_DV)
    tl.store(m + i, m_new, mask=i < T_q)
    tl.store(l + i, l_new, mask=i < T_q)


@triton.jit
def forward_kernel(q, q_strides, k, k_strides, v, v_strides, o, o_strides, m, l, scale_log2,
                   H, GROUP, T_q, T_k, d, d_v,
                   CAUSAL: tl.constexpr, RAGGED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):
    """One program brings O, m and l of one head from those of no key to those of all keys."""
    head = tl.program_id(0)
    b, h = head // H, head % H
    m += head.to(tl.int64) * T_q
    l += head.to(tl.int64) * T_q

    for j in tl.range(0, T_k, BLOCK_K):
        # Queries before `start` see no key of the block, queries from `full` on see every one.
        start, full = j * 0, j * 0
        if CAUSAL:
            start = tl.maximum(j + T_q - T_k, 0) // BLOCK_Q * BLOCK_Q
            full = tl.cdiv(tl.maximum(j + BLOCK_K - 1 + T_q - T_k, 0), BLOCK_Q) * BLOCK_Q
        if RAGGED:
            full = tl.where(j + BLOCK_K > T_k, T_q, full)
        tl.debug_barrier()
        k_tile = load_tile(k, k_strides, b, h // GROUP, j, 0, T_k, d, BLOCK_K, BLOCK_D)  # [BLOCK_K, BLOCK_D]
        v_tile = load_tile(v, v_strides, b, h // GROUP, j, 0, T_k, d_v, BLOCK_K, BLOCK_DV)  # [BLOCK_K, BLOCK_DV]
        if CAUSAL or RAGGED:
            for row in tl.range(start, tl.minimum(full, T_q), BLOCK_Q):
                attend(q, q_strides, k_tile, v_tile, o, o_strides, m, l, b, h, row, j, scale_log2,
                       T_q, T_k, d, d_v, CAUSAL, True, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV)
        for row in tl.range(full, T_q, BLOCK_Q):
            attend(q, q_strides, k_tile, v_tile, o, o_strides, m, l, b, h, row, j, scale_log2,
                   T_q, T_k, d, d_v, CAUSAL, False, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV)
