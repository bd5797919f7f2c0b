"""Two backward kernels on the way to flashlib.kernels.backward: the slides' Algorithms
5 and 6.

Chapter *The backward pass*; lecture slides (Chu, Liu, Lin, 2026). In both the queries
are outside: a program owns a block of queries of one head, computes D = rowsum(dO o O)
(``eq-gradients-delta``) for it and writes its dQ once. The gradients of a key are sums
over many programs, which run at the same time: they add to dK and dV in memory,
atomically, in float32. So the last bits of dK and dV depend on the order of the
programs.

algorithm_5    whole rows: all keys and values of a head are one tile, P is the softmax
               of a whole row of scores, and only Q, K, V, O and dO are needed. Short
               sequences only.
algorithm_6    block by block, in the order (i, j): P of a block from L, dQ collected in
               registers, dK and dV added to in every step.
"""

import torch
import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import inputs, padded, tables, tiles
from flashlib.kernels.tiles import (
    LOG2_E,
    add_tile,
    load_tile,
    probabilities,
    store_tile,
    visible,
)

LARGEST_TILE = 8192  # elements of K or V that a program of Algorithm 5 holds at once
BLOCK_Q = 16  # queries of a program of Algorithm 5: the fewest for tensor cores


@triton.jit
def rows_kernel(
    q, k, v, o, do, dlse, dq, dk, dv, scale, scale_log2, n,
    CAUSAL: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Algorithm 5: one program handles whole rows of P and dP; BLOCK_K >= T_k. All
    tensors but dlse: Rows. n: the Sizes.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    T_q, T_k = n.T_q, n.T_k
    blocks = tl.cdiv(T_q, BLOCK_Q)
    row, head = tl.program_id(0) % blocks * BLOCK_Q, tl.program_id(0) // blocks
    b, h = head // n.H, head % n.H
    i = row + tl.arange(0, BLOCK_Q)
    # -- P, by rows
    q_tile = load_tile(q, b, h, row, 0, T_q, n.d, BLOCK_Q, BLOCK_D)
    k_tile = load_tile(k, b, h // n.GROUP, 0, 0, T_k, n.d, BLOCK_K, BLOCK_D)
    product = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
    seen = visible(i, tl.arange(0, BLOCK_K), T_q, T_k, CAUSAL)
    s = tl.where(seen, product * scale_log2, -float("inf"))  # in base 2
    m = tl.max(s, 1)
    m = tl.where(m == -float("inf"), 0.0, m)  # of a query that sees no key
    p = tl.exp2(s - m[:, None])
    l = tl.sum(p, 1)
    p = p / tl.where(l == 0.0, 1.0, l)[:, None]
    # -- dV
    do_tile = load_tile(do, b, h, row, 0, T_q, n.d_v, BLOCK_Q, BLOCK_DV)
    p_t = p.to(do_tile.dtype).T
    dv_tile = tl.dot(p_t, do_tile, input_precision="ieee")  # [BLOCK_K, BLOCK_DV]
    add_tile(dv, dv_tile, b, h // n.GROUP, 0, 0, T_k, n.d_v, BLOCK_K, BLOCK_DV)
    # -- dS
    v_tile = load_tile(v, b, h // n.GROUP, 0, 0, T_k, n.d_v, BLOCK_K, BLOCK_DV)
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
    o_tile = load_tile(o, b, h, row, 0, T_q, n.d_v, BLOCK_Q, BLOCK_DV)
    d_rows = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)  # [BLOCK_Q]
    d_rows -= tl.load(dlse + head.to(tl.int64) * T_q + i, mask=i < T_q, other=0.0)
    ds = (p * (dp - d_rows[:, None])).to(q_tile.dtype)
    # -- dQ and dK
    dq_tile = tl.dot(ds, k_tile, input_precision="ieee") * scale  # [BLOCK_Q, BLOCK_D]
    store_tile(dq, dq_tile, b, h, row, 0, T_q, n.d, BLOCK_Q, BLOCK_D)
    dk_tile = tl.dot(ds.T, q_tile, input_precision="ieee") * scale  # [BLOCK_K, BLOCK_D]
    add_tile(dk, dk_tile, b, h // n.GROUP, 0, 0, T_k, n.d, BLOCK_K, BLOCK_D)


@triton.jit
def blocks_kernel(
    q, k, v, o, do, lse, dlse, dq, dk, dv, scale, scale_log2, log2_e, n,
    CAUSAL: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Algorithm 6: one program walks over the keys; dQ in registers, dK and dV in
    memory. All tensors but lse and dlse: Rows. n: the Sizes.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    T_q, T_k = n.T_q, n.T_k
    blocks = tl.cdiv(T_q, BLOCK_Q)
    row, head = tl.program_id(0) % blocks * BLOCK_Q, tl.program_id(0) // blocks
    b, h = head // n.H, head % n.H
    i = row + tl.arange(0, BLOCK_Q)
    rows = head.to(tl.int64) * T_q + i
    # -- D and L of these queries
    do_tile = load_tile(do, b, h, row, 0, T_q, n.d_v, BLOCK_Q, BLOCK_DV)
    o_tile = load_tile(o, b, h, row, 0, T_q, n.d_v, BLOCK_Q, BLOCK_DV)
    d_rows = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)  # [BLOCK_Q]
    d_rows -= tl.load(dlse + rows, mask=i < T_q, other=0.0)
    lse_rows = tl.load(lse + rows, mask=i < T_q, other=-float("inf")) * log2_e
    # Where no key is seen, +inf makes P zero; -inf would make it infinite.
    lse_rows = tl.where(lse_rows == -float("inf"), float("inf"), lse_rows)
    q_tile = load_tile(q, b, h, row, 0, T_q, n.d, BLOCK_Q, BLOCK_D)
    dq_acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    end = T_k  # no query of the block sees the keys from here on
    if CAUSAL:
        end = tl.minimum(end, tl.maximum(row + BLOCK_Q + T_k - T_q, 0))
    for col in tl.range(0, end, BLOCK_K):
        h_kv = h // n.GROUP
        # -- P
        k_tile = load_tile(k, b, h_kv, col, 0, T_k, n.d, BLOCK_K, BLOCK_D)
        v_tile = load_tile(v, b, h_kv, col, 0, T_k, n.d_v, BLOCK_K, BLOCK_DV)
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        seen = visible(i, col + tl.arange(0, BLOCK_K), T_q, T_k, CAUSAL)
        p = probabilities(s, lse_rows[:, None], scale_log2, seen, True)
        # -- dV
        p_t = p.to(do_tile.dtype).T
        dv_tile = tl.dot(p_t, do_tile, input_precision="ieee")  # [BLOCK_K, BLOCK_DV]
        add_tile(dv, dv_tile, b, h_kv, col, 0, T_k, n.d_v, BLOCK_K, BLOCK_DV)
        # -- dK
        dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        ds = (p * (dp - d_rows[:, None])).to(q_tile.dtype)
        dk_tile = tl.dot(ds.T, q_tile, input_precision="ieee")  # [BLOCK_K, BLOCK_D]
        add_tile(dk, dk_tile * scale, b, h_kv, col, 0, T_k, n.d, BLOCK_K, BLOCK_D)
        # -- dQ
        dq_acc = tl.dot(ds, k_tile, dq_acc, input_precision="ieee")  # unscaled
    store_tile(dq, dq_acc * scale, b, h, row, 0, T_q, n.d, BLOCK_Q, BLOCK_D)


# Algorithm 6 without tensor cores takes every factor of a product through registers, so
# its tiles are small.
SIMPLE = tables.simple_table(
    tensor_cores={64: (64, 32, 4, 1), 128: (64, 64, 8, 1), 256: (32, 32, 8, 1)},
    others={64: (32, 32, 8, 1), 128: (16, 16, 8, 1), 256: (16, 16, 8, 1)},
)
# Five tiles of 16 rows and 256 columns in float32 are 80 KiB, more than sm_75 has.
WIDEST = {"architectures": tables.TENSOR_CORES, "shared_bytes": 81_920}
CONFIGURATIONS = tuple(
    row._replace(**WIDEST) if (row.bits, row.d) == (32, 256) else row for row in SIMPLE
)


def launch_kernel(
    kernel, q, k, v, o, do, rows, results, scales, causal, blocks, **options
):
    """Launch one of the two kernels with ``(BLOCK_Q, BLOCK_K)``: it fills dq and adds
    to dk and dv. rows: the tensors of one number a query that the kernel reads.
    """
    n = inputs.sizes(q, k, v)
    widths = tables.value_columns(n.d_v, n.d), tables.value_columns(n.d, n.d_v)
    tile = tiles.Tile(*blocks, *widths)
    plans.launch(
        kernel, q, q.shape[0] * n.H * triton.cdiv(n.T_q, tile.BLOCK_Q),
        *tiles.as_rows(q, k, v, o, do), *(x.contiguous() for x in rows),
        *tiles.as_rows(*results), *scales, n, CAUSAL=causal, TILE=tile, **options,
    )  # fmt: skip


@plans.planned
def launch_blocks(q, k, v, o, lse, do, dlse, dq, dk, dv, causal, scale, config):
    """Launch Algorithm 6 with one configuration: fills dq and adds to dk and dv."""
    blocks = config.BLOCK_Q, config.BLOCK_K
    scales = scale, scale * LOG2_E.value, LOG2_E.value
    launch_kernel(
        blocks_kernel, q, k, v, o, do, (lse, dlse), (dq, dk, dv),
        scales, causal, blocks,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def allocate(q, k, v):
    """dq as q, and zeros in float32 for dk and dv, which many programs add to."""
    sums = (x.new_empty(x.shape, dtype=torch.float32).zero_() for x in (k, v))
    return *plans.new_like(q), *sums


@plans.planned
def algorithm_5(q, k, v, o, lse, do, dlse, causal, scale):
    """``(dq, dk, dv)`` from whole rows, as :mod:`flashlib.kernels` says. lse is not
    read: a whole row of scores has its own sum. Raises ValueError where the keys or the
    values of a head, padded to powers of two, are more than LARGEST_TILE elements.
    """
    dtype = q.dtype
    T_k, d, d_v = k.shape[2], k.shape[3], v.shape[3]
    columns = max(tables.value_columns(d_v, d), tables.value_columns(d, d_v))
    if padded(T_k) * columns > LARGEST_TILE:
        raise ValueError(
            f"k: expected at most {LARGEST_TILE} elements in the padded keys and in "
            f"the padded values of a head, got {padded(T_k)} x {columns}"
        )
    q, k, v, o, do = inputs.widened(q, k, v, o, do)
    gradients = allocate(q, k, v)
    if q.numel():
        blocks, scales = (BLOCK_Q, padded(T_k)), (scale, scale * LOG2_E.value)
        launch_kernel(
            rows_kernel, q, k, v, o, do, (dlse,), gradients, scales, causal, blocks,
            num_warps=8,
        )  # fmt: skip
    return tuple(x.to(dtype) for x in gradients)


@plans.planned
def algorithm_6(q, k, v, o, lse, do, dlse, causal, scale):
    """``(dq, dk, dv)`` in the order (i, j), as :mod:`flashlib.kernels` says."""
    dtype = q.dtype
    q, k, v, o, do = inputs.widened(q, k, v, o, do)
    gradients = allocate(q, k, v)
    if q.numel():
        config = tables.configuration("algorithm_6", CONFIGURATIONS, (q, k, v), causal)
        launch_blocks(q, k, v, o, lse, do, dlse, *gradients, causal, scale, config)
    return tuple(x.to(dtype) for x in gradients)
