"""How kernels read a cache of sequences, contiguous or in pages (chapter *Decoding*).

A cache is the Rows of a tensor [B, H, T, d], or [pages, H, page_size, d]: a contiguous
one is read as if sequence b had the single page b.
"""

import triton
import triton.language as tl

from flashlib.kernels.tiles import pointers, row_pointers


def capacity_of(rows, block_table):
    """How many keys of a sequence a cache holds, with this many rows for each sequence,
    or in each page of a table.
    """
    return rows * (1 if block_table is None else block_table.shape[1])


def in_pairs(x):
    """Whether the columns of a cache ``[B, H, T, d]`` can be read in pairs."""
    numbers = *x.stride()[:3], x.shape[3], x.data_ptr()
    return x.stride(3) == 1 and not any(n % 2 for n in numbers)


@triton.jit
def nearest(keys, oldest, length):
    """These keys of a sequence, with its last one in place of those after the end, and
    in a window the oldest that a query sees in place of those before it, so that all
    rows may be read: the others may have NaN, which survives a weight of 0.
    """
    keys = tl.minimum(keys, length - 1)
    if oldest is not None:
        keys = tl.maximum(keys, oldest)
    return keys


@triton.jit
def load_rows(x, page, h, row, d, COLS: tl.constexpr):
    """Rows [BLOCK_K, COLS] of head h of a cache: row is [BLOCK_K], page too, or one for
    all of them.
    """
    cols = tl.arange(0, COLS)
    rows = pointers(x, page, h, row, cols)
    return tl.load(rows, mask=(cols < d)[None, :], other=0.0)


@triton.jit
def load_pairs(x, page, h, row, d, COLS: tl.constexpr):
    """What load_rows reads of a cache in 8 bits, two neighboring columns as a number of
    16 bits: [BLOCK_K, COLS / 2].

    Tensor cores then get a tile of values by the same loads as in 16 bits; single bytes
    would be loaded one by one. ``in_pairs`` says which caches can be read like this.
    """
    cols = tl.arange(0, COLS // 2)
    starts = row_pointers(x, page, h, row).to(tl.pointer_type(tl.int16))
    rows = starts[:, None] + cols[None, :]
    return tl.load(rows, mask=(cols < d // 2)[None, :], other=0)


@triton.jit
def load_scales(x, page, h, row):
    """The scales [BLOCK_K] of the rows that load_rows reads."""
    return tl.load(row_pointers(x, page, h, row))


@triton.jit
def find_page(table, b, j, oldest, length, PAGE: tl.constexpr, BLOCK_K: tl.constexpr):
    """The page of the keys from j on: one for all of them, or [BLOCK_K] pages. If j is
    below `length`, a query sees some key of the block.
    """
    if PAGE == 0:
        page = b
    else:
        entries = table.ptr + b.to(tl.int64) * table.strides[0]
        # Entries of pages in which no query sees a key are not read.
        if PAGE >= BLOCK_K:
            entries += j // PAGE * table.strides[1]  # [1]
        else:
            keys = nearest(j + tl.arange(0, BLOCK_K), oldest, length)
            entries += keys // PAGE * table.strides[1]  # [BLOCK_K]
        page = tl.load(entries, mask=j < length, other=0)
    return page
