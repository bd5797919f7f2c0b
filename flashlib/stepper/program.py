"""Programs of the register machine, instruction by instruction."""

import re

from flashlib.stepper import frame

# A longer formula would make the table unreadable, or the line of text wrap; there the
# number alone is shown.
TABLE_FORMULA = 40
SAID_FORMULA = 60
COUNTERS = ("cycles", "loads", "stores")


def show_program(trace, *, title, alt):
    """Return a figure that steps through a program: its lines, the registers, the
    memory, the counters.

    trace       a ``Run`` of :class:`flashlib.machine.Machine`, or what its ``as_dict``
                returns (with ``names``, for shorter formulas)
    title, alt  as for :class:`flashlib.stepper.frame.Figure`

    Raises TypeError and ValueError for another trace, an empty one, or one that is too
    long to step through.
    """
    keys = ("registers", "memory", "steps")
    trace = frame.read_trace("trace", trace, keys, method="as_dict")
    registers, steps = trace["registers"], trace["steps"]
    shape = {"columns": 0, "cells": registers, "notes": True}
    panels = [frame.panel("cells", "Registers", "", **shape)]
    place = {}  # cell: (panel, item)
    written = [one["written"] for one in steps if one["written"]]
    for name, cells in _arrays([*trace["memory"], *written]).items():
        place |= {cell: (len(panels), item) for item, cell in enumerate(cells)}
        shape = {"columns": _columns(cells), "cells": cells, "notes": False}
        panels.append(frame.panel("cells", "Memory", name, **shape))
    counters = len(panels)
    panels.append(frame.panel("counters", "Counters", ""))

    # At the start all registers but the first target are as after the first step.
    held = [x if f"R{i}" != steps[0]["target"] else None
            for i, x in enumerate(steps[0]["registers"])]  # fmt: skip
    start = {0: {i: _content(x) for i, x in enumerate(held) if x}}
    for cell, number in trace["memory"].items():
        where, item = place[cell]
        start.setdefault(where, {})[item] = [frame.number_text(number), ""]
    start[counters] = dict.fromkeys(COUNTERS, "0")
    shown = [frame.step("Start", "nothing has been executed yet.", {}) | {"set": start}]
    for one in steps:
        change = {counters: {name: str(one[name]) for name in COUNTERS}}
        named = re.findall(r"\bR(\d+)\b", one["instruction"])
        marks = {0: dict.fromkeys(map(int, named), "read")}
        if one["target"]:
            target = registers.index(one["target"])
            change[0] = {target: _content(one["registers"][target])}
            marks[0][target] = "written"
        for cell, mark in ((one["read"], "read"), (one["written"], "written")):
            if cell:
                where, item = place[cell]
                marks[where] = {item: mark}
        if one["written"]:
            change[where] = {item: [frame.number_text(one["value"]), ""]}
        line = one["number"] - 1
        shown.append(frame.step(one["instruction"], _say(one), change, marks, line))

    counts = [frame.count_text(steps[-1][name], name[:-1]) for name in COUNTERS]
    columns = ["Step", "Instruction", *registers, "Memory", "Cycles", "Loads", "Stores"]
    rows, lines = [_row(one) for one in steps], [one["instruction"] for one in steps]
    legend = {"read": "read by this instruction", "written": "written by it"}
    return frame.Figure(
        title=title, alt=alt, summary=", ".join(counts), panels=panels, steps=shown,
        columns=columns, rows=rows, lines=lines, legend=legend,
    )  # fmt: skip


def _arrays(cells):
    """{array: its cells in order}; cells without an index share the name ""."""
    arrays = {}
    for cell in dict.fromkeys(cells):
        name, bracket, _ = cell.partition("[")
        arrays.setdefault(name if bracket else "", []).append(cell)
    return {name: sorted(cells, key=_indices) for name, cells in arrays.items()}


def _indices(cell):
    return [int(index) for index in re.findall(r"\[(\d+)\]", cell)]


def _columns(cells):
    """Boxes per row: a matrix keeps its rows, a vector flows."""
    indices = [_indices(cell) for cell in cells]
    is_matrix = all(len(index) > 1 for index in indices)
    return max(index[-1] for index in indices) + 1 if is_matrix else 0


def _content(held):
    """Value and note of a register; a formula that is the number is not repeated."""
    value = frame.number_text(held["value"])
    return [value, "" if held["text"] == value else held["text"]]


def _say(one):
    value = frame.number_text(one["value"])
    if one["written"]:
        source = one["instruction"].split()[1].strip(",")
        return f"{one['written']} = {value}, stored from {source}."
    if one["read"]:
        return f"{one['target']} = {value}, loaded from {one['read']}."
    text = one["registers"][int(one["target"][1:])]["text"]
    formula = f"{text} = " if len(text) <= SAID_FORMULA else ""
    return f"{one['target']} = {formula}{value}."


def _row(one):
    held = []
    for register in one["registers"]:
        value, note = _content(register) if register else ("", "")
        fits = note and len(note) <= TABLE_FORMULA
        held.append(f"{note} = {value}" if fits else value)
    stored = f"{one['written']} = {frame.number_text(one['value'])}"
    memory = stored if one["written"] else ""
    counts = [str(one[name]) for name in COUNTERS]
    return [str(one["number"]), one["instruction"], *held, memory, *counts]
