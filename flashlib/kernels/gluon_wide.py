"""dK and dV of wide heads (d = 256) for Hopper (sm_90), in Gluon.

Chapter *Hopper*, its depth; the division of labor is that of hopper_backward.py, with
one difference. At d = 256 the registers of a warp group hold no row of dK and dV in
full. Both consumers therefore own the same ROWS keys, and each computes its share, one
half, of everything else: of S^T and dP^T the columns of QUERIES queries, of dK and dV
COLUMNS columns. A consumer hands its share of P and dS to the other one through shared
memory: its own share enters its products from registers, while the other one arrives.
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

from flashlib.kernels.gluon_backward import (
    CONSUMERS,
    meet,
    pair_in,
    read_rows,
    split_layout,
)
from flashlib.kernels.gluon_keys import block_of
from flashlib.kernels.gluon_tiles import ROWS, accumulator


@gluon.jit
def make_shared_tiles(dtype: gl.constexpr, columns: gl.constexpr):
    """Two slots for tiles [ROWS, columns], of which each consumer writes its share."""
    layout: gl.constexpr = split_layout(columns // CONSUMERS)
    return gl.allocate_shared_memory(dtype, [2, ROWS, columns], layout)


@gluon.jit
def hand_over(share, tile, c: gl.constexpr, ready):
    """Store a share [ROWS, QUERIES], that of consumer c, in its columns of a tile, and
    tell the other consumer.
    """
    QUERIES: gl.constexpr = share.shape[1]
    tile.slice(c * QUERIES, QUERIES, dim=1).store(share)
    fence_async_shared()
    mbarrier.arrive(ready)


@gluon.jit
def add_product(c: gl.constexpr, acc, share, tile, rows, ready, phase):
    """Start acc += tile rows, where consumer c's share of the columns of the tile
    [ROWS, BLOCK_Q] is in registers, and the other one is awaited; rows [BLOCK_Q,
    COLUMNS].
    """
    QUERIES: gl.constexpr = tile.shape[1] // CONSUMERS
    OTHER: gl.constexpr = 1 - c
    factor: gl.constexpr = gl.DotOperandLayout(0, accumulator(rows.shape[1]), 2)
    own = gl.convert_layout(share, factor)  # [ROWS, QUERIES]
    own_rows = rows.slice(c * QUERIES, QUERIES)  # [QUERIES, COLUMNS]
    acc = warpgroup_mma(own, own_rows, acc, is_async=True)
    mbarrier.wait(ready, phase)
    other = tile.slice(OTHER * QUERIES, QUERIES, dim=1)  # [ROWS, QUERIES]
    other_rows = rows.slice(OTHER * QUERIES, QUERIES)  # [QUERIES, COLUMNS]
    return warpgroup_mma(other, other_rows, acc, is_async=True)


@gluon.jit
def add_queries(c: gl.constexpr, dk, dv, n, row, invariants, MASKED: gl.constexpr):
    """One step of the loop over queries: block n, at row, adds to dK and dV."""
    seen_from, scale_log2, sizes, shared = invariants
    q_slots = shared.ring.slots[0]
    SLOTS: gl.constexpr = q_slots.shape[0]
    QUERIES: gl.constexpr = q_slots.shape[1] // CONSUMERS
    COLUMNS: gl.constexpr = q_slots.shape[2] // CONSUMERS
    layout: gl.constexpr = accumulator(QUERIES)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    slot = n % SLOTS
    q_tile, do_tile = pair_in(shared.ring.slots, slot)  # [BLOCK_Q, D] each
    # -- scores of this consumer's share of the queries
    mbarrier.wait(shared.ring.ready.index(slot), n // SLOTS & 1)
    unread = gl.zeros([ROWS, QUERIES], gl.float32, layout)  # [ROWS, QUERIES]
    q_share = q_tile.slice(c * QUERIES, QUERIES).permute((1, 0))  # [D, QUERIES]
    do_share = do_tile.slice(c * QUERIES, QUERIES).permute((1, 0))  # [D, QUERIES]
    k_tile, v_tile = shared.own  # [ROWS, D] each
    s = warpgroup_mma(
        k_tile, q_share, unread, use_acc=False, is_async=True
    )  # [ROWS, QUERIES]
    dp = warpgroup_mma(
        v_tile, do_share, unread, use_acc=False, is_async=True
    )  # [ROWS, QUERIES]
    s = warpgroup_mma_wait(1, [s])  # [ROWS, QUERIES], unscaled; dP is still running
    lse_rows = read_rows(shared.statistics[0], slot, c, QUERIES)  # [QUERIES]
    p = gl.exp2(s * scale_log2 - lse_rows[None, :])  # [ROWS, QUERIES]
    if MASKED:
        i = c * QUERIES + gl.arange(0, QUERIES, columns)  # [QUERIES]
        seen = (seen_from - row)[:, None] <= i[None, :]  # [ROWS, QUERIES]
        if sizes.left is not None:
            seen = seen & (i[None, :] <= (seen_from + sizes.left - row)[:, None])
        p = gl.where(seen, p, 0.0)  # [ROWS, QUERIES]
    # -- this consumer's columns of dV, of all queries
    p_share = p.to(q_tile.dtype)  # [ROWS, QUERIES]
    p_tile = shared.p.index(n % 2)  # [ROWS, BLOCK_Q]
    hand_over(p_share, p_tile, c, shared.p_ready)
    do_columns = do_tile.slice(c * COLUMNS, COLUMNS, dim=1)  # [BLOCK_Q, COLUMNS]
    dv = add_product(c, dv, p_share, p_tile, do_columns, shared.p_ready, n & 1)
    # -- and of dK
    dp = warpgroup_mma_wait(2, [dp])  # [ROWS, QUERIES]; dV is still running
    delta_rows = read_rows(shared.statistics[1], slot, c, QUERIES)  # [QUERIES]
    ds_share = (p * (dp - delta_rows[None, :])).to(q_tile.dtype)  # [ROWS, QUERIES]
    ds_tile = shared.ds.index(n % 2)  # [ROWS, BLOCK_Q]
    hand_over(ds_share, ds_tile, c, shared.ds_ready)
    q_columns = q_tile.slice(c * COLUMNS, COLUMNS, dim=1)  # [BLOCK_Q, COLUMNS]
    dk = add_product(c, dk, ds_share, ds_tile, q_columns, shared.ds_ready, n & 1)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    mbarrier.arrive(shared.ring.empty.index(slot))
    return dk, dv


@gluon.jit
def consume_wide(
    c: gl.constexpr, dk_out, dv_out, scale, scale_log2, sizes, block, shared,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute this consumer's columns of a block of dK and dV; consumer 0 stores dK,
    the other one dV.
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
    meet(shared.p_ready, steps)
    k_tile, v_tile = shared.own  # [ROWS, D] each
    k_columns = k_tile.slice(c * COLUMNS, COLUMNS, dim=1)  # [ROWS, COLUMNS]
    v_columns = v_tile.slice(c * COLUMNS, COLUMNS, dim=1)  # [ROWS, COLUMNS]
    k_columns.store((dk * scale).to(k_tile.dtype))
    v_columns.store(dv.to(v_tile.dtype))
    fence_async_shared()
    meet(shared.ds_ready, steps)
    if c == 0:
        tma.async_copy_shared_to_global(dk_out, [b, h_kv, col, 0], k_tile)
    else:
        tma.async_copy_shared_to_global(dv_out, [b, h_kv, col, 0], v_tile)
    tma.store_wait(0)
