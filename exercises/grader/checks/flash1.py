"""Assignment *flash1*: a visit, its words, and attention with the keys outside."""

import math

import numpy as np
import torch

from exercises.grader import tasks
from exercises.grader.rules import SOFTMAX
from exercises.grader.tasks import Case, Task, counted, heads, judged, padded, paper
from flashlib.iomodel.flash1 import algorithm_4
from flashlib.reference import online


def update_cases(rng, numbers):
    def case(title, rows, old, new, gain=1.0, blind=0.0):
        d, d_v = int(rng.integers(2, 9)), int(rng.integers(1, 7))
        shapes = (rows, d), (old + new, d), (old + new, d_v)
        q, k, v = (rng.standard_normal(shape) for shape in shapes)
        seen = rng.random((rows, old + new)) >= blind
        if blind:
            seen[0], seen[1, :old], seen[2, old:] = False, False, False
        scale = gain / math.sqrt(d)
        s = torch.from_numpy(np.where(seen, scale * q @ k.T, -np.inf))
        known = online.block(s[:, :old], torch.from_numpy(v[:old]))
        o, _ = online.finish(known)
        known = zip("qkvoml", (q, k[old:], v[old:], o, *known[:2]), strict=True)
        arrays = {name: np.asarray(x, np.float32) for name, x in known}
        return Case(title, {**arrays, "seen": seen[:, old:], "scale": scale})

    rows = int(rng.integers(4, 9))
    return [
        case("the first block of keys", rows, 0, 6),
        case("a later block", rows, 7, 5),
        case("one query, one key", 1, 1, 1),
        case("large scores", rows, 6, 8, gain=60.0),
        case("keys that are not seen", rows, 6, 5, blind=0.4),
        case("a first block of which some queries see nothing", rows, 0, 5, blind=0.4),
    ]


def state(q, k, v, o, m, l, seen, scale):
    s = (scale * q @ k.mT).masked_fill(~seen, -math.inf)
    known = online.merge(online.State(m, l, l[:, None] * o), online.block(s, v))
    return online.finish(known)[0], known.m, known.l


def schedule_cases(rng, numbers):
    def case(title, T, d, B_r, B_c, together=False, gain=1.0):
        arrays = tasks.normals(rng, np.float64, Q=(T, d), K=(T, d), V=(T, d))
        sizes = {"scale": gain / math.sqrt(d), "B_r": B_r, "B_c": B_c}
        return Case(title, {**arrays, **sizes, "together": together})

    T, d = int(rng.choice([11, 13, 17])), int(rng.integers(2, 6))
    return [
        case("blocks that divide the length", 12, d, 4, 3, together=True),
        case("blocks that do not divide it", T, d, 4, 3, together=True),
        case("less memory", 12, d, 3, 4),
        case("less memory, blocks that do not divide the length", T, d, 3, 5),
        case("large scores", T, d, 5, 3, gain=60.0),
        case("large matrices", 80, 24, 20, 16),
    ]


def judge_schedule(case, values, numbers):
    Q, K, V, scale, B_r, B_c, _ = case.arguments.values()
    sizes = {"scale": scale, "B_r": B_r, "B_c": B_c}
    run = algorithm_4(Q, K, V, capacity_words=10**6, **sizes)
    words = {name: run.memory.by_array[name] for name in "QKVOml"}
    tasks.judge_schedule(values, {name: run[name] for name in "Oml"}, words)


def kernel_cases(rng, numbers):
    def case(title, T_q, T_k, d=16, H=1, **options):
        arrays = heads(rng, T_q, T_k, d, heads=(H, H))
        return Case(title, arrays | tasks.launch(d, **options))

    short, long = 33 + int(rng.integers(0, 20)), 70 + int(rng.integers(0, 20))
    width = int(rng.integers(17, 30))
    return [
        case("whole blocks", 64, 64),
        case("lengths that no block divides", short, 256 + long),  # in no tile
        case("heads, and a width that is no power of two", short, short, d=width, H=2),
        case("large scores", short, long, gain=60.0),
        case("causal", long, long, causal=True),
        case("causal, more keys than queries", short, long, causal=True),
        case("causal, queries that see no key", long, short, causal=True),
        case("other block sizes", short, 64 + long, causal=True, blocks=(16, 64)),
        case("one block of queries", 16, long, blocks=(64, 16)),
        case("other strides", short, long, turned=True, H=2),
    ]


def limits(q, k, BLOCK_Q, BLOCK_K, **_):
    """One block at a time: K and V once, the rest once for each block of keys."""
    keys = -(-k.shape[1] // BLOCK_K)
    state = keys * q.shape[0] * q.shape[1]
    largest = max(BLOCK_Q, BLOCK_K) * padded(q.shape[2])
    return counted(largest, keys * q.size, k.size, k.size, keys * q.size, state, state)


TASKS = (
    paper("visit", 3, ("m_new", "a", "l_new", "o_new")),
    paper("words", 4, ("loaded", "stored", "total", "intensity")),
    Task("update", 4, judged("o m l", state), update_cases, call="visit",
         forbidden=SOFTMAX, kept=True),
    Task("schedule", 5, judge_schedule, schedule_cases, call="run_flash1",
         forbidden=SOFTMAX),
    Task("kernel", 8, judged("O L", tasks.attention), kernel_cases, call="forward",
         forbidden=SOFTMAX, kernel=True, limits=limits),
)  # fmt: skip
