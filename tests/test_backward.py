"""The tiled backward pass in its two forms, and the chapter's two algorithms."""

import math

import pytest
import torch
from cases import EMPTY, SHORT, cases, each_level, far_apart, output_gradients
from device import CUDA, DEVICE
from expected import in_memory_order, same
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashlib import testing
from flashlib.kernels import backward, flash2
from flashlib.kernels.steps import backward as steps

pytestmark = pytest.mark.usefixtures("nan_filled")


def run(q, k, v, do, dlse, causal, scale, deterministic=True):
    """``(dq, dk, dv)``, after a forward pass."""
    o, lse = flash2.forward(q, k, v, causal, scale)
    return backward.backward(q, k, v, o, lse, do, dlse, causal, scale, deterministic)


def judged(q, k, v, causal, scale, deterministic):
    """Run and judge; returns the gradients."""
    do, dlse = output_gradients(q, v)
    found = run(q, k, v, do, dlse, causal, scale, deterministic)
    options = {"causal": causal, "scale": scale, "dlse": dlse}
    testing.assert_gradients_within_budget(q, k, v, do, *found, **options)
    return found


def forms(case):
    """Both forms on a GPU; in the interpreter each case takes one of them."""
    return (True, False) if CUDA else ((case.T_q + case.T_k + case.d) % 2 == 0,)


@pytest.mark.parametrize("case", cases(seed=5, factors=SHORT))
def test_backward(case):
    q, k, v = case.inputs()
    do, dlse = case.output_gradients(q, v)
    o, lse = flash2.forward(q, k, v, case.causal, case.scale_value)
    arguments = (q, k, v, o, lse, do, dlse)
    before = [x.clone() for x in arguments]
    for deterministic in forms(case):
        found = backward.backward(
            *arguments, case.causal, case.scale_value, deterministic
        )
        testing.assert_gradients_within_budget(
            q, k, v, do, *found, causal=case.causal, scale=case.scale, dlse=dlse
        )
        assert all(map(in_memory_order, found, (q, k, v)))
    assert same(arguments, before)


@pytest.mark.parametrize(
    "T_q, T_k", [(130, 66), (65, 64), (64, 65), (66, 64), (1, 130), (130, 1)]
)
def test_causal_mask_at_the_edges_of_blocks(deterministic, T_q, T_k):
    q, k, v = testing.make_qkv(1, 2, T_q, 16, T_k=T_k, device=DEVICE)
    dq, _, _ = judged(q, k, v, True, 0.25, deterministic)
    assert (dq[:, :, : max(T_q - T_k, 0)] == 0).all()


@pytest.mark.parametrize("d, d_v", [(192, 128), (136, 16)])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_are_wider_than_128_and_than_values(deterministic, causal, d, d_v):
    kind = {"dtype": torch.float16, "device": DEVICE}
    q, k, v = testing.make_qkv(1, 2, 70, d, T_k=90, H_kv=1, d_v=d_v, **kind)
    judged(q, k, v, causal, 0.1, deterministic)


def test_rows_that_see_nothing_have_zero_gradient(deterministic):
    """Gradients of zero, exactly, however large dO and dL are there."""
    q, k, v = testing.make_qkv(1, 2, 70, 16, T_k=3, device=DEVICE)
    do, dlse = output_gradients(q, v)
    o, lse = flash2.forward(q, k, v, True, 0.25)
    large, larger = do.clone(), dlse.clone()
    large[:, :, :67], larger[:, :, :67] = 1e30, -1e30
    small = backward.backward(q, k, v, o, lse, do, dlse, True, 0.25, deterministic)
    found = backward.backward(q, k, v, o, lse, large, larger, True, 0.25, deterministic)
    assert (found[0][:, :, :67] == 0).all()
    assert CUDA or same(found, small)
    testing.assert_gradients_within_budget(
        q, k, v, do, *found, causal=True, scale=0.25, dlse=dlse
    )


# NumPy warns about rows that are never stored.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("T_k", [1, 100])
def test_logits_far_below_zero_next_to_padding(deterministic, T_k):
    """Padding has logits of zero, so its P is exp(120) where L is -120."""
    q, k, v = testing.make_qkv(1, 1, 70, 16, T_k=T_k, device=DEVICE)
    q[..., 0], k[..., 0] = 1.0, -480.0
    judged(q, k, v, False, 0.25, deterministic)


@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("causal", [False, True])
def test_empty(deterministic, shape, causal):
    B, H, T_q, T_k = shape
    q, k, v = (torch.ones(B, H, T, 16, device=DEVICE) for T in (T_q, T_k, T_k))
    do, dlse = torch.ones_like(q), torch.ones(B, H, T_q, device=DEVICE)
    found = run(q, k, v, do, dlse, causal, 0.25, deterministic)
    for x, gradient in zip((q, k, v), found, strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


@pytest.mark.gpu
def test_fused_runs_stay_within_the_budget():
    """dQ is added up in another order each time; dK and dV always in the same."""
    options = {"dtype": torch.bfloat16, "device": DEVICE}
    q, k, v = testing.make_qkv(2, 4, 700, 64, H_kv=2, **options)
    do, dlse = output_gradients(q, v)
    first = run(q, k, v, do, dlse, True, 0.1, False)
    for _ in range(20):
        found = run(q, k, v, do, dlse, True, 0.1, False)
        testing.assert_gradients_within_budget(
            q, k, v, do, *found, causal=True, scale=0.1, dlse=dlse
        )
        assert same(found[1:], first[1:])


class Allocations(TorchDispatchMode):
    """The bytes of every tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        self.bytes += [
            x.numel() * x.element_size()
            for x in tree_leaves(result)
            if isinstance(x, torch.Tensor)
        ]
        return result


def test_no_tensor_has_T_times_T_elements(deterministic):
    largest = {}
    for T in (128, 384):
        q, k, v = testing.make_qkv(1, 1, T, 16, device=DEVICE)
        do, dlse = output_gradients(q, v)
        with Allocations() as seen:
            run(q, k, v, do, dlse, False, 0.25, deterministic)
        largest[T] = max(seen.bytes)
    assert largest == {T: T * 16 * 4 for T in largest}


@pytest.mark.parametrize("dimension", ["batch", "head", "row"])
def test_offsets_beyond_int32(deterministic, dimension):
    near = testing.make_qkv(3, 3, 3, 16, dtype=torch.float16, device=DEVICE)
    do, dlse = output_gradients(near[0], near[2])
    found = run(*far_apart((*near, do), dimension), dlse, False, 0.25, deterministic)
    testing.assert_gradients_within_budget(*near, do, *found, scale=0.25, dlse=dlse)


# -- other algorithms

ALGORITHMS = [steps.algorithm_5, steps.algorithm_6]


def fits(case):
    """Whether a head's keys and values fit one tile of Algorithm 5."""
    d_v = case.d if case.d_v == "d" else case.d_v
    widest = backward.padded(max(case.d, d_v))
    return backward.padded(case.T_k) * widest <= steps.LARGEST_TILE


@pytest.mark.parametrize("case", each_level(SHORT, seed=3), ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_of_the_chapter(algorithm, case):
    q, k, v = case.inputs()
    do, dlse = case.output_gradients(q, v)
    o, lse = flash2.forward(q, k, v, case.causal, case.scale_value)
    arguments = (q, k, v, o, lse, do, dlse, case.causal, case.scale_value)
    if algorithm is steps.algorithm_5 and not fits(case):
        message = r"^k: expected at most 8192 elements .* got \d+ x \d+$"
        with pytest.raises(ValueError, match=message):
            algorithm(*arguments)
        return
    found = algorithm(*arguments)
    testing.assert_gradients_within_budget(
        q, k, v, do, *found, causal=case.causal, scale=case.scale, dlse=dlse
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("T_q, T_k", [(130, 66), (64, 65), (17, 0), (0, 17)])
def test_algorithms_of_the_chapter_with_a_mask(algorithm, T_q, T_k):
    options = {"H_kv": 2, "dtype": torch.float16, "device": DEVICE}
    q, k, v = testing.make_qkv(1, 6, T_q, 16, T_k=T_k, **options)
    do, dlse = output_gradients(q, v)
    o, lse = flash2.forward(q, k, v, True, 0.25)
    found = algorithm(q, k, v, o, lse, do, dlse, True, 0.25)
    assert (found[0][:, :, : max(T_q - T_k, 0)] == 0).all()
    testing.assert_gradients_within_budget(
        q, k, v, do, *found, causal=True, scale=0.25, dlse=dlse
    )


def test_algorithm_5_reads_no_log_sum_exp():
    q, k, v = testing.make_qkv(1, 1, 17, 16, device=DEVICE)
    do, dlse = output_gradients(q, v)
    o, lse = flash2.forward(q, k, v, False, 0.25)
    found = steps.algorithm_5(
        q, k, v, o, torch.full_like(lse, math.nan), do, dlse, False, 0.25
    )
    testing.assert_gradients_within_budget(q, k, v, do, *found, scale=0.25, dlse=dlse)
