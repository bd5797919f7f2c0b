"""How a kernel is judged: inputs in awkward layouts, and budgets for its error.

A result is compared with the reference in float64. Its budget is measured: it is the
error of PyTorch's own evaluation of the same formula in the same precision. For each
row,

    rms(o - o64)  <=  2 rms(o_pt - o64) + eps(dtype) rms(o64)

with a factor of 3 for gradients. In a row that sees no key both terms are zero, so the
result must be exact. Nothing may be infinite or NaN where the reference is finite. The
reference, rounded to the dtype, is always within the budget, even where it overflows.

PyTorch's error is one draw of the rounding errors. Where a row depends on a few nearly
equal scores, another order of summation is another draw. A result over its budget is
therefore compared again, with the largest error of up to 64 more draws (rounding.py). A
wrong kernel is off by far more: a result that is still a hundred times over its budget
after 8 draws fails at once.

PyTorch's evaluation can fail: it overflows or underflows, or its dtype cannot resolve
the scores. Such an error must not become a budget. So the draws have the range of
float32, like the sums of a kernel, and a score stays in float32 where the dtype would
move it by more than 1/8. An evaluation whose error in a row is still a quarter of the
row (for gradients a sixth), and more than the rounding of its terms explains, does not
count in this row. Where a result is over its budget, but not by more than draws that do
not count, the row cannot be judged, and the judge raises ValueError.

Below, ``options`` are the keyword arguments of :mod:`flashlib.reference.masks`: causal,
scale, window, softcap, alibi_slopes, score, bias, sinks and mask.
"""

import itertools
import math

import torch

from flashlib.reference import gradients as by_hand
from flashlib.reference import masks as reference_masks
from flashlib.reference import standard as reference_standard
from flashlib.rounding import (
    EPS,
    TINY,
    dropout_factors,
    pytorch,
    pytorch_gradients,
    scale_of,
)
from flashlib.score_mods import Packing

OUTPUT_FACTOR, GRADIENT_FACTOR = 2, 3
DRAWS = 64
FIRST_DRAWS, HOPELESS = 8, 100
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
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
    """The reference ``(o, lse)`` in float64: ``[B, H, T_q, d_v]``, ``[B, H, T_q]``."""
    wide = (x.detach().double() for x in (q, k, v))
    return reference_masks.attention(*wide, **options)


def oracle_gradients(q, k, v, do, **options):
    """The reference gradients ``(dq, dk, dv)`` in float64. options: also dlse."""
    wide = (x.detach().double() for x in (q, k, v, do))
    return reference_masks.gradients(*wide, **options)


def rms(x):
    """Root mean square over the last dimension, in float64: ``[..., d] -> [...]``."""
    return (x.double().square().sum(dim=-1) / max(1, x.shape[-1])).sqrt()


def assert_within_budget(q, k, v, o, lse=None, **options):
    """Judge o ``[B, H, T_q, d_v]``, and lse ``[B, H, T_q]`` if given, row by row.

    The budget of an lse is 2 |lse_pt - lse64| + eps(float32) (sum_c |scale q_ic k_jc| +
    ln l) with j the key for which the sum is largest, among those with a weight: an lse
    is a float32 sum of these terms and of the ALiBi bias, whatever the dtype of q, and
    no more accurate than they are. The budget of o has what it loses if every weight is
    off by 2^-126, since a GPU's smaller ones are 0.

    Raises AssertionError naming the tensor, the row and the figures of the worst one;
    shape and dtype are judged too. Raises ValueError for what cannot be judged: the
    reference is not finite, or PyTorch is off by as much.
    """
    o64, lse64 = oracle(q, k, v, **options)
    terms, _ = oracle(q, k, v.abs(), **options)
    lost = lost_output(q, k, v, **options)
    judged = [Judged("o", o, o64, terms, q.dtype, OUTPUT_FACTOR, lost)]
    if lse is not None:
        terms = terms_of_lse(q, k, lse64, **options)
        judged.append(Judged("lse", lse, lse64, terms, torch.float32, OUTPUT_FACTOR))
    judge(judged, lambda generator: pytorch(q, k, v, generator=generator, **options))


def assert_gradients_within_budget(q, k, v, do, dq, dk, dv, *, dlse=None, **options):
    """Judge those of dq, dk and dv, in the shapes of q, k and v, that are not None, as
    :func:`assert_within_budget`.
    """
    options["dlse"] = None if dlse is None else dlse.detach()
    wanted = oracle_gradients(q, k, v, do, **options)
    both = terms_of_gradients(q, k, v, do, **options)
    gradients = zip(("dq", "dk", "dv"), (dq, dk, dv), wanted, *both, strict=True)
    judged = [
        x if x is None else Judged(name, x, x64, terms, q.dtype, GRADIENT_FACTOR, lost)
        for name, x, x64, terms, lost in gradients
    ]

    def draw(generator):
        return pytorch_gradients(q, k, v, do, generator=generator, **options)

    judge(judged, draw)


class Judged:
    """A result next to its value in float64, ``wanted``, and what the sums in this
    value come to when every term is positive, ``terms``; ``lost`` is what the smallest
    numbers of a GPU cost. Shape, dtype and finite elements are judged at once, the
    error of the rows by :func:`judge`.

    Raises ValueError for a dtype without a budget, and where the reference is NaN or
    infinite.
    """

    def __init__(self, name, found, wanted, terms, dtype, factor, lost=None):
        if dtype not in DTYPES:
            raise ValueError(f"q: expected a dtype of {DTYPES}, got {dtype}")
        if found.shape != wanted.shape or found.dtype != dtype:
            expected = f"expected {list(wanted.shape)} {dtype}"
            got = f"got {list(found.shape)} {found.dtype}"
            raise AssertionError(f"{name}: {expected}, {got}")
        # The lse of a query that sees no key is -inf.
        usable = wanted < math.inf if name == "lse" else wanted.isfinite()
        if not usable.all():
            place = (~usable).nonzero()[0].tolist()
            raise ValueError(
                f"{name}{place}: expected inputs with a finite reference in float64, "
                f"got {wanted[tuple(place)]}: it cannot be judged"
            )
        rounded, eps = wanted.to(dtype), torch.finfo(dtype).eps
        bad = (~torch.isfinite(found) & (found != rounded)).nonzero().tolist()
        if bad:
            raise AssertionError(
                f"{name}{bad[0]}: not finite: {found[tuple(bad[0])]}; "
                f"{len(bad)} of {found.numel()} elements"
            )
        self.name, self.wanted, self.factor = name, wanted, factor
        self.infinite = rounded.masked_fill(rounded.isfinite(), math.nan)
        size, terms = self.size(wanted), self.size(terms)
        floor = eps * (terms if name == "lse" else size)
        self.floor = torch.maximum(floor, self.distance(rounded))
        if lost is not None:
            self.floor = self.floor + self.size(lost)
        if name == "lse":
            terms += 1  # kernels add log2 l to an m that may be off by 1
        explained = (4 * eps + 64 * EPS) * terms
        self.counting = torch.maximum(size / (2 * factor), explained)
        self.error = self.distance(found)
        # The largest error of PyTorch's that counts, and that of any draw.
        self.pt, self.worst = (torch.zeros_like(self.error) for _ in range(2))

    def size(self, x):
        """The size of x, one number for each row."""
        return x.abs() if self.name == "lse" else rms(x)

    def distance(self, x):
        """The error of x, one number for each row. An infinity is right where the
        reference, in the dtype of the result, has the same.
        """
        same = x == self.infinite
        return self.size((x.double() - self.wanted).masked_fill(same, 0.0))

    def widen(self, evaluated, drawn):
        """Let an evaluation of PyTorch widen the budget of the rows where it counts."""
        error = self.distance(evaluated).nan_to_num(math.inf)
        counts = error.isfinite() & (error <= self.counting)
        self.pt = self.pt.maximum(error.masked_fill(~counts, 0.0))
        if drawn:
            self.worst = self.worst.maximum(error)

    def over(self, pt, times=1):
        """The rows over their budget for a PyTorch that is off by ``pt``."""
        # NaN compares false with everything, so ask for what must hold.
        return ~(self.error <= times * (self.factor * pt + self.floor))

    def verdict(self):
        """An error that names the worst row."""
        over, wrong = self.over(self.pt), self.over(self.pt.maximum(self.worst))
        shown = wrong if wrong.any() else over
        excess = self.error / (self.factor * self.pt + self.floor)
        excess = excess.nan_to_num(math.inf).masked_fill(~shown, 0.0)
        row = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        text = (
            f"{self.name}{list(row)}: error {self.error[row]:.3g} is over the budget "
            f"{self.factor} x {self.pt[row]:.3g} (PyTorch) + {self.floor[row]:.3g}; "
            f"{int(over.sum())} of {over.numel()} rows are over"
        )
        if wrong.any():
            return AssertionError(text)
        own = f"PyTorch's own error is up to {self.worst[row]:.3g}"
        return ValueError(f"{text}, but cannot be judged: {own}")


def judge(judged, draw):
    """Raise AssertionError for the first result that is not None and has a row over its
    budget, ValueError if all such rows cannot be judged; draw(generator) returns
    PyTorch's evaluation of every entry.
    """
    generator = torch.Generator().manual_seed(0)
    for count in range(DRAWS + 1):
        drawn = draw(generator if count else None)
        pairs = [(x, z) for x, z in zip(judged, drawn, strict=False) if x is not None]
        for x, evaluated in pairs:
            x.widen(evaluated, drawn=count > 0)
        over = [x for x, _ in pairs if x.over(x.pt).any()]
        if not over:
            return
        # Where PyTorch has made no error so far, "a hundred times over" means nothing;
        # an error below EPS**2 is that of the float64 reference.
        hopeless = (
            x.over(x.pt.maximum(x.worst), HOPELESS) & (x.pt > EPS**2) for x in over
        )
        if count == FIRST_DRAWS and any(rows.any() for rows in hopeless):
            break
    raise min((x.verdict() for x in over), key=lambda x: isinstance(x, ValueError))


def lost_output(q, k, v, *, sinks=None, dropout=0.0, seed=0, **changes):
    """What o loses in every column if every weight is off by TINY."""
    q, k, v = (x.detach().double() for x in (q, k, v.abs()))
    visible = ~torch.isneginf(reference_masks.scores(q, k, **changes))
    weights = TINY * visible.double()
    return reference_standard.output(
        weights * dropout_factors(weights, dropout, seed), v
    )


def terms_of_gradients(
    q, k, v, do, *, scale=None, softcap=None, dlse=None, sinks=None, dropout=0.0,
    seed=0, **changes
):  # fmt: skip
    """What the sums in dq, dk and dv come to when every term is positive, those of dP
    and D too, and what they lose if every weight is off by TINY. A weight counts for no
    less than the smallest that its dtype resolves, in which it is stored.
    """
    scale = scale_of(q, scale)
    least = max(torch.finfo(q.dtype).tiny, TINY / EPS)
    q, k, v, do = (x.detach().double() for x in (q, k, v, do))
    s = reference_masks.scores(q, k, scale=scale, softcap=softcap, **changes)
    p = reference_standard.softmax(reference_masks.with_sinks(s, sinks))
    p = p[..., : k.shape[2]]
    hidden, slope = torch.isneginf(s), torch.ones_like(s)
    if softcap is not None:
        raw = reference_standard.scores(q, k, scale)
        slope = 1.0 / torch.cosh(raw / softcap).square()
    score = changes.get("score")
    if score is not None:
        before = reference_standard.scores(q, k, scale)
        before = reference_masks.lowered(before, softcap, changes.get("alibi_slopes"))
        slope = slope * score.slope(before, changes.get("batch", 0)).abs()
        slope = slope.masked_fill(p == 0.0, 0.0)
    q, k, v, do = (x.abs() for x in (q, k, v, do))
    z = dropout_factors(p, dropout, seed)
    delta = by_hand.row_dot(do, reference_standard.output(z * p, v))
    dp = z * by_hand.d_probabilities(do, v)
    dlse = None if dlse is None else dlse.double().abs()

    def gradients(p, capped, least):
        p, capped = (x.clamp(min=least).masked_fill(hidden, 0.0) for x in (p, capped))
        ds = by_hand.d_scores(capped, dp, -delta, dlse)
        dk, dv = by_hand.d_keys(ds, q, abs(scale)), by_hand.d_values(z * p, do)
        dk, dv = (by_hand.sum_groups(x, k.shape[1]) for x in (dk, dv))
        return by_hand.d_queries(ds, k, abs(scale)), dk, dv

    lost = torch.full_like(p, TINY)
    return gradients(p, p * slope, least), gradients(lost, lost * slope, 0.0)


def terms_of_lse(
    q, k, lse64, *, scale=None, sinks=None, dropout=0.0, seed=0, **changes
):  # fmt: skip
    """The sum of the absolute terms of an lse, ``[B, H, T_q]`` (largest score, ln
    l)."""
    if k.shape[2] == 0 and sinks is None:
        return torch.zeros_like(lse64)
    q, k = q.detach().double(), k.detach().double()
    s = reference_masks.scores(q, k, scale=scale, **changes)
    terms = reference_standard.scores(q.abs(), k.abs(), abs(scale_of(q, scale)))
    slopes = changes.get("alibi_slopes")
    if slopes is not None:
        terms += reference_masks.alibi(slopes.double().abs(), q.shape[2], k.shape[2])
    score = changes.get("score")
    if score is not None:  # it rounds what it reads and what it returns
        before = reference_standard.scores(q, k, scale)
        before = reference_masks.lowered(before, changes.get("softcap"), slopes)
        batch = changes.get("batch", 0)
        if score.rule.derivative is not None:
            terms = terms * score.slope(before, batch).abs()
        terms = terms + score.change(before, batch).abs()
    if changes.get("bias") is not None:
        terms = terms + changes["bias"].double().abs()
    s = reference_masks.with_sinks(s, sinks)
    terms = reference_masks.with_sinks(terms, None if sinks is None else sinks.abs())
    # A key without weight adds nothing, and neither does its error.
    terms = terms.masked_fill(~(s > s.amax(dim=-1, keepdim=True) + math.log(EPS)), 0.0)
    return terms.amax(dim=-1) + (lse64 - s.amax(dim=-1)).nan_to_num(0.0)


def packing_of(lengths_q, lengths_k, device):
    """The Packing of sequences with these lists of lengths."""
    starts = (
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=device)
        for x in (lengths_q, lengths_k)
    )
    return Packing(*starts, max(lengths_q, default=0), max(lengths_k, default=0))


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
        options["batch"] = b
        assert_within_budget(q, k, v, o, lse, **options)
        if do is not None:
            arguments = (q, k, v, do, dq, dk, dv)
            assert_gradients_within_budget(*arguments, dlse=dlse, **options)
