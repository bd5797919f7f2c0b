"""The two-level memory, and the schedules: their results and closed forms."""

import inspect
import json

import numpy as np
import pytest
import torch
from device import DEVICE

from flashlib import plans
from flashlib.iomodel import CapacityExceeded, TwoLevelMemory, roofline
from flashlib.iomodel import backward as backward_model
from flashlib.iomodel import blocks as blocks_model
from flashlib.iomodel import flash1 as flash1_model
from flashlib.iomodel import flash2 as flash2_model
from flashlib.iomodel import ring as ring_model
from flashlib.iomodel import standard as standard_model
from flashlib.reference import gradients, standard

PLENTY = 10**7
MODELS = (standard_model, blocks_model, flash1_model, flash2_model, backward_model)
SCHEDULES = {
    run.__name__: run
    for model in MODELS
    for run in vars(model).values()
    if hasattr(run, "words") and run.__module__ == model.__name__
}


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
    p, m = standard.softmax(s), s.amax(-1, keepdim=True)
    o, dp = standard.output(p, v), gradients.d_probabilities(do, v)
    delta = gradients.row_dot(do, o)
    dq, dk, dv = gradients.gradients(q, k, v, do, scale=scale)
    results = {
        "S": s, "P": p, "O": o,
        "dP": dp, "dS": gradients.d_scores(p, dp, delta), "dQ": dq, "dK": dk, "dV": dv,
        "m": m, "l": torch.exp(s - m).sum(-1, keepdim=True),
        "L": standard.logsumexp(s)[..., None],
        "D": delta[..., None],
    }  # fmt: skip
    return x | {name: value[0, 0].numpy() for name, value in results.items()}


# -- The memory


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
    memory.free(c)
    result = memory.array("C")
    assert np.array_equal(result[1:3, :2], [[5, 6], [8, 9]])
    assert np.isnan(result).sum() == 8


def test_one_word_too_many_is_refused_and_counts_nothing():
    """A chapter prints what the error says."""
    memory = TwoLevelMemory(8)
    memory.place("A", np.zeros((3, 3)))
    memory.allocate("S", slice(0, 4), slice(0, 1))
    memory.load("A", slice(0, 1))
    with pytest.raises(CapacityExceeded):
        memory.allocate("S", slice(4, 5), slice(0, 2))
    assert (memory.resident_words, memory.loaded_words) == (7, 3)
    memory.allocate("S", slice(4, 5), slice(0, 1))
    assert memory.free_words == 0


def test_what_is_not_resident_is_nan_or_raises():
    memory = TwoLevelMemory(100)
    memory.place("A", np.ones((2, 2)))
    memory.reserve("C", 2, 2)
    fresh = memory.allocate("S", slice(0, 2), slice(0, 2))
    assert np.isnan(fresh[:]).all(), "allocated is not written"
    assert np.isnan(memory.load("C")[:]).all(), "reserved is not stored"
    a = memory.load("A")
    view = a[:]
    memory.free(a)
    assert np.isnan(view).all(), "a view kept from a freed block"
    for use in (
        lambda: a + 1, lambda: a @ np.ones((2, 1)), lambda: np.exp(a),
        lambda: a[0], lambda: a.T,
        lambda: a.__setitem__(0, 1.0), lambda: memory.store(a), lambda: memory.free(a),
        lambda: memory.reuse(a, "P"), lambda: np.add.reduce(a),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"A\[0:2, 0:2\] is not in fast memory"):
            use()
    with pytest.raises(RuntimeError, match="not in fast memory"):
        TwoLevelMemory(10).store(fresh)  # another memory's block


def test_a_schedule_keeps_nothing_outside_of_its_blocks():
    """It gets the operations, and each looks for other arrays of its own."""
    memory = TwoLevelMemory(100)
    memory.place("A", np.ones((6, 2)))
    memory.reserve("C", 6, 2)
    with memory.schedule() as operations:
        for first in range(0, 6, 2):
            x = operations.load("A", slice(first, first + 2))
            c = operations.allocate("C", slice(first, first + 2))
            c[:] = np.array(x[:]) @ x.T.copy()
            operations.store(c)
            operations.free(x, c)  # their handles stay until the next loads
        x = operations.load("A")
        for make in (lambda: x[:].copy(), lambda: np.zeros(3), lambda: x @ x.T):
            kept = make()
            message = f"{kept.size} words are kept outside"
            with pytest.raises(RuntimeError, match=message):
                operations.free(x)
            del kept
        operations.free(x)
        kept = [float(n) for n in range(3000)]
        with pytest.raises(RuntimeError, match="kept in Python's objects"):
            operations.load("A")
        del kept
        operations.free(operations.load("A"))
    assert memory.loaded_words == 36 and not hasattr(operations, "array")
    for name in ("words", "name", "rows"):
        with pytest.raises(AttributeError, match=f"{name}: a block is written with"):
            setattr(x, name, 1)


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
    memory = TwoLevelMemory(100)
    memory.place("A", np.ones((2, 3)))
    memory.reserve("small", 1, 2)
    held = memory.allocate("S", slice(0, 2), slice(0, 2))
    cases = [
        (TypeError, "capacity_words", lambda: TwoLevelMemory(2.5)),
        (ValueError, "capacity_words", lambda: TwoLevelMemory(0)),
        (ValueError, "'A'", lambda: memory.reserve("A", 1, 1)),
        (ValueError, "place", lambda: memory.place("x", np.ones(3))),
        (ValueError, "rows", lambda: memory.reserve("x", 0, 1)),
        (ValueError, "no array 'B'", lambda: memory.load("B")),
        (ValueError, "rows.* 0:2, got 1:3", lambda: memory.load("A", slice(1, 3))),
        (ValueError, "columns", lambda: memory.load("A", None, slice(2, 2))),
        (TypeError, "rows.* slice", lambda: memory.load("A", 1)),
        (TypeError, "rows.* slice", lambda: memory.allocate("T")),  # how large?
        (ValueError, "no array 'S'", lambda: memory.store(held)),
        (ValueError, "already holds", lambda: memory.allocate("S", *[slice(1, 2)] * 2)),
        (TypeError, "Block", lambda: memory.store(np.ones((2, 2)))),
        (RuntimeError, "trace", lambda: memory.trace()),
        (ValueError, "rows.* 0:1, got 0:2", lambda: memory.reuse(held, "small")),
    ]
    for error, said, call in cases:
        with pytest.raises(error, match=said):
            call()


def test_the_trace_tells_the_same_story():
    q, k, v = (random(6, 2, seed=i) for i in range(3))
    run = blocks_model.algorithm_2(q, k, v, capacity_words=50, trace=True, B_r=3, B_c=2)
    trace = json.loads(json.dumps(run.memory.trace(), allow_nan=False))
    assert trace["arrays"]["Q"] == {"rows": 6, "columns": 2, "slow": True}
    assert trace["arrays"]["S"] == {"rows": 6, "columns": 6, "slow": False}
    words = {"load": 0, "store": 0}
    for step in trace["steps"]:
        if step["action"] in words:
            words[step["action"]] += step["words"]
        assert [step["loaded_words"], step["stored_words"]] == list(words.values())
        sizes = [(b - a) * (d - c) for _, a, b, c, d in step["resident"]]
        assert sum(sizes) == step["resident_words"] <= 50
        assert (step["block"] in step["resident"]) != (step["action"] == "free")
    assert step["resident"] == [] and sum(words.values()) == run.memory.moved_words


# -- The schedules: correct results, and counts that are the closed forms

SIZES = [
    (1, 1, 1, 1), (7, 3, 2, 3), (9, 4, 9, 1), (5, 5, 1, 5), (12, 3, 5, 7),
    (13, 1, 4, 13), (3, 16, 2, 2),
]  # fmt: skip


def count(form, sizes):
    """A closed form of the sizes that it takes."""
    taken = [name for name in inspect.signature(form).parameters if name in sizes]
    return form(**{name: sizes[name] for name in taken})


def execute(name, T, d, capacity_words=PLENTY, **options):
    """The run of a schedule on random inputs, its results already judged."""
    run, exact = SCHEDULES[name], reference(T, d, options.get("scale"))
    exact |= {"A": exact["Q"], "B": exact["K"].T, "C": exact["Q"] @ exact["K"].T}
    inputs = inspect.getclosurevars(run).nonlocals["inputs"]
    done = run(*(exact[x] for x in inputs), capacity_words=capacity_words, **options)
    if name == "algorithm_2":
        exact["O"] = exact["S"] @ exact["V"]  # it leaves the softmax out
    for array, result in done.arrays.items():
        np.testing.assert_allclose(
            result, exact[array], rtol=1e-12, atol=1e-12, err_msg=f"{name}: {array}"
        )
    return done.memory


@pytest.mark.parametrize("name", SCHEDULES)
def test_counts_are_the_closed_forms(name):
    run = SCHEDULES[name]
    wanted = inspect.signature(run).parameters
    for T, d, B_r, B_c in SIZES:
        sizes = {"T": T, "N": T, "d": d, "B_r": B_r, "B_c": B_c, "m": T, "n": T, "k": d}
        sizes |= {"b_m": B_r, "b_n": B_c, "b_k": B_r}
        for r in range(1, -(-T // B_r) + 1) if "r" in wanted else [1]:
            sizes["r"] = r
            words, peak = count(run.words, sizes), count(run.peak, sizes)
            blocks = ("B_r", "B_c", "b_m", "b_n", "b_k", "r")
            options = {size: sizes[size] for size in blocks if size in wanted}
            if "scale" in wanted:
                options["scale"] = 0.7
            memory = execute(name, T, d, peak, **options)
            assert (memory.moved_words, memory.peak_words) == (words, peak)
            assert memory.closed_form_words == words and memory.resident_words == 0
            with pytest.raises(CapacityExceeded) as caught:
                execute(name, T, d, peak - 1, **options)
            assert caught.value.excess_words == 1


@pytest.mark.parametrize(
    "name, first",
    [
        ("algorithm_3", "K"),
        ("algorithm_4", "Q"),
        ("algorithm_6", "K"),
        ("algorithm_8", "Q"),
    ],
)
def test_the_words_of_one_inner_step(name, first):
    T, sizes, found = 12, {"d": 3, "B_r": 4, "B_c": 6}, []
    memory = execute(name, T, 3, B_r=4, B_c=6, trace=True)
    for step in memory.trace()["steps"]:
        if step["action"] == "load" and step["block"][0] == first:
            found.append([0, 0])
        if found and step["action"] in ("load", "store"):
            found[-1][step["action"] == "store"] += step["words"]
    assert len(found) == 6
    # The last step but one: the last one also stores what the outer round accumulated.
    assert tuple(found[-2]) == count(SCHEDULES[name].step, sizes)


def test_large_scores_do_not_overflow():
    q, k, v, do = (random(6, 4, seed=i) for i in range(4))
    q, k = 100 * q, 100 * k
    exact, lse = standard.attention(*map(as_torch, (q, k, v)))
    dq, _, _ = gradients.gradients(*map(as_torch, (q, k, v, do)))
    names = "standard_forward row_block_forward algorithm_3 flash2_forward algorithm_4"
    for name in names.split():
        run = SCHEDULES[name](q, k, v, capacity_words=PLENTY, B_r=2, B_c=3)
        np.testing.assert_allclose(run["O"], exact[0, 0].numpy(), atol=1e-12)
    inputs = (q, k, v, exact[0, 0].numpy(), do, lse[0, 0, :, None].numpy())
    for name in ("algorithm_6", "algorithm_7", "algorithm_8"):
        run = SCHEDULES[name](*inputs, capacity_words=PLENTY, B_r=2, B_c=3)
        np.testing.assert_allclose(run["dQ"], dq[0, 0].numpy(), atol=1e-11)


def test_schedules_and_closed_forms_refuse_bad_arguments():
    q, one, two = random(4, 2), blocks_model.algorithm_1, blocks_model.algorithm_2
    sizes = {"capacity_words": 100, "B_r": 2}
    cases = [
        (TypeError, "expected Q, K, V, got 2", lambda: one(q, q, capacity_words=100)),
        (ValueError, "K: .*T = 4", lambda: one(q, q[:3], q, capacity_words=100)),
        (ValueError, "Q: .*matrix", lambda: one(q[0], q, q, capacity_words=100)),
        (ValueError, "Q: .*empty", lambda: one(q[:0], q, q, capacity_words=100)),
        (TypeError, "options .*'B_c'", lambda: two(q, q, q, **sizes)),
        (ValueError, "step: .*at least 1", lambda: two(q, q, q, B_c=0, **sizes)),
        (ValueError, "T: .*at least 1", lambda: one.words(0, 4)),
        (ValueError, "B_r: .*at most 8", lambda: two.words(8, 4, 9)),
        (TypeError, "T: expected an integer", lambda: one.words(True, 2)),
        (TypeError, "T: expected an integer", lambda: one.words(np.int64(4), 2)),
        (ValueError, "4 d = 32", lambda: blocks_model.quarter_blocks(8, 31)),
        (ValueError, "8 d = 64", lambda: backward_model.eighth_blocks(8, 63)),
    ]
    for error, said, call in cases:
        with pytest.raises(error, match=said):
            call()


@pytest.mark.parametrize("name", ["row_block_backward", "algorithm_2"])
def test_the_most_rows_fit_and_one_more_does_not(name):
    run = SCHEDULES[name]
    for T, d, B_c in ((12, 3, 1), (9, 8, 9)):
        least = run.peak(T, d, 1, B_c)
        with pytest.raises(ValueError, match=f"capacity_words.*, got {least - 1}"):
            run.rows(T, d, least - 1, B_c)
        for M in range(least, 4 * least, 7):
            rows = run.rows(T, d, M, B_c)
            assert run.peak(T, d, rows, B_c) <= M
            assert rows == T or run.peak(T, d, rows + 1, B_c) > M


# -- Bytes and seconds


def nbytes(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


def test_kernel_bytes_are_those_of_the_tensors():
    """What a launcher takes and returns. Chapters check the kernels of standard."""
    from flashlib.kernels import flash1, flash2, tables

    BLOCK_K = tables.INTERPRETER.BLOCK_K
    H, T, d, itemsize = 2, 2 * BLOCK_K + 1, 16, 2
    q, k, v = torch.randn(3, 1, H, T, d, dtype=torch.float16, device=DEVICE)
    read, found = [q, k, v], flash2.forward(q, k, v, False, 0.25)
    (transfer,) = model = flash2_model.flash2_forward_bytes(T, d, H, itemsize)
    assert transfer[2:] == (nbytes(read), nbytes(found))
    assert roofline.total_bytes(model) == nbytes([*read, *found])
    state = [torch.zeros(1, H, T, *rest, device=DEVICE) for rest in ((d,), (), ())]
    flash1.launch_forward(q, k, v, *state, False, 0.25, tables.INTERPRETER)
    (transfer,) = flash1_model.flash1_forward_bytes(T, d, H, itemsize, BLOCK_K)
    assert transfer.read_bytes == nbytes([k, v]) + 3 * nbytes([q, *state])
    assert transfer.written_bytes == 3 * nbytes(state)


@pytest.mark.parametrize("deterministic", (True, False))
def test_kernel_bytes_of_the_flash_backward_are_those_of_the_tensors(
    deterministic, monkeypatch
):
    """At a length that needs no padding of D and L."""
    from flashlib.kernels import backward

    taken = {}
    plans.PLANS.clear()

    def note(name, launch):
        def noted(*arguments):
            taken[name] = [x for x in arguments if isinstance(x, plans.Spec)]
            return launch(*arguments)

        monkeypatch.setattr(backward, name, noted)

    for name in ("launch_delta", "launch_keys", "launch_queries"):
        note(name, getattr(backward, name))
    H, T, d = 2, backward.LARGEST_BLOCK_Q, 16
    q, k, v, o, do = torch.randn(5, 1, H, T, d, dtype=torch.float16, device=DEVICE)
    lse, dlse = torch.randn(2, 1, H, T, device=DEVICE)
    backward.backward(q, k, v, o, lse, do, dlse, False, 0.25, deterministic)

    # kernel: its launcher, and what is (read, written) among the launcher's tensors; dQ
    # of the atomic form is both.
    places = {
        "delta_kernel": ("launch_delta", slice(4), slice(4, 6)),
        "queries_kernel": ("launch_queries", slice(6), slice(6, 7)),
        "keys_kernel": ("launch_keys", slice(6), slice(6, 8)),
        "fused_kernel": ("launch_keys", slice(7), slice(6, 9)),
    }
    model = backward_model.flash_backward_bytes(T, d, H, 2, deterministic)
    steps = ["D", "dK, dV", "dQ"] if deterministic else ["D", "dQ, dK, dV"]
    assert [t.step for t in model] == steps
    for transfer in model:
        launcher, read, written = places[transfer.kernel]
        assert hasattr(backward, transfer.kernel)
        tensors = taken[launcher]
        assert transfer[2:] == (nbytes(tensors[read]), nbytes(tensors[written]))


# -- The ranks of a ring


@pytest.mark.parametrize(
    "N, H, H_kv, causal", [(1, 2, 2, True), (3, 2, 1, False), (4, 4, 2, True)]
)
def test_counts_of_the_ring(N, H, H_kv, causal):
    """The chapter checks O and the pairs of each step."""
    T, d = 24, 4
    torch.manual_seed(N)
    q, k, v = (torch.randn(h, T, d, dtype=torch.float64) for h in (H, H_kv, H_kv))
    do = torch.randn_like(q)
    heads = (q[None], k[None], v[None])
    o, lse = (x[0] for x in standard.attention(*heads, causal=causal))
    wanted = gradients.gradients(*heads, do[None], causal=causal)
    for division in ring_model.DIVISIONS:
        options = {"ranks": N, "causal": causal, "division": division}
        run = ring_model.ring_forward(q.numpy(), k.numpy(), v.numpy(), **options)
        torch.testing.assert_close(torch.tensor(run["L"]), lse)
        for rank in run.ranks:
            assert rank.received_words == ring_model.ring_words(T, d, H_kv, N)
            assert rank.peak_words == ring_model.ring_peak(T, d, H, H_kv, N)
        arrays = (x.numpy() for x in (q, k, v, do, o, lse))
        run = ring_model.ring_backward(*arrays, **options)
        for name, gradient in zip(("dQ", "dK", "dV"), wanted, strict=True):
            torch.testing.assert_close(torch.tensor(run[name]), gradient[0])
        for rank in run.ranks:
            # eq-ring-backward-words: keys and values, and sums of dK and dV
            assert rank.received_words == 2 * ring_model.ring_words(T, d, H_kv, N)
            assert rank.peak_words == ring_model.ring_backward_peak(T, d, H, H_kv, N)
    with pytest.raises(ValueError, match="T: expected a multiple of"):
        ring_model.positions(T + 1, 0, N + 1)


def test_ulysses_needs_a_key_head_for_each_rank():
    """What it moves is asserted in the depth page of the chapter."""
    with pytest.raises(ValueError, match="N: expected a divisor of the 2 heads"):
        ring_model.ulysses_words(4096, 128, 16, 2, 4)
