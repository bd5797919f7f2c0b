"""FlashAttention-2 with any mask and score, a window, a softcap, ALiBi, a bias, sinks,
dropout and packed sequences: the forward pass. The backward pass is in
masks_backward.py.

Chapter *Masks* (``eq-masks-window``, ``eq-masks-softcap``, ``eq-masks-alibi``,
``eq-masks-packed``); Beltagy et al., "Longformer" (2020), for the window, Press et al.,
"Train short, test long" (ICLR 2022), for ALiBi, Gemma Team, "Gemma 2" (2024), for the
softcap.

The loop is that of flash2.py, with a switch for each change (``scores.Switches``). A
window bounds the loop at both ends: blocks that no query of a block sees are never
read, and only those at the two edges and at the ragged end are masked. A mask has lists
of tiles (tile_lists.py), which the loop walks over. A program for packed sequences
looks up where its own begins.
"""

import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import inputs, score_arguments, tables, tile_lists
from flashlib.kernels.scores import (
    BatchHead,
    change_scores,
    dropped,
    key_bounds,
    list_of,
    sees,
    sequence,
    skip_full,
    slope_of,
    tile_start,
)
from flashlib.kernels.tables import TENSOR_CORES, Configuration
from flashlib.kernels.tiles import (
    LOWEST,
    Rows,
    Sizes,
    load_tile,
    log_sum_exp,
    online_softmax,
    row_pointers,
    store_tile,
    with_sink,
)


@triton.jit
def attend(
    acc, m, l, q_tile, k, v, b, h, positions, j, bh, change, n,
    MASKED: tl.constexpr, ON: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One step of the inner loop: the block of keys that starts at j."""
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    k_tile = load_tile(
        k, b, h, j, 0, n.T_k, n.d, BLOCK_K, TILE.BLOCK_D, TILE.DESCRIPTOR
    )  # [BLOCK_K, BLOCK_D]
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K], unscaled
    positions, keys = positions[:, None], (j + tl.arange(0, BLOCK_K))[None, :]
    s, _, factor = change_scores(s, positions, keys, bh, change, n, ON)
    seen = sees(positions, keys, keys < n.T_k, bh, change, ON)
    p, alpha, m, l = online_softmax(s, m, l, factor, seen, MASKED)
    p = dropped(p, positions, keys, bh, change, n, ON)
    acc = acc * alpha[:, None]
    v_tile = load_tile(
        v, b, h, j, 0, n.T_k, n.d_v, BLOCK_K, TILE.BLOCK_DV, TILE.DESCRIPTOR
    )  # [BLOCK_K, BLOCK_DV]
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return acc, m, l


# Otherwise Triton would compile further versions for lengths of 1 and multiples of 16.
@triton.jit(do_not_specialize=["T_q", "T_k"])
def forward_kernel(
    q, k, v, strides, o, lse, change, starts, H, GROUP, T_q, T_k, d, d_v,
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
    bh = BatchHead(b, h, slope_of(change, b, h, ON.ALIBI))
    b_q, T_q = sequence(starts.q, b, n.T_q, ON.VARLEN)
    b_k, T_k = sequence(starts.k, b, n.T_k, ON.VARLEN)
    if ON.VARLEN:
        T_k = tl.where(row < T_q, T_k, 0)
    n = Sizes(n.H, n.GROUP, T_q, T_k, n.d, n.d_v)

    i = row + tl.arange(0, BLOCK_Q)
    positions = i + (T_k - T_q)
    tiles = list_of(change, b, h, block, ON.MASK)
    first, full_start, full_end, end = key_bounds(
        row, T_q, T_k, change, tiles, ON, TILE
    )

    q, k, v = Rows(q, strides[0]), Rows(k, strides[1]), Rows(v, strides[2])
    q_tile = load_tile(
        q, b_q, h, row, 0, T_q, n.d, BLOCK_Q, TILE.BLOCK_D, TILE.DESCRIPTOR
    )  # [BLOCK_Q, BLOCK_D]
    m = tl.full([BLOCK_Q], LOWEST, tl.float32)  # in base 2
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    for j in tl.range(full_start, full_end, BLOCK_K):
        j = tile_start(j, tiles, BLOCK_K, ON.MASK)
        acc, m, l = attend(
            acc, m, l, q_tile, k, v, b_k, h_kv, positions, j, bh, change, n, False, ON,
            TILE
        )  # fmt: skip
    if ON.WINDOW or ON.VARLEN or ON.MASK or RAGGED:
        # One loop over the blocks before and after the full ones.
        masked = tl.cdiv(end - first, BLOCK_K) - (full_end - full_start) // BLOCK_K
        for step in tl.range(0, masked):
            j = skip_full(first + step * BLOCK_K, full_start, full_end)
            j = tile_start(j, tiles, BLOCK_K, ON.MASK)
            acc, m, l = attend(
                acc, m, l, q_tile, k, v, b_k, h_kv, positions, j, bh, change, n, True,
                ON, TILE
            )  # fmt: skip

    if ON.SINKS:  # one more key, with the value 0
        m, l, alpha = with_sink(m, l, tl.load(change.sinks + h))
        acc = acc * alpha[:, None]
    # A query that sees no key has l = 0, O = 0 and L = -inf.
    l_safe = tl.where(l == 0.0, 1.0, l)
    acc = acc / l_safe[:, None]
    store_tile(o, acc, b_q, h, row, 0, T_q, n.d_v, BLOCK_Q, BLOCK_DV)
    lse_rows = row_pointers(lse, b_q, h, i)
    tl.store(lse_rows, log_sum_exp(m, l), mask=i < T_q)


# The rows for sm_90 alone are the fastest, or close to it, of a sweep on an H200 with T
# = 16384: a causal window of 1024 keys, a causal mask with ALiBi, and, without
# descriptors, sequences of 256 to 6144 tokens packed. With 256 columns some spill, and
# are still up to three times as fast as those that do not. The other rows are those of
# flash2.py, made smaller where a changed score takes the registers. Packed sequences
# and tensors that TMA cannot read use the rows without descriptors.
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


@plans.planned
def launch_forward(q, k, v, o, lse, score_mod, packing, config):
    """Launch forward; q, k, v in the computed dtype, scale >= 0, only T_k may be 0."""
    B, n = score_arguments.batch_and_sizes(q, k, v, packing)
    options = score_arguments.compiled_for(score_mod, packing, config, n)
    change = tile_lists.change_with_lists(
        tile_lists.of_queries, "o", q, k, v, score_mod, packing, config
    )
    plans.launch(
        forward_kernel, q, B * n.H * triton.cdiv(n.T_q, config.BLOCK_Q),
        *score_arguments.operands((q, k, v), options["TILE"], packing),
        score_arguments.rows_of(o, packing), score_arguments.rows_of(lse, packing),
        change, score_arguments.starts_of(packing), *n,
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
        config = score_arguments.configuration("masks", FORWARD, (q, k, v), packing)
        launch_forward(q, k, v, o, lse, score_mod, packing, config)
    return o.to(dtype), lse
