"""Figures in the house style. Draws the arrays, counts and measurements that it is given.

    figure(width, height, rows, columns)    an empty styled figure and its axes, for anything not below
    matrix(values)                          a heat map with the numbers in its cells
    mask(seen, rows, columns)               which keys each query sees, and what that makes of the tiles
    graph(nodes, edges)                     a computation graph with arrows
    tape(cells)                             memory as one row of cells with offsets and byte addresses
    curves(x, series)                       lines over a shared x axis, labelled
    ladder(record, d, direction)            measured speed of every kernel over the sequence length
    memory(record)                          measured memory of every kernel over the sequence length
    timeline(jobs)                          who does what when, and who waits

Each function returns the `Figure` (a matplotlib figure); as the last expression of a notebook cell it shows
itself. With `ax=` it draws into an axes of a `figure()` of yours instead of a new one.
The background is opaque white, so that a dark page changes nothing; the colours are those of Okabe and Ito,
which colour-blind readers can tell apart (https://jfly.uni-koeln.de/color/); fonts ship with matplotlib, so
that every machine draws the same; the PNG carries neither date nor version, so that drawing twice gives the
same bytes. Empty or non-finite data raises ValueError: a figure never hides a NaN.
"""

import io
import math

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure as _Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle

INK, GREY, PAPER = "#1a1a1a", "#8c8c8c", "#ffffff"
BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, YELLOW = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
)
CYCLE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, INK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

WIDTH = 5.6  # inches: with 11 pt text a phone of 360 px still shows 9 px letters
DPI = 150

STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "mathtext.fontset": "dejavusans",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.prop_cycle": matplotlib.cycler(color=CYCLE, marker=MARKERS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e0e0e0",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "legend.frameon": False,
}

# A pair of a mask, by what a kernel does with its tile.
MASK_COLOURS = (
    ("#f2f2f2", "tile not read"),
    ("#f7dcc9", "read, but hidden"),
    (VERMILLION, "seen, tile masked"),
    (SKY, "seen, tile whole"),
)

_POSITIVE = LinearSegmentedColormap.from_list("positive", [PAPER, SKY, BLUE])
_SIGNED = LinearSegmentedColormap.from_list("signed", [VERMILLION, PAPER, BLUE])


class Figure(_Figure):
    """A matplotlib figure that a notebook shows by itself, as a PNG with the same bytes every time."""

    def png(self, **text):
        """The PNG's bytes: the picture and the `text` entries of its text chunk; no version, no date."""
        # Constrained layout moves axes of a fixed aspect a little with every drawing: settle it, then keep
        # it.
        self.draw_without_rendering()
        self.set_layout_engine("none")
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None, **text})
        return buffer.getvalue()

    def _repr_png_(self):
        return self.png()

    def __repr__(self):
        # Stands in the committed text output of a cell: nothing in it may depend on the matplotlib version.
        return f"Figure({self.get_figwidth():g} x {self.get_figheight():g} in)"


def figure(width=WIDTH, height=3.4, rows=1, columns=1):
    """An empty figure in the house style.

    width, height   inches, positive
    rows, columns   of axes, at least 1

    Returns (figure, axes): one matplotlib Axes when rows = columns = 1, else an array of them, one- or
    two-dimensional as `matplotlib.figure.Figure.subplots` gives it. Sets matplotlib's rcParams to the house
    style, so that whatever is drawn afterwards has it too. ValueError for a size or a number that is not
    positive.
    """
    for name, size in (("width", width), ("height", height)):
        if not (math.isfinite(size) and size > 0):
            raise ValueError(f"{name} must be a positive number of inches, got {size}")
    for name, count in (("rows", rows), ("columns", columns)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    matplotlib.rcParams.update(STYLE)
    picture = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(picture)
    return picture, picture.subplots(rows, columns)


def matrix(values, *, title="", rows=None, columns=None, hidden=None, digits=2, ax=None):
    """A heat map of a matrix with its numbers in the cells; above 12 columns the colours alone.

    values          [m, n], real, integer or bool, finite where it is not hidden; n, m >= 1
    title           text above, TeX maths allowed (`r"$P$"`)
    rows, columns   labels of the m rows and of the n columns; by default their indices
    hidden          bool [m, n]: True where a cell is drawn empty and hatched, for instance a masked score of
                    -inf
    digits          decimals of a real number

    White is zero, blue positive, vermillion negative. Raises ValueError on an empty or non-finite matrix and
    on labels or a `hidden` of another size.
    """
    values = _numbers("values", values, 2, finite=hidden is None)
    m, n = values.shape
    if hidden is None:
        hidden = np.zeros((m, n), dtype=bool)
    hidden = np.asarray(hidden)
    if hidden.dtype != bool or hidden.shape != values.shape:
        raise ValueError(
            f"hidden must be bool of shape {values.shape}, got {hidden.dtype} of shape {hidden.shape}"
        )
    if hidden.all():
        raise ValueError("hidden leaves no cell of values to draw")
    seen = _numbers("values where hidden is False", values[~hidden], 1)
    rows = _labels("rows", rows, m)
    columns = _labels("columns", columns, n)
    if ax is None:
        side = min(WIDTH / (n + 1.5), 0.85)
        _, ax = figure((n + 1.5) * side, (m + (1.5 if title else 1)) * side)

    integral = values.dtype.kind in "biu"
    largest = float(np.abs(seen.astype(float)).max()) or 1.0
    signed = bool((seen < 0).any())
    shown = np.ma.masked_array(np.where(hidden, 0, values).astype(float), hidden)
    image = ax.imshow(
        shown,
        cmap=_SIGNED if signed else _POSITIVE,
        vmin=-largest if signed else 0,
        vmax=largest,
        aspect="equal",
        interpolation="nearest",
    )
    for i in range(m):
        for j in range(n):
            if hidden[i, j]:
                ax.add_patch(
                    Rectangle(
                        (j - 0.5, i - 0.5), 1, 1, facecolor="#f2f2f2", edgecolor=GREY, hatch="//", linewidth=0
                    )
                )
            elif n <= 12:
                text = f"{int(values[i, j])}" if integral else f"{values[i, j]:z.{digits}f}"  # z: no "-0.00"
                ax.text(
                    j,
                    i,
                    text,
                    ha="center",
                    va="center",
                    color=_ink_on(image.to_rgba(shown[i, j])),
                    fontsize=11 if n <= 6 else 9,
                )
    ax.set_xticks(*_thinned(columns))
    ax.set_yticks(*_thinned(rows))
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
    """A mask as a kernel in tiles meets it: tiles that nobody sees, tiles that are cut, whole tiles.

    seen            bool [T_q, T_k], True where the query of a row sees the key of a column
    rows, columns   where tiles begin: their size, or the rising list of their starts, the first of them 0
    title           text above, TeX maths allowed
    legend          whether the picture names the colours, above all its axes

    Blue pairs stand in tiles of which every pair is seen; vermillion pairs in tiles of which some pairs are
    seen, the others of them pale; a grey tile need not be read. ValueError for a mask that is empty, and for
    tiles that do not begin at 0 and rise.
    """
    seen = np.asarray(seen)
    if seen.dtype != bool or seen.ndim != 2 or seen.size == 0:
        raise ValueError(f"seen must be a bool matrix that is not empty, got {seen.dtype} {seen.shape}")
    starts = [
        _starts(name, tiles, size)
        for name, tiles, size in (("rows", rows, seen.shape[0]), ("columns", columns, seen.shape[1]))
    ]
    if ax is None:
        side = min(WIDTH / (seen.shape[1] + 3), 0.3)
        # The names of the colours need room of their own.
        width = max((seen.shape[1] + 3) * side, 4.2 if legend else 0)
        _, ax = figure(width, (seen.shape[0] + 3) * side + 0.8)
    kinds = np.zeros(seen.shape, dtype=int)
    for top, bottom in zip(starts[0], [*starts[0][1:], seen.shape[0]], strict=True):
        for left, right in zip(starts[1], [*starts[1][1:], seen.shape[1]], strict=True):
            tile = seen[top:bottom, left:right]
            read = 3 if tile.all() else 1 + tile if tile.any() else 0
            kinds[top:bottom, left:right] = read
    edges = [[*at, size] for at, size in zip(starts, seen.shape, strict=True)]
    ax.pcolormesh(
        np.arange(seen.shape[1] + 1),
        np.arange(seen.shape[0] + 1),
        kinds,
        cmap=ListedColormap([colour for colour, _ in MASK_COLOURS]),
        vmin=0,
        vmax=3,
        edgecolor="white",
        linewidth=0.3,
    )
    ax.vlines(edges[1], 0, seen.shape[0], color=INK, linewidth=0.8)
    ax.hlines(edges[0], 0, seen.shape[1], color=INK, linewidth=0.8)
    ax.set(aspect="equal", anchor="N", xlim=(0, seen.shape[1]), ylim=(seen.shape[0], 0), xticks=[], yticks=[])
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set(xlabel="key", ylabel="query")
    ax.set_title(title, fontsize=10)
    if legend:
        handles = [Patch(facecolor=colour, edgecolor=GREY) for colour, _ in MASK_COLOURS]
        names = [name for _, name in MASK_COLOURS]
        ax.figure.legend(handles, names, loc="outside upper center", ncols=2, fontsize=9)
    return ax.figure


def _starts(name, tiles, size):
    """Where tiles begin, from their size or from the list itself."""
    if isinstance(tiles, int | np.integer):
        if tiles < 1:
            raise ValueError(f"{name} must be at least 1, got {tiles}")
        return list(range(0, size, tiles))
    starts = [int(start) for start in tiles]
    rising = all(a < b for a, b in zip(starts, [*starts[1:], size], strict=True))
    if not starts or starts[0] != 0 or not rising:
        raise ValueError(f"{name} must begin at 0 and rise below {size}, got {starts}")
    return starts


def graph(nodes, edges, *, title="", highlight=(), ax=None):
    """A computation graph: boxes joined by arrows.

    nodes       {key: (x, y)} or {key: (x, y, label)}; the label is the key unless given, TeX maths allowed
                (`r"$S_{11}$"`); leave a distance of about 1 between neighbours
    edges       pairs (from, to) of keys, or triples (from, to, label)
    highlight   pairs (from, to) of edges to draw thick and vermillion, for instance one path of the chain
                rule

    Nodes that no edge enters (the inputs) are filled blue, nodes that no edge leaves (the results) orange.
    Two edges between the same nodes in opposite directions are bent apart. Raises ValueError on an empty
    graph, a position that is not finite, an edge to an unknown node, or a highlighted pair that is no edge.
    """
    if not nodes:
        raise ValueError("nodes is empty: there is nothing to draw")
    places = {key: _numbers(f"the position of node {key!r}", node[:2], 1) for key, node in nodes.items()}
    labels = {key: node[2] if len(node) > 2 else str(key) for key, node in nodes.items()}
    pairs = [tuple(edge[:2]) for edge in edges]
    for pair in pairs:
        for key in pair:
            if key not in nodes:
                raise ValueError(f"edge {pair} names a node that is not in nodes: {key!r}")
    highlight = {tuple(pair) for pair in highlight}
    if not highlight <= set(pairs):
        raise ValueError(f"highlight holds pairs that are no edges: {sorted(highlight - set(pairs))}")

    points = np.stack(list(places.values()))
    low, high = points.min(axis=0) - 0.6, points.max(axis=0) + 0.6
    if ax is None:
        inch = min(WIDTH / (high[0] - low[0]), 1.1)
        _, ax = figure((high[0] - low[0]) * inch, (high[1] - low[1]) * inch + (0.35 if title else 0))
    ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal", title=title)
    ax.axis("off")

    texts = {
        key: ax.text(*place, labels[key], ha="center", va="center", fontsize=12, zorder=4)
        for key, place in places.items()
    }
    ax.figure.draw_without_rendering()  # settles the layout: only now do the labels have a size
    to_data = ax.transData.inverted()
    boxes = {}
    for key, text in texts.items():
        corners = to_data.transform(text.get_window_extent())
        wide, tall = np.maximum(corners[1] - corners[0] + 0.16, 0.4)
        entered, left = any(b == key for _, b in pairs), any(a == key for a, _ in pairs)
        fill = PAPER if entered == left else ("#cfe5f3" if left else "#fbe3b8")
        boxes[key] = ax.add_patch(
            FancyBboxPatch(
                places[key] - (wide / 2, tall / 2),
                wide,
                tall,
                boxstyle="round,pad=0,rounding_size=0.1",
                facecolor=fill,
                edgecolor=INK,
                linewidth=1.3,
                zorder=3,
            )
        )
    for edge, (a, b) in zip(edges, pairs, strict=True):
        strong = (a, b) in highlight
        bend = 0.22 if (b, a) in pairs else 0
        ax.add_patch(
            FancyArrowPatch(
                places[a],
                places[b],
                patchA=boxes[a],
                patchB=boxes[b],
                shrinkA=1,
                shrinkB=2,
                connectionstyle=f"arc3,rad={bend}",
                arrowstyle="-|>",
                mutation_scale=14,
                color=VERMILLION if strong else INK,
                linewidth=2.6 if strong else 1.3,
                zorder=2,
            )
        )
        if len(edge) > 2:
            # A bent arrow passes half its bend to the right of the straight line: its label goes further
            # right. The label of a straight arrow stands above it, or to the right of a vertical one.
            along = places[b] - places[a]
            aside = np.array([along[1], -along[0]]) / np.hypot(*along)
            if not bend and (aside[1], aside[0]) < (0, 0):
                aside = -aside
            middle = (places[a] + places[b]) / 2 + (bend / 2 * np.hypot(*along) + 0.17) * aside
            ax.text(
                *middle,
                edge[2],
                ha="center",
                va="center",
                fontsize=10,
                zorder=5,
                color=VERMILLION if strong else INK,
            )
    return ax.figure


def tape(cells, *, start=0, itemsize=4, groups=None, per_row=8, title="", ax=None):
    """Memory as a tape: one cell an element, its offset in elements above, its address in bytes below.

    cells       what each element holds: numbers or texts, at least one; a number must be finite
    start       byte address of the first cell, an integer >= 0
    itemsize    bytes of one element, an integer >= 1
    groups      {label: offsets}: cells to fill with one colour each, for instance the rows of a matrix; at
                most six
    per_row     cells before the tape continues on the next line

    Raises ValueError on an empty tape, a non-finite number, or an offset in `groups` that the tape does not
    have.
    """
    cells = list(cells)
    if not cells:
        raise ValueError("cells is empty: a tape needs at least one cell")
    for name, value, least in (("start", start, 0), ("itemsize", itemsize, 1), ("per_row", per_row, 1)):
        if value < least or value != int(value):
            raise ValueError(f"{name} must be an integer of at least {least}, got {value}")
    groups = dict(groups or {})
    tints = ("#cfe5f3", "#fbe3b8", "#c9ebdf", "#f4dbe8", "#f9f3b0", "#f7d5bf")
    if len(groups) > len(tints):
        raise ValueError(f"groups may hold at most {len(tints)} colours, got {len(groups)}")
    fill = {}
    for tint, (label, offsets) in zip(tints, groups.items(), strict=False):
        for offset in offsets:
            if not 0 <= offset < len(cells):
                raise ValueError(
                    f"groups[{label!r}] names offset {offset}: the tape has offsets 0 to {len(cells) - 1}"
                )
            fill[offset] = tint

    wide, lines = min(per_row, len(cells)), math.ceil(len(cells) / per_row)
    pitch = 1.9
    if ax is None:
        inch = min(WIDTH / (wide + 0.4), 0.7)
        _, ax = figure(
            max((wide + 0.4) * inch, 3.2),
            lines * pitch * inch + (0.35 if title else 0) + (0.4 if groups else 0),
        )
    for offset, cell in enumerate(cells):
        if not isinstance(cell, str):
            cell = f"{_numbers(f'cells[{offset}]', cell, 0).item():g}"
        line, x = divmod(offset, per_row)
        y = -line * pitch
        ax.add_patch(Rectangle((x, y), 1, 1, facecolor=fill.get(offset, PAPER), edgecolor=INK, linewidth=1.3))
        ax.text(x + 0.5, y + 0.5, cell, ha="center", va="center", fontsize=12)
        ax.text(x + 0.5, y + 1.08, str(offset), ha="center", va="bottom", fontsize=9, color="#595959")
        ax.text(
            x + 0.5, y - 0.08, str(start + offset * itemsize), ha="center", va="top", fontsize=9, color=BLUE
        )
    ax.set(xlim=(-0.2, wide + 0.2), ylim=(-(lines - 1) * pitch - 0.5, 1.5), aspect="equal", title=title)
    ax.axis("off")
    if groups:
        marks = [
            Rectangle((0, 0), 1, 1, facecolor=tint, edgecolor=INK)
            for tint, _ in zip(tints, groups, strict=False)
        ]
        ax.legend(marks, list(groups), loc="upper center", bbox_to_anchor=(0.5, 0), ncols=min(3, len(groups)))
    return ax.figure


def curves(x, series, *, x_label, y_label, title="", log="", ax=None):
    """Lines over a shared x axis, each with a colour and a marker of its own.

    x           [n], finite, n >= 1; the x axis marks exactly these values when it is logarithmic
    series      {label: y} with y [n] finite, or {label: (x, y)} where a line has its own points; at most
                seven lines
    log         "", "x", "y" or "xy": the logarithmic axes (base 2 for x, base 10 for y; their data must be
                positive)

    Raises ValueError on empty or non-finite data, on lengths that differ, and on data <= 0 for a logarithmic
    axis.
    """
    if log not in ("", "x", "y", "xy"):
        raise ValueError(f'log must be "", "x", "y" or "xy", got {log!r}')
    if not 1 <= len(series) <= len(CYCLE):
        raise ValueError(f"series must hold one to {len(CYCLE)} lines, got {len(series)}")
    x = _numbers("x", x, 1)
    lines = {}
    for label, points in series.items():
        own, y = points if isinstance(points, tuple) else (x, points)
        own, y = _numbers(f"the x of {label!r}", own, 1), _numbers(f"series[{label!r}]", y, 1)
        if own.shape != y.shape:
            raise ValueError(f"series[{label!r}] has {y.size} values for {own.size} places on the x axis")
        for name, axis, data in (("x", "x", own), ("y", "y", y)):
            if axis in log and (data <= 0).any():
                raise ValueError(f"series[{label!r}] has {name} <= 0 on a logarithmic axis")
        lines[label] = own, y
    if ax is None:
        _, ax = figure()
    for label, (own, y) in lines.items():
        ax.plot(own, y, label=label)
    if "x" in log:
        _doubling(ax, x)
    if "y" in log:
        ax.set_yscale("log")
    ax.set(xlabel=x_label, ylabel=y_label, title=title)
    if len(lines) > 1:
        ax.legend()
    return ax.figure


# {method: (label, colour, marker)}: a method looks the same in every figure.
LADDER = {
    "standard": ("standard (materialised)", BLUE, "o"),
    "flash1": ("flash1", PURPLE, "v"),
    "algorithm-5": ("Algorithm 5, row by row", SKY, "X"),
    "algorithm-6": ("Algorithm 6, queries outside", INK, "P"),
    "swapped": ("1. loops swapped", SKY, "X"),
    "parallel": ("2. parallel over queries", ORANGE, "D"),
    "deferred": ("3. divided once", GREEN, "^"),
    "skipping": ("4. blocks skipped", INK, "P"),
    "flash2": ("flash2", VERMILLION, "s"),
    "flash2-atomic": ("flash2, atomics", PURPLE, "D"),
    "hopper": ("hopper", INK, "X"),
    "hopper-atomic": ("hopper, atomics", SKY, "v"),
    "sdpa-flash": ("PyTorch, FlashAttention-2", GREEN, "^"),
    "sdpa-cudnn": ("PyTorch, cuDNN", ORANGE, "D"),
}
DIRECTIONS = {
    "forward": "forward",
    "backward": "backward",
    "forward+backward": "forward and backward",
}


def ladder(record, d=128, direction="forward"):
    """The ladder of kernels: measured speed over the sequence length, without and with the causal mask.

    record      a record with a ladder: `flashlib.records.Record` or `Tiles`; what is drawn is
                ``record.ladder(d, causal, direction)``
    d           head dimension, one of the record's
    direction   "forward", "backward" or "forward+backward", one of the record's

    The kernels of `LADDER` that the record has, TFLOP/s by the record's own rule; GPU, versions and date
    stand below. A cell that could not be measured leaves a gap. Raises ValueError when the record has no
    measured cell for d and direction, and for an unknown direction.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, got {direction!r}")
    lines = {causal: record.ladder(d, causal, direction) for causal in (False, True)}
    for causal, found in lines.items():
        if not found.keys() & LADDER.keys():
            raise ValueError(
                f"the record {record.name!r} has no measured contiguous cell with d = {d}, "
                f"causal = {causal}, direction {direction}"
            )
    picture, axes = figure(WIDTH, 6.6, rows=2)
    drawn = [method for method in LADDER if method in lines[False] or method in lines[True]]
    lengths = sorted({T for found in lines.values() for points in found.values() for T, _ in points})
    handles = {}
    for ax, (causal, found) in zip(axes, lines.items(), strict=True):
        for method in drawn:
            label, colour, marker = LADDER[method]
            if method in found:
                T, tflops = (_numbers(method, x, 1) for x in zip(*found[method], strict=True))
                (handles[label],) = ax.plot(T, tflops, color=colour, marker=marker)
        _doubling(ax, lengths)
        ax.set(ylabel="TFLOP/s", ylim=(0, 1.08 * ax.dataLim.y1), xlabel="sequence length $T$")
        ax.set_title(f"{DIRECTIONS[direction]}, $d = {d}$, {'causal' if causal else 'no mask'}")
        ax.label_outer()
    labels = [LADDER[method][0] for method in drawn]
    picture.legend([handles[label] for label in labels], labels, loc="outside upper center", ncols=2)
    picture.supxlabel(record.provenance(), fontsize=8.5, color="#595959")
    return picture


def memory(record):
    """The peak of device memory during a call, above its inputs and output, over the sequence length.

    record      a `flashlib.records.Record`; its ``memory`` is drawn, and its ``memory_provenance()`` stands
                below

    Both axes are logarithmic: on them O(T) has slope one and O(T^2) slope two. A length at which a method
    could not run has no point. Raises ValueError when nothing was measured.
    """
    points = {}
    for cell in record.memory:
        if "extra_bytes" in cell:
            points.setdefault(cell["method"], []).append((cell["T_q"], cell["extra_bytes"] / 2**20))
    if not points:
        raise ValueError(f"the record {record.name!r} has no measured memory")
    picture, ax = figure(WIDTH, 3.8)
    for method, (label, colour, marker) in LADDER.items():
        if method in points:
            T, mib = (_numbers(method, x, 1) for x in zip(*sorted(points[method]), strict=True))
            ax.plot(T, mib, color=colour, marker=marker, label=label)
    _doubling(ax, sorted({T for line in points.values() for T, _ in line}))
    ax.set_yscale("log")
    directions = dict.fromkeys(DIRECTIONS[cell["direction"]] for cell in record.memory)
    ax.set(xlabel="sequence length $T$", ylabel="extra memory, MiB", title=", ".join(directions))
    picture.legend(loc="outside upper center", ncols=2)
    picture.supxlabel(record.memory_provenance(), fontsize=8.5, color="#595959")
    return picture


# {kind of work: (label, colour, where in its row: 1 the upper half, 0 the lower half or all of it)}
TIMELINE = {
    "QK": ("$QK^\\top$", BLUE, 1),
    "PV": ("$PV$", SKY, 1),
    "softmax": ("softmax", ORANGE, 0),
    "copy": ("copy", GREEN, 1),
    "wait": ("waits", "#e4e4e4", 0),
    "launch": ("launch, end", "#a9a9a9", 0),
    "finish": ("launch, end", "#a9a9a9", 0),
}


def timeline(jobs, *, begin=0, end=None, title="", x_label="clocks", legend=True, ax=None):
    """Who does what when: a row for each agent, a bar for each job, its colour the kind of work.

    jobs            [(agent, kind, label, begin, end)], such as `flashlib.iomodel.timeline.Trace.rows` gives;
                    kinds are those of `TIMELINE`; rows stand in the order in which agents first appear
    begin, end      what is drawn of the time; by default all
    title, x_label  texts above and below
    legend          whether the picture names the colours, above all its axes

    Products and copies run beside what their agent does, so a row that has them has two halves: they above,
    the rest below. The label stands in a bar that is long enough for it. ValueError for no job, for a kind
    that is unknown, for a time that is not finite or runs backwards, and for a window without a job.
    """
    jobs = list(jobs)
    if not jobs:
        raise ValueError("jobs is empty: there is nothing to draw")
    times = _numbers("the times of jobs", [job[3:] for job in jobs], 2)
    if (times[:, 1] < times[:, 0]).any():
        raise ValueError("jobs holds one that ends before it begins")
    unknown = {job[1] for job in jobs} - TIMELINE.keys()
    if unknown:
        raise ValueError(f"a kind must be one of {', '.join(TIMELINE)}, got {sorted(unknown)[0]!r}")
    end = float(times[:, 1].max()) if end is None else end
    if not end > begin:
        raise ValueError(f"end must be after begin = {begin}, got {end}")
    agents = list(dict.fromkeys(job[0] for job in jobs))
    shown = [job for job in jobs if job[3] < end and job[4] > begin]
    if not shown:
        raise ValueError(f"no job runs between {begin} and {end}")
    if ax is None:
        _, ax = figure(WIDTH, 0.75 * len(agents) + 1.3)
    halved = {job[0] for job in jobs if TIMELINE[job[1]][2]}
    for agent, kind, label, first, last in shown:
        _, colour, upper = TIMELINE[kind]
        height = 0.4 if agent in halved else 0.8
        bottom = agents.index(agent) - (0.4 if upper or agent not in halved else 0)
        first, last = max(first, begin), min(last, end)
        ax.add_patch(
            Rectangle((first, bottom), last - first, height, facecolor=colour, edgecolor=PAPER, linewidth=0.8)
        )
        # A letter of 7 pt takes about a hundredth of the width of the axes.
        if label and (last - first) / (end - begin) > 0.013 * len(label) + 0.006:
            ax.text(
                (first + last) / 2,
                bottom + height / 2,
                label,
                ha="center",
                va="center",
                fontsize=7,
                color=_ink_on(matplotlib.colors.to_rgb(colour)),
            )
    ax.set(xlim=(begin, end), ylim=(len(agents) - 0.4, -0.6), xlabel=x_label)
    ax.set_title(title)
    ax.set_yticks(range(len(agents)), agents)
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    ax.spines["left"].set_visible(False)
    if legend:
        kinds = {TIMELINE[kind][:2]: None for kind in TIMELINE if kind in {job[1] for job in shown}}
        handles = [Patch(facecolor=colour) for _, colour in kinds]
        names = [name for name, _ in kinds]
        ax.figure.legend(handles, names, loc="outside upper center", ncols=3, fontsize=9)
    return ax.figure


def _doubling(ax, lengths):
    """A logarithmic x axis that marks exactly these lengths."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [_short(length) for length in lengths])
    ax.minorticks_off()


def _numbers(name, values, dimensions, finite=True):
    """`values` as a numpy array with so many dimensions; ValueError unless there are finite numbers in it."""
    values = np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{name} must hold real numbers, got {values.dtype}")
    if values.ndim != dimensions:
        raise ValueError(f"{name} must have {dimensions} dimension(s), got shape {values.shape}")
    if values.size == 0:
        raise ValueError(f"{name} is empty (shape {values.shape}): there is nothing to draw")
    if finite and not np.isfinite(values).all():
        raise ValueError(f"{name} holds {int((~np.isfinite(values)).sum())} value(s) that are not finite")
    return values


def _labels(name, labels, count):
    labels = [str(i) for i in range(count)] if labels is None else [str(label) for label in labels]
    if len(labels) != count:
        raise ValueError(f"{name} must hold {count} labels, got {len(labels)}")
    return labels


def _thinned(labels):
    """Tick positions and labels, at most 12 of them, evenly spaced from the first one on."""
    step = math.ceil(len(labels) / 12)
    return range(0, len(labels), step), labels[::step]


def _ink_on(colour):
    """Black or white, whichever stands out more from an RGB colour (relative luminance of WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"


def _short(value):
    """512 as "512", 16384 as "16k"."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
