"""Sphinx extension: how each equation was checked, next to its number.

Every numbered equation gets a mark. It opens and shows which code checked the equation,
in which cell, and how closely the two sides agree. The data come from the committed
notebooks: the lines "eq-...: holds" of their outputs, and the calls `check(...)`,
`at_most(...)` and `holds(...)` of their sources. Pages are marked when they are
written, so an incremental build that writes all pages shows what the notebooks say now.

Cells fold to one line where a reader wants to read on: those that only check equations
("Checked: (8.3), (8.4)", each number a link), those that begin with imports and show
nothing ("Setup"), and those tagged `hide-input` ("Code"), with what they print if they
are tagged `hide-print` too: numbers that the text has. A cell that only shows code of
the library shows that code alone, with the numbers of equations in place of labels, and
folds it if it is tagged `hide-input`.
"""

import ast
import html
import json
import re
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

# Equations that define something, so that nothing can be executed.
DEFINITIONS = {
    "eq-bottleneck-intensity": "names the ratio that the roofline uses",
    "eq-flash1-paper-sizes": "states the block sizes that the paper prints",
}

HOLDS = re.compile(r"^.*?(\S+): holds(?: \(below (.+)\))?$\n?", re.M)
LONGEST = 16  # lines of a loop that a mark still shows as a whole


class Executed(NamedTuple):
    """What one cell did for one equation."""

    page: str
    cell: int
    code: str
    bounds: list  # of each line "holds": "1e-12", or None for a condition


# -- What the notebooks say


def printed(cell):
    """What a code cell wrote to its streams."""
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def index(folder):
    """{label: what was executed} of all notebooks below a folder of sources."""
    found = defaultdict(list)
    for path in sorted((folder / "book").rglob("*.ipynb")):
        page = path.relative_to(folder).with_suffix("").as_posix()
        for place, cell in enumerate(json.loads(path.read_text())["cells"]):
            if cell["cell_type"] != "code":
                continue
            bounds = defaultdict(list)
            for label, bound in HOLDS.findall(printed(cell)):
                bounds[label].append(bound or None)
            for label, given in bounds.items():
                code = checking("".join(cell["source"]), label)
                found[label].append(Executed(page, place, code, given))
    return dict(found)


def lines_of(source, node):
    """The source lines of a statement or expression."""
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines))


def may_be(argument, label):
    """How well a call's first argument fits a label: 2 says it, 1 may compute it."""
    if isinstance(argument, ast.Constant):
        return 2 * (argument.value == label)
    if isinstance(argument, ast.JoinedStr):
        parts = [
            re.escape(part.value) if isinstance(part, ast.Constant) else ".+"
            for part in argument.values
        ]
        return int(bool(re.fullmatch("".join(parts), label)))
    return 1


def checking(source, label):
    """The part of a cell's source that checks an equation."""
    body = ast.parse(source).body
    calls = [
        (may_be(call.args[0], label), call, statement)
        for statement in body
        for call in ast.walk(statement)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).rpartition(".")[2] in ("check", "at_most", "holds")
        and call.args
    ]
    best = max((fit for fit, *_ in calls), default=0)
    parts = {}  # in the order of the source, each once
    for _, call, statement in [found for found in calls if found[0] == best > 0]:
        for before in leading_to(call, body[: body.index(statement)]):
            parts[before.lineno] = before
        shown = statement if length(statement) <= LONGEST else call
        parts[shown.lineno] = shown
    return "\n".join(lines_of(source, parts[line]) for line in sorted(parts)) or source


def length(node):
    return node.end_lineno - node.lineno + 1


def leading_to(call, statements):
    """The short statements before a call that compute what it compares."""
    names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    for statement in reversed(statements):
        bound, changed = written(statement)
        long = LONGEST if names & changed else LONGEST // 2
        if names & (bound | changed) and length(statement) <= long:
            yield statement
        if isinstance(statement, ast.Assign):
            names -= bound


def written(statement):
    """The names that a statement binds, and those whose entries it changes."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}, set()
    bound, changed = set(), set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".append"):
            node = node.func
        elif not isinstance(getattr(node, "ctx", None), ast.Store):
            continue
        names = bound if isinstance(node, ast.Name) else changed
        while isinstance(node, ast.Subscript | ast.Attribute):
            node = node.value
        if isinstance(node, ast.Name):
            names.add(node.id)
    return bound, changed


def only_sets_up(source):
    """Whether a cell begins with imports."""
    body = ast.parse(source).body
    return bool(body) and isinstance(body[0], ast.Import | ast.ImportFrom)


def only_shows(source):
    """Whether a cell is one `show(...)`, or one `display(show(...), ...)`."""
    body = ast.parse(source).body
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "display":
        calls = call.args
    else:
        calls = [call]
    shows = ("show", "notebook.show")
    return all(isinstance(x, ast.Call) and ast.unparse(x.func) in shows for x in calls)


def only_checks(source):
    """Whether a cell that prints only "holds" defines nothing a reader should see."""
    shown = (ast.FunctionDef, ast.ClassDef)
    return not any(isinstance(statement, shown) for statement in ast.parse(source).body)


# -- What a page shows


def markup(text):
    return nodes.raw("", text, format="html")


def fold(kind, name, label, children):
    """Nodes of a `details` element of class ``kind`` that opens and closes."""
    said = f' aria-label="{html.escape(label)}"' if label else ""
    start = f'<details class="{kind}"><summary{said}>{html.escape(name)}</summary>'
    return [markup(start), *children, markup("</details>")]


def size(bound):
    """A bound such as "2^-20" or "1e-12" as a number."""
    base, _, exponent = bound.partition("^")
    return float(base) ** float(exponent or 1)


def power(bound):
    """A bound such as "2^-20" or "1e-12" as HTML with an exponent."""
    digits, _, exponent = bound.replace("^", "e").partition("e")
    raised = f"<sup>{int(exponent)}</sup>".replace("-", "\N{MINUS SIGN}")
    if "^" in bound:
        return digits + raised
    return ("" if digits == "1" else f"{digits} · ") + "10" + raised


def accuracy(bounds, place):
    """What the lines "holds" of one cell say, with a link to the cell, as HTML."""
    given = [bound for bound in bounds if bound]
    checks = f"{len(bounds)} checks" if len(bounds) > 1 else "Checked"
    said = "the condition holds"
    if given:
        said = f"both sides agree to within {power(max(given, key=size))}"
    return f"{checks} on {place}: {said}"


def take_out_prints(outputs):
    """Remove what a cell wrote to its streams from its outputs; return that as another
    output.
    """
    blocks = [x for output in outputs for x in output.findall(nodes.literal_block)]
    streams = [block for block in blocks if "stream" in block["classes"]]
    for block in streams:
        block.parent.remove(block)
    return [nodes.container("", *streams, classes=["cell_output"])]


class Marks(SphinxPostTransform):
    """Put marks next to the numbers of equations, and fold cells."""

    default_priority = 6  # before anything turns formulas and cells into HTML
    formats = ("html",)
    executed: dict  # set when a build starts

    def run(self, **kwargs):
        for equation in list(self.document.findall(nodes.math_block)):
            if equation.get("number") and equation.get("label"):
                self.mark(equation)
        for cell in list(self.document.findall(nodes.container)):
            if cell.get("nb_element") == "cell_code":
                self.fold(cell)
        for code in self.document.findall(nodes.literal_block):
            self.name_equations(code)

    def name_equations(self, code):
        """Write numbers for the labels of equations in docstrings of the library."""
        text = re.sub(r"``(eq-[\w-]+)``", self.number_in_text, code.astext())
        if text != code.astext():
            code.children, code.rawsource = [nodes.Text(text)], text

    def number_in_text(self, match):
        number = self.number(match[1])
        return number.astext() if number else match[0]

    def number(self, label):
        """A link to an equation that reads as its number; None for another label."""
        math = self.env.get_domain("math")
        page, builder = self.env.docname, self.app.builder
        return math.resolve_xref(self.env, page, builder, "eq", label, None, None)

    def mark(self, equation):
        label = equation["label"]
        number = self.number(label).astext()
        if label in DEFINITIONS:
            text = f"<p>This equation {html.escape(DEFINITIONS[label])}.</p>"
            name, said = "definition", f"{number} is a definition: show why"
        elif label in self.executed:
            cells = self.executed[label]
            text = "".join(map(self.account, cells))
            name, said = "✓", f"{number} is checked: show how"
        else:
            return
        box = nodes.container(classes=["equation"])
        equation.parent.replace(equation, box)  # replace_self would copy the id
        text = f'<div class="account">{text}</div>'
        box.extend([equation, *fold("mark", name, said, [markup(text)])])

    def account(self, executed):
        """What one cell did, as HTML."""
        page, cell, code, bounds = executed
        here = page == self.env.docname
        title = "this page" if here else self.env.titles[page].astext()
        address = (
            "" if here else self.app.builder.get_relative_uri(self.env.docname, page)
        )
        link = f'<a href="{address}#cell-{cell}">{html.escape(title)}</a>'
        return (
            f"<p>{accuracy(bounds, link)}.</p>"
            f"<pre><code>{html.escape(code)}</code></pre>"
        )

    def fold(self, cell):
        """Fold a code cell, or parts of it, and name the equations that it checks."""
        source = cell.children[0]
        if source.get("nb_element") != "cell_code_source":
            return
        code = source.astext()
        hidden = cell.attributes.pop("hide_mode", None) == "input"
        outputs = cell.children[1:]
        labels = self.take_out_checks(outputs) if outputs else []
        tags = cell["cell_metadata"].get("tags", ())
        printed = take_out_prints(outputs) if "hide-print" in tags else []
        silent = not any(output.children for output in outputs)
        if labels:
            cell["ids"].append(f"cell-{cell['cell_index']}")
            below = [markup(f"<pre>{html.escape(''.join(t for _, t in labels))}</pre>")]
            whole = silent and (hidden or only_checks(code))
            folded = [source, *printed, *below] if whole else below
            names = dict.fromkeys(label for label, _ in labels)
            line = nodes.container(classes=["checked"])
            line += fold("fold", "Checked:", "", folded)
            line += self.names(names)
            cell.children = [line] if whole else [source, *filter(len, outputs), line]
            hidden = hidden and not whole
        elif silent and only_sets_up(code):
            cell.children = fold("fold", "Setup", "", [source])
            hidden = False
        elif outputs and only_shows(code):
            cell.children = fold("fold", "Code", "", outputs) if hidden else outputs
            hidden = False
        if hidden:
            cell.children[:1] = fold("fold", "Code", "", [source, *printed])

    def take_out_checks(self, outputs):
        """Remove the lines "holds" from outputs; return [(label, line)]."""
        labels = []
        for block in list(outputs[0].findall(nodes.literal_block)):
            if "stream" not in block["classes"]:
                continue
            text = block.astext()
            labels += [(m[1], m[0]) for m in HOLDS.finditer(text)]
            rest = HOLDS.sub("", text).strip("\n")
            if rest:
                block.children = [nodes.Text(rest)]
                block.rawsource = rest
            else:
                block.parent.remove(block)
        return labels

    def names(self, labels):
        """The paragraph that names what was checked: numbers, or a claim's words."""
        line = nodes.paragraph()
        page = self.env.docname.rpartition("/")[2]
        for label in labels:
            if line.children:
                line += nodes.Text(", ")
            claim = re.sub(rf"^(ex-)?{page}-", "", label).replace("-", " ")
            line += self.number(label) or nodes.Text(claim)
        return line


def read_notebooks(app):
    Marks.executed = index(Path(app.srcdir))


def setup(app):
    app.connect("builder-inited", read_notebooks)
    app.add_post_transform(Marks)
    app.add_css_file("marks.css")
    app.add_css_file("code.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
