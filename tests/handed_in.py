"""Notebooks as a student hands them in: answers on paper are numbers, not formulas."""

import contextlib
import math

STUDENT = "Ada Lovelace"


def written_out(assignment, notebook, secret, student=STUDENT):
    """The notebook, changed in place: what the formulas of its tasks on paper give with
    a student's numbers.
    """
    reads = {task.name: task.reads for task in assignment.tasks if task.paper}
    numbers = assignment.numbers(secret, student)
    for cell in notebook["cells"]:
        name = cell["metadata"].get("nbgrader", {}).get("grade_id")
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
