"""The backward pass without T x T matrices in slow memory (chapter *The backward
pass*): the lecture slides' Algorithms 5 to 8, and the split form.

P comes from L, where the slides have the sums Delta of exponentials without a maximum.
"""

import numpy as np

from .blocks import equal_blocks
from .forms import block_count, check_sizes, column, formula, thin
from .roofline import Transfer
from .schedule import ONE, accumulator, blocks, row_sum, schedule, softmax_in_place


@schedule(
    thin("Q K V O dO"),
    thin("dQ dK dV"),
    words=lambda T, d: 8 * T * d,  # five inputs and three gradients, each once
    # Seven matrices, and a row of P and one of dP with D, or one of dS and one of dQ.
    peak=lambda T, d: 7 * T * d + max(2 * T + 1, T + d),
)
def algorithm_5(memory, T, d, scale):
    """The slides' Algorithm 5, (51)-(57): five inputs, dK and dV in fast memory, dQ row
    by row.

    dS_i takes the place of dP_i.
    """
    q, k, v = memory.load("Q"), memory.load("K"), memory.load("V")
    o, do = memory.load("O"), memory.load("dO")
    dk, dv = memory.allocate("dK"), memory.allocate("dV")
    dk[:], dv[:] = 0.0, 0.0
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
    memory.store(dk, dv)
    memory.free(q, k, v, o, do, dk, dv)


@schedule(
    thin("Q K V O dO") | column("L"),
    thin("dQ dK dV"),
    # Q, O, dO, dQ and L once; K and V loaded, dK and dV stored for each of the T_r
    # blocks of queries, and loaded once less.
    words=lambda T, d, B_r: T * d * (6 * block_count(T, B_r) + 2) + T,
    # Q, dO, dQ of I, K, V, dK, dV of J, P_IJ, whose place dS_IJ takes; L_I and D_I.
    peak=lambda T, d, B_r, B_c: B_r * (3 * d + 2) + 4 * B_c * d + B_r * B_c,
    # After the first block of queries: K_J, V_J, dK_J, dV_J in, the last two out.
    step=lambda d, B_c: (4 * B_c * d, 2 * B_c * d),
)
def algorithm_6(memory, T, d, scale, B_r, B_c):
    """The slides' Algorithm 6, (71)-(77): queries outside, dK and dV come and go.

    Q_I takes the place of O_I, dS_IJ that of P_IJ; eight blocks are resident. With the
    first block of queries dK and dV are zero and need no load.
    """
    for I in blocks(T, B_r):
        do, o = memory.load("dO", I), memory.load("O", I)
        delta = memory.allocate("D", I, ONE)
        delta[:] = row_sum(do * o)
        memory.free(o)
        q, lse = memory.load("Q", I), memory.load("L", I)
        dq = memory.allocate("dQ", I)
        dq[:] = 0.0
        for J in blocks(T, B_c):
            k, v = memory.load("K", J), memory.load("V", J)
            dk = accumulator(memory, "dK", J, first=I.start == 0)
            dv = accumulator(memory, "dV", J, first=I.start == 0)
            p = memory.allocate("P", I, J)
            p[:] = np.exp(scale * (q @ k.T) - lse)
            dv += p.T @ do
            p[:] = p * (do @ v.T - delta)
            ds = memory.reuse(p, "dS")
            dk += scale * (ds.T @ q)
            dq += scale * (ds @ k)
            memory.store(dk, dv)
            memory.free(k, v, dk, dv, ds)
        memory.store(dq)
        memory.free(do, delta, q, lse, dq)


@schedule(
    thin("Q K V O dO") | column("L"),
    thin("dQ dK dV"),
    # K, V, dK, dV once; Q, O, dO, L loaded and dQ stored for each of the T_c blocks of
    # keys, and loaded once less.
    words=lambda T, d, B_c: (
        T * d * (5 * block_count(T, B_c) + 3) + T * block_count(T, B_c)
    ),
    peak=algorithm_6.peak,
)
def algorithm_7(memory, T, d, scale, B_r, B_c):
    """The slides' Algorithm 7, (80), with its missing rest; Dao et al. (2022),
    Algorithm 4: keys outside, dQ comes and goes, and every inner step computes D again.

    Q_I takes the place of O_I. With the first block of keys dQ is zero and needs no
    load.
    """
    for J in blocks(T, B_c):
        k, v = memory.load("K", J), memory.load("V", J)
        dk, dv = memory.allocate("dK", J), memory.allocate("dV", J)
        dk[:], dv[:] = 0.0, 0.0
        for I in blocks(T, B_r):
            do, o = memory.load("dO", I), memory.load("O", I)
            delta = memory.allocate("D", I, ONE)
            delta[:] = row_sum(do * o)
            memory.free(o)
            q, lse = memory.load("Q", I), memory.load("L", I)
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
        memory.store(dk, dv)
        memory.free(k, v, dk, dv)


def store_deltas(memory, T, B_r):
    """D, block of rows by block of rows, into slow memory."""
    for I in blocks(T, B_r):
        do, o = memory.load("dO", I), memory.load("O", I)
        delta = memory.allocate("D", I)
        delta[:] = row_sum(do * o)
        memory.store(delta)
        memory.free(do, o, delta)


@schedule(
    thin("O dO"),
    column("D"),
    words=lambda T, d: 2 * T * d + T,
    peak=lambda T, d, B_r: B_r * (2 * d + 1),
)
def deltas(memory, T, d, B_r):
    """D = rowsum(dO o O), in one pass: the first loop of Algorithm 8."""
    store_deltas(memory, T, B_r)


@schedule(
    thin("Q K V O dO") | column("L"),
    column("D") | thin("dQ dK dV"),
    # As algorithm_7, with O loaded once and dO once more, D stored once and loaded T_c
    # times.
    words=lambda T, d, B_c: (
        T * d * (4 * block_count(T, B_c) + 5) + T * (2 * block_count(T, B_c) + 1)
    ),
    peak=algorithm_6.peak,  # the order of the loops does not change what is resident
    # After the first block of keys: Q, dO, dQ, L, D of I in, dQ out.
    step=lambda d, B_r: (B_r * (3 * d + 2), B_r * d),
)
def algorithm_8(memory, T, d, scale, B_r, B_c):
    """The slides' Algorithm 8; Dao (2024), Algorithm 2: D beforehand, keys outside, dQ
    comes and goes.

    Eight blocks are resident. With the first block of keys dQ is zero and needs no
    load.
    """
    store_deltas(memory, T, B_r)
    for J in blocks(T, B_c):
        k, v = memory.load("K", J), memory.load("V", J)
        dk, dv = memory.allocate("dK", J), memory.allocate("dV", J)
        dk[:], dv[:] = 0.0, 0.0
        for I in blocks(T, B_r):
            q, do = memory.load("Q", I), memory.load("dO", I)
            lse, delta = memory.load("L", I), memory.load("D", I)
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
        memory.store(dk, dv)
        memory.free(k, v, dk, dv)


@schedule(
    thin("Q K V dO") | column("L D"),
    thin("dK dV"),
    # K, V, dK, dV once; Q, dO, L and D for each of the T_c blocks of keys.
    words=lambda T, d, B_c: (
        T * d * (2 * block_count(T, B_c) + 4) + 2 * T * block_count(T, B_c)
    ),
    # Seven blocks: those of algorithm_8 without dQ_I.
    peak=lambda T, d, B_r, B_c: B_r * (2 * d + 2) + 4 * B_c * d + B_r * B_c,
)
def split_keys(memory, T, d, scale, B_r, B_c):
    """The first half of the split form: keys outside, dK and dV; four products."""
    for J in blocks(T, B_c):
        k, v = memory.load("K", J), memory.load("V", J)
        dk, dv = memory.allocate("dK", J), memory.allocate("dV", J)
        dk[:], dv[:] = 0.0, 0.0
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
        memory.store(dk, dv)
        memory.free(k, v, dk, dv)


@schedule(
    thin("Q K V dO") | column("L D"),
    thin("dQ"),
    # Q, dO, dQ, L and D once; K and V for each of the T_r blocks of queries.
    words=lambda T, d, B_r: T * d * (2 * block_count(T, B_r) + 3) + 2 * T,
    # Six blocks: those of algorithm_6 without dK_J and dV_J.
    peak=lambda T, d, B_r, B_c: B_r * (3 * d + 2) + 2 * B_c * d + B_r * B_c,
)
def split_queries(memory, T, d, scale, B_r, B_c):
    """The second half of the split form: queries outside, dQ. Three products, two of
    them computed in the first half too.
    """
    for I in blocks(T, B_r):
        q, do = memory.load("Q", I), memory.load("dO", I)
        lse, delta = memory.load("L", I), memory.load("D", I)
        dq = memory.allocate("dQ", I)
        dq[:] = 0.0
        for J in blocks(T, B_c):
            k, v = memory.load("K", J), memory.load("V", J)
            p = memory.allocate("P", I, J)
            p[:] = np.exp(scale * (q @ k.T) - lse)
            p[:] = p * (do @ v.T - delta)
            ds = memory.reuse(p, "dS")
            dq += scale * (ds @ k)
            memory.free(k, v, ds)
        memory.store(dq)
        memory.free(q, do, lse, delta, dq)


@schedule(
    thin("Q K V dO") | column("L"),
    thin("dQ dK dV"),
    # As algorithm_6, with K and V once more for each block of queries, and without O.
    words=lambda T, d, B_r: (
        algorithm_6.words(T, d, B_r) + T * d * (2 * block_count(T, B_r) - 1)
    ),
    peak=algorithm_6.peak,
)
def row_sums_backward(memory, T, d, scale, B_r, B_c):
    """``algorithm_6`` without O: D is the row sum of P o dP, so every K_J and V_J
    passes twice.
    """
    for I in blocks(T, B_r):
        q, do = memory.load("Q", I), memory.load("dO", I)
        lse = memory.load("L", I)
        delta = memory.allocate("D", I, ONE)
        delta[:] = 0.0
        for J in blocks(T, B_c):
            k, v = memory.load("K", J), memory.load("V", J)
            p = memory.allocate("P", I, J)
            p[:] = np.exp(scale * (q @ k.T) - lse)
            delta += row_sum(p * (do @ v.T))
            memory.free(k, v, p)
        dq = memory.allocate("dQ", I)
        dq[:] = 0.0
        for J in blocks(T, B_c):
            k, v = memory.load("K", J), memory.load("V", J)
            dk = accumulator(memory, "dK", J, first=I.start == 0)
            dv = accumulator(memory, "dV", J, first=I.start == 0)
            p = memory.allocate("P", I, J)
            p[:] = np.exp(scale * (q @ k.T) - lse)
            dv += p.T @ do
            p[:] = p * (do @ v.T - delta)
            ds = memory.reuse(p, "dS")
            dk += scale * (ds.T @ q)
            dq += scale * (ds @ k)
            memory.store(dk, dv)
            memory.free(k, v, dk, dv, ds)
        memory.store(dq)
        memory.free(q, do, lse, delta, dq)


# -- Block sizes, and what the kernels move


def eighth_blocks(d, capacity_words):
    """(B_r, B_c) of the slides' (79), for eight blocks."""
    return equal_blocks(8, d, capacity_words)


@formula
def published_backward_blocks(d, capacity_words):
    """(min(B_c, d), B_c), B_c = ceil(M / 4d): Dao et al. (2022), line 2 of Alg. 4."""
    B_c = block_count(capacity_words, 4 * d)
    return min(B_c, d), B_c


def flash_backward_bytes(T, d, heads, itemsize, deterministic=True):
    """The kernels of the backward pass of flash2: D and L in base 2, then dK and dV,
    then dQ; or, where not ``deterministic``, all three at once, with dQ in 4 bytes an
    element, read and written once.

    PyTorch's zeros and conversion of that dQ, and the padding of D and L to whole
    blocks, are not counted. As ``standard_forward_bytes``.
    """
    check_sizes(T=T, d=d, heads=heads, itemsize=itemsize)
    rows, row, sums = heads * T * d * itemsize, heads * T * 4, heads * T * d * 4
    inputs = 4 * rows + 2 * row  # Q, K, V, dO; L and D
    first = Transfer("D", "delta_kernel", 2 * rows + 2 * row, 2 * row)  # in: L and dL
    if not deterministic:
        fused = Transfer("dQ, dK, dV", "fused_kernel", inputs + sums, 2 * rows + sums)
        return [first, fused]
    return [
        first,
        Transfer("dK, dV", "keys_kernel", inputs, 2 * rows),
        Transfer("dQ", "queries_kernel", inputs, rows),
    ]
