"""From FlashAttention to FlashAttention-2, one change at a time: four forward kernels in one.

Chapter *FlashAttention-2*; the lecture slides' Algorithm 3 (Chu, Liu, Lin, 2026); Dao, "FlashAttention-2"
(ICLR 2024), Algorithm 1 and section 3. Each step keeps what the ones before it changed:

swapped    queries outside, keys inside: O, m and l of a block of queries stay in registers while the keys
           pass by. One program owns one head, as in flash1; it divides O by l at every step, and stores the
           two statistics m and l.
parallel   one program owns one block of queries of one head.
deferred   O is divided once, at the end, and one statistic L = m + ln l is stored.
skipping   with a causal mask, blocks of keys that no query of the block sees are not read, and those that
           every query sees are not masked. Before, every block is read and masked.

The last step computes what flashlib.kernels.flash2 does, which adds tensor descriptors, a table of tiles
and the order in which programs start.
"""

import math

import torch
import triton
import triton.language as tl

from flashlib.kernels import INTERPRETED, on_device, padded, widened
from flashlib.kernels.launch import value_columns
from flashlib.kernels.tiles import load_tile, online_softmax, store_tile, visible

STEPS = ("swapped", "parallel", "deferred", "skipping")
LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def attend(acc, m, l, q_tile, k, k_strides, v, v_strides, b, h, i, j, scale_log2, T_q, T_k, d, d_v,
           CAUSAL: tl.constexpr, MASKED: tl.constexpr, DEFERRED: tl.constexpr, BLOCK_K: tl.constexpr,
           BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):
    """One step of the inner loop: the block of keys that starts at j."""
    k_tile = load_tile(k, k_strides, b, h, j, 0, T_k, d, BLOCK_K, BLOCK_D)  # [BLOCK_K, BLOCK_D]
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K], unscaled
    seen = visible(i, j + tl.arange(0, BLOCK_K), T_q, T_k, CAUSAL)  # [BLOCK_Q, BLOCK_K], used where MASKED
    p, alpha, m, l_new = online_softmax(s, m, l, scale_log2, seen, MASKED)
    if DEFERRED:
        acc = acc * alpha[:, None]  # [BLOCK_Q, BLOCK_DV]
    else:
        acc = acc * (l * alpha)[:, None]  # [BLOCK_Q, BLOCK_DV], no longer divided
    v_tile = load_tile(v, v_strides, b, h, j, 0, T_k, d_v, BLOCK_K, BLOCK_DV)  # [BLOCK_K, BLOCK_DV]
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")  # [BLOCK_Q, BLOCK_DV]
    if not DEFERRED:
        acc = tl.div_rn(acc, tl.where(l_new == 0.0, 1.0, l_new)[:, None])  # [BLOCK_Q, BLOCK_DV]
    return acc, m, l_new


@triton.jit
def forward_kernel(q, q_strides, k, k_strides, v, v_strides, o, o_strides, m_out, l_out, scale_log2,
                   H, GROUP, T_q, T_k, d, d_v,
                   CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PARALLEL: tl.constexpr,
                   DEFERRED: tl.constexpr, SKIPPING: tl.constexpr, BLOCK_Q: tl.constexpr,
                   BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):
    """One program writes O and the statistics of one block of queries or, if not PARALLEL, of all of a head.

    If DEFERRED, m_out receives L, and l_out is None.
    """
    blocks = tl.cdiv(T_q, BLOCK_Q)
    head, first, last = tl.program_id(0), 0, blocks
    if PARALLEL:
        head = tl.program_id(0) // blocks
        first = tl.program_id(0) % blocks
        last = first + 1
    b, h = head // H, head % H

    # Addresses that the compiler moves out of this loop would occupy registers inside it.
    for block in tl.range(first, last, disable_licm=True):
        row = block * BLOCK_Q
        i = row + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
        # Keys before `full` are read without a mask, then those before `end` with one.
        full, end = 0, T_k
        if not CAUSAL:
            full = T_k // BLOCK_K * BLOCK_K
        elif SKIPPING:
            full = tl.minimum(T_k, tl.maximum(row + 1 + T_k - T_q, 0)) // BLOCK_K * BLOCK_K
            end = tl.minimum(T_k, tl.maximum(row + BLOCK_Q + T_k - T_q, 0))

        q_tile = load_tile(q, q_strides, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D)  # [BLOCK_Q, BLOCK_D]
        m = tl.full([BLOCK_Q], -float("inf"), tl.float32)  # [BLOCK_Q], base 2
        l = tl.zeros([BLOCK_Q], tl.float32)  # [BLOCK_Q]
        acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)  # [BLOCK_Q, BLOCK_DV]
        if SKIPPING or not CAUSAL:
            for j in tl.range(0, full, BLOCK_K):
                acc, m, l = attend(acc, m, l, q_tile, k, k_strides, v, v_strides, b, h // GROUP, i, j,
                                   scale_log2, T_q, T_k, d, d_v,
                                   CAUSAL, False, DEFERRED, BLOCK_K, BLOCK_D, BLOCK_DV)
        if CAUSAL or RAGGED:
            for j in tl.range(full, end, BLOCK_K):
                acc, m, l = attend(acc, m, l, q_tile, k, k_strides, v, v_strides, b, h // GROUP, i, j,
                                   scale_log2, T_q, T_k, d, d_v,
                                   CAUSAL, True, DEFERRED, BLOCK_K, BLOCK_D, BLOCK_DV)

        if DEFERRED:
            l = tl.where(l == 0.0, 1.0, l)  # [BLOCK_Q]; a query that sees no key has l = 0, O = 0, L = -inf
            acc = acc / l[:, None]  # [BLOCK_Q, BLOCK_DV]
            m = (m + tl.log2(l)) * LN_2  # [BLOCK_Q], the log-sum-exp L
        else:
            tl.store(l_out + head.to(tl.int64) * T_q + i, l, mask=i < T_q)
        tl.store(m_out + head.to(tl.int64) * T_q + i, m, mask=i < T_q)
        store_tile(o, o_strides, acc, b, h, row, 0, T_q, d_v, BLOCK_Q, BLOCK_DV)


# {largest padded head dimension: (BLOCK_Q, BLOCK_K, num_warps, num_stages)}, the same for all steps: what is
# compared is the step. Every row compiles without spills, save what tests/test_compile.py names, and fits the
# shared memory of every device that it is meant for. Without tensor cores every factor of a product passes
# through registers: small tiles.
TENSOR_CORES = {16: (64, 64, 4, 2), 64: (128, 64, 8, 2), 128: (64, 32, 4, 2), 256: (64, 32, 8, 2)}
NO_TENSOR_CORES = {64: (32, 32, 4, 1), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)}
# Every step of the interpreter costs milliseconds, whatever its size: large tiles, few steps.
INTERPRETER = (64, 64, 4, 1)


def configuration(bits, d, capability):
    """``(BLOCK_Q, BLOCK_K, num_warps, num_stages)`` for elements of so many bits, padded head dimension d,
    and compute capability times ten.

    Triton uses tensor cores for 16 bits from compute capability 8.0 on; float32 products are exact here.
    """
    table = TENSOR_CORES if bits == 16 and capability >= 80 else NO_TENSOR_CORES
    return next(tile for largest, tile in table.items() if d <= largest)


def launch(q, k, v, o, m, l, causal, scale, step, tile):
    """Launch one step with one ``(BLOCK_Q, BLOCK_K, num_warps, num_stages)``; q, k, v in their computed
    dtype, scale >= 0, only T_k may be 0. From the step "deferred" on l is None and m receives L.
    """
    B, H, T_q, d = q.shape
    T_k, d_v = v.shape[2:]
    BLOCK_Q, BLOCK_K, num_warps, num_stages = tile
    reached = STEPS.index(step)
    programs = B * H * (triton.cdiv(T_q, BLOCK_Q) if reached >= 1 else 1)
    with on_device(q):
        return forward_kernel[(programs,)](
            q, q.stride(), k, k.stride(), v, v.stride(), o, o.stride(), m, l,
            scale * LOG2_E, H, H // k.shape[1], T_q, T_k, d, d_v,
            CAUSAL=causal, RAGGED=T_k % BLOCK_K != 0, PARALLEL=reached >= 1, DEFERRED=reached >= 2,
            SKIPPING=reached >= 3, BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K,
            BLOCK_D=padded(d), BLOCK_DV=value_columns(d, d_v), num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip


def forward(q, k, v, causal, scale, step):
    """O and the log-sum-exp without any T x T matrix, by the kernel as it is at ``step``, one of STEPS.

    q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]``, v ``[B, H_kv, T_k, d_v]``, any strides, scale
    finite.
    Returns ``(o, lse)``: o ``[B, H, T_q, d_v]`` in the dtype of q, contiguous; lse ``[B, H, T_q]``
    in float32, natural logarithm. On a CPU bfloat16 is widened to float32 and the result rounded.
    Raises ValueError for an unknown step.
    """
    if step not in STEPS:
        raise ValueError(f"step: expected one of {', '.join(STEPS)}, got {step!r}")
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    if scale < 0.0:
        q, scale = -q, -scale  # the kernel takes the maximum before it scales
    B, H, T_q, d = q.shape
    d_v = v.shape[3]
    o = torch.empty(B, H, T_q, d_v, dtype=q.dtype, device=q.device)
    m = torch.empty(B, H, T_q, dtype=torch.float32, device=q.device)
    l = torch.empty_like(m) if STEPS.index(step) < STEPS.index("deferred") else None
    if m.numel():
        tile = INTERPRETER
        if not INTERPRETED:
            major, minor = torch.cuda.get_device_capability(q.device)
            tile = configuration(q.element_size() * 8, max(padded(d), padded(d_v)), major * 10 + minor)
        launch(q, k, v, o, m, l, causal, scale, step, tile)
    return o.to(dtype), m if l is None else (m + torch.log2(l)) * LN_2.value
