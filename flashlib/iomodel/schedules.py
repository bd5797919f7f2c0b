"""Attention on the two-level memory: who lies in fast memory when, and what passes in between.

Each schedule is a program on handles of resident blocks (:mod:`flashlib.iomodel.memory`). It sees its inputs
only through ``load``; every result is zeroed, accumulated and stored; row statistics are blocks and counted.
Chapters *The memory bottleneck*, *Row by row, block by block*, *FlashAttention*, *FlashAttention-2* and *The
backward pass*; the lecture slides' Algorithms 1 to 8, with the scale and the maximum that they drop.

    run = row_block_forward(q, k, v, capacity_words=200, B_r=2, B_c=3)
    run["O"], run.memory.moved_words

Arguments of every schedule: its inputs in slow memory, two-dimensional and real, computed in float64; the
keywords ``capacity_words``, ``trace`` (keep ``run.memory.trace()``), its block sizes and, where it has
scores, ``scale`` (1/sqrt(d) unless given). Blocks at the end of a matrix are smaller when a size does not
divide it. A schedule that does not fit raises CapacityExceeded; arrays and options that do not fit its
signature raise ValueError and TypeError.
"""

import functools
import inspect
import math
from typing import NamedTuple

import numpy as np

from flashlib.iomodel.memory import TwoLevelMemory

ONE = slice(0, 1)  # the only column of a row statistic


class Run(NamedTuple):
    """What a schedule leaves behind: its stored arrays by name, and the memory with its counts."""

    arrays: dict
    memory: TwoLevelMemory

    def __getitem__(self, name):
        return self.arrays[name]


def schedule(inputs, results):
    """Make a schedule of a body that is given only the memory, the sizes and the options that it names.

    inputs, results: {array: "rows columns"} in the letters of the sizes, such as {"Q": "T d"}. The inputs
    become the positional arguments of the schedule, in this order. The schedule raises ValueError for an
    array that does not fit its letters, TypeError for a wrong number of arrays or other options than the body
    has.
    """

    def decorate(body):
        wanted = list(inspect.signature(body).parameters)[1:]

        @functools.wraps(body)
        def run(*arrays, capacity_words, trace=False, **options):
            if len(arrays) != len(inputs):
                raise TypeError(f"{body.__name__} takes {', '.join(inputs)}, got {len(arrays)} arrays")
            memory, sizes = TwoLevelMemory(capacity_words, trace=trace), {"1": 1}
            for (name, letters), array in zip(inputs.items(), arrays, strict=True):
                array = np.asarray(array)
                if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "fiu":
                    got = f"{array.dtype} of shape {array.shape}"
                    raise ValueError(f"{name} must be a real matrix that is not empty, got {got}")
                for letter, size in zip(letters.split(), array.shape, strict=True):
                    if sizes.setdefault(letter, size) != size:
                        raise ValueError(
                            f"{name} must be {letters} with {letter} = {sizes[letter]}, got {array.shape}"
                        )
                memory.place(name, array)
            for name, letters in results.items():
                memory.reserve(name, *(sizes[letter] for letter in letters.split()))
            if "scale" in wanted and options.get("scale") is None:
                options["scale"] = 1.0 / math.sqrt(sizes["d"])
            expected = [name for name in wanted if name not in sizes]
            if sorted(options) != sorted(expected):
                raise TypeError(f"{body.__name__} expects the options {expected}, got {sorted(options)}")
            body(memory, **{name: sizes[name] for name in wanted if name in sizes}, **options)
            return Run({name: memory.array(name) for name in results}, memory)

        return run

    return decorate


def blocks(size, step):
    """The ranges 0:step, step:2 step, ... that cover ``size``, as slices; the last one may be shorter.

    ValueError for a step that is no integer of at least 1.
    """
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 1:
        raise ValueError(f"a block size must be an integer of at least 1, got {step!r}")
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def row_max(x):
    """The largest entry of each row, as a column."""
    return np.maximum.reduce(x, axis=1, keepdims=True)


def row_sum(x):
    """The sum of each row, as a column."""
    return np.add.reduce(x, axis=1, keepdims=True)


def softmax_in_place(memory, s, I):
    """Turn resident whole rows of scores into probabilities in the same space; one statistic at a time."""
    m = memory.allocate("m", I, ONE)
    m[:] = row_max(s)
    s[:] = np.exp(s - m)
    memory.free(m)
    l = memory.allocate("l", I, ONE)
    l[:] = row_sum(s)
    s /= l
    memory.free(l)


# ------------------------------------------------------------------------------------------------------------
# A matrix product in tiles


@schedule({"A": "m k", "B": "k n"}, {"C": "m n"})
def matmul(memory, m, n, k, b_m, b_n, b_k):
    """C = A B: a tile of C stays while the tiles of A and B that it needs pass by."""
    for I in blocks(m, b_m):
        for J in blocks(n, b_n):
            c = memory.allocate("C", I, J)
            c[:] = 0.0
            for K in blocks(k, b_k):
                a = memory.load("A", I, K)
                b = memory.load("B", K, J)
                c += a @ b
                memory.free(a, b)
            memory.store(c)
            memory.free(c)


# ------------------------------------------------------------------------------------------------------------
# Standard attention: every T x T matrix goes to slow memory and back


@schedule({"Q": "T d", "K": "T d", "V": "T d"}, {"S": "T T", "P": "T T", "O": "T d"})
def standard_forward(memory, T, d, scale, B_r, B_c):
    """Scores, softmax, output: three steps on their own. Slides (28)-(30).

    The softmax holds one whole row; where none fits, see ``softmax_by_pieces``.
    """
    for I in blocks(T, B_r):
        q = memory.load("Q", I)
        for J in blocks(T, B_c):
            k = memory.load("K", J)
            s = memory.allocate("S", I, J)
            s[:] = scale * (q @ k.T)
            memory.store(s)
            memory.free(s, k)
        memory.free(q)

    for i in blocks(T, 1):
        s = memory.load("S", i)
        softmax_in_place(memory, s, i)
        p = memory.reuse(s, "P")
        memory.store(p)
        memory.free(p)

    for I in blocks(T, B_r):
        o = memory.allocate("O", I)
        o[:] = 0.0
        for J in blocks(T, B_c):
            p = memory.load("P", I, J)
            v = memory.load("V", J)
            o += p @ v
            memory.free(p, v)
        memory.store(o)
        memory.free(o)


@schedule({"S": "T N"}, {"P": "T N"})
def softmax_by_pieces(memory, T, N, B_c):
    """The safe softmax of each row of S, B_c scores at a time: maximum, sum and quotient are three passes."""
    for i in blocks(T, 1):
        m = memory.allocate("m", i, ONE)
        l = memory.allocate("l", i, ONE)
        m[:] = -np.inf
        for J in blocks(N, B_c):
            s = memory.load("S", i, J)
            m[:] = np.maximum(m, row_max(s))
            memory.free(s)
        l[:] = 0.0
        for J in blocks(N, B_c):
            s = memory.load("S", i, J)
            l += row_sum(np.exp(s - m))
            memory.free(s)
        for J in blocks(N, B_c):
            s = memory.load("S", i, J)
            s[:] = np.exp(s - m) / l
            p = memory.reuse(s, "P")
            memory.store(p)
            memory.free(p)
        memory.free(m, l)


@schedule(
    {"Q": "T d", "K": "T d", "V": "T d", "P": "T T", "O": "T d", "dO": "T d"},
    {"dV": "T d", "dP": "T T", "D": "T 1", "dS": "T T", "dQ": "T d", "dK": "T d"},
)
def standard_backward(memory, T, d, scale, B_r, B_c):
    """The materialising backward pass in the order of the slides' (31)-(32), in six steps; P is an input."""
    for J in blocks(T, B_c):
        dv = memory.allocate("dV", J)
        dv[:] = 0.0
        for I in blocks(T, B_r):
            p = memory.load("P", I, J)
            do = memory.load("dO", I)
            dv += p.T @ do
            memory.free(p, do)
        memory.store(dv)
        memory.free(dv)

    for I in blocks(T, B_r):
        do = memory.load("dO", I)
        for J in blocks(T, B_c):
            v = memory.load("V", J)
            dp = memory.allocate("dP", I, J)
            dp[:] = do @ v.T
            memory.store(dp)
            memory.free(dp, v)
        memory.free(do)

    for I in blocks(T, B_r):
        do = memory.load("dO", I)
        o = memory.load("O", I)
        delta = memory.allocate("D", I)
        delta[:] = row_sum(do * o)
        memory.store(delta)
        memory.free(delta, do, o)

    for I in blocks(T, B_r):
        delta = memory.load("D", I)
        for J in blocks(T, B_c):
            p = memory.load("P", I, J)
            dp = memory.load("dP", I, J)
            dp[:] = p * (dp - delta)
            ds = memory.reuse(dp, "dS")
            memory.store(ds)
            memory.free(ds, p)
        memory.free(delta)

    for I in blocks(T, B_r):
        dq = memory.allocate("dQ", I)
        dq[:] = 0.0
        for J in blocks(T, B_c):
            ds = memory.load("dS", I, J)
            k = memory.load("K", J)
            dq += scale * (ds @ k)
            memory.free(ds, k)
        memory.store(dq)
        memory.free(dq)

    for J in blocks(T, B_c):
        dk = memory.allocate("dK", J)
        dk[:] = 0.0
        for I in blocks(T, B_r):
            ds = memory.load("dS", I, J)
            q = memory.load("Q", I)
            dk += scale * (ds.T @ q)
            memory.free(ds, q)
        memory.store(dk)
        memory.free(dk)


# ------------------------------------------------------------------------------------------------------------
# Row by row, block by block


@schedule({"Q": "T d", "K": "T d", "V": "T d"}, {"O": "T d"})
def algorithm_1(memory, T, d, scale):
    """The slides' Algorithm 1, (33)-(35): Q, K and V at once, O row by row."""
    q = memory.load("Q")
    k = memory.load("K")
    v = memory.load("V")
    for i in blocks(T, 1):
        s = memory.allocate("S", i, slice(0, T))
        s[:] = scale * (q[i] @ k.T)
        softmax_in_place(memory, s, i)
        o = memory.allocate("O", i)
        o[:] = s @ v
        memory.store(o)
        memory.free(o, s)
    memory.free(q, k, v)


@schedule({"Q": "T d", "K": "T d", "V": "T d"}, {"O": "T d"})
def row_block_forward(memory, T, d, scale, B_r, B_c):
    """The slides' (36)-(38): B_r whole rows of scores, K and V by B_c rows."""
    for I in blocks(T, B_r):
        q = memory.load("Q", I)
        s = memory.allocate("S", I, slice(0, T))
        for J in blocks(T, B_c):
            k = memory.load("K", J)
            s[:, J] = scale * (q @ k.T)
            memory.free(k)
        memory.free(q)
        softmax_in_place(memory, s, I)
        o = memory.allocate("O", I)
        o[:] = 0.0
        for J in blocks(T, B_c):
            v = memory.load("V", J)
            o += s[:, J] @ v
            memory.free(v)
        memory.store(o)
        memory.free(o, s)


@schedule(
    {"Q": "T d", "K": "T d", "V": "T d", "O": "T d", "dO": "T d"},
    {"dQ": "T d", "dK": "T d", "dV": "T d"},
)
def row_block_backward(memory, T, d, scale, B_r, B_c):
    """The slides' (58)-(64): B_r whole rows of P and dP; dK and dV come and go.

    (61), which needs neither P nor dP, comes first, so that O can leave. Before the
    first block of rows dK and dV are zero and need no load.
    """
    for I in blocks(T, B_r):
        do = memory.load("dO", I)
        o = memory.load("O", I)
        delta = memory.allocate("D", I, ONE)
        delta[:] = row_sum(do * o)
        memory.free(o)

        q = memory.load("Q", I)
        p = memory.allocate("P", I, slice(0, T))
        for J in blocks(T, B_c):
            k = memory.load("K", J)
            p[:, J] = scale * (q @ k.T)
            memory.free(k)
        softmax_in_place(memory, p, I)

        for J in blocks(T, B_c):
            dv = accumulator(memory, "dV", J, first=I.start == 0)
            dv += p[:, J].T @ do
            memory.store(dv)
            memory.free(dv)

        dp = memory.allocate("dP", I, slice(0, T))
        for J in blocks(T, B_c):
            v = memory.load("V", J)
            dp[:, J] = do @ v.T
            memory.free(v)
        dp[:] = p * (dp - delta)
        ds = memory.reuse(dp, "dS")
        memory.free(p, do, delta)

        dq = memory.allocate("dQ", I)
        dq[:] = 0.0
        for J in blocks(T, B_c):
            k = memory.load("K", J)
            dq += scale * (ds[:, J] @ k)
            memory.free(k)
            dk = accumulator(memory, "dK", J, first=I.start == 0)
            dk += scale * (ds[:, J].T @ q)
            memory.store(dk)
            memory.free(dk)
        memory.store(dq)
        memory.free(dq, ds, q)


def accumulator(memory, name, rows, first, start=0.0):
    """A block of what is kept up in slow memory: ``start`` the first time, loaded afterwards."""
    if not first:
        return memory.load(name, rows)
    block = memory.allocate(name, rows)
    block[:] = start
    return block


@schedule({"Q": "T d", "K": "T d", "V": "T d"}, {"O": "T d"})
def algorithm_2(memory, T, d, scale, B_r, B_c):
    """The slides' Algorithm 2, (42): no softmax, O_I is the sum over J of S_IJ V_J.

    V_J takes the place of K_J, so four blocks are resident: Q_I, O_I, S_IJ, and one of
    K_J and V_J.
    """
    for I in blocks(T, B_r):
        q = memory.load("Q", I)
        o = memory.allocate("O", I)
        o[:] = 0.0
        for J in blocks(T, B_c):
            k = memory.load("K", J)
            s = memory.allocate("S", I, J)
            s[:] = scale * (q @ k.T)
            memory.free(k)
            v = memory.load("V", J)
            o += s @ v
            memory.free(v, s)
        memory.store(o)
        memory.free(o, q)


# ------------------------------------------------------------------------------------------------------------
# Softmax one block at a time


def fold(s, m, l, factor):
    """Turn the scores of a block into weights, and m, l into those of the keys so far, this block included.

    factor becomes exp(old m - m): earlier sums times factor refer to the new maximum.
    """
    factor[:] = np.exp(m - np.maximum(m, row_max(s)))
    m[:] = np.maximum(m, row_max(s))
    s[:] = np.exp(s - m)
    l[:] = factor * l + row_sum(s)


def fold_and_divide(s, m, l, factor):
    """As ``fold``, with weights divided by the new l; factor is for an output that was divided by the old."""
    factor[:] = np.exp(m - np.maximum(m, row_max(s))) * l
    m[:] = np.maximum(m, row_max(s))
    s[:] = np.exp(s - m)
    l[:] = factor + row_sum(s)
    factor /= l
    s /= l


@schedule({"Q": "T d", "K": "T d", "V": "T d"}, {"O": "T d", "m": "T 1", "l": "T 1"})
def algorithm_3(memory, T, d, scale, B_r, B_c):
    """The slides' Algorithm 3, (48)-(49): queries outside, O divided at every step.

    With the maximum m that they leave out; their Delta is l. V_J takes the place of
    K_J.
    """
    for I in blocks(T, B_r):
        q = memory.load("Q", I)
        o = memory.allocate("O", I)
        m = memory.allocate("m", I)
        l = memory.allocate("l", I)
        o[:] = 0.0
        m[:] = -np.inf
        l[:] = 0.0
        for J in blocks(T, B_c):
            k = memory.load("K", J)
            s = memory.allocate("S", I, J)
            s[:] = scale * (q @ k.T)
            memory.free(k)
            factor = memory.allocate("factor", I, ONE)
            fold_and_divide(s, m, l, factor)
            o *= factor
            memory.free(factor)
            v = memory.load("V", J)
            o += s @ v
            memory.free(v, s)
        memory.store(o)
        memory.store(m)
        memory.store(l)
        memory.free(o, m, l, q)


@schedule({"Q": "T d", "K": "T d", "V": "T d"}, {"O": "T d", "L": "T 1"})
def flash2_forward(memory, T, d, scale, B_r, B_c):
    """Dao (2024), Algorithm 1: as ``algorithm_3``, with one division at the end and one
    statistic L = m + ln l.

    What it saves in words is one of the two statistics; divisions are arithmetic.
    """
    for I in blocks(T, B_r):
        q = memory.load("Q", I)
        o = memory.allocate("O", I)
        m = memory.allocate("m", I, ONE)
        l = memory.allocate("l", I, ONE)
        o[:] = 0.0
        m[:] = -np.inf
        l[:] = 0.0
        for J in blocks(T, B_c):
            k = memory.load("K", J)
            s = memory.allocate("S", I, J)
            s[:] = scale * (q @ k.T)
            memory.free(k)
            factor = memory.allocate("factor", I, ONE)
            fold(s, m, l, factor)
            o *= factor
            memory.free(factor)
            v = memory.load("V", J)
            o += s @ v
            memory.free(v, s)
        o /= l
        memory.store(o)
        m += np.log(l)
        lse = memory.reuse(m, "L")
        memory.store(lse)
        memory.free(o, lse, l, q)


@schedule({"Q": "T d", "K": "T d", "V": "T d"}, {"O": "T d", "m": "T 1", "l": "T 1"})
def algorithm_4(memory, T, d, scale, B_r, B_c):
    """The slides' Algorithm 4; Dao et al. (2022), Algorithm 1: keys outside, O, m and l come and go.

    O_I takes the place of Q_I. With the first block of keys O, m and l are those of no
    key and need no load; the paper puts them into slow memory first and loads them.
    """
    for J in blocks(T, B_c):
        k = memory.load("K", J)
        v = memory.load("V", J)
        for I in blocks(T, B_r):
            q = memory.load("Q", I)
            s = memory.allocate("S", I, J)
            s[:] = scale * (q @ k.T)
            memory.free(q)
            m = accumulator(memory, "m", I, first=J.start == 0, start=-np.inf)
            l = accumulator(memory, "l", I, first=J.start == 0)
            factor = memory.allocate("factor", I, ONE)
            fold_and_divide(s, m, l, factor)
            memory.store(m)
            memory.store(l)
            memory.free(m, l)
            o = accumulator(memory, "O", I, first=J.start == 0)
            o *= factor
            o += s @ v
            memory.store(o)
            memory.free(o, s, factor)
        memory.free(k, v)


@schedule({"Q": "T d", "K": "T d", "V": "T d"}, {"O": "T d", "m": "T 1", "l": "T 1"})
def resident_outputs(memory, T, d, scale, B_r, B_c, r):
    """As ``algorithm_4``, but O, m and l of the first r blocks of queries stay in fast memory to the end.

    r is at least 1. With all blocks resident K, V and O pass once, and Q still with
    every block of keys.
    """
    kept_o = memory.allocate("O", slice(0, min(r * B_r, T)))
    kept_m = memory.allocate("m", slice(0, min(r * B_r, T)))
    kept_l = memory.allocate("l", slice(0, min(r * B_r, T)))
    kept_o[:] = 0.0
    kept_m[:] = -np.inf
    kept_l[:] = 0.0
    for J in blocks(T, B_c):
        k = memory.load("K", J)
        v = memory.load("V", J)
        for I in blocks(T, B_r)[:r]:
            q = memory.load("Q", I)
            s = memory.allocate("S", I, J)
            s[:] = scale * (q @ k.T)
            memory.free(q)
            factor = memory.allocate("factor", I, ONE)
            fold_and_divide(s, kept_m[I], kept_l[I], factor)
            kept_o[I] = factor * kept_o[I] + s @ v
            memory.free(s, factor)
        for I in blocks(T, B_r)[r:]:
            q = memory.load("Q", I)
            s = memory.allocate("S", I, J)
            s[:] = scale * (q @ k.T)
            memory.free(q)
            m = accumulator(memory, "m", I, first=J.start == 0, start=-np.inf)
            l = accumulator(memory, "l", I, first=J.start == 0)
            factor = memory.allocate("factor", I, ONE)
            fold_and_divide(s, m, l, factor)
            memory.store(m)
            memory.store(l)
            memory.free(m, l)
            o = accumulator(memory, "O", I, first=J.start == 0)
            o *= factor
            o += s @ v
            memory.store(o)
            memory.free(o, s, factor)
        memory.free(k, v)
    memory.store(kept_o)
    memory.store(kept_m)
    memory.store(kept_l)
    memory.free(kept_o, kept_m, kept_l)


# ------------------------------------------------------------------------------------------------------------
# The backward pass


@schedule(
    {"Q": "T d", "K": "T d", "V": "T d", "O": "T d", "dO": "T d"},
    {"dQ": "T d", "dK": "T d", "dV": "T d"},
)
def algorithm_5(memory, T, d, scale):
    """The slides' Algorithm 5, (51)-(57): five inputs, dK and dV in fast memory, dQ row by row.

    dS_i takes the place of dP_i.
    """
    q = memory.load("Q")
    k = memory.load("K")
    v = memory.load("V")
    o = memory.load("O")
    do = memory.load("dO")
    dk = memory.allocate("dK")
    dv = memory.allocate("dV")
    dk[:] = 0.0
    dv[:] = 0.0
    for i in blocks(T, 1):
        p = memory.allocate("P", i, slice(0, T))
        p[:] = scale * (q[i] @ k.T)
        softmax_in_place(memory, p, i)
        dv += p.T @ do[i]
        dp = memory.allocate("dP", i, slice(0, T))
        dp[:] = do[i] @ v.T
        delta = memory.allocate("D", i, ONE)
        delta[:] = row_sum(do[i] * o[i])
        dp[:] = p * (dp - delta)
        ds = memory.reuse(dp, "dS")
        memory.free(p, delta)
        dk += scale * (ds.T @ q[i])
        dq = memory.allocate("dQ", i)
        dq[:] = scale * (ds @ k)
        memory.store(dq)
        memory.free(dq, ds)
    memory.store(dk)
    memory.store(dv)
    memory.free(q, k, v, o, do, dk, dv)


@schedule(
    {"Q": "T d", "K": "T d", "V": "T d", "O": "T d", "dO": "T d", "L": "T 1"},
    {"dQ": "T d", "dK": "T d", "dV": "T d"},
)
def algorithm_6(memory, T, d, scale, B_r, B_c):
    """The slides' Algorithm 6, (71)-(77): queries outside, dK and dV come and go.

    P from L, where the slides have the sums Delta of exponentials without a maximum.
    Q_I takes the place of O_I, dS_IJ that of P_IJ; eight blocks are resident. With the
    first block of queries dK and dV are zero and need no load.
    """
    for I in blocks(T, B_r):
        do = memory.load("dO", I)
        o = memory.load("O", I)
        delta = memory.allocate("D", I, ONE)
        delta[:] = row_sum(do * o)
        memory.free(o)
        q = memory.load("Q", I)
        lse = memory.load("L", I)
        dq = memory.allocate("dQ", I)
        dq[:] = 0.0
        for J in blocks(T, B_c):
            k = memory.load("K", J)
            v = memory.load("V", J)
            dk = accumulator(memory, "dK", J, first=I.start == 0)
            dv = accumulator(memory, "dV", J, first=I.start == 0)
            p = memory.allocate("P", I, J)
            p[:] = np.exp(scale * (q @ k.T) - lse)
            dv += p.T @ do
            p[:] = p * (do @ v.T - delta)
            ds = memory.reuse(p, "dS")
            dk += scale * (ds.T @ q)
            dq += scale * (ds @ k)
            memory.store(dk)
            memory.store(dv)
            memory.free(k, v, dk, dv, ds)
        memory.store(dq)
        memory.free(do, delta, q, lse, dq)


@schedule(
    {"Q": "T d", "K": "T d", "V": "T d", "O": "T d", "dO": "T d", "L": "T 1"},
    {"dQ": "T d", "dK": "T d", "dV": "T d"},
)
def algorithm_7(memory, T, d, scale, B_r, B_c):
    """The slides' Algorithm 7, (80), with its missing rest; Dao et al. (2022), Algorithm 4: keys outside, dQ
    comes and goes, and D is made again in every inner step.

    Q_I takes the place of O_I. With the first block of keys dQ is zero and needs no
    load.
    """
    for J in blocks(T, B_c):
        k = memory.load("K", J)
        v = memory.load("V", J)
        dk = memory.allocate("dK", J)
        dv = memory.allocate("dV", J)
        dk[:] = 0.0
        dv[:] = 0.0
        for I in blocks(T, B_r):
            do = memory.load("dO", I)
            o = memory.load("O", I)
            delta = memory.allocate("D", I, ONE)
            delta[:] = row_sum(do * o)
            memory.free(o)
            q = memory.load("Q", I)
            lse = memory.load("L", I)
            dq = accumulator(memory, "dQ", I, first=J.start == 0)
            p = memory.allocate("P", I, J)
            p[:] = np.exp(scale * (q @ k.T) - lse)
            dv += p.T @ do
            p[:] = p * (do @ v.T - delta)
            ds = memory.reuse(p, "dS")
            dk += scale * (ds.T @ q)
            dq += scale * (ds @ k)
            memory.store(dq)
            memory.free(do, delta, q, lse, dq, ds)
        memory.store(dk)
        memory.store(dv)
        memory.free(k, v, dk, dv)


@schedule({"O": "T d", "dO": "T d"}, {"D": "T 1"})
def deltas(memory, T, d, B_r):
    """D = rowsum(dO o O), in one pass over the two matrices: the first loop of Algorithm 8."""
    store_deltas(memory, T, B_r)


def store_deltas(memory, T, B_r):
    """D, block of rows by block of rows, into slow memory."""
    for I in blocks(T, B_r):
        do = memory.load("dO", I)
        o = memory.load("O", I)
        delta = memory.allocate("D", I)
        delta[:] = row_sum(do * o)
        memory.store(delta)
        memory.free(do, o, delta)


@schedule(
    {"Q": "T d", "K": "T d", "V": "T d", "O": "T d", "dO": "T d", "L": "T 1"},
    {"D": "T 1", "dQ": "T d", "dK": "T d", "dV": "T d"},
)
def algorithm_8(memory, T, d, scale, B_r, B_c):
    """The slides' Algorithm 8; Dao (2024), Algorithm 2: D beforehand, keys outside, dQ comes and goes.

    Eight blocks are resident. With the first block of keys dQ is zero and needs no
    load.
    """
    store_deltas(memory, T, B_r)
    for J in blocks(T, B_c):
        k = memory.load("K", J)
        v = memory.load("V", J)
        dk = memory.allocate("dK", J)
        dv = memory.allocate("dV", J)
        dk[:] = 0.0
        dv[:] = 0.0
        for I in blocks(T, B_r):
            q = memory.load("Q", I)
            do = memory.load("dO", I)
            lse = memory.load("L", I)
            delta = memory.load("D", I)
            dq = accumulator(memory, "dQ", I, first=J.start == 0)
            p = memory.allocate("P", I, J)
            p[:] = np.exp(scale * (q @ k.T) - lse)
            dv += p.T @ do
            p[:] = p * (do @ v.T - delta)
            ds = memory.reuse(p, "dS")
            dk += scale * (ds.T @ q)
            dq += scale * (ds @ k)
            memory.store(dq)
            memory.free(q, do, lse, delta, dq, ds)
        memory.store(dk)
        memory.store(dv)
        memory.free(k, v, dk, dv)


@schedule(
    {"Q": "T d", "K": "T d", "V": "T d", "dO": "T d", "L": "T 1", "D": "T 1"},
    {"dK": "T d", "dV": "T d"},
)
def split_keys(memory, T, d, scale, B_r, B_c):
    """The first half of the split form: keys outside, dK and dV. Four products; nothing comes and goes."""
    for J in blocks(T, B_c):
        k = memory.load("K", J)
        v = memory.load("V", J)
        dk = memory.allocate("dK", J)
        dv = memory.allocate("dV", J)
        dk[:] = 0.0
        dv[:] = 0.0
        for I in blocks(T, B_r):
            q = memory.load("Q", I)
            do = memory.load("dO", I)
            lse = memory.load("L", I)
            delta = memory.load("D", I)
            p = memory.allocate("P", I, J)
            p[:] = np.exp(scale * (q @ k.T) - lse)
            dv += p.T @ do
            p[:] = p * (do @ v.T - delta)
            ds = memory.reuse(p, "dS")
            dk += scale * (ds.T @ q)
            memory.free(q, do, lse, delta, ds)
        memory.store(dk)
        memory.store(dv)
        memory.free(k, v, dk, dv)


@schedule(
    {"Q": "T d", "K": "T d", "V": "T d", "dO": "T d", "L": "T 1", "D": "T 1"},
    {"dQ": "T d"},
)
def split_queries(memory, T, d, scale, B_r, B_c):
    """The second half of the split form: queries outside, dQ. Three products, two of them made before."""
    for I in blocks(T, B_r):
        q = memory.load("Q", I)
        do = memory.load("dO", I)
        lse = memory.load("L", I)
        delta = memory.load("D", I)
        dq = memory.allocate("dQ", I)
        dq[:] = 0.0
        for J in blocks(T, B_c):
            k = memory.load("K", J)
            v = memory.load("V", J)
            p = memory.allocate("P", I, J)
            p[:] = np.exp(scale * (q @ k.T) - lse)
            p[:] = p * (do @ v.T - delta)
            ds = memory.reuse(p, "dS")
            dq += scale * (ds @ k)
            memory.free(k, v, ds)
        memory.store(dq)
        memory.free(q, do, lse, delta, dq)


@schedule(
    {"Q": "T d", "K": "T d", "V": "T d", "dO": "T d", "L": "T 1"},
    {"dQ": "T d", "dK": "T d", "dV": "T d"},
)
def row_sums_backward(memory, T, d, scale, B_r, B_c):
    """``algorithm_6`` without O: D is the row sum of P o dP, so every K_J and V_J passes twice."""
    for I in blocks(T, B_r):
        q = memory.load("Q", I)
        do = memory.load("dO", I)
        lse = memory.load("L", I)
        delta = memory.allocate("D", I, ONE)
        delta[:] = 0.0
        for J in blocks(T, B_c):
            k = memory.load("K", J)
            v = memory.load("V", J)
            p = memory.allocate("P", I, J)
            p[:] = np.exp(scale * (q @ k.T) - lse)
            delta += row_sum(p * (do @ v.T))
            memory.free(k, v, p)
        dq = memory.allocate("dQ", I)
        dq[:] = 0.0
        for J in blocks(T, B_c):
            k = memory.load("K", J)
            v = memory.load("V", J)
            dk = accumulator(memory, "dK", J, first=I.start == 0)
            dv = accumulator(memory, "dV", J, first=I.start == 0)
            p = memory.allocate("P", I, J)
            p[:] = np.exp(scale * (q @ k.T) - lse)
            dv += p.T @ do
            p[:] = p * (do @ v.T - delta)
            ds = memory.reuse(p, "dS")
            dk += scale * (ds.T @ q)
            dq += scale * (ds @ k)
            memory.store(dk)
            memory.store(dv)
            memory.free(k, v, dk, dv, ds)
        memory.store(dq)
        memory.free(q, do, lse, delta, dq)
