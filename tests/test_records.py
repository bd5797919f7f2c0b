"""The committed record of forward speeds: complete, of today's kernels, and over the bars. Then: every judge
can fail.

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
from flashlib.kernels import flash2

ROOT = pathlib.Path(__file__).resolve().parents[1]

D, T = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)
METHODS = ("standard", "flash2", "sdpa-flash", "sdpa-cudnn")
LONG = [t for t in T if t >= 4096]
MEMORY_T = (8192, 32768, 131072)
TILE = ("BLOCK_Q", "BLOCK_K", "num_warps", "num_stages", "descriptor")
FILES = ("api.py", "kernels/tiles.py", "kernels/standard.py", "kernels/flash2.py")
REDO = "run `make bench` on a GPU and commit the new record"


# -------------------------------------------------- the judges


def incomplete(record):
    """What the record does not hold of the grid that the book promises."""
    promised = {
        "d": D,
        "causal": (False, True),
        "T": T,
        "methods": METHODS,
        "memory_T": MEMORY_T,
        "strided": ("flash2",),
    }
    faults = [
        f"the grid lacks {key} = {value}: {REDO}"
        for key, values in promised.items()
        for value in values
        if value not in record.grid[key]
    ]
    if (record.grid["tokens"], record.grid["width"]) != (16384, 2048) or record.grid["strided_from"] > LONG[
        0
    ]:
        faults.append(
            f"the grid has other sizes than 16384 tokens, H d = 2048, strided from T = {LONG[0]}: {REDO}"
        )
    faults += [f"missing cell: {line}: {REDO}" for line in record.missing()]
    for cell in record.cells + record.memory:
        rounds = min((len(cell[key]) for key in ("launch_ms", "graph_ms") if key in cell), default=3)
        if rounds < 3:
            faults.append(
                f"only {rounds} rounds of {cell['method']}, d = {cell['d']}, T = {cell['T_q']}: {REDO}"
            )
    return faults


def outdated(record):
    """The kernel files that the record does not speak of, or whose code has changed since."""
    faults = [
        f"the record has no hash of {path}: {REDO}" for path in FILES if path not in record.data["files"]
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

    for d, causal, t in itertools.product(D, (False, True), LONG):
        shape = {"d": d, "causal": causal, "T_q": t}
        if d in (64, 128):
            ratio(1.25, {"method": "flash2", **shape}, {"method": "sdpa-flash", **shape})
        ratio(0.85, {"method": "flash2", "layout": "strided", **shape}, {"method": "flash2", **shape})
    return faults


def hungry(record):
    """Whether flash2 needs more memory than O(T), or did not run at T = 131072."""
    try:
        extra = {t: record.memory_cell(method="flash2", T_q=t, H=8, d=128)["extra_bytes"] for t in MEMORY_T}
    except ValueError as error:
        return [str(error)]
    short, longest = min(extra), max(extra)
    # One float of 4 bytes for each of the 8 x T rows is the log-sum-exp; a T x T matrix would be 16 times as
    # much at the shortest length and 256 times as much at the longest.
    faults = [
        f"flash2 takes {extra[t]} extra bytes at T = {t}" for t in extra if not 0 < extra[t] <= 4 * 8 * 4 * t
    ]
    if not extra[longest] * short <= 1.1 * extra[short] * longest:
        faults.append(f"the extra memory of flash2 grows faster than T: {extra}")
    return faults


JUDGES = (incomplete, outdated, slow, hungry)


@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.__name__)
def test_the_committed_record(judge):
    waits_for_gpu("flashlib/records/forward.json", (ROOT / "flashlib/records/forward.json").exists())
    faults = judge(records.load("forward"))
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
    ladder = load_script("ladder")
    assert ladder.FIGURE.is_file(), "run `python benchmarks/ladder.py`"
    shown = png_text(ladder.FIGURE.read_bytes()).get("Record")
    assert shown == ladder.record_hash(records.load(ladder.RECORD)), "run `python benchmarks/ladder.py`"


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
        row = flash2.fitting(16, problem[0], 90, 227 * 1024, True)
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


@pytest.fixture
def data():
    """A made-up record that every judge accepts."""
    speed = {"standard": 30.0, "flash2": 450.0, "sdpa-flash": 320.0, "sdpa-cudnn": 550.0}

    def cell(method, layout, H, t, d, causal):
        tflops = speed[method] * (0.95 if layout == "strided" else 1.0)
        return {
            "method": method, "B": 1, "H": H, "H_kv": H, "T_q": t, "T_k": t, "d": d, "causal": causal,
            "layout": layout, "dtype": "bfloat16", "launch_ms": [1.0, 1.1, 0.9], "timed": "launch", "ms": 1.0,
            "tflops": tflops,
        }  # fmt: skip

    cells = [
        cell(method, layout, 2048 // d, t, d, causal)
        for d, causal, t, method in itertools.product(D, (False, True), T, METHODS)
        for layout in (("contiguous", "strided") if method == "flash2" and t in LONG else ("contiguous",))
    ]
    memory = [
        {
            **cell(method, "contiguous", 8, t, 128, False),
            "extra_bytes": 8 * t * (4 if method != "standard" else 6 * t),
        }
        for method, t in itertools.product(METHODS, MEMORY_T)
    ]
    return {
        "pass": "forward", "gpu": {"name": "made up"}, "date": "2000-01-01T00:00:00Z", "commit": "unknown",
        "versions": dict.fromkeys(("python", "torch", "triton", "cuda", "cudnn"), "0"),
        "files": records.file_hashes(FILES), "flop_rule": "", "timing": "", "ceilings": {},
        "grid": {
            "d": list(D), "causal": [False, True], "T": list(T), "tokens": 16384, "width": 2048, "rounds": 3,
            "methods": list(METHODS), "strided": ["flash2"], "strided_from": 4096, "memory_T": list(MEMORY_T),
        },
        "cells": cells, "memory": memory,
    }  # fmt: skip


def test_the_judges_accept_what_is_right(data):
    assert [judge(records.Record("made up", data)) for judge in JUDGES] == [[], [], [], []]


def find(cells, **key):
    (cell,) = [cell for cell in cells if all(cell[field] == value for field, value in key.items())]
    return cell


def drop_cell(data):
    data["cells"].remove(find(data["cells"], method="standard", d=256, T_q=512, causal=True))


def drop_memory(data):
    data["memory"].remove(find(data["memory"], method="standard", T_q=131072))


def shrink_grid(data):
    data["grid"]["T"].remove(16384)
    data["cells"] = [cell for cell in data["cells"] if cell["T_q"] != 16384]


def two_rounds(data):
    find(data["cells"], method="flash2", d=64, T_q=1024, causal=False)["launch_ms"].pop()


def changed_kernel(data):
    data["files"]["kernels/flash2.py"] = "0" * 16


def unhashed_kernel(data):
    del data["files"]["kernels/tiles.py"]


def just_too_slow(data):
    find(data["cells"], method="flash2", d=128, T_q=8192, causal=True, layout="contiguous")["tflops"] = (
        1.249 * 320
    )


def slow_when_strided(data):
    find(data["cells"], method="flash2", d=256, T_q=4096, causal=True, layout="strided")["tflops"] = (
        0.849 * 450
    )


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


@pytest.mark.parametrize(
    ("doctor", "judge"),
    [
        (drop_cell, incomplete), (drop_memory, incomplete),
        (shrink_grid, incomplete), (two_rounds, incomplete),
        (changed_kernel, outdated), (unhashed_kernel, outdated),
        (just_too_slow, slow), (slow_when_strided, slow), (rival_failed, slow),
        (quadratic_memory, hungry), (ran_out_of_memory, hungry),
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_a_judge_catches(data, doctor, judge):
    doctor(data)
    faults = judge(records.Record("doctored", data))
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


@pytest.mark.parametrize(
    "doctor", [nan_time, no_time, bool_for_int, same_cell_twice, unknown_rounds, no_gpu, text_for_list]
)
def test_a_broken_record_is_refused(data, doctor):
    doctor(data)
    with pytest.raises(ValueError, match="record 'broken'"):
        records.Record("broken", data)


def test_load(data, tmp_path, monkeypatch):
    (tmp_path / "made.json").write_text(json.dumps(data))
    (tmp_path / "torn.json").write_text('{"pass": ')
    monkeypatch.setattr(records.importlib.resources, "files", lambda package: tmp_path)
    assert records.load("made").cell(method="flash2", d=64, causal=True, T_q=512)["tflops"] == 450.0
    with pytest.raises(ValueError, match="no record 'absent': run `make bench`"):
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
