"""Draw the README's figure, book/_static/ladder.png, from a record: `python benchmarks/ladder.py`.

The PNG carries the hash of the record that it was drawn from, so that a test can tell when it is old.
"""

import argparse
import hashlib
import json
import pathlib

from flashlib import plot, records

ROOT = pathlib.Path(__file__).resolve().parents[1]
FIGURE = ROOT / "book" / "_static" / "ladder.png"


def newest():
    """The record of forward speeds, or, until there is one, the sweep of tiles."""
    return records.load("forward" if "forward" in records.names() else "tiles")


def record_hash(record):
    """A hash of what a record holds, however its JSON is laid out."""
    return hashlib.sha256(json.dumps(record.data, sort_keys=True).encode()).hexdigest()[:16]


def draw(record, path):
    """Write the ladder of the record to path as PNG, with the record's hash in its text chunk "Record"."""
    path.write_bytes(plot.ladder(record).png(Record=record_hash(record)))


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    FIGURE.parent.mkdir(exist_ok=True)
    draw(newest(), FIGURE)


if __name__ == "__main__":
    main()
