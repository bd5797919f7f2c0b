"""Latent attention in two ways: operations, words between the memories, and what a
cache holds (chapter *Latent attention*).

    run = absorbed_forward(q, c, r, w_k, w_v, capacity_words=900, H=2, B_r=4, B_c=3)
    run["O"], run.memory.moved_words, run.memory.product_flops
    absorbs(T_q=1, T_k=4096), crossing(T_k=4096)

The schedules take the heads one below the other: Q and O have the rows of head 0
first, W_K ``[H d_c, d_n]`` and W_V ``[H d_c, d_v]`` too. There is no mask. The last d_r
columns of Q are rotary, and so are those of R. Operations are those of matrix products,
a multiply-add counted as two. Sizes are Python ints of at least 1, T_q and T_k of at
least 0; others raise TypeError or ValueError.
"""

from typing import NamedTuple

import numpy as np

from .flash2 import fold
from .forms import block_count, check_sizes
from .schedule import ONE, blocks, schedule


class Widths(NamedTuple):
    """Columns: of a latent, of a key without and with rotation, of a value."""

    d_c: int
    d_n: int
    d_r: int
    d_v: int

    @property
    def d(self):
        """The columns of a query and of a key."""
        return self.d_n + self.d_r


DEEPSEEK = Widths(d_c=512, d_n=128, d_r=64, d_v=128)  # of versions 2 and 3


# -- operations


def visible_pairs(T_q, T_k, causal=False):
    """The pairs of a query and a key that it sees, of one head: those that
    ``masks.visible_pairs`` counts, by a formula, since the layer asks at every call.
    """
    check_sizes(T_q=T_q, T_k=T_k)
    if not causal:
        return T_q * T_k
    seeing = min(T_q, T_k)  # the last query sees T_k keys, each earlier one less
    return seeing * T_k - seeing * (seeing - 1) // 2


def projection_flops(rows, widths=DEEPSEEK):
    """Operations to expand this many latents for one head, or to absorb W_K and W_V
    into this many of its queries and outputs: the same.
    """
    return 2 * rows * widths.d_c * (widths.d_n + widths.d_v)


def expanded_flops(T_q, T_k, H, widths=DEEPSEEK, causal=False):
    """Operations of T_q queries and T_k keys in H heads, all keys expanded
    (``eq-latent-expanded-flops``).
    """
    check_sizes(H=H, **widths._asdict())
    pairs = visible_pairs(T_q, T_k, causal)
    return H * (2 * pairs * (widths.d + widths.d_v) + projection_flops(T_k, widths))


def absorbed_flops(T_q, T_k, H, widths=DEEPSEEK, causal=False):
    """Operations of the same on the latents (``eq-latent-absorbed-flops``)."""
    check_sizes(H=H, **widths._asdict())
    pairs, columns = visible_pairs(T_q, T_k, causal), 2 * widths.d_c + widths.d_r
    return H * (2 * pairs * columns + projection_flops(T_q, widths))


def absorbs(T_q, T_k, widths=DEEPSEEK, causal=False):
    """Whether the latents take fewer operations than expanded keys and values, whatever
    the number of heads (``eq-latent-crossing``).
    """
    check_sizes(**widths._asdict())
    d_c, d_n, _, d_v = widths
    pairs = visible_pairs(T_q, T_k, causal)
    return pairs * (2 * d_c - d_n - d_v) < (T_k - T_q) * d_c * (d_n + d_v)


def crossing(T_k, widths=DEEPSEEK, causal=False):
    """The fewest queries, at most T_k, that should not be absorbed."""
    few, many = 0, T_k  # few queries absorb, many do not
    while many - few > 1:
        middle = (few + many) // 2
        if absorbs(middle, T_k, widths, causal):
            few = middle
        else:
            many = middle
    return many


def limit(widths=DEEPSEEK):
    """What the crossing tends to for long caches: d_c (d_n + d_v) / (2 d_c - d_n -
    d_v), 512 / 3 by default (``eq-latent-limit``).

    Raises ValueError where latents are so narrow that absorbing always pays.
    """
    d_c, d_n, _, d_v = widths
    check_sizes(d_c=d_c, d_n=d_n, d_v=d_v)
    if 2 * d_c <= d_n + d_v:
        expected = f"more than (d_n + d_v) / 2 = {(d_n + d_v) / 2:g}"
        raise ValueError(f"d_c: expected {expected}, got {d_c}")
    return d_c * (d_n + d_v) / (2 * d_c - d_n - d_v)


# -- caches and the roof


def latent_words(widths=DEEPSEEK):
    """Numbers that a cache of latents holds of a token and layer."""
    return widths.d_c + widths.d_r


def expanded_words(H, widths=DEEPSEEK):
    """Numbers that a cache of expanded keys and values holds of a token and layer. The
    rotary columns are stored once for all heads.
    """
    return H * (widths.d_n + widths.d_v) + widths.d_r


def decode_flops_per_byte(H, T_q=1, widths=DEEPSEEK, itemsize=2):
    """The intensity of absorbed decoding with a long cache: T_q queries of H heads
    share each row of the cache (``eq-latent-intensity``).
    """
    check_sizes(H=H, T_q=T_q, itemsize=itemsize, **widths._asdict())
    flops = 2 * H * T_q * (2 * widths.d_c + widths.d_r)
    return flops / (itemsize * latent_words(widths))


# -- on the two-level memory

# rows is H T_q, and weights is H d_c.
INPUTS = {"Q": "rows d", "C": "T_k d_c", "R": "T_k d_r"}
INPUTS |= {"W_K": "weights d_n", "W_V": "weights d_v"}
OUTPUTS = {"O": "rows d_v", "L": "rows 1"}


def head(h, size):
    """The rows of head h, where every head has this many."""
    return slice(h * size, (h + 1) * size)


def below(start, block):
    """A block of rows of a head that begins at row ``start``."""
    return slice(start + block.start, start + block.stop)


def attend(memory, q, keys, values, o, m, l, scale):
    """Fold a block of keys into the state of queries; q and keys come in two parts,
    whose products are added to one another.
    """
    s = memory.allocate("S", q[0].rows, values.rows)
    s[:] = scale * (q[0] @ keys[0].T)
    s += scale * (q[1] @ keys[1].T)
    factor = memory.allocate("factor", s.rows, ONE)
    fold(s, m, l, factor)
    o *= factor
    o += s @ values
    memory.free(s, factor)


def state(memory, name, I, columns):
    """Blocks of zeros for O, and the m and l of no keys."""
    o = memory.allocate(name, I, slice(0, columns))
    m, l = memory.allocate("m", I, ONE), memory.allocate("l", I, ONE)
    o[:], m[:], l[:] = 0.0, -np.inf, 0.0
    return o, m, l


def finish(memory, o, m, l):
    """Divide O and store it, and m + ln l as L."""
    o /= l
    m += np.log(l)
    lse = memory.reuse(m, "L")
    memory.store(o, lse)
    memory.free(o, lse, l)


@schedule(
    INPUTS,
    OUTPUTS,
    # For each head the weights and the latents; K and V, out and in again; the rotary
    # columns of the keys. Q, O and L once.
    words=lambda rows, T_k, H, d_c, d_n, d_r, d_v: (
        H * (d_c * (d_n + d_v) + T_k * (d_c + 2 * (d_n + d_v) + d_r))
        + rows * (d_n + d_r + d_v + 1)
    ),
)
def expanded_forward(memory, rows, T_k, H, d, d_c, d_n, d_v, scale, B_c):
    """Keys and values of every head into slow memory, then attention, all queries of a
    head at once.
    """
    memory.reserve("K", H * T_k, d_n)
    memory.reserve("V", H * T_k, d_v)
    for h in range(H):
        w_k, w_v = (memory.load(name, head(h, d_c)) for name in ("W_K", "W_V"))
        for J in blocks(T_k, B_c):
            c = memory.load("C", J)
            for name, w in (("K", w_k), ("V", w_v)):
                x = memory.allocate(name, below(h * T_k, J))
                x[:] = c @ w
                memory.store(x)
                memory.free(x)
            memory.free(c)
        memory.free(w_k, w_v)
    for h in range(H):
        I = head(h, rows // H)
        q = [memory.load("Q", I, part) for part in (slice(0, d_n), slice(d_n, d))]
        o, m, l = state(memory, "O", I, d_v)
        for J in blocks(T_k, B_c):
            place = below(h * T_k, J)
            k, v = memory.load("K", place), memory.load("V", place)
            r = memory.load("R", J)
            attend(memory, q, (k, r), v, o, m, l, scale)
            memory.free(k, v, r)
        finish(memory, o, m, l)
        memory.free(*q)


@schedule(
    INPUTS,
    OUTPUTS,
    # Weights once; Q, O and L once; Q W_K^T and the output of latents out and in again;
    # the rows of the cache once for each block of queries of all heads.
    words=lambda rows, T_k, H, d_c, d_n, d_r, d_v, B_r: (
        H * d_c * (d_n + d_v)
        + rows * (d_n + d_r + d_v + 1 + 4 * d_c)
        + block_count(rows, min(B_r, rows)) * T_k * (d_c + d_r)
    ),
)
def absorbed_forward(memory, rows, T_k, H, d, d_c, d_n, scale, B_r, B_c):
    """The queries times W_K^T; attention of the queries of all heads, B_r at a time, to
    the rows of the cache, each read once for key and value; the outputs times W_V.
    """
    memory.reserve("Qc", rows, d_c)
    memory.reserve("Oc", rows, d_c)
    for h in range(H):
        I, w = head(h, rows // H), memory.load("W_K", head(h, d_c))
        q = memory.load("Q", I, slice(0, d_n))
        x = memory.allocate("Qc", I)
        x[:] = q @ w.T
        memory.store(x)
        memory.free(w, q, x)
    for I in blocks(rows, B_r):
        q = [memory.load("Qc", I), memory.load("Q", I, slice(d_n, d))]
        o, m, l = state(memory, "Oc", I, d_c)
        for J in blocks(T_k, B_c):
            c, r = memory.load("C", J), memory.load("R", J)
            attend(memory, q, (c, r), c, o, m, l, scale)
            memory.free(c, r)
        finish(memory, o, m, l)
        memory.free(*q)
    for h in range(H):
        I, w = head(h, rows // H), memory.load("W_V", head(h, d_c))
        latents, o = memory.load("Oc", I), memory.allocate("O", I)
        o[:] = latents @ w
        memory.store(o)
        memory.free(w, latents, o)
