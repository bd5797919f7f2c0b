"""FlashAttention-2, forward: queries outside, keys inside, one division at the end.

Chapter *FlashAttention-2*; Dao, "FlashAttention-2" (ICLR 2024), Algorithm 1. A program
owns one block of queries. It walks over the keys once, keeps the running maximum m, the
normalizer l and the unnormalized output in registers, and writes O and the log-sum-exp
L = m + ln l at the end (m in the code is in base 2). Nothing of size T x T exists.

Blocks of keys that every query of the block sees are read without a mask; then come
those that some query does not see (the diagonal band of a causal mask, the ragged end).
Blocks that no query sees are never read.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import INTERPRETED, descriptors, inputs, tables
from flashlib.kernels.tables import TENSOR_CORES, Configuration
from flashlib.kernels.tiles import (
    LOG2_E,
    LOWEST,
    Rows,
    Sizes,
    dot_columns,
    load_columns,
    load_tile,
    log_sum_exp,
    online_softmax,
    store_tile,
    visible,
)


class Strides(NamedTuple):
    """The strides of the tensors [B, H, T, d] of the kernel, four each."""

    q: Any
    k: Any
    v: Any
    o: Any


@triton.jit
def attend(
    acc, m, l, q_tiles, k, v, b, h, i, j, scale_log2, n,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One step of the inner loop: the block of keys that starts at j."""
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    # -- scores
    k_tiles = load_columns(k, b, h, j, n.T_k, n.d, BLOCK_K, TILE)  # [BLOCK_K, BLOCK_D]
    s = dot_columns(q_tiles, k_tiles, TILE)  # [BLOCK_Q, BLOCK_K], unscaled
    # -- online softmax
    seen = visible(i, j + tl.arange(0, BLOCK_K), n.T_q, n.T_k, CAUSAL)
    p, alpha, m, l = online_softmax(s, m, l, scale_log2, seen, MASKED)
    # -- output
    acc = acc * alpha[:, None]
    v_tile = load_tile(
        v, b, h, j, 0, n.T_k, n.d_v, BLOCK_K, TILE.BLOCK_DV, TILE.DESCRIPTOR
    )  # [BLOCK_K, BLOCK_DV]
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return acc, m, l


# Otherwise Triton would compile further versions for lengths of 1 and multiples of 16.
@triton.jit(do_not_specialize=["T_q", "T_k"])
def forward_kernel(
    q, k, v, o, lse, strides, scale_log2, H, GROUP, T_q, T_k, d, d_v,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One program writes one block of rows of O and of L, in one pass over the keys
    that these rows see. q, k, v: pointers or descriptors.
    """
    n = Sizes(H, GROUP, T_q, T_k, d, d_v)
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    blocks = tl.cdiv(T_q, BLOCK_Q)
    # With a causal mask the last blocks of queries see the most keys: they start first.
    block = blocks - 1 - tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks
    b, h = head // n.H, head % n.H
    h_kv = h // n.GROUP

    row = block * BLOCK_Q
    i = row + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    # Every query of the block sees the keys before `full_end`, none those from `end`.
    full_end, end = T_k // BLOCK_K * BLOCK_K, T_k
    if CAUSAL:
        full_end = tl.minimum(
            full_end, tl.maximum(row + 1 + T_k - T_q, 0) // BLOCK_K * BLOCK_K
        )
        end = tl.minimum(end, tl.maximum(row + BLOCK_Q + T_k - T_q, 0))

    k, v = Rows(k, strides.k), Rows(v, strides.v)
    q_tiles = load_columns(
        Rows(q, strides.q), b, h, row, T_q, n.d, BLOCK_Q, TILE
    )  # [BLOCK_Q, BLOCK_D]
    m = tl.full([BLOCK_Q], LOWEST, tl.float32)  # in base 2
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    for j in tl.range(0, full_end, BLOCK_K):
        acc, m, l = attend(
            acc, m, l, q_tiles, k, v, b, h_kv, i, j, scale_log2, n, CAUSAL, False, TILE
        )
    if CAUSAL or RAGGED:
        for j in tl.range(full_end, end, BLOCK_K):
            acc, m, l = attend(
                acc, m, l, q_tiles, k, v, b, h_kv, i, j, scale_log2, n,
                CAUSAL, True, TILE,
            )  # fmt: skip

    # A query that sees no key has l = 0, O = 0 and L = -inf.
    l_safe = tl.where(l == 0.0, 1.0, l)
    o = Rows(o, strides.o)
    store_tile(o, acc / l_safe[:, None], b, h, row, 0, T_q, n.d_v, BLOCK_Q, BLOCK_DV)
    l_rows = lse + head.to(tl.int64) * T_q + i
    tl.store(l_rows, log_sum_exp(m, l), mask=i < T_q)


# The rows with descriptors are the fastest of a sweep on an H200
# (flashlib/records/tiles.json). The others for 16 bits compile without spills and fit
# 99 KiB of shared memory.
CONFIGURATIONS = (
    Configuration((90,), 16, 64, 64, 128, 4, 2, True, 76_000),
    Configuration((90,), 16, 128, 64, 64, 4, 3, True, 117_000),
    Configuration((90,), 16, 192, 128, 64, 8, 2, False, 132_000),
    Configuration((90,), 16, 256, 128, 64, 8, 2, True, 198_000),
    Configuration(TENSOR_CORES, 16, 128, 64, 64, 4, 2, False, 101_000),
    Configuration(TENSOR_CORES, 16, 192, 64, 32, 4, 2, False, 101_000),
    Configuration(TENSOR_CORES, 16, 256, 64, 32, 8, 2, False, 101_000),
    *tables.FORWARD_NO_TENSOR_CORES,
)
# What tuning tries in addition: with descriptors, the tiles that were the fastest or
# close to it at some length of that sweep; without, those of the sweep that compile
# without spills.
FURTHER_TILES = (
    Configuration((90,), 16, 64, 64, 64, 4, 2, True, 42_000),
    Configuration((90,), 16, 64, 128, 64, 8, 3, True, 67_000),
    Configuration((90,), 16, 128, 128, 128, 8, 3, True, 231_000),
    Configuration((90,), 16, 128, 128, 64, 8, 3, True, 133_000),
    Configuration((90,), 16, 256, 64, 64, 4, 3, True, 231_000),
    Configuration((90,), 16, 128, 128, 128, 8, 2, False, 164_000),
    Configuration((90,), 16, 256, 128, 64, 8, 2, False, 197_000),
    Configuration(TENSOR_CORES, 16, 128, 128, 64, 8, 2, False, 101_000),
    Configuration(TENSOR_CORES, 16, 128, 64, 32, 4, 3, False, 67_000),
)


@plans.planned
def launch_forward(q, k, v, o, lse, causal, scale, config):
    """Launch with one configuration. q, k, v and scale are those of
    ``inputs.forward_tensors``; B, H and T_q are not 0.
    """
    n = inputs.sizes(q, k, v)
    options = tables.compiled_for(config, n)
    strides = Strides(q.stride(), k.stride(), v.stride(), o.stride())
    plans.launch(
        forward_kernel, q, q.shape[0] * n.H * triton.cdiv(n.T_q, config.BLOCK_Q),
        *descriptors.operands((q, k, v), options["TILE"]), o, lse, strides,
        scale * LOG2_E.value, *n,
        CAUSAL=causal, RAGGED=n.T_k % config.BLOCK_K != 0, **options,
    )  # fmt: skip


@plans.planned
def forward(q, k, v, causal, scale, tune=False):
    """``(o, lse)``, as :mod:`flashlib.kernels` says, without any T x T matrix.

    tune: take the fastest of CONFIGURATIONS and FURTHER_TILES (``tables.tuned``)
    instead of the row that the table names. Raises ValueError for tune in the
    interpreter.
    """
    if tune and INTERPRETED:
        raise ValueError(
            "tune: expected False in Triton's interpreter (timing needs a CUDA GPU), "
            "got True"
        )
    dtype = q.dtype
    q, k, v, scale, o, lse = inputs.forward_tensors(q, k, v, scale)
    if lse.numel():
        if tune:
            config = tables.tuned(
                "flash2", CONFIGURATIONS + FURTHER_TILES, (q, k, v), causal,
                lambda q, k, v, row: launch_forward(
                    q, k, v, *plans.new_results(q, v), causal, scale, row
                ),
            )  # fmt: skip
        else:
            config = tables.configuration("flash2", CONFIGURATIONS, (q, k, v), causal)
        launch_forward(q, k, v, o, lse, causal, scale, config)
    return o.to(dtype), lse
