"""Decoding: a few queries against a long cache, in splits that are merged
(Flash-Decoding).

Chapter *Decoding*; Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context
inference" (2023); pages after Kwon et al., "Efficient memory management for large
language model serving with PagedAttention" (SOSP 2023). The queries of all heads that
share a head of keys, T_q of each, are the rows of one tile, so that a cache is read
once. A program takes one such tile through one split of the keys of its sequence and
writes its (O, L); where there are several splits, a second kernel merges them by the
law of softmax in pieces, ``eq-online-lse-merge``.

A contiguous cache is read as one whose sequence b has the single page b. Of a cache in
eight bits, each key and each value has a scale.

A mask and a score are functions of the positions of queries and keys in their sequence,
as in :mod:`flashlib.kernels.scores`; keys that a mask hides are read all the same. A
sink a is merged once, as one more part of a row, with O = 0 and L = a.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels import INTERPRETED, inputs, padded, tables
from flashlib.kernels.cached import (
    capacity_of,
    find_page,
    in_pairs,
    load_pairs,
    load_rows,
    load_scales,
    nearest,
)
from flashlib.kernels.eight_bits import (
    in_units,
    split_pairs,
    units_of,
    weighted_softmax,
)
from flashlib.kernels.score_arguments import for_kernel
from flashlib.kernels.tables import TENSOR_CORES, Configuration
from flashlib.kernels.tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
    Tile,
    as_rows,
    log_sum_exp,
    online_softmax,
    pointers,
    with_sink,
)
from flashlib.plain_checks import UNLIMITED


class Changes(NamedTuple):
    """What a call changes: a MaskOf, a FunctionOf and the tensor of sinks ``[H]``,
    contiguous, each None where there is none. A kernel gets the Rules of the first two.
    """

    mask: Any = None
    function: Any = None
    sinks: Any = None


UNCHANGED = Changes()


@triton.jit(do_not_specialize=["splits", "LEFT", "T_q"])
def split_kernel(
    q, k, v, table, scales, seq_lens, o, lse, scale_log2, changes, LEFT, splits, H,
    GROUP, T_q, d, d_v, PAGE: tl.constexpr, WINDOW: tl.constexpr, EIGHT: tl.constexpr,
    PAIRS: tl.constexpr, FUNCTION: tl.constexpr, MASK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One program writes O and L of one tile of queries against one split of the keys
    of their sequence.

    q, k, v and table are Rows; o [B, H, T_q, splits, d_v] and lse [B, H, T_q, splits]
    are contiguous. scales: Rows of those of k and v, if they are in EIGHT bits; values
    are then read in PAIRS of columns, if memory allows it. changes: Rules of a mask and
    a score, and sinks.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    tiles = tl.cdiv(GROUP * T_q, BLOCK_Q)
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits % tiles
    head = tl.program_id(0) // splits // tiles  # of keys
    b, h = head // (H // GROUP), head % (H // GROUP)

    # The rows of the tile: query i of each head of the group, one head after the other.
    r = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    heads, i = h * GROUP + r // T_q, r % T_q  # [BLOCK_Q] both
    cols = tl.arange(0, TILE.BLOCK_D)
    inside = (r < GROUP * T_q)[:, None] & (cols < d)[None, :]
    q_tile = tl.load(pointers(q, b, heads, i, cols), mask=inside, other=0.0)
    if EIGHT:
        units = units_of(tl.max(tl.abs(q_tile.to(tl.float32)), 1))
        q_tile = in_units(q_tile, units)
        scale_log2 *= units[:, None]  # [BLOCK_Q, 1]

    # The split: whole blocks, as many as in every other one, from the first with a key
    # that a query sees on.
    length = tl.load(seq_lens + b)
    oldest, first = None, 0
    if WINDOW:
        oldest = tl.maximum(length - T_q - LEFT, 0)
        first = oldest // BLOCK_K * BLOCK_K
    share = tl.cdiv(tl.cdiv(length - first, BLOCK_K), splits) * BLOCK_K
    start = first + share * split
    stop = tl.minimum(start + share, length)

    position = length - T_q + i  # [BLOCK_Q], of each query
    m = tl.full([BLOCK_Q], LOWEST, tl.float32)  # in base 2
    l = tl.zeros([BLOCK_Q], tl.float32)
    if PAIRS:
        even = tl.zeros([BLOCK_Q, BLOCK_DV // 2], tl.float32)  # columns of acc
        odd = tl.zeros([BLOCK_Q, BLOCK_DV // 2], tl.float32)
    else:
        acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    page = find_page(table, b, start, oldest, stop, PAGE, BLOCK_K)
    for j in tl.range(start, stop, BLOCK_K):
        keys = j + tl.arange(0, BLOCK_K)
        row = nearest(keys, oldest, stop)
        if PAGE > 0:
            row = row % PAGE
        # Read one step ahead: the keys could not be fetched before their page is known.
        next_page = find_page(table, b, j + BLOCK_K, oldest, stop, PAGE, BLOCK_K)
        # -- scores
        k_tile = load_rows(k, page, h, row, d, TILE.BLOCK_D)
        # Exact of eight bits, and no change of others.
        s = tl.dot(q_tile, k_tile.to(q_tile.dtype).T, input_precision="ieee")
        if EIGHT:
            of_k = load_scales(scales[0], page, h, row)
            s *= of_k[None, :]
        factor = scale_log2
        if FUNCTION:
            s, factor = s * (scale_log2 * LN_2), LOG2_E
            s = changes.function[0](
                s, b, heads[:, None], position[:, None], keys[None, :],
                *changes.function[1]
            )  # fmt: skip
        seen = keys[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] >= position[:, None] - LEFT)
        if MASK:
            seen &= changes.mask[0](
                b, heads[:, None], position[:, None], keys[None, :], *changes.mask[1]
            )
        # -- online softmax
        if EIGHT:
            of_v = load_scales(scales[1], page, h, row)
            p, alpha, m, l = weighted_softmax(s, m, l, factor, of_v, seen)
        else:
            p, alpha, m, l = online_softmax(s, m, l, factor, seen, True)
        # -- output
        if PAIRS:
            pairs = load_pairs(v, page, h, row, d_v, BLOCK_DV)
            v_even, v_odd = split_pairs(pairs)
            p = p.to(v_odd.dtype)
            even = tl.dot(p, v_even, even * alpha[:, None])
            odd = tl.dot(p, v_odd, odd * alpha[:, None])
        else:
            v_tile = load_rows(v, page, h, row, d_v, BLOCK_DV)
            v_tile = v_tile.to(q_tile.dtype)  # exact, too
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
        page = next_page
    if PAIRS:
        acc = tl.join(even, odd).reshape(BLOCK_Q, BLOCK_DV)

    if changes.sinks is not None:  # of the only split
        sink = tl.load(changes.sinks + heads, mask=r < GROUP * T_q, other=0.0)
        m, l, alpha = with_sink(m, l, sink)
        acc = acc * alpha[:, None]
    l_safe = tl.where(l == 0.0, 1.0, l)  # no key seen: O = 0 and L = -inf
    written = ((b * H + heads).to(tl.int64) * T_q + i) * splits + split  # [BLOCK_Q]
    cols = tl.arange(0, BLOCK_DV)
    inside = (r < GROUP * T_q)[:, None] & (cols < d_v)[None, :]
    acc = tl.div_rn(acc, l_safe[:, None]).to(o.dtype.element_ty)
    tl.store(o + written[:, None] * d_v + cols[None, :], acc, mask=inside)
    tl.store(lse + written, log_sum_exp(m, l), mask=r < GROUP * T_q)


@triton.jit(do_not_specialize=["splits", "T_q"])
def merge_kernel(
    o_parts, lse_parts, o, lse, sinks, H, T_q, splits, d_v,
    SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """One program merges COLUMNS columns of the parts of one query: o_parts [B, H, T_q,
    splits, d_v] and lse_parts [B, H, T_q, splits], and the sink of its head if there
    are sinks, into o [B, H, T_q, d_v] and lse [B, H, T_q], all contiguous.
    """
    SHARES: tl.constexpr = BLOCK_DV // COLUMNS  # programs of a query
    query = (tl.program_id(0) // SHARES).to(tl.int64)
    first = tl.program_id(0) % SHARES * COLUMNS
    n = tl.arange(0, SPLITS)
    cols = first + tl.arange(0, COLUMNS)
    part = query * splits + n
    lse_part = tl.load(lse_parts + part, mask=n < splits, other=-float("inf"))
    inside = (n < splits)[:, None] & (cols < d_v)[None, :]
    entries = o_parts + part[:, None] * d_v + cols[None, :]
    o_part = tl.load(entries, mask=inside, other=0.0)  # [SPLITS, COLUMNS]
    m = tl.max(lse_part, 0)  # natural logarithm, as L; in split_kernel m is in base 2
    if sinks is not None:  # one more part
        sink = tl.load(sinks + query // T_q % H).to(tl.float32)
        m = tl.maximum(m, sink)
    shift = tl.where(m == -float("inf"), 0.0, m)  # no key in any part: avoid NaN
    weight = tl.exp2((lse_part - shift) * LOG2_E)  # [SPLITS]
    l = tl.sum(weight, 0)
    if sinks is not None:
        l += tl.exp2((sink - shift) * LOG2_E)
    l_safe = tl.where(l == 0.0, 1.0, l)
    merged = tl.div_rn(tl.sum(weight[:, None] * o_part, 0), l_safe)  # [COLUMNS]
    tl.store(o + query * d_v + cols, merged.to(o.dtype.element_ty), mask=cols < d_v)
    tl.store(lse + query, m + tl.log2(l_safe) * LN_2, mask=first == 0)


E4M3_ARCHITECTURES = (89, 90, 100, 120)  # that have the type
# On Hopper a block of keys takes 16 KiB, and a block of values too. A program holds two
# of each, and three programs share a multiprocessor: this was among the fastest of a
# sweep on an H200 for one sequence of 16k and of 256k keys (tensor descriptors gained
# nothing). The others compile without spills and fit 99 KiB of shared memory.
CONFIGURATIONS = (
    Configuration((90,), 16, 64, 64, 128, 4, 3, False, 108_000),
    Configuration((90,), 16, 128, 64, 64, 4, 3, False, 115_000),
    Configuration((90,), 16, 256, 32, 32, 4, 3, False, 85_000),
    Configuration(TENSOR_CORES, 16, 128, 64, 32, 4, 3, False, 101_000),
    Configuration(TENSOR_CORES, 16, 256, 32, 32, 4, 2, False, 101_000),
    *tables.FORWARD_NO_TENSOR_CORES,
    # Half of the bytes and of the warps of a block in 16 bits, as measured on Hopper.
    Configuration((90,), 8, 128, 32, 64, 2, 3, False, 60_000),
    Configuration((90,), 8, 256, 32, 32, 2, 3, False, 60_000),
    *(
        Configuration(E4M3_ARCHITECTURES, 8, d, *tile, False, 101_000)
        for d, tile in ((128, (64, 64, 4, 3)), (256, (32, 32, 4, 3)))
    ),
)
# {bits: (programs that a multiprocessor runs at a time, for one query on Hopper, and
# those that saturate the memory of an H200)}. In eight bits a byte costs twice the
# instructions, so two programs do not keep up with the memory.
PROGRAMS = {16: (3, 2), 8: (4, 4)}
BUSY = 0.95  # of the bandwidth that the best number of splits draws
LARGEST_SPLITS = 128  # whose parts the merge holds in registers
# The numbers that a program of the merge loads, all at once, and its fewest columns,
# 128 bytes of a row. 16 queries of 512 columns in 128 parts took an H200 19 us with one
# program each, which had more numbers than registers, and 3 us with 16 each.
MERGED, LEAST_COLUMNS = 4096, 32


def configuration(k, v):
    """The row of the table for a cache; BLOCK_Q is the largest tile of queries."""
    return tables.configuration("decoding", CONFIGURATIONS, (k, v), None)


def busiest(tiles, blocks, slots, enough=None):
    """The number of splits for this many tiles of queries, each against at most
    ``blocks`` blocks of keys, on a device that runs ``slots`` programs at a time and
    whose bandwidth ``enough`` of them saturate (default: all).

    Programs run in waves. A last wave with fewer than ``enough`` programs takes as long
    as one that has them, since each program waits for its own reads, longest where it
    must find a page first: on an H200, 512 programs in waves of 396 and 116 took a
    tenth longer than 1024 in waves of 792 and 232, with pages nearly a fifth. The
    result is the smallest number, up to one split per block, that draws nearly as much
    bandwidth as any other.
    """
    enough = slots if enough is None else enough

    def drawn(splits):
        programs = tiles * splits
        last = programs % slots
        return programs / (programs - last + (max(last, enough) if last else 0))

    allowed = range(1, max(1, min(LARGEST_SPLITS, blocks)) + 1)
    best = max(map(drawn, allowed))
    return next(splits for splits in allowed if drawn(splits) >= BUSY * best)


def choose_splits(q, k, capacity, config):
    """The number of splits for q ``[B, H, T_q, d]`` and a cache k of H_kv heads that
    holds up to ``capacity`` keys of a sequence: the host does not know the lengths.
    """
    if INTERPRETED:
        return 1
    (B, H, T_q, _), H_kv = q.shape, k.shape[1]
    rows = H // H_kv * T_q
    tiles = B * H_kv * triton.cdiv(rows, min(config.BLOCK_Q, padded(rows)))
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    blocks = triton.cdiv(capacity, config.BLOCK_K)
    programs, enough = PROGRAMS.get(config.bits, PROGRAMS[16])
    return busiest(tiles, blocks, programs * processors, enough * processors)


@plans.planned
def launch_splits(
    q, k, v, block_table, seq_lens, o, lse, left, scale, config, changes=UNCHANGED,
    scales=(None, None),
):  # fmt: skip
    """Launch one program for each tile of queries and split; scale >= 0, left
    UNLIMITED for no window, scales of k and v in eight bits, or two None.

    o ``[B, H, T_q, splits, d_v]`` and lse ``[B, H, T_q, splits]`` are contiguous; one
    split needs no dimension. Only the sinks of one split are counted here.
    """
    (B, H, T_q, d), H_kv, d_v = q.shape, k.shape[1], v.shape[3]
    rows, paged = H // H_kv * T_q, block_table is not None
    BLOCK_Q, splits = min(config.BLOCK_Q, padded(rows)), lse.numel() // (B * H * T_q)
    table = block_table if paged else seq_lens  # not read without pages
    mask, function, sinks = changes
    stages = config.num_stages
    if function is not None and function.gathers:
        stages = 1  # as score_arguments.compiled_for
    sinks = sinks if splits == 1 else None
    changes = Changes(for_kernel(mask), for_kernel(function), sinks)
    eight_bits = scales[0] is not None
    plans.launch(
        split_kernel, q, B * H_kv * triton.cdiv(rows, BLOCK_Q) * splits,
        *as_rows(q, k, v, table), tuple(as_rows(*scales)) if eight_bits else None,
        seq_lens, o, lse, scale * LOG2_E.value, changes, left, splits, H, H // H_kv,
        T_q, d, d_v,
        PAGE=k.shape[2] if paged else 0, WINDOW=left < UNLIMITED, EIGHT=eight_bits,
        PAIRS=eight_bits and in_pairs(v),
        FUNCTION=function is not None, MASK=mask is not None,
        TILE=Tile(BLOCK_Q, config.BLOCK_K, padded(d), tables.value_columns(d, d_v)),
        num_warps=config.num_warps, num_stages=stages,
    )  # fmt: skip


def new_parts(o, lse, splits):
    """What launch_splits fills: o and lse themselves with one split, and otherwise new
    parts of both in float32, ``[B, H, T_q, splits, d_v]`` and ``[B, H, T_q, splits]``.
    """
    if splits == 1:
        return o, lse
    shape = *lse.shape, splits
    return lse.new_empty(*shape, o.shape[3]), lse.new_empty(shape)


@plans.planned
def launch_merge(o_parts, lse_parts, o, lse, sinks=None):
    """Launch the merge of o_parts ``[B, H, T_q, splits, d_v]``, lse_parts ``[B, H, T_q,
    splits]`` and sinks ``[H]`` or None into o and lse, without the splits; all
    contiguous.
    """
    _, H, T_q, splits, d_v = o_parts.shape
    SPLITS, BLOCK_DV = triton.next_power_of_2(splits), padded(d_v)
    COLUMNS = min(BLOCK_DV, max(MERGED // SPLITS, LEAST_COLUMNS))
    plans.launch(
        merge_kernel, o, lse.numel() * BLOCK_DV // COLUMNS, o_parts, lse_parts, o, lse,
        sinks, H, T_q, splits, d_v, SPLITS=SPLITS, BLOCK_DV=BLOCK_DV, COLUMNS=COLUMNS,
    )  # fmt: skip


@plans.planned
def forward(
    q, k_cache, v_cache, seq_lens, block_table, splits, left, scale, changes=UNCHANGED,
    scales=(None, None),
):  # fmt: skip
    """``(o, lse)``, as :mod:`flashlib.kernels` says, of the last T_q positions of each
    sequence against its cache, as :func:`flashlib.decode` takes it; o is contiguous.

    splits is 0 for the number that ``choose_splits`` returns, left UNLIMITED for no
    window. Nothing waits for the device.
    """
    dtype = q.dtype
    seq_lens = seq_lens.contiguous()
    q, k, v, scale, o, lse = inputs.forward_tensors(q, k_cache, v_cache, scale)
    if not o.is_contiguous():
        o = o.new_empty(o.shape)
    if not lse.numel():
        return o.to(dtype), lse
    config = configuration(k, v)
    capacity = capacity_of(k.shape[2], block_table)
    if left >= capacity:
        left = UNLIMITED  # a window that no sequence outgrows
    splits = splits or choose_splits(q, k, capacity, config)
    o_parts, lse_parts = new_parts(o, lse, splits)
    launch_splits(
        q, k, v, block_table, seq_lens, o_parts, lse_parts, left, scale, config,
        changes, scales,
    )  # fmt: skip
    if splits > 1:
        launch_merge(o_parts, lse_parts, o, lse, changes.sinks)
    return o.to(dtype), lse
