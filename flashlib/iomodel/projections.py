"""What follows the backward pass of attention, on the two-level memory: dX and the gradients of the weights.

One head with d columns in a layer of width E; chapter *Appendix: projections*. Schedules as in
:mod:`flashlib.iomodel.schedules`, whose ``algorithm_6``, ``algorithm_8`` and split form they continue
(``input_gradient``, ``projected_rows``) or replace (``fold`` with ``stream_rows`` or ``stream_columns``;
``consume_twice``). ``*_words`` are the same counts as formulas, in both directions together: exact integers;
a size that is no integer raises TypeError, one out of its range ValueError.
"""

import numpy as np

from flashlib.iomodel.formulas import _sizes, block_count
from flashlib.iomodel.schedules import ONE, accumulator, blocks, row_sum, schedule

WEIGHTS = {"W_Q": "E d", "W_K": "E d", "W_V": "E d"}
FOLDED = {"Kw": "T E", "Qw": "T E", "dOw": "T E"}  # scale K W_Q^T, scale Q W_K^T, dO W_V^T


# ------------------------------------------------------------------------------------------------------------
# dQ, dK and dV in slow memory


@schedule({"dQ": "T d", "dK": "T d", "dV": "T d", **WEIGHTS}, {"dX": "T E"})
def input_gradient(memory, T, B_r):
    """dX = dQ W_Q^T + dK W_K^T + dV W_V^T; the three weights stay in fast memory."""
    weights = [memory.load(name) for name in WEIGHTS]
    for I in blocks(T, B_r):
        dx = memory.allocate("dX", I)
        dx[:] = 0.0
        for name, w in zip(("dQ", "dK", "dV"), weights, strict=True):
            rows = memory.load(name, I)
            dx += rows @ w.T
            memory.free(rows)
        memory.store(dx)
        memory.free(dx)
    memory.free(*weights)


def input_gradient_words(T, d, E):
    """Three gradients and three weights in, dX out."""
    _sizes(T=T, d=d, E=E)
    return 3 * T * d + 3 * E * d + T * E


@schedule(
    {"X": "T E", "dQ": "T d", "dK": "T d", "dV": "T d", **WEIGHTS},
    {"dX": "T E", "dW_Q": "E d", "dW_K": "E d", "dW_V": "E d"},
)
def projected_rows(memory, T, B_r):
    """dX and the gradients of the weights in one sweep; the six matrices E x d stay in fast memory."""
    weights = [memory.load(name) for name in WEIGHTS]
    sums = [zeros(memory, "d" + name) for name in WEIGHTS]
    for I in blocks(T, B_r):
        x = memory.load("X", I)
        dx = memory.allocate("dX", I)
        dx[:] = 0.0
        for name, w, dw in zip(("dQ", "dK", "dV"), weights, sums, strict=True):
            rows = memory.load(name, I)
            dx += rows @ w.T
            dw += x.T @ rows
            memory.free(rows)
        memory.store(dx)
        memory.free(x, dx)
    for dw in sums:
        memory.store(dw)
    memory.free(*weights, *sums)


def projected_rows_words(T, d, E):
    """X, three gradients and three weights in, dX and three gradients of weights out."""
    _sizes(T=T, d=d, E=E)
    return 2 * T * E + 3 * T * d + 6 * E * d


def zeros(memory, name):
    """A whole array of zeros in fast memory, to be summed up and stored."""
    block = memory.allocate(name)
    block[:] = 0.0
    return block


# ------------------------------------------------------------------------------------------------------------
# dX without dQ, dK and dV


@schedule({"Q": "T d", "K": "T d", "dO": "T d", **WEIGHTS}, FOLDED)
def fold(memory, T, scale, B_r):
    """What streaming needs beforehand: scale K W_Q^T, scale Q W_K^T and dO W_V^T, one weight at a time."""
    for name, weight, result, factor in (
        ("K", "W_Q", "Kw", scale), ("Q", "W_K", "Qw", scale), ("dO", "W_V", "dOw", 1.0),
    ):  # fmt: skip
        w = memory.load(weight)
        for I in blocks(T, B_r):
            rows = memory.load(name, I)
            product = memory.allocate(result, I)
            product[:] = factor * (rows @ w.T)
            memory.store(product)
            memory.free(rows, product)
        memory.free(w)


def fold_words(T, d, E):
    """Three thin matrices and three weights in, three T x E matrices out."""
    _sizes(T=T, d=d, E=E)
    return 3 * T * d + 3 * E * d + 3 * T * E


@schedule(
    {"Q": "T d", "K": "T d", "V": "T d", "O": "T d", "dO": "T d", "L": "T 1", **FOLDED}, {"dX": "T E"}
)
def stream_rows(memory, T, E, scale, B_r, B_c):
    """The order of ``algorithm_6``: a pass over the keys finishes rows I of dX, while rows J come and go.

    With the first block of queries the rows J are zero and need no load.
    """
    for I in blocks(T, B_r):
        do = memory.load("dO", I)
        o = memory.load("O", I)
        delta = memory.allocate("D", I, ONE)
        delta[:] = row_sum(do * o)
        memory.free(o)
        q = memory.load("Q", I)
        lse = memory.load("L", I)
        q_folded = memory.load("Qw", I)
        do_folded = memory.load("dOw", I)
        own = memory.allocate("own", I, slice(0, E))
        own[:] = 0.0
        for J in blocks(T, B_c):
            k = memory.load("K", J)
            v = memory.load("V", J)
            p = memory.allocate("P", I, J)
            p[:] = np.exp(scale * (q @ k.T) - lse)
            dx = accumulator(memory, "dX", J, first=I.start == 0)
            dx += p.T @ do_folded
            p[:] = p * (do @ v.T - delta)
            ds = memory.reuse(p, "dS")
            dx += ds.T @ q_folded
            memory.store(dx)
            memory.free(k, v, dx)
            k_folded = memory.load("Kw", J)
            own += ds @ k_folded
            memory.free(k_folded, ds)
        dx = memory.load("dX", I)
        dx += own
        memory.store(dx)
        memory.free(do, delta, q, lse, q_folded, do_folded, own, dx)


def stream_rows_words(T, d, E, B_r):
    """K, V, Kw and the rows J of dX, in and out, for each of the T_r blocks of queries; the rest once."""
    _sizes(T=T, d=d, E=E, B_r=B_r)
    return block_count(T, B_r) * (2 * T * d + 3 * T * E) + 3 * T * d + 3 * T * E + T


@schedule(
    {"Q": "T d", "K": "T d", "V": "T d", "dO": "T d", "L": "T 1", "D": "T 1", **FOLDED}, {"dX": "T E"}
)
def stream_columns(memory, T, E, scale, B_r, B_c):
    """The order of ``algorithm_8``, after its D: the rows J of dX are finished, its rows I come and go."""
    for J in blocks(T, B_c):
        k = memory.load("K", J)
        v = memory.load("V", J)
        k_folded = memory.load("Kw", J)
        own = memory.allocate("own", J, slice(0, E))
        own[:] = 0.0
        for I in blocks(T, B_r):
            q = memory.load("Q", I)
            do = memory.load("dO", I)
            lse = memory.load("L", I)
            delta = memory.load("D", I)
            p = memory.allocate("P", I, J)
            p[:] = np.exp(scale * (q @ k.T) - lse)
            do_folded = memory.load("dOw", I)
            own += p.T @ do_folded
            memory.free(do_folded)
            p[:] = p * (do @ v.T - delta)
            ds = memory.reuse(p, "dS")
            memory.free(q, do, lse, delta)
            q_folded = memory.load("Qw", I)
            own += ds.T @ q_folded
            memory.free(q_folded)
            dx = accumulator(memory, "dX", I, first=J.start == 0)
            dx += ds @ k_folded
            memory.store(dx)
            memory.free(dx, ds)
        dx = memory.load("dX", J)
        dx += own
        memory.store(dx)
        memory.free(k, v, k_folded, own, dx)


def stream_columns_words(T, d, E, B_c):
    """Q, dO, L, D, Qw, dOw and the rows I of dX, in and out, for each of the T_c blocks of keys."""
    _sizes(T=T, d=d, E=E, B_c=B_c)
    return block_count(T, B_c) * (2 * T * d + 4 * T * E + 2 * T) + 2 * T * d + 2 * T * E


# ------------------------------------------------------------------------------------------------------------
# Everything without dQ, dK and dV


@schedule(
    {"Q": "T d", "K": "T d", "V": "T d", "dO": "T d", "L": "T 1", "D": "T 1", "X": "T E", **WEIGHTS},
    {"dX": "T E", "dW_Q": "E d", "dW_K": "E d", "dW_V": "E d"},
)
def consume_twice(memory, T, d, scale, B_r, B_c):
    """The split form whose finished blocks of dQ, dK and dV go into dX and into a weight, and nowhere else.

    W and dW of the gradients in question stay in fast memory: two matrices E x d in the sweep over the
    queries, four in the sweep over the keys.
    """
    w_q, dw_q = memory.load("W_Q"), zeros(memory, "dW_Q")
    for I in blocks(T, B_r):
        q = memory.load("Q", I)
        do = memory.load("dO", I)
        lse = memory.load("L", I)
        delta = memory.load("D", I)
        dq = memory.allocate("dQ", I, slice(0, d))
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
        memory.free(q, do, lse, delta)
        x = memory.load("X", I)
        dw_q += x.T @ dq
        memory.free(x)
        dx = memory.allocate("dX", I)
        dx[:] = dq @ w_q.T
        memory.store(dx)
        memory.free(dx, dq)
    memory.store(dw_q)
    memory.free(w_q, dw_q)

    w_k, w_v = memory.load("W_K"), memory.load("W_V")
    dw_k, dw_v = zeros(memory, "dW_K"), zeros(memory, "dW_V")
    for J in blocks(T, B_c):
        k = memory.load("K", J)
        v = memory.load("V", J)
        dk = memory.allocate("dK", J, slice(0, d))
        dv = memory.allocate("dV", J, slice(0, d))
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
        memory.free(k, v)
        x = memory.load("X", J)
        dw_k += x.T @ dk
        dw_v += x.T @ dv
        memory.free(x)
        dx = memory.load("dX", J)
        dx += dk @ w_k.T + dv @ w_v.T
        memory.store(dx)
        memory.free(dx, dk, dv)
    memory.store(dw_k)
    memory.store(dw_v)
    memory.free(w_k, w_v, dw_k, dw_v)


def consume_twice_words(T, d, E, B_r, B_c):
    """The split form with nothing T x d stored; X twice, dX stored, loaded and stored again, six E x d."""
    _sizes(T=T, d=d, E=E, B_r=B_r, B_c=B_c)
    rounds_r, rounds_c = block_count(T, B_r), block_count(T, B_c)
    thin = 2 * (rounds_r + rounds_c) + 4
    return thin * T * d + 2 * T * (rounds_c + 1) + 5 * T * E + 6 * E * d
