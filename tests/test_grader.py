"""The grader is graded: wrong and hostile submissions, each with the marks that it must get."""

import copy
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from exercises.grader import grade, gradebook, release, rules, sandbox, submission, tasks

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


def marks(made, received, assignment=ONLINE):
    """{task: points} of a notebook, and the whole result."""
    result = grade.grade_one(assignment, json.dumps(made).encode(), SECRET, received)
    return {mark["task"]: mark["points"] for mark in result["tasks"]}, result


def notes(result, task):
    return " ".join(next(mark["notes"] for mark in result["tasks"] if mark["task"] == task))


# ------------------------------------------------------------------------------------ reading what came


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


def test_cells_that_are_none_leave_the_others(tmp_path):
    good = {
        "cell_type": "code",
        "metadata": {"nbgrader": {"grade_id": "state"}},
        "source": ["m = 1\n", "l = 2"],
    }
    words = {"cell_type": "markdown", "metadata": {"nbgrader": {"grade_id": "words"}}, "source": "Because."}
    broken = [{**good, key: None} for key in good] + [{**good, "metadata": {"nbgrader": None}}]
    content = json.dumps({"cells": [None, *broken, words, 3, good, []]}).encode()
    assert submission.read(content, ["state", "words"]).cells == {"state": "m = 1\nl = 2"}
    (tmp_path / "online.ipynb").write_bytes(content)
    assert gradebook.written_answers(tmp_path / "online.ipynb") == {
        "state": "m = 1\nl = 2",
        "words": "Because.",
    }


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
    # Names that hide what they mean.
    "a module under another name": "x = torch\nx.load('x')",
    "a module under a name that may load": "memory = torch\nmemory.load('x')",
    "what may load does nothing else": "memory = torch\nmemory.os.system('true')",
    "a library changed under another name": "x = torch\nx.maximum = torch.minimum",
    "a library changed deep inside": "torch.nn.functional.relu = print",
    "a library changed under an imported name": "import torch.nn.functional as F\nF.relu = print",
    "a library changed by a loop": "for torch.maximum in [print]:\n    pass",
    "a module passed on": "def f(x):\n    return x.maximum\nf(torch)",
    "a module as a default": "def f(x=torch):\n    pass",
    "modules in a list": "x = [torch.nn, torch]",
    "modules at once": "x, y = torch, torch",
    "a module by walrus": "if (x := torch):\n    pass",
    "a module in a pattern": "match torch:\n    case object(exp=f):\n        pass",
    "a name in a pattern": "match x:\n    case object(os=f):\n        pass",
    "a name for two modules": "x = torch\nx = torch.nn",
    "a module that runs texts": "torch.jit.CompilationUnit('def f(x): return x')",
    "a module that runs texts, renamed": "x = torch\ny = x.fx",
    "a module that runs texts, by import": "from torch import fx as f",
    "a module that is loaded late": "torch.onnx",
    "NumPy's compiler": "import numpy as np\nnp.f2py",
    "what Triton is made of": "triton.runtime.interpreter.interpreter_builder",
    "another module's modules": "torch.functional.torch.jit",
    "attributes by text": "import functools\nfunctools.update_wrapper(Box(), torch.Tensor, assigned=['exp'])",
    "attributes by text, by import": "from functools import wraps",
    "a parameter with a library's name": "def f(torch):\n    pass",
    "a function with a library's name": "def torch():\n    pass",
    "a pattern with a library's name": "match x:\n    case tl:\n        pass",
    "an exception with a library's name": "try:\n    pass\nexcept ValueError as math:\n    pass",
    "a library's name, imported and taken": "import torch\ntorch = 1",
    "a module in a class": "class A:\n    x = torch\ny = A.x.jit",
    "a module imported in a class": "class A:\n    if True:\n        import torch as x\ny = A.x.jit",
    "the frames of the worker": "g = (x for x in ())\ny = g.gi_frame.f_back",
    "the frames of an exception": "try:\n    1 / 0\nexcept ValueError as e:\n    y = e.tb_frame.f_builtins",
    "a frame in a pattern": "match x:\n    case object(gi_frame=f):\n        pass",
    "a chain of names": "\n".join(f"def f{n}():\n    x{n} = x{n + 1}" for n in range(9)) + "\nx9 = torch",
    "too long": "x = 1\n" * 10_000,
    "deep": "x = " + "lambda: " * 6_000 + "1",
    "a long chain": "x = torch" + ".a" * 24_000,
    "other letters": "torch.lo\u1d43d('x')",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cell_that_leaves_the_task_is_refused(name):
    with pytest.raises(rules.Refused):
        rules.require(REFUSED[name])


@pytest.mark.parametrize(
    "source",
    [
        "torch.softmax(s, -1)",
        "s.softmax(-1)",
        "torch.special.logsumexp(s, -1)",
        "x = torch\nx.softmax(s, -1)",
        "from torch import softmax as f",
        "from torch.nn.functional import softmax as f",
        "import torch.nn.functional as F\nF.softmax(s, -1)",
        "F = torch.nn.functional\nf = F.softmax",
        "f = torch.Tensor.softmax",
        "match s:\n    case object(softmax=f):\n        pass",
        "s.ſoftmax(-1)",
    ],
)
def test_what_a_task_forbids_is_refused(source):
    with pytest.raises(rules.Refused, match=r"softmax|logsumexp"):
        rules.require(source, forbidden=("softmax", "logsumexp"))


HONEST_CELLS = """
import torch.nn.functional as F
def f(x):
    return F.relu(x) + F.pad(x, (0, 1))
---
from torch import nn
from torch.nn import functional
N = nn.functional
y, z = N.relu, functional.pad
---
import numpy as np
rng = np.random.default_rng(0)
x = np.linalg.norm(rng.standard_normal(3))
---
e = torch.exp
def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return e(x), torch.finfo(x.dtype).max
---
class State:
    def __init__(self, m):
        self.m = m
    def add(self, x):
        self.m.best = x
---
import functools
import itertools
@functools.cache
def f(n):
    return sum(itertools.repeat(1, n))
---
device = "cuda" if torch.cuda.is_available() else "cpu"
---
def schedule(memory, T):
    block = memory.load("Q", slice(0, T))
    block[:] = 0
    memory.free(block)
---
def f(x):
    global count
    match x.shape:
        case (T, d):
            count = T * d
---
def f(scores):
    parts = [ranges(x) for x in scores]
    return isinstance(parts, list) and type(x) is int
---
F = 312
x = [F, F / 2]
---
try:
    x = math.log(0)
except ValueError as error:
    x = -math.inf
---
class Rows:
    size = torch.float32.itemsize
    def total(self, x):
        F = torch.nn.functional
        return F.normalize(x).sum()
---
import triton
import triton.language as tl
@triton.jit
def f(x, N: tl.constexpr):
    y = tl.load(x + tl.arange(0, N)).to(tl.float32)
    tl.store(x, tl.math.exp2(y) + math.pi)
"""


@pytest.mark.parametrize("source", HONEST_CELLS.split("---"))
def test_an_honest_cell_is_not_refused(source):
    rules.require(source, rules.SOFTMAX, around=AROUND)


GIVEN = "import torch\nfrom flashlib import kernels\nclass Largest:\n    x = 0\ndef ranges(n):\n    pass"
LATER = "def run_product():\n    pass\ndef moved_words():\n    pass"
CELLS = [("given-0", GIVEN, None), ("a", None, "a"), ("given-2", LATER, None), ("b", None, "b")]
AROUND = rules.around(CELLS, {"a": "import torch.nn.functional as F"})["b"]


@pytest.mark.parametrize(
    "source",
    [
        "def ranges(n):\n    return []",
        "run_product = print",
        "from math import exp as run_product",
        "class Largest:\n    pass",
        "for run_product in [print]:\n    pass",
        "if True:\n    def moved_words():\n        return 0",
        "def f():\n    global moved_words\n    moved_words = print",
        "def f():\n    global moved_words\n    def moved_words():\n        pass",
        "Largest.x = 0",
        "x = Largest",
        "def f(x):\n    x.x = 0\nf(Largest)",
        "kernels.padded = print",
        "kernels = 1",
        "x = kernels.torch.jit",
        "F.relu = print",
    ],
)
def test_what_is_given_stays_what_it_is(source):
    with pytest.raises(rules.Refused, match="line "):
        rules.require(source, around=AROUND)


def test_what_is_given_later_may_have_been_something_else():
    """The given cell is run after it, as in the notebook; only ``global`` reaches it, from inside a call."""
    before = rules.around(CELLS, {})["a"]
    rules.require("def run_product():\n    pass", around=before)
    with pytest.raises(rules.Refused, match="line 2: run_product is given"):
        rules.require("def f():\n    global run_product\n    run_product = print", around=before)


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
        "@triton.jit\ndef kernel(x):\n    torch.exp(x)",
        "@triton.jit\ndef kernel(x):\n    x.handle.data[:] = 0",
        "import numpy as np",
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
        around = rules.around(grade.given_cells(assignment, SECRET), cells)
        for task in assignment.tasks:
            rules.require(cells[task.name], task.forbidden, task.kernel, around[task.name])


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


@pytest.fixture
def hurried(received, monkeypatch):
    """Marks of a merge that has 3 seconds for everything: a function of its source, which checks that grading
    ends in time, and that nothing is left of the worker.
    """
    monkeypatch.setattr(grade, "CELL_SECONDS", 3.0)
    short = ONLINE._replace(tasks=tuple(task._replace(seconds=3.0) for task in ONLINE.tasks))

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
        left = [int(name) for name in os.listdir("/proc") if name.isdigit() and is_worker(name, users)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def is_worker(number, users):
    try:
        with open(f"/proc/{number}/status") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        with open(f"/proc/{number}/cmdline") as file:
            ours = "/job/worker.py" in file.read() and int(lines["Uid"].split()[0]) in users
    except OSError:
        return False
    return ours and lines["State"].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_MERGES)
def test_a_wrong_answer_gets_its_marks_and_spoils_no_other(name, hurried):
    source, wanted = WRONG_MERGES[name]
    points, result = hurried(source)
    if wanted is not None:
        assert points["merge"] == round(wanted, 2), notes(result, "merge")
    assert {task: points[task] for task in ("state", "reads", "kernel")} == {
        "state": 2,
        "reads": 2,
        "kernel": 6,
    }
    assert points["merge"] == 4 or notes(result, "merge")
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
def test_a_hostile_submission_gets_nothing_and_does_no_harm(name, hurried, monkeypatch):
    monkeypatch.setattr(rules, "require", lambda *_: None)
    points, result = hurried(HOSTILE[name])
    # Whoever shares a process with its own sabotage may lose other points by it.
    assert points["merge"] == 0 and notes(result, "merge")


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
def test_kill_9_in_the_middle_loses_nothing(folder, tmp_path, received):
    """Killed again and again, each time after one submission more, the run ends with the same files."""
    for student in ("dan", "eve", "fay", "gil", "hua"):
        (folder / student).mkdir()
        (folder / student / "online.ipynb").write_text(json.dumps(notebook(without=("kernel",))))
    handed_in, arguments = snapshot(folder), ("online", str(folder))
    grade.grade(*arguments, tmp_path / "whole", SECRET, received, say=lambda line: None)
    wanted = snapshot(tmp_path / "whole")
    program = (
        "import sys; from exercises.grader import grade; say = lambda line: print(line, flush=True); "
        f"grade.grade(*{arguments!r}, {str(tmp_path / 'out')!r}, {SECRET!r}, {str(received)!r}, 2, say)"
    )
    for kill in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tasks.ROOT.parent
        )
        lines = [process.stdout.readline() for _ in range(kill + 1)]
        time.sleep(0.3 * kill)  # other moments in the life of the workers that are at work
        process.kill()
        rest = process.stdout.read()
        process.wait()
        process.stdout.close()
        assert "8/8]" not in rest, "it came to its end before it was killed"
        assert sum("graded before" in line for line in lines) >= kill
        assert outliving(process.pid) == [], "a worker has outlived the grader"
        for name, content in snapshot(tmp_path / "out").items():
            assert content == wanted.get(name) or name.endswith(".part"), name
    said = []
    grade.grade(*arguments, tmp_path / "out", SECRET, received, say=said.append)
    assert sum("graded before" in line for line in said) >= 3
    assert snapshot(tmp_path / "out") == wanted and snapshot(folder) == handed_in


def test_a_notebook_under_another_name_is_named(folder):
    extra = [folder / "bob" / "online (1).ipynb", folder / "online.ipynb", folder / "carol" / "x" / "y.ipynb"]
    hidden = folder / "bob" / "online" / ".ipynb_checkpoints" / "online-checkpoint.ipynb"
    for path in (*extra, hidden):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    assert grade.left_over(folder, [grade.find(folder, "online")]) == sorted(extra)
    assert grade.left_over(folder, []) == sorted([*extra, *grade.find(folder, "online").values()])


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
