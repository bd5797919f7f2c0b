"""What the kernels for Hopper share: which tensors they can take, their results, descriptors of Gluon's
kind.

A descriptor tells the copy engine (TMA) where a tensor lies. One instruction then copies a whole tile
between device memory and shared memory, while the warps do something else (chapter *Hopper*).
"""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlib.kernels import INTERPRETED, launch

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
        if x.numel() > 0 and not launch.describable(x):
            return (
                f"{name} with last stride 1, the other strides and the address multiples of 16 bytes, got "
                f"strides {tuple(x.stride())} at an address {x.data_ptr() % 16} bytes past a multiple of 16"
            )
    return None


def descriptor(x, rows):
    """A descriptor of x ``[B, H, T, d]`` with tiles [1, 1, rows, d]: outside of x it reads zeros and writes
    nothing.
    """
    plain = launch.descriptor(x, rows, x.shape[3])
    layout = gl.NVMMASharedLayout.get_default_for(plain.block_shape, ELEMENTS[x.dtype])
    return TensorDescriptor(x, plain.shape, plain.strides, plain.block_shape, layout)


def filled(q, k, scale, fill):
    """O ``[B, H, T_q, d]`` in the dtype of q and L ``[B, H, T_q]`` in float32, new and contiguous, filled by
    fill(q, o, lse, scale), which sees no empty tensor and a positive scale: the kernels take the maximum of a
    row before they scale, and 0 times -inf, the score of a key that is not seen, is NaN.
    """
    if scale <= 0.0:
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if k.numel() == 0:
        return o.zero_(), lse.fill_(-float("inf"))
    if lse.numel():
        fill(q, o, lse, scale)
    return o, lse
