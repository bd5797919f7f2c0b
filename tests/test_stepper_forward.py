"""Two forward passes side by side: schedules, kernels and figure agree."""

import math

import numpy as np
import pytest
import torch
from kernel_trace import trace_forward
from stepper_figures import FLASH, WORDS, inputs, replay, schedule

from flashlib import kernels
from flashlib.iomodel.standard import standard_forward
from flashlib.kernels import flash1, flash2
from flashlib.notebook import check
from flashlib.reference import online, standard
from flashlib.stepper import show_forward
from flashlib.stepper.forward import inner_steps

# Compiled kernels keep no trace.
interpreted = pytest.mark.skipif(
    not kernels.INTERPRETED, reason="needs Triton's interpreter"
)
FLOAT32 = 2**-20  # what flashlib.notebook.check allows a kernel

# (T, d, B_r, B_c): blocks that divide T, blocks that do not, and one block for all.
SHAPES = [(6, 2, 2, 2), (5, 3, 2, 4), (3, 2, 4, 4)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
STATE = ("m", "l", "O")


def kernel(module, shape, **options):
    return trace_forward(module, *inputs(shape), B_r=shape[2], B_c=shape[3], **options)


def tiles(steps):
    return [(tuple(step["queries"]), tuple(step["keys"])) for step in steps]


def ranges(size, block):
    return [(start, min(start + block, size)) for start in range(0, size, block)]


def assert_known(step, shape, divided, causal=False, within=2**-40):
    """A step's m, l and O are those of the reference after its keys, in float64."""
    q, k, v = (torch.from_numpy(x)[None, None] for x in inputs(shape))
    rows, end = slice(*step["queries"]), step["keys"][1]
    s = standard.scores(q[:, :, rows], k[:, :, :end], None)
    if causal:
        mask = standard.causal_mask(shape[0], shape[0], q.device)[rows, :end]
        s = s.masked_fill(~mask, -math.inf)
    state = online.block(s, v[:, :, :end])
    m, l, o = state.m[0, 0], state.l[0, 0], state.o[0, 0]
    state = m, l, o / l[:, None] if divided else o
    for name, value in zip(STATE, state, strict=True):
        check(name, np.array(step[name]), value, within=within)


# -- Traces of schedules


@each_shape
@pytest.mark.parametrize("name", FLASH)
def test_schedule_visits_every_tile_once_and_keeps_its_state(name, shape, capsys):
    memory = schedule(name, shape)
    steps = inner_steps(memory)["steps"]
    T, _, B_r, B_c = shape
    expected = [(I, J) for I in ranges(T, B_r) for J in ranges(T, B_c)]
    keys_outside = name == "algorithm_4"
    assert tiles(steps) == sorted(expected, key=lambda tile: tile[keys_outside])
    assert sum(step["read_words"] for step in steps) == memory.loaded_words
    assert sum(step["written_words"] for step in steps) == memory.stored_words
    for step in steps:
        assert_known(step, shape, divided=name != "flash2_forward")


# -- Traces of the real kernels


def ordered(steps):
    """The steps of a kernel with its programs in the order of their queries."""
    programs = {}
    for step in steps:
        programs.setdefault(tuple(step["queries"]), []).append(step)
    return [step for queries in sorted(programs) for step in programs[queries]]


def assert_same_step(a, b, extra=()):
    """Two steps agree, except for blocks that the first reads in addition."""
    assert tiles([a]) == tiles([b])
    for name in STATE:
        where = f"{name} at {a['queries']}, {a['keys']}"
        check(where, np.array(a[name]), np.array(b[name]), within=FLOAT32)
    assert sorted(a["reads"]) == sorted([*b["reads"], *extra])
    assert sorted(a["writes"]) == sorted(b["writes"])
    assert a["written_words"] == b["written_words"]
    names = [[name for name, *_ in x["writes"]] for x in (a, b)]
    second = dict(zip(names[1], b["stored"], strict=True))
    for name, rows in zip(names[0], a["stored"], strict=True):
        check(name, np.array(rows), np.array(second[name]), within=FLOAT32)


@interpreted
@each_shape
def test_flash1_follows_algorithm_4_step_by_step(shape, capsys):
    """With the first block of keys the kernel also reads the initial O, m and l."""
    real, simulated = kernel(flash1, shape), inner_steps(schedule("algorithm_4", shape))
    assert {**real, "steps": None} == {**simulated, "steps": None}
    for a, b in zip(real["steps"], simulated["steps"], strict=True):
        (begin, end), (key, _) = b["queries"], b["keys"]
        initial = [] if key else [[name, begin, end] for name in ("O", "m", "l")]
        assert_same_step(a, b, extra=initial)
        more = 0 if key else (end - begin) * (shape[1] + 2)
        assert a["read_words"] == b["read_words"] + more


@interpreted
@each_shape
def test_flash2_follows_its_schedule_step_by_step(shape, capsys):
    real = kernel(flash2, shape)
    simulated = inner_steps(schedule("flash2_forward", shape))
    assert {**real, "steps": None} == {**simulated, "steps": None}
    # A program owns a block of queries, and the last one starts first.
    assert tiles(real["steps"])[0][0] == ranges(shape[0], shape[2])[-1]
    for a, b in zip(ordered(real["steps"]), simulated["steps"], strict=True):
        assert_same_step(a, b)
        assert a["read_words"] == b["read_words"]


@interpreted
@pytest.mark.parametrize("module", [flash1, flash2], ids=["flash1", "flash2"])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_causal_kernel_visits_the_tiles_with_a_visible_score(module, shape, capsys):
    T, _, B_r, B_c = shape
    steps = kernel(module, shape, causal=True)["steps"]
    visible = [(I, J) for I in ranges(T, B_r) for J in ranges(T, B_c) if J[0] < I[1]]
    assert sorted(tiles(steps)) == visible
    for step in steps:
        assert_known(step, shape, module is flash1, causal=True, within=FLOAT32)


# -- The figure


def short(number):
    return f"{number:z.3f}"


def figure(shape=SHAPES[0], first="algorithm_4", second="flash2_forward"):
    return show_forward(schedule(first, shape), schedule(second, shape), **WORDS)


def cells(panel, items):
    """{(query, column): text} of a state table."""
    columns = panel["columns"][1:]
    return {
        (int(item) // len(columns), columns[int(item) % len(columns)]): text
        for item, text in items.items()
        if item
    }


@each_shape
def test_figure_follows_both_traces(shape):
    shown = figure(shape)
    frames = list(replay(shown))
    for side, name in enumerate(("algorithm_4", "flash2_forward")):
        steps = inner_steps(schedule(name, shape))["steps"]
        made, words, state = set(), {"reads": 0, "writes": 0}, {}
        for (data, one, panels), step in zip(frames[1:], steps, strict=True):
            picture, bar, table = panels[side], panels[side + 2], panels[side + 4]
            queries, keys = (f"{a}:{b}" for a, b in (step["queries"], step["keys"]))
            tile = f"S[{queries}, {keys}]"
            made.add(f"past {tile}")
            assert {item for item in picture if item.startswith("past")} == made
            marks = one["mark"][str(side)]
            assert [item for item, mark in marks.items() if mark == "pair"] == [tile]
            for way, kinds in (("reads", "read both"), ("writes", "written both")):
                found = {x for x, mark in marks.items() if mark in kinds.split()}
                assert found == {f"{n}[{a}:{b}]" for n, a, b in step[way]}
                words[way] += step["read_words" if way == "reads" else "written_words"]
            read, written = words.values()
            said = f"{read} read + {written} written = {read + written} words"
            assert bar[""] == said
            names = [block[0] for block in step["writes"]]
            output = dict(zip(names, step["stored"], strict=True)).get("O", step["O"])
            for row, query in enumerate(range(*step["queries"])):
                for column, x in enumerate(output[row]):
                    state[query, f"O{'₀₁₂'[column]}"] = short(x)
                state[query, "m"] = short(step["m"][row])
                state[query, "l"] = short(step["l"][row])
                if "L" in names:  # it replaces m and l
                    del state[query, "m"], state[query, "l"]
                    state[query, "L"] = short(step["m"][row] + math.log(step["l"][row]))
            assert cells(data["panels"][side + 4], table) == state
    assert shown.summary.endswith("both end with the same O")


def test_what_no_figure_of_the_book_shows():
    """nbval compares the figures of the book, also those of standard attention."""
    assert figure(first="algorithm_3").panels[0]["title"].endswith("queries outside")
    many = "".join(step["say"] for step in figure((12, 1, 6, 6)).steps)
    assert " to 1. " in many and "earlier sums are multiplied by 0." in many


# -- Standard attention next to flash


def standard_tiles(shape):
    """The steps of standard attention: what they store or sum, queries, keys."""
    T, _, B_r, B_c = shape
    tiles = [(I, J) for I in ranges(T, B_r) for J in ranges(T, B_c)]
    rows = [((i, i + 1), (0, T)) for i in range(T)]
    return [(kind, *x) for kind, xs in (("S", tiles), ("P", rows), ("O", tiles))
            for x in xs]  # fmt: skip


# Also more numbers a row than rows.
@pytest.mark.parametrize("shape", [*SHAPES, (5, 4, 2, 3), (2, 4, 1, 2)], ids=str)
def test_standard_steps_are_its_three_passes(shape, capsys):
    T, d, B_r, _ = shape
    q, k, v = inputs(shape)
    S = q @ k.T / math.sqrt(d)
    P = np.exp(S - S.max(1, keepdims=True))
    P /= P.sum(1, keepdims=True)
    steps = inner_steps(schedule("standard_forward", shape))["steps"]
    found = words = 0
    for one, (kind, I, J) in zip(steps, standard_tiles(shape), strict=True):
        assert (tuple(one["queries"]), tuple(one["keys"])) == (I, J)
        rows, columns = slice(*I), slice(*J)
        reads = {"S": "QK" if J[0] == 0 else "K", "P": "S", "O": "PV"}[kind]
        writes = kind if kind != "O" or J[1] == T else ""
        for way, names in (("reads", reads), ("writes", writes)):
            blocks = [[x, *(J if x in "KV" else I)] for x in names]
            assert sorted(one[way]) == sorted(blocks)
        found += one["read_words"] + one["written_words"]
        B, N = I[1] - I[0], J[1] - J[0]
        moved = {"Q": B * d, "K": N * d, "S": B * N, "P": B * N, "V": N * d, "O": B * d}
        words += sum(moved[name] for name in reads + writes)
        assert found == words
        assert "m" not in one and "l" not in one and ("O" in one) == (kind == "O")
        wanted = {"S": S[rows, columns], "P": P[rows], "O": P[rows] @ v}[kind]
        for stored in one["stored"]:
            check(f"stored {kind}", np.array(stored), wanted, within=2**-40)
        if kind == "O":  # the sum over the keys so far
            sums = P[rows, : J[1]] @ v[: J[1]]
            check("O", np.array(one["O"]), sums, within=2**-40)
    assert found == standard_forward.words(T, d, min(B_r, T))


# -- What is refused, and sides of different lengths


def test_the_shorter_side_stops_at_its_end():
    small, large = (6, 2, 2, 2), (6, 2, 3, 3)
    sides = schedule("algorithm_4", small), schedule("flash2_forward", large)
    shown = show_forward(*sides, names=("small tiles", "large tiles"), **WORDS)
    assert len(shown.rows) == 9
    assert shown.rows[4][4:7] == [""] * 3 and shown.rows[4][8] == ""
    assert shown.rows[8][1] == "queries 4:6, keys 4:6" and shown.rows[8][7]
    frames = list(replay(shown))
    assert "large tiles is done." in frames[5][1]["say"]
    before, after = frames[4][2], frames[9][2]
    assert before[5] == after[5] and before[3] == after[3]
    assert {item for item in after[1] if not item.startswith("past")} == {""}


A, B = (schedule(name, SHAPES[0]) for name in ("algorithm_4", "flash2_forward"))
OTHER_SIZE = schedule("flash2_forward", (5, 2, 2, 2))
OTHER_NUMBERS = schedule("flash2_forward", SHAPES[0], seed=1)
NO_M = A.trace()
NO_M["steps"] = [event for event in NO_M["steps"] if event["block"][0] != "m"]
NO_Q = {"arrays": {}, "steps": [1]}
UNWRITTEN = inner_steps(B)
UNWRITTEN["steps"][-1] |= {"writes": [], "stored": []}


@pytest.mark.parametrize(
    "first, second, names, error, says",
    [
        (7, B, "ab", TypeError, "first: expected a trace"),
        (A, {}, "ab", ValueError, "second: expected a trace with T_q"),
        (NO_M, B, "ab", ValueError, "first: expected m after each tile"),
        (NO_Q, B, "ab", ValueError, "first: arrays: .* Q, K, V"),
        (A, UNWRITTEN, "ab", ValueError, "second: expected every row of O"),
        (A, OTHER_SIZE, "ab", ValueError, "one problem, got T_q = 6 and 5"),
        (A, OTHER_NUMBERS, "ab", ValueError, "one problem, got outputs that differ"),
        (A, B, ("a", 1), TypeError, "names: expected a text"),
        (A, B, ("a", "a"), ValueError, "names: expected two different texts"),
    ],
)
def test_refusals(first, second, names, error, says):
    with pytest.raises(error, match=says):
        show_forward(first, second, names=names, **WORDS)
