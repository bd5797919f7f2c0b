"""Wrong and hostile submissions, each with the marks that it must get."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from handed_in import (
    STUDENT,
    grade_id,
    handed_in,
    source_notebook,
    sources_of,
)
from test_sandbox import inside

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

SECRET = b"of this test"
ONLINE = tasks.assignment("online")
FULL = sum(task.points for task in ONLINE.tasks)


@pytest.fixture(scope="session")
def received(tmp_path_factory):
    """What students of *online* may import."""
    folder = tmp_path_factory.mktemp("received")
    release.package("online", folder)
    return folder


notebook = functools.partial(handed_in, ONLINE, SECRET)


def marks(made, received, assignment=ONLINE):
    """{task: points} of a notebook, and the whole result."""
    content = json.dumps(made).encode()
    result = grade.grade_one(assignment, content, SECRET, received, STUDENT)
    return {mark["task"]: mark["points"] for mark in result["tasks"]}, result


def notes(result, task):
    (found,) = (mark["notes"] for mark in result["tasks"] if mark["task"] == task)
    return " ".join(found)


UNREADABLE = [
        b"", b"  \n", b"\x00\xff\xfe", b"null", b"[1, 2]", b"{}", b'{"cells": 3}',
        b'{"cells": [3, null, {}]}',
        b'{"cells": [{"cell_type": "code", "metadata": {"nbgrader": {"grade_id": [0]}}, "source": "x"}]}',
        b'{"cells": [{"cell_type": "code", "metadata": [], "source": [1]}]}', b"[" * 100_000,
        b'{"cells": [{"cell_type": "code", "source": "m = 1"',
]  # fmt: skip


@pytest.mark.parametrize("content", UNREADABLE)
def test_what_is_no_notebook_gets_no_marks_and_a_reason(content, tmp_path):
    read = submission.read(content, ["state"])
    assert read.cells == {} and read.remarks
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


def test_a_file_that_is_too_large_is_not_read():
    read = submission.read(b"{" + b" " * submission.LARGEST_BYTES, ["state"])
    assert read.cells == {} and "more than" in read.remarks[0]


def test_only_solution_cells_are_read():
    made, names = notebook(), [task.name for task in ONLINE.tasks]
    made["metadata"]["kernelspec"] = {"name": "no-such-kernel", "language": "brainfuck"}
    for cell in made["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("grade"):
            cell["source"] = "raise SystemExit('an edited test')"
    read = submission.read(json.dumps(made).encode(), names)
    assert read.remarks == () and set(read.cells) == set(names)
    assert not any("edited" in source for source in read.cells.values())


def test_duplicated_cells_are_run_one_after_another():
    made = {"cells": [cell("state", "l = 1"), cell("state", "l = 0")]}
    read = submission.read(json.dumps(made).encode(), ["state"])
    assert read.cells["state"].endswith("l = 0") and "2 cells" in read.remarks[0]


@pytest.mark.slow
@pytest.mark.parametrize("step", tasks.STEPS)
def test_solutions_get_full_marks_and_the_released_notebook_none(step, tmp_path):
    release.release(step, tmp_path)
    assignment = tasks.assignment(step)
    package, secret = tmp_path / "received" / step, release.secret_of(tmp_path)
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


def test_a_name_may_be_written_in_several_ways():
    ada = ONLINE.numbers(SECRET, "Ada Lovelace")
    for same in (
        "lovelaceada",
        "Lovelace, Ada",
        " ADA  lovelace",
        "Ad\u00e1-Lovel\u00e1ce",
    ):
        assert ONLINE.numbers(SECRET, same) == ada
    for other in ("Ada Lovelac", "Ada Lovelace 2", "\u5f20\u4f1f", "?"):
        assert ONLINE.numbers(SECRET, other) != ada
    assert ONLINE.numbers(SECRET, "a12") != ONLINE.numbers(SECRET, "a21")
    for empty in ("", "  "):
        with pytest.raises(ValueError, match="student: expected your name"):
            ONLINE.numbers(SECRET, empty)


def named(student, numbers_of):
    """The released notebook with a student's name and the right answers of somebody."""
    sources = sources_of(notebook(numbers_of))
    made = ONLINE.unnumbered(SECRET)
    for cell in made["cells"]:
        if grade_id(cell) == "parameters":
            source = "".join(cell["source"])
            assert source.count('student = ""') == 1
            cell["source"] = source.replace('student = ""', f'student = "{student}"')
        elif grade_id(cell):
            cell["source"] = sources[grade_id(cell)]
    return made


def test_the_numbers_of_the_folder_count(received):
    points, result = marks(named("lovelace, ada", STUDENT), received)
    assert sum(points.values()) == FULL and result["remarks"] == []
    points, result = marks(named("Ben", "Ben"), received)
    assert points == {"state": 0, "reads": 0, "merge": 4, "kernel": 6}
    assert "the notebook names 'Ben'" in result["remarks"][0]
    points, result = marks(named("Ben", STUDENT), received)
    assert sum(points.values()) == FULL and "'Ben'" in result["remarks"][0]
    assert submission.student_of(b"") is None


def test_a_formula_on_paper_gets_nothing_and_a_number_does(received):
    formula = sources_of(source_notebook(ONLINE))["state"]
    points, result = marks(notebook(state=formula), received)
    assert points["state"] == 0 and "written out" in notes(result, "state")
    n = ONLINE.numbers(SECRET, STUDENT)["n"]
    reads = f"import no_such_module\nthree_passes: int = 3 * {n}\nwork = two_passes = 2 * {n}\nraise ValueError"
    assert marks(notebook(reads=reads), received)[0]["reads"] == 2


# What a student may hand in for the task "merge", and what the marks of that task must
# be. The others must keep theirs, whatever this one does.
HONEST = "def merge(m_a, l_a, o_a, m_b, l_b, o_b):\n    "
WRONG_MERGES = {
    "no rescaling": (HONEST + "return torch.maximum(m_a, m_b), l_a + l_b, o_a + o_b", 2.0),
    "None": (HONEST + "return None", 0),
    "one value": (HONEST + "return m_a", 0),
    "an empty set breaks it": (
        HONEST + "m = torch.maximum(m_a, m_b)\n    a, b = torch.exp(m_a - m), torch.exp(m_b - m)\n"
        "    return m, a * l_a + b * l_b, a[:, None] * o_a + b[:, None] * o_b",
        4 * 5 / 6,
    ),
    "equal to everything": (
        "class Yes:\n    def __eq__(self, other):\n        return True\n"
        "    shape = dtype = 0\n" + HONEST + "return Yes(), Yes(), Yes()",
        0,
    ),
    "a tensor that lies": (
        "class Yes(torch.Tensor):\n    def __eq__(self, other):\n        return True\n"
        + HONEST + "return Yes(), Yes(), Yes()",
        0,
    ),
    "raises": (HONEST + "raise ValueError(str(o_a.tolist()))", 0),
    "exits": (HONEST + "raise SystemExit(0)", 0),
    "an attribute error of its own": (HONEST + "return m_a.no_such_thing", 0),
    "a name that is not there": (HONEST + "return helper(m_a)", 0),
    "never ends": (HONEST + "\n    while True:\n        pass", 0),
    "never ends and will not be told": (
        HONEST + "\n    while True:\n        try:\n            while True:\n                pass\n"
        "        except BaseException:\n            pass",
        0,
    ),
    "the cell never ends": ("while True:\n    pass", 0),
    "recursion": (HONEST + "return merge(m_a, l_a, o_a, m_b, l_b, o_b)", 0),
    "prints without end": (HONEST + "\n    while True:\n        print('x' * 1_000_000)", 0),
    "takes all memory": (HONEST + "return [torch.ones(2**40)], 1, 2", 0),
    "returns a gigabyte": (HONEST + "return torch.zeros(2**28), torch.zeros(1), torch.zeros(1)", 0),
    "overwrites what is given": ("torch.maximum = torch.minimum\n" + HONEST + "return m_a, l_a, o_a", None),
}  # fmt: skip


@pytest.fixture
def hurried(received, monkeypatch):
    """Marks of a merge with 3 seconds, after which no worker may be left."""
    monkeypatch.setattr(grade, "CELL_SECONDS", 3.0)
    hurried = tuple(task._replace(seconds=3.0) for task in ONLINE.tasks)
    short = ONLINE._replace(tasks=hurried)

    def graded(source):
        start = time.monotonic()
        points, result = marks(notebook(merge=source), received, assignment=short)
        assert time.monotonic() - start < 90
        assert outliving(os.getpid()) == [], "a process has outlived its sandbox"
        return points, result

    return graded


def outliving(grader, seconds=5.0):
    """The numbers of the workers of a grader that still run after so many seconds."""
    users = {sandbox.user_of(grader, slot) for slot in range(16)}
    if os.geteuid() != 0:
        users = {os.getuid()}
        if "PYTEST_XDIST_WORKER" in os.environ:
            return []  # other tests of the same account grade at the same time, and nothing tells them apart
    deadline = time.monotonic() + seconds
    while True:
        left = [n for n in os.listdir("/proc") if n.isdigit() and is_worker(n, users)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def is_worker(number, users):
    try:
        process = pathlib.Path("/proc", number)
        lines = (process / "status").read_text().splitlines()
        command = (process / "cmdline").read_text()
    except OSError:
        return False
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    ours = "/job/worker.py" in command and int(status["Uid"].split()[0]) in users
    return ours and status["State"].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_MERGES)
def test_a_wrong_answer_gets_its_marks_and_spoils_no_other(name, hurried):
    source, wanted = WRONG_MERGES[name]
    points, result = hurried(source)
    if wanted is not None:
        assert points["merge"] == round(wanted, 2), notes(result, "merge")
    merge = points.pop("merge")
    assert points == {"state": 2, "reads": 2, "kernel": 6}
    assert merge == 4 or notes(result, "merge")
    shown = json.dumps(result)
    assert "tensor(" not in shown and "[[" not in shown, "hidden inputs are shown"


# The rules stop these by reading; here they are let through, to see that the sandbox
# stops them too.
HOSTILE = {
    "leaves at once": "import os\nos._exit(0)",
    "leaves in the call": "import os\n" + HONEST + "os._exit(0)",
    "fork bomb": "import os\n" + HONEST + "\n    while True:\n        os.fork()",
    "threads": (
        "import threading, time\n" + HONEST + "\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(100,)).start()"
    ),
    "memory bomb": HONEST + "\n    x = []\n    while True:\n        x.append(bytearray(2**28))",
    "writes to the channel": (
        "import os\n" + HONEST + "\n    for fd in range(3, 100):\n        try:\n"
        "            os.write(fd, b'\\xff' * 100)\n        except OSError:\n            pass"
    ),
    "sends a result that is not its own": (
        "import os, struct, json\n" + HONEST + "\n"
        "    text = json.dumps({'result': 'merge', 'case': 'x', 'problem': 1, 'operations': 1}).encode()\n"
        "    for fd in range(3, 100):\n        try:\n"
        "            os.write(fd, struct.pack('>I', len(text)) + text)\n"
        "        except OSError:\n            pass"
    ),
    "takes torch away": "import sys\nsys.modules['torch'] = None\nsys.modules['numpy'] = None",
    "dead alarm": (
        "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\n" + HONEST
        + "\n    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    while True:\n        pass"
    ),
    "fills the scratch": (
        HONEST + "\n    with open('/tmp/x', 'wb') as f:\n        while True:\n"
        "            f.write(bytes(2**20))"
    ),
    "kills everyone": "import os, signal\n" + HONEST + "\n    os.kill(-1, signal.SIGKILL)",
    "stops the parent": "import os, signal\n" + HONEST + "\n    os.kill(os.getppid(), signal.SIGSTOP)",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_submission_gets_nothing_and_does_no_harm(name, hurried, monkeypatch):
    monkeypatch.setattr(rules, "require", lambda *_: None)
    points, result = hurried(HOSTILE[name])
    # A cell that sabotages its own process may lose the points of other tasks too.
    assert points["merge"] == 0 and notes(result, "merge")


@pytest.mark.slow
def test_what_a_cell_raises_does_not_get_into_the_feedback(received):
    leak = HONEST + "raise type('Leak' + str(m_a.tolist()), (Exception,), {})()"
    _, result = marks(notebook(merge=leak), received)
    assert "Leak" not in json.dumps(result)
    assert "exception of its own" in notes(result, "merge")
    leak = HONEST + "raise NameError('x', name='n' + '7' * 90)"
    _, result = marks(notebook(merge=leak), received)
    assert "7" * 41 not in json.dumps(result)


@pytest.mark.slow
def test_a_task_that_is_missing_or_refused_leaves_the_others(received):
    points, result = marks(notebook(state=None, merge="import os"), received)
    assert points == {"state": 0, "reads": 2, "merge": 0, "kernel": 6}
    assert "missing" in result["remarks"][0] and "not run" in notes(result, "merge")


@pytest.mark.slow
def test_a_load_outside_of_a_tensor_is_named_in_the_feedback(received):
    cells = submission.read(ONLINE.notebook.read_bytes(), ["kernel"]).cells
    source = cells["kernel"].replace(', mask=column < n, other=-float("inf")', "")
    points, result = marks(notebook(kernel=source), received)
    assert 0 < points["kernel"] < 6
    assert "outside of its tensors" in notes(result, "kernel")


@pytest.fixture
def folder(tmp_path):
    """A solution, an empty file, and a flat one without the kernel."""
    place = tmp_path / "submissions"
    hand_in(place / "alice/online", json.dumps(notebook("alice")))
    hand_in(place / "bob/online", "")
    hand_in(place / "carol", json.dumps(notebook("carol", kernel=None)))
    return place


def hand_in(folder, content):
    folder.mkdir(parents=True)
    (folder / "online.ipynb").write_text(content)


def snapshot(place):
    files = [path for path in place.rglob("*") if path.is_file()]
    return {str(path.relative_to(place)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_a_folder_is_graded_kept_and_not_graded_twice(folder, tmp_path, received):
    before, said, out = snapshot(folder), [], tmp_path / "out"
    graded = graded_folder.grade_all(
        "online", folder, out, SECRET, received, say=said.append
    )
    points = {student: marked["points"] for student, marked in graded.items()}
    assert points == {"alice": FULL, "bob": 0, "carol": FULL - 6}
    assert snapshot(folder) == before, "what was handed in has changed"
    first = snapshot(out)
    for student, entry in inbox.collect(folder, "online").items():
        content = folder.joinpath(*entry.parts).read_bytes()
        assert first[f"online/{student}/received.ipynb"] == content
    said.clear()
    graded_folder.grade_all("online", folder, out, SECRET, received, say=said.append)
    assert sum("graded before" in line for line in said) == 3
    assert snapshot(out) == first
    # With another secret all are graded anew.
    graded_folder.grade_all("online", folder, out, b"other", received, say=said.append)
    assert snapshot(out) != first


@pytest.mark.slow
def test_kill_9_in_the_middle_loses_nothing(folder, tmp_path, received):
    """Killed after one submission more each time, it ends with the same files."""
    for student in ("dan", "eve", "fay", "gil", "hua"):
        hand_in(folder / student, json.dumps(notebook(student, kernel=None)))
    handed_in, arguments = snapshot(folder), ("online", str(folder))
    graded_folder.grade_all(
        *arguments, tmp_path / "whole", SECRET, received, say=lambda line: None
    )
    wanted = snapshot(tmp_path / "whole")
    program = (
        "import sys; from exercises.grader import folder; say = lambda line: print(line, flush=True); "
        f"folder.grade_all(*{arguments!r}, {str(tmp_path / 'out')!r}, {SECRET!r}, {str(received)!r}, 2, say)"
    )
    for kill in range(3):
        command = [sys.executable, "-c", program]
        options = {"text": True, "cwd": tasks.ROOT.parent}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
        lines = [process.stdout.readline() for _ in range(kill + 1)]
        time.sleep(0.3 * kill)  # other moments in the life of the workers
        process.kill()
        rest = process.stdout.read()
        process.wait()
        process.stdout.close()
        assert "8/8] " not in rest, "it came to its end before it was killed"
        assert sum("graded before" in line for line in lines) >= kill
        assert outliving(process.pid) == [], "a worker has outlived the grader"
        for name, content in snapshot(tmp_path / "out").items():
            assert content == wanted.get(name) or name.endswith(".part"), name
    said = []
    graded_folder.grade_all(
        *arguments, tmp_path / "out", SECRET, received, say=said.append
    )
    assert sum("graded before" in line for line in said) >= 3
    assert snapshot(tmp_path / "out") == wanted and snapshot(folder) == handed_in


def test_a_notebook_under_another_name_is_named(folder):
    names = ("bob/online (1).ipynb", "carol/x/y.ipynb", "online.ipynb")
    extra = [folder / name for name in names]
    hidden = folder / "bob/online/.ipynb_checkpoints/online-checkpoint.ipynb"
    for path in (*extra, hidden):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    found = inbox.collect(folder, "online")
    left = [("bob", names[0]), ("carol", names[1]), ("", names[2])]
    assert inbox.left_over(folder, [found]) == left
    everything = ["alice/online/online.ipynb", "bob/online/online.ipynb"]
    everything = [*names, *everything, "carol/online.ipynb"]
    paths = [path for _, path in inbox.left_over(folder, [])]
    assert paths == sorted(everything)


def test_one_notebook_that_a_browser_has_numbered_is_read(folder):
    hand_in(folder / "dan/online", "{}")
    (folder / "dan/online/online.ipynb").rename(folder / "dan/online/online (2).ipynb")
    hand_in(folder / "eve", "{}")
    (folder / "eve/online.ipynb").rename(folder / "eve/online-1.ipynb")
    (folder / "fay").symlink_to(folder / "eve")
    hand_in(folder / "gil", "{}")
    (folder / "gil/online.ipynb").rename(folder / "gil/online (1).ipynb")
    (folder / "gil/online (2).ipynb").write_text("{}")
    found = inbox.collect(folder, "online")
    assert found["dan"].parts == ("dan", "online", "online (2).ipynb")
    assert found["eve"].parts == ("eve", "online-1.ipynb")
    assert found["fay"].parts is None, "a link is followed"
    assert found["gil"].parts is None, "which of the two?"
    left = [("gil", "gil/online (1).ipynb"), ("gil", "gil/online (2).ipynb")]
    assert inbox.left_over(folder, [found]) == left


def test_what_is_no_notebook_is_named_where_nothing_else_is_read(folder):
    archives = ("doejane_1_2_online.zip", "dan/online.zip", "x.tar", "alice/notes.txt")
    for name in archives:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    found = inbox.collect(folder, "online")
    assert inbox.left_over(folder, [found]) == [
        ("dan", "dan/online.zip"), ("doejane_1", "doejane_1_2_online.zip"), ("", "x.tar"),
    ]  # fmt: skip


def test_a_folder_without_submissions_says_so(tmp_path, received):
    with pytest.raises(ValueError, match="no submission"):
        graded_folder.grade_all("online", tmp_path, tmp_path / "out", SECRET, received)


@pytest.mark.parametrize("step", tasks.STEPS)
def test_what_students_receive_solves_nothing(step, tmp_path):
    release.package(step, tmp_path)
    package = tmp_path / "flashlib"
    names = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    assert names == set(release.RECEIVED[step])
    solutions = "reference api tiles standard gradients flash backward steps schedule roofline blocks flash programs search"
    for word in [*solutions.split(), "layers", "testing", "zoo"]:
        assert not any(word in name for name in names), word


@pytest.mark.parametrize(
    ("step", "module"),
    [("online", "exercise"), ("machine", "machine"), ("blocks", "iomodel")],
)
def test_in_the_sandbox_there_is_what_students_receive_and_no_more(
    step, module, tmp_path
):
    release.package(step, tmp_path)
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    program = f"""
import importlib, sys
sys.path.insert(0, "/received")
import flashlib.kernels, flashlib.{module}
print(flashlib.__file__)
for name in ("api", "reference.standard", "kernels.flash2", "kernels.tiles", "testing", "machine.programs"):
    try:
        importlib.import_module("flashlib." + name)
        print("FOUND", name)
    except ModuleNotFoundError:
        pass
"""
    code, output = inside(program, readable={str(tmp_path): "/received"})
    assert code == 0 and output.split() == ["/received/flashlib/__init__.py"], output


def test_the_secret_is_made_once_for_its_owner_alone(tmp_path):
    secret = release.secret_of(tmp_path)
    assert len(secret) >= 32 and release.secret_of(tmp_path) == secret
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    (tmp_path / "secret").write_text("\n")
    with pytest.raises(ValueError, match="empty"):
        release.secret_of(tmp_path)
