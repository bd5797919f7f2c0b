"""Measure the attention kernels on a CUDA GPU and write a record: `make bench`.

First the correctness gate: on every shape of the grid, each of our kernels is judged row by row against the
float64 reference, within the error budget of `flashlib.testing`; one row over it ends the run. Then the
times, ours beside PyTorch's `scaled_dot_product_attention` pinned to one backend, on the same tensors, in one
process.

How a time is taken: random normal inputs; `triton.testing.do_bench`, that is CUDA events around one call, the
L2 cache flushed before it, the median of about 60 ms of calls; three rounds, and in each round all rivals in
turn, since the clock of a GPU moves with its temperature. Where the fastest call of a shape takes less than
SHORT_MS, the host may be slower than the GPU; there every rival of that shape is captured in a CUDA graph as
well, and the times of the replays are the ones that count. The record holds both.

A rival that cannot run a shape leaves the reason in its cell and the run goes on.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time
import warnings

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashlib
from flashlib import records
from flashlib.testing import assert_within_budget

ROOT = pathlib.Path(__file__).resolve().parents[1]
OURS = ("standard", "flash2")
RIVALS = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
METHODS = (*OURS, *RIVALS)
STRIDED = ("flash2",)
ROUNDS = 3
SHORT_MS = 0.5
DEVICE = "cuda"
DTYPE = torch.bfloat16
# What runs inside a timed call of ours: a record is old once the code of one of these has changed.
FILES = ("api.py", "kernels/__init__.py", "kernels/tiles.py", "kernels/standard.py", "kernels/flash2.py")
FLOP_RULE = "forward: 4 B H T_q T_k d operations, half of them with a causal mask"
TIMING = (
    "median of triton.testing.do_bench (CUDA events, L2 flushed before each call), "
    f"{ROUNDS} interleaved rounds; launch: calls from Python; graph: replays of a CUDA graph of one call, "
    f"taken where the fastest call of the shape is under {SHORT_MS} ms"
)


@dataclasses.dataclass(frozen=True)
class Grid:
    """What is measured. Every shape has B T = tokens and H d = width; the memory shapes have B = 1."""

    d: tuple = (64, 128, 256)
    T: tuple = (512, 1024, 2048, 4096, 8192, 16384)
    tokens: int = 16384
    width: int = 2048
    strided_from: int = 4096
    memory_T: tuple = (8192, 32768, 131072)
    memory_H: int = 8
    memory_d: int = 128

    def shapes(self):
        return [
            Shape(self.tokens // T, self.width // d, T, d, causal)
            for d in self.d
            for causal in (False, True)
            for T in self.T
        ]

    def memory_shapes(self):
        return [Shape(1, self.memory_H, T, self.memory_d, False) for T in self.memory_T]

    def jobs(self, shape):
        """The (method, layout) pairs to measure on a shape."""
        strided = STRIDED if self.strided_from <= shape.T else ()
        return [(method, "contiguous") for method in METHODS] + [(method, "strided") for method in strided]


QUICK = Grid(d=(128,), T=(1024, 4096), memory_T=(8192,))


@dataclasses.dataclass(frozen=True)
class Shape:
    """q, k and v of shape [B, H, T, d]."""

    B: int
    H: int
    T: int
    d: int
    causal: bool

    def __str__(self):
        return (
            f"d = {self.d}, {'causal' if self.causal else 'full'}, B = {self.B}, H = {self.H}, T = {self.T}"
        )

    def flops(self):
        return 4 * self.B * self.H * self.T**2 * self.d // (2 if self.causal else 1)

    def inputs(self, layout, device):
        """Normal q, k, v [B, H, T, d]; "strided" is stored [B, T, H, d], as a linear layer leaves it."""
        generator = torch.Generator(device).manual_seed(self.T + self.d)
        stored = (
            (self.B, self.H, self.T, self.d) if layout == "contiguous" else (self.B, self.T, self.H, self.d)
        )
        tensors = [torch.randn(stored, generator=generator, device=device, dtype=DTYPE) for _ in range(3)]
        return tensors if layout == "contiguous" else [x.transpose(1, 2) for x in tensors]

    def identity(self, method, layout):
        return {
            "method": method, "B": self.B, "H": self.H, "H_kv": self.H, "T_q": self.T, "T_k": self.T,
            "d": self.d, "causal": self.causal, "layout": layout, "dtype": str(DTYPE).removeprefix("torch."),
        }  # fmt: skip


def call(method, q, k, v, causal):
    """One forward call: o [B, H, T, d]. A rival is the one that the surrounding `pinned` names."""
    if method in OURS:
        return flashlib.attention(q, k, v, causal=causal, method=method)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def pinned(method):
    """A context in which PyTorch has only the backend that the method names."""
    return sdpa_kernel([RIVALS[method]]) if method in RIVALS else contextlib.nullcontext()


def attempt(action, *arguments):
    """(action(*arguments), None), or (None, why it failed) with what PyTorch warned about on the way."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            return action(*arguments), None
        except AssertionError:
            raise
        except Exception as error:  # whatever a rival fails with, the others are still measured
            lines = [f"{type(error).__name__}: {error}", *(str(warning.message) for warning in told)]
    # Neither paths nor process numbers of the machine belong in a record.
    lines = [re.split(r" \(Triggered | GPU \d+ has ", line.strip().split("\n")[0])[0] for line in lines]
    return None, "; ".join(dict.fromkeys(lines))[:400]


# -------------------------------------------------------------------------------------------------
# correctness gate


def judge(method, shape, q, k, v):
    """Raise AssertionError unless the method's output on q, k, v is within the budget.

    Ours are judged on every row, with the log-sum-exp, some heads at a time, so that the T x T matrices of
    the reference fit. A rival is judged on the last heads: enough to know that it computes the same thing.
    Beyond T = 16384 only the last 128 queries of each head are judged: on them the bottom-right causal mask
    is the same.
    """
    if method in OURS:
        o, lse = flashlib.attention(q, k, v, causal=shape.causal, method=method, return_lse=True)
        lse = lse.reshape(1, -1, shape.T)
    else:
        o, lse = call(method, q, k, v, shape.causal), None
    q, k, v, o = (x.reshape(1, -1, shape.T, shape.d) for x in (q, k, v, o))
    rows = shape.T if shape.T <= 16384 else 128
    q, o = q[:, :, -rows:], o[:, :, -rows:]
    heads, some = q.shape[1], max(1, 2**28 // (rows * shape.T))
    starts = range(0, heads, some) if method in OURS else [max(0, heads - some)]
    for start in starts:
        part = slice(start, start + some)
        part_lse = None if lse is None else lse[:, part, -rows:]
        assert_within_budget(q[:, part], k[:, part], v[:, part], o[:, part], part_lse, causal=shape.causal)


def gate(grid, device, say):
    """Judge every job of the grid: (failures of ours, {(shape, method, layout): why it is not timed})."""
    failures, absent = [], {}
    plan = [(shape, grid.jobs(shape)) for shape in grid.shapes()]
    plan += [(shape, [(method, "contiguous") for method in METHODS]) for shape in grid.memory_shapes()]
    for shape, jobs in plan:
        for method, layout in jobs:
            try:
                with pinned(method):
                    _, reason = attempt(judge, method, shape, *shape.inputs(layout, device))
            except AssertionError as error:
                reason = f"wrong result: {error}"
            if reason is not None:
                absent[shape, method, layout] = reason
                say(f"  {method}, {layout}, {shape}: {reason}")
                if method in OURS and not reason.startswith("OutOfMemoryError"):
                    failures.append(f"{method}, {layout}, {shape}: {reason}")
            release()
    return failures, absent


# ------------------------------------------------------------------------------------------------------------
# times


def time_ms(action):
    """The median time of one call in milliseconds, L2 flushed before each."""
    from triton.testing import do_bench  # not above: flashlib.kernels must be the first to import Triton

    return float(do_bench(action, warmup=20, rep=60, return_mode="median"))


def digits(x):
    """x to five significant digits, more than any clock here is good for."""
    return float(f"{x:.5g}")


def captured(action):
    """The replay of a CUDA graph that holds one call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        action()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


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
    o = action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - o.untyped_storage().nbytes()


def time_jobs(actions, rounds_of, cells, prepare):
    """Time the actions {job: (method, callable)} in interleaved rounds into cells[job][rounds_of].

    A job that fails loses its rounds and leaves the reason in cells[job]; it is not tried again.
    """
    ready = {}
    for job, (method, action) in actions.items():
        with pinned(method):
            ready[job], reason = attempt(prepare, action)
        if reason:
            cells[job][f"{rounds_of}_error"] = reason
    for turn in range(ROUNDS):
        order = [job for job in actions if f"{rounds_of}_error" not in cells[job]]
        for job in order[turn:] + order[:turn]:  # nobody is always first
            with pinned(actions[job][0]):
                ms, reason = attempt(time_ms, ready[job])
            if reason:
                cells[job][f"{rounds_of}_error"] = reason
                cells[job].pop(f"{rounds_of}_ms", None)
            else:
                cells[job].setdefault(f"{rounds_of}_ms", []).append(digits(ms))


def measure(shape, jobs, absent, device):
    """The cells of one shape, a dict for each (method, layout) of jobs."""
    cells = {job: shape.identity(*job) for job in jobs}
    inputs = {layout: shape.inputs(layout, device) for layout in dict.fromkeys(layout for _, layout in jobs)}
    actions = {}
    for method, layout in jobs:
        if (shape, method, layout) in absent:
            cells[method, layout]["error"] = absent[shape, method, layout]
        else:
            action = functools.partial(call, method, *inputs[layout], shape.causal)
            actions[method, layout] = method, action
    time_jobs(actions, "launch", cells, prepare=lambda action: action)
    actions = {job: action for job, action in actions.items() if "launch_ms" in cells[job]}
    if actions and min(min(cells[job]["launch_ms"]) for job in actions) < SHORT_MS:
        time_jobs(actions, "graph", cells, prepare=captured)
    for cell in cells.values():
        if "launch_error" in cell:
            cell["error"] = cell.pop("launch_error")
        if "launch_ms" in cell:
            cell["timed"] = "graph" if "graph_ms" in cell else "launch"
            cell["ms"] = statistics.median(cell[f"{cell['timed']}_ms"])
            cell["tflops"] = digits(shape.flops() / cell["ms"] / 1e9)
    return list(cells.values())


def measure_memory(shape, absent, device):
    """The memory cells of one shape: the times, and the peak of extra memory."""
    jobs = [(method, "contiguous") for method in METHODS]
    cells = measure(shape, jobs, absent, device)
    inputs = shape.inputs("contiguous", device)
    for cell in cells:
        if "error" in cell:
            continue
        with pinned(cell["method"]):
            action = functools.partial(call, cell["method"], *inputs, shape.causal)
            extra, reason = attempt(extra_bytes, action)
        cell.update({"error": reason} if reason else {"extra_bytes": extra})
    return cells


def ceilings(device):
    """What this GPU reaches today: bytes read and written by a large copy, a large bf16 matrix product."""
    n, size = 8192, 2**30
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, generator=generator, device=device, dtype=DTYPE) for _ in range(2))
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


def rival_kernels(shape, device):
    """{rival: names of the GPU kernels that it launched}, to show that the pinning worked."""

    def names(method):
        inputs = shape.inputs("contiguous", device)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            call(method, *inputs, shape.causal)
            torch.cuda.synchronize()
        on_gpu = torch.autograd.DeviceType.CUDA
        return sorted({event.name[:120] for event in profile.events() if event.device_type == on_gpu})

    found = {}
    for method in RIVALS:
        with pinned(method):
            result, reason = attempt(names, method)
        found[method] = reason or result
    return found


def table(record):
    """The cells as text: TFLOP/s of each method, and how ours compare."""
    by_key = {
        (c["d"], c["causal"], c["T_q"], c["method"], c["layout"]): c.get("tflops", math.nan)
        for c in record["cells"]
    }
    lines = [f"{'':22}" + "".join(f"{m:>11}" for m in (*METHODS, "/ flash", "/ cudnn", "strided"))]
    for d, causal, T in sorted({key[:3] for key in by_key}):
        rate = {m: by_key.get((d, causal, T, m, "contiguous"), math.nan) for m in METHODS}
        ours = rate["flash2"]
        strided = by_key.get((d, causal, T, "flash2", "strided"), math.nan) / ours
        ratios = (ours / rate["sdpa-flash"], ours / rate["sdpa-cudnn"], strided)
        lines.append(
            f"d {d:<4}{'causal' if causal else 'full':<7}T {T:<8}"
            + "".join(f"{rate[m]:11.1f}" for m in METHODS)
            + "".join(f"{'-':>11}" if math.isnan(x) else f"{x:11.2f}" for x in ratios)
        )
    for cell in record["memory"]:
        what = cell.get("error") or (
            f"{cell['extra_bytes'] / 2**20:.1f} MiB extra, {cell['ms']:.2f} ms, {cell['tflops']:.1f} TFLOP/s"
        )
        lines.append(f"memory  T {cell['T_q']:<8}{cell['method']:<12}{what}")
    top = record["ceilings"]
    lines.append(
        f"ceilings: copy {top['copy_tbs']:.2f} TB/s, matrix product {top['matmul_tflops']:.0f} TFLOP/s"
    )
    return "\n".join(lines)


@torch.no_grad()
def bench(grid, device, say=print):
    """Run everything and return the record as a dict. AssertionError listing where our results are wrong."""
    files = records.file_hashes(FILES)  # now: an edit during the run must not pass for what was measured
    say("correctness gate: every row of every shape against the float64 reference")
    failures, absent = gate(grid, device, say)
    if failures:
        raise AssertionError("the correctness gate failed, nothing was timed:\n  " + "\n  ".join(failures))
    record = {
        "pass": "forward",
        **environment(),
        "files": files,
        "flop_rule": FLOP_RULE,
        "timing": TIMING,
        "ceilings": ceilings(device),
        "sm_clock_mhz": [],
        "grid": {
            "d": list(grid.d), "causal": [False, True], "T": list(grid.T), "tokens": grid.tokens,
            "width": grid.width, "methods": list(METHODS), "strided": list(STRIDED),
            "strided_from": grid.strided_from, "memory_T": list(grid.memory_T), "rounds": ROUNDS,
        },
        "cells": [],
        "memory": [],
    }  # fmt: skip
    release()
    for shape in grid.shapes():
        cells = measure(shape, grid.jobs(shape), absent, device)
        record["cells"] += cells
        if grid.T[-1] == shape.T:
            record["sm_clock_mhz"].append(nvidia_smi("clocks.sm"))
        release()
        rates = (
            f"{c['method']}{'*' if c['layout'] == 'strided' else ''} {c.get('tflops', '-')}" for c in cells
        )
        say(f"{shape}: " + ", ".join(rates))
    for shape in grid.memory_shapes():
        say(f"memory at T = {shape.T}")
        record["memory"] += measure_memory(shape, absent, device)
        release()
    return record


def write(record, path):
    """Write the record as JSON, one cell a line, and replace the file only once all of it is there."""
    parts = []
    for key, value in record.items():
        if key in ("cells", "memory"):
            value = "[\n" + ",\n".join("    " + json.dumps(cell) for cell in value) + "\n  ]"
        else:
            value = json.dumps(value)
        parts.append(f"  {json.dumps(key)}: {value}")
    part = path.with_suffix(".part")
    part.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    os.replace(part, path)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=pathlib.Path, help="where to write; default: flashlib/records/forward.json"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two lengths at d = 128; written only with --output"
    )
    options = parser.parse_args(arguments)
    output = options.output
    if output is None and not options.quick:
        output = ROOT / "flashlib" / "records" / "forward.json"
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        parser.error(f"--output: expected a file in an existing folder, got {output}")
    if not torch.cuda.is_available():
        sys.exit("make bench: no CUDA GPU found; speeds are measured on a GPU only")

    start = time.monotonic()

    def say(text):
        print(f"[{time.monotonic() - start:4.0f} s] {text}", flush=True)

    try:
        record = bench(QUICK if options.quick else Grid(), DEVICE, say)
    except AssertionError as error:
        sys.exit(f"make bench: {error}")
    if output is not None:
        write(record, output)  # before the profiler runs: it has crashed whole processes
        record["rival_kernels"] = rival_kernels(Grid().shapes()[0], DEVICE)
        write(record, output)
        say(f"wrote {output}")
    print(table(record), flush=True)
    records.Record(
        output.stem if output else "quick", record
    )  # raises if what was written cannot be read back


if __name__ == "__main__":
    main()
