"""A compile gate without a GPU: every kernel, for every architecture that its configurations name.

The jobs of one architecture are compiled by compile_worker.py in a process of its own, since Triton
chooses between interpreter and compiler when it is imported.
"""

from typing import NamedTuple

import pytest
import torch
from cases import compiler

from flashlib.kernels import flash1, flash2, launch
from flashlib.kernels.steps import flash2 as steps_flash2

# Bytes of shared memory that one program may use on a device of this compute capability (times ten).
SHARED_BYTES = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
TENSOR_CORES = {80: "HMMA", 86: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
FAST = (80, 90)
PRODUCTS = {"forward_kernel", "scores_kernel", "output_kernel", "product_kernel"}
WIDTHS = (16, 64, 128, 256)


def fitting(bits, d, architecture, shared_bytes, descriptors):
    """The row of flash2's table for a problem and a device."""
    table = flash2.CONFIGURATIONS
    return launch.fitting("flash2", table, bits, d, architecture, shared_bytes, descriptors, None)


class Job(NamedTuple):
    """One call of a step: for flash1 and flash2 with the row of the table that the launcher would choose.

    variant: which of the kernels of ``steps.flash2``, or which of the tiles that only tuning tries, by its
    place among flash2.FURTHER_TILES.
    """

    architecture: int
    step: str
    dtype: str
    d: int
    layout: str = "contiguous"
    causal: bool = True
    T: int = 130  # no block divides it, so the code for the ragged end is compiled too
    variant: str | int | None = None

    def __str__(self):
        parts = [
            f"sm_{self.architecture}",
            self.step,
            self.dtype,
            f"d{self.d}",
            self.layout,
            "causal" if self.causal else "full",
        ]
        parts += [f"T{self.T}"] + ([] if self.variant is None else [str(self.variant)])
        return "-".join(parts)

    @property
    def row(self):
        bits = getattr(torch, self.dtype).itemsize * 8
        if self.step == "flash1":
            return flash1.configuration(bits, self.d, self.architecture)
        if self.step == "steps.flash2":
            return steps_flash2.configuration(bits, self.d, self.architecture)
        if self.variant is not None:
            return flash2.FURTHER_TILES[self.variant]
        return fitting(
            bits, self.d, self.architecture, SHARED_BYTES[self.architecture], self.layout == "contiguous"
        )

    @property
    def instruction(self):
        """The product on the tensor cores of this architecture; those that Hopper and Blackwell brought take
        64 rows or more.
        """
        few_rows = self.step == "flash1" and self.row[0] < 64
        return "HMMA" if few_rows else TENSOR_CORES[self.architecture]

    def request(self):
        sizes = {"B": 1, "H": 4, "H_kv": 2, "T_q": self.T, "d": self.d, "layout": self.layout}
        if self.T == 1:
            sizes |= {"H": 1, "H_kv": 1}
        row = None
        if self.step == "flash2":
            row = (flash2.CONFIGURATIONS + flash2.FURTHER_TILES).index(self.row)
        elif self.step == "flash1":
            row = self.row
        elif self.step == "steps.flash2":
            row = (self.variant, self.row)
        return {"step": self.step, "row": row, "dtype": self.dtype, "causal": self.causal, "sizes": sizes}


def sixteen(architecture):
    """The 16-bit type that is compiled for an architecture."""
    return "bfloat16" if architecture >= 80 else "float16"


def jobs(architecture):
    """What is compiled for one architecture; the jobs of the fast tests stand first in each group."""
    half = sixteen(architecture)
    found = [Job(architecture, "flash2", half, d) for d in WIDTHS]
    found += further_jobs(architecture, half, causal=True, T=130)
    found += step_jobs(architecture, half, (64, 128, 256), causal=True, T=130)
    found += [Job(architecture, "flash2", "float32", d) for d in (64, 256)]
    found += [
        Job(architecture, "flash2", "float16", 64, layout="unaligned"),
        Job(architecture, "flash2", "float16", 64, T=1),
    ]
    found += [Job(architecture, "flash1", "float16", d) for d in (64, 128, 256)]
    found += [Job(architecture, "flash1", "float32", 256), Job(architecture, "flash1", "float16", 64, T=1)]
    found += [Job(architecture, "gradients", "float16", 64)]
    found += [Job(architecture, "standard", "float16", d) for d in (64, 256)]
    return found


def further_jobs(architecture, dtype, causal, T):
    """The tiles that tuning tries on this architecture, each at its largest width."""
    return [
        Job(architecture, "flash2", dtype, row.d, "contiguous", causal, T, place)
        for place, row in enumerate(flash2.FURTHER_TILES)
        if architecture in row.architectures
    ]


def step_jobs(architecture, dtype, widths, causal, T):
    """Every step from flash1 to flash2."""
    return [
        Job(architecture, "steps.flash2", dtype, d, "contiguous", causal, T, step)
        for step in steps_flash2.STEPS
        for d in widths
    ]


def thorough_jobs(architecture):
    """The rest: every width in both precisions, no mask and lengths that divide, addresses that do not."""
    half = sixteen(architecture)
    found = [
        Job(architecture, step, dtype, d, layout, causal, T)
        for step in ("flash1", "flash2")
        for dtype in (half, "float32")
        for d in WIDTHS
        for layout in ("contiguous", "unaligned")
        for causal, T in ((True, 130), (False, 256))
    ]
    found += [
        Job(architecture, s, dtype, d)
        for s in ("standard", "gradients")
        for dtype in (half, "float32")
        for d in WIDTHS
    ]
    found += further_jobs(architecture, half, causal=False, T=256)
    for dtype in (half, "float32"):
        found += step_jobs(architecture, dtype, WIDTHS, causal=True, T=130)
        found += step_jobs(architecture, dtype, WIDTHS, causal=False, T=256)
    return [job for job in found if job not in jobs(architecture)]


compiled = compiler(jobs, thorough_jobs)


class Spill(NamedTuple):
    """Registers that kernels may spill, in bytes of stack, and why; what is not listed spills nothing."""

    kernels: tuple
    bits: int
    from_d: int
    layout: str | None
    architectures: tuple
    allowed: int
    reason: str


ALL = tuple(SHARED_BYTES)
EXACT = "exact float32 products use no tensor cores: every factor of a product passes through registers"
BASELINE = "the materialising kernels keep one tile shape for every width: a baseline to read, not to be fast"
POINTERS = "addresses that no 16-byte load accepts: a pointer for each element, in registers"
NO_TENSOR_CORES = (
    "Triton reaches no tensor cores on sm_75: the same registers as in float32, with fewer to have"
)
STACK = "registers are free and the compiler still keeps some offsets on the stack"
DIVISION = "O is divided exactly at every step, by a sequence of instructions with registers of its own"
SPILLS = (
    Spill(("flash1.forward_kernel",), 16, 16, "unaligned", TENSOR_CORES, 112, POINTERS),
    Spill(("flash1.forward_kernel",), 16, 16, None, (75,), 160, NO_TENSOR_CORES),
    Spill(("flash1.forward_kernel",), 16, 16, None, (100,), 48, STACK),
    Spill(("flash1.forward_kernel",), 16, 64, None, (86, 89), 16, DIVISION),
    Spill(("flash1.forward_kernel",), 32, 16, None, (75,), 8, DIVISION),
    Spill(("flash1.forward_kernel",), 32, 128, None, (86, 89, 120), 32, DIVISION),
    Spill(("flash2.forward_kernel",), 16, 16, "unaligned", ALL, 32, POINTERS),
    Spill(("flash2.forward_kernel",), 32, 128, "unaligned", (75,), 64, EXACT),
    Spill(("flash2.forward_kernel",), 16, 256, None, (75,), 1024, NO_TENSOR_CORES),
    Spill(("steps.flash2.forward_kernel",), 32, 256, None, (100,), 16, STACK),
    Spill(("steps.flash2.forward_kernel",), 16, 64, None, (100,), 16, DIVISION),
    Spill(("standard.scores_kernel",), 32, 256, None, ALL, 32, EXACT),
    Spill(("standard.output_kernel",), 32, 16, None, ALL, 64, EXACT),
    Spill(("standard.output_kernel",), 16, 128, None, TENSOR_CORES, 512, BASELINE),
    Spill(("standard.scores_kernel",), 16, 16, None, (75,), 16_384, NO_TENSOR_CORES),
    Spill(("standard.output_kernel",), 16, 16, None, (75,), 24_576, NO_TENSOR_CORES),
    Spill(("gradients.product_kernel",), 16, 16, None, TENSOR_CORES, 64, BASELINE),
    Spill(("gradients.product_kernel",), 16, 16, None, (75,), 4096, NO_TENSOR_CORES),
    Spill(("gradients.delta_kernel",), 32, 16, None, (100,), 64, BASELINE),
)


def allowed_spill(spills, kernel, job):
    """Bytes of stack that a kernel may use in a job, by the rows of a table."""
    bits = getattr(torch, job.dtype).itemsize * 8
    return max(
        (
            spill.allowed
            for spill in spills
            if kernel in spill.kernels
            and bits == spill.bits
            and job.d >= spill.from_d
            and spill.layout in (None, job.layout)
            and job.architecture in spill.architectures
        ),
        default=0,
    )


def judge(job, found):
    """Raise for a kernel that spills, asks for too much shared memory, or leaves the tensor cores idle."""
    wanted = {
        "standard": {"scores_kernel", "softmax_kernel", "output_kernel"},
        "gradients": {"product_kernel", "delta_kernel", "dscores_kernel"},
    }
    assert {f["kernel"] for f in found} == wanted.get(job.step, {"forward_kernel"})
    for facts in found:
        spilled, kernel = facts["stack"] + facts["local"], facts["kernel"]
        assert spilled <= allowed_spill(SPILLS, f"{job.step}.{kernel}", job), (
            f"{kernel} spills {spilled} bytes; registers: {facts['reg']}"
        )
        assert facts["shared"] <= SHARED_BYTES[job.architecture]
        if job.step == "flash2":
            assert facts["shared"] <= job.row.shared_bytes, (
                f"the table promises {job.row.shared_bytes}, it is {facts['shared']}"
            )
        exact = job.dtype == "float32" or job.architecture not in TENSOR_CORES or kernel not in PRODUCTS
        assert facts["tensor_cores"] == ([] if exact else [job.instruction]), facts["tensor_cores"]
        if job.step == "flash2":
            assert ("UTMALDG" in facts["copies"]) == job.row.descriptor


def judge_tiled(job, found, name, spills, tabled):
    """Raise unless the one kernel found is the named one and neither spills, asks for too much shared memory,
    leaves the tensor cores idle, nor waits for every product; tabled: job.row promises what it needs.
    """
    assert [facts["kernel"] for facts in found] == [name]
    (facts,) = found
    spilled = facts["stack"] + facts["local"]
    assert spilled <= allowed_spill(spills, job.kernel, job), (
        f"spills {spilled} bytes; registers: {facts['reg']}"
    )
    assert facts["shared"] <= SHARED_BYTES[job.architecture]
    exact = job.dtype == "float32" or job.architecture not in TENSOR_CORES or job.kernel == "delta"
    assert (facts["tensor_cores"] == []) == exact, facts["tensor_cores"]
    assert "HGMMA" not in facts["tensor_cores"] or facts["waits"] < facts["products"], "products in a row"
    if tabled:
        assert facts["shared"] <= job.row.shared_bytes, f"promised {job.row.shared_bytes}: {facts['shared']}"
        assert ("UTMALDG" in facts["copies"]) == job.row.descriptor
        if not exact and job.row.descriptor:
            assert TENSOR_CORES[job.architecture] in facts["tensor_cores"], facts["tensor_cores"]


def parametrised(architectures, source):
    return [pytest.param(job, id=str(job)) for architecture in architectures for job in source(architecture)]


@pytest.mark.parametrize("job", parametrised(FAST, jobs))
def test_compiles(job):
    judge(job, compiled(job.architecture, False)[job])


# {(architecture, d): how the warps of flash2 divide a tile}, as (rows, columns). The chapter says so.
WARPS = {
    (80, 64): (4, 1), (80, 128): (1, 4), (80, 256): (1, 8),
    (90, 64): (4, 1), (90, 128): (4, 1), (90, 256): (8, 1),
}  # fmt: skip


@pytest.mark.parametrize("architecture, d", WARPS)
def test_how_warps_divide_a_tile(architecture, d):
    (facts,) = compiled(architecture, False)[Job(architecture, "flash2", "bfloat16", d)]
    assert {tuple(map(int, pair)) for pair in facts["warps"]} == {WARPS[architecture, d]}


@pytest.mark.slow
@pytest.mark.parametrize("job", parametrised([a for a in SHARED_BYTES if a not in FAST], jobs))
def test_compiles_for_other_architectures(job):
    judge(job, compiled(job.architecture, False)[job])


@pytest.mark.slow
@pytest.mark.parametrize("job", parametrised(SHARED_BYTES, thorough_jobs))
def test_compiles_in_every_width_and_layout(job):
    judge(job, compiled(job.architecture, True)[job])


# ------------------------------------------------------------------------------------ the table


def test_every_row_states_architectures_and_fits_their_memory():
    for row in flash2.CONFIGURATIONS + flash2.FURTHER_TILES:
        assert row.architectures and set(row.architectures) <= set(SHARED_BYTES)
        assert all(row.shared_bytes <= SHARED_BYTES[a] for a in row.architectures)


def test_every_row_is_used_and_every_problem_has_one():
    used = {
        fitting(bits, d, architecture, SHARED_BYTES[architecture], descriptors)
        for architecture in SHARED_BYTES
        for bits in (16, 32)
        for d in (16, 32, 64, 128, 256)
        for descriptors in (False, True)
    }
    assert used == set(flash2.CONFIGURATIONS)


def test_a_device_with_less_memory_gets_a_smaller_row_or_a_clear_error():
    for row in flash2.CONFIGURATIONS:
        for architecture in row.architectures:
            try:
                chosen = fitting(row.bits, row.d, architecture, row.shared_bytes - 1, True)
            except ValueError as error:
                assert f"{row.bits}-bit" in str(error) and str(row.shared_bytes - 1) in str(error)
            else:
                assert chosen.shared_bytes < row.shared_bytes
    with pytest.raises(ValueError, match=r"flash2: no configuration for 16-bit .*compute capability 7\.0"):
        fitting(16, 64, 70, 98_304, True)


def test_newer_devices_use_the_latest_rows_before_them():
    for newer, listed in ((103, 100), (87, 86)):
        memory = SHARED_BYTES[listed]
        assert fitting(16, 64, newer, memory, False) == fitting(16, 64, listed, memory, False)


def test_the_gate_can_fail():
    job = Job(90, "flash2", "bfloat16", 64)
    good = {
        "kernel": "forward_kernel",
        "reg": 160,
        "stack": 0,
        "local": 0,
        "shared": job.row.shared_bytes,
        "tensor_cores": ["HGMMA"],
        "copies": ["UTMALDG"],
    }
    judge(job, [good])
    for bad in (
        {"stack": 8},
        {"local": 8},
        {"shared": job.row.shared_bytes + 1},
        {"tensor_cores": []},
        {"copies": ["LDGSTS"]},
    ):
        with pytest.raises(AssertionError):
            judge(job, [good | bad])
    with pytest.raises(AssertionError):
        judge(job, [])
