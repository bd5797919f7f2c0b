"""Masks of every kind for tests, and functions of masks or scores from texts."""

import linecache

import torch
from device import DEVICE

from flashlib import masks
from flashlib.masks import Mask, div, mod


def everybody(b, h, p, j):
    return (j >= 0) & (b >= 0) & (h >= 0)


def far(b, h, p, j, n):
    return abs(p - j) > n


def striped(b, h, p, j, n):
    return mod(p - j, n) == h


def blocks(b, h, p, j, n):
    return div(n - p + j, n) == 2


def some_masks(B, H, T_q, T_k, rng):
    """A few masks for these sizes, some of which read tensors."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator).to(DEVICE)

    ids = numbers(0, 3, B, T_k).sort(1).values
    sizes = [rng.choice([1, n]) for n in (B, H, T_q, T_k)]
    return [
        Mask(everybody), Mask(far, 5), Mask(striped, 4), Mask(blocks, 6),
        masks.causal(), masks.window(8, 3), masks.window(None, 2), masks.prefix(9),
        masks.chunks(16), masks.documents(ids), masks.documents(ids[0].int()),
        masks.documents(ids) & masks.causal(), masks.causal() | masks.prefix(20),
        ~masks.causal(), masks.padding(numbers(0, 5, B), numbers(5, T_k + 5, B)),
        masks.tree(numbers(0, 2, T_k, T_k) > 0) | masks.prefix(1),
        masks.from_tensor(numbers(0, 3, *sizes) > 0, T_q, T_k),
    ]  # fmt: skip


def function_of_text(text, scope):
    """The function of a text whose source Python finds."""
    name = f"<{len(linecache.cache)}>"
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    exec(compile(text, name, "exec"), scope)
    return scope["f"]
