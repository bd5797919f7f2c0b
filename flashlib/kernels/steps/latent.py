"""The smallest kernel of latent attention: one query of each head, one sequence, one
row of the cache for the keys and values of all heads.

Chapter *Latent attention* (``eq-latent-absorb``, ``eq-latent-output``).
flashlib.kernels.latent adds batches, pages, splits and several queries.
"""

import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels.tiles import LOG2_E

BLOCK_H, BLOCK_K = 16, 32


@triton.jit
def small_kernel(
    q, rows, o, scale_log2, T, H, D_C: tl.constexpr, D_R: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """q [H, D_C + D_R] against rows [T, D_C + D_R] of c and r; o [H, D_C] of latents.
    A program computes BLOCK_H heads.
    """
    WIDTH: tl.constexpr = D_C + D_R
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    latent, rotary = tl.arange(0, D_C), D_C + tl.arange(0, D_R)
    own = (h < H)[:, None]
    q_c = tl.load(q + h[:, None] * WIDTH + latent, mask=own, other=0.0)
    q_r = tl.load(q + h[:, None] * WIDTH + rotary, mask=own, other=0.0)

    m = tl.full([BLOCK_H], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, D_C], tl.float32)
    for j in range(0, T, BLOCK_K):
        key = j + tl.arange(0, BLOCK_K)
        row, inside = rows + key[:, None].to(tl.int64) * WIDTH, (key < T)[:, None]
        c = tl.load(row + latent, mask=inside, other=0.0)  # keys, and values below
        r = tl.load(row + rotary, mask=inside, other=0.0)
        s = tl.dot(q_c, c.T, input_precision="ieee")
        s = tl.dot(q_r, r.T, s, input_precision="ieee") * scale_log2
        s = tl.where(key < T, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p, alpha = tl.exp2(s - m_new[:, None]), tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(c.dtype), c, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    o_tile = (acc / l[:, None]).to(o.dtype.element_ty)
    tl.store(o + h[:, None] * D_C + latent, o_tile, mask=own)


@plans.planned
def launch(q, rows, d_c, scale):
    """The output of latents ``[H, d_c]`` of absorbed queries q ``[H, d_c + d_r]`` and a
    cache rows ``[T, d_c + d_r]``, both contiguous; d_c and d_r are powers of two of at
    least 16, T is at least 1 and the scale at least 0.
    """
    (H, width), T = q.shape, rows.shape[0]
    o = q.new_empty(H, d_c)
    plans.launch(
        small_kernel, q, triton.cdiv(H, BLOCK_H), q, rows, o, scale * LOG2_E.value,
        T, H, D_C=d_c, D_R=width - d_c, BLOCK_H=BLOCK_H, BLOCK_K=BLOCK_K,
    )  # fmt: skip
    return o
