"""The main path of a rewritten chapter is short, and says how long it takes."""

import functools
import re

import built
import minutes
import practice
import pytest
import reading
from bs4 import BeautifulSoup
from built import MAIN, none

WORDS, LINES = 2500, 150


def size_faults(article):
    """What is too long on a page, and the minutes that it does not state."""
    size = reading.measure(article)
    lines = []
    if size.words > WORDS:
        lines.append(f"{size.words} words of prose, more than {WORDS}")
    if size.lines > LINES:
        lines.append(f"{size.lines} visible lines of code, more than {LINES}")
    stated = re.search(r"(\d+) minutes", article.find("p").get_text())
    if not stated or int(stated[1]) != size.minutes:
        said = stated[0] if stated else "no minutes"
        lines.append(f"its first paragraph says {said}, computed are {size.minutes}")
    return lines


@pytest.mark.parametrize("page", MAIN)
def test_main_path_is_short_and_says_its_minutes(page):
    built.require_book()
    none(size_faults(built.article(page)))


CODE = "<div class='highlight-python'><div class='highlight'><pre>{}</pre></div></div>"
FORMULA = "<div class='math'>\\[ x \\]</div>"


def page(words=1, lines=0, formulas=0, minutes=5, rest=""):
    code = CODE.format("x = 1\n" * lines) if lines else ""
    prose = "word " * words
    text = f"<p>{minutes} minutes.</p><p>{prose}</p>{code}{FORMULA * formulas}{rest}"
    return BeautifulSoup(f"<article>{text}</article>", "html.parser").article


def test_size_counts_what_is_seen():
    """Code that a cell shows is read, what it prints is not."""
    apart = (
        "<details>" + CODE.format("y\nz") + "<p>folded</p></details>"
        "<div class='dropdown'>a solution</div><section id='sources'>a source</section>"
        "<div class='cell_output'><div class='output'><pre>printed 12</pre></div>"
        "<figure><figcaption>One caption, 2 numbers</figcaption></figure></div>"
        "<div class='live-body'><table></table></div><table></table>"
        "<p>12 <span class='math'>\\(x^2\\)</span> it's</p>"
    )
    found = reading.measure(page(words=10, lines=7, formulas=3, rest=apart))
    assert found == (1 + 10 + 3 + 1, 7, 3, 2)
    shown = "<div class='cell_output'><div class='output'>" + CODE.format("a")
    assert reading.measure(page(rest=f"{shown}</div></div>")).lines == 1


def test_minutes_follow_the_formula():
    sizes = (0, 0, 0, 0), (2380, 0, 0, 0), (2380, 150, 0, 0), (2380, 150, 30, 0)
    sizes += ((2380, 150, 30, 5),)
    assert [reading.Size(*size).minutes for size in sizes] == [5, 10, 20, 25, 35]


@pytest.mark.parametrize(
    "options, fault",
    [
        ({}, None),
        ({"words": 2600, "minutes": 10}, "words of prose"),
        ({"lines": 151, "minutes": 10}, "lines of code"),
        ({"minutes": 25}, "says 25 minutes, computed are 5"),
        ({"minutes": "some"}, "says no minutes"),
    ],
)
def test_fault_of_size_is_found(options, fault):
    found = size_faults(page(**options))
    assert (len(found) == 1 and fault in found[0]) if fault else found == []


def stated(page):
    """[(pages, text)] of the times that a page states by `{minutes}`."""
    spans = built.article(page).select(".minutes")
    return [(span["data-pages"].split(), span.get_text()) for span in spans]


def total(text):
    """The minutes in "2 hours 5 minutes"."""
    parts = re.findall(r"(\d+) (hour|minute)s?\b", text)
    assert " ".join(re.findall(r"\d+ \w+", text)) == text.strip()
    return sum(int(n) * (60 if unit == "hour" else 1) for n, unit in parts)


@functools.cache
def minutes_of(page):
    return reading.measure(built.article(page)).minutes


@pytest.mark.parametrize("page", ["overview", "index"])
def test_times_are_those_of_the_built_pages(page):
    built.require_book()
    for pages, text in stated(page):
        assert total(text) == sum(map(minutes_of, pages)), (page, pages, text)


def test_the_overview_states_the_time_of_every_chapter_and_of_the_short_path():
    built.require_book()
    found = [pages for pages, _ in stated("overview")]
    assert [step for step in practice.STEPS if [step] not in found] == []
    short = max((pages for pages in found if pages[0] == "primer"), key=len)
    assert short[-1] == "backward"
    assert all(short[:n] in found for n in range(1, len(short)))
    assert [pages for pages, _ in stated("index")] == [short]


def test_times_are_written_into_a_page():
    place = minutes.SPAN.format("a b", "")
    html = f"<p>{place} and {minutes.SPAN.format('b', 'old')}.</p>"
    text = minutes.filled(html, {"a": 25, "b": 40}.get)
    said = BeautifulSoup(text, "html.parser").p.get_text()
    assert said == "1 hour 5 minutes and 40 minutes."
    assert minutes.filled(text, {"a": 25, "b": 40}.get) == text
    assert [minutes.spoken(n) for n in (60, 121)] == ["1 hour", "2 hours 1 minute"]
