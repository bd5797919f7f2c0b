"""What the tensor cores keep of a sum, found with crafted inputs: the record probes.

A product has one row of numbers and one column of ones or powers of two, so that the
exact sum is known. BIG is 2^12, and SMALL a smaller number:

aligned   SMALL is lost next to BIG and -BIG in one instruction when it is smaller than
          BIG 2^-aligned. What an instruction adds, it shifts to the exponent of the
          largest number; this is how many bits below it remain.
held      the same with BIG, SMALL and -BIG in three instructions: the bits below the
          leading one that a sum keeps from one instruction to the next.
rounding  how three quarters of the last bit of such a sum is rounded, and of a negative
          one.
together  how many products are shifted together. Next to BIG and -BIG in an
          instruction, all other SMALL ones of their group are lost.

``sums`` says what becomes of the sum of n numbers, uniform in [0, 1] before they are
rounded to the dtype, 64 draws: measured over exact, in one sum, and with each 128 added
by tensor cores and these sums in float32 ("two levels"). Published measurements of such
sums: Khattak and Mikaitis (2025); DeepSeek-AI, "DeepSeek-V3" (2024), section 3.3.2.
"""

import functools
import itertools
import math

import torch

from benchmarks import runs, timing

DTYPES = (torch.float8_e4m3fn, torch.float16, torch.bfloat16)
BIG = 12  # exponent
LEAST = -18  # exponent of the smallest product of two numbers in E4M3
LENGTHS = (1024, 4096, 16384)
BLOCK = 128  # numbers of a sum of the lower level


def product(a, b):
    """The product on tensor cores, ``[64, 8]``."""
    from benchmarks import tensor_cores

    return tensor_cores.product(a, b)


def each(dtype):
    """How many numbers of a row one instruction reads."""
    return 32 // dtype.itemsize


def added(dtype, instructions):
    """The sum, in the first row and column of a product, of the terms of each of the
    instructions, a list of {place: (factor, exponent)}; all others are 0.
    """
    K = each(dtype)
    a = torch.zeros(64, len(instructions) * K, dtype=torch.float64)
    b = torch.zeros(8, len(instructions) * K, dtype=torch.float64)
    for n, terms in enumerate(instructions):
        for place, (factor, exponent) in terms.items():
            a[:, n * K + place] = factor * 2.0 ** (exponent // 2)
            b[:, n * K + place] = 2.0 ** (exponent - exponent // 2)
    found = product(*(x.to(dtype).to(timing.DEVICE) for x in (a, b)))
    return found[0, 0].item()


def kept(dtype, apart):
    """The largest n for which 2^(BIG - n) survives next to 2^BIG and -2^BIG: in one
    instruction, or each in one.
    """
    for n in range(1, BIG - LEAST + 1):
        terms = (1.0, BIG), (1.0, BIG - n), (-1.0, BIG)
        together = [dict(enumerate(terms))]
        parts = [{0: term} for term in terms]
        if added(dtype, parts if apart else together) != 2.0 ** (BIG - n):
            return n - 1
    return BIG - LEAST


def rounding(dtype, held):
    """How a sum with ``held`` bits is rounded, from three quarters of the last one."""
    unit = BIG - held
    kept_of = {}
    for sign in (1.0, -1.0):
        big, small = (sign, BIG), (1.5 * sign, unit - 1)
        rest = added(dtype, [{0: big}, {0: small}, {0: (-sign, BIG)}])
        kept_of[sign] = rest / 2.0**unit
    names = {
        (0.0, 0.0): "toward zero",
        (1.0, -1.0): "to nearest",
        (0.0, -1.0): "down",
        (1.0, 0.0): "up",
    }
    return names.get(tuple(kept_of.values()), f"{kept_of}")


def shifted_together(dtype, aligned):
    """How many products of an instruction are shifted to one exponent."""
    K, exponent = each(dtype), BIG - aligned - 2
    terms = dict.fromkeys(range(2, K), (1.0, exponent))
    terms |= {0: (1.0, BIG), 1: (-1.0, BIG)}
    survive = added(dtype, [terms]) / 2.0**exponent
    return K - round(survive)


def probe(dtype):
    """The cell of a dtype."""
    aligned, held = kept(dtype, False), kept(dtype, True)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "numbers": each(dtype),  # of a row, that an instruction reads
        "aligned": aligned,
        "held": held,
        "rounding": rounding(dtype, held),
        "together": shifted_together(dtype, aligned),
    }


def sums(dtype, n, blocks):
    """The cell of sums of n numbers, in parts of ``blocks`` that float32 adds."""
    generator = torch.Generator().manual_seed(n)
    a = torch.rand(64, n, generator=generator, dtype=torch.float64).to(dtype)
    b = torch.ones(8, n, dtype=torch.float64).to(dtype)
    exact = a.double().sum(1)
    parts = [
        product(x.contiguous().to(timing.DEVICE), y.contiguous().to(timing.DEVICE))
        for x, y in zip(a.split(blocks, 1), b.split(blocks, 1), strict=True)
    ]
    total = functools.reduce(torch.add, parts)[:, 0].double().cpu()
    ratio = (total / exact).mean().item()
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "n": n,
        "levels": "one level" if blocks == n else "two levels",
        "ratio": ratio,
    }


def both_sums(dtype, n):
    """The cells of sums in one level and in two."""
    return [sums(dtype, n, blocks) for blocks in (n, BLOCK)]


def run(quick, say, path=None, end=math.inf):
    """(record as a dict, lines that say what is left): see benchmarks/runs.py. quick:
    one length.
    """
    about = "one product on tensor cores for each question: see benchmarks/probes.py"
    fresh = {"pass": "probes", **timing.environment(), "timing": about}
    one = runs.Run(fresh, say, path, end)
    names = {x: {"dtype": str(x).removeprefix("torch.")} for x in DTYPES}
    tasks = [
        runs.Task("cells", [name], lambda x=dtype: [probe(x)])
        for dtype, name in names.items()
    ]
    for dtype, n in itertools.product(DTYPES, LENGTHS[:1] if quick else LENGTHS):
        action = functools.partial(both_sums, dtype, n)
        tasks.append(runs.Task("sums", [names[dtype] | {"n": n}], action))
    one.measure(one.left(tasks))
    return one.result(tasks)
