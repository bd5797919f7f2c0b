"""Other orders of the products of latent attention, next to those of the library:
``python -m benchmarks.latent_variants`` judges and times them in one run, on a Hopper
GPU.

The backward pass of the expanded way (flashlib.kernels.hopper_latent):
together  both products of dQ are started before the first one is stored
wide      together, and the scores of a block are one product of 64 columns, which
          shared memory does not slow down

Absorbed decoding (flashlib.kernels.hopper_absorbed):
ahead     the scores of the next block are started before the product with this one is
          waited for, and its slot is freed later
"""

import functools
import importlib.util
import sys

import torch

from benchmarks import latent, passes, timing
from flashlib import testing
from flashlib.kernels import hopper, hopper_absorbed, hopper_latent

# isort: split
from triton.experimental import gluon  # flashlib.kernels must import Triton first
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from flashlib.kernels.gluon_forward import (
    LOWEST,
    log_sum_exp,
    release,
    thread_sums,
    tile_in,
)
from flashlib.kernels.gluon_halves import read_half
from flashlib.kernels.gluon_tiles import ROWS, accumulator
from flashlib.kernels.hopper_absorbed import (
    BLOCK_K,
    scaled_rows,
    start_half,
    store_half,
)
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
SHAPES = latent.shapes()
ABSORBED_HALF = hopper_absorbed.HALF  # of the columns of a latent


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


@gluon.jit
def attend_ahead(acc, m, l, n, s, q_tile, task, seen, scale_log2, shared):
    """hopper_absorbed.attend from scores; returns those of the next block too, which
    after the last one are of no use.
    """
    ring = shared.ring
    if n >= task.full:
        j = gl.arange(0, BLOCK_K, gl.SliceLayout(0, s.type.layout))  # [BLOCK_K]
        j += task.start + n * BLOCK_K
        s = gl.where(j[None, :] < seen[:, None], s, -float("inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)  # [ROWS]
    alpha = gl.exp2(m - m_new)  # [ROWS]
    mbarrier.wait(shared.used, (n & 1) ^ 1)
    shared.factors.store(alpha)
    mbarrier.arrive(shared.scaled)
    p = gl.exp2(s * scale_log2 - m_new[:, None])  # [ROWS, BLOCK_K]
    bits = p.to(ring.slots.dtype)
    shared.p.store(bits)
    fence_async_shared()
    mbarrier.arrive(shared.weighed)
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None]
    l += thread_sums(p)
    factor: gl.constexpr = gl.DotOperandLayout(0, accumulator(ABSORBED_HALF), 2)
    bits = gl.convert_layout(bits, factor)
    acc = start_half(0, scaled_rows(acc, alpha), bits, ring, n)
    s = scores_ahead(q_tile, ring, n + 1, task.blocks)
    acc = warpgroup_mma_wait(2, [acc])
    release(ring, n)
    s = warpgroup_mma_wait(0, [s])
    return acc, m_new, l, s


@gluon.jit
def scores_ahead(q_tile, ring, n, blocks):
    """Start the scores of block n, if there is one."""
    slot = n % ring.slots.shape[0]
    ready = ring.ready.index(slot)
    mbarrier.wait(ready, n // ring.slots.shape[0] & 1, pred=n < blocks)
    unread = gl.zeros([ROWS, BLOCK_K], gl.float32, accumulator(BLOCK_K))
    first, rest = ring.slots.index(slot), ring.rest.index(slot)
    s = start(q_tile[0], first.permute((1, 0)), unread, False)  # [ROWS, BLOCK_K]
    return start(q_tile[1], rest.permute((1, 0)), s)


@gluon.jit
def weigh_ahead(o, lse, scale_log2, queries, T_q, splits, task, shared):
    """hopper_absorbed.weigh with scores that are started a block ahead."""
    s_layout: gl.constexpr = accumulator(BLOCK_K)
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    row = task.row + gl.arange(0, ROWS, rows_layout)  # [ROWS]
    seen = task.length - T_q + 1 + row % T_q  # [ROWS]
    m = gl.full([ROWS], LOWEST, gl.float32, rows_layout)
    l = thread_sums(gl.zeros([ROWS, BLOCK_K], gl.float32, s_layout))
    acc = gl.zeros([ROWS, ABSORBED_HALF], gl.float32, accumulator(ABSORBED_HALF))
    mbarrier.wait(shared.q.ready.index(0), 0)
    q_tile = tile_in(shared.q, 0)
    s = warpgroup_mma_wait(0, [scores_ahead(q_tile, shared.ring, 0, task.blocks)])
    for n in range(task.blocks):
        acc, m, l, s = attend_ahead(
            acc, m, l, n, s, q_tile, task, seen, scale_log2, shared
        )
    lse_rows, l = log_sum_exp(m, gl.convert_layout(gl.sum(l, 1), rows_layout))
    inverse = 1.0 / l
    mbarrier.wait(shared.used, (task.blocks & 1) ^ 1)
    shared.factors.store(inverse)
    mbarrier.arrive(shared.scaled)
    part = (task.b.to(gl.int64) * queries + row) * splits + task.split
    gl.store(lse + part, lse_rows, mask=row < queries)
    store_half(0, o, acc, inverse, task, queries, splits)


def changed(original, **functions):
    """A second module like the original, with these functions in place of its own."""
    name = f"{original.__name__}_{'_'.join(functions)}"
    spec = importlib.util.spec_from_file_location(name, original.__file__)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(functions)
    return module


BACKWARD = {
    "hopper_latent": hopper_latent,
    "together": changed(hopper_latent, add_queries=add_together),
    "wide": changed(hopper_latent, add_queries=add_wide),
}
DECODING = {
    "hopper_absorbed": hopper_absorbed,
    "ahead": changed(hopper_absorbed, weigh=weigh_ahead),
}


def arguments(shape):
    """What backward takes, of normal inputs."""
    q, k, v, do = shape.inputs("contiguous")
    o, lse = hopper.forward(q, k, v, shape.causal, latent.SCALE)
    return q, k, v, o, lse, do, torch.zeros_like(lse), shape.causal, latent.SCALE


def judge(module):
    """Raise AssertionError unless gradients are right and repeat in every bit."""
    for H, H_kv, T_q, T_k in ((4, 2, 1000, 1000), (2, 2, 130, 700), (2, 1, 300, 65)):
        for causal in (False, True):
            kind = {"dtype": timing.DTYPE, "device": timing.DEVICE}
            sizes = {"T_k": T_k, "H_kv": H_kv, "d_v": latent.D_V}
            q, k, v = testing.make_qkv(2, H, T_q, 192, **sizes, **kind)
            do = torch.randn(2, H, T_q, latent.D_V, **kind)
            o, lse = hopper.forward(q, k, v, causal, latent.SCALE)
            given = q, k, v, o, lse, do, torch.zeros_like(lse), causal, latent.SCALE
            found = module.backward(*given)
            testing.assert_gradients_within_budget(
                q, k, v, do, *found, causal=causal, scale=latent.SCALE
            )
            for _ in range(REPEATS):
                again = module.backward(*given)
                assert all(map(torch.equal, found, again)), "two runs differ"


def decode(module, x, splits=0):
    """One step of latent.Cache x."""
    sizes = splits, latent.D_C, latent.SCALE
    return module.forward(x.q, x.pages, x.seq_lens, x.block_table, *sizes)


def judge_decoding(module):
    """The same of a step of decoding, in splits whose last block is not whole."""
    for H, T in ((128, 4096), (16, 64)):
        x = latent.cache(latent.Job(latent.OURS, H, 3, T), seed=0)
        x.seq_lens.sub_(torch.tensor([0, 1, 60], device=timing.DEVICE))
        for splits in (1, 3):
            o, lse = decode(module, x, splits)
            for b, length in enumerate(x.seq_lens.tolist()):
                rows = x.pages[x.block_table[b].long()].flatten(0, 1)[None, None]
                k, one = rows[:, :, :length], slice(b, b + 1)
                testing.assert_within_budget(
                    x.q[one, :16], k, k[..., : latent.D_C], o[one, :16].contiguous(),
                    lse[one, :16].contiguous(), scale=latent.SCALE,
                )  # fmt: skip
            for _ in range(REPEATS):
                same = map(torch.equal, decode(module, x, splits), (o, lse))
                assert all(same), "two runs differ"


def right(variants, judge):
    """Those of the variants that the judge accepts."""
    found = {}
    for name, module in variants.items():
        _, reason = timing.attempt(judge, module)
        print(f"{name}: {reason or 'right, and the same in every bit'}", flush=True)
        if reason is None:
            found[name] = module
    return found


def rates(what, calls, flops):
    """Print the rates of the calls in interleaved rounds."""
    found = {name: [] for name in calls}
    for name, call in timing.rounds(calls):
        found[name].append(timing.digits(flops / timing.time_ms(call) / 1e9))
    for name, each in found.items():
        print(f"{what}: {name}: {each} TFLOP/s", flush=True)


def main():
    """Print what is right, and the rates of each round."""
    ceilings = timing.ceilings()
    print({name: ceilings[name] for name in ("matmul_tflops", "copy_tbs")}, flush=True)
    modules = right(DECODING, judge_decoding)
    for step in latent.STEPS:
        job = latent.Job(latent.OURS, *step)
        x, (compute, memory) = latent.cache(job, seed=0), job.roof_us(ceilings)
        calls = {}
        for name, module in modules.items():
            make = functools.partial(functools.partial, decode, module, x)
            calls[name] = timing.captured(make)
        roof = timing.digits(job.flops / max(compute, memory) / 1e6)
        rates(f"{job}, roof {roof}", calls, job.flops)
        del calls, x
        timing.release()
    modules = right(BACKWARD, judge)
    for shape in SHAPES:
        given, flops, calls = arguments(shape), shape.flops(passes.BACKWARD), {}
        for name, module in modules.items():
            calls[name] = functools.partial(module.backward, *given)
            # What the fixed order of the parts of dQ costs.
            options = {"deterministic": False}
            calls[f"{name}, any order"] = functools.partial(calls[name], **options)
        rates(shape, calls, flops)


if __name__ == "__main__":
    main()
