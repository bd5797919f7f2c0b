"""Inside the sandbox: execute the cells, call what they define, send what comes back as
plain arrays.

    python worker.py JOB RECEIVED CHANNEL

JOB is a folder with ``job.json`` and ``arrays.npz``; what the cells may import lies in
RECEIVED; CHANNEL is the number of the file descriptor to write to.

A message is the length of a JSON header (four bytes), the header, and the bytes of its
arrays. Nothing is pickled, and nothing that a cell prints gets into the channel.

This file runs in the same process as unreviewed code. It holds the inputs of all cases,
out of reach of the cells (guard, rules), but no expected value. It judges nothing, and
a submission that breaks it gets no marks for what it did not send.
"""

import contextlib
import json
import os
import signal
import struct
import sys
import traceback

LONGEST_TEXT = 20_000


class Channel:
    """Messages to the trusted process."""

    def __init__(self, number):
        self.file = os.fdopen(number, "wb")

    def send(self, header, arrays=()):
        text = json.dumps(header).encode()
        self.file.write(struct.pack(">I", len(text)) + text)
        for array in arrays:
            self.file.write(array.tobytes())
        self.file.flush()


class OutOfTime(Exception):
    """The cell or the call has used up its seconds."""


def _ring(number, frame):
    raise OutOfTime


def described(error):
    """What an exception may tell: its type, the line in the student's cell, whether a
    kernel left its tensors.

    Not its text: a cell could write what it was called with into it, and feedback is
    read by the student.
    """
    line = None
    for _ in range(8):  # a cell may raise what is its own cause
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename.startswith("<") and not frame.filename.startswith(
                ("<given-", "<frozen")
            ):
                line = frame.lineno
        if type(error).__name__ != "InterpreterError" or error.__cause__ is None:
            break
        error = (
            error.__cause__
        )  # what went wrong in the kernel, or in one that it calls
    missing = error.name if isinstance(error, NameError) else None
    return {"type": type(error).__name__, "line": line, "name": missing,
            "outside": type(error) is IndexError and "out of range: element" in str(error)}  # fmt: skip


def limited(seconds, action):
    """(result, what went wrong or None) of an action; errors of every kind are
    caught.
    """
    result = problem = None
    # Seconds of this process, not of the clock: a busy machine takes no marks away. The
    # trusted process looks at the clock, and stops what only waits.
    signal.signal(signal.SIGPROF, _ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        result = action()
    except (
        BaseException
    ) as error:  # SystemExit and KeyboardInterrupt of a cell included
        problem = described(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return result, problem


def plain(value):
    """(descriptor, array or None) of one value; what is neither number, text nor array
    is only named.
    """
    import numpy as np

    torch = sys.modules.get("torch")  # what has not been imported has made no tensor
    if type(value) in (bool, int, float, str) or value is None:
        if type(value) is int and abs(value) > 2**63:
            return {"kind": "other", "type": "an integer beyond 64 bits"}, None
        value = value[:LONGEST_TEXT] if type(value) is str else value
        return {"kind": "plain", "value": value}, None
    if torch and type(value) in (torch.Tensor, torch.nn.Parameter):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            value = value.float()
        value = value.resolve_conj().resolve_neg().numpy()
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if (
        type(value) is np.ndarray
        and value.dtype.kind in "biuf"
        and value.dtype.itemsize <= 8
    ):
        array = np.ascontiguousarray(value)
        shape = list(value.shape)
        return {
            "kind": "array",
            "dtype": array.dtype.newbyteorder("<").str,
            "shape": shape,
        }, array
    return {
        "kind": "other",
        "type": f"{type(value).__module__}.{type(value).__name__}",
    }, None


def sent(values):
    """(descriptors, arrays) of a list of values."""
    pairs = [plain(value) for value in values]
    return [descriptor for descriptor, _ in pairs], [
        array for _, array in pairs if array is not None
    ]


def arguments_of(case, arrays):
    """The keyword arguments of a call: tensors where the job has arrays."""
    made = {}
    for name, value in case.items():
        if isinstance(value, dict):
            import torch

            made[name] = torch.from_numpy(arrays[value["array"]].copy())
        else:
            made[name] = value
    return made


class Died(Exception):
    """A task's process has ended before its work was done."""


def forked(work):
    """Do a task's work in a process of its own, so that no task can change what another
    one uses. Raises Died where that process does not come to its end.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise Died


def given_space(job, channel):
    """The namespace of the instructor's cells; they run once, before any student's."""
    space = {"__name__": "given"}
    for cell in job["given"]:
        channel.send({"start": cell["name"], "seconds": job["cell_seconds"]})
        name = f"<{cell['name']}>"
        guard.remember(name, cell["source"])

        def run(cell=cell, name=name):
            exec(compile(cell["source"], name, "exec"), space)

        _, problem = limited(job["cell_seconds"], run)
        channel.send({"done": cell["name"], "problem": problem})
    return space


def defined(task, cells, given, isolation, seconds=None):
    """(values of the names that a task asks for, what its own cell raised)."""
    needed = [(name, cells[name]) for name in task["needs"]]
    if task["kernel"]:

        def compiled():
            return isolation.kernels(
                [(f"<{name}>", source) for name, source in needed],
                given, task["forbidden"], task["known"],
            )  # fmt: skip

        made, problem = limited(seconds, compiled)
        return made or {}, problem
    space, problem = isolation.namespace(given), None
    for name, source in needed:

        def run(name=name, source=source):
            isolation.run(source, f"<{name}>", space)

        _, problem = limited(seconds, run)
    return {name: space[name] for name in task["asks"] if name in space}, problem


def work_on(task, job, arrays, given, channel):
    """Run the cells that a task needs, then its cases; send what comes back."""
    isolation = guard.Guard(task["forbidden"])
    channel.send(
        {"start": task["name"], "seconds": job["cell_seconds"] * len(task["needs"])}
    )
    made, problem = defined(task, job["cells"], given, isolation, job["cell_seconds"])
    channel.send({"done": task["name"], "problem": problem})
    if task["call"] is None:
        descriptors, parts = sent([made.get(name) for name in task["reads"]])
        for number in range(
            len(task["cases"])
        ):  # the same values, judged in several ways
            channel.send({"result": task["name"], "case": number, "problem": None, "operations": [],
                          "values": descriptors}, parts)  # fmt: skip
        return
    given |= {name: made[name] for name in task["asks"] if name in made}
    for number, case in enumerate(task["cases"]):
        channel.send({"start": task["name"], "seconds": task["seconds"]})
        isolation.operations.clear()

        def call(case=case):
            for name in task["asks"]:
                if name not in made:
                    raise NameError(f"{name} is not defined", name=name)
            arguments = arguments_of(case, arrays)
            with watched(task, isolation):
                called = given[task["call"]]
                # What a student calls the parameters is free; a launcher has options.
                direct = task["call"] in task["asks"]
                result = called(*arguments.values()) if direct else called(**arguments)
                return list(result) if type(result) in (tuple, list) else [result]

        values, problem = limited(task["seconds"], call)
        descriptors, parts = sent(values or [])
        channel.send({"result": task["name"], "case": number, "problem": problem, "values": descriptors,
                      "operations": sorted(isolation.operations)}, parts)  # fmt: skip
        if problem is not None and problem["type"] == "OutOfTime":
            break  # the other cases would take as long


@contextlib.contextmanager
def watched(task, isolation):
    """The context of one call: what it uses is added to the operations of the guard, and
    every access of a kernel is inside of its tensors.
    """
    with contextlib.ExitStack() as stack:
        if task["kernel"]:
            from flashlib.exercise import bounds_checked

            seen = stack.enter_context(bounds_checked())
        with guard.watched(isolation, task["forbidden"]):
            yield
    if task["kernel"]:
        isolation.operations.add(f"largest:{seen.largest}")
        isolation.operations.update(
            f"loaded:{n}:{count}" for n, count in seen.loaded.items()
        )


def prepare_torch():
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    # Nothing is compiled here. Otherwise the first mode at work, here or in a given
    # cell, would import PyTorch's compiler, which takes as long as PyTorch itself.
    TorchDispatchMode._should_skip_dynamo = classmethod(lambda cls: False)
    torch.manual_seed(0)
    torch.set_num_threads(1)


def main(folder, channel, apart=forked):
    import numpy as np

    with open(os.path.join(folder, "job.json")) as file:
        job = json.load(file)
    arrays = dict(np.load(os.path.join(folder, "arrays.npz"), allow_pickle=False))
    if job["tensors"]:
        prepare_torch()
    given = given_space(job, channel)
    if apart is forked:
        guard.install()
    for task in job["tasks"]:
        apart(lambda task=task: work_on(task, job, arrays, given, channel))
    channel.send({"end": True})


if __name__ == "__main__":
    sys.path[:0] = [os.path.dirname(__file__), sys.argv[2]]
if __package__:
    from exercises.grader import guard
else:  # in the sandbox, or in a student's folder
    import guard

if __name__ == "__main__":
    main(sys.argv[1], Channel(int(sys.argv[3])))
