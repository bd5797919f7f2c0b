"""The compile gate of the kernels that round to eight bits, where the type exists."""

from dataclasses import dataclass
from functools import partial

import gate

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
        gate.judge_memory(job, facts, 0)
        turned = job.transform and facts["kernel"] == "rows_kernel"
        assert bool(facts["tensor_cores"]) == turned, facts["tensor_cores"]


REST = [job for a in decoding.EIGHT_BITS for job in jobs(a)]
GATE = gate.Gate(judge, REST[5:6], REST, jobs(90))
test_compiles = GATE.test()
