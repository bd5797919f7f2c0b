"""The assignments as the book offers them.

    python book/_tools/practice.py FOLDER     write FOLDER/<step>.zip, without solutions

The zips have the public practice numbers. What counts for marks comes from an
instructor's own secret (`make assignments`). :func:`about` reads from a notebook's
first cell what the pages say about it, so that minutes and points are typed once.
"""

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "exercises/source"
STEPS = (
    "standard", "gradients", "machine", "bottleneck", "blocks", "online", "flash1",
    "flash2", "backward",
    "masks", "decoding", "hopper", "ring", "latent", "fp8", "projections",
)  # fmt: skip


class About(NamedTuple):
    """An assignment's title, and the sums over its table of tasks."""

    title: str
    tasks: int
    points: int
    minutes: int


def notebook_of(step):
    """The instructor's notebook of a step."""
    return SOURCE / step / f"{step}.ipynb"


def about(step):
    """The About of a step, or None; ValueError if the first cell lacks its table."""
    path = notebook_of(step)
    if not path.is_file():
        return None
    head = "".join(json.loads(path.read_text())["cells"][0]["source"])
    title = re.search(r"^# (.+)$", head, re.M)
    rows = re.findall(r"^\|.*\|\s*(\d+)\s*\|\s*(\d+)\s*\|\s*$", head, re.M)
    columns = re.search(r"\|\s*points\s*\|\s*minutes\s*\|\s*$", head, re.M)
    if not (title and rows and columns):
        raise ValueError(
            f"{path.name}: expected a title and a table that ends in points and "
            f"minutes in the first cell, got {head[:60]!r}"
        )
    points, minutes = (sum(map(int, column)) for column in zip(*rows, strict=True))
    return About(title[1].strip(), len(rows), points, minutes)


def zips(folder):
    """Write the zip of every assignment into a folder; returns their paths."""
    sys.path.insert(0, str(ROOT))  # the library does not include exercises/
    from exercises.grader import release

    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.zip"):
        old.unlink()
    steps = [step for step in STEPS if notebook_of(step).is_file()]
    return [release.practice(step, folder / f"{step}.zip") for step in steps]


if __name__ == "__main__":
    for made in zips(Path(sys.argv[1])):
        print(f"{made.name}: {made.stat().st_size // 1024} KiB")
