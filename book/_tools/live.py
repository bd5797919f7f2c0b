"""Sphinx extension: figures to touch.

    {live} <name>       the figure `name`; the directive's content is its caption

A figure is written as HTML here, with the numbers that the library computes for its
first input. Its script, `_static/live/<name>.js`, which only a page with the figure
loads, enables the controls and writes the numbers for any other input into the same
places: an element with the attribute `data-show="x"` shows the number x. Without the
script the page shows the first input. `tests/test_live.py` compares the script's
numbers with the library's.
"""

import torch
from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from flashlib.reference import online


def shown(number):
    """A number as the scripts write it, with two digits after the point."""
    return f"{number:.2f}".replace("-", "\u2212")


# -- online: eight scores, their states, and the merge of two halves

# Near ln 1, ln 3, ln 4 and ln 2, the scores of the chapter's example, and four more.
SCORES = (0.0, 1.1, 1.4, 0.7, -0.5, 2.3, 0.2, 1.2)
VALUES = (2.0, 6.0, 1.0, 7.0, 3.0, 5.0, 8.0, 4.0)
PARTS = {"A": "keys 1–4", "B": "keys 5–8", "merged": "merged"}


def online_numbers(scores, values=VALUES):
    """{name: number} of the figure `online`: m, l, unnormalized and final output after
    each key, of both halves and of their merge; the factors of the merge; the output
    of the softmax.
    """
    s, v = (torch.tensor(x, dtype=torch.float64)[None] for x in (scores, values))
    half = len(scores) // 2
    keys = [online.block(s[:, j : j + 1], v.T[j : j + 1]) for j in range(len(scores))]
    states, state = {}, online.identity((1,), 1, dtype=torch.float64)
    for j, key in enumerate(keys, start=1):
        states[j] = state = online.merge(state, key)
    for part, keys in (("A", slice(half)), ("B", slice(half, None))):
        states[part] = online.block(s[:, keys], v.T[keys])
    states["merged"] = online.merge(states["A"], states["B"])
    found = {}
    for name, (m, l, o) in states.items():
        found |= {f"m {name}": m, f"l {name}": l, f"u {name}": o, f"o {name}": o / l}
    for part in "AB":
        found[f"f {part}"] = online.weight(states[part].m, states["merged"].m)
    found["softmax"] = torch.softmax(s, -1) @ v.T
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
    heads = ["factor", *signs.values()]
    second = row("", [f'<th scope="col">{head}</th>' for head in heads])
    for part, name in PARTS.items():
        factor = cell(f"f {part}") if part in "AB" else "<td></td>"
        second += row(name, [factor, *(cell(f"{letter} {part}") for letter in signs)])
    second += row("softmax", ["<td></td>" * 4, cell("softmax")])
    return (
        f'<table class="live-keys">\n{first}</table>\n'
        f'<table class="live-merge">\n{second}</table>\n'
        '<p class="live-said" role="status"></p>\n'
    )


FIGURES = {"online": online_html}


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
        figure = live_figure(name=name, ids=[f"live-{name}"])
        self.state.nested_parse(self.content, self.content_offset, figure)
        return [figure]


def start_figure(self, node):
    name = node["name"]
    self.body.append(
        f'<figure class="live" id="live-{name}" data-live="{name}">\n'
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
