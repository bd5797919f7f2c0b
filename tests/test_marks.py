"""What the marks next to equations say: read from notebooks and their sources."""

import json

import marks
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output


def test_index_has_every_line_of_every_notebook(tmp_path):
    text = "a line\nmax  eq-a-one: holds (below 2^-20)\neq-a-one: holds\nclaim: holds\n"
    cells = [
        new_code_cell("import math"),
        new_code_cell(
            "for x in 1, 2:\n    check('eq-a-one', x, x)\nholds('claim', True)",
            outputs=[new_output("stream", name="stdout", text=text)],
        ),
    ]
    (tmp_path / "book/depth").mkdir(parents=True)
    path = tmp_path / "book/depth/a.ipynb"
    path.write_text(json.dumps(new_notebook(cells=cells)))
    loop = "for x in 1, 2:\n    check('eq-a-one', x, x)"
    assert marks.index(tmp_path) == {
        "eq-a-one": [marks.Executed("book/depth/a", 1, loop, ["2^-20", None])],
        "claim": [marks.Executed("book/depth/a", 1, "holds('claim', True)", [None])],
    }


LONG = "\n".join(f"    y = {n}" for n in range(20))


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("a = f()\nb = 2\ncheck('eq-a-b', a, 1)", "a = f()\ncheck('eq-a-b', a, 1)"),
        ("a = 1\na = 2\na[0] = 3\nholds('eq-a-b', a)",
         "a = 2\na[0] = 3\nholds('eq-a-b', a)"),
        ("def f():\n    return 1\nnb.holds('eq-a-b', f())", None),
        ("a = []\nfor x in y:\n    a.append(x)\ncheck('eq-a-b', a, 1)", None),
        (f"for x in y:\n    check('eq-a-b', x, 1)\n{LONG}", "check('eq-a-b', x, 1)"),
        ("check('eq-a-c', 1, 2)\ncheck(f'eq-a-{x}', x, y)", "check(f'eq-a-{x}', x, y)"),
        ("check(f'eq-c-{x}', x, y)\ncompare('eq-a-b')", None),
        ("for x, y in table:\n    check(x, y, 1)", None),
    ],
)  # fmt: skip
def test_mark_shows_what_leads_to_a_check(source, code):
    assert marks.checking(source, "eq-a-b") == (code or source)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (["1e-12"], "Checked on p: both sides agree to within 10<sup>−12</sup>"),
        (["1e-12", "2^-20"],
         "2 checks on p: both sides agree to within 2<sup>−20</sup>"),
        (["1.5e-07"], "Checked on p: both sides agree to within 1.5 · 10<sup>−7</sup>"),
        ([None], "Checked on p: the condition holds"),
    ],
)  # fmt: skip
def test_accuracy_in_words(bounds, said):
    assert marks.accuracy(bounds, "p") == said


@pytest.mark.parametrize(
    ("source", "alone"),
    [
        ("show(f)", True),
        ("display(notebook.show(f), show(g))", True),
        ("show(f)\nf(1)", False),
        ("display(f)", False),
    ],
)
def test_a_cell_that_only_shows_code_is_found(source, alone):
    assert marks.only_shows(source) == alone
