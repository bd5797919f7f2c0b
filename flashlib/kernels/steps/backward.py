"""Two backward kernels on the way to flashlib.kernels.backward: the slides' Algorithms 5 and 6.

Chapter *The backward pass*; lecture slides (Chu, Liu, Lin, 2026). In both the queries are outside: a program
owns a block of queries of one head, makes D = rowsum(dO o O) (``eq-gradients-delta``) for it and writes its
dQ once. What belongs to a key is the work of many programs, and these run at the same time: they add to dK
and dV in memory, atomically, in float32. So the last bits of dK and dV depend on the order of the programs.

algorithm_5    whole rows: all keys and values of a head are one tile, P is the softmax of a whole row of
               scores, and nothing but Q, K, V, O and dO is needed. Short sequences only.
algorithm_6    block by block, in the order (i, j): P of a block from L, dQ collected in registers, dK and dV
               added to in every step.
"""

import math

import torch
import triton
import triton.language as tl

from flashlib.kernels import INTERPRETED, on_device, padded, widened
from flashlib.kernels.launch import value_columns
from flashlib.kernels.tiles import add_tile, load_tile, probabilities, store_tile, visible

LOG2_E = math.log2(math.e)
LARGEST_TILE = 8192  # elements of K or V that a program of Algorithm 5 holds at once
ROWS = 16  # queries of one program of Algorithm 5: the fewest that a product on tensor cores takes


@triton.jit
def rows_kernel(q, q_strides, k, k_strides, v, v_strides, o, o_strides, do, do_strides, dlse,
                dq, dq_strides, dk, dk_strides, dv, dv_strides, scale, scale_log2, H, GROUP, T_q, T_k, d, d_v,
                CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_DV: tl.constexpr):
    """Algorithm 5: one program handles whole rows of P and dP; BLOCK_K >= T_k."""
    blocks = tl.cdiv(T_q, BLOCK_Q)
    row, head = tl.program_id(0) % blocks * BLOCK_Q, tl.program_id(0) // blocks
    b, h = head // H, head % H
    i = row + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]

    q_tile = load_tile(q, q_strides, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
    k_tile = load_tile(k, k_strides, b, h // GROUP, 0, 0, T_k, d, BLOCK_K, BLOCK_D)  # [BLOCK_K, BLOCK_D]
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale_log2  # [BLOCK_Q, BLOCK_K], base 2
    seen = visible(i, tl.arange(0, BLOCK_K), T_q, T_k, CAUSAL)  # [BLOCK_Q, BLOCK_K]
    s = tl.where(seen, s, -float("inf"))  # [BLOCK_Q, BLOCK_K]
    m = tl.max(s, 1)  # [BLOCK_Q]
    m = tl.where(m == -float("inf"), 0.0, m)  # [BLOCK_Q]; of a query that sees no key
    p = tl.exp2(s - m[:, None])  # [BLOCK_Q, BLOCK_K]
    l = tl.sum(p, 1)  # [BLOCK_Q]
    p = p / tl.where(l == 0.0, 1.0, l)[:, None]  # [BLOCK_Q, BLOCK_K]

    do_tile = load_tile(do, do_strides, b, h, row, 0, T_q, d_v, BLOCK_Q, BLOCK_DV)  # [BLOCK_Q, BLOCK_DV]
    dv_tile = tl.dot(p.to(do_tile.dtype).T, do_tile, input_precision="ieee")  # [BLOCK_K, BLOCK_DV]
    add_tile(dv, dv_strides, dv_tile, b, h // GROUP, 0, 0, T_k, d_v, BLOCK_K, BLOCK_DV)

    v_tile = load_tile(v, v_strides, b, h // GROUP, 0, 0, T_k, d_v, BLOCK_K, BLOCK_DV)  # [BLOCK_K, BLOCK_DV]
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
    o_tile = load_tile(o, o_strides, b, h, row, 0, T_q, d_v, BLOCK_Q, BLOCK_DV)  # [BLOCK_Q, BLOCK_DV]
    d_rows = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)  # [BLOCK_Q]
    d_rows -= tl.load(dlse + head.to(tl.int64) * T_q + i, mask=i < T_q, other=0.0)  # [BLOCK_Q]
    ds = (p * (dp - d_rows[:, None])).to(q_tile.dtype)  # [BLOCK_Q, BLOCK_K]

    dq_tile = tl.dot(ds, k_tile, input_precision="ieee")  # [BLOCK_Q, BLOCK_D]
    store_tile(dq, dq_strides, dq_tile * scale, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D)
    dk_tile = tl.dot(ds.T, q_tile, input_precision="ieee")  # [BLOCK_K, BLOCK_D]
    add_tile(dk, dk_strides, dk_tile * scale, b, h // GROUP, 0, 0, T_k, d, BLOCK_K, BLOCK_D)


@triton.jit
def blocks_kernel(q, q_strides, k, k_strides, v, v_strides, o, o_strides, do, do_strides, lse, dlse,
                  dq, dq_strides, dk, dk_strides, dv, dv_strides, scale, scale_log2, log2_e,
                  H, GROUP, T_q, T_k, d, d_v,
                  CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
                  BLOCK_DV: tl.constexpr):
    """Algorithm 6: one program walks over the keys; dQ in registers, dK and dV in memory."""
    blocks = tl.cdiv(T_q, BLOCK_Q)
    row, head = tl.program_id(0) % blocks * BLOCK_Q, tl.program_id(0) // blocks
    b, h = head // H, head % H
    i = row + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    rows = head.to(tl.int64) * T_q + i  # [BLOCK_Q]

    do_tile = load_tile(do, do_strides, b, h, row, 0, T_q, d_v, BLOCK_Q, BLOCK_DV)  # [BLOCK_Q, BLOCK_DV]
    o_tile = load_tile(o, o_strides, b, h, row, 0, T_q, d_v, BLOCK_Q, BLOCK_DV)  # [BLOCK_Q, BLOCK_DV]
    d_rows = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)  # [BLOCK_Q]
    d_rows -= tl.load(dlse + rows, mask=i < T_q, other=0.0)  # [BLOCK_Q]
    lse_rows = tl.load(lse + rows, mask=i < T_q, other=-float("inf")) * log2_e  # [BLOCK_Q]
    # Where no key is seen, +inf makes P zero, and -inf would make it infinite.
    lse_rows = tl.where(lse_rows == -float("inf"), float("inf"), lse_rows)  # [BLOCK_Q]
    q_tile = load_tile(q, q_strides, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
    dq_acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)  # [BLOCK_Q, BLOCK_D]

    end = T_k  # no query of the block sees keys from here on
    if CAUSAL:
        end = tl.minimum(end, tl.maximum(row + BLOCK_Q + T_k - T_q, 0))
    for col in tl.range(0, end, BLOCK_K):
        k_tile = load_tile(k, k_strides, b, h // GROUP, col, 0, T_k, d,
                           BLOCK_K, BLOCK_D)  # [BLOCK_K, BLOCK_D]
        v_tile = load_tile(v, v_strides, b, h // GROUP, col, 0, T_k, d_v,
                           BLOCK_K, BLOCK_DV)  # [BLOCK_K, BLOCK_DV]
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K], unscaled
        seen = visible(i, col + tl.arange(0, BLOCK_K), T_q, T_k, CAUSAL)  # [BLOCK_Q, BLOCK_K]
        p = probabilities(s, lse_rows[:, None], scale_log2, seen, True)  # [BLOCK_Q, BLOCK_K]
        dv_tile = tl.dot(p.to(do_tile.dtype).T, do_tile, input_precision="ieee")  # [BLOCK_K, BLOCK_DV]
        add_tile(dv, dv_strides, dv_tile, b, h // GROUP, col, 0, T_k, d_v, BLOCK_K, BLOCK_DV)
        dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        ds = (p * (dp - d_rows[:, None])).to(q_tile.dtype)  # [BLOCK_Q, BLOCK_K]
        dk_tile = tl.dot(ds.T, q_tile, input_precision="ieee")  # [BLOCK_K, BLOCK_D]
        add_tile(dk, dk_strides, dk_tile * scale, b, h // GROUP, col, 0, T_k, d, BLOCK_K, BLOCK_D)
        dq_acc = tl.dot(ds, k_tile, dq_acc, input_precision="ieee")  # [BLOCK_Q, BLOCK_D], unscaled
    store_tile(dq, dq_strides, dq_acc * scale, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D)


def allocate(q, k, v):
    """dq as q, and dk and dv with zeros in float32, which many programs add to: ``[B, H, T_q, d]``, ``[B,
    H_kv, T_k, d]``, ``[B, H_kv, T_k, d_v]``, contiguous.
    """
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    return dq, dk, dv


def sizes(q, k, v):
    """``(H, heads per group, T_q, T_k, d, d_v)``, as both kernels take them."""
    return q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]


def algorithm_5(q, k, v, o, lse, do, dlse, causal, scale):
    """``(dq, dk, dv)`` from whole rows, in the shapes of q, k, v; arguments as
    flashlib.kernels.backward.backward. lse is not read: a whole row of scores has its own sum.

    Raises ValueError where the keys or the values of a head, padded to powers of two, are more than
    LARGEST_TILE elements.
    """
    dtype = q.dtype
    BLOCK_K, d, d_v = padded(k.shape[2]), k.shape[3], v.shape[3]
    BLOCK_D, BLOCK_DV = value_columns(d_v, d), value_columns(d, d_v)
    if BLOCK_K * max(BLOCK_D, BLOCK_DV) > LARGEST_TILE:
        raise ValueError(
            f"k: expected at most {LARGEST_TILE} elements in the padded keys and in the padded values of a "
            f"head, got {BLOCK_K} x {max(BLOCK_D, BLOCK_DV)}"
        )
    q, k, v, o, do = widened(q, k, v, o, do)
    dq, dk, dv = allocate(q, k, v)
    if dq.numel():
        with on_device(q):
            rows_kernel[(q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], ROWS),)](
                q, q.stride(), k, k.stride(), v, v.stride(), o, o.stride(), do, do.stride(),
                dlse.contiguous(), dq, dq.stride(), dk, dk.stride(), dv, dv.stride(), scale, scale * LOG2_E,
                *sizes(q, k, v), CAUSAL=causal, BLOCK_Q=ROWS, BLOCK_K=BLOCK_K, BLOCK_D=BLOCK_D,
                BLOCK_DV=BLOCK_DV, num_warps=8,
            )  # fmt: skip
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def tile(bits, d, capability):
    """``(BLOCK_Q, BLOCK_K, num_warps)`` of Algorithm 6 for elements of so many bits, padded head dimension d,
    and compute capability times ten.

    Without tensor cores every factor of a product passes through registers: small tiles.
    """
    table = {64: (32, 32, 8), 256: (16, 16, 8)}
    if bits == 16 and capability >= 80:
        table = {64: (64, 32, 4), 128: (64, 64, 8), 256: (32, 32, 8)}
    return next(row for largest, row in table.items() if d <= largest)


def launch(q, k, v, o, lse, do, dlse, dq, dk, dv, causal, scale, tile):
    """Launch Algorithm 6 with one ``(BLOCK_Q, BLOCK_K, num_warps)``: fills dq and adds to dk and dv."""
    BLOCK_Q, BLOCK_K, num_warps = tile
    d, d_v = q.shape[3], v.shape[3]
    with on_device(q):
        return blocks_kernel[(q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], BLOCK_Q),)](
            q, q.stride(), k, k.stride(), v, v.stride(), o, o.stride(), do, do.stride(), lse.contiguous(),
            dlse.contiguous(), dq, dq.stride(), dk, dk.stride(), dv, dv.stride(), scale, scale * LOG2_E,
            LOG2_E, *sizes(q, k, v), CAUSAL=causal, BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K,
            BLOCK_D=value_columns(d_v, d), BLOCK_DV=value_columns(d, d_v), num_warps=num_warps, num_stages=1,
        )  # fmt: skip


def algorithm_6(q, k, v, o, lse, do, dlse, causal, scale):
    """``(dq, dk, dv)`` in the order (i, j), in the shapes of q, k, v; arguments as
    flashlib.kernels.backward.backward.
    """
    dtype = q.dtype
    q, k, v, o, do = widened(q, k, v, o, do)
    dq, dk, dv = allocate(q, k, v)
    if dq.numel():
        chosen = (64, 64, 4)  # every step of the interpreter costs milliseconds, whatever its size
        if not INTERPRETED:
            major, minor = torch.cuda.get_device_capability(q.device)
            d = max(padded(q.shape[3]), padded(v.shape[3]))
            chosen = tile(q.element_size() * 8, d, major * 10 + minor)
        launch(q, k, v, o, lse, do, dlse, dq, dk, dv, causal, scale, chosen)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
