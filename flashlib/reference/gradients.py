"""The gradients of attention, written out by hand (chapter *Gradients by hand*).

Shapes as in :mod:`flashlib.reference.standard`; ``do`` is the gradient of the loss with
respect to O. With grouped heads, dK and dV are summed over the query heads of a group.
"""

import math

from flashlib.reference import standard


def sum_groups(x, H_kv):
    """Sums over each group: ``[B, H, T, d]`` becomes ``[B, H_kv, T, d]``."""
    B, H, T, d = x.shape
    return x.reshape(B, H_kv, H // H_kv, T, d).sum(dim=2)


def d_values(p, do):
    """dV = P^T dO for every query head, ``[B, H, T_k, d_v]`` (``eq-gradients-dv``)."""
    return p.mT @ do


def d_probabilities(do, v):
    """dP = dO V^T, ``[B, H, T_q, T_k]`` (``eq-gradients-dp``)."""
    return do @ standard.repeat_heads(v, do.shape[1]).mT


def row_dot(do, o):
    """D_i = sum_k dO_ik O_ik, ``[B, H, T_q]`` (``eq-gradients-delta``)."""
    return (do * o).sum(dim=-1)


def d_scores(p, dp, delta, dlse=None):
    """dS = P o (dP - D 1^T), ``[B, H, T_q, T_k]`` (``eq-gradients-ds``).

    A gradient ``dlse`` ``[B, H, T_q]`` with respect to the log-sum-exp adds dlse_i
    P_ij, which is D_i - dlse_i for D_i.
    """
    delta = delta if dlse is None else delta - dlse
    # A key that is not seen gets 0, even if dlse is infinite in a row that sees none.
    return (p * (dp - delta[..., None])).masked_fill(p == 0, 0.0)


def d_queries(ds, k, scale):
    """dQ = scale * dS K, ``[B, H, T_q, d]`` (``eq-gradients-dq``)."""
    return scale * (ds @ standard.repeat_heads(k, ds.shape[1]))


def d_keys(ds, q, scale):
    """dK = scale * dS^T Q for every head, ``[B, H, T_k, d]`` (``eq-gradients-dk``)."""
    return scale * (ds.mT @ q)


def gradients(q, k, v, do, *, causal=False, scale=None, dlse=None):
    """All three gradients from the inputs and dO ``[B, H, T_q, d_v]``; dlse ``[B, H,
    T_q]`` or None.

    Returns ``(dq, dk, dv)`` in the shapes of q, k and v. A query that sees no key
    contributes nothing.
    """
    scale = standard.default_scale(q.shape[-1]) if scale is None else scale
    s, H_kv = standard.scores(q, k, scale), k.shape[1]
    if causal:
        seen = standard.causal_mask(q.shape[2], k.shape[2], q.device)
        s = s.masked_fill(~seen, -math.inf)
    p = standard.softmax(s)
    ds = d_scores(p, d_probabilities(do, v), row_dot(do, standard.output(p, v)), dlse)
    dk = sum_groups(d_keys(ds, q, scale), H_kv)
    return d_queries(ds, k, scale), dk, sum_groups(d_values(p, do), H_kv)
