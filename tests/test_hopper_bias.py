"""A bias that the copy engine brings to shared memory, in the kernels for compute
capability 9.0, with their roles as threads. tests/test_hopper_scores.py judges it on a
GPU.
"""

import math

import pytest
import roles
import torch
from device import on_cpu
from hopper_threads import BACKWARD_MODULES, FORWARD_MODULES, threads

from flashlib import score_mods, testing
from flashlib.kernels import gluon_bias, hopper, hopper_backward, masks

pytestmark = on_cpu
COPIES = ("make_bias_ring", "refill_bias", "read_bias", "skip_bias")
COPIES += ("bias_tiles", "copy_bias", "less_copied_bias")
# (T_q, T_k, causal, the shape of the bias before T_q and T_k)
CASES = [(130, 200, False, (1, 2)), (200, 200, True, (1, 1)), (300, 136, True, (2, 2))]
each_case = pytest.mark.parametrize(("T_q", "T_k", "causal", "outer"), CASES)
SCALE = 0.1


def problem(T_q, T_k, d, outer):
    q, k, v = testing.make_qkv(2, 2, T_q, d, T_k=T_k, H_kv=1, dtype=torch.float16)
    bias = 2.0 * torch.randn(*outer, T_q, T_k)
    bias[torch.rand(bias.shape) < 0.1] = -math.inf
    return q, k, v, bias.half()


@each_case
@pytest.mark.parametrize("d", [64, 128])
def test_forward(d, T_q, T_k, causal, outer, monkeypatch):
    """Barriers, phases and slots, whatever the order of the roles."""
    functions = (*roles.FORWARD, *COPIES)
    threads("forward_kernel", hopper, functions, FORWARD_MODULES, monkeypatch)
    q, k, v, bias = problem(T_q, T_k, d, outer)
    assert gluon_bias.bias_descriptor(bias, q, k, 64) is not None
    score_mod = score_mods.unchanged(causal, SCALE)._replace(bias=bias)
    o, lse = hopper.forward(q, k, v, score_mod)
    options = {"causal": causal, "scale": SCALE, "bias": bias}
    testing.assert_within_budget(q, k, v, o, lse, **options)


@each_case
@pytest.mark.parametrize("d", hopper_backward.FUSED)
def test_backward(d, T_q, T_k, causal, outer, monkeypatch):
    """The same, where the bias comes to where dS will be."""
    functions = (*roles.BACKWARD, *COPIES)
    threads("keys_kernel", hopper_backward, functions, BACKWARD_MODULES, monkeypatch)
    q, k, v, bias = problem(T_q, T_k, d, outer)
    score_mod = score_mods.unchanged(causal, SCALE)._replace(bias=bias)
    o, lse = masks.forward(q, k, v, score_mod)
    do, dlse = torch.randn(q.shape).half(), torch.randn(q.shape[:3])
    found = hopper_backward.backward(q, k, v, o, lse, do, dlse, score_mod)
    options = {"causal": causal, "scale": SCALE, "bias": bias, "dlse": dlse}
    testing.assert_gradients_within_budget(q, k, v, do, *found, **options)
