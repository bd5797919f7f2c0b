"""Decoding: a few new queries against a cache of keys and values (chapter *Decoding*).

The queries q ``[B, H, T_q, d]`` belong to the last T_q of the ``seq_lens[b]`` keys of
sequence b: query i has position ``seq_lens[b] - T_q + i`` and sees the keys up to
its own. A cache is contiguous, k_cache ``[B, H_kv, T_max, d]`` and v_cache ``[B, H_kv,
T_max, d_v]``, or made of pages, ``[pages, H_kv, page_size, d]`` and ``[pages, H_kv,
page_size, d_v]``: then the keys ``n page_size .. (n + 1) page_size - 1`` of sequence b
are in page ``block_table[b, n]``. Keys that no query sees, after the end of a sequence
or before a window, are not read, nor are the table's entries for pages without others.
Every function computes in the dtype of its inputs, float64 included, and trusts them.
"""

import functools
import math

from flashlib.plain_checks import check_window
from flashlib.reference import masks, online, standard


def rows(cache, b, length, block_table=None, oldest=0):
    """The rows of sequence b of a cache from ``oldest`` to ``length`` - 1, ``[H_kv, T,
    d]``, gathered page by page where there is a block table ``[B, max_pages]``
    (``eq-decoding-table``).
    """
    if block_table is None:
        return cache[b, :, oldest:length]
    page_size = cache.shape[2]
    first, stop = oldest // page_size, math.ceil(length / page_size)
    pages = cache[block_table[b, first:stop].long()]  # [used, H_kv, page_size, d]
    skipped = first * page_size
    return pages.transpose(0, 1).flatten(1, 2)[:, oldest - skipped : length - skipped]


def bounds(length, splits, block_size=1):
    """Which of T = ``length`` keys, those of ``[H_kv, T, d]``, each split has:
    ``[(start, stop), ...]``. Whole blocks of block_size keys, as many in each split;
    the last ones may be shorter, or empty (``eq-decoding-bounds``).
    """
    blocks = math.ceil(length / block_size)
    keys = math.ceil(blocks / splits) * block_size
    return [(min(n * keys, length), min((n + 1) * keys, length)) for n in range(splits)]


def parts(q, k, v, splits, *, block_size=1, scale=None, window=None):
    """What each split knows of one sequence: ``[(o, lse), ...]``, o ``[1, H, T_q,
    d_v]`` and lse ``[1, H, T_q]``.

    q ``[1, H, T_q, d]``, k ``[1, H_kv, T_k, d]`` and v ``[1, H_kv, T_k, d_v]``, where
    T_k is the length of the sequence; window as in
    :func:`flashlib.reference.masks.visible`, causal. A split without keys gives o = 0
    and lse = -inf.
    """
    T_q, T_k = q.shape[2], k.shape[2]
    seen = masks.visible(T_q, T_k, causal=True, window=window, device=q.device)
    found = []
    for start, stop in bounds(T_k, splits, block_size):
        keys = slice(start, stop)
        s = standard.scores(q, k[:, :, keys], scale)
        s = s.masked_fill(~seen[:, keys], -math.inf)
        own_v = standard.repeat_heads(v[:, :, keys], q.shape[1])
        found.append(online.finish(online.block(s, own_v)))
    return found


def merge(found):
    """The parts of disjoint sets of keys, ``(o, lse)`` each, as one: o ``[B, H, T_q,
    d_v]``, lse ``[B, H, T_q]`` (``eq-decoding-merge``).

    The merge law of the chapter on online softmax, from left to right; any other order
    gives the same.
    """
    return functools.reduce(online.merge_finished, found)


def attention(
    q, k_cache, v_cache, seq_lens, *, block_table=None, splits=1, block_size=1,
    scale=None, window=None,
):  # fmt: skip
    """``(o, lse)``, o ``[B, H, T_q, d_v]`` and lse ``[B, H, T_q]``, of the last T_q
    positions of every sequence, by the given splits; 0 and -inf for a query that sees
    no key. lse is the natural logarithm. The splits are those of the keys that a query
    sees.
    """
    options = {"block_size": block_size, "scale": scale, "window": window}
    left, _ = check_window(window)
    o, lse = q.new_zeros(*q.shape[:3], v_cache.shape[3]), q.new_zeros(q.shape[:3])
    for b in range(q.shape[0]):
        one, length = slice(b, b + 1), int(seq_lens[b])
        seen = length, block_table, max(length - q.shape[2] - left, 0)
        k, v = (rows(x, b, *seen)[None] for x in (k_cache, v_cache))
        o[one], lse[one] = merge(parts(q[one], k, v, splits, **options))
    return o, lse
