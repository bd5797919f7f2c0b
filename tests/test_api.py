"""The public door: what it refuses and how, and that autograd, torch.compile and autocast go through it."""

import itertools
import math
from importlib.metadata import version

import numpy as np
import pytest
import torch
from cases import CUDA, DEVICE, run_python
from packaging.version import Version
from torch.utils.checkpoint import checkpoint

import flashlib
from flashlib import testing
from flashlib.kernels import backward, copies, flash1, flash2, hopper, hopper_backward, standard
from flashlib.notebook import check
from flashlib.reference import standard as reference

pytestmark = pytest.mark.usefixtures("nan_filled")

METHODS = ("standard", "flash1", "flash2", "auto")
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def inputs(B=1, H=2, T_q=9, d=16, **changes):
    """Small q, k, v on the device under test."""
    return testing.make_qkv(B, H, T_q, d, device=DEVICE, **changes)


# ------------------------------------------------------------------------------------ what is refused


def zeros(*shape, **changes):
    return torch.zeros(*shape, **{"device": DEVICE} | changes)


Q = (1, 6, 5, 16)
WRONG_INPUTS = {
    "q is a list": ({"q": [[1.0]]}, TypeError, "q: expected a torch.Tensor, got list"),
    "k is None": ({"k": None}, TypeError, "k: expected a torch.Tensor, got NoneType"),
    "v is an array": ({"v": np.zeros(Q)}, TypeError, "v: expected a torch.Tensor, got ndarray"),
    "int tensor": (
        {"k": zeros(*Q, dtype=torch.int32)},
        TypeError,
        "k: expected dtype float32, float16, bfloat16, got int32",
    ),
    "bool tensor": (
        {"v": zeros(*Q, dtype=torch.bool)},
        TypeError,
        "v: expected dtype float32, float16, bfloat16, got bool",
    ),
    "float64": (
        {"q": zeros(*Q).double()},
        TypeError,
        "q: expected dtype float32, float16, bfloat16, got float64",
    ),
    "mixed dtypes": ({"k": zeros(*Q).half()}, TypeError, "k: expected .*float32, got .*float16"),
    "mixed dtypes in v": ({"v": zeros(*Q).bfloat16()}, TypeError, "v: expected .*float32, got .*bfloat16"),
    "sparse": (
        {"v": zeros(*Q).to_sparse()},
        TypeError,
        "v: expected a dense .* got layout torch.sparse_coo",
    ),
    "meta device": (
        {"q": zeros(*Q, device="meta")},
        ValueError,
        "q: expected a tensor on cpu or cuda, got meta",
    ),
    "another device": ({"k": zeros(*Q, device="meta")}, ValueError, "k: expected .* got meta"),
    "three dimensions": (
        {"q": zeros(6, 5, 16)},
        ValueError,
        r"q: expected 4 dimensions \[B, H, T, d\], got 3: \[6, 5, 16\]",
    ),
    "five dimensions": ({"v": zeros(1, *Q)}, ValueError, r"v: expected 4 dimensions \[B, H, T, d\], got 5"),
    "v has another T_k": (
        {"v": zeros(1, 6, 4, 16)},
        ValueError,
        r"v: expected .* of k \[1, 6, 5, 16\], got \[1, 6, 4, 16\]",
    ),
    "v has other heads": (
        {"v": zeros(1, 3, 5, 16)},
        ValueError,
        r"v: expected .* of k \[1, 6, 5, 16\], got \[1, 3, 5, 16\]",
    ),
    "k has another B": (
        {"k": zeros(2, 6, 5, 16)},
        ValueError,
        r"k: expected batch size 1 as in q .*, got \[2, 6, 5, 16\]",
    ),
    "k has another d": (
        {"k": zeros(1, 6, 5, 32)},
        ValueError,
        r"k: expected head dimension 16 as in q .*, got \[1, 6, 5, 32\]",
    ),
    "heads do not divide": (
        {"k": zeros(1, 4, 5, 16), "v": zeros(1, 4, 5, 16)},
        ValueError,
        "k: expected .*divides the 6 .*got 4",
    ),
    "more key heads": (
        {"k": zeros(1, 12, 5, 16), "v": zeros(1, 12, 5, 16)},
        ValueError,
        "k: expected .*divides the 6 .*got 12",
    ),
    "no key heads": (
        {"k": zeros(1, 0, 5, 16), "v": zeros(1, 0, 5, 16)},
        ValueError,
        "k: expected .*divides the 6 .*got 0",
    ),
    "d too small": (
        {"q": zeros(1, 6, 5, 15), "k": zeros(1, 6, 5, 15)},
        ValueError,
        r"q: expected .*16 to 256, got \[1, 6, 5, 15\]",
    ),
    "d too large": (
        {"q": zeros(1, 6, 5, 257), "k": zeros(1, 6, 5, 257)},
        ValueError,
        r"q: expected .*16 to 256, got \[1, 6, 5, 257\]",
    ),
    "d_v too small": ({"v": zeros(1, 6, 5, 8)}, ValueError, r"v: expected .*16 to 256, got \[1, 6, 5, 8\]"),
    "d_v too large": (
        {"v": zeros(1, 6, 5, 272)},
        ValueError,
        r"v: expected .*16 to 256, got \[1, 6, 5, 272\]",
    ),
    "causal is text": ({"causal": "yes"}, TypeError, "causal: expected True or False, got 'yes'"),
    "causal is 1": ({"causal": 1}, TypeError, "causal: expected True or False, got 1"),
    "causal is None": ({"causal": None}, TypeError, "causal: expected True or False, got None"),
    "return_lse is text": ({"return_lse": "no"}, TypeError, "return_lse: expected True or False, got 'no'"),
    "deterministic is text": (
        {"deterministic": "no"},
        TypeError,
        "deterministic: expected True or False, got 'no'",
    ),
    "deterministic=False under deterministic algorithms": (
        {"deterministic": False},
        ValueError,
        r"deterministic: expected True under torch\.use_deterministic_algorithms\(True\), got False",
    ),
    "tune is 1": ({"tune": 1}, TypeError, "tune: expected True or False, got 1"),
    "tune for flash1": (
        {"tune": True, "method": "flash1"},
        ValueError,
        "tune: expected False for method 'flash1', .*got True",
    ),
    "scale is NaN": ({"scale": math.nan}, ValueError, "scale: expected a finite number, got nan"),
    "scale is infinite": ({"scale": -math.inf}, ValueError, "scale: expected a finite number, got -inf"),
    "scale is huge": ({"scale": 10**400}, ValueError, "scale: expected a finite number"),
    "scale is beyond float32": ({"scale": 1e38}, ValueError, r"scale: expected a magnitude up to 1e\+37"),
    "scale is text": ({"scale": "auto"}, TypeError, "scale: expected a real number or None, got str"),
    "scale is a bool": ({"scale": True}, TypeError, "scale: expected a real number or None, got bool"),
    "scale is complex": ({"scale": 1j}, TypeError, "scale: expected a real number or None, got complex"),
    "scale is a tensor": (
        {"scale": torch.tensor(0.5)},
        TypeError,
        "scale: expected a real number or None, got Tensor",
    ),
    "unknown method": (
        {"method": "flash3"},
        ValueError,
        "method: expected one of auto, standard, flash1, flash2, hopper, got 'flash3'",
    ),
    "method is None": (
        {"method": None},
        TypeError,
        "method: expected one of auto, standard, flash1, flash2, hopper, got NoneType",
    ),
}


@pytest.mark.parametrize("changes, error, message", WRONG_INPUTS.values(), ids=WRONG_INPUTS.keys())
def test_wrong_argument_gets_one_clear_line(changes, error, message):
    arguments = {"q": zeros(*Q), "k": zeros(*Q), "v": zeros(*Q)} | changes
    with pytest.raises(error, match=f"^{message}") as caught:
        flashlib.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert "\n" not in str(caught.value)


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_cpu_tensor_beside_cuda_ones(name):
    arguments = {"q": zeros(*Q), "k": zeros(*Q), "v": zeros(*Q), name: torch.zeros(Q)}
    message = r"^[kv]: expected the device of q, .*(cpu.*cuda|cuda.*cpu)"
    with pytest.raises(ValueError, match=message) as caught:
        flashlib.attention(**arguments)
    assert "\n" not in str(caught.value)


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("index", range(torch.cuda.device_count()))
def test_any_cuda_device(index):
    q, k, v = testing.make_qkv(1, 2, 33, 64, device=f"cuda:{index}", dtype=torch.bfloat16, requires_grad=True)
    for method in METHODS:
        o, lse = flashlib.attention(q, k, v, method=method, return_lse=True)
        testing.assert_within_budget(q, k, v, o, lse)
        assert all(g.device == q.device for g in torch.autograd.grad(o.sum(), (q, k, v)))


def test_misspelt_and_positional_options_are_refused():
    q, k, v = inputs()
    with pytest.raises(TypeError, match="casual"):
        flashlib.attention(q, k, v, casual=True)
    with pytest.raises(TypeError, match="positional"):
        flashlib.attention(q, k, v, True)


# ------------------------------------------------------------------------------------ what it gives


@pytest.mark.parametrize("scale", [None, 0, -1, 0.3, np.float64(0.3), np.float32(0.5)], ids=repr)
def test_scale_is_any_real_number(scale):
    q, k, v = inputs()
    o, lse = flashlib.attention(q, k, v, scale=scale, return_lse=True)
    testing.assert_within_budget(q, k, v, o, lse, scale=None if scale is None else float(scale))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results(method, dtype):
    q, k, v = inputs(B=2, H=6, H_kv=2, T_k=13, d_v=24, dtype=dtype, layout="packed")
    o, lse = flashlib.attention(q, k, v, causal=True, method=method, return_lse=True)
    testing.assert_within_budget(q, k, v, o, lse, causal=True)
    alone = flashlib.attention(q, k, v, causal=True, method=method)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, o)


@pytest.fixture
def hopper_for_even_lengths(monkeypatch):
    """hopper is there, for even T_q: it is flash2 and its backward, under a name of its own. The names of the
    kernels that were run.
    """
    called = []

    def noting(name, function):
        return lambda *x: called.append(name) or function(*x)

    def refusal(q, k, v, *more):
        return f"an even length, got {q.shape[2]}" if q.shape[2] % 2 else None

    monkeypatch.setattr(copies, "refusal", refusal)
    monkeypatch.setattr(hopper, "forward", noting("hopper", flash2.forward))
    monkeypatch.setattr(hopper_backward, "backward", noting("hopper_backward", backward.backward))
    monkeypatch.setattr(flash2, "forward", noting("flash2", flash2.forward))
    monkeypatch.setattr(backward, "backward", noting("backward", backward.backward))
    return called


@pytest.mark.parametrize(
    "T, options, kernels",
    [
        (8, {}, ["hopper", "hopper_backward"]),
        (9, {}, ["flash2", "backward"]),
        (8, {"method": "hopper"}, ["hopper", "hopper_backward"]),
        (8, {"method": "flash2"}, ["flash2", "backward"]),
        (8, {"method": "flash1"}, ["backward"]),
        (8, {"window": (3, 0)}, []),
        (8, {"softcap": 5.0}, []),
    ],
    ids=str,
)
def test_auto_takes_hopper_for_what_it_supports(T, options, kernels, hopper_for_even_lengths):
    q, k, v = inputs(T_q=T, T_k=12, requires_grad=True)
    changes = {name: value for name, value in options.items() if name != "method"}
    o, lse = flashlib.attention(q, k, v, causal=True, return_lse=True, **options)
    testing.assert_within_budget(q, k, v, o, lse, causal=True, **changes)
    found = torch.autograd.grad(o.sum(), (q, k, v))
    testing.assert_gradients_within_budget(q, k, v, torch.ones_like(o), *found, causal=True, **changes)
    assert hopper_for_even_lengths == kernels


def test_hopper_says_why_it_cannot_run(hopper_for_even_lengths):
    with pytest.raises(ValueError, match=r"^method: .*'hopper'.* an even length, got 9$"):
        flashlib.attention(*inputs(T_q=9), method="hopper")
    assert hopper_for_even_lengths == []


def test_hopper_is_told_when_any_order_is_allowed(any_order, hopper_for_even_lengths, monkeypatch):
    asked = []
    own = hopper_backward.backward
    monkeypatch.setattr(hopper_backward, "backward", lambda *x: asked.append(x[-1]) or own(*x))
    q, k, v = inputs(T_q=8, requires_grad=True)
    for deterministic in (True, False):
        flashlib.attention(q, k, v, method="hopper", deterministic=deterministic).sum().backward()
    assert asked == [True, False] and hopper_for_even_lengths == 2 * ["hopper", "hopper_backward"]


def test_what_compiled_code_runs_is_decided_when_it_runs(hopper_for_even_lengths):
    """Addresses are not known while the code is traced, so one trace must serve both."""
    torch.compiler.reset()
    compiled = torch.compile(flashlib.attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for T, name in ((8, "hopper"), (9, "flash2"), (10, "hopper")):
        q, k, v = inputs(T_q=T, T_k=12, requires_grad=True)
        torch.autograd.grad(compiled(q, k, v, causal=True).sum(), q)
        assert hopper_for_even_lengths == [name, "hopper_backward" if name == "hopper" else "backward"]
        hopper_for_even_lengths.clear()
    with pytest.raises(ValueError, match=r"^method: .* an even length, got 9$"):
        compiled(*inputs(T_q=9, T_k=12), method="hopper")


@pytest.mark.parametrize("options", [{"window": (3, 0)}, {"softcap": 5.0}, {"tune": True}], ids=str)
def test_only_flash2_takes(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"^{name}: expected (None|False) for method 'hopper'"):
        flashlib.attention(*inputs(), method="hopper", **options)


EMPTY = {"B=0": (0, 2, 2, 5, 5), "H=0": (1, 0, 0, 5, 5), "T_q=0": (1, 2, 2, 0, 5), "T_k=0": (1, 2, 2, 5, 0)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY.keys())
def test_empty_tensors_are_legal(method, causal, sizes):
    B, H, H_kv, T_q, T_k = sizes
    q, k, v = (zeros(B, heads, T, 16).requires_grad_() for heads, T in ((H, T_q), (H_kv, T_k), (H_kv, T_k)))
    o, lse = flashlib.attention(q, k, v, causal=causal, method=method, return_lse=True)
    assert o.shape == (B, H, T_q, 16) and (o == 0).all()
    assert lse.shape == (B, H, T_q) and (lse == -math.inf).all() and lse.dtype == torch.float32
    for x, gradient in zip((q, k, v), torch.autograd.grad(o.sum(), (q, k, v)), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_inputs_are_never_modified(method):
    q, k, v = inputs(T_k=5, layout="strided", requires_grad=True)
    do = torch.ones_like(q)
    before = [x.detach().clone() for x in (q, k, v, do)]
    flashlib.attention(q, k, v, causal=True, scale=-0.3, method=method).backward(do)
    assert all(torch.equal(x.detach(), y) for x, y in zip((q, k, v, do), before, strict=True))


# ------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(method, dtype, causal):
    """Against autograd's own, in float64, through the reference; T_q > T_k, so that rows see nothing."""
    q, k, v = inputs(
        B=2, H=3, H_kv=1, T_q=19, T_k=11, d_v=24, dtype=dtype, layout="packed", requires_grad=True
    )
    do, _, _ = inputs(B=2, H=3, T_q=19, d=24, dtype=dtype, layout="transposed", seed=5)
    o = flashlib.attention(q, k, v, causal=causal, method=method)
    found = torch.autograd.grad(o, (q, k, v), do)
    testing.assert_gradients_within_budget(q, k, v, do, *found, causal=causal)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    blind = 8 if causal else 0
    o64, _ = reference.attention(wide[0][:, :, blind:], wide[1], wide[2], causal=causal)
    by_autograd = torch.autograd.grad(o64, wide, do[:, :, blind:].double())
    for name, x, y in zip(
        "qkv", testing.oracle_gradients(q, k, v, do, causal=causal), by_autograd, strict=True
    ):
        check(f"d{name}", x, y)


@pytest.mark.parametrize("method", METHODS)
def test_gradient_through_the_log_sum_exp(method):
    q, k, v = inputs(T_q=9, T_k=7, requires_grad=True)
    o, lse = flashlib.attention(q, k, v, causal=True, method=method, return_lse=True)
    do, dlse = torch.ones_like(o), torch.linspace(-1, 1, 9, device=DEVICE).expand(lse.shape)
    sees = ~torch.isneginf(lse)
    found = torch.autograd.grad((o * do).sum() + (lse[sees] * dlse[sees]).sum(), (q, k, v))
    testing.assert_gradients_within_budget(q, k, v, do, *found, causal=True, dlse=dlse)
    o, lse = flashlib.attention(q, k, v, method=method, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse, (q, k, v), dlse, allow_unused=True)
    assert dv is None or (dv == 0).all()
    zero = torch.zeros_like(o)
    testing.assert_gradients_within_budget(q, k, v, zero, dq, dk, None, dlse=dlse)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "wanted",
    [set(x) for n in (1, 2) for x in itertools.combinations("qkv", n)],
    ids=lambda s: "".join(sorted(s)),
)
def test_gradients_of_some_inputs(method, wanted):
    leaves = dict(zip("qkv", inputs(T_k=5), strict=True))
    for name in wanted:
        leaves[name].requires_grad_()
    o = flashlib.attention(*leaves.values(), method=method)
    o.sum().backward()
    given = {name: leaves[name].grad for name in "qkv"}
    assert {name for name, gradient in given.items() if gradient is not None} == wanted
    testing.assert_gradients_within_budget(*leaves.values(), torch.ones_like(o), *given.values())


@pytest.mark.parametrize("method", METHODS)
def test_expanded_and_transposed_output_gradients(method):
    q, k, v = inputs(B=2, requires_grad=True)
    o = flashlib.attention(q, k, v, method=method)
    expanded = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    testing.assert_gradients_within_budget(q, k, v, torch.ones_like(o), *expanded)
    do = torch.randn(2, 9, 2, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE).transpose(1, 2)
    testing.assert_gradients_within_budget(q, k, v, do, *torch.autograd.grad(o, (q, k, v), do))


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_recorded_without_gradients(method):
    q, k, v = inputs(requires_grad=True)
    with torch.no_grad():
        assert not flashlib.attention(q, k, v, method=method).requires_grad
    with torch.inference_mode():
        assert flashlib.attention(q, k, v, method=method).is_inference()
    assert not flashlib.attention(*(x.detach() for x in (q, k, v)), method=method).requires_grad


@pytest.mark.parametrize("method", METHODS)
def test_double_backward_is_refused_by_name(method):
    q, k, v = inputs(requires_grad=True)
    (dq,) = torch.autograd.grad(flashlib.attention(q, k, v, method=method).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^flashlib\.attention: double backward is not supported"):
        dq.sum().backward()


@pytest.mark.parametrize("method", METHODS)
def test_a_method_runs_the_kernels_of_its_name(method, monkeypatch):
    called = []
    for step in (standard, flash1, flash2):
        own = step.forward
        monkeypatch.setattr(step, "forward", lambda *x, own=own, step=step: called.append(step) or own(*x))
    flashlib.attention(*inputs(), method=method)
    assert called == [{"standard": standard, "flash1": flash1}.get(method, flash2)]


@pytest.mark.parametrize("method", METHODS)
def test_forward_mode_is_refused_by_name(method):
    q, k, v = inputs()
    refused = pytest.raises(NotImplementedError, match=r"^flashlib\.attention: forward-mode")
    with refused, torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k, torch.ones_like(k))
        flashlib.attention(q, dual, v, method=method)
    with pytest.raises(NotImplementedError, match=r"^flashlib\.attention: forward-mode"):
        torch.func.jvp(lambda x: flashlib.attention(x, k, v, method=method), (q,), (torch.ones_like(q),))


@pytest.mark.parametrize("method", METHODS)
def test_vmap_is_refused_by_name(method):
    q, k, v = (torch.stack([x, x]) for x in inputs())
    with pytest.raises(NotImplementedError, match=r"^flashlib\.attention: vmap is not supported"):
        torch.func.vmap(lambda *x: flashlib.attention(*x, method=method))(q, k, v)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(method, use_reentrant):
    q, k, v = inputs(requires_grad=True)

    def loss(*x):
        return flashlib.attention(*x, causal=True, method=method).square().sum()

    plain = torch.autograd.grad(loss(q, k, v), (q, k, v))
    checkpoint(loss, q, k, v, use_reentrant=use_reentrant).backward()
    assert all(torch.equal(a, x.grad) for a, x in zip(plain, (q, k, v), strict=True))


@pytest.mark.parametrize("method", ["flash1", "flash2", "auto"])
def test_tiled_methods_share_the_tiled_backward(method, monkeypatch):
    called = []
    own = backward.backward
    monkeypatch.setattr(backward, "backward", lambda *x: called.append(x[-1]) or own(*x))
    monkeypatch.setattr(standard, "forward", None)
    q, k, v = inputs(requires_grad=True)
    flashlib.attention(q, k, v, method=method).sum().backward()
    assert called == [True]


@pytest.fixture
def any_order():
    """PyTorch allows what is not deterministic, within the test."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_that_need_not_be_deterministic(method, causal, any_order):
    q, k, v = inputs(B=2, H=3, H_kv=1, T_q=70, T_k=66, requires_grad=True)
    o, lse = flashlib.attention(q, k, v, causal=causal, method=method, return_lse=True, deterministic=False)
    do, dlse = torch.ones_like(o), torch.ones_like(lse)
    sees = ~torch.isneginf(lse)
    found = torch.autograd.grad(o.sum() + lse[sees].sum(), (q, k, v))
    testing.assert_gradients_within_budget(q, k, v, do, *found, causal=causal, dlse=dlse)


@pytest.mark.parametrize("method", ["flash1", "flash2"])
def test_determinism_is_asked_for_when_the_gradients_are(method, any_order):
    q, k, v = inputs(requires_grad=True)
    o = flashlib.attention(q, k, v, method=method, deterministic=False)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(ValueError, match=r"^deterministic: expected True under torch"):
        o.sum().backward()


def test_standard_is_deterministic_whatever_is_asked():
    q, k, v = inputs(requires_grad=True)
    first, second = (
        torch.autograd.grad(flashlib.attention(q, k, v, method="standard", deterministic=x).sum(), (q, k, v))
        for x in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(CUDA, reason="on a GPU tiles are timed")
def test_tuning_needs_a_gpu():
    with pytest.raises(ValueError, match=r"^tune: expected False in Triton's interpreter"):
        flashlib.attention(*inputs(), tune=True)


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_another_stream(method):
    q, k, v = inputs(T_q=700, d=64, dtype=torch.bfloat16, requires_grad=True)
    do = torch.ones_like(q)
    plain = torch.autograd.grad(flashlib.attention(q, k, v, method=method), (q, k, v), do)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = torch.autograd.grad(flashlib.attention(q, k, v, method=method), (q, k, v), do)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_cuda_graph(method):
    """Both passes, captured once and replayed on other numbers."""
    q, k, v = inputs(T_q=700, d=64, dtype=torch.bfloat16, requires_grad=True)
    do = torch.ones_like(q)

    def step():
        o = flashlib.attention(q, k, v, causal=True, method=method)
        return o, *torch.autograd.grad(o, (q, k, v), do)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x, y in zip((q, k, v), inputs(T_q=700, d=64, dtype=torch.bfloat16, seed=7), strict=True):
            x.copy_(y)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


# ------------------------------------------------------------------------------------ compile, ops, autocast


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=[needs_cuda, pytest.mark.gpu])]
)
@pytest.mark.parametrize("method", METHODS)
def test_torch_compile_without_a_graph_break(method, backend):
    q, k, v = inputs(T_k=13, requires_grad=True)

    def loss(q, k, v):
        o, lse = flashlib.attention(q * 1.5, k, v, causal=True, method=method, return_lse=True)
        return (o * o).sum() + lse.sum()

    torch.compiler.reset()
    plain = loss(q, k, v)
    compiled = torch.compile(loss, fullgraph=True, backend=backend)(q, k, v)
    assert torch.equal(plain, compiled) or backend == "inductor"
    gradients = [torch.autograd.grad(x, (q, k, v)) for x in (plain, compiled)]
    if backend != "inductor":
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    o = flashlib.attention(q * 1.5, k, v, causal=True)
    do = 2 * o.detach()
    dq, dk, dv = gradients[1]
    ones = torch.ones(q.shape[:3], device=DEVICE)
    testing.assert_gradients_within_budget(q * 1.5, k, v, do, dq / 1.5, dk, dv, causal=True, dlse=ones)


@pytest.mark.parametrize("method", ["flash1", "flash2"])
def test_torch_compile_where_any_order_is_allowed(method, any_order):
    q, k, v = inputs(T_k=13, requires_grad=True)

    def loss(q, k, v):
        return flashlib.attention(q, k, v, causal=True, method=method, deterministic=False).sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v)
    found = torch.autograd.grad(compiled, (q, k, v))
    testing.assert_gradients_within_budget(q, k, v, torch.ones_like(q), *found, causal=True)


def test_torch_compile_with_changing_lengths():
    torch.compiler.reset()
    compiled = torch.compile(flashlib.attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (5, 9, 70):
        q, k, v = inputs(T_q=T, T_k=T + 2)
        assert torch.equal(compiled(q, k, v, causal=True), flashlib.attention(q, k, v, causal=True))


@pytest.mark.parametrize(
    "sizes",
    [{}, {"T_k": 0}, {"layout": "strided", "H": 6, "H_kv": 2, "d_v": 24}],
    ids=["plain", "no keys", "strided"],
)
def test_custom_ops_are_registered_properly(sizes):
    q, k, v = inputs(T_q=5, **sizes)
    ops = torch.ops.flashlib
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    tiled = (ops.flash1, (True,)), (ops.flash2, (True, False)), (ops.hopper, (True, False))
    for op, options in ((ops.standard, ()), *tiled):
        torch.library.opcheck(op.default, (*leaves, True, 0.25, *options))
    o, lse, p = ops.standard(q, k, v, True, 0.25)
    do, dlse = torch.ones_like(o), torch.zeros_like(lse)
    torch.library.opcheck(ops.standard_backward.default, (q, k, v, p, o, do, dlse, 0.25))
    for op in (ops.flash_backward, ops.hopper_backward):
        torch.library.opcheck(op.default, (q, k, v, o, lse, do, dlse, True, 0.25, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_honoured(dtype):
    q, k, v = inputs(requires_grad=True)
    with torch.autocast(DEVICE, dtype=dtype):
        o, lse = flashlib.attention(q, k, v, causal=True, return_lse=True)
        mixed = flashlib.attention(q.to(dtype), k, v)
    assert o.dtype == mixed.dtype == dtype and lse.dtype == torch.float32
    cast = [x.detach().to(dtype) for x in (q, k, v)]
    testing.assert_within_budget(*cast, o, lse, causal=True)
    gradients = torch.autograd.grad(o.float().sum(), (q, k, v))
    assert all(g.dtype == torch.float32 for g in gradients)
    testing.assert_gradients_within_budget(
        *cast, torch.ones_like(o), *(g.to(dtype) for g in gradients), causal=True
    )
    with torch.autocast(DEVICE, dtype=dtype), pytest.raises(TypeError, match=r"^k: expected dtype"):
        flashlib.attention(q, k.double(), v)
    with torch.autocast(DEVICE, dtype=dtype, enabled=False):
        assert flashlib.attention(q, k, v).dtype == torch.float32


# ------------------------------------------------------------------------------------ imports and processes

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
CALL = "import torch, flashlib\nx = torch.ones(1, 1, 3, 16)\nprint(flashlib.attention(x, x, x).sum().item())"


def last_line(done):
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_importing_the_package_is_light():
    heavy = {"torch", "triton", "numpy", "matplotlib", "IPython"}
    done = run_python(f"import sys, flashlib\nprint(sorted({heavy} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


def test_public_names():
    names = {"FlashSelfAttention", "attention", "attention_varlen", "decode"}
    assert set(flashlib.__all__) == names <= set(dir(flashlib))
    assert all(callable(getattr(flashlib, name)) for name in flashlib.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'atention'.* attention"):
        flashlib.atention  # noqa: B018


def test_a_foreign_package_of_the_same_name_is_named(tmp_path):
    metadata = tmp_path / "flashlib-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: flashlib\nVersion: 9.9\n")
    line = last_line(run_python(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport flashlib"))
    assert (
        line.startswith("ImportError: an unrelated package named flashlib (version 9.9)")
        and "uninstall flashlib" in line
    )


needs_an_interpreter = pytest.mark.skipif(
    Version(version("triton")) < Version("3.7") and Version(np.__version__) >= Version("2.4"),
    reason="Triton 3.6 makes numbers of arrays with one element, which NumPy refuses since 2.4",
)


@needs_an_interpreter
def test_the_interpreter_is_chosen_without_a_gpu():
    environment = NO_GPU | {"TRITON_INTERPRET": None}
    done = run_python(CALL, **environment)
    assert done.stdout.strip() == "48.0", done.stderr


def test_an_explicit_choice_is_honoured():
    line = last_line(run_python(CALL, **NO_GPU, TRITON_INTERPRET="0"))
    assert line.startswith("ValueError: q: expected a CUDA tensor") and "TRITON_INTERPRET=1" in line


def test_triton_loaded_before_without_its_interpreter():
    line = last_line(run_python("import triton\n" + CALL, **NO_GPU, TRITON_INTERPRET=None))
    assert line.startswith("ImportError: Triton was imported before flashlib.kernels without its interpreter")
    assert "import flashlib.kernels first" in line and "TRITON_INTERPRET" in line


@needs_an_interpreter
def test_triton_loaded_before_with_its_interpreter():
    done = run_python("import triton\n" + CALL, **NO_GPU, TRITON_INTERPRET="1")
    assert done.stdout.strip() == "48.0", done.stderr
