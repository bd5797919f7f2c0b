"""The figures to touch: their scripts agree with the library, and they can be moved."""

import itertools
import re

import built
import live
import numpy as np
import pytest
from built import BOOK, address, none
from test_browser import Visit

from flashlib.iomodel import masks, roofline

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


def test_masks_agree_with_the_library(visits):
    sizes = (1, 2, 4, 8)
    grid = [("causal", *tile, 0, 0) for tile in itertools.product(sizes, sizes)]
    grid += [("packed", *one[1:]) for one in grid]
    sides = (0, 1, 5, 15)
    windows = itertools.product(sizes, sizes, sides, sides)
    grid += [("window", *one) for one in windows]
    found = figure(visits("masks"), "masks").evaluate(
        "(figure, [grid, n, starts]) => "
        "grid.map(one => figure.compute(...one, n, starts))",
        [grid, live.LENGTH, live.STARTS],
    )
    T = live.LENGTH
    for one, drawn in zip(grid, found, strict=True):
        numbers, paths = live.masks_numbers(*one)
        assert drawn["paths"] == paths and same(drawn["found"], numbers), one
        kind, rows, columns, *window = one
        if kind != "packed":
            mask = {"window": tuple(window)} if kind == "window" else {"causal": True}
            read, cut = masks.blocks_read, masks.blocks_cut
            counts = [f(T, T, rows, columns, **mask) for f in (read, cut)]
            assert [numbers["read"], numbers["masked"]] == counts, one


def test_masks_are_moved_with_the_keyboard(visits):
    page = visits("masks")
    here = figure(page, "masks")
    at = {"rows": 1, "columns": 8, "before": 14, "after": 1}
    keys = {"rows": "Home", "columns": "End", "before": "End", "after": "Home"}
    for name, key in keys.items():
        slider = here.get_by_label(live.EDGES[name][1])
        slider.focus()
        page.keyboard.press(key)
    page.keyboard.press("ArrowRight")
    here.get_by_label("keys back").focus()
    page.keyboard.press("ArrowLeft")
    for kind in ("window", "causal", "packed"):
        numbers, paths = live.masks_numbers(kind, **at)
        numbers |= at
        shown = read(page, "masks")
        assert shown == {name: str(numbers[name]) for name in shown}
        drawn = here.locator("svg path")
        assert [path.get_attribute("d") for path in drawn.all()] == paths
        assert here.get_by_label("keys back").is_enabled() == (kind == "window")
        here.locator("select").focus()
        page.keyboard.press("ArrowDown")


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
