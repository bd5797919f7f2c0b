"""From FlashAttention to FlashAttention-2, one change at a time: four forward kernels
in one.

Chapter *FlashAttention-2*; the lecture slides' Algorithm 3 (Chu, Liu, Lin, 2026); Dao,
"FlashAttention-2" (ICLR 2024), Algorithm 1 and section 3. Each step keeps the changes
of the steps before it:

swapped    queries outside, keys inside: O, m and l of a block of queries stay in
           registers for the whole loop over keys. One program owns one head, as in
           flash1; it divides O by l at every step and stores two statistics, m and l.
parallel   one program owns one block of queries of one head.
deferred   O is divided once, at the end, and one statistic L = m + ln l is stored.
skipping   with a causal mask, blocks of keys that no query of the block sees are not
           read, and those that every query sees are not masked. The steps before read
           and mask every block.

The last step computes the same as flashlib.kernels.flash2, which adds tensor
descriptors, a table of tiles and the order in which programs start.
"""

import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import inputs, tables, tiles
from flashlib.kernels.tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
    load_tile,
    log_sum_exp,
    online_softmax,
    store_tile,
    visible,
)

STEPS = ("swapped", "parallel", "deferred", "skipping")


@triton.jit
def attend(
    acc, m, l, q_tile, k, v, b, h, i, j, scale_log2, n,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, DEFERRED: tl.constexpr,
    TILE: tl.constexpr
):  # fmt: skip
    """One step of the inner loop: the block of keys that starts at j."""
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    # -- scores
    k_tile = load_tile(k, b, h, j, 0, n.T_k, n.d, BLOCK_K, TILE.BLOCK_D)
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K], unscaled
    # -- online softmax
    seen = visible(i, j + tl.arange(0, BLOCK_K), n.T_q, n.T_k, CAUSAL)
    p, alpha, m, l_new = online_softmax(s, m, l, scale_log2, seen, MASKED)
    # -- output
    if DEFERRED:
        acc = acc * alpha[:, None]
    else:
        acc = acc * (l * alpha)[:, None]  # no longer divided
    v_tile = load_tile(v, b, h, j, 0, n.T_k, n.d_v, BLOCK_K, TILE.BLOCK_DV)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    if not DEFERRED:
        acc = tl.div_rn(acc, tl.where(l_new == 0.0, 1.0, l_new)[:, None])
    return acc, m, l_new


@triton.jit
def forward_kernel(
    q, k, v, o, m_out, l_out, scale_log2, n,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PARALLEL: tl.constexpr,
    DEFERRED: tl.constexpr, SKIPPING: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One program writes O and the statistics of one block of queries or, if not
    PARALLEL, of all of a head. q, k, v, o: Rows. n: the Sizes.

    If DEFERRED, m_out receives L, and l_out is None.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    T_q, T_k = n.T_q, n.T_k
    blocks = tl.cdiv(T_q, BLOCK_Q)
    head, first, last = tl.program_id(0), 0, blocks
    if PARALLEL:
        head = tl.program_id(0) // blocks
        first = tl.program_id(0) % blocks
        last = first + 1
    b, h = head // n.H, head % n.H

    # Without disable_licm the compiler moves addresses out of this loop, and they would
    # occupy registers inside it.
    for block in tl.range(first, last, disable_licm=True):
        row = block * BLOCK_Q
        i = row + tl.arange(0, BLOCK_Q)
        # Keys before `full_end` are read without a mask, the rest before `end` with it.
        full_end, end = 0, T_k
        if not CAUSAL:
            full_end = T_k // BLOCK_K * BLOCK_K
        elif SKIPPING:
            full_end = tl.minimum(T_k, tl.maximum(row + 1 + T_k - T_q, 0))
            full_end = full_end // BLOCK_K * BLOCK_K
            end = tl.minimum(T_k, tl.maximum(row + BLOCK_Q + T_k - T_q, 0))

        q_tile = load_tile(q, b, h, row, 0, T_q, n.d, BLOCK_Q, TILE.BLOCK_D)
        m = tl.full([BLOCK_Q], LOWEST, tl.float32)  # in base 2
        l = tl.zeros([BLOCK_Q], tl.float32)
        acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
        if SKIPPING or not CAUSAL:
            for j in tl.range(0, full_end, BLOCK_K):
                acc, m, l = attend(
                    acc, m, l, q_tile, k, v, b, h // n.GROUP, i, j, scale_log2, n,
                    CAUSAL, False, DEFERRED, TILE
                )  # fmt: skip
        if CAUSAL or RAGGED:
            for j in tl.range(full_end, end, BLOCK_K):
                acc, m, l = attend(
                    acc, m, l, q_tile, k, v, b, h // n.GROUP, i, j, scale_log2, n,
                    CAUSAL, True, DEFERRED, TILE
                )  # fmt: skip

        if DEFERRED:
            # A query that sees no key has l = 0, O = 0 and L = -inf.
            acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
            m = log_sum_exp(m, l)
        else:
            tl.store(l_out + head.to(tl.int64) * T_q + i, l, mask=i < T_q)
        tl.store(m_out + head.to(tl.int64) * T_q + i, m, mask=i < T_q)
        store_tile(o, acc, b, h, row, 0, T_q, n.d_v, BLOCK_Q, BLOCK_DV)


# All steps share one table, so that a comparison shows the step. Every row compiles
# without spills, with the exceptions that tests/test_compile.py lists. Without tensor
# cores every factor of a product passes through registers, so tiles are small.
CONFIGURATIONS = tables.simple_table(
    tensor_cores={
        16: (64, 64, 4, 2), 64: (128, 64, 8, 2),
        128: (64, 32, 4, 2), 256: (64, 32, 8, 2),
    },
    others={64: (32, 32, 4, 1), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)},
)  # fmt: skip


@plans.planned
def launch_forward(q, k, v, o, m, l, causal, scale, step, config):
    """Launch one step with one configuration; q, k, v in their computed dtype, scale >=
    0, only T_k may be 0. From the step "deferred" on l is None and m receives L.
    """
    n = inputs.sizes(q, k, v)
    reached = STEPS.index(step)
    blocks = triton.cdiv(n.T_q, config.BLOCK_Q) if reached >= 1 else 1
    plans.launch(
        forward_kernel, q, q.shape[0] * n.H * blocks,
        *tiles.as_rows(q, k, v, o), m, l, scale * LOG2_E.value, n,
        CAUSAL=causal, RAGGED=n.T_k % config.BLOCK_K != 0,
        PARALLEL=reached >= 1, DEFERRED=reached >= 2, SKIPPING=reached >= 3,
        **tables.compiled_for(config, n),
    )  # fmt: skip


@plans.planned
def forward(q, k, v, causal, scale, step):
    """``(o, lse)``, as :mod:`flashlib.kernels` says, but o contiguous, by the kernel at
    ``step``. Raises ValueError unless it is one of STEPS.
    """
    if step not in STEPS:
        raise ValueError(f"step: expected one of {', '.join(STEPS)}, got {step!r}")
    dtype = q.dtype
    q, k, v, scale, o, m = inputs.forward_tensors(q, k, v, scale)
    l = m.new_empty(m.shape) if STEPS.index(step) < STEPS.index("deferred") else None
    if m.numel():
        name = f"flash2, {step}"
        config = tables.configuration(name, CONFIGURATIONS, (q, k, v), causal)
        launch_forward(q, k, v, o, m, l, causal, scale, step, config)
    return o.to(dtype), m if l is None else l.log2_().add_(m).mul_(LN_2.value)
