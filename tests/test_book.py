"""The built book: equations are executed, numbers computed, links lead somewhere.

The functions named `…_faults` judge HTML; the tests at the end give them wrong HTML.
"""

import os
import re
from collections import Counter
from functools import cache
from urllib.parse import unquote, urlsplit

import built
import icons
import marks
import nbformat
import notebooks
import pytest
from bs4 import BeautifulSoup
from built import HTML, NOTEBOOKS, PAGES, article, none

each_page = pytest.mark.parametrize("page", PAGES)
each_notebook = pytest.mark.parametrize("page", NOTEBOOKS)


@pytest.fixture(scope="module", autouse=True)
def book():
    built.require_book()


def all_files():
    """Every built page, as paths below the site's root."""
    files = [os.path.relpath(path, HTML) for path in sorted(HTML.rglob("*.html"))]
    return [file for file in files if not file.startswith("_static")]


def test_nothing_else_was_built():
    pages = {os.path.relpath(built.page_file(page), HTML) for page in PAGES}
    theme = {*built.EXTRA, "index.html", "prf-prf.html", "404.html"}
    assert set(all_files()) - theme == pages


# -- Equations


def equations(page):
    """The labels of the numbered equations of a parsed page, "(no id)" without one."""
    blocks = [
        number.find_parent(class_="math") for number in page.select(".math .eqno")
    ]
    return [re.sub("^equation-", "", block.get("id", "(no id)")) for block in blocks]


def executed(notebook):
    """The labels that hold according to a notebook's committed outputs."""
    outputs = [out for cell in notebooks.code_cells(notebook) for out in cell.outputs]
    text = "\n".join(output.get("text", "") for output in outputs)
    return set(re.findall(r"(\S+): holds(?: \(below .+\))?$", text, re.M))


def equation_faults(labels, executed, definitions):
    """What is wrong with {page: labels}, given those executed and those defined."""
    lines = []
    for page, found in labels.items():
        step = page.removeprefix("depth/")
        for label in found:
            if not re.fullmatch(rf"eq-{step}(-[a-z0-9]+)+", label):
                lines.append(f"{page}: label {label} is not eq-{step}-<name>")
            if label not in executed and label not in definitions:
                lines.append(f"{page}: {label} is neither executed nor a definition")
    named = {label for label in executed if label.startswith("eq-")}
    known = {label for found in labels.values() for label in found}
    lines += [f"{x} is no equation" for x in (named | set(definitions)) - known]
    return lines + [f"{x} is executed and a definition" for x in named & {*definitions}]


def test_every_equation_is_executed_or_a_definition():
    labels = {page: equations(article(page)) for page in PAGES}
    assert any(labels.values()), "no equation found in any page"
    chapters = [nbformat.read(built.source_file(page), 4) for page in NOTEBOOKS]
    done = set().union(*map(executed, chapters))
    none(equation_faults(labels, done, marks.DEFINITIONS))


def mark_faults(article):
    """Numbers of equations without a mark that explains them, and checks left open."""
    lines = []
    for number in article.select(".math .eqno"):
        mark = number.find_parent(class_="math").find_next_sibling("details")
        account = mark and "mark" in mark["class"] and mark.select_one(".account p")
        if not (account and mark.summary.get("aria-label") and account.get_text()):
            lines.append(f"{number.get_text()} has no mark that opens")
    left = words(article, ".checked > details", ".account")
    lines += [f"visible: {m[0].strip()}" for m in marks.HOLDS.finditer(left)]
    for cell in article.select("section > h2, section > h3"):
        if "Exercises" in cell.get_text():
            open_code = cell.parent.select(":scope > .cell > .cell_input")
            lines += [f"solutions are open: {c.get_text()[:60]!r}" for c in open_code]
    return lines


@each_page
def test_every_equation_has_a_mark_and_checks_are_folded(page):
    none(mark_faults(article(page)))


# -- Numbers

# Each unit as it is compared, and the ways to write it.
UNITS = {
    "kB": "kB|KB", "MB": "MB", "GB": "GB", "TB": "TB", "KiB": "KiB", "MiB": "MiB",
    "GiB": "GiB", "GB/s": "GB/s", "TB/s": "TB/s", "TFLOP/s": "TFLOPs?/s|TFLOPS",
    "GFLOP": "GFLOPs?", "TFLOP": "TFLOPs?", "FLOP": "FLOPs?|flops?",
    "FLOP/B": r"FLOPs?/B|FLOPs? per byte", "ns": "ns", "us": "us|µs|μs", "ms": "ms",
    "byte": "bytes?", "word": "words?", "%": r"%|per ?cent",
    "x": r"(?<=\d)x\b|×(?= (?:as|the|faster|slower)|[.,;)])"
         r"|times (?:as|faster|slower|more|less|fewer)|ratio|relative to",
}  # fmt: skip
_UNIT = "|".join(f"(?P<u{i}>{ways})" for i, ways in enumerate(UNITS.values()))
_QUANTITY = re.compile(
    rf"(?P<number>(?<![\w.^-])\d[\d,]*(?:\.\d+)?)\s?(?:{_UNIT})(?![\w/])(?!\s\d)"
)


def plain(text):
    """Text with TeX units and all spaces and thousands separators made plain."""
    text = re.sub(r"\\(?:mathrm|text|textrm|operatorname)\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\%", "%", text)
    text = re.sub(r"\\times\b", "×", text)
    text = re.sub(r"\\[,;:! ]|~|[\u00a0\u2009\u202f]", " ", text).replace("{,}", ",")
    text = re.sub(r"(?<=\d)[ ,](?=\d{3}\b)", "", text)
    return re.sub(r"\s+", " ", text)


def quantities(text):
    """The (number, unit) pairs that a text states."""
    for match in _QUANTITY.finditer(plain(text)):
        unit = next(unit for i, unit in enumerate(UNITS) if match[f"u{i}"])
        yield match["number"].replace(",", ""), unit


def says(text, number, unit):
    """Whether a plain text has the number and, anywhere (say, in a head), the unit."""
    exact = rf"(?<![\d.])(?<!e-){re.escape(number)}(?!\d|\.\d|e[-+]?\d)"
    named = rf"(?<![A-Za-z/])(?:{UNITS[unit]})(?![A-Za-z/])"
    return bool(re.search(exact, text) and re.search(named, text))


def words(block, *left_out):
    """The text of a block without the elements of these selectors."""
    hidden = {id(part) for part in block.select(", ".join(left_out))}
    return "".join(
        text
        for text in block.find_all(string=True)
        if not any(id(parent) in hidden for parent in text.parents)
    )


PROSE = ["p", "li", "td", "th", "dd", "figcaption"]
# `make pdf` writes the size of its file there.
PDF_BUTTON = "a[href$='flashattention-book.pdf']"


def quantity_faults(article):
    """The quantities in prose that no output shows and no citation supports."""
    boxes = article.select(".cell_output .output, .cell_output table")
    outputs = [plain(box.get_text("\n")) for box in boxes]
    lines = []
    for block in article.find_all(PROSE):
        inside = block.find(PROSE) or block.find_parent(class_=["output", "citation"])
        around = block.find_parent("tr") or block
        cited = ".bibtex-citation, a[href*='bibliography.html#id']"
        if inside or around.select(cited):
            continue
        lines += [
            f"{number} {unit}: {block.get_text()[:90].strip()!r}"
            for number, unit in quantities(words(block, "code", "pre", PDF_BUTTON))
            if not any(says(output, number, unit) for output in outputs)
        ]
    return lines


@each_notebook
def test_every_quantity_is_computed_or_cited(page):
    none(quantity_faults(article(page)))


# -- Weight


def weight_faults(page):
    """What blocks the first paint of a parsed page, or moves it later."""
    scripts = [tag for tag in page.select("script[src]") if not tag.has_attr("defer")]
    lines = [f"{script['src']} blocks the page" for script in scripts]
    for sheet in page.select("link[rel=stylesheet]")[1:]:
        lines.append(f"{sheet['href']} is a style sheet of its own")
    for token in page.select(".highlight :is(.n, .p, .w)")[:1]:
        lines.append(f"{token} says no color")
    for image in page.select("article img")[1:]:
        if image.get("loading") != "lazy":
            lines.append(f"{image['src']} is not lazy")
    for image in page.select("article img:not([width]), article img:not([height])"):
        lines.append(f"{image['src']} does not say its size")
    known = [f"fa-{name}" for name in icons.CLASSES]
    names = {name for tag in page.select(".fas, .fa-solid") for name in tag["class"]}
    shown = {name for name in names if name.startswith("fa-")} - {"fa-lg", "fa-solid"}
    return lines + [f"{name} is not in icons.py" for name in shown - {*known}]


@each_page
def test_nothing_blocks_the_page(page):
    none(weight_faults(built.parsed(built.page_file(page))))


def test_the_theme_keeps_the_rules_that_pages_use():
    page = built.page_file("online")
    sheet = built.parsed(page).select_one("link[rel=stylesheet]")["href"]
    style = (page.parent / sheet.split("?")[0]).read_text()
    assert len(style) < 200_000
    used = "data-theme=dark", ".bd-sidebar-primary", ".admonition-title", ".show"
    assert [rule for rule in used if rule not in style] == []
    assert 'data-theme="dark"] .highlight .c1' in style and ".fa-anchor" not in style


# -- Figures, exercises, text


def figure_faults(article):
    """Images without alt text, or outside a figure with a caption."""
    lines = []
    for image in article.find_all("img"):
        name, alt = image.get("src", ""), image.get("alt", "").strip()
        if len(alt.split()) < 3 or alt.endswith((".png", ".svg")):
            lines.append(f"{name} has no alt text that describes it: {alt!r}")
        figure = image.find_parent("figure")
        caption = figure and figure.find("figcaption")
        if not caption or len(caption.get_text().split()) < 4:
            lines.append(f"{name} has no caption that says what to see")
    return lines


def exercise_faults(article):
    """Exercises without a label or a folded solution, and hints that are not folded."""
    solved = {
        urlsplit(link["href"]).fragment
        for link in article.select(".solution.dropdown .admonition-title a")
    }
    lines = []
    for exercise in article.select(".exercise"):
        label = exercise.get("id", "")
        if not label.startswith("ex-"):
            lines.append(f"exercise {label!r}: its label is not ex-<step>-<name>")
        if label not in solved:
            lines.append(f"{label} has no folded solution")
    for hint in article.select(".admonition:not(.dropdown) > .admonition-title"):
        if hint.get_text().startswith("Hint"):
            lines.append("a hint is not folded")
    return lines


_MARKUP = re.compile(
    r".{0,20}(?:\$\$|\$[^$\n]+\$|\{\w[\w:]*\}`|:::|```|\]\(|\\[(\[a-z]).{0,20}"
)


def markup_faults(article):
    """Markup that reached the reader unrendered."""
    return _MARKUP.findall(words(article, "pre", "code", "script", ".math"))


@each_page
def test_figures_exercises_and_text(page):
    content = article(page)
    none(figure_faults(content) + exercise_faults(content) + markup_faults(content))


def id_faults(tree):
    """Ids that more than one element of a page has."""
    ids = Counter(tag["id"] for tag in tree.find_all(id=True))
    return [
        f"{count} elements have the id {i}" for i, count in ids.items() if count > 1
    ]


def description_faults(tree):
    """What is wrong with the description that search engines show of a page."""
    tags = tree.select("meta[name=description]")
    if len(tags) != 1:
        return [f"the page has {len(tags)} descriptions"]
    text = tags[0]["content"]
    short = len(text.split()) < 6 or len(text) > 160
    return [f"description: {text!r}"] if short or re.search(r"[\\$^{}]", text) else []


@each_page
def test_ids_are_unique_and_the_description_is_plain(page):
    tree = built.parsed(built.page_file(page))
    none(id_faults(tree) + description_faults(tree))


def path_faults(text):
    """Paths of the machine that built the book."""
    text = re.sub(r"https?://[^\s\"'<>]+", "", text)
    return re.findall(
        r"(?<![\w.~/-])/(?:work|home|root|tmp|Users|opt|mnt)/[\w.-]+", text
    )


def test_no_path_of_a_machine_is_shown():
    files = [HTML / file for file in all_files()] + built.SOURCES
    none([f"{f.name}: {path}" for f in files for path in path_faults(f.read_text())])


# -- Links


@cache
def anchors(file):
    """Every id and name in an HTML file."""
    tags = built.parsed(file).find_all(True)
    return {tag.get(key) for tag in tags for key in ("id", "name")}


def link_faults(file, root):
    """Dead links of an HTML file of the site at root; a browser sees what it loads."""
    lines = []
    tags = built.parsed(file).find_all(True)
    for address in filter(None, (tag.get("href") or tag.get("src") for tag in tags)):
        parts = urlsplit(address)
        if parts.scheme in ("data", "mailto", "javascript"):
            continue
        if parts.netloc:
            if parts.scheme != "https":
                lines.append(f"{address} is not https")
            continue
        target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        target = target / "index.html" if target.is_dir() else target
        if root.resolve() not in target.resolve().parents:
            lines.append(f"{address} leads out of the site")
        elif not target.is_file():
            lines.append(f"{address} leads to no file")
        elif parts.fragment and target.suffix == ".html":
            place = unquote(parts.fragment)
            if place not in anchors(target):
                lines.append(f"{address} leads to no place in that page")
    return lines


def test_links_lead_somewhere():
    own = [built.page_file(page) for page in PAGES]
    files = own + [HTML / name for name in (*built.EXTRA, "index.html")]
    none([f"{file.name}: {line}" for file in files for line in link_faults(file, HTML)])


@pytest.mark.parametrize("page", [p for p in NOTEBOOKS if p != "index"])
def test_a_page_links_each_term_once(page):
    links = [a["href"] for a in article(page).select("a:has(> .std-term)")]
    assert (links or "/" in page) and len(set(links)) == len(links)


# -- The judges fire


def html(text):
    return BeautifulSoup(f"<article>{text}</article>", "html.parser")


@pytest.mark.parametrize(
    "label, done, defined, fault",
    [
        ("eq-a-one", {"eq-a-one", "a-claim"}, set(), None),
        ("eq-a-one", set(), {"eq-a-one"}, None),
        ("eq-a-one", set(), set(), "neither"),
        ("6f2c", set(), {"6f2c"}, "is not eq-a-"),
        ("eq-a-one", {"eq-a-one"}, {"eq-a-two"}, "is no equation"),
        ("eq-a-one", {"eq-a-one"}, {"eq-a-one"}, "executed and a definition"),
    ],
)
def test_equation_fault_is_found(label, done, defined, fault):
    found = equation_faults({"a": [label]}, done, dict.fromkeys(defined, "names S"))
    assert (len(found) == 1 and fault in found[0]) if fault else not found, found


OUTPUT = """
<div class="cell_output"><div class="output">S takes 12.5 GB (below 1e-12)
size  words
64    4096</div></div>
"""


@pytest.mark.parametrize(
    "prose, count",
    [
        ("<p>It takes \\(12.5\\,\\mathrm{GB}\\), 12.5&nbsp;GB, 4,096 words.</p>", 0),
        ("<p>It takes 2.5 GB, 12 GB, 12.5 MB or 1 GB.</p>", 4),
        ("<p>It takes 13 GB <span class='bibtex-citation'>[Dao]</span>.</p>", 0),
        ("<p>At 4.8 TB/s, 3 % more, in 7 ms, 9 µs and 8 bytes.</p>", 5),
        ("<p>It is 1.4x faster, or 2 times faster.</p>", 2),
        ("<p>64 rows in 2 tables, <code>3 GB</code>, \\(2 \\times 3\\).</p>", 0),
        ("<ul><li><p>One: 3 GB.</p></li></ul>", 1),
        ("<table><tr><td>3 GB</td></tr></table>", 1),
    ],
)
def test_unfounded_quantity_is_found(prose, count):
    assert len(quantity_faults(html(OUTPUT + prose))) == count


# Pages of the book show that what is right passes.
CAPTION = "<figcaption>Speed rises with the length.</figcaption>"
FIGURE = f'<figure><img alt="a line that rises" src="x.png"/>{CAPTION}</figure>'
EXERCISE = '<div class="exercise" id="ex-a-one"></div>'
SOLUTION = """<div class="solution dropdown admonition">
<p class="admonition-title"><a href="#ex-a-one">of</a></p></div>"""
META = '<meta name="description" content="{}">'
HINT = '<div class="tip admonition"><p class="admonition-title">Hint</p></div>'


MARKED = """<div><div class="math"><span class="eqno">(1)</span></div>\
<details class="mark">
<summary aria-label="how"></summary><div class="account"><p>A sum.</p></div>\
</details></div>"""
CELL = '<div class="cell"><div class="cell_input">f()</div></div>'


@pytest.mark.parametrize(
    "judge, text",
    [
        (weight_faults, "<img src='x.png'/>"),
        (weight_faults, "<img width='1' height='1' src='x.png'/>" * 2),
        (weight_faults, "<i class='fas fa-moon'></i><i class='fas fa-anchor'></i>"),
        (figure_faults, FIGURE.replace("a line that rises", "x.png")),
        (figure_faults, FIGURE.replace(CAPTION, "")),
        (exercise_faults, EXERCISE + SOLUTION.replace("dropdown ", "")),
        (exercise_faults, (EXERCISE + SOLUTION).replace("ex-a-one", "one")),
        (exercise_faults, HINT),
        (weight_faults, "<link rel='stylesheet' href='a.css'>" * 2),
        (weight_faults, "<script src='a.js'></script>"),
        (weight_faults, "<p class='highlight'><i class='p'>:</i></p>"),
        (mark_faults, MARKED.replace("mark", "other")),
        (mark_faults, MARKED.replace("A sum.", "")),
        (mark_faults, "<pre>small eq-a-one: holds</pre>"),
        (mark_faults, f"<section><h2>Exercises</h2>{CELL}</section>"),
        (markup_faults, "<p>so $x^2$ is</p>"),
        (markup_faults, "<p>{cite}`dao`</p>"),
        (markup_faults, "<p>::: note</p>"),
        (markup_faults, "<p>[a link](to.md)</p>"),
        (markup_faults, "<p>\\frac</p>"),
        (id_faults, "<p id='a'></p><p id='b'></p><b id='a'></b>"),
        (description_faults, META.format(r"The gradients of two \times matrices.")),
        (description_faults, META.format("Too short.")),
        (description_faults, ""),
    ],
)
def test_fault_is_found(judge, text):
    assert len(judge(html(text))) == 1


def test_machine_path_is_found():
    assert len(path_faults("in /home/me/book, of /mnt/data/x, not a/tmp/x")) == 2


def test_link_faults_are_found(tmp_path):
    (tmp_path / "two.html").write_text('<p id="here"></p>')
    (tmp_path / "one.html").write_text(
        '<a href="https://a.org/">out</a>'
        '<a href="two.html#here">good</a><a href="#top" id="top">good</a>'
        '<img src="data:image/png;base64,"><a href="http://a.org/">plain</a>'
        '<img src="missing.png"><a href="two.html#nowhere">dead</a>'
        '<a href="../../up.html">up</a>'
    )
    found = link_faults(tmp_path / "one.html", tmp_path)
    assert len(found) == 4, found
