"""From the sources to students: one zip an assignment, with the term's own numbers.

The course folder is outside every repository. It gets ``secret`` (made once, readable
by its owner alone: it decides the numbers and cases that count), nbgrader's ``source``,
``release`` and ``gradebook.db``, and ``zips/<step>.zip``. Zip and release hold the
notebook without its solutions, ``check.py``, and a package ``flashlib`` with what the
assignment imports and nothing that solves it: :data:`RECEIVED` lists its files.

The zips that the book offers have public numbers and need no course: :func:`practice`.
"""

import ast
import contextlib
import inspect
import io
import json
import logging
import os
import pathlib
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile

import nbformat

from exercises.grader import plan, rules, tasks

LIBRARY = pathlib.Path(__file__).resolve().parents[2] / "flashlib"
COMMON = (
    "__init__.py", "drawn.py", "exercise.py", "kernels/__init__.py", "plain_checks.py",
)  # fmt: skip
MACHINE = tuple(f"machine/{x}.py" for x in ("__init__", "assembler", "isa", "machine"))
MEMORY = ("iomodel/__init__.py", "iomodel/memory.py")
COURSE_ID = "flashattention"
# What check.py needs to apply the grader's rules.
CHECKER = "frontend.py", "guard.py", "plan.py", "rules.py", "submission.py", "worker.py"
CHECK = """\
# Save the notebook first: this shows every rule that can cost points.
!{__import__("sys").executable} check.py
"""
# What a student may import: no reference, kernel, schedule or program of the book.
RECEIVED = dict.fromkeys(tasks.STEPS, COMMON) | {"machine": (*COMMON, *MACHINE)}
RECEIVED |= dict.fromkeys(("bottleneck", "blocks", "flash1"), (*COMMON, *MEMORY))
README = """\
Assignment: {step}

Needs Python 3.11 or later on Linux, and these packages (a virtual environment is a good
place for them):

    python3 -m pip install -r requirements.txt

Then start `jupyter notebook {step}.ipynb` in this folder and follow the notebook.
{kernels}
Before you hand in {step}.ipynb, alone, run

    python3 check.py

It applies every rule that can cost points; only the inputs that count are hidden.

Solutions and the tests that you see are public, so they are for practice. Marks come
from numbers and cases that only your instructor can make.
"""
KERNELS = "On a machine without a GPU the kernels run in Triton's interpreter.\n"


def outside(course):
    """Raise ValueError for a course whose secret git would take up."""
    course, checkout = pathlib.Path(course).resolve(), LIBRARY.parent
    if checkout not in (course, *course.parents):
        return
    command = ["git", "check-ignore", "--quiet", str(course)]
    ignored = subprocess.run(command, cwd=checkout, capture_output=True).returncode == 0
    if course == checkout or not ignored:
        raise ValueError(
            f"{course} is inside the repository, and its secret could be published "
            "with it: choose one outside, such as COURSE=$HOME/flashattention-course"
        )


def secret_of(course):
    """The course's secret; made at the first call, in a file for its owner alone.

    Raises ValueError where the file is there and empty.
    """
    path = pathlib.Path(course) / "secret"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600, exist_ok=False)
        path.write_text(secrets.token_hex(32) + "\n", "utf-8")
    secret = path.read_bytes().strip()
    if not secret:
        way = "put the term's secret back, or remove it for a new term"
        raise ValueError(f"{path} is empty: {way}")
    return secret


def package(step, folder):
    """Write what students of a step may import to ``folder/flashlib``."""
    target = pathlib.Path(folder) / "flashlib"
    shutil.rmtree(target, ignore_errors=True)
    for name in RECEIVED[step]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(LIBRARY / name, target / name)


def require_same_numbers(step, course):
    """Raise ValueError unless a step was released from a course with this version's
    ``drawn.py``: another may have given the students other numbers.
    """
    received = pathlib.Path(course) / "received" / step / "flashlib/drawn.py"
    if not received.exists():
        first = "run `make assignments` there first"
        raise ValueError(f"{step} was not released from {course}: {first}")
    if received.read_bytes() != (LIBRARY / "drawn.py").read_bytes():
        raise ValueError(
            f"{received}: expected the file that this grader draws numbers with, got "
            f"another version: grade {step} with the version that has released it"
        )


def nbgrader(course, gradebook=True):
    """nbgrader's interface for a course folder, with its gradebook or without one."""
    from nbgrader.apps import NbGraderAPI
    from traitlets.config import Config

    # nbgrader starts alembic by name, and make starts this Python by its path.
    programs = str(pathlib.Path(sys.executable).parent)
    if programs not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = programs + os.pathsep + os.environ["PATH"]
    config, root = Config(), pathlib.Path(course).resolve()
    config.CourseDirectory.root, config.CourseDirectory.course_id = str(root), COURSE_ID
    config.CourseDirectory.db_url = f"sqlite:///{root / 'gradebook.db'}"
    config.GenerateAssignment.no_database = not gradebook
    config.SaveCells.enabled = gradebook
    interface = NbGraderAPI(config=config)
    interface.log_level = logging.ERROR
    return interface


def release(step, course, gradebook=True):
    """Make ``zips/<step>.zip`` in the course folder; returns its path.

    gradebook    whether the course's gradebook gets the assignment, which takes seconds

    Raises RuntimeError where nbgrader refuses the notebook, or leaves a solution.
    """
    course = pathlib.Path(course)
    assignment, secret = tasks.assignment(step), secret_of(course)
    settings = course / "nbgrader_config.py"  # for nbgrader's own commands
    if not settings.exists():
        told = f'c = get_config()\nc.CourseDirectory.course_id = "{COURSE_ID}"\n'
        settings.write_text(told, "utf-8")
    notebook = assignment.unnumbered(secret)
    package(step, course / "received" / step)
    files = with_it(step, notebook, course / "received" / step)
    source = course / "source" / step / f"{step}.ipynb"
    text = json.dumps(with_check(notebook), indent=1, ensure_ascii=False) + "\n"
    for name, content in {source.name: text, **files}.items():
        (source.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (source.parent / name).write_text(content, "utf-8")
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        result = nbgrader(course, gradebook).generate_assignment(step)
    if not result["success"]:
        reason = result.get("log") or told.getvalue()
        raise RuntimeError(f"nbgrader refuses {source}:\n{reason}")
    released = (course / "release" / step / f"{step}.ipynb").read_text("utf-8")
    return packed(step, released, files, course / "zips" / f"{step}.zip")


def practice(step, path):
    """Make the zip of a step with the public practice numbers; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as course:
        pathlib.Path(course, "secret").write_bytes(tasks.PRACTICE)
        return pathlib.Path(shutil.move(release(step, course, gradebook=False), path))


def with_it(step, notebook, folder):
    """{name: text} of what students get with a notebook (a dict): the package in a
    folder, the checker, what to install and how.
    """
    needed = plan.of_notebook(tasks.assignment(step), notebook).tensors()
    packages = "torch|triton|numpy|notebook" if needed else "notebook"
    lock = (LIBRARY.parent / "constraints.txt").read_text("utf-8").splitlines()
    lines = [line for line in lock if re.match(rf"({packages})==", line)]
    files = (folder / "flashlib").rglob("*.py")
    files = {str(x.relative_to(folder)): x.read_text("utf-8") for x in files}
    files["requirements.txt"] = "\n".join(lines) + "\n"
    kernels = KERNELS if needed else ""
    files["README.txt"] = README.format(step=step, kernels=kernels)
    return files | checker(step, notebook)


def packed(step, released, files, path):
    """Write the zip of a released notebook and of {name: text}; returns its path.

    Raises RuntimeError where a solution is left in one of them.
    """
    files = {f"{step}.ipynb": released, **files}
    for name, text in files.items():
        if re.search(r"(BEGIN|END) (SOLUTION|HIDDEN TESTS)", text):
            raise RuntimeError(f"{step}: a solution is left in {name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            # No time of day: the same content makes the same zip.
            about = zipfile.ZipInfo(f"{step}/{name}", (2026, 1, 1, 0, 0, 0))
            archive.writestr(about, files[name], zipfile.ZIP_DEFLATED)
    return path


def with_check(notebook):
    """A notebook (a dict) with the checker in its last cell."""
    cell = nbformat.v4.new_code_cell(CHECK, id="check-before-handing-in")
    return {**notebook, "cells": [*notebook["cells"], cell]}


def checker(step, notebook):
    """{name: text} of the files by which students check a notebook themselves."""
    here, assignment = pathlib.Path(__file__).parent, tasks.assignment(step)
    files = {f"checker/{name}": (here / name).read_text("utf-8") for name in CHECKER}
    tests, shared = {}, {}
    for cell in notebook["cells"]:
        name = cell["metadata"].get("nbgrader", {}).get("grade_id", "")
        if name.endswith("-test"):
            # A later test may use what an earlier one has defined.
            cells = {**shared, name: "".join(cell["source"])}
            needed = rules.needs(name, cells, (), ())
            tests[name.removesuffix("-test")] = "\n".join(map(cells.get, needed))
            for node in ast.parse(cells[name]).body:
                if isinstance(node, ast.FunctionDef | ast.Assign):
                    shared[len(shared)] = ast.unparse(node)
    asked = [task.rules() | {"limits": None} for task in assignment.tasks]
    for rule, task in zip(asked, assignment.tasks, strict=True):
        if task.limits is not None:
            parts = tasks.padded, tasks.counted, tasks.windowed, task.limits
            rule["limits"] = "\n".join(map(inspect.getsource, parts))
            rule["counts"] = task.limits.__name__
    told = {"step": step, "plan": plan.of_notebook(assignment, notebook)._asdict()}
    told |= {"tasks": asked, "tests": tests}
    files["checker/plan.json"] = json.dumps(told, indent=1) + "\n"
    return files | {"check.py": (here / "check.py").read_text("utf-8")}
