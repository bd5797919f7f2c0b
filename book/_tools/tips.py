"""Sphinx extension: hovering over a reference shows what it refers to.

The page's script (`_static/tips.js`) copies what is on the same page, so that only the
targets on other pages have to be stored. Each page has them in a file of its own,
`_static/tips/<page>.js`, which is fetched when a reader first hovers over such a link.
It is a script and not JSON because a page opened from a disk may not fetch JSON.

sphinx-tippy would put every target of a page, its own included, into a script that
every reader loads, drops the numbers of equations and cannot be dismissed by keyboard.
"""

import json
import re
from pathlib import Path

# What tips.js shows too: equations, figures, algorithms, terms and works cited.
REFERENCE = re.compile(
    r'href="([^"#:]+\.html)#((?:equation|fig|alg|term)-[^"]+|id\d+)"'
)


def element(page, place):
    """The HTML of the element with this id; of a term, its definition."""
    start = re.search(rf'<(\w+)[^<>]*\sid="{re.escape(place)}"', page)
    if not start:
        return None
    begin, name = start.start(), start[1]
    if name == "dt":
        begin, name = page.index("<dd", begin), "dd"
    depth = 0
    for tag in re.compile(rf"<(/?){name}\b").finditer(page, begin):
        depth += -1 if tag[1] else 1
        if depth == 0:
            return page[begin : page.index(">", tag.end()) + 1]


def write_tips(app, exception):
    """Write each page's file, once all pages are written."""
    if exception or app.builder.format != "html":
        return
    root = Path(app.outdir).resolve()
    files = {doc: root / app.builder.get_target_uri(doc) for doc in app.env.found_docs}
    pages = {file: file.read_text() for file in files.values()}
    for doc, file in files.items():
        tips = {}
        article = pages[file].partition("<article")[2].partition("</article>")[0]
        for path, place in sorted(set(REFERENCE.findall(article))):
            other = (file.parent / path).resolve()
            html = element(pages[other], place) if other in pages else None
            if html:
                tips[f"{path}#{place}"] = html
        target = root / f"_static/tips/{doc}.js"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"receiveTips({json.dumps(tips, ensure_ascii=False)})\n")


def load_script(app, pagename, templatename, context, doctree):
    """Load tips.js, telling it where the page's file is."""
    if doctree:
        data = {"data-tips": f"_static/tips/{pagename}.js"}
        app.add_js_file("tips.js", loading_method="defer", **data)


def setup(app):
    app.add_css_file("tips.css")
    app.connect("html-page-context", load_script)
    app.connect("build-finished", write_tips)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
