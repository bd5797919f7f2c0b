"""Attention in eight bits: rounding, scales, and what keeps the error small, after
Shah et al., "FlashAttention-3" (2024), and Zhang et al., "SageAttention" (2024).

Shapes as in :mod:`flashlib.reference.standard`. A tensor in eight bits is a
:class:`Rounded`: numbers of the 8-bit format, in the dtype of the computation, and
scales that broadcast to them. Every function computes in the dtype of its inputs,
trusts them, and rounds to eight bits where a kernel does: float32 inputs give what a
kernel computes whose sums are float32, and float64 the same without their rounding.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from flashlib.reference import standard


class Format(NamedTuple):
    """An 8-bit floating-point format."""

    dtype: torch.dtype
    mantissa: int  # bits
    least: int  # exponent of the smallest normal number
    largest: float


WIDTH = 64  # the most columns that a transform mixes
E4M3 = Format(torch.float8_e4m3fn, 3, -6, 448.0)
E5M2 = Format(torch.float8_e5m2, 2, -14, 57344.0)


class Rounded(NamedTuple):
    """The numbers ``values * scales``, rounded; scales broadcast to the values."""

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def numbers(self):
        """The numbers that it stands for."""
        return self.values * self.scales


# -- rounding and scales


def spacing(x, form=E4M3):
    """The distance between neighboring numbers of the format around each x."""
    _, exponent = torch.frexp(x)  # x = m 2^exponent with m in [1/2, 1)
    exponent = (exponent - 1).clamp(min=form.least) - form.mantissa
    return torch.ldexp(torch.ones_like(x), exponent)


def rounded(x, form=E4M3):
    """x rounded to the format, ties to even, in the dtype of x. Numbers beyond the
    largest become the largest, as with the conversion that kernels use. A cast of
    PyTorch's does so for E4M3 from 2.12 on and returned NaN before; for E5M2 it returns
    infinity.
    """
    step = spacing(x, form)
    return (torch.round(x / step) * step).clamp(-form.largest, form.largest)


def scales(x, per):
    """The scales of x ``[B, H, T, d]``, so that the largest number of each part becomes
    the largest of E4M3; 1 for a part of zeros.

    per: "tensor", "head" (and batch entry), "column" of a head, or a number of rows of
    a head. The result broadcasts to x.
    """
    x = x.abs()
    if per == "tensor":
        most = x.amax().view(1, 1, 1, 1)
    elif per == "head":
        most = x.amax(dim=(2, 3), keepdim=True)
    elif per == "column":
        most = x.amax(dim=2, keepdim=True)
    else:
        T = x.shape[2]
        rows = F.pad(x.amax(dim=3), (0, -T % per)).unflatten(2, (-1, per))
        most = rows.amax(dim=3).repeat_interleave(per, dim=2)[:, :, :T, None]
    # By a tensor: a GPU divides by a number as it multiplies by its rounded inverse.
    found = most / torch.full_like(most, E4M3.largest)
    return torch.where(most > 0.0, found, 1.0)


def quantize(x, per):
    """x in E4M3 with scales, a :class:`Rounded`; per as in :func:`scales`."""
    s = scales(x, per)
    return Rounded(rounded(x / s), s)


# -- what makes numbers easier to round


def hadamard(d, dtype=torch.float64, device=None):
    """The matrix ``[d, d]`` of 0 and +-1/sqrt(n), n the largest power of two up to 64
    that divides d: d/n Hadamard matrices along the diagonal.
    Symmetric and orthogonal.

    An entry of such a matrix is negative where its row and its column, in binary, have
    an odd number of ones in common.
    """
    n = min(d & -d, WIDTH)
    i = torch.arange(d, device=device)
    common = i[:, None] & i[None, :] & (n - 1)
    odd = sum(common >> bit & 1 for bit in range(n.bit_length())) % 2
    matrix = (1.0 - 2.0 * odd) * (i[:, None] // n == i[None, :] // n)
    return matrix.to(dtype) / math.sqrt(n)


def signs(d, seed=0, device=None):
    """The random signs ``[d]`` of a transform, +-1 in float32, the same on every
    device.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(2, (d,), generator=generator, device="cpu")
    return (1.0 - 2.0 * drawn).to(device)


def transform(x, sign):
    """x ``[..., d]`` times the orthogonal matrix diag(sign) H: scores do
    not change when q and k both are multiplied.
    """
    return (x * sign.to(x.dtype)) @ hadamard(x.shape[-1], x.dtype, x.device)


def smooth(k):
    """``(k - mean, mean)``, mean ``[B, H_kv, 1, d]`` over the keys of each head.

    The scores of a query then are all smaller by the same number, scale q mean^T, so
    its weights do not change and its log-sum-exp is smaller by that number.
    Any other vector in place of the mean would do.
    """
    mean = k.mean(dim=2, keepdim=True)
    return k - mean, mean


def key_order(n):
    """For each of n places, a multiple of 16, the key whose value is stored there.

    Of each 16 columns of a product on Hopper, thread t of four holds the sums 2t and 2t
    + 1, and 8 more: 2t + 8 and 2t + 9. As a factor of the next product it must hold
    four consecutive numbers, 4t to 4t + 3. If the values are in this order, the weights
    stay where they are.
    """
    return torch.arange(n).view(-1, 2, 4, 2).transpose(1, 2).flatten()


# -- attention


class Recipe(NamedTuple):
    """How attention is computed in eight bits. q, k and v are given as in
    :func:`scales`; a number for v must be a multiple of the keys of a block.
    """

    q: str | int | None = 1
    k: str | int = 64
    v: str | int = 64
    transform: bool = True
    smooth: bool = True
    # Weights are multiplied by 2^exponent before they are rounded.
    exponent: int | None = 8
    sums_rounded: bool = True  # whether l is the sum of the rounded weights


FULL = Recipe()
PLAIN = Recipe("tensor", "tensor", "tensor", transform=False, smooth=False)
# Keys and values alone are rounded, each row with a scale; for :func:`deviation`.
CACHE = Recipe(None, 1, 1, transform=False, smooth=False, exponent=None)


def prepare(q, k, recipe, seed=0):
    """``(q, k, mean)`` before they are rounded: k without its mean, and both
    transformed; mean ``[B, H_kv, 1, d]`` is that of the original keys, 0 if it stays.
    """
    mean = torch.zeros_like(k[:, :, :1])
    if recipe.smooth:
        k, mean = smooth(k)
    if recipe.transform:
        sign = signs(q.shape[-1], seed, q.device)
        q, k = transform(q, sign), transform(k, sign)
    return q, k, mean


def attend(q, k, v, *, causal, scale, block_k, exponent=8, sums_rounded=True):
    """``(o, lse)`` of q, k and v, each :class:`Rounded`, with an online softmax over
    blocks of keys whose weights are rounded to E4M3.
    """
    H, T_q, T_k = q.values.shape[1], q.values.shape[2], k.values.shape[2]
    k, v = (Rounded(*(standard.repeat_heads(y, H) for y in whole(x))) for x in (k, v))
    seen = torch.ones(T_q, T_k, dtype=torch.bool, device=q.values.device)
    seen = seen.tril(T_k - T_q) if causal else seen
    rows = q.values.shape[:3]
    m = q.values.new_full((*rows, 1), -math.inf)
    l, unit = torch.zeros_like(m), torch.ones_like(v.scales[:, :, :1])
    acc = q.values.new_zeros(*rows, v.values.shape[3])
    for start in range(0, T_k, block_k):
        keys = slice(start, start + block_k)
        s = q.values @ k.values[:, :, keys].mT
        s = s * (scale * q.scales) * k.scales[:, :, keys].mT
        s = s.masked_fill(~seen[:, keys], -math.inf)
        m_new = torch.maximum(m, s.amax(dim=3, keepdim=True))
        shift = m_new.masked_fill(m_new == -math.inf, 0.0)
        alpha, p = torch.exp(m - shift), torch.exp(s - shift)
        p = p * 2.0**exponent
        p_rounded = rounded(p)
        l = l * alpha + (p_rounded if sums_rounded else p).sum(dim=3, keepdim=True)
        # The sums are in units of the scale of the values, which changes here.
        new_unit = v.scales[:, :, start : start + 1]
        acc = acc * (alpha * (unit / new_unit)) + p_rounded @ v.values[:, :, keys]
        m, unit = m_new, new_unit
    o = acc * unit / l.masked_fill(l == 0.0, 1.0)
    return o, (m + torch.log(l) - exponent * math.log(2.0))[..., 0]


def whole(x):
    """The values of a Rounded, and its scales for every row of them."""
    return x.values, x.scales.expand(*x.values.shape[:3], x.scales.shape[3])


def attention(q, k, v, *, causal=False, scale=None, recipe=FULL, block_k=64, seed=0):
    """``(o, lse)``, o ``[B, H, T_q, d_v]`` and lse ``[B, H, T_q]``, by a
    :class:`Recipe`, the keys in blocks of block_k.
    """
    scale = standard.default_scale(q.shape[-1]) if scale is None else scale
    smoothed, keys, mean = prepare(q, k, recipe, seed)
    o, lse = attend(
        quantize(smoothed, recipe.q), quantize(keys, recipe.k), quantize(v, recipe.v),
        causal=causal, scale=scale, block_k=block_k, exponent=recipe.exponent,
        sums_rounded=recipe.sums_rounded,
    )  # fmt: skip
    return o, lse + standard.scores(q, mean, scale)[..., 0]


# -- the error to expect


def variance(x, s):
    """The variance of what rounding x / s to E4M3 and multiplying by s adds to float64
    numbers x: an error that is uniform between two neighbors has
    that of spacing^2 / 12. A number of the format has none, as the largest one under
    each scale; a number that becomes 0 has an error of its own size.
    """
    y = x / s
    exact = (rounded(y) - y).abs() <= 1e-12 * y.abs()
    of_y = torch.minimum(spacing(y).square() / 12, y.square()).masked_fill(exact, 0.0)
    return s.square() * of_y


def deviation(q, k, v, *, causal=False, scale=None, recipe=FULL, block_k=64, seed=0):
    """``(o, lse)``: the standard deviations to expect of the results of
    :func:`attention`, for float64 inputs.

    Assumed: every rounding error is uniform between two neighbors and independent of
    all others, and so small that it acts through first derivatives; sums are exact.
    Weights that are rounded to 0 are the exception: their loss is known and added to
    the deviation.
    """
    scale = standard.default_scale(q.shape[-1]) if scale is None else scale
    q, k, _ = prepare(q, k, recipe, seed)
    H = q.shape[1]
    if recipe.q is None:
        dq = torch.zeros_like(q)
    else:
        dq = variance(q, scales(q, recipe.q))
    dk, dv = (variance(x, scales(x, per)) for x, per in ((k, recipe.k), (v, recipe.v)))
    k, v, dk, dv = (standard.repeat_heads(x, H) for x in (k, v, dk, dv))
    s = standard.scores(q, k, scale)
    if causal:
        seen = standard.causal_mask(q.shape[2], k.shape[2], q.device)
        s = s.masked_fill(~seen, -math.inf)
    p, lse = standard.softmax(s), standard.logsumexp(s)
    o, keys = p @ v, p @ k

    # The error of a query moves all scores of its row: d O_c / d q_n is scale times the
    # covariance of column n of the keys and column c of the values under P.
    covariance = torch.einsum("bhij,bhjn,bhjc->bhinc", p, k, v)
    covariance -= keys[..., None] * o[..., None, :]
    of_q = scale**2 * torch.einsum("bhin,bhinc->bhic", dq, covariance.square())
    # The error of a key moves one score, by what it is times the query.
    moved = scale**2 * ((q.square() + dq) @ dk.mT) * p.square()
    # The weights are rounded under the maximum of the blocks so far.
    dp, lost = _of_weights(s, p, lse, block_k, recipe.exponent)
    of_p = _around(dp, v, o) if recipe.sums_rounded else dp @ v.square()
    gone = lost @ v - (lost.sum(-1, keepdim=True) * o if recipe.sums_rounded else 0.0)
    of_v = p.square() @ dv
    variances = of_q + _around(moved, v, o) + of_p + of_v + gone.square()

    of_lse = scale**2 * (dq * keys.square()).sum(-1) + moved.sum(-1)
    if recipe.sums_rounded:
        of_lse = of_lse + dp.sum(-1) + lost.sum(-1).square()
    return variances.sqrt(), of_lse.sqrt()


def latent_deviation(q, rows, d_c, *, scale):
    """``(o, lse)``: what :func:`deviation` says of the last queries q ``[B, H, T_q, d_c
    + d_r]`` against latents and their rotary columns, rows ``[B, 1, T, d_c + d_r]``, in
    float64, when both parts of a row are rounded, each with a scale.

    A latent is key and value. Its error e moves its score by scale q . e and, through
    the sum of values, the output by P e: the product of both is neglected, but they are
    not independent. Of a column c, the error e_c moves the output by P (e_c + scale q_c
    e_c (v_c - o_c)).
    """
    of_c, of_r = (variance(x, scales(x, 1)) for x in (rows[..., :d_c], rows[..., d_c:]))
    k, v = (standard.repeat_heads(x, q.shape[1]) for x in (rows, rows[..., :d_c]))
    dk = standard.repeat_heads(torch.cat([of_c, of_r], dim=-1), q.shape[1])
    s = standard.scores(q, k, scale)
    seen = standard.causal_mask(q.shape[2], k.shape[2], q.device)
    s = s.masked_fill(~seen, -math.inf)
    p = standard.softmax(s)
    o, moved = p @ v, scale**2 * (q.square() @ dk.mT) * p.square()
    # Twice the covariance of both ways: 2 scale q_c (v_c - o_c) e_c^2 for each key.
    dv = dk[..., :d_c]
    both = p.square() @ (dv * v) - o * (p.square() @ dv)
    of_o = _around(moved, v, o) + p.square() @ dv + 2 * scale * q[..., :d_c] * both
    return of_o.sqrt(), moved.sum(-1).sqrt()


def _around(weights, v, o):
    """sum_j weights_ij (v_jc - o_ic)^2."""
    total = weights.sum(dim=-1, keepdim=True)
    return weights @ v.square() - 2.0 * o * (weights @ v) + o.square() * total


def _of_weights(s, p, lse, block_k, exponent):
    """``(variances, lost)`` of normalized weights: what their rounding adds, and the
    weights that become 0.
    """
    if exponent is None:
        return torch.zeros_like(p), torch.zeros_like(p)
    highest = [x.amax(dim=-1, keepdim=True).expand_as(x) for x in s.split(block_k, -1)]
    m = torch.cat(highest, dim=-1).cummax(dim=-1).values
    shift = m.masked_fill(m == -math.inf, 0.0)
    held = torch.exp(s - shift) * 2.0**exponent
    zero = rounded(held) == 0.0
    # From what is held to what it is a part of: e^(m - L) 2^-exponent.
    unit = torch.exp(shift - lse[..., None]) * 2.0**-exponent
    unit = unit.masked_fill(s == -math.inf, 0.0)
    error = unit.square() * variance(held, torch.ones_like(held))
    return error.masked_fill(zero, 0.0), p.masked_fill(~zero, 0.0)
