"""What was handed in: whose it is, and its bytes.

Three ways to lie in the folder are understood: ``<student>/<step>/<step>.ipynb`` and
``<student>/<step>.ipynb``, and the unpacked downloads of Canvas and Moodle.

Nothing in the folder is trusted. A link is never followed, only regular files are
opened, sizes are known before anything is read, and names are written so that every
terminal, table and file system can show them.
"""

import contextlib
import datetime
import hashlib
import itertools
import os
import re
import stat
import zoneinfo
from typing import NamedTuple

from exercises.grader import names
from exercises.grader.submission import LARGEST_BYTES, Unreadable

# Jane Doe hands in online.ipynb: doejane_LATE_12_345_online-1.ipynb in Canvas, the
# folder or beginning "Jane Doe_12_assignsubmission_file_" in Moodle.
CANVAS = re.compile(
    r"(?P<name>[^_]+)_(?P<late>LATE_)?(?P<id>\d+)_(?P<attempt>\d+)_(?P<file>.+)"
)
MOODLE = re.compile(r"(?P<name>.+)_(?P<id>\d+)_assignsubmission_file_?(?P<file>.*)")
# Folders that archives and systems add, and the grader's own files next to students'.
IGNORED, RESERVED = {"__MACOSX"}, {"marks.csv", "states.json", "statistics.html"}
LONGEST_NAME = 255  # bytes of a folder's name in the file systems of Linux
NOBODY = "{0}: no submission <student>/{step}/{step}.ipynb is there"
DEEPEST = 5  # folders inside each other in which notebooks are looked for


class HandIn(NamedTuple):
    """Where the notebook of a student is; ``parts`` is None where there is none.

    ``student`` is unique, can be shown and is the name of a folder. ``name`` is what
    was written, without the number that a system has added, and is compared.
    """

    student: str
    name: str
    parts: tuple | None
    system: str = ""  # canvas or moodle, and the number of the student there
    number: str = ""
    late: bool = False  # the system says so
    attempt: tuple = ()


def shown(name):
    """A file's name as text that can be shown and is a file's name again."""
    text = names.printable(os.fsencode(name).decode(errors="backslashreplace"))
    if len(text.encode()) > LONGEST_NAME or text in RESERVED:
        text = f"{text[:25]}~{hashlib.sha256(os.fsencode(name)).hexdigest()[:12]}"
    return text


def collect(folder, step):
    """{student: HandIn} of everybody in a folder, also those without this step."""
    found = {}
    with os.scandir(folder) as entries:
        entries = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        if entry.name.startswith(".") or entry.name in IGNORED:
            continue
        link = entry.is_symlink() and not entry.name.endswith(".ipynb")
        person = entry.is_dir() or link
        one = of_folder(folder, entry.name, step) if person else flat(entry.name, step)
        if one is None:
            continue
        earlier = found.get(one.student)
        if earlier is not None and not one.system:  # two names that look the same
            digest = hashlib.sha256(os.fsencode(entry.name)).hexdigest()[:12]
            one = one._replace(student=f"{one.student[:25]}~{digest}")
        if earlier is None or not one.system or one.attempt >= earlier.attempt:
            found[one.student] = one
    return found


def of_folder(folder, name, step):
    """The HandIn of a folder for one student."""
    match = MOODLE.fullmatch(name)
    one = numbered(match, "moodle") if match else HandIn(shown(name), name, None)
    for place in ((name, step), (name,)):
        if present(os.path.join(folder, *place, f"{step}.ipynb")):
            return one._replace(parts=(*place, f"{step}.ipynb"))
    for place in ((name, step), (name,)):  # a browser's second download
        renamed = [file for file in names_in(folder, place) if attempt_of(file, step)]
        if len(renamed) == 1:
            return one._replace(parts=(*place, renamed[0]))
    return one


def names_in(folder, parts):
    """The names in a folder below another one; [] behind a link."""
    if is_link(folder, parts):
        return []
    try:
        return sorted(os.listdir(os.path.join(folder, *parts)), key=os.fsencode)
    except OSError:
        return []


def attempt_of(file, step):
    """The match of a notebook's name that a browser or a system may have numbered, such
    as ``online (1).ipynb`` and ``online-1.ipynb``; None for any other.
    """
    return re.fullmatch(rf"{step}(?:[ -]\(?(\d{{1,6}})\)?)?\.ipynb", file)


def flat(name, step):
    """The HandIn of a file of a learning management system; None for any other."""
    for system, pattern in (("moodle", MOODLE), ("canvas", CANVAS)):
        match = pattern.fullmatch(name)
        file = match and attempt_of(match["file"], step)
        if file:
            known = {"attempt": "0", "late": None} | match.groupdict()
            attempt, late = int(known["attempt"][:18]), bool(known["late"])
            told = {"late": late, "attempt": (attempt, int(file[1] or 0))}
            return numbered(match, system)._replace(parts=(name,), **told)
    return None


def numbered(match, system):
    """The HandIn of a student by the name and number that a system has written."""
    student = shown(f"{match['name']}_{match['id']}")
    return HandIn(student, match["name"], None, system, match["id"])


def present(path):
    """Whether something is there, readable or not."""
    try:
        os.lstat(path)
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)
    return True


def opened(folder, parts):
    """A file descriptor of a regular file below a folder; raises Unreadable."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for last, part in [*((False, part) for part in parts[:-1]), (True, parts[-1])]:
            # A FIFO would wait for a writer, a terminal would become ours.
            kind = os.O_NONBLOCK | os.O_NOCTTY if last else os.O_DIRECTORY
            place, above = os.open(part, flags | kind, dir_fd=place), place
            os.close(above)
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise Unreadable("the notebook is not a file")
        os.set_blocking(place, True)
        return place
    except OSError as error:
        os.close(place)
        reason = "is a link" if is_link(folder, parts) else error.strerror
        raise Unreadable(f"the notebook cannot be opened: {reason}") from None
    except Unreadable:
        os.close(place)
        raise


def is_link(folder, parts):
    """Whether a link is on the way to a file."""
    places = itertools.accumulate((folder, *parts), os.path.join)
    return any(map(os.path.islink, itertools.islice(places, 1, None)))


def read(folder, parts):
    """(bytes, :func:`moment`) of a notebook; raises Unreadable."""
    content, changed = content_of(folder, parts, LARGEST_BYTES)
    return content, moment(folder, parts, changed)


def content_of(folder, parts, largest):
    """(bytes, seconds of the last change) of a file in a folder; raises Unreadable."""
    with os.fdopen(opened(folder, parts), "rb") as file:
        try:
            content = file.read(largest + 1)
        except OSError as error:
            raise Unreadable(f"the notebook cannot be read: {error.strerror}") from None
        if len(content) > largest:
            raise Unreadable(f"the file has more than {largest} bytes")
        return content, os.fstat(file.fileno()).st_mtime


def moment(folder, parts, changed):
    """(aware datetime at which a file was handed in, whether that was recorded): what
    nbgrader's exchange has written next to it, or its last change, which copies lose.
    """
    if len(parts) == 3:
        with contextlib.suppress(ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
            text = content_of(folder, (*parts[:2], "timestamp.txt"), 200)[0].decode()
            day, clock, *zone = text.split()
            when = datetime.datetime.fromisoformat(f"{day} {clock}")
            if when.tzinfo is None:
                when = when.replace(tzinfo=zoneinfo.ZoneInfo(*zone[:1] or ["UTC"]))
            return when, True
    try:
        return datetime.datetime.fromtimestamp(changed, datetime.UTC), False
    except (ValueError, OverflowError, OSError):
        return datetime.datetime.fromtimestamp(0, datetime.UTC), False


def owner(parts):
    """The student to whom a file belongs, by its place or name, or ""."""
    for pattern in (MOODLE, CANVAS)[: 2 if len(parts) == 1 else 1]:
        if match := pattern.fullmatch(parts[0]):
            return numbered(match, "").student
    return shown(parts[0]) if len(parts) > 1 else ""


def left_over(folder, found):
    """[(student or "", path as text)] of the files that are not read: notebooks under
    other names, and whatever lies where nothing is read, such as an archive; found:
    what :func:`collect` found for each step.
    """
    read = {one.parts for entries in found for one in entries.values() if one.parts}
    heard = {parts[0] for parts in read if len(parts) > 1}
    names = []
    for place, folders, files in os.walk(folder):
        deep = os.path.relpath(place, folder).count(os.sep) >= DEEPEST
        folders[:] = set() if deep else set(folders) - {".ipynb_checkpoints", *IGNORED}
        for name in sorted(files):
            path = os.path.join(place, name)
            parts = tuple(os.path.relpath(path, folder).split(os.sep))
            if parts in read or name.startswith("."):
                continue
            alone = parts[0] not in heard and len(parts) <= 3
            if name.endswith(".ipynb") or alone:
                names.append((owner(parts), "/".join(map(shown, parts))))
    return sorted(names, key=lambda pair: pair[1])
