"""Assignment *blocks*: tiles that fit, what they move, and a product in tiles."""

import math

import numpy as np

from exercises.grader import tasks
from exercises.grader.tasks import Case, Task, Wrong, counted, judged, normals, paper
from flashlib.iomodel.blocks import quarter_blocks


def sizes_cases(rng, numbers):
    def case(name, title, M, d, B_c, s):
        sizes = {"name": name, "M": M, "d": d, "B_c": B_c, "s": s}
        return Case(f"{name}, {title}", sizes)

    d = int(rng.integers(5, 30))
    M = int(rng.integers(20, 60)) * d
    return [
        case("most_rows", "no statistics", M, d, int(rng.integers(2, 9)), 0),
        case("most_rows", "statistics", 2 * d * (2 * d + 7 + 2) + 7 * d - 1, d, 7, 2),
        case("most_rows", "no room for a row", 6 * d, d, 5, 2),
        case("most_rows", "no room for the keys", 4 * d, d, 5, 2),
        case("most_rows", "one row fits exactly", 2 * d + 6 + 2 + 6 * d, d, 6, 2),
        case("quarters_fit", "all quarters full", 4 * d * d, d, d, 1),
        case("quarters_fit", "no statistics", 4 * d * d, d, d, 0),
        case("quarters_fit", "fewer rows than columns", 4 * d * (d - 3), d, d, 2),
        case("quarters_fit", "more rows than columns", 4 * d * (d + 5), d, d, 2),
    ]


def judge_sizes(case, values, numbers):
    name, M, d, B_c, s = case.arguments.values()
    if name == "most_rows":
        rows = (B for B in range(1, M) if 2 * B * d + B * B_c + B_c * d + s * B <= M)
        tasks.number(values, max(rows, default=0), name=name)
    else:
        B_r, B_c = quarter_blocks(d, M)
        fits = 2 * B_r * d + B_r * B_c + B_c * d + s * B_r <= M
        if values not in ([True], [False]) or bool(values[0]) != fits:
            raise Wrong(f"quarters_fit is not {values[0]}")


def product_cases(rng, numbers):
    def case(title, m, n, k, b_m, b_n, b_k):
        arrays = normals(rng, np.float64, A=(m, k), B=(k, n))
        return Case(title, {**arrays, "b_m": b_m, "b_n": b_n, "b_k": b_k})

    m, n, k = (int(x) for x in rng.choice([7, 11, 13], 3))
    return [
        case("tiles that divide the matrices", 6, 8, 4, 3, 4, 2),
        case("tiles that do not divide them", m, n, k, 3, 4, 2),
        case("outer products", m, n, k, 3, 2, 1),
        case("one number at a time", 4, 3, 5, 1, 1, 1),
        case("large matrices", 64, 60, 68, 16, 16, 8),
    ]


def judge_product(case, values, numbers):
    A, B, b_m, b_n, _ = case.arguments.values()
    down, across = math.ceil(len(A) / b_m), math.ceil(B.shape[1] / b_n)
    words = {"A": (across * A.size, 0), "B": (down * B.size, 0)}
    tasks.judge_schedule(values, {"C": A @ B}, words | {"C": (0, len(A) * B.shape[1])})


def attend_cases(rng, numbers):
    def case(title, T_q, T_k, d, d_v, B_r, B_c):
        arrays = normals(rng, np.float64, Q=(T_q, d), K=(T_k, d), V=(T_k, d_v))
        scale = float(rng.random() + 0.2)
        return Case(title, {**arrays, "scale": scale, "B_r": B_r, "B_c": B_c})

    T_q, T_k = int(rng.choice([7, 11, 13])), int(rng.choice([8, 10, 14]))
    return [
        case("blocks that divide the lengths", 8, 8, 3, 3, 4, 2),
        case("more keys than queries, or fewer", T_q, T_k, 3, 3, 4, 3),
        case("narrow values", T_q, T_k, 4, 2, 3, 5),
        case("wide values", T_q, T_k, 2, 5, 3, 4),
        case("one row at a time", 5, 6, 2, 3, 1, 1),
        case("large matrices", 80, 90, 24, 26, 20, 16),
    ]


def judge_attend(case, values, numbers):
    Q, K, V, scale, B_r, _ = case.arguments.values()
    O, passes = scale * (Q @ K.T) @ V, math.ceil(len(Q) / B_r)
    loaded = {"Q": Q.size, "K": passes * K.size, "V": passes * V.size}
    words = {name: (count, 0) for name, count in loaded.items()}
    tasks.judge_schedule(values, {"O": O}, words | {"O": (0, O.size)})


def kernel_cases(rng, numbers):
    def case(title, m, n, k, blocks=(32, 32, 16), turned=False, dtype=np.float32):
        arrays = normals(rng, dtype, a=(m, k), b=(k, n))
        sizes = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), blocks, strict=True))
        return Case(title, {**arrays, **sizes, "turned": turned})

    m, n, k = (32 + int(x) for x in rng.integers(1, 31, 3))
    return [
        case("whole blocks", 64, 32, 48),
        case("a last block of rows that is not full", m, 32, 32),
        case("a last block of columns that is not full", 32, n, 32),
        case("a last block of the sum that is not full", 32, 32, k),
        case("other strides", m, n, k, turned=True),
        case("other block sizes", m, n, k, blocks=(16, 64, 32)),
        case("smaller than a block", 5, 7, 3),
        case("float16", m, n, 8 * k, dtype=np.float16),
    ]


def limits(a, b, BLOCK_M, BLOCK_N, BLOCK_K, **_):
    """A for each column of tiles, B for each row of them."""
    rows, columns = -(-len(a) // BLOCK_M), -(-b.shape[1] // BLOCK_N)
    largest = max(BLOCK_M * BLOCK_K, BLOCK_K * BLOCK_N, BLOCK_M * BLOCK_N)
    return counted(largest, columns * a.size, rows * b.size, 0)


TASKS = (
    paper("tile", 2, ("b", "moved")),
    Task("sizes", 4, judge_sizes, sizes_cases, call="sizes"),
    paper("compare", 4, ("tiles_moved", "whole_moved", "least", "gain")),
    Task("product", 3, judge_product, product_cases, call="run_product"),
    Task("attend", 4, judge_attend, attend_cases, call="run_attend"),
    Task("kernel", 6,
         judged("c", lambda a, b, **_: [a @ b], changed=tasks.in_float32),
         kernel_cases, call="tiled_product", kernel=True, limits=limits),
)  # fmt: skip
