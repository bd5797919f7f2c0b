"""Assignment *backward*: one entry, words, blocks, gradients tile by tile from L."""

import math

import numpy as np
import torch

from exercises.grader import tasks
from exercises.grader.rules import AUTOGRAD, HELD, SOFTMAX
from exercises.grader.tasks import Case, Task, counted, heads, judged, padded, paper
from flashlib.reference import gradients, online

# -- arrays


def problem(rng, sides, T_q, T_k, d, d_v, causal, scale):
    """The arguments of a backward pass, with o and lse of its forward pass."""
    arrays = heads(rng, T_q, T_k, d, d_v, sides)
    arrays |= tasks.normals(rng, do=(sides[0], T_q, d_v))
    options = {"causal": causal, "scale": scale}
    given = (torch.from_numpy(arrays[name]).double() for name in "qkv")
    o, lse = (x.float().numpy() for x in tasks.attention(*given, **options))
    return arrays | {"o": o, "lse": lse} | options


def tile_cases(rng, numbers):
    def case(title, T_q, T_k, row, col, B_r=6, B_c=8, causal=False, gain=1.0):
        d, d_v = tasks.whole(rng, 3, 9, 2)
        given = problem(rng, (1, 1), T_q, T_k, d, d_v, causal, gain / math.sqrt(d))
        rows, keys = slice(row, row + B_r), slice(col, col + B_c)
        names = ("q", "k", "v", "o", "do", "lse")
        arguments = {x: given[x][0, keys if x in "kv" else rows] for x in names}
        arguments |= {"row": row, "col": col, "shift": T_k - T_q}
        return Case(title, arguments | {x: given[x] for x in ("causal", "scale")})

    few, many = int(rng.integers(20, 26)), int(rng.integers(30, 36))
    blind = many - few - 3
    return [
        case("a tile without a mask", many, many, 6, 8),
        case("the last, smaller tile", few, many, 18, 24),
        case("large scores", few, many, 6, 16, gain=40.0),
        case("causal, on the diagonal", many, many, 12, 8, causal=True),
        case("causal, more keys", few, many, 6, 8, causal=True),
        case("causal, queries that see no key", many, few, blind, 0, causal=True),
        case("causal, nothing is seen", many, many, 0, 8, causal=True),
    ]


def tile(q, k, v, o, do, lse, row, col, shift, causal, scale):
    i, j = row + torch.arange(q.shape[-2]), col + torch.arange(k.shape[-2])
    unseen = (j[None, :] > i[:, None] + shift) & causal
    p = online.weight(scale * (q @ k.mT), lse[..., None]).masked_fill(unseen, 0.0)
    delta = gradients.row_dot(do, o)
    return p, delta, gradients.d_scores(p, do @ v.mT, delta)


def three_gradients(q, k, v, do, o, lse, causal, scale, **_):
    """The gradients in the shapes of q, k and v, with or without heads.

    O and L are inputs as they are for the student, rounded: where P is 1 for one key,
    dS is the difference of two float32 sums, and what is left of it is their rounding.
    """
    group = len(q) // len(k) if q.ndim == 3 else 1
    keys, values = (x.repeat_interleave(group, dim=0) for x in (k, v))
    shift = k.shape[-2] - q.shape[-2]
    p, _, ds = tile(q, keys, values, o, do, lse, 0, 0, shift, causal, scale)
    of_heads = gradients.d_keys(ds, q, scale), gradients.d_values(p, do)
    dk, dv = (x.unflatten(0, (-1, group)).sum(dim=1) for x in of_heads)
    return scale * (ds @ keys), dk, dv


def tiled_cases(rng, numbers):
    def case(title, T_q, T_k, causal=False, gain=1.0, blocks=(24, 24)):
        d, d_v = (int(x) for x in rng.permutation([3, 4]))  # fewer than rows of a strip
        given = problem(rng, (1, 1), T_q, T_k, d, d_v, causal, gain / math.sqrt(d))
        given |= {n: x[0] for n, x in given.items() if isinstance(x, np.ndarray)}
        return Case(title, given | {"B_r": blocks[0], "B_c": blocks[1]})

    # So long that a matrix of scores needs more than OWN_BYTES, and in the second case
    # strips of P and dS, too. No block divides these lengths.
    short, long = (n + int(rng.integers(0, 7)) for n in (265, 289))
    return [
        case("blocks that divide the lengths", 288, 288),
        case("blocks that do not divide them", 240 + short, short, blocks=(8, 128)),
        case("large scores", short, long, gain=40.0),
        case("causal", long, long, causal=True),
        case("causal, more keys than queries", short, long, True, blocks=(20, 28)),
        case("causal, queries that see no key", long, short, causal=True),
    ]


def limits(q, k, v, causal, BLOCK_Q, BLOCK_K, **_):
    """One block at a time: K and V once, other rows for each block of keys they see."""
    (H, T_q, d), T_k, d_v, rows = q.shape, k.shape[1], v.shape[2], 0
    for col in range(0, T_k, BLOCK_K):
        first = max(col - T_k + T_q, 0) if causal else 0
        rows += H * max(T_q - first // BLOCK_Q * BLOCK_Q, 0)
    largest, group = max(BLOCK_Q, BLOCK_K) * max(padded(d), padded(d_v)), H // len(k)
    loaded = rows * d, group * k.size, group * v.size, rows * d_v, rows, rows
    return counted(largest, *loaded, 0, 0)


def kernel_cases(rng, numbers):
    def case(title, T_q, T_k, d=16, d_v=16, sides=(1, 1), **options):
        more = tasks.launch(d, **options)
        given = problem(rng, sides, T_q, T_k, d, d_v, more["causal"], more["scale"])
        return Case(title, given | more)

    return tasks.attention_cases(case, rng)


TASKS = (
    paper("entry", 3, ("p", "ds", "dv1", "dk0", "dq1")),
    paper("words", 3, ("step_queries", "step_keys", "words_queries", "words_keys",
          "resident", "largest")),
    paper("starts", 3, ("blind", "start", "full")),
    Task("tile", 4, judged("P D dS", tile, zeros="P dS"), tile_cases, call="tile",
         forbidden=(*AUTOGRAD, *SOFTMAX)),
    Task("tiled", 6, judged("dq dk dv", three_gradients, zeros="dq dk dv",
                            also=tasks.held("q", "k", "v", "o")),
         tiled_cases, call="run_tiled", forbidden=(*HELD, *AUTOGRAD, *SOFTMAX)),
    Task("kernel", 9,
         judged("dk dv", lambda **given: three_gradients(**given)[1:], zeros="dk dv"),
         kernel_cases, call="of_keys", forbidden=SOFTMAX, kernel=True, limits=limits),
)  # fmt: skip
