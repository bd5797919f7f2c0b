"""Masks and packed sequences: references, counts, kernels, public functions."""

import inspect
import itertools
import math
import random

import numpy as np
import pytest
import torch
from cases import SHORT, each_level, far_apart, output_gradients, pairwise, slopes
from device import CUDA, DEVICE
from expected import same

import flashlib
from flashlib import score_mods, testing
from flashlib.iomodel import masks as counts
from flashlib.kernels import INTERPRETED, masks, masks_backward, tables
from flashlib.notebook import check
from flashlib.plain_checks import UNLIMITED, check_window
from flashlib.reference import masks as reference
from flashlib.reference import standard

pytestmark = pytest.mark.usefixtures("nan_filled")

WINDOWS = [None, (0, 0), (3, 0), (0, 5), (7, 4), (16, 16), (None, 2), (100, 100)]


def scoring(q, causal=False, window=None, softcap=None, alibi_slopes=None, scale=None):
    """What the kernels take for what the public function takes."""
    sides = check_window(window, causal)
    scale = standard.default_scale(q.shape[-1]) if scale is None else scale
    return score_mods.ScoreMod(scale, *sides, softcap or 0.0, alibi_slopes)


def judged(q, k, v, layout="contiguous", **options):
    """Run and judge both passes; returns their results."""
    how = scoring(q, **options)
    o, lse = masks.forward(q, k, v, how)
    testing.assert_within_budget(q, k, v, o, lse, **options)
    do, dlse = output_gradients(q, v, layout=layout)
    found = masks_backward.backward(q, k, v, o, lse, do, dlse, how)[:3]
    testing.assert_gradients_within_budget(q, k, v, do, *found, dlse=dlse, **options)
    return o, lse, *found


# -- references


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_visible_is_what_it_says(window, causal):
    left, right = (None, None) if window is None else window
    for T_q, T_k in ((7, 7), (3, 9), (9, 3), (1, 1), (0, 4), (4, 0)):
        seen = reference.visible(T_q, T_k, causal=causal, window=window)
        assert seen.shape == (T_q, T_k)
        for i, j in itertools.product(range(T_q), range(T_k)):
            p = i + T_k - T_q
            far = left is not None and p - j > left
            far = far or (right is not None and j - p > right)
            assert seen[i, j] == (not far and not (causal and j > p))


WRONG_WINDOWS = [
    *((TypeError, x) for x in (5, "ab", (1.0, 2), (True, 0), (None, "a"), {1, 2})),
    *((ValueError, x) for x in ((), (1,), (1, 2, 3), (-1, 0), (0, -1))),
]


@pytest.mark.parametrize("error, window", WRONG_WINDOWS, ids=repr)
def test_wrong_windows_are_refused(error, window):
    x = torch.zeros(1, 1, 3, 16, device=DEVICE)
    message = r"^window: .*\(left, right\), each None or an integer of at least 0, got "
    for refuse in (
        lambda: reference.visible(3, 3, window=window),
        lambda: counts.blocks_read(3, 3, 1, 1, window=window),
        lambda: flashlib.attention(x, x, x, window=window),
    ):
        with pytest.raises(error, match=message):
            refuse()


def test_a_side_beyond_every_distance_has_no_limit():
    assert check_window((10**12, 4)) == (UNLIMITED, 4)


CHANGES = {
    "window": {"window": (4, 2)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": slopes(4, 2).cpu().double()},
}
CHANGES["all"] = {"causal": True, "window": (3, 5), "softcap": 2.0}
CHANGES["all"] |= {"alibi_slopes": slopes(4).cpu().double()}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_reference_gradients_are_those_of_autograd(changes):
    q, k, v = (
        x.double().requires_grad_()
        for x in testing.make_qkv(2, 4, 9, 16, T_k=11, H_kv=2, d_v=24)
    )
    do, dlse = (x.cpu().double() for x in output_gradients(q.float(), v.float()))
    o, lse = reference.attention(q, k, v, scale=-0.4, **changes)
    wanted = torch.autograd.grad((o * do).sum() + (lse * dlse).sum(), (q, k, v))
    found = reference.gradients(q, k, v, do, scale=-0.4, dlse=dlse, **changes)
    for name, x, y in zip("qkv", found, wanted, strict=True):
        check(f"d{name}", x, y)


def test_packed_reference_is_a_mask_of_blocks():
    """Packed sequences see what a mask shows that is True in one block per sequence."""
    lengths_q, lengths_k = (3, 0, 4, 1), (2, 3, 4, 0)
    dense = [x.double() for x in testing.make_qkv(1, 2, 8, 16, T_k=9)]
    packing = testing.packing_of(lengths_q, lengths_k, "cpu")
    o, lse = reference.attention_varlen(
        *(x[0].transpose(0, 1) for x in dense), packing.starts_q, packing.starts_k
    )
    blocks = zip(lengths_q, lengths_k, strict=True)
    seen = torch.block_diag(*(torch.ones(a, b) for a, b in blocks)).bool()
    s = standard.scores(*dense[:2]).masked_fill(~seen, -math.inf)
    wanted = standard.output(standard.softmax(s), dense[2])
    check("o", o, wanted[0].transpose(0, 1))
    assert torch.equal(torch.isneginf(lse), ~seen.any(1).expand(2, -1))


# -- counts

SKIPPED, CUT, FULL = 0, 1, 2


def block_kinds(T_q, T_k, B_r, B_c, causal, window):
    """Blocks counted pair by pair; one that hangs over the keys' end is CUT."""
    seen = reference.visible(T_q, T_k, causal=causal, window=window).numpy()
    kinds = np.full((-(-T_q // B_r), -(-T_k // B_c)), SKIPPED)
    for I, J in np.ndindex(kinds.shape):
        block = seen[I * B_r : (I + 1) * B_r, J * B_c : (J + 1) * B_c]
        if block.any():
            kinds[I, J] = FULL if block.all() and block.shape[1] == B_c else CUT
    return kinds


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_closed_forms_agree_with_a_count_pair_by_pair(window, causal):
    for T_q, T_k, B_r, B_c in itertools.product(
        (0, 1, 33), (0, 16, 40), (1, 16), (2, 8)
    ):
        kinds = block_kinds(T_q, T_k, B_r, B_c, causal, window)
        sizes = (T_q, T_k, B_r, B_c, causal, window)
        assert counts.blocks_read(*sizes) == (kinds != SKIPPED).sum()
        assert counts.blocks_cut(*sizes) == (kinds == CUT).sum()
        for I, row in enumerate(kinds.tolist()):
            first, full_start, full_end, end = counts.key_blocks(I, *sizes)
            for J, kind in enumerate(row):
                read = FULL if full_start <= J < full_end else CUT
                assert kind == (read if first <= J < end else SKIPPED)
        pairs = reference.visible(T_q, T_k, causal=causal, window=window).sum()
        assert counts.visible_pairs(T_q, T_k, causal, window) == pairs
    for B in (1, 4, 16):
        square = (48, 48, B, B, causal, window)
        read, cut = counts.blocks_read(*square), counts.blocks_cut(*square)
        assert counts.square_blocks_read(48, B, causal, window) == read
        assert counts.square_blocks_cut(48, B, causal, window) == cut


def test_band_and_packed_counts():
    J_less_I = np.arange(6)[None, :] - np.arange(6)[:, None]
    for below, above in itertools.product(range(-1, 8), range(-1, 8)):
        inside = (J_less_I >= -below) & (J_less_I <= above)
        assert counts.band(6, below, above) == inside.sum()
    assert counts.packed_blocks_read((5, 0, 8), (5, 3, 2), 4, 4, True) == 3 + 0 + 1


def test_counts_of_any_mask_are_those_of_the_closed_forms():
    for window, (T_q, T_k), (B_r, B_c) in itertools.product(
        [(0, 0), (3, 0), (0, 5), (7, 4)], [(5, 9), (9, 4), (16, 16)], [(2, 3), (4, 2)]
    ):
        left, right = window

        def near(p, j, left=left, right=right):
            return (p - j <= left) & (j - p <= right)

        kinds = block_kinds(T_q, T_k, B_r, B_c, False, window)
        wanted = (kinds != SKIPPED).sum(), (kinds == CUT).sum()
        assert counts.measured_blocks(near, T_q, T_k, B_r, B_c) == wanted
    for T, B in ((8, 1), (12, 3), (16, 4), (10, 5)):
        for n in range(T + 1):
            wanted = counts.measured_blocks(
                lambda p, j, n=n: (j < n) | (j <= p), T, T, B, B
            )
            assert counts.prefix_blocks(T, B, n) == wanted
    chance = random.Random(0)
    for _ in range(60):
        lengths = [chance.randint(0, 9) for _ in range(chance.randint(1, 6))] + [1]
        document = np.repeat(np.arange(len(lengths)), lengths)
        T, (B_r, B_c) = len(document), chance.choices((1, 2, 3, 4, 7), k=2)
        for causal in (False, True):

            def own(p, j, document=document, causal=causal):
                return (document[p] == document[j]) & ((j <= p) | (not causal))

            wanted = counts.measured_blocks(own, T, T, B_r, B_c)
            assert counts.document_blocks(lengths, B_r, B_c, causal) == wanted
    with pytest.raises(ValueError, match="B: expected a divisor of T = 9, got 2"):
        counts.prefix_blocks(9, 2, 3)
    with pytest.raises(ValueError, match="n: expected at most 9, got 10"):
        counts.prefix_blocks(9, 3, 10)


@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ((2.0, 3, 1, 1), TypeError, "T_q: expected an integer, got float"),
        ((2, -1, 1, 1), ValueError, "T_k: expected at least 0, got -1"),
        ((2, 3, 0, 1), ValueError, "B_r: expected at least 1, got 0"),
    ],
)
def test_wrong_sizes_are_refused(sizes, error, message):
    for count in (counts.blocks_read, counts.blocks_cut):
        with pytest.raises(error, match=f"^{message}"):
            count(*sizes)


class Steps:
    """Counts the steps of a kernel's inner loop, and how many of them mask."""

    def __init__(self, monkeypatch, module, name):
        own = getattr(module, name)
        number = list(inspect.signature(own.fn).parameters).index("MASKED")
        self.read, self.cut = 0, 0

        def step(*arguments):
            self.read += 1
            self.cut += bool(getattr(arguments[number], "value", arguments[number]))
            return own(*arguments)

        monkeypatch.setattr(module, name, step)

    @classmethod
    def of_all(cls, monkeypatch):
        steps = (
            (masks, "attend"),
            (masks_backward, "collect"),
            (masks_backward, "descend"),
        )
        return [cls(monkeypatch, *step) for step in steps]


counts_steps = pytest.mark.skipif(
    not INTERPRETED, reason="counts the steps of kernels in the interpreter"
)


@counts_steps
@pytest.mark.parametrize(
    "T_q, T_k, options",
    [
        (70, 70, {"causal": True, "window": (20, 0)}),
        (70, 70, {"window": (40, 30)}),
        (33, 70, {"window": (16, 15)}),
        (70, 33, {"causal": True, "window": (31, None)}),
        (64, 64, {"softcap": 2.0}),
        (48, 70, {"window": (0, 0)}),
    ],
)
def test_kernels_read_the_blocks_of_the_closed_form(T_q, T_k, options, monkeypatch):
    B_r, B_c = 16, 32
    config = tables.INTERPRETER._replace(BLOCK_Q=B_r, BLOCK_K=B_c)
    monkeypatch.setattr(tables, "INTERPRETER", config)
    attend, collect, descend = Steps.of_all(monkeypatch)
    q, k, v = testing.make_qkv(1, 1, T_q, 16, T_k=T_k)
    judged(q, k, v, **options)
    window = (T_q, T_k, B_r, B_c, options.get("causal", False), options.get("window"))
    read, cut = counts.blocks_read(*window), counts.blocks_cut(*window)
    assert (attend.read, attend.cut) == (descend.read, descend.cut) == (read, cut)
    assert collect.read == read
    # dK and dV need no mask where keys or queries end: what hangs over is not stored,
    # or weighs nothing.
    kinds = block_kinds(T_q, T_k // B_c * B_c or T_k, B_r, B_c, *window[4:])
    assert collect.cut <= cut
    assert T_k % B_c or collect.cut == (kinds == CUT).sum()


@counts_steps
def test_packed_kernels_read_the_blocks_of_their_sequences(monkeypatch):
    lengths_q, lengths_k = (70, 0, 3, 64), (66, 5, 0, 64)
    attend, collect, descend = Steps.of_all(monkeypatch)
    packed(lengths_q, lengths_k, causal=True, window=(20, 0))
    read = counts.packed_blocks_read(lengths_q, lengths_k, 64, 64, True, (20, 0))
    assert attend.read == descend.read == collect.read == 2 * read


# -- kernels

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
    """Every change with one shape, and in slow tests on a GPU with many."""
    few = each_level({**SHORT, "heads": ((2, 2), (4, 2), (3, 1))}, seed=11)
    found = [
        pytest.param(few[n % len(few)], name, id=f"{name}-{few[n % len(few)]}")
        for n, name in enumerate(KERNEL_CHANGES)
    ]
    many = pairwise(SHORT, seed=12) if CUDA else []
    return found + [
        pytest.param(
            case, name, id=f"{name}-{case}", marks=[pytest.mark.gpu, pytest.mark.slow]
        )
        for case in many
        for name in KERNEL_CHANGES
    ]


@pytest.mark.parametrize("case, name", kernel_cases())
def test_kernels(case, name):
    q, k, v = case.inputs()
    options, (B, H) = dict(KERNEL_CHANGES[name]), q.shape[:2]
    if "alibi_slopes" in options:
        per_batch = options["alibi_slopes"] == "B H"
        options["alibi_slopes"] = slopes(H, B if per_batch else None)
    before = [x.clone() for x in (q, k, v)]
    judged(q, k, v, case.layout, causal=case.causal, scale=case.scale, **options)
    assert same((q, k, v), before)


@pytest.mark.parametrize(
    "T_q, T_k, window",
    [
        (130, 3, (0, 0)), (65, 130, (64, 0)), (1, 130, (63, 1)), (130, 1, (64, 0)),
        (65, 130, (63, 1)), (5, 0, (0, 0)), (0, 5, (64, 0)),
    ],
)  # fmt: skip
def test_edges_of_blocks(T_q, T_k, window):
    q, k, v = testing.make_qkv(1, 1, T_q, 16, T_k=T_k, device=DEVICE)
    o, lse, dq, dk, dv = judged(q, k, v, window=window)
    seen = reference.visible(T_q, T_k, window=window, device=DEVICE)
    blind, unseen = ~seen.any(1), ~seen.any(0)
    assert (o[:, :, blind] == 0).all() and (lse[:, :, blind] == -math.inf).all()
    assert (dq[:, :, blind] == 0).all()
    assert (dk[:, :, unseen] == 0).all() and (dv[:, :, unseen] == 0).all()


def test_keys_outside_of_the_window_are_never_used():
    """NaN there would show in every sum that touches it."""
    q, k, v = testing.make_qkv(1, 1, 64, 16, T_k=320, device=DEVICE)
    k[:, :, :128], v[:, :, :128] = math.nan, math.nan
    how = scoring(q, causal=True, window=(63, 0))
    o, lse = masks.forward(q, k, v, how)
    do, dlse = output_gradients(q, v)
    dq, dk, dv, *_ = masks_backward.backward(q, k, v, o, lse, do, dlse, how)
    kept = (q, k[:, :, 128:], v[:, :, 128:])
    options = {"causal": True, "window": (63, 0)}
    testing.assert_within_budget(*kept, o, lse, **options)
    assert (dk[:, :, :128] == 0).all() and (dv[:, :, :128] == 0).all()
    testing.assert_gradients_within_budget(
        *kept, do, dq, dk[:, :, 128:], dv[:, :, 128:], dlse=dlse, **options
    )


@pytest.mark.gpu
def test_250_runs_agree_in_every_bit():
    sizes = {"T_k": 90, "H_kv": 2, "dtype": torch.float16, "device": DEVICE}
    q, k, v = testing.make_qkv(1, 6, 113, 40, **sizes)
    how = scoring(q, window=(50, 20), softcap=3.0, alibi_slopes=slopes(6))
    do, dlse = output_gradients(q, v)

    def run():
        o, lse = masks.forward(q, k, v, how)
        return o, lse, *masks_backward.backward(q, k, v, o, lse, do, dlse, how)[:3]

    first = run()
    for _ in range(250):
        assert same(run(), first)


# -- packed sequences


def packed(
    lengths_q, lengths_k, H=2, H_kv=1, d=16, dtype=torch.float32, alibi=False, seed=0,
    **options,
):  # fmt: skip
    """Run and judge both passes of packed sequences, through the public function."""
    sizes = {"T_k": sum(lengths_k), "H_kv": H_kv, "dtype": dtype, "device": DEVICE}
    q, k, v = testing.make_qkv(1, H, sum(lengths_q), d, seed=seed, **sizes)
    do, dlse = output_gradients(q, v)
    q, k, v, do = (x[0].transpose(0, 1) for x in (q, k, v, do))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    packing = testing.packing_of(lengths_q, lengths_k, DEVICE)
    options |= {"alibi_slopes": slopes(H, len(lengths_q))} if alibi else {}
    o, lse = flashlib.attention_varlen(q, k, v, *packing, return_lse=True, **options)
    sees = torch.isfinite(lse)
    loss = (o * do).sum() + (lse[sees] * dlse[0][sees]).sum()
    found = torch.autograd.grad(loss, (q, k, v))
    dlse = dlse[0].masked_fill(~sees, 0.0)
    testing.assert_packed_within_budget(
        q, k, v, o, lse, packing, do=do, gradients=found, dlse=dlse, **options
    )


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


SEVERAL = {"causal": True, "window": (64, 0), "alibi": True}
PACKED = [
    {"window": (20, 3), "H": 4, "H_kv": 2},
    {"softcap": 2.0, "alibi": True},
    SEVERAL,
]


@pytest.mark.parametrize("options", PACKED, ids=str)
def test_packed_with_changed_scores(options):
    sizes = {"d": 40, "dtype": torch.float16}
    packed((70, 0, 5, 1), (66, 3, 9, 1), **sizes, **options)


def test_neighbors_do_not_leak():
    """One sequence is NaN; the others give the same bits as next to numbers."""
    lengths = (70, 5, 33)
    q, k, v = testing.make_qkv(1, 2, 108, 16, device=DEVICE)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    packing = testing.packing_of(lengths, lengths, DEVICE)

    def both(*tensors):
        leaves = [x.clone().requires_grad_() for x in tensors]
        options = {"window": (40, 2), "return_lse": True}
        o, lse = flashlib.attention_varlen(*leaves, *packing, **options)
        return o, lse.T, *torch.autograd.grad(o.sum() + lse.sum(), leaves)

    clean = both(q, k, v)
    for x in (q, k, v):
        x[70:75] = math.nan
    for x, y in zip(clean, both(q, k, v), strict=True):
        assert torch.equal(x[:70], y[:70]) and torch.equal(x[75:], y[75:])
        assert torch.isnan(y[70:75]).all()


def test_longer_maxima_and_strided_rows():
    """max_seqlen may exceed the longest, and q, k and v may be views of one buffer."""
    q, k, v = testing.make_qkv(20, 3, 4, 16)[0].to(DEVICE).unbind(1)
    packing = testing.packing_of((13, 7), (13, 7), DEVICE)
    o, lse = flashlib.attention_varlen(
        q, k, v, *packing[:2], 200, 150, causal=True, return_lse=True
    )
    testing.assert_packed_within_budget(q, k, v, o, lse, packing, causal=True)


def test_packed_offsets_beyond_int32():
    near = testing.make_qkv(3, 3, 3, 16, dtype=torch.float16, device=DEVICE)
    near, far = (
        [x[0].transpose(0, 1) for x in some] for some in (near, far_apart(near, "row"))
    )
    packing = testing.packing_of((1, 2), (1, 2), DEVICE)
    how = scoring(near[0])
    o, lse = masks.forward(*far, how, packing)
    found = masks_backward.backward(*far, o, lse, o, lse, how, packing)[:3]
    testing.assert_packed_within_budget(
        *near, o, lse, packing, do=o, gradients=found, dlse=lse
    )


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{"window": (600, 0)}, {"window": (100, 900), "softcap": 20.0}], ids=str
)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_long_sequences(d, options):
    sizes = {"T_k": 4096 + 77, "H_kv": 2, "dtype": torch.bfloat16, "device": DEVICE}
    q, k, v = testing.make_qkv(1, 4, 4096, d, layout="transposed", **sizes)
    judged(q, k, v, "transposed", alibi_slopes=slopes(4), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
def test_long_packed_sequences(d):
    lengths = (1, 2000, 0, 300, 4096 - 2301)
    options = {"dtype": torch.bfloat16, "causal": True, "alibi": True}
    packed(lengths, lengths, H=4, H_kv=2, d=d, **options)


@pytest.mark.gpu
@pytest.mark.slow
def test_many_ragged_packings():
    rng = random.Random(0)
    for n in range(100):
        lengths = [[rng.randrange(300) for _ in range(7)] for _ in "qk"]
        d, window = (64, 128, 80)[n % 3], (None, (50, 0), (0, 70))[n % 3]
        options = {"causal": n % 2 == 0, "window": window, "seed": n}
        packed(*lengths, H=4, H_kv=2, d=d, dtype=torch.bfloat16, **options)
