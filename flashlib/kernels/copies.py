"""What the kernels for Hopper share: which tensors they can take, and descriptors of Gluon's kind.

A descriptor tells the copy engine (TMA) where a tensor lies. One instruction then copies a whole tile
between device memory and shared memory, while the warps do something else (chapter *Hopper*).
"""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlib.kernels import INTERPRETED
from flashlib.kernels.launch import describable

ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
WIDTHS = (64, 128, 256)


def refusal(q, k, v, widths=WIDTHS):
    """Why the Hopper kernels cannot take q, k, v ``[B, H, T, d]``, in words that end an error message; None
    where they can.

    widths: the head dimensions that the kernel is written for.
    """
    if INTERPRETED:
        return "a Hopper GPU, got Triton's interpreter, which cannot run Gluon"
    capability = torch.cuda.get_device_capability(q.device)
    if capability != (9, 0):
        return f"a Hopper GPU (compute capability 9.0), got {capability[0]}.{capability[1]}"
    if q.dtype not in ELEMENTS:
        return f"float16 or bfloat16, got {q.dtype}"
    if q.shape[3] not in widths or v.shape[3] != q.shape[3]:
        return f"d = d_v, one of {', '.join(map(str, widths))}, got d = {q.shape[3]}, d_v = {v.shape[3]}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.numel() > 0 and not describable(x):
            return (
                f"{name} with last stride 1, the other strides and the address multiples of 16 bytes, got "
                f"strides {tuple(x.stride())} at an address {x.data_ptr() % 16} bytes past a multiple of 16"
            )
    return None


def descriptor(x, rows):
    """A descriptor of x ``[B, H, T, d]`` with tiles [1, 1, rows, d]: outside of x it reads zeros and writes
    nothing.
    """
    # The stride of a dimension of size one is never used, but must be a multiple of 16 bytes.
    strides = [stride if size > 1 else 16 for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
    tile = [1, 1, rows, x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(tile, ELEMENTS[x.dtype])
    return TensorDescriptor(x, list(x.shape), [*strides, 1], tile, layout)
