"""check, holds and show: what they print, what they refuse, and that a wrong equation never passes."""

import math

import numpy as np
import pytest
import torch

from flashlib import notebook
from flashlib.kernels import flash2
from flashlib.notebook import check, holds, show


def test_check_says_how_exactly_it_holds(capsys):
    check("eq-a", torch.tensor([1.0, -math.inf]), [1.0, -math.inf])
    check("eq-b", 1.0 + 2.0**-21, 1.0, within=2**-20)
    check("eq-c", 1.0 + 1.4e-7, 1.0, within=1.5e-7)
    assert capsys.readouterr().out.splitlines() == [
        "eq-a: holds (below 1e-12)",
        "eq-b: holds (below 2^-20)",
        "eq-c: holds (below 1.5e-07)",
    ]


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [
        (1.0, 1.0 + 1e-9),
        ([1.0, 2.0], [1.0, 2.1]),
        (math.nan, math.nan),
        ([math.nan, 1.0], [1.0, 1.0]),
        (math.inf, -math.inf),
        (math.inf, 1.0),
        (1e300, 1e300 * (1 + 1e-9)),
    ],
)
def test_check_fails_where_the_sides_differ(lhs, rhs):
    with pytest.raises(AssertionError, match=r"^eq-a: does not hold; largest difference"):
        check("eq-a", lhs, rhs)


def test_check_names_the_place_of_the_largest_difference():
    with pytest.raises(AssertionError, match=r"at \(1, 0\): lhs 3, rhs 5"):
        check("eq-a", [[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [5.0, 4.5]])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.tensor([1 + 2j]), torch.tensor([1 + 5j])), {}, TypeError, "lhs must be a real number"),
        ((1.0, np.array([1j])), {}, TypeError, "rhs must be a real number"),
        (("1", 1.0), {}, TypeError, "lhs must be a real number, .* got str"),
        ((None, 1.0), {}, TypeError, "lhs must be a real number, .* got NoneType"),
        ((10**400, 1.0), {}, TypeError, "lhs must be a real number"),
        (([1.0], [1.0, 1.0]), {}, ValueError, r"the sides differ in shape: \(1,\) and \(2,\)"),
        (([], []), {}, ValueError, "both sides are empty"),
        ((1.0, 1.0), {"within": 0.0}, ValueError, "within must be a positive number"),
        ((1.0, 1.0), {"within": math.inf}, ValueError, "within must be a positive number"),
    ],
)
def test_check_refuses_what_it_cannot_compare(arguments, options, error, message):
    with pytest.raises(error, match=rf"^check\('eq-a'\): {message}"):
        check("eq-a", *arguments, **options)


def test_holds(capsys):
    for true in (True, np.bool_(True), torch.tensor(True)):
        holds("eq-a", true)
    assert capsys.readouterr().out == "eq-a: holds\n" * 3
    for false in (False, np.bool_(False), torch.tensor(False)):
        with pytest.raises(AssertionError, match=r"^eq-a: does not hold"):
            holds("eq-a", false)
    for no_boolean in (1, "yes", None, torch.tensor([True]), np.array([True, True]), torch.tensor(1)):
        with pytest.raises(TypeError, match=r"^holds\('eq-a'\): condition must be one boolean"):
            holds("eq-a", no_boolean)


@pytest.mark.parametrize("label", ["", None, 3])
def test_a_label_is_a_name(label):
    with pytest.raises(TypeError, match=r"^check: label must be a string"):
        check(label, 1.0, 1.0)
    with pytest.raises(TypeError, match=r"^holds: label must be a string"):
        holds(label, True)


def test_show_gives_the_source_of_the_library():
    assert show(flash2.forward_kernel).data.startswith("```python\n@triton.jit\ndef forward_kernel(")
    assert show(check).data.startswith("```python\ndef check(label, lhs, rhs")
    module = show(notebook).data
    assert module.startswith("```python\nimport ") and "What the chapters use" not in module
    for without_source in (3, "check", math, torch.Tensor([1.0])):
        with pytest.raises(TypeError, match=r"^show: thing must be a function, class, module or kernel"):
            show(without_source)
