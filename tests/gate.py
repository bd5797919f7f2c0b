"""What the compile gates of all kernels share: what is compiled, by compile_worker.py
in a process of its own, for a GPU that is not there, and what is asked of the result.
"""

import dataclasses
import functools
import heapq
import itertools
import json
import operator
import sys
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch
from processes import process_environment, run

from flashlib.kernels import tables

# Bytes of shared memory that one program may use on a device of this compute capability
# (times ten).
SHARED_BYTES = {75: 65_536, 80: 166_912, **dict.fromkeys((86, 89, 120), 101_376)}
SHARED_BYTES |= dict.fromkeys((90, 100), 232_448)
ALL = tuple(SHARED_BYTES)
TENSOR_CORES = {**dict.fromkeys((80, 86, 89, 120), "HMMA"), 90: "HGMMA", 100: "UTCHMMA"}
WIDTHS = (16, 64, 128, 256)


def half(architecture):
    """The 16-bit type that is compiled for an architecture."""
    return "bfloat16" if architecture >= 80 else "float16"


@dataclasses.dataclass(frozen=True)
class Job:
    """One launch of a kernel, with the row that the launcher would choose."""

    architecture: int
    kernel: str
    dtype: str
    d: int
    causal: bool = True
    layout: str = "contiguous"
    T: int = 130  # no block divides it, so the code for the ragged end is compiled too
    H: int = 4
    H_kv: int = 2

    step = None  # as compile_worker.py calls the module of the kernel
    tables: ClassVar = {}  # {kernel: its rows}

    def __str__(self):
        parts = [f"sm_{self.architecture}", self.kernel, self.dtype, f"d{self.d}"]
        for field in dataclasses.fields(self)[4:]:
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(f"{field.name}={value}")
        return "-".join(parts)

    @property
    def bits(self):
        return getattr(torch, self.dtype).itemsize * 8

    @property
    def d_v(self):
        """Keys of 192 columns are those of latent attention: values have 128."""
        return 128 if self.d == 192 else self.d

    @property
    def exact(self):
        """Whether products use no tensor cores."""
        return self.bits == 32 or self.architecture not in TENSOR_CORES

    @property
    def descriptors(self):
        return self.layout == "contiguous"

    @property
    def row(self):
        if self.kernel not in self.tables:
            return None
        problem = self.bits, self.d, self.architecture, SHARED_BYTES[self.architecture]
        table = self.tables[self.kernel]
        return tables.fitting(
            self.kernel, table, *problem, self.descriptors, self.causal
        )

    def request(self):
        """The job as compile_worker.py reads it."""
        sizes = {"B": 1, "H": self.H, "H_kv": self.H_kv, "T_q": self.T, "d": self.d}
        sizes["d_v"] = self.d_v
        return {
            "architecture": self.architecture, "step": self.step,
            "kernel": self.kernel, "row": self.row, "dtype": self.dtype,
            "causal": self.causal, "sizes": sizes | {"layout": self.layout},
        }  # fmt: skip

    @functools.cached_property
    def traits(self):
        """What is covered by compiling this job: each value of its fields for the
        kernel, and the row, at the largest width that it is for, on these tensor cores.
        """
        fields = [field.name for field in dataclasses.fields(self)]
        found = {(self.kernel, name, getattr(self, name)) for name in fields}
        if getattr(self.row, "d", self.d) == self.d:
            found.add((self.kernel, self.row, TENSOR_CORES.get(self.architecture)))
        return found


def covering(jobs, done=(), traits=operator.attrgetter("traits")):
    """A few jobs that cover, with those done, what all do: the best joins first."""
    missing = set().union(*map(traits, jobs)).difference(*map(traits, done))
    queue = [(-len(traits(job)), place) for place, job in enumerate(jobs)]
    heapq.heapify(queue)
    chosen = []
    while queue:
        _, place = heapq.heappop(queue)
        # What a job adds only shrinks: compare it anew with the next in the queue.
        added = traits(jobs[place]) & missing
        if queue and -len(added) > queue[0][0]:
            heapq.heappush(queue, (-len(added), place))
        elif added:
            chosen.append(jobs[place])
            missing -= added
    return chosen


def each_kernel(jobs, done=()):
    """The first job of each kernel that is not done: compiling one takes seconds."""
    return covering(jobs, done, lambda job: {job.kernel})


def compile_all(jobs):
    """The facts that compile_worker.py finds about the kernels of each job."""
    worker = Path(__file__).with_name("compile_worker.py")
    options = {"input": json.dumps([job.request() for job in jobs])}
    options["env"] = process_environment(TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    done = run([sys.executable, worker], 3000, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [[] for _ in jobs]
    for line in done.stdout.splitlines():
        facts = json.loads(line)
        found[facts["job"]].append(facts)
    return found


class Gate:
    """``judge(job, facts)`` of the fast jobs and, in slow tests, of those that are
    wanted too and of some that cover the rest.
    """

    def __init__(self, judge, fast, rest, wanted=()):
        self.judge, self.fast = judge, fast
        self.slow = [job for job in wanted if job not in fast]
        self.slow += covering(rest, [*fast, *wanted])

    @functools.cache  # noqa: B019 (a gate lives as long as its module)
    def compiled(self, slow):
        """``{job: [facts about each kernel]}`` of a list, which is compiled once."""
        wanted = self.slow if slow else self.fast
        return dict(zip(wanted, compile_all(wanted), strict=True))

    def facts(self, job):
        """What is found about each kernel of a job."""
        return self.compiled(job in self.slow)[job]

    def each(self, jobs):
        """Jobs as the parameter of a test, which is slow for the slow ones."""
        marks = {True: pytest.mark.slow, False: ()}
        cases = [pytest.param(x, id=str(x), marks=marks[x in self.slow]) for x in jobs]
        return pytest.mark.parametrize("job", cases)

    def test(self):
        """The test of all jobs, for the name ``test_compiles``."""
        # One process compiles a list, so one process runs its tests: see conftest.py.

        @pytest.mark.timeout(1800)  # the first test compiles the list
        @self.each([*self.fast, *self.slow])
        def test_compiles(job):
            self.judge(job, self.facts(job))

        return test_compiles


class Spill(NamedTuple):
    """Bytes of stack that kernels may use, and why; all others spill nothing."""

    kernels: tuple
    bits: int
    from_d: int
    layout: str | None
    architectures: tuple
    allowed: int
    reason: str


EXACT = (
    "exact float32 products use no tensor cores: every factor of a product passes "
    "through registers"
)
POINTERS = (
    "addresses that no 16-byte load accepts: a pointer for each element, in registers"
)
NO_TENSOR_CORES = (
    "Triton reaches no tensor cores on sm_75: the same registers as in float32, with "
    "fewer to have"
)
STACK = "registers are free and the compiler still keeps some offsets on the stack"


def allowed_spill(spills, kernel, job):
    """Bytes of stack that a kernel may use in a job, by the rows of a table."""

    def concerns(spill):
        here = kernel in spill.kernels and job.architecture in spill.architectures
        large = job.bits == spill.bits and job.d >= spill.from_d
        return here and large and spill.layout in (None, job.layout)

    return max((spill.allowed for spill in spills if concerns(spill)), default=0)


def judge_memory(job, facts, allowed):
    """Raise for too many bytes of stack, or of shared memory."""
    spilled, shared = facts["stack"] + facts["local"], facts["shared"]
    said = f"{facts['kernel']} spills {spilled} bytes; registers: {facts['reg']}"
    assert spilled <= allowed, said
    assert shared <= SHARED_BYTES[job.architecture], shared
    promised = getattr(job.row, "shared_bytes", shared)
    assert shared <= promised, f"promised {promised}: {shared}"


def judge_tiled(job, found, name, spills):
    """Raise unless the one kernel found is the named one and well compiled."""
    assert [facts["kernel"] for facts in found] == [name]
    (facts,) = found
    judge_memory(job, facts, allowed_spill(spills, job.kernel, job))
    exact, cores = job.exact or job.kernel == "delta", facts["tensor_cores"]
    assert (cores == []) == exact, cores
    together = "HGMMA" not in cores or facts["waits"] < facts["products"]
    assert together, "products in a row"
    if job.row is not None:
        assert ("UTMALDG" in facts["copies"]) == job.row.descriptor
        if not exact and job.row.descriptor:
            assert TENSOR_CORES[job.architecture] in cores, cores


# What is found out about a kernel as Hopper wants it.
GOOD = {
    "reg": 160, "stack": 0, "local": 0, "shared": 0, "tensor_cores": ["HGMMA"],
    "products": 16, "waits": 3, "copies": ["UTMALDG"],
}  # fmt: skip


WRONG = [{"stack": 8}, {"local": 8}, {"shared": 10**6}]
WRONG += [{"tensor_cores": []}, {"copies": []}]


def check_judge(judge, job, found, *changes):
    """The judge accepts what is found and refuses every change, and no kernels."""
    judge(job, found)
    wrong = [[found[0] | change, *found[1:]] for change in (*WRONG, *changes)]
    for refused in (*wrong, []):
        with pytest.raises(AssertionError):
            judge(job, refused)


def check_rows(rows):
    """Every row states architectures and fits their memory."""
    for row in rows:
        assert row.architectures and set(row.architectures) <= set(SHARED_BYTES)
        assert all(row.shared_bytes <= SHARED_BYTES[a] for a in row.architectures)


def check_table(name, table, refused=(), bits=(16, 32)):
    """Every row is sound and used; every problem that is not refused has one. Tables
    without rows for 192 columns have those for 256.
    """
    check_rows(table)
    problems = itertools.product(ALL, bits, (16, 32, 64, 128, 192, 256))
    used = {
        tables.fitting(name, table, bits, d, a, SHARED_BYTES[a], descriptors, causal)
        for a, bits, d in problems
        if (a, bits, 256 if d == 192 else d) not in refused
        for descriptors in (False, True)
        for causal in (False, True)
    }
    assert used == set(table)
