"""The grader is graded: wrong and hostile submissions, each with the marks that it must get."""

import copy
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from exercises.grader import grade, release, rules, sandbox, submission, tasks

SECRET = b"of this test"
ONLINE = tasks.assignment("online")
FULL = sum(task.points for task in ONLINE.tasks)


@pytest.fixture(scope="session")
def received(tmp_path_factory):
    """What students of *online* may import."""
    folder = tmp_path_factory.mktemp("received")
    release.package("online", folder)
    return folder


def notebook(without=(), **solutions):
    """The source notebook of *online*, with other solutions in the cells named."""
    made = json.loads(ONLINE.notebook.read_text())
    for cell in list(made["cells"]):
        name = cell["metadata"].get("nbgrader", {}).get("grade_id")
        if name in solutions:
            cell["source"] = solutions[name]
        if name in without:
            made["cells"].remove(cell)
    return made


def marks(made, received, secret=SECRET):
    """{task: points} of a notebook, given as a dict or as bytes, and the whole result."""
    content = made if isinstance(made, bytes) else json.dumps(made).encode()
    result = grade.grade_one(ONLINE, content, secret, received)
    return {mark["task"]: mark["points"] for mark in result["tasks"]}, result


def notes(result, task):
    return " ".join(next(mark["notes"] for mark in result["tasks"] if mark["task"] == task))


# ------------------------------------------------------------------------------------ reading what came


@pytest.mark.parametrize(
    "content",
    [
        b"", b"  \n", b"\x00\xff\xfe", b"null", b"[1, 2]", b"{}", b'{"cells": 3}',
        b'{"cells": [3, null, {}]}',
        b'{"cells": [{"cell_type": "code", "metadata": {"nbgrader": {"grade_id": [0]}}, "source": "x"}]}',
        b'{"cells": [{"cell_type": "code", "metadata": [], "source": [1]}]}', b"[" * 100_000,
        b'{"cells": [{"cell_type": "code", "source": "m = 1"',
    ],
)  # fmt: skip
def test_what_is_no_notebook_gets_no_marks_and_a_reason(content):
    read = submission.read(content, ["state"])
    assert read.cells == {} and read.remarks


def test_a_file_that_is_too_large_is_not_read():
    read = submission.read(b" " * (submission.LARGEST_BYTES + 1) + b"{}", ["state"])
    assert read.cells == {} and read.remarks
    read = submission.read(b"{" + b" " * submission.LARGEST_BYTES, ["state"])
    assert "more than" in read.remarks[0]


def test_only_solution_cells_are_read():
    made = notebook()
    made["metadata"]["kernelspec"] = {"name": "no-such-kernel", "display_name": "x", "language": "brainfuck"}
    for cell in made["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("grade"):
            cell["source"] = "raise SystemExit('an edited test')"
    read = submission.read(json.dumps(made).encode(), [task.name for task in ONLINE.tasks])
    assert read.remarks == () and set(read.cells) == {task.name for task in ONLINE.tasks}
    assert not any("edited" in source for source in read.cells.values())


def test_duplicated_cells_are_run_one_after_another():
    made = notebook()
    cell = next(c for c in made["cells"] if c["metadata"].get("nbgrader", {}).get("grade_id") == "state")
    made["cells"].append({**copy.deepcopy(cell), "source": "l = 0"})
    read = submission.read(json.dumps(made).encode(), ["state"])
    assert read.cells["state"].endswith("l = 0") and "2 cells" in read.remarks[0]


# ------------------------------------------------------------------------------------ rules

REFUSED = {
    "attention of PyTorch": "import torch\no = torch.nn.functional.scaled_dot_product_attention",
    "attention of PyTorch by import": "from torch.nn.functional import scaled_dot_product_attention as f",
    "flashlib": "from flashlib import attention",
    "flashlib's kernels": "import flashlib.kernels.flash2",
    "the operating system": "import os",
    "the operating system through torch": "import torch\ntorch.os.system('true')",
    "importlib": "import importlib",
    "a name built at run time": "import torch\nf = getattr(torch, 'soft' + 'max')",
    "exec": "exec('import os')",
    "a file": "open('/etc/passwd')",
    "a file through NumPy": "import numpy\nnumpy.load('/job/arrays.npz', allow_pickle=True)",
    "pickle": "import torch\ntorch.load('x')",
    "dunder attributes": "x = ().__class__.__bases__[0].__subclasses__()",
    "builtins": "x = __builtins__",
    "a private name": "import torch\ntorch._C._nn",
    "raw operations": "import torch\ntorch.ops.aten",
    "a private module": "from torch._C import default_generator",
    "what no attribute may name, by import": "from torch.overrides import TorchFunctionMode",
    "star": "from torch import *",
    "not Python": "def f(:",
    "a library taken over": "triton.jit = print",
    "a library's name": "tl = 1",
    "a library's name by import": "import torch as triton",
    "magic": "%time x = 1",
    "null byte": "x = '\0'",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cell_that_leaves_the_task_is_refused(name):
    with pytest.raises(rules.Refused):
        rules.require(REFUSED[name])


@pytest.mark.parametrize("name", ["torch.softmax(s, -1)", "s.softmax(-1)", "torch.special.logsumexp(s, -1)"])
def test_what_a_task_forbids_is_refused(name):
    with pytest.raises(rules.Refused, match="not allowed"):
        rules.require(f"import torch\ndef f(s):\n    return {name}", forbidden=("softmax", "logsumexp"))


@pytest.mark.parametrize(
    "source",
    [
        "torch.autograd.grad(o, q)",
        "o.backward()",
        "q.requires_grad_()",
        "torch.func.linearize(o, q)",
        "from torch.autograd import functional",
        "from torch.autograd import grad as g",
        "import torch.autograd as a",
    ],
)
def test_what_differentiates_is_refused(source):
    with pytest.raises(rules.Refused, match="not allowed"):
        rules.require(source, forbidden=rules.AUTOGRAD)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\n",
        "def kernel(x):\n    pass",
        "@other\ndef kernel(x):\n    pass",
        "import triton\n@triton.jit\ndef kernel(x):\n    import torch",
        "for i in range(3):\n    pass",
        "import triton\n@triton.jit\ndef kernel(x):\n    y = lambda: 1",
        "kernel = Pretender()",
        "kernel = helper",
    ],
)
def test_a_kernels_cell_holds_kernels_only(source):
    with pytest.raises(rules.Refused):
        rules.require(source, kernel=True)


def test_the_solutions_keep_to_the_rules():
    for step in released_steps():
        assignment = tasks.assignment(step)
        cells = submission.read(
            assignment.notebook.read_bytes(), [task.name for task in assignment.tasks]
        ).cells
        for task in assignment.tasks:
            rules.require(cells[task.name], task.forbidden, task.kernel)


def released_steps():
    """The steps that have an assignment."""
    return [step for step in tasks.STEPS if (tasks.ROOT / "source" / step).is_dir()]


# ------------------------------------------------------------------------------------ marks


@pytest.mark.slow
@pytest.mark.parametrize("step", released_steps())
def test_solutions_get_full_marks_and_the_released_notebook_none(step, tmp_path):
    release.release(step, tmp_path)
    assignment = tasks.assignment(step)
    package, secret = tmp_path / "received" / step, release.secret_of(tmp_path)
    solved = grade.grade_one(assignment, assignment.notebook.read_bytes(), secret, package)
    assert [mark for mark in solved["tasks"] if mark["notes"] or mark["points"] != mark["of"]] == []
    assert solved["points"] == solved["of"] > 0
    released = (tmp_path / "release" / step / f"{step}.ipynb").read_bytes()
    assert grade.grade_one(assignment, released, secret, package)["points"] == 0


@pytest.mark.parametrize("step", released_steps())
def test_points_and_names_of_the_notebook_are_those_of_the_checks(step):
    assignment = tasks.assignment(step)
    cells = [c["metadata"].get("nbgrader", {}) for c in json.loads(assignment.notebook.read_text())["cells"]]
    points = {cell["grade_id"]: cell["points"] for cell in cells if cell.get("grade")}
    solutions = [cell["grade_id"] for cell in cells if cell.get("solution") and not cell.get("grade")]
    written = [name for name in points if not name.endswith("-test")]
    assert solutions == [task.name for task in assignment.tasks]
    assert {name: value for name, value in points.items() if name not in written} == {
        f"{task.name}-test": task.points for task in assignment.tasks
    }
    assert 3 <= len(assignment.tasks) <= 7 and written


def test_another_secret_makes_other_numbers():
    assert ONLINE.numbers(b"a") != ONLINE.numbers(b"b") or ONLINE.numbers(b"a") != ONLINE.numbers(b"c")
    first, second = (ONLINE.cases(ONLINE.tasks[2], secret) for secret in (b"a", b"b"))
    assert not np.array_equal(first[0].arguments["m_a"], second[0].arguments["m_a"])
    again = ONLINE.cases(ONLINE.tasks[2], b"a")
    assert np.array_equal(first[0].arguments["m_a"], again[0].arguments["m_a"])


# What a student may hand in for the task "merge", and what the marks of that task must be. The others must
# keep theirs, whatever this one does.
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


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_MERGES)
def test_a_wrong_answer_gets_its_marks_and_spoils_no_other(name, received, monkeypatch):
    monkeypatch.setattr(grade, "CELL_SECONDS", 3.0)
    short = ONLINE._replace(tasks=tuple(task._replace(seconds=3.0) for task in ONLINE.tasks))
    source, wanted = WRONG_MERGES[name]
    start = time.monotonic()
    result = grade.grade_one(short, json.dumps(notebook(merge=source)).encode(), SECRET, received)
    points = {mark["task"]: mark["points"] for mark in result["tasks"]}
    if wanted is not None:
        assert points["merge"] == round(wanted, 2), notes(result, "merge")
    assert {task: points[task] for task in ("state", "reads", "kernel")} == {
        "state": 2,
        "reads": 2,
        "kernel": 6,
    }
    assert points["merge"] == 4 or notes(result, "merge")
    assert time.monotonic() - start < 60
    assert "tensor(" not in json.dumps(result) and "[[" not in json.dumps(result), "hidden inputs are shown"


# The rules stop these by reading; here they are let through, to see that the sandbox stops them too.
HOSTILE = {
    "leaves at once": "import os\nos._exit(0)",
    "leaves in the call": "import os\n" + HONEST + "os._exit(0)",
    "fork bomb": "import os\n" + HONEST + "\n    while True:\n        os.fork()",
    "threads": (
        "import threading, time\n" + HONEST + "\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(100,)).start()"
    ),
    "memory bomb": HONEST + "\n    x = []\n    while True:\n        x.append(bytearray(2**28))",
    "reads the grader": (
        HONEST + "\n    found = [p for p in ('/etc/shadow', '/home', '/root', '/work', '/job-secret') "
        "if __import__('os').path.exists(p) and __import__('os').access(p, 4)]\n    raise ValueError(found)"
    ),
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
    "the network": (
        HONEST + "\n    import socket\n    socket.create_connection(('192.0.2.1', 80), 1)\n"
        "    return m_a, l_a, o_a"
    ),
    "kills everyone": "import os, signal\n" + HONEST + "\n    os.kill(-1, signal.SIGKILL)",
    "stops the parent": "import os, signal\n" + HONEST + "\n    os.kill(os.getppid(), signal.SIGSTOP)",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_submission_gets_nothing_and_does_no_harm(name, received, monkeypatch):
    monkeypatch.setattr(rules, "require", lambda *_: None)
    monkeypatch.setattr(grade, "CELL_SECONDS", 3.0)
    short = ONLINE._replace(tasks=tuple(task._replace(seconds=3.0) for task in ONLINE.tasks))
    before = set(os.listdir("/proc"))
    start = time.monotonic()
    result = grade.grade_one(short, json.dumps(notebook(merge=HOSTILE[name])).encode(), SECRET, received)
    points = {mark["task"]: mark["points"] for mark in result["tasks"]}
    assert points["merge"] == 0 and notes(result, "merge")
    # Whoever shares a process with its own sabotage may lose by it; who comes before keeps what is there.
    assert time.monotonic() - start < 90
    left = [p for p in set(os.listdir("/proc")) - before if p.isdigit() and _belongs_to_worker(p)]
    assert left == [], "a process has outlived its sandbox"


def _belongs_to_worker(number):
    try:
        with open(f"/proc/{number}/status") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        with open(f"/proc/{number}/cmdline") as file:
            ours = "job-worker" in file.read()
    except OSError:
        return False
    return ours and lines["State"].split()[0] != "Z"


@pytest.mark.slow
def test_what_a_cell_raises_does_not_get_into_the_feedback(received):
    leak = HONEST + "raise type('Leak' + str(m_a.tolist()), (Exception,), {})()"
    _, result = marks(notebook(merge=leak), received)
    assert "Leak" not in json.dumps(result) and "exception of its own" in notes(result, "merge")
    leak = HONEST + "raise NameError('x', name='n' + '7' * 90)"
    _, result = marks(notebook(merge=leak), received)
    assert "7" * 41 not in json.dumps(result)


@pytest.mark.slow
def test_a_task_that_is_missing_or_refused_leaves_the_others(received):
    points, result = marks(notebook(without=("state",), merge="import os"), received)
    assert points == {"state": 0, "reads": 2, "merge": 0, "kernel": 6}
    assert "missing" in result["remarks"][0] and "not run" in notes(result, "merge")


@pytest.mark.slow
def test_a_load_outside_of_a_tensor_is_named_in_the_feedback(received):
    cells = submission.read(ONLINE.notebook.read_bytes(), ["kernel"]).cells
    source = cells["kernel"].replace(', mask=column < n, other=-float("inf")', "")
    points, result = marks(notebook(kernel=source), received)
    assert 0 < points["kernel"] < 6 and "outside of its tensors" in notes(result, "kernel")


# ------------------------------------------------------------------------------------ the sandbox alone


def inside(program, **options):
    """(return code, output) of a Python program in the sandbox."""
    command = sandbox.command([sys.executable, "-I", "-c", program], **options)
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    return result.returncode, result.stdout + result.stderr


def test_the_sandbox_has_no_network_no_root_and_nothing_to_write():
    program = """
import os, socket
print(os.getuid() != 0, [name for _, name in socket.if_nameindex()], sorted(os.environ))
for action in (
    lambda: os.setuid(0), lambda: open("/usr/x", "w"), lambda: os.listdir("/home"),
    lambda: open("/etc/shadow"), lambda: os.mkdir("/x"), lambda: os.kill(1, 9),
    lambda: socket.create_connection(("192.0.2.1", 80), 1),
):
    try:
        print("ALLOWED", action())
    except OSError as error:
        print(type(error).__name__)
"""
    code, output = inside(program)
    assert code == 0, output
    assert output.startswith("True ['lo']") and "ALLOWED" not in output
    for name in ("HOSTNAME", "USER", "SSH", "SECRET"):
        assert f"'{name}" not in output


def test_the_limits_of_the_sandbox_hold():
    processes = """
import os, time
made = 0
try:
    while made < 1000:
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
        made += 1
except OSError:
    pass
print(made)
"""
    code, output = inside(processes)
    assert code == 0 and int(output.split()[-1]) < 1000, output
    code, output = inside("x = bytearray(2**40)")
    assert code != 0 and "MemoryError" in output
    code, output = inside("open('/tmp/x', 'wb').write(bytes(2**27))")
    assert code != 0, output


def test_where_no_sandbox_can_be_made_the_grader_refuses(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(sandbox.SandboxMissing, match="apt-get install -y bubblewrap"):
        sandbox.require()


def test_a_machine_that_forbids_sandboxes_is_named(monkeypatch, tmp_path):
    refuses = tmp_path / "bwrap"
    refuses.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(sandbox.SandboxMissing, match="No permissions to create new namespace"):
        sandbox.require()


# ------------------------------------------------------------------------------------ a folder of submissions


@pytest.fixture
def folder(tmp_path):
    """Three submissions: a solution, nothing, and an empty file; one of them in the flat form."""
    place = tmp_path / "submissions"
    for student in ("alice", "bob"):
        (place / student / "online").mkdir(parents=True)
    (place / "carol").mkdir()
    (place / "alice" / "online" / "online.ipynb").write_text(json.dumps(notebook()))
    (place / "bob" / "online" / "online.ipynb").write_bytes(b"")
    (place / "carol" / "online.ipynb").write_text(json.dumps(notebook(without=("kernel",))))
    return place


def snapshot(place):
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


@pytest.mark.slow
def test_a_folder_is_graded_kept_and_not_graded_twice(folder, tmp_path, received):
    before, said = snapshot(folder), []
    graded = grade.grade("online", folder, tmp_path / "out", SECRET, received, say=said.append)
    assert {student: m["points"] for student, m in graded.items()} == {
        "alice": FULL,
        "bob": 0,
        "carol": FULL - 6,
    }
    assert snapshot(folder) == before, "what was handed in has changed"
    first = snapshot(tmp_path / "out")
    for student, path in grade.find(folder, "online").items():
        assert first[f"online/{student}/received.ipynb"] == path.read_bytes()
    said.clear()
    grade.grade("online", folder, tmp_path / "out", SECRET, received, say=said.append)
    assert sum("graded before" in line for line in said) == 3
    assert snapshot(tmp_path / "out") == first
    # Another secret, and other bytes, are graded anew.
    grade.grade("online", folder, tmp_path / "out", b"other", received, say=said.append)
    assert snapshot(tmp_path / "out") != first


@pytest.mark.slow
def test_what_was_interrupted_is_taken_up_again(folder, tmp_path, received):
    program = (
        "import sys; from exercises.grader import grade; "
        f"grade.grade('online', {str(folder)!r}, {str(tmp_path / 'out')!r}, {SECRET!r}, {str(received)!r}, 1)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tasks.ROOT.parent
    )
    assert process.stdout.readline().startswith("[   1/3]")
    process.kill()
    process.wait()
    said = []
    graded = grade.grade("online", folder, tmp_path / "out", SECRET, received, say=said.append)
    assert len(graded) == 3 and any("graded before" in line for line in said)


def test_a_folder_without_submissions_says_so(tmp_path, received):
    with pytest.raises(ValueError, match="no submission"):
        grade.grade("online", tmp_path, tmp_path / "out", SECRET, received)


# ------------------------------------------------------------------------------------ what students receive


@pytest.mark.parametrize("step", tasks.STEPS)
def test_what_students_receive_solves_nothing(step, tmp_path):
    release.package(step, tmp_path)
    names = {str(path.relative_to(tmp_path / "flashlib")) for path in (tmp_path / "flashlib").rglob("*.py")}
    assert names == set(release.RECEIVED[step])
    solutions = (
        "reference api tiles standard gradients flash backward steps schedules formulas programs search"
    )
    for word in [*solutions.split(), "layers", "testing", "zoo"]:
        assert not any(word in name for name in names), word


@pytest.mark.parametrize(
    ("step", "module"), [("online", "exercise"), ("machine", "machine"), ("blocks", "iomodel")]
)
def test_in_the_sandbox_there_is_what_students_receive_and_no_more(step, module, tmp_path):
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
