"""The compile gate of the kernels for compute capability 9.0."""

from dataclasses import dataclass

import gate
import pytest

from flashlib.kernels import (
    gluon_bias,
    hopper,
    hopper_backward,
    hopper_host,
    hopper_tiles,
    hopper_wide,
)
from flashlib.kernels.steps import hopper as steps

RAGGED, EVEN = 130, 256
BOTH = True, False
# {kernel: {d: [rows of its table]}}; a step has one row, which its launcher takes
# itself.
TABLES = {
    "hopper": {
        d: list(dict.fromkeys(table)) for d, table in hopper_tiles.TILES.items()
    },
    **{step: {d: [None] for d in steps.TILES} for step in steps.STEPS},
    "keys": {256: [hopper_wide.KEYS]},
    "queries": {256: [hopper_wide.QUERIES]},
    "fused": {d: [row] for d, row in hopper_backward.FUSED.items()},
    "expanded_keys": {192: [None]},
    "ring": {d: [hopper_tiles.TILES[d][1]] for d in (64, 128, 256)},
}
# The backward pass of masks has the row of the fused form.
TABLES["masked"] = TABLES["fused"]
UNMASKED = tuple(x for x in TABLES if x != "masked")
SMALL = "small"  # one head, no mask, lengths that its blocks divide
BACKWARD = "keys", "queries", "fused", "expanded_keys"
# What rounds dQ where one kernel computes all gradients, and multiplies no matrices.
SIMPLE = {"finish": (64, 128), "expanded_finish": (192,)}
NAMES = {"hopper": "forward_kernel", "fused": "keys_kernel", "masked": "keys_kernel"}
NAMES[steps.STEPS[0]] = "together_kernel"
# The modules of kernels, as compile_worker.py calls them.
MODULES = {
    "hopper": "hopper", "ring": "hopper_ring", SMALL: "steps.small_hopper",
    **dict.fromkeys(steps.STEPS, "steps.hopper"),
    **dict.fromkeys(("fused", "masked"), "hopper_backward"), "finish": "gluon_order",
    **dict.fromkeys(("keys", "queries"), "hopper_wide"),
    **dict.fromkeys(("expanded_keys", "expanded_finish"), "hopper_expanded"),
}  # fmt: skip


@dataclass(frozen=True)
class Job(gate.Job):
    row: tuple | None = None
    left: int | None = None
    packed: bool = False
    mask: str | None = None  # one that compile_worker.py knows, with sinks
    deterministic: bool = True
    alibi: bool = False
    softcap: float = 0.0
    score: str | None = None  # one that compile_worker.py knows
    bias: str | None = None  # the same
    keep: bool = False  # the first maximum, and once more what has overflowed

    def request(self):
        names = "left", "packed", "mask", "deterministic", "alibi", "softcap", "score"
        names += "bias", "keep"
        return super().request() | {name: getattr(self, name) for name in names}

    @property
    def changed(self):
        return self.softcap != 0.0 or self.score is not None or self.bias is not None

    @property
    def step(self):
        return MODULES[self.kernel]

    @property
    def name(self):
        """The function that is compiled."""
        own = "apart" if self.kernel in steps.STEPS else self.kernel
        return NAMES.get(self.kernel, f"{own}_kernel")


def job(kernel, d, row, causal, T, dtype="bfloat16", H_kv=2, **options):
    return Job(90, kernel, dtype, d, causal, T=T, H_kv=H_kv, row=row, **options)


def rows(*kernels):
    """[(kernel, d, row)] of their tables."""
    return [
        (name, d, row)
        for name in kernels
        for d, table in TABLES[name].items()
        for row in table
    ]


def simple():
    """[(kernel, d, None)] of those that multiply no matrices."""
    return [(name, d, None) for name, widths in SIMPLE.items() for d in widths]


def masked(mask, T):
    """Every row that takes a mask that is a function, with this one."""
    found = [row for row in rows("hopper") if row[2].CONSUMERS < 3]
    return [job(*row, False, T, mask=mask) for row in [*found, *rows("masked")]]


def changing():
    """Scores that change, in the rows that take them."""
    lengths = 512, 4096, 65536
    found = []
    for d in hopper_tiles.TILES:
        chosen = [hopper.choose_tile(d, T, True, changed=True) for T in lengths]
        found += [("hopper", d, row) for row in dict.fromkeys(chosen)]
    found += rows("fused")
    changes = {"softcap": 30.0}, {"score": "softcap and ALiBi"}, {"score": "relative"}
    changes += ({"bias": "each pair"},)
    made = [job(*row, True, EVEN, **x) for x in changes for row in found]
    copied = hopper.choose_tile(64, max(lengths), True, changed=True, biased=True)
    made.append(job("hopper", 64, copied, True, EVEN, bias="each pair"))
    masks = {"mask": "prefix"}
    made += [
        job(*row, False, T, bias=x) for x in ("float32", "each key")
        for row in found for T in (EVEN, RAGGED)
    ]  # fmt: skip
    return made + [
        job(*row, False, EVEN, **masks, **x) for x in changes for row in rows("masked")
    ]


def jobs():
    """Every row with a causal mask, the last kernels without one and ragged too, with a
    window, and with scores that change.
    """
    found = [job(*row, True, EVEN) for row in rows(*UNMASKED)]
    found += [job(*row, False, T) for row in rows("hopper") for T in (EVEN, RAGGED)]
    for causal in (False, True):
        found += [job(*row, causal, RAGGED, packed=True) for row in rows("hopper")]
    found += [job(*row, causal, RAGGED) for row in rows("ring") for causal in BOTH]
    found += masked("prefix", EVEN) + masked("documents", RAGGED)
    found += [job(*row, True, EVEN, alibi=True) for row in rows("hopper", "fused")]
    sliding = rows("hopper", "keys", "queries", "fused", "expanded_keys")
    found += [job(*row, True, EVEN, left=100) for row in sliding]
    found += [job(*row, False, RAGGED) for row in rows(*BACKWARD)]
    found += [job(*row, True, RAGGED, keep=True) for row in rows("hopper")]
    found += [job(*row, False, EVEN, keep=True) for row in rows("hopper")]
    found += [job(SMALL, d, None, False, EVEN) for d in (64, 128)]
    found += changing()
    return found + [job(*row, False, RAGGED) for row in simple()]


def thorough_jobs():
    """The rest: both dtypes, both masks, groups of one, single rows."""
    kinds = (RAGGED, "bfloat16", 2), (EVEN, "float16", 4), (1, "float16", 2)
    found = [
        job(*row, causal, *options)
        for row in [*rows(*UNMASKED), *simple()]
        for causal in (False, True)
        for options in kinds
    ]
    fused = rows("fused", "expanded_keys")
    found += [job(*row, True, EVEN, deterministic=False) for row in fused]
    return found + [job(*row, True, RAGGED, left=100) for row in fused]


# {(kernel, d, row): (bytes of stack that it may use, why)}; what is not listed spills
# nothing.
BAND = (
    "all registers are taken: in the blocks that need a mask a few numbers wait on the "
    "stack"
)
OUTSIDE = "outside of the loops"
PARTIAL = (
    "what a mask needs waits on the stack, and is read in blocks with hidden pairs"
)
DESCRIPTORS = (
    "sums take two thirds of the registers, so descriptors of factors in shared "
    "memory, computed before the loop, wait on the stack"
)
SPILLS = {
    ("hopper", 64, hopper_tiles.TILES[64][0]): (8, OUTSIDE),
    ("hopper", 64, hopper_tiles.TILES[64][2]): (104, BAND),  # 80 without a window
    ("hopper", 128, hopper_tiles.TILES[128][1]): (40, BAND),
    ("hopper", 192, hopper_tiles.TILES[192][1]): (40, BAND),
    ("ring", 128, hopper_tiles.TILES[128][1]): (32, BAND),
    ("ring", 256, hopper_tiles.TILES[256][1]): (32, BAND),
    ("hopper", 256, hopper_tiles.TILES[256][0]): (48, BAND),
    ("keys", 256, hopper_wide.KEYS): (32, BAND),
    ("expanded_keys", 192, None): (288, DESCRIPTORS),
    ("fused", 64, hopper_backward.FUSED[64]): (16, OUTSIDE),
    ("fused", 128, hopper_backward.FUSED[128]): (32, BAND),
    ("masked", 64, hopper_backward.FUSED[64]): (16, PARTIAL),
    ("masked", 128, hopper_backward.FUSED[128]): (16, PARTIAL),
}
# Bytes of stack where ALiBi makes them more: a slope, and what is computed from it.
ALIBI_SPILLS = {
    ("hopper", 64, hopper_tiles.TILES[64][2]): 112,  # in blocks with hidden pairs
    ("fused", 64, hopper_backward.FUSED[64]): 56,
    ("fused", 128, hopper_backward.FUSED[128]): 48,
}
# {(kernel, d): (bytes of stack that it may use, reads and writes of it in a loop that
# multiplies)} where scores change. Forward, these are at the end of a tile, which
# jumps back past the loops; nothing in the loops over keys waits on the stack.
CHANGED_SPILLS = {
    ("hopper", 64): (24, 5),
    ("hopper", 128): (72, 2),
    ("hopper", 192): (56, 4),
    ("hopper", 256): (24, 2),
    ("fused", 64): (64, 7),
    ("fused", 128): (208, 64),
    ("masked", 64): (104, 33),
    ("masked", 128): (176, 60),
}


def judge_tile(job, facts):
    """What the depth page of the chapter counts of a tile, in the compiled kernel."""
    consumers, block_k, slots, hold_q = job.row
    # A thread holds BLOCK_K / 2 scores and finds their maxima before it waits.
    assert min(facts["maxima"]) >= block_k // 2, facts["maxima"]
    # eq-hopper-registers: O and S, and P in 16 bits.
    assert facts["registers"] == [job.d_v // 2 + block_k // 2, block_k // 4]
    # eq-hopper-shared, and the barriers and the queue of tiles.
    numbers = 64 * consumers * (job.d + hold_q * job.d_v)
    numbers += slots * block_k * (job.d + job.d_v)
    if job.bias == "each pair" and job.d != hopper_host.EXPANDED[0]:  # it is copied
        numbers += gluon_bias.SLOTS.value * 64 * consumers * block_k
    assert 0 < facts["shared"] - 2 * numbers < 1024, facts["shared"]
    # eq-hopper-rest, and what a thread computes once for each of its two rows.
    n = block_k // 2
    least = {"MUFU.EX2": n, "FFMA": n, "FMNMX": n, "FADD": n}
    least |= {"F2FP": n // 2, "FMUL": job.d_v // 2}  # F2FP rounds two numbers
    for counts in facts["softmax"] if not (job.alibi or job.changed) else ():
        assert all(0 <= counts[x] - least[x] <= 4 for x in least), counts


def judge_keeping(job, facts):
    """The first launch: in most blocks no maximum and no product for rescaling."""
    gate.judge_memory(job, facts, SPILLS.get((job.kernel, job.d, job.row), (0,))[0])
    assert facts["kernel"] == job.name and facts["tensor_cores"] == ["HGMMA"]
    least = min(facts["softmax"], key=lambda counts: counts["FMNMX"])
    assert least["FMNMX"] == least["FMUL"] == 0, least


def judge(job, found):
    """Raise for a kernel that is not what the gate wants."""
    if job.keep:  # and the second launch
        keeping, *found = found
        judge_keeping(job, keeping)
    assert [facts["kernel"] for facts in found] == [job.name]
    (facts,) = found
    allowed, _ = SPILLS.get((job.kernel, job.d, job.row), (0, ""))
    if job.alibi:
        allowed = ALIBI_SPILLS.get((job.kernel, job.d, job.row), allowed)
    if job.changed:
        allowed, often = CHANGED_SPILLS[job.kernel, job.d]
        assert max(facts["stack_in_loops"]) <= often, facts["stack_in_loops"]
    gate.judge_memory(job, facts, allowed)
    if job.kernel in SIMPLE:
        return
    assert facts["tensor_cores"] == ["HGMMA"] and facts["copies"] == ["UTMALDG"]
    assert facts["waits"] < facts["products"], "products in a row"
    if job.kernel in ("hopper", "ring"):
        judge_tile(job, facts)
    if job.kernel == SMALL:
        # The chapter says that the wait for P V moves into the maximum of 64 scores.
        assert 0 < min(facts["maxima"]) <= max(facts["maxima"]) < 64, facts["maxima"]
    # The first step has no producer; in all others registers change hands.
    assert (facts["handed"] > 0) == (job.kernel != steps.STEPS[0]), facts["handed"]
    # A barrier that nobody waits at shares its memory with a tile, and its first value
    # may land on the tile.
    apart = facts["barriers"][0] > facts["shared"] - 1024
    assert apart, "a barrier lies among the tiles"
    assert len(set(facts["barriers"])) == len(facts["barriers"])


# The last step has what those between it and the first have.
EACH = gate.each_kernel(jobs())
FAST = [job for job in EACH if job.kernel not in steps.STEPS[1:-1]]
SLIDING = [job for job in jobs() if job.kernel == "fused" and job.left is not None]
GATE = gate.Gate(judge, FAST, [*jobs(), *thorough_jobs()], [*EACH, *SLIDING])
test_compiles = GATE.test()


def test_the_gate_can_fail():
    keys = job("keys", 256, None, True, EVEN)
    good = gate.GOOD | {"kernel": "keys_kernel", "shared": 100_000, "handed": 4}
    good |= {"barriers": [99_900, 99_908]}
    changes = [{"barriers": [0, 99_908]}, {"barriers": [99_908, 99_908]}]
    changes += [{"tensor_cores": ["HMMA"]}, {"waits": 16}, {"handed": 0}]
    gate.check_judge(judge, keys, [good], *changes, {"kernel": "queries_kernel"})
    first = job(steps.STEPS[0], 64, None, True, EVEN)
    together = good | {"kernel": "together_kernel", "handed": 0}
    gate.check_judge(judge, first, [together], {"handed": 4})
    small = good | {"kernel": "small_kernel", "maxima": [20]}
    changes = [{"maxima": [68]}, {"maxima": [0]}, {"handed": 0}]
    gate.check_judge(judge, job(SMALL, 64, None, False, EVEN), [small], *changes)
    tile = job("hopper", 128, hopper_tiles.ForwardTile(2, 64, 4, True), True, EVEN)
    counts = {"MUFU.EX2": 34, "FFMA": 34, "FMNMX": 36, "FADD": 32, "F2FP": 16}
    counts["FMUL"] = 66
    place = {"shared": 197_120, "barriers": [196_912, 196_920], "maxima": [36]}
    forward = good | place | {"kernel": "forward_kernel", "registers": [96, 16]}
    changes = [{"registers": [96, 32]}, {"maxima": [30]}]
    changes += [
        {"shared": x, "barriers": [x - 100, x - 92]} for x in (180_000, 210_000)
    ]
    changes += [{"softmax": [counts | {x: 2 * n}]} for x, n in counts.items()]
    gate.check_judge(judge, tile, [forward | {"softmax": [counts]}], *changes)
    keeping = job("hopper", 128, tile.row, True, EVEN, keep=True)
    none = forward | {"softmax": [counts | {"FMNMX": 0, "FMUL": 0}, counts]}
    both = [none, forward | {"softmax": [counts]}]
    judge(keeping, both)
    for wrong in ({"FMNMX": 36, "FMUL": 0}, {"FMNMX": 0, "FMUL": 64}):
        with pytest.raises(AssertionError):
            judge(keeping, [forward | {"softmax": [counts | wrong]}, both[1]])
    with pytest.raises(AssertionError):
        judge(keeping, both[1:])
    capped = job("fused", 64, None, True, EVEN, softcap=30.0)
    good |= {"kernel": "keys_kernel", "stack_in_loops": [4, 0]}
    judge(capped, [good])
    with pytest.raises(AssertionError):
        judge(capped, [good | {"stack_in_loops": [0, 20]}])
