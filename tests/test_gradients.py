"""The materializing backward kernels, fed by the standard forward: both are judged."""

import pytest
import torch
from cases import CUDA, DEVICE, SHORT, Case, cases, on_cpu, output_gradients, same

from flashlib import testing
from flashlib.kernels import gradients, standard

pytestmark = pytest.mark.usefixtures("nan_filled")


def backward(q, k, v, do, dlse, causal, scale):
    """``(dq, dk, dv)`` from the kernels, whose forward runs first."""
    o, _, p = standard.forward(q, k, v, causal, scale)
    return gradients.backward(q, k, v, p, o, do, dlse, scale)


@pytest.mark.parametrize("case", cases(seed=2, factors=SHORT))
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


def test_two_runs_agree_in_every_bit():
    q, k, v = testing.make_qkv(1, 3, 33, 40, H_kv=1, dtype=torch.float16, device=DEVICE)
    do, dlse = output_gradients(q, v)
    first = backward(q, k, v, do, dlse, True, 0.2)
    for _ in range(250 if CUDA else 1):
        again = backward(q, k, v, do, dlse, True, 0.2)
        assert same(again, first)


@on_cpu
def test_bfloat16_on_a_cpu_is_float32_rounded():
    kind = ("contiguous", "bfloat16", True, 1.0, 0.2)
    test_forward_and_backward(Case(17, 33, 40, "d", (6, 2), *kind))
