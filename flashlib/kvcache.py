"""Keys and values of many sequences in one pool of pages, as PagedAttention keeps them
(chapter *Decoding*), or the latents of which they are projections (chapter *Latent
attention*).

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
tensor the values, of page_size positions for all heads. :class:`PagedLatentCache` has
one tensor.
"""

import itertools
from typing import NamedTuple

import torch

from flashlib import cache_checks, paging


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than a call needs; the call has changed nothing,
    since ``PagePool`` counts them first.

    ``asked`` and ``free`` are the numbers of pages; cache is the name of its class.
    """

    def __init__(self, asked, free, cache="PagedKVCache"):
        super().__init__(f"{cache}: asked for {asked} pages, {free} are free")
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
    ``[...]`` for each, under which its largest number becomes 448; 1 where no float32
    is as small.
    """
    rows = rows.float()
    most = rows.abs().amax(dim=-1)
    # By a tensor: to divide by a number, PyTorch multiplies by its rounded inverse on a
    # GPU.
    scales = most / torch.full_like(most, 448.0)
    scales = torch.where(scales > 0.0, scales, 1.0)
    return (rows / scales[..., None]).to(cache_checks.EIGHT_BITS), scales


class _PagedCache:
    """What caches have in common: sequences that share a pool, and tensors of pages
    ``[pages, ..., page_size, columns]``.
    """

    def _allocate(self, pages, page_size, *kinds, device):
        """The pool, and a tensor of zeros for the shape and the dtype of each kind of
        page.
        """
        self.page_size, self.pool = page_size, paging.PagePool(pages, page_size)
        self._names = itertools.count()
        with torch.inference_mode(False):  # so that they can be written outside of it
            self._tensors = [
                torch.zeros(pages, *shape, dtype=dtype, device=device)
                for shape, dtype in kinds
            ]
        return self._tensors

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

    def require_pages(self, sequences, T):
        """Raise OutOfPages unless T positions can be appended to each of these
        different sequences.
        """
        asked, free = self.pool.pages_to_append(sequences, T), self.pool.free_pages
        if asked > free:
            raise OutOfPages(asked, free, type(self).__name__)

    def _write(self, sequence, start, *written):
        """Write rows ``[..., T, columns]``, one tensor for each tensor of pages, which
        they may be views of.
        """
        written, T = [self._apart(rows) for rows in written], written[0].shape[-2]
        try:
            copied = self.pool.write(sequence, start, T)
        except paging.NoRoom as error:
            name = type(self).__name__
            raise OutOfPages(error.asked, error.free, name) from None
        table, stop = self.table(sequence), start + T
        for x, rows in zip(self._tensors, written, strict=True):
            for old, new in copied:
                x[new] = x[old]
            for first in range(start - start % self.page_size, stop, self.page_size):
                begin, end = max(start, first), min(stop, first + self.page_size)
                page = x[table[first // self.page_size]]  # [..., page_size, columns]
                new = rows[..., begin - start : end - start, :]
                page[..., begin - first : end - first, :] = new

    def _apart(self, rows):
        """The rows without their history, in memory of their own: they may be views of
        pages, which a write changes page by page.
        """
        place = rows.untyped_storage().data_ptr()
        own = {x.untyped_storage().data_ptr() for x in self._tensors}
        return rows.detach().clone() if place in own else rows.detach()

    def length(self, sequence):
        """Return the number of positions in a sequence."""
        return self.pool.length(sequence)

    def table(self, sequence):
        """Return the pages of a sequence, in order, as a tuple."""
        return self.pool.table(sequence)

    def batch(self, sequences):
        """Return what :func:`flashlib.decode` or :func:`flashlib.decode_latent` needs
        for some sequences, ``(block_table, seq_lens)``: int32 on the device, ``[B,
        max_pages]`` and ``[B]``; max_pages is at least 1, and entries after the last
        page of a sequence are -1.
        """
        sequences = list(sequences)
        tables = [self.table(sequence) for sequence in sequences]
        width = max(map(len, tables), default=0) or 1
        rows = [[*table, *[-1] * (width - len(table))] for table in tables]
        lengths = [self.length(sequence) for sequence in sequences]
        integers = {"dtype": torch.int32, "device": self._tensors[0].device}
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


class PagedKVCache(_PagedCache):
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

    In eight bits each key and each value of a head has a scale, so that its largest
    number is the largest of the type, 448: ``k_scales`` and ``v_scales`` are ``[pages,
    H_kv, page_size]`` in float32, otherwise None. What a row holds does not depend on
    the rows that were written before or after it.

    ``pool`` is the :class:`flashlib.paging.PagePool`. Change it only through the cache,
    which writes and copies the rows as well.

    Raises TypeError or ValueError naming the argument; the methods raise ValueError for
    a sequence that does not exist.
    """

    def __init__(
        self, pages, page_size, H_kv, d, d_v=None, *, dtype=torch.float32, device="cpu"
    ):
        d_v = d if d_v is None else d_v
        cache_checks.check_pool(pages, page_size, H_kv, d, d_v, dtype, device)
        kinds = [((H_kv, page_size, width), dtype) for width in (d, d_v)]
        if dtype == cache_checks.EIGHT_BITS:
            kinds += [((H_kv, page_size, 1), torch.float32)] * 2  # scales
        held = self._allocate(pages, page_size, *kinds, device=device)
        self.k_pages, self.v_pages, *scales = held
        self.k_scales = self.v_scales = None
        if scales:
            self.k_scales, self.v_scales = (x[..., 0] for x in scales)

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
        cache_checks.check_rows(k, v, self.k_pages, self.v_pages)
        if self.k_scales is None:
            self._write(sequence, start, k, v)
            return
        (k, of_k), (v, of_v) = in_eight_bits(k.detach()), in_eight_bits(v.detach())
        self._write(sequence, start, k, v, of_k[..., None], of_v[..., None])


class PagedLatentCache(_PagedCache):
    """A pool of pages for the latents and the rotary columns of sequences that grow,
    share and end.

    Parameters
    ----------
    pages, page_size, dtype, device :
        As in :class:`PagedKVCache`.
    d_c, d_r : int
        Columns of a latent, 8 to 512, and of its rotary part, 1 to 128.

    Notes
    -----
    ``pages`` is ``[pages, page_size, d_c + d_r]``: a row is what all heads read of a
    position, the key of each and in its first d_c columns the value of each. In eight
    bits, with even d_c and d_r, both parts of a row have a scale: ``scales`` is
    ``[pages, page_size, 2]`` in float32, otherwise None. The other methods are those of
    :class:`PagedKVCache`, as are the errors.
    """

    def __init__(
        self, pages, page_size, d_c, d_r, *, dtype=torch.float32, device="cpu"
    ):
        cache_checks.check_latent_pool(pages, page_size, d_c, d_r, dtype, device)
        kinds = [((page_size, d_c + d_r), dtype)]
        if dtype == cache_checks.EIGHT_BITS:
            kinds.append(((page_size, 2), torch.float32))
        held = self._allocate(pages, page_size, *kinds, device=device)
        self.pages, self.scales, self.d_c = held[0], (*held, None)[1], d_c

    def append(self, sequence, c, r):
        """Write the latents c ``[T, d_c]`` and rotary columns r ``[T, d_r]`` of T
        positions after the last one. See :meth:`write`.
        """
        self.write(sequence, self.length(sequence), c, r)

    def write(self, sequence, start, c, r):
        """Write c ``[T, d_c]`` and r ``[T, d_r]`` at positions start .. start + T - 1,
        as :meth:`PagedKVCache.write` does.
        """
        cache_checks.check_latents(c, r, self.pages, self.d_c)
        if self.scales is None:
            self._write(sequence, start, torch.cat([c, r], dim=1))
            return
        (c, of_c), (r, of_r) = in_eight_bits(c.detach()), in_eight_bits(r.detach())
        scales = torch.stack([of_c, of_r], dim=1)
        self._write(sequence, start, torch.cat([c, r], dim=1), scales)

    def rows(self, sequence):
        """Return copies of c ``[T, d_c]`` and r ``[T, d_r]`` of a sequence; of pages in
        eight bits, the numbers that they stand for, in float32.
        """
        table = torch.tensor(self.table(sequence), device=self.pages.device).long()
        held, *scales = (
            x[table].flatten(0, 1)[: self.length(sequence)] for x in self._tensors
        )
        parts = held[:, : self.d_c], held[:, self.d_c :]
        if scales:
            of_parts = scales[0].split(1, dim=1)
            parts = (x.float() * s for x, s in zip(parts, of_parts, strict=True))
        return tuple(parts)
