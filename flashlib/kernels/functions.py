"""What the function of a mask or a score may use, in kernels (:mod:`flashlib.masks`,
:mod:`flashlib.score_functions`).
"""

import triton
import triton.language as tl


@triton.jit
def clipped(n, size):
    """The index nearest to n in 0 to size - 1, in 64 bits."""
    return tl.maximum(tl.minimum(n, size - 1), 0).to(tl.int64)


@triton.jit
def at(x, a, b=None, c=None, d=None):
    """The elements of a Table at these indices, float32 in place of other floats."""
    elements = x.ptr + clipped(a, x.sizes[0]) * x.strides[0]
    if b is not None:
        elements += clipped(b, x.sizes[1]) * x.strides[1]
    if c is not None:
        elements += clipped(c, x.sizes[2]) * x.strides[2]
    if d is not None:
        elements += clipped(d, x.sizes[3]) * x.strides[3]
    found = tl.load(elements)
    if found.dtype.is_floating():
        found = found.to(tl.float32)
    return found


@triton.jit
def div(a, b):
    """a / b for integers, rounded down; // rounds toward zero."""
    rest = a % b
    return a // b - ((rest != 0) & ((rest < 0) != (b < 0))).to(tl.int32)


@triton.jit
def mod(a, b):
    """The remainder of ``div(a, b)``."""
    return a - div(a, b) * b


@triton.jit
def where(condition, a, b):
    """a where the condition is true, and b elsewhere."""
    return tl.where(condition, a, b)


@triton.jit
def absolute(x):
    """The absolute value."""
    return tl.abs(x)


@triton.jit
def row(x, p):
    """The row of a query at position p in a Table [B, H, T_q, T_k]."""
    return p - (x.sizes[3] - x.sizes[2])


@triton.jit
def exponential(x):
    """e^x, in float32 for integers too."""
    return tl.exp(tl.cast(x, tl.float32))


@triton.jit
def logarithm(x):
    """The natural logarithm, in float32 for integers too."""
    return tl.log(tl.cast(x, tl.float32))
