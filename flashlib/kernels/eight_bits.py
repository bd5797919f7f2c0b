"""What the kernels that read rows of E4M3, each with a scale, from a cache share.

Tensor cores multiply the numbers as float16, which can represent all of them. One
instruction converts two of them; a conversion to bfloat16 would take several. So the
other factors are float16 too, scaled by powers of two where their range is larger.
"""

import triton
import triton.language as tl

from flashlib.kernels import INTERPRETED

IN_INTERPRETER = tl.constexpr(INTERPRETED)
# Smaller scales count as this one, so that sums of weights over scales stay finite.
LEAST_CACHED_SCALE = tl.constexpr(2.0**-100)
EXPONENT_BITS = tl.constexpr(0x7F800000)  # of a float32
# The bytes of two registers, pairs of neighbors, become the first and the second of
# each pair in float16; Triton would move byte by byte.
UNPACK = tl.constexpr(
    """{
    .reg .b32 first, second;
    .reg .b16 low, high;
    prmt.b32 first, $4, $5, 0x6420;
    prmt.b32 second, $4, $5, 0x7531;
    mov.b32 {low, high}, first;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    mov.b32 {low, high}, second;
    cvt.rn.f16x2.e4m3x2 $2, low;
    cvt.rn.f16x2.e4m3x2 $3, high;
    }"""
)


@triton.jit
def units_of(most):
    """Powers of two [ROWS] under which numbers of at most ``most`` are below 2^15."""
    most = tl.maximum(most, LEAST_CACHED_SCALE)
    bits = most.to(tl.int32, bitcast=True) & EXPONENT_BITS
    return bits.to(tl.float32, bitcast=True) * 2.0**-14


@triton.jit
def in_units(x, units):
    """x [ROWS, COLS] in float16, in units of its rows. Exact, but for numbers of less
    than 2^-28 times the largest, which bfloat16 may have: their error is 2^-40 of it.
    """
    return (x.to(tl.float32) * (1.0 / units)[:, None]).to(tl.float16)


@triton.jit
def split_pairs(pairs):
    """The first and the second number of each pair, in float16."""
    if IN_INTERPRETER:  # which has no inline assembly
        first, second = pairs.to(tl.uint8), (pairs >> 8).to(tl.uint8)
        first = first.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = second.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        both: tl.constexpr = (tl.float16, tl.float16)
        first, second = tl.inline_asm_elementwise(
            UNPACK, "=r,=r,=r,=r,r,r", [pairs], dtype=both, is_pure=True, pack=4
        )
    return first, second


@triton.jit
def weighted_softmax(s, m, l, scale_log2, scales, seen):
    """``online_softmax`` of a block whose values are numbers times scales [BLOCK_K]: in
    place of the weights, it returns weights times scales.

    The maximum m is one of scores plus exponents of the scales, so that a weight times
    its scale is below 2 and fits float16; l is still a sum of weights.
    """
    # A scale of NaN stays one.
    scales = tl.maximum(scales, LEAST_CACHED_SCALE, propagate_nan=tl.PropagateNan.ALL)
    exponents = (scales.to(tl.int32, bitcast=True) >> 23) - 127
    inverse = ((127 - exponents) << 23).to(tl.float32, bitcast=True)  # 2^-exponents
    z = s * scale_log2 + exponents.to(tl.float32)[None, :]
    z = tl.where(seen, z, -float("inf"))
    m_new = tl.maximum(m, tl.max(z, 1))
    p = tl.exp2(z - m_new[:, None])
    alpha = tl.exp2(m - m_new)  # [BLOCK_Q]
    l = l * alpha + tl.sum(p * inverse[None, :], 1)
    return p * (scales * inverse)[None, :], alpha, m_new, l
