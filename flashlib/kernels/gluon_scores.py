"""ALiBi in the kernels for Hopper (sm_90), in Gluon.

Chapter *Masks* (``eq-masks-alibi``): a score falls with the distance of its positions.
The derivative is that of no change, so a backward pass only needs the same weights.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2_E = gl.constexpr(math.log2(math.e))
LARGEST = gl.constexpr(3.4028234663852886e38)  # of float32
EXACT = gl.constexpr(0x4B400000)  # the bits of 1.5 2^23 in float32


@gluon.jit
def slope_of(sizes, b, h):
    """The slope of a head, in base 2."""
    batch = b.to(gl.int64) * sizes.slope_batch
    slope = gl.load(sizes.slopes + batch + h.to(gl.int64) * sizes.slope_head)
    return slope * LOG2_E


@gluon.jit
def in_raw_scores(slope, scale_log2):
    """A slope in base 2 in units of the raw scores; finite, as 0 times inf is NaN."""
    return gl.maximum(gl.minimum(slope / scale_log2, LARGEST), -LARGEST)


@gluon.jit
def with_slope(s, row, col, slope):
    """Scores s less the slope times the distance between the positions of their
    rows, from row on, and of their columns, from col on, below 2^22.

    A conversion to float32 takes as long as an exponential. But the bits of 1.5 2^23 as
    an integer, plus a small one, are those of their sum as numbers.
    """
    i = row + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))  # [rows]
    j = col + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))  # [columns]
    i = (i + EXACT).to(gl.float32, bitcast=True)[:, None]  # [rows, 1]
    j = (j + EXACT).to(gl.float32, bitcast=True)[None, :]  # [1, columns]
    return s - gl.abs(i - j) * slope
