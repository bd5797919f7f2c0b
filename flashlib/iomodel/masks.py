"""The blocks that a mask leaves to read, and the pairs of a query and a key that it
leaves to compute (chapter *Masks*).

A block of B_r queries and B_c keys is read when some query of it sees some key, and
needs a mask in the kernel when some query does not see some key. Window, position and
causal mask are those of :mod:`flashlib.reference.masks`: query i is at p = i + T_k -
T_q and sees the keys p - left <= j <= p + right; a window is None or (left, right),
each None or an int of at least 0. Counts are exact integers. A size that is not an int
raises TypeError, one outside its range and a wrong window raise ValueError.
"""

import numpy as np

from flashlib.plain_checks import check_window

from .forms import check_sizes


def sides(T_q, T_k, causal, window):
    """``(left, right)`` as integers that no distance from query to key exceeds."""
    check_sizes(T_q=T_q, T_k=T_k)
    left, right = check_window(window, causal)
    return min(left, T_q + T_k), min(right, T_q + T_k)


def visible_pairs(T_q, T_k, causal=False, window=None):
    """How many pairs (query, key) the mask leaves, of T_q T_k (``eq-masks-pairs``)."""
    left, right = sides(T_q, T_k, causal, window)
    p = np.arange(T_q, dtype=np.int64) + T_k - T_q
    seen = np.minimum(p + right + 1, T_k) - np.maximum(p - left, 0)
    return int(np.maximum(seen, 0).sum())


def key_blocks(I, T_q, T_k, B_r, B_c, causal=False, window=None):
    """Which blocks of keys block I of queries reads: ``(first, full_start, full_end,
    end)``, numbers of blocks.

    It reads those from first to end - 1; those from full_start to full_end - 1 without
    a mask (``eq-masks-range``).
    """
    left, right = sides(T_q, T_k, causal, window)
    check_sizes(B_r=B_r, B_c=B_c)
    p = I * B_r + T_k - T_q  # positions of the first query and of the last one
    q = min((I + 1) * B_r, T_q) - 1 + T_k - T_q
    first = max(p - left, 0) // B_c
    end = max(-(-max(min(q + right + 1, T_k), 0) // B_c), first)
    full_start = min(-(-max(q - left, 0) // B_c), end)
    full_end = min(max(max(min(p + right + 1, T_k), 0) // B_c, full_start), end)
    return first, full_start, full_end, end


def _ranges(T_q, T_k, B_r, *rest):
    """``key_blocks`` of every block of queries."""
    check_sizes(T_q=T_q, B_r=B_r)
    return [key_blocks(I, T_q, T_k, B_r, *rest) for I in range(-(-T_q // B_r))]


def blocks_read(T_q, T_k, B_r, B_c, causal=False, window=None):
    """How many blocks of keys the blocks of queries read in all, of T_r T_c. The
    backward pass, which walks over queries, reads the same blocks.
    """
    ranges = _ranges(T_q, T_k, B_r, B_c, causal, window)
    return sum(end - first for first, _, _, end in ranges)


def blocks_cut(T_q, T_k, B_r, B_c, causal=False, window=None):
    """How many of the blocks that are read need a mask."""
    ranges = _ranges(T_q, T_k, B_r, B_c, causal, window)
    return sum(
        end - first - (full_end - full_start)
        for first, full_start, full_end, end in ranges
    )


def band(n, below, above):
    """Elements (I, J) of an n x n matrix with -below <= J - I <= above: n (below +
    above + 1) less two triangles, where 0 <= below, above < n (``eq-masks-band``). A
    side below 0 leaves the diagonal out.
    """
    below, above = min(below, n - 1), min(above, n - 1)
    return sum(n - abs(diagonal) for diagonal in range(-below, above + 1))


def square_blocks_read(T, B, causal=False, window=None):
    """``blocks_read`` for T queries, T keys and blocks of B x B, B a divisor of T: the
    band of ceil(left / B) blocks below the diagonal and ceil(right / B) above it
    (``eq-masks-blocks``).
    """
    left, right = _square(T, B, causal, window)
    return band(T // B, -(-left // B), -(-right // B))


def square_blocks_cut(T, B, causal=False, window=None):
    """``blocks_cut`` for the same: the band that is read, less that of full blocks,
    whose sides are one less than (left + 1) / B and (right + 1) / B, rounded down.
    """
    left, right = _square(T, B, causal, window)
    full = band(T // B, (left + 1) // B - 1, (right + 1) // B - 1)
    return square_blocks_read(T, B, causal, window) - full


def _square(T, B, causal, window):
    left, right = sides(T, T, causal, window)
    check_sizes(B=B)
    if T % B:
        raise ValueError(f"B: expected a divisor of T = {T}, got {B}")
    return min(left, T), min(right, T)


def packed_blocks_read(lengths_q, lengths_k, B_r, B_c, causal=False, window=None):
    """``blocks_read`` of packed sequences: the sum, since no block spans two."""
    pairs = zip(lengths_q, lengths_k, strict=True)
    return sum(blocks_read(*pair, B_r, B_c, causal, window) for pair in pairs)
