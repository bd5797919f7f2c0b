"""Which blocks of queries a program of Hopper's backward pass takes, in two forms: by
formula, with a causal mask or a window, or from a list, with a mask that is a function.

Chapters *Hopper*, its depth, and *Masks* (``eq-masks-kinds``). A program owns a block
of keys. The blocks of queries that see it follow each other, or they are in a list that
:func:`flashlib.kernels.tile_lists.in_order` makes. A list keeps the order of the
blocks, and each entry says whether its block needs the mask. Parts of dQ are added in
the order of the keys, first or last ones first, so the turn of a part is its rank among
those of its block of queries, by formula or in the entry. Programs of a head start in
the same order, so none waits for one that starts later, whatever the mask.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlib.kernels import score_arguments, tile_lists
from flashlib.kernels.gluon_tiles import ROWS


class Keys(NamedTuple):
    """A block of keys and the blocks of queries that see it."""

    b: Any
    h: Any  # of keys
    col: Any
    # Triton 3.6 cannot return None, so a field that a form does not have is 0.
    entries: Any  # of a list: a pointer to the first, four numbers each
    row: Any  # by formula: of the first block of queries
    blocks: Any  # of queries that see some of the keys; in a list, entries
    band: Any  # by formula: the first of them, which need a mask
    full: Any  # those after the band that see all keys; any others need a mask
    falling: Any  # 1 if dQ takes the parts of the last keys first, else 0
    upward: Any  # 1 if it begins with the first block of queries, else 0


# -- by formula


@gluon.jit
def keys_by_formula(
    number, head, falling, upward, sizes,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The Keys of a program: block ``number`` of keys, of a head of B H_kv, with the
    order that falling and upward say.
    """
    b, h, col = head // sizes.H_kv, head % sizes.H_kv, number * BLOCK_K
    T_q, T_k = sizes.T_q, sizes.T_k
    # Queries before row see no key of this block.
    row, band = 0, 0
    if CAUSAL:
        row = gl.maximum(col + T_q - T_k, 0) // BLOCK_Q * BLOCK_Q
        end = gl.minimum(col + BLOCK_K - 1 + T_q - T_k, T_q)
        band = gl.cdiv(gl.maximum(end - row, 0), BLOCK_Q)
    after = T_q  # the first query whose window begins after these keys
    if sizes.left is not None:
        after = gl.minimum(T_q, col + BLOCK_K + sizes.left + T_q - T_k)
    blocks = gl.cdiv(gl.maximum(after - row, 0), BLOCK_Q)
    # Without a mask, band stays a constant: computed bounds make the loop 5 % slower.
    full = blocks - band
    if sizes.left is not None:
        leaving = col + sizes.left + 1 + T_q - T_k  # the first that misses a key
        full = gl.maximum(gl.minimum(blocks, (leaving - row) // BLOCK_Q) - band, 0)
    return Keys(b, h, col, 0, row, blocks, band, full, falling, upward)


@gluon.jit
def block_of(n, block, GROUP, BLOCK_Q: gl.constexpr):
    """The head in its group and the first row of the n-th block of queries that a
    program takes. A program takes a block of all heads before the next block. It begins
    with the last block or, if upward, with the first.
    """
    number = n // GROUP
    if block.upward == 0:
        number = block.blocks - 1 - number
    return n % GROUP, block.row + number * BLOCK_Q


# -- from a list


class QueryBlock(NamedTuple):
    """A block of queries of the list of a program."""

    row: Any
    partial: Any  # 1 if some of its pairs are hidden
    h: Any  # its head


def with_lists(sizes, q, k, score_mod, BLOCK_Q, BLOCK_K):
    """BackwardSizes with the lists of a mask that is a function."""
    device = torch.cuda.get_device_properties(q.device)
    B, n = score_arguments.batch_and_sizes(q, k, k, None)
    lists = tile_lists.found(
        tile_lists.in_order, "hopper_gradients", q, score_mod, None, B, n, BLOCK_Q,
        BLOCK_K,
    )  # fmt: skip
    by_batch, by_head = score_mod.mask.depends
    # The bytes of a row of Q, of dO and of dQ.
    query_bytes = q.shape[3] * (2 * q.element_size() + torch.float32.itemsize)
    return sizes._replace(
        paired=None, awaited=None,
        cached=device.L2_cache_size // (BLOCK_Q * query_bytes), lists=lists,
        per_batch=int(by_batch) * lists.shape[1], per_head=int(by_head),
        width=lists.shape[3], sharing=1 if by_head else n.GROUP,
    )  # fmt: skip


@gluon.jit
def keys_by_list(number, head, falling, sizes, BLOCK_K: gl.constexpr):
    """The Keys of a program: block ``number`` of keys, of a head of B H_kv, with its
    list. If falling, the program takes the first queries first.
    """
    b, h = head // sizes.H_kv, head % sizes.H_kv
    row = (b * sizes.per_batch + h * sizes.per_head).to(gl.int64)
    row = row * gl.cdiv(sizes.T_k, BLOCK_K) + number
    entries = sizes.lists + row * sizes.width
    count = gl.load(entries)
    col = number * BLOCK_K
    return Keys(b, h, col, entries + 1, 0, count, 0, 0, falling, 0)


@gluon.jit
def entry_at(number, block):
    """A pointer to an entry of a program's list. Entries are numbered in the order in
    which the program takes them; any number beyond the last one means the last one.
    """
    number = gl.maximum(gl.minimum(number, block.blocks - 1), 0)
    if block.falling != 0:
        number = gl.maximum(block.blocks - 1 - number, 0)
    return block.entries + 4 * number


@gluon.jit
def queries_of(entry, g, block, sizes, BLOCK_Q: gl.constexpr):
    """The QueryBlock of an entry, for head g of those that share it."""
    tile = gl.load(entry)
    h = block.h * sizes.GROUP + gl.load(entry + 1) + g
    return QueryBlock(tile // 2 * BLOCK_Q, tile % 2, h)


@gluon.jit
def make_notes(SLOTS: gl.constexpr):
    """Slots for two numbers that the producer tells the consumers with a block of
    queries, since they have no registers left to read lists: twice its first row, plus
    1 if some of its pairs are hidden, and its head.
    """
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], layout)
    return rows, gl.allocate_shared_memory(gl.int32, [SLOTS, 1], layout)


@gluon.jit
def store_note(x, slots, slot):
    """Store a number, in a producer."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slots.index(slot).store(gl.full([1], x, gl.int32, layout))


@gluon.jit
def read_note(slots, slot):
    """The number that the producer has stored."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(slots.index(slot).load(layout), 0)


# -- both


@gluon.jit
def count_steps(block, sizes):
    """How many steps a program takes: one for each head and block of queries."""
    heads = sizes.GROUP
    if sizes.lists is not None:
        heads = sizes.sharing
    return heads * block.blocks


@gluon.jit
def head_in(n, sizes, block, notes):
    """The head of the queries of step n, in a consumer."""
    if notes is not None:
        h = read_note(notes[1], n % notes[1].shape[0])
    else:
        h = block.h * sizes.GROUP + n % sizes.GROUP
    return h


@gluon.jit
def row_in(n, i, half: gl.constexpr, notes):
    """The first query of this half of step n, in a consumer, and the first note of the
    step. Without notes these are i and 0.
    """
    tile = 0
    if notes is not None:
        tile = read_note(notes[0], n % notes[0].shape[0])
        i = tile // 2 + half * ROWS
    return i, tile


@gluon.jit
def without_hidden(p, row, col, b, h, sizes, rule, CAUSAL: gl.constexpr):
    """The weights p [ROWS, QUERIES] of the keys from col on and of the queries of head
    h from row on, 0 where the mask hides a key.
    """
    QUERIES: gl.constexpr = p.shape[1]
    j = col + gl.arange(0, ROWS, gl.SliceLayout(1, p.type.layout))  # [ROWS]
    i = row + gl.arange(0, QUERIES, gl.SliceLayout(0, p.type.layout))  # [QUERIES]
    position = (i + (sizes.T_k - sizes.T_q))[None, :]  # [1, QUERIES]
    key = j[:, None]  # [ROWS, 1]
    seen = rule[0](b, h, position, key, *rule[1]) & (key < sizes.T_k)
    if CAUSAL:
        seen = seen & (key <= position)
    return gl.where(seen, p, 0.0)  # [ROWS, QUERIES]
