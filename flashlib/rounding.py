"""Attention as PyTorch computes it, and other draws of its rounding errors, by which
:mod:`flashlib.testing` judges kernels.

A draw evaluates the same formula in another, seeded order of summation and rounded to
another grid of the same precision; about half of the draws work as an online softmax
does. A backward pass without T x T matrices computes P = exp(S - L) from a rounded L
and an S that may be summed in another order than in the forward pass, so the draws
perturb the P of the gradients by as much.
"""

import math

import torch

from flashlib.reference import masks as reference_masks
from flashlib.reference import standard as reference_standard

EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny  # a GPU's exp2 returns 0 below it
COARSE = 1 / 8  # the most by which rounding to the dtype may move a score


def pytorch(q, k, v, *, generator=None, **options):
    """``(o, lse)`` by the same formula in PyTorch: products in the dtype of q, softmax
    in float32, lse from float32 scores, as kernels keep them. With a generator this is
    another draw of the rounding errors, returned in float32.
    """
    draw = _Draw(q.dtype, generator)
    draw.sink = options.get("sinks") is not None
    q, k, v = q.detach(), k.detach(), v.detach()
    dropout, seed = options.pop("dropout", 0.0), options.pop("seed", 0)
    p, l, _ = draw.softmax(_scores(draw, q, k, **options))
    p = p[..., : k.shape[2]]  # a sink's value is 0
    p = p * dropout_factors(p, dropout, seed)
    o = draw.product(draw.store(p), reference_standard.repeat_heads(v, q.shape[1])) / l
    _, _, lse = draw.softmax(_scores(draw, q, k, torch.float32, **options))
    return o, lse


def pytorch_gradients(q, k, v, do, *, dlse=None, generator=None, **options):
    """The gradients ``(dq, dk, dv)`` as PyTorch computes the same formulas: products in
    the dtype of q, dS in float32.

    With a generator, P is computed again from scores summed in another order and from a
    log-sum-exp that is off by up to its rounding.
    """
    scale, softcap = scale_of(q, options.get("scale")), options.get("softcap")
    dropout, seed = options.pop("dropout", 0.0), options.pop("seed", 0)
    H, groups = q.shape[1], q.shape[1] // k.shape[1]
    draw = _Draw(q.dtype, generator)
    draw.sink = options.get("sinks") is not None
    q, k, v, do = (x.detach() for x in (q, k, v, do))
    p, l, lse = draw.softmax(_scores(draw, q, k, **options))
    p = (p / l)[..., : k.shape[2]]
    z = dropout_factors(p, dropout, seed)
    k, v = reference_standard.repeat_heads(k, H), reference_standard.repeat_heads(v, H)
    o = draw.product(draw.store(p * z), v)
    derivative = 1.0
    if softcap is not None:
        # Small errors of a score vanish on the grid of autograd's 1 - tanh^2.
        x = _scores(draw, q, k, scale=scale) / softcap
        plain = generator is None
        derivative = (
            1.0 - torch.tanh(x).square() if plain else 1.0 / torch.cosh(x).square()
        )
    score, slope = options.get("score"), 1.0
    if score is not None:
        before = {x: options.get(x) for x in ("softcap", "alibi_slopes")}
        x = _scores(draw, q, k, scale=scale, **before)
        slope = score.slope(x, options.get("batch", 0)).masked_fill(p == 0.0, 0.0)
        derivative = derivative * slope
    if generator is not None:
        lse_error = EPS / 2 * lse.abs().masked_fill(torch.isinf(lse), 0.0)
        part = 2 * torch.rand(lse.shape, generator=generator).to(lse.device) - 1
        once = _scores(draw, q, k, torch.float32, scale=scale, softcap=softcap)
        draw.orders.clear()
        again = _scores(draw, q, k, torch.float32, scale=scale, softcap=softcap)
        p = p * torch.exp((again - once) * slope + (lse_error * part)[..., None])
    p, kept = draw.store(p), draw.store(p * z)  # both dV and dS use this P
    if generator is None:
        delta = (do.float() * o.float()).sum(dim=-1)
    else:
        terms = do.float()[..., None, :], o.float()[..., None]
        delta = draw.product(*terms, torch.float32)[..., 0, 0]
        draw.orders.clear()  # for dP: with one key, D in the same order is the same
        if draw.online:  # kernels without tensor cores add up dP from the first term on
            n = v.shape[-1]
            draw.orders[n] = torch.arange(n, device=v.device)
    if dlse is not None:
        delta = delta - dlse.detach().float()
    dp = draw.product(do, v.mT).float() * z
    ds = draw.store(p.float() * (dp - delta[..., None]) * derivative)
    dq = scale * draw.product(ds, k).float()
    # One sum over the queries of all heads of a group, as in a kernel: [B, H, T_q, n]
    # -> [B, H_kv, groups T_q, n].
    ds, p, q, do = (
        x.unflatten(1, (-1, groups)).flatten(2, 3) for x in (ds, kept, q, do)
    )
    dk = scale * draw.product(ds.mT, q).float()
    dv = draw.product(p.mT, do).float()
    return draw.round(dq), draw.round(dk), draw.round(dv)


def dropout_factors(p, dropout, seed):
    """The factors of dropout for a P in these sizes, float32; 1 without dropout."""
    factors = reference_masks.factors(p, dropout, seed)
    return factors.float() if isinstance(factors, torch.Tensor) else factors


def scale_of(q, scale):
    """The scale, of which None means 1/sqrt(d)."""
    return reference_standard.default_scale(q.shape[-1]) if scale is None else scale


def _scores(draw, q, k, dtype=None, *, scale=None, sinks=None, **changes):
    """Scores in float32, those of sinks last, from a product in the draw's dtype or in
    the one given. A score that this dtype moves by more than COARSE is kept in float32.
    """
    k, scale = reference_standard.repeat_heads(k, q.shape[1]), scale_of(q, scale)
    wide = draw.product(q, k.mT, torch.float32)
    s, wide = scale * draw.round(wide, dtype).float(), scale * wide
    s = torch.where((s - wide).abs() <= COARSE, s, wide)
    changed = reference_masks.change_scores(s, **changes)
    added = "alibi_slopes", "score", "bias"
    biased = any(changes.get(name) is not None for name in added)
    if biased and draw.generator is not None:
        capped = reference_masks.change_scores(s, softcap=changes.get("softcap"))
        changed = changed + draw.rounding(changed - capped)
    return reference_masks.with_sinks(changed, sinks)


class _Draw:
    """How one evaluation rounds: plainly in a dtype, or in orders of summation and to a
    grid that a generator chooses.

    The grid is that of the dtype divided by a factor from [1, 2), so that other numbers
    fall on it; values off the dtype's own grid are kept in float32.
    """

    def __init__(self, dtype, generator):
        self.dtype, self.generator, self.online = dtype, generator, False
        self.sink = False  # whether the last key is one
        self.orders = {}  # of summation, by the number of terms
        if generator is not None:
            # Half of the draws add one product after the other, as a kernel without
            # tensor cores does.
            self.step = 2 ** max(0, int(torch.randint(-4, 5, (), generator=generator)))
            grid, form, unit = torch.rand(3, generator=generator).tolist()
            self.factor, self.online = 1.0 + grid, form < 0.5
            # A GPU's logarithm has an error of up to two units in the last place (CUDA
            # C++ Programming Guide, __log2f); the budget allows twice what is drawn.
            self.logarithm = 1.0 + EPS * (2 * unit - 1)

    def round(self, x, dtype=None):
        """float32 values rounded to the precision of the dtype. They have the range of
        float32, as sums in a kernel do; subnormal ones become 0, as on a GPU.
        """
        dtype = dtype or self.dtype
        if self.generator is None:
            return x.to(dtype)
        x = x.masked_fill(x.abs() < TINY, 0.0)
        if dtype == torch.float32:
            return x
        half = torch.finfo(dtype).eps / 2
        mantissa, exponent = torch.frexp(x * self.factor)
        return torch.ldexp((mantissa / half).round() * half, exponent) / self.factor

    def store(self, x):
        """P or dS rounded to the dtype, with its range: a kernel stores them in it."""
        if self.generator is None or self.dtype == torch.float32:
            return self.round(x)
        return (x * self.factor).to(self.dtype).float() / self.factor

    def rounding(self, bias):
        """What a sum in float32 with this bias may be off by: a score is rounded on the
        grid of its largest term.
        """
        part = 2 * torch.rand(bias.shape, generator=self.generator).to(bias.device) - 1
        return EPS * part * bias.masked_fill(torch.isinf(bias), 0.0)

    def softmax(self, s):
        """``(p, l, lse)`` of the scores s: weights, what they are to be divided by, and
        the log-sum-exp.

        Half of the draws work as an online softmax does. Its weights are 2^(s log2(e) -
        m) with a rounded log2(e) and an m that need not be the maximum to the bit, and
        it adds one block of keys after the other.
        """
        if not self.online or not s.shape[-1]:
            blind = ~(s > -math.inf).any(dim=-1, keepdim=True)
            p = torch.softmax(s, dim=-1).masked_fill(blind, 0.0)
            return p, 1.0, torch.logsumexp(s, dim=-1)
        z = s * math.log2(math.e)
        if self.sink:  # which kernels add after all keys; far above them, it rules
            keys = z[..., :-1] if z.shape[-1] > 1 else z - math.inf
            m = torch.maximum(keys.amax(dim=-1), z[..., -1] - 100.0)
        else:
            m = z.amax(dim=-1)
        m = m.masked_fill(m == -math.inf, 0.0) + (self.factor - 1.0)
        p = torch.exp2(z - m[..., None])
        l = sum(block.sum(dim=-1) for block in p.split(16 * self.step, dim=-1))
        lse = (m + torch.log2(l) * self.logarithm) * math.log(2.0)
        return p, l.masked_fill(l == 0.0, 1.0)[..., None], lse

    def product(self, a, b, dtype=None):
        """a @ b, rounded once, the terms added in the draw's order."""
        if self.generator is None:
            return a.to(dtype or self.dtype) @ b.to(dtype or self.dtype)
        n = a.shape[-1]
        if n not in self.orders:
            self.orders[n] = torch.randperm(n, generator=self.generator).to(a.device)
        a, b = a.float()[..., self.orders[n]], b.float()[..., self.orders[n], :]
        parts = zip(a.split(self.step, dim=-1), b.split(self.step, dim=-2), strict=True)
        # One product at a time: all of them would take the memory of T / step outputs.
        products = (x @ y for x, y in parts)
        return self.round(sum(products, next(products)), dtype)
