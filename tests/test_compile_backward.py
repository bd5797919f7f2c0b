"""The compile gate of the backward kernels."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import gate
import pytest
from gate import ALL, EXACT, NO_TENSOR_CORES, POINTERS, STACK, Spill

from flashlib.kernels import backward, tables
from flashlib.kernels.steps import backward as steps

TABLES = {"keys": backward.KEYS, "queries": backward.QUERIES, "fused": backward.FUSED}
# The architecture with the least shared memory.
NO_ROOM = {name: [(75, 32, 256)] for name in ("fused", "algorithm_6")}
NAMES = {"algorithm_5": "rows_kernel", "algorithm_6": "blocks_kernel"}

ALGORITHM_6 = {"algorithm_6": steps.CONFIGURATIONS}


@dataclass(frozen=True)
class Job(gate.Job):
    tables: ClassVar = TABLES | ALGORITHM_6

    @property
    def step(self):
        return "steps.backward" if self.kernel in NAMES else "backward"


def jobs(architecture):
    """What every architecture is covered by: both masks, since their loops differ."""
    job, half = partial(Job, architecture), gate.half(architecture)
    found = [
        job(x, half, d, causal=causal)
        for x in TABLES
        for d in (64, 128, tables.SPLIT, 256)
        for causal in (False, True)
    ]
    found += [job(x, half, 64, layout="unaligned") for x in TABLES]
    found += [job(x, "float32", 64) for x in TABLES]
    found += [job(x, half, 64, causal=False, T=1, H_kv=4) for x in TABLES]
    found += [job("delta", half, 128, causal=False)]
    return [*found, job("algorithm_5", half, 64, T=113), job("algorithm_6", half, 64)]


def thorough_jobs(architecture):
    """Every width in both precisions, both masks, groups of one, even lengths."""
    found = []
    for dtype in (gate.half(architecture), "float32"):
        found += [
            Job(architecture, x, dtype, d, causal, layout, T, H_kv=H_kv)
            for x in TABLES
            for d in gate.WIDTHS
            for layout in ("contiguous", "unaligned")
            for causal, T, H_kv in ((True, 130, 2), (False, 256, 4))
        ]
        found += [Job(architecture, "delta", dtype, d, False) for d in (16, 256)]
        found += [Job(architecture, "algorithm_6", dtype, d) for d in (64, 128, 256)]
    return found


FULL = (
    "dK and dV of 64 keys and more than 128 columns, in float32, take half of the "
    "registers of eight warps"
)
SPILLS = (
    Spill(("keys", "queries"), 16, 16, "unaligned", ALL, 80, POINTERS),
    Spill(("queries", "fused"), 16, 16, None, (100, 120), 16, STACK),
    Spill(("queries",), 16, 256, None, ALL, 16, STACK),
    Spill(("keys",), 16, 256, None, (90,), 16, FULL),
    Spill(("keys",), 16, 128, None, (90,), 8, STACK),
    Spill(("keys",), 16, tables.SPLIT, None, (90,), 40, FULL),
    Spill(("fused",), 16, 128, None, (80, 90), 8, STACK),
    Spill(("fused",), 16, 64, None, (86, 89), 24, STACK),
    Spill(tuple(TABLES), 16, 256, None, (75,), 2048, NO_TENSOR_CORES),
    Spill(tuple(TABLES), 32, 16, None, ALL, 64, EXACT),
    Spill(("algorithm_5",), 16, 16, None, (75,), 1024, NO_TENSOR_CORES),
    Spill(("algorithm_6",), 32, 256, None, ALL, 512, EXACT),
)


def judge(job, found):
    """Raise for a kernel that is not what the gate wants."""
    gate.judge_tiled(job, found, NAMES.get(job.kernel, f"{job.kernel}_kernel"), SPILLS)
    if job.kernel == "fused" and job.architecture == 90 and not job.exact:
        # A part of dQ has as many rows as a block of queries, and wgmma needs 64.
        by_mma = "HMMA" in found[0]["tensor_cores"]
        assert by_mma == (job.row.BLOCK_Q < 64), job.row


REST = [job for a in ALL for job in jobs(a)]
REST += [job for a in (80, 90) for job in thorough_jobs(a)]
GATE = gate.Gate(judge, gate.each_kernel(jobs(90)), REST)
test_compiles = GATE.test()


# -- the tables


@pytest.mark.parametrize("name", Job.tables)
def test_every_row_is_sound_and_used_and_every_problem_has_one(name):
    gate.check_table(name, Job.tables[name], NO_ROOM.get(name, ()))
    for row in Job.tables[name]:
        assert row.BLOCK_Q <= backward.LARGEST_BLOCK_Q
        assert backward.LARGEST_BLOCK_Q % row.BLOCK_Q == 0


def test_the_gate_can_fail():
    job = Job(90, "keys", "bfloat16", 64)
    good = gate.GOOD | {"kernel": "keys_kernel", "shared": job.row.shared_bytes}
    changes = (
        {"shared": job.row.shared_bytes + 1},
        {"tensor_cores": ["HMMA"]},
        {"waits": 16},
        {"kernel": "queries_kernel"},
    )
    gate.check_judge(judge, job, [good], *changes)
    job, good = Job(90, "fused", "bfloat16", 64), good | {"kernel": "fused_kernel"}
    gate.check_judge(judge, job, [good], {"tensor_cores": ["HGMMA", "HMMA"]})
