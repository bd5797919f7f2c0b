"""The tiled forward with keys in the outer loop, which keeps O, m and l in device memory."""

import math

import pytest
import torch
from cases import CUDA, DEVICE

from flashlib import testing
from flashlib.kernels import flash1

pytestmark = pytest.mark.usefixtures("nan_filled")


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
