"""Memory for keys and values that is handed out to requests: pages, or one stretch for
each.

    pool = PagePool(pages=8, page_size=4)
    pool.new("A", 6)     # a sequence with 6 rows of keys and values: pages 0 and 1
    pool.fork("A", "B")  # another one with the same rows: it shares both pages
    pool.append("B")     # writes to a shared page, so B gets a copy of it first
    pool.table("B"), pool.length("B"), pool.copied_rows

    served = serve(requests, pool)  # what is held and wasted at every step of a trace

A *slot* is space for one row, the key and the value of one token in one layer and head;
all layers and heads hand out their slots in the same way. This module keeps track of
who holds what, without any numbers: :class:`flashlib.kvcache.PagedKVCache` puts two
tensors on a pool. Chapter *Decoding*.
"""

import collections
import heapq
import itertools
import math
import numbers
from typing import NamedTuple

import numpy as np

from flashlib.plain_checks import check_count, wrong


def check_name(name):
    """The name of a sequence can be the key of a dictionary."""
    try:
        hash(name)
    except TypeError as error:
        got = type(name).__name__
        raise wrong("sequence", "a name that can be hashed", got, TypeError) from error


class NoRoom(ValueError):
    """A call needs ``asked`` pages, or ``asked`` consecutive slots, and ``free`` are
    free, though perhaps not consecutive. Nothing has changed.
    """

    def __init__(self, message, asked, free):
        super().__init__(message)
        self.asked, self.free = asked, free


# -- Pages


class PagePool:
    """``pages`` pages of ``page_size`` slots, each at least 1; ``trace`` records what
    happens.

    Row t of a sequence is in page ``table[t // page_size]``, slot ``t % page_size``
    (``eq-decoding-table``). The pool takes the free page with the lowest number. A page
    of several sequences is never written: a sequence that writes to it gets a copy
    first (``alg-decoding-append``).

    Counts: ``copied_rows`` by copies on write, ``swapped_rows`` to and from the other
    memory. A name is a key of a dict; unknown and taken ones raise ValueError, as does
    a count that is out of range. Counts are Python integers, or else the call raises
    TypeError. A call that raises has changed nothing.
    """

    def __init__(self, pages, page_size, *, trace=False):
        check_count("pages", pages)
        check_count("page_size", page_size)
        self.pages, self.page_size = pages, page_size
        self.copied_rows = self.swapped_rows = 0
        self._free = list(range(self.pages))
        self._references, self._filled = [0] * self.pages, [0] * self.pages
        self._tables, self._lengths, self._swapped = {}, {}, {}
        self._steps = [] if trace else None

    # -- What there is

    @property
    def slots(self):
        return self.pages * self.page_size

    @property
    def free_slots(self):
        return len(self._free) * self.page_size

    @property
    def free_pages(self):
        return len(self._free)

    @property
    def held_rows(self):
        """Rows that the pages hold; a shared row counts once."""
        return sum(self._filled)

    @property
    def references(self):
        """For each page, the number of sequences that hold it."""
        return tuple(self._references)

    @property
    def names(self):
        """The sequences in the pool, oldest first."""
        return tuple(self._tables)

    @property
    def empty(self):
        """Whether there is no sequence, not even one that is swapped out."""
        return not self._tables and not self._swapped

    def table(self, name):
        """The pages of a sequence, in the order of its rows."""
        return tuple(self._tables[self._known(name)])

    def length(self, name):
        """The rows of a sequence."""
        return self._lengths[self._known(name)]

    def allocated(self, name):
        """The slots of the pages of a sequence, shared ones included."""
        return len(self._tables[self._known(name)]) * self.page_size

    def rounded(self, rows):
        """The slots of the pages that this many rows take."""
        check_count("rows", rows, least=0)
        return -(-rows // self.page_size) * self.page_size

    def pages_to_append(self, names, tokens):
        """The free pages that appending this many rows to each of these different
        sequences takes: new ones, and copies of shared ones.
        """
        size, new, written = self.page_size, 0, collections.Counter()
        for name in names:
            table, length = self._tables[self._known(name)], self._lengths[name]
            new += self.rounded(length + tokens) // size - len(table)
            if tokens and length % size:
                written[table[-1]] += 1
        # Where all sequences of a page write to it, the last one needs no copy.
        copies = (min(n, self._references[x] - 1) for x, n in written.items())
        return new + sum(copies)

    # -- What happens

    def new(self, name, tokens=0):
        """Start a sequence with this many rows, or raise NoRoom."""
        check_count("tokens", tokens, least=0)
        self._begin("new", name, tokens)

    def append(self, name, tokens=1):
        """Write this many more rows, or none where it raises NoRoom."""
        check_count("tokens", tokens)
        written = self._write(name, self.length(name), tokens)
        self._note("append", name, tokens, *written)

    def write(self, name, start, tokens):
        """Write rows start .. start + tokens - 1, over old ones or after the last;
        start is at most the length. All of them, or none where it raises NoRoom.
        Returns the copies, [(page, new page)].
        """
        check_count("start", start, least=0, most=self.length(name))
        check_count("tokens", tokens, least=0)
        copied, written = self._write(name, start, tokens)
        self._note("write", name, tokens, copied, written)
        return copied

    def fork(self, source, name):
        """Start a second sequence that shares all pages of the first."""
        self._known(source)
        self._unknown(name)
        self._tables[name] = list(self._tables[source])
        self._lengths[name] = self._lengths[source]
        for page in self._tables[name]:
            self._references[page] += 1
        self._note("fork", name, source=source)

    def free(self, name):
        """End a sequence, also one that is swapped out; pages that no other one holds
        are free again.
        """
        check_name(name)
        away = self._swapped.pop(name, None) is not None
        self._note("free", name, released=[] if away else self._drop(name))

    def swap_out(self, name):
        """Copy the rows of a sequence to the other memory and release its pages."""
        tokens = self.length(name)
        released = self._drop(name)
        self._swapped[name] = tokens
        self.swapped_rows += tokens
        self._note("swap_out", name, tokens, released=released)

    def swap_in(self, name):
        """Bring a sequence back, into pages of its own. Raises NoRoom where too few are
        free, ValueError for a sequence that was not swapped out.
        """
        check_name(name)
        if name not in self._swapped:
            raise wrong("sequence", "one that was swapped out", repr(name))
        self._require_free(self.rounded(self._swapped[name]) // self.page_size)
        tokens = self._swapped.pop(name)
        self._begin("swap_in", name, tokens)
        self.swapped_rows += tokens

    def trace(self):
        """What happened, as plain lists and dicts:

            {"pages": int, "page_size": int, "steps": [{"action": the method's name,
             "sequence": name, "source": name or None, "tokens": int,
             "copied": [[page, new page], ...], "written": [[page, first slot, end
             slot], ...], "released": [page, ...], "tables": {name: [page, ...]},
             "lengths": {name: rows}, "swapped": {name: rows}, "filled": [rows of each
             page], "references": [sequences of each page]}, ...]}

        Raises RuntimeError unless the pool was made with ``trace=True``.
        """
        if self._steps is None:
            raise RuntimeError("PagePool records a trace only with trace=True")
        steps = list(self._steps)
        return {"pages": self.pages, "page_size": self.page_size, "steps": steps}

    def _known(self, name):
        check_name(name)
        if name in self._swapped:
            raise wrong("sequence", "one that is not swapped out", repr(name))
        if name not in self._tables:
            expected = "the name of one that has not been freed"
            raise wrong("sequence", expected, repr(name))
        return name

    def _unknown(self, name):
        check_name(name)
        if name in self._tables or name in self._swapped:
            raise wrong("sequence", "a name new to the pool", repr(name))

    def _require_free(self, asked):
        if asked > (free := len(self._free)):
            said = f"{asked} pages of {self.page_size} slots are asked for"
            raise NoRoom(f"{said}, {free} of {self.pages} are free", asked, free)

    def _begin(self, action, name, tokens):
        self._unknown(name)
        self._require_free(self.rounded(tokens) // self.page_size)
        self._tables[name], self._lengths[name] = [], 0
        self._note(action, name, tokens, *self._write(name, 0, tokens))

    def _write(self, name, start, tokens):
        """Copy shared pages, add new ones, fill them; (copied, written)."""
        table, size = self._tables[self._known(name)], self.page_size
        end = start + tokens
        touched = range(start // size, -(-end // size)) if tokens else range(0)
        held = [n for n in touched if n < len(table)]
        shared = [n for n in held if self._references[table[n]] > 1]
        self._require_free(len(shared) + len(touched) - len(held))
        copied, written = [], []
        for n in shared:
            old, table[n] = table[n], self._take()
            self._references[old] -= 1
            self._filled[table[n]] = min(size, self._lengths[name] - n * size)
            self.copied_rows += self._filled[table[n]]
            copied.append((old, table[n]))
        table += [self._take() for _ in range(len(touched) - len(held))]
        for n in touched:
            first, last = max(start - n * size, 0), min(end - n * size, size)
            written.append([table[n], first, last])
            self._filled[table[n]] = max(self._filled[table[n]], last)
        self._lengths[name] = max(self._lengths[name], end)
        return copied, written

    def _take(self):
        page = heapq.heappop(self._free)
        self._references[page] = 1
        return page

    def _drop(self, name):
        """Forget a sequence; the pages that are free now."""
        released = []
        for page in self._tables.pop(self._known(name)):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._filled[page] = 0
                heapq.heappush(self._free, page)
                released.append(page)
        del self._lengths[name]
        return released

    def _note(
        self, action, name, tokens=0, copied=(), written=(), *, source=None, released=()
    ):
        if self._steps is None:
            return
        self._steps.append({
            "action": action, "sequence": name, "source": source, "tokens": tokens,
            "copied": [list(pair) for pair in copied], "written": list(written),
            "released": list(released),
            "tables": {name: list(pages) for name, pages in self._tables.items()},
            "lengths": dict(self._lengths), "swapped": dict(self._swapped),
            "filled": list(self._filled), "references": list(self._references),
        })  # fmt: skip


# -- One stretch for each request


class Stretches:
    """``slots`` slots, of which request n gets ``sizes[n]`` consecutive ones when it
    comes, first fit. The methods are those of :class:`PagePool` that :func:`serve`
    uses; a name is the number of a request. A call that raises has changed nothing.
    """

    def __init__(self, slots, sizes):
        self.slots, self.sizes = slots, tuple(sizes)
        check_count("slots", slots)
        for number, size in enumerate(self.sizes):
            check_count(f"sizes[{number}]", size)
        self._places, self._lengths = {}, {}  # {name: first slot}, {name: rows}

    @property
    def free_slots(self):
        return self.slots - sum(self.sizes[name] for name in self._places)

    @property
    def empty(self):
        """Whether no request has a stretch."""
        return not self._places

    @property
    def holes(self):
        """The free stretches, as (first slot, slots), from the left."""
        taken = sorted(
            (first, first + self.sizes[x]) for x, first in self._places.items()
        )
        edges = [0, *itertools.chain(*taken), self.slots]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(first, end - first) for first, end in pairs if end > first]

    def length(self, name):
        """The rows of a request."""
        return self._lengths[self._number(name, placed=True)]

    def allocated(self, name):
        """The slots reserved for a request."""
        return self.sizes[self._number(name, placed=True)]

    def new(self, name, tokens=0):
        """Reserve the first hole that is large enough and write this many rows. Raises
        NoRoom where there is none, ValueError for more rows than are reserved and for a
        request that has a stretch.
        """
        size = self.sizes[self._number(name, placed=False)]
        check_count("tokens", tokens, least=0, most=size)
        first = next((first for first, wide in self.holes if wide >= size), None)
        if first is None:
            free, longest = self.free_slots, max((x for _, x in self.holes), default=0)
            said = f"{size} consecutive slots are asked for, {free} of {self.slots}"
            raise NoRoom(f"{said} are free, at most {longest} in a row", size, free)
        self._places[name], self._lengths[name] = first, tokens

    def append(self, name):
        """Write one more row. Raises ValueError beyond the reservation."""
        if self.length(name) == self.sizes[name]:
            raise wrong("sequence", "one with a free slot", name)
        self._lengths[name] += 1

    def free(self, name):
        """Give the stretch of a request back."""
        del self._places[self._number(name, placed=True)], self._lengths[name]

    def _number(self, name, placed):
        """The number of a request that has a stretch, or of one that has none."""
        check_count("sequence", name, least=0, most=len(self.sizes) - 1)
        if (name in self._places) != placed:
            expected = f"a request with{'' if placed else 'out'} a stretch"
            raise wrong("sequence", expected, name)
        return name


# -- A trace of requests


class Request(NamedTuple):
    """The step in which it comes, and the tokens that it reads and generates."""

    arrival: int
    prompt: int
    output: int

    @property
    def rows(self):
        """Its rows at the end, without the last token's (``eq-decoding-length``)."""
        return self.prompt + self.output - 1


def requests(count, *, every, prompt, output, longest, seed):
    """``count`` Requests at random times, ``every`` steps apart on average, with
    geometric lengths: ``prompt`` and ``output`` tokens on average, cut where they would
    take more than ``longest`` rows, the output first. Raises TypeError or ValueError
    that names the argument.
    """
    check_count("count", count, least=0)
    check_count("longest", longest)
    check_count("seed", seed, least=0)
    averages = ("every", every, 0), ("prompt", prompt, 1), ("output", output, 1)
    for name, value, least in averages:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise wrong(name, "a number", type(value).__name__, TypeError)
        if not least <= value < math.inf:
            raise wrong(name, f"a finite number of at least {least}", value)
    rng = np.random.default_rng(seed)
    arrivals = map(math.floor, np.cumsum(rng.exponential(every, count)).tolist())
    reads = np.minimum(rng.geometric(1 / prompt, count), longest)
    writes = np.minimum(rng.geometric(1 / output, count), longest + 1 - reads)
    drawn = zip(arrivals, reads.tolist(), writes.tolist(), strict=True)
    return [Request(*sizes) for sizes in drawn]


class Served(NamedTuple):
    """What :func:`serve` saw; arrays have a number for each step, in slots.

    held        rows of keys and values
    later       slots that their request will fill before it ends
    never       slots that their request has and will never fill
    free        slots that no request has
    stranded    of these, those that would be enough for the first that waits but are
                not contiguous; else 0
    running, waiting    requests
    evicted     rows that were freed for others and had to be computed or copied again
    evictions   how often
    finished    the step in which each request generated its last token
    """

    held: np.ndarray
    later: np.ndarray
    never: np.ndarray
    free: np.ndarray
    stranded: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    evicted: int
    evictions: int
    finished: np.ndarray

    @property
    def steps(self):
        """Steps until the last token."""
        return len(self.held)


def serve(requests, memory, *, spare=0):
    """Serve requests, first come, first served, from an empty PagePool or Stretches;
    returns a Served.

    spare       slots that must be free after a request is admitted, unless no other
                one runs

    In each step every running request generates a token, for which it stores one more
    row; then the waiting ones are admitted, in their order, as long as the first finds
    room. An admitted request stores the rows of its prompt and generates a first token
    in the same step. Where a running request finds no room, the one that was admitted
    last is evicted: it goes back to the head of the queue, its rows are stored again
    when it returns, and it goes on in the step after. Raises TypeError or ValueError
    for a memory that is not empty and for a request that the whole memory could not
    hold.
    """
    check_count("spare", spare, least=0)
    if not isinstance(memory, PagePool | Stretches):
        got = type(memory).__name__
        raise wrong("memory", "a PagePool or Stretches", got, TypeError)
    if not memory.empty:
        raise wrong("memory", "an empty one", "one that is in use")
    requests = [
        _servable(number, request, memory) for number, request in enumerate(requests)
    ]
    coming = sorted(range(len(requests)), key=lambda n: (requests[n].arrival, n))[::-1]
    waiting, running = [], []  # in order of arrival, and of admission
    generated = [0] * len(requests)  # tokens
    finished, steps = np.zeros(len(requests), dtype=int), []
    evicted = evictions = 0
    while coming or waiting or running:
        while coming and requests[coming[-1]].arrival <= len(steps):
            waiting.append(coming.pop())
        for number in tuple(running):
            while number in running:
                try:
                    memory.append(number)
                    generated[number] += 1
                    break
                except NoRoom:
                    last = running.pop()
                    evicted, evictions = evicted + memory.length(last), evictions + 1
                    memory.free(last)
                    waiting.insert(0, last)
        while waiting:
            number = waiting[0]
            try:
                memory.new(
                    number, requests[number].prompt + max(0, generated[number] - 1)
                )
            except NoRoom:
                break
            if running and memory.free_slots < spare:
                memory.free(number)
                break
            generated[number] = max(1, generated[number])
            running.append(waiting.pop(0))
        steps.append(_slots(requests, running, waiting, memory))
        for number in tuple(running):
            if generated[number] == requests[number].output:
                memory.free(number)
                running.remove(number)
                finished[number] = len(steps) - 1
    columns = np.array(steps, dtype=int).reshape(-1, 7).T
    return Served(*columns, evicted, evictions, finished)


def _servable(number, entry, memory):
    """The request with this number, if it is one that the memory could hold."""
    name, fields = f"requests[{number}]", Request._fields
    if not isinstance(entry, tuple | list) or len(entry) != len(fields):
        raise wrong(name, f"({', '.join(fields)})", repr(entry), TypeError)
    request = Request(*entry)
    for field, value, least in zip(fields, request, (0, 1, 1), strict=True):
        check_count(f"{name}.{field}", value, least)
    rows, slots = request.rows, memory.slots
    if isinstance(memory, PagePool):
        own = memory.rounded(rows)
    else:
        own = memory.sizes[number] if number < len(memory.sizes) else 0
    if not rows <= own <= slots:
        got = f"one of {rows} rows for {own} of {slots} slots"
        raise wrong(name, "a request that could end", got)
    return request


def _slots(requests, running, waiting, memory):
    """The first seven numbers of Served, now."""
    held = later = never = stranded = 0
    for number in running:
        rows, slots = memory.length(number), memory.allocated(number)
        useful = min(slots, requests[number].rows)
        held, later, never = held + rows, later + useful - rows, never + slots - useful
    free = memory.free_slots
    if waiting and isinstance(memory, Stretches) and memory.sizes[waiting[0]] <= free:
        stranded = free  # together the free slots would be enough
    return held, later, never, free, stranded, len(running), len(waiting)
