"""What both tiled forward kernels must do alike: results in the budget on every kind of input, empty inputs,
repeats, bfloat16, offsets, many heads.
"""

import math

import pytest
import torch
from cases import CUDA, DEVICE, cases, far_apart

from flashlib import testing
from flashlib.kernels import flash1, flash2

pytestmark = pytest.mark.usefixtures("nan_filled")


@pytest.fixture(params=[flash1, flash2], ids=["flash1", "flash2"])
def step(request):
    return request.param


@pytest.mark.parametrize("case", cases(seed=1))
def test_forward(step, case):
    q, k, v = case.inputs()
    before = [x.clone() for x in (q, k, v)]
    o, lse = step.forward(q, k, v, case.causal, case.scale_value)
    testing.assert_within_budget(q, k, v, o, lse, causal=case.causal, scale=case.scale)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize("value", [-200.0, 200.0])
def test_every_score_is_equal_and_large(step, value):
    """Constant rows: the output is the mean of V and the log-sum-exp is the score plus ln T_k."""
    q = torch.ones(1, 1, 70, 16, device=DEVICE)
    k = q.clone()
    _, _, v = testing.make_qkv(1, 1, 70, 16, device=DEVICE)
    o, lse = step.forward(q, k, v, False, value / 16)
    testing.assert_within_budget(q, k, v, o, lse, scale=value / 16)


def test_increasing_scores_rescale_at_every_block(step):
    """The maximum moves in every block of keys, by far more than float32 can hold at once."""
    T = 203
    q = torch.ones(1, 1, T, 16, device=DEVICE)
    k = torch.linspace(-30, 30, T, device=DEVICE)[:, None].expand(1, 1, T, 16).contiguous()
    _, _, v = testing.make_qkv(1, 1, T, 16, device=DEVICE)
    for sign in (1.0, -1.0):
        o, lse = step.forward(q, sign * k, v, False, 0.4)
        testing.assert_within_budget(q, sign * k, v, o, lse, scale=0.4)


@pytest.mark.parametrize(
    "T_q, T_k", [(130, 3), (130, 66), (65, 64), (64, 65), (1, 130), (130, 1), (128, 64), (64, 128), (3, 130)]
)
def test_causal_mask_at_the_edges_of_blocks(step, T_q, T_k):
    q, k, v = testing.make_qkv(1, 2, T_q, 16, T_k=T_k, device=DEVICE)
    o, lse = step.forward(q, k, v, True, 0.25)
    testing.assert_within_budget(q, k, v, o, lse, causal=True, scale=0.25)
    blind = max(T_q - T_k, 0)
    assert (o[:, :, :blind] == 0).all() and (lse[:, :, :blind] == -math.inf).all()


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
    near = testing.make_qkv(3, 3, 3, 16, dtype=torch.float16, device=DEVICE)
    o, lse = step.forward(*far_apart(near, dimension), False, 0.25)
    testing.assert_within_budget(*near, o, lse, scale=0.25)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_more_heads_than_a_grid_dimension_holds(step):
    q, k, v = testing.make_qkv(35000, 2, 1, 16, T_k=3, dtype=torch.float16, device=DEVICE)
    o, lse = step.forward(q, k, v, False, 0.25)
    testing.assert_within_budget(q, k, v, o, lse, scale=0.25)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_long_sequences(step, d, causal):
    q, k, v = testing.make_qkv(
        1, 4, 4096, d, T_k=4096 + 77, H_kv=2, dtype=torch.bfloat16, device=DEVICE, layout="transposed"
    )
    o, lse = step.forward(q, k, v, causal, d**-0.5)
    testing.assert_within_budget(q, k, v, o, lse, causal=causal)
