"""What flash1, flash2 and the steps between them do alike; on a GPU see test_gpu.py."""

import functools
import math

import pytest
import torch
from cases import EMPTY, FACTORS, cases, each_level, far_apart
from device import DEVICE
from expected import in_memory_order, same

from flashlib import testing
from flashlib.kernels import flash1, flash2, inputs, tables
from flashlib.kernels.steps import flash2 as steps

pytestmark = pytest.mark.usefixtures("nan_filled")
SPLIT = ((192, 128), (136, 16), (192, 192))  # d, d_v
FORWARDS = {"flash1": flash1.forward, "flash2": flash2.forward}
STEPS = {step: functools.partial(steps.forward, step=step) for step in steps.STEPS}


@pytest.fixture(params=FORWARDS)
def forward(request):
    return FORWARDS[request.param]


@pytest.fixture(params=FORWARDS | STEPS)
def any_forward(request):
    return (FORWARDS | STEPS)[request.param]


def judge(forward, q, k, v, causal, scale):
    o, lse = forward(q, k, v, causal, scale)
    testing.assert_within_budget(q, k, v, o, lse, causal=causal, scale=scale)
    return o, lse


def check_case(forward, case):
    q, k, v = case.inputs()
    before = [x.clone() for x in (q, k, v)]
    o, _ = judge(forward, q, k, v, case.causal, case.scale_value)
    assert same((q, k, v), before)
    return o, q


@pytest.mark.parametrize("case", cases(seed=1))
def test_forward(forward, case):
    assert in_memory_order(*check_case(forward, case))


@pytest.mark.parametrize("case", each_level(FACTORS, seed=1), ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_forward_of_each_step(step, case):
    check_case(STEPS[step], case)


@pytest.mark.parametrize(
    "T_q, T_k",
    [(130, 66), (66, 130), (65, 64), (64, 65), (66, 64), (1, 130), (130, 1)],
)
def test_causal_mask_at_the_edges_of_blocks(any_forward, T_q, T_k):
    q, k, v = testing.make_qkv(1, 2, T_q, 16, T_k=T_k, device=DEVICE)
    o, lse = judge(any_forward, q, k, v, True, 0.25)
    blind = max(T_q - T_k, 0)
    assert (o[:, :, :blind] == 0).all() and (lse[:, :, :blind] == -math.inf).all()


@pytest.mark.parametrize("d, d_v", SPLIT)
@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_are_wider_than_128_and_than_values(causal, d, d_v):
    """Their tiles have 128 columns and 64, where a device has a row for them."""
    q, k, v = testing.make_qkv(
        1, 2, 70, d, T_k=90, H_kv=1, d_v=d_v, dtype=torch.float16, device=DEVICE
    )
    judge(flash2.forward, q, k, v, causal, 0.1)
    judge(flash1.forward, q, k, v, causal, 0.1)
    for table, split in (
        (flash2.CONFIGURATIONS, d_v <= 128),
        (flash1.CONFIGURATIONS, False),
    ):
        row = tables.configuration("a kernel", table, (q, k, v), causal)
        tile = tables.compiled_for(row, inputs.sizes(q, k, v))["TILE"]
        assert ([128, 64] if split else [256, 0]) == [tile.BLOCK_D, tile.REST]


@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("causal", [False, True])
def test_empty(any_forward, shape, causal):
    B, H, T_q, T_k = shape
    q, k, v = (torch.zeros(B, H, T, 16, device=DEVICE) for T in (T_q, T_k, T_k))
    o, lse = any_forward(q, k, v, causal, 0.25)
    assert o.shape == (B, H, T_q, 16) and (o == 0).all()
    assert lse.shape == (B, H, T_q) and (lse == -math.inf).all()


@pytest.mark.parametrize("dimension", ["batch", "head", "row"])
def test_offsets_beyond_int32(forward, dimension):
    near = testing.make_qkv(3, 3, 3, 16, dtype=torch.float16, device=DEVICE)
    o, lse = forward(*far_apart(near, dimension), False, 0.25)
    testing.assert_within_budget(*near, o, lse, scale=0.25)
