"""The compile gate of the kernels for compute capability 9.0: no spills, wgmma fed by TMA, products that run
beside what comes between them, and warp groups that hand registers to each other.
"""

from typing import NamedTuple

import pytest
from cases import compiler
from test_compile import SHARED_BYTES

from flashlib.kernels import hopper, hopper_backward
from flashlib.kernels.steps import hopper as steps

ARCHITECTURE = 90
MASKS = (False, True)
RAGGED, EVEN = 130, 256
# {kernel: {d: [rows of its table]}}; a step has one row, which its launcher takes itself.
TABLES = {
    "hopper": {d: list(dict.fromkeys(table)) for d, table in hopper.TILES.items()},
    **{step: {d: [None] for d in steps.TILES} for step in steps.STEPS},
    **{
        name: {d: [row] for d, row in table.items()}
        for name, table in (
            ("keys", hopper_backward.KEYS),
            ("queries", hopper_backward.QUERIES),
            ("fused", hopper_backward.FUSED),
        )
    },
}
SIMPLE = ("finish",)  # rounds the dQ of the fused form, and multiplies no matrices
NAMES = {"hopper": "forward_kernel", steps.STEPS[0]: "together_kernel", "fused": "keys_kernel"}


class Job(NamedTuple):
    """One launch of one kernel."""

    kernel: str
    d: int
    row: tuple | None
    causal: bool
    T: int
    dtype: str = "bfloat16"
    H_kv: int = 2  # for four heads of queries

    def __str__(self):
        mask, row = "causal" if self.causal else "full", "x".join(map(str, self.row or ()))
        return f"{self.kernel}-{self.dtype}-d{self.d}-{row}-{mask}-T{self.T}-H_kv{self.H_kv}"

    @property
    def name(self):
        """The function that is compiled."""
        own = "apart" if self.kernel in steps.STEPS else self.kernel
        return NAMES.get(self.kernel, f"{own}_kernel")

    def request(self):
        step = "steps.hopper" if self.kernel in steps.STEPS else "hopper_backward"
        return {
            "step": "hopper" if self.kernel == "hopper" else step, "kernel": self.kernel, "row": self.row,
            "dtype": self.dtype, "causal": self.causal,
            "sizes": {"B": 1, "H": 4, "H_kv": self.H_kv, "T_q": self.T, "d": self.d},
        }  # fmt: skip


def rows(*kernels):
    """[(kernel, d, row)] of their tables."""
    return [(name, d, row) for name in kernels for d, table in TABLES[name].items() for row in table]


def launched(job):
    """Whether the launchers ever choose it: with a mask the split form is faster at d = 128."""
    return (job.kernel, job.d, job.causal) != ("fused", 128, True)


def jobs(architecture):
    """What is compiled in the fast tests: every row of every table with a causal mask, those of the last
    kernels without one and with a ragged end too.
    """
    found = [Job(*row, True, EVEN) for row in rows(*TABLES)]
    found += [Job(*row, False, T) for row in rows("hopper") for T in (EVEN, RAGGED)]
    found += [Job(*row, False, RAGGED) for row in rows("keys", "queries", "fused")]
    found += [Job(name, 128, None, False, RAGGED) for name in SIMPLE]
    return [job for job in found if launched(job)]


def thorough_jobs(architecture):
    """The rest: both dtypes, both masks, groups of one, single rows."""
    found = [
        Job(*row, causal, T, dtype, H_kv)
        for row in [*rows(*TABLES), *((name, d, None) for name in SIMPLE for d in (64, 128))]
        for causal in MASKS
        for T, dtype, H_kv in ((RAGGED, "bfloat16", 2), (EVEN, "float16", 4), (1, "float16", 2))
    ]
    return [job for job in found if launched(job) and job not in jobs(architecture)]


compiled = compiler(jobs, thorough_jobs)

# {(kernel, d, row): (bytes of stack that it may use, why)}; what is not listed spills nothing.
BAND = "all registers are taken: in the blocks that need a mask a few numbers wait on the stack"
OUTSIDE = "outside of the loops"
SPILLS = {
    ("hopper", 64, hopper.TILES[64][0]): (8, OUTSIDE),
    ("hopper", 64, hopper.TILES[64][2]): (80, BAND),
    ("hopper", 128, hopper.TILES[128][1]): (32, BAND),
    ("keys", 128, hopper_backward.KEYS[128]): (16, OUTSIDE),
    ("fused", 128, hopper_backward.FUSED[128]): (16, OUTSIDE),
}


def judge(job, found):
    """Raise unless the one kernel found neither spills nor asks for too much shared memory, and, where it
    multiplies matrices, is fed by TMA, multiplies by wgmma, waits less often than it multiplies, hands
    registers over and keeps its barriers apart from its tiles.
    """
    assert [facts["kernel"] for facts in found] == [job.name]
    (facts,) = found
    spilled = facts["stack"] + facts["local"]
    allowed, _ = SPILLS.get((job.kernel, job.d, job.row), (0, ""))
    assert spilled <= allowed, f"spills {spilled} bytes; registers: {facts['reg']}"
    assert facts["shared"] <= SHARED_BYTES[ARCHITECTURE], facts["shared"]
    if job.kernel in SIMPLE:
        return
    assert facts["tensor_cores"] == ["HGMMA"] and facts["copies"] == ["UTMALDG"]
    assert facts["waits"] < facts["products"], "products in a row"
    # The first step has no producer; in all others registers change hands.
    assert (facts["handed"] > 0) == (job.kernel != steps.STEPS[0]), facts["handed"]
    # A barrier that nobody waits at shares its memory with a tile, and its first value may land on the tile.
    assert facts["barriers"][0] > facts["shared"] - 1024, "a barrier lies among the tiles"
    assert len(set(facts["barriers"])) == len(facts["barriers"])


@pytest.mark.parametrize("job", [pytest.param(job, id=str(job)) for job in jobs(ARCHITECTURE)])
def test_compiles(job):
    judge(job, compiled(ARCHITECTURE, False)[job])


@pytest.mark.slow
@pytest.mark.parametrize("job", [pytest.param(job, id=str(job)) for job in thorough_jobs(ARCHITECTURE)])
def test_compiles_in_every_dtype_and_length(job):
    judge(job, compiled(ARCHITECTURE, True)[job])


def test_the_gate_can_fail():
    job = Job("keys", 64, None, True, EVEN)
    good = {
        "kernel": "keys_kernel", "reg": 168, "stack": 0, "local": 0, "shared": 100_000, "handed": 4,
        "tensor_cores": ["HGMMA"], "products": 16, "waits": 3, "copies": ["UTMALDG"],
        "barriers": [99_900, 99_908],
    }  # fmt: skip
    judge(job, [good])
    for bad in (
        {"stack": 8},
        {"local": 8},
        {"shared": 232_449},
        {"tensor_cores": []},
        {"tensor_cores": ["HMMA"]},
        {"waits": 16},
        {"copies": ["LDGSTS"]},
        {"handed": 0},
        {"barriers": [0, 99_908]},
        {"barriers": [99_908, 99_908]},
        {"kernel": "queries_kernel"},
    ):
        with pytest.raises(AssertionError):
            judge(job, [good | bad])
    with pytest.raises(AssertionError):
        judge(job, [])
    with pytest.raises(AssertionError):
        judge(Job(steps.STEPS[0], 64, None, True, EVEN), [good | {"kernel": "together_kernel"}])
