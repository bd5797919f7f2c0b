"""Attention in eight bits: PyTorch on a CPU, the kernel on a Hopper GPU."""

import math

import pytest
import torch
from device import DEVICE, HOPPER, on_cpu
from expected import refused, same, with_id

import flashlib.fp8
from flashlib import testing
from flashlib.kernels.hopper_host import HOPPER_WIDTHS
from flashlib.reference import fp8 as reference
from flashlib.reference import standard

pytestmark = pytest.mark.usefixtures("nan_filled")
runs = pytest.mark.skipif(
    DEVICE == "cuda" and not HOPPER, reason="needs a Hopper GPU or a CPU"
)
# B, H, H_kv, T_q, T_k: two tiles and blocks, their ends, groups, more keys than
# queries, and queries that see no key with a causal mask.
SHAPES = {
    "one tile": (1, 1, 1, 128, 128),
    "ragged": (2, 2, 2, 130, 203),
    "groups": (1, 4, 2, 65, 300),
    "few keys": (1, 2, 1, 200, 70),
    "one query": (2, 2, 1, 1, 257),
    "a block more": (1, 1, 1, 64, 129),
}
WIDTHS = HOPPER_WIDTHS if DEVICE == "cuda" else (64,)
BLOCK = flashlib.fp8.BLOCK
RECIPE = flashlib.fp8.RECIPE


def make(name, d=64, dtype=torch.bfloat16, shift=2.0):
    B, H, H_kv, T_q, T_k = SHAPES[name]
    options = {"H_kv": H_kv, "T_k": T_k, "dtype": dtype, "device": DEVICE}
    q, k, v = testing.make_qkv(B, H, T_q, d, **options)
    return q, k + shift, v


def rms(x):
    return x.double().square().mean().sqrt()


@runs
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("name", SHAPES)
def test_its_error_is_the_one_to_expect(name, d, causal):
    q, k, v = make(name, d)
    o, lse = flashlib.fp8.attention(q, k, v, causal=causal, return_lse=True)
    wide = [x.double() for x in (q, k, v)]
    wanted = standard.attention(*wide, causal=causal)
    expected = reference.deviation(*wide, causal=causal, recipe=RECIPE, block_k=BLOCK)
    sees = wanted[1].isfinite()
    assert not o[~sees].any() and (lse[~sees] == -math.inf).all()
    assert o.dtype == q.dtype and lse.dtype == torch.float32
    for x, y, deviation in zip((o, lse), wanted, expected, strict=True):
        # Few numbers of one draw: their error may be further from what is expected.
        near = 1.3 if x[sees].numel() > 5000 else 1.7
        assert rms(x[sees] - y[sees]) <= near * rms(deviation[sees])


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", HOPPER_WIDTHS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_computes_what_the_reference_does(name, d, causal):
    """Up to weights that are between two numbers, and what tensor cores lose."""
    found = flashlib.fp8.quantize(*make(name, d))
    o, lse = flashlib.fp8.attend(found, causal=causal, return_lse=True)
    wanted, of_lse = flashlib.fp8.in_pytorch(found, causal, d**-0.5)
    assert rms(o - wanted) <= 0.01 * rms(wanted)
    # A weight between two numbers changes by a sixteenth, and may be most of a row.
    sees = of_lse.isfinite()
    assert torch.equal(lse[~sees], of_lse[~sees])
    assert rms((lse - of_lse)[sees]) <= 5e-3
    assert torch.allclose(lse, of_lse, rtol=0.0, atol=1 / 16)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("d", HOPPER_WIDTHS)
def test_a_long_sequence_keeps_its_error(d):
    """In a single sum of tensor cores it would be a quarter of values with a mean: they
    cut off what 14 bits do not hold. Two levels lose two thousandths, at any length.
    """
    q, k, v = testing.make_qkv(
        1, 2, 128, d, T_k=32768, dtype=torch.bfloat16, device=DEVICE
    )
    v = v + 3.0
    o = flashlib.fp8.attention(q, k, v)
    wanted, _ = standard.attention(*(x.double() for x in (q, k, v)))
    assert -3e-3 < (o.double() / wanted).mean() - 1.0 < 1e-3
    assert rms(o - wanted) <= 0.01 * rms(wanted)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("d", HOPPER_WIDTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_thousand_calls_agree_in_every_bit(causal, d):
    q, k, v = testing.make_qkv(
        2, 4, 700, d, H_kv=2, dtype=torch.bfloat16, device=DEVICE
    )
    first = flashlib.fp8.attention(q, k, v, causal=causal, return_lse=True)
    found = flashlib.fp8.quantize(q, k, v)
    for _ in range(1000):
        again = flashlib.fp8.attend(found, causal=causal, return_lse=True)
        assert same(first, again)


@runs
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.3, -0.2, 0.0])
@pytest.mark.parametrize("smooth", [False, True])
def test_scales_of_any_sign(scale, smooth, dtype):
    q, k, v = make("ragged", dtype=dtype, shift=0.5)
    options = {"scale": scale, "smooth": smooth, "return_lse": True}
    o, lse = flashlib.fp8.attention(q, k, v, **options)
    wide = [x.double() for x in (q, k, v)]
    wanted, of_lse = standard.attention(*wide, scale=scale)
    assert o.dtype == dtype
    assert rms(o - wanted) <= 0.15 * rms(wanted) and rms(lse - of_lse) < 0.15


@runs
def test_values_of_very_different_sizes():
    """Blocks of values whose scales are far apart, and one of zeros."""
    q, k, v = make("groups")
    sizes = torch.tensor([1e3, 0.0, 1e-2], device=DEVICE).repeat_interleave(128)[:300]
    v = v * sizes[:, None].to(v.dtype)
    wide = [x.double() for x in (q, k, v)]
    o = flashlib.fp8.attention(q, k, v)
    wanted, _ = standard.attention(*wide)
    deviation, _ = reference.deviation(*wide, recipe=RECIPE, block_k=BLOCK)
    assert rms(o - wanted) <= 1.3 * rms(deviation)


@runs
def test_the_full_recipe_helps_where_there_are_outliers():
    """Half of the error of one scale per tensor, where the same two columns of queries
    and keys are larger.
    """
    q, k, v = testing.make_qkv(1, 2, 256, 64, dtype=torch.bfloat16, device=DEVICE)
    for x in (q, k):
        x[..., 5] *= 20**0.5
        x[..., 40] *= 12**0.5
    wide = [x.double() for x in (q, k, v)]
    wanted, _ = standard.attention(*wide)
    plain, _ = reference.attention(*wide, recipe=reference.PLAIN)
    o = flashlib.fp8.attention(q, k, v)
    assert rms(o - wanted) <= 0.5 * rms(plain - wanted)


@on_cpu
def test_a_cpu_takes_any_width():
    q, k, v = testing.make_qkv(1, 2, 5, 48, T_k=30, d_v=24, dtype=torch.float16)
    o = flashlib.fp8.attention(q, k, v, causal=True)
    wanted, _ = standard.attention(*(x.double() for x in (q, k, v)), causal=True)
    assert o.shape == wanted.shape and rms(o - wanted) < 0.1 * rms(wanted)


# -- errors


def test_other_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with refused(ValueError, r"q: expected a Hopper GPU \(.*flashlib.reference.fp8"):
        flashlib.fp8.check_hopper(torch.device("cuda"), 64, 64)


@pytest.mark.parametrize("d, d_v", [(80, 80), (128, 64), (64, 128)])
def test_other_widths_are_refused_on_a_gpu(monkeypatch, d, d_v):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    expected = rf"q: expected d = d_v, one of 64, 128, 256, got d = {d}, d_v = {d_v}"
    with refused(ValueError, expected):
        flashlib.fp8.check_hopper(torch.device("cuda"), d, d_v)


WRONG = [
    (TypeError, "x: expected a flashlib.fp8.Quantized, got tuple", tuple),
    (TypeError, "k: expected dtype torch.float8_e4m3fn",
     lambda x: x._replace(k=x.k.float())),
    (ValueError, r"k_scales: expected sizes \[1, 1, 1\]",
     lambda x: x._replace(k_scales=x.k_scales[..., :0])),
    (ValueError, r"v: expected sizes \[1, 1, 64, 128\]",
     lambda x: x._replace(v=x.v[..., :64])),
    (ValueError, "q_scales: expected a contiguous tensor",
     lambda x: x._replace(q_scales=x.q_scales.mT.contiguous().mT)),
    (ValueError, "q: expected a contiguous tensor",
     lambda x: x._replace(q=x.q.mT.contiguous().mT)),
    (TypeError, "shift: expected dtype torch.float32",
     lambda x: x._replace(shift=x.shift.double())),
    (ValueError, "k: expected 4 dimensions", lambda x: x._replace(k=x.k[0])),
    (ValueError, "k: expected at least one row", lambda x: without_keys(x)),
]  # fmt: skip


def without_keys(x):
    fields = x._asdict() | {"v": x.v[..., :0].contiguous(), "k": x.k[:, :, :0]}
    fields |= {name: fields[name][..., :0] for name in ("k_scales", "v_scales")}
    return type(x)(**fields)


@runs
@pytest.mark.parametrize("error, message, change", with_id(WRONG))
def test_what_is_no_quantized_is_refused(error, message, change):
    q, k, v = testing.make_qkv(1, 2, 6, 64, H_kv=1, dtype=torch.bfloat16, device=DEVICE)
    found = flashlib.fp8.quantize(q, k, v)
    with refused(error, message):
        flashlib.fp8.attend(change(found))


ARGUMENTS = [
    (TypeError, "causal: expected True or False", {"causal": 1}),
    (TypeError, "return_lse: expected True or False", {"return_lse": None}),
    (ValueError, "scale: expected a finite number", {"scale": math.inf}),
]


@runs
@pytest.mark.parametrize("error, message, options", with_id(ARGUMENTS))
def test_a_wrong_argument_is_named(error, message, options):
    q, k, v = make("one tile")
    with refused(error, message):
        flashlib.fp8.attention(q, k, v, **options)


@runs
def test_a_wrong_dtype_is_named():
    found = flashlib.fp8.quantize(*make("one tile"))
    expected = "dtype: expected torch.float16 or torch.bfloat16, got torch.float32"
    with refused(TypeError, expected):
        flashlib.fp8.attend(found, dtype=torch.float32)
