"""The benchmark of the ring in processes of its own, on CPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ring_benchmark
from device import on_cpu
from processes import ROOT, process_environment

from benchmarks import ring as benchmark
from flashlib import ranks, records
from flashlib.iomodel import ring as counted

pytestmark = [on_cpu, pytest.mark.slow]


def run(path, *arguments, size=2, **variables):
    """(exit status, output) of the benchmark with this many ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    file = Path(ring_benchmark.__file__)
    variables |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": ROOT}
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", str(size), file, path, *arguments],
        env=process_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of two ranks."""
    path = tmp_path_factory.mktemp("ring") / "ring.json"
    status, said = run(path)
    assert status == 0, said
    return path


def test_the_benchmark_gives_a_whole_record(whole):
    record = records.Record("ring", json.loads(whole.read_text()))
    assert len(record.cells) == 2 * 9 + 1
    for cell in record.cells:
        # A CPU has no cuDNN attention, which context_parallel needs; the reason is
        # there.
        lacks = cell["method"].startswith(("torch-", "sdpa-"))
        assert ("error" in cell) == lacks, cell
        if not lacks:
            assert len(cell["round_ms"]) == benchmark.ROUNDS and cell["tflops"] > 0
    assert record.cell(T=32)["method"] == "ring"
    sizes = {"ranks": 2, "T": 16, "direction": "forward"}
    arguments = (1 + len(ranks.SAID)) * 8 // 4
    words = {
        **dict.fromkeys(
            benchmark.RINGS,
            counted.ring_words(16, 16, 2, 2) + arguments,
        ),
        "all-gather": counted.ring_words(16, 16, 2, 2),
        "ulysses": counted.ulysses_words(16, 16, 2, 2, 2) + arguments,
        "single": 0,
    }
    for method, sent in words.items():
        assert record.cell(method=method, **sizes)["sent_bytes"] == 4 * sent


def test_wrong_results_are_not_timed(tmp_path):
    path = tmp_path / "ring.json"
    status, said = run(path, "--seconds", "0", WRONG="1")
    assert status != 0 and "2 of 3 tasks are left" in said
    cells = {cell["method"]: cell for cell in json.loads(path.read_text())["cells"]}
    assert cells["all-gather"]["error"].startswith("wrong result: o[")
    assert "ms" in cells["ring"] and "ms" in cells["ulysses"]


def test_a_run_is_continued_and_a_method_that_hangs_ends_it(whole, tmp_path):
    data, path = json.loads(whole.read_text()), tmp_path / "ring.json"
    longest = data["cells"].pop()
    path.write_text(json.dumps(data))
    status, said = run(path, STUCK="1")
    assert status != 0 and "T = 16" not in said
    found = json.loads(path.read_text())["cells"]
    reason = "not done after 2 s, at the end: 2 ranks, T = 32, forward+backward: "
    assert found[:-1] == data["cells"] and found[-1]["T"] == longest["T"]
    assert found[-1]["error"] == reason + "judging ring" and reason in said


def test_a_trace_becomes_the_work_of_a_gpu():
    """Times begin at the first piece; what follows at once is one piece."""

    def event(name, ts, dur, cat="kernel", **args):
        return {"name": name, "ts": ts, "dur": dur, "cat": cat, "args": args}

    events = [
        event("aten::add", 0, 900, "cpu_op"),
        event("keys_kernel", 5000, 1000, stream=7),
        event("Memcpy PtoP (Device -> Device)", 4000, 500, "gpu_memcpy", stream=9),
        event("Memcpy PtoP (Device -> Device)", 4506, 100, "gpu_memcpy", stream=9),
        event("Memcpy PtoP (Device -> Device)", 4700, 100, "gpu_memcpy", stream=9),
    ]
    assert benchmark.work_in({"traceEvents": events}) == [
        ["copy", 0.0, 0.606], ["copy", 0.7, 0.8], ["backward", 1.0, 2.0],
    ]  # fmt: skip
