"""The materializing kernels, forward and backward."""

import pytest
import torch
from cases import NARROW, cases, output_gradients
from device import DEVICE
from expected import same

from flashlib import testing
from flashlib.kernels import gradients, standard

pytestmark = pytest.mark.usefixtures("nan_filled")


@pytest.mark.parametrize("case", cases(seed=2, factors=NARROW))
def test_forward_and_backward(case):
    q, k, v = case.inputs()
    do, dlse = case.output_gradients(q, v)
    o, lse, p = standard.forward(q, k, v, case.causal, case.scale_value)
    testing.assert_within_budget(q, k, v, o, lse, causal=case.causal, scale=case.scale)
    assert p.dtype == q.dtype and p.shape == (*q.shape[:3], k.shape[2])
    found = gradients.backward(q, k, v, p, o, do, dlse, case.scale_value)
    testing.assert_gradients_within_budget(
        q, k, v, do, *found, causal=case.causal, scale=case.scale, dlse=dlse
    )


@pytest.mark.gpu
def test_250_runs_agree_in_every_bit():
    q, k, v = testing.make_qkv(1, 3, 33, 40, H_kv=1, dtype=torch.float16, device=DEVICE)
    do, dlse = output_gradients(q, v)

    def run():
        o, _, p = standard.forward(q, k, v, True, 0.2)
        return gradients.backward(q, k, v, p, o, do, dlse, 0.2)

    first = run()
    for _ in range(250):
        assert same(run(), first)
