"""How a call is timed, and what every record says about where it was measured.

A time is the median of ``triton.testing.do_bench``: CUDA events around one call, the L2
cache flushed before it, about 60 ms of calls. A call of more than LONG_MS is timed
once a round. There are ROUNDS rounds, and every round times all methods in an order
that is drawn anew, because the clock of a GPU falls as it warms up and a method that
follows a frugal one would look faster.
"""

import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import random
import re
import statistics
import subprocess
import warnings

import torch

DEVICE = "cuda"
DTYPE = torch.bfloat16
ROUNDS = 3
LONG_MS = 60.0
ORDERS = random.Random(0)


def attempt(action, *arguments):
    """(action(*arguments), None), or (None, why it failed) with PyTorch's warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            return action(*arguments), None
        except Exception as error:  # the other methods are measured all the same
            name = (
                "wrong result"
                if isinstance(error, AssertionError)
                else type(error).__name__
            )
            lines = [f"{name}: {error}", *(str(warning.message) for warning in told)]
    # A record holds neither paths nor process numbers of the machine.
    ends = r" \(Triggered | GPU \d+ has |\n"
    lines = [re.split(ends, line.strip())[0] for line in lines]
    return None, "; ".join(dict.fromkeys(lines))[:400]


def time_ms(action):
    """The median milliseconds of a call, or of a long call the one time."""
    from triton.testing import do_bench  # flashlib.kernels must import Triton first

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    action()
    end.record()
    end.synchronize()
    once = start.elapsed_time(end)
    if once > LONG_MS:
        return once
    return float(do_bench(action, warmup=20, rep=60, return_mode="median"))


def digits(x):
    """x to five significant digits, more than any clock here resolves."""
    return float(f"{x:.5g}")


def rounds(actions, count=None):
    """Every round in turn: the items of {job: call} in an order that is drawn anew."""
    for _ in range(count or ROUNDS):
        yield from ORDERS.sample(list(actions.items()), len(actions))


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

    def replay(kept=action):  # the graph reads tensors that `action` keeps alive
        graph.replay()

    return replay


def clock_mhz(make, ms):
    """The clock of the multiprocessors while calls of `ms` milliseconds run."""
    action = make()
    for _ in range(min(1000, math.ceil(60 / ms))):
        action()
    clock = torch.cuda.clock_rate()
    torch.cuda.synchronize()
    return clock


def release():
    """Return the memory of freed tensors, so that the next shape can use all of it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def extra_bytes(action):
    """The peak of device memory during a call, above its inputs and its output."""
    action()  # compiles, and allocates what a library keeps for later calls
    release()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = action()
    torch.cuda.synchronize()
    results = results if isinstance(results, tuple | list) else (results,)
    kept = sum(x.untyped_storage().nbytes() for x in results)
    return torch.cuda.max_memory_allocated() - before - kept


def ceilings():
    """The rates of a large copy, read and written, and of a large bfloat16 product."""
    n, size = 8192, 2**30
    generator = torch.Generator(DEVICE).manual_seed(0)
    options = {"generator": generator, "device": DEVICE}
    a, b = (torch.randn(n, n, dtype=DTYPE, **options) for _ in range(2))
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, **options)
    target = torch.empty_like(source)
    copy_ms, matmul_ms = [], []
    a @ b  # the first product of a process also loads a library
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


def _output(*command):
    """What a command prints, or "unknown"."""
    folder = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().split("\n")[0]


def environment():
    """The parts of a record that say where, when and with what it was measured.

    Where the checkout has no history, FLASHLIB_COMMIT names the commit.
    """
    gpu = torch.cuda.get_device_properties(DEVICE)
    cudnn = torch.backends.cudnn.version()
    driver = _output(
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    )
    commit = _output("git", "describe", "--always", "--dirty", "--exclude=*")
    return {
        "gpu": {
            "name": gpu.name,
            "memory_bytes": gpu.total_memory,
            "l2_bytes": gpu.L2_cache_size,
            "multiprocessors": gpu.multi_processor_count,
            "capability": f"{gpu.major}.{gpu.minor}",
            "driver": driver,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton"),
            "cuda": torch.version.cuda,
            "cudnn": f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}",
        },
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": os.environ.get("FLASHLIB_COMMIT", commit),
    }


LISTS = "cells", "memory", "absorbed", "errors", "caches", "sums", "code", "timelines"


def write(record, path):
    """Write the record as JSON, one cell a line."""
    parts = []
    for key, value in record.items():
        text = json.dumps(value)
        if key in LISTS:
            lines = ",\n".join("    " + json.dumps(cell) for cell in value)
            text = f"[\n{lines}\n  ]"
        parts.append(f"  {json.dumps(key)}: {text}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")
