"""Pages and stretches: every row is in its place, and every slot is counted."""

import copy
import json
import random

import numpy as np
import pytest

from flashlib import paging
from flashlib.paging import NoRoom, PagePool, Stretches, serve

# -- Any calls, of which many are refused

WRONG = (True, 1.0, None, "1", np.int64(1))  # no counts
COUNTS = (*range(-1, 10), *4 * (1, 2, 3), *WRONG)


def state(memory):
    """All that a memory knows; of its trace only how long it is."""
    own = dict(vars(memory))
    return copy.deepcopy(own | {"_steps": len(own.get("_steps", ()))})


def refused(memory, reasons, action, *arguments):
    """Call a method and return its error, or None: one of these reasons and nothing has
    changed, or no error where there are no reasons.
    """
    before = state(memory)
    try:
        getattr(memory, action)(*arguments)
    except Exception as error:
        assert type(error) in reasons and state(memory) == before, repr(error)
        return error
    assert not reasons, f"{action}{arguments} is not refused"
    return None


def of_count(value, least=0, most=99):
    """Why a count is refused."""
    if type(value) is not int:
        return {TypeError}
    return set() if least <= value <= most else {ValueError}


class Model:
    """What a pool should hold: the rows of its sequences, each row a number."""

    def __init__(self, pool):
        self.pool, self.size = pool, pool.page_size
        self.rows, self.away = {}, {}
        self.slots = [[None] * self.size for _ in range(pool.pages)]
        self.made = self.copied = self.swapped = 0

    def fitting(self, action):
        """The names with which an action is possible."""
        new = [name for name in "ABCD" if name not in {**self.rows, **self.away}]
        names = {"new": new, "swap_in": self.away, "free": {**self.rows, **self.away}}
        return [*names.get(action, self.rows)]

    def refusal(self, action, name, arguments):
        """``(reasons, pages)``: why the pool should refuse a call, and how many pages
        it needs where nothing but their number is wrong.
        """
        rows, size = len(self.rows.get(name, ())), self.size
        reasons = set() if name in self.fitting(action) else {ValueError}
        start, tokens = rows, 0
        if action == "fork" and arguments[0] not in self.fitting("new"):
            reasons |= {ValueError}
        if action in ("new", "append", "write"):
            *starts, tokens = arguments
            reasons |= of_count(tokens, least=action == "append")
            for start in starts:
                reasons |= of_count(start, most=rows)
        if reasons:
            return reasons, 0
        tokens = len(self.away[name]) if action == "swap_in" else tokens
        table = self.pool.table(name) if name in self.rows else ()
        touched = range(start // size, -(-(start + tokens) // size) if tokens else 0)
        owners = self.pool.references
        pages = sum(n >= len(table) or owners[table[n]] > 1 for n in touched)
        return ({NoRoom} if pages > self.pool.free_pages else set()), pages

    def follow(self, action, name, arguments, step, owners):
        """Do the same; owners are the references before."""
        new = []
        if action in ("new", "append", "write"):
            new = range(self.made, self.made + arguments[-1])
            rows = self.rows.setdefault(name, [])
            start = arguments[0] if action == "write" else len(rows)
            rows[start : start + len(new)] = new
        elif action == "swap_in":
            new = self.rows[name] = self.away.pop(name)
        elif action == "swap_out":
            self.away[name] = self.rows.pop(name)
        elif action == "fork":
            self.rows[arguments[0]] = list(self.rows[name])
        else:
            (self.rows if name in self.rows else self.away).pop(name)
        self.made += len(new)
        self.swapped += step["tokens"] if action.startswith("swap") else 0
        for page, copied in step["copied"]:
            assert owners[page] > 1, "a page of one sequence is copied"
            self.slots[copied] = list(self.slots[page])
            self.copied += sum(x is not None for x in self.slots[page])
        new = list(new)
        for page, start, end in step["written"]:
            self.slots[page][start:end], new = new[: end - start], new[end - start :]
        assert not new, "every new row was written somewhere"
        for page in step["released"]:
            self.slots[page] = [None] * self.size

    def check(self, step):
        """Every row is where the table says, and all that is counted is right."""
        pool, filled = self.pool, [0] * self.pool.pages
        assert set(pool.names) == set(self.rows)
        tables = {name: pool.table(name) for name in pool.names}
        for name, table in tables.items():
            rows = [self.slots[page][t] for page in table for t in range(self.size)]
            assert rows[: pool.length(name)] == self.rows[name]
            assert pool.allocated(name) == pool.rounded(pool.length(name)) == len(rows)
            assert len(table) == len(set(table))
            for n, page in enumerate(table):
                filled[page] = min(self.size, pool.length(name) - n * self.size)
        owners = [sum(page in x for x in tables.values()) for page in range(pool.pages)]
        assert owners == list(pool.references) == step["references"]
        assert pool.free_slots == pool.free_pages * self.size
        assert pool.free_pages == owners.count(0)
        assert filled == step["filled"] and pool.held_rows == sum(filled)
        assert filled == [sum(x is not None for x in page) for page in self.slots]
        assert step["swapped"] == {x: len(y) for x, y in self.away.items()}
        assert step["tables"] == {name: list(table) for name, table in tables.items()}
        assert step["lengths"] == {name: len(rows) for name, rows in self.rows.items()}
        assert (pool.copied_rows, pool.swapped_rows) == (self.copied, self.swapped)
        assert pool.empty == (not self.rows and not self.away)


CHANGES = ("new", "append", "write", "fork", "free", "swap_out", "swap_in")
ACTIONS = (
    *CHANGES,
    *2 * ("new", "append", "write", "write", "fork"),
    "length",
    "table",
)


@pytest.mark.parametrize("seed", range(60))
def test_any_calls_of_a_pool(seed):
    rng = random.Random(seed)

    def name_for(action):
        """One that fits, with a few exceptions."""
        fitting = model.fitting(action)
        return rng.choice(fitting if fitting and rng.random() < 0.9 else "ABCD")

    pages, page_size = rng.randint(1, 20), rng.randint(1, 4)
    pool = PagePool(pages, page_size, trace=True)
    model = Model(pool)
    for action in rng.choices(ACTIONS, k=80):
        name, (start, tokens) = name_for(action), rng.choices(COUNTS, k=2)
        if rng.random() < 0.5:
            start = rng.randint(0, len(model.rows.get(name, ())))
        arguments = {
            "new": (tokens,), "append": (tokens,), "write": (start, tokens),
            "fork": (name_for("new"),),
        }.get(action, ())  # fmt: skip
        reasons, asked = model.refusal(action, name, arguments)
        free, owners = pool.free_pages, pool.references
        error = refused(pool, reasons, action, name, *arguments)
        if isinstance(error, NoRoom):
            assert (error.asked, error.free) == (asked, free)
            said = f"{asked} pages of {page_size} slots are asked for, "
            said += f"{free} of {pages} are free"
            assert str(error) == said
        if error is None and action in CHANGES:
            step = pool.trace()["steps"][-1]
            named = arguments[0] if action == "fork" else name
            assert (step["action"], step["sequence"]) == (action, named)
            taken = [page for _, page in step["copied"]]
            taken += [page for page, _, _ in step["written"] if not owners[page]]
            lowest = [page for page in range(pages) if not owners[page]]
            assert sorted({*taken}) == lowest[:asked]
            model.follow(action, name, arguments, step, owners)
            model.check(step)
    for name in (*model.rows, *model.away):
        pool.free(name)
    assert pool.empty and pool.free_pages == pages and pool.held_rows == 0


STRETCH_ACTIONS = ("new", "append", "append", "append", "free", "length", "allocated")


@pytest.mark.parametrize("seed", range(40))
def test_any_calls_of_stretches(seed):
    rng = random.Random(seed)
    slots, sizes = rng.randint(1, 12), rng.choices(range(1, 5), k=rng.randint(0, 5))
    memory, rows, owner = Stretches(slots, sizes), {}, [None] * slots
    for action in rng.choices(STRETCH_ACTIONS, k=60):
        fitting = [n for n in range(len(sizes)) if (n in rows) == (action != "new")]
        name = rng.choice(fitting * (rng.random() < 0.9) or [-1, *range(6), *WRONG])
        tokens = rng.choice(COUNTS)
        arguments = (tokens,) if action == "new" else ()
        reasons = of_count(name, most=len(sizes) - 1)
        if not reasons:
            reasons |= {ValueError} if (action == "new") == (name in rows) else set()
            reasons |= of_count(tokens, most=sizes[name]) if action == "new" else set()
            if action == "append" and rows.get(name) == sizes[name]:
                reasons |= {ValueError}
        if not reasons and action == "new":
            free = (owner[n : n + sizes[name]] for n in range(slots))
            holes = [n for n, x in enumerate(free) if x == [None] * sizes[name]]
            reasons = set() if holes else {NoRoom}
        if refused(memory, reasons, action, name, *arguments) is None:
            if action == "new":
                rows[name] = tokens
                owner[holes[0] : holes[0] + sizes[name]] = [name] * sizes[name]
            elif action == "append":
                rows[name] += 1
            elif action == "free":
                del rows[name]
                owner = [None if x == name else x for x in owner]
        assert {x: memory.length(x) for x in rows} == rows
        assert memory.empty == (not rows) and memory.free_slots == owner.count(None)
        free = [n for first, wide in memory.holes for n in range(first, first + wide)]
        assert free == [n for n in range(slots) if owner[n] is None]


# -- Pages


def test_trace_is_plain_and_only_kept_when_asked_for():
    pool = PagePool(3, 2, trace=True)
    pool.new("A", 3)
    pool.fork("A", "B")
    assert pool.write("B", 2, 2) == [(1, 2)]
    trace = pool.trace()
    assert json.loads(json.dumps(trace)) == trace
    assert trace["steps"][0]["written"] == [[0, 0, 2], [1, 0, 1]]
    assert trace["steps"][2]["copied"] == [[1, 2]]
    with pytest.raises(RuntimeError, match="trace=True"):
        PagePool(2, 2).trace()


@pytest.mark.parametrize("tokens", [0, 1, 3, 4])
@pytest.mark.parametrize("length", [0, 3, 4])
def test_pages_that_appends_to_several_sequences_take(length, tokens):
    for names in ("A", "AB", "BC", "ABC", "ABCD"):
        pool = PagePool(20, 4)
        pool.new("A", length)
        pool.fork("A", "B")
        pool.fork("A", "C")
        pool.new("D", 2)
        asked, free = pool.pages_to_append(names, tokens), pool.free_pages
        for name in names:
            pool.write(name, pool.length(name), tokens)
        assert free - pool.free_pages == asked


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


def away():
    pool = PagePool(2, 4)
    pool.new("A")
    pool.swap_out("A")
    return pool


def placed():
    memory = Stretches(4, [2])
    memory.new(0)
    return memory


def draw(**changes):
    sizes = {"count": 3, "every": 2, "prompt": 4, "output": 4, "longest": 9, "seed": 0}
    return paging.requests(**sizes | changes)


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda: PagePool(0, 4), ValueError, "pages: expected at least 1, got 0"),
        (lambda: PagePool(4, 2.0), TypeError,
         "page_size: expected an integer, got float"),
        (lambda: PagePool(4, 2).append("A"), ValueError, "freed, got 'A'"),
        *(
            (lambda do=do: do(PagePool(4, 2)), TypeError,
             "sequence: expected a name that can be hashed, got list")
            for do in (
                lambda pool: pool.new([1]), lambda pool: pool.table([1]),
                lambda pool: pool.free([1]), lambda pool: pool.swap_in([1]),
            )
        ),
        (lambda: PagePool(4, 2).swap_in("A"), ValueError, "swapped out, got 'A'"),
        (lambda: Stretches(4, [0]), ValueError, r"sizes\[0\]: expected at least 1"),
        (lambda: PagePool(4, 2).rounded(-1), ValueError, "rows: expected at least 0"),
        (lambda: away().append("A"), ValueError,
         "sequence: expected one that is not swapped out, got 'A'"),
        (lambda: Stretches(4, [2]).new(0, 3), ValueError, "tokens: expected at most 2"),
        (lambda: Stretches(4, [2]).new(1), ValueError, "sequence: expected at most 0"),
        (lambda: Stretches(4, [2]).free(0), ValueError,
         "sequence: expected a request with a stretch, got 0"),
        (lambda: serve([(0, 5, 5)], PagePool(2, 4)), ValueError,
         r"requests\[0\].* 9 rows.*12 of 8"),
        (lambda: serve([(0, 5, 5)], Stretches(20, [8])), ValueError, "8 of 20 slots"),
        (lambda: serve([(0, 1, 1), (0, 1, 1)], Stretches(4, [2])), ValueError,
         r"requests\[1\].* for 0 of 4 slots"),
        (lambda: serve([(0, 0, 5)], PagePool(2, 4)), ValueError,
         r"requests\[0\].prompt: expected at least 1"),
        (lambda: serve([(0, 1, 1.0)], PagePool(2, 4)), TypeError,
         r"requests\[0\].output: expected an integer"),
        (lambda: serve([(np.inf, 1, 1)], PagePool(2, 4)), TypeError,
         r"requests\[0\].arrival: expected an integer"),
        (lambda: serve([(-1, 1, 1)], PagePool(2, 4)), ValueError,
         r"requests\[0\].arrival: expected at least 0"),
        (lambda: serve([(0, 1)], PagePool(2, 4)), TypeError,
         r"requests\[0\]: expected \(arrival, prompt, output\)"),
        (lambda: serve([], away()), ValueError, "memory: expected an empty one"),
        (lambda: serve([], placed()), ValueError, "memory: expected an empty one"),
        (lambda: serve([], 8), TypeError,
         "memory: expected a PagePool or Stretches, got int"),
        (lambda: serve([], PagePool(2, 4), spare=-1), ValueError,
         "spare: expected at least 0"),
        (lambda: draw(count=2.0), TypeError, "count: expected an integer"),
        (lambda: draw(every=np.nan), ValueError,
         "every: expected a finite number of at least 0"),
        (lambda: draw(prompt=0), ValueError,
         "prompt: expected a finite number of at least 1"),
        (lambda: draw(output="2"), TypeError, "output: expected a number, got str"),
        (lambda: draw(longest=0), ValueError, "longest: expected at least 1"),
        (lambda: draw(seed=None), TypeError, "seed: expected an integer"),
    ],
)  # fmt: skip
def test_wrong_argument_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()
