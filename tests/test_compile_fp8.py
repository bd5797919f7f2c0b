"""The compile gates of the kernels that round to eight bits, where the type exists, and
of attention in eight bits.
"""

from dataclasses import dataclass
from functools import partial

import gate
import pytest

from flashlib.kernels import decoding


@dataclass(frozen=True)
class Job(gate.Job):
    """One call."""

    transform: bool = True
    smooth: bool = True

    step = "fp8"

    def request(self):
        more = {"transform": self.transform, "smooth": self.smooth}
        return super().request() | more


def jobs(architecture):
    """Every width and dtype, with and without what changes the inputs."""
    job, half = partial(Job, architecture, "fp8"), gate.half(architecture)
    return [
        job(half, 128),
        job(half, 64, smooth=False),
        job(half, 256),
        job("float16", 128, transform=False, layout="unaligned", T=1),
        job(half, 16, transform=False, smooth=False),
    ]


def judge(job, found):
    """Raise for missing kernels, spills, and a transform without tensor cores."""
    names = ["rows_kernel", "rows_kernel", "values_kernel"]
    names = ["mean_kernel", "finish_kernel"] * job.smooth + names
    assert [facts["kernel"] for facts in found] == names
    for facts in found:
        # A block of 128 keys of 256 columns fills the registers of its 16 warps.
        spilled = {"rows_kernel": 360, "values_kernel": 80} if job.d == 256 else {}
        gate.judge_memory(job, facts, spilled.get(facts["kernel"], 0))
        turned = job.transform and facts["kernel"] == "rows_kernel"
        assert bool(facts["tensor_cores"]) == turned, facts["tensor_cores"]


REST = [job for a in decoding.E4M3_ARCHITECTURES for job in jobs(a)]
GATE = gate.Gate(judge, REST[5:6], REST, jobs(90))
test_compiles = GATE.test()


# -- attention


@dataclass(frozen=True)
class Attention(gate.Job):
    """One call on Hopper."""

    smooth: bool = True

    step = "hopper_fp8"

    def request(self):
        return super().request() | {"smooth": self.smooth}


def attention_jobs():
    """Every width, with and without a mask and a ragged end."""
    job = partial(Attention, 90, "hopper_fp8")
    return [
        job("bfloat16", 128),
        job("bfloat16", 256),
        job("bfloat16", 64),
        job("float16", 128, causal=False, T=256, smooth=False),
        job("bfloat16", 256, causal=False, T=256),
        job("bfloat16", 64, causal=False),
    ]


# Bytes of stack: at d = 128 outside of the loops over blocks. At d = 256, O and scores
# are all registers of a thread but 48.
STACK = {64: 0, 128: 24, 256: 256}


def judge_attention(job, found):
    """Raise for spills, products one by one, and weights that change their threads or
    are packed byte by byte: a step would have a hundred PRMT.
    """
    assert [facts["kernel"] for facts in found] == ["forward_kernel"]
    (facts,) = found
    gate.judge_memory(job, facts, STACK[job.d])
    assert facts["tensor_cores"] == ["QGMMA"] and facts["copies"] == ["UTMALDG"]
    assert facts["waits"] < facts["products"], "products in a row"
    assert facts["permutes"] < 32, facts["permutes"]
    assert facts["handed"] > 0
    apart = facts["barriers"][0] > facts["shared"] - 1024
    assert apart, "a barrier lies among the tiles"


ATTENTION = gate.Gate(judge_attention, attention_jobs()[:1], attention_jobs())
test_attention_compiles = ATTENTION.test()


# -- the chapter's kernel that reads a cache


@dataclass(frozen=True)
class Small(gate.Job):
    """One query of each head."""

    H: int = 20

    step = "steps.fp8"


def judge_small(job, found):
    """Raise for spills, and products without tensor cores."""
    assert [facts["kernel"] for facts in found] == ["small_kernel"]
    gate.judge_memory(job, found[0], 0)
    assert bool(found[0]["tensor_cores"]) != job.exact, found[0]["tensor_cores"]


SMALL = [Small(a, "small", "bfloat16", 128) for a in decoding.E4M3_ARCHITECTURES]
SMALL += [Small(90, "small", dtype, 64) for dtype in ("float16", "float32")]
SMALL_GATE = gate.Gate(judge_small, [SMALL[1]], SMALL)
test_small_compiles = SMALL_GATE.test()


def test_the_gate_can_fail():
    good = gate.GOOD | {"kernel": "forward_kernel", "tensor_cores": ["QGMMA"]}
    good |= {"permutes": 3, "handed": 4, "shared": 180_000, "barriers": [179_900]}
    changes = [{"permutes": 300}, {"handed": 0}, {"waits": 16}, {"barriers": [0]}]
    changes += [{"tensor_cores": ["HMMA"]}, {"stack": 112}]
    wrong = [good | change for change in changes]
    for facts in wrong:
        with pytest.raises(AssertionError):
            judge_attention(attention_jobs()[0], [facts])
    judge_attention(attention_jobs()[0], [good])
    small = gate.GOOD | {"kernel": "small_kernel"}
    judge_small(SMALL[0], [small])
    for change in ({"tensor_cores": []}, {"stack": 8}, {"kernel": "another"}):
        with pytest.raises(AssertionError):
            judge_small(SMALL[0], [small | change])
