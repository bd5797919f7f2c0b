"""The figure of a pool of pages: its owners, block tables and counts."""

import pytest
from stepper_figures import WORDS, example_pool, replay

from flashlib.paging import PagePool
from flashlib.stepper import show_pages
from flashlib.stepper.pages import BAR, COLORS, LOGICAL, PHYSICAL, SHARED_COLOR, TABLE


def blocks(panel, items):
    """{part: (rows filled, color)}; a part is (name of the sequence, number)."""
    parts, name, number = {}, None, 0
    for label, top, left, *_ in panel["parts"]:
        name, number = (label, 0) if label else (name, number + 1)
        parts[top, left] = (name, number)
    found = {}
    for item, place in items.items():
        if item:
            top, bottom, left, right, layer, color = place
            assert layer == "in" and bottom == top + 1
            found[parts[top, left]] = (round(right - left), color)
    return found


def test_figure_follows_the_pool():
    pool = example_pool()
    trace, figure = pool.trace(), show_pages(pool, **WORDS)
    size, pages = trace["page_size"], trace["pages"]
    names = list(dict.fromkeys(step["sequence"] for step in trace["steps"]))
    color = {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)}
    frames = zip(list(replay(figure))[1:], trace["steps"], figure.rows, strict=True)
    for (data, shown, panels), step, row in frames:
        tables, filled, lengths = step["tables"], step["filled"], step["lengths"]
        owners = {p: [n for n in tables if p in tables[n]] for p in range(pages)}
        expected = {}
        for page, held in owners.items():
            if held:
                one = color[held[0]] if len(held) == 1 else SHARED_COLOR
                expected[str(page), 0] = (filled[page], one)
        assert blocks(data["panels"][PHYSICAL], panels[PHYSICAL]) == expected
        assert blocks(data["panels"][LOGICAL], panels[LOGICAL]) == {
            (name, block): (min(size, lengths[name] - block * size), color[name])
            for name, table in tables.items()
            for block in range(len(table))
        }
        by_mark = {"written": set(), "read": set(), "held": set()}
        for item, mark in shown["mark"].get(str(PHYSICAL), {}).items():
            by_mark[mark].add(int(item.split(":")[0].split()[1]))
        written = {page for page, _, _ in step["written"]}
        copied = {page for page, _ in step["copied"]}
        shared = {page for page, held in owners.items() if len(held) > 1}
        assert by_mark["written"] == written and by_mark["read"] == copied
        assert by_mark["held"] == shared - written - copied

        free = sum(not held for held in owners.values())
        held, seen = sum(filled), sum(lengths.values())
        bar = {"rows": held, "open": (pages - free) * size - held}
        shown_bar = {item: x[0] for item, x in panels[BAR].items() if item}
        assert shown_bar == {item: x for item, x in bar.items() if x}
        assert panels[PHYSICAL][""] == f"{free} of {pages} pages free"
        assert row[3:] == [str(free), str(seen), str(held)] and row[1] == shown["head"]

        wide = len(data["panels"][TABLE]["columns"]) - 1
        cells = {}
        for number, name in enumerate(names):
            texts = [lengths[name], *tables[name]] if name in tables else []
            if name in step["swapped"]:
                texts = ["away"]
            cells |= {str(number * wide + i): str(x) for i, x in enumerate(texts)}
        assert panels[TABLE] == cells and data["panels"][TABLE]["rows"] == names
    sizes = "3 sequences in 8 pages of 4 slots"
    assert figure.summary == f"{sizes}; 2 rows copied; sharing saved up to 6 rows"
    assert figure.rows[2][1:] == ["Append 1 row to B", "A: 0 1; B: 0 2", "5", "13", "9"]
    assert figure.rows[5][2] == "A: swapped out; B: 0 2; C: 4"


def test_sentences_of_no_figure_of_the_book():
    """nbval compares those of the book, with all their texts."""
    pool = PagePool(2, 4, trace=True)
    pool.new("A", 0)
    pool.append("A")
    pool.append("A")
    pool.fork("A", "B")
    pool.free("A")
    said = [step["say"] for step in show_pages(pool, **WORDS).steps]
    assert said[1] == "an empty table." and said[3] == "into slot 1 of page 0, of 4."
    assert said[5] == "no page becomes free: it had none, or others still use them."


@pytest.mark.parametrize(
    "pages, size, names",
    [(8, 4, "ABC"), (13, 2, ["long name", "x"]), (1, 7, "A"), (30, 3, "AB")],
)
def test_parts_of_the_pictures_do_not_overlap(pages, size, names):
    pool = PagePool(pages, size, trace=True)
    for name in names:
        pool.new(name, 1)
    for panel in show_pages(pool, **WORDS).panels[:2]:
        boxes = [part[1:5] for part in panel["parts"]]
        for number, (top, left, rows, columns) in enumerate(boxes):
            assert left > 0 and left + columns <= panel["columns"] + 0.01
            assert top + rows <= panel["rows"]
            for y, x, _, _ in boxes[:number]:
                assert y != top or abs(x - left) >= size + 0.5


def test_refusals():
    """What every figure refuses is in test_stepper.py."""
    with pytest.raises(ValueError, match=r"pool: .* no page_size, steps"):
        show_pages({"pages": 3}, **WORDS)
    pool = PagePool(1, 1, trace=True)
    pool.new(7)
    message = "pool: name of a sequence: expected a text, got 7"
    with pytest.raises(TypeError, match=message):
        show_pages(pool, **WORDS)
