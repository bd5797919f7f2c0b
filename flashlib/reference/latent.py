"""Latent attention: keys and values that are projections of one small vector per token
(chapter *Latent attention*).

Token j has a latent c_j of d_c numbers and rotary columns r_j of d_r numbers, which all
heads share; a cache holds nothing else. Head h has the keys ``[c_j W_K^h, r_j]`` with
d_n + d_r columns and the values ``c_j W_V^h`` with d_v.

Shapes: q ``[B, H, T_q, d_n + d_r]``, its last d_r columns rotated; c ``[B, T_k, d_c]``,
r ``[B, T_k, d_r]``, rotated too; w_k ``[H, d_c, d_n]``, w_v ``[H, d_c, d_v]``. The
default scale is 1/sqrt(d_n + d_r) in both ways. Every function computes in the dtype of
its inputs, float64 included, and trusts them.
"""

from typing import NamedTuple

import torch

from flashlib.reference import gradients as by_hand
from flashlib.reference import standard


class Gradients(NamedTuple):
    """Gradients in the shapes of what they belong to."""

    q: torch.Tensor
    c: torch.Tensor
    r: torch.Tensor
    w_k: torch.Tensor
    w_v: torch.Tensor


def default_scale(q, scale):
    """The scale, or 1/sqrt(d_n + d_r) for None."""
    return standard.default_scale(q.shape[-1]) if scale is None else scale


# -- two ways


def expand(c, r, w_k, w_v):
    """``(k, v)``, k ``[B, H, T_k, d_n + d_r]`` and v ``[B, H, T_k, d_v]``
    (``eq-latent-expand``).
    """
    k = c[:, None] @ w_k
    shared = r[:, None].expand(-1, w_k.shape[0], -1, -1)
    return torch.cat([k, shared], dim=-1), c[:, None] @ w_v


def absorb(q, w_k):
    """The queries of the latents, ``[B, H, T_q, d_c + d_r]``: ``q_n W_K^T`` and the
    rotary columns as they are (``eq-latent-absorb``).
    """
    d_n = w_k.shape[2]
    return torch.cat([q[..., :d_n] @ w_k.mT, q[..., d_n:]], dim=-1)


def rows(c, r):
    """What a cache holds, as the keys ``[B, 1, T_k, d_c + d_r]`` of a single head."""
    return torch.cat([c, r], dim=-1)[:, None]


def expanded(q, c, r, w_k, w_v, *, causal=False, scale=None):
    """``(o, lse)``, o ``[B, H, T_q, d_v]`` and lse ``[B, H, T_q]``, by the keys and
    values of every head.
    """
    k, v = expand(c, r, w_k, w_v)
    return standard.attention(q, k, v, causal=causal, scale=scale)


def absorbed(q, c, r, w_k, w_v, *, causal=False, scale=None):
    """The same by one head of keys of d_c + d_r columns, whose values are the first d_c
    columns of its keys (``eq-latent-output``).
    """
    scale = default_scale(q, scale)
    o, lse = standard.attention(
        absorb(q, w_k), rows(c, r), c[:, None], causal=causal, scale=scale
    )
    return o @ w_v, lse


# -- gradients


def expanded_gradients(q, c, r, w_k, w_v, do, *, causal=False, scale=None):
    """:class:`Gradients` from do ``[B, H, T_q, d_v]``, through the keys and values of
    every head (``eq-latent-expanded-gradients``).
    """
    k, v = expand(c, r, w_k, w_v)
    dq, dk, dv = by_hand.gradients(q, k, v, do, causal=causal, scale=scale)
    d_n = w_k.shape[2]
    dk_n, dk_r = dk[..., :d_n], dk[..., d_n:]
    dc = (dk_n @ w_k.mT + dv @ w_v.mT).sum(dim=1)
    columns = c[:, None].mT  # [B, 1, d_c, T_k]
    dw_k, dw_v = ((columns @ x).sum(dim=0) for x in (dk_n, dv))
    return Gradients(dq, dc, dk_r.sum(dim=1), dw_k, dw_v)


def absorbed_gradients(q, c, r, w_k, w_v, do, *, causal=False, scale=None):
    """The same through one head of keys (``eq-latent-absorbed-gradients``): no gradient
    of a key or a value of d_n or d_v columns exists.
    """
    scale, d_n, d_c = default_scale(q, scale), w_k.shape[2], c.shape[2]
    options = {"causal": causal, "scale": scale}
    queries, keys = absorb(q, w_k), rows(c, r)
    o, _ = standard.attention(queries, keys, c[:, None], **options)  # of latents
    dw_v = (o.mT @ do).sum(dim=0)
    d_queries, d_rows, d_values = by_hand.gradients(
        queries, keys, c[:, None], do @ w_v.mT, **options
    )
    dq = torch.cat([d_queries[..., :d_c] @ w_k, d_queries[..., d_c:]], dim=-1)
    dw_k = (d_queries[..., :d_c].mT @ q[..., :d_n]).sum(dim=0)
    dc = (d_rows[..., :d_c] + d_values)[:, 0]
    return Gradients(dq, dc, d_rows[:, 0, :, d_c:], dw_k, dw_v)


# -- rotation


def rotations(positions, d, base=10_000.0):
    """The matrices ``[T, d, d]`` by which rotary embedding multiplies a row x of d
    columns at each of the positions ``[T]``, from the right (``eq-latent-rotation``).

    Columns 2n and 2n + 1 turn by the angle ``position base^(-2n / d)``.
    """
    n = torch.arange(0, d, 2, dtype=torch.float64)
    angles = positions.double()[:, None] * base ** (-n / d)  # [T, d / 2]
    cos, sin = angles.cos(), angles.sin()
    turned = torch.zeros(len(positions), d, d, dtype=torch.float64)
    even, odd = n.long(), n.long() + 1
    turned[:, even, even] = turned[:, odd, odd] = cos
    turned[:, even, odd], turned[:, odd, even] = sin, -sin
    return turned


def moved_rotation(w_k, rotation):
    """``(x, error)`` of the matrix x ``[d_c, d_c]`` that comes closest to ``x W_K^h =
    W_K^h rotation`` in all heads at once, by least squares: a cache of rotated latents
    would need error 0, the largest difference.

    w_k ``[H, d_c, d_n]``, rotation ``[d_n, d_n]``, both float64.
    """
    before = torch.cat(list(w_k), dim=1)  # [d_c, H d_n]
    after = torch.cat(list(w_k @ rotation), dim=1)
    x = torch.linalg.lstsq(before.mT, after.mT, driver="gelsd").solution.mT
    return x, (x @ before - after).abs().max().item()
