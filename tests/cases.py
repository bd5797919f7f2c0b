"""Shapes that cover every pair, and on a GPU the product of what matters most."""

import functools
import itertools
import math
import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import interpreter  # noqa: F401 (it makes Triton's faster)
import numpy as np
import pytest
import torch

from flashlib import testing
from flashlib.kernels import backward, flash2, masks
from flashlib.kernels.scores import ScoreMod
from flashlib.plain_checks import UNLIMITED

ROOT = Path(__file__).resolve().parents[1]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# The kernels of step hopper run on compute capability 9.0 only.
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)

on_cpu = pytest.mark.skipif(CUDA, reason="for the interpreter")
# What torch.compile is given: autograd and tracing alone, and on a GPU the compiler too.
each_backend = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]
)

# The interpreter takes a second for a large case, so factors have fewer levels there. The
# first levels of a factor fill what no pair decides, so they are cheap ones. Lengths
# that no block divides, a single row, and both T_q < T_k and T_q > T_k (whose first
# rows see no key).
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
    """The pairs of values that a case covers, each value with the number of its factor."""
    return map(frozenset, itertools.combinations(enumerate(case), 2))


def pairwise(factors, seed, candidates=60):
    """A small list of cases in which every pair of levels of two factors occurs. Greedy:
    of candidates that take, factor by factor in a random order, the level that covers
    most missing pairs, the best, among equals the cheapest, joins the list.
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


def refused(error, message):
    """A context that expects one clear line: an error whose message starts so."""
    return pytest.raises(error, match=rf"\A{message}(?!(.|\n)*\n)")


def as_python(functions, **names):
    """The jit functions of these names as Python, among names that they see."""
    for name in functions:
        names[name] = FunctionType(names[name].fn.__code__, names)
    return SimpleNamespace(**names)


def with_id(table):
    """Rows (error, message, ...) as parameters, each named by its message."""
    return [pytest.param(*row, id=row[1]) for row in table]


def same(found, wanted):
    """Whether two lists of tensors agree in every bit."""
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def process_environment(**changes):
    """The environment of a process of its own; a variable that is None is removed."""
    both = {**os.environ, **changes}
    return {name: value for name, value in both.items() if value is not None}


def run(command, seconds=300, **options):
    """A command when it has ended, with what it said."""
    options |= {"capture_output": True, "text": True, "timeout": seconds}
    return subprocess.run(command, **options)


def output(ended):
    """What a command printed; AssertionError with its messages if it failed."""
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


def run_python(code, **environment):
    """Run code in a Python process of its own."""
    command = [sys.executable, "-c", code]
    return run(command, env=process_environment(**environment))


# The variables of this process's own make, which another one is run without.
OF_MAKE = "MAKEFLAGS MAKELEVEL MFLAGS PYTHON SYSTEM_TORCH COURSE STEP SUBMISSIONS"
OWN_MAKE = dict.fromkeys(OF_MAKE.split())


def make(*arguments, folder=ROOT, seconds=600, **environment):
    """Run make in a folder."""
    env = process_environment(**OWN_MAKE | environment)
    return run(["make", *arguments], seconds, cwd=folder, env=env)


def build_wheel(folder, *packages):
    """A wheel of the library, built in a folder that has these packages alone."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in packages:
        shutil.copytree(ROOT / name, folder / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", "out", "."]
    pip += ["--no-deps", "--no-build-isolation"]
    subprocess.run(pip, cwd=folder, check=True, timeout=120)
    return zipfile.ZipFile(next((folder / "out").glob("*.whl")))


def in_memory_order(x, like):
    """Whether x is dense and stored in the order of like, unless that is expanded."""
    order = range(x.ndim - 1)
    if 0 not in like.stride():  # not expanded
        order = sorted(order, key=lambda n: -like.stride(n))
    return x.permute(*order, x.ndim - 1).is_contiguous()


# What stands for the kernels of step hopper where there is no such GPU: flash2 and the
# kernels of masks, bound here, whatever a test puts in their place.
_ran = flash2.forward, masks.forward, backward.backward, masks.backward


def other_forward(q, k, v, causal, scale, left=None, packing=None):
    if left is None and packing is None:
        return _ran[0](q, k, v, causal, scale)
    left = UNLIMITED if left is None else left
    score_mod = ScoreMod(scale, left, 0 if causal else UNLIMITED)
    return _ran[1](q, k, v, score_mod, packing)


def other_backward(
    q, k, v, o, lse, do, dlse, causal, scale, deterministic=True, left=None
):
    given = q, k, v, o, lse, do, dlse
    if left is None:
        return _ran[2](*given, causal, scale, deterministic)
    return _ran[3](*given, ScoreMod(scale, left, 0))
