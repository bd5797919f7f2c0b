"""Plans: prepared without a tensor, run for equal calls only, equal to operators."""

import functools
import gc
import itertools
import os
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from device import CUDA, DEVICE, HOPPER
from expected import refused, same
from histories import Blind, Passing
from torch._subclasses.fake_tensor import FakeTensorMode

import flashlib
from flashlib import internals, ops, plans, score_functions, testing
from flashlib.kernels import flash2


@pytest.fixture(autouse=True)
def no_plans():
    plans.PLANS.clear()
    yield
    plans.PLANS.clear()


def inputs(T=9, **changes):
    sizes = {"B": 2, "H": 2, "T_q": T, "d": 16, "H_kv": 1} | changes
    return testing.make_qkv(**sizes, device=DEVICE)


def gradients(o, lse, *leaves):
    do = torch.linspace(-1, 1, o.numel(), device=o.device, dtype=o.dtype)
    found = (do.view(o.shape), torch.ones_like(lse))
    return torch.autograd.grad((o, lse), leaves, found, retain_graph=True)


ROLES_OF_ATTENTION = {
    name: {"method": name} for name in ("standard", "flash1", "flash2", "auto")
} | {"window": {"window": (3, 1)}, "causal": {"causal": True}}
ROLES_OF_ATTENTION |= {"score": {"score": score_functions.softcap(1.5)}}


def without_method(options):
    return {name: value for name, value in options.items() if name != "method"}


# -- the same bits as the operators


LAYOUTS = {"flash1": "packed", "flash2": "contiguous", "auto": "transposed"}


@pytest.mark.parametrize(
    "method, layout",
    [
        pytest.param(*pair, marks=() if pair in LAYOUTS.items() else pytest.mark.gpu)
        for pair in itertools.product(LAYOUTS, LAYOUTS.values())
    ],
)
def test_plans_have_the_bits_of_the_operators(method, layout):
    for seed in range(2):
        leaves = inputs(B=1, layout=layout, seed=seed, requires_grad=True)
        options = {"causal": True, "method": method, "return_lse": True}
        found = flashlib.attention(*leaves, **options)
        wanted = torch.ops.flashlib.flash(*leaves, True, 0.25, method, True)
        assert same(found, wanted)
        assert same(gradients(*found, *leaves), gradients(*wanted, *leaves))
        # Alone, o needs no gradient of the log-sum-exp, which the operator takes too.
        alone = [torch.autograd.grad(x[0].sum(), leaves) for x in (found, wanted)]
        assert same(*alone)


def test_masks_and_packed_sequences_run_again():
    starts = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    for seed in range(2):
        leaves = inputs(seed=seed, requires_grad=True)
        o = flashlib.attention(*leaves, window=(3, 1))
        testing.assert_within_budget(*leaves, o, window=(3, 1))
        do = torch.ones_like(o)
        found = torch.autograd.grad(o, leaves, do)
        testing.assert_gradients_within_budget(*leaves, do, *found, window=(3, 1))
        rows = [x[0].transpose(0, 1) for x in leaves]
        o = flashlib.attention_varlen(*rows, starts, starts, 5, 5)
        for part in (slice(0, 4), slice(4, 9)):
            one = [x[:1, :, part] for x in leaves]
            testing.assert_within_budget(*one, o[part].transpose(0, 1)[None])


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("splits", [1, 3])
def test_decoding_runs_again(page, splits):
    for seed in range(2):
        q, k, v = inputs(T=1, T_k=32, seed=seed)
        lengths = torch.tensor([32, 7 + seed], dtype=torch.int32, device=DEVICE)
        table, cache = None, (k, v)
        if page:
            table = torch.arange(4, dtype=torch.int32, device=DEVICE).view(2, 2)
            pages = (x.unflatten(2, (2, page)).transpose(1, 2) for x in (k, v))
            cache = [x.flatten(0, 1).contiguous() for x in pages]
        options = {"seq_lens": lengths, "block_table": table, "splits": splits}
        o = flashlib.decode(q, *cache, **options)
        for b, T in enumerate(lengths.tolist()):
            one = slice(b, b + 1)
            tensors = q[one], k[one, :, :T], v[one, :, :T]
            testing.assert_within_budget(*tensors, o[one])
    assert len(plans.PLANS) == 1


# -- what a plan depends on

CHANGES = {
    "shape": lambda x: x[:, :, :8],
    "strides": lambda x: x.mT.contiguous().mT,
    "dtype": torch.Tensor.half,
}


@pytest.mark.parametrize("name", CHANGES)
def test_shape_strides_and_dtype_are_parts_of_a_kind(name):
    flashlib.attention(*inputs(H_kv=2), causal=True)
    qkv = [CHANGES[name](x) for x in inputs(H_kv=2, seed=1)]
    o = flashlib.attention(*qkv, causal=True)
    assert o.dtype == qkv[0].dtype and o.shape == qkv[0].shape
    testing.assert_within_budget(*qkv, o, causal=True)


class Subclass(torch.Tensor):
    pass


OTHERS = {
    "the same": torch.clone,
    "16 bytes on": lambda x: x.new_empty(68)[4:].view(8, 8),
    "shape": lambda x: x[:4],
    "strides": lambda x: x.T,
    "dtype": torch.Tensor.half,
    "device": lambda x: x.to("meta"),
    "address": lambda x: x.new_empty(65)[1:].view(8, 8),
    "gradient": lambda x: x.clone().requires_grad_(),
    "parameter": torch.nn.Parameter,
    "negation": torch._neg_view,
    "layout": torch.Tensor.to_sparse,
    "subclass": lambda x: x.as_subclass(Subclass),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "missing": lambda x: None,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_plan_may_depend_on(name):
    x = torch.zeros(8, 8, device=DEVICE)
    y = OTHERS[name](x)
    if name in ("negation", "layout", "subclass", "fake"):
        assert not plans.plain(x, y)
        return
    assert plans.plain(x, y) and plans.plain(x, x, None)
    if y is not None:
        same_as_x = name in ("the same", "16 bytes on", "gradient", "parameter")
        assert (plans.facts(x) == plans.facts(y)) == same_as_x


def test_a_missing_tensor_is_part_of_the_key():
    q, k, v = inputs(requires_grad=True)
    slopes, starts = torch.tensor([0.5, 0.1], device=DEVICE), packed_starts(4, 5)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    packed = functools.partial(flashlib.attention_varlen, *rows, starts, starts, 5, 5)
    o, lse = flashlib.attention(q, k, v, return_lse=True)
    gradient = functools.partial(torch.autograd.grad, inputs=(q,), retain_graph=True)
    calls = [
        packed, lambda: packed(alibi_slopes=slopes),
        lambda: gradient(o.sum())[0], lambda: gradient(o.sum() + lse.sum())[0],
    ]  # fmt: skip
    wanted = []
    for call in calls:
        plans.PLANS.clear()
        wanted.append(call())

    def right():
        return [torch.equal(call(), x) for call, x in zip(calls, wanted, strict=True)]

    plans.PLANS.clear()
    assert right() == right()[::-1] == [True] * 4


@pytest.mark.gpu
def test_views_with_shifted_pointers():
    base = torch.randn(3 * 2**16, device=DEVICE, dtype=torch.bfloat16)
    for shift in (0, 1, 8, 0, 3):
        q, k, v = (
            base[shift + n * 2**16 :][: 2**15].view(1, 2, 256, 64) for n in range(3)
        )
        testing.assert_within_budget(q, k, v, flashlib.attention(q, k, v))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("method", ["standard", "flash1", "flash2", "auto"])
def test_a_plan_belongs_to_its_device(method):
    for index in (0, 1, 0, 1):
        leaves = inputs(T=300, d=64, dtype=torch.bfloat16)
        leaves = [x.to(f"cuda:{index}").requires_grad_() for x in leaves]
        o = flashlib.attention(*leaves, method=method)
        testing.assert_within_budget(*leaves, o)
        do = torch.ones_like(o)
        found = torch.autograd.grad(o, leaves, do)
        testing.assert_gradients_within_budget(*leaves, do, *found)
    assert torch.cuda.current_device() == 0


def test_the_launcher_is_part_of_the_key(monkeypatch):
    q, k, v = inputs()

    def launcher(causal):
        return lambda *tensors: flash2.forward(*tensors, causal, 0.25)

    full, masked = launcher(False), launcher(True)
    calls = [(full, False), (masked, True), (full, False)]
    for run, causal in calls:
        o, _ = plans.run(run, (q, k, v))
        testing.assert_within_budget(q, k, v, o, causal=causal)
    monkeypatch.setattr(plans, "PLANS", Blind(lambda launcher, *others: others))
    found = [plans.run(run, (q, k, v))[0] for run, _ in calls]
    assert torch.equal(found[0], found[1])  # wrong without it


def test_a_plan_refuses_what_the_deterministic_mode_forbids():
    leaves = inputs(requires_grad=True)
    o = flashlib.attention(*leaves, method="flash2", deterministic=False)
    torch.autograd.grad(o.sum(), leaves, retain_graph=True)
    torch.use_deterministic_algorithms(True)
    try:
        with refused(ValueError, "deterministic: expected"):
            torch.autograd.grad(o.sum(), leaves)
    finally:
        torch.use_deterministic_algorithms(False)


def test_options_are_parts_of_the_key():
    qkv = inputs(B=1, H_kv=2, requires_grad=True)
    levels = ((False, True), (None, -0.3, 0.5), ("flash2", "auto"))
    for causal, scale, method in itertools.product(*levels):
        options = {"causal": causal, "scale": scale}
        for _ in range(2):
            o = flashlib.attention(*qkv, **options, method=method)
            testing.assert_within_budget(*qkv, o, **options)
    # 1 == True, and 1.0 == True.
    flashlib.attention(*qkv, causal=True, scale=1.0)
    for wrong in ({"causal": 1}, {"scale": True}, {"deterministic": 1}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            flashlib.attention(*qkv, **({"causal": True, "scale": 1.0} | wrong))


def test_a_check_that_passed_is_not_one_of_another_function():
    q, k, v = (x[0].transpose(0, 1) for x in inputs())
    starts = torch.tensor([0, 9], dtype=torch.int32, device=DEVICE)
    flashlib.attention_varlen(q, k, v, starts, starts, 9, 9)
    with refused(ValueError, "q: expected 4 dimensions"):
        flashlib.attention(q, k, v)


def test_an_error_leaves_nothing():
    q, k, v = inputs()
    for _ in range(2):
        with refused(ValueError, "k: expected head dimension 16"):
            flashlib.attention(q, k[..., :15], v)
        if not HOPPER:
            with refused(ValueError, "method: 'hopper' expected a Hopper GPU"):
                flashlib.attention(q, k, v, method="hopper")
    assert not plans.PLANS


# -- one tensor in two roles, then two tensors


def packed_starts(*lengths):
    starts = [0, *itertools.accumulate(lengths)]
    return torch.tensor(starts, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("options", ROLES_OF_ATTENTION.values(), ids=ROLES_OF_ATTENTION)
def test_attention_in_which_one_tensor_has_two_roles(options):
    leaves = inputs(B=1, H_kv=2, requires_grad=True)
    rules, one = without_method(options), (0, 0, 0)
    for roles in (one, (0, 1, 1), (0, 1, 0), (0, 0, 2), (0, 1, 2), one):
        tensors = [leaves[n] for n in roles]
        alone = [x.detach() for x in tensors]
        own = [leaves[n] for n in sorted({*roles})]
        o = flashlib.attention(*tensors, **options)
        testing.assert_within_budget(*alone, o, **rules)
        for do in (o.detach(), alone[2], torch.ones_like(o), tensors[0]):
            wanted = testing.oracle_gradients(*alone, do.detach(), **rules)
            sums = [
                sum(dx for n, dx in zip(roles, wanted, strict=True) if n == m)
                for m in sorted({*roles})
            ]
            found = torch.autograd.grad(o, own, do, retain_graph=True)
            for dx, expected in zip(found, sums, strict=True):
                torch.testing.assert_close(dx.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_score_and_sinks_that_read_one_tensor_or_two():
    q, k, v = inputs(H_kv=2)
    numbers = [torch.tensor(x, device=DEVICE) for x in ((0.5, 0.1), (0.2, 0.9))]
    for n, m, i in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (1, 1, 0)):
        score = score_functions.alibi(numbers[n])
        options = {"score": score, "sinks": numbers[m], "alibi_slopes": numbers[i]}
        o, lse = flashlib.attention(q, k, v, return_lse=True, **options)
        testing.assert_within_budget(q, k, v, o, lse, **options)


def test_packed_sequences_in_which_one_tensor_has_two_roles():
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs(H_kv=2))
    one, other = packed_starts(4, 5), packed_starts(7, 2)
    for tensors, starts in (
        ((q, q, q), (one, one)), ((q, k, v), (one, other)), ((q, k, k), (other, one)),
        ((q, k, v), (one, one)), ((v, k, v), (other, other)),
    ):  # fmt: skip
        o = flashlib.attention_varlen(*tensors, *starts, 9, 9)
        (q_start, q_end), (k_start, k_end) = (
            zip(*itertools.pairwise(x.tolist()), strict=True) for x in starts
        )
        for n in range(2):
            queries, keys = slice(q_start[n], q_end[n]), slice(k_start[n], k_end[n])
            rows = (tensors[0][queries], tensors[1][keys], tensors[2][keys])
            alone = [x.transpose(0, 1)[None] for x in rows]
            testing.assert_within_budget(*alone, o[queries].transpose(0, 1)[None])


@pytest.mark.parametrize("paged", [False, True])
def test_decoding_in_which_one_tensor_has_two_roles(paged):
    q, k, v = inputs(T=1, T_k=16, H_kv=2)
    lengths = torch.tensor([16, 11], dtype=torch.int32, device=DEVICE)
    table = lengths.new_tensor([[0], [1]]) if paged else None
    numbers = [torch.tensor(x, device=DEVICE) for x in ((0.5, 0.1), (0.2, 0.9))]
    for n, cache in enumerate(((k, k), (k, v), (v, v), (v, k))):
        score, sinks = score_functions.alibi(numbers[n // 2]), numbers[n % 2]
        options = {"score": score, "sinks": sinks}
        for changes in ({}, options):
            o = flashlib.decode(
                q, *cache, seq_lens=lengths, block_table=table, **changes
            )
            for b, T in enumerate(lengths.tolist()):
                alone = [x[b : b + 1, :, :T] for x in cache]
                testing.assert_within_budget(
                    q[b : b + 1], *alone, o[b : b + 1], **changes
                )


# -- what is not replayed


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_traced_and_transformed_calls_need_the_dispatcher():
    x = torch.zeros(4, device=DEVICE)
    found = []

    def look(y):
        found.append(plans.plain(x, None))
        return y

    assert not plans.plain(x, "x")
    with torch.autograd.forward_ad.dual_level():
        look(x)
    with FakeTensorMode() as mode:
        look(x)
        assert not plans.plain(mode.from_tensor(x))
    torch.func.vmap(look)(x)
    torch.func.grad(lambda y: look(y).sum())(x)
    torch.jit.trace(look, x, check_trace=False)
    assert found == [False] * 5 and plans.plain(x, None)


def test_a_lazy_negation_is_resolved():
    q, k, v = inputs()
    flashlib.attention(q, k, v)
    o = flashlib.attention(torch._neg_view(q), k, v)
    testing.assert_within_budget(-q, k, v, o)


# -- what a launcher sees


def described(x):
    """The Spec of a tensor in a plan of its own, and the plan."""
    specs = []
    plan = plans.Plan(specs.append, (x,))
    return specs[0], plan


@pytest.mark.parametrize("name", ["the same", "shape", "strides", "dtype", "address"])
def test_a_spec_answers_as_its_tensor(name):
    x = OTHERS[name](torch.zeros(8, 8, device=DEVICE))
    y, _ = described(x)
    for ask in (
        "shape", "dtype", "device", "layout", "ndim", "is_cuda",
    ):  # fmt: skip
        assert getattr(x, ask) == getattr(y, ask), ask
    for ask in ("stride", "numel", "element_size", "is_contiguous"):
        assert getattr(x, ask)() == getattr(y, ask)(), ask
    assert y.data_ptr() == x.data_ptr() % 16
    assert (y.mT.shape, y.mT.stride()) == (x.mT.shape, x.mT.stride())


def test_a_spec_has_no_values():
    y, _ = described(torch.zeros(3, 4))
    for ask in (
        float,
        bool,
        list,
        lambda y: y[0],
        lambda y: y.tolist(),
        lambda y: y + 1,
    ):
        with pytest.raises((TypeError, AttributeError)):
            ask(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_a_launcher_asks_for_is_what_pytorch_does(dtype):
    def launcher(x, y):
        z = (-x.to(torch.float32)).add_(y).mul_(2.0)
        return z, x.contiguous(), y.new_empty(2, 3).fill_(5.0), y.new_empty(4).zero_()

    x = torch.randn(5, 7, device=DEVICE).to(dtype).T
    y = torch.randn(7, 5, device=DEVICE)
    for tensors in ((x, y), (y, y), (y, x.T.float().T)):
        first, second = tensors
        wanted = (
            2.0 * (second - first.float()), first.contiguous(),
            torch.full((2, 3), 5.0, device=DEVICE), torch.zeros(4, device=DEVICE),
        )  # fmt: skip
        found = plans.run(launcher, tensors)
        assert same(found, wanted)
        assert found[1].is_contiguous() and found[1].dtype == first.dtype


def test_a_launcher_returns_a_tensor_a_tuple_or_nothing():
    def launcher(x, count):
        return (x.new_empty(2).fill_(1.0), x, (x,), None, (x, x))[count]

    x = torch.zeros(2, device=DEVICE)
    one, same_as_x, alone, nothing, pair = (
        plans.run(launcher, (x,), (n,)) for n in range(5)
    )
    assert torch.equal(one, torch.ones_like(x)) and same_as_x is x and nothing is None
    assert [y is x for y in (*alone, *pair)] == [True] * 3


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.contiguous(),
        lambda x: x.to(torch.float16),
        lambda x: -x,
        lambda x: x.zero_(),
        lambda x: x.new_empty(x.shape).copy_(x),
        lambda x: x,
        lambda x: (x, x),
    ],
)
def test_a_transposed_spec_is_for_kernels_only(use):
    """A run has no tensor with these strides."""
    with pytest.raises(TypeError, match="kernels only"):
        plans.run(lambda x: use(x.mT), (torch.zeros(2, 3, device=DEVICE),))


def test_tensors_may_be_inside_of_tuples():
    @plans.planned
    def launcher(pair, x, *, factor=1.0):
        inner(pair[1], x)
        return (x.new_empty(x.shape).copy_(pair[0]).mul_(factor),)

    @plans.planned
    def inner(x, y):
        x.copy_(y)

    a, b, c = (torch.full((3,), n, device=DEVICE) for n in (1.0, 2.0, 3.0))
    for pair, x, factor in (((a, b), c, 2.0), ((c, b), c, 4.0), ((a, b), c, 2.0)):
        (found,) = launcher(pair, x, factor=factor)
        assert torch.equal(found, pair[0] * factor) and torch.equal(b, c)


# -- memory, threads, processes


def test_plans_keep_no_tensors():
    leaves = inputs(requires_grad=True)
    for _ in range(2):
        o = flashlib.attention(*leaves)
        o.sum().backward()
    alive = [weakref.ref(x) for x in (*leaves, o, *(x.grad for x in leaves))]
    del leaves, o
    gc.collect()
    assert plans.PLANS and all(x() is None for x in alive)


def test_many_lengths_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(plans, "MOST_KEPT", 4)
    q, k, v = inputs(T=6)
    for T in (*range(1, 7), 3, 3, 6):
        one = q, k[:, :, :T], v[:, :, :T]
        testing.assert_within_budget(*one, flashlib.attention(*one))
        assert len(plans.PLANS) <= 4


def test_the_oldest_plan_makes_way(monkeypatch):
    monkeypatch.setattr(plans, "MOST_KEPT", 4)
    q, k, v = inputs(T=6)
    for T in range(1, 6):
        before = [*plans.PLANS]
        flashlib.attention(q, k[:, :, :T], v[:, :, :T])
        assert [*plans.PLANS][:-1] == before[-3:]


def test_a_tensor_map_is_made_once_for_each_address(monkeypatch):
    made = []

    def make(descriptor, address, about):
        made.append(address)
        return descriptor, address, about

    monkeypatch.setattr(internals, "tensor_map", make)
    monkeypatch.setattr(plans, "MOST_KEPT", 8)
    tensors = [torch.zeros(4, device=DEVICE) for _ in range(12)]
    spec, _ = described(tensors[0])
    descriptor = SimpleNamespace(base=spec)
    maps = plans.TensorMap(descriptor, "about")
    for x in (*tensors[:3], *tensors[:3]):
        assert maps([x]) == (descriptor, x.data_ptr(), "about")
    assert made == [x.data_ptr() for x in tensors[:3]]
    for x in tensors:
        assert maps([x])[1] == x.data_ptr() and len(maps.known) <= 8


def test_threads_share_plans():
    qkv = inputs(H_kv=2)
    wanted = {T: flashlib.attention(qkv[0][:, :, :T], *qkv[1:]) for T in range(5, 9)}
    plans.PLANS.clear()
    found = []

    def work():
        for T in (*range(5, 9), *range(5, 9)):
            found.append((T, flashlib.attention(qkv[0][:, :, :T], *qkv[1:])))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24 and all(torch.equal(o, wanted[T]) for T, o in found)


@pytest.mark.skipif(CUDA, reason="CUDA does not survive a fork")
def test_plans_survive_a_fork():
    q, k, v = inputs()
    wanted = flashlib.attention(q, k, v)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(flashlib.attention(q, k, v), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- memory order


def test_expanded_inputs_get_contiguous_results():
    q, k, v = inputs()
    k, v = (x.expand(2, 2, 9, 16) for x in (k, v))
    testing.assert_within_budget(q, k, v, flashlib.attention(q, k, v))
    assert flashlib.attention(k, k, v).is_contiguous()
    assert plans.empty_like(k, 8).stride() == (144, 72, 8, 1)


def test_the_operators_are_what_a_step_runs_under_a_mode():
    q, k, v = inputs()
    options = (False, 0.25, "flash2", True)
    found = ops.flash(q, k, v, *options)
    with Passing():
        assert same(found, ops.flash(q, k, v, *options))
    assert len(plans.PLANS) == 1
