"""A folder of submissions to marks, feedback and one table.

Nothing in the folder is changed. For each student ``<output>/<step>/<student>/`` gets
``received.ipynb``, byte for byte what was handed in, ``marks.json`` and
``feedback.md``; ``<output>/<step>/`` gets ``marks.csv`` with one line a student,
``statistics.html``, and ``states.json``, which remembers everybody.

A run that was interrupted goes on where it stopped: what has been graded with the same
bytes, secret and grader is not graded again. Grading again gives the same files.
"""

import concurrent.futures
import csv
import hashlib
import io
import json
import os
import pathlib
import queue
import statistics
import time
from datetime import datetime

from exercises.grader import grade, inbox, report, sandbox, submission, tasks


def fingerprint(assignment, secret):
    """What a mark depends on besides the submission, as a checksum."""
    digest = hashlib.sha256(hashlib.sha256(b"marks" + secret).digest())
    # The checks import references and counts from all over the library.
    folders = pathlib.Path(__file__).parent, tasks.ROOT.parent / "flashlib"
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    for path in (*files, assignment.notebook):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write(path, content):
    """Write bytes, all of them or none, for the owner alone."""
    temporary = path.with_name(f".{path.name}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)
    os.replace(temporary, path)


def write_json(path, value):
    """Write a value that :func:`known` reads."""
    write(path, (json.dumps(value, indent=1) + "\n").encode())


def write_csv(path, rows):
    """Write a table; a spreadsheet takes no text of it for a formula."""
    text = io.StringIO(newline="")
    for row in rows:
        formula = [isinstance(x, str) and x[:1] in tuple("=+-@\t") for x in row]
        told = (f"'{x}" if y else x for x, y in zip(row, formula, strict=True))
        csv.writer(text).writerow(told)
    write(path, text.getvalue().encode(errors="backslashreplace"))


def known(path):
    """What a JSON file of ours holds, {} where it is not there or not whole."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


UNREAD = "not graded, by its place or name: {}"
BY_HAND = """\
The written answer is marked by hand, and its points are not in this sum. Of each task,
the first case that fails is described."""


def feedback(student, marks):
    """The marks as Markdown for the student."""
    lines = [f"# {marks['step']}: {marks['points']:g} of {marks['of']} points", ""]
    lines += [f"Student: {student}", ""]
    lines += [BY_HAND, "", f"Graded file (SHA-256): `{marks['sha256']}`", ""]
    lines += [f"- {remark}" for remark in marks["remarks"]]
    lines += [""] * bool(marks["remarks"])
    for mark in marks["tasks"]:
        cases = f", {mark['passed']} of {mark['cases']} cases" * (mark["cases"] > 1)
        lines.append(f"## {mark['task']}: {mark['points']:g} of {mark['of']}{cases}")
        lines += ["", *[f"- {note}" for note in dict.fromkeys(mark["notes"])], ""]
    return "\n".join(lines).rstrip() + "\n"


def merged(marks, earlier, task):
    """The earlier marks of the same bytes with those of one task renewed."""
    if not task or earlier.get("sha256") != marks["sha256"]:
        return marks
    old = {mark["task"]: mark for mark in earlier["tasks"]}
    kept = [m if m["task"] == task else old[m["task"]] for m in marks["tasks"]]
    points = round(sum(mark["points"] for mark in kept), 2)
    return {**marks, "tasks": kept, "points": points}


class Run:
    """One run over a folder: what stays the same for every submission."""

    def __init__(
        self, step, submissions, output, secret, package, jobs, again, task, students
    ):
        self.assignment, self.secret = tasks.assignment(step), secret
        self.submissions, self.package = submissions, package
        self.students = students
        self.output = pathlib.Path(output) / step
        self.mark = fingerprint(self.assignment, secret)
        self.again, self.task = again, task
        self.slots = queue.SimpleQueue()
        for slot in range(jobs):
            self.slots.put(slot)

    def one(self, entry):
        """Grade a student's submission, unless that has been done: (marks, when it was
        handed in or None, seconds or None).
        """
        try:
            content, moment = inbox.read(self.submissions, entry.parts)
            reason = None
        except submission.Unreadable as unreadable:
            content, moment, reason = b"", None, str(unreadable)
        place = self.output / entry.student
        place.mkdir(parents=True, exist_ok=True)
        earlier = known(place / "marks.json")
        name = self.students.get(entry.student, entry.name)
        sha256 = hashlib.sha256(content).hexdigest()
        now = {"sha256": sha256, "grader": self.mark, "name": name}
        same = now.items() <= earlier.items()
        if same and not self.again and reason in (None, *earlier["remarks"]):
            return earlier, moment, None
        write(place / "received.ipynb", content)
        slot, start = self.slots.get(), time.monotonic()
        try:
            rest = self.secret, self.package, name, slot
            marks = grade.grade_one(self.assignment, content, *rest)
        finally:
            self.slots.put(slot)
        if reason is not None:
            marks["remarks"] = [reason]
        marks = merged(marks | now, earlier, self.task)
        write(place / "feedback.md", feedback(entry.student, marks).encode())
        # Last: its presence says that this student is done.
        write_json(place / "marks.json", marks)
        return marks, moment, time.monotonic() - start


def grade_all(
    step, submissions, output, secret, package, jobs=2, say=print, students=None,
    only=(), task=None, unread=None,
):  # fmt: skip
    """Grade every submission of a folder: {student: marks} of all that are graded.

    package    the folder of what the given cells may import in the sandbox
    students   {student: name on the class list}: who is on it and has handed nothing in
               is missing, and nobody else
    only       the students to grade again, whatever was done before; () for all that
               are new
    task       the only task to grade again
    unread     {student: what was handed in for this step and cannot be graded}

    Raises SandboxMissing where none can be made, ValueError where there is nothing to
    grade. Nothing that a student hands in raises.
    """
    sandbox.require()
    entries = inbox.collect(submissions, step)
    found = {s: e for s, e in entries.items() if e.parts and (not only or s in only)}
    if not found:
        raise ValueError(inbox.NOBODY.format(submissions, step=step))
    students, unread = students or {}, unread or {}
    run = Run(
        step, submissions, output, secret, package, jobs, bool(only or task), task,
        students,
    )  # fmt: skip
    run.output.mkdir(parents=True, exist_ok=True)
    # Who was missing may be so no longer, or was on a list that has been corrected.
    states = known(run.output / "states.json").items()
    states = {s: state for s, state in states if state["status"] != "missing"}
    for student in {*students, *entries, *unread} - set(states):
        remarks = [UNREAD.format(x) for x in unread.get(student, ())]
        states[student] = {"status": "missing", "remarks": remarks}
    taken, begun = [], time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run.one, found[student]): student for student in found}
        for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
            student = futures[future]
            left = (time.monotonic() - begun) / number * (len(found) - number) / 60
            head = f"[{number:4}/{len(found)}] {student}:"
            soon = f", {left:.0f} min left" * (left > 0.5)
            try:
                marks, moment, seconds = future.result()
            except Exception as error:  # the others are graded all the same
                remark = f"the grader failed: {grade.fault(error)}"
                say(f"{head} NOT GRADED, {remark}")
                states[student] = {"status": "not graded", "remarks": [remark],
                                   "name": found[student].name}  # fmt: skip
                continue
            for fault in marks["faults"]:
                say(f"{head} {fault}")
            taken += [] if seconds is None else [seconds]
            how = " (graded before)" if seconds is None else f" in {seconds:.1f} s"
            say(f"{head} {marks['points']:g} of {marks['of']}{how}{soon}")
            before = states.get(student, {})
            states[student] = state_of(found[student], marks, moment, before)
    states = dict(sorted(states.items()))  # not in the order in which they were done
    graded = {s: known(run.output / s / "marks.json") for s in states}
    graded = {s: marks for s, marks in graded.items() if "tasks" in marks}
    write(run.output / "statistics.html", report.page(run, graded, states))
    missing = []
    for student, state in states.items():
        if state["status"] == "missing" and not state["remarks"]:
            missing.append(student)
        elif state["status"] != "graded":
            say(": ".join([student, state["status"], *state["remarks"]]))
    if missing:
        say(f"missing: {', '.join(missing)}")
    write_json(run.output / "states.json", states)
    write_table(run.assignment, graded, states, run.output / "marks.csv")
    if taken:
        say(f"{len(taken)} graded, {statistics.median(taken):.1f} s each (median)")
    return graded


def state_of(entry, marks, moment, before):
    """What is remembered of a student besides the marks.

    moment  (when it was handed in, whether that was recorded), or None
    before  what was remembered before; the same bytes keep their earlier moment
    """
    moments, sha256 = before.get("moments", {}), marks["sha256"]
    # Archives of such systems have the time of the download.
    if moment and not entry.system:
        known = filter(None, [moments.get(sha256), [moment[0].isoformat(), moment[1]]])
        first = min(known, key=lambda x: (not x[1], datetime.fromisoformat(x[0])))
        moments = {**moments, sha256: first}
    when, recorded = moments.get(sha256, (None, False))
    state = {"status": "graded" if marks["readable"] else "unreadable"}
    state |= {"remarks": marks["remarks"], "moment": when, "recorded": recorded}
    told = {x: getattr(entry, x) for x in ("late", "name", "system", "number")}
    return state | {"moments": moments} | told


def write_table(assignment, graded, states, path):
    """One line a student: points of each task, the sum, what was graded and how."""
    names = [task.name for task in assignment.tasks]
    rows = [["student", *names, "points", "of", "sha256", "status", "remarks"]]
    of = sum(task.points for task in assignment.tasks)
    nothing = {"tasks": [], "points": 0.0, "of": of, "sha256": ""}
    for student, state in sorted(states.items()):
        marks = graded.get(student, nothing)
        points = {mark["task"]: mark["points"] for mark in marks["tasks"]}
        total = [marks[column] for column in ("points", "of", "sha256")]
        remarks = "; ".join(state["remarks"])
        told = [*(points.get(name, 0.0) for name in names), *total]
        rows.append([student, *told, state["status"], remarks])
    write_csv(path, rows)
