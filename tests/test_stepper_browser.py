"""Figures to step through in a real browser: every control clicked, every mode judged.

The page under test holds five figures as a notebook shows them, with the script and the style sheet beside
it; what they must show comes from the simulators. At the end come the built book's own figures.
"""

import re

import built
import numpy as np
import pytest
import serve
import test_browser
from test_browser import Visit, none

from flashlib.iomodel import formulas, schedules
from flashlib.iomodel.paging import PagePool
from flashlib.machine import Machine, cells, programs
from flashlib.stepper import show_forward, show_pages, show_program, show_schedule
from flashlib.stepper.frame import asset, number_text

DOT = Machine(3).run(programs.dot(2), cells("a", [[1, 2], [3, 4]]) | cells("b", [[5, 6], [7, 8]]))
SOFTMAX = Machine(4).run(programs.online_softmax(4), cells("x", [0.5, 2.0, -1.0, 3.0]))
# Running maxima and sums by name, as a chapter writes them: no formula fills more than a line or two.
NAMES = {"max(x[0], x[1])": "m1", "max(m1, x[2])": "m2", "max(m2, x[3])": "m3", "exp(x[0] - x[0])": "l0"}
NAMES |= {
    f"l{i - 1}*exp({m} - m{i}) + exp(x[{i}] - m{i})": f"l{i}" for i, m in enumerate(("x[0]", "m1", "m2"), 1)
}
Q, K, V = np.random.default_rng(0).normal(size=(3, 4, 2))
MEMORY = schedules.algorithm_2(Q, K, V, capacity_words=16, B_r=2, B_c=2, trace=True).memory
WORDS = formulas.algorithm_2_words(4, 2, 2)
Q6, K6, V6 = np.random.default_rng(0).normal(size=(3, 6, 2))
PASSES = [
    run(Q6, K6, V6, capacity_words=20, B_r=2, B_c=2, trace=True)
    for run in (schedules.algorithm_4, schedules.flash2_forward)
]
POOL = PagePool(8, 4, trace=True)
POOL.new("A", 6)
POOL.fork("A", "B")
POOL.append("B")
POOL.new("C", 7)
POOL.swap_out("A")
POOL.append("C", 2)
POOL.free("B")
FIGURES = [
    show_program(DOT, title="One element", alt="A program of seven instructions"),
    show_program(SOFTMAX.as_dict(NAMES), title="Online softmax", alt="A program of 52 instructions"),
    show_schedule(MEMORY, closed_form_words=WORDS, title="Algorithm 2", alt="Blocks in fast memory"),
    show_forward(*(run.memory for run in PASSES), title="Both orders", alt="Two passes, tile by tile"),
    show_pages(POOL, title="Pages", alt="Three sequences in eight pages"),
]
BODY = "".join(figure._repr_html_() for figure in FIGURES)
SHELL = """<!doctype html><html lang="en"{attributes}><head><meta charset="utf-8"><title>Figures</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">
<style>body {{ font-family: sans-serif; max-width: 46rem; margin: auto; }}
html[data-theme="dark"] body {{ background: #121212; color: #eee; }}</style>{head}</head>
<body><main><h1>Figures</h1>{body}</main></body></html>"""
ASSETS = '<link rel="stylesheet" href="stepper.css"><script src="stepper.js"></script>'
# The theme sets the attribute by what the system prefers.
THEME = "<script>document.documentElement.dataset.theme = matchMedia('(prefers-color-scheme: dark)').matches"
THEME += " ? 'dark' : 'light'</script>"


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """A function that writes a page and returns its address."""
    folder = tmp_path_factory.mktemp("figures")
    for name in ("stepper.js", "stepper.css"):
        (folder / name).write_text(asset(name))
    server = serve.start(folder)

    def page(body=BODY, head=ASSETS + THEME, attributes=""):
        (folder / "page.html").write_text(SHELL.format(body=body, head=head, attributes=attributes))
        return f"http://127.0.0.1:{server.server_port}/page.html"

    yield page
    server.shutdown()


@pytest.fixture
def visit(browser, write):
    with Visit(browser, write(), "light") as opened:
        yield opened
        none(opened.off_site + opened.bad + opened.errors)


class Stepper:
    """One figure of an open page."""

    def __init__(self, page, number):
        self.page, self.figure = page, page.locator("figure.stepper").nth(number)
        self.live = self.figure.locator(".stepper-live")

    def click(self, name):
        # At either end a button says aria-disabled, and Playwright would wait for it.
        self.figure.get_by_role("button", name=name, exact=True).click(force=True)

    def step(self):
        """The number of the step that the figure says it is at."""
        return int(self.figure.locator(".stepper-where").inner_text().split(" / ")[0])

    def cells(self):
        """{name of a register or memory cell: value}, without the empty ones."""
        boxes = self.figure.locator(".stepper-cell")
        names, values = (boxes.locator(f".stepper-{part}").all_inner_texts() for part in ("name", "value"))
        return {n: v for n, v in zip(names, values, strict=True) if v != "–"}

    def said(self):
        return self.figure.locator(".stepper-said").inner_text()

    def current_line(self):
        return self.figure.locator(".stepper-source [aria-current]").all_inner_texts()


def expected_cells(run, number):
    """What registers and memory hold after so many steps of a run."""
    held = dict(run.before)
    for step in run.trace[:number]:
        if step.written:
            held[step.written] = step.registers[step.instruction.value].number
    registers = run.trace[number - 1].registers if number else run.initial
    held |= {f"R{i}": value.number for i, value in enumerate(registers) if value}
    return {name: number_text(value) for name, value in held.items()}


def assert_shows(stepper, run, number):
    assert stepper.step() == number
    assert stepper.cells() == expected_cells(run, number)
    assert stepper.current_line() == ([str(run.trace[number - 1].instruction)] if number else [])


# ----------------------------------------------------------------------------------------------------
# Stepping


def test_next_and_previous_walk_through_the_whole_program(visit):
    stepper = Stepper(visit.page, 0)
    assert_shows(stepper, DOT, 0)
    for number in range(1, 8):
        stepper.click("Next")
        assert_shows(stepper, DOT, number)
        step = DOT.trace[number - 1]
        counters = stepper.figure.locator(".stepper-counters").inner_text().split()
        assert counters == f"cycles {step.cycles} loads {step.loads} stores {step.stores}".split()
        assert str(step.instruction) in stepper.said()
    stepper.click("Next")
    assert stepper.step() == 7, "there is nothing after the end"
    for number in range(6, -1, -1):
        stepper.click("Previous")
        assert_shows(stepper, DOT, number)
    stepper.click("Previous")
    assert stepper.step() == 0


def test_marks_follow_the_step(visit):
    stepper = Stepper(visit.page, 0)

    def marked(mark):
        return stepper.figure.locator(f".stepper-cell[data-mark={mark}] .stepper-name").all_inner_texts()

    for _ in range(3):
        stepper.click("Next")
    assert marked("read") == ["R0", "R1"] and marked("written") == ["R2"]
    for _ in range(4):
        stepper.click("Next")
    assert marked("read") == ["R2"] and marked("written") == ["c[0][0]"]
    stepper.page.keyboard.press("Home")
    assert marked("read") == marked("written") == []


def test_keys_step_where_the_focus_is(visit):
    first, second = Stepper(visit.page, 0), Stepper(visit.page, 1)
    second.live.focus()
    for key, number in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 52), ("Home", 0)]:
        scrolled = visit.page.evaluate("scrollY")
        visit.page.keyboard.press(key)
        assert_shows(second, SOFTMAX, number)
        assert visit.page.evaluate("scrollY") == scrolled, "the page stays where it is"
    visit.page.keyboard.press("Alt+ArrowRight")
    assert second.step() == 0, "the browser's own keys are left alone"
    assert first.step() == 0, "the other figures stand still"
    visit.page.locator("h1").click()
    visit.page.keyboard.press("ArrowRight")
    assert (first.step(), second.step()) == (0, 0)


def test_controls_are_reached_by_tab_and_show_it(visit):
    stepper = Stepper(visit.page, 0)
    stepper.live.focus()
    seen = []
    for _ in range(4):
        visit.page.keyboard.press("Tab")
        style = (
            "() => [document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText, "
        )
        style += "getComputedStyle(document.activeElement).outlineStyle]"
        name, outline = visit.page.evaluate(style)
        assert outline == "solid", f"{name} does not show that it has the focus"
        seen.append(name.split("\n")[-1].strip())
    assert [name.split()[-1] for name in seen] == ["Previous", "Play", "Next", "element"]
    visit.page.keyboard.press("Shift+Tab")
    for _ in range(9):  # more than there are steps: the button keeps the focus at the end
        visit.page.keyboard.press("Enter")
    assert stepper.step() == 7
    visit.page.keyboard.press("ArrowLeft")
    assert stepper.step() == 6


def test_slider_goes_anywhere(visit):
    stepper = Stepper(visit.page, 1)
    slider = stepper.figure.get_by_role("slider")
    slider.fill("30")
    assert_shows(stepper, SOFTMAX, 30)
    slider.press("ArrowRight")
    assert_shows(stepper, SOFTMAX, 31)
    assert slider.get_attribute("aria-valuetext") == "step 31 of 52"


def test_click_on_a_line_goes_there_and_the_line_stays_in_sight(visit):
    stepper = Stepper(visit.page, 1)
    stepper.figure.locator(".stepper-source li").nth(3).click()
    assert_shows(stepper, SOFTMAX, 4)
    for key in ("End", "Home"):
        stepper.live.press(key)
        inside = """figure => {
          const box = figure.querySelector('.stepper-source').getBoundingClientRect();
          const line = figure.querySelector('[aria-current]') ?? figure.querySelector('.stepper-source li');
          const place = line.getBoundingClientRect();
          return place.top >= box.top && place.bottom <= box.bottom;
        }"""
        assert stepper.figure.evaluate(inside)


def test_play_runs_to_the_end_and_again(browser, write):
    with Visit(browser, write(), "light") as visit:
        visit.page.clock.install()
        visit.page.reload()
        stepper = Stepper(visit.page, 0)
        stepper.click("Play")
        assert stepper.figure.locator("[aria-live]").get_attribute("aria-live") == "off"
        visit.page.clock.run_for(3 * 1200 + 50)
        assert_shows(stepper, DOT, 3)
        stepper.click("Pause")
        assert stepper.figure.locator("[aria-live]").get_attribute("aria-live") == "polite"
        visit.page.clock.run_for(10_000)
        assert stepper.step() == 3
        stepper.click("Play")
        visit.page.clock.run_for(60_000)
        assert_shows(stepper, DOT, 7)
        stepper.click("Play")  # its name again, and from the start
        visit.page.clock.run_for(1250)
        assert stepper.step() == 1
        stepper.click("Next")
        visit.page.clock.run_for(10_000)
        assert stepper.step() == 2, "whoever steps by hand has taken over"
        none(visit.errors)


def test_figures_on_one_page_are_independent(visit):
    steppers = [Stepper(visit.page, number) for number in range(3)]
    assert visit.page.locator(".stepper-live").count() == len(FIGURES)
    for stepper, times in zip(steppers, (2, 1, 3), strict=True):
        for _ in range(times):
            stepper.click("Next")
    assert [stepper.step() for stepper in steppers] == [2, 1, 3]
    assert_shows(steppers[0], DOT, 2)
    assert_shows(steppers[1], SOFTMAX, 1)


def test_schedule_shows_fast_memory_and_words_at_every_step(visit):
    stepper = Stepper(visit.page, 2)
    bars = stepper.figure.locator(".stepper-bar")
    rows = FIGURES[2].rows
    for number, (_, head, held, _, words, loaded, stored) in enumerate(rows, start=1):
        stepper.click("Next")
        assert stepper.step() == number and head in stepper.said()
        labels = bars.nth(0).locator(".stepper-part").all_inner_texts()
        assert ", ".join(labels) == ("" if held == "nothing" else held)
        assert stepper.figure.locator(".stepper-in").count() == len(labels)
        shares = "bar => [...bar.children].reduce((sum, part) => sum + parseFloat(part.style.width), 0)"
        assert bars.nth(0).evaluate(shares) == 100 * int(words) / 16
        text = f"{loaded} loaded + {stored} stored = {int(loaded) + int(stored)} of {WORDS} words"
        assert text in stepper.figure.inner_text()
    assert int(loaded) + int(stored) == WORDS
    assert stepper.figure.locator(".stepper-stored").count() == 2, "both blocks of O were stored"


def test_blocks_are_drawn_in_their_place(visit):
    stepper = Stepper(visit.page, 2)
    step = next(s for s, row in enumerate(FIGURES[2].rows, start=1) if row[1] == "Load K[2:4]")
    stepper.figure.get_by_role("slider").fill(str(step))
    place = """figure => {
      const panel = [...figure.querySelectorAll('.stepper-panel-grid')]
        .find(one => one.querySelector('.stepper-title').textContent === 'K');
      const ground = panel.querySelector('.stepper-ground').getBBox();
      const block = panel.querySelector('.stepper-in');
      const box = block.getBBox();
      return [block.dataset.mark, box.x, box.y / ground.height, box.width / ground.width,
              box.height / ground.height];
    }"""
    assert stepper.figure.evaluate(place) == ["load", 0, 0.5, 1, 0.5]


def states(stepper):
    """[the texts of each row of m, l and O] of both sides."""
    tables = stepper.figure.locator(".stepper-state").all()
    return [[row.locator("th, td").all_inner_texts() for row in table.locator("tbody tr").all()]
            for table in tables]  # fmt: skip


def test_next_walks_both_passes_to_the_same_output(visit):
    stepper = Stepper(visit.page, 3)
    assert states(stepper) == [[[str(i), *["–"] * n] for i in range(6)] for n in (4, 5)]
    bars = stepper.figure.locator(".stepper-bar")
    for number, row in enumerate(FIGURES[3].rows, start=1):
        stepper.click("Next")
        assert stepper.step() == number
        said = stepper.said().split("\n")
        for side, (tile, words) in enumerate(((row[1], row[3]), (row[4], row[6]))):
            assert tile.replace(", keys", " with keys") in said[side]
            assert f"= {words} words" in stepper.figure.locator(".stepper-panel-bar").nth(side).inner_text()
            shares = "bar => [...bar.children].reduce((sum, part) => sum + parseFloat(part.style.width), 0)"
            most = PASSES[0].memory.moved_words
            assert round(bars.nth(side).evaluate(shares) * most / 100, 3) == int(words)
    stepper.click("Next")
    assert stepper.step() == 9, "there is nothing after the end"
    s = Q6 @ K6.T / np.sqrt(2)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    l = p.sum(axis=1, keepdims=True)
    output = [[f"{x:z.3f}" for x in row] for row in p @ V6 / l]
    first, second = states(stepper)
    assert [row[3:] for row in first] == [row[3:5] for row in second] == output
    assert [row[2] for row in first] == [f"{x:z.3f}" for (x,) in l]
    lse = s.max(axis=1) + np.log(l[:, 0])
    assert [row[1:3] + row[5:] for row in second] == [["–", "–", f"{x:z.3f}"] for x in lse]


def test_tiles_of_both_passes_are_drawn_and_marked(visit):
    stepper = Stepper(visit.page, 3)
    pictures = stepper.figure.locator(".stepper-panel-plane").all()

    def blocks(picture, mark):
        """The marked blocks: first column and row in cells, from the corner of S."""
        return picture.evaluate(
            """(picture, mark) => {
              const [ground] = [...picture.querySelectorAll('.stepper-ground')].slice(3, 4);
              const [corner, side] = [ground.getBBox(), ground.getBBox().width / 6];
              return [...picture.querySelectorAll(`.stepper-in[data-mark=${mark}]`)].map(block => {
                const box = block.getBBox();
                return [(box.x - corner.x) / side, (box.y - corner.y) / side].map(Math.round);
              });
            }""",
            mark,
        )

    for number in range(9):
        stepper.click("Next")
        outer, inner = 2 * (number // 3), 2 * (number % 3)
        assert blocks(pictures[0], "pair") == [[outer, inner]], "keys outside: down the columns"
        assert blocks(pictures[1], "pair") == [[inner, outer]], "queries outside: along the rows"
        assert [len(blocks(pictures[0], mark)) for mark in ("both", "written")] == (
            [3, 0] if number > 2 else [0, 3]
        )
        assert [len(blocks(pictures[1], mark)) for mark in ("both", "written")] == [0, 2 * (inner == 4)]
        assert len(blocks(pictures[1], "read")) == 2 + (inner == 0)
        for picture in pictures:
            assert picture.locator(".stepper-stored").count() == number + 1


@pytest.mark.parametrize("width, beside", [(1280, [True, True]), (360, [True, False])])
def test_both_passes_stand_beside_each_other_where_there_is_room(browser, write, width, beside):
    """On a phone the pictures still do; the tables stand below each other."""
    with Visit(browser, write(), "light") as visit:
        visit.page.set_viewport_size({"width": width, "height": 800})
        stepper = Stepper(visit.page, 3)
        stepper.live.press("End")
        for kind, expected in zip(("plane", "table"), beside, strict=True):
            first, second = (
                one.bounding_box() for one in stepper.figure.locator(f".stepper-panel-{kind}").all()
            )
            assert (first["y"] == second["y"]) == expected
            assert second["x"] + second["width"] <= width
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width


def test_pages_and_tables_follow_the_pool(visit):
    stepper = Stepper(visit.page, 4)
    sequences, pages = stepper.figure.locator(".stepper-panel-plane").all()
    for step, row in zip(POOL.trace()["steps"], FIGURES[4].rows, strict=True):
        stepper.click("Next")
        assert row[1] in stepper.said()
        assert f"{row[3]} of 8 pages free" in pages.inner_text()
        drawn = [sum(map(len, step["tables"].values())), 8 - int(row[3])]
        assert [one.locator(".stepper-in").count() for one in (sequences, pages)] == drawn
        written = {page for page, _, _ in step["written"]}
        assert pages.locator('.stepper-in[data-mark="written"]').count() == len(written)
        (table,) = states(stepper)
        for name, rows, *held in table:
            known = step["lengths"].get(name, "away" if name in step["swapped"] else "–")
            assert rows == str(known)
            assert [page for page in held if page != "–"] == [str(p) for p in step["tables"].get(name, ())]
    share = """block => {
      const page = block.ownerSVGElement.querySelector('.stepper-ground');
      return block.getBBox().width / page.getBBox().width;
    }"""
    shares = [block.evaluate(share) for block in pages.locator(".stepper-in").all()]
    assert sorted(round(4 * share) for share in shares) == [1, 4, 4], "nine rows of C"


# ----------------------------------------------------------------------------------------------------
# Every reader


@pytest.mark.parametrize("mode", test_browser.MODES)
def test_figures_are_right_in_every_mode(browser, write, mode):
    with Visit(browser, write(), mode) as visit:
        for number in range(len(FIGURES)):
            stepper = Stepper(visit.page, number)
            stepper.figure.get_by_role("slider").fill("6")
            stepper.figure.locator("summary").click()
        none(visit.faults())


LONG = show_program(SOFTMAX, title="Without names", alt="The same, its formulas written out")


@pytest.mark.parametrize("width, figures", [(1280, [LONG]), (570, [*FIGURES, LONG]), (320, FIGURES)])
def test_nothing_jumps_from_step_to_step(browser, write, width, figures):
    body = "".join(figure._repr_html_() for figure in figures)
    with Visit(browser, write(body), "light") as visit:
        visit.page.set_viewport_size({"width": width, "height": 900})
        for number, figure in enumerate(figures):
            stepper = Stepper(visit.page, number)
            heights = set()
            for _ in figure.rows:
                heights.add(stepper.live.bounding_box()["height"])
                stepper.live.press("ArrowRight")
            assert len(heights) == 1, (figure.title, heights)


def test_step_is_announced(visit):
    stepper = Stepper(visit.page, 0)
    stepper.click("Next")
    status = stepper.figure.locator("[aria-live=polite]")
    assert status.inner_text() == "LOAD a[0][0], R0: R0 takes a[0][0] = 1 from memory."
    assert stepper.figure.get_attribute("aria-label") == "A program of seven instructions"
    assert "One element" in stepper.live.get_attribute("aria-label")


def ground(page):
    """The lightness of the figure's ground, 0 to 255."""
    colour = page.locator(".stepper-live").first.evaluate("live => getComputedStyle(live).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


@pytest.mark.parametrize(
    "mode, attributes, dark",
    [
        ("light", "", False),
        ("dark", "", True),
        ("light", ' data-theme="dark"', True),
        ("dark", ' data-theme="light"', False),
        ("dark", ' data-jp-theme-light="true"', False),
        ("light", ' data-jp-theme-light="false"', True),
    ],
)
def test_page_decides_whether_it_is_dark_and_else_the_system(browser, write, mode, attributes, dark):
    with Visit(browser, write(head=ASSETS, attributes=attributes), mode) as visit:
        assert (ground(visit.page) < 60) == dark and (ground(visit.page) > 200) == (not dark)


@pytest.mark.parametrize("motion, moves", [("reduce", False), ("no-preference", True)])
def test_motion_is_only_for_those_who_want_it(browser, write, motion, moves):
    with Visit(browser, write(), "light") as visit:
        visit.page.emulate_media(reduced_motion=motion)
        cell = visit.page.locator(".stepper-cell").first
        assert (cell.evaluate("cell => getComputedStyle(cell).transitionDuration") != "0s") == moves


def test_without_script_every_step_stands_in_a_table(browser, write):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(write())
    assert page.locator(".stepper-live").count() == 0
    for number, figure in enumerate(FIGURES):
        shown = page.locator("figure.stepper").nth(number)
        rows = shown.locator("tbody tr")
        if number == 1:  # long, so folded
            assert not rows.first.is_visible()
            shown.locator("summary").click()
        assert rows.first.is_visible() and rows.count() == len(figure.rows)
        for row, texts in zip(rows.all()[:5], figure.rows, strict=False):
            assert row.locator("th, td").all_inner_texts() == texts
        assert shown.locator(".stepper-summary").is_visible()
    context.close()


@pytest.mark.parametrize("script", [True, False])
def test_print_has_short_tables_and_summaries(browser, write, script):
    context = browser.new_context(java_script_enabled=script)
    page = context.new_page()
    page.goto(write())
    page.emulate_media(media="print")
    if script:
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert not any(live.is_visible() for live in page.locator(".stepper-live").all())
    figures = page.locator("figure.stepper").all()
    visible = [figure.locator("details table").is_visible() for figure in figures]
    assert visible == [len(figure.rows) <= 40 for figure in FIGURES] and len(set(visible)) == 2
    assert all(line.is_visible() for line in page.locator(".stepper-summary").all())
    if script:
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert not page.locator("figure.stepper details[open]").count()
    context.close()


def test_live_figures_need_no_page_around_them(browser, write):
    body = "".join(figure.live()._repr_html_() for figure in FIGURES)
    with Visit(browser, write(body, head=""), "light") as visit:
        steppers = [Stepper(visit.page, number) for number in range(len(FIGURES))]
        assert visit.page.locator(".stepper-live").count() == len(FIGURES), "each figure is built once"
        steppers[1].click("Next")
        assert_shows(steppers[1], SOFTMAX, 1)
        assert_shows(steppers[0], DOT, 0)
        steppers[3].live.press("End")
        assert steppers[3].step() == 9
        none(visit.off_site + visit.errors)


# ----------------------------------------------------------------------------------------------------
# The book's own figures

WITH_FIGURES = [
    path.stem
    for path in built.SOURCES
    if path.suffix == ".ipynb" and 'class=\\"stepper\\"' in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", WITH_FIGURES)
def test_figures_of_the_book_can_be_stepped_through(browser, page):
    built.require_book()
    server = serve.start(built.HTML)
    with Visit(browser, f"http://127.0.0.1:{server.server_port}/book/{page}.html", "light") as visit:
        count = visit.page.locator("figure.stepper").count()
        assert count > 0 and visit.page.locator(".stepper-live").count() == count
        for number in range(count):
            stepper = Stepper(visit.page, number)
            stepper.live.press("End")
            assert stepper.step() == stepper.figure.locator("details tbody tr").count() > 0
            first = stepper.said()
            stepper.click("Previous")
            assert stepper.said() != first
        none(visit.errors + visit.bad + visit.off_site)
    server.shutdown()
