"""FlashAttention-2's forward pass, and outputs that stay in fast memory (chapter
*FlashAttention-2*).
"""

import numpy as np

from .blocks import row_block_forward
from .flash1 import algorithm_3, fold_and_divide
from .forms import block_count, column, formula, thin
from .roofline import Transfer
from .schedule import ONE, accumulator, blocks, row_max, row_sum, schedule


def fold(s, m, l, factor):
    """Turn the scores of a block into weights, and m, l into those of the keys so far,
    this block included.

    factor becomes exp(old m - m): earlier sums times factor refer to the new maximum.
    """
    factor[:] = np.exp(m - np.maximum(m, row_max(s)))
    m[:] = np.maximum(m, row_max(s))
    s[:] = np.exp(s - m)
    l[:] = factor * l + row_sum(s)


@schedule(
    thin("Q K V"),
    thin("O") | column("L"),
    # 2 T d (1 + T_r) + T: as Algorithm 3, but one statistic is stored instead of two.
    words=lambda T, d, B_r: row_block_forward.words(T, d, B_r) + T,
    peak=algorithm_3.peak,
)
def flash2_forward(memory, T, d, scale, B_r, B_c):
    """Dao (2024), Algorithm 1: as ``algorithm_3``, with one division at the end and one
    statistic L = m + ln l.

    In words it saves one of the two statistics; divisions are arithmetic.
    """
    for I in blocks(T, B_r):
        q = memory.load("Q", I)
        o = memory.allocate("O", I)
        m, l = memory.allocate("m", I, ONE), memory.allocate("l", I, ONE)
        o[:], m[:], l[:] = 0.0, -np.inf, 0.0
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


def _resident_words(T, d, B_r, B_c, r):
    kept, rounds = min(r * B_r, T), 2 * block_count(T, B_c) - 1
    return T * d * (2 + block_count(T, B_c)) + (d + 2) * (kept + (T - kept) * rounds)


def _resident_peak(T, d, B_r, B_c, r):
    kept = min(r * B_r, T)
    passing = min(B_r, T - kept) * (B_c + 1 + max(d, 2))
    return 2 * B_c * d + kept * (d + 2) + max(B_r * (B_c + d), passing)


@schedule(
    thin("Q K V"),
    thin("O") | column("m l"),
    # algorithm_4 is r = 0; each row whose O, m and l stay saves 2 (T_c - 1) (d + 2)
    # words.
    words=_resident_words,
    # What stays, K_J, V_J, S_IJ, and the larger of Q_I for a block that stays and the
    # rest of algorithm_4 for one that does not.
    peak=_resident_peak,
)
def resident_outputs(memory, T, d, scale, B_r, B_c, r):
    """As ``algorithm_4``, but O, m and l of the first r blocks of queries stay in fast
    memory to the end.

    r is at least 1. With all blocks resident K, V and O pass once, and Q still with
    every block of keys.
    """
    kept = slice(0, min(r * B_r, T))
    kept_o = memory.allocate("O", kept)
    kept_m, kept_l = memory.allocate("m", kept), memory.allocate("l", kept)
    kept_o[:], kept_m[:], kept_l[:] = 0.0, -np.inf, 0.0
    for J in blocks(T, B_c):
        k, v = memory.load("K", J), memory.load("V", J)
        for I in blocks(T, B_r):
            q = memory.load("Q", I)
            s = memory.allocate("S", I, J)
            s[:] = scale * (q @ k.T)
            memory.free(q)
            if I.start < kept.stop:
                factor = memory.allocate("factor", I, ONE)
                fold_and_divide(s, kept_m[I], kept_l[I], factor)
                kept_o[I] = factor * kept_o[I] + s @ v
                memory.free(s, factor)
                continue
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
    memory.store(kept_o, kept_m, kept_l)
    memory.free(kept_o, kept_m, kept_l)


@formula
def flash2_forward_bytes(T, d, heads, itemsize):
    """The one kernel: Q, K, V in, O and L out, each once, whatever the tile. As
    ``standard_forward_bytes``.
    """
    rows, row = heads * T * d * itemsize, heads * T * 4
    return [Transfer("O", "forward_kernel", 3 * rows, rows + row)]
