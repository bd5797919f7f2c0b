"""Wrong answers to the assignments, each with the points that it must get.

``tests/assignments/<step>.txt`` holds them: after a line ``@ task | name | points``,
lines to replace in the solution of the instructor's notebook (``-``) and their
replacement (``+``), however the solution is broken into lines, or the whole source of
the cell (``=``). One run of the grader judges one wrong answer of every task.
"""

import contextlib
import functools
import itertools
import json
import linecache
import math
import pathlib
import random
import sys

import nbformat
import notebooks
import numpy as np
import pytest
from device import CUDA, DEVICE
from handed_in import (
    SECRET,
    STUDENT,
    grade_id,
    results,
    source_notebook,
    sources_of,
    start_without_sandbox,
    written_out,
)
from notebook_kernels import NamedKernelManager
from processes import ROOT, output, process_environment, run

from exercises.grader import grade, release, sandbox, tasks
from exercises.grader.checks import machine as checks
from flashlib import zoo
from flashlib.iomodel.ring import positions
from flashlib.machine import Machine, programs
from flashlib.machine import cells as cells_of

FOLDER = pathlib.Path(__file__).parent / "assignments"
STEPS = sorted(path.stem for path in FOLDER.glob("*.txt"))


@functools.cache
def wrong_answers(step):
    """``{name: (task, edits, points)}``; edits are ``[(sign, text)]``."""
    found = {}
    for entry in (FOLDER / f"{step}.txt").read_text().removeprefix("@ ").split("\n@ "):
        title, *lines = entry.splitlines()
        task, name, points = title.split(" | ")
        assert name not in found, name
        edits = [
            (sign, "\n".join(line[2:] for line in group))
            for sign, group in itertools.groupby(lines, key=lambda line: line[0])
        ]
        found[name] = (task, edits, float(points))
    return found


def solutions(assignment):
    """{task: source} of the instructor's notebook."""
    sources = sources_of(source_notebook(assignment))
    return {task.name: sources[task.name] for task in assignment.tasks}


def changed(source, edits):
    """The source of a wrong answer."""
    if edits[0][0] == "=":
        return edits[0][1]
    for (_, old), (_, new) in zip(edits[::2], edits[1::2], strict=True):
        source = zoo.replace_once(source, old, new)
    return source


def batches(step):
    """[(step, run, {task: name of a wrong answer})], at most one of each task."""
    made = []
    for name, (task, _, _) in wrong_answers(step).items():
        place = next((batch for batch in made if task not in batch), None)
        if place is None:
            made.append(place := {})
        place[task] = name
    return [(step, number, batch) for number, batch in enumerate(made)]


@pytest.mark.parametrize("step", STEPS)
def test_each_task_has_a_wrong_answer(step):
    assignment, wrong = tasks.assignment(step), wrong_answers(step).values()
    cells = solutions(assignment)
    assert {task for task, _, _ in wrong} == set(cells)
    for task, edits, _ in wrong:
        source = changed(cells[task], edits)
        assert source != cells[task] and compile(source, task, "exec")


GRADED_WITHOUT_TORCH = """
import json, sys
from handed_in import STUDENT, handed_in
from exercises.grader import grade, tasks
assignment = tasks.assignment("machine")
content = json.dumps(handed_in(assignment, b"x")).encode()
marks = grade.grade_one(assignment, content, b"x", sys.argv[1], STUDENT)
print(marks["points"], marks["of"], marks["tasks"])
"""


def test_the_machine_is_graded_without_torch(tmp_path):
    """Neither the trusted process nor the worker imports it, or triton."""
    here, received = tmp_path / "here", tmp_path / "received"
    here.mkdir()
    release.package("machine", received)
    for place, name in itertools.product((here, received), ("torch.py", "triton.py")):
        (place / name).write_text("raise ImportError(__name__)")
    path = f"{here}:{ROOT}:{ROOT / 'tests'}"
    command = [sys.executable, "-c", GRADED_WITHOUT_TORCH, received]
    said = output(run(command, env=process_environment(PYTHONPATH=path)))
    points, of, *_ = said.split()
    assert float(points) == float(of) > 20, said


# What breaks a rule and computes the right thing; check.py tells the student.
AGAINST_THE_RULES = {
    "PyTorch's attention", "PyTorch's log-sum-exp", "PyTorch's softmax",
    "PyTorch's sum of exponentials",
    "a copy on the side", "softmax behind another name", "softmax by another name",
    "the counter changed", "torch.autograd.grad", "a division for each block of keys",
    "a division for each tile", "a whole row at once", "all columns at once",
    "all keys at once", "all positions at once", "every number twice",
    "ranks that share a list", "the whole sum at once",
}  # fmt: skip
# To find the fewest loads or cycles is part of these tasks, so their tests print them.
NOT_THE_FEWEST = {
    "a correction of ten instructions", "an input that is loaded again",
    "an instruction for nothing", "one load too many",
    "ports that are thought to be free", "two sums at a time",
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "kernel"),
    [
        pytest.param(
            step, kernel, id=step + "-kernel" * kernel,
            marks=[pytest.mark.slow] * kernel,
        )
        for step in STEPS
        for kernel in (False, True)
        if not kernel or any(task.kernel for task in tasks.assignment(step).tasks)
    ],
)  # fmt: skip
@pytest.mark.skipif(CUDA, reason="compiled kernels are not checked")
def test_visible_tests_stop_wrong_answers(step, kernel, monkeypatch):
    """All but those on paper, whose numbers a test would tell."""
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
    random.seed(step)  # from which some visible tests draw
    assignment, wrong = tasks.assignment(step), wrong_answers(step)
    kernels = {task.name for task in assignment.tasks if task.kernel}
    judged = {task.name for task in assignment.tasks if not (task.kernel or task.paper)}
    space, sources, passed = {}, {}, []

    def execute(source):
        file = f"<cell {len(linecache.cache)}>"  # where Triton looks for the source
        linecache.cache[file] = len(source), None, source.splitlines(True), file
        exec(compile(source, file, "exec"), space)

    for cell in source_notebook(assignment)["cells"]:
        if cell["cell_type"] == "code":
            name = grade_id(cell) or ""
            sources[name] = "".join(cell["source"])
            if kernel or name.removesuffix("-test") not in kernels:
                execute(sources[name])
    for name, (task, edits, _) in wrong.items():
        if task not in (kernels if kernel else judged):
            continue
        try:
            execute(changed(sources[task], edits))
            execute(sources[f"{task}-test"])
            passed.append(name)
        except Exception:
            execute(sources[task])
    assert set(passed) <= AGAINST_THE_RULES | NOT_THE_FEWEST


def earned(assignment, task, values, numbers):
    """(cases of a task on paper that these values pass, all its cases)."""
    cases, passed = assignment.key(task, numbers), 0
    for case in cases:
        with contextlib.suppress(tasks.Wrong):
            task.judge(case, values, numbers)
            passed += 1
    return passed, len(cases)


def rounded(value, digits):
    """A number on paper; a count keeps all its digits."""
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


@pytest.mark.parametrize("step", tasks.STEPS)
def test_numbers_on_paper(step):
    """Four significant digits are enough for the visible tests and for the judge of
    every student, three are not, a neighbor's answers are wrong, and so is every wrong
    answer after rounding, where it differs from the right one.
    """
    assignment = tasks.assignment(step)
    known = wrong_answers(step) if step in STEPS else {}
    sources = sources_of(source_notebook(assignment))
    given = [assignment.numbers(SECRET, f"student {n}") for n in range(60)]
    assert len({str(numbers) for numbers in given}) > 48
    lost, measured, stolen, possible = 0, False, 0, 0
    for task in (task for task in assignment.tasks if task.paper):
        right, test = (
            compile(sources[x], x, "exec") for x in (task.name, f"{task.name}-test")
        )
        wrong = {
            name: compile(changed(sources[task.name], edits), name, "exec")
            for name, (of, edits, _) in known.items() if of == task.name
        }  # fmt: skip
        theirs = None
        for numbers in given:
            exact = results(right, task.reads, numbers)
            four = {name: rounded(value, 4) for name, value in exact.items()}
            exec(test, {"math": math, **numbers, **four})
            passed, cases = earned(assignment, task, list(four.values()), numbers)
            assert passed == cases
            three = [rounded(value, 3) for value in exact.values()]
            measured |= any(isinstance(value, float) for value in three)
            lost += cases - earned(assignment, task, three, numbers)[0]
            if theirs is not None:
                stolen += earned(assignment, task, theirs, numbers)[0]
                possible += cases
            theirs = list(exact.values())
            for name, source in wrong.items():
                for variable, value in results(source, task.reads, numbers).items():
                    if isinstance(exact[variable], float) and isinstance(value, float):
                        error = abs(value / exact[variable] - 1)
                        assert not 1e-9 < error <= tasks.ROUNDING, (name, variable)
    assert measured == (lost > 0), "three digits are enough"
    assert stolen < 0.15 * possible


def test_a_crossing_that_is_off_by_one_is_wrong():
    """However large it is: every student's number is whole."""
    assignment = tasks.assignment("projections")
    (task,) = (x for x in assignment.tasks if x.name == "counts")
    for student in range(20):
        numbers = assignment.numbers(SECRET, f"student {student}")
        (case,) = (x for x in assignment.key(task, numbers) if x.title == "crossing")
        right = 8 * numbers["E"] / 5
        for value, wrong in ((right, False), (right + 1, True)):
            values = [value] * len(task.reads)
            with pytest.raises(tasks.Wrong) if wrong else contextlib.nullcontext():
                task.judge(case, values, numbers)


def test_a_plan_has_whole_numbers_of_any_type():
    (task,) = (x for x in tasks.assignment("ring").tasks if x.name == "plan")
    for case in tasks.assignment("ring").cases(task, SECRET, STUDENT):
        if case.arguments["part"] == "positions":
            T, size = case.arguments["T"], case.arguments["size"]
            right = np.array([positions(T, rank, size) for rank in range(size)])
            for dtype in (np.int64, np.int32, np.float32):
                task.judge(case, [right.astype(dtype)], {})
            for wrong in (right + 0.5, right > 0, right[:-1]):
                with pytest.raises(tasks.Wrong):
                    task.judge(case, [wrong], {})


@pytest.fixture(scope="module")
def received(tmp_path_factory):
    """What students of a step may import: a function of the step."""

    def package(step):
        folder = tmp_path_factory.mktemp(step)
        release.package(step, folder)
        return folder

    return package


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "number", "batch"),
    [pytest.param(*b, id=f"{b[0]}-{b[1]}") for s in STEPS for b in batches(s)],
)
def test_a_wrong_answer_gets_its_points(step, number, batch, received, monkeypatch):
    if not CUDA:  # after a fork, CUDA cannot be used
        monkeypatch.setattr(sandbox, "start", start_without_sandbox)
    assignment, wrong = tasks.assignment(step), wrong_answers(step)
    made, cells = source_notebook(assignment), solutions(assignment)
    for cell in made["cells"]:
        if (name := grade_id(cell)) in batch:
            cell["source"] = changed(cells[name], wrong[batch[name]][1])
    content = json.dumps(written_out(assignment, made, SECRET)).encode()
    result = grade.grade_one(assignment, content, SECRET, received(step), STUDENT)
    found, wanted, told = {}, {}, {}
    for mark in result["tasks"]:
        name = batch.get(mark["task"], mark["task"])
        found[name], told[name] = mark["points"], mark["notes"]
        wanted[name] = round(wrong[name][2] if name in wrong else mark["of"], 2)
        assert mark["points"] == mark["of"] or mark["notes"], (
            f"{name}: the student is told nothing"
        )
    assert found == wanted, told
    shown = json.dumps(result)
    assert "tensor(" not in shown and "[[" not in shown, "hidden inputs are shown"


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        step if step in ("machine", "online")
        else pytest.param(step, marks=pytest.mark.gpu)
        for step in tasks.STEPS
    ],
)  # fmt: skip
def test_a_source_notebook_passes_its_visible_tests(step):
    """On a GPU where there is one, and the notebook says so itself. On a CPU the other
    tests run the cells of the others.
    """
    notebook = nbformat.read(tasks.assignment(step).notebook, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("print(globals().get('device'))"))
    client = notebooks.client(notebook, ROOT)
    client.kernel_manager_class = NamedKernelManager
    client.execute(env=notebooks.kernel_environment())
    assert notebook.cells[-1].outputs[0].text.strip() == (
        "None" if step == "machine" else DEVICE
    )


@pytest.mark.parametrize("n", range(2, 7))
def test_no_two_elements_of_a_product_are_equal(n):
    a, b = checks.matrices(n)
    assert len(set((a @ b).flatten().tolist())) == n * n


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_intensities_are_those_of_the_programs_of_the_book(n):
    ones, found = [[1.0] * n] * n, []
    for program, machine in (
        (programs.inner_product(n), Machine(3)),
        (programs.outer_product(n), Machine(n * n + 2)),
        (programs.blocked_product(n, n), Machine(n * n + n + 1, "any")),
    ):
        done = machine.run(program, {**cells_of("a", ones), **cells_of("b", ones)})
        operations = done.counts["MAC_Z"] + 2 * done.counts["MAC"]
        found.append(operations / (done.loads + done.stores))
    assignment = tasks.assignment("machine")
    (task,) = (task for task in assignment.tasks if task.paper)
    key = [case.own[1] for case in assignment.key(task, {"n": n})]
    assert found == key
