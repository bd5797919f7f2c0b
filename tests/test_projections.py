"""The layer's gradients by hand against autograd, and their schedules."""

import math

import numpy as np
import pytest
import torch

from flashlib import testing
from flashlib.iomodel import CapacityExceeded
from flashlib.iomodel import projections as simulated
from flashlib.iomodel.backward import split_keys, split_queries
from flashlib.notebook import check
from flashlib.reference import projections as reference
from flashlib.reference import standard

each_heads = pytest.mark.parametrize("H, H_kv", [(1, 1), (3, 3), (4, 2), (4, 1)])
each_mask = pytest.mark.parametrize("causal", [False, True])


def problem(H, H_kv, B=2, T=9, E=7, d=4, d_v=3, seed=0):
    """x, weights, dy in float64: five sizes, so that no transpose can hide."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    columns = (H * d, H_kv * d, H_kv * d_v)
    weights = [*(normal(E, n) for n in columns), normal(H * d_v, E)]
    return normal(B, T, E), reference.Weights(*weights), normal(B, T, E)


def by_autograd(x, weights, dy, H, H_kv, **options):
    """``(dx, Weights)`` and, detached, what the forward pass saved."""
    leaves = [z.clone().requires_grad_() for z in (x, *weights)]
    own = reference.Weights(*leaves[1:])
    y, saved = reference.layer(leaves[0], own, H, H_kv, **options)
    dx, *dw = torch.autograd.grad(y, leaves, dy)
    return dx, reference.Weights(*dw), reference.Saved(*(z.detach() for z in saved))


@each_heads
@each_mask
@pytest.mark.parametrize("scale", [None, 0.3])
def test_all_gradients(H, H_kv, causal, scale):
    x, weights, dy = problem(H, H_kv)
    options = {"causal": causal, "scale": scale}
    dx, dw, saved = by_autograd(x, weights, dy, H, H_kv, **options)
    found, found_dw = reference.gradients(x, weights, saved, dy, **options)
    check("dx", found, dx)
    for name, one, other in zip(dw._fields, found_dw, dw, strict=True):
        check(name, one, other)


@each_heads
@each_mask
@pytest.mark.parametrize("size", [1, 4, 9, 20])
def test_without_dq_dk_and_dv(H, H_kv, causal, size):
    x, weights, dy = problem(H, H_kv)
    options = {"causal": causal, "scale": 0.3}
    dx, dw, saved = by_autograd(x, weights, dy, H, H_kv, **options)
    do = reference.d_output(dy, weights.w_o, H)
    check("dx", reference.stream_dx(saved, do, weights, size, **options), dx)
    found = reference.consume_twice(x, saved, do, weights, size, **options)
    names = ("dx", "dw_q", "dw_k", "dw_v")
    for name, one, other in zip(names, found, (dx, *dw[:3]), strict=True):
        check(name, one, other)


def test_the_layer_is_pytorchs_multihead_attention():
    H, d, T = 3, 4, 6
    options = {"bias": False, "batch_first": True, "dtype": torch.float64}
    mha = torch.nn.MultiheadAttention(H * d, H, **options)
    projections = [w.mT for w in mha.in_proj_weight.detach().split(H * d)]
    weights = reference.Weights(*projections, mha.out_proj.weight.detach().mT)
    x, _, _ = problem(H, H, T=T, E=H * d)
    y, _ = reference.layer(x, weights, H, H)
    check("y", y, mha(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_of_the_inputs_is_kept(dtype):
    x, weights, dy = problem(4, 2)
    x, dy, *weights = (z.to(dtype) for z in (x, dy, *weights))
    weights = reference.Weights(*weights)
    y, saved = reference.layer(x, weights, 4, 2)
    do = reference.d_output(dy, weights.w_o, 4)
    dx, dw = reference.gradients(x, weights, saved, dy)
    everything = (y, *saved, dx, *dw, reference.stream_dx(saved, do, weights, 4))
    everything += reference.consume_twice(x, saved, do, weights, 4)
    assert {z.dtype for z in everything} == {dtype}


# -- two-level memory

SIZES = [(12, 3, 3, 4, 4), (13, 4, 7, 5, 3), (9, 2, 4, 2, 9), (6, 3, 2, 6, 6)]
each_size = pytest.mark.parametrize("T, d, E, B_r, B_c", SIZES)
ROOMY = 10**6


def head(T, d, E):
    """One head: what its schedules take and what they must give, as arrays by name."""
    x, weights, dy = problem(1, 1, B=1, T=T, E=E, d=d, d_v=d)
    _, saved = reference.layer(x, weights, 1, 1)
    dx, dw = reference.gradients(x, weights, saved, dy)
    do = reference.d_output(dy, weights.w_o, 1)
    q, k, v, o, do = (z[0, 0] for z in (*saved[:4], do))
    dq, dk, dv = testing.oracle_gradients(*(z[None, None] for z in (q, k, v, do)))
    found = {"X": x[0], "Q": q, "K": k, "V": v, "O": o, "dO": do, "dX": dx[0]}
    found |= {"dQ": dq[0, 0], "dK": dk[0, 0], "dV": dv[0, 0]}
    found |= {"L": saved.lse[0, 0][:, None], "D": (do * o).sum(1, keepdim=True)}
    for name, w, gradient in zip(simulated.WEIGHTS, weights, dw, strict=False):
        found |= {name: w, "d" + name: gradient}
    return {name: z.numpy() for name, z in found.items()}


def run(schedule, arrays, names, **options):
    """Run a schedule on named arrays; judge its results and its exact memory."""
    inputs = [arrays[name] for name in names.split()]
    done = schedule(*inputs, capacity_words=ROOMY, **options)
    for name, result in done.arrays.items():
        if name in arrays:
            check(name, result, arrays[name])
    assert done.memory.moved_words == done.memory.closed_form_words
    peak = done.memory.peak_words
    schedule(*inputs, capacity_words=peak, **options)
    with pytest.raises(CapacityExceeded):
        schedule(*inputs, capacity_words=peak - 1, **options)
    return done


@each_size
def test_schedules_with_the_gradients_in_slow_memory(T, d, E, B_r, B_c):
    arrays = head(T, d, E)
    run(simulated.input_gradient, arrays, "dQ dK dV W_Q W_K W_V", B_r=B_r)
    run(simulated.projected_rows, arrays, "X dQ dK dV W_Q W_K W_V", B_r=B_r)


@each_size
@pytest.mark.parametrize("scale", [None, 0.3])
def test_fold(T, d, E, B_r, B_c, scale):
    arrays = head(T, d, E)
    done = run(simulated.fold, arrays, "Q K dO W_Q W_K W_V", B_r=B_r, scale=scale)
    c = standard.default_scale(d) if scale is None else scale
    check("Kw", done["Kw"], c * np.einsum("jk,lk->jl", arrays["K"], arrays["W_Q"]))
    check("Qw", done["Qw"], c * np.einsum("jk,lk->jl", arrays["Q"], arrays["W_K"]))
    check("dOw", done["dOw"], np.einsum("jk,lk->jl", arrays["dO"], arrays["W_V"]))


@each_size
def test_schedules_that_stream(T, d, E, B_r, B_c):
    arrays = head(T, d, E)
    names = "Q K dO W_Q W_K W_V"
    arrays |= run(simulated.fold, arrays, names, B_r=B_r, scale=None).arrays
    options = {"B_r": B_r, "B_c": B_c, "scale": 1.0 / math.sqrt(d)}
    run(simulated.stream_rows, arrays, "Q K V O dO L Kw Qw dOw", **options)
    run(simulated.stream_columns, arrays, "Q K V dO L D Kw Qw dOw", **options)


@each_size
def test_schedule_that_consumes_every_row_twice(T, d, E, B_r, B_c):
    arrays = head(T, d, E)
    options = {"B_r": B_r, "B_c": B_c, "scale": None}
    names = "Q K V dO L D X W_Q W_K W_V"
    done = run(simulated.consume_twice, arrays, names, **options)
    found = done.memory.moved_words
    assert not {"dQ", "dK", "dV"} & set(done.memory.by_array)
    split = split_keys.words(T, d, B_c) + split_queries.words(T, d, B_r)
    rows = simulated.projected_rows.words(T, d, E)
    assert split + rows - found == 6 * T * d - 3 * T * E
