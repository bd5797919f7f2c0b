"""How a kernel is judged: inputs in awkward layouts, and budgets for its error.

A result is compared with the reference in float64. Its budget is measured: it is the
error of PyTorch's own evaluation of the same formula in the same precision. For each
row,

    rms(o - o64)  <=  2 rms(o_pt - o64) + eps(dtype) rms(o64)

with a factor of 3 for gradients. In a row that sees no key both terms are zero, so the
result must be exact. Nothing may be infinite or NaN where the reference is finite.

PyTorch's error is one draw of the rounding errors. Where a row depends on a few nearly
equal scores, another order of summation is another draw. A result over its budget is
therefore compared again: PyTorch evaluates the formula up to 64 more times, in other,
seeded orders of summation and rounded to other grids of the same precision, about half
of them as an online softmax, and its error is the largest of all. A backward pass
without T x T matrices computes P = exp(S - L) from a rounded L and an S that may be
summed in another order than in the forward pass, so the draws perturb the P of the
gradients by as much. A wrong kernel is off by far more: a result that is still a
hundred times over its budget after 8 draws fails at once.

Below, ``options`` are the keyword arguments of :mod:`flashlib.reference.masks`: causal,
scale, window, softcap and alibi_slopes.
"""

import itertools
import math

import torch

from flashlib.reference import masks as reference_masks
from flashlib.reference import standard as reference_standard

OUTPUT_FACTOR, GRADIENT_FACTOR = 2, 3
DRAWS = 64
FIRST_DRAWS, HOPELESS = 8, 100
EPS = torch.finfo(torch.float32).eps
LAYOUTS = ("contiguous", "transposed", "packed", "strided", "unaligned", "expanded")


def make_qkv(
    B, H, T_q, d, *, T_k=None, H_kv=None, d_v=None, dtype=torch.float32, device="cpu",
    seed=0, layout="contiguous", magnitude=1.0, requires_grad=False,
):  # fmt: skip
    """Normal q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]``, v ``[B, H_kv, T_k, d_v]``;
    a size left out equals its partner.

    The numbers depend on the sizes and the seed alone, not on device or layout. With
    the default scale the scores have a standard deviation of ``magnitude``. Memory
    around and between the elements of a view is NaN, so reading past a tensor shows.
    Layouts:

    - ``contiguous``
    - ``transposed``: stored ``[B, T, H, d]``, as a linear layer leaves it
    - ``packed``: three views of one buffer ``[B, T, all heads of q, k and v]``
    - ``strided``: every second element of the last dimension
    - ``unaligned``: an odd row stride and a base address that no 16-byte load accepts
    - ``expanded``: one head, seen by all heads with stride 0

    Raises ValueError for an unknown layout.
    """
    T_k = T_q if T_k is None else T_k
    H_kv = H if H_kv is None else H_kv
    d_v = d if d_v is None else d_v
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T_q, d), (B, H_kv, T_k, d), (B, H_kv, T_k, d_v))
    gains = (math.sqrt(magnitude), math.sqrt(magnitude), 1.0)
    views = _views(shapes, layout, dtype, device)
    for view, shape, gain in zip(views, shapes, gains, strict=True):
        value = (gain * torch.randn(shape, generator=generator)).to(device, dtype)
        if layout == "expanded":
            view, value = view[:, :1], value[:, :1]
        view.copy_(value)
    return tuple(view.detach().requires_grad_(requires_grad) for view in views)


def _views(shapes, layout, dtype, device):
    """NaN views ``[B, H, T, d]`` of these shapes with the strides of a layout."""

    def nan(*shape):
        return torch.full(shape, math.nan, dtype=dtype, device=device)

    def view(B, H, T, d):
        if layout == "transposed":
            return nan(B, T, H, d).transpose(1, 2)
        if layout == "strided":
            return nan(B, H, T, 2 * d + 1)[..., 1::2]
        if layout == "unaligned":
            return nan(B, H, T, d + 1 + d % 2)[..., 1 : d + 1]
        if layout == "expanded":
            return nan(B, 1, T, d).expand(B, H, T, d)
        return nan(B, H, T, d)

    if layout != "packed":
        return [view(*shape) for shape in shapes]
    B, T = shapes[0][0], max(shape[2] for shape in shapes)
    columns = [shape[1] * shape[3] for shape in shapes]
    parts = nan(B, T, sum(columns)).split(columns, dim=-1)
    return [
        part[:, :T].unflatten(-1, (H, d)).transpose(1, 2)
        for part, (_, H, T, d) in zip(parts, shapes, strict=True)
    ]


def oracle(q, k, v, **options):
    """The reference ``(o, lse)`` in float64, ``[B, H, T_q, d_v]`` and ``[B, H, T_q]``."""
    wide = (x.detach().double() for x in (q, k, v))
    return reference_masks.attention(*wide, **options)


def oracle_gradients(q, k, v, do, **options):
    """The reference gradients ``(dq, dk, dv)`` in float64. options: also dlse."""
    wide = (x.detach().double() for x in (q, k, v, do))
    return reference_masks.gradients(*wide, **options)


def pytorch(q, k, v, *, generator=None, **options):
    """``(o, lse)`` by the same formula in PyTorch: products in the dtype of q, softmax
    in float32, lse from float32 scores, as kernels keep them. With a generator this is
    another draw of the rounding errors, returned in float32.
    """
    draw = _Draw(q.dtype, generator)
    q, k, v = q.detach(), k.detach(), v.detach()
    p, l, _ = draw.softmax(_scores(draw, q, k, **options))
    o = draw.product(draw.round(p), reference_standard.repeat_heads(v, q.shape[1])) / l
    _, _, lse = draw.softmax(_scores(draw, q, k, torch.float32, **options))
    return o, lse


def pytorch_gradients(q, k, v, do, *, dlse=None, generator=None, **options):
    """The gradients ``(dq, dk, dv)`` as PyTorch computes the same formulas: products in
    the dtype of q, dS in float32.

    With a generator, P is computed again from scores summed in another order and from a
    log-sum-exp that is off by up to its rounding.
    """
    scale, softcap = _scale(q, options.get("scale")), options.get("softcap")
    H, groups = q.shape[1], q.shape[1] // k.shape[1]
    draw = _Draw(q.dtype, generator)
    q, k, v, do = (x.detach() for x in (q, k, v, do))
    p, l, lse = draw.softmax(_scores(draw, q, k, **options))
    p = p / l
    k, v = reference_standard.repeat_heads(k, H), reference_standard.repeat_heads(v, H)
    o = draw.product(draw.round(p), v)
    derivative = 1.0
    if softcap is not None:
        # Small errors of a score vanish on the grid of autograd's 1 - tanh^2.
        x = _scores(draw, q, k, scale=scale) / softcap
        plain = generator is None
        derivative = (
            1.0 - torch.tanh(x).square() if plain else 1.0 / torch.cosh(x).square()
        )
    if generator is not None:
        lse_error = EPS / 2 * lse.abs().masked_fill(torch.isinf(lse), 0.0)
        part = 2 * torch.rand(lse.shape, generator=generator).to(lse.device) - 1
        once = _scores(draw, q, k, torch.float32, scale=scale, softcap=softcap)
        draw.orders.clear()
        again = _scores(draw, q, k, torch.float32, scale=scale, softcap=softcap)
        p = p * torch.exp(again - once + (lse_error * part)[..., None])
    p = draw.round(p)  # both dV and dS use this P
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
    dp = draw.product(do, v.mT).float()
    ds = draw.round(p.float() * (dp - delta[..., None]) * derivative)
    dq = scale * draw.product(ds, k).float()
    # One sum over the queries of all heads of a group, as in a kernel: [B, H, T_q, n]
    # -> [B, H_kv, groups T_q, n].
    ds, p, q, do = (x.unflatten(1, (-1, groups)).flatten(2, 3) for x in (ds, p, q, do))
    dk = scale * draw.product(ds.mT, q).float()
    dv = draw.product(p.mT, do).float()
    return draw.round(dq), draw.round(dk), draw.round(dv)


def _scale(q, scale):
    return reference_standard.default_scale(q.shape[-1]) if scale is None else scale


def _scores(draw, q, k, dtype=None, *, scale=None, **changes):
    """Scores in float32 from a product in the draw's dtype, or in the one given."""
    k = reference_standard.repeat_heads(k, q.shape[1])
    s = _scale(q, scale) * draw.product(q, k.mT, dtype).float()
    return reference_masks.change_scores(s, **changes)


class _Draw:
    """How one evaluation rounds: plainly in a dtype, or in orders of summation and to a
    grid that a generator chooses.

    The grid is that of the dtype divided by a factor from [1, 2), so that other numbers
    fall on it; values off the dtype's own grid are kept in float32.
    """

    def __init__(self, dtype, generator):
        self.dtype, self.generator, self.online = dtype, generator, False
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
        """float32 values rounded to the dtype; subnormal ones become 0, as on a GPU."""
        dtype = dtype or self.dtype
        if self.generator is None:
            return x.to(dtype)
        x = x.masked_fill(x.abs() < torch.finfo(torch.float32).tiny, 0.0)
        if dtype == torch.float32:
            return x
        return (x * self.factor).to(dtype).float() / self.factor

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


def rms(x):
    """Root mean square over the last dimension, in float64: ``[..., d] -> [...]``."""
    return x.double().square().mean(dim=-1).sqrt()


def assert_within_budget(q, k, v, o, lse=None, **options):
    """Judge o ``[B, H, T_q, d_v]``, and lse ``[B, H, T_q]`` if given, row by row.

    The budget of an lse is 2 |lse_pt - lse64| + eps(float32) (sum_c |scale q_ic k_jc| +
    ln l) with j the key for which the sum is largest: an lse is a float32 sum of these
    terms and of the ALiBi bias, whatever the dtype of q, and no more accurate than
    they are.

    Raises AssertionError naming the tensor, the row and the figures of the worst one;
    shape and dtype are judged too.
    """
    o64, lse64 = oracle(q, k, v, **options)
    judged = [Judged("o", o, o64, q.dtype, OUTPUT_FACTOR)]
    if lse is not None:
        floor = EPS * terms_of_lse(q, k, lse64, **options)
        judged.append(Judged("lse", lse, lse64, torch.float32, OUTPUT_FACTOR, floor))
    judge(judged, lambda generator: pytorch(q, k, v, generator=generator, **options))


def assert_gradients_within_budget(q, k, v, do, dq, dk, dv, *, dlse=None, **options):
    """Judge those of dq, dk and dv, in the shapes of q, k and v, that are not None, as
    :func:`assert_within_budget`.
    """
    options["dlse"] = None if dlse is None else dlse.detach()
    wanted = oracle_gradients(q, k, v, do, **options)
    names = ("dq", "dk", "dv")
    judged = [
        found if found is None else Judged(name, found, x64, q.dtype, GRADIENT_FACTOR)
        for name, found, x64 in zip(names, (dq, dk, dv), wanted, strict=True)
    ]

    def draw(generator):
        return pytorch_gradients(q, k, v, do, generator=generator, **options)

    judge(judged, draw)


class Judged:
    """A result next to its value in float64. Shape, dtype and finite elements are
    judged at once, the error of the rows by :func:`judge`. ``floor`` is the part of
    their budget that does not depend on PyTorch, by default eps(dtype) rms(wanted).
    """

    def __init__(self, name, found, wanted, dtype, factor, floor=None):
        if found.shape != wanted.shape or found.dtype != dtype:
            expected = f"expected {list(wanted.shape)} {dtype}"
            got = f"got {list(found.shape)} {found.dtype}"
            raise AssertionError(f"{name}: {expected}, {got}")
        bad = (~torch.isfinite(found) & torch.isfinite(wanted)).nonzero().tolist()
        if bad:
            raise AssertionError(
                f"{name}{bad[0]}: not finite: {found[tuple(bad[0])]}; "
                f"{len(bad)} of {found.numel()} elements"
            )
        self.name, self.wanted, self.factor = name, wanted, factor
        self.floor = torch.finfo(dtype).eps * rms(wanted) if floor is None else floor
        self.error = self.distance(found)
        self.pt = torch.zeros_like(self.error)

    def distance(self, x):
        """The error of x, one number for each row; equal infinities differ by zero."""
        error = (x.double() - self.wanted).masked_fill(x == self.wanted, 0.0)
        return error.abs() if self.name == "lse" else rms(error)

    def over(self, times=1):
        """The rows over their budget."""
        # NaN compares false with everything, so ask for what must hold.
        return ~(self.error <= times * (self.factor * self.pt + self.floor))

    def verdict(self):
        """An error that names the worst row."""
        over = self.over()
        excess = self.error / (self.factor * self.pt + self.floor)
        excess = excess.nan_to_num(math.inf).masked_fill(~over, 0.0)
        row = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        return AssertionError(
            f"{self.name}{list(row)}: error {self.error[row]:.3g} is over the budget "
            f"{self.factor} x {self.pt[row]:.3g} (PyTorch) + {self.floor[row]:.3g}; "
            f"{int(over.sum())} of {over.numel()} rows are over"
        )


def judge(judged, draw):
    """Raise AssertionError for the first result that is not None and has a row over its
    budget; draw(generator) returns PyTorch's evaluation of every entry.
    """
    generator = torch.Generator().manual_seed(0)
    for count in range(DRAWS + 1):
        drawn = draw(generator if count else None)
        pairs = [(x, z) for x, z in zip(judged, drawn, strict=False) if x is not None]
        for x, evaluated in pairs:
            x.pt = torch.maximum(x.pt, x.distance(evaluated))
        over = [x for x, _ in pairs if x.over().any()]
        if not over:
            return
        # Where PyTorch has made no error so far, "a hundred times over" means nothing; an
        # error below EPS**2 is that of the float64 reference.
        hopeless = (x.over(HOPELESS) & (x.pt > EPS**2) for x in over)
        if count == FIRST_DRAWS and any(rows.any() for rows in hopeless):
            break
    raise over[0].verdict()


def terms_of_lse(q, k, lse64, *, scale=None, **changes):
    """The sum of the absolute terms of an lse, ``[B, H, T_q]`` (largest score, ln l)."""
    if k.shape[2] == 0:
        return torch.zeros_like(lse64)
    q, k = q.detach().double(), k.detach().double()
    s = reference_masks.scores(q, k, scale=scale, **changes)
    terms = reference_standard.scores(q.abs(), k.abs(), abs(_scale(q, scale)))
    slopes = changes.get("alibi_slopes")
    if slopes is not None:
        terms += reference_masks.alibi(slopes.double().abs(), q.shape[2], k.shape[2])
    terms = terms.masked_fill(torch.isneginf(s), 0.0)
    return terms.amax(dim=-1) + (lse64 - s.amax(dim=-1)).nan_to_num(0.0)


def packing_of(module, lengths_q, lengths_k, device):
    """The packing that the kernel module of masks takes, for lists of lengths."""
    starts = (
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=device)
        for x in (lengths_q, lengths_k)
    )
    return module.Packing(*starts, max(lengths_q, default=0), max(lengths_k, default=0))


def assert_packed_within_budget(
    q, k, v, o, lse, packing, *, do=None, gradients=(None,) * 3, dlse=None, **options
):
    """Judge every sequence of packed tensors ``[total, H, d]``, lse and dlse ``[H,
    total]``: o and lse, and the gradients (dq, dk, dv) if do is given.
    """

    def own(starts, x):
        lengths = starts.diff().tolist()
        if x is None:
            return [None] * len(lengths)
        return (x.transpose(0, 1) if x.ndim == 3 else x)[None].split(lengths, dim=2)

    dq, dk, dv = gradients
    of_queries = [own(packing.starts_q, x) for x in (q, o, lse, do, dq, dlse)]
    of_keys = [own(packing.starts_k, x) for x in (k, v, dk, dv)]
    slopes = options.get("alibi_slopes")
    for b, tensors in enumerate(zip(*of_queries, *of_keys, strict=True)):
        q, o, lse, do, dq, dlse, k, v, dk, dv = tensors
        if slopes is not None and slopes.ndim == 2:
            options["alibi_slopes"] = slopes[b]
        assert_within_budget(q, k, v, o, lse, **options)
        if do is not None:
            given = (q, k, v, do, dq, dk, dv)
            assert_gradients_within_budget(*given, dlse=dlse, **options)
