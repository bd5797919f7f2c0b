"""The compile gate of absorbed decoding, whatever the page size."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import gate
import pytest

from flashlib.kernels import decoding, latent


@dataclass(frozen=True)
class Job(gate.Job):
    """One call; d is the columns of a latent, page 0 is a contiguous cache, past how
    many elements tensors begin after an aligned address.
    """

    d: int = 512
    T: int = 1
    H: int = 128
    d_r: int = 64
    page: int = 64
    splits: int = 8
    past: int = 0
    eight_bits: bool = False  # of the cache

    step = "latent"
    tables: ClassVar = {"latent": latent.CONFIGURATIONS}

    @property
    def bits(self):
        return 8 if self.eight_bits else super().bits

    def request(self):
        found = super().request()
        found["sizes"] |= {"B": 2}
        names = "d_r", "page", "splits", "past", "eight_bits"
        return found | {name: getattr(self, name) for name in names}


def jobs(architecture):
    """What every architecture is covered by."""
    job, half = partial(Job, architecture, "latent"), gate.half(architecture)
    eight = partial(job, half, eight_bits=True)
    in_eight_bits = [eight(), eight(H=16, page=16), eight(H=5, T=3, d=72, d_r=24)]
    return [
        *(in_eight_bits if architecture in decoding.E4M3_ARCHITECTURES else []),
        *(job(half, page=page) for page in (64, 0, 16)),
        job(half, H=16, splits=128),
        job(half, H=5, T=3, d=72, d_r=24, splits=1),
        job(half, past=1),
        job("float32"),
    ]


# Bytes of stack that are allowed: for offsets next to accumulators that take half of
# all registers, or for a pointer for each element, where no 16-byte load is allowed.
OFFSETS, POINTERS = 96, 1024
# Next to them, latents in eight bits and in 16: most of it before the loop.
CONVERTED = 300


def judge(job, found):
    """Raise for spills, more memory than promised, idle cores or late loads."""
    if job.step == "steps.latent":
        (facts,) = found
        assert facts["kernel"] == "small_kernel" and facts["tensor_cores"]
        gate.judge_memory(job, facts, 0)
        return
    if job.step == "hopper_absorbed":
        judge_absorbed(job, found)
        return
    names = ["latent_kernel", "merge_kernel"][: 1 if job.splits == 1 else 2]
    assert [facts["kernel"] for facts in found] == names
    facts, allowed = found[0], POINTERS if job.past else 0
    if job.row.BLOCK_Q == 64 and job.H * job.T > 32:
        allowed = max(allowed, CONVERTED if job.eight_bits else OFFSETS)
    gate.judge_memory(job, facts, allowed)
    assert (facts["tensor_cores"] == []) == job.exact, facts["tensor_cores"]
    if job.architecture == 90 and job.H * job.T >= 64 and not job.exact:
        assert facts["tensor_cores"] == ["HGMMA"], facts["tensor_cores"]
    if not job.exact and job.d == 512 and not job.past:
        assert facts["copies"] == ["LDGSTS"], facts["copies"]
        # Rows are in shared memory once: keys and values are the same tile.
        rows = job.row.num_stages * job.row.BLOCK_K + min(job.row.BLOCK_Q, job.H)
        padding = 4096
        assert facts["shared"] <= rows * (job.d + job.d_r) * 2 + padding
    for facts in found[1:]:
        assert facts["stack"] + facts["local"] == 0


@dataclass(frozen=True)
class Small(Job):
    """The chapter's first kernel."""

    H: int = 16

    step = "steps.latent"


@dataclass(frozen=True)
class Absorbed(Job):
    """The kernel for Hopper."""

    step = "hopper_absorbed"


def judge_absorbed(job, found):
    """Raise for what the kernel for Hopper should not be."""
    assert [facts["kernel"] for facts in found] == ["absorbed_kernel"]
    (facts,) = found
    gate.judge_memory(job, facts, 0)
    assert facts["tensor_cores"] == ["HGMMA"] and facts["copies"] == ["UTMALDG"]
    # 36 products of 16 columns for the scores, 4 in each consumer for a half of the
    # latents, and a wait for each sum.
    assert (facts["products"], facts["waits"]) == (36 + 2 * 4, 3)
    # Half of O and the scores in registers, and the weights in 16 bits.
    assert facts["registers"] == [128 + 32, 16]
    numbers = 2 * (64 * 576 * (1 + 2) + 64 * 64) + 4 * 64  # Q, two blocks, P; factors
    assert 0 < facts["shared"] - numbers < 1024, facts["shared"]
    # A barrier that nobody waits at would share its memory with a tile.
    apart = facts["barriers"][0] >= numbers
    assert apart and len(set(facts["barriers"])) == 8, facts["barriers"]
    assert facts["handed"] > 0


HOPPER = [
    Absorbed(90, "absorbed", "bfloat16"),
    Absorbed(90, "absorbed", "float16", page=0, splits=1, H=5, T=3),
    Absorbed(90, "absorbed", "bfloat16", page=256, splits=1, H=16),
]
REST = [job for a in gate.ALL if a != 75 for job in jobs(a)]
FAST = [Job(90, "latent", "bfloat16"), Small(80, "small", "float16", d_r=64)]
FAST += HOPPER[:1]
GATE = gate.Gate(judge, FAST, REST, [*jobs(90), *HOPPER])
test_compiles = GATE.test()


def test_the_judge_refuses_what_is_wrong():
    good = gate.GOOD | {"copies": ["LDGSTS"]}
    found = [good | {"kernel": name} for name in ("latent_kernel", "merge_kernel")]
    job = Job(90, "latent", "bfloat16", H=16)
    gate.check_judge(judge, job, found, {"shared": 170_000})
    for change in ({"tensor_cores": ["HMMA"]}, {"stack": OFFSETS + 8}):
        with pytest.raises(AssertionError):
            judge(FAST[0], [found[0] | change, found[1]])
    found = good | {"kernel": "absorbed_kernel", "copies": ["UTMALDG"], "handed": 12}
    found |= {"products": 44, "registers": [160, 16], "shared": 230_016}
    found |= {"barriers": list(range(229_920, 229_984, 8))}
    changes = [{"products": 84}, {"waits": 4}, {"registers": [192, 16]}, {"handed": 0}]
    changes += [{"shared": 240_000}, {"barriers": [0] * 8}, {"kernel": "latent_kernel"}]
    gate.check_judge(judge, HOPPER[0], [found], *changes)


def test_every_row_is_sound_and_used_and_every_problem_has_one():
    widths = 16, 32, 64, 128, 256
    refused = {(75, bits, d) for bits in (16, 32) for d in widths}
    refused |= {(a, 8, d) for a in (75, 80, 86) for d in widths}
    gate.check_table("latent", latent.CONFIGURATIONS, refused, (8, 16, 32))
