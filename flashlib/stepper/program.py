"""Programs of the register machine, instruction by instruction."""

import re

from flashlib.stepper.frame import Figure, count_text, number_text, require

# A longer formula makes the table unreadable, or the line of text outgrow its room: the number stands alone.
TABLE_FORMULA = 40
SAID_FORMULA = 60


def show_program(trace, *, title, alt):
    """A figure that steps through a program: its lines, the registers, the memory, the counters.

    trace       a ``Run`` of :class:`flashlib.machine.Machine`, or what its ``as_dict`` returns (with
                ``names``, for shorter formulas)
    title, alt  the line above the figure; what it shows, for those who do not see it

    Raises TypeError and ValueError for a trace that is neither, an empty one, or one that is too long to step
    through, and for empty texts.
    """
    if callable(getattr(trace, "as_dict", None)):
        trace = trace.as_dict()
    require("trace", trace, ("registers", "memory", "steps"))
    registers, steps = trace["registers"], trace["steps"]
    if not steps:
        raise ValueError("trace has no step: there is nothing to step through")

    arrays = _arrays([*trace["memory"], *(step["written"] for step in steps if step["written"])])
    panels = [_cells("Registers", "", 0, registers, notes=True)]
    place = {}  # cell: (panel, item)
    for name, names in arrays.items():
        place |= {cell: (len(panels), item) for item, cell in enumerate(names)}
        panels.append(_cells("Memory", name, _columns(names), names, notes=False))
    counters = len(panels)
    panels.append({"kind": "counters", "group": "Counters", "title": ""})

    # What stood in the registers before: all but the first target are as after the first step.
    before = [held if f"R{i}" != steps[0]["target"] else None for i, held in enumerate(steps[0]["registers"])]
    start = {0: {i: _content(held) for i, held in enumerate(before) if held}}
    for cell, number in trace["memory"].items():
        panel, item = place[cell]
        start.setdefault(panel, {})[item] = [number_text(number), ""]
    start[counters] = {"cycles": "0", "loads": "0", "stores": "0"}
    head, say = "Start", "nothing has been executed yet."
    shown = [{"head": head, "say": say, "line": None, "set": start, "mark": {}}]
    for step in steps:
        change = {counters: {name: str(step[name]) for name in ("cycles", "loads", "stores")}}
        marks = {0: dict.fromkeys(_reads(step), "read")}
        if step["target"]:
            target = registers.index(step["target"])
            change[0] = {target: _content(step["registers"][target])}
            marks[0][target] = "written"
        for cell, mark in ((step["read"], "read"), (step["written"], "written")):
            if cell:
                panel, item = place[cell]
                marks[panel] = {item: mark}
                if mark == "written":
                    change[panel] = {item: [number_text(step["value"]), ""]}
        line = step["number"] - 1
        head = step["instruction"]
        shown.append({"head": head, "say": _say(step), "line": line, "set": change, "mark": marks})

    last = steps[-1]
    counts = [count_text(last[name], name[:-1]) for name in ("cycles", "loads", "stores")]
    return Figure(
        title=title,
        alt=alt,
        summary=", ".join(counts),
        panels=panels,
        steps=shown,
        columns=["Step", "Instruction", *registers, "Memory", "Cycles", "Loads", "Stores"],
        rows=[_row(step) for step in steps],
        lines=[step["instruction"] for step in steps],
        legend={"read": "read by this instruction", "written": "written by it"},
    )


def _cells(group, title, columns, names, notes):
    """A panel of the kind ``cells``."""
    return {
        "kind": "cells",
        "group": group,
        "title": title,
        "columns": columns,
        "cells": names,
        "notes": notes,
    }


def _arrays(cells):
    """{array: its cells in order of their indices}; cells without an index share the name ""."""
    arrays = {}
    for cell in dict.fromkeys(cells):
        arrays.setdefault(cell.partition("[")[0] if "[" in cell else "", []).append(cell)
    return {name: sorted(names, key=_indices) for name, names in arrays.items()}


def _indices(cell):
    return [int(index) for index in re.findall(r"\[(\d+)\]", cell)]


def _columns(names):
    """Boxes in a row: a matrix keeps its rows, a vector flows."""
    indices = [_indices(name) for name in names]
    return max(index[-1] for index in indices) + 1 if all(len(index) > 1 for index in indices) else 0


def _content(held):
    """Value and note of a register: the formula says nothing where it is the number."""
    value = number_text(held["value"])
    return [value, "" if held["text"] == value else held["text"]]


def _reads(step):
    """The registers that an instruction reads, as numbers."""
    found = [int(number) for number in re.findall(r"\bR(\d+)\b", step["instruction"])]
    return found[:-1] if step["target"] else found


def _say(step):
    value = number_text(step["value"])
    if step["written"]:
        return f"{step['written']} in memory takes {step['instruction'].split()[1].strip(',')} = {value}."
    held = step["registers"][int(step["target"][1:])]
    if step["read"]:
        return f"{step['target']} takes {step['read']} = {value} from memory."
    formula = f"{held['text']} = " if len(held["text"]) <= SAID_FORMULA else ""
    return f"{step['target']} = {formula}{value}."


def _row(step):
    held = [""] * len(step["registers"])
    for i, register in enumerate(step["registers"]):
        if register:
            value, note = _content(register)
            held[i] = f"{note} = {value}" if note and len(note) <= TABLE_FORMULA else value
    memory = f"{step['written']} = {number_text(step['value'])}" if step["written"] else ""
    counts = [str(step[name]) for name in ("cycles", "loads", "stores")]
    return [str(step["number"]), step["instruction"], *held, memory, *counts]
