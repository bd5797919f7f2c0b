"""The compile gate of the kernels with masks: every change of scores, dense and packed."""

from typing import NamedTuple

import pytest
import torch
from cases import compiler
from test_compile import (
    ALL,
    EXACT,
    NO_TENSOR_CORES,
    POINTERS,
    SHARED_BYTES,
    Spill,
    judge_tiled,
    parametrised,
    sixteen,
)

from flashlib.kernels import launch, masks

TABLES = {"forward": masks.FORWARD, "keys": masks.KEYS, "queries": masks.QUERIES}
FAST = (90,)
NONE = masks.UNLIMITED
# (left, right, softcap, ALiBi, packed), as run_masks of compile_worker.py takes them.
CHANGES = {
    "window": (100, 5, 0.0, False, False),
    "softcap": (NONE, NONE, 30.0, False, False),
    "all": (100, 5, 30.0, True, False),
    "packed": (NONE, 0, 0.0, False, True),
    "packed-all": (100, 5, 30.0, True, True),
}


class Job(NamedTuple):
    """One launch of one kernel, with the row of its table that the launcher would choose."""

    architecture: int
    kernel: str
    dtype: str
    d: int
    changes: str = "all"
    layout: str = "contiguous"
    T: int = 130  # no block divides it, so the code for the ragged end is compiled too

    def __str__(self):
        parts = [f"sm_{self.architecture}", self.kernel, self.dtype, f"d{self.d}", self.changes, self.layout]
        return "-".join([*parts, f"T{self.T}"])

    @property
    def row(self):
        if self.kernel not in TABLES:
            return None
        descriptors = self.layout == "contiguous" and not self.changes.startswith("packed")
        problem = (getattr(torch, self.dtype).itemsize * 8, self.d, self.architecture)
        memory = SHARED_BYTES[self.architecture]
        return launch.fitting(self.kernel, TABLES[self.kernel], *problem, memory, descriptors, False)

    def request(self):
        sizes = {"B": 1, "H": 4, "H_kv": 2, "T_q": self.T, "d": self.d, "layout": self.layout}
        return {
            "step": "masks", "kernel": self.kernel, "row": self.row, "dtype": self.dtype, "causal": False,
            "sizes": sizes, "changes": CHANGES[self.changes],
        }  # fmt: skip


def jobs(architecture):
    """What is compiled in the fast tests for an architecture: all changes at once, dense and packed."""
    half = sixteen(architecture)
    found = [Job(architecture, x, half, d) for x in TABLES for d in (64, 128, 256)]
    found += [Job(architecture, x, half, 128, "packed-all") for x in TABLES]
    found += [Job(architecture, x, half, 64, T=1) for x in TABLES]
    return [*found, Job(architecture, "delta", half, 128, "packed")]


def thorough_jobs(architecture):
    """The rest: every change, every width in both precisions, other layouts, lengths that divide."""
    half = sixteen(architecture)
    found = [
        Job(architecture, x, dtype, d, changes, layout, T)
        for x in TABLES
        for dtype, widths in ((half, (16, 64, 128, 256)), ("float32", (64, 256)))
        for d in widths
        for changes, layout, T in (
            ("window", "contiguous", 130), ("softcap", "contiguous", 256), ("all", "unaligned", 130),
            ("packed", "contiguous", 130), ("packed-all", "contiguous", 130),
        )
    ]  # fmt: skip
    return [job for job in found if job not in jobs(architecture)]


compiled = compiler(jobs, thorough_jobs)


FULL = "dK and dV, or dQ, of 64 rows and 256 columns take what the warps have; smaller tiles are slower"
CHANGED = "a changed score, its distance and its derivative live beside dK and dV, or dQ"
SPILLS = (
    Spill(tuple(TABLES), 16, 16, "unaligned", ALL, 128, POINTERS),
    Spill(tuple(TABLES), 16, 256, "unaligned", (90,), 912, POINTERS),
    Spill(("keys",), 16, 256, None, (90,), 704, FULL),
    Spill(("queries",), 16, 256, None, (90,), 192, FULL),
    Spill(("keys",), 16, 128, None, (90,), 48, CHANGED),
    Spill(("keys", "queries"), 16, 16, None, (80, 86, 89, 100, 120), 64, CHANGED),
    Spill(tuple(TABLES), 16, 256, None, (75,), 1024, NO_TENSOR_CORES),
    Spill(tuple(TABLES), 32, 16, None, ALL, 128, EXACT),
)


def judge(job, found):
    """Raise for a kernel that is not what the gate wants."""
    judge_tiled(job, found, f"{job.kernel}_kernel", SPILLS, job.kernel in TABLES)


@pytest.mark.parametrize("job", parametrised(FAST, jobs))
def test_compiles(job):
    judge(job, compiled(job.architecture, False)[job])


@pytest.mark.slow
@pytest.mark.parametrize("job", parametrised([a for a in SHARED_BYTES if a not in FAST], jobs))
def test_compiles_for_other_architectures(job):
    judge(job, compiled(job.architecture, False)[job])


@pytest.mark.slow
@pytest.mark.parametrize("job", parametrised((80, 90), thorough_jobs))
def test_compiles_with_every_change(job):
    judge(job, compiled(job.architecture, True)[job])


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_used_and_every_problem_has_one(name):
    used = {
        launch.fitting(name, TABLES[name], bits, d, architecture, memory, descriptors, False)
        for architecture, memory in SHARED_BYTES.items()
        for bits in (16, 32)
        for d in (16, 64, 128, 256)
        for descriptors in (False, True)
    }
    assert used == set(TABLES[name])
    for row in used:
        assert set(row.architectures) <= set(SHARED_BYTES) and masks.PAD % row.BLOCK_Q == 0
        assert all(row.shared_bytes <= SHARED_BYTES[a] for a in row.architectures)


def test_the_gate_can_fail():
    job = Job(90, "keys", "bfloat16", 64)
    good = {
        "kernel": "keys_kernel", "reg": 160, "stack": 0, "local": 0, "shared": job.row.shared_bytes,
        "tensor_cores": ["HGMMA"], "products": 16, "waits": 3, "copies": ["UTMALDG"],
    }  # fmt: skip
    judge(job, [good])
    for bad in ({"stack": 8}, {"shared": job.row.shared_bytes + 1}, {"tensor_cores": []}, {"waits": 16}):
        with pytest.raises(AssertionError):
            judge(job, [good | bad])
