"""Assignment *gradients*: by hand, in PyTorch, by differences, and two kernels."""

import math

import numpy as np
import torch

from exercises.grader import rules, tasks
from exercises.grader.tasks import Case, Task, counted, hidden, judged, normals, paper
from flashlib.reference import gradients as reference
from flashlib.reference import online, standard

# -- PyTorch


def ds_cases(rng, numbers):
    def case(title, *sizes, gain=1.0, change=lambda s: s):
        T_q, T_k, d_v = tasks.whole(rng, 3, 12, 3)
        T_q, T_k = sizes or (T_q, T_k)
        s = change(gain * rng.standard_normal((T_q, T_k))).astype(np.float32)
        return Case(title, {"s": s, **normals(rng, v=(T_k, d_v), do=(T_q, d_v))})

    return [
        case("as many queries as keys", 7, 7),
        case("other shapes"),
        case("large scores", gain=100.0),
        case("hidden keys", change=lambda s: hidden(s, column=2)),
        case("a row that sees nothing", change=lambda s: hidden(s, row=1)),
    ]


def of_scores(s, v, do, ones):
    """P, D and dS; P may be made as exp(S - L)."""
    p = online.weight(s, torch.logsumexp(s, dim=-1, keepdim=True) * ones)
    delta = reference.row_dot(do, p @ v)
    return p, delta, reference.d_scores(p, do @ v.mT, delta)


def backward_cases(rng, numbers):
    def case(title, T_q, T_k, d=4, d_v=4, causal=False, gain=1.0):
        shapes = {"q": (T_q, d), "k": (T_k, d), "v": (T_k, d_v), "do": (T_q, d_v)}
        arrays = normals(rng, **shapes)
        arrays["q"] = (gain * arrays["q"]).astype(np.float32)
        scale = float(np.float32(rng.uniform(0.2, 0.8)))
        return Case(title, {**arrays, "scale": scale, "causal": causal})

    few, many = int(rng.integers(4, 8)), int(rng.integers(9, 14))
    d, d_v = tasks.whole(rng, 2, 9, 2)
    return [
        case("as many queries as keys", many, many),
        case("all shapes different", few, many, d, d_v),
        case("large scores", many, few, d, gain=30.0),
        case("causal, as many queries as keys", many, many, causal=True),
        case("causal, more keys", few, many, d, d_v, causal=True),
        case("causal, more queries", many, few, d, d_v, causal=True),
    ]


def all_three(q, k, v, do, ones, scale, causal):
    unseen = ~standard.causal_mask(len(q), len(k)) & causal
    s = (scale * (q @ k.mT)).masked_fill(unseen, -math.inf)
    p, _, ds = of_scores(s, v, do, ones)
    return scale * (ds @ k), scale * (ds.mT @ q), reference.d_values(p, do)


def differences_cases(rng, numbers):
    def case(title, rows, columns, h, kept=False):
        x, w = (rng.integers(-5, 6, (rows, columns)).astype(float) for _ in "xw")
        return Case(title, {"x": x, "h": h, "w": w}, own=kept)

    rows, columns = tasks.whole(rng, 2, 6, 2)
    return [
        case("a matrix", rows, columns, 0.5),
        case("another step", columns, rows, 0.25),
        case("a single entry", 1, 1, 2.0),
        case("x afterwards", rows, columns, 0.5, kept=True),
    ]


def judge_differences(case, values, numbers):
    x, h, w = case.arguments.values()
    # The central difference of w x^3 is w (3 x^2 + h^2), that of a product of numbers
    # is its derivative. Whole numbers and powers of two: nothing is rounded.
    wanted = w * (3 * x**2 + h**2) + x[:, :1]
    wanted[:, 0] += x.sum(axis=1)
    tasks.exact(values, 0, "slopes(f, x, h)", wanted)
    if case.own:
        tasks.exact(values, 1, "x afterwards", x)


# -- kernels


def delta_cases(rng, numbers):
    def case(title, T, d_v, **options):
        return Case(title, normals(rng, do=(T, d_v), o=(T, d_v)) | options)

    # Wider than any tile that a kernel might hold at once.
    ragged, wide = (n + 2 * int(rng.integers(0, 8)) for n in (17, 129))
    other = {"extra": 3, "BLOCK_Q": 8, "BLOCK_D": 16}
    return [
        case("whole blocks", 32, 64),
        case("rows that no block divides", ragged, 32),
        case("columns that no block divides", 32, wide),
        case("narrower than a block", ragged, int(rng.integers(2, 15))),
        case("rows with gaps between them, other blocks", ragged, wide, **other),
    ]


def delta_limits(do, BLOCK_Q=16, BLOCK_D=32, **_):
    """Each number once, a tile at a time."""
    return counted(BLOCK_Q * BLOCK_D, do.size, do.size, 0)


def kernel_cases(rng, numbers):
    def case(title, T_q, T_k, gain=1.0, hidden=0, blind=(), **options):
        s = gain * rng.standard_normal((T_q, T_k))
        s[:, T_k - hidden :] = -np.inf
        s[list(blind)] = -np.inf
        s, dp = s.astype(np.float32), tasks.normal(rng, T_q, T_k)
        lse = torch.logsumexp(torch.from_numpy(s), dim=-1).numpy()
        arrays = {"s": s, "dp": dp, "lse": lse, "delta": tasks.normal(rng, T_q)}
        return Case(title, {**arrays, **options})

    few, many = int(rng.integers(17, 31)), int(rng.integers(129, 143))
    return [
        case("whole blocks", 32, 64),
        case("lengths that no block divides", few, many),
        case("large scores", few, many, gain=30.0),
        case("hidden keys", few, many, hidden=9),
        case("rows that see nothing", few, many, blind=(1, 4)),
        case("other blocks", many, few, BLOCK_Q=32, BLOCK_K=16),
    ]


def kernel_limits(s, BLOCK_Q=16, BLOCK_K=32, **_):
    """S and dP once, L and D for each column of tiles."""
    rows = len(s) * -(-s.shape[1] // BLOCK_K)
    return counted(BLOCK_Q * BLOCK_K, s.size, s.size, rows, rows, 0)


def d_scores(s, dp, lse, delta, **_):
    return (online.weight(s, lse[:, None]) * (dp - delta[:, None]),)


AUTOGRAD = (*rules.AUTOGRAD, "by_autograd", "differentiated")

TASKS = (
    paper("hand", 3, ("D", "ds0", "ds1")),
    paper("costs", 4, ("delta_from_p", "delta_from_o", "products", "large_words")),
    Task("ds", 5,
         judged("D dS", lambda **given: of_scores(**given)[1:], "dS", tasks.with_ones),
         ds_cases, call="score_gradient", forbidden=AUTOGRAD),
    Task("backward", 6, judged("dQ dK dV", all_three, changed=tasks.with_ones),
         backward_cases, call="gradients", forbidden=AUTOGRAD),
    Task("differences", 4, judge_differences, differences_cases, call="slopes_of_cubic",
         forbidden=(*AUTOGRAD, "gradient")),
    Task("delta", 5, judged("D", lambda do, o, **_: [reference.row_dot(do, o)]),
         delta_cases, call="row_sums", kernel=True, limits=delta_limits),
    Task("kernel", 6, judged("dS", d_scores, zeros="dS"), kernel_cases,
         call="scores_back", kernel=True, limits=kernel_limits),
)  # fmt: skip
