"""The figures: drawn at all, the same bytes every time, readable, and never of empty or non-finite data."""

import math
import subprocess
import sys

import matplotlib
import numpy as np
import pytest

from flashlib import plot

NODES = {"Q": (0, 1, "$Q$"), "K": (0, 0), "S": (1.5, 0.5)}
EDGES = [("Q", "S"), ("K", "S", "dot"), ("S", "Q")]

JOBS = [
    ("producer", "copy", "K0", 0, 10),
    ("group 0", "wait", "full", 0, 10),
    ("group 0", "QK", "0", 10, 20.5),
    ("group 0", "softmax", "S0", 20.5, 30),
]

LENGTHS = (512, 1024, 2048)
OURS = ("standard", "flash1", "flash2", "flash2-atomic", "algorithm-5", "algorithm-6")
STEPS = ("flash1", "swapped", "parallel", "deferred", "skipping", "flash2")


class Record:
    """What the figures read of a record."""

    name = "made up"

    def __init__(self, tflops=300.0, methods=("standard", "flash2", "sdpa-flash", "sdpa-cudnn")):
        self.methods, self.tflops = methods, tflops
        self.memory = [
            {"method": method, "direction": "forward", "T_q": T, "extra_bytes": 2**20 * T * (place + 1)}
            for place, method in enumerate(methods)
            for T in LENGTHS
        ]

    def ladder(self, d, causal, direction):
        if (d, direction) == (128, "forward+backward"):
            return {}
        return {
            method: [(T, self.tflops + place) for T in LENGTHS if (method, T) != ("standard", 2048)]
            for place, method in enumerate(self.methods)
        }

    def provenance(self):
        return "a made-up GPU\nof no date"

    memory_provenance = provenance


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
    "mask of starts": lambda: plot.mask(~hidden(), rows=[0, 1], columns=[0, 2], legend=False),
    "graph": lambda: plot.graph(NODES, EDGES, title="graph", highlight=[("Q", "S")]),
    "graph of one": lambda: plot.graph({"x": (0, 0)}, []),
    "tape": lambda: plot.tape(range(11), start=4096, groups={"row 0": [0, 1, 2], "row 1": [3]}, title="A"),
    "tape of texts": lambda: plot.tape(["a", "b", ""], itemsize=2),
    "curves": lambda: plot.curves(
        [1, 2, 4], {"a": [1, 2, 3], "b": ([1, 4], [2, 9])}, x_label="x", y_label="y"
    ),
    "curves log": lambda: plot.curves([1, 2048], {"a": [1, 2]}, x_label="x", y_label="y", log="xy"),
    "ladder": lambda: plot.ladder(Record()),
    "ladder of steps": lambda: plot.ladder(Record(methods=STEPS), 64),
    "ladder backward": lambda: plot.ladder(Record(methods=(*OURS[::2], *OURS[1::2])), direction="backward"),
    "memory": lambda: plot.memory(Record()),
    "timeline": lambda: plot.timeline(JOBS, title="two agents"),
    "timeline of a part": lambda: plot.timeline(JOBS, begin=5, end=25),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_the_same_bytes_every_time(name):
    picture = FIGURES[name]()
    first = picture._repr_png_()
    assert first.startswith(b"\x89PNG") and picture._repr_png_() == first
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "savefig.facecolor": "black"}):
        assert FIGURES[name]()._repr_png_() == first
    assert b"Software" not in first and b"matplotlib" not in first
    assert repr(picture).startswith("Figure(") and "0x" not in repr(picture)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_opaque_and_all_of_it_is_inside(name):
    picture = FIGURES[name]()
    picture.draw_without_rendering()
    assert picture.get_facecolor() == (1, 1, 1, 1)
    assert picture.get_figwidth() <= plot.WIDTH + 0.01
    drawn, page = picture.get_tightbbox(), picture.bbox_inches
    assert (
        drawn.x0 > -0.01
        and drawn.y0 > -0.01
        and drawn.x1 < page.width + 0.01
        and drawn.y1 < page.height + 0.01
    )


def values(ax):
    return {text.get_text() for text in ax.texts}


def test_a_matrix_shows_its_numbers():
    assert values(plot.matrix([[0.5, -1.256], [2.0, -0.001]]).axes[0]) == {"0.50", "-1.26", "2.00", "0.00"}
    assert values(plot.matrix([[1, 20]]).axes[0]) == {"1", "20"}
    assert values(plot.matrix([[0.123]], digits=3).axes[0]) == {"0.123"}
    assert len(plot.matrix(masked_scores(), hidden=hidden()).axes[0].texts) == 6
    assert not plot.matrix(np.eye(13)).axes[0].texts


def test_a_mask_tells_tiles_apart():
    seen = np.tril(np.ones((4, 4), dtype=bool))
    seen[3, 0] = False

    def kinds(**tiles):
        return plot.mask(seen, **tiles).axes[0].collections[0].get_array().reshape(4, 4).tolist()

    assert kinds(rows=2, columns=2) == [[2, 1, 0, 0], [2, 2, 0, 0], [2, 2, 2, 1], [1, 2, 2, 2]]
    assert kinds(rows=[0, 1, 3], columns=[0, 1]) == [[3, 0, 0, 0], [3, 2, 1, 1], [3, 2, 2, 1], [0, 3, 3, 3]]
    assert not plot.mask(seen, legend=False).legends


def test_a_tape_shows_offsets_and_byte_addresses():
    assert values(plot.tape(["a", "b", "c"], start=100, itemsize=2).axes[0]) == {
        "a", "b", "c", "0", "1", "2", "100", "102", "104",
    }  # fmt: skip


def test_a_ladder_says_where_it_was_measured_and_leaves_gaps():
    record = Record()
    picture = plot.ladder(record)
    assert picture.get_supxlabel() == record.provenance()
    assert [len(line.get_xdata()) for line in picture.axes[0].lines] == [2, 3, 3, 3]


def test_a_method_looks_the_same_in_every_figure():
    def looks(picture):
        labels = [text.get_text() for text in picture.legends[0].get_texts()]
        handles = picture.legends[0].legend_handles
        return {a: (h.get_color(), h.get_marker()) for a, h in zip(labels, handles, strict=True)}

    ladder, steps, memory = plot.ladder(Record()), plot.ladder(Record(methods=STEPS)), plot.memory(Record())
    assert looks(ladder)["flash2"] == looks(steps)["flash2"] and looks(ladder) == looks(memory)
    for picture in (ladder, steps, plot.ladder(Record(methods=OURS))):
        assert len(set(looks(picture).values())) == len(looks(picture))


def test_memory_leaves_out_what_could_not_run():
    record = Record()
    for cell in record.memory:
        if cell["method"] == "standard" and cell["T_q"] > 512:
            cell["error"] = "OutOfMemoryError"
            del cell["extra_bytes"]
    ax = plot.memory(record).axes[0]
    assert [list(line.get_xdata()) for line in ax.lines[:2]] == [[512], [512, 1024, 2048]]
    assert list(ax.lines[0].get_ydata()) == [512] and ax.get_yscale() == "log"


def test_figures_go_into_axes_of_ones_own():
    picture, axes = plot.figure(5, 3, columns=2)
    assert plot.matrix([[1.0]], ax=axes[0]) is picture
    assert plot.curves([1], {"a": [1]}, x_label="x", y_label="y", ax=axes[1]) is picture
    assert len(picture.axes) == 2


def line(**changed):
    given = {"x": [1, 2], "series": {"a": [1, 2]}, "x_label": "x", "y_label": "y", **changed}
    return plot.curves(given.pop("x"), given.pop("series"), **given)


REFUSED = {
    "values is empty": lambda: plot.matrix(np.zeros((0, 3))),
    "values holds 1 value": lambda: plot.matrix([[1.0, math.nan]]),
    "values where hidden is False holds 1": lambda: plot.matrix(
        [[math.inf, math.nan]], hidden=np.array([[True, False]])
    ),
    "values must have 2 dim": lambda: plot.matrix([1.0]),
    "values must hold real numbers": lambda: plot.matrix([["a"]]),
    "hidden must be bool of shape": lambda: plot.matrix([[1.0]], hidden=np.array([True])),
    "hidden leaves no cell": lambda: plot.matrix([[1.0]], hidden=np.array([[True]])),
    "rows must hold 1 labels, got 2": lambda: plot.matrix([[1.0]], rows="ab"),
    "seen must be a bool matrix": lambda: plot.mask(np.ones((2, 2))),
    "seen must be a bool matrix that is not empty": lambda: plot.mask(np.ones((0, 2), dtype=bool)),
    "columns must be at least 1": lambda: plot.mask(hidden(), columns=0),
    "rows must begin at 0 and rise below 3": lambda: plot.mask(hidden(), rows=[0, 3]),
    "nodes is empty": lambda: plot.graph({}, []),
    "names a node that is not in nodes: 'X'": lambda: plot.graph(NODES, [("Q", "X")]),
    "position of node 'Q' holds": lambda: plot.graph({"Q": (0, math.nan)}, []),
    "highlight holds pairs that are no edges": lambda: plot.graph(NODES, EDGES, highlight=[("Q", "K")]),
    "cells is empty": lambda: plot.tape([]),
    r"cells\[1\] holds 1 value": lambda: plot.tape([1.0, math.nan]),
    "itemsize must be an integer": lambda: plot.tape([1], itemsize=0),
    "offset 1: the tape has offsets 0 to 0": lambda: plot.tape([1], groups={"row": [1]}),
    "at most 6 colours": lambda: plot.tape([1], groups={i: [] for i in range(7)}),
    r"series\['a'\] is empty": lambda: line(series={"a": []}),
    r"series\['a'\] holds 1 value": lambda: line(series={"a": [1, math.inf]}),
    r"series\['a'\] has 1 values for 2": lambda: line(series={"a": [1]}),
    "series must hold one to 7": lambda: line(series={}),
    "y <= 0 on a logarithmic axis": lambda: line(series={"a": [0, 1]}, log="y"),
    "x <= 0 on a logarithmic axis": lambda: line(x=[0, 1], log="x"),
    'log must be "", "x"': lambda: line(log="z"),
    "no measured contiguous cell with d = 128, causal = False, direction forward\\+backward": lambda: (
        plot.ladder(Record(), direction="forward+backward")
    ),
    "direction must be one of forward, backward": lambda: plot.ladder(Record(), direction="back"),
    r"holds 2 value\(s\) that are not finite": lambda: plot.ladder(Record(math.nan)),
    "has no measured memory": lambda: plot.memory(Record(methods=())),
    "jobs is empty": lambda: plot.timeline([]),
    "the times of jobs holds 1 value": lambda: plot.timeline([("a", "QK", "", 0, math.inf)]),
    "jobs holds one that ends before": lambda: plot.timeline([("a", "QK", "", 2, 1)]),
    "a kind must be one of QK": lambda: plot.timeline([("a", "idle", "", 0, 1)]),
    "end must be after begin = 5": lambda: plot.timeline(JOBS, begin=5, end=5),
    "no job runs between 40 and 50": lambda: plot.timeline(JOBS, begin=40, end=50),
    "width must be a positive number": lambda: plot.figure(width=math.nan),
    "rows must be at least 1": lambda: plot.figure(rows=0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def contrast(a, b):
    """The contrast ratio of WCAG 2 between two colours."""

    def luminance(colour):
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in matplotlib.colors.to_rgb(colour)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("cells", [np.linspace(-1, 1, 12), np.linspace(0, 1, 12)], ids=["signed", "positive"])
def test_numbers_stand_out_from_their_cells(cells):
    ax = plot.matrix(cells[None]).axes[0]
    colours = ax.images[0].to_rgba(cells)
    ratios = [contrast(text.get_color(), colour[:3]) for text, colour in zip(ax.texts, colours, strict=True)]
    assert min(ratios) >= 4.5


def test_importing_it_loads_no_torch():
    code = "import sys, flashlib.plot; sys.exit('torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
