"""Schedules on the two-level memory: which blocks lie in fast memory, what moves, how many words so far."""

import numbers

from flashlib.stepper.frame import Figure, count_text, require

MATRIX_COLOURS = 7
STATISTICS_COLOUR, LOADED_COLOUR, STORED_COLOUR = 7, 8, 9  # a statistic is one column wide


def show_schedule(memory, *, closed_form_words, title, alt, formula=""):
    """A figure that steps through a schedule: fast memory, the arrays in slow memory, the words moved.

    memory              a :class:`flashlib.iomodel.TwoLevelMemory` made with ``trace=True``, after its
                        schedule, or what its ``trace()`` returned
    closed_form_words   the words that the closed form gives, an integer of at least 1; it stands beside the
                        running count, and where the two differ at the end the figure says by how much
    title, alt          the line above the figure; what it shows, for those who do not see it
    formula             the closed form as plain text, such as "2Td + 2T²d/B_r"

    Blocks that are freed one right after the other leave in one step. Raises TypeError and ValueError for
    other arguments, an empty trace, or one that is too long to step through.
    """
    trace = memory.trace() if callable(getattr(memory, "trace", None)) else memory
    require("memory", trace, ("capacity_words", "arrays", "steps"))
    if isinstance(closed_form_words, bool) or not isinstance(closed_form_words, numbers.Integral):
        raise TypeError(f"closed_form_words must be an integer, got {closed_form_words!r}")
    if closed_form_words < 1:
        raise ValueError(f"closed_form_words must be at least 1, got {closed_form_words}")
    if not isinstance(formula, str):
        raise TypeError(f"formula must be a text, got {type(formula).__name__}")
    closed_form_words = int(closed_form_words)
    arrays, capacity, events = trace["arrays"], trace["capacity_words"], _events(trace["steps"])
    if not events:
        raise ValueError("memory has a trace without a step: there is nothing to step through")

    colours = _colours(arrays)
    final = trace["steps"][-1]
    moved = final["loaded_words"] + final["stored_words"]
    fast, words, grids = 0, 1, {name: number for number, name in enumerate(arrays, start=2)}
    panels = [
        {"kind": "bar", "group": "Fast memory", "title": f"M = {capacity} words", "max": capacity},
        {
            "kind": "bar",
            "group": "Words moved",
            "title": f"closed form {formula} = {closed_form_words}"
            if formula
            else f"closed form {closed_form_words}",
            "max": max(closed_form_words, moved),
        },
    ]
    for name, size in arrays.items():
        group = "Slow memory" if size["slow"] else "Only in fast memory"
        panels.append({"kind": "grid", "group": group, "title": name, "colour": colours[name], **size})

    start = {fast: {"": "holds nothing"}, words: {"": _moved_text(0, 0, closed_form_words)}}
    start |= {grids[name]: {"": _array_text(0, 0)} for name, size in arrays.items() if size["slow"]}
    head, say = "Start", "fast memory is empty and nothing has moved."
    shown = [{"head": head, "say": say, "line": None, "set": start, "mark": {}}]
    rows, held, transfers, peak = [], {}, {name: [0, 0] for name in arrays}, 0
    for number, (action, blocks, after) in enumerate(events, start=1):
        now = {_label(block, arrays): block for block in after["resident"]}
        gone, came = [x for x in held if x not in now], [x for x in now if x not in held]
        change = {fast: dict.fromkeys(gone), words: {}}
        for label in gone:
            change.setdefault(grids[held[label][0]], {})[label] = None
        for label in came:
            block = now[label]
            change[fast][label] = [_words(block), colours[block[0]]]
            change.setdefault(grids[block[0]], {})[label] = [*block[1:], "in"]
        name, label = blocks[0][0], _label(blocks[0], arrays)
        if action in ("load", "store"):
            transfers[name][action == "store"] += after["words"]
            place = change.setdefault(grids[name], {})
            place[""] = _array_text(*transfers[name])
            if action == "store":
                place[f"stored {label}"] = [*blocks[0][1:], "stored"]
            ways = {"loaded": LOADED_COLOUR, "stored": STORED_COLOUR}
            change[words] = {w: [after[f"{w}_words"], c] for w, c in ways.items() if after[f"{w}_words"]}
            change[words][""] = _moved_text(after["loaded_words"], after["stored_words"], closed_form_words)
        change[fast][""] = _holds(now, after["resident_words"], capacity)
        mark = {} if action == "free" else {p: {label: action} for p in (fast, grids[name])}
        head, say = _told(action, blocks, gone, arrays)
        change = {panel: items for panel, items in change.items() if items}
        shown.append({"head": head, "say": say, "line": None, "set": change, "mark": mark})
        counts = [str(after[key]) for key in ("words", "resident_words", "loaded_words", "stored_words")]
        rows.append([str(number), head, ", ".join(now) or "nothing", *counts])
        held, peak = now, max(peak, after["resident_words"])

    return Figure(
        title=title,
        alt=alt,
        summary=f"{final['loaded_words']} words loaded, {final['stored_words']} stored, {moved} moved; "
        f"{_compared(moved, closed_form_words)}; at most {peak} of {capacity} words held",
        panels=panels,
        steps=shown,
        columns=[
            "Step",
            "What happens",
            "Fast memory then holds",
            "Words moved",
            "Words held",
            "Loaded",
            "Stored",
        ],
        rows=rows,
        legend={
            "load": "loaded now",
            "store": "stored now",
            "compute": "computed, or room made",
            "past": "stored before",
        },
    )


def _events(steps):
    """[(action, blocks, the state afterwards)], with frees in a row made one."""
    events = []
    for step in steps:
        if step["action"] == "free" and events and events[-1][0] == "free":
            events[-1] = ("free", [*events[-1][1], step["block"]], step)
        else:
            events.append((step["action"], [step["block"]], step))
    return events


def _colours(arrays):
    """{array: colour}: a gradient has the colour of its array."""
    families, colours = {}, {}
    for name, size in arrays.items():
        family = name[1:] if name.startswith("d") and name[1:] else name
        if size["columns"] == 1:
            colours[name] = STATISTICS_COLOUR
        else:
            colours[name] = families.setdefault(family, len(families) % MATRIX_COLOURS)
    return colours


def _label(block, arrays):
    """``K[2:4]``, ``S[0:2, 2:4]``, ``Q`` for a whole array, ``S[3]`` for a row."""
    name, row, row_end, column, column_end = block
    size = arrays[name]
    rows = str(row) if row_end == row + 1 else f"{row}:{row_end}"
    if (column, column_end) != (0, size["columns"]):
        columns = str(column) if column_end == column + 1 else f"{column}:{column_end}"
        return f"{name}[{rows}, {columns}]"
    return name if (row, row_end) == (0, size["rows"]) else f"{name}[{rows}]"


def _words(block):
    _, row, row_end, column, column_end = block
    return (row_end - row) * (column_end - column)


def _told(action, blocks, gone, arrays):
    """(head, say) of a step."""
    label, size = _label(blocks[0], arrays), count_text(sum(map(_words, blocks)), "word")
    return {
        "load": (f"Load {label}", f"{size} from slow to fast memory."),
        "allocate": (f"Make room for {label}", f"{size} of fast memory; nothing moves."),
        "compute": (f"Compute {label}", f"{size} in fast memory; nothing moves."),
        "store": (f"Store {label}", f"{size} from fast to slow memory."),
        "free": (
            f"Free {' and '.join(_label(b, arrays) for b in blocks)}",
            f"{size} of fast memory; nothing moves.",
        ),
        "reuse": (f"{label} in place of {', '.join(gone)}", f"{size} in fast memory; nothing moves."),
    }[action]


def _holds(blocks, words, capacity):
    held = ", ".join(f"{label} ({_words(block)})" for label, block in blocks.items())
    return f"{words} of {capacity} words: {held}" if held else "holds nothing"


def _array_text(loaded, stored):
    return f"in {loaded}, out {stored}"


def _moved_text(loaded, stored, closed_form_words):
    return f"{loaded} loaded + {stored} stored = {loaded + stored} of {closed_form_words} words"


def _compared(moved, closed_form_words):
    if moved == closed_form_words:
        return "the closed form gives the same"
    direction = "less" if moved > closed_form_words else "more"
    return f"the closed form gives {closed_form_words}, {abs(moved - closed_form_words)} {direction}"
