"""check, at_most, holds, table and show: what they show, and what they refuse."""

import math

import numpy as np
import pytest
import torch

from flashlib import notebook, testing
from flashlib.notebook import at_most, check, holds, show, table


def test_check_says_how_exactly_it_holds(capsys):
    check("eq-a", torch.tensor([1.0, -math.inf]), [1.0, -math.inf])
    check("eq-b", 1.0 + 2.0**-21, 1.0, within=2**-20)
    check("eq-c", 1.0 + 1.4e-7, 1.0, within=1.5e-7)
    assert capsys.readouterr().out.splitlines() == [
        "eq-a: holds (below 1e-12)",
        "eq-b: holds (below 2^-20)",
        "eq-c: holds (below 1.5e-07)",
    ]


DIFFERENT = [
    (1.0, 1.0 + 1e-9), ([1.0, 2.0], [1.0, 2.1]), (1e300, 1e300 * (1 + 1e-9)),
    (math.nan, math.nan), ([math.nan, 1.0], [1.0, 1.0]), (math.inf, -math.inf),
    (math.inf, 1.0),
]  # fmt: skip


@pytest.mark.parametrize("lhs, rhs", DIFFERENT)
def test_check_fails_where_the_sides_differ(lhs, rhs):
    message = r"^eq-a: does not hold; largest difference"
    with pytest.raises(AssertionError, match=message):
        check("eq-a", lhs, rhs)


def test_check_names_the_place_of_the_largest_difference():
    with pytest.raises(AssertionError, match=r"at \(1, 0\): lhs 3, rhs 5"):
        check("eq-a", [[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [5.0, 4.5]])


@pytest.mark.parametrize(
    ("lhs", "rhs", "within", "error", "message"),
    [
        (torch.tensor([1 + 2j]), 1.0, 0.1, TypeError, "lhs: expected real numbers"),
        (1.0, np.array([1j]), 0.1, TypeError, "rhs: expected real numbers"),
        ("1", 1.0, 0.1, TypeError, "lhs: expected real numbers, .* got str"),
        (10**400, 1.0, 0.1, TypeError, "lhs: expected real numbers"),
        ([1.0], [1.0, 1.0], 0.1, ValueError, r"rhs: expected shape \(1,\)"),
        ([], [], 0.1, ValueError, r"rhs: expected shape \(0,\) and size > 0"),
        (1.0, 1.0, 0.0, ValueError, "within: expected a positive number"),
        (1.0, 1.0, math.inf, ValueError, "within: expected a positive number"),
    ],
)
def test_check_refuses_what_it_cannot_compare(lhs, rhs, within, error, message):
    with pytest.raises(error, match=f"^{message}"):
        check("eq-a", lhs, rhs, within=within)


@pytest.mark.parametrize(
    ("value", "bound", "slack"),
    [([1.0, 3.0], 5.0, 2), (torch.tensor([1, 5]), [9, 5], 1), ([0.0, -2.0], 0.0, 1)],
)
def test_at_most(value, bound, slack, capsys):
    at_most("eq-a", value, bound, slack=slack)
    assert capsys.readouterr().out == "eq-a: holds\n"


NOT_AT_MOST = [
    ([1.0, 6.0], 5.0, 2, r"does not hold at \(1,\): value 6, bound 5"),
    ([math.nan, 5.0], 5.0, 2, r"does not hold at \(0,\)"),
    ([1.0, 2.5], 5.0, 2, "no value is within 2 of its bound"),  # half would do, too
    ([1.0, -1.0], 1.1, 1, "no value is within 1 of its bound"),
    ([0.0, 1.0], [0.0, 5.0], 2, "no value is within 2 of its bound"),
]


@pytest.mark.parametrize("value, bound, slack, message", NOT_AT_MOST)
def test_at_most_fails_above_a_bound_and_far_below_it(value, bound, slack, message):
    with pytest.raises(AssertionError, match=f"^eq-a: {message}"):
        at_most("eq-a", value, bound, slack=slack)


@pytest.mark.parametrize(
    ("value", "bound", "slack", "error", "message"),
    [
        (1.0, 1.0, 0.5, ValueError, "slack: expected a number of at least 1"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], 2, ValueError, r"bound: expected shape \(2,\)"),
        ([], 1.0, 2, ValueError, "value: expected size > 0"),
        (True, "1", 2, TypeError, "bound: expected real numbers"),
    ],
)
def test_at_most_refuses_what_it_cannot_compare(value, bound, slack, error, message):
    with pytest.raises(error, match=f"^{message}"):
        at_most("eq-a", value, bound, slack=slack)


def test_holds(capsys):
    for true in (True, np.bool_(True), torch.tensor(True)):
        holds("eq-a", true)
    assert capsys.readouterr().out == "eq-a: holds\n" * 3
    for false in (False, np.bool_(False), torch.tensor(False)):
        with pytest.raises(AssertionError, match=r"^eq-a: does not hold"):
            holds("eq-a", false)
    for no_boolean in (1, None, torch.tensor([True]), np.ones(2, bool)):
        with pytest.raises(TypeError, match=r"^condition: expected one boolean"):
            holds("eq-a", no_boolean)


def test_a_table_escapes_its_values(monkeypatch):
    """nbval compares the tables and the sources that the chapters show."""
    shown = []
    monkeypatch.setattr(notebook, "_display", shown.append)
    table({"<": "<"}, [("a < b",)])
    assert ">&lt;</th>" in shown[0] and ">a &lt; b</td>" in shown[0]


def test_show_needs_a_source_and_leaves_a_modules_docstring_out():
    module = show(notebook).data
    assert module.startswith("```python\nimport ") and '"""What the' not in module
    for without_source in (3, "check"):
        with pytest.raises(TypeError):
            show(without_source)


def test_show_puts_things_and_parts_of_things_in_one_listing():
    part = (holds, "if not isinstance", "raise TypeError")
    shown = show(check, part, testing.make_qkv).data
    whole = show(check).data.removesuffix("```\n\n`flashlib/notebook.py`")
    assert shown.startswith(
        f"{whole}\n\nif not isinstance(condition, bool):\n    raise"
    )
    assert shown.endswith("\n```\n\n`flashlib/notebook.py`\n\n`flashlib/testing.py`")
    assert shown.count("```") == 2
    with pytest.raises(ValueError, match="from 'print' to 'raise', got none"):
        show((holds, "print", "raise"))
