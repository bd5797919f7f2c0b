"""The compile gate of the kernels with masks, dense and packed."""

from dataclasses import dataclass
from functools import partial

import gate
import pytest
from gate import ALL, EXACT, NO_TENSOR_CORES, POINTERS, STACK, Spill

from flashlib.kernels import masks, masks_backward
from flashlib.plain_checks import UNLIMITED as NONE

TABLES = {
    "forward": masks.FORWARD,
    "keys": masks_backward.KEYS,
    "queries": masks_backward.QUERIES,
}
OF_FUNCTIONS = {**TABLES, "bias": masks_backward.BIAS}
# (left, right, softcap, ALiBi, packed, functions), as run_masks of
# compile_worker.py takes them: "mask" is one with a bias and sinks, "bias" a bias
# alone, "score" a softcap and ALiBi.
CHANGES = {
    "window": (100, 5, 0.0, False, False, ""),
    "softcap": (NONE, NONE, 30.0, False, False, ""),
    "all": (100, 5, 30.0, True, False, ""),
    "packed": (NONE, 0, 0.0, False, True, ""),
    "packed-all": (100, 5, 30.0, True, True, ""),
    "functions": (NONE, NONE, 0.0, False, False, "mask"),
    "causal-functions": (NONE, 0, 0.0, False, False, "mask"),
    "packed-functions": (NONE, NONE, 0.0, False, True, "mask"),
    "bias": (NONE, 0, 0.0, False, False, "bias"),
    "dropout": (NONE, NONE, 0.0, False, False, "dropout"),
    "score": (NONE, 0, 0.0, False, False, "score"),
}


@dataclass(frozen=True)
class Job(gate.Job):
    causal: bool = False
    changes: str = "all"

    step = "masks"
    tables = OF_FUNCTIONS

    @property
    def descriptors(self):
        return super().descriptors and not self.changes.startswith("packed")

    def request(self):
        return super().request() | {"changes": CHANGES[self.changes]}


def jobs(architecture):
    """What every architecture is covered by: all changes at once, dense and packed."""
    job, half = partial(Job, architecture), gate.half(architecture)
    found = [job(x, half, d) for x in TABLES for d in (64, 128, 256)]
    found += [job(x, half, 128, changes="packed-all") for x in TABLES]
    found += [job(x, half, 64, T=1) for x in TABLES]
    if architecture == 90:  # where they spill nothing
        found += [job(x, half, 64, changes="functions") for x in OF_FUNCTIONS]
        found += [job("bias", half, 128, changes="causal-functions")]
        found += [job(x, half, 128, T=256, changes="bias") for x in OF_FUNCTIONS]
        found += [job("queries", half, 64, changes="dropout")]
        found += [job(x, half, 64, changes="score") for x in TABLES]
    return [*found, job("delta", half, 128, changes="packed")]


def thorough_jobs(architecture):
    """Every change, width and precision, other layouts, even lengths."""
    widths = {gate.half(architecture): gate.WIDTHS, "float32": (64, 256)}
    kinds = {"softcap": ("contiguous", 256), "all": ("unaligned", 130)}
    kinds |= dict.fromkeys(("window", "packed", "packed-all"), ("contiguous", 130))
    return [
        Job(architecture, x, dtype, d, layout=layout, T=T, changes=changes)
        for x in TABLES
        for dtype in widths
        for d in widths[dtype]
        for changes, (layout, T) in kinds.items()
    ]


FULL = (
    "dK and dV, or dQ, of 64 rows and 256 columns take what the warps have; smaller "
    "tiles are slower"
)
CHANGED = (
    "a changed score, its distance and its derivative live beside dK and dV, or dQ"
)
SPILLS = (
    Spill(tuple(TABLES), 16, 16, "unaligned", ALL, 128, POINTERS),
    Spill(tuple(TABLES), 16, 256, "unaligned", (90,), 912, POINTERS),
    Spill(("keys",), 16, 256, None, (90,), 704, FULL),
    Spill(("queries",), 16, 256, None, (90,), 192, FULL),
    Spill(("keys",), 16, 128, None, (90,), 64, CHANGED),
    Spill(("keys",), 16, 64, None, (90,), 32, CHANGED),
    Spill(("forward",), 16, 128, None, (100,), 32, STACK),
    Spill(("keys", "queries"), 16, 16, None, (80, 86, 89, 100, 120), 64, CHANGED),
    Spill(tuple(TABLES), 16, 256, None, (75,), 1024, NO_TENSOR_CORES),
    Spill(tuple(TABLES), 32, 16, None, ALL, 128, EXACT),
)


def judge(job, found):
    """Raise for a kernel that is not what the gate wants."""
    gate.judge_tiled(job, found, f"{job.kernel}_kernel", SPILLS)


REST = [job for a in ALL for job in jobs(a)]
REST += [job for a in (80, 90) for job in thorough_jobs(a)]
GATE = gate.Gate(judge, gate.each_kernel(jobs(90)), REST)
test_compiles = GATE.test()


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_sound_and_used_and_every_problem_has_one(name):
    gate.check_table(name, TABLES[name])
    assert all(masks_backward.PAD % row.BLOCK_Q == 0 for row in TABLES[name])
