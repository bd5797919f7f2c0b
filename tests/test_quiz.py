"""The quizzes: their files, their right answers, and the directives that put them on a page.

A question with an ``answer`` has it evaluated here, several times with other sizes, against what the right
choice says; no other choice may say the same.
"""

import inspect
import io
import json
import re

import practice
import pytest
import quiz
import torch
from built import ROOT

from flashlib.iomodel import formulas
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


# ------------------------------------------------------------------------------------ what answers may use


def variance_of_dots(d):
    """The variance of the dot product of two vectors of signs, over all pairs of them."""
    signs = 2 * ((torch.arange(2**d)[:, None] >> torch.arange(d)) & 1) - 1  # [2^d, d]
    return float((signs @ signs.T).double().var(correction=0))


def cycles(program, load):
    """Cycles of a program in which a LOAD takes so many, and everything else one."""
    return sum(load if type(instruction).__name__ == "LOAD" else 1 for instruction in program)


def loads(program):
    return sum(type(instruction).__name__ == "LOAD" for instruction in program)


def words(program):
    return sum(type(instruction).__name__ in ("LOAD", "STORE") for instruction in program)


def operations(program):
    return sum({"MAC": 2, "MAC_Z": 1}.get(type(instruction).__name__, 0) for instruction in program)


def merge(a, b):
    """The (m, l) of two disjoint sets of keys, by the definition, from scores that give these states."""
    scores = torch.tensor([float(m) for m, l in (a, b) for _ in range(l)])
    return float(scores.max()), float(torch.exp(scores - scores.max()).sum())


def masked_tiles(T, B_r, B_c):
    """How many tiles of the last row of tiles a causal mask cuts."""
    row = standard.causal_mask(T, T)[-B_r:].reshape(B_r, T // B_c, B_c).sum(dim=(0, 2))
    return int(((row > 0) & (row < B_r * B_c)).sum())


def kept_words(T, d):
    """Words of Q, K, V, O and the log-sum-exp of one head."""
    q, k, v = (torch.randn(1, 1, T, d) for _ in range(3))
    return sum(x.numel() for x in (q, k, v, *standard.attention(q, k, v)))


def slope_of_softcap(share):
    """The derivative of cap tanh(x / cap) where it is a share of the cap, by autograd."""
    cap = 3.0
    x = (cap * torch.atanh(torch.tensor(share, dtype=torch.float64))).requires_grad_()
    (slope,) = torch.autograd.grad(masks.cap(x, cap), x)
    return float(slope)


def dots(*names):
    """Matrix products in functions of the backward kernels."""
    from flashlib.kernels import backward

    return sum(inspect.getsource(getattr(backward, name).fn).count("tl.dot(") for name in names)


def product(m, k, n):
    """Operations of a product of m x k by k x n, by PyTorch's counter."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        torch.zeros(m, k) @ torch.zeros(k, n)
    return counter.get_total_flops()


HELPERS = {
    "formulas": formulas, "programs": programs, "min_cycles": min_cycles, "standard": standard,
    "torch": torch, "collect": "collect", "descend": "descend",
    **{f.__name__: f for f in (variance_of_dots, cycles, loads, words, operations, merge, masked_tiles,
                               kept_words, dots, product, slope_of_softcap)},
}  # fmt: skip


# ------------------------------------------------------------------------------------ answers


def python_of(tex):
    """A Python expression for simple TeX: numbers, names, fractions, powers, products without a sign."""
    tex = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", tex)
    tex = re.sub(r"\\sqrt\{([^{}]*)\}", r"(\1)^(1/2)", tex)
    tokens = re.findall(r"\d+(?:\.\d+)?|[A-Za-z](?:_[A-Za-z])?|\S", re.sub(r"\\[,;]", "", tex))
    made = ""
    for token in tokens:
        if made and re.match(r"[\w(]", token) and re.match(r"[\w)]", made[-1]):
            made += "*"
        made += token
    return made.replace("^", "**")


def value(choice, sizes):
    """What a choice says: its formula with these sizes, or its number; None where it has neither."""
    formula = re.findall(r"\$([^$]+)\$", choice)
    if len(formula) == 1:
        names = {**sizes, "T_r": -(-sizes["T"] // sizes["B_r"]), "T_c": -(-sizes["T"] // sizes["B_c"])}
        return rounded(eval(python_of(formula[0]), {"__builtins__": {}}, names))
    number = re.search(r"\d+(?:\.\d+)?", choice)
    return rounded(float(number[0])) if number else None


def rounded(x):
    """The same nine digits for numbers that differ by the order of their divisions only."""
    return tuple(map(rounded, x)) if isinstance(x, tuple) else f"{float(x):.9g}"


def answer_faults(question):
    """What is wrong with the choices of a question that has an answer."""
    right, faults = question.choices[question.right - 1], []
    differs = dict.fromkeys(question.choices, False)
    for sizes in SIZES:
        wanted = rounded(eval(question.answer, {**HELPERS, **sizes}))
        if value(right, sizes) != wanted:
            faults.append(f"{question.id}: the right choice {right!r} is not {wanted} at {sizes}")
        for choice in question.choices:
            differs[choice] |= value(choice, sizes) != wanted
    also = [choice for choice in differs if choice != right and not differs[choice]]
    return faults + [f"{question.id}: {choice!r} is right as well" for choice in also]


COMPUTED = [question for path in FILES for question in quiz.questions(path) if question.answer]


@pytest.mark.parametrize("question", COMPUTED, ids=lambda question: question.id)
def test_the_right_choice_is_what_code_computes(question):
    assert not answer_faults(question)


def test_formulas_are_read():
    sizes = {"T": 6, "d": 2, "B_r": 4, "B_c": 5, "n": 3, "M": 7, "H": 1}
    for tex, expected in {
        "$2Td(1 + T_r)$": 72, "$T^2d/M$": 72 / 7, r"$\frac{2n}{3}$": 2, r"$Td(3T_c + 1) + T T_c$": 96,
        r"$\sqrt{d}$": 2**0.5, "$(0, 5)$": (0, 5), "25 cycles, as with 3": 25, "never": None,
        "$T$ or $d$": None,
    }.items():  # fmt: skip
        assert value(tex, sizes) == (None if expected is None else rounded(expected)), tex


# ------------------------------------------------------------------------------------ files


def test_every_chapter_of_a_step_has_its_questions():
    assert [path.stem for path in FILES] == sorted(practice.STEPS)
    for path in FILES:
        assert 4 <= len(quiz.questions(path)) <= 6, path.name
    assert len(COMPUTED) >= 2 * len(FILES)
    places = [question.right for path in FILES for question in quiz.questions(path)]
    assert max(map(places.count, places)) < len(places) / 2, "the right choice mostly stands in one place"


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
    "no list": ("a: b", "expected a list"),
    "empty": ("", "expected a list"),
    "not YAML": ("- id: [", "while parsing"),
    "two right answers": (
        GOOD.replace("- 5", "- right: 5"),
        r"question 1 \(one\): exactly one choice .* got 2",
    ),
    "no right answer": (GOOD.replace("right: 4", "4"), "exactly one choice .* got 0"),
    "another mark": (GOOD.replace("right: 4", "wrong: 4"), "exactly one choice"),
    "two choices": (GOOD.replace("    - 5\n", ""), "three or four choices"),
    "the same choice twice": (GOOD.replace("- 5", "- 4"), "two choices are the same"),
    "no label": (GOOD.replace("  read: eq-standard-scores\n", ""), "expected the keys"),
    "an empty label": (GOOD.replace("eq-standard-scores", ""), "read: expected a text"),
    "a key that nobody knows": (GOOD + "  hint: add\n", "expected the keys"),
    "two paragraphs": (GOOD.replace("What is", "|\n    What\n\n    is"), "expected one paragraph"),
    "a bad id": (GOOD.replace("one", "One!"), "lower-case"),
    "an id twice": (GOOD + GOOD, "two questions have the same id"),
}


@pytest.mark.parametrize("text, message", BAD.values(), ids=BAD)
def test_a_bad_file_is_named(tmp_path, text, message):
    path = tmp_path / "standard.yml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        quiz.questions(path)
    assert "standard.yml" in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"standard\.yml: there is no such file"):
        quiz.questions(tmp_path / "standard.yml")


def test_the_hash_is_fnv_1a():
    assert quiz.hashed("") == "811c9dc5" and quiz.hashed("a") == "e40c292c"  # published test values
    assert quiz.hashed("foobar") == "bf9cf968"


# ------------------------------------------------------------------------------------ assignments in the book


def test_an_assignment_says_what_it_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(practice, "SOURCE", tmp_path)
    monkeypatch.setattr(practice, "ROOT", tmp_path)
    assert practice.about("online") is None
    (tmp_path / "online").mkdir()

    def write(text):
        cells = [{"cell_type": "markdown", "source": text}]
        practice.notebook_of("online").write_text(json.dumps({"cells": cells}))

    table = "# One block\n\n| task | what | points | minutes |\n|---|---|---|---|\n"
    table += "| 1 | a | 2 | 5 |\n| 2 | b | 4 | 15 |"
    write(table)
    assert practice.about("online") == ("One block", 2, 6, 20)
    for broken in ("# One block", table.replace("minutes", "hours"), table.replace("# One", "One")):
        write(broken)
        with pytest.raises(ValueError, match="the first cell must have a title and a table"):
            practice.about("online")


@pytest.mark.parametrize("step", [step for step in practice.STEPS if practice.notebook_of(step).is_file()])
def test_points_of_the_table_are_those_of_the_cells(step):
    cells = json.loads(practice.notebook_of(step).read_text())["cells"]
    graded = [cell["metadata"].get("nbgrader", {}) for cell in cells]
    assert practice.about(step).points == sum(cell.get("points", 0) for cell in graded if cell.get("grade"))


# ------------------------------------------------------------------------------------ a page

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
    """A function that builds PAGE with a file of questions and returns (whether it passed, output, HTML)."""
    from sphinx.application import Sphinx
    from sphinx.errors import SphinxError

    (tmp_path / "conf.py").write_text(CONFIG)
    (tmp_path / "index.md").write_text(PAGE)
    monkeypatch.setattr(quiz.StepDirective, "path", lambda self, step: tmp_path / f"{step}.yml")

    def run(text):
        (tmp_path / "standard.yml").write_text(text)
        said = io.StringIO()
        out = tmp_path / "out"
        try:
            app = Sphinx(tmp_path, tmp_path, out, out / "trees", "html", status=None, warning=said)
            app.build()
        except SphinxError as error:
            return False, str(error), ""
        return app.statuscode == 0 and not said.getvalue(), said.getvalue(), (out / "index.html").read_text()

    return run


@pytest.mark.slow
def test_a_page_shows_its_questions_and_no_answer(build):
    from bs4 import BeautifulSoup

    other = GOOD.replace("id: one", "id: two").replace("eq-standard-scores", "Two plus two")
    passed, said, html = build(GOOD + other)
    assert passed, said
    box = BeautifulSoup(html, "html.parser").find(class_="quiz")
    first, second = box.find_all("fieldset")
    assert first.legend.get_text().startswith("1. What is") and first.legend.find(class_="math")
    assert [label.get_text() for label in first.find_all("label")] == ["A3", "B4", "C5"]
    buttons = first.find_all("input")
    assert {button["name"] for button in buttons} == {"standard-one"}
    hits = [b["value"] for b in buttons if quiz.hashed(f"standard-one:{b['value']}") == first["data-key"]]
    assert hits == ["2"] and "right" not in str(box)
    links = [field.find(class_="quiz-again").a for field in (first, second)]
    assert [link["href"] for link in links] == ["#equation-eq-standard-scores", "#two-plus-two"]
    assert all(link.get_text().startswith("Two plus two") for link in links)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, message",
    [
        (GOOD.replace("- 5", "- right: 5"), "standard.yml, question 1"),
        (GOOD.replace("eq-standard-scores", "eq-standard-none"), "no label or heading 'eq-standard-none'"),
        (GOOD.replace("What is $2 + 2$?", "'- What?'"), "one paragraph"),
    ],
)
def test_a_bad_quiz_stops_the_build(build, text, message):
    passed, said, _ = build(text)
    assert not passed and message in said


# ------------------------------------------------------------------------------------ chapters


def chapters():
    """The steps whose chapters are in the book."""
    listed = re.findall(r"^ +- file: book/(\w+)$", (ROOT / "_toc.yml").read_text(), re.M)
    return [step for step in practice.STEPS if step in listed]


@pytest.mark.parametrize("step", chapters())
def test_a_chapter_ends_with_its_quiz(step):
    cells = json.loads((ROOT / f"book/{step}.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert sum(f"```{{quiz}} {step}\n```" in source for source in sources) == 1


def test_the_overview_has_every_step():
    text = (ROOT / "book/overview.md").read_text()
    assert re.findall(r"^```\{about\} (\w+)$", text, re.M) == list(practice.STEPS)
