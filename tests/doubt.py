"""Doubt every check of a chapter: an IPython extension for the kernels of `make nbval`.

Under it `check(label, lhs, rhs)` must also fail when the largest entry of either side
is off by a thousandth. Where a side of a numbered equation or inequality is a formula
in the cell, mistakes are made in it, one at a time: a number is doubled, a term is
dropped, + and -, min and max, floor and ceil, ln and log2 are exchanged. One of the
sizes that the cell checks must give the mistake away (if it moves a bound by a tenth or
more: bounds may be rounded up). A check that still holds then proves nothing, and
raises.
"""

import ast
import contextlib
import copy
import io
from collections import Counter

import numpy as np
import torch

from flashlib import notebook

real_check, real_at_most = notebook.check, notebook.at_most
noticed = {}  # {a mistake in the cell that runs, as text: whether a check failed on it}

# Quick to evaluate, again and again, and without effects
FORMULA = (
    ast.Attribute, ast.BinOp, ast.Call, ast.Compare, ast.Constant, ast.GeneratorExp,
    ast.IfExp, ast.List, ast.ListComp, ast.Name, ast.Tuple, ast.UnaryOp,
)  # fmt: skip
FUNCTIONS = {"abs", "float", "int", "len", "max", "min", "range", "sum"}
EXCHANGED = {"min": "max", "floor": "ceil", "log": "log2", ast.Add: ast.Sub}
EXCHANGED |= {value: key for key, value in EXCHANGED.items()}


def moved(value):
    """The value in float64, its largest finite entry off by a thousandth."""
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu", torch.float64).numpy()
    value = np.array(value, dtype=np.float64, order="C")
    flat = value.reshape(-1)
    finite = np.where(np.isfinite(flat), np.abs(flat), -1.0)
    place = int(finite.argmax())
    if finite[place] < 0:  # only infinities
        flat[place] = 0.0
    elif finite[place] == 0:
        flat[place] = 1e-3
    else:
        flat[place] *= 1.001
    return value


def passes(real, label, lhs, rhs, options):
    """Whether a check or an inequality holds, without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            real(label, lhs, rhs, **options)
        except (AssertionError, ValueError):
            return False
    return True


def check(label, lhs, rhs, *, mistakes=((), ()), **options):
    real_check(label, lhs, rhs, **options)
    if lhs is rhs and isinstance(lhs, torch.Tensor | np.ndarray):
        raise AssertionError(f"{label}: both sides are one object")
    for sides in ((moved(lhs), rhs), (lhs, moved(rhs))):
        if passes(real_check, label, *sides, options):
            raise AssertionError(f"{label}: still holds with a side off by 0.1 %")
    try_mistakes(real_check, label, (lhs, rhs), mistakes, options)


def at_most(label, value, bound, *, mistakes=((), ()), **options):
    real_at_most(label, value, bound, **options)
    try_mistakes(real_at_most, label, (value, bound), mistakes, options)


def try_mistakes(real, label, sides, mistakes, options):
    """Note which mistakes in the formula of either side a check does not notice."""
    for place, formulas in enumerate(mistakes):
        for number, (text, formula) in enumerate(formulas):
            tried = list(sides)
            try:
                with np.errstate(all="ignore"):
                    tried[place] = formula()
                    if number and real is real_at_most and is_near(tried, sides, place):
                        continue
                    same = passes(real, label, *tried, options)
            except Exception:  # the mistake cannot even be computed
                same = False
            if number == 0 and not same:
                break  # names mean something else by now
            if number > 0:
                said = f"{label}: still holds with {text}"
                noticed[said] = noticed.get(said, False) or not same


def is_near(tried, sides, place):
    """Whether a mistake changes every number of a side by less than a tenth."""
    wrong, right = (np.asarray(x[place], dtype=np.float64) for x in (tried, sides))
    return bool((np.abs(wrong - right) <= 0.1 * np.abs(right)).all())


def conclude():
    """Raise for the mistakes in the cell that no check has noticed."""
    missed = [said for said, seen in noticed.items() if not seen]
    noticed.clear()
    if missed:
        raise AssertionError("\n".join(missed))


def is_check(node):
    named = isinstance(node, ast.Call) and ast.unparse(node.func)
    return named in ("check", "notebook.check", "at_most", "notebook.at_most")


def is_formula(node):
    return not isinstance(node, ast.Constant | ast.Name) and all(
        isinstance(x, FORMULA)
        and not (isinstance(x, ast.Call) and name_of(x) not in FUNCTIONS)
        for x in ast.walk(node)
        if isinstance(x, ast.expr)
    )


def name_of(call):
    """The function that is called; those of a module count as one that is allowed."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return "abs" if ast.unparse(function.value) in ("math", "np") else ""
    return getattr(function, "id", "")


def mistakes(formula):
    """The formula, then each formula with one mistake."""
    yield formula
    for place, node in enumerate(ast.walk(formula)):
        wrong = copy.deepcopy(formula)
        changed = list(ast.walk(wrong))[place]
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            changed.value = 2 * node.value or 1
        elif isinstance(node, ast.BinOp) and type(node.op) in EXCHANGED:
            for side in ("left", "right"):
                dropped = copy.deepcopy(wrong)
                setattr(list(ast.walk(dropped))[place], side, ast.Constant(0))
                yield dropped
            changed.op = EXCHANGED[type(node.op)]()
        elif isinstance(node, ast.Name) and node.id in EXCHANGED:
            changed.id = EXCHANGED[node.id]
        elif isinstance(node, ast.Attribute) and node.attr in EXCHANGED:
            changed.attr = EXCHANGED[node.attr]
        else:
            continue
        yield wrong


class Doubting(ast.NodeTransformer):
    """Hand each check of a numbered equation its sides with mistakes in them."""

    def visit_Module(self, tree):
        noticed.clear()
        names = [x for x in ast.walk(tree) if isinstance(x, ast.Name)]
        stored = Counter(x.id for x in names if isinstance(x.ctx, ast.Store))
        assigned = [x for x in ast.walk(tree) if isinstance(x, ast.Assign)]
        named = {getattr(x.targets[0], "id", None): x.value for x in assigned}
        self.formulas = {name: x for name, x in named.items() if stored[name] == 1}
        self.found = False
        self.generic_visit(tree)
        if self.found:
            last = tree.body[-1]
            shown = isinstance(last, ast.Expr) and not is_check(last.value)
            end = ast.parse("__import__('doubt').conclude()").body[0]
            tree.body.insert(len(tree.body) - shown, end)
        return ast.fix_missing_locations(tree)

    def visit_Call(self, node):
        self.generic_visit(node)
        if not is_check(node) or "eq-" not in ast.unparse(node.args[0]):
            return node
        sides = []
        for side in node.args[1:]:
            formula = self.formulas.get(getattr(side, "id", None), side)
            texts = map(ast.unparse, mistakes(formula) if is_formula(formula) else ())
            sides.append("".join(f"({x!r}, lambda: {x})," for x in texts))
        value = ast.parse(f"(({sides[0]}), ({sides[1]}))", mode="eval").body
        node.keywords.append(ast.keyword("mistakes", value))
        self.found = True
        return node


def load_ipython_extension(shell):
    notebook.check, notebook.at_most = check, at_most
    shell.ast_transformers.append(Doubting())
    import interpreter  # noqa: F401 (it makes Triton's faster)
