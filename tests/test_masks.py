"""Windows, softcap, ALiBi and packed sequences: the references, the counts, the kernels, the public door."""

import inspect
import itertools
import math

import numpy as np
import pytest
import torch
from cases import CUDA, DEVICE, SHORT, each_level, far_apart, pairwise

import flashlib
from flashlib import masked, testing
from flashlib.iomodel import masks as counts
from flashlib.kernels import INTERPRETED, launch, masks
from flashlib.notebook import check
from flashlib.reference import masks as reference
from flashlib.reference import standard

pytestmark = pytest.mark.usefixtures("nan_filled")
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")

WINDOWS = [None, (0, 0), (3, 0), (0, 5), (7, 4), (16, 16), (None, 2), (2, None), (100, 100), (31, 33)]


def slopes(H, B=None):
    """The slopes of ALiBi's paper, 2^(-8 h / H), or others for every batch."""
    found = 2.0 ** (-8.0 * torch.arange(1, H + 1, device=DEVICE) / H)
    return found if B is None else found * torch.linspace(0.5, 2.0, B, device=DEVICE)[:, None]


def scoring(q, causal=False, window=None, softcap=None, alibi_slopes=None, scale=None):
    """What the kernels take for what the public function takes."""
    left, right = reference.window_sides(causal, window)
    sides = (masks.UNLIMITED if side is None else side for side in (left, right))
    scale = standard.default_scale(q.shape[-1]) if scale is None else scale
    return masks.Scoring(scale, *sides, softcap or 0.0, alibi_slopes)


def output_gradients(q, v, layout="contiguous"):
    """do and a strided dlse for q ``[B, H, T_q, d]``."""
    sizes = (*q.shape[:3], v.shape[3])
    do, _, _ = testing.make_qkv(*sizes, dtype=q.dtype, device=q.device, seed=1, layout=layout)
    dlse, _, _ = testing.make_qkv(*q.shape[:3], 16, device=q.device, seed=2)
    return do, dlse[..., 0]


def judged(q, k, v, layout="contiguous", **options):
    """Run and judge both passes; returns their results."""
    how = scoring(q, **options)
    o, lse = masks.forward(q, k, v, how)
    testing.assert_within_budget(q, k, v, o, lse, **options)
    do, dlse = output_gradients(q, v, layout)
    found = masks.backward(q, k, v, o, lse, do, dlse, how)
    testing.assert_gradients_within_budget(q, k, v, do, *found, dlse=dlse, **options)
    return o, lse, *found


# ------------------------------------------------------------------------------------ references


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("T_q, T_k", [(7, 7), (3, 9), (9, 3), (1, 1), (0, 4), (4, 0)])
def test_visible_is_what_it_says(T_q, T_k, window, causal):
    left, right = (None, None) if window is None else window
    for i, row in enumerate(reference.visible(T_q, T_k, causal=causal, window=window).tolist()):
        p = i + T_k - T_q
        for j, seen in enumerate(row):
            far = (left is not None and p - j > left) or (right is not None and j - p > right)
            assert seen == (not far and not (causal and j > p))


def test_no_window_and_a_causal_one_are_the_standard_masks():
    assert reference.visible(5, 9, window=(None, None)).all()
    assert torch.equal(reference.visible(5, 9, causal=True), standard.causal_mask(5, 9))
    assert torch.equal(reference.visible(5, 9, window=(None, 0)), standard.causal_mask(5, 9))


WRONG_WINDOWS = [5, (1,), (1, 2, 3), "ab", (1.0, 2), (-1, 0), (0, -1), (True, 0), (None, "a"), {1, 2}]


@pytest.mark.parametrize("window", WRONG_WINDOWS, ids=repr)
def test_wrong_windows_are_refused(window):
    x = torch.zeros(1, 1, 3, 16, device=DEVICE)
    message = r"^window(:| must be) .*\(left, right\), each None or an integer of at least 0, got "
    for refuse in (
        lambda: reference.visible(3, 3, window=window),
        lambda: counts.blocks_read(3, 3, 1, 1, window=window),
        lambda: flashlib.attention(x, x, x, window=window),
    ):
        with pytest.raises(ValueError, match=message):
            refuse()


CHANGES = {
    "window": {"window": (4, 2)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": slopes(4, 2).cpu().double()},
    "all": {"causal": True, "window": (3, 5), "softcap": 2.0, "alibi_slopes": slopes(4).cpu().double()},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_reference_gradients_are_those_of_autograd(changes):
    q, k, v = (x.double().requires_grad_() for x in testing.make_qkv(2, 4, 9, 16, T_k=11, H_kv=2, d_v=24))
    do, dlse = (x.cpu().double() for x in output_gradients(q.float(), v.float()))
    o, lse = reference.attention(q, k, v, scale=-0.4, **changes)
    wanted = torch.autograd.grad((o * do).sum() + (lse * dlse).sum(), (q, k, v))
    found = reference.gradients(q, k, v, do, scale=-0.4, dlse=dlse, **changes)
    for name, x, y in zip("qkv", found, wanted, strict=True):
        check(f"d{name}", x, y)


def test_packed_reference_is_a_mask_of_blocks():
    """Packed sequences see what a mask that is True in one block a sequence lets them see."""
    lengths_q, lengths_k = (3, 0, 4, 1), (2, 3, 4, 0)
    q, k, v = (x[0].transpose(0, 1).double() for x in testing.make_qkv(1, 2, 8, 16, T_k=9))
    packing = testing.packing_of(masks, lengths_q, lengths_k, "cpu")
    o, lse = reference.attention_varlen(q, k, v, packing.starts_q, packing.starts_k)
    seen = torch.block_diag(*(torch.ones(a, b) for a, b in zip(lengths_q, lengths_k, strict=True))).bool()
    s = standard.scores(*(x.transpose(0, 1)[None] for x in (q, k))).masked_fill(~seen, -math.inf)
    check("o", o, standard.output(standard.softmax(s), v.transpose(0, 1)[None])[0].transpose(0, 1))
    assert torch.equal(torch.isneginf(lse), ~seen.any(1).expand(2, -1))


def test_prefix_is_two_calls():
    """A prefix that all see, and causal after it: rows before the end of the prefix see the prefix, the rest
    is the bottom of a causal mask. In both passes.
    """
    T, prefix = 29, 11
    q, k, v = (x.double().requires_grad_() for x in testing.make_qkv(1, 4, T, 16, H_kv=2))
    early, _ = reference.attention(q[:, :, :prefix], k[:, :, :prefix], v[:, :, :prefix])
    late, _ = reference.attention(q[:, :, prefix:], k, v, causal=True)
    seen = standard.causal_mask(T, T) | (torch.arange(T) < prefix)
    s = standard.scores(q, k).masked_fill(~seen, -math.inf)
    both, wanted = torch.cat([early, late], 2), standard.output(standard.softmax(s), v)
    check("o", both, wanted)
    do = torch.linspace(-1, 1, both.numel()).double().view_as(both)
    gradients = (torch.autograd.grad(o, (q, k, v), do) for o in (both, wanted))
    for name, x, y in zip("qkv", *gradients, strict=True):
        check(f"d{name}", x, y)


# ------------------------------------------------------------------------------------ counts


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_closed_forms_agree_with_a_count_pair_by_pair(window, causal):
    for T_q, T_k, B_r, B_c in itertools.product((0, 1, 16, 33), (0, 1, 16, 40), (1, 4, 16), (2, 8)):
        kinds = counts.block_kinds(T_q, T_k, B_r, B_c, causal, window)
        sizes = (T_q, T_k, B_r, B_c, causal, window)
        assert counts.blocks_read(*sizes) == (kinds != counts.SKIPPED).sum()
        assert counts.blocks_cut(*sizes) == (kinds == counts.CUT).sum()
        for I, row in enumerate(kinds.tolist()):
            first, whole, cut, end = counts.key_blocks(I, *sizes)
            for J, kind in enumerate(row):
                read = counts.WHOLE if whole <= J < cut else counts.CUT
                assert kind == (read if first <= J < end else counts.SKIPPED)
        pairs = reference.visible(T_q, T_k, causal=causal, window=window).sum()
        assert counts.visible_pairs(T_q, T_k, causal, window) == pairs
    for T, B in itertools.product((16, 48), (1, 4, 16)):
        square = (T, T, B, B, causal, window)
        assert counts.square_blocks_read(T, B, causal, window) == counts.blocks_read(*square)
        assert counts.square_blocks_cut(T, B, causal, window) == counts.blocks_cut(*square)


def test_band_and_packed_counts():
    J_less_I = np.arange(6)[None, :] - np.arange(6)[:, None]
    for below, above in itertools.product(range(-1, 8), range(-1, 8)):
        assert counts.band(6, below, above) == ((J_less_I >= -below) & (J_less_I <= above)).sum()
    assert counts.band(6, 2, 1) == 6 * 4 - 3 - 1
    assert counts.packed_blocks_read((5, 0, 8), (5, 3, 2), 4, 4, True) == 3 + 0 + 1
    with pytest.raises(ValueError, match=r"^lengths_k must have 1 lengths"):
        counts.packed_blocks_read((1,), (1, 2), 4, 4)


@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ((2.0, 3, 1, 1), TypeError, "T_q must be an int, got 2.0"),
        ((2, np.int64(3), 1, 1), TypeError, "T_k must be an int, got"),
        ((2, -1, 1, 1), ValueError, "T_k must be at least 0, got -1"),
        ((2, 3, 0, 1), ValueError, "B_r must be at least 1, got 0"),
    ],
)
def test_wrong_sizes_are_refused(sizes, error, message):
    for count in (counts.blocks_read, counts.blocks_cut, counts.block_kinds):
        with pytest.raises(error, match=f"^{message}"):
            count(*sizes)
    with pytest.raises(ValueError, match=r"^B must divide T = 10, got 4$"):
        counts.square_blocks_read(10, 4)


class Steps:
    """Counts the steps of a kernel's inner loop, and how many of them mask."""

    def __init__(self, monkeypatch, name):
        own = getattr(masks, name)
        self.read, self.cut, place = 0, 0, list(inspect.signature(own.fn).parameters).index("MASKED")

        def step(*arguments):
            self.read += 1
            self.cut += bool(getattr(arguments[place], "value", arguments[place]))
            return own(*arguments)

        monkeypatch.setattr(masks, name, step)


@pytest.mark.skipif(not INTERPRETED, reason="counts the steps of kernels in the interpreter")
@pytest.mark.parametrize(
    "T_q, T_k, options",
    [
        (70, 70, {"causal": True, "window": (20, 0)}),
        (70, 70, {"window": (40, 30)}),
        (33, 70, {"window": (16, 15)}),
        (70, 33, {"causal": True, "window": (None, None)}),
        (64, 64, {"window": (31, None)}),
        (64, 64, {"softcap": 2.0}),
        (48, 70, {"window": (0, 0)}),
    ],
)
def test_kernels_read_the_blocks_of_the_closed_form(T_q, T_k, options, monkeypatch):
    B_r, B_c = 16, 32
    config = launch.INTERPRETER._replace(BLOCK_Q=B_r, BLOCK_K=B_c)
    monkeypatch.setattr(masks, "INTERPRETER", config)
    attend, collect, descend = (Steps(monkeypatch, name) for name in ("attend", "collect", "descend"))
    q, k, v = testing.make_qkv(1, 1, T_q, 16, T_k=T_k)
    judged(q, k, v, **options)
    window = (T_q, T_k, B_r, B_c, options.get("causal", False), options.get("window"))
    read, cut = counts.blocks_read(*window), counts.blocks_cut(*window)
    assert (attend.read, attend.cut) == (descend.read, descend.cut) == (read, cut)
    assert collect.read == read
    # dK and dV need no mask where keys or queries end: what hangs over is not stored, or weighs nothing.
    kinds = counts.block_kinds(T_q, T_k // B_c * B_c or T_k, B_r, B_c, *window[4:])
    assert collect.cut <= cut and (T_k % B_c or collect.cut == (kinds == counts.CUT).sum())


@pytest.mark.skipif(not INTERPRETED, reason="counts the steps of kernels in the interpreter")
def test_packed_kernels_read_the_blocks_of_their_sequences(monkeypatch):
    lengths_q, lengths_k = (70, 0, 3, 64), (66, 5, 0, 64)
    attend, collect, descend = (Steps(monkeypatch, name) for name in ("attend", "collect", "descend"))
    packed(lengths_q, lengths_k, causal=True, window=(20, 0))
    read = counts.packed_blocks_read(lengths_q, lengths_k, 64, 64, True, (20, 0))
    assert attend.read == descend.read == collect.read == 2 * read


# ------------------------------------------------------------------------------------ kernels

KERNEL_CHANGES = {
    "window 0": {"window": (0, 0)},
    "window 1": {"window": (1, 1)},
    "window to the left": {"window": (20, 0)},
    "window to the right": {"window": (0, 33)},
    "window on both sides": {"window": (70, 12)},
    "one side": {"window": (5, None)},
    "window of T and more": {"window": (113, 500)},
    "window without a limit": {"window": (None, None)},
    "softcap": {"softcap": 3.0},
    "large softcap": {"softcap": 500.0},
    "alibi": {"alibi_slopes": "H"},
    "alibi for every batch": {"alibi_slopes": "B H", "window": (40, 3)},
    "all": {"window": (64, 63), "softcap": 5.0, "alibi_slopes": "H"},
}


def kernel_cases():
    """Every change with one shape, and on a GPU, in the slow tests, with all of a covering set."""
    few = each_level({**SHORT, "heads": ((2, 2), (4, 2), (3, 1))}, seed=11)
    found = [
        pytest.param(few[n % len(few)], name, id=f"{name}-{few[n % len(few)]}")
        for n, name in enumerate(KERNEL_CHANGES)
    ]
    many = pairwise(SHORT, seed=12) if CUDA else []
    return found + [
        pytest.param(case, name, id=f"{name}-{case}", marks=[pytest.mark.gpu, pytest.mark.slow])
        for case in many
        for name in KERNEL_CHANGES
    ]


@pytest.mark.parametrize("case, name", kernel_cases())
def test_kernels(case, name):
    q, k, v = case.inputs()
    options = dict(KERNEL_CHANGES[name])
    if "alibi_slopes" in options:
        B, H = q.shape[:2]
        options["alibi_slopes"] = slopes(H) if options["alibi_slopes"] == "H" else slopes(H, B)
    before = [x.clone() for x in (q, k, v)]
    judged(q, k, v, case.layout, causal=case.causal, scale=case.scale, **options)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize("T_q, T_k", [(130, 3), (65, 130), (1, 130), (130, 1), (5, 0), (0, 5)])
@pytest.mark.parametrize("window", [(0, 0), (64, 0), (63, 1)], ids=str)
def test_edges_of_blocks(T_q, T_k, window):
    q, k, v = testing.make_qkv(1, 1, T_q, 16, T_k=T_k, device=DEVICE)
    o, lse, dq, dk, dv = judged(q, k, v, window=window)
    seen = reference.visible(T_q, T_k, window=window, device=DEVICE)
    blind, unseen = ~seen.any(1), ~seen.any(0)
    assert (o[:, :, blind] == 0).all() and (lse[:, :, blind] == -math.inf).all()
    assert (dq[:, :, blind] == 0).all()
    assert (dk[:, :, unseen] == 0).all() and (dv[:, :, unseen] == 0).all()


def test_a_window_of_0_copies_the_values():
    """Every query sees one key, whatever the score: O = V, and L is the score."""
    q, k, v = testing.make_qkv(1, 2, 70, 16, device=DEVICE)
    o, *_ = judged(q, k, v, window=(0, 0))
    o64, lse64 = testing.oracle(q, k, v, window=(0, 0))
    check("o", o64, v.double())
    check("lse", lse64, (q.double() * k.double()).sum(-1) / 4)
    assert torch.equal(o, v) or not INTERPRETED


def test_what_lies_outside_of_the_window_is_never_used():
    """NaN in blocks that no query of the window sees would show in every sum that touches it."""
    q, k, v = testing.make_qkv(1, 1, 64, 16, T_k=320, device=DEVICE)
    k[:, :, :128], v[:, :, :128] = math.nan, math.nan
    how = scoring(q, causal=True, window=(63, 0))
    o, lse = masks.forward(q, k, v, how)
    do, dlse = output_gradients(q, v)
    dq, dk, dv = masks.backward(q, k, v, o, lse, do, dlse, how)
    kept = (q, k[:, :, 128:], v[:, :, 128:])
    options = {"causal": True, "window": (63, 0)}
    testing.assert_within_budget(*kept, o, lse, **options)
    assert (dk[:, :, :128] == 0).all() and (dv[:, :, :128] == 0).all()
    testing.assert_gradients_within_budget(
        *kept, do, dq, dk[:, :, 128:], dv[:, :, 128:], dlse=dlse, **options
    )


def test_two_runs_agree_in_every_bit():
    q, k, v = testing.make_qkv(1, 6, 113, 40, T_k=90, H_kv=2, dtype=torch.float16, device=DEVICE)
    how = scoring(q, window=(50, 20), softcap=3.0, alibi_slopes=slopes(6))
    do, dlse = output_gradients(q, v)
    first = None
    for _ in range(250 if CUDA else 2):
        o, lse = masks.forward(q, k, v, how)
        found = o, lse, *masks.backward(q, k, v, o, lse, do, dlse, how)
        first = found if first is None else first
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


@pytest.mark.skipif(CUDA, reason="on a GPU bfloat16 is a case like the others")
def test_bfloat16_on_a_cpu_is_float32_rounded():
    q, k, v = testing.make_qkv(1, 2, 17, 40, T_k=33, dtype=torch.bfloat16)
    judged(q, k, v, window=(9, 2), softcap=4.0)
    o, _ = masks.forward(q, k, v, scoring(q, softcap=4.0))
    wide, _ = masks.forward(q.float(), k.float(), v.float(), scoring(q, softcap=4.0))
    assert torch.equal(o, wide.bfloat16())


# ------------------------------------------------------------------------------------ packed sequences


def packed(lengths_q, lengths_k, H=2, H_kv=1, d=16, dtype=torch.float32, alibi=False, seed=0, **options):
    """Run and judge both passes of packed sequences, through the public door."""
    q, k, v = testing.make_qkv(
        1, H, sum(lengths_q), d, T_k=sum(lengths_k), H_kv=H_kv, dtype=dtype, device=DEVICE, seed=seed
    )
    do, dlse = output_gradients(q, v)
    q, k, v, do = (x[0].transpose(0, 1) for x in (q, k, v, do))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    packing = testing.packing_of(masks, lengths_q, lengths_k, DEVICE)
    options |= {"alibi_slopes": slopes(H, len(lengths_q))} if alibi else {}
    o, lse = flashlib.attention_varlen(q, k, v, *packing, return_lse=True, **options)
    testing.assert_packed_within_budget(q, k, v, o, lse, packing, **options)
    sees = torch.isfinite(lse)
    loss = (o * do).sum() + (lse[sees] * dlse[0][sees]).sum()
    found = torch.autograd.grad(loss, (q, k, v))
    dlse = dlse[0].masked_fill(~sees, 0.0)
    testing.assert_packed_gradients_within_budget(q, k, v, do, *found, packing, dlse=dlse, **options)
    return o, lse, found


LENGTHS = {
    "0 and 1": ((1, 0, 1, 0, 3), (1, 1, 0, 0, 3)),
    "one long": ((70, 1, 2), (130, 2, 1)),
    "blocks": ((64, 65, 63), (64, 63, 66)),
    "more queries": ((30, 66), (5, 20)),
    "first and last empty": ((0, 9, 0), (0, 9, 0)),
    "no keys": ((3, 2), (0, 0)),
    "no queries": ((0, 0), (3, 2)),
    "no sequences": ((), ()),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_packed(lengths, causal):
    packed(*lengths, causal=causal)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (20, 3)},
        {"softcap": 2.0, "alibi": True},
        {"causal": True, "window": (64, 0), "alibi": True},
    ],
    ids=str,
)
def test_packed_with_changed_scores(options):
    packed((70, 0, 5, 1), (66, 3, 9, 1), H=4, H_kv=2, d=40, dtype=torch.float16, **options)


def test_neighbours_do_not_leak():
    """One sequence is NaN; the others give the same bits as beside numbers."""
    lengths = (70, 5, 33)
    q, k, v = (x[0].transpose(0, 1) for x in testing.make_qkv(1, 2, 108, 16, device=DEVICE))
    packing = testing.packing_of(masks, lengths, lengths, DEVICE)

    def both(*tensors):
        leaves = [x.clone().requires_grad_() for x in tensors]
        o, lse = flashlib.attention_varlen(*leaves, *packing, window=(40, 2), return_lse=True)
        return o, lse.T, *torch.autograd.grad(o.sum() + lse.sum(), leaves)

    clean = both(q, k, v)
    for x in (q, k, v):
        x[70:75] = math.nan
    for x, y in zip(clean, both(q, k, v), strict=True):
        assert torch.equal(x[:70], y[:70]) and torch.equal(x[75:], y[75:])
        assert torch.isnan(y[70:75]).all()


def test_longer_maxima_and_strided_rows():
    """max_seqlen may be more than the longest, and the rows of a packed buffer of q, k and v are views."""
    buffer = torch.randn(20, 3, 4, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    q, k, v = buffer.unbind(1)
    packing = testing.packing_of(masks, (13, 7), (13, 7), DEVICE)
    o, lse = flashlib.attention_varlen(q, k, v, *packing[:2], 200, 150, causal=True, return_lse=True)
    testing.assert_packed_within_budget(q, k, v, o, lse, packing, causal=True)


def test_packed_offsets_beyond_int32():
    near = testing.make_qkv(3, 3, 3, 16, dtype=torch.float16, device=DEVICE)
    near, far = ([x[0].transpose(0, 1) for x in some] for some in (near, far_apart(near, "row")))
    packing = testing.packing_of(masks, (1, 2), (1, 2), DEVICE)
    how = scoring(near[0])
    o, lse = masks.forward(*far, how, packing)
    testing.assert_packed_within_budget(*near, o, lse, packing)
    found = masks.backward(*far, o, lse, o, lse, how, packing)
    testing.assert_packed_gradients_within_budget(*near, o, *found, packing, dlse=lse)


# ------------------------------------------------------------------------------------ the public door


def small(**changes):
    return testing.make_qkv(1, 4, 9, 16, **{"T_k": 12, "H_kv": 2, "device": DEVICE} | changes)


def floats(*shape, **changes):
    return torch.ones(*shape, **{"device": DEVICE} | changes)


WRONG = {
    "softcap is 0": ({"softcap": 0}, ValueError, "softcap: expected a number above 0, got 0.0"),
    "softcap is negative": ({"softcap": -1.0}, ValueError, "softcap: expected a number above 0, got -1.0"),
    "softcap is NaN": ({"softcap": math.nan}, ValueError, "softcap: expected a finite number, got nan"),
    "softcap is infinite": ({"softcap": math.inf}, ValueError, "softcap: expected a finite number, got inf"),
    "softcap is text": ({"softcap": "5"}, TypeError, "softcap: expected a real number or None, got str"),
    "slopes are a list": ({"alibi_slopes": [1.0]}, TypeError, "alibi_slopes: expected a torch.Tensor, got"),
    "slopes are float64": (
        {"alibi_slopes": floats(4, dtype=torch.float64)},
        TypeError,
        "alibi_slopes: expected dtype torch.float32, got torch.float64",
    ),
    "slopes of other heads": (
        {"alibi_slopes": floats(3)},
        ValueError,
        r"alibi_slopes: expected \[H\] or \[B, H\] with B = 1, H = 4, got \[3\]",
    ),
    "slopes elsewhere": (
        {"alibi_slopes": floats(4, device="meta")},
        ValueError,
        "alibi_slopes: expected the device of q, .*, got meta",
    ),
    "slopes want gradients": (
        {"alibi_slopes": floats(4, requires_grad=True)},
        ValueError,
        "alibi_slopes: expected constants, .* got requires_grad=True",
    ),
    "window for standard": (
        {"window": (1, 1), "method": "standard"},
        ValueError,
        "window: expected None for method 'standard'",
    ),
    "softcap for flash1": (
        {"softcap": 1.0, "method": "flash1"},
        ValueError,
        "softcap: expected None for method 'flash1'",
    ),
    "tuned window": ({"window": (1, 1), "tune": True}, ValueError, "tune: expected False with window"),
}


@pytest.mark.parametrize("changes, error, message", WRONG.values(), ids=WRONG)
def test_wrong_argument_gets_one_clear_line(changes, error, message):
    with pytest.raises(error, match=f"^{message}") as caught:
        flashlib.attention(*small(), **changes)
    assert "\n" not in str(caught.value)


def starts(*values, dtype=torch.int32, device=DEVICE):
    return torch.tensor(values, dtype=dtype, device=device)


WRONG_PACKING = {
    "no tensor": ({"cu_seqlens_q": [0, 9]}, TypeError, "cu_seqlens_q: expected a torch.Tensor, got list"),
    "int64": (
        {"cu_seqlens_k": starts(0, 9, dtype=torch.int64)},
        TypeError,
        "cu_seqlens_k: expected dtype torch.int32, got torch.int64",
    ),
    "elsewhere": (
        {"cu_seqlens_k": starts(0, 9, device="meta")},
        ValueError,
        "cu_seqlens_k: expected the device of q",
    ),
    "a number": ({"cu_seqlens_q": starts(9)[0]}, ValueError, r"cu_seqlens_q: expected \[B \+ 1\], got \[\]"),
    "empty": ({"cu_seqlens_q": starts()}, ValueError, r"cu_seqlens_q: expected \[B \+ 1\], got \[0\]"),
    "other B": (
        {"cu_seqlens_k": starts(0, 5, 9)},
        ValueError,
        r"cu_seqlens_k: expected the shape of cu_seqlens_q, \[2\], got \[3\]",
    ),
    "not from 0": (
        {"cu_seqlens_q": starts(1, 9)},
        ValueError,
        r"cu_seqlens_q: expected 0 first, 9 \(the rows of q\) last .* got \[1, 9\]",
    ),
    "not to the end": ({"cu_seqlens_k": starts(0, 8)}, ValueError, r"cu_seqlens_k: .* got \[0, 8\]"),
    "decreasing": (
        {"cu_seqlens_q": starts(0, 8, 7, 9), "cu_seqlens_k": starts(0, 1, 2, 9)},
        ValueError,
        r"cu_seqlens_q: .* nothing that decreases, got \[0, 8, 7, 9\]",
    ),
    "short maximum": (
        {"max_seqlen_k": 8},
        ValueError,
        "max_seqlen_k: expected at least 9, the longest sequence, got 8",
    ),
    "maximum is no integer": ({"max_seqlen_q": 9.0}, TypeError, "max_seqlen_q: expected an integer, got"),
    "four dimensions": (
        {"q": floats(1, 4, 9, 16)},
        ValueError,
        r"q: expected 3 dimensions \[total, H, d\], got 4: \[1, 4, 9, 16\]",
    ),
    "v has other rows": (
        {"v": floats(8, 2, 16)},
        ValueError,
        r"v: expected \[total_k, H_kv, d_v\] .* \[9, 2, 16\], got \[8, 2, 16\]",
    ),
    "heads do not divide": (
        {"k": floats(9, 3, 16), "v": floats(9, 3, 16)},
        ValueError,
        "k: expected a head count that divides the 4 of q, got 3",
    ),
    "mixed dtypes": ({"k": floats(9, 2, 16).half()}, TypeError, "k: expected the dtype of q"),
    "slopes": ({"alibi_slopes": floats(2, 4)}, ValueError, "alibi_slopes: expected .* B = 1, H = 4, got"),
    "causal": ({"causal": 1}, TypeError, "causal: expected True or False, got 1"),
}


@pytest.mark.parametrize("changes, error, message", WRONG_PACKING.values(), ids=WRONG_PACKING)
def test_wrong_packing_gets_one_clear_line(changes, error, message):
    arguments = {"q": floats(9, 4, 16), "k": floats(9, 2, 16), "v": floats(9, 2, 16)}
    arguments |= {"cu_seqlens_q": starts(0, 9), "cu_seqlens_k": starts(0, 9)}
    arguments |= {"max_seqlen_q": 9, "max_seqlen_k": 9}
    with pytest.raises(error, match=f"^{message}") as caught:
        flashlib.attention_varlen(**arguments | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"window": (3, 1)}, {"softcap": 2.0, "causal": True}, {"alibi_slopes": slopes(4)}],
    ids=["window", "softcap", "alibi"],
)
def test_public_results_and_gradients(options):
    q, k, v = small(requires_grad=True, layout="packed")
    o, lse = flashlib.attention(q, k, v, return_lse=True, deterministic=True, **options)
    testing.assert_within_budget(q, k, v, o, lse, **options)
    assert torch.equal(flashlib.attention(q, k, v, method="flash2", **options), o)
    found = torch.autograd.grad(o.sum() + lse.sum(), (q, k, v))
    ones = torch.ones_like(lse)
    testing.assert_gradients_within_budget(q, k, v, torch.ones_like(o), *found, dlse=ones, **options)
    (dk,) = torch.autograd.grad(flashlib.attention(q.detach(), k, v.detach(), **options).sum(), k)
    testing.assert_gradients_within_budget(q, k, v, torch.ones_like(o), None, dk, None, **options)


def test_only_changes_take_the_kernels_of_masks(monkeypatch):
    called = []
    own = masks.forward
    monkeypatch.setattr(masks, "forward", lambda *x: called.append(x) or own(*x))
    flashlib.attention(*small(), causal=True)
    assert called == []
    flashlib.attention(*small(), causal=True, window=(None, 4))
    assert len(called) == 1 and called[0][3][1:3] == (masks.UNLIMITED, 0)
    flashlib.attention(*small(), window=(10**12, 4))
    assert called[1][3][1:3] == (masks.UNLIMITED, 4)


def test_refusals_name_the_function():
    q, k, v = small(requires_grad=True)
    o = flashlib.attention(q, k, v, window=(1, 1))
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^flashlib\.attention: double backward"):
        dq.sum().backward()
    with pytest.raises(NotImplementedError, match=r"^flashlib\.attention: forward-mode"):
        torch.func.jvp(lambda x: flashlib.attention(x, k, v, window=(1, 1)), (q,), (torch.ones_like(q),))
    with pytest.raises(NotImplementedError, match=r"^flashlib\.attention: vmap is not supported"):
        torch.func.vmap(lambda x: flashlib.attention(x, k, v, window=(1, 1)))(torch.stack([q, q]))


def test_autocast_casts_packed_inputs():
    q, k, v = (floats(9, 2, 16, requires_grad=True) for _ in range(3))
    with torch.autocast(DEVICE, dtype=torch.float16):
        o = flashlib.attention_varlen(q, k, v, starts(0, 9), starts(0, 9), 9, 9, softcap=3)
    assert o.dtype == torch.float16
    assert torch.autograd.grad(o.float().sum(), q)[0].dtype == torch.float32


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[needs_cuda, pytest.mark.gpu])]
)
def test_torch_compile_without_a_graph_break(backend):
    q, k, v = small(requires_grad=True)
    packing = testing.packing_of(masks, (4, 5), (8, 4), DEVICE)

    def loss(q, k, v):
        dense = flashlib.attention(q, k, v, window=(3, 1), softcap=2.0, alibi_slopes=slopes(4))
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        return dense.sum() + flashlib.attention_varlen(*rows, *packing, causal=True).sum()

    torch.compiler.reset()
    plain = loss(q, k, v)
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)(q, k, v)
    gradients = [torch.autograd.grad(x, (q, k, v)) for x in (plain, compiled)]
    if backend == "aot_eager":
        assert torch.equal(plain, compiled)
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("of_packed", [False, True], ids=["dense", "packed"])
def test_custom_ops_are_registered_properly(of_packed):
    leaves = small(requires_grad=True)
    packing = (None, None, 0, 0)
    if of_packed:
        leaves = [x[0].transpose(0, 1).detach().requires_grad_() for x in leaves]
        packing = tuple(testing.packing_of(masks, (4, 5), (8, 4), DEVICE))
    options = (2, -1, 1.5, 0.25)
    arguments = (*leaves, slopes(4), *packing, *options)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")  # the rest is compiled above
    torch.library.opcheck(masked.forward, arguments, test_utils=utils)
    o, lse = (x.detach() for x in masked.forward(*arguments))
    leaves = [x.detach() for x in leaves]
    torch.library.opcheck(
        masked.backward,
        (*leaves, slopes(4), *packing[:2], o, lse, o, lse, *packing[2:], *options),
        test_utils=utils,
    )


# ------------------------------------------------------------------------------------ on a GPU only


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"window": (600, 0)}, {"window": (100, 900), "softcap": 20.0}], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_long_sequences(d, options):
    q, k, v = testing.make_qkv(
        1, 4, 4096, d, T_k=4096 + 77, H_kv=2, dtype=torch.bfloat16, device=DEVICE, layout="transposed"
    )
    judged(q, k, v, "transposed", alibi_slopes=slopes(4), **options)


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
def test_long_packed_sequences(d):
    lengths = (1, 2000, 0, 300, 4096 - 2301)
    packed(lengths, lengths, H=4, H_kv=2, d=d, dtype=torch.bfloat16, causal=True, alibi=True)


@needs_cuda
@pytest.mark.gpu
@pytest.mark.slow
def test_many_ragged_packings():
    generator = torch.Generator().manual_seed(0)
    for n in range(100):
        lengths = [torch.randint(0, 300, (7,), generator=generator).tolist() for _ in range(2)]
        d, window = (64, 128, 80)[n % 3], (None, (50, 0), (0, 70))[n % 3]
        packed(*lengths, H=4, H_kv=2, d=d, dtype=torch.bfloat16, causal=n % 2 == 0, window=window, seed=n)


@needs_cuda
@pytest.mark.gpu
def test_cuda_graph_of_packed_sequences():
    """Captured once, replayed on other lengths: nothing in it is fixed but the maxima."""
    q, k, v = (torch.randn(256, 4, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    cu, other = starts(0, 100, 256), starts(0, 17, 256)
    calls = {"max_seqlen_q": 256, "max_seqlen_k": 256, "causal": True}
    flashlib.attention_varlen(q, k, v, cu, cu, **calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashlib.attention_varlen(q, k, v, cu, cu, **calls)
    cu.copy_(other)
    graph.replay()
    assert torch.equal(captured, flashlib.attention_varlen(q, k, v, other, other, **calls))
