"""Scores as functions: one definition for reference and kernels; derivatives."""

import random

import numpy as np
import pytest
import torch
from cases import output_gradients
from device import DEVICE
from expected import refused, same
from masks_of_tests import function_of_text
from scores_of_tests import (
    cubed,
    of_cubed,
    of_softplus,
    of_weighed,
    softplus,
    some_scores,
    weighed,
)

import flashlib
from flashlib import masks, testing
from flashlib.masks import where
from flashlib.reference import masks as reference
from flashlib.score_functions import (
    Score,
    alibi,
    exp,
    log,
    of_tanh,
    softcap,
    tanh,
)

pytestmark = pytest.mark.usefixtures("nan_filled")


# -- functions


@pytest.mark.parametrize("place", range(11))
def test_derivatives_are_those_of_autograd(place):
    score = some_scores(2, 3, 7, random.Random(0))[place]
    score.check_derivative(3 * torch.randn(2, 3, 5, 7).to(DEVICE))
    score.check_derivative()


def test_a_wrong_derivative_is_found():
    with refused(ValueError, r"derivative: expected .* at s = .* of \[0, 0, 0, 0\], g"):
        Score(cubed, 0.05, derivative=cubed).check_derivative()
    with refused(ValueError, "derivative: expected a function, got None"):
        Score(cubed, 0.05).check_derivative()


def test_functions_mean_what_they_say():
    """Pair by pair, from the words of the docstrings."""
    s, slopes = torch.randn(2, 3, 4, 6, dtype=torch.float64), torch.rand(2, 3)
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 3, 1), (1, 0, 2, 5)):
        x, distance, place = s[b, h, i, j], abs(i + 2 - j), (b, h, i, j)
        meant = {
            softcap(1.5): 1.5 * torch.tanh(x / 1.5),
            alibi(slopes): x - slopes[b, h].double() * distance,
            alibi(slopes[0]): x - slopes[0, h].double() * distance,
            softcap(1.5).then(alibi(slopes[1])): 1.5 * torch.tanh(x / 1.5)
            - slopes[1, h].double() * distance,
        }
        for score, wanted in meant.items():
            torch.testing.assert_close(score.change(s)[place], wanted)


def test_keywords_are_shorthands():
    q, k, v = testing.make_qkv(2, 4, 9, 16, T_k=12, H_kv=2, device=DEVICE)
    slopes = torch.tensor([0.5, 0.2, 0.1, 0.0], device=DEVICE)
    found = flashlib.attention(q, k, v, score=softcap(1.5).then(alibi(slopes)))
    wanted = flashlib.attention(q, k, v, softcap=1.5, alibi_slopes=slopes)
    torch.testing.assert_close(found, wanted)


def test_equal_definitions_have_one_key():
    slopes, cube = torch.ones(2, 4), Score(cubed, 0.5, derivative=of_cubed)
    assert softcap(3).key == softcap(3.0).key
    assert alibi(slopes).key == alibi(slopes + 1).key
    assert softcap(3).then(cube).key == softcap(3).then(cube).key
    different = [
        softcap(3), softcap(4), alibi(slopes), alibi(slopes[0]), alibi(slopes.half()),
        cube, Score(cubed, 0.5), Score(cubed, 1.0), Score(cubed, 1),
        Score(cubed, 0.5, derivative=cubed), softcap(3).then(cube), cube.then(cube),
        cube.then(softcap(3)),
    ]  # fmt: skip
    assert len({score.key for score in different}) == len(different)


WRONG = {
    "s, b, h, p, j: s * limit": "score: .* got 'limit' in f: pass it as an argument",
    "s, b, h, p, j: s // 2": "score: .* got // or % in f",
    "s, b, h, p, j: s + s[p]": r"score: expected at\(x, a, .* got s\[p\] in f",
    "s, b, h, p, j: s**3": r"score: expected products .* got s \*\* 3 in f",
    "b, h, p, j: p": r"score: expected a function of \(s, b, h, p, j\) and 0 more",
    "x, b, h, p, j: x": r"score: .* \(s, b, h, p, j\) and 0 more, got f\(x, b, h, p, j",
    "s, b, h, p, j: p - j": "score: .* evaluate on tensors, got TypeError: it returns",
    "s, b, h, p, j: s > 0": "score: .* evaluate on tensors, got TypeError: it returns",
    "s, b, h, p, j: s / s": "score: expected a number at s = 0, got nan",
    "s, b, h, p, j: s * ((j < 2) + (p < 3))": r"score: .* two booleans: .* got add",
    "s, b, h, p, j: 1.0 / s": "score: expected a number at s = 0, got inf",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_a_function_may_not_do_is_named(text):
    parameters, result = text.split(": ", 1)
    function = function_of_text(f"def f({parameters}): return {result}\n", {"limit": 3})
    with pytest.raises((TypeError, ValueError), match=f"^{WRONG[text]}"):
        Score(function)
    if "0 more" not in WRONG[text]:  # a derivative is judged like a function
        wrong = WRONG[text].replace("score: ", "derivative: ")
        with pytest.raises((TypeError, ValueError), match=f"^{wrong}"):
            Score(
                function_of_text("def f(s, b, h, p, j): return s\n", {}),
                derivative=function,
            )


def test_arguments_of_scores_are_checked():
    for call, message in (
        (lambda: Score(lambda s, b, h, p, j: s), "score: .* by def, got a lambda"),
        (
            lambda: Score(cubed, True),
            "score: expected numbers and tensors as arguments",
        ),
        (lambda: Score(cubed, "a"), "score: expected numbers and tensors as arguments"),
        (lambda: Score(cubed, float("nan")), "score: expected numbers up to 1e37, got"),
        (lambda: Score(cubed, 2**31), "score: expected integers of 32 bits, got"),
        (
            lambda: Score(cubed, torch.ones(3).double()),
            "score: expected tensors of float32, float16, bfloat16, int32, int64 or bo",
        ),
        (lambda: softcap(0), r"softcap: expected a number from 1e-30 to 1e\+30, got 0"),
        (lambda: softcap("a"), "softcap: expected a real number, got str"),
        (lambda: softcap(np.float32(3)), "softcap: .* number, got numpy.float32"),
        (lambda: softcap(3).then(masks.causal()), "score: expected a Score, got Mask"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call()


# -- calls; test_mask_functions.py has random ones


def test_a_score_without_derivative_has_no_backward_pass():
    q, k, v = testing.make_qkv(1, 2, 9, 16, device=DEVICE)
    wanted = flashlib.attention(q, k, v, score=Score(cubed, 0.1, derivative=of_cubed))
    score, starts = (
        Score(cubed, 0.1),
        torch.tensor([0, 9], dtype=torch.int32).to(DEVICE),
    )
    both = score.then(softcap(3))
    assert torch.equal(flashlib.attention(q, k, v, score=score), wanted)
    leaf, sinks = q.clone().requires_grad_(), torch.zeros(2, device=DEVICE)
    with torch.no_grad():
        assert torch.equal(flashlib.attention(leaf, k, v, score=score), wanted)
    packed = [x[0].transpose(0, 1) for x in (leaf, k, v)]
    for call in (
        lambda: flashlib.attention(leaf, k, v, score=score),
        lambda: flashlib.attention(q, k, leaf, score=both),
        lambda: flashlib.attention(q, k, v, score=score, sinks=sinks.requires_grad_()),
        lambda: flashlib.attention_varlen(*packed, starts, starts, 9, 9, score=score),
    ):
        with refused(ValueError, r"score: expected a Score with derivative=\.\.\. whe"):
            call()


def test_packed_sequences_have_their_own_positions():
    q, k, v = (
        x[0].transpose(0, 1).detach().requires_grad_()
        for x in testing.make_qkv(1, 4, 50, 16, T_k=60, H_kv=2, device=DEVICE)
    )
    packing = testing.packing_of((20, 0, 30), (25, 5, 30), DEVICE)
    slopes = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    score = Score(cubed, 0.1, derivative=of_cubed).then(alibi(slopes))
    options = {"score": score, "causal": True}
    o, lse = flashlib.attention_varlen(q, k, v, *packing, return_lse=True, **options)
    do = torch.ones_like(o)
    found = torch.autograd.grad(o, (q, k, v), do)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = reference.attention_varlen(*exact, *packing[:2], **options)
    torch.testing.assert_close((o, lse), tuple(x.float() for x in wanted))
    tensors = [x.detach() for x in (q, k, v, o, lse)]
    testing.assert_packed_within_budget(
        *tensors, packing, do=do, gradients=found, **options
    )


def test_a_derivative_of_hidden_pairs_may_be_anything():
    q, k, v = testing.make_qkv(1, 2, 20, 16, device=DEVICE, requires_grad=True)
    weights = torch.rand(1, 1, 20, 20, generator=torch.Generator().manual_seed(0))
    weights = weights.to(DEVICE)
    results = []
    for hidden in (1.0, float("nan")):
        own = weights.where(torch.ones_like(weights).tril() > 0, hidden)
        score = Score(weighed, own, derivative=of_weighed)
        o = flashlib.attention(q, k, v, score=score, causal=True)
        results.append((o, *torch.autograd.grad(o.sum(), (q, k, v))))
        found = reference.gradients(
            *(x.detach() for x in (q, k, v)),
            torch.ones_like(o),
            score=score,
            causal=True,
        )
        for x, y in zip(found, results[-1][1:], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert same(*results)


def growing(s, b, h, p, j, T):
    """No number for a query or a key after the last one."""
    return s + log(1.0 * (T - p)) + log(1.0 * (T - j))


def one(s, b, h, p, j, T):
    return 1.0


@pytest.mark.parametrize("d", [16, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_a_score_of_pairs_outside_of_s_may_be_anything(causal, d):
    q, k, v = testing.make_qkv(1, 2, 70, d, device=DEVICE, requires_grad=True)
    options = {"score": Score(growing, 70, derivative=one), "causal": causal}
    o = flashlib.attention(q, k, v, **options)
    testing.assert_within_budget(q, k, v, o, **options)
    do = torch.ones_like(o)
    found = torch.autograd.grad(o, (q, k, v), do)
    testing.assert_gradients_within_budget(q, k, v, do, *found, **options)


def test_calls_repeat_every_bit():
    q, k, v = testing.make_qkv(2, 4, 40, 16, H_kv=2, device=DEVICE, requires_grad=True)
    do, _ = output_gradients(q, v)
    score = softcap(2.0).then(Score(softplus, 3, derivative=of_softplus))
    found = []
    for _ in range(2):
        o = flashlib.attention(q, k, v, score=score, causal=True)
        found.append((o, *torch.autograd.grad(o, (q, k, v), do)))
    assert same(*found)


def test_tensors_of_a_score_may_change():
    """A plan, a compiled kernel and the key of a score depend on no value in it."""
    q, k, v = testing.make_qkv(1, 2, 20, 16, device=DEVICE)
    for n in range(3):
        score = alibi(torch.tensor([0.1 * n, 0.3], device=DEVICE))
        o, lse = flashlib.attention(q, k, v, score=score, return_lse=True)
        testing.assert_within_budget(q, k, v, o, lse, score=score)


def test_wrong_scores_of_calls_are_refused():
    q, k, v = testing.make_qkv(2, 4, 9, 16, H_kv=2, device=DEVICE)
    ones, few = torch.ones(2, 4, device=DEVICE), torch.ones(3, device=DEVICE)
    mask = masks.documents(torch.zeros(9, dtype=torch.int64, device=DEVICE))
    many = alibi(ones)
    for _ in range(5):
        many = many.then(alibi(ones))
    learned = alibi(ones.clone().requires_grad_())
    for options, message in (
        ({"score": 3}, "score: expected a flashlib.score_functions.Score or None, got"),
        ({"score": masks.causal()}, "score: expected a flashlib.score_functions.Score"),
        ({"score": alibi(few)}, r"score: expected slopes \[H\], at least \[4\], got "),
        ({"score": alibi(ones[:1])}, r"score: expected slopes \[B, H\], at least \[2"),
        ({"score": learned}, "score: expected tensors without a gradient, which bias"),
        ({"score": alibi(ones.to("meta"))}, "score: expected the device of q, .*, got"),
        ({"score": many, "mask": mask}, "score: .* at most 6 tensors, with the mask"),
        (
            {"score": many, "method": "flash1"},
            "score: expected None for method 'flash1",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            flashlib.attention(q, k, v, **options)
    flashlib.attention(q, k, v, score=many)


def test_scores_in_compiled_functions():
    """Scores that are made inside or outside of the function."""
    q, k, v = testing.make_qkv(1, 2, 9, 16, device=DEVICE, requires_grad=True)
    slopes = torch.tensor([0.2, 0.1], device=DEVICE)
    outside = softcap(2.0).then(Score(cubed, 0.1, derivative=of_cubed))

    def call(q, slopes):
        inside = Score(cubed, 0.05, derivative=of_cubed).then(alibi(slopes))
        first = flashlib.attention(q, k, v, score=outside, causal=True)
        return flashlib.attention(first, k, v, score=inside)

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found, wanted = compiled(q, slopes), call(q, slopes)
    assert torch.equal(found, wanted)
    gradients = [torch.autograd.grad(o.sum(), (q, k, v)) for o in (found, wanted)]
    assert same(*gradients)


def test_named_functions_are_those_of_kernels():
    """On a range of scores, next to PyTorch's in float64."""
    s = torch.linspace(-6, 6, 97, device=DEVICE)

    def through(function):
        score, x = Score(function), torch.zeros(1, 1, 97, 16, device=DEVICE)
        x[0, 0, :, 0] = s
        key = torch.zeros(1, 1, 1, 16, device=DEVICE)
        key[..., 0] = 1.0
        _, lse = flashlib.attention(
            x, key, key, scale=1.0, score=score, return_lse=True
        )
        return lse[0, 0], score.change(s.double()[None, None, :, None])[0, 0, :, 0]

    for function in (of_exp, of_log, of_tanhs, of_where, of_positions):
        found, wanted = through(function)
        torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=2e-6)


def of_exp(s, b, h, p, j):
    return exp(s)


def of_log(s, b, h, p, j):
    return log(abs(s) + 0.5)


def of_positions(s, b, h, p, j):
    return s * exp(-abs(p - j - 5)) + log(p + 100)


def of_tanhs(s, b, h, p, j):
    return tanh(s) + of_tanh(s)


def of_where(s, b, h, p, j):
    return where(s > 0.5, s, -0.5 * s)
