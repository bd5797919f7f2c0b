"""What the chapters use to execute their equations: :func:`check`, :func:`holds` and :func:`show`."""

import ast
import inspect
import math
import textwrap
import warnings

import numpy as np
import torch

TOLERANCE = 1e-12
# PyTorch warns where the first thing that its autograd thread does on a GPU is a matrix product, and goes on.
# A chapter prints the same on every machine.
warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")


def _float64(label, side, value):
    """One side of an equation as a float64 array."""
    got = f"got {type(value).__name__}"
    wrong = TypeError(f"check({label!r}): {side} must be a real number, an array or a tensor of them, {got}")
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value if value.dtype.is_complex else value.double()).numpy()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise wrong from error
    if array.dtype.kind not in "biuf":
        raise wrong
    return array.astype(np.float64)


def check(label, lhs, rhs, *, within=TOLERANCE):
    """Execute an equation: compare its two sides in float64 and print that it holds.

    lhs, rhs: numbers, arrays or tensors of equal shape. The largest difference, relative to the
    larger of 1 and the largest magnitude, must be below ``within``; infinities must stand in the
    same places, and a NaN on either side is a failure. A check that compares a kernel passes the
    bound that its arithmetic allows, such as ``2**-20`` for float32.

    Raises AssertionError naming the label, the size and the place of the largest difference;
    ValueError for shapes that differ or are empty; TypeError for what is not numeric.
    """
    _require_label("check", label)
    if not (math.isfinite(within) and within > 0):
        raise ValueError(f"check({label!r}): within must be a positive number, got {within}")
    a, b = _float64(label, "lhs", lhs), _float64(label, "rhs", rhs)
    if a.shape != b.shape:
        raise ValueError(f"check({label!r}): the sides differ in shape: {a.shape} and {b.shape}")
    if a.size == 0:
        raise ValueError(f"check({label!r}): both sides are empty, there is nothing to compare")
    same_infinity = np.isinf(a) & (a == b)
    with np.errstate(invalid="ignore"):
        difference = np.where(same_infinity, 0.0, np.abs(a - b))
    finite = np.abs(np.concatenate([a[np.isfinite(a)], b[np.isfinite(b)]]))
    scale = max(1.0, finite.max(initial=0.0))
    # NaN compares false with everything, so ask for what must hold, not for what must not.
    if not bool(np.all(difference < within * scale)):
        worst = np.where(np.isnan(difference), np.inf, difference)
        place = tuple(int(i) for i in np.unravel_index(int(worst.argmax()), a.shape))
        raise AssertionError(
            f"{label}: does not hold; largest difference {worst.max():.3g} at {place}: "
            f"lhs {a[place]:.10g}, rhs {b[place]:.10g}, allowed {within * scale:.3g}"
        )
    print(f"{label}: holds (below {_power(within)})")


def _power(bound):
    """A bound as a reader writes it: 2**-20 stays a power of two, 1e-12 a power of ten."""
    exponent = math.log2(bound)
    return f"2^{int(exponent)}" if exponent == int(exponent) else np.format_float_scientific(bound, trim="-")


def _require_label(function, label):
    if not isinstance(label, str) or not label:
        raise TypeError(f"{function}: label must be a string that names the equation, got {label!r}")


def holds(label, condition):
    """Execute an inequality or a count: ``condition`` is one truth value.

    Raises AssertionError naming the label when it is false, TypeError when it is not a single
    boolean.
    """
    _require_label("holds", label)
    if isinstance(condition, (torch.Tensor, np.ndarray, np.generic)) and condition.shape == ():
        condition = condition.item()
    if not isinstance(condition, bool):
        raise TypeError(f"holds({label!r}): condition must be one boolean, got {type(condition).__name__}")
    if not condition:
        raise AssertionError(f"{label}: does not hold")
    print(f"{label}: holds")


def show(thing):
    """The library's own source of a function, class, module or Triton kernel, as Markdown for a
    notebook cell.

    Module docstrings are left out, so that the code stands alone. Raises TypeError for what has no
    Python source.
    """
    from IPython.display import Markdown

    thing = getattr(thing, "fn", thing)  # a Triton kernel wraps the function that was decorated
    try:
        source = textwrap.dedent(inspect.getsource(thing))
    except (TypeError, OSError) as error:
        got = type(thing).__name__
        raise TypeError(f"show: thing must be a function, class, module or kernel, got {got}") from error
    if inspect.ismodule(thing):
        tree = ast.parse(source)
        if ast.get_docstring(tree) is not None:
            source = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).lstrip()
    return Markdown(f"```python\n{source.rstrip()}\n```")
