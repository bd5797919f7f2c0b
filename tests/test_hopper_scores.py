"""Scores that change, in the kernels for compute capability 9.0: a softcap, ALiBi, and
functions. On a GPU run this file under a limit of time, as test_hopper.py.
"""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from cases import output_gradients
from device import DEVICE, as_python, on_cpu, on_hopper
from expected import same
from hopper_calls import called, hidden, inputs, with_tile
from masks_of_tests import some_masks
from roles import Pointer
from scores_of_tests import cubed, of_cubed, some_scores

import flashlib
from flashlib import masks, score_mods, testing
from flashlib.kernels import (
    gluon_bias,
    gluon_scores,
    hopper,
    hopper_backward,
    hopper_tiles,
)
from flashlib.kernels.tiles import LOG2_E
from flashlib.masks import Mask
from flashlib.score_functions import Score, alibi, softcap

pytestmark = pytest.mark.usefixtures("nan_filled")
SCORES = 11  # of some_scores


# -- what the kernels compute of a softcap, in float32 on any device


class Number(float):
    """A float32 of a kernel. Operations round as the GPU's do, but for multiply-adds,
    which round twice here.
    """

    def __new__(cls, x):
        return float.__new__(cls, torch.tensor(x, dtype=torch.float32).item())

    def __mul__(self, other):
        return Number(float(self) * other)

    def __add__(self, other):
        return Number(float(self) + other)

    def __rsub__(self, other):
        return Number(other - float(self))

    __rmul__, __radd__ = __mul__, __add__


def tanh_of(x):
    """gluon_scores.rational_tanh, as Python."""
    language = SimpleNamespace(
        clamp=lambda x, low, high, propagate_nan: Number(min(max(x, low), high)),
        PropagateNan=SimpleNamespace(ALL=None),
        static_range=range,
        constexpr=None,
    )
    names = vars(gluon_scores) | {
        "gl": language,
        "tl": language,
        "LAST": gluon_scores.LAST.value,
        "TANH_TOP": gluon_scores.TANH_TOP.value,
        "TANH_BOTTOM": gluon_scores.TANH_BOTTOM.value,
        "reciprocal": lambda x: Number(1.0 / x),
    }
    run = as_python(("polynomial", "rational_tanh"), **names)
    return run.rational_tanh(Number(x))


def test_the_quotient_is_tanh_to_the_precision_of_float32():
    places = [10.0**n for n in range(-20, 0)] + [0.01 * n for n in range(1, 1200)]
    for x in places:
        x = float(Number(x))
        assert abs(tanh_of(x) - math.tanh(x)) <= 5e-7 * math.tanh(x), x
        assert tanh_of(-x) == -tanh_of(x)
    assert tanh_of(0.0) == 0.0


# -- both passes, on a Hopper GPU


def judged(q, k, v, method="hopper", **options):
    """``(o, lse, dq, dk, dv)`` of a call, judged, the same twice."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    do, dlse = output_gradients(q, q)
    runs = []
    for _ in range(2):
        pair = flashlib.attention(q, k, v, **options, method=method, return_lse=True)
        runs.append((*pair, *torch.autograd.grad(pair, (q, k, v), (do, dlse))))
    assert same(*runs)
    q, k, v, o, lse, *gradients = (x.detach() for x in (q, k, v, *runs[0]))
    testing.assert_within_budget(q, k, v, o, lse, **options)
    options = options | {"dlse": dlse}
    testing.assert_gradients_within_budget(q, k, v, do, *gradients, **options)
    return o, lse, *gradients


@pytest.fixture
def passes(monkeypatch):
    """The calls of the Hopper kernels that no plan has spared, forward and backward."""
    modules = (hopper, "forward"), (hopper_backward, "backward")
    return [called(monkeypatch, *module) for module in modules]


SHAPES = [(1, 1), (128, 128), (333, 512), (512, 333), (64, 700), (700, 1)]
HIDING = [
    {"causal": True},
    {},
    {"window": (100, 0)},
    {"mask": masks.prefix(70)},
    {"mask": masks.prefix(150), "causal": True},
]
HIDING_NAMES = ["causal", "no mask", "window", "prefix", "causal prefix"]
each_hiding = pytest.mark.parametrize("options", HIDING, ids=HIDING_NAMES)
each_width = pytest.mark.parametrize("d", [64, 128])


@on_hopper
@each_width
@pytest.mark.parametrize("cap", [2.0, 30.0])
@pytest.mark.parametrize(("T_q", "T_k"), SHAPES)
def test_softcap(T_q, T_k, cap, d, passes):
    q, k, v = inputs(2, 4, T_q, d, T_k=T_k, H_kv=2)
    judged(q, k, v, softcap=cap, causal=T_q <= T_k)
    assert all(passes)


@on_hopper
@each_width
@each_hiding
@pytest.mark.parametrize("scale", [None, 0.0, -0.3])
def test_softcap_with_masks(scale, options, d, passes):
    q, k, v = inputs(2, 4, 300, d, torch.float16, T_k=340, H_kv=2)
    judged(q, k, v, softcap=20.0, scale=scale, **options)
    assert all(passes)


@on_hopper
@each_width
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cap", "magnitude"), [(30.0, 30.0), (5.0, 8.0), (50.0, 1.0)])
def test_a_saturated_softcap_keeps_its_digits(cap, magnitude, dtype, d):
    q, k, v = inputs(1, 2, 300, d, dtype, magnitude=magnitude)
    judged(q, k, v, softcap=cap, causal=True)


@on_hopper
@each_width
def test_softcap_and_alibi(d, passes):
    q, k, v = inputs(2, 4, 300, d, T_k=340, H_kv=2)
    slopes = torch.tensor([[0.5, 0.1, 0.02, 0.0], [0.3, 0.0, 1.0, 0.2]], device=DEVICE)
    for options in ({"causal": True}, {"mask": masks.prefix(70)}):
        judged(q, k, v, softcap=3.0, alibi_slopes=slopes, **options)
    assert all(passes)


@on_hopper
@each_width
@pytest.mark.parametrize("place", range(SCORES))
def test_functions(place, d, passes):
    rng = random.Random(place)
    q, k, v = inputs(2, 4, 300, d, T_k=340, H_kv=2)
    score = some_scores(2, 4, 340, rng)[place]
    judged(q, k, v, score=score, **HIDING[place % len(HIDING)])
    assert all(passes)


@on_hopper
@each_width
@pytest.mark.parametrize(("T_q", "T_k"), SHAPES)
def test_a_function_of_awkward_lengths(T_q, T_k, d):
    q, k, v = inputs(2, 4, T_q, d, T_k=T_k, H_kv=2)
    rng = random.Random(f"{T_q} {T_k} {d}")
    cube = Score(cubed, 0.05, derivative=of_cubed)
    (mask,) = rng.sample(some_masks(2, 4, T_q, T_k, rng), 1)
    judged(q, k, v, score=cube, mask=mask)
    judged(q, k, v, score=cube, causal=True)


# -- a bias: by which of [B, H, T_q, T_k] it differs, its dtype, and how it is stored

BIASES = {
    "pairs": ((1, 4, True, True), torch.bfloat16, None),
    "batches": ((2, 1, True, True), torch.float16, None),
    "float32": ((2, 4, True, True), torch.float32, None),
    "keys": ((2, 1, False, True), torch.bfloat16, None),
    "queries": ((1, 4, True, False), torch.float32, None),
    "heads": ((1, 4, False, False), torch.float32, None),
    "transposed": ((1, 4, True, True), torch.bfloat16, (0, 1, 3, 2)),
    "heads last": ((2, 4, True, True), torch.bfloat16, (0, 2, 3, 1)),
}
each_bias = pytest.mark.parametrize("kind", BIASES)


def a_bias(kind, T_q, T_k, hidden=0.1):
    """A bias of this kind, of which a part is -inf."""
    (B, H, rows, cols), dtype, order = BIASES[kind]
    shape = B, H, T_q if rows else 1, T_k if cols else 1
    generator = torch.Generator().manual_seed(T_q + T_k)
    x = torch.randn(shape, generator=generator) * 2.0
    if rows and cols:
        x[torch.rand(shape, generator=generator) < hidden] = -math.inf
    x = x.to(DEVICE, dtype)
    if order is not None:
        back = [order.index(n) for n in range(4)]
        x = x.permute(order).contiguous().permute(back)
    return x


def judged_with_bias(q, k, v, bias, **options):
    """As judged, with the gradient of the bias, next to flash2's: they differ by what L
    and D do. The scores of a row move its gradients by nothing in sum, so where a bias
    is one number for a row, only the rounding of the rows that share it is left.
    """
    judged(q, k, v, bias=bias, **options)
    found = []
    for method in ("hopper", "flash2"):
        x = bias.detach().requires_grad_()
        o = flashlib.attention(q, k, v, bias=x, method=method, **options)
        found += torch.autograd.grad(o, x, output_gradients(q, q)[0])
    difference, largest = (found[0] - found[1]).abs().max(), found[1].abs().max()
    rows = q[..., 0].numel() / bias[..., 0].numel()
    assert difference <= 0.02 * largest + 3e-3 * math.sqrt(rows)


def load(places, mask=None, other=None):
    """gl.load; without a mask, every place must be in the tensor."""
    offset, memory = places.offset, places.x
    if mask is not None:
        offset = torch.where(mask, offset, 0)
    assert offset.min() >= 0 and offset.max() < len(memory)
    found = memory[offset]
    return found if mask is None else torch.where(mask, found, other)


@on_cpu
@each_bias
@pytest.mark.parametrize(("T_q", "T_k"), [(1, 1), (70, 130), (128, 256)])
def test_the_places_of_a_bias(kind, T_q, T_k):
    """What both kernels load for every tile, their own functions as Python."""
    B, H, ROWS, COLUMNS = 2, 4, 64, 128
    bias = a_bias(kind, T_q, T_k)
    _, change = gluon_scores.gluon_change(score_mods.ScoreMod(0.1, bias=bias))
    memory = bias.as_strided((bias.untyped_storage().nbytes() // bias.itemsize,), (1,))
    change = change._replace(bias=Pointer(memory))
    language = SimpleNamespace(
        arange=lambda start, end, layout: torch.arange(start, end),
        minimum=lambda x, y: torch.minimum(x, torch.as_tensor(y)),
        SliceLayout=lambda *x: None,
        int64=torch.int64, float32=torch.float32, load=load,
    )  # fmt: skip
    names = vars(gluon_bias) | {
        "gl": language, "ROWS": ROWS, "accumulator": lambda columns: None,
        "LOG2_E": LOG2_E.value,
    }  # fmt: skip
    run = as_python(("times", "bias_at", "bias_of", "less_bias"), **names)
    sizes = SimpleNamespace(T_q=T_q, T_k=T_k)
    whole = torch.full((B, H, T_q + 2 * COLUMNS, T_k + 2 * COLUMNS), math.nan)
    whole[:, :, :T_q, :T_k] = bias.float()
    numbers = [map(torch.tensor, range(n)) for n in (B, H)]
    for b, h in itertools.product(*numbers):
        for row, col in itertools.product(range(0, T_q, 64), range(0, T_k, 128)):
            inside = T_k % COLUMNS == 0
            row, col = torch.tensor(row), torch.tensor(col)
            first_position = row + T_k - T_q
            queries = SimpleNamespace(b=b, h=h, position=first_position, bias_ring=None)
            found = run.bias_of(queries, 0, col, sizes, change, COLUMNS, inside)
            wanted = whole[b, h, row : row + ROWS, col : col + COLUMNS]
            seen = ~wanted.isnan()
            assert (found.float().expand_as(wanted)[seen] == wanted[seen]).all()
            for first in (0, ROWS):  # transposed, of either consumer
                lse = torch.zeros(1, ROWS)
                at = b, h, row, col + first
                found = run.less_bias(lse, *at, sizes, change, inside)
                part = wanted[:, first : first + ROWS].T * LOG2_E.value
                seen = ~part.isnan()
                assert (found.expand_as(part)[seen] == -part[seen]).all()


@on_hopper
@each_width
@each_bias
def test_a_bias(kind, d, passes):
    for T_q, T_k in ((256, 384), (300, 340)):
        q, k, v = inputs(2, 4, T_q, d, T_k=T_k, H_kv=2)
        judged_with_bias(q, k, v, a_bias(kind, T_q, T_k), causal=True)
    assert all(passes)


@on_hopper
@each_width
@pytest.mark.parametrize(("T_q", "T_k"), SHAPES)
def test_a_bias_of_awkward_lengths(T_q, T_k, d):
    q, k, v = inputs(2, 4, T_q, d, T_k=T_k, H_kv=2)
    for kind in ("pairs", "float32"):
        judged_with_bias(q, k, v, a_bias(kind, T_q, T_k), causal=T_q <= T_k)


@on_hopper
@each_width
@each_hiding
@pytest.mark.parametrize("scale", [None, 0.0, -0.3])
def test_a_bias_with_masks(scale, options, d, passes):
    q, k, v = inputs(2, 4, 300, d, torch.float16, T_k=340, H_kv=2)
    for kind in ("pairs", "keys"):
        judged_with_bias(q, k, v, a_bias(kind, 300, 340), scale=scale, **options)
    assert all(passes)


@on_hopper
@each_width
def test_a_bias_with_other_changes(d):
    q, k, v = inputs(2, 4, 300, d, T_k=340, H_kv=2)
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.0], device=DEVICE)
    changes = {"softcap": 20.0, "alibi_slopes": slopes}
    bias, sinks = a_bias("pairs", 300, 340), torch.zeros(4, device=DEVICE)
    judged_with_bias(q, k, v, bias, causal=True, sinks=sinks, **changes)
    score = Score(cubed, 0.01, derivative=of_cubed)
    judged_with_bias(q, k, v, bias, score=score, mask=masks.prefix(70), **changes)


@on_hopper
@each_width
def test_rows_and_blocks_that_a_bias_hides(d):
    """-inf hides a key; a large number leaves the first blocks a weight of 0."""
    q, k, v = inputs(2, 4, 400, d)
    for least in (-math.inf, -1e30, -1e9):
        bias = torch.zeros(1, 1, 400, 400, device=DEVICE, dtype=torch.bfloat16)
        bias[..., :200] = least
        judged(q, k, v, bias=bias)
    bias[:, :, 100:300] = -math.inf
    o, lse, dq, *_ = judged(q, k, v, bias=bias)
    assert (o[:, :, 100:300] == 0).all() and (dq[:, :, 100:300] == 0).all()
    assert (lse[:, :, 100:300] == -math.inf).all()


@on_hopper
@each_width
def test_a_bias_of_long_sequences(d):
    q, k, v = inputs(1, 2, 3000, d)
    bias = torch.randn(1, 2, 3000, 3000, device=DEVICE, dtype=torch.bfloat16)
    judged_with_bias(q, k, v, bias, causal=True)


@on_hopper
@pytest.mark.parametrize("d", [192, 256])
def test_a_bias_of_wide_heads(d):
    """Its gradients are flash2's."""
    q, k, v = inputs(1, 4, 300, d, d_v=128 if d == 192 else d, H_kv=2)
    bias = a_bias("pairs", 300, 300)
    options = {"causal": True, "bias": bias}
    o, lse = flashlib.attention(q, k, v, method="hopper", return_lse=True, **options)
    testing.assert_within_budget(q, k, v, o, lse, **options)


# -- several changes


@on_hopper
@each_width
def test_keywords_and_a_function_in_one_call(d):
    """A softcap, ALiBi, a function and sinks, in this order."""
    q, k, v = inputs(2, 4, 300, d, T_k=340, H_kv=2)
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.0], device=DEVICE)
    changes = {"softcap": 20.0, "alibi_slopes": slopes}
    judged(q, k, v, score=Score(cubed, 0.01, derivative=of_cubed), **changes)
    sinks = torch.tensor([-3.0, 0.0, 4.0, 9.0], device=DEVICE)
    judged(q, k, v, sinks=sinks, causal=True, **changes)


@on_hopper
@each_width
def test_rows_that_see_nothing(d):
    q, k, v = inputs(2, 4, 600, d, torch.float16, H_kv=2)
    cube = Score(cubed, 0.05, derivative=of_cubed)
    for change in ({"softcap": 5.0}, {"score": cube}):
        o, lse, dq, *_ = judged(q, k, v, mask=Mask(hidden, 200), **change)
        for first in (0, 400):
            assert (o[:, :, first : first + 200] == 0).all()
            assert (lse[:, :, first : first + 200] == -math.inf).all()
            assert (dq[:, :, first : first + 200] == 0).all()


@on_hopper
@each_width
def test_many_heads_and_tiles(d):
    """Sections of heads that begin with the first keys and with the last ones, and
    tiles of long sequences.
    """
    q, k, v = inputs(4, 16, 900, d, H_kv=8)
    judged(q, k, v, softcap=30.0, causal=True)
    q, k, v = inputs(1, 2, 3000, d)
    score = softcap(30.0).then(alibi(torch.tensor([0.1, 0.01], device=DEVICE)))
    for change in ({"softcap": 30.0}, {"score": score}):
        judged(q, k, v, causal=True, **change)


@on_hopper
@pytest.mark.parametrize("d", [192, 256])
def test_wide_heads_forward(d):
    """Their gradients are flash2's."""
    q, k, v = inputs(1, 4, 300, d, d_v=128 if d == 192 else d, H_kv=2)
    for change in ({"softcap": 20.0}, {"score": softcap(20.0)}):
        o, lse = flashlib.attention(
            q, k, v, causal=True, method="hopper", return_lse=True, **change
        )
        testing.assert_within_budget(q, k, v, o, lse, causal=True, **change)


@on_hopper
@each_width
def test_every_tile(d):
    q, k, v = inputs(1, 2, 300, d)
    options = {"causal": True, "scale": 0.1, "softcap": 20.0}
    arguments = q, k, v, score_mods.unchanged(True, 0.1)._replace(softcap=20.0)
    rows = [
        x for row in hopper_tiles.TILES[d] for x in (row, row._replace(HOLD_Q=False))
    ]
    for row in dict.fromkeys(rows):
        testing.assert_within_budget(q, k, v, *with_tile(row)(*arguments), **options)


@on_hopper
@each_width
def test_packed_sequences_with_a_softcap(d):
    """Forward; their gradients are flash2's."""
    lengths = [1, 200, 77, 300]
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs(1, 2, 578, d))
    packing = score_mods.Packing(starts, starts, max(lengths), max(lengths))
    score_mod = score_mods.unchanged(True, 0.1)._replace(softcap=20.0)
    o, lse = hopper.forward(q, k, v, score_mod, packing)
    options = {"causal": True, "scale": 0.1, "softcap": 20.0}
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        part = [x[first:last].transpose(0, 1)[None] for x in (q, k, v, o)]
        testing.assert_within_budget(*part, lse[None, :, first:last], **options)
