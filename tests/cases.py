"""Shapes that cover every pair, and on a GPU the product of what matters most."""

import functools
import itertools
import math
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from device import CUDA, DEVICE

import flashlib
from flashlib import testing

# The interpreter takes a second for a large case, so factors have fewer levels there.
# The first levels of a factor fill what no pair decides, so they are cheap ones.
# Lengths that no block divides, a single row, and both T_q < T_k and T_q > T_k (whose
# first rows see no key).
LENGTHS = (17, 113, 1, 203) if CUDA else (17, 113, 1)
FACTORS = {
    "T_q": LENGTHS,
    "T_k": LENGTHS,
    "d": (16, 40, 64, 72, 80, 96, 111, 128, 256) if CUDA else (16, 40, 111, 256),
    "d_v": ("d", 24, 80),
    "heads": ((2, 2), (6, 2), (7, 1)) if CUDA else ((2, 2), (4, 2), (3, 1)),
    "layout": testing.LAYOUTS,
    "dtype": ("float32", "float16", "bfloat16"),
    "causal": (False, True),
    # Scores of about +-1 and of beyond +-200.
    "magnitude": (1.0, 60.0),
    "scale": (None, 0.0, -0.25, 1e-6),
}
# Some kernels take a millisecond for each row of a T x T matrix in the interpreter: few
# rows, and few levels.
FEWER = {
    "T_q": (17, 70, 1), "T_k": (17, 70, 1), "d": (16, 111, 256),
    "scale": (None, 0.0, -0.25),
}  # fmt: skip
SHORT = FACTORS if CUDA else {**FACTORS, **FEWER}
# The materializing kernels cut d into tiles as well, of 16 or 32 elements in float32: a
# wide head is many tiles, and 40 rows are two or three.
LESS = {"T_q": (17, 40, 1), "T_k": (17, 40, 1), "d": (16, 40, 80)}
NARROW = FACTORS if CUDA else SHORT | LESS
# (B, H, T_q, T_k) of inputs without elements
EMPTY = ((0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 0, 5, 5))


def output_gradients(q, v, *, layout="contiguous", with_dlse=True):
    """do in a layout, and dlse ``[B, H, T_q]`` with a stride, or zeros with none."""
    sizes, options = q.shape[:3], {"dtype": q.dtype, "device": q.device}
    do, _, _ = testing.make_qkv(*sizes, v.shape[3], seed=1, layout=layout, **options)
    dlse, _, _ = testing.make_qkv(*sizes, 16, device=q.device, seed=2)
    zeros = torch.zeros((), device=q.device).expand(sizes)
    return do, dlse[..., 0] if with_dlse else zeros


def pairs(case):
    """The pairs of values that a case covers, each with the number of its factor."""
    return map(frozenset, itertools.combinations(enumerate(case), 2))


def pairwise(factors, seed, candidates=60):
    """A small list of cases in which every pair of levels of two factors occurs.
    Greedy: of candidates that take, factor by factor in a random order, the level that
    covers most missing pairs, the best, among equals the cheapest, joins the list.
    """
    rng, columns = random.Random(seed), list(enumerate(factors.values()))
    missing = {}  # a set in a fixed order
    for (a, first), (b, second) in itertools.combinations(columns, 2):
        for x, y in itertools.product(first, second):
            missing[frozenset([(a, x), (b, y)])] = None

    def gain(chosen, column, place):
        factor, levels = column
        own = factor, levels[place]
        covered = sum(frozenset([own, x]) in missing for x in chosen.items())
        return covered, -place * rng.random()

    def candidate(pair):
        chosen = dict(pair)
        for column in rng.sample(columns, len(columns)):
            factor, levels = column
            if factor not in chosen:
                best = functools.partial(gain, chosen, column)
                chosen[factor] = levels[max(range(len(levels)), key=best)]
        return Case(*(chosen[factor] for factor, _ in columns))

    def rank(case):
        return sum(pair in missing for pair in pairs(case)), -case.work

    found = []
    while missing:
        drawn = rng.choices(list(missing), k=candidates)
        found.append(max(map(candidate, drawn), key=rank))
        for pair in pairs(found[-1]):
            missing.pop(pair, None)
    return found


def spread(factors, seed, count):
    """``count`` dicts with every level equally often, in random combinations."""
    rng, columns = random.Random(seed), []
    for levels in factors.values():
        column = [levels[i % len(levels)] for i in range(count)]
        columns.append(rng.sample(column, count))
    return [dict(zip(factors, row, strict=True)) for row in zip(*columns, strict=True)]


def each_level(factors, seed):
    """As few cases as possible in which every level of every factor occurs."""
    return [
        Case(**row) for row in spread(factors, seed, max(map(len, factors.values())))
    ]


class Case(NamedTuple):
    """One shape, dtype, layout and range of numbers."""

    T_q: int
    T_k: int
    d: int
    d_v: int | str
    heads: tuple
    layout: str
    dtype: str
    causal: bool
    magnitude: float
    scale: float | None

    def __str__(self):
        return "-".join(f"{name}={value}" for name, value in self._asdict().items())

    def inputs(self, **changes):
        """q, k, v; B is 2 unless the case is large and runs in the interpreter."""
        (H, H_kv), dtype = self.heads, getattr(torch, self.dtype)
        B = 1 if self.T_q * H > 120 and not CUDA else 2
        d_v = self.d if self.d_v == "d" else self.d_v
        sizes = {"T_k": self.T_k, "H_kv": H_kv, "d_v": d_v, "device": DEVICE}
        kind = {"dtype": dtype, "layout": self.layout, "magnitude": self.magnitude}
        return testing.make_qkv(B, H, self.T_q, self.d, **sizes, **kind | changes)

    def output_gradients(self, q, v):
        """do in another layout than q where that is possible, and dlse, or zeros."""
        other = {"contiguous": "expanded", "packed": "transposed"}
        layout = other.get(self.layout, self.layout)
        return output_gradients(q, v, layout=layout, with_dlse=self.d_v == 24)

    @property
    def work(self):
        """How long the case takes in the interpreter, in no particular unit."""
        rows = self.T_q * self.heads[0]
        return rows * (1 if rows > 120 else 2) * (32 + self.T_k * self.d / 64)

    @property
    def scale_value(self):
        """The scale as the number that a kernel's launcher takes."""
        return 1.0 / math.sqrt(self.d) if self.scale is None else self.scale


def cases(seed, factors=FACTORS):
    """Every pair of levels; on a GPU, in the slow tests, the products too."""
    covering = pairwise(factors, seed)
    marks = [pytest.mark.gpu, pytest.mark.slow]
    more = [case for case in large_product() if case not in covering] if CUDA else []
    return [pytest.param(case, id=str(case)) for case in covering] + [
        pytest.param(case, id=str(case), marks=marks) for case in more
    ]


def large_product():
    """Lengths, widths, dtype and mask in full; then the rest at four lengths."""
    widths = {
        **FACTORS, "d_v": ("d",), "heads": ((6, 2),), "layout": ("transposed",),
        "magnitude": (1.0,), "scale": (None,),
    }  # fmt: skip
    views = {
        **FACTORS, "T_q": (17, 203), "T_k": (1, 113), "d": (111,), "d_v": (80,),
        "scale": (None, -0.25),
    }  # fmt: skip
    levels = itertools.chain.from_iterable(
        itertools.product(*factors.values()) for factors in (widths, views)
    )
    return list(
        dict.fromkeys(Case(**dict(zip(FACTORS, x, strict=True))) for x in levels)
    )


def slopes(H, B=None):
    """The slopes of ALiBi's paper, 2^(-8 h / H), or others for every batch."""
    found = 2.0 ** (-8.0 * torch.arange(1, H + 1, device=DEVICE) / H)
    if B is None:
        return found
    return found * torch.linspace(0.5, 2.0, B, device=DEVICE)[:, None]


def check_empty(shape, d, method, causal=True, dtype=torch.float32):
    """Results and gradients of tensors without elements."""
    B, H, T_q, T_k = shape
    leaves = testing.make_qkv(
        B, H, T_q, d, T_k=T_k, dtype=dtype, device=DEVICE, requires_grad=True
    )
    options = {"causal": causal, "method": method, "return_lse": True}
    o, lse = flashlib.attention(*leaves, **options)
    assert o.shape == (B, H, T_q, d) and (o == 0).all()
    assert lse.shape == (B, H, T_q) and (lse == -math.inf).all()
    assert lse.dtype == torch.float32
    for x, gradient in zip(leaves, torch.autograd.grad(o.sum(), leaves), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


def case_name(case):
    """A case that is a dict as the name of its test."""
    return "-".join(f"{key}={value}" for key, value in case.items())


def far_apart(tensors, dimension):
    """The same numbers of tensors of one shape, with 4 dimensions, in views whose last
    element lies more than 2^31 elements after the first, by the strides of one
    dimension; only the pages that are touched take memory.
    """
    *outer, d = tensors[0].shape
    far = {"batch": 0, "page": 0, "head": 1, "row": 2}[dimension]
    strides, step = [0, 0, 0, 1], d
    for n in {0, 1, 2} - {far}:
        strides[n], step = step, step * outer[n]
    strides[far] = 2**31 // (outer[far] - 1) + 2**20
    size = sum((n - 1) * by for n, by in zip(outer, strides, strict=False)) + 2**20
    if CUDA:
        storage = torch.zeros(size, dtype=torch.float16, device=DEVICE)
    else:
        storage = torch.from_numpy(np.zeros(size, dtype=np.float16))
    return [
        storage.as_strided(x.shape, strides, 2**18 * n).copy_(x)
        for n, x in enumerate(tensors)
    ]


# -- caches in pages

NOWHERE = -(2**30)  # an entry of a block table that a kernel must not follow


def in_pages(lengths, page, batches, rows, columns):
    """The block table [B, columns] of sequences in random pages, NOWHERE after the
    last page of each, and which rows [batches, rows] of a cache are theirs; page 0
    stands for a contiguous cache.
    """
    free = torch.randperm(batches, generator=torch.Generator().manual_seed(1)).tolist()
    seen = torch.zeros(batches, rows, dtype=torch.bool)
    table = torch.full((len(lengths), columns), NOWHERE, dtype=torch.int32)
    for b, length in enumerate(lengths):
        if not page:
            seen[b, :length] = True
        for n in range(math.ceil(length / page) if page else 0):
            table[b, n] = free.pop()
            seen[table[b, n], : length - n * page] = True
    return table, seen
