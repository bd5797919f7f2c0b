"""The backward pass without any T x T matrix: P is computed again, block by block, from
Q, K and L.

Chapter *The backward pass*; Dao et al., "FlashAttention" (NeurIPS 2022), Algorithm 4,
and Dao, "FlashAttention-2" (ICLR 2024), Algorithm 2. A first kernel writes D =
rowsum(dO o O) (``eq-gradients-delta``) and L in base 2. P_ij = exp(S_ij - L_i) then
needs neither a maximum nor a sum, and the rest is in the chapter *Gradients by hand*:
dV = P^T dO, dP = dO V^T, dS = P o (dP - D), dQ = scale dS K, dK = scale dS^T Q.

There are two forms. Split: one kernel owns a block of keys and collects dK and dV from
every query that sees it, another owns a block of queries and collects dQ. One program
computes each sum, in a fixed order, so two runs agree in every bit; S and dP are
computed twice, seven products in all. Fused: the kernel that owns a block of keys also
adds its part of dQ to a buffer in memory, by atomic additions. That takes five
products, but the additions happen in whichever order the programs run.

Blocks whose queries all see all keys are read without a mask. Blocks of which no query
sees a key are never read. Windows, softcap and ALiBi have a backward pass of their own,
in masks_backward.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import descriptors, inputs, padded, tables, tiles
from flashlib.kernels.tables import Configuration
from flashlib.kernels.tiles import (
    LOG2_E,
    Rows,
    Sizes,
    add_columns,
    add_tile,
    dot_columns,
    load_columns,
    load_tile,
    probabilities,
    row_statistics,
    store_columns,
    store_tile,
    visible,
    zero_columns,
)


class Strides(NamedTuple):
    """The strides of the tensors [B, H, T, d] that every kernel reads, four each."""

    q: Any
    k: Any
    v: Any
    do: Any


# Otherwise Triton would compile further versions for lengths of 1 and multiples of 16.
@triton.jit(do_not_specialize=["T"])
def delta_kernel(
    do, o, lse, dlse, delta, lse2, counters, H, T, PADDED, d,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """One program writes D_i = sum_k dO_ik O_ik - dL_i, and L_i in base 2, for a block
    of rows, and 0 to its counter, if there are counters. do, o, lse, dlse: Rows.

    A head has PADDED rows, a multiple of BLOCK_T, of which those from T on are padding.
    """
    blocks = PADDED // BLOCK_T
    row, head = tl.program_id(0) % blocks * BLOCK_T, tl.program_id(0) // blocks
    b, h = head // H, head % H
    d_rows, lse2_rows = row_statistics(
        do, o, lse, dlse, b, h, row, T, d, BLOCK_T, BLOCK_D
    )
    rows = head.to(tl.int64) * PADDED + (row + tl.arange(0, BLOCK_T))
    tl.store(delta + rows, d_rows)
    tl.store(lse2 + rows, lse2_rows)
    if counters is not None:
        tl.store(counters + tl.program_id(0), 0)


@triton.jit
def collect(
    dk, dv, k_tiles, v_tile, q, do, delta, lse2, b, h, row, first, scale_log2, n,
    MASKED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One step of the inner loop over queries: the block that starts at row adds to dK
    and dV; also returns dS. The matrices of scores are transposed, keys in rows, since
    P^T and dS^T multiply dO and Q.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    i = row + tl.arange(0, BLOCK_Q)
    q_tiles = load_columns(q, b, h, row, n.T_q, n.d, BLOCK_Q, TILE)
    do_tile = load_tile(
        do, b, h, row, 0, n.T_q, n.d_v, BLOCK_Q, TILE.BLOCK_DV, TILE.DESCRIPTOR
    )  # [BLOCK_Q, BLOCK_DV]
    lse_rows = tl.load(lse2 + i)
    d_rows = tl.load(delta + i)
    s = dot_columns(k_tiles, q_tiles, TILE)  # [BLOCK_K, BLOCK_Q], unscaled
    seen = first[:, None] <= i[None, :]  # [BLOCK_K, BLOCK_Q]
    p = probabilities(s, lse_rows[None, :], scale_log2, seen, MASKED)
    dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision="ieee")
    dp = tl.dot(v_tile, do_tile.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q]
    ds = (p * (dp - d_rows[None, :])).to(do_tile.dtype)
    dk = add_columns(dk, ds, q_tiles, TILE)  # unscaled
    return dk, dv, ds


@triton.jit
def bounds(col, n, CAUSAL: tl.constexpr, TILE: tl.constexpr):
    """Queries before `start` see no key of the block at col; those from `full_start`
    see all.
    """
    start, full_start = 0, 0
    if CAUSAL:
        start = tl.maximum(col + n.T_q - n.T_k, 0) // TILE.BLOCK_Q * TILE.BLOCK_Q
        full_start = tl.maximum(col + TILE.BLOCK_K - 1 + n.T_q - n.T_k, 0)
        full_start = tl.cdiv(full_start, TILE.BLOCK_Q) * TILE.BLOCK_Q
    return start, full_start


@triton.jit
def following(h, row, first, end, BLOCK_Q: tl.constexpr):
    """The block of queries after the one at row of head h: the next one before end, or
    the next head's first.
    """
    row += BLOCK_Q
    return tl.where(row < end, h, h + 1), tl.where(row < end, row, first)


@triton.jit
def own_keys(k, v, n, H_kv, TILE: tl.constexpr):
    """This program's block of keys: batch, head and first key, the tiles of K and V,
    and zeros for dK and dV.
    """
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    blocks = tl.cdiv(n.T_k, BLOCK_K)
    # With a causal mask the first blocks of keys are seen by the most queries: they
    # start first.
    col = tl.program_id(0) % blocks * BLOCK_K
    head = tl.program_id(0) // blocks
    b, h = head // H_kv, head % H_kv
    k_tiles = load_columns(k, b, h, col, n.T_k, n.d, BLOCK_K, TILE)
    v_tile = load_tile(
        v, b, h, col, 0, n.T_k, n.d_v, BLOCK_K, BLOCK_DV, TILE.DESCRIPTOR
    )  # [BLOCK_K, BLOCK_DV]
    dk = zero_columns(BLOCK_K, TILE)
    dv = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    return b, h, col, k_tiles, v_tile, dk, dv


@triton.jit(do_not_specialize=["T_q", "T_k"])
def keys_kernel(
    q, k, v, do, strides, delta, lse2, dk, dv, scale, scale_log2,
    H, GROUP, T_q, T_k, d, d_v, H_kv, PADDED,
    CAUSAL: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One program writes one block of rows of dK and of dV, from all queries of the
    group that see them. q, k, v, do: pointers or descriptors; dk, dv: Rows.

    Rows after the last key are computed like the others, and not stored.
    """
    n = Sizes(H, GROUP, T_q, T_k, d, d_v)
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    COLUMNS: tl.constexpr = TILE.BLOCK_D + TILE.REST
    q, k, v = Rows(q, strides.q), Rows(k, strides.k), Rows(v, strides.v)
    do = Rows(do, strides.do)
    b, h_kv, col, k_tiles, v_tile, dk_acc, dv_acc = own_keys(k, v, n, H_kv, TILE)
    first = col + n.T_q - n.T_k + tl.arange(0, BLOCK_K)  # the first query that sees j
    start, full_start = bounds(col, n, CAUSAL, TILE)
    if CAUSAL and COLUMNS > 128:
        # With more than 128 columns there are no registers for two loops: mask every
        # block.
        full_start = n.T_q
    # One loop over all heads of the group: a loop around the loop would take fifty
    # registers.
    if CAUSAL:
        h, row, last = h_kv * n.GROUP, start, tl.minimum(full_start, n.T_q)
        for _ in tl.range(0, n.GROUP * tl.cdiv(last - start, BLOCK_Q)):
            rows = (b * n.H + h).to(tl.int64) * PADDED
            dk_acc, dv_acc, _ = collect(
                dk_acc, dv_acc, k_tiles, v_tile, q, do, delta + rows, lse2 + rows,
                b, h, row, first, scale_log2, n, True, TILE
            )  # fmt: skip
            h, row = following(h, row, start, last, BLOCK_Q)
    if not CAUSAL or COLUMNS <= 128:
        h, row = h_kv * n.GROUP, full_start
        steps = n.GROUP * tl.cdiv(n.T_q - full_start, BLOCK_Q)
        # Without a mask there is at least one step. Where the compiler cannot tell, it
        # copies dK and dV for a loop that is skipped, and ptxas then waits for every
        # single product.
        for _ in tl.range(0, steps if CAUSAL else tl.maximum(steps, 1)):
            rows = (b * n.H + h).to(tl.int64) * PADDED
            dk_acc, dv_acc, _ = collect(
                dk_acc, dv_acc, k_tiles, v_tile, q, do, delta + rows, lse2 + rows,
                b, h, row, first, scale_log2, n, False, TILE
            )  # fmt: skip
            h, row = following(h, row, full_start, n.T_q, BLOCK_Q)
    store_columns(dk, dk_acc, scale, b, h_kv, col, n.T_k, n.d, BLOCK_K, TILE)
    store_tile(dv, dv_acc, b, h_kv, col, 0, n.T_k, n.d_v, BLOCK_K, TILE.BLOCK_DV)


@triton.jit
def add_part(dq, ds, k_tiles, scale, b, h, row, n, TILE: tl.constexpr):
    """Add scale dS K to the block of dQ at row, in memory; ds is dS^T."""
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    part = tl.dot(ds.T, k_tiles[0], input_precision="ieee")  # [BLOCK_Q, BLOCK_D]
    add_tile(dq, part * scale, b, h, row, 0, n.T_q, n.d, BLOCK_Q, BLOCK_D)
    if TILE.REST > 0:
        part = tl.dot(ds.T, k_tiles[1], input_precision="ieee")  # [BLOCK_Q, REST]
        add_tile(dq, part * scale, b, h, row, BLOCK_D, n.T_q, n.d, BLOCK_Q, TILE.REST)


@triton.jit(do_not_specialize=["T_q", "T_k"])
def fused_kernel(
    q, k, v, do, strides, delta, lse2, dq, dk, dv, scale, scale_log2,
    H, GROUP, T_q, T_k, d, d_v, H_kv, PADDED,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """As keys_kernel; in addition every step adds scale dS K to a block of dQ in
    memory, which starts as zeros. Rows after the last key add nothing to it.
    """
    n = Sizes(H, GROUP, T_q, T_k, d, d_v)
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    q, k, v = Rows(q, strides.q), Rows(k, strides.k), Rows(v, strides.v)
    do = Rows(do, strides.do)
    b, h_kv, col, k_tiles, v_tile, dk_acc, dv_acc = own_keys(k, v, n, H_kv, TILE)
    j = col + tl.arange(0, BLOCK_K)
    first = j + n.T_q - n.T_k
    start, full_start = bounds(col, n, CAUSAL, TILE)
    if CAUSAL:
        h, row, last = h_kv * n.GROUP, start, tl.minimum(full_start, n.T_q)
        for _ in tl.range(0, n.GROUP * tl.cdiv(last - start, BLOCK_Q)):
            rows = (b * n.H + h).to(tl.int64) * PADDED
            dk_acc, dv_acc, ds = collect(
                dk_acc, dv_acc, k_tiles, v_tile, q, do, delta + rows, lse2 + rows,
                b, h, row, first, scale_log2, n, True, TILE
            )  # fmt: skip
            add_part(dq, ds, k_tiles, scale, b, h, row, n, TILE)
            h, row = following(h, row, start, last, BLOCK_Q)
    h, row = h_kv * n.GROUP, full_start
    steps = n.GROUP * tl.cdiv(n.T_q - full_start, BLOCK_Q)
    for _ in tl.range(0, steps if CAUSAL else tl.maximum(steps, 1)):
        rows = (b * n.H + h).to(tl.int64) * PADDED
        dk_acc, dv_acc, ds = collect(
            dk_acc, dv_acc, k_tiles, v_tile, q, do, delta + rows, lse2 + rows,
            b, h, row, first, scale_log2, n, False, TILE
        )  # fmt: skip
        if RAGGED:
            ds = tl.where((j < n.T_k)[:, None], ds, 0.0)
        add_part(dq, ds, k_tiles, scale, b, h, row, n, TILE)
        h, row = following(h, row, full_start, n.T_q, BLOCK_Q)
    store_columns(dk, dk_acc, scale, b, h_kv, col, n.T_k, n.d, BLOCK_K, TILE)
    store_tile(dv, dv_acc, b, h_kv, col, 0, n.T_k, n.d_v, BLOCK_K, TILE.BLOCK_DV)


@triton.jit
def descend(
    dq, q_tiles, do_tile, d_rows, lse_rows, k, v, b, h, i, j, scale_log2, n,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One step of the inner loop over keys: the block that starts at j adds to dQ."""
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    k_tiles = load_columns(k, b, h, j, n.T_k, n.d, BLOCK_K, TILE)
    v_tile = load_tile(
        v, b, h, j, 0, n.T_k, n.d_v, BLOCK_K, TILE.BLOCK_DV, TILE.DESCRIPTOR
    )  # [BLOCK_K, BLOCK_DV]
    s = dot_columns(q_tiles, k_tiles, TILE)  # [BLOCK_Q, BLOCK_K], unscaled
    seen = visible(i, j + tl.arange(0, BLOCK_K), n.T_q, n.T_k, CAUSAL)
    p = probabilities(s, lse_rows[:, None], scale_log2, seen, MASKED)
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
    ds = (p * (dp - d_rows[:, None])).to(v_tile.dtype)
    return add_columns(dq, ds, k_tiles, TILE)  # unscaled


@triton.jit(do_not_specialize=["T_q", "T_k"])
def queries_kernel(
    q, k, v, do, strides, delta, lse2, dq, scale, scale_log2,
    H, GROUP, T_q, T_k, d, d_v, PADDED,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One program writes one block of rows of dQ, from all keys that these rows see.
    q, k, v, do: pointers or descriptors; dq: Rows.
    """
    n = Sizes(H, GROUP, T_q, T_k, d, d_v)
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    blocks = tl.cdiv(T_q, BLOCK_Q)
    # With a causal mask the last blocks of queries see the most keys: they start first.
    row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    head = tl.program_id(0) // blocks
    b, h = head // n.H, head % n.H

    i = row + tl.arange(0, BLOCK_Q)
    # Every query of the block sees the keys before `full_end`, none those from `end`.
    full_end, end = T_k // BLOCK_K * BLOCK_K, T_k
    if CAUSAL:
        full_end = tl.minimum(
            full_end, tl.maximum(row + 1 + T_k - T_q, 0) // BLOCK_K * BLOCK_K
        )
        end = tl.minimum(end, tl.maximum(row + BLOCK_Q + T_k - T_q, 0))

    q, k, v = Rows(q, strides.q), Rows(k, strides.k), Rows(v, strides.v)
    do = Rows(do, strides.do)
    q_tiles = load_columns(q, b, h, row, T_q, n.d, BLOCK_Q, TILE)
    do_tile = load_tile(
        do, b, h, row, 0, T_q, n.d_v, BLOCK_Q, TILE.BLOCK_DV, TILE.DESCRIPTOR
    )  # [BLOCK_Q, BLOCK_DV]
    rows = head.to(tl.int64) * PADDED + i
    lse_rows = tl.load(lse2 + rows)
    d_rows = tl.load(delta + rows)
    acc = zero_columns(BLOCK_Q, TILE)
    for j in tl.range(0, full_end, BLOCK_K):
        acc = descend(
            acc, q_tiles, do_tile, d_rows, lse_rows, k, v, b, h // n.GROUP, i, j,
            scale_log2, n, CAUSAL, False, TILE
        )  # fmt: skip
    if CAUSAL or RAGGED:
        for j in tl.range(full_end, end, BLOCK_K):
            acc = descend(
                acc, q_tiles, do_tile, d_rows, lse_rows, k, v, b, h // n.GROUP, i, j,
                scale_log2, n, CAUSAL, True, TILE
            )  # fmt: skip
    store_columns(dq, acc, scale, b, h, row, T_q, n.d, BLOCK_Q, TILE)


# The rows for 16 bits compile without spills, with the exceptions that
# tests/test_compile_backward.py lists, and with products that overlap the work between
# them. Those with descriptors are the fastest of a sweep on an H200: a program keeps dK
# and dV, or dQ, in registers next to the scores, so tiles have about 64 rows.
KEYS = (
    Configuration((90,), 16, 64, 64, 64, 4, 3, True, 68_000),
    Configuration((90,), 16, 128, 64, 64, 4, 2, True, 100_000),
    Configuration((90,), 16, 192, 64, 64, 8, 2, False, 124_000),
    Configuration((90,), 16, 256, 64, 64, 8, 2, True, 198_000),
    *tables.OWN_KEYS,
)
QUERIES = (
    Configuration((90,), 16, 64, 64, 64, 4, 3, True, 68_000, causal=False),
    Configuration((90,), 16, 64, 64, 64, 4, 2, True, 51_000, causal=True),
    Configuration((90,), 16, 128, 128, 64, 8, 3, True, 165_000),
    Configuration((90,), 16, 192, 64, 64, 8, 2, False, 123_000),
    Configuration((90,), 16, 256, 64, 32, 4, 3, True, 165_000),
    *tables.OWN_QUERIES,
)
# More rows of keys in a program mean fewer additions to dQ in memory, but the product
# that is added takes shared memory. In float32 with d = 256 it is more than sm_75 has,
# so the fused form is refused there: it has no last row.
FUSED = (
    Configuration((90,), 16, 64, 64, 64, 4, 3, True, 84_000),
    Configuration((90,), 16, 128, 32, 128, 8, 2, True, 107_000),
    *tables.OWN_KEYS[:-1],
)
DELTA_ROWS = 32  # of a program of delta_kernel
LARGEST_BLOCK_Q = max(row.BLOCK_Q for row in (*KEYS, *QUERIES, *FUSED))


@plans.planned
def launch_delta(o, lse, do, dlse, delta, lse2, counters=None):
    """Launch the kernel that fills delta and lse2, contiguous [B, H, PADDED] in
    float32, and counters, int32 [B H PADDED / DELTA_ROWS], with zeros.
    """
    B, H, T_q, d_v = o.shape
    PADDED = delta.shape[2]
    plans.launch(
        delta_kernel, o, B * H * PADDED // DELTA_ROWS, *tiles.as_rows(do, o, lse, dlse),
        delta, lse2, counters, H, T_q, PADDED, d_v, BLOCK_T=DELTA_ROWS,
        BLOCK_D=padded(d_v),
    )  # fmt: skip


@plans.planned
def launch_keys(q, k, v, do, delta, lse2, dq, dk, dv, causal, scale, config):
    """Launch the kernel that fills dk and dv, in the shapes of k and v; where dq is not
    None, the fused one, which adds to dq.
    """
    kernel, results, options = keys_kernel, (dk, dv), {}
    if dq is not None:
        kernel, results = fused_kernel, (dq, dk, dv)
        options = {"RAGGED": k.shape[2] % config.BLOCK_K != 0}
    read, n, compiled_for = arguments(q, k, v, do, config)
    plans.launch(
        kernel, q, k.shape[0] * k.shape[1] * triton.cdiv(n.T_k, config.BLOCK_K),
        *read, delta, lse2, *tiles.as_rows(*results), scale, scale * LOG2_E.value, *n,
        k.shape[1], delta.shape[2], CAUSAL=causal, **options, **compiled_for,
    )  # fmt: skip


@plans.planned
def launch_queries(q, k, v, do, delta, lse2, dq, causal, scale, config):
    """Launch the kernel that fills dq, from what launch_delta fills."""
    read, n, compiled_for = arguments(q, k, v, do, config)
    plans.launch(
        queries_kernel, q, q.shape[0] * n.H * triton.cdiv(n.T_q, config.BLOCK_Q),
        *read, delta, lse2, *tiles.as_rows(dq), scale, scale * LOG2_E.value, *n,
        delta.shape[2], CAUSAL=causal, RAGGED=n.T_k % config.BLOCK_K != 0,
        **compiled_for,
    )  # fmt: skip


def arguments(q, k, v, do, config):
    """The tensors that the kernels read and their strides, the Sizes, and what the
    kernels are compiled for.
    """
    n, strides = inputs.sizes(q, k, v), Strides(*(x.stride() for x in (q, k, v, do)))
    options = tables.compiled_for(config, n, backward=True)
    return (*descriptors.operands((q, k, v, do), options["TILE"]), strides), n, options


@plans.planned
def backward(q, k, v, o, lse, do, dlse, causal, scale, deterministic=True):
    """``(dq, dk, dv)``, as :mod:`flashlib.kernels` says, without any T x T matrix.

    deterministic: the split form, the same in every bit on every run; otherwise the
    fused form, which adds dQ up in a float32 buffer in no particular order.
    """
    dtype = q.dtype
    q, k, v, o, do = inputs.widened(q, k, v, o, do)
    B, H, T_q, _ = q.shape
    # Padding after the last row, so that a block of queries needs no mask for its D and
    # L.
    rows = triton.cdiv(T_q, LARGEST_BLOCK_Q) * LARGEST_BLOCK_Q
    delta, lse2 = (q.new_empty(B, H, rows, dtype=torch.float32) for _ in range(2))
    dq, dk, dv = plans.new_like(q, k, v)
    if not deterministic:
        dq = plans.empty_like(q, q.shape[3], torch.float32).zero_()

    tensors = (q, k, v, do)
    if delta.numel():
        launch_delta(o, lse, do, dlse, delta, lse2)
    if not T_q:
        dk.zero_()
        dv.zero_()
    elif dk.numel():
        table = KEYS if deterministic else FUSED
        config = tables.configuration("backward, dK and dV", table, tensors, causal)
        added = None if deterministic else dq
        launch_keys(q, k, v, do, delta, lse2, added, dk, dv, causal, scale, config)
    if dq.numel() and deterministic:
        config = tables.configuration("backward, dQ", QUERIES, tensors, causal)
        launch_queries(q, k, v, do, delta, lse2, dq, causal, scale, config)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
