"""FlashSelfAttention against autograd on the reference."""

import functools
import math

import pytest
import torch
from device import CUDA, DEVICE, each_backend
from expected import refused, same, with_id

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


def by_autograd(made, x, dy, dtype):
    """{name: one of RESULTS}, by autograd of the reference in a dtype."""
    leaves = [z.detach().to(dtype).requires_grad_() for z in (x, *weights_of(made))]
    heads = made.num_heads, made.num_kv_heads
    options = {"causal": made.causal, "scale": made.scale}
    weights = reference.Weights(*leaves[1:])
    y, _ = reference.layer(leaves[0], weights, *heads, **options)
    gradients = torch.autograd.grad(y, leaves, dy.to(dtype))
    return dict(zip(RESULTS, (y.detach(), *gradients), strict=True))


def assert_within_budget(made, x, dy, **found):
    """Judge each of the RESULTS that is given, as a whole, by PyTorch's own error."""
    exact, plain = (
        by_autograd(made, x, dy, dtype) for dtype in (torch.double, x.dtype)
    )
    for name, z in found.items():
        assert z.dtype == x.dtype and z.shape == exact[name].shape
        error, other = (
            testing.rms((y - exact[name]).flatten()) for y in (z, plain[name])
        )
        floor = torch.finfo(x.dtype).eps * testing.rms(exact[name].flatten())
        floor += testing.EPS  # of terms of about one that cancel
        assert error <= testing.GRADIENT_FACTOR * other + floor, name


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
        (4, 2, 1, 5, {"method": "standard", "scale": -0.3}),
        (4, 2, 2, 9, {"method": "flash1", "causal": True}),
    ],
    ids=str,
)
def test_output_and_all_gradients(dtype, H, H_kv, B, T, options):
    made = layer(H, H_kv, dtype=dtype, **options)
    x, dy = problem(B, T, 16 * H, dtype)
    assert_within_budget(made, x, dy, **run(made, x, dy))


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "strided": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "columns first": lambda x: x.mT.contiguous().mT,
}


def test_the_output_may_be_changed_in_place():
    x = torch.randn(1, 5, 32, device=DEVICE)
    made = flashlib.FlashSelfAttention(32, 2, device=DEVICE)
    wanted = torch.autograd.grad((made(x) * 2).relu().sum(), made.w_o)[0]
    y = made(x).mul_(2).relu_()
    assert torch.equal(torch.autograd.grad(y.sum(), made.w_o)[0], wanted)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_several_results_at_once():
    made = flashlib.FlashSelfAttention(32, 2, device=DEVICE)
    x = torch.randn(1, 5, 32, device=DEVICE, requires_grad=True)
    leaves, several = (x, *made.parameters()), torch.randn(2, 1, 5, 32, device=DEVICE)
    grad = functools.partial(torch.autograd.grad, made(x), leaves, retain_graph=True)
    found = grad(several, is_grads_batched=True)
    for n in range(2):
        torch.testing.assert_close([x[n] for x in found], list(grad(several[n])))
    with refused(NotImplementedError, r"flashlib\.FlashSelfAttention: torch\.func is"):
        torch.func.grad(lambda x: made(x).sum())(x.detach())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_strides(layout):
    made, (x, dy) = layer(causal=True), problem(2, 5)
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


@each_backend
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
    assert "num_kv_heads=2, causal=False, scale=0.125, method='auto'" in repr(made)
    twin = flashlib.FlashSelfAttention(64, 4, dtype=torch.float16, device=DEVICE)
    assert {w.dtype for w in twin.parameters()} == {torch.float16}
    assert twin.w_k.shape == (64, 64)


# -- what is refused

WRONG_LAYERS = [
    (TypeError, "embed_dim: expected an integer, got float", (64.0, 4), {}),
    (TypeError, "num_heads: expected an integer, got bool", (64, True), {}),
    (ValueError, "num_heads: expected at least 1, got 0", (64, 0), {}),
    (ValueError, "num_kv_heads: expected at least 1, got 0", (64, 4),
     {"num_kv_heads": 0}),
    (ValueError, "num_heads: expected a divisor of embed_dim = 64, got 3", (64, 3), {}),
    (ValueError, "num_kv_heads: expected a divisor of num_heads = 4, got 3",
     (64, 4), {"num_kv_heads": 3}),
    (ValueError, "embed_dim / num_heads: expected a head dimension from 16 to 256, "
     "got 8", (64, 8), {}),
    (TypeError, "causal: expected True or False, got 1", (64, 4), {"causal": 1}),
    (TypeError, "scale: expected a real number or None, got str", (64, 4),
     {"scale": "no"}),
    (ValueError, "method: expected one of .*got 'flash9'", (64, 4),
     {"method": "flash9"}),
    (TypeError, "dtype: expected dtype float32, .* got torch.float64",
     (64, 4), {"dtype": torch.float64}),
]  # fmt: skip


@pytest.mark.parametrize("error, message, sizes, options", with_id(WRONG_LAYERS))
def test_wrong_layers(error, message, sizes, options):
    with refused(error, message):
        flashlib.FlashSelfAttention(*sizes, **options)


WRONG_INPUTS = [
    (TypeError, "x: expected a torch.Tensor, got list", lambda x: [1.0]),
    (TypeError, "x: expected a dense .*got layout torch.sparse_coo",
     lambda x: x.to_sparse()),
    (ValueError, r"x: expected \[B, T, 64\], got \[5, 64\]", lambda x: x[0]),
    (ValueError, r"x: expected \[B, T, 64\], got \[1, 5, 32\]", lambda x: x[..., :32]),
    (TypeError, "x: expected dtype torch.float32, got torch.float16",
     lambda x: x.half()),
    (ValueError, "x: expected the device of the weights, .*got meta",
     lambda x: x.to("meta")),
]  # fmt: skip


@pytest.mark.parametrize("error, message, change", with_id(WRONG_INPUTS))
def test_wrong_inputs(error, message, change):
    made, (x, _) = layer(), problem(1, 5)
    with refused(error, message):
        made(change(x.detach()))
    with refused(TypeError, "x: expected dtype float32, .* got torch.float64"):
        made.double()(x.double())
