"""Schedules on the two-level memory: which blocks are in fast memory, what moves, how
many words so far.
"""

from flashlib.stepper import frame

MATRIX_COLORS = 7
STATISTICS_COLOR = 7  # a statistic is one column wide
LOADED_COLOR, STORED_COLOR = 8, 9
FAST, WORDS = 0, 1  # panels; the arrays follow


def show_schedule(memory, *, title, alt, formula=""):
    """Return a figure that steps through a schedule: fast memory, the arrays in slow
    memory, the words moved, and how many the closed form gives.

    memory      a :class:`flashlib.iomodel.TwoLevelMemory` made with ``trace=True``,
                after a schedule with a closed form, or what ``trace()`` returned
    title, alt  as for :class:`flashlib.stepper.frame.Figure`
    formula     the closed form as plain text, such as "2Td + 2T²d/B_r"

    Blocks that are freed one right after the other leave in one step. Raises TypeError
    and ValueError as :func:`flashlib.stepper.show_program`.
    """
    keys = ("capacity_words", "arrays", "steps", "closed_form_words")
    trace = frame.read_trace("memory", memory, keys)
    if trace["closed_form_words"] is None:
        expected = "that of a schedule with a closed form"
        raise ValueError(f"memory: expected {expected}, got one without")
    if not isinstance(formula, str):
        raise TypeError(f"formula: expected a text, got {formula!r}")
    side = _Schedule(trace)
    shown, rows = [side.start()], []
    for number, event in enumerate(_events(trace["steps"]), start=1):
        shown.append(side.step(*event))
        rows.append([str(number), *side.row])
    last = trace["steps"][-1]
    loaded, stored = last["loaded_words"], last["stored_words"]
    moved = loaded + stored
    summary = (
        f"{loaded} words loaded, {stored} stored, {moved} moved; "
        f"{side.compared(moved)}; at most {side.peak} of {side.capacity} words held"
    )
    panels = side.panels(formula, moved)
    columns = ["Step", "What happens", "Fast memory then holds"]
    columns += ["Words moved", "Words held", "Loaded", "Stored"]
    legend = {"load": "loaded now", "store": "stored now"}
    legend |= {"compute": "computed or allocated", "past": "stored before"}
    return frame.Figure(
        title=title, alt=alt, summary=summary, panels=panels, steps=shown,
        columns=columns, rows=rows, legend=legend,
    )  # fmt: skip


def _events(steps):
    """[(action, blocks, the state afterwards)], with consecutive frees merged."""
    events = []
    for one in steps:
        if one["action"] == "free" and events and events[-1][0] == "free":
            events[-1] = ("free", [*events[-1][1], one["block"]], one)
        else:
            events.append((one["action"], [one["block"]], one))
    return events


class _Schedule:
    """The state of the figure while the trace is read."""

    def __init__(self, trace):
        self.arrays, self.capacity = trace["arrays"], trace["capacity_words"]
        self.closed_form_words = trace["closed_form_words"]
        self.grids = {name: number for number, name in enumerate(self.arrays, start=2)}
        self.colors = _colors(self.arrays)
        self.held = {}  # {label: block} in fast memory
        self.transfers = {name: [0, 0] for name in self.arrays}  # words in and out
        self.peak = 0
        self.row = []  # the last step in the table

    def panels(self, formula, moved):
        most = max(self.closed_form_words, moved)
        closed_form = f"{formula} = " if formula else ""
        closed_form = f"closed form {closed_form}{self.closed_form_words}"
        capacity = f"M = {self.capacity} words"
        panels = [
            frame.panel("bar", "Fast memory", capacity, max=self.capacity),
            frame.panel("bar", "Words moved", closed_form, max=most),
        ]
        for name, size in self.arrays.items():
            group = "Slow memory" if size["slow"] else "Only in fast memory"
            shape = {"colour": self.colors[name], **size}
            panels.append(frame.panel("grid", group, name, **shape))
        return panels

    def start(self):
        change = {FAST: {"": "holds nothing"}, WORDS: {"": self._moved_text(0, 0)}}
        for name, size in self.arrays.items():
            if size["slow"]:
                change[self.grids[name]] = {"": _array_text(0, 0)}
        say = "fast memory is empty and nothing has moved."
        return frame.step("Start", say, change)

    def step(self, action, blocks, after):
        """One step of the figure; also sets the row of the table."""
        now = {self._label(block): block for block in after["resident"]}
        gone = [label for label in self.held if label not in now]
        change = {FAST: {}, WORDS: {}}
        for label, block in frame.difference(self.held, now).items():
            name, *place = block or self.held[label]
            content = [_words(block), self.colors[name]] if block else None
            change[FAST][label] = content
            items = change.setdefault(self.grids[name], {})
            items[label] = [*place, "in"] if block else None
        (name, *place), label = blocks[0], self._label(blocks[0])
        if action in ("load", "store"):
            self.transfers[name][action == "store"] += after["words"]
            items = change.setdefault(self.grids[name], {})
            items[""] = _array_text(*self.transfers[name])
            if action == "store":
                items[f"stored {label}"] = [*place, "stored"]
            loaded, stored = after["loaded_words"], after["stored_words"]
            if loaded:
                change[WORDS]["loaded"] = [loaded, LOADED_COLOR]
            if stored:
                change[WORDS]["stored"] = [stored, STORED_COLOR]
            change[WORDS][""] = self._moved_text(loaded, stored)
        change[FAST][""] = _holds(now, after["resident_words"], self.capacity)
        mark = {} if action == "free" else {label: action}
        head, say = self._told(action, blocks, gone)
        counts = ("words", "resident_words", "loaded_words", "stored_words")
        counts = [str(after[key]) for key in counts]
        self.row = [head, ", ".join(now) or "nothing", *counts]
        self.held, self.peak = now, max(self.peak, after["resident_words"])
        return frame.step(head, say, change, {FAST: mark, self.grids[name]: mark})

    def _label(self, block):
        """``K[2:4]``, ``S[0:2, 2:4]``, ``Q`` for a whole array, ``S[3]`` for a row."""
        name, row, row_end, column, column_end = block
        size = self.arrays[name]
        if (column, column_end) != (0, size["columns"]):
            return f"{name}[{_range(row, row_end)}, {_range(column, column_end)}]"
        whole = (row, row_end) == (0, size["rows"])
        return name if whole else f"{name}[{_range(row, row_end)}]"

    def _told(self, action, blocks, gone):
        """(head, say) of a step."""
        labels = [self._label(block) for block in blocks]
        label, size = labels[0], frame.count_text(sum(map(_words, blocks)), "word")
        head = f"{action.capitalize()} {' and '.join(labels)}"
        if action == "reuse":
            head = f"{label} in place of {', '.join(gone)}"
        where = {
            "load": "from slow to fast memory.",
            "store": "from fast to slow memory.",
            "allocate": "of fast memory; nothing moves.",
            "free": "of fast memory; nothing moves.",
        }
        return head, f"{size} {where.get(action, 'in fast memory; nothing moves.')}"

    def _moved_text(self, loaded, stored):
        total = f"{loaded + stored} of {self.closed_form_words} words"
        return f"{loaded} loaded + {stored} stored = {total}"

    def compared(self, moved):
        """Whether the closed form gives the words that have moved in the end."""
        apart = self.closed_form_words - moved
        if not apart:
            return "the closed form agrees"
        more = f"{abs(apart)} {'more' if apart > 0 else 'fewer'}"
        return f"the closed form gives {self.closed_form_words}, {more}"


def _colors(arrays):
    """{array: color}: a gradient has the color of its array."""
    families, colors = {}, {}
    for name, size in arrays.items():
        family = name[1:] if name.startswith("d") and name[1:] else name
        if size["columns"] == 1:
            colors[name] = STATISTICS_COLOR
        else:
            colors[name] = families.setdefault(family, len(families) % MATRIX_COLORS)
    return colors


def _range(start, end):
    return str(start) if end == start + 1 else f"{start}:{end}"


def _words(block):
    _, row, row_end, column, column_end = block
    return (row_end - row) * (column_end - column)


def _holds(blocks, words, capacity):
    held = ", ".join(f"{label} ({_words(block)})" for label, block in blocks.items())
    return f"{words} of {capacity} words: {held}" if held else "holds nothing"


def _array_text(loaded, stored):
    return f"in {loaded}, out {stored}"
