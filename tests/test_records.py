"""The committed records of speeds: complete, of today's kernels, and over the bars. Then: every judge can
fail.

No speed is measured here. A record that is missing or old fails with what to do about it.
"""

import copy
import importlib.util
import itertools
import json
import math
import pathlib
import struct
import zlib

import pytest
from pending import waits_for_gpu

from flashlib import records
from flashlib.kernels import flash2, launch

ROOT = pathlib.Path(__file__).resolve().parents[1]

D, T = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)
LONG = [t for t in T if t >= 4096]
MEMORY_T = (8192, 32768, 131072)
RIVALS = ("sdpa-flash", "sdpa-cudnn")
LADDER = ("standard", "flash1", "flash2", *RIVALS)
STEPS = ("swapped", "parallel", "deferred", "skipping")
BACKWARD_LADDER = ("standard", "flash2", "flash2-atomic", *RIVALS)
LOOP_ORDERS = ("algorithm-5", "algorithm-6")
HOPPER_LADDER = ("hopper", "flash2", *RIVALS)
HOPPER_STEPS = ("copies", "specialised", "overlapped", "turns")
LEADERBOARD = (1, 16, 16384, 64, True)
TILE = ("BLOCK_Q", "BLOCK_K", "num_warps", "num_stages", "descriptor")
COMMON = ("kernels/launch.py", "kernels/tiles.py", "kernels/flash2.py")
FILES = {
    "forward": (*COMMON, "kernels/standard.py", "kernels/flash1.py"),
    "steps": (*COMMON, "kernels/flash1.py", "kernels/steps/flash2.py"),
    "backward": (*COMMON, "kernels/gradients.py", "kernels/backward.py", "kernels/steps/backward.py"),
    "hopper": (
        *COMMON, "kernels/backward.py", "kernels/copies.py", "kernels/hopper.py",
        "kernels/hopper_backward.py", "kernels/steps/hopper.py",
    ),
}  # fmt: skip
REDO = "run `make bench` on a GPU and commit the new record"


def ladder(d, lengths):
    """The shapes (B, H, T, d, causal) with B T = 16384 and H d = 2048."""
    return [
        (16384 // t, 2048 // e, t, e, causal) for e, causal, t in itertools.product(d, (False, True), lengths)
    ]


def long(lengths):
    return [(1, 8, t, 128, False) for t in lengths]


# {record: [(methods, direction, layout, shapes)]}: what the book promises to have measured.
PROMISED = {
    "forward": [
        (LADDER, "forward", "contiguous", ladder(D, T)),
        (("flash2",), "forward", "strided", ladder(D, LONG)),
    ],
    "steps": [
        (("flash1", *STEPS, "flash2"), "forward", "contiguous", ladder((64, 128), (1024, 4096, 16384))),
        (("flash2-4-warps", "flash2-8-warps"), "forward", "contiguous", ladder((64, 128), (4096,))),
    ],
    "backward": [
        (BACKWARD_LADDER, "backward", "contiguous", ladder(D, T)),
        (BACKWARD_LADDER, "forward+backward", "contiguous", ladder(D, T)),
        (BACKWARD_LADDER[1:], "forward+backward", "contiguous", [LEADERBOARD]),
        (LOOP_ORDERS, "backward", "contiguous", ladder((64,), (512, 1024, 2048))),
    ],
    "hopper": [
        (HOPPER_LADDER, "forward", "contiguous", ladder(D, T)),
        (HOPPER_STEPS, "forward", "contiguous", ladder(D, (1024, 4096, 16384))),
        (HOPPER_LADDER, "backward", "contiguous", ladder((64, 128), T)),
        (("hopper-atomic",), "backward", "contiguous", ladder((64,), LONG)),
    ],
}
MEMORY = {
    "forward": [
        (("standard", "flash2", *RIVALS), "forward", "contiguous", long(MEMORY_T)),
        (("flash1",), "forward", "contiguous", long(MEMORY_T[:2])),
    ],
    "steps": [],
    "backward": [(BACKWARD_LADDER, "forward+backward", "contiguous", long(MEMORY_T))],
    "hopper": [],
}


# -------------------------------------------------- the judges


def incomplete(record):
    """What the record does not hold of what the book promises."""
    faults = [f"missing cell: {line}: {REDO}" for line in record.missing()]
    for part, promised in (("sweeps", PROMISED), ("memory", MEMORY)):
        planned = {
            (method, sweep["direction"], sweep["layout"], tuple(shape))
            for sweep in record.grid[part]
            for method, shape in itertools.product(sweep["methods"], sweep["shapes"])
        }
        for methods, direction, layout, shapes in promised[record.name]:
            for method, shape in itertools.product(methods, shapes):
                if (method, direction, layout, shape) not in planned:
                    faults.append(f"{part}: {method}, {direction}, {layout}, {shape} is missing: {REDO}")
    for cell in record.cells:
        rounds = min((len(cell[key]) for key in ("launch_ms", "graph_ms") if key in cell), default=3)
        if rounds < 3:
            faults.append(
                f"only {rounds} rounds of {cell['method']}, d = {cell['d']}, T = {cell['T_q']}: {REDO}"
            )
    return faults


def outdated(record):
    """The kernel files that the record does not speak of, or whose code has changed since."""
    faults = [
        f"the record has no hash of {path}: {REDO}"
        for path in FILES[record.name]
        if path not in record.data["files"]
    ]
    return faults + [f"{path} has changed since the record was measured: {REDO}" for path in record.stale()]


def slow(record):
    """The bars of speed that the record misses, or cannot show because a cell is missing or has no time."""
    faults = []

    def ratio(bar, ours, other):
        try:
            value = record.cell(**ours)["tflops"] / record.cell(**other)["tflops"]
        except ValueError as error:
            faults.append(str(error))
            return
        if not value >= bar:
            faults.append(f"{ours} is {value:.3f} of {other}, the bar is {bar}")

    def against(other, bar, **shape):
        ratio(bar, {"method": "flash2", **shape}, {"method": other, **shape})

    if record.name == "forward":
        for d, causal, t in itertools.product(D, (False, True), T):
            shape = {"d": d, "causal": causal, "T_q": t}
            against("sdpa-flash", {512: 1.0, 1024: 1.2, 2048: 1.2}.get(t, 1.3), **shape)
            against("flash1", 1.0, **shape)
            if t in LONG:
                flash2 = {"method": "flash2", **shape}
                ratio(0.85, {**flash2, "layout": "strided"}, flash2)
    if record.name == "steps":
        for d, causal, t in itertools.product((64, 128), (False, True), (1024, 4096, 16384)):
            against("flash1", 1.0, d=d, causal=causal, T_q=t)
    if record.name == "backward":
        for d, causal, t in itertools.product(D, (False, True), T[2:]):
            shape = {"d": d, "H": 2048 // d, "causal": causal, "T_q": t, "direction": "backward"}
            against("sdpa-flash", 1.0 if d == 256 else 1.25, **shape)
        _, H, t, d, causal = LEADERBOARD
        key = {"H": H, "d": d, "T_q": t, "causal": causal, "direction": "forward+backward"}
        times = [c["ms"] for m in ("flash2", "flash2-atomic") for c in measured(record, method=m, **key)]
        if not times or min(times) >= 6.2:
            faults.append(f"forward and backward of the leaderboard's shape: {times} ms, the bar is 6.2")
    if record.name == "hopper":
        faults += [f"{bar}: {value}" for bar, value in hopper_bars(record).items() if value is not None]
    return faults


def hopper_bars(record):
    """{bar: the ratio that misses it, or why there is none; None where it is met}. "auto" takes hopper where
    that runs, so it must not be the slower choice. Backward passes shorter than 2048 last as long as Python
    takes to launch them.
    """
    found = {}
    for direction, d, causal, t in itertools.product(("forward", "backward"), D, (False, True), T):
        bars = {"flash2": 1.0 if direction == "forward" or t >= 2048 else None}
        if direction == "forward":
            bars["sdpa-cudnn"] = {512: 0.85, 1024: 0.9}.get(t, 1.0 if t in LONG else None)
            bars["sdpa-flash"] = {64: 1.5, 128: 1.75}.get(d) if t in LONG else None
        elif d == 256:
            continue
        elif t in LONG:
            bars |= {"sdpa-cudnn": 0.8, "sdpa-flash": 1.3}
        key = {"direction": direction, "d": d, "causal": causal, "T_q": t}
        for other, bar in bars.items():
            if bar is None:
                continue
            mask = "causal" if causal else "full"
            name = f"{direction}, d = {d}, {mask}, T = {t}, at least {bar} of {other}"
            try:
                ours, theirs = (record.cell(method=method, **key)["tflops"] for method in ("hopper", other))
            except ValueError as error:
                found[name] = str(error)
            else:
                found[name] = None if ours >= bar * theirs else f"{ours / theirs:.3f}"
    return found


def measured(record, **key):
    """The one cell of the key in a list, or an empty list."""
    try:
        return [record.cell(**key)]
    except ValueError:
        return []


def hungry(record):
    """Whether one of ours that is tiled needs more memory than O(T), or did not run at T = 131072."""
    faults = []
    for methods, direction, _, shapes in MEMORY[record.name]:
        for method in {"flash1", "flash2", "flash2-atomic"}.intersection(methods):
            lengths = [shape[2] for shape in shapes]
            key = {"method": method, "direction": direction, "H": 8, "d": 128}
            try:
                extra = {t: record.memory_cell(T_q=t, **key)["extra_bytes"] for t in lengths}
            except ValueError as error:
                faults.append(str(error))
                continue
            short, longest = min(extra), max(extra)
            # Forward: one float of 4 bytes for each of the 8 x T rows is the log-sum-exp, and flash1 keeps O
            # in 4 bytes beside it. Backward: O, and dQ in 4 bytes, are thin matrices; three statistics. A
            # T x T matrix in two bytes would be 64 thin matrices at the shortest length already.
            thin, row = 8 * 128 * 2, 8 * 4
            allowed = 4 * row if (method, direction) == ("flash2", "forward") else 6 * thin
            faults += [
                f"{method}, {direction}, takes {extra[t]} extra bytes at T = {t}"
                for t in extra
                if not 0 < extra[t] <= allowed * t
            ]
            if not extra[longest] * short <= 1.1 * extra[short] * longest:
                faults.append(f"the extra memory of {method}, {direction}, grows faster than T: {extra}")
    return faults


JUDGES = (incomplete, outdated, slow, hungry)


@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.__name__)
@pytest.mark.parametrize("name", PROMISED)
def test_the_committed_record(name, judge):
    waits_for_gpu(f"flashlib/records/{name}.json", name in records.names())
    faults = judge(records.load(name))
    assert not faults, "\n".join(faults)


def load_script(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def png_text(data):
    """{key: text} of the tEXt chunks of a PNG."""
    place, found = 8, {}
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        assert zlib.crc32(kind + body) == struct.unpack(">I", data[place + 8 + size : place + 12 + size])[0]
        if kind == b"tEXt":
            key, text = body.split(b"\0")
            found[key.decode()] = text.decode()
        place += 12 + size
    return found


def test_the_committed_figure_shows_the_committed_record():
    figure = load_script("ladder")
    assert figure.FIGURE.is_file(), "run `python benchmarks/ladder.py`"
    shown = png_text(figure.FIGURE.read_bytes()).get("Record")
    assert shown == figure.record_hash(figure.newest()), "run `python benchmarks/ladder.py`"


def test_the_figure_prefers_the_whole_record(data, tmp_path, monkeypatch):
    figure = load_script("ladder")
    (tmp_path / "tiles.json").write_text(json.dumps(records.load("tiles").data))
    monkeypatch.setattr(records.importlib.resources, "files", lambda package: tmp_path)
    assert figure.newest().name == "tiles"
    (tmp_path / "forward.json").write_text(json.dumps(data))
    assert figure.newest().name == "forward"
    figure.draw(figure.newest(), tmp_path / "ladder.png")
    drawn = png_text((tmp_path / "ladder.png").read_bytes())
    assert drawn["Record"] == figure.record_hash(figure.newest())


# -------------------------------------------------- the sweep of tiles


def test_the_chosen_tiles_are_near_the_best():
    sweep = records.load("tiles").sweep
    problems = {(c["d"], c["causal"], c["T_q"]) for c in sweep}
    assert len(problems) == 18
    for problem in problems:
        rates = {
            tuple(c[field] for field in TILE): c["tflops"]
            for c in sweep
            if (c["d"], c["causal"], c["T_q"]) == problem
        }
        row = launch.fitting("flash2", flash2.CONFIGURATIONS, 16, problem[0], 90, 227 * 1024, True, None)
        chosen = rates[tuple(getattr(row, field) for field in TILE)]
        assert chosen >= 0.95 * max(rates.values()), (problem, row, rates)


def test_flash2_against_pytorch_in_the_sweep():
    rates = {(c["method"], c["d"], c["causal"], c["T_q"]): c["tflops"] for c in records.load("tiles").cells}
    assert len(rates) == 54
    for (method, d, causal, T), rate in rates.items():
        if method == "flash2" and T >= 4096 and d in (64, 128):
            assert rate >= 1.25 * rates["sdpa-flash", d, causal, T], (d, causal, T)


def test_a_broken_sweep_is_refused():
    whole = records.load("tiles").data
    for part in ("cells", "sweep"):
        for bad in ({"tflops": math.nan}, {"tflops": -1.0}, {"T_q": "4096"}):
            doctored = {**whole, part: [{**whole[part][0], **bad}]}
            with pytest.raises(ValueError, match=rf"record 'tiles', {part}\[0\]"):
                records.Tiles("tiles", doctored)


# -------------------------------------------------- the judges can fail

SPEED = {
    "standard": 30.0, "flash1": 20.0, "flash2": 450.0, "hopper": 570.0, "sdpa-flash": 320.0,
    "sdpa-cudnn": 550.0,
}  # fmt: skip


def made_up(name):
    """A made-up record that every judge accepts, with half the speed backwards."""

    def cells(sweeps):
        return [
            {
                "method": method, "direction": direction, "B": B, "H": H, "H_kv": H, "T_q": t, "T_k": t,
                "d": d, "causal": causal, "layout": layout, "dtype": "bfloat16",
            }
            for methods, direction, layout, shapes in sweeps
            for method, (B, H, t, d, causal) in itertools.product(methods, shapes)
        ]  # fmt: skip

    def timed(cell):
        speed = SPEED.get(cell["method"], 100.0) * (0.95 if cell["layout"] == "strided" else 1.0)
        if cell["direction"] != "forward":
            speed /= 2
        return {**cell, "launch_ms": [5.0, 5.1, 4.9], "timed": "launch", "ms": 5.0, "tflops": speed}

    def sized(cell):
        words = 6 * cell["T_q"] if cell["method"] == "standard" else 4
        if cell["method"] != "flash2" or cell["direction"] != "forward":
            words += 512
        return {**cell, "extra_bytes": 8 * cell["T_q"] * words}

    def described(sweeps):
        fields = ("methods", "direction", "layout", "shapes")
        return json.loads(json.dumps([dict(zip(fields, sweep, strict=True)) for sweep in sweeps]))

    return {
        "pass": name, "gpu": {"name": "made up"}, "date": "2000-01-01T00:00:00Z", "commit": "unknown",
        "versions": dict.fromkeys(("python", "torch", "triton", "cuda", "cudnn"), "0"),
        "files": records.file_hashes(FILES[name]), "flop_rule": "", "timing": "", "ceilings": {},
        "grid": {
            "tokens": 16384, "width": 2048, "rounds": 3, "sweeps": described(PROMISED[name]),
            "memory": described(MEMORY[name]),
        },
        "cells": [timed(cell) for cell in cells(PROMISED[name])],
        "memory": [sized(cell) for cell in cells(MEMORY[name])],
    }  # fmt: skip


@pytest.fixture
def data():
    """A made-up record of the forward pass."""
    return made_up("forward")


@pytest.mark.parametrize("name", PROMISED)
def test_the_judges_accept_what_is_right(name):
    record = records.Record(name, made_up(name))
    assert [judge(record) for judge in JUDGES] == [[], [], [], []]
    assert "made up, 2000-01-01, bfloat16, B T = 16384, H d = 2048" in record.provenance()
    # A shape beside the ladder with the same d and T does not stand in it.
    for direction in {cell["direction"] for cell in record.cells}:
        lines = record.ladder(64, True, direction)
        assert all(len(points) == len({t for t, _ in points}) for points in lines.values())
        assert all(points == sorted(points) for points in lines.values()) and "flash2" in lines


def find(cells, **key):
    (cell,) = [cell for cell in cells if all(cell[field] == value for field, value in key.items())]
    return cell


def drop_cell(data):
    data["cells"].remove(find(data["cells"], method="standard", d=256, T_q=512, causal=True))


def drop_memory(data):
    data["memory"].remove(find(data["memory"], method="standard", T_q=131072))


def shrink_grid(data):
    for shapes in [sweep["shapes"] for sweep in data["grid"]["sweeps"]]:
        shapes[:] = [shape for shape in shapes if shape[2] != 16384]
    data["cells"] = [cell for cell in data["cells"] if cell["T_q"] != 16384]


def no_memory_of_flash1(data):
    data["grid"]["memory"].pop()
    data["memory"] = [cell for cell in data["memory"] if cell["method"] != "flash1"]


def two_rounds(data):
    find(data["cells"], method="flash2", d=64, T_q=1024, causal=False)["launch_ms"].pop()


def changed_kernel(data):
    data["files"]["kernels/flash2.py"] = "0" * 16


def unhashed_kernel(data):
    del data["files"]["kernels/tiles.py"]


def just_too_slow(data):
    cell = find(data["cells"], method="flash2", d=128, T_q=8192, causal=True, layout="contiguous")
    cell["tflops"] = 1.299 * 320


def short_and_too_slow(data):
    find(data["cells"], method="flash2", d=256, T_q=1024, causal=True)["tflops"] = 1.199 * 320


def slow_when_strided(data):
    cell = find(data["cells"], method="flash2", d=256, T_q=4096, causal=True, layout="strided")
    cell["tflops"] = 0.849 * 450


def rival_failed(data):
    cell = find(data["cells"], method="sdpa-flash", d=64, T_q=4096, causal=False)
    for key in ("launch_ms", "timed", "ms", "tflops"):
        del cell[key]
    cell["error"] = "No available kernel"


def quadratic_memory(data):
    for cell in data["memory"]:
        cell["extra_bytes"] = cell["T_q"] ** 2 // 128


def ran_out_of_memory(data):
    cell = find(data["memory"], method="flash2", T_q=131072)
    cell["error"] = "OutOfMemoryError"


def slower_than_flash1(data):
    find(data["cells"], method="flash2", d=64, T_q=4096, causal=False)["tflops"] = 19.0


def no_loop_orders(data):
    data["grid"]["sweeps"].pop()
    data["cells"] = [cell for cell in data["cells"] if cell["method"] not in LOOP_ORDERS]


def slow_backward(data):
    key = {"method": "flash2", "direction": "backward", "d": 64, "T_q": 2048, "causal": True}
    find(data["cells"], **key)["tflops"] = 1.249 * 160


def slow_wide_backward(data):
    key = {"method": "flash2", "direction": "backward", "d": 256, "T_q": 16384, "causal": False}
    find(data["cells"], **key)["tflops"] = 0.999 * 160


def leaderboard_not_reached(data):
    for cell in data["cells"]:
        cell["ms"] = 6.3


def leaderboard_not_run(data):
    for cell in data["cells"]:
        if cell["H"] == 16 and cell["d"] == 64:
            cell["error"] = "OutOfMemoryError"


def hopper_below_cudnn(data):
    key = {"method": "hopper", "direction": "forward", "d": 256, "T_q": 8192, "causal": True}
    find(data["cells"], **key)["tflops"] = 0.999 * 550


def hopper_near_flash(data):
    key = {"method": "hopper", "direction": "forward", "d": 128, "T_q": 4096, "causal": False}
    find(data["cells"], **key)["tflops"] = 1.749 * 320


def hopper_slow_when_short(data):
    key = {"method": "hopper", "direction": "forward", "d": 64, "T_q": 512, "causal": True}
    find(data["cells"], **key)["tflops"] = 0.849 * 550


def hopper_slow_backwards(data):
    key = {"method": "hopper", "direction": "backward", "d": 64, "T_q": 16384, "causal": False}
    find(data["cells"], **key)["tflops"] = 1.299 * 160


def hopper_failed(data):
    key = {"method": "hopper", "direction": "backward", "d": 128, "T_q": 2048, "causal": False}
    find(data["cells"], **key)["error"] = "wrong result"


def no_hopper_steps(data):
    data["grid"]["sweeps"].pop(1)
    data["cells"] = [cell for cell in data["cells"] if cell["method"] not in HOPPER_STEPS]


def hungry_atomics(data):
    find(data["memory"], method="flash2-atomic", T_q=8192)["extra_bytes"] = 2 * 8 * 8192**2


@pytest.mark.parametrize(
    ("name", "doctor", "judge"),
    [
        ("forward", drop_cell, incomplete), ("forward", drop_memory, incomplete),
        ("forward", shrink_grid, incomplete), ("forward", no_memory_of_flash1, incomplete),
        ("forward", two_rounds, incomplete), ("backward", no_loop_orders, incomplete),
        ("forward", changed_kernel, outdated), ("steps", changed_kernel, outdated),
        ("backward", unhashed_kernel, outdated),
        ("forward", just_too_slow, slow), ("forward", short_and_too_slow, slow),
        ("forward", slow_when_strided, slow), ("forward", rival_failed, slow),
        ("steps", slower_than_flash1, slow), ("backward", slow_backward, slow),
        ("backward", slow_wide_backward, slow), ("backward", leaderboard_not_reached, slow),
        ("backward", leaderboard_not_run, slow),
        ("hopper", no_hopper_steps, incomplete), ("hopper", changed_kernel, outdated),
        ("hopper", hopper_below_cudnn, slow), ("hopper", hopper_near_flash, slow),
        ("hopper", hopper_slow_when_short, slow), ("hopper", hopper_slow_backwards, slow),
        ("hopper", hopper_failed, slow),
        ("forward", quadratic_memory, hungry), ("forward", ran_out_of_memory, hungry),
        ("backward", quadratic_memory, hungry), ("backward", ran_out_of_memory, hungry),
        ("backward", hungry_atomics, hungry),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_a_judge_catches(name, doctor, judge):
    data = made_up(name)
    doctor(data)
    faults = judge(records.Record(name, data))
    assert faults
    if judge in (incomplete, outdated):
        assert all("make bench" in fault for fault in faults)


# -------------------------------------------------- the loader


def nan_time(data):
    data["cells"][0]["ms"] = float("nan")


def no_time(data):
    del data["cells"][0]["tflops"]


def bool_for_int(data):
    data["cells"][0]["B"] = True


def same_cell_twice(data):
    data["cells"].append(copy.deepcopy(data["cells"][5]))


def unknown_rounds(data):
    data["cells"][0]["timed"] = "graph"


def no_gpu(data):
    del data["gpu"]["name"]


def text_for_list(data):
    data["cells"] = "none"


def no_shapes(data):
    del data["grid"]["sweeps"][1]["shapes"]


def no_direction(data):
    del data["memory"][0]["direction"]


def negative_memory(data):
    data["memory"][0]["extra_bytes"] = -1


@pytest.mark.parametrize(
    "doctor",
    [
        nan_time, no_time, bool_for_int, same_cell_twice, unknown_rounds, no_gpu, text_for_list, no_shapes,
        no_direction, negative_memory,
    ],
)  # fmt: skip
def test_a_broken_record_is_refused(data, doctor):
    doctor(data)
    with pytest.raises(ValueError, match="record 'broken'"):
        records.Record("broken", data)


def test_load(data, tmp_path, monkeypatch):
    (tmp_path / "made.json").write_text(json.dumps(data))
    (tmp_path / "torn.json").write_text('{"pass": ')
    monkeypatch.setattr(records.importlib.resources, "files", lambda package: tmp_path)
    assert records.names() == ("made", "torn")
    assert records.load("made").cell(method="flash2", d=64, causal=True, T_q=512)["tflops"] == 450.0
    with pytest.raises(ValueError, match="no record 'absent', only made, torn: run `make bench`"):
        records.load("absent")
    with pytest.raises(ValueError, match=r"no record '\.\./made'"):
        records.load("../made")
    with pytest.raises(ValueError, match="'torn' is not valid JSON"):
        records.load("torn")


def test_cell(data):
    record = records.Record("made up", data)
    assert record.cell(method="flash2", d=64, causal=True, T_q=4096, layout="strided")["layout"] == "strided"
    for key, message in [
        (
            {"method": "flash3", "d": 64, "causal": True, "T_q": 512},
            r"no cell in cells with .*method = flash3",
        ),
        ({"method": "flash2", "d": 64, "causal": True}, "6 cells in cells"),
        ({"method": "flash2", "T": 512}, "unknown field 'T'"),
    ]:
        with pytest.raises(ValueError, match=message):
            record.cell(**key)
    rival_failed(data)
    with pytest.raises(ValueError, match="was not measured: No available kernel"):
        record.cell(method="sdpa-flash", d=64, causal=False, T_q=4096)


def test_the_hash_sees_code_and_nothing_else():
    code = 'def f(x):\n    """Text."""\n    return x + 1\n'
    same = '"""Module."""\n\n# why\ndef f(x):\n    """Other\n    text."""\n    return (x + 1)  # one more\n'
    assert records.syntax_hash(code) == records.syntax_hash(same)
    assert records.syntax_hash(code) != records.syntax_hash(code.replace("1", "2"))
    # A fixed value: the same under every Python version that the book runs on.
    assert records.syntax_hash(code) == "551cc2f4983b1f8a"
    assert records.file_hashes(["no/such.py"]) == {"no/such.py": "missing"}
