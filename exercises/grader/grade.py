"""The marks of one submission: its workers, what they send, what a student hears."""

import builtins
import functools
import pathlib
import re
import shutil
import sys
import tempfile
import time

import numpy as np

from . import channel, names, plan, rules, sandbox, submission, tasks, worker

# What runs in the sandbox.
INSIDE = ("worker.py", "guard.py", "rules.py", "frontend.py")
PROGRAM = """
import socket, sys
sys.path.insert(0, "/job")
from inside import worker
worker.main(socket.socket(fileno=int(sys.argv[1])))
"""
CELL_SECONDS = 10.0
SUBMISSION_SECONDS = 300.0  # of the clock, for all workers of one submission
SHOWN_CHARACTERS = 400
FAILS = "this fails, too"  # more would tell something of the inputs of each case


class NotStarted(RuntimeError):
    """A worker ended before the first cell, which is no fault of a submission."""


# -- One worker


def work(job, asked, package, slot, until):
    """Run a job in one sandbox; returns its Outcome, whatever a cell does in there.

    asked    what the channel has to send and may expect
    package  the folder of what cells may import

    Raises NotStarted where the worker ends before the first cell.
    """
    with tempfile.TemporaryDirectory() as private:  # which others do not see
        folder = pathlib.Path(shutil.copytree(package, f"{private}/job"))
        (folder / "inside").mkdir(exist_ok=True)
        for name in INSIDE:
            source = pathlib.Path(__file__).with_name(name)
            shutil.copyfile(source, folder / "inside" / name)
        for path in [folder, *folder.rglob("*")]:  # the worker is another user
            path.chmod(0o755 if path.is_dir() else 0o644)
        argv = [sys.executable, "-I", "-c", PROGRAM]
        process, end = sandbox.start(argv, {folder: "/job"}, slot=slot)
        with end, process.stdout:
            try:
                watch = functools.partial(sandbox.require_modest, process)
                reader = channel.Reader(end, process.stdout, watch)
                reader.pending = worker.packed(job, ())
                outcome = channel.listen(reader, asked, until)
            finally:
                sandbox.stop(process)
    if outcome.culprit is None and outcome.reason is not None:
        raise NotStarted(f"{outcome.reason}; it said: {reader.said()}")
    return outcome


# -- One submission


def grade_one(assignment, content, secret, package, student, slot=0):
    """The marks of the bytes of one submission, as a dict; never raises for what a
    student can hand in.

    student: whose submission it is. The notebook's spelling of this name decides the
    numbers, because the student got them from it; any other name does not count.
    """
    wanted = [task.name for task in assignment.tasks]
    handed_in = submission.read(content, wanted)
    remarks, named = handed_in.remarks, handed_in.student()
    if named is not None and names.agree(named, student):
        student = named
    elif named is not None:
        whom = f"'{names.printable(named[:80])}'" if named.strip() else "nobody"
        theirs = f"the numbers of {names.printable(student)}"
        remarks.append(f"the notebook names {whom}; it is graded with {theirs}")
    numbers = assignment.numbers(secret, student)
    needs = plan.of_notebook(assignment, assignment.numbered(secret, student))
    if needs.tensors():
        import torch

        torch.set_num_threads(1)  # tensors are small, and workers run in parallel
    stopped, cells, faults = {}, dict(handed_in.cells), []
    for task in assignment.tasks:
        if task.name not in cells:
            stopped[task.name] = "nothing was handed in for this task"
            continue
        source = cells.pop(task.name)
        try:
            cells[task.name] = needs.require(task, source)
            if task.paper:
                remarks += rules.repeated(source, task.reads)
        except rules.Refused as refusal:
            stopped[task.name] = f"not run: {refusal}"
        except Exception as error:
            stopped[task.name] = "not run: the cell cannot be read"
            faults.append(f"{task.name}: reading it raised {fault(error)}")

    cases = {t.name: assignment.cases(t, secret, student) for t in assignment.tasks}
    results, problems, theirs = {}, {}, words_of(cells.values())
    until = time.monotonic() + SUBMISSION_SECONDS
    left = [task for task in assignment.tasks if task.name in cells]
    cells = needs.ordered(handed_in, cells)
    while left:  # a worker that dies is replaced, for the tasks after its last one
        if time.monotonic() > until:
            reason = "the cells together took too long"
            stopped |= dict.fromkeys((task.name for task in left), reason)
            break
        job, asked = make_job(needs, cells, left, cases)
        try:
            outcome = work(job, asked, package, slot, until)
        except NotStarted:  # a second chance
            outcome = work(job, asked, package, slot, until)
        problems |= {x: explained(y, theirs) for x, y in outcome.problems.items()}
        for key, (values, problem, operations) in outcome.results.items():
            results[key] = values, explained(problem, theirs), operations
        if outcome.reason is None:
            break
        stopped[outcome.culprit] = outcome.reason
        place = [task.name for task in left].index(outcome.culprit)
        left = left[place + 1 :]

    marks, words = [], own_words() | theirs
    for task in assignment.tasks:
        notes, passed, told = [], 0, False
        for number, case in enumerate(cases[task.name]):
            result, problem = results.get((task.name, number)), problems.get(task.name)
            note = note_of(task, case, numbers, result, problem, faults)
            if note is None:
                passed += 1
                continue
            if task.call is not None:  # once, which bounds what it can give away
                note = shown(note, words) if not told or result is None else FAILS
                told = True
            if result is not None or task.name not in stopped:
                notes.append(f"{case.title}: {note}")
        if task.name in stopped:
            notes.append(stopped[task.name])
        share = task.points * passed / len(cases[task.name])
        marks.append({
            "task": task.name, "points": round(share, 2), "of": task.points,
            "passed": passed, "cases": len(cases[task.name]), "notes": notes,
        })  # fmt: skip
    return {
        "step": assignment.step, "sha256": handed_in.sha256, "remarks": remarks,
        "tasks": marks, "faults": faults, "readable": handed_in.readable,
        "points": round(sum(mark["points"] for mark in marks), 2),
        "of": sum(mark["of"] for mark in marks),
    }  # fmt: skip


def fault(error):
    """An exception in a line for the instructor's log."""
    return repr(f"{type(error).__name__}: {error}"[:SHOWN_CHARACTERS])


# What a student hears of a Problem, by its type.
SAID = {
    "outside": "a kernel is outside of its tensors{at}: a mask is missing, or wrong",
    "NotTriton": "Triton does not compile the kernel{at}; check.py shows its message",
    "Refused": "the kernel uses what is not for kernels{at}; check.py says what",
    "NotAllowed": "it does what no solution may do{at}; check.py says what",
    "OutOfTime": "it did not end within its time",
    "NotImplementedError": "nothing has been written yet",
    "NameError": "{name} is not defined{at}; define it in a cell that asks for code",
    "CapacityExceeded": "it asks for more words of fast memory than there are{at}",
}


def explained(problem, words=frozenset()):
    """A channel.Problem in words for the student; None for None.

    words: those of the student's own source. A missing name is told if it is one of
    them: any other could be the text of a hidden input.
    """
    if problem is None:
        return None
    at = f" in line {problem.line} of the cell" if problem.line is not None else ""
    known = isinstance(getattr(builtins, problem.type, None), type)
    raised = problem.type if known else "an exception of its own"
    name = problem.name if problem.name in words else "a name"
    told = SAID.get(problem.type, "it raises {raised}{at}")
    return told.format(at=at, raised=raised, name=name)


WORDS = re.compile(r"[^\W\d]\w*")
TOKENS = re.compile(r"[^\W\d]\w*|\d[\w.]*")


@functools.cache
def own_words():
    """The words that the grader's own messages consist of."""
    library = tasks.ROOT.parent / "flashlib"
    files = [*pathlib.Path(__file__).parent.rglob("*.py"), library / "exercise.py"]
    files += (library / "machine").glob("*.py")
    dtypes = [str(np.dtype(name)) for name in channel.DTYPES]
    return words_of(dtypes) | words_of(f.read_text("utf-8") for f in files)


def words_of(sources):
    """The words of some sources."""
    return frozenset().union(*(WORDS.findall(source) for source in sources))


def shown(note, words):
    """A note without what the student's code may have chosen after it saw hidden
    inputs: words outside of the vocabulary, numbers of several digits except lines.
    """

    def token(found):
        text = found.group().rstrip(".")
        line = note[: found.start()].endswith(("line ", "lines "))
        if text in words or len(text) == 1 or line:
            return found.group()
        return "…" + found.group()[len(text) :]

    return TOKENS.sub(token, note)


def make_job(needs, cells, left, cases):
    """(job, Asked) of a worker: the cells, and the cases of the tasks that are left."""
    listed, messages = [], {}
    for task in left:
        given = [case.arguments for case in cases[task.name]]
        listed.append({**task.rules(), "cases": len(given), **needs.of(task, cells)})
        packed = [worker.packed({"names": [*x]}, x.values()) for x in given]
        messages[task.name] = packed
    job = {"given": dict(needs.given), "cells": cells, "tasks": listed,
           "tensors": needs.tensors(), "cell_seconds": CELL_SECONDS}  # fmt: skip
    seconds = {task.name: task.seconds for task in left}
    return job, channel.Asked(messages, seconds, CELL_SECONDS)


def note_of(task, case, numbers, result, problem, faults):
    """What is wrong with one case, in words for the student, or None. What the judge
    did not expect is a wrong answer, and one of the faults that the instructor reads.
    """
    if result is None:
        return problem or "not run, since an earlier case did not end"
    values, failure, operations = result
    try:
        used = plan.not_allowed(task, case.arguments, operations)
        if used is not None:
            return used
        if failure is None:
            if problem is not None and all(value is None for value in values):
                return problem
            return task.judge(case, values, numbers)
    except (tasks.Wrong, AssertionError) as wrong:
        failure = str(wrong)[:SHOWN_CHARACTERS] or "wrong"
    except Exception as error:
        faults.append(f"{task.name}, {case.title}: judging raised {fault(error)}")
        return "the result is not of the kind that is asked for"
    before = f"; before that, the cell itself: {problem}"
    return failure + before * (problem is not None)
