"""Rounding queries, keys and values to eight bits, as :mod:`flashlib.reference.fp8`.

Per head, a first kernel adds up the keys, whose mean the others need. Then one kernel
for queries and one for keys multiplies each row by an orthogonal matrix, finds its
scale, or that of its block, and rounds; one for values rounds a block and stores it
transposed, its keys in the order that a forward kernel wants (``key_order``). After
Shah et al., "FlashAttention-3" (2024), and Zhang et al., "SageAttention" (2024).

Triton's interpreter cannot round to E4M3: there the kernels store float32 and PyTorch
rounds.
"""

import torch
import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import INTERPRETED, inputs, padded
from flashlib.kernels.tiles import as_rows, load_tile

LARGEST_E4M3 = tl.constexpr(448.0)
LEAST_ROUNDING_SCALE = tl.constexpr(2.0**-120)
IN_INTERPRETER = tl.constexpr(INTERPRETED)
QUERY_ROWS = 64  # queries of a program
KEYS = 128  # keys of a block, which share a scale, and values
WIDTH = 64  # the most columns that a transform mixes
PARTS = 64  # programs that add up the keys of a head
ADDED = 32  # keys that one adds at a time


@triton.jit(do_not_specialize=["T"])
def mean_kernel(
    k, sums, T, d, H, PARTS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """One program adds up one of the PARTS of the keys of a head: sums [B, H, PARTS, D]
    is contiguous, k Rows.
    """
    part, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    b, h = head // H, head % H
    share = tl.cdiv(tl.cdiv(T, ROWS), PARTS) * ROWS
    acc = tl.zeros([ROWS, D], tl.float32)
    for row in range(part * share, tl.minimum((part + 1) * share, T), ROWS):
        tile = load_tile(k, b, h, row, 0, T, d, ROWS, D)  # [ROWS, D]
        acc += tile.to(tl.float32)
    written = sums + tl.program_id(0).to(tl.int64) * D + tl.arange(0, D)
    tl.store(written, tl.sum(acc, 0))  # one sum across threads


@triton.jit(do_not_specialize=["T"])
def finish_kernel(sums, mean, T, PARTS: tl.constexpr, D: tl.constexpr):
    """One program finishes the mean of the keys of a head: mean [B, H, D], contiguous,
    in the dtype of the keys. It may be rounded: the softmax is the same whichever
    vector is subtracted from all keys.
    """
    head, cols = tl.program_id(0), tl.arange(0, D)
    parts = (head * PARTS + tl.arange(0, PARTS))[:, None] * D + cols[None, :]
    total = tl.sum(tl.load(sums + parts), 0)  # [D]
    found = tl.div_rn(total, T.to(tl.float32))
    tl.store(mean + head * D + cols, found.to(mean.dtype.element_ty))


@triton.jit
def hadamard(n, W: tl.constexpr):
    """The first W rows and columns of ``hadamard`` times sqrt(n): entries 0 and +-1."""
    i = tl.arange(0, W)
    common = i[:, None] & i[None, :] & (n - 1)
    common ^= common >> 4  # at most eight bits; the last becomes the parity of all
    common ^= common >> 2
    common ^= common >> 1
    entry = 1.0 - 2.0 * (common & 1).to(tl.float32)
    return tl.where(i[:, None] // n == i[None, :] // n, entry, 0.0)


@triton.jit
def to_scale(most):
    """The scale under which the largest number becomes the largest of the type; at
    least LEAST_ROUNDING_SCALE, so that its inverse is finite.
    """
    scale = tl.maximum(tl.div_rn(most, LARGEST_E4M3), LEAST_ROUNDING_SCALE)
    return tl.where(most > 0.0, scale, 1.0)


@triton.jit
def divided(y, scale, inverse):
    """y / scale, rounded once: Markstein's division, three operations instead of ten,
    by the rounded inverse. The interpreter's multiply-add rounds twice.
    """
    if IN_INTERPRETER:
        quotient = tl.div_rn(y, scale)
    else:
        quotient = y * inverse
        rest = tl.fma(-quotient, scale + tl.zeros_like(y), y)
        quotient = tl.fma(rest, inverse + tl.zeros_like(y), quotient)
    return quotient


@triton.jit(do_not_specialize=["T"])
def rows_kernel(
    x, mean, sign, values, scales, shift, T, H, GROUP, d, n,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """One program rounds ROWS queries, each with its scale, or a block of ROWS keys.

    x Rows; values [B, H, T, d] and scales [B, H, T], or [B, H, blocks] of keys, are
    contiguous. mean [B, H / GROUP, D] of the keys and sign [d] may be None. Without the
    mean, the scores of a query are smaller by shift [B, H, T], contiguous. A row of the
    tile is W columns of a row of x, since the transform mixes no others.
    """
    PIECES: tl.constexpr = D // W
    blocks = tl.cdiv(T, ROWS)
    head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    rows, whole = block * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    r = tl.arange(0, ROWS * PIECES)
    row = block * ROWS + r // PIECES  # [ROWS PIECES]
    cols = (r % PIECES * W)[:, None] + tl.arange(0, W)[None, :]  # [ROWS PIECES, W]
    inside = (row < T)[:, None] & (cols < d)
    starts = x.ptr + head // H * x.strides[0] + head % H * x.strides[1]
    starts += row.to(tl.int64) * x.strides[2]
    entries = starts[:, None] + cols.to(tl.int64) * x.strides[3]
    tile = tl.load(entries, mask=inside, other=0.0)
    y, shared = tile.to(tl.float32), tl.zeros([ROWS * PIECES, W], tl.float32)
    if mean is not None:
        center = tl.load(mean + head // GROUP * D + cols, mask=inside, other=0.0)
        if QUERIES:
            product = tl.sum(y * center.to(tl.float32), 1)  # [ROWS PIECES]
            product = tl.sum(product.reshape(ROWS, PIECES), 1)
            tl.store(shift + head * T + rows, product, mask=rows < T)
        else:
            shared = center.to(tl.float32)
    if sign is not None:
        signs = tl.load(sign + cols, mask=cols < d, other=0.0).to(tile.dtype)
        matrix = hadamard(n, W).to(tile.dtype)  # exact in every dtype
        y = tl.dot(tile * signs, matrix, input_precision="ieee")
        if mean is not None and not QUERIES:
            shared = tl.dot(center * signs, matrix, input_precision="ieee")
        y, shared = y * tl.rsqrt(n.to(tl.float32)), shared * tl.rsqrt(n.to(tl.float32))
    y = (y - shared).reshape(ROWS, D)
    # On Blackwell Triton 3.7 cannot compile the maximum of a vector here.
    most = tl.max(tl.abs(y), 1, keep_dims=True)  # [ROWS, 1]
    if not QUERIES:
        most = tl.max(most, 0, keep_dims=True) + tl.zeros([ROWS, 1], tl.float32)
    scale = to_scale(most)
    y = divided(y, scale, tl.div_rn(1.0, scale))
    inside = (rows < T)[:, None] & (whole < d)[None, :]
    written = values + (head * T + rows)[:, None] * d + whole[None, :]
    tl.store(written, y.to(values.dtype.element_ty), mask=inside)
    if QUERIES:
        elements = scales + (head * T + rows)[:, None]
        tl.store(elements, scale, mask=(rows < T)[:, None])
    else:
        first = (rows == block * ROWS)[:, None]
        tl.store(scales + head * blocks + block + 0 * rows[:, None], scale, mask=first)


@triton.jit(do_not_specialize=["T"])
def values_kernel(
    v, values, scales, T, H, d_v, KEYS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """One program rounds a block of KEYS values with one scale: v Rows; values [B, H,
    d_v, blocks KEYS], transposed, and scales [B, H, blocks] are contiguous.
    """
    blocks = tl.cdiv(T, KEYS)
    head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    slot, cols = tl.arange(0, KEYS), tl.arange(0, D)
    # Of each 16 slots, 4 t + 2 b + e has the key 8 b + 2 t + e.
    key = slot // 16 * 16 + slot // 2 % 2 * 8 + slot % 16 // 4 * 2 + slot % 2
    key += block * KEYS
    starts = v.ptr + head // H * v.strides[0] + head % H * v.strides[1]
    entries = starts + key.to(tl.int64)[:, None] * v.strides[2]
    entries += cols.to(tl.int64)[None, :] * v.strides[3]
    inside = (key < T)[:, None] & (cols < d_v)[None, :]
    y = tl.load(entries, mask=inside, other=0.0).to(tl.float32)  # [KEYS, D]
    scale = to_scale(tl.max(tl.max(tl.abs(y), 1), 0) + tl.zeros([1], tl.float32))  # [1]
    y = divided(y, scale[None, :], tl.div_rn(1.0, scale)[None, :])
    rows = (head * d_v + cols).to(tl.int64) * (blocks * KEYS)  # [D]
    written = values + rows[:, None] + (block * KEYS + slot)[None, :]
    tl.store(written, y.T.to(values.dtype.element_ty), mask=(cols < d_v)[:, None])
    tl.store(scales + head * blocks + block + tl.arange(0, 1), scale)


@plans.planned
def quantize(q, k, v, sign, smooth):
    """``(q, q_scales, k, k_scales, v, v_scales, shift)``, as
    :class:`flashlib.fp8.Quantized` says; no shift without smoothing.

    sign ``[d]`` in float32, or None for no transform.
    """
    q, k, v = inputs.widened(q, k, v)
    (B, H, T_q, d), (_, H_kv, T_k, d_v) = q.shape, v.shape
    blocks, D = triton.cdiv(T_k, KEYS), padded(d)
    stored = torch.float32 if INTERPRETED else torch.float8_e4m3fn

    def new(*shape, dtype=torch.float32):
        return q.new_empty(shape, dtype=dtype)

    rounded = [
        new(B, H, T_q, d, dtype=stored), new(B, H, T_q),
        new(B, H_kv, T_k, d, dtype=stored), new(B, H_kv, blocks),
        new(B, H_kv, d_v, blocks * KEYS, dtype=stored), new(B, H_kv, blocks),
    ]  # fmt: skip
    mean = shift = None
    if smooth:
        sums, mean = new(B, H_kv, PARTS, D), new(B, H_kv, D, dtype=k.dtype)
        shift = new(B, H, T_q)
        plans.launch(
            mean_kernel, q, B * H_kv * PARTS, *as_rows(k), sums, T_k, d, H_kv,
            PARTS=PARTS, ROWS=ADDED, D=D, num_warps=4,
        )  # fmt: skip
        heads = B * H_kv
        plans.launch(finish_kernel, q, heads, sums, mean, T_k, PARTS=PARTS, D=D)
    queries = q, *rounded[:2], H, H // H_kv, QUERY_ROWS
    sides = queries, (k, *rounded[2:4], H_kv, 1, KEYS)
    for x, values, scales, heads, group, rows in sides:
        T = x.shape[2]
        plans.launch(
            rows_kernel, q, B * heads * triton.cdiv(T, rows), *as_rows(x), mean, sign,
            values, scales, shift, T, heads, group, d, min(d & -d, WIDTH),
            QUERIES=x is q, ROWS=rows, D=D, W=min(D, WIDTH), num_warps=rows // 8,
        )  # fmt: skip
    plans.launch(
        values_kernel, q, B * H_kv * blocks, *as_rows(v), *rounded[4:], T_k, H_kv, d_v,
        KEYS=KEYS, D=padded(d_v), num_warps=8,
    )  # fmt: skip
    for n in (0, 2, 4):
        rounded[n] = rounded[n].to(torch.float8_e4m3fn)
    return [*rounded, shift] if smooth else rounded
