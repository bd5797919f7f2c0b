"""Sphinx extension: how long pages take to read, computed from the built pages.

    {minutes}`online`            "25 minutes"
    {minutes}`blocks online`     the sum for several pages, "50 minutes"

`reading.py` measures a page when all pages are written, so nobody types these numbers
twice: a chapter that changes its length changes them everywhere.
"""

import hashlib
import json
import re
from functools import cache
from pathlib import Path

import reading
from bs4 import BeautifulSoup
from docutils import nodes
from sphinx.errors import ExtensionError

SPAN = '<span class="minutes" data-pages="{}">{}</span>'
PLACE = re.compile(SPAN.format('([^"<]*)', "[^<]*"))
RULE = Path(reading.__file__).read_text()  # by which pages are measured


def spoken(minutes):
    """25 as "25 minutes", 125 as "2 hours 5 minutes"."""
    hours, rest = divmod(minutes, 60)
    parts = [(hours, "hour"), (rest, "minute")]
    return " ".join(f"{n} {unit}{'s' * (n != 1)}" for n, unit in parts if n)


def filled(html, minutes_of):
    """The HTML with the sum of `minutes_of(page)` in each place of the role."""

    def sentence(place):
        total = sum(map(minutes_of, place[1].split()))
        return SPAN.format(place[1], spoken(total))

    return PLACE.sub(sentence, html)


def role(name, rawtext, text, lineno, inliner, options=None, content=()):
    pages = " ".join(text.split())
    return [nodes.raw("", SPAN.format(pages, ""), format="html")], []


def fill(app, exception):
    """Write the minutes into the pages that ask for them."""
    if exception or app.builder.format != "html":
        return
    folder = app.outdir / "book"
    # Measuring takes a fifth of a build after a small change: keep what has not
    # changed.
    memory = app.doctreedir / "minutes.json"
    known, used = json.loads(memory.read_text()) if memory.is_file() else {}, {}

    @cache
    def minutes_of(page):
        file = folder / f"{page}.html"
        if not file.is_file():
            raise ExtensionError(f"{{minutes}}: expected a page, got {page!r}")
        html = file.read_text().partition("<article")[2]
        key = hashlib.sha256((RULE + html).encode()).hexdigest()
        if key not in known:
            article = BeautifulSoup("<article" + html, "html.parser").article
            known[key] = reading.measure(article).minutes
        used[key] = known[key]
        return known[key]

    for file in sorted(folder.glob("**/*.html")):
        html = file.read_text()
        if PLACE.search(html):
            file.write_text(filled(html, minutes_of))
    memory.write_text(json.dumps(used))


def setup(app):
    app.add_role("minutes", role)
    app.connect("build-finished", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
