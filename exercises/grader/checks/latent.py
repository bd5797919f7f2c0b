"""Assignment *latent*: what a cache of latents holds, when to absorb, queries that have
absorbed the weights, and a kernel that reads one row for all heads.
"""

import math

import numpy as np
import torch

from exercises.grader.rules import SOFTMAX
from exercises.grader.tasks import Case, Task, counted, judged, normal, padded, paper
from flashlib.reference import standard

# -- in PyTorch


def absorb_cases(rng, numbers):
    def case(title, H, T_q, d_c, d_n, d_r, dtype=np.float32):
        q = normal(rng, H, T_q, d_n + d_r, dtype=dtype)
        return Case(title, {"q": q, "w_k": normal(rng, H, d_c, d_n, dtype=dtype)})

    a, b, c = (int(n) for n in rng.integers(3, 9, 3))
    return [
        case("one head", 1, a, 2 * b, c, b),
        case("some heads", a, b, 2 * b + 1, c, 4),
        case("one query", a, 1, 3 * c, b, 2),
        case("64 bits", b, a, 2 * a, c, 6, dtype=np.float64),
    ]


def absorbed(q, w_k):
    d_n = w_k.shape[2]
    whole = torch.einsum("hin,hcn->hic", q[..., :d_n], w_k)
    return (torch.cat([whole, q[..., d_n:]], dim=-1),)


def attend_cases(rng, numbers):
    def case(title, H, T_q, T_k, d_c, d_r, d_v, gain=1.0, dtype=np.float32):
        return Case(title, {
            "q": gain * normal(rng, H, T_q, d_c + d_r, dtype=dtype),
            "rows": normal(rng, T_k, d_c + d_r, dtype=dtype),
            "w_v": normal(rng, H, d_c, d_v, dtype=dtype),
            "scale": 0.5 / math.sqrt(d_c),
        })  # fmt: skip

    a, b, c = (int(n) for n in rng.integers(3, 9, 3))
    return [
        case("one query", a, 1, 2 * b, 9, 4, c),
        case("several queries", b, 3, c + 5, 8, 2, a),
        case("as many queries as rows", 2, c, c, 7, 3, b),
        case("wide values", 2, 2, c + 3, 5, 2, 11),
        case("large scores", a, 2, b + 9, 12, 4, c, gain=300.0),
        case("64 bits", a, 2, b + 4, 6, 4, c, dtype=np.float64),
    ]


def attended(q, rows, w_v, scale):
    d_c = w_v.shape[1]
    o, _ = standard.attention(
        q[None], rows[None, None], rows[None, None, :, :d_c], causal=True, scale=scale
    )
    return (o[0] @ w_v,)


# -- the kernel


def kernel_cases(rng, numbers):
    def case(title, H, T, d_c=32, d_r=16, gain=1.0, turned=False, blocks=(16, 16)):
        return Case(title, {
            "q": gain * normal(rng, H, d_c + d_r), "rows": normal(rng, T, d_c + d_r),
            "d_c": d_c, "scale": 1.0 / math.sqrt(d_c + d_r), "BLOCK_H": blocks[0],
            "BLOCK_K": blocks[1], "turned": turned,
        })  # fmt: skip

    few, many = 3 + int(rng.integers(0, 10)), 65 + int(rng.integers(0, 30))
    wide, narrow = 33 + int(rng.integers(0, 30)), 17 + int(rng.integers(0, 12))
    return [
        case("one block of rows", 16, 16),
        case("some blocks of rows", 16, 64),
        case("a last block that is not full", 16, many),
        case("fewer rows than a block", 16, few),
        case("heads that do not fill a tile", few, many),
        case("several tiles of heads", 32 + few, 48),
        case("widths that are no power of two", few, 40, d_c=wide, d_r=narrow),
        case("few rotary columns", few, 40, d_c=wide, d_r=few),
        case("other strides", 20, 48, turned=True),
        case("other blocks", 40, many, blocks=(32, 64)),
        case("large scores", 16, many, gain=60.0),
    ]


def limits(q, rows, d_c, BLOCK_H, BLOCK_K, **_):
    """Each row once for a tile of heads, whatever its two uses."""
    H, width = q.shape
    largest = max(BLOCK_H, BLOCK_K) * max(padded(d_c), padded(width - d_c))
    tiles = -(-H // BLOCK_H)
    return counted(largest, H * width, tiles * len(rows) * width, 0, 0)


def decoded(q, rows, d_c, scale, **_):
    keys = rows[None, None]
    o, lse = standard.attention(q[None, :, None], keys, keys[..., :d_c], scale=scale)
    return o[0, :, 0], lse[0, :, 0]


TASKS = (
    paper("cache", 4, ("latent", "gigabytes", "smaller", "intensity")),
    paper("crossing", 4, ("expanded", "absorbed", "queries", "limit")),
    Task("absorb", 2, judged("Q", absorbed), absorb_cases, call="absorb",
         kept=True),
    Task("attend", 3, judged("O", attended), attend_cases, call="attend",
         forbidden=SOFTMAX, kept=True),
    Task("kernel", 9, judged("O L", decoded), kernel_cases, call="forward",
         forbidden=SOFTMAX, kernel=True, limits=limits),
)  # fmt: skip
