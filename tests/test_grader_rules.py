"""What is refused in a cell before it runs, and which cells a task needs."""

import contextlib
import json
import time

import pytest
from handed_in import STUDENT, handed_in, start_without_sandbox

from exercises.grader import grade, guard, release, rules, sandbox, submission, tasks
from exercises.grader import plan as plans

MACHINE = tasks.assignment("machine")

REFUSED = {
    "dunder attributes": "x = ().__class__.__bases__[0].__subclasses__()",
    "the frames of the worker": "g = (x for x in ())\ny = g.gi_frame.f_back",
    "the frames of an exception": (
        "try:\n    1 / 0\nexcept ValueError as e:\n    y = e.tb_frame.f_builtins"
    ),
    "a frame in a pattern": "match x:\n    case object(gi_frame=f):\n        pass",
    "an attribute by place": "match x:\n    case Box(f):\n        pass",
    "foreign memory": "class A:\n    __array_interface__ = {}",
    "attributes that are made up": (
        "class A:\n    def __getattr__(self, name):\n        pass"
    ),
    "the builtins": "__builtins__['open']",
    "a class's annotations": "class A:\n    made.append(__annotations__)",
    "a tensor that lies": "class A:\n    def __torch_dispatch__(self):\n        pass",
    "not Python": "def f(:", "null byte": "x = '\0'", "too long": "x = 1\n" * 10_000,
    "deep": "x = " + "lambda: " * 6_000 + "1", "a sum of many terms": "x = " +
    "+".join("1" * 1_500),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_cell_that_leaves_the_task_is_refused(name):
    with pytest.raises(rules.Refused):
        rules.require(REFUSED[name])


@pytest.mark.parametrize(
    "source",
    [
        "from flashlib import attention", "import flashlib.kernels.flash2",
        "import os", "from torch._C import default_generator", "from . import x",
        "open('/etc/passwd')", "globals()", "locals()",
    ],
)  # fmt: skip
def test_a_cell_that_leaves_the_task_is_stopped_where_it_does(source):
    rules.require(source)
    isolation = guard.Guard()
    space, why = isolation.namespace({}), "may import math|finds names by text"
    with pytest.raises(guard.NotAllowed, match=why):
        isolation.run(f"x = 1\n{source}\ny = 2", "<cell>", space)
    assert space["x"] == 1 and "y" not in space


HONEST = """
open = [torch.ones(3)]  # autograd, eval(), exec()
---
def f(torch):
    return torch.load("x"), torch.save
F = 312
f(torch, [torch.nn, F])
---
if __name__ == "__main__":
    print(torch.__version__)
---
x.maximum = 3
type(x) is int
t._replace(m=2)
---
def open(x):
    return x
open(3)
"""


@pytest.mark.parametrize("source", HONEST.split("---"))
def test_an_honest_cell_is_not_refused(source):
    rules.require(source)


@pytest.mark.parametrize(
    "source", ["f = x.numpy", "match x:\n    case A(numpy=f):\n        f()"]
)
def test_a_task_may_do_without_numpy(source):
    rules.require(source, rules.SOFTMAX)
    with pytest.raises(rules.Refused, match=r"line .*numpy"):
        rules.require(source, rules.HELD)


@pytest.mark.parametrize(
    "source",
    ["import numpy as np", "import math, numpy.linalg", "from numpy import exp"],
)
def test_a_task_may_be_without_numpy(source):
    for forbidden in (rules.SOFTMAX, rules.HELD):
        isolation = guard.Guard(forbidden)
        with contextlib.ExitStack() as stack:
            if forbidden == rules.HELD:
                what = "import of numpy.*: this task does not allow it"
                stack.enter_context(pytest.raises(guard.NotAllowed, match=what))
            isolation.run(source, "<cell>", isolation.namespace({}))


def test_magics_are_not_run_and_lines_stay_where_they_are():
    assert rules.clean("%%time\nx = 1\n!ls\ny = 2") == "\nx = 1\n\ny = 2"
    assert rules.clean("x = (7\n% 2)") == "x = (7\n% 2)"
    assert rules.clean("?max\nx.sum?\nmin?? \nx = 1  # why?") == "\n\n\nx = 1  # why?"


ON_PAPER = {
    "m = -5\nl = 1.25": {"m": -5, "l": 1.25},
    "m, l = 3 / 8, 10**3\nm = 2": {"m": 2, "l": 1000},
    "import x\nprint(m)\nl: float = 2\nraise NotImplementedError()": {
        "m": None,
        "l": 2,
    },
    "def f():\n    m = g()\n[m for m in f()]\nm = 1": {"m": 1, "l": None},
    "m = max(1, 2)\nl = m = 3\nm = 4; m = 5\nm = 6; l = 7": {"m": 6, "l": 7},
}
COMPUTED = (
    "m = max(1, 2)", "m = x", "l = 0\nfor i in range(3):\n    l += i",
    "def m():\n    pass", "import x as m", "m = 1 if x else 2", "if x:\n    m = 2",
    "m = [l for l in x]", "for m in (1,):\n    pass", "(m := x)", "m = 1\ndel m",
    "m = 1\nm = x", "*m, l = 1, 2", "a[f()] = m = 2", "m: int",
    "with x as m:\n    pass",
)  # fmt: skip


@pytest.mark.parametrize("source", ON_PAPER)
def test_numbers_that_are_written_out_are_read(source):
    space = {}
    exec(rules.answers(source, ("m", "l")), space)
    assert {name: space[name] for name in ("m", "l")} == ON_PAPER[source]


@pytest.mark.parametrize("source", COMPUTED)
def test_what_is_computed_is_no_answer_on_paper(source):
    with pytest.raises(rules.Refused, match=r"line .* written out"):
        rules.answers(source, ("m", "l"))


def test_the_last_assignment_of_an_answer_counts_and_it_is_said():
    said = rules.repeated("%time\nm = x\nl = 1\nm = 2", ("m", "l"))
    assert said == ["m is assigned 2 times: line 4 counts"]


def test_a_stub_gives_way_to_what_another_cell_has():
    stub = (
        "@jit\ndef f(x):\n    'What it does.'\n    raise NotImplementedError()\ny = 1"
    )
    cells = {"a": stub, "b": "def f(x):\n    return y"}
    assert rules.without_stubs(cells) == {**cells, "a": "\n\n\n\ny = 1"}
    for other in ("g = 1", stub, ""):
        cells = {"a": stub, "b": other}
        assert rules.without_stubs(cells) == cells
    written = {"a": stub.replace("raise", "f(x)\n    raise"), "b": "f = 1"}
    assert rules.without_stubs(written) == written


def test_a_line_may_end_with_a_carriage_return():
    """As it does for Python, which counts the lines of a stub."""
    stub = "def f():\r    raise NotImplementedError\rx = (1,\r\n2)\ny = 3"
    cells = {"a": rules.clean(stub), "b": "def f():\n    return 1"}
    assert rules.without_stubs(cells)["a"] == "\n\nx = (1,\n2)\ny = 3"
    assert rules.clean("!ls\rx = 1") == "\nx = 1"


def test_a_task_needs_its_own_cell_and_what_that_uses():
    cells = {
        "a": "m = 1\ndef helper(x):\n    return deep(x)",
        "b": "def task(x):\n    m = x\n    return helper(m) + ranges(m)",
        "c": "def deep(x):\n    return x\ndef ranges(n):\n    return 0",
        "d": "while True:\n    x = 1",
    }
    assert rules.needs("b", cells, ["task"], {"ranges"}) == ["a", "c", "b"]
    assert rules.needs("a", cells, ["m"], set()) == ["c", "a"]
    split = {"b": "y = 1", "extra": "def task(x):\n    return y"}
    assert rules.needs("b", split, ["task"], set()) == ["extra", "b"]


def test_which_cells_a_task_needs_takes_no_time():
    """However many cells a student adds: each is read a few times at most."""
    cells = {f"extra-{n}": f"x{n} = x{n + 1}\n" + "y = [1]\n" * 50 for n in range(200)}
    start = time.process_time()
    found = rules.needs("task", cells | {"task": "x = x0"}, ["x"], {"x200"})
    assert found == [*cells, "task"] and time.process_time() - start < 2


def test_what_a_student_adds_to_a_given_cell_counts():
    """The statements that are given do not: some import what a solution may not."""
    given = "import math\nfrom flashlib.machine import (\n    Machine,\n)"
    plan = plans.Plan([("given-0", given)], {}, [], [], [])
    added = f"import numpy as np\n{given}  # the machine\nn = 2"
    texts = [("a", "m = 1"), (None, given), (None, added), (None, "x = 1  # mine")]
    cells = [
        {"cell_type": "code", "source": x, "metadata": {"nbgrader": {"grade_id": name}}}
        for name, x in texts
    ]
    handed_in = submission.read(json.dumps({"cells": cells}).encode(), ["a"])
    extra = {"extra-2": "import numpy as np\nn = 2", "extra-3": texts[3][1]}
    assert plan.ordered(handed_in, {"a": "m = 2"}) == {"a": "m = 2", **extra}


@pytest.mark.parametrize("count", [100, 1_500])
def test_a_sum_of_many_terms_raises_nothing(count, tmp_path, monkeypatch):
    many = "+".join("1" * count)
    changes = {name: f"{name} = {many}" for name in ("product", "outer", "six")}
    changes["intensity"] = f"inner_intensity = {many}"
    made = handed_in(MACHINE, b"x", **changes)
    monkeypatch.setattr(sandbox, "start", start_without_sandbox)
    release.package("machine", tmp_path)
    content = json.dumps(made).encode()
    result = grade.grade_one(MACHINE, content, b"x", tmp_path, STUDENT)
    told = {mark["task"]: "".join(mark["notes"]) for mark in result["tasks"]}
    assert result["faults"] == []
    assert all(("too deeply" in told[name]) == (count > 1_000) for name in changes)
