"""The benchmarks without a GPU: clock, memory counter and profiler replaced."""

import contextlib
import functools
import itertools
import json
import lzma
import math
import pathlib
import subprocess

import pytest
import torch
from device import on_cpu, other_backward, other_forward
from PIL import Image
from ring_benchmark import environment

import flashlib.testing
from benchmarks import __main__ as command
from benchmarks import (
    decoding,
    fa3,
    fa4,
    latent,
    passes,
    ring,
    runs,
    scores,
    speed,
    timing,
    traffic,
)
from benchmarks import host as calls
from flashlib import plot, records
from flashlib.kernels import flash2, hopper, hopper_backward, hopper_host
from flashlib.kernels.steps import hopper as hopper_steps

pytestmark = on_cpu

SHAPE = passes.Shape(1, 2, 8, 16, False)
PREPARED, PLAN = scores.prepared, scores.plan
JOBS = [passes.Job(method, "forward", "contiguous") for method in passes.LADDER]


@pytest.fixture(autouse=True)
def off_gpu(monkeypatch):
    """A clock that ticks and runs a call once, no GPU, flash2 for what needs Hopper."""
    ticks = itertools.count(1)
    ran = []

    def time_ms(action):
        if action not in ran:
            ran.append(action)
            action()
        return 1.0 + next(ticks) / 1024

    monkeypatch.setattr(timing, "DEVICE", "cpu")
    monkeypatch.setattr(timing, "time_ms", time_ms)
    monkeypatch.setattr(timing, "captured", lambda make: make())
    monkeypatch.setattr(timing, "clock_mhz", lambda make, ms: 1500)
    monkeypatch.setattr(timing, "release", lambda: None)
    monkeypatch.setattr(timing, "extra_bytes", lambda action: len(action()))
    monkeypatch.setattr(timing, "ceilings", lambda: {"copy_tbs": 1.0})
    monkeypatch.setattr(timing, "environment", environment)
    monkeypatch.setattr(speed, "compile_all", speed.kinds)
    monkeypatch.setattr(hopper_host, "tensor_refusal", lambda *tensors: None)
    monkeypatch.setattr(hopper, "forward", other_forward)
    monkeypatch.setattr(hopper_backward, "backward", other_backward)
    for step in hopper_steps.STEPS:
        monkeypatch.setitem(passes.LAUNCHED, step, flash2.forward)
    monkeypatch.setattr(flashlib.testing, "DRAWS", 2)  # enough for a wrong kernel


@pytest.fixture
def tiny(monkeypatch):
    """Every sweep of the plan over one shape that a CPU computes in a moment."""
    one = (SHAPE._replace(causal=True),)
    monkeypatch.setattr(passes, "ladder", lambda d, *sizes: one if d else ())
    monkeypatch.setattr(passes, "long", lambda lengths: one)
    # Needs a Hopper GPU.
    stand_in = passes.WARPS["flash2-4-warps"]
    monkeypatch.setitem(passes.LAUNCHED, "persistent", stand_in)


def quiet(text):
    pass


# -- speed


@pytest.mark.parametrize("name", ["forward", "steps", "backward", "hopper", "masks"])
def test_a_pass_gives_a_whole_record(tiny, name):
    data, failures = speed.run(name, True, quiet)
    assert failures == []
    item, record = passes.plan(quick=True)[name], records.Record(name, data)
    assert len(record.cells) == sum(map(len, item.groups().values()))
    assert len(record.memory) == len(item.memory_jobs())
    for cell in record.cells + record.memory:
        # A CPU has no cuDNN attention: the reason is there, without paths of a machine.
        assert ("error" in cell) == (cell["method"] == "sdpa-cudnn"), cell
        assert "/" not in cell.get("error", "")
    for cell in record.cells:
        if "error" not in cell:
            assert len(cell["launch_ms"]) == 3 and cell["timed"] == "launch"
            assert cell["ms"] == sorted(cell["launch_ms"])[1]


def test_operations_are_counted_by_the_rule():
    forward = 4 * 2 * 3 * 16 * 16 * 16
    shape = passes.Shape(2, 3, 16, 16, False)
    assert shape.flops("forward") == forward
    assert shape.flops("forward+backward") == 3.5 * forward
    causal = shape._replace(causal=True)
    assert causal.flops("backward") == 2.5 * forward / 2
    assert causal._replace(window=16).flops("forward") == causal.flops("forward")
    left = 4 * 16 - 4**2 / 2  # pairs
    assert causal._replace(window=4).flops("forward") == 4 * 2 * 3 * 16 * left
    (cell,) = speed.measure(shape, [JOBS[2]._replace(direction="backward")], {})
    assert cell["tflops"] == timing.digits(2.5 * forward / cell["ms"] / 1e9)


@pytest.mark.slow
def test_the_first_call_is_timed_with_an_empty_cache_and_a_full_one():
    cells = calls.first(16, ["flash2"])
    found = [(cell["cache"], cell["direction"]) for cell in cells]
    assert found == list(itertools.product(("cold", "warm"), ("forward", "backward")))
    assert all(0 < cell["seconds"] < 100 for cell in cells)


def test_inputs_of_the_two_layouts():
    shape = passes.Shape(2, 4, 8, 16, False, group=2)
    assert [x.shape[1] for x in shape.inputs("strided")] == [4, 2, 2, 4]
    shape = passes.Shape(2, 3, 8, 16, False)
    strides = {"contiguous": (384, 128, 16, 1), "strided": (384, 16, 48, 1)}
    for layout, expected in strides.items():
        for x in shape.inputs(layout):
            assert (x.shape, x.stride()) == ((2, 3, 8, 16), expected)


def test_rounds_are_interleaved_and_short_calls_are_timed_by_graph_replays(monkeypatch):
    order = []
    call = lambda job, *rest: lambda: order.append(job)  # noqa: E731
    monkeypatch.setattr(passes, "make_call", call)
    graph = lambda make: lambda: order.append("graph")  # noqa: E731
    monkeypatch.setattr(timing, "captured", graph)
    monkeypatch.setattr(timing, "time_ms", lambda action: (action(), 0.25)[1])
    cells = speed.measure(SHAPE, JOBS, {})
    n = len(JOBS)
    turns = [order[start : start + n] for start in range(0, 3 * n, n)]
    assert all(set(turn) == set(JOBS) for turn in turns)
    assert len(set(map(tuple, turns))) == 3
    assert order[3 * n :] == 3 * n * ["graph"]
    for cell in cells:
        assert cell["timed"] == "graph"
        assert len(cell["graph_ms"]) == len(cell["launch_ms"]) == 3


def test_a_capture_that_fails_leaves_the_launch_times(monkeypatch):
    def captured(make):
        raise RuntimeError("capturing failed")

    monkeypatch.setattr(timing, "captured", captured)
    monkeypatch.setattr(timing, "time_ms", lambda action: 0.25)
    monkeypatch.setattr(passes, "make_call", lambda *rest: lambda: None)
    for cell in speed.measure(SHAPE, JOBS, {}):
        assert cell["timed"] == "launch" and "capturing failed" in cell["graph_error"]


def test_a_rival_that_fails_halfway_has_a_reason_and_no_time(monkeypatch):
    calls = []

    def make_call(job, *rest):
        def call():
            calls.append(job.method)
            if job.method == "sdpa-flash" and calls.count(job.method) == 2:
                raise RuntimeError("gone (Triggered internally at /somewhere)\nmore")

        return call

    monkeypatch.setattr(passes, "make_call", make_call)
    monkeypatch.setattr(timing, "time_ms", lambda call: call() or 1.0)
    cells = {cell["method"]: cell for cell in speed.measure(SHAPE, JOBS, {})}
    failed = cells.pop("sdpa-flash")
    assert failed["error"] == "RuntimeError: gone"
    assert "launch_ms" not in failed and "tflops" not in failed
    assert all("tflops" in cell for cell in cells.values())


def test_the_rivals_are_pinned():
    ours = (*passes.OURS, *passes.LAUNCHED, *passes.LOOP_ORDERS)
    for method in (*ours, *passes.RIVALS):
        free = isinstance(passes.pinned(method), contextlib.nullcontext)
        assert free == (method in ours)


@pytest.mark.parametrize(
    ("method", "direction", "wrong"),
    [
        ("flash1", "forward", "value"),
        ("algorithm-6", "backward", "crash"),
        ("flash2-atomic", "forward+backward", "value"),
    ],
)
def test_a_wrong_kernel_is_not_timed_and_the_others_are(
    monkeypatch, method, direction, wrong
):
    right = passes.outcome

    def outcome(job, shape, inputs):
        results = right(job, shape, inputs)
        if job.method == method and shape.T == 16:
            if wrong == "crash":
                raise RuntimeError("illegal memory access")
            results[0][-1, -1, -1] *= 1.1
        return results

    monkeypatch.setattr(passes, "outcome", outcome)
    shapes = (SHAPE, SHAPE._replace(T=16))
    item = passes.Pass((passes.Sweep((method, "standard"), shapes, direction),))
    monkeypatch.setattr(passes, "plan", lambda quick: {"steps": item})
    data, (failure,) = speed.run("steps", True, quiet)
    name = f"{method}, {direction}, B = 1, H = 2, H_kv = 2, T_q = 16, T_k = 16, "
    assert failure.startswith(f"{name}d = 16, causal = False, contiguous, bfloat16: ")
    (missed,) = [cell for cell in data["cells"] if "tflops" not in cell]
    assert (missed["method"], missed["T_q"]) == (method, 16)
    start = "wrong result: " if wrong == "value" else "RuntimeError: illegal"
    assert missed["error"].startswith(start)


def test_far_beyond_16384_the_last_queries_are_judged(monkeypatch):
    judged = []
    monkeypatch.setattr(passes, "outcome", lambda job, shape, x: tuple(x[:3]))
    record = lambda *tensors, causal: judged.append(tensors)  # noqa: E731
    monkeypatch.setattr(passes, "assert_within_budget", record)
    monkeypatch.setattr(passes, "assert_gradients_within_budget", record)
    gradients = passes.Job("flash2", "backward", "contiguous")
    passes.judge(gradients, passes.Shape(1, 2, 16392, 16, True))
    q, k, v, do, dq, dk, dv = judged.pop()
    assert q.shape == do.shape == dq.shape == (1, 2, 128, 16)
    assert k.shape == v.shape == (1, 2, 16392, 16) and dk is None and dv is None
    shape = passes.Shape(2, 2, 16384, 16, True)
    passes.judge(gradients, shape)
    assert [x.shape for x in judged.pop()] == 7 * [(1, 1, 16384, 16)]
    passes.judge(passes.Job("flash2", "forward", "strided"), shape)
    assert len(judged) == 4  # every head, one after the other


def test_memory_that_does_not_suffice_is_a_reason_and_no_failure(monkeypatch):
    def outcome(job, shape, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. GPU 0 has a total of 3 MiB")

    monkeypatch.setattr(passes, "outcome", outcome)
    item = passes.Pass((), (passes.Sweep(passes.LADDER, (SHAPE,)),))
    monkeypatch.setattr(passes, "plan", lambda quick: {"steps": item})
    data, failures = speed.run("steps", True, quiet)
    assert failures == [] and len(data["memory"]) == len(passes.LADDER)
    reason = "OutOfMemoryError: CUDA out of memory."
    assert {cell["error"] for cell in data["memory"]} == {reason}


# -- FA-3


class Library:
    """FA-3's two operators as PyTorch computes them, with FA-3's arguments."""

    def __init__(self):
        self.asked = []

    def fwd(self, q, k, v, *, softmax_scale, is_causal, **sides):
        self.asked.append({"is_causal": is_causal, **sides})
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        window = None
        if sides:
            window = sides["window_size_left"], sides["window_size_right"]
        options = {"causal": is_causal, "scale": softmax_scale, "window": window}
        o, lse = flashlib.attention(q, k, v, return_lse=True, **options)
        return o.transpose(1, 2), lse, None, None

    def bwd(self, do, q, k, v, o, lse, dq, dk, dv, *, deterministic, **options):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            o = self.fwd(*leaves, **options)[0]
        self.asked[-1]["deterministic"] = deterministic
        for into, x in zip(
            (dq, dk, dv), torch.autograd.grad(o, leaves, do), strict=True
        ):
            into.copy_(x)


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr(fa3, "operators", lambda: made)
    monkeypatch.setattr(fa3, "missing", lambda: None)
    return made


def test_fa3_is_judged_and_timed_where_it_is_there(tiny, library):
    data, failures = speed.run("hopper", True, quiet)
    record = records.Record("hopper", data)
    assert failures == []
    found = {(c["method"], c["direction"]): c for c in record.cells_of()}
    for key in [("fa3", "forward"), *((m, "backward") for m in fa3.METHODS)]:
        cell = found[key]
        assert cell["tflops"] > 0 and len(cell["launch_ms"]) == 3
        assert cell["clock_mhz"] == 1500
    assert {x.get("deterministic") for x in library.asked} == {None, True, False}
    record.grid["width"] = SHAPE.H * SHAPE.d
    picture = plot.bars([record], T=SHAPE.T, d=SHAPE.d, causal=True)
    shown = [text.get_text() for text in picture.axes[0].get_yticklabels()]
    assert shown == ["flash2", "hopper", "PyTorch FA-2", "FA-3"]


def test_long_sequences_are_compared_with_fa4(tiny, monkeypatch):
    def flash_attn_func(q, k, v, *, causal, softmax_scale, deterministic):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = flashlib.attention(q, k, v, causal=causal, scale=softmax_scale)
        return o.transpose(1, 2)

    monkeypatch.setattr(fa4, "function", lambda: flash_attn_func)
    data, _ = speed.run("fa4", True, quiet)
    record = records.Record("fa4", data)
    for direction, methods in (
        ("forward", ["hopper", "fa4"]),
        ("backward", ["hopper", "hopper-atomic", *fa4.METHODS]),
    ):
        cells = record.cells_of(direction=direction, causal=True)
        assert [cell["method"] for cell in cells] == methods
        assert all("tflops" in cell for cell in cells if cell["method"] in fa4.METHODS)


def test_windows_and_groups_are_compared_with_fa3(library, monkeypatch):
    shape = passes.Shape(1, 2, 16, 16, True)
    shapes = shape._replace(window=4), shape._replace(group=2)
    monkeypatch.setattr(passes, "windows_and_groups", lambda *sizes: shapes)
    data, failures = speed.run("fa3", True, quiet)
    record = records.Record("fa3", data)
    assert failures == [] and not any("error" in cell for cell in record.cells)
    window = record.cells_of(window=4, direction="backward")
    assert [cell["method"] for cell in window] == ["auto", "fa3", "fa3-atomic"]
    grouped = record.cells_of(H_kv=1, direction="forward", window=0)
    assert [cell["method"] for cell in grouped] == ["flash2", "hopper", "fa3"]
    sides = {"window_size_left": 3, "window_size_right": 0}
    assert any(sides.items() <= asked.items() for asked in library.asked)
    assert "for a window of w" in record.provenance()


def test_what_is_missing_of_fa3_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(fa3, "FOLDER", tmp_path)
    for name in fa3.FILES:
        expected = f"expected {name} in the folder {tmp_path.name}, found none"
        assert fa3.missing() == expected
        (tmp_path / name).write_bytes(lzma.compress(b"a library"))
    for capability, expected in (
        (None, "expected a CUDA GPU, found none"),
        ((8, 6), "expected compute capability 9.0, got 8.6"),
        ((9, 0), None),
    ):
        there = bool(capability)
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        found = lambda found=capability: found  # noqa: E731
        monkeypatch.setattr(torch.cuda, "get_device_capability", found)
        assert fa3.missing() == expected
    (there := tmp_path / "there").mkdir()
    library = fa3.unpacked(there)
    assert library.read_bytes() == b"a library" and list(there.iterdir()) == [library]
    library.write_bytes(b"kept")
    assert fa3.unpacked(there).read_bytes() == b"kept"


# -- latent attention


@pytest.fixture
def narrow(monkeypatch):
    """Widths and shapes that a CPU computes in a moment."""
    for name, value in {"D_C": 16, "D_R": 8, "D": 24, "D_V": 16, "PAGE": 16}.items():
        monkeypatch.setattr(latent, name, value)
    monkeypatch.setattr(latent.Job, "calls", 2)
    monkeypatch.setattr(timing, "DTYPE", torch.float16)
    ceilings = {"copy_tbs": 1.0, "matmul_tflops": 100.0}
    monkeypatch.setattr(timing, "ceilings", lambda: ceilings)
    shapes = [latent.Expanded(1, 2, 32, 24, causal) for causal in (False, True)]
    monkeypatch.setattr(latent, "shapes", lambda quick: shapes)
    monkeypatch.setattr(latent, "STEPS", ((4, 2, 32), (64, 1, 64)))


def test_latent_gives_a_whole_record(narrow, monkeypatch):
    asked = []

    def flash_attn_func(q, k, v, *, causal, softmax_scale, deterministic):
        asked.append(deterministic)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = flashlib.attention(q, k, v, causal=causal, scale=softmax_scale)
        return o.transpose(1, 2), None

    monkeypatch.setattr(fa4, "function", lambda: flash_attn_func)
    data, failures = latent.run(False, quiet)
    record = records.Record("latent", data)
    assert failures == [] and set(asked) == {True, False}
    ran = {(c["method"], c["direction"]) for c in record.cells if "error" not in c}
    both = {(m, d) for m in ("auto", "flash2", "fa4") for d in ("forward", "backward")}
    assert both | {("fa4-atomic", "backward")} <= ran
    cell = record.cell(method="auto", direction="forward", causal=False)
    operations = 2 * 2 * 32**2 * (24 + 16)
    assert cell["tflops"] == timing.digits(operations / cell["ms"] / 1e9)
    for cell in record.data["absorbed"]:
        assert ("error" in cell) >= (cell["method"] == "sdpa-cudnn")
    step = record.cell("absorbed", method="decode_latent", H=64)
    assert step["bound"] == "compute" and len(step["round_us"]) == 3
    operations = 2 * 64 * 64 * (2 * 16 + 8)
    assert step["tflops"] == timing.digits(operations / step["us"] / 1e6)
    assert step["of_roof"] == timing.digits(operations / 1e8 / step["us"])
    step = record.cell("absorbed", method="decode_latent", H=4)
    assert step["bound"] == "memory" and step["bytes"] == 2 * 2 * 32 * 24
    assert step["of_roof"] == timing.digits(step["bytes"] / 1e6 / step["us"])
    assert "matrix product 100 TFLOP/s" in record.provenance("absorbed")
    assert "d = 24, d_v = 16" in record.provenance()


def test_a_wrong_step_of_latent_attention_is_not_timed(narrow, monkeypatch):
    right = latent.attend
    wrong = lambda job, x: right(job, x) * (1.5 if job.H == 4 else 1)  # noqa: E731
    monkeypatch.setattr(latent, "attend", wrong)
    monkeypatch.setattr(latent, "expanded", lambda *x: [])
    data, (failure,) = latent.run(False, quiet)
    assert failure.startswith("decode_latent, H = 4, B = 2, T_k = 32: wrong result: ")
    (cell,) = (c for c in data["absorbed"] if c["method"] == latent.OURS and c["H"] > 4)
    assert cell["us"] > 0


def test_on_hopper_a_step_of_latent_attention_is_timed_by_two_kernels(
    narrow, monkeypatch
):
    asked, ran = [], flashlib.decode_latent

    def decode_latent(*x, method, **options):
        asked.append(method)
        return ran(*x, **options)

    monkeypatch.setattr(flashlib, "decode_latent", decode_latent)
    assert latent.IN_TRITON not in [job.method for job in latent.absorbed()[0]]
    monkeypatch.setattr(latent, "on_hopper", lambda: True)
    for jobs in latent.absorbed():
        asked.clear()
        cells = latent.measure(jobs, timing.ceilings())
        timed = {cell["method"] for cell in cells if "error" not in cell}
        assert {latent.OURS, latent.IN_TRITON} <= timed
        assert {"auto", "latent"} == set(asked)


def test_a_run_of_latent_that_was_cut_off_is_continued(narrow, monkeypatch, tmp_path):
    path, clock = tmp_path / "latent.json", itertools.count()
    monkeypatch.setattr(runs.time, "monotonic", lambda: next(clock))
    part, (failure,) = latent.run(False, quiet, path, end=4)
    assert failure == "5 of 10 tasks are left; run it again"
    assert json.loads(path.read_text()) == part
    assert len(part["absorbed"]) == 3 and len(part["cells"]) == 8
    whole, failures = latent.run(False, quiet, path)
    assert failures == [] and whole["absorbed"][:3] == part["absorbed"]
    assert len(whole["absorbed"]) == 6 and len(whole["cells"]) == 12
    assert records.Record("latent", json.loads(path.read_text())).data == whole
    monkeypatch.setattr(latent, "PAGE", 32)
    with pytest.raises(ValueError, match=r"latent\.json: expected grid .*remove it"):
        latent.run(False, quiet, path)


def test_what_is_missing_of_fa4_is_said(monkeypatch):
    def function():
        raise ImportError("No module named 'flash_attn'")

    monkeypatch.setattr(fa4, "function", function)
    assert fa4.missing().startswith("expected the package flash-attn-4, found none: No")
    said = []
    monkeypatch.setattr(latent, "shapes", lambda quick: [])
    monkeypatch.setattr(latent, "absorbed", lambda quick: [])
    latent.run(True, said.append)
    assert said == [f"latent: FA-4 is left out: {fa4.missing()}"]


# -- a run in parts


@pytest.fixture
def three(monkeypatch):
    """A pass of three shapes and a memory, and the shapes that are timed."""
    shapes = [SHAPE._replace(T=T) for T in (8, 16, 24)]
    sweep = passes.Sweep(("standard", "flash2"), shapes)
    item = passes.Pass((sweep,), (passes.Sweep(("flash2",), shapes[:1]),))
    monkeypatch.setattr(passes, "plan", lambda quick: {"steps": item})
    timed, measure = [], speed.measure

    def spied(shape, jobs, absent):
        timed.append(shape.T)
        return measure(shape, jobs, absent)

    monkeypatch.setattr(speed, "measure", spied)
    return timed


def test_a_run_that_was_cut_off_is_continued(three, monkeypatch, tmp_path):
    path, clock = tmp_path / "steps.json", itertools.count()
    monkeypatch.setattr(runs.time, "monotonic", lambda: next(clock))
    part, (failure,) = speed.run("steps", False, quiet, path, end=1)
    assert failure == "2 of 4 tasks are left; run it again"
    assert three == [8, 16] and json.loads(path.read_text()) == part
    whole, failures = speed.run("steps", False, quiet, path)
    assert three == [8, 16, 24] and failures == []
    assert whole["cells"][:4] == part["cells"] and len(whole["cells"]) == 6
    text = path.read_text()
    assert json.loads(text) == whole and len(whole["memory"]) == 1
    assert len(text.splitlines()) > len(whole["cells"]), "a cell a line"
    compiled = []
    monkeypatch.setattr(speed, "compile_all", compiled.append)
    assert speed.run("steps", False, quiet, path, end=-math.inf) == (whole, [])
    assert three == [8, 16, 24] and compiled == []


def test_half_a_shape_is_timed_again_and_another_machine_is_refused(three, tmp_path):
    path = tmp_path / "steps.json"
    whole, _ = speed.run("steps", False, quiet, path)
    timing.write(whole | {"cells": whole["cells"][:3]}, path)
    again, _ = speed.run("steps", False, quiet, path)
    assert three == [8, 16, 24, 16, 24]
    assert len(records.Record("steps", again).cells) == 6
    timing.write(whole | {"gpu": {"name": "another"}}, path)
    with pytest.raises(ValueError, match=r"steps\.json: expected gpu .*no GPU"):
        speed.run("steps", False, quiet, path)


def test_what_failed_is_measured_and_reported_again(tmp_path):
    names = [{"method": x} for x in ("ours", "sdpa-cudnn", "large", "slow")]
    errors = (
        "wrong result",
        "RuntimeError",
        "OutOfMemoryError: no",
        "not done after 9 s",
    )
    fields = dict.fromkeys(records.KINDS["forward"]["cells"].fields, 1)
    cells = [
        fields | name | {"error": error}
        for name, error in zip(names, errors, strict=True)
    ]
    fresh, path = environment() | {"pass": "forward"}, tmp_path / "a.json"
    tasks = [
        runs.Task("cells", [x], lambda c=c: [c])
        for x, c in zip(names, cells, strict=True)
    ]
    for count in (4, 1):
        said = []
        one = runs.Run(fresh, said.append, path)
        one.measure(one.left(tasks))
        data, (failure,) = one.result(tasks)
        assert len(said) == count and failure == said[0]
        assert failure.startswith("ours, ") and failure.endswith("wrong result")
        assert sorted(map(str, data["cells"])) == sorted(map(str, cells))
    cells[0].pop("error")
    cells[0]["tflops"] = 2.0
    one = runs.Run(fresh, quiet, path)
    assert [task.names for task in one.left(tasks)] == [names[:1]]
    one.measure(one.left(tasks))
    assert one.result(tasks)[1] == []


RUNS = {name: run for name, run in command.PASSES.items() if name not in command.WHOLE}


@pytest.mark.parametrize("name", [x for x in RUNS if x in records.names()])
def test_the_records_are_continued_as_they_are(name, monkeypatch, tmp_path):
    """Those of earlier benchmarks, which measured otherwise, are refused."""
    path, data = tmp_path / "record.json", records.load(name).data
    about = {x: data[x] for x in ("gpu", "versions", "date", "commit")}
    monkeypatch.setattr(timing, "environment", lambda: about)
    for module in (fa3, fa4):
        methods = {cell.get("method") for cell in data["cells"]}
        missing = None if methods & {*module.METHODS} else "none"
        monkeypatch.setattr(module, "missing", lambda missing=missing: missing)
    monkeypatch.setattr(latent, "on_hopper", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(timing, "DTYPE", torch.bfloat16)
    timing.write(data, path)
    if name in ("forward", "backward", "steps", "decoding"):
        with pytest.raises(
            ValueError, match=r"record\.json: expected (flop_rule|timing)"
        ):
            RUNS[name](False, quiet, path, -math.inf)
    else:
        found, failures = RUNS[name](False, quiet, path, -math.inf)
        assert failures == [] and found == data


def test_the_record_of_the_ring_is_continued_as_it_is(monkeypatch, tmp_path):
    data = records.load("ring").data
    about = {x: data[x] for x in ("gpu", "versions", "date", "commit")}
    monkeypatch.setattr(timing, "environment", lambda: about)
    monkeypatch.setattr(timing, "DEVICE", "cuda")
    monkeypatch.setattr(ring.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(ring.dist, "broadcast_object_list", lambda shared: None)
    monkeypatch.setattr(ring, "measure", lambda *x: pytest.fail("measured again"))
    monkeypatch.setattr(ring, "draw", lambda method: {"ranks": 0})
    timing.write(data, path := tmp_path / "ring.json")
    for size in (2, 4):
        monkeypatch.setattr(ring.dist, "get_world_size", lambda size=size: size)
        assert ring.run(path, math.inf, quiet) == []
    assert json.loads(path.read_text())["cells"] == data["cells"]


def test_cells_that_a_run_at_another_commit_left_say_so(tmp_path):
    cell, earlier = {"us": 1.0}, environment() | {"pass": "decoding"}
    now = {"date": "2001", "commit": "new"}
    path = tmp_path / "record.json"
    timing.write(earlier | {"cells": [cell]}, path)
    assert runs.started(earlier, path)["cells"] == [cell]
    record = runs.started(earlier | now, path)
    assert now.items() <= record.items()
    said = {name: earlier[name] for name in now}
    assert record["cells"] == [cell | said]
    timing.write(record, path)  # and after one more, still the first
    assert runs.started(earlier, path)["cells"] == [cell | said]


# -- scores


@pytest.fixture
def few_scores(monkeypatch):
    """Every variant on short sequences, and FlexAttention without a compiler."""
    work = [
        (scores.Problem(variant, 16, 1, 2, 64), (*methods, *scores.FLEX))
        for variant, methods in scores.VARIANTS.items()
    ]
    reaches = dict.fromkeys(scores.REACHES, 16)
    for name, value in (("REACHES", reaches), ("DOCUMENTS", 4), ("JUDGED", 32)):
        monkeypatch.setattr(scores, name, value)
    monkeypatch.setattr(scores, "plan", lambda quick: work)
    monkeypatch.setattr(scores, "prepared", prepared_here)
    monkeypatch.setattr(hopper_host, "tensor_refusal", lambda *x: "a Hopper GPU")
    monkeypatch.setattr(scores, "flex", flex)
    return work


@contextlib.contextmanager
def prepared_here(work, until):
    """As scores.prepared, in this process."""
    yield [functools.partial(measured, *item) for item in work]


def measured(problem, methods):
    return scores.measure(problem, methods, *scores.prepare(problem, methods))


def flex(problem, method, x):
    """FlexAttention, which has no gradient on a CPU, by its own masks and scores."""
    seen, change = (f(problem.variant, x) for f in (scores.mask_mod, scores.score_mod))
    T, sinks = problem.T, x.get("sinks")
    h, i, j = (torch.arange(n).view(-1, *[1] * k) for n, k in ((2, 2), (T, 1), (T, 0)))

    def call():
        s = (x["q"] @ x["k"].mT).float() * problem.d**-0.5
        s = s if change is None else change(s, 0, h, i, j)
        s = s.masked_fill(~seen(0, h, i, j), -math.inf)
        if sinks is not None:
            s = torch.cat([s, sinks[None, :, None, None].expand(1, 2, T, 1)], -1)
        return (s.softmax(-1)[..., :T] @ x["v"].float()).to(x["v"].dtype)

    return call


def test_scores_give_a_whole_record(few_scores, tmp_path):
    """Results of all methods agree, and a run that was cut off is continued."""
    path = tmp_path / "scores.json"
    data, failures = scores.run(True, quiet, path, end=-math.inf)
    assert data["cells"] == []
    count = len(few_scores)
    assert failures == [f"{count} of {count} tasks are left; run it again"]
    data, failures = scores.run(True, quiet, path)
    assert failures == [] and not any("error" in cell for cell in data["cells"])
    record = records.Record("scores", data)
    assert len(record.cells) == sum(2 * len(methods) for _, methods in few_scores)
    assert scores.run(True, quiet, path)[0]["cells"] == data["cells"]
    picture = plot.contest(record, d=16, direction="backward")
    labels = [text.get_text() for text in picture.axes[0].get_yticklabels()]
    assert labels == [*scores.VARIANTS]
    rates = {bar.get_width() for bar in picture.axes[0].patches}
    ours = record.cell(variant="prefix", method="lists", direction="backward")
    assert ours["tflops"] in rates and len(rates) > 8


def test_a_problem_that_cannot_be_prepared_is_said(few_scores, monkeypatch):
    """Its process finds no GPU."""
    monkeypatch.setattr(scores, "prepared", PREPARED)
    monkeypatch.setattr(scores, "plan", lambda quick: few_scores[:1])
    data, failures = scores.run(True, quiet)
    assert data["cells"] == [] and "was not prepared" in failures[0]
    assert "1 of 1 tasks are left" in failures[1]


def test_fa4_is_a_contender_with_a_softcap_and_sinks(few_scores, monkeypatch):
    monkeypatch.setattr(fa4, "missing", lambda: None)
    monkeypatch.setattr(scores, "plan", PLAN)
    rivals = {p.variant: set(methods) & {*fa4.METHODS} for p, methods in scores.plan()}
    assert {x for x, found in rivals.items() if found} == {*scores.OF_FA4}
    given = []

    def flash_attn_func(q, k, v, softmax_scale, softcap, **options):
        given.append(options)
        s = softmax_scale * q.transpose(1, 2).float() @ k.permute(0, 2, 3, 1).float()
        s = softcap * torch.tanh(s / softcap)
        s = s.masked_fill(torch.ones(s.shape[2:]).triu(1) > 0, -math.inf)
        o = s.softmax(-1) @ v.transpose(1, 2).float()
        return o.transpose(1, 2).to(q.dtype)

    monkeypatch.setattr(fa4, "function", lambda: flash_attn_func)
    problem, methods = few_scores[4]  # softcap
    cells = measured(problem, (*methods, *fa4.METHODS))
    assert not any("error" in cell for cell in cells) and given


def test_visible_pairs_are_counted(few_scores):
    for problem, _ in few_scores:
        x = {"ids": torch.arange(64) // 16}
        seen = scores.mask_of(problem.variant, x).visible(1, 1, 64, 64)
        assert problem.pairs == seen.sum()


def test_a_wrong_score_is_not_timed(few_scores, monkeypatch):
    problem, methods = few_scores[5]  # alibi

    def errors():
        cells = measured(problem, methods)
        return {cell["method"]: cell.get("error", "") for cell in cells}

    monkeypatch.setattr(scores, "score_mod", lambda variant, x: None)
    found = errors()
    assert "from ours" in found["flex"] and not found["auto"]
    attention = flashlib.attention

    def wrong(q, k, v, **options):
        return attention(q, k, 1.5 * v, **options)

    monkeypatch.setattr(flashlib, "attention", wrong)
    assert errors()["auto"].startswith("wrong result")


@pytest.mark.parametrize("name, place", [("bias", 6), ("sinks", 7), ("sinks", 8)])
def test_a_wrong_gradient_of_what_is_learned_is_not_timed(
    few_scores, monkeypatch, name, place
):
    attention = flashlib.attention

    def wrong(q, k, v, **options):
        x = options[name]
        return attention(q, k, v, **options | {name: 2 * x - x.detach()})

    monkeypatch.setattr(flashlib, "attention", wrong)
    _, failed = scores.prepare(few_scores[place][0], ("auto",))
    assert failed["auto"].startswith(f"wrong result: d{name}: ")


# -- decoding


@pytest.fixture
def small(monkeypatch):
    """Four heads of 16, two calls a graph, and no compiler for FlexAttention."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(decoding, "flexible", lambda: sdpa)
    monkeypatch.setattr(decoding.Job, "calls", 2)
    for name, value in {"H": 4, "H_KV": 2, "D": 16}.items():
        monkeypatch.setattr(decoding, name, value)


def test_decoding_gives_a_whole_record(small, monkeypatch):
    methods = ("decode", "sdpa-flash", "sdpa-cudnn", "flex")
    jobs = [decoding.Job(method, 2, 32) for method in methods]
    jobs.append(decoding.Job("decode", 2, 32, 16))
    monkeypatch.setattr(decoding, "plan", lambda quick: [jobs])
    data, failures = decoding.run(True, quiet)
    record = records.Record("decoding", data)
    assert failures == [] and len(record.cells) == len(jobs)
    for cell in record.cells:
        if cell["method"] in ("decode", "flex"):
            assert len(cell["round_us"]) == 3 and cell["calls"] == 2
            assert cell["us"] == sorted(cell["round_us"])[1]
        assert ("error" in cell) >= (cell["method"] == "sdpa-cudnn")


def test_a_wrong_step_of_decoding_is_not_timed(small, monkeypatch):
    right = decoding.attend
    wrong = lambda job, x: right(job, x) * (1.5 if job.page else 1)  # noqa: E731
    monkeypatch.setattr(decoding, "attend", wrong)
    jobs = [decoding.Job("decode", 1, 64), decoding.Job("decode", 1, 64, 16)]
    monkeypatch.setattr(decoding, "plan", lambda quick: [jobs])
    said = []
    data, (failure,) = decoding.run(True, said.append)
    whole, paged = data["cells"]
    assert "us" in whole and paged["error"].startswith("wrong result: o[")
    assert failure.startswith("decode, B = 1, T_k = 64, page = 16: wrong result")
    assert said[0].endswith(f": {whole['us']} us") and said[1] == failure


# -- traffic


def raw_page(launches, unit="byte"):
    """What ncu logs: chatter, a table's head, its units and a line for each launch."""
    metrics = '"dram__bytes_read.sum","dram__bytes_write.sum"'
    lines = ["==PROF== Connected", f'"ID","Kernel Name","Block Size",{metrics}']
    lines.append(f'"","","","{unit}","{unit}"')
    for name, read, written in launches:
        lines.append(f'"0","{name}","(128, 1, 1)","{read:,}","{written:,}"')
    return "\n".join([*lines, "==PROF== Disconnected"])


def test_the_table_of_ncu_is_read():
    rows = [("scores_kernel", 33554432, 2147483648), ("output_kernel(float *)", 5, 0)]
    assert traffic.parse(raw_page(rows)) == [
        ("scores_kernel", {"read_bytes": 33554432, "written_bytes": 2147483648}),
        ("output_kernel", {"read_bytes": 5, "written_bytes": 0}),
    ]
    for text in (raw_page(rows, unit="Mbyte"), "==ERROR== ERR_NVGPUCTRPERM"):
        with pytest.raises(ValueError, match="expected a column dram__bytes_read"):
            traffic.parse(text)


def test_kernels_are_launched_in_the_order_that_is_read(monkeypatch):
    launched = []

    class Spy:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            launched.append(self.name)
            return self.kernel[grid]

    modules = ("standard", "gradients", "flash1", "flash2", "backward")
    for module in (getattr(traffic, name) for name in modules):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Spy(name, getattr(module, name)))
    for name, value in {"B": 1, "H": 2, "D": 16}.items():
        monkeypatch.setattr(traffic, name, value)
    traffic.judge(24)  # launches, and judges what came out
    assert launched == [kernel for *_, kernel in traffic.steps()]


def fake_ncu(monkeypatch, launches, returncode=0):
    """Replace the profiler: it counts 7 and 5 bytes for each of these launches."""

    def profile(words, **options):
        log = raw_page([(name, 7, 5) for name in launches])
        if "--log-file" in words:
            pathlib.Path(words[words.index("--log-file") + 1]).write_text(log)
        version = "NVIDIA (R) Nsight\nVersion 2025.3.1.0 (build 1)\n"
        return subprocess.CompletedProcess(words, returncode, version, "")

    monkeypatch.setattr(traffic.subprocess, "run", profile)


def test_traffic_gives_a_whole_record(monkeypatch):
    monkeypatch.setattr(traffic, "judge", lambda T: None)
    kernels = [kernel for *_, kernel in traffic.steps()]
    fake_ncu(monkeypatch, 2 * kernels)
    data, failures = traffic.run(True, quiet)
    record = records.Record("hbm", data)
    assert failures == [] and len(record.cells) == 2 * 2 * len(kernels)
    assert record.versions["ncu"] == "2025.3.1.0"
    assert "/" not in record.data["command"]
    assert "no GPU, bfloat16, B H = 32, d = 64, 2000-01-01" in record.provenance()
    fake_ncu(monkeypatch, kernels[::-1])
    with pytest.raises(RuntimeError, match="ncu: expected the launches of"):
        traffic.count("all", [512])
    fake_ncu(monkeypatch, kernels, returncode=9)
    with pytest.raises(RuntimeError, match="ncu failed"):
        traffic.count("all", [512])


# -- the command


@pytest.fixture
def on_gpu(monkeypatch):
    """Passes that only name themselves, on a machine that says it has a Hopper GPU."""
    whole = records.load("forward").data
    ran = []

    def run(name, quick, say):
        ran.append((name, quick))
        return whole, ["flash2 is wrong"] if name == "steps" else []

    for name in command.PASSES:
        call = lambda quick, say, name=name: run(name, quick, say)  # noqa: E731
        monkeypatch.setitem(command.PASSES, name, call)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return ran


def test_the_command_runs_the_passes_and_writes_their_records(
    on_gpu, monkeypatch, capsys, tmp_path
):
    command.main(["backward", "hbm", "--output", str(tmp_path)])
    assert on_gpu == [("backward", False), ("hbm", False)]
    written = {file.name for file in tmp_path.iterdir()}
    assert written == {"backward.json", "hbm.json"}
    for rival in (fa3, fa4):
        monkeypatch.setattr(rival, "missing", lambda: "no library")
    with pytest.raises(SystemExit, match="not timed:\n  steps: flash2 is wrong"):
        command.main(["--quick"])
    every = [name for name in command.PASSES if name not in ("fa3", "fa4", "hbm")]
    assert on_gpu[2:] == [(name, True) for name in every]
    said = capsys.readouterr().out
    for name, rival in (("hopper", 3), ("fa3", 3), ("fa4", 4)):
        assert f"{name}: FA-{rival} is left out: no library\n" in said


def test_the_command_continues_records(on_gpu, monkeypatch, tmp_path):
    resumed = []

    def run(quick, say, path, end):
        resumed.append((path, end))
        return records.load("forward").data, []

    monkeypatch.setitem(command.PASSES, "forward", run)
    monkeypatch.setattr(command.time, "monotonic", lambda: 1000.0)
    command.main(["forward", "--resume", "50", "--output", str(tmp_path)])
    assert resumed == [(tmp_path / "forward.json", 1050.0)] and on_gpu == []


def test_the_record_host_is_continued_by_tasks(monkeypatch, tmp_path):
    path, measured = tmp_path / "host.json", []

    def task(item):
        def measure():
            measured.append((item.part, item.names))
            value = records.KINDS["host"][item.part].value
            return [dict.fromkeys(CELL, "x") | name | {value: 1} for name in item.names]

        return item._replace(measure=measure)

    CELL = dict.fromkeys(x for kind in records.KINDS["host"].values() for x in kind[0])
    planned = calls.tasks
    monkeypatch.setattr(calls, "tasks", lambda quick: [*map(task, planned(quick))])
    clock = itertools.count()
    monkeypatch.setattr(runs.time, "monotonic", lambda: next(clock))
    first, (left,) = calls.run(False, quiet, path, 3)
    count, few = len(planned(False)), len(planned(True))
    assert len(measured) == 4 and not first["training"]
    assert left == f"{count - 4} of {count} tasks are left; run it again"
    whole, left = calls.run(False, quiet, path)
    assert len(measured) == count and left == []
    done = {(cell["batch"], cell["mode"]) for cell in whole["training"]}
    assert done == {*itertools.product((8, 1), calls.MODES)}
    path.unlink()
    calls.run(True, quiet, path)
    assert len(measured) == count + few
    assert calls.run(False, quiet, path)[1] == []  # few shapes are not all shapes
    assert len(measured) == 2 * count


def test_hopper_is_left_out_on_other_gpus(on_gpu, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    command.main(["hopper", "--quick"])
    assert "compute capability 9.0, left out" in capsys.readouterr().out
    assert on_gpu == []


def test_the_command_draws_the_figure_of_the_readme(on_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "RECORDS", tmp_path)
    monkeypatch.setattr(command, "FIGURE", tmp_path / "ladder.png")
    command.main(["forward"])
    drawn = {file.name for file in tmp_path.iterdir()}
    assert drawn == {"forward.json", "ladder.png"}
    made = json.loads((tmp_path / "forward.json").read_text())
    assert made == records.load("forward").data


def test_the_figure_of_the_readme_is_that_of_the_records(tmp_path):
    """It is readable on a dark page too: nothing of its ground is transparent."""
    measured = [records.load(name) for name in command.DRAWN]
    command.draw(measured, tmp_path / "ladder.png")
    with Image.open(tmp_path / "ladder.png") as now, Image.open(command.FIGURE) as old:
        assert now.text == old.text
        assert now.convert("RGBA").getchannel("A").getextrema() == (255, 255)
        assert now.tobytes() == old.tobytes(), "`command.draw` draws it anew"


def test_a_record_of_another_gpu_is_not_in_the_figure(monkeypatch, tmp_path):
    drawn = []
    bars = plot.bars
    monkeypatch.setattr(plot, "bars", lambda r, T: drawn.extend(r) or bars(r, T))
    forward, hopper = (records.load(name) for name in command.DRAWN)
    other = hopper.data | {"gpu": hopper.data["gpu"] | {"name": "another"}}
    other["date"] = "2020-01-01T00:00:00Z"
    other = records.Record("hopper", other)
    command.draw([forward, other], tmp_path / "ladder.png")
    assert drawn == [forward]


def test_without_a_gpu_and_with_bad_arguments(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="expected a CUDA GPU, found none"):
        command.main([])
    for arguments, message in [
        (["--output", str(tmp_path / "no")], "expected an existing folder"),
        (["--resume", "9"], "--resume: expected --output"),
        (
            ["hbm", "--resume", "9", "--output", str(tmp_path)],
            "--resume: expected passes that can be continued",
        ),
        (["sideways"], "pass: expected some of forward, .* got sideways"),
    ]:
        with pytest.raises(SystemExit):
            command.main(arguments)
        assert message.split(",")[0] in capsys.readouterr().err
