"""Measure the attention kernels on a CUDA GPU and write records: `make bench`.

There are four passes, `forward`, `steps`, `backward` and `hopper`, and a record for each; what they hold
stands in passes.py. `hopper` needs a GPU of compute capability 9.0 and is left out on others. Each result is
judged before it is timed, against the float64 reference and within the error budget of `flashlib.testing`. A
kernel of ours that is wrong anywhere leaves the reason in place of a time, and the run ends with an error.

How a time is taken: random normal inputs; `triton.testing.do_bench`, that is CUDA events around one call, the
L2 cache flushed before it, the median of about 60 ms of calls; three rounds, and in each round all methods in
turn, in an order that is drawn anew: the clock of a GPU moves with its temperature, and whoever runs after a
thriftier method finds a faster one. A call that takes longer than LONG_MS is timed once
a round. Where the fastest call of a shape takes less than SHORT_MS, the host may be slower than the GPU:
there every method is captured in a CUDA graph as well, and the times of the replays count. The record holds
both.

A method that cannot run a shape leaves the reason in its cell and the run goes on. What has been measured so
far stands beside the record, under the name `<pass>.part`, until it is whole.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import math
import multiprocessing
import os
import pathlib
import platform
import random
import re
import statistics
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor

import passes
import torch
from passes import RIVALS, pinned

from flashlib import records

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORDS = ROOT / "flashlib" / "records"
ROUNDS = 3
SHORT_MS, LONG_MS = 0.5, 60.0
ORDERS = random.Random(0)
DEVICE = "cuda"
WORKERS = min(16, os.cpu_count() or 1)
TIMING = (
    "median of triton.testing.do_bench (CUDA events, L2 flushed before each call; a call of more than "
    f"{LONG_MS:g} ms once), {ROUNDS} interleaved rounds, each in an order drawn anew; launch: calls from "
    "Python; graph: replays of a CUDA graph of one call, taken where the fastest call of the shape is under "
    f"{SHORT_MS} ms; backward: torch.autograd.grad of a kept forward pass, everything that it launches "
    "included"
)


def attempt(action, *arguments):
    """(action(*arguments), None), or (None, why it failed) with what PyTorch warned about on the way."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            return action(*arguments), None
        except Exception as error:  # whatever a method fails with, the others are still measured
            lines = [f"{type(error).__name__}: {error}", *(str(warning.message) for warning in told)]
    # Neither paths nor process numbers of the machine belong in a record.
    lines = [re.split(r" \(Triggered | GPU \d+ has ", line.strip().split("\n")[0])[0] for line in lines]
    return None, "; ".join(dict.fromkeys(lines))[:400]


# -------------------------------------------------------------------------------------------------
# correctness


def compile_all(item, device, say):
    """Compile a pass's kernels on all cores into Triton's cache, where the gate finds them.

    A failure is only told: the gate will meet it again.
    """
    context = multiprocessing.get_context("spawn")  # a fork would share the CUDA context
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        futures = {pool.submit(passes.compile_kernels, *kind, device): kind for kind in passes.kinds(item)}
        for future, (shape, job) in futures.items():
            if error := future.exception():
                say(f"  {job}, {shape}: {type(error).__name__} while compiling")


def gate(shape, job, device):
    """Why the job is not timed on the shape, or None: its results are judged."""

    def judged():
        try:
            passes.judge(job, shape, device)
        except AssertionError as error:
            return f"wrong result: {error}"

    with pinned(job.method):
        wrong, reason = attempt(judged)
    release()
    return wrong or reason


def is_failure(job, reason):
    """Whether a reason for not timing a job is a fault of ours."""
    return job.method not in RIVALS and not reason.startswith("OutOfMemoryError")


# ------------------------------------------------------------------------------------------------------------
# times


def time_ms(action):
    """The median time of one call in milliseconds, L2 flushed before each; of a long call its time once."""
    from triton.testing import do_bench  # not above: flashlib.kernels must be the first to import Triton

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    action()
    end.record()
    end.synchronize()
    once = start.elapsed_time(end)
    return once if once > LONG_MS else float(do_bench(action, warmup=20, rep=60, return_mode="median"))


def digits(x):
    """x to five significant digits, more than any clock here is good for."""
    return float(f"{x:.5g}")


def captured(make):
    """The replay of a CUDA graph that holds one call of make()."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        action = make()  # a backward pass runs on the stream of its forward pass
        action()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        action()

    def replay(kept=action):  # what the graph reads must not be freed
        graph.replay()

    return replay


def release():
    """Give the memory of freed tensors back, so that the next shape finds all of it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def extra_bytes(action):
    """The peak of device memory during a call, above what was allocated before and above its output."""
    action()  # compiles, and makes what a library keeps for later calls
    release()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = action()
    torch.cuda.synchronize()
    results = results if isinstance(results, tuple | list) else (results,)
    kept = sum(x.untyped_storage().nbytes() for x in results)
    return torch.cuda.max_memory_allocated() - before - kept


def time_jobs(makers, rounds_of, cells, prepare):
    """Time the calls {job: function that makes the call} in interleaved rounds into cells[job][rounds_of].

    A job that fails loses its rounds and leaves the reason in cells[job]; it is not tried again.
    """
    ready = {}
    for job, make in makers.items():
        with pinned(job.method):
            ready[job], reason = attempt(prepare, make)
        if reason:
            cells[job][f"{rounds_of}_error"] = reason
    for _ in range(ROUNDS):
        order = [job for job in makers if f"{rounds_of}_error" not in cells[job]]
        for job in ORDERS.sample(order, len(order)):
            with pinned(job.method):
                ms, reason = attempt(time_ms, ready[job])
            if reason:
                cells[job][f"{rounds_of}_error"] = reason
                cells[job].pop(f"{rounds_of}_ms", None)
            else:
                cells[job].setdefault(f"{rounds_of}_ms", []).append(digits(ms))


def measure(shape, jobs, absent, device):
    """The cells of one shape, a dict for each job; absent is {job: why it is not timed}."""
    cells = {job: job.identity(shape) for job in jobs}
    inputs = {layout: shape.inputs(layout, device) for layout in dict.fromkeys(job.layout for job in jobs)}
    makers = {}
    for job in jobs:
        if job in absent:
            cells[job]["error"] = absent[job]
        else:
            makers[job] = functools.partial(passes.make_call, job, shape, inputs[job.layout])
    time_jobs(makers, "launch", cells, prepare=lambda make: make())
    makers = {job: make for job, make in makers.items() if "launch_ms" in cells[job]}
    if makers and min(min(cells[job]["launch_ms"]) for job in makers) < SHORT_MS:
        time_jobs(makers, "graph", cells, prepare=captured)
    for job, cell in cells.items():
        if "launch_error" in cell:
            cell["error"] = cell.pop("launch_error")
        if "launch_ms" in cell:
            cell["timed"] = "graph" if "graph_ms" in cell else "launch"
            cell["ms"] = statistics.median(cell[f"{cell['timed']}_ms"])
            cell["tflops"] = digits(shape.flops(job.direction) / cell["ms"] / 1e9)
    return list(cells.values())


def measure_memory(shape, job, reason, device):
    """The memory cell of a job: the peak of extra memory, or the reason why there is none."""
    extra = None
    if reason is None:
        with pinned(job.method):
            extra, reason = attempt(
                lambda: extra_bytes(passes.make_call(job, shape, shape.inputs(job.layout, device)))
            )
    release()
    return {**job.identity(shape), **({"error": reason} if reason else {"extra_bytes": extra})}


def ceilings(device):
    """What this GPU reaches today: bytes read and written by a large copy, a large bf16 matrix product."""
    n, size = 8192, 2**30
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, generator=generator, device=device, dtype=passes.DTYPE) for _ in range(2))
    source = torch.randint(0, 256, (size,), generator=generator, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_ms, matmul_ms = [], []
    for _ in range(ROUNDS):
        copy_ms.append(digits(time_ms(lambda: target.copy_(source))))
        matmul_ms.append(digits(time_ms(lambda: a @ b)))
    return {
        "copy_bytes": 2 * size,
        "copy_ms": copy_ms,
        "copy_tbs": digits(2 * size / statistics.median(copy_ms) / 1e9),
        "matmul": f"{n} x {n} x {n}, bfloat16",
        "matmul_ms": matmul_ms,
        "matmul_tflops": digits(2 * n**3 / statistics.median(matmul_ms) / 1e9),
    }


# -----------------------------------------------------------------------------------------------------------
# record


def nvidia_smi(field):
    """One field of nvidia-smi for the current GPU, or "unknown"."""
    try:
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        command = ["nvidia-smi", "-i", f"GPU-{uuid}", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, AttributeError, subprocess.SubprocessError):
        return "unknown"


def commit():
    """The commit of this checkout, "-dirty" if files differ; without git, FLASHLIB_COMMIT or "unknown"."""

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FLASHLIB_COMMIT", "unknown")


def environment():
    """The parts of a record that say where and with what it was measured."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    cudnn = torch.backends.cudnn.version()
    return {
        "gpu": {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": nvidia_smi("driver_version"),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton"),
            "cuda": torch.version.cuda,
            "cudnn": "none" if cudnn is None else f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}",
        },
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
    }


def rival_kernels(item, device):
    """{rival: names of the GPU kernels of its first call in the pass}, to show that the pinning worked."""

    def names(shape, job):
        action = passes.make_call(job, shape, shape.inputs(job.layout, device))
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            action()
            torch.cuda.synchronize()
        on_gpu = torch.autograd.DeviceType.CUDA
        return sorted({event.name[:120] for event in profile.events() if event.device_type == on_gpu})

    found = {}
    for (shape, _), jobs in item.groups().items():
        for job in jobs:
            if job.method in RIVALS and job.method not in found:
                with pinned(job.method):
                    result, reason = attempt(names, shape, job)
                found[job.method] = reason or result
    return found


def table(record):
    """The cells as text: TFLOP/s of each method, and how hopper or else flash2 compares."""
    methods = list(dict.fromkeys(cell["method"] for cell in record["cells"]))
    mine = "hopper" if "hopper" in methods else "flash2"
    ratios = [m for m in ("sdpa-flash", "sdpa-cudnn") if m in methods]
    rates = {}
    for c in record["cells"]:
        place = c["direction"], c["d"], c["causal"], c["H"], c["T_q"]
        rates.setdefault(place, {})[c["method"], c["layout"]] = c.get("tflops", math.nan)
    heads = [*methods, *(f"/ {m}" for m in ratios), "strided"]
    lines = [f"{'':46}" + "".join(f"{head:>15}" for head in heads)]
    for (direction, d, causal, H, T), rate in sorted(rates.items()):
        ours = rate.get((mine, "contiguous"), math.nan)
        values = [rate.get((m, "contiguous"), math.nan) for m in methods]
        values += [ours / rate.get((m, "contiguous"), math.nan) for m in ratios]
        values.append(rate.get((mine, "strided"), math.nan) / ours)
        lines.append(
            f"{direction:<17}d {d:<4}{'causal' if causal else 'full':<7}H {H:<5}T {T:<7}"
            + "".join(f"{'-':>15}" if math.isnan(x) else f"{x:15.2f}" for x in values)
        )
    for cell in record["memory"]:
        what = cell.get("error") or f"{cell['extra_bytes'] / 2**20:.1f} MiB extra"
        lines.append(f"memory, {cell['direction']:<17}T {cell['T_q']:<8}{cell['method']:<15}{what}")
    top = record["ceilings"]
    lines.append(
        f"ceilings: copy {top['copy_tbs']:.2f} TB/s, matrix product {top['matmul_tflops']:.0f} TFLOP/s"
    )
    return "\n".join(lines)


def bench(item, device, say=print, save=lambda record: None):
    """Run a pass: (record as a dict, lines that say where our results are wrong or failed).

    save(record) is called whenever a shape is done.
    """
    files = records.file_hashes(item.files)  # now: an edit during the run must not pass for what was measured
    record = {
        "pass": item.name,
        **environment(),
        "files": files,
        "flop_rule": passes.FLOP_RULE,
        "timing": TIMING,
        "ceilings": ceilings(device),
        "sm_clock_mhz": [],
        "grid": {
            "tokens": passes.TOKENS, "width": passes.WIDTH, "rounds": ROUNDS,
            "sweeps": [sweep.description() for sweep in item.sweeps],
            "memory": [sweep.description() for sweep in item.memory],
        },
        "cells": [],
        "memory": [],
    }  # fmt: skip
    failures = []

    def judged(shape, job):
        reason = gate(shape, job, device)
        if reason is not None:
            say(f"  {job}, {shape}: {reason}")
            if is_failure(job, reason):
                failures.append(f"{job}, {shape}: {reason}")
        return reason

    release()
    for (shape, direction), jobs in item.groups().items():
        reasons = {job: judged(shape, job) for job in jobs}
        absent = {job: reason for job, reason in reasons.items() if reason is not None}
        cells = measure(shape, jobs, absent, device)
        record["cells"] += cells
        record["sm_clock_mhz"].append(nvidia_smi("clocks.sm"))
        release()
        rates = (
            f"{c['method']}{'*' if c['layout'] == 'strided' else ''} {c.get('tflops', '-')}" for c in cells
        )
        say(f"{direction}, {shape}: " + ", ".join(rates))
        for job, cell in zip(jobs, cells, strict=True):
            if "error" in cell and job not in absent and is_failure(job, cell["error"]):
                failures.append(f"{job}, {shape}: {cell['error']}")
        save(record)
    for shape, job in item.memory_jobs():
        cell = measure_memory(shape, job, judged(shape, job), device)
        record["memory"].append(cell)
        say(f"memory, {job}, T = {shape.T}: {cell.get('extra_bytes', '-')} bytes")
        save(record)
    return record, failures


def write(record, path):
    """Write the record as JSON, one cell a line."""
    parts = []
    for key, value in record.items():
        if key in ("cells", "memory"):
            value = "[\n" + ",\n".join("    " + json.dumps(cell) for cell in value) + "\n  ]"
        else:
            value = json.dumps(value)
        parts.append(f"  {json.dumps(key)}: {value}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def run(item, folder, say):
    """Run a pass, write its record into the folder (None: nowhere), print the table; our failures."""
    part = folder and folder / f"{item.name}.part"
    record, failures = bench(item, DEVICE, say, lambda record: part and write(record, part))
    if part:
        write(record, part)
        record["rival_kernels"] = rival_kernels(item, DEVICE)  # the profiler has crashed whole processes
        write(record, part)
        os.replace(part, folder / f"{item.name}.json")
        say(f"wrote {item.name}.json")
    print(table(record), flush=True)
    records.Record(item.name, record)  # raises if what was written cannot be read back
    return failures


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = tuple(passes.plan())
    parser.add_argument(
        "--pass", dest="chosen", action="append", choices=names, help="one pass, or several; default: all"
    )
    parser.add_argument("--output", type=pathlib.Path, help="folder to write to; default: flashlib/records")
    parser.add_argument("--quick", action="store_true", help="few shapes; written only with --output")
    parser.add_argument("--plan", action="store_true", help="say what would be measured, and about how long")
    options = parser.parse_args(arguments)
    plan = passes.plan(options.quick)
    chosen = [plan[name] for name in names if name in (options.chosen or names)]
    if options.plan:
        for item in chosen:
            cells = sum(len(jobs) for jobs in item.groups().values())
            minutes = passes.seconds(item, ROUNDS, SHORT_MS, LONG_MS, WORKERS) / 60
            print(f"{item.name}: {cells} times, {len(item.memory_jobs())} memories, about {minutes:.1f} min")
        return
    folder = options.output or (None if options.quick else RECORDS)
    if folder is not None and not folder.is_dir():
        parser.error(f"--output: expected an existing folder, got {folder}")
    if not torch.cuda.is_available():
        sys.exit("make bench: no CUDA GPU found; speeds are measured on a GPU only")

    start = time.monotonic()

    def say(text):
        print(f"[{time.monotonic() - start:4.0f} s] {text}", flush=True)

    failures = []
    for item in chosen:
        if item.capability and torch.cuda.get_device_capability() != item.capability:
            major, minor = item.capability
            line = f"pass {item.name}: its kernels need a GPU of compute capability {major}.{minor}"
            if options.chosen:
                sys.exit(f"make bench: {line}")
            say(f"{line}, left out")
            continue
        say(f"pass {item.name}: compiling on {WORKERS} cores")
        compile_all(item, DEVICE, say)
        say(f"pass {item.name}: each result is judged against the float64 reference, then timed")
        failures += [f"{item.name}: {line}" for line in run(item, folder, say)]
    if failures:
        sys.exit("make bench: these were not timed:\n  " + "\n  ".join(failures))


if __name__ == "__main__":
    main()
