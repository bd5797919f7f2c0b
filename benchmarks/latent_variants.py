"""Two other orders of the products in the backward pass of expanded latent attention,
next to the one of flashlib.kernels.hopper_latent: ``python -m
benchmarks.latent_variants`` judges and times them in one run, on a Hopper GPU.

together  both products of dQ are started before the first one is stored
wide      together, and the scores of a block are one product of 64 columns, which
          shared memory does not slow down
"""

import functools
import importlib.util
import sys

import torch

from benchmarks import passes, timing
from benchmarks.latent import D_V, SCALE, Expanded
from flashlib import testing
from flashlib.kernels import hopper, hopper_latent

# isort: split
from triton.experimental import gluon  # flashlib.kernels must import Triton first
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from flashlib.kernels.gluon_halves import read_half
from flashlib.kernels.gluon_tiles import ROWS, accumulator
from flashlib.kernels.hopper_latent import (
    BLOCK_Q,
    BLOCKS,
    COLUMNS,
    FIRST,
    HALF,
    REST,
    SLOTS,
    add_half,
    start,
    triple,
)

REPEATS = 100
SHAPES = [Expanded(passes.TOKENS // 8192, 16, 8192, 192, x) for x in (False, True)]


@gluon.jit
def give_dq(c: gl.constexpr, dk, dk_rest, dv, n, columns_of_k, shared):
    """Both products of a part of dQ: the first is stored while the second is computed.
    dK and dV are complete then.
    """
    ds_tile = shared.ds.permute((1, 0))  # [BLOCK_Q, BLOCK_K]
    blank = gl.zeros([BLOCK_Q, COLUMNS], gl.float32, accumulator(COLUMNS))
    empty = gl.zeros([BLOCK_Q, HALF], gl.float32, accumulator(HALF))
    part = start(ds_tile, columns_of_k[0], blank, False)  # [BLOCK_Q, COLUMNS]
    dk, dk_rest, dv = warpgroup_mma_wait(1, [dk, dk_rest, dv])
    mbarrier.arrive(shared.ring.empty.index(n % SLOTS))
    rest = start(ds_tile, columns_of_k[1], empty, False)  # [BLOCK_Q, HALF]
    part = warpgroup_mma_wait(1, [part])
    mbarrier.wait(shared.parts.empty.index(0), (n & 1) ^ 1)
    shared.parts.slots.index(c).store(part)
    rest = warpgroup_mma_wait(0, [rest])
    mbarrier.arrive(shared.ds_read)
    shared.parts.slots.index(BLOCKS - 1).slice(c * HALF, HALF, dim=1).store(rest)
    fence_async_shared()
    mbarrier.arrive(shared.parts.ready.index(0))
    return dk, dk_rest, dv


@gluon.jit
def add_together(
    c: gl.constexpr, dk, dk_rest, dv, n, row, invariants,
    MASKED: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """hopper_latent.add_queries with both products of dQ together."""
    shared = invariants[6]
    mbarrier.wait(shared.ring.ready.index(n % SLOTS), n // SLOTS & 1)
    for half in gl.static_range(2):
        dk, dk_rest, dv = add_half(
            half, c, dk, dk_rest, dv, n, row, invariants, MASKED, RAGGED
        )
    fence_async_shared()
    mbarrier.arrive(shared.ds_ready)
    mbarrier.wait(shared.ds_ready, n & 1)
    return give_dq(c, dk, dk_rest, dv, n, invariants[1], shared)


@gluon.jit
def weights_of(s, half: gl.constexpr, n, row, invariants, MASKED, RAGGED):
    """Weights P^T [ROWS, HALF] of half of the queries of block n, in 16 bits."""
    own, _, seen_from, real, scale_log2, sizes, shared = invariants
    columns: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    lse_rows = read_half(shared.statistics[0], n % SLOTS, half, columns)  # [HALF]
    p = gl.exp2(s * scale_log2 - lse_rows[None, :])  # [ROWS, HALF]
    if MASKED:
        i = half * HALF + gl.arange(0, HALF, columns)  # [HALF]
        seen = (seen_from - row)[:, None] <= i[None, :]  # [ROWS, HALF]
        if sizes.left is not None:
            seen = seen & (i[None, :] <= (seen_from + sizes.left - row)[:, None])
        p = gl.where(seen, p, 0.0)
    if RAGGED:
        p = gl.where(real[:, None], p, 0.0)
    if not MASKED and not RAGGED:
        # It changes nothing. Without an instruction between the exponential and the
        # rounding, ptxas finds too few registers and runs one product at a time.
        p = gl.inline_asm_elementwise(
            "min.f32 $0, $1, 0f7F7FFFFF;",
            "=f,f", [p], dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    return p.to(own[0].dtype)


@gluon.jit
def add_half_of_keys(
    half: gl.constexpr, c: gl.constexpr, p, dp, dk, dk_rest, n, shared
):
    """Half of the queries of block n adds to dK, and stores its dS^T."""
    slot = n % SLOTS
    factor: gl.constexpr = gl.DotOperandLayout(0, accumulator(FIRST), 2)
    rest_factor: gl.constexpr = gl.DotOperandLayout(0, accumulator(REST), 2)
    q_tile, q_rest, _ = triple(shared.ring.slots, slot)
    columns: gl.constexpr = gl.SliceLayout(0, dp.type.layout)
    delta_rows = read_half(shared.statistics[1], slot, half, columns)  # [HALF]
    ds = (p.to(gl.float32) * (dp - delta_rows[None, :])).to(p.dtype)  # [ROWS, HALF]
    if half == 0:
        mbarrier.wait(shared.ds_read, (n & 1) ^ 1)
    rows = shared.ds.slice(c * ROWS, ROWS)  # [ROWS, BLOCK_Q]
    rows.slice(half * HALF, HALF, dim=1).store(ds)
    q_tile = q_tile.slice(half * HALF, HALF)  # [HALF, FIRST]
    q_rest = q_rest.slice(half * HALF, HALF)  # [HALF, REST]
    dk = start(gl.convert_layout(ds, factor), q_tile, dk)
    dk_rest = start(gl.convert_layout(ds, rest_factor), q_rest, dk_rest)
    return dk, dk_rest


@gluon.jit
def add_wide(
    c: gl.constexpr, dk, dk_rest, dv, n, row, invariants,
    MASKED: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """hopper_latent.add_queries with the scores of all queries in one product."""
    own, shared = invariants[0], invariants[6]
    slot = n % SLOTS
    layout: gl.constexpr = accumulator(HALF)
    factor: gl.constexpr = gl.DotOperandLayout(0, accumulator(FIRST), 2)
    q_tile, q_rest, do_tile = triple(shared.ring.slots, slot)
    do_0, do_1 = do_tile.slice(0, HALF), do_tile.slice(HALF, HALF)  # [HALF, D_V]
    mbarrier.wait(shared.ring.ready.index(slot), n // SLOTS & 1)
    blank = gl.zeros([ROWS, BLOCK_Q], gl.float32, accumulator(BLOCK_Q))
    s = start(own[0], q_tile.permute((1, 0)), blank, False)  # [ROWS, BLOCK_Q]
    s = start(own[1], q_rest.permute((1, 0)), s)
    unread = gl.zeros([ROWS, HALF], gl.float32, layout)
    dp_0 = start(own[2], do_0.permute((1, 0)), unread, False)  # [ROWS, HALF]
    s = warpgroup_mma_wait(1, [s])
    halves = gl.permute(gl.reshape(s, [ROWS, 2, HALF]), (0, 2, 1))
    s_0, s_1 = gl.split(halves)
    s_0, s_1 = gl.convert_layout(s_0, layout), gl.convert_layout(s_1, layout)
    p_0 = weights_of(s_0, 0, n, row, invariants, MASKED, RAGGED)
    dv = start(gl.convert_layout(p_0, factor), do_0, dv)
    p_1 = weights_of(s_1, 1, n, row, invariants, MASKED, RAGGED)
    dv = start(gl.convert_layout(p_1, factor), do_1, dv)
    dp_0 = warpgroup_mma_wait(2, [dp_0])
    dk, dk_rest = add_half_of_keys(0, c, p_0, dp_0, dk, dk_rest, n, shared)
    dp_1 = start(own[2], do_1.permute((1, 0)), unread, False)
    dp_1, dv = warpgroup_mma_wait(0, [dp_1, dv])
    dk, dk_rest = add_half_of_keys(1, c, p_1, dp_1, dk, dk_rest, n, shared)
    fence_async_shared()
    mbarrier.arrive(shared.ds_ready)
    mbarrier.wait(shared.ds_ready, n & 1)
    return give_dq(c, dk, dk_rest, dv, n, invariants[1], shared)


def changed(**functions):
    """A second hopper_latent with these functions in place of its own."""
    name = f"{hopper_latent.__name__}_{'_'.join(functions)}"
    spec = importlib.util.spec_from_file_location(name, hopper_latent.__file__)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(functions)
    return module


VARIANTS = {
    "hopper_latent": hopper_latent,
    "together": changed(add_queries=add_together),
    "wide": changed(add_queries=add_wide),
}


def arguments(shape):
    """What backward takes, of normal inputs."""
    q, k, v, do = shape.inputs("contiguous")
    o, lse = hopper.forward(q, k, v, shape.causal, SCALE)
    return q, k, v, o, lse, do, torch.zeros_like(lse), shape.causal, SCALE


def judge(module):
    """Raise AssertionError unless gradients are right and repeat in every bit."""
    for H, H_kv, T_q, T_k in ((4, 2, 1000, 1000), (2, 2, 130, 700), (2, 1, 300, 65)):
        for causal in (False, True):
            kind = {"dtype": timing.DTYPE, "device": timing.DEVICE}
            sizes = {"T_k": T_k, "H_kv": H_kv, "d_v": D_V}
            q, k, v = testing.make_qkv(2, H, T_q, 192, **sizes, **kind)
            do = torch.randn(2, H, T_q, D_V, **kind)
            o, lse = hopper.forward(q, k, v, causal, SCALE)
            given = q, k, v, o, lse, do, torch.zeros_like(lse), causal, SCALE
            found = module.backward(*given)
            testing.assert_gradients_within_budget(
                q, k, v, do, *found, causal=causal, scale=SCALE
            )
            for _ in range(REPEATS):
                again = module.backward(*given)
                assert all(map(torch.equal, found, again)), "two runs differ"


def main():
    """Print what is right, and the rates of each round."""
    right = {}
    for name, module in VARIANTS.items():
        _, reason = timing.attempt(judge, module)
        print(f"{name}: {reason or 'right, and the same in every bit'}", flush=True)
        if reason is None:
            right[name] = module
    for shape in SHAPES:
        given, flops = arguments(shape), shape.flops(passes.BACKWARD)
        calls = {}
        for name, module in right.items():
            calls[name] = functools.partial(module.backward, *given)
            # What the fixed order of the parts of dQ costs.
            options = {"deterministic": False}
            calls[f"{name}, any order"] = functools.partial(calls[name], **options)
        rates = {name: [] for name in calls}
        for name, call in timing.rounds(calls):
            rates[name].append(timing.digits(flops / timing.time_ms(call) / 1e9))
        for name, found in rates.items():
            print(f"{shape}: {name}: {found} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
