"""The bytes that the kernels move through HBM, counted with Nsight Compute: the record
hbm.

``dram__bytes_read.sum`` and ``dram__bytes_write.sum`` are the bytes between the L2
cache and HBM; traffic that the caches absorb does not appear in them. Every kernel of
the forward and the backward pass of the standard kernels and of flash2, whose backward
pass has two forms, and of the forward pass of flash1 is launched once for each length.
From T = 1024 on, a matrix S in float32 is larger than the L2 cache of an H200, and at T
= 8192 so is what flash1 reads and writes at every step. The clocks are left alone,
since bytes do not depend on them. Each kernel is counted twice:

cache control all   ncu empties the caches before each kernel, so a count depends on
                    nothing but the kernel. What it wrote and what is still in L2 when
                    it ends is not counted: the bytes written are short by at most the
                    size of L2. The depth page of *The memory bottleneck*
                    compares the model with this count.
cache control none  the caches are as the kernel before left them, as in a real run:
                    reads that hit them are saved, and late writes of one kernel are
                    counted with the next.
"""

import csv
import functools
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

import torch

from benchmarks import timing
from flashlib.iomodel.backward import flash_backward_bytes
from flashlib.iomodel.flash1 import flash1_forward_bytes
from flashlib.iomodel.flash2 import flash2_forward_bytes
from flashlib.iomodel.standard import standard_backward_bytes, standard_forward_bytes
from flashlib.kernels import backward, flash1, flash2, gradients, standard
from flashlib.testing import assert_gradients_within_budget, assert_within_budget

METRICS = {
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
}
COUNTING = (
    f"Nsight Compute, {' and '.join(METRICS.values())}: bytes between L2 and HBM, one "
    "launch of each kernel; cache control all: caches emptied before each kernel; "
    "none: as the kernel before left them"
)
LENGTHS, B, H, D = (512, 1024, 2048, 4096, 8192), 2, 16, 64
FLASH1_BLOCK_K = next(
    row.BLOCK_K
    for row in flash1.CONFIGURATIONS
    if row.bits == timing.DTYPE.itemsize * 8 and 90 in row.architectures and row.d >= D
)
# (T, d, heads, itemsize) -> what each kernel moves by the model, in order of launches
MODELS = {
    ("standard", "forward"): standard_forward_bytes,
    ("standard", "backward"): standard_backward_bytes,
    ("flash1", "forward"): functools.partial(flash1_forward_bytes, B_c=FLASH1_BLOCK_K),
    ("flash2", "forward"): flash2_forward_bytes,
    ("flash2", "backward"): flash_backward_bytes,
    ("flash2-atomic", "backward"): functools.partial(
        flash_backward_bytes, deterministic=False
    ),
}


def steps():
    """[(method, direction, step, kernel)] of each launch at one length, in order."""
    return [
        (*part, transfer.step, transfer.kernel)
        for part, model in MODELS.items()
        for transfer in model(FLASH1_BLOCK_K, 1, 1, 2)
    ]


def launch_all(T):
    """Launch every kernel of ``steps`` once: (q, k, v, do) and the results by part of
    MODELS, tensors [B, H, T, ...].
    """
    generator = torch.Generator(timing.DEVICE).manual_seed(T)
    options = {"generator": generator, "device": timing.DEVICE, "dtype": timing.DTYPE}
    q, k, v, do = (torch.randn(B, H, T, D, **options) for _ in range(4))
    dlse = torch.zeros(B, H, T, device=timing.DEVICE)
    scale = D**-0.5
    o, lse, p = standard.forward(q, k, v, False, scale)
    of_standard = gradients.backward(q, k, v, p, o, do, dlse, scale)
    of_flash1 = flash1.forward(q, k, v, False, scale)
    of_flash2 = flash2.forward(q, k, v, False, scale)
    arguments = (q, k, v, *of_flash2, do, dlse, False, scale)
    split = backward.backward(*arguments, deterministic=True)
    atomic = backward.backward(*arguments, deterministic=False)
    results = [(o, lse), of_standard, of_flash1, of_flash2, split, atomic]
    return (q, k, v, do), dict(zip(MODELS, results, strict=True))


def judge(T):
    """Raise AssertionError unless what the kernels computed is within the budget of
    flashlib.testing on the last head of each batch entry.
    """
    inputs, results = launch_all(T)
    q, k, v, do = (x[:, -1:] for x in inputs)
    for (_, direction), found in results.items():
        found = [x[:, -1:] for x in found]
        if direction == "forward":
            assert_within_budget(q, k, v, *found)
        else:
            assert_gradients_within_budget(q, k, v, do, *found)
    timing.release()


def command(way, lengths, log):
    """The ncu command that runs this module under the profiler and counts into log."""
    kernels = "|".join(dict.fromkeys(kernel for *_, kernel in steps()))
    return [
        "ncu", "--csv", "--page", "raw", "--print-units", "base",
        "--metrics", ",".join(METRICS.values()), "--clock-control", "none",
        "--cache-control", way, "--kernel-name", f"regex:^({kernels})$",
        "--log-file", str(log),
        "python", "-m", "benchmarks.traffic", *map(str, lengths),
    ]  # fmt: skip


def parse(text):
    """[(kernel, {"read_bytes": int, "written_bytes": int})] from ncu's raw page as CSV,
    in order of launches.

    Raises ValueError where a column is missing or a unit is not bytes.
    """
    rows = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    units, *launches = [*rows] or [{}]
    counted = []
    for metric in METRICS.values():
        if units.get(metric) != "byte":
            tail = text[-1500:]
            raise ValueError(f"ncu: expected a column {metric} in byte, got:\n{tail}")
    for row in launches:
        name = re.split(r"[(<]", row["Kernel Name"])[0].strip()
        values = {field: row[metric] for field, metric in METRICS.items()}
        values = {field: int(x.replace(",", "")) for field, x in values.items()}
        counted.append((name, values))
    return counted


def count(way, lengths):
    """The cells of one way of cache control, from launches under the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "traffic.csv"
        words = command(way, lengths, log)
        words[words.index("python")] = sys.executable
        done = subprocess.run(words, capture_output=True, text=True)
        text = log.read_text("utf-8") if log.is_file() else ""
    if done.returncode:
        raise RuntimeError(f"ncu failed:\n{(done.stdout + done.stderr + text)[-3000:]}")
    counted = parse(text)
    plan = [(T, *step) for T in lengths for step in steps()]
    if [name for name, _ in counted] != [kernel for *_, kernel in plan]:
        names = [name for name, _ in counted]
        raise RuntimeError(f"ncu: expected the launches of {plan}, got {names}")
    fields = ("T", "method", "direction", "step", "kernel")
    return [
        dict(zip(fields, step, strict=True)) | {"cache_control": way, **values}
        for step, (_, values) in zip(plan, counted, strict=True)
    ]


def run(quick, say):
    """(record as a dict, an empty list); RuntimeError where ncu fails."""
    told = subprocess.run(
        ["ncu", "--version"], capture_output=True, text=True, check=True
    )
    environment = timing.environment()
    environment["versions"]["ncu"] = re.search(r"Version (\S+)", told.stdout).group(1)
    lengths = LENGTHS[:2] if quick else LENGTHS
    for T in lengths:
        judge(T)
        say(f"T = {T}: results are right")
    cells = []
    for way in ("all", "none"):
        cells += count(way, lengths)
        say(f"cache control {way}: counted {len(cells)} launches so far")
    dtype = str(timing.DTYPE).removeprefix("torch.")
    grid = {"T": list(lengths), "B": B, "H": H, "d": D, "dtype": dtype}
    record = {
        "pass": "hbm",
        **environment,
        "counting": COUNTING,
        "command": shlex.join(command("all", lengths, "traffic.csv")),
        "grid": {**grid, "flash1_block_k": FLASH1_BLOCK_K},
        "cells": cells,
    }
    return record, []


if __name__ == "__main__":
    for length in sys.argv[1:]:
        launch_all(int(length))
        timing.release()
