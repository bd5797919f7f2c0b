"""Sphinx extension: KaTeX renders every formula while the book is built.

One Node process answers for all formulas, 6,000 in about a second. A page gets HTML for
the eye and MathML for screen readers, and needs no script. A formula that KaTeX does
not know is a warning that names its page and label. sphinxcontrib-katex would do, but
it ships a KaTeX of its own, and its errors name no page.

The npm packages are in `_build/node`, where `make book` installs them.
"""

import atexit
import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "_build/node/node_modules"
SCRIPT = Path(__file__).with_name("node") / "formulas.cjs"

log = logging.getLogger(__name__)


@cache
def katex():
    """The Node process, started once; ExtensionError if something is missing."""
    node = shutil.which("node")
    if not node:
        raise ExtensionError("node is missing: sudo apt-get install -y nodejs npm")
    if not (PACKAGES / "katex").is_dir():
        raise ExtensionError("KaTeX is missing: make node-packages")
    process = subprocess.Popen(
        [node, SCRIPT],
        env={**os.environ, "NODE_PATH": str(PACKAGES)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.kill)
    return process


@cache
def rendered(tex, displayed):
    """A formula as HTML with MathML; ValueError says what KaTeX does not understand."""
    process = katex()
    process.stdin.write(json.dumps([tex, displayed]) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["html"]


def html(self, node, tex, displayed):
    """The HTML of a formula; where KaTeX has none, its TeX and a warning."""
    try:
        return rendered(tex, displayed)
    except ValueError as error:
        label = node.get("label") or tex.strip()[:40]
        log.warning("formula %s: %s", label, error, location=node)
        return self.encode(tex)


def aligned(tex):
    """The TeX of a block as Sphinx means it: blank lines and \\\\ make rows."""
    parts = [part for part in tex.split("\n\n") if part.strip()]
    parts = [rf"\begin{{split}}{p}\end{{split}}" if r"\\" in p else p for p in parts]
    if len(parts) == 1:
        return parts[0]
    rows = r" \\ ".join(parts)
    return rf"\begin{{aligned}}{rows}\end{{aligned}}"


def visit_math(self, node):
    start = self.starttag(node, "span", "", CLASS="math notranslate nohighlight")
    self.body += [start, html(self, node, node.astext(), False), "</span>"]
    raise nodes.SkipNode


def visit_math_block(self, node):
    self.body.append(self.starttag(node, "div", CLASS="math notranslate nohighlight"))
    if node["number"]:
        number = get_node_equation_number(self, node)
        self.body.append(f'<span class="eqno">({number})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    tex = node.astext() if node["nowrap"] else aligned(node.astext())
    self.body += [html(self, node, tex, True), "</div>\n"]
    raise nodes.SkipNode


def copy_style(app):
    """Put KaTeX's style sheet and fonts into the site. Every browser reads WOFF2."""
    source, target = PACKAGES / "katex/dist", Path(app.outdir) / "_static/katex"
    katex()
    (target / "fonts").mkdir(parents=True, exist_ok=True)
    for font in source.glob("fonts/*.woff2"):
        shutil.copy(font, target / "fonts")
    style = (source / "katex.min.css").read_text()
    older = r',url\([^)]*\.(?:woff|ttf)\) format\("\w+"\)'
    (target / "katex.css").write_text(re.sub(older, "", style))


def setup(app):
    app.add_html_math_renderer("katex", (visit_math, None), (visit_math_block, None))
    app.add_css_file("katex/katex.css")
    app.add_css_file("formulas.css")
    app.add_js_file("formulas.js", defer="defer")
    app.connect("builder-inited", copy_style)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
