"""Check the notebook in this folder before you hand it in: ``python check.py``.

Every rule that can cost points is applied here as the grader applies it, to the cells
and to what they do while the visible tests run. Only the inputs that count are hidden.
"""

import contextlib
import ctypes
import importlib.util
import inspect
import io
import json
import mmap
import os
import pathlib
import sys
import types
import warnings
from unittest import mock

CELL_SECONDS, SECONDS = 10.0, 60.0  # for a cell, and for a test
FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))
# As in the grader: the interpreter, one process for each task.
os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

TRITON = importlib.util.find_spec("triton") is not None
if not TRITON:  # the other tasks can be checked without it
    stub = mock.MagicMock(JITFunction=int)
    sys.modules |= dict.fromkeys(("triton", "triton.language"), stub)

from checker import guard, plan, rules, submission, worker  # noqa: E402


class Printed(io.TextIOBase):
    """Takes what the cells print, and counts it, in all processes together."""

    most = 16 * 2**20  # as the grader has it

    def __init__(self):
        self.count = ctypes.c_int64.from_buffer(mmap.mmap(-1, 8))

    def write(self, text):
        self.count.value += len(text.encode(errors="replace"))
        if self.found():
            raise OSError(*self.found())
        return len(text)

    def found(self):
        """[what is wrong], if there is too much of it."""
        told = f"the notebook prints more than {self.most >> 20} MiB"
        return [told] * (self.count.value > self.most)


def told(error):
    """An exception with its text, which stays on this machine."""
    line = described(error)["line"]
    at = f"line {line}: " if line else ""
    text = str(error) or "nothing has been written yet"
    return {"type": type(error).__name__, "text": f"{at}{type(error).__name__}: {text}"}


described, worker.described = worker.described, told


def faults(tasks, needs, cells, given, front, test):
    """What is wrong with the last of some tasks; its test may use the others."""
    for task in tasks:
        job = vars(task) | needs.of(task, cells)
        isolation, found = guard.Guard(task.forbidden), []
        rest = isolation, front, CELL_SECONDS
        made, problem = worker.defined(job, cells, given, *rest)
        given |= made
    if problem:
        found.append(problem["text"])
    missing = [name for name in job["asks"] if name not in made]
    if missing:
        return [*found, f"not defined: {', '.join(missing)}"]
    if task.ranks:
        given[task.ranks] = worker.apart(given[task.ranks], isolation, SECONDS)
    if task.call:
        given[task.call] = watched(task, job, isolation, given[task.call], found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, problem = worker.limited(SECONDS, lambda: exec(test, given))
    if problem:
        found.append(f"visible test, {problem['text']}")
    return list(dict.fromkeys(found))


def watched(task, job, isolation, function, found):
    """The function that a test calls; what no solution may use is added to found."""

    def call(*args, **kwargs):
        isolation.operations.clear()
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {}
        for name, x in bound.arguments.items():
            arguments[name] = x.detach().numpy() if hasattr(x, "numpy") else x
        try:
            with worker.watched(job, isolation, [*args, *kwargs.values()]):
                result = function(*args, **kwargs)
                return [*result] if isinstance(result, worker.LAZY) else result
        finally:
            reason = plan.not_allowed(task, arguments, isolation.operations)
            if reason:
                found.append(reason)

    return call


def main():
    """Print what is found; returns 1 where points are at risk."""
    told = json.loads((FOLDER / "checker/plan.json").read_text("utf-8"))
    needs, step = plan.Plan(**told["plan"]), told["step"]
    tasks = [types.SimpleNamespace(**task) for task in told["tasks"]]
    for task in tasks:
        if task.limits:
            space = {}
            exec(task.limits, space)
            task.limits = space[task.counts]
    content = (FOLDER / f"{step}.ipynb").read_bytes()
    if needs.tensors():
        worker.prepare_torch()
    handed_in = submission.read(content, [task.name for task in tasks])
    risks, cells = handed_in.remarks, {}
    for name, source in handed_in.cells.items():
        (task,) = (task for task in tasks if task.name == name)
        try:
            cells[name] = needs.require(task, source)
            for said in rules.repeated(source, task.reads) if task.paper else ():
                print(f"{name}: {said}")
        except rules.Refused as reason:
            risks.append(f"{name}: {reason}")
    ordered = needs.ordered(handed_in, cells)
    own = dict(handed_in.code)
    if own and handed_in.student() is None:
        name = 'student = "...", with your name in the quotes'
        risks.append(f"parameters: expected {name}")
    listed = dict(needs.given)
    if "parameters" in own:  # it has the student's name
        listed["parameters"] = own["parameters"]
    front, say = worker.front_end(listed, SECONDS) if TRITON else None, print
    with contextlib.redirect_stdout(Printed()) as printed:
        given, problems = worker.given_space(listed, SECONDS)
    risks += [f"{name}: {x['text']}" for name, x in problems.items() if x]
    for risk in risks:
        print(risk)
    guard.install()
    present, unchecked = [task for task in tasks if task.name in cells], []
    for number, task in enumerate(present, 1):
        name = f"<given-{task.name}-test>"
        test = compile(told["tests"][task.name], name, "exec")
        if task.kernel and not TRITON:
            unchecked.append(task.name)
            print(f"{task.name}: NOT CHECKED, since Triton is not installed here")
            continue

        def check(task=task, number=number, test=test):
            before = [x for x in present[:number] if x.name not in unchecked]
            with contextlib.redirect_stdout(printed):
                found = faults(before, needs, ordered, given, front, test)
            found += printed.found()
            say(f"{task.name}: {'; '.join(found) or 'breaks no rule'}", file=sys.stdout)
            sys.stdout.flush()
            if found:
                raise SystemExit

        try:
            sys.stdout.flush()
            worker.ended(worker.begun(lambda _, check=check: check())[0])
        except worker.Died:
            risks.append(task.name)
    if not risks:
        rest = f" and {', '.join(unchecked)}" * bool(unchecked)
        print(f"Only inputs that you do not see{rest} can still cost points.")
    return int(bool(risks))


if __name__ == "__main__":
    sys.exit(main())
