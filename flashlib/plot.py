"""Figures in the house style: of the arrays, counts and measurements that they are
given.

Each function but `provenance` returns the `Figure` (a matplotlib figure), which shows
itself as the last expression of a notebook cell. With `ax=` it draws into an axes of a
`figure()` of yours instead of a new one. A method has one color in the whole book
(`METHODS`), and lines carry their labels at their right ends. Fonts ship with
matplotlib, so every machine draws the same. A picture has neither date nor version, so
drawing twice gives the same bytes. Data that is empty, not finite or does not fit the
other arguments raises ValueError: a figure never hides a NaN.
"""

import math

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle

from flashlib.canvas import (
    BLUE,
    BROWN,
    CYCLE,
    GREEN,
    GREY,
    INK,
    MARKERS,
    METHODS,
    NIGHT,
    ORANGE,
    PALE,
    PAPER,
    PURPLE,
    SKY,
    SLATE,
    TINTS,
    VERMILLION,
    WIDTH,
    doubling,
    figure,
    label_directly,
    numbers,
    require,
)
from flashlib.speeds import REACHED, bars, contest, ladder, memory, provenance, shared

__all__ = [
    "BLUE", "BROWN", "CYCLE", "GREEN", "GREY", "INK", "METHODS", "NIGHT", "ORANGE",
    "PALE", "PAPER", "PURPLE", "REACHED", "SKY", "SLATE", "TINTS", "VERMILLION",
    "WIDTH", "bars", "contest", "curves", "figure", "graph", "label_directly",
    "ladder", "mask", "matrix", "memory", "provenance", "shared", "tape", "timeline",
]  # fmt: skip

# A pair of a mask, by what a kernel does with its tile.
MASK_COLORS = {
    "tile not read": PALE,
    "read, but hidden": "#f7dcc9",
    "seen, tile masked": VERMILLION,
    "seen, tile whole": SKY,
}

_POSITIVE = LinearSegmentedColormap.from_list("positive", [PAPER, SKY, BLUE])
_SIGNED = LinearSegmentedColormap.from_list("signed", [VERMILLION, PAPER, BLUE])
_CENTER = {"ha": "center", "va": "center"}


def matrix(
    values, *, title="", rows=None, columns=None, hidden=None, digits=2, ax=None
):
    """A heat map of a matrix with its numbers in the cells; above 12 columns the colors
    alone. White is zero, blue positive, vermillion negative.

    values          [m, n], real, integer or bool, finite where it is not hidden
    rows, columns   labels of the m rows and of the n columns; by default their indices
    hidden          bool [m, n]: True where a cell is drawn empty and hatched, such as a
                    masked score of -inf
    digits          decimals of a real number
    """
    values = numbers("values", values, 2, finite=hidden is None)
    m, n = values.shape
    hidden = np.asarray(np.zeros((m, n), dtype=bool) if hidden is None else hidden)
    right = hidden.dtype == bool and hidden.shape == values.shape
    got = f"{hidden.dtype} {hidden.shape}"
    require(right, "hidden", f"bool {values.shape}", got)
    seen = numbers("values where hidden is False", values[~hidden], 1).astype(float)
    if ax is None:
        side = min(WIDTH / (n + 1.5), 0.85)
        _, ax = figure((n + 1.5) * side, (m + (1.5 if title else 1)) * side)

    largest = float(np.abs(seen).max()) or 1.0
    if (seen < 0).any():
        scale = {"cmap": _SIGNED, "vmin": -largest, "vmax": largest}
    else:
        scale = {"cmap": _POSITIVE, "vmin": 0, "vmax": largest}
    shown = np.ma.masked_array(np.where(hidden, 0, values).astype(float), hidden)
    image = ax.imshow(shown, aspect="equal", interpolation="nearest", **scale)
    digits = ".0f" if values.dtype.kind in "biu" else f"z.{digits}f"  # z: no "-0.00"
    for i, j in np.ndindex(m, n):
        if hidden[i, j]:
            look = {"facecolor": PALE, "edgecolor": GREY, "hatch": "//"}
            ax.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, linewidth=0, **look))
        elif n <= 12:
            ink = _ink_on(image.to_rgba(shown[i, j]))
            size = 11 if n <= 6 else 9
            text = f"{float(values[i, j]):{digits}}"
            ax.text(j, i, text, color=ink, fontsize=size, **_CENTER)
    ax.set_xticks(*_ticks("columns", columns, n))
    ax.set_yticks(*_ticks("rows", rows, m))
    ax.tick_params(length=0, top=False, bottom=False, labeltop=True, labelbottom=False)
    ax.set_xticks(np.arange(n + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(m + 1) - 0.5, minor=True)
    ax.grid(False)
    ax.grid(which="minor", color="#c8c8c8", linewidth=0.8 if n <= 12 else 0.3)
    ax.tick_params(which="minor", length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(title)
    return ax.figure


def mask(seen, *, rows=1, columns=1, title="", legend=True, ax=None):
    """A mask as a tiled kernel sees it: pairs seen in tiles that are whole, or in tiles
    that are cut, pairs hidden in these, and tiles that need not be read
    (`MASK_COLORS`).

    seen            bool [T_q, T_k], True where the query of a row sees a column's key
    rows, columns   where tiles begin: their size, or the rising starts, from 0 on
    legend          whether the picture names the colors, above all its axes
    """
    seen = np.asarray(seen)
    right = seen.dtype == bool and seen.ndim == 2 and seen.size > 0
    got = f"{seen.dtype} {seen.shape}"
    require(right, "seen", "a bool matrix that is not empty", got)
    T_q, T_k = seen.shape
    tops, lefts = _starts("rows", rows, T_q), _starts("columns", columns, T_k)
    if ax is None:
        side = min(WIDTH / (T_k + 3), 0.3)
        # The names of the colors need space of their own.
        width = max((T_k + 3) * side, 4.2 if legend else 0)
        _, ax = figure(width, (T_q + 3) * side + 0.8)
    kinds = np.zeros(seen.shape, dtype=int)
    for top, bottom in zip(tops, [*tops[1:], T_q], strict=True):
        for left, right in zip(lefts, [*lefts[1:], T_k], strict=True):
            tile = seen[top:bottom, left:right]
            read = 3 if tile.all() else 1 + tile if tile.any() else 0
            kinds[top:bottom, left:right] = read
    colors = ListedColormap(list(MASK_COLORS.values()))
    look = {"cmap": colors, "vmin": 0, "vmax": 3, "edgecolor": "white"}
    ax.pcolormesh(np.arange(T_k + 1), np.arange(T_q + 1), kinds, linewidth=0.3, **look)
    ax.vlines([*lefts, T_k], 0, T_q, color=INK, linewidth=0.8)
    ax.hlines([*tops, T_q], 0, T_k, color=INK, linewidth=0.8)
    ax.set(aspect="equal", anchor="N", xlim=(0, T_k), ylim=(T_q, 0))
    ax.set(xticks=[], yticks=[], xlabel="key", ylabel="query")
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.set_title(title, fontsize=10)
    if legend:
        _legend_above(ax.figure, MASK_COLORS, ncols=2, edgecolor=GREY)
    return ax.figure


def _starts(name, tiles, size):
    """Where tiles begin, from their size or from the list itself."""
    if isinstance(tiles, int | np.integer):
        tiles = range(0, size, tiles)
    starts = [int(start) for start in tiles]
    rising = all(a < b for a, b in zip(starts, [*starts[1:], size], strict=True))
    expected = f"starts that begin at 0 and rise below {size}"
    require(starts[:1] == [0] and rising, name, expected, starts)
    return starts


def graph(nodes, edges, *, title="", highlight=(), ax=None):
    """A computation graph: boxes joined by arrows, its inputs blue, its results orange.

    nodes       {key: (x, y)} or {key: (x, y, label)}, TeX math allowed; leave a
                distance of about 1 between neighbors
    edges       pairs (from, to) of keys, or triples (from, to, label)
    highlight   edges (from, to) to draw thick and vermillion, such as a path of the
                chain rule
    """
    points = numbers("the positions of nodes", [at[:2] for at in nodes.values()], 2)
    places = dict(zip(nodes, points, strict=True))
    labels = {key: at[2] if len(at) > 2 else str(key) for key, at in nodes.items()}
    pairs = [tuple(edge[:2]) for edge in edges]
    highlight = {tuple(pair) for pair in highlight}
    stray = highlight - set(pairs)
    require(not stray, "highlight", "pairs that are edges", stray)

    low, high = points.min(axis=0) - 0.6, points.max(axis=0) + 0.6
    if ax is None:
        inch = min(WIDTH / (high[0] - low[0]), 1.1)
        width, height = (high - low) * inch
        _, ax = figure(width, height + (0.35 if title else 0))
    ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal", title=title)
    ax.axis("off")

    texts = {
        key: ax.text(*place, labels[key], fontsize=12, zorder=4, **_CENTER)
        for key, place in places.items()
    }
    ax.figure.draw_without_rendering()  # labels have a size once the layout is settled
    to_data = ax.transData.inverted()
    boxes = {}
    for key, text in texts.items():
        corners = to_data.transform(text.get_window_extent())
        wide, tall = np.maximum(corners[1] - corners[0] + 0.16, 0.4)
        entered, left = any(b == key for _, b in pairs), any(a == key for a, _ in pairs)
        fill = PAPER if entered == left else TINTS[0] if left else TINTS[1]
        look = {"facecolor": fill, "edgecolor": INK, "linewidth": 1.3, "zorder": 3}
        corner = places[key] - (wide / 2, tall / 2)
        look["boxstyle"] = "round,pad=0,rounding_size=0.1"
        boxes[key] = ax.add_patch(FancyBboxPatch(corner, wide, tall, **look))
    for edge, (a, b) in zip(edges, pairs, strict=True):
        strong = (a, b) in highlight
        color = VERMILLION if strong else INK
        bend = 0.22 if (b, a) in pairs else 0
        ends = {"patchA": boxes[a], "patchB": boxes[b], "shrinkA": 1, "shrinkB": 2}
        look = {"color": color, "linewidth": 2.6 if strong else 1.3, "zorder": 2}
        look |= {"connectionstyle": f"arc3,rad={bend}", "arrowstyle": "-|>"}
        look |= {"mutation_scale": 14, **ends}
        ax.add_patch(FancyArrowPatch(places[a], places[b], **look))
        if len(edge) > 2:
            # A bent arrow passes half its bend to the right of the straight line, and
            # its label is further right. The label of a straight arrow is above it, or
            # to the right of a vertical one.
            along = places[b] - places[a]
            aside = np.array([along[1], -along[0]]) / np.hypot(*along)
            if not bend and (aside[1], aside[0]) < (0, 0):
                aside = -aside
            far = bend / 2 * np.hypot(*along) + 0.17
            middle = (places[a] + places[b]) / 2 + far * aside
            ax.text(*middle, edge[2], fontsize=10, zorder=5, color=color, **_CENTER)
    return ax.figure


def tape(cells, *, itemsize=4, groups=None, per_row=8, title="", ax=None):
    """Memory as a tape: one cell an element, its offset in elements above, its address
    in bytes below.

    cells       what each element holds: numbers or texts
    itemsize    bytes of one element
    groups      {label: offsets} of up to six groups of cells, each in one color
    per_row     cells before the tape continues on the next line
    """
    cells = list(cells)
    require(cells, "cells", "at least one", "none")
    groups = groups or {}
    most = len(TINTS)
    require(len(groups) <= most, "groups", f"at most {most}", len(groups))
    tints = dict(zip(groups, TINTS, strict=False))
    fill = {offset: tints[label] for label in tints for offset in groups[label]}
    beyond = fill.keys() - set(range(len(cells)))
    require(not beyond, "groups", f"offsets from 0 to {len(cells) - 1}", beyond)

    wide, lines = min(per_row, len(cells)), math.ceil(len(cells) / per_row)
    pitch = 1.9
    if ax is None:
        inch = min(WIDTH / (wide + 0.4), 0.7)
        extra = (0.35 if title else 0) + (0.4 if groups else 0)
        _, ax = figure(max((wide + 0.4) * inch, 3.2), lines * pitch * inch + extra)
    for offset, cell in enumerate(cells):
        if not isinstance(cell, str):
            cell = f"{numbers(f'cells[{offset}]', cell, 0).item():g}"
        line, x = divmod(offset, per_row)
        y = -line * pitch
        look = {"facecolor": fill.get(offset, PAPER), "edgecolor": INK}
        ax.add_patch(Rectangle((x, y), 1, 1, linewidth=1.3, **look))
        ax.text(x + 0.5, y + 0.5, cell, fontsize=12, **_CENTER)
        small = {"ha": "center", "fontsize": 9}
        ax.text(x + 0.5, y + 1.08, str(offset), va="bottom", color=SLATE, **small)
        at = str(offset * itemsize)
        ax.text(x + 0.5, y - 0.08, at, va="top", color=BLUE, **small)
    bottom = -(lines - 1) * pitch - 0.5
    ax.set(xlim=(-0.2, wide + 0.2), ylim=(bottom, 1.5), aspect="equal", title=title)
    ax.axis("off")
    if groups:
        look = {"edgecolor": INK}
        marks = [Rectangle((0, 0), 1, 1, facecolor=t, **look) for t in tints.values()]
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0)}
        ax.legend(marks, list(groups), ncols=min(3, len(groups)), **place)
    return ax.figure


def curves(x, series, *, x_label, y_label, title="", log="", ax=None):
    """Lines over a shared x axis, each with a color and a marker of its own.

    x           [n]; the x axis marks exactly these values when it is logarithmic
    series      {label: y} with y [n], or {label: (x, y)} where a line has its own
                points; at most seven lines
    log         "", "x", "y" or "xy": the logarithmic axes (base 2 for x, base 10 for y)
    """
    require(log in ("", "x", "y", "xy"), "log", '"", "x", "y" or "xy"', repr(log))
    some = 1 <= len(series) <= len(CYCLE)
    require(some, "series", f"one to {len(CYCLE)} lines", len(series))
    x = numbers("x", x, 1)
    lines = {}
    for label, points in series.items():
        own, y = points if isinstance(points, tuple) else (x, points)
        own = numbers(f"the x of {label!r}", own, 1)
        where = f"series[{label!r}]"
        y = numbers(where, y, 1)
        require(own.shape == y.shape, where, f"{own.size} values", y.size)
        for name, data in (("x", own), ("y", y)):
            right = name not in log or (data > 0).all()
            require(right, where, f"{name} > 0 on a logarithmic axis", data)
        lines[label] = own, y
    if ax is None:
        _, ax = figure()
    known = [METHODS[label][1:] for label in lines if label in METHODS]
    looks = known if len(known) == len(lines) else zip(CYCLE, MARKERS, strict=True)
    for (label, (own, y)), (color, marker) in zip(lines.items(), looks, strict=False):
        ax.plot(own, y, label=label, color=color, marker=marker)
    if "x" in log:
        doubling(ax, x)
    if "y" in log:
        ax.set_yscale("log")
    ax.set(xlabel=x_label, ylabel=y_label, title=title)
    if len(lines) > 1:
        if ax.get_subplotspec().get_gridspec().ncols > 1:  # no space next to the axes
            ax.legend()
        else:
            label_directly(ax)
    return ax.figure


# {kind of work: (label, color, where in its row: 1 the upper half, 0 the lower half or
# all of it)}
TIMELINE = {
    "QK": ("$QK^\\top$", BLUE, 1),
    "PV": ("$PV$", SKY, 1),
    "softmax": ("softmax", ORANGE, 0),
    "copy": ("copy", GREEN, 1),
    "issue": ("issuing products", "#b9a2c9", 0),
    "wait": ("waiting", "#e4e4e4", 0),
    "launch": ("launch, end", "#a9a9a9", 0),
    "finish": ("launch, end", "#a9a9a9", 0),
}


def timeline(jobs, *, begin=0, end=None, title="", legend=True, ax=None):
    """Which agent does what when: a row for each agent, a bar for each job, its color
    the kind of work.

    jobs            [(agent, kind, label, begin, end)] in clocks, as
                    `flashlib.timeline.Trace.rows` gives, of the kinds of `TIMELINE`
    begin, end      what is drawn of the time; by default all

    Products and copies run next to what their agent does, so a row that has them has
    two halves: they above, the rest below.
    """
    jobs = list(jobs)
    times = numbers("the times of jobs", [job[3:] for job in jobs], 2)
    forward = (times[:, 1] >= times[:, 0]).all()
    require(forward, "jobs", "each to begin before it ends", "one reversed")
    unknown = {job[1] for job in jobs} - TIMELINE.keys()
    require(not unknown, "kind", f"one of {', '.join(TIMELINE)}", unknown)
    end = float(times[:, 1].max()) if end is None else end
    shown = [job for job in jobs if begin < end and job[3] < end and job[4] > begin]
    require(shown, "jobs", f"some between {begin} and {end}", "none")
    agents = list(dict.fromkeys(job[0] for job in jobs))
    if ax is None:
        _, ax = figure(WIDTH, 0.75 * len(agents) + 1.3)
    halved = {job[0] for job in jobs if TIMELINE[job[1]][2]}
    for agent, kind, label, first, last in shown:
        _, color, upper = TIMELINE[kind]
        height = 0.4 if agent in halved else 0.8
        bottom = agents.index(agent) - (0.4 if upper or agent not in halved else 0)
        first, last = max(first, begin), min(last, end)
        look = {"facecolor": color, "edgecolor": PAPER, "linewidth": 0.8}
        ax.add_patch(Rectangle((first, bottom), last - first, height, **look))
        # A letter of 8.5 pt takes about a sixtieth of the width of the axes.
        if label and (last - first) / (end - begin) > 0.016 * len(label) + 0.006:
            middle = ((first + last) / 2, bottom + height / 2)
            ink = _ink_on(matplotlib.colors.to_rgb(color))
            ax.text(*middle, label, fontsize=8.5, color=ink, **_CENTER)
    ax.set(xlim=(begin, end), ylim=(len(agents) - 0.4, -0.6), xlabel="clocks")
    ax.set_title(title)
    ax.set_yticks(range(len(agents)), agents)
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    ax.spines["left"].set_visible(False)
    if legend:
        kinds = {job[1] for job in shown}
        looks = [look for kind, look in TIMELINE.items() if kind in kinds]
        _legend_above(ax.figure, {name: color for name, color, _ in looks}, ncols=3)
    return ax.figure


def _legend_above(figure, colors, ncols, **edge):
    patches = [Patch(facecolor=color, **edge) for color in colors.values()]
    look = {"loc": "outside upper center", "ncols": ncols, "fontsize": 9}
    figure.legend(patches, colors.keys(), **look)


def _ticks(name, labels, count):
    """Tick positions and labels, at most 12, evenly spaced from the first one on."""
    labels = range(count) if labels is None else labels
    require(len(labels) == count, name, f"{count} labels", len(labels))
    shown = range(0, count, math.ceil(count / 12))
    return shown, [str(labels[i]) for i in shown]


def _ink_on(color):
    """Black or white, whichever contrasts more with an RGB color (by WCAG 2)."""
    c = np.asarray(color[:3])
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    luminance = linear @ (0.2126, 0.7152, 0.0722)
    return "#000000" if luminance > 0.179 else "#ffffff"
