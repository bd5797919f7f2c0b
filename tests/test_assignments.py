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
import re
import subprocess
import sys

import nbformat
import notebooks
import numpy as np
import pytest
import torch
from cases import CUDA, DEVICE, process_environment
from handed_in import (
    STUDENT,
    answer,
    grade_id,
    source_notebook,
    sources_of,
    written_out,
)

from exercises.grader import (
    channel,
    counting,
    grade,
    plan,
    release,
    submission,
    tasks,
    worker,
)
from exercises.grader.checks import machine as checks
from flashlib import zoo
from flashlib.machine import Machine, programs
from flashlib.machine import cells as cells_of

SECRET = b"of this test"
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
    content = assignment.notebook.read_bytes()
    return submission.read(content, [task.name for task in assignment.tasks]).cells


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
    assignment, wrong = tasks.assignment(step), wrong_answers(step)
    assert len(wrong) >= 5 and {task for task, _, _ in wrong.values()} == {
        t.name for t in assignment.tasks
    }
    points = {task.name: task.points for task in assignment.tasks}
    cells = solutions(assignment)
    for name, (task, edits, wanted) in wrong.items():
        assert 0 <= wanted < points[task], name
        source = changed(cells[task], edits)
        assert source != cells[task], name
        assert compile(source, name, "exec"), name


NO_TORCH = """
import sys
def refuse(event, arguments):
    if event == "import" and arguments[0].split(".")[0] in ("torch", "triton"):
        raise ModuleNotFoundError(arguments[0])
sys.addaudithook(refuse)
"""
GRADED_WITHOUT_TORCH = """
import json
from handed_in import STUDENT, handed_in
from exercises.grader import grade, release, sandbox, tasks
start = sandbox.start
def blocked(argv, *rest, **options):
    program = NO_TORCH + "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return start([*argv[:2], "-c", program, *argv[2:]], *rest, **options)
sandbox.start = blocked
assignment = tasks.assignment("machine")
content = json.dumps(handed_in(assignment, b"x")).encode()
release.package("machine", sys.argv[1])
marks = grade.grade_one(assignment, content, b"x", sys.argv[1], STUDENT)
print(marks["points"], marks["of"], marks["tasks"])
"""


def test_the_machine_is_graded_without_torch(tmp_path):
    """Neither the trusted process nor the worker imports it."""
    program = f"{NO_TORCH}NO_TORCH = {NO_TORCH!r}\n{GRADED_WITHOUT_TORCH}"
    command = [sys.executable, "-c", program, tmp_path]
    run = subprocess.run(
        command, cwd=tasks.ROOT.parent / "tests", capture_output=True, text=True,
        env=process_environment(PYTHONPATH=str(tasks.ROOT.parent)),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    points, of, *_ = run.stdout.split()
    assert float(points) == float(of) > 20, run.stdout


# What breaks a rule and computes the right thing; check.py tells the student.
AGAINST_THE_RULES = {
    "PyTorch's attention", "PyTorch's softmax", "PyTorch's sum of exponentials", "a copy on the side",
    "softmax behind another name", "softmax by another name", "the counter changed", "torch.autograd.grad",
}  # fmt: skip
# To find the fewest loads or cycles is part of these tasks, so their tests print them.
NOT_THE_FEWEST = {
    "a correction of ten instructions", "an input that is loaded again", "an instruction for nothing",
    "one load too many", "ports that are thought to be free", "two sums at a time",
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "kernel"),
    [
        pytest.param(step, kernel, id=step + "-kernel" * kernel, marks=[pytest.mark.slow] * kernel)
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

    def run(source):
        file = f"<cell {len(linecache.cache)}>"  # where Triton looks for the source
        linecache.cache[file] = len(source), None, source.splitlines(True), file
        exec(compile(source, file, "exec"), space)

    for cell in source_notebook(assignment)["cells"]:
        if cell["cell_type"] == "code":
            name = grade_id(cell) or ""
            sources[name] = "".join(cell["source"])
            if kernel or name.removesuffix("-test") not in kernels:
                run(sources[name])
    for name, (task, edits, _) in wrong.items():
        if task not in (kernels if kernel else judged):
            continue
        try:
            run(changed(sources[task], edits))
            run(sources[f"{task}-test"])
            passed.append(name)
        except Exception:
            run(sources[task])
    assert set(passed) <= AGAINST_THE_RULES | NOT_THE_FEWEST


@pytest.mark.parametrize("step", tasks.STEPS)
def test_visible_tests_accept_the_answers_of_every_student(step):
    assignment = tasks.assignment(step)
    sources = sources_of(source_notebook(assignment))
    papers = [task.name for task in assignment.tasks if task.paper]
    cells = [compile(sources[x], x, "exec") for n in papers for x in (n, f"{n}-test")]
    given = [assignment.numbers(SECRET, f"student {n}") for n in range(1000)]
    for numbers in given:
        space = {"math": math, **numbers}
        for cell in cells:
            exec(cell, space)
    assert len({str(numbers) for numbers in given}) > 800


def rounded(value, digits):
    """A number on paper; a count keeps all its digits."""
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


@pytest.mark.parametrize("step", tasks.STEPS)
def test_four_significant_digits_are_enough_on_paper(step):
    """For the visible tests and for the judges; three are not."""
    assignment, lost, measured = tasks.assignment(step), 0, False
    sources = sources_of(source_notebook(assignment))
    assert "four significant digits" in tasks.PARAMETERS
    for n, task in itertools.product(range(50), assignment.tasks):
        if not task.paper:
            continue
        numbers = assignment.numbers(SECRET, f"student {n}")
        exact = {"math": math, **numbers}
        exec(sources[task.name], exact)
        space = {name: rounded(exact[name], 4) for name in task.reads}
        exec(sources[f"{task.name}-test"], {"math": math, **numbers, **space})
        few = [rounded(exact[name], 3) for name in task.reads]
        measured |= any(isinstance(value, float) for value in few)
        cases = task.cases(None, numbers) if task.cases else [tasks.Case("", {})]
        for case in cases:
            task.judge(case, list(space.values()), numbers)
            try:
                task.judge(case, few, numbers)
            except tasks.Wrong:
                lost += 1
    assert measured == (lost > 0), "three digits are enough"


@pytest.mark.parametrize("step", STEPS)
def test_no_wrong_answer_on_paper_is_right_after_rounding(step):
    """For every student's numbers. Some values are the same in the wrong formula."""
    assignment, close = tasks.assignment(step), set()
    cells, papers = solutions(assignment), {t.name: t for t in assignment.tasks if t.paper}  # fmt: skip
    for name, (task, edits, _) in wrong_answers(step).items():
        if task not in papers:
            continue
        wrong = compile(changed(cells[task], edits), name, "exec")
        right = compile(cells[task], task, "exec")
        for n in range(200):
            numbers = assignment.numbers(SECRET, f"student {n}")
            space, found = {"math": math, **numbers}, {"math": math, **numbers}
            exec(right, space)
            with contextlib.suppress(ArithmeticError, ValueError):
                exec(wrong, found)
            for variable in papers[task].reads:
                exact, value = space[variable], found.get(variable)
                if isinstance(exact, float) and isinstance(value, float):
                    error = abs(value - exact) / abs(exact)
                    if 1e-9 < error <= tasks.ROUNDING:
                        close.add((name, variable))
    assert not close


@pytest.mark.parametrize("step", tasks.STEPS)
def test_the_answers_of_a_neighbor_are_wrong(step):
    """Of 60 pairs, a number may be the same by chance, but hardly a task."""
    assignment, cells = tasks.assignment(step), solutions(tasks.assignment(step))
    papers = [task for task in assignment.tasks if task.paper]
    given = [assignment.numbers(SECRET, f"student {n}") for n in range(61)]
    earned = possible = 0
    for numbers, theirs in itertools.pairwise(given):
        for task in papers:
            space = {}
            exec(answer(cells[task.name], task.reads, theirs), space)
            values = [space[name] for name in task.reads]
            cases = [tasks.Case("your answer", {})]
            for case in task.cases(None, numbers) if task.cases else cases:
                possible += 1
                with contextlib.suppress(tasks.Wrong):
                    task.judge(case, values, numbers)
                    earned += 1
    assert earned < 0.15 * possible


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
def test_a_wrong_answer_gets_its_points(step, number, batch, received):
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
@pytest.mark.parametrize("step", tasks.STEPS)
def test_a_source_notebook_passes_its_visible_tests(step):
    """On a GPU where there is one, and the notebook says so itself."""
    notebook = nbformat.read(tasks.assignment(step).notebook, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("print(globals().get('device'))"))
    client = notebooks.client(notebook, tasks.ROOT.parent)
    client.execute(env=notebooks.kernel_environment())
    assert notebook.cells[-1].outputs[0].text.strip() == (
        "None" if step == "machine" else DEVICE
    )


class Messages:
    """The channel of a worker that works in this process."""

    def __init__(self):
        self.problems, self.results = {}, {}

    def send(self, header, arrays=()):
        if "done" in header:
            self.problems[header["done"]] = grade.explained(channel.problem_of(header))
        elif "result" in header:
            parts = iter(arrays)
            values = [
                next(parts) if v["kind"] == "array" else v.get("value")
                for v in header["values"]
            ]
            problem = grade.explained(channel.problem_of(header))
            result = (values, problem, header["operations"])
            self.results[header["result"], header["case"]] = result


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
    assert found == checks.intensities({"n": n})


def nothing_written(source):
    """A solution's cell as nbgrader, which not every GPU machine has, releases it."""
    stub = r"\g<1># YOUR CODE HERE\n\g<1>raise NotImplementedError()"
    region = r"^([ ]*)### BEGIN SOLUTION\n(?s:.*?)### END SOLUTION$"
    cleared, regions = re.subn(region, stub, source, flags=re.MULTILINE)
    assert regions == source.count("BEGIN SOLUTION") > 0
    return cleared


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("written", [True, False], ids=["solutions", "released"])
@pytest.mark.parametrize("step", tasks.STEPS)
def test_solutions_get_full_marks_on_a_gpu_and_the_release_none(
    step, written, tmp_path, monkeypatch
):
    """Without a sandbox: these cells are the instructor's."""
    assignment = tasks.assignment(step)
    cells, numbers = solutions(assignment), assignment.numbers(SECRET, STUDENT)
    if not written:
        cells = {name: nothing_written(source) for name, source in cells.items()}
    cases = {t.name: assignment.cases(t, SECRET, STUDENT) for t in assignment.tasks}
    needs = plan.of_notebook(assignment, assignment.numbered(SECRET, STUDENT))
    job, arrays = grade.make_job(needs, cells, assignment.tasks, cases)
    (tmp_path / "job.json").write_text(json.dumps(job))
    np.savez(tmp_path / "arrays.npz", **arrays)
    on_cpu, messages = worker.arguments_of, Messages()
    # A schedule works on the counting memory, which stays with NumPy.
    counted = [
        task.name
        for task in assignment.tasks
        if set(counting.FORBIDDEN) <= set(task.forbidden)
    ]
    stay = tuple(f"{name}-" for name in counted)

    def on_device(case, stored):
        made = on_cpu(case, stored)
        if any(
            isinstance(value, dict) and value["array"].startswith(stay)
            for value in case.values()
        ):
            return made
        return {
            name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x
            for name, x in made.items()
        }

    monkeypatch.setattr(worker, "arguments_of", on_device)
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
    worker.main(tmp_path, messages, apart=lambda work: work())
    wrong = []
    for task in assignment.tasks:
        problem = messages.problems.get(task.name)
        for number, case in enumerate(cases[task.name]):
            result = messages.results.get((task.name, number))
            if note := grade.judged(task, case, numbers, result, problem):
                wrong.append(f"{task.name}, {case.title}: {note}")
    if written:
        assert wrong == []
    else:
        assert len(wrong) == sum(len(listed) for listed in cases.values())
