"""Sphinx extension: figures to touch.

    {live} <name>       the figure `name`; the directive's content is its caption

A figure is written as HTML here, with the numbers that the library computes for its
first input. Its script, `_static/live/<name>.js`, which only a page with the figure
loads, enables the controls and writes the numbers for any other input into the same
places: an element with the attribute `data-show="x"` shows the number x. Without the
script the page shows the first input. `tests/test_live.py` compares the script's
numbers with the library's.
"""

import html
import itertools
import json
import math

import live_fp8
import torch
from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from flashlib import masks as functions
from flashlib import timeline
from flashlib.iomodel import hopper as model
from flashlib.iomodel import latent, roofline
from flashlib.iomodel.flash2 import flash2_forward
from flashlib.iomodel.standard import standard_forward
from flashlib.reference import online


def shown(number):
    """A number as the scripts write it, with two digits after the point."""
    return f"{number:.2f}".replace("-", "\u2212")


# -- online: eight scores and the state after each key

# Near ln 1, ln 3, ln 4 and ln 2, the scores of the chapter's example, and four more.
SCORES = (0.0, 1.1, 1.4, 0.7, -0.5, 2.3, 0.2, 1.2)
VALUES = (2.0, 6.0, 1.0, 7.0, 3.0, 5.0, 8.0, 4.0)


def online_numbers(scores, values=VALUES):
    """{name: number} of the figure `online`: m, l, unnormalized and final output after
    each key.
    """
    s, v = (torch.tensor(x, dtype=torch.float64)[None] for x in (scores, values))
    keys = [online.block(s[:, j : j + 1], v.T[j : j + 1]) for j in range(len(scores))]
    found, state = {}, online.identity((1,), 1, dtype=torch.float64)
    for j, key in enumerate(keys, start=1):
        m, l, o = state = online.merge(state, key)
        found |= {f"m {j}": m, f"l {j}": l, f"u {j}": o, f"o {j}": o / l}
    return {name: number.item() for name, number in found.items()}


def online_html():
    numbers = online_numbers(SCORES)

    def cell(name):
        rises = ""
        if name in [f"m {j}" for j in range(2, 9)]:
            before = numbers[f"m {int(name[2:]) - 1}"]
            rises = " data-rises" if numbers[name] > before else ""
        return f'<td data-show="{name}"{rises}>{shown(numbers[name])}</td>'

    def row(head, cells):
        head = f'<th scope="row">{head}</th>' if head else "<td></td>"
        return f"<tr>{head}{''.join(cells)}</tr>\n"

    count = range(1, len(SCORES) + 1)
    sliders = [
        f'<td><input type="range" min="-3" max="3" step="0.1" value="{score}" '
        f'aria-label="score of key {j}" autocomplete="off" disabled></td>'
        for j, score in zip(count, SCORES, strict=True)
    ]
    signs = {"m": "<i>m</i>", "l": "<i>l</i>", "u": "<i>Õ</i>", "o": "<i>O</i>"}
    first = row("key", [f'<th scope="col">{j}</th>' for j in count])
    first += row("", sliders)
    scores = zip(count, SCORES, strict=True)
    first += row(
        "<i>S</i>", [f'<td data-show="s {j}">{shown(s)}</td>' for j, s in scores]
    )
    first += row("<i>V</i>", [f'<td data-value="{v:g}">{v:g}</td>' for v in VALUES])
    for letter, sign in signs.items():
        first += row(sign, [cell(f"{letter} {j}") for j in count])
    return (
        f'<table class="live-keys">\n{first}</table>\n'
        '<p class="live-said" role="status"></p>\n'
    )


# -- bottleneck: a roofline with two programs on it

PROGRAMS = {"standard": standard_forward, "flash2": flash2_forward}
# Powers of two: the first and the last of each slider, and where it is at first. The
# rows of the softmax, of at most 2^14 scores, always fit in fast memory.
SLIDERS = {"T": (9, 14, 13), "d": (4, 8, 6), "M": (15, 20, 17)}
NAMES = {"T": "length", "d": "head dimension", "M": "words of fast memory"}


def bottleneck_numbers(T, d, M, gpu):
    """{name: number} of the figure `bottleneck`: for each program the largest square
    block that is a power of two and fits in M words, the bytes that move (four for an
    entry of S, two for any other number), operations per byte, and the most TFLOP/s on
    this GPU.
    """
    operations = roofline.forward_flops(T, d)
    found = {"T": T, "d": d, "M": M, "operations": operations}
    found["ridge"] = gpu.ridge_flops_per_byte
    for name, schedule in PROGRAMS.items():
        sizes = [2**n for n in range(T.bit_length())]
        B = max(B for B in sizes if B <= T and schedule.peak(T, d, B, B) <= M)
        moved = 2 * schedule.words(T, d, B)
        if name == "standard":
            moved += 2 * 2 * T * T  # S is stored and loaded, two bytes more each time
        rho = operations / moved
        speed = roofline.attainable_flops_per_second(rho, gpu) / 1e12
        numbers = {"B": B, "bytes": moved, "rho": rho, "speed": speed}
        found |= {f"{key} {name}": number for key, number in numbers.items()}
    return found


def bound_by(numbers, name):
    """What limits a point of the roofline: its traffic with memory, or arithmetic."""
    return "memory" if numbers[f"rho {name}"] < numbers["ridge"] else "compute"


def bottleneck_text(name, numbers):
    """The text of a place of the figure `bottleneck`."""
    kind, _, program = name.partition(" ")
    if kind == "bound":
        return bound_by(numbers, program)
    number = numbers[name]
    if kind == "bytes":
        return f"{number / 1e6:.1f}"
    return f"{number:.1f}" if kind in ("rho", "speed", "ridge") else f"{number:,}"


def bottleneck_place(rho, speed):
    """Where a point of the roofline is in its picture: 37 and 28 units per octave."""
    return 44 + 37 * (math.log2(rho) - 1), 240 - 28 * (math.log2(speed) - 2)


def bottleneck_html():
    first = {name: 2**at for name, (_, _, at) in SLIDERS.items()}
    gpu = roofline.H200
    numbers = bottleneck_numbers(*first.values(), gpu)

    def show(name, tag="td"):
        text = bottleneck_text(name, numbers)
        return f'<{tag} data-show="{name}">{text}</{tag}>'

    controls = ""
    for name, (low, high, at) in SLIDERS.items():
        controls += (
            f'<label><i>{name}</i> <input type="range" min="{low}" max="{high}" '
            f'value="{at}" aria-label="{NAMES[name]}" aria-valuetext="{2**at}" '
            f'autocomplete="off" disabled> {show(name, "span")}</label>\n'
        )
    options = "".join(
        f'<option value="{sheet.flops_per_second} {sheet.hbm_bytes_per_second}"'
        f"{' selected' if sheet is gpu else ''}>{sheet.name}</option>"
        for sheet in roofline.GPUS
    )
    chosen = f'<select aria-label="GPU" autocomplete="off" disabled>{options}</select>'
    controls += f"<label>GPU {chosen}</label>\n"
    heads = (
        "<i>B</i>",
        "MB",
        "operations per byte",
        "max TFLOP/s",
        "bound by",
    )
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    rows = f"<tr><td></td>{head}</tr>\n"
    for name in PROGRAMS:
        kinds = ("B", "bytes", "rho", "speed", "bound")
        cells = "".join(show(f"{kind} {name}") for kind in kinds)
        rows += f'<tr><th scope="row" class="live-{name}">{name}</th>{cells}</tr>\n'
    return (
        f'<div class="live-controls">\n{controls}</div>\n{bottleneck_svg(numbers, gpu)}'
        f'<table class="live-words">\n{rows}</table>\n'
        f"<p>4<i>T</i>²<i>d</i> = {show('operations', 'span')} operations; the ridge "
        f"is at {show('ridge', 'span')} operations per byte.</p>\n"
    )


def bottleneck_svg(numbers, gpu):
    F, W = gpu.flops_per_second / 1e12, gpu.hbm_bytes_per_second / 1e12
    roof = [(2, 2 * W), (F / W, F), (1024, F)]
    points = " ".join("{},{}".format(*bottleneck_place(*corner)) for corner in roof)
    parts = ""
    for rho in (4, 16, 64, 256, 1024):
        x, _ = bottleneck_place(rho, 4)
        parts += f'<path d="M{x} 16V240"/><text x="{x}" y="256">{rho}</text>'
    for speed in (4, 16, 64, 256, 1024):
        _, y = bottleneck_place(2, speed)
        parts += f'<path d="M44 {y}H377"/><text x="38" y="{y + 4}">{speed}</text>'
    marks = ""
    for name, at in (("standard", "-9"), ("flash2", "9")):
        x, y = bottleneck_place(numbers[f"rho {name}"], numbers[f"speed {name}"])
        lower = "" if at == "-9" else ' dy="14"'
        marks += (
            f'<g class="live-{name}" transform="translate({x} {y})"><circle r="6"/>'
            f'<text x="{at}"{lower}>{name}</text></g>'
        )
    return (
        '<svg class="live-roof" viewBox="0 -6 400 286" role="img" '
        'aria-label="The GPU\'s roofline, with a point for each program">'
        f'<g class="live-grid">{parts}<text x="210" y="274">operations per byte</text>'
        f'<text x="4" y="4">TFLOP/s</text></g><polyline points="{points}"/>'
        f"{marks}</svg>\n"
    )


# -- masks: the tiles of a mask

LENGTH, STARTS = 16, (0, 5, 6, 13)  # where the documents of the chapter begin
IDS = torch.bucketize(torch.arange(LENGTH), torch.tensor(STARTS), right=True) - 1


def first_keys(b, h, p, j, n):
    return (j <= p) & (j < n)


# {name: (formula, the mask that it says)}
MASKS = {
    "window": ("i - 9 <= j <= i", functions.window(9, 0)),
    "causal": ("j <= i", functions.causal()),
    "prefix": ("j < 6 or j <= i", functions.prefix(6)),
    "documents": ("doc(i) == doc(j)", functions.documents(IDS)),
    "causal documents": (
        "doc(i) == doc(j) and j <= i",
        functions.documents(IDS) & functions.causal(),
    ),
    "chunks": ("j <= i and i // 6 == j // 6", functions.chunks(6)),
    "window and first keys": (
        "j <= i and (i - j < 5 or j < 2)",
        functions.window(4, 0) | functions.Mask(first_keys, 2),
    ),
}
# The first and the last of each slider, and where it is at first, as powers of two.
EDGES = {
    "rows": ("<i>B</i><sub>r</sub>", "queries per tile", (0, 3, 2)),
    "columns": ("<i>B</i><sub>c</sub>", "keys per tile", (0, 3, 2)),
}


def masks_numbers(seen, rows, columns):
    """({name: number}, paths) of the figure `masks` for a mask, bool [LENGTH, LENGTH]:
    how many tiles are skipped, masked and whole, and the SVG paths of masked tiles,
    pairs that are seen, whole tiles, and lines.
    """
    found = {"skipped": 0, "masked": 0, "whole": 0, "seen": int(seen.sum())}
    tiles = {"masked": "", "whole": ""}
    for top in range(0, LENGTH, rows):
        for left in range(0, LENGTH, columns):
            tile = seen[top : top + rows, left : left + columns]
            name = "whole" if tile.all() else "masked" if tile.any() else "skipped"
            found[name] += 1
            if name in tiles:
                tiles[name] += f"M{left} {top}h{columns}v{rows}h-{columns}z"
    found["read"] = found["masked"] + found["whole"]
    found["computed"] = found["read"] * rows * columns
    pairs, lines = "", ""
    for i, row in enumerate(seen.tolist()):
        first = 0
        for see, run in itertools.groupby(row):
            width = len(list(run))
            if see:
                pairs += f"M{first} {i}h{width}v1h-{width}z"
            first += width
    for y in range(0, LENGTH + 1, rows):
        lines += f"M0 {y}h{LENGTH}"
    for x in range(0, LENGTH + 1, columns):
        lines += f"M{x} 0v{LENGTH}"
    return found, [tiles["masked"], pairs, tiles["whole"], lines]


def masks_html():
    at = {name: 2**at for name, (_, _, (_, _, at)) in EDGES.items()}
    formula, mask = MASKS["window"]
    seen = mask.visible(1, 1, LENGTH, LENGTH)[0, 0]
    numbers, paths = masks_numbers(seen, **at)
    numbers |= at
    examples = "".join(
        f'<option value="{html.escape(formula)}">{name}</option>'
        for name, (formula, _) in MASKS.items()
    )
    controls = (
        '<label>mask <select autocomplete="off" disabled>'
        f'{examples}<option value="">your own</option></select></label>\n'
        '<label class="live-formula"><span>query <i>i</i> sees key <i>j</i> if</span> '
        f'<input type="text" value="{html.escape(formula)}" maxlength="200" '
        'autocomplete="off" autocapitalize="off" spellcheck="false" '
        'aria-describedby="live-masks-wrong" disabled></label>\n'
        '<p class="live-wrong" id="live-masks-wrong" role="status"></p>\n'
    )
    for name, (sign, label, (low, high, first)) in EDGES.items():
        controls += (
            f'<label><span>{sign}</span> <input type="range" min="{low}" max="{high}" '
            f'value="{first}" aria-label="{label}" aria-valuetext="{at[name]}" '
            'autocomplete="off" disabled> '
            f'<span data-show="{name}">{at[name]}</span></label>\n'
        )
    rows = ""
    for name, text in (
        ("skipped", "tiles skipped"),
        ("masked", "tiles masked"),
        ("whole", "tiles whole"),
        ("computed", "pairs computed"),
        ("seen", "pairs seen"),
    ):
        cell = f'<td data-show="{name}">{numbers[name]}</td>'
        mark = f'<i class="live-{name}"></i>' if text.startswith("tiles") else ""
        rows += f'<tr><th scope="row">{mark}{text}</th>{cell}</tr>\n'
    names = ("masked", "seen", "whole", "lines")
    drawn = "".join(
        f'<path class="live-{name}" d="{path}"/>'
        for name, path in zip(names, paths, strict=True)
    )
    return (
        '<div class="live-tiles">\n<svg viewBox="-0.1 -0.1 16.2 16.2" role="img" '
        'aria-label="The mask in tiles: queries from top to bottom, keys from left to '
        f'right" data-starts="{" ".join(map(str, STARTS))}">'
        f'<rect class="live-skipped" width="16" height="16"/>{drawn}</svg>\n'
        f'<div><div class="live-controls">\n{controls}</div>\n<table>\n{rows}</table>'
        "</div>\n</div>\n"
    )


# -- hopper: a multiprocessor by the clock

STEPS = ("specialized", "overlapped", "turns")
GROUPS, FIRST = (1, 2, 3), ("overlapped", 3, 2)  # choices of slots and groups
HEAD, KEYS = 64, 128  # head dimension, keys of a block
# Programs that have run for a while: no launch, no end.
CLOCK = timeline.HOPPER._replace(launch=0, finish=0)
SHOWN = 10_000  # clocks
# {kind of work: (row in a group's lane, what it is)}
WORK = {
    "copy": (0, "copies"),
    "QK": (0, "scores"),
    "PV": (0, "output"),
    "softmax": (1, "softmax"),
}


def hopper_numbers(step, slots, groups):
    """({name: number}, paths) of the figure `hopper`: clocks for a block of keys, far
    from the ends, and the share of them in which the tensor cores are busy; an SVG path
    for each kind of work, ten clocks for a unit. At d = 64 the softmax units are busy
    for as long.
    """

    def run(blocks):
        options = {"groups": groups, "slots": slots, "machine": CLOCK}
        return model.forward(step, [blocks], d=HEAD, block_k=KEYS, **options)

    few, more = run(12), run(24)
    clocks = float(more.clocks - few.clocks) / 12
    work = [trace.busy("tensor cores") * trace.clocks for trace in (more, few)]
    busy = float(work[0] - work[1]) / 12 / clocks
    found = {"clocks": clocks, "queries": 64 * groups, "busy": busy}
    paths = dict.fromkeys(WORK, "")
    for agent, kind, _, begin, end in few.rows():
        if kind in WORK and begin < SHOWN:
            lane = 0 if agent == "producer" else 1 + int(agent.split()[1])
            first, last = round(begin / 10), round(min(end, SHOWN) / 10)
            y = 60 if lane == 0 else 100 * lane + 40 + 40 * WORK[kind][0]
            paths[kind] += f"M{first + 1} {y}h{last - first - 2}"
    return found, list(paths.values())


def hopper_text(name, number):
    """The text of a place of the figure `hopper`."""
    return f"{number:.0%}" if name == "busy" else f"{number:.0f}"


def hopper_html():
    choices = itertools.product(STEPS, GROUPS, GROUPS)
    states = {choice: hopper_numbers(*choice) for choice in choices}
    data = {
        " ".join(map(str, choice)): [
            {name: hopper_text(name, number) for name, number in found.items()},
            paths,
        ]
        for choice, (found, paths) in states.items()
    }
    text, drawn = data[" ".join(map(str, FIRST))]
    options = "".join(
        f"<option{' selected' if step == FIRST[0] else ''}>{step}</option>"
        for step in STEPS
    )
    controls = (
        f'<label>step <select autocomplete="off" disabled>{options}</select></label>\n'
    )
    for name, at in zip(("slots", "groups"), FIRST[1:], strict=True):
        controls += (
            f'<label>{name} <input type="range" min="1" max="3" value="{at}" '
            f'aria-label="{name}" autocomplete="off" disabled> '
            f'<span data-show="{name}">{at}</span></label>\n'
        )
    lanes, marks = "", ""
    for lane, name in enumerate(("copies", "group 0", "group 1", "group 2")):
        middle, height = (60, 38) if lane == 0 else (100 * lane + 60, 78)
        seen = "visible" if lane <= FIRST[2] else "hidden"
        lanes += (
            f'<g visibility="{seen}"><text x="-12" y="{middle + 10}">{name}</text>'
            f'<rect y="{middle - height / 2}" width="1000" height="{height}"/></g>'
        )
    for clocks in range(0, SHOWN, 2000):
        marks += f'<text x="{clocks / 10}" y="30">{clocks}</text>'
    marks += '<text x="950" y="30">clocks</text>'
    work = "".join(
        f'<path class="live-{kind}" d="{path}"/>'
        for kind, path in zip(WORK, drawn, strict=True)
    )
    legend = "".join(
        f'<span><i class="live-{kind}"></i>{name}</span> '
        for kind, (_, name) in WORK.items()
    )
    legend += '<span><i class="live-idle"></i>waiting</span>'
    show = {name: f'<b data-show="{name}">{shown}</b>' for name, shown in text.items()}
    return (
        f'<div class="live-controls">\n{controls}</div>\n'
        '<svg class="live-clock" viewBox="-180 0 1230 405" role="img" aria-label="What '
        'the copy engine and each group do in each of the first clock cycles">'
        f"{lanes}{work}<g>{marks}</g></svg>\n"
        f'<p class="live-legend">{legend}</p>\n'
        f"<p>Processing {show['queries']} queries against a block of {KEYS} keys takes "
        f"{show['clocks']} clocks. The tensor cores are busy for {show['busy']} of the "
        "time, and so are the softmax units.</p>\n"
        f'<script type="application/json">{json.dumps(data)}</script>\n'
    )


# -- latent: expand or absorb, and which roof

# Powers of two: the first and the last of each slider, and where it is at first.
LATENT = {
    "H": ("<i>H</i>", "heads", (0, 7, 7)),
    "T_q": ("<i>T</i><sub>q</sub>", "queries", (0, 13, 0)),
    "T_k": ("<i>T</i><sub>k</sub>", "keys", (7, 17, 12)),
}


def latent_numbers(H, T_q, T_k):
    """{name: number} of the figure `latent`, for DeepSeek-V3's sizes, a causal mask and
    at most T_k queries: both sides of the inequality, and for each way all operations,
    those of attention, the bytes that this reads in 16 bits, once, and its operations
    per byte.
    """
    T_q = min(T_q, T_k)
    d_c, d_n, _, d_v = latent.DEEPSEEK
    pairs = latent.visible_pairs(T_q, T_k, causal=True)
    found = {"H": H, "T_q": T_q, "T_k": T_k}
    found["ridge"] = roofline.H200.ridge_flops_per_byte
    found["left"] = pairs * (2 * d_c - d_n - d_v)
    found["right"] = (T_k - T_q) * d_c * (d_n + d_v)
    for way, count, projected, held in (
        ("expanded", latent.expanded_flops, T_k, latent.expanded_words(H)),
        ("absorbed", latent.absorbed_flops, T_q, latent.latent_words()),
    ):
        operations, read = count(T_q, T_k, H, causal=True), 2 * T_k * held
        attention = operations - H * latent.projection_flops(projected)
        found |= {f"operations {way}": operations, f"attention {way}": attention}
        found[f"bytes {way}"] = read
        found[f"rho {way}"] = attention / read
    return found


def latent_text(name, numbers):
    """The text of a place of the figure `latent`."""
    kind, _, way = name.partition(" ")
    if kind == "bound":
        return bound_by(numbers, way)
    if kind == "way":
        return "Absorb" if numbers["left"] < numbers["right"] else "Expand"
    if kind in ("operations", "attention", "bytes"):
        return f"{numbers[name] / (1e6 if kind == 'bytes' else 1e9):.2f}"
    if kind in ("left", "right"):
        return f"{numbers[name] / 1e6:.2f}"
    return f"{numbers[name]:.1f}" if kind in ("rho", "ridge") else f"{numbers[name]:,}"


def latent_html():
    numbers = latent_numbers(*(2**at for _, _, (_, _, at) in LATENT.values()))

    def show(name, tag="td"):
        return f'<{tag} data-show="{name}">{latent_text(name, numbers)}</{tag}>'

    controls = ""
    for name, (letter, said, (low, high, at)) in LATENT.items():
        controls += (
            f'<label>{letter} <input type="range" min="{low}" max="{high}" '
            f'value="{at}" aria-label="{said}" aria-valuetext="{2**at}" '
            f'autocomplete="off" disabled> {show(name, "span")}</label>\n'
        )
    heads = ("10⁹ operations", "of attention", "MB it reads", "per byte", "bound by")
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    rows = f"<tr><td></td>{head}</tr>\n"
    for way in ("expanded", "absorbed"):
        kinds = ("operations", "attention", "bytes", "rho", "bound")
        cells = "".join(show(f"{kind} {way}") for kind in kinds)
        rows += f'<tr><th scope="row">{way}</th>{cells}</tr>\n'
    return (
        f'<div class="live-controls">\n{controls}</div>\n'
        f'<table class="live-words" data-ridge="{numbers["ridge"]}">\n{rows}</table>\n'
        f"<p><b>{show('way', 'span')}</b>: the first line of the inequality is "
        f"{show('left', 'span')} million, the second {show('right', 'span')} "
        f"million. The ridge of an H200 is at {show('ridge', 'span')} operations per "
        "byte.</p>\n"
    )


FIGURES = {
    "bottleneck": bottleneck_html,
    "fp8": live_fp8.figure,
    "hopper": hopper_html,
    "latent": latent_html,
    "masks": masks_html,
    "online": online_html,
}
# Where a figure replaces a picture, links to the picture lead to it.
PLACES = {"hopper": "fig-hopper-overlapped", "masks": "fig-masks-window"}


# -- The directive


class live_figure(nodes.General, nodes.Element): ...


class Live(SphinxDirective):
    required_arguments = 1
    has_content = True

    def run(self):
        name = self.arguments[0].strip()
        if name not in FIGURES:
            expected = ", ".join(FIGURES)
            raise ExtensionError(f"{{live}}: expected one of {expected}, got {name!r}")
        figure = live_figure(name=name)
        self.state.nested_parse(self.content, self.content_offset, figure)
        return [figure]


def start_figure(self, node):
    name = node["name"]
    self.body.append(
        f'<figure class="live" id="{PLACES.get(name, f"live-{name}")}" '
        f'data-live="{name}">\n'
        f'<div class="live-body">\n{FIGURES[name]()}</div>\n<figcaption>\n'
    )


def end_figure(self, node):
    self.body.append("</figcaption>\n</figure>\n")


def load_scripts(app, pagename, templatename, context, doctree):
    """Load the script of each figure of a page."""
    for figure in doctree.findall(live_figure) if doctree else ():
        app.add_js_file(f"live/{figure['name']}.js", defer="defer")


def setup(app):
    app.add_node(live_figure, html=(start_figure, end_figure))
    app.add_directive("live", Live)
    app.add_css_file("live.css")
    app.connect("html-page-context", load_scripts, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
