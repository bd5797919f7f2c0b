"""The gradients of what is added to scores: of a bias, and of sinks.

Chapter *Masks* (``eq-masks-bias-gradient``, ``eq-masks-sink-gradient``). A bias has the
gradient of the scores, summed over everything that it is broadcast to: dS is computed
again, tile by tile, and added up in registers, so that nothing T x T is stored for a
bias that is not T x T. A sink is one more score of every query of its head.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import INTERPRETED, score_arguments
from flashlib.kernels.scores import (
    BatchHead,
    change_scores,
    dropped,
    padded_rows,
    sees,
    sequence,
    slope_of,
)
from flashlib.kernels.tiles import (
    LOG2_E,
    Rows,
    Sizes,
    load_tile,
    pointers,
    probabilities,
)


class Summed(NamedTuple):
    """How many batches, heads, blocks of queries and of keys share a tile of a bias."""

    b: Any
    h: Any
    q: Any
    k: Any


@triton.jit
def meets(row, col, n, change, TILE: tl.constexpr):
    """Whether any query of the block at row sees a key of the block at col."""
    last = tl.minimum(row + TILE.BLOCK_Q, n.T_q) - 1
    before = col <= last + n.T_k - n.T_q + change.right
    return before & (col + TILE.BLOCK_K > row + n.T_k - n.T_q - change.left)


@triton.jit
def with_ds(
    acc, q, k, v, do, delta, lse2, b, h, row, col, change, n, PADDED,
    PAD: tl.constexpr, ON: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """acc [BLOCK_Q, BLOCK_K] plus the tile of dS at (row, col) of a head."""
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    h_kv = h // n.GROUP
    q_tile = load_tile(
        q, b, h, row, 0, n.T_q, n.d, BLOCK_Q, TILE.BLOCK_D, TILE.DESCRIPTOR
    )  # [BLOCK_Q, BLOCK_D]
    do_tile = load_tile(
        do, b, h, row, 0, n.T_q, n.d_v, BLOCK_Q, TILE.BLOCK_DV, TILE.DESCRIPTOR
    )  # [BLOCK_Q, BLOCK_DV]
    k_tile = load_tile(
        k, b, h_kv, col, 0, n.T_k, n.d, BLOCK_K, TILE.BLOCK_D, TILE.DESCRIPTOR
    )  # [BLOCK_K, BLOCK_D]
    v_tile = load_tile(
        v, b, h_kv, col, 0, n.T_k, n.d_v, BLOCK_K, TILE.BLOCK_DV, TILE.DESCRIPTOR
    )  # [BLOCK_K, BLOCK_DV]
    i = row + tl.arange(0, BLOCK_Q)
    rows = padded_rows(b, b, h, n.H, PADDED, PAD, False) + i
    lse_rows = tl.load(lse2 + rows, mask=i < n.T_q, other=float("inf"))
    d_rows = tl.load(delta + rows, mask=i < n.T_q, other=0.0)
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
    bh = BatchHead(b, h, slope_of(change, b, h, ON.ALIBI))
    positions, keys = (
        (i + (n.T_k - n.T_q))[:, None],
        (col + tl.arange(0, BLOCK_K))[None, :],
    )
    s, _, factor = change_scores(s, positions, keys, bh, change, n, ON)
    seen = sees(positions, keys, keys < n.T_k, bh, change, ON)
    p = probabilities(s, lse_rows[:, None], factor, seen, True)
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
    dp = dropped(dp, positions, keys, bh, change, n, ON)
    return acc + p * (dp - d_rows[:, None])


@triton.jit(do_not_specialize=["T_q", "T_k"])
def bias_kernel(
    q, k, v, do, strides, delta, lse2, dbias, change, summed, H, GROUP, T_q, T_k, d,
    d_v, PADDED, SUM_Q: tl.constexpr, SUM_K: tl.constexpr, PAD: tl.constexpr,
    ON: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One program writes one tile of dB, the sum of dS over everything that the bias is
    broadcast to. q, k, v, do: pointers or descriptors; dbias: Rows, contiguous.
    """
    n = Sizes(H, GROUP, T_q, T_k, d, d_v)
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    blocks_q = tl.cdiv(T_q, BLOCK_Q) // summed.q
    blocks_k = tl.cdiv(T_k, BLOCK_K) // summed.k
    tile = tl.program_id(0) % (blocks_q * blocks_k)
    head = tl.program_id(0) // (blocks_q * blocks_k)
    b_0, h_0 = head // (H // summed.h), head % (H // summed.h)
    I_0, J_0 = tile // blocks_k, tile % blocks_k
    q, k, v = Rows(q, strides[0]), Rows(k, strides[1]), Rows(v, strides[2])
    do = Rows(do, strides[3])
    acc = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    steps = summed.b * summed.h * summed.q * summed.k
    # Half of the tiles see nothing, if causal. Where all steps are at one tile, this is
    # known before the loop, which Triton can then pipeline.
    ONE_TILE: tl.constexpr = not (SUM_Q or SUM_K)
    if ON.WINDOW and ONE_TILE:
        visible = meets(I_0 * BLOCK_Q, J_0 * BLOCK_K, n, change, TILE)
        steps = tl.where(visible, steps, 0)
    for step in tl.range(0, steps):
        # One of the steps' numbers is 0 throughout where nothing is summed.
        rest = step // summed.k
        b, h = b_0 + rest // (summed.q * summed.h), h_0 + rest // summed.q % summed.h
        row = (I_0 + rest % summed.q) * BLOCK_Q
        col = (J_0 + step % summed.k) * BLOCK_K
        if ONE_TILE or not ON.WINDOW:  # noqa: SIM114 (known to the compiler)
            acc = with_ds(
                acc, q, k, v, do, delta, lse2, b, h, row, col, change, n, PADDED,
                PAD, ON, TILE,
            )  # fmt: skip
        elif meets(row, col, n, change, TILE):
            acc = with_ds(
                acc, q, k, v, do, delta, lse2, b, h, row, col, change, n, PADDED,
                PAD, ON, TILE,
            )  # fmt: skip
    i, j = I_0 * BLOCK_Q + tl.arange(0, BLOCK_Q), J_0 * BLOCK_K + tl.arange(0, BLOCK_K)
    if SUM_Q:  # every row of the tile is one and the same element
        acc = tl.broadcast_to(tl.sum(acc, 0)[None, :], (BLOCK_Q, BLOCK_K))
        i = tl.where(i == 0, 0, T_q)
    if SUM_K:
        acc = tl.broadcast_to(tl.sum(acc, 1)[:, None], (BLOCK_Q, BLOCK_K))
        j = tl.where(j == 0, 0, T_k)
    end = T_k // 16 * 16 if ON.EVEN else T_k
    own = (i < T_q)[:, None] & (j < end)[None, :]
    acc = acc.to(dbias.ptr.dtype.element_ty)
    tl.store(pointers(dbias, b_0, h_0, i, j), acc, mask=own)


@triton.jit(do_not_specialize=["T"])
def sinks_kernel(
    delta, lse2, sinks, dsinks, starts_q, B, H, T, PADDED,
    VARLEN: tl.constexpr, PAD: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """One program writes da of one head, - sum_i 2^(a log2(e) - L_i) D_i over all
    queries of all batches, with L_i in base 2.
    """
    h = tl.program_id(0)
    sink = tl.load(sinks + h).to(tl.float32) * LOG2_E
    acc = tl.zeros([BLOCK_T], tl.float32)
    for b in tl.range(0, B):
        b_q, length = sequence(starts_q, b, T, VARLEN)
        rows = padded_rows(b, b_q, h, H, PADDED, PAD, VARLEN)
        for row in tl.range(0, length, BLOCK_T):
            i = row + tl.arange(0, BLOCK_T)
            lse_rows = tl.load(lse2 + rows + i, mask=i < length, other=float("inf"))
            d_rows = tl.load(delta + rows + i, mask=i < length, other=0.0)
            acc -= tl.exp2(sink - lse_rows) * d_rows
    tl.store(dsinks + h, tl.sum(acc, 0))


@plans.planned
def launch_bias(q, k, v, do, delta, lse2, dbias, score_mod, config, pad):
    """Launch the kernel that fills dbias, contiguous and in the shape of the bias, with
    sums that it rounds once to the dtype of dbias.
    """
    B, n, operands, options = score_arguments.backward_arguments(
        q, k, v, do, score_mod, None, config, pad
    )
    sizes = B, n.H, n.T_q, n.T_k
    summed = [full > size for full, size in zip(sizes, dbias.shape, strict=True)]
    sides = (n.T_q, config.BLOCK_Q), (n.T_k, config.BLOCK_K)
    blocks = B, n.H, *(triton.cdiv(*side) for side in sides)
    options["num_stages"] = 1  # there is no shared memory for Q, K, V and dO twice
    if config.architectures == (90,) and config.num_warps == 8 and not score_mod.mask:
        options["maxnreg"] = 128  # so that one program loads while another computes
    pairs = list(zip(blocks, summed, strict=True))
    plans.launch(
        bias_kernel, q, math.prod(1 if one else count for count, one in pairs),
        *operands, delta, lse2, Rows(dbias, score_arguments.broadcast_strides(dbias)),
        score_arguments.change_of(score_mod),
        Summed(*(count if one else 1 for count, one in pairs)),
        *n, delta.shape[2], SUM_Q=summed[2], SUM_K=summed[3], **options,
    )  # fmt: skip


@plans.planned
def launch_sinks(delta, lse2, dsinks, B, T_q, score_mod, packing, pad):
    """Launch the kernel that fills dsinks, float32 ``[H]``."""
    plans.launch(
        sinks_kernel, delta, dsinks.shape[0], delta, lse2, score_mod.sinks, dsinks,
        score_arguments.starts_of(packing).q, B, dsinks.shape[0], T_q, delta.shape[2],
        VARLEN=packing is not None, PAD=pad, BLOCK_T=128,
    )  # fmt: skip


def of_bias(q, k, v, do, delta, lse2, score_mod, config, pad):
    """The gradient of the bias of a ScoreMod."""
    bias = score_mod.bias
    sums = torch.float32 if INTERPRETED else bias.dtype  # it has no bfloat16
    dbias = q.new_empty(bias.shape, dtype=sums)
    if delta.numel() and k.shape[2]:
        launch_bias(q, k, v, do, delta, lse2, dbias, score_mod, config, pad)
    else:
        dbias.zero_()
    return dbias.to(bias.dtype)


def of_sinks(delta, lse2, B, T_q, score_mod, packing, pad):
    """The gradient of the sinks of a ScoreMod."""
    sinks = score_mod.sinks
    dsinks = delta.new_empty(sinks.shape)
    if delta.numel():
        launch_sinks(delta, lse2, dsinks, B, T_q, score_mod, packing, pad)
    else:
        dsinks.zero_()
    return dsinks.to(sinks.dtype)


def with_sinks(found, q, delta, lse2, score_mod, pad):
    """The gradients found of q, k and v, and that of the sinks if there are any, of
    sequences that are not packed.
    """
    if score_mod.sinks is None:
        return found
    B, _, T_q, _ = q.shape
    return *found, of_sinks(delta, lse2, B, T_q, score_mod, None, pad)
