"""The judge is judged: its inputs are as claimed, and it finds small errors."""

import contextlib
import functools
import math

import pytest
import torch
from device import DEVICE

from flashlib import testing
from flashlib.kernels import masks, masks_backward
from flashlib.reference import standard
from flashlib.score_mods import ScoreMod

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
    arguments = (q, k, v, do, dq + smallest, dk, dv)
    with refused(r"^dq\[0, 0, 0\]: error .* over the budget 3 x 0"):
        testing.assert_gradients_within_budget(*arguments, causal=True)


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

    def in_another_order(*arguments, generator, **options):
        generator = generator or torch.Generator().manual_seed(1)
        return evaluate(*arguments, generator=generator, **options)

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


# Inputs at which an evaluation in PyTorch overflows, underflows or resolves no score:
# (dtype, changes of the inputs, options). A change multiplies a tensor by a number;
# "like" makes all keys nearly equal, "positive" all elements at least 1.
FLAT = {"q": 0.01, "positive": True}  # all weights are about equal
EXTREMES = {
    "sums of weighted values": ("float16", FLAT | {"v": 1e4}, {}),
    "scores": ("float16", {"q": 120.0, "k": 120.0}, {"scale": 3e-5}),
    "negative scores": (
        "float16", {"positive": True, "q": 60.0, "k": -60.0}, {"scale": 1e-4},
    ),
    "tiny products": ("float16", {"q": 1e-4, "k": 1e-4}, {"scale": 1e8}),
    "equal scores": ("bfloat16", {"like": True, "q": 500.0}, {}),
    "dP": ("float16", {"k": 0.01, "v": 300.0, "do": 300.0}, {}),
    "dV": ("float16", FLAT | {"do": 1e3, "T_q": 70, "T_k": 3}, {}),
    "a saturated cap": ("float32", {"positive": True}, {"softcap": 1.0}),
    "a bias": ("float32", {}, {"slope": 1e30}),
}  # fmt: skip
# Here the kernels overflow or underflow as well.
BEYOND = {
    "dS": ("float16", {"q": 0.01, "k": 0.01, "dlse": 1e7}, {}),
    "tiny dS": ("float16", {"v": 2e-7}, {}),
    "subnormal values": ("float32", {"v": 1e-39}, {}),
    "float32 products": ("float32", {"q": 1e20, "k": 1e20}, {"scale": 1e-40}),
    "float32 negative scores": (
        "float32", {"positive": True, "q": 1e20, "k": -1e20}, {"scale": 1e-41},
    ),
    "float32 sums": ("float32", FLAT | {"v": 3e37}, {}),
    "a float32 bias": ("float32", {"T_q": 70}, {"slope": 3e37}),
}  # fmt: skip
# Of dq and dk only rounding is left: all keys are alike, or one has all the weight.
CANCELED = ("equal scores", "a bias", "a float32 bias")


def extreme(name):
    """q, k, v, do, dlse and options of an entry."""
    dtype, change, options = (EXTREMES | BEYOND)[name]
    T_q, T_k = change.get("T_q", 7), change.get("T_k", 60)
    inputs = testing.make_qkv(1, 1, T_q, 16, T_k=T_k)
    inputs += testing.make_qkv(1, 1, T_q, 16, seed=1)[:1]
    if "positive" in change:
        inputs = [1 + x.abs() for x in inputs]
    q, k, v, do = (
        (change.get(which, 1.0) * x).to(DEVICE, getattr(torch, dtype))
        for which, x in zip(("q", "k", "v", "do"), inputs, strict=True)
    )
    if "like" in change:
        k = k[:, :, :1] + 0.003 * k
    if "slope" in options:
        options = {"alibi_slopes": torch.tensor([options["slope"]], device=DEVICE)}
    return q, k, v, do, change.get("dlse", 0.0) * do[..., 0].float(), options


def assert_all_within_budget(inputs, found):
    """Judge found, {name: tensor} for o, lse, dq, dk and dv."""
    q, k, v, do, dlse, options = inputs
    o, lse, *gradients = (found[name] for name in ("o", "lse", "dq", "dk", "dv"))
    testing.assert_within_budget(q, k, v, o, lse, **options)
    arguments = (q, k, v, do, *gradients)
    testing.assert_gradients_within_budget(*arguments, dlse=dlse, **options)


def rounded_reference(inputs):
    """{name: the reference rounded to the dtype}."""
    q, k, v, do, dlse, options = inputs
    o, lse = testing.oracle(q, k, v, **options)
    gradients = testing.oracle_gradients(q, k, v, do, dlse=dlse, **options)
    dq, dk, dv = (x.to(q.dtype) for x in gradients)
    return {"o": o.to(q.dtype), "lse": lse.float(), "dq": dq, "dk": dk, "dv": dv}


def garbage(x):
    """Zeros, twice x, and x without its largest row, where they are not x itself."""
    size = x.abs() if x.ndim == 3 else testing.rms(x)
    largest = (size == size.max()).view(*size.shape, *(1,) * (x.ndim - 3))
    wrong = {"zeros": 0 * x, "twice": 2 * x, "a row": x.masked_fill(largest, 0.0)}
    return {what: y for what, y in wrong.items() if not torch.equal(x, y)}


@pytest.mark.parametrize("name", EXTREMES | BEYOND)
def test_where_pytorch_fails_garbage_is_refused(name, monkeypatch):
    """The rounded reference is not. Only where kernels fail, too, the judge may say
    that it cannot judge.
    """
    monkeypatch.setattr(testing, "DRAWS", 10)
    inputs = extreme(name)
    right = rounded_reference(inputs)
    assert_all_within_budget(inputs, right)
    error = (AssertionError, ValueError) if name in BEYOND else AssertionError
    for tensor in ("o", "lse", "dv") if name in CANCELED else right:
        for what, wrong in garbage(right[tensor]).items():
            with pytest.raises(error, match=rf"^{tensor}\["):
                assert_all_within_budget(inputs, {**right, tensor: wrong})
                pytest.fail(f"{tensor}: {what}")


@pytest.mark.parametrize("name", EXTREMES)
def test_where_pytorch_fails_the_kernels_pass(name):
    inputs = q, k, v, do, dlse, options = extreme(name)
    how = ScoreMod(
        options.get("scale", 0.25),
        softcap=options.get("softcap", 0.0),
        slopes=options.get("alibi_slopes"),
    )
    o, lse = masks.forward(q, k, v, how, None)
    dq, dk, dv, *_ = masks_backward.backward(q, k, v, o, lse, do, dlse, how, None)
    found = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    assert_all_within_budget(inputs, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [75.0, 90.0])
def test_what_a_gpu_flushes_may_be_zero(dtype, size):
    """Weights of e^-90, below 2^-126, and none above it."""
    q, k, v = testing.make_qkv(1, 1, 2, 16, dtype=dtype)
    do = testing.make_qkv(1, 1, 2, 16, dtype=dtype, seed=1)[0]
    allowed = (
        contextlib.nullcontext() if size == 90.0 else refused(r" is over the budget")
    )
    q[:], k[:, :, 0], k[:, :, 1] = 1.0, 0.0, -size / 16
    gradients = testing.oracle_gradients(q, k, v, do, scale=1.0)
    dq, dk, dv = (x.to(dtype) for x in gradients)
    assert (dv[:, :, 1] != 0.0).any()
    dv[:, :, 1] = 0.0
    with allowed:
        testing.assert_gradients_within_budget(q, k, v, do, dq, dk, dv, scale=1.0)
    options = {"sinks": torch.tensor([size])}
    o, lse = testing.oracle(q, 0.0 * k, v, **options)
    assert (o != 0.0).any()
    with allowed:
        found = 0.0 * o.to(dtype), lse.float()
        testing.assert_within_budget(q, 0.0 * k, v, *found, **options)


def test_what_cannot_be_judged_is_said():
    """Float32 does not resolve these two scores: PyTorch gives them the same weight."""
    q, k, v = testing.make_qkv(1, 1, 1, 16, T_k=2)
    q[..., 0], k[:, :, 1], k[..., 0] = 1.0, k[:, :, 0], 0.5
    k[:, :, 1, 0] += testing.EPS / 2
    o, lse = testing.oracle(q, k, v, scale=1e8)
    testing.assert_within_budget(q, k, v, o.float(), lse.float(), scale=1e8)
    with pytest.raises(ValueError, match=r"^o\[0, 0, 0\]: .* cannot be judged"):
        testing.assert_within_budget(q, k, v, v.mean(dim=2)[:, :, None], scale=1e8)
    with refused(r"^o\[0, 0, 0\]: .* 1 of 1 rows are over$"):
        testing.assert_within_budget(q, k, v, 9 * o.float(), scale=1e8)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("tensor", ["q", "k", "v", "do"])
def test_inputs_that_are_not_finite_cannot_be_judged(tensor, value):
    q, k, v, do, o, lse, gradients = evaluated(torch.float16)
    arguments = {"q": q, "k": k, "v": v, "do": do}
    arguments[tensor] = arguments[tensor].clone()
    arguments[tensor][0, 0, 1, 2] = value
    q, k, v, do = arguments.values()
    with pytest.raises(ValueError, match=r"expected inputs with a finite reference"):
        testing.assert_within_budget(q, k, v, o, lse, causal=True)
        testing.assert_gradients_within_budget(q, k, v, do, *gradients, causal=True)


def test_an_infinity_is_right_where_the_reference_overflows():
    inputs = extreme("dV")
    inputs[3].mul_(1.55)
    right = rounded_reference(inputs)
    assert right["dv"].isinf().any() and not right["dv"].isinf().all()
    assert_all_within_budget(inputs, right)
    largest = torch.finfo(torch.float16).max
    with refused(r"^dv\[.*: error"):
        assert_all_within_budget(inputs, right | {"dv": right["dv"].clamp(max=largest)})
    with refused(r"^dv\[.*not finite: -inf"):
        assert_all_within_budget(inputs, right | {"dv": -right["dv"]})


def test_rows_without_elements_are_right():
    q, k, v, _, o, lse, _ = evaluated(torch.float32)
    testing.assert_within_budget(q, k, v[..., :0], o[..., :0], lse, causal=True)


def test_float64_has_no_budget():
    q, k, v = (x.double() for x in testing.make_qkv(1, 1, 3, 16))
    with pytest.raises(ValueError, match=r"^q: expected a dtype of .*float64"):
        testing.assert_within_budget(q, k, v, testing.oracle(q, k, v)[0])
