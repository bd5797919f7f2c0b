"""A notebook as handed in, whatever has happened to it on the way.

Only solution cells are read: those whose nbgrader ``grade_id`` is asked for. Tests, given cells, outputs,
kernel names and everything that a student has added are not looked at; the given cells come from the
instructor's own copy.
"""

import hashlib
import json
from typing import NamedTuple

# A notebook with every output of an honest run is far below this.
LARGEST_BYTES = 20 * 2**20


class Submission(NamedTuple):
    """What was handed in: the checksum of its bytes, {grade_id: source}, and what is wrong with it."""

    sha256: str
    cells: dict
    remarks: tuple


def read(content, wanted):
    """The Submission in the bytes of a notebook; wanted: the grade_ids of the solution cells.

    Never raises for what a student can hand in: where nothing can be read, ``cells`` is empty and ``remarks``
    says why.
    """
    digest = hashlib.sha256(content).hexdigest()

    def nothing(reason):
        return Submission(digest, {}, (reason,))

    if not content.strip():
        return nothing("the file is empty")
    if len(content) > LARGEST_BYTES:
        return nothing(f"the file has {len(content)} bytes, more than the {LARGEST_BYTES} that are read")
    try:
        notebook = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        return nothing("the file is not a notebook: it is damaged, or was cut off while it was saved")
    found = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(found, list):
        return nothing("the file is not a notebook of format 4: it has no list of cells")

    copies, remarks = {}, []
    for cell in found:
        identity, source = _graded(cell)
        if identity in wanted and source is not None:
            copies.setdefault(identity, []).append(source)
    for name in wanted:
        if name not in copies:
            remarks.append(f"the cell of task {name} is missing")
        elif len(copies[name]) > 1:
            remarks.append(
                f"there are {len(copies[name])} cells of task {name}; they were run one after another, so "
                "the last definition counts"
            )
    cells = {name: "\n\n".join(copies[name]) for name in wanted if name in copies}
    return Submission(digest, cells, tuple(remarks))


def _graded(cell):
    """(grade_id, source) of a code cell, None for what is missing or of another type."""
    if not isinstance(cell, dict) or cell.get("cell_type") != "code":
        return None, None
    metadata = cell.get("metadata")
    graded = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    identity = graded.get("grade_id") if isinstance(graded, dict) else None
    source = cell.get("source")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    known = isinstance(identity, str) and isinstance(source, str)
    return (identity, source) if known else (None, None)
