"""Ranks that share one sequence: the words that each receives and holds, and the scores
that each computes (chapter *Ring attention*).

    run = ring_forward(q, k, v, ranks=4, causal=True)
    run["O"], run.ranks[0].received_words, run.ranks[0].peak_words, run.pairs
    ring_words(T, d, H_kv, N), ring_peak(T, d, H, H_kv, N)

Tensors are [H, T, d] and [H_kv, T, d], of one width d. A word is one number, whatever
its format. A rank holds its shards of Q, K and V from the beginning, and scores are not
counted: a kernel keeps them in its tiles.
"""

import math
from typing import NamedTuple

import numpy as np

from flashlib.plain_checks import check_count, wrong

DIVISIONS = ("zigzag", "contiguous")
# Of H200s with NVLink. A GPU computes this many floating point operations while it
# receives a 16-bit word: 670 TFLOP/s, and 285 GB/s in copies of 32 MiB.
FLOP_PER_WORD = 4700
WAIT_WORDS = 6_700_000  # it receives while ranks wait for each other once, 47 us
EXCHANGES = 4  # of Ulysses in a pass: Q, K, V and O, or their gradients


class Rank:
    """The blocks that a rank holds, and its counts of words."""

    def __init__(self):
        self.blocks = {}
        self.received_words = self.peak_words = 0

    def __getitem__(self, name):
        return self.blocks[name]

    def __setitem__(self, name, block):
        self.blocks[name] = block
        held = sum(x.size for x in self.blocks.values())
        self.peak_words = max(self.peak_words, held)

    def free(self, *names):
        """Drop blocks."""
        for name in names:
            del self.blocks[name]


class RingRun(NamedTuple):
    """What a run leaves: whole arrays, the ranks, and the visible scores that each rank
    computes in each step, ``pairs[rank][step]`` for one head (of a forward pass).
    """

    arrays: dict
    ranks: list
    pairs: list

    def __getitem__(self, name):
        return self.arrays[name]


def positions(T, rank, ranks, division="zigzag"):
    """The positions in the sequence of a rank's tokens, ``T / ranks`` integers.

    Raises ValueError where the sequence cannot be divided evenly.
    """
    check_count("ranks", ranks)
    if division not in DIVISIONS:
        raise wrong("division", f"one of {', '.join(DIVISIONS)}", repr(division))
    parts = ranks if division == "contiguous" else 2 * ranks
    if T % parts:
        raise wrong("T", f"a multiple of {parts} for {ranks} ranks", T)
    chunks = np.arange(T).reshape(parts, -1)
    if division == "contiguous":
        return chunks[rank]
    return np.concatenate([chunks[rank], chunks[-1 - rank]])


def _to_next(ranks, names, arriving):
    """Every rank receives the blocks ``names`` of the previous one as ``arriving``."""
    sent = [[rank[name] for name in names] for rank in ranks]
    for number, rank in enumerate(ranks):
        for name, block in zip(arriving, sent[number - 1], strict=True):
            rank[name] = block.copy()
            rank.received_words += block.size


def _with_shards(ranks, division, **arrays):
    """(positions of each rank, Ranks that hold their shards of the arrays)."""
    T = next(iter(arrays.values())).shape[1]
    own = [positions(T, rank, ranks, division) for rank in range(ranks)]
    all_ranks = [Rank() for _ in own]
    for rank, at in zip(all_ranks, own, strict=True):
        for name, x in arrays.items():
            rank[name] = x[:, at]
    return own, all_ranks


def _steps(ranks, own, causal):
    """For each step: its number, what the keys and values in use are called, and the
    pairs that each rank sees, ``[T / N, T / N]`` of booleans. The next keys have
    arrived.
    """
    names = ["K", "V"]
    for step in range(len(ranks)):
        coming = [f"{name}{step + 1}" for name in "KV"]
        if step + 1 < len(ranks):
            _to_next(ranks, names, coming)
        sources = own[-step:] + own[:-step]
        pairs = [(x[:, None], keys) for x, keys in zip(own, sources, strict=True)]
        yield step, names, [(keys <= x) | (not causal) for x, keys in pairs]
        names = coming


def _scores(q, k, v, seen):
    """Scores, -inf where a query does not see the key, and K and V for all H heads."""
    k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    s = np.where(seen, q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[2]), -np.inf)
    return s, k, v


def _attend(q, k, v, seen):
    """O and L of the queries [H, T_q, d] for keys [H_kv, T_k, d]; 0 and -inf where a
    query sees none.
    """
    s, _, v = _scores(q, k, v, seen)
    m = np.maximum(s.max(2, keepdims=True), -1e300)
    p = np.exp(s - m)
    l = p.sum(2, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(l))[:, :, 0]
    return (p @ v) / np.maximum(l, 1e-300), lse


def _merge(o, lse, o_part, lse_part):
    """Merge two finished results, ``eq-online-lse-merge``, in place."""
    both = np.logaddexp(lse, lse_part)
    shift = np.where(np.isinf(both), 0.0, both)
    old, new = np.exp(lse - shift), np.exp(lse_part - shift)
    o[:] = old[..., None] * o + new[..., None] * o_part
    lse[:] = both


def ring_forward(Q, K, V, *, ranks, causal=False, division="zigzag"):
    """The outputs of a ring of ranks, O [H, T, d] and L [H, T].

    In each step a rank sends the keys and values that it has to the next rank, receives
    the previous rank's, attends to those that it has, and merges. Returns a
    :class:`RingRun`. Raises ValueError for a sequence that cannot be divided.
    """
    own, all_ranks = _with_shards(ranks, division, Q=Q, K=K, V=V)
    pairs = [[] for _ in own]
    for step, here, masks in _steps(all_ranks, own, causal):
        for rank, seen, computed in zip(all_ranks, masks, pairs, strict=True):
            computed.append(int(seen.sum()))
            keys, values = (rank[name] for name in here)
            o, lse = _attend(rank["Q"], keys, values, seen)
            if step == 0:
                rank["O"], rank["L"] = o, lse
            else:
                rank["O part"], rank["L part"] = o, lse
                _merge(rank["O"], rank["L"], o, lse)
                rank.free("O part", "L part", *here)
    return RingRun(_whole(all_ranks, own, "O", "L"), all_ranks, pairs)


def _whole(ranks, own, *names):
    """{name: array of the whole sequence} of the ranks' blocks."""
    order = np.argsort(np.concatenate(own))
    return {
        name: np.concatenate([rank[name] for rank in ranks], axis=1)[:, order]
        for name in names
    }


def _gradients(rank, keys, values, seen):
    """dQ, dK and dV of the queries of a rank and the keys that are with it."""
    q, o, do = (rank[name] for name in ("Q", "O", "dO"))
    s, k, v = _scores(q, keys, values, seen)
    p = np.exp(s - rank["L"][..., None])
    ds = p * (do @ v.transpose(0, 2, 1) - (do * o).sum(2, keepdims=True))
    ds /= math.sqrt(q.shape[2])
    shares = ds.transpose(0, 2, 1) @ q, p.transpose(0, 2, 1) @ do
    of_group = (len(keys), -1, *keys.shape[1:])
    return ds @ k, *(x.reshape(of_group).sum(1) for x in shares)


def ring_backward(Q, K, V, dO, O, L, *, ranks, causal=False, division="zigzag"):
    """dQ, dK and dV, from the output O [H, T, d] and the log-sum-exp L [H, T].

    Keys and values go around as in :func:`ring_forward`. What other ranks add to dK and
    dV follows them, and takes one more step, home. Returns a :class:`RingRun` without
    pairs.
    """
    own, all_ranks = _with_shards(ranks, division, Q=Q, K=K, V=V, O=O, L=L, dO=dO)
    for step, here, masks in _steps(all_ranks, own, causal):
        for rank, seen in zip(all_ranks, masks, strict=True):
            keys, values = (rank[name] for name in here)
            parts = _gradients(rank, keys, values, seen)
            for name, part in zip(("dQ", "dK", "dV"), parts, strict=True):
                rank[f"{name} part" if step else name] = part
            if step == 0:
                continue
            rank["dQ"] += rank["dQ part"]
            rank.free("dQ part")
            rank.free(*here)
            for name in ("dK", "dV"):
                if step > 1:  # what the previous rank sent is there now
                    rank[f"{name} part"] += rank[f"{name} coming"]
                    rank.free(f"{name} sum", f"{name} coming")
                rank[f"{name} sum"] = rank.blocks.pop(f"{name} part")
        if step:
            _to_next(all_ranks, ("dK sum", "dV sum"), ("dK coming", "dV coming"))
    if ranks > 1:
        for rank in all_ranks:
            for name in ("dK", "dV"):
                rank[name] += rank[f"{name} coming"]
    return RingRun(_whole(all_ranks, own, "dQ", "dK", "dV"), all_ranks, [])


def ring_words(T, d, H_kv, N):
    """Words that a rank receives in a forward pass of the ring, ``eq-ring-words``: the
    keys and values of all others, once. Gathering them all at once moves as many.
    """
    return 2 * H_kv * T * d * (N - 1) // N


def ring_peak(T, d, H, H_kv, N):
    """Words that a rank of the ring holds at most, ``eq-ring-peak``: Q, O, a part of O
    and their statistics, and up to three shards of keys and values: its own, those in
    use and those that arrive.
    """
    rows = T // N
    queries = H * rows * (2 * d + 1 if N == 1 else 3 * d + 2)
    return queries + 2 * H_kv * rows * d * min(N, 3)


def ring_backward_peak(T, d, H, H_kv, N):
    """Words that a rank holds at most in a backward pass, ``eq-ring-backward-peak``: Q,
    O, dO, dQ, a part of dQ and L; up to three shards of keys and values, as in
    :func:`ring_peak`; and of dK and dV its own and a part, with three ranks or more
    also the sums that it has sent and those that arrive.
    """
    rows, shards = T // N, {1: 2, 2: 4, 3: 6}.get(N, 7)
    queries = H * rows * (5 * d + 1 if N > 1 else 4 * d + 1)
    return queries + 2 * H_kv * rows * d * shards


def launch_peak(T, d, H, H_kv, N):
    """Words that a rank holds at most in a forward pass of one launch,
    ``eq-ring-launch-peak``: Q, O and L, and of keys and values its own, two slots from
    which the others copy, and the shards of all others.
    """
    rows, shards = T // N, N + 2 if N > 1 else 1
    return H * rows * (2 * d + 1) + 2 * H_kv * rows * d * shards


def copies_backward_words(T, d, H, H_kv, N, d_v=None):
    """Words that a rank receives in a backward pass by copies, ``eq-ring-visitors``, in
    two ways: keys and values visit the queries, and a share of dK and dV goes home for
    each; or Q, dO, L and D visit the keys, and a share of dQ goes home.
    """
    rows, d_v = T // N * (N - 1), d if d_v is None else d_v
    return 2 * H_kv * rows * (d + d_v), H * rows * (2 * d + d_v + 2)


def copies_backward_peak(T, d, H, H_kv, N):
    """Words that a rank holds at most in a backward pass by copies, with fewer words
    received: its own tensors and sums, and of the visitors and of the shares that leave
    two slots each, those in use and those that arrive; with three ranks or more also
    the next visitors and the shares of the step before.
    """
    rows, more = T // N, N > 2
    by_keys, by_queries = copies_backward_words(T, d, H, H_kv, N)
    if N == 1:
        return ring_backward_peak(T, d, H, H_kv, N)
    shard, of_queries = 2 * H_kv * d, H * (4 * d + 1)  # Q, O, dO, dQ and L
    if by_queries < by_keys:
        visitor, share = H * (2 * d + 2), H * d
        own = of_queries + H + 3 * shard  # D, and a part of dK and dV next to their sum
    else:
        visitor = share = shard
        own = of_queries + H * d + 2 * shard  # a part of dQ next to its sum
    return rows * (own + visitor * (3 + more) + share * (3 + 2 * more))


def gathered_peak(T, d, H, H_kv, N):
    """Words that a rank holds that gathers all keys and values first."""
    return H * (T // N) * (2 * d + 1) + 2 * H_kv * T * d


def ulysses_words(T, d, H, H_kv, N):
    """Words that a rank receives which exchanges rows for heads and back: Q, K and V of
    its heads from all others, and O of its rows. N must divide H_kv.
    """
    if H_kv % N:
        raise wrong("N", f"a divisor of the {H_kv} heads of keys", N)
    return (2 * H + 2 * H_kv) * d * (T // N) * (N - 1) // N


def exposed_words(
    T, d, H, H_kv, N, *, causal=True, backward=False,
    flop_per_word=FLOP_PER_WORD, wait_words=WAIT_WORDS,
):  # fmt: skip
    """``(ring, ulysses)``: how long the ranks compute nothing in a pass,
    ``eq-ring-exposed``, as the words that a rank receives in this time.

    In the ring, by copies, the words of a hop arrive while a step computes, and the
    ranks wait for each other once. Ulysses hides nothing, and waits in each of its
    exchanges; where N does not divide H_kv it is not possible, and takes forever.
    """
    flop = (10 if backward else 4) * d * H * T**2 // N // (2 if causal else 1)
    words = ring_words(T, d, H_kv, N)
    if backward:
        words = min(copies_backward_words(T, d, H, H_kv, N))
    late = max(0, words - (N - 1) * flop / N / flop_per_word)
    ring = late + (wait_words if N > 1 else 0)
    if H_kv % N:
        return ring, math.inf
    return ring, ulysses_words(T, d, H, H_kv, N) + EXCHANGES * wait_words


def cheaper(T, d, H, H_kv, N, *, causal=True, training=False):
    """``"ring"`` or ``"ulysses"``, whose ranks compute nothing for less time; in
    training of both passes together.
    """
    passes = (False, True) if training else (False,)
    found = [
        exposed_words(T, d, H, H_kv, N, causal=causal, backward=backward)
        for backward in passes
    ]
    ring, ulysses = map(sum, zip(*found, strict=True))
    return "ring" if ring <= ulysses else "ulysses"
