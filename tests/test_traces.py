"""Traces of the kernels for Hopper: a kernel that is traced is the library's kernel,
with records of the clock around its waits; and what is made of Proton's events.
"""

import ast
import json
import sys
from pathlib import Path

import pytest
from processes import process_environment, run

from benchmarks import traces
from flashlib import records, timeline


def compiled(method, direction, d):
    """What traces_worker.py says of a kernel."""
    worker = Path(__file__).with_name("traces_worker.py")
    changes = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    # A cache would give the traced kernel of an earlier version of `scopes`.
    changes["TRITON_ALWAYS_COMPILE"] = "1"
    changes["PYTHONPATH"] = str(worker.parents[1])  # it imports benchmarks
    command = [sys.executable, worker, method, direction, str(d)]
    done = run(command, env=process_environment(**changes))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


KERNELS = [("hopper", "forward", d) for d in (64, 128)]
KERNELS += [("hopper", "backward", 128), ("copies", "forward", 64)]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_traced_kernel_is_the_kernel_with_records(kernel):
    said = compiled(*kernel)
    traced, untraced = said["traced"], said["untraced"]
    assert untraced["clocks"] == 0 and traced["clocks"] >= 2 * len(traced["places"])
    for same in ("products", "waits", "shared"):
        assert traced[same] == untraced[same], "a record changed what the kernel does"
    assert traced["stack"] <= untraced["stack"] + 80, "bytes that records make spill"
    assert said["after"] == said["plain"], "something of the trace is left"


def places(path):
    """The names of the scopes that a module of kernels would get."""
    for function in ast.walk(ast.parse(path.read_text("utf-8"))):
        for call in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            waits = name in {"mbarrier.wait", "tma.store_wait"} | traces.WAITS
            if waits and traces.awaited(call):
                yield f"{function.name}: {traces.awaited(call)}"


def test_the_timeline_knows_where_the_forward_kernel_waits():
    kernels = Path(timeline.__file__).parent / "kernels"
    files = "gluon_forward.py", "gluon_keep.py", "hopper.py", "steps/hopper.py"
    found = {name for file in files for name in places(kernels / file)}
    # Windows and causal masks wait in `skip`, and the other steps in places of theirs.
    others = {name for name in found if name.split(":")[0] in OTHERS}
    assert found - others == timeline.AWAITED.keys()
    assert {name.split(":")[0] for name in others} == OTHERS


OTHERS = {"skip", "attend_together", "together_kernel"}


def test_what_a_wait_waits_for():
    def found(code):
        return traces.awaited(ast.parse(code).body[0].value)

    assert found("mbarrier.wait(ring.empty.index(slot), phase ^ 1)") == "ring.empty"
    assert found("mbarrier.wait(q_ready, 0)") == "q_ready"
    assert found("warpgroup_mma_wait(1, [s])") == "s"
    assert found("warpgroup_mma_wait(0, [start_scores(q, k, n)])") == "start_scores"
    assert found("tma.store_wait(0)") == "store_wait"
    assert found("warpgroup_mma(p, v, acc)") == "p"
    assert found("warpgroup_mma(p, v, acc, is_async=True)") is None


def test_triton_fills_up_the_last_four_warps():
    """The numbers that traces on an H200 had, in Triton 3.6."""
    assert traces.first_warps([4, 4, 1]) == [0, 4, 10]
    assert traces.first_warps([4, 4, 1, 1]) == [0, 4, 10, 11]
    assert traces.first_warps([4, 4, 1, 1, 1]) == [0, 4, 8, 9, 10]
    assert traces.first_warps([4, 4]) == [0, 4]


def chrome(*events):
    """A chrome trace of Proton's: (core, program, warp, scope, clock, clocks)."""
    return {
        "traceEvents": [
            {
                "pid": f"kernel Core{core} CTA{program}",
                "tid": f"warp {warp} (line 0)",
                "name": scope,
                "ts": clock / 1000,
                "dur": clocks / 1000,
            }
            for core, program, warp, scope, clock, clocks in events
        ]
    }


EVENTS = (
    (3, 7, 0, "attend: s", 5100, 40),
    (3, 7, 0, "start_scores: k_ring.ready", 5000, 60),
    (3, 7, 8, "refill: ring.empty", 4900, 300),
    (4, 1, 0, "attend: s", 900, 50),
)


def test_events_are_read_by_program_and_role(tmp_path):
    path = tmp_path / "trace"
    path.write_text(json.dumps(chrome(*EVENTS)))
    found = traces.events(path, "kernel", {"group 0": 0, "producer": 8})
    assert found[3, 7] == {
        "group 0": [
            ("start_scores: k_ring.ready", 100, 160),
            ("attend: s", 200, 240),
        ],
        "producer": [("refill: ring.empty", 0, 300)],
    }
    assert found[4, 1] == {"group 0": [("attend: s", 0, 50)], "producer": []}
    made = traces.reduced(found)
    assert made["programs"] == 2 and made["clocks"] == [50, 300]
    assert made["waits"]["group 0"]["attend: s"] == {"count": 2, "mean": 45.0}
    assert made["multiprocessor"] == 4
    assert made["roles"] == {"group 0": [[0, 0, 50]], "producer": []}
    assert made["scopes"] == ["attend: s", "refill: ring.empty", *made["scopes"][2:]]


def test_a_long_trace_keeps_the_end_of_its_first_tile():
    tile = [("consume: shared.q.ready", 0), *[("attend: s", n) for n in range(1, 400)]]
    group = [
        (name, 10 * (400 * turn + n), 10 * (400 * turn + n) + 5)
        for turn in range(3)
        for name, n in tile
    ]
    roles = {"group 0": group, "producer": [("refill: ring.empty", 4000, 4010)] * 2}
    kept = traces.window(roles)
    assert len(kept["group 0"]) == traces.KEPT[1] and len(kept["producer"]) == 2
    place = kept["group 0"].index(("consume: shared.q.ready", 4000, 4005))
    assert place == traces.KEPT[1] // 2
    short = {role: spans[:500] for role, spans in roles.items()}
    assert traces.window(short) == short


def test_a_case_that_fails_leaves_the_others(monkeypatch):
    changes = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    cell, error = traces.traced_apart(traces.CASES[0])
    assert cell is None and error


def test_a_run_continues_a_record(monkeypatch, tmp_path):
    ran = []

    def trace(case):
        ran.append(case)
        if case.d == 256:
            return None, "RuntimeError: no trace"
        cell = {"ms": 1.0, "clocks": [1, 2], "equal": case.d != 64}
        return case.identity() | cell, None

    about = {"gpu": {"name": "a GPU"}, "versions": {"triton": "0"}}
    about |= {"date": "today", "commit": "1234567"}
    monkeypatch.setattr(traces, "traced_apart", trace)
    monkeypatch.setattr(traces.timing, "release", lambda: None)
    monkeypatch.setattr(traces.timing, "environment", lambda: about)
    path = tmp_path / "traces.json"
    record, failed = traces.run(False, print, path)
    assert ran == list(traces.CASES) and len(record["cells"]) == len(ran)
    assert failed[0].endswith(": RuntimeError: no trace")
    assert failed[1] == "hopper, forward, d = 64: the trace changed the results"
    records.Record("traces", json.loads(path.read_text()))
    ran.clear()
    before = failed[1:]
    again, failed = traces.run(False, print, path)  # only what failed
    assert [case.d for case in ran] == [256] and "no trace" in failed[0]
    assert failed[1:] == before
    late, failed = traces.run(False, print, path, end=0.0)
    assert len(ran) == 1 and failed[0] == "1 of 8 tasks are left; run it again"
    assert len(late["cells"]) + 1 == len(again["cells"]) == len(traces.CASES)
    about["gpu"] = {"name": "another"}
    with pytest.raises(ValueError, match=r"expected gpu .*another.*, got .*a GPU"):
        traces.run(False, print, path)
