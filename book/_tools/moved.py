"""Sphinx extension: old addresses of rewritten pages lead to the new places.

    python book/_tools/moved.py list PAGE     the anchors of a built page, for its file
    python book/_tools/moved.py numbers PAGE  old and new numbers of what is in its file

`book/first_edition/<page>.txt` lists what the first edition of a page had, one a line:
the anchor, its number if it had one, and after "->" where it went:

    equation-eq-online-split 6.2
    how-it-fails -> #two-ways-it-breaks
    in-floating-point -> depth/online#rounding

Without an arrow the anchor is still on the page, or it moved to the depth page and kept
its name. A few lines of script on the page send an old address to the new one.
"""

import argparse
import json
import re
from functools import cache
from pathlib import Path

from docutils import nodes

ROOT = Path(__file__).resolve().parents[2]
LISTS = ROOT / "book/first_edition"
SITE = ROOT / "_build/html/book"
ANCHORED = "section, span, div.math, figure, table, .exercise, .solution, .proof"
AUTOMATIC = re.compile(r"id\d+|\w+-content|.*-solution-\d+")
NUMBER = ".eqno, .caption-number"
SCRIPT = """<script>
(moved => {
  const go = () => {
    const to = moved[decodeURIComponent(location.hash.slice(1))];
    if (to) location.replace(to);
  };
  go();
  addEventListener("hashchange", go);
})(%s);
</script>
"""


def read(page):
    """{anchor: (number, target)} of the first edition of a page; "" where missing."""
    file = LISTS / f"{page}.txt"
    lines = file.read_text().splitlines() if file.is_file() else []
    entry = re.compile(r"(\S+)(?: ([\w.]+))?(?: -> (\S+))?")
    found = {}
    for line in lines:
        match = entry.fullmatch(line)
        if not match:
            expected = "expected anchor [number] [-> target]"
            raise ValueError(f"{file.name}: {expected}, got {line!r}")
        found[match[1]] = (match[2] or "", match[3] or "")
    return found


def address(page, anchor, target, ids):
    """Where an old anchor of a page leads now, None if it is nowhere.

    ids: a function of a page, the anchors that it has now.
    """
    for to in [target] if target else [f"#{anchor}", f"depth/{page}#{anchor}"]:
        other, _, place = to.partition("#")
        if not place or place in ids(other or page):
            return (other and f"{other}.html") + (place and f"#{place}")
    return None


def redirect(app, pagename, templatename, context, doctree):
    """Add the script to a page that has lost anchors."""

    @cache
    def ids(page):
        name = f"book/{page}"
        known = name in app.env.all_docs
        tree = app.env.get_doctree(name) if known else nodes.Element()
        return {name for node in tree.findall(nodes.Element) for name in node["ids"]}

    page = pagename.removeprefix("book/")
    listed = {a: address(page, a, to, ids) for a, (_, to) in read(page).items()}
    moved = {a: to for a, to in listed.items() if to and to != f"#{a}"}
    if moved:
        context["metatags"] += SCRIPT % json.dumps(moved)


def built(page):
    """{anchor: number, "" without one} of a page of the built site."""
    from bs4 import BeautifulSoup

    soup = BeautifulSoup((SITE / f"{page}.html").read_text(), "html.parser")
    found = {}
    for tag in soup.find("article", class_="bd-article").select(ANCHORED):
        name = tag.get("id", "")
        if not name or AUTOMATIC.fullmatch(name) or tag.find("h1", recursive=False):
            continue
        sign = None if tag.name in ("section", "span") else tag.select_one(NUMBER)
        digits = sign and re.search(r"[\dA-Z]*\.?[\dD]+\b", sign.get_text())
        found[name] = digits[0] if digits else ""
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["list", "numbers"])
    parser.add_argument("page")
    options = parser.parse_args()
    page = options.page
    if options.command == "list":
        print("\n".join(f"{a} {n}".strip() for a, n in built(page).items()))
        return
    depth = SITE / f"depth/{page}.html"
    now = (built(f"depth/{page}") if depth.is_file() else {}) | built(page)
    for anchor, (number, _) in read(page).items():
        if number:
            print(f"{number:8}{now.get(anchor, 'gone'):8}{anchor}")


def setup(app):
    app.connect("html-page-context", redirect)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    main()
