"""The figure of a pool of pages retells the pool: every page with its owners, every table, every count."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stepper import WORDS, parsed, replay

from flashlib.iomodel.paging import NoRoom, PagePool
from flashlib.stepper import show_pages
from flashlib.stepper.frame import MOST_STEPS
from flashlib.stepper.pages import BAR, COLOURS, LOGICAL, PHYSICAL, SHARED_COLOUR, TABLE


def example():
    """All six actions, with a copy on write, a page shared to the end and pages that come back."""
    pool = PagePool(8, 4, trace=True)
    pool.new("A", 6)
    pool.fork("A", "B")
    pool.append("B")
    pool.append("A", 3)
    pool.new("C", 4)
    pool.swap_out("A")
    pool.append("C")
    pool.swap_in("A")
    pool.free("B")
    return pool


def blocks(panel, items, part_of):
    """{(name of the part, row of it): (rows filled, colour)} of a picture."""
    found = {}
    for top, bottom, left, right, layer, colour in (place for item, place in items.items() if item):
        assert layer == "in" and bottom == top + 1
        found[part_of(panel, top, left)] = (round(right - left), colour)
    return found


def page_of(panel, top, left):
    (name,) = (name for name, y, x, *_ in panel["parts"] if (y, x) == (top, left))
    return int(name)


def block_of(panel, top, left):
    """(sequence, block): the parts of a sequence follow each other, the first has its name."""
    sequence, block = None, 0
    for name, y, x, *_ in panel["parts"]:
        sequence, block = (name, 0) if name else (sequence, block + 1)
        if (y, x) == (top, left):
            return sequence, block
    raise AssertionError("the block lies in no part")


def assert_retells(pool):
    trace, figure = pool.trace(), show_pages(pool, **WORDS)
    frames = list(replay(figure))
    size, names = trace["page_size"], list(dict.fromkeys(step["sequence"] for step in trace["steps"]))
    assert len(frames) == len(trace["steps"]) + 1 == len(figure.rows) + 1
    for (data, shown, panels), step, row in zip(frames[1:], trace["steps"], figure.rows, strict=True):
        tables = step["tables"]
        owners = {p: [n for n, table in tables.items() if p in table] for p in range(trace["pages"])}
        colour = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
        assert blocks(data["panels"][PHYSICAL], panels[PHYSICAL], page_of) == {
            page: (step["filled"][page], colour[held[0]] if len(held) == 1 else SHARED_COLOUR)
            for page, held in owners.items()
            if held
        }
        assert blocks(data["panels"][LOGICAL], panels[LOGICAL], block_of) == {
            (name, block): (min(size, step["lengths"][name] - block * size), colour[name])
            for name, table in tables.items()
            for block in range(len(table))
        }
        marks = shown["mark"].get(str(PHYSICAL), {})
        by_mark = {
            mark: {int(item.split(":")[0].split()[1]) for item in marks if marks[item] == mark}
            for mark in ("written", "read", "held")
        }
        written = {page for page, _, _ in step["written"]}
        assert by_mark["written"] == written
        assert by_mark["read"] == {page for page, _ in step["copied"]}
        shared = {page for page, held in owners.items() if len(held) > 1}
        assert by_mark["held"] == shared - written - by_mark["read"]

        free = sum(not held for held in owners.values())
        held, seen = sum(step["filled"]), sum(step["lengths"].values())
        opened = (trace["pages"] - free) * size - held
        bar = {item: content[0] for item, content in panels[BAR].items() if item}
        assert bar == {k: v for k, v in (("rows", held), ("open", opened)) if v}
        assert panels[BAR][""].startswith(f"{held} row") and panels[BAR][""].endswith(f"{free * size} free")
        assert panels[PHYSICAL][""] == f"{free} of {trace['pages']} pages free"
        assert row[3:] == [str(free), str(seen), str(held)] and row[1] == shown["head"]

        wide = len(data["panels"][TABLE]["columns"]) - 1
        cells = {int(item): text for item, text in panels[TABLE].items() if item}
        expected = {}
        for number, name in enumerate(names):
            if name in tables:
                texts = [step["lengths"][name], *tables[name]]
                expected |= {number * wide + place: str(text) for place, text in enumerate(texts)}
            elif name in step["swapped"]:
                expected[number * wide] = "away"
        assert cells == expected and data["panels"][TABLE]["rows"] == names
    return figure


def test_figure_retells_the_pool():
    figure = assert_retells(example())
    assert figure.summary == "3 sequences in 8 pages of 4 slots; 2 rows copied; sharing saved up to 6 rows"
    assert figure.rows[2][1:] == ["Append 1 row to B", "A: 0 1; B: 0 2", "5", "13", "9"]
    assert figure.rows[5][2] == "A: swapped out; B: 0 2; C: 4"


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 7), st.integers(1, 5), st.data())
def test_figure_retells_any_pool(pages, size, data):
    pool = PagePool(pages, size, trace=True)
    pool.new("A", data.draw(st.integers(0, size)))
    for number in range(data.draw(st.integers(0, 12))):
        action = data.draw(
            st.sampled_from(["new", "append", "append", "fork", "free", "swap_out", "swap_in"])
        )
        away = list(pool.trace()["steps"][-1]["swapped"])
        if action == "new":
            known, arguments = [f"S{number}"], (data.draw(st.integers(0, 2 * size)),)
        else:
            known, arguments = (away if action == "swap_in" else list(pool.names)), ()
        if not known:
            continue
        if action == "append":
            arguments = (data.draw(st.integers(1, 2 * size)),)
        if action == "fork":
            arguments = (f"S{number}",)
        try:
            getattr(pool, action)(data.draw(st.sampled_from(known)), *arguments)
        except NoRoom:
            continue
    assert_retells(pool)


def test_sentences():
    said = [(step["head"], step["say"]) for step in show_pages(example(), **WORDS).data["steps"]]
    assert said == [
        ("Start", "every page is free."),
        ("New A, 6 rows", "6 rows written to pages 0 and 1."),
        ("Fork B from A", "the table is copied. No row is copied, no page taken."),
        (
            "Append 1 row to B",
            "page 1 is shared. First 2 rows copied to page 2, then 1 row written to page 2.",
        ),
        ("Append 3 rows to A", "3 rows written to pages 1 and 3."),
        ("New C, 4 rows", "4 rows written to page 4."),
        ("Swap A out", "9 rows copied to the other memory; pages 1 and 3 are free again."),
        ("Append 1 row to C", "into slot 0 of page 1, which is new."),
        ("Swap A in", "9 rows brought back; 9 rows written to pages 3, 5 and 6."),
        ("Free B", "pages 0 and 2 are free again."),
    ]
    pool = PagePool(2, 4, trace=True)
    pool.new("A", 0)
    pool.append("A")
    pool.append("A")
    pool.fork("A", "B")
    pool.free("A")
    told = [step["say"] for step in show_pages(pool, **WORDS).data["steps"][1:]]
    assert told[0] == "an empty table." and told[2] == "into slot 1 of page 0, of 4."
    assert told[4] == "no page becomes free: it had none, or others have them too."


def test_pictures_have_room_for_everything():
    """Names do not run into each other, and no part overlaps another."""
    for pages, size, names in ((8, 4, "ABC"), (13, 2, ["long name", "x"]), (1, 7, "A"), (30, 3, "AB")):
        pool = PagePool(pages, size, trace=True)
        for name in names:
            if pool.free_pages:
                pool.new(name, 1)
        for panel in show_pages(pool, **WORDS).data["panels"][:2]:
            boxes = [(top, left, rows, columns) for _, top, left, rows, columns, _, _ in panel["parts"]]
            assert len(set(boxes)) == len(boxes)
            for top, left, rows, columns in boxes:
                assert left > 0 and left + columns <= panel["columns"] + 0.01 and top + rows <= panel["rows"]
                for y, x, _, _ in boxes:
                    assert y != top or x == left or abs(x - left) >= size + 0.5


def test_figure_is_the_same_every_time_and_takes_a_trace():
    pool = example()
    html = show_pages(pool, **WORDS)._repr_html_()
    assert html == show_pages(json.loads(json.dumps(pool.trace())), **WORDS)._repr_html_()
    assert parsed(show_pages(pool, **WORDS)).details.has_attr("open")


def long():
    pool = PagePool(1, 1, trace=True)
    for number in range(MOST_STEPS + 1):
        pool.new(f"{number}")
    return pool


def numbered():
    pool = PagePool(1, 1, trace=True)
    pool.new(7)
    return pool


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda: show_pages(7, **WORDS), TypeError, "pool must be a trace"),
        (lambda: show_pages({"pages": 3}, **WORDS), ValueError, "without page_size, steps"),
        (lambda: show_pages(PagePool(1, 1, trace=True), **WORDS), ValueError, "pool has a trace without"),
        (lambda: show_pages(PagePool(1, 1), **WORDS), RuntimeError, "trace=True"),
        (lambda: show_pages(numbered(), **WORDS), TypeError, "sequences by texts, got 7"),
        (lambda: show_pages(long(), **WORDS), ValueError, f"expected at most {MOST_STEPS}"),
        (lambda: show_pages(example(), title="", alt="x"), ValueError, "title must say"),
    ],
)  # fmt: skip
def test_wrong_argument_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()
