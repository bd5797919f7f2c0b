"""Marks into nbgrader's gradebook, and out of it as one table.

The grader's points become the scores of the test cells. A written answer waits for a
person, in nbgrader's formgrader: ``autograded/<student>/<step>/`` gets the instructor's
notebook with the student's answers in it, and below each test what the grader found.
Points that a person has given stay when a submission is graded again. If the answer has
changed since, it waits for a person again.
"""

import contextlib
import hashlib
import json
import pathlib
import re
import warnings

import nbformat

from exercises.grader import classlist, folder, grade, release, submission, tasks

NOT_WRITTEN = "YOUR ANSWER HERE"  # what nbgrader leaves where a text is asked for
COLUMNS = ["student", "assignment", "points", "of", "waits for manual marks",
           "status", "late", "missing", "remarks"]  # fmt: skip
# What can become HTML, a link or an image in Markdown or in a formula.
LIVELY = re.compile(
    r"<|\]\s*[(\[:]|&#?\w+;|javascript|data:|\\(?:href|url|html|class|cssId|style|data|unicode|require|"
    r"def|let|newcommand|renewcommand|csname|mmlToken|includegraphics)"
)


def harmless(text):
    """A written answer as Markdown that a browser can show: where it has HTML, links or
    images, its source, as a block of code.
    """
    text = text.encode(errors="replace").decode().replace("\x00", "")
    if not LIVELY.search(text):
        return text
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def record(course, step, graded, say=print):
    """Enter the marks {student: marks} of a step.

    The step must have been released in this course: the gradebook has its cells then.
    """
    place = pathlib.Path(course) / "graded" / step
    seen, states = folder.known(place / "written.json"), states_of(course, step)
    released = pathlib.Path(course) / "release" / step / f"{step}.ipynb"
    released = released.read_text("utf-8")
    with release.nbgrader(course).gradebook as gradebook:
        for student in states:
            gradebook.update_or_create_student(student)
        for student, marks in sorted(graded.items()):
            try:
                answers = written_answers(place / student / "received.ipynb")
                old = seen.get(student, {})
                seen[student] = enter(gradebook, step, student, marks, answers, old)
                folder_of = pathlib.Path(course) / "autograded" / student / step
                folder_of.mkdir(parents=True, exist_ok=True)
                merged = with_answers(json.loads(released), answers, marks)
                folder.write_json(folder_of / f"{step}.ipynb", merged)
            except Exception as error:  # the others are entered all the same
                with contextlib.suppress(Exception):
                    gradebook.db.rollback()
                remark = f"not in the gradebook: {grade.fault(error)}"
                say(f"{student}: {remark}")
                states.setdefault(student, {"status": "not graded", "remarks": []})
                states[student]["remarks"] = [*states[student]["remarks"], remark]
    folder.write_json(place / "written.json", seen)
    folder.write_json(place / "states.json", states)


def forget(course, students):
    """Take students out of the gradebook, unless they have handed something in."""
    if not students:
        return
    from nbgrader.api import MissingEntry

    with release.nbgrader(course).gradebook as gradebook:
        for student in students:
            with contextlib.suppress(MissingEntry):
                if not gradebook.student_submissions(student):
                    gradebook.remove_student(student)


def enter(gradebook, step, student, marks, answers, seen):
    """Enter one student's marks; returns {cell: what :func:`waits` says of it}."""
    with warnings.catch_warnings():
        # SQLAlchemy flushes a session before nbgrader has added all; all are stored.
        warnings.filterwarnings("ignore", message="Object of type .* not in session")
        entry = gradebook.update_or_create_submission(step, student)
    scores = {f"{mark['task']}-test": mark["points"] for mark in marks["tasks"]}
    known = {}
    for notebook in entry.notebooks:
        for cell in notebook.grades:
            if cell.name in scores:
                cell.auto_score, cell.needs_manual_grade = scores[cell.name], False
                continue
            answer = answers.get(cell.name, "").strip()
            empty = answer in ("", NOT_WRITTEN)
            if empty:
                cell.auto_score = 0.0
            digest = hashlib.sha256(answer.encode(errors="replace")).hexdigest()
            looked = not cell.needs_manual_grade
            now = digest, cell.manual_score, empty, looked
            known[cell.name] = waits(seen.get(cell.name), *now)
            cell.needs_manual_grade = known[cell.name]["waited"]
    gradebook.db.commit()
    return known


def waits(before, answer, score, empty, looked):
    """What to remember of a written answer; ``waited``: whether it waits for a person.

    before    what was remembered at the last run, None at the first
    answer    the checksum of the answer now
    score     the points that a person has given, or None
    looked    a person has entered points since the last run, where it waited
    """
    marked = answer
    if score is not None and before is not None:
        again = before["score"] != score or (before["waited"] and looked)
        marked = before["answer"] if again else before["marked"]
    waited = not empty if score is None else marked != answer
    return {"answer": answer, "score": score, "marked": marked, "waited": waited}


def written_answers(path):
    """{grade_id: source} of all graded cells; {} where there is no notebook."""
    try:
        cells = submission.cells_of(path.read_bytes())
        return {name: source for name, _, source in cells if name is not None}
    except (submission.Unreadable, OSError):
        return {}


def with_answers(notebook, answers, marks):
    """The released notebook with a student's answers and the findings."""
    notes = {f"{mark['task']}-test": mark for mark in marks["tasks"]}
    for cell in notebook["cells"]:
        graded = cell["metadata"].get("nbgrader", {})
        name = graded.get("grade_id")
        if graded.get("solution") and name in answers:
            text = answers[name]
            cell["source"] = text if cell["cell_type"] == "code" else harmless(text)
        if name in notes:
            mark = notes[name]
            cases = f"{mark['passed']} of {mark['cases']} cases"
            head = f"{mark['points']:g} of {mark['of']} points, {cases}"
            text = "\n".join([head, *mark["notes"]]) + "\n"
            cell["outputs"] = [nbformat.v4.new_output("stream", text=text)]
    return notebook


def states_of(course, step):
    """{student: state} of a step; a name that nobody has handed in is the student's."""
    states = folder.known(pathlib.Path(course) / "graded" / step / "states.json")
    return {student: {"name": student} | state for student, state in states.items()}


def everybody(course):
    """{student: name as it was handed in, None if nothing was} of all in the tables."""
    found = {}
    for step in tasks.STEPS:
        for student, state in states_of(course, step).items():
            if state["status"] == "missing":
                found.setdefault(student, None)
            else:
                found[student] = state["name"]
    return found


def table(course, path):
    """Write a CSV of the gradebook, one line for each student and assignment, and the
    tables for other systems; returns how many lines there are and the paths.

    A line of an earlier table that is not made anew is kept, but for those of students
    who were missing: the class list has been corrected since.
    """
    due = classlist.deadlines(course)
    points, rows = {}, {}
    every = {step: states_of(course, step) for step in tasks.STEPS}
    with release.nbgrader(course).gradebook as gradebook:
        for step, states in every.items():
            entries = gradebook.assignment_submissions(step)
            entries = {entry.student_id: entry for entry in entries}
            highest = max((entry.max_score for entry in entries.values()), default="")
            for student in sorted({*entries, *states}):
                state = states.get(student, {"status": "graded", "remarks": []})
                entry, remarks = entries.get(student), list(state["remarks"])
                days, late, lost = classlist.lateness(state, due.get(step))
                score = entry.score if entry else 0.0
                if score * lost:
                    late_by = f"{days} day{'s' * (days > 1)} late"
                    remarks.append(f"{round(score * lost, 2):g} points less, {late_by}")
                of = entry.max_score if entry else highest
                manual = "yes" if entry and entry.needs_manual_grade else "no"
                missing = "yes" if state["status"] == "missing" else "no"
                points[student, step] = f"{round(score * (1 - lost), 2):g}"
                rows[student, step] = [
                    student, step, points[student, step],
                    of if of == "" else f"{of:g}", manual, state["status"], late,
                    missing, "; ".join(remarks),
                ]  # fmt: skip
    for old in classlist.lines(path)[1:]:
        old = [*old, *[""] * len(COLUMNS)][: len(COLUMNS)]  # people edit tables
        if old[1] and old[COLUMNS.index("status")] != "missing":
            rows.setdefault((old[0], old[1]), old)
    place = {step: number for number, step in enumerate(tasks.STEPS)}
    order = sorted(rows, key=lambda key: (place.get(key[1], len(place)), *key[::-1]))
    folder.write_csv(path, [COLUMNS, *(rows[key] for key in order)])
    return len(rows), classlist.export(course, points, every)
