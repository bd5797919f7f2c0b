"""Assignment *fp8*: rounding to four significant bits, a cache in eight bits, scales
of blocks, weights with an exponent, and a kernel that reads such a cache.
"""

import math

import numpy as np
import torch

from exercises.grader.rules import SOFTMAX
from exercises.grader.tasks import Case, Task, counted, judged, normal, padded, paper
from flashlib.reference import fp8, standard

# -- in PyTorch: in float64, where no other order of operations rounds differently


def quantize_cases(rng, numbers):
    def case(title, T, d, block, spread=0.0, zeros=None):
        x = normal(rng, T, d, dtype=np.float64)
        x *= 10.0 ** (spread * np.linspace(-1.0, 1.0, T))[:, None]
        if zeros is not None:
            x[zeros] = 0.0
        return Case(title, {"x": x, "block": block})

    a, b, c = (int(n) for n in rng.integers(3, 9, 3))
    return [
        case("one block", a, b, a),
        case("whole blocks", 3 * a, c, a),
        case("a last block with fewer rows", 3 * a + 1, b, a),
        case("a scale for each row", b, c, 1),
        case("blocks of very different sizes", 6 * a, c, a, spread=6.0),
        case("a block of zeros", 4 * c, b, c, zeros=slice(c, 2 * c)),
    ]


def quantized(x, block):
    found = fp8.quantize(x[None, None], block)
    return found.values[0, 0], found.scales[0, 0, ::block, 0]


def attend_cases(rng, numbers):
    def case(title, T_q, T_k, d, d_v, exponent, gain=1.0, shift=0.0):
        q, k, v = (
            normal(rng, *shape, dtype=np.float64)
            for shape in ((T_q, d), (T_k, d), (T_k, d_v))
        )
        arrays = {"q": gain * q, "k": k, "v": v + shift}
        return Case(title, {**arrays, "exponent": exponent})

    a, b, c = (int(n) for n in rng.integers(3, 9, 3))
    return [
        case("some queries", a, 5 * b, 8, c, 8),
        case("one query", 1, 4 * c, 6, a, 8),
        case("no exponent", b, 6 * a, 8, c, 0, gain=3.0),
        case("another exponent", b, 6 * a, 8, c, a, gain=2.0),
        case("values far from zero", a, 5 * b, 8, c, 8, shift=20.0),
        case("large scores", a, 9 * b, 12, c, 8, gain=300.0),
    ]


def attended(q, k, v, exponent):
    s = q @ k.mT / math.sqrt(q.shape[1])
    m = s.amax(dim=1, keepdim=True)
    p = fp8.rounded(torch.exp(s - m) * 2.0**exponent)
    l = p.sum(dim=1)
    return (p / l[:, None]) @ v, m[:, 0] + torch.log(l / 2.0**exponent)


# -- the kernel


def kernel_cases(rng, numbers):
    def rows(T, d, spread):
        """Numbers of E4M3 and scales of rows, as a cache in eight bits holds them."""
        x = torch.from_numpy(normal(rng, T, d))
        x = x * 10.0 ** torch.linspace(-spread, spread, T)[:, None]
        values, scales = (y[0, 0].numpy() for y in fp8.quantize(x[None, None], 1))
        return values, scales[:, 0].copy()

    def case(title, H, T, d=32, d_v=32, gain=1.0, turned=False, blocks=(16, 16),
             spread=0.0):  # fmt: skip
        (k, k_scales), (v, v_scales) = rows(T, d, 0.2 * spread), rows(T, d_v, spread)
        return Case(title, {
            "q": gain * normal(rng, H, d), "k": k, "k_scales": k_scales, "v": v,
            "v_scales": v_scales, "scale": 1.0 / math.sqrt(d), "BLOCK_H": blocks[0],
            "BLOCK_K": blocks[1], "turned": turned,
        })  # fmt: skip

    few, many = 3 + int(rng.integers(0, 10)), 65 + int(rng.integers(0, 30))
    wide, narrow = 33 + int(rng.integers(0, 30)), 17 + int(rng.integers(0, 12))
    return [
        case("one block of keys", 16, 16),
        case("some blocks of keys", 16, 64),
        case("a last block that is not full", 16, many),
        case("fewer keys than a block", 16, few),
        case("heads that do not fill a tile", few, many),
        case("several tiles of heads", 32 + few, 48),
        case("widths that are no power of two", few, 40, d=wide, d_v=narrow),
        case("rows of different sizes", few, 40, spread=1.0),
        case("other strides", 20, 48, turned=True),
        case("other blocks", 40, many, blocks=(32, 64)),
        case("large scores", 16, many, gain=60.0),
    ]


def limits(q, k, v, BLOCK_H, BLOCK_K, **_):
    """Each number of the cache once for a tile of heads."""
    (H, d), (T, d_v) = q.shape, v.shape
    tiles = -(-H // BLOCK_H)
    largest = max(BLOCK_H, BLOCK_K) * max(padded(d), padded(d_v))
    loads = H * d, tiles * k.size, tiles * T, tiles * v.size, tiles * T
    return counted(largest, *loads, 0, 0)


def decoded(q, k, k_scales, v, v_scales, scale, **_):
    k, v = k * k_scales[:, None], v * v_scales[:, None]
    o, lse = standard.attention(
        q[None, :, None], k[None, None], v[None, None], scale=scale
    )
    return o[0, :, 0], lse[0, :, 0]


TASKS = (
    paper("rounding", 4, ("a8", "b8", "error", "bound")),
    paper("cache", 4, ("token", "gigabytes", "smaller", "least")),
    Task("quantize", 3, judged("values scales", quantized), quantize_cases,
         call="quantize", kept=True),
    Task("attend", 4, judged("O L", attended), attend_cases, call="attend",
         forbidden=SOFTMAX, kept=True),
    Task("kernel", 9, judged("O L", decoded), kernel_cases, call="forward",
         forbidden=SOFTMAX, kernel=True, limits=limits),
)  # fmt: skip
