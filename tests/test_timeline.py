"""The clock of one multiprocessor: no unit is used twice, no work is lost. A step of
the hopper chapters that overwrites what is read, or waits forever, prints who does.
"""

import itertools
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlib.iomodel.hopper import STEPS, forward, work
from flashlib.timeline import (
    HOPPER,
    UNITS,
    Arrive,
    Barrier,
    Pause,
    Wait,
    recorded,
    run,
)  # fmt: skip

# Copies that take no time: what is left is who computes when.
FREE = HOPPER._replace(copy_bytes=Fraction(10**12), latency=0, launch=0, finish=0)
many = settings(derandomize=True, deadline=None, max_examples=60)

CHOICES = {"step": STEPS, "d": [64, 128, 256], "block_k": [16, 64, 128]}
CHOICES["turns"] = ["issued", "scores"]
NUMBERS = {"groups": (1, 3), "slots": (2, 4), "late": (0, 900)}
forwards = st.fixed_dictionaries(
    {"tiles": st.lists(st.integers(1, 6), min_size=1, max_size=3)}
    | {name: st.sampled_from(choices) for name, choices in CHOICES.items()}
    | {name: st.integers(*ends) for name, ends in NUMBERS.items()}
    | dict.fromkeys(("rest", "shared", "own"), st.booleans())
)


def overlapping(intervals):
    """Whether two intervals share a moment."""
    spans = sorted((x.begin, x.end) for x in intervals)
    return any(a[1] > b[0] for a, b in itertools.pairwise(spans))


@many
@given(forwards)
def test_no_unit_is_used_beyond_what_it_is(sizes):
    trace = forward(**sizes)
    moments = sorted({x.begin for x in trace.intervals})
    for unit in UNITS:
        used = [x for x in trace.intervals if x.unit == unit]
        for moment in moments:
            shares = [x.share for x in used if x.begin <= moment < x.end]
            assert sum(shares) <= 1
            assert len(set(shares)) <= 1, "agents share a unit equally"
        assert 0 < trace.busy(unit) <= 1
    copies = [x for x in trace.intervals if x.unit == "copy engine"]
    assert not overlapping(copies), "one copy at a time"
    # Next to its products an agent does one thing at a time.
    for agent in {x.agent for x in trace.intervals}:
        own = [x for x in trace.intervals if x.agent == agent]
        for units in (("", "softmax units"), ("tensor cores",)):
            assert not overlapping([x for x in own if x.unit in units])


@many
@given(forwards)
def test_all_work_is_done_and_no_more(sizes):
    trace = forward(**sizes)
    blocks, groups = sum(sizes["tiles"]), sizes["groups"]
    done = Counter()
    for x in trace.intervals:
        done[x.kind] += (x.end - x.begin) * x.share
    costs = work(sizes["d"], sizes["block_k"], rest=sizes["rest"])
    assert done["QK"] == done["PV"] == blocks * groups * costs.product
    assert done["softmax"] == blocks * groups * costs.softmax
    queries = len(sizes["tiles"]) * groups * costs.queries
    assert done["copy"] == 2 * blocks * costs.copy + queries
    # Nothing happens after the end, and something at every moment before it.
    assert trace.clocks == max(x.end for x in trace.intervals)
    worked, at = sorted(x[3:5] for x in trace.intervals if x.kind != "wait"), 0
    for begin, end in worked:
        # Only the latency of a copy passes without anybody at work.
        assert begin - at <= HOPPER.latency
        at = max(at, end)
    assert at == trace.clocks


@many
@given(forwards)
def test_the_order_within_a_block_is_that_of_attention(sizes):
    """K before QK before the softmax before PV; V before PV."""
    trace = forward(**{**sizes, "tiles": sizes["tiles"][:1]})
    begin, end = {}, {}
    for x in trace.intervals:
        begin.setdefault((x.agent, x.kind, x.label), x.begin)
        end[x.agent, x.kind, x.label] = x.end
    copied = {label: at for (_, kind, label), at in end.items() if kind == "copy"}
    for g, block in itertools.product(range(sizes["groups"]), range(sizes["tiles"][0])):
        agent = f"group {g}"
        assert copied[f"K{block}"] <= begin[agent, "QK", str(block)]
        assert end[agent, "QK", str(block)] <= begin[agent, "softmax", f"S{block}"]
        assert end[agent, "softmax", f"S{block}"] <= begin[agent, "PV", str(block)]
        assert copied[f"V{block}"] <= begin[agent, "PV", str(block)]


@pytest.mark.parametrize("step", STEPS[1:])
def test_copies_that_are_slower_than_all_else_set_the_time(step):
    slow = HOPPER._replace(copy_bytes=Fraction(1), latency=0)
    few, more = (small(step, [n], machine=slow).clocks for n in (9, 15))
    assert more - few == 6 * 2 * work(64, 64, slow).copy == 6 * 2 * 2 * 64 * 64


def test_groups_that_are_served_in_their_order_fall_into_turns_by_themselves():
    clocks = {
        step: forward(step, [30], d=64, block_k=128, machine=FREE, shared=False).clocks
        for step in ("specialized", "overlapped", "turns")
    }
    assert max(clocks.values()) - min(clocks.values()) <= 2 * 1024
    few, more = (
        forward("specialized", [n], d=64, block_k=128, machine=FREE).clocks
        for n in (29, 30)
    )
    assert more - few == 2048, "with equal shares they stay in step"


# -- Barriers


def test_a_barrier_knows_of_its_phase_whether_it_is_even():
    barrier = Barrier("b", count=2)
    # The phase before the first counts as complete.
    assert barrier.passes(1) and not barrier.passes(0)
    barrier.arrive()
    assert not barrier.passes(0), "one of two"
    barrier.arrive()
    assert barrier.passes(0) and not barrier.passes(1)
    barrier.arrive()
    barrier.arrive()
    assert barrier.passes(1), "two phases later the same parity means something else"


def test_a_wait_takes_the_time_until_the_arrival():
    done = Barrier("done")
    agents = {"a": iter([Pause("launch", 5), Arrive(done)]), "b": iter([Wait(done, 0)])}
    waits = [x[:5] for x in run(agents).intervals if x.kind == "wait"]
    assert waits == [("b", "wait", "done", 0, 5)]


# -- Bad input


def small(step, tiles, **options):
    return forward(step, tiles, d=64, block_k=64, **options)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: small("fast", [1]), "step: expected one of copies"),
        (lambda: small("turns", [1], turns="late"), "turns: expected"),
        (lambda: small("turns", [3, 0]), "tiles: expected"),
        (lambda: small("turns", [1], slots=0), "slots: .* got 0"),
        (lambda: work(0, 64), "d: expected at least 1, got 0"),
        (lambda: Barrier("b", 0), "count: expected at least 1, got 0"),
        (lambda: small("turns", [1]).busy("TMA"), "unit: expected"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_what_is_no_operation_is_refused():
    with pytest.raises(TypeError, match="a yielded 3, which is no operation"):
        run({"a": iter([3])})


def test_rows_are_whole_jobs():
    """A product that shared the tensor cores at times is one bar of the picture."""
    trace = forward("turns", [5], d=128, block_k=64)
    rows = trace.rows()
    products = [row for row in rows if row[1] in ("QK", "PV")]
    assert len(products) == 2 * 2 * 5
    assert {row[0] for row in rows} == {"producer", "group 0", "group 1"}


# -- What a GPU did

PLACES = ("start_scores: k_ring.ready", "start_values: v_ring.ready")
PLACES += ("attend: s", "attend: acc", "consume: acc", "refill: ring.empty")
# Two blocks of one group: waits for K, V, S, PV, then for V and the last product.
WAITED = [[0, 0, 10], [1, 30, 40], [2, 60, 65], [3, 150, 160]]
WAITED += [[1, 200, 205], [4, 230, 300]]


def test_a_recorded_trace_is_waits_and_what_is_between():
    trace = recorded({"group 0": WAITED, "producer": [[5, 20, 90]]}, PLACES)
    found = sorted(x[:5] for x in trace.intervals if x.agent == "group 0")
    waits = zip(["K", "V", "S", "PV", "V", "O"], WAITED, strict=True)
    expected = [("wait", label, begin, end) for label, (_, begin, end) in waits]
    expected += [
        ("QK", "", 10, 65),
        ("PV", "", 65, 160),
        ("PV", "", 205, 300),
        ("issue", "", 10, 30),
        ("issue", "", 40, 60),
        ("softmax", "", 65, 150),
        ("softmax", "", 160, 200),
        ("issue", "", 205, 230),
    ]
    assert found == sorted(("group 0", *x) for x in expected)
    assert trace.clocks == 300
    assert ("producer", "wait", "slot", 20.0, 90.0) in trace.rows()


def test_a_recorded_trace_needs_known_places():
    with pytest.raises(ValueError, match=r"scopes: expected some of .*, got .'here'"):
        recorded({"group 0": [[0, 0, 1]]}, ["here"])
