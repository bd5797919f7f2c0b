"""The compile gate of decoding, whatever the page size."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import gate

from flashlib.kernels import decoding
from flashlib.plain_checks import UNLIMITED


@dataclass(frozen=True)
class Job(gate.Job):
    """One call; page 0 is a contiguous cache."""

    T: int = 1
    H: int = 8
    page: int = 0
    splits: int = 8
    left: int = UNLIMITED
    changed: bool = False  # by a mask, a score and sinks
    eight_bits: bool = False  # of the cache

    step = "decoding"
    tables: ClassVar = {"decoding": decoding.CONFIGURATIONS}

    @property
    def bits(self):
        return 8 if self.eight_bits else super().bits

    def request(self):
        found = super().request()
        found["sizes"] |= {"B": 2, "T_k": self.page or 4096}
        more = {"splits": self.splits, "paged": self.page > 0, "left": self.left}
        more |= {"changed": self.changed, "eight_bits": self.eight_bits}
        return found | more


def jobs(architecture):
    """What every architecture is covered by."""
    job, half = partial(Job, architecture, "decoding"), gate.half(architecture)
    eight = partial(job, eight_bits=True)
    in_eight_bits = [
        eight(half, 128),
        eight("float16", 128, page=16),
        eight(half, 256, page=64),
        eight(half, 64, page=64, T=16, left=100),
        eight(half, 64, page=64, changed=True),
        eight(half, 64, layout="unaligned"),
    ]
    return [
        *(in_eight_bits if architecture in decoding.E4M3_ARCHITECTURES else []),
        *(job(half, 128, page=page) for page in (0, 16, 256)),
        job(half, 256),
        job(half, 128, T=16),
        job(half, 128, page=64, left=100, splits=1),
        job("float32", 64),
        job(half, 64, layout="unaligned"),
        job(half, 64, page=64, changed=True),
        job(half, 64, splits=1, changed=True),
    ]


def thorough_jobs(architecture):
    """Every width in both precisions, tile of queries and page size."""
    return [
        Job(architecture, "decoding", dtype, d, T=T, page=page)
        for dtype in (gate.half(architecture), "float32")
        for d in gate.WIDTHS
        for page in (0, 16, 32, 64, 128)
        for T in (1, 5, 16)
    ]


# Bytes of stack that are allowed: without tensor cores, where every factor of a product
# passes through registers; for addresses that no 16-byte load accepts, with a pointer
# for each element; and for the offsets of pages.
EXACT, POINTERS, OFFSETS = 64, 64, 16


def judge(job, found):
    """Raise for spills, more memory than promised, idle cores, and loads that are late
    or narrow.
    """
    names = ["split_kernel", "merge_kernel"][: 1 if job.splits == 1 else 2]
    assert [facts["kernel"] for facts in found] == names
    split = found[0]
    allowed = POINTERS if job.layout == "unaligned" else OFFSETS if job.page else 0
    gate.judge_memory(job, split, EXACT if job.exact else allowed)
    assert (split["tensor_cores"] == []) == job.exact, split["tensor_cores"]
    if job.eight_bits and job.layout == "contiguous":
        assert split["byte_loads"] < 8, "values are read byte by byte"
    if not job.exact and job.layout == "contiguous":
        assert split["copies"] == ["LDGSTS"], split["copies"]
        # Every stage but one holds a block of keys and one of values: a page known late
        # would leave one.
        depth = 2 * (job.row.num_stages - 1) * job.row.BLOCK_K * job.d * job.bits // 8
        assert split["shared"] >= depth, f"they cannot hold {depth} on the way"
    for facts in found[1:]:
        assert facts["stack"] + facts["local"] == 0 and facts["shared"] <= 65_536


# Instructions are the same on sm_80 and sm_90: HMMA, fed by LDGSTS.
REST = [job for a in gate.ALL for job in jobs(a)]
REST += [job for a in (80, 90) for job in thorough_jobs(a)]
SHARED = [Job(90, "decoding", "bfloat16", 128, page=page) for page in (16, 0, 256)]
SHARED += [Job(90, "decoding", "bfloat16", 128, eight_bits=True)]
GATE = gate.Gate(judge, SHARED[:1], REST, jobs(90))
test_compiles = GATE.test()


@GATE.each(SHARED)
def test_as_many_programs_share_a_multiprocessor_as_the_launcher_counts_on(job):
    """Of Hopper: 228 KiB of shared memory, of which each program takes one more than it
    asks for, and 65536 registers, given to threads by the eight.
    """
    split, _ = GATE.facts(job)
    by_memory = 228 * 1024 // (split["shared"] + 1024)
    by_registers = 65536 // (32 * job.row.num_warps * math.ceil(split["reg"] / 8) * 8)
    assert min(by_memory, by_registers) >= decoding.PROGRAMS[job.row.bits][0]


def test_every_row_is_sound_and_used_and_every_problem_has_one():
    refused = {(a, 8, d) for a in (75, 80, 86) for d in (16, 32, 64, 128, 256)}
    gate.check_table("decoding", decoding.CONFIGURATIONS, refused, (8, 16, 32))
