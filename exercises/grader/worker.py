"""Inside the sandbox: execute the cells, call what they define, send plain arrays.

A message is the length of a JSON header (four bytes), the header, and the bytes of its
arrays. Nothing is pickled, and nothing that a cell prints gets into the channel.

This file runs in the same process as unreviewed code. The inputs of a case arrive once
the cells have run and the case before is done; no expected value ever does. It judges
nothing, and a submission that breaks it gets no marks for what it did not send.
"""

import contextlib
import ctypes
import functools
import json
import math
import os
import signal
import socket
import struct
import sys
import traceback
import types
from typing import NamedTuple

from . import frontend, guard, rules

LONGEST_TEXT = 20_000
PR_SET_DUMPABLE = 4


class Channel:
    """Messages to the process that asks, and from it."""

    def __init__(self, end):
        """end: one of a pair of sockets"""
        self.file = end.makefile("rwb")
        end.close()  # together with the file

    def send(self, header, values=()):
        self.file.write(packed(header, values))
        self.file.flush()

    def parts(self):
        """The next (header, values), each of these a Plain."""
        (size,) = struct.unpack(">I", self.file.read(4))
        header = json.loads(self.file.read(size))
        return header, [Plain(x, self.file.read(size_of(x))) for x in header["values"]]

    def receive(self):
        """The next (header, values)."""
        header, parts = self.parts()
        return header, [part.value() for part in parts]


def size_of(descriptor):
    """The bytes of an array, as the process that grades counts them: none for others.
    A process of a task could hide messages for other tasks in more.
    """
    if descriptor["kind"] in ("plain", "other"):
        return 0
    return math.prod(descriptor["shape"]) * int(descriptor["dtype"][2:])


def packed(header, values):
    """A message as bytes."""
    pairs = [plain(value) for value in values]
    header = {**header, "values": [descriptor for descriptor, _ in pairs]}
    text = json.dumps(header).encode()
    contents = [content for _, content in pairs]
    return b"".join([struct.pack(">I", len(text)), text, *contents])


class OutOfTime(Exception):
    """The cell or the call has used up its seconds."""


class Elsewhere(Exception):
    """What went wrong in the process of a rank, as it was described there."""


def _ring(number, frame):
    raise OutOfTime


# What an exception holds, whatever a student's class says about these attributes:
# nothing guards the code of a property when an exception is described.
TRACEBACK, CAUSE, ARGUMENTS = (
    vars(BaseException)[name].__get__ for name in ("__traceback__", "__cause__", "args")
)
NAME = NameError.name.__get__


def described(error):
    """What an exception may tell: its type, the line in the student's cell, whether a
    kernel left its tensors. Not its text: a cell could write what it was called with
    into it, and the student reads feedback.
    """
    line = error.line if type(error) in (rules.Refused, frontend.NotTriton) else None
    for _ in range(8):  # a cell may raise what is its own cause
        for frame in traceback.extract_tb(TRACEBACK(error)):
            file = frame.filename
            if file.startswith("<") and not file.startswith(("<given-", "<frozen")):
                line = frame.lineno
        if type(error).__name__ != "InterpreterError" or CAUSE(error) is None:
            break
        error = CAUSE(error)  # in the kernel, or in one that it calls
    missing = NAME(error) if type(error) in (NameError, UnboundLocalError) else None
    text, kind = ARGUMENTS(error)[0] if ARGUMENTS(error) else None, type(error).__name__
    if type(error) is IndexError and type(text) is str:
        kind = "outside" if "out of range: element" in text else kind
    missing = missing if type(missing) is str else None
    return {"type": kind, "line": line, "name": missing}


def limited(seconds, action):
    """(result, what went wrong or None) of an action; nothing is raised."""
    result = problem = None
    # Seconds of this process, not of the clock: a busy machine takes no marks away. The
    # trusted process looks at the clock, and stops what only waits.
    signal.signal(signal.SIGPROF, _ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        result = action()
    except BaseException as error:  # SystemExit of a cell included
        problem = error.args[0] if type(error) is Elsewhere else described(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return result, problem


class Plain(NamedTuple):
    """A value as it is sent: its descriptor and the bytes of its array."""

    descriptor: dict
    content: bytes = b""

    def value(self):
        """A number or text, a tensor for an array, or an object of no use."""
        if self.descriptor["kind"] != "array":
            return self.descriptor.get("value", object())
        import numpy as np
        import torch

        array = np.frombuffer(self.content, self.descriptor["dtype"])
        return torch.from_numpy(array.reshape(self.descriptor["shape"]).copy())


def plain(value):
    """The Plain of one value; what is neither number, text nor array is only named.

    A student's result becomes plain while the guard watches: its class may hold code.
    """
    if type(value) is Plain:
        return value
    import numpy as np

    torch = sys.modules.get("torch")  # what has not been imported has made no tensor
    if type(value) in (bool, int, float, str) or value is None:
        if type(value) is int and abs(value) > 2**63:
            return Plain({"kind": "other", "type": "an integer beyond 64 bits"})
        value = value[:LONGEST_TEXT] if type(value) is str else value
        return Plain({"kind": "plain", "value": value})
    if torch and type(value) in (torch.Tensor, torch.nn.Parameter):
        # An instance may have a ``detach`` of its own; what is detached has nothing.
        value = torch.Tensor.detach(value).cpu()
        if value.dtype == torch.bfloat16:
            value = value.float()
        value = value.resolve_conj().resolve_neg().numpy()
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if type(value) is np.ndarray and value.dtype.kind in "biuf" and value.itemsize <= 8:
        kind = {"kind": "array", "dtype": value.dtype.newbyteorder("<").str}
        return Plain(kind | {"shape": value.shape}, value.tobytes())
    return Plain({"kind": "other", "type": type(value).__name__})


class Died(Exception):
    """A task's process has ended before its work was done."""


def begun(work, *closed):
    """(number, Channel) of a new process that does some work. The work gets the other
    end of this channel; what is closed is closed there.
    """
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for end in (here, *closed):
                end.close()
            work(Channel(there))
            code = 0
        finally:
            os._exit(code)
    there.close()
    return child, Channel(here)


def ended(child):
    """Wait for a process. Raises Died where it does not come to its end."""
    _, status = os.waitpid(child, 0)
    if status:
        raise Died


def given_space(cells, seconds):
    """(namespace, {name: problem}) of the instructor's cells, which run once, first."""
    space, problems = {"__name__": "given"}, {}
    for cell, source in cells.items():
        name = f"<{cell}>"
        guard.remember(name, source)

        def run(name=name, source=source):
            exec(compile(source, name, "exec"), space)

        _, problems[cell] = limited(seconds, run)
    return space, problems


def defined(task, cells, given, isolation, front=None, seconds=None):
    """(values of the names that a task asks for, what its own cell raised)."""
    needed = [(f"<{name}>", cells[name]) for name in task["needs"]]
    if task["kernel"]:

        def compiled():
            rule = given, task["known"], task["forbidden"]
            return frontend.checked(front, frontend.Cells(needed, *rule))

        made, problem = limited(seconds, compiled)
        return made or {}, problem
    space, problem = isolation.namespace(given), None
    for name, source in needed:
        run = functools.partial(isolation.run, source, name, space)
        _, problem = limited(seconds, run)
    return {name: space[name] for name in task["asks"] if name in space}, problem


def work_on(task, job, given, front, channel):
    """Run the cells that a task needs, then its cases; send what comes back."""
    isolation, seconds = guard.Guard(task["forbidden"]), job["cell_seconds"]
    if not task["kernel"]:  # a kernel cell leaves nothing behind that runs
        guard.arm()
    made, problem = defined(task, job["cells"], given, isolation, front, seconds)
    channel.send({"problem": problem})
    given |= made
    if task["ranks"]:
        given[task["ranks"]] = apart(given[task["ranks"]], isolation, task["seconds"])
    for _ in range(task["cases"]):
        header, values = channel.receive()
        arguments = dict(zip(header["names"], values, strict=True))
        isolation.operations.clear()

        def call(arguments=arguments):
            with watched(task, isolation, arguments.values()):
                if task["call"] is None:  # the same values, judged in several ways
                    return [plain(made.get(x)) for x in task["reads"]]
                for name in task["asks"]:
                    if name not in made:
                        raise NameError(f"{name} is not defined", name=name)
                called = given[task["call"]]
                # What a student calls the parameters is free; a launcher has options.
                if task["call"] in task["asks"]:
                    return listed(called(*arguments.values()))
                return listed(called(**arguments))

        result, problem = limited(task["seconds"], call)
        told = {"problem": problem, "operations": isolation.operations}
        channel.send(told, result or ())
        if problem is not None and problem["type"] == "OutOfTime":
            break


def relayed(task, work, channel, front=None):
    """Do a task's work in a process of its own, so that no task can change what another
    one uses. Its channel leads here, so it can answer for no other task.
    """
    others = [channel] if front is None or task["kernel"] else [channel, front]
    child, inner = begun(work, *(other.file for other in others))
    channel.send(*inner.parts())
    for _ in range(task["cases"]):
        inner.send(*channel.parts())
        header, values = inner.parts()
        channel.send(header, values)
        if header["problem"] and header["problem"]["type"] == "OutOfTime":
            break  # the other cases would take as long
    ended(child)


LAZY = types.GeneratorType, map, zip  # their code runs when they are read


def listed(result):
    """What a call has returned, as a list of Plain."""
    values = result if isinstance(result, (tuple, list, *LAZY)) else [result]
    return [plain(value) for value in values]


@contextlib.contextmanager
def watched(task, isolation, arguments=()):
    """The context of one call: what it uses is added to the operations of the guard,
    and every access of a kernel is inside of its tensors.
    """
    torch = sys.modules.get("torch")
    tensors = [x for x in arguments if torch and type(x) is torch.Tensor]
    before = [plain(x) for x in tensors]
    seen = None
    with contextlib.ExitStack() as stack:
        if task["kernel"]:
            from flashlib.exercise import bounds_checked

            seen = stack.enter_context(bounds_checked())
        with guard.watched(isolation, task["forbidden"]):
            yield
            changed = [plain(x) for x in tensors] != before
    if seen:
        counts = {"largest": seen.largest, "divisions": seen.divisions}
        loaded = {f"loaded:{n}": count for n, count in seen.loaded.items()}
        isolation.operations.update(counts | loaded)
    isolation.operations["changed"] += changed


# -- programs of ranks


def apart(simulate, isolation, seconds):
    """The function of the notebook that runs a program on all ranks. Each rank is a
    process of its own, so what they know of each other is what they send.
    """

    def of_rank(program):
        def run(*arguments):
            work = functools.partial(serve, program, arguments, isolation, seconds)
            with guard.at_work(armed=False):
                process, channel = begun(work)
            try:
                while True:
                    header, values = channel.receive()
                    for name, count in header["operations"].items():
                        isolation.operations[name] += count
                    if header["problem"] is not None:
                        raise Elsewhere(header["problem"])
                    if header["ended"]:
                        return tuple(values)
                    channel.send({}, (yield tuple(values)))
            finally:
                with guard.at_work(armed=False):
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)

        return run

    return lambda program, ranks: simulate(of_rank(program), ranks)


def serve(program, arguments, isolation, seconds, channel):
    """Run a program, whose messages travel over a channel, to its end."""
    guard.arm()
    running, received, problem, ended = None, None, None, False

    def step():
        nonlocal running, ended
        with guard.at_work():
            try:
                running = running or program(*arguments)
                return listed(running.send(received))
            except StopIteration as end:
                ended = True
                return listed(end.value)

    while not ended and problem is None:
        isolation.operations.clear()
        sent, problem = limited(seconds, step)
        channel.send({"ended": ended, "problem": problem,
                      "operations": isolation.operations}, sent or ())  # fmt: skip
        if not ended and problem is None:
            _, received = channel.receive()


def prepare_torch():
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    # Nothing is compiled here. Otherwise the first mode at work, here or in a given
    # cell, would import PyTorch's compiler, which takes as long as PyTorch itself.
    TorchDispatchMode._should_skip_dynamo = classmethod(lambda cls: False)
    torch.manual_seed(0)
    torch.set_num_threads(1)


def front_end(given, seconds, *closed):
    """The Channel of a process that compiles, with the instructor's cells. It begins
    before Triton is imported here, with the interpreter.
    """

    define = functools.partial(given_space, given, seconds)
    return begun(functools.partial(frontend.serve, define), *closed)[1]


def main(end):
    """Do the job that the process at the other end of a socket sends first."""
    channel = Channel(end)
    # No process of a task may open a file of this one in /proc, or trace it.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    job, _ = channel.parts()
    if job["tensors"]:
        prepare_torch()
    front = None
    if any(task["kernel"] for task in job["tasks"]):
        front = front_end(job["given"], job["cell_seconds"], channel.file)
    given, _ = given_space(job["given"], job["cell_seconds"])
    guard.install()
    channel.send({"ready": True})
    for task in job["tasks"]:
        work = functools.partial(work_on, task, job, given, front)
        relayed(task, work, channel, front)
