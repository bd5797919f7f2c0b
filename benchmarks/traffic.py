"""Count the bytes that the kernels move through HBM, with Nsight Compute, and write a record.

    python benchmarks/traffic.py            writes flashlib/records/hbm.json; needs ncu and its counters

The forward and the backward pass of the standard kernels and of flash2, whose backward pass has two forms,
and the forward pass of flash1 are launched once for each length, in bfloat16 with B H = 32 and d = 64. From T
= 1024 on a matrix S in float32 is larger than the L2 cache of an H200, and at T = 8192 so is what flash1
reads and writes at every step. First the correctness gate: the results of each length are judged on some
heads against the float64 reference.

What is counted is ``dram__bytes_read.sum`` and ``dram__bytes_write.sum``: bytes between the L2 cache and HBM,
for each kernel. Traffic that the caches absorb does not appear in it. The clocks are left alone, since bytes
do not depend on them. Each kernel is counted twice:

cache control all       ncu empties the caches before each kernel, so that a count depends on nothing but the
                        kernel. What it has written and what still lies in L2 when it ends is not counted: the
                        bytes written are short by at most the size of L2. This is the count that the model is
                        held against.
cache control none      the caches are as the kernel before left them, as in a real run: reads that hit them
                        are saved, and late writes of one kernel are counted with the next.
"""

import argparse
import csv
import dataclasses
import functools
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

import run
import torch

from flashlib import records
from flashlib.iomodel import formulas
from flashlib.kernels import backward, flash1, flash2, gradients, standard
from flashlib.testing import assert_gradients_within_budget, assert_within_budget

OUTPUT = run.ROOT / "flashlib" / "records" / "hbm.json"
DTYPE = torch.bfloat16
FILES = run.passes.kernel_files("standard", "gradients", "flash1", "flash2", "backward")
METRICS = {"read_bytes": "dram__bytes_read.sum", "written_bytes": "dram__bytes_write.sum"}
COUNTING = (
    f"Nsight Compute, {' and '.join(METRICS.values())}: bytes between L2 and HBM, one launch of each kernel; "
    "cache control all: caches emptied before each kernel; none: as the kernel before left them"
)
D = 64
FLASH1_BLOCK_K = flash1.configuration(DTYPE.itemsize * 8, D, 90)[1]
# (T, d, heads, itemsize) -> what each kernel moves by the model, in the order of the launches.
MODELS = {
    ("standard", "forward"): formulas.standard_forward_bytes,
    ("standard", "backward"): formulas.standard_backward_bytes,
    ("flash1", "forward"): functools.partial(formulas.flash1_forward_bytes, B_c=FLASH1_BLOCK_K),
    ("flash2", "forward"): formulas.flash2_forward_bytes,
    ("flash2", "backward"): formulas.flash_backward_bytes,
    ("flash2-atomic", "backward"): functools.partial(formulas.flash_backward_bytes, deterministic=False),
}


@dataclasses.dataclass(frozen=True)
class Grid:
    """What is counted."""

    T: tuple = (512, 1024, 2048, 4096, 8192)
    B: int = 2
    H: int = 16
    d: int = D
    cache_control: tuple = ("all", "none")


QUICK = Grid(T=(512, 1024))


def steps():
    """[method, direction, step, kernel] of each launch at one length, in order."""
    return [
        [*part, transfer.step, transfer.kernel]
        for part, model in MODELS.items()
        for transfer in model(FLASH1_BLOCK_K, 1, 1, 2)
    ]


def launch(grid, T, device):
    """Every kernel of ``steps`` once, at one length: (q, k, v, do) and the results by part of MODELS, tensors
    [B, H, T, ...].
    """
    generator = torch.Generator(device).manual_seed(T)
    size = (grid.B, grid.H, T, grid.d)
    q, k, v, do = (torch.randn(size, generator=generator, device=device, dtype=DTYPE) for _ in range(4))
    dlse = torch.zeros(size[:3], device=device)
    scale = grid.d**-0.5
    o, lse, p = standard.forward(q, k, v, False, scale)
    gradients_of_standard = gradients.backward(q, k, v, p, o, do, dlse, scale)
    of_flash1 = flash1.forward(q, k, v, False, scale)
    of_flash2 = flash2.forward(q, k, v, False, scale)
    split, atomic = (
        backward.backward(q, k, v, *of_flash2, do, dlse, False, scale, deterministic=form)
        for form in (True, False)
    )
    results = [(o, lse), gradients_of_standard, of_flash1, of_flash2, split, atomic]
    return (q, k, v, do), dict(zip(MODELS, results, strict=True))


def gate(grid, T, device):
    """Raise AssertionError unless what the kernels computed is right on the last head of each batch entry."""
    inputs, results = launch(grid, T, device)
    q, k, v, do = (x[:, -1:] for x in inputs)
    for (_, direction), found in results.items():
        found = [x[:, -1:] for x in found]
        if direction == "forward":
            assert_within_budget(q, k, v, *found)
        else:
            assert_gradients_within_budget(q, k, v, do, *found)


def command(way, options, log):
    """The ncu command that launches this file again under the profiler, counting into the file log."""
    kernels = "|".join(dict.fromkeys(kernel for *_, kernel in steps()))
    return [
        "ncu", "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS.values()),
        "--clock-control", "none", "--cache-control", way, "--kernel-name", f"regex:^({kernels})$",
        "--log-file", str(log), sys.executable, str(pathlib.Path(__file__).resolve()), "--launch", *options,
    ]  # fmt: skip


def parse(text):
    """[(kernel, {"read_bytes": int, "written_bytes": int})] from ncu's raw page as CSV, in order of launches.

    Raises ValueError when a column is missing, a unit is not bytes, or a count is no whole number.
    """
    rows = list(csv.DictReader(line for line in text.splitlines() if line.startswith('"')))
    columns = ["Kernel Name", *METRICS.values()]
    if not rows or any(column not in rows[0] for column in columns):
        raise ValueError(f"ncu printed no table with {', '.join(columns)}:\n{text[-1500:]}")
    units, *launches = rows
    for metric in METRICS.values():
        if units[metric] != "byte":
            raise ValueError(f"ncu counts {metric} in {units[metric]!r}, expected 'byte'")
    counted = []
    for row in launches:
        values = {field: float(row[metric].replace(",", "")) for field, metric in METRICS.items()}
        if any(value != int(value) or value < 0 for value in values.values()):
            raise ValueError(f"ncu counted something else than whole bytes: {row}")
        name = re.split(r"[(<]", row["Kernel Name"])[0].strip()
        counted.append((name, {field: int(value) for field, value in values.items()}))
    return counted


def count(grid, way, options):
    """The cells of one way of cache control: profile this file's launches and read what ncu counted."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "traffic.csv"
        result = subprocess.run(command(way, options, log), cwd=run.ROOT, capture_output=True, text=True)
        text = log.read_text() if log.is_file() else ""
    if result.returncode:
        raise RuntimeError(f"ncu failed:\n{(result.stdout + result.stderr + text)[-3000:]}")
    counted = parse(text)
    plan = [(T, *step) for T in grid.T for step in steps()]
    if [name for name, _ in counted] != [kernel for *_, kernel in plan]:
        names = [name for name, _ in counted]
        raise RuntimeError(
            f"ncu counted {len(names)} launches, expected {len(plan)} in another order: {names}"
        )
    return [
        {
            "method": method, "direction": direction, "step": step, "kernel": kernel, "T": T,
            "cache_control": way, **values,
        }
        for (T, method, direction, step, kernel), (_, values) in zip(plan, counted, strict=True)
    ]  # fmt: skip


def measure(grid, options, device, say):
    """Gate, count, and put the record together; what flashlib/records/__init__.py calls a Traffic."""
    files = records.file_hashes(FILES)
    for T in grid.T:
        gate(grid, T, device)
        run.release()
        say(f"T = {T}: results are right")
    environment = run.environment()
    environment["gpu"]["l2_bytes"] = torch.cuda.get_device_properties(0).L2_cache_size
    version = subprocess.run(["ncu", "--version"], capture_output=True, text=True, check=True).stdout
    environment["versions"]["ncu"] = re.search(r"Version (\S+)", version).group(1)
    cells = []
    for way in grid.cache_control:
        cells += count(grid, way, options)
        say(f"cache control {way}: counted {len(cells)} launches so far")
    shown = command("all", [], "traffic.csv")  # without the paths of this machine
    shown = [*shown[: shown.index(sys.executable)], "python", "benchmarks/traffic.py", "--launch"]
    return {
        "pass": "traffic",
        **environment,
        "files": files,
        "counting": COUNTING,
        "command": shlex.join(shown),
        "grid": {
            "T": list(grid.T), "B": grid.B, "H": grid.H, "d": grid.d,
            "dtype": str(DTYPE).removeprefix("torch."), "cache_control": list(grid.cache_control),
            "steps": steps(), "flash1_block_k": FLASH1_BLOCK_K,
        },
        "cells": cells,
    }  # fmt: skip


def model(cell, grid):
    """The Transfer that the model has for a cell."""
    transfers = MODELS[cell["method"], cell["direction"]](
        cell["T"], grid["d"], grid["B"] * grid["H"], DTYPE.itemsize
    )
    return next(t for t in transfers if t.step == cell["step"])


def table(record):
    """The cells as text, in MB, beside the model."""
    lines = [f"{'':48}{'read':>10}{'model':>10}{'written':>10}{'model':>10}  MB"]
    for cell in record["cells"]:
        predicted = model(cell, record["grid"])
        name = f"{cell['method']} {cell['direction']} {cell['step']}"
        values = cell["read_bytes"], predicted.read_bytes, cell["written_bytes"], predicted.written_bytes
        lines.append(
            f"{cell['cache_control']:<5}T {cell['T']:<6}{name:<35}"
            + "".join(f"{value / 1e6:10.1f}" for value in values)
        )
    return "\n".join(lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=pathlib.Path, help="where to write; default: flashlib/records/hbm.json"
    )
    parser.add_argument("--quick", action="store_true", help="two short lengths; written only with --output")
    parser.add_argument("--launch", action="store_true", help="only launch the kernels, for ncu to count")
    options = parser.parse_args(arguments)
    grid = QUICK if options.quick else Grid()
    if not torch.cuda.is_available():
        sys.exit("traffic.py: no CUDA GPU found; bytes are counted on a GPU only")
    if options.launch:
        for T in grid.T:
            launch(grid, T, run.DEVICE)
            run.release()
        return
    output = options.output or (None if options.quick else OUTPUT)
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        parser.error(f"--output: expected a file in an existing folder, got {output}")
    if shutil.which("ncu") is None:
        sys.exit("traffic.py: ncu (Nsight Compute) is not on the PATH")

    start = time.monotonic()

    def say(text):
        print(f"[{time.monotonic() - start:4.0f} s] {text}", flush=True)

    try:
        record = measure(grid, ["--quick"] if options.quick else [], run.DEVICE, say)
    except (AssertionError, RuntimeError) as error:
        sys.exit(f"traffic.py: {error}")
    if output is not None:
        run.write(record, output)
        say(f"wrote {output}")
    print(table(record), flush=True)
    records.Traffic("counted", record)  # raises if what was written cannot be read back


if __name__ == "__main__":
    main()
