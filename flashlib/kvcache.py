"""Keys and values of many sequences in one pool of pages, as PagedAttention keeps them
(chapter *Decoding*).

    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    cache = PagedKVCache(pages=64, page_size=16, H_kv=8, d=128, **kind)
    prompt = cache.new()
    cache.append(prompt, k, v)           # k [H_kv, T, d], v [H_kv, T, d_v]
    other = cache.fork(prompt)           # shares every page
    cache.append(other, k_next, v_next)  # copies the page that both would write to
    block_table, seq_lens = cache.batch([prompt, other])
    pages = cache.k_pages, cache.v_pages
    flashlib.decode(q, *pages, seq_lens=seq_lens, block_table=block_table)

The pool (:class:`flashlib.paging.PagePool`) is Python on the host; keys and values are
two tensors on the device. A page holds the keys, and in the same place of the second
tensor the values, of page_size positions for all heads.
"""

import itertools
from typing import NamedTuple

import torch

from flashlib import checks, paging


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than a call needs; the call has changed nothing,
    since ``PagePool`` counts them first.

    ``asked`` and ``free`` are the numbers of pages.
    """

    def __init__(self, asked, free):
        super().__init__(f"PagedKVCache: asked for {asked} pages, {free} are free")
        self.asked, self.free = asked, free


class Statistics(NamedTuple):
    """How the pool is used; counts of pages unless they say otherwise.

    pages   all of them
    free    held by no sequence
    shared  held by two sequences or more
    listed  entries of the block tables of all sequences: a page counts once for each
            sequence that holds it
    keys    positions that are filled, each page counted once
    wasted  positions of held pages that no sequence has filled: at most page_size - 1
            for each sequence
    jumps   places of the block tables where the next page does not follow in memory
    """

    pages: int
    free: int
    shared: int
    listed: int
    keys: int
    wasted: int
    jumps: int


def in_eight_bits(rows):
    """Return ``(numbers, scales)``: rows ``[..., d]`` in E4M3, and a float32 scale
    ``[...]`` for each (``eq-fp8-scale``).
    """
    rows = rows.float()
    most = rows.abs().amax(dim=-1)
    scales = torch.where(most > 0.0, most / 448.0, 1.0)
    return (rows / scales[..., None]).to(checks.EIGHT_BITS), scales


class PagedKVCache:
    """A pool of pages for the keys and values of sequences that grow, share and end.

    Parameters
    ----------
    pages : int
        Number of pages.
    page_size : int
        Positions in a page: 16, 32, 64, 128 or 256.
    H_kv, d, d_v : int
        Heads, and head dimensions of the keys and of the values; d_v None means d.
    dtype, device
        Device and dtype of the pages; dtype is float32, float16, bfloat16 or, except on
        GPUs before compute capability 8.9, float8_e4m3fn.

    Notes
    -----
    ``k_pages`` is ``[pages, H_kv, page_size, d]`` and ``v_pages`` ``[pages, H_kv,
    page_size, d_v]``: the part of a page that one head reads is contiguous, page_size d
    numbers, and the dimensions match those of a contiguous cache, with pages in place
    of sequences.

    In eight bits (chapter *Eight bits*) each key and each value of a head has a scale,
    so that its largest number is the largest of the type, 448: ``k_scales`` and
    ``v_scales`` are ``[pages, H_kv, page_size]`` in float32, otherwise None. What a row
    holds does not depend on the rows that were written before or after it.

    ``pool`` is the :class:`flashlib.paging.PagePool`. Change it only
    through the cache, which writes and copies the rows as well.

    Raises TypeError or ValueError naming the argument; the methods raise ValueError for
    a sequence that does not exist.
    """

    def __init__(
        self, pages, page_size, H_kv, d, d_v=None, *, dtype=torch.float32, device="cpu"
    ):
        d_v = d if d_v is None else d_v
        checks.check_pool(pages, page_size, H_kv, d, d_v, dtype, device)
        self.page_size, self.pool = page_size, paging.PagePool(pages, page_size)
        with torch.inference_mode(False):  # so that they can be written outside of it
            self.k_pages, self.v_pages = (
                torch.zeros(pages, H_kv, page_size, width, dtype=dtype, device=device)
                for width in (d, d_v)
            )
            self.k_scales = self.v_scales = None
            if dtype == checks.EIGHT_BITS:
                kind = {"dtype": torch.float32, "device": device}
                self.k_scales, self.v_scales = torch.zeros(
                    2, pages, H_kv, page_size, **kind
                )
        self._names = itertools.count()

    def new(self):
        """Start an empty sequence and return its name, an integer used only once."""
        name = next(self._names)
        self.pool.new(name)
        return name

    def fork(self, sequence):
        """Start a sequence with the contents of another one, whose pages it shares;
        return its name.

        Nothing is copied: the first of the two that writes to a shared page gets a copy
        of its own.
        """
        self.pool.length(sequence)  # raises before a name is taken
        name = next(self._names)
        self.pool.fork(sequence, name)
        return name

    def free(self, sequence):
        """End a sequence; the pages that no other one holds become free."""
        self.pool.free(sequence)

    def append(self, sequence, k, v):
        """Write the keys k ``[H_kv, T, d]`` and values v ``[H_kv, T, d_v]`` of T
        positions after the last one. See :meth:`write`.
        """
        self.write(sequence, self.length(sequence), k, v)

    def write(self, sequence, start, k, v):
        """Write the keys k ``[H_kv, T, d]`` and values v ``[H_kv, T, d_v]`` at
        positions start .. start + T - 1, overwriting existing positions or appending
        new ones; start is at most the length of the sequence. k and v may be views of
        the pages; for pages in eight bits they are float32, float16 or bfloat16.

        Pages that other sequences hold too are copied first. Raises OutOfPages if the
        pool has too few pages; TypeError or ValueError naming the argument. A write
        that is refused changes nothing.
        """
        checks.check_rows(k, v, self.k_pages, self.v_pages)
        k, v = self._apart(k), self._apart(v)
        try:
            copied = self.pool.write(sequence, start, k.shape[1])
        except paging.NoRoom as error:
            raise OutOfPages(error.asked, error.free) from None
        table, stop = self.table(sequence), start + k.shape[1]
        pages, written = [self.k_pages, self.v_pages], [k, v]
        if self.k_scales is not None:
            pages += [self.k_scales, self.v_scales]
            written = [*zip(*map(in_eight_bits, written), strict=True)]
            written = [*written[0], *written[1]]
        for x, rows in zip(pages, written, strict=True):
            for old, new in copied:
                x[new] = x[old]
            for first in range(start - start % self.page_size, stop, self.page_size):
                begin, end = max(start, first), min(stop, first + self.page_size)
                page = x[table[first // self.page_size]]  # [H_kv, page_size, d]
                new = rows[:, begin - start : end - start]
                page[:, begin - first : end - first] = new

    def _apart(self, rows):
        """The rows without their history, in memory of their own: they may be views of
        pages, which a write changes page by page.
        """
        place = rows.untyped_storage().data_ptr()
        own = {x.untyped_storage().data_ptr() for x in (self.k_pages, self.v_pages)}
        return rows.detach().clone() if place in own else rows.detach()

    def length(self, sequence):
        """Return the number of positions in a sequence."""
        return self.pool.length(sequence)

    def table(self, sequence):
        """Return the pages of a sequence, in order, as a tuple."""
        return self.pool.table(sequence)

    def batch(self, sequences):
        """Return what :func:`flashlib.decode` needs for some sequences, ``(block_table,
        seq_lens)``: int32 on the device, ``[B, max_pages]`` and ``[B]``; max_pages is
        at least 1, and entries after the last page of a sequence are -1.
        """
        sequences = list(sequences)
        tables = [self.table(sequence) for sequence in sequences]
        width = max(map(len, tables), default=0) or 1
        rows = [[*table, *[-1] * (width - len(table))] for table in tables]
        lengths = [self.length(sequence) for sequence in sequences]
        integers = {"dtype": torch.int32, "device": self.k_pages.device}
        block_table = torch.tensor(rows, **integers).reshape(len(rows), width)
        return block_table, torch.tensor(lengths, **integers)

    def statistics(self):
        """Return how the pool is used, as a :class:`Statistics`."""
        pool = self.pool
        tables = [pool.table(name) for name in pool.names]
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, tables))
        return Statistics(
            pages=pool.pages,
            free=pool.free_pages,
            shared=sum(count > 1 for count in pool.references),
            listed=sum(map(len, tables)),
            keys=pool.held_rows,
            wasted=pool.slots - pool.free_slots - pool.held_rows,
            jumps=sum(b != a + 1 for a, b in pairs),
        )
