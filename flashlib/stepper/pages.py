"""A pool of pages: which sequence holds which page, what is shared, copied, freed and swapped."""

from flashlib.stepper.frame import Figure, count_text, require

# One for each sequence; the others are taken by marks.
COLOURS = (1, 2, 3, 6, 4, 5, 7)
SHARED_COLOUR, ROWS_COLOUR, OPEN_COLOUR = 8, 9, 8
LOGICAL, PHYSICAL, BAR, TABLE = range(4)


def show_pages(pool, *, title, alt):
    """A figure that steps through a pool of pages: the rows of each sequence, the pages, the block tables.

    pool        a :class:`flashlib.iomodel.paging.PagePool` made with ``trace=True``, after what it did; or
                what its ``trace()`` returned. Its sequences are named by texts
    title, alt  the line above the figure; what it shows, for those who do not see it

    Raises TypeError and ValueError for other arguments, an empty trace, or one too long to step through.
    """
    trace = pool.trace() if callable(getattr(pool, "trace", None)) else pool
    require("pool", trace, ("pages", "page_size", "steps"))
    steps, pages, size = trace["steps"], trace["pages"], trace["page_size"]
    if not steps:
        raise ValueError("pool has a trace without a step: there is nothing to step through")
    names = list(dict.fromkeys(step["sequence"] for step in steps))
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise TypeError(f"pool must name its sequences by texts, got {name!r}")
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    blocks = max((len(table) for step in steps for table in step["tables"].values()), default=0) or 1
    places = _Places(names, blocks, pages, size)

    start = {LOGICAL: {"": "no sequence yet"}, PHYSICAL: {"": _free_text(pages, pages)}}
    start |= {BAR: {"": _slots_text(0, 0, pages * size)}}
    shown = [{"head": "Start", "say": "every page is free.", "line": None, "set": start, "mark": {}}]
    rows, drawn, cells, most_shared = [], {LOGICAL: {}, PHYSICAL: {}}, {}, 0
    for number, step in enumerate(steps, start=1):
        held, seen = sum(step["filled"]), sum(step["lengths"].values())
        taken = sum(owners > 0 for owners in step["references"])
        opened, most_shared = taken * size - held, max(most_shared, seen - held)
        change, mark = {BAR: _bar(held, opened)}, {}
        change[BAR][""] = _slots_text(held, opened, (pages - taken) * size)
        for panel, now in zip((LOGICAL, PHYSICAL), places.drawn(step, colours), strict=True):
            kept = drawn[panel]
            change[panel] = {item: None for item in kept if item not in now}
            change[panel] |= {item: content for item, (content, _) in now.items() if item not in kept}
            mark[panel] = {item: sign for item, (_, sign) in now.items() if sign}
            drawn[panel] = now
        change[LOGICAL][""] = f"{count_text(seen, 'row')} seen, {held} held"
        change[PHYSICAL][""] = _free_text(pages - taken, pages)
        found = _cells(step, names, blocks)
        change[TABLE] = {item: None for item in cells if item not in found}
        change[TABLE] |= {item: text for item, text in found.items() if cells.get(item) != text}
        mark[TABLE] = {item: "written" for item in change[TABLE] if item in found}
        cells = found
        head, say = _told(step, size)
        mark = {panel: items for panel, items in mark.items() if items}
        change = {panel: items for panel, items in change.items() if items}
        shown.append({"head": head, "say": say, "line": None, "set": change, "mark": mark})
        tables = [f"{name}: {_table_text(step, name)}" for name in names if _table_text(step, name)]
        rows.append(
            [str(number), head, "; ".join(tables) or "none", str(pages - taken), str(seen), str(held)]
        )

    copied = sum(step["written"][0][1] for step in steps if step["copied"])
    return Figure(
        title=title,
        alt=alt,
        summary=f"{count_text(len(names), 'sequence')} in {pages} pages of {count_text(size, 'slot')}; "
        f"{count_text(copied, 'row')} copied; sharing saved up to {count_text(most_shared, 'row')}",
        panels=[
            places.logical(), places.physical(),
            {"kind": "bar", "group": "Slots", "title": f"{pages * size} slots", "max": pages * size},
            {
                "kind": "table", "group": "Block tables", "title": "",
                "columns": ["sequence", "rows", *(f"block {b}" for b in range(blocks))], "rows": names,
            },
        ],
        steps=shown,
        columns=["Step", "What happens", "Block tables", "Pages free", "Rows seen", "Rows held"],
        rows=rows,
        legend={
            "written": "written now",
            "read": "copied now",
            "held": "shared by several sequences",
        },
    )  # fmt: skip


class _Places:
    """Where the blocks of the sequences and the pages lie, in cells."""

    def __init__(self, names, blocks, pages, size):
        self.names, self.blocks, self.pages, self.size = names, blocks, pages, size
        self.left = round(0.9 * max(map(len, names)), 1)
        self.width = self.left + blocks * (size + 0.6)
        # Pages in columns, as many as the sequences' picture is wide.
        self.columns = max(1, min(pages, int(self.width // (size + 2))))
        self.lines = -(-pages // self.columns)

    def block(self, name, block):
        """(top, left) of a block of a sequence."""
        return 1.4 * self.names.index(name), round(self.left + block * (self.size + 0.6), 1)

    def page(self, page):
        column, line = divmod(page, self.lines)
        return 1.4 * line, round(1.2 + column * (self.size + 2), 1)

    def logical(self):
        parts = [
            ["" if block else name, *self.block(name, block), 1, self.size, True, True]
            for name in self.names
            for block in range(self.blocks)
        ]
        return self._plane("What each sequence sees", parts, self.width)

    def physical(self):
        parts = [[str(page), *self.page(page), 1, self.size, True, True] for page in range(self.pages)]
        return self._plane("Pages in memory", parts, 1.2 + self.columns * (self.size + 2) - 2)

    def _plane(self, title, parts, width):
        return {
            "kind": "plane",
            "group": "Rows of keys and values",
            "title": title,
            "rows": round(max(top for _, top, *_ in parts) + 1, 1),
            "columns": round(width, 1),
            "parts": [[name, round(top, 1), *rest] for name, top, *rest in parts],
        }

    def drawn(self, step, colours):
        """{item: (content, mark)} of both pictures."""
        written = {page for page, _, _ in step["written"]}
        copied = {page for page, _ in step["copied"]}
        owners = {}
        logical, physical = {}, {}
        for name, table in step["tables"].items():
            for block, page in enumerate(table):
                owners.setdefault(page, []).append(name)
                filled = min(self.size, step["lengths"][name] - block * self.size)
                mine = page in written and name == step["sequence"]
                item = f"{name}, block {block}: {count_text(filled, 'row')}"
                content = self._rectangle(self.block(name, block), filled, colours[name])
                logical[item] = (content, "written" if mine else None)
        for page, held_by in sorted(owners.items()):
            filled, shared = step["filled"][page], len(held_by) > 1
            item = f"page {page}: {count_text(filled, 'row')} of {', '.join(held_by)}"
            colour = SHARED_COLOUR if shared else colours[held_by[0]]
            content = self._rectangle(self.page(page), filled, colour)
            sign = "written" if page in written else "read" if page in copied else "held" if shared else None
            physical[item] = (content, sign)
        return logical, physical

    def _rectangle(self, place, filled, colour):
        top, left = (round(x, 1) for x in place)
        return [top, round(top + 1, 1), left, round(left + filled, 1), "in", colour]


def _bar(held, opened):
    """The items of the bar."""
    return {
        "rows": [held, ROWS_COLOUR] if held else None,
        "open": [opened, OPEN_COLOUR] if opened else None,
    }


def _slots_text(held, opened, free):
    return f"{count_text(held, 'row')}, {opened} open in their pages, {free} free"


def _free_text(free, pages):
    return f"{free} of {pages} pages free"


def _cells(step, names, blocks):
    """{cell: text} of the block tables."""
    cells = {}
    for row, name in enumerate(names):
        first = row * (blocks + 1)
        if name in step["swapped"]:
            cells[first] = "away"
        for place, page in enumerate(step["tables"].get(name, ()), start=1):
            cells[first + place] = str(page)
        if name in step["lengths"]:
            cells[first] = str(step["lengths"][name])
    return cells


def _table_text(step, name):
    if name in step["swapped"]:
        return "swapped out"
    table = step["tables"].get(name)
    return None if table is None else " ".join(map(str, table)) or "no page"


def _pages_text(pages):
    """ "page 3", "pages 0, 2 and 3"."""
    texts = [str(page) for page in pages]
    if len(texts) == 1:
        return f"page {texts[0]}"
    return f"pages {', '.join(texts[:-1])} and {texts[-1]}"


def _freed_text(released):
    if not released:
        return "no page becomes free: it had none, or others have them too."
    return f"{_pages_text(released)} {'is' if len(released) == 1 else 'are'} free again."


def _told(step, size):
    """(head, say) of a step."""
    name, rows = step["sequence"], count_text(step["tokens"], "row")
    pages = [page for page, _, _ in step["written"]]
    written = f"{rows} written to {_pages_text(pages)}." if pages else ""
    if step["action"] == "new":
        return f"New {name}, {rows}", written or "an empty table."
    if step["action"] == "fork":
        return f"Fork {name} from {step['source']}", "the table is copied. No row is copied, no page taken."
    if step["action"] == "free":
        return f"Free {name}", _freed_text(step["released"])
    if step["action"] == "swap_out":
        return f"Swap {name} out", f"{rows} copied to the other memory; {_freed_text(step['released'])}"
    if step["action"] == "swap_in":
        return f"Swap {name} in", f"{rows} brought back; {written or 'it has no page.'}"
    head = f"Append {rows} to {name}"
    if step["copied"]:
        ((page, copy),) = step["copied"]
        kept = count_text(step["written"][0][1], "row")
        return head, f"page {page} is shared. First {kept} copied to page {copy}, then {written}"
    page, slot, _ = step["written"][0]
    if step["tokens"] == 1:
        return head, f"into slot {slot} of page {page}, {'which is new' if slot == 0 else f'of {size}'}."
    return head, written
