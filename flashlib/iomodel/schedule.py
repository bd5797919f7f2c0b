"""Schedules: programs on the two-level memory that carry their own closed forms.

    run = row_block_forward(q, k, v, capacity_words=200, B_r=2, B_c=3)
    run["O"], run.memory.moved_words, run.memory.peak_words
    row_block_forward.words(T, d, B_r), row_block_forward.peak(T, d, B_r, B_c)

A schedule works on handles of resident blocks (:mod:`flashlib.iomodel.memory`). It sees
its inputs only through ``load``; every result is zeroed, accumulated and stored; row
statistics are blocks and counted.
"""

import bisect
import functools
import inspect
import math
from typing import NamedTuple

import numpy as np

from flashlib.plain_checks import check_count, wrong

from .forms import check_sizes, formula
from .memory import TwoLevelMemory

ONE = slice(0, 1)  # the only column of a row statistic


# -- The decorator


class Run(NamedTuple):
    """What a schedule leaves: its stored arrays, and the memory with its counts."""

    arrays: dict
    memory: TwoLevelMemory

    def __getitem__(self, name):
        return self.arrays[name]


def schedule(inputs, results, words=None, peak=None, step=None):
    """Make a schedule of a body that receives the memory, and the sizes and options
    that it names.

    inputs, results     {array: "rows columns"} in the letters of the sizes, such as
                        {"Q": "T d"}; the inputs become the positional arguments
    words, peak, step   closed forms, functions of sizes: the words that pass between
                        the memories in both directions, the fast memory that the
                        schedule needs, and the (loaded, stored) words of one inner step

    The schedule takes its inputs, real matrices, and the keywords ``capacity_words``,
    ``trace`` (keep ``run.memory.trace()``), its block sizes and, where it has scores,
    ``scale`` (1/sqrt(d) by default). It returns a :class:`Run`. Its closed forms are
    ``words``, ``peak`` and ``step``; ``rows(T, d, capacity_words, B_c=1)`` is the most
    rows B_r of a block that fit.

    Raises CapacityExceeded where the schedule does not fit, ValueError for an array
    that does not match its letters, TypeError for a wrong number of arrays or wrong
    options.
    """

    def decorate(body):
        wanted = list(inspect.signature(body).parameters)[1:]

        @functools.wraps(body)
        def run(*arrays, capacity_words, trace=False, **options):
            if len(arrays) != len(inputs):
                expected = f"{body.__name__}: expected {', '.join(inputs)}"
                raise TypeError(f"{expected}, got {len(arrays)} arrays")
            memory = TwoLevelMemory(capacity_words, trace=trace)
            sizes = _place(memory, inputs, arrays)
            for name, letters in results.items():
                memory.reserve(name, *(sizes[letter] for letter in letters.split()))
            if "scale" in wanted and options.get("scale") is None:
                options["scale"] = 1.0 / math.sqrt(sizes["d"])
            expected = [name for name in wanted if name not in sizes]
            if sorted(options) != sorted(expected):
                said = f"{body.__name__}: expected the options {expected}"
                raise TypeError(f"{said}, got {sorted(options)}")
            known = sizes | options
            body(memory, **{name: known[name] for name in wanted})
            if words is not None:
                memory.closed_form_words = _words_of_run(words, sizes, options)
            return Run({name: memory.array(name) for name in results}, memory)

        def rows(T, d, capacity_words, B_c=1, **more):
            check_sizes(capacity_words=capacity_words)
            need = functools.partial(run.peak, T, d, B_c=B_c, **more)
            fitting = bisect.bisect_right(
                range(1, T + 1), capacity_words, key=lambda B_r: need(B_r=B_r)
            )
            if not fitting:
                expected = f"at least {need(B_r=1)} for {body.__name__}"
                raise wrong("capacity_words", expected, capacity_words)
            return fitting

        run.words, run.peak, run.step = (
            form and formula(form) for form in (words, peak, step)
        )
        run.rows = rows
        return run

    return decorate


def _place(memory, inputs, arrays):
    """Put the inputs of a schedule into slow memory; returns the sizes by letter."""
    sizes = {"1": 1}
    for (name, letters), array in zip(inputs.items(), arrays, strict=True):
        array = np.asarray(array)
        if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "fiu":
            got = f"{array.dtype} of shape {array.shape}"
            raise ValueError(f"{name}: expected a real matrix, not empty, got {got}")
        for letter, size in zip(letters.split(), array.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                expected = f"[{letters}] with {letter} = {sizes[letter]}"
                raise ValueError(f"{name}: expected {expected}, got {array.shape}")
        memory.place(name, array)
    return sizes


def _words_of_run(words, sizes, options):
    """The closed form of a run. A block larger than the matrix is the whole matrix."""
    known = dict(sizes)
    for name, size in options.items():
        known[name] = size if name == "scale" else min(int(size), sizes.get("T", size))
    return words(**{name: known[name] for name in inspect.signature(words).parameters})


# -- What the bodies share


def blocks(size, step):
    """The ranges 0:step, step:2 step, ... that cover ``size``, as slices; the last one
    may be shorter.

    Raises TypeError or ValueError for a step that is not an integer of at least 1.
    """
    check_count("step", step)
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def row_max(x):
    """The largest entry of each row, as a column."""
    return np.maximum.reduce(x, axis=1, keepdims=True)


def row_sum(x):
    """The sum of each row, as a column."""
    return np.add.reduce(x, axis=1, keepdims=True)


def accumulator(memory, name, rows, first, start=0.0):
    """A block that slow memory keeps: ``start`` the first time, loaded afterwards."""
    if not first:
        return memory.load(name, rows)
    block = memory.allocate(name, rows)
    block[:] = start
    return block


def softmax_in_place(memory, s, I):
    """Turn whole rows of scores into probabilities, a statistic at a time."""
    m = memory.allocate("m", I, ONE)
    m[:] = row_max(s)
    s[:] = np.exp(s - m)
    memory.free(m)
    l = memory.allocate("l", I, ONE)
    l[:] = row_sum(s)
    s /= l
    memory.free(l)
