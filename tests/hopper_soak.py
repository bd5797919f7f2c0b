"""Run the kernels for compute capability 9.0 on random shapes, for a number of seconds.

Usage: ``python hopper_soak.py SECONDS [SEED]``. If a shape takes minutes, the process
says in which line it hangs, and ends. Every result is finite and the same on a second
run; one shape in fifty is judged too.
"""

import faulthandler
import itertools
import random
import sys
import time

import torch

from flashlib import testing
from flashlib.kernels import hopper, hopper_backward
from flashlib.score_mods import unchanged

LIMIT = 120  # seconds for a shape, which may have to be compiled first
# What is compiled on its own. So are lengths of one, and those that 16 divides: ragged
# lengths are neither, and only where the lengths are even does a group hold one head.
MASKS = "full", "causal", "window"
KINDS = list(itertools.product((64, 128, 256), MASKS, (False, True)))


def shape(rng, d, ragged):
    """B, H, H_kv, T_q, T_k, d and a layout: mostly short, T_q and T_k apart."""
    longest = rng.choice((48, 300, 1500, 4000, 10000))
    T_q, T_k = (rng.randint(2, longest) // 16 * 16 for _ in range(2))
    T_q, T_k = (
        T + rng.randint(2, 15) if ragged else max(T, 128) // 128 * 128
        for T in (T_q, T_k)
    )
    if rng.random() < 0.3:
        T_k = T_q
    H_kv = rng.choice((2, 3))
    H = H_kv * (rng.choice((2, 4, 8)) if ragged else 1)
    layout = rng.choice(("contiguous", "transposed", "packed"))
    return rng.choice((2, 3, 5)), H, H_kv, T_q, T_k, d, layout


def inputs(B, H, H_kv, T_q, T_k, d, layout):
    """Normal q, k, v in bfloat16, made on the GPU."""
    shapes = ((B, H, T_q, d), (B, H_kv, T_k, d), (B, H_kv, T_k, d))
    views = testing._views(shapes, layout, torch.bfloat16, "cuda")
    return [x.normal_() for x in views]


def run(sizes, causal, left, judged):
    """Both passes on one shape, twice."""
    q, k, v = inputs(*sizes)
    score_mod, results = unchanged(causal, q.shape[3] ** -0.5, left), []
    for _ in range(2):
        o, lse = hopper.forward(q, k, v, score_mod)
        torch.cuda.synchronize()  # a pass hangs in a line of its own
        arguments = q, k, v, o, lse, o, torch.zeros_like(lse), score_mod
        results.append([o, lse, *hopper_backward.backward(*arguments)])
        torch.cuda.synchronize()
    agree = all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert agree, "two runs differ"
    o, lse, *gradients = results[0]
    assert all(torch.isfinite(x).all() for x in (o, *gradients)), "not finite"
    if judged:
        mask = {"causal": causal} if left is None else {"window": (left, 0)}
        testing.assert_within_budget(q, k, v, o, lse, **mask)
        testing.assert_gradients_within_budget(q, k, v, o, *gradients, **mask)


def main(seconds, seed=0):
    torch.use_deterministic_algorithms(True)  # fresh tensors are NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(seed)
    rng, count, end = random.Random(seed), 0, None
    start = time.monotonic()
    while end is None or time.monotonic() < end:
        d, mask, ragged = KINDS[count] if count < len(KINDS) else rng.choice(KINDS)
        sizes = shape(rng, d, ragged)
        left = rng.choice((3, 63, 129, 515, 2050)) if mask == "window" else None
        names = "B, H, H_kv, T_q, T_k, d, layout"
        at = f"{count}, {time.monotonic() - start:.0f} s"
        print(f"{at}: {names} = {sizes}, {mask}, left = {left}", flush=True)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        B, H, _, T_q, T_k = sizes[:5]
        # The reference keeps several such matrices of float64.
        small = B * H * T_q * T_k <= 2**29
        run(sizes, mask != "full", left, judged=small and count % 50 == 0)
        count += 1
        if count == len(KINDS):
            end = time.monotonic() + seconds  # everything is compiled
    print(f"all right: {count} shapes, {seconds} s", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
