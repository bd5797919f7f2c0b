"""Marks into nbgrader's gradebook, and out of it as one table.

The grader's points become the scores of the test cells. A written answer waits for a
person, in nbgrader's formgrader: ``autograded/<student>/<step>/`` gets the instructor's
notebook with the student's answers in it, and below each test what the grader found.
Points that a person has given stay when a submission is graded again.
"""

import json
import pathlib
import warnings

from exercises.grader import grade, release, submission, tasks

NOT_WRITTEN = "YOUR ANSWER HERE"  # what nbgrader leaves where a text is asked for


def record(course, step, graded, submissions):
    """Enter the marks {student: marks} of a step; submissions: {student: notebook as
    handed in}.

    The step must have been released in this course, which is what tells the gradebook
    its cells.
    """
    with release.nbgrader(course).gradebook as gradebook:
        for student, marks in sorted(graded.items()):
            gradebook.update_or_create_student(student)
            with warnings.catch_warnings():
                # nbgrader adds rows to a session that SQLAlchemy flushes a moment too
                # early; all are stored.
                warnings.filterwarnings(
                    "ignore", message="Object of type .* not in session"
                )
                entry = gradebook.update_or_create_submission(step, student)
            scores = {f"{mark['task']}-test": mark["points"] for mark in marks["tasks"]}
            answers = written_answers(submissions[student])
            for notebook in entry.notebooks:
                for cell in notebook.grades:
                    if cell.name in scores:
                        cell.auto_score, cell.needs_manual_grade = (
                            scores[cell.name],
                            False,
                        )
                    elif answers.get(cell.name, "").strip() in ("", NOT_WRITTEN):
                        cell.auto_score, cell.needs_manual_grade = 0.0, False
                    else:
                        cell.needs_manual_grade = cell.manual_score is None
            gradebook.db.commit()
            place = pathlib.Path(course) / "autograded" / student / step
            place.mkdir(parents=True, exist_ok=True)
            released = pathlib.Path(course) / "release" / step / f"{step}.ipynb"
            merged = with_answers(json.loads(released.read_text()), answers, marks)
            grade.write(place / f"{step}.ipynb", json.dumps(merged, indent=1).encode())


def written_answers(path):
    """{grade_id: source} of all graded cells of a notebook as handed in; {} where it
    cannot be read.
    """
    try:
        return {
            name: source
            for name, _, source in submission.graded_cells(path.read_bytes())
        }
    except submission.Unreadable:
        return {}


def with_answers(notebook, answers, marks):
    """The released notebook with a student's answers, and the grader's findings as
    outputs of the tests.
    """
    notes = {f"{mark['task']}-test": mark for mark in marks["tasks"]}
    for cell in notebook["cells"]:
        graded = cell["metadata"].get("nbgrader", {})
        name = graded.get("grade_id")
        if graded.get("solution") and name in answers:
            cell["source"] = answers[name]
        if name in notes:
            mark = notes[name]
            lines = [
                f"{mark['points']:g} of {mark['of']} points, {mark['passed']} of {mark['cases']} cases"
            ]
            text = "\n".join([*lines, *mark["notes"]]) + "\n"
            cell["outputs"] = [
                {"output_type": "stream", "name": "stdout", "text": text}
            ]
    return notebook


def table(course, path):
    """Write a CSV of the gradebook: student, assignment, points, of, whether a person
    must mark.
    """
    rows = [["student", "assignment", "points", "of", "waits for manual marks"]]
    with release.nbgrader(course).gradebook as gradebook:
        for step in tasks.STEPS:
            entries = {
                entry.student_id: entry
                for entry in gradebook.assignment_submissions(step)
            }
            for student in sorted(entries):
                entry = entries[student]
                waits = "yes" if entry.needs_manual_grade else "no"
                rows.append(
                    [student, step, f"{entry.score:g}", f"{entry.max_score:g}", waits]
                )
    grade.write_csv(path, rows)
    return len(rows) - 1
