"""Standard attention as three kernels, each reading and writing device memory (chapter *Standard
attention*).

``scores_kernel`` writes S = scale Q K^T (``eq-standard-scores``), ``softmax_kernel`` turns each row
of S into a row of P (``eq-standard-probabilities``) and keeps the log-sum-exp, ``output_kernel``
writes O = P V (``eq-standard-output``). S is kept in float32: rounding a score s to bfloat16 would
put an error of up to 2^-8 |s| into an exponent. P has the dtype of q.

Shapes: q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]``, v ``[B, H_kv, T_k, d_v]``, any strides; s, p
``[B, H, T_q, T_k]``.
The launchers trust their inputs (:mod:`flashlib.checks` guards the public door). On a CPU bfloat16
is widened to float32 and the result rounded.
"""

import torch
import triton
import triton.language as tl

from flashlib.kernels import computed_dtype, on_device, padded, widened
from flashlib.kernels.tiles import load_tile, store_tile, visible


@triton.jit
def scores_kernel(q, q_strides, k, k_strides, s, scale, H, GROUP, T_q, T_k, d,
                  CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program writes one tile of S."""
    blocks_q, blocks_k = tl.cdiv(T_q, BLOCK_Q), tl.cdiv(T_k, BLOCK_K)
    tile, head = tl.program_id(0) % (blocks_q * blocks_k), tl.program_id(0) // (blocks_q * blocks_k)
    row, col = tile // blocks_k * BLOCK_Q, tile % blocks_k * BLOCK_K
    b, h = head // H, head % H

    q_tile = load_tile(q, q_strides, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
    k_tile = load_tile(k, k_strides, b, h // GROUP, col, 0, T_k, d, BLOCK_K, BLOCK_D)  # [BLOCK_K, BLOCK_D]
    s_tile = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale  # [BLOCK_Q, BLOCK_K]

    i = row + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    j = col + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    s_tile = tl.where(visible(i, j, T_q, T_k, CAUSAL), s_tile, -float("inf"))  # [BLOCK_Q, BLOCK_K]
    place = (head.to(tl.int64) * T_q + i[:, None]) * T_k + j[None, :]  # [BLOCK_Q, BLOCK_K]
    tl.store(s + place, s_tile, mask=(i < T_q)[:, None] & (j < T_k)[None, :])


@triton.jit
def softmax_kernel(s, p, lse, T_k, BLOCK_K: tl.constexpr):
    """One program normalises one row of S in three passes: the maximum, the sum, the quotient."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.full([BLOCK_K], -float("inf"), tl.float32)  # [BLOCK_K], a running maximum for each lane
    for start in range(0, T_k, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        m = tl.maximum(m, tl.load(s + row * T_k + j, mask=j < T_k, other=-float("inf")))  # [BLOCK_K]
    m_row = tl.max(m, 0)
    shift = tl.where(m_row == -float("inf"), 0.0, m_row)  # a row that sees no key: -inf - -inf would be NaN

    l = tl.zeros([BLOCK_K], tl.float32)  # [BLOCK_K]
    for start in range(0, T_k, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        l += tl.exp(tl.load(s + row * T_k + j, mask=j < T_k, other=-float("inf")) - shift)  # [BLOCK_K]
    l_row = tl.sum(l, 0)
    l_safe = tl.where(l_row == 0.0, 1.0, l_row)

    for start in range(0, T_k, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        e = tl.exp(tl.load(s + row * T_k + j, mask=j < T_k, other=-float("inf")) - shift)  # [BLOCK_K]
        tl.store(p + row * T_k + j, (e / l_safe).to(p.dtype.element_ty), mask=j < T_k)
    tl.store(lse + row, m_row + tl.log(l_safe))


@triton.jit
def output_kernel(p, v, v_strides, o, o_strides, H, GROUP, T_q, T_k, d_v,
                  BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_DV: tl.constexpr):
    """One program writes one block of rows of O, summing P_IJ V_J over the blocks J of keys."""
    blocks_q = tl.cdiv(T_q, BLOCK_Q)
    row, head = tl.program_id(0) % blocks_q * BLOCK_Q, tl.program_id(0) // blocks_q
    b, h = head // H, head % H

    i = row + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)  # [BLOCK_Q, BLOCK_DV]
    for start in range(0, T_k, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        place = (head.to(tl.int64) * T_q + i[:, None]) * T_k + j[None, :]  # [BLOCK_Q, BLOCK_K]
        inside = (i < T_q)[:, None] & (j < T_k)[None, :]  # [BLOCK_Q, BLOCK_K]
        p_tile = tl.load(p + place, mask=inside, other=0.0)  # [BLOCK_Q, BLOCK_K]
        v_tile = load_tile(v, v_strides, b, h // GROUP, start, 0, T_k, d_v,
                           BLOCK_K, BLOCK_DV)  # [BLOCK_K, BLOCK_DV]
        acc = tl.dot(p_tile, v_tile, acc, input_precision="ieee")  # [BLOCK_Q, BLOCK_DV]
    store_tile(o, o_strides, acc, b, h, row, 0, T_q, d_v, BLOCK_Q, BLOCK_DV)


def tile_size(x):
    """Rows and columns of a tile for x ``[B, H, T, d]``.

    Fewer in float32, whose products fill registers instead of tensor cores, and more so for wide heads.
    """
    if x.dtype != torch.float32:
        return 64
    return 32 if x.shape[3] <= 64 else 16


def scores(q, k, causal, scale):
    """S = scale Q K^T, contiguous float32 ``[B, H, T_q, T_k]``, -inf where a causal mask hides the key."""
    q, k = widened(q, k)
    B, H, T_q, d = q.shape
    T_k = k.shape[2]
    s = torch.empty(B, H, T_q, T_k, dtype=torch.float32, device=q.device)
    block = tile_size(q)
    grid = (B * H * triton.cdiv(T_q, block) * triton.cdiv(T_k, block),)
    if s.numel():
        with on_device(q):
            scores_kernel[grid](
                q, q.stride(), k, k.stride(), s, scale, H, H // k.shape[1], T_q, T_k, d,
                CAUSAL=causal, BLOCK_Q=block, BLOCK_K=block, BLOCK_D=padded(d),
            )  # fmt: skip
    return s


def softmax(s, dtype):
    """P ``[B, H, T_q, T_k]`` in the given dtype and float32 lse ``[B, H, T_q]``; s contiguous float32."""
    B, H, T_q, T_k = s.shape
    p = torch.empty_like(s, dtype=computed_dtype(dtype))
    lse = torch.empty(B, H, T_q, dtype=torch.float32, device=s.device)
    if lse.numel():
        with on_device(s):
            block = min(4096, padded(T_k))
            softmax_kernel[(B * H * T_q,)](s, p, lse, T_k, BLOCK_K=block)
    return p.to(dtype), lse


def output(p, v):
    """O = P V ``[B, H, T_q, d_v]`` in the dtype of v, contiguous; p contiguous ``[B, H, T_q, T_k]``."""
    dtype = v.dtype
    p, v = widened(p, v)
    B, H, T_q, T_k = p.shape
    d_v = v.shape[3]
    o = torch.empty(B, H, T_q, d_v, dtype=v.dtype, device=v.device)
    block = tile_size(v)
    if o.numel():
        with on_device(v):
            output_kernel[(B * H * triton.cdiv(T_q, block),)](
                p, v, v.stride(), o, o.stride(), H, H // v.shape[1], T_q, T_k, d_v,
                BLOCK_Q=block, BLOCK_K=block, BLOCK_DV=padded(d_v),
            )  # fmt: skip
    return o.to(dtype)


def probabilities(q, k, causal, scale):
    """P ``[B, H, T_q, T_k]`` in the dtype of q, and the log-sum-exp ``[B, H, T_q]`` in float32."""
    return softmax(scores(q, k, causal, scale), q.dtype)


def forward(q, k, v, causal, scale):
    """``(o, lse, p)``: O ``[B, H, T_q, d_v]``, log-sum-exp ``[B, H, T_q]``, and P for the backward pass."""
    p, lse = probabilities(q, k, causal, scale)
    return output(p, v), lse, p
