"""Figures to step through: their data retells the simulators' traces, and their table says the same."""

import json
import re
from fractions import Fraction

import numpy as np
import pytest
from bs4 import BeautifulSoup

from flashlib.iomodel import TwoLevelMemory, formulas, schedules
from flashlib.machine import Machine, assemble, cells, programs
from flashlib.stepper import show_program, show_schedule
from flashlib.stepper.frame import MOST_STEPS, Figure, asset, number_text

WORDS = {"title": "A title", "alt": "What it shows"}
MATRICES = cells("a", [[1, 2], [3, 4]]) | cells("b", [[5, 6], [7, 8]])
RUNS = {
    "dot": Machine(3).run(programs.dot(2), MATRICES),
    "outer": Machine(6).run(programs.outer_product(2), MATRICES),
    "online": Machine(4).run(programs.online_softmax(3), cells("x", [0.5, 2.0, -1.0])),
    "held": Machine(3).run(assemble("MOV R1, R2\nADD R1, R2, R0\nSTORE R0, m"), {"m": 7}, {1: 2.5}),
}
T, D = 6, 2
Q, K, V = np.random.default_rng(0).normal(size=(3, T, D))
SCHEDULES = {
    "algorithm 2": schedules.algorithm_2(Q, K, V, capacity_words=22, B_r=2, B_c=3, trace=True),
    "standard": schedules.standard_forward(Q, K, V, capacity_words=16, B_r=2, B_c=3, trace=True),
    "row blocks": schedules.row_block_forward(Q, K, V, capacity_words=24, B_r=2, B_c=3, trace=True),
}
EXACT = {
    "algorithm 2": formulas.algorithm_2_words(T, D, 2),
    "standard": formulas.standard_forward_words(T, D, 2),
    "row blocks": formulas.row_block_forward_words(T, D, 2),
}

each_run = pytest.mark.parametrize("name", RUNS)
each_schedule = pytest.mark.parametrize("name", SCHEDULES)


def program(name):
    return show_program(RUNS[name], **WORDS)


def schedule(name):
    return show_schedule(SCHEDULES[name].memory, closed_form_words=EXACT[name], **WORDS)


def parsed(figure):
    return BeautifulSoup(figure._repr_html_(), "html.parser")


def replay(figure):
    """The items of every panel after each step: what the page computes from the data in the HTML."""
    data = json.loads(parsed(figure).find("script").string)
    state = [{} for _ in data["panels"]]
    for step in data["steps"]:
        changed = [items | step["set"].get(str(panel), {}) for panel, items in enumerate(state)]
        state = [{k: v for k, v in items.items() if v is not None} for items in changed]
        yield data, step, state


# ----------------------------------------------------------------------------------------------------
# Programs


@each_run
def test_program_retells_registers_memory_and_counters(name):
    run = RUNS[name]
    memory = dict(run.before)
    frames = list(replay(program(name)))
    assert len(frames) == len(run.trace) + 1
    for (data, shown, state), step in zip(frames, [None, *run.trace], strict=True):
        held = step.registers if step else run.initial
        if step or name != "held":  # R2 and R0 are empty at the start, R1 is not
            expected = {i: number_text(value.number) for i, value in enumerate(held) if value}
            assert {int(i): text for i, (text, _) in state[0].items()} == expected
        if step and step.written:
            memory[step.written] = run.memory[step.written]
        found = {}
        for panel, items in zip(data["panels"], state, strict=True):
            if panel["group"] == "Memory":
                found |= {panel["cells"][int(i)]: value for i, (value, _) in items.items()}
        assert found == {cell: number_text(number) for cell, number in memory.items()}
        counts = {key: str(getattr(step, key)) if step else "0" for key in ("cycles", "loads", "stores")}
        assert state[-1] == counts
        assert shown["line"] == (step.number - 1 if step else None)
        if step:
            assert shown["head"] == data["lines"][shown["line"]] == str(step.instruction)


def test_program_starts_from_registers_that_are_not_empty():
    _, _, state = next(replay(program("held")))
    assert state[0] == {"1": ["2.5", "R1"]}


def test_program_marks_what_is_read_and_written():
    marks = [
        {
            int(panel): {int(item): mark for item, mark in items.items()}
            for panel, items in step["mark"].items()
        }
        for _, step, _ in replay(program("dot"))
    ]
    a, c = 1, 3  # panels: registers, a, b, c, counters
    assert marks[0] == {}
    assert marks[1] == {0: {0: "written"}, a: {0: "read"}}
    assert marks[3] == {0: {0: "read", 1: "read", 2: "written"}}
    assert marks[6] == {0: {0: "read", 1: "read", 2: "written"}}, "an accumulator counts as written"
    assert marks[7] == {0: {2: "read"}, c: {0: "written"}}


def test_matrices_keep_their_rows_and_vectors_flow():
    def memory(name):
        panels = [panel for panel in program(name).data["panels"] if panel["group"] == "Memory"]
        return {panel["title"]: (panel["columns"], panel["cells"][:3]) for panel in panels}

    assert memory("dot")["a"] == (2, ["a[0][0]", "a[0][1]", "a[1][0]"])
    assert memory("dot")["c"] == (1, ["c[0][0]"])
    assert memory("online") == {
        "x": (0, ["x[0]", "x[1]", "x[2]"]),
        "out": (0, ["out[0]", "out[1]", "out[2]"]),
    }


@each_run
def test_program_table_is_the_trace(name):
    run = RUNS[name]
    table = parsed(program(name)).find("table")
    head = [cell.get_text() for cell in table.find("thead").find_all("th")]
    registers = [f"R{i}" for i in range(len(run.initial))]
    assert head == ["Step", "Instruction", *registers, "Memory", "Cycles", "Loads", "Stores"]
    rows = [[cell.get_text() for cell in row.find_all(["th", "td"])] for row in table.tbody.find_all("tr")]
    for row, step in zip(rows, run.trace, strict=True):
        assert row[:2] == [str(step.number), str(step.instruction)]
        assert row[-3:] == [str(step.cycles), str(step.loads), str(step.stores)]
        for text, value in zip(row[2:-4], step.registers, strict=True):
            assert text.rpartition(" = ")[2] == (number_text(value.number) if value else "")
        assert row[-4].startswith(step.written or "") and bool(row[-4]) == bool(step.written)


def test_program_takes_a_dictionary_with_shorter_formulas():
    names = {"a[0][0]*b[0][0]": "first"}
    figure = show_program(RUNS["dot"].as_dict(names), **WORDS)
    assert figure.rows[2][4] == "first = 5"
    assert figure.data["steps"][3]["say"] == "R2 = first = 5."


def test_formula_that_is_too_long_gives_way_to_its_number():
    lines = ["LOAD x, R0", *["ADD R0, R0, R0"] * 5]
    figure = show_program(Machine(1).run(assemble("\n".join(lines)), {"x": 1}), **WORDS)
    assert figure.data["steps"][3]["say"] == "R0 = x + x + x + x = 4."
    assert figure.rows[4][2] == "16" and figure.rows[2][2] == "x + x + x + x = 4"
    assert figure.data["steps"][6]["say"] == "R0 = 32."
    notes = [step["set"][0][0][1] for step in figure.data["steps"][1:]]
    assert len(notes[-1]) > 100, "the register still has all of it"


def test_infinity_and_fractions_are_shown():
    run = Machine(2).run(assemble("LOAD x, R0\nEXP R0, R1\nLOAD y, R0"), {"x": 1000.0, "y": Fraction(1, 3)})
    figure = show_program(run, **WORDS)
    assert figure.rows[1][3] == "exp(x) = inf" and figure.rows[2][2] == "y = 0.3333"


# ----------------------------------------------------------------------------------------------------
# Schedules


def merged(trace):
    """The simulator's steps; of frees in a row the last."""
    steps = trace["steps"]
    pairs = zip(steps, [*steps[1:], {"action": ""}], strict=True)
    return [step for step, after in pairs if not step["action"] == after["action"] == "free"]


@each_schedule
def test_schedule_retells_fast_memory_and_words(name):
    memory, figure = SCHEDULES[name].memory, schedule(name)
    frames = list(replay(figure))
    steps = merged(memory.trace())
    assert len(frames) == len(steps) + 1 == len(figure.rows) + 1
    for (data, shown, state), step in zip(frames[1:], steps, strict=True):
        fast, moved, *grids = state
        held = []
        for panel, items in zip(data["panels"][2:], grids, strict=True):
            places = [place for key, place in items.items() if key]
            held += [[panel["title"], *place] for *place, layer in places if layer == "in"]
        assert sorted(held) == sorted(step["resident"])
        parts = [content[0] for label, content in fast.items() if label]
        assert len(parts) == len(step["resident"]) and sum(parts) == step["resident_words"]
        totals = {way: step[f"{way}_words"] for way in ("loaded", "stored") if step[f"{way}_words"]}
        assert {way: moved[way][0] for way in moved if way} == totals
        assert sum(totals.values()) <= data["panels"][1]["max"]
        verb = {"allocate": "make", "reuse": ""}.get(step["action"], step["action"])
        assert verb in shown["head"].lower()
    assert moved[""].endswith(f"= {memory.moved_words} of {EXACT[name]} words")


@each_schedule
def test_schedule_remembers_what_was_stored(name):
    memory = SCHEDULES[name].memory
    data, _, state = list(replay(schedule(name)))[-1]
    for panel, items in zip(data["panels"][2:], state[2:], strict=True):
        covered = np.zeros((panel["rows"], panel["columns"]), dtype=int)
        for top, bottom, left, right, layer in (place for key, place in items.items() if key):
            assert layer == "stored", "fast memory is empty at the end"
            covered[top:bottom, left:right] = 1
        loaded, stored = memory.by_array.get(panel["title"], (0, 0))
        assert covered.sum() == stored  # every element of a result is stored once
        if panel["slow"]:
            assert items[""] == f"in {loaded}, out {stored}"


def test_every_array_has_its_panel_and_a_gradient_the_colour_of_its_array():
    arrays = np.random.default_rng(1).normal(size=(5, 4, 2))
    run = schedules.row_block_backward(*arrays, capacity_words=40, B_r=2, B_c=2, trace=True)
    figure = show_schedule(run.memory, closed_form_words=1, **WORDS)
    grids = {panel["title"]: panel for panel in figure.data["panels"][2:]}
    assert set(grids) == {"Q", "K", "V", "O", "dO", "dQ", "dK", "dV", "D", "P", "dP", "dS", "m", "l"}
    for name in "QKVOP":
        assert grids[name]["colour"] == grids[f"d{name}"]["colour"]
    assert len({grids[name]["colour"] for name in ("Q", "K", "V", "O", "P", "dS", "D")}) == 7
    assert grids["Q"]["slow"] and not grids["P"]["slow"]


def test_frees_in_a_row_are_one_step():
    memory = TwoLevelMemory(8, trace=True)
    memory.place("A", np.ones((2, 2)))
    first, second = memory.load("A", slice(0, 1)), memory.load("A", slice(1, 2))
    memory.free(first, second)
    figure = show_schedule(memory, closed_form_words=4, **WORDS)
    assert [row[1] for row in figure.rows] == ["Load A[0]", "Load A[1]", "Free A[0] and A[1]"]
    assert figure.rows[-1][2:] == ["nothing", "0", "0", "4", "0"]


@pytest.mark.parametrize(
    "closed_form_words, said",
    [
        (4, "the closed form gives the same"),
        (6, "the closed form gives 6, 2 more"),
        (3, "the closed form gives 3, 1 less"),
        (np.int64(4), "the closed form gives the same"),
    ],
)
def test_closed_form_is_compared(closed_form_words, said):
    memory = TwoLevelMemory(8, trace=True)
    memory.place("A", np.ones((2, 2)))
    memory.free(memory.load("A"))
    figure = show_schedule(memory, closed_form_words=closed_form_words, formula="Td", **WORDS)
    assert said in figure.summary
    bar = figure.data["panels"][1]
    assert bar["title"] == f"closed form Td = {closed_form_words}"
    assert bar["max"] == max(4, closed_form_words), "the bar has room for every word"


# ----------------------------------------------------------------------------------------------------
# What a notebook shows


@pytest.mark.parametrize("make", [lambda: program("outer"), lambda: schedule("standard")])
def test_output_is_the_same_every_time_and_has_no_ids(make):
    first, second = make(), make()
    assert first._repr_html_() == second._repr_html_() and repr(first) == repr(second)
    assert not re.search(r"\sid=|0x[0-9a-f]{6}", first._repr_html_())
    assert repr(first).startswith("A title (") and "\n" not in repr(first)


def test_output_has_a_name_a_caption_and_a_table_with_heads():
    tree = parsed(program("dot"))
    figure = tree.find("figure")
    assert figure["aria-label"] == "What it shows"
    assert figure.figcaption.get_text() == "A title"
    assert figure.find("p", class_="stepper-summary").get_text() == "7 cycles, 4 loads, 1 store"
    assert {cell["scope"] for cell in tree.table.thead.find_all("th")} == {"col"}
    assert len(tree.table.find_all("th", scope="row")) == 7
    assert "overflow-x: auto" in tree.table.parent["style"] and tree.table.parent["tabindex"] == "0"


def test_long_table_is_folded_and_a_short_one_is_not():
    assert parsed(program("dot")).details.has_attr("open")
    long = parsed(schedule("standard")).details
    assert not long.has_attr("open") and "stepper-long" in long["class"]


def test_texts_cannot_break_out():
    words = {"title": '<b>"a" & b</b>', "alt": "</figure>'\"><i>"}
    text = {"steps": [{"head": "</script><script>", "say": "", "line": None, "set": {}, "mark": {}}]}
    figure = Figure(**words, summary="<u>", panels=[], columns=["<a>", "b"], rows=[["<s>", "&"]], **text)
    tree = parsed(figure)
    assert not tree.find_all(["b", "i", "u", "s", "a"]) and len(tree.find_all("script")) == 1
    assert tree.figure["aria-label"] == words["alt"] and tree.figcaption.get_text() == words["title"]
    assert json.loads(tree.script.string)["steps"] == text["steps"]


@pytest.mark.parametrize(
    "number, text",
    [
        (0, "0"), (-3, "-3"), (2.0, "2"), (1 / 3, "0.3333"), (-0.0, "0"), (np.exp(-10), "4.54·10⁻⁵"),
        (12345.678, "1.235·10⁴"), ("inf", "inf"), ("nan", "nan"), (123456, "123456"),
    ],
)  # fmt: skip
def test_numbers_are_short(number, text):
    assert number_text(number) == text


def test_last_bits_do_not_show():
    x = 0.1 + 0.2
    assert number_text(x) == number_text(np.nextafter(x, 1)) == number_text(np.nextafter(x, 0))


def test_script_is_small_and_asks_for_nothing():
    script, style = asset("stepper.js"), asset("stepper.css")
    assert 1_000 < len(script.encode()) <= 20_000
    urls = set(re.findall(r"[a-z]+://[^\s'\"]+|@import|url\(|\bfetch\b|XMLHttp", script + style))
    assert urls == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in script, "texts of a trace are texts, never markup"


def test_html_runs_nothing_until_a_reader_asks_for_it():
    html = program("dot")._repr_html_()
    assert re.findall(r"<script[^>]*>", html) == ['<script type="application/json">']
    assert not re.search(r"\son\w+=", html)
    live = program("dot").live()
    assert asset("stepper.js") in live._repr_html_() and asset("stepper.css") in live._repr_html_()
    assert html in live._repr_html_() and repr(live) == repr(program("dot"))


# ----------------------------------------------------------------------------------------------------
# Wrong arguments

MEMORY = SCHEDULES["standard"].memory


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda: show_program(7, **WORDS), TypeError, "trace must be a trace"),
        (lambda: show_program({"registers": []}, **WORDS), ValueError, "without memory, steps"),
        (lambda: show_program(Machine(1).run([], {}), **WORDS), ValueError, "trace has no step"),
        (lambda: show_program(RUNS["dot"], title="", alt="x"), ValueError, "title must say"),
        (lambda: show_program(RUNS["dot"], title="x", alt=" "), ValueError, "alt must say"),
        (lambda: show_program(RUNS["dot"], title="x", alt=None), TypeError, "alt must be a text"),
        (lambda: show_schedule([], closed_form_words=1, **WORDS), TypeError, "memory must be a trace"),
        (lambda: show_schedule({}, closed_form_words=1, **WORDS), ValueError, "without capacity_words"),
        (lambda: show_schedule(TwoLevelMemory(1), closed_form_words=1, **WORDS), RuntimeError, "trace=True"),
        (
            lambda: show_schedule(TwoLevelMemory(1, trace=True), closed_form_words=1, **WORDS),
            ValueError,
            "memory has a trace without a step",
        ),
        (lambda: show_schedule(MEMORY, closed_form_words=1.5, **WORDS), TypeError, "closed_form_words must"),
        (lambda: show_schedule(MEMORY, closed_form_words=True, **WORDS), TypeError, "closed_form_words must"),
        (lambda: show_schedule(MEMORY, closed_form_words=0, **WORDS), ValueError, "at least 1, got 0"),
        (
            lambda: show_schedule(MEMORY, closed_form_words=1, formula=2, **WORDS),
            TypeError,
            "formula must be a text",
        ),
    ],
)  # fmt: skip
def test_wrong_argument_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_trace_that_nobody_would_step_through_is_refused():
    long = Machine(1).run(assemble("LOAD x, R0\n" * (MOST_STEPS + 1)), {"x": 1})
    with pytest.raises(ValueError, match=f"{MOST_STEPS + 1} steps, expected at most {MOST_STEPS}"):
        show_program(long, **WORDS)
