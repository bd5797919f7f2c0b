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
def in_range(keys, oldest, length):
    """Which keys are before `length` and not before the oldest one that a query sees;
    oldest is None without a window.
    """
    inside = keys < length
    if oldest is not None:
        inside = inside & (keys >= oldest)
    return inside


@triton.jit
def load_rows(x, page, h, row, keys, oldest, length, d, COLS: tl.constexpr):
    """The rows [BLOCK_K, COLS] of head h of a cache for these keys of a sequence, zeros
    for those that are not in range. row is [BLOCK_K]; page is too, or one for all keys.
    """
    cols = tl.arange(0, COLS)
    # There may be NaN before the window, and a weight of 0 times NaN is NaN.
    inside = in_range(keys, oldest, length)[:, None] & (cols < d)[None, :]
    return tl.load(pointers(x, page, h, row, cols), mask=inside, other=0.0)


@triton.jit
def load_pairs(x, page, h, row, keys, oldest, length, d, COLS: tl.constexpr):
    """What load_rows reads of a cache in 8 bits, two neighboring columns as a number of
    16 bits: [BLOCK_K, COLS / 2].

    Tensor cores then get a tile of values by the same loads as in 16 bits; single bytes
    would be loaded one by one. ``in_pairs`` says which caches can be read like this.
    """
    cols = tl.arange(0, COLS // 2)
    starts = row_pointers(x, page, h, row).to(tl.pointer_type(tl.int16))
    inside = in_range(keys, oldest, length)[:, None] & (cols < d // 2)[None, :]
    return tl.load(starts[:, None] + cols[None, :], mask=inside, other=0)


@triton.jit
def load_scales(x, page, h, row, keys, oldest, length):
    """The scales [BLOCK_K] of the rows that load_rows reads, 0 where it reads zeros."""
    inside = in_range(keys, oldest, length)
    return tl.load(row_pointers(x, page, h, row), mask=inside, other=0.0)


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
            entry = entries + j // PAGE * table.strides[1]
            page = tl.load(entry, mask=j < length, other=0)  # [1]
        else:
            keys = j + tl.arange(0, BLOCK_K)
            entries += keys // PAGE * table.strides[1]
            inside = in_range(keys, oldest, length)
            page = tl.load(entries, mask=inside, other=0)  # [BLOCK_K]
    return page
