"""Pieces of the kernels of masks: how far the window reaches, what is done to a score, where a packed
sequence lies.

Query i of a sequence stands at position p = i + T_k - T_q and sees the keys p - left <= j <= p + right. A
side of the window without a limit is UNLIMITED.
"""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
# Beyond every distance between a query and a key, and small enough to add to a position in 32 bits.
UNLIMITED = 2**30


@triton.jit
def sequence(starts, b, T, VARLEN: tl.constexpr):
    """Where sequence b begins in its tensor, and its length.

    Packed rows are passed with the stride of a row as the stride of a batch, so that the first row of a
    sequence stands where otherwise the number of the batch does.
    """
    start = b
    if VARLEN:
        start = tl.load(starts + b)
        T = tl.load(starts + b + 1) - start
    return start, T


@triton.jit
def row_pointers(x, strides, b, h, i):
    """Pointers [ROWS] to the numbers of rows i of head h; strides are those of x [B, H, T]."""
    head = x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    return head + i.to(tl.int64) * strides[2]


@triton.jit
def padded_rows(b, start, h, H, ROWS, PAD: tl.constexpr, VARLEN: tl.constexpr):
    """Where the rows of D and L of a sequence and head begin: PAD or a multiple of it belongs to each
    sequence, at most PAD - 1 of them after its last row.
    """
    rows = (b * H + h).to(tl.int64) * ROWS
    if VARLEN:
        rows = h.to(tl.int64) * ROWS + (start.to(tl.int64) + b * PAD) // PAD * PAD
    return rows


@triton.jit
def slope_of(slopes, strides, b, h, ALIBI: tl.constexpr):
    """The slope of a head, in base 2."""
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1])
    return slope * LOG2_E


@triton.jit
def key_bounds(row, T_q, T_k, left, right, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
               WINDOW: tl.constexpr):
    """Keys that the queries of the block at row read: those from first to end - 1, of which those from
    ``whole`` to ``cut`` - 1 are seen by all of them. All but end are multiples of BLOCK_K.
    """
    first, whole = 0, 0
    cut, end = T_k // BLOCK_K * BLOCK_K, T_k
    if WINDOW:
        top, bottom = row + T_k - T_q, tl.minimum(row + BLOCK_Q, T_q) - 1 + T_k - T_q
        first = tl.maximum(top - left, 0) // BLOCK_K * BLOCK_K
        end = tl.minimum(end, tl.maximum(bottom + right + 1, 0))
        whole = tl.cdiv(tl.maximum(bottom - left, 0), BLOCK_K) * BLOCK_K
        cut = tl.maximum(tl.minimum(cut, tl.maximum(top + right + 1, 0) // BLOCK_K * BLOCK_K), whole)
    return first, whole, cut, end


@triton.jit
def query_bounds(col, T_q, T_k, left, right, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                 WINDOW: tl.constexpr):
    """Queries that see keys of the block at col: those from first to end - 1, of which those from ``whole``
    to ``cut`` - 1 see all of them. All but end are multiples of BLOCK_Q; queries after the last need no mask.
    """
    first, whole = 0, 0
    cut, end = tl.cdiv(T_q, BLOCK_Q) * BLOCK_Q, T_q
    if WINDOW:
        top, bottom = col + T_q - T_k, tl.minimum(col + BLOCK_K, T_k) - 1 + T_q - T_k
        first = tl.maximum(top - right, 0) // BLOCK_Q * BLOCK_Q
        end = tl.minimum(end, tl.maximum(bottom + left + 1, 0))
        whole = tl.cdiv(tl.maximum(bottom - right, 0), BLOCK_Q) * BLOCK_Q
        last = tl.maximum(top + left + 1, 0)
        cut = tl.maximum(tl.where(last < T_q, last // BLOCK_Q * BLOCK_Q, cut), whole)
    return first, whole, cut, end


@triton.jit
def around(x, whole, cut):
    """The place of x where the range from ``whole`` to ``cut`` is left out."""
    return tl.where(x < whole, x, x + cut - whole)


@triton.jit
def sees(distance, inside, left, right, WINDOW: tl.constexpr):
    """Which pairs are visible, [ROWS, COLS], by their distance p - j, among those that are inside."""
    if WINDOW:
        inside = inside & (distance <= left) & (distance >= -right)  # [ROWS, COLS]
    return inside


@triton.jit
def below_one(x):
    """1 - tanh |x| for a tile x [ROWS, COLS], as 2 / (e^(2 |x|) + 1): all its digits where tanh x is almost 1
    (``eq-masks-tanh``).
    """
    return 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def tanh(x):
    """The hyperbolic tangent of a tile [ROWS, COLS], to the precision of float32: near 0 by a polynomial,
    whose coefficients are those of Moshier's Cephes library (tanhf), elsewhere by an exponential.
    """
    z = tl.minimum(x * x, 1.0)  # [ROWS, COLS]
    series = -5.70498872745e-3 * z + 2.06390887954e-2  # [ROWS, COLS]
    series = (series * z - 5.37397155531e-2) * z + 1.33314422036e-1  # [ROWS, COLS]
    series = (series * z - 3.33332819422e-1) * z * x + x  # [ROWS, COLS]
    exact = 1.0 - below_one(x)  # [ROWS, COLS]
    return tl.where(tl.abs(x) < 0.625, series, tl.where(x < 0.0, -exact, exact))


@triton.jit
def changed(s, distance, scale_log2, per_cap, slope, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Raw scores s [ROWS, COLS] to what the softmax weighs by 2^(factor s): ``(s, derivative, factor)``.

    With softcap c, per_cap is scale / c and scale_log2 is c log2(e); the derivative of the cap, 1 - tanh^2,
    is r (2 - r) with r = 1 - |tanh|, which loses nothing where the cap is reached. The slope is in base 2.
    """
    derivative, factor = s, scale_log2
    if SOFTCAP:
        rest = below_one(s * per_cap)  # [ROWS, COLS]
        derivative = rest * (2.0 - rest)  # [ROWS, COLS]
        s = tanh(s * per_cap)  # [ROWS, COLS]
    if ALIBI:
        s = s * scale_log2 - slope * tl.abs(distance).to(tl.float32)  # [ROWS, COLS]
        factor = 1.0
    return s, derivative, factor
