"""The quizzes: their files, their right answers, and the directives of their pages.

A question with an ``answer`` has it evaluated here, several times with other sizes,
against what the right choice says; no other choice may say the same.
"""

import inspect
import io
import json
import re

import practice
import pytest
import quiz
import torch
from built import NOTEBOOKS, ROOT

from flashlib.iomodel.backward import algorithm_6, algorithm_8
from flashlib.iomodel.blocks import algorithm_1, matmul, row_block_forward
from flashlib.iomodel.flash1 import algorithm_3, algorithm_4
from flashlib.iomodel.flash2 import flash2_forward
from flashlib.iomodel.forms import block_count
from flashlib.iomodel.standard import (
    backward_operations,
    softmax_by_pieces,
    standard_backward,
    standard_forward,
)
from flashlib.machine import programs
from flashlib.machine.search import min_cycles
from flashlib.reference import masks, standard

QUIZZES = ROOT / "book/quizzes"
FILES = sorted(QUIZZES.glob("*.yml"))
SIZES = (
    {"T": 24, "d": 4, "M": 200, "B_r": 4, "B_c": 6, "n": 5, "H": 3},
    {"T": 48, "d": 8, "M": 900, "B_r": 8, "B_c": 12, "n": 7, "H": 2},
    {"T": 60, "d": 2, "M": 144, "B_r": 5, "B_c": 4, "n": 6, "H": 4},
)


# -- what answers may use


def variance_of_dots(d):
    """The variance of the dot product over all pairs of vectors of signs."""
    signs = 2 * ((torch.arange(2**d)[:, None] >> torch.arange(d)) & 1) - 1  # [2^d, d]
    return float((signs @ signs.T).double().var(correction=0))


def count(program, weights):
    """The sum of the weights of a program's instructions, by their names."""
    names = [type(instruction).__name__ for instruction in program]
    return sum(weights.get(name, weights.get("else", 0)) for name in names)


def merge(a, b):
    """The (m, l) of two disjoint sets of keys, by the definition."""
    scores = torch.tensor([float(m) for m, l in (a, b) for _ in range(l)])
    return float(scores.max()), float(torch.exp(scores - scores.max()).sum())


def slope_of_softcap(share):
    """The derivative of cap tanh(x / cap) where it is a share of the cap."""
    cap = 3.0
    x = (cap * torch.atanh(torch.tensor(share, dtype=torch.float64))).requires_grad_()
    (slope,) = torch.autograd.grad(masks.cap(x, cap), x)
    return float(slope)


def dots(*names):
    """Matrix products in functions of the backward kernels."""
    from flashlib.kernels import backward

    sources = [inspect.getsource(getattr(backward, name).fn) for name in names]
    products = r"\b(tl\.dot|dot_columns|add_columns)\("
    return len(re.findall(products, "".join(sources)))


HELPERS = {
    "cycles": lambda program, load: count(program, {"LOAD": load, "else": 1}),
    "loads": lambda program: count(program, {"LOAD": 1}),
    "words": lambda program: count(program, {"LOAD": 1, "STORE": 1}),
    "operations": lambda program: count(program, {"MAC": 2, "MAC_Z": 1}),
    "programs": programs, "min_cycles": min_cycles, "standard": standard,
    "torch": torch, "collect": "collect", "descend": "descend",
    **{f.__name__: f for f in (variance_of_dots, merge, dots, slope_of_softcap,
                               backward_operations, block_count,
                               matmul, softmax_by_pieces, standard_forward,
                               standard_backward, row_block_forward, algorithm_1,
                               algorithm_3, algorithm_4, flash2_forward,
                               algorithm_6, algorithm_8)},
}  # fmt: skip


# -- answers


def python_of(tex):
    """A Python expression for simple TeX without signs of products."""
    tex = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", tex)
    tex = re.sub(r"\\sqrt\{([^{}]*)\}", r"(\1)^(1/2)", tex)
    tex = re.sub(r"\\[,;]", "", tex)
    tokens = re.findall(r"\d+(?:\.\d+)?|[A-Za-z](?:_[A-Za-z])?|\S", tex)
    made = re.sub(r"(?<=[\w)]) (?=[\w(])", "*", " ".join(tokens))
    return made.replace("^", "**")


def value(choice, sizes):
    """What a choice says with these sizes: its formula, its number, or None."""
    formula = re.findall(r"\$([^$]+)\$", choice)
    if len(formula) == 1:
        tiles = {f"T_{x}": -(-sizes["T"] // sizes[f"B_{x}"]) for x in "rc"}
        names = {**sizes, **tiles}
        return rounded(eval(python_of(formula[0]), {"__builtins__": {}}, names))
    number = re.search(r"\d+(?:\.\d+)?", choice)
    return rounded(float(number[0])) if number else None


def rounded(x):
    """Nine digits: numbers may differ by the order of their divisions."""
    return tuple(map(rounded, x)) if isinstance(x, tuple) else f"{float(x):.9g}"


def answer_faults(question):
    """What is wrong with the choices of a question that has an answer."""
    right, faults = question.choices[question.right - 1], []
    differs = dict.fromkeys(question.choices, False)
    depends = set(re.findall(r"\w+", question.answer)) & SIZES[0].keys()
    for sizes in SIZES if depends else SIZES[:1]:
        wanted = rounded(eval(question.answer, {**HELPERS, **sizes}))
        if value(right, sizes) != wanted:
            faults.append(f"{question.id}: {right!r} is not {wanted} at {sizes}")
        for choice in question.choices:
            differs[choice] |= value(choice, sizes) != wanted
    also = [choice for choice in differs if choice != right and not differs[choice]]
    return faults + [f"{question.id}: {choice!r} is right as well" for choice in also]


COMPUTED = [q for path in FILES for q in quiz.questions(path) if q.answer]


@pytest.mark.parametrize("question", COMPUTED, ids=lambda question: question.id)
def test_the_right_choice_is_what_code_computes(question):
    assert not answer_faults(question)


# -- files


def test_every_chapter_of_a_step_has_its_questions():
    assert [path.stem for path in FILES] == sorted(practice.STEPS)
    for path in FILES:
        assert 4 <= len(quiz.questions(path)) <= 6, path.name
    assert len(COMPUTED) >= 2 * len(FILES)
    places = [question.right for path in FILES for question in quiz.questions(path)]
    assert max(map(places.count, places)) < len(places) / 2, "mostly the same place"


GOOD = """
- id: one
  ask: What is $2 + 2$?
  choices:
    - 3
    - right: 4
    - 5
  read: eq-standard-scores
"""
BAD = {
    None: "No such file",
    "a: b": "expected a list",
    "- id: [": "while parsing",
    GOOD.replace("- 5", "- right: 5"): "question 1: expected exactly one choice",
    GOOD.replace("right: 4", "wrong: 4"): "expected exactly one choice",
    GOOD.replace("    - 5\n", ""): "expected three or four choices",
    GOOD.replace("- 5", "- 4"): "expected different choices",
    GOOD.replace("eq-standard-scores", ""): "expected a text for read",
    GOOD + "  hint: add\n": "expected the keys",
    GOOD.replace("What is", "|\n    What\n\n    is"): "expected one paragraph",
    GOOD.replace("one", "One!"): "expected an id",
    GOOD + GOOD: "two questions have the same id",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_is_named(tmp_path, text):
    path = tmp_path / "standard.yml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=rf"standard\.yml.*{BAD[text]}"):
        quiz.questions(path)


# -- assignments in the book


def test_an_assignment_says_what_it_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(practice, "SOURCE", tmp_path)
    monkeypatch.setattr(practice, "ROOT", tmp_path)
    assert practice.about("online") is None
    (tmp_path / "online").mkdir()
    table = "# One block\n\n| task | what | points | minutes |\n|---|---|---|---|\n"
    table += "| 1 | a | 2 | 5 |\n| 2 | b | 4 | 15 |"
    for text in (table.replace("minutes", "hours"), table):
        cells = [{"cell_type": "markdown", "source": text}]
        practice.notebook_of("online").write_text(json.dumps({"cells": cells}))
        if text != table:
            with pytest.raises(ValueError, match="expected a title and a table"):
                practice.about("online")
    assert practice.about("online") == ("One block", 2, 6, 20)


@pytest.mark.parametrize("step", list(filter(practice.about, practice.STEPS)))
def test_points_of_the_table_are_those_of_the_cells(step):
    cells = json.loads(practice.notebook_of(step).read_text())["cells"]
    graded = [cell["metadata"].get("nbgrader", {}) for cell in cells]
    points = sum(cell.get("points", 0) for cell in graded if cell.get("grade"))
    assert practice.about(step).points == points


# -- a page

PAGE = """# A page

## Two plus two

$$
S = 2
$$ (eq-standard-scores)

```{quiz} standard
```
"""
CONFIG = """
extensions = ["myst_parser", "quiz"]
myst_enable_extensions = ["dollarmath"]
suppress_warnings = ["myst.header"]
math_numfig = True
"""


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A function that builds PAGE with a file of questions: (warnings, HTML)."""
    from sphinx.application import Sphinx

    (tmp_path / "conf.py").write_text(CONFIG)
    (tmp_path / "index.md").write_text(PAGE)
    questions = tmp_path / "standard.yml"
    monkeypatch.setattr(quiz.StepDirective, "path", lambda self, step: questions)

    def run(text):
        questions.write_text(text)
        said, out = io.StringIO(), tmp_path / "out"
        folders = tmp_path, tmp_path, out, out / "trees"
        Sphinx(*folders, "html", status=None, warning=said).build()
        return said.getvalue(), (out / "index.html").read_text()

    return run


@pytest.mark.slow
def test_a_page_names_what_to_read_and_a_bad_quiz_stops_the_build(build):
    """The label or the heading, and no answer; a browser sees the rest."""
    from bs4 import BeautifulSoup
    from sphinx.errors import ExtensionError

    other = GOOD.replace("id: one", "id: two")
    said, html = build(GOOD + other.replace("eq-standard-scores", "Two plus two"))
    box = BeautifulSoup(html, "html.parser").find(class_="quiz")
    assert not said and "right" not in str(box)
    links = {link["href"]: link.get_text() for link in box.select(".quiz-again a")}
    assert list(links) == ["#equation-eq-standard-scores", "#two-plus-two"]
    assert all(text.startswith("Two plus two") for text in links.values())
    said, _ = build(GOOD.replace("eq-standard-scores", "eq-standard-none"))
    assert "no label or heading 'eq-standard-none'" in said
    for old, new, message in (
        ("- 5", "- right: 5", "standard.yml, question 1"),
        ("What is $2 + 2$?", "'- What?'", "one paragraph"),
    ):
        with pytest.raises(ExtensionError, match=message):
            build(GOOD.replace(old, new))


CHAPTERS = [step for step in practice.STEPS if step in NOTEBOOKS]


@pytest.mark.parametrize("step", CHAPTERS)
def test_a_chapter_ends_with_its_quiz(step):
    cells = json.loads((ROOT / f"book/{step}.ipynb").read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    assert text.count(f"```{{quiz}} {step}\n```") == 1


def test_the_overview_has_every_step():
    text = (ROOT / "book/overview.md").read_text()
    assert re.findall(r"^```\{about\} (\w+)$", text, re.M) == list(practice.STEPS)
