"""Compile a Hopper kernel with records of the clock around its waits, for a GPU that
is not there: ``TRITON_INTERPRET=0 python traces_worker.py METHOD DIRECTION d`` prints


plain, after    the SHA-256 of the machine code before and after the traced compilation
traced          the places of its records, and numbers of instructions and registers
untraced        the same numbers of the plain kernel
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.profiler.hooks.instrumentation import InstrumentationHook
from triton.runtime import driver

from benchmarks import timing, traces
from flashlib import plans
from flashlib.kernels import backward, hopper

SHARED_BYTES = 232_448  # that a program may use


class Driver:
    """What compiling and Proton ask of a driver."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES}
    )

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Compiling:
    """Stands where a jit kernel stood and compiles instead of launching."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, None

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.compiled = self.kernel.warmup(*arguments, grid=grid, **options)

        return launch


def code(compiled):
    """The machine code, as text without addresses' encodings, and its use of a GPU."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        return [
            subprocess.check_output([program, option, cubin], text=True)
            for option in ("-sass", "--dump-resource-usage")
        ]


def facts(compiled):
    """Numbers of products, waits for them and reads of the clock; stack and shared
    memory of a program.
    """
    sass, usage = code(compiled)
    names = {"products": "HGMMA", "waits": r"WARPGROUP\.DEPBAR", "clocks": "SR_CLOCKLO"}
    found = {name: len(re.findall(rf"\b{x}\b", sass)) for name, x in names.items()}
    found["stack"] = int(re.search(r"\bSTACK:(\d+)", usage)[1])
    return found | {"shared": compiled.metadata.shared}


def main():
    method, direction, d = sys.argv[1:]
    driver.set_active(Driver())
    sizes = SimpleNamespace(multi_processor_count=132, L2_cache_size=60 * 2**20)
    torch.cuda.get_device_properties = lambda device: sizes
    timing.DEVICE = "cpu"
    # What is computed before the kernel that is traced would be launched.
    hopper.forward = lambda q, *rest: (torch.empty_like(q), torch.empty(q.shape[:3]))
    backward.launch_delta = lambda *arguments: None
    case = traces.Case(method, direction, int(d), False, 4096)
    launch = traces.launch_of(case)
    compiling = Compiling(getattr(launch.module, launch.kernel))
    setattr(launch.module, launch.kernel, compiling)

    def compiled():
        plans.PLANS.clear()
        compiling.kernel.device_caches.clear()
        launch.call()
        return compiling.compiled

    def digest(found):
        return hashlib.sha256(found.asm["cubin"]).hexdigest()

    plain = compiled()
    hook = InstrumentationHook(
        traces.mode(launch.roles.values(), traces.ENTRIES[case.T])
    )
    hook.activate()
    with traces.scopes():
        traced = compiled()
    hook.deactivate()
    places = re.findall(r'proton\.record start "([^"]*)"', traced.asm["ttgir"])
    said = {
        "plain": digest(plain),
        "after": digest(compiled()),
        "untraced": facts(plain),
        "traced": facts(traced) | {"places": sorted(set(places))},
        "roles": launch.roles,
    }
    print(json.dumps(said))


main()
