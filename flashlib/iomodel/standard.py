"""Standard attention, forward and backward: every T x T matrix goes to slow memory and
back (chapter *The memory bottleneck*).
"""

import numpy as np

from .forms import block_count, column, formula, square, thin
from .roofline import Transfer
from .schedule import ONE, blocks, row_max, row_sum, schedule, softmax_in_place


@schedule(
    thin("Q K V"),
    square("S P") | thin("O"),
    # 4 T^2 for S and P; Q and O once, K and V once for each block of rows.
    words=lambda T, d, B_r: 4 * T * T + 2 * T * d * (1 + block_count(T, B_r)),
    # A product: two thin blocks and a tile. The softmax: a row and a statistic.
    peak=lambda T, d, B_r, B_c: max(B_r * d + B_c * d + B_r * B_c, T + 1),
)
def standard_forward(memory, T, d, scale, B_r, B_c):
    """Scores, softmax, output: three separate steps. The softmax holds whole rows."""
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
            p, v = memory.load("P", I, J), memory.load("V", J)
            o += p @ v
            memory.free(p, v)
        memory.store(o)
        memory.free(o)


@schedule(
    {"S": "T N"},
    {"P": "T N"},
    words=lambda T, N: 4 * T * N,  # three passes read the scores, the third writes them
    peak=lambda B_c: B_c + 2,
)
def softmax_by_pieces(memory, T, N, B_c):
    """The safe softmax by rows, B_c scores at a time: maximum, sum, quotient."""
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
    thin("Q K V") | square("P") | thin("O dO"),
    thin("dV") | square("dP") | column("D") | square("dS") | thin("dQ dK"),
    # 7 T^2 for P, dP and dS, 2 T for D, the rest for the thin matrices.
    words=lambda T, d, B_r, B_c: (
        7 * T * T
        + 2 * T
        + T * d * (6 + 2 * block_count(T, B_r) + 2 * block_count(T, B_c))
    ),
    # A product, D, or dS with the tiles of P and dP.
    peak=lambda T, d, B_r, B_c: max(
        B_r * d + B_c * d + B_r * B_c, 2 * B_r * d + B_r, 2 * B_r * B_c + B_r
    ),
)
def standard_backward(memory, T, d, scale, B_r, B_c):
    """The materializing backward pass, slides (31)-(32), in six steps: from P of the
    forward pass, with dP, D and dS in slow memory.
    """
    for J in blocks(T, B_c):
        dv = memory.allocate("dV", J)
        dv[:] = 0.0
        for I in blocks(T, B_r):
            p, do = memory.load("P", I, J), memory.load("dO", I)
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
        do, o = memory.load("dO", I), memory.load("O", I)
        delta = memory.allocate("D", I)
        delta[:] = row_sum(do * o)
        memory.store(delta)
        memory.free(delta, do, o)

    for I in blocks(T, B_r):
        delta = memory.load("D", I)
        for J in blocks(T, B_c):
            p, dp = memory.load("P", I, J), memory.load("dP", I, J)
            dp[:] = p * (dp - delta)
            ds = memory.reuse(dp, "dS")
            memory.store(ds)
            memory.free(ds, p)
        memory.free(delta)

    for I in blocks(T, B_r):
        dq = memory.allocate("dQ", I)
        dq[:] = 0.0
        for J in blocks(T, B_c):
            ds, k = memory.load("dS", I, J), memory.load("K", J)
            dq += scale * (ds @ k)
            memory.free(ds, k)
        memory.store(dq)
        memory.free(dq)

    for J in blocks(T, B_c):
        dk = memory.allocate("dK", J)
        dk[:] = 0.0
        for I in blocks(T, B_r):
            ds, q = memory.load("dS", I, J), memory.load("Q", I)
            dk += scale * (ds.T @ q)
            memory.free(ds, q)
        memory.store(dk)
        memory.free(dk)


# -- Operations, and what the kernels move


@formula
def forward_operations(T, d):
    """Every operation of one head: scaled scores, the safe softmax, the output."""
    return 2 * d * T * T + T * (5 * T - 2) + T * d * (2 * T - 1)


@formula
def backward_operations(T, d):
    """Four products of 2 T^2 d, dS, D, and the scale of dQ and dK; P is read."""
    return 8 * T * T * d + 2 * T * T + 4 * T * d


@formula
def standard_forward_bytes(T, d, heads, itemsize):
    """The three kernels of the forward pass, a list of Transfer; S and L have 4 bytes
    an element, everything else ``itemsize``.

    heads: batch entries times heads, each with its own keys.
    """
    matrix, rows, row = heads * T * T, heads * T * d * itemsize, heads * T * 4
    return [
        Transfer("S", "scores_kernel", 2 * rows, 4 * matrix),
        Transfer("P", "softmax_kernel", 4 * matrix, itemsize * matrix + row),
        Transfer("O", "output_kernel", itemsize * matrix + rows, rows),
    ]


@formula
def standard_backward_bytes(T, d, heads, itemsize):
    """The six kernels of the backward pass; dP and D have 4 bytes an element. As
    ``standard_forward_bytes``.
    """
    matrix, rows, row = heads * T * T, heads * T * d * itemsize, heads * T * 4
    p = itemsize * matrix
    return [
        Transfer("dV", "product_kernel", p + rows, rows),
        Transfer("dP", "product_kernel", 2 * rows, 4 * matrix),
        Transfer("D", "delta_kernel", 2 * rows, row),
        Transfer("dS", "dscores_kernel", p + 4 * matrix + row, p),
        Transfer("dQ", "product_kernel", p + rows, rows),
        Transfer("dK", "product_kernel", p + rows, rows),
    ]
