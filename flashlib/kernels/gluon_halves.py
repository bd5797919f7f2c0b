"""dK and dV of wide heads (d = 256) for Hopper (sm_90), in Gluon.

Chapter *Hopper*, its depth; the division of labor is that of hopper_backward.py, with
one difference. At d = 256 the registers of a warp group hold no row of dK and dV in
full. Both consumers therefore own the same ROWS keys and half of the columns each. Of
S^T and dP^T each computes the columns of half of the queries, and hands P and dS to the
other one through shared memory: its own half enters its products from registers, while
the other half arrives.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlib.kernels.gluon_backward import CONSUMERS, at, block_of
from flashlib.kernels.gluon_tiles import ROWS, accumulator


@gluon.constexpr_function
def halves(columns):
    """The layout of a tile [ROWS, columns] whose halves are written by two consumers:
    64 bytes, half of 64 numbers, are swizzled as one.
    """
    assert columns == 64, f"columns: expected 64, got {columns}"
    return gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)


@gluon.jit
def make_halves(dtype: gl.constexpr, columns: gl.constexpr):
    """Two slots for tiles [ROWS, columns]."""
    return gl.allocate_shared_memory(dtype, [2, ROWS, columns], halves(columns))


@gluon.jit
def read_half(slots, slot, c: gl.constexpr, layout: gl.constexpr):
    """Half c of a slot [1, rows] of statistics, in registers, [rows / 2]."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    HALF: gl.constexpr = slots.shape[2] // CONSUMERS
    row = slots.index(slot)._reinterpret(gl.float32, [slots.shape[2]], plain)
    return row.slice(c * HALF, HALF).load(layout)


@gluon.jit
def share(x, tile, c: gl.constexpr, ready):
    """Hand x [ROWS, HALF] to the other consumer, as half c of a tile's columns."""
    HALF: gl.constexpr = tile.shape[1] // CONSUMERS
    tile.slice(c * HALF, HALF, dim=1).store(x)
    fence_async_shared()
    mbarrier.arrive(ready)


@gluon.jit
def add_product(c: gl.constexpr, acc, x, tile, rows, ready, phase):
    """Start acc += tile rows, where half c of the columns of tile [ROWS, BLOCK_Q] is x,
    in registers, and the other half is awaited; rows [BLOCK_Q, COLUMNS].
    """
    HALF: gl.constexpr = tile.shape[1] // CONSUMERS
    factor: gl.constexpr = gl.DotOperandLayout(0, accumulator(rows.shape[1]), 2)
    mine = gl.convert_layout(x, factor)  # [ROWS, HALF]
    acc = warpgroup_mma(mine, rows.slice(c * HALF, HALF), acc, is_async=True)
    mbarrier.wait(ready, phase)
    other = tile.slice((1 - c) * HALF, HALF, dim=1)  # [ROWS, HALF]
    rest = rows.slice((1 - c) * HALF, HALF)  # [HALF, COLUMNS]
    return warpgroup_mma(other, rest, acc, is_async=True)


@gluon.jit
def add_queries(c: gl.constexpr, dk, dv, n, row, invariants, MASKED: gl.constexpr):
    """One step of the loop over queries: block n, at row, adds to dK and dV."""
    seen_from, scale_log2, sizes, shared = invariants
    q_slots = shared.ring.slots[0]
    SLOTS: gl.constexpr = q_slots.shape[0]
    HALF: gl.constexpr = q_slots.shape[1] // CONSUMERS
    COLUMNS: gl.constexpr = q_slots.shape[2] // CONSUMERS
    layout: gl.constexpr = accumulator(HALF)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    slot = n % SLOTS
    q_tile, do_tile = at(shared.ring.slots, slot)  # [BLOCK_Q, D] each
    mbarrier.wait(shared.ring.ready.index(slot), n // SLOTS & 1)
    unread = gl.zeros([ROWS, HALF], gl.float32, layout)  # [ROWS, HALF]
    q_half = q_tile.slice(c * HALF, HALF).permute((1, 0))  # [D, HALF]
    do_half = do_tile.slice(c * HALF, HALF).permute((1, 0))  # [D, HALF]
    k_tile, v_tile = shared.own  # [ROWS, D] each
    s = warpgroup_mma(
        k_tile, q_half, unread, use_acc=False, is_async=True
    )  # [ROWS, HALF]
    dp = warpgroup_mma(
        v_tile, do_half, unread, use_acc=False, is_async=True
    )  # [ROWS, HALF]
    s = warpgroup_mma_wait(1, [s])  # [ROWS, HALF], unscaled; dP is still running
    lse_rows = read_half(shared.statistics[0], slot, c, columns)  # [HALF]
    p = gl.exp2(s * scale_log2 - lse_rows[None, :])  # [ROWS, HALF]
    if MASKED:
        i = c * HALF + gl.arange(0, HALF, columns)  # [HALF]
        seen = (seen_from - row)[:, None] <= i[None, :]  # [ROWS, HALF]
        if sizes.left is not None:
            seen = seen & (i[None, :] <= (seen_from + sizes.left - row)[:, None])
        p = gl.where(seen, p, 0.0)  # [ROWS, HALF]
    p_bits = p.to(q_tile.dtype)  # [ROWS, HALF]
    p_tile = shared.p.index(n % 2)  # [ROWS, BLOCK_Q]
    share(p_bits, p_tile, c, shared.p_ready)
    do_columns = do_tile.slice(c * COLUMNS, COLUMNS, dim=1)  # [BLOCK_Q, COLUMNS]
    dv = add_product(c, dv, p_bits, p_tile, do_columns, shared.p_ready, n & 1)
    dp = warpgroup_mma_wait(2, [dp])  # [ROWS, HALF]; dV is still running
    delta_rows = read_half(shared.statistics[1], slot, c, columns)  # [HALF]
    ds = (p * (dp - delta_rows[None, :])).to(q_tile.dtype)  # [ROWS, HALF]
    ds_tile = shared.ds.index(n % 2)  # [ROWS, BLOCK_Q]
    share(ds, ds_tile, c, shared.ds_ready)
    q_columns = q_tile.slice(c * COLUMNS, COLUMNS, dim=1)  # [BLOCK_Q, COLUMNS]
    dk = add_product(c, dk, ds, ds_tile, q_columns, shared.ds_ready, n & 1)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    mbarrier.arrive(shared.ring.empty.index(slot))
    return dk, dv


@gluon.jit
def wide_consumer(
    c: gl.constexpr, dk_out, dv_out, scale, scale_log2, sizes, block, shared,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute half of the columns of a block of dK and dV; consumer 0 stores dK, the
    other one dV.
    """
    BLOCK_Q: gl.constexpr = shared.ring.slots[0].shape[1]
    COLUMNS: gl.constexpr = shared.own[0].shape[1] // CONSUMERS
    s_layout: gl.constexpr = accumulator(BLOCK_Q // CONSUMERS)
    layout: gl.constexpr = accumulator(COLUMNS)
    b, h_kv, col = block.b, block.h, block.col
    GROUP, T_q, T_k = sizes.GROUP, sizes.T_q, sizes.T_k
    steps, full = GROUP * block.blocks, GROUP * block.full
    j = col + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))  # [ROWS]
    seen_from = j + T_q - T_k  # [ROWS], the first query that sees a key
    dk = gl.zeros([ROWS, COLUMNS], gl.float32, layout)  # [ROWS, COLUMNS]
    dv = gl.zeros([ROWS, COLUMNS], gl.float32, layout)  # [ROWS, COLUMNS]
    mbarrier.wait(shared.arrived, 0)
    invariants = (seen_from, scale_log2, sizes, shared)
    for n in range(full):
        i = block_of(n, block, GROUP, BLOCK_Q)[1]
        dk, dv = add_queries(c, dk, dv, n, i, invariants, False)
    if CAUSAL:
        for n in range(full, steps):
            i = block_of(n, block, GROUP, BLOCK_Q)[1]
            dk, dv = add_queries(c, dk, dv, n, i, invariants, True)
    # The other consumer may still read K and V, which the results replace.
    mbarrier.arrive(shared.p_ready)
    mbarrier.wait(shared.p_ready, steps & 1)
    k_tile, v_tile = shared.own  # [ROWS, D] each
    k_half = k_tile.slice(c * COLUMNS, COLUMNS, dim=1)  # [ROWS, COLUMNS]
    v_half = v_tile.slice(c * COLUMNS, COLUMNS, dim=1)  # [ROWS, COLUMNS]
    k_half.store((dk * scale).to(k_tile.dtype))
    v_half.store(dv.to(v_tile.dtype))
    fence_async_shared()
    mbarrier.arrive(shared.ds_ready)
    mbarrier.wait(shared.ds_ready, steps & 1)
    if c == 0:
        tma.async_copy_shared_to_global(dk_out, [b, h_kv, col, 0], k_tile)
    else:
        tma.async_copy_shared_to_global(dv_out, [b, h_kv, col, 0], v_tile)
    tma.store_wait(0)
