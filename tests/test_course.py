"""The instructor's two commands: from a checkout to zips, from submissions to a CSV."""

import csv
import json
import os
import shutil
import sys
import zipfile

import practice
import pytest
from built import ROOT
from handed_in import handed_in, lay
from processes import make, output, run

from exercises.grader import __main__ as commands
from exercises.grader import gradebook, release, tasks

STEP = "machine"  # whose workers start without PyTorch


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.mark.slow
def test_two_commands_lead_to_a_table_of_marks(tmp_path):
    course, folder = tmp_path / "course", tmp_path / "handed-in"
    output(make("assignments", f"COURSE={course}", f"STEP={STEP}"))
    with zipfile.ZipFile(course / "zips" / f"{STEP}.zip") as zipped:
        released = zipped.read(f"{STEP}/{STEP}.ipynb").decode()
    assert "BEGIN SOLUTION" not in released and "NotImplementedError" in released

    secret = release.secret_of(course)
    solved = handed_in(tasks.assignment(STEP), secret, "ada")
    contents = {"ada": json.dumps(solved), "ben": released, "cy": ""}
    for student, content in contents.items():
        lay(folder, f"{student}/{STEP}.ipynb", content=content)
    output(make("grade", f"COURSE={course}", f"SUBMISSIONS={folder}"))
    total = practice.about(STEP).points
    by_program = sum(task.points for task in tasks.assignment(STEP).tasks)
    head, *marks = rows(course / "marks.csv")
    assert head == gradebook.COLUMNS
    assert [row[5] for row in marks] == ["graded", "graded", "unreadable"]
    assert [row[0] for row in marks] == ["ada", "ben", "cy"]
    points = {row[0]: float(row[2]) for row in marks}
    # The written answer waits for a person.
    assert points == {"ada": by_program, "ben": 0, "cy": 0} and by_program < total
    assert marks[0][4] == "yes"
    assert {float(row[3]) for row in marks} == {total}
    told = (course / "graded" / STEP / "ben" / "feedback.md").read_text()
    assert f"{STEP}: 0 of" in told

    program = shutil.which("nbgrader", path=os.path.dirname(sys.executable))
    export = [program, "export", "--to", "scores.csv"]
    output(run(export, cwd=course))
    exported = rows(course / "scores.csv")
    place = exported[0].index("student_id")
    assert {row[place] for row in exported[1:]} == {"ada", "ben", "cy"}


def test_grade_asks_for_the_folder(tmp_path):
    run = make("grade", f"COURSE={tmp_path}")
    assert run.returncode != 0 and "make grade SUBMISSIONS=folder" in run.stderr


def test_a_tilde_after_an_equals_sign_is_understood(tmp_path, monkeypatch, capsys):
    """Not every shell replaces it in ``make grade SUBMISSIONS=~/handed-in``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    lay(tmp_path, "handed-in/ada/my online.ipynb")
    with pytest.raises(SystemExit, match="no submission"):
        commands.main(["grade", "--course", "~/course", "--submissions", "~/handed-in"])
    assert "not a submission, by its place or name" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["students.csv", "deadlines.csv", "marks.csv"])
def test_a_table_that_is_not_utf8_is_named_before_the_work(name, tmp_path):
    """As a spreadsheet may save it."""
    lay(tmp_path, f"in/ada/{STEP}.ipynb")
    (tmp_path / name).write_bytes("student\nJos\u00e9\n".encode("latin-1"))
    options = ["--course", str(tmp_path), "--submissions", str(tmp_path / "in")]
    with pytest.raises(SystemExit) as refused:
        commands.main(["grade", *options])
    got = "got the byte 0xe9 at position 11"
    said = f"grade: {tmp_path / name}: expected a table in UTF-8, {got}"
    assert refused.value.code == said


def test_a_course_inside_the_repository_is_refused(tmp_path):
    for place in (ROOT, ROOT / "exercises/course", ROOT / "book"):
        with pytest.raises(ValueError, match="inside the repository"):
            release.outside(place)
    release.outside(ROOT / "_build/course")  # git ignores it
    release.outside(tmp_path)
    run = make("assignments", f"COURSE={ROOT / 'my-course'}")
    assert run.returncode != 0 and "inside the repository" in run.stderr
    assert not (ROOT / "my-course").exists()
