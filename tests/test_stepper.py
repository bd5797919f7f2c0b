"""Figures to step through: their data and table follow the simulators' traces."""

import json

import numpy as np
import pytest
from stepper_figures import DOT, WORDS, parsed, replay

from flashlib.iomodel import TwoLevelMemory
from flashlib.iomodel.blocks import algorithm_2
from flashlib.iomodel.standard import standard_forward
from flashlib.machine import Machine, assemble
from flashlib.stepper import show_program, show_schedule
from flashlib.stepper.frame import MOST_STEPS, Figure, asset, number_text

T, D = 6, 2
INPUTS = np.random.default_rng(0).normal(size=(3, T, D))
TILES = {"B_r": 2, "B_c": 3, "trace": True}
SCHEDULES = {
    "algorithm 2": algorithm_2(*INPUTS, capacity_words=22, **TILES),
    "standard": standard_forward(*INPUTS, capacity_words=16, **TILES),
}


# -- Programs


def test_formula_that_is_too_long_gives_way_to_its_number():
    lines = ["LOAD x, R0", *["ADD R0, R0, R0"] * 5]
    figure = show_program(Machine(1).run(assemble("\n".join(lines)), {"x": 1}), **WORDS)
    assert figure.steps[3]["say"] == "R0 = x + x + x + x = 4."
    assert figure.rows[4][2] == "16" and figure.rows[2][2] == "x + x + x + x = 4"
    assert figure.steps[6]["say"] == "R0 = 32."
    assert len(figure.steps[-1]["set"][0][0][1]) > 100, "the register shows all of it"


# -- Schedules


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_shows_fast_memory_words_and_what_was_stored(name):
    memory = SCHEDULES[name].memory
    figure = show_schedule(memory, **WORDS)
    steps = memory.trace()["steps"]
    pairs = zip(steps, [*steps[1:], {"action": ""}], strict=True)
    merged = [a for a, b in pairs if not a["action"] == b["action"] == "free"]
    frames = list(replay(figure))[1:]
    for (data, shown, state), step in zip(frames, merged, strict=True):
        fast, moved, *grids = state
        held = []
        for panel, items in zip(data["panels"][2:], grids, strict=True):
            places = [place for item, place in items.items() if item]
            held += [[panel["title"], *p[:4]] for p in places if p[4] == "in"]
        assert sorted(held) == sorted(step["resident"])
        parts = [content[0] for label, content in fast.items() if label]
        assert len(parts) == len(held) and sum(parts) == step["resident_words"]
        for way in ("loaded", "stored"):
            assert moved.get(way, [0])[0] == step[f"{way}_words"]
        verb = {"reuse": ""}.get(step["action"], step["action"])
        assert verb in shown["head"].lower()
    assert moved[""].endswith(
        f"= {memory.moved_words} of {memory.closed_form_words} words"
    )
    for panel, items in zip(data["panels"][2:], grids, strict=True):
        covered = np.zeros((panel["rows"], panel["columns"]), dtype=int)
        for item, (top, bottom, left, right, *_) in items.items():
            if item:
                covered[top:bottom, left:right] = 1
        loaded, stored = memory.by_array.get(panel["title"], (0, 0))
        assert covered.sum() == stored  # every element of a result is stored once
        if panel["slow"]:
            assert items[""] == f"in {loaded}, out {stored}"


def small_memory():
    memory = TwoLevelMemory(8, trace=True)
    memory.place("A", np.ones((2, 2)))
    first, second = memory.load("A", slice(0, 1)), memory.load("A", slice(1, 2))
    memory.free(first, second)
    return memory


@pytest.mark.parametrize(
    "words, said",
    [
        (4, "the closed form agrees"),
        (6, "the closed form gives 6, 2 more"),
        (3, "the closed form gives 3, 1 fewer"),
    ],
)
def test_closed_form_is_compared(words, said):
    memory = small_memory()
    memory.closed_form_words = words
    figure = show_schedule(memory, formula="Td", **WORDS)
    assert said in figure.summary
    bar = figure.panels[1]
    assert bar["title"] == f"closed form Td = {words}"
    assert bar["max"] == max(4, words), "every word fits the bar"


# -- What a notebook shows


def test_texts_cannot_become_markup():
    words = {"title": '<b>"a" & b</b>', "alt": "</figure>'\"><i>", "summary": "<u>"}
    steps = [{"head": "</script><script>", "set": {}}]
    rows = {"columns": ["<a>", "b"], "rows": [["<s>", "&"]]}
    tree = parsed(Figure(**words, **rows, panels=[], steps=steps))
    assert not tree.find_all(["b", "i", "u", "s", "a"])
    assert len(tree.find_all("script")) == 1
    assert tree.figure["aria-label"] == words["alt"]
    assert tree.figcaption.get_text() == words["title"]
    assert json.loads(tree.script.string)["steps"] == steps


@pytest.mark.parametrize(
    "number, text",
    [
        (-3, "-3"), (2.0, "2"), (1 / 3, "0.3333"), (-0.0, "0"), ("inf", "inf"),
        (np.exp(-10), "4.54·10⁻⁵"), (12345.678, "1.235·10⁴"), (123456, "123456"),
        (np.nextafter(0.3, 1), "0.3"),
    ],
)  # fmt: skip
def test_numbers_are_short(number, text):
    assert number_text(number) == text


def test_script_is_small_and_sets_texts_alone():
    script = asset("stepper.js")
    assert len(script.encode()) <= 20_000
    assert "innerHTML" not in script, "texts of a trace are texts, never markup"


# -- Wrong arguments


LONG = Machine(1).run(assemble("LOAD x, R0\n" * (MOST_STEPS + 1)), {"x": 1})
# fmt: off
REFUSED = [
    (lambda: show_program(7, **WORDS), TypeError, "trace: expected a trace"),
    (lambda: show_program({"registers": []}, **WORDS), ValueError, "no memory, steps"),
    (lambda: show_program(Machine(1).run([], {}), **WORDS), ValueError,
     "trace: .* empty"),
    (lambda: show_program(LONG, **WORDS), ValueError,
     f"{MOST_STEPS} steps, got {MOST_STEPS + 1}"),
    (lambda: show_program(DOT, title="x", alt=" "), ValueError, "alt: expected a text"),
    (lambda: show_program(DOT, title=None, alt="x"), TypeError,
     "title: expected a text"),
    (lambda: show_schedule({}, **WORDS), ValueError, "memory: .* no capacity_words"),
    (lambda: show_schedule(small_memory(), **WORDS), ValueError,
     "memory: .* closed form, got one without"),
    (lambda: show_schedule(SCHEDULES["standard"].memory, formula=2, **WORDS), TypeError,
     "formula: expected a text"),
]
# fmt: on


@pytest.mark.parametrize("call, error, says", REFUSED)
def test_refusals(call, error, says):
    with pytest.raises(error, match=says):
        call()
