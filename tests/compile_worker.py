"""Compile kernels for a GPU that is not there, through the library's own launchers, and report what came
out.

Usage: ``TRITON_INTERPRET=0 python compile_worker.py ARCHITECTURE < jobs.json``; one JSON line for each
kernel of each job. The launchers run on CPU tensors, with a driver that only knows its target, and every
launch becomes a compilation. So the argument types, alignments and constants that are compiled for are
those of a real call.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flashlib import testing
from flashlib.kernels import flash1, flash2, gradients, standard


class Driver:
    """As much of a driver as compiling asks for."""

    def __init__(self, architecture):
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Compiling:
    """Stands where a jit kernel stood and compiles instead of launching."""

    def __init__(self, kernel, found):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            compiled = self.kernel.warmup(*arguments, grid=grid, **options)
            self.found.append((self.kernel.__name__, compiled))

        return launch


def tool(*arguments):
    """Run the cuobjdump that Triton's wheel brings along."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout


def facts(compiled):
    """Registers, bytes of stack (spills) and shared memory, and the tensor-core instructions of a
    compiled kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage, sass = tool("--dump-resource-usage", cubin), tool("-sass", cubin)
    numbers = {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    instructions = re.findall(r"\b(HGMMA|HMMA|UTCHMMA|UTCQMMA)\b", sass)
    loads = re.findall(r"\b(UTMALDG|LDGSTS)\b", sass)
    return numbers | {
        "shared": compiled.metadata.shared,
        "tensor_cores": sorted(set(instructions)),
        "copies": sorted(set(loads)),
    }


def run(job):
    """Call the launchers of a job's step on its shape."""
    q, k, v = testing.make_qkv(**job["sizes"], dtype=getattr(torch, job["dtype"]))
    scale, causal = 1.0 / math.sqrt(q.shape[3]), job["causal"]
    if job["step"] == "flash1":
        o, m, l = (torch.empty(*q.shape[:3], *rest) for rest in ((v.shape[3],), (), ()))
        flash1.launch(q, k, v, o, m, l, causal, scale, job["row"])
        return
    if job["step"] == "flash2":
        o, lse = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.empty(q.shape[:3])
        flash2.launch(q, k, v, o, lse, causal, scale, flash2.CONFIGURATIONS[job["row"]])
        return
    o, _, p = standard.forward(q, k, v, causal, scale)
    if job["step"] == "gradients":
        gradients.backward(q, k, v, p, o, torch.empty_like(o), torch.empty(q.shape[:3]), scale)


def main():
    driver.set_active(Driver(int(sys.argv[1])))
    found = []
    for module in (flash1, flash2, gradients, standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                setattr(module, name, Compiling(value, found))
    for number, job in enumerate(json.load(sys.stdin)):
        found.clear()
        run(job)
        own = {
            name
            for name, value in vars(sys.modules[f"flashlib.kernels.{job['step']}"]).items()
            if isinstance(value, Compiling)
        }
        for name, compiled in found:
            if name in own:
                print(json.dumps({"job": number, "kernel": name} | facts(compiled)), flush=True)


main()
