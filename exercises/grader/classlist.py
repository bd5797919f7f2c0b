"""Who is in the class, when work is due, and the tables of other systems.

Two files in the course folder are the instructor's, and both may be left out:
``students.csv``, whose first column has the students' names, and ``deadlines.csv`` with
a line ``assignment,deadline,percent`` for each assignment. Late work loses that
percentage of its points for each day that has begun.

A name on the list is that of the submission whose name agrees with it: "Doe, Jane" is
doejane_12 of a download of Canvas.
"""

import csv
import datetime
import math
import pathlib

from exercises.grader import folder, names, tasks
from flashlib import drawn

DAY = datetime.timedelta(days=1)
# Where tables of Moodle have names; any other class list has them in its first column.
NAMED = (("full name",), ("first name", "last name"), ("first name", "surname"))
# Lines of a class list that are nobody, the last two in exports of Canvas.
NOBODY = {"student", "name", "id", *map(" ".join, NAMED)}
NOBODY |= {"points possible", "student, test"}


def lines(path):
    """The lines of a CSV file that are not empty; [] where there is no file. Where
    decimals have a comma, spreadsheets separate by semicolons.

    Raises ValueError for a file that is not UTF-8.
    """
    try:
        rows = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        return []
    except UnicodeDecodeError as error:
        got = f"the byte 0x{error.object[error.start]:02x} at position {error.start}"
        raise ValueError(f"{path}: expected a table in UTF-8, got {got}") from None
    comma = next((sign for sign in ";\t" if rows and sign in rows[0]), ",")
    return [row for row in csv.reader(rows, delimiter=comma) if row and row[0].strip()]


def students(course):
    """The names on the class list."""
    rows = lines(pathlib.Path(course) / "students.csv")
    head = [cell.strip().lower() for cell in rows[0]] if rows else []
    titles = next((titles for titles in NAMED if set(titles) <= set(head)), ())
    places = [head.index(title) for title in titles] or [0]
    found = [" ".join(row[n].strip() for n in places if n < len(row)) for row in rows]
    return [name for name in found if name.lower() not in NOBODY]


def meant(name, known):
    """The students in ``{student: name}`` whom a name means: itself, or all whose names
    agree with it, those with the same words first.
    """
    if name in known:
        return [name]
    same = [s for s, written in known.items() if names.agree(name, written)]
    form = drawn.normalize(name)
    return sorted(same, key=lambda s: (drawn.normalize(known[s]) != form, s))


def matched(listed, known):
    """{student: name on the class list} of the names on the list: of the student in
    ``{student: name}`` whom it means, or of the name itself. Two of one name are two.
    """
    found, taken = {}, set(listed) & set(known)
    for name in listed:
        free = [s for s in meant(name, known) if s == name or s not in taken]
        student = free[0] if free else name
        found[student] = name
        taken.add(student)
    return found


def deadlines(course):
    """{step: (deadline, percent of the points a day)}; raises ValueError."""
    found, path = {}, pathlib.Path(course) / "deadlines.csv"
    for row in lines(path):
        step, when, percent, *_ = [*(part.strip() for part in row), "", ""]
        if step == "assignment":
            continue
        try:
            share = float(percent or 0)
            found[step] = datetime.datetime.fromisoformat(when).astimezone(), share
        except ValueError:
            share = math.nan
        if step not in tasks.STEPS or not 0 <= share <= 100:
            example, got = "online,2027-05-03 23:59,10", ",".join(row)
            raise ValueError(f"{path}: expected a line such as {example}, got {got}")
    return found


def lateness(state, deadline):
    """(days late, what to write in the table, share of the points that is lost). A time
    that nobody has recorded is no proof, and costs nothing.
    """
    if deadline is None or not state.get("moment"):
        return 0, "yes" if state.get("late") else "", 0.0
    late = datetime.datetime.fromisoformat(state["moment"]) - deadline[0]
    days = max(0, math.ceil(late / DAY))
    if not state.get("recorded"):
        return 0, "perhaps" if days else "", 0.0
    return days, str(days) if days else "", min(1.0, days * deadline[1] / 100)


def export(course, points, states):
    """Write tables that learning management systems import: ``canvas.csv``, and
    ``moodle-<step>.csv`` for each step; returns the paths.

    points: {(student, step): points}; states: {step: {student: state}}
    """
    course, numbers, written = pathlib.Path(course), {}, []
    for step, entries in states.items():
        moodle = []
        for student, state in sorted(entries.items()):
            if state.get("system") == "canvas":
                numbers[student] = state["name"], state["number"]
            if state.get("system") == "moodle" and (student, step) in points:
                number = f"Participant {state['number']}"
                moodle.append([number, state["name"], points[student, step]])
        if moodle:
            written.append(course / f"moodle-{step}.csv")
            head = ["Identifier", "Full name", "Grade"]
            folder.write_csv(written[-1], [head, *moodle])
    if numbers:
        steps = [step for step in states if any((s, step) in points for s in numbers)]
        head = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", *steps]
        rows = [
            [name, number, "", "", "", *(points.get((s, step), "") for step in steps)]
            for s, (name, number) in sorted(numbers.items())
        ]  # fmt: skip
        written.append(course / "canvas.csv")
        folder.write_csv(written[-1], [head, *rows])
    return written
