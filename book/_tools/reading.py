"""How much a built page asks of its reader: words, lines of code, formulas, figures and
tables, minutes.

    python book/_tools/reading.py [PAGE ...]      PAGE such as online; default: all

Words are words of prose, without formulas and numbers. What is folded (solutions,
set-up, checks) does not count, nor do figures to touch, the quiz and the list of
sources; of outputs only figures and tables do.
"""

import argparse
import copy
import math
import re
from pathlib import Path
from typing import NamedTuple

from bs4 import BeautifulSoup

SITE = Path(__file__).resolve().parents[2] / "_build/html/book"

# The pace of silent reading (Brysbaert 2019), and of readers who follow the derivations
# in the rest: with these numbers, the chapters take about as long as nine readers of
# the third edition said, except *Hopper* and *Eight bits*, which took a third longer.
WORDS_A_MINUTE = 238
LINES_A_MINUTE = 15
FORMULAS_A_MINUTE = 6  # on lines of their own
FIGURES_A_MINUTE = 0.5  # and tables

APART = "details, .dropdown, .toggle, .quiz, #sources, .toctree-wrapper, script, style"
CODE = (
    ".highlight:not(.output *) pre, [class*=highlight-python] pre, .highlight-diff pre"
)
FIGURES = "figure, table"
NO_PROSE = "pre, .math, .cell_output, .live-body, .headerlink"


class Size(NamedTuple):
    """What a reader sees of a page without opening anything."""

    words: int
    lines: int  # of code, blank lines too
    formulas: int  # on lines of their own
    figures: int  # and tables

    @property
    def minutes(self):
        """How long the page takes, rounded to five minutes, at least five."""
        exact = (
            self.words / WORDS_A_MINUTE
            + self.lines / LINES_A_MINUTE
            + self.formulas / FORMULAS_A_MINUTE
            + self.figures / FIGURES_A_MINUTE
        )
        return max(5, 5 * math.floor(exact / 5 + 0.5))


def measure(article):
    """The Size of a page, from its article as a BeautifulSoup tag."""
    article = copy.copy(article)
    for part in article.select(APART):
        part.decompose()
    blocks = [block.get_text().strip("\n") for block in article.select(CODE)]
    lines = sum(len(block.splitlines()) for block in blocks)
    formulas = len(article.select("div.math"))
    figures = sum(
        not x.find_parent(class_="live-body") for x in article.select(FIGURES)
    )
    captions = [caption.extract() for caption in article.find_all("figcaption")]
    prose = [article, *captions]
    for part in [found for tag in prose for found in tag.select(NO_PROSE)]:
        part.decompose()
    text = " ".join(tag.get_text(" ") for tag in prose)
    return Size(
        len(re.findall(r"[\w'’-]*[^\W\d_][\w'’-]*", text)), lines, formulas, figures
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*")
    built = sorted([*SITE.glob("*.html"), *SITE.glob("depth/*.html")])
    pages = [file.relative_to(SITE).with_suffix("").as_posix() for file in built]
    print(
        f"{'page':20}{'words':>8}{'lines':>8}{'formulas':>10}{'figures':>9}{'minutes':>9}"
    )
    for page in parser.parse_args().pages or pages:
        soup = BeautifulSoup((SITE / f"{page}.html").read_text(), "html.parser")
        size = measure(soup.find("article", class_="bd-article"))
        print(
            f"{page:20}{size.words:8}{size.lines:8}{size.formulas:10}{size.figures:9}"
            f"{size.minutes:9}"
        )


if __name__ == "__main__":
    main()
