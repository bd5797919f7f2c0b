"""Masks and changed scores: who sees whom, and what is done to a score before the
softmax (chapter *Masks*).

Shapes as in :mod:`flashlib.reference.standard`. Query i has position p = i + T_k -
T_q, so that the last query is at the last key. A window ``(left, right)``
shows it the keys p - left <= j <= p + right; a side that is None is unlimited, and
causal is right = 0. Softcap c replaces a score s = scale q.k by c tanh(s / c). ALiBi
then subtracts ``slope |p - j|``, with a slope for each head: ``[H]`` or ``[B, H]``.

The functions trust their inputs, except for the window.
"""

import math
from typing import NamedTuple

import torch

from flashlib.plain_checks import check_window
from flashlib.reference import gradients as by_hand
from flashlib.reference import standard


def distances(T_q, T_k, device=None):
    """p - j ``[T_q, T_k]``, where p = i + T_k - T_q (``eq-masks-position``)."""
    i = torch.arange(T_q, device=device)[:, None]
    j = torch.arange(T_k, device=device)[None, :]
    return i + (T_k - T_q) - j


def visible(T_q, T_k, *, causal=False, window=None, device=None):
    """Boolean ``[T_q, T_k]``, True where query i sees key j: p - left <= j <= p + right
    (``eq-masks-window``).

    Raises ValueError unless window is None or two sides, each None or an integer of at
    least 0.
    """
    left, right = check_window(window, causal)
    distance = distances(T_q, T_k, device)
    return (distance <= left) & (distance >= -right)


def cap(s, softcap):
    """c tanh(s / c) for scores s ``[..., T_q, T_k]`` (``eq-masks-softcap``)."""
    return softcap * torch.tanh(s / softcap)


def alibi(alibi_slopes, T_q, T_k):
    """What ALiBi subtracts from each score, slope |p - j|: ``[1, H, T_q, T_k]`` or
    ``[B, H, T_q, T_k]`` for slopes ``[H]`` or ``[B, H]`` (``eq-masks-alibi``).
    """
    slopes = alibi_slopes if alibi_slopes.ndim == 2 else alibi_slopes[None]
    distance = distances(T_q, T_k, slopes.device).abs().to(slopes.dtype)
    return slopes[:, :, None, None] * distance


def scores(q, k, *, scale=None, **changes):
    """The scores that the softmax sees, ``[B, H, T_q, T_k]``: scaled, then changed by
    what :func:`change_scores` takes.
    """
    return change_scores(standard.scores(q, k, scale), **changes)


def lowered(s, softcap=None, alibi_slopes=None):
    """Scores ``[B, H, T_q, T_k]`` capped and lowered with the distance."""
    if softcap is not None:
        s = cap(s, softcap)
    if alibi_slopes is not None:
        s = s - alibi(alibi_slopes.to(s.dtype), *s.shape[2:])
    return s


def change_scores(
    s, *, causal=False, window=None, softcap=None, alibi_slopes=None, score=None,
    bias=None, mask=None, batch=0
):  # fmt: skip
    """Scores ``[B, H, T_q, T_k]`` as in :func:`lowered`, then replaced by a
    :class:`flashlib.score_functions.Score`, for which the first batch has this number,
    with a bias that broadcasts to them, and -inf where a window or a
    :class:`flashlib.masks.Mask` hides a key.
    """
    T_q, T_k = s.shape[2:]
    s = lowered(s, softcap, alibi_slopes)
    if score is not None:
        s = score.change(s, batch)
    if bias is not None:
        s = s + bias.to(s.dtype)
    seen = visible(T_q, T_k, causal=causal, window=window, device=s.device)
    if mask is not None:
        tensor = isinstance(mask, torch.Tensor)
        seen = seen & (mask if tensor else mask.visible(*s.shape, s.device))
    return s.masked_fill(~seen, -math.inf)


def philox(seed, *counters):
    """The first 32 random bits, int64, of Philox 4x32-10 for a seed of 64 bits and four
    counters of 32, tensors that broadcast.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), section 3.
    """
    word = 0xFFFFFFFF
    keys = seed & word, seed >> 32 & word
    a, b, c, d = (x.long() & word for x in torch.broadcast_tensors(*counters))
    for _ in range(10):
        low, high = a * 0xD2511F53, c * 0xCD9E8D57  # 64 bits, the first one a sign
        a, b = (high >> 32 & word) ^ b ^ keys[0], high & word
        c, d = (low >> 32 & word) ^ d ^ keys[1], low & word
        keys = keys[0] + 0x9E3779B9 & word, keys[1] + 0xBB67AE85 & word
    return a


def kept(B, H, T_q, T_k, dropout, seed, device=None):
    """The factors of dropout ``[B, H, T_q, T_k]``, float64: 0 with probability dropout,
    otherwise 1 / (1 - dropout), from the seed and the place in S alone
    (``eq-masks-dropout``).
    """
    b, h, i, j = torch.meshgrid(
        *(torch.arange(n, device=device) for n in (B, H, T_q, T_k)), indexing="ij"
    )
    bits = philox(seed, j, i, h, b)
    return (bits >= math.ceil(dropout * 2**32)).double() / (1.0 - dropout)


def factors(p, dropout, seed):
    """The factors of P for a call of ``attention``; dropout may be their tensor too."""
    if isinstance(dropout, torch.Tensor):
        return dropout.to(p.dtype)
    return kept(*p.shape, dropout, seed, p.device).to(p.dtype) if dropout else 1.0


def with_sinks(s, sinks):
    """Scores ``[B, H, T_q, T_k]`` and one more key with score sinks[h], which every
    query sees and whose value is 0 (``eq-masks-sink``).
    """
    if sinks is None:
        return s
    column = sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)
    return torch.cat([s, column], dim=3)


def attention(q, k, v, *, sinks=None, dropout=0.0, seed=0, **options):
    """``(o, lse)``, o ``[B, H, T_q, d_v]`` and lse ``[B, H, T_q]``, of such scores; 0
    and -inf where a query sees no key. Options as in ``scores``, sinks ``[H]``, and the
    share of the weights that is dropped after the softmax, by an integer seed.
    """
    s = with_sinks(scores(q, k, **options), sinks)
    p = standard.softmax(s)[..., : k.shape[2]]
    p = p * factors(p, dropout, seed)
    return standard.output(p, v), standard.logsumexp(s)


class Gradients(NamedTuple):
    """What :func:`gradients` returns, in the shapes of the inputs; None for none."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None
    dsinks: torch.Tensor | None


def all_gradients(
    q, k, v, do, *, scale=None, dlse=None, sinks=None, dropout=0.0, seed=0, **options
):  # fmt: skip
    """The Gradients from dO ``[B, H, T_q, d_v]`` and dlse ``[B, H, T_q]`` or None.

    A mask adds nothing to the rules: P is 0 where it hides. ALiBi adds a constant to S.
    The cap multiplies dS by its derivative, 1 - tanh^2(s / c) = 1 / cosh^2(s / c)
    (``eq-masks-softcap-gradient``), and so does any function of the scores. A bias has
    the gradient of the scores that it is added to, summed where it broadcasts
    (``eq-masks-bias-gradient``); a sink is a score too (``eq-masks-sink-gradient``).
    Dropout multiplies P and dP by the same factors,
    and D stays the row sum of dO o O (``eq-masks-dropout-gradient``).
    """
    scale = standard.default_scale(q.shape[-1]) if scale is None else scale
    p = standard.softmax(with_sinks(scores(q, k, scale=scale, **options), sinks))
    p, of_sink = p[..., : k.shape[2]], p[..., k.shape[2] :]
    z = factors(p, dropout, seed)
    delta = by_hand.row_dot(do, standard.output(z * p, v))
    ds = by_hand.d_scores(p, z * by_hand.d_probabilities(do, v), delta, dlse)
    bias, softcap = options.get("bias"), options.get("softcap")
    dbias = None if bias is None else ds.sum_to_size(bias.shape)
    dsinks = None
    if sinks is not None:
        shared = delta if dlse is None else delta - dlse
        dsinks = -(of_sink[..., 0] * shared).sum(dim=(0, 2))
    score, slopes = options.get("score"), options.get("alibi_slopes")
    if score is not None:  # which may have no derivative at a pair that is hidden
        before = lowered(standard.scores(q, k, scale), softcap, slopes)
        slope = score.slope(before, options.get("batch", 0))
        ds = (ds * slope).masked_fill(p == 0, 0.0)
    if softcap is not None:
        ds = ds / torch.cosh(standard.scores(q, k, scale) / softcap).square()
    dk = by_hand.sum_groups(by_hand.d_keys(ds, q, scale), k.shape[1])
    dv = by_hand.sum_groups(by_hand.d_values(z * p, do), k.shape[1])
    return Gradients(by_hand.d_queries(ds, k, scale), dk, dv, dbias, dsinks)


def gradients(q, k, v, do, **options):
    """``(dq, dk, dv)`` of :func:`all_gradients`."""
    return tuple(all_gradients(q, k, v, do, **options)[:3])


def sequence(x, cu_seqlens, b):
    """Sequence b of packed x ``[total, H, d]``, ``[1, H, T, d]``: a view."""
    return x[cu_seqlens[b] : cu_seqlens[b + 1]].transpose(0, 1)[None]


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, *, alibi_slopes=None, mask=None, dropout=0.0,
    seed=0, **options
):  # fmt: skip
    """Attention of every sequence with itself, the sequences packed one after the
    other, without padding; options as in ``attention``, except for a bias.

    Takes q ``[total_q, H, d]``, k ``[total_k, H_kv, d]`` and v ``[total_k, H_kv,
    d_v]``; sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1] - 1
    (``eq-masks-packed``). Masks ``[T_q, T_k]``, positions and slopes ``[H]`` or ``[B,
    H]`` are those of each sequence. Returns ``(o, lse)``, o ``[total_q, H, d_v]`` and
    lse ``[H, total_q]``, in the dtype of q.
    """
    o = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf)
    starts_q, starts_k = (
        torch.as_tensor(x).tolist() for x in (cu_seqlens_q, cu_seqlens_k)
    )
    B = len(starts_q) - 1
    for b in range(B):
        slopes = alibi_slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[b]
        tensors = ((q, starts_q), (k, starts_k), (v, starts_k))
        own = [sequence(x, starts, b) for x, starts in tensors]
        changes = options | {"alibi_slopes": slopes, "batch": b}
        sizes = B, q.shape[1], own[0].shape[2], own[1].shape[2]
        if mask is not None:
            changes["mask"] = mask.visible(*sizes, q.device)[b]
        if dropout:
            changes["dropout"] = kept(*sizes, dropout, seed, q.device)[b]
        own_o, own_lse = attention(*own, **changes)
        rows = slice(starts_q[b], starts_q[b + 1])
        o[rows], lse[:, rows] = own_o[0].transpose(0, 1), own_lse[0]
    return o, lse
