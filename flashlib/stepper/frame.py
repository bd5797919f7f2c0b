"""The frame that all figures to step through share: panels of named items, source lines, steps, a table.

A figure has *panels*. Each shows named items and has a ``kind``:

``cells``       boxes with a name and a value. ``cells``: their names; ``columns``: boxes in a row, or 0 for
                as many as fit; ``notes``: whether a note stands below the value. An item is the number of a
                cell, its content ``[value, note]``.
``grid``        a matrix with rectangles on it. ``rows``, ``columns``, ``colour``, and ``slow``, false for a
                dashed edge. An item has any name, its content is ``[first row, end row, first column, end
                column, "in" or "stored"]``; in place and colour an item keeps its first content.
``plane``       several matrices on a plane of ``rows`` and ``columns`` cells. ``parts``: their ``[name, top,
                left, rows, columns, slow, whether the name stands beside it or above]``. Items are as in a
                grid, with places on the plane and a colour at the end.
``table``       a table of numbers. ``columns``: names, the first that of the rows; ``rows``: their names. An
                item is the number of a cell, row by row and without the names, its content a text.
``bar``         a bar of ``max`` words filled from the left. An item's name is its label, its content
                ``[words, colour]``.
``counters``    an item's name and its content, a text.

Each panel also has a ``title`` and a ``group``; neighbours of one group stand side by side under its name. In
every kind the item ``""`` is a line of text below the panel. Colours are numbers from 0 to 9.

A *step* is ``{"head": text, "say": text, "line": number or None, "set": {panel: {item: content}}, "mark":
{panel: {item: mark}}}``. ``head`` names the step and ``say`` tells what it does. ``set`` holds what changes,
None removes an item, and everything else stays from the step before; marks hold for one step. ``line`` is the
source line to highlight. The first step is the state before anything happens. Lines of ``say`` stay lines.
"""

import json
from html import escape
from importlib.resources import files

# A reader steps by hand; a figure beyond this would be waited for, not stepped through.
MOST_STEPS = 400
# A longer table is folded, and left out of print.
OPEN_ROWS = 40


class Figure:
    """A figure to step through; a notebook shows it as HTML.

    title           the line above the figure, a text; also names its table
    alt             what the figure shows, for those who do not see it
    summary         the outcome in one line; it stands below, and in print
    panels, steps   see the module; the first step is the start
    columns, rows   the table that says the same: names of columns, texts of each row; one row a step
    lines           source lines, beside which the steps run
    legend          {mark: what it means}

    Raises TypeError or ValueError for a title or an alt that is no text or empty, and ValueError for a trace
    without a step or of more than MOST_STEPS.
    """

    def __init__(self, *, title, alt, summary, panels, steps, columns, rows, lines=(), legend=None):
        for name, text in (("title", title), ("alt", alt)):
            if not isinstance(text, str):
                raise TypeError(f"{name} must be a text, got {type(text).__name__}")
            if not text.strip():
                raise ValueError(f"{name} must say something, got {text!r}")
        if not rows:
            raise ValueError("the trace has no step: there is nothing to step through")
        if len(rows) > MOST_STEPS:
            raise ValueError(
                f"the trace has {len(rows)} steps, expected at most {MOST_STEPS}: take a smaller example"
            )
        self.title, self.alt, self.summary = title, alt, summary
        self.columns, self.rows = list(columns), [list(row) for row in rows]
        self.data = {
            "lines": list(lines),
            "legend": dict(legend or {}),
            "panels": list(panels),
            "steps": list(steps),
        }

    def __repr__(self):
        return f"{self.title} ({self.summary})"

    def _repr_html_(self):
        # "<" would let a text end the script element early.
        data = json.dumps(self.data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
        long = len(self.rows) > OPEN_ROWS
        table = 'class="stepper-table stepper-long"' if long else 'class="stepper-table" open'
        title = escape(self.title)
        return (
            f'<figure class="stepper" aria-label="{escape(self.alt)}">\n'
            f"<figcaption>{title}</figcaption>\n"
            f'<script type="application/json">{data}</script>\n'
            f"<details {table}>\n"
            f"<summary>All {len(self.rows)} steps as a table</summary>\n"
            f'<div class="stepper-scroll" role="group" aria-label="{title}, as a table" tabindex="0" '
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
        return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n"

    def live(self):
        """The same figure with its script and style inside, to step through in a running notebook."""
        return Live(self)


class Live:
    """A figure that needs no page around it: what ``Figure.live`` returns."""

    def __init__(self, figure):
        self.figure = figure

    def __repr__(self):
        return repr(self.figure)

    def _repr_html_(self):
        style, script = asset("stepper.css"), asset("stepper.js")
        return f"<style>\n{style}</style>\n{self.figure._repr_html_()}<script>\n{script}</script>\n"


def asset(name):
    """The text of a file in ``static/``."""
    return files("flashlib.stepper").joinpath("static", name).read_text(encoding="utf-8")


def number_text(number):
    """A number as readers write it, with at most four significant digits: "-3", "0.3679", "4.54·10⁻⁵".

    So short that machines whose last bits differ agree on it. Texts ("inf") are returned as they are.
    """
    if isinstance(number, str):
        return number
    if isinstance(number, int):
        return str(number)
    mantissa, _, power = f"{number:z.4g}".partition("e")
    if not power:
        return mantissa
    digits = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa}·10{digits}"


def count_text(count, noun):
    """ "1 load", "2 loads"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def require(name, trace, keys):
    """Raise TypeError unless a trace is a dict, ValueError unless it has these keys.

    name: the argument that it came by
    """
    if not isinstance(trace, dict):
        raise TypeError(f"{name} must be a trace of the simulator, got {type(trace).__name__}")
    missing = [key for key in keys if key not in trace]
    if missing:
        raise ValueError(
            f"{name} must be a trace with {', '.join(keys)}, got one without {', '.join(missing)}"
        )
