"""The assignments as the book offers them.

    python book/_tools/practice.py FOLDER     make FOLDER/<step>.zip of every assignment, without solutions

The zips hold the public practice numbers. What counts for marks comes from an instructor's own secret
(`make assignments`), which this file knows nothing of. :func:`about` reads from a notebook's first cell what
the pages say about it, so that nobody types minutes and points twice.
"""

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "exercises/source"
STEPS = (
    "standard", "gradients", "machine", "bottleneck", "blocks", "online", "flash1", "flash2", "backward",
    "masks", "decoding", "hopper", "projections",
)  # fmt: skip


class About(NamedTuple):
    """What an assignment says about itself: its title, and the sums over its table of tasks."""

    title: str
    tasks: int
    points: int
    minutes: int


def notebook_of(step):
    """The instructor's notebook of a step."""
    return SOURCE / step / f"{step}.ipynb"


def about(step):
    """The About of a step, None where it has no assignment.

    Raises ValueError where the first cell has no title or no table that ends in points and minutes.
    """
    path = notebook_of(step)
    if not path.is_file():
        return None
    head = "".join(json.loads(path.read_text())["cells"][0]["source"])
    title = re.search(r"^# (.+)$", head, re.M)
    rows = re.findall(r"^\|.*\|\s*(\d+)\s*\|\s*(\d+)\s*\|\s*$", head, re.M)
    if not title or not rows or not re.search(r"\|\s*points\s*\|\s*minutes\s*\|\s*$", head, re.M):
        raise ValueError(
            f"{path.relative_to(ROOT)}: the first cell must have a title and a table whose last two columns "
            "are points and minutes"
        )
    points, minutes = (sum(map(int, column)) for column in zip(*rows, strict=True))
    return About(title[1].strip(), len(rows), points, minutes)


def zips(folder):
    """Make the zip of every assignment there is in a folder, and nothing else; returns their paths."""
    sys.path.insert(0, str(ROOT))  # exercises/ is no part of the installed library
    from exercises.grader import release

    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.zip"):
        old.unlink()
    return [release.practice(step, folder / f"{step}.zip") for step in STEPS if notebook_of(step).is_file()]


if __name__ == "__main__":
    for made in zips(Path(sys.argv[1])):
        print(f"{made.name}: {made.stat().st_size // 1024} KiB")
