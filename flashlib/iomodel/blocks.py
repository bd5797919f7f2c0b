"""Products in tiles, and attention row by row and block by block (chapter of that
name); the lecture slides' Algorithms 1 and 2, with the scale and the maximum that they
drop.
"""

from flashlib.plain_checks import wrong

from .forms import block_count, formula, thin
from .schedule import ONE, accumulator, blocks, row_sum, schedule, softmax_in_place


@schedule(
    {"A": "m k", "B": "k n"},
    {"C": "m n"},
    words=lambda m, n, k, b_m, b_n: (  # b_k does not matter
        m * n + m * k * block_count(n, b_n) + k * n * block_count(m, b_m)
    ),
    peak=lambda m, n, k, b_m, b_n, b_k: (  # one tile of each of the three matrices
        min(b_m, m) * min(b_n, n)
        + min(b_m, m) * min(b_k, k)
        + min(b_k, k) * min(b_n, n)
    ),
)
def matmul(memory, m, n, k, b_m, b_n, b_k):
    """C = A B: a tile of C stays while the tiles of A and B that it needs pass by."""
    for I in blocks(m, b_m):
        for J in blocks(n, b_n):
            c = memory.allocate("C", I, J)
            c[:] = 0.0
            for K in blocks(k, b_k):
                a, b = memory.load("A", I, K), memory.load("B", K, J)
                c += a @ b
                memory.free(a, b)
            memory.store(c)
            memory.free(c)


@schedule(
    thin("Q K V"),
    thin("O"),
    words=lambda T, d: 4 * T * d,
    peak=lambda T, d: 3 * T * d + T + d,  # Q, K, V, one row of scores, one row of O
)
def algorithm_1(memory, T, d, scale):
    """The slides' Algorithm 1, (33)-(35): Q, K and V at once, O row by row."""
    q, k, v = memory.load("Q"), memory.load("K"), memory.load("V")
    for i in blocks(T, 1):
        s = memory.allocate("S", i, slice(0, T))
        s[:] = scale * (q[i] @ k.T)
        softmax_in_place(memory, s, i)
        o = memory.allocate("O", i)
        o[:] = s @ v
        memory.store(o)
        memory.free(o, s)
    memory.free(q, k, v)


@schedule(
    thin("Q K V"),
    thin("O"),
    # Q and O once, K and V once for each of the T_r blocks of rows.
    words=lambda T, d, B_r: 2 * T * d * (1 + block_count(T, B_r)),
    # B_r whole rows of scores, B_r rows of Q or O, B_c rows of K or V.
    peak=lambda T, d, B_r, B_c: B_r * (T + d) + B_c * d,
)
def row_block_forward(memory, T, d, scale, B_r, B_c):
    """B_r whole rows of scores at a time; K and V come in blocks of B_c rows."""
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
    thin("Q K V O dO"),
    thin("dQ dK dV"),
    # Q, O, dO, dQ once; for each block of rows K twice, V once, dK and dV stored and,
    # but for the first block, loaded.
    words=lambda T, d, B_r: T * d * (2 + 7 * block_count(T, B_r)),
    # B_r whole rows of P and of dP, B_r rows of Q and dO with their D, B_c rows of V.
    peak=lambda T, d, B_r, B_c: B_r * (2 * T + 2 * d + 1) + B_c * d,
)
def row_block_backward(memory, T, d, scale, B_r, B_c):
    """The slides' (58)-(64): B_r whole rows of P and dP; dK and dV come and go.

    (61) needs neither P nor dP. It comes first, so that O can leave. Before the first
    block of rows dK and dV are zero and need no load.
    """
    for I in blocks(T, B_r):
        do, o = memory.load("dO", I), memory.load("O", I)
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


@schedule(
    thin("Q K V"),
    thin("O"),
    # As with whole rows: the tiles change how large B_r may be.
    words=row_block_forward.words,
    # Q_I, O_I, S_IJ, K_J or V_J, and statistics_words for each row of the block.
    peak=lambda T, d, B_r, B_c, statistics_words=0: (
        B_r * (2 * d + B_c + statistics_words) + B_c * d
    ),
)
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


@formula
def equal_blocks(parts, d, capacity_words):
    """(B_r, B_c) with the same part of fast memory for each block: floor(M / parts d),
    and the same or d, whichever is less. Raises ValueError for M < parts d.
    """
    rows = capacity_words // (parts * d)
    if rows < 1:
        least = f"at least {parts} d = {parts * d}"
        raise wrong("capacity_words", least, capacity_words)
    return rows, min(rows, d)


def quarter_blocks(d, capacity_words):
    """(B_r, B_c) of the slides' (44), for four blocks."""
    return equal_blocks(4, d, capacity_words)
