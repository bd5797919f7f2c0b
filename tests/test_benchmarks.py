"""The benchmark script without a GPU: clock and memory counter replaced, all else as it runs there."""

import ast
import contextlib
import itertools
import json
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import flashlib.testing
from flashlib import records
from flashlib.kernels import backward, copies, flash2, hopper, hopper_backward
from flashlib.kernels.steps import hopper as hopper_steps

ROOT = pathlib.Path(__file__).resolve().parents[1]
PASSES = ("forward", "steps", "backward", "hopper")


@pytest.fixture
def passes(monkeypatch):
    """benchmarks/passes.py as a module; in place of what only a Hopper GPU runs, flash2 and its backward."""
    monkeypatch.setattr(copies, "refusal", lambda *tensors: None)
    monkeypatch.setattr(hopper, "forward", flash2.forward)
    monkeypatch.setattr(hopper_backward, "backward", backward.backward)
    monkeypatch.setattr(hopper_steps, "forward", lambda *tensors, step: flash2.forward(*tensors))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("run", "passes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import passes

    return passes


@pytest.fixture
def run(passes, monkeypatch):
    """benchmarks/run.py as a module; a clock that ticks, nothing that asks for a GPU, tiny shapes."""
    import run

    ticks = itertools.count(1)

    def time_ms(action):
        action()
        return 1.0 + next(ticks) / 1024

    def ladder(d, T, causal=(False, True)):
        return tuple(passes.Shape(1, 2, t // 512, 16, mask) for mask, t in itertools.product(causal, T))

    monkeypatch.setattr(passes, "ladder", ladder)
    monkeypatch.setattr(passes, "long", lambda T: tuple(passes.Shape(1, 1, t // 1024, 16, False) for t in T))
    monkeypatch.setattr(run, "DEVICE", "cpu")
    monkeypatch.setattr(run, "WORKERS", 2)
    monkeypatch.setattr(run, "time_ms", time_ms)
    monkeypatch.setattr(run, "captured", lambda make: make())
    monkeypatch.setattr(run, "release", lambda: None)
    monkeypatch.setattr(run, "extra_bytes", lambda action: len(action()))
    monkeypatch.setattr(run, "nvidia_smi", lambda field: "unknown")
    monkeypatch.setattr(run, "ceilings", lambda device: {"copy_tbs": 1.0, "matmul_tflops": 1.0})
    monkeypatch.setattr(run, "rival_kernels", lambda item, device: {})
    monkeypatch.setattr(
        run,
        "environment",
        lambda: {
            "gpu": {"name": "no GPU"}, "date": "2000-01-01T00:00:00Z", "commit": run.commit(),
            "versions": dict.fromkeys(("python", "torch", "triton", "cuda", "cudnn"), "0"),
        },
    )  # fmt: skip
    return run


@pytest.fixture
def item(run, passes):
    """The forward pass over one shape."""
    sweeps = (
        passes.Sweep(passes.LADDER, passes.ladder((16,), (4096,), (False,))),
        passes.Sweep(("flash2",), passes.ladder((16,), (4096,), (False,)), layout="strided"),
    )
    return passes.Pass("forward", sweeps, (), ())


def quiet(text):
    pass


def alone(item):
    """The one group of a pass: (shape, jobs)."""
    (((shape, _), jobs),) = item.groups().items()
    return shape, jobs


# -------------------------------------------------------------------------------------------------
# what is measured


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_gives_a_whole_record(run, passes, tmp_path, name):
    item = passes.plan(quick=True)[name]
    saved = []
    data, failures = run.bench(item, "cpu", quiet, lambda record: saved.append(len(record["cells"])))
    run.write(data, tmp_path / "made.json")
    record = records.Record("made", json.loads((tmp_path / "made.json").read_text()))
    assert failures == [] and record.missing() == [] and set(record.data["files"]) == set(item.files)
    assert len(record.cells) == sum(len(jobs) for jobs in item.groups().values()) == saved[-1]
    assert len(record.memory) == len(item.memory_jobs())
    for cell in record.cells + record.memory:
        # The CPU has no cuDNN attention: the cells are there, with the reason and without paths of a machine.
        assert ("error" in cell) == (cell["method"] == "sdpa-cudnn"), cell
        assert "/" not in cell.get("error", "")
    for cell in record.cells:
        if "error" not in cell:
            assert len(cell["launch_ms"]) == 3 and cell["timed"] == "launch"
            assert cell["ms"] == sorted(cell["launch_ms"])[1]
    assert len(run.table(data).splitlines()) == 1 + len(item.groups()) + len(record.memory) + 1


def test_operations_are_counted_by_the_rule(run, passes):
    shape = passes.Shape(2, 3, 16, 16, False)
    assert shape.flops("forward") == 4 * 2 * 3 * 16 * 16 * 16
    assert shape.flops("backward") == 2.5 * shape.flops("forward")
    assert shape.flops("forward+backward") == 3.5 * shape.flops("forward")
    assert passes.Shape(2, 3, 16, 16, True).flops("backward") == shape.flops("backward") / 2
    item = passes.Pass("p", (passes.Sweep(("flash2",), (shape,), "backward"),), (), ())
    (cell,) = run.measure(*alone(item), {}, "cpu")
    assert cell["tflops"] == pytest.approx(2.5 * 4 * 2 * 3 * 16 * 16 * 16 / cell["ms"] / 1e9, rel=1e-4)


def test_the_plan_fits_a_short_session(passes):
    plan = passes.plan()
    assert tuple(plan) == PASSES
    for item in plan.values():
        assert 60 < passes.seconds(item, 3, 0.5, 60.0, 12) < 480, item.name
    assert passes.seconds(plan["hopper"], 3, 0.5, 60.0, 16) < 240
    groups = plan["backward"].groups()
    assert (passes.Shape(1, 16, 16384, 64, True), "forward+backward") in groups
    for shape, _ in groups:
        assert shape.B * shape.T == 16384 and shape.H * shape.d in (1024, 2048)


@pytest.mark.parametrize("name", PASSES)
def test_every_kernel_is_compiled_before_it_is_judged(run, passes, monkeypatch, name):
    item, compiled, told = passes.plan()[name], [], []

    def compile_kernels(shape, job, device):
        compiled.append((job.method, job.layout, job.direction, shape.H, shape.d, shape.causal))
        if job.method == "flash2":
            raise RuntimeError("no")

    monkeypatch.setattr(passes, "compile_kernels", compile_kernels)
    monkeypatch.setattr(run, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    run.compile_all(item, "cpu", told.append)
    needed = {
        (job.method, job.layout, shape.H, shape.d, shape.causal, job.direction == "forward")
        for (shape, _), jobs in item.groups().items()
        for job in jobs
        if job.method not in passes.RIVALS
    }
    have = [(*kind[:2], *kind[3:], kind[2] == "forward") for kind in compiled]
    assert needed <= set(have) and len(have) == len(set(have))
    assert len(told) == sum(kind[0] == "flash2" for kind in compiled) > 0
    assert all("flash2" in line and "RuntimeError while compiling" in line for line in told)


@pytest.mark.parametrize("name", PASSES)
def test_a_record_hashes_every_file_that_its_kernels_import(passes, name):
    files = passes.plan()[name].files
    assert "missing" not in records.file_hashes(files).values()
    known = {f"kernels/{path.name}" for path in (ROOT / "flashlib" / "kernels").glob("*.py")}
    for file in files:
        for node in ast.walk(ast.parse((ROOT / "flashlib" / file).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flashlib.kernels"):
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                paths = {module.removeprefix("flashlib.").replace(".", "/") + ".py" for module in modules}
                assert paths & known <= set(files), f"{file} imports {paths & known - set(files)}"


def test_inputs_of_the_two_layouts(passes):
    shape = passes.Shape(2, 3, 8, 16, False)
    for layout, strides in (("contiguous", (384, 128, 16, 1)), ("strided", (384, 16, 48, 1))):
        tensors = shape.inputs(layout, "cpu")
        assert [x.shape for x in tensors] == [(2, 3, 8, 16)] * 4
        assert {x.stride() for x in tensors} == {strides}


# -------------------------------------------------------------------------------------------------
# how it is timed


def test_rounds_are_interleaved_and_short_calls_are_timed_by_graph_replays(run, passes, item, monkeypatch):
    order = []
    monkeypatch.setattr(passes, "make_call", lambda job, *rest: lambda: order.append(job))
    monkeypatch.setattr(run, "captured", lambda make: lambda: order.append("graph"))
    monkeypatch.setattr(run, "time_ms", lambda action: (action(), 0.25)[1])
    shape, jobs = alone(item)
    cells = run.measure(shape, jobs, {}, "cpu")
    rounds = [order[start : start + len(jobs)] for start in range(0, 3 * len(jobs), len(jobs))]
    assert all(set(turn) == set(jobs) for turn in rounds) and len(set(map(tuple, rounds))) == 3
    assert order[3 * len(jobs) :] == 3 * len(jobs) * ["graph"]
    assert all(
        cell["timed"] == "graph" and len(cell["graph_ms"]) == len(cell["launch_ms"]) == 3 for cell in cells
    )


def test_a_failing_capture_leaves_the_launch_times(run, passes, item, monkeypatch):
    monkeypatch.setattr(passes, "make_call", lambda *rest: lambda: None)
    monkeypatch.setattr(run, "time_ms", lambda action: 0.25)

    def captured(make):
        raise RuntimeError("capturing failed")

    monkeypatch.setattr(run, "captured", captured)
    for cell in run.measure(*alone(item), {}, "cpu"):
        assert cell["timed"] == "launch" and "capturing failed" in cell["graph_error"]


def test_a_rival_that_fails_halfway_has_a_reason_and_no_time(run, passes, item, monkeypatch):
    calls = []

    def make_call(job, *rest):
        def call():
            calls.append(job.method)
            if job.method == "sdpa-flash" and calls.count(job.method) == 2:
                raise RuntimeError("gone (Triggered internally at /somewhere)\nand more")

        return call

    monkeypatch.setattr(run, "time_ms", lambda action: (action(), 1.0)[1])
    monkeypatch.setattr(passes, "make_call", make_call)
    cells = run.measure(*alone(item), {}, "cpu")
    (failed,) = [cell for cell in cells if cell["method"] == "sdpa-flash"]
    assert failed["error"] == "RuntimeError: gone"
    assert "launch_ms" not in failed and "tflops" not in failed
    assert all("tflops" in cell for cell in cells if cell is not failed)


def test_the_rivals_are_pinned(passes):
    for method in (*passes.LADDER, *passes.BACKWARD_LADDER, *passes.LAUNCHED, *passes.LOOP_ORDERS):
        pinning = passes.pinned(method)
        assert isinstance(pinning, contextlib.nullcontext) == (method not in passes.RIVALS)


# -------------------------------------------------------------------------------------------------
# the gate


@pytest.mark.parametrize("wrong", ["value", "crash"])
@pytest.mark.parametrize(
    "method, direction",
    [
        ("flash1", "forward"), ("deferred", "forward"), ("flash2-8-warps", "forward"), ("flash2", "backward"),
        ("algorithm-6", "backward"), ("flash2-atomic", "forward+backward"),
    ],
)  # fmt: skip
def test_a_wrong_kernel_is_not_timed_and_the_others_are(run, passes, monkeypatch, method, direction, wrong):
    right = passes.outcome

    def outcome(job, shape, inputs):
        results = right(job, shape, inputs)
        if job.method == method and shape.T == 16:
            if wrong == "crash":
                raise RuntimeError("illegal memory access")
            results[0][-1, -1, -1] *= 1.1
        return results

    monkeypatch.setattr(passes, "outcome", outcome)
    monkeypatch.setattr(flashlib.testing, "DRAWS", 2)  # more change nothing for a wrong kernel
    shapes = passes.ladder((16,), (4096, 8192), (False,))
    item = passes.Pass("p", (passes.Sweep((method, "standard"), shapes, direction),), (), ())
    data, failures = run.bench(item, "cpu", quiet)
    assert len(failures) == 1
    assert failures[0].startswith(f"{method}, {direction}, contiguous, d = 16, full, B = 1, H = 2, T = 16: ")
    (missed,) = [cell for cell in data["cells"] if "tflops" not in cell]
    assert (missed["method"], missed["T_q"]) == (method, 16)
    assert missed["error"].startswith("wrong result: " if wrong == "value" else "RuntimeError: illegal")


def test_far_beyond_16384_the_last_queries_are_judged(run, passes, monkeypatch):
    judged = []
    monkeypatch.setattr(passes, "outcome", lambda job, shape, inputs: tuple(inputs[:3]))
    for name in ("assert_within_budget", "assert_gradients_within_budget"):
        monkeypatch.setattr(passes, name, lambda *tensors, causal: judged.append(tensors))
    shape = passes.Shape(1, 2, 16392, 16, True)
    passes.judge(passes.Job("flash2", "backward", "contiguous"), shape, "cpu")
    q, k, v, do, dq, dk, dv = judged.pop()
    assert q.shape == do.shape == dq.shape == (1, 2, 128, 16) and dk is None and dv is None
    assert k.shape == v.shape == (1, 2, 16392, 16)
    shape = passes.Shape(2, 2, 16384, 16, True)
    passes.judge(passes.Job("flash2", "backward", "contiguous"), shape, "cpu")
    assert [x.shape for x in judged.pop()] == 7 * [(1, 1, 16384, 16)]
    passes.judge(passes.Job("flash2", "forward", "strided"), shape, "cpu")
    assert len(judged) == 4  # every head, one after the other


def test_memory_that_does_not_suffice_is_a_reason_and_no_failure(run, passes, item, monkeypatch):
    def outcome(job, shape, inputs):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 512.00 GiB. GPU 0 has a total of 3 MiB"
        )

    monkeypatch.setattr(passes, "outcome", outcome)
    item = passes.Pass("p", (), item.sweeps, ())
    data, failures = run.bench(item, "cpu", quiet)
    reasons = {cell["error"] for cell in data["memory"]}
    assert failures == [] and len(data["memory"]) == 6
    assert reasons == {"OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 GiB."}


# -------------------------------------------------------------------------------------------------
# the command


def test_without_a_gpu_and_with_bad_arguments(run, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA GPU found"):
        run.main([])
    for arguments, message in [
        (["--output", str(tmp_path / "no")], "expected an existing folder"),
        (["--pass", "sideways"], "invalid choice: 'sideways'"),
        (["--fast"], "unrecognized arguments: --fast"),
    ]:
        with pytest.raises(SystemExit) as caught:
            run.main(arguments)
        assert caught.value.code == 2 and message in capsys.readouterr().err
    run.main(["--plan", "--pass", "steps"])
    assert capsys.readouterr().out.startswith("steps: ")


def test_one_architecture_is_left_out_on_others(run, passes, item, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    plan = {name: passes.Pass(name, item.sweeps, (), ()) for name in PASSES}
    plan["hopper"] = passes.Pass("hopper", item.sweeps, (), (), passes.plan()["hopper"].capability)
    monkeypatch.setattr(passes, "plan", lambda quick=False: plan)
    monkeypatch.setattr(run, "compile_all", lambda item, device, say: None)
    run.main(["--output", str(tmp_path)])
    assert sorted(file.stem for file in tmp_path.iterdir()) == sorted(set(PASSES) - {"hopper"})
    assert "need a GPU of compute capability 9.0, left out" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"pass hopper: its kernels need a GPU of compute capability 9\.0"):
        run.main(["--pass", "hopper"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    run.main(["--output", str(tmp_path), "--pass", "hopper"])
    assert (tmp_path / "hopper.json").is_file()


def test_main_writes_the_records_and_prints_the_tables(run, passes, item, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan = {name: passes.Pass(name, item.sweeps, (), ()) for name in PASSES}
    compiled = []
    monkeypatch.setattr(passes, "plan", lambda quick=False: plan)
    monkeypatch.setattr(run, "compile_all", lambda item, device, say: compiled.append(item.name))
    run.main(["--output", str(tmp_path), "--pass", "backward", "--pass", "steps"])
    for name in ("steps", "backward"):
        made = json.loads((tmp_path / f"{name}.json").read_text())
        assert made["pass"] == name and records.Record(name, made).missing() == []
    assert compiled == ["steps", "backward"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["backward.json", "steps.json"]
    assert capsys.readouterr().out.count("forward          d 16  full   H 2    T 8") == 2
    run.main(["--quick"])
    assert capsys.readouterr().out.count("forward          d 16  full   H 2    T 8") == len(PASSES)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(run, "bench", lambda *arguments: ({}, ["flash2 is wrong"]))
    for name in ("write", "table", "rival_kernels"):
        monkeypatch.setattr(run, name, lambda *arguments: "")
    monkeypatch.setattr(run.os, "replace", lambda *arguments: None)
    monkeypatch.setattr(records, "Record", lambda *arguments: None)
    with pytest.raises(SystemExit, match="these were not timed:\n  steps: flash2 is wrong"):
        run.main(["--output", str(tmp_path), "--pass", "steps"])
