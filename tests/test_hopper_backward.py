"""The backward kernels for compute capability 9.0, on such a GPU.

Barriers can wait for ever. On a GPU run this file under a limit of time: `timeout 600
python -m pytest ...`.
"""

import pytest
import torch
from cases import DEVICE, in_memory_order, output_gradients, pairwise, same
from test_hopper import EDGES, FACTORS, inputs, on_hopper, parametrized, surrounded

from flashlib import testing
from flashlib.kernels import hopper, hopper_backward, host

pytestmark = pytest.mark.usefixtures("nan_filled")
BACKWARD_FACTORS = {**FACTORS, "d": (64, 128)}


@pytest.fixture(params=[True, False], ids=["split", "fused"])
def deterministic(request):
    return request.param


def gradients(q, k, v, do, dlse, causal, scale, deterministic):
    """``(dq, dk, dv)`` after hopper's forward pass."""
    o, lse = hopper.forward(q, k, v, causal, scale)
    assert host.hopper_refusal(q, k, v, hopper_backward.WIDTHS) is None
    return hopper_backward.backward(
        q, k, v, o, lse, do, dlse, causal, scale, deterministic
    )


@on_hopper
@parametrized(pairwise(BACKWARD_FACTORS, seed=23))
def test_backward(case, deterministic):
    q, k, v = case.inputs()
    layout = {"packed": "transposed"}.get(case.layout, case.layout)
    do, dlse = output_gradients(q, q, layout=layout)
    given = (q, k, v, do, dlse)
    before = [x.clone() for x in given]
    found = gradients(*given, case.causal, case.scale_value, deterministic)
    testing.assert_gradients_within_budget(
        q, k, v, do, *found, causal=case.causal, scale=case.scale, dlse=dlse
    )
    assert all(map(in_memory_order, found, (q, k, v)))
    assert same(given, before)


@on_hopper
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("T_q, T_k", EDGES)
def test_backward_with_a_mask_at_the_edges_of_blocks(T_q, T_k, d, deterministic):
    q, k, v = inputs(1, 4, T_q, d, T_k=T_k, H_kv=2)
    do, dlse = output_gradients(q, q)
    found = gradients(q, k, v, do, dlse, True, d**-0.5, deterministic)
    assert (found[0][:, :, : max(T_q - T_k, 0)] == 0).all()
    testing.assert_gradients_within_budget(q, k, v, do, *found, causal=True, dlse=dlse)


@on_hopper
def test_rows_that_see_nothing_give_and_take_nothing(deterministic):
    """Gradients of zero, exactly, however large dO and dL are there."""
    q, k, v = inputs(1, 2, 300, 64, T_k=3)
    do, dlse = output_gradients(q, q)
    do[:, :, :297], dlse[:, :, :297] = 1e30, -1e30
    found = gradients(q, k, v, do, dlse, True, 0.125, deterministic)
    assert (found[0][:, :, :297] == 0).all()
    testing.assert_gradients_within_budget(
        q, k, v, do, *found, causal=True, scale=0.125, dlse=dlse
    )


@on_hopper
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_backward_of_a_slice_of_a_larger_tensor(causal, d, deterministic):
    q, k, v = (surrounded(x) for x in inputs(2, 4, 150, d, T_k=203, H_kv=2))
    do, dlse = output_gradients(q, q)
    found = gradients(q, k, v, surrounded(do), dlse, causal, d**-0.5, deterministic)
    testing.assert_gradients_within_budget(
        q, k, v, do, *found, causal=causal, dlse=dlse
    )


@on_hopper
@pytest.mark.parametrize("logit", [-120.0, 120.0])
@pytest.mark.parametrize("causal", [False, True])
def test_logits_far_from_zero(logit, causal, deterministic):
    """float32 holds neither exp(-120) nor exp(120), only differences from L."""
    q, k, v = inputs(1, 1, 150, 64, T_k=203)
    q[..., 0], k[..., 0] = 1.0, 8.0 * logit
    do, dlse = output_gradients(q, q)
    found = gradients(q, k, v, do, dlse, causal, 0.125, deterministic)
    testing.assert_gradients_within_budget(
        q, k, v, do, *found, causal=causal, scale=0.125, dlse=dlse
    )


@on_hopper
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_backward_of_long_sequences_repeats_in_every_bit(d, causal):
    q, k, v = inputs(1, 4, 4096, d, T_k=4096 + 77, H_kv=2, layout="transposed")
    do, dlse = output_gradients(q, q, layout="transposed")
    o, lse = hopper.forward(q, k, v, causal, d**-0.5)
    given = (q, k, v, o, lse, do, dlse, causal, d**-0.5)
    found = hopper_backward.backward(*given)
    testing.assert_gradients_within_budget(
        q, k, v, do, *found, causal=causal, dlse=dlse
    )
    differs = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(250):
        for a, b in zip(hopper_backward.backward(*given), found, strict=True):
            differs |= (a != b).any()
    assert not differs
