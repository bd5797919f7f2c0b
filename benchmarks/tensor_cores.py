"""One product on Hopper's tensor cores (sm_90), for benchmarks/probes.py: 64 rows times
a few columns, whose sum over K is added by one instruction after another.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS, COLUMNS = 64, 8  # of a product: the smallest that there is
BYTES = 32  # that an instruction reads of each row: 16 or 32 numbers


@gluon.jit
def product_kernel(
    a, b, c, chunks, ROWS: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr
):  # fmt: skip
    """c [ROWS, COLUMNS] = a [ROWS, chunks K] times b [COLUMNS, chunks K] transposed, K
    columns with each instruction, added to the sum so far.
    """
    bits: gl.constexpr = a.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, COLUMNS, 256 // bits]
    )
    plain: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(32, bits, 2)
    a_tile = gl.allocate_shared_memory(a.dtype.element_ty, [ROWS, K], shared)
    b_tile = gl.allocate_shared_memory(b.dtype.element_ty, [COLUMNS, K], shared)
    i = gl.arange(0, ROWS, gl.SliceLayout(1, plain))[:, None]
    j = gl.arange(0, COLUMNS, gl.SliceLayout(1, plain))[:, None]
    k = gl.arange(0, K, gl.SliceLayout(0, plain))[None, :]
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for chunk in range(chunks):
        at = chunk * K + k
        a_tile.store(gl.load(a + i * (chunks * K) + at))
        b_tile.store(gl.load(b + j * (chunks * K) + at))
        fence_async_shared()
        acc = warpgroup_mma(a_tile, b_tile.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    gl.store(c + rows * COLUMNS + columns, acc)


def product(a, b):
    """a ``[64, K]`` times b ``[8, K]`` transposed, ``[64, 8]`` in float32, as tensor
    cores add it; both are contiguous, in one dtype of 8 or 16 bits, and K is a multiple
    of what an instruction takes.
    """
    each = BYTES // a.element_size()
    c = torch.empty(ROWS, COLUMNS, device=a.device)
    product_kernel[(1,)](a, b, c, a.shape[1] // each, ROWS, COLUMNS, each, num_warps=4)
    return c
