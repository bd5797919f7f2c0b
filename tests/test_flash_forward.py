"""What both tiled forward kernels must do alike: empty inputs, repeats, bfloat16, offsets, many heads."""

import math

import numpy as np
import pytest
import torch
from cases import CUDA, DEVICE

from flashlib import testing
from flashlib.kernels import flash1, flash2

pytestmark = pytest.mark.usefixtures("nan_filled")


@pytest.fixture(params=[flash1, flash2], ids=["flash1", "flash2"])
def step(request):
    return request.param


@pytest.mark.parametrize(
    "shape", [(0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 0, 5, 5)], ids=["B=0", "T_q=0", "T_k=0", "H=0"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty(step, shape, causal):
    B, H, T_q, T_k = shape
    q, k, v = (torch.zeros(B, H, T, 16, device=DEVICE) for T in (T_q, T_k, T_k))
    o, lse = step.forward(q, k, v, causal, 0.25)
    assert o.shape == (B, H, T_q, 16) and (o == 0).all()
    assert lse.shape == (B, H, T_q) and (lse == -math.inf).all()


@pytest.mark.parametrize("T", [70, 113])
def test_two_runs_agree_in_every_bit(step, T):
    """What one thread stores and another loads shows here where a barrier is missing."""
    q, k, v = testing.make_qkv(2, 6, T, 40, T_k=113, H_kv=2, dtype=torch.float16, device=DEVICE)
    first = step.forward(q, k, v, True, 0.2)
    for _ in range(250 if CUDA else 1):
        assert all(torch.equal(a, b) for a, b in zip(step.forward(q, k, v, True, 0.2), first, strict=True))


@pytest.mark.skipif(CUDA, reason="on a GPU bfloat16 is a case like the others")
def test_bfloat16_on_a_cpu_is_float32_rounded(step):
    q, k, v = testing.make_qkv(1, 2, 17, 40, T_k=33, dtype=torch.bfloat16)
    o, lse = step.forward(q, k, v, True, 0.2)
    o32, lse32 = step.forward(q.float(), k.float(), v.float(), True, 0.2)
    assert torch.equal(o, o32.bfloat16()) and torch.equal(lse, lse32)
    testing.assert_within_budget(q, k, v, o, lse, causal=True, scale=0.2)


@pytest.mark.parametrize("dimension", ["batch", "head", "row"])
def test_offsets_beyond_int32(step, dimension):
    """Views whose last element lies more than 2^31 elements after the first; only the pages that are
    touched take memory.
    """
    reach = 2**30 + 2**20
    strides = {"batch": (reach, 48, 16, 1), "head": (48, reach, 16, 1), "row": (144, 48, reach, 1)}[dimension]
    if CUDA:
        storage = torch.zeros(2 * reach + 2**20, dtype=torch.float16, device=DEVICE)
    else:
        storage = torch.from_numpy(np.zeros(2 * reach + 2**20, dtype=np.float16))
    near = testing.make_qkv(3, 3, 3, 16, dtype=torch.float16, device=DEVICE)
    far = [storage.as_strided(x.shape, strides, 2**18 * place).copy_(x) for place, x in enumerate(near)]
    o, lse = step.forward(*far, False, 0.25)
    testing.assert_within_budget(*near, o, lse, scale=0.25)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_more_heads_than_a_grid_dimension_holds(step):
    q, k, v = testing.make_qkv(35000, 2, 1, 16, T_k=3, dtype=torch.float16, device=DEVICE)
    o, lse = step.forward(q, k, v, False, 0.25)
    testing.assert_within_budget(q, k, v, o, lse, scale=0.25)
