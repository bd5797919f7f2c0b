"""Memory for keys and values as it is handed out to requests: one stretch for each, or pages.

    pool = PagePool(pages=8, page_size=4)
    pool.new("A", 6)                           # a request with 6 rows of keys and values: pages 0 and 1
    pool.fork("A", "B")                        # another with the same rows: it shares both pages
    pool.append("B")                           # writes into a shared page, so B gets a copy of it first
    pool.table("B"), pool.length("B"), pool.copied_rows

    served = serve(requests, pool)             # a trace of requests: at every step what is held and wasted

A *slot* is room for one row, the key and the value of one token in one layer and head; whatever a row weighs,
all layers and heads hand out their slots alike. Only who holds what is kept here, no numbers:
:class:`flashlib.kvcache.PagedKVCache` keeps those too. Chapter *Decoding*.
"""

import heapq
import itertools
import operator
from typing import NamedTuple

import numpy as np


class NoRoom(ValueError):
    """More was asked for than is free: ``asked`` and ``free``, in pages or in slots; nothing has changed."""

    def __init__(self, message, asked, free):
        super().__init__(message)
        self.asked, self.free = asked, free


def _integer(name, value, least):
    """value as an int of at least ``least``; TypeError or ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


# ------------------------------------------------------------------------------------------------------------
# Pages


class PagePool:
    """Pages of ``page_size`` slots; every sequence has a table of the pages that hold its rows, in order.

    pages, page_size    integers of at least 1
    trace               whether to keep what happens, for ``trace()``

    Row t of a sequence lies in page ``table[t // page_size]``, slot ``t % page_size``
    (``eq-decoding-table``). Of the free pages the one with the lowest number is taken. A page of several
    sequences is never written: who appends to it gets a copy first (``alg-decoding-append``).

    Counts: ``copied_rows`` by copies on write, ``swapped_rows`` to and from the other memory. A name is
    anything that a dict takes as a key. Unknown and taken names raise ValueError.
    """

    def __init__(self, pages, page_size, *, trace=False):
        self.pages, self.page_size = _integer("pages", pages, 1), _integer("page_size", page_size, 1)
        self.copied_rows = self.swapped_rows = 0
        self._free = list(range(self.pages))
        self._references, self._filled = [0] * self.pages, [0] * self.pages
        self._tables, self._lengths, self._swapped = {}, {}, {}
        self._steps = [] if trace else None

    # ------------------------------------------------------------------------------------------------
    # What there is

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
        """Of each page, how many sequences it belongs to."""
        return tuple(self._references)

    @property
    def names(self):
        """The sequences in the pool, in the order in which they came."""
        return tuple(self._tables)

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
        """The slots of the pages that so many rows take."""
        return self._pages_for(rows) * self.page_size

    # ------------------------------------------------------------------------------------------------
    # What happens

    def new(self, name, tokens=0):
        """A sequence with so many rows. Raises NoRoom where there are too few free pages for them."""
        self._unknown(name)
        tokens = _integer("tokens", tokens, 0)
        self._require(self._pages_for(tokens))
        self._tables[name], self._lengths[name] = [], 0
        self._note("new", name, tokens=tokens, **self._extend(name, tokens))

    def append(self, name, tokens=1):
        """So many more rows, all of them or, with NoRoom, none."""
        self._known(name)
        tokens = _integer("tokens", tokens, 1)
        copies = self._shares_its_end(name)
        self._require(self._pages_for(self._lengths[name] + tokens) - len(self._tables[name]) + copies)
        self._note("append", name, tokens=tokens, **self._extend(name, tokens))

    def fork(self, source, name):
        """A second sequence with the rows of the first; no row is copied and no page taken."""
        self._known(source)
        self._unknown(name)
        self._tables[name], self._lengths[name] = list(self._tables[source]), self._lengths[source]
        for page in self._tables[name]:
            self._references[page] += 1
        self._note("fork", name, source=source)

    def free(self, name):
        """Forget a sequence; pages of nobody else are free again."""
        released = self._drop(self._known(name))
        self._note("free", name, released=released)

    def swap_out(self, name):
        """Copy the rows of a sequence to the other memory and let go of its pages.

        Pages that others share stay with them.
        """
        tokens = self._lengths[self._known(name)]
        released = self._drop(name)
        self._swapped[name] = tokens
        self.swapped_rows += tokens
        self._note("swap_out", name, tokens=tokens, released=released)

    def swap_in(self, name):
        """Bring a sequence back, into pages of its own.

        Raises NoRoom where too few are free, ValueError for a sequence that was not swapped out.
        """
        if name not in self._swapped:
            raise ValueError(f"name must be a sequence that was swapped out, got {name!r}")
        tokens = self._swapped[name]
        self._require(self._pages_for(tokens))
        del self._swapped[name]
        self.swapped_rows += tokens
        self._tables[name], self._lengths[name] = [], 0
        self._note("swap_in", name, tokens=tokens, **self._extend(name, tokens))

    def trace(self):
        """What happened, as plain lists and dicts:

            {"pages": int, "page_size": int, "steps": [{"action": "new", "append", "fork", "free", "swap_out"
             or "swap_in", "sequence": name, "source": name or None, "tokens": int, "copied": [[page, new
             page], ...], "written": [[page, first slot, end slot], ...], "released": [page, ...], "tables":
             {name: [page, ...]}, "lengths": {name: rows}, "swapped": {name: rows}, "filled": [rows of each
             page], "references": [sequences of each page]}, ...]}

        RuntimeError unless the pool was made with ``trace=True``.
        """
        if self._steps is None:
            raise RuntimeError("PagePool keeps a trace only when it is made with trace=True")
        return {"pages": self.pages, "page_size": self.page_size, "steps": list(self._steps)}

    # ------------------------------------------------------------------------------------------------

    def _known(self, name):
        if name not in self._tables:
            raise ValueError(f"name must be a sequence of the pool, one of {self.names}, got {name!r}")
        return name

    def _unknown(self, name):
        if name in self._tables or name in self._swapped:
            raise ValueError(f"name must be new to the pool, got {name!r}, which it has")

    def _pages_for(self, rows):
        return -(-rows // self.page_size)

    def _require(self, asked):
        if asked > len(self._free):
            raise NoRoom(
                f"{asked} pages of {self.page_size} slots are asked for, {len(self._free)} of {self.pages} "
                "are free",
                asked,
                len(self._free),
            )

    def _shares_its_end(self, name):
        """Whether the next row would go into a page that others have too."""
        return bool(self._lengths[name] % self.page_size) and self._references[self._tables[name][-1]] > 1

    def _take(self):
        page = heapq.heappop(self._free)
        self._references[page], self._filled[page] = 1, 0
        return page

    def _release(self, page):
        """Whether the page is free now."""
        self._references[page] -= 1
        if self._references[page]:
            return False
        self._filled[page] = 0
        heapq.heappush(self._free, page)
        return True

    def _drop(self, name):
        del self._lengths[name]
        return [page for page in self._tables.pop(name) if self._release(page)]

    def _extend(self, name, tokens):
        """Write rows behind those of a sequence: what was copied and written."""
        table, copied, written = self._tables[name], [], []
        if tokens and self._shares_its_end(name):
            shared, table[-1] = table[-1], self._take()
            self._release(shared)
            self._filled[table[-1]] = self._lengths[name] % self.page_size
            self.copied_rows += self._filled[table[-1]]
            copied.append([shared, table[-1]])
        end = self._lengths[name] + tokens
        while self._lengths[name] < end:
            slot = self._lengths[name] % self.page_size
            if not slot:
                table.append(self._take())
            slot_end = min(self.page_size, slot + end - self._lengths[name])
            written.append([table[-1], slot, slot_end])
            self._filled[table[-1]] = slot_end
            self._lengths[name] += slot_end - slot
        return {"copied": copied, "written": written}

    def _note(self, action, name, *, source=None, tokens=0, copied=(), written=(), released=()):
        if self._steps is None:
            return
        self._steps.append(
            {
                "action": action, "sequence": name, "source": source, "tokens": tokens,
                "copied": list(copied), "written": list(written), "released": list(released),
                "tables": {name: list(pages) for name, pages in self._tables.items()},
                "lengths": dict(self._lengths), "swapped": dict(self._swapped),
                "filled": list(self._filled), "references": list(self._references),
            }
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------
# One stretch for each request


class Stretches:
    """Consecutive slots for each request, reserved when it comes and as many as ``sizes`` says; first fit.

    slots       an integer of at least 1
    sizes       {name: slots to reserve} or a list of them, whose names are 0, 1, ...

    The methods are those of :class:`PagePool` that :func:`serve` uses. ``append`` beyond the reservation
    raises ValueError.
    """

    def __init__(self, slots, sizes):
        self.slots = _integer("slots", slots, 1)
        sizes = sizes if isinstance(sizes, dict) else dict(enumerate(sizes))
        self.sizes = {name: _integer(f"sizes[{name!r}]", size, 1) for name, size in sizes.items()}
        self._places, self._lengths = {}, {}  # {name: first slot}, {name: rows}

    @property
    def free_slots(self):
        return self.slots - sum(self.sizes[name] for name in self._places)

    @property
    def holes(self):
        """The free stretches, as (first slot, slots), from the left."""
        taken = sorted((first, first + self.sizes[name]) for name, first in self._places.items())
        edges = [0, *itertools.chain(*taken), self.slots]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(first, end - first) for first, end in pairs if end > first]

    def place(self, name):
        """The first slot of a request."""
        return self._places[name]

    def length(self, name):
        """The rows of a request."""
        return self._lengths[name]

    def allocated(self, name):
        """The slots reserved for a request."""
        return self.sizes[name]

    def new(self, name, tokens=0):
        """Reserve the first hole that is large enough and write so many rows.

        Raises NoRoom where there is no such hole, ValueError for more rows than are reserved.
        """
        size = self.sizes[name]
        if not 0 <= tokens <= size:
            raise ValueError(f"tokens must be from 0 to the {size} slots reserved for {name!r}, got {tokens}")
        first = next((first for first, wide in self.holes if wide >= size), None)
        if first is None:
            raise NoRoom(
                f"{size} consecutive slots are asked for, {self.free_slots} of {self.slots} are free, "
                f"at most {max((wide for _, wide in self.holes), default=0)} in a row",
                size,
                self.free_slots,
            )
        self._places[name], self._lengths[name] = first, tokens

    def append(self, name, tokens=1):
        """So many more rows. Raises ValueError beyond the reservation."""
        if self._lengths[name] + tokens > self.sizes[name]:
            raise ValueError(f"{name!r} has {self.sizes[name]} slots, all of which would be exceeded")
        self._lengths[name] += tokens

    def free(self, name):
        """Give the stretch of a request back."""
        del self._places[name], self._lengths[name]


# ------------------------------------------------------------------------------------------------------------
# A trace of requests


class Request(NamedTuple):
    """arrival: the step in which it comes; prompt, output: tokens read and tokens made, each at least 1."""

    arrival: int
    prompt: int
    output: int

    @property
    def rows(self):
        """Keys and values at its end: the last token is never asked for its own (``eq-decoding-length``)."""
        return self.prompt + self.output - 1


def requests(count, *, every, prompt, output, longest, seed):
    """``count`` Requests at random times, ``every`` steps apart on average, with geometric lengths.

    prompt, output      mean lengths; most are shorter, some much longer
    longest             the most rows that any may have; what is drawn beyond is cut, the output first
    """
    rng = np.random.default_rng(seed)
    arrivals = np.floor(np.cumsum(rng.exponential(every, count))).astype(int)
    made = []
    lengths = zip(rng.geometric(1 / prompt, count), rng.geometric(1 / output, count), strict=True)
    for arrival, (read, written) in zip(arrivals, lengths, strict=True):
        read = min(int(read), longest)
        made.append(Request(int(arrival), read, min(int(written), longest + 1 - read)))
    return made


class Served(NamedTuple):
    """What :func:`serve` saw; arrays have a number for each step, in slots.

    held        rows of keys and values
    later       slots that their request will fill before it ends
    never       slots that their request has and will never fill
    free        slots of nobody
    stranded    of these, those that would be enough for the first that waits but lie apart; else 0
    running, waiting    requests
    evicted     rows that were given up to make room and had to be made or brought again
    evictions   how often
    finished    the step in which each request made its last token
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
    """Serve requests, first come, first served, from a PagePool or Stretches that is empty: a Served.

    spare       slots that must be free after somebody is let in, unless nobody else runs

    In each step every running request makes a token, for which it stores one more row; then the waiting ones
    are let in, in their order, as long as there is room for the first. Who is let in stores the rows of the
    prompt and makes a first token in the same step. Where a running request finds no room, the one that was
    let in last is evicted: it goes back to the head of those that wait, its rows are stored again when it
    returns, and it goes on in the step after. Raises ValueError for a request that the whole memory could
    not hold.
    """
    requests, spare = [Request(*request) for request in requests], _integer("spare", spare, 0)
    for number, request in enumerate(requests):
        _require_servable(number, request, memory)
    coming = sorted(range(len(requests)), key=lambda number: (requests[number].arrival, number))[::-1]
    waiting, running = [], []  # in the order in which they came, and in which they were let in
    made = [0] * len(requests)  # tokens
    finished = np.zeros(len(requests), dtype=int)
    columns = {name: [] for name in ("held", "later", "never", "free", "stranded", "running", "waiting")}
    evicted = evictions = 0
    for step in itertools.count():
        if not (coming or waiting or running):
            break
        while coming and requests[coming[-1]].arrival <= step:
            waiting.append(coming.pop())
        for number in tuple(running):
            while number in running:
                try:
                    memory.append(number)
                except NoRoom:
                    last = running.pop()
                    evicted, evictions = evicted + memory.length(last), evictions + 1
                    memory.free(last)
                    waiting.insert(0, last)
                else:
                    made[number] += 1
                    break
        while waiting:
            number = waiting[0]
            rows = requests[number].prompt + max(0, made[number] - 1)
            try:
                memory.new(number, rows)
            except NoRoom:
                break
            if running and memory.free_slots < spare:
                memory.free(number)
                break
            made[number] = max(1, made[number])
            running.append(waiting.pop(0))
        seen = _slots(requests, running, memory)
        seen |= {"running": len(running), "waiting": len(waiting)}
        seen["stranded"] = seen["free"] if waiting and _fits_in_pieces(waiting[0], memory) else 0
        for name, column in columns.items():
            column.append(seen[name])
        for number in tuple(running):
            if made[number] == requests[number].output:
                memory.free(number)
                running.remove(number)
                finished[number] = step
    arrays = {name: np.array(column, dtype=int) for name, column in columns.items()}
    return Served(**arrays, evicted=evicted, evictions=evictions, finished=finished)


def _require_servable(number, request, memory):
    least = memory.rounded(request.rows) if isinstance(memory, PagePool) else memory.sizes[number]
    if request.prompt < 1 or request.output < 1:
        raise ValueError(f"requests[{number}] must read and make at least one token, got {request}")
    if least > memory.slots or least < request.rows:
        raise ValueError(
            f"requests[{number}] needs {request.rows} rows and would get {least} of {memory.slots} slots: it "
            "could never end"
        )


def _slots(requests, running, memory):
    """What the slots are, now."""
    held = later = never = 0
    for number in running:
        rows, slots, end = memory.length(number), memory.allocated(number), requests[number].rows
        held, later, never = held + rows, later + min(slots, end) - rows, never + slots - min(slots, end)
    return {"held": held, "later": later, "never": never, "free": memory.free_slots}


def _fits_in_pieces(number, memory):
    """Whether a request that found no room would fit if the free slots lay together."""
    return isinstance(memory, Stretches) and memory.sizes[number] <= memory.free_slots
