"""Assignment *flash2*: update rules, the causal band, attention by blocks of Q."""

import math

from exercises.grader import tasks
from exercises.grader.rules import HELD, SOFTMAX
from exercises.grader.tasks import Case, Task, heads, judged, paper, windowed


def tiled_cases(rng, numbers):
    def case(title, T_q, T_k, causal=False, gain=1.0, blocks=(32, 24), widths=None):
        d, d_v = widths or (int(x) for x in rng.integers(4, 9, 2))
        arrays = {name: x[0] for name, x in heads(rng, T_q, T_k, d, d_v).items()}
        sizes = {"B_r": blocks[0], "B_c": blocks[1]}
        options = {"causal": causal, "scale": gain / math.sqrt(d)}
        return Case(title, {**arrays, **options, **sizes})

    # So long that a matrix of scores needs more than OWN_BYTES, and in the second case
    # a strip, too. No block divides these lengths.
    short, long = (n + int(rng.integers(0, 9)) for n in (289, 321))
    strips, other = {"blocks": (128, 10), "widths": (2, 3)}, {"blocks": (24, 28)}
    return [
        case("blocks that divide the lengths", 288, 288),
        case("blocks that do not divide them", 260 + short, 240 + long, **strips),
        case("large scores", short, long, gain=60.0),
        case("causal", long, long, causal=True),
        case("causal, more keys than queries", short, long, causal=True, **other),
        case("causal, queries that see no key", long, short, causal=True),
    ]


def one_head(q, k, v, causal, scale, **_):
    return [x[0] for x in tasks.attention(q[None], k[None], v[None], causal, scale)]


def tiled_limits(q, B_r, **_):
    """Twice, with the logarithm, in each block of queries, and once more to spare."""
    return {"divisions": 3 * -(-len(q) // B_r)}


def kernel_cases(rng, numbers):
    def case(title, *sizes, d=16, d_v=None, sides=(1, 1), **options):
        arrays = heads(rng, *sizes, d, d_v, sides)
        return Case(title, arrays | tasks.launch(d, **options))

    return tasks.attention_cases(case, rng, keys=256)  # in no tile


def limits(q, causal, BLOCK_Q, **arguments):
    """Every tile that is seen; a program for a block of queries divides at the end."""
    programs, right = len(q) * -(-q.shape[1] // BLOCK_Q), 0 if causal else None
    seen = windowed(q, left=None, right=right, BLOCK_Q=BLOCK_Q, **arguments)
    return seen | {"divisions": 3 * programs}


TASKS = (
    paper("state", 3, ("m_new", "l_new", "n0_new", "n1_new", "o1", "L")),
    paper("traffic", 2, ("keys_outside", "queries_outside", "programs_before",
          "programs_now")),
    paper("band", 3, ("read", "masked")),
    Task("tiled", 5, judged("O L", one_head, also=tasks.held("q", "k", "v")),
         tiled_cases, call="run_tiled", forbidden=(*HELD, *SOFTMAX),
         limits=tiled_limits),
    Task("kernel", 9, judged("O L", tasks.attention), kernel_cases, call="forward",
         forbidden=SOFTMAX, kernel=True, limits=limits),
)  # fmt: skip
