"""A self-attention layer with its four projections, and its gradients by hand
(*Projections*).

Shapes: x and y ``[B, T, E]`` with E the width of the layer; w_q ``[E, H d]``, w_k ``[E,
H_kv d]``, w_v ``[E, H_kv d_v]``, w_o ``[H d_v, E]``; each head owns d (or d_v)
neighboring columns, of w_o rows. Q, K, V, O and their gradients are ``[B, H, T, d]``
as everywhere. Every function computes in the dtype of its inputs, float64 included, and
trusts them.

:func:`stream_dx` and :func:`consume_twice` compute the gradients block by block,
without dQ, dK and dV in memory; the chapter says what that saves and costs.
"""

from typing import NamedTuple

import torch

from flashlib.reference import gradients as by_hand
from flashlib.reference import standard


class Weights(NamedTuple):
    """The four projections of a layer, or their gradients."""

    w_q: torch.Tensor
    w_k: torch.Tensor
    w_v: torch.Tensor
    w_o: torch.Tensor


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass, next to x and the weights."""

    q: torch.Tensor  # [B, H, T, d]
    k: torch.Tensor  # [B, H_kv, T, d]
    v: torch.Tensor  # [B, H_kv, T, d_v]
    o: torch.Tensor  # [B, H, T, d_v]
    lse: torch.Tensor  # [B, H, T]


# -- the layer and its gradients


def split_heads(x, H):
    """``[B, T, H d]`` as a view ``[B, H, T, d]`` (``eq-standard-head-offset``)."""
    return x.unflatten(-1, (H, x.shape[-1] // H)).transpose(1, 2)


def join_heads(x):
    """``[B, H, T, d]`` as ``[B, T, H d]``, a view or a copy."""
    return x.transpose(1, 2).flatten(start_dim=2)


def layer(x, weights, H, H_kv, *, causal=False, scale=None):
    """``(y, saved)``, y ``[B, T, E]`` (``eq-projections-layer``)."""
    q = split_heads(x @ weights.w_q, H)
    k = split_heads(x @ weights.w_k, H_kv)
    v = split_heads(x @ weights.w_v, H_kv)
    o, lse = standard.attention(q, k, v, causal=causal, scale=scale)
    return join_heads(o) @ weights.w_o, Saved(q, k, v, o, lse)


def d_weight(x, dy):
    """X^T dY from x ``[B, T, m]``, dy ``[B, T, n]`` (``eq-projections-weights``)."""
    return (x.mT @ dy).sum(dim=0)


def d_output(dy, w_o, H):
    """dO = dY W_O^T, ``[B, H, T, d_v]`` (``eq-projections-output``)."""
    return split_heads(dy @ w_o.mT, H)


def d_input(dq, dk, dv, weights):
    """dX = dQ W_Q^T + dK W_K^T + dV W_V^T, ``[B, T, E]`` (``eq-projections-input``)."""
    w_q, w_k, w_v, _ = weights
    return join_heads(dq) @ w_q.mT + join_heads(dk) @ w_k.mT + join_heads(dv) @ w_v.mT


def gradients(x, weights, saved, dy, *, causal=False, scale=None):
    """``(dx, Weights)`` from dY ``[B, T, E]`` (``alg-projections-backward``)."""
    q, k, v, o, _ = saved
    dw_o = d_weight(join_heads(o), dy)
    do = d_output(dy, weights.w_o, q.shape[1])
    dq, dk, dv = by_hand.gradients(q, k, v, do, causal=causal, scale=scale)
    dw_q, dw_k, dw_v = (d_weight(x, join_heads(dz)) for dz in (dq, dk, dv))
    return d_input(dq, dk, dv, weights), Weights(dw_q, dw_k, dw_v, dw_o)


# -- the same without dQ, dK and dV


class Folded(NamedTuple):
    """The factors of the blocks of dS and P once the weights are folded in, each
    ``[B, H, T, E]`` (``eq-projections-folded``): with H d = E they hold H times as many
    numbers as dQ, dK and dV would with H_kv = H.
    """

    k: torch.Tensor  # scale K W_Q^T
    q: torch.Tensor  # scale Q W_K^T
    do: torch.Tensor  # dO W_V^T


def fold(saved, do, weights, *, scale=None):
    """The arrays that :func:`stream_dx` needs, from do ``[B, H, T, d_v]``."""
    H, d, d_v = saved.q.shape[1], saved.q.shape[3], saved.v.shape[3]
    scale = standard.default_scale(d) if scale is None else scale
    w_q, w_k, w_v = (
        w.mT.unflatten(0, (-1, width)).repeat_interleave(H * width // w.shape[1], 0)
        for w, width in zip(weights[:3], (d, d, d_v), strict=True)
    )  # [H, width, E]
    k = scale * standard.repeat_heads(saved.k, H) @ w_q
    return Folded(k, scale * saved.q @ w_k, do @ w_v)


def blocks(T, size):
    """Slices of ``size`` rows, the last perhaps shorter, that cover ``[B, T, E]``."""
    return [slice(start, min(start + size, T)) for start in range(0, T, size)]


def tile(saved, do, delta, I, J, *, causal=False, scale=None):
    """P and dS ``[B, H, |I|, |J|]`` of queries I, keys J; lse, delta ``[B, H, T]``."""
    q, k, v, _, lse = saved
    T, H = q.shape[2], q.shape[1]
    p = torch.exp(standard.scores(q[:, :, I], k[:, :, J], scale) - lse[:, :, I, None])
    if causal:
        p = p.masked_fill(~standard.causal_mask(T, T, q.device)[I, J], 0.0)
    dp = do[:, :, I] @ standard.repeat_heads(v[:, :, J], H).mT
    return p, by_hand.d_scores(p, dp, delta[:, :, I])


def stream_dx(saved, do, weights, size, *, causal=False, scale=None):
    """dX ``[B, T, E]`` from do ``[B, H, T, d_v]``, a block of dS at a time and without
    dQ, dK and dV (``eq-projections-stream``).

    Each block of ``size`` x ``size`` scores adds its three contributions to dX and is
    forgotten. The gradients of the weights need dQ, dK and dV, so they are not
    computed.
    """
    folded = fold(saved, do, weights, scale=scale)
    delta = by_hand.row_dot(do, saved.o)
    B, _, T, E = folded.k.shape
    dx = saved.q.new_zeros(B, T, E)
    for I in blocks(T, size):
        for J in blocks(T, size):
            p, ds = tile(saved, do, delta, I, J, causal=causal, scale=scale)
            dx[:, I] += (ds @ folded.k[:, :, J]).sum(dim=1)
            dx_keys = ds.mT @ folded.q[:, :, I] + p.mT @ folded.do[:, :, I]
            dx[:, J] += dx_keys.sum(dim=1)
    return dx


def consume_twice(x, saved, do, weights, size, *, causal=False, scale=None):
    """``(dx, dw_q, dw_k, dw_v)``, dx ``[B, T, E]``, from blocks of finished rows of dQ,
    dK and dV, each used for dX and for its weight and then forgotten
    (``eq-projections-twice``).

    A block of dQ needs a pass over the keys, a block of dK and dV one over the queries:
    there are two sweeps, and every block of dS is computed twice.
    """
    w_q, w_k, w_v, _ = weights
    scale = standard.default_scale(saved.q.shape[3]) if scale is None else scale
    delta = by_hand.row_dot(do, saved.o)
    parts = blocks(x.shape[1], size)
    dx = torch.zeros_like(x)
    dw_q, dw_k, dw_v = (torch.zeros_like(w) for w in (w_q, w_k, w_v))
    for I in parts:
        dq = torch.zeros_like(saved.q[:, :, I])
        for J in parts:
            _, ds = tile(saved, do, delta, I, J, causal=causal, scale=scale)
            dq += by_hand.d_queries(ds, saved.k[:, :, J], scale)
        rows = join_heads(dq)
        dx[:, I] += rows @ w_q.mT
        dw_q += d_weight(x[:, I], rows)
    for J in parts:
        dk, dv = torch.zeros_like(saved.k[:, :, J]), torch.zeros_like(saved.v[:, :, J])
        for I in parts:
            p, ds = tile(saved, do, delta, I, J, causal=causal, scale=scale)
            dk_part = by_hand.d_keys(ds, saved.q[:, :, I], scale)
            dv_part = by_hand.d_values(p, do[:, :, I])
            dk += by_hand.sum_groups(dk_part, dk.shape[1])
            dv += by_hand.sum_groups(dv_part, dv.shape[1])
        rows_k, rows_v = join_heads(dk), join_heads(dv)
        dx[:, J] += rows_k @ w_k.mT + rows_v @ w_v.mT
        dw_k += d_weight(x[:, J], rows_k)
        dw_v += d_weight(x[:, J], rows_v)
    return dx, dw_q, dw_k, dw_v
