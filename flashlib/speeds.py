"""Figures of measured speeds and memory, from `flashlib.records`, for `flashlib.plot`.

Each says below, folded, where and how its record was measured. A cell that could not be
measured leaves a gap.
"""

from flashlib.canvas import (
    BLUE,
    METHODS,
    PURPLE,
    WIDTH,
    doubling,
    figure,
    label_directly,
    numbers,
    require,
)


def ladder(record, d=128, direction="forward", **key):
    """The measured speed of the kernels of a `flashlib.records.Record` versus sequence
    length, with and without the causal mask.

    d, direction    head dimension, and "forward", "backward" or "forward+backward"
    key             mode="eager" or "graph" for the record `host`

    TFLOP/s are by the record's own rule.
    """
    speeds = {}
    for said, causal in (("no mask", False), ("causal", True)):
        title = f"{_spoken(direction)}, $d = {d}$, {said}"
        speeds[title] = record.ladder(d, causal, direction, **key)
    wanted = f"d = {d}, direction {direction}"
    return _speeds(record, wanted, speeds, "TFLOP/s")


def _speeds(record, wanted, speeds, unit):
    """The picture of {title: {method: [(T, speed)]}}, one axes below the other."""
    name, wanted = f"record {record.name!r}", f"measured cells with {wanted}"
    require(all(speeds.values()), name, wanted, "none")
    picture, axes = figure(WIDTH, 6, rows=2)
    every = [line for lines in speeds.values() for line in lines.values()]
    lengths = sorted({T for line in every for T, _ in line})
    for ax, (title, lines) in zip(axes, speeds.items(), strict=True):
        doubling(ax, lengths)
        _methods(ax, lines)
        ax.set(ylim=(0, 1.08 * ax.dataLim.y1), ylabel=unit)
        ax.set(xlabel="sequence length $T$", title=title)
        ax.label_outer()
    provenance(picture, record)
    return picture


# The kernels of the book and of others, in the order of `bars`.
REACHED = "standard", "flash1", "flash2", "hopper", "sdpa-flash", "sdpa-cudnn", "fa3"


def bars(records, T, d=128, causal=False):
    """The measured speed, forward, of every kernel of `REACHED` that is in the records,
    in the last of them, for one sequence length: a bar each, with its TFLOP/s.
    """
    rates = {}
    for record in records:
        lines = record.ladder(d, causal)
        rates |= {x: dict(line)[T] for x, line in lines.items() if T in dict(line)}
    methods = [method for method in REACHED if method in rates]
    require(methods, "records", f"cells with T = {T}, d = {d}", "none")
    picture, ax = figure(4.4, 0.42 * len(methods) + 0.6)
    for y, method in enumerate(methods):
        color = METHODS[method][1]
        rate = float(numbers(method, rates[method], 0))
        ax.barh(y, rate, 0.7, color=color)
        place = {"textcoords": "offset points", "va": "center"}
        ax.annotate(f"{rate:.0f}", (rate, y), (4, 0), **place)
    ax.set_yticks(range(len(methods)), [METHODS[name][0] for name in methods])
    ax.invert_yaxis()
    ax.set(xlabel="TFLOP/s", xlim=(0, 1.15 * ax.dataLim.x1))
    ax.tick_params(axis="y", length=0, labelsize=11)
    ax.grid(False, axis="y")
    lines = "\n".join(record.provenance() for record in records).splitlines()
    picture.conditions = "\n".join(dict.fromkeys(lines))  # each line once
    return picture


def contest(record, d=128, direction="forward"):
    """Speeds from the record `scores`: ours with lists made before, FlexAttention's."""
    cells = record.cells_of(d=d, direction=direction)
    rates = {(c["variant"], c["method"]): c["tflops"] for c in cells if "tflops" in c}
    variants = list(dict.fromkeys(variant for variant, _ in rates))
    picture, ax = figure(WIDTH, 0.7 * len(variants) + 1)
    sides = ("flashlib", BLUE, ("lists", "auto")), ("FlexAttention", PURPLE, ("flex",))
    for place, (label, color, methods) in enumerate(sides):
        speeds = [
            next((rates[x, m] for m in methods if (x, m) in rates), 0) for x in variants
        ]
        rows = [y + 0.4 * place - 0.2 for y in range(len(variants))]
        bar = ax.barh(rows, speeds, 0.38, color=color, label=label)
        ax.bar_label(bar, fmt="%.0f", padding=4)
    ax.set_yticks(range(len(variants)), variants)
    ax.invert_yaxis()
    ax.set(xlabel="TFLOP/s", title=f"{direction}, $d = {d}$")
    ax.legend(loc="lower right")
    provenance(picture, record)
    return picture


def shared(record, ranks):
    """The measured speed of each GPU, versus the length of the sequence that this many
    share, from the record `ring`: forward, and forward and backward.
    """
    speeds = {}
    for direction in ("forward", "forward+backward"):
        key = {"ranks": ranks, "direction": direction}
        lines = {x: record.curve("T", "tflops", method=x, **key) for x in METHODS}
        # The longest sequence has one method only.
        compared = {T for T, _ in lines["single"]}
        lines = {x: [at for at in lines[x] if at[0] in compared] for x in lines}
        speeds[_spoken(direction)] = {x: line for x, line in lines.items() if line}
    return _speeds(record, f"{ranks} ranks", speeds, "TFLOP/s per GPU")


def memory(record):
    """The measured peak of device memory during a call, above its inputs and output,
    versus sequence length, both logarithmic. A length at which a method could not run
    has no point.
    """
    points = {}
    for cell in record.memory:
        if "extra_bytes" in cell:
            point = (cell["T_q"], cell["extra_bytes"] / 2**20)
            points.setdefault(cell["method"], []).append(point)
    require(points, f"record {record.name!r}", "measured memory", "none")
    picture, ax = figure(WIDTH, 3.8)
    _methods(ax, {method: sorted(line) for method, line in points.items()})
    doubling(ax, sorted({T for line in points.values() for T, _ in line}))
    ax.set_yscale("log")
    directions = dict.fromkeys(_spoken(cell["direction"]) for cell in record.memory)
    ax.set(xlabel="sequence length $T$", ylabel="extra memory, MiB")
    ax.set_title(", ".join(directions))
    provenance(picture, record, "memory")
    return picture


def _spoken(direction):
    return direction.replace("+", " and ")


def _methods(ax, lines):
    """Draw {method: [(x, y)]}, each in its own look."""
    for method, (label, color, marker) in METHODS.items():
        if method in lines:
            x, y = (numbers(method, x, 1) for x in zip(*lines[method], strict=True))
            dash = "--" if method.endswith("-atomic") else "-"
            ax.plot(x, y, label=label, color=color, marker=marker, linestyle=dash)
    label_directly(ax)


def provenance(figure, record, part="cells"):
    """Say below a figure, folded, where and how a part of a record was measured."""
    figure.conditions = record.provenance(part)
