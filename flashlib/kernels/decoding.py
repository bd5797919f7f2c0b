"""Decoding: a few queries against a long cache, in splits that are merged (Flash-Decoding).

Chapter *Decoding*; Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference" (2023); pages
after Kwon et al., "Efficient memory management for large language model serving with PagedAttention" (SOSP
2023). The queries of all heads that share a head of keys, T_q of each, are the rows of one tile, so that a
cache is read once. A program takes one such tile through one split of the keys of its sequence and writes its
(O, L); where there are several splits, a second kernel merges them by the law of softmax in pieces,
``eq-online-lse-merge``.

A contiguous cache is read as one whose sequence b has the single page b.
"""

import math

import torch
import triton
import triton.language as tl

from flashlib.kernels import INTERPRETED, on_device, padded, widened
from flashlib.kernels.launch import INTERPRETER, Configuration, fitting, problem, value_columns
from flashlib.kernels.tiles import online_softmax, pointers

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def load_rows(x, strides, page, h, row, keys, length, d, COLS: tl.constexpr):
    """The rows [BLOCK_K, COLS] of head h of a cache for these keys of a sequence, zeros from key `length` on;
    row is [BLOCK_K], page too or one for all.
    """
    cols = tl.arange(0, COLS)  # [COLS]
    inside = (keys < length)[:, None] & (cols < d)[None, :]  # [BLOCK_K, COLS]
    return tl.load(pointers(x, strides, page, h, row, cols), mask=inside, other=0.0)


@triton.jit
def find_page(table, table_strides, b, j, length, PAGE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where the keys from j on lie: one page for all of them, or [BLOCK_K] pages."""
    if PAGE == 0:
        page = b
    else:
        entries = table + b.to(tl.int64) * table_strides[0]
        # What the table says of keys that the sequence does not have is not read.
        if PAGE >= BLOCK_K:
            page = tl.load(entries + j // PAGE * table_strides[1], mask=j < length, other=0)  # [1]
        else:
            keys = j + tl.arange(0, BLOCK_K)  # [BLOCK_K]
            entries += keys // PAGE * table_strides[1]  # [BLOCK_K]
            page = tl.load(entries, mask=keys < length, other=0)  # [BLOCK_K]
    return page


@triton.jit(do_not_specialize=["splits", "LEFT"])
def split_kernel(q, q_strides, k, k_strides, v, v_strides, table, table_strides, seq_lens, o, lse, scale_log2,
                 H, GROUP, T_q, LEFT, splits, d, d_v,
                 PAGE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                 BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):
    """One program writes O and L of one tile of queries against one split of the keys of their sequence.

    o [B, H, T_q, splits, d_v] and lse [B, H, T_q, splits] are contiguous.
    """
    tiles = tl.cdiv(GROUP * T_q, BLOCK_Q)
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits % tiles
    head = tl.program_id(0) // splits // tiles  # of keys
    b, h = head // (H // GROUP), head % (H // GROUP)

    # The rows of the tile: query i of each head of the group, one head after the other.
    r = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    heads, i = h * GROUP + r // T_q, r % T_q  # [BLOCK_Q] both
    cols = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = (r < GROUP * T_q)[:, None] & (cols < d)[None, :]  # [BLOCK_Q, BLOCK_D]
    q_tile = tl.load(pointers(q, q_strides, b, heads, i, cols), mask=inside, other=0.0)  # [BLOCK_Q, BLOCK_D]

    # The split: whole blocks, as many as in every other one, from the first that a query sees on.
    length = tl.load(seq_lens + b)
    first = 0
    if WINDOW:
        first = tl.maximum(length - T_q - LEFT, 0) // BLOCK_K * BLOCK_K
    share = tl.cdiv(tl.cdiv(length - first, BLOCK_K), splits) * BLOCK_K
    start = first + share * split
    stop = tl.minimum(start + share, length)

    position = length - T_q + i  # [BLOCK_Q], of each query
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)  # [BLOCK_Q], base 2
    l = tl.zeros([BLOCK_Q], tl.float32)  # [BLOCK_Q]
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)  # [BLOCK_Q, BLOCK_DV]
    page = find_page(table, table_strides, b, start, stop, PAGE, BLOCK_K)
    for j in tl.range(start, stop, BLOCK_K):
        keys = j + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        row = keys  # [BLOCK_K]
        if PAGE > 0:
            row = keys % PAGE  # [BLOCK_K]
        # Read one step ahead: the keys could not be fetched before their page is known.
        next_page = find_page(table, table_strides, b, j + BLOCK_K, stop, PAGE, BLOCK_K)
        k_tile = load_rows(k, k_strides, page, h, row, keys, length, d, BLOCK_D)  # [BLOCK_K, BLOCK_D]
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K], unscaled
        seen = keys[None, :] <= position[:, None]  # [BLOCK_Q, BLOCK_K]
        if WINDOW:
            seen = seen & (keys[None, :] >= position[:, None] - LEFT)  # [BLOCK_Q, BLOCK_K]
        p, alpha, m, l = online_softmax(s, m, l, scale_log2, seen, True)
        v_tile = load_rows(v, v_strides, page, h, row, keys, length, d_v, BLOCK_DV)  # [BLOCK_K, BLOCK_DV]
        acc = acc * alpha[:, None]  # [BLOCK_Q, BLOCK_DV]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")  # [BLOCK_Q, BLOCK_DV]
        page = next_page

    l_safe = tl.where(l == 0.0, 1.0, l)  # [BLOCK_Q]; no key seen: O = 0 and L = -inf
    written = ((b * H + heads).to(tl.int64) * T_q + i) * splits + split  # [BLOCK_Q]
    cols = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    acc = tl.div_rn(acc, l_safe[:, None])  # [BLOCK_Q, BLOCK_DV]
    tl.store(o + written[:, None] * d_v + cols[None, :], acc.to(o.dtype.element_ty),
             mask=(r < GROUP * T_q)[:, None] & (cols < d_v)[None, :])
    tl.store(lse + written, (m + tl.log2(l_safe)) * LN_2, mask=r < GROUP * T_q)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(o_parts, lse_parts, o, lse, splits, d_v, SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """One program merges the parts of one query: o_parts [B, H, T_q, splits, d_v] and lse_parts [B, H, T_q,
    splits] into o [B, H, T_q, d_v] and lse [B, H, T_q], all contiguous.
    """
    query = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SPLITS)  # [SPLITS]
    cols = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    there = (n < splits)[:, None] & (cols < d_v)[None, :]  # [SPLITS, BLOCK_DV]
    part = query * splits + n  # [SPLITS]
    entries = o_parts + part[:, None] * d_v + cols[None, :]  # [SPLITS, BLOCK_DV]
    o_part = tl.load(entries, mask=there, other=0.0)  # [SPLITS, BLOCK_DV]
    lse_part = tl.load(lse_parts + part, mask=n < splits, other=-float("inf"))  # [SPLITS]
    m = tl.max(lse_part, 0)
    shift = tl.where(m == -float("inf"), 0.0, m)  # no part has seen a key: -inf - -inf is NaN
    weight = tl.exp2((lse_part - shift) * LOG2_E)  # [SPLITS]
    l = tl.sum(weight, 0)
    l_safe = tl.where(l == 0.0, 1.0, l)
    merged = tl.div_rn(tl.sum(weight[:, None] * o_part, 0), l_safe)  # [BLOCK_DV]
    tl.store(o + query * d_v + cols, merged.to(o.dtype.element_ty), mask=cols < d_v)
    tl.store(lse + query, m + tl.log2(l_safe) * LN_2)


# On Hopper a block of keys has 16 KiB, and as many of values. A program has room for two of each, and three
# programs share a multiprocessor: of a sweep on an H200 among the fastest for one sequence of 16k and of 256k
# keys (tensor descriptors gained nothing). The others compile without spills and fit 99 KiB of shared memory.
CONFIGURATIONS = (
    Configuration((90,), 16, 64, 64, 128, 4, 3, False, 108_000),
    Configuration((90,), 16, 128, 64, 64, 4, 3, False, 115_000),
    Configuration((90,), 16, 256, 32, 32, 4, 3, False, 85_000),
    Configuration((80, 86, 89, 90, 100, 120), 16, 128, 64, 32, 4, 3, False, 101_000),
    Configuration((80, 86, 89, 90, 100, 120), 16, 256, 32, 32, 4, 2, False, 101_000),
    Configuration((75,), 16, 128, 16, 32, 4, 1, False, 65_000),
    Configuration((75,), 16, 256, 16, 16, 8, 1, False, 65_000),
    Configuration((75, 80, 86, 89, 90, 100, 120), 32, 64, 32, 32, 4, 1, False, 65_000),
    Configuration((75, 80, 86, 89, 90, 100, 120), 32, 128, 16, 32, 4, 1, False, 65_000),
    Configuration((75, 80, 86, 89, 90, 100, 120), 32, 256, 16, 16, 8, 1, False, 65_000),
)
PROGRAMS = 3  # that a multiprocessor runs at a time, for one query on Hopper (tests/test_compile_decoding.py)
ENOUGH = 2  # of them on each multiprocessor read as fast as the memory of an H200 delivers
BUSY = 0.95  # of the bandwidth that the best number of splits draws
LARGEST_SPLITS = 128  # whose parts the merge holds in registers


def configuration(k, v):
    """The row of the table for a cache on its device; BLOCK_Q is the largest tile of queries.

    Raises ValueError where no row fits.
    """
    if INTERPRETED:
        return INTERPRETER
    return fitting("decoding", CONFIGURATIONS, *problem((k, v)), None)


def busiest(tiles, blocks, slots, enough=None):
    """The number of splits for so many tiles of queries, each against ``blocks`` blocks of keys at the most,
    on a device that runs ``slots`` programs at a time and whose bandwidth ``enough`` of them draw whole
    (default: no fewer than all).

    Programs run in waves. If the last wave has fewer than enough programs, it takes as long as one that has
    them. Each of these then waits for its own reads, and longest where it must find a page first: on an H200
    512 programs as 396 and 116 took a tenth longer than 1024 as 792 and 232, with pages nearly a fifth. Of
    the numbers up to one split a block, the smallest that draws nearly as much as any other.
    """
    enough = slots if enough is None else enough

    def drawn(splits):
        programs = tiles * splits
        last = programs % slots
        return programs / (programs - last + (max(last, enough) if last else 0))

    allowed = range(1, max(1, min(LARGEST_SPLITS, blocks)) + 1)
    best = max(map(drawn, allowed))
    return next(splits for splits in allowed if drawn(splits) >= BUSY * best)


def automatic(q, k, capacity, config):
    """The number of splits for q ``[B, H, T_q, d]`` and a cache k of H_kv heads that holds up to ``capacity``
    keys of a sequence: the host does not know the lengths.
    """
    if INTERPRETED:
        return 1
    (B, H, T_q, _), H_kv = q.shape, k.shape[1]
    rows = H // H_kv * T_q
    tiles = B * H_kv * triton.cdiv(rows, min(config.BLOCK_Q, padded(rows)))
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    blocks = triton.cdiv(capacity, config.BLOCK_K)
    return busiest(tiles, blocks, PROGRAMS * processors, ENOUGH * processors)


def launch(q, k, v, block_table, seq_lens, o, lse, left, scale, config):
    """Launch one program for each tile of queries and split; scale >= 0, left -1 for no window.

    o ``[B, H, T_q, splits, d_v]`` and lse ``[B, H, T_q, splits]`` are contiguous.
    """
    (B, H, T_q, d), H_kv, d_v = q.shape, k.shape[1], v.shape[3]
    rows, splits, paged = H // H_kv * T_q, lse.shape[3], block_table is not None
    BLOCK_Q = min(config.BLOCK_Q, padded(rows))
    table = block_table if paged else seq_lens[:, None]  # not read where there are no pages
    with on_device(q):
        return split_kernel[(B * H_kv * triton.cdiv(rows, BLOCK_Q) * splits,)](
            q, q.stride(), k, k.stride(), v, v.stride(), table, table.stride(), seq_lens, o, lse,
            scale * LOG2_E.value, H, H // H_kv, T_q, left, splits, d, d_v,
            PAGE=k.shape[2] if paged else 0, WINDOW=left >= 0, BLOCK_Q=BLOCK_Q, BLOCK_K=config.BLOCK_K,
            BLOCK_D=padded(d), BLOCK_DV=value_columns(d, d_v),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


def launch_merge(o_parts, lse_parts, o, lse):
    """Launch the merge of o_parts ``[B, H, T_q, splits, d_v]`` and lse_parts ``[B, H, T_q, splits]`` into o
    and lse, without the splits; all contiguous.
    """
    splits, d_v = o_parts.shape[3:]
    with on_device(o):
        return merge_kernel[(lse.numel(),)](
            o_parts, lse_parts, o, lse, splits, d_v,
            SPLITS=triton.next_power_of_2(splits), BLOCK_DV=padded(d_v), num_warps=4,
        )  # fmt: skip


def forward(q, k_cache, v_cache, seq_lens, block_table, splits, left, scale):
    """O and the log-sum-exp of the last T_q positions of each sequence against its cache.

    q ``[B, H, T_q, d]``; k_cache ``[B, H_kv, T_max, d]`` and v_cache ``[B, H_kv, T_max, d_v]`` or, with a
    block_table ``[B, max_pages]``, ``[pages, H_kv, page_size, d]`` and ``[pages, H_kv, page_size, d_v]``, any
    strides; seq_lens ``[B]``, contiguous; splits 0 for the number that ``automatic`` says; left -1 for no
    window. Nothing waits for the device.
    Returns ``(o, lse)``: o ``[B, H, T_q, d_v]`` in the dtype of q, lse ``[B, H, T_q]`` in float32, natural
    logarithm. On a CPU bfloat16 is widened to float32 and the result rounded.
    Raises ValueError where no configuration fits the device.
    """
    dtype = q.dtype
    q, k, v = widened(q, k_cache, v_cache)
    if scale < 0.0:
        q, scale = -q, -scale  # the kernel takes the maximum before it scales
    B, H, T_q, _ = q.shape
    o = torch.empty(B, H, T_q, v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, T_q, dtype=torch.float32, device=q.device)
    if not lse.numel():
        return o.to(dtype), lse
    config = configuration(k, v)
    capacity = k.shape[2] * (1 if block_table is None else block_table.shape[1])
    if left >= capacity:
        left = -1  # a window that no sequence outgrows
    splits = splits or automatic(q, k, capacity, config)
    if splits == 1:
        launch(q, k, v, block_table, seq_lens, o[:, :, :, None], lse[..., None], left, scale, config)
    else:
        o_parts = torch.empty(B, H, T_q, splits, v.shape[3], dtype=torch.float32, device=q.device)
        lse_parts = torch.empty(B, H, T_q, splits, dtype=torch.float32, device=q.device)
        launch(q, k, v, block_table, seq_lens, o_parts, lse_parts, left, scale, config)
        launch_merge(o_parts, lse_parts, o, lse)
    return o.to(dtype), lse
