"""The compile gate of the kernels up to flash2, for every architecture."""

import dataclasses
from dataclasses import dataclass
from functools import partial

import gate
import pytest
from gate import ALL, EXACT, NO_TENSOR_CORES, POINTERS, STACK, Spill

from flashlib.kernels import flash1, flash2, tables
from flashlib.kernels.steps import flash2 as steps_flash2

TABLES = {
    "flash1": flash1.CONFIGURATIONS,
    "flash2": flash2.CONFIGURATIONS,
    "steps.flash2": steps_flash2.CONFIGURATIONS,
}
KERNELS = {
    "standard": {"scores_kernel", "softmax_kernel", "output_kernel"},
    "gradients": {"product_kernel", "delta_kernel", "dscores_kernel"},
}
PRODUCTS = {"forward_kernel", "scores_kernel", "output_kernel", "product_kernel"}


@dataclass(frozen=True)
class Job(gate.Job):
    """One call of a step, its ``kernel``."""

    # Which kernel of steps.flash2, or which of flash2.FURTHER_TILES, for tuning.
    variant: str | int | None = None

    tables = TABLES

    @property
    def row(self):
        if self.kernel == "flash2" and self.variant is not None:
            return flash2.FURTHER_TILES[self.variant]
        return super().row

    @property
    def instruction(self):
        """The product on the tensor cores; the newest ones take 64 rows or more."""
        few_rows = self.kernel == "flash1" and self.row.BLOCK_Q < 64
        return "HMMA" if few_rows else gate.TENSOR_CORES[self.architecture]

    def request(self):
        return super().request() | {"step": self.kernel, "kernel": self.variant}


def jobs(architecture):
    """What every architecture is covered by."""
    job, half = partial(Job, architecture), gate.half(architecture)
    single = {"T": 1, "H": 1, "H_kv": 1}
    return [
        *(job("flash2", half, d) for d in (*gate.WIDTHS, tables.SPLIT)),
        *step_jobs(architecture, half, (64, 128, 256)),
        *(job("flash2", "float32", d) for d in (64, 256)),
        job("flash2", "float16", 64, layout="unaligned"),
        job("flash2", "float16", 64, **single),
        *(job("flash1", "float16", d) for d in (64, 128, 256)),
        job("flash1", "float32", 256),
        job("flash1", "float16", 64, **single),
        job("gradients", "float16", 64),
        *(job("standard", "float16", d) for d in (64, 256)),
    ]


def further_jobs(architecture, **options):
    """The tiles that tuning tries on this architecture, each at its largest width."""
    half = gate.half(architecture)
    return [
        Job(architecture, "flash2", half, row.d, variant=place, **options)
        for place, row in enumerate(flash2.FURTHER_TILES)
        if architecture in row.architectures
    ]


def step_jobs(architecture, dtype, widths, **options):
    """Every step from flash1 to flash2."""
    return [
        Job(architecture, "steps.flash2", dtype, d, variant=step, **options)
        for step in steps_flash2.STEPS
        for d in widths
    ]


def thorough_jobs(architecture):
    """Every width in both precisions, with and without mask and ragged ends."""
    half = gate.half(architecture)
    found = further_jobs(architecture)
    found += further_jobs(architecture, causal=False, T=256)
    split = Job(architecture, "flash2", half, tables.SPLIT)
    found += [split, dataclasses.replace(split, causal=False, T=256)]
    found += [dataclasses.replace(split, dtype="float32", layout="unaligned")]
    for dtype in (half, "float32"):
        found += [
            Job(architecture, step, dtype, d, causal, layout, T)
            for step in ("flash1", "flash2")
            for d in gate.WIDTHS
            for layout in ("contiguous", "unaligned")
            for causal, T in ((True, 130), (False, 256))
        ]
        found += [
            Job(architecture, step, dtype, d)
            for step in ("standard", "gradients")
            for d in gate.WIDTHS
        ]
        found += step_jobs(architecture, dtype, gate.WIDTHS)
        found += step_jobs(architecture, dtype, gate.WIDTHS, causal=False, T=256)
    return found


BASELINE = (
    "the materializing kernels keep one tile shape for every width: a baseline to "
    "read, not to be fast"
)
DIVISION = (
    "O is divided exactly at every step, by a sequence of instructions with registers "
    "of its own"
)
TRIED = "a tile that only tuning tries keeps two registers on the stack"
CORES = gate.TENSOR_CORES
SPILLS = (
    Spill(("flash1.forward_kernel",), 16, 16, "unaligned", CORES, 112, POINTERS),
    Spill(("flash1.forward_kernel",), 16, 16, None, (75,), 160, NO_TENSOR_CORES),
    Spill(("flash1.forward_kernel",), 16, 16, None, (100,), 48, STACK),
    Spill(("flash1.forward_kernel",), 16, 64, None, (86, 89), 16, DIVISION),
    Spill(("flash1.forward_kernel",), 32, 16, None, (75,), 8, DIVISION),
    Spill(("flash1.forward_kernel",), 32, 128, None, (86, 89, 120), 32, DIVISION),
    Spill(("flash2.forward_kernel",), 16, 16, "unaligned", ALL, 32, POINTERS),
    Spill(("flash2.forward_kernel",), 32, 128, "unaligned", (75,), 64, EXACT),
    Spill(("flash2.forward_kernel",), 16, 128, None, (80,), 8, TRIED),
    Spill(("flash2.forward_kernel",), 16, 256, "unaligned", (90,), 72, POINTERS),
    Spill(("flash2.forward_kernel",), 16, 256, None, (75,), 1024, NO_TENSOR_CORES),
    Spill(("steps.flash2.forward_kernel",), 32, 256, None, (100,), 16, STACK),
    Spill(("steps.flash2.forward_kernel",), 16, 64, None, (100,), 16, DIVISION),
    Spill(("standard.scores_kernel",), 32, 256, None, ALL, 32, EXACT),
    Spill(("standard.output_kernel",), 32, 16, None, ALL, 64, EXACT),
    Spill(("standard.output_kernel",), 16, 128, None, CORES, 512, BASELINE),
    Spill(("standard.scores_kernel",), 16, 16, None, (75,), 16_384, NO_TENSOR_CORES),
    Spill(("standard.output_kernel",), 16, 16, None, (75,), 24_576, NO_TENSOR_CORES),
    Spill(("gradients.product_kernel",), 16, 16, None, CORES, 64, BASELINE),
    Spill(("gradients.product_kernel",), 16, 16, None, (75,), 4096, NO_TENSOR_CORES),
    Spill(("gradients.delta_kernel",), 32, 16, None, (100,), 64, BASELINE),
)


def judge(job, found):
    """Raise for a spill, too much shared memory, or idle tensor cores."""
    names = KERNELS.get(job.kernel, {"forward_kernel"})
    assert {facts["kernel"] for facts in found} == names
    for facts in found:
        kernel = facts["kernel"]
        allowed = gate.allowed_spill(SPILLS, f"{job.kernel}.{kernel}", job)
        gate.judge_memory(job, facts, allowed)
        exact, cores = job.exact or kernel not in PRODUCTS, facts["tensor_cores"]
        assert cores == ([] if exact else [job.instruction]), cores
        if job.kernel == "flash2":
            assert ("UTMALDG" in facts["copies"]) == job.row.descriptor


# {(architecture, d): how the warps of flash2 divide a tile}, as (rows, columns). The
# chapter says so.
WARPS = {
    (80, 64): (4, 1), (80, 128): (1, 4), (80, 256): (1, 8),
    (90, 64): (4, 1), (90, 128): (4, 1), (90, 256): (8, 1),
}  # fmt: skip


DIVIDED = [Job(architecture, "flash2", "bfloat16", d) for architecture, d in WARPS]
REST = [job for a in ALL for job in (*jobs(a), *thorough_jobs(a))]
WIDE = Job(90, "flash2", "bfloat16", 128)
GATE = gate.Gate(judge, [WIDE, *gate.each_kernel(jobs(90), [WIDE])], REST, DIVIDED)
test_compiles = GATE.test()


@GATE.each(DIVIDED)
def test_how_warps_divide_a_tile(job):
    (facts,) = GATE.facts(job)
    found = {tuple(map(int, pair)) for pair in facts["warps"]}
    assert found == {WARPS[job.architecture, job.d]}


# -- the table


def fitting(bits, d, architecture, shared_bytes, descriptors):
    """The row of flash2's table for a problem and a device."""
    problem = bits, d, architecture, shared_bytes, descriptors, None
    return tables.fitting("flash2", flash2.CONFIGURATIONS, *problem)


def test_every_row_is_sound_and_used_and_every_problem_has_one():
    gate.check_table("flash2", flash2.CONFIGURATIONS)
    gate.check_rows(flash2.FURTHER_TILES)


def test_a_device_with_less_memory_gets_a_smaller_row_or_a_clear_error():
    for row in flash2.CONFIGURATIONS:
        for architecture in row.architectures:
            less = row.shared_bytes - 1
            try:
                chosen = fitting(row.bits, row.d, architecture, less, True)
            except ValueError as error:
                assert f"{row.bits} bits" in str(error) and str(less) in str(error)
            else:
                assert chosen.shared_bytes < row.shared_bytes
    message = r"q: expected a GPU with a tile of flash2 for 16 bits .* capability 7\.0"
    with pytest.raises(ValueError, match=message):
        fitting(16, 64, 70, 98_304, True)


def test_newer_devices_use_the_latest_rows_before_them():
    for newer, listed in ((103, 100), (87, 86)):
        memory = gate.SHARED_BYTES[listed]
        chosen = fitting(16, 64, newer, memory, False)
        assert chosen == fitting(16, 64, listed, memory, False)
