"""A machine with a small fast memory and a large slow one, which counts every word that
passes between them.

    memory = TwoLevelMemory(capacity_words=64)
    memory.place("A", a)                       # in slow memory when the clock starts
    block = memory.load("A", rows=slice(0, 4))
    block += 1.0
    memory.store(block)
    memory.free(block)
    memory.loaded_words, memory.stored_words, memory.peak_words

A word is one number, whatever its format. Arithmetic is free; the operations of matrix
products are counted all the same. What survives from one statement to the next must be
a block in fast memory, so that it is counted. A temporary inside one statement is not,
because each of its elements can go into the result as soon as it exists.

Values are float64. Chapter *The memory bottleneck*, ``eq-bottleneck-capacity``.
"""

import contextlib
import math
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flashlib.plain_checks import check_count

OWN_BYTES = 2**16  # of Python's objects of a schedule that keeps no numbers in them
ARRAYS = [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]


def _traced_bytes():
    """(bytes of NumPy's arrays, of everything else) that are alive and were made while
    tracemalloc was at work, to which NumPy tells the memory of its arrays.
    """
    everything, _ = tracemalloc.get_traced_memory()
    traces = tracemalloc.take_snapshot().filter_traces(ARRAYS).traces
    arrays = sum(trace.size for trace in traces)
    return arrays, everything - arrays


class CapacityExceeded(ValueError):
    """More words were asked for than are free; ``excess_words`` says by how many."""

    def __init__(self, message, excess_words):
        super().__init__(message)
        self.excess_words = excess_words


class Block(np.lib.mixins.NDArrayOperatorsMixin):
    """A handle of a rectangle of a named array while it is in fast memory.

    Arithmetic, comparisons and numpy's ufuncs work on it and give plain arrays;
    ``block[...]`` reads a part, ``block[...] = x`` and ``block += x`` write. Once the
    block is freed its numbers are NaN and every use of the handle raises RuntimeError.
    What a handle says about its rectangle never changes.
    """

    def __init__(self, memory, name, rows, columns, values):
        self.name, self.rows, self.columns = name, rows, columns
        self._memory, self._values = memory, values
        self.words = values.size

    def __setattr__(self, name, value):
        if hasattr(self, name):
            raise AttributeError(f"{name}: a block is written with block[...] = x")
        super().__setattr__(name, value)

    def __repr__(self):
        rows, columns = self.rows, self.columns
        return f"{self.name}[{rows.start}:{rows.stop}, {columns.start}:{columns.stop}]"

    def _read(self):
        self._memory._require_resident(self)
        return self._values

    @property
    def shape(self):
        return self._values.shape

    @property
    def T(self):
        """The transpose, as an array that turns to NaN with the block."""
        return self._read().T

    def __getitem__(self, place):
        return self._read()[place]

    def __setitem__(self, place, values):
        self._read()[place] = values
        self._memory._note("compute", self)

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        arrays = [x._read() if isinstance(x, Block) else x for x in inputs]
        result = getattr(ufunc, method)(*arrays, **options)
        if ufunc is np.matmul:
            self._memory.product_flops += 2 * arrays[0].shape[-1] * result.size
        if not out:
            return result
        target = out[0]  # block += x comes here
        target[...] = result
        return target


class Operations(NamedTuple):
    """What a schedule does with a memory, without the arrays and the counts."""

    load: Callable
    allocate: Callable
    store: Callable
    free: Callable
    reuse: Callable


class TwoLevelMemory:
    """Slow memory of named two-dimensional arrays and a fast memory of
    ``capacity_words`` words, at least 1. ``trace`` records what happens.

    Counts: ``loaded_words`` and ``stored_words`` pass to and from fast memory,
    ``moved_words`` is their sum, ``by_array`` has both for each array;
    ``resident_words`` are in fast memory now, ``peak_words`` is the most that ever
    were. ``closed_form_words`` is what a schedule's closed form gives, or None.
    ``product_flops`` are the operations of matrix products of blocks, a multiply-add
    counted as two.
    """

    def __init__(self, capacity_words, *, trace=False):
        check_count("capacity_words", capacity_words)
        self.capacity_words = capacity_words
        self.resident_words = self.peak_words = 0
        self.closed_form_words = None
        self.product_flops = 0
        self.loaded, self.stored = Counter(), Counter()
        self._slow, self._resident = {}, []
        self._steps = [] if trace else None
        self._closed = False

    # -- Slow memory

    def place(self, name, array):
        """Put a copy of a matrix into slow memory before the schedule starts; not
        counted. Raises ValueError for an array that is not a matrix or is empty, and
        for a name that is taken.
        """
        array = np.array(array, dtype=np.float64)
        if array.ndim != 2 or array.size == 0:
            expected = "two dimensions and at least one element"
            raise ValueError(f"place({name!r}): expected {expected}, got {array.shape}")
        self._new_name(name)
        self._slow[name] = array

    def reserve(self, name, rows, columns):
        """Make room in slow memory for an array that will be stored, and is NaN until
        then. Raises ValueError for a size below 1 and for a name that is taken.
        """
        self._new_name(name)
        check_count("rows", rows)
        check_count("columns", columns)
        self._slow[name] = np.full((rows, columns), np.nan)

    def array(self, name):
        """A copy of what slow memory holds under this name, after the schedule: nothing
        can be loaded from then on. Raises RuntimeError while blocks are resident,
        ValueError for an unknown name.
        """
        if self._resident:
            held = f"fast memory still holds {self._resident}"
            raise RuntimeError(f"array({name!r}): {held}")
        self._known(name, "array")
        self._closed = True
        return self._slow[name].copy()

    # -- The four operations of a schedule, and the reuse of space

    @contextlib.contextmanager
    def schedule(self):
        """The Operations of this memory, for a schedule that must not look elsewhere.
        Each raises RuntimeError where numbers are kept that are in no block: in arrays,
        or in Python's objects, of which there is more than a program needs.
        """
        blocks = []  # weak references: a freed block keeps its numbers, as NaN
        tracing = tracemalloc.is_tracing()
        if not tracing:
            tracemalloc.start()
        arrays, objects = _traced_bytes()

        def watched(operation):
            def call(*args, **kwargs):
                blocks[:] = [block for block in blocks if block() is not None]
                now, own = _traced_bytes()
                outside = (now - arrays) // 8 - sum(block().words for block in blocks)
                if outside > 0:
                    raise RuntimeError(f"{outside} words are kept outside of blocks")
                if own - objects > OWN_BYTES:
                    raise RuntimeError("numbers are kept in Python's objects")
                result = operation(*args, **kwargs)
                if isinstance(result, Block):
                    blocks.append(weakref.ref(result))
                return result

            return call

        try:
            yield Operations(*(watched(getattr(self, x)) for x in Operations._fields))
        finally:
            if not tracing:
                tracemalloc.stop()

    def load(self, name, rows=None, columns=None):
        """Copy a rectangle of a slow array into fast memory; counts its words. Returns
        its Block.

        rows, columns: slices with step 1 inside the array; None means all. Raises
        ValueError for an unknown array, a range outside it, or a rectangle that
        overlaps a resident block of the array; CapacityExceeded where it does not fit;
        RuntimeError after ``array``.
        """
        if self._closed:
            over = "the result has been taken out, the schedule is over"
            raise RuntimeError(f"load({name!r}): {over}")
        self._known(name, "load")
        rows, columns = self._ranges(name, rows, columns)
        values = self._slow[name][rows, columns].copy()
        block = self._enter("load", name, rows, columns, values)
        self.loaded[name] += block.words
        self._note("load", block)
        return block

    def allocate(self, name, rows=None, columns=None):
        """Room in fast memory for a rectangle, filled with NaN; moves nothing. Returns
        its Block. Without an array of that name in slow memory, both ranges must be
        given and the block can never be stored. Errors as for ``load``.
        """
        rows, columns = self._ranges(name, rows, columns)
        values = np.full((rows.stop - rows.start, columns.stop - columns.start), np.nan)
        block = self._enter("allocate", name, rows, columns, values)
        self._note("allocate", block)
        return block

    def store(self, *blocks):
        """Copy resident blocks to slow memory, where they count, and keep them."""
        for block in blocks:
            self._require_resident(block)
            self._known(block.name, "store")
            self._slow[block.name][block.rows, block.columns] = block._values
            self.stored[block.name] += block.words
            self._note("store", block)

    def free(self, *blocks):
        """Drop resident blocks: their numbers become NaN, their words free."""
        for block in blocks:
            self._require_resident(block)
            self._leave(block)
            self._note("free", block)

    def reuse(self, block, name):
        """Give the space and the numbers of a block to the same rectangle of another
        array; moves nothing. Returns the new Block; the old handle is dead. Raises
        ValueError where a slow array of that name is too small or the rectangle
        overlaps a resident block of it.
        """
        self._require_resident(block)
        values = block._values.copy()
        self._leave(block)
        rows, columns = self._ranges(name, block.rows, block.columns)
        renamed = self._enter("reuse", name, rows, columns, values)
        self._note("reuse", renamed)
        return renamed

    # -- Counts

    @property
    def free_words(self):
        return self.capacity_words - self.resident_words

    @property
    def loaded_words(self):
        return self.loaded.total()

    @property
    def stored_words(self):
        return self.stored.total()

    @property
    def moved_words(self):
        return self.loaded_words + self.stored_words

    @property
    def by_array(self):
        """{name: (loaded words, stored words)} of every array that moved."""
        moved = self.loaded | self.stored
        return {name: (self.loaded[name], self.stored[name]) for name in moved}

    def resident(self):
        """The blocks in fast memory, oldest first."""
        return tuple(self._resident)

    def trace(self):
        """What happened, as an object for JSON:

        {"capacity_words": int, "closed_form_words": int or None,
         "arrays": {name: {"rows": int, "columns": int, "slow": bool}}, "steps":
         [{"action": "load" | "allocate" | "compute" | "store" | "free" | "reuse",
                    "block": [name, first row, end row, first column, end column],
                    "words": int, "values": [[number or "inf" or "-inf" or "nan", ...],
                    ...] or None, "resident": [block, ...], "resident_words": int,
                    "loaded_words": int, "stored_words": int}, ...]}

        Ends of ranges are exclusive. ``words`` is what the step moves, 0 unless it
        loads or stores; ``values``, the rows of the block, ``resident`` and the counts
        are those after the step. A block that was freed has no values. Arrays with slow
        = false never leave fast memory; their size is that of the part that was used.
        Raises RuntimeError unless the memory was made with ``trace=True``.
        """
        if self._steps is None:
            raise RuntimeError("TwoLevelMemory records a trace only with trace=True")
        arrays = {
            name: {"rows": array.shape[0], "columns": array.shape[1], "slow": True}
            for name, array in self._slow.items()
        }
        for step in self._steps:
            name, _, row_end, _, column_end = step["block"]
            size = arrays.setdefault(name, {"rows": 0, "columns": 0, "slow": False})
            if not size["slow"]:
                size["rows"] = max(size["rows"], row_end)
                size["columns"] = max(size["columns"], column_end)
        return {
            "capacity_words": self.capacity_words,
            "closed_form_words": self.closed_form_words,
            "arrays": arrays,
            "steps": self._steps,
        }

    def _new_name(self, name):
        if name in self._slow:
            raise ValueError(f"slow memory already has an array {name!r}")

    def _known(self, name, operation):
        if name not in self._slow:
            known = ", ".join(self._slow) or "none"
            lacks = f"slow memory has no array {name!r}; it has {known}"
            raise ValueError(f"{operation}: {lacks}")

    def _ranges(self, name, rows, columns):
        """Two slices with integer ends inside the slow array of that name, if any."""
        height, width = self._slow[name].shape if name in self._slow else (None, None)
        return _range("rows", rows, height), _range("columns", columns, width)

    def _require_resident(self, block):
        if not isinstance(block, Block):
            raise TypeError(f"block: expected a Block, got {type(block).__name__}")
        # Identity, not equality: `==` on a Block compares its numbers.
        if not any(block is other for other in self._resident):
            why = "it was freed, or never came"
            raise RuntimeError(f"{block!r} is not in fast memory: {why}")

    def _enter(self, operation, name, rows, columns, values):
        block = Block(self, name, rows, columns, values)
        for other in self._resident:
            meets = _overlap(other.rows, rows) and _overlap(other.columns, columns)
            if other.name == name and meets:
                held = f"fast memory already holds {other!r} of that array"
                raise ValueError(f"{operation} {block!r}: {held}")
        excess = block.words - self.free_words
        if excess > 0:
            held = f"{self.resident_words} of {self.capacity_words} are held"
            asked = f"{operation} {block!r} asks for {block.words} words: {held}"
            message = f"{asked} and {self.free_words} free, {excess} too few"
            raise CapacityExceeded(message, excess)
        self._resident.append(block)
        self.resident_words += block.words
        self.peak_words = max(self.peak_words, self.resident_words)
        return block

    def _leave(self, block):
        self._resident = [other for other in self._resident if other is not block]
        self.resident_words -= block.words
        block._values.fill(np.nan)  # a view that was kept gives NaN from now on

    def _note(self, action, block):
        if self._steps is not None:
            self._steps.append({
                "action": action,
                "block": _rectangle(block),
                "words": block.words if action in ("load", "store") else 0,
                "values": None if action == "free" else _numbers(block),
                "resident": [_rectangle(other) for other in self._resident],
                "resident_words": self.resident_words,
                "loaded_words": self.loaded_words,
                "stored_words": self.stored_words,
            })  # fmt: skip


def _rectangle(block):
    rows, columns = block.rows, block.columns
    return [block.name, rows.start, rows.stop, columns.start, columns.stop]


def _numbers(block):
    """The rows of a block for JSON, which knows neither infinity nor NaN."""
    rows = block._values.tolist()
    return [[x if math.isfinite(x) else str(x) for x in row] for row in rows]


def _overlap(a, b):
    return max(a.start, b.start) < min(a.stop, b.stop)


def _range(name, part, size):
    """A slice with integer ends inside [0, size]; None asks for an end of its own."""
    if part is None and size is not None:
        return slice(0, size)
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise TypeError(f"{name}: expected a slice with step 1, got {part!r}")
    start, stop = part.start or 0, size if part.stop is None else part.stop
    if stop is None or not 0 <= start < stop or (size is not None and stop > size):
        got = f"{part.start}:{part.stop}"
        raise ValueError(f"{name}: expected a non-empty range in 0:{size}, got {got}")
    return slice(int(start), int(stop))
