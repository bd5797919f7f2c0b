"""The merge law on random states, partitions and orders, the same in every run.

The judge is the definition in Python's own floats with exact sums, which has no running
maximum, no merge and no order. float64 shows a wrong factor, float32 an overflow.
"""

import itertools
import math

import hypothesis
import torch
from expected import same
from hypothesis import strategies as st

from flashlib import testing
from flashlib.notebook import check
from flashlib.reference import online, standard

settings = hypothesis.settings(
    max_examples=60, derandomize=True, deadline=None, database=None
)

DTYPES = (torch.float32, torch.float64)
D_V = 3

# Beyond the range of a float32 exponential, with ties, and -inf for a key that is not
# seen.
scores = st.one_of(
    st.floats(-200, 200, width=32), st.sampled_from((-math.inf, -200.0, 0.0, 200.0))
)
values = st.tuples(*[st.floats(-8, 8, width=32)] * D_V)
keys = st.lists(st.tuples(scores, values), max_size=12)
dtypes = st.sampled_from(DTYPES)


def state_of(pairs, dtype):
    """The state of one query, m and l ``[1]``, o ``[1, D_V]``."""
    s = torch.tensor([score for score, _ in pairs], dtype=dtype)
    v = torch.tensor([value for _, value in pairs], dtype=dtype)
    return online.block(s.reshape(1, len(pairs)), v.reshape(len(pairs), D_V))


def by_definition(pairs):
    """``(o, lse)`` from the softmax of all scores."""
    seen = [(score, value) for score, value in pairs if score > -math.inf]
    m = max((score for score, _ in seen), default=0.0)
    weights = [math.exp(score - m) for score, _ in seen]
    l = math.fsum(weights)
    o = [
        math.fsum(w * value[c] / l for w, (_, value) in zip(weights, seen, strict=True))
        for c in range(D_V)
    ]
    lse = m + math.log(l) if seen else -math.inf
    return torch.tensor([o], dtype=torch.double), torch.tensor(
        [lse], dtype=torch.double
    )


def assert_is(pairs, finished):
    """finished ``(o, lse)`` is that of the pairs, to as many roundings as a dozen
    merges of a log-sum-exp near 200 have.
    """
    within = 4096 * torch.finfo(finished[0].dtype).eps
    for name, x, exact in zip(
        ("o", "lse"), finished, by_definition(pairs), strict=True
    ):
        check(name, x, exact, within=within)


def cut(pairs, places):
    """The pairs in consecutive blocks; equal places give empty blocks."""
    places = [0, *sorted(place % (len(pairs) + 1) for place in places), len(pairs)]
    return [pairs[a:b] for a, b in itertools.pairwise(places)]


def in_any_tree(states, merge, chance):
    """All states merged, two random ones at a time: any order, any grouping."""
    states = list(states)
    while len(states) > 1:
        chance.shuffle(states)
        states.append(merge(states.pop(), states.pop()))
    return states[0]


# --


@settings
@hypothesis.given(keys, keys, dtypes)
def test_merge_has_an_identity_and_commutes_to_the_last_bit(first, second, dtype):
    a, b = state_of(first, dtype), state_of(second, dtype)
    nothing = online.identity((1,), D_V, dtype=dtype)
    assert same(online.merge(nothing, a), a) and same(online.merge(a, nothing), a)
    assert same(online.merge(a, b), online.merge(b, a))


@settings
@hypothesis.given(
    keys,
    st.lists(st.integers(0, 1000), max_size=12),
    dtypes,
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_any_partition_in_any_order_and_grouping(
    pairs, places, dtype, chance, shuffled
):
    """Empty blocks and single keys too, of neighboring or scattered keys."""
    arranged = chance.sample(pairs, len(pairs)) if shuffled else pairs
    blocks = cut(arranged, places)
    states = [state_of(block, dtype) for block in blocks]
    whole = in_any_tree(states, online.merge, chance)
    assert torch.equal(whole.m, state_of(pairs, dtype).m)
    assert_is(pairs, online.finish(whole))
    assert_is(pairs, online.finish(state_of(pairs, dtype)))
    finished = in_any_tree(map(online.finish, states), online.merge_finished, chance)
    assert_is(pairs, finished)


# --


def test_a_state_is_differentiable_where_a_query_sees_nothing():
    s = torch.full((2, 3), -math.inf, dtype=torch.float64)
    s[1] = torch.tensor([0.5, -1.0, 2.0])
    v = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    o, _ = online.finish(
        online.merge(online.block(s[:, :1], v[:1]), online.block(s[:, 1:], v[1:]))
    )
    (dv,) = torch.autograd.grad(o.sum(), v)
    check("dv", dv, torch.softmax(s[1], dim=0)[:, None].expand(3, 2))


# --


@settings
@hypothesis.given(
    st.tuples(st.integers(1, 9), st.integers(0, 11), st.integers(1, 13)),
    st.booleans(),
    st.sampled_from((1e-3, 1.0, 60.0)),
    st.none() | st.floats(-2, 2),
    st.integers(0, 2**32 - 1),
    dtypes,
)
def test_attention_in_one_pass(sizes, causal, magnitude, scale, seed, dtype):
    """Within the budget in float32, and the reference in float64."""
    T_q, T_k, block_size = sizes
    kind = {"H_kv": 2, "d_v": 5, "dtype": dtype, "magnitude": magnitude, "seed": seed}
    q, k, v = testing.make_qkv(2, 4, T_q, 8, T_k=T_k, **kind)
    options = {"causal": causal, "scale": scale}
    found = online.attention(q, k, v, block_size, **options)
    assert {x.dtype for x in found} == {dtype}
    if dtype == torch.float32:
        testing.assert_within_budget(q, k, v, *found, **options)
        return
    wanted = standard.attention(q, k, v, **options)
    for name, x, y in zip(("o", "lse"), found, wanted, strict=True):
        check(name, x, y)
