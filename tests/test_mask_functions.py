"""Masks as functions, biases and sinks: one definition for reference and kernels; and
random calls, with scores as functions too.
"""

import itertools
import random
import re

import numpy as np
import pytest
import torch
from cases import output_gradients
from device import DEVICE
from expected import same
from masks_of_tests import far, function_of_text, some_masks
from processes import ROOT, output, run_python
from scores_of_tests import some_scores
from torch._subclasses.fake_tensor import FakeTensorMode

import flashlib
from flashlib import masks, score_mods, testing
from flashlib.block_lists import BlockLists
from flashlib.masks import Mask, at, div, mod
from flashlib.reference import masks as reference
from flashlib.score_functions import Score, alibi, softcap

pytestmark = pytest.mark.usefixtures("nan_filled")


# -- functions


@pytest.mark.parametrize(("T_q", "T_k"), [(5, 5), (3, 7), (7, 3)])
def test_functions_mean_what_they_say(T_q, T_k):
    """Pair by pair, from the words of the docstrings."""
    first, ids = torch.tensor([1, 0]), torch.tensor([0, 0, 1, 1, 2, 2, 2])[:T_k]
    last = torch.tensor([T_k, T_k - 1])
    meant = {
        masks.causal(): lambda b, p, j: j <= p,
        masks.window(2, 1): lambda b, p, j: p - 2 <= j <= p + 1,
        masks.prefix(2): lambda b, p, j: j < 2 or j <= p,
        masks.chunks(3): lambda b, p, j: j <= p and j // 3 == p // 3,
        masks.documents(ids): lambda b, p, j: ids[max(p, 0)] == ids[j],
        masks.padding(first, last): lambda b, p, j: first[b] <= j < last[b],
        ~masks.causal(): lambda b, p, j: j > p,
    }
    for mask, rule in meant.items():
        seen = mask.visible(2, 3, T_q, T_k)
        for b, h, i, j in itertools.product(range(2), range(3), range(T_q), range(T_k)):
            assert seen[b, h, i, j] == rule(b, i + T_k - T_q, j)


def test_which_masks_are_narrow():
    ids, of_batches = torch.zeros(8, dtype=torch.int32), torch.zeros(2, 8).int()
    causal, window = masks.causal(), masks.window(3, None)
    wide = masks.documents(ids), masks.prefix(2), causal | masks.chunks(4), ~causal
    for mask in wide:
        assert not score_mods.mask_of(mask).narrow(False)
    own = [masks.documents(x) & window & causal for x in (ids, of_batches)]
    own += [wide[0] & masks.window(5, 0), masks.chunks(4), wide[0] & masks.chunks(4)]
    own += [
        wide[0] & masks.window(5, 0) & window
    ]  # the last window is not the only one
    for mask in own:
        assert score_mods.mask_of(mask).narrow(False)
    assert [score_mods.mask_of(x).narrow(True) for x in wide[:2]] == [True, False]
    assert (window & causal & masks.window(5, 0)).reach() == 3


def test_chosen_blocks():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 10, 16, generator=generator) for _ in range(3))
    q, k, v = (x.to(DEVICE) for x in (q, k, v))
    rows, cols = (torch.arange(10) // n for n in (4, 2))
    for heads in (1, 3):
        chosen = torch.rand(2, heads, 3, 5, generator=generator) < 0.5
        seen = chosen[:, :, rows][..., cols].expand(2, 3, 10, 10).to(DEVICE)
        chosen = chosen.to(DEVICE)
        mask = masks.blocks(chosen, 4, 2)
        assert mask.visible(2, 3, 10, 10, device=DEVICE).equal(seen)
        expected = flashlib.attention(q, k, v, mask=seen.contiguous())
        assert flashlib.attention(q, k, v, mask=mask).equal(expected)
        for few in (chosen[:, :, :2], chosen[..., :4]):
            small = masks.blocks(few.contiguous(), 4, 2)
            message = r"mask: expected chosen \[B, [1H], T_k/4, T_k/2\]"
            with pytest.raises(ValueError, match=message):
                flashlib.attention(q, k, v, mask=small)
    more = torch.cat([q, q[:1]])
    with pytest.raises(ValueError, match="mask: expected chosen"):
        flashlib.attention(more, more, more, mask=mask)


def test_an_index_outside_means_the_nearest_inside():
    x = torch.tensor([[5, 6], [7, 8]])
    assert at(x, torch.tensor([-3, 9]), torch.tensor([9, -1])).tolist() == [6, 7]


def test_equal_definitions_have_one_key():
    ids = torch.zeros(2, 8, dtype=torch.int64)
    assert masks.prefix(3).key == masks.prefix(3).key
    assert masks.documents(ids).key == masks.documents(ids + 1).key
    different = [
        masks.prefix(3), masks.prefix(4), masks.causal(), masks.documents(ids),
        masks.documents(ids.int()), masks.documents(ids[0]),
        masks.causal() & masks.prefix(3), masks.prefix(3) & masks.causal(),
        masks.causal() | masks.prefix(3), ~masks.causal(),
    ]  # fmt: skip
    assert len({mask.key for mask in different}) == len(different)


def test_masks_and_scores_print_their_functions():
    ids = torch.zeros(2, 8, dtype=torch.int64)
    mask = masks.window(3, 0) & ~masks.documents(ids)
    assert repr(mask) == (
        "<Mask both(window(3, 0), opposite(documents_of_batches(torch.int64[2, 8])))>"
    )
    score = softcap(2).then(alibi(torch.ones(4)))
    text = "one_after_other(softcap(2.0, 0.5), alibi(torch.float32[4]))"
    assert repr(score) == f"<Score {text}>"
    q, k, v = testing.make_qkv(1, 2, 8, 16, device=DEVICE)
    lists = BlockLists(masks.causal(), q, k, v)
    sizes = "[B, H, H_kv, T_q, T_k] = [1, 2, 2, 8, 8]"
    assert repr(lists) == f"<BlockLists <Mask causal()> {sizes}>"


WRONG = {
    "b, h, p, j: p // 2 == j": r"div\(a, b\) and mod\(a, b\), .* got // or % in f",
    "b, h, p, j: (p < j) and (j < 3)": "got and, or, not or a chain in f",
    "b, h, p, j: 0 < j < p": "got and, or, not or a chain in f",
    "b, h, p, j: j < limit": "got 'limit' in f: pass it as an argument",
    "b, h, p: p > 0": r"a function of \(b, h, p, j\) and 0 more, got f",
    "batch, h, p, j: batch > 0": r"a function of \(b, h, p, j\) and 0 more, got f",
    "b, h, p, j, *, w=3: j < w": r"a function of \(b, h, p, j\) and 0 more, got f",
    "b, h, p, *j: p > 0": r"a function of \(b, h, p, j\) and 0 more, got f",
    "b, h, p, j: p - j": "a function that returns booleans, got torch.int32",
    "b, h, p, j: True": "a function that returns booleans, got bool",
    "b, h, p, j: p @ j > 1.5j": "a function that PyTorch can evaluate",
    "b, h, p, j: at(p, j)": "got 'at' in f: pass it as an argument",  # another one
    "b, h, p, j: (lambda x: x < p)(j)": "a function without functions",
    "b, h, p, j: p[j] < 3": r"at\(x, a, b, ...\) for an element .* got p\[j\] in f",
    "b, h, p, j: p**2 < j": r"products in place of powers, .* got p \*\* 2 in f",
    "b, h, p, j: p < 2147483648": "integers of 32 bits, got 2147483648 in f",
    "b, h, p, j: p > -2147483648": "integers of 32 bits, got 2147483648 in f",
    "b, h, p, j: +p < j": r"no \+ in front of an operand, got \+p in f",
    "b, h, p, j: div(p * 0.5, 2) < j": "div: expected integers, got torch.float32",
    "b, h, p, j: mod(j, 2.0) < 1": "mod: expected integers, got float",
    "b, h, p, j: div(p < j, 2) < 1": "div: expected integers, got torch.bool",
    "b, h, p, j: (j <= p) + (j < 2)": r"booleans: .*\| in place of \+ .* got add",
    "b, h, p, j: (j <= p) * (j < 2)": r"booleans: .* & in place of \*, got mul",
    "b, h, p, j: (j <= p) - (j < 2)": "booleans: .* got sub",
    "b, h, p, j: (j <= p) + (3 < 4)": "booleans: .* got add",
    "b, h, p, j: True - (j <= p)": "booleans: .* got __rsub__",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_a_function_may_not_do_is_named(text):
    parameters, result = text.split(": ", 1)
    scope = {"limit": 3, "at": max, "div": div, "mod": mod}
    function = function_of_text(f"def f({parameters}): return {result}\n", scope)
    with pytest.raises((TypeError, ValueError), match=f"^mask: .*{WRONG[text]}"):
        Mask(function)


def test_a_function_may_not_change_its_parameters():
    for make_one, text, message in (
        (Mask, "b, h, p, j):\n p -= j\n return p < 3\n", "p = p - j, got p -= j in f"),
        (Score, "s, b, h, p, j):\n s += 1\n return s\n", "s = s + 1, got s += 1 in f"),
    ):
        with pytest.raises(ValueError, match=f": expected {re.escape(message)}"):
            make_one(function_of_text(f"def f({text}", {}))


def marked(b, h, p, j, flags):
    return at(flags, p) + at(flags, j)


def raised(s, b, h, p, j, flags):
    return s + at(flags, p) * at(flags, j)


def test_booleans_of_tensors_are_not_added():
    flags, message = torch.ones(3) > 0, "two booleans: expected | in place of +"
    for make_one in (lambda: Mask(marked, flags), lambda: Score(raised, flags)):
        with pytest.raises(ValueError, match=re.escape(message)):
            make_one()


def test_arguments_of_masks_are_checked():
    lambda_ = lambda b, h, p, j: j < p  # noqa: E731
    ids = torch.zeros(0, dtype=torch.int64)
    for arguments, message in (
        ((lambda_,), "a function that is defined by def, got a lambda"),
        ((3,), "a function that is defined by def, got 3"),
        ((far, 1.5), "integers and tensors as arguments, got float"),
        ((far, np.int64(1)), "integers and tensors as arguments, got numpy.int64"),
        ((far, True), "integers and tensors as arguments, got bool"),
        ((far, 2**31), "integers of 32 bits, got"),
        ((far, torch.ones(3)), "tensors of int32, int64 or bool, got torch.float32"),
        ((far, ids), "tensors with 1 to 4 dimensions and at least one element"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^mask: expected {message}"):
            Mask(*arguments)
    with pytest.raises(
        TypeError, match=r"^mask: expected a Mask on both sides, got int"
    ):
        masks.causal() & 3


def test_arguments_of_masks_with_names_are_checked():
    one, flags = torch.zeros(2, dtype=torch.int64), torch.ones(2, 2) > 0
    for call, message in (
        (lambda: masks.documents([0, 0, 1]),
         r"ids: expected a tensor \[T_k\] or \[B, T_k\], got list"),
        (lambda: masks.documents(one.view(1, 1, 2)),
         r"ids: expected a tensor \[T_k\] or \[B, T_k\], got \[1, 1, 2\]"),
        (lambda: masks.padding(one[None], one),
         r"starts: expected a tensor \[B\], got \[1, 2\]"),
        (lambda: masks.padding(one, one[None]),
         r"ends: expected a tensor \[B\], got \[1, 2\]"),
        (lambda: masks.tree(flags[0]),
         r"ancestors: expected a tensor \[T, T\], got \[2\]"),
        (lambda: masks.blocks(flags[None], 4, 4),
         r"chosen: expected a tensor \[B, H, .*\], got \[1, 2, 2\]"),
        (lambda: masks.blocks(flags[None, None], -4, 4),
         "size_q: expected at least 1, got -4"),
        (lambda: masks.blocks(flags[None, None], 4, 2.0),
         "size_k: expected an integer, got float"),
        (lambda: masks.chunks(0), "size: expected at least 1, got 0"),
        (lambda: alibi([1.0, 2.0]),
         r"slopes: expected a tensor \[H\] or \[B, H\], got list"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call()


def wraps(b, h, p, j, n):
    return p * n >= 0


def scaled(s, b, h, p, j, n):
    return s + 1.0 * (p * n >= 0)


def test_positions_have_32_bits():
    """In the reference too, where a product of them wraps as in a kernel."""
    q, k, v = testing.make_qkv(1, 1, 5, 16, device=DEVICE)
    mask, score = Mask(wraps, 2**30), Score(scaled, 2**30)
    positive = [True, True, False, False, True]  # 0, 2^30, 2^31, 3 2^30, 2^32
    assert mask.visible(1, 1, 5, 5)[0, 0, :, 0].tolist() == positive
    o, lse = flashlib.attention(q, k, v, mask=mask, score=score, return_lse=True)
    testing.assert_within_budget(q, k, v, o, lse, mask=mask, score=score)


ANOTHER_PROCESS = """
import torch, flashlib
q, options = torch.load("given", weights_only=False)
o = flashlib.attention(q, q, q, **options)
both = {"mask": ~options["mask"], "score": options["score"].then(options["score"])}
torch.save([o, flashlib.attention(q, q, q, **both)], "found")
"""


def test_a_pickle_in_another_process(tmp_path, monkeypatch):
    """Masks and scores, alone and combined with others there."""
    monkeypatch.chdir(tmp_path)
    q, _, _ = testing.make_qkv(1, 2, 9, 16, device=DEVICE)
    ids = torch.arange(9, device=DEVICE) // 4
    mask = (masks.documents(ids) & masks.causal()) | Mask(far, 5)
    score = softcap(2.0).then(alibi(torch.ones(2, device=DEVICE)))
    torch.save((q, {"mask": mask, "score": score}), "given")
    output(run_python(ANOTHER_PROCESS, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"))
    wanted = (
        flashlib.attention(q, q, q, mask=mask, score=score),
        flashlib.attention(q, q, q, mask=~mask, score=score.then(score)),
    )
    assert same(torch.load("found"), wanted)


def test_masks_and_scores_where_tensors_are_fake():
    """A mode that refuses to compute with the tensors that they read."""
    ids, slopes = torch.zeros(1, 7, dtype=torch.int64), torch.ones(2)
    with FakeTensorMode():
        made = Mask(same_document, ids, 3), Score(steep, slopes, 5)
    assert made[0].visible(1, 1, 7, 7).all() and len(made[1].tensors()) == 1


def summed(b, h, p, j, n):
    return (j <= p) + (j < n)


def summed_score(s, b, h, p, j, n):
    return s * ((j <= p) + (j < n))


def test_functions_are_tried_where_pytorch_traces_them():
    """Nothing tried by one way may spare another."""
    q, k, v = testing.make_qkv(1, 1, 5, 16, device=DEVICE)

    def with_mask(n):
        return flashlib.attention(q, k, v, mask=Mask(summed, n))

    def with_score(n):
        return flashlib.attention(q, k, v, score=Score(summed_score, n))

    def in_fake_mode(n):
        with FakeTensorMode():
            call(n)

    for call in (with_mask, with_score):
        compiled = torch.compile(call, backend="eager", fullgraph=True)
        # Dynamo wraps errors in its own.
        for way, error in ((compiled, Exception), (in_fake_mode, ValueError)):
            with pytest.raises(error, match="two booleans: expected"):
                way(3)


def same_document(b, h, p, j, ids, n):
    return at(ids, b, p) == at(ids, b, j)


def steep(s, b, h, p, j, slopes, n):
    return s + n * at(slopes, h)


# -- kernels


def random_call(seed):
    """``(q, k, v, options)``, of which the options change scores in several ways."""
    rng = random.Random(seed)
    B, H_kv, groups = rng.choice([1, 2, 3]), rng.choice([1, 2]), rng.choice([1, 2, 3])
    T_q, T_k = rng.choice([1, 5, 16, 37, 50]), rng.choice([1, 7, 16, 40, 70])
    d, d_v, H = rng.choice([16, 24, 144]), rng.choice([16, 40]), H_kv * groups
    sizes = {"T_k": T_k, "H_kv": H_kv, "d_v": d_v, "device": DEVICE, "seed": seed}
    dtype = rng.choice([torch.float32, torch.float16])
    q, k, v = testing.make_qkv(B, H, T_q, d, dtype=dtype, **sizes)
    generator, options = torch.Generator().manual_seed(seed), {}

    def normal(*shape):
        kind = rng.choice([torch.float32, torch.float16])
        return torch.randn(*shape, generator=generator).to(DEVICE, kind)

    if rng.random() < 0.8:
        options["mask"] = rng.choice(some_masks(B, H, T_q, T_k, rng))
    if rng.random() < 0.6:
        options["bias"] = normal(*(rng.choice([1, n]) for n in (B, H, T_q, T_k)))
    if rng.random() < 0.6:
        options["sinks"] = normal(H)
    if rng.random() < 0.3:
        options["softcap"] = 2.0
    if rng.random() < 0.3:
        options["causal"] = True
    if rng.random() < 0.2:
        options["window"] = (rng.choice([None, 9]), 4)
    if rng.random() < 0.3:
        options["alibi_slopes"] = normal(H).float().abs()
        if "sinks" in options:  # far above all scores, it leaves only rounding errors
            options["alibi_slopes"] *= 0.05
    if rng.random() < 0.3:
        options |= {"dropout": rng.choice([0.1, 0.5, 0.9]), "seed": rng.getrandbits(63)}
    if rng.random() < 0.5:
        options["score"] = rng.choice(some_scores(B, H, T_k, rng))
    return q, k, v, options


@pytest.mark.parametrize("d", [144, 256])
@pytest.mark.parametrize("changes", [{}, {"sinks": True}])
def test_each_tile_is_computed_once(d, changes):
    """Also beyond 128 columns, where one loop takes masked and whole tiles."""
    q, k, v = testing.make_qkv(1, 2, 70, d, H_kv=1, device=DEVICE, requires_grad=True)
    options = {"mask": masks.prefix(40), **changes}
    if "sinks" in options:
        options["sinks"] = torch.zeros(2, device=DEVICE)
    o = flashlib.attention(q, k, v, **options)
    do = torch.randn(*o.shape, generator=torch.Generator().manual_seed(d)).to(DEVICE)
    found = torch.autograd.grad(o, (q, k, v), do)
    testing.assert_gradients_within_budget(q, k, v, do, *found, **options)


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n >= 10)) for n in range(80)]
)
def test_kernels_agree_with_the_reference(seed):
    """Outputs and gradients of random masks, scores, biases and sinks, alone and
    combined.
    """
    q, k, v, options = random_call(seed)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    learned = [options[name] for name in ("bias", "sinks") if name in options]
    learned = [x.requires_grad_() for x in learned]
    o, lse = flashlib.attention(*leaves, return_lse=True, **options)
    do, dlse = output_gradients(q, v)
    found = torch.autograd.grad((o, lse), [*leaves, *learned], (do, dlse))
    given = [x.detach() for x in leaves]
    options |= {
        name: options[name].detach() for name in ("bias", "sinks") if name in options
    }
    testing.assert_within_budget(*given, o, lse, **options)
    testing.assert_gradients_within_budget(*given, do, *found[:3], dlse=dlse, **options)
    # Sums over whatever they are broadcast to, in float32: no more rounding than the
    # reference has in the precision of the inputs.
    wide = [x.double() for x in (*given, do)]
    exact = reference.all_gradients(*wide, dlse=dlse.double(), **options)[3:]
    narrow = [x.detach() for x in (*given, do)]
    rough = reference.all_gradients(*narrow, dlse=dlse.to(q.dtype), **options)[3:]
    pairs = [(x, y) for x, y in zip(exact, rough, strict=True) if x is not None]
    # and no less than one rounding of each term
    terms = []
    if "bias" in options:
        whole = options["bias"].expand(*q.shape[:3], k.shape[2])
        terms = reference.all_gradients(
            *wide, dlse=dlse.double(), **options | {"bias": whole}
        ).dbias.abs()
        terms = [terms.sum_to_size(options["bias"].shape).max()]
    if "sinks" in options:
        o64, lse64 = (x.detach() for x in testing.oracle(*given, **options))
        of_sink = torch.exp(options["sinks"].double()[:, None] - lse64)
        sizes = (wide[3] * o64).abs().sum(3) + dlse.abs()
        terms.append((of_sink * sizes).sum((0, 2)).max())
    for x, (wanted, estimate), total in zip(found[3:], pairs, terms, strict=True):
        error = (estimate.double() - wanted).abs().max()
        limit = 3 * error + 8 * torch.finfo(x.dtype).eps * wanted.abs().max()
        limit += torch.finfo(q.dtype).eps * total
        assert (x.double() - wanted).abs().max() <= limit


# -- PyTorch's function


@pytest.mark.parametrize(
    ("L", "S", "H_kv", "mask", "is_causal"),
    [
        (9, 9, 4, None, True), (9, 12, 4, None, True), (12, 9, 2, None, True),
        (9, 12, 4, "boolean", False), (9, 12, 2, "numbers", False),
        (9, 12, 4, "row", False), (9, 12, 1, None, False), (9, 12, 0, "boolean", False),
        (9, 9, 0, None, True), (9, 12, 0, "numbers", False),
    ],
)  # fmt: skip
def test_calls_in_the_shape_of_pytorchs(L, S, H_kv, mask, is_causal):
    """Outputs and gradients; H_kv = 0 stands for tensors without heads."""
    sizes = {"T_k": S, "H_kv": H_kv or 1, "d_v": 24, "device": DEVICE}
    q, k, v = testing.make_qkv(2, 4 if H_kv else 1, L, 16, **sizes)
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(2, 1, L, S, generator=generator).to(DEVICE)
    given = {
        "boolean": numbers > -0.5, "numbers": numbers.requires_grad_(),
        "row": numbers[:1, :, :1] > -0.5, None: None,
    }[mask]  # fmt: skip
    if not H_kv:
        q, k, v = (x[:, 0] for x in (q, k, v))
        given = given if given is None else given[:, 0]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if mask == "numbers":
        leaves.append(given := given.detach().requires_grad_())
    options = {"is_causal": is_causal, "scale": 0.3}
    if H_kv not in (0, 4):
        options["enable_gqa"] = True
    results = []
    for call in (
        flashlib.scaled_dot_product_attention,
        torch.nn.functional.scaled_dot_product_attention,
    ):
        o = call(*leaves[:3], given, **options)
        results.append((o, *torch.autograd.grad(o.square().sum(), leaves)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=4e-5)


def test_a_call_in_the_shape_of_pytorchs_under_autocast():
    """Of mixed dtypes, as PyTorch's function takes them."""
    q, k, v = testing.make_qkv(1, 2, 8, 16, device=DEVICE)
    numbers = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        o = flashlib.scaled_dot_product_attention(q, k.bfloat16(), v, numbers)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    assert torch.equal(o, flashlib.attention(q, k, v, bias=numbers))


def test_wrong_calls_in_the_shape_of_pytorchs():
    q, k, v = testing.make_qkv(1, 4, 8, 16, H_kv=2, device=DEVICE)
    seen = torch.ones(8, 8, dtype=torch.bool, device=DEVICE)
    for arguments, options, message in (
        ((q, k, v), {}, "key: expected the 4 heads of query without enable_gqa, got 2"),
        ((q, q, q, seen), {"is_causal": True}, "is_causal: expected False with attn_m"),
        ((q, q[0], q), {}, r"key: expected \[N, H, L, E\] or \[N, L, E\], like the"),
        ((q[None],) * 3, {}, r"query: expected \[N, H, L, E\] or \[N, L, E\], like"),
        ((q, q, q, 3), {}, "attn_mask: expected a torch.Tensor, got int"),
        ((q, q, q, seen.int()), {}, "attn_mask: expected dtype bool, float32, .*int32"),
        ((q, q, q, seen.double()), {}, "attn_mask: expected dtype .* torch.float64"),
        ((q, q, q, seen[:5]), {}, r"attn_mask: expected sizes .* got \[5, 8\]"),
        ((q.double(),) * 3, {}, "query: expected dtype float32, .* torch.float64"),
        ((q[..., :8],) * 3, {}, "query: expected a head dimension .* got 8"),
        ((q, q.half(), q), {}, "key: expected dtype torch.float32, got torch.float16"),
        ((q, q[..., :8], q), {}, r"key: expected head dimension 16 as in query \[1, 4"),
        ((q, q.expand(2, 4, 8, 16), q), {}, "key: expected batch size 1 as in query"),
        ((q, q[:, :3], q[:, :3]), {}, "key: .* divides the 4 of query, got 3"),
        ((q, q, q[:, :, :7]), {"is_causal": True}, "value: expected the sizes of key"),
        ((q, q, q), {"dropout_p": 1.0}, "dropout_p: expected .* not 1, got 1.0"),
        ((q, q, q), {"dropout_p": "a"}, "dropout_p: expected a real number"),
        ((q, q, q), {"dropout_p": None}, "dropout_p: expected .* got NoneType"),
        ((q, q, q, seen[None, None, None]), {}, "attn_mask: expected at most 4 dimens"),
        ((q, 3, q), {}, "key: expected a torch.Tensor, got int"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            flashlib.scaled_dot_product_attention(*arguments, **options)


# -- dropout


def test_random_bits_are_those_of_philox():
    """Known answers of Random123, the library of the authors."""
    zeros, ones = (torch.full((4,), n) for n in (0, 0xFFFFFFFF))
    pi = torch.tensor([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344])
    for counters, seed, first in (
        (zeros, 0, 0x6627E8D5),
        (ones, 2**64 - 1, 0x408F276D),
        (pi, 0x299F31D0A4093822, 0xD16CFE09),
    ):
        assert reference.philox(seed, *counters.split(1)).item() == first


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share(dropout):
    """Of 2^20 weights, of each row and each column, within 5 or 6 standard deviations;
    and other heads, batches and seeds drop others.
    """
    z = reference.kept(2, 2, 512, 512, dropout, 7) > 0
    deviation = (dropout * (1 - dropout)) ** 0.5
    assert abs(z.double().mean() - (1 - dropout)) < 5 * deviation / 2**10
    for n in (2, 3):
        shares = z.double().mean(dim=n)
        assert (shares - (1 - dropout)).abs().max() < 6 * deviation / 512**0.5
    seeded = reference.kept(2, 2, 512, 512, dropout, 8) > 0
    for other in (z.flip(0), z.flip(1), z.mT, seeded):
        equal = (z == other).double().mean()
        by_chance = dropout**2 + (1 - dropout) ** 2
        assert abs(equal - by_chance) < 0.01


def test_the_seed_of_dropout_decides():
    q, k, v = testing.make_qkv(1, 2, 40, 16, device=DEVICE)

    def call(seed):
        return flashlib.attention(q, k, v, dropout=0.5, seed=seed)

    seed = torch.tensor([5], device=DEVICE)
    assert torch.equal(call(5), call(seed)) and not torch.equal(call(5), call(6))
    torch.manual_seed(0)
    first, second = call(None), call(None)
    torch.manual_seed(0)
    assert torch.equal(first, call(None)) and not torch.equal(first, second)


def test_dropout_under_a_checkpoint():
    from torch.utils.checkpoint import checkpoint

    leaves = [x.requires_grad_() for x in testing.make_qkv(1, 2, 20, 16, device=DEVICE)]

    def call(q, k, v):
        return flashlib.attention(q, k, v, dropout=0.5)

    found = []
    for run in (call, lambda *x: checkpoint(call, *x, use_reentrant=False)):
        torch.manual_seed(1)
        found.append(torch.autograd.grad(run(*leaves).square().sum(), leaves))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("nothing", [0, 0.0, -0.0, np.float32(0)])
def test_a_dropout_of_zero_draws_nothing(nothing):
    q, k, v = (torch.randn(1, 2, 8, 16, device=DEVICE) for _ in range(3))
    before = torch.get_rng_state()
    o = flashlib.attention(q, k, v, dropout=nothing)
    assert torch.equal(o, flashlib.attention(q, k, v))
    assert torch.equal(before, torch.get_rng_state())


def test_wrong_dropouts_and_seeds_are_refused():
    q, k, v = testing.make_qkv(1, 2, 8, 16, device=DEVICE)
    for options, message in (
        (
            {"dropout": 1.0},
            "dropout: expected a number from 0 to 1, but not 1, got 1.0",
        ),
        ({"dropout": -0.1}, "dropout: expected a number from 0 to 1, but not 1, got"),
        ({"dropout": "a"}, "dropout: expected a real number, got str"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"seed": 0.5}, "seed: expected an integer, got float"),
        ({"seed": q}, "seed: expected dtype torch.int64, got torch.float32"),
        ({"dropout": 0.5, "method": "hopper"}, "dropout: expected None for method"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            flashlib.attention(q, k, v, **options)


def test_a_call_without_gradient_of_its_bias_computes_none(monkeypatch):
    from flashlib.kernels import score_gradients

    def refuse(*_):
        raise AssertionError("dB was computed")

    monkeypatch.setattr(score_gradients, "launch_bias", refuse)
    q, k, v = (x.requires_grad_() for x in testing.make_qkv(1, 2, 5, 16, device=DEVICE))
    bias = torch.zeros(1, 2, 5, 5, device=DEVICE)
    flashlib.attention(q, k, v, bias=bias).sum().backward()
    with pytest.raises(AssertionError, match="dB was computed"):
        flashlib.attention(q, k, v, bias=bias.requires_grad_()).sum().backward()


@pytest.mark.parametrize("change", [0, 1])
def test_tensors_of_a_mask_may_change(change):
    """A plan, a compiled kernel and the key of a mask depend on no value in it."""
    q, k, v = testing.make_qkv(2, 2, 33, 16, device=DEVICE)
    ids = torch.arange(33, device=DEVICE).expand(2, -1) // 7
    for step in range(3):
        mask = masks.documents(ids + step * change * (ids > 2))
        o, lse = flashlib.attention(q, k, v, mask=mask, return_lse=True)
        testing.assert_within_budget(q, k, v, o, lse, mask=mask)
        ids = (ids * (2 - change)) // 2 if step else ids


def test_tiles_that_a_mask_hides_are_never_read():
    """Keys and values in them may be NaN."""
    q, k, v = testing.make_qkv(1, 2, 64, 16, T_k=160, device=DEVICE)
    mask = masks.window(20, 0)
    clean = flashlib.attention(q, k, v, mask=mask)
    k[:, :, :64] = v[:, :, :64] = float("nan")
    assert torch.equal(flashlib.attention(q, k, v, mask=mask), clean)


def test_a_boolean_tensor_is_a_mask():
    q, k, v = testing.make_qkv(2, 4, 9, 16, T_k=12, H_kv=2, device=DEVICE)
    seen = torch.rand(2, 1, 9, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    seen = seen.to(DEVICE)
    seen[:, :, 3] = False
    o, lse = flashlib.attention(q, k, v, mask=seen, return_lse=True)
    assert not o[:, :, 3].any() and lse[:, :, 3].isneginf().all()
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, enable_gqa=True
    )
    torch.testing.assert_close(o[:, :, 4:], wanted[:, :, 4:])
    for x in (seen[0, 0], seen[0], seen[:1], seen[..., :1].expand(2, 1, 9, 12)):
        o = flashlib.attention(q, k, v, mask=x)
        assert torch.equal(o, flashlib.attention(q, k, v, mask=x.expand(2, 4, 9, 12)))


def test_packed_sequences_with_a_mask_and_sinks():
    q, k, v = (
        x[0].transpose(0, 1).contiguous().requires_grad_()
        for x in testing.make_qkv(1, 4, 50, 16, T_k=60, H_kv=2, device=DEVICE)
    )
    cu_q = torch.tensor([0, 20, 20, 50], dtype=torch.int32, device=DEVICE)
    cu_k = torch.tensor([0, 25, 30, 60], dtype=torch.int32, device=DEVICE)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE, requires_grad=True)
    ends = torch.tensor([9, 3, 30], device=DEVICE)
    mask = masks.padding(ends * 0, ends) & masks.window(12, 5)
    changes = {"sinks": sinks, "dropout": 0.4, "seed": 3}
    o, lse = flashlib.attention_varlen(
        q, k, v, cu_q, cu_k, 30, 30, mask=mask, return_lse=True, **changes
    )
    do, dlse = torch.ones_like(o), torch.ones_like(lse)
    found = torch.autograd.grad((o, lse), (q, k, v, sinks), (do, dlse))
    total = torch.zeros(4, dtype=torch.float64, device=DEVICE)
    for b, end in enumerate(ends.tolist()):
        rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        places = (rows, keys, keys, rows, rows, rows, keys, keys)
        pairs = zip((q, k, v, o, do, *found[:3]), places, strict=True)
        *own, own_o, own_do, dq, dk, dv = (
            x.detach()[place].transpose(0, 1)[None] for x, place in pairs
        )
        window, end = masks.window(12, 5), ends[b : b + 1]
        options = {
            "mask": masks.padding(end * 0, end) & window,
            "sinks": sinks.detach(),
        }
        sizes = 3, 4, own[0].shape[2], own[1].shape[2]
        options["dropout"] = reference.kept(*sizes, 0.4, 3, DEVICE)[b : b + 1]
        own_lse, own_dlse = lse[None, :, rows].detach(), dlse[None, :, rows]
        testing.assert_within_budget(*own, own_o, own_lse, **options)
        testing.assert_gradients_within_budget(
            *own, own_do, dq, dk, dv, dlse=own_dlse, **options
        )
        wide = (x.double() for x in (*own, own_do))
        options["dlse"] = own_dlse.double()
        total += reference.all_gradients(*wide, **options).dsinks
    torch.testing.assert_close(found[3].double(), total, rtol=1e-5, atol=1e-5)


def test_wrong_masks_biases_and_sinks_are_refused():
    q, k, v = testing.make_qkv(2, 4, 9, 16, T_k=12, H_kv=2, device=DEVICE)
    cu = torch.tensor([0, 9], dtype=torch.int32, device=DEVICE)
    ones = torch.ones
    for options, message in (
        ({"mask": 3}, "mask: expected a flashlib.masks.Mask, a boolean tensor or None"),
        ({"mask": ones(9, 12)}, "mask: expected dtype torch.bool, got torch.float32"),
        ({"mask": masks.documents(ones(1, 12).int())}, r"mask: .* ids \[B, T_k\], at"),
        ({"mask": masks.documents(ones(9).int())}, r"mask: expected ids \[T_k\], at"),
        ({"mask": ones(3, 1, 9, 12).bool()}, r"mask: .* = \[2, 4, 9, 12\], got \[3"),
        ({"mask": ones(3, 9, 12).bool()}, r"mask: .* = \[2, 4, 9, 12\], got \[3"),
        ({"mask": ones(9, 11).bool()}, r"mask: .* broadcast to .*\[2, 4, 9, 12\], got"),
        ({"mask": ones(1, 1, 1, 9, 12).bool()}, "mask: expected at most 4 dimensions"),
        ({"bias": 3}, "bias: expected a torch.Tensor, got int"),
        ({"bias": ones(9, 11)}, r"bias: .* broadcast to .*\[2, 4, 9, 12\], got"),
        ({"bias": ones(9, 12).double()}, "bias: expected dtype float32, float16 or"),
        ({"sinks": ones(3)}, r"sinks: expected \[H\] with H = 4, got \[3\]"),
        ({"sinks": [1.0]}, "sinks: expected a torch.Tensor, got list"),
        ({"sinks": ones(4), "method": "flash1"}, "sinks: expected None for method"),
    ):  # fmt: skip
        options = {
            name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x
            for name, x in options.items()
        }
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            flashlib.attention(q, k, v, **options)
    packed = (
        x[0].transpose(0, 1) for x in testing.make_qkv(1, 4, 9, 16, device=DEVICE)
    )
    with pytest.raises(
        TypeError, match=r"^mask: expected a flashlib.masks.Mask unless q"
    ):
        flashlib.attention_varlen(
            *packed, cu, cu, 9, 9, mask=ones(9, 9).bool().to(DEVICE)
        )


def test_masks_and_biases_in_compiled_functions():
    """Masks that are made inside or outside of the function; gradients of the bias."""
    q, k, v = testing.make_qkv(1, 2, 9, 16, device=DEVICE)
    ids, seen = torch.arange(9, device=DEVICE) // 4, torch.ones(9, 9, device=DEVICE) > 0
    outside = masks.documents(ids) & masks.causal()
    bias = torch.ones(1, 2, 9, 1, device=DEVICE, requires_grad=True)
    sinks = torch.zeros(2, device=DEVICE, requires_grad=True)

    def call(q, ids, seen, bias, sinks):
        first = flashlib.attention(q, k, v, mask=outside, bias=bias, sinks=sinks)
        second = flashlib.attention(first, k, v, mask=masks.documents(ids))
        return flashlib.attention(second, k, v, mask=seen.tril())

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    arguments = q, ids, seen, bias, sinks
    found, wanted = compiled(*arguments), call(*arguments)
    assert torch.equal(found, wanted)
    for x, y in zip(
        *(torch.autograd.grad(o.sum(), (bias, sinks)) for o in (found, wanted)),
        strict=True,
    ):
        assert torch.equal(x, y)
