"""The built book, for the tests that read it and the tests that browse it."""

import os
from functools import cache
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "_build/html"
SOURCES = sorted(path for path in (ROOT / "book").iterdir() if path.suffix in (".ipynb", ".md"))
PAGES = [path.stem for path in SOURCES]
NOTEBOOKS = [path.stem for path in SOURCES if path.suffix == ".ipynb"]
# Written by Sphinx beside the book's own pages; readers reach them too.
EXTRA = ["genindex.html", "search.html"]


def require_book():
    """Fail, with the cure, where the book is not built or older than its sources."""
    for source in SOURCES:
        page = HTML / "book" / f"{source.stem}.html"
        if not page.is_file() or page.stat().st_mtime < source.stat().st_mtime:
            state = "is older than its source" if page.is_file() else "is not built"
            pytest.fail(f"{page.relative_to(ROOT)} {state}: run `make book`", pytrace=False)


def page_file(page):
    """The file of a page by its name in book/, such as "standard"."""
    return HTML / "book" / f"{page}.html"


@cache
def parsed(file):
    """An HTML file as a BeautifulSoup tree. Shared by all tests: do not change it."""
    return BeautifulSoup(Path(file).read_text(), "html.parser")


def article(tree):
    """The part of a page that its source gives, without the theme around it."""
    return tree.find("article", class_="bd-article")


def all_files():
    """Every built page, as paths below the site's root."""
    return [
        os.path.relpath(path, HTML) for path in sorted(HTML.rglob("*.html")) if "_static" not in path.parts
    ]
