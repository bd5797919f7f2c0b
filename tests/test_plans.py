"""Launch plans: replayed for equal calls only, with the operators' bits."""

import gc
import itertools
import os
import threading
import weakref

import pytest
import torch
from cases import CUDA, DEVICE, HOPPER, refused, same
from torch._subclasses.fake_tensor import FakeTensorMode

import flashlib
from flashlib import ops, plans, testing
from flashlib.kernels import flash2


@pytest.fixture(autouse=True)
def no_plans():
    plans.clear()
    yield
    plans.clear()


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
def test_replays_have_the_bits_of_the_operators(method, layout):
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


def test_masks_and_packed_sequences_are_replayed():
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
    assert None not in plans.PLANS.values()


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("splits", [1, 3])
def test_decoding_is_replayed(page, splits):
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
            given = q[one], k[one, :, :T], v[one, :, :T]
            testing.assert_within_budget(*given, o[one])
    assert len(plans.PLANS) == 1 and None not in plans.PLANS.values()


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
def test_a_kind_with_guards_is_the_one_without(name):
    x = torch.zeros(8, 8, device=DEVICE)
    y = OTHERS[name](x)
    kinds = plans.kind(x, y), plans.kind(y, x)
    same_as_x = name in ("the same", "16 bytes on", "gradient", "parameter")
    assert (kinds[0] == plans.kind(x, x.clone())) == same_as_x
    assert plans.kind(x, x) != plans.kind(x, x.clone())
    has_none = name in ("negation", "layout", "subclass", "fake")
    assert kinds == (None, None) if has_none else None not in kinds
    for first in ((x, x), (x, y), (y, x)):
        plans.clear()
        for _ in range(2):
            plans.kind(*first)
        # Twice, since the second time may make guards.
        assert [(plans.kind(x, y), plans.kind(y, x)) for _ in range(2)] == [kinds] * 2


def test_guards_recognize_a_kind_that_comes_twice(monkeypatch):
    x = torch.zeros(8, 8, device=DEVICE)
    made, make = [], plans.guards_of
    monkeypatch.setattr(plans, "guards_of", lambda y: made.append(y) or make(y))
    for y in (x, x[:4], x, x[:4]):
        plans.kind(y, None)
    assert not made
    found = [plans.kind(x, None) for _ in range(2)]
    assert len(made) == 1
    monkeypatch.setattr(plans, "PLAIN", ())  # nothing has a kind, except by guards
    assert plans.kind(x.clone(), None) is found[1] and found[0] == found[1]
    torch.use_deterministic_algorithms(True)
    try:
        assert plans.kind(x, None) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert plans.kind(x.new_empty(65)[1:].view(8, 8), None) is None
    assert plans.kind(x.T, None) is None and plans.kind(None, x) is None


def test_there_are_no_guards_that_would_refuse_their_own_tensors():
    x = torch.zeros(8, 8, device=DEVICE)
    for pair in ((x, x), (x, OTHERS["address"](x))):
        for _ in range(3):
            plans.kind(*pair)
        assert plans.LAST[False, torch.Tensor, torch.Tensor][0] is None


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


def test_the_launcher_is_part_of_the_key():
    q, k, v = inputs()

    def launcher(causal):
        return lambda *tensors: flash2.forward(*tensors, causal, 0.25)

    full, masked = launcher(False), launcher(True)
    for run, causal in ((full, False), (masked, True), (full, False)):
        o, _ = plans.run(run, plans.kind(q, k, v), (q, k, v), ())
        testing.assert_within_budget(q, k, v, o, causal=causal)


def test_a_replay_refuses_what_the_deterministic_mode_forbids():
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
    leaves = inputs(H_kv=2, requires_grad=True)
    for roles in ((0, 0, 0), (0, 1, 1), (0, 1, 0), (0, 0, 2), (0, 1, 2)):
        q, k, v = given = [leaves[n] for n in roles]
        o = flashlib.attention(*given, **options)
        testing.assert_within_budget(*given, o, **without_method(options))
        for do in (o.detach(), v.detach(), torch.ones_like(o), q):
            alone = [x.detach().clone().requires_grad_() for x in given]
            again = flashlib.attention(*alone, **options)
            wanted = torch.autograd.grad(again, alone, do.detach().clone())
            sums = [
                sum(dx for n, dx in zip(roles, wanted, strict=True) if n == m)
                for m in sorted({*roles})
            ]
            own = [leaves[n] for n in sorted({*roles})]
            found = torch.autograd.grad(o, own, do, retain_graph=True)
            for dx, expected in zip(found, sums, strict=True):
                torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-5)


def test_packed_sequences_in_which_one_tensor_has_two_roles():
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs(H_kv=2))
    one, other = packed_starts(4, 5), packed_starts(7, 2)
    for given, starts in (
        ((q, q, q), (one, one)), ((q, k, v), (one, other)), ((q, k, k), (other, one)),
        ((q, k, v), (one, one)), ((v, k, v), (other, other)),
    ):  # fmt: skip
        o = flashlib.attention_varlen(*given, *starts, 9, 9)
        (q_start, q_end), (k_start, k_end) = (
            zip(*itertools.pairwise(x.tolist()), strict=True) for x in starts
        )
        for n in range(2):
            queries, keys = slice(q_start[n], q_end[n]), slice(k_start[n], k_end[n])
            rows = (given[0][queries], given[1][keys], given[2][keys])
            alone = [x.transpose(0, 1)[None] for x in rows]
            testing.assert_within_budget(*alone, o[queries].transpose(0, 1)[None])


@pytest.mark.parametrize("paged", [False, True])
def test_decoding_in_which_one_tensor_has_two_roles(paged):
    q, k, v = inputs(T=1, T_k=16, H_kv=2)
    lengths = torch.tensor([16, 11], dtype=torch.int32, device=DEVICE)
    table = lengths.new_tensor([[0], [1]]) if paged else None
    for cache in ((k, k), (k, v), (v, v), (v, k)):
        o = flashlib.decode(q, *cache, seq_lens=lengths, block_table=table)
        for b, T in enumerate(lengths.tolist()):
            alone = [x[b : b + 1, :, :T] for x in cache]
            testing.assert_within_budget(q[b : b + 1], *alone, o[b : b + 1])


# -- what is not replayed


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("guarded", [False, True])
def test_tracing_and_transformed_calls_have_no_kind(guarded):
    x = torch.zeros(4, device=DEVICE)
    found = []

    def look(y):
        found.append(plans.kind(x, None))
        return y

    for _ in range(2 * guarded):
        plans.kind(x, None)
    assert plans.kind(x, "x") is None
    with torch.autograd.forward_ad.dual_level():
        look(x)
    with FakeTensorMode() as mode:
        look(x)
        assert plans.kind(mode.from_tensor(x)) is None
    torch.func.vmap(look)(x)
    torch.func.grad(lambda y: look(y).sum())(x)
    torch.jit.trace(look, x, check_trace=False)
    assert found == [None] * 5 and plans.kind(x, None) is not None


def test_a_lazy_negation_is_resolved():
    q, k, v = inputs()
    flashlib.attention(q, k, v)
    o = flashlib.attention(torch._neg_view(q), k, v)
    testing.assert_within_budget(-q, k, v, o)


def test_a_launcher_whose_kernels_were_not_noted_is_not_replayed():
    q, k, v = inputs()
    for seed in range(2):
        q, k, v = inputs(seed=seed)
        o = flashlib.attention(q, k, v, method="standard")
        testing.assert_within_budget(q, k, v, o)
    assert list(plans.PLANS.values()) == [None]


# -- memory, threads, processes


def test_plans_keep_no_tensors():
    leaves = inputs(requires_grad=True)
    for _ in range(2):
        o = flashlib.attention(*leaves)
        o.sum().backward()
    alive = [weakref.ref(x) for x in (*leaves, o, *(x.grad for x in leaves))]
    del leaves, o
    gc.collect()
    assert plans.PLANS and all(known for known, _ in plans.LAST.values())
    assert all(x() is None for x in alive)


def test_many_lengths_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(plans, "LARGEST", 4)
    q, k, v = inputs(T=6)
    for T in (*range(1, 7), 3, 3, 6):
        one = q, k[:, :, :T], v[:, :, :T]
        testing.assert_within_budget(*one, flashlib.attention(*one))
        assert len(plans.PLANS) <= 4 and len(plans.ACCEPTED) <= 4


def test_a_tensor_map_is_made_once_for_each_address(monkeypatch):
    made = []

    class Descriptor:
        def at(self, address):
            made.append((self, address))
            return made[-1]

    monkeypatch.setattr(plans, "LARGEST", 1)
    maps, pair = plans.TensorMaps(), (Descriptor(), Descriptor())
    wanted = list(itertools.product(pair, (0, 16)))
    assert [maps[key] for key in wanted * 2] == wanted * 2 and made == wanted
    for address in range(100):
        assert maps[pair[0], address] == (pair[0], address) and len(maps) <= 8


@pytest.mark.gpu  # the interpreter runs in one thread
def test_threads_share_plans():
    qkv = inputs(H_kv=2)
    wanted = {T: flashlib.attention(qkv[0][:, :, :T], *qkv[1:]) for T in range(5, 9)}
    plans.clear()
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


def test_the_operators_are_what_a_step_runs_without_a_kind():
    q, k, v = inputs()
    options = (False, 0.25, "flash2", True)
    found = ops.flash(None, (q, k, v), options)
    assert same(found, ops.flash(plans.kind(q, k, v), (q, k, v), options))
    assert len(plans.PLANS) == 1
