"""Eight bits: rounding, what keeps its error small, and the error to expect."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from flashlib import testing
from flashlib.iomodel import fp8 as model
from flashlib.iomodel import hopper as hopper_model
from flashlib.iomodel.roofline import H100, H200
from flashlib.reference import fp8 as reference
from flashlib.reference import standard
from flashlib.reference.fp8 import E4M3, E5M2, FULL, PLAIN, Recipe
from flashlib.timeline import HOPPER

# -- rounding and scales


def all_numbers(dtype):
    """Every finite number of a 16-bit format, in float32."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype).float()
    return x[x.isfinite()]


@pytest.mark.parametrize("form", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_that_of_the_type(form, dtype):
    x = all_numbers(dtype)
    inside = x[x.abs() <= form.largest]
    wanted = inside.to(form.dtype).float()
    assert torch.equal(reference.rounded(inside, form), wanted)
    beyond = x[x.abs() > form.largest]
    assert torch.equal(reference.rounded(beyond, form), beyond.sign() * form.largest)


def test_rounding_of_ties_and_of_what_has_no_neighbors():
    x = [1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 464.0, math.inf, math.nan]
    wanted = [1.0, 1.25, 0.0, 2.0**-8, 448.0, 448.0]
    found = reference.rounded(torch.tensor(x).double())
    assert found[:6].tolist() == wanted and found[6].isnan()


PARTS = {
    "tensor": lambda x: x.flatten()[None],
    "head": lambda x: x.flatten(2).flatten(0, 1),
    "column": lambda x: x.mT.flatten(0, 2),
    1: lambda x: x.flatten(0, 2),
    8: lambda x: torch.cat([y.flatten(2).flatten(0, 1) for y in x.split(8, 2)[:-1]]),
}


@pytest.mark.parametrize("per", PARTS)
def test_the_largest_number_of_each_part_becomes_the_largest_of_the_type(per):
    x = torch.randn(2, 3, 20, 16, generator=torch.Generator().manual_seed(0))
    x = x * torch.arange(1, 21)[:, None]
    found = reference.quantize(x, per)
    (of_part,) = {len(part) for part in [PARTS[per](x)]}
    assert PARTS[per](found.values.abs()).amax(dim=1).tolist() == [448.0] * of_part
    assert found.scales.unique().numel() == of_part + (6 if per == 8 else 0)
    near = reference.rounded(x / found.scales) * found.scales
    assert torch.equal(found.numbers, near)
    relative = (found.numbers - x).abs() / x.abs()
    assert relative[found.values.abs() >= 2.0**-6].max() <= 2.0**-4


def test_a_part_of_zeros_stays():
    found = reference.quantize(torch.zeros(1, 1, 3, 16), 1)
    assert torch.equal(found.numbers, torch.zeros(1, 1, 3, 16))


# -- exact changes of the inputs


@pytest.mark.parametrize("d, n", [(16, 16), (48, 16), (64, 64), (80, 16), (128, 64)])
def test_the_transform_is_orthogonal_and_spreads_a_number_over_its_block(d, n):
    h = reference.hadamard(d)
    one = torch.eye(d, dtype=torch.float64)
    assert torch.equal(h, h.mT) and torch.allclose(h @ h, one, atol=1e-14)
    turned = reference.transform(one, reference.signs(d))
    sizes = turned.abs().sort(dim=1).values
    assert torch.equal(sizes[:, : d - n], torch.zeros(d, d - n).double())
    assert torch.allclose(sizes[:, d - n :], torch.tensor(n**-0.5).double())
    q, k, _ = normal(1, 1, 9, d)
    sign = reference.signs(d, seed=3)
    turned = [reference.transform(x, sign) for x in (q, k)]
    assert torch.allclose(standard.scores(*turned), standard.scores(q, k), atol=1e-12)


def test_signs_depend_on_the_seed_alone():
    assert torch.equal(reference.signs(64, 1), reference.signs(64, 1))
    assert 16 < (reference.signs(64, 1) == reference.signs(64, 2)).sum() < 48
    assert set(reference.signs(64).tolist()) == {-1.0, 1.0}


def test_a_softmax_does_not_see_the_mean_of_the_keys():
    q, k, v = normal(2, 4, 7, 16)
    k = k + 5.0
    smoothed, mean = reference.smooth(k)
    o, lse = standard.attention(q, k, v, causal=True)
    found, lower = standard.attention(q, smoothed, v, causal=True)
    assert torch.allclose(found, o, atol=1e-13)
    assert torch.allclose(lower + standard.scores(q, mean)[..., 0], lse, atol=1e-12)
    assert (lower - lse).abs().min() > 0.1


def test_the_order_of_keys_is_what_threads_hold():
    order = reference.key_order(64)
    for block, t in itertools.product(range(4), range(4)):
        place = 16 * block + 4 * t
        held = [16 * block + column for column in (2 * t, 2 * t + 1)]
        held += [column + 8 for column in held]
        assert order[place : place + 4].tolist() == held


# -- attention


def normal(B, H, T, d, *, T_k=None, H_kv=None, seed=0):
    """Normal q, k and v in float64."""
    generator = torch.Generator().manual_seed(seed)
    T_k, H_kv = T_k or T, H_kv or H
    shapes = (B, H, T, d), (B, H_kv, T_k, d), (B, H_kv, T_k, d)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes
    ]


SHAPES = [{"T": 70}, {"T": 5, "T_k": 70, "H_kv": 1}, {"T": 70, "T_k": 40}]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("v", ["tensor", "column", 16])
def test_without_rounding_it_is_attention(monkeypatch, shape, causal, v):
    monkeypatch.setattr(reference, "rounded", lambda x, form=E4M3: x)
    q, k, values = normal(2, 2, d=16, **shape)
    options = {"causal": causal, "scale": 0.4}
    found = reference.attention(
        q, k, values, recipe=Recipe(k=16, v=v), block_k=16, **options
    )
    exact = standard.attention(q, k, values, **options)
    for x, wanted in zip(found, exact, strict=True):
        assert torch.allclose(x, wanted, atol=1e-12)


def outliers(B, H, T, d, seed=0):
    """FlashAttention-3's test: standard normal numbers, of which one in a thousand gets
    another one added, with standard deviation 10 (Shah et al., 2024, section 4.3).
    """
    generator = torch.Generator().manual_seed(seed)
    kind = {"dtype": torch.float64, "generator": generator}
    found = []
    for _ in range(3):
        x, more = torch.randn(2, B, H, T, d, **kind)
        found.append(x + 10.0 * more * (torch.rand(B, H, T, d, **kind) < 0.001))
    return found


def columns(q, k, v):
    """The same two columns of queries and of keys are larger, as in trained models."""
    large = torch.ones(q.shape[-1], dtype=torch.float64)
    large[5], large[40] = 20**0.5, 12**0.5
    return q * large, k * large, v


def far(q, k, v):
    """All keys of a head have a large vector in common."""
    generator = torch.Generator().manual_seed(9)
    shape = (1, k.shape[1], 1, k.shape[3])
    return q, k + 8.0 * torch.randn(shape, dtype=k.dtype, generator=generator), v


INPUTS = {
    "normal": lambda: normal(1, 2, 256, 64),
    "grouped": lambda: normal(1, 2, 200, 64, T_k=256, H_kv=1),
    "outliers": lambda: outliers(1, 2, 256, 64),
    "columns": lambda: columns(*normal(1, 2, 256, 64)),
    "far keys": lambda: far(*normal(1, 2, 256, 64)),
    "far values": lambda: [*normal(1, 2, 256, 64)[:2], 3 + normal(1, 2, 256, 64)[2]],
}
RECIPES = {
    "plain": PLAIN,
    "heads": Recipe("head", "head", "head", transform=False, smooth=False),
    "transformed": Recipe(smooth=False),
    "smoothed": Recipe(transform=False, sums_rounded=False),
    "full": FULL,
    "columns of v": Recipe(v="column"),
    "weights as they are": Recipe(exponent=0),
}


def errors(name, recipe, causal=False):
    """The errors of o and lse next to float64, and the deviations to expect."""
    q, k, v = INPUTS[name]()
    wanted = standard.attention(q, k, v, causal=causal)
    low = (x.float() for x in (q, k, v))
    found = reference.attention(*low, causal=causal, recipe=recipe)
    expected = reference.deviation(q, k, v, causal=causal, recipe=recipe)
    return [x.double() - y for x, y in zip(found, wanted, strict=True)], expected


def size(x):
    return x.square().mean().sqrt().item()


CASES = [
    *itertools.product(INPUTS, ["full", "plain"], [False]),
    *itertools.product(["normal", "outliers"], RECIPES, [True]),
]


@pytest.mark.parametrize("name, recipe, causal", CASES)
def test_the_error_is_the_one_to_expect(name, recipe, causal):
    """On average within a tenth, or a fifth where a few numbers decide, and four times
    as large in no row.
    """
    (o, lse), (of_o, of_lse) = errors(name, RECIPES[recipe], causal)
    off = 0.2 if name in ("outliers", "columns") else 0.1
    assert 1 - off < size(o) / size(of_o) < 1 + off
    assert 0.6 < size(lse) / size(of_lse) < 1.4
    rows, expected = testing.rms(o), testing.rms(of_o)
    assert (rows <= 4 * expected + 1e-6).all(), (rows / expected).max()


def gain(name, first, second):
    """How many times smaller the error of the second recipe is."""
    return size(errors(name, first)[0][0]) / size(errors(name, second)[0][0])


def test_what_each_change_removes():
    """Of normal numbers nothing; the transform helps with columns that are large in
    queries and keys, smoothing with a vector that all keys share, rounded sums with one
    that all values share.
    """
    before = Recipe("tensor", "tensor", "tensor", transform=False, smooth=False)
    transformed = before._replace(transform=True)
    smoothed = before._replace(smooth=True)
    for after in (transformed, smoothed, FULL):
        assert 0.9 < gain("normal", before, after) < 1.1
    assert gain("columns", before, transformed) > 2
    assert gain("far keys", before, transformed) < 1.2
    assert gain("far keys", before, smoothed) > 4
    unrounded = Recipe(sums_rounded=False)
    assert gain("far values", unrounded, FULL) > 1.2
    assert 0.95 < gain("normal", unrounded, FULL) < 1.05


def test_outliers_cost_less_than_with_one_scale_for_each_tensor():
    """Half as much where they are in the same columns."""
    assert gain("columns", PLAIN, FULL) > 2
    assert gain("outliers", PLAIN, FULL) > 1.3


def test_small_weights_vanish_and_whether_the_sum_knows():
    """4095 weights of e^-13 are a hundredth of the sum, and each is below half of the
    smallest number.
    """
    q = torch.zeros(1, 1, 1, 16)
    k = torch.zeros(1, 1, 4096, 16)
    q[..., 0], k[0, 0, 0, 0] = 13.0, 1.0
    v = torch.ones(1, 1, 4096, 16)
    options, kept = {"scale": 1.0}, 1 / (1 + 4095 * math.exp(-13))
    for sums_rounded, wanted in ((True, 1.0), (False, kept)):
        recipe = Recipe(transform=False, smooth=False, sums_rounded=sums_rounded)
        o, _ = reference.attention(q, k, v, recipe=recipe, **options)
        assert torch.allclose(o, torch.full_like(o, wanted), atol=1e-5)
    assert kept < 0.992


def test_a_key_among_many_that_share_a_vector_is_lost_and_smoothing_finds_it():
    """Keys from 8 to 16, where neighboring numbers are 1 apart, and queries that look
    for differences of an eighth.
    """
    generator = torch.Generator().manual_seed(0)
    own = torch.randint(2, (1, 1, 1024, 64), generator=generator) * 2.0 - 1.0
    shared = 8.5 + 7.0 * torch.rand(1, 1, 1, 64, generator=generator)
    keys, wanted = shared + own / 16, torch.arange(0, 1024, 16)
    q, v = 24.0 * own[:, :, wanted], torch.eye(1024)[None, None]

    def found(recipe):
        o, _ = reference.attention(q, keys, v, recipe=recipe)
        return (o[0, 0].argmax(dim=1) == wanted).float().mean().item()

    exact, _ = standard.attention(q, keys, v)
    assert torch.equal(exact[0, 0].argmax(dim=1), wanted)
    assert found(PLAIN) < 0.5
    assert found(PLAIN._replace(smooth=True)) == 1.0


# -- what is counted


def test_at_64_columns_the_exponentials_are_the_limit():
    assert model.clocks(64, 8) == (Fraction(1, 32), Fraction(1, 16))
    assert model.clocks(64, 16).products == model.clocks(64, 16).exponential
    assert [model.speedup(d) for d in (64, 128, 256)] == [1, 2, 2]
    apart = [model.speedup(d, overlapped=False) for d in (64, 128, 256)]
    assert apart == [Fraction(4, 3), Fraction(3, 2), Fraction(5, 3)]


@pytest.mark.parametrize("machine, bits", [(HOPPER, 16), (model.EIGHT_BITS, 8)])
def test_clocks_are_those_of_the_timeline(machine, bits):
    work = hopper_model.work(128, 96, machine)
    products, exponential = model.clocks(128, bits)
    assert 2 * work.product == hopper_model.ROWS * 96 * products
    assert work.softmax == hopper_model.ROWS * 96 * exponential
    # A block of keys: one byte an element in eight bits.
    assert work.copy == Fraction(96 * 128 * bits // 8) / HOPPER.copy_bytes


def test_a_kernel_on_the_timeline_gains_much_more_at_256_columns_than_at_64():
    """And less where every operation of the softmax counts, as in a kernel."""

    def gain(d, block_k, rest):
        options = {"d": d, "block_k": block_k, "rest": rest}
        sixteen, eight = (
            hopper_model.forward("turns", [16], machine=machine, **options).clocks
            for machine in (HOPPER, model.EIGHT_BITS)
        )
        return sixteen / eight

    assert 1 < gain(64, 128, True) < gain(64, 128, False) < 1.2
    assert 1.5 < gain(256, 80, True) < gain(256, 80, False) < 1.75


def test_quantization_pays_from_a_thousand_tokens_on():
    """It moves 11 bytes a number and saves 2 T operations."""
    for gpu in (H100, H200):
        ridge = gpu.flops_per_second / gpu.hbm_bytes_per_second
        assert model.break_even(gpu) == pytest.approx(11 / 2 * ridge, rel=0.01)
    assert 1100 < model.break_even(H200) < 1150
