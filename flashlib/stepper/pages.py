"""A pool of pages: which sequence holds which page, what is shared, copied, freed and
swapped.
"""

from flashlib.stepper import frame

# One for each sequence; marks use the others.
COLORS = (1, 2, 3, 6, 4, 5, 7)
SHARED_COLOR, ROWS_COLOR, OPEN_COLOR = 8, 9, 8
LOGICAL, PHYSICAL, BAR, TABLE = range(4)


def show_pages(pool, *, title, alt):
    """Return a figure that steps through a pool of pages: the rows of each sequence,
    the pages, the block tables.

    pool        a :class:`flashlib.paging.PagePool` made with ``trace=True``, after what
                it did; or what its ``trace()`` returned. Texts name its sequences
    title, alt  as for :class:`flashlib.stepper.frame.Figure`

    Raises TypeError and ValueError as :func:`flashlib.stepper.show_program`.
    """
    trace = frame.read_trace("pool", pool, ("pages", "page_size", "steps"))
    steps, pages, size = trace["steps"], trace["pages"], trace["page_size"]
    names = list(dict.fromkeys(one["sequence"] for one in steps))
    for name in names:
        frame.check_text("pool: name of a sequence", name)
    tables = [table for one in steps for table in one["tables"].values()]
    blocks = max([1, *map(len, tables)])
    places = _Places(names, blocks, pages, size)

    start = {LOGICAL: {"": "no sequence yet"}, PHYSICAL: {"": _free_text(pages, pages)}}
    start[BAR] = {"": _slots_text(0, 0, pages * size)}
    shown, rows = [frame.step("Start", "every page is free.", start)], []
    drawn, most_shared = ({}, {}), 0  # drawn: the items of both pictures
    cells = {}  # those of the block tables
    for number, one in enumerate(steps, start=1):
        held, seen = sum(one["filled"]), sum(one["lengths"].values())
        taken = sum(owners > 0 for owners in one["references"])
        opened, most_shared = taken * size - held, max(most_shared, seen - held)
        parts = {"rows": (held, ROWS_COLOR), "open": (opened, OPEN_COLOR)}
        bar = {name: list(part) if part[0] else None for name, part in parts.items()}
        bar[""] = _slots_text(held, opened, (pages - taken) * size)
        change, mark = {BAR: bar}, {}
        pictures = places.drawn(one)
        for place, (before, now) in enumerate(zip(drawn, pictures, strict=True)):
            items = {item: content for item, (content, _) in now.items()}
            change[place] = frame.difference({x: before[x][0] for x in before}, items)
            mark[place] = {item: sign for item, (_, sign) in now.items() if sign}
        drawn = pictures
        change[LOGICAL][""] = f"{frame.count_text(seen, 'row')} seen, {held} held"
        change[PHYSICAL][""] = _free_text(pages - taken, pages)
        now = _cells(one, names, blocks)
        change[TABLE] = frame.difference(cells, now)
        mark[TABLE] = {item: "written" for item in change[TABLE] if item in now}
        cells = now
        head, say = _told(one, size)
        shown.append(frame.step(head, say, change, mark))
        texts = [(name, _table_text(one, name)) for name in names]
        tables = "; ".join(f"{name}: {text}" for name, text in texts if text)
        counts = map(str, (pages - taken, seen, held))
        rows.append([str(number), head, tables or "none", *counts])

    copied = sum(one["written"][0][1] for one in steps if one["copied"])
    headings = ["sequence", "rows", *(f"block {block}" for block in range(blocks))]
    slots, count = pages * size, frame.count_text
    panels = [places.logical(), places.physical()]
    panels.append(frame.panel("bar", "Slots", f"{slots} slots", max=slots))
    table = {"columns": headings, "rows": names}
    panels.append(frame.panel("table", "Block tables", "", **table))
    held = f"{count(len(names), 'sequence')} in {pages} pages of {count(size, 'slot')}"
    saved = f"sharing saved up to {count(most_shared, 'row')}"
    summary = f"{held}; {count(copied, 'row')} copied; {saved}"
    columns = ["Step", "What happens", "Block tables"]
    columns += ["Pages free", "Rows seen", "Rows held"]
    legend = {"written": "written now", "read": "copied now"}
    legend["held"] = "shared by several sequences"
    return frame.Figure(
        title=title, alt=alt, summary=summary, panels=panels, steps=shown,
        columns=columns, rows=rows, legend=legend,
    )  # fmt: skip


class _Places:
    """Where the blocks of the sequences and the pages are drawn, in cells."""

    def __init__(self, names, blocks, pages, size):
        self.names, self.blocks, self.pages, self.size = names, blocks, pages, size
        self.colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
        self.left = round(0.9 * max(map(len, names)), 1)
        self.width = self.left + blocks * (size + 0.6)
        # Pages in columns, as many as the picture of the sequences is wide.
        self.columns = max(1, min(pages, int(self.width // (size + 2))))
        self.lines = -(-pages // self.columns)

    def block(self, name, block):
        """(top, left) of a block of a sequence."""
        left = self.left + block * (self.size + 0.6)
        return round(1.4 * self.names.index(name), 1), round(left, 1)

    def page(self, page):
        column, line = divmod(page, self.lines)
        return round(1.4 * line, 1), round(1.2 + column * (self.size + 2), 1)

    def logical(self):
        labels = {}
        for name in self.names:
            for block in range(self.blocks):
                labels[self.block(name, block)] = "" if block else name
        return self._plane("What each sequence sees", labels, self.width)

    def physical(self):
        labels = {self.page(page): str(page) for page in range(self.pages)}
        width = 1.2 + self.columns * (self.size + 2) - 2
        return self._plane("Pages in memory", labels, width)

    def _plane(self, title, labels, width):
        """The panel of blocks or pages, labels: {(top, left): name}."""
        shape = (1, self.size, True, True)
        parts = [[name, *place, *shape] for place, name in labels.items()]
        rows = round(max(top for top, _ in labels) + 1, 1)
        shape = {"rows": rows, "columns": round(width, 1), "parts": parts}
        return frame.panel("plane", "Rows of keys and values", title, **shape)

    def drawn(self, one):
        """{item: (content, mark)} of both pictures."""
        written = {page for page, _, _ in one["written"]}
        copied = {page for page, _ in one["copied"]}
        owners, logical, physical = {}, {}, {}
        for name, table in one["tables"].items():
            for block, page in enumerate(table):
                owners.setdefault(page, []).append(name)
                filled = min(self.size, one["lengths"][name] - block * self.size)
                mine = page in written and name == one["sequence"]
                item = f"{name}, block {block}: {frame.count_text(filled, 'row')}"
                place, color = self.block(name, block), self.colors[name]
                content = _rectangle(place, filled, color)
                logical[item] = (content, "written" if mine else None)
        for page, names in sorted(owners.items()):
            filled, shared = one["filled"][page], len(names) > 1
            rows = frame.count_text(filled, "row")
            item = f"page {page}: {rows} of {', '.join(names)}"
            color = SHARED_COLOR if shared else self.colors[names[0]]
            sign = "held" if shared else None
            if page in written or page in copied:
                sign = "written" if page in written else "read"
            physical[item] = (_rectangle(self.page(page), filled, color), sign)
        return logical, physical


def _rectangle(place, filled, color):
    top, left = place
    return [top, round(top + 1, 1), left, round(left + filled, 1), "in", color]


def _slots_text(held, opened, free):
    return f"{frame.count_text(held, 'row')}, {opened} open in their pages, {free} free"


def _free_text(free, pages):
    return f"{free} of {pages} pages free"


def _cells(one, names, blocks):
    """{cell: text} of the block tables."""
    cells = {}
    for row, name in enumerate(names):
        first = row * (blocks + 1)
        if name in one["swapped"]:
            cells[first] = "away"
        for place, page in enumerate(one["tables"].get(name, ()), start=1):
            cells[first + place] = str(page)
        if name in one["lengths"]:
            cells[first] = str(one["lengths"][name])
    return cells


def _table_text(one, name):
    if name in one["swapped"]:
        return "swapped out"
    table = one["tables"].get(name)
    return None if table is None else " ".join(map(str, table)) or "no page"


def _pages_text(pages):
    """ "page 3", "pages 0, 2 and 3"."""
    word = "page" if len(pages) == 1 else "pages"
    return f"{word} {frame.listed(list(map(str, pages)))}"


def _freed_text(released):
    if not released:
        return "no page becomes free: it had none, or others still use them."
    verb = "is" if len(released) == 1 else "are"
    return f"{_pages_text(released)} {verb} free again."


def _told(one, size):
    """(head, say) of a step."""
    name, rows = one["sequence"], frame.count_text(one["tokens"], "row")
    pages = [page for page, _, _ in one["written"]]
    written = f"{rows} written to {_pages_text(pages)}." if pages else ""
    match one["action"]:
        case "new":
            return f"New {name}, {rows}", written or "an empty table."
        case "fork":
            say = "the table is copied. No row is copied, and no page is taken."
            return f"Fork {name} from {one['source']}", say
        case "free":
            return f"Free {name}", _freed_text(one["released"])
        case "swap_out":
            say = f"{rows} copied to the other memory; {_freed_text(one['released'])}"
            return f"Swap {name} out", say
        case "swap_in":
            say = f"{rows} brought back; {written or 'it has no page.'}"
            return f"Swap {name} in", say
    head = f"Append {rows} to {name}"
    page, slot, _ = one["written"][0]
    if one["copied"]:
        ((shared, copy),) = one["copied"]
        kept = f"First {frame.count_text(slot, 'row')} copied to page {copy}"
        return head, f"page {shared} is shared. {kept}, then {written}"
    if one["tokens"] == 1:
        which = "which is new" if slot == 0 else f"of {size}"
        return head, f"into slot {slot} of page {page}, {which}."
    return head, written
