"""Latent attention: what both ways compute, their gradients, the rotary columns, and
what is counted."""

import itertools

import pytest
import torch

from flashlib.iomodel import CapacityExceeded
from flashlib.iomodel import latent as model
from flashlib.iomodel.roofline import H200
from flashlib.notebook import check
from flashlib.reference import latent as reference

each_mask = pytest.mark.parametrize("causal", [False, True])
# T_q and T_k; all other sizes of a problem differ too, so that no transpose can hide.
SHAPES = {"prompt": (9, 9), "cached": (3, 8), "one query": (1, 7), "blind": (8, 2)}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def problem(T_q, T_k, B=2, H=3, d_c=11, d_n=6, d_r=4, d_v=5, seed=0):
    """q, c, r, w_k, w_v and do in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    q, do = normal(B, H, T_q, d_n + d_r), normal(B, H, T_q, d_v)
    c, r = normal(B, T_k, d_c), normal(B, T_k, d_r)
    return (q, c, r, normal(H, d_c, d_n), normal(H, d_c, d_v)), do


def by_einsum(q, c, r, w_k, w_v, causal, scale):
    """The definition, in which no keys, no values and no absorbed queries occur."""
    d_n, (T_q, T_k) = w_k.shape[2], (q.shape[2], c.shape[1])
    s = torch.einsum("bhin,hcn,bjc->bhij", q[..., :d_n], w_k, c)
    s = s + torch.einsum("bhir,bjr->bhij", q[..., d_n:], r)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sees = torch.ones(T_q, T_k, dtype=torch.bool)
    sees = sees.tril(T_k - T_q) if causal else sees
    seen = s.mul(scale).masked_fill(~sees, -1e300)
    p = torch.softmax(seen, dim=-1) * sees.any(dim=1)[:, None]
    return torch.einsum("bhij,bjc,hcv->bhiv", p, c, w_v)


@each_shape
@each_mask
@pytest.mark.parametrize("scale", [None, -0.3])
@pytest.mark.parametrize("way", ["expanded", "absorbed"])
def test_both_ways_and_their_gradients(shape, causal, scale, way):
    inputs, do = problem(*shape)
    options = {"causal": causal, "scale": scale}
    leaves = [x.clone().requires_grad_() for x in inputs]
    wanted = by_einsum(*leaves, causal, scale)
    o, _ = getattr(reference, way)(*inputs, **options)
    check("o", o, wanted.detach())
    found = getattr(reference, f"{way}_gradients")(*inputs, do, **options)
    gradients = torch.autograd.grad(wanted, leaves, do)
    for name, one, other in zip(found._fields, found, gradients, strict=True):
        check(name, one, other)


@each_shape
@each_mask
def test_both_ways_have_the_same_log_sum_exp(shape, causal):
    inputs, _ = problem(*shape)
    (_, one), (_, other) = (
        way(*inputs, causal=causal) for way in (reference.expanded, reference.absorbed)
    )
    seen = one.isfinite()
    assert torch.equal(seen, other.isfinite())
    check("lse", one[seen], other[seen])


def test_a_query_that_sees_no_key_has_zeros():
    inputs, do = problem(5, 2)
    for way in ("expanded", "absorbed"):
        o, lse = getattr(reference, way)(*inputs, causal=True)
        found = getattr(reference, f"{way}_gradients")(*inputs, do, causal=True)
        assert (o[:, :, :3] == 0).all() and (lse[:, :, :3] == -torch.inf).all()
        assert (found.q[:, :, :3] == 0).all() and (found.q[:, :, 4:] != 0).all()


def test_a_rotation_is_that_of_complex_numbers():
    positions, x = torch.tensor([0, 1, 7, 300]), torch.randn(4, 6, dtype=torch.float64)
    turned = (x[:, None] @ reference.rotations(positions, 6))[:, 0]
    pairs = torch.view_as_complex(x.reshape(4, 3, 2))
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(0, 6, 2).double() / 6)
    wanted = torch.view_as_real(pairs * torch.exp(1j * angles)).flatten(1)
    check("turned", turned, wanted)
    at = reference.rotations(positions, 6)
    check("distance", at[3] @ at[2].mT, reference.rotations(torch.tensor([293]), 6)[0])


@pytest.mark.parametrize("H, moves", [(1, True), (2, True), (3, False)])
def test_a_rotation_moves_through_the_weights_only_of_few_heads(H, moves):
    """As long as the columns of all heads together, H d_n, are no more than d_c."""
    (*_, w_k, _), _ = problem(1, 1, H=H, d_c=8, d_n=4)
    (at,) = reference.rotations(torch.tensor([5]), 4)
    _, error = reference.moved_rotation(w_k, at)
    assert (error < 1e-9) if moves else (error > 0.1)


# -- counts


def stacked(x):
    """``[H, T, d]`` as ``[H T, d]``, one head below the other."""
    return x.flatten(0, 1).numpy()


RUNS = [(1, 9, 3, 1, 4), (1, 9, 3, 3, 9), (4, 7, 2, 5, 3), (2, 3, 1, 2, 1)]


@pytest.mark.parametrize("T_q, T_k, H, B_r, B_c", RUNS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_schedules_of_both_ways(T_q, T_k, H, B_r, B_c, scale):
    (q, c, r, w_k, w_v), _ = problem(T_q, T_k, B=1, H=H)
    o, lse = reference.expanded(q, c, r, w_k, w_v, scale=scale)
    inputs = stacked(q[0]), c[0].numpy(), r[0].numpy(), stacked(w_k), stacked(w_v)
    widths = model.Widths(d_c=11, d_n=6, d_r=4, d_v=5)
    rest = {"H": H, "B_c": B_c, "scale": scale}
    for way, options in (("expanded", rest), ("absorbed", rest | {"B_r": B_r})):
        schedule = getattr(model, f"{way}_forward")
        run = schedule(*inputs, capacity_words=10**6, **options)
        check("O", run["O"], stacked(o[0]))
        check("L", run["L"][:, 0], lse[0].flatten().numpy())
        assert run.memory.moved_words == run.memory.closed_form_words
        flops = getattr(model, f"{way}_flops")(T_q, T_k, H, widths)
        assert run.memory.product_flops == flops
        peak = run.memory.peak_words
        schedule(*inputs, capacity_words=peak, **options)
        with pytest.raises(CapacityExceeded):
            schedule(*inputs, capacity_words=peak - 1, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "widths",
    [model.DEEPSEEK, model.Widths(64, 16, 32, 24), model.Widths(20, 16, 8, 32)],
)
def test_the_inequality_compares_the_operations(widths, causal):
    for T_q, T_k in itertools.product((1, 2, 20, 100, 127, 128, 129), (128, 512, 4096)):
        flops = (T_q, T_k, 3, widths, causal)
        fewer = model.absorbed_flops(*flops) < model.expanded_flops(*flops)
        assert model.absorbs(T_q, T_k, widths, causal) == fewer


def test_where_the_two_ways_cross():
    assert [model.crossing(T_k) for T_k in (512, 4096, 10**9)] == [128, 164, 171]
    assert model.limit() == 512 / 3
    for T_k in (2, 3, 512, 700, 4096):
        for causal in (False, True):
            way = [model.absorbs(T_q, T_k, causal=causal) for T_q in range(1, T_k + 1)]
            first = model.crossing(T_k, causal=causal)
            assert way == [True] * (first - 1) + [False] * (T_k - first + 1)
    assert not model.absorbs(8192, 8192, causal=True)
    with pytest.raises(ValueError, match=r"^d_c: expected more than .* = 24, got 20"):
        model.limit(model.Widths(20, 16, 8, 32))


def test_what_a_cache_holds_and_the_roof():
    assert model.latent_words() == 576 and model.expanded_words(128) == 40_960
    per_head = model.decode_flops_per_byte(1)
    assert per_head == 2 * (576 + 512) / (2 * 576)
    low, high = (model.decode_flops_per_byte(H) for H in (16, 128))
    assert low < H200.ridge_flops_per_byte < high
