"""A notebook as handed in, whatever has happened to it on the way.

Solution cells are read, whose nbgrader ``grade_id`` is asked for, and the code that a
student has added. Tests, given cells, outputs and kernel names are not looked at; the
given cells come from the instructor's own copy.
"""

import ast
import contextlib
import hashlib
import json
from typing import NamedTuple

from . import rules

# A notebook with every output of an honest run is far below this.
LARGEST_BYTES = 20 * 2**20
# Characters of added cells that are read. A cell counts as more than it has, because
# reading it takes time, however short it is.
MOST_ADDED = 100_000


def cost(source):
    """What a cell counts of MOST_ADDED."""
    return len(source) + 100


class Unreadable(ValueError):
    """The file is no notebook; the text says why."""


class Submission(NamedTuple):
    """What was handed in: the checksum of its bytes, {grade_id: source} of the solution
    cells, what is wrong with it, and [(grade_id or None, source)] of all code cells;
    what has no grade_id is given, or the student's own.
    """

    sha256: str
    cells: dict
    remarks: list
    code: list
    readable: bool = True

    def student(self):
        """The name that the cell ``parameters`` gives to its student: the last text in
        quotes that it assigns to ``student``; None without one.
        """
        found = None
        source = "\n".join(x for name, x in self.code if name == "parameters")
        with contextlib.suppress(rules.Refused):
            lines = rules.assignments(rules.clean(source), ["student"])
            for line in lines.get("student", ()):
                text = getattr(getattr(line, "value", None), "value", None)
                plain = isinstance(line, ast.Assign | ast.AnnAssign)
                found = text if plain and isinstance(text, str) else found
        return found


def read(content, wanted):
    """The Submission in the bytes of a notebook; wanted: grade_ids of solution cells.

    Never raises for what a student can hand in: where nothing can be read, ``cells`` is
    empty and ``remarks`` says why.
    """
    digest = hashlib.sha256(content).hexdigest()
    try:
        found = cells_of(content)
    except Unreadable as reason:
        return Submission(digest, {}, [str(reason)], [], False)
    code = [(name, source) for name, kind, source in found if kind == "code"]
    copies, remarks = {}, []
    for name, source in code:
        if name in wanted:
            copies.setdefault(name, []).append(source)
    for name in wanted:
        if name not in copies:
            remarks.append(f"the cell of task {name} is missing")
        elif len(copies[name]) > 1:
            so = "they were run one after another, so the last definition counts"
            remarks.append(f"there are {len(copies[name])} cells of task {name}; {so}")
    if sum(cost(x) for name, x in code if name in (None, *wanted)) > MOST_ADDED:
        left = f"what comes after {MOST_ADDED} characters of added cells is left out"
        remarks.append(f"the notebook is very long: {left}")
    cells = {name: "\n\n".join(copies[name]) for name in wanted if name in copies}
    return Submission(digest, cells, remarks, code)


def cells_of(content):
    """[(grade_id or None, cell type, source)] of the cells in the bytes of a notebook
    that have a text, in order.

    Raises Unreadable where there is no list of cells.
    """
    if not content.strip():
        raise Unreadable("the file is empty")
    if len(content) > LARGEST_BYTES:
        raise Unreadable(f"the file has more than {LARGEST_BYTES} bytes")
    try:
        notebook = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        reason = "it is damaged, or was cut off while it was saved"
        raise Unreadable(f"the file is not a notebook: {reason}") from None
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        reason = "it has no list of cells"
        raise Unreadable(f"the file is not a notebook of format 4: {reason}")
    found = []
    for cell in cells:
        cell = cell if isinstance(cell, dict) else {}
        metadata, source = cell.get("metadata"), cell.get("source")
        graded = metadata.get("nbgrader") if isinstance(metadata, dict) else None
        name = graded.get("grade_id") if isinstance(graded, dict) else None
        if isinstance(source, list) and all(isinstance(line, str) for line in source):
            source = "".join(source)
        if isinstance(source, str):
            name = name if isinstance(name, str) else None
            found.append((name, cell.get("cell_type"), source))
    return found
