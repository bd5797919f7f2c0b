"""Masks and changed scores: who sees whom, and what is done to a score before the softmax (chapter *Masks*).

Shapes as in :mod:`flashlib.reference.standard`. Query i stands at position p = i + T_k - T_q, so that the
last query stands beside the last key. A window ``(left, right)`` shows it the keys p - left <= j <= p +
right; a side that is None is unlimited, and causal is right = 0. Softcap c replaces a score s = scale q.k by
c tanh(s / c). ALiBi then takes ``slope |p - j|`` off, with a slope for each head: ``[H]`` or ``[B, H]``.

The functions trust their inputs, but for the window: it is what a reader types.
"""

import math

import torch

from flashlib.reference import gradients as reference_gradients
from flashlib.reference import standard


def window_sides(causal=False, window=None):
    """The window that a causal mask ``[T_q, T_k]`` leaves: ``(left, right)``, each a number of keys or None.

    Raises ValueError unless window is None or two sides, each None or an integer of at least 0.
    """
    message = f"window: expected (left, right), each None or an integer of at least 0, got {window!r}"
    if window is not None and not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise ValueError(message)
    left, right = (None, None) if window is None else window
    for side in (left, right):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            raise ValueError(message)
    return left, 0 if causal else right


def distances(T_q, T_k, device=None):
    """p - j for the position p = i + T_k - T_q of query i and every key j: integers ``[T_q, T_k]``
    (``eq-masks-position``).
    """
    i = torch.arange(T_q, device=device)[:, None]
    j = torch.arange(T_k, device=device)[None, :]
    return i + (T_k - T_q) - j


def visible(T_q, T_k, *, causal=False, window=None, device=None):
    """Boolean ``[T_q, T_k]``, True where query i sees key j: p - left <= j <= p + right
    (``eq-masks-window``).

    Raises ValueError for a window that is none.
    """
    left, right = window_sides(causal, window)
    distance = distances(T_q, T_k, device)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance <= left
    if right is not None:
        seen &= distance >= -right
    return seen


def cap(s, softcap):
    """c tanh(s / c) for scores s ``[..., T_q, T_k]``: about s where s is small, never beyond +-c
    (``eq-masks-softcap``).
    """
    return softcap * torch.tanh(s / softcap)


def alibi(alibi_slopes, T_q, T_k):
    """What ALiBi takes off each score, slope |p - j|: ``[1, H, T_q, T_k]`` or ``[B, H, T_q, T_k]`` for slopes
    ``[H]`` or ``[B, H]`` (``eq-masks-alibi``).
    """
    slopes = alibi_slopes if alibi_slopes.ndim == 2 else alibi_slopes[None]
    return slopes[:, :, None, None] * distances(T_q, T_k, slopes.device).abs().to(slopes.dtype)


def scores(q, k, *, causal=False, window=None, softcap=None, alibi_slopes=None, scale=None):
    """The scores that the softmax sees, ``[B, H, T_q, T_k]``: scaled, capped, lowered with the distance, and
    -inf where a query does not see a key.
    """
    s = standard.scores(q, k, scale)
    if softcap is not None:
        s = cap(s, softcap)
    if alibi_slopes is not None:
        s = s - alibi(alibi_slopes.to(s.dtype), q.shape[2], k.shape[2])
    seen = visible(q.shape[2], k.shape[2], causal=causal, window=window, device=q.device)
    return s.masked_fill(~seen, -math.inf)


def attention(q, k, v, *, causal=False, window=None, softcap=None, alibi_slopes=None, scale=None):
    """Attention over such scores, and their log-sum-exp.

    Takes q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]`` and v ``[B, H_kv, T_k, d_v]`` and returns ``(o,
    lse)``, o ``[B, H, T_q, d_v]`` and lse ``[B, H, T_q]``, in the dtype of q; 0 and -inf where a query sees
    no key.
    """
    s = scores(
        q, k, causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes, scale=scale
    )  # fmt: skip
    return standard.output(standard.softmax(s), v), standard.logsumexp(s)


def gradients(
    q, k, v, do, *, causal=False, window=None, softcap=None, alibi_slopes=None, scale=None, dlse=None
):
    """``(dq, dk, dv)`` in the shapes of q, k and v from dO ``[B, H, T_q, d_v]`` and dlse ``[B, H, T_q]`` or
    None.

    A mask adds nothing to the rules: P is 0 where it hides. ALiBi adds a constant to S. The cap multiplies
    dS by its derivative, 1 - tanh^2(s / c) = 1 / cosh^2(s / c) (``eq-masks-softcap-gradient``).
    """
    scale = standard.default_scale(q.shape[-1]) if scale is None else scale
    s = scores(
        q, k, causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes, scale=scale
    )  # fmt: skip
    p, H_kv = standard.softmax(s), k.shape[1]
    delta = reference_gradients.row_dot(do, standard.output(p, v))
    ds = reference_gradients.d_scores(p, reference_gradients.d_probabilities(do, v), delta, dlse)
    if softcap is not None:
        ds = ds / torch.cosh(standard.scores(q, k, scale) / softcap).square()
    dk = reference_gradients.sum_groups(reference_gradients.d_keys(ds, q, scale), H_kv)
    dv = reference_gradients.sum_groups(reference_gradients.d_values(p, do), H_kv)
    return reference_gradients.d_queries(ds, k, scale), dk, dv


def sequence(x, cu_seqlens, b):
    """Sequence b of packed rows x ``[total, H, d]`` as a batch of one, ``[1, H, T, d]``: a view."""
    return x[cu_seqlens[b] : cu_seqlens[b + 1]].transpose(0, 1)[None]


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, *, causal=False, window=None, softcap=None, alibi_slopes=None,
    scale=None
):  # fmt: skip
    """Attention of every sequence with itself, the sequences packed one after the other, without padding.

    Takes q ``[total_q, H, d]``, k ``[total_k, H_kv, d]`` and v ``[total_k, H_kv, d_v]``; sequence b owns the
    rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 (``eq-masks-packed``). Masks ``[T_q, T_k]``, positions and
    slopes ``[H]`` or ``[B, H]`` are those of each sequence. Returns ``(o, lse)``, o ``[total_q, H, d_v]`` and
    lse ``[H, total_q]``, in the dtype of q.
    """
    o = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf)
    starts_q, starts_k = (torch.as_tensor(x).tolist() for x in (cu_seqlens_q, cu_seqlens_k))
    for b in range(len(starts_q) - 1):
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        rows = slice(starts_q[b], starts_q[b + 1])
        own_o, own_lse = attention(
            sequence(q, starts_q, b), sequence(k, starts_k, b), sequence(v, starts_k, b),
            causal=causal, window=window, softcap=softcap, alibi_slopes=slopes, scale=scale,
        )  # fmt: skip
        o[rows], lse[:, rows] = own_o[0].transpose(0, 1), own_lse[0]
    return o, lse
