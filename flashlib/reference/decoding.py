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

import torch

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


def parts(
    q, k, v, splits, *, block_size=1, scale=None, window=None, softcap=None, score=None,
    mask=None, batch=0, oldest=0,
):  # fmt: skip
    """What each split knows of one sequence: ``[(o, lse), ...]``, o ``[1, H, T_q,
    d_v]`` and lse ``[1, H, T_q]``.

    q ``[1, H, T_q, d]``, k ``[1, H_kv, T_k, d]`` and v ``[1, H_kv, T_k, d_v]``, where
    T_k is the length of the sequence; window as in
    :func:`flashlib.reference.masks.visible`, causal; softcap, score and a boolean mask
    as in :func:`flashlib.reference.masks.change_scores`, for the sequence ``batch``
    whose first key is at position ``oldest``. A split without keys gives o = 0 and lse
    = -inf.
    """
    T_q, T_k = q.shape[2], k.shape[2]
    seen = masks.visible(T_q, T_k, causal=True, window=window, device=q.device)
    scores = masks.lowered(standard.scores(q, k, scale), softcap)
    if score is not None:
        scores = score.change(scores, batch, oldest)
    if mask is not None:
        seen = seen & mask
    scores = scores.masked_fill(~seen, -math.inf)
    found = []
    for start, stop in bounds(T_k, splits, block_size):
        keys = slice(start, stop)
        own_v = standard.repeat_heads(v[:, :, keys], q.shape[1])
        found.append(online.finish(online.block(scores[..., keys], own_v)))
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
    scale=None, window=None, mask=None, sinks=None, **changes
):  # fmt: skip
    """``(o, lse)``, o ``[B, H, T_q, d_v]`` and lse ``[B, H, T_q]``, of the last T_q
    positions of every sequence, by the given splits; 0 and -inf for a query that sees
    no key. lse is the natural logarithm. The splits are those of the keys that a query
    of such a window sees. A mask is a :class:`flashlib.masks.Mask`, or a tensor that
    broadcasts to ``[B, H, T_q, keys of a cache]``; sinks ``[H]`` are one more part, (0,
    a); softcap and score as in ``parts``.
    """
    options = {"block_size": block_size, "scale": scale, "window": window} | changes
    left, _ = check_window(window)
    B, H, T_q, _ = q.shape
    o, lse = q.new_zeros(*q.shape[:3], v_cache.shape[3]), q.new_zeros(q.shape[:3])
    for b in range(q.shape[0]):
        one, length = slice(b, b + 1), int(seq_lens[b])
        seen = length, block_table, max(length - q.shape[2] - left, 0)
        k, v = (rows(x, b, *seen)[None] for x in (k_cache, v_cache))
        options |= {"batch": b, "oldest": seen[2]}
        if isinstance(mask, torch.Tensor):
            own = mask[(None,) * (4 - mask.ndim)].expand(B, H, T_q, -1)[one]
            own = own if own.shape[3] == 1 else own[..., seen[2] : length]
            options["mask"] = own
        elif mask is not None:
            sizes = 1, H, T_q, k.shape[2], q.device
            options["mask"] = mask.visible(*sizes, b, seen[2])
        found = parts(q[one], k, v, splits, **options)
        if sinks is not None:
            sink = sinks.to(q.dtype)[None, :, None].expand(1, H, T_q)
            found.append((torch.zeros_like(found[0][0]), sink))
        o[one], lse[one] = merge(found)
    return o, lse
