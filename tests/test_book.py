"""The built book keeps its promises: equations are executed, numbers are computed, links lead somewhere.

Reads `_build/html`, so `make book` comes first. Each judge below takes parsed HTML or notebooks and
returns lines; the tests at the end hand it a small page that is wrong and want the line.
"""

import copy
import json
import os
import re
from urllib.parse import unquote, urlsplit

import built
import nbformat
import notebooks
import pytest
from bs4 import BeautifulSoup
from built import HTML, NOTEBOOKS, PAGES, ROOT
from nbformat.v4 import new_code_cell, new_notebook, new_output

DATA = ROOT / "tests/book"
DEFINITIONS = json.loads((DATA / "definitions.json").read_text())
COVERAGE = json.loads((DATA / "coverage.json").read_text())

each_page = pytest.mark.parametrize("page", PAGES)
each_notebook = pytest.mark.parametrize("page", NOTEBOOKS)


@pytest.fixture(scope="module")
def tree():
    """A function from a page's name to its parsed HTML."""
    built.require_book()
    return lambda page: built.parsed(built.page_file(page))


@pytest.fixture(scope="module")
def article(tree):
    """A function from a page's name to the part of it that its source gives."""
    return lambda page: built.article(tree(page))


def notebook(page):
    return nbformat.read(ROOT / "book" / f"{page}.ipynb", as_version=4)


def none(faults):
    """Fail with one line for each fault."""
    if faults:
        pytest.fail("\n".join(map(str, faults)), pytrace=False)


def test_nothing_else_was_built(tree):
    pages = {f"book/{page}.html" for page in PAGES}
    extra = set(built.all_files()) - pages - {*built.EXTRA, "index.html", "prf-prf.html", "404.html"}
    assert not extra, "pages without a source: run `make clean book`"


# ----------------------------------------------------------------------------------------------------
# Equations


def equations(page):
    """The numbered equations of a parsed page, as their labels; an id that no author wrote stays as it is."""
    blocks = [number.find_parent(class_="math") for number in page.select(".math .eqno")]
    return [re.sub("^equation-", "", block.get("id", "(no id)")) for block in blocks]


def executed(notebook):
    """The labels that hold according to a notebook's committed outputs.

    That each comes from a check(...) or holds(...) and not from a print is proved where the checks are run.
    """
    streams = [
        output for cell in notebooks.code_cells(notebook) for output in cell.outputs if "text" in output
    ]
    return set(re.findall(r"(\S+): holds(?: \(below .+\))?$", "\n".join(o.text for o in streams), re.M))


def equation_faults(labels, executed, definitions):
    """What is wrong with {page: labels}, given those executed anywhere and {label: reason} of definitions."""
    lines = []
    everything = [label for page in labels.values() for label in page]
    for page, found in labels.items():
        for label in found:
            if not re.fullmatch(rf"eq-{page}(-[a-z0-9]+)+", label):
                lines.append(f"{page}: label {label} is not eq-{page}-<name>")
            if label not in executed and label not in definitions:
                lines.append(f"{page}: {label} is neither executed nor a definition")
    for label, reason in definitions.items():
        if label not in everything:
            lines.append(f"definitions.json: {label} is no equation of the book")
        elif label in executed:
            lines.append(f"definitions.json: {label} is executed, so it needs no excuse")
        if len(reason.split()) < 4:
            lines.append(f"definitions.json: {label} gives no reason")
    # Other labels name claims that are no displayed equation.
    lines += [
        f"{label} is executed but is no equation of the book"
        for label in sorted(executed - set(everything))
        if label.startswith("eq-")
    ]
    return lines


def test_every_equation_is_executed_or_a_definition(article):
    labels = {page: equations(article(page)) for page in PAGES}
    assert any(labels.values()), "no equation found in any page"
    done = set().union(*(executed(notebook(page)) for page in NOTEBOOKS))
    none(equation_faults(labels, done, DEFINITIONS))


# Runs in the kernel before the chapter: check() and holds() also try what is wrong, and want the failure.
PERTURB = '''
import flashlib.notebook as _notebook
import numpy as _np
import torch as _torch

_tried, _survived = [], []

def _wrong(value):
    """The value, its largest entry off by a thousandth (zero becomes a thousandth, infinity zero)."""
    if isinstance(value, _torch.Tensor):
        value = value.detach().to("cpu", _torch.float64).numpy()
    value = _np.array(value, dtype=_np.float64, order="C")
    flat = value.reshape(-1)
    finite = _np.where(_np.isfinite(flat), _np.abs(flat), -1.0)
    place = int(finite.argmax())
    if finite[place] < 0:
        flat[place] = 0.0
    elif finite[place] == 0:
        flat[place] = 1e-3
    else:
        flat[place] *= 1.001
    return value

def _wants_failure(name, real, label, *arguments, **options):
    _tried.append(label)
    try:
        real(label, *arguments, **options)
    except AssertionError:
        return
    _survived.append(f"{label}: {name} still holds")

def _check(label, lhs, rhs, _real=_notebook.check, **options):
    _real(label, lhs, rhs, **options)
    if lhs is rhs and isinstance(lhs, (_torch.Tensor, _np.ndarray)):
        _survived.append(f"{label}: both sides are one object")
    _wants_failure("a wrong left side", _real, label, _wrong(lhs), rhs, **options)
    _wants_failure("a wrong right side", _real, label, lhs, _wrong(rhs), **options)

def _holds(label, condition, _real=_notebook.holds):
    _real(label, condition)
    _wants_failure("the contrary", _real, label, not bool(condition))

_notebook.check, _notebook.holds = _check, _holds
'''


def surviving(notebook, folder):
    """Run a notebook with every check also made wrong: (labels tried, lines on those that did not fail)."""
    from nbclient import NotebookClient

    run = copy.deepcopy(notebook)
    run.cells = [cell for cell in run.cells if not notebooks.is_gpu(cell)]  # they hold no check
    run.cells.insert(0, new_code_cell(PERTURB))
    run.cells.append(new_code_cell("import json as _json\nprint(_json.dumps([_tried, _survived]))"))
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(run, timeout=300, kernel_name="python3", resources=place).execute(
        env=notebooks.kernel_environment()
    )
    # A line may come in pieces.
    printed = [output.text for output in run.cells[-1].outputs if output.get("name") == "stdout"]
    tried, survived = json.loads("".join(printed))
    return set(tried), survived


@each_notebook
def test_every_check_fails_when_a_side_is_wrong(page):
    chapter = notebook(page)
    labels = executed(chapter)
    if page == "index":
        assert not labels, "the index states no equation, so this test does not run it"
        return
    tried, survived = surviving(chapter, ROOT / "book")
    none(survived)
    assert tried == labels, "what ran here and what the committed outputs say"


# ----------------------------------------------------------------------------------------------------
# Numbers

# Each unit as it is compared, and the ways to write it.
UNITS = {
    "kB": "kB|KB", "MB": "MB", "GB": "GB", "TB": "TB", "KiB": "KiB", "MiB": "MiB", "GiB": "GiB",
    "GB/s": "GB/s", "TB/s": "TB/s", "TFLOP/s": "TFLOPs?/s|TFLOPS", "GFLOP": "GFLOPs?", "TFLOP": "TFLOPs?",
    "FLOP": "FLOPs?|flops?", "FLOP/B": r"FLOPs?/B|FLOPs? per byte", "ns": "ns", "us": "us|µs|μs", "ms": "ms",
    "byte": "bytes?", "word": "words?", "%": r"%|per ?cent",
    "x": r"(?<=\d)x\b|×(?= (?:as|the|faster|slower)|[.,;)])|times (?:as|faster|slower|more|less|fewer)",
}  # fmt: skip
_NUMBER = r"(?<![\w.^-])\d[\d,]*(?:\.\d+)?"
_UNIT = "|".join(f"(?P<u{i}>{ways})" for i, ways in enumerate(UNITS.values()))
_QUANTITY = re.compile(rf"(?P<number>{_NUMBER})\s?(?:{_UNIT})(?![\w/])(?!\s\d)")


def plain(text):
    """Text with TeX spacing and units, thin spaces and thousands separators reduced to plain ones."""
    text = re.sub(r"\\(?:mathrm|text|textrm|operatorname)\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\%", "%", text)
    text = re.sub(r"\\times\b", "×", text)
    text = re.sub(r"\\[,;:! ]|~|[\u00a0\u2009\u202f]", " ", text).replace("{,}", ",")
    text = re.sub(r"(?<=\d)[ ,](?=\d{3}\b)", "", text)
    return re.sub(r"\s+", " ", text)


def quantities(text):
    """The (number, unit) pairs that a text states, numbers without separators."""
    found = []
    for match in _QUANTITY.finditer(plain(text)):
        unit = next(unit for i, unit in enumerate(UNITS) if match[f"u{i}"])
        found.append((match["number"].replace(",", ""), unit))
    return found


def says(output, number, unit):
    """Whether an output's text holds the number and, anywhere (a table's head, say), the unit."""
    text = plain(output)
    return bool(
        re.search(rf"(?<![\d.])(?<!e-){re.escape(number)}(?!\d|\.\d|e[-+]?\d)", text)
        and re.search(rf"(?<![A-Za-z/])(?:{UNITS[unit]})(?![A-Za-z/])", text)
    )


PROSE = ["p", "li", "td", "th", "dd", "figcaption"]


def unfounded(article):
    """The quantities in the prose of an article that no output of it shows and no citation supports."""
    outputs = [box.get_text() for box in article.select(".cell_output .output, .cell_output table")]
    lines = []
    for block in article.find_all(PROSE):
        # Leaves only; captions stand beside an output, not in it.
        if block.find(PROSE) or block.find_parent(class_="output") or block.find_parent("div", "citation"):
            continue
        around = block.find_parent("tr") or block
        if around.select(".bibtex-citation, a[href*='bibliography.html#id']"):
            continue
        words = copy.copy(block)
        for code in words.select("code, pre"):
            code.decompose()
        for number, unit in quantities(words.get_text()):
            if not any(says(output, number, unit) for output in outputs):
                lines.append(f"{number} {unit}: {block.get_text()[:90].strip()!r}")
    return lines


@each_notebook
def test_every_quantity_is_computed_or_cited(page, article):
    none(unfounded(article(page)))


# ----------------------------------------------------------------------------------------------------
# Figures, exercises, text


def figure_faults(article):
    """Images without alt text, or outside a figure with a caption."""
    lines = []
    for image in article.find_all("img"):
        name = image.get("src", "")
        alt = image.get("alt", "").strip()
        if len(alt.split()) < 3 or alt.endswith((".png", ".svg")):
            lines.append(f"{name} has no alt text that describes it: {alt!r}")
        figure = image.find_parent("figure")
        caption = figure and figure.find("figcaption")
        if not caption or len(caption.get_text().split()) < 4:
            lines.append(f"{name} has no caption that says what to see")
    return lines


@each_page
def test_figures_have_alt_text_and_caption(page, article):
    none(figure_faults(article(page)))


def exercise_faults(article):
    """Exercises without a label or a folded solution."""
    lines = []
    solved = {}
    for solution in article.select(".solution"):
        for link in solution.select(".admonition-title a"):
            solved[urlsplit(link["href"]).fragment] = solution
    for exercise in article.select(".exercise"):
        label = exercise.get("id", "")
        if not label.startswith("ex-"):
            lines.append(f"exercise with the label {label!r}, expected ex-<step>-<name>")
        if label not in solved:
            lines.append(f"{label} has no solution")
        elif "dropdown" not in solved[label].get("class", []):
            lines.append(f"the solution of {label} is not folded")
    for hint in article.select(".admonition"):
        title = hint.find(class_="admonition-title")
        if title and title.get_text().startswith("Hint") and "dropdown" not in hint["class"]:
            lines.append("a hint is not folded")
    return lines


@each_page
def test_solutions_are_folded(page, article):
    none(exercise_faults(article(page)))


def raw_markup(article):
    """Markup that reached the reader unrendered."""
    words = copy.copy(article)
    for part in words.select("pre, code, script, .math"):
        part.decompose()
    text = words.get_text()
    return re.findall(r".{0,20}(?:\$\$|\$[^$\n]+\$|\{\w[\w:]*\}`|:::|```|\]\(|\\[(\[a-z]).{0,20}", text)


@each_page
def test_no_markup_is_left_raw(page, article):
    none(raw_markup(article(page)))


_MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:work|home|root|tmp|Users|opt|mnt)/[\w.-]+")


def test_no_path_of_a_machine_is_shown(tree):
    found = [
        f"{file.relative_to(ROOT)}: {path}"
        for file in [*(HTML / page for page in built.all_files()), *(ROOT / "book").glob("*.ipynb")]
        for path in _MACHINE_PATH.findall(re.sub(r"https?://[^\s\"'<>]+", "", file.read_text()))
    ]
    none(found)


# ----------------------------------------------------------------------------------------------------
# Links

_RESOURCES = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
_LOADED_LINKS = {
    "stylesheet",
    "preload",
    "modulepreload",
    "prefetch",
    "icon",
    "shortcut",
    "preconnect",
    "dns-prefetch",
}


def _addresses(tree):
    """(address, loaded by the browser?) for everything that a page refers to."""
    for tag in tree.find_all(True):
        if tag.name == "link":
            if "href" in tag.attrs:
                yield tag["href"], bool(_LOADED_LINKS & set(tag.get("rel", [])))
        elif tag.name in _RESOURCES and tag.get(_RESOURCES[tag.name]):
            yield tag[_RESOURCES[tag.name]], True
        elif tag.get("href"):
            yield tag["href"], False
        for part in filter(None, tag.get("srcset", "").split(",")):
            yield part.split()[0], True
        for address in re.findall(r"url\(['\"]?([^'\")]+)", tag.get("style", "")):
            yield address, True


def link_faults(file, root):
    """Dead internal links and resources loaded from elsewhere, in one HTML file of the site at root."""
    lines = []
    for address, loaded in _addresses(built.parsed(file)):
        parts = urlsplit(address)
        if parts.scheme in ("data", "mailto", "javascript"):
            continue
        if parts.scheme or parts.netloc:
            if loaded:
                lines.append(f"loads {address} from elsewhere")
            continue
        target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        if target.is_dir():
            target = target / "index.html"
        if root.resolve() not in target.resolve().parents:
            lines.append(f"{address} leads out of the site")
        elif not target.is_file():
            lines.append(f"{address} leads to no file")
        elif parts.fragment and target.suffix == ".html":
            anchor = unquote(parts.fragment)
            if not built.parsed(target).find(lambda tag: anchor in (tag.get("id"), tag.get("name"))):  # noqa: B023
                lines.append(f"{address} leads to no place in that page")
    return lines


@pytest.mark.parametrize("file", [*(f"book/{page}.html" for page in PAGES), *built.EXTRA, "index.html"])
def test_links_lead_somewhere(file, tree):
    none(link_faults(HTML / file, HTML))


def test_style_sheets_load_nothing_from_elsewhere(tree):
    found = [
        f"{os.path.relpath(file, HTML)}: {address}"
        for file in HTML.rglob("*.css")
        for address in re.findall(r"(?:url\(|@import\s+)['\"]?(?:https?:)?//[^'\")\s]+", file.read_text())
    ]
    none(found)


def test_external_links_use_https(article):
    external = {
        link["href"]
        for page in PAGES
        for link in article(page).find_all("a", href=True)
        if urlsplit(link["href"]).netloc
    }
    for address in sorted(external):
        print(address)  # pytest -rP lists them
    assert not [address for address in external if not address.startswith("https://")]


@each_notebook
def test_notebook_can_be_downloaded(page, tree):
    links = [
        a["href"] for a in tree(page).select("a.btn-download-source-button") if a["href"].endswith(".ipynb")
    ]
    assert links, "no button downloads the notebook"
    copy_ = built.page_file(page).parent / links[0]
    assert json.loads(copy_.read_text()) == json.loads((ROOT / "book" / f"{page}.ipynb").read_text())


# ----------------------------------------------------------------------------------------------------
# Coverage: every clause of the plan for a page leads to something in it


def coverage_faults(page, clauses, tree):
    """What is wrong with a page's {clause: [targets]}; a target is an id in it or an equation's label."""
    lines = []
    is_chapter = tree.find(class_="exercise")  # other pages may cover a clause in words
    for clause, targets in clauses.items():
        if not targets:
            lines.append(f"{page}: no target for {clause!r}")
        for target in targets:
            place = tree.find(id=f"equation-{target}" if target.startswith("eq-") else target)
            if place is None:
                lines.append(f"{page}: {clause!r} points at {target}, which is not in the page")
            elif is_chapter and place.name == "section" and not place.select(".cell, .bibtex-citation"):
                lines.append(f"{page}: {clause!r} points at {target}, a section that runs and cites nothing")
    return lines


@each_page
def test_page_covers_its_clauses(page, article):
    none(coverage_faults(page, COVERAGE.get(page, {}), article(page)))


def test_coverage_names_pages_that_exist():
    assert set(COVERAGE) <= set(PAGES)


# ----------------------------------------------------------------------------------------------------
# The judges fire


def html(text):
    return BeautifulSoup(f"<article>{text}</article>", "html.parser")


def equation(label):
    return f'<div class="math" id="equation-{label}"><span class="eqno">(1)</span>\\[ a \\]</div>'


def printing(source, text):
    return new_code_cell(source, outputs=[new_output("stream", name="stdout", text=text)])


def test_labels_are_read_from_pages_and_outputs():
    page = html(equation("eq-a-one") + equation("eq-a-two") + '<div class="math">\\[ unnumbered \\]</div>')
    assert equations(page) == ["eq-a-one", "eq-a-two"]
    cells = [
        printing("check('eq-a-one', f(x), y)", "eq-a-one: holds (below 1e-12)\na line\n"),
        printing("each(y > x)", "first: a-claim: holds\n"),
        new_code_cell("check('eq-a-four', f(x), y)"),
    ]
    assert executed(new_notebook(cells=cells)) == {"eq-a-one", "a-claim"}


@pytest.mark.parametrize(
    "labels, done, definitions, fault",
    [
        (["eq-a-one"], {"eq-a-one"}, {}, None),
        (["eq-a-one"], set(), {"eq-a-one": "it names the scores S"}, None),
        (["eq-a-one"], set(), {}, "neither"),
        (["eq-b-one"], {"eq-b-one"}, {}, "is not eq-a-"),
        (["6f2c"], set(), {"6f2c": "it names the scores S"}, "is not eq-a-"),
        (["eq-a-one"], {"eq-a-one"}, {"eq-a-two": "it names the scores S"}, "no equation"),
        (["eq-a-one"], {"eq-a-one"}, {"eq-a-one": "it names the scores S"}, "no excuse"),
        (["eq-a-one"], set(), {"eq-a-one": "definition"}, "no reason"),
        (["eq-a-one"], {"eq-a-one", "eq-a-two"}, {}, "no equation"),
        (["eq-a-one"], {"eq-a-one", "a-claim"}, {}, None),
    ],
)
def test_equation_fault_is_found(labels, done, definitions, fault):
    found = equation_faults({"a": labels}, done, definitions)
    assert (len(found) == 1 and fault in found[0]) if fault else not found, found


def test_check_that_cannot_fail_is_found(tmp_path):
    cells = [
        "import torch\nfrom flashlib.notebook import check, holds\nx = torch.tensor([1.0, 2.0])",
        "check('eq-a-good', 2 * x, x + x)",
        "check('eq-a-wide', 2 * x, x + x, within=0.5)",
        "check('eq-a-same', x, x)",
        "holds('eq-a-more', bool(x[1] > 1))\nprint('eq-a-said: holds')",
    ]
    tried, survived = surviving(new_notebook(cells=[new_code_cell(cell) for cell in cells]), tmp_path)
    assert tried == {"eq-a-good", "eq-a-wide", "eq-a-same", "eq-a-more"}
    assert len(survived) == 3
    assert all(line.startswith(("eq-a-wide", "eq-a-same: both")) for line in survived), survived


OUTPUT = """
<div class="cell_output"><div class="output">S takes 12.5 GB (below 1e-12)
size  words
64    4096</div></div>
"""


@pytest.mark.parametrize(
    "prose, count",
    [
        ("<p>It takes 12.5 GB.</p>", 0),
        ("<p>It takes \\(12.5\\,\\mathrm{GB}\\).</p>", 0),
        ("<p>It takes 12.5&nbsp;GB and 4,096 words.</p>", 0),
        ("<p>It takes 2.5 GB.</p>", 1),
        ("<p>It takes 12 GB.</p>", 1),
        ("<p>It takes 12.5 MB.</p>", 1),
        ("<p>It takes 1 GB.</p>", 1),
        ("<p>It takes 13 GB <span class='bibtex-citation'>[Dao, 2022]</span>.</p>", 0),
        ("<p>At 4.8 TB/s, 3 % more, in 7 ms, 9 µs and 8 bytes.</p>", 5),
        ("<p>It is 1.4x faster, or 2 times faster.</p>", 2),
        ("<p>Equation 3 has 64 rows in 2 tables, <code>3 GB</code>, \\(2 \\times 3\\), \\(4 x\\).</p>", 0),
        ("<ul><li><p>One: 3 GB.</p></li></ul>", 1),
        ("<table><tr><td>3 GB</td></tr></table>", 1),
    ],
)
def test_unfounded_quantity_is_found(prose, count):
    found = unfounded(html(OUTPUT + prose))
    assert len(found) == count, found


CAPTION = "<figcaption>Speed rises with the length.</figcaption>"


@pytest.mark.parametrize(
    "figure, count",
    [
        (f'<figure><img alt="a line that rises" src="x.png"/>{CAPTION}</figure>', 0),
        (f'<figure><img src="x.png"/>{CAPTION}</figure>', 1),
        (f'<figure><img alt="../_images/x.png" src="x.png"/>{CAPTION}</figure>', 1),
        ('<figure><img alt="a line that rises" src="x.png"/></figure>', 1),
        ('<p><img alt="a line that rises" src="x.png"/></p>', 1),
    ],
)
def test_figure_fault_is_found(figure, count):
    assert len(figure_faults(html(figure))) == count


EXERCISE = '<div class="exercise admonition" id="ex-a-one"><p class="admonition-title">Exercise</p></div>'
SOLUTION = """
<div class="solution dropdown admonition"><p class="admonition-title"><a href="#ex-a-one">of</a></p></div>
"""


@pytest.mark.parametrize(
    "text, count",
    [
        (EXERCISE + SOLUTION, 0),
        (EXERCISE, 1),
        (EXERCISE + SOLUTION.replace("dropdown ", ""), 1),
        ((EXERCISE + SOLUTION).replace("ex-a-one", "one"), 1),
        ('<div class="tip admonition"><p class="admonition-title">Hint</p></div>', 1),
        ('<div class="dropdown admonition"><p class="admonition-title">Hint</p></div>', 0),
    ],
)
def test_exercise_fault_is_found(text, count):
    assert len(exercise_faults(html(text))) == count


@pytest.mark.parametrize(
    "text, count",
    [
        ("<p>fine <code>$$</code> <span class='math'>\\(x\\)</span></p>", 0),
        ("<p>$$ x</p>", 1),
        ("<p>so $x^2$ is</p>", 1),
        ("<p>{cite}`dao`</p>", 1),
        ("<p>::: note</p>", 1),
        ("<p>[a link](to.md)</p>", 1),
        ("<p>\\frac</p>", 1),
    ],
)
def test_raw_markup_is_found(text, count):
    assert len(raw_markup(html(text))) == count


@pytest.mark.parametrize(
    "text, found", [("in /home/me/book", 1), ("of /mnt/data/x", 1), ("a/tmp/x ./home/x", 0)]
)
def test_machine_path_is_found(text, found):
    assert len(_MACHINE_PATH.findall(text)) == found


def test_link_faults_are_found(tmp_path):
    (tmp_path / "two.html").write_text('<p id="here"></p>')
    (tmp_path / "one.html").write_text(
        '<link rel="canonical" href="https://example.org/"><a href="https://example.org/">out</a>'
        '<a href="two.html#here">good</a><a href="#top" id="top">good</a><img src="data:image/png;base64,">'
        '<script src="https://example.org/x.js"></script><link rel="stylesheet" href="//example.org/x.css">'
        '<img src="missing.png"><a href="two.html#nowhere">dead</a><a href="../../up.html">up</a>'
        '<div style="background: url(https://example.org/x.png)"></div>'
    )
    found = link_faults(tmp_path / "one.html", tmp_path)
    assert len(found) == 6, found
    assert sum("from elsewhere" in line for line in found) == 3


@pytest.mark.parametrize(
    "targets, count",
    [(["eq-a-one"], 0), (["fig-a-one"], 0), (["shown"], 0), ([], 1), (["ex-a-two"], 1), (["talk"], 1)],
)
def test_coverage_fault_is_found(targets, count):
    page = html(
        equation("eq-a-one") + '<figure id="fig-a-one"></figure><section id="talk"><p>Words.</p></section>'
        '<section id="shown"><div class="cell">x</div></section>' + EXERCISE
    )
    assert len(coverage_faults("a", {"a clause": targets}, page)) == count
