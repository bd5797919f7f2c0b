"""Compile a kernel that uses private parts of Gluon, for a GPU that is not there:
``TRITON_INTERPRET=0 python gluon_worker.py`` prints its code at two stages.
"""

from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from flashlib import internals

start_adding = internals.gluon_tma_add()


@gluon.jit
def add_kernel(x):
    """Adds ones to the first tile of x, through another view of it."""
    shape: gl.constexpr = x.block_type.shape
    tile = gl.allocate_shared_memory(x.dtype, shape, x.layout)
    slots = tile._reinterpret(x.dtype, [1, shape[0], shape[1]], x.layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    slots.index(0).store(gl.full(shape, 1.0, x.dtype, layout))
    fence_async_shared()
    start_adding(x, (0, 0), tile)
    tma.store_wait(0)


def main():
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    shape = [64, 32]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.float32)
    x = TensorDescriptor(torch.zeros(shape), shape, [32, 1], shape, layout)
    compiled = add_kernel.warmup(x, grid=(1,))
    print(compiled.asm["ttgir"], compiled.asm["ptx"])


main()
