"""The materialising backward kernels, fed by the standard forward: both are judged."""

import pytest
import torch
from cases import CUDA, DEVICE, SHORT, cases

from flashlib import testing
from flashlib.kernels import gradients, standard

pytestmark = pytest.mark.usefixtures("nan_filled")


def output_gradients(q, v, *, layout="contiguous", with_dlse=False):
    """do ``[B, H, T_q, d_v]`` in a layout, and dlse ``[B, H, T_q]`` with a stride, or zeros."""
    do, _, _ = testing.make_qkv(
        *q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device, seed=1, layout=layout
    )
    dlse, _, _ = testing.make_qkv(*q.shape[:3], 16, device=q.device, seed=2)
    return do, dlse[..., 0] if with_dlse else torch.zeros_like(dlse[..., 0])


def backward(q, k, v, do, dlse, causal, scale):
    """``(dq, dk, dv)`` from the kernels, whose forward runs first."""
    o, _, p = standard.forward(q, k, v, causal, scale)
    return gradients.backward(q, k, v, p, o, do, dlse, scale)


@pytest.mark.parametrize("case", cases(seed=2, factors=SHORT))
def test_forward_and_backward(case):
    q, k, v = case.inputs()
    layout = {"contiguous": "expanded", "packed": "transposed"}.get(case.layout, case.layout)
    do, dlse = output_gradients(q, v, layout=layout, with_dlse=case.d_v == 24)
    o, lse, p = standard.forward(q, k, v, case.causal, case.scale_value)
    testing.assert_within_budget(q, k, v, o, lse, causal=case.causal, scale=case.scale)
    found = gradients.backward(q, k, v, p, o, do, dlse, case.scale_value)
    testing.assert_gradients_within_budget(
        q, k, v, do, *found, causal=case.causal, scale=case.scale, dlse=dlse
    )


def test_rows_that_see_nothing_give_and_take_nothing():
    """Queries before the first key, and their dO: gradients of zero, exactly, whatever stands in dO."""
    q, k, v = testing.make_qkv(1, 2, 70, 16, T_k=3, device=DEVICE)
    do, dlse = output_gradients(q, v, with_dlse=True)
    dq, dk, dv = backward(q, k, v, do, dlse, True, 0.25)
    assert (dq[:, :, :67] == 0).all()
    testing.assert_gradients_within_budget(q, k, v, do, dq, dk, dv, causal=True, scale=0.25, dlse=dlse)


@pytest.mark.parametrize(
    "shape", [(0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 0, 5, 5)], ids=["B=0", "T_q=0", "T_k=0", "H=0"]
)
def test_empty(shape):
    B, H, T_q, T_k = shape
    q, k, v = (torch.ones(B, H, T, 16, device=DEVICE) for T in (T_q, T_k, T_k))
    o, lse, p = standard.forward(q, k, v, True, 0.25)
    for x, gradient in zip((q, k, v), gradients.backward(q, k, v, p, o, q, lse, 0.25), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


def test_two_runs_agree_in_every_bit():
    q, k, v = testing.make_qkv(1, 3, 33, 40, H_kv=1, dtype=torch.float16, device=DEVICE)
    do, dlse = output_gradients(q, v)
    first = backward(q, k, v, do, dlse, True, 0.2)
    for _ in range(250 if CUDA else 1):
        again = backward(q, k, v, do, dlse, True, 0.2)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.skipif(CUDA, reason="on a GPU bfloat16 is a case like the others")
def test_bfloat16_on_a_cpu_is_float32_rounded():
    q, k, v = testing.make_qkv(1, 6, 17, 40, T_k=33, H_kv=2, dtype=torch.bfloat16)
    do, dlse = output_gradients(q, v)
    found = backward(q, k, v, do, dlse, True, 0.2)
    testing.assert_gradients_within_budget(q, k, v, do, *found, causal=True, scale=0.2)
