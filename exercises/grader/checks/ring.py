"""Assignment *ring*: what ranks that share one sequence compute, and what they send."""

import math

import numpy as np
import torch

from exercises.grader import tasks
from exercises.grader.rules import SOFTMAX
from exercises.grader.tasks import Case, Task, Wrong, attention, judged, paper
from flashlib.iomodel.ring import positions
from flashlib.reference import gradients, online

# -- the plan


def plan_cases(rng, numbers):
    sizes = {"three ranks": 3, "more ranks": int(rng.integers(5, 10))}

    def case(part, title, size):
        T = 2 * size * int(rng.integers(2, 6))
        return Case(f"{part}, {title}", {"part": part, "T": T, "size": size})

    parts = ("positions", "source", "visit")
    return [case(part, *item) for part in parts for item in sizes.items()]


def judge_plan(case, values, numbers):
    part, T, N = (case.arguments[name] for name in ("part", "T", "size"))
    ranks, steps = np.divmod(np.arange(N * N), N)
    if part == "positions":
        wanted = np.array([positions(T, rank, N) for rank in range(N)])
    elif part == "source":
        wanted = (ranks - steps) % N
    else:
        earlier, later = (steps > 0) & (steps <= ranks), steps > ranks
        wanted = np.stack([2 * later, earlier, steps == 0], axis=1).astype(np.int64)
    # Whole numbers of any type, as the visible tests take them.
    found = [x.astype(float) if isinstance(x, np.ndarray) else x for x in values]
    tasks.exact(found, 0, part, wanted.astype(float))


# -- the merge


def merge_cases(rng, numbers):
    def case(title, H, T, n, m, d, gain=0.0, dtype=np.float32, part=None):
        s, v = rng.standard_normal((H, T, n + m)), rng.standard_normal((H, n + m, d))
        s += gain * rng.standard_normal((H, T, 1))
        if title == "queries that see some keys":
            s[:, 0], s[:, 1, :n], s[:, 2, n:] = -np.inf, -np.inf, -np.inf
        arguments = {}
        for end, at in (("", slice(0, n)), ("_part", slice(n, None))):
            state = online.block(*map(torch.from_numpy, (s[..., at], v[:, at])))
            o, lse = (x.numpy() for x in online.finish(state))
            arguments[f"o{end}"] = o.astype((end and part) or dtype)
            arguments[f"lse{end}"] = lse.astype(dtype)
        return Case(title, arguments)

    H, T, d = (int(n) for n in rng.integers(3, 8, 3))
    wide = {"gain": 2000.0, "dtype": np.float64}
    return [
        case("two parts", H, T, 3, 7, d),
        case("large log-sum-exps", H, T, 4, 5, d, gain=200.0),
        case("large log-sum-exps, 64 bits", H, T, 4, 5, d, **wide),
        case("queries that see some keys", H, T, 5, 4, d),
        case("no key in the first part", H, T, 0, 6, d),
        case("no key in the second part", H, T, 6, 0, d),
        case("no key in either part", H, T, 0, 0, d),
        case("a part in 16 bits", H, T, 5, 4, d, part=np.float16),
    ]


def merged(o, lse, o_part, lse_part):
    states = online.State(lse, 1.0, o), online.State(lse_part, 1.0, o_part)
    return online.finish(online.merge(*states))


# -- the passes of a rank


def divided(rng, way, T, N):
    """The positions of the tokens of all ranks, ``[N, T / N]``."""
    if way == "stripes":
        return np.arange(T).reshape(-1, N).T
    if way == "any":
        return rng.permutation(T).reshape(N, -1)
    return np.stack([positions(T, rank, N, way) for rank in range(N)])


def problem(rng, way, N, sides=(1, 1), causal=True, gain=1.0, rows=6, dtype=np.float32):
    """Arguments of run_forward, and dO."""
    T, (d, d_v) = N * rows, (int(x) for x in rng.permutation([3, 4, 5])[:2])
    (H, H_kv) = sides
    shapes = {"q": (H, T, d), "k": (H_kv, T, d), "v": (H_kv, T, d_v), "do": (H, T, d_v)}
    arrays = tasks.normals(rng, dtype, **shapes)
    where = divided(rng, way, T, N).astype(np.int64)
    scale = gain * float(rng.random() + 0.5) / math.sqrt(d)
    return arrays | {"where": where, "causal": causal, "scale": scale}


def forward_cases(rng, numbers):
    def case(title, *options, **more):
        arguments = problem(rng, *options, **more)
        del arguments["do"]
        return Case(title, arguments)

    N, rows = int(rng.integers(4, 8)), 2 * int(rng.integers(2, 5))
    return [
        case("one rank", "contiguous", 1),
        case("no mask", "contiguous", N, causal=False),
        case("contiguous shards, causal", "contiguous", N, rows=rows),
        case("zig-zag shards, causal", "zigzag", N, sides=(4, 2), rows=rows),
        case("stripes, causal", "stripes", 3, rows=rows),
        case("any division, causal", "any", N),
        case("shared heads of keys", "any", 3, sides=(6, 2)),
        case("large scores", "contiguous", N, gain=60.0),
        case("64 bits", "zigzag", 3, sides=(4, 2), dtype=np.float64),
    ]


def received(shards):
    """What judges the last value, the words that a rank receives. With N ranks they
    have the words of shards(N) = (least, most) shards of K and V.
    """

    def require(case, values):
        N, found = len(case.arguments["where"]), values[-1]
        size = sum(case.arguments[name].size for name in "kv") // N
        least, most = shards(N)
        if type(found) is not int or found > most * size:
            raise Wrong("a rank receives more words than it needs")
        if found < least * size:
            raise Wrong("a rank receives too few words to know what it returns")

    return require


def backward_cases(rng, numbers):
    def case(title, *options, **more):
        given = problem(rng, *options, **more)
        tensors = (torch.from_numpy(given[name]).double() for name in "qkv")
        o, lse = attention(*tensors, given["causal"], given["scale"])
        saved, dtype = {"o": o.numpy(), "lse": lse.numpy()}, given["q"].dtype
        return Case(title, given | {name: x.astype(dtype) for name, x in saved.items()})

    N, rows = int(rng.integers(4, 8)), 2 * int(rng.integers(2, 5))
    return [
        case("one rank", "contiguous", 1),
        case("two ranks, no mask", "contiguous", 2, causal=False),
        case("contiguous shards, causal", "contiguous", N, rows=rows),
        case("zig-zag shards, causal", "zigzag", N, rows=rows),
        case("any division, causal", "any", 3),
        case("shared heads of keys", "zigzag", N, sides=(6, 2)),
        case("64 bits", "stripes", N, dtype=np.float64),
    ]


def of_all(q, k, v, do, causal, scale, **_):
    rules, given = {"causal": causal, "scale": scale}, (x[None] for x in (q, k, v, do))
    return [x[0] for x in gradients.gradients(*given, **rules)]


TASKS = (
    paper("hand", 2, ("o_own", "weight", "o_all", "lse_all")),
    paper("shares", 3, ("contiguous", "zigzag", "step", "busiest")),
    paper("words", 4, ("forward_words", "backward_words", "least_causal",
          "least_full")),
    Task("plan", 3, judge_plan, plan_cases, call="run_plan"),
    Task("merge", 4, judged("o lse", merged), merge_cases, call="merge",
         forbidden=SOFTMAX, kept=True),
    Task("forward", 6,
         judged("O L", attention, also=received(lambda N: (N - 1, N - 1))),
         forward_cases, call="run_forward", forbidden=SOFTMAX, ranks="simulate"),
    Task("backward", 5,
         judged("dq dk dv", of_all,
                also=received(lambda N: (N, 2 * N - 1) if N > 1 else (0, 0))),
         backward_cases, call="run_backward", ranks="simulate"),
)  # fmt: skip
