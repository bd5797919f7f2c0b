"""Rounding to eight bits by kernels, next to the reference."""

import pytest
import torch
from device import DEVICE
from expected import refused, same, with_id
from torch._subclasses import FakeTensorMode

import flashlib.fp8
from flashlib import cache_checks, testing
from flashlib.fp8 import Quantized
from flashlib.iomodel import fp8 as model
from flashlib.kernels import fp8 as kernels
from flashlib.reference import fp8 as reference
from flashlib.reference import standard
from flashlib.reference.fp8 import Rounded

pytestmark = pytest.mark.usefixtures("nan_filled")
SHAPES = {
    "one block": {"B": 1, "H": 2, "T_q": 64, "d": 64},
    "ragged": {"B": 2, "H": 4, "T_q": 70, "T_k": 203, "H_kv": 2, "d": 80, "d_v": 24},
    "wide": {"B": 1, "H": 2, "T_q": 5, "T_k": 130, "H_kv": 1, "d": 128},
    "packed": {"B": 2, "H": 2, "T_q": 65, "d": 16, "layout": "packed"},
    "strided": {"B": 1, "H": 2, "T_q": 90, "d": 48, "layout": "strided"},
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def make(name, dtype=torch.float32):
    q, k, v = testing.make_qkv(**SHAPES[name], dtype=dtype, device=DEVICE)
    return q, k + 3.0, v


def quantize(q, k, v, transform=True, smooth=True, seed=0):
    """The public function; for float32, which it refuses, the kernels alone."""
    if q.dtype != torch.float32:
        options = {"transform": transform, "smooth": smooth, "seed": seed}
        return flashlib.fp8.quantize(q, k, v, **options)
    sign = reference.signs(q.shape[3], seed, q.device) if transform else None
    return Quantized(*kernels.quantize(q, k, v, sign, smooth))


# What the kernels round by.
RECIPE = reference.FULL._replace(k=kernels.KEYS, v=kernels.KEYS)


def blocks_of(scales, T):
    """Scales of blocks ``[B, H, blocks]`` for every row, ``[B, H, T, 1]``."""
    return scales.repeat_interleave(kernels.KEYS, dim=2)[:, :, :T, None]


def in_order(found, T_k):
    """The values of a Quantized, ``[B, H_kv, T_k, d_v]``, in the order of keys."""
    stored = found.v.float().mT
    order = reference.key_order(stored.shape[2]).to(stored.device)
    values = torch.empty_like(stored)
    values[:, :, order] = stored
    assert not values[:, :, T_k:].any()
    return values[:, :, :T_k]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_without_the_transform_it_is_the_reference_in_every_bit(name, dtype):
    q, k, v = make(name, dtype)
    found = quantize(q, k, v, transform=False, smooth=False)
    T_k = k.shape[2]
    sides = (
        (q, 1, found.q.float(), found.q_scales[..., None]),
        (k, kernels.KEYS, found.k.float(), blocks_of(found.k_scales, T_k)),
        (v, kernels.KEYS, in_order(found, T_k), blocks_of(found.v_scales, T_k)),
    )
    for x, per, values, scales in sides:
        wanted = reference.quantize(x.float(), per)
        assert torch.equal(scales, wanted.scales)
        assert torch.equal(values, wanted.values)
    assert found.shift is None


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("transform", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_every_number_is_the_nearest_one(name, transform, smooth):
    """Up to what float32 moves a number that is between two."""
    q, k, v = make(name)
    found = quantize(q, k, v, transform=transform, smooth=smooth, seed=5)
    recipe = RECIPE._replace(transform=transform, smooth=smooth)
    wide, keys, mean = reference.prepare(q.double(), k.double(), recipe, seed=5)
    if smooth:
        shift = standard.scores(q.double(), mean, 1.0)[..., 0]
        assert torch.allclose(found.shift.double(), shift, rtol=1e-5, atol=1e-4)
    for x, per, values, scales in (
        (wide, 1, found.q, found.q_scales[..., None]),
        (keys, kernels.KEYS, found.k, blocks_of(found.k_scales, k.shape[2])),
    ):
        wanted = reference.scales(x, per)
        assert torch.allclose(scales.double(), wanted, rtol=1e-4)
        y = x / scales.double()
        error = (values.double() - y).abs()
        # A number is a sum of up to 64 in float32, and less the sum of the means.
        moved = 16 * 2.0**-23 * max(q.abs().max(), k.abs().max()) / scales.double()
        assert (error <= 0.5 * reference.spacing(y) + moved).all()


def test_the_seed_chooses_the_signs_and_nothing_else_changes():
    q, k, v = make("one block")
    first, again, other = (quantize(q, k, v, seed=seed) for seed in (1, 1, 2))
    assert same([x.float() for x in first], [x.float() for x in again])
    assert not torch.equal(first.q.float(), other.q.float())
    assert torch.equal(first.v.float(), other.v.float())
    assert torch.equal(first.shift, other.shift)


def test_what_a_mode_makes_is_not_kept_for_other_calls():
    of_this_test = 64, 12345, torch.device(DEVICE)
    with FakeTensorMode():
        flashlib.fp8.signs(*of_this_test)
    sign = flashlib.fp8.signs(*of_this_test)
    assert torch.equal(sign, reference.signs(*of_this_test))
    assert sign is flashlib.fp8.signs(*of_this_test)


def test_signs_are_drawn_on_the_host_whatever_the_default_device_is():
    with torch.device("meta"):
        assert torch.equal(reference.signs(64, 3, "cpu"), reference.signs(64, 3, "cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_the_result_has_the_error_to_expect(dtype):
    """With heads of queries that share keys, of which the values are in order again."""
    q, k, v = testing.make_qkv(
        1, 4, 128, 64, T_k=256, H_kv=2, dtype=dtype, device=DEVICE
    )
    k = k + 4.0
    found = quantize(q, k, v)
    o, lse = reference.attend(
        Rounded(found.q.float(), found.q_scales[..., None]),
        Rounded(found.k.float(), blocks_of(found.k_scales, 256)),
        Rounded(in_order(found, 256), blocks_of(found.v_scales, 256)),
        causal=True, scale=0.125, block_k=kernels.KEYS,
    )  # fmt: skip
    lse = lse + 0.125 * found.shift
    wide = [x.double() for x in (q, k, v)]
    wanted = standard.attention(*wide, causal=True)
    expected = reference.deviation(
        *wide, causal=True, recipe=RECIPE, block_k=kernels.KEYS
    )
    for x, y, deviation in zip((o, lse), wanted, expected, strict=True):
        ratio = (x - y).square().mean() / deviation.square().mean()
        assert 0.8 < ratio.sqrt() < 1.2


def test_zeros_stay_zeros():
    q, k, v = (torch.zeros_like(x) for x in make("ragged"))
    found = quantize(q, k, v)
    for x in (found.q, found.k, found.v, found.shift):
        assert not x.float().any()
    assert (found.k_scales == 1.0).all()


def test_its_bytes_are_those_counted():
    B, H, T, d = 1, 2, 128, 64
    q, k, v = testing.make_qkv(B, H, T, d, dtype=torch.float16, device=DEVICE)
    found = quantize(q, k, v)
    mean, *rest = model.quantize_bytes(T, d, B * H, 2, kernels.KEYS)
    assert mean.read_bytes == k.nbytes
    written = sum(x.written_bytes for x in rest)
    assert written == sum(x.nbytes for x in found[:6])


WIDE = torch.zeros(1, 2, 3, 40, dtype=torch.float16, device=DEVICE)
WRONG = [
    (ValueError, "q: expected a head dimension that 16 divides, got 40",
     {"q": WIDE, "k": WIDE}),
    (ValueError, "q: expected at least one row", {"q": WIDE[:, :, :0, :16]}),
    (TypeError, "seed: expected an integer", {"seed": 1.0}),
    (TypeError, "smooth: expected True or False", {"smooth": 1}),
    (TypeError, "q: expected dtype torch.float16 or torch.bfloat16, got",
     {x: WIDE[..., :16].float() for x in "qkv"}),
    (NotImplementedError, "flashlib.fp8.quantize: it has no gradient",
     {"q": WIDE[..., :16].clone().requires_grad_()}),
]  # fmt: skip


@pytest.mark.parametrize("error, message, changes", with_id(WRONG))
def test_a_wrong_argument_is_named(error, message, changes):
    x = WIDE[..., :16]
    with refused(error, message):
        flashlib.fp8.quantize(**{"q": x, "k": x, "v": x} | changes)


def test_gpus_without_the_type_are_refused(monkeypatch):
    def refuse(name, device):
        raise ValueError(f"{name}: {device.type}")

    monkeypatch.setattr(cache_checks, "check_eight_bits", refuse)
    q, k, v = make("one block", torch.float16)
    with pytest.raises(ValueError, match=f"^q: {DEVICE}"):
        quantize(q, k, v)
