"""The compile gate of the backward kernels: no spills, tensor cores at work, memory as promised, and products
that run beside what comes between them.
"""

from typing import NamedTuple

import pytest
import torch
from cases import compiler
from test_compile import (
    ALL,
    EXACT,
    FAST,
    NO_TENSOR_CORES,
    POINTERS,
    SHARED_BYTES,
    STACK,
    Spill,
    judge_tiled,
    parametrised,
    sixteen,
)

from flashlib.kernels import backward, launch
from flashlib.kernels.steps import backward as steps

TABLES = {"keys": backward.KEYS, "queries": backward.QUERIES, "fused": backward.FUSED}
NO_ROOM = "fused", "float32", 256  # on sm_75, whose shared memory is smallest
KERNELS = {
    "algorithm_5": "rows_kernel",
    "algorithm_6": "blocks_kernel",
    **{name: f"{name}_kernel" for name in ("delta", *TABLES)},
}


class Job(NamedTuple):
    """One launch of one kernel, with the row of its table that the launcher would choose."""

    architecture: int
    kernel: str
    dtype: str
    d: int
    causal: bool
    layout: str = "contiguous"
    T: int = 130  # no block divides it, so the code for the ragged end is compiled too
    H_kv: int = 2  # for four heads of queries

    def __str__(self):
        mask = "causal" if self.causal else "full"
        parts = [f"sm_{self.architecture}", self.kernel, self.dtype, f"d{self.d}", mask, self.layout]
        return "-".join([*parts, f"T{self.T}", f"H_kv{self.H_kv}"])

    @property
    def bits(self):
        return getattr(torch, self.dtype).itemsize * 8

    @property
    def row(self):
        if self.kernel == "algorithm_6":
            return steps.tile(self.bits, self.d, self.architecture)
        if self.kernel not in TABLES:
            return None
        memory, descriptors = SHARED_BYTES[self.architecture], self.layout == "contiguous"
        problem = (self.bits, self.d, self.architecture, memory, descriptors, self.causal)
        return launch.fitting(self.kernel, TABLES[self.kernel], *problem)

    def request(self):
        sizes = {"B": 1, "H": 4, "H_kv": self.H_kv, "T_q": self.T, "d": self.d, "layout": self.layout}
        step = "steps.backward" if self.kernel.startswith("algorithm") else "backward"
        return {
            "step": step, "kernel": self.kernel, "row": self.row, "dtype": self.dtype,
            "causal": self.causal, "sizes": sizes,
        }  # fmt: skip


def jobs(architecture):
    """What is compiled in the fast tests for an architecture: both masks, since they make other loops."""
    half = sixteen(architecture)
    found = [Job(architecture, x, half, d, mask) for x in TABLES for d in (64, 128, 256) for mask in MASKS]
    found += [Job(architecture, x, half, 64, True, "unaligned") for x in TABLES]
    found += [Job(architecture, x, "float32", 64, True) for x in TABLES]
    found += [Job(architecture, x, half, 64, False, T=1, H_kv=4) for x in TABLES]
    found += [
        Job(architecture, "delta", half, 128, False),
        Job(architecture, "algorithm_5", half, 64, True, T=113),
    ]
    return [*found, Job(architecture, "algorithm_6", half, 64, True)]


MASKS = (False, True)


def thorough_jobs(architecture):
    """The rest: every width in both precisions, both masks, groups of one, lengths that divide."""
    half = sixteen(architecture)
    found = [
        Job(architecture, x, dtype, d, mask, layout, T, H_kv)
        for x in TABLES
        for dtype in (half, "float32")
        for d in (16, 64, 128, 256)
        for layout in ("contiguous", "unaligned")
        for mask, T, H_kv in ((True, 130, 2), (False, 256, 4))
        if (architecture, x, dtype, d) != (75, *NO_ROOM)
    ]
    found += [Job(architecture, "delta", dtype, d, False) for dtype in (half, "float32") for d in (16, 256)]
    found += [
        Job(architecture, "algorithm_6", dtype, d, True)
        for dtype in (half, "float32")
        for d in (64, 128, 256)
    ]
    return [job for job in found if job not in jobs(architecture)]


compiled = compiler(jobs, thorough_jobs)


FULL = "dK and dV of 64 keys and 256 columns, in float32, take half of the registers of eight warps"
SPILLS = (
    Spill(("keys", "queries"), 16, 16, "unaligned", ALL, 80, POINTERS),
    Spill(("queries", "fused"), 16, 16, None, (100, 120), 16, STACK),
    Spill(("queries",), 16, 256, None, ALL, 16, STACK),
    Spill(("keys",), 16, 256, None, (90,), 16, FULL),
    Spill(("keys",), 16, 128, None, (90,), 8, STACK),
    Spill(("fused",), 16, 128, None, (80, 90), 8, STACK),
    Spill(("fused",), 16, 64, None, (86, 89), 24, STACK),
    Spill(tuple(TABLES), 16, 256, None, (75,), 2048, NO_TENSOR_CORES),
    Spill(tuple(TABLES), 32, 16, None, ALL, 64, EXACT),
    Spill(("algorithm_5",), 16, 16, None, (75,), 1024, NO_TENSOR_CORES),
    Spill(("algorithm_6",), 32, 256, None, ALL, 512, EXACT),
)


def judge(job, found):
    """Raise for a kernel that is not what the gate wants."""
    judge_tiled(job, found, KERNELS[job.kernel], SPILLS, job.kernel in TABLES)


@pytest.mark.parametrize("job", parametrised(FAST, jobs))
def test_compiles(job):
    judge(job, compiled(job.architecture, False)[job])


@pytest.mark.slow
@pytest.mark.parametrize("job", parametrised([a for a in SHARED_BYTES if a not in FAST], jobs))
def test_compiles_for_other_architectures(job):
    judge(job, compiled(job.architecture, False)[job])


@pytest.mark.slow
@pytest.mark.parametrize("job", parametrised(FAST, thorough_jobs))
def test_compiles_in_every_width_and_layout(job):
    judge(job, compiled(job.architecture, True)[job])


# ------------------------------------------------------------------------------------ the tables


def test_every_row_states_architectures_and_fits_their_memory():
    for table in TABLES.values():
        for row in table:
            assert row.architectures and set(row.architectures) <= set(SHARED_BYTES)
            assert all(row.shared_bytes <= SHARED_BYTES[a] for a in row.architectures)
            assert row.BLOCK_Q <= backward.LARGEST_BLOCK_Q and backward.LARGEST_BLOCK_Q % row.BLOCK_Q == 0


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_used_and_every_problem_has_one(name):
    used = {
        launch.fitting(name, TABLES[name], bits, d, architecture, memory, descriptors, causal)
        for architecture, memory in SHARED_BYTES.items()
        for bits in (16, 32)
        for d in (16, 32, 64, 128, 256)
        for descriptors in (False, True)
        for causal in MASKS
        if (architecture, name, f"float{bits}", d) != (75, *NO_ROOM)
    }
    assert used == set(TABLES[name])


def test_the_fused_form_is_refused_where_it_has_no_room():
    with pytest.raises(
        ValueError, match=r"^fused: no configuration for 32-bit .* 256 .* 7\.5 and 65536 bytes"
    ):
        launch.fitting("fused", backward.FUSED, 32, 256, 75, SHARED_BYTES[75], False, False)


def test_a_device_that_nothing_fits_gets_a_clear_error():
    message = (
        r"^backward, dQ: no configuration for 16-bit .* 256 \(padded\), compute capability 9\.0 and 1000 "
    )
    with pytest.raises(ValueError, match=message):
        launch.fitting("backward, dQ", backward.QUERIES, 16, 256, 90, 1000, True, False)


def test_the_gate_can_fail():
    job = Job(90, "keys", "bfloat16", 64, True)
    good = {
        "kernel": "keys_kernel", "reg": 160, "stack": 0, "local": 0, "shared": job.row.shared_bytes,
        "tensor_cores": ["HGMMA"], "products": 16, "waits": 3, "copies": ["UTMALDG"],
    }  # fmt: skip
    judge(job, [good])
    for bad in (
        {"stack": 8},
        {"local": 8},
        {"shared": job.row.shared_bytes + 1},
        {"tensor_cores": []},
        {"tensor_cores": ["HMMA"]},
        {"waits": 16},
        {"copies": ["LDGSTS"]},
        {"kernel": "queries_kernel"},
    ):
        with pytest.raises(AssertionError):
            judge(job, [good | bad])
    with pytest.raises(AssertionError):
        judge(job, [])
