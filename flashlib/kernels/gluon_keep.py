"""One maximum for a tile: in large problems in bfloat16, the blocks that all rows of a
tile see keep the maximum of the first one.

Depth page of *Hopper*, "One maximum for a tile". Nothing is rescaled there, which saves
a fourth of the loop's instructions, but weights may exceed 1. Where that goes too far,
a first launch writes L = NaN, and says so in `overflowed`. A second one, which
otherwise ends at once, computes the tiles of such rows with the maximum of every block.
So no result depends on a guess, and two runs agree in every bit. A row that gets NaN
from its inputs is computed twice and stays NaN.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from flashlib.kernels.gluon_forward import (
    before_next_wait,
    release,
    start_scores,
    start_values,
    thread_sums,
    weights,
)
from flashlib.kernels.gluon_scores import change_tile
from flashlib.kernels.gluon_tiles import ROWS

# The blocks after a tile's first one keep its maximum if there are this many keys, and
# this many scores for each multiprocessor: less would not make up for another launch.
KEEP_FROM = 2048
KEEP_SCORES = 2**21
# The largest sum of weights under a kept maximum. Where a later block rescales it, the
# factor is 0 below 2^-126, so what is lost is at most 2^-26 of the new sum.
LARGEST_SUM = gl.constexpr(2.0**100)


def keeps_maximum(q, k, score_mod, packing=None):
    """Whether blocks keep the maximum of a tile's first one. Weights in float16 end at
    2^16; under a window, some rows see nothing of the first block; and what is added to
    scores may let them grow with the position, as ALiBi does. Of packed sequences, each
    counts as if it had the longest keys.
    """
    if q.dtype != torch.bfloat16 or score_mod.window is not None:
        return False
    longest = k.shape[2] if packing is None else packing.longest_k
    scores = q.numel() // q.shape[-1] * longest // (2 if score_mod.causal else 1)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    enough = longest >= KEEP_FROM and scores >= KEEP_SCORES * processors
    return enough and not score_mod._replace(softcap=0.0).changed


@gluon.jit
def attend_keeping(bits, acc, m, l, invariants, change, count, col):
    """As attend, for a block that all rows see whole, but with the maximum m of the
    blocks before it, so that nothing is rescaled. Weights may exceed 1.
    """
    q_tile, k_ring, v_ring, queries, sizes, scale_log2 = invariants
    s = start_scores(q_tile, k_ring, count)
    acc = start_values(acc, bits, v_ring, count - 1)
    s = warpgroup_mma_wait(1, [s])  # [ROWS, BLOCK_K]; P V is still running
    s = change_tile(s, None, queries, col, sizes, change)
    p, _one = weights(s, m, m, scale_log2)
    sums = before_next_wait(thread_sums(p))  # [ROWS, 4]
    o = warpgroup_mma_wait(0, [acc])  # [ROWS, D]
    release(k_ring, count)
    release(v_ring, count - 1)
    bits = p.to(k_ring.slots.dtype).to(gl.int16, bitcast=True)  # [ROWS, BLOCK_K]
    return bits, warpgroup_mma_init(o), l + sums


@gluon.jit
def store_checked(lse, lse_rows, l, o_rows, overflowed, i, T_q):
    """Store L of the rows i [ROWS] before T_q: NaN where l or O is not finite, and then
    1 in `overflowed`.
    """
    size = gl.sum(gl.abs(o_rows), 1)  # [ROWS], not finite if a number of O is not
    right = l + gl.convert_layout(size, l.type.layout) < float("inf")
    gl.store(overflowed + gl.zeros_like(i), 1, mask=~right & (i < T_q))
    gl.store(lse + i, gl.where(right, lse_rows, float("nan")), mask=i < T_q)


@gluon.jit
def has_overflowed(lse, task, CONSUMERS: gl.constexpr):
    """Whether store_checked left NaN in L of any row of a tile."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    found = 0
    for c in gl.static_range(CONSUMERS):
        i = task.row + c * ROWS + gl.arange(0, ROWS, layout)  # [ROWS]
        l = gl.load(lse + task.lse + i, mask=i < task.T_q, other=0.0)  # [ROWS]
        found |= gl.max((l != l).to(gl.int32), 0)
    return found != 0
