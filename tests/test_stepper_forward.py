"""Two forward passes beside each other: schedules and real kernels tell the same story, and the figure it."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_stepper import WORDS, parsed, replay
from triton.runtime.interpreter import InterpreterBuilder, interpreter_builder

from flashlib import kernels, testing
from flashlib.iomodel import TwoLevelMemory, schedules
from flashlib.kernels import flash1, flash2, trace
from flashlib.kernels.trace import trace_forward
from flashlib.notebook import check
from flashlib.reference import online, standard
from flashlib.stepper import show_forward
from flashlib.stepper.forward import inner_steps
from flashlib.stepper.frame import MOST_STEPS

# Compiled kernels keep no trace; one test shows what they say.
interpreted = pytest.mark.skipif(not kernels.INTERPRETED, reason="needs Triton's interpreter")
FLOAT32 = 2**-20  # what flashlib.notebook.check allows a kernel

# (T, d, B_r, B_c): blocks that divide T, blocks that do not, and one block for all.
SHAPES = [(6, 2, 2, 2), (5, 3, 2, 4), (7, 1, 4, 2), (3, 2, 4, 4)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def inputs(shape, seed=0):
    """q, k and v [T, d] whose numbers float32 holds exactly, so that both sources compute on the same."""
    T, d, _, _ = shape
    return np.random.default_rng(seed).normal(size=(3, T, d)).astype(np.float32).astype(np.float64)


def schedule(name, shape, seed=0):
    options = {"capacity_words": 200, "B_r": shape[2], "B_c": shape[3], "trace": True}
    return getattr(schedules, name)(*inputs(shape, seed), **options).memory


def kernel(module, shape, **options):
    return trace_forward(module, *inputs(shape), B_r=shape[2], B_c=shape[3], **options)


def tiles(steps):
    return [(tuple(step["queries"]), tuple(step["keys"])) for step in steps]


def ranges(size, block):
    return [(start, min(start + block, size)) for start in range(0, size, block)]


def known(shape, queries, end, causal=False):
    """The state of a range of queries after the keys before ``end``, from the reference in float64."""
    q, k, v = (torch.from_numpy(x)[None, None] for x in inputs(shape))
    rows = slice(*queries)
    s = standard.scores(q[:, :, rows], k[:, :, :end], None)
    if causal:
        s = s.masked_fill(~standard.causal_mask(shape[0], shape[0], q.device)[rows, :end], -math.inf)
    state = online.block(s, v[:, :, :end])
    return state.m[0, 0], state.l[0, 0], state.o[0, 0]


# ----------------------------------------------------------------------------------------------------
# Traces of schedules


@each_shape
@pytest.mark.parametrize("name, outer", [("algorithm_4", "keys"), ("algorithm_3", "queries"),
                                         ("flash2_forward", "queries")])  # fmt: skip
def test_schedule_makes_every_tile_once_in_its_order(name, outer, shape):
    memory = schedule(name, shape)
    steps = inner_steps(memory)["steps"]
    T, _, B_r, B_c = shape
    expected = [(I, J) for I in ranges(T, B_r) for J in ranges(T, B_c)]
    assert tiles(steps) == sorted(expected, key=lambda tile: tile[1] if outer == "keys" else tile[0])
    assert sum(step["read_words"] for step in steps) == memory.loaded_words
    assert sum(step["written_words"] for step in steps) == memory.stored_words


@each_shape
@pytest.mark.parametrize("name, divided", [("algorithm_4", True), ("algorithm_3", True),
                                           ("flash2_forward", False)])  # fmt: skip
def test_schedule_tells_the_state_after_every_tile(name, divided, shape, capsys):
    for step in inner_steps(schedule(name, shape))["steps"]:
        m, l, o = known(shape, step["queries"], step["keys"][1])
        check("m", np.array(step["m"]), m)
        check("l", np.array(step["l"]), l)
        check("O", np.array(step["O"]), o / l[:, None] if divided else o)


def test_reads_and_writes_of_each_step_are_those_of_the_algorithm():
    def moved(name):
        steps = inner_steps(schedule(name, (4, 2, 2, 2)))["steps"]
        return [["".join(sorted(block[0] for block in step[way])) for way in ("reads", "writes")]
                for step in steps]  # fmt: skip

    assert moved("algorithm_4") == [["KQV", "Olm"], ["Q", "Olm"], ["KOQVlm", "Olm"], ["OQlm", "Olm"]]
    assert moved("flash2_forward") == [["KQV", ""], ["KV", "LO"]] * 2
    assert moved("algorithm_3") == [["KQV", ""], ["KV", "Olm"]] * 2


def test_blocks_of_reads_and_writes_are_those_of_the_tile():
    for name in ("algorithm_4", "flash2_forward"):
        for step in inner_steps(schedule(name, SHAPES[1]))["steps"]:
            for array, *rows in (*step["reads"], *step["writes"]):
                assert rows == step["keys" if array in "KV" else "queries"]


def test_memory_keeps_the_numbers_of_every_step():
    memory = TwoLevelMemory(20, trace=True)
    memory.place("A", [[1.0, 2.0], [3.0, 4.0]])
    memory.reserve("B", 1, 2)
    block = memory.load("A", slice(1, 2))
    block += 0.5
    room = memory.allocate("B")
    room[:] = [[-math.inf, math.inf]]
    memory.store(room)
    memory.free(block, room)
    steps = json.loads(json.dumps(memory.trace(), allow_nan=False))["steps"]
    told = [(step["action"], step["values"]) for step in steps]
    infinite = [["-inf", "inf"]]
    assert told == [
        ("load", [[3.0, 4.0]]), ("compute", [[3.5, 4.5]]), ("allocate", [["nan", "nan"]]),
        ("compute", infinite), ("store", infinite), ("free", None), ("free", None),
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# Traces of the real kernels


def ordered(steps):
    """The steps with the programs of a kernel in the order of their queries; of flash1 there is one."""
    programs = {}
    for step in steps:
        programs.setdefault(tuple(step["queries"]), []).append(step)
    return [step for queries in sorted(programs) for step in programs[queries]]


def assert_same_state(a, b):
    assert a["queries"] == b["queries"] and a["keys"] == b["keys"]
    for name in ("m", "l", "O"):
        check(f"{name} at {a['queries']}, {a['keys']}", np.array(a[name]), np.array(b[name]), within=FLOAT32)


@interpreted
@each_shape
def test_flash1_does_what_algorithm_4_does_step_by_step(shape, capsys):
    """With the first block of keys the kernel also reads O, m and l, which are those of no key."""
    real, simulated = kernel(flash1, shape), inner_steps(schedule("algorithm_4", shape))
    assert {**real, "steps": None} == {**simulated, "steps": None}
    for a, b in zip(real["steps"], simulated["steps"], strict=True):
        assert_same_state(a, b)
        first = [["O", *b["queries"]], ["m", *b["queries"]], ["l", *b["queries"]]]
        extra = first if b["keys"][0] == 0 else []
        assert sorted(a["reads"]) == sorted([*b["reads"], *extra])
        rows, d = b["queries"][1] - b["queries"][0], shape[1]
        assert a["read_words"] == b["read_words"] + (rows * (d + 2) if extra else 0)
        assert_same_stored(a, b)


@interpreted
@each_shape
def test_flash2_does_what_its_schedule_does_step_by_step(shape, capsys):
    real, simulated = kernel(flash2, shape), inner_steps(schedule("flash2_forward", shape))
    assert {**real, "steps": None} == {**simulated, "steps": None}
    # A program owns a block of queries, and the last one starts first.
    assert tiles(real["steps"])[0][0] == ranges(shape[0], shape[2])[-1]
    for a, b in zip(ordered(real["steps"]), simulated["steps"], strict=True):
        assert_same_state(a, b)
        assert sorted(a["reads"]) == sorted(b["reads"]) and a["read_words"] == b["read_words"]
        assert_same_stored(a, b)


def assert_same_stored(a, b):
    assert sorted(a["writes"]) == sorted(b["writes"]) and a["written_words"] == b["written_words"]
    stored = [
        {tuple(block): rows for block, rows in zip(s["writes"], s["stored"], strict=True)} for s in (a, b)
    ]
    for block, rows in stored[0].items():
        check(f"stored {block}", np.array(rows), np.array(stored[1][block]), within=FLOAT32)


@interpreted
@pytest.mark.parametrize("module", [flash1, flash2], ids=["flash1", "flash2"])
@each_shape
def test_causal_kernel_makes_the_tiles_that_hold_a_visible_score(module, shape, capsys):
    T, _, B_r, B_c = shape
    steps = kernel(module, shape, causal=True)["steps"]
    visible = [(I, J) for I in ranges(T, B_r) for J in ranges(T, B_c) if J[0] < I[1]]
    assert sorted(tiles(steps)) == visible
    for step in steps:
        m, l, o = known(shape, step["queries"], step["keys"][1], causal=True)
        check("m", np.array(step["m"]), m, within=FLOAT32)
        check("l", np.array(step["l"]), l, within=FLOAT32)
        check("O", np.array(step["O"]), o if module is flash2 else o / l[:, None], within=FLOAT32)


@interpreted
@pytest.mark.parametrize("causal", [False, True])
def test_traced_kernel_computes_what_it_computes_untraced(causal):
    """More keys than queries, values narrower than keys, a scale; O and L are within their budgets."""
    q, k, v = testing.make_qkv(1, 1, 5, 3, T_k=8, d_v=2)
    options = {"B_r": 2, "B_c": 4, "causal": causal, "scale": 0.7}
    for module in (flash1, flash2):
        traced = trace_forward(module, q[0, 0], k[0, 0], v[0, 0], **options)
        assert [traced[size] for size in ("T_q", "T_k", "d", "d_v")] == [5, 8, 3, 2]
        o, lse = torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5)
        for step in traced["steps"]:
            final = dict(zip((block[0] for block in step["writes"]), step["stored"], strict=True))
            rows = slice(*step["queries"])
            if final:
                o[0, 0, rows] = torch.tensor(final["O"])
                m, l = torch.tensor(step["m"]), torch.tensor(step["l"])
                lse[0, 0, rows] = torch.tensor(final["L"])[:, 0] if "L" in final else m + torch.log(l)
        testing.assert_within_budget(q, k, v, o, lse, causal=causal, scale=0.7)


@interpreted
def test_trace_of_a_wrong_kernel_differs_where_it_goes_wrong(capsys):
    wrong = next(w for w in testing.WRONG_KERNELS if w.step == "flash1" and "rescal" in w.name)
    with testing.wrong_module(wrong) as module:
        steps = kernel(module, SHAPES[0])["steps"]
    simulated = inner_steps(schedule("algorithm_4", SHAPES[0]))["steps"]
    for a, b in zip(steps[:3], simulated[:3], strict=True):  # nothing to rescale yet
        assert_same_state(a, b)
    with pytest.raises(AssertionError, match=r"O at \[0, 2\], \[2, 4\]|l at \[0, 2\], \[2, 4\]"):
        assert_same_state(steps[3], simulated[3])


@interpreted
def test_tracing_leaves_no_trace():
    before = flash1.attend, flash2.attend
    kernel(flash1, SHAPES[0])
    broken = SimpleNamespace(attend=flash2.attend, launch=lambda q, k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kernel(broken, SHAPES[0])
    assert (flash1.attend, flash2.attend, broken.attend) == (*before, before[1])
    for name in ("create_masked_load", "create_masked_store"):
        assert name not in vars(interpreter_builder)
        assert getattr(interpreter_builder, name).__func__ is getattr(InterpreterBuilder, name)


@interpreted
def test_inputs_of_a_traced_kernel_stay_as_they_are():
    arrays = inputs(SHAPES[0])
    before = arrays.copy()
    first = trace_forward(flash1, *arrays, B_r=2, B_c=2)
    assert (arrays == before).all()
    tensors = [torch.from_numpy(x.T.copy()).T for x in arrays]  # other strides, the same numbers
    assert trace_forward(flash1, *tensors, B_r=2, B_c=2) == first
    assert json.loads(json.dumps(first, allow_nan=False)) == first


def test_compiled_kernel_keeps_no_trace(monkeypatch):
    monkeypatch.setattr(trace, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match=r"needs Triton's interpreter.*TRITON_INTERPRET=1"):
        kernel(flash2, SHAPES[0])


@interpreted
def test_kernel_that_touches_other_memory_is_refused():
    def launch(q, k, v, o, lse, causal, scale, config):
        flash2.launch(q, k.clone(), v, o, lse, causal, scale, config)

    with pytest.raises(RuntimeError, match="touches memory that is none of its arrays"):
        kernel(SimpleNamespace(attend=flash2.attend, launch=launch), SHAPES[0])


@interpreted
def test_kernel_that_never_attends_is_refused():
    launch = flash2.launch
    with pytest.raises(RuntimeError, match="ends without a step of its inner loop"):
        kernel(SimpleNamespace(attend=flash2.attend, launch=launch), SHAPES[0])


M = np.ones((4, 2))


@interpreted
@pytest.mark.parametrize(
    "change, error, says",
    [
        ({"kernel": 7}, TypeError, "kernel must be a module with attend and launch"),
        ({"kernel": SimpleNamespace(attend=len, launch=lambda warp: 0)}, TypeError, "takes no warp"),
        ({"q": [[1.0]]}, TypeError, "q must be a tensor or an array, got list"),
        ({"k": np.ones(4)}, ValueError, "k must be a real matrix"),
        ({"v": np.ones((0, 2))}, ValueError, "v must be a real matrix that is not empty"),
        ({"q": M * 1j}, ValueError, "q must be a real matrix"),
        ({"k": np.ones((4, 3))}, ValueError, "k must have 2 columns, as q has, got 3"),
        ({"v": np.ones((5, 2))}, ValueError, "v must have 4 rows, as k has, got 5"),
        ({"B_r": 3}, ValueError, "B_r must be a power of two, got 3"),
        ({"B_c": 0}, ValueError, "B_c must be a power of two, got 0"),
        ({"B_c": 2.0}, TypeError, "B_c must be an integer"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"q": np.ones((5, 2)), "causal": True}, ValueError, "q must have no more rows than k"),
        ({"scale": -1.0}, ValueError, "scale must be finite and at least 0"),
        ({"scale": math.nan}, ValueError, "scale must be finite"),
    ],
)
def test_wrong_argument_of_the_tracer_is_named(change, error, says):
    arguments = {"kernel": flash2, "q": M, "k": M, "v": M, "B_r": 2, "B_c": 2} | change
    with pytest.raises(error, match=says):
        trace_forward(**arguments)


# ----------------------------------------------------------------------------------------------------
# The figure


def short(number):
    return f"{number:z.3f}"


def figure(shape=SHAPES[0], first="algorithm_4", second="flash2_forward"):
    return show_forward(schedule(first, shape), schedule(second, shape), **WORDS)


def cells(panel, items):
    """{(query, column): text} of a state table."""
    columns = panel["columns"][1:]
    return {divmod_to(int(item), columns): text for item, text in items.items() if item}


def divmod_to(item, columns):
    query, place = divmod(item, len(columns))
    return query, columns[place]


@each_shape
def test_figure_retells_both_traces(shape):
    frames = list(replay(figure(shape)))
    sides = [inner_steps(schedule(name, shape))["steps"] for name in ("algorithm_4", "flash2_forward")]
    assert len(frames) == len(sides[0]) + 1
    for side, steps in enumerate(sides):
        made, read, written, state = set(), 0, 0, {}
        for (data, shown, panels), step in zip(frames[1:], steps, strict=True):
            picture, bar, table = panels[side], panels[side + 2], panels[side + 4]
            queries, keys = (f"{a}:{b}" for a, b in (step["queries"], step["keys"]))
            tile = f"S[{queries}, {keys}]"
            made.add(f"past {tile}")
            assert {item for item in picture if item.startswith("past")} == made
            marks = shown["mark"][str(side)]
            ways = {way: {f"{n}[{a}:{b}]" for n, a, b in step[way]} for way in ("reads", "writes")}
            assert [item for item, mark in marks.items() if mark == "pair"] == [tile]
            assert {item for item, mark in marks.items() if mark in ("read", "both")} == ways["reads"]
            assert {item for item, mark in marks.items() if mark in ("written", "both")} == ways["writes"]
            assert set(marks) == {item for item in picture if item and not item.startswith("past")}
            read, written = read + step["read_words"], written + step["written_words"]
            assert bar[""] == f"{read} read + {written} written = {read + written} words"
            assert bar["read"][0] == read and bar.get("written", [0])[0] == written
            ends = "L" in {block[0] for block in step["writes"]}
            stored = dict(zip((block[0] for block in step["writes"]), step["stored"], strict=True))
            output = stored.get("O", step["O"])
            for row, query in enumerate(range(*step["queries"])):
                state |= {(query, f"O{'₀₁₂'[c]}"): short(x) for c, x in enumerate(output[row])}
                for name in ("m", "l"):
                    state[query, name] = short(step[name][row])
                    if ends:
                        del state[query, name]
                if ends:
                    state[query, "L"] = short(step["m"][row] + math.log(step["l"][row]))
            assert cells(data["panels"][side + 4], table) == state
            name = ("FlashAttention", "FlashAttention-2")[side]
            assert f"{name} takes queries {queries} with keys {keys}. " in shown["say"]


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_figure_ends_with_the_reference(shape):
    q, k, v = (torch.from_numpy(x)[None, None] for x in inputs(shape))
    o, lse = standard.attention(q, k, v)
    shown = figure(shape)
    data, _, panels = list(replay(shown))[-1]
    for side in (4, 5):
        state = cells(data["panels"][side], panels[side])
        for query in range(shape[0]):
            for column in range(shape[1]):
                assert state[query, f"O{'₀₁₂'[column]}"] == short(o[0, 0, query, column].item())
            if side == 5:
                assert state[query, "L"] == short(lse[0, 0, query].item())
    assert shown.summary.endswith("both end with the same O")


def test_tile_lies_where_its_queries_and_keys_are():
    """Q beside the rows of S, K and V above its columns."""
    shown = figure()
    for side, panel in enumerate(shown.data["panels"][:2]):
        places = {name or "S": place for name, *place, _, _ in panel["parts"]}
        for step in shown.data["steps"][1:]:
            items = {item: place for item, place in step["set"][side].items() if place}
            drawn = {item[0]: place for item, place in items.items() if item[1:2] == "["}
            if {"S", "Q", "K"} <= set(drawn):
                assert drawn["S"][:2] == drawn["Q"][:2] and drawn["S"][2:4] == drawn["K"][2:4]
            for name, (top, bottom, left, right, layer, _) in drawn.items():
                y, x, rows, columns = places[name]
                assert layer == "in" and y <= top < bottom <= y + rows and x <= left < right <= x + columns


def test_names_orders_and_divisions_are_told():
    panels = figure().data["panels"]
    assert [panel["title"] for panel in panels[:2]] == [
        "FlashAttention: keys outside", "FlashAttention-2: queries outside",
    ]  # fmt: skip
    assert panels[4]["columns"] == ["i", "m", "l", "O₀", "O₁"]
    assert panels[5]["columns"] == ["i", "m", "l", "O₀", "O₁", "L"]
    assert panels[2]["max"] == panels[3]["max"] == 180, "words are drawn to one scale"
    _, _, start = next(replay(figure()))
    assert start[4][""] == "O is divided by l at every step."
    assert start[5][""] == "O is divided by l in the last step of its queries."
    other = figure(first="algorithm_3").data
    assert other["panels"][0]["title"] == "FlashAttention: queries outside"
    assert other["steps"][0]["set"][4][""] == "O is divided by l at every step."
    moves = [{name: moves for name, *_, moves, _ in panel["parts"]} for panel in panels[:2]]
    assert moves[0] == {"Q": True, "K": True, "V": True, "": False, "O": True, "m": True, "l": True}
    assert moves[1] == moves[0] | {"m": False, "l": False, "L": True}


def test_sentences_tell_the_factors():
    said = [step["say"].split("\n") for step in figure().data["steps"][1:]]
    side = inner_steps(schedule("flash2_forward", SHAPES[0]))["steps"]
    assert said[0][1].endswith("Their m, l and O begin.")
    factors = [math.exp(a - b) for a, b in zip(side[0]["m"], side[1]["m"], strict=True)]
    assert max(factors) < 1.0, "the example should raise both maxima"
    assert said[1][1].endswith(
        f"New maximum: earlier sums times {short(factors[0])} and {short(factors[1])}."
    )
    assert said[2][1].endswith("No new maximum. Divides O by l, stores O and L.")
    assert said[2][0].endswith("Their m, l and O begin. Divides O by l, stores m, l and O.")
    mixed = [line for lines in said for line in lines if "times 1 and" in line]
    assert mixed, "a query whose maximum stays counts once"


def test_many_factors_are_a_range():
    shape = (12, 1, 6, 6)
    said = "".join(step["say"] for step in figure(shape).data["steps"])
    assert " to 1. " in said and "earlier sums times 0." in said


def test_table_is_the_trace():
    shown = figure()
    table = parsed(shown).find("figure").find("details").find("table")
    rows = [[cell.get_text() for cell in row.find_all(["th", "td"])] for row in table.tbody.find_all("tr")]
    assert rows == shown.rows and len(rows) == 9
    assert shown.rows[3][:4] == ["4", "queries 0:2, keys 2:4", "K, V, Q, m, l, O; m, l, O", "72"]
    assert shown.rows[2][4:7] == ["queries 0:2, keys 4:6", "K, V; O, L", "34"]
    step = inner_steps(schedule("flash2_forward", SHAPES[0]))["steps"][2]
    output = step["stored"][0]
    texts = [[*map(short, row)] for row in (step["m"], step["l"], *output)]
    m, l, *outputs = (", ".join(row) for row in texts)
    assert shown.rows[2][8].startswith(f"m {m}; l {l}; O ({outputs[0]}), ({outputs[1]}); L ")


def test_sides_of_different_length_wait_for_each_other():
    memories = schedule("algorithm_4", (6, 2, 2, 2)), schedule("flash2_forward", (6, 2, 3, 3))
    shown = show_forward(*memories, names=("small tiles", "large tiles"), **WORDS)
    assert len(shown.rows) == 9
    assert shown.rows[4][4:7] == [""] * 3 and shown.rows[4][8] == ""
    assert shown.rows[8][1] == "queries 4:6, keys 4:6" and shown.rows[8][7]
    frames = list(replay(shown))
    assert "large tiles has ended." in frames[5][1]["say"]
    assert frames[4][2][5] == frames[9][2][5] and frames[4][2][3] == frames[9][2][3]
    assert {item for item in frames[9][2][1] if not item.startswith("past")} == {""}


@interpreted
def test_kernels_and_schedules_go_together():
    shape = SHAPES[0]
    real, simulated = kernel(flash2, shape), schedule("flash2_forward", shape)
    shown = show_forward(real, simulated.trace(), names=("kernel", "schedule"), **WORDS)
    both = shown.summary.replace("kernel", "schedule").split("; ")
    assert both[0] == both[1], "the same words"
    assert show_forward(kernel(flash1, shape), real, **WORDS).rows[0][2] == "K, V, Q, O, m, l; O, m, l"
    causal = show_forward(*(kernel(module, shape, causal=True) for module in (flash1, flash2)), **WORDS)
    assert len(causal.rows) == 6 and causal.rows[5][4] == "queries 0:2, keys 0:2", "the longest block first"


def test_figure_is_the_same_every_time():
    assert figure()._repr_html_() == figure()._repr_html_()


RUNS = {name: schedule(name, SHAPES[0]) for name in ("algorithm_4", "flash2_forward")}
A, B = RUNS.values()
STANDARD = schedules.standard_forward(*inputs(SHAPES[0]), capacity_words=99, B_r=2, B_c=2, trace=True).memory
LONG = schedules.algorithm_4(*np.ones((3, 21, 1)), capacity_words=99, B_r=1, B_c=1, trace=True).memory
EMPTY = {"T_q": 1, "T_k": 1, "d": 1, "d_v": 1, "steps": []}


def unwritten():
    told = inner_steps(B)
    for key in ("writes", "stored"):
        told["steps"][-1][key] = []
    return told


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda: show_forward(7, B, **WORDS), TypeError, "first must be a trace"),
        (lambda: show_forward(A, {}, **WORDS), ValueError, "second must be a trace with T_q"),
        (lambda: show_forward(A, EMPTY, **WORDS), ValueError, "second has no step"),
        (lambda: show_forward(TwoLevelMemory(1), B, **WORDS), RuntimeError, "trace=True"),
        (lambda: show_forward(STANDARD, B, **WORDS), ValueError, "first must tell m after each tile"),
        (
            lambda: show_forward(A, TwoLevelMemory(1, trace=True), **WORDS),
            ValueError,
            "second, in its arrays, must be a trace with Q, K, V, S, O",
        ),
        (lambda: show_forward(A, unwritten(), **WORDS), ValueError, "second must write every row of O"),
        (
            lambda: show_forward(A, schedule("flash2_forward", (5, 2, 2, 2)), **WORDS),
            ValueError,
            "passes of one problem, got T_q = 6 and 5",
        ),
        (
            lambda: show_forward(A, schedule("flash2_forward", SHAPES[0], seed=1), **WORDS),
            ValueError,
            "passes of one problem, got outputs that differ",
        ),
        (lambda: show_forward(A, B, names="ab", **WORDS), TypeError, "names must be two texts"),
        (lambda: show_forward(A, B, names=("a", 1), **WORDS), TypeError, "names must be two texts"),
        (lambda: show_forward(A, B, names=("a", "a"), **WORDS), ValueError, "two different texts"),
        (lambda: show_forward(A, B, names=("a", " "), **WORDS), ValueError, "not empty"),
        (lambda: show_forward(A, B, title="", alt="x"), ValueError, "title must say"),
        (lambda: show_forward(LONG, LONG, **WORDS), ValueError, f"441 steps, expected at most {MOST_STEPS}"),
        (lambda: inner_steps(3), TypeError, "memory must be a trace"),
        (lambda: inner_steps({"arrays": {}}), ValueError, "without steps"),
    ],
)
def test_wrong_argument_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()
