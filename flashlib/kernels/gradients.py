"""The materializing backward pass: every T x T matrix in device memory (chapter
*Gradients by hand*).

Four matrix products and one elementwise step, each a kernel launch that reads and
writes whole matrices: dV = P^T dO (``eq-gradients-dv``), dP = dO V^T
(``eq-gradients-dp``), dS = P o (dP - D) (``eq-gradients-ds``), dQ = scale dS K
(``eq-gradients-dq``), dK = scale dS^T Q (``eq-gradients-dk``), with D = rowsum(dO o O)
(``eq-gradients-delta``). A transposed factor is the same tensor with two strides
exchanged, so one kernel serves all four products.

p is ``[B, H, T_q, T_k]``; dP is kept in float32, dS in the dtype of q.
"""

import torch
import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import padded
from flashlib.kernels.inputs import widened
from flashlib.kernels.tiles import as_rows, load_tile, store_tile
from flashlib.plans import new_like


@triton.jit
def product_kernel(x, y, z, scale, H, GROUP, SUM, M, N, R, BLOCK: tl.constexpr):
    """One program writes one tile of Z = scale sum_g X_g Y_g, with X [M, R], Y [R, N]
    and Z [M, N] for each head h of H. x, y, z: Rows.

    The sum runs over the SUM heads h SUM, h SUM + 1, ... of X: the query heads of a
    group for dK and dV, one head otherwise. Head x of X meets head x / GROUP of Y: a
    key head is shared by GROUP query heads.
    """
    blocks_m, blocks_n = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    tile = tl.program_id(0) % (blocks_m * blocks_n)
    head = tl.program_id(0) // (blocks_m * blocks_n)
    row, col = tile // blocks_n * BLOCK, tile % blocks_n * BLOCK
    b, h = head // H, head % H

    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for g in range(SUM):
        h_x = h * SUM + g
        for r in range(0, R, BLOCK):
            x_tile = load_tile(x, b, h_x, row, r, M, R, BLOCK, BLOCK)
            y_tile = load_tile(y, b, h_x // GROUP, r, col, R, N, BLOCK, BLOCK)
            acc = tl.dot(x_tile, y_tile, acc, input_precision="ieee")
    store_tile(z, acc * scale, b, h, row, col, M, N, BLOCK, BLOCK)


@triton.jit
def delta_kernel(do, o, delta, H, T, d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program writes D_i = sum_k dO_ik O_ik for a block of rows: O(T d) operations,
    not O(T^2). do, o: Rows.
    """
    blocks = tl.cdiv(T, BLOCK_T)
    row, head = tl.program_id(0) % blocks * BLOCK_T, tl.program_id(0) // blocks
    b, h = head // H, head % H
    do_tile = load_tile(do, b, h, row, 0, T, d, BLOCK_T, BLOCK_D)
    o_tile = load_tile(o, b, h, row, 0, T, d, BLOCK_T, BLOCK_D)
    products = do_tile.to(tl.float32) * o_tile.to(tl.float32)  # [BLOCK_T, BLOCK_D]
    i = row + tl.arange(0, BLOCK_T)
    tl.store(delta + head.to(tl.int64) * T + i, tl.sum(products, 1), mask=i < T)


@triton.jit
def dscores_kernel(p, dp, delta, ds, T_k, BLOCK_K: tl.constexpr):
    """One program writes BLOCK_K elements of one row of dS = P o (dP - D)."""
    blocks = tl.cdiv(T_k, BLOCK_K)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    j = tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    p_row = tl.load(p + row * T_k + j, mask=j < T_k, other=0.0).to(tl.float32)
    dp_row = tl.load(dp + row * T_k + j, mask=j < T_k, other=0.0)
    # A key that is not seen gets 0, even if dL is infinite in a row that sees none.
    ds_row = tl.where(p_row == 0.0, 0.0, p_row * (dp_row - tl.load(delta + row)))
    tl.store(ds + row * T_k + j, ds_row.to(ds.dtype.element_ty), mask=j < T_k)


@plans.planned
def product(x, y, z, scale, heads_per_group, summed):
    """Write z = scale * (x @ y): x ``[B, H_x, M, R]``, y ``[B, H_y, R, N]``, z ``[B,
    H_z, M, N]``.

    heads_per_group = H_x / H_y heads of x share one head of y; summed = H_x / H_z heads
    of x are added into one head of z.
    """
    B, H, M, N = z.shape
    R = x.shape[3]
    # In float32, products fill registers instead of tensor cores.
    block = 32 if x.dtype == torch.float32 else 64
    if z.numel():
        plans.launch(
            product_kernel, x, B * H * triton.cdiv(M, block) * triton.cdiv(N, block),
            *as_rows(x, y, z), scale, H, heads_per_group, summed, M, N, R, BLOCK=block,
        )  # fmt: skip


@plans.planned
def row_dot(do, o):
    """D ``[B, H, T_q]`` in float32, contiguous."""
    B, H, T, d = o.shape
    delta = o.new_empty(B, H, T, dtype=torch.float32)
    if delta.numel():
        plans.launch(
            delta_kernel, o, B * H * triton.cdiv(T, 32), *as_rows(do, o), delta,
            H, T, d, BLOCK_T=32, BLOCK_D=padded(d),
        )  # fmt: skip
    return delta


@plans.planned
def d_scores(p, dp, delta):
    """dS ``[B, H, T_q, T_k]`` in the dtype of p, from contiguous p, dp and delta ``[B,
    H, T_q]``.
    """
    B, H, T_q, T_k = p.shape
    ds = p.new_empty(p.shape)
    block = min(1024, padded(T_k))
    if ds.numel():
        plans.launch(
            dscores_kernel, p, B * H * T_q * triton.cdiv(T_k, block),
            p, dp, delta, ds, T_k, BLOCK_K=block,
        )  # fmt: skip
    return ds


@plans.planned
def backward(q, k, v, p, o, do, dlse, scale):
    """``(dq, dk, dv)`` in the shapes and dtypes of q, k, v, contiguous; dlse ``[B, H,
    T_q]`` is the gradient through the log-sum-exp.

    A query that sees no key has a row of zeros in p, so it has zero gradient and
    contributes nothing; dK and dV are summed over the heads of a group.
    """
    dtype = q.dtype
    q, k, v, p, o, do = widened(q, k, v, p, o, do)
    B, H, T_q, _ = q.shape
    H_kv, T_k = k.shape[1:3]
    group = H // H_kv if H_kv else 1

    dq, dk, dv = new_like(q, k, v)
    dp = q.new_empty(B, H, T_q, T_k, dtype=torch.float32)
    product(p.mT, do, dv, 1.0, 1, group)
    product(do, v.mT, dp, 1.0, group, 1)
    ds = d_scores(p, dp, row_dot(do, o).sub_(dlse))
    product(ds, k, dq, scale, group, 1)
    product(ds.mT, q, dk, scale, 1, group)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
