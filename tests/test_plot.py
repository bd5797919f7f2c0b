"""The figures: the same bytes every time, readable, never of non-finite data."""

import itertools
import math

import matplotlib
import numpy as np
import pytest
from matplotlib.text import Text

from flashlib import canvas, plot, records

NODES = {"Q": (0, 1, "$Q$"), "K": (0, 0), "S": (1.5, 0.5)}
EDGES = [("Q", "S"), ("K", "S", "dot"), ("S", "Q")]

JOBS = [
    ("producer", "copy", "K0", 0, 10),
    ("group 0", "wait", "full", 0, 10),
    ("group 0", "QK", "0", 10, 20.5),
    ("group 0", "softmax", "S0", 20.5, 30),
]


FORWARD = records.load("forward")


def line(series=None, **options):
    series = series or {"a": [1, 2]}
    return plot.curves([1, 2], series, x_label="x", y_label="y", **options)


def hidden():
    return np.triu(np.ones((3, 3), dtype=bool), 1)


def masked_scores():
    s = np.arange(9.0).reshape(3, 3) - 4
    s[hidden()] = -math.inf
    return s


FIGURES = {
    "matrix": lambda: plot.matrix([[0.5, -1.25], [2.0, 0.0]], title="$S$", rows="ab"),
    "matrix of one": lambda: plot.matrix([[0]]),
    "matrix of bool": lambda: plot.matrix(hidden()),
    "matrix hidden": lambda: plot.matrix(masked_scores(), hidden=hidden()),
    "matrix large": lambda: plot.matrix(np.eye(40)),
    "mask": lambda: plot.mask(~hidden(), rows=2, columns=2, title="causal"),
    "mask of starts": lambda: plot.mask(~hidden(), rows=[0, 1], columns=[0, 2]),
    "graph": lambda: plot.graph(NODES, EDGES, title="graph", highlight=[("Q", "S")]),
    "graph of one": lambda: plot.graph({"x": (0, 0)}, []),
    "tape": lambda: plot.tape(range(11), groups={"row 0": [0, 1], "1": [3]}, title="A"),
    "tape of texts": lambda: plot.tape(["a", "b", ""], itemsize=2),
    "curves": lambda: line(series={"a": [1, 2], "b": ([1, 4], [2, 9])}),
    "curves log": lambda: line(log="xy"),
    "ladder": lambda: plot.ladder(FORWARD),
    "ladder of steps": lambda: plot.ladder(records.load("steps"), 64),
    "ladder backward": lambda: plot.ladder(records.load("backward"), 128, "backward"),
    "ladder of eager calls": lambda: plot.ladder(records.load("host"), mode="eager"),
    "memory": lambda: plot.memory(FORWARD),
    "timeline": lambda: plot.timeline(JOBS, title="two agents"),
    "timeline of a part": lambda: plot.timeline(JOBS, begin=5, end=25),
}


@pytest.mark.parametrize("name", ("matrix", "mask", "graph", "curves", "memory"))
def test_a_figure_is_the_same_text_every_time(name):
    picture = FIGURES[name]()
    first = picture.svg()
    assert first.startswith("<svg")
    with matplotlib.rc_context(
        {"font.size": 30, "axes.facecolor": "black", "savefig.facecolor": "black"}
    ):
        assert FIGURES[name]().svg() == first
    assert "metadata" not in first and "Matplotlib" not in first
    assert repr(picture).startswith("Figure(") and "0x" not in repr(picture)


def test_a_picture_of_many_marks_is_a_png(monkeypatch):
    picture = FIGURES["matrix"]()
    assert set(picture._picture()) == {"image/svg+xml"}
    monkeypatch.setattr(canvas, "MOST_SVG", 100)
    png = picture._picture()["image/png"]
    assert png.startswith(b"\x89PNG") and picture.png() == png
    assert b"Software" not in png and b"matplotlib" not in png


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_transparent_readable_and_all_inside(name):
    picture = FIGURES[name]()
    picture.settle()
    grounds = [picture.get_facecolor(), *(ax.get_facecolor() for ax in picture.axes)]
    assert {color[3] for color in grounds} == {0}
    assert picture.get_figwidth() <= plot.WIDTH + 0.01
    drawn, page = picture.get_tightbbox(), picture.bbox_inches
    assert min(drawn.x0, drawn.y0) > -0.01
    assert drawn.x1 < page.width + 0.01 and drawn.y1 < page.height + 0.01
    texts = [text for text in picture.findobj(Text) if text.get_text()]
    caption = 0.9 * 16 * 72 / canvas.PIXELS  # points, of book/_static/figures.css
    assert min((text.get_fontsize() for text in texts), default=9) >= caption


def values(ax):
    return {text.get_text() for text in ax.texts}


def test_a_matrix_shows_its_numbers():
    ax = plot.matrix([[0.5, -1.256], [2.0, -0.001]]).axes[0]
    assert values(ax) == {"0.50", "-1.26", "2.00", "0.00"}
    assert values(plot.matrix([[1, 20]]).axes[0]) == {"1", "20"}
    assert values(plot.matrix([[0.123]], digits=3).axes[0]) == {"0.123"}
    assert len(plot.matrix(masked_scores(), hidden=hidden()).axes[0].texts) == 6
    assert not plot.matrix(np.eye(13)).axes[0].texts


def test_a_mask_tells_tiles_apart():
    seen = np.tril(np.ones((4, 4), dtype=bool))
    seen[3, 0] = False

    def kinds(**tiles):
        cells, *_ = plot.mask(seen, **tiles).axes[0].collections
        return ["".join(map(str, row)) for row in cells.get_array().reshape(4, 4)]

    assert kinds(rows=2, columns=2) == ["2100", "2200", "2221", "1222"]
    assert kinds(rows=[0, 1, 3], columns=[0, 1]) == ["3000", "3211", "3221", "0333"]
    assert not plot.mask(seen, legend=False).legends


def test_a_tape_shows_offsets_and_byte_addresses():
    shown = values(plot.tape(["a", "b", "c"], itemsize=6).axes[0])
    assert shown == {"a", "b", "c", "0", "1", "2", "6", "12"}


def test_a_ladder_says_below_where_it_was_measured(monkeypatch):
    outputs = []
    show = lambda data, **rest: outputs.append(data)  # noqa: E731
    monkeypatch.setattr("IPython.display.display", show)
    plot.matrix([[1.0]])._ipython_display_()
    assert len(outputs) == 1
    plot.ladder(FORWARD)._ipython_display_()
    conditions = outputs.pop().data
    assert "<details" in conditions and f"{FORWARD.gpu['name']}, " in conditions


def test_a_method_looks_the_same_in_every_figure():
    """A length at which it could not run has no point."""

    def looks(picture):
        lines = picture.axes[0].lines
        return {
            line.get_label(): (line.get_color(), line.get_marker()) for line in lines
        }

    ladder, memory = plot.ladder(FORWARD), plot.memory(FORWARD)
    assert looks(ladder) == looks(memory)
    assert [len(line.get_xdata()) for line in memory.axes[0].lines] == [2, 2, 3, 3, 3]
    series = {"flash2": [1, 2], "standard": [2, 3]}
    assert looks(line(series)) == {label: looks(ladder)[label] for label in series}
    for name in ("forward", "steps", "hopper"):
        shown = looks(plot.ladder(records.load(name)))
        assert len(set(shown.values())) == len(shown)


def ends(picture):
    """{label: its height} of the labels at the ends of lines."""
    picture.settle()
    texts = [text for text in picture.axes[0].texts if text.get_gid() == "end"]
    return {text.get_text(): text.get_window_extent().y0 for text in texts}


def test_lines_are_labeled_at_their_ends_unless_there_is_a_legend():
    series = {"low": [1, 1], "high": [2, 5], "between": [3, 1.1]}
    places = ends(line(series))
    assert sorted(places, key=places.get) == ["low", "between", "high"]
    picture = line(series)
    picture.axes[0].legend()
    assert ends(picture) == {}
    picture, axes = plot.figure(columns=2)
    line(series, ax=axes[0])
    assert ends(picture) == {} and axes[0].get_legend()


@pytest.mark.parametrize(
    "wanted, centers",
    [
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.1, 0.5, 0.52], [0.1, 0.46, 0.56]),
        ([0.9, 1.0, 1.0], [0.75, 0.85, 0.95]),
        ([-0.1, -0.1], [0.0, 0.1]),
    ],
)
def test_labels_keep_apart(wanted, centers):
    assert canvas.apart(wanted, [0.1] * len(wanted)) == pytest.approx(centers)


def test_figures_go_into_axes_of_ones_own():
    picture, axes = plot.figure(5, 3, columns=2)
    assert plot.matrix([[1.0]], ax=axes[0]) is picture
    assert line(ax=axes[1]) is picture
    assert len(picture.axes) == 2


NOT_BOOL = np.ones((2, 2))
NAN = math.nan
# fmt: off
REFUSED = {
    "values: expected something": lambda: plot.matrix(np.zeros((0, 3))),
    "values: expected finite numbers, got 1": lambda: plot.matrix([[1.0, NAN]]),
    "values: expected 2 dimensions": lambda: plot.matrix([1.0]),
    "values: expected real numbers": lambda: plot.matrix([["a"]]),
    "hidden: expected bool": lambda: plot.matrix([[1.0]], hidden=NOT_BOOL),
    "rows: expected 1 labels, got 2": lambda: plot.matrix([[1.0]], rows="ab"),
    "seen: expected a bool matrix": lambda: plot.mask(NOT_BOOL),
    "rows: expected starts that begin": lambda: plot.mask(hidden(), rows=[0, 3]),
    "the positions of nodes: expected": lambda: plot.graph({"Q": (0, NAN)}, []),
    "highlight: expected pairs that are":
        lambda: plot.graph(NODES, EDGES, highlight=[("Q", "K")]),
    "cells: expected at least one": lambda: plot.tape([]),
    r"cells\[1\]: expected finite numbers": lambda: plot.tape([1.0, NAN]),
    "expected offsets from 0 to 0": lambda: plot.tape([1], groups={"row": [1]}),
    "groups: expected at most 6":
        lambda: plot.tape([1], groups=dict.fromkeys(range(7))),
    r"series\['a'\]: expected 2 values, got 1": lambda: line(series={"a": [1]}),
    "series: expected one to 7": lambda: line({key: [1, 2] for key in "abcdefgh"}),
    "y > 0 on a logarithmic axis": lambda: line(series={"a": [0, 1]}, log="y"),
    'log: expected "", "x"': lambda: line(log="z"),
    "expected measured cells with d = 32, direction forward":
        lambda: plot.ladder(FORWARD, 32),
    "expected measured memory": lambda: plot.memory(records.load("steps")),
    "jobs: expected each to begin": lambda: plot.timeline([("a", "QK", "", 2, 1)]),
    "kind: expected one of QK": lambda: plot.timeline([("a", "idle", "", 0, 1)]),
    "jobs: expected some between": lambda: plot.timeline(JOBS, begin=40, end=50),
}
# fmt: on


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def linear(color):
    """An RGB color without its gamma."""
    c = np.array(matplotlib.colors.to_rgb(color))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    """The contrast ratio of WCAG 2 between two colors."""
    low, high = sorted(linear(color) @ (0.2126, 0.7152, 0.0722) for color in (a, b))
    return (high + 0.05) / (low + 0.05)


# What a browser does to a color in the dark: invert(1) hue-rotate(180deg).
TURN = [[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]]


def in_the_dark(color):
    inverted = 1 - np.array(matplotlib.colors.to_rgb(color))
    return np.clip(TURN @ inverted, 0, 1)


GROUNDS = {"light": ("#ffffff", lambda color: color), "dark": ("#121212", in_the_dark)}


@pytest.mark.parametrize("ground, seen", GROUNDS.values(), ids=GROUNDS)
def test_lines_stand_out_from_the_ground(ground, seen):
    colors = {*plot.CYCLE, plot.INK, *(look[1] for look in plot.METHODS.values())}
    assert min(contrast(seen(color), ground) for color in colors) >= 3


# How the three kinds of color blindness see linear RGB (Machado and others, 2009).
BLIND = {
    "none": np.eye(3),
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
LMS = [[0.412, 0.536, 0.051], [0.212, 0.681, 0.107], [0.088, 0.282, 0.630]]
LAB = [[0.210, 0.794, -0.004], [1.978, -2.429, 0.451], [0.026, 0.783, -0.809]]


def distances(colors, kind):
    """The distances between colors in OKLab; 0.02 is just noticeable."""
    seen = np.clip([BLIND[kind] @ linear(color) for color in colors], 0, 1)
    lab = np.cbrt(seen @ np.transpose(LMS)) @ np.transpose(LAB)
    pairs = itertools.combinations(lab, 2)
    return [np.linalg.norm(a - b) for a, b in pairs]


@pytest.mark.parametrize("kind", BLIND)
def test_everybody_can_tell_the_lines_apart(kind):
    for _, seen in GROUNDS.values():
        assert min(distances([seen(color) for color in plot.CYCLE], kind)) > 0.07


@pytest.mark.parametrize("least", [-1, 0], ids=["signed", "positive"])
def test_numbers_stand_out_from_their_cells(least):
    cells = np.linspace(least, 1, 12)
    ax = plot.matrix(cells[None]).axes[0]
    colors = ax.images[0].to_rgba(cells)
    for text, color in zip(ax.texts, colors, strict=True):
        assert contrast(text.get_color(), color[:3]) >= 4.5
