"""Assignment *decoding*: what a step reads, pages, parts of a sequence and their merge,
and a kernel that computes a part of a paged cache.
"""

import functools
import math

import numpy as np
import torch

from exercises.grader import tasks
from exercises.grader.rules import SOFTMAX
from exercises.grader.tasks import Case, Task, counted, judged, normal, padded, paper
from flashlib.reference import decoding, online

# -- rows of a cache


def in_pages(rng, sequences, p):
    """Sequences ``[H_kv, T, d]`` in pages ``[n, H_kv, p, d]``, in any order, and their
    table. All other slots are NaN, and all other entries of the table are no pages.
    """
    used = [-(-x.shape[1] // p) for x in sequences]
    order = rng.permutation(sum(used) + 3)
    heads, _, d = sequences[0].shape
    cache = np.full((len(order), heads, p, d), np.nan, sequences[0].dtype)
    table = np.full((len(used), max(used)), 10**6, np.int32)
    first = 0
    for b, x in enumerate(sequences):
        table[b, : used[b]] = order[first : first + used[b]]
        first += used[b]
        for t in range(x.shape[1]):
            cache[table[b, t // p], :, t % p] = x[:, t]
    return cache, table


def rows_cases(rng, numbers):
    def case(title, p, length, dtype=np.float32):
        H_kv, d = (int(n) for n in rng.integers(2, 6, 2))
        shapes = [(H_kv, n, d) for n in (length, 2 * p + 1)]
        cached = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
        cache, table = in_pages(rng, cached, p)
        arguments = {"pages": cache, "table": table[0], "length": length}
        return Case(title, arguments, own=cached[0])

    p, many = int(rng.integers(3, 9)), int(rng.integers(3, 7))
    return [
        case("full pages", p, many * p),
        case("a last page that is not full", p, many * p + 1),
        case("less than a page", p, p - 1),
        case("no rows", p, 0),
        case("pages of one slot", 1, many),
        case("64 bits", p, many * p - 1, dtype=np.float64),
    ]


# -- the merge


def merge_cases(rng, numbers):
    def case(title, sizes, gain=1.0, dtype=np.float32):
        H, d_v = (int(n) for n in rng.integers(3, 8, 2))
        found = []
        shift = gain * rng.standard_normal((H, 1))
        for n in sizes:
            s = torch.from_numpy(gain * rng.standard_normal((H, n)) + shift)[:, None]
            v = torch.from_numpy(rng.standard_normal((H, n, d_v)))
            found.append(online.finish(online.block(s, v)))
        o, lse = (torch.stack(x)[:, :, 0].numpy() for x in zip(*found, strict=True))
        return Case(title, {"o": o.astype(dtype), "lse": lse.astype(dtype)})

    few = [int(n) for n in rng.integers(2, 9, 3)]
    many = [int(n) for n in rng.integers(1, 9, 17)]
    return [
        case("one part", few[:1]),
        case("three parts", few),
        case("many parts", many),
        case("large log-sum-exps", few, gain=200.0),
        case("large log-sum-exps, 64 bits", few, gain=2000.0, dtype=np.float64),
        case("parts without keys", [0, *few, 0]),
        case("no keys", [0, 0, 0]),
    ]


def merged(o, lse):
    states = map(online.State, lse, torch.ones_like(lse), o)
    return online.finish(functools.reduce(online.merge, states))


# -- the kernel


def kernel_cases(rng, numbers):
    def case(
        title, lengths, parts, heads=(4, 2), p=16, d=16, d_v=16, gain=1.0, block=16,
        turned=False,
    ):  # fmt: skip
        H, H_kv = heads
        cached = [normal(rng, H_kv, n, d + d_v) for n in lengths]
        cache, table = in_pages(rng, cached, p)
        return Case(title, {
            "q": normal(rng, len(lengths), H, d),
            "k": np.ascontiguousarray(cache[..., :d]),
            "v": np.ascontiguousarray(cache[..., d:]), "table": table,
            "lengths": np.array(lengths, np.int32), "parts": parts,
            "scale": gain / math.sqrt(d), "BLOCK_K": block, "turned": turned,
        })  # fmt: skip

    few, many = 5 + int(rng.integers(0, 10)), 65 + int(rng.integers(0, 30))
    middle = 33 + int(rng.integers(0, 10))
    narrow, wide = int(rng.integers(5, 16)), int(rng.integers(17, 30))
    return [
        case("one part, full pages", [64], 1),
        case("parts of full blocks", [96], 3),
        case("a last page that is not full", [many], 3),
        case("sequences of different lengths", [middle, many, few], 3),
        case("parts without keys", [few, middle], 6),
        case("a sequence without keys", [middle, 0], 2),
        case("grouped heads", [middle], 2, heads=(6, 2)),
        case("a head of keys for each query", [middle], 2, heads=(3, 3)),
        case("small pages", [few, middle], 2, p=4),
        case("pages that are no power of two", [middle], 2, p=12, block=32),
        case("large pages", [many], 2, p=128),
        case("other strides", [middle, few], 3, d_v=wide, turned=True),
        case("large scores", [many], 2, d=wide, d_v=narrow, gain=60.0),
    ]


def limits(q, k, v, lengths, parts, BLOCK_K, **_):
    """Each key and value once for a group of heads; Q and lengths for each block."""
    H_kv, d, d_v = k.shape[1], k.shape[3], v.shape[3]
    keys, rows = H_kv * int(lengths.sum()), max(BLOCK_K, padded(q.shape[1] // H_kv))
    tiles = sum(parts - (-int(n) // BLOCK_K) for n in lengths)  # and one without keys
    pages = 2 * keys  # of each key, for K and for V
    loaded = tiles * q.shape[1] * d, keys * d, keys * d_v, pages, 4 * H_kv * tiles
    return counted(rows * max(padded(d), padded(d_v)), *loaded, 0, 0)


def of_parts(q, k, v, table, lengths, parts, scale, BLOCK_K, **_):
    found = []
    for b, n in enumerate(lengths.tolist()):
        own = (decoding.rows(x, b, n, table)[None] for x in (k, v))
        query, rule = q[b, None, :, None], {"block_size": BLOCK_K, "scale": scale}
        listed = decoding.parts(query, *own, parts, **rule)
        both = (torch.stack(x, dim=2) for x in zip(*listed, strict=True))
        found.append([x[0, :, :, 0] for x in both])
    return [torch.stack(x) for x in zip(*found, strict=True)]


TASKS = (
    paper("bytes", 4, ("cache", "microseconds", "intensity", "queries")),
    paper("pages", 3, ("held", "empty", "shared")),
    paper("parts", 2, ("parts", "share", "idle", "last")),
    Task("rows", 3,
         lambda case, values, _: tasks.exact(values, 0, "the rows", case.own),
         rows_cases, call="rows"),
    Task("merge", 4, judged("o lse", merged), merge_cases, call="merge",
         forbidden=SOFTMAX, kept=True),
    Task("kernel", 9, judged("O L", of_parts), kernel_cases, call="forward",
         forbidden=SOFTMAX, kernel=True, limits=limits),
)  # fmt: skip
