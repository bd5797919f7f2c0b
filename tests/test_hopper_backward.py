"""The backward kernels for compute capability 9.0, on such a GPU, under a limit of time
as test_hopper.py.
"""

import pytest
import torch
from cases import (
    in_memory_order,
    output_gradients,
    pairwise,
    refused,
    same,
)
from test_hopper import (
    EDGES,
    FACTORS,
    WINDOWS,
    inputs,
    on_hopper,
    parametrized,
    surrounded,
)

import flashlib
from flashlib import testing
from flashlib.kernels import hopper, hopper_backward, host

pytestmark = pytest.mark.usefixtures("nan_filled")


def judged(q, k, v, do, dlse, causal, scale=None):
    """``(dq, dk, dv)`` after hopper's forward pass."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    o, lse = hopper.forward(q, k, v, causal, scale)
    assert host.hopper_refusal(q, k, v) is None
    given = (q, k, v, o, lse, do, dlse, causal, scale)
    found = hopper_backward.backward(*given)
    options = {"causal": causal, "scale": scale, "dlse": dlse}
    testing.assert_gradients_within_budget(q, k, v, do, *found, **options)
    return found


@on_hopper
@parametrized(pairwise(FACTORS, seed=23))
def test_backward(case):
    q, k, v = case.inputs()
    layout = {"contiguous": "expanded", "packed": "transposed"}.get(case.layout)
    do, dlse = output_gradients(q, q, layout=layout or case.layout)
    given = (q, k, v, do, dlse)
    before = [x.clone() for x in given]
    found = judged(*given, case.causal, case.scale_value)
    assert all(map(in_memory_order, found, (q, k, v)))
    assert same(given, before)


@on_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("T_q, T_k", EDGES)
def test_backward_with_a_mask_at_the_edges_of_blocks(T_q, T_k, d):
    q, k, v = inputs(1, 4, T_q, d, T_k=T_k, H_kv=2)
    found = judged(q, k, v, *output_gradients(q, q), True)
    assert (found[0][:, :, : max(T_q - T_k, 0)] == 0).all()


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("group", [1, 8])
def test_each_part_of_dq_is_in_memory_before_the_next_is_added(group, d, causal):
    """Programs that fill the GPU wait for each other, most of all those of groups. With
    a counter that did not release the sum, every call at d = 128 lost rows.
    """
    q, k, v = inputs(4, 16, 4096, d, H_kv=16 // group)
    do, dlse = output_gradients(q, q)
    o, lse = hopper.forward(q, k, v, causal, d**-0.5)
    given = (q, k, v, o, lse, do, dlse, causal, d**-0.5)
    found = hopper_backward.backward(*given)
    for _ in range(30):
        assert same(found, hopper_backward.backward(*given))
    q, do, dq, dlse = (x[:1, :group] for x in (q, do, found[0], dlse))
    k, v, dk, dv = (x[:1, :1] for x in (k, v, *found[1:]))
    options = {"causal": causal, "dlse": dlse}
    testing.assert_gradients_within_budget(q, k, v, do, dq, dk, dv, **options)


@on_hopper
@pytest.mark.parametrize("d", hopper_backward.WINDOW_WIDTHS)
@pytest.mark.parametrize("T_q, T_k, left", WINDOWS)
def test_backward_of_a_window(T_q, T_k, left, d):
    q, k, v = inputs(2, 4, T_q, d, T_k=T_k, H_kv=2)
    do, dlse = output_gradients(q, q)
    o, lse = hopper.forward(q, k, v, True, d**-0.5, left)
    given = (q, k, v, o, lse, do, dlse, True, d**-0.5)
    found = hopper_backward.backward(*given, left=left)
    testing.assert_gradients_within_budget(
        q, k, v, do, *found, window=(left, 0), dlse=dlse
    )
    for _ in range(30):
        assert same(found, hopper_backward.backward(*given, left=left))


@on_hopper
@pytest.mark.parametrize("method", ["auto", "hopper"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_public_function_slides_on_it(d, method):
    """Forward, and backward where there is a kernel; elsewhere those of masks."""
    q, k, v = inputs(1, 4, 700, d, H_kv=2, requires_grad=True)
    do, _ = output_gradients(q, q)
    options = {"causal": True, "window": (200, None)}
    o, lse = flashlib.attention(q, k, v, method=method, return_lse=True, **options)
    expected = hopper.forward(q.detach(), k.detach(), v.detach(), True, d**-0.5, 200)
    assert same((o.detach(), lse.detach()), expected)
    found = torch.autograd.grad(o, (q, k, v), do)
    given = (q.detach(), k.detach(), v.detach(), do, *found)
    testing.assert_gradients_within_budget(*given, window=(200, 0))


@on_hopper
@pytest.mark.parametrize("d", [64, 128])
def test_a_window_without_a_limit_is_a_causal_mask(d):
    leaves = [x.requires_grad_() for x in inputs(1, 2, 300, d)]
    found = [
        torch.autograd.grad(flashlib.attention(*leaves, **mask).sum(), leaves)
        for mask in ({"causal": True}, {"window": (None, 0)})
    ]
    assert same(*found)


@on_hopper
def test_a_window_that_it_cannot_take():
    q, k, v = inputs(1, 2, 100, 64)
    with refused(ValueError, "method: 'hopper' expected causal or .*, got 3"):
        flashlib.attention(q, k, v, window=(5, 3), method="hopper")
    with refused(ValueError, "softcap: expected None for method 'hopper'"):
        flashlib.attention(q, k, v, softcap=5.0, method="hopper")


@on_hopper
def test_rows_that_see_nothing_give_and_take_nothing():
    """Gradients of zero, exactly, however large dO and dL are there."""
    q, k, v = inputs(1, 2, 300, 64, T_k=3)
    do, dlse = output_gradients(q, q)
    do[:, :, :297], dlse[:, :, :297] = 1e30, -1e30
    found = judged(q, k, v, do, dlse, True)
    assert (found[0][:, :, :297] == 0).all()


@on_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_backward_of_a_slice_of_a_larger_tensor(causal, d):
    q, k, v = (surrounded(x) for x in inputs(2, 4, 150, d, T_k=203, H_kv=2))
    do, dlse = output_gradients(q, q)
    judged(q, k, v, surrounded(do), dlse, causal)


@on_hopper
@pytest.mark.parametrize("logit", [-120.0, 120.0])
@pytest.mark.parametrize("causal", [False, True])
def test_logits_far_from_zero(logit, causal):
    """float32 holds neither exp(-120) nor exp(120), only differences from L."""
    q, k, v = inputs(1, 1, 150, 64, T_k=203)
    q[..., 0], k[..., 0] = 1.0, 8.0 * logit
    judged(q, k, v, *output_gradients(q, q), causal)
