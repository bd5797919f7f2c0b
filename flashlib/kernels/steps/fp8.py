"""The smallest kernel that reads a cache in eight bits: one query of each head, one
sequence, one head of keys and values.

Chapter *Eight bits* (``eq-fp8-cache-scores``). flashlib.kernels.decoding adds batches,
pages, splits and several queries.
"""

import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import inputs
from flashlib.kernels.tiles import LOG2_E

BLOCK_H, BLOCK_K = 16, 32


@triton.jit
def small_kernel(
    q, k, k_scales, v, v_scales, o, scale_log2, T, H, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """q [H, D] against k, v [T, D] in E4M3 with scales [T]; o [H, D]. A program
    computes BLOCK_H heads.
    """
    h, columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, D)
    own = (h < H)[:, None]
    q_tile = tl.load(q + h[:, None] * D + columns, mask=own, other=0.0)

    m = tl.full([BLOCK_H], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, D], tl.float32)
    for j in range(0, T, BLOCK_K):
        key = j + tl.arange(0, BLOCK_K)
        inside, at = key < T, key[:, None].to(tl.int64) * D + columns
        # Eight bits in memory; every number of E4M3 is one of 16 bits, too.
        k_tile = tl.load(k + at, mask=inside[:, None], other=0.0).to(q_tile.dtype)
        v_tile = tl.load(v + at, mask=inside[:, None], other=0.0).to(q_tile.dtype)
        k_scale = tl.load(k_scales + key, mask=inside, other=0.0)
        v_scale = tl.load(v_scales + key, mask=inside, other=0.0)
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee") * (k_scale * scale_log2)
        s = tl.where(inside, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p, alpha = tl.exp2(s - m_new[:, None]), tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        p = (p * v_scale).to(q_tile.dtype)
        acc = tl.dot(p, v_tile, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    o_tile = (acc / l[:, None]).to(o.dtype.element_ty)
    tl.store(o + h[:, None] * D + columns, o_tile, mask=own)


@plans.planned
def launch(q, k, k_scales, v, v_scales, scale):
    """The output ``[H, d]`` of queries q ``[H, d]`` and a cache k, v ``[T, d]`` in
    torch.float8_e4m3fn with scales ``[T]`` in float32, all contiguous; d is a power of
    two of at least 16, T is at least 1 and the scale at least 0.
    """
    (H, d), T = q.shape, k.shape[0]
    o, (q,) = q.new_empty(H, d), inputs.widened(q)
    plans.launch(
        small_kernel, q, triton.cdiv(H, BLOCK_H), q, k, k_scales, v, v_scales, o,
        scale * LOG2_E.value, T, H, D=d, BLOCK_H=BLOCK_H, BLOCK_K=BLOCK_K,
    )  # fmt: skip
    return o
