"""Numbers of chapters, depth pages, the primer and appendices, in a small book."""

import re
import sys

import pytest
from bs4 import BeautifulSoup
from built import ROOT
from processes import run

TOC = """
format: jb-book
root: book/index
parts:
  - chapters: [{file: book/primer}]
  - numbered: 2
    chapters:
      - file: book/one
        sections: [{file: book/depth/one}]
      - file: book/two
  - chapters:
      - file: book/extra
        sections: [{file: book/depth/extra}]
"""
CONF = f"""
import sys
sys.path.insert(0, {str(ROOT / "book/_tools")!r})
extensions = ["sphinx_external_toc", "sphinx_multitoc_numbering", "myst_nb",
              "sphinx_exercise", "sphinx_proof", "numbering", "book_fixes"]
external_toc_path = "_toc.yml"
use_multitoc_numbering = True
myst_enable_extensions = ["dollarmath"]
suppress_warnings = ["myst.directive_unknown"]
html_theme = "sphinx_book_theme"
numfig = math_numfig = True
numfig_secnum_depth = 1
ogp_social_cards = {{"enable": False}}
math_eqref_format = "({{number}})"
page_letters = {{"book/primer": "P", "book/extra": "A"}}
"""
PAGE = """
# Title of {name}

{links}

## First {name}

$$
x = {name}
$$ (eq-{name})

```{{exercise}}
:label: ex-{name}
Do.
```

## Second {name}

```{{figure}} dot.png
:name: fig-{name}
Dot.
```

$$
y
$$ (eq-{name}-more)
"""
NAMES = ["primer", "one", "two", "extra", "depth-one", "depth-extra"]
LINKS = " ".join(
    f"[the {name}](eq-{name}-more) {{numref}}`fig-{name}` {{ref}}`ex-{name}`"
    for name in NAMES
)
# Of each page: its title, its second section, its second equation, figure and exercise.
NUMBERS = {
    "primer": ("P.", "P.2.", "P.2", "P.1"),
    "one": ("1.", "1.2.", "1.2", "1.1"),
    "two": ("2.", "2.2.", "2.2", "2.1"),
    "extra": ("A.", "A.2.", "A.2", "A.1"),
    "depth-one": ("1.D.", "", "1.D2", "1.D1"),
    "depth-extra": ("A.D.", "", "A.D2", "A.D1"),
}


def path(folder, name, suffix):
    return folder / "book" / (name.replace("depth-", "depth/") + suffix)


def build(folder):
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", folder, folder / "_html"]
    done = run(sphinx)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """The folder of a small book, built."""
    folder = tmp_path_factory.mktemp("book")
    (folder / "book/depth").mkdir(parents=True)
    (folder / "_toc.yml").write_text(TOC)
    (folder / "conf.py").write_text(CONF)
    (folder / "book/index.md").write_text(f"# Index\n\n{LINKS}\n")
    for name in NAMES:
        page = path(folder, name, ".md")
        page.write_text(PAGE.format(name=name, links=LINKS))
        (page.parent / "dot.png").write_bytes(
            (ROOT / "book/_static/ladder.png").read_bytes()
        )
    build(folder)
    return folder


def article(folder, name):
    text = path(folder / "_html", name, ".html").read_text()
    return BeautifulSoup(text, "html.parser")


def numbers(folder, name):
    """The numbers on a page, as in NUMBERS."""
    page = article(folder, name).find("article", class_="bd-article")
    titles = [page.h1, page.find_all("h2")[1]]
    shown = [title.find(class_="section-number") for title in titles]
    texts = [number.get_text().strip() if number else "" for number in shown]
    equation = page.find(id=f"equation-eq-{name}-more").find(class_="eqno")
    texts.append(re.search(r"\((.+)\)", equation.get_text())[1])
    figure = page.find(id=f"fig-{name}").find(class_="caption-number").get_text()
    exercise = page.find(id=f"ex-{name}").get_text()
    assert figure.split()[1] == re.search(r"Exercise\s+(\S+)", exercise)[1]
    return (*texts, figure.split()[1])


def check(folder):
    assert {name: numbers(folder, name) for name in NAMES} == NUMBERS
    expected = " ".join(
        f"the {name} ({equation}) Fig. {figure} Exercise {figure}"
        for name, (_, _, equation, figure) in NUMBERS.items()
    )
    for name in ["index", *NAMES]:
        page = article(folder, name).find("article", class_="bd-article")
        assert " ".join(page.find("p").get_text().split()) == expected


def test_pages_carry_their_numbers(book):
    check(book)


def test_numbers_stay_when_one_page_is_built_again(book):
    page = path(book, "depth-one", ".md")
    page.write_text(page.read_text() + "\nAnother sentence.\n")
    build(book)
    check(book)


def test_chapters_lead_to_chapters_and_depth_pages_to_both(book):
    def neighbors(name):
        page = article(book, name)
        links = page.select(".prev-next-footer a, .prev-next-area a")
        return {link["class"][0]: link["href"] for link in links}

    assert neighbors("one")["right-next"] == "two.html"
    assert neighbors("two")["left-prev"] == "one.html"
    assert neighbors("depth-one")["left-prev"] == "../one.html"
    assert neighbors("depth-one")["right-next"] == "../two.html"
    assert "right-next" not in neighbors("extra")
