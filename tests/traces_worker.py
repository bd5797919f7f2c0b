"""Compile a Hopper kernel with records of the clock around its waits, for a GPU that
is not there: ``TRITON_INTERPRET=0 python traces_worker.py METHOD DIRECTION d`` prints


plain, after    the SHA-256 of the machine code before and after the traced compilation
traced          the places of its records, and numbers of instructions and registers
untraced        the same numbers of the plain kernel
"""

import hashlib
import json
import re
import sys
from types import SimpleNamespace

import torch
from absent_gpu import Driver, cuobjdump
from triton.profiler.hooks.instrumentation import InstrumentationHook
from triton.runtime import driver

from benchmarks import timing, traces
from flashlib import plans
from flashlib.kernels import backward, hopper


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
    options = "-sass", "--dump-resource-usage"
    return [cuobjdump(compiled.asm["cubin"], option) for option in options]


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
