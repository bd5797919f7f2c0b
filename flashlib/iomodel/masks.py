"""Blocks that a mask leaves to read, and pairs of a query and a key that it leaves to compute (chapter
*Masks*).

A block of B_r queries and B_c keys is read when some query of it sees some key, and needs a mask in the
kernel when some query does not see some key. Window, position and causal mask are those of
:mod:`flashlib.reference.masks`: query i stands at p = i + T_k - T_q and sees the keys p - left <= j <= p +
right. Every function returns an exact integer, or integers; a size that is no integer raises TypeError, one
out of its range ValueError.
"""

import numpy as np

SKIPPED, CUT, WHOLE = 0, 1, 2


def sides(T_q, T_k, causal=False, window=None):
    """``(left, right)`` as integers that no distance between a query and a key exceeds.

    Raises ValueError unless window is None or two sides, each None or an integer of at least 0.
    """
    message = f"window must be (left, right), each None or an integer of at least 0, got {window!r}"
    if window is not None and not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise ValueError(message)
    found = []
    for side in (None, None) if window is None else window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            raise ValueError(message)
        found.append(T_q + T_k if side is None else min(side, T_q + T_k))
    left, right = found
    return left, 0 if causal else right


def visible_pairs(T_q, T_k, causal=False, window=None):
    """How many pairs (query, key) the mask leaves: scores that matter, of T_q T_k (``eq-masks-pairs``)."""
    left, right = _checked(T_q, T_k, causal, window)
    p = np.arange(T_q, dtype=np.int64) + T_k - T_q
    seen = np.minimum(p + right + 1, T_k) - np.maximum(p - left, 0)
    return int(np.maximum(seen, 0).sum())


def block_kinds(T_q, T_k, B_r, B_c, causal=False, window=None):
    """What becomes of each block, counted pair by pair: an array ``[T_r, T_c]`` of SKIPPED, CUT and WHOLE.

    WHOLE blocks are those whose pairs are all visible; a block that hangs over the end of the keys is CUT,
    since the kernel must hide what it reads there. Takes T_q T_k words: this is what the other functions are
    checked against.
    """
    left, right = _checked(T_q, T_k, causal, window, B_r=B_r, B_c=B_c)
    T_r, T_c = _ceil(T_q, B_r), _ceil(T_k, B_c)
    distance = np.arange(T_q)[:, None] + T_k - T_q - np.arange(T_k)[None, :]
    seen = (distance <= left) & (distance >= -right)
    kinds = np.full((T_r, T_c), SKIPPED)
    for I in range(T_r):
        for J in range(T_c):
            block = seen[I * B_r : (I + 1) * B_r, J * B_c : (J + 1) * B_c]
            if block.any():
                kinds[I, J] = WHOLE if block.all() and block.shape[1] == B_c else CUT
    return kinds


def key_blocks(I, T_q, T_k, B_r, B_c, causal=False, window=None):
    """Which blocks of keys block I of queries reads: ``(first, whole, cut, end)``, numbers of blocks.

    It reads those from first to end - 1; those from whole to cut - 1 without a mask (``eq-masks-range``).
    """
    left, right = _checked(T_q, T_k, causal, window, B_r=B_r, B_c=B_c)
    p, q = I * B_r + T_k - T_q, min((I + 1) * B_r, T_q) - 1 + T_k - T_q  # positions of its ends
    first = max(p - left, 0) // B_c
    end = max(_ceil(max(min(q + right + 1, T_k), 0), B_c), first)
    whole = min(_ceil(max(q - left, 0), B_c), end)
    cut = min(max(max(min(p + right + 1, T_k), 0) // B_c, whole), end)
    return first, whole, cut, end


def blocks_read(T_q, T_k, B_r, B_c, causal=False, window=None):
    """How many blocks of keys the blocks of queries read in all, of T_r T_c. The backward pass, which walks
    over queries, reads the same blocks.
    """
    return sum(end - first for first, _, _, end in _ranges(T_q, T_k, B_r, B_c, causal, window))


def blocks_cut(T_q, T_k, B_r, B_c, causal=False, window=None):
    """How many of the blocks that are read need a mask."""
    ranges = _ranges(T_q, T_k, B_r, B_c, causal, window)
    return sum(end - first - (cut - whole) for first, whole, cut, end in ranges)


def band(n, below, above):
    """Elements (I, J) of an n x n matrix with -below <= J - I <= above: n (below + above + 1) less two
    triangles, where 0 <= below, above < n (``eq-masks-band``). A side below 0 leaves the diagonal out.
    """
    _whole_number("n", n, 1)
    below, above = min(below, n - 1), min(above, n - 1)
    return sum(n - abs(diagonal) for diagonal in range(-below, above + 1))


def square_blocks_read(T, B, causal=False, window=None):
    """``blocks_read`` for T queries, T keys and blocks of B x B, B a divisor of T: the band of ceil(left / B)
    blocks below the diagonal and ceil(right / B) above it (``eq-masks-blocks``).
    """
    left, right = _square(T, B, causal, window)
    return band(T // B, -(-left // B), -(-right // B))


def square_blocks_cut(T, B, causal=False, window=None):
    """``blocks_cut`` for the same: the band that is read, less that of the whole blocks, whose sides are one
    less than (left + 1) / B and (right + 1) / B, rounded down.
    """
    left, right = _square(T, B, causal, window)
    whole = band(T // B, (left + 1) // B - 1, (right + 1) // B - 1)
    return square_blocks_read(T, B, causal, window) - whole


def packed_blocks_read(lengths_q, lengths_k, B_r, B_c, causal=False, window=None):
    """``blocks_read`` of sequences that are packed: the sum over the sequences, no block spans two.

    Raises ValueError unless there are as many lengths of queries as of keys.
    """
    if len(lengths_q) != len(lengths_k):
        raise ValueError(
            f"lengths_k must have {len(lengths_q)} lengths, as lengths_q has, got {len(lengths_k)}"
        )
    return sum(
        blocks_read(T_q, T_k, B_r, B_c, causal, window) for T_q, T_k in zip(lengths_q, lengths_k, strict=True)
    )


def _square(T, B, causal, window):
    left, right = _checked(T, T, causal, window, B=B)
    if T % B:
        raise ValueError(f"B must divide T = {T}, got {B}")
    return min(left, T), min(right, T)


def _ranges(T_q, T_k, B_r, B_c, causal, window):
    _checked(T_q, T_k, causal, window, B_r=B_r, B_c=B_c)
    return [key_blocks(I, T_q, T_k, B_r, B_c, causal, window) for I in range(_ceil(T_q, B_r))]


def _ceil(size, step):
    return -(-size // step)


def _checked(T_q, T_k, causal, window, **blocks):
    """The sides of the window, after a look at the sizes: lengths may be 0, blocks not."""
    _whole_number("T_q", T_q, 0)
    _whole_number("T_k", T_k, 0)
    for name, size in blocks.items():
        _whole_number(name, size, 1)
    return sides(T_q, T_k, causal, window)


def _whole_number(name, size, least):
    # numpy integers would overflow where Python's do not: they are refused, not converted.
    if type(size) is not int:
        raise TypeError(f"{name} must be an int, got {size!r} ({type(size).__name__})")
    if size < least:
        raise ValueError(f"{name} must be at least {least}, got {size}")
