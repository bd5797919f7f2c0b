"""Pieces of attention in eight bits for Hopper (sm_90), in Gluon: the scales of a tile,
its weights, and the two products.

Chapter *Eight bits*. Products of eight bits read both factors along the axis that they
sum over, so values are stored transposed, ``[D, keys]``. Of each 16 keys they are in
the order in which a thread of a product holds its sums: see ``key_order`` in
:mod:`flashlib.reference.fp8`. The weights P therefore enter the next product from the
registers that they are in.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from flashlib.kernels.gluon_tiles import ROWS

# The weights are multiplied by 2^EXPONENT before they are rounded to eight bits.
EXPONENT = gl.constexpr(8.0)
# The least scale of scores: under 0, -inf, the score of a key that is not seen, would
# become NaN.
LEAST_SCORE_SCALE = gl.constexpr(1e-30)


class EightBitSizes(NamedTuple):
    """What the launcher knows about the problem."""

    tiles: int
    heads: int  # B H
    section: int  # heads that are worked on at a time
    H: int
    GROUP: int
    T_q: int
    T_k: int
    blocks: int  # of keys, which share a scale, in a head


class Scales(NamedTuple):
    """The scales of the inputs, and by how much the scores of each query are lower
    without the mean of the keys.
    """

    q: torch.Tensor  # [B, H, T_q]
    k: torch.Tensor  # [B, H_kv, blocks]
    v: torch.Tensor  # [B, H_kv, blocks]
    shift: Any  # [B, H, T_q], or None


@gluon.constexpr_function
def accumulator(columns):
    """The layout of a product [ROWS, columns] of eight-bit factors."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.jit
def copy_values(v, b, h, col, ring, slot, phase):
    """Start copying the values of the keys from col on, [D, BLOCK_K], into a slot as
    soon as it is empty.
    """
    mbarrier.wait(ring.empty.index(slot), phase ^ 1)
    ready = ring.ready.index(slot)
    mbarrier.expect(ready, v.block_type.nbytes)
    tma.async_copy_global_to_shared(v, [b, h, 0, col], ready, ring.slots.index(slot))


@gluon.jit
def rounded(p):
    """Weights p [ROWS, BLOCK_K] in eight bits, four to an integer [ROWS, BLOCK_K / 32,
    2, 4], in the order of V. No number changes its thread.

    A loop that carried single bytes would unpack and pack them in each step.
    """
    p = gl.reshape(p, [ROWS, p.shape[1] // 32, 2, 2, 4, 2])
    even, odd = gl.split(gl.permute(p, (0, 1, 2, 4, 3, 5)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [first, second, third, fourth],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def as_factor(fours, dtype: gl.constexpr, layout: gl.constexpr):
    """P [ROWS, BLOCK_K] as the first factor of a product in this layout, from what
    ``rounded`` returns.
    """
    each = gl.expand_dims(fours, 4)
    each = gl.join(each, each)
    each = gl.join(each, each)
    each = gl.reshape(each, [ROWS, fours.shape[1] * 32])
    p = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [each], dtype=gl.int8, is_pure=True, pack=4
    )
    factor: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    p = gl.convert_layout(p, factor, assert_trivial=True)
    return p.to(dtype, bitcast=True)


@gluon.jit
def start_scores(q_tile, k_ring, count):
    """Start S = Q K^T, [ROWS, BLOCK_K], for the count-th block of keys."""
    SLOTS: gl.constexpr = k_ring.slots.shape[0]
    BLOCK_K: gl.constexpr = k_ring.slots.shape[1]
    mbarrier.wait(k_ring.ready.index(count % SLOTS), count // SLOTS & 1)
    k_tile = k_ring.slots.index(count % SLOTS)  # [BLOCK_K, D]
    layout: gl.constexpr = accumulator(BLOCK_K)
    unread = gl.zeros([ROWS, BLOCK_K], gl.float32, layout)  # [ROWS, BLOCK_K]
    return warpgroup_mma(
        q_tile, k_tile.permute((1, 0)), unread, use_acc=False, is_async=True
    )


@gluon.jit
def start_values(fours, v_ring, count, col, COLUMNS: gl.constexpr):
    """Start P V, [ROWS, COLUMNS], for the count-th block of values and its columns from
    col on.
    """
    SLOTS: gl.constexpr = v_ring.slots.shape[0]
    layout: gl.constexpr = accumulator(COLUMNS)
    mbarrier.wait(v_ring.ready.index(count % SLOTS), count // SLOTS & 1)
    v_tile = v_ring.slots.index(count % SLOTS).slice(col, COLUMNS)  # [COLUMNS, BLOCK_K]
    unread = gl.zeros([ROWS, COLUMNS], gl.float32, layout)  # [ROWS, COLUMNS]
    p = as_factor(fours, v_ring.slots.dtype, layout)
    return warpgroup_mma(
        p, v_tile.permute((1, 0)), unread, use_acc=False, is_async=True
    )


@gluon.jit
def make_ones(dtype: gl.constexpr, BLOCK_K: gl.constexpr):
    """A factor [8, BLOCK_K] of ones, transposed as V is: P times it is the sums of the
    rows of P, in each of eight columns, the fewest that a product has.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, BLOCK_K], dtype)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 4], [1, 0])
    # The bits of 1.0: where two equal floats are rounded and the pair is used twice,
    # ptxas 12.8 takes the second pair from a register that holds something else.
    bits = gl.full([8, BLOCK_K], 0x38, gl.int8, flat)
    ones = gl.allocate_shared_memory(
        dtype, [8, BLOCK_K], layout, bits.to(dtype, bitcast=True)
    )
    fence_async_shared()
    return ones


@gluon.jit
def start_sums(fours, ones):
    """Start the sums of the rows of P, [ROWS, 8], the same in all columns."""
    layout: gl.constexpr = accumulator(8)
    unread = gl.zeros([ROWS, 8], gl.float32, layout)  # [ROWS, 8]
    p = as_factor(fours, ones.dtype, layout)
    return warpgroup_mma(p, ones.permute((1, 0)), unread, use_acc=False, is_async=True)


@gluon.jit
def half_of_sums(sums):
    """Every second column of the sums [ROWS, 8], which are all the same: [ROWS, 4], one
    number for each row of a thread.
    """
    return gl.split(gl.reshape(sums, [ROWS, 4, 2]))[0]
