"""Softmax one block at a time: the state (m, l, O) and its merge (chapter *Softmax one
block at a time*).

A state is what has to be known of every query about a set of keys. Two states of
disjoint sets merge into the state of their union, in any order and grouping. Shapes:
scores s ``[..., T_q, n]``, values v ``[..., n, d_v]``, where n is the number of keys of
a block and may be 0; the leading dimensions of v broadcast to those of s. A score is a
number or -inf (a key that the query may not see). Every function computes in the dtype
of its inputs, float64 included, and trusts them.
"""

import math
from typing import NamedTuple

import torch

from flashlib.reference import standard


class State(NamedTuple):
    """The state of each query after the keys seen so far (``eq-online-state``).

    m ``[..., T_q]``       largest score, -inf where no key was seen
    l ``[..., T_q]``       sum over the keys j of exp(S_ij - m_i)
    o ``[..., T_q, d_v]``  sum over the keys j of exp(S_ij - m_i) V_j, not divided by l
    """

    m: torch.Tensor
    l: torch.Tensor
    o: torch.Tensor


def weight(s, m):
    """exp(s - m) for s <= m, in the broadcast shape of the two; 0 for s = -inf, also
    where m is -inf and a plain exp gives NaN (``eq-online-factor``).
    """
    return torch.exp(s - m.masked_fill(m == -math.inf, 0.0))


def identity(shape, d_v, *, dtype=None, device=None):
    """The state of no keys, for queries ``[..., T_q]`` (``eq-online-identity``)."""
    options = {"dtype": dtype, "device": device}
    return State(
        m=torch.full(shape, -math.inf, **options),
        l=torch.zeros(shape, **options),
        o=torch.zeros((*shape, d_v), **options),
    )


def block(s, v):
    """The state of a block: scores s ``[..., T_q, n]``, values v ``[..., n, d_v]``."""
    if s.shape[-1] == 0:
        return identity(s.shape[:-1], v.shape[-1], dtype=s.dtype, device=s.device)
    m = s.amax(dim=-1)
    p = weight(s, m[..., None])
    return State(m, p.sum(dim=-1), p @ v)


def merge(a, b):
    """The state of the union of two disjoint sets of keys (``eq-online-merge``)."""
    m = torch.maximum(a.m, b.m)
    alpha, beta = weight(a.m, m), weight(b.m, m)
    o = alpha[..., None] * a.o + beta[..., None] * b.o
    return State(m, alpha * a.l + beta * b.l, o)


def finish(state):
    """Output and log-sum-exp of a state: ``(o, lse)``, o ``[..., T_q, d_v]``, lse
    ``[..., T_q]`` (``eq-online-finish``); a query that saw no key gives o = 0 and lse =
    -inf.
    """
    m, l, o = state
    return o / l.masked_fill(l == 0.0, 1.0)[..., None], m + torch.log(l)


def merge_finished(a, b):
    """The merge of two finished pairs of disjoint sets of keys: a, b and the result are
    ``(o, lse)``, o ``[..., T_q, d_v]`` and lse ``[..., T_q]``
    (``eq-online-lse-merge``).
    """
    (o_a, lse_a), (o_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    alpha, beta = weight(lse_a, lse), weight(lse_b, lse)
    return alpha[..., None] * o_a + beta[..., None] * o_b, lse


def attention(q, k, v, block_size, *, causal=False, scale=None):
    """Attention and its log-sum-exp in one pass over blocks of keys
    (``alg-online-pass``).

    Takes q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]`` and v ``[B, H_kv, T_k, d_v]``
    and returns ``(o, lse)`` as :func:`flashlib.reference.standard.attention` does;
    block_size is the number of keys of a block, at least 1. At any time only the scores
    of one block exist.
    """
    (B, H, T_q, _), T_k, d_v = q.shape, k.shape[2], v.shape[3]
    mask = standard.causal_mask(T_q, T_k, q.device)
    state = identity((B, H, T_q), d_v, dtype=q.dtype, device=q.device)
    for start in range(0, T_k, block_size):
        keys = slice(start, start + block_size)
        s = standard.scores(q, k[:, :, keys], scale)
        if causal:
            s = s.masked_fill(~mask[:, keys], -math.inf)
        state = merge(state, block(s, standard.repeat_heads(v[:, :, keys], H)))
    return finish(state)
