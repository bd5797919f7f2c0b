"""FlashAttention-2, forward: queries outside, keys inside, one division at the end.

Chapter *FlashAttention-2*; Dao, "FlashAttention-2" (ICLR 2024), Algorithm 1. A program owns one
block of queries. It walks over the keys once, keeps the running maximum m, the normaliser l and the
unnormalised output in registers, and writes O and the log-sum-exp L = m + ln l at the end. Nothing
of size T x T exists.

Blocks of keys that every query of the block sees are read without a mask; then come those that some
query does not see (the diagonal band of a causal mask, the ragged end). Blocks that no query sees
are never read.
"""

import math

import torch
import triton
import triton.language as tl

from flashlib.kernels import INTERPRETED, on_device, padded, widened
from flashlib.kernels.launch import Configuration, configuration, descriptor, tuned, value_columns
from flashlib.kernels.tiles import load_tile, online_softmax, store_tile, visible

LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def attend(acc, m, l, q_tile, k, k_strides, v, v_strides, b, h, i, j, scale_log2, T_q, T_k, d, d_v,
           CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
           BLOCK_DV: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """One step of the inner loop: the block of keys that starts at j."""
    k_tile = load_tile(k, k_strides, b, h, j, 0, T_k, d, BLOCK_K, BLOCK_D, DESCRIPTOR)  # [BLOCK_K, BLOCK_D]
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K], unscaled
    seen = visible(i, j + tl.arange(0, BLOCK_K), T_q, T_k, CAUSAL)  # [BLOCK_Q, BLOCK_K], used where MASKED
    p, alpha, m, l = online_softmax(s, m, l, scale_log2, seen, MASKED)
    acc = acc * alpha[:, None]  # [BLOCK_Q, BLOCK_DV]
    v_tile = load_tile(v, v_strides, b, h, j, 0, T_k, d_v,
                       BLOCK_K, BLOCK_DV, DESCRIPTOR)  # [BLOCK_K, BLOCK_DV]
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")  # [BLOCK_Q, BLOCK_DV]
    return acc, m, l


@triton.jit
def forward_kernel(q, q_strides, k, k_strides, v, v_strides, o, o_strides, lse, scale_log2,
                   H, GROUP, T_q, T_k, d, d_v,
                   CAUSAL: tl.constexpr, RAGGED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """One program writes one block of rows of O and of L, in one pass over the keys that these rows see."""
    blocks = tl.cdiv(T_q, BLOCK_Q)
    # With a causal mask the last blocks of queries see the most keys: the longest start first.
    block = blocks - 1 - tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks
    b, h = head // H, head % H

    row = block * BLOCK_Q
    i = row + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    # Keys before `full` are seen by every query of the block, keys from `end` on by none.
    full, end = T_k // BLOCK_K * BLOCK_K, T_k
    if CAUSAL:
        full = tl.minimum(full, tl.maximum(row + 1 + T_k - T_q, 0) // BLOCK_K * BLOCK_K)
        end = tl.minimum(end, tl.maximum(row + BLOCK_Q + T_k - T_q, 0))

    q_tile = load_tile(q, q_strides, b, h, row, 0, T_q, d, BLOCK_Q, BLOCK_D, DESCRIPTOR)  # [BLOCK_Q, BLOCK_D]
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)  # [BLOCK_Q], base 2
    l = tl.zeros([BLOCK_Q], tl.float32)  # [BLOCK_Q]
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)  # [BLOCK_Q, BLOCK_DV]
    for j in tl.range(0, full, BLOCK_K):
        acc, m, l = attend(acc, m, l, q_tile, k, k_strides, v, v_strides, b, h // GROUP, i, j, scale_log2,
                           T_q, T_k, d, d_v, CAUSAL, False, BLOCK_K, BLOCK_D, BLOCK_DV, DESCRIPTOR)
    if CAUSAL or RAGGED:
        for j in tl.range(full, end, BLOCK_K):
            acc, m, l = attend(acc, m, l, q_tile, k, k_strides, v, v_strides, b, h // GROUP, i, j, scale_log2,
                               T_q, T_k, d, d_v, CAUSAL, True, BLOCK_K, BLOCK_D, BLOCK_DV, DESCRIPTOR)

    l_safe = tl.where(l == 0.0, 1.0, l)  # [BLOCK_Q]; a query that sees no key has l = 0, O = 0 and L = -inf
    store_tile(o, o_strides, acc / l_safe[:, None], b, h, row, 0, T_q, d_v, BLOCK_Q, BLOCK_DV)
    tl.store(lse + head.to(tl.int64) * T_q + i, (m + tl.log2(l_safe)) * LN_2, mask=i < T_q)


# The rows with descriptors are the fastest of a sweep on an H200 (flashlib/records/tiles.json). The others
# for 16 bits compile without spills and fit 99 KiB of shared memory. Without tensor cores (float32, whose
# products are exact, and sm_75, for which Triton has none) tiles are small: every factor of a product passes
# through registers.
CONFIGURATIONS = (
    Configuration((90,), 16, 64, 64, 128, 4, 2, True, 76_000),
    Configuration((90,), 16, 128, 64, 64, 4, 3, True, 117_000),
    Configuration((90,), 16, 256, 128, 64, 8, 2, True, 198_000),
    Configuration((80, 86, 89, 90, 100, 120), 16, 128, 64, 64, 4, 2, False, 101_000),
    Configuration((80, 86, 89, 90, 100, 120), 16, 256, 64, 32, 8, 2, False, 101_000),
    Configuration((75,), 16, 128, 16, 32, 4, 1, False, 65_000),
    Configuration((75,), 16, 256, 16, 16, 8, 1, False, 65_000),
    Configuration((75, 80, 86, 89, 90, 100, 120), 32, 64, 32, 32, 4, 1, False, 65_000),
    Configuration((75, 80, 86, 89, 90, 100, 120), 32, 128, 16, 32, 4, 1, False, 65_000),
    Configuration((75, 80, 86, 89, 90, 100, 120), 32, 256, 16, 16, 8, 1, False, 65_000),
)
# What tuning tries beside the rows above: with descriptors, the tiles that were the fastest or close to it at
# some length of that sweep; without, those of the sweep that compile without spills.
FURTHER_TILES = (
    Configuration((90,), 16, 64, 64, 64, 4, 2, True, 42_000),
    Configuration((90,), 16, 64, 128, 64, 8, 3, True, 67_000),
    Configuration((90,), 16, 128, 128, 128, 8, 3, True, 231_000),
    Configuration((90,), 16, 128, 128, 64, 8, 3, True, 133_000),
    Configuration((90,), 16, 256, 64, 64, 4, 3, True, 231_000),
    Configuration((90,), 16, 128, 128, 128, 8, 2, False, 164_000),
    Configuration((90,), 16, 256, 128, 64, 8, 2, False, 197_000),
    Configuration((80, 86, 89, 90, 100, 120), 16, 128, 128, 64, 8, 2, False, 101_000),
    Configuration((80, 86, 89, 90, 100, 120), 16, 128, 64, 32, 4, 3, False, 67_000),
)


def launch(q, k, v, o, lse, causal, scale, config):
    """Launch with one configuration; q, k, v in their computed dtype, scale >= 0, only T_k may be 0."""
    B, H, T_q, d = q.shape
    T_k, d_v = v.shape[2:]
    BLOCK_D, BLOCK_DV = padded(d), value_columns(d, d_v)
    operands = (q, k, v)
    if config.descriptor:
        operands = (
            descriptor(q, config.BLOCK_Q, BLOCK_D),
            descriptor(k, config.BLOCK_K, BLOCK_D),
            descriptor(v, config.BLOCK_K, BLOCK_DV),
        )
    with on_device(q):
        return forward_kernel[(B * H * triton.cdiv(T_q, config.BLOCK_Q),)](
            operands[0], q.stride(), operands[1], k.stride(), operands[2], v.stride(), o, o.stride(), lse,
            scale * LOG2_E, H, H // k.shape[1], T_q, T_k, d, d_v,
            CAUSAL=causal, RAGGED=T_k % config.BLOCK_K != 0, BLOCK_Q=config.BLOCK_Q, BLOCK_K=config.BLOCK_K,
            BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, DESCRIPTOR=config.descriptor,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


def forward(q, k, v, causal, scale, tune=False):
    """O and the log-sum-exp without any T x T matrix.

    q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]``, v ``[B, H_kv, T_k, d_v]``, any strides, scale
    finite.
    Returns ``(o, lse)``: o ``[B, H, T_q, d_v]`` in the dtype of q, contiguous; lse ``[B, H, T_q]``
    in float32, natural logarithm. On a CPU bfloat16 is widened to float32 and the result rounded.
    tune: take the fastest of CONFIGURATIONS and FURTHER_TILES, timed at the first call for a kind of
    problem (flashlib.kernels.launch.tuned), instead of the row that the table names.
    Raises ValueError where no configuration fits the device, and for tune in the interpreter.
    """
    if tune and INTERPRETED:
        raise ValueError("tune: expected False in Triton's interpreter (timing needs a CUDA GPU), got True")
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    if scale < 0.0:
        q, scale = -q, -scale  # the kernel takes the maximum before it scales
    B, H, T_q, _ = q.shape
    o = torch.empty(B, H, T_q, v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, T_q, dtype=torch.float32, device=q.device)
    if lse.numel():
        if tune:
            config = tuned(
                "flash2", CONFIGURATIONS + FURTHER_TILES, (q, k, v), causal,
                lambda row: launch(q, k, v, o, lse, causal, scale, row),
            )  # fmt: skip
        else:
            config = configuration("flash2", CONFIGURATIONS, (q, k, v), causal)
        launch(q, k, v, o, lse, causal, scale, config)
    return o.to(dtype), lse
