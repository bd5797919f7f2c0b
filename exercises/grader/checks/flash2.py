"""Assignment *flash2*: the update rules, the causal band, and attention with the
queries outside.
"""

import math

import numpy as np
import torch

from exercises.grader.rules import SOFTMAX, SOFTMAX_OPERATIONS
from exercises.grader.tasks import (
    Case,
    Task,
    Wrong,
    attention,
    counted,
    many_keys,
    padded,
    paper,
)
from flashlib.iomodel.flash1 import algorithm_4
from flashlib.iomodel.flash2 import flash2_forward
from flashlib.iomodel.forms import block_count


def state(numbers):
    scores, old = (
        np.array([numbers["m"], numbers["x"]]),
        np.array([numbers["n0"], numbers["n1"]]),
    )
    weights = np.exp(scores - scores.max()) * [1.0, 1.0]
    l = float(weights @ [numbers["l"], 1.0])
    n0, n1 = weights[0] * old + weights[1] * np.array([numbers["v0"], numbers["v1"]])
    return (
        int(scores.max()),
        l,
        float(n0),
        float(n1),
        float(n1) / l,
        float(scores.max()) + math.log(l),
    )


def traffic(numbers):
    T, d, B, heads = (numbers[name] for name in ("T", "d", "B", "heads"))
    words = algorithm_4.words(T, d, B), flash2_forward.words(T, d, B)
    return *words, heads, heads * block_count(T, B)


def band(numbers):
    """By looking at every pair of a query and a place."""
    T_q, T_k, B_r, B_c = (numbers[name] for name in ("T_q", "T_k", "B_r", "B_c"))
    places = -(-T_k // B_c) * B_c
    i, j = np.arange(T_q)[:, None], np.arange(places)[None, :]
    sees = (j < T_k) & (j <= i + T_k - T_q)
    tiles = [
        sees[row : row + B_r, start : start + B_c]
        for row in range(0, T_q, B_r)
        for start in range(0, places, B_c)
    ]
    return sum(bool(x.any()) for x in tiles), sum(
        bool(x.any() and not x.all()) for x in tiles
    )


def tiled_cases(rng, numbers):
    def case(title, T_q, T_k, causal=False, gain=1.0, blocks=(16, 16)):
        d, d_v = (int(x) for x in rng.integers(4, 9, 2))
        arrays = {
            "q": rng.standard_normal((T_q, d)),
            "k": rng.standard_normal((T_k, d)),
        }
        arrays["v"] = rng.standard_normal((T_k, d_v))
        arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
        sizes = {"B_r": blocks[0], "B_c": blocks[1]}
        return Case(
            title, {**arrays, "causal": causal, "scale": gain / math.sqrt(d), **sizes}
        )

    short, long = 40 + int(rng.integers(1, 16)), 80 + int(rng.integers(1, 16))
    return [
        case("blocks that divide the lengths", 64, 64),
        case(
            "blocks that do not divide them", 160 + long, 160 + short, blocks=(16, 12)
        ),
        case("large scores", short, long, gain=60.0),
        case("causal", long, long, causal=True),
        case(
            "causal, more keys than queries", short, long, causal=True, blocks=(12, 16)
        ),
        case("causal, queries that see no key", long, short, causal=True),
    ]


def judge_tiled(case, values, numbers):
    q, k, v = (torch.from_numpy(case.arguments[name]) for name in "qkv")
    heads = [x[None] if isinstance(x, np.ndarray) else x for x in values]
    options = {name: case.arguments[name] for name in ("causal", "scale")}
    attention(heads, q[None], k[None], v[None], **options)
    room = max(len(q), len(k)) * max(q.shape[1], v.shape[1])
    if values[2] > room:
        raise Wrong(
            f"{values[2]} numbers were held at once (see the launcher), and the largest of Q, K, V and O has {room}"
        )


def tiled_limits(arguments):
    """Once, and once for the normalizer, in each block of queries."""
    return {"divisions": 2 * -(-len(arguments["q"]) // arguments["B_r"])}


def kernel_cases(rng, numbers):
    def case(
        title,
        T_q,
        T_k,
        d=16,
        d_v=16,
        causal=False,
        gain=1.0,
        blocks=(32, 32),
        heads=(1, 1),
        **options,
    ):
        H, H_kv = heads
        shapes = {"q": (H, T_q, d), "k": (H_kv, T_k, d), "v": (H_kv, T_k, d_v)}
        arrays = {
            name: rng.standard_normal(shape).astype(np.float32)
            for name, shape in shapes.items()
        }
        sizes = {"BLOCK_Q": blocks[0], "BLOCK_K": blocks[1]}
        return Case(
            title,
            {
                **arrays,
                "causal": causal,
                "scale": gain / math.sqrt(d),
                **sizes,
                **options,
            },
        )

    short, long = 33 + int(rng.integers(0, 20)), 70 + int(rng.integers(0, 20))
    narrow, wide = int(rng.integers(5, 16)), int(rng.integers(17, 30))
    unread = case(UNREAD, 96, 96, causal=True)
    for name in "kv":
        unread.arguments[name][:, 64:] = np.nan
    return [
        case("whole blocks", 64, 64),
        many_keys(case("lengths that no block divides", short, long)),
        case("values of another width", short, short, d=wide, d_v=narrow),
        case("large scores", short, long, gain=60.0),
        case("grouped heads", 35, 35, heads=(6, 2)),
        case("causal", long, long, causal=True),
        case("causal, more keys than queries", short, long, causal=True),
        case("causal, queries that see no key", long, short, causal=True),
        case("other block sizes", short, long, causal=True, blocks=(16, 64)),
        case("other strides", short, long, heads=(2, 2), turned=True),
        unread,
    ]


def limits(arguments):
    """One block at a time: Q once for each block of keys, K and V for each block of queries,
    which divides at the end.
    """
    q, k, v = (arguments[name] for name in "qkv")
    rows, keys = (
        -(-q.shape[1] // arguments["BLOCK_Q"]),
        -(-k.shape[1] // arguments["BLOCK_K"]),
    )
    width = max(padded(q.shape[2]), padded(v.shape[2]))
    largest = max(arguments["BLOCK_Q"], arguments["BLOCK_K"]) * width
    group = len(q) // len(k)
    loaded = keys * q.size, group * rows * k.size, group * rows * v.size, 0, 0
    return counted(largest, *loaded) | {"divisions": 2 * len(q) * rows}


# With blocks of 32 the first 64 queries see nothing of the last block of keys, which
# holds no numbers.
UNREAD = "a block of keys that must not be read"


def judge_kernel(case, values, numbers):
    q, k, v = (torch.from_numpy(case.arguments[name]) for name in "qkv")
    if case.title == UNREAD:
        q, k, v = (x[:, :64] for x in (q, k, v))
        values = [
            x[:, :64] if isinstance(x, np.ndarray) and x.ndim > 1 else x for x in values
        ]
    options = {name: case.arguments[name] for name in ("causal", "scale")}
    attention(values, q, k, v, **options)


TASKS = (
    paper("state", 3, ("m_new", "l_new", "n0_new", "n1_new", "o1", "L"), state),
    paper("traffic", 2, ("keys_outside", "queries_outside", "programs_before", "programs_now"), traffic),
    paper("band", 3, ("read", "masked"), band),
    Task("tiled", 5, judge_tiled, tiled_cases, call="run_tiled", forbidden=("Largest", *SOFTMAX),
         operations=SOFTMAX_OPERATIONS, limits=tiled_limits),
    Task("kernel", 9, judge_kernel, kernel_cases, call="forward", forbidden=SOFTMAX, kernel=True, limits=limits),
)  # fmt: skip
