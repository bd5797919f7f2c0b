"""Assignment *backward*: one entry, words and blocks, and the gradients tile by tile
from L.
"""

import math

import numpy as np
import torch

from exercises.grader.rules import (
    AUTOGRAD,
    AUTOGRAD_OPERATIONS,
    SOFTMAX,
    SOFTMAX_OPERATIONS,
)
from exercises.grader.tasks import Case, Task, Wrong, counted, padded, paper, tensor
from flashlib.exercise import assert_agrees
from flashlib.iomodel.backward import algorithm_6, algorithm_8
from flashlib.reference import gradients, standard

# -- numbers


def entry(numbers):
    q, k, v, do = (np.array([numbers[x + "0"], numbers[x + "1"]]) for x in "qkvg")
    p = math.exp(numbers["c"] * int(q @ k) - numbers["L"])
    ds = p * (int(do @ v) - numbers["D"])
    dv, dk, dq = p * do, numbers["c"] * ds * q, numbers["c"] * ds * k
    return p, ds, float(dv[1]), float(dk[0]), float(dq[1])


def words(numbers):
    T, d, B_r, B_c, M = (numbers[name] for name in ("T", "d", "B_r", "B_c", "M"))
    fits = (B for B in range(1, M) if algorithm_8.peak(M, d, B, B) > M)
    return (
        sum(algorithm_6.step(d, B_c)),
        sum(algorithm_8.step(d, B_r)),
        algorithm_6.words(T, d, B_r),
        algorithm_8.words(T, d, B_c),
        algorithm_8.peak(T, d, B_r, B_c),
        next(fits) - 1,
    )


def starts(numbers):
    """By looking at every pair of a query and a key of the block."""
    T_q, T_k, col, B_r, B_c = (
        numbers[name] for name in ("T_q", "T_k", "col", "B_r", "B_c")
    )
    sees = standard.causal_mask(T_q, T_k).numpy()
    block = sees[:, col : col + B_c]
    rows = range(0, T_q, B_r)
    start = next(row for row in rows if block[row : row + B_r].any())
    full = next(row for row in rows if block[row : row + B_r].all())
    return int((~sees.any(axis=1)).sum()), start, full


# -- arrays


def problem(rng, heads, T_q, T_k, d, d_v, causal, gain=1.0):
    """{name: array} and the options of a backward pass, with o and lse as a forward
    pass leaves them.
    """
    H, H_kv = heads
    shapes = {
        "q": (H, T_q, d),
        "k": (H_kv, T_k, d),
        "v": (H_kv, T_k, d_v),
        "do": (H, T_q, d_v),
    }
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    options = {"causal": causal, "scale": gain / math.sqrt(d)}
    q, k, v = (torch.from_numpy(arrays[name]).double()[None] for name in "qkv")
    o, lse = standard.attention(q, k, v, **options)
    return arrays | {"o": o[0].float().numpy(), "lse": lse[0].float().numpy()} | options


def tile_cases(rng, numbers):
    def case(title, T_q, T_k, row, col, B_r=6, B_c=8, causal=False, gain=1.0):
        d, d_v = (int(x) for x in rng.choice(np.arange(3, 9), 2, replace=False))
        whole = problem(rng, (1, 1), T_q, T_k, d, d_v, causal, gain)
        rows, columns = slice(row, row + B_r), slice(col, col + B_c)
        arguments = {
            name: whole[name][0, columns if name in "kv" else rows]
            for name in ("q", "k", "v", "o", "do", "lse")
        }
        places = {"row": row, "col": col, "shift": T_k - T_q}
        return Case(
            title, arguments | places | {"causal": causal, "scale": whole["scale"]}
        )

    few, many = int(rng.integers(20, 26)), int(rng.integers(30, 36))
    return [
        case("a tile without a mask", many, many, 6, 8),
        case("the last, smaller tile", few, many, 18, 24),
        case("large scores", few, many, 6, 16, gain=40.0),
        case("causal, on the diagonal", many, many, 12, 8, causal=True),
        case("causal, more keys", few, many, 6, 8, causal=True),
        case(
            "causal, queries that see no key", many, few, many - few - 3, 0, causal=True
        ),
        case("causal, nothing is seen", many, many, 0, 8, causal=True),
    ]


def judge_tile(case, values, numbers):
    given = [
        torch.from_numpy(case.arguments[name])
        for name in ("q", "k", "v", "o", "do", "lse")
    ]
    row, col, shift, causal, scale = (
        case.arguments[name] for name in ("row", "col", "shift", "causal", "scale")
    )
    i, j = row + torch.arange(len(given[0])), col + torch.arange(len(given[1]))
    hidden = (j[None, :] > i[:, None] + shift) & causal

    def all_three(q, k, v, o, do, lse):
        p = torch.exp(
            scale * (q @ k.mT) - lse.masked_fill(lse == -math.inf, 0.0)[:, None]
        )
        p = p.masked_fill(hidden, 0.0)
        delta = gradients.row_dot(do, o)
        return p, delta, gradients.d_scores(p, do @ v.mT, delta)

    found = [tensor(values, place, name) for place, name in enumerate(("P", "D", "dS"))]
    for place, name in enumerate(("P", "D", "dS")):
        assert_agrees(
            name, found[place], lambda *x, place=place: all_three(*x)[place], *given
        )
    for name, x in (("P", found[0]), ("dS", found[2])):
        if (x[hidden] != 0).any():
            raise AssertionError(
                f"{name} is not exactly 0 for a key that its query does not see"
            )


def three_gradients(arguments):
    """(formula, inputs): formula(q, k, v, o, do, lse) gives {name: gradient} in the
    shapes of q, k and v.

    O and L are inputs as they are for the student, rounded: where P is 1 for one key,
    dS is the difference of two float32 sums, and what is left of it is their rounding.
    """
    causal, scale = arguments["causal"], arguments["scale"]
    inputs = [
        torch.from_numpy(arguments[name]) for name in ("q", "k", "v", "o", "do", "lse")
    ]

    def formula(q, k, v, o, do, lse):
        heads = [x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v, o, do)]
        lse = lse.reshape(1, -1, lse.shape[-1])
        s = standard.scores(heads[0], heads[1], scale)
        if causal:
            s = s.masked_fill(~standard.causal_mask(*s.shape[2:]), -math.inf)
        p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        dp, delta = (
            gradients.d_probabilities(heads[4], heads[2]),
            gradients.row_dot(heads[4], heads[3]),
        )
        ds = gradients.d_scores(p, dp, delta)
        dk, dv = gradients.d_keys(ds, heads[0], scale), gradients.d_values(p, heads[4])
        dk, dv = (gradients.sum_groups(x, heads[1].shape[1]) for x in (dk, dv))
        return {
            "dq": gradients.d_queries(ds, heads[1], scale).reshape(q.shape),
            "dk": dk.reshape(k.shape),
            "dv": dv.reshape(v.shape),
        }

    return formula, inputs


def judge_gradients(arguments, found):
    """Judge the gradients {name: tensor}, of the shapes that the arguments have."""
    formula, inputs = three_gradients(arguments)
    sees = standard.causal_mask(inputs[0].shape[-2], inputs[1].shape[-2]) | (
        not arguments["causal"]
    )
    for name, x in found.items():
        assert_agrees(name, x, lambda *given, name=name: formula(*given)[name], *inputs)
        blind = ~sees.any(dim=1 if name == "dq" else 0)
        if (x[..., blind, :] != 0).any():
            raise AssertionError(f"{name} is not exactly 0 where nothing is seen")


def tiled_cases(rng, numbers):
    def case(title, T_q, T_k, causal=False, gain=1.0, blocks=(8, 8)):
        d, d_v = (
            int(x) for x in rng.permutation([3, 4])
        )  # a strip of 6 rows is larger than Q and K
        arguments = problem(rng, (1, 1), T_q, T_k, d, d_v, causal, gain)
        arguments |= {
            name: x[0] for name, x in arguments.items() if isinstance(x, np.ndarray)
        }
        return Case(title, arguments | {"B_r": blocks[0], "B_c": blocks[1]})

    short, long = 25 + int(rng.integers(0, 7)), 41 + int(rng.integers(0, 7))
    return [
        case("blocks that divide the lengths", 32, 32),
        case(
            "blocks that do not divide them", 200 + long, 200 + short, blocks=(24, 16)
        ),
        case("large scores", short, long, gain=40.0),
        case("causal", long, long, causal=True),
        case("causal, more keys than queries", short, long, causal=True, blocks=(6, 8)),
        case("causal, queries that see no key", long, short, causal=True),
    ]


def judge_tiled(case, values, numbers):
    found = {
        name: tensor(values, place, name)
        for place, name in enumerate(("dq", "dk", "dv"))
    }
    judge_gradients(case.arguments, found)
    room = max(case.arguments[name].size for name in ("q", "k", "v", "o"))
    if values[3] > room:
        raise Wrong(
            f"{values[3]} numbers were held at once (see the launcher), and the largest of Q, K, V and O has {room}"
        )


def limits(arguments):
    """One block at a time: K and V once, the rest once for each block of keys."""
    q, k, v = (arguments[name] for name in "qkv")
    keys = -(-k.shape[1] // arguments["BLOCK_K"])
    width = max(padded(q.shape[2]), padded(v.shape[2]))
    largest = max(arguments["BLOCK_Q"], arguments["BLOCK_K"]) * width
    rows = keys * q.shape[0] * q.shape[1]
    group = len(q) // len(k)
    loaded = (
        keys * q.size,
        group * k.size,
        group * v.size,
        rows * v.shape[2],
        rows,
        rows,
    )
    return counted(largest, *loaded, 0, 0)


UNREAD = "a block of queries that must not be read"


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
        arguments = problem(rng, heads, T_q, T_k, d, d_v, causal, gain)
        return Case(
            title, arguments | {"BLOCK_Q": blocks[0], "BLOCK_K": blocks[1]} | options
        )

    short, long = 33 + int(rng.integers(0, 20)), 70 + int(rng.integers(0, 20))
    narrow, wide = int(rng.integers(5, 16)), int(rng.integers(17, 30))
    unread = case(UNREAD, 96, 96, causal=True)
    poisoned = {name: unread.arguments[name].copy() for name in ("q", "do")}
    for x in poisoned.values():
        x[:, :64] = np.nan
    return [
        case("whole blocks", 64, 64),
        case("lengths that no block divides", long, short),
        case("values of another width", short, short, d=wide, d_v=narrow),
        case("large scores", short, long, gain=40.0),
        case("grouped heads", 35, 35, heads=(6, 2)),
        case("causal", long, long, causal=True),
        case("causal, more keys than queries", short, long, causal=True),
        case("causal, queries that see no key", long, short, causal=True),
        case("other block sizes", long, short, causal=True, blocks=(16, 64)),
        case("other strides", short, long, heads=(2, 2), turned=True),
        Case(UNREAD, unread.arguments | poisoned, own=unread.arguments),
    ]


def judge_kernel(case, values, numbers):
    found = {
        name: tensor(values, place, name) for place, name in enumerate(("dk", "dv"))
    }
    if case.title == UNREAD:
        # The last block of keys alone is seen by none of the first 64 queries: the rest
        # is as it should be.
        formula, inputs = three_gradients(case.own)
        right = formula(*(x.double() for x in inputs))
        for name, x in found.items():
            if x.shape == right[name].shape:
                x[:, :64] = right[name][:, :64]
    judge_gradients(case.own or case.arguments, found)


TASKS = (
    paper("entry", 3, ("p", "ds", "dv1", "dk0", "dq1"), entry),
    paper("words", 3, ("step_queries", "step_keys", "words_queries", "words_keys", "resident", "largest"),
          words),
    paper("starts", 3, ("blind", "start", "full"), starts),
    Task("tile", 4, judge_tile, tile_cases, call="tile", forbidden=(*AUTOGRAD, *SOFTMAX),
         operations=(*AUTOGRAD_OPERATIONS, *SOFTMAX_OPERATIONS)),
    Task("tiled", 6, judge_tiled, tiled_cases, call="run_tiled", forbidden=("Largest", *AUTOGRAD, *SOFTMAX),
         operations=(*AUTOGRAD_OPERATIONS, *SOFTMAX_OPERATIONS)),
    Task("kernel", 9, judge_kernel, kernel_cases, call="of_keys", forbidden=SOFTMAX, kernel=True,
         limits=limits),
)  # fmt: skip
