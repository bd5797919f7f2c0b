"""The figures to touch: their scripts agree with the library, and they can be moved."""

import itertools
import re

import built
import live
import live_fp8
import numpy as np
import pytest
import torch
from built import BOOK, address, none
from visit import Visit

from flashlib.iomodel import masks, roofline
from flashlib.reference import fp8

MOST_BYTES = 60_000
# Both sides round every operation of a short sum, and their exponentials differ by a
# unit.
ROUNDINGS = 64


def same(found, wanted):
    """Whether two {name: number} agree up to rounding."""
    assert found.keys() == wanted.keys()
    return all(
        abs(found[name] - x) <= ROUNDINGS * np.spacing(max(abs(x), 1.0))
        for name, x in wanted.items()
    )


def figure(page, name):
    return page.locator(f'figure[data-live="{name}"]')


def read(page, name):
    """{name: text} of the numbers that a figure shows."""
    return figure(page, name).evaluate(
        """figure => Object.fromEntries([...figure.querySelectorAll('[data-show]')]
          .map(place => [place.dataset.show, place.textContent]))"""
    )


@pytest.fixture(scope="module")
def visits(browser, site):
    """Each page with a figure, opened once."""
    opened = {}

    def visit(page):
        if page not in opened:
            opened[page] = Visit(browser, address(site, page), "light")
        return opened[page].page

    yield visit
    for one in opened.values():
        none(one.complaints())
        one.close()


def test_scripts_are_small():
    for script in (BOOK / "_static/live").iterdir():
        assert 0 < script.stat().st_size < MOST_BYTES, script


@pytest.mark.parametrize("name", live.FIGURES)
def test_a_script_is_loaded_where_its_figure_is(name):
    built.require_book()
    script = f"live/{name}.js"
    pages = {page: built.page_file(page).read_text() for page in built.PAGES}
    assert [page for page, text in pages.items() if script in text] == [name]


@pytest.mark.parametrize("name", live.FIGURES)
def test_without_the_script_the_page_has_the_same_numbers(visits, name):
    html = built.page_file(name).read_text()
    shown = dict(re.findall(r'data-show="([^"]+)"[^>]*>([^<]*)<', html))
    assert len(shown) > 3 and shown == read(visits(name), name)


# -- online


def scores():
    """Scores of a grid and of extreme inputs."""
    chance = np.random.default_rng(0)
    yield live.SCORES
    yield (0.0,) * 8
    yield tuple(np.linspace(-3, 3, 8))
    yield tuple(np.linspace(900, -900, 8))
    for scale in (0.1, 1.0, 3.0, 100.0):
        for _ in range(20):
            yield tuple(chance.normal(scale=scale, size=8))


def test_online_agrees_with_the_library(visits):
    inputs = [[float(score) for score in row] for row in scores()]
    found = figure(visits("online"), "online").evaluate(
        "(figure, [inputs, values]) => inputs.map(row => figure.compute(row, values))",
        [inputs, live.VALUES],
    )
    for row, numbers in zip(inputs, found, strict=True):
        wanted = live.online_numbers(row)
        assert same(numbers, wanted), row
        exps = np.exp(np.array(row) - max(row))
        softmax = exps @ live.VALUES / exps.sum()
        assert same({"o": numbers["o 8"]}, {"o": softmax}), row


def test_online_is_moved_with_the_keyboard(visits):
    page = visits("online")
    slider = figure(page, "online").get_by_label("score of key 3")
    slider.focus()
    row = list(live.SCORES)
    for key, row[2] in (("Home", -3.0), ("End", 3.0), ("ArrowDown", 2.9)):
        page.keyboard.press(key)
        wanted = live.online_numbers(row)
        wanted |= {f"s {j}": score for j, score in enumerate(row, start=1)}
        shown = {name: live.shown(number) for name, number in wanted.items()}
        assert read(page, "online") == shown
        said = figure(page, "online").get_by_role("status").inner_text()
        assert said == f"Output {shown['o 8']}."
    rises = figure(page, "online").locator("[data-rises]").all_inner_texts()
    assert rises == ["1.10", "2.90"]


# -- latent


def test_latent_agrees_with_the_library(visits):
    ends = [(low, high) for _, _, (low, high, _) in live.LATENT.values()]
    grid = [
        *itertools.product(*([2**low, 2 ** (low + 3), 2**high] for low, high in ends))
    ]
    found = figure(visits("latent"), "latent").evaluate(
        "(figure, [inputs, ridge]) => inputs.map(x => figure.compute(...x, ridge))",
        [grid, roofline.H200.ridge_flops_per_byte],
    )
    for one, numbers in zip(grid, found, strict=True):
        assert same(numbers, live.latent_numbers(*one)), one


def test_latent_is_moved_with_the_keyboard(visits):
    page = visits("latent")
    here = figure(page, "latent")
    for key, size, way in (("End", 2**13, "Expand"), ("Home", 1, "Absorb")):
        here.get_by_label("queries").focus()
        page.keyboard.press(key)
        numbers = live.latent_numbers(128, size, 4096)
        shown = read(page, "latent")
        assert shown["way"] == way
        assert shown == {name: live.latent_text(name, numbers) for name in shown}


# -- fp8


def test_fp8_agrees_with_the_library(visits):
    """Errors are differences: a rounding of the scores is a larger part of them."""
    powers = range(live_fp8.LAST + 1)
    grid = [*itertools.product((2**n for n in powers), (False, True), (False, True))]
    found = figure(visits("fp8"), "fp8").evaluate(
        "(figure, [inputs, signs]) => inputs.map(x => figure.compute(...x, signs))",
        [grid, fp8.signs(8).tolist()],
    )
    for one, numbers in zip(grid, found, strict=True):
        wanted = live_fp8.numbers(*one)
        errors = {name: x for name, x in wanted.items() if name.startswith("error")}
        for name, x in errors.items():
            assert abs(numbers.pop(name) - x) < 1e-9, (one, name)
        assert same(numbers, {n: wanted[n] for n in wanted.keys() - errors}), one


def test_fp8_is_moved_with_the_keyboard(visits):
    page = visits("fp8")
    here = figure(page, "fp8")
    here.get_by_label("size of the outliers").focus()
    page.keyboard.press("End")
    size = 2**live_fp8.LAST
    for apart, turned in ((False, False), (True, False), (True, True)):
        for label, on in (("a scale for each key", apart), ("transform", turned)):
            box = here.get_by_label(label)
            if box.is_checked() != on:
                box.focus()
                page.keyboard.press("Space")
        numbers = live_fp8.numbers(size, apart, turned)
        shown = read(page, "fp8")
        assert shown == {name: live_fp8.text(name, numbers) for name in shown}


def test_fp8_shows_what_the_chapter_says():
    """The scale saves the small key, and the transform the score of two outliers."""
    one, apart, both = (
        live_fp8.numbers(2**12, *on)
        for on in ((False, False), (True, False), (True,) * 2)
    )
    assert one["error key 2"] > 5 * apart["error key 2"]
    first = live_fp8.numbers(20, False, False)["error key 1"]
    assert live_fp8.numbers(20, False, True)["error key 1"] < first / 2
    assert both["error key 1"] < apart["error key 1"] / 2


# -- bottleneck


def test_bottleneck_agrees_with_the_library(visits):
    ends = [(low, high) for low, high, _ in live.SLIDERS.values()]
    powers = [[2**n for n in range(low, high + 1)] for low, high in ends]
    grid = [*itertools.product(*powers, roofline.GPUS)]
    inputs = [[*x, gpu.flops_per_second, gpu.hbm_bytes_per_second] for *x, gpu in grid]
    found = figure(visits("bottleneck"), "bottleneck").evaluate(
        "(figure, inputs) => inputs.map(one => figure.compute(...one))", inputs
    )
    for one, numbers in zip(grid, found, strict=True):
        assert same(numbers, live.bottleneck_numbers(*one)), one


def test_bottleneck_is_moved_with_the_keyboard(visits):
    page, sizes = visits("bottleneck"), {}
    here = figure(page, "bottleneck")
    fold = page.locator(".admonition.dropdown").filter(has=here)
    fold.locator(".admonition-title button, .toggle-button").first.click()
    for name, (_, high, _) in live.SLIDERS.items():
        slider = here.get_by_label(live.NAMES[name])
        slider.focus()
        page.keyboard.press("End")
        page.keyboard.press("ArrowLeft")
        sizes[name] = 2 ** (high - 1)
        assert slider.get_attribute("aria-valuetext") == str(sizes[name])
    here.get_by_label("GPU", exact=True).focus()
    page.keyboard.press("Home")  # the first of the list
    numbers = live.bottleneck_numbers(*sizes.values(), roofline.A100)
    shown = read(page, "bottleneck")
    assert shown == {name: live.bottleneck_text(name, numbers) for name in shown}
    for name in live.PROGRAMS:
        wanted = live.bottleneck_place(numbers[f"rho {name}"], numbers[f"speed {name}"])
        point = here.locator(f"svg g.live-{name}").get_attribute("transform")
        found = map(float, re.findall(r"[\d.]+", point))
        assert same(dict(enumerate(found)), dict(enumerate(wanted)))


# -- masks

# What the language has, next to the examples of the figure.
FORMULAS = (
    "i - j < 5 and not j > i",
    "i - 3 <= j < i + 2 != 7",
    "j % 4 == 0 or -7 // 2 + i > 2 * j",
    "(j <= i) & ~(i - j >= 6) | (j == 0)",
    "not i < j or abs(i - j) == 9",
    "min(i, 8) > max(j, 3)",
    "doc(max(i - 2, 0)) == doc(j) != 2",
    "(i * i - j) % -5 < -2",
    "1 < 0",
)
# {formula: what is wrong with it}
WRONG = {
    "": "the formula is empty",
    "j <= ": "the formula ends too early",
    "j = i": "= is not allowed here: write == to compare",
    "i / 2 < j": "/ is not allowed here: write // to divide",
    "i < 1.5": ". is not allowed here",
    "j <= k": "k is not known: the names are i, j, doc, abs, min, max, and, or, not",
    "alert(1) < 2": "alert is not known: the names are i, j, doc, abs, min, max, "
    "and, or, not",
    "i - j": "a mask compares: write i < j, for example",
    "j <= i & j < 3": "& needs a comparison, got a number: put each comparison in "
    "parentheses",
    "i and j < 2": "and needs a comparison, got a number",
    "(i < j) + 1 < 2": "+ needs a number, got a comparison",
    "(i < j": ") is missing at the end",
    "i < j)": ") is in the wrong place",
    "doc i < 2": "expected ( before i",
    "abs(i, j) < 2": "abs takes one number, got 2",
    "doc(j + 1) == 2": "there is no token 16, so doc(16) has no value",
    "i // j < 2": "it divides by 0",
    "i * 999999999 * 999999999 < 2": "a number becomes too large",
    "i < 2" + " or i < 2" * 22: "the formula has more than 200 characters",
}


def seen_by(formula):
    """The mask that Python finds for a formula, a pair at a time."""
    T, ids = live.LENGTH, live.IDS
    names = {"doc": lambda n: ids[n], "abs": abs, "min": min, "max": max}
    tokens = torch.arange(T)
    rows = [
        [bool(eval(formula, names | {"i": i, "j": j})) for j in tokens] for i in tokens
    ]
    return torch.tensor(rows)


def test_masks_agree_with_the_library(visits):
    T = live.LENGTH
    seen = {formula: m.visible(1, 1, T, T)[0, 0] for formula, m in live.MASKS.values()}
    assert all(torch.equal(seen[formula], seen_by(formula)) for formula in seen)
    seen |= {formula: seen_by(formula) for formula in FORMULAS}
    grid = [*itertools.product(seen, (1, 2, 4, 8), (1, 2, 4, 8))]
    found = figure(visits("masks"), "masks").evaluate(
        "(figure, [grid, n, starts]) => "
        "grid.map(one => figure.compute(...one, n, starts))",
        [grid, T, live.STARTS],
    )
    for one, drawn in zip(grid, found, strict=True):
        formula, rows, columns = one
        numbers, paths = live.masks_numbers(seen[formula], rows, columns)
        assert drawn["paths"] == paths and same(drawn["found"], numbers), one
        counts = masks.measured_blocks(
            lambda p, j, formula=formula: seen[formula].numpy()[p, j],
            *(T, T, rows, columns),
        )
        assert counts == (numbers["read"], numbers["masked"]), one


def test_masks_say_what_is_wrong_with_a_formula(visits):
    page = visits("masks")
    here = figure(page, "masks")
    formula = here.get_by_label("query i sees key j if")
    for text, said in WRONG.items():
        # What is pasted by a script may be longer than what can be typed.
        formula.evaluate("(input, text) => { input.value = text }", text)
        formula.dispatch_event("input")
        assert here.get_by_role("status").inner_text() == said
        assert formula.get_attribute("aria-invalid") == "true"
        assert read(page, "masks")["whole"] == "–"
        assert not any(path.get_attribute("d") for path in here.locator("path").all())
    formula.fill("j <= i")
    assert here.get_by_role("status").inner_text() == ""
    assert formula.get_attribute("aria-invalid") == "false"
    described = formula.get_attribute("aria-describedby")
    assert here.get_by_role("status").get_attribute("id") == described


def test_masks_are_moved_with_the_keyboard(visits):
    page = visits("masks")
    here = figure(page, "masks")
    example, at = here.get_by_role("combobox"), {"rows": 1, "columns": 8}
    for name, key in (("rows", "Home"), ("columns", "End")):
        slider = here.get_by_label(live.EDGES[name][1])
        slider.focus()
        page.keyboard.press(key)
        assert slider.get_attribute("aria-valuetext") == str(at[name])
    formula = here.get_by_label("query i sees key j if")

    def shows(seen):
        numbers, paths = live.masks_numbers(seen, **at)
        numbers |= at
        shown = read(page, "masks")
        assert shown == {name: str(numbers[name]) for name in shown}
        drawn = here.locator("svg path")
        assert [path.get_attribute("d") for path in drawn.all()] == paths

    example.focus()
    page.keyboard.press("Home")
    for text, mask in live.MASKS.values():
        assert example.input_value() == formula.input_value() == text
        shows(mask.visible(1, 1, live.LENGTH, live.LENGTH)[0, 0])
        page.keyboard.press("ArrowDown")
    formula.focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("j < 6 and i > 2")
    assert example.input_value() == ""
    shows(seen_by("j < 6 and i > 2"))


# -- hopper


def test_hopper_is_what_closed_forms_say():
    """g and e are the clocks of the products and of the exponentials of two groups."""
    g = 4 * 128 * live.KEYS * live.HEAD / live.CLOCK.flops
    e = 128 * live.KEYS / live.CLOCK.exponentials
    ceilings = {"specialized": g + e, "overlapped": g / 2 + max(g / 2, e)}
    ceilings |= {"turns": max(g, e)}
    for step, clocks in ceilings.items():
        found, _ = live.hopper_numbers(step, 3, 2)
        assert found == {"clocks": clocks, "queries": 128, "busy": g / clocks}


def test_hopper_is_moved_with_the_keyboard(visits):
    page = visits("hopper")
    here = figure(page, "hopper")
    fold = page.locator(".admonition.dropdown").filter(has=here)
    fold.locator(".admonition-title button, .toggle-button").first.click()
    chosen = here.locator("select")
    chosen.focus()
    page.keyboard.press("Home")
    for step in live.STEPS:
        assert chosen.input_value() == step
        for keys, at in ((("Home", "Home"), (1, 1)), (("End", "ArrowRight"), (3, 2))):
            for name, key in zip(("slots", "groups"), keys, strict=True):
                here.get_by_label(name).focus()
                page.keyboard.press(key)
            numbers, paths = live.hopper_numbers(step, *at)
            shown = {name: live.hopper_text(name, x) for name, x in numbers.items()}
            shown |= {"slots": str(at[0]), "groups": str(at[1])}
            assert read(page, "hopper") == shown
            drawn = here.locator("svg path")
            assert [path.get_attribute("d") for path in drawn.all()] == paths
            lanes = here.locator("svg g:has(rect):not([visibility=hidden])")
            assert lanes.count() == 1 + at[1]
        chosen.focus()
        page.keyboard.press("ArrowDown")
