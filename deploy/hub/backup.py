"""Copies of an instructor's course folder, one a day, for root alone.

    python deploy/hub/backup.py COURSE BACKUPS         daily, as a service of the hub
    python deploy/hub/backup.py COURSE BACKUPS --once  now

A copy has the gradebook, consistent although somebody may be grading; the secret,
without which no submission can be graded again; what was handed in, marks and feedback.
The last 30 copies are kept.
"""

import datetime
import os
import pathlib
import sqlite3
import sys
import tarfile
import tempfile
import time

KEEP = 30
FOLDERS = ("graded", "submitted", "source")
FILES = (
    "secret", "students.csv", "deadlines.csv", "marks.csv", "nbgrader_config.py",
)  # fmt: skip


def back_up(course, backups, now=None):
    """Write one copy; returns its path, or None while there is no course yet."""
    course, backups = pathlib.Path(course), pathlib.Path(backups)
    if not (course / "secret").is_file():
        return None
    backups.mkdir(parents=True, exist_ok=True, mode=0o700)
    moment = (now or datetime.datetime.now(datetime.UTC)).strftime("%Y-%m-%dT%H-%M-%S")
    done = backups / f"{moment}.tar.gz"
    # A run that fails leaves nothing behind.
    with tempfile.TemporaryDirectory(dir=backups) as folder:
        part, copy = pathlib.Path(folder) / "part", pathlib.Path(folder) / "copy.db"
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with (
            os.fdopen(handle, "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz") as tar,
        ):
            if (course / "gradebook.db").is_file():
                with (
                    sqlite3.connect(course / "gradebook.db") as source,
                    sqlite3.connect(copy) as target,
                ):
                    source.backup(target)
                tar.add(copy, "gradebook.db")
            for name in (*FILES, *FOLDERS):
                if (course / name).exists():
                    tar.add(course / name, name)
        os.replace(part, done)
    for old in sorted(backups.glob("*.tar.gz"))[:-KEEP]:
        old.unlink()
    return done


def main(arguments):
    course, backups, *rest = arguments
    while True:
        done = back_up(course, backups)
        print(f"backup: {done or 'no course yet'}", flush=True)
        if rest == ["--once"]:
            return
        time.sleep(24 * 3600 if done else 600)


if __name__ == "__main__":
    main(sys.argv[1:])
