"""The compile gate of decoding: no spills, tensor cores at work, copies that run beside the products, shared
memory as promised, whatever the page size.
"""

import math
from typing import NamedTuple

import pytest
import torch
from cases import compiler
from test_compile import FAST, SHARED_BYTES, TENSOR_CORES, parametrised

from flashlib.kernels import decoding, launch


class Job(NamedTuple):
    """One call, with the row of the table that the launcher would choose; page 0 is a contiguous cache."""

    architecture: int
    dtype: str
    d: int
    page: int = 0
    T_q: int = 1
    splits: int = 8
    left: int = -1
    layout: str = "contiguous"

    def __str__(self):
        parts = [f"sm_{self.architecture}", self.dtype, f"d{self.d}", f"page{self.page}", f"Tq{self.T_q}"]
        return "-".join([*parts, f"splits{self.splits}", f"left{self.left}", self.layout])

    @property
    def bits(self):
        return getattr(torch, self.dtype).itemsize * 8

    @property
    def row(self):
        problem = self.bits, self.d, self.architecture, SHARED_BYTES[self.architecture], False, None
        return launch.fitting("decoding", decoding.CONFIGURATIONS, *problem)

    def request(self):
        sizes = {
            "B": 2, "H": 8, "H_kv": 2, "T_q": self.T_q, "T_k": self.page or 4096, "d": self.d,
            "layout": self.layout,
        }  # fmt: skip
        return {
            "step": "decoding", "row": self.row, "dtype": self.dtype, "causal": True, "sizes": sizes,
            "splits": self.splits, "paged": self.page > 0, "left": self.left,
        }  # fmt: skip


def jobs(architecture):
    """What is compiled in the fast tests for an architecture."""
    half = "bfloat16" if architecture >= 80 else "float16"
    found = [Job(architecture, half, 128, page) for page in (0, 16, 256)]
    found += [Job(architecture, half, 256), Job(architecture, half, 128, T_q=16)]
    found += [Job(architecture, half, 128, 64, left=100, splits=1), Job(architecture, "float32", 64)]
    return [*found, Job(architecture, half, 64, layout="unaligned")]


def thorough_jobs(architecture):
    """The rest: every width in both precisions, every tile of queries and every page size."""
    half = "bfloat16" if architecture >= 80 else "float16"
    found = [
        Job(architecture, dtype, d, page, T_q)
        for dtype in (half, "float32")
        for d in (16, 64, 128, 256)
        for page in (0, 16, 32, 64, 128)
        for T_q in (1, 5, 16)
    ]
    return [job for job in found if job not in jobs(architecture)]


compiled = compiler(jobs, thorough_jobs)


EXACT = 64  # bytes of stack: without tensor cores every factor of a product passes through registers
POINTERS = 64  # addresses that no 16-byte load accepts: a pointer for each element, in registers
OFFSETS = 16  # of pages: registers are free and the compiler still keeps some on the stack


def judge(job, found):
    """Raise for a kernel that spills, asks for more shared memory than promised, leaves the tensor cores idle
    or waits for its loads.
    """
    names = ["split_kernel", "merge_kernel"][: 1 if job.splits == 1 else 2]
    assert [facts["kernel"] for facts in found] == names
    split = found[0]
    exact = job.bits == 32 or job.architecture not in TENSOR_CORES
    spilled = split["stack"] + split["local"]
    allowed = POINTERS if job.layout == "unaligned" else OFFSETS if job.page else 0
    assert spilled <= (EXACT if exact else allowed), spilled
    assert split["shared"] <= job.row.shared_bytes <= SHARED_BYTES[job.architecture], split["shared"]
    assert (split["tensor_cores"] == []) == exact, split["tensor_cores"]
    if not exact and job.layout == "contiguous":
        assert split["copies"] == ["LDGSTS"], split["copies"]
        # Every stage but one holds a block of keys and one of values: a page known late would leave one.
        depth = 2 * (job.row.num_stages - 1) * job.row.BLOCK_K * job.d * job.bits // 8
        assert split["shared"] >= depth, f"{split['shared']} bytes cannot hold {depth} on the way"
    for facts in found[1:]:
        assert facts["stack"] + facts["local"] == 0 and facts["shared"] <= 65_536


@pytest.mark.parametrize("job", parametrised(FAST, jobs))
def test_compiles(job):
    judge(job, compiled(job.architecture, False)[job])


@pytest.mark.slow
@pytest.mark.parametrize("job", parametrised([a for a in SHARED_BYTES if a not in FAST], jobs))
def test_compiles_for_other_architectures(job):
    judge(job, compiled(job.architecture, False)[job])


@pytest.mark.slow
@pytest.mark.parametrize("job", parametrised(FAST, thorough_jobs))
def test_compiles_in_every_width_and_page(job):
    judge(job, compiled(job.architecture, True)[job])


@pytest.mark.parametrize("page", [0, 16, 256])
def test_as_many_programs_share_a_multiprocessor_as_the_launcher_counts_on(page):
    """Of Hopper: 228 KiB of shared memory, of which each program takes one more than it asks for, and 65536
    registers, given to threads by the eight.
    """
    job = Job(90, "bfloat16", 128, page)
    split = compiled(90, False)[job][0]
    by_memory = 228 * 1024 // (split["shared"] + 1024)
    by_registers = 65536 // (32 * job.row.num_warps * math.ceil(split["reg"] / 8) * 8)
    assert min(by_memory, by_registers) == decoding.PROGRAMS


# ------------------------------------------------------------------------------------ the table


def test_every_row_is_used_and_every_problem_has_one():
    used = {
        launch.fitting("decoding", decoding.CONFIGURATIONS, bits, d, architecture, memory, False, None)
        for architecture, memory in SHARED_BYTES.items()
        for bits in (16, 32)
        for d in (16, 32, 64, 128, 256)
    }
    assert used == set(decoding.CONFIGURATIONS)


def test_the_gate_can_fail():
    job = Job(90, "bfloat16", 128)
    good = [
        {"kernel": "split_kernel", "stack": 0, "local": 0, "shared": job.row.shared_bytes,
         "tensor_cores": ["HMMA"], "copies": ["LDGSTS"]},
        {"kernel": "merge_kernel", "stack": 0, "local": 0, "shared": 0},
    ]  # fmt: skip
    judge(job, good)
    for place, bad in (
        (0, {"stack": 8}),
        (0, {"shared": job.row.shared_bytes + 1}),
        (0, {"shared": 1000}),
        (0, {"tensor_cores": []}),
        (0, {"copies": []}),
        (0, {"kernel": "merge_kernel"}),
        (1, {"local": 8}),
    ):
        doctored = [facts | bad if n == place else facts for n, facts in enumerate(good)]
        with pytest.raises(AssertionError):
            judge(job, doctored)
