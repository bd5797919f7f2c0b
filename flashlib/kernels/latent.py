"""Latent attention, absorbed: a few queries against a long cache of latents, in pages
and splits that are merged.

Chapter *Latent attention* (``eq-latent-absorb``, ``eq-latent-output``); DeepSeek-AI,
"DeepSeek-V2" (2024), section 2.1. A row of the cache has d_c columns of a latent and
d_r rotary ones. It is the key of all heads, and its first d_c columns are their value:
the kernel loads a block of rows once for both, and the queries of all heads, T_q of
each, are the rows of its tiles. Splits, pages and the merge are those of the chapter
*Decoding*.

A contiguous cache is read as one whose sequence b has the single page b. Of a cache in
eight bits, the latent and the rotary columns of each row have a scale of their own.
"""

import torch
import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import INTERPRETED, inputs, padded, tables
from flashlib.kernels.cached import (
    capacity_of,
    find_page,
    load_pairs,
    load_rows,
    load_scales,
    nearest,
)
from flashlib.kernels.decoding import busiest, launch_merge, new_parts
from flashlib.kernels.eight_bits import (
    in_units,
    split_pairs,
    units_of,
    weighted_softmax,
)
from flashlib.kernels.tables import Configuration
from flashlib.kernels.tiles import (
    LOG2_E,
    LOWEST,
    Rows,
    Tile,
    as_rows,
    log_sum_exp,
    online_softmax,
    pointers,
)


@triton.jit
def rotary(x, d_c):
    """The Rows x [B, H, T, d_c + d_r] from column d_c on."""
    return Rows(x.ptr + d_c * x.strides[3], x.strides)


@triton.jit
def load_both_scales(x, page, h, row):
    """Scales [BLOCK_K] of the latents and of the rotary columns of rows, from the Rows
    x [B, H, T, 2].
    """
    return load_scales(x, page, h, row), load_scales(rotary(x, 1), page, h, row)


@triton.jit(do_not_specialize=["splits", "T_q"])
def latent_kernel(
    q, cache, table, scales, seq_lens, o, lse, scale_log2, splits, H, T_q, d_c, d_r,
    PAGE: tl.constexpr, EIGHT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One program writes O, of latents, and L of one tile of queries against one split
    of the rows of their sequence.

    q, cache and table are Rows; o [B, H, T_q, splits, d_c] and lse [B, H, T_q, splits]
    are contiguous. scales: Rows, if the cache is in EIGHT bits; latents then are tiles
    of even and of odd columns. TILE.BLOCK_DV is d_c, padded, and TILE.BLOCK_D is d_r.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_C: tl.constexpr = TILE.BLOCK_DV
    BLOCK_R: tl.constexpr = TILE.BLOCK_D
    tiles = tl.cdiv(H * T_q, BLOCK_Q)
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits % tiles
    b = tl.program_id(0) // splits // tiles
    only = tl.full([], 0, tl.int32)  # the head of keys

    # The rows of the tile: query i of each head, one head after the other.
    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    heads, i = row // T_q, row % T_q  # [BLOCK_Q] both
    cols, rotated = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    own = (row < H * T_q)[:, None]
    q_c = tl.load(
        pointers(q, b, heads, i, cols), mask=own & (cols < d_c)[None, :], other=0.0
    )  # [BLOCK_Q, BLOCK_C]
    q_r = tl.load(
        pointers(rotary(q, d_c), b, heads, i, rotated),
        mask=own & (rotated < d_r)[None, :], other=0.0,
    )  # [BLOCK_Q, BLOCK_R]  # fmt: skip

    if EIGHT:
        most = tl.maximum(tl.max(tl.abs(q_c), 1), tl.max(tl.abs(q_r), 1))
        units = units_of(most.to(tl.float32))
        q_c, q_r = in_units(q_c, units), in_units(q_r, units)
        q_even, q_odd = tl.split(q_c.reshape(BLOCK_Q, BLOCK_C // 2, 2))

    # The split: whole blocks, as many as in every other one.
    length = tl.load(seq_lens + b)
    share = tl.cdiv(tl.cdiv(length, BLOCK_K), splits) * BLOCK_K
    start = share * split
    stop = tl.minimum(start + share, length)

    position = length - T_q + i  # [BLOCK_Q], of each query
    m = tl.full([BLOCK_Q], LOWEST, tl.float32)  # in base 2
    l = tl.zeros([BLOCK_Q], tl.float32)
    if EIGHT:
        even = tl.zeros([BLOCK_Q, BLOCK_C // 2], tl.float32)  # columns of acc
        odd = tl.zeros([BLOCK_Q, BLOCK_C // 2], tl.float32)
    else:
        acc = tl.zeros([BLOCK_Q, BLOCK_C], tl.float32)
    page = find_page(table, b, start, None, stop, PAGE, BLOCK_K)
    for j in tl.range(start, stop, BLOCK_K):
        keys = j + tl.arange(0, BLOCK_K)
        at = nearest(keys, None, stop)
        if PAGE > 0:
            at = at % PAGE
        # Read one step ahead: rows could not be fetched before their page is known.
        next_page = find_page(table, b, j + BLOCK_K, None, stop, PAGE, BLOCK_K)
        # -- scores
        if EIGHT:
            pairs = load_pairs(cache, page, only, at, d_c, BLOCK_C)
            c_even, c_odd = split_pairs(pairs)
        else:
            c = load_rows(cache, page, only, at, d_c, BLOCK_C)
        r = load_rows(rotary(cache, d_c), page, only, at, d_r, BLOCK_R)
        if EIGHT:
            s = tl.dot(q_odd, c_odd.T, tl.dot(q_even, c_even.T))  # [BLOCK_Q, BLOCK_K]
            s_r = tl.dot(q_r, r.to(q_r.dtype).T)
            of_c, of_r = load_both_scales(scales, page, only, at)
            s = (s * of_c[None, :] + s_r * of_r[None, :]) * units[:, None]
        else:
            s = tl.dot(q_c, c.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
            s = tl.dot(q_r, r.T, s, input_precision="ieee")
        # -- online softmax, and output: the latents again
        seen = keys[None, :] <= position[:, None]
        if EIGHT:
            p, alpha, m, l = weighted_softmax(s, m, l, scale_log2, of_c, seen)
            p = p.to(c_odd.dtype)
            even = tl.dot(p, c_even, even * alpha[:, None])
            odd = tl.dot(p, c_odd, odd * alpha[:, None])
        else:
            p, alpha, m, l = online_softmax(s, m, l, scale_log2, seen, True)
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(c.dtype), c, acc, input_precision="ieee")
        page = next_page

    if EIGHT:
        acc = tl.join(even, odd).reshape(BLOCK_Q, BLOCK_C)
    l_safe = tl.where(l == 0.0, 1.0, l)  # no key seen: O = 0 and L = -inf
    written = ((b * H + heads).to(tl.int64) * T_q + i) * splits + split  # [BLOCK_Q]
    acc = tl.div_rn(acc, l_safe[:, None]).to(o.dtype.element_ty)
    inside = own & (cols < d_c)[None, :]
    tl.store(o + written[:, None] * d_c + cols[None, :], acc, mask=inside)
    tl.store(lse + written, log_sum_exp(m, l), mask=row < H * T_q)


# 64 queries of 512 columns take half of the registers of a multiprocessor, and the tile
# of queries with two blocks of rows most of its shared memory. The rows compile nearly
# without spills, in eight bits with some; they were not timed. On sm_100 the first one
# would take more shared memory than there is, on sm_75 every tile would.
CONFIGURATIONS = (
    Configuration((90,), 16, 512, 64, 64, 8, 2, False, 222_000),
    Configuration((80,), 16, 512, 64, 32, 8, 2, False, 124_000),
    Configuration((86, 89, 100, 120), 16, 512, 16, 32, 4, 2, False, 66_000),
    Configuration(tables.TENSOR_CORES, 32, 512, 16, 16, 8, 1, False, 75_000),
    Configuration((90,), 8, 512, 64, 64, 8, 2, False, 185_000),
    Configuration((89, 100, 120), 8, 512, 16, 32, 4, 2, False, 66_000),
)


def configuration(cache, d_c):
    """The row of the table for a cache; BLOCK_Q is the largest tile of queries."""
    if INTERPRETED:
        return tables.INTERPRETER
    bits, _, *device, _ = tables.problem((cache,))
    columns = padded(d_c)
    return tables.fitting("latent", CONFIGURATIONS, bits, columns, *device, False, None)


def tile_rows(config, rows):
    """The queries of a tile, where a sequence has this many in all heads."""
    return min(config.BLOCK_Q, padded(rows))


def choose_splits(q, capacity, config):
    """The number of splits for q ``[B, H, T_q, d_c + d_r]`` and a cache that holds up
    to ``capacity`` rows of a sequence: the host does not know the lengths. A program
    takes most of the shared memory of a multiprocessor, which runs one at a time.
    """
    if INTERPRETED:
        return 1
    B, H, T_q, _ = q.shape
    tiles = B * triton.cdiv(H * T_q, tile_rows(config, H * T_q))
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    return busiest(tiles, triton.cdiv(capacity, config.BLOCK_K), processors)


@plans.planned
def launch_splits(q, cache, block_table, seq_lens, o, lse, scale, config, scales=None):
    """Launch one program for each tile of queries and split; q ``[B, H, T_q, d_c +
    d_r]``, cache ``[B, T_max, d_c + d_r]`` or pages, scale >= 0, scales of a cache in
    eight bits.

    o ``[B, H, T_q, splits, d_c]`` and lse ``[B, H, T_q, splits]`` are contiguous; one
    split needs no dimension.
    """
    (B, H, T_q, width), d_c = q.shape, o.shape[-1]
    BLOCK_Q, splits = tile_rows(config, H * T_q), lse.numel() // (B * H * T_q)
    paged = block_table is not None
    table = block_table if paged else seq_lens  # not read without pages
    # A product over half of the columns has at least 16 of them.
    columns = padded(d_c if scales is None else max(d_c, 32))

    def rows(x):
        """The Rows of a tensor without heads, or None."""
        if x is not None:
            batch, row, column = x.stride()
            x = Rows(x, (batch, 0, row, column))
        return x

    plans.launch(
        latent_kernel, q, B * triton.cdiv(H * T_q, BLOCK_Q) * splits,
        *as_rows(q), rows(cache), *as_rows(table), rows(scales),
        seq_lens, o, lse, scale * LOG2_E.value, splits, H, T_q, d_c, width - d_c,
        PAGE=cache.shape[1] if paged else 0, EIGHT=scales is not None,
        TILE=Tile(BLOCK_Q, config.BLOCK_K, padded(width - d_c), columns),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@plans.planned
def forward(q, cache, seq_lens, block_table, splits, d_c, scale, scales=None):
    """``(o, lse)`` of the last T_q positions of each sequence against its cache, as
    :func:`flashlib.decode_latent` takes it: o ``[B, H, T_q, d_c]``, of latents, and lse
    ``[B, H, T_q]``, both contiguous.

    splits is 0 for the number that ``choose_splits`` returns. Nothing waits for the
    device.
    """
    dtype, seq_lens = q.dtype, seq_lens.contiguous()
    q, cache = inputs.widened(q, cache)
    if scale < 0.0:
        q, scale = -q, -scale  # the kernel takes the maximum before it scales
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    o = q.new_empty(*lse.shape, d_c)
    if not lse.numel():
        return o.to(dtype), lse
    config = configuration(cache, d_c)
    capacity = capacity_of(cache.shape[1], block_table)
    splits = splits or choose_splits(q, capacity, config)
    parts = new_parts(o, lse, splits)
    launch_splits(q, cache, block_table, seq_lens, *parts, scale, config, scales)
    if splits > 1:
        launch_merge(*parts, o, lse)
    return o.to(dtype), lse
