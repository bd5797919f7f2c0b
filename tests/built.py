"""The built book, for the tests that read it and the tests that browse it."""

import re
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "_build/html"
BOOK = ROOT / "book"
SOURCES = [
    path
    for kind in ("*.ipynb", "depth/*.ipynb", "*.md")
    for path in sorted(BOOK.glob(kind))
]


def page_of(path):
    """The name of the page of a source file: "online", "depth/online"."""
    return path.relative_to(BOOK).with_suffix("").as_posix()


NOTEBOOKS = [page_of(path) for path in SOURCES if path.suffix == ".ipynb"]
PAGES = sorted(map(page_of, SOURCES))
# Sphinx writes these next to the book's own pages, and readers reach them too.
EXTRA = ["genindex.html", "search.html"]


def require_book():
    """Fail, naming the cure, where the book is not built or older than its sources."""
    for source in SOURCES:
        page = page_file(page_of(source))
        if not page.is_file() or page.stat().st_mtime < source.stat().st_mtime:
            pytest.fail(
                f"{page.name} is old, or not in _toc.yml: run `make book`", False
            )


def source_file(page):
    """The source of a page by its name, such as "online" or "depth/online"."""
    return next(path for path in SOURCES if page_of(path) == page)


def page_file(page):
    """The HTML file of a page by its name."""
    return HTML / source_file(page).relative_to(ROOT).with_suffix(".html")


def address(site, page):
    """The URL of a page on a server of the site."""
    return f"{site}/{page_file(page).relative_to(HTML)}"


@contextmanager
def served(folder):
    """The address of a folder on a server of this machine."""
    import serve  # not at the top: programs without pytest's path import this module

    server = serve.start(folder)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def with_tex(text):
    r"""HTML in which each formula is its TeX again, such as \(x\) or \[x\]."""
    pieces, end = [], 0
    for start in re.finditer(r'<span class="katex(-display)?">', text):
        if start.start() < end:
            continue  # inside of the last one
        pieces.append(text[end : start.start()])
        depth = 0
        for tag in re.finditer(r"<(/?)span\b[^>]*>", text[start.start() :]):
            depth += -1 if tag[1] else 1
            if not depth:
                break
        end = start.start() + tag.end()
        source = re.search("<annotation [^>]*>([^<]*)<", text[start.start() : end])[1]
        pieces.append(rf"\[{source}\]" if start[1] else rf"\({source}\)")
    return "".join([*pieces, text[end:]])


MAIN = [
    page
    for page in NOTEBOOKS
    if not page.startswith("depth/") and page not in ("index", "api")  # no chapters
]


@cache
def parsed(file):
    """An HTML file as a shared tree in which formulas are TeX: do not change it."""
    return BeautifulSoup(with_tex(Path(file).read_text()), "html.parser")


def article(page):
    """The part of a page that its source gives, without the theme around it."""
    return parsed(page_file(page)).find("article", class_="bd-article")


def none(lines):
    """Fail with these lines, if there are any."""
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)
