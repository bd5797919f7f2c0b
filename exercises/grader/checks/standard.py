"""Assignment *standard*: three steps by hand, in PyTorch, and as three kernels."""

import math

import numpy as np
import torch

from exercises.grader import tasks
from exercises.grader.rules import SOFTMAX
from exercises.grader.tasks import Case, Task, counted, hidden, judged, padded, paper
from flashlib.reference import standard as reference

# -- PyTorch


def softmax(s, **_):
    return reference.softmax(s[None, None])[0, 0], torch.logsumexp(s, dim=-1)


def softmax_cases(rng, numbers):
    def case(title, change=lambda s: s):
        T_q, T_k = (int(n) for n in rng.integers(3, 12, 2))
        s = change(rng.standard_normal((T_q, T_k)))
        return Case(title, {"s": s.astype(np.float32)})

    return [
        case("small scores"),
        case("large scores", lambda s: 400 * s),
        case("large negative scores", lambda s: s - 3000),
        case("hidden keys", lambda s: hidden(s, column=2)),
        case("a row that sees nothing", lambda s: hidden(s, row=1)),
    ]


def heads_cases(rng, numbers):
    def case(title, own, extra=0):
        T, H, d = tasks.whole(rng, 2, 9, 3)
        arrays = tasks.normals(rng, x=(T, H * d), o=(H, T, d))
        return Case(title, {**arrays, "H": H, "extra": extra}, own)

    return [
        case("the heads", "heads"),
        case("the heads of a matrix with gaps between its rows", "heads", extra=3),
        case("no copy", "memory", extra=3),
        case("heads joined", "joined"),
    ]


def judge_heads(case, values, numbers):
    if values[3:] != [True]:
        raise tasks.Wrong("x or o is not what it was before")
    x, o, H, _ = case.arguments.values()
    if case.own == "joined":
        tasks.exact(values, 2, "join_heads(o)", np.concatenate(list(o), axis=1))
    else:
        tasks.exact(values, 0, "split_heads(x, H)", np.stack(np.split(x, H, axis=1)))
    if case.own == "memory" and values[1] is not True:
        raise tasks.Wrong("split_heads(x, H) is a copy of x, not in its memory")


# -- kernels


def scores_cases(rng, numbers):
    def case(title, T_q, T_k, d=16, **options):
        scale = float(np.float32(rng.uniform(0.1, 0.9)))
        arrays = tasks.normals(rng, q=(T_q, d), k=(T_k, d))
        return Case(title, {**arrays, "scale": scale, **options})

    # The longer side is larger than any tile that a kernel might hold at once.
    few, many = int(rng.integers(17, 31)), int(rng.integers(129, 143))
    d, extra = int(rng.integers(17, 31)), int(rng.integers(1, 5))
    other = {"extra": extra, "BLOCK_Q": 32, "BLOCK_K": 16}
    return [
        case("whole blocks", 32, 64),
        case("lengths that no block divides", few, many, d),
        case("rows with gaps between them, other blocks", many, few, d, **other),
        case("causal, as many queries as keys", many, many, causal=True),
        case("causal, more keys", few, many, d, causal=True),
        case("causal, more queries", many, few, causal=True, extra=2),
    ]


def scores_limits(q, k, BLOCK_Q=16, BLOCK_K=32, **_):
    """Q for each column of tiles, K for each row of them."""
    rows, columns = -(-len(q) // BLOCK_Q), -(-len(k) // BLOCK_K)
    largest = max(BLOCK_Q * BLOCK_K, max(BLOCK_Q, BLOCK_K) * padded(q.shape[1]))
    return counted(largest, columns * q.size, rows * k.size, 0)


def scores(q, k, scale, causal=False, **_):
    unseen = ~reference.causal_mask(len(q), len(k)) & causal
    return ((scale * (q @ k.mT)).masked_fill(unseen, -math.inf),)


def rows_cases(rng, numbers):
    def case(title, T_k, gain=1.0, blind=(), hidden=0, **options):
        s = gain * tasks.normal(rng, int(rng.integers(2, 5)), T_k)
        s[:, :hidden] = -np.inf
        s[list(blind)] = -np.inf
        return Case(title, {"s": s, **options})

    ragged = 32 * int(rng.integers(8, 12)) + int(rng.integers(3, 31))
    return [
        case("whole blocks", 64),
        case("a length that no block divides", ragged, extra=int(rng.integers(1, 5))),
        case("shorter than a block", int(rng.integers(2, 15))),
        case("large scores", ragged, gain=300.0, BLOCK=16),
        case("a block of hidden keys", ragged, hidden=33),
        case("a row that sees nothing", ragged, blind=(1,)),
    ]


def rows_limits(s, BLOCK=32, **_):
    """Three passes, a block at a time; p may be read again."""
    return counted(BLOCK, 3 * s.size, 2 * s.size, len(s))


def output_cases(rng, numbers):
    def case(title, T_q, T_k, d_v=16, **options):
        p = rng.random((T_q, T_k))
        p = (p / p.sum(axis=1, keepdims=True)).astype(np.float32)
        return Case(title, {"p": p, "v": tasks.normal(rng, T_k, d_v), **options})

    few, many = int(rng.integers(17, 31)), int(rng.integers(129, 143))
    d_v, other = int(rng.integers(17, 31)), {"extra": 3, "BLOCK_Q": 32, "BLOCK_K": 16}
    return [
        case("whole blocks", 32, 64),
        case("queries that no block divides", few, 64),
        case("keys that no block divides", 32, many),
        case("values of another width", 16, 64, d_v),
        case("rows with gaps between them, other blocks", few, many, d_v, **other),
    ]


def output_limits(p, v, BLOCK_Q=16, BLOCK_K=32, **_):
    """P once, V for each block of queries."""
    largest = max(BLOCK_Q * BLOCK_K, max(BLOCK_Q, BLOCK_K) * padded(v.shape[1]))
    return counted(largest, p.size, -(-len(p) // BLOCK_Q) * v.size, 0)


TASKS = (
    paper("hand", 3, ("p", "o", "lse")),
    paper("costs", 4, ("score_operations", "words_between", "ratio", "longest")),
    Task("softmax", 4, judged("p lse", softmax, zeros="p"), softmax_cases,
         call="rows_softmax", forbidden=SOFTMAX),
    Task("heads", 4, judge_heads, heads_cases, call="there_and_back"),
    Task("scores", 6, judged("S", scores), scores_cases, call="scores", kernel=True,
         limits=scores_limits),
    Task("rows", 6, judged("p lse", softmax, zeros="p"), rows_cases,
         call="probabilities", forbidden=("softmax",), kernel=True, limits=rows_limits),
    Task("output", 5, judged("O", lambda p, v, **_: [p @ v]), output_cases,
         call="output", kernel=True, limits=output_limits),
)  # fmt: skip
