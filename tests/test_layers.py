"""FlashSelfAttention against autograd on the reference: outputs, gradients of x and of every weight."""

import itertools
import math
from importlib import resources

import pytest
import torch
from cases import CUDA, DEVICE
from torch.utils.checkpoint import checkpoint

import flashlib
from flashlib import testing
from flashlib.reference import projections as reference

pytestmark = pytest.mark.usefixtures("nan_filled")

WEIGHTS = ("w_q", "w_k", "w_v", "w_o")
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if CUDA else (torch.float32, torch.float16)
HEADS = {"multi-head": (3, 3), "grouped": (4, 2), "multi-query": (4, 1)}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_heads = pytest.mark.parametrize("H, H_kv", HEADS.values(), ids=HEADS.keys())
each_mask = pytest.mark.parametrize("causal", [False, True])


def layer(H=4, H_kv=2, d=16, seed=0, **options):
    """A layer whose weights depend on sizes and seed alone."""
    dtype = options.pop("dtype", torch.float32)
    made = flashlib.FlashSelfAttention(H * d, H, num_kv_heads=H_kv, device=DEVICE, dtype=dtype, **options)
    generator = torch.Generator().manual_seed(seed)
    bound = 1.0 / math.sqrt(H * d)
    with torch.no_grad():
        for w in made.parameters():
            w.copy_(bound * (2.0 * torch.rand(w.shape, generator=generator) - 1.0))
    return made


def normal(*shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=DEVICE, dtype=dtype)


# ------------------------------------------------------------------------------------ the budget


def evaluate(x, weights, dy, H, H_kv, causal, scale, generator=None):
    """``(y, dx, dw_q, dw_k, dw_v, dw_o)`` as PyTorch computes the formulas in the dtype of x, its softmax in
    float32.

    A generator makes another draw of the rounding errors: the one of :mod:`flashlib.testing` between the
    projections, and other orders of summation in them.
    """

    def order(n):
        shuffled = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
        return shuffled.to(x.device)

    def product(a, b):
        """a @ b, added up in another order."""
        inner = order(a.shape[-1])
        return a[..., inner] @ b[..., inner, :]

    def rows(z):
        return reference.join_heads(z).flatten(end_dim=1)

    w_q, w_k, w_v, w_o = (w.detach() for w in weights)
    x, dy, (B, T, E) = x.detach(), dy.detach(), x.shape
    q, k, v = (
        reference.split_heads(product(x, w), heads) for w, heads in ((w_q, H), (w_k, H_kv), (w_v, H_kv))
    )
    options = {"causal": causal, "scale": scale}
    o, _ = testing.pytorch(q, k, v, generator=generator, **options)
    o = o.to(x.dtype)
    y = product(reference.join_heads(o), w_o)
    do = reference.split_heads(product(dy, w_o.mT), H)
    if generator is not None and T:
        _, lse = testing.oracle(q, k, v, **options)
        terms = testing._terms_of_lse(q, k, lse, causal, scale)
        signs = 2 * torch.rand(lse.shape, generator=generator) - 1
        options["lse_error"] = (torch.finfo(torch.float32).eps * terms * signs.to(x.device)).float()
    gradients = testing.pytorch_gradients(q, k, v, do, generator=generator, **options)
    gradients = [rows(z.to(x.dtype)) for z in gradients]
    dx = sum(product(dz, w.mT) for dz, w in zip(gradients, (w_q, w_k, w_v), strict=True)).view(B, T, E)
    dw = [product(x.reshape(B * T, E).mT, dz) for dz in gradients]
    return y, dx, *dw, product(rows(o).mT, dy.reshape(B * T, E))


def assert_within_budget(made, x, dy, y=None, **found):
    """Judge y and the gradients dx, dw_q, dw_k, dw_v and dw_o that are given, row by row, as
    :mod:`flashlib.testing` does: what PyTorch is off by is the measure.
    """
    H, H_kv = made.num_heads, made.num_kv_heads
    weights = [getattr(made, name).detach().to(x.dtype) for name in WEIGHTS]
    wide = [z.detach().double().requires_grad_() for z in (x, *weights)]
    options = {"causal": made.causal, "scale": made.scale}
    y64, _ = reference.layer(wide[0], reference.Weights(*wide[1:]), H, H_kv, **options)
    gradients = torch.autograd.grad(y64, wide, dy.double())
    names = ("y", "dx", "dw_q", "dw_k", "dw_v", "dw_o")
    wanted = dict(zip(names, (y64.detach(), *gradients), strict=True))
    judged, given = [], {"y": y, **found}
    for name, z in given.items():
        if z is None:
            continue
        testing._assert_like(name, z, wanted[name], x.dtype)
        testing._assert_finite(name, z, wanted[name])
        error = testing.rms(z.double() - wanted[name])
        floor = torch.finfo(x.dtype).eps * testing.rms(wanted[name])
        factor = testing.OUTPUT_FACTOR if name == "y" else testing.GRADIENT_FACTOR
        judged.append(testing._Judged(name, error, floor, factor, torch.zeros_like(error, dtype=torch.bool)))

    def draw(generator):
        evaluated = evaluate(x, weights, dy, H, H_kv, **options, generator=generator)
        drawn = dict(zip(names, evaluated, strict=True))
        return [testing.rms(drawn[tensor.name].double() - wanted[tensor.name]) for tensor in judged]

    assert judged
    testing._judge(judged, draw)


def run(made, x, dy):
    """Output and all gradients by name; x must want one."""
    y = made(x)
    gradients = torch.autograd.grad(y, [x, *(getattr(made, name) for name in WEIGHTS)], dy)
    return {"y": y.detach()} | dict(zip(("dx", "dw_q", "dw_k", "dw_v", "dw_o"), gradients, strict=True))


# ------------------------------------------------------------------------------------ what it computes


@each_dtype
@each_heads
@each_mask
@pytest.mark.parametrize("T", [1, 19])
def test_output_and_all_gradients(dtype, H, H_kv, causal, T):
    made = layer(H, H_kv, dtype=dtype, causal=causal)
    x, dy = normal(2, T, 16 * H, dtype=dtype).requires_grad_(), normal(2, T, 16 * H, dtype=dtype, seed=2)
    assert_within_budget(made, x, dy, **run(made, x, dy))


@each_dtype
@each_mask
def test_several_blocks_and_a_ragged_one(dtype, causal):
    made = layer(dtype=dtype, causal=causal)
    x, dy = normal(1, 70, 64, dtype=dtype).requires_grad_(), normal(1, 70, 64, dtype=dtype, seed=2)
    assert_within_budget(made, x, dy, **run(made, x, dy))


@pytest.mark.parametrize("method", ["standard", "flash1"])
def test_other_methods(method):
    made = layer(causal=True, method=method, scale=-0.3)
    x, dy = normal(2, 9, 64).requires_grad_(), normal(2, 9, 64, seed=2)
    assert_within_budget(made, x, dy, **run(made, x, dy))


def test_the_budget_can_fail(monkeypatch):
    """A layer that is wrong in one way each, and the tensor that says so."""
    made, x, dy = layer(causal=True), normal(2, 19, 64).requires_grad_(), normal(2, 19, 64, seed=2)
    right = run(made, x, dy)
    monkeypatch.setattr(testing, "DRAWS", 4)  # none of these is near its budget
    mistakes = {
        "dx": right["dx"] - dy @ made.w_o.mT @ made.w_q.mT * 1e-3,
        "dw_q": 4.0 * right["dw_q"],  # the scale forgotten
        "dw_k": right["dw_k"] * torch.linspace(1, 1.01, 32, device=DEVICE),
        "dw_o": right["dw_o"][torch.arange(63, -1, -1, device=DEVICE)],
    }
    for name, wrong in mistakes.items():
        with pytest.raises(AssertionError, match=rf"^{name}\[.*over the budget"):
            assert_within_budget(made, x, dy, **{name: wrong.detach()})


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "strided": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "columns first": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_strides(layout):
    made, dy = layer(causal=True), layout(normal(3, 7, 64, seed=2))
    x = layout(normal(3, 7, 64)).requires_grad_()
    assert not x.is_contiguous()
    assert_within_budget(made, x, dy, **run(made, x, dy))


def test_expanded_output_gradient():
    made, x = layer(), normal(2, 7, 64).requires_grad_()
    made(x).sum().backward()
    dw = {"d" + name: getattr(made, name).grad for name in WEIGHTS}
    assert_within_budget(made, x, torch.ones_like(x), dx=x.grad, **dw)


@pytest.mark.parametrize(
    "wanted", [s for n in (1, 2, 4) for s in itertools.combinations(("x", *WEIGHTS), n)], ids="-".join
)
def test_gradients_of_some(wanted):
    made, x, dy = layer(causal=True), normal(1, 5, 64), normal(1, 5, 64, seed=2)
    leaves = {"x": x, **{name: getattr(made, name) for name in WEIGHTS}}
    for name, z in leaves.items():
        z.requires_grad_(name in wanted)
    made(x).backward(dy)
    assert {name for name, z in leaves.items() if z.grad is not None} == set(wanted)
    assert_within_budget(made, x, dy, **{"d" + name: leaves[name].grad for name in wanted})


def test_nothing_is_recorded_without_gradients():
    made, x = layer(), normal(1, 5, 64)
    assert made(x).requires_grad
    with torch.no_grad():
        assert not made(x).requires_grad
    with torch.inference_mode():
        assert made.eval()(x).is_inference()
    assert_within_budget(made, x, x, y=made.eval()(x).detach())


@pytest.mark.parametrize("B, T", [(0, 5), (2, 0)])
def test_empty(B, T):
    made, x = layer(causal=True), normal(B, T, 64).requires_grad_()
    y = made(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (B, T, 64)
    assert all((getattr(made, name).grad == 0).all() for name in WEIGHTS)


def test_heads_are_views_and_nothing_is_kept_twice():
    """The backward pass keeps x, Q, K, V, O and the weights, each in one piece of memory: K and V without
    copies for their groups, and nothing T x T.
    """
    made, T = layer(H=4, H_kv=1), 40
    x, pieces = normal(2, T, 64).requires_grad_(), {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        pieces[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made(x)
    weights = [getattr(made, name).numel() for name in WEIGHTS]
    rows = 2 * T
    kept = [n for n in pieces.values() if n != rows * 4]  # a method that needs L for its backward keeps it
    assert sorted(kept) == sorted([*weights, *(rows * n for n in (64, 64, 64, 16, 16))])


# ------------------------------------------------------------------------------------ PyTorch around it


needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[needs_cuda, pytest.mark.gpu])]
)
@pytest.mark.parametrize("wants_dx", [True, False])
def test_torch_compile_without_a_graph_break(backend, wants_dx):
    torch.compiler.reset()
    made, x, dy = layer(causal=True), normal(2, 19, 64), normal(2, 19, 64, seed=2)
    compiled = torch.compile(made, fullgraph=True, backend=backend)
    leaves = {name: getattr(made, name) for name in WEIGHTS} | ({"x": x.requires_grad_()} if wants_dx else {})
    y = compiled(x)
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    found = {"d" + name: z for name, z in zip(leaves, gradients, strict=True)}
    assert_within_budget(made, x, dy, y.detach(), **found)
    if backend != "inductor":
        plain = torch.autograd.grad(made(x), list(leaves.values()), dy)
        assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))


def test_gradient_checkpointing():
    made, x, dy = layer(causal=True), normal(1, 9, 64).requires_grad_(), normal(1, 9, 64, seed=2)
    plain = run(made, x, dy)
    again = torch.autograd.grad(checkpoint(made, x, use_reentrant=False), [x, *made.parameters()], dy)
    assert all(torch.equal(a, b) for a, b in zip(list(plain.values())[1:], again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_honoured(dtype):
    made, x, dy = layer(causal=True), normal(2, 9, 64).requires_grad_(), normal(2, 9, 64, seed=2)
    with torch.autocast(DEVICE, dtype=dtype):
        y = made(x)
    assert y.dtype == dtype
    leaves = [x, *(getattr(made, name) for name in WEIGHTS)]
    gradients = torch.autograd.grad(y, leaves, dy.to(dtype))
    assert all(g.dtype == torch.float32 for g in gradients)
    names = ("dx", "dw_q", "dw_k", "dw_v", "dw_o")
    found = {name: g.to(dtype) for name, g in zip(names, gradients, strict=True)}
    assert_within_budget(made, x.detach().to(dtype), dy.to(dtype), y.detach(), **found)
    with torch.autocast(DEVICE, dtype=dtype, enabled=False):
        assert made(x).dtype == torch.float32


def test_the_state_is_four_weights_and_maps_to_linear_layers():
    made, x = layer(), normal(2, 5, 64)
    assert {name: tuple(w.shape) for name, w in made.state_dict().items()} == {
        "w_q": (64, 64), "w_k": (64, 32), "w_v": (64, 32), "w_o": (64, 64),
    }  # fmt: skip
    sizes = {"w_q": (64, 64), "w_k": (64, 32), "w_v": (64, 32), "w_o": (64, 64)}
    linear = {
        name: torch.nn.Linear(*size, bias=False, device=DEVICE, dtype=torch.float32)
        for name, size in sizes.items()
    }
    made.load_state_dict({name: l.weight.mT for name, l in linear.items()})
    q, k, v = (linear[name](x) for name in WEIGHTS[:3])
    q, k, v = (z.unflatten(-1, (-1, 16)).transpose(1, 2) for z in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    y = linear["w_o"](reference.join_heads(o)).detach()
    assert_within_budget(made, x, x, y=y)
    assert_within_budget(made, x, x, y=made(x).detach())
    with pytest.raises(RuntimeError, match="w_q"):
        made.load_state_dict({name: l.weight for name, l in linear.items() if name != "w_q"})


def test_first_weights():
    torch.manual_seed(0)
    made = flashlib.FlashSelfAttention(256, 4, num_kv_heads=2, dtype=torch.float32, device=DEVICE)
    for w in made.parameters():
        assert w.abs().max() <= 1 / 16 and w.max() > 0.9 / 16 and w.min() < -0.9 / 16
    before = made.w_q.detach().clone()
    made.reset_parameters()
    assert not torch.equal(made.w_q, before)
    assert "num_kv_heads=2, causal=False, method='auto'" in repr(made)
    twin = flashlib.FlashSelfAttention(64, 4, dtype=torch.float16, device=DEVICE)
    assert {w.dtype for w in twin.parameters()} == {torch.float16} and twin.w_k.shape == (64, 64)


def test_double_backward_and_forward_mode_are_refused_by_name():
    made, x = layer(), normal(1, 5, 64).requires_grad_()
    (dx,) = torch.autograd.grad(made(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dx.sum().backward()
    with pytest.raises(NotImplementedError, match="forward"), torch.autograd.forward_ad.dual_level():
        made(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


# ------------------------------------------------------------------------------------ what is refused

WRONG_LAYERS = {
    "embed_dim is a float": ((64.0, 4), {}, TypeError, "embed_dim: expected an int, got float"),
    "num_heads is a bool": ((64, True), {}, TypeError, "num_heads: expected an int, got bool"),
    "no heads": ((64, 0), {}, ValueError, "num_heads: expected at least 1, got 0"),
    "no key heads": ((64, 4), {"num_kv_heads": 0}, ValueError, "num_kv_heads: expected at least 1, got 0"),
    "heads do not divide": ((64, 3), {}, ValueError, "num_heads: .*divisor of embed_dim = 64, got 3"),
    "groups do not divide": (
        (64, 4), {"num_kv_heads": 3}, ValueError, "num_kv_heads: expected a divisor of num_heads = 4, got 3",
    ),
    "more key heads": (
        (64, 2), {"num_kv_heads": 4}, ValueError, "num_kv_heads: expected a divisor of num_heads = 2, got 4",
    ),
    "narrow heads": ((64, 8), {}, ValueError, "num_heads: .*embed_dim / num_heads from 16 to 256, got 8"),
    "wide heads": ((512, 1), {}, ValueError, "num_heads: expected embed_dim / num_heads .*got 512"),
    "causal": ((64, 4), {"causal": 1}, TypeError, "causal: expected True or False, got 1"),
    "scale": ((64, 4), {"scale": "no"}, TypeError, "scale: expected a real number or None, got str"),
    "method": ((64, 4), {"method": "flash9"}, ValueError, "method: expected one of .*got 'flash9'"),
    "dtype": ((64, 4), {"dtype": torch.float64}, TypeError, "dtype: expected float32, .* got torch.float64"),
}  # fmt: skip


@pytest.mark.parametrize("sizes, options, error, message", WRONG_LAYERS.values(), ids=WRONG_LAYERS.keys())
def test_wrong_layers(sizes, options, error, message):
    with pytest.raises(error, match=f"^{message}") as caught:
        flashlib.FlashSelfAttention(*sizes, **options)
    assert "\n" not in str(caught.value)


WRONG_INPUTS = {
    "list": (lambda x: [1.0], TypeError, "x: expected a torch.Tensor, got list"),
    "sparse": (lambda x: x.to_sparse(), TypeError, "x: expected a dense .*got layout torch.sparse_coo"),
    "two dimensions": (lambda x: x[0], ValueError, r"x: expected \[B, T, 64\], got \[5, 64\]"),
    "another width": (lambda x: x[..., :32], ValueError, r"x: expected \[B, T, 64\], got \[1, 5, 32\]"),
    "another dtype": (lambda x: x.half(), TypeError, r"x: .*weights \(torch.float32\), got torch.float16"),
    "another device": (lambda x: x.to("meta"), ValueError, "x: expected the device .*got meta"),
}


@pytest.mark.parametrize("change, error, message", WRONG_INPUTS.values(), ids=WRONG_INPUTS.keys())
def test_wrong_inputs(change, error, message):
    made = layer()
    with pytest.raises(error, match=f"^{message}"):
        made(change(normal(1, 5, 64)))


def test_weights_in_float64_are_refused():
    with pytest.raises(TypeError, match=r"^x: expected float32, float16 or bfloat16.*got torch.float64"):
        layer().double()(normal(1, 5, 64).double())


# ------------------------------------------------------------------------------------ the text of the chapter


def test_the_text_is_plain_and_small_and_says_where_it_is_from():
    folder = resources.files("flashlib") / "data"
    text = (folder / "queries.txt").read_text(encoding="ascii")
    about = (folder / "README.md").read_text(encoding="utf-8")
    assert len(text) < 1_000_000 and f"{len(text):,} characters" in about and "public domain" in about
    assert text.startswith("Query 1. Do not Bodies act upon Light") and "_" not in text
