"""What the kernels of masks do to a score, how far the window reaches, and where a
packed sequence is stored.

Query i of a sequence has position p = i + T_k - T_q and sees the keys p - left <= j <=
p + right. A side without a limit is plain_checks.UNLIMITED.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlib.kernels.tiles import LN_2, LOG2_E, row_pointers


class Change(NamedTuple):
    """The arguments of a kernel for a ScoreMod (``score_arguments.change_of``)."""

    scale_log2: Any  # scale log2(e); with a softcap c, c log2(e)
    per_cap: Any  # scale / c
    left: Any  # keys before the position of a query that it sees
    right: Any  # and after it
    slopes: Any  # of ALiBi, float32, or None
    slope_batch: Any  # the stride of a batch of slopes
    slope_head: Any  # and of a head
    bias: Any  # the Rows of a bias [B, H, T_q, T_k], or None
    sinks: Any  # [H], or None
    function: Any  # the Rule of a score, or None
    mask: Any  # the Rule of a mask, or None
    lists: Any  # the Rows of the lists of tiles that a mask leaves, or None
    seed: Any  # of dropout, int64 [1], or None
    threshold: Any  # what the random bits of a weight that is kept are at least
    kept: Any  # 1 / (1 - dropout)


class BatchHead(NamedTuple):
    """The batch and the head whose scores a program computes."""

    b: Any  # the batch, or the number of a packed sequence
    h: Any  # the head of queries
    slope: Any  # of ALiBi, in base 2


class Starts(NamedTuple):
    """The first rows of packed sequences, int32 [B + 1]; None where none are packed."""

    q: Any
    k: Any


class Switches(NamedTuple):
    """Which changes a kernel is compiled for."""

    WINDOW: bool
    SOFTCAP: bool
    ALIBI: bool
    FUNCTION: bool
    VARLEN: bool
    BIAS: bool
    SINKS: bool
    MASK: bool
    DROPOUT: bool
    EVEN: bool = False  # T_k is a multiple of 16, which only a bias uses


@triton.jit
def sequence(starts, b, T, VARLEN: tl.constexpr):
    """Where sequence b begins in its tensor, and its length.

    Packed rows are passed with the stride of a row as the stride of a batch, so that
    the first row of a sequence replaces the index of the batch.
    """
    start = b
    if VARLEN:
        start = tl.load(starts + b)
        T = tl.load(starts + b + 1) - start
    return start, T


@triton.jit
def padded_rows(b, start, h, H, PADDED, PAD: tl.constexpr, VARLEN: tl.constexpr):
    """Where the rows of D and L of a sequence and head begin. Each sequence has its
    number of rows, rounded up to a multiple of PAD.
    """
    rows = (b * H + h).to(tl.int64) * PADDED
    if VARLEN:
        rows = h.to(tl.int64) * PADDED + (start.to(tl.int64) + b * PAD) // PAD * PAD
    return rows


@triton.jit
def slope_of(change, b, h, ALIBI: tl.constexpr):
    """The slope of a head, in base 2."""
    slope = 0.0
    if ALIBI:
        batch = change.slopes + b.to(tl.int64) * change.slope_batch
        slope = tl.load(batch + h.to(tl.int64) * change.slope_head)
    return slope * LOG2_E


@triton.jit
def list_of(change, b, h, block, MASK: tl.constexpr):
    """A pointer to the list of tiles of a block of rows: how many of them are whole,
    how many there are, and their numbers, those of the whole ones first.
    """
    lists = change.lists
    if MASK:
        lists = row_pointers(lists, b, h, block)
    return lists


@triton.jit
def tile_start(x, tiles, SIDE: tl.constexpr, MASK: tl.constexpr):
    """The first row of a tile: x, or with a mask, that of entry x / SIDE in tiles."""
    if MASK:
        x = tl.load(tiles + 2 + x // SIDE) * SIDE
    return x


@triton.jit
def of_group(step, count, tiles, h_kv, blocks_q, GROUP, MASK: tl.constexpr):
    """``(head, block)`` of a step of a loop over the query heads that share key head
    h_kv: each has ``count`` blocks, or with a mask, the list of tiles has the order.
    """
    if MASK:
        tile = tl.load(tiles + 2 + step)
        head, block = tile // blocks_q, tile % blocks_q
    else:
        head, block = step // count, step % count
    return h_kv * GROUP + head, block


@triton.jit
def key_bounds(row, T_q, T_k, change, tiles, ON: tl.constexpr, TILE: tl.constexpr):
    """Keys that the queries of the block at row read: those from first to end - 1, of
    which those from ``full_start`` to ``full_end`` - 1 are seen by all of them. All but
    end are multiples of BLOCK_K. With a mask, the bounds count tiles in its list, times
    BLOCK_K.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    first, full_start = 0, 0
    full_end, end = T_k // BLOCK_K * BLOCK_K, T_k
    if ON.MASK:
        full_end, end = tl.load(tiles) * BLOCK_K, tl.load(tiles + 1) * BLOCK_K
    elif ON.WINDOW:
        top, bottom = row + T_k - T_q, tl.minimum(row + BLOCK_Q, T_q) - 1 + T_k - T_q
        first = tl.maximum(top - change.left, 0) // BLOCK_K * BLOCK_K
        end = tl.minimum(end, tl.maximum(bottom + change.right + 1, 0))
        full_start = tl.cdiv(tl.maximum(bottom - change.left, 0), BLOCK_K) * BLOCK_K
        last = tl.maximum(top + change.right + 1, 0) // BLOCK_K * BLOCK_K
        full_end = tl.maximum(tl.minimum(full_end, last), full_start)
    return first, full_start, full_end, end


@triton.jit
def query_bounds(col, T_q, T_k, change, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Queries that see keys of the block at col: those from first to end - 1, of which
    those from ``full_start`` to ``full_end`` - 1 see all of them. All but end are
    multiples of BLOCK_Q; queries after the last need no mask.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    first, full_start = 0, 0
    full_end, end = tl.cdiv(T_q, BLOCK_Q) * BLOCK_Q, T_q
    if WINDOW:
        top, bottom = col + T_q - T_k, tl.minimum(col + BLOCK_K, T_k) - 1 + T_q - T_k
        first = tl.maximum(top - change.right, 0) // BLOCK_Q * BLOCK_Q
        end = tl.minimum(end, tl.maximum(bottom + change.left + 1, 0))
        full_start = tl.cdiv(tl.maximum(bottom - change.right, 0), BLOCK_Q) * BLOCK_Q
        last = tl.maximum(top + change.left + 1, 0)
        full_end = tl.maximum(
            tl.where(last < T_q, last // BLOCK_Q * BLOCK_Q, full_end), full_start
        )
    return first, full_start, full_end, end


@triton.jit
def skip_full(x, full_start, full_end):
    """x where it is before ``full_start``, and otherwise x moved past ``full_end``, for
    a loop that takes the tiles before and after the full ones.
    """
    return tl.where(x < full_start, x, x + full_end - full_start)


@triton.jit
def sees(positions, j, inside, bh, change, ON: tl.constexpr):
    """Which pairs are visible, [ROWS, COLS], among those that are inside, by the
    positions of the queries and j of the keys.
    """
    if ON.WINDOW:
        distance = positions - j
        inside = inside & (distance <= change.left) & (distance >= -change.right)
    if ON.MASK:
        inside = inside & change.mask[0](bh.b, bh.h, positions, j, *change.mask[1])
    return inside


@triton.jit
def dropped(x, positions, j, bh, change, n, ON: tl.constexpr):
    """A tile x [ROWS, COLS] of P or dP times the factors of dropout, at the positions
    of the queries and j of the keys. A factor depends on the seed, batch, head, row and
    column alone, so every kernel draws the same ones (``eq-masks-dropout``).
    """
    if ON.DROPOUT:
        zero = tl.zeros_like(x).to(tl.int32)
        row = positions - (n.T_k - n.T_q) + zero
        bits, _, _, _ = tl.philox(
            tl.load(change.seed), j + zero, row, bh.h + zero, bh.b + zero
        )
        kept = bits.to(tl.uint32, bitcast=True).to(tl.int64) >= change.threshold
        x = tl.where(kept, x * change.kept, 0.0)
    return x


@triton.jit
def below_one(x):
    """1 - tanh |x| for a tile x [ROWS, COLS], as 2 / (e^(2 |x|) + 1): all its digits
    where tanh x is almost 1 (``eq-masks-tanh``).
    """
    return 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def of_tanh(x):
    """The derivative of tanh, 1 - tanh^2, as r (2 - r) with r = 1 - |tanh|: it loses no
    digits where tanh x is almost 1.
    """
    rest = below_one(x)
    return rest * (2.0 - rest)


@triton.jit
def tanh(x):
    """The hyperbolic tangent of a tile [ROWS, COLS], to the precision of float32: near
    0 by a polynomial, whose coefficients are those of Moshier's Cephes library (tanhf),
    elsewhere by an exponential.
    """
    z = tl.minimum(x * x, 1.0)
    series = -5.70498872745e-3 * z + 2.06390887954e-2
    series = (series * z - 5.37397155531e-2) * z + 1.33314422036e-1
    series = (series * z - 3.33332819422e-1) * z * x + x
    exact = 1.0 - below_one(x)
    return tl.where(tl.abs(x) < 0.625, series, tl.where(x < 0.0, -exact, exact))


@triton.jit
def change_scores(s, positions, j, bh, change, n, ON: tl.constexpr):
    """``(s, derivative, factor)`` from the raw scores s [ROWS, COLS] of queries at
    positions and keys j: the softmax weighs a changed score by 2^(factor s).

    The derivative, with respect to the scaled scores, is that of the cap and of a
    function.
    """
    derivative, factor = s, change.scale_log2  # unused where nothing has a derivative
    if ON.SOFTCAP:
        derivative = of_tanh(s * change.per_cap)
        s = tanh(s * change.per_cap)
    if ON.ALIBI:
        s = s * change.scale_log2 - bh.slope * tl.abs(positions - j).to(tl.float32)
        factor = 1.0
    if ON.FUNCTION:
        s = s * (factor * LN_2)
        # Outside of S it gets the last position, or the last key: what it returns there
        # is multiplied by 0, which NaN would survive.
        last = n.T_k - 1
        p, key = tl.minimum(positions, last), tl.minimum(j, last)
        if change.function[2] is not None:
            slope = change.function[2](s, bh.b, bh.h, p, key, *change.function[1])
            derivative = derivative * slope if ON.SOFTCAP else slope
        s = change.function[0](s, bh.b, bh.h, p, key, *change.function[1])
        factor = LOG2_E
    if ON.BIAS:
        i, x = positions - (n.T_k - n.T_q), change.bias
        head = (
            x.ptr + bh.b.to(tl.int64) * x.strides[0] + bh.h.to(tl.int64) * x.strides[1]
        )
        elements = head + i.to(tl.int64) * x.strides[2] + j.to(tl.int64) * x.strides[3]
        # A mask that is the same for 16 keys lets a load take several at once.
        end = n.T_k // 16 * 16 if ON.EVEN else n.T_k
        inside = (i < n.T_q) & (j < end)
        bias = tl.load(elements, mask=inside, other=0.0).to(tl.float32)
        s = s * factor + bias * LOG2_E
        factor = 1.0
    return s, derivative, factor


@triton.jit
def visible_only(derivative, p):
    """The derivative, but 0 where a weight is 0: at hidden pairs a function may return
    anything. A derivative that is one number for all pairs is left as it is.
    """
    if len(derivative.shape) > 0:
        derivative = tl.where(p > 0.0, derivative, 0.0)
    return derivative
