"""The benchmark script without a GPU: clock and memory counter replaced, all else as it runs there."""

import contextlib
import importlib.util
import itertools
import json
import pathlib

import pytest
import torch

import flashlib
import flashlib.testing
from flashlib import records
from flashlib.reference import standard as reference

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def run(monkeypatch):
    """benchmarks/run.py as a module; a clock that ticks, nothing that asks for a GPU."""
    spec = importlib.util.spec_from_file_location("benchmarks_run", ROOT / "benchmarks" / "run.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "benchmarks_run", module)
    spec.loader.exec_module(module)
    ticks = itertools.count(1)

    def time_ms(action):
        action()
        return 1.0 + next(ticks) / 1024

    monkeypatch.setattr(module, "time_ms", time_ms)
    monkeypatch.setattr(module, "captured", lambda action: action)
    monkeypatch.setattr(module, "release", lambda: None)
    monkeypatch.setattr(module, "extra_bytes", lambda action: action().untyped_storage().nbytes())
    monkeypatch.setattr(module, "nvidia_smi", lambda field: "unknown")
    monkeypatch.setattr(module, "ceilings", lambda device: {"copy_tbs": 1.0, "matmul_tflops": 1.0})
    monkeypatch.setattr(
        module,
        "environment",
        lambda: {
            "gpu": {"name": "no GPU"}, "date": "2000-01-01T00:00:00Z", "commit": module.commit(),
            "versions": dict.fromkeys(("python", "torch", "triton", "cuda", "cudnn"), "0"),
        },
    )  # fmt: skip
    return module


@pytest.fixture
def grid(run):
    return run.Grid(
        d=(16,), T=(8, 16), tokens=16, width=32, strided_from=16, memory_T=(8, 16), memory_H=1, memory_d=16
    )


def quiet(text):
    pass


def right(q, k, v, *, causal, method, return_lse):
    """What `flashlib.attention` returns, computed fast on a CPU."""
    o, lse = reference.attention(q.float(), k.float(), v.float(), causal=causal)
    return o.to(q.dtype), lse


def test_a_run_gives_a_whole_record_and_a_rival_that_fails_leaves_its_reason(run, grid, tmp_path):
    data = run.bench(grid, "cpu", quiet)
    run.write(data, tmp_path / "made.json")
    record = records.Record("made", json.loads((tmp_path / "made.json").read_text()))
    assert record.missing() == [] and set(record.data["files"]) == set(run.FILES)
    assert len(record.cells) == 2 * (2 * 4 + 1) and len(record.memory) == 2 * 4
    cell = record.cell(method="flash2", d=16, causal=True, T_q=16, layout="strided")
    assert len(cell["launch_ms"]) == 3 and cell["timed"] == "launch"
    assert cell["ms"] == sorted(cell["launch_ms"])[1]
    assert cell["tflops"] == pytest.approx(4 * 1 * 2 * 16 * 16 * 16 / 2 / cell["ms"] / 1e9, rel=1e-4)
    # The CPU has no cuDNN attention: the cells are there, with the reason and without paths of this machine.
    missing = [cell for cell in record.cells + record.memory if cell["method"] == "sdpa-cudnn"]
    assert len(missing) == 6 and all("error" in cell and "/" not in cell["error"] for cell in missing)
    text = run.table(data)
    assert len(text.splitlines()) == 1 + 4 + 8 + 1


def test_rounds_are_interleaved_and_short_calls_are_timed_by_graph_replays(run, grid, monkeypatch):
    order = []
    monkeypatch.setattr(run, "call", lambda method, *rest: order.append(method))
    monkeypatch.setattr(run, "captured", lambda action: lambda: order.append("graph"))
    monkeypatch.setattr(run, "time_ms", lambda action: (action(), 0.25)[1])
    shape = grid.shapes()[0]
    cells = run.measure(shape, grid.jobs(shape), {}, "cpu")
    a, b, c, d = run.METHODS
    assert order == [a, b, c, d, b, c, d, a, c, d, a, b] + 12 * ["graph"]
    assert all(
        cell["timed"] == "graph" and len(cell["graph_ms"]) == len(cell["launch_ms"]) == 3 for cell in cells
    )


def test_a_failing_capture_leaves_the_launch_times(run, grid, monkeypatch):
    monkeypatch.setattr(run, "call", lambda *rest: None)
    monkeypatch.setattr(run, "time_ms", lambda action: 0.25)

    def captured(action):
        raise RuntimeError("capturing failed")

    monkeypatch.setattr(run, "captured", captured)
    shape = grid.shapes()[0]
    for cell in run.measure(shape, grid.jobs(shape), {}, "cpu"):
        assert cell["timed"] == "launch" and "capturing failed" in cell["graph_error"]


def test_a_rival_that_fails_halfway_has_a_reason_and_no_time(run, grid, monkeypatch):
    calls = []

    def time_ms(action):
        action()
        return 1.0

    def call(method, *rest):
        calls.append(method)
        if method == "sdpa-flash" and calls.count(method) == 2:
            raise RuntimeError("gone (Triggered internally at /somewhere)\nand more")

    monkeypatch.setattr(run, "time_ms", time_ms)
    monkeypatch.setattr(run, "call", call)
    shape = grid.shapes()[0]
    cells = {cell["method"]: cell for cell in run.measure(shape, grid.jobs(shape), {}, "cpu")}
    assert cells["sdpa-flash"]["error"] == "RuntimeError: gone"
    assert "launch_ms" not in cells["sdpa-flash"] and "tflops" not in cells["sdpa-flash"]
    assert all("tflops" in cell for method, cell in cells.items() if method != "sdpa-flash")


@pytest.mark.parametrize("wrong", ["value", "crash"])
def test_the_gate_stops_a_wrong_kernel_before_anything_is_timed(run, grid, monkeypatch, wrong):
    def attention(q, k, v, **options):
        if options["method"] == "flash2" and q.shape[2] == 16 and wrong == "crash":
            raise RuntimeError("illegal memory access")
        o, lse = right(q, k, v, **options)
        if options["method"] == "flash2" and q.shape[2] == 16:
            o[-1, -1, -1] *= 1.1
        return o, lse

    monkeypatch.setattr(flashlib, "attention", attention)
    monkeypatch.setattr(flashlib.testing, "DRAWS", 2)  # more change nothing for a wrong kernel
    monkeypatch.setattr(run, "time_ms", lambda action: pytest.fail("timed in spite of a wrong kernel"))
    with pytest.raises(
        AssertionError, match="nothing was timed:\n  flash2, contiguous, d = 16, full"
    ) as caught:
        run.bench(grid, "cpu", quiet)
    # Contiguous and strided, full and causal, and the memory shape of the same length.
    assert str(caught.value).count("\n  flash2") == 5


def test_memory_that_does_not_suffice_is_a_reason_and_no_failure(run, grid, monkeypatch):
    def attention(q, k, v, **options):
        if options["method"] == "standard":
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 512.00 GiB. GPU 0 has a total of 3 MiB"
            )
        return right(q, k, v, **options)

    monkeypatch.setattr(flashlib, "attention", attention)
    failures, absent = run.gate(grid, "cpu", quiet)
    reasons = {reason for (_, method, _), reason in absent.items() if method == "standard"}
    assert failures == []
    assert reasons == {"OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 GiB."}


def test_the_rivals_are_pinned(run, monkeypatch):
    for method in run.METHODS:
        pinning = run.pinned(method)
        assert isinstance(pinning, contextlib.nullcontext) == (method in run.OURS)


def test_without_a_gpu_and_with_bad_arguments(run, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA GPU found"):
        run.main([])
    for arguments, message in [
        (["--output", str(tmp_path)], "expected a file in an existing folder"),
        (["--output", str(tmp_path / "no" / "such.json")], "expected a file in an existing folder"),
        (["--fast"], "unrecognized arguments: --fast"),
    ]:
        with pytest.raises(SystemExit) as caught:
            run.main(arguments)
        assert caught.value.code == 2 and message in capsys.readouterr().err


def test_main_writes_the_record_and_prints_the_table(run, grid, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        flashlib,
        "attention",
        lambda q, k, v, return_lse=False, **options: right(q, k, v, return_lse=True, **options)[
            slice(None) if return_lse else 0
        ],
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "DEVICE", "cpu")
    monkeypatch.setattr(run, "rival_kernels", lambda shape, device: {})
    monkeypatch.setattr(run, "Grid", lambda: grid)
    monkeypatch.setattr(run, "QUICK", grid)
    run.main(["--output", str(tmp_path / "made.json")])
    assert records.Record("made", json.loads((tmp_path / "made.json").read_text())).missing() == []
    assert [file.name for file in tmp_path.iterdir()] == ["made.json"]
    assert "d 16  causal T 16" in capsys.readouterr().out
    run.main(["--quick"])
    assert "d 16  causal T 16" in capsys.readouterr().out
