"""Formulas: KaTeX has rendered each of them, and the build says which it cannot."""

import os
import re
import sys

import built
import formulas
import pytest
from built import PAGES, ROOT, none, page_file
from processes import run

CONFIG = 'extensions = ["formulas"]\nhtml_math_renderer = "katex"\n'


def formula_faults(html):
    """What is wrong with the formulas of a page, given its HTML."""
    meant = len(re.findall('<(?:div|span) class="math ', html))
    found = len(re.findall('<span class="katex-mathml"><math ', html))
    lines = [f"{found} of {meant} formulas are rendered"] if found != meant else []
    return lines + [f"it has {x}" for x in re.findall(r"MathJax|\\\(|\\\[", html)]


@pytest.mark.parametrize("page", PAGES)
def test_every_formula_of_the_page_is_rendered(page):
    built.require_book()
    html = page_file(page).read_text()
    none(formula_faults(re.sub(r"<(pre|code|annotation)\b.*?</\1>", "", html)))


PAGE = r"""Page
====

A formula in the text: :math:`a < b`.

.. math:: x &= 1 \\ y &= 2
   :label: eq-a-one
"""
BLOCK = r"""
.. math:: %s
   :label: eq-a-%s
"""
WRONG = [r"a \nosuchmacro", "a_b_c"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(HTML, warnings) of a small page with a right block and wrong ones."""
    folder = tmp_path_factory.mktemp("small")
    wrong = [BLOCK % (tex, number) for number, tex in enumerate(WRONG)]
    (folder / "conf.py").write_text(CONFIG)
    (folder / "index.rst").write_text(PAGE + "".join(wrong))
    command = [sys.executable, "-m", "sphinx", "-q", ".", "out"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "book/_tools")}
    said = run(command, check=True, cwd=folder, env=env).stderr
    return (folder / "out/index.html").read_text(), said


def test_numbers_and_anchors_are_those_of_sphinx(small):
    page = built.with_tex(small[0])
    assert r"\(a &lt; b\)" in page
    start = r'id="equation-eq-a-one">\s*<span class="eqno">\(1\)<a class="headerlink"'
    block = r' href="#equation-eq-a-one".*?</span>\\\[\\begin\{split\}x &amp;= 1 \\\\ y'
    assert re.search(start + block, page, re.S), page


def test_a_wrong_formula_is_named_with_its_page_and_label(small):
    html, said = small
    for number in range(len(WRONG)):
        warning = rf"index.rst:\d+: WARNING: formula eq-a-{number}: KaTeX parse error"
        assert re.search(warning, said), said
    assert "eq-a-one" not in said
    assert f"2 of {2 + len(WRONG)} formulas are rendered" in formula_faults(html)


def test_missing_programs_are_named(monkeypatch):
    formulas.katex.cache_clear()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(formulas.ExtensionError, match="apt-get install -y nodejs npm"):
        formulas.katex()
