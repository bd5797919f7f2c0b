"""Standard attention as three kernels, each reading and writing device memory (chapter
*Standard attention*).

``scores_kernel`` writes S = scale Q K^T (``eq-standard-scores``), ``softmax_kernel``
turns each row of S into a row of P (``eq-standard-probabilities``) and keeps the
log-sum-exp, ``output_kernel`` writes O = P V (``eq-standard-output``). S is kept in
float32: rounding a score s to bfloat16 would put an error of up to 2^-8 |s| into an
exponent. P has the dtype of q.

s and p are ``[B, H, T_q, T_k]``. Launchers trust their inputs, which
:mod:`flashlib.checks` checks in the public functions.
"""

import torch
import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import padded
from flashlib.kernels.inputs import computed_dtype, widened
from flashlib.kernels.tiles import Sizes, Tile, as_rows, load_tile, store_tile, visible


@triton.jit
def matrix_offsets(head, i, j, n):
    """Where rows i and columns j of a head of S or P are, and which of them exist."""
    offsets = (head.to(tl.int64) * n.T_q + i[:, None]) * n.T_k + j[None, :]
    return offsets, (i < n.T_q)[:, None] & (j < n.T_k)[None, :]


@triton.jit
def scores_kernel(q, k, s, scale, n, CAUSAL: tl.constexpr, TILE: tl.constexpr):
    """One program writes one tile of S. q, k: Rows. n: the Sizes."""
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    blocks_q, blocks_k = tl.cdiv(n.T_q, BLOCK_Q), tl.cdiv(n.T_k, BLOCK_K)
    tile = tl.program_id(0) % (blocks_q * blocks_k)
    head = tl.program_id(0) // (blocks_q * blocks_k)
    row, col = tile // blocks_k * BLOCK_Q, tile % blocks_k * BLOCK_K
    b, h = head // n.H, head % n.H

    q_tile = load_tile(q, b, h, row, 0, n.T_q, n.d, BLOCK_Q, TILE.BLOCK_D)
    k_tile = load_tile(k, b, h // n.GROUP, col, 0, n.T_k, n.d, BLOCK_K, TILE.BLOCK_D)
    product = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
    i = row + tl.arange(0, BLOCK_Q)
    j = col + tl.arange(0, BLOCK_K)
    seen = visible(i, j, n.T_q, n.T_k, CAUSAL)
    s_tile = tl.where(seen, product * scale, -float("inf"))
    offsets, inside = matrix_offsets(head, i, j, n)
    tl.store(s + offsets, s_tile, mask=inside)


@triton.jit
def softmax_kernel(s, p, lse, T_k, BLOCK_K: tl.constexpr):
    """One program normalizes one row of S in three passes: the maximum, the sum, the
    quotient.
    """
    row = tl.program_id(0).to(tl.int64)
    s += row * T_k
    p += row * T_k
    # -- maximum
    m = tl.full([BLOCK_K], -float("inf"), tl.float32)  # a running maximum for each lane
    for start in range(0, T_k, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        m = tl.maximum(m, tl.load(s + j, mask=j < T_k, other=-float("inf")))
    m_row = tl.max(m, 0)
    # In a row that sees no key, -inf - -inf would be NaN.
    shift = tl.where(m_row == -float("inf"), 0.0, m_row)
    # -- sum
    l = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, T_k, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        l += tl.exp(tl.load(s + j, mask=j < T_k, other=-float("inf")) - shift)
    l_row = tl.sum(l, 0)
    l_safe = tl.where(l_row == 0.0, 1.0, l_row)
    # -- quotient
    for start in range(0, T_k, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        e = tl.exp(tl.load(s + j, mask=j < T_k, other=-float("inf")) - shift)
        tl.store(p + j, (e / l_safe).to(p.dtype.element_ty), mask=j < T_k)
    tl.store(lse + row, m_row + tl.log(l_safe))


@triton.jit
def output_kernel(p, v, o, n, TILE: tl.constexpr):
    """One program writes one block of rows of O, summing P_IJ V_J over the blocks J of
    keys. v, o: Rows. n: the Sizes.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    blocks_q = tl.cdiv(n.T_q, BLOCK_Q)
    row, head = tl.program_id(0) % blocks_q * BLOCK_Q, tl.program_id(0) // blocks_q
    b, h = head // n.H, head % n.H

    i = row + tl.arange(0, BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    for start in range(0, n.T_k, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        offsets, inside = matrix_offsets(head, i, j, n)
        p_tile = tl.load(p + offsets, mask=inside, other=0.0)  # [BLOCK_Q, BLOCK_K]
        v_tile = load_tile(
            v, b, h // n.GROUP, start, 0, n.T_k, n.d_v, BLOCK_K, BLOCK_DV
        )
        acc = tl.dot(p_tile, v_tile, acc, input_precision="ieee")
    store_tile(o, acc, b, h, row, 0, n.T_q, n.d_v, BLOCK_Q, BLOCK_DV)


def tile_size(x):
    """Rows and columns of a tile for x ``[B, H, T, d]``.

    Fewer in float32, whose products fill registers instead of tensor cores, and more so
    for wide heads.
    """
    if x.dtype != torch.float32:
        return 64
    return 32 if x.shape[3] <= 64 else 16


@plans.planned
def scores(q, k, causal, scale):
    """S = scale Q K^T, contiguous float32 ``[B, H, T_q, T_k]``, -inf where a causal
    mask hides the key.
    """
    q, k = widened(q, k)
    B, H, T_q, d = q.shape
    T_k = k.shape[2]
    s = q.new_empty(B, H, T_q, T_k, dtype=torch.float32)
    block = tile_size(q)
    if s.numel():
        plans.launch(
            scores_kernel, q, B * H * triton.cdiv(T_q, block) * triton.cdiv(T_k, block),
            *as_rows(q, k), s, scale, Sizes(H, H // k.shape[1], T_q, T_k, d, 0),
            CAUSAL=causal, TILE=Tile(block, block, padded(d), 0),
        )  # fmt: skip
    return s


@plans.planned
def softmax(s, dtype):
    """P in the given dtype, and lse in float32, from s, contiguous float32."""
    B, H, T_q, T_k = s.shape
    p = s.new_empty(s.shape, dtype=computed_dtype(dtype))
    lse = s.new_empty(B, H, T_q)
    if lse.numel():
        block = min(4096, padded(T_k))
        plans.launch(softmax_kernel, s, B * H * T_q, s, p, lse, T_k, BLOCK_K=block)
    return p.to(dtype), lse


@plans.planned
def output(p, v):
    """O = P V in the dtype of v, contiguous, from contiguous p."""
    dtype = v.dtype
    p, v = widened(p, v)
    B, H, T_q, T_k = p.shape
    d_v = v.shape[3]
    o = v.new_empty(B, H, T_q, d_v)
    block = tile_size(v)
    if o.numel():
        plans.launch(
            output_kernel, v, B * H * triton.cdiv(T_q, block),
            p, *as_rows(v, o), Sizes(H, H // v.shape[1], T_q, T_k, 0, d_v),
            TILE=Tile(block, block, 0, padded(d_v)),
        )  # fmt: skip
    return o.to(dtype)


@plans.planned
def forward(q, k, v, causal, scale):
    """``(o, lse, p)``, with P for the backward pass."""
    p, lse = softmax(scores(q, k, causal, scale), q.dtype)
    return output(p, v), lse, p
