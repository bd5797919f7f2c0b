"""Compile the variants of benchmarks/last_step.py, and of the question float32 dV, for
a GPU that is not there: ``TRITON_INTERPRET=0 python ablations_worker.py d ...`` prints

code     the part of the record ablations with this name, for each d
stack    bytes of stack of other variants at d = 128, by name
sums     additions in float32 dV's kernel, plain and with the products of blocks apart
equal    whether a kernel that is compiled after all that is the one before
"""

import json
import re
import sys
from types import SimpleNamespace

import torch
from absent_gpu import Driver, cuobjdump
from triton.runtime import driver

from benchmarks import ablations, last_step, timing
from flashlib import plans
from flashlib.kernels import backward


def compiled(call, changes):
    """The machine code of what a call launches."""
    found = []

    def keep(kernel, x, programs, *arguments, **options):
        made = kernel.warmup(*arguments, grid=(programs,), **options)
        found.append(made.asm["cubin"])

    with ablations.compiled_with(changes | {(plans, "launch"): keep}):
        call()
    return found[0]


def forward(name, d=128, causal=False):
    T = min(last_step.LENGTHS)
    q, k, v, o = (torch.empty(1, 2, T, d, dtype=timing.DTYPE) for _ in range(4))
    results = o, torch.empty(o.shape[:3])
    call = last_step.launched(name, (q, k, v), results, causal)
    changes = last_step.CHANGES[name]
    return compiled(call, changes)


def summed(changes):
    """The kernel of float32 dV."""
    T, d, H = ablations.SUMMED_T, ablations.SUMMED_D, ablations.SUMMED_HEADS
    q, do = (torch.empty(1, H, T, d) for _ in range(2))
    k, v, dk, dv = (torch.empty(1, H // ablations.GROUP, T, d) for _ in range(4))
    delta, lse2 = (torch.empty(1, H, T) for _ in range(2))
    row = next(x for x in backward.KEYS if 90 in x.architectures and x.bits == 32
               and x.d == d)  # fmt: skip
    read = q, k, v, do, delta, lse2, None, dk, dv, True, d**-0.5, row
    return compiled(lambda: backward.launch_keys(*read), changes)


def main():
    driver.set_active(Driver())
    sizes = SimpleNamespace(multi_processor_count=132, L2_cache_size=60 * 2**20)
    torch.cuda.get_device_properties = lambda device: sizes
    timing.DEVICE = "cpu"
    plain = forward(last_step.FINAL)
    stack = {}
    for name in (last_step.SUMS, last_step.SHARED_Q):
        usage = cuobjdump(forward(name), "--dump-resource-usage")
        stack[name] = int(re.search(r"\bSTACK:(\d+)", usage)[1])
    variants = {"plain": {}, "apart": {(ablations.tl, "dot"): ablations.dot_apart}}
    sums = {
        name: len(re.findall(r"\bFADD\b", cuobjdump(summed(changes), "-sass")))
        for name, changes in variants.items()
    }
    widths = map(int, sys.argv[1:])
    code = last_step.code_cells(ablations.compiled_with, widths)
    same = forward(last_step.FINAL) == plain
    print(json.dumps({"code": code, "stack": stack, "sums": sums, "equal": same}))


main()
