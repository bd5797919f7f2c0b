"""The frame that all figures share: panels of named items, source lines, steps, a
table.

A figure has *panels*. Each shows named items and has a ``kind``:

``cells``       boxes with a name and a value. ``cells``: their names; ``columns``:
                boxes per row, or 0 for as many as fit; ``notes``: whether a note is
                below the value. An item is the number of a cell, its content
                ``[value, note]``.
``grid``        a matrix with rectangles on it. ``rows``, ``columns``, ``colour``, and
                ``slow``, false for a dashed edge. An item has any name, its content is
                ``[first row, end row, first column, end column, "in" or "stored"]``; an
                item keeps the place and color of its first content.
``plane``       several matrices on a plane of ``rows`` and ``columns`` cells.
                ``parts``: their ``[name, top, left, rows, columns, slow, whether the
                name is to the left instead of above]``. Items are as in a grid, with
                places on the plane and a color at the end.
``table``       a table of numbers. ``columns``: names, the first that of the rows;
                ``rows``: their names. An item is the number of a cell, row by row and
                without the names, its content a text.
``bar``         a bar of ``max`` words filled from the left. An item's name is its
                label, its content ``[words, color]``.
``counters``    an item's name and its content, a text.

Each panel also has a ``title`` and a ``group``; neighbors of one group are side by side
under its name. In every kind the item ``""`` is a line of text below the panel. Colors
are numbers from 0 to 9.

A *step* is ``{"head": text, "say": text, "line": number or None, "set": {panel: {item:
content}}, "mark": {panel: {item: mark}}}``. ``head`` names the step and ``say`` tells
what it does, in one or more lines. ``set`` holds what changes; None removes an item,
and everything else stays from the step before. Marks hold for one step. ``line`` is the
source line to highlight. The first step is the state before anything happens.
"""

import json
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

# Readers step by hand, so a longer figure would never be read to its end.
MOST_STEPS = 400
# A longer table is folded and not printed.
OPEN_ROWS = 40


@dataclass(kw_only=True, repr=False)
class Figure:
    """A figure to step through; a notebook shows it as HTML.

    Raises TypeError when title or alt is not a text, ValueError when one is empty or
    there are more than MOST_STEPS steps.
    """

    title: str  # the line above the figure
    alt: str  # what it shows, for readers who do not see it
    summary: str  # the outcome in one line, shown below the figure and in print
    panels: list  # see the module
    steps: list  # the first one is the start
    columns: list  # of the table with the same content
    rows: list  # of this table, one per step
    legend: dict = field(default_factory=dict)  # {mark: what it means}
    lines: list = field(default_factory=list)  # source that the steps run next to

    def __post_init__(self):
        check_text("title", self.title)
        check_text("alt", self.alt)
        if len(self.rows) > MOST_STEPS:
            expected = f"a trace of at most {MOST_STEPS} steps"
            raise ValueError(f"trace: expected {expected}, got {len(self.rows)}")

    @property
    def data(self):
        """What the script reads."""
        parts = ("lines", "legend", "panels", "steps")
        return {part: getattr(self, part) for part in parts}

    def __repr__(self):
        return f"{self.title} ({self.summary})"

    def _repr_html_(self):
        data = json.dumps(self.data, ensure_ascii=False, separators=(",", ":"))
        data = data.replace("<", "\\u003c")  # or a text could end the script element
        title, table = escape(self.title), 'class="stepper-table" open'
        if len(self.rows) > OPEN_ROWS:
            table = 'class="stepper-table stepper-long"'
        return (
            f'<figure class="stepper" aria-label="{escape(self.alt)}">\n'
            f"<figcaption>{title}</figcaption>\n"
            f'<script type="application/json">{data}</script>\n'
            f"<details {table}>\n"
            f"<summary>All {len(self.rows)} steps as a table</summary>\n"
            '<div class="stepper-scroll" role="group" '
            f'aria-label="{title}, as a table" tabindex="0" '
            f'style="overflow-x: auto">\n{self._table()}</div>\n'
            "</details>\n"
            f'<p class="stepper-summary">{escape(self.summary)}</p>\n'
            "</figure>\n"
        )

    def _table(self):
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.columns)
        body = ""
        for first, *rest in self.rows:
            texts = "".join(f"<td>{escape(text)}</td>" for text in rest)
            body += f'<tr><th scope="row">{escape(first)}</th>{texts}</tr>\n'
        head = f"<thead><tr>{head}</tr></thead>"
        return f"<table>\n{head}\n<tbody>\n{body}</tbody>\n</table>\n"

    def live(self):
        """The same figure with its script and style, for a running notebook."""
        return Live(self)


@dataclass(repr=False)
class Live:
    """A figure that needs no page around it: what ``Figure.live`` returns."""

    figure: Figure

    def __repr__(self):
        return repr(self.figure)

    def _repr_html_(self):
        style = f"<style>\n{asset('stepper.css')}</style>\n"
        script = f"<script>\n{asset('stepper.js')}</script>\n"
        return style + self.figure._repr_html_() + script


def asset(name):
    """Return the text of a file in ``static/``."""
    return Path(__file__).with_name("static").joinpath(name).read_text(encoding="utf-8")


# -- What the figures are built from


def panel(kind, group, title, **rest):
    """Return a panel; see the module."""
    return {"kind": kind, "group": group, "title": title, **rest}


def step(head, say, change, mark=None, line=None):
    """Return a step; panels without a change or a mark are left out."""
    change = {place: items for place, items in change.items() if items}
    mark = {place: items for place, items in (mark or {}).items() if items}
    return {"head": head, "say": say, "line": line, "set": change, "mark": mark}


def difference(before, now):
    """What a panel's items change to: None for those that went, else content."""
    change = {item: None for item in before if item not in now}
    different = {item: x for item, x in now.items() if before.get(item) != x}
    return change | different


def number_text(number):
    """Return at most four significant digits, on which all machines agree: "0.3679",
    "4.54·10⁻⁵". Integers and texts ("inf") stay whole.
    """
    if isinstance(number, str | int):
        return str(number)
    mantissa, _, power = f"{number:z.4g}".partition("e")
    if not power:
        return mantissa
    digits = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa}·10{digits}"


def count_text(count, noun):
    """Return "1 load", "2 loads"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(texts):
    """Return "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def check_text(name, text):
    """Raise TypeError unless an argument is a text, ValueError if it is empty."""
    if not isinstance(text, str):
        raise TypeError(f"{name}: expected a text, got {text!r}")
    if not text.strip():
        raise ValueError(f"{name}: expected a text that is not empty, got {text!r}")


def read_trace(name, source, keys, method="trace"):
    """Return the trace of a simulator, a dict with these keys and at least one step:
    ``source``, or what its method returns. Raises TypeError where it is neither,
    ValueError where keys or steps are missing.
    """
    make = getattr(source, method, None)
    trace = make() if callable(make) else source
    if not isinstance(trace, dict):
        expected = "a trace of the simulator"
        raise TypeError(f"{name}: expected {expected}, got {type(trace).__name__}")
    missing = [key for key in keys if key not in trace]
    if missing:
        expected, missing = ", ".join(keys), ", ".join(missing)
        raise ValueError(f"{name}: expected a trace with {expected}, got no {missing}")
    if not trace.get("steps", True):
        raise ValueError(f"{name}: expected a trace with a step, got an empty one")
    return trace
