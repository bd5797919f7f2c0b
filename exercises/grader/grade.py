"""A folder of submissions to marks, feedback and one table.

The folder holds ``<student>/<step>/<step>.ipynb`` or ``<student>/<step>.ipynb``.
Nothing in it is changed. For each student ``<output>/<step>/<student>/`` gets
``received.ipynb``, byte for byte what was handed in, ``marks.json`` and
``feedback.md``; ``<output>/<step>/marks.csv`` has one line a student.

A run that was interrupted goes on where it stopped: what has been graded with the same
bytes, the same secret and the same grader is not graded again. Grading again gives the
same files.
"""

import builtins
import concurrent.futures
import csv
import hashlib
import io
import json
import os
import pathlib
import queue
import select
import shutil
import statistics
import struct
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np
import torch

from exercises.grader import rules, sandbox, submission, tasks

WORKER = pathlib.Path(__file__).with_name("worker.py")
CELL_SECONDS = 10.0
START_SECONDS = 60.0  # for Python and PyTorch to start on a busy machine
# The seconds of a cell or case are the worker's own; by the clock it may take so many
# times as long, and this much more, before it is stopped from outside.
PATIENCE = 3.0
GRACE_SECONDS = 3.0
LARGEST_MESSAGE = 64 * 2**20
LARGEST_HEADER = 2**20
LARGEST_PRINT = 16 * 2**20
SHOWN_CHARACTERS = 400


class Broken(Exception):
    """The worker sent something that is no message."""


class Outcome(NamedTuple):
    """What one worker has sent before it ended."""

    problems: dict  # {name of a cell: what it raised}
    results: dict  # {(task, number of the case): (values, problem, operations)}
    culprit: str | None  # the cell or task at work when the worker was stopped or died
    reason: str | None  # why it was stopped, None where it came to its end


# -- One worker


class Reader:
    """Messages from a file descriptor, never waiting beyond a deadline."""

    def __init__(self, number, process):
        self.number, self.process, self.buffer = number, process, bytearray()
        self.printed, self.first = 0, b""
        os.set_blocking(number, False)
        os.set_blocking(process.stdout.fileno(), False)

    def fill(self, deadline):
        """Read what there is; False at the end of the channel. Raises TimeoutError, and
        Broken for floods.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        output = self.process.stdout
        watched = [self.number] + ([] if output.closed else [output])
        ready, _, _ = select.select(watched, [], [], left)
        if output in ready:
            part = output.read(2**20)
            if part == b"":
                output.close()
            self.first = (self.first + (part or b""))[:2000]
            self.printed += len(part or b"")
            if self.printed > LARGEST_PRINT:
                raise Broken(f"it printed more than {LARGEST_PRINT >> 20} MiB")
        if self.number in ready:
            part = os.read(self.number, 2**20)
            if not part:
                return False
            self.buffer += part
        return True

    def said(self):
        """The beginning of what the worker printed."""
        return self.first.decode(errors="replace").strip() or "nothing"

    def take(self, size, deadline):
        """The next so many bytes, or None at the end of the channel."""
        while len(self.buffer) < size:
            if not self.fill(deadline):
                return None
        part = bytes(self.buffer[:size])
        del self.buffer[:size]
        return part

    def message(self, deadline):
        """The next (header, values), or None at the end. Raises Broken for what is no
        message.
        """
        length = self.take(4, deadline)
        if length is None:
            return None
        (size,) = struct.unpack(">I", length)
        if size > LARGEST_HEADER:
            raise Broken("it sent something that is no result")
        text = self.take(size, deadline)
        try:
            header = json.loads(text) if text is not None else None
            if not isinstance(header, dict):
                raise Broken("it sent something that is no result")
            values, total = [], 0
            for descriptor in header.get("values", ()):
                value, total = self.value(descriptor, total, deadline)
                values.append(value)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Broken("it sent something that is no result") from None
        return header, values

    def value(self, descriptor, total, deadline):
        if descriptor["kind"] == "plain":
            if not isinstance(descriptor["value"], bool | int | float | str | None):
                raise Broken("it sent something that is no result")
            return descriptor["value"], total
        if descriptor["kind"] == "other":
            return Other(str(descriptor["type"])[:100]), total
        dtype, shape = np.dtype(descriptor["dtype"]), tuple(descriptor["shape"])
        if (
            dtype.kind not in "biuf"
            or any(not isinstance(n, int) or n < 0 for n in shape)
            or len(shape) > 8
        ):
            raise Broken("it sent something that is no result")
        size = dtype.itemsize
        for n in shape:
            size *= n
        total += size
        if total > LARGEST_MESSAGE:
            raise Broken(f"it sent more than {LARGEST_MESSAGE >> 20} MiB")
        content = self.take(size, deadline)
        if content is None:
            raise Broken("it ended in the middle of a result")
        return np.frombuffer(content, dtype).reshape(shape), total


class Other:
    """Stands for a value that is neither number, text nor array; ``type_name`` says
    what it is.
    """

    def __init__(self, type_name):
        self.type_name = type_name

    def __repr__(self):
        return f"a value of type {self.type_name}"


def work(job, arrays, package, slot):
    """Run a job in one sandbox; returns its Outcome, whatever a cell does in there.

    package: the folder of what cells may import. Raises RuntimeError where the worker
    itself does not start, which is no fault of a submission.
    """
    problems, results, culprit, reason = {}, {}, None, None
    with (
        tempfile.TemporaryDirectory() as private
    ):  # hidden cases lie in it: others on this machine see none
        folder = pathlib.Path(private, "job")
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps(job))
        np.savez(folder / "arrays.npz", **arrays)
        shutil.copyfile(WORKER, folder / "worker.py")
        shutil.copytree(package, folder / "received")
        for path in [folder, *folder.rglob("*")]:  # the worker is another user
            path.chmod(0o755 if path.is_dir() else 0o644)
        argv = [sys.executable, "-I", "/job/worker.py", "/job", "/job/received"]
        process, number = sandbox.start(argv, {folder: "/job"}, slot=slot)
        try:
            reader, deadline = Reader(number, process), time.monotonic() + START_SECONDS
            while True:
                message = reader.message(deadline)
                if message is None:
                    reason = "the process ended before its work was done"
                    break
                header, values = message
                if "start" in header:
                    culprit = str(header["start"])
                    deadline = (
                        time.monotonic()
                        + PATIENCE * float(header["seconds"])
                        + GRACE_SECONDS
                    )
                    continue
                deadline = time.monotonic() + PATIENCE * CELL_SECONDS
                if "end" in header:
                    break
                problem = explained(header.get("problem"))
                if "done" in header:
                    problems[str(header["done"])] = problem
                elif "result" in header:
                    key = str(header["result"]), int(header["case"])
                    results.setdefault(
                        key, (values, problem, list(map(str, header["operations"])))
                    )
        except TimeoutError:
            reason = "it did not end within its time"
        except (Broken, ValueError, KeyError, TypeError) as error:
            reason = (
                str(error)
                if isinstance(error, Broken)
                else "it sent something that is no result"
            )
        finally:
            sandbox.stop(process)
            os.close(number)
            process.stdout.close()
    if culprit is None and reason is not None:
        raise RuntimeError(
            f"the worker did not start: {reason}; it said: {reader.said()}"
        )
    return Outcome(problems, results, culprit, reason)


# -- One submission


def given_cells(assignment, secret):
    """[(name, source, task or None)] of the code cells that are run, in order, from the
    instructor's notebook with the numbers of the secret; tests are left out.
    """
    wanted, cells = {task.name for task in assignment.tasks}, []
    for place, cell in enumerate(assignment.numbered(secret)["cells"]):
        if cell["cell_type"] != "code":
            continue
        graded = cell["metadata"].get("nbgrader", {})
        name = graded.get("grade_id", f"given-{place}")
        if name in wanted:
            cells.append((name, None, name))
        elif not graded.get("grade"):
            cells.append((name, "".join(cell["source"]), None))
    return cells


def grade_one(assignment, content, secret, package, slot=0):
    """The marks of the bytes of one submission, as a dict; never raises for what a
    student can hand in.
    """
    # Tensors are small, and workers run in parallel: more threads would spend seconds
    # waiting for each other.
    torch.set_num_threads(1)
    wanted = [task.name for task in assignment.tasks]
    handed_in = submission.read(content, wanted)
    numbers, given = assignment.numbers(secret), given_cells(assignment, secret)
    verdicts, cells = {}, dict(handed_in.cells)
    around = rules.around(given, cells)
    for task in assignment.tasks:
        if task.name not in cells:
            verdicts[task.name] = "nothing was handed in for this task"
            continue
        try:
            rules.require(
                cells[task.name], task.forbidden, task.kernel, around[task.name]
            )
        except rules.Refused as refusal:
            verdicts[task.name] = f"not run: {refusal}"
            del cells[task.name]

    cases = {task.name: assignment.cases(task, secret) for task in assignment.tasks}
    results, problems, stopped = {}, {}, dict(verdicts)
    while True:  # a worker that dies is replaced; what it was busy with is left out
        left = [
            task
            for task in assignment.tasks
            if task.name not in stopped and task.name in cells
        ]
        left = [
            t
            for t in left
            if any((t.name, n) not in results for n in range(len(cases[t.name])))
        ]
        if not left:
            break
        job, arrays = make_job(given, cells, stopped, left, cases, results)
        outcome = work(job, arrays, package, slot)
        problems.update(outcome.problems)
        results.update(outcome.results)
        if outcome.reason is None:
            break
        if outcome.culprit in cells:
            stopped[outcome.culprit] = outcome.reason
        else:
            for task in left:
                stopped.setdefault(
                    task.name,
                    f"the worker stopped at {outcome.culprit}: {outcome.reason}",
                )

    marks = []
    for task in assignment.tasks:
        notes, passed = [], 0
        for number, case in enumerate(cases[task.name]):
            note = judged(
                task,
                case,
                numbers,
                results.get((task.name, number)),
                problems.get(task.name),
            )
            if note is None:
                passed += 1
            elif (task.name, number) in results or task.name not in stopped:
                notes.append(f"{case.title}: {note}")
        if task.name in stopped:
            notes.append(stopped[task.name])
        share = task.points * passed / len(cases[task.name])
        marks.append({
            "task": task.name, "points": round(share, 2), "of": task.points, "passed": passed,
            "cases": len(cases[task.name]), "notes": notes,
        })  # fmt: skip
    return {
        "step": assignment.step, "sha256": handed_in.sha256, "remarks": list(handed_in.remarks),
        "tasks": marks,
        "points": round(sum(mark["points"] for mark in marks), 2),
        "of": sum(mark["of"] for mark in marks),
    }  # fmt: skip


def explained(problem):
    """An exception in words for the student, from its type, line and missing name
    alone; None for None.
    """
    if problem is None:
        return None
    kind, line, name = problem["type"], problem["line"], problem["name"]
    at = f" in line {int(line)} of the cell" if line is not None else ""
    if problem["outside"]:
        return f"a kernel loads or stores outside of its tensors{at}: a mask is missing, or wrong"
    if kind == "OutOfTime":
        return "it did not end within its time"
    if kind == "NotImplementedError":
        return "nothing has been written yet"
    if kind == "NameError" and isinstance(name, str) and name.isidentifier():
        return f"{name[:40]} is not defined{at}; helpers belong into the cells that ask for code"
    if kind == "CapacityExceeded":
        return f"it asks for more words of fast memory than there are{at}"
    known = isinstance(getattr(builtins, str(kind), None), type)
    return f"it raises {kind if known else 'an exception of its own'}{at}"


def make_job(given, cells, stopped, left, cases, results):
    """(job, arrays) for a worker: every cell that may run, and the cases of the tasks
    that are left.
    """
    to_run = []
    for name, source, task in given:
        if task is None:
            to_run.append({"name": name, "source": source})
        elif task in cells and task not in stopped:
            to_run.append({"name": name, "source": cells[task]})
    arrays, asked = {}, []
    for task in left:
        listed = []
        for number, case in enumerate(cases[task.name]):
            listed.append({})
            for key, value in case.arguments.items():
                if isinstance(value, np.ndarray):
                    stored = f"{task.name}-{number}-{key}"
                    arrays[stored] = value
                    value = {"array": stored}
                listed[-1][key] = value
        asked.append({
            "name": task.name, "call": task.call, "reads": list(task.reads), "seconds": task.seconds,
            "cases": listed,
        })  # fmt: skip
    return {"cells": to_run, "tasks": asked, "cell_seconds": CELL_SECONDS}, arrays


def judged(task, case, numbers, result, problem):
    """What is wrong with one case, in words for the student, or None."""
    if result is None:
        return problem or "not run, since an earlier case did not end"
    values, failure, operations = result
    if failure is not None:
        return (
            failure
            if problem is None
            else f"{failure}; before that, the cell itself: {problem}"
        )
    for banned in task.operations:
        used = [
            name
            for name in operations
            if name == banned or name.startswith(f"{banned}.")
        ]
        if used:
            return f"it calls {used[0]}, which this task asks you to write"
    if problem is not None and all(value is None for value in values):
        return problem
    try:
        task.judge(case, values, numbers)
    except (tasks.Wrong, AssertionError) as wrong:
        text = str(wrong)[:SHOWN_CHARACTERS] or "wrong"
        return (
            text
            if problem is None
            else f"{text}; before that, the cell itself: {problem}"
        )
    return None


# -- A folder of submissions


def find(folder, step):
    """{student: notebook} of the submissions for a step; a student without one is not
    listed.
    """
    found = {}
    for student in sorted(
        path for path in pathlib.Path(folder).iterdir() if path.is_dir()
    ):
        for candidate in (student / step / f"{step}.ipynb", student / f"{step}.ipynb"):
            if candidate.is_file():
                found[student.name] = candidate
                break
    return found


def left_over(folder, found):
    """Notebooks of a folder that no step has found, such as ``online (1).ipynb``;
    found: a list of what :func:`find` found.
    """
    read = {path for notebooks in found for path in notebooks.values()}
    everything = sorted(pathlib.Path(folder).rglob("*.ipynb"))
    return [
        path
        for path in everything
        if path not in read and ".ipynb_checkpoints" not in path.parts
    ]


def fingerprint(assignment, secret):
    """What a mark depends on besides the submission: the grader's files, the notebook,
    the secret.
    """
    digest = hashlib.sha256(hashlib.sha256(b"marks" + secret).digest())
    files = sorted(pathlib.Path(__file__).parent.rglob("*.py"))
    for path in [*files, assignment.notebook]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write(path, content):
    """Write bytes so that a reader finds either the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def feedback(student, marks):
    """The marks as Markdown for the student."""
    lines = [f"# {marks['step']}: {marks['points']:g} of {marks['of']} points", ""]
    lines += [
        f"Student: {student}",
        "",
        f"Graded file (SHA-256): `{marks['sha256']}`",
        "",
    ]
    lines += [f"- {remark}" for remark in marks["remarks"]] + [""] * bool(
        marks["remarks"]
    )
    for mark in marks["tasks"]:
        cases = (
            f", {mark['passed']} of {mark['cases']} cases" if mark["cases"] > 1 else ""
        )
        lines.append(f"## {mark['task']}: {mark['points']:g} of {mark['of']}{cases}")
        lines += ["", *[f"- {note}" for note in dict.fromkeys(mark["notes"])], ""]
    return "\n".join(lines).rstrip() + "\n"


def grade_student(assignment, student, path, output, secret, package, mark, slots):
    """Grade one submission into its folder, unless it is there already: (student,
    marks, seconds or None).
    """
    content, place = path.read_bytes(), output / assignment.step / student
    place.mkdir(parents=True, exist_ok=True)
    marks_file, sha256 = place / "marks.json", hashlib.sha256(content).hexdigest()
    if marks_file.is_file():
        earlier = json.loads(marks_file.read_text())
        if earlier["sha256"] == sha256 and earlier["grader"] == mark:
            return student, earlier, None
    write(place / "received.ipynb", content)
    slot, start = slots.get(), time.monotonic()
    try:
        marks = {
            **grade_one(assignment, content, secret, package, slot),
            "grader": mark,
        }
    finally:
        slots.put(slot)
    write(place / "feedback.md", feedback(student, marks).encode())
    write(
        marks_file, (json.dumps(marks, indent=1) + "\n").encode()
    )  # last: its presence says "done"
    return student, marks, time.monotonic() - start


def grade(step, submissions, output, secret, package, jobs=2, say=print):
    """Grade every submission of a folder; returns {student: marks}.

    package: the folder of what the given cells may import in the sandbox. Raises
    SandboxMissing where none can be made, ValueError where there is nothing to grade.
    """
    sandbox.require()
    assignment, output = tasks.assignment(step), pathlib.Path(output)
    found = find(submissions, step)
    if not found:
        raise ValueError(
            f"{submissions}: no submission <student>/{step}/{step}.ipynb is there"
        )
    mark, graded, taken, failures = fingerprint(assignment, secret), {}, [], {}
    slots = queue.SimpleQueue()
    for slot in range(jobs):
        slots.put(slot)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {
            pool.submit(
                grade_student,
                assignment,
                student,
                path,
                output,
                secret,
                package,
                mark,
                slots,
            ): student
            for student, path in found.items()
        }
        for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
            student = futures[future]
            try:
                _, marks, seconds = future.result()
            except (
                Exception
            ) as error:  # the grader's own fault: the others are graded all the same
                failures[student] = f"{type(error).__name__}: {error}"
                say(
                    f"[{number:4}/{len(found)}] {student}: NOT GRADED, {failures[student]}"
                )
                continue
            graded[student] = marks
            taken += [] if seconds is None else [seconds]
            say(
                f"[{number:4}/{len(found)}] {student}: {marks['points']:g} of {marks['of']}"
                + (" (graded before)" if seconds is None else f" in {seconds:.1f} s")
            )
    write_table(assignment, graded, output / step / "marks.csv")
    if taken:
        say(f"{len(taken)} graded, {statistics.median(taken):.1f} s each (median)")
    if failures:
        raise RuntimeError(f"not graded, by a fault of the grader: {failures}")
    return graded


def write_table(assignment, graded, path):
    """One line a student: points of each task, the sum, what was graded."""
    names = [task.name for task in assignment.tasks]
    rows = [["student", *names, "points", "of", "sha256"]]
    for student, marks in sorted(graded.items()):
        points = {mark["task"]: mark["points"] for mark in marks["tasks"]}
        total = [marks[column] for column in rows[0][-3:]]
        rows.append([student, *(points[name] for name in names), *total])
    write_csv(path, rows)


def write_csv(path, rows):
    """Write a table, whole or not at all."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    write(path, text.getvalue().encode())
