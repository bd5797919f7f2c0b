"""FlashAttention-2 with any mask and score, a window, a softcap, ALiBi, a bias, sinks,
dropout and packed sequences, forward and backward.

Chapter *Masks* (``eq-masks-window``, ``eq-masks-softcap``, ``eq-masks-alibi``,
``eq-masks-packed``); Beltagy et al., "Longformer" (2020), for the window, Press et al.,
"Train short, test long" (ICLR 2022), for ALiBi, Gemma Team, "Gemma 2" (2024), for the
softcap. The loops are those of flash2.py and of the split form of backward.py, with a
switch for each change (``scores.switches_of``). A window cuts the range of blocks on
both sides: blocks that no query of a block sees are never read, and only those at the
two edges and at the ragged end are masked. A mask has lists of tiles (tile_lists.py). A
changed score leaves the maximum and the log-sum-exp as they are, and dS is multiplied
by its derivative. A program finds its packed sequence in the list of their first rows.
"""

import torch
import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import (
    INTERPRETED,
    inputs,
    padded,
    score_gradients,
    scores,
    tables,
    tile_lists,
)
from flashlib.kernels.scores import (
    LOG2_E,
    Place,
    around,
    changed,
    dropped,
    key_bounds,
    list_of,
    listed,
    of_group,
    padded_rows,
    query_bounds,
    sees,
    sequence,
    slope_of,
    visible_only,
)
from flashlib.kernels.tables import TENSOR_CORES, Configuration
from flashlib.kernels.tiles import (
    LOWEST,
    Rows,
    Sizes,
    load_tile,
    log_sum_exp,
    online_softmax,
    probabilities,
    row_pointers,
    store_tile,
)


@triton.jit
def attend(
    acc, m, l, q_tile, k, v, b, h, p, j, place, score, n,
    MASKED: tl.constexpr, ON: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One step of the inner loop: the block of keys that starts at j."""
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    k_tile = load_tile(
        k, b, h, j, 0, n.T_k, n.d, BLOCK_K, TILE.BLOCK_D, TILE.DESCRIPTOR
    )  # [BLOCK_K, BLOCK_D]
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K], unscaled
    p, keys = p[:, None], (j + tl.arange(0, BLOCK_K))[None, :]
    s, _, factor = changed(s, p, keys, place, score, n, ON)
    seen = sees(p, keys, keys < n.T_k, place, score, ON)
    weights, alpha, m, l = online_softmax(s, m, l, factor, seen, MASKED)
    weights = dropped(weights, p, keys, place, score, n, ON)
    acc = acc * alpha[:, None]
    v_tile = load_tile(
        v, b, h, j, 0, n.T_k, n.d_v, BLOCK_K, TILE.BLOCK_DV, TILE.DESCRIPTOR
    )  # [BLOCK_K, BLOCK_DV]
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return acc, m, l


# Otherwise Triton would compile further versions for lengths of 1 and multiples of 16.
@triton.jit(do_not_specialize=["T_q", "T_k"])
def forward_kernel(
    q, k, v, strides, o, lse, score, starts, H, GROUP, T_q, T_k, d, d_v,
    RAGGED: tl.constexpr, ON: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One program writes one block of rows of O and of L, in one pass over the keys
    that these rows see.

    q, k, v: pointers or descriptors; o, lse: Rows. Packed, the lengths in n are those
    of the longest sequences; programs past the end of a shorter one do nothing.
    """
    n = Sizes(H, GROUP, T_q, T_k, d, d_v)
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    blocks = tl.cdiv(n.T_q, BLOCK_Q)
    # With a causal mask the last blocks of queries see the most keys: they start first.
    block = blocks - 1 - tl.program_id(0) % blocks
    row = block * BLOCK_Q
    head = tl.program_id(0) // blocks
    b, h = head // n.H, head % n.H
    h_kv = h // n.GROUP
    place = Place(b, h, slope_of(score, b, h, ON.ALIBI))
    b_q, T_q = sequence(starts.q, b, n.T_q, ON.VARLEN)
    b_k, T_k = sequence(starts.k, b, n.T_k, ON.VARLEN)
    if ON.VARLEN:
        T_k = tl.where(row < T_q, T_k, 0)
    n = Sizes(n.H, n.GROUP, T_q, T_k, n.d, n.d_v)

    i = row + tl.arange(0, BLOCK_Q)
    p = i + (T_k - T_q)
    tiles = list_of(score, b, h, block, ON.MASK)
    first, full_start, full_end, end = key_bounds(row, T_q, T_k, score, tiles, ON, TILE)

    q, k, v = Rows(q, strides[0]), Rows(k, strides[1]), Rows(v, strides[2])
    q_tile = load_tile(
        q, b_q, h, row, 0, T_q, n.d, BLOCK_Q, TILE.BLOCK_D, TILE.DESCRIPTOR
    )  # [BLOCK_Q, BLOCK_D]
    m = tl.full([BLOCK_Q], LOWEST, tl.float32)  # in base 2
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    for j in tl.range(full_start, full_end, BLOCK_K):
        j = listed(j, tiles, BLOCK_K, ON.MASK)
        acc, m, l = attend(
            acc, m, l, q_tile, k, v, b_k, h_kv, p, j, place, score, n, False, ON, TILE
        )
    if ON.WINDOW or ON.VARLEN or ON.MASK or RAGGED:
        # One loop over the blocks before and after the full ones.
        masked = tl.cdiv(end - first, BLOCK_K) - (full_end - full_start) // BLOCK_K
        for step in tl.range(0, masked):
            j = around(first + step * BLOCK_K, full_start, full_end)
            j = listed(j, tiles, BLOCK_K, ON.MASK)
            acc, m, l = attend(
                acc, m, l, q_tile, k, v, b_k, h_kv, p, j, place, score, n, True, ON,
                TILE
            )  # fmt: skip

    if ON.SINKS:  # one more key, with the value 0
        sink = tl.load(score.sinks + h).to(tl.float32) * LOG2_E
        m_new = tl.maximum(m, sink)
        alpha = tl.exp2(m - m_new)
        m, l, acc = m_new, l * alpha + tl.exp2(sink - m_new), acc * alpha[:, None]
    # A query that sees no key has l = 0, O = 0 and L = -inf.
    l_safe = tl.where(l == 0.0, 1.0, l)
    acc = acc / l_safe[:, None]
    store_tile(o, acc, b_q, h, row, 0, T_q, n.d_v, BLOCK_Q, BLOCK_DV)
    lse_rows = row_pointers(lse, b_q, h, i)
    tl.store(lse_rows, log_sum_exp(m, l), mask=i < T_q)


@triton.jit(do_not_specialize=["T"])
def delta_kernel(
    do, o, lse, dlse, delta, lse2, starts_q, H, T, PADDED, d,
    VARLEN: tl.constexpr, PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """One program writes D_i = sum_k dO_ik O_ik - dL_i, and L_i in base 2, for a block
    of rows; a sequence is padded to a multiple of PAD rows. do, o, lse, dlse: Rows.
    """
    blocks = tl.cdiv(T, PAD) * (PAD // BLOCK_T)
    row, head = tl.program_id(0) % blocks * BLOCK_T, tl.program_id(0) // blocks
    b, h = head // H, head % H
    b_q, T = sequence(starts_q, b, T, VARLEN)
    i = row + tl.arange(0, BLOCK_T)
    do_tile = load_tile(do, b_q, h, row, 0, T, d, BLOCK_T, BLOCK_D)
    o_tile = load_tile(o, b_q, h, row, 0, T, d, BLOCK_T, BLOCK_D)
    lse_rows = tl.load(row_pointers(lse, b_q, h, i), mask=i < T, other=-float("inf"))
    dlse_rows = tl.load(row_pointers(dlse, b_q, h, i), mask=i < T, other=0.0)
    # +inf makes a row of P zero: that of a query that sees no key, whose L is -inf, and
    # that of padding.
    blind = lse_rows == -float("inf")
    lse2_rows = tl.where(blind, float("inf"), lse_rows * LOG2_E)
    products = do_tile.to(tl.float32) * o_tile.to(tl.float32)  # [BLOCK_T, BLOCK_D]
    rows = padded_rows(b, b_q, h, H, PADDED, PAD, VARLEN) + i
    own = i < tl.cdiv(T, PAD) * PAD
    # What has no gradient has none through L either, even if dL is infinite.
    d_rows = tl.where(blind, 0.0, tl.sum(products, 1) - dlse_rows)
    tl.store(delta + rows, d_rows, mask=own)
    tl.store(lse2 + rows, lse2_rows, mask=own)


@triton.jit
def collect(
    dk, dv, k_tile, v_tile, keys, q, do, delta, lse2, b, h, row, place, score, n,
    MASKED: tl.constexpr, ON: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One step of the inner loop over queries: the block that starts at row adds to dK
    and dV. The matrices of scores are transposed, keys in rows, since P^T and dS^T
    multiply dO and Q.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    i = row + tl.arange(0, BLOCK_Q)
    q_tile = load_tile(
        q, b, h, row, 0, n.T_q, n.d, BLOCK_Q, TILE.BLOCK_D, TILE.DESCRIPTOR
    )  # [BLOCK_Q, BLOCK_D]
    do_tile = load_tile(
        do, b, h, row, 0, n.T_q, n.d_v, BLOCK_Q, TILE.BLOCK_DV, TILE.DESCRIPTOR
    )  # [BLOCK_Q, BLOCK_DV]
    lse_rows = tl.load(lse2 + i)
    d_rows = tl.load(delta + i)
    s = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q], unscaled
    p, keys = (i + (n.T_k - n.T_q))[None, :], keys[:, None]
    s, derivative, factor = changed(s, p, keys, place, score, n, ON)
    seen = sees(p, keys, (i < n.T_q)[None, :], place, score, ON)
    weights = probabilities(s, lse_rows[None, :], factor, seen, MASKED)
    kept = dropped(weights, p, keys, place, score, n, ON)
    dv = tl.dot(kept.to(do_tile.dtype), do_tile, dv, input_precision="ieee")
    dp = tl.dot(v_tile, do_tile.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q]
    dp = dropped(dp, p, keys, place, score, n, ON)
    ds = weights * (dp - d_rows[None, :])
    if ON.FUNCTION:
        derivative = visible_only(derivative, weights)
    if ON.SOFTCAP or ON.FUNCTION:
        ds = ds * derivative
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")  # unscaled
    return dk, dv


@triton.jit(do_not_specialize=["T_q", "T_k"])
def keys_kernel(
    q, k, v, do, strides, delta, lse2, dk, dv, scale, score, starts,
    H, GROUP, T_q, T_k, d, d_v, PADDED,
    PAD: tl.constexpr, ON: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One program writes one block of rows of dK and of dV, from all queries of the
    group that see them. q, k, v, do: pointers or descriptors; dk, dv: Rows.
    """
    n = Sizes(H, GROUP, T_q, T_k, d, d_v)
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    H, GROUP, H_kv = n.H, n.GROUP, n.H // n.GROUP
    blocks = tl.cdiv(n.T_k, BLOCK_K)
    # With a causal mask the first blocks of keys are seen by the most queries: they
    # start first.
    block = tl.program_id(0) % blocks
    col = block * BLOCK_K
    head = tl.program_id(0) // blocks
    b, h_kv = head // H_kv, head % H_kv
    b_q, T_q = sequence(starts.q, b, n.T_q, ON.VARLEN)
    b_k, T_k = sequence(starts.k, b, n.T_k, ON.VARLEN)
    if ON.VARLEN:
        T_q = tl.where(col < T_k, T_q, 0)
    blocks_q = tl.cdiv(n.T_q, BLOCK_Q)
    n = Sizes(H, GROUP, T_q, T_k, n.d, n.d_v)

    keys = col + tl.arange(0, BLOCK_K)
    first, full_start, full_end, end = query_bounds(
        col, T_q, T_k, score, ON.WINDOW, TILE
    )
    tiles = list_of(score, b, h_kv, block, ON.MASK)
    q, k, v = Rows(q, strides[0]), Rows(k, strides[1]), Rows(v, strides[2])
    do = Rows(do, strides[3])
    k_tile = load_tile(
        k, b_k, h_kv, col, 0, T_k, n.d, BLOCK_K, BLOCK_D, TILE.DESCRIPTOR
    )  # [BLOCK_K, BLOCK_D]
    v_tile = load_tile(
        v, b_k, h_kv, col, 0, T_k, n.d_v, BLOCK_K, BLOCK_DV, TILE.DESCRIPTOR
    )  # [BLOCK_K, BLOCK_DV]
    dk_acc = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    # One loop over all heads of the group: a loop around it would take fifty registers.
    # With 256 columns there are no registers for two loops: mask every block.
    ONE_LOOP: tl.constexpr = (ON.WINDOW or ON.MASK) and BLOCK_D > 128
    if ONE_LOOP:
        full_start, full_end = first, first
    full = (full_end - full_start) // BLOCK_Q
    masked = tl.cdiv(end - first, BLOCK_Q) - full
    # Without a mask there is at least one step. Where the compiler cannot tell, it
    # copies dK and dV for a loop that is skipped, and ptxas then waits for every single
    # product.
    steps = GROUP * full if ON.WINDOW or ON.VARLEN else tl.maximum(GROUP * full, 1)
    begin, last = 0, GROUP * masked
    if ON.MASK:
        first, full_start, full_end = 0, 0, 0
        steps, last = tl.load(tiles), tl.load(tiles + 1)
        begin = begin if ONE_LOOP else steps
    if not ONE_LOOP:
        for step in tl.range(0, steps):
            h, block = of_group(step, full, tiles, h_kv, blocks_q, GROUP, ON.MASK)
            row = full_start + block * BLOCK_Q
            rows = padded_rows(b, b_q, h, H, PADDED, PAD, ON.VARLEN)
            place = Place(b, h, slope_of(score, b, h, ON.ALIBI))
            dk_acc, dv_acc = collect(
                dk_acc, dv_acc, k_tile, v_tile, keys, q, do, delta + rows, lse2 + rows,
                b_q, h, row, place, score, n, False, ON, TILE,
            )  # fmt: skip
    if ON.WINDOW or ON.MASK:
        for step in tl.range(begin, last):
            h, block = of_group(step, masked, tiles, h_kv, blocks_q, GROUP, ON.MASK)
            row = around(first + block * BLOCK_Q, full_start, full_end)
            rows = padded_rows(b, b_q, h, H, PADDED, PAD, ON.VARLEN)
            place = Place(b, h, slope_of(score, b, h, ON.ALIBI))
            dk_acc, dv_acc = collect(
                dk_acc, dv_acc, k_tile, v_tile, keys, q, do, delta + rows, lse2 + rows,
                b_q, h, row, place, score, n, True, ON, TILE,
            )  # fmt: skip
    store_tile(dk, dk_acc * scale, b_k, h_kv, col, 0, T_k, n.d, BLOCK_K, BLOCK_D)
    store_tile(dv, dv_acc, b_k, h_kv, col, 0, T_k, n.d_v, BLOCK_K, BLOCK_DV)


@triton.jit
def descend(
    dq, q_tile, do_tile, d_rows, lse_rows, k, v, b, h, positions, j, place, score, n,
    MASKED: tl.constexpr, ON: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One step of the inner loop over keys: the block that starts at j adds to dQ."""
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    k_tile = load_tile(
        k, b, h, j, 0, n.T_k, n.d, BLOCK_K, TILE.BLOCK_D, TILE.DESCRIPTOR
    )  # [BLOCK_K, BLOCK_D]
    v_tile = load_tile(
        v, b, h, j, 0, n.T_k, n.d_v, BLOCK_K, TILE.BLOCK_DV, TILE.DESCRIPTOR
    )  # [BLOCK_K, BLOCK_DV]
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K], unscaled
    positions, keys = positions[:, None], (j + tl.arange(0, BLOCK_K))[None, :]
    s, derivative, factor = changed(s, positions, keys, place, score, n, ON)
    seen = sees(positions, keys, keys < n.T_k, place, score, ON)
    p = probabilities(s, lse_rows[:, None], factor, seen, MASKED)
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
    dp = dropped(dp, positions, keys, place, score, n, ON)
    ds = p * (dp - d_rows[:, None])
    if ON.FUNCTION:
        derivative = visible_only(derivative, p)
    if ON.SOFTCAP or ON.FUNCTION:
        ds = ds * derivative
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")  # unscaled


@triton.jit(do_not_specialize=["T_q", "T_k"])
def queries_kernel(
    q, k, v, do, strides, delta, lse2, dq, scale, score, starts,
    H, GROUP, T_q, T_k, d, d_v, PADDED,
    RAGGED: tl.constexpr, PAD: tl.constexpr, ON: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One program writes one block of rows of dQ, from all keys that these rows see.
    q, k, v, do: pointers or descriptors; dq: Rows.
    """
    n = Sizes(H, GROUP, T_q, T_k, d, d_v)
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    blocks = tl.cdiv(n.T_q, BLOCK_Q)
    block = blocks - 1 - tl.program_id(0) % blocks
    row = block * BLOCK_Q
    head = tl.program_id(0) // blocks
    b, h = head // n.H, head % n.H
    h_kv = h // n.GROUP
    place = Place(b, h, slope_of(score, b, h, ON.ALIBI))
    b_q, T_q = sequence(starts.q, b, n.T_q, ON.VARLEN)
    b_k, T_k = sequence(starts.k, b, n.T_k, ON.VARLEN)
    if ON.VARLEN:
        T_k = tl.where(row < T_q, T_k, 0)
    n = Sizes(n.H, n.GROUP, T_q, T_k, n.d, n.d_v)

    i = row + tl.arange(0, BLOCK_Q)
    positions = i + (T_k - T_q)
    tiles = list_of(score, b, h, block, ON.MASK)
    first, full_start, full_end, end = key_bounds(row, T_q, T_k, score, tiles, ON, TILE)

    q, k, v = Rows(q, strides[0]), Rows(k, strides[1]), Rows(v, strides[2])
    do = Rows(do, strides[3])
    q_tile = load_tile(
        q, b_q, h, row, 0, T_q, n.d, BLOCK_Q, BLOCK_D, TILE.DESCRIPTOR
    )  # [BLOCK_Q, BLOCK_D]
    do_tile = load_tile(
        do, b_q, h, row, 0, T_q, n.d_v, BLOCK_Q, TILE.BLOCK_DV, TILE.DESCRIPTOR
    )  # [BLOCK_Q, BLOCK_DV]
    rows = padded_rows(b, b_q, h, n.H, PADDED, PAD, ON.VARLEN) + i
    lse_rows = tl.load(lse2 + rows, mask=i < T_q, other=float("inf"))
    d_rows = tl.load(delta + rows, mask=i < T_q, other=0.0)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for j in tl.range(full_start, full_end, BLOCK_K):
        j = listed(j, tiles, BLOCK_K, ON.MASK)
        acc = descend(
            acc, q_tile, do_tile, d_rows, lse_rows, k, v, b_k, h_kv, positions, j,
            place, score, n, False, ON, TILE,
        )  # fmt: skip
    if ON.WINDOW or ON.VARLEN or ON.MASK or RAGGED:
        masked = tl.cdiv(end - first, BLOCK_K) - (full_end - full_start) // BLOCK_K
        for step in tl.range(0, masked):
            j = around(first + step * BLOCK_K, full_start, full_end)
            j = listed(j, tiles, BLOCK_K, ON.MASK)
            acc = descend(
                acc, q_tile, do_tile, d_rows, lse_rows, k, v, b_k, h_kv, positions, j,
                place, score, n, True, ON, TILE,
            )  # fmt: skip
    store_tile(dq, acc * scale, b_q, h, row, 0, T_q, n.d, BLOCK_Q, BLOCK_D)


# The rows for sm_90 alone are the fastest, or close to it, of a sweep on an H200 with T
# = 16384: a causal window of 1024 keys, a causal mask with ALiBi, and, without
# descriptors, sequences of 256 to 6144 tokens packed. With 256 columns some spill, and
# are still up to three times as fast as those that do not. The other rows are those of
# flash2.py and backward.py, made smaller where a changed score takes the registers.
# Packed sequences and tensors that TMA cannot read use the rows without descriptors: a
# descriptor would read on into the next sequence.
FORWARD = (
    Configuration((90,), 16, 64, 64, 64, 4, 2, True, 51_000),
    Configuration((90,), 16, 128, 64, 64, 4, 3, True, 117_000),
    Configuration((90,), 16, 256, 128, 64, 8, 2, True, 198_000),
    Configuration((90,), 16, 64, 64, 64, 4, 3, False, 58_000),
    Configuration((90,), 16, 128, 128, 64, 8, 3, False, 132_000),
    Configuration((90,), 16, 256, 128, 64, 8, 2, False, 198_000),
    Configuration(TENSOR_CORES, 16, 128, 64, 64, 4, 2, False, 101_000),
    Configuration(TENSOR_CORES, 16, 256, 64, 32, 8, 2, False, 101_000),
    *tables.FORWARD_NO_TENSOR_CORES,
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
    *tables.BACKWARD_NO_TENSOR_CORES,
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
    *tables.BACKWARD_NO_TENSOR_CORES,
    Configuration((75,), 32, 256, 16, 16, 8, 1, False, 65_536),
)
# From tiles of 64 x 64, the L2 cache would take longer than the products. Not timed.
BIAS = (Configuration((90,), 16, 128, 128, 64, 8, 1, True, 99_000), *QUERIES)
PAD = max(tables.INTERPRETER.BLOCK_Q, *(row.BLOCK_Q for row in (*KEYS, *QUERIES)))


def configuration(name, table, tensors, packing):
    """The row of a table for tensors, packed or not."""
    if INTERPRETED or packing is None:
        return tables.configuration(name, table, tensors, False)
    *fits, _ = tables.problem(tensors)
    return tables.fitting(name, table, *fits, False, False)


def score_and_lists(find, given, q, k, v, score_mod, packing, config):
    """The Score of a kernel; where there is a mask, with its lists, which find(...)
    makes unless they are number ``given`` of those that the caller made.
    """
    lists = None
    if score_mod.mask is not None:
        B, n = scores.batch_and_sizes(q, k, v, packing)
        sides = config.BLOCK_Q, config.BLOCK_K
        lists = tile_lists.found(find, given, q, score_mod, packing, B, n, *sides)
    return scores.score_arguments(score_mod, lists)


def sides_of_tiles(q, k, v):
    """The sides of the tiles of O, of dK and dV, and of dQ for tensors like these, and
    for an output gradient like q.
    """
    tensors = inputs.widened(q, k, v)
    rows = [configuration("masks", x, tensors, None) for x in (FORWARD, KEYS, QUERIES)]
    return tuple((row.BLOCK_Q, row.BLOCK_K) for row in rows)


@plans.planned
def launch_forward(q, k, v, o, lse, score_mod, packing, config):
    """Launch forward; q, k, v in the computed dtype, scale >= 0, only T_k may be 0."""
    B, n = scores.batch_and_sizes(q, k, v, packing)
    options = scores.compiled_for(score_mod, packing, config, n)
    read_from = q, k, v, score_mod, packing, config
    plans.launch(
        forward_kernel, q, B * n.H * triton.cdiv(n.T_q, config.BLOCK_Q),
        *scores.operands((q, k, v), options["TILE"], packing),
        scores.rows_of(o, packing), scores.rows_of(lse, packing),
        score_and_lists(tile_lists.of_queries, 0, *read_from),
        scores.starts_of(packing), *n, RAGGED=n.T_k % config.BLOCK_K != 0, **options,
    )  # fmt: skip


@plans.planned
def launch_delta(o, lse, do, dlse, delta, lse2, T, packing):
    """Launch the kernel that fills delta and lse2, float32 [B, H, PADDED] or, packed,
    [1, H, PADDED]; T is then the length of the longest sequence.
    """
    B = o.shape[0] if packing is None else packing.starts_q.shape[0] - 1
    H, d_v = o.shape[1], o.shape[-1]
    plans.launch(
        delta_kernel, o, B * H * triton.cdiv(T, PAD) * (PAD // 32),
        *(scores.rows_of(x, packing) for x in (do, o, lse, dlse)), delta, lse2,
        scores.starts_of(packing).q, H, T, delta.shape[2], d_v,
        VARLEN=packing is not None, PAD=PAD, BLOCK_T=32, BLOCK_D=padded(d_v),
    )  # fmt: skip


@plans.planned
def launch_keys(q, k, v, do, delta, lse2, dk, dv, score_mod, packing, config):
    """Launch the kernel that fills dk and dv, in the shapes of k and v."""
    B, n, read, options = scores.backward_arguments(
        q, k, v, do, score_mod, packing, config, PAD
    )
    read_from = q, k, v, score_mod, packing, config
    plans.launch(
        keys_kernel, q, B * k.shape[1] * triton.cdiv(n.T_k, config.BLOCK_K),
        *read, delta, lse2, scores.rows_of(dk, packing), scores.rows_of(dv, packing),
        score_mod.scale, score_and_lists(tile_lists.of_keys, 1, *read_from),
        scores.starts_of(packing), *n, delta.shape[2], **options,
    )  # fmt: skip


@plans.planned
def launch_queries(q, k, v, do, delta, lse2, dq, score_mod, packing, config):
    """Launch the kernel that fills dq, in the shape of q."""
    B, n, read, options = scores.backward_arguments(
        q, k, v, do, score_mod, packing, config, PAD
    )
    read_from = q, k, v, score_mod, packing, config
    plans.launch(
        queries_kernel, q, B * n.H * triton.cdiv(n.T_q, config.BLOCK_Q),
        *read, delta, lse2, scores.rows_of(dq, packing), score_mod.scale,
        score_and_lists(tile_lists.of_queries, 2, *read_from),
        scores.starts_of(packing), *n, delta.shape[2],
        RAGGED=n.T_k % config.BLOCK_K != 0, **options,
    )  # fmt: skip


@plans.planned
def forward(q, k, v, score_mod, packing=None):
    """``(o, lse)``, as :mod:`flashlib.kernels` says; with a packing of q ``[total_q, H,
    d]``, k ``[total_k, H_kv, d]`` and v ``[total_k, H_kv, d_v]``, o ``[total_q, H,
    d_v]`` and lse ``[H, total_q]``.
    """
    dtype = q.dtype
    q, k, v, scale, o, lse = inputs.forward_tensors(q, k, v, score_mod.scale)
    score_mod = score_mod._replace(scale=scale)
    if lse.numel():
        config = configuration("masks", FORWARD, (q, k, v), packing)
        launch_forward(q, k, v, o, lse, score_mod, packing, config)
    return o.to(dtype), lse


def statistics(o, lse, do, dlse, B, n, packing=None):
    """New D and L in base 2 of B batches or sequences, padded as their queries are."""
    shape = (B, n.H, triton.cdiv(n.T_q, PAD) * PAD)
    if packing is not None:
        shape = (1, n.H, (o.shape[0] // PAD + B) * PAD)
    delta, lse2 = (o.new_empty(shape, dtype=torch.float32) for _ in range(2))
    if lse.numel():
        launch_delta(o, lse, do, dlse, delta, lse2, n.T_q, packing)
    return delta, lse2


@plans.planned
def gradient_of_bias(q, k, v, o, lse, do, dlse, score_mod):
    """The gradient of the bias alone, as :func:`backward` returns it."""
    B, n = scores.batch_and_sizes(q, k, v, None)
    read = q, k, v, do, *statistics(o, lse, do, dlse, B, n)
    config = configuration("masks, dB", BIAS, (q, k, v, do), None)
    return score_gradients.of_bias(*read, score_mod, config, PAD)


@plans.planned
def backward(q, k, v, o, lse, do, dlse, score_mod, packing=None, bias_gradient=True):
    """``(dq, dk, dv, dbias, dsinks)``, the first three as :mod:`flashlib.kernels` says,
    or packed, the others empty where there is nothing that they belong to or dbias is
    not asked for; the same in every bit on every run. The slopes of ALiBi have no
    gradient.
    """
    dtype = q.dtype
    q, k, v, o, do = inputs.widened(q, k, v, o, do)
    B, n = scores.batch_and_sizes(q, k, v, packing)
    delta, lse2 = statistics(o, lse, do, dlse, B, n, packing)
    dq, dk, dv = plans.new_like(q, k, v)
    if not lse.numel():
        dk.zero_()
        dv.zero_()
    elif dk.numel():
        config = configuration("masks, dK and dV", KEYS, (q, k, v, do), packing)
        launch_keys(q, k, v, do, delta, lse2, dk, dv, score_mod, packing, config)
    if dq.numel():
        config = configuration("masks, dQ", QUERIES, (q, k, v, do), packing)
        launch_queries(q, k, v, do, delta, lse2, dq, score_mod, packing, config)
    dbias = dsinks = q.new_empty(0)
    if score_mod.bias is not None and bias_gradient:
        config = configuration("masks, dB", BIAS, (q, k, v, do), None)
        read = q, k, v, do, delta, lse2
        dbias = score_gradients.of_bias(*read, score_mod, config, PAD)
    if score_mod.sinks is not None:
        problem = B, n.T_q, score_mod, packing, PAD
        dsinks = score_gradients.of_sinks(delta, lse2, *problem)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), dbias, dsinks
