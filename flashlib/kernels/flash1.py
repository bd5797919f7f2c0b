"""FlashAttention, forward: keys outside, queries inside, O divided and stored at every
step.

Chapter *FlashAttention*; Dao et al., "FlashAttention" (NeurIPS 2022), Algorithm 1. A
program owns one head: the first FlashAttention is parallel over batch and heads only
(Dao, "FlashAttention-2", ICLR 2024, section 3.2). It takes a block of keys and values
and walks over the queries with it. The state of a query, its output O, maximum m and
normalizer l, is in device memory. It is read and written at every step, and is final
after the last block of keys. Nothing of size T x T exists.

Blocks of queries that see every key of the block are read without a mask, those that
see only some with one. Blocks of queries that see none are never read.
"""

import torch
import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import inputs, tables, tiles
from flashlib.kernels.tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
    load_tile,
    online_softmax,
    store_tile,
    visible,
)


@triton.jit
def attend(
    o, m, l, q, k_tile, v_tile, b, h, row, j, scale_log2, n,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One step of the inner loop: the block of queries that starts at row."""
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    i = row + tl.arange(0, BLOCK_Q)
    q_tile = load_tile(q, b, h, row, 0, n.T_q, n.d, BLOCK_Q, TILE.BLOCK_D)
    # -- the state of these queries
    acc = load_tile(o, b, h, row, 0, n.T_q, n.d_v, BLOCK_Q, BLOCK_DV)
    m_old = tl.load(m + i, mask=i < n.T_q, other=LOWEST)  # in base 2
    l_old = tl.load(l + i, mask=i < n.T_q, other=0.0)
    # -- scores
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K], unscaled
    # -- online softmax
    seen = visible(i, j + tl.arange(0, TILE.BLOCK_K), n.T_q, n.T_k, CAUSAL)
    p, alpha, m_new, l_new = online_softmax(s, m_old, l_old, scale_log2, seen, MASKED)
    # -- output
    acc = acc * (l_old * alpha)[:, None]  # no longer divided
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    # A query that has seen no key has l = 0 and O = 0.
    l_safe = tl.where(l_new == 0.0, 1.0, l_new)
    # O is divided at every step, and the approximate division of a GPU would be off by
    # a unit each time.
    acc = tl.div_rn(acc, l_safe[:, None])
    # A thread may store what another one loads: all have loaded before any stores.
    tl.debug_barrier()
    store_tile(o, acc, b, h, row, 0, n.T_q, n.d_v, BLOCK_Q, BLOCK_DV)
    tl.store(m + i, m_new, mask=i < n.T_q)
    tl.store(l + i, l_new, mask=i < n.T_q)


@triton.jit
def forward_kernel(
    q, k, v, o, m, l, scale_log2, n,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One program updates O, m and l of one head in place, once for every block of keys
    that a query sees. q, k, v, o: Rows. n: the Sizes.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    T_q, T_k = n.T_q, n.T_k
    head = tl.program_id(0)
    b, h = head // n.H, head % n.H
    m += head.to(tl.int64) * T_q
    l += head.to(tl.int64) * T_q

    for j in tl.range(0, T_k, BLOCK_K):
        # Queries before `start` see no key of the block, those from `full_start` all.
        start, full_start = 0, 0
        if CAUSAL:
            start = tl.maximum(j + T_q - T_k, 0) // BLOCK_Q * BLOCK_Q
            full_start = tl.maximum(j + BLOCK_K - 1 + T_q - T_k, 0)
            full_start = tl.cdiv(full_start, BLOCK_Q) * BLOCK_Q
        if RAGGED:
            full_start = tl.where(j + BLOCK_K > T_k, T_q, full_start)

        # O, m and l were stored in the step before. Triton chooses the layouts of loads
        # and stores independently, so a thread may load what another one stored, and it
        # inserts no barrier.
        tl.debug_barrier()
        h_kv = h // n.GROUP
        k_tile = load_tile(k, b, h_kv, j, 0, T_k, n.d, BLOCK_K, TILE.BLOCK_D)
        v_tile = load_tile(v, b, h_kv, j, 0, T_k, n.d_v, BLOCK_K, TILE.BLOCK_DV)
        if CAUSAL or RAGGED:
            for row in tl.range(start, tl.minimum(full_start, T_q), BLOCK_Q):
                attend(
                    o, m, l, q, k_tile, v_tile, b, h, row, j, scale_log2, n,
                    CAUSAL, True, TILE
                )  # fmt: skip
        for row in tl.range(full_start, T_q, BLOCK_Q):
            attend(
                o, m, l, q, k_tile, v_tile, b, h, row, j, scale_log2, n,
                CAUSAL, False, TILE
            )  # fmt: skip


# Every row compiles without spills, with the exceptions that tests/test_compile.py
# lists. A tile of O passes through registers when it is loaded and when it is
# multiplied, so a wide tile has few rows. Without tensor cores every factor of a
# product passes through registers too.
CONFIGURATIONS = tables.simple_table(
    tensor_cores={128: (64, 64, 4, 1), 256: (32, 64, 8, 1)},
    others={64: (32, 32, 4, 1), 128: (16, 32, 4, 1), 256: (16, 16, 8, 1)},
)


@plans.planned
def launch_forward(q, k, v, o, m, l, causal, scale, config):
    """Launch with one configuration; q, k, v in their computed dtype, scale >= 0, only
    T_k may be 0. Updates o, m and l, in float32, which start as 0, LOWEST and 0.
    """
    n = inputs.sizes(q, k, v)
    plans.launch(
        forward_kernel, q, q.shape[0] * n.H,
        *tiles.as_rows(q, k, v, o), m, l, scale * LOG2_E.value, n,
        CAUSAL=causal, RAGGED=n.T_k % config.BLOCK_K != 0,
        # One stage: the barrier of a step keeps the next one's loads from starting.
        **tables.compiled_for(config, n),
    )  # fmt: skip


@plans.planned
def forward(q, k, v, causal, scale):
    """``(o, lse)``, as :mod:`flashlib.kernels` says, without any T x T matrix."""
    dtype = q.dtype
    q, k, v = inputs.widened(q, k, v)
    if scale < 0.0:
        q, scale = -q, -scale  # the kernel takes the maximum before it scales
    # O is rounded whenever it is stored, T_k / BLOCK_K times: float32 until the end, as
    # in the code published with the paper.
    o = plans.empty_like(q, v.shape[3], torch.float32).zero_()
    m = q.new_empty(q.shape[:3], dtype=torch.float32).fill_(LOWEST.value)
    l = q.new_empty(q.shape[:3], dtype=torch.float32).zero_()
    if l.numel():
        config = tables.configuration("flash1", CONFIGURATIONS, (q, k, v), causal)
        launch_forward(q, k, v, o, m, l, causal, scale, config)
    return o.to(dtype), l.log2_().add_(m).mul_(LN_2.value)
