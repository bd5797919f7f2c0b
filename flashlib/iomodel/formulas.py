"""Closed forms for what the schedules move, the operations of attention, and what both cost on a GPU.

Words are exact integers, equal to the counts of :mod:`flashlib.iomodel.schedules` (chapters *The memory
bottleneck*, *Row by row, block by block*, *FlashAttention*, *FlashAttention-2* and *The backward pass*).
``*_words`` is what passes between the memories in both directions, ``*_step_words`` the (loaded, stored) of
one inner step, ``*_peak_words`` the fast memory that the schedule needs, ``*_rows`` the most rows B_r of a
block that a fast memory of ``capacity_words`` allows. ``*_bytes`` is what kernels read and write,
``*_seconds`` a lower bound of the time at the rates of a data sheet.

T is the sequence length, d the head dimension, B_r and B_c the rows of a block of queries and of keys, each
between 1 and T. A size outside its range raises ValueError, one that is no integer TypeError.
"""

from typing import NamedTuple


def _sizes(**sizes):
    """Raise unless every size is a positive integer (statistics may be 0) and blocks are at most T."""
    for name, size in sizes.items():
        # numpy integers would overflow where Python's do not: they are refused, not converted.
        if type(size) is not int:
            raise TypeError(f"{name} must be an int, got {size!r} ({type(size).__name__})")
        least = 0 if name == "statistics_words" else 1
        if size < least:
            raise ValueError(f"{name} must be at least {least}, got {size}")
        if name in ("B_r", "B_c") and size > sizes["T"]:
            raise ValueError(f"{name} must be at most T = {sizes['T']}, got {size}")


def block_count(size, step):
    """How many blocks of ``step`` cover ``size``: size / step, rounded up."""
    _sizes(size=size, step=step)
    return -(-size // step)


# ------------------------------------------------------------------------------------------------------------
# Words of a matrix product


def matmul_words(m, n, k, b_m, b_n):
    """``schedules.matmul`` of [m, k] by [k, n] with tiles b_m x b_n of the result, whatever b_k is."""
    _sizes(m=m, n=n, k=k, b_m=b_m, b_n=b_n)
    return m * n + m * k * block_count(n, b_n) + k * n * block_count(m, b_m)


def matmul_peak_words(m, n, k, b_m, b_n, b_k):
    """Fast memory of ``schedules.matmul``: one tile of each of the three matrices."""
    _sizes(m=m, n=n, k=k, b_m=b_m, b_n=b_n, b_k=b_k)
    b_m, b_n, b_k = min(b_m, m), min(b_n, n), min(b_k, k)
    return b_m * b_n + b_m * b_k + b_k * b_n


# ------------------------------------------------------------------------------------------------------------
# Words of attention


def standard_forward_words(T, d, B_r):
    """4 T^2 for S and P, and 2 T d (1 + T_r) for Q, K, V, O, with T_r = T / B_r rounded up."""
    _sizes(T=T, d=d, B_r=B_r)
    return 4 * T * T + 2 * T * d * (1 + block_count(T, B_r))


def standard_forward_peak_words(T, d, B_r, B_c):
    """Two thin blocks and a tile for a product, or one whole row with a statistic for the softmax."""
    _sizes(T=T, d=d, B_r=B_r, B_c=B_c)
    return max(B_r * d + B_c * d + B_r * B_c, T + 1)


def standard_forward_rows(T, d, capacity_words, B_c=1):
    """The most rows of a block; ValueError where a whole row, or a block of one row, does not fit."""
    _sizes(T=T, d=d, capacity_words=capacity_words, B_c=B_c)
    if capacity_words < T + 1:
        raise ValueError(
            f"capacity_words must be at least T + 1 = {T + 1} to hold a row, got {capacity_words}"
        )
    return _rows("standard_forward", T, capacity_words, B_c * d, d + B_c)


def softmax_by_pieces_words(T, N):
    """Three passes read T rows of N scores, the third writes them."""
    _sizes(T=T, N=N)
    return 4 * T * N


def standard_backward_words(T, d, B_r, B_c):
    """7 T^2 for P, dP and dS, 2 T for D, and T d (6 + 2 T_r + 2 T_c) for the thin matrices."""
    _sizes(T=T, d=d, B_r=B_r, B_c=B_c)
    return 7 * T * T + 2 * T + T * d * (6 + 2 * block_count(T, B_r) + 2 * block_count(T, B_c))


def standard_backward_peak_words(T, d, B_r, B_c):
    """The largest of a product, of D, and of dS with the tiles of P and dP."""
    _sizes(T=T, d=d, B_r=B_r, B_c=B_c)
    return max(B_r * d + B_c * d + B_r * B_c, 2 * B_r * d + B_r, 2 * B_r * B_c + B_r)


def algorithm_1_words(T, d):
    """Each of Q, K, V and O once."""
    _sizes(T=T, d=d)
    return 4 * T * d


def algorithm_1_peak_words(T, d):
    """Q, K, V, one row of scores, one row of O."""
    _sizes(T=T, d=d)
    return 3 * T * d + T + d


def row_block_forward_words(T, d, B_r):
    """Q and O once, K and V once for each of the T_r blocks of rows."""
    _sizes(T=T, d=d, B_r=B_r)
    return 2 * T * d * (1 + block_count(T, B_r))


def row_block_forward_peak_words(T, d, B_r, B_c):
    """B_r whole rows of scores, B_r rows of Q or O, B_c rows of K or V."""
    _sizes(T=T, d=d, B_r=B_r, B_c=B_c)
    return B_r * (T + d) + B_c * d


def row_block_forward_rows(T, d, capacity_words, B_c=1):
    """The most rows of a block; ValueError where not even one row fits."""
    _sizes(T=T, d=d, capacity_words=capacity_words, B_c=B_c)
    return _rows("row_block_forward", T, capacity_words, B_c * d, T + d)


def row_block_backward_words(T, d, B_r):
    """Q, O, dO, dQ once; K twice and V once a block; dK and dV stored each time, loaded all but the first."""
    _sizes(T=T, d=d, B_r=B_r)
    return T * d * (2 + 7 * block_count(T, B_r))


def row_block_backward_peak_words(T, d, B_r, B_c):
    """B_r whole rows of P and of dP, B_r rows of Q and dO with their D, B_c rows of V."""
    _sizes(T=T, d=d, B_r=B_r, B_c=B_c)
    return B_r * (2 * T + 2 * d + 1) + B_c * d


def row_block_backward_rows(T, d, capacity_words, B_c=1):
    """The most rows of a block; ValueError where not even one row fits."""
    _sizes(T=T, d=d, capacity_words=capacity_words, B_c=B_c)
    return _rows("row_block_backward", T, capacity_words, B_c * d, 2 * T + 2 * d + 1)


def algorithm_2_words(T, d, B_r):
    """As for whole rows: what the tiles change is how large B_r may be."""
    return row_block_forward_words(T, d, B_r)


def algorithm_2_peak_words(T, d, B_r, B_c, statistics_words=0):
    """Four blocks, Q_I, O_I, K_J or V_J, S_IJ, and ``statistics_words`` for each row of the block."""
    _sizes(T=T, d=d, B_r=B_r, B_c=B_c, statistics_words=statistics_words)
    return B_r * (2 * d + B_c + statistics_words) + B_c * d


def algorithm_2_rows(T, d, capacity_words, B_c=1, statistics_words=0):
    """The most rows of a block; ValueError where not even one row fits."""
    _sizes(T=T, d=d, capacity_words=capacity_words, B_c=B_c, statistics_words=statistics_words)
    return _rows("algorithm_2", T, capacity_words, B_c * d, 2 * d + B_c + statistics_words)


def algorithm_3_words(T, d, B_r):
    """As for whole rows, and m and l stored once: the statistics are 2 T words."""
    return row_block_forward_words(T, d, B_r) + 2 * T


def algorithm_3_step_words(d, B_c):
    """(loaded, stored) by one inner step: K_J and V_J in, nothing out."""
    _sizes(d=d, B_c=B_c, T=B_c)
    return 2 * B_c * d, 0


def algorithm_3_peak_words(T, d, B_r, B_c):
    """Q_I, O_I, S_IJ, two statistics for each row, and K_J or V_J, or in its place a factor for each row."""
    _sizes(T=T, d=d, B_r=B_r, B_c=B_c)
    return B_r * (2 * d + B_c + 2) + max(B_c * d, B_r)


def flash2_forward_words(T, d, B_r):
    """As ``algorithm_3_words`` with one statistic in place of two."""
    return row_block_forward_words(T, d, B_r) + T


def flash2_forward_peak_words(T, d, B_r, B_c):
    """That of ``algorithm_3_peak_words``: m and l are two until the end."""
    return algorithm_3_peak_words(T, d, B_r, B_c)


def algorithm_4_words(T, d, B_c):
    """K and V once; Q once for each of the T_c blocks of keys; O, m and l stored as often, and loaded once
    less: T d (3 T_c + 1) and, for the statistics, 2 T (2 T_c - 1).
    """
    return resident_outputs_words(T, d, 1, B_c, 0)


def algorithm_4_step_words(d, B_r):
    """(loaded, stored) by one inner step after the first block of keys: Q_I, O_I, m_I, l_I in, the last
    three out.
    """
    _sizes(d=d, B_r=B_r, T=B_r)
    return B_r * (2 * d + 2), B_r * (d + 2)


def algorithm_4_peak_words(T, d, B_r, B_c):
    """K_J, V_J, S_IJ, a factor for each row, and O_I, or in its place m_I and l_I."""
    _sizes(T=T, d=d, B_r=B_r, B_c=B_c)
    return 2 * B_c * d + B_r * (B_c + 1 + max(d, 2))


def resident_outputs_words(T, d, B_r, B_c, r):
    """``algorithm_4`` is r = 0; each row whose O, m and l stay saves 2 (T_c - 1) (d + 2) words.

    ValueError for r below 0 or above the number of blocks of rows.
    """
    kept, rounds = _resident_rows(T, d, B_r, B_c, r), 2 * block_count(T, B_c) - 1
    return T * d * (2 + block_count(T, B_c)) + (d + 2) * (kept + (T - kept) * rounds)


def resident_outputs_peak_words(T, d, B_r, B_c, r):
    """What stays, K_J, V_J, S_IJ, and the larger of Q_I for a block that stays and the rest of
    ``algorithm_4`` for one that does not. ValueError as for ``resident_outputs_words``.
    """
    kept = _resident_rows(T, d, B_r, B_c, r)
    passing = min(B_r, T - kept) * (B_c + 1 + max(d, 2))
    return 2 * B_c * d + kept * (d + 2) + max(B_r * (B_c + d), passing)


def _resident_rows(T, d, B_r, B_c, r):
    _sizes(T=T, d=d, B_r=B_r, B_c=B_c)
    if type(r) is not int or not 0 <= r <= block_count(T, B_r):
        raise ValueError(f"r must be an int from 0 to {block_count(T, B_r)}, the blocks of rows, got {r!r}")
    return min(r * B_r, T)


def algorithm_5_words(T, d):
    """Five inputs and three gradients, each once."""
    _sizes(T=T, d=d)
    return 8 * T * d


def algorithm_5_peak_words(T, d):
    """Q, K, V, O, dO, dK, dV, and a row of P and one of dP with their D, or a row of dS and one of dQ."""
    _sizes(T=T, d=d)
    return 7 * T * d + max(2 * T + 1, T + d)


def algorithm_6_words(T, d, B_r):
    """Q, O, dO, dQ and L once; K and V loaded, dK and dV stored for each of the T_r blocks of queries, and
    loaded once less: T d (6 T_r + 2) + T.
    """
    _sizes(T=T, d=d, B_r=B_r)
    return T * d * (6 * block_count(T, B_r) + 2) + T


def algorithm_6_step_words(d, B_c):
    """(loaded, stored) by one inner step after the first block of queries: K_J, V_J, dK_J, dV_J in, the last
    two out.
    """
    _sizes(d=d, B_c=B_c, T=B_c)
    return 4 * B_c * d, 2 * B_c * d


def algorithm_6_peak_words(T, d, B_r, B_c):
    """The eight blocks Q, dO, dQ of I, K, V, dK, dV of J, and P_IJ, whose place dS_IJ takes; L_I and D_I."""
    _sizes(T=T, d=d, B_r=B_r, B_c=B_c)
    return B_r * (3 * d + 2) + 4 * B_c * d + B_r * B_c


def algorithm_7_words(T, d, B_c):
    """K, V, dK, dV once; Q, O, dO, L loaded and dQ stored for each of the T_c blocks of keys, and loaded once
    less: T d (5 T_c + 3) + T T_c.
    """
    _sizes(T=T, d=d, B_c=B_c)
    rounds = block_count(T, B_c)
    return T * d * (5 * rounds + 3) + T * rounds


def algorithm_7_step_words(d, B_r):
    """(loaded, stored) by one inner step after the first block of keys: dO, O, Q, dQ, L of I in, dQ out."""
    _sizes(d=d, B_r=B_r, T=B_r)
    return B_r * (4 * d + 1), B_r * d


def algorithm_7_peak_words(T, d, B_r, B_c):
    """That of ``algorithm_6_peak_words``: Q_I takes the place of O_I."""
    return algorithm_6_peak_words(T, d, B_r, B_c)


def algorithm_8_words(T, d, B_c):
    """As ``algorithm_7_words``, with O loaded once and dO once more, D stored once and loaded T_c times:
    T d (4 T_c + 5) + T (2 T_c + 1).
    """
    _sizes(T=T, d=d, B_c=B_c)
    rounds = block_count(T, B_c)
    return T * d * (4 * rounds + 5) + T * (2 * rounds + 1)


def algorithm_8_step_words(d, B_r):
    """(loaded, stored) by one inner step after the first block of keys: Q, dO, dQ, L, D of I in, dQ out."""
    _sizes(d=d, B_r=B_r, T=B_r)
    return B_r * (3 * d + 2), B_r * d


def algorithm_8_peak_words(T, d, B_r, B_c):
    """That of ``algorithm_6_peak_words``: the order of the loops does not change what is resident."""
    return algorithm_6_peak_words(T, d, B_r, B_c)


def deltas_words(T, d):
    """O and dO in, D out."""
    _sizes(T=T, d=d)
    return 2 * T * d + T


def deltas_peak_words(T, d, B_r):
    """A block of O, one of dO, their D."""
    _sizes(T=T, d=d, B_r=B_r)
    return B_r * (2 * d + 1)


def split_keys_words(T, d, B_c):
    """K, V, dK, dV once; Q, dO, L and D for each of the T_c blocks of keys."""
    _sizes(T=T, d=d, B_c=B_c)
    rounds = block_count(T, B_c)
    return T * d * (2 * rounds + 4) + 2 * T * rounds


def split_keys_peak_words(T, d, B_r, B_c):
    """Seven blocks: those of ``algorithm_8_peak_words`` without dQ_I."""
    _sizes(T=T, d=d, B_r=B_r, B_c=B_c)
    return B_r * (2 * d + 2) + 4 * B_c * d + B_r * B_c


def split_queries_words(T, d, B_r):
    """Q, dO, dQ, L and D once; K and V for each of the T_r blocks of queries."""
    _sizes(T=T, d=d, B_r=B_r)
    return T * d * (2 * block_count(T, B_r) + 3) + 2 * T


def split_queries_peak_words(T, d, B_r, B_c):
    """Six blocks: those of ``algorithm_6_peak_words`` without dK_J and dV_J."""
    _sizes(T=T, d=d, B_r=B_r, B_c=B_c)
    return B_r * (3 * d + 2) + 2 * B_c * d + B_r * B_c


def row_sums_backward_words(T, d, B_r):
    """As ``algorithm_6_words``, with K and V once more for each block of queries, and without O."""
    return algorithm_6_words(T, d, B_r) + T * d * (2 * block_count(T, B_r) - 1)


def row_sums_backward_peak_words(T, d, B_r, B_c):
    """That of ``algorithm_6_peak_words``."""
    return algorithm_6_peak_words(T, d, B_r, B_c)


def quarter_blocks(d, capacity_words):
    """(B_r, B_c) of the slides' (44): floor(M / 4d), and the same or d, whichever is less.

    ValueError for M < 4d, where there is no such block.
    """
    _sizes(d=d, capacity_words=capacity_words)
    B_r = capacity_words // (4 * d)
    if B_r < 1:
        raise ValueError(f"capacity_words must be at least 4 d = {4 * d}, got {capacity_words}")
    return B_r, min(B_r, d)


def eighth_blocks(d, capacity_words):
    """(B_r, B_c) of the slides' (79): floor(M / 8d), and the same or d, whichever is less.

    ValueError for M < 8d, where there is no such block.
    """
    _sizes(d=d, capacity_words=capacity_words)
    B_r = capacity_words // (8 * d)
    if B_r < 1:
        raise ValueError(f"capacity_words must be at least 8 d = {8 * d}, got {capacity_words}")
    return B_r, min(B_r, d)


def published_backward_blocks(d, capacity_words):
    """(B_r, B_c) of Dao et al. (2022), Algorithm 4, line 2: B_c = ceil(M / 4d) and B_r = min(B_c, d)."""
    _sizes(d=d, capacity_words=capacity_words)
    B_c = block_count(capacity_words, 4 * d)
    return min(B_c, d), B_c


def _rows(name, T, capacity_words, fixed_words, words_per_row):
    rows = (capacity_words - fixed_words) // words_per_row
    if rows < 1:
        raise ValueError(
            f"capacity_words: {name} needs at least {fixed_words + words_per_row} for a block of one row, "
            f"got {capacity_words}"
        )
    return min(rows, T)


# ------------------------------------------------------------------------------------------------------------
# Operations


def forward_operations(T, d):
    """Every operation of one head: scores with their scale, the safe softmax, the output."""
    _sizes(T=T, d=d)
    return 2 * d * T * T + T * (5 * T - 2) + T * d * (2 * T - 1)


def backward_operations(T, d):
    """Four products of 2 T^2 d, dS, D, and the scale of dQ and dK; P is read, not recomputed."""
    _sizes(T=T, d=d)
    return 8 * T * T * d + 2 * T * T + 4 * T * d


def forward_flops(T, d):
    """The field's convention: two products and nothing else."""
    _sizes(T=T, d=d)
    return 4 * T * T * d


def backward_flops(T, d):
    """The field's convention, 2.5 times the forward pass: five products, since S is recomputed."""
    return 5 * forward_flops(T, d) // 2


# ------------------------------------------------------------------------------------------------------------
# Bytes that kernels read and write when nothing is read twice


class Transfer(NamedTuple):
    """What one kernel moves, if each input is read from HBM once and each output written once."""

    step: str
    kernel: str
    read_bytes: int
    written_bytes: int


def standard_forward_bytes(T, d, heads, itemsize):
    """The three kernels of the forward pass; S and L in 4 bytes, everything else in ``itemsize``.

    heads: batch entries times heads, all with keys of their own. Returns a list of Transfer.
    """
    _sizes(T=T, d=d, heads=heads, itemsize=itemsize)
    square, thin, row = heads * T * T, heads * T * d * itemsize, heads * T * 4
    return [
        Transfer("S", "scores_kernel", 2 * thin, 4 * square),
        Transfer("P", "softmax_kernel", 4 * square, itemsize * square + row),
        Transfer("O", "output_kernel", itemsize * square + thin, thin),
    ]


def standard_backward_bytes(T, d, heads, itemsize):
    """The six kernels of the backward pass; dP and D in 4 bytes. As ``standard_forward_bytes``."""
    _sizes(T=T, d=d, heads=heads, itemsize=itemsize)
    square, thin, row = heads * T * T, heads * T * d * itemsize, heads * T * 4
    return [
        Transfer("dV", "product_kernel", itemsize * square + thin, thin),
        Transfer("dP", "product_kernel", 2 * thin, 4 * square),
        Transfer("D", "delta_kernel", 2 * thin, row),
        Transfer("dS", "dscores_kernel", (itemsize + 4) * square + row, itemsize * square),
        Transfer("dQ", "product_kernel", itemsize * square + thin, thin),
        Transfer("dK", "product_kernel", itemsize * square + thin, thin),
    ]


def flash1_forward_bytes(T, d, heads, itemsize, B_c):
    """The one kernel of flash1, if every step goes to HBM: K and V once; Q, O, m and l in and the last three
    out with each block of B_c keys. O, m and l in 4 bytes. As ``standard_forward_bytes``.
    """
    _sizes(T=T, d=d, heads=heads, itemsize=itemsize, B_c=B_c)
    rounds, thin, state = block_count(T, B_c), heads * T * d * itemsize, heads * T * (d + 2) * 4
    return [Transfer("O", "forward_kernel", 2 * thin + rounds * (thin + state), rounds * state)]


def flash2_forward_bytes(T, d, heads, itemsize):
    """The one kernel of flash2: Q, K, V in, O and L out. As ``standard_forward_bytes``."""
    _sizes(T=T, d=d, heads=heads, itemsize=itemsize)
    thin, row = heads * T * d * itemsize, heads * T * 4
    return [Transfer("O", "forward_kernel", 3 * thin, thin + row)]


def flash_backward_bytes(T, d, heads, itemsize, deterministic=True):
    """The kernels of the backward pass of flash2: D and L in base 2, then dK and dV, then dQ; or, where not
    ``deterministic``, all three at once, with dQ in 4 bytes that come and go once. PyTorch's zeros and
    conversion of that dQ, and the padding of D and L to whole blocks, are not counted. As
    ``standard_forward_bytes``.
    """
    _sizes(T=T, d=d, heads=heads, itemsize=itemsize)
    thin, row, sums = heads * T * d * itemsize, heads * T * 4, heads * T * d * 4
    inputs = 4 * thin + 2 * row  # Q, K, V, dO; L and D
    rows = Transfer("D", "delta_kernel", 2 * thin + 2 * row, 2 * row)  # in: L and dL
    if not deterministic:
        return [rows, Transfer("dQ, dK, dV", "fused_kernel", inputs + sums, 2 * thin + sums)]
    return [
        rows,
        Transfer("dK, dV", "keys_kernel", inputs, 2 * thin),
        Transfer("dQ", "queries_kernel", inputs, thin),
    ]


def total_bytes(transfers):
    """Bytes read and written by a list of Transfer."""
    return sum(transfer.read_bytes + transfer.written_bytes for transfer in transfers)


# ------------------------------------------------------------------------------------------------------------
# GPUs and seconds


class GPU(NamedTuple):
    """A data sheet. Rates are decimal, sizes of memories on the chip binary (1 KiB = 1024 bytes).

    flops_per_second    dense bfloat16 or float16 products on the tensor cores, at boost clock
    hbm_bytes_per_second, hbm_bytes
    l2_bytes            the cache that all multiprocessors share
    multiprocessors     each with ``shared_bytes`` of shared memory, as much as a kernel may use of the
                        memory that it shares with the L1 cache, and ``register_bytes`` of registers
    source              where the numbers stand
    """

    name: str
    flops_per_second: float
    hbm_bytes_per_second: float
    hbm_bytes: float
    l2_bytes: int
    multiprocessors: int
    shared_bytes: int
    register_bytes: int
    source: str

    @property
    def ridge_flops_per_byte(self):
        """The intensity at which arithmetic and HBM take equally long."""
        return self.flops_per_second / self.hbm_bytes_per_second


KIB, MIB = 2**10, 2**20

A100 = GPU(
    "A100 80GB SXM", 312e12, 2.039e12, 80e9, 40 * MIB, 108, 164 * KIB, 256 * KIB,
    "NVIDIA A100 Tensor Core GPU, data sheet (2021); NVIDIA A100 Tensor Core GPU Architecture, white paper "
    "V1.0 (2020), for the chip",
)  # fmt: skip
H100 = GPU(
    "H100 SXM", 989.4e12, 3.35e12, 80e9, 50 * MIB, 132, 228 * KIB, 256 * KIB,
    "NVIDIA H100 Tensor Core GPU Architecture, white paper (2022); its rates with sparsity are halved here",
)  # fmt: skip
H200 = GPU(
    "H200 SXM", 989.5e12, 4.8e12, 141e9, 60 * MIB, 132, 228 * KIB, 256 * KIB,
    "NVIDIA H200 Tensor Core GPU, data sheet (2024), rate with sparsity halved; the chip is that of the H100 "
    "with the L2 cache that the device reports",
)  # fmt: skip
GPUS = (A100, H100, H200)


def attainable_flops_per_second(flops_per_byte, gpu):
    """The roofline: the lesser of what the tensor cores do and what HBM can feed them.

    ValueError for an intensity that is not positive.
    """
    if not flops_per_byte > 0:
        raise ValueError(f"flops_per_byte must be positive, got {flops_per_byte}")
    return min(gpu.flops_per_second, flops_per_byte * gpu.hbm_bytes_per_second)


def compute_seconds(flops, gpu):
    """Time of the operations alone, at the peak rate of the tensor cores."""
    return _not_negative("flops", flops) / gpu.flops_per_second


def transfer_seconds(moved_bytes, gpu):
    """Time of the bytes alone, at the full rate of HBM."""
    return _not_negative("moved_bytes", moved_bytes) / gpu.hbm_bytes_per_second


def roofline_seconds(flops, moved_bytes, gpu):
    """The longer of the two: operations and transfers overlap perfectly."""
    return max(compute_seconds(flops, gpu), transfer_seconds(moved_bytes, gpu))


def _not_negative(name, value):
    if not value >= 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value
