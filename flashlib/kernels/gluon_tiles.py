"""Pieces that both passes for Hopper (sm_90) share: barriers and slots in shared
memory, and the layout of a product.

Chapter *Hopper*. A warp group of four warps computes ROWS rows. The copy engine (TMA)
fills slots with tiles; barriers say when a tile has arrived and when a slot may be
filled again.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROWS = gl.constexpr(64)  # of a tile that one warp group owns: the height of a product


class Ring(NamedTuple):
    """Slots in shared memory. The barrier `ready` of a slot completes when a tile has
    arrived, `empty` when all readers are done with it.
    """

    slots: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.constexpr_function
def accumulator(columns, warps=4):
    """The layout of a product [16 warps, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.constexpr_function
def first_columns(d):
    """How many of d columns are in the first tile of a row: Triton takes only tiles
    whose sides are powers of two, so 192 columns are 128 and 64, and 576 are 512 and
    64.
    """
    return {192: 128, 576: 512}.get(d, d)


@gluon.jit
def make_barriers(n: gl.constexpr, count: gl.constexpr):
    """n barriers whose phases each end with the count-th arrival.

    The compiler lets a barrier that nobody waits at share its memory with a tile, and
    the first value of the barrier could overwrite the tile: make only what is used.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def make_slots(
    dtype: gl.constexpr, n: gl.constexpr, rows: gl.constexpr, D: gl.constexpr
):
    """Shared memory for n tiles [rows, D]."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, D], dtype)
    return gl.allocate_shared_memory(dtype, [n, rows, D], layout)
