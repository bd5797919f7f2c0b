"""The PDF of the whole book: complete, typeset, numbered, linked, and not cut."""

import re
import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pdf as pdf_tool
import pytest
from bs4 import BeautifulSoup
from pypdf import PdfReader

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "_build" / "html"
PDF = ROOT / "_build" / "pdf" / "flashattention-book.pdf"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reader():
    if not PDF.exists():
        pytest.fail(f"{PDF} is missing: run make pdf first")
    return PdfReader(PDF)


@pytest.fixture(scope="module")
def texts(reader):
    return [page.extract_text() for page in reader.pages]


@pytest.fixture(scope="module")
def articles():
    """{page name: what is printed of its article}, in the order of the book."""
    toc = pdf_tool.contents_of_toc(pdf_tool.read("_toc.yml"))
    files = {page: (SITE / f"{page}.html").read_text() for _, page in toc}
    pages = {page: BeautifulSoup(text, "html.parser") for page, text in files.items()}
    for soup in pages.values():
        for element in soup.select(pdf_tool.NOT_PRINTED):
            element.decompose()
    return {page: soup.find(class_="bd-article") for page, soup in pages.items()}


def squeeze(text):
    """Drop white space and ligatures, which a PDF does not keep."""
    return re.sub(r"\s+", "", unicodedata.normalize("NFKC", text))


@pytest.fixture(scope="module")
def squeezed(texts):
    """The text of the book without white space and page numbers."""
    pages = enumerate(texts, start=1)
    without = (re.sub(rf"(^\s*{n}\s*\n|\n\s*{n}\s*$)", "", s) for n, s in pages)
    return "".join(map(squeeze, without))


@pytest.fixture(scope="module")
def outline(reader):
    """[(title without white space, index of its page)] of the chapters."""
    items = [item for item in reader.outline if not isinstance(item, list)]
    place = reader.get_destination_page_number
    return [(squeeze(item.title), place(item)) for item in items]


def test_outline_has_every_chapter_in_order(outline, articles):
    headings = [article.find("h1") for article in articles.values()]
    titles = [squeeze(heading.get_text()).removesuffix("#") for heading in headings]
    assert [title for title, _ in outline] == titles
    starts = [page for _, page in outline]
    assert starts == sorted(set(starts)), "each begins on a page of its own"
    assert starts[0] >= 2, "the cover and the contents come first"


def test_every_page_has_its_number(texts):
    for n, words in enumerate(map(str.split, texts), start=1):
        assert str(n) in words[:1] + words[-1:]


def test_contents_give_the_page_of_every_chapter(outline, texts):
    contents = squeeze("".join(texts[1 : outline[0][1]]))
    for title, page in outline:
        assert f"{title}{page + 1}" in contents


def select(articles, selector):
    return [tag for article in articles.values() for tag in article.select(selector)]


def test_every_equation_number_is_printed(articles, squeezed):
    signs = select(articles, "div.math .eqno")
    numbers = [re.sub(r"[^(.)\dA-Z]", "", sign.get_text()) for sign in signs]
    assert numbers
    assert [number for number in numbers if number not in squeezed] == []


def test_no_formula_is_left_as_source(articles, squeezed):
    blocks = select(articles, "pre, code")
    code = squeeze("".join(block.get_text() for block in blocks))
    source = r"\$\$|\\(?:frac|sum|partial|mathcal|operatorname|begin\{)"
    printed, meant = (Counter(re.findall(source, text)) for text in (squeezed, code))
    assert printed <= meant, printed - meant


def test_every_line_of_code_is_printed_whole(articles, squeezed):
    texts = [block.get_text() for block in select(articles, "pre")]
    lines = {squeeze(line) for text in texts for line in text.splitlines()}
    missing = [line for line in lines if line not in squeezed]
    # a line that wraps at the end of a page is interrupted by the number of the page
    assert len(missing) <= 0.01 * len(lines), missing[:5]


def test_solutions_are_open(articles, squeezed):
    for paragraph in select(articles, "div.solution p:not(.admonition-title)"):
        if not paragraph.select(".math"):
            assert squeeze(paragraph.get_text()) in squeezed


def test_links_stay_inside_or_lead_to_the_web(reader):
    notes = [note for page in reader.pages for note in page.get("/Annots", [])]
    links = [note.get_object() for note in notes]
    links = [link for link in links if link.get("/Subtype") == "/Link"]
    addresses = [link.get("/A", {}).get("/URI") for link in links]
    outside = [address for address in addresses if address is not None]
    assert len(addresses) > 2 * len(outside) > 0
    assert not [a for a in outside if not a.startswith("https://")]


PAGE = """<html><head></head>
<body><article class="bd-article"><h1>Title</h1>%s</article></body></html>"""


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<p style="width: 2000px">too wide</p>', "too wide"),
        (r'<div class="math">a \over</div>', "not typeset"),
    ],
)
def test_a_faulty_page_is_refused(body, fault, tmp_path, monkeypatch):
    site = tmp_path / "site"
    (site / "book").mkdir(parents=True)
    (site / "_static").symlink_to(SITE / "_static")
    (site / "book" / "index.html").write_text(PAGE % body)
    (tmp_path / "_toc.yml").write_text("root: book/index\nparts: []\n")
    (tmp_path / "_config.yml").write_text((ROOT / "_config.yml").read_text())
    monkeypatch.setattr(pdf_tool, "ROOT", tmp_path)
    # In a thread of its own: the browser tests of the same run keep Playwright's loop
    # in this one.
    with ThreadPoolExecutor(1) as thread, pytest.raises(RuntimeError, match=fault):
        thread.submit(pdf_tool.print_book, site, tmp_path / "book.pdf").result()
