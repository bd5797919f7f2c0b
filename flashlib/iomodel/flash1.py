"""Attention with an online softmax (chapter *FlashAttention*): Algorithms 3 and 4 of
the lecture slides (Chu, Liu, Lin, 2026), with the maximum that they leave out.
Algorithm 4 is FlashAttention-1, Algorithm 1 of Dao et al. (2022).
"""

import numpy as np

from .blocks import row_block_forward
from .forms import block_count, column, formula, thin
from .roofline import Transfer
from .schedule import ONE, accumulator, blocks, row_max, row_sum, schedule


def fold_and_divide(s, m, l, factor):
    """Turn the scores of a block into weights divided by the new l, and m, l into those
    of the keys so far, this block included.

    factor becomes what an output that was divided by the old l must be multiplied by.
    """
    factor[:] = np.exp(m - np.maximum(m, row_max(s))) * l
    m[:] = np.maximum(m, row_max(s))
    s[:] = np.exp(s - m)
    l[:] = factor + row_sum(s)
    factor /= l
    s /= l


@schedule(
    thin("Q K V"),
    thin("O") | column("m l"),
    # As with whole rows, and m and l stored once.
    words=lambda T, d, B_r: row_block_forward.words(T, d, B_r) + 2 * T,
    # Q_I, O_I, S_IJ, two statistics, and K_J or V_J, or in its place a factor for each
    # row.
    peak=lambda T, d, B_r, B_c: B_r * (2 * d + B_c + 2) + max(B_c * d, B_r),
    step=lambda d, B_c: (2 * B_c * d, 0),  # K_J and V_J in, nothing out
)
def algorithm_3(memory, T, d, scale, B_r, B_c):
    """The slides' Algorithm 3, (48)-(49): queries outside, O divided at every step.

    The slides' Delta is l. V_J takes the place of K_J.
    """
    for I in blocks(T, B_r):
        q = memory.load("Q", I)
        o = memory.allocate("O", I)
        m, l = memory.allocate("m", I), memory.allocate("l", I)
        o[:], m[:], l[:] = 0.0, -np.inf, 0.0
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
        memory.store(o, m, l)
        memory.free(o, m, l, q)


@schedule(
    thin("Q K V"),
    thin("O") | column("m l"),
    # K and V once; Q once for each of the T_c blocks of keys; O, m and l stored as
    # often, and loaded once less.
    words=lambda T, d, B_c: (
        T * d * (3 * block_count(T, B_c) + 1) + 2 * T * (2 * block_count(T, B_c) - 1)
    ),
    # K_J, V_J, S_IJ, a factor for each row, and O_I, or in its place m_I and l_I.
    peak=lambda T, d, B_r, B_c: 2 * B_c * d + B_r * (B_c + 1 + max(d, 2)),
    # After the first block of keys: Q_I, O_I, m_I, l_I in, the last three out.
    step=lambda d, B_r: (B_r * (2 * d + 2), B_r * (d + 2)),
)
def algorithm_4(memory, T, d, scale, B_r, B_c):
    """The slides' Algorithm 4; Dao et al. (2022), Algorithm 1: keys outside, O, m and l
    come and go.

    O_I takes the place of Q_I. With the first block of keys O, m and l are those of no
    key and need no load; the paper puts them into slow memory first and loads them.
    """
    for J in blocks(T, B_c):
        k, v = memory.load("K", J), memory.load("V", J)
        for I in blocks(T, B_r):
            q = memory.load("Q", I)
            s = memory.allocate("S", I, J)
            s[:] = scale * (q @ k.T)
            memory.free(q)
            m = accumulator(memory, "m", I, first=J.start == 0, start=-np.inf)
            l = accumulator(memory, "l", I, first=J.start == 0)
            factor = memory.allocate("factor", I, ONE)
            fold_and_divide(s, m, l, factor)
            memory.store(m, l)
            memory.free(m, l)
            o = accumulator(memory, "O", I, first=J.start == 0)
            o *= factor
            o += s @ v
            memory.store(o)
            memory.free(o, s, factor)
        memory.free(k, v)


@formula
def flash1_forward_bytes(T, d, heads, itemsize, B_c):
    """The one kernel of flash1, if every step goes to HBM: K and V once; Q, O, m and l
    in and the last three out with each block of B_c keys. O, m and l have 4 bytes an
    element. As ``standard_forward_bytes``.
    """
    rounds, rows = block_count(T, B_c), heads * T * d * itemsize
    state = heads * T * (d + 2) * 4
    read = 2 * rows + rounds * (rows + state)
    return [Transfer("O", "forward_kernel", read, rounds * state)]
