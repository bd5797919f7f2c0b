"""What an instructor gets for a whole class: states, deadlines, tables, statistics."""

import csv
import datetime
import json
import os
import pathlib
import shutil
import types
import zipfile

import pytest
from device import CUDA
from handed_in import (
    grade_id,
    lay,
    results,
    source_notebook,
    sources_of,
    start_without_sandbox,
)

from exercises.grader import __main__ as commands
from exercises.grader import (
    channel,
    classlist,
    folder,
    grade,
    gradebook,
    inbox,
    release,
    report,
    sandbox,
    tasks,
)

ONLINE = tasks.assignment("online")


MOODLE = "Jane Doe_77_assignsubmission_file_online"


@pytest.mark.parametrize(
    ("name", "student", "system", "number"),
    [
        ("doejane_12_345_online.ipynb", "doejane_12", "canvas", "12"),
        ("doejane_LATE_12_345_online-2.ipynb", "doejane_12", "canvas", "12"),
        (f"{MOODLE}.ipynb", "Jane Doe_77", "moodle", "77"),
        (f"{MOODLE} (1).ipynb", "Jane Doe_77", "moodle", "77"),
    ],
)  # fmt: skip
def test_downloads_of_learning_management_systems(
    name, student, system, number, tmp_path
):
    lay(tmp_path, name)
    (entry,) = inbox.collect(tmp_path, "online").values()
    assert (entry.student, entry.system, entry.number) == (student, system, number)
    assert entry.late == ("LATE" in name) and inbox.read(tmp_path, entry.parts)
    assert inbox.collect(tmp_path, "flash1") == {}
    assert inbox.left_over(tmp_path, [{student: entry}]) == []


def test_the_last_attempt_counts(tmp_path):
    lay(tmp_path, "a_1_9_online.ipynb", "a_1_10_online.ipynb", "a_1_2_online.ipynb")
    lay(tmp_path, "Jane Doe_5_assignsubmission_file_/online.ipynb")
    found = inbox.collect(tmp_path, "online")
    assert found["a_1"].parts == ("a_1_10_online.ipynb",)
    assert found["Jane Doe_5"].number == "5"


def test_when_a_notebook_was_handed_in(tmp_path):
    place = tmp_path / "ada/online"
    lay(place, "online.ipynb")
    os.utime(place / "online.ipynb", (1000, 1000))
    parts = ("ada", "online", "online.ipynb")
    when, recorded = inbox.read(tmp_path, parts)[1]
    assert when.timestamp() == 1000 and not recorded
    noon = datetime.datetime(2027, 5, 3, 12, tzinfo=datetime.UTC).timestamp()
    for text, moment in {
        "2027-05-03 12:00:00.25 UTC": noon + 0.25, "": 1000, "x" * 300: 1000,
        "2027-05-03 99:00 UTC": 1000, "2027-05-03 12:00 ../../x": 1000,
        "2027-05-03 12:00 CEST": 1000,
    }.items():  # fmt: skip
        (place / "timestamp.txt").write_text(text)
        when, recorded = inbox.read(tmp_path, parts)[1]
        assert when.timestamp() == moment and recorded == (moment != 1000)


def test_late_work_loses_its_percent_for_each_day(tmp_path):
    (tmp_path / "deadlines.csv").write_text(
        "assignment,deadline,percent\nonline,2027-05-03T12:00+00:00,50\n"
    )
    due = classlist.deadlines(tmp_path)["online"]
    wanted = {-1: (0, "", 0), 0: (0, "", 0), 1: (1, "1", 0.5), 25: (2, "2", 1)}
    for hours, expected in {**wanted, 99: (5, "5", 1.0)}.items():
        moment = due[0] + datetime.timedelta(hours=hours)
        state = {"moment": moment.isoformat(), "recorded": True}
        assert classlist.lateness(state, due) == expected
        unknown = classlist.lateness({**state, "recorded": False}, due)
        assert unknown == (0, "perhaps" * bool(expected[0]), 0.0)
    assert classlist.lateness({"late": True}, None) == (0, "yes", 0.0)
    (tmp_path / "deadlines.csv").write_text("online;2027-05-03T12:00+00:00;50\n")
    assert classlist.deadlines(tmp_path)["online"] == due
    for wrong in ("online", "online,tomorrow", "x,2027-05-03", "online,2027-05-03,200"):
        (tmp_path / "deadlines.csv").write_text(wrong)
        with pytest.raises(ValueError, match="expected a line such as"):
            classlist.deadlines(tmp_path)


def test_a_download_has_no_times_of_its_own():
    moment = datetime.datetime.fromtimestamp(1000, datetime.UTC), False
    entry = inbox.HandIn("ada", "ada", ("ada", "online.ipynb"))
    assert folder.state_of(entry, marks_of(0, 0, 0, 0), moment, {})["moment"]
    entry = entry._replace(system="canvas", late=True)
    state = folder.state_of(entry, marks_of(0, 0, 0, 0), moment, {})
    assert state["moment"] is None and state["late"]


def late(place, *students):
    """{student: what the table says about lateness, and the share that is lost} for a
    class that is graded anew, without running anything.
    """
    due = datetime.datetime(2027, 5, 3, tzinfo=datetime.UTC), 10.0
    output = place.parent / "out"
    folder.grade_all("online", place, output, b"s", place, say=lambda line: None)
    states = folder.known(output / "online/states.json")
    return {name: classlist.lateness(states[name], due)[1:] for name in students}


@pytest.fixture
def nothing_runs(monkeypatch):
    nothing = channel.Outcome({}, {}, None, None)
    monkeypatch.setattr(grade, "work", lambda *job: nothing)


def test_the_same_bytes_handed_in_again_keep_the_earlier_time(tmp_path, nothing_runs):
    place, names = tmp_path / "in", ("ada", "ben")
    stamp = place / "ada/online/timestamp.txt"
    lay(place, "ada/online/online.ipynb", "ben/online/online.ipynb")
    for day, text, wanted in (
        ("02", "{}", ("", 0.0)), ("05", "{}", ("", 0.0)), ("06", "{} ", ("4", 0.4)),
        ("07", "{}", ("", 0.0)), ("05", "{} ", ("3", 0.3)), ("09", "[]", ("7", 0.7)),
    ):  # fmt: skip
        stamp.write_text(f"2027-05-{day} 12:00:00 UTC")
        (place / "ada/online/online.ipynb").write_text(text)
        assert late(place, *names)["ada"] == wanted, (day, text)


def test_a_copy_of_a_class_without_its_times_penalizes_nobody(tmp_path, nothing_runs):
    place = tmp_path / "in"
    lay(place, "ada/online.ipynb", "ben/online/online.ipynb", "cy/online/online.ipynb")
    (place / "ben/online/timestamp.txt").write_text("2027-05-02 12:00:00 UTC")
    (place / "cy/online/timestamp.txt").write_text("2027-05-03 12:00:00 UTC")
    before = {"ada": ("", 0.0), "ben": ("", 0.0), "cy": ("1", 0.1)}
    os.utime(place / "ada/online.ipynb", (1000, 1000))
    assert late(place, *before) == before
    for again in (False, True):  # graded before, and for the first time
        shutil.rmtree(tmp_path / "out") if again else None
        copy = shutil.copytree(place, tmp_path / f"copy {again}")
        for path in copy.rglob("*.ipynb"):
            os.utime(path, (2e9, 2e9))
        found = late(copy, *before)
        assert found == {**before, "ada": ("perhaps" * again, 0.0)}


def marks_of(*points, notes=("the same note",)):
    listed = [
        {"task": t.name, "points": p, "of": t.points, "passed": 0, "cases": 1,
         "notes": list(notes)}
        for t, p in zip(ONLINE.tasks, points, strict=True)
    ]  # fmt: skip
    return {"step": "online", "sha256": "x", "tasks": listed, "points": sum(points),
            "of": 14, "remarks": [], "faults": [], "readable": True}  # fmt: skip


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    place = tmp_path_factory.mktemp("released")
    release.release("online", place)
    return place


def test_the_exchange_gives_what_the_zip_has(released):
    """nbgrader releases the folder of an assignment as it is."""
    place = released / "release/online"
    files = {path for path in place.rglob("*") if path.is_file()}
    with zipfile.ZipFile(released / "zips/online.zip") as zipped:
        for name in zipped.namelist():
            path = released / "release" / name
            assert path.read_bytes() == zipped.read(name)
            files.remove(path)
    assert not files
    notebook = json.loads((place / "online.ipynb").read_text())
    assert "check.py" in "".join(notebook["cells"][-1]["source"])


@pytest.fixture
def course(released, tmp_path):
    """A course with *online* released and nothing graded."""
    return pathlib.Path(shutil.copytree(released, tmp_path / "course"))


def enter(course, points, answer="Because."):
    """Record these {student: points}, whose written answers are ``answer``."""
    place, graded, states = course / "graded/online", {}, {}
    made = source_notebook(ONLINE)
    for cell in made["cells"]:
        if cell["cell_type"] == "markdown" and "nbgrader" in cell["metadata"]:
            cell["source"] = answer
    for student, given in points.items():
        lay(place, f"{student}/received.ipynb", content=json.dumps(made))
        graded[student] = marks_of(given, 0, 0, 0)
        states[student] = {"status": "graded", "remarks": [], "moment": None}
    states["dan"] = {"status": "missing", "remarks": []}
    folder.write(place / "states.json", json.dumps(states).encode())
    gradebook.record(course, "online", graded)
    count, _ = gradebook.table(course, course / "marks.csv")
    with open(course / "marks.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == count
    return {row["student"]: row for row in rows}


def test_the_table_has_everybody_and_never_loses_a_line(course, released):
    rows = enter(course, {"ada": 2, "ben": 1})
    assert {n: (r["points"], r["status"], r["missing"]) for n, r in rows.items()} == {
        "ada": ("2", "graded", "no"), "ben": ("1", "graded", "no"),
        "dan": ("0", "missing", "yes"),
    }  # fmt: skip
    shutil.copy(released / "gradebook.db", course)
    (course / "graded/online/states.json").unlink()
    rows = enter(course, {"ada": 2})
    assert rows["ben"]["points"] == "1", "an earlier line is gone"


def test_an_earlier_table_may_have_been_edited(course):
    lines = ["", "eve,online,1", "fay,old,1,2,no,graded,,no,,more", "nobody"]
    header = ",".join(gradebook.COLUMNS)
    (course / "marks.csv").write_text("\n".join([header, *lines, ""]))
    rows = enter(course, {"ada": 2})
    assert list(rows) == ["ada", "dan", "eve", "fay"]
    assert rows["eve"]["points"] == rows["fay"]["points"] == "1"


def test_a_student_whom_the_gradebook_cannot_take_stops_nobody(course, capsys):
    (course / "autograded").mkdir()
    (course / "autograded/ada").write_text("a file where a folder has to be")
    rows = enter(course, {"ada": 2, "ben": 1})
    assert "not in the gradebook" in rows["ada"]["remarks"]
    assert rows["ben"]["points"] == "1" and rows["ben"]["remarks"] == ""
    assert "ada: not in the gradebook" in capsys.readouterr().out


def test_points_given_by_hand_are_flagged_when_the_answer_changes(course):
    assert enter(course, {"ada": 2})["ada"]["waits for manual marks"] == "yes"

    def mark(points):
        with release.nbgrader(course).gradebook as book:
            (notebook,) = book.find_submission("online", "ada").notebooks
            for cell in notebook.grades:
                if not cell.name.endswith("-test"):
                    cell.manual_score, cell.needs_manual_grade = points, False
            book.db.commit()

    def waits(answer="Because."):
        row = enter(course, {"ada": 2}, answer)["ada"]
        return row["waits for manual marks"], row["points"]

    mark(1)
    assert waits() == ("no", "3")
    assert waits("Another.") == ("yes", "3")
    assert waits("Another.") == ("yes", "3"), "the flag went without a look"
    mark(1)
    assert waits("Another.") == ("no", "3")
    mark(2)
    assert waits("A third, after the marks.") == ("yes", "4")


def test_the_tables_of_other_systems(tmp_path):
    states = {
        "online": {
            "doejane_12": {"name": "doejane", "system": "canvas", "number": "12"},
            "Jane Doe_77": {"name": "Jane Doe", "system": "moodle", "number": "77"},
            "ada": {"name": "ada", "system": "", "number": ""},
        }
    }
    points = {(name, "online"): "3" for name in states["online"]}
    paths = classlist.export(tmp_path, points, states)
    tables = [path.read_text().splitlines() for path in paths]
    assert tables == [
        ["Identifier,Full name,Grade", "Participant 77,Jane Doe,3"],
        ["Student,ID,SIS User ID,SIS Login ID,Section,online", "doejane,12,,,,3"],
    ]


def test_one_task_is_renewed_and_the_others_stay():
    earlier, now = marks_of(2, 2, 4, 6), marks_of(0, 0, 1, 0)
    renewed = folder.merged(now, earlier, "merge")
    assert [mark["points"] for mark in renewed["tasks"]] == [2, 2, 1, 6]
    assert renewed["points"] == 11
    assert folder.merged({**now, "sha256": "other"}, earlier, "merge")["points"] == 1


def test_statistics_and_equal_submissions(tmp_path):
    run = types.SimpleNamespace(assignment=ONLINE, output=tmp_path)
    for name, numbers in (("ada", "m = 4"), ("ben", "m = 5"), ("eve", None)):
        made = source_notebook(ONLINE)
        changes = {"merge": "# a comment\nmerge  =  5", "state": numbers}
        for cell in made["cells"] if numbers else ():
            cell["source"] = changes.get(grade_id(cell), cell["source"])
        lay(tmp_path, f"{name}/received.ipynb", content=json.dumps(made))
    graded = {
        "ada": marks_of(2, 0, 0, 6, notes=("<b>wrong</b>",)),
        "ben": marks_of(2, 2, 0, 6, notes=("<b>wrong</b>",)),
        "eve": marks_of(2, 2, 4, 6, notes=()),
    }
    states = {name: {"remarks": []} for name in graded}
    page = report.page(run, graded, states).decode()
    assert states["ada"]["remarks"] == ["the same code as ben"]
    assert states["eve"]["remarks"] == ["the same code as the public solution"]
    assert "<p>2 times: &lt;b&gt;wrong&lt;/b&gt;</p>" in page and "<b>" not in page
    assert "state: 2.00 of 2 points" in page and "ada, ben" in page
    report.page(run, graded, states)
    assert states["ada"]["remarks"] == ["the same code as ben"], "said twice"


def test_code_is_equal_whatever_names_it_gives():
    source = "def merge(a, b):\n    m = max(a, b)\n    return m, f(key=m)"
    renamed = (
        "def merge(x, y):\n    top = max(x, y)  # mine\n    return top, f(key=top)"
    )
    assert report.program(source) == report.program(renamed)
    for other in ("max(b, a)", "min(a, b)", "max(a, a)"):
        changed = source.replace("max(a, b)", other)
        assert report.program(source) != report.program(changed)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("student,mail\nada,a@x\n\nZo\u00eb,z@x\n", ["ada", "Zo\u00eb"]),
        ("ada\nben\n", ["ada", "ben"]),
        ("Doe, Jane;j@x\nRoe, Ada;a@x\n", ["Doe, Jane", "Roe, Ada"]),
        (
            'Student,ID\n    Points Possible,\n"Doe, Jane",12\n"Student, Test",1\n',
            ["Doe, Jane"],
        ),
        ("Identifier,Full name,Grade\nParticipant 7,Jane Doe,\n", ["Jane Doe"]),
        ('First name,"Last name",Mail\nJane,Doe,j@x\n', ["Jane Doe"]),
    ],
)  # fmt: skip
def test_a_class_list_is_what_systems_and_spreadsheets_write(text, names, tmp_path):
    assert classlist.students(tmp_path) == []
    (tmp_path / "students.csv").write_text(text, encoding="utf-8-sig")
    assert classlist.students(tmp_path) == names


def test_a_name_on_the_list_is_that_of_who_has_its_words():
    known = {"doejane_12": "doejane", "liwei_1": "liwei", "liwei_2": "liwei"}
    known["ben"] = "ben"
    listed = ["Jane Doe", "Wei Li", "Li, Wei", "Wei Li", "Zo\u00eb", "ben"]
    found = ["doejane_12", "liwei_1", "liwei_2", "Wei Li", "Zo\u00eb", "ben"]
    assert classlist.matched(listed, known) == dict(zip(found, listed, strict=True))
    taken = {"liwei_2": "liwei_2", "liwei_1": "Wei Li"}
    assert classlist.matched(["liwei_2", "Wei Li"], known) == taken
    assert classlist.meant("Li Wei", known) == ["liwei_1", "liwei_2"]
    known = {"annamay": "Anna May", "mayan": "May An", "a": "Annam Ay"}
    assert classlist.meant("May, Anna", known) == ["annamay", "a"]
    assert classlist.meant("Annam Ay", known) == ["a", "annamay"]
    assert classlist.meant("An May", known) == ["mayan"]


@pytest.fixture
def graded(released, tmp_path, monkeypatch, capsys):
    """Grade a download of Canvas for a class list, without a sandbox: (what is said,
    {student: line} of marks.csv).
    """
    course, place = shutil.copytree(released, tmp_path / "course"), tmp_path / "in"
    nothing = channel.Outcome({}, {}, None, None)
    monkeypatch.setattr(grade, "work", lambda *job: nothing)
    lay(
        place, "doejane_1_5_online.ipynb", "doejane_1_4_online.ipynb",
        "li\u00e9wei_2_6_online.ipynb", "liwei_3_7_online.ipynb",
        "roeada_4_8_online.zip", "roeada_4_9_masks.ipynb", content='{"cells": []}',
    )  # fmt: skip

    def grade_class(names, *options):
        (course / "students.csv").write_text("\n".join(names))
        arguments = ["--course", str(course), "--submissions", str(place), *options]
        commands.main(["grade", *arguments, "online"])
        with open(course / "marks.csv", newline="") as file:
            rows = {row["student"]: row for row in csv.DictReader(file)}
        return capsys.readouterr().out, rows

    grade_class.course = course
    return grade_class


def test_a_class_list_that_is_corrected_leaves_no_ghosts(graded):
    said, rows = graded(
        ["Doe Jane", "Roe Ada", "Wei Li", "Max Mustermann", "Dough John"]
    )
    assert set(rows) == {
        "doejane_1", "li\u00e9wei_2", "liwei_3", "roeada_4", "Max Mustermann",
        "Dough John",
    }  # fmt: skip
    assert "not on the class list: li\u00e9wei_2" in said
    assert "not the last attempt: doejane_1_4_online.ipynb" in said
    zipped = "not graded, by its place or name: roeada_4_8_online.zip"
    assert rows["roeada_4"]["status"] == "missing"
    assert rows["roeada_4"]["remarks"] == zipped
    assert "missing: Dough John, Max Mustermann\n" in said

    said, rows = graded(["Doe Jane", "Roe Ada", "Wei Li", "Wei Li\u00e9", "Zoe Doe"])
    assert set(rows) == {"doejane_1", "li\u00e9wei_2", "liwei_3", "roeada_4", "Zoe Doe"}
    assert "not on the class list" not in said
    with release.nbgrader(graded.course).gradebook as book:
        assert {student.id for student in book.students} == set(rows)


def test_a_student_is_named_with_or_without_a_number(graded):
    said, _ = graded([], "--student", "Jane Doe")
    assert "[   1/1] doejane_1" in said
    said, _ = graded([], "--student", "liwei_3", "--student", "doejane_1")
    assert "/2] liwei_3" in said and "/2] doejane_1" in said
    with pytest.raises(SystemExit, match="somebody who has handed in online, got roe"):
        graded([], "--student", "roeada")


def test_numbers_of_another_version_are_refused(graded):
    with open(graded.course / "received/online/flashlib/drawn.py", "a") as file:
        file.write("# newer\n")
    with pytest.raises(SystemExit, match=r"drawn\.py: expected .* another version"):
        graded([])


THAI = "ศรีสุวรรณโสภาพัฒนากุลชัยวงศ์เจริญ", "กรุงเทพมหานครอมรรัตนโกสินทร์มหินทรายุธยา"
# (name on the class list, what is handed in, the line of the notebook, its student in
# the table, its points on paper)
SPELLINGS = [
    ("Işık Yılmaz", "IŞIK YILMAZ/online.ipynb",
     'student = "Yılmaz, Işık"  # my "real" name', "IŞIK YILMAZ", "4"),
    (" ".join(THAI), f"{THAI[1]}\xa0{THAI[0]}/online/online.ipynb",
     f'student = "{THAI[0]} {THAI[1]}"', f"{THAI[1]}\xa0{THAI[0]}", "4"),
    ("علی\u200cرضا محمدی", "محمدی\xa0علیرضا/online.ipynb",
     'student: str = "\\u0639\\u0644\\u064a\\u200d\\u0631\\u0636\\u0627 محمدی"',
     "محمدی\xa0علیرضا", "4"),
    ("Doe, Jane-Ann", "doejaneann_12_5_online.ipynb", "student = ('Jane '\n'Ann Doe')",
     "doejaneann_12", "4"),
    ("Zoë Weiß", "ZOE WEISS_7_assignsubmission_file_/online.ipynb",
     'student = "Zoe\u0308\u3000Wei\xadß 🌸"', "ZOE WEISS_7", "4"),
    ("Ada Lovelace", "Lovelace, Ada/online.ipynb", 'student = "Yılmaz, Işık"',
     "Lovelace, Ada", "0"),
]  # fmt: skip


def with_name(released, line):
    """The notebook of the zip with a student's name, and the answers on paper to the
    numbers that it shows then.
    """
    with zipfile.ZipFile(released / "zips/online.zip") as zipped:
        made = json.loads(zipped.read("online/online.ipynb"))
    formulas = sources_of(source_notebook(ONLINE))
    reads = {task.name: task.reads for task in ONLINE.tasks if task.paper}
    for cell in made["cells"]:
        if grade_id(cell) == "parameters":
            cell["source"] = "".join(cell["source"]).replace('student = ""', line)
            exec(cell["source"], shown := {})
        if names := reads.get(grade_id(cell)):
            found = results(formulas[grade_id(cell)], names, shown["my_numbers"])
            cell["source"] = "".join(f"{x} = {found[x]!r}\n" for x in names)
    return json.dumps(made)


def test_a_name_may_be_spelled_in_three_ways(released, tmp_path, monkeypatch, capsys):
    """From the zip to the table: the folder, the notebook and the class list differ."""
    if not CUDA:  # after a fork, CUDA cannot be used
        monkeypatch.setattr(sandbox, "start", start_without_sandbox)
    course, place = shutil.copytree(released, tmp_path / "course"), tmp_path / "in"
    for _, path, line, _, _ in SPELLINGS:
        lay(place, path, content=with_name(released, line))
    listed, long = [f'"{name}"' for name, *_ in SPELLINGS], "ก" * 100
    (course / "students.csv").write_text("\n".join(["student", *listed, long]))
    commands.main(["grade", "--course", str(course), "--submissions", str(place)])
    with open(course / "marks.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    points = {row["student"]: row["points"] for row in rows}
    wanted = {student: wanted for *_, student, wanted in SPELLINGS}
    # Of four answers to the numbers of another, one may be right by chance.
    assert int(points.pop("Lovelace, Ada")) - int(wanted.pop("Lovelace, Ada")) < 2
    assert points == wanted | {long: "0"}
    (remark,) = [row["remarks"] for row in rows if "names" in row["remarks"]]
    assert "names 'Yılmaz, Işık'; it is graded with" in remark
    assert "the numbers of Ada Lovelace" in remark
    assert "not on the class list" not in capsys.readouterr().out


def test_what_was_graded_is_graded_again_if_asked_or_with_another_secret(
    tmp_path, monkeypatch
):
    place, out, seen, honest = tmp_path / "in", tmp_path / "out", [], grade.grade_one
    lay(place, "ada/online.ipynb", "ben/online.ipynb")
    monkeypatch.setattr(grade, "grade_one", lambda *a: seen.append(a) or honest(*a))
    for secret, options, runs in (
        (b"s", {}, 2), (b"s", {}, 0), (b"s", {"only": ["ben"]}, 1),
        (b"s", {"task": "merge"}, 2), (b"t", {}, 2),
        (b"t", {"students": {"ada": "Ada", "ben": "ben"}}, 1),
    ):  # fmt: skip
        seen.clear()
        graded = folder.grade_all("online", place, out, secret, tmp_path, **options)
        assert len(seen) == runs and set(graded) == {"ada", "ben"}
