"""The blocks that a mask leaves to read, and the pairs of a query and a key that it
leaves to compute (chapter *Masks*).

A block of B_r queries and B_c keys is read when some query of it sees some key, and
needs a mask in the kernel when some query does not see some key. Window, position and
causal mask are those of :mod:`flashlib.reference.masks`: query i is at p = i + T_k -
T_q and sees the keys p - left <= j <= p + right; a window is None or (left, right),
each None or an int of at least 0. Counts are exact integers. A size or a side of a
window that is not an int raises TypeError, one outside its range raises ValueError.
"""

import bisect
import itertools

import numpy as np

from flashlib.plain_checks import check_count, check_window

from .forms import check_sizes


def sides(T_q, T_k, causal, window):
    """``(left, right)`` as integers that no distance from query to key exceeds."""
    check_sizes(T_q=T_q, T_k=T_k)
    left, right = check_window(window, causal)
    return min(left, T_q + T_k), min(right, T_q + T_k)


def visible_pairs(T_q, T_k, causal=False, window=None):
    """How many pairs (query, key) the mask leaves, of T_q T_k (``eq-masks-pairs``)."""
    left, right = sides(T_q, T_k, causal, window)
    positions = np.arange(T_q, dtype=np.int64) + T_k - T_q
    seen = np.minimum(positions + right + 1, T_k) - np.maximum(positions - left, 0)
    return int(np.maximum(seen, 0).sum())


def key_blocks(I, T_q, T_k, B_r, B_c, causal=False, window=None):
    """Which blocks of keys block I of queries reads: ``(first, full_start, full_end,
    end)``, numbers of blocks.

    It reads those from first to end - 1; those from full_start to full_end - 1 without
    a mask (``eq-masks-range``).
    """
    left, right = sides(T_q, T_k, causal, window)
    check_sizes(B_r=B_r, B_c=B_c)
    top = I * B_r + T_k - T_q  # positions of the first query and of the last one
    bottom = min((I + 1) * B_r, T_q) - 1 + T_k - T_q
    first = max(top - left, 0) // B_c
    end = max(-(-max(min(bottom + right + 1, T_k), 0) // B_c), first)
    full_start = min(-(-max(bottom - left, 0) // B_c), end)
    full_end = min(max(max(min(top + right + 1, T_k), 0) // B_c, full_start), end)
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


def prefix_blocks(T, B, n):
    """``(read, cut)``: the blocks that are read and those of them that need a mask, for
    T queries, T keys, blocks of B x B, B a divisor of T, and a prefix of n <= T keys:
    query i sees key j if j < n or j <= i (``eq-masks-prefix-tiles``).
    """
    _square(T, B, True, None)
    check_count("n", n, least=0, most=T)
    begun, full = -(-n // B), n // B  # blocks of the prefix, the whole ones of these
    read = band(T // B, T // B, 0) + begun * (begun - 1) // 2
    # On the diagonal those after the whole blocks of the prefix, unless they are single
    # pairs; above it, the column in which the prefix ends.
    cut = (T // B - full) * (B > 1) + (begun - full) * full
    return read, cut


def document_blocks(lengths, B_r, B_c, causal=False):
    """``(read, cut)`` of documents of these lengths, one after another in one row with
    one grid of blocks: query i sees key j if both are in one document and, with a
    causal mask, j <= i.
    """
    ends = list(itertools.accumulate(lengths))
    T = ends[-1] if ends else 0
    check_sizes(T_q=T, B_r=B_r, B_c=B_c)
    read = cut = 0
    for row in range(0, T, B_r):
        last = min(row + B_r, T)
        # The documents of the first and the last query; all between are here too.
        a, b = (bisect.bisect_right(ends, i) for i in (row, last - 1))
        begin = ends[a] - lengths[a]
        blocks = -(-(last if causal else ends[b]) // B_c) - begin // B_c
        full = 0
        if a == b:  # all queries see the keys from begin to end - 1
            end = row + 1 if causal else ends[a]
            full = max(end // B_c - -(-begin // B_c), 0)
        read, cut = read + blocks, cut + blocks - full
    return read, cut


def measured_blocks(sees, T_q, T_k, B_r, B_c):
    """``(read, cut)`` of any mask, by looking at every pair: sees(p, j) is True where
    the query at position p sees key j, for NumPy arrays of integers that broadcast
    (``eq-masks-kinds``).
    """
    check_sizes(T_q=T_q, T_k=T_k, B_r=B_r, B_c=B_c)
    j, starts = np.arange(T_k)[None, :], np.arange(0, T_k, B_c)
    read = cut = 0
    for row in range(0, T_q, B_r):
        positions = np.arange(row, min(row + B_r, T_q))[:, None] + T_k - T_q
        seen = np.broadcast_to(sees(positions, j), (len(positions), T_k)).sum(axis=0)
        pairs = np.add.reduceat(seen, starts)
        # A last block that the end of the keys shortens needs a mask.
        full = int((pairs == len(positions) * B_c).sum())
        blocks = int((pairs > 0).sum())
        read, cut = read + blocks, cut + blocks - full
    return read, cut
