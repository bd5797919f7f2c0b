"""Assignment *online*: the state of a set of keys, and its merge."""

import math

import numpy as np
import torch

from exercises.grader.rules import SOFTMAX, SOFTMAX_OPERATIONS
from exercises.grader.tasks import Case, Task, counted, number, tensor
from flashlib.exercise import assert_agrees


def judge_state(case, values, numbers):
    scores = [numbers[name] for name in ("x0", "x1", "x2")]
    number(values[:1], max(scores), name="m")
    number(values[1:], sum(math.exp(x - max(scores)) for x in scores), name="l")


def judge_reads(case, values, numbers):
    n = numbers["n"]
    number(values[:1], 3 * n, name="three_passes", unit="loads")
    number(values[1:], 2 * n, name="two_passes", unit="loads")


def state(s, v):
    """The state of scores s [T, n] and values v [n, d]; that of no keys where n is
    0.
    """
    if s.shape[1] == 0:
        return (
            np.full(len(s), -np.inf),
            np.zeros(len(s)),
            np.zeros((len(s), v.shape[1])),
        )
    m = s.max(axis=1)
    p = np.exp(s - m[:, None])
    return m, p.sum(axis=1), p @ v


def merge_cases(rng, numbers):
    def case(title, T, n_a, n_b, d, gain=1.0):
        s, v = (
            gain * rng.standard_normal((T, n_a + n_b)),
            rng.standard_normal((n_a + n_b, d)),
        )
        arguments = {}
        for letter, part in (("a", slice(0, n_a)), ("b", slice(n_a, None))):
            for name, x in zip("mlo", state(s[:, part], v[part]), strict=True):
                arguments[f"{name}_{letter}"] = x.astype(np.float32)
        return Case(title, arguments)

    T, d = (int(n) for n in rng.integers(2, 9, 2))
    return [
        case("two sets of keys", T, 3, 7, d),
        case("one query, one key each", 1, 1, 1, 1),
        case("scores far apart", T, 4, 5, d, gain=80.0),
        case("nothing in the first set", T, 0, 6, d),
        case("nothing in the second set", T, 6, 0, d),
        case("nothing in either set", T, 0, 0, d),
    ]


def judge_merge(case, values, numbers):
    given = {name: torch.from_numpy(x) for name, x in case.arguments.items()}

    def factors(m_a, m_b):
        m = torch.maximum(m_a, m_b)
        shift = m.masked_fill(m == -math.inf, 0.0)
        return m, torch.exp(m_a - shift), torch.exp(m_b - shift)

    def merged(m_a, l_a, o_a, m_b, l_b, o_b):
        m, a, b = factors(m_a, m_b)
        return m, a * l_a + b * l_b, a[:, None] * o_a + b[:, None] * o_b

    for position, name in enumerate(("m", "l", "o")):
        found = tensor(values, position, name)
        assert_agrees(
            name,
            found,
            lambda *x, position=position: merged(*x)[position],
            *given.values(),
        )


def kernel_cases(rng, numbers):
    def case(title, T, n, block, gain=1.0, blind=()):
        x = (gain * rng.standard_normal((T, n))).astype(np.float32)
        x[list(blind)] = -np.inf
        return Case(title, {"x": x, "BLOCK": block})

    T = int(rng.integers(2, 6))
    # Larger than any tile that a kernel might hold at once.
    ragged = 32 * int(rng.integers(9, 13)) + int(rng.integers(1, 31))
    return [
        case("whole blocks", T, 64, 32),
        case("a length that no block divides", T, ragged, 32),
        case("shorter than a block", T, int(rng.integers(1, 15)), 16),
        case("large scores", T, ragged, 32, gain=200.0),
        case("another block size", T, ragged, 16),
        case("a row of -inf", T, ragged, 32, blind=(1,)),
    ]


def limits(arguments):
    """Every score once, a block at a time."""
    return counted(arguments["BLOCK"], arguments["x"].size, 0, 0)


def judge_kernel(case, values, numbers):
    x = torch.from_numpy(case.arguments["x"])

    def normaliser(x):
        m = x.amax(dim=-1, keepdim=True)
        return torch.exp(x - m.masked_fill(m == -math.inf, 0.0)).sum(dim=-1)

    assert_agrees("m", tensor(values, 0, "m"), lambda x: x.amax(dim=-1), x)
    assert_agrees("l", tensor(values, 1, "l"), normaliser, x)


TASKS = (
    Task("state", 2, judge_state, reads=("m", "l"), paper=True),
    Task("reads", 2, judge_reads, reads=("three_passes", "two_passes"), paper=True),
    Task("merge", 4, judge_merge, merge_cases, call="merge", forbidden=SOFTMAX,
         operations=SOFTMAX_OPERATIONS),
    Task("kernel", 6, judge_kernel, kernel_cases, call="row_states", forbidden=("softmax",), kernel=True,
         limits=limits),
)  # fmt: skip
