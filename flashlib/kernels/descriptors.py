"""Tensor descriptors.

A descriptor tells the copy engine of the GPU (TMA) where a tensor is stored. One
instruction then copies a whole tile between device memory and shared memory while the
warps do something else (chapter *Hopper*).
"""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

WRAP = 2**30  # more than the rows of a packed tensor


def describable(x):
    """Whether TMA can read x: last stride 1, the other strides and the address
    multiples of 16 bytes.
    """
    if x.numel() == 0:
        return False
    used = [n for n, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    in_bytes = [stride * x.element_size() for stride in used[:-1]]
    return (
        used[-1] == 1
        and x.data_ptr() % 16 == 0
        and all(n > 0 and n % 16 == 0 for n in in_bytes)
    )


def descriptor(x, rows, cols):
    """A descriptor that reads tiles [1, 1, rows, cols] of x ``[B, H, T, d]``, with
    zeros outside x.
    """
    # The stride of a dimension of size one is never used, but must be a multiple of 16
    # bytes.
    outer = zip(x.stride()[:3], x.shape[:3], strict=True)
    strides = [stride if size > 1 else 16 for stride, size in outer]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, cols])


def operands(tensors, tile):
    """Tensors q, k, v and perhaps do as a kernel with this Tile reads them: themselves,
    or descriptors.
    """
    if not tile.DESCRIPTOR:
        return tensors
    rows = (tile.BLOCK_Q, tile.BLOCK_K, tile.BLOCK_K, tile.BLOCK_Q)
    cols = (tile.BLOCK_D, tile.BLOCK_D, tile.BLOCK_DV, tile.BLOCK_DV)
    return [descriptor(*of) for of in zip(tensors, rows, cols, strict=False)]


def packed_descriptor(x, rows, cols):
    """A descriptor of packed x ``[total, H, d]`` that reads zeros and writes nothing
    outside of a sequence, as triton.tools.ragged_tma makes it.

    Row r of a sequence that ends before row e is at the coordinates (WRAP, e, h, WRAP -
    length + r). The fourth coordinate must be below WRAP, so rows after the end of the
    sequence are outside. It is too large by WRAP rows. The first coordinate subtracts
    these, since addresses wrap around: WRAP times 2^34 elements are a multiple of 2^64
    bytes.
    """
    # Strides of dimensions of one as in descriptor.
    row, head = (x.stride(n) if x.shape[n] > 1 else 16 for n in (0, 1))
    shape = [2**31 - 2**16, 2**31 - 2**16, x.shape[1], WRAP, x.shape[2]]
    strides = [2**34 - row, row, head, row, 1]
    return TensorDescriptor(x, shape, strides, [1, 1, 1, rows, cols])


def gluon_descriptor(x, rows, cols=None):
    """A descriptor of x ``[B, H, T, d]`` with tiles [1, 1, rows, cols], or of packed x
    ``[total, H, d]``, for Gluon: outside of x, or of a packed sequence, it reads zeros
    and writes nothing. Tiles have all columns unless cols says how many.
    """
    # Gluon costs half a second to import, which only a Hopper GPU needs.
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia import hopper

    element = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    describe = packed_descriptor if x.ndim == 3 else descriptor
    plain = describe(x, rows, cols or x.shape[-1])
    layout = gl.NVMMASharedLayout.get_default_for(plain.block_shape, element)
    return hopper.TensorDescriptor(
        x, plain.shape, plain.strides, plain.block_shape, layout
    )


def row_descriptor(x, rows):
    """A descriptor of statistics x ``[B, H, PADDED]``, with tiles [1, rows], for
    Gluon.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia import hopper

    (B, H, padded), layout = x.shape, gl.NVMMASharedLayout(0, 32, 2)
    return hopper.TensorDescriptor(x, [B * H, padded], [padded, 1], [1, rows], layout)


def descriptors_of_columns(x, rows):
    """Two Gluon descriptors of x, with tiles of the first columns and of the rest
    (``gluon_tiles.first_columns``); None for the second where there is no rest.
    """
    from flashlib.kernels.gluon_tiles import first_columns

    d = x.shape[-1]
    first = first_columns(d)
    rest = gluon_descriptor(x, rows, d - first) if first < d else None
    return gluon_descriptor(x, rows, first), rest
