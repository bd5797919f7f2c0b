"""The PDF of the whole book: complete, typeset, numbered, linked, and nothing cut off."""

import re
import unicodedata
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
    """{page name: its article as parsed HTML}, in the order of the book."""
    toc = pdf_tool.contents_of_toc(pdf_tool.read("_toc.yml"))
    pages = {page: BeautifulSoup((SITE / f"{page}.html").read_text(), "html.parser") for _, page in toc}
    return {page: soup.find("article", class_="bd-article") for page, soup in pages.items()}


def squeeze(text):
    """Drop white space and ligatures: a PDF keeps no trace of wrapped lines, and prints fi as one letter."""
    return re.sub(r"\s+", "", unicodedata.normalize("NFKC", text))


@pytest.fixture(scope="module")
def squeezed(texts):
    """The text of the book without white space and without the numbers at the foot of the pages."""
    without = (re.sub(rf"(^\s*{n}\s*\n|\n\s*{n}\s*$)", "", text) for n, text in enumerate(texts, start=1))
    return "".join(map(squeeze, without))


def top_of_outline(reader):
    return [item for item in reader.outline if not isinstance(item, list)]


def test_outline_has_every_chapter_in_order(reader, articles):
    titles = []
    for article in articles.values():
        heading = article.find("h1")
        for sign in heading.find_all("a", class_="headerlink"):
            sign.extract()
        titles.append(squeeze(heading.get_text()))
    assert [squeeze(item.title) for item in top_of_outline(reader)] == titles


def test_chapters_start_on_pages_of_their_own(reader):
    starts = [reader.get_destination_page_number(item) for item in top_of_outline(reader)]
    assert starts == sorted(set(starts))
    assert starts[0] >= 2, "the cover and the contents come first"
    assert starts[-1] < len(reader.pages)


def test_every_page_has_its_number(texts):
    words = [text.split() for text in texts]
    assert [n for n, page in enumerate(words, start=1) if str(n) not in page[:1] + page[-1:]] == []


def test_contents_give_the_page_of_every_chapter(reader, texts):
    contents = squeeze("".join(texts[1 : reader.get_destination_page_number(top_of_outline(reader)[0])]))
    for item in top_of_outline(reader):
        assert f"{squeeze(item.title)}{reader.get_destination_page_number(item) + 1}" in contents


def test_every_equation_number_is_printed(articles, squeezed):
    numbers = [
        re.sub(r"[^(.)\d]", "", number.get_text())
        for article in articles.values()
        for number in article.select("div.math .eqno")
    ]
    assert numbers
    assert [number for number in numbers if number not in squeezed] == []


def test_no_formula_is_left_as_source(articles, squeezed):
    blocks = [block for article in articles.values() for block in article.select("pre, code")]
    code = squeeze("".join(block.get_text() for block in blocks))
    for source in ("$$", r"\frac", r"\sum", r"\partial", r"\mathcal", r"\operatorname", r"\begin{"):
        assert squeezed.count(source) <= code.count(source), f"{source} is printed outside code"


def test_every_line_of_code_is_printed_whole(articles, squeezed):
    lines = {
        squeeze(line)
        for article in articles.values()
        for block in article.find_all("pre")
        for line in block.get_text().splitlines()
    }
    missing = [line for line in lines if line not in squeezed]
    # a line that wraps at the end of a page is interrupted by the number of the page
    assert len(missing) <= 0.01 * len(lines), missing[:5]


def test_solutions_are_open(articles, squeezed):
    for article in articles.values():
        for solution in article.select("div.solution"):
            plain = [p for p in solution.select("p:not(.admonition-title)") if not p.select(".math")]
            for paragraph in plain:
                assert squeeze(paragraph.get_text()) in squeezed


def test_links_stay_inside_or_lead_to_the_web(reader):
    inside = outside = 0
    for page in reader.pages:
        for reference in page.get("/Annots", []):
            link = reference.get_object()
            if link.get("/Subtype") != "/Link":
                continue
            address = link.get("/A", {}).get("/URI")
            if address is None:
                inside += 1
                continue
            outside += 1
            assert address.startswith("https://"), address
    assert inside > outside > 0


PAGE = """<html><head><script>window.MathJax = {tex: {packages: {"[-]": ["noundefined"]}}}</script>
<script defer src="../_static/mathjax/tex-chtml.js"></script></head>
<body><article class="bd-article"><h1>Title</h1>%s</article></body></html>"""


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<p style="width: 2000px">too wide</p>', "too wide"),
        (r'<div class="math">\[ \nosuchmacro \]</div>', "nosuchmacro"),
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
    # In a thread of its own: the browser tests of the same run keep Playwright's loop in this one.
    with ThreadPoolExecutor(1) as thread, pytest.raises(RuntimeError, match=fault):
        thread.submit(pdf_tool.print_book, site, tmp_path / "book.pdf").result()
