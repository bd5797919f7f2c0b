"""Figures to step through in a real browser: every control, every mode. The page has
them as a notebook shows them; the simulators say what they must show.
"""

import re

import built
import numpy as np
import pytest
from built import none
from stepper_figures import DOT, example_pool, replay, schedule
from visit import Visit

from flashlib.iomodel.blocks import algorithm_2
from flashlib.machine import Machine, cells, programs
from flashlib.stepper import show_forward, show_pages, show_program, show_schedule
from flashlib.stepper.frame import asset, number_text

SOFTMAX = Machine(4).run(programs.online_softmax(4), cells("x", [0.5, 2.0, -1.0, 3.0]))
# Short names for running maxima and sums, as in a chapter: formulas fit their line.
NAMES = {"max(x[0], x[1])": "m1", "max(m1, x[2])": "m2", "max(m2, x[3])": "m3"}
NAMES |= {"exp(x[0] - x[0])": "l0"}
for i, m in enumerate(("x[0]", "m1", "m2"), start=1):
    NAMES[f"l{i - 1}*exp({m} - m{i}) + exp(x[{i}] - m{i})"] = f"l{i}"
Q, K, V = np.random.default_rng(0).normal(size=(3, 4, 2))
MEMORY = algorithm_2(Q, K, V, capacity_words=16, B_r=2, B_c=2, trace=True).memory
WORDS = algorithm_2.words(4, 2, 2)
PASSES = [schedule(name, (6, 2, 2, 2)) for name in ("algorithm_4", "flash2_forward")]
POOL = example_pool()
FIGURES = [
    show_program(DOT, title="One element", alt="A program of seven instructions"),
    show_program(SOFTMAX.as_dict(NAMES), title="Softmax", alt="52 instructions"),
    show_schedule(MEMORY, title="Algorithm 2", alt="Blocks"),
    show_forward(*PASSES, title="Both orders", alt="Tiles"),
    show_pages(POOL, title="Pages", alt="Three sequences in eight pages"),
    show_program(SOFTMAX, title="Without names", alt="Long formulas"),
]
BODY = "".join(figure._repr_html_() for figure in FIGURES)
SHELL = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<title>Figures</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">
<style>body {{ font-family: sans-serif; max-width: 46rem; margin: auto; }}
html[data-theme="dark"] body {{ background: #121212; color: #eee; }}</style>
{head}</head>
<body><main><h1>Figures</h1>{body}</main></body></html>"""
# As in the book, a script sets the theme to what the system prefers.
HEAD = """<link rel="stylesheet" href="stepper.css"><script src="stepper.js"></script>
<script>
  const system = matchMedia('(prefers-color-scheme: dark)');
  system.onchange = () => {
    document.documentElement.dataset.theme = system.matches ? 'dark' : 'light';
  };
  system.onchange();
</script>"""


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """The address of a folder with the page, and the page of live figures."""
    folder = tmp_path_factory.mktemp("figures")
    for name in ("stepper.js", "stepper.css"):
        (folder / name).write_text(asset(name))
    live = "".join(figure.live()._repr_html_() for figure in FIGURES)
    (folder / "page.html").write_text(SHELL.format(body=BODY, head=HEAD))
    (folder / "live.html").write_text(SHELL.format(body=live, head=""))
    with built.served(folder) as address:
        yield address


@pytest.fixture(scope="module")
def shared(browser, figures):
    with Visit(browser, f"{figures}/page.html", "light") as opened:
        yield opened


@pytest.fixture
def visit(shared):
    """The shared page, with every figure at its start."""
    shared.page.set_viewport_size({"width": 1280, "height": 900})
    shared.page.evaluate(
        """() => {
          document.activeElement.blur();
          for (const slider of document.querySelectorAll('.stepper-slider')) {
            slider.value = 0;
            slider.dispatchEvent(new Event('input'));
          }
        }"""
    )
    yield shared
    none(shared.off_site + shared.bad + shared.errors)


READ = """figure => {
  const all = (selector, within = figure) => [...within.querySelectorAll(selector)];
  const texts = (selector, within) => all(selector, within).map(one => one.innerText);
  return {
    step: parseInt(figure.querySelector('.stepper-where').innerText),
    said: figure.querySelector('.stepper-said').innerText,
    cells: texts('.stepper-name').map((name, i) => [name, texts('.stepper-value')[i]]),
    marks: all('.stepper-cell[data-mark]').map(
      cell => [cell.querySelector('.stepper-name').innerText, cell.dataset.mark]),
    line: texts('.stepper-source [aria-current]'),
    counters: texts('.stepper-counters').join(' ').split(/\\s+/),
    texts: texts('.stepper-text'),
    bars: all('.stepper-bar').map(bar => ({
      labels: texts('.stepper-part', bar),
      share: [...bar.children].reduce(
        (sum, part) => sum + parseFloat(part.style.width), 0),
    })),
    pictures: all('.stepper-grid').map(picture => {
      const grounds = all('.stepper-ground', picture).map(one => one.getBBox());
      return {
        grounds: grounds.map(box => [box.x, box.y, box.width, box.height]),
        blocks: all('.stepper-in', picture).map(one => {
          const box = one.getBBox();
          return [one.dataset.mark, box.x, box.y, box.width, box.height];
        }),
        stored: all('.stepper-stored', picture).length,
      };
    }),
    states: all('.stepper-state').map(
      table => all('tbody tr', table).map(row => texts('th, td', row))),
  };
}"""


class Stepper:
    """One figure of an open page."""

    def __init__(self, page, number):
        self.page, self.figure = page, page.locator("figure.stepper").nth(number)
        self.live = self.figure.locator(".stepper-live")

    def click(self, name):
        # At either end a button is aria-disabled, and Playwright would wait for it.
        self.figure.get_by_role("button", name=name, exact=True).click(force=True)

    def read(self):
        """Everything that the figure shows, in one call of the browser."""
        return self.figure.evaluate(READ)

    def step(self):
        return self.read()["step"]


def assert_shows(stepper, run, number):
    """A program is at a step, with the registers and the memory of the machine."""
    held = dict(run.before)
    for step in run.trace[:number]:
        if step.written:
            held[step.written] = step.registers[step.instruction.value].number
    registers = run.trace[number - 1].registers if number else run.initial
    held |= {f"R{i}": value.number for i, value in enumerate(registers) if value}
    shown = stepper.read()
    assert shown["step"] == number
    values = {name: value for name, value in shown["cells"] if value != "–"}
    assert values == {name: number_text(value) for name, value in held.items()}
    assert shown["line"] == [str(step.instruction) for step in run.trace[:number][-1:]]
    return shown


# -- Stepping


def test_buttons_walk_through_the_whole_program(visit):
    stepper = Stepper(visit.page, 0)
    assert_shows(stepper, DOT, 0)
    for number, step in enumerate(DOT.trace, start=1):
        stepper.click("Next")
        shown = assert_shows(stepper, DOT, number)
        counters = f"cycles {step.cycles} loads {step.loads} stores {step.stores}"
        assert shown["counters"] == counters.split()
        assert str(step.instruction) in shown["said"]
        if number == 1:
            status = stepper.figure.locator("[aria-live=polite]").inner_text()
            assert status == "LOAD a[0][0], R0: R0 = 1, loaded from a[0][0]."
        if number == 3:
            read, written = [["R0", "read"], ["R1", "read"]], [["R2", "written"]]
            assert shown["marks"] == read + written
    assert shown["marks"] == [["R2", "read"], ["c[0][0]", "written"]]
    stepper.click("Next")
    assert stepper.step() == 7, "there is nothing after the end"
    for number in range(6, -1, -1):
        stepper.click("Previous")
        shown = assert_shows(stepper, DOT, number)
    assert shown["marks"] == []
    stepper.click("Previous")
    assert stepper.step() == 0
    label = stepper.figure.get_attribute("aria-label")
    assert label == "A program of seven instructions"
    assert "One element" in stepper.live.get_attribute("aria-label")


def test_keys_step_the_figure_that_has_the_focus(visit):
    first, second = Stepper(visit.page, 0), Stepper(visit.page, 1)
    second.live.focus()
    keys = {"ArrowRight": 1, "End": 52, "ArrowLeft": 51, "Home": 0}
    for key, number in keys.items():
        scrolled = visit.page.evaluate("scrollY")
        visit.page.keyboard.press(key)
        assert_shows(second, SOFTMAX, number)
        assert visit.page.evaluate("scrollY") == scrolled, "the page does not scroll"
    visit.page.keyboard.press("Alt+ArrowRight")
    assert second.step() == 0, "the browser's own keys are left alone"
    visit.page.locator("h1").click()
    visit.page.keyboard.press("ArrowRight")
    assert (first.step(), second.step()) == (0, 0)


def test_controls_are_reached_by_tab_and_show_it(visit):
    stepper = Stepper(visit.page, 0)
    stepper.live.focus()
    focused = """() => {
      const one = document.activeElement;
      const name = one.getAttribute('aria-label') ?? one.innerText;
      return [name.trim().split(/\\s/).pop(), getComputedStyle(one).outlineStyle];
    }"""
    for expected in ("Previous", "Play", "Next", "element"):
        visit.page.keyboard.press("Tab")
        assert visit.page.evaluate(focused) == [expected, "solid"]
    visit.page.keyboard.press("Shift+Tab")
    for _ in range(9):  # more than there are steps: the button keeps the focus
        visit.page.keyboard.press("Enter")
    assert stepper.step() == 7
    visit.page.keyboard.press("ArrowLeft")
    assert stepper.step() == 6


def test_slider_and_lines_go_anywhere(visit):
    stepper = Stepper(visit.page, 1)
    slider = stepper.figure.get_by_role("slider")
    slider.fill("30")
    slider.press("ArrowRight")
    assert_shows(stepper, SOFTMAX, 31)
    assert slider.get_attribute("aria-valuetext") == "step 31 of 52"
    stepper.figure.locator(".stepper-source li").nth(3).click()
    assert_shows(stepper, SOFTMAX, 4)
    inside = """figure => {
      const list = figure.querySelector('.stepper-source');
      const current = list.querySelector('[aria-current]');
      const [box, place] = [list, current ?? list.firstChild]
        .map(one => one.getBoundingClientRect());
      return place.top >= box.top && place.bottom <= box.bottom;
    }"""
    for key in ("End", "Home"):
        stepper.live.press(key)
        assert stepper.figure.evaluate(inside), "the current line stays in sight"


def test_play_runs_to_the_end_and_again(browser, figures):
    with Visit(browser, f"{figures}/page.html", "light") as visit:
        visit.page.clock.install()
        visit.page.reload()
        stepper = Stepper(visit.page, 0)
        said = stepper.figure.locator("[aria-live]")
        stepper.click("Play")
        assert said.get_attribute("aria-live") == "off"
        visit.page.clock.run_for(3 * 1200 + 50)
        assert_shows(stepper, DOT, 3)
        stepper.click("Pause")
        assert said.get_attribute("aria-live") == "polite"
        visit.page.clock.run_for(10_000)
        assert stepper.step() == 3
        stepper.click("Play")
        visit.page.clock.run_for(60_000)
        assert_shows(stepper, DOT, 7)
        stepper.click("Play")  # from the start
        visit.page.clock.run_for(1250)
        assert stepper.step() == 1
        stepper.click("Next")
        visit.page.clock.run_for(10_000)
        assert stepper.step() == 2, "stepping by hand stops the play"
        none(visit.errors)


# -- Pictures


def test_schedule_shows_fast_memory_and_words_at_every_step(visit):
    stepper = Stepper(visit.page, 2)
    for row in FIGURES[2].rows:
        stepper.click("Next")
        shown = stepper.read()
        number, head, held, _, words, loaded, stored = row
        assert shown["step"] == int(number) and head in shown["said"]
        fast = shown["bars"][0]
        assert ", ".join(fast["labels"]) == ("" if held == "nothing" else held)
        assert fast["share"] == 100 * int(words) / 16
        drawn = [block for picture in shown["pictures"] for block in picture["blocks"]]
        assert len(drawn) == len(fast["labels"])
        total = int(loaded) + int(stored)
        text = f"{loaded} loaded + {stored} stored = {total} of {WORDS} words"
        assert text in shown["texts"]
        if head == "Load K[2:4]":
            titles = [panel["title"] for panel in FIGURES[2].panels[2:]]
            picture = shown["pictures"][titles.index("K")]
            ((x, y, width, height),) = picture["grounds"]
            loaded_now = [["load", x, y + height / 2, width, height / 2]]
            assert picture["blocks"] == loaded_now
    assert total == WORDS
    assert sum(picture["stored"] for picture in shown["pictures"]) == 2, "both of O"


def test_both_passes_reach_the_same_output_tile_by_tile(visit):
    stepper = Stepper(visit.page, 3)
    most = PASSES[0].moved_words
    for number, row in enumerate(FIGURES[3].rows):
        stepper.click("Next")
        shown = stepper.read()
        assert shown["step"] == number + 1
        outer, inner = 2 * (number // 3), 2 * (number % 3)
        tiles = (outer, inner), (inner, outer)  # down the columns, along the rows
        for side, (tile, words) in enumerate(((row[1], row[3]), (row[4], row[6]))):
            said = shown["said"].split("\n")[side]
            assert tile.replace(", keys", " with keys") in said
            assert f"= {words} words" in shown["texts"][2 + side]
            assert round(shown["bars"][side]["share"] * most / 100, 3) == int(words)
            picture = shown["pictures"][side]
            assert picture["stored"] == number + 1
            left, top, width, _ = picture["grounds"][3]  # of S
            ((_, x, y, *_),) = (b for b in picture["blocks"] if b[0] == "pair")
            place = round(6 * (x - left) / width), round(6 * (y - top) / width)
            assert place == tiles[side]
    *_, (_, _, (*_, first, second)) = replay(FIGURES[3])
    for rows, items in zip(shown["states"], (first, second), strict=True):
        cells = sorted(int(item) for item in items if item)
        texts = [x for _, *row in rows for x in row if x != "–"]
        assert texts == [items[str(cell)] for cell in cells]


@pytest.mark.parametrize("width, beside", [(1280, [True, True]), (360, [True, False])])
def test_both_passes_are_side_by_side_where_they_fit(visit, width, beside):
    """On a phone the pictures still are; the tables are below each other."""
    visit.page.set_viewport_size({"width": width, "height": 800})
    stepper = Stepper(visit.page, 3)
    stepper.live.press("End")
    for kind, expected in zip(("plane", "table"), beside, strict=True):
        panels = stepper.figure.locator(f".stepper-panel-{kind}").all()
        first, second = (panel.bounding_box() for panel in panels)
        assert (first["y"] == second["y"]) == expected
        assert second["x"] + second["width"] <= width
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width


# -- Every reader


def test_figures_have_no_fault_in_any_mode(browser, figures):
    with Visit(browser, f"{figures}/page.html", "light") as visit:
        for number in range(len(FIGURES)):
            stepper = Stepper(visit.page, number)
            stepper.figure.get_by_role("slider").fill("6")
            stepper.figure.locator("summary").click()
        none(visit.faults_in_all_modes())


@pytest.mark.parametrize("width, count", [(1280, 6), (570, 6), (320, 5)])
def test_nothing_jumps_from_step_to_step(visit, width, count):
    """Long formulas may wrap on a phone only."""
    visit.page.set_viewport_size({"width": width, "height": 900})
    heights = visit.page.locator("figure.stepper").evaluate_all(
        """figures => figures.map(figure => {
          const slider = figure.querySelector('.stepper-slider'), heights = new Set();
          for (let step = 0; step <= Number(slider.max); step++) {
            slider.value = step;
            slider.dispatchEvent(new Event('input'));
            heights.add(figure.querySelector('.stepper-live').offsetHeight);
          }
          return [...heights];
        })"""
    )
    assert all(len(found) == 1 for found in heights[:count]), heights


@pytest.mark.parametrize(
    "scheme, name, value, dark",
    [
        ("light", "theme", "dark", True),
        ("dark", "jpThemeLight", "true", False),
        ("light", "jpThemeLight", "false", True),
        ("dark", "other", "", True),
    ],
)
def test_page_decides_whether_it_is_dark_and_else_the_system(
    visit, scheme, name, value, dark
):
    visit.page.emulate_media(color_scheme=scheme)
    ground = visit.page.evaluate(
        """([name, value]) => {
          const data = document.documentElement.dataset;
          const before = data.theme;
          delete data.theme;
          data[name] = value;
          const live = document.querySelector('.stepper-live');
          const color = getComputedStyle(live).backgroundColor;
          delete data[name];
          data.theme = before;
          return color;
        }""",
        [name, value],
    )
    visit.page.emulate_media(color_scheme="light")
    lightness = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
    assert lightness < 60 if dark else lightness > 200


def test_motion_is_only_for_readers_who_want_it(visit):
    cell = visit.page.locator(".stepper-cell").first
    duration = "cell => getComputedStyle(cell).transitionDuration"
    assert cell.evaluate(duration) == "0s"
    visit.page.emulate_media(reduced_motion="no-preference")
    moving = cell.evaluate(duration)
    visit.page.emulate_media(reduced_motion="reduce")
    assert moving != "0s"


def test_without_script_every_step_is_in_a_table(browser, figures):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{figures}/page.html")
    assert page.locator(".stepper-live").count() == 0
    for shown, figure in zip(
        page.locator("figure.stepper").all(), FIGURES, strict=True
    ):
        rows = shown.locator("tbody tr")
        folded = len(figure.rows) > 40
        assert rows.first.is_visible() != folded
        if folded:
            shown.locator("summary").click()
        assert rows.first.is_visible() and rows.count() == len(figure.rows)
        assert rows.first.locator("th, td").all_inner_texts() == figure.rows[0]
        assert shown.locator(".stepper-summary").is_visible()
    page.reload()
    assert_prints_short_tables(page)
    context.close()


def assert_prints_short_tables(page):
    page.emulate_media(media="print")
    tables = page.locator("figure.stepper details table").all()
    visible = [len(figure.rows) <= 40 for figure in FIGURES]
    assert [table.is_visible() for table in tables] == visible
    assert all(line.is_visible() for line in page.locator(".stepper-summary").all())
    assert not any(live.is_visible() for live in page.locator(".stepper-live").all())


def test_print_has_short_tables_and_summaries(visit):
    visit.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert_prints_short_tables(visit.page)
    visit.page.emulate_media(media="screen")
    visit.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not visit.page.locator("figure.stepper details[open]").count()


def test_live_figures_need_no_page_around_them(browser, figures):
    with Visit(browser, f"{figures}/live.html", "light") as visit:
        steppers = [Stepper(visit.page, number) for number in range(len(FIGURES))]
        assert visit.page.locator(".stepper-live").count() == len(FIGURES), "built once"
        steppers[1].click("Next")
        assert_shows(steppers[1], SOFTMAX, 1)
        assert_shows(steppers[0], DOT, 0)
        steppers[3].live.press("End")
        assert steppers[3].step() == 9
        none(visit.off_site + visit.errors)


# -- The book's own figures

QUICK = "flash2"
WITH_FIGURES = [
    pytest.param(page, marks=[] if page == QUICK else pytest.mark.slow)
    for page in built.NOTEBOOKS
    if 'class=\\"stepper\\"' in built.source_file(page).read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", WITH_FIGURES)
def test_figures_of_the_book_can_be_stepped_through(browser, site, page):
    with Visit(browser, built.address(site, page), "light") as visit:
        count = visit.page.locator("figure.stepper").count()
        assert count > 0 and visit.page.locator(".stepper-live").count() == count
        for number in range(count):
            stepper = Stepper(visit.page, number)
            stepper.live.press("End")
            last = stepper.read()
            rows = stepper.figure.locator("details tbody tr").count()
            assert last["step"] == rows > 0
            drawn = stepper.figure.locator(".stepper-in, .stepper-stored")
            fills = drawn.evaluate_all("all => all.map(x => getComputedStyle(x).fill)")
            assert "rgb(0, 0, 0)" not in fills, "the joined style sheet has its colors"
            stepper.click("Previous")
            assert stepper.read()["said"] != last["said"]
        none(visit.errors + visit.bad + visit.off_site)


def test_figure_fits_the_screen_and_the_address_keeps_its_step(browser, site):
    with Visit(browser, built.address(site, QUICK), "light") as visit:
        stepper = Stepper(visit.page, 0)
        stepper.live.press("End")
        stepper.click("Previous")
        for width, height in ((1280, 720), (390, 740)):
            visit.page.set_viewport_size({"width": width, "height": height})
            assert stepper.live.bounding_box()["height"] <= height
        shown = stepper.read()
        kept = "step => location.hash.endsWith(`=${step}`)"
        visit.page.wait_for_function(kept, arg=shown["step"])
        with Visit(browser, visit.page.url, "light") as again:
            assert Stepper(again.page, 0).read()["said"] == shown["said"]
