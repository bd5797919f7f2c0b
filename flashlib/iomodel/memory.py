"""A machine with a small fast memory and a large slow one, which counts every word that passes between them.

    memory = TwoLevelMemory(capacity_words=64)
    memory.place("A", a)                       # in slow memory when the clock starts
    block = memory.load("A", rows=slice(0, 4))
    block += 1.0
    memory.store(block)
    memory.free(block)
    memory.loaded_words, memory.stored_words, memory.peak_words

A word is one number, whatever its format. Arithmetic is free: it is not what this machine is for. What lives
from one statement to the next must be a block that fast memory holds, so that it is counted; a temporary
inside one statement is not, because each of its elements can go into the result as soon as it exists.

Values are float64. Chapter *The memory bottleneck*, ``eq-bottleneck-capacity``.
"""

import math
from collections import Counter

import numpy as np


class CapacityExceeded(ValueError):
    """More words were asked for than are free; ``excess_words`` says by how many."""

    def __init__(self, message, excess_words):
        super().__init__(message)
        self.excess_words = excess_words


class Block(np.lib.mixins.NDArrayOperatorsMixin):
    """A handle of a rectangle of a named array while it lies in fast memory.

    Arithmetic, comparisons and numpy's ufuncs work on it and give plain arrays; ``block[...]`` reads a part,
    ``block[...] = x`` and ``block += x`` write. Once the block is freed its numbers are NaN and every use of
    the handle raises RuntimeError.
    """

    def __init__(self, memory, name, rows, columns, values):
        self.name, self.rows, self.columns = name, rows, columns
        self._memory, self._values = memory, values
        self.words = values.size

    def __repr__(self):
        return f"{self.name}[{self.rows.start}:{self.rows.stop}, {self.columns.start}:{self.columns.stop}]"

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
        if not out:
            return result
        target = out[0]  # block += x comes here
        target[...] = result
        return target


class TwoLevelMemory:
    """Slow memory of named two-dimensional arrays and a fast memory of ``capacity_words`` words.

    capacity_words      words that fast memory holds, an integer of at least 1
    trace               whether to keep what happens, for ``trace()``

    Counts: ``loaded_words`` and ``stored_words`` pass to and from fast memory, ``moved_words`` is their sum,
    ``by_array`` has both for each array; ``resident_words`` lie in fast memory now, ``peak_words`` is the
    most that ever did.
    """

    def __init__(self, capacity_words, *, trace=False):
        if isinstance(capacity_words, bool) or not isinstance(capacity_words, (int, np.integer)):
            raise TypeError(f"capacity_words must be an integer, got {type(capacity_words).__name__}")
        if capacity_words < 1:
            raise ValueError(f"capacity_words must be at least 1, got {capacity_words}")
        self.capacity_words = int(capacity_words)
        self.resident_words = self.peak_words = 0
        self.loaded, self.stored = Counter(), Counter()
        self._slow, self._resident = {}, []
        self._steps = [] if trace else None
        self._closed = False

    # ------------------------------------------------------------------------------------------------
    # Slow memory

    def place(self, name, array):
        """Put a copy of array [rows, columns] into slow memory before the schedule starts; not counted.

        ValueError for an array that is not a matrix or is empty, and for a name that is taken.
        """
        array = np.array(array, dtype=np.float64)
        if array.ndim != 2 or array.size == 0:
            raise ValueError(
                f"place({name!r}): array must have two dimensions and not be empty, got shape {array.shape}"
            )
        self._new_name(name)
        self._slow[name] = array

    def reserve(self, name, rows, columns):
        """Make room in slow memory for an array that will be stored; it is NaN until then.

        ValueError for a size below 1 and for a name that is taken.
        """
        self._new_name(name)
        for what, size in (("rows", rows), ("columns", columns)):
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise ValueError(f"reserve({name!r}): {what} must be an integer of at least 1, got {size!r}")
        self._slow[name] = np.full((rows, columns), np.nan)

    def array(self, name):
        """What slow memory holds under this name, as a copy.

        For the caller, after the schedule: fast memory must be empty, and from then on nothing can be loaded.
        RuntimeError while blocks are resident, ValueError for an unknown name.
        """
        if self._resident:
            raise RuntimeError(f"array({name!r}): fast memory still holds {self._resident}")
        self._known(name, "array")
        self._closed = True
        return self._slow[name].copy()

    # ------------------------------------------------------------------------------------------------
    # The four operations of a schedule, and the reuse of space

    def load(self, name, rows=None, columns=None):
        """Copy a rectangle of a slow array into fast memory; counts its words. Returns its Block.

        rows, columns: slices with step 1 inside the array; None means all. ValueError for an unknown array, a
        range outside it, or a rectangle that overlaps a resident block of the array; CapacityExceeded where
        it does not fit; RuntimeError after ``array``.
        """
        if self._closed:
            raise RuntimeError(f"load({name!r}): the result has been taken out, the schedule is over")
        self._known(name, "load")
        source = self._slow[name]
        rows, columns = _range("rows", rows, source.shape[0]), _range("columns", columns, source.shape[1])
        block = self._enter("load", name, rows, columns, source[rows, columns].copy())
        self.loaded[name] += block.words
        self._note("load", block)
        return block

    def allocate(self, name, rows=None, columns=None):
        """Room in fast memory for a rectangle, filled with NaN; moves nothing. Returns its Block.

        The array may exist in slow memory or not; where it does not, both ranges must be given and the block
        can never be stored. Errors as for ``load``.
        """
        height, width = self._slow[name].shape if name in self._slow else (None, None)
        rows, columns = _range("rows", rows, height), _range("columns", columns, width)
        values = np.full((rows.stop - rows.start, columns.stop - columns.start), np.nan)
        block = self._enter("allocate", name, rows, columns, values)
        self._note("allocate", block)
        return block

    def store(self, block):
        """Copy a resident block to its place in slow memory; counts its words. It stays resident."""
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
        """Give the space and the numbers of a block to the same rectangle of another array: "overwrites".

        Returns the new Block; the old handle is dead. Moves nothing. ValueError where a slow array of that
        name is too small or the rectangle overlaps a resident block of it.
        """
        self._require_resident(block)
        values = block._values.copy()
        self._leave(block)
        if name in self._slow:
            height, width = self._slow[name].shape
            _range("rows", block.rows, height), _range("columns", block.columns, width)
        renamed = self._enter("reuse", name, block.rows, block.columns, values)
        self._note("reuse", renamed)
        return renamed

    # ------------------------------------------------------------------------------------------------
    # Counts

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
        return {name: (self.loaded[name], self.stored[name]) for name in {**self.loaded, **self.stored}}

    def resident(self):
        """The blocks in fast memory, in the order in which they came."""
        return tuple(self._resident)

    def trace(self):
        """What happened, as an object for JSON; RuntimeError unless it was asked for.

        {"capacity_words": int,
         "arrays": {name: {"rows": int, "columns": int, "slow": bool}},
         "steps": [{"action": "load" | "allocate" | "compute" | "store" | "free" | "reuse",
                    "block": [name, first row, end row, first column, end column], "words": int,
                    "values": [[number or "inf" or "-inf" or "nan", ...], ...] or None,
                    "resident": [block, ...], "resident_words": int, "loaded_words": int,
                    "stored_words": int}, ...]}

        Ends of ranges are exclusive. ``words`` is what the step moves, 0 unless it loads or stores;
        ``values``, the rows of the block, ``resident`` and the counts are those after the step. A block that
        was freed has no values. Arrays with slow = false never leave fast memory; their size is that of the
        part that was used.
        """
        if self._steps is None:
            raise RuntimeError("trace(): this memory keeps no trace; make it with trace=True")
        arrays = {
            name: {"rows": array.shape[0], "columns": array.shape[1], "slow": True}
            for name, array in self._slow.items()
        }
        for step in self._steps:
            name, _, row_end, _, column_end = step["block"]
            size = arrays.setdefault(name, {"rows": 0, "columns": 0, "slow": False})
            if not size["slow"]:
                size["rows"], size["columns"] = max(size["rows"], row_end), max(size["columns"], column_end)
        return {"capacity_words": self.capacity_words, "arrays": arrays, "steps": self._steps}

    # ------------------------------------------------------------------------------------------------

    def _new_name(self, name):
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of an array must be a text, got {name!r}")
        if name in self._slow:
            raise ValueError(f"slow memory already has an array {name!r}")

    def _known(self, name, operation):
        if name not in self._slow:
            known = ", ".join(self._slow) or "none"
            raise ValueError(f"{operation}: slow memory has no array {name!r}; it has {known}")

    def _require_resident(self, block):
        if not isinstance(block, Block):
            raise TypeError(
                f"expected a Block that this memory loaded or allocated, got {type(block).__name__}"
            )
        # Identity, not equality: `==` on a Block compares its numbers.
        if not any(block is other for other in self._resident):
            raise RuntimeError(f"{block!r} is not in fast memory: it was freed, or never came")

    def _enter(self, operation, name, rows, columns, values):
        block = Block(self, name, rows, columns, values)
        for other in self._resident:
            if other.name == name and _overlap(other.rows, rows) and _overlap(other.columns, columns):
                raise ValueError(f"{operation} {block!r}: fast memory already holds {other!r} of that array")
        excess = block.words - self.free_words
        if excess > 0:
            raise CapacityExceeded(
                f"{operation} {block!r} asks for {block.words} words: {self.resident_words} of "
                f"{self.capacity_words} are held and {self.free_words} free, {excess} too few",
                excess,
            )
        self._resident.append(block)
        self.resident_words += block.words
        self.peak_words = max(self.peak_words, self.resident_words)
        return block

    def _leave(self, block):
        self._resident = [other for other in self._resident if other is not block]
        self.resident_words -= block.words
        block._values.fill(np.nan)  # whoever kept a view of it computes NaN from now on

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
    return [block.name, block.rows.start, block.rows.stop, block.columns.start, block.columns.stop]


def _numbers(block):
    """The rows of a block for JSON, which knows neither infinity nor NaN."""
    return [[x if math.isfinite(x) else str(x) for x in row] for row in block._values.tolist()]


def _overlap(a, b):
    return max(a.start, b.start) < min(a.stop, b.stop)


def _range(what, part, size):
    """A slice as one with integer ends inside [0, size]; size None: nothing but the slice says how long."""
    if part is None and size is not None:
        return slice(0, size)
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise TypeError(f"{what} must be a slice with step 1, got {part!r}")
    start, stop = (0 if part.start is None else part.start), (size if part.stop is None else part.stop)
    if stop is None or not 0 <= start < stop or (size is not None and stop > size):
        raise ValueError(f"{what} must be a non-empty range inside 0:{size}, got {part.start}:{part.stop}")
    return slice(int(start), int(stop))
