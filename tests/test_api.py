"""The public functions: what they refuse, and PyTorch around them."""

import functools
import math
import re
from importlib.metadata import version

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from cases import EMPTY, check_empty
from device import CUDA, DEVICE, each_backend, other_backward, other_forward
from expected import refused, same, with_id
from packaging.version import Version
from processes import run_python
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import flashlib
from flashlib import ops, plans, score_functions, testing
from flashlib.kernels import (
    backward,
    flash1,
    flash2,
    hopper,
    hopper_backward,
    hopper_host,
    masks,
    masks_backward,
    standard,
)

pytestmark = pytest.mark.usefixtures("nan_filled")

METHODS = ("standard", "flash1", "flash2", "auto")
each_method = pytest.mark.parametrize("method", METHODS)


def inputs(B=1, H=2, T_q=9, d=16, **changes):
    """Small q, k, v on the device under test."""
    return testing.make_qkv(B, H, T_q, d, device=DEVICE, **changes)


def judge_gradients(o, q, k, v, do=None, **options):
    """Gradients by autograd of o within the budget; returns them."""
    do = torch.ones_like(o) if do is None else do
    found = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    testing.assert_gradients_within_budget(q, k, v, do, *found, **options)
    return found


# -- what is refused


def zeros(*shape, **changes):
    return torch.zeros(*shape, **{"device": DEVICE} | changes)


Q = (1, 6, 5, 16)
NOT_BOOL = "expected True or False, got"
NOT_REAL = "scale: expected a real number or None, got"
WRONG = [
    (TypeError, "q: expected a torch.Tensor, got list", {"q": [[1.0]]}),
    (TypeError, "v: expected a torch.Tensor, got ndarray", {"v": np.zeros(Q)}),
    (TypeError, "q: expected dtype float32, .* got torch.float64",
     {"q": zeros(*Q).double()}),
    (TypeError, "k: expected dtype torch.float32, got torch.float16",
     {"k": zeros(*Q).half()}),
    (TypeError, "v: expected a dense .* got layout torch.sparse_coo",
     {"v": zeros(*Q).to_sparse()}),
    (TypeError, "k: expected a dense .* got a nested one",
     {"k": torch._nested_tensor_from_tensor_list([zeros(6, 5, 16), zeros(6, 4, 16)])}),
    (ValueError, "q: expected a tensor on cpu or cuda, got meta",
     {"q": zeros(*Q, device="meta")}),
    (ValueError, "k: expected the device of q, .* got meta",
     {"k": zeros(*Q, device="meta")}),
    (ValueError, r"q: expected 4 dimensions \[B, H, T, d\], got 3: \[6, 5, 16\]",
     {"q": zeros(6, 5, 16)}),
    (ValueError,
     r"v: expected .* of k \[1, 6, 5, 16\] except the last, got \[1, 6, 4, 16\]",
     {"v": zeros(1, 6, 4, 16)}),
    (ValueError, r"k: expected batch size 1 as in q .*, got \[2, 6, 5, 16\]",
     {"k": zeros(2, 6, 5, 16)}),
    (ValueError, r"k: expected head dimension 16 as in q .*, got \[1, 6, 5, 32\]",
     {"k": zeros(1, 6, 5, 32)}),
    (ValueError, "k: expected a head count that divides the 6 of q, got 4",
     {"k": zeros(1, 4, 5, 16), "v": zeros(1, 4, 5, 16)}),
    (ValueError, "k: expected .* divides the 6 of q, got 0",
     {"k": zeros(1, 0, 5, 16), "v": zeros(1, 0, 5, 16)}),
    (ValueError, "q: expected a head dimension from 16 to 256, got 15",
     {"q": zeros(1, 6, 5, 15), "k": zeros(1, 6, 5, 15)}),
    (ValueError, "v: expected a head dimension from 16 to 256, got 257",
     {"v": zeros(1, 6, 5, 257)}),
    (TypeError, f"causal: {NOT_BOOL} 1", {"causal": 1}),
    (TypeError, f"return_lse: {NOT_BOOL} 'no'", {"return_lse": "no"}),
    (TypeError, f"deterministic: {NOT_BOOL} None", {"deterministic": None}),
    (ValueError,
     r"deterministic: expected True under torch\.use_deterministic_algorithms",
     {"deterministic": False}),
    (ValueError, "deterministic: expected True under torch.use_deterministic.*",
     {"deterministic": False, "method": "standard"}),
    (ValueError, "deterministic: expected True under .*, got False, which lets dQ",
     {"deterministic": False, "window": (1, 1)}),
    (TypeError, f"causal: {NOT_BOOL} numpy.bool", {"causal": np.True_}),
    (TypeError, "scale: expected a real number or None, got numpy.bool",
     {"scale": np.True_}),
    (TypeError, "seed: expected an integer, got numpy.int64", {"seed": np.int64(1)}),
    (ValueError, r"seed: expected \[1\], got \[2\]", {"seed": zeros(2).long()}),
    (TypeError, f"tune: {NOT_BOOL} 1", {"tune": 1}),
    (ValueError, "tune: expected False for method 'flash1', .*got True",
     {"tune": True, "method": "flash1"}),
    (ValueError, "softcap: expected None for method 'flash1'",
     {"softcap": 3.0, "method": "flash1"}),
    (ValueError, "scale: expected a finite number, got nan", {"scale": math.nan}),
    (ValueError, "scale: expected a finite number", {"scale": 10**400}),
    (ValueError, r"scale: expected a magnitude up to 1e\+37", {"scale": 1e38}),
    (TypeError, f"{NOT_REAL} str", {"scale": "auto"}),
    (TypeError, f"{NOT_REAL} bool", {"scale": True}),
    (ValueError,
     "method: expected one of auto, standard, flash1, flash2, hopper, got 'flash3'",
     {"method": "flash3"}),
    (TypeError, "method: expected one of .*, got NoneType", {"method": None}),
    (ValueError, "method: 'hopper' expected", {"method": "hopper"}),
]  # fmt: skip


@pytest.mark.parametrize("error, message, changes", with_id(WRONG))
def test_wrong_argument_gets_one_clear_line(error, message, changes):
    arguments = {"q": zeros(*Q), "k": zeros(*Q), "v": zeros(*Q)} | changes
    with refused(error, message):
        flashlib.attention(**arguments)


CHECKED = ("k:", "method:", "deterministic:", "scale: expected a finite number, got")
COMPILED = [row for row in WRONG if row[1].startswith(CHECKED)]


@pytest.mark.parametrize("error, message, changes", with_id(COMPILED))
def test_a_compiled_call_refuses_the_same(error, message, changes):
    torch.compiler.reset()
    arguments = {"q": zeros(*Q), "k": zeros(*Q), "v": zeros(*Q)} | changes
    with refused(error, message):
        torch.compile(flashlib.attention, backend="eager")(**arguments)


def test_options_are_not_positional():
    with pytest.raises(TypeError, match="positional"):
        flashlib.attention(*inputs(), True)


@pytest.mark.skipif(CUDA, reason="on a GPU tiles are timed")
def test_tuning_needs_a_gpu():
    with refused(ValueError, "tune: expected False in Triton's interpreter"):
        flashlib.attention(*inputs(), tune=True)


CALLS = [{"method": method} for method in METHODS] + [{"window": (1, 1)}]


@pytest.mark.parametrize("options", CALLS, ids=str)
def test_a_checkpoint_of_the_log_sum_exp_alone(options):
    leaves = inputs(requires_grad=True)

    def lse(*x):
        return flashlib.attention(*x, **options, return_lse=True)[1]

    checkpoint = torch.utils.checkpoint.checkpoint
    kept = [lse(*leaves), checkpoint(lse, *leaves, use_reentrant=False)]
    assert same(*(torch.autograd.grad(x.sum(), leaves) for x in kept))


@pytest.mark.parametrize("options", CALLS, ids=str)
def test_what_autograd_cannot_do_is_refused(options):
    q, k, v = inputs(requires_grad=True)

    def call(*x):
        return flashlib.attention(*x, **options)

    (dq,) = torch.autograd.grad(call(q, k, v).sum(), q, create_graph=True)
    with refused(NotImplementedError, r"flashlib\.attention: double backward"):
        dq.sum().backward()
    q, k, v = inputs()
    forward_mode = r"flashlib: forward-mode"
    with (
        refused(NotImplementedError, forward_mode),
        torch.autograd.forward_ad.dual_level(),
    ):
        call(q, torch.autograd.forward_ad.make_dual(k, torch.ones_like(k)), v)
    with refused(NotImplementedError, forward_mode):
        torch.func.jvp(lambda x: call(x, k, v), (q,), (torch.ones_like(q),))
    transforms = r"flashlib\.attention: torch.func is not supported"
    stacks = [torch.stack([x, x]) for x in (q, k, v)]
    torch.compiler.reset()
    for batched in (torch.func.vmap(call), torch.compile(torch.func.vmap(call))):
        with refused(NotImplementedError, transforms):
            batched(*stacks)
    for differentiate in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        with refused(NotImplementedError, transforms):
            differentiate(lambda x: call(x, k, v).sum())(q)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("options", CALLS, ids=str)
def test_gradients_of_several_results_at_once(options):
    leaves = inputs(requires_grad=True)
    results = flashlib.attention(*leaves, **options, return_lse=True)
    several = [torch.randn(2, *x.shape, device=DEVICE) for x in results]
    grad = functools.partial(torch.autograd.grad, results, leaves, retain_graph=True)
    found = grad(several, is_grads_batched=True)
    for n in range(2):
        assert same([x[n] for x in found], grad([x[n] for x in several]))


# -- results and gradients; the full product of shapes is in the tests of the kernels


@pytest.mark.parametrize("scale", [0, -1, np.float32(0.5)], ids=repr)
def test_scale_is_any_real_number(scale):
    q, k, v = inputs()
    o, lse = flashlib.attention(q, k, v, scale=scale, return_lse=True)
    testing.assert_within_budget(q, k, v, o, lse, scale=float(scale))


@each_method
@pytest.mark.parametrize(
    "dtype, causal",
    [(torch.float32, True), (torch.float16, False), (torch.bfloat16, True)],
)
def test_results_and_gradients(method, dtype, causal):
    """Rows see nothing, gradients come through L too, and what is given stays."""
    sizes = {"B": 1, "H": 4, "T_q": 19, "dtype": dtype}
    options = {"H_kv": 2, "T_k": 11, "d_v": 24, "requires_grad": True}
    q, k, v = inputs(**sizes, **options, layout="packed")
    do, _, _ = inputs(**sizes, d=24, layout="transposed", seed=5)
    before = [x.detach().clone() for x in (q, k, v, do)]
    options = {"causal": causal, "method": method, "return_lse": True}
    o, lse = flashlib.attention(q, k, v, **options)
    testing.assert_within_budget(q, k, v, o, lse, causal=causal)
    dlse = torch.linspace(-1, 1, 19, device=DEVICE).expand(lse.shape)
    sees = ~torch.isneginf(lse)
    loss = (o.float() * do.float()).sum() + (lse[sees] * dlse[sees]).sum()
    found = torch.autograd.grad(loss, (q, k, v))
    options = {"causal": causal, "dlse": dlse}
    testing.assert_gradients_within_budget(q, k, v, do, *found, **options)
    assert same([x.detach() for x in (q, k, v, do)], before)
    assert torch.equal(flashlib.attention(q, k, v, causal=causal, method=method), o)


@each_method
def test_gradients_of_what_is_asked_for(method):
    """Of some inputs, of an expanded output gradient, of the log-sum-exp alone."""
    for wanted in ("q", "k", "v", "kv"):
        leaves = dict(zip("qkv", inputs(T_k=5), strict=True))
        for name in wanted:
            leaves[name].requires_grad_()
        o, lse = flashlib.attention(*leaves.values(), method=method, return_lse=True)
        o.sum().backward()
        grads = [x.grad for x in leaves.values()]
        assert [x is not None for x in grads] == [name in wanted for name in "qkv"]
        leaves = [x.detach() for x in leaves.values()]
        testing.assert_gradients_within_budget(*leaves, torch.ones_like(o), *grads)
    q, k, v = inputs(requires_grad=True)
    o, lse = flashlib.attention(q, k, v, method=method, return_lse=True)
    dlse = torch.linspace(-1, 1, 9, device=DEVICE).expand(lse.shape)
    dq, dk, dv = torch.autograd.grad(lse, (q, k, v), dlse, allow_unused=True)
    assert dv is None or (dv == 0).all()
    nothing = torch.zeros_like(o)
    testing.assert_gradients_within_budget(q, k, v, nothing, dq, dk, None, dlse=dlse)


@each_method
def test_nothing_is_recorded_without_gradients(method):
    q, k, v = inputs(requires_grad=True)
    with torch.no_grad():
        assert not flashlib.attention(q, k, v, method=method).requires_grad
    with torch.inference_mode():
        assert flashlib.attention(q, k, v, method=method).is_inference()


@each_method
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # 0 times infinity, in no result
@pytest.mark.parametrize("unseen, causal", [(130, False), (150, True), (200, False)])
def test_keys_whose_scores_are_minus_infinity(method, unseen, causal):
    """Whole blocks of them come first; the last case has no others."""
    q, k, v = inputs(T_q=20, T_k=200)
    q = q.abs() + 0.1
    k[:, :, :unseen] = -math.inf
    options = {"causal": causal, "method": method, "return_lse": True}
    o, lse = flashlib.attention(q, k, v, **options)
    o64, lse64 = testing.oracle(q, k, v, causal=causal)
    torch.testing.assert_close(o.double(), o64, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), lse64, rtol=1e-5, atol=1e-5)


def test_an_infinite_gradient_of_what_no_key_gave():
    """Of the log-sum-exp, -inf, of a query that sees no key, it contributes nothing."""
    for options in CALLS:
        options = options | {"causal": True, "return_lse": True}
        q, k, v = inputs(T_q=9, T_k=5, requires_grad=True)
        _, lse = flashlib.attention(q, k, v, **options)
        found = torch.autograd.grad(lse.square().sum(), (q, k))
        dlse = 2 * lse.detach()
        options.pop("method", None)
        options.pop("return_lse")
        do = torch.zeros_like(q)
        testing.assert_gradients_within_budget(
            q, k, v, do, *found, None, dlse=dlse.nan_to_num(neginf=0), **options
        )


@pytest.mark.parametrize("options", [{"window": (2, 0)}, {"softcap": 2.0}], ids=str)
def test_no_heads(options):
    x = torch.zeros(2, 0, 5, 16, device=DEVICE, requires_grad=True)
    o = flashlib.attention(x, x, x, **options)
    packed, starts = x[0].transpose(0, 1), torch.tensor([0, 2, 5], device=DEVICE).int()
    more = flashlib.attention_varlen(*[packed] * 3, starts, starts, 3, 3, **options)
    for y in (o, more):
        assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@each_method
@pytest.mark.parametrize("shape", EMPTY)
def test_empty_tensors_are_legal(method, shape):
    check_empty(shape, 16, method)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_honored(dtype):
    """Also by hopper, which takes this d."""
    q, k, v = inputs(d=64, requires_grad=True)
    with torch.autocast(DEVICE, dtype=dtype):
        o, lse = flashlib.attention(q, k, v, causal=True, return_lse=True)
        mixed = flashlib.attention(q.to(dtype), k, v)
    assert o.dtype == mixed.dtype == dtype and lse.dtype == torch.float32
    cast = [x.detach().to(dtype) for x in (q, k, v)]
    testing.assert_within_budget(*cast, o, lse, causal=True)
    gradients = torch.autograd.grad(o.float().sum(), (q, k, v))
    assert all(g.dtype == torch.float32 for g in gradients)
    gradients = [g.to(dtype) for g in gradients]
    testing.assert_gradients_within_budget(
        *cast, torch.ones_like(o), *gradients, causal=True
    )
    with torch.autocast(DEVICE, dtype=dtype), refused(TypeError, "k: expected dtype"):
        flashlib.attention(q, k.double(), v)
    with torch.autocast(DEVICE, dtype=dtype, enabled=False):
        assert flashlib.attention(q, k, v).dtype == torch.float32


# -- which kernels run


@pytest.fixture
def called(monkeypatch):
    """The names of the kernels that were run, where hopper is there for even T_q: it is
    flash2 and its backward, under a name of its own.
    """
    names = []

    def noting(name, function):
        return lambda *x, **y: names.append(name) or function(*x, **y)

    def refusal(q, k, v):
        return f"an even length, got {q.shape[2]}" if q.shape[2] % 2 else None

    monkeypatch.setattr(hopper_host, "tensor_refusal", refusal)
    for module, function, own in (
        (hopper, "forward", other_forward),
        (hopper_backward, "backward", other_backward),
        (standard, "forward", standard.forward),
        (flash1, "forward", flash1.forward),
        (flash2, "forward", flash2.forward),
        (masks, "forward", masks.forward),
        (backward, "backward", backward.backward),
        (masks_backward, "backward", masks_backward.backward),
    ):
        run = noting(module.__name__.rsplit(".")[-1], own)
        monkeypatch.setattr(module, function, run)
    plans.PLANS.clear()
    yield names
    plans.PLANS.clear()  # of what stands for the kernels here


MASK = flashlib.masks.prefix(3)
SCORE = score_functions.softcap(2.0)


@pytest.mark.parametrize(
    "T, options, kernels",
    [
        (8, {}, ["hopper", "hopper_backward"]),
        (9, {}, ["flash2", "backward"]),
        (8, {"method": "hopper"}, ["hopper", "hopper_backward"]),
        (8, {"method": "flash2"}, ["flash2", "backward"]),
        (8, {"method": "flash1"}, ["flash1", "backward"]),
        (8, {"method": "standard"}, ["standard"]),
        (8, {"window": (None, None)}, ["hopper", "hopper_backward"]),
        (8, {"window": [None, None], "method": "flash1"}, ["flash1", "backward"]),
        (8, {"window": (3, 0)}, ["hopper", "hopper_backward"]),
        (9, {"window": (3, 0)}, ["masks", "masks_backward"]),
        (8, {"window": (3, 0), "method": "flash2"}, ["masks", "masks_backward"]),
        (8, {"softcap": 5.0}, ["hopper", "hopper_backward"]),
        (8, {"softcap": 5.0, "d": 64}, ["masks", "hopper_backward"]),
        (
            8,
            {"softcap": 5.0, "d": 64, "method": "hopper"},
            ["hopper", "hopper_backward"],
        ),
        (8, {"softcap": 5.0, "method": "flash2"}, ["masks", "masks_backward"]),
        pytest.param(
            8,
            {"score": SCORE, "mask": MASK, "method": "hopper"},
            ["hopper", "hopper_backward"],
            id="score-hopper",
        ),
        pytest.param(8, {"mask": MASK}, ["hopper", "hopper_backward"], id="mask"),
        pytest.param(
            8,
            {"mask": MASK, "method": "hopper"},
            ["hopper", "hopper_backward"],
            id="mask-hopper",
        ),
        pytest.param(
            8,
            {"mask": MASK, "window": (3, 0)},
            ["masks", "masks_backward"],
            id="mask-window",
        ),
        pytest.param(
            8,
            {"bias": torch.ones(1, 2, 8, 12, device=DEVICE)},
            ["hopper", "hopper_backward"],
            id="bias",
        ),
        pytest.param(
            8,
            {"bias": torch.ones(1, 2, 8, 12, device=DEVICE), "d": 64},
            ["hopper", "hopper_backward"],
            id="bias-64",
        ),
        pytest.param(
            8,
            {"bias": torch.ones(1, 2, 1, 12, device=DEVICE), "d": 64},
            ["masks", "hopper_backward"],  # the copy engine does not bring this one
            id="bias-64-each-key",
        ),
        pytest.param(
            8,
            {"bias": torch.ones(1, 2, 8, 12, device=DEVICE), "method": "flash2"},
            ["masks", "masks_backward"],
            id="bias-flash2",
        ),
        (8, {"sinks": torch.ones(2, device=DEVICE)}, ["hopper", "hopper_backward"]),
        (
            8,
            {"alibi_slopes": torch.tensor([0.5, 0.1], device=DEVICE)},
            ["hopper", "hopper_backward"],
        ),
    ],
    ids=str,
)
def test_a_method_runs_the_kernels_of_its_name(T, options, kernels, called):
    options = {**options}
    q, k, v = inputs(T_q=T, T_k=12, d=options.pop("d", 16), requires_grad=True)
    changes = {name: value for name, value in options.items() if name != "method"}
    o, lse = flashlib.attention(q, k, v, causal=True, return_lse=True, **options)
    testing.assert_within_budget(q, k, v, o, lse, causal=True, **changes)
    judge_gradients(o, q, k, v, causal=True, **changes)
    assert called == kernels


@pytest.mark.parametrize("learned", [False, True])
def test_the_gradient_of_a_bias_next_to_hoppers(learned, called):
    """One kernel computes it, after the Hopper kernels or flash2's."""
    q, k, v = inputs(T_q=8, T_k=12, requires_grad=True)
    bias = torch.linspace(-2.0, 2.0, 12, device=DEVICE).expand(1, 2, 8, 12)
    bias = bias.clone().requires_grad_(learned)
    leaves = (q, k, v, bias)[: 3 + learned]
    found = []
    for method in ("hopper", "flash2"):
        o = flashlib.attention(q, k, v, bias=bias, causal=True, method=method)
        found.append(torch.autograd.grad(o.square().sum(), leaves))
    assert same(*found)
    assert called == ["hopper", "hopper_backward", "masks", "masks_backward"]


@pytest.fixture
def any_order():
    """Allow what is not deterministic, within the test."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


def test_the_backward_is_told_when_any_order_is_allowed(any_order, called, monkeypatch):
    asked = []
    own = backward.backward
    monkeypatch.setattr(backward, "backward", lambda *x: asked.append(x[-1]) or own(*x))
    q, k, v = inputs(T_q=8, requires_grad=True)
    for method in ("flash1", "flash2"):
        for deterministic in (True, False):
            options = {"method": method, "deterministic": deterministic}
            flashlib.attention(q, k, v, **options).sum().backward()
    assert asked == 2 * [True, False]


@each_method
def test_gradients_that_need_not_be_deterministic(method, any_order):
    T = 70 if CUDA or method != "standard" else 20
    q, k, v = inputs(H=3, H_kv=1, T_q=T, T_k=T - 4, requires_grad=True)
    options = {"causal": True, "method": method}
    o = flashlib.attention(q, k, v, deterministic=False, **options)
    found = judge_gradients(o, q, k, v, causal=True)
    if method == "standard":
        again = flashlib.attention(q, k, v, **options)
        assert same(found, judge_gradients(again, q, k, v, causal=True))
        return
    torch.use_deterministic_algorithms(True)
    with refused(ValueError, "deterministic: expected True under torch"):
        o.sum().backward()


# -- streams, graphs, torch.compile


@pytest.mark.gpu
@each_method
def test_another_stream(method):
    def gradients(*leaves):
        o = flashlib.attention(*leaves, method=method)
        return o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))

    leaves = inputs(T_q=700, d=64, dtype=torch.bfloat16, requires_grad=True)
    plain = gradients(*leaves)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # A kernel on the wrong stream would be done before its inputs are.
        torch.cuda._sleep(10**8)
        again = gradients(*(x.detach().clone().requires_grad_() for x in leaves))
    stream.synchronize()
    assert same(plain, again)


@each_backend
@each_method
def test_torch_compile_without_a_graph_break(method, backend):
    q, k, v = inputs(T_k=13, requires_grad=True)

    def loss(q, k, v):
        options = {"causal": True, "method": method, "return_lse": True}
        o, lse = flashlib.attention(q * 1.5, k, v, **options)
        return (o * o).sum() + lse.sum()

    torch.compiler.reset()
    plain = loss(q, k, v)
    compiled = torch.compile(loss, fullgraph=True, backend=backend)(q, k, v)
    gradients = [torch.autograd.grad(x, (q, k, v)) for x in (plain, compiled)]
    if backend != "inductor":
        assert torch.equal(plain, compiled) and same(*gradients)
    o = flashlib.attention(q * 1.5, k, v, causal=True)
    dq, dk, dv = gradients[1]
    found, ones = (dq / 1.5, dk, dv), torch.ones(q.shape[:3], device=DEVICE)
    do = 2 * o.detach()
    testing.assert_gradients_within_budget(
        q * 1.5, k, v, do, *found, causal=True, dlse=ones
    )


def test_one_trace_serves_all_lengths_and_addresses(called):
    """While tracing, addresses are not known: what runs is decided when it runs. Eager
    calls in between cause no new trace.
    """
    torch.compiler.reset()
    traces = CompileCounterWithBackend("aot_eager")
    options = {"fullgraph": True, "backend": traces, "dynamic": True}
    compiled = torch.compile(flashlib.attention, **options)
    for T, name in ((8, "hopper"), (9, "flash2"), (10, "hopper")):
        q, k, v = inputs(T_q=T, T_k=12, requires_grad=True)
        o = compiled(q, k, v, causal=True)
        torch.autograd.grad(o.sum(), q)
        before = "hopper_backward" if name == "hopper" else "backward"
        assert called == [name, before]
        assert torch.equal(o, flashlib.attention(q, k, v, causal=True))
        called.clear()
    assert traces.frame_count == 1
    with pytest.raises(ValueError, match=r"^method: .* an even length, got 9$"):
        compiled(*inputs(T_q=9, T_k=12), method="hopper")
    q, k, v = inputs()
    plain = flashlib.attention(q, k, v, window=(3, 1))
    assert torch.equal(compiled(q, k, v, window=(3, 1)), plain)


def test_a_compiled_call_repeats_no_check_of_its_tensors():
    torch.compiler.reset()
    compiled = torch._dynamo.explain(flashlib.attention)(*inputs(), causal=True)
    assert compiled.graph_count == 1
    assert compiled.ops_per_graph[0][0] == torch.ops.flashlib.attention.default
    guarded = " ".join(guard.name for guard in compiled.out_guards)
    assert "check_flags" in guarded and "check_qkv" not in guarded


def test_a_compiled_function_takes_the_scale():
    torch.compiler.reset()

    def scaled(scale):
        return flashlib.attention(q, k, v, scale=scale)

    q, k, v = inputs()
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    for scale in (0.5, 0.25, 0.125):
        assert torch.equal(compiled(scale), scaled(scale))


@pytest.mark.parametrize(
    "sizes",
    [
        {"T_k": 0},
        {"layout": "packed", "H": 3, "H_kv": 1, "d_v": 24},
        pytest.param(
            {"d": 64, "dtype": torch.float16, "layout": "transposed"},
            marks=pytest.mark.gpu,
        ),
    ],
    ids=["no keys", "packed", "for hopper"],
)
def test_operators_are_registered_properly(sizes):
    q, k, v = inputs(T_q=5, **sizes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(ops.standard.operator, (*leaves, True, 0.25))
    options = (True, 0.25, "auto", True)
    torch.library.opcheck(ops.flash.operator, (*leaves, *options))
    o, lse, p = torch.ops.flashlib.standard(q, k, v, True, 0.25)
    do, dlse = torch.ones_like(o), torch.zeros_like(lse)
    arguments = (q, k, v, o, lse, p, do, dlse, True, 0.25)
    torch.library.opcheck(ops.standard.backward_operator, arguments)
    arguments = (q, k, v, o, lse, do, dlse, *options)
    torch.library.opcheck(ops.flash.backward_operator, arguments)


def test_a_traced_graph_holds_the_operators_without_autograd():
    def gradients(*leaves):
        return torch.autograd.grad(flashlib.attention(*leaves).sum(), leaves)

    graph = make_fx(gradients)(*inputs(requires_grad=True)).graph
    named = [node.name for node in graph.nodes if "flash" in node.name]
    assert named == ["flash_below_autograd", "flash_backward_below_autograd"]


# -- importing

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
CALL = (
    "import torch, flashlib\nx = torch.ones(1, 1, 3, 16)\n"
    "print(flashlib.attention(x, x, x).sum().item())"
)


def last_line(done):
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_public_names():
    assert set(flashlib.__all__) <= set(dir(flashlib))
    assert all(callable(getattr(flashlib, name)) for name in flashlib.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'atention'.* attention"):
        flashlib.atention  # noqa: B018


OTHERS = "block_lists", "fp8", "kvcache", "score_functions"


@pytest.mark.parametrize(
    "name", ["masks", *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)]
)
def test_public_modules_need_no_import_of_their_own(name):
    assert name in dir(flashlib)
    done = run_python(f"import flashlib\nprint(flashlib.{name}.__name__)")
    assert done.stdout.strip() == f"flashlib.{name}", done.stderr


def test_a_foreign_package_of_the_same_name_is_named(tmp_path):
    metadata = tmp_path / "flashlib-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: flashlib\nVersion: 9.9\n")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport flashlib"
    line = last_line(run_python(code))
    assert line.startswith("ImportError: an unrelated package named flashlib (version")
    assert "9.9" in line and "uninstall flashlib" in line


@pytest.mark.skipif(
    Version(version("triton")) < Version("3.7")
    and Version(np.__version__) >= Version("2.4"),
    reason="Triton 3.6 makes numbers of arrays with one element, which NumPy refuses",
)
def test_the_interpreter_is_chosen_without_a_gpu_and_no_compiler_is_loaded():
    code = CALL + "\nimport sys; print('torch._dynamo' in sys.modules)"
    done = run_python(code, **NO_GPU, TRITON_INTERPRET=None)
    assert done.stdout.split() == ["48.0", "False"], done.stderr


def test_an_explicit_choice_is_honored():
    line = last_line(run_python(CALL, **NO_GPU, TRITON_INTERPRET="0"))
    assert line.startswith("ValueError: q: expected a CUDA tensor")
    assert "TRITON_INTERPRET=1" in line


@pytest.mark.parametrize("driver", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_gpu_must_be_chosen_for(tmp_path, driver):
    """Where PyTorch is built for AMD's GPUs: without a CUDA driver, or with one that
    has no GPU.
    """
    metadata = tmp_path / "torch-9.9+rocm9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9+rocm9\n")
    code = f"import ctypes, sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    if driver:
        code += "import torch\nctypes.CDLL = print\nimport flashlib.kernels"
    else:
        code += "def absent(name): raise OSError(name)\nctypes.CDLL = absent\n"
        code += "import flashlib"
    line = last_line(run_python(code, **NO_GPU, TRITON_INTERPRET=None))
    assert line.startswith(
        "ImportError: TRITON_INTERPRET: expected 0 or 1 with torch 9"
    )
    done = run_python(code, **NO_GPU, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "missing, said",
    [
        ("torch", "kernels: none: .*python -m pip install torch"),
        ("triton", "no triton, numpy .*\nkernels: none: .*need Triton"),
        ("numpy", "triton [^,]*, no numpy\n.*kernels: none: .*pip install numpy"),
    ],
)
def test_the_report_says_what_is_missing(missing, said):
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\n"
        "from flashlib import __main__\nprint(__main__.report())"
    )
    done = run_python(code, **NO_GPU, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert re.search(said, done.stdout, re.S), done.stdout


def test_triton_loaded_before_without_its_interpreter():
    done = run_python("import triton\n" + CALL, **NO_GPU, TRITON_INTERPRET=None)
    line = last_line(done)
    assert line.startswith("ImportError: Triton was imported before flashlib.kernels")
    assert "import flashlib.kernels first" in line and "TRITON_INTERPRET" in line
