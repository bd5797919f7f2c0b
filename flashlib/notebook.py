"""What the chapters use to execute their equations and to show what they measure:
:func:`check`, :func:`at_most`, :func:`holds`, :func:`table`, :func:`measured` and
:func:`show`.
"""

import ast
import html
import inspect
import math
import re
import textwrap
import warnings
from pathlib import Path

import numpy as np
import torch

TOLERANCE = 1e-12
NARROW_CHARACTERS = 44  # that fit next to each other on a phone
LIBRARY = Path(__file__).parent
# PyTorch warns when the first thing that its autograd thread does on a GPU is a matrix
# product, and goes on. A chapter prints the same on every machine.
warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")


def check(label, lhs, rhs, *, within=TOLERANCE):
    """Execute an equation: compare its two sides in float64 and print that it holds.

    lhs, rhs: numbers, arrays or tensors of equal shape. The largest difference,
    relative to the larger of 1 and the largest magnitude, must be below ``within``.
    Infinities must be in the same places, and a NaN on either side is a failure. A
    check that compares a kernel passes the bound that its arithmetic allows, such as
    ``2**-20`` for float32.

    Raises AssertionError naming the label, the size and the place of the largest
    difference; ValueError for shapes that differ or are empty; TypeError for what is
    not real numbers.
    """
    if not (math.isfinite(within) and within > 0):
        raise ValueError(f"within: expected a positive number, got {within}")
    a, b = _float64("lhs", lhs), _float64("rhs", rhs)
    if a.shape != b.shape or a.size == 0:
        raise ValueError(f"rhs: expected shape {a.shape} and size > 0, got {b.shape}")
    same_infinity = np.isinf(a) & (a == b)
    with np.errstate(invalid="ignore"):
        difference = np.where(same_infinity, 0.0, np.abs(a - b))
    finite = np.abs(np.concatenate([a[np.isfinite(a)], b[np.isfinite(b)]]))
    allowed = within * max(1.0, finite.max(initial=0.0))
    # NaN compares false with everything, so ask for what must hold.
    if not bool(np.all(difference < allowed)):
        worst = np.where(np.isnan(difference), np.inf, difference)
        place = tuple(int(i) for i in np.unravel_index(int(worst.argmax()), a.shape))
        raise AssertionError(
            f"{label}: does not hold; largest difference {worst.max():.3g} at {place}: "
            f"lhs {a[place]:.10g}, rhs {b[place]:.10g}, allowed {allowed:.3g}"
        )
    # As a reader writes it: 2**-20 is a power of two, 1e-12 a power of ten.
    bound = np.format_float_scientific(within, trim="-")
    if (exponent := math.log2(within)) == int(exponent):
        bound = f"2^{int(exponent)}"
    print(f"{label}: holds (below {bound})")


def _float64(side, value):
    """One side of an equation as a float64 array."""
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value if value.dtype.is_complex else value.double()).numpy()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf":
        got = type(value).__name__
        raise TypeError(f"{side}: expected real numbers, an array or tensor, got {got}")
    return array.astype(np.float64)


def at_most(label, value, bound, *, slack=2.0):
    """Execute an inequality: no value exceeds its bound, and print that it holds.

    value, bound: numbers, arrays or tensors whose shapes broadcast, compared in float64
    without a tolerance. A bound far above everything would prove nothing, so somewhere
    the value must be equal to its bound or exceed it when multiplied by ``slack``: with
    the default, half of the bound would be too little. ``slack=1`` asks for equality.
    Places where both are 0 prove nothing either, unless one of them is 0 everywhere.

    Raises AssertionError naming the label where a value exceeds its bound or is NaN, or
    where the bound is nowhere that close; ValueError for shapes that do not broadcast
    or are empty, and for a slack below 1; TypeError for what is not real numbers.
    """
    if not 1 <= slack < math.inf:
        raise ValueError(f"slack: expected a number of at least 1, got {slack}")
    a, b = _float64("value", value), _float64("bound", bound)
    try:
        a, b = np.broadcast_arrays(a, b)
    except ValueError:
        raise ValueError(f"bound: expected shape {a.shape}, got {b.shape}") from None
    if a.size == 0:
        raise ValueError("value: expected size > 0, got 0")
    # NaN compares false with everything, so ask for what must hold.
    if not (a <= b).all():
        place = np.unravel_index(int((a <= b).argmin()), a.shape)
        place = tuple(map(int, place))
        raise AssertionError(
            f"{label}: does not hold at {place}: value {a[place]:.10g}, "
            f"bound {b[place]:.10g}"
        )
    near = (a == b) | (slack * a > b)
    if not (near & (a != 0) if a.any() and b.any() else near).any():
        raise AssertionError(f"{label}: no value is within {slack:g} of its bound")
    print(f"{label}: holds")


def holds(label, condition):
    """Execute a statement or a count. Raises AssertionError naming the label when the
    condition is false, TypeError when it is not a single boolean.
    """
    if getattr(condition, "shape", None) == ():  # of a tensor or of NumPy
        condition = condition.item()
    if not isinstance(condition, bool):
        raise TypeError(f"condition: expected one boolean, got {condition!r}")
    if not condition:
        raise AssertionError(f"{label}: does not hold")
    print(f"{label}: holds")


def table(columns, rows):
    """Display rows of values as an HTML table, below the titles of their columns.

    columns: {title: how ``format`` writes the column's values}, ``".2f"`` for example.
    Columns are aligned on the right, those that begin with ``"<"`` on the left.
    """
    _display(_html_table(columns, rows))


def measured(record, columns, rows, part="cells", cell=None):
    """Display a table of a part of a record and, folded, where and with what that was
    measured; a cell has a date or a dtype of its own.
    """
    conditions = html.escape(record.provenance(part, cell)).replace("\n", "<br>")
    fold = f"<details><summary>How it was measured</summary>{conditions}</details>"
    _display(_html_table(columns, rows) + fold)


def _display(text):
    from IPython.display import HTML, display  # the library imports without IPython

    display(HTML(text))


def _html_table(columns, rows):
    specs = columns.values()
    texts = [list(map(format, row, specs)) for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *texts, strict=True)]
    # On a phone, a wide table shows each row as lines "title: value".
    wide = sum(widths) + 2 * len(widths) > NARROW_CHARACTERS
    styles = [' style="text-align: left"' * spec.startswith("<") for spec in specs]

    def line(tag, texts, *attributes):
        cells = zip(map(html.escape, texts), *attributes, strict=True)
        return "<tr>" + "".join(f"<{tag}{a}>{x}</{tag}>" for x, a in cells) + "</tr>\n"

    titles = [f' data-title="{html.escape(title)}"' * wide for title in columns]
    attributes = [style + title for style, title in zip(styles, titles, strict=True)]
    head = line("th", columns, [f' scope="col"{style}' for style in styles])
    body = "".join(line("td", row, attributes) for row in texts)
    return (
        f'<table class="rows{" wide" * wide}">\n<thead>{head}</thead>\n'
        f"<tbody>\n{body}</tbody></table>"
    )


def show(thing, *more):
    """The library's own source of functions, classes, modules or Triton kernels, as
    Markdown for a notebook cell, without module docstrings and formatter directives,
    and the names of their files.

    A tuple ``(thing, first, last)`` shows a part of a thing: the lines from one that
    contains the text ``first`` to one that contains ``last``. Raises ValueError if
    no line contains one of them, TypeError for what has no source.
    """
    from IPython.display import Markdown

    parts = [x if isinstance(x, tuple) else (x,) for x in (thing, *more)]
    sources, files = zip(*(_source_and_file(*part) for part in parts), strict=True)
    # The built page turns a name into a link where the book has a repository.
    names = "\n\n".join(f"`{file}`" for file in dict.fromkeys(files))
    code = "\n\n\n".join(sources)
    return Markdown(f"```python\n{code}\n```\n\n{names}")


def _source_and_file(thing, first="", last=None):
    """The source of a thing, or of a part of it, and the name of its file."""
    # A Triton kernel and a schedule wrap their functions.
    thing = inspect.unwrap(getattr(thing, "fn", thing))
    source = textwrap.dedent(inspect.getsource(thing))
    if inspect.ismodule(thing):
        docstring = ast.parse(source).body[0]
        source = "\n".join(source.splitlines()[docstring.end_lineno :]).lstrip()
    source = re.sub(r"  # fmt: skip$|^ *# fmt: o(n|ff)\n", "", source, flags=re.M)
    if last is not None:
        source = _lines_between(source.splitlines(), first, last)
    file = Path(inspect.getsourcefile(thing)).relative_to(LIBRARY.parent)
    return source.rstrip(), file.as_posix()


def _lines_between(lines, first, last):
    """The lines from the first with one text to the next with another, dedented."""
    begin = next((n for n, line in enumerate(lines) if first in line), len(lines))
    for end, line in enumerate(lines[begin:], begin):
        if last in line:
            return textwrap.dedent("\n".join(lines[begin : end + 1]))
    raise ValueError(f"thing: expected lines from {first!r} to {last!r}, got none")
