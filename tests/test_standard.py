"""The three materializing kernels; test_gradients.py judges them together."""

import math

import pytest
import torch
from cases import DEVICE

from flashlib import testing
from flashlib.kernels import standard
from flashlib.reference import standard as reference

pytestmark = pytest.mark.usefixtures("nan_filled")


@pytest.mark.parametrize("causal", [False, True])
def test_scores_are_float32_and_masked_in_place(causal):
    options = {"dtype": torch.float16, "device": DEVICE}
    q, k, _ = testing.make_qkv(2, 6, 33, 40, T_k=70, H_kv=2, **options)
    s = standard.scores(q, k, causal, 0.3)
    wanted = reference.scores(q.double(), k.double(), 0.3)
    if causal:
        wanted = wanted.masked_fill(~reference.causal_mask(33, 70, DEVICE), -math.inf)
    assert s.dtype == torch.float32 and s.is_contiguous()
    assert torch.equal(torch.isneginf(s), torch.isneginf(wanted))
    seen = ~torch.isneginf(wanted)
    pytorch = 0.3 * (q.float() @ reference.repeat_heads(k, 6).float().mT)
    assert_like_pytorch(*(x.masked_fill(~seen, 0) for x in (s, pytorch, wanted)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_softmax(dtype):
    generator = torch.Generator().manual_seed(0)
    s = (60 * torch.randn(2, 3, 5, 71, generator=generator)).to(DEVICE)
    s[:, :, 2] = -math.inf
    s[:, :, 3, 1:] = -math.inf
    p, lse = standard.softmax(s, dtype)
    assert p.dtype == dtype and lse.dtype == torch.float32
    assert (p[:, :, 2] == 0).all() and (lse[:, :, 2] == -math.inf).all()
    assert (p[:, :, 3, 0] == 1).all() and torch.equal(lse[:, :, 3], s[:, :, 3, 0])
    wanted = reference.softmax(s.double())
    assert_like_pytorch(p, torch.softmax(s, dim=-1).nan_to_num(0.0).to(dtype), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_output(dtype):
    options = {"dtype": dtype, "device": DEVICE, "layout": "strided"}
    _, _, v = testing.make_qkv(2, 6, 1, 16, T_k=70, H_kv=2, d_v=40, **options)
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(2, 6, 33, 70, generator=generator).to(DEVICE, dtype)
    o = standard.output(p, v)
    assert o.dtype == dtype
    wanted = reference.output(p.double(), v.double())
    assert_like_pytorch(o, reference.output(p, v), wanted)


def assert_like_pytorch(x, pytorch, wanted):
    """Each row of x is off by at most twice PyTorch's error, plus rounding."""
    assert torch.isfinite(x).all()
    budget = 2 * testing.rms(pytorch.double() - wanted)
    budget += torch.finfo(x.dtype).eps * testing.rms(wanted)
    assert (testing.rms(x.double() - wanted) <= budget).all()
