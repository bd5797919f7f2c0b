"""The empty figure that `flashlib.plot` draws into: its style, its colors, its SVG; and
the checks of what is drawn.

The ground is transparent. A dark page inverts the lightness of the whole picture
(`book/_static/figures.css`), so every color here has a contrast of at least 3:1 with
white and, inverted, with the dark ground. Color-blind readers can tell the colors of
lines apart in both.
"""

import io
import re
from html import escape

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as _Figure
from matplotlib.text import Text

INK, GREY, PAPER = "#1a1a1a", "#8c8c8c", "#ffffff"
# The colors of lines, and of bars that have no text in them.
BLUE, VERMILLION, GREEN, PURPLE = "#0b4f92", "#ec6100", "#3d997e", "#d65fd4"
BROWN, SLATE, NIGHT = "#4c330d", "#57575b", "#0c0745"
# The colors of areas, which an edge or a neighbor delimits.
SKY, ORANGE = "#56b4e9", "#e69f00"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, BROWN, SLATE, NIGHT)
MARKERS = ("o", "s", "^", "v", "D", "P", "X")
TINTS = ("#cfe5f3", "#fbe3b8", "#c9ebdf", "#f4dbe8", "#f9f3b0", "#f7d5bf")
PALE = "#f2f2f2"

# {method: (label, color, marker)}: a method looks the same in every figure. A variant
# has its method's color, dashed.
METHODS = {
    "standard": ("standard", SLATE, "o"),
    "flash1": ("flash1", PURPLE, "v"),
    "flash2": ("flash2", VERMILLION, "s"),
    "flash2-atomic": ("flash2, atomics", VERMILLION, "D"),
    "hopper": ("hopper", BLUE, "X"),
    "hopper-atomic": ("hopper, atomics", BLUE, "o"),
    "sdpa-flash": ("PyTorch FA-2", GREEN, "^"),
    "sdpa-cudnn": ("PyTorch cuDNN", BROWN, "D"),
    "fa3": ("FA-3", NIGHT, "P"),
    "fa3-atomic": ("FA-3, atomics", NIGHT, "o"),
    "ring": ("ring, messages", VERMILLION, "o"),
    "ring-launch": ("ring, one launch", VERMILLION, "D"),
    "ulysses": ("Ulysses", PURPLE, "v"),
    "all-gather": ("all-gather", BLUE, "X"),
    "torch-ring": ("PyTorch, ring", GREEN, "^"),
    "torch-all-gather": ("PyTorch, all-gather", NIGHT, "P"),
    "single": ("one GPU", SLATE, "s"),
    "decode": ("decode", VERMILLION, "o"),
    "flex": ("FlexAttention", PURPLE, "v"),
    "algorithm-5": ("row by row", NIGHT, "X"),
    "algorithm-6": ("queries outside", BLUE, "P"),
    "swapped": ("1. loops swapped", NIGHT, "X"),
    "parallel": ("2. parallel", GREEN, "D"),
    "deferred": ("3. divided once", BLUE, "^"),
    "skipping": ("4. skipping", BROWN, "P"),
}

WIDTH = 5.6  # inches, a column of the page
PIXELS = 125  # an inch has on the page: text of 8.5 pt is 14.8 px tall, as captions are
DPI = 150
# A picture with more marks than that is smaller as a PNG.
MOST_SVG = 150_000

_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color")
_CLEAR = ("figure.facecolor", "savefig.facecolor", "axes.facecolor")
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "mathtext.fontset": "dejavusans",
    "svg.fonttype": "path",  # every reader sees the letters that the layout measured
    "svg.hashsalt": "flashlib",  # ids that depend on the picture alone
    **dict.fromkeys(("font.size", "axes.labelsize"), 11),
    "axes.titlesize": 12,
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 10),
    **dict.fromkeys((*_INKED, "ytick.color"), INK),
    **dict.fromkeys(_CLEAR, "none"),
    "axes.prop_cycle": matplotlib.cycler(color=CYCLE, marker=MARKERS),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.grid": True,
    "grid.color": "#e0e0e0",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "legend.frameon": False,
}


class Figure(_Figure):
    """A matplotlib figure that a notebook shows by itself, the same bytes every time:
    as an SVG, or as a PNG where the SVG would be large.
    """

    conditions = ""  # lines of text, shown folded below the figure

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._direct = []  # the axes whose lines get their labels at their ends
        self._settled = False

    def settle(self):
        """Lay the figure out, once."""
        if self._settled:
            return
        self._settled = True
        for ax in self._direct:
            if not (ax.get_legend() or self.legends):
                _label_ends(ax)
        # Constrained layout moves axes of a fixed aspect a little with every drawing:
        # settle it, then keep it.
        self.draw_without_rendering()
        for ax in self._direct:
            _spread(ax)
        self.set_layout_engine("none")

    def png(self, ground="none", **text):
        """The bytes of the PNG on a ground of a color; `text` is in its text chunk."""
        self.settle()
        buffer = io.BytesIO()
        options = {"metadata": {"Software": None, **text}, "facecolor": ground}
        self.savefig(buffer, format="png", dpi=DPI, **options)
        return buffer.getvalue()

    def svg(self):
        """The text of the SVG, PIXELS an inch wide."""
        self.settle()
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        self.savefig(buffer, format="svg", metadata=nothing)
        text = buffer.getvalue()
        text = re.sub(r"<!--.*?-->\n *|<metadata>.*?</metadata>", "", text, flags=re.S)
        # Hundredths of a point are enough, and the same on every machine. What is
        # smaller than 1 may be a scale.
        text = re.sub(r"[1-9]\d*\.\d{3,}", lambda x: f"{float(x[0]):.2f}", text)
        width, height = (round(side * PIXELS) for side in self.get_size_inches())
        frame = rf'\g<1> width="{width}" height="{height}"'
        text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', frame, text)
        # One line: a notebook would store a list of thousands.
        return " ".join(text[text.index("<svg") :].split())

    def _picture(self):
        """{kind: what a notebook stores}, the smaller of the two kinds."""
        text = self.svg()
        if len(text) <= MOST_SVG:
            return {"image/svg+xml": text}
        return {"image/png": self.png()}

    def _ipython_display_(self):
        from IPython.display import HTML, display

        picture = self._picture()
        # JupyterLab lays a light ground under it in its dark theme.
        light = {kind: {"needs_background": "light"} for kind in picture}
        text = {"text/plain": repr(self)}
        display(picture | text, metadata=light, raw=True)
        if self.conditions:
            lines = escape(self.conditions).replace("\n", "<br>")
            fold = "<summary>How this was measured</summary>"
            display(HTML(f'<details class="measured">{fold}<p>{lines}</p></details>'))

    def __repr__(self):
        # The committed text output of a cell must not depend on matplotlib's version.
        return f"Figure({self.get_figwidth():g} x {self.get_figheight():g} in)"


def figure(width=WIDTH, height=3.4, rows=1, columns=1):
    """(figure, axes): an empty figure of this many inches, and one Axes or, as from
    matplotlib's `subplots`, an array. Sets matplotlib's rcParams to the house style.
    """
    matplotlib.rcParams.update(STYLE)
    picture = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(picture)
    return picture, picture.subplots(rows, columns)


def label_directly(ax):
    """Have lines labeled at their right ends, unless axes or figure get a legend."""
    ax.figure._direct.append(ax)


def _label_ends(ax):
    """Write each line's label to the right of the axes, joined to the line's end."""
    look = {"arrowstyle": "-", "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3}
    for line in ax.lines:
        label = line.get_label()
        if label.startswith("_"):
            continue
        x, y = line.get_xydata()[-1]
        if len(label) > 16:
            label = label.replace(", ", ",\n", 1)
        place = {"xytext": (1.05, 0.5), "textcoords": "axes fraction", "va": "center"}
        place |= {"arrowprops": look | {"color": line.get_color()}, "gid": "end"}
        ax.annotate(label, (x, y), fontsize=10, annotation_clip=False, **place)


def _spread(ax):
    """Move the labels at the ends of lines to their lines' heights, and apart."""
    ends = [text for text in ax.texts if text.get_gid() == "end"]
    if not ends:
        return
    to_axes = ax.transAxes.inverted().transform
    wanted = [to_axes(ax.transData.transform(text.xy))[1] for text in ends]
    order = sorted(range(len(ends)), key=wanted.__getitem__)
    tall = ax.get_window_extent().height
    # An annotation's own extent would include its arrow.
    heights = [1.2 * Text.get_window_extent(ends[i]).height / tall for i in order]
    for i, place in zip(order, apart([wanted[i] for i in order], heights), strict=True):
        ends[i].set_position((1.05, place))


def apart(wanted, heights):
    """The centers of boxes of these heights, without overlap, between 0 and 1 and as
    near as possible to where each is wanted; both lists from the bottom up.
    """
    below = np.cumsum(heights) - np.array(heights) / 2 - heights[0] / 2
    groups = []  # [mean of what its boxes want of the first one, their number]
    for want in np.asarray(wanted) - below:
        groups.append([want, 1])
        while len(groups) > 1 and groups[-2][0] >= groups[-1][0]:
            (a, m), (b, n) = groups[-2:]
            groups[-2:] = [[(m * a + n * b) / (m + n), m + n]]
    firsts = np.concatenate([[mean] * count for mean, count in groups])
    highest = 1 - below[-1] - heights[-1] / 2
    return (np.clip(firsts, min(0, highest), highest) + below).tolist()


def doubling(ax, lengths):
    """A logarithmic x axis that marks exactly these lengths."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [_short(length) for length in lengths])
    ax.minorticks_off()


def _short(value):
    """512 as "512", 16384 as "16k"."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


# -- what figures are given


def require(condition, name, expected, got):
    """Raise ValueError that names the argument unless the condition holds."""
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def numbers(name, values, dimensions, finite=True):
    """The values as an array of this many dimensions, not empty and finite."""
    values = np.asarray(values)
    require(values.size, name, "something to draw", "nothing")
    require(values.dtype.kind in "biuf", name, "real numbers", values.dtype)
    require(values.ndim == dimensions, name, f"{dimensions} dimensions", values.shape)
    if finite:
        wrong = int((~np.isfinite(values)).sum())
        require(wrong == 0, name, "finite numbers", f"{wrong} that are not")
    return values
