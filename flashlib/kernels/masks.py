"""FlashAttention-2 with a window, a softcap, ALiBi and packed sequences, forward and backward.

Chapter *Masks* (``eq-masks-window``, ``eq-masks-softcap``, ``eq-masks-alibi``, ``eq-masks-packed``); Beltagy
et al., "Longformer" (2020), for the window, Press et al., "Train short, test long" (ICLR 2022), for ALiBi,
Gemma Team, "Gemma 2" (2024), for the softcap. The loops are those of flash2.py and of the split form of
backward.py, with four switches. A window cuts the range of blocks on both sides: what no query of a block
sees is never read, and only blocks at the two edges and at the ragged end are masked. A changed score keeps
the running maximum and the log-sum-exp as they are; the cap multiplies dS by its derivative. Packed sequences
lie one after the other, and a program finds its own by the list of their first rows.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlib.kernels import INTERPRETED, on_device, padded, widened
from flashlib.kernels.launch import INTERPRETER, Configuration, descriptor, fitting, problem, value_columns
from flashlib.kernels.scores import (
    LOG2_E,
    UNLIMITED,
    around,
    changed,
    key_bounds,
    padded_rows,
    query_bounds,
    row_pointers,
    sees,
    sequence,
    slope_of,
)
from flashlib.kernels.tiles import load_tile, online_softmax, probabilities, store_tile

LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def attend(acc, m, l, q_tile, k, k_strides, v, v_strides, b, h, p, j, scale_log2, per_cap, slope, left, right,
           T_k, d, d_v, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
           MASKED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
           DESCRIPTOR: tl.constexpr):
    """One step of the inner loop: the block of keys that starts at j."""
    k_tile = load_tile(k, k_strides, b, h, j, 0, T_k, d, BLOCK_K, BLOCK_D, DESCRIPTOR)  # [BLOCK_K, BLOCK_D]
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K], unscaled
    keys = j + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    distance = p[:, None] - keys[None, :]  # [BLOCK_Q, BLOCK_K]
    s, _, factor = changed(s, distance, scale_log2, per_cap, slope, SOFTCAP, ALIBI)
    seen = sees(distance, (keys < T_k)[None, :], left, right, WINDOW)  # [BLOCK_Q, BLOCK_K], used where MASKED
    weights, alpha, m, l = online_softmax(s, m, l, factor, seen, MASKED)
    acc = acc * alpha[:, None]  # [BLOCK_Q, BLOCK_DV]
    v_tile = load_tile(v, v_strides, b, h, j, 0, T_k, d_v,
                       BLOCK_K, BLOCK_DV, DESCRIPTOR)  # [BLOCK_K, BLOCK_DV]
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")  # [BLOCK_Q, BLOCK_DV]
    return acc, m, l


@triton.jit
def forward_kernel(q, q_strides, k, k_strides, v, v_strides, o, o_strides, lse, lse_strides,
                   slopes, slopes_strides, starts_q, starts_k, scale_log2, per_cap, left, right,
                   H, GROUP, T_q, T_k, d, d_v, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                   ALIBI: tl.constexpr, VARLEN: tl.constexpr, RAGGED: tl.constexpr, BLOCK_Q: tl.constexpr,
                   BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                   DESCRIPTOR: tl.constexpr):
    """One program writes one block of rows of O and of L, in one pass over the keys that these rows see.

    Packed, T_q and T_k are those of the longest sequence; programs past the end of a shorter one do nothing.
    """
    blocks = tl.cdiv(T_q, BLOCK_Q)
    # With a causal mask the last blocks of queries see the most keys: the longest start first.
    row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    head = tl.program_id(0) // blocks
    b, h = head // H, head % H
    slope = slope_of(slopes, slopes_strides, b, h, ALIBI)
    b_q, T_q = sequence(starts_q, b, T_q, VARLEN)
    b_k, T_k = sequence(starts_k, b, T_k, VARLEN)
    if VARLEN:
        T_k = tl.where(row < T_q, T_k, 0)

    i = row + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    p = i + (T_k - T_q)  # [BLOCK_Q]
    first, whole, cut, end = key_bounds(row, T_q, T_k, left, right, BLOCK_Q, BLOCK_K, WINDOW)

    q_tile = load_tile(q, q_strides, b_q, h, row, 0, T_q, d,
                       BLOCK_Q, BLOCK_D, DESCRIPTOR)  # [BLOCK_Q, BLOCK_D]
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)  # [BLOCK_Q], base 2
    l = tl.zeros([BLOCK_Q], tl.float32)  # [BLOCK_Q]
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)  # [BLOCK_Q, BLOCK_DV]
    for j in tl.range(whole, cut, BLOCK_K):
        acc, m, l = attend(acc, m, l, q_tile, k, k_strides, v, v_strides, b_k, h // GROUP, p, j,
                           scale_log2, per_cap, slope, left, right, T_k, d, d_v,
                           WINDOW, SOFTCAP, ALIBI, False, BLOCK_K, BLOCK_D, BLOCK_DV, DESCRIPTOR)
    if WINDOW or VARLEN or RAGGED:
        # One loop over the blocks before and after the whole ones.
        for step in tl.range(0, tl.cdiv(end - first, BLOCK_K) - (cut - whole) // BLOCK_K):
            j = around(first + step * BLOCK_K, whole, cut)
            acc, m, l = attend(acc, m, l, q_tile, k, k_strides, v, v_strides, b_k, h // GROUP, p, j,
                               scale_log2, per_cap, slope, left, right, T_k, d, d_v,
                               WINDOW, SOFTCAP, ALIBI, True, BLOCK_K, BLOCK_D, BLOCK_DV, DESCRIPTOR)

    l_safe = tl.where(l == 0.0, 1.0, l)  # [BLOCK_Q]; a query that sees no key has l = 0, O = 0 and L = -inf
    store_tile(o, o_strides, acc / l_safe[:, None], b_q, h, row, 0, T_q, d_v, BLOCK_Q, BLOCK_DV)
    lse_rows = row_pointers(lse, lse_strides, b_q, h, i)  # [BLOCK_Q]
    tl.store(lse_rows, (m + tl.log2(l_safe)) * LN_2, mask=i < T_q)


@triton.jit
def delta_kernel(do, do_strides, o, o_strides, lse, lse_strides, dlse, dlse_strides, delta, lse2, starts_q,
                 H, T, ROWS, d, VARLEN: tl.constexpr, PAD: tl.constexpr, BLOCK_T: tl.constexpr,
                 BLOCK_D: tl.constexpr):
    """One program writes D_i = sum_k dO_ik O_ik - dL_i, and L_i in base 2, for a block of rows; a sequence
    is padded to a multiple of PAD rows.
    """
    blocks = tl.cdiv(T, PAD) * (PAD // BLOCK_T)
    row, head = tl.program_id(0) % blocks * BLOCK_T, tl.program_id(0) // blocks
    b, h = head // H, head % H
    b_q, T = sequence(starts_q, b, T, VARLEN)
    i = row + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    do_tile = load_tile(do, do_strides, b_q, h, row, 0, T, d, BLOCK_T, BLOCK_D)  # [BLOCK_T, BLOCK_D]
    o_tile = load_tile(o, o_strides, b_q, h, row, 0, T, d, BLOCK_T, BLOCK_D)  # [BLOCK_T, BLOCK_D]
    lse_rows = tl.load(row_pointers(lse, lse_strides, b_q, h, i), mask=i < T,
                       other=-float("inf"))  # [BLOCK_T], natural
    dlse_rows = tl.load(row_pointers(dlse, dlse_strides, b_q, h, i), mask=i < T, other=0.0)  # [BLOCK_T]
    # +inf makes a row of P zero: that of a query that sees no key, whose L is -inf, and that of padding.
    blind = lse_rows == -float("inf")  # [BLOCK_T]
    lse2_rows = tl.where(blind, float("inf"), lse_rows * LOG2_E)  # [BLOCK_T]
    products = do_tile.to(tl.float32) * o_tile.to(tl.float32)  # [BLOCK_T, BLOCK_D]
    rows = padded_rows(b, b_q, h, H, ROWS, PAD, VARLEN) + i  # [BLOCK_T]
    own = i < tl.cdiv(T, PAD) * PAD  # [BLOCK_T]
    tl.store(delta + rows, tl.sum(products, 1) - dlse_rows, mask=own)
    tl.store(lse2 + rows, lse2_rows, mask=own)


@triton.jit
def collect(dk, dv, k_tile, v_tile, keys, q, q_strides, do, do_strides, delta, lse2, b, h, row, offset,
            scale_log2, per_cap, slope, left, right, T_q, d, d_v, WINDOW: tl.constexpr,
            SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr, BLOCK_Q: tl.constexpr,
            BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """One step of the inner loop over queries: the block that starts at row adds to dK and dV; offset is
    T_k - T_q. The matrices of scores stand transposed, keys in rows, as P^T and dS^T meet dO and Q.
    """
    i = row + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    q_tile = load_tile(q, q_strides, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D, DESCRIPTOR)  # [BLOCK_Q, BLOCK_D]
    do_tile = load_tile(do, do_strides, b, h, row, 0, T_q, d_v,
                        BLOCK_Q, BLOCK_DV, DESCRIPTOR)  # [BLOCK_Q, BLOCK_DV]
    lse_rows = tl.load(lse2 + i)  # [BLOCK_Q]
    d_rows = tl.load(delta + i)  # [BLOCK_Q]
    s = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q], unscaled
    distance = (i + offset)[None, :] - keys[:, None]  # [BLOCK_K, BLOCK_Q]
    s, derivative, factor = changed(s, distance, scale_log2, per_cap, slope, SOFTCAP, ALIBI)
    seen = sees(distance, (i < T_q)[None, :], left, right, WINDOW)  # [BLOCK_K, BLOCK_Q], used where MASKED
    p = probabilities(s, lse_rows[None, :], factor, seen, MASKED)  # [BLOCK_K, BLOCK_Q]
    dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision="ieee")  # [BLOCK_K, BLOCK_DV]
    dp = tl.dot(v_tile, do_tile.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q]
    ds = p * (dp - d_rows[None, :])  # [BLOCK_K, BLOCK_Q]
    if SOFTCAP:
        ds = ds * derivative  # [BLOCK_K, BLOCK_Q]
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")  # [BLOCK_K, BLOCK_D], unscaled
    return dk, dv


@triton.jit
def keys_kernel(q, q_strides, k, k_strides, v, v_strides, do, do_strides, delta, lse2,
                slopes, slopes_strides, starts_q, starts_k, dk, dk_strides, dv, dv_strides,
                scale, scale_log2, per_cap, left, right, H_kv, GROUP, ROWS, T_q, T_k, d, d_v,
                WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, VARLEN: tl.constexpr,
                PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_DV: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """One program writes one block of rows of dK and of dV, from all queries of the group that see them."""
    blocks = tl.cdiv(T_k, BLOCK_K)
    # With a causal mask the first blocks of keys are seen by the most queries: the longest start first.
    col = tl.program_id(0) % blocks * BLOCK_K
    head = tl.program_id(0) // blocks
    b, h_kv = head // H_kv, head % H_kv
    b_q, T_q = sequence(starts_q, b, T_q, VARLEN)
    b_k, T_k = sequence(starts_k, b, T_k, VARLEN)
    if VARLEN:
        T_q = tl.where(col < T_k, T_q, 0)

    keys = col + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    first, whole, cut, end = query_bounds(col, T_q, T_k, left, right, BLOCK_Q, BLOCK_K, WINDOW)
    k_tile = load_tile(k, k_strides, b_k, h_kv, col, 0, T_k, d,
                       BLOCK_K, BLOCK_D, DESCRIPTOR)  # [BLOCK_K, BLOCK_D]
    v_tile = load_tile(v, v_strides, b_k, h_kv, col, 0, T_k, d_v,
                       BLOCK_K, BLOCK_DV, DESCRIPTOR)  # [BLOCK_K, BLOCK_DV]
    dk_acc = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)  # [BLOCK_K, BLOCK_D]
    dv_acc = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)  # [BLOCK_K, BLOCK_DV]
    # One loop over all heads of the group: a loop around the loop would take fifty registers.
    if WINDOW and BLOCK_D > 128:
        # With 256 columns there are no registers for two loops: every block is masked.
        whole, cut = first, first
    uncut = (cut - whole) // BLOCK_Q
    if not WINDOW or BLOCK_D <= 128:
        # Without a mask there is at least one step. Where the compiler cannot tell, it copies dK and dV for a
        # loop that is skipped, and ptxas then waits for every single product.
        for step in tl.range(0, GROUP * uncut if WINDOW or VARLEN else tl.maximum(GROUP * uncut, 1)):
            h, row = h_kv * GROUP + step // uncut, whole + step % uncut * BLOCK_Q
            rows = padded_rows(b, b_q, h, H_kv * GROUP, ROWS, PAD, VARLEN)
            slope = slope_of(slopes, slopes_strides, b, h, ALIBI)
            dk_acc, dv_acc = collect(
                dk_acc, dv_acc, k_tile, v_tile, keys, q, q_strides, do, do_strides, delta + rows, lse2 + rows,
                b_q, h, row, T_k - T_q, scale_log2, per_cap, slope, left, right, T_q, d, d_v,
                WINDOW, SOFTCAP, ALIBI, False, BLOCK_Q, BLOCK_D, BLOCK_DV, DESCRIPTOR)
    if WINDOW:
        masked = tl.cdiv(end - first, BLOCK_Q) - uncut
        for step in tl.range(0, GROUP * masked):
            h, row = h_kv * GROUP + step // masked, around(first + step % masked * BLOCK_Q, whole, cut)
            rows = padded_rows(b, b_q, h, H_kv * GROUP, ROWS, PAD, VARLEN)
            slope = slope_of(slopes, slopes_strides, b, h, ALIBI)
            dk_acc, dv_acc = collect(
                dk_acc, dv_acc, k_tile, v_tile, keys, q, q_strides, do, do_strides, delta + rows, lse2 + rows,
                b_q, h, row, T_k - T_q, scale_log2, per_cap, slope, left, right, T_q, d, d_v,
                WINDOW, SOFTCAP, ALIBI, True, BLOCK_Q, BLOCK_D, BLOCK_DV, DESCRIPTOR)
    store_tile(dk, dk_strides, dk_acc * scale, b_k, h_kv, col, 0, T_k, d, BLOCK_K, BLOCK_D)
    store_tile(dv, dv_strides, dv_acc, b_k, h_kv, col, 0, T_k, d_v, BLOCK_K, BLOCK_DV)


@triton.jit
def descend(dq, q_tile, do_tile, d_rows, lse_rows, k, k_strides, v, v_strides, b, h, positions, j, scale_log2,
            per_cap, slope, left, right, T_k, d, d_v, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
            ALIBI: tl.constexpr, MASKED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
            BLOCK_DV: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """One step of the inner loop over keys: the block that starts at j adds to dQ."""
    k_tile = load_tile(k, k_strides, b, h, j, 0, T_k, d, BLOCK_K, BLOCK_D, DESCRIPTOR)  # [BLOCK_K, BLOCK_D]
    v_tile = load_tile(v, v_strides, b, h, j, 0, T_k, d_v,
                       BLOCK_K, BLOCK_DV, DESCRIPTOR)  # [BLOCK_K, BLOCK_DV]
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K], unscaled
    keys = j + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    distance = positions[:, None] - keys[None, :]  # [BLOCK_Q, BLOCK_K]
    s, derivative, factor = changed(s, distance, scale_log2, per_cap, slope, SOFTCAP, ALIBI)
    seen = sees(distance, (keys < T_k)[None, :], left, right, WINDOW)  # [BLOCK_Q, BLOCK_K], used where MASKED
    p = probabilities(s, lse_rows[:, None], factor, seen, MASKED)  # [BLOCK_Q, BLOCK_K]
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
    ds = p * (dp - d_rows[:, None])  # [BLOCK_Q, BLOCK_K]
    if SOFTCAP:
        ds = ds * derivative  # [BLOCK_Q, BLOCK_K]
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")  # [BLOCK_Q, BLOCK_D], unscaled


@triton.jit
def queries_kernel(q, q_strides, k, k_strides, v, v_strides, do, do_strides, delta, lse2,
                   slopes, slopes_strides, starts_q, starts_k, dq, dq_strides,
                   scale, scale_log2, per_cap, left, right, H, GROUP, ROWS, T_q, T_k, d, d_v,
                   WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, VARLEN: tl.constexpr,
                   RAGGED: tl.constexpr, PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """One program writes one block of rows of dQ, from all keys that these rows see."""
    blocks = tl.cdiv(T_q, BLOCK_Q)
    row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    head = tl.program_id(0) // blocks
    b, h = head // H, head % H
    slope = slope_of(slopes, slopes_strides, b, h, ALIBI)
    b_q, T_q = sequence(starts_q, b, T_q, VARLEN)
    b_k, T_k = sequence(starts_k, b, T_k, VARLEN)
    if VARLEN:
        T_k = tl.where(row < T_q, T_k, 0)

    i = row + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    positions = i + (T_k - T_q)  # [BLOCK_Q]
    first, whole, cut, end = key_bounds(row, T_q, T_k, left, right, BLOCK_Q, BLOCK_K, WINDOW)

    q_tile = load_tile(q, q_strides, b_q, h, row, 0, T_q, d,
                       BLOCK_Q, BLOCK_D, DESCRIPTOR)  # [BLOCK_Q, BLOCK_D]
    do_tile = load_tile(do, do_strides, b_q, h, row, 0, T_q, d_v,
                        BLOCK_Q, BLOCK_DV, DESCRIPTOR)  # [BLOCK_Q, BLOCK_DV]
    rows = padded_rows(b, b_q, h, H, ROWS, PAD, VARLEN) + i  # [BLOCK_Q]
    lse_rows = tl.load(lse2 + rows, mask=i < T_q, other=float("inf"))  # [BLOCK_Q]
    d_rows = tl.load(delta + rows, mask=i < T_q, other=0.0)  # [BLOCK_Q]
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)  # [BLOCK_Q, BLOCK_D]
    for j in tl.range(whole, cut, BLOCK_K):
        acc = descend(acc, q_tile, do_tile, d_rows, lse_rows, k, k_strides, v, v_strides, b_k, h // GROUP,
                      positions, j, scale_log2, per_cap, slope, left, right, T_k, d, d_v, WINDOW, SOFTCAP,
                      ALIBI, False, BLOCK_K, BLOCK_D, BLOCK_DV, DESCRIPTOR)  # [BLOCK_Q, BLOCK_D]
    if WINDOW or VARLEN or RAGGED:
        for step in tl.range(0, tl.cdiv(end - first, BLOCK_K) - (cut - whole) // BLOCK_K):
            j = around(first + step * BLOCK_K, whole, cut)
            acc = descend(acc, q_tile, do_tile, d_rows, lse_rows, k, k_strides, v, v_strides, b_k, h // GROUP,
                          positions, j, scale_log2, per_cap, slope, left, right, T_k, d, d_v, WINDOW, SOFTCAP,
                          ALIBI, True, BLOCK_K, BLOCK_D, BLOCK_DV, DESCRIPTOR)  # [BLOCK_Q, BLOCK_D]
    store_tile(dq, dq_strides, acc * scale, b_q, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D)


# The rows for sm_90 alone are the fastest, or close to it, of a sweep on an H200 with T = 16384: a causal
# window of 1024 keys, a causal mask with ALiBi, and, without descriptors, sequences of 256 to 6144 tokens
# packed. With 256 columns some spill, and are still up to three times as fast as those that do not. The other
# rows are those of flash2.py and backward.py, made smaller where a changed score takes the registers. Packed
# sequences and tensors that TMA cannot read use the rows without descriptors: a descriptor would read on into
# the next sequence.
TENSOR_CORES = (80, 86, 89, 90, 100, 120)
FORWARD = (
    Configuration((90,), 16, 64, 64, 64, 4, 2, True, 42_000),
    Configuration((90,), 16, 128, 64, 64, 4, 3, True, 117_000),
    Configuration((90,), 16, 256, 128, 64, 8, 2, True, 198_000),
    Configuration((90,), 16, 64, 64, 64, 4, 3, False, 58_000),
    Configuration((90,), 16, 128, 128, 64, 8, 3, False, 132_000),
    Configuration((90,), 16, 256, 128, 64, 8, 2, False, 198_000),
    Configuration(TENSOR_CORES, 16, 128, 64, 64, 4, 2, False, 101_000),
    Configuration(TENSOR_CORES, 16, 256, 64, 32, 8, 2, False, 101_000),
    Configuration((75,), 16, 128, 16, 32, 4, 1, False, 65_000),
    Configuration((75,), 16, 256, 16, 16, 8, 1, False, 65_000),
    Configuration((75, *TENSOR_CORES), 32, 64, 32, 32, 4, 1, False, 65_000),
    Configuration((75, *TENSOR_CORES), 32, 128, 16, 32, 4, 1, False, 65_000),
    Configuration((75, *TENSOR_CORES), 32, 256, 16, 16, 8, 1, False, 65_000),
)
SMALL = (
    Configuration((75,), 16, 256, 16, 16, 8, 1, False, 50_000),
    Configuration((75, *TENSOR_CORES), 32, 64, 32, 32, 8, 1, False, 37_000),
    Configuration((75, *TENSOR_CORES), 32, 128, 16, 32, 8, 1, False, 52_000),
    Configuration(TENSOR_CORES, 32, 256, 16, 16, 8, 1, False, 67_000),
)
KEYS = (
    Configuration((90,), 16, 64, 64, 64, 4, 3, True, 68_000),
    Configuration((90,), 16, 128, 32, 64, 4, 3, True, 84_000),
    Configuration((90,), 16, 256, 64, 64, 8, 2, True, 198_000),
    Configuration((90,), 16, 64, 64, 64, 4, 3, False, 68_000),
    Configuration((90,), 16, 128, 32, 64, 4, 3, False, 84_000),
    Configuration((90,), 16, 256, 64, 64, 8, 2, False, 198_000),
    Configuration(TENSOR_CORES, 16, 64, 32, 64, 4, 2, False, 101_000),
    Configuration(TENSOR_CORES, 16, 128, 32, 64, 8, 2, False, 101_000),
    Configuration(TENSOR_CORES, 16, 256, 32, 32, 8, 1, False, 101_000),
    *SMALL,
    Configuration((75,), 32, 256, 16, 8, 8, 1, False, 50_000),
)
QUERIES = (
    Configuration((90,), 16, 64, 64, 64, 4, 3, True, 68_000),
    Configuration((90,), 16, 128, 128, 64, 8, 3, True, 165_000),
    Configuration((90,), 16, 256, 64, 32, 4, 3, True, 165_000),
    Configuration((90,), 16, 64, 64, 64, 4, 3, False, 68_000),
    Configuration((90,), 16, 128, 128, 64, 8, 3, False, 165_000),
    Configuration((90,), 16, 256, 64, 32, 4, 3, False, 165_000),
    Configuration(TENSOR_CORES, 16, 64, 64, 64, 4, 2, False, 101_000),
    Configuration((80, 86, 89, 90, 120), 16, 128, 64, 64, 8, 2, False, 101_000),
    Configuration((100,), 16, 128, 64, 64, 8, 2, False, 116_000),
    Configuration(TENSOR_CORES, 16, 256, 32, 32, 8, 1, False, 101_000),
    *SMALL,
    Configuration((75,), 32, 256, 16, 16, 8, 1, False, 65_536),
)
PAD = max(INTERPRETER.BLOCK_Q, *(row.BLOCK_Q for row in (*KEYS, *QUERIES)))


class Packing(NamedTuple):
    """Sequences packed one after the other: sequence b owns rows starts[b] to starts[b + 1] - 1, int32."""

    starts_q: torch.Tensor  # [B + 1], contiguous
    starts_k: torch.Tensor
    longest_q: int
    longest_k: int


class Scoring(NamedTuple):
    """What is done to the scores: their scale, the window, and changes."""

    scale: float
    left: int = UNLIMITED
    right: int = UNLIMITED
    softcap: float = 0.0  # none
    slopes: torch.Tensor | None = None  # float32 [H] or [B, H]


def strides(x, packing):
    """The strides of x as the kernels take them: of ``[B, H, T, d]`` or ``[B, H, T]``. The rows of a packed
    ``[total, H, d]`` or ``[H, total]`` are its batches too.
    """
    if packing is None:
        return x.stride()
    if x.ndim == 2:
        return x.stride(1), x.stride(0), x.stride(1)
    return x.stride(0), x.stride(1), x.stride(0), x.stride(2)


def sizes(q, k, v, packing):
    """``(B, H, H_kv, T_q, T_k, d, d_v)``; packed, the lengths are those of the longest sequences."""
    if packing is None:
        return (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    B = packing.starts_q.shape[0] - 1
    return (
        B, q.shape[1], k.shape[1], packing.longest_q, packing.longest_k, q.shape[2], v.shape[2]
    )  # fmt: skip


def scoring_arguments(scoring, packing):
    """What every kernel takes for scores and sequences: tensors, then numbers."""
    slopes = scoring.slopes
    of_slopes = (0, 0) if slopes is None else (0, *slopes.stride())[-2:]
    starts = (None, None) if packing is None else packing[:2]
    per_cap, outer = scoring.scale / (scoring.softcap or 1.0), scoring.softcap or scoring.scale
    return (slopes, of_slopes, *starts), (outer * LOG2_E.value, per_cap, scoring.left, scoring.right)


def constants(scoring, packing, config, BLOCK_D, BLOCK_DV):
    """What every kernel is compiled for."""
    return {
        "WINDOW": scoring.left < UNLIMITED or scoring.right < UNLIMITED,
        "SOFTCAP": scoring.softcap != 0.0,
        "ALIBI": scoring.slopes is not None,
        "VARLEN": packing is not None,
        "BLOCK_Q": config.BLOCK_Q,
        "BLOCK_K": config.BLOCK_K,
        "BLOCK_D": BLOCK_D,
        "BLOCK_DV": BLOCK_DV,
        "DESCRIPTOR": config.descriptor,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def operands(tensors, rows, columns, config, packing):
    """Tensors that a kernel reads in tiles, each with its strides."""
    found = []
    for x, *tile in zip(tensors, rows, columns, strict=True):
        found += [descriptor(x, *tile) if config.descriptor else x, strides(x, packing)]
    return found


def configuration(name, table, tensors, packing):
    """The row of a table for tensors ``[B, H, T, d]``, or packed ones ``[total, H, d]``.

    Raises ValueError where no row fits.
    """
    if INTERPRETED:
        return INTERPRETER
    if packing is None:
        return fitting(name, table, *problem(tensors), False)
    bits, d, capability, shared_bytes, _ = problem([x.transpose(0, 1)[None] for x in tensors])
    return fitting(name, table, bits, d, capability, shared_bytes, False, False)


def launch(q, k, v, o, lse, scoring, packing, config):
    """Launch the forward kernel; q, k, v in their computed dtype, scale >= 0, only T_k may be 0."""
    B, H, H_kv, T_q, T_k, d, d_v = sizes(q, k, v, packing)
    BLOCK_D, BLOCK_DV = padded(d), value_columns(d, d_v)
    rows, columns = (config.BLOCK_Q, config.BLOCK_K, config.BLOCK_K), (BLOCK_D, BLOCK_D, BLOCK_DV)
    scored, numbers = scoring_arguments(scoring, packing)
    with on_device(q):
        return forward_kernel[(B * H * triton.cdiv(T_q, config.BLOCK_Q),)](
            *operands((q, k, v), rows, columns, config, packing), o, strides(o, packing),
            lse, strides(lse, packing), *scored, *numbers, H, H // H_kv, T_q, T_k, d, d_v,
            RAGGED=T_k % config.BLOCK_K != 0, **constants(scoring, packing, config, BLOCK_D, BLOCK_DV),
        )  # fmt: skip


def launch_delta(o, lse, do, dlse, delta, lse2, T, packing):
    """Launch the kernel that fills delta and lse2, float32 [B, H, ROWS], or packed [1, H, ROWS], from o and
    do [B, H, T, d_v], lse and dlse [B, H, T], or packed ones; T is then the length of the longest sequence.
    """
    B = o.shape[0] if packing is None else packing.starts_q.shape[0] - 1
    H, d_v = o.shape[1], o.shape[-1]
    with on_device(o):
        return delta_kernel[(B * H * triton.cdiv(T, PAD) * (PAD // 32),)](
            do, strides(do, packing), o, strides(o, packing), lse, strides(lse, packing),
            dlse, strides(dlse, packing), delta, lse2, None if packing is None else packing.starts_q,
            H, T, delta.shape[2], d_v, VARLEN=packing is not None, PAD=PAD, BLOCK_T=32, BLOCK_D=padded(d_v),
        )  # fmt: skip


def backward_arguments(q, k, v, do, scoring, packing, config):
    """The operands, and what the kernels of both loops are compiled for."""
    d, d_v = q.shape[-1], v.shape[-1]
    # Both are second factors here, and as narrow beside the other as value_columns allows.
    BLOCK_D, BLOCK_DV = value_columns(d_v, d), value_columns(d, d_v)
    rows = (config.BLOCK_Q, config.BLOCK_K, config.BLOCK_K, config.BLOCK_Q)
    read = operands((q, k, v, do), rows, (BLOCK_D, BLOCK_D, BLOCK_DV, BLOCK_DV), config, packing)
    return read, {"PAD": PAD, **constants(scoring, packing, config, BLOCK_D, BLOCK_DV)}


def launch_keys(q, k, v, do, delta, lse2, dk, dv, scoring, packing, config):
    """Launch the kernel that fills dk and dv, in the shapes of k and v."""
    B, H, H_kv, T_q, T_k, d, d_v = sizes(q, k, v, packing)
    read, compiled_for = backward_arguments(q, k, v, do, scoring, packing, config)
    scored, numbers = scoring_arguments(scoring, packing)
    with on_device(q):
        return keys_kernel[(B * H_kv * triton.cdiv(T_k, config.BLOCK_K),)](
            *read, delta, lse2, *scored, dk, strides(dk, packing), dv, strides(dv, packing),
            scoring.scale, *numbers, H_kv, H // H_kv, delta.shape[2], T_q, T_k, d, d_v, **compiled_for,
        )  # fmt: skip


def launch_queries(q, k, v, do, delta, lse2, dq, scoring, packing, config):
    """Launch the kernel that fills dq, in the shape of q."""
    B, H, H_kv, T_q, T_k, d, d_v = sizes(q, k, v, packing)
    read, compiled_for = backward_arguments(q, k, v, do, scoring, packing, config)
    scored, numbers = scoring_arguments(scoring, packing)
    with on_device(q):
        return queries_kernel[(B * H * triton.cdiv(T_q, config.BLOCK_Q),)](
            *read, delta, lse2, *scored, dq, strides(dq, packing), scoring.scale, *numbers,
            H, H // H_kv, delta.shape[2], T_q, T_k, d, d_v, RAGGED=T_k % config.BLOCK_K != 0, **compiled_for,
        )  # fmt: skip


def forward(q, k, v, scoring, packing=None):
    """O and the log-sum-exp of attention with a mask and changed scores.

    q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]``, v ``[B, H_kv, T_k, d_v]``, or, with a packing, ``[total_q,
    H, d]``, ``[total_k, H_kv, d]`` and ``[total_k, H_kv, d_v]``; any strides.
    Returns ``(o, lse)``, contiguous: o ``[B, H, T_q, d_v]`` or ``[total_q, H, d_v]`` in the dtype of q; lse
    ``[B, H, T_q]`` or ``[H, total_q]`` in float32, natural logarithm. A query that sees no key has 0 and
    -inf. On a CPU bfloat16 is widened to float32 and the result rounded.
    Raises ValueError where no configuration fits the device.
    """
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    if scoring.scale < 0.0:
        q, scoring = -q, scoring._replace(scale=-scoring.scale)  # the kernel takes the maximum first
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    rows = q.shape[:-1] if packing is None else (q.shape[1], q.shape[0])
    lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    if lse.numel():
        config = configuration("masks", FORWARD, (q, k, v), packing)
        launch(q, k, v, o, lse, scoring, packing, config)
    return o.to(dtype), lse


def backward(q, k, v, o, lse, do, dlse, scoring, packing=None):
    """``(dq, dk, dv)`` in the shapes and dtypes of q, k, v, contiguous; the same in every bit on every run.

    The tensors of the forward pass, ``[B, H, T, d]`` or packed, and the gradients do and dlse in the shapes
    of o and lse; any strides. There is no gradient for the slopes of ALiBi.
    Raises ValueError where no configuration fits the device. On a CPU bfloat16 is widened to float32 and the
    results rounded.
    """
    dtype = q.dtype
    q, k, v, o, do = widened(q, k, v, o, do)
    B, H, _, T_q, _, _, _ = sizes(q, k, v, packing)
    # Padding after the last row of a sequence, so that a block of queries needs no mask for its D and L.
    rows = triton.cdiv(T_q, PAD) * PAD if packing is None else (q.shape[0] // PAD + B) * PAD
    statistics = (B if packing is None else 1, H, rows)
    delta, lse2 = (torch.empty(statistics, dtype=torch.float32, device=q.device) for _ in range(2))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if lse.numel():
        launch_delta(o, lse, do, dlse, delta, lse2, T_q, packing)
    if not lse.numel():
        dk.zero_()
        dv.zero_()
    elif dk.numel():
        config = configuration("masks, dK and dV", KEYS, (q, k, v, do), packing)
        launch_keys(q, k, v, do, delta, lse2, dk, dv, scoring, packing, config)
    if dq.numel():
        config = configuration("masks, dQ", QUERIES, (q, k, v, do), packing)
        launch_queries(q, k, v, do, delta, lse2, dq, scoring, packing, config)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
