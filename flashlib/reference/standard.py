"""Standard attention: S, P and O as whole matrices (chapter *Standard attention*).

Shapes: q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]``, v ``[B, H_kv, T_k, d_v]`` with H
a multiple of H_kv; query head h reads key head ``h // (H / H_kv)``. Every function
computes in the dtype of its inputs, float64 included. The functions trust their inputs,
which :mod:`flashlib.checks` checks for the public functions.
"""

import math

import torch


def default_scale(d):
    """1/sqrt(d): the variance of a score is then one (``eq-standard-scores``)."""
    return 1.0 / math.sqrt(d)


def repeat_heads(x, H):
    """k or v ``[B, H_kv, T, d]`` seen by all H query heads: ``[B, H, T, d]``."""
    return x.repeat_interleave(H // max(x.shape[1], 1), dim=1)


def scores(q, k, scale=None):
    """S = scale * Q K^T, ``[B, H, T_q, T_k]`` (``eq-standard-scores``)."""
    scale = default_scale(q.shape[-1]) if scale is None else scale
    return scale * (q @ repeat_heads(k, q.shape[1]).mT)


def causal_mask(T_q, T_k, device=None):
    """Boolean ``[T_q, T_k]``, True where query i sees key j: j <= i + T_k - T_q."""
    i = torch.arange(T_q, device=device)[:, None]
    j = torch.arange(T_k, device=device)[None, :]
    return j <= i + T_k - T_q


def logsumexp(s):
    """L = m + ln(sum_j exp(S_ij - m)), ``[B, H, T_q]``; -inf where no key is seen."""
    return torch.logsumexp(s, dim=-1)


def softmax(s):
    """P_ij = exp(S_ij - L_i), ``[B, H, T_q, T_k]``; all zeros where no key is seen."""
    if s.shape[-1] == 0:
        return torch.zeros_like(s)
    m = s.amax(dim=-1, keepdim=True)
    e = torch.exp(s - m.masked_fill(m == -math.inf, 0.0))
    l = e.sum(dim=-1, keepdim=True)
    return e / l.masked_fill(l == 0.0, 1.0)


def output(p, v):
    """O = P V, ``[B, H, T_q, d_v]`` (``eq-standard-output``)."""
    return p @ repeat_heads(v, p.shape[1])


def attention(q, k, v, *, causal=False, scale=None):
    """``(o, lse)`` by whole matrices: o ``[B, H, T_q, d_v]`` and the log-sum-exp
    ``[B, H, T_q]`` (natural logarithm), both in the dtype of q.
    """
    s = scores(q, k, scale)
    if causal:
        s = s.masked_fill(~causal_mask(q.shape[2], k.shape[2], q.device), -math.inf)
    return output(softmax(s), v), logsumexp(s)
