"""What the kernels for Hopper (sm_90) do to scores, in Gluon: a softcap, ALiBi, a
function of a :class:`flashlib.score_functions.Score`, and a bias, in this order.

Chapter *Masks* (``eq-masks-softcap``, ``eq-masks-alibi``, ``eq-masks-function``). A
kernel has the branches of what a call changes, and no others. A function is the one
that the Triton kernels compile (:func:`flashlib.masks.compiled`); Gluon compiles it for
the layout of its tiles. In the backward pass a change multiplies dS by its derivative.

The hardware's approximation of tanh is off by up to 2^-11 of it. That is less than
bfloat16 rounds a score by, but L is in float32, and would lose nine of its digits. So
the forward pass has a quotient of polynomials, which takes one instruction of the
special unit as well, and is off by five units in the last place. The backward pass also
needs 1 - tanh^2 where tanh is almost 1. It takes both from one exponential and one
reciprocal.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlib.kernels import score_arguments
from flashlib.kernels.tiles import LN_2, LOG2_E

LARGEST_FLOAT = gl.constexpr(3.4028234663852886e38)
SIGN_BIT = gl.constexpr(-0x80000000)
# tanh x = x TOP(x^2) / BOTTOM(x^2) up to x = 9, where it is 1 in float32: coefficients
# of both polynomials, constants first, fitted to the relative error, which is 2.1e-8.
LAST = gl.constexpr(9.0)
TANH_TOP = gl.constexpr((1.0, 0.13381025, 3.4955873e-3, 2.060907e-5, 1.3354647e-8))
TANH_BOTTOM = gl.constexpr((1.0, 0.46714342, 2.5876978e-2, 3.2856336e-4, 7.7765520e-7))


class GluonChange(NamedTuple):
    """What a kernel does to scores next to ALiBi, whose slopes are among its sizes."""

    mask: Any = None  # the Rule of a mask, or None
    per_cap: Any = None  # scale / c for a softcap c, or None
    # What brings raw scores, or those of a softcap, to natural units for a function, or
    # None: Triton 3.6 cannot compare a Rule with None.
    natural: Any = None
    function: Any = None  # the Rule of a function, or None
    bias: Any = None  # a tensor, or None
    # From one batch, head, query and key to the next, or None. A stride of 1 is None,
    # too: consumers that Triton 3.6 compiles apart get None for a 1.
    strides: Any = None
    factor: Any = None  # what brings scores to base 2 when a bias is added, or None


def gluon_change(score_mod):
    """``(scale_log2, change)``: the GluonChange that a ScoreMod becomes next to its
    slopes, and what brings the changed scores to base 2.
    """
    scale, softcap, bias = score_mod.scale, score_mod.softcap, score_mod.bias
    mask, function = score_mod.mask, score_mod.function
    factor = softcap or scale
    natural = None if function is None else factor
    per_cap = scale / softcap if softcap else None
    scale_log2 = (factor if function is None else 1.0) * LOG2_E.value
    rules = score_arguments.for_kernel(mask), score_arguments.for_kernel(function)
    change = GluonChange(rules[0], per_cap, natural, rules[1])
    if bias is not None:
        strides = score_arguments.broadcast_strides(bias)
        strides = tuple(None if stride == 1 else stride for stride in strides)
        change = change._replace(bias=bias, strides=strides, factor=scale_log2)
        # Scores are scaled when the bias is added. With a factor other than 1, the
        # multiply-add of the weights would subtract a rounded maximum from a product
        # that is not rounded: at a bias of -1e30 the two differ by 1e23.
        scale_log2 = 1.0
    return scale_log2, change


# -- ALiBi


@gluon.jit
def load_slope(sizes, b, h):
    """The slope of a head, in base 2."""
    batch = b.to(gl.int64) * sizes.slope_batch
    slope = gl.load(sizes.slopes + batch + h.to(gl.int64) * sizes.slope_head)
    return slope * LOG2_E


@gluon.jit
def in_raw_scores(slope, scale_log2, change):
    """A slope in base 2 in the units of the scores that it is subtracted from; finite,
    as 0 times inf is NaN.
    """
    if change.natural is not None:
        scale_log2 = change.natural * LOG2_E
    elif change.factor is not None:
        scale_log2 = change.factor
    return gl.maximum(gl.minimum(slope / scale_log2, LARGEST_FLOAT), -LARGEST_FLOAT)


@gluon.jit
def with_slope(s, row, col, slope):
    """Scores s less the slope times the distance between the positions of their
    rows, from row on, and of their columns, from col on, below 2^24.

    A thread holds two columns of every eight. What a distance has of the thread is
    converted to float32 once a row; the rest of it is a constant of the instruction
    that adds it.
    """
    ROWS: gl.constexpr = s.shape[0]
    EIGHTS: gl.constexpr = s.shape[1] // 8
    parts = gl.reshape(s, [ROWS, EIGHTS, 4, 2])  # columns as 8 eight + 2 thread + pair
    by_pair: gl.constexpr = parts.type.layout
    by_thread: gl.constexpr = gl.SliceLayout(3, by_pair)  # [ROWS, EIGHTS, 4]
    by_row: gl.constexpr = gl.SliceLayout(1, by_thread)  # [ROWS, 4]
    i = row - col + gl.arange(0, ROWS, gl.SliceLayout(1, by_row))  # [ROWS]
    thread = gl.arange(0, 4, gl.SliceLayout(0, by_row))  # [4]
    own = (i[:, None] - 2 * thread[None, :]).to(gl.float32)  # [ROWS, 4]
    constants: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, by_pair))
    eight = gl.arange(0, EIGHTS, gl.SliceLayout(1, constants))  # [EIGHTS]
    pair = gl.arange(0, 2, gl.SliceLayout(0, constants))  # [2]
    rest = (8 * eight[:, None] + pair[None, :]).to(gl.float32)  # [EIGHTS, 2]
    distance = own[:, None, :, None] - rest[None, :, None, :]
    changed = gl.reshape(parts - gl.abs(distance) * slope, s.shape)
    return gl.convert_layout(changed, s.type.layout, assert_trivial=True)


# -- the softcap


@gluon.jit
def reciprocal(x):
    """1 / x for x >= 1 by one instruction, off by one unit in the last place."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def polynomial(x, COEFFICIENTS: gl.constexpr):
    """The value at x of a polynomial, from its coefficients, the constant first."""
    LAST_ONE: gl.constexpr = len(COEFFICIENTS) - 1
    value = x * COEFFICIENTS[LAST_ONE] + COEFFICIENTS[LAST_ONE - 1]
    for n in gl.static_range(LAST_ONE - 1):
        value = value * x + COEFFICIENTS[LAST_ONE - 2 - n]
    return value


@gluon.jit
def rational_tanh(x):
    """The hyperbolic tangent by a quotient of polynomials, to the precision of
    float32.
    """
    x = tl.clamp(x, -LAST, LAST, propagate_nan=tl.PropagateNan.ALL)
    square = x * x
    return (
        x * polynomial(square, TANH_TOP) * reciprocal(polynomial(square, TANH_BOTTOM))
    )


@gluon.jit
def tanh_and_derivative(x):
    """tanh x, off by 2^-22 at most, and 1 - tanh^2 x, which loses no digits where tanh
    is almost 1.
    """
    rest = 2.0 * reciprocal(gl.exp2(gl.abs(x) * (2.0 * LOG2_E)) + 1.0)  # 1 - tanh |x|
    bits = (1.0 - rest).to(gl.int32, bitcast=True)
    bits = bits | (x.to(gl.int32, bitcast=True) & SIGN_BIT)
    return bits.to(gl.float32, bitcast=True), rest * (2.0 - rest)


# -- functions


@gluon.jit
def positions_of(s, row, col, T_k):
    """The positions of the rows of s, from row on, and of its columns, from col on, in
    two dimensions. Outside of S they are the last one: what a function returns there is
    multiplied by 0, which NaN would survive.
    """
    i = row + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))  # [rows]
    j = col + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))  # [columns]
    i, j = gl.minimum(i, T_k - 1), gl.minimum(j, T_k - 1)
    return i[:, None], j[None, :]


@gluon.jit
def change_tile(s, bias, queries, col, sizes, change):
    """Raw scores s [ROWS, BLOCK_K] of the keys from col on, and their bias, to what the
    softmax weighs.
    """
    if change.per_cap is not None:
        s = rational_tanh(s * change.per_cap)
    if sizes.slopes is not None:
        s = with_slope(s, queries.position, col, queries.slope)
    if change.natural is not None:
        position, key = positions_of(s, queries.position, col, sizes.T_k)
        found = change.function[0](
            s * change.natural, queries.b, queries.h, position, key, *change.function[1]
        )
        s, _ = gl.broadcast(found, s)
    if change.bias is not None:
        s = s * change.factor + bias.to(gl.float32) * LOG2_E
    return s


@gluon.jit
def change_transposed(s, b, h, col, position, sizes, scale_log2, change):
    """Raw scores s [ROWS, QUERIES] of the keys from col on and the queries from this
    position on, in rows and columns, to what the softmax weighs but for a bias, in base
    2, and the derivative of a cap and a function by the scaled scores.
    """
    derivative, factor = s, scale_log2  # without either no derivative is asked for
    if change.per_cap is not None:
        s, derivative = tanh_and_derivative(s * change.per_cap)
    if change.natural is not None:
        factor = change.natural
    elif change.factor is not None:
        factor = change.factor
    s = s * factor
    if sizes.slopes is not None:
        slope = load_slope(sizes, b, h)
        if change.natural is not None:
            slope = slope * LN_2
        s = with_slope(s, col, position, slope)
    if change.natural is not None:
        keys, positions = positions_of(s, col, position, sizes.T_k)
        by_s = change.function[2](s, b, h, positions, keys, *change.function[1])
        derivative = derivative * by_s if change.per_cap is not None else by_s
        found = change.function[0](s, b, h, positions, keys, *change.function[1])
        found, _ = gl.broadcast(found, s)
        s = found * LOG2_E
    return s, derivative


@gluon.jit
def times_derivative(p, derivative, change):
    """The weights p times the derivative, which may be anything where they are 0."""
    if change.natural is not None:
        p = gl.where(p > 0.0, p * derivative, 0.0)
    elif change.per_cap is not None:
        p = p * derivative
    return p
