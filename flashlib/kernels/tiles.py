"""Pieces that several kernels use unchanged: tile loads and stores, visibility, P from the log-sum-exp,
the online-softmax update.

Offsets are 64-bit throughout: an offset of a large tensor, or of a view with a large stride, passes
2^31.
"""

import triton
import triton.language as tl


@triton.jit
def pointers(x, strides, b, h, rows, cols):
    """Pointers [ROWS, COLS] to rows and columns of head h in batch b; strides are those of x [B, H, T, d]."""
    head = x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    row_starts = head + rows.to(tl.int64) * strides[2]  # [ROWS]
    return row_starts[:, None] + (cols.to(tl.int64) * strides[3])[None, :]  # [ROWS, COLS]


@triton.jit
def load_tile(x, strides, b, h, row, col, T, d, ROWS: tl.constexpr, COLS: tl.constexpr,
              DESCRIPTOR: tl.constexpr = False):
    """The tile [ROWS, COLS] at (row, col) of head h in batch b; what lies outside [T, d] reads as 0.

    x is a pointer to [B, H, T, d] or, where DESCRIPTOR, a tensor descriptor of it with blocks [1,
    1, ROWS, COLS].
    """
    if DESCRIPTOR:
        tile = x.load([b, h, row, col]).reshape(ROWS, COLS)  # [ROWS, COLS]
    else:
        rows = row + tl.arange(0, ROWS)  # [ROWS]
        cols = col + tl.arange(0, COLS)  # [COLS]
        inside = (rows < T)[:, None] & (cols < d)[None, :]  # [ROWS, COLS]
        tile = tl.load(pointers(x, strides, b, h, rows, cols), mask=inside, other=0.0)  # [ROWS, COLS]
    return tile


@triton.jit
def store_tile(x, strides, tile, b, h, row, col, T, d, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store a tile [ROWS, COLS] at (row, col) of head h in batch b, inside [T, d] only."""
    rows = row + tl.arange(0, ROWS)  # [ROWS]
    cols = col + tl.arange(0, COLS)  # [COLS]
    inside = (rows < T)[:, None] & (cols < d)[None, :]  # [ROWS, COLS]
    tl.store(pointers(x, strides, b, h, rows, cols), tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def add_tile(x, strides, tile, b, h, row, col, T, d, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Add a tile [ROWS, COLS] to x in memory, element by element and atomically, inside [T, d] only."""
    rows = row + tl.arange(0, ROWS)  # [ROWS]
    cols = col + tl.arange(0, COLS)  # [COLS]
    inside = (rows < T)[:, None] & (cols < d)[None, :]  # [ROWS, COLS]
    tl.atomic_add(pointers(x, strides, b, h, rows, cols), tile, mask=inside, sem="relaxed")


@triton.jit
def visible(i, j, T_q, T_k, CAUSAL: tl.constexpr):
    """Which keys j the queries i see, [BLOCK_Q, BLOCK_K]: j < T_k and, if causal, j <= i + T_k - T_q."""
    seen = (j < T_k)[None, :]  # [1, BLOCK_K]
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None] + (T_k - T_q))  # [BLOCK_Q, BLOCK_K]
    return seen


@triton.jit
def probabilities(s, lse2, scale_log2, seen, MASKED: tl.constexpr):
    """P = 2^(scale_log2 s - lse2), in the shape of the raw scores s, from the log-sum-exp in base 2, to
    which s is broadcast.

    An lse2 of +inf gives zeros: the rows of P that belong to no query, or to one that sees no key.
    """
    if MASKED:
        p = tl.exp2(tl.where(seen, s * scale_log2, -float("inf")) - lse2)  # [ROWS, COLS]
    else:
        p = tl.exp2(s * scale_log2 - lse2)  # [ROWS, COLS], a multiply-add and an exponential
    return p


@triton.jit
def online_softmax(s, m, l, scale_log2, seen, MASKED: tl.constexpr):
    """Fold a block of raw scores s [BLOCK_Q, BLOCK_K] into the running maximum m and normaliser l,
    both [BLOCK_Q].

    Works in base 2: the weight of a score is 2^(scale_log2 s - m) with scale_log2 = scale log2(e)
    >= 0.
    Returns ``(p, alpha, m, l)``: the weights of this block and the factor that brings earlier sums
    to the new maximum.
    """
    if MASKED:
        z = tl.where(seen, s * scale_log2, -float("inf"))  # [BLOCK_Q, BLOCK_K]
        m_new = tl.maximum(m, tl.max(z, 1))  # [BLOCK_Q]
        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # [BLOCK_Q]
        p = tl.exp2(z - shift[:, None])  # [BLOCK_Q, BLOCK_K]
    else:
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)  # [BLOCK_Q]
        shift = m_new
        p = tl.exp2(s * scale_log2 - shift[:, None])  # [BLOCK_Q, BLOCK_K], a multiply-add and an exponential
    alpha = tl.exp2(m - shift)  # [BLOCK_Q]
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)
