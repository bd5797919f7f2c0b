"""Assignment *projections*: gradients around attention, with and without dQ, dK, dV."""

import math

import numpy as np
import torch

from exercises.grader import tasks
from exercises.grader.rules import AUTOGRAD, HELD, SOFTMAX
from exercises.grader.tasks import Case, Task, counted, judged, padded, paper, whole
from flashlib.reference import projections, standard

# -- PyTorch


def normals(rng, **shapes):
    """{name: array} of some shapes, whose products are not larger with more rows."""
    numbers = tasks.normals(rng, np.float64, **shapes).items()
    return {x: (n / math.sqrt(n.shape[-2])).astype(np.float32) for x, n in numbers}


def output_cases(rng, numbers):
    def case(title, B, H):
        T, E, _, d_v = whole(rng, 3, 12, 4)
        shapes = {"o": (B, H, T, d_v), "w_o": (H * d_v, E), "dy": (B, T, E)}
        return Case(title, normals(rng, **shapes))

    B, H = (int(n) for n in rng.integers(2, 5, 2))
    return [
        case("one head", 1, 1),
        case("several heads", 1, H),
        case("several sequences", B, H),
    ]


def output_back(o, w_o, dy):
    rows = projections.join_heads(o)
    return projections.d_output(dy, w_o, o.shape[1]), projections.d_weight(rows, dy)


def input_cases(rng, numbers):
    def case(title, B, H, H_kv):
        T, E, d, d_v = whole(rng, 3, 12, 4)
        weights = {"w_q": (E, H * d), "w_k": (E, H_kv * d), "w_v": (E, H_kv * d_v)}
        rows = {"dq": (B, H, T, d), "dk": (B, H_kv, T, d), "dv": (B, H_kv, T, d_v)}
        return Case(title, normals(rng, x=(B, T, E), **weights, **rows))

    B, H = (int(n) for n in rng.integers(2, 5, 2))
    return [
        case("one head", 1, 1, 1),
        case("several heads", 1, H, H),
        case("grouped heads", 1, 2 * H, H),
        case("several sequences", B, H, H),
        case("several sequences, grouped heads", B, 3 * H, H),
    ]


def input_back(x, w_q, w_k, w_v, dq, dk, dv):
    weights, of_z = projections.Weights(w_q, w_k, w_v, None), (dq, dk, dv)
    found = (projections.d_weight(x, projections.join_heads(dz)) for dz in of_z)
    return projections.d_input(*of_z, weights), *found


def streamed_cases(rng, numbers):
    def case(title, T, H, size, causal=False, gain=1.0):
        # Blocks of more than E rows, heads of more than E columns: neither strips nor a
        # whole dQ are allowed. In the long ones a matrix of scores needs more than
        # OWN_BYTES.
        E, (d, d_v) = int(rng.integers(4, 6)), whole(rng, 6, 9, 2)
        shapes = {"w_q": (E, H * d), "w_k": (E, H * d), "w_v": (E, H * d_v)}
        given = normals(rng, x=(T, E), **shapes, do=(H, T, d_v))
        rows, *weights = (torch.from_numpy(given[x]).double() for x in ("x", *shapes))
        q, k, v = (projections.split_heads(rows[None] @ w, H) for w in weights)
        options = {"causal": causal, "scale": gain / math.sqrt(d)}
        o, lse = standard.attention(q, k, v, **options)
        saved = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
        given |= {name: z[0].float().numpy() for name, z in saved.items()}
        return Case(title, {**given, **options, "size": size})

    T, H = 245 + int(rng.integers(0, 15)), int(rng.integers(2, 4))
    return [
        case("one head, blocks that divide the length", 260, 1, 26),
        case("several heads", 32, H, 8),
        case("blocks that do not divide the length", T, 2, 26),
        case("other blocks", 30, H, 6),
        case("large scores", T, 2, 26, gain=40.0),
        case("causal", 32, H, 8, causal=True),
        case("causal, blocks that do not divide the length", T, 2, 27, causal=True),
    ]


def streamed(x, q, k, v, o, lse, do, w_q, w_k, w_v, causal, scale, **_):
    saved = projections.Saved(*(z[None] for z in (q, k, v, o, lse)))
    weights = projections.Weights(w_q, w_k, w_v, None)
    given = x[None], saved, do[None], weights, len(x)
    dx, *found = projections.consume_twice(*given, causal=causal, scale=scale)
    return dx[0], *found


# -- the kernel


def kernel_cases(rng, numbers):
    def case(title, B, T, E, H, d, **options):
        arrays = tasks.normals(rng, x=(B, T, E), dz=(B, H, T, d))
        return Case(title, arrays | options)

    ragged, width = 33 + int(rng.integers(0, 30)), 33 + int(rng.integers(0, 30))
    narrow = int(rng.integers(17, 31))
    B, H = (int(n) for n in rng.integers(2, 5, 2))
    last = 2, ragged, width, 2, narrow
    return [
        case("whole blocks", 1, 64, 32, 1, 16),
        case("positions that no block divides", 1, ragged, 32, 1, 16),
        case("a width that no block divides", 1, 64, width, 1, 16),
        case("columns that no block divides", 1, 32, 32, 2, narrow),
        case("several heads", 1, ragged, width, H, narrow),
        case("several sequences", B, ragged, width, H, narrow),
        case("shorter than a block", 2, int(rng.integers(1, 15)), 9, 2, 5),
        case("other block sizes", *last, BLOCK_T=16, BLOCK_E=64),
        case("other strides", *last, turned=True),
    ]


def limits(x, dz, BLOCK_T=32, BLOCK_E=32, **_):
    """X for each head, dZ for each block of rows of dW."""
    sides = sorted([BLOCK_T, BLOCK_E, padded(dz.shape[3])])
    blocks = -(-x.shape[2] // BLOCK_E)
    return counted(sides[1] * sides[2], dz.shape[1] * x.size, blocks * dz.size, 0)


def weight_gradient(x, dz, **_):
    return (projections.d_weight(x, projections.join_heads(dz)),)


TASKS = (
    paper("counts", 4, ("for_weights", "for_input", "for_attention", "crossing", "kept",
          "folded")),
    Task("output", 3, judged("dO dW_O", output_back), output_cases, call="output_back",
         forbidden=AUTOGRAD),
    Task("input", 5, judged("dX dW_Q dW_K dW_V", input_back), input_cases,
         call="input_back", forbidden=AUTOGRAD),
    Task("streamed", 7, judged("dX dW_Q dW_K dW_V", streamed, also=tasks.held("x")),
         streamed_cases, call="run_streamed",
         forbidden=(*HELD, *AUTOGRAD, *SOFTMAX)),
    Task("kernel", 8, judged("dW", weight_gradient), kernel_cases,
         call="weight_gradient", kernel=True, limits=limits),
)  # fmt: skip
