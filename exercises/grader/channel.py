"""The trusted end of a worker's channel.

Unreviewed code can write to the channel, so nothing that arrives decides about time,
memory or the order of events. The trusted process knows what it has asked for, and
keeps the deadlines, the number of messages and their sizes itself. Whatever does not
fit ends this worker and nothing else.
"""

import contextlib
import json
import math
import os
import select
import struct
import time
from typing import NamedTuple

import numpy as np

from exercises.grader import sandbox

START_SECONDS = 60.0  # for Python and PyTorch to start on a busy machine
# The seconds of a cell or case are measured by the worker as CPU time. By the clock it
# may take this many times as long, and this much more, before it is stopped.
PATIENCE = 3.0
GRACE_SECONDS = 3.0
WATCH_SECONDS = 0.5
LARGEST_TOTAL = 128 * 2**20  # of all arrays of one worker
LARGEST_HEADER = 2**20
LARGEST_PRINT = 16 * 2**20
LONGEST_TEXT = 20_000
DTYPES = {f"<{kind}{size}" for kind in "iu" for size in (2, 4, 8)} | {
    "|b1", "|i1", "|u1", "<f2", "<f4", "<f8",
}  # fmt: skip
# What feedback may call a value; the name of any other type is the student's own text.
TYPES = "bytes", "complex", "dict", "function", "list", "set", "tuple"


class Broken(Exception):
    """The worker did something that no honest worker does; the text is for feedback."""


NO_RESULT = "it sent something that is no result"


class Asked(NamedTuple):
    """What one worker has to do, in this order: {task: [the message of each case]},
    {task: seconds of a case}, and the seconds of a cell.
    """

    cases: dict
    seconds: dict
    cell_seconds: float

    def deadline(self, task):
        """The moment until which something that begins now may take."""
        seconds = max(self.seconds[task], self.cell_seconds)
        return time.monotonic() + PATIENCE * seconds + GRACE_SECONDS


class Outcome(NamedTuple):
    """What one worker has sent before it ended."""

    problems: dict  # {task: Problem or None of its cells}
    results: dict  # {(task, number of the case): (values, Problem or None, operations)}
    culprit: str | None  # the task at work when the worker was stopped or died
    reason: str | None  # why it was stopped, None where it came to its end


class Problem(NamedTuple):
    """What went wrong in a cell or call, as the worker describes it."""

    type: str
    line: int | None
    name: str | None


class Other(NamedTuple):
    """A value that is not a number, a text or an array."""

    type_name: str


class Reader:
    """Messages from a socket, to which ``pending`` is written, up to a deadline.

    output    the pipe of what the worker prints
    watch     called twice a second; it raises Broken or Immodest to end it all
    """

    def __init__(self, end, output, watch=lambda: None):
        self.end, self.output, self.buffer = end, output, bytearray()
        self.pending, self.watch, self.watched = b"", watch, 0.0
        self.printed, self.first, self.total = 0, b"", 0
        end.setblocking(False)
        os.set_blocking(output.fileno(), False)

    def fill(self, deadline):
        """Read what there is. Raises TimeoutError, EOFError or ConnectionError at the
        end of the channel, and Broken for floods.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if time.monotonic() - self.watched > WATCH_SECONDS:
            self.watch()
            self.watched = time.monotonic()
        sources = [self.end] + ([] if self.output.closed else [self.output])
        sinks = [self.end] if self.pending else []
        ready, free, _ = select.select(sources, sinks, [], min(left, WATCH_SECONDS))
        if free:
            with contextlib.suppress(ConnectionError):  # what it sent is read first
                self.pending = self.pending[self.end.send(self.pending) :]
        if self.output in ready:
            part = self.output.read(2**20)
            if part == b"":
                self.output.close()
            self.first = (self.first + (part or b""))[:2000]
            self.printed += len(part or b"")
            if self.printed > LARGEST_PRINT:
                raise Broken(f"it printed more than {LARGEST_PRINT >> 20} MiB")
        if self.end in ready:
            part = self.end.recv(2**20)
            if not part:
                raise EOFError
            self.buffer += part

    def said(self):
        """The beginning of what the worker printed."""
        return self.first.decode(errors="replace").strip() or "nothing"

    def take(self, size, deadline):
        """The next ``size`` bytes."""
        while len(self.buffer) < size:
            self.fill(deadline)
        part = bytes(self.buffer[:size])
        del self.buffer[:size]
        return part

    def message(self, deadline):
        """The next (header, values); raises Broken."""
        (size,) = struct.unpack(">I", self.take(4, deadline))
        if size > LARGEST_HEADER:
            raise Broken(NO_RESULT)
        header = json.loads(self.take(size, deadline))
        return header, [self.value(x, deadline) for x in header["values"]]

    def value(self, descriptor, deadline):
        """The value of one descriptor."""
        if descriptor["kind"] == "plain":
            return plain(descriptor["value"])
        if descriptor["kind"] == "other":
            known = str(descriptor["type"]) in TYPES
            return Other(descriptor["type"] if known else "another type")
        name, shape = descriptor["dtype"], tuple(descriptor["shape"])
        sizes = all(type(n) is int and 0 <= n < 2**31 for n in shape)
        if name not in DTYPES or not sizes or len(shape) > 8:
            raise Broken(NO_RESULT)
        size = np.dtype(name).itemsize * math.prod(shape)
        self.total += size
        if self.total > LARGEST_TOTAL:
            raise Broken(f"it sent more than {LARGEST_TOTAL >> 20} MiB")
        content = self.take(size, deadline)
        if name == "|b1":  # any byte but zero is true
            return np.frombuffer(content, np.uint8).reshape(shape) != 0
        return np.frombuffer(content, name).reshape(shape)


def plain(value):
    """A number, text or None that a worker sent; raises Broken for anything else."""
    if isinstance(value, str):
        return value[:LONGEST_TEXT].encode(errors="replace").decode()
    large = isinstance(value, int) and abs(value) > 2**63
    if large or not isinstance(value, bool | int | float | None):
        raise Broken(NO_RESULT)
    return value


def problem_of(header):
    """The Problem of a message, None where nothing went wrong."""
    found = header["problem"]
    if found is None:
        return None
    line, name = found["line"], found["name"]
    known = type(line) is int and 0 < line < 10_000
    name = name if isinstance(name, str) else None
    return Problem(str(found["type"]), line if known else None, name)


def listen(reader, asked, until):
    """The Outcome of a worker; never raises, whatever it sends.

    The inputs of a case are sent after the result of the one before.

    until: the moment at which it is stopped at the latest
    """
    problems, results, culprit, reason = {}, {}, None, None
    try:
        reader.message(min(time.monotonic() + START_SECONDS, until))
        for culprit, cases in asked.cases.items():
            header, _ = reader.message(min(asked.deadline(culprit), until))
            problems[culprit] = problem_of(header)
            for number, inputs in enumerate(cases):
                reader.pending += inputs
                header, values = reader.message(min(asked.deadline(culprit), until))
                counts, problem = header["operations"].items(), problem_of(header)
                operations = {str(x)[:200]: n for x, n in counts if type(n) is int}
                results[culprit, number] = values, problem, operations
                if problem and problem.type == "OutOfTime":
                    break  # the other cases would take as long
    except (EOFError, ConnectionError):
        reason = "the process ended before its work was done"
    except TimeoutError:
        reason = "it did not end within its time"
    except sandbox.Immodest as much:
        reason = str(much)
    except Exception as error:  # JSON of every shape, and text that is not JSON
        reason = str(error) if isinstance(error, Broken) else NO_RESULT
        # Its earlier results of this task may be forged too.
        results = {case: x for case, x in results.items() if case[0] != culprit}
    return Outcome(problems, results, culprit, reason)
