"""Latent attention: what both ways compute, their gradients, the rotary columns, and
what is counted."""

import itertools
import math

import pytest
import torch
from cases import case_name, spread
from device import CUDA, DEVICE
from expected import latent_layer, same
from histories import near
from latents import Cache, judge, make

import flashlib
from flashlib import testing
from flashlib.iomodel import CapacityExceeded
from flashlib.iomodel import latent as model
from flashlib.iomodel import masks as masks_model
from flashlib.iomodel.roofline import H200
from flashlib.kernels.decoding import busiest
from flashlib.kernels.steps import latent as steps
from flashlib.kvcache import OutOfPages, PagedLatentCache, in_eight_bits
from flashlib.notebook import check
from flashlib.reference import fp8 as eight_bit_reference
from flashlib.reference import latent as reference
from flashlib.reference import standard

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


def test_pairs_are_those_of_the_chapter_on_masks():
    for T_q, T_k, causal in itertools.product(range(6), range(6), (False, True)):
        found = model.visible_pairs(T_q, T_k, causal)
        assert found == masks_model.visible_pairs(T_q, T_k, causal)


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
    assert model.latent_words() == 576 and model.expanded_words(128) == 32_832
    per_head = model.decode_flops_per_byte(1)
    assert per_head == 2 * (576 + 512) / (2 * 576)
    low, high = (model.decode_flops_per_byte(H) for H in (16, 128))
    assert low < H200.ridge_flops_per_byte < high


# -- kernels


def decode(q, cache, d_c=24, splits=1, scale=0.2):
    return flashlib.decode_latent(
        q, cache.rows, d_c=d_c, scale=scale, seq_lens=cache.seq_lens,
        block_table=cache.block_table, splits=splits, return_lse=True,
    )  # fmt: skip


LEVELS = {
    "lengths": ((17, 0), (64, 1), (130,), (70, 203), (5, 113, 64)),
    "T_q": (1, 2, 5),
    "H": (1, 3, 16, 20),
    "d_c": (16, 8, 24, 64, 100, 512),
    "d_r": (1, 8, 64, 70),
    "page": (None, 16, 32, 64, 256),
    "splits": (1, 2, 5, "auto"),
    "dtype": ("float32", "float16", "bfloat16"),
    "layout": testing.LAYOUTS[:5],  # a cache is written to, so no expanded one
    "magnitude": (1.0, 60.0),
    "scale": (0.2, 0.0, -0.25),
}
FEW = spread(LEVELS, seed=0, count=12)
MANY = [
    pytest.param(case, marks=[pytest.mark.slow])
    for case in spread(LEVELS, seed=1, count=400 if CUDA else 30)
]


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("case", FEW + MANY, ids=case_name)
def test_within_the_budget(case):
    case = dict(case)
    splits, scale, d_c = case.pop("splits"), case.pop("scale"), case["d_c"]
    q, cache = make(**case | {"dtype": getattr(torch, case["dtype"])})
    judge(q, cache, *decode(q, cache, d_c, splits, scale), d_c, scale)


@pytest.mark.usefixtures("nan_filled")
def test_absorbed_decoding_is_expanded_attention():
    """The public functions in both ways, against the same budget."""
    (q, c, r, w_k, w_v), _ = problem(3, 70, H=4, d_c=24, d_n=16, d_r=8, d_v=16)
    q, c, r, w_k, w_v = (x.float().to(DEVICE) for x in (q, c, r, w_k, w_v))
    k, v = reference.expand(c, r, w_k, w_v)
    lengths = torch.full((2,), 70, dtype=torch.int32, device=DEVICE)
    o, lse = flashlib.decode_latent(
        reference.absorb(q, w_k), torch.cat([c, r], dim=-1), d_c=24, scale=24**-0.5,
        seq_lens=lengths, return_lse=True,
    )  # fmt: skip
    wanted = standard.attention(*(x.double() for x in (q, k, v)), causal=True)
    found = flashlib.attention(q, k, v, causal=True, return_lse=True)
    for x, y in (((o @ w_v), lse), found):
        assert near(x, wanted[0], q.dtype) and near(y, wanted[1], q.dtype)


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("splits", [1, 3])
def test_sequences_without_rows_and_with_fewer_rows_than_queries(page, splits):
    q, cache = make((0, 2, 0), T_q=4, page=page)
    o, lse = decode(q, cache, splits=splits)
    judge(q, cache, o, lse)
    assert (o[::2] == 0).all() and (lse[::2] == -math.inf).all()
    assert (o[1, :, :2] == 0).all() and (lse[1, :, :2] == -math.inf).all()


def test_pages_in_any_order_give_the_same_bits():
    q, cache = make((100, 37), T_q=2, page=16)
    flat = torch.full((2, 112, 32), math.nan, device=DEVICE)
    for b in range(2):
        rows = cache.of(b)[0, 0]
        flat[b, : len(rows)] = rows
    contiguous = Cache(flat, cache.seq_lens, None)
    for splits in (1, 3):
        one, other = (decode(q, x, splits=splits) for x in (cache, contiguous))
        assert same(one, other)


@pytest.mark.parametrize("B, H, T_q, T_max", [(0, 4, 1, 5), (1, 4, 0, 3), (2, 4, 1, 0)])
def test_empty(B, H, T_q, T_max):
    q, rows = torch.zeros(B, H, T_q, 24), torch.zeros(B, T_max, 24)
    lengths = torch.full((B,), T_max, dtype=torch.int32, device=DEVICE)
    cache = Cache(rows.to(DEVICE), lengths, None)
    o, lse = decode(q.to(DEVICE), cache, d_c=16)
    assert o.shape == (B, H, T_q, 16) and (o == 0).all()
    assert lse.shape == (B, H, T_q) and (lse == -math.inf).all()


@pytest.mark.gpu
def test_250_runs_agree_in_every_bit():
    q, cache = make((203, 70), 16, 3, 512, 64, page=64, dtype=torch.float16)
    first = decode(q, cache, 512, 3)
    for _ in range(250):
        assert same(decode(q, cache, 512, 3), first)


def test_it_has_no_gradient():
    q, cache = make((17,))
    with pytest.raises(
        NotImplementedError, match=r"^flashlib\.decode_latent: it has no"
    ):
        decode(q.requires_grad_(), cache)[0].sum().backward()


@pytest.mark.parametrize(
    "kind, message, changes",
    [
        (TypeError, "d_c: expected an integer", {"d_c": 24.0}),
        (ValueError, "d_c: expected at most 512", {"d_c": 513}),
        (ValueError, r"q: expected 33 to 160 columns next to d_c = 32", {"d_c": 32}),
        (ValueError, r"q: expected 4 dimensions \[B, H, T_q, d_c \+ d_r\]",
         {"q": torch.zeros(2, 4, 32, device=DEVICE)}),
        (ValueError, "cache: expected 32 columns as in q",
         {"cache": torch.zeros(2, 70, 31, device=DEVICE)}),
        (ValueError, "cache: expected batch size 2 as in q",
         {"cache": torch.zeros(3, 70, 32, device=DEVICE)}),
        (ValueError, r"cache: expected 3 dimensions \[B, T_max, d_c \+ d_r\]",
         {"cache": torch.zeros(2, 1, 70, 32, device=DEVICE)}),
        (TypeError, "cache: expected dtype torch.float32",
         {"cache": torch.zeros(1, device=DEVICE).half()}),
        (ValueError, "cache: expected pages of 16, 32",
         {"block_table": torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)}),
        (TypeError, "seq_lens: expected dtype torch.int32",
         {"seq_lens": torch.zeros(2, device=DEVICE)}),
        (TypeError, "scale: expected a real number", {"scale": "1"}),
        (ValueError, "splits: expected at most 128", {"splits": 129}),
        (TypeError, "return_lse: expected True or False", {"return_lse": 1}),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(kind, message, changes):
    q, cache = make((70, 5))
    right = {"q": q, "cache": cache.rows, "seq_lens": cache.seq_lens}
    right |= {"d_c": 24, "scale": 0.2, "block_table": None}
    with pytest.raises(kind, match=f"^{message}"):
        flashlib.decode_latent(**right | changes)


@pytest.mark.parametrize("H, T, d_c, d_r", [(20, 71, 64, 32), (3, 32, 16, 16)])
def test_the_first_kernel(H, T, d_c, d_r):
    """The chapter's: one query of each head, one sequence."""
    q, rows = (torch.randn(n, d_c + d_r, device=DEVICE) for n in (H, T))
    o = steps.launch(q, rows, d_c, 0.1)
    found, keys = o[None, :, None], rows[None, None]
    testing.assert_within_budget(
        q[None, :, None], keys, keys[..., :d_c], found, scale=0.1
    )


def test_the_number_of_splits_fills_the_multiprocessors():
    """One sequence, 128 heads in tiles of 64: 63 splits keep 126 of 132 busy."""
    assert busiest(2, 1024, 132) == 63


# -- the cache in pages


def latents(T, d_c=16, d_r=5):
    """c and r of T positions, each number different."""
    c = torch.arange(T * d_c, dtype=torch.float32, device=DEVICE).view(T, d_c)
    return c, -1 - torch.arange(T * d_r, dtype=torch.float32, device=DEVICE).view(
        T, d_r
    )


def test_a_cache_holds_what_is_appended_and_copies_before_it_writes():
    cache = PagedLatentCache(5, 16, 16, 5, device=DEVICE)
    first, (c, r) = cache.new(), latents(40)
    for start, stop in ((0, 0), (0, 7), (7, 17), (17, 40)):
        cache.append(first, c[start:stop].requires_grad_(), r[start:stop])
    assert same(cache.rows(first), (c, r)) and not cache.pages.requires_grad
    second = cache.fork(first)
    cache.append(second, *(-x for x in latents(1)))
    assert same(cache.rows(first), (c, r))
    assert same(cache.rows(second), [torch.cat([x, -x[:1]]) for x in (c, r)])
    with pytest.raises(OutOfPages, match=r"^PagedLatentCache: asked for 2 pages, 1"):
        cache.append(first, *latents(25))
    assert same(cache.rows(first), (c, r))
    assert cache.statistics().shared == 2
    cache.write(first, 3, *latents(2))
    assert same([x[3:5] for x in cache.rows(first)], latents(2))


@pytest.mark.usefixtures("nan_filled")
def test_decoding_reads_it():
    cache, sequences = PagedLatentCache(12, 16, 16, 5, device=DEVICE), []
    for T in (40, 0, 17):
        sequences.append(cache.new())
        cache.append(sequences[-1], *(x.sin() for x in latents(T)))
    sequences.append(cache.fork(sequences[0]))
    cache.append(sequences[-1], *(x.cos() for x in latents(3)))
    q, _, _ = testing.make_qkv(4, 6, 1, 21, device=DEVICE)
    table, lengths = cache.batch(sequences)
    read = Cache(cache.pages, lengths, table)
    judge(q, read, *decode(q, read, d_c=16), d_c=16)


@pytest.mark.parametrize(
    "kind, message, call",
    [
        (ValueError, "d_c: expected at least 8",
         lambda c, s: PagedLatentCache(2, 16, 7, 4)),
        (ValueError, "d_r: expected at most 128",
         lambda c, s: PagedLatentCache(2, 16, 16, 129)),
        (ValueError, "page_size: expected pages of",
         lambda c, s: PagedLatentCache(2, 8, 16, 4)),
        (TypeError, "dtype: expected",
         lambda c, s: PagedLatentCache(2, 16, 16, 4, dtype=1)),
        (ValueError, r"c: expected \[T, d_c\] = \[3, 16\]",
         lambda c, s: c.append(s, *latents(3, d_c=17))),
        (ValueError, r"r: expected \[T, d_r\] = \[3, 5\]",
         lambda c, s: c.append(s, latents(3)[0], latents(4)[1])),
        (TypeError, "r: expected dtype",
         lambda c, s: c.append(s, latents(3)[0], latents(3)[1].half())),
        (ValueError, "start: expected at most 0",
         lambda c, s: c.write(s, 1, *latents(3))),
        (ValueError, "sequence: expected the name",
         lambda c, s: c.append(9, *latents(3))),
    ],
)  # fmt: skip
def test_a_cache_names_a_wrong_argument(kind, message, call):
    cache = PagedLatentCache(6, 16, 16, 5, device=DEVICE)
    sequence = cache.new()
    with pytest.raises(kind, match=f"^{message}"):
        call(cache, sequence)
    assert cache.length(sequence) == 0 and cache.statistics().free == 6


# -- the layer

SMALL = {"d_c": 32, "d_n": 16, "d_r": 8, "d_v": 24}


def layer(dtype=torch.float32, **options):
    """A layer of width 40 with 3 heads, whose weights depend on the sizes alone."""
    torch.manual_seed(0)
    return flashlib.LatentAttention(40, 3, **SMALL | options, dtype=dtype).to(DEVICE)


def tokens(T, B=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, T, 40, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize(
    "options", [{}, {"d_q": 20, "scale": -0.2, "rotary_base": 50.0}]
)
def test_a_layer_is_the_reference(options):
    made, x = layer(**options), tokens(9)
    assert near(made(x), latent_layer(made, x), x.dtype)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = made(x)
    assert y.dtype == torch.bfloat16 and near(y, latent_layer(made, x), y.dtype)


def test_a_layer_with_odd_widths():
    made = flashlib.LatentAttention(40, 3, d_c=33, d_n=17, d_r=8, d_v=24)
    made, x = made.to(DEVICE), tokens(9)
    assert near(made(x), latent_layer(made, x), x.dtype)


def test_norms_under_autocast_have_the_dtype_of_the_cache(monkeypatch):
    """Autocast makes them float32 on a GPU."""
    norm = torch.nn.functional.rms_norm
    monkeypatch.setattr(
        torch.nn.functional, "rms_norm", lambda *x: norm(*x).to(torch.float32)
    )
    made, x = layer(torch.bfloat16), tokens(9, dtype=torch.bfloat16)
    cache = PagedLatentCache(9, 16, 32, 8, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        assert made(x, cache, [cache.new() for _ in x]).dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"d_q": 20}])
def test_a_prompt_in_pieces_is_the_prompt_by_either_way(options, monkeypatch):
    """The pieces of one sequence are expanded and those of the other absorbed."""
    made, x = layer(**options), tokens(60)
    cache = PagedLatentCache(9, 16, 32, 8, device=DEVICE)
    names = [cache.new(), cache.new()]
    taken = []
    for way in ("_expanded", "_absorbed"):
        call = getattr(made, way)

        def noted(q, *rest, way=way, call=call):
            taken.append((way, len(q), q.shape[2]))
            return call(q, *rest)

        monkeypatch.setattr(made, way, noted)
    with torch.no_grad():
        wanted = latent_layer(made, x)
        first = made(x[:1, :40], cache, names[:1])
        both = torch.stack([x[0, 40:60], x[1, :20]])
        second = made(both, cache, names)
        third = made(x[1:, 20:21], cache, names[1:])
    assert near(torch.cat([first[0], second[0]]), wanted[0], x.dtype)
    assert near(torch.cat([second[1], third[0]]), wanted[1, :21], x.dtype)
    assert taken == [
        ("_expanded", 1, 40), ("_absorbed", 1, 20), ("_expanded", 1, 20),
        ("_absorbed", 1, 1),
    ]  # fmt: skip
    assert [cache.length(name) for name in names] == [60, 21]


def test_a_layer_appends_to_all_sequences_or_to_none():
    made, cache = layer(), PagedLatentCache(3, 16, 32, 8, device=DEVICE)
    names = [cache.new(), cache.new()]
    with torch.no_grad():
        made(tokens(16), cache, names)
        with pytest.raises(OutOfPages, match="asked for 2 pages, 1 are free"):
            made(tokens(1), cache, names)
    assert [cache.length(name) for name in names] == [16, 16]


def test_a_layer_says_what_made_it():
    said = "40, 3, d_c=32, d_n=16, d_r=8, d_v=24, d_q=None, scale=0.5, "
    assert repr(layer(scale=0.5)) == f"LatentAttention({said}rotary_base=10000.0)"


@pytest.mark.parametrize(
    "kind, message, call",
    [
        (ValueError, "d_c: expected at most 512", lambda c, s: layer(d_c=600)),
        (ValueError, "d_r: expected an even number", lambda c, s: layer(d_r=7)),
        (ValueError, r"d_n \+ d_r: expected a head dim", lambda c, s: layer(d_n=250)),
        (TypeError, "d_q: expected an integer", lambda c, s: layer(d_q=1.0)),
        (TypeError, "rotary_base: expected", lambda c, s: layer(rotary_base="1")),
        (ValueError, "rotary_base: expected", lambda c, s: layer(rotary_base=-1.0)),
        (ValueError, r"x: expected \[B, T, 40\]",
         lambda c, s: layer()(torch.zeros(2, 40, device=DEVICE))),
        (TypeError, "cache: expected a PagedLatentCache",
         lambda c, s: layer()(tokens(3), 7, s)),
        (TypeError, "cache: expected dtype torch.float16",
         lambda c, s: layer(torch.float16)(tokens(3, dtype=torch.float16), c, s)),
        (ValueError, "cache: expected d_c and d_r = 32 and 10",
         lambda c, s: layer(d_r=10)(tokens(3), c, s)),
        (ValueError, "sequences: expected a list of 2",
         lambda c, s: layer()(tokens(3), c, s[:1])),
        (ValueError, "sequences: expected different ones",
         lambda c, s: layer()(tokens(3), c, [s[0], s[0]])),
        (ValueError, "sequence: expected the name",
         lambda c, s: layer()(tokens(3), c, [5, 6])),
        (TypeError, "sequence: expected a name that can be hashed, got list",
         lambda c, s: layer()(tokens(3), c, [s[0], [1]])),
        (ValueError, r"sequences: expected None without a cache, got \[0, 1\]",
         lambda c, s: layer()(tokens(3), sequences=s)),
    ],
)  # fmt: skip
def test_a_layer_names_a_wrong_argument(kind, message, call):
    cache = PagedLatentCache(4, 16, 32, 8, device=DEVICE)
    with torch.no_grad(), pytest.raises(kind, match=f"^{message}"):
        call(cache, [cache.new(), cache.new()])


def test_a_layer_with_a_cache_has_no_gradient():
    cache = PagedLatentCache(4, 16, 32, 8, device=DEVICE)
    names = [cache.new(), cache.new()]
    said = r"^flashlib\.LatentAttention: with a cache it has no gradient"
    with pytest.raises(NotImplementedError, match=said):
        layer()(tokens(3), cache, names)
    assert cache.length(names[0]) == 0


# -- in eight bits


def eight(rows, d_c):
    """Rows ``[..., d_c + d_r]`` in E4M3, scales ``[..., 2]``, and the numbers that they
    stand for.
    """
    parts = [in_eight_bits(x) for x in rows.split((d_c, rows.shape[-1] - d_c), -1)]
    numbers = torch.cat([x for x, _ in parts], dim=-1)
    whole = torch.cat([x.float() * s[..., None] for x, s in parts], dim=-1)
    return numbers, torch.stack([s for _, s in parts], dim=-1), whole


EIGHT = {
    "contiguous": {"lengths": (203, 5)},
    "pages": {"lengths": (70, 0, 64), "page": 16, "T_q": 3, "H": 3},
    "in parts": {"lengths": (130, 300), "page": 256, "H": 16},
    "bfloat16": {"lengths": (5, 113), "page": 64, "dtype": torch.bfloat16},
    "wide": {"lengths": (100, 70), "page": 32, "d_c": 512, "d_r": 64, "H": 20},
    "odd pairs": {"lengths": (33,), "d_c": 90, "d_r": 2},
    "large scores": {"lengths": (203, 5), "magnitude": 30.0},
}


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("name", EIGHT)
def test_eight_bits_are_read_within_the_budget(name):
    """Also where latents are a thousand times as large as rotary columns, or small."""
    case = {"dtype": torch.float16, **EIGHT[name]}
    d_c, splits = case.get("d_c", 24), 3 if name == "in parts" else 1
    for size_c, size_r in ((1.0, 1.0), (30.0, 0.03), (0.03, 30.0)):
        q, cache = make(**case)
        rows = cache.rows.float()
        rows = torch.cat([rows[..., :d_c] * size_c, rows[..., d_c:] * size_r], -1)
        numbers, scales, whole = eight(rows, d_c)
        found = flashlib.decode_latent(
            q, numbers, d_c=d_c, scale=0.02, seq_lens=cache.seq_lens,
            block_table=cache.block_table, scales=scales, splits=splits,
            return_lse=True,
        )  # fmt: skip
        judge(q, cache._replace(rows=whole), *found, d_c, 0.02)


def test_the_error_of_eight_bits_is_the_one_to_expect():
    """Against latents that were not rounded, by the derivation of the chapter."""
    q, cache = make((256,), H=16, d_c=64, d_r=16, dtype=torch.float16)
    rows = cache.rows[:, None].double()
    numbers, scales, _ = eight(cache.rows, 64)
    o, lse = flashlib.decode_latent(
        q, numbers, d_c=64, scale=0.1, seq_lens=cache.seq_lens, scales=scales,
        return_lse=True,
    )  # fmt: skip
    wanted = standard.attention(
        q.double(), rows, rows[..., :64], causal=True, scale=0.1
    )
    expected = eight_bit_reference.latent_deviation(q.double(), rows, 64, scale=0.1)
    for found, exact, deviation in zip((o, lse), wanted, expected, strict=True):
        error = (found - exact).square().mean()
        assert 0.85 < (error / deviation.square().mean()).sqrt() < 1.15


def eight_bit_cache(pages=12, **options):
    return PagedLatentCache(pages, 16, 16, 6, dtype=torch.float8_e4m3fn, **options)


def test_a_cache_in_eight_bits_holds_and_copies_scales():
    cache = eight_bit_cache(device=DEVICE)
    first, (c, r) = cache.new(), latents(40, d_r=6)
    for start, stop in ((0, 7), (7, 17), (17, 40)):
        cache.append(first, c[start:stop].half(), r[start:stop].half())
    _, scales, whole = eight(torch.cat([c, r], dim=1), 16)
    assert same(cache.rows(first), whole.split((16, 6), 1))
    second = cache.fork(first)
    cache.append(second, *(-x for x in latents(1, d_r=6)))
    cache.write(first, 3, *latents(2, d_r=6))
    assert same([x[:40] for x in cache.rows(second)], whole.split((16, 6), 1))
    held = cache.scales[list(cache.table(second))].flatten(0, 1)[:40]
    assert torch.equal(held, scales)
    assert PagedLatentCache(2, 16, 16, 5, device=DEVICE).scales is None


@pytest.mark.usefixtures("nan_filled")
def test_decoding_reads_a_cache_in_eight_bits():
    cache, sequences = eight_bit_cache(device=DEVICE), []
    for T in (40, 0, 17):
        sequences.append(cache.new())
        cache.append(sequences[-1], *(x.sin() for x in latents(T, d_r=6)))
    q, _, _ = testing.make_qkv(3, 6, 1, 22, dtype=torch.float16, device=DEVICE)
    table, lengths = cache.batch(sequences)
    o, lse = flashlib.decode_latent(
        q, cache.pages, d_c=16, scale=0.2, seq_lens=lengths, block_table=table,
        scales=cache.scales, return_lse=True,
    )  # fmt: skip
    for b, sequence in enumerate(sequences):
        c, r = cache.rows(sequence)
        one, rows = slice(b, b + 1), torch.cat([c, r], dim=1)[None, None]
        testing.assert_within_budget(
            q[one], rows, rows[..., :16], o[one], lse[one], scale=0.2
        )


@pytest.mark.gpu
def test_250_runs_of_eight_bits_agree_in_every_bit():
    q, cache = make((203, 70), 16, 3, 512, 64, page=64, dtype=torch.bfloat16)
    numbers, scales, _ = eight(cache.rows.float(), 512)
    read = {"seq_lens": cache.seq_lens, "block_table": cache.block_table, "splits": 3}

    def run():
        return flashlib.decode_latent(
            q, numbers, d_c=512, scale=0.05, scales=scales, return_lse=True, **read
        )

    first = run()
    assert all(same(run(), first) for _ in range(250))


@pytest.mark.parametrize(
    "kind, message, changes",
    [
        (TypeError, "scales: expected a tensor with a cache in torch.float8_e4m3fn",
         {"scales": None}),
        (ValueError, r"scales: expected one for each row, \[2, 70, 2\]",
         {"scales": torch.zeros(2, 70, device=DEVICE)}),
        (TypeError, "scales: expected dtype torch.float32",
         {"scales": torch.zeros(2, 70, 2, device=DEVICE).half()}),
        (TypeError, "scales: expected None with a cache in torch.float16",
         {"cache": torch.zeros(2, 70, 32, device=DEVICE).half()}),
        (TypeError, "q: expected torch.float16 or torch.bfloat16 with a cache in",
         {"q": torch.zeros(2, 4, 1, 32, device=DEVICE)}),
        (ValueError, "d_c: expected an even number with torch.float8_e4m3fn, got 25",
         {"d_c": 25}),
        (ValueError, "cache: expected contiguous columns and even strides with",
         {"cache": torch.zeros(2, 70, 33, device=DEVICE)
          .to(torch.float8_e4m3fn)[..., :32]}),
    ],
)  # fmt: skip
def test_a_wrong_argument_of_eight_bits_is_named(kind, message, changes):
    q, cache = make((70, 5), dtype=torch.float16)
    numbers, scales, _ = eight(cache.rows.float(), 24)
    right = {"q": q, "cache": numbers, "seq_lens": cache.seq_lens, "scales": scales}
    right |= {"d_c": 24, "scale": 0.2}
    with pytest.raises(kind, match=f"^{message}"):
        flashlib.decode_latent(**right | changes)


def test_torch_compile_and_the_operator_of_eight_bits():
    q, cache = make((70, 5), dtype=torch.float16)
    numbers, scales, _ = eight(cache.rows.float(), 24)
    right = {"q": q, "cache": numbers, "seq_lens": cache.seq_lens, "scales": scales}
    right |= {"d_c": 24, "scale": 0.2}
    compiled = torch.compile(
        flashlib.decode_latent, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(**right), flashlib.decode_latent(**right))


def test_pools_of_eight_bits_have_whole_pairs_and_take_rows_of_other_dtypes():
    for widths, name in (((17, 6), "d_c"), ((16, 5), "d_r")):
        with pytest.raises(ValueError, match=f"^{name}: expected an even number"):
            PagedLatentCache(2, 16, *widths, dtype=torch.float8_e4m3fn)
    cache = eight_bit_cache(device=DEVICE)
    sequence, (c, r) = cache.new(), latents(3, d_r=6)
    with pytest.raises(TypeError, match=r"^c: expected dtype float32, float16 or"):
        cache.append(sequence, c.to(torch.float8_e4m3fn), r)
    with pytest.raises(TypeError, match=r"^r: expected dtype torch.float32"):
        cache.append(sequence, c, r.half())
    assert cache.length(sequence) == 0


def test_a_layer_reads_latents_in_eight_bits(monkeypatch):
    """By either way; the prompt of a sequence was expanded."""
    made, x = layer(torch.float16), tokens(24, dtype=torch.float16)
    wanted = latent_layer(made, x).double()
    for absorbed in (True, False):
        monkeypatch.setattr(model, "absorbs", lambda *_, **__: absorbed)  # noqa: B023
        cache = PagedLatentCache(
            8, 16, SMALL["d_c"], SMALL["d_r"], dtype=torch.float8_e4m3fn, device=DEVICE
        )
        names = [cache.new(), cache.new()]
        with torch.no_grad():
            found = [made(x[:, :20], cache, names), made(x[:, 20:], cache, names)]
        error = (torch.cat(found, dim=1).double() - wanted).square().mean().sqrt()
        assert 1e-4 < error / wanted.square().mean().sqrt() < 0.1
    with pytest.raises(TypeError, match=r"^cache: expected dtype torch.float32"):
        layer().requires_grad_(False)(tokens(3), cache, names)
