"""Notebooks as a student hands them in: answers on paper are numbers, not formulas."""

import contextlib
import json
import math

STUDENT = "Ada Lovelace"


def lay(folder, *names, content="{}"):
    """Write a file, by default an empty notebook, at each of these places in a folder."""
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
    reads = {task.name: task.reads for task in assignment.tasks if task.paper}
    numbers = assignment.numbers(secret, student)
    for cell in notebook["cells"]:
        name = grade_id(cell)
        if name in reads:
            cell["source"] = answer("".join(cell["source"]), reads[name], numbers)
    return notebook


def answer(source, names, numbers):
    """The source of a cell with the values that its names get; as it was where it fails."""
    space = {"math": math, **numbers}
    with contextlib.suppress(Exception):
        exec(source, space)
        return "\n".join(f"{name} = {space[name]!r}" for name in names)
    return source
