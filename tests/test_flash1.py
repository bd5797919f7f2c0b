"""The tiled forward with keys in the outer loop, which keeps O, m and l in device memory."""

import math

import pytest
import torch
from cases import CUDA, DEVICE, cases

from flashlib import testing
from flashlib.kernels import flash1

pytestmark = pytest.mark.usefixtures("nan_filled")


@pytest.mark.parametrize("case", cases(seed=1))
def test_forward(case):
    q, k, v = case.inputs()
    before = [x.clone() for x in (q, k, v)]
    o, lse = flash1.forward(q, k, v, case.causal, case.scale_value)
    testing.assert_within_budget(q, k, v, o, lse, causal=case.causal, scale=case.scale)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def test_after_each_block_of_keys_the_state_is_that_of_the_keys_so_far():
    """O, m and l in device memory: a second launch carries on where the first one stopped."""
    q, k, v = testing.make_qkv(1, 2, 70, 16, T_k=192, device=DEVICE)
    o, m, l = (torch.zeros(1, 2, 70, *rest, device=DEVICE) for rest in ((16,), (), ()))
    m.fill_(-math.inf)
    for start in (0, 64, 128):
        part = slice(start, start + 64)
        flash1.launch(q, k[:, :, part], v[:, :, part], o, m, l, False, 0.25, flash1.INTERPRETER)
        so_far = slice(0, start + 64)
        lse = (m + l.log2()) * math.log(2)
        testing.assert_within_budget(q, k[:, :, so_far], v[:, :, so_far], o, lse, scale=0.25)


@pytest.mark.parametrize("value", [-200.0, 200.0])
def test_every_score_is_equal_and_large(value):
    """Constant rows: the output is the mean of V and the log-sum-exp is the score plus ln T_k."""
    q = torch.ones(1, 1, 70, 16, device=DEVICE)
    k = q.clone()
    _, _, v = testing.make_qkv(1, 1, 70, 16, device=DEVICE)
    o, lse = flash1.forward(q, k, v, False, value / 16)
    testing.assert_within_budget(q, k, v, o, lse, scale=value / 16)


def test_increasing_scores_rescale_at_every_block():
    """The maximum moves in every block of keys, by far more than float32 can hold at once."""
    T = 203
    q = torch.ones(1, 1, T, 16, device=DEVICE)
    k = torch.linspace(-30, 30, T, device=DEVICE)[:, None].expand(1, 1, T, 16).contiguous()
    _, _, v = testing.make_qkv(1, 1, T, 16, device=DEVICE)
    for sign in (1.0, -1.0):
        o, lse = flash1.forward(q, sign * k, v, False, 0.4)
        testing.assert_within_budget(q, sign * k, v, o, lse, scale=0.4)


@pytest.mark.parametrize(
    "T_q, T_k", [(130, 3), (130, 66), (65, 64), (64, 65), (1, 130), (130, 1), (128, 64), (64, 128), (3, 130)]
)
def test_causal_mask_at_the_edges_of_blocks(T_q, T_k):
    q, k, v = testing.make_qkv(1, 2, T_q, 16, T_k=T_k, device=DEVICE)
    o, lse = flash1.forward(q, k, v, True, 0.25)
    testing.assert_within_budget(q, k, v, o, lse, causal=True, scale=0.25)
    blind = max(T_q - T_k, 0)
    assert (o[:, :, :blind] == 0).all() and (lse[:, :, :blind] == -math.inf).all()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_memory_grows_with_T_and_not_with_its_square():
    B, H, T, d = 1, 8, 32768, 128
    q, k, v = testing.make_qkv(B, H, T, d, dtype=torch.bfloat16, device=DEVICE)
    flash1.forward(q[:, :, :256], k[:, :, :256], v[:, :, :256], True, 0.1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    flash1.forward(q, k, v, True, 0.1)
    torch.cuda.synchronize()
    # O in float32 and as it is returned; m, l, and the log-sum-exp with the terms of its sum.
    held = B * H * T * (d * (4 + 2) + 5 * 4)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * held


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_long_sequences(d, causal):
    q, k, v = testing.make_qkv(
        1, 4, 4096, d, T_k=4096 + 77, H_kv=2, dtype=torch.bfloat16, device=DEVICE, layout="transposed"
    )
    o, lse = flash1.forward(q, k, v, causal, d**-0.5)
    testing.assert_within_budget(q, k, v, o, lse, causal=causal)
