"""What follows the backward pass of attention, on the two-level memory: dX and the
gradients of the weights (chapter *Projections*).

One head with d columns in a layer of width E. ``input_gradient`` and ``projected_rows``
continue ``algorithm_6``, ``algorithm_8`` and the split form; ``fold`` with
``stream_rows`` or ``stream_columns``, and ``consume_twice``, replace them.
"""

import numpy as np

from .forms import block_count, column, thin
from .schedule import ONE, accumulator, blocks, row_sum, schedule

WEIGHTS = dict.fromkeys(("W_Q", "W_K", "W_V"), "E d")
SUMS = dict.fromkeys(("dW_Q", "dW_K", "dW_V"), "E d")
# scale K W_Q^T, scale Q W_K^T, dO W_V^T
FOLDED = dict.fromkeys(("Kw", "Qw", "dOw"), "T E")


# -- dQ, dK and dV in slow memory


@schedule(
    thin("dQ dK dV") | WEIGHTS,
    {"dX": "T E"},
    words=lambda T, d, E: 3 * T * d + 3 * E * d + T * E,
)
def input_gradient(memory, T, B_r):
    """dX = dQ W_Q^T + dK W_K^T + dV W_V^T; the three weights stay in fast memory."""
    weights = [memory.load(name) for name in WEIGHTS]
    for I in blocks(T, B_r):
        dx = zeros(memory, "dX", I)
        for name, w in zip(("dQ", "dK", "dV"), weights, strict=True):
            rows = memory.load(name, I)
            dx += rows @ w.T
            memory.free(rows)
        memory.store(dx)
        memory.free(dx)
    memory.free(*weights)


@schedule(
    {"X": "T E"} | thin("dQ dK dV") | WEIGHTS,
    {"dX": "T E"} | SUMS,
    words=lambda T, d, E: 2 * T * E + 3 * T * d + 6 * E * d,
)
def projected_rows(memory, T, B_r):
    """dX and the gradients of the weights in one sweep; fast memory keeps six E x d."""
    weights = [memory.load(name) for name in WEIGHTS]
    sums = [zeros(memory, "d" + name) for name in WEIGHTS]
    for I in blocks(T, B_r):
        x = memory.load("X", I)
        dx = zeros(memory, "dX", I)
        for name, w, dw in zip(("dQ", "dK", "dV"), weights, sums, strict=True):
            rows = memory.load(name, I)
            dx += rows @ w.T
            dw += x.T @ rows
            memory.free(rows)
        memory.store(dx)
        memory.free(x, dx)
    memory.store(*sums)
    memory.free(*weights, *sums)


def zeros(memory, name, rows=None, columns=None):
    """A block of zeros in fast memory, to be summed up."""
    block = memory.allocate(name, rows, columns)
    block[:] = 0.0
    return block


# -- dX without dQ, dK and dV


@schedule(
    thin("Q K dO") | WEIGHTS,
    FOLDED,
    words=lambda T, d, E: 3 * T * d + 3 * E * d + 3 * T * E,
)
def fold(memory, T, scale, B_r):
    """What streaming needs beforehand: scale K W_Q^T, scale Q W_K^T and dO W_V^T, one
    weight at a time.
    """
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


@schedule(
    thin("Q K V O dO") | column("L") | FOLDED,
    {"dX": "T E"},
    # K, V, Kw and the rows J of dX, in and out, for each of the T_r blocks of queries;
    # the rest once.
    words=lambda T, d, E, B_r: (
        block_count(T, B_r) * (2 * T * d + 3 * T * E) + 3 * T * d + 3 * T * E + T
    ),
)
def stream_rows(memory, T, E, scale, B_r, B_c):
    """The order of ``algorithm_6``: a pass over the keys finishes rows I of dX, while
    rows J come and go.

    With the first block of queries the rows J are zero and need no load.
    """
    for I in blocks(T, B_r):
        do, o = memory.load("dO", I), memory.load("O", I)
        delta = memory.allocate("D", I, ONE)
        delta[:] = row_sum(do * o)
        memory.free(o)
        q, lse = memory.load("Q", I), memory.load("L", I)
        q_folded = memory.load("Qw", I)
        do_folded = memory.load("dOw", I)
        own = memory.allocate("own", I, slice(0, E))
        own[:] = 0.0
        for J in blocks(T, B_c):
            k, v = memory.load("K", J), memory.load("V", J)
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


@schedule(
    thin("Q K V dO") | column("L D") | FOLDED,
    {"dX": "T E"},
    # Q, dO, L, D, Qw, dOw and the rows I of dX, in and out, for each of the T_c blocks
    # of keys; the rest once.
    words=lambda T, d, E, B_c: (
        block_count(T, B_c) * (2 * T * d + 4 * T * E + 2 * T) + 2 * T * d + 2 * T * E
    ),
)
def stream_columns(memory, T, E, scale, B_r, B_c):
    """``algorithm_8`` after its D: rows J of dX are finished, rows I come and go."""
    for J in blocks(T, B_c):
        k, v = memory.load("K", J), memory.load("V", J)
        k_folded = memory.load("Kw", J)
        own = zeros(memory, "own", J, slice(0, E))
        for I in blocks(T, B_r):
            q, do = memory.load("Q", I), memory.load("dO", I)
            lse, delta = memory.load("L", I), memory.load("D", I)
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


# -- Everything without dQ, dK and dV


@schedule(
    thin("Q K V dO") | column("L D") | {"X": "T E"} | WEIGHTS,
    {"dX": "T E"} | SUMS,
    # The split form with nothing T x d stored; X twice, dX stored, loaded and stored
    # again, six E x d.
    words=lambda T, d, E, B_r, B_c: (
        (2 * block_count(T, B_r) + 2 * block_count(T, B_c) + 4) * T * d
        + 2 * T * (block_count(T, B_c) + 1)
        + 5 * T * E
        + 6 * E * d
    ),
)
def consume_twice(memory, T, d, scale, B_r, B_c):
    """The split form whose finished blocks of dQ, dK and dV go into dX and into a
    weight, and nowhere else.

    W and dW of the gradients in question stay in fast memory: two matrices E x d in the
    sweep over the queries, four in the sweep over the keys.
    """
    w_q, dw_q = memory.load("W_Q"), zeros(memory, "dW_Q")
    for I in blocks(T, B_r):
        q, do = memory.load("Q", I), memory.load("dO", I)
        lse, delta = memory.load("L", I), memory.load("D", I)
        dq = zeros(memory, "dQ", I, slice(0, d))
        for J in blocks(T, B_c):
            k, v = memory.load("K", J), memory.load("V", J)
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
        k, v = memory.load("K", J), memory.load("V", J)
        dk, dv = (zeros(memory, name, J, slice(0, d)) for name in ("dK", "dV"))
        for I in blocks(T, B_r):
            q, do = memory.load("Q", I), memory.load("dO", I)
            lse, delta = memory.load("L", I), memory.load("D", I)
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
    memory.store(dw_k, dw_v)
    memory.free(w_k, w_v, dw_k, dw_v)
