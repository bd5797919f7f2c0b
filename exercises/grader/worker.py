"""Inside the sandbox: execute the cells, call what they define, send what comes back as
plain arrays.

    python worker.py JOB RECEIVED CHANNEL

JOB is a folder with ``job.json`` and ``arrays.npz``; what the cells may import lies in
RECEIVED; CHANNEL is the number of the file descriptor to write to.

A message is the length of a JSON header (four bytes), the header, and the bytes of its
arrays. Nothing is pickled, and nothing that a cell prints gets into the channel.

This file runs in the same process as unreviewed code. It holds no secret and judges nothing;
a submission that breaks it gets no marks for what it did not send.
"""

import json
import linecache
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
    import torch

    if type(value) in (bool, int, float, str) or value is None:
        if type(value) is int and abs(value) > 2**63:
            return {"kind": "other", "type": "an integer beyond 64 bits"}, None
        value = value[:LONGEST_TEXT] if type(value) is str else value
        return {"kind": "plain", "value": value}, None
    if type(value) in (torch.Tensor, torch.nn.Parameter):
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
    import torch

    made = {}
    for name, value in case.items():
        if isinstance(value, dict):
            made[name] = torch.from_numpy(arrays[value["array"]].copy())
        else:
            made[name] = value
    return made


def main(folder, channel):
    import numpy as np
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from flashlib.exercise import bounds_checked

    # Nothing is compiled here. Otherwise the first mode at work, here or in a given
    # cell, would import PyTorch's compiler, which takes as long as PyTorch itself.
    TorchDispatchMode._should_skip_dynamo = classmethod(lambda cls: False)

    class Recorder(TorchDispatchMode):
        """Which of PyTorch's operations a call runs, whatever name the source gives
        them.
        """

        def __init__(self):
            super().__init__()
            self.names = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.add(str(function))
            return function(*args, **(kwargs or {}))

    torch.manual_seed(0)
    torch.set_num_threads(1)
    with open(os.path.join(folder, "job.json")) as file:
        job = json.load(file)
    arrays = np.load(os.path.join(folder, "arrays.npz"), allow_pickle=False)
    space = {"__name__": "submission"}

    for cell in job["cells"]:
        channel.send({"start": cell["name"], "seconds": job["cell_seconds"]})
        name = f"<{cell['name']}>"
        # Triton reads the source of a kernel, and tracebacks show lines: both ask
        # linecache.
        linecache.cache[name] = (
            len(cell["source"]),
            None,
            cell["source"].splitlines(True),
            name,
        )

        def run(cell=cell, name=name):
            exec(compile(cell["source"], name, "exec"), space)

        _, problem = limited(job["cell_seconds"], run)
        channel.send({"done": cell["name"], "problem": problem})

    for task in job["tasks"]:
        if task["call"] is None:
            descriptors, parts = sent([space.get(name) for name in task["reads"]])
            for number in range(
                len(task["cases"])
            ):  # the same values, judged in several ways
                channel.send({"result": task["name"], "case": number, "problem": None, "operations": [],
                              "values": descriptors}, parts)  # fmt: skip
            continue
        for number, case in enumerate(task["cases"]):
            channel.send({"start": task["name"], "seconds": task["seconds"]})
            recorder = Recorder()

            def call(task=task, case=case, recorder=recorder):
                function = space.get(task["call"])
                if not callable(function):
                    raise NameError(f"{task['call']} is not defined")
                made = arguments_of(case, arrays)
                with recorder, bounds_checked():
                    result = function(**made)
                return list(result) if type(result) in (tuple, list) else [result]

            values, problem = limited(task["seconds"], call)
            descriptors, parts = sent(values or [])
            channel.send({"result": task["name"], "case": number, "problem": problem, "values": descriptors,
                          "operations": sorted(recorder.names)}, parts)  # fmt: skip
            if problem is not None and problem["type"] == "OutOfTime":
                break  # the other cases would take as long
    channel.send({"end": True})


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])
    main(sys.argv[1], Channel(int(sys.argv[3])))
