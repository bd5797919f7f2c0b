"""Which tiles of S a mask leaves: two kernels that classify and list them.

Chapter *Masks* (``eq-masks-kinds``). A mask says of every pair whether it is visible,
so a tile is of one of three kinds: no pair is visible, and no kernel reads it; all are,
and no kernel evaluates the mask; or some are. A kernel of :mod:`flashlib.kernels.masks`
that owns a block of queries walks over a list of blocks of keys, one that owns a block
of keys over a list of blocks of queries, for which rows and columns of the table change
places. Hopper's backward pass also needs to know when each block's part of dQ has its
turn: its lists keep the order of the blocks, and have the ranks of the parts.
"""

import torch
import triton
import triton.language as tl

from flashlib import plans, score_mods
from flashlib.kernels import score_arguments
from flashlib.kernels.scores import BatchHead, sees, sequence
from flashlib.plain_checks import wrong

# The arguments of lists_kernel that depend on lengths.
BY_LENGTHS = ["LISTS", "TILES", "WIDTH"]
BY_LENGTHS += [f"{x}_stride" for x in ("row", "col", "head", "group")]
# Elements of a table that a program of ordered_kernel reads at a time.
LARGEST_CHUNK = 8192
NONE, SOME, ALL = (tl.constexpr(n) for n in range(3))
SPARE = tl.constexpr(2)  # tiles beyond the end of a list that gluon_order's ADDERS read


@triton.jit(do_not_specialize=["T_q", "T_k"])
def kinds_kernel(
    kinds, change, starts, HEADS, T_q, T_k, ON: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr
):  # fmt: skip
    """One program writes the kind of one tile, kinds [B, HEADS, blocks of queries,
    blocks of keys], contiguous. Packed, T_q and T_k are the longest lengths.
    """
    blocks_q, blocks_k = tl.cdiv(T_q, BLOCK_Q), tl.cdiv(T_k, BLOCK_K)
    tile = tl.program_id(0) % (blocks_q * blocks_k)
    head = tl.program_id(0) // (blocks_q * blocks_k)
    b, h = head // HEADS, head % HEADS
    _, T_q = sequence(starts.q, b, T_q, ON.VARLEN)
    _, T_k = sequence(starts.k, b, T_k, ON.VARLEN)
    row = tile // blocks_k * BLOCK_Q
    # Rows after the last query count as that query, which does not change the kind.
    i = tl.minimum(row + tl.arange(0, BLOCK_Q), T_q - 1)[:, None]
    j = (tile % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    inside = (j < T_k) & (row < T_q)  # of a packed sequence, whole tiles may be outside
    seen = sees(i + (T_k - T_q), j, inside, BatchHead(b, h, 0.0), change, ON)
    # One sum over both dimensions: a thread adds up its own pairs before any shuffle.
    # Where a mask does not ask for the query, there is one row for all of them.
    pairs = tl.sum(seen.to(tl.int32))
    kind = (pairs > 0).to(tl.int8) + (pairs == seen.numel).to(tl.int8)
    tl.store(kinds + tl.program_id(0).to(tl.int64), kind)


@triton.jit(do_not_specialize=BY_LENGTHS)
def lists_kernel(
    kinds, lists, LISTS, TILES, row_stride, col_stride, head_stride, group_stride,
    GROUP, WIDTH, PADDED: tl.constexpr
):  # fmt: skip
    """One program writes one list: for a row of the kinds of GROUP heads, TILES each,
    how many are ALL, how many are not NONE, and the numbers of these, ALL first. The
    number of a tile is its column, plus TILES for each head before.
    """
    row, head = tl.program_id(0) % LISTS, (tl.program_id(0) // LISTS).to(tl.int64)
    kinds += head * group_stride + row.to(tl.int64) * row_stride
    lists += tl.program_id(0).to(tl.int64) * WIDTH
    cols = tl.arange(0, PADDED)
    first = kinds + cols.to(tl.int64) * col_stride
    row_kinds, full_tiles = first, 0
    for _ in tl.range(0, GROUP):
        kind = tl.load(row_kinds, mask=cols < TILES, other=0)
        full_tiles += tl.sum((kind == ALL).to(tl.int32), 0)
        row_kinds += head_stride
    row_kinds = first
    before, before_partial = 0, full_tiles
    for g in tl.range(0, GROUP):
        kind = tl.load(row_kinds, mask=cols < TILES, other=0)
        full, partial = (kind == ALL).to(tl.int32), (kind == SOME).to(tl.int32)
        slot = before + tl.cumsum(full, 0) - 1
        tl.store(lists + 2 + slot, g * TILES + cols, mask=full > 0)
        slot = before_partial + tl.cumsum(partial, 0) - 1
        tl.store(lists + 2 + slot, g * TILES + cols, mask=partial > 0)
        before += tl.sum(full, 0)
        before_partial += tl.sum(partial, 0)
        row_kinds += head_stride
    # On Hopper a program reads a tile in any case, and masks all of it. Without keys, a
    # list has no place for one.
    tl.store(lists + 2, 0, mask=(before_partial == 0) & (WIDTH > 2))
    tl.store(lists, full_tiles)
    tl.store(lists + 1, before_partial)


# Not KEYS: of a multiple of 16 the kernel reads 16 kinds at a time.
@triton.jit(do_not_specialize=["QUERIES", "WIDTH"])
def ordered_kernel(
    kinds, lists, KEYS, QUERIES, GROUP, WIDTH, PADDED: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """One program writes one list: of a block of keys, how many tiles of GROUP heads,
    QUERIES each, are not NONE, and four numbers for each of these, the last queries
    first. They are twice the number of the block of queries, plus 1 if the tile is
    SOME; its head in the group; and how many blocks of keys before this one, and after
    it, have a part in dQ of the queries.
    """
    own, head = tl.program_id(0) % KEYS, (tl.program_id(0) // KEYS).to(tl.int64)
    lists += tl.program_id(0).to(tl.int64) * WIDTH
    n = tl.arange(0, PADDED)
    i, g = QUERIES - 1 - n // GROUP, n % GROUP
    inside = n < GROUP * QUERIES
    rows = kinds + ((head * GROUP + g) * QUERIES + i) * KEYS  # [PADDED]
    kind = tl.load(rows + own, mask=inside, other=0)
    before, after = tl.zeros([PADDED], tl.int32), tl.zeros([PADDED], tl.int32)
    for col in tl.range(0, KEYS, CHUNK):
        j = col + tl.arange(0, CHUNK)[None, :]
        inside_2 = inside[:, None] & (j < KEYS)  # [PADDED, CHUNK]
        parts = tl.load(rows[:, None] + j, mask=inside_2, other=0) != NONE
        before += tl.sum((parts & (j < own)).to(tl.int32), 1)
        after += tl.sum((parts & (j > own)).to(tl.int32), 1)
    kept = (kind != NONE).to(tl.int32)
    entries = lists + 1 + 4 * (tl.cumsum(kept, 0) - 1)
    tl.store(entries, 2 * i + (kind == SOME).to(tl.int32), mask=kept > 0)
    tl.store(entries + 1, g, mask=kept > 0)
    tl.store(entries + 2, before, mask=kept > 0)
    tl.store(entries + 3, after, mask=kept > 0)
    total = tl.sum(kept, 0)
    tl.store(lists, total)
    # An adder looks up where its next part goes before it knows that there is none.
    tl.store(lists + 1 + 4 * total + tl.arange(0, 4 * SPARE), 0)


def of_queries(x, score_mod, packing, B, n, BLOCK_Q, BLOCK_K):
    """For each block of queries the list of blocks of keys that it sees: int32 ``[B or
    1, H or 1, blocks of queries, 2 + blocks of keys]``, for the Sizes n, on the device
    of x.
    """
    kinds = classified(x, score_mod, packing, B, n, BLOCK_Q, BLOCK_K)
    batches, heads, rows, cols = kinds.shape
    return lists_of_rows(
        kinds, batches * heads, 1, rows, cols, (cols, 1), (batches, heads)
    )


def of_keys(x, score_mod, packing, B, n, BLOCK_Q, BLOCK_K):
    """For each block of keys the list of blocks of queries that see it: int32 ``[B or
    1, H_kv or 1, blocks of keys, 2 + GROUP * blocks of queries]``. A head's blocks are
    numbered after those of the heads before it in its group.
    """
    kinds = classified(x, score_mod, packing, B, n, BLOCK_Q, BLOCK_K)
    batches, heads, cols, rows = kinds.shape
    groups = max(heads // n.GROUP, 1)
    sides = rows, cols, (1, rows), (batches, groups)
    return lists_of_rows(kinds, batches * groups, n.GROUP, *sides, repeated=heads == 1)


def in_order(x, score_mod, packing, B, n, BLOCK_Q, BLOCK_K):
    """For each block of keys the list of blocks of queries that see it, for Hopper's
    backward pass: int32 ``[B or 1, H_kv or 1, blocks of keys, 1 + 4 * (GROUP * blocks
    of queries + SPARE)]``, where GROUP is 1 for a mask that is the same for all heads.
    """
    kinds = classified(x, score_mod, packing, B, n, BLOCK_Q, BLOCK_K)
    batches, heads, rows, cols = kinds.shape
    group = n.GROUP if score_mod.mask.depends[1] else 1
    groups, width = heads // group, 1 + 4 * (group * rows + SPARE.value)
    lists = kinds.new_empty((batches, groups, cols, width), dtype=torch.int32)
    padded = max(triton.next_power_of_2(group * rows), 16)
    plans.launch(
        ordered_kernel, kinds, batches * groups * cols, kinds, lists, cols, rows, group,
        width, PADDED=padded, CHUNK=max(1, min(32, LARGEST_CHUNK // padded)),
    )  # fmt: skip
    return lists


def found(find, name, x, score_mod, packing, B, n, BLOCK_Q, BLOCK_K):
    """The lists of this name in score_mods.Lists that the caller made, or where that is
    None, what find, one of the three above, makes.

    Raises ValueError where those are for other tiles. Sides are powers of two, so that
    their lists have other sizes, unless the whole of S is one tile of either.
    """
    lists = getattr(score_mod.mask.lists, name)
    if lists is None:
        return find(x, score_mod, packing, B, n, BLOCK_Q, BLOCK_K)
    rows, cols = triton.cdiv(n.T_q, BLOCK_Q), triton.cdiv(n.T_k, BLOCK_K)
    made = (rows, 2 + cols) if find is of_queries else (cols, 2 + n.GROUP * rows)
    if find is in_order:
        group = n.GROUP if score_mod.mask.depends[1] else 1
        made = cols, 1 + 4 * (group * rows + SPARE.value)
    if tuple(lists.shape[2:]) != made:
        expected = "lists made for q, k and v with the strides and dtype of this call"
        got = f"lists whose sizes do not fit tiles of {BLOCK_Q} x {BLOCK_K}"
        raise wrong("mask", expected, got)
    return lists


def change_with_lists(find, name, q, k, v, score_mod, packing, config):
    """The Change of a kernel. Its mask, if there is one, has the lists of tiles that
    ``found`` returns for the tiles of a table's row.
    """
    lists = None
    if score_mod.mask is not None:
        B, n = score_arguments.batch_and_sizes(q, k, v, packing)
        sides = config.BLOCK_Q, config.BLOCK_K
        lists = found(find, name, q, score_mod, packing, B, n, *sides)
    return score_arguments.change_of(score_mod, lists)


@plans.planned
def made_once(q, k, v, mask, wanted):
    """The lists of a MaskOf, one for each (find, BLOCK_Q, BLOCK_K) that is wanted: what
    find, one of the three above, makes.
    """
    B, n = score_arguments.batch_and_sizes(q, k, v, None)
    score_mod = score_mods.ScoreMod(1.0, mask=mask)
    return tuple([find(q, score_mod, None, B, n, *sides) for find, *sides in wanted])


def classified(x, score_mod, packing, B, n, BLOCK_Q, BLOCK_K):
    """The kinds of all tiles, int8 ``[B or 1, H or 1, blocks of queries, of keys]``."""
    by_batch, by_head = score_mod.mask.depends
    batches, heads = B if by_batch or packing is not None else 1, n.H if by_head else 1
    sizes = batches, heads, triton.cdiv(n.T_q, BLOCK_Q), triton.cdiv(n.T_k, BLOCK_K)
    kinds = x.new_empty(sizes, dtype=torch.int8)
    # One kernel for all calls with this mask, whatever else they change.
    score_mod = score_mods.ScoreMod(
        1.0, score_mod.left, score_mod.right, mask=score_mod.mask
    )
    switches = score_arguments.switches_of(score_mod, packing)
    plans.launch(
        kinds_kernel, x, kinds.numel(), kinds, score_arguments.change_of(score_mod),
        score_arguments.starts_of(packing), heads, n.T_q, n.T_k, ON=switches,
        BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K, num_warps=4,
    )  # fmt: skip
    return kinds


def lists_of_rows(kinds, heads, group, rows, cols, strides, outer, repeated=False):
    """The lists of the rows of a table of kinds, ``[*outer, rows, width]``."""
    width = 2 + group * cols
    lists = kinds.new_empty((*outer, rows, width), dtype=torch.int32)
    plans.launch(
        lists_kernel, kinds, heads * rows, kinds, lists, rows, cols, *strides,
        0 if repeated else rows * cols, rows * cols * (1 if repeated else group),
        group, width,
        PADDED=max(triton.next_power_of_2(cols), 16),
    )  # fmt: skip
    return lists
