"""Keys and values of many sequences in one pool of pages, as PagedAttention keeps them (chapter *Decoding*).

    cache = PagedKVCache(pages=64, page_size=16, H_kv=8, d=128, dtype=torch.bfloat16, device="cuda")
    prompt = cache.new()
    cache.append(prompt, k, v)                   # k [H_kv, T, d], v [H_kv, T, d_v]
    other = cache.fork(prompt)                   # shares every page
    cache.append(other, k_next, v_next)          # copies the page that both would write to
    block_table, seq_lens = cache.batch([prompt, other])
    flashlib.decode(q, cache.k_pages, cache.v_pages, seq_lens=seq_lens, block_table=block_table)

Keys and values lie on the device, the book-keeping in Python on the host. A page holds the keys, and in the
same place of a second tensor the values, of page_size positions for all heads. Only its owner may write to a
page, and it has an owner only while one sequence holds it.
"""

from typing import NamedTuple

import torch

from flashlib import checks


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than a call needs; the call has changed nothing.

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
    listed  entries of the block tables of all sequences: a page counts once for each sequence that holds it
    keys    positions that are filled, each page counted once
    wasted  positions of held pages that no sequence has filled: at most page_size - 1 for each sequence
    jumps   places of the block tables where the next page does not follow in memory
    """

    pages: int
    free: int
    shared: int
    listed: int
    keys: int
    wasted: int
    jumps: int


class _Sequence:
    def __init__(self, table=(), length=0):
        self.table, self.length = list(table), length


class PagedKVCache:
    """A pool of pages for the keys and values of sequences that grow, share and end.

    pages        how many there are
    page_size    positions of a page: 16, 32, 64, 128 or 256
    H_kv, d      heads, and head dimension of the keys; d_v, that of the values, is d where it is None
    dtype        float32, float16 or bfloat16

    ``k_pages`` is ``[pages, H_kv, page_size, d]`` and ``v_pages`` ``[pages, H_kv, page_size, d_v]``: what one
    head reads of a page lies in one piece, page_size d numbers, and the dimensions are those of a contiguous
    cache with the page in the place of the sequence.

    Raises TypeError or ValueError naming the argument.
    """

    def __init__(self, pages, page_size, H_kv, d, d_v=None, *, dtype=torch.float32, device="cpu"):
        d_v = d if d_v is None else d_v
        for name, value in (("pages", pages), ("H_kv", H_kv)):
            checks.count(name, value, least=1)
        checks.count("page_size", page_size, least=1)
        if page_size not in checks.PAGE_SIZES:
            listed = ", ".join(map(str, checks.PAGE_SIZES))
            raise ValueError(f"page_size: expected one of {listed}, got {page_size}")
        for name, value in (("d", d), ("d_v", d_v)):
            checks.head_dimension(name, value)
        checks.supported("dtype", dtype)
        self.page_size = page_size
        self.k_pages = torch.zeros(pages, H_kv, page_size, d, dtype=dtype, device=device)
        self.v_pages = torch.zeros(pages, H_kv, page_size, d_v, dtype=dtype, device=device)
        self._free = list(reversed(range(pages)))  # the next page to hand out stands last
        self._holders = [0] * pages  # sequences that hold a page
        self._sequences = {}  # {name: _Sequence}
        self._names = 0

    def new(self):
        """Start an empty sequence and return its name, an integer that is never used again."""
        return self._named(_Sequence())

    def fork(self, sequence):
        """Start a sequence with the contents of another one, whose pages it shares; return its name.

        Nothing is copied: the first of the two that writes to a shared page gets a copy of its own.
        Raises ValueError for a sequence that is not there.
        """
        parent = self._of(sequence)
        for page in parent.table:
            self._holders[page] += 1
        return self._named(_Sequence(parent.table, parent.length))

    def free(self, sequence):
        """End a sequence; the pages that no other one holds become free.

        Raises ValueError for a sequence that is not there.
        """
        for page in self._of(sequence).table:
            self._release(page)
        del self._sequences[sequence]

    def append(self, sequence, k, v):
        """Write the keys k ``[H_kv, T, d]`` and values v ``[H_kv, T, d_v]`` of T positions behind the last
        one.

        All of it is written, or nothing. Raises OutOfPages where the pool has too few pages; TypeError or
        ValueError naming the argument.
        """
        self.write(sequence, self.length(sequence), k, v)

    def write(self, sequence, start, k, v):
        """Write the keys k ``[H_kv, T, d]`` and values v ``[H_kv, T, d_v]`` of the positions start .. start +
        T - 1, over what stands there or behind it; start is at most the length of the sequence.

        Pages that other sequences hold too are copied first. All of it is written, or nothing. Raises
        OutOfPages where the pool has too few pages; TypeError or ValueError naming the argument.
        """
        held = self._of(sequence)
        checks.count("start", start, least=0)
        if start > held.length:
            raise ValueError(f"start: expected at most the length {held.length}, got {start}")
        self._check_rows(k, v)
        stop = start + k.shape[1]
        if stop == start:
            return
        first, last = start // self.page_size, (stop - 1) // self.page_size
        copied = [n for n in range(first, min(last + 1, len(held.table))) if self._shared(held.table[n])]
        added = max(0, last + 1 - len(held.table))
        asked = len(copied) + added
        if asked > len(self._free):
            raise OutOfPages(asked, len(self._free))
        for n in copied:
            self._copy_page(held.table, n)
        held.table += [self._take() for _ in range(added)]
        places = torch.arange(start, stop)
        pages = torch.tensor(held.table)[places // self.page_size].to(self.k_pages.device)
        slots = (places % self.page_size).to(self.k_pages.device)
        self.k_pages[pages, :, slots] = k.detach().transpose(0, 1)  # [T, H_kv, d]
        self.v_pages[pages, :, slots] = v.detach().transpose(0, 1)
        held.length = max(held.length, stop)

    def length(self, sequence):
        """How many positions a sequence has. Raises ValueError for one that is not there."""
        return self._of(sequence).length

    def table(self, sequence):
        """The pages of a sequence in order, a tuple. Raises ValueError for one that is not there."""
        return tuple(self._of(sequence).table)

    def batch(self, sequences):
        """What :func:`flashlib.decode` needs of some sequences: ``(block_table, seq_lens)``, int32 on the
        device, ``[B, max_pages]`` and ``[B]``; max_pages is at least 1, and entries after the last page of a
        sequence are -1.

        Raises ValueError for a sequence that is not there.
        """
        found = [self._of(sequence) for sequence in sequences]
        width = max((len(held.table) for held in found), default=0) or 1
        tables = [held.table + [-1] * (width - len(held.table)) for held in found]
        device = self.k_pages.device
        block_table = torch.tensor(tables, dtype=torch.int32, device=device).reshape(len(found), width)
        return block_table, torch.tensor([held.length for held in found], dtype=torch.int32, device=device)

    def gather(self, sequence):
        """Copies of the keys ``[H_kv, T, d]`` and values ``[H_kv, T, d_v]`` of a sequence, in order.

        Raises ValueError for one that is not there.
        """
        held = self._of(sequence)
        pages = torch.tensor(held.table, dtype=torch.long, device=self.k_pages.device)
        return tuple(
            x[pages].transpose(0, 1).flatten(1, 2)[:, : held.length] for x in (self.k_pages, self.v_pages)
        )

    def holders(self, page):
        """How many sequences hold a page. Raises TypeError or ValueError for what is no page."""
        checks.count("page", page, least=0)
        if page >= len(self._holders):
            raise ValueError(f"page: expected less than {len(self._holders)}, got {page}")
        return self._holders[page]

    def statistics(self):
        """How the pool is used, a :class:`Statistics`."""
        filled = {}  # {page: positions that the fullest of its holders has filled}
        jumps = listed = 0
        for held in self._sequences.values():
            listed += len(held.table)
            jumps += sum(b != a + 1 for a, b in zip(held.table, held.table[1:], strict=False))
            for n, page in enumerate(held.table):
                here = min(self.page_size, held.length - n * self.page_size)
                filled[page] = max(filled.get(page, 0), here)
        keys = sum(filled.values())
        return Statistics(
            pages=len(self._holders),
            free=len(self._free),
            shared=sum(count > 1 for count in self._holders),
            listed=listed,
            keys=keys,
            wasted=len(filled) * self.page_size - keys,
            jumps=jumps,
        )

    def _named(self, held):
        self._names += 1
        self._sequences[self._names - 1] = held
        return self._names - 1

    def _of(self, sequence):
        if sequence not in self._sequences:
            raise ValueError(f"sequence: expected the name of one that has not been freed, got {sequence!r}")
        return self._sequences[sequence]

    def _shared(self, page):
        return self._holders[page] > 1

    def _take(self):
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def _release(self, page):
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)

    def _copy_page(self, table, n):
        """Put a copy of the n-th page of a table, which other sequences hold too, in its place."""
        old, new = table[n], self._take()
        for x in (self.k_pages, self.v_pages):
            x[new] = x[old]
        self._release(old)
        table[n] = new

    def _check_rows(self, k, v):
        """k and v ``[H_kv, T, d]``, as many rows of one as of the other, of the pages' dtype and device."""
        for name, x, pages in (("k", k, self.k_pages), ("v", v, self.v_pages)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
            if x.dtype != pages.dtype:
                raise TypeError(f"{name}: expected the dtype of the cache, {pages.dtype}, got {x.dtype}")
            if x.device != pages.device:
                raise ValueError(f"{name}: expected the device of the cache, {pages.device}, got {x.device}")
            wanted = pages.shape[1], k.shape[1] if k.ndim == 3 else "T", pages.shape[3]
            if x.ndim != 3 or (x.shape[0], x.shape[1], x.shape[2]) != wanted:
                sizes = ", ".join(map(str, wanted))
                raise ValueError(f"{name}: expected [H_kv, T, d] = [{sizes}], got {list(x.shape)}")
