"""Sphinx extension: the register machine, which runs in the page.

    {machine}       the figure `machine`; the directive's content is its caption

`_static/live/machine.js` starts a worker when the reader asks for it; the worker loads
Pyodide and `flashlib.zip` from `_static/pyodide`, where they are put here, and answers
with `bench.answer`. The worker can be stopped, so that no program blocks the page.
"""

import json
import shutil
import zipfile
from html import escape
from pathlib import Path

from docutils import nodes
from formulas import PACKAGES
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from flashlib.machine import disassemble, programs
from flashlib.machine.exercises import EXERCISES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "_static/pyodide"
RUNTIME = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)
LIBRARY = ("__init__.py", "plain_checks.py", "machine/*.py", "stepper/*.py")
OWN = "# One element of a product. Change the program, or write your own.\n"
OWN += disassemble(programs.dot(2))
PRODUCT = "# a and b have two rows and columns. Store all four elements of c.\n"
SOFTMAX = "# Store the softmax of x[0] to x[{0}] in out[0] to out[{0}].\n"
STATE = "# R1: the maximum so far, R2: the sum so far. Process {}.\n"
STARTS = {
    "c00": "LOAD a[0][0], R0\n\nSTORE R2, c[0][0]\n",
    "locality": PRODUCT,
    "outer": PRODUCT,
    "inner-six": PRODUCT,
    "safe": SOFTMAX.format(2),
    "online": STATE.format("x[1]"),
    "eight": STATE.format("x[1] and x[2]"),
    "turn": SOFTMAX.format(3),
    "three-online": STATE.format("x[1]"),
    "welford-program": (
        "# R1: count, R2: mean, R3: z.\n# Process x[1]. The cell one is 1.\n"
    ),
}
# The pages of the exercises that are not on the figure's.
DEPTH = "depth/machine.html"
HERE = ("locality", "inner-six", "online")


def exercises():
    """{name: what the page shows of an exercise}."""
    return {
        name: {
            "title": exercise.title,
            "registers": exercise.registers,
            "ports": exercise.ports,
            "start": STARTS[name],
            "address": f"{'' if name in HERE else DEPTH}#ex-machine-{name}",
        }
        for name, exercise in EXERCISES.items()
    }


def figure_html():
    size = sum((PACKAGES / "pyodide" / name).stat().st_size for name in RUNTIME)
    options = '<option value="">your own program</option>'
    for name, exercise in EXERCISES.items():
        options += f'<option value="{name}">{escape(exercise.title)}</option>'
    lines = len(OWN.split("\n"))  # as the script counts them
    numbers = "\n".join(map(str, range(1, lines + 1)))
    return (
        f'<script type="application/json">{json.dumps(exercises())}</script>\n'
        '<div class="live-controls">\n'
        '<label>exercise <select class="bench-exercise" autocomplete="off" disabled>'
        f"{options}</select></label>\n"
        '<label>registers <input class="bench-registers" type="number" min="1" max="9" '
        'value="3" autocomplete="off" disabled></label>\n'
        '<label>ports <select class="bench-ports" autocomplete="off" disabled>'
        '<option value="fixed">fixed</option><option value="any">free</option>'
        "</select></label>\n"
        '<a class="bench-task" href="#exercises" hidden>Read the exercise</a>\n</div>\n'
        f'<div class="bench-editor"><pre aria-hidden="true">{numbers}</pre>'
        f'<textarea aria-label="program" rows="{lines}" wrap="off" spellcheck="false" '
        'autocapitalize="off" autocomplete="off" aria-describedby="bench-said" '
        "disabled>"
        f"{escape(OWN)}</textarea></div>\n"
        '<div class="bench-buttons"><button type="button" class="bench-run" disabled>'
        f'Start the machine ({size / 1e6:.0f} MB)</button> <button type="button" '
        'class="bench-stop" disabled>Stop</button> <span id="bench-said" '
        'class="bench-said" role="status">'
        "The machine needs JavaScript.</span></div>\n"
        '<div class="bench-result"></div>\n'
        '<p class="bench-progress"><span></span> <button type="button" '
        'class="bench-forget" disabled>Forget my programs</button></p>\n'
    )


class bench_figure(nodes.General, nodes.Element): ...


class Bench(SphinxDirective):
    has_content = True

    def run(self):
        figure = bench_figure(ids=["machine-live"], names=["machine-live"])
        self.state.document.note_explicit_target(figure)
        self.state.nested_parse(self.content, self.content_offset, figure)
        return [figure]


def start_figure(self, node):
    self.body.append(
        '<figure class="bench" id="machine-live">\n'
        '<details class="live-body">\n<summary>Write programs for the machine and '
        "solve exercises, right on this page</summary>\n"
        f"{figure_html()}</details>\n<figcaption>\n"
    )


def end_figure(self, node):
    self.body.append("</figcaption>\n</figure>\n")


def load_script(app, pagename, templatename, context, doctree):
    if doctree and any(doctree.findall(bench_figure)):
        app.add_js_file("live/machine.js", defer="defer")


def copy_runtime(app):
    """Put Pyodide and the library where the worker finds them."""
    if app.builder.format != "html":
        return
    source, target = PACKAGES / "pyodide", Path(app.outdir) / FOLDER
    if not source.is_dir():
        raise ExtensionError(
            "register_machine.py: pyodide is missing: make node-packages"
        )
    target.mkdir(parents=True, exist_ok=True)
    for name in RUNTIME:
        shutil.copy(source / name, target)
    library = ROOT / "flashlib"
    with zipfile.ZipFile(target / "flashlib.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.write(Path(__file__).with_name("bench.py"), "bench.py")
        for pattern in LIBRARY:
            for path in sorted(library.glob(pattern)):
                packed.write(path, path.relative_to(ROOT))


def setup(app):
    app.add_node(bench_figure, html=(start_figure, end_figure))
    app.add_directive("machine", Bench)
    app.add_css_file("bench.css")
    app.connect("builder-inited", copy_runtime)
    app.connect("html-page-context", load_script, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
