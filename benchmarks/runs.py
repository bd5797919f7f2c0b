"""A record that is measured task by task, and that a later run continues.

A task is done when the record has all of its cells. A run with a path writes its record
after each task. A later run drops the failed cells of that record, so it measures and
reports them again, and then measures what the record lacks.
"""

import json
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks import passes, timing
from flashlib.records import KINDS

TOO_LONG = "not done after"  # how the error of a method that hangs begins


class Task(NamedTuple):
    """Cells of a record that are measured together."""

    part: str  # the list of the record
    names: list  # dicts of fields: each names a cell, or all cells that have them
    measure: Callable  # returns the cells

    def covers(self, cell):
        return any(name.items() <= cell.items() for name in self.names)

    def done(self, record):
        """Whether the record has a cell for every name."""
        cells = record[self.part]
        return all(any(n.items() <= cell.items() for cell in cells) for n in self.names)


def is_failure(cell):
    """Whether a cell has an error that is a fault of ours, and that another try may
    mend: rivals may refuse a shape, and memory may not suffice.
    """
    if "error" not in cell or cell.get("method") in passes.OTHERS:
        return False
    return not cell["error"].startswith(("OutOfMemory", TOO_LONG))


def started(fresh, path=None):
    """The record that a run begins with: fresh, or what an earlier run has left at the
    path, without failures. In fresh, ``ceilings`` are None where a new record measures
    them. If the earlier run was made at another commit, each of its cells gets that
    commit, and the date.

    Raises ValueError where the earlier run had another GPU, other versions or other
    sizes, or measured in another way.
    """
    fresh = {**fresh, **{part: [] for part in KINDS[fresh["pass"]]}}
    if path is None or not path.is_file():
        rates = {"ceilings": timing.ceilings()} if "ceilings" in fresh else {}
        return fresh | rates
    earlier = json.loads(path.read_text("utf-8"))
    said = {name: earlier[name] for name in ("date", "commit")}
    same, record = said["commit"] == fresh["commit"], {**earlier}
    for name, value in fresh.items():
        if isinstance(value, list):
            cells = [cell for cell in earlier.get(name, []) if not is_failure(cell)]
            record[name] = cells if same else [cell | said | cell for cell in cells]
        elif name in said:
            record[name] = earlier[name] if same else value
        elif name != "ceilings" and value != (got := earlier.get(name)):
            text = f"expected {name} {value}, got {got}; remove it to start anew"
            raise ValueError(f"{path.name}: {text}")
    return record


class Run:
    """One run: its record, and lines that say which cells of ours have failed.

    say takes a line of text. No task begins when time.monotonic() is beyond end.
    """

    def __init__(self, fresh, say, path=None, end=math.inf):
        self.record, self.failures = started(fresh, path), []
        self.say, self.path, self.end = say, path, end

    def left(self, tasks):
        """The tasks that are not done."""
        return [task for task in tasks if not task.done(self.record)]

    def measure(self, tasks):
        """Measure the tasks in turn until the time is up."""
        for task in tasks:
            if time.monotonic() > self.end:
                break
            self.keep(task, task.measure())
            timing.release()

    def keep(self, task, cells):
        """Put the cells of a task in place of those that the record has of it."""
        others = [cell for cell in self.record[task.part] if not task.covers(cell)]
        self.record[task.part] = others + cells
        if self.path is not None:
            timing.write(self.record, self.path)
        kind = KINDS[self.record["pass"]][task.part]
        for cell in cells:
            values = [(field, cell[field]) for field in kind.fields if field in cell]
            words = [x if isinstance(x, str) else f"{f} = {x}" for f, x in values]
            text = cell.get("error") or f"{cell[kind.value]} {kind.value}"
            line = f"{', '.join(words)}: {text}"
            self.say(line)
            if is_failure(cell):
                self.failures.append(line)

    def result(self, tasks):
        """(the record, lines that say what of ours has failed and what is left)."""
        if left := len(self.left(tasks)):
            self.failures.append(f"{left} of {len(tasks)} tasks are left; run it again")
        return self.record, self.failures
