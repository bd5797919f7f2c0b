"""The record of decoding: complete, of today's kernel, over the bars; every judge can fail. And the script
that makes it, without a GPU: the clock replaced, all else as it runs there.
"""

import copy
import functools
import itertools
import json
import math
import pathlib
import sys

import pytest
import torch
from pending import waits_for_gpu

from flashlib import records

ROOT = pathlib.Path(__file__).resolve().parents[1]
LENGTHS = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20)
CONTIGUOUS = [shape for shape in itertools.product((1, 8, 64), LENGTHS) if shape != (64, 2**20)]
PAGED = ((1, 2**14), (1, 2**16), (1, 2**18), (8, 2**14), (8, 2**16), (64, 2**14))
FLEXIBLE = ((1, 2**14), (1, 2**16), (8, 2**14), (8, 2**16))
PROMISED = [
    *((method, *shape, 0) for method in ("decode", "sdpa-flash", "sdpa-cudnn") for shape in CONTIGUOUS),
    *(("decode", *shape, page) for shape in PAGED for page in (16, 64, 256)),
    *(("flex", *shape, 0) for shape in FLEXIBLE),
]
FILES = ("kernels/__init__.py", "kernels/launch.py", "kernels/tiles.py", "kernels/decoding.py")
REDO = "run `python benchmarks/decoding.py` on a GPU and commit the new record"


def bytes_of(B, T):
    """Keys and values of 8 heads of 128, in two bytes."""
    return 2 * B * 8 * T * 128 * 2


# ------------------------------------------------------------------------------------ the judges


def incomplete(record):
    faults = [f"missing cell: {line}: {REDO}" for line in record.missing()]
    planned = {tuple(job) for job in record.grid["jobs"]}
    faults += [f"{job} is missing: {REDO}" for job in PROMISED if job not in planned]
    sizes = {"H": 32, "H_kv": 8, "T_q": 1, "d": 128, "dtype": "bfloat16"}
    faults += [f"{name} is not {value}" for name, value in sizes.items() if record.grid[name] != value]
    for cell in record.cells:
        if cell["method"] == "decode" and "error" in cell:
            faults.append(f"ours was not measured: {cell}")
        if len(cell.get("round_us", (1, 2, 3))) < 3:
            faults.append(f"fewer than three rounds: {cell}")
        if cell.get("bytes", bytes_of(cell["B"], cell["T_k"])) != bytes_of(cell["B"], cell["T_k"]):
            faults.append(f"wrong bytes: {cell}")
    return faults


def outdated(record):
    faults = [f"no hash of {path}: {REDO}" for path in FILES if path not in record.data["files"]]
    return faults + [f"{path} has changed: {REDO}" for path in record.stale()]


def slow(record):
    """The bars that the record misses, or cannot show because a cell is missing or has no time."""
    faults = []

    def wanted(what, found, bar, below=False):
        try:
            value = found()
        except ValueError as error:
            faults.append(str(error))
            return
        if not (value <= bar if below else value >= bar):
            faults.append(f"{what}: {value:.3f}, the bar is {bar}")

    for B, T in CONTIGUOUS:
        if bytes_of(B, T) >= 0.5e9:
            share = functools.partial(record.share, B=B, T_k=T)
            wanted(f"share of the copy rate, B = {B}, T = {T}", share, 0.85)
    wanted("microseconds of 16k keys", lambda: record.cell(B=1, T_k=2**14)["us"], 25.0, below=True)
    wanted("share of the copy rate, 256k keys", lambda: record.share(B=1, T_k=2**18), 0.5)
    for (B, T), page in itertools.product(PAGED, (16, 64, 256)):

        def ratio(B=B, T=T, page=page):
            return record.cell(B=B, T_k=T, page=page)["us"] / record.cell(B=B, T_k=T)["us"]

        bar = 1.2 if page == 16 else 1.07
        wanted(f"pages of {page} to contiguous, B = {B}, T = {T}", ratio, bar, below=True)
    return faults


JUDGES = (incomplete, outdated, slow)


@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.__name__)
def test_the_committed_record(judge):
    waits_for_gpu("flashlib/records/decoding.json", "decoding" in records.names())
    faults = judge(records.load("decoding"))
    assert not faults, "\n".join(faults)


# ------------------------------------------------------------------------------------ the judges can fail


def cell_of(method, B, T, page):
    share = {"decode": 0.9, "flex": 0.7}.get(method, 0.3) / {16: 1.15, 64: 1.05, 256: 1.02}.get(page, 1.0)
    us = 10.0 + bytes_of(B, T) / (share * 4.0e6) * (0.5 if bytes_of(B, T) < 0.5e9 else 0.99)
    return {
        "method": method, "B": B, "T_k": T, "page": page, "calls": 1, "bytes": bytes_of(B, T),
        "round_us": [us, us, us], "us": us, "tbs": bytes_of(B, T) / us / 1e6,
    }  # fmt: skip


@pytest.fixture
def data():
    """A made-up record that every judge accepts."""
    return {
        "pass": "decoding", "gpu": {"name": "made up"}, "date": "2000-01-01T00:00:00Z", "commit": "unknown",
        "versions": dict.fromkeys(("python", "torch", "triton", "cuda", "cudnn"), "0"),
        "files": records.file_hashes(FILES), "timing": "", "ceilings": {"copy_tbs": 4.0},
        "grid": {
            "H": 32, "H_kv": 8, "T_q": 1, "d": 128, "dtype": "bfloat16", "rounds": 3,
            "jobs": [list(job) for job in PROMISED],
        },
        "cells": [cell_of(*job) for job in PROMISED],
    }  # fmt: skip


def test_the_judges_accept_what_is_right(data):
    record = records.Decoding("decoding", data)
    assert [judge(record) for judge in JUDGES] == [[], [], []]
    assert [T for T, _ in record.curve(1)] == list(LENGTHS) and len(record.curve(8, page=16)) == 2
    assert "made up, 2000-01-01, bfloat16, H = 32" in record.provenance()


def find(data, method="decode", B=1, T_k=2**14, page=0):
    (cell,) = (
        c for c in data["cells"] if (c["method"], c["B"], c["T_k"], c["page"]) == (method, B, T_k, page)
    )
    return cell


def slower(cell, factor):
    cell["us"] *= factor
    cell["tbs"] /= factor


DOCTORED = {
    "a cell is gone": (incomplete, lambda data: data["cells"].remove(find(data, "sdpa-flash"))),
    "a job is gone": (incomplete, lambda data: data["grid"]["jobs"].remove(["flex", 1, 2**14, 0])),
    "ours failed": (incomplete, lambda data: find(data).update(error="out of memory")),
    "two rounds": (incomplete, lambda data: find(data)["round_us"].pop()),
    "half the bytes": (incomplete, lambda data: find(data).update(bytes=1)),
    "other heads": (incomplete, lambda data: data["grid"].update(H_kv=32)),
    "an old kernel": (outdated, lambda data: data["files"].update({FILES[-1]: "0"})),
    "a file forgotten": (outdated, lambda data: data["files"].pop(FILES[0])),
    "16k slow": (slow, lambda data: slower(find(data), 2)),
    "a large cache slow": (slow, lambda data: slower(find(data, B=64, T_k=2**16), 1.3)),
    "256k slow": (slow, lambda data: slower(find(data, T_k=2**18), 2)),
    "pages of 64 slow": (slow, lambda data: slower(find(data, B=8, page=64), 1.1)),
    "pages of 16 slow": (slow, lambda data: slower(find(data, B=8, page=16), 1.1)),
    "ours is gone": (slow, lambda data: data["cells"].remove(find(data, B=8, T_k=2**16))),
}


@pytest.mark.parametrize("judge, doctor", DOCTORED.values(), ids=DOCTORED)
def test_a_judge_catches(data, judge, doctor):
    doctor(data)
    assert judge(records.Decoding("decoding", data))


@pytest.mark.parametrize(
    "doctor",
    [
        lambda data: data.pop("ceilings"),
        lambda data: data["ceilings"].update(copy_tbs="4"),
        lambda data: data["grid"].pop("jobs"),
        lambda data: find(data).update(us=math.nan),
        lambda data: find(data).pop("tbs"),
        lambda data: find(data).update(round_us=[0.0]),
        lambda data: data["cells"].append(dict(find(data))),
        lambda data: find(data).pop("page"),
    ],
)
def test_a_broken_record_is_refused(data, doctor):
    doctor(data)
    with pytest.raises(ValueError, match=r"^record 'decoding'"):
        records.Decoding("decoding", data)


def test_load(data, tmp_path, monkeypatch):
    (tmp_path / "decoding.json").write_text(json.dumps(data))
    monkeypatch.setattr(records.importlib.resources, "files", lambda package: tmp_path)
    assert isinstance(records.load("decoding"), records.Decoding)
    with pytest.raises(ValueError, match="has no cell of decode, B = 2"):
        records.load("decoding").cell(B=2, T_k=5)


# ------------------------------------------------------------------------------------ the script


@pytest.fixture
def bench(monkeypatch):
    """benchmarks/decoding.py as a module; a clock that ticks, nothing that asks for a GPU, short lengths."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("run", "passes", "decoding"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import decoding

    ticks = itertools.count(1)

    def time_ms(action):
        action()
        return 1.0 + next(ticks) / 1024

    environment = {
        "gpu": {"name": "no GPU"}, "date": "2000-01-01T00:00:00Z", "commit": "unknown",
        "versions": dict.fromkeys(("python", "torch", "triton", "cuda", "cudnn"), "0"),
    }  # fmt: skip
    monkeypatch.setattr(decoding.run, "time_ms", time_ms)
    monkeypatch.setattr(decoding.run, "captured", lambda make: make())
    monkeypatch.setattr(decoding.run, "release", lambda: None)
    monkeypatch.setattr(decoding.run, "DEVICE", "cpu")
    monkeypatch.setattr(decoding.run, "environment", lambda: copy.deepcopy(environment))
    monkeypatch.setattr(decoding.run, "ceilings", lambda device: {"copy_tbs": 4.0})
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(decoding, "flexible", lambda: sdpa)  # what it stands for needs a compiler
    monkeypatch.setattr(decoding.Job, "calls", 2)
    for name, value in {"H": 4, "H_KV": 2, "D": 16}.items():
        monkeypatch.setattr(decoding, name, value)
    yield decoding
    for name in ("run", "passes", "decoding"):
        sys.modules.pop(name, None)


def test_the_plan_is_what_the_tests_promise(bench, monkeypatch):
    monkeypatch.setattr(bench, "H_KV", 8)
    monkeypatch.setattr(bench, "D", 128)
    jobs = [(job.method, job.B, job.T, job.page) for _, group in bench.plan() for job in group]
    assert sorted(jobs) == sorted(PROMISED) and len(bench.plan(quick=True)) == 3


def test_a_run_gives_a_whole_record(bench, monkeypatch, tmp_path, capsys):
    jobs = [bench.Job(method, 1, 64) for method in ("decode", "sdpa-flash", "sdpa-cudnn")]
    groups = [((1, 64), [*jobs, bench.Job("decode", 1, 64, 16)])]
    groups.append(((2, 32), [bench.Job("decode", 2, 32, 16), bench.Job("flex", 2, 32)]))
    monkeypatch.setattr(bench, "plan", lambda quick: groups)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    bench.main(["--quick", "--output", str(tmp_path / "made.json")])
    record = records.Decoding("made", json.loads((tmp_path / "made.json").read_text()))
    assert record.missing() == [] and set(record.data["files"]) == set(FILES)
    measured = {(c["method"], c["B"], c["page"]): c for c in record.cells}
    assert len(measured) == 6
    for (method, *_), cell in measured.items():
        if method in ("decode", "flex"):
            assert len(cell["round_us"]) == 3 and cell["calls"] == 2
            assert cell["us"] == sorted(cell["round_us"])[1]
        if method == "sdpa-cudnn":
            assert "error" in cell  # the CPU has no such kernel
    assert "copy 4.00 TB/s" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed(bench, monkeypatch):
    real = bench.attend
    monkeypatch.setattr(bench, "attend", lambda job, x: real(job, x) * (1.5 if job.page else 1))
    jobs = [bench.Job("decode", 1, 64), bench.Job("decode", 1, 64, 16)]
    record, failures = bench.bench([((1, 64), jobs)], "cpu", lambda text: None)
    right, wrong = record["cells"]
    assert "us" in right and wrong["error"].startswith("AssertionError: o[") and "us" not in wrong
    assert len(failures) == 1 and failures[0].startswith("decode, B = 1, T = 64, pages of 16: AssertionError")


def test_without_a_gpu_it_says_so(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA GPU found"):
        bench.main([])
