"""The backward pass of masks.py: dQ, dK and dV with any mask and score, and in packed
sequences.

Chapter *Masks* (``eq-masks-scores``, ``eq-masks-softcap-gradient``). The loops are
those of the split form of backward.py: one kernel owns a block of keys and collects dK
and dV, another owns a block of queries and collects dQ. Both recompute the changed
scores with the functions of scores.py, and multiply dS by the derivative of the change.
The gradients of a bias and of sinks are in score_gradients.py.
"""

import torch
import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import (
    inputs,
    padded,
    score_arguments,
    score_gradients,
    tables,
    tile_lists,
)
from flashlib.kernels.scores import (
    BatchHead,
    change_scores,
    dropped,
    key_bounds,
    list_of,
    of_group,
    padded_rows,
    query_bounds,
    sees,
    sequence,
    skip_full,
    slope_of,
    tile_start,
    visible_only,
)
from flashlib.kernels.tables import Configuration
from flashlib.kernels.tiles import (
    Rows,
    Sizes,
    load_tile,
    probabilities,
    row_statistics,
    store_tile,
)


# Otherwise Triton would compile further versions for lengths of 1 and multiples of 16.
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
    d_rows, lse2_rows = row_statistics(
        do, o, lse, dlse, b_q, h, row, T, d, BLOCK_T, BLOCK_D
    )
    i = row + tl.arange(0, BLOCK_T)
    rows = padded_rows(b, b_q, h, H, PADDED, PAD, VARLEN) + i
    own = i < tl.cdiv(T, PAD) * PAD
    tl.store(delta + rows, d_rows, mask=own)
    tl.store(lse2 + rows, lse2_rows, mask=own)


@triton.jit
def collect(
    dk, dv, k_tile, v_tile, keys, q, do, delta, lse2, b, h, row, bh, change, n,
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
    positions, keys = (i + (n.T_k - n.T_q))[None, :], keys[:, None]
    s, derivative, factor = change_scores(s, positions, keys, bh, change, n, ON)
    seen = sees(positions, keys, (i < n.T_q)[None, :], bh, change, ON)
    p = probabilities(s, lse_rows[None, :], factor, seen, MASKED)
    kept = dropped(p, positions, keys, bh, change, n, ON)
    dv = tl.dot(kept.to(do_tile.dtype), do_tile, dv, input_precision="ieee")
    dp = tl.dot(v_tile, do_tile.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q]
    dp = dropped(dp, positions, keys, bh, change, n, ON)
    ds = p * (dp - d_rows[None, :])
    if ON.FUNCTION:
        derivative = visible_only(derivative, p)
    if ON.SOFTCAP or ON.FUNCTION:
        ds = ds * derivative
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")  # unscaled
    return dk, dv


@triton.jit(do_not_specialize=["T_q", "T_k"])
def keys_kernel(
    q, k, v, do, strides, delta, lse2, dk, dv, scale, change, starts,
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
        col, T_q, T_k, change, ON.WINDOW, TILE
    )
    tiles = list_of(change, b, h_kv, block, ON.MASK)
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
            bh = BatchHead(b, h, slope_of(change, b, h, ON.ALIBI))
            dk_acc, dv_acc = collect(
                dk_acc, dv_acc, k_tile, v_tile, keys, q, do, delta + rows, lse2 + rows,
                b_q, h, row, bh, change, n, False, ON, TILE,
            )  # fmt: skip
    if ON.WINDOW or ON.MASK:
        for step in tl.range(begin, last):
            h, block = of_group(step, masked, tiles, h_kv, blocks_q, GROUP, ON.MASK)
            row = skip_full(first + block * BLOCK_Q, full_start, full_end)
            rows = padded_rows(b, b_q, h, H, PADDED, PAD, ON.VARLEN)
            bh = BatchHead(b, h, slope_of(change, b, h, ON.ALIBI))
            dk_acc, dv_acc = collect(
                dk_acc, dv_acc, k_tile, v_tile, keys, q, do, delta + rows, lse2 + rows,
                b_q, h, row, bh, change, n, True, ON, TILE,
            )  # fmt: skip
    store_tile(dk, dk_acc * scale, b_k, h_kv, col, 0, T_k, n.d, BLOCK_K, BLOCK_D)
    store_tile(dv, dv_acc, b_k, h_kv, col, 0, T_k, n.d_v, BLOCK_K, BLOCK_DV)


@triton.jit
def descend(
    dq, q_tile, do_tile, d_rows, lse_rows, k, v, b, h, positions, j, bh, change, n,
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
    s, derivative, factor = change_scores(s, positions, keys, bh, change, n, ON)
    seen = sees(positions, keys, keys < n.T_k, bh, change, ON)
    p = probabilities(s, lse_rows[:, None], factor, seen, MASKED)
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
    dp = dropped(dp, positions, keys, bh, change, n, ON)
    ds = p * (dp - d_rows[:, None])
    if ON.FUNCTION:
        derivative = visible_only(derivative, p)
    if ON.SOFTCAP or ON.FUNCTION:
        ds = ds * derivative
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")  # unscaled


@triton.jit(do_not_specialize=["T_q", "T_k"])
def queries_kernel(
    q, k, v, do, strides, delta, lse2, dq, scale, change, starts,
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
        j = tile_start(j, tiles, BLOCK_K, ON.MASK)
        acc = descend(
            acc, q_tile, do_tile, d_rows, lse_rows, k, v, b_k, h_kv, positions, j,
            bh, change, n, False, ON, TILE,
        )  # fmt: skip
    if ON.WINDOW or ON.VARLEN or ON.MASK or RAGGED:
        masked = tl.cdiv(end - first, BLOCK_K) - (full_end - full_start) // BLOCK_K
        for step in tl.range(0, masked):
            j = skip_full(first + step * BLOCK_K, full_start, full_end)
            j = tile_start(j, tiles, BLOCK_K, ON.MASK)
            acc = descend(
                acc, q_tile, do_tile, d_rows, lse_rows, k, v, b_k, h_kv, positions, j,
                bh, change, n, True, ON, TILE,
            )  # fmt: skip
    store_tile(dq, acc * scale, b_q, h, row, 0, T_q, n.d, BLOCK_Q, BLOCK_D)


# The rows of this file are for sm_90: the fastest, or close to it, of the sweep that
# masks.py describes. With 256 columns some spill, and are still up to three times as
# fast as those that do not.
KEYS = (
    *tables.with_and_without_descriptors(
        Configuration((90,), 16, 64, 64, 64, 4, 3, True, 68_000),
        Configuration((90,), 16, 128, 32, 64, 4, 3, True, 84_000),
        Configuration((90,), 16, 256, 64, 64, 8, 2, True, 198_000),
    ),
    *tables.unsplit(tables.OWN_KEYS),
)
QUERIES = (
    *tables.with_and_without_descriptors(
        Configuration((90,), 16, 64, 64, 64, 4, 3, True, 68_000),
        Configuration((90,), 16, 128, 128, 64, 8, 3, True, 165_000),
        Configuration((90,), 16, 256, 64, 32, 4, 3, True, 165_000),
    ),
    *tables.unsplit(tables.OWN_QUERIES),
)
# From tiles of 64 x 64, the L2 cache would take longer than the products. Not timed.
BIAS = (Configuration((90,), 16, 128, 128, 64, 8, 1, True, 99_000), *QUERIES)
PAD = max(tables.INTERPRETER.BLOCK_Q, *(row.BLOCK_Q for row in (*KEYS, *QUERIES)))


@plans.planned
def launch_delta(o, lse, do, dlse, delta, lse2, T, packing):
    """Launch the kernel that fills delta and lse2, float32 [B, H, PADDED] or, packed,
    [1, H, PADDED]; T is then the length of the longest sequence.
    """
    B = o.shape[0] if packing is None else packing.starts_q.shape[0] - 1
    H, d_v = o.shape[1], o.shape[-1]
    plans.launch(
        delta_kernel, o, B * H * triton.cdiv(T, PAD) * (PAD // 32),
        *(score_arguments.rows_of(x, packing) for x in (do, o, lse, dlse)), delta, lse2,
        score_arguments.starts_of(packing).q, H, T, delta.shape[2], d_v,
        VARLEN=packing is not None, PAD=PAD, BLOCK_T=32, BLOCK_D=padded(d_v),
    )  # fmt: skip


@plans.planned
def launch_keys(q, k, v, do, delta, lse2, dk, dv, score_mod, packing, config):
    """Launch the kernel that fills dk and dv, in the shapes of k and v."""
    B, n, operands, options = score_arguments.backward_arguments(
        q, k, v, do, score_mod, packing, config, PAD
    )
    change = tile_lists.change_with_lists(
        tile_lists.of_keys, "dkdv", q, k, v, score_mod, packing, config
    )
    plans.launch(
        keys_kernel, q, B * k.shape[1] * triton.cdiv(n.T_k, config.BLOCK_K),
        *operands, delta, lse2,
        *(score_arguments.rows_of(x, packing) for x in (dk, dv)), score_mod.scale,
        change, score_arguments.starts_of(packing), *n, delta.shape[2], **options,
    )  # fmt: skip


@plans.planned
def launch_queries(q, k, v, do, delta, lse2, dq, score_mod, packing, config):
    """Launch the kernel that fills dq, in the shape of q."""
    B, n, operands, options = score_arguments.backward_arguments(
        q, k, v, do, score_mod, packing, config, PAD
    )
    change = tile_lists.change_with_lists(
        tile_lists.of_queries, "dq", q, k, v, score_mod, packing, config
    )
    plans.launch(
        queries_kernel, q, B * n.H * triton.cdiv(n.T_q, config.BLOCK_Q),
        *operands, delta, lse2, score_arguments.rows_of(dq, packing), score_mod.scale,
        change, score_arguments.starts_of(packing), *n, delta.shape[2],
        RAGGED=n.T_k % config.BLOCK_K != 0, **options,
    )  # fmt: skip


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
    B, n = score_arguments.batch_and_sizes(q, k, v, None)
    delta, lse2 = statistics(o, lse, do, dlse, B, n)
    config = score_arguments.configuration("masks, dB", BIAS, (q, k, v, do), None)
    return score_gradients.of_bias(q, k, v, do, delta, lse2, score_mod, config, PAD)


@plans.planned
def backward(q, k, v, o, lse, do, dlse, score_mod, packing=None, bias_gradient=True):
    """``(dq, dk, dv, dbias, dsinks)``, the first three as :mod:`flashlib.kernels` says,
    or packed, the others empty where there is nothing that they belong to or dbias is
    not asked for; the same in every bit on every run. The slopes of ALiBi have no
    gradient.
    """
    dtype = q.dtype
    q, k, v, o, do = inputs.widened(q, k, v, o, do)
    B, n = score_arguments.batch_and_sizes(q, k, v, packing)
    delta, lse2 = statistics(o, lse, do, dlse, B, n, packing)
    dq, dk, dv = plans.new_like(q, k, v)
    if not lse.numel():
        dk.zero_()
        dv.zero_()
    elif dk.numel():
        config = score_arguments.configuration(
            "masks, dK and dV", KEYS, (q, k, v, do), packing
        )
        launch_keys(q, k, v, do, delta, lse2, dk, dv, score_mod, packing, config)
    if dq.numel():
        config = score_arguments.configuration(
            "masks, dQ", QUERIES, (q, k, v, do), packing
        )
        launch_queries(q, k, v, do, delta, lse2, dq, score_mod, packing, config)
    dbias = dsinks = q.new_empty(0)
    if score_mod.bias is not None and bias_gradient:
        config = score_arguments.configuration("masks, dB", BIAS, (q, k, v, do), None)
        dbias = score_gradients.of_bias(
            q, k, v, do, delta, lse2, score_mod, config, PAD
        )
    if score_mod.sinks is not None:
        dsinks = score_gradients.of_sinks(
            delta, lse2, B, n.T_q, score_mod, packing, PAD
        )
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), dbias, dsinks
