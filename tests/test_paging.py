"""Pages and stretches: every row is in its place, and every slot is counted."""

import json
import random

import numpy as np
import pytest

from flashlib import paging
from flashlib.paging import NoRoom, PagePool, Stretches, serve

NAMES = "ABC"
ACTIONS = [
    "new",
    "free",
    "swap_out",
    "swap_in",
    *2 * ["append", "write"],
    *3 * ["fork"],
]


class Contents:
    """The rows in the slots of a pool, as its trace says: "A0", "A1", ..."""

    def __init__(self, pool):
        self.slots = [[None] * pool.page_size for _ in range(pool.pages)]
        self.rows = {}  # {sequence: its rows}, as they should be
        self.away = {}
        self.made = 0

    def follow(self, step):
        name, action = step["sequence"], step["action"]
        if action == "fork":
            self.rows[name] = list(self.rows[step["source"]])
        if action in ("free", "swap_out"):
            gone = self.rows.pop(name)
            if action == "swap_out":
                self.away[name] = gone
        if action == "swap_in":
            new = self.away.pop(name)
            self.rows[name] = list(new)
        elif action in ("new", "append", "write"):
            new = [f"{name}{self.made + i}" for i in range(step["tokens"])]
            self.made += len(new)
            held = self.rows.setdefault(name, [])
            first = len(held) // 2 if action == "write" else len(held)
            held[first : first + len(new)] = new
        else:
            new = []
        for page, copy in step["copied"]:
            self.slots[copy] = list(self.slots[page])
        for page, start, end in step["written"]:
            self.slots[page][start:end], new = new[: end - start], new[end - start :]
        assert not new, "every new row was written somewhere"


def act(pool, action, name, other, tokens):
    """Do what an action says where the pool allows it."""
    if action in ("new", "append"):
        getattr(pool, action)(name, tokens if action == "new" else tokens + 1)
    elif action == "fork":
        pool.fork(name, other)
    elif action == "write":
        pool.write(name, pool.length(name) // 2, tokens + 1)
    else:
        getattr(pool, action)(name)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_where_the_table_says(seed):
    rng = random.Random(seed)
    pages, page_size = rng.randint(1, 15), rng.randint(1, 4)
    pool = PagePool(pages, page_size, trace=True)
    contents, copied, swapped = Contents(pool), 0, 0
    for _ in range(60):
        steps = pool.trace()["steps"]
        held = {name: (pool.table(name), pool.length(name)) for name in pool.names}
        try:
            names = rng.choices(NAMES, k=2)
            act(pool, rng.choice(ACTIONS), *names, rng.randint(0, 2 * page_size))
        except NoRoom as error:
            assert error.asked > error.free == pool.free_pages
            said = f"{error.asked} pages of {page_size} slots are asked for, {error.free} of {pages} are free"
            assert str(error) == said
        except ValueError as error:
            assert str(error).startswith("sequence: expected")
        tables = {name: pool.table(name) for name in pool.names}
        if len(pool.trace()["steps"]) == len(steps):  # refused: nothing has changed
            now = {name: (tables[name], pool.length(name)) for name in tables}
            assert held == now and pool.trace()["steps"] == steps
            continue
        step = pool.trace()["steps"][-1]
        references = steps[-1]["references"] if steps else [0] * pages
        for page, _, _ in step["written"]:
            assert references[page] < 2, "a shared page is written"
        for page, _ in step["copied"]:
            assert references[page] > 1, "a page of one sequence is copied"
            assert steps[-1]["filled"][page] < page_size or step["action"] == "write"
        contents.follow(step)
        assert step["swapped"] == {x: len(y) for x, y in contents.away.items()}
        copied += sum(steps[-1]["filled"][page] for page, _ in step["copied"])
        swapped += step["tokens"] if step["action"].startswith("swap") else 0
        for name, table in tables.items():
            rows = [
                contents.slots[table[t // page_size]][t % page_size]
                for t in range(pool.length(name))
            ]
            assert rows == contents.rows[name]
            assert len(table) == -(-len(rows) // page_size) == len(set(table))
        owners = [
            sum(page in table for table in tables.values()) for page in range(pages)
        ]
        assert owners == list(pool.references) == step["references"]
        assert pool.free_slots == owners.count(0) * page_size
        assert [filled > 0 for filled in step["filled"]] == [n > 0 for n in owners]
        assert pool.held_rows == sum(step["filled"])
        assert (pool.copied_rows, pool.swapped_rows) == (copied, swapped)
    for name in pool.names:
        pool.free(name)
    assert pool.free_pages == pages and pool.held_rows == 0, "every page comes back"


def test_trace_is_plain_and_only_kept_when_asked_for():
    pool = PagePool(2, 2, trace=True)
    pool.new("A", 3)
    trace = pool.trace()
    assert json.loads(json.dumps(trace)) == trace
    assert trace["steps"][0]["written"] == [[0, 0, 2], [1, 0, 1]]
    with pytest.raises(RuntimeError, match="trace=True"):
        PagePool(2, 2).trace()


# -- Stretches


def test_first_hole_that_is_large_enough():
    memory = Stretches(10, [3, 4, 3, 2, 5])
    for name in range(3):
        memory.new(name, 1)
    assert memory.holes == []
    memory.free(0)
    memory.free(2)
    assert memory.holes == [(0, 3), (7, 3)] and memory.free_slots == 6
    message = "5 consecutive slots are asked for, 6 of 10 are free, at most 3"
    with pytest.raises(NoRoom, match=message):
        memory.new(4, 1)
    memory.new(3, 2)
    assert memory.holes == [(2, 1), (7, 3)]
    with pytest.raises(ValueError, match="free slot, got 3"):
        memory.append(3)


# -- Serving

TRACES = [
    paging.requests(40, every=every, prompt=9, output=14, longest=60, seed=seed)
    for every, seed in ((0.5, 0), (3, 1), (20, 2))
]


def memories(trace, slots=120):
    return {
        "longest": Stretches(slots, [60] * len(trace)),
        "exact": Stretches(slots, [request.rows for request in trace]),
        **{f"pages of {size}": PagePool(slots // size, size) for size in (1, 4, 12)},
    }


@pytest.mark.parametrize("number", range(len(TRACES)))
def test_every_slot_is_told_at_every_step(number):
    trace = TRACES[number]
    for name, memory in memories(trace).items():
        served = serve(trace, memory)
        told = served.held + served.later + served.never + served.free
        assert (told == 120).all(), name
        assert min(x.min() for x in served[:7]) >= 0
        assert (served.stranded <= served.free).all()
        assert served.finished.max() == served.steps - 1
        assert (served.finished >= [r.arrival + r.output - 1 for r in trace]).all()
        assert memory.free_slots == 120, "everything comes back"
        most = {"longest": 60, "exact": 0}.get(name, 12)
        assert (served.never <= most * served.running).all()
        if name == "pages of 1":
            assert not np.any([served.never, served.later, served.stranded])
        if isinstance(memory, Stretches):
            assert served.evictions == served.evicted == 0


def test_without_contention_nobody_waits():
    trace = TRACES[1]
    served = serve(trace, PagePool(10_000, 4))
    assert (served.finished == [r.arrival + r.output - 1 for r in trace]).all()
    assert not served.waiting.any() and served.evictions == 0
    rows = np.zeros(served.steps, dtype=int)
    for r in trace:  # prompt rows at arrival, one more at each further token
        rows[r.arrival : r.arrival + r.output] += r.prompt + np.arange(r.output)
    assert (served.held == rows).all()


def test_last_one_in_goes_first_and_comes_back_before_who_waits():
    served = serve([(0, 2, 5), (0, 2, 4), (1, 4, 1)], PagePool(6, 1))
    # The second goes in step 2 with three rows, returns with three in step 5; the third
    # had come in step 1.
    assert served.held.tolist() == [4, 6, 4, 5, 6, 3, 4, 5, 4]
    assert served.waiting.tolist() == [0, 1, 2, 2, 2, 1, 1, 1, 0]
    assert served.running.tolist() == [2, 2, 1, 1, 1, 1, 1, 1, 1]
    assert served.finished.tolist() == [4, 7, 8]
    assert (served.evictions, served.evicted) == (1, 3)


def test_spare_slots_save_evictions_and_starve_nobody():
    trace, counted = TRACES[0], []
    for spare in (0, 12, 120):
        served = serve(trace, PagePool(60, 2), spare=spare)
        crowded = served.running > 1
        assert served.evictions == 0 if spare == 120 else crowded.any()
        assert (served.finished < served.steps).all()
        counted.append(served.evictions)
    assert counted == sorted(counted, reverse=True) and counted[0] > counted[1]
    assert (served.running <= 1).all(), "one at a time"


def test_order_of_arrival_is_kept():
    # The third would fit at once, and waits for the second.
    trace = [(0, 6, 5), (1, 4, 5), (1, 1, 1)]
    served = serve(trace, Stretches(12, [10, 8, 1]))
    assert served.finished.tolist() == [4, 9, 5]
    assert served.waiting.tolist()[:5] == [0, 2, 2, 2, 2]
    assert not served.stranded.any(), "two slots are free, the second asks for eight"


def test_holes_strand_slots():
    trace = [(0, 3, 1), (0, 1, 6), (0, 3, 1), (1, 5, 2)]
    served = serve(trace, Stretches(12, [3, 6, 3, 6]))
    assert served.free[1] == served.stranded[1] == 6, "three and three lie apart"
    assert serve(trace, PagePool(12, 1)).stranded.max() == 0


def test_requests_are_seeded_and_within_bounds():
    sizes = {"every": 4, "prompt": 20, "output": 30, "longest": 90}
    made = paging.requests(500, **sizes, seed=3)
    assert made == paging.requests(500, **sizes, seed=3)
    assert made != paging.requests(500, **sizes, seed=4)
    assert all(r.prompt >= 1 and r.output >= 1 and r.rows <= 90 for r in made)
    assert max(r.rows for r in made) == 90, "some are cut"
    arrivals = [r.arrival for r in made]
    assert arrivals == sorted(arrivals) and 3 < arrivals[-1] / 500 < 5


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda: PagePool(0, 4), ValueError, "pages: expected at least 1, got 0"),
        (lambda: PagePool(4, 2.0), TypeError, "page_size: expected an integer, got float"),
        (lambda: PagePool(4, 2).append("A"), ValueError, "freed, got 'A'"),
        (lambda: PagePool(4, 2).swap_in("A"), ValueError, "swapped out, got 'A'"),
        (lambda: Stretches(4, [0]), ValueError, r"sizes\[0\]: expected at least 1"),
        (lambda: Stretches(4, [2]).new(0, 3), ValueError, "tokens: expected 0 to the 2"),
        (lambda: serve([(0, 5, 5)], PagePool(2, 4)), ValueError, r"requests\[0\].* 9 rows.*12 of 8"),
        (lambda: serve([(0, 5, 5)], Stretches(20, [8])), ValueError, "8 of 20 slots"),
        (lambda: serve([(0, 0, 5)], PagePool(2, 4)), ValueError, "at least one token"),
        (lambda: serve([], PagePool(2, 4), spare=-1), ValueError, "spare: expected at least 0"),
    ],
)  # fmt: skip
def test_wrong_argument_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()
