"""Assignment *online*: the state of a set of keys, and its merge."""

import numpy as np
import torch

from exercises.grader.rules import SOFTMAX
from exercises.grader.tasks import Case, Task, counted, judged, paper
from flashlib.reference import online


def merge_cases(rng, numbers):
    def case(title, T, n_a, n_b, d, gain=1.0):
        n = n_a + n_b
        s, v = (torch.from_numpy(rng.standard_normal(x)) for x in ((T, n), (n, d)))
        arguments = {}
        for letter, part in (("a", slice(0, n_a)), ("b", slice(n_a, None))):
            state = online.block(gain * s[:, part], v[part])
            for name, x in state._asdict().items():
                arguments[f"{name}_{letter}"] = x.float().numpy()
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


def merged(m_a, l_a, o_a, m_b, l_b, o_b):
    return online.merge(online.State(m_a, l_a, o_a), online.State(m_b, l_b, o_b))


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


def limits(x, BLOCK, **_):
    """Every score once, a block at a time."""
    return counted(BLOCK, x.size, 0, 0)


def state_of_rows(x, BLOCK):
    m, l, _ = online.block(x, x.new_empty(x.shape[1], 0))
    return m, l


TASKS = (
    paper("state", 2, ("m", "l")),
    paper("reads", 2, ("three_passes", "two_passes")),
    Task("merge", 4, judged("m l o", merged), merge_cases, call="merge",
         forbidden=SOFTMAX),
    Task("kernel", 6, judged("m l", state_of_rows), kernel_cases, call="row_states",
         forbidden=("softmax",), kernel=True, limits=limits),
)  # fmt: skip
