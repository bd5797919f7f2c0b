"""The judge is judged: its inputs are as claimed, and it finds small errors."""

import functools
import math

import pytest
import torch
from cases import DEVICE

from flashlib import testing
from flashlib.reference import standard

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.usefixtures("nan_filled")
def test_fresh_tensors_are_nan():
    for dtype in DTYPES:
        assert torch.isnan(torch.empty(1000, dtype=dtype, device=DEVICE)).all()


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_layouts(layout):
    sizes = {"T_k": 9, "H_kv": 2, "d_v": 24, "device": DEVICE}
    q, k, v = testing.make_qkv(2, 6, 17, 40, layout=layout, requires_grad=True, **sizes)
    assert all(x.requires_grad and x.is_leaf for x in (q, k, v))
    assert q.shape == (2, 6, 17, 40)
    assert (k.shape, v.shape) == ((2, 2, 9, 40), (2, 2, 9, 24))
    assert all(torch.isfinite(x).all() for x in (q, k, v))
    plain = testing.make_qkv(2, 6, 17, 40, **sizes)
    for x, y in zip((q, k, v), plain, strict=True):
        assert torch.equal(x, y[:, :1].expand_as(y) if layout == "expanded" else y)
    shared = q.untyped_storage().data_ptr()
    claims = {
        "contiguous": lambda x: x.is_contiguous(),
        "transposed": lambda x: x.transpose(1, 2).is_contiguous(),
        "packed": lambda x: x.untyped_storage().data_ptr() == shared,
        "strided": lambda x: x.stride(3) == 2,
        "unaligned": lambda x: x.data_ptr() % 16 != 0 and x.stride(2) % 2 == 1,
        "expanded": lambda x: x.stride(1) == 0,
    }
    assert all(claims[layout](x) for x in (q, k, v))


def test_memory_around_a_view_is_nan():
    q, _, _ = testing.make_qkv(1, 1, 3, 16, layout="strided")
    around = q.as_strided((1, 1, 3, 33), (99, 99, 33, 1), 0)
    assert (
        torch.isnan(around[..., 0::2]).all()
        and not torch.isnan(around[..., 1::2]).any()
    )


def test_inputs_depend_on_the_seed():
    a, b, c = (testing.make_qkv(1, 1, 3, 16, seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_magnitude_is_that_of_the_scores():
    q, k, _ = testing.make_qkv(2, 4, 113, 64, magnitude=60.0)
    s = standard.scores(q, k)
    assert 50 < s.std() < 70 and s.max() > 200 and s.min() < -200


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match=r"layout: expected .*'diagonal'"):
        testing.make_qkv(1, 1, 3, 16, layout="diagonal")


def refused(match):
    return pytest.raises(AssertionError, match=match)


def evaluated(dtype, *, seed=0, **changes):
    """Inputs, an evaluation with other roundings, and its gradients."""
    sizes = {"T_k": 33, "H_kv": 1, "d_v": 24} | changes
    q, k, v = testing.make_qkv(2, 2, 17, 40, dtype=dtype, seed=seed, **sizes)
    do, _, _ = testing.make_qkv(2, 2, 17, 24, dtype=dtype, seed=seed + 1)
    generator = torch.Generator().manual_seed(1000 + seed)
    o, lse = testing.pytorch(q, k, v, causal=True, generator=generator)
    gradients = testing.pytorch_gradients(q, k, v, do, causal=True, generator=generator)
    return q, k, v, do, o.to(dtype), lse, [x.to(dtype) for x in gradients]


@pytest.mark.parametrize("magnitude", [1.0, 60.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(2))
def test_another_order_of_summation_is_within_the_budget(dtype, magnitude, seed):
    q, k, v, do, o, lse, gradients = evaluated(dtype, seed=seed, magnitude=magnitude)
    testing.assert_within_budget(q, k, v, o, lse, causal=True)
    testing.assert_gradients_within_budget(q, k, v, do, *gradients, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tensor", ["o", "lse", "dq", "dk", "dv"])
def test_one_row_that_is_slightly_off_is_named(tensor, dtype):
    """Thirty-two units in the last place of one row, where the budget allows a few."""
    q, k, v, do, o, lse, (dq, dk, dv) = evaluated(dtype)
    tensors = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    wrong = tensors[tensor].clone()
    wrong[1, 0, 3] *= 1 + 32 * torch.finfo(wrong.dtype).eps
    if tensor == "lse":
        wrong[1, 0, 3] += 32 * torch.finfo(torch.float32).eps * (1 + lse[1, 0, 3].abs())
    tensors[tensor] = wrong
    with refused(
        rf"^{tensor}\[1, 0, 3\]: error .* over the budget .* 1 of \d+ rows are over"
    ):
        testing.assert_within_budget(q, k, v, tensors["o"], tensors["lse"], causal=True)
        testing.assert_gradients_within_budget(
            q, k, v, do, tensors["dq"], tensors["dk"], tensors["dv"], causal=True
        )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_named(value):
    q, k, v, do, o, lse, (dq, dk, dv) = evaluated(torch.float32)
    wrong = o.clone()
    wrong[0, 1, 2, 5] = value
    with refused(r"^o\[0, 1, 2, 5\]: not finite"):
        testing.assert_within_budget(q, k, v, wrong, lse, causal=True)
    dk = dk.clone()
    dk[1, 0, 4, 1] = value
    with refused(r"^dk\[1, 0, 4, 1\]: not finite"):
        testing.assert_gradients_within_budget(q, k, v, do, dq, dk, dv, causal=True)


def test_rows_that_see_nothing_are_exact():
    q, k, v = testing.make_qkv(1, 1, 5, 16, T_k=2)
    o, lse = testing.pytorch(q, k, v, causal=True)
    do = torch.ones_like(o)
    dq, dk, dv = testing.pytorch_gradients(q, k, v, do, causal=True)
    testing.assert_within_budget(q, k, v, o, lse, causal=True)
    testing.assert_gradients_within_budget(q, k, v, do, dq, dk, dv, causal=True)
    smallest = torch.finfo(torch.float32).tiny
    with refused(r"^o\[0, 0, 0\]: error .* over the budget 2 x 0"):
        testing.assert_within_budget(q, k, v, o + smallest, lse, causal=True)
    finite = lse.masked_fill(torch.isneginf(lse), -1e30)
    with refused(r"^lse\[0, 0, 0\]"):
        testing.assert_within_budget(q, k, v, o, finite, causal=True)
    given = (q, k, v, do, dq + smallest, dk, dv)
    with refused(r"^dq\[0, 0, 0\]: error .* over the budget 3 x 0"):
        testing.assert_gradients_within_budget(*given, causal=True)


@pytest.mark.parametrize("seed", [8, 37])
def test_a_difference_that_should_be_zero_may_be_rounded(seed):
    """With one key dP = D, but a kernel may add up the two in different orders."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator)
    q, do = draw(2, 2, 6, 203, 16)
    k, v = draw(2, 2, 6, 1, 16)
    terms = do * v
    dp = sum(terms.unbind(-1))
    delta = terms
    while delta.shape[-1] > 1:
        delta = sum(delta.chunk(2, dim=-1))
    dq = 0.25 * (dp[..., None] - delta) * k
    testing.assert_gradients_within_budget(q, k, v, do, dq, None, None)


def test_a_kernel_adds_terms_from_the_first_to_the_last(monkeypatch):
    """Here these partial sums grow large, those of a random order do not. On a GPU no
    evaluation of PyTorch's need be in that order.
    """
    evaluate = testing.pytorch_gradients

    def in_another_order(*given, generator, **options):
        generator = generator or torch.Generator().manual_seed(1)
        return evaluate(*given, generator=generator, **options)

    monkeypatch.setattr(testing, "pytorch_gradients", in_another_order)
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    q, k, v = draw(1, 4, 203, 64), draw(1, 4, 1, 64), draw(1, 4, 1, 64)
    do = draw(1, 4, 203, 64).abs() * v.sign()
    do[..., 32:] *= -1
    terms = do * v
    dp, delta = (
        sum(terms.unbind(-1)),
        sum((terms[..., :32] + terms[..., 32:]).unbind(-1)),
    )
    dq = 0.125 * (dp - delta)[..., None] * k
    testing.assert_gradients_within_budget(q, k, v, do, dq, None, None)


def test_shape_and_dtype_are_judged():
    q, k, v, do, o, lse, (dq, _, dv) = evaluated(torch.float16)
    for wrong, name in (
        ((o.float(), lse), "o"),
        ((o[:1], lse), "o"),
        ((o, lse.half()), "lse"),
    ):
        with refused(rf"^{name}: expected \["):
            testing.assert_within_budget(q, k, v, *wrong, causal=True)
    with refused(r"^dk: expected \["):
        testing.assert_gradients_within_budget(q, k, v, do, dq, dq, dv, causal=True)
