"""What several kernels use unchanged: their arguments, tile loads and stores,
visibility, P from the log-sum-exp, the online-softmax update.

Offsets are 64-bit throughout: an offset of a large tensor, or of a view with a large
stride, passes 2^31.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

LN_2 = tl.constexpr(math.log(2.0))
LOG2_E = tl.constexpr(math.log2(math.e))
# The maximum of no scores: with -inf, the weight of a score of -inf would be NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32


class Rows(NamedTuple):
    """A tensor [B, H, T, d] as a kernel reads or writes it."""

    ptr: Any  # a pointer to its first element, or a tensor descriptor of it
    strides: Any  # four, in elements


def as_rows(*tensors):
    """The Rows of each tensor ``[B, H, T, d]`` or ``[B, H, T]``."""
    return [Rows(x, x.stride()) for x in tensors]


class Sizes(NamedTuple):
    """The sizes of a problem."""

    H: Any  # heads of queries
    GROUP: Any  # heads of queries per head of keys and values
    T_q: Any
    T_k: Any
    d: Any  # of queries and keys
    d_v: Any  # of values


class Tile(NamedTuple):
    """What a kernel is compiled for: the sides of its tiles, and whether it reads them
    through tensor descriptors.
    """

    BLOCK_Q: Any
    BLOCK_K: Any
    BLOCK_D: Any  # d, padded, or the columns before the rest
    BLOCK_DV: Any  # d_v, padded
    DESCRIPTOR: Any = False
    REST: Any = 0  # columns of q and k, padded, that have tiles of their own


@triton.jit
def pointers(x, b, h, rows, cols):
    """Pointers [ROWS, COLS] to rows and columns of head h in batch b of x."""
    head = x.ptr + b.to(tl.int64) * x.strides[0] + h.to(tl.int64) * x.strides[1]
    row_starts = head + rows.to(tl.int64) * x.strides[2]  # [ROWS]
    col_starts = cols.to(tl.int64) * x.strides[3]  # [COLS]
    return row_starts[:, None] + col_starts[None, :]


@triton.jit
def row_pointers(x, b, h, i):
    """Pointers [ROWS] to the numbers of rows i of head h of x, the Rows of a tensor
    [B, H, T].
    """
    head = x.ptr + b.to(tl.int64) * x.strides[0] + h.to(tl.int64) * x.strides[1]
    return head + i.to(tl.int64) * x.strides[2]


@triton.jit
def load_tile(
    x, b, h, row, col, T, d,
    ROWS: tl.constexpr, COLS: tl.constexpr, DESCRIPTOR: tl.constexpr = False
):  # fmt: skip
    """The tile [ROWS, COLS] at (row, col) of head h in batch b of the Rows x; elements
    outside [T, d] read as 0.

    Where DESCRIPTOR, x.ptr is a tensor descriptor with blocks [1, 1, ROWS, COLS].
    """
    if DESCRIPTOR:
        tile = x.ptr.load([b, h, row, col]).reshape(ROWS, COLS)
    else:
        rows = row + tl.arange(0, ROWS)
        cols = col + tl.arange(0, COLS)
        inside = (rows < T)[:, None] & (cols < d)[None, :]
        tile = tl.load(pointers(x, b, h, rows, cols), mask=inside, other=0.0)
    return tile


@triton.jit
def load_columns(x, b, h, row, T, d, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Rows of Q or K from row on, in all their columns: a tuple of one tile [ROWS,
    BLOCK_D], or of two where 192 columns would be padded to 256: sides of tiles are
    powers of two.
    """
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    tiles = (load_tile(x, b, h, row, 0, T, d, ROWS, BLOCK_D, TILE.DESCRIPTOR),)
    if TILE.REST > 0:
        tiles = (tiles[0], load_tile(x, b, h, row, BLOCK_D, T, d, ROWS, TILE.REST))
    return tiles


@triton.jit
def dot_columns(x, y, TILE: tl.constexpr):
    """X Y^T of what load_columns returned, in one accumulator."""
    s = tl.dot(x[0], y[0].T, input_precision="ieee")
    if TILE.REST > 0:
        s = tl.dot(x[1], y[1].T, s, input_precision="ieee")
    return s


@triton.jit
def zero_columns(ROWS: tl.constexpr, TILE: tl.constexpr):
    """Zeros in the shape of what load_columns returns, to add up a gradient."""
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    REST: tl.constexpr = TILE.REST
    acc = (tl.zeros([ROWS, BLOCK_D], tl.float32),)
    if REST > 0:
        acc = (acc[0], tl.zeros([ROWS, REST], tl.float32))
    return acc


@triton.jit
def add_columns(acc, x, y, TILE: tl.constexpr):
    """acc + X Y, where acc and Y are as load_columns returns them."""
    total = (tl.dot(x, y[0], acc[0], input_precision="ieee"),)
    if TILE.REST > 0:
        total = (total[0], tl.dot(x, y[1], acc[1], input_precision="ieee"))
    return total


@triton.jit
def store_columns(
    x, acc, scale, b, h, row, T, d, ROWS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Store scale acc, as load_columns would read it."""
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    store_tile(x, acc[0] * scale, b, h, row, 0, T, d, ROWS, BLOCK_D)
    if TILE.REST > 0:
        store_tile(x, acc[1] * scale, b, h, row, BLOCK_D, T, d, ROWS, TILE.REST)


@triton.jit
def store_tile(
    x, tile, b, h, row, col, T, d, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Store a tile [ROWS, COLS] at (row, col) of head h in batch b of the Rows x,
    inside [T, d] only.
    """
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    inside = (rows < T)[:, None] & (cols < d)[None, :]
    element = x.ptr.dtype.element_ty
    tl.store(pointers(x, b, h, rows, cols), tile.to(element), mask=inside)


@triton.jit
def add_tile(
    x, tile, b, h, row, col, T, d, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Add a tile [ROWS, COLS] to the Rows x in memory, element by element and
    atomically, inside [T, d] only.
    """
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    inside = (rows < T)[:, None] & (cols < d)[None, :]
    tl.atomic_add(
        pointers(x, b, h, rows, cols), tile, mask=inside, sem="relaxed"
    )  # fmt: skip


@triton.jit
def visible(i, j, T_q, T_k, CAUSAL: tl.constexpr):
    """Which keys j the queries i see, [BLOCK_Q, BLOCK_K]: j < T_k and, if causal, j <=
    i + T_k - T_q.
    """
    seen = (j < T_k)[None, :]
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None] + (T_k - T_q))
    return seen


@triton.jit
def row_statistics(
    do, o, lse, dlse, b, h, row, T, d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """``(D_i, L_i in base 2)``, both [BLOCK_T], with D_i = sum_k dO_ik O_ik - dL_i, of
    the rows from row on of head h in batch b. do, o, lse, dlse: Rows.
    """
    i = row + tl.arange(0, BLOCK_T)
    do_tile = load_tile(do, b, h, row, 0, T, d, BLOCK_T, BLOCK_D)
    o_tile = load_tile(o, b, h, row, 0, T, d, BLOCK_T, BLOCK_D)
    lse_rows = tl.load(row_pointers(lse, b, h, i), mask=i < T, other=-float("inf"))
    dlse_rows = tl.load(row_pointers(dlse, b, h, i), mask=i < T, other=0.0)
    # A query that sees no key has L = -inf, which would make its row of P infinite.
    # With +inf the row is zero, and so is that of padding.
    blind = lse_rows == -float("inf")
    lse2_rows = tl.where(blind, float("inf"), lse_rows * LOG2_E)
    products = do_tile.to(tl.float32) * o_tile.to(tl.float32)  # [BLOCK_T, BLOCK_D]
    # What has no gradient has none through L either, even if dL is infinite.
    return tl.where(blind, 0.0, tl.sum(products, 1) - dlse_rows), lse2_rows


@triton.jit
def probabilities(s, lse2, scale_log2, seen, MASKED: tl.constexpr):
    """P = 2^(scale_log2 s - lse2), in the shape of the raw scores s, from the
    log-sum-exp in base 2, which is broadcast to s.

    An lse2 of +inf gives zeros: the rows of P that belong to no query, or to one that
    sees no key.
    """
    if MASKED:
        p = tl.exp2(tl.where(seen, s * scale_log2, -float("inf")) - lse2)
    else:
        p = tl.exp2(s * scale_log2 - lse2)  # a multiply-add and an exponential
    return p


@triton.jit
def online_softmax(s, m, l, scale_log2, seen, MASKED: tl.constexpr):
    """Fold a block of raw scores s [BLOCK_Q, BLOCK_K] into the running maximum m and
    normalizer l, both [BLOCK_Q].

    Works in base 2: the weight of a score is 2^(scale_log2 s - m) with scale_log2 =
    scale log2(e) >= 0; m is LOWEST at first. Returns ``(p, alpha, m, l)``: the weights
    of this block and the factor that brings earlier sums to the new maximum.
    """
    if MASKED:
        z = tl.where(seen, s * scale_log2, -float("inf"))
        m_new = tl.maximum(m, tl.max(z, 1))
        p = tl.exp2(z - m_new[:, None])
    else:
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - m_new[:, None])  # multiply-add, exponential
    alpha = tl.exp2(m - m_new)  # [BLOCK_Q]
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def with_sink(m, l, sink):
    """m and l [BLOCK_Q] after one more key with the score ``sink`` in natural units and
    the value 0, and the factor [BLOCK_Q] that brings earlier sums to the new maximum.
    """
    sink = sink.to(tl.float32) * LOG2_E
    m_new = tl.maximum(m, sink)
    factor = tl.exp2(m - m_new)
    return m_new, l * factor + tl.exp2(sink - m_new), factor


@triton.jit
def log_sum_exp(m, l):
    """L [BLOCK_Q] in natural units from m in base 2 and l; -inf where l is 0, in a row
    that sees no key or only scores of -inf.
    """
    l_safe = tl.where(l == 0.0, 1.0, l)
    return tl.where(l == 0.0, -float("inf"), (m + tl.log2(l_safe)) * LN_2)
