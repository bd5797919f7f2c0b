"""Wrong and hostile submissions, each with the marks that it must get."""

import functools
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from handed_in import (
    SECRET,
    STUDENT,
    grade_id,
    handed_in,
    inside,
    lay,
    source_notebook,
    sources_of,
)

from exercises.grader import folder as graded_folder
from exercises.grader import (
    grade,
    gradebook,
    inbox,
    release,
    rules,
    sandbox,
    submission,
    tasks,
)

ONLINE = tasks.assignment("online")
# Its workers need no PyTorch, so they start in a fraction of the time.
MACHINE = tasks.assignment("machine")
FULL = {task.name: task.points for task in MACHINE.tasks}


@pytest.fixture(scope="session")
def received(tmp_path_factory):
    """What students of *machine* may import."""
    folder = tmp_path_factory.mktemp("received")
    release.package("machine", folder)
    return folder


notebook = functools.partial(handed_in, MACHINE, SECRET)


def marks(made, received, assignment=MACHINE):
    """{task: points} of a notebook, {task: notes}, and the remarks."""
    content = json.dumps(made).encode()
    result = grade.grade_one(assignment, content, SECRET, received, STUDENT)
    points = {mark["task"]: mark["points"] for mark in result["tasks"]}
    notes = {mark["task"]: " ".join(mark["notes"]) for mark in result["tasks"]}
    return points, notes, result["remarks"]


UNREADABLE = [
        b"", b"  \n", b"\x00\xff\xfe", b"null", b"[1, 2]", b"{}", b'{"cells": 3}',
        b'{"cells": ' + b"9" * 10**5 + b"}",
        b'{"cells": [3, null, {}]}',
        b'{"cells": [{"cell_type": "code", "source": "x", '
        b'"metadata": {"nbgrader": {"grade_id": [0]}}}]}',
        b'{"cells": [{"cell_type": "code", "metadata": [], "source": [1]}]}',
        b"[" * 100_000,
        b'{"cells": [{"cell_type": "code", "source": "m = 1"',
        b"{" + b" " * submission.LARGEST_BYTES,
]  # fmt: skip


@pytest.mark.parametrize("content", UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_is_no_notebook_gets_no_marks_and_a_reason(content, tmp_path):
    read = submission.read(content, ["state"])
    too_large = len(content) > submission.LARGEST_BYTES
    assert read.cells == {} and ("more than" in read.remarks[0]) == too_large
    (tmp_path / "online.ipynb").write_bytes(content)
    assert gradebook.written_answers(tmp_path / "online.ipynb") == {}


def cell(name, source, kind="code"):
    metadata = {"nbgrader": {"grade_id": name}}
    return {"cell_type": kind, "metadata": metadata, "source": source}


def test_cells_that_are_none_leave_the_others(tmp_path):
    good = cell("state", ["m = 1\n", "l = 2"])
    broken = [{**good, key: None} for key in good]
    broken.append({**good, "metadata": {"nbgrader": None}})
    cells = [None, *broken, cell("words", "Because.", "markdown"), 3, good, []]
    content = json.dumps({"cells": cells}).encode()
    wanted = {"state": "m = 1\nl = 2"}
    assert submission.read(content, ["state", "words"]).cells == wanted
    (tmp_path / "online.ipynb").write_bytes(content)
    written = gradebook.written_answers(tmp_path / "online.ipynb")
    assert written == {**wanted, "words": "Because."}


def test_solution_cells_alone_are_read_and_copies_run_one_after_another():
    cells = [cell("state", "l = 1"), cell("state-test", "x"), cell("state", "l = 0")]
    read = submission.read(json.dumps({"cells": cells}).encode(), ["state"])
    assert read.cells == {"state": "l = 1\n\nl = 0"} and "2 cells" in read.remarks[0]


@pytest.mark.slow
@pytest.mark.parametrize("step", tasks.STEPS)
def test_solutions_get_full_marks_and_the_released_notebook_none(step, tmp_path):
    (tmp_path / "secret").write_bytes(tasks.PRACTICE)
    zipped = release.release(step, tmp_path)
    # The book's zips are made without nbgrader's gradebook.
    practice = release.practice(step, tmp_path / "practice.zip")
    assert practice.read_bytes() == zipped.read_bytes()
    assignment = tasks.assignment(step)
    package, secret = tmp_path / "received" / step, tasks.PRACTICE
    solution = json.dumps(handed_in(assignment, secret)).encode()
    solved = grade.grade_one(assignment, solution, secret, package, STUDENT)
    assert not [mark for mark in solved["tasks"] if mark["notes"]]
    assert solved["points"] == solved["of"] > 0
    released = (tmp_path / "release" / step / f"{step}.ipynb").read_bytes()
    nothing = grade.grade_one(assignment, released, secret, package, STUDENT)
    assert nothing["points"] == 0


@pytest.mark.parametrize("step", tasks.STEPS)
def test_points_and_names_of_the_notebook_are_those_of_the_checks(step):
    assignment = tasks.assignment(step)
    cells = source_notebook(assignment)["cells"]
    cells = [cell["metadata"].get("nbgrader", {}) for cell in cells]
    points = {cell["grade_id"]: cell["points"] for cell in cells if cell.get("grade")}
    solutions = [cell for cell in cells if cell.get("solution")]
    names = [cell["grade_id"] for cell in solutions if not cell.get("grade")]
    assert names == [task.name for task in assignment.tasks]
    tested = {name: of for name, of in points.items() if name.endswith("-test")}
    assert tested == {f"{task.name}-test": task.points for task in assignment.tasks}
    assert 3 <= len(names) <= 7 and len(tested) < len(points), "no written answer"


def test_another_secret_makes_other_numbers():
    assert len({str(ONLINE.numbers(s, "ada")) for s in (b"a", b"b", b"c")}) == 3
    first, second, again = (
        ONLINE.cases(ONLINE.tasks[2], secret, "ada")[0].arguments["m_a"]
        for secret in (b"a", b"b", b"a")
    )
    assert np.array_equal(first, again) and not np.array_equal(first, second)


def named(student, **changes):
    """The released notebook with a student's name and their right answers."""
    sources = sources_of(notebook(student)) | changes
    made = MACHINE.unnumbered(SECRET)
    for cell in made["cells"]:
        if grade_id(cell) == "parameters":
            source = "".join(cell["source"])
            assert source.count('student = ""') == 1
            cell["source"] = source.replace('student = ""', f'student = "{student}"')
        elif grade_id(cell):
            cell["source"] = sources[grade_id(cell)]
    return made


def test_a_schedule_is_judged_by_its_results_and_every_word():
    words, right = {"A": (4, 0), "C": (0, 2)}, [np.ones(2), np.array([[4, 0], [0, 2]])]
    tasks.judge_schedule([*right, 0], {"C": np.ones(2)}, words)
    freed = "C has entries that are not finite: was all of it stored, and nothing used"
    for said, place, value in (
        (freed, 0, np.array([1.0, np.nan])), ("C is wrong", 0, np.ones(2) + 1e-8),
        ("A: 8 words loaded and 0 stored", 1, np.array([[8, 0], [0, 2]])),
        ("3 words are still held at the end", 2, 3),
    ):  # fmt: skip
        values = [*right, 0]
        values[place] = value
        with pytest.raises(tasks.Wrong, match=said):
            tasks.judge_schedule(values, {"C": np.ones(2)}, words)


def test_the_numbers_of_the_folder_count_and_no_formula(received):
    written = sources_of(notebook("lovelace, ada"))["intensity"]
    inner, outer, free = written.replace(" = ", ": float = ", 1).splitlines()
    written = (
        f"import no_such_module\n{inner}\nother = {outer}\n{free}\nraise ValueError"
    )
    points, _, remarks = marks(named("lovelace, ada", intensity=written), received)
    assert points == FULL and remarks == []
    points, notes, remarks = marks(named("Ben"), received)
    assert points == FULL | {"intensity": 0}
    assert "the notebook names 'Ben'" in remarks[0]
    assert "written out" not in notes["intensity"]
    formula = sources_of(source_notebook(MACHINE))["intensity"]
    points, notes, _ = marks(named("ada lovelace", intensity=formula), received)
    assert points == FULL | {"intensity": 0} and "written out" in notes["intensity"]
    assert submission.read(b"", []).student() is None


def outliving(grader, seconds=5.0):
    """The workers of a grader that still run after this many seconds."""
    users = {sandbox.user_of(grader, slot) for slot in range(sandbox.SLOTS)}
    if os.geteuid() != 0:
        users = {os.getuid()}
        if "PYTEST_XDIST_WORKER" in os.environ:
            return []  # other tests of this account grade now, and look the same
    deadline = time.monotonic() + seconds
    while True:
        listed = psutil.process_iter(["uids", "status", "cmdline"])
        left = [
            process for process in listed
            if grade.PROGRAM in (process.info["cmdline"] or ())
            and process.info["uids"].real in users
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ]  # fmt: skip
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


HONEST = "def outer_product(n):\n    "
# The rules stop these by reading, and the guard stops them at work. Here both let them
# through, to see that the sandbox stops them too.
OPEN_GUARD = """
import collections
import contextlib

def arm():
    pass

install = arm

def remember(name, source):
    pass

def watched(guard, forbidden):
    return contextlib.nullcontext()

def at_work():
    return contextlib.nullcontext()

class Guard:
    def __init__(self, forbidden):
        self.operations = collections.Counter()

    def namespace(self, given):
        return dict(given)

    def run(self, source, name, space):
        exec(source, space)
"""


def opened(folder, monkeypatch):
    """The folder of what cells may import, and of a guard that lets all through."""
    monkeypatch.setattr(rules, "require", lambda *_: None)
    inside = [name for name in grade.INSIDE if name != "guard.py"]
    monkeypatch.setattr(grade, "INSIDE", inside)
    release.package("machine", folder)
    (folder / "inside").mkdir()
    (folder / "inside/guard.py").write_text(OPEN_GUARD)
    return folder


HOSTILE = {
    "leaves in the call": "import os\n" + HONEST + "os._exit(0)",
    "fork bomb": "import os\n" + HONEST + "\n    while True:\n        os.fork()",
    "sends a result that is not its own": (
        "import os, struct, json\n" + HONEST + "\n"
        "    text = json.dumps({'result': 'outer', 'case': 'x', 'problem': 1, "
        "'operations': 1}).encode()\n"
        "    for fd in range(3, 100):\n        try:\n"
        "            os.write(fd, struct.pack('>I', len(text)) + text)\n"
        "        except OSError:\n            pass"
    ),
    "takes NumPy away": "import sys\nsys.modules['numpy'] = None",
    "dead timer": (
        "import signal\n" + HONEST
        + "\n    signal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
        + "    while True:\n        pass"
    ),
    "kills everyone": (
        "import os, signal\n" + HONEST + "\n    os.kill(-1, signal.SIGKILL)"
    ),
    "stops the parent": (
        "import os, signal\n" + HONEST
        + "\n    os.kill(os.getppid(), signal.SIGSTOP)"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_submission_gets_nothing_and_does_no_harm(
    name, tmp_path, monkeypatch
):
    opened(tmp_path, monkeypatch)
    monkeypatch.setattr(grade, "CELL_SECONDS", 1.0)
    short = tuple(task._replace(seconds=1.0) for task in MACHINE.tasks)
    made, start = notebook(outer=HOSTILE[name]), time.monotonic()
    points, notes, _ = marks(made, tmp_path, MACHINE._replace(tasks=short))
    assert time.monotonic() - start < 90
    assert outliving(os.getpid()) == [], "a process has outlived its sandbox"
    # A cell that sabotages its own process may lose the points of other tasks too.
    assert points["outer"] == 0 and notes["outer"]


# With the solution before it: right answers where the worker's files can be opened.
REOPENS = """
import contextlib, os
of = outer_product
def outer_product(n):
    worker, files = f"/proc/{os.getppid()}", []
    with contextlib.suppress(OSError):
        files = [f"fd/{x}" for x in os.listdir(f"{worker}/fd")]
    for file in (*files, "mem", "environ"):
        with contextlib.suppress(OSError):
            os.open(f"{worker}/{file}", os.O_RDONLY | os.O_NONBLOCK)
            return of(n)
"""


def test_a_task_opens_neither_pipes_nor_memory_of_the_worker(tmp_path, monkeypatch):
    """Whatever runs there: here neither the rules nor the guard stop it."""
    outer = sources_of(notebook())["outer"]
    received = opened(tmp_path, monkeypatch)
    points, _, _ = marks(notebook(outer=outer), received)
    assert points == FULL
    points, _, _ = marks(notebook(outer=outer + REOPENS), received)
    assert points == FULL | {"outer": 0}


def snapshot(place):
    files = [path for path in place.rglob("*") if path.is_file()]
    return {str(path.relative_to(place)): path.read_bytes() for path in files}


def test_a_mark_depends_on_all_that_a_check_may_import(tmp_path, monkeypatch):
    shutil.copytree(tasks.ROOT.parent / "flashlib", tmp_path / "flashlib")
    monkeypatch.setattr(tasks, "ROOT", tmp_path / "exercises")
    marks = [graded_folder.fingerprint(ONLINE, SECRET) for _ in range(2)]
    changed = tmp_path / "flashlib/reference/online.py"
    changed.write_text(changed.read_text("utf-8") + "\n", "utf-8")
    marks.append(graded_folder.fingerprint(ONLINE, SECRET))
    assert marks[0] == marks[1] != marks[2]


@pytest.mark.slow
def test_kill_9_in_the_middle_loses_nothing(tmp_path, received):
    """Killed after one submission more each time, it ends with the same files."""
    place, said = tmp_path / "submissions", []
    for student in ("alice", "bob", "carol", "dan", "eve", "fay", "gil", "hua"):
        changes = {} if student == "alice" else {"outer": None}
        content = "" if student == "bob" else json.dumps(notebook(student, **changes))
        lay(place, f"{student}/machine/machine.ipynb", content=content)
    handed_in, arguments = snapshot(place), ("machine", str(place))
    options = {"secret": SECRET, "package": received, "say": said.append}
    graded = graded_folder.grade_all(*arguments, tmp_path / "whole", **options)
    points = [marked["points"] for marked in graded.values()]
    full = sum(FULL.values())
    assert points == [full, 0, *[full - FULL["outer"]] * 6]
    wanted = snapshot(tmp_path / "whole")
    for name, content in handed_in.items():
        assert wanted[f"machine/{name.split('/')[0]}/received.ipynb"] == content
    # It waits after the seventh of eight: on a fast machine it may get there before the
    # signal.
    program = (
        "import signal; from exercises.grader import folder\n"
        "def say(line):\n    print(line, flush=True)\n"
        "    if '7/8] ' in line: signal.pause()\n"
        f"folder.grade_all(*{arguments!r}, {str(tmp_path / 'out')!r}, {SECRET!r}, "
        f"{str(received)!r}, 2, say)"
    )
    for kill in range(3):
        command = [sys.executable, "-c", program]
        pipe = {"stdout": subprocess.PIPE, "text": True, "cwd": tasks.ROOT.parent}
        process = subprocess.Popen(command, **pipe)
        lines = [process.stdout.readline() for _ in range(kill + 1)]
        time.sleep(0.3 * kill)  # other moments in the life of the workers
        process.kill()
        rest, _ = process.communicate()
        assert "8/8] " not in rest, "it came to its end before it was killed"
        assert sum("graded before" in line for line in lines) >= kill
        assert outliving(process.pid) == [], "a worker has outlived the grader"
        for name, content in snapshot(tmp_path / "out").items():
            assert content == wanted.get(name) or name.endswith(".part"), name
    said.clear()
    graded_folder.grade_all(*arguments, tmp_path / "out", **options)
    assert sum("graded before" in line for line in said) >= 3
    assert snapshot(tmp_path / "out") == wanted and snapshot(place) == handed_in


def test_which_notebooks_count_and_what_is_left_over(tmp_path):
    """A browser numbers a second download; archives and other names are told."""
    lay(
        tmp_path, "alice/online/online.ipynb", "alice/notes.txt", "bob/online.ipynb",
        "bob/online (1).ipynb", "bob/online/.ipynb_checkpoints/online-checkpoint.ipynb",
        "carol/x/y.ipynb", "dan/online/online (2).ipynb", "eve/online-1.ipynb",
        "gil/online (1).ipynb", "gil/online (2).ipynb", "hua/online.zip",
        "doejane_1_2_online.zip", "online.ipynb", "x.tar",
    )  # fmt: skip
    (tmp_path / "fay").symlink_to(tmp_path / "eve")
    found = inbox.collect(tmp_path, "online")
    places = {name: x.parts and "/".join(x.parts) for name, x in found.items()}
    assert places == {
        "alice": "alice/online/online.ipynb", "bob": "bob/online.ipynb", "carol": None,
        "dan": "dan/online/online (2).ipynb", "eve": "eve/online-1.ipynb", "fay": None,
        "gil": None, "hua": None,
    }  # fmt: skip
    assert inbox.left_over(tmp_path, [found]) == [
        ("bob", "bob/online (1).ipynb"), ("carol", "carol/x/y.ipynb"),
        ("doejane_1", "doejane_1_2_online.zip"),
        ("gil", "gil/online (1).ipynb"), ("gil", "gil/online (2).ipynb"),
        ("hua", "hua/online.zip"),
        ("", "online.ipynb"), ("", "x.tar"),
    ]  # fmt: skip


SOLUTIONS = (
    "reference api tiles standard gradients flash backward steps schedule roofline "
    "blocks programs search layers testing zoo"
)


def test_what_students_receive_solves_nothing():
    for names in release.RECEIVED.values():
        assert not [n for n in names if any(word in n for word in SOLUTIONS.split())]


def test_in_the_sandbox_there_is_what_students_receive_and_no_more(tmp_path):
    release.package("blocks", tmp_path)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py")}
    assert names == {f"flashlib/{name}" for name in release.RECEIVED["blocks"]}
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    program = f"""
import importlib.util, os, sys
sys.path.insert(0, "/received")
import flashlib
print(flashlib.__file__)
for name in ("api", "reference", "testing", "machine"):
    if importlib.util.find_spec("flashlib." + name):
        print("FOUND", name)
print(os.path.exists({str(tasks.ROOT)!r}))
"""
    code, output = inside(program, readable={str(tmp_path): "/received"})
    assert code == 0, output
    assert output.split() == ["/received/flashlib/__init__.py", "False"]


def test_the_secret_is_made_once_for_its_owner_alone(tmp_path):
    secret = release.secret_of(tmp_path)
    assert len(secret) >= 32 and release.secret_of(tmp_path) == secret
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    (tmp_path / "secret").write_text("\n")
    with pytest.raises(ValueError, match="empty"):
        release.secret_of(tmp_path)
