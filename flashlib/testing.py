"""How a kernel is judged: inputs in awkward layouts, error budgets, and wrong kernels that must be
caught.

A result is compared with the reference in float64. What it may be off by is not a number that somebody
picked: it is what PyTorch's own evaluation of the same formula, in the same low precision, is off by. For
each row,

    rms(o - o64)  <=  2 rms(o_pt - o64) + eps(dtype) rms(o64)

with a factor 3 for gradients. A row that must be zero is exactly zero, and nothing may be infinite or NaN
where the oracle is finite.

PyTorch's error is one draw of the rounding errors. Where a row hangs on a few nearly equal scores,
another order of summation makes another draw, and a kernel that adds the d products of a score one after
the other draws from a wider distribution than a library that adds many short sums. So a result over its
budget is compared again: PyTorch evaluates the formula up to 64 times more, each time in another, seeded
order of summation and rounding to another grid of the same precision, in about half of them with base 2,
sums over blocks of keys and the division last, as an online softmax has them; its error is the largest of
these. A backward pass without T x T matrices computes P = exp(S - L) again: from an L that was rounded to
float32, and from an S that may be added up in another order than in the forward pass. In these further draws
the P of the gradients is off by as much from the P of the output. A wrong kernel is off by far more than any:
what is still a hundred times over its budget after 8 draws is not compared with the rest.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import math
import pathlib
import sys
import tempfile

import torch

from flashlib.reference import masks as reference_masks
from flashlib.reference import standard as reference_standard

OUTPUT_FACTOR = 2
GRADIENT_FACTOR = 3
DRAWS = 64
FIRST_DRAWS, HOPELESS = 8, 100
LAYOUTS = ("contiguous", "transposed", "packed", "strided", "unaligned", "expanded")


# ------------------------------------------------------------------------------------ inputs


def make_qkv(
    B,
    H,
    T_q,
    d,
    *,
    T_k=None,
    H_kv=None,
    d_v=None,
    dtype=torch.float32,
    device="cpu",
    seed=0,
    layout="contiguous",
    magnitude=1.0,
    requires_grad=False,
):
    """Normal q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]``, v ``[B, H_kv, T_k, d_v]``; what is left out
    equals its partner.

    The numbers depend on the sizes and the seed alone, not on device or layout. With the default scale
    the scores have a standard deviation of ``magnitude``. Memory around and between the elements of a
    view is NaN, so a kernel that reads past its tensor shows it. Layouts:

    - ``contiguous``
    - ``transposed``: stored ``[B, T, H, d]``, as a linear layer leaves it
    - ``packed``: three views of one buffer ``[B, T, all heads of q, k and v]``
    - ``strided``: every second element of the last dimension
    - ``unaligned``: an odd row stride and a base address that no 16-byte load accepts
    - ``expanded``: one head, seen by all heads with stride 0

    Raises ValueError for an unknown layout or a head count that does not divide.
    """
    T_k = T_q if T_k is None else T_k
    H_kv = H if H_kv is None else H_kv
    d_v = d if d_v is None else d_v
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"H_kv: expected a divisor of H = {H}, got {H_kv}")
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T_q, d), (B, H_kv, T_k, d), (B, H_kv, T_k, d_v))
    gains = (math.sqrt(magnitude), math.sqrt(magnitude), 1.0)
    values = [
        (gain * torch.randn(shape, generator=generator)).to(device=device, dtype=dtype)
        for shape, gain in zip(shapes, gains, strict=True)
    ]
    if layout == "packed":
        views = _packed_views(shapes, dtype, device)
    else:
        views = [_view(shape, layout, dtype, device) for shape in shapes]
    for view, value in zip(views, values, strict=True):
        if layout == "expanded":
            view[:, :1].copy_(value[:, :1])
        else:
            view.copy_(value)
    q, k, v = (view.detach().requires_grad_(requires_grad) for view in views)
    return q, k, v


def _nan(*shape, dtype, device):
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def _view(shape, layout, dtype, device):
    """An uninitialised (NaN) view ``[B, H, T, d]`` with the strides that the layout names."""
    B, H, T, d = shape
    if layout == "transposed":
        return _nan(B, T, H, d, dtype=dtype, device=device).transpose(1, 2)
    if layout == "strided":
        return _nan(B, H, T, 2 * d + 1, dtype=dtype, device=device)[..., 1::2]
    if layout == "unaligned":
        return _nan(B, H, T, d + 1 + d % 2, dtype=dtype, device=device)[..., 1 : d + 1]
    if layout == "expanded":
        return _nan(B, 1, T, d, dtype=dtype, device=device).expand(shape)
    return _nan(*shape, dtype=dtype, device=device)


def _packed_views(shapes, dtype, device):
    """q, k and v as views of one NaN buffer ``[B, T, columns]``, the columns of all heads side by side."""
    B, T = shapes[0][0], max(shape[2] for shape in shapes)
    buffer = _nan(B, T, sum(shape[1] * shape[3] for shape in shapes), dtype=dtype, device=device)
    views, start = [], 0
    for _, heads, length, d in shapes:
        columns = buffer[:, :length, start : start + heads * d]
        views.append(columns.unflatten(-1, (heads, d)).transpose(1, 2))
        start += heads * d
    return views


# ------------------------------------------------------------------------------------ the oracle and PyTorch


# ``changes`` are the window, softcap and alibi_slopes of flashlib.reference.masks, in every function below.


def oracle(q, k, v, *, causal=False, scale=None, **changes):
    """The reference in float64: ``(o, lse)``, o ``[B, H, T_q, d_v]``, lse ``[B, H, T_q]``."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    return reference_masks.attention(q, k, v, causal=causal, scale=scale, **changes)


def oracle_gradients(q, k, v, do, *, causal=False, scale=None, dlse=None, **changes):
    """The reference gradients in float64: ``(dq, dk, dv)`` for dO ``[B, H, T_q, d_v]``, dlse ``[B, H,
    T_q]`` or None.
    """
    q, k, v, do = (x.detach().double() for x in (q, k, v, do))
    dlse = None if dlse is None else dlse.detach().double()
    return reference_masks.gradients(q, k, v, do, causal=causal, scale=scale, dlse=dlse, **changes)


def pytorch(q, k, v, *, causal=False, scale=None, generator=None, **changes):
    """The same formula in PyTorch: matrix products in the dtype of q, the softmax in float32. Returns
    ``(o, lse)``.

    o is in the dtype of q. lse is float32 from float32 scores, because a kernel keeps its scores in
    float32 too. A generator makes another draw of the rounding errors; what is then returned is float32,
    not rounded to one grid.
    """
    draw = _Draw(q, k, v, generator)
    q, k, v = draw.q(q), draw.k(k), draw.v(v)
    s = _scores(q, k, draw, causal, scale, **changes)
    v = reference_standard.repeat_heads(v, q.shape[1])
    s_exact = _scores(q.float(), k.float(), draw.exact(), causal, scale, **changes)
    if draw.online and k.shape[2]:
        p, l, _ = draw.weights(s)
        o = draw.product(draw.round(p), v) / l.masked_fill(l == 0.0, 1.0)[..., None]
        _, l, m = draw.weights(s_exact)
        lse = (m + torch.log2(l) * draw.logarithm) * math.log(2.0)
    else:
        o = draw.product(draw.round(_safe_softmax(s)), v)
        lse = torch.logsumexp(s_exact, dim=-1)
    return draw.undo_o(o), draw.undo_lse(lse)


def pytorch_gradients(
    q, k, v, do, *, causal=False, scale=None, dlse=None, generator=None, lse_error=None, **changes
):
    """The gradients as PyTorch computes the same formulas: products in the dtype of q, dS in float32.
    ``(dq, dk, dv)``.

    lse_error ``[B, H, T_q]``, with a generator only, is what the log-sum-exp is off by where P is made from
    it.
    """
    scale = _scale(q, scale)
    H, groups = q.shape[1], q.shape[1] // k.shape[1]
    draw = _Draw(q, k, v, generator)
    q, k, v, do = draw.q(q), draw.k(k), draw.v(v), draw.o(do)
    p = draw.probabilities(_scores(q, k, draw, causal, scale, **changes))
    softcap = changes.get("softcap")
    o_p = draw.round(p)
    if lse_error is not None:
        again = torch.randperm(q.shape[3], generator=generator).to(q.device)
        exact = draw.exact()
        s, s_again = (
            _scores(a.float(), b.float(), exact, False, scale, softcap=softcap)
            for a, b in ((q, k), (q[..., again], k[..., again]))
        )
        p = p * torch.exp(s_again - s + draw.lse(lse_error)[..., None])
    p = draw.round(p)  # the P that meets dO is the P that makes dS
    slope = 1.0
    if softcap is not None:
        # Autograd's 1 - tanh^2 lies on a grid where small errors of a score vanish; in the draws they show.
        x = _scores(q, k, draw, False, scale) / softcap
        slope = 1.0 - torch.tanh(x).square() if draw.plain else 1.0 / torch.cosh(x).square()
    k, v = reference_standard.repeat_heads(k, H), reference_standard.repeat_heads(v, H)
    o = draw.product(o_p, v)
    delta = (do.float() * o.float()).sum(dim=-1)
    if dlse is not None:
        delta = delta - draw.lse(dlse.detach().float())
    ds = draw.round(p.float() * (draw.product(do, v.mT).float() - delta[..., None]) * slope)
    dq = scale * draw.product(ds, k).float()
    # One sum over the queries of all heads of a group, as in a kernel: [B, H, T_q, n] -> [B, H_kv, ., n].
    ds, p, q, do = (x.unflatten(1, (-1, groups)).flatten(2, 3) for x in (ds, p, q, do))
    dk = scale * draw.product(ds.mT, q).float()
    dv = draw.product(p.mT, do).float()
    return draw.undo_q(draw.round(dq)), draw.undo_k(draw.round(dk)), draw.undo_v(draw.round(dv))


def _scale(q, scale):
    return reference_standard.default_scale(q.shape[-1]) if scale is None else scale


def _scores(q, k, draw, causal, scale, *, window=None, softcap=None, alibi_slopes=None):
    """Scores ``[B, H, T_q, T_k]`` in float32 from a product in the dtype of q; rows and columns stand in
    the draw's order.
    """
    s = _scale(q, scale) * draw.product(q, reference_standard.repeat_heads(k, q.shape[1]).mT).float()
    T_q, T_k = q.shape[2], k.shape[2]
    if softcap is not None:
        s = reference_masks.cap(s, softcap)
    if alibi_slopes is not None:
        s = s - reference_masks.alibi(alibi_slopes, T_q, T_k)[:, :, draw.queries][..., draw.keys]
    if causal or window is not None:
        mask = reference_masks.visible(T_q, T_k, causal=causal, window=window, device=q.device)
        s = s.masked_fill(~mask[draw.queries][:, draw.keys], -math.inf)
    return s


def _safe_softmax(s):
    """Softmax over the last dimension by PyTorch; zeros where it has nothing to normalise."""
    return torch.softmax(s, dim=-1).masked_fill(~(s > -math.inf).any(dim=-1, keepdim=True), 0.0)


class _Draw:
    """How one evaluation rounds: plainly in the dtype of q, or in an order and to a grid that a generator
    chooses.

    The order is made of permutations of queries, keys and features, and of how many products are added at
    a time. The grid is that of the dtype divided by a factor from [1, 2), so that other numbers fall on
    it; values off the dtype's own grid travel in float32.
    """

    def __init__(self, q, k, v, generator):
        def permutation(n):
            return (torch.arange(n) if generator is None else torch.randperm(n, generator=generator)).to(
                q.device
            )

        self.dtype, self.plain, self.online = q.dtype, generator is None, False
        self.queries, self.keys = permutation(q.shape[2]), permutation(k.shape[2])
        self.features, self.v_features = permutation(q.shape[3]), permutation(v.shape[3])
        if not self.plain:
            # Half of the draws add one product after the other, as a kernel without tensor cores does.
            self.step = 2 ** max(0, int(torch.randint(-4, 5, (), generator=generator)))
            self.factor = 1.0 + float(torch.rand((), generator=generator))
            self.online = bool(torch.randint(2, (), generator=generator))
            # A GPU's logarithm is good to two units in the last place (CUDA C++ Programming Guide, __log2f);
            # the budget allows twice what is drawn here.
            unit = torch.finfo(torch.float32).eps
            self.logarithm = 1.0 + unit * (2 * float(torch.rand((), generator=generator)) - 1)

    def exact(self):
        """The same order, in float32."""
        other = copy.copy(self)
        other.dtype = torch.float32
        return other

    def round(self, x):
        """float32 values rounded to the dtype. What is below the smallest normal float32 is zero, as in the
        exponential and the products of a GPU.
        """
        if self.plain:
            return x.to(self.dtype)
        x = x.masked_fill(x.abs() < torch.finfo(torch.float32).tiny, 0.0)
        return x if self.dtype == torch.float32 else (x * self.factor).to(self.dtype).float() / self.factor

    def weights(self, s):
        """``(p, l, m)`` as an online softmax makes them of the scores s: weights p = 2^(s log2(e) - m), their
        sums l, one block of keys added after the other, and m, which need not be the maximum in every bit.
        """
        z = s * math.log2(math.e)
        m = z.amax(dim=-1)
        m = m.masked_fill(m == -math.inf, 0.0) + (self.factor - 1.0)
        p = torch.exp2(z - m[..., None])
        return p, sum(block.sum(dim=-1) for block in p.split(16 * self.step, dim=-1)), m

    def probabilities(self, s):
        """The softmax of the scores s, in half of the draws in base 2: there log2(e), which every score is
        multiplied by, is a rounded number.
        """
        if not self.online or not s.shape[-1]:
            return _safe_softmax(s)
        p, l, _ = self.weights(s)
        return p / l.masked_fill(l == 0.0, 1.0)[..., None]

    def product(self, a, b):
        """a @ b, rounded to the dtype once."""
        if self.plain:
            return a @ b
        a, b = a.float(), b.float()
        parts = zip(a.split(self.step, dim=-1), b.split(self.step, dim=-2), strict=True)
        products = (x @ y for x, y in parts)  # one at a time: all of them would be T / step outputs
        return self.round(sum(products, next(products)))

    def q(self, x):
        return x.detach()[:, :, self.queries][..., self.features]

    def k(self, x):
        return x.detach()[:, :, self.keys][..., self.features]

    def v(self, x):
        return x.detach()[:, :, self.keys][..., self.v_features]

    def o(self, x):
        return x.detach()[:, :, self.queries][..., self.v_features]

    def lse(self, x):
        return x[:, :, self.queries]

    def undo_q(self, x):
        return x[:, :, self.queries.argsort()][..., self.features.argsort()]

    def undo_k(self, x):
        return x[:, :, self.keys.argsort()][..., self.features.argsort()]

    def undo_v(self, x):
        return x[:, :, self.keys.argsort()][..., self.v_features.argsort()]

    def undo_o(self, x):
        return x[:, :, self.queries.argsort()][..., self.v_features.argsort()]

    def undo_lse(self, x):
        return x[:, :, self.queries.argsort()]


# ------------------------------------------------------------------------------------ budgets


def rms(x):
    """Root mean square over the last dimension, in float64: ``[..., d] -> [...]``."""
    return x.double().square().mean(dim=-1).sqrt()


def assert_within_budget(q, k, v, o, lse=None, *, causal=False, scale=None, **changes):
    """Judge o ``[B, H, T_q, d_v]``, and lse ``[B, H, T_q]`` where given, row by row against the budget.

    The budget of an lse is 2 |lse_pt - lse64| + eps(float32) (sum_c |scale q_ic k_jc| + ln l) with j the
    key for which the sum is largest: an lse is a float32 sum of these terms (and what ALiBi takes off),
    whatever the dtype of q, and known no better than they are.

    Raises AssertionError naming the tensor, the row and the figures of the worst one; shape and dtype are
    judged too.
    """
    o64, lse64 = oracle(q, k, v, causal=causal, scale=scale, **changes)
    _assert_like("o", o, o64, q.dtype)
    _assert_finite("o", o, o64)

    blind = torch.isneginf(lse64)
    floor = torch.finfo(q.dtype).eps * rms(o64)
    judged = [_Judged("o", rms(o.double() - o64), floor, OUTPUT_FACTOR, exact=blind)]
    if lse is not None:
        _assert_like("lse", lse, lse64, torch.float32)
        _assert_finite("lse", lse, lse64)
        floor = torch.finfo(torch.float32).eps * _terms_of_lse(q, k, lse64, causal, scale, **changes)
        judged.append(_Judged("lse", _difference(lse, lse64), floor, OUTPUT_FACTOR, exact=blind))

    def draw(generator):
        o_pt, lse_pt = pytorch(q, k, v, causal=causal, scale=scale, generator=generator, **changes)
        return [rms(o_pt.double() - o64), _difference(lse_pt, lse64)][: len(judged)]

    _judge(judged, draw)


def assert_gradients_within_budget(
    q, k, v, do, dq, dk, dv, *, causal=False, scale=None, dlse=None, **changes
):
    """Judge dq, dk and dv, in the shapes of q, k and v, row by row; None for one that is not wanted.

    Raises AssertionError naming the tensor, the row and the figures of the worst one.
    """
    wanted = oracle_gradients(q, k, v, do, causal=causal, scale=scale, dlse=dlse, **changes)
    window, device = changes.get("window"), q.device
    sees = reference_masks.visible(q.shape[2], k.shape[2], causal=causal, window=window, device=device)
    rows = {"dq": ~sees.any(dim=1), "dk": ~sees.any(dim=0), "dv": ~sees.any(dim=0)}
    given = {"dq": dq, "dk": dk, "dv": dv}
    judged, places = [], []
    for place, (name, gradient) in enumerate(given.items()):
        if gradient is None:
            continue
        _assert_like(name, gradient, wanted[place], q.dtype)
        _assert_finite(name, gradient, wanted[place])
        floor = torch.finfo(q.dtype).eps * rms(wanted[place])
        error = rms(gradient.double() - wanted[place])
        judged.append(_Judged(name, error, floor, GRADIENT_FACTOR, exact=rows[name].expand(error.shape)))
        places.append(place)

    _, lse64 = oracle(q, k, v, causal=causal, scale=scale, **changes)
    lse_rounding = torch.finfo(torch.float32).eps / 2 * lse64.abs().masked_fill(torch.isinf(lse64), 0.0)

    def draw(generator):
        options = {"causal": causal, "scale": scale, "dlse": dlse, "generator": generator, **changes}
        if generator is not None:
            parts = 2 * torch.rand(lse_rounding.shape, generator=generator) - 1
            options["lse_error"] = (lse_rounding * parts.to(lse_rounding.device)).float()
        drawn = pytorch_gradients(q, k, v, do, **options)
        return [rms(drawn[place].double() - wanted[place]) for place in places]

    _judge(judged, draw)


@dataclasses.dataclass
class _Judged:
    """A tensor under judgement: the error of each row, the part of its budget that is fixed, rows that
    must be exact.
    """

    name: str
    error: torch.Tensor
    floor: torch.Tensor
    factor: int
    exact: torch.Tensor


def _judge(judged, draw):
    """Raise for the first tensor with a row over its budget; draw(generator) gives PyTorch's errors, one
    for each.
    """
    for tensor in judged:
        wrong = (tensor.exact & (tensor.error != 0)).nonzero()
        if len(wrong):
            row = wrong[0].tolist()
            raise AssertionError(
                f"{tensor.name}{row}: a row that sees nothing is exact (0, lse -inf), "
                f"it is off by {tensor.error[tuple(row)]:.3g}"
            )
    generator = torch.Generator().manual_seed(0)
    worst = list(draw(None))
    for count in range(DRAWS):
        if not any(bool(_over(tensor, pt).any()) for tensor, pt in zip(judged, worst, strict=True)):
            return
        # Where PyTorch has made no error so far, no error of a kernel is a hundred times over.
        if count == FIRST_DRAWS and any(
            bool((_over(tensor, pt, HOPELESS) & (pt > 0)).any())
            for tensor, pt in zip(judged, worst, strict=True)
        ):
            break
        worst = [torch.maximum(a, b) for a, b in zip(worst, draw(generator), strict=True)]
    for tensor, pt in zip(judged, worst, strict=True):
        over = _over(tensor, pt)
        if not bool(over.any()):
            continue
        excess = (
            (tensor.error / (tensor.factor * pt + tensor.floor)).nan_to_num(math.inf).masked_fill(~over, 0.0)
        )
        row = tuple(torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{tensor.name}{[int(i) for i in row]}: error {tensor.error[row]:.3g} is over the budget "
            f"{tensor.factor} x {pt[row]:.3g} (PyTorch) + {tensor.floor[row]:.3g}; "
            f"{int(over.sum())} of {over.numel()} rows are over"
        )


def _difference(x, wanted):
    """|x - wanted| in float64, where an infinity differs from itself by nothing."""
    return (x.double() - wanted).abs().masked_fill(x == wanted, 0.0)


def _over(tensor, pt, times=1):
    # NaN compares false with everything, so ask for what must hold.
    return ~(tensor.error <= times * (tensor.factor * pt + tensor.floor))


def _terms_of_lse(q, k, lse64, causal, scale, **changes):
    """The magnitudes that a log-sum-exp is added up from, ``[B, H, T_q]``: those in its largest score,
    and ln l.
    """
    if k.shape[2] == 0:
        return torch.zeros_like(lse64)
    q, k = q.detach().double(), k.detach().double()
    s = reference_masks.scores(q, k, causal=causal, scale=scale, **changes)
    terms = reference_standard.scores(q.abs(), k.abs(), abs(_scale(q, scale)))
    slopes = changes.get("alibi_slopes")
    if slopes is not None:
        terms = terms + reference_masks.alibi(slopes.double().abs(), q.shape[2], k.shape[2])
    terms = terms.masked_fill(torch.isneginf(s), 0.0)
    return terms.amax(dim=-1) + (lse64 - s.amax(dim=-1)).nan_to_num(0.0)


def _assert_like(name, x, wanted, dtype):
    if x.shape != wanted.shape or x.dtype != dtype:
        raise AssertionError(f"{name}: expected {list(wanted.shape)} {dtype}, got {list(x.shape)} {x.dtype}")


def _assert_finite(name, x, wanted):
    bad = (~torch.isfinite(x) & torch.isfinite(wanted)).nonzero()
    if len(bad):
        place = bad[0].tolist()
        raise AssertionError(
            f"{name}{place}: not finite: {x[tuple(place)]}; {len(bad)} of {x.numel()} elements"
        )


# ------------------------------------------------------------------------------------ zoo


@dataclasses.dataclass(frozen=True)
class Shape:
    """A named shape of the zoo: small, and such that one kind of mistake shows in it."""

    sizes: dict
    causal: bool = False
    scale: float | None = None
    # For the step masks: its window, softcap and slopes, and the lengths of packed sequences, whose sums are
    # then T_q and T_k.
    changes: dict = dataclasses.field(default_factory=dict)
    lengths: tuple | None = None


# Blocks hold at most 128 rows, so 130 rows take at least two, and the last one is ragged.
ZOO_SHAPES = {
    "two blocks": Shape({"B": 1, "H": 1, "T_q": 130, "d": 16}),
    "large scores": Shape({"B": 1, "H": 1, "T_q": 130, "d": 16, "magnitude": 60.0}),
    "causal": Shape({"B": 1, "H": 1, "T_q": 130, "d": 16}, causal=True),
    "more keys": Shape({"B": 1, "H": 1, "T_q": 70, "T_k": 130, "d": 16}, causal=True),
    "more queries": Shape({"B": 1, "H": 1, "T_q": 130, "T_k": 70, "d": 16}, causal=True),
    "fewer keys": Shape({"B": 1, "H": 2, "T_q": 17, "T_k": 5, "d": 16}),
    "grouped": Shape({"B": 1, "H": 4, "H_kv": 2, "T_q": 17, "d": 16}),
    "narrow values": Shape({"B": 1, "H": 2, "T_q": 17, "d": 32, "d_v": 16}),
    "transposed": Shape({"B": 1, "H": 2, "T_q": 17, "d": 16, "layout": "transposed"}),
    "negative scale": Shape({"B": 1, "H": 1, "T_q": 17, "d": 16}, scale=-0.25),
    "one key": Shape({"B": 1, "H": 1, "T_q": 130, "T_k": 1, "d": 16, "magnitude": 60.0}),
    "narrow window": Shape({"B": 1, "H": 1, "T_q": 130, "d": 16}, changes={"window": (40, 20)}),
    "wide window": Shape({"B": 1, "H": 1, "T_q": 130, "d": 16}, changes={"window": (70, 20)}),
    "window, more keys": Shape({"B": 1, "H": 1, "T_q": 70, "T_k": 130, "d": 16}, changes={"window": (30, 0)}),
    "window, more queries": Shape(
        {"B": 1, "H": 1, "T_q": 130, "T_k": 70, "d": 16}, changes={"window": (30, 0)}
    ),
    "softcap": Shape({"B": 1, "H": 1, "T_q": 70, "d": 16, "magnitude": 3.0}, changes={"softcap": 2.0}),
    "large softcap": Shape({"B": 1, "H": 1, "T_q": 70, "d": 16}, changes={"softcap": 1e4}),
    "alibi": Shape({"B": 1, "H": 2, "T_q": 70, "d": 16}, changes={"alibi_slopes": (0.5, 0.125)}),
    "packed": Shape(
        {"B": 1, "H": 2, "H_kv": 1, "T_q": 76, "T_k": 81, "d": 16},
        causal=True,
        lengths=((5, 0, 70, 1), (7, 3, 70, 1)),
    ),
}


@dataclasses.dataclass(frozen=True)
class WrongKernel:
    """A mistake, as a one-line patch of a kernel's source, the shape that shows it and the tensor found
    over its budget.

    step: the kernel module that is run; module: the one that is patched, ``tiles``, ``scores`` or the same;
    old stands in its source exactly once.
    """

    name: str
    step: str
    module: str
    old: str
    new: str
    reason: str
    shape: str
    caught_in: str


_MASK = "j[None, :] <= i[:, None] + (T_k - T_q)"

WRONG_KERNELS = (
    WrongKernel(
        "no scale", "standard", "standard", 'input_precision="ieee") * scale', 'input_precision="ieee")',
        "the scores have a standard deviation of sqrt(d)", "two blocks", "o",
    ),
    WrongKernel(
        "no maximum", "standard", "standard", "shift = tl.where(m_row == -float(\"inf\"), 0.0, m_row)",
        "shift = m_row * 0.0",
        "exp of a score beyond 88 is infinite", "large scores", "o",
    ),
    WrongKernel(
        "blind row divides by zero", "standard", "standard", "l_safe = tl.where(l_row == 0.0, 1.0, l_row)",
        "l_safe = l_row",
        "0 / 0 is NaN where a query sees no key", "more queries", "o",
    ),
    WrongKernel(
        "last keys dropped", "standard", "standard", "(j < T_k)[None, :]  # [BLOCK_Q, BLOCK_K]",
        "(j < T_k // BLOCK_K * BLOCK_K)[None, :]", "P V leaves out the keys after the last full block",
        "two blocks", "o",
    ),
    WrongKernel(
        "heads interleaved", "standard", "standard", "load_tile(v, v_strides, b, h // GROUP,",
        "load_tile(v, v_strides, b, h % (H // GROUP),",
        "query head h reads key head h mod H_kv instead of h // group",
        "grouped", "o",
    ),
    WrongKernel(
        "mask off by one", "standard", "tiles", _MASK, _MASK.replace("<=", "<"),
        "a query does not see its own key", "causal", "lse",
    ),
    WrongKernel(
        "lse without the maximum", "standard", "standard", "m_row + tl.log(l_safe)", "tl.log(l_safe)",
        "the log-sum-exp of the shifted scores is not that of the scores", "two blocks", "lse",
    ),
    WrongKernel(
        "no scale in dQ", "gradients", "gradients", "product(ds, k, dq, scale,", "product(ds, k, dq, 1.0,",
        "S = scale Q K^T, so dQ = scale dS K", "two blocks", "dq",
    ),
    WrongKernel(
        "no scale in dK", "gradients", "gradients", "product(ds.mT, q, dk, scale,",
        "product(ds.mT, q, dk, 1.0,",
        "S = scale Q K^T, so dK = scale dS^T Q", "two blocks", "dk",
    ),
    WrongKernel(
        "dK from dS, not transposed", "gradients", "gradients", "product(ds.mT, q, dk,", "product(ds, q, dk,",
        "row j of dK sums column j of dS", "two blocks", "dk",
    ),
    WrongKernel(
        "dV from P, not transposed", "gradients", "gradients", "product(p.mT, do, dv,", "product(p, do, dv,",
        "row j of dV sums column j of P", "two blocks", "dv",
    ),
    WrongKernel(
        "no D", "gradients", "gradients", "p_row * (dp_row - tl.load(delta + row))", "p_row * dp_row",
        "the softmax normalises: raising one score lowers the other weights", "two blocks", "dq",
    ),
    WrongKernel(
        "D from dO alone", "gradients", "gradients", "do_tile.to(tl.float32) * o_tile.to(tl.float32)",
        "do_tile.to(tl.float32) * do_tile.to(tl.float32)", "D is rowsum(dO o O)", "two blocks", "dq",
    ),
    WrongKernel(
        "no gradient through the lse", "gradients", "gradients", "row_dot(do, o) - dlse", "row_dot(do, o)",
        "dlse adds dlse_i P_ij to dS_ij", "two blocks", "dq",
    ),
    WrongKernel(
        "dO read with the strides of O", "gradients", "gradients", "load_tile(do, do_strides,",
        "load_tile(do, o_strides,",
        "a transposed dO has other strides", "transposed", "dq",
    ),
    WrongKernel(
        "first head of the group only", "gradients", "gradients", "for g in range(SUM):",
        "for g in range(1):",
        "a key head collects from every query head of its group", "grouped", "dk",
    ),
    WrongKernel(
        "O not multiplied back", "flash1", "flash1", "acc * (l_old * alpha)[:, None]", "acc * alpha[:, None]",
        "O was stored divided by l", "two blocks", "o",
    ),
    WrongKernel(
        "O not divided", "flash1", "flash1", "tl.div_rn(acc, l_safe[:, None])", "acc",
        "the next step multiplies by l, and the last one leaves O as it is", "two blocks", "o",
    ),
    WrongKernel(
        "O starts anew", "flash1", "flash1", "acc = acc * (l_old * alpha)[:, None]", "acc = acc * 0.0",
        "each block of keys overwrites what the ones before gave", "two blocks", "o",
    ),
    WrongKernel(
        "l not stored", "flash1", "flash1", "tl.store(l + i, l_new, mask=i < T_q)",
        "tl.store(l + i, l_old, mask=i < T_q)",
        "the next block of keys finds the l of no key, and so does the log-sum-exp", "two blocks", "lse",
    ),
    WrongKernel(
        "m not stored", "flash1", "flash1", "tl.store(m + i, m_new, mask=i < T_q)",
        "tl.store(m + i, m_old, mask=i < T_q)",
        "the next block of keys finds the m of no key, and so does the log-sum-exp", "two blocks", "lse",
    ),
    WrongKernel(
        "no rescaling", "flash1", "tiles", "alpha = tl.exp2(m - shift)", "alpha = tl.exp2(shift - shift)",
        "sums made under an older maximum are too large", "two blocks", "o",
    ),
    WrongKernel(
        "last keys dropped", "flash1", "flash1", "tl.range(0, T_k, BLOCK_K)",
        "tl.range(0, T_k // BLOCK_K * BLOCK_K, BLOCK_K)",
        "the ragged last block of keys is never read", "two blocks", "o",
    ),
    WrongKernel(
        "padding seen", "flash1", "flash1", "tl.where(j + BLOCK_K > T_k, T_q, full)",
        "tl.where(j > T_k, T_q, full)",
        "the ragged last block of keys needs a mask for every query", "two blocks", "o",
    ),
    WrongKernel(
        "diagonal block without a mask", "flash1", "flash1", "tl.maximum(j + BLOCK_K - 1 + T_q - T_k, 0)",
        "tl.maximum(j + T_q - T_k, 0)",
        "the last key of the block is seen by fewer queries than the first", "causal", "o",
    ),
    WrongKernel(
        "diagonal block skipped", "flash1", "flash1", "start = tl.maximum(j + T_q - T_k, 0)",
        "start = tl.maximum(j + BLOCK_K - 1 + T_q - T_k, 0)",
        "the first key of the block is seen by more queries than the last", "more queries", "lse",
    ),
    WrongKernel(
        "blind row is NaN", "flash1", "flash1", "l_safe = tl.where(l_new == 0.0, 1.0, l_new)",
        "l_safe = l_new",
        "0 / 0 where a query of the block sees no key", "more queries", "o",
    ),
    WrongKernel(
        "-inf minus -inf", "flash1", "tiles",
        'shift = tl.where(m_new == -float("inf"), 0.0, m_new)', "shift = m_new",
        "NaN in a row that has seen no key yet", "more queries", "o",
    ),
    WrongKernel(
        "heads interleaved", "flash1", "flash1", "load_tile(v, v_strides, b, h // GROUP,",
        "load_tile(v, v_strides, b, h % (H // GROUP),",
        "query head h reads key head h mod H_kv instead of h // group", "grouped", "o",
    ),
    WrongKernel(
        "O stored with the strides of Q", "flash1", "flash1", "store_tile(o, o_strides,",
        "store_tile(o, q_strides,",
        "a transposed Q has other strides than O", "transposed", "o",
    ),
    WrongKernel(
        "lse in base 2", "flash1", "flash1", "(m + torch.log2(l)) * LN_2", "(m + torch.log2(l))",
        "public values are natural logarithms", "two blocks", "lse",
    ),
    WrongKernel(
        "sign of the scale lost", "flash1", "flash1", "q, scale = -q, -scale", "q, scale = q, -scale",
        "softmax(-S) is not softmax(S)", "negative scale", "o",
    ),
    WrongKernel(
        "no rescaling", "flash2", "tiles", "alpha = tl.exp2(m - shift)", "alpha = tl.exp2(shift - shift)",
        "sums made under an older maximum are too large", "two blocks", "o",
    ),
    WrongKernel(
        "only l rescaled", "flash2", "flash2", "acc = acc * alpha[:, None]", "acc = acc * 1.0",
        "O and l must refer to the same maximum", "two blocks", "o",
    ),
    WrongKernel(
        "only O rescaled", "flash2", "tiles", "l * alpha + tl.sum(p, 1)", "l + tl.sum(p, 1)",
        "O and l must refer to the same maximum", "two blocks", "o",
    ),
    WrongKernel(
        "no maximum", "flash2", "tiles", "m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)",
        "m_new = tl.max(s, 1) * 0.0",
        "exp2 of a score beyond 128 is infinite", "large scores", "o",
    ),
    WrongKernel(
        "maximum of the block", "flash2", "tiles", "m_new = tl.maximum(m, tl.max(z, 1))",
        "m_new = tl.max(z, 1)",
        "a block that a query does not see at all takes its maximum back to -inf", "more queries", "lse",
    ),
    WrongKernel(
        "last keys dropped", "flash2", "flash2", "full, end = T_k // BLOCK_K * BLOCK_K, T_k",
        "full, end = T_k // BLOCK_K * BLOCK_K, T_k // BLOCK_K * BLOCK_K",
        "the ragged last block of keys is never read",
        "two blocks", "o",
    ),
    WrongKernel(
        "padding seen", "flash2", "tiles", "seen = (j < T_k)[None, :]", "seen = (j >= 0)[None, :]",
        "keys after the last one read as zero and get the weight of a score of zero", "two blocks", "o",
    ),
    WrongKernel(
        "mask off by one", "flash2", "tiles", _MASK, _MASK.replace("<=", "<"),
        "a query does not see its own key", "causal", "lse",
    ),
    WrongKernel(
        "mask aligned to the top left", "flash2", "tiles", _MASK, "j[None, :] <= i[:, None]",
        "with T_q != T_k the last query must see the last key", "more keys", "o",
    ),
    WrongKernel(
        "diagonal block without a mask", "flash2", "flash2", "tl.maximum(row + 1 + T_k - T_q, 0)",
        "tl.maximum(row + BLOCK_Q + T_k - T_q, 0)",
        "the first query of the block sees fewer keys than the last",
        "causal", "o",
    ),
    WrongKernel(
        "diagonal block skipped", "flash2", "flash2", "tl.maximum(row + BLOCK_Q + T_k - T_q, 0)",
        "tl.maximum(row + T_k - T_q, 0)", "the last query of the block sees more keys than the first",
        "causal", "lse",
    ),
    WrongKernel(
        "blind row is NaN", "flash2", "flash2", "l_safe = tl.where(l == 0.0, 1.0, l)", "l_safe = l",
        "0 / 0 where a query sees no key", "more queries", "o",
    ),
    WrongKernel(
        "blind row is the mean of V", "flash2", "tiles",
        "z = tl.where(seen, s * scale_log2, -float(\"inf\"))", "z = tl.where(seen, s * scale_log2, -1.0e30)",
        "a finite mask value gives every hidden key the same weight", "more queries", "o",
    ),
    WrongKernel(
        "-inf minus -inf", "flash2", "tiles",
        'shift = tl.where(m_new == -float("inf"), 0.0, m_new)', "shift = m_new",
        "NaN in a row that has seen no key yet", "more queries", "o",
    ),
    WrongKernel(
        "K read with the strides of V", "flash2", "flash2", "load_tile(k, k_strides,",
        "load_tile(k, v_strides,",
        "with d_v != d the rows of K lie elsewhere", "narrow values", "o",
    ),
    WrongKernel(
        "Q read with the strides of K", "flash2", "flash2", "load_tile(q, q_strides,",
        "load_tile(q, k_strides,",
        "with fewer keys than queries the heads of Q lie elsewhere", "fewer keys", "o",
    ),
    WrongKernel(
        "natural exponent in base 2", "flash2", "flash2", "scale * LOG2_E", "scale",
        "exp2(x) is exp(x ln 2)", "two blocks", "o",
    ),
    WrongKernel(
        "lse in base 2", "flash2", "flash2", "(m + tl.log2(l_safe)) * LN_2", "(m + tl.log2(l_safe))",
        "public values are natural logarithms", "two blocks", "lse",
    ),
    WrongKernel(
        "last row not written", "flash2", "flash2", "LN_2, mask=i < T_q)",
        "LN_2, mask=i + 1 < T_q)",
        "what is never written keeps what was in memory: NaN, under test", "two blocks", "lse",
    ),
    WrongKernel(
        "sign of the scale lost", "flash2", "flash2", "q, scale = -q, -scale", "q, scale = q, -scale",
        "softmax(-S) is not softmax(S)", "negative scale", "o",
    ),
    WrongKernel(
        "no D in dK", "backward", "backward", "ds = (p * (dp - d_rows[None, :]))", "ds = (p * dp)",
        "the softmax normalises: raising one score lowers the other weights", "two blocks", "dk",
    ),
    WrongKernel(
        "no D in dQ", "backward", "backward", "ds = (p * (dp - d_rows[:, None]))", "ds = (p * dp)",
        "the softmax normalises: raising one score lowers the other weights", "two blocks", "dq",
    ),
    WrongKernel(
        "D from dO alone", "backward", "backward", "do_tile.to(tl.float32) * o_tile.to(tl.float32)",
        "do_tile.to(tl.float32) * do_tile.to(tl.float32)", "D is rowsum(dO o O)", "two blocks", "dq",
    ),
    WrongKernel(
        "no gradient through the lse", "backward", "backward", "tl.sum(products, 1) - dlse_rows",
        "tl.sum(products, 1)", "dlse adds dlse_i P_ij to dS_ij", "two blocks", "dq",
    ),
    WrongKernel(
        "P not normalised", "backward", "tiles", "p = tl.exp2(s * scale_log2 - lse2)",
        "p = tl.exp2(s * scale_log2)", "P is exp(S - L), not exp(S)", "two blocks", "dq",
    ),
    WrongKernel(
        "natural L in base 2", "backward", "backward", "lse_rows * LOG2_E_IN_KERNEL", "lse_rows * 1.0",
        "the log-sum-exp that the forward keeps is natural", "two blocks", "dq",
    ),
    WrongKernel(
        "dK from dS^T, transposed back", "backward", "backward", "dk = tl.dot(ds, q_tile, dk,",
        "dk = tl.dot(ds.T, q_tile, dk,",
        "row j of dK sums column j of dS", "two blocks", "dk",
    ),
    WrongKernel(
        "dV from P^T, transposed back", "backward", "backward", "tl.dot(p.to(do_tile.dtype), do_tile, dv,",
        "tl.dot(p.to(do_tile.dtype).T, do_tile, dv,",
        "row j of dV sums column j of P", "two blocks", "dv",
    ),
    WrongKernel(
        "no scale in dQ", "backward", "backward", "store_tile(dq, dq_strides, acc * scale,",
        "store_tile(dq, dq_strides, acc,",
        "S = scale Q K^T, so dQ = scale dS K", "two blocks", "dq",
    ),
    WrongKernel(
        "no scale in dK", "backward", "backward", "*results, scale, scale * LOG2_E,",
        "*results, 1.0, scale * LOG2_E,",
        "S = scale Q K^T, so dK = scale dS^T Q", "two blocks", "dk",
    ),
    WrongKernel(
        "mask off by one, keys in rows", "backward", "backward", "first[:, None] <= i[None, :]",
        "first[:, None] < i[None, :]", "a query does not see its own key", "causal", "dk",
    ),
    WrongKernel(
        "mask off by one, queries in rows", "backward", "tiles", _MASK, _MASK.replace("<=", "<"),
        "a query does not see its own key", "causal", "dq",
    ),
    WrongKernel(
        "mask aligned to the top left", "backward", "backward", "first = col + T_q - T_k +", "first = col +",
        "with T_q != T_k the last query must see the last key", "more keys", "dk",
    ),
    WrongKernel(
        "diagonal block skipped, dK and dV", "backward", "backward", "start = tl.maximum(col + T_q - T_k, 0)",
        "start = tl.maximum(col + BLOCK_K - 1 + T_q - T_k, 0)",
        "the first key of the block is seen by more queries than the last", "more queries", "dk",
    ),
    WrongKernel(
        "diagonal block without a mask, dK and dV", "backward", "backward",
        "full = tl.cdiv(tl.maximum(col + BLOCK_K - 1 + T_q - T_k, 0), BLOCK_Q)",
        "full = tl.cdiv(tl.maximum(col + T_q - T_k, 0), BLOCK_Q)",
        "the last key of the block is seen by fewer queries than the first", "causal", "dk",
    ),
    WrongKernel(
        "diagonal block skipped, dQ", "backward", "backward", "tl.maximum(row + BLOCK_Q + T_k - T_q, 0)",
        "tl.maximum(row + T_k - T_q, 0)", "the last query of the block sees more keys than the first",
        "causal", "dq",
    ),
    WrongKernel(
        "last queries dropped", "backward", "backward", "H_kv, q.shape[1] // H_kv, delta.shape[2], T_q,",
        "H_kv, q.shape[1] // H_kv, delta.shape[2], T_q // 64 * 64,",
        "the ragged last block of queries adds to dK and dV too", "two blocks", "dk",
    ),
    WrongKernel(
        "last rows of dQ not written", "backward", "backward", "triton.cdiv(T_q, config.BLOCK_Q)",
        "T_q // config.BLOCK_Q",
        "what is never written keeps what was in memory: NaN, under test", "two blocks", "dq",
    ),
    WrongKernel(
        "blind row is NaN", "backward", "backward", 'blind = lse_rows == -float("inf")',
        'blind = lse_rows == float("inf")',
        "exp2(-inf - -inf) is NaN where a query sees no key", "more queries", "dq",
    ),
    WrongKernel(
        "padding seen, dQ", "backward", "backward", "full, end = T_k // BLOCK_K * BLOCK_K, T_k",
        "full, end = tl.cdiv(T_k, BLOCK_K) * BLOCK_K, T_k",
        "a key after the last has a score of 0, and exp(0 - L) is infinite where L is low", "one key", "dq",
    ),
    WrongKernel(
        "padding seen, fused", "backward", "backward", "ds = tl.where((j < T_k)[:, None], ds, 0.0)",
        "ds = tl.where((j >= 0)[:, None], ds, 0.0)",
        "a key after the last has a score of 0, and exp(0 - L) is infinite where L is low", "one key", "dq",
    ),
    WrongKernel(
        "first head of the group only", "backward", "backward", "H_kv, q.shape[1] // H_kv, delta.shape[2],",
        "H_kv, 1, delta.shape[2],",
        "a key head collects from every query head of its group", "grouped", "dk",
    ),
    WrongKernel(
        "one head of keys for all", "backward", "backward", "H, H // H_kv, delta.shape[2],",
        "H, H, delta.shape[2],",
        "query head h reads key head h // group", "grouped", "dq",
    ),
    WrongKernel(
        "dO read with the strides of O", "backward", "backward",
        "load_tile(do, do_strides, b, h, row, 0, T, d,", "load_tile(do, o_strides, b, h, row, 0, T, d,",
        "a transposed dO has other strides", "transposed", "dq",
    ),
    WrongKernel(
        "dQ overwritten", "backward", "tiles",
        "tl.atomic_add(pointers(x, strides, b, h, rows, cols), tile, mask=inside, sem=\"relaxed\")",
        "tl.store(pointers(x, strides, b, h, rows, cols), tile, mask=inside)",
        "every block of keys adds its part of dQ", "two blocks", "dq",
    ),
    WrongKernel(
        "dQ added to what was in memory", "backward", "backward", "dq = torch.zeros(q.shape,",
        "dq = torch.empty(q.shape,", "the fused form adds to zeros", "two blocks", "dq",
    ),
    WrongKernel(
        "window off by one, left", "masks", "scores", "(distance <= left)", "(distance < left)",
        "the key at p - left is seen", "narrow window", "o",
    ),
    WrongKernel(
        "window off by one, right", "masks", "scores", "(distance >= -right)", "(distance > -right)",
        "the key at p + right is seen", "narrow window", "o",
    ),
    WrongKernel(
        "window aligned to the top left", "masks", "masks", "    p = i + (T_k - T_q)", "    p = i + 0",
        "with T_q != T_k the last query stands beside the last key", "window, more keys", "o",
    ),
    WrongKernel(
        "first block of the window skipped", "masks", "scores",
        "first = tl.maximum(top - left, 0) // BLOCK_K * BLOCK_K",
        "first = tl.cdiv(tl.maximum(top - left, 0), BLOCK_K) * BLOCK_K",
        "the window of the first query begins inside of a block", "narrow window", "o",
    ),
    WrongKernel(
        "last block of the window skipped", "masks", "scores",
        "end = tl.minimum(end, tl.maximum(bottom + right + 1, 0))",
        "end = tl.minimum(end, tl.maximum(top + right + 1, 0))",
        "the last query of the block sees further than the first", "narrow window", "o",
    ),
    WrongKernel(
        "left edge without a mask", "masks", "scores", "whole = tl.cdiv(tl.maximum(bottom - left, 0),",
        "whole = tl.cdiv(tl.maximum(top - left, 0),",
        "the last query of the block has left keys behind that the first sees", "wide window", "o",
    ),
    WrongKernel(
        "right edge without a mask", "masks", "scores", "tl.maximum(top + right + 1, 0) // BLOCK_K",
        "tl.maximum(bottom + right + 1, 0) // BLOCK_K",
        "the first query of the block does not see as far as the last", "wide window", "o",
    ),
    WrongKernel(
        "blind row is NaN", "masks", "masks", "l_safe = tl.where(l == 0.0, 1.0, l)", "l_safe = l",
        "0 / 0 where a window lies before the first key", "window, more queries", "o",
    ),
    WrongKernel(
        "first queries of the window skipped", "masks", "scores",
        "first = tl.maximum(top - right, 0) // BLOCK_Q * BLOCK_Q",
        "first = tl.cdiv(tl.maximum(top - right, 0), BLOCK_Q) * BLOCK_Q",
        "the first query that sees the key stands inside of a block", "narrow window", "dk",
    ),
    WrongKernel(
        "last queries of the window skipped", "masks", "scores",
        "end = tl.minimum(end, tl.maximum(bottom + left + 1, 0))",
        "end = tl.minimum(end, tl.maximum(top + left + 1, 0))",
        "the last key of the block is seen by later queries than the first", "narrow window", "dk",
    ),
    WrongKernel(
        "early queries without a mask", "masks", "scores", "whole = tl.cdiv(tl.maximum(bottom - right, 0),",
        "whole = tl.cdiv(tl.maximum(top - right, 0),",
        "the last key of the block is not seen as early as the first", "wide window", "dk",
    ),
    WrongKernel(
        "late queries without a mask", "masks", "scores", "last = tl.maximum(top + left + 1, 0)",
        "last = tl.maximum(bottom + left + 1, 0)",
        "the first key of the block is not seen as late as the last", "wide window", "dk",
    ),
    WrongKernel(
        "blind row in the backward pass", "masks", "masks", 'blind = lse_rows == -float("inf")',
        'blind = lse_rows == float("inf")',
        "exp2(-inf - -inf) is NaN where a query sees no key", "window, more queries", "dq",
    ),
    WrongKernel(
        "no cap", "masks", "scores", "s = tanh(s * per_cap)", "s = s * per_cap",
        "scores grow beyond the cap", "softcap", "o",
    ),
    WrongKernel(
        "cap without the scale", "masks", "masks", "scoring.scale / (scoring.softcap or 1.0)",
        "1.0 / (scoring.softcap or 1.0)",
        "the cap is put on scaled scores", "softcap", "o",
    ),
    WrongKernel(
        "tanh by its series alone", "masks", "scores", "tl.where(tl.abs(x) < 0.625, series,",
        "tl.where(tl.abs(x) < 9.0, series,",
        "the polynomial holds near 0", "softcap", "o",
    ),
    WrongKernel(
        "tanh by the exponential alone", "masks", "scores", "tl.where(tl.abs(x) < 0.625, series,",
        "tl.where(tl.abs(x) < 0.0, series,",
        "1 - 2 / (1 + e^2x) loses the digits of a small x, and a large cap multiplies what is left",
        "large softcap", "o",
    ),
    WrongKernel(
        "no derivative of the cap in dK", "masks", "masks",
        "ds = ds * derivative  # [BLOCK_K, BLOCK_Q]", "ds = ds * 1.0",
        "where the cap is reached, a score hardly moves", "softcap", "dk",
    ),
    WrongKernel(
        "no derivative of the cap in dQ", "masks", "masks",
        "ds = ds * derivative  # [BLOCK_Q, BLOCK_K]", "ds = ds * 1.0",
        "where the cap is reached, a score hardly moves", "softcap", "dq",
    ),
    WrongKernel(
        "sign of the slope", "masks", "scores", "s * scale_log2 - slope * tl.abs(distance)",
        "s * scale_log2 + slope * tl.abs(distance)",
        "ALiBi lowers what is far away", "alibi", "o",
    ),
    WrongKernel(
        "distance with a sign", "masks", "scores", "slope * tl.abs(distance)", "slope * distance",
        "keys after the query are far away too", "alibi", "o",
    ),
    WrongKernel(
        "slope of the first head", "masks", "scores",
        "slopes + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]",
        "slopes + b.to(tl.int64) * strides[0] + h.to(tl.int64) * 0",
        "every head has its own slope", "alibi", "o",
    ),
    WrongKernel(
        "natural slope in base 2", "masks", "scores", "return slope * LOG2_E", "return slope * 1.0",
        "scores are in base 2, and what is taken off them too", "alibi", "o",
    ),
    WrongKernel(
        "sequences begin at the first row", "masks", "scores", "start = tl.load(starts + b)",
        "start = tl.load(starts)",
        "a sequence sees no rows of those before it", "packed", "o",
    ),
    WrongKernel(
        "statistics of neighbours overlap", "masks", "scores",
        "(start.to(tl.int64) + b * PAD) // PAD * PAD", "start.to(tl.int64) // PAD * PAD",
        "the padding of a sequence would overwrite the D and L of the next", "packed", "dq",
    ),
)  # fmt: skip


@contextlib.contextmanager
def wrong_module(wrong):
    """The kernel module of a wrong kernel's step, made from sources that carry its mistake; the real
    modules stay as they are.

    Raises ValueError unless the text to patch occurs exactly once.
    """
    names = dict.fromkeys((wrong.module, wrong.step))
    # All of them before the first is replaced: a module that is imported later would keep the wrong pieces.
    real = {f"flashlib.kernels.{name}": importlib.import_module(f"flashlib.kernels.{name}") for name in names}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                full_name = f"flashlib.kernels.{name}"
                source = pathlib.Path(real[full_name].__file__).read_text()
                if name == wrong.module:
                    count = source.count(wrong.old)
                    if count != 1:
                        raise ValueError(f"{wrong.old!r} occurs {count} times in {name}.py, expected once")
                    source = source.replace(wrong.old, wrong.new)
                path = pathlib.Path(folder, f"{name}.py")
                path.write_text(source)
                spec = importlib.util.spec_from_file_location(full_name, path)
                module = importlib.util.module_from_spec(spec)
                sys.modules[full_name] = module  # where the step imports the pieces from
                spec.loader.exec_module(module)
        finally:
            sys.modules.update(real)
        yield module  # Triton reads the source when a kernel first runs, so the files outlive the import


def judge_step(step, module, shape, *, device="cpu"):
    """Run a step's kernels, taken from ``module``, on a named shape in float32; raises AssertionError
    over the budget.
    """
    named = ZOO_SHAPES[shape]
    q, k, v = make_qkv(**named.sizes, device=device)
    causal, scale = named.causal, _scale(q, named.scale)
    if step == "masks":
        _judge_masks(module, named, q, k, v, scale)
    elif step == "gradients":
        standard = importlib.import_module("flashlib.kernels.standard")
        layout = named.sizes.get("layout", "contiguous")
        do, _, _ = make_qkv(*q.shape[:3], v.shape[3], device=device, seed=1, layout=layout)
        dlse = do[..., 0].contiguous()
        o, _, p = standard.forward(q, k, v, causal, scale)
        found = module.backward(q, k, v, p, o, do, dlse, scale)
        assert_gradients_within_budget(q, k, v, do, *found, causal=causal, scale=scale, dlse=dlse)
    elif step == "backward":
        flash2 = importlib.import_module("flashlib.kernels.flash2")
        layout = named.sizes.get("layout", "contiguous")
        do, _, _ = make_qkv(*q.shape[:3], v.shape[3], device=device, seed=1, layout=layout)
        dlse = do[..., 0].contiguous()
        o, lse = flash2.forward(q, k, v, causal, scale)
        for deterministic in (True, False):
            found = module.backward(q, k, v, o, lse, do, dlse, causal, scale, deterministic)
            assert_gradients_within_budget(q, k, v, do, *found, causal=causal, scale=scale, dlse=dlse)
    else:
        o, lse, *_ = module.forward(q, k, v, causal, scale)
        assert_within_budget(q, k, v, o, lse, causal=causal, scale=scale)


def _judge_masks(module, named, q, k, v, scale):
    """Both passes of the kernels with masks; packed sequences are judged one by one."""
    changes = dict(named.changes)
    if "alibi_slopes" in changes:
        changes["alibi_slopes"] = torch.tensor(changes["alibi_slopes"], device=q.device)
    sides = reference_masks.window_sides(named.causal, changes.get("window"))
    scoring = module.Scoring(
        scale, *(module.UNLIMITED if side is None else side for side in sides),
        changes.get("softcap", 0.0), changes.get("alibi_slopes"),
    )  # fmt: skip
    do, _, _ = make_qkv(*q.shape[:3], v.shape[3], device=q.device, seed=1)
    dlse = do[..., 0].contiguous()
    options = {"causal": named.causal, "scale": scale, **changes}
    if named.lengths is None:
        o, lse = module.forward(q, k, v, scoring)
        assert_within_budget(q, k, v, o, lse, **options)
        found = module.backward(q, k, v, o, lse, do, dlse, scoring)
        assert_gradients_within_budget(q, k, v, do, *found, dlse=dlse, **options)
        return
    packing = packing_of(module, *named.lengths, q.device)
    q, k, v, do = (x[0].transpose(0, 1) for x in (q, k, v, do))
    o, lse = module.forward(q, k, v, scoring, packing)
    assert_packed_within_budget(q, k, v, o, lse, packing, **options)
    found = module.backward(q, k, v, o, lse, do, dlse[0], scoring, packing)
    assert_packed_gradients_within_budget(q, k, v, do, *found, packing, dlse=dlse[0], **options)


def packing_of(module, lengths_q, lengths_k, device):
    """The packing that the kernel module of masks takes, for lists of lengths."""
    starts = (
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=device)
        for x in (lengths_q, lengths_k)
    )
    return module.Packing(*starts, max(lengths_q, default=0), max(lengths_k, default=0))


def assert_packed_within_budget(q, k, v, o, lse, packing, **options):
    """``assert_within_budget`` for every sequence of packed tensors ``[total, H, d]``, lse ``[H, total]``;
    packing has starts_q and starts_k. Raises AssertionError naming the sequence too.
    """
    for b, of_q, of_k, own in _sequences(packing, options):
        with _naming(b):
            assert_within_budget(of_q(q), of_k(k), of_k(v), of_q(o), of_q(lse), **own)


def assert_packed_gradients_within_budget(q, k, v, do, dq, dk, dv, packing, *, dlse=None, **options):
    """``assert_gradients_within_budget`` for every sequence of packed tensors; dlse ``[H, total_q]``."""
    for b, of_q, of_k, own in _sequences(packing, options):
        with _naming(b):
            assert_gradients_within_budget(
                of_q(q), of_k(k), of_k(v), of_q(do), of_q(dq), of_k(dk), of_k(dv),
                dlse=None if dlse is None else of_q(dlse), **own,
            )  # fmt: skip


def _sequences(packing, options):
    """For every sequence its number, how to take it out of packed queries and keys, and its options."""
    starts_q, starts_k = packing.starts_q.tolist(), packing.starts_k.tolist()
    for b in range(len(starts_q) - 1):

        def taken(x, starts, b=b):
            if x.ndim == 2:
                return x[None, :, starts[b] : starts[b + 1]]
            return reference_masks.sequence(x, starts, b)

        own, slopes = dict(options), options.get("alibi_slopes")
        if slopes is not None and slopes.ndim == 2:
            own["alibi_slopes"] = slopes[b]
        yield b, functools.partial(taken, starts=starts_q), functools.partial(taken, starts=starts_k), own


@contextlib.contextmanager
def _naming(b):
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{error} (sequence {b})") from None


def zoo_table():
    """The wrong kernels as a Markdown table."""
    rows = [
        "| step | mistake | the line, and what it became | why it is wrong | shape | caught in |",
        "|---|---|---|---|---|---|",
    ]
    for w in WRONG_KERNELS:
        patch = f"`{w.old}` → `{w.new}`".replace("|", "\\|")
        rows.append(f"| {w.step} | {w.name} | {patch} | {w.reason} | {w.shape} | {w.caught_in} |")
    return "\n".join(rows) + "\n"
