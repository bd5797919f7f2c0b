"""Notebooks as a student hands them in, where answers on paper are numbers and not
formulas, and processes that grade them.
"""

import contextlib
import json
import math
import os
import socket
import sys
import types

from exercises.grader import grade, release, sandbox, tasks, worker

STUDENT = "Ada Lovelace"
SECRET = b"of this test"


def lay(folder, *names, content="{}"):
    """Write a file, by default an empty notebook, at each place in a folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def grade_id(cell):
    """The name that nbgrader knows a cell by, or None."""
    return cell["metadata"].get("nbgrader", {}).get("grade_id")


def source_notebook(assignment):
    """The instructor's notebook, as a dictionary."""
    return json.loads(assignment.notebook.read_text())


def sources_of(notebook):
    """{name: source} of the cells that have a name."""
    cells = notebook["cells"]
    return {grade_id(c): "".join(c["source"]) for c in cells if grade_id(c)}


def handed_in(assignment, secret, student=STUDENT, **changes):
    """The instructor's notebook with a student's numbers and other sources in the cells
    named; None leaves a cell out.
    """
    made = written_out(assignment, source_notebook(assignment), secret, student)
    for cell in made["cells"]:
        cell["source"] = changes.get(grade_id(cell), cell["source"])
    kept = [cell for cell in made["cells"] if cell["source"] is not None]
    return {**made, "cells": kept}


def written_out(assignment, notebook, secret, student=STUDENT):
    """The notebook, changed in place: what the formulas of its tasks on paper give with
    a student's numbers.
    """
    numbers = assignment.numbers(secret, student)
    reads = {task.name: task.reads for task in assignment.tasks if task.paper}
    for cell in notebook["cells"]:
        if names := reads.get(grade_id(cell)):
            found = results("".join(cell["source"]), names, numbers)
            if len(found) == len(names):
                lines = [f"{name} = {value!r}" for name, value in found.items()]
                cell["source"] = "\n".join(lines)
    return notebook


def results(source, names, numbers):
    """{name: value} that a cell on paper gives; a name is missing where it fails."""
    space = {"math": math, **numbers}
    with contextlib.suppress(Exception):
        exec(source, space)
    return {name: space[name] for name in names if name in space}


def inside(program, **options):
    """(return code, output) of a Python program in the sandbox."""
    process = sandbox.launch(
        [sys.executable, "-I", "-c", program], text=True, **options
    )
    told = process.communicate(timeout=60)
    return process.returncode, "".join(told)


def forked(action):
    """The process of an action in a fork of this one, where PyTorch is imported
    already: in a group of its own, with output and errors in one pipe, as
    ``sandbox.launch`` has them.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            for number in (1, 2):
                os.dup2(writing, number)
            sys.stdout = sys.stderr = os.fdopen(1, "w")
            action()
            code = 0
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writing)
    return types.SimpleNamespace(
        pid=child,
        stdout=os.fdopen(reading, "rb", 0),
        wait=lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
    )


def start_without_sandbox(argv, readable, slot):
    """``sandbox.start`` for cells that do no harm: the worker has no limits, and the
    whole library instead of what students receive.
    """
    ours, theirs = socket.socketpair()
    process = forked(lambda: worker.main(theirs))
    theirs.close()
    return process, ours


# -- solutions, changed and graded


def graded(step, folder, changes, extra=()):
    """Grade the solutions of a step with some cells changed: (marks of the tasks that
    did not get all, what the student is told).
    """
    release.package(step, folder)
    assignment = tasks.assignment(step)
    solved = sources_of(handed_in(assignment, SECRET))
    changes = {x: changed(how, solved[x]) for x, how in changes.items()}
    made = handed_in(assignment, SECRET, **changes)
    made["cells"] += added(extra, solved)
    content = json.dumps(made).encode()
    result = grade.grade_one(assignment, content, SECRET, folder, STUDENT)
    lost = {x["task"]: x["points"] for x in result["tasks"] if x["points"] < x["of"]}
    return lost, json.dumps(result["tasks"])


def changed(how, solution):
    """A cell: a source, in which {} is the solution, or the solution with some of its
    texts, {old: new}, replaced.
    """
    if isinstance(how, str):
        return how.replace("{}", solution)
    for old, new in how.items():
        assert solution.count(old) == 1, old
        solution = solution.replace(old, new)
    return solution


def added(extra, solved):
    """Cells that a student adds; {name} is the solution of a task."""
    made = []
    for source in extra:
        for name, solution in solved.items():
            source = source.replace(f"{{{name}}}", solution)
        made.append({"cell_type": "code", "metadata": {}, "source": source})
    return made
