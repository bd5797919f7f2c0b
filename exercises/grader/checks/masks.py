"""Assignment *masks*: tiles of a window and of a mask of one's own, masks of positions
and documents, the gradient of a bias, and a kernel that reads only tiles that are seen.
"""

import math

import numpy as np

from exercises.grader import tasks
from exercises.grader.checks.gradients import of_scores
from exercises.grader.rules import AUTOGRAD, SOFTMAX
from exercises.grader.tasks import Case, Task, judged, normals, paper, windowed
from flashlib.reference import masks

# -- masks in PyTorch


def window_cases(rng, numbers):
    few, many = int(rng.integers(6, 10)), int(rng.integers(12, 18))
    a, b = tasks.whole(rng, 1, 5, 2)
    sizes = {
        "a causal window": (many, many, a + 1, 0),
        "more keys than queries": (few, many, a + 1, 0),
        "queries that see no key": (many, few, a, 0),
        "keys ahead": (few, many, a, b),
        "the query's own key": (few, many, 0, 0),
        "no end on the left": (few, many, None, b),
        "no end on the right": (few, many, a, None),
        "one query": (1, many, a, 0),
        "no end": (few, many, None, None),
    }
    names = ("T_q", "T_k", "left", "right")
    return [Case(x, dict(zip(names, size, strict=True))) for x, size in sizes.items()]


def judge_window(case, values, numbers):
    T_q, T_k, left, right = case.arguments.values()
    wanted = masks.visible(T_q, T_k, window=(left, right)).numpy()
    tasks.exact(values, 0, "the mask", wanted)


def packed_cases(rng, numbers):
    def case(title, lengths_q, lengths_k, left, right, dtype=np.int64):
        q, k = (np.cumsum([0, *x]).astype(dtype) for x in (lengths_q, lengths_k))
        window = {"left": left, "right": right}
        return Case(title, {"starts_q": q, "starts_k": k, **window})

    same = [int(n) for n in rng.integers(3, 8, 4)]
    more = [n + int(rng.integers(1, 5)) for n in same]
    left, empty = int(rng.integers(1, 3)), [0, *same, 0]
    return [
        case("causal", same, same, None, 0),
        case("a causal window", same, same, left, 0),
        case("more keys than queries", same, more, left, 0),
        case("queries that see no key", more, same, None, 0),
        case("keys ahead", same, more, left, 2),
        case("empty documents", empty, empty, None, 0),
        case("no queries, or no keys", [0, 4, 3, 0, 5], [3, 0, 4, 2, 6], left, 1),
        case("starts of 32 bits", same, more[::-1], None, None, dtype=np.int32),
    ]


def judge_packed(case, values, numbers):
    starts_q, starts_k, left, right = case.arguments.values()
    wanted = np.zeros((starts_q[-1], starts_k[-1]), dtype=np.bool_)
    for a, b, x, y in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        own = masks.visible(int(b - a), int(y - x), window=(left, right))
        wanted[a:b, x:y] = own.numpy()
    tasks.exact(values, 0, "the mask", wanted)


# -- the gradient of a bias


def bias_cases(rng, numbers):
    def case(title, *shared, sizes=None, gain=1.0, seen=None):
        """The bias has one number along the dimensions that are shared."""
        B, H, T_q, T_k = sizes or (2, 3, *tasks.whole(rng, 4, 12, 2))
        d, d_v = tasks.whole(rng, 2, 9, 2)
        whole = (B, H, T_q, T_k)
        arrays = normals(
            rng, q=(B, H, T_q, d), k=(B, H, T_k, d), v=(B, H, T_k, d_v),
            bias=[1 if n in shared else whole[n] for n in range(4)],
            do=(B, H, T_q, d_v),
        )  # fmt: skip
        arrays["q"] = (gain * arrays["q"]).astype(np.float32)
        shown = masks.visible(T_q, T_k, causal=seen == "causal").numpy()
        if seen == "blind":
            shown[1] = False
        return Case(title, {**arrays, "seen": shown, "scale": float(np.float32(0.4))})

    few, many = int(rng.integers(4, 8)), int(rng.integers(9, 14))
    return [
        case("a bias for every score"),
        case("the same for all sequences", 0),
        case("the same for all heads", 1),
        case("the same for all sequences and heads", 0, 1),
        case("a number for each key", 0, 1, 2),
        case("a number for each head and key", 0, 2),
        case("hidden keys", 0, sizes=(2, 3, few, many), seen="causal"),
        case("a query that sees no key", 0, seen="blind"),
        case("large scores", 0, gain=30.0),
        case("one sequence and one head", sizes=(1, 1, few, many)),
    ]


def bias_gradient(q, k, v, bias, do, ones, seen, scale):
    s = (scale * (q @ k.mT) + bias).masked_fill(~seen, -math.inf)
    return [of_scores(s, v, do, ones)[2].sum_to_size(bias.shape)]


# -- the kernel


def kernel_cases(rng, numbers):
    def case(title, T_q, T_k, window, d=16, d_v=None, sides=(1, 1), **options):
        arguments = tasks.heads(rng, T_q, T_k, d, d_v, sides)
        arguments |= tasks.launch(d, **{"blocks": (32, 16), **options})
        del arguments["causal"]
        return Case(title, arguments | {"left": window[0], "right": window[1]})

    short, long = 33 + int(rng.integers(0, 14)), 81 + int(rng.integers(0, 14))
    narrow, wide = int(rng.integers(5, 16)), int(rng.integers(17, 30))
    left, right = 17 + int(rng.integers(0, 14)), 3 + int(rng.integers(0, 9))
    return [
        case("whole blocks", 96, 96, (left, 0)),
        case("lengths that no block divides", long, long, (left, 0)),
        case("more keys than queries", short, long, (left, 0)),
        case("queries that see no key", long, short, (left, 0)),
        case("keys ahead", short, long, (left, right)),
        case("the query's own key", long, long, (0, 0)),
        case("no end on the left", short, long, (None, 0)),
        case("no mask", short, long, (None, None)),
        case("grouped heads", 35, 45, (left, 0), sides=(6, 2)),
        case("other block sizes", long, long, (left, right), blocks=(16, 32)),
        case("other strides", short, long, (left, 0), sides=(2, 2), turned=True),
        case("large scores", long, long, (left, 0), wide, narrow, gain=60.0),
    ]


def attention(q, k, v, left, right, scale, **_):
    options = {"window": (left, right), "scale": scale}
    return [x[0] for x in masks.attention(q[None], k[None], v[None], **options)]


TASKS = (
    paper("edges", 4, ("first", "end", "whole", "cut")),
    paper("count", 3, ("read", "masked", "pairs")),
    paper("own", 3, ("tiles_skipped", "tiles_masked", "tiles_whole")),
    Task("window", 3, judge_window, window_cases, call="visible"),
    Task("packed", 4, judge_packed, packed_cases, call="packed"),
    Task("bias", 5, judged("dB", bias_gradient, changed=tasks.with_ones), bias_cases,
         call="bias_gradient", forbidden=(*SOFTMAX, *AUTOGRAD)),
    Task("kernel", 9, judged("O L", attention), kernel_cases, call="forward",
         forbidden=SOFTMAX, kernel=True, limits=windowed),
)  # fmt: skip
