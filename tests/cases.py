"""Which shapes the kernels are tested on: a set that covers every pair, and on a GPU the product of what
matters most.
"""

import functools
import itertools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from flashlib import testing

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# The kernels of step hopper run on compute capability 9.0 only.
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)

# The first levels of a factor fill what no pair decides, so they are cheap ones.
# Lengths that no block divides, a single row, and both T_q < T_k and T_q > T_k (whose first rows see no key).
LENGTHS = {"T_q": (17, 113, 1, 203), "T_k": (17, 113, 1, 203)}
WIDTHS = {"d": (16, 40, 64, 72, 80, 96, 111, 128, 256), "d_v": ("d", 24, 80)}
HEADS = {"heads": ((2, 2), (6, 2), (7, 1))}
LAYOUT = {"layout": testing.LAYOUTS}
NUMBERS = {
    # bfloat16 on a CPU is float32 rounded once (tested by name): the pairs are spent on dtypes that compute.
    "dtype": ("float32", "float16", "bfloat16") if CUDA else ("float32", "float16"),
    "causal": (False, True),
    # Scores of about +-1 and of beyond +-200.
    "magnitude": (1.0, 60.0),
    "scale": (None, 0.0, -0.25, 1e-6),
}
FACTORS = {**LENGTHS, **WIDTHS, **HEADS, **LAYOUT, **NUMBERS}
# The materialising kernels take a millisecond for each row of a T x T matrix in the interpreter.
SHORT = FACTORS if CUDA else {**FACTORS, "T_q": (17, 113, 1), "T_k": (17, 113, 1)}


def pairs(case):
    """The pairs of levels that a case, one level index for each factor, covers."""
    return {((a, case[a]), (b, case[b])) for a, b in itertools.combinations(range(len(case)), 2)}


def pairwise(factors, seed, candidates=60):
    """A small list of cases in which every pair of levels of two factors occurs.

    Greedy: a candidate starts from a pair that is still missing and takes, factor by factor in a random
    order, the level that covers most missing pairs; the best of the candidates, among equals the
    cheapest, joins the list.
    """
    rng = random.Random(seed)
    names, levels = list(factors), [range(len(x)) for x in factors.values()]
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i, j in itertools.product(levels[a], levels[b])
    }
    cases = []
    while missing:
        best, best_new, best_rank = None, set(), None
        for _ in range(candidates):
            chosen = dict(rng.choice(sorted(missing)))
            for factor in rng.sample(range(len(names)), len(names)):
                if factor in chosen:
                    continue

                def gain(level, factor=factor, chosen=chosen, missing=missing):
                    links = (tuple(sorted([(factor, level), other])) for other in chosen.items())
                    return sum(link in missing for link in links), -level * rng.random()

                chosen[factor] = max(levels[factor], key=gain)
            candidate = tuple(chosen[f] for f in range(len(names)))
            new = pairs(candidate) & missing
            case = Case(**{name: factors[name][i] for name, i in zip(names, candidate, strict=True)})
            rank = (len(new), -case.work)
            if best is None or rank > best_rank:
                best, best_new, best_rank = case, new, rank
        missing -= best_new
        cases.append(best)
    return cases


def each_level(factors, seed):
    """As few cases as possible in which every level of every factor occurs."""
    rng = random.Random(seed)
    count = max(len(levels) for levels in factors.values())
    columns = {
        name: rng.sample([levels[i % len(levels)] for i in range(count)], count)
        for name, levels in factors.items()
    }
    return [Case(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


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
        H, H_kv = self.heads
        parts = [
            f"Tq{self.T_q}",
            f"Tk{self.T_k}",
            f"d{self.d}",
            f"dv{self.d_v}",
            f"H{H}_{H_kv}",
            self.layout,
            self.dtype,
        ]
        parts += ["causal" if self.causal else "full", f"magnitude{self.magnitude:g}", f"scale{self.scale}"]
        return "-".join(parts)

    def inputs(self, **changes):
        """q, k, v on the device under test; B is 2 unless the case is large and runs in the interpreter."""
        H, H_kv = self.heads
        large = self.T_q * H > 120
        sizes = {"T_k": self.T_k, "H_kv": H_kv, "d_v": self.d if self.d_v == "d" else self.d_v}
        changes = {
            "dtype": getattr(torch, self.dtype),
            "layout": self.layout,
            "magnitude": self.magnitude,
        } | changes
        return testing.make_qkv(
            1 if large and not CUDA else 2, H, self.T_q, self.d, device=DEVICE, **sizes, **changes
        )

    @property
    def work(self):
        """How long the case takes in the interpreter, in no particular unit: rows, and tiles of 64 x 64."""
        rows = self.T_q * self.heads[0]
        return rows * (1 if rows > 120 else 2) * (32 + self.T_k * self.d / 64)

    @property
    def scale_value(self):
        """The scale as the number that a kernel's launcher takes."""
        return 1.0 / math.sqrt(self.d) if self.scale is None else self.scale


def product(factors):
    """Every combination of levels."""
    return [
        Case(**dict(zip(factors, levels, strict=True))) for levels in itertools.product(*factors.values())
    ]


def cases(seed, factors=FACTORS):
    """The cases of one test file: every pair of levels, and on a GPU, in the slow tests, the products too."""
    covering = pairwise(factors, seed)
    return [pytest.param(case, id=str(case)) for case in covering] + [
        pytest.param(case, id=str(case), marks=[pytest.mark.gpu, pytest.mark.slow])
        for case in (large_product() if CUDA else [])
        if case not in covering
    ]


def large_product():
    """Lengths, widths, dtype and mask in full; then heads, layout and range of numbers in full at four
    lengths.
    """
    widths = {
        **FACTORS,
        "d_v": ("d",),
        "heads": ((6, 2),),
        "layout": ("transposed",),
        "magnitude": (1.0,),
        "scale": (None,),
    }
    views = {**FACTORS, "T_q": (17, 203), "T_k": (1, 113), "d": (111,), "d_v": (80,), "scale": (None, -0.25)}
    return list(dict.fromkeys(product(widths) + product(views)))


def far_apart(tensors, dimension):
    """The same numbers of tensors ``[3, 3, 3, d]`` in views whose last element lies more than 2^31 elements
    after the first, by the strides of one dimension; only the pages that are touched take memory.
    """
    reach, d = 2**30 + 2**20, tensors[0].shape[3]
    strides = {
        "batch": (reach, 3 * d, d, 1), "head": (3 * d, reach, d, 1), "row": (9 * d, 3 * d, reach, 1),
    }[dimension]  # fmt: skip
    if CUDA:
        storage = torch.zeros(2 * reach + 2**20, dtype=torch.float16, device=DEVICE)
    else:
        storage = torch.from_numpy(np.zeros(2 * reach + 2**20, dtype=np.float16))
    return [storage.as_strided(x.shape, strides, 2**18 * n).copy_(x) for n, x in enumerate(tensors)]


def process_environment(**changes):
    """The environment of a process of its own; a variable that is None is taken out."""
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


def compile_all(architecture, requests):
    """What compile_worker.py finds out about the kernels of each request: a list of facts for each."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_worker.py")), str(architecture)],
        input=json.dumps(requests),
        env=process_environment(TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [[] for _ in requests]
    for line in done.stdout.splitlines():
        facts = json.loads(line)
        found[facts["job"]].append(facts)
    return found


def compiler(jobs, thorough_jobs):
    """``compiled(architecture, thorough)``: what came out of the jobs that one of the two functions lists for
    an architecture, ``{job: [facts about each kernel]}``. Each list is compiled once.
    """

    @functools.cache
    def compiled(architecture, thorough):
        wanted = (thorough_jobs if thorough else jobs)(architecture)
        return dict(zip(wanted, compile_all(architecture, [job.request() for job in wanted]), strict=True))

    return compiled


def run_python(code, **environment):
    """Run code in a Python process of its own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, env=process_environment(**environment), timeout=300
    )
