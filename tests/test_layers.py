"""FlashSelfAttention against autograd on the reference."""

import math
from importlib import resources

import pytest
import torch
from cases import CUDA, DEVICE, refused, same, with_id

import flashlib
from flashlib import testing
from flashlib.reference import projections as reference

pytestmark = pytest.mark.usefixtures("nan_filled")

WEIGHTS = ("w_q", "w_k", "w_v", "w_o")
RESULTS = ("y", "dx", "dw_q", "dw_k", "dw_v", "dw_o")
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALVES) if CUDA else (torch.float32, torch.float16)


def layer(H=4, H_kv=2, d=16, seed=0, dtype=torch.float32, **options):
    """A layer whose weights depend on sizes and seed alone."""
    options |= {"num_kv_heads": H_kv, "device": DEVICE, "dtype": dtype}
    made = flashlib.FlashSelfAttention(H * d, H, **options)
    generator = torch.Generator().manual_seed(seed)
    bound = 1.0 / math.sqrt(H * d)
    with torch.no_grad():
        for w in made.parameters():
            w.copy_(bound * (2.0 * torch.rand(w.shape, generator=generator) - 1.0))
    return made


def problem(B=2, T=9, E=64, dtype=torch.float32):
    """x, which wants a gradient, and dy ``[B, T, E]``."""
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, B, T, E, generator=generator).to(DEVICE, dtype)
    return x.clone().requires_grad_(), dy


def weights_of(made):
    return [getattr(made, name) for name in WEIGHTS]


# -- the judge


def evaluate(x, weights, dy, H, H_kv, causal, scale, generator=None):
    """``(y, dx, dw_q, dw_k, dw_v, dw_o)`` as PyTorch computes the formulas in the dtype
    of x, its softmax in float32.

    A generator makes another draw of the rounding errors: the one of
    :mod:`flashlib.testing` between the projections, and other orders of summation in
    them.
    """

    def order(n):
        if generator is None:
            return slice(None)
        return torch.randperm(n, generator=generator).to(x.device)

    def product(a, b):
        """a @ b, added up in another order."""
        inner = order(a.shape[-1])
        return a[..., inner] @ b[..., inner, :]

    def rows(z):
        return reference.join_heads(z).flatten(end_dim=1)

    w_q, w_k, w_v, w_o = (w.detach() for w in weights)
    x, dy, (B, T, E) = x.detach(), dy.detach(), x.shape
    q, k, v = (
        reference.split_heads(product(x, w), heads)
        for w, heads in ((w_q, H), (w_k, H_kv), (w_v, H_kv))
    )
    options = {"causal": causal, "scale": scale}
    o, _ = testing.pytorch(q, k, v, generator=generator, **options)
    o = o.to(x.dtype)
    y = product(reference.join_heads(o), w_o)
    do = reference.split_heads(product(dy, w_o.mT), H)
    if generator is not None and T:
        _, lse = testing.oracle(q, k, v, **options)
        terms = testing.terms_of_lse(q, k, lse, **options)
        options["lse_error"] = (torch.finfo(torch.float32).eps * terms).float()
    gradients = testing.pytorch_gradients(q, k, v, do, generator=generator, **options)
    gradients = [rows(z.to(x.dtype)) for z in gradients]
    dx = sum(
        product(dz, w.mT) for dz, w in zip(gradients, (w_q, w_k, w_v), strict=True)
    ).view(B, T, E)
    dw = [product(x.reshape(B * T, E).mT, dz) for dz in gradients]
    return y, dx, *dw, product(rows(o).mT, dy.reshape(B * T, E))


def assert_within_budget(made, x, dy, **found):
    """Judge the RESULTS that are given, row by row, by PyTorch's own error."""
    weights = [w.detach().to(x.dtype) for w in weights_of(made)]
    wide = [z.detach().double().requires_grad_() for z in (x, *weights)]
    heads = made.num_heads, made.num_kv_heads
    options = {"causal": made.causal, "scale": made.scale}
    y64, _ = reference.layer(wide[0], reference.Weights(*wide[1:]), *heads, **options)
    wanted = [y64.detach(), *torch.autograd.grad(y64, wide, dy.double())]
    judged = []
    for name, exact in zip(RESULTS, wanted, strict=True):
        factor = testing.OUTPUT_FACTOR if name == "y" else testing.GRADIENT_FACTOR
        z = found.get(name)
        known = z is not None
        judged.append(
            testing.Judged(name, z, exact, x.dtype, factor) if known else None
        )
    assert any(judged)

    def draw(generator):
        return evaluate(x, weights, dy, *heads, **options, generator=generator)

    testing.judge(judged, draw)


def run(made, x, dy):
    """Output and all gradients by name."""
    y = made(x)
    gradients = torch.autograd.grad(y, [x, *weights_of(made)], dy)
    return dict(zip(RESULTS, (y.detach(), *gradients), strict=True))


# -- what the layer computes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "H, H_kv, B, T, options",
    [
        (3, 3, 2, 19, {}),
        (4, 2, 2, 19, {"causal": True}),
        (4, 1, 2, 1, {"causal": True}),
        (4, 2, 1, 70, {"causal": True}),
        (4, 2, 2, 9, {"method": "standard", "scale": -0.3}),
        (4, 2, 2, 9, {"method": "flash1", "causal": True}),
    ],
    ids=str,
)
def test_output_and_all_gradients(dtype, H, H_kv, B, T, options):
    made = layer(H, H_kv, dtype=dtype, **options)
    x, dy = problem(B, T, 16 * H, dtype)
    assert_within_budget(made, x, dy, **run(made, x, dy))


def test_the_budget_can_fail(monkeypatch):
    """A layer that is wrong in one way each, and the tensor that says so."""
    made, (x, dy) = layer(causal=True), problem()
    right = run(made, x, dy)
    monkeypatch.setattr(testing, "DRAWS", 4)  # none of these is near its budget
    mistakes = {
        "dx": right["dx"] - dy @ made.w_o.mT @ made.w_q.mT * 1e-3,
        "dw_q": 4.0 * right["dw_q"],  # the scale forgotten
        "dw_k": right["dw_k"] * torch.linspace(1, 1.01, 32, device=DEVICE),
        "dw_o": right["dw_o"].flip(0),
    }
    for name, wrong in mistakes.items():
        with pytest.raises(AssertionError, match=rf"^{name}\[.*over the budget"):
            assert_within_budget(made, x, dy, **{name: wrong.detach()})


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "strided": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "columns first": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_strides(layout):
    made, (x, dy) = layer(causal=True), problem(3, 7)
    x, dy = layout(x.detach()).requires_grad_(), layout(dy)
    assert not x.is_contiguous()
    assert_within_budget(made, x, dy, **run(made, x, dy))


@pytest.mark.parametrize("wanted", [("x",), ("w_k",), ("x", "w_q", "w_v"), WEIGHTS])
def test_gradients_of_some(wanted):
    """From an expanded output gradient."""
    made, (x, _) = layer(causal=True), problem(1, 5)
    leaves = {"x": x, **dict(zip(WEIGHTS, weights_of(made), strict=True))}
    for name, z in leaves.items():
        z.requires_grad_(name in wanted)
    made(x).sum().backward()
    assert {name for name, z in leaves.items() if z.grad is not None} == set(wanted)
    found = {f"d{name}": leaves[name].grad for name in wanted}
    assert_within_budget(made, x, torch.ones_like(x), **found)


@pytest.mark.parametrize("B, T", [(0, 5), (2, 0)])
def test_empty(B, T):
    made, (x, _) = layer(causal=True), problem(B, T)
    y = made(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (B, T, 64)
    assert all((w.grad == 0).all() for w in weights_of(made))


def test_heads_are_views_and_nothing_is_kept_twice():
    """The backward pass keeps x, Q, K, V, O and the weights, each in one piece of
    memory: K and V without copies for their groups, and nothing T x T.
    """
    made, (x, _), pieces = layer(H=4, H_kv=1), problem(T=40), {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        pieces[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made(x)
    weights, rows = [w.numel() for w in weights_of(made)], 2 * 40
    # A method that needs L for its backward keeps it.
    kept = [n for n in pieces.values() if n != rows * 4]
    assert sorted(kept) == sorted([*weights, *(rows * n for n in (64, 64, 64, 16, 16))])


# -- PyTorch around it


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("wants_dx", [True, False])
def test_torch_compile_without_a_graph_break(backend, wants_dx):
    torch.compiler.reset()
    made, (x, dy) = layer(causal=True), problem(T=19)
    x.requires_grad_(wants_dx)
    leaves = [*([x] if wants_dx else []), *weights_of(made)]
    y = torch.compile(made, fullgraph=True, backend=backend)(x)
    gradients = torch.autograd.grad(y, leaves, dy)
    names = RESULTS[1 if wants_dx else 2 :]
    found = dict(zip(names, gradients, strict=True))
    assert_within_budget(made, x, dy, y=y.detach(), **found)
    if backend != "inductor":
        assert same(gradients, torch.autograd.grad(made(x), leaves, dy))


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_is_honored(dtype):
    made, (x, dy) = layer(causal=True), problem()
    with torch.autocast(DEVICE, dtype=dtype):
        y = made(x)
    assert y.dtype == dtype
    gradients = torch.autograd.grad(y, [x, *weights_of(made)], dy.to(dtype))
    assert all(g.dtype == torch.float32 for g in gradients)
    results = (y.detach(), *(g.to(dtype) for g in gradients))
    found = dict(zip(RESULTS, results, strict=True))
    assert_within_budget(made, x.detach().to(dtype), dy.to(dtype), **found)
    with torch.autocast(DEVICE, dtype=dtype, enabled=False):
        assert made(x).dtype == torch.float32


def test_the_state_is_four_weights_and_maps_to_linear_layers():
    made, (x, _) = layer(), problem(T=5)
    sizes = {"w_q": (64, 64), "w_k": (64, 32), "w_v": (64, 32), "w_o": (64, 64)}
    assert {name: w.shape for name, w in made.state_dict().items()} == sizes
    linear = {
        name: torch.nn.Linear(*size, bias=False, device=DEVICE, dtype=torch.float32)
        for name, size in sizes.items()
    }
    made.load_state_dict({name: l.weight.mT for name, l in linear.items()})
    q, k, v = (linear[name](x) for name in WEIGHTS[:3])
    q, k, v = (z.unflatten(-1, (-1, 16)).transpose(1, 2) for z in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    theirs = linear["w_o"](reference.join_heads(o))
    for y in (theirs, made(x)):
        assert_within_budget(made, x, x, y=y.detach())


def test_first_weights():
    torch.manual_seed(0)
    options = {"num_kv_heads": 2, "dtype": torch.float32, "device": DEVICE}
    made = flashlib.FlashSelfAttention(256, 4, **options)
    for w in made.parameters():
        assert w.abs().max() <= 1 / 16 and w.max() > 0.9 / 16 and w.min() < -0.9 / 16
    before = made.w_q.detach().clone()
    made.reset_parameters()
    assert not torch.equal(made.w_q, before)
    assert "num_kv_heads=2, causal=False, method='auto'" in repr(made)
    twin = flashlib.FlashSelfAttention(64, 4, dtype=torch.float16, device=DEVICE)
    assert {w.dtype for w in twin.parameters()} == {torch.float16}
    assert twin.w_k.shape == (64, 64)


def test_double_backward_and_forward_mode_are_refused():
    made, (x, _) = layer(), problem(1, 5)
    (dx,) = torch.autograd.grad(made(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dx.sum().backward()
    forward = pytest.raises(NotImplementedError, match="forward")
    with forward, torch.autograd.forward_ad.dual_level():
        made(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


# -- what is refused

WRONG_LAYERS = [
    (TypeError, "embed_dim: expected an integer, got float", (64.0, 4), {}),
    (TypeError, "num_heads: expected an integer, got bool", (64, True), {}),
    (ValueError, "num_heads: expected at least 1, got 0", (64, 0), {}),
    (ValueError, "num_kv_heads: expected at least 1, got 0", (64, 4), {"num_kv_heads": 0}),
    (ValueError, "num_heads: expected a divisor of embed_dim = 64, got 3", (64, 3), {}),
    (ValueError, "num_kv_heads: expected a divisor of num_heads = 4, got 3",
     (64, 4), {"num_kv_heads": 3}),
    (ValueError, "num_heads: expected a head dimension from 16 to 256, got 8", (64, 8), {}),
    (TypeError, "causal: expected True or False, got 1", (64, 4), {"causal": 1}),
    (TypeError, "scale: expected a real number or None, got str", (64, 4), {"scale": "no"}),
    (ValueError, "method: expected one of .*got 'flash9'", (64, 4), {"method": "flash9"}),
    (TypeError, "dtype: expected dtype float32, .* got torch.float64",
     (64, 4), {"dtype": torch.float64}),
]  # fmt: skip


@pytest.mark.parametrize("error, message, sizes, options", with_id(WRONG_LAYERS))
def test_wrong_layers(error, message, sizes, options):
    with refused(error, message):
        flashlib.FlashSelfAttention(*sizes, **options)


WRONG_INPUTS = [
    (TypeError, "x: expected a torch.Tensor, got list", lambda x: [1.0]),
    (TypeError, "x: expected a dense .*got layout torch.sparse_coo", lambda x: x.to_sparse()),
    (ValueError, r"x: expected \[B, T, 64\], got \[5, 64\]", lambda x: x[0]),
    (ValueError, r"x: expected \[B, T, 64\], got \[1, 5, 32\]", lambda x: x[..., :32]),
    (TypeError, "x: expected dtype torch.float32, got torch.float16", lambda x: x.half()),
    (ValueError, "x: expected the device of the weights, .*got meta", lambda x: x.to("meta")),
]  # fmt: skip


@pytest.mark.parametrize("error, message, change", with_id(WRONG_INPUTS))
def test_wrong_inputs(error, message, change):
    made, (x, _) = layer(), problem(1, 5)
    with refused(error, message):
        made(change(x.detach()))
    with refused(TypeError, "x: expected dtype float32, .* got torch.float64"):
        made.double()(x.double())


def test_the_text_is_plain_and_small_and_says_where_it_is_from():
    folder = resources.files("flashlib") / "data"
    text = (folder / "queries.txt").read_text(encoding="ascii")
    about = (folder / "README.md").read_text(encoding="utf-8")
    assert (
        len(text) < 1_000_000
        and f"{len(text):,} characters" in about
        and "public domain" in about
    )
    assert text.startswith("Query 1. Do not Bodies act upon Light") and "_" not in text
