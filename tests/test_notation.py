"""The notation page has the letters of each chapter's formulas, and no others."""

import json
import re

import pytest
from built import ROOT, none

GREEK = (
    "alpha|beta|gamma|delta|varepsilon|eta|kappa|lambda|mu|pi|rho|sigma|tau|varphi"
    "|omega|zeta|Delta|Pi|ell"
)
CHAPTERS = {path.stem for path in (ROOT / "book/depth").glob("*.ipynb")}
CHAPTERS -= {"errata"}  # it quotes the letters of the sources
SETS = {r"\mathbb R", r"\mathbb E"}  # the real numbers and the mean


def formulas(markdown):
    """The TeX of all formulas, without words, names of functions and o(...)."""
    code = r"^ *```\w+\n.*?^ *```$|(?<!`)`[^`\n]+`"
    text = re.sub(code, "", markdown, flags=re.S | re.M)
    found = re.findall(r"\$\$(.+?)\$\$|\$([^$]+)\$", text, re.S)
    words = r"\\(?:text|operatorname|begin|end)\*?\{[^{}]*\}|\bo\("
    return re.sub(words, " ", "\n".join(a + b for a, b in found))


def letters(markdown, indexed=()):
    """The letters of all formulas; one of indexed is a letter with its index."""
    whole = "".join(re.escape(x) + r"(?<!\w(?=[A-Za-z]))|" for x in indexed)
    kinds = rf"{whole}\\math(?:cal|bb) ?\{{?[A-Z]|\\[A-Za-z]+|[A-Za-z]"
    found = re.findall(kinds, formulas(markdown))
    found = {re.sub(r"(\\math[a-z]+) ?\{?([A-Z])", r"\1 \2", x) for x in found}
    return {x for x in found if re.fullmatch(rf"\\(?:{GREEK})|[^\\].*|.* .", x)}


def notation(page):
    """(letters of all chapters, {chapter: letters of its row}, those with an index)."""
    general, special = page.split("### Letters of one chapter")
    first = "\n".join(re.findall(r"^\| (\$.+?) \|", general, re.M))
    indexed = {x for x in formulas(first).split("\n") if re.match(r".+[_^].", x)}
    shared = letters(first, indexed) | SETS
    free = letters(re.search(r"^Index .+?Euler's number", general, re.M)[0])
    rows = re.findall(r"^\| \[.+?\]\((\w+)\.ipynb\) \| (.+) \|$", special, re.M)
    return shared | free, {name: letters(row, indexed) for name, row in rows}, indexed


def faults(page, texts):
    """What the page lacks or has too much, given the Markdown of each chapter."""
    shared, rows, indexed = notation(page)
    lines = [f"{name} has a row, but is no chapter" for name in rows.keys() - texts]
    used = {name: letters(text, indexed) for name, text in texts.items()}
    for name, found in sorted(used.items()):
        row = rows.get(name, set())
        lines += [f"{name} uses {x}, not defined" for x in found - shared - row]
        lines += [f"{name} does not use {x} of its row" for x in row - found]
    unused = shared - SETS - set().union(*used.values())
    return lines + [f"no chapter uses {x}" for x in unused]


def chapter(name):
    paths = ROOT / f"book/{name}.ipynb", ROOT / f"book/depth/{name}.ipynb"
    cells = [cell for path in paths for cell in json.loads(path.read_text())["cells"]]
    markdown = [cell for cell in cells if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in markdown)


def test_the_page_defines_the_letters_of_each_chapter():
    page = (ROOT / "book/notation.md").read_text().split("## Algorithms by name")[0]
    none(faults(page, {name: chapter(name) for name in CHAPTERS}))


PAGE = r"""| $T_q$, $\omega$ | sizes |

Index $i$ counts, and $e$ is Euler's number.

### Letters of one chapter

| [One](one.ipynb) | $\mathcal V$ pairs, $s$ slots |
"""
TEXT = r"With $i < T_q$ and `$x$`, $\omega \in \mathcal{V}$:" "\n\n$$\n\\sin e^s\n$$"


@pytest.mark.parametrize(
    "page, text, wanted",
    [
        (PAGE, TEXT, []),
        (PAGE, TEXT + " $T$", ["one uses T, not defined"]),
        (PAGE, TEXT + r" $\eta$", [r"one uses \eta, not defined"]),
        (PAGE, TEXT.replace("^s", ""), ["one does not use s of its row"]),
        (PAGE.replace("$s$ slots", ""), TEXT, ["one uses s, not defined"]),
        (PAGE.replace("T_q$", "T_q$, $D$"), TEXT, ["no chapter uses D"]),
    ],
)
def test_a_fault_is_found(page, text, wanted):
    assert faults(page, {"one": text}) == wanted
