"""Assignment *bottleneck*: words, times, the roofline, and two steps joined in one."""

import math

import numpy as np

from exercises.grader import tasks
from exercises.grader.tasks import Case, Task, counted, judged, number, padded, paper


def attainable_cases(rng, numbers):
    rates = numbers["F"] * 1e12, numbers["W"] * 1e9

    def case(title, intensity):
        moved = float(rng.integers(1, 100)) * 1e6
        flops = intensity * rates[0] / rates[1] * moved
        names = ("flops", "moved_bytes", "flops_per_second", "bytes_per_second")
        return Case(title, dict(zip(names, (flops, moved, *rates), strict=True)))

    return [case("left of the ridge", 0.2), case("right of the ridge", 6.0)]


def judge_attainable(case, values, numbers):
    flops, moved, rate, bandwidth = case.arguments.values()
    reached = flops / max(flops / rate, moved / bandwidth)
    computed = {"error": 1e-6}  # by a function, so in floating point
    number(values[:1], flops / moved, name="the intensity", **computed)
    number(values[1:], reached, name="the operations a second", **computed)


def joined_cases(rng, numbers):
    def case(title, T, d, B_r, B_c):
        P = rng.random((T, T))
        arrays = tasks.normals(rng, np.float64, V=(T, d), dO=(T, d), O=(T, d))
        return Case(title, {"P": P, **arrays, "B_r": B_r, "B_c": B_c})

    d = int(rng.integers(2, 6))
    return [
        case("blocks that divide T", 12, d, 4, 3),
        case("blocks that do not divide T", int(rng.choice([11, 13])), d, 4, 3),
        case("more columns than rows in a block", 10, d, 2, 6),
        case("single rows and columns", 5, d, 1, 1),
        case("one block", 6, d, 6, 6),
        case("a large matrix", 60, d, 12, 16),
    ]


def judge_joined(case, values, numbers):
    P, V, dO, O = (case.arguments[name] for name in ("P", "V", "dO", "O"))
    exact = P * (dO @ V.T - (dO * O).sum(axis=1, keepdims=True))
    passes = math.ceil(len(V) / case.arguments["B_r"])
    loaded = {"P": P.size, "V": passes * V.size, "dO": V.size, "O": V.size}
    words = {name: (count, 0) for name, count in loaded.items()}
    tasks.judge_schedule(values, {"dS": exact}, words | {"dS": (0, P.size)})


def kernel_cases(rng, numbers):
    def case(title, T, d, BLOCK, turned=False, dtype=np.float32):
        arrays = tasks.normals(rng, dtype, x=(T, d), y=(T, d))
        return Case(title, {**arrays, "turned": turned, "BLOCK": BLOCK})

    T = 32 * int(rng.integers(1, 4)) + int(rng.integers(1, 31))
    d = int(rng.integers(17, 31))
    return [
        case("whole blocks", 64, 32, 32),
        case("a number of rows that no block divides", T, 32, 32),
        case("a width that is no power of two", 64, d, 32),
        case("both, and another block size", T, d, 16),
        case("fewer rows than a block", int(rng.integers(1, 15)), d, 32),
        case("other strides", T, d, 32, turned=True),
        case("float16", T, d, 32, dtype=np.float16),
    ]


def limits(x, BLOCK, **_):
    """Each number once, BLOCK rows at a time."""
    return counted(BLOCK * padded(x.shape[1]), x.size, x.size, 0)


TASKS = (
    paper("words", 2, ("square_words", "all_words")),
    paper("times", 3, ("arithmetic_us", "transfers_us", "widest")),
    paper("intensity", 4, ("inner", "outer", "tiled", "tiled_held")),
    Task("attainable", 2, judge_attainable, attainable_cases, call="attainable"),
    Task("joined", 5, judge_joined, joined_cases, call="run_d_scores"),
    Task("kernel", 4,
         judged("out", lambda x, y, **_: [(x * y).sum(dim=-1)],
                changed=tasks.in_float32),
         kernel_cases, call="row_dot", kernel=True, limits=limits),
)  # fmt: skip
