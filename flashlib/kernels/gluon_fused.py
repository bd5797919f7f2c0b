"""A step of the fused form of the backward pass for Hopper (sm_90), in Gluon: what
follows from the weights P of a block of queries, for d = 64 and 128.

Chapter *Hopper*, its depth. The scores of a step are started in the one before, so a
product runs while a part of dQ is stored. At d = 64 products are short, and what is
around them costs more than they do. So a block has 2 ROWS queries there, which a step
takes in two halves: consumers meet, and are given slots, once for both. A consumer has
its rows of K and V in registers. In the first half it computes its tile of dQ for the
block before: ROWS queries, all columns. Both consumers stored their dS^T of that block
in the step before, so the wait for it is short. At d = 128, where no registers are left
for that, a block has ROWS queries, and a tile of dQ half of the columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlib.kernels.gluon_backward import read_rows
from flashlib.kernels.gluon_order import give_part, part_stored, store_part
from flashlib.kernels.gluon_scores import times_derivative
from flashlib.kernels.gluon_tiles import ROWS, accumulator

# {d: (queries of a block, slots for blocks, slots for parts of dQ, one for each
# adder)}, the fastest of a sweep on an H200. A consumer holds its results, S and dP in
# registers, and at d = 64 its rows of K and V. At most 32 bytes spill, 56 with ALiBi,
# 208 with a changed score; what is allowed is in tests/test_compile_hopper.py.
FUSED = {64: (128, 2, 2), 128: (64, 2, 2)}


@gluon.jit
def own_factors(c: gl.constexpr, own):
    """K and V, [BLOCK_K, D] each, or, where they are narrow, rows c ROWS and following
    in registers. From shared memory alone, products of 64 rows and columns need its
    full bandwidth; wide results leave no registers for these factors.
    """
    if own[0].shape[1] == 64:
        layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(ROWS), 2)
        k_tile, v_tile = own[0].slice(c * ROWS, ROWS), own[1].slice(c * ROWS, ROWS)
        own = k_tile.load(layout), v_tile.load(layout)
    return own


@gluon.jit
def own_rows(c: gl.constexpr, factor, n):
    """Rows c ROWS and following, [ROWS, D], of one of own_factors.

    In shared memory their address depends on the step n, in form only: n never reaches
    2^30, so n >> 30 is 0. If it did not depend on n, the compiler would compute the
    descriptors of these rows before the loop and keep them in registers, two for every
    16 columns.

    The whole tile is reinterpreted, before the slice. Reinterpreted alone, these rows
    would be read as if their next 64 columns came after ROWS rows, not after BLOCK_K.
    """
    if factor.shape[1] == 64:
        rows = factor
    else:
        shape: gl.constexpr = [1, factor.shape[0], factor.shape[1]]
        slots = factor._reinterpret(factor.dtype, shape, factor.layout)
        rows = slots.index(n >> 30).slice(c * ROWS, ROWS)
    return rows


@gluon.jit
def start_product(c: gl.constexpr, factor, slots, n, half: gl.constexpr):
    """Start K Q^T or V dO^T of half of the n-th block, [ROWS, ROWS], keys in rows."""
    SLOTS: gl.constexpr = slots.shape[0]
    unread = gl.zeros([ROWS, ROWS], gl.float32, accumulator(ROWS))
    tile = slots.index(n % SLOTS).slice(half * ROWS, ROWS)  # [ROWS, D]
    rows = own_rows(c, factor, n)  # [ROWS, D]
    return warpgroup_mma(
        rows, tile.permute((1, 0)), unread, use_acc=False, is_async=True
    )


@gluon.jit
def start_first_scores(c: gl.constexpr, own, n, steps, shared):
    """Start S^T = K Q^T of the first half of the n-th block, once the block is there.
    After the last block, the product reads whatever is in the next slot, to which
    nothing was copied if there are fewer steps than slots. Its result is not used.
    """
    SLOTS: gl.constexpr = shared.ring.slots[0].shape[0]
    ready = shared.ring.ready.index(n % SLOTS)
    mbarrier.wait(ready, n // SLOTS & 1, pred=n < steps)
    return start_product(c, own[0], shared.ring.slots[0], n, 0)


@gluon.jit
def start_half(c: gl.constexpr, own, n, half: gl.constexpr, shared):
    """Start dP^T = V dO^T of half of the n-th block, [ROWS, ROWS]; and L in base 2 of
    these queries, [1, ROWS].
    """
    slots = shared.ring.slots[1]
    dp = start_product(c, own[1], slots, n, half)
    return dp, read_rows(shared.statistics[0], n % slots.shape[0], half)[None, :]


@gluon.jit
def start_part(c: gl.constexpr, n, shared):
    """Start consumer c's tile of the part of dQ for the n-th block, dS K, [ROWS, ROWS].
    At d = 64 it has rows c ROWS and following of the block, at d = 128 as many columns.
    Both consumers must have stored their dS^T.
    """
    ds_tile, k_tile = shared.ds.index(n & 1), shared.own[0]
    if k_tile.shape[1] == 64:
        ds_tile = ds_tile.slice(c * ROWS, ROWS, dim=1)
    else:
        k_tile = k_tile.slice(c * ROWS, ROWS, dim=1)
    part = gl.zeros([ROWS, ROWS], gl.float32, accumulator(ROWS))
    return warpgroup_mma(
        ds_tile.permute((1, 0)), k_tile, part, use_acc=False, is_async=True
    )


@gluon.jit
def add_half(
    c: gl.constexpr, half: gl.constexpr, dk, dv, p, dp, derivative, n, steps, own,
    change, shared,
):  # fmt: skip
    """Add half of the n-th block, with weights p [ROWS, ROWS], to dK and dV [ROWS, D];
    returns both and the scores of the half that follows. At d = 64 the first half also
    gives a part of dQ, that of block n - 1, and the second half none. At d = 128 the
    only half is the first one, and gives that of block n.
    """
    q_slots, do_slots = shared.ring.slots
    SLOTS: gl.constexpr = q_slots.shape[0]
    LAST: gl.constexpr = (half + 1) * ROWS == q_slots.shape[1]
    factor: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    slot = n % SLOTS
    q_tile = q_slots.index(slot).slice(half * ROWS, ROWS)  # [ROWS, D]
    do_tile = do_slots.index(slot).slice(half * ROWS, ROWS)  # [ROWS, D]
    p_factor = gl.convert_layout(p.to(q_tile.dtype), factor)  # [ROWS, ROWS]
    p = times_derivative(p, derivative, change)
    dv = warpgroup_mma(p_factor, do_tile, dv, is_async=True)  # [ROWS, D]
    dp = warpgroup_mma_wait(1, [dp])  # [ROWS, ROWS]; dV is still running
    delta_rows = read_rows(shared.statistics[1], slot, half)  # [ROWS]
    ds = (p * (dp - delta_rows[None, :])).to(q_tile.dtype)  # [ROWS, ROWS]
    # Both consumers read this slot, last for block n - 2. At d = 128 the other one did
    # so before it met this one in step n - 1. At d = 64 it did so in the first half of
    # step n - 1: wait until both have stored all that they store of dS^T in that step,
    # as start_part needs anyway.
    if not LAST:
        mbarrier.wait(shared.ds_ready, (n - 1) & 1)
    ds_rows = shared.ds.index(n % 2).slice(c * ROWS, ROWS)  # [ROWS, BLOCK_Q]
    ds_rows.slice(half * ROWS, ROWS, dim=1).store(ds)
    if LAST:
        fence_async_shared()
        mbarrier.arrive(shared.ds_ready)
    ds_factor = gl.convert_layout(ds, factor)  # [ROWS, ROWS]
    dk = warpgroup_mma(ds_factor, q_tile, dk, is_async=True)  # [ROWS, D], unscaled
    if not LAST:
        # -- d = 64, first half: dQ of block n - 1, then the scores of the second half.
        # There is no block before the first one. What step 0 computes is stored in slot
        # 0, not announced, and overwritten in step 1.
        before = gl.maximum(n - 1, 0)
        part = start_part(c, n - 1, shared)  # [ROWS, ROWS]
        dk, dv = warpgroup_mma_wait(1, [dk, dv])
        s = start_product(c, own[0], q_slots, n, 1)  # [ROWS, ROWS], unscaled
        part = warpgroup_mma_wait(1, [part])
        store_part(c, part, before, shared.parts)
        fence_async_shared()
        part_stored(before, shared.parts, n > 0)
    elif half == 1:
        # -- d = 64, second half: the first scores of block n + 1
        s = start_first_scores(c, own, n + 1, steps, shared)  # [ROWS, ROWS], unscaled
        dk, dv = warpgroup_mma_wait(1, [dk, dv])
        mbarrier.arrive(shared.ring.empty.index(slot))
    else:
        # -- d = 128: dQ of block n, and the scores of block n + 1
        mbarrier.wait(shared.ds_ready, n & 1)
        part = start_part(c, n, shared)  # [ROWS, ROWS]
        dk, dv = warpgroup_mma_wait(1, [dk, dv])
        mbarrier.arrive(shared.ring.empty.index(slot))
        s = start_first_scores(c, own, n + 1, steps, shared)  # [ROWS, ROWS], unscaled
        part = warpgroup_mma_wait(1, [part])
        give_part(c, part, n, shared.parts)
    # ptxas lets no product run from one round of a loop into the next if its sums are
    # read there: dP starts when these scores are there. Within a round, the second half
    # could start its dP earlier, but it needs these scores at once.
    s = warpgroup_mma_wait(0, [s])
    return dk, dv, s


@gluon.jit
def give_last_part(c: gl.constexpr, steps, shared):
    """Give the part of dQ that is missing after the last step at d = 64. There is none
    if a mask leaves no step.
    """
    if shared.own[0].shape[1] == 64 and steps > 0:
        mbarrier.wait(shared.ds_ready, (steps - 1) & 1)
        part = start_part(c, steps - 1, shared)  # [ROWS, ROWS]
        part = warpgroup_mma_wait(0, [part])
        give_part(c, part, steps - 1, shared.parts)
