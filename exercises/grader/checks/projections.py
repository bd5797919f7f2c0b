"""Assignment *projections*: the gradients around attention, with dQ, dK and dV and
without.
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
from flashlib.reference import projections, standard


def counts(numbers):
    T, E, d, H, H_kv = (numbers[name] for name in ("T", "E", "d", "H", "H_kv"))
    widths = (H * d, H_kv * d, H_kv * d)  # of Q, K and V
    thin = sum(2 * T * E * width for width in widths)
    return thin, thin, 5 * H * 2 * T * T * d, 8 * E // 5, T * sum(widths), 3 * H * T * E


# -- PyTorch


def normal(rng, *shape):
    return (rng.standard_normal(shape) / math.sqrt(shape[-2])).astype(np.float32)


def sizes(rng):
    """T, E, d and d_v, all different."""
    return (int(n) for n in rng.choice(np.arange(3, 12), 4, replace=False))


def output_cases(rng, numbers):
    def case(title, B, H):
        T, E, _, d_v = sizes(rng)
        o, w_o, dy = (
            normal(rng, B, H, T, d_v),
            normal(rng, H * d_v, E),
            normal(rng, B, T, E),
        )
        return Case(title, {"o": o, "w_o": w_o, "dy": dy})

    B, H = (int(n) for n in rng.integers(2, 5, 2))
    return [
        case("one head", 1, 1),
        case("several heads", 1, H),
        case("several sequences", B, H),
    ]


def agree(values, names, formula, *given):
    """Judge the values in turn against formula(*given)[place]."""
    for place, name in enumerate(names):
        found = tensor(values, place, name)
        assert_agrees(name, found, lambda *x, place=place: formula(*x)[place], *given)


def judge_output(case, values, numbers):
    o, w_o, dy = (torch.from_numpy(case.arguments[name]) for name in ("o", "w_o", "dy"))

    def both(o, w_o, dy):
        rows = projections.join_heads(o)
        return projections.d_output(dy, w_o, o.shape[1]), projections.d_weight(rows, dy)

    agree(values, ("dO", "dW_O"), both, o, w_o, dy)


def input_cases(rng, numbers):
    def case(title, B, H, H_kv):
        T, E, d, d_v = sizes(rng)
        shapes = {
            "x": (B, T, E), "w_q": (E, H * d), "w_k": (E, H_kv * d), "w_v": (E, H_kv * d_v),
            "dq": (B, H, T, d), "dk": (B, H_kv, T, d), "dv": (B, H_kv, T, d_v),
        }  # fmt: skip
        return Case(
            title, {name: normal(rng, *shape) for name, shape in shapes.items()}
        )

    B, H = (int(n) for n in rng.integers(2, 5, 2))
    return [
        case("one head", 1, 1, 1),
        case("several heads", 1, H, H),
        case("grouped heads", 1, 2 * H, H),
        case("several sequences", B, H, H),
        case("several sequences, grouped heads", B, 3 * H, H),
    ]


def judge_input(case, values, numbers):
    names = ("x", "w_q", "w_k", "w_v", "dq", "dk", "dv")
    given = [torch.from_numpy(case.arguments[name]) for name in names]

    def all_four(x, w_q, w_k, w_v, *gradients):
        weights = projections.Weights(w_q, w_k, w_v, None)
        found = (
            projections.d_weight(x, projections.join_heads(dz)) for dz in gradients
        )
        return projections.d_input(*gradients, weights), *found

    agree(values, ("dX", "dW_Q", "dW_K", "dW_V"), all_four, *given)


def streamed_cases(rng, numbers):
    def case(title, T, H, size, causal=False, gain=1.0):
        # Blocks of more than E rows, heads of more than E columns: neither strips nor a
        # whole dQ are allowed.
        E, d, d_v = (
            int(n)
            for n in (rng.integers(4, 6), *rng.choice([6, 7, 8], 2, replace=False))
        )
        x, w_q, w_k, w_v = (
            normal(rng, T, E),
            *(normal(rng, E, H * width) for width in (d, d, d_v)),
        )
        do, scale = normal(rng, H, T, d_v), gain / math.sqrt(d)
        weights = projections.Weights(
            *(torch.from_numpy(w).double() for w in (w_q, w_k, w_v)), None
        )
        q, k, v = (
            projections.split_heads(torch.from_numpy(x).double()[None] @ w, H)
            for w in weights[:3]
        )
        o, lse = standard.attention(q, k, v, causal=causal, scale=scale)
        names = ("q", "k", "v", "o", "lse")
        saved = {
            name: z[0].float().numpy()
            for name, z in zip(names, (q, k, v, o, lse), strict=True)
        }
        arguments = {"x": x} | saved | {"do": do, "w_q": w_q, "w_k": w_k, "w_v": w_v}
        return Case(title, arguments | {"causal": causal, "scale": scale, "size": size})

    T, H = 28 + int(rng.integers(0, 8)), int(rng.integers(2, 4))
    return [
        case("one head, blocks that divide the length", 32, 1, 8),
        case("several heads", 32, H, 8),
        case("blocks that do not divide the length", 33, H, 8),
        case("other blocks", 30, H, 6),
        case("large scores", T, H, 8, gain=40.0),
        case("causal", 32, H, 8, causal=True),
        case("causal, blocks that do not divide the length", T, H, 6, causal=True),
    ]


def judge_streamed(case, values, numbers):
    names = ("x", "q", "k", "v", "o", "lse", "do", "w_q", "w_k", "w_v")
    given = [torch.from_numpy(case.arguments[name]) for name in names]
    options = {name: case.arguments[name] for name in ("causal", "scale")}

    def all_four(x, q, k, v, o, lse, do, w_q, w_k, w_v):
        saved = projections.Saved(*(z[None] for z in (q, k, v, o, lse)))
        weights = projections.Weights(w_q, w_k, w_v, None)
        dx, *found = projections.consume_twice(
            x[None], saved, do[None], weights, len(x), **options
        )
        return dx[0], *found

    agree(values, ("dX", "dW_Q", "dW_K", "dW_V"), all_four, *given)
    if values[4] > given[0].numel():
        raise Wrong(
            f"{values[4]} numbers were held at once (see the launcher), and X has {given[0].numel()}"
        )


# -- the kernel


def kernel_cases(rng, numbers):
    def case(title, B, T, E, H, d, **options):
        x, dz = (
            rng.standard_normal(shape).astype(np.float32)
            for shape in ((B, T, E), (B, H, T, d))
        )
        return Case(title, {"x": x, "dz": dz} | options)

    ragged, width = 33 + int(rng.integers(0, 30)), 33 + int(rng.integers(0, 30))
    narrow = int(rng.integers(17, 31))
    B, H = (int(n) for n in rng.integers(2, 5, 2))
    return [
        case("whole blocks", 1, 64, 32, 1, 16),
        case("positions that no block divides", 1, ragged, 32, 1, 16),
        case("a width that no block divides", 1, 64, width, 1, 16),
        case("columns that no block divides", 1, 32, 32, 2, narrow),
        case("several heads", 1, ragged, width, H, narrow),
        case("several sequences", B, ragged, width, H, narrow),
        case("shorter than a block", 2, int(rng.integers(1, 15)), 9, 2, 5),
        case("other block sizes", 2, ragged, width, 2, narrow, BLOCK_T=16, BLOCK_E=64),
        case("other strides", 2, ragged, width, 2, narrow, turned=True),
    ]


def limits(arguments):
    """X for each head, dZ for each block of rows of dW."""
    x, dz = arguments["x"], arguments["dz"]
    rows, width = arguments.get("BLOCK_T", 32), arguments.get("BLOCK_E", 32)
    sides = sorted([rows, width, padded(dz.shape[3])])
    blocks = -(-x.shape[2] // width)
    return counted(sides[1] * sides[2], dz.shape[1] * x.size, blocks * dz.size, 0)


def judge_kernel(case, values, numbers):
    x, dz = (torch.from_numpy(case.arguments[name]) for name in ("x", "dz"))

    def formula(x, dz):
        return projections.d_weight(x, projections.join_heads(dz))

    assert_agrees("dW", tensor(values, 0, "dW"), formula, x, dz)


TASKS = (
    paper("counts", 4, ("for_weights", "for_input", "for_attention", "crossing", "kept", "folded"), counts),
    Task("output", 3, judge_output, output_cases, call="output_back", forbidden=AUTOGRAD),
    Task("input", 5, judge_input, input_cases, call="input_back", forbidden=AUTOGRAD),
    Task("streamed", 7, judge_streamed, streamed_cases, call="run_streamed", forbidden=("Largest", *AUTOGRAD, *SOFTMAX),
         operations=(*AUTOGRAD_OPERATIONS, *SOFTMAX_OPERATIONS)),
    Task("kernel", 8, judge_kernel, kernel_cases, call="weight_gradient", kernel=True, limits=limits),
)  # fmt: skip
