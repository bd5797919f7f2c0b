"""Which cells a task runs, and what it may use: for the grader and, written to a file,
for the checker that students get.
"""

import ast
import contextlib
from typing import NamedTuple

from . import rules, submission


class Plan(NamedTuple):
    """What the instructor's notebook says about the names of a step."""

    given: list  # [(name, source)] of the given cells
    asks: dict  # {task: the names that its cell must define}
    known: list  # the names that the given cells define
    kernels: list  # those of them that are kernels
    paper: list  # the tasks whose answers are read from their cells

    def tensors(self):
        """Whether the given cells import PyTorch. Where they do not, nothing has to."""
        return any("import torch" in source for _, source in self.given)

    def require(self, task, source):
        """The source of a task's cell as it is run; may raise Refused."""
        source = rules.clean(source)
        if task.paper:
            return rules.answers(source, task.reads)
        if task.kernel:
            rules.tree_of(source)
        else:
            rules.require(source, task.forbidden)
        return source

    def ordered(self, handed_in, cells):
        """{name: source} of the cells that may run, in the order of a Submission: those
        of tasks, and what the student has added, so far as it keeps to the rules. A
        cell of answers on paper is added, since it may hold a helper that others use.
        """
        given, found, room = set(), {}, submission.MOST_ADDED
        for _, source in self.given:
            given |= set(map(ast.dump, ast.parse(source).body))
        for place, (name, source) in enumerate(handed_in.code):
            own = name is None or name in self.paper
            if name in cells:
                found[name] = cells[name]
            room -= submission.cost(source) * own
            if own and room >= 0:
                with contextlib.suppress(Exception):  # left out, whatever is in it
                    source = without(given, rules.clean(source))
                    rules.require(source)
                    if source:
                        found[f"extra-{place}"] = source
        return rules.without_stubs(found)

    def of(self, task, cells):
        """What a job says about a task: its cells, its names, given kernels."""
        asks = self.asks[task.name]
        needed = rules.needs(task.name, cells, asks, self.known)
        return {"needs": needed, "asks": asks, "known": self.kernels}


def without(given, source):
    """A cell without the statements that are given, as ``ast.dump`` writes them."""
    body = rules.tree_of(source).body
    own = [line for line in body if ast.dump(line) not in given]
    return source if own == body else "\n".join(map(ast.unparse, own))


def of_notebook(assignment, notebook):
    """The Plan of an assignment, with the given cells of a notebook (a dict)."""
    wanted, given = {task.name for task in assignment.tasks}, []
    for place, cell in enumerate(notebook["cells"]):
        graded = cell["metadata"].get("nbgrader", {})
        name = graded.get("grade_id", f"given-{place}")
        shown = name not in wanted and not graded.get("grade")  # no test
        if cell["cell_type"] == "code" and shown:
            given.append((name, "".join(cell["source"])))
    known = set().union(*(rules.bound(source) for _, source in given))
    lines = [x for _, source in given for x in ast.parse(source).body]
    functions = [x for x in lines if isinstance(x, ast.FunctionDef)]
    kernels = {x.name for x in functions if x.decorator_list}
    used = set().union(*(rules.used(source) for _, source in given))
    solutions, asks = assignment.solutions(), {}
    for task in assignment.tasks:
        names = (used | {task.call, *task.reads}) - known
        asks[task.name] = sorted(rules.bound(solutions[task.name]) & names)
    paper = [task.name for task in assignment.tasks if task.paper]
    return Plan(given, asks, sorted(known), sorted(kernels), paper)


# What Task.limits limits, and what a student hears of it.
LIMITED = {
    "divisions": "it divides blocks, or takes logarithms, {0} times; {1} are enough",
    "largest": "the kernel loads or stores {0} numbers at once; a block has {1}",
    "loaded": "the kernel loads {0} numbers from its tensor number {2}; {1} are enough",
}


def not_allowed(task, arguments, operations):
    """What a call has used that its task does not allow, for the student, or None.

    operations: {name: how often}, as the guard has recorded them
    """
    for kind in ("attention", *task.forbidden):
        for name in operations:
            if name.startswith(rules.OPERATIONS.get(kind, ("-",))):
                return f"it calls {name}, which this task asks you to write"
    for name in operations:
        if name.rpartition(".")[2] in task.forbidden:
            return f"it uses {name.rpartition('.')[2]}, which this task does not allow"
    if task.kept and operations.get("changed"):
        return "it changes what it is given"
    for what, most in (task.limits(**arguments) if task.limits else {}).items():
        count, (kind, _, place) = operations.get(what, 0), what.partition(":")
        if count > most:
            return LIMITED[kind].format(count, most, int(place or 0) + 1)
    return None
