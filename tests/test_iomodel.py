"""The two-level memory counts, the schedules compute attention, the closed forms are their counts."""

import ast
import inspect
import itertools
import json
import math
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from cases import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlib.iomodel import CapacityExceeded, TwoLevelMemory, formulas, schedules
from flashlib.reference import gradients, standard

PLENTY = 10**7


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def as_torch(x):
    return torch.from_numpy(np.asarray(x))[None, None]


def reference(T, d, scale=None):
    """Inputs and every result, by the float64 reference: a dict of arrays."""
    scale = d**-0.5 if scale is None else scale
    x = {name: random(T, d, seed=i) for i, name in enumerate(("Q", "K", "V", "dO"))}
    q, k, v, do = (as_torch(x[name]) for name in ("Q", "K", "V", "dO"))
    s = standard.scores(q, k, scale)
    p = standard.softmax(s)
    o = standard.output(p, v)
    dp = gradients.d_probabilities(do, v)
    delta = gradients.row_dot(do, o)
    dq, dk, dv = gradients.gradients(q, k, v, do, scale=scale)
    m = s.amax(-1, keepdim=True)
    made = {
        "S": s,
        "P": p,
        "O": o,
        "dP": dp,
        "dS": gradients.d_scores(p, dp, delta),
        "dQ": dq,
        "dK": dk,
        "dV": dv,
        "m": m,
        "l": torch.exp(s - m).sum(-1, keepdim=True),
        "L": standard.logsumexp(s)[..., None],
    }
    return {
        **x,
        **{name: value[0, 0].numpy() for name, value in made.items()},
        "D": delta[0, 0, :, None].numpy(),
    }


# ------------------------------------------------------------------------------------------------------------
# The memory


def test_words_are_counted_each_way_and_for_each_array():
    memory = TwoLevelMemory(20)
    memory.place("A", np.arange(12.0).reshape(4, 3))
    memory.reserve("C", 4, 3)
    a = memory.load("A", slice(1, 3))
    c = memory.allocate("C", slice(1, 3), slice(0, 2))
    c[:] = a[:, :2] + 1
    memory.store(c)
    c += 1.0
    memory.store(c)
    assert (memory.loaded_words, memory.stored_words, memory.moved_words) == (6, 8, 14)
    assert memory.by_array == {"A": (6, 0), "C": (0, 8)}
    assert (memory.resident_words, memory.free_words, memory.peak_words) == (10, 10, 10)
    memory.free(a)
    assert (memory.resident_words, memory.peak_words) == (4, 10)
    assert memory.resident() == (c,)
    memory.free(c)
    result = memory.array("C")
    assert np.array_equal(result[1:3, :2], [[5, 6], [8, 9]]) and np.isnan(result).sum() == 8


def test_one_word_too_many_raises_and_says_so():
    memory = TwoLevelMemory(8)
    memory.place("A", np.zeros((3, 3)))
    memory.allocate("S", slice(0, 4), slice(0, 1))
    memory.load("A", slice(0, 1))
    with pytest.raises(CapacityExceeded) as caught:
        memory.allocate("S", slice(4, 5), slice(0, 2))
    assert caught.value.excess_words == 1
    assert str(caught.value) == (
        "allocate S[4:5, 0:2] asks for 2 words: 7 of 8 are held and 1 free, 1 too few"
    )
    with pytest.raises(CapacityExceeded, match=r"load A\[1:3, 0:3\] asks for 6 words: 7 of 8 .* 5 too few"):
        memory.load("A", slice(1, 3))
    assert (memory.resident_words, memory.loaded_words) == (7, 3)  # a refused block counts nothing
    memory.allocate("S", slice(4, 5), slice(0, 1))
    assert memory.free_words == 0


def test_what_is_not_resident_is_nan_or_raises():
    memory = TwoLevelMemory(100)
    memory.place("A", np.ones((2, 2)))
    memory.reserve("C", 2, 2)
    fresh = memory.allocate("S", slice(0, 2), slice(0, 2))
    assert np.isnan(fresh[:]).all(), "allocated is not written"
    unstored = memory.load("C")
    assert np.isnan(unstored[:]).all(), "reserved is not stored"
    a = memory.load("A")
    view = a[:]
    memory.free(a)
    assert np.isnan(view).all(), "a view kept from a freed block"
    for use in (
        lambda: a + 1, lambda: a @ np.ones((2, 1)), lambda: np.exp(a), lambda: a[0], lambda: a.T,
        lambda: a.__setitem__(0, 1.0), lambda: memory.store(a), lambda: memory.free(a),
        lambda: memory.reuse(a, "P"), lambda: np.add.reduce(a),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"A\[0:2, 0:2\] is not in fast memory"):
            use()
    with pytest.raises(RuntimeError, match="not in fast memory"):
        TwoLevelMemory(10).store(fresh)  # another memory's block
    with pytest.raises(TypeError, match="expected a Block"):
        memory.store(np.ones((2, 2)))


def test_overwriting_moves_nothing_and_kills_the_old_handle():
    memory = TwoLevelMemory(4)
    memory.place("S", [[1.0, 2.0], [3.0, 4.0]])
    memory.reserve("P", 2, 2)
    s = memory.load("S")
    p = memory.reuse(s, "P")
    memory.store(p)
    assert (memory.loaded_words, memory.stored_words, memory.peak_words) == (4, 4, 4)
    with pytest.raises(RuntimeError, match="not in fast memory"):
        s[:] = 0.0
    memory.reserve("small", 1, 2)
    with pytest.raises(ValueError, match="rows must be a non-empty range inside 0:1"):
        memory.reuse(p, "small")


def test_nothing_is_read_past_the_counter():
    memory = TwoLevelMemory(10)
    memory.place("A", np.ones((2, 2)))
    a = memory.load("A")
    with pytest.raises(RuntimeError, match="fast memory still holds"):
        memory.array("A")
    memory.free(a)
    memory.array("A")
    with pytest.raises(RuntimeError, match="the schedule is over"):
        memory.load("A")


def test_bad_arguments_are_named():
    for capacity, error in ((0, ValueError), (2.5, TypeError), (True, TypeError), ("4", TypeError)):
        with pytest.raises(error, match="capacity_words must be"):
            TwoLevelMemory(capacity)
    memory = TwoLevelMemory(100)
    memory.place("A", np.ones((2, 3)))
    with pytest.raises(ValueError, match="already has an array 'A'"):
        memory.reserve("A", 1, 1)
    with pytest.raises(TypeError, match="name of an array"):
        memory.reserve(3, 1, 1)
    for array in (np.ones(3), np.ones((0, 2))):
        with pytest.raises(ValueError, match="two dimensions and not be empty"):
            memory.place("x", array)
    for rows, columns, which in ((0, 1, "rows"), (1, -1, "columns"), (2.0, 1, "rows"), (1, True, "columns")):
        with pytest.raises(ValueError, match=f"{which} must be an integer of at least 1"):
            memory.reserve("x", rows, columns)
    with pytest.raises(ValueError, match="no array 'B'; it has A"):
        memory.load("B")
    with pytest.raises(ValueError, match="rows must be a non-empty range inside 0:2, got 1:3"):
        memory.load("A", slice(1, 3))
    with pytest.raises(ValueError, match="columns must be a non-empty range"):
        memory.load("A", None, slice(2, 2))
    with pytest.raises(TypeError, match="rows must be a slice"):
        memory.load("A", 1)
    with pytest.raises(TypeError, match="rows must be a slice"):
        memory.allocate("S")  # nothing says how large
    held = memory.load("A", slice(0, 1))
    with pytest.raises(ValueError, match="already holds"):
        memory.load("A")
    with pytest.raises(ValueError, match="slow memory has no array 'S'"):
        memory.store(memory.allocate("S", slice(0, 1), slice(0, 1)))
    memory.free(held)
    with pytest.raises(RuntimeError, match="keeps no trace"):
        memory.trace()


def test_the_trace_tells_the_same_story():
    q, k, v = (random(6, 2, seed=i) for i in range(3))
    run = schedules.algorithm_2(q, k, v, capacity_words=50, trace=True, B_r=3, B_c=2)
    trace = json.loads(json.dumps(run.memory.trace()))
    assert trace["capacity_words"] == 50
    assert trace["arrays"]["Q"] == {"rows": 6, "columns": 2, "slow": True}
    assert trace["arrays"]["S"] == {"rows": 6, "columns": 6, "slow": False}
    steps = trace["steps"]
    assert steps[0]["action"] == "load" and steps[0]["block"] == ["Q", 0, 3, 0, 2]
    assert steps[-1]["resident"] == [] and steps[-1]["resident_words"] == 0
    loaded = stored = 0
    for step in steps:
        loaded += step["words"] if step["action"] == "load" else 0
        stored += step["words"] if step["action"] == "store" else 0
        assert (step["loaded_words"], step["stored_words"]) == (loaded, stored)
        sizes = [(b - a) * (d - c) for _, a, b, c, d in step["resident"]]
        assert sum(sizes) == step["resident_words"] <= 50
        if step["action"] not in ("free",):
            assert step["block"] in step["resident"]
    assert loaded + stored == run.memory.moved_words
    assert {step["action"] for step in steps} == {"load", "allocate", "compute", "store", "free"}


# ------------------------------------------------------------------------------------------------------------
# The schedules: right results, and counts that are the closed forms


# What the counts of a schedule depend on, beside T and d.
WORDS_SIZES = {
    "standard_backward": ("B_r", "B_c"), "algorithm_1": (), "algorithm_4": ("B_c",), "algorithm_5": (),
    "algorithm_7": ("B_c",), "algorithm_8": ("B_c",), "deltas": (), "split_keys": ("B_c",),
}  # fmt: skip
OPTIONS = {"algorithm_1": (), "algorithm_5": (), "deltas": ("B_r",)}


def closed_forms(name, T, d, B_r, B_c):
    """(moved words, peak words) of a schedule."""
    words, peak = getattr(formulas, f"{name}_words"), getattr(formulas, f"{name}_peak_words")
    sizes = {"B_r": B_r, "B_c": B_c}
    moved = words(T, d, *(sizes[size] for size in WORDS_SIZES.get(name, ("B_r",))))
    return moved, peak(T, d, **block_sizes(name, B_r, B_c))


def block_sizes(name, B_r, B_c):
    """The block sizes that a schedule takes, as keywords."""
    return {size: {"B_r": B_r, "B_c": B_c}[size] for size in OPTIONS.get(name, ("B_r", "B_c"))}


INPUTS = {
    "standard_forward": "Q K V", "standard_backward": "Q K V P O dO", "algorithm_1": "Q K V",
    "row_block_forward": "Q K V", "row_block_backward": "Q K V O dO", "algorithm_2": "Q K V",
    "algorithm_3": "Q K V", "flash2_forward": "Q K V", "algorithm_4": "Q K V", "resident_outputs": "Q K V",
    "algorithm_5": "Q K V O dO", "algorithm_6": "Q K V O dO L", "algorithm_7": "Q K V O dO L",
    "algorithm_8": "Q K V O dO L", "deltas": "O dO", "split_keys": "Q K V dO L D",
    "split_queries": "Q K V dO L D", "row_sums_backward": "Q K V dO L",
}  # fmt: skip


def execute(name, T, d, capacity_words, **options):
    """The run of a schedule on random inputs, after its results were compared with the reference."""
    exact = reference(T, d, options.get("scale"))
    arrays = [exact[array] for array in INPUTS[name].split()]
    run = getattr(schedules, name)(*arrays, capacity_words=capacity_words, **options)
    if name == "algorithm_2":
        exact["O"] = exact["S"] @ exact["V"]  # it leaves the softmax out
    for array, result in run.arrays.items():
        np.testing.assert_allclose(result, exact[array], rtol=1e-12, atol=1e-12, err_msg=f"{name}: {array}")
    return run


SIZES = [
    (1, 1, 1, 1), (4, 2, 2, 2), (6, 2, 3, 2), (7, 3, 2, 3), (9, 4, 9, 1), (5, 5, 1, 5), (12, 3, 5, 7),
    (13, 1, 4, 13), (16, 8, 8, 4), (17, 2, 17, 17), (3, 16, 2, 2),
]  # fmt: skip


# The names whose counts depend on nothing but T, d and the two block sizes.
PLAIN = [name for name in INPUTS if name != "resident_outputs"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_counts_are_the_closed_forms(name, sizes):
    T, d, B_r, B_c = sizes
    words, peak = closed_forms(name, *sizes)
    options = block_sizes(name, B_r, B_c)
    run = execute(name, T, d, peak, **options)
    assert (run.memory.moved_words, run.memory.peak_words) == (words, peak)
    assert run.memory.resident_words == 0
    with pytest.raises(CapacityExceeded) as caught:
        execute(name, T, d, peak - 1, **options)
    assert caught.value.excess_words == 1


def test_square_words_are_four_and_seven():
    for T, d, B_r, B_c in ((8, 2, 4, 2), (11, 3, 4, 5)):
        forward = execute("standard_forward", T, d, PLENTY, B_r=B_r, B_c=B_c).memory.by_array
        assert {name: forward[name] for name in "SP"} == {"S": (T * T, T * T), "P": (T * T, T * T)}
        backward = execute("standard_backward", T, d, PLENTY, B_r=B_r, B_c=B_c).memory.by_array
        square = {name: backward[name] for name in ("P", "dP", "dS")}
        assert square == {"P": (2 * T * T, 0), "dP": (T * T, T * T), "dS": (2 * T * T, T * T)}


@settings(derandomize=True, deadline=None, max_examples=90)
@given(data=st.data())
def test_any_sizes(data):
    T, d = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 9))
    B_r, B_c = (data.draw(st.integers(1, T)) for _ in range(2))
    scale = data.draw(st.floats(-2, 2))
    name = data.draw(st.sampled_from([name for name in PLAIN if name not in OPTIONS]))
    words, peak = closed_forms(name, T, d, B_r, B_c)
    extra = data.draw(st.integers(0, 50))
    run = execute(name, T, d, peak + extra, B_r=B_r, B_c=B_c, scale=scale)
    assert (run.memory.moved_words, run.memory.peak_words) == (words, peak)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.tuples(*[st.integers(1, 9)] * 3), st.tuples(*[st.integers(1, 12)] * 3))
def test_matmul(shape, tile):
    (m, n, k), (b_m, b_n, b_k) = shape, tile
    A, B = random(m, k), random(k, n, seed=1)
    peak = formulas.matmul_peak_words(m, n, k, *tile)
    run = schedules.matmul(A, B, capacity_words=peak, b_m=b_m, b_n=b_n, b_k=b_k)
    np.testing.assert_allclose(run["C"], A @ B, rtol=1e-12, atol=1e-12)
    assert run.memory.moved_words == formulas.matmul_words(m, n, k, b_m, b_n)
    assert run.memory.peak_words == peak


def test_softmax_by_pieces():
    for T, N, B_c in ((1, 1, 1), (3, 8, 3), (5, 7, 7), (4, 6, 1)):
        S = 300 * random(T, N)
        run = schedules.softmax_by_pieces(S, capacity_words=B_c + 2, B_c=B_c)
        np.testing.assert_allclose(run["P"], torch.softmax(torch.from_numpy(S), -1).numpy(), atol=1e-12)
        assert run.memory.moved_words == formulas.softmax_by_pieces_words(T, N)
        assert run.memory.loaded_words == 3 * T * N and run.memory.peak_words == B_c + 2


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_resident_outputs_from_none_to_all(sizes):
    T, d, B_r, B_c = sizes
    all_blocks = formulas.block_count(T, B_r)
    words = [formulas.resident_outputs_words(*sizes, r) for r in range(all_blocks + 1)]
    assert words[0] == formulas.algorithm_4_words(T, d, B_c)
    assert words[-1] == T * d * (3 + formulas.block_count(T, B_c)) + 2 * T
    for r in {1, (all_blocks + 1) // 2, all_blocks}:
        peak = formulas.resident_outputs_peak_words(*sizes, r)
        run = execute("resident_outputs", T, d, peak, B_r=B_r, B_c=B_c, r=r)
        assert (run.memory.moved_words, run.memory.peak_words) == (words[r], peak)
        saved = 2 * (formulas.block_count(T, B_c) - 1) * (d + 2) * min(r * B_r, T)
        assert words[0] - words[r] == saved


def test_what_the_two_orders_move():
    """Each array and each inner step, statistics included."""
    T, d, B_r, B_c = 12, 3, 4, 5
    T_r, T_c, thin = 3, 3, 12 * 3
    options = {"capacity_words": PLENTY, "trace": True, "B_r": B_r, "B_c": B_c}
    q, k, v = (random(T, d, seed=i) for i in range(3))
    keys_outside = schedules.algorithm_4(q, k, v, **options).memory
    assert keys_outside.by_array == {
        "K": (thin, 0), "V": (thin, 0), "Q": (T_c * thin, 0), "O": ((T_c - 1) * thin, T_c * thin),
        "m": ((T_c - 1) * T, T_c * T), "l": ((T_c - 1) * T, T_c * T),
    }  # fmt: skip
    queries_outside = {"Q": (thin, 0), "K": (T_r * thin, 0), "V": (T_r * thin, 0), "O": (0, thin)}
    for name, statistics in (("algorithm_3", "ml"), ("flash2_forward", "L")):
        memory = getattr(schedules, name)(q, k, v, **options).memory
        assert memory.by_array == queries_outside | dict.fromkeys(statistics, (0, T))
        assert formulas.algorithm_3_step_words(d, B_c) in steps_words(memory, "K")
    steps = steps_words(keys_outside, "Q")
    assert len(steps) == T_r * T_c
    # The last step of a block of keys also loads the K and V of the next one; B_r divides T.
    assert steps[T_r] == formulas.algorithm_4_step_words(d, B_r) == (B_r * (2 * d + 2), B_r * (d + 2))


def steps_words(memory, first):
    """[(loaded, stored)] of the steps of a trace that begin with a load of the array ``first``."""
    found = []
    for step in memory.trace()["steps"]:
        if step["action"] == "load" and step["block"][0] == first:
            found.append([0, 0])
        if found and step["action"] in ("load", "store"):
            found[-1][step["action"] == "store"] += step["words"]
    return [tuple(words) for words in found]


def test_what_the_two_backward_orders_move():
    """Each array and each inner step, L and D included."""
    T, d, B_r, B_c = 12, 3, 4, 6
    T_r, T_c, thin = 3, 2, 12 * 3
    exact = reference(T, d)
    options = {"capacity_words": PLENTY, "trace": True, "B_r": B_r, "B_c": B_c}
    runs = {
        name: getattr(schedules, name)(*(exact[array] for array in INPUTS[name].split()), **options).memory
        for name in ("algorithm_6", "algorithm_7", "algorithm_8", "row_sums_backward")
    }
    queries_outside = {
        **dict.fromkeys(("Q", "O", "dO"), (thin, 0)), "dQ": (0, thin), "L": (T, 0),
        **dict.fromkeys(("K", "V"), (T_r * thin, 0)),
        **dict.fromkeys(("dK", "dV"), ((T_r - 1) * thin, T_r * thin)),
    }  # fmt: skip
    assert runs["algorithm_6"].by_array == queries_outside
    del queries_outside["O"]
    twice = dict.fromkeys(("K", "V"), (2 * T_r * thin, 0))
    assert runs["row_sums_backward"].by_array == queries_outside | twice
    keys_outside = {
        **dict.fromkeys(("K", "V"), (thin, 0)), **dict.fromkeys(("dK", "dV"), (0, thin)),
        **dict.fromkeys(("Q", "O", "dO"), (T_c * thin, 0)), "L": (T_c * T, 0),
        "dQ": ((T_c - 1) * thin, T_c * thin),
    }  # fmt: skip
    assert runs["algorithm_7"].by_array == keys_outside
    beforehand = {"O": (thin, 0), "dO": ((T_c + 1) * thin, 0), "D": (T_c * T, T)}
    assert runs["algorithm_8"].by_array == keys_outside | beforehand
    # The steps of the last outer round, but for its last step, which stores what the round made.
    last = {
        "algorithm_6": ("K", formulas.algorithm_6_step_words(d, B_c), T_r * T_c),
        "algorithm_7": ("dO", formulas.algorithm_7_step_words(d, B_r), T_r * T_c),
        "algorithm_8": ("Q", formulas.algorithm_8_step_words(d, B_r), T_r * T_c),
    }
    for name, (first, words, count) in last.items():
        steps = steps_words(runs[name], first)
        assert len(steps) == count and steps[-2] == words, name


def test_large_scores_do_not_overflow():
    q, k, v = 100 * random(6, 4), 100 * random(6, 4, seed=1), random(6, 4, seed=2)
    do = random(6, 4, seed=3)
    exact, lse = standard.attention(*map(as_torch, (q, k, v)))
    dq, _, _ = gradients.gradients(*map(as_torch, (q, k, v, do)))
    for name in ("algorithm_6", "algorithm_7", "algorithm_8"):
        inputs = (q, k, v, exact[0, 0].numpy(), do, lse[0, 0, :, None].numpy())
        run = getattr(schedules, name)(*inputs, capacity_words=PLENTY, B_r=2, B_c=3)
        np.testing.assert_allclose(run["dQ"], dq[0, 0].numpy(), atol=1e-11)
    for name in ("standard_forward", "row_block_forward", "algorithm_3", "flash2_forward", "algorithm_4"):
        run = getattr(schedules, name)(q, k, v, capacity_words=PLENTY, B_r=2, B_c=3)
        np.testing.assert_allclose(run["O"], exact[0, 0].numpy(), atol=1e-12)


def test_schedules_refuse_bad_arguments():
    q = random(4, 2)
    with pytest.raises(TypeError, match="takes Q, K, V, got 2 arrays"):
        schedules.algorithm_1(q, q, capacity_words=100)
    with pytest.raises(ValueError, match=r"K must be T d with T = 4"):
        schedules.algorithm_1(q, random(5, 2), q, capacity_words=100)
    with pytest.raises(ValueError, match="Q must be a real matrix"):
        schedules.algorithm_1(q[0], q, q, capacity_words=100)
    with pytest.raises(ValueError, match="Q must be a real matrix"):
        schedules.algorithm_1(q[:0], q, q, capacity_words=100)
    with pytest.raises(TypeError, match=r"expects the options \['scale', 'B_r', 'B_c'\]"):
        schedules.algorithm_2(q, q, q, capacity_words=100, B_r=2)
    with pytest.raises(ValueError, match="block size must be an integer of at least 1"):
        schedules.algorithm_2(q, q, q, capacity_words=100, B_r=0, B_c=1)


def bodies():
    """The functions in schedules.py that take a memory, as syntax trees."""
    tree = ast.parse(inspect.getsource(schedules))
    found = [
        f
        for f in tree.body
        if isinstance(f, ast.FunctionDef) and f.args.args and f.args.args[0].arg == "memory"
    ]
    assert len(found) >= len(INPUTS) + 2
    return found


@pytest.mark.parametrize("body", bodies(), ids=lambda body: body.name)
def test_nothing_outlives_a_statement_except_in_a_block(body):
    """Every name that a schedule binds is a handle or a range; it has no other way to keep a number."""
    makers = {"load", "allocate", "reuse"}
    for node in ast.walk(body):
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            if isinstance(target, ast.Subscript):
                continue  # written into a block
            called = node.value.func
            handle = (
                isinstance(called, ast.Attribute) and called.value.id == "memory" and called.attr in makers
            )
            assert handle or called.id == "accumulator", ast.unparse(node)
        elif isinstance(node, ast.For):
            assert ast.unparse(node.iter).startswith("blocks("), ast.unparse(node.iter)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "memory":
            assert node.attr in makers | {"store", "free"}, ast.unparse(node)
        else:
            assert not isinstance(node, (ast.NamedExpr, ast.Global, ast.Nonlocal, ast.Lambda, ast.ListComp))


def test_a_schedule_that_forgets_a_block_or_uses_a_freed_one_fails():
    def variant(old, new):
        source = textwrap.dedent(inspect.getsource(schedules.algorithm_2))
        assert source.count(old) == 1
        space = vars(schedules).copy()
        exec(source.replace(old, new), space)
        q, k, v = (random(6, 2, seed=i) for i in range(3))
        return space["algorithm_2"](q, k, v, capacity_words=100, B_r=3, B_c=2)

    with pytest.raises(RuntimeError, match="fast memory still holds"):
        variant("memory.free(o, q)", "memory.free(o)")
    with pytest.raises(RuntimeError, match="not in fast memory"):
        variant("o += s @ v", "o += s @ k")
    assert np.isnan(variant("o[:] = 0.0", "pass")["O"]).all(), "an accumulator that is never zeroed"
    assert np.isnan(variant("    memory.store(o)", "    pass")["O"]).all(), "a result that is never stored"


# ------------------------------------------------------------------------------------------------------------
# Orders of growth, ranges, least memory


def exponent(x, y):
    return np.polyfit(np.log(x), np.log(y), 1)[0]


def test_fitted_exponents_of_the_simulation():
    """T^2 d^2 / M and T^3 d / M, where every division is exact and many blocks of rows are needed."""

    def simulated(name, T, d, rows, columns):
        peak = getattr(formulas, f"{name}_peak_words")(T, d, rows, columns)
        run = getattr(schedules, name)(*(random(T, d, seed=i) for i in range(3)), capacity_words=peak,
                                       B_r=rows, B_c=columns)  # fmt: skip
        return run.memory.moved_words

    def tiles(T, d, M):
        return simulated("algorithm_2", T, d, M // (4 * d), min(M // (4 * d), d))

    def rows(T, d, M):
        return simulated("row_block_forward", T, d, M // T, 8)

    T = [64, 128, 256]
    assert exponent(T, [tiles(t, 4, 64) for t in T]) == pytest.approx(2, abs=0.06)
    assert exponent([2, 4, 8], [tiles(128, d, 128) for d in (2, 4, 8)]) == pytest.approx(2, abs=0.15)
    assert exponent([32, 64, 128], [tiles(128, 4, M) for M in (32, 64, 128)]) == pytest.approx(-1, abs=0.06)
    assert exponent(T, [rows(t, 2, 256) for t in T]) == pytest.approx(3, abs=0.06)
    assert exponent([1, 2, 4], [rows(64, d, 256) for d in (1, 2, 4)]) == pytest.approx(1, abs=0.02)
    assert exponent([128, 256, 512], [rows(128, 2, M) for M in (128, 256, 512)]) == pytest.approx(
        -1, abs=0.02
    )


def test_fitted_exponents_of_the_closed_forms_at_large_sizes():
    def fitted(words, rows, powers, T, d, M):
        for which, power in enumerate(powers):
            scales = [1, 2, 4, 8]
            points = []
            for scale in scales:
                sizes = [T, d, M]
                sizes[which] *= scale
                points.append(words(sizes[0], sizes[1], rows(*sizes)))
            assert exponent(scales, points) == pytest.approx(power, abs=0.05), (words.__name__, which)

    f = formulas
    fitted(f.algorithm_2_words, f.algorithm_2_rows, (2, 2, -1), 2**20, 64, 2**17)
    fitted(f.row_block_forward_words, f.row_block_forward_rows, (3, 1, -1), 2**16, 64, 2**24)
    fitted(f.row_block_backward_words, f.row_block_backward_rows, (3, 1, -1), 2**16, 64, 2**24)
    square = [f.standard_forward_words(t, 64, f.standard_forward_rows(t, 64, 2**20)) for t in (2**14, 2**17)]
    assert exponent([1, 8], square) == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize(
    "name", ["standard_forward", "row_block_forward", "row_block_backward", "algorithm_2"]
)
def test_the_most_rows_fit_and_one_more_does_not(name):
    rows_of, peak_of = getattr(formulas, f"{name}_rows"), getattr(formulas, f"{name}_peak_words")
    for T, d, B_c in ((12, 3, 1), (20, 4, 5), (9, 8, 9)):
        least = peak_of(T, d, 1, B_c)
        with pytest.raises(ValueError, match=f"capacity_words.*, got {least - 1}"):
            rows_of(T, d, least - 1, B_c)
        for M in range(least, 4 * least, 7):
            rows = rows_of(T, d, M, B_c)
            assert peak_of(T, d, rows, B_c) <= M
            assert rows == T or peak_of(T, d, rows + 1, B_c) > M


def test_one_column_block_gives_the_fewest_words():
    """Nothing is lost by B_c = 1: for every capacity, no pair of block sizes that fits moves fewer words."""
    for T, d in ((12, 3), (10, 5)):
        for M in range(3 * d + 1, 200, 9):
            fitting = [
                formulas.algorithm_2_words(T, d, B_r)
                for B_r, B_c in itertools.product(range(1, T + 1), repeat=2)
                if formulas.algorithm_2_peak_words(T, d, B_r, B_c) <= M
            ]
            assert min(fitting) == formulas.algorithm_2_words(T, d, formulas.algorithm_2_rows(T, d, M))


def test_where_quarter_blocks_fit_with_statistics():
    """(44) leaves no word for s statistics a row exactly where M is within about 4 d s of 4 d^2."""
    for d, s in ((8, 1), (16, 2), (16, 3)):
        for rows in range(1, 3 * d):
            M = 4 * d * rows
            B_r, B_c = formulas.quarter_blocks(d, M)
            fits = formulas.algorithm_2_peak_words(10**6, d, B_r, B_c, statistics_words=s) <= M
            slack = (d - rows) * rows if rows < d else (rows - d) * d
            assert fits == (slack >= s * rows)
            assert formulas.algorithm_2_peak_words(10**6, d, B_r, B_c) <= M


def test_where_quarter_blocks_fit_for_keys_outside():
    """M / 4d rows of K, of V, and of Q whose place O takes: with the statistics they fit unless M / 4d = d.

    Q and O in fast memory together, as the paper loads them, need M / 4d >= 2 d.
    """
    for d in (4, 8, 16):
        for B_c in range(1, 3 * d):
            M, B_r = 4 * d * B_c, min(B_c, d)
            assert formulas.quarter_blocks(d, M) == (B_c, B_r)
            fits = formulas.algorithm_4_peak_words(10**6, d, B_r, B_c) <= M
            assert fits == (B_c != d)
            together = 2 * B_c * d + 2 * B_r * d + B_r * B_c
            assert (together > M) == (B_c < 2 * d)


def test_which_backward_order_moves_fewer_words():
    """Queries outside moves fewer words exactly where d (6 T_r - 3) < T_c (4 d + 2)."""
    f = formulas
    for T, d in ((48, 1), (60, 4), (4096, 64)):
        for B_r, B_c in itertools.product((1, 2, 3, 5, 8, 12, 24, 48), repeat=2):
            T_r, T_c = f.block_count(T, B_r), f.block_count(T, B_c)
            fewer = f.algorithm_6_words(T, d, B_r) < f.algorithm_8_words(T, d, B_c)
            assert fewer == (d * (6 * T_r - 3) < T_c * (4 * d + 2))
            beforehand = f.algorithm_8_words(T, d, B_c) < f.algorithm_7_words(T, d, B_c)
            assert beforehand == (T_c * (d - 1) > 2 * d + 1)


def test_what_the_printed_inner_loops_leave_out():
    """The slides print 4 T_r |J| d and 3 T_c |I| d: a step of the first outer round, times one loop."""
    T, d, B_r, B_c = 24, 4, 6, 3
    T_r, T_c, thin = T // B_r, T // B_c, T * d
    printed = 4 * T_r * B_c * d
    loops, sums, outside, statistics = printed * (T_c - 1), 2 * thin * (T_r - 1), 4 * thin, T
    assert formulas.algorithm_6_words(T, d, B_r) == printed + loops + sums + outside + statistics
    assert sum(formulas.algorithm_6_step_words(d, B_c)) == 4 * B_c * d + 2 * B_c * d
    printed = 3 * T_c * B_r * d
    loops, sums, outside, statistics = printed * (T_r - 1), thin * (T_c - 1), 4 * thin, 2 * T * T_c
    beforehand = formulas.deltas_words(T, d)
    total = printed + loops + sums + outside + statistics + beforehand
    assert formulas.algorithm_8_words(T, d, B_c) == total
    assert sum(formulas.algorithm_8_step_words(d, B_r)) == 3 * B_r * d + B_r * d + 2 * B_r


def test_which_backward_blocks_fit():
    """An eighth of M for each block leaves no room for L and D where M / 8d is d - 1 or d. With the published
    sizes, a quarter for each of four blocks among eight, those four are all that fits; with the sizes that
    the slides quote nothing fits from M = 8d on.
    """
    for d in (2, 4, 8, 16):
        for rows in range(1, 3 * d):
            M = 8 * d * rows
            B_r, B_c = formulas.eighth_blocks(d, M)
            assert (B_r, B_c) == (rows, min(rows, d))
            peak = formulas.algorithm_8_peak_words(10**6, d, B_r, B_c)
            assert peak - 2 * B_r <= M and (peak <= M) == (rows not in (d - 1, d))
        for M in range(4 * d, 40 * d * d, 7):
            B_r, B_c = formulas.published_backward_blocks(d, M)
            assert (B_r, B_c) == (min(math.ceil(M / (4 * d)), d), math.ceil(M / (4 * d)))
            assert 4 * B_c * d >= M, "K, V, dK and dV of a block of keys alone"
            if 8 * d <= M:
                assert formulas.algorithm_6_peak_words(10**6, d, *formulas.quarter_blocks(d, M)) > M


def test_a_published_block_size_overflows_when_it_runs():
    T, d, M = 16, 4, 64
    exact = reference(T, d)
    inputs = [exact[array] for array in INPUTS["algorithm_7"].split()]
    B_r, B_c = formulas.published_backward_blocks(d, M)
    with pytest.raises(CapacityExceeded, match=r"load dO\[0:4, 0:4\] asks for 16 words: 64 of 64 are held"):
        schedules.algorithm_7(*inputs, capacity_words=M, B_r=B_r, B_c=B_c)
    # With a quarter for each of four blocks the forward pass fits but for its statistics.
    assert formulas.algorithm_4_peak_words(T, d, B_r, B_c) == M + B_r


def test_ranges_raise():
    f = formulas
    for call in (
        lambda: f.standard_forward_words(0, 4, 1), lambda: f.algorithm_2_words(8, 4, 9),
        lambda: f.row_block_forward_peak_words(8, 4, 1, 0), lambda: f.matmul_words(1, 1, 1, 1, -1),
        lambda: f.quarter_blocks(8, 31), lambda: f.algorithm_1_words(4, -1), lambda: f.eighth_blocks(8, 63),
        lambda: f.algorithm_8_words(8, 4, 9), lambda: f.split_keys_peak_words(8, 4, 9, 1),
        lambda: f.published_backward_blocks(8, 0),
        lambda: f.resident_outputs_words(8, 4, 4, 4, 3), lambda: f.algorithm_4_step_words(0, 4),
        lambda: f.standard_forward_rows(8, 2, 8), lambda: f.transfer_seconds(-1, f.A100),
        lambda: f.attainable_flops_per_second(0, f.A100), lambda: f.compute_seconds(math.nan, f.A100),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must|needs"):
            call()
    for wrong in (2.0, True, np.int64(4), "4"):
        with pytest.raises(TypeError, match="T must be an int"):
            f.algorithm_1_words(wrong, 2)


# ------------------------------------------------------------------------------------------------------------
# Bytes and seconds


def test_the_slides_example():
    f = formulas
    operations_us = 1e6 * f.compute_seconds(f.forward_flops(1024, 64), f.A100)
    words_us = 1e6 * f.transfer_seconds(2 * 4 * 1024**2, f.A100)
    assert f"{operations_us:.2f}" == "0.86" and f"{words_us:.2f}" == "4.11"
    # What is printed, 3.74, divides by binary terabytes.
    assert f"{1e6 * 8 * 1024**2 / (2.04 * 2**40):.2f}" == "3.74"


def test_roofline():
    for gpu in formulas.GPUS:
        ridge = gpu.ridge_flops_per_byte
        assert formulas.attainable_flops_per_second(ridge / 2, gpu) == pytest.approx(gpu.flops_per_second / 2)
        assert formulas.attainable_flops_per_second(2 * ridge, gpu) == gpu.flops_per_second
        assert formulas.roofline_seconds(ridge * 1e9, 1e9, gpu) == pytest.approx(
            1e9 / gpu.hbm_bytes_per_second
        )
        assert gpu.source and 100 < ridge < 400


def test_kernel_bytes_are_those_of_the_tensors():
    """The model of a kernel's bytes, from the tensors that its launcher is given and gives."""
    from flashlib.kernels import flash1, flash2
    from flashlib.kernels import gradients as backward_kernels
    from flashlib.kernels import standard as forward_kernels

    B, H, T, d = 1, 2, 20, 16
    for dtype in (torch.float32, torch.float16):
        q, k, v, do = (torch.randn(B, H, T, d, dtype=dtype, device=DEVICE) for _ in range(4))
        s = forward_kernels.scores(q, k, False, 0.25)
        p, lse = forward_kernels.softmax(s, dtype)
        o = forward_kernels.output(p, v)
        delta = backward_kernels.row_dot(do, o)
        dp = torch.empty_like(s)
        ds = backward_kernels.d_scores(p, dp.zero_(), delta)
        tensors = {
            "S": ([q, k], [s]), "P": ([s], [p, lse]), "O": ([p, v], [o]), "dV": ([p, do], [v]),
            "dP": ([do, v], [dp]), "D": ([do, o], [delta]), "dS": ([p, dp, delta], [ds]),
            "dQ": ([ds, k], [q]), "dK": ([ds, q], [k]),
        }  # fmt: skip
        model = formulas.standard_forward_bytes(T, d, B * H, q.element_size())
        model += formulas.standard_backward_bytes(T, d, B * H, q.element_size())
        assert [t.step for t in model] == list(tensors)
        for transfer in model:
            read, written = tensors[transfer.step]
            assert transfer.read_bytes == sum(x.nbytes for x in read), transfer
            assert transfer.written_bytes == sum(x.nbytes for x in written), transfer
        o, lse = flash2.forward(q, k, v, False, 0.25)
        (transfer,) = formulas.flash2_forward_bytes(T, d, B * H, q.element_size())
        assert transfer.read_bytes == q.nbytes + k.nbytes + v.nbytes
        assert transfer.written_bytes == o.nbytes + lse.nbytes
        _, BLOCK_K, _ = flash1.INTERPRETER
        long_q, long_k, long_v = (
            torch.randn(B, H, 2 * BLOCK_K + 1, d, dtype=dtype, device=DEVICE) for _ in range(3)
        )
        state = [torch.zeros(*long_q.shape[:3], *rest, device=DEVICE) for rest in ((d,), (), ())]
        flash1.launch(long_q, long_k, long_v, *state, False, 0.25, flash1.INTERPRETER)
        (transfer,) = formulas.flash1_forward_bytes(long_q.shape[2], d, B * H, q.element_size(), BLOCK_K)
        held = sum(x.nbytes for x in state)
        assert transfer.read_bytes == 2 * long_k.nbytes + 3 * (long_q.nbytes + held)
        assert transfer.written_bytes == 3 * held
    assert formulas.total_bytes(model) == sum(t.read_bytes + t.written_bytes for t in model)


@pytest.mark.parametrize("deterministic", (True, False))
def test_kernel_bytes_of_the_flash_backward_are_those_of_the_tensors(deterministic, monkeypatch):
    """At a length that needs no padding of D and L; what each launcher is given is noted on the way."""
    from flashlib.kernels import backward

    given = {}

    def note(name, launch):
        def noted(*arguments):
            given[name] = [x for x in arguments if isinstance(x, torch.Tensor)]
            return launch(*arguments)

        monkeypatch.setattr(backward, name, noted)

    for name in ("launch_delta", "launch_keys", "launch_queries"):
        note(name, getattr(backward, name))
    B, H, T, d = 1, 2, backward.LARGEST_BLOCK_Q, 16
    q, k, v, o, do = (torch.randn(B, H, T, d, dtype=torch.float16, device=DEVICE) for _ in range(5))
    lse, dlse = (torch.randn(B, H, T, device=DEVICE) for _ in range(2))
    backward.backward(q, k, v, o, lse, do, dlse, False, 0.25, deterministic)

    model = formulas.flash_backward_bytes(T, d, B * H, q.element_size(), deterministic)
    # (read, written) among a launcher's tensors; dQ of the atomic form comes and goes.
    places = {"delta_kernel": (slice(4), slice(4, 6)), "queries_kernel": (slice(6), slice(6, 7)),
              "keys_kernel": (slice(6), slice(6, 8)), "fused_kernel": (slice(7), slice(6, 9))}  # fmt: skip
    assert [t.step for t in model] == (["D", "dK, dV", "dQ"] if deterministic else ["D", "dQ, dK, dV"])
    for transfer in model:
        launcher = {"fused_kernel": "launch_keys"}.get(transfer.kernel, f"launch_{transfer.kernel[:-7]}")
        read, written = places[transfer.kernel]
        assert hasattr(backward, transfer.kernel)
        assert transfer.read_bytes == sum(x.nbytes for x in given[launcher][read]), transfer
        assert transfer.written_bytes == sum(x.nbytes for x in given[launcher][written]), transfer


def test_operations():
    f = formulas
    assert f.forward_flops(8, 4) == 4 * 64 * 4 and f.backward_flops(8, 4) == 10 * 64 * 4
    assert f.backward_operations(8, 4) == 8 * 64 * 4 + 2 * 64 + 16 * 8
    assert f.forward_operations(8, 4) == f.forward_flops(8, 4) + 5 * 64 - 2 * 8 - 8 * 4


def test_imports_numpy_only():
    code = """
import sys
import flashlib.iomodel, flashlib.iomodel.schedules, flashlib.iomodel.formulas
heavy = {"torch", "triton", "matplotlib", "scipy", "IPython", "flashlib.reference", "flashlib.kernels"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
