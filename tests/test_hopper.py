"""The kernels for compute capability 9.0 and the public functions on them; on a GPU see
test_gpu.py too.

Barriers can wait for ever. On a GPU run this file under a limit of time: `timeout 600
python -m pytest ...`.
"""

import functools
import math
import os
import random
import re
import sys
from pathlib import Path

import cases
import pytest
import torch
from cases import EMPTY, Case, check_empty, far_apart, output_gradients, pairwise
from device import DEVICE, HOPPER, on_hopper
from expected import in_memory_order, refused, same
from hopper_calls import (
    called,
    hidden,
    hopper_with_tile,
    inputs,
    keep_always,
    with_tile,
)
from masks_of_tests import some_masks
from processes import output, run

import flashlib
from flashlib import masks, score_mods, testing
from flashlib.kernels import (
    backward,
    hopper,
    hopper_backward,
    hopper_host,
    hopper_tiles,
)
from flashlib.kernels.steps import hopper as steps
from flashlib.kernels.steps import small_hopper
from flashlib.masks import Mask
from flashlib.score_mods import unchanged

pytestmark = pytest.mark.usefixtures("nan_filled")
SOAK_SECONDS = int(os.environ.get("SOAK_SECONDS", "240"))

# Lengths about the ends of blocks, and those that no block divides; the layouts that
# descriptors can read.
LENGTHS = (17, 113, 1, 203, 64, 129, 384)
FACTORS = {
    **cases.FACTORS, "T_q": LENGTHS, "T_k": LENGTHS, "d": (64, 128, 256), "d_v": ("d",),
    "layout": ("contiguous", "transposed", "packed"), "dtype": ("bfloat16", "float16"),
}  # fmt: skip
# Less for the steps: every mask, width and ragged end of each is compiled on its own.
FEW = (203, 1, 128)
STEP_FACTORS = FACTORS | {"T_q": FEW, "T_k": FEW, "dtype": ("bfloat16",)}


def parametrized(listed):
    return pytest.mark.parametrize("case", listed, ids=str)


# -- what is refused

FITTING = Case(17, 33, 64, "d", (4, 2), "contiguous", "bfloat16", False, 1.0, None)
REFUSED = {
    "float32": (FITTING._replace(dtype="float32"), "float16 or bfloat16"),
    "d = 80": (FITTING._replace(d=80), "64, 128, 256"),
    "narrow values": (FITTING._replace(d=128, d_v=64), "d = d_v"),
    "strided": (FITTING._replace(layout="strided"), "stride"),
    "unaligned": (FITTING._replace(layout="unaligned"), "16 bytes"),
    "expanded": (FITTING._replace(layout="expanded"), "16 bytes"),
}


@pytest.fixture
def as_if_on_hopper(monkeypatch):
    """Everything but the tensors is as on a GPU of compute capability 9.0."""
    if HOPPER:
        return
    monkeypatch.setattr(hopper_host, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def test_what_fits_is_not_refused(as_if_on_hopper):
    wide, single = {"d": 256, "layout": "packed"}, {"T_q": 1, "heads": (7, 1)}
    for case in (FITTING, FITTING._replace(**wide), FITTING._replace(**single)):
        assert hopper_host.tensor_refusal(*case.inputs()) is None, case


@pytest.mark.parametrize("case, words", REFUSED.values(), ids=REFUSED)
def test_tensors_that_it_cannot_read(case, words, as_if_on_hopper):
    reason = hopper_host.tensor_refusal(*case.inputs())
    assert reason and words in reason and ", got " in reason


UNFIT = {
    "no dropout, got 0.5": {"seed": torch.zeros(1), "dropout": 0.5},
    "a bias .* got \\(16777216, 1\\)": {
        "bias": torch.empty(1, 1, 4, 2**24, device="meta")
    },
    "at most .* rows with alibi_slopes, got 8388609": {"slopes": torch.ones(2)},
    "a scale .* with alibi_slopes, got 1e-07": {"slopes": torch.ones(2), "scale": 1e-7},
    "causal or .* got 3": {"right": 3},
    "neither .* got a left side of 5": {"left": 5, "right": 0, "mask": "m"},
}
UNFIT_PACKED = {
    ".* with a score, got packed ones": {"function": "f"},
    ".* with alibi_slopes, got packed ones": {"slopes": torch.ones(2)},
    "neither .* got packed sequences": {"mask": "m"},
}


@pytest.mark.parametrize("words, changes", [*UNFIT.items(), *UNFIT_PACKED.items()])
def test_scores_that_it_cannot_change(words, changes):
    longest = hopper_host.LONGEST_ALIBI + ("scale" not in changes)
    score_mod = score_mods.ScoreMod(**{"scale": 1.0} | changes)
    reason = hopper_host.score_refusal(score_mod, words in UNFIT_PACKED, longest)
    assert re.fullmatch(words, reason)


# What the gradients need beyond the forward pass: (case, changes of ScoreMod).
UNFIT_BACKWARD = {
    "d = 64 or 128 .* got 256": (FITTING._replace(d=256), {"softcap": 3.0}),
    "another d .* got 192": (
        FITTING._replace(d=192, d_v=128), {"right": 0, "sinks": torch.zeros(4)},
    ),
    "tensors that are not empty .*": (FITTING._replace(T_k=0), {"softcap": 3.0}),
}  # fmt: skip


@pytest.mark.parametrize("words, call", UNFIT_BACKWARD.items(), ids=UNFIT_BACKWARD)
def test_gradients_that_it_cannot_compute(words, call, as_if_on_hopper):
    case, changes = call
    tensors, score_mod = case.inputs(), score_mods.ScoreMod(0.1, **changes)
    assert hopper_host.forward_refusal(*tensors, score_mod) is None
    assert re.fullmatch(words, hopper_host.backward_refusal(*tensors, score_mod))
    assert hopper_host.backward_refusal(*tensors, unchanged(True, 0.1)) is None


@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("causal", [False, True])
def test_empty(shape, causal, as_if_on_hopper):
    """Nothing is launched, so this runs anywhere."""
    check_empty(shape, 64, "hopper", causal, torch.bfloat16)


def test_sinks_without_keys_are_left_to_another_kernel(as_if_on_hopper):
    """L is the sink; no key gives O = 0."""
    q, k, v = FITTING._replace(T_k=0).inputs()
    score_mod = score_mods.ScoreMod(0.1, sinks=torch.zeros(q.shape[1]))
    refused = hopper_host.forward_refusal(q, k, v, score_mod)
    assert refused == "keys next to sinks, got none"
    assert hopper_host.backward_refusal(q, k, v, score_mod) == refused


# -- forward


def test_every_row_of_the_table_is_chosen():
    for d, rows in hopper_tiles.TILES.items():
        lengths = (1, 512, 4096, 131072)
        chosen = {
            hopper.choose_tile(d, T_q, mask)
            for T_q in lengths
            for mask in (False, True)
        }
        assert chosen == set(rows)
        # A mask that is a function needs tiles whose sides are powers of two.
        masked = {hopper.choose_tile(d, T_q, False, masked=True) for T_q in lengths}
        assert masked == {row for row in rows if row.CONSUMERS < 3}
        how = {"masked": True, "narrow": True}
        assert {hopper.choose_tile(d, T, False, **how) for T in lengths} == {rows[0]}


@on_hopper
@parametrized(pairwise(FACTORS, seed=21))
def test_forward(case):
    q, k, v = case.inputs()
    before = [x.clone() for x in (q, k, v)]
    assert hopper_host.tensor_refusal(q, k, v) is None
    for row in dict.fromkeys(hopper_tiles.TILES[case.d]):
        o, lse = with_tile(row)(q, k, v, case.causal, case.scale_value)
        testing.assert_within_budget(
            q, k, v, o, lse, causal=case.causal, scale=case.scale
        )
        assert in_memory_order(o, q) and lse.is_contiguous()
    assert same((q, k, v), before)


@on_hopper
@pytest.mark.parametrize("step", steps.STEPS)
@parametrized(pairwise(STEP_FACTORS, seed=22))
def test_steps(step, case):
    q, k, v = case.inputs()
    o, lse = steps.forward(q, k, v, case.causal, case.scale_value, step)
    testing.assert_within_budget(q, k, v, o, lse, causal=case.causal, scale=case.scale)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "T_k", [128, 256, 1024]
)  # the second slot is used 0 to 4 times
def test_small_kernel(d, T_k, dtype):
    q, k, v = inputs(1, 1, 192, d, dtype, T_k=T_k)
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=DEVICE)
    small_hopper.launch(*(x[0, 0] for x in (q, k, v, o, lse)), 0.3)
    testing.assert_within_budget(q, k, v, o, lse, scale=0.3)


# {name: ((q, k, v, causal, scale) -> (o, lse), d)}: hopper with every row of its table,
# the steps in one width.
VARIANTS = {
    f"hopper-d{d}-{row[0]}x{row[1]}{end}": (with_tile(row, keep), d)
    for end, keep in (("", False), ("-keep", True))
    for d, rows in hopper_tiles.TILES.items()
    # Values are narrower at one d, which test_hopper_expanded.py has.
    if d != hopper_host.EXPANDED[0]
    for row in rows
} | {step: (functools.partial(steps.forward, step=step), 128) for step in steps.STEPS}


@pytest.fixture(params=VARIANTS)
def variant(request):
    return VARIANTS[request.param]


def judge(variant, q, k, v, causal=False, scale=None):
    """The judged results of a variant."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    o, lse = variant[0](q, k, v, causal, scale)
    testing.assert_within_budget(q, k, v, o, lse, causal=causal, scale=scale)
    return o, lse


@on_hopper
@pytest.mark.parametrize("value", [-200.0, 200.0])
def test_every_score_is_equal_and_large(variant, value):
    """O is the mean of V, and L the score plus ln T_k."""
    _, _, v = inputs(1, 1, 300, variant[1])
    q = torch.ones_like(v)
    judge(variant, q, q.clone(), v, scale=value / variant[1])


@on_hopper
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_increasing_scores_rescale_at_every_block(variant, sign):
    """The maximum grows by far more than the range of float32."""
    _, _, v = inputs(1, 1, 703, variant[1])
    k = sign * torch.linspace(-30, 30, 703, device=DEVICE)[:, None]
    judge(variant, torch.ones_like(v), k.expand_as(v).bfloat16(), v, scale=0.1)


KEPT_WITH = {
    "causal": {"causal": True},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": torch.tensor([3.0, -20.0])},
    "prefix": {"mask": masks.prefix(150)},
    "prefix, softcap, sinks": {
        "mask": masks.prefix(150), "softcap": 400.0, "sinks": torch.tensor([3.0, -20.0])
    },
}  # fmt: skip


@on_hopper
@pytest.mark.parametrize("rise", [0.0, 700.0, 5000.0])
@pytest.mark.parametrize("changes", KEPT_WITH)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_kept_maximum(d, changes, rise, monkeypatch):
    """Scores that rise over the keys: from no tile that is computed again to nearly
    all. Two calls agree in every bit.
    """
    keep_always(monkeypatch)
    q, k, v = inputs(1, 2, 1000, d, T_k=1100, H_kv=1)
    k[..., 0] = torch.linspace(0, rise, 1100, device=DEVICE)
    q[..., 0] = torch.where(torch.arange(1000, device=DEVICE) % 3 == 0, 10.0, -1.0)
    options = dict(KEPT_WITH[changes], scale=0.1)
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(DEVICE)
    o, lse = flashlib.attention(q, k, v, return_lse=True, **options)
    # L is up to 5,000, where PyTorch's evaluation is often right to the last bit.
    testing.assert_within_budget(q, k, v, o, lse if rise == 0.0 else None, **options)
    _, exact = testing.oracle(q, k, v, **options)
    torch.testing.assert_close(lse.double(), exact, rtol=2**-17, atol=2**-10)
    for _ in range(20):
        again = flashlib.attention(q, k, v, return_lse=True, **options)
        assert same((o, lse), again)


EDGES = [
    (300, 3), (300, 130), (129, 128), (128, 129), (1, 300), (300, 1),
    (256, 128), (128, 256), (3, 300), (64, 64), (192, 64), (257, 255), (127, 383),
]  # fmt: skip


@on_hopper
@pytest.mark.parametrize("T_q, T_k", EDGES)
def test_causal_mask_at_the_edges_of_blocks(variant, T_q, T_k):
    o, lse = judge(variant, *inputs(1, 2, T_q, variant[1], T_k=T_k), True)
    blind = max(T_q - T_k, 0)
    assert (o[:, :, :blind] == 0).all() and (lse[:, :, :blind] == -math.inf).all()


# (T_q, T_k, keys before its own that a query sees)
WINDOWS = [
    (300, 300, 0), (300, 300, 1), (257, 255, 63), (256, 256, 64), (300, 130, 65),
    (130, 300, 127), (1, 300, 128), (700, 700, 129), (700, 900, 191),
    (900, 700, 256), (1111, 1301, 300), (513, 513, 10**6),
]  # fmt: skip


@on_hopper
@pytest.mark.parametrize("T_q, T_k, left", WINDOWS)
def test_window(variant, T_q, T_k, left):
    forward, d = variant
    if forward.func is not hopper_with_tile:
        pytest.skip("the steps have no window")
    q, k, v = inputs(2, 4, T_q, d, T_k=T_k, H_kv=2)
    found = forward(q, k, v, True, d**-0.5, left)
    testing.assert_within_budget(q, k, v, *found, window=(left, 0))
    for _ in range(30):
        assert same(found, forward(q, k, v, True, d**-0.5, left))
    if left > T_k:
        assert same(found, forward(q, k, v, True, d**-0.5))


def surrounded(x):
    """The numbers of x as a slice of a larger tensor that is NaN elsewhere."""
    B, H, T, d = x.shape
    larger = x.new_full((B + 2, H + 2, T + 5, 3 * d), math.nan)
    return larger[1:-1, 1:-1, 2:-3, d:-d].copy_(x)


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
def test_slices_of_larger_tensors_and_more_tiles_than_multiprocessors(variant, causal):
    """A copy beyond the end of a head or batch would read the next. 70 heads, which no
    section divides, are several tiles for each program.
    """
    larger = (surrounded(x) for x in inputs(2, 4, 150, variant[1], T_k=203, H_kv=2))
    judge(variant, *larger, causal)
    judge(variant, *inputs(5, 14, 300, variant[1], T_k=203, H_kv=7), causal)


@on_hopper
@pytest.mark.parametrize("dimension", ["batch", "head", "row"])
def test_offsets_beyond_int32(dimension):
    near = inputs(3, 3, 3, 64, dtype=torch.float16)
    far = far_apart(near, dimension)
    assert hopper_host.tensor_refusal(*far) is None
    o, lse = hopper.forward(*far, unchanged(False, 0.125))
    testing.assert_within_budget(*near, o, lse, scale=0.125)


@on_hopper
@pytest.mark.parametrize(
    "shape", [(35000, 2, 1, 3), (3000, 4, 70, 70), (64, 16, 300, 200)], ids=str
)
def test_a_slot_is_not_overwritten_while_it_is_read(variant, shape):
    """Tiles of a block or two follow so fast that a late read meets the next."""
    forward, d = variant
    B, H, T_q, T_k = shape
    q, k, v = inputs(B, H, T_q, d, T_k=T_k, H_kv=H // 2, dtype=torch.float16)
    first = forward(q, k, v, T_q > 1, 0.125)
    for _ in range(30):
        assert same(first, forward(q, k, v, T_q > 1, 0.125))


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
def test_1000_repeats_agree_in_every_bit(variant, causal):
    """A missing barrier between warp groups makes a difference at some time."""
    forward, d = variant
    q, k, v = inputs(3, 16, 1111, d, T_k=1301, H_kv=2)
    o, lse = forward(q, k, v, causal, 0.1)
    differs = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(1000):
        again, lse_again = forward(q, k, v, causal, 0.1)
        differs |= (again != o).any() | (lse_again != lse).any()
    assert not differs


# -- backward


def judged(q, k, v, do, dlse, causal, scale=None):
    """``(dq, dk, dv)`` after hopper's forward pass."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    score_mod = unchanged(causal, scale)
    o, lse = hopper.forward(q, k, v, score_mod)
    assert hopper_host.backward_refusal(q, k, v, score_mod) is None
    found = hopper_backward.backward(q, k, v, o, lse, do, dlse, score_mod)
    options = {"causal": causal, "scale": scale, "dlse": dlse}
    testing.assert_gradients_within_budget(q, k, v, do, *found, **options)
    return found


@on_hopper
@parametrized(pairwise(FACTORS, seed=23))
def test_backward(case):
    q, k, v = case.inputs()
    layout = {"contiguous": "expanded", "packed": "transposed"}.get(case.layout)
    do, dlse = output_gradients(q, q, layout=layout or case.layout)
    arguments = (q, k, v, do, dlse)
    before = [x.clone() for x in arguments]
    found = judged(*arguments, case.causal, case.scale_value)
    assert all(map(in_memory_order, found, (q, k, v)))
    assert same(arguments, before)


@on_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("T_q, T_k", EDGES)
def test_backward_with_a_mask_at_the_edges_of_blocks(T_q, T_k, d):
    q, k, v = inputs(1, 4, T_q, d, T_k=T_k, H_kv=2)
    found = judged(q, k, v, *output_gradients(q, q), True)
    assert (found[0][:, :, : max(T_q - T_k, 0)] == 0).all()


@on_hopper
@pytest.mark.parametrize("causal, left", [(False, None), (True, None), (True, 1000)])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("group", [1, 8])
def test_each_part_of_dq_is_in_memory_before_the_next_is_added(group, d, causal, left):
    """Programs that fill the GPU wait for each other, most of all those of groups. With
    a counter that did not release the sum, every call for groups at d = 128 differed.
    """
    q, k, v = inputs(4, 16, 4096, d, H_kv=16 // group)
    do, dlse = output_gradients(q, q)
    score_mod = unchanged(causal, d**-0.5, left)
    o, lse = hopper.forward(q, k, v, score_mod)
    arguments = (q, k, v, o, lse, do, dlse, score_mod)
    found = hopper_backward.backward(*arguments)
    for _ in range(30):
        assert same(found, hopper_backward.backward(*arguments))
    q, do, dlse = (x[:1, :group] for x in (q, do, dlse))
    k, v, options = k[:1, :1], v[:1, :1], {"causal": causal, "dlse": dlse}
    if left is not None:
        options["window"] = (left, 0)
    for dq, dk, dv in (
        found,
        hopper_backward.backward(*arguments, deterministic=False),
    ):
        results = dq[:1, :group], dk[:1, :1], dv[:1, :1]
        testing.assert_gradients_within_budget(q, k, v, do, *results, **options)


@on_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("T_q, T_k, left", WINDOWS)
def test_backward_of_a_window(T_q, T_k, left, d):
    q, k, v = inputs(2, 4, T_q, d, T_k=T_k, H_kv=2)
    do, dlse = output_gradients(q, q)
    score_mod = unchanged(True, d**-0.5, left)
    o, lse = hopper.forward(q, k, v, score_mod)
    arguments = (q, k, v, o, lse, do, dlse, score_mod)
    found = hopper_backward.backward(*arguments)
    testing.assert_gradients_within_budget(
        q, k, v, do, *found, window=(left, 0), dlse=dlse
    )
    for _ in range(30):
        assert same(found, hopper_backward.backward(*arguments))


@on_hopper
@pytest.mark.parametrize("method", ["auto", "hopper"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_public_function_slides_on_it(d, method):
    """Forward, and backward where there is a kernel; elsewhere those of masks."""
    q, k, v = inputs(1, 4, 700, d, H_kv=2, requires_grad=True)
    do, _ = output_gradients(q, q)
    options = {"causal": True, "window": (200, None)}
    o, lse = flashlib.attention(q, k, v, method=method, return_lse=True, **options)
    leaves = [x.detach() for x in (q, k, v)]
    expected = hopper.forward(*leaves, unchanged(True, d**-0.5, 200))
    assert same((o.detach(), lse.detach()), expected)
    found = torch.autograd.grad(o, (q, k, v), do)
    testing.assert_gradients_within_budget(*leaves, do, *found, window=(200, 0))


@on_hopper
@pytest.mark.parametrize("d", [64, 128])
def test_a_window_without_a_limit_is_a_causal_mask(d):
    leaves = [x.requires_grad_() for x in inputs(1, 2, 300, d)]
    found = [
        torch.autograd.grad(flashlib.attention(*leaves, **mask).sum(), leaves)
        for mask in ({"causal": True}, {"window": (None, 0)})
    ]
    assert same(*found)


@on_hopper
def test_a_window_that_it_cannot_take():
    q, k, v = inputs(1, 2, 100, 64)
    with refused(ValueError, "method: 'hopper' expected causal or .*, got 3"):
        flashlib.attention(q, k, v, window=(5, 3), method="hopper")
    with refused(ValueError, "method: 'hopper' expected neither packed .* side of 5"):
        options = {"window": (5, 0), "mask": masks.prefix(2)}
        flashlib.attention(q, k, v, **options, method="hopper")


@on_hopper
def test_rows_that_see_nothing_give_and_take_nothing():
    """Gradients of zero, exactly, however large dO and dL are there."""
    q, k, v = inputs(1, 2, 300, 64, T_k=3)
    do, dlse = output_gradients(q, q)
    do[:, :, :297], dlse[:, :, :297] = 1e30, -1e30
    found = judged(q, k, v, do, dlse, True)
    assert (found[0][:, :, :297] == 0).all()


@on_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_backward_of_a_slice_of_a_larger_tensor(causal, d):
    q, k, v = (surrounded(x) for x in inputs(2, 4, 150, d, T_k=203, H_kv=2))
    do, dlse = output_gradients(q, q)
    judged(q, k, v, surrounded(do), dlse, causal)


@on_hopper
@pytest.mark.parametrize("logit", [-120.0, 120.0])
@pytest.mark.parametrize("causal", [False, True])
def test_logits_far_from_zero(logit, causal):
    """float32 holds neither exp(-120) nor exp(120), only differences from L."""
    q, k, v = inputs(1, 1, 150, 64, T_k=203)
    q[..., 0], k[..., 0] = 1.0, 8.0 * logit
    judged(q, k, v, *output_gradients(q, q), causal)


# -- masks that are functions, and sinks


def judged_mask(mask, q, k, v, *, causal=False, sinks=None):
    """The results of every tile that takes a mask, judged; those of the last one."""
    of = score_mods.mask_of(mask)
    options = {"causal": causal, "mask": mask, "sinks": sinks}
    for row in dict.fromkeys(hopper_tiles.TILES[q.shape[3]]):
        if row.CONSUMERS < 3:
            score_mod = unchanged(causal, q.shape[3] ** -0.5)
            score_mod = score_mod._replace(mask=of, sinks=sinks)
            o, lse = with_tile(row)(q, k, v, score_mod)
            testing.assert_within_budget(q, k, v, o, lse, **options)
    return o, lse


@on_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(
    ("T_q", "T_k"), [(1, 1), (128, 128), (333, 512), (512, 333), (64, 700), (700, 1)]
)
def test_masks_that_are_functions(T_q, T_k, d):
    rng = random.Random(f"{T_q} {T_k} {d}")
    q, k, v = inputs(2, 4, T_q, d, T_k=T_k, H_kv=2)
    # Few, since each is compiled for each tile.
    for mask in rng.sample(some_masks(2, 4, T_q, T_k, rng), 3):
        judged_mask(mask, q, k, v)


@on_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
def test_rows_and_tiles_that_a_mask_hides(d):
    q, k, v = inputs(2, 4, 600, d, torch.float16, H_kv=2)
    o, lse = judged_mask(Mask(hidden, 200), q, k, v)
    for first in (0, 400):
        assert (o[:, :, first : first + 200] == 0).all()
        assert (lse[:, :, first : first + 200] == -math.inf).all()
    o, lse = judged_mask(~Mask(hidden, 200) & Mask(hidden, 200), q, k, v)
    assert (o == 0).all() and (lse == -math.inf).all()


@on_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_sinks(causal, d):
    q, k, v = inputs(2, 4, 300, d, T_k=203, H_kv=2)
    sinks = torch.tensor([-3.0, 0.0, 4.0, 90.0], device=DEVICE)
    judged_mask(masks.prefix(70), q, k, v, causal=causal, sinks=sinks)
    o, lse = hopper.forward(q, k, v, unchanged(causal, 0.1)._replace(sinks=sinks))
    options = {"causal": causal, "sinks": sinks, "scale": 0.1}
    testing.assert_within_budget(q, k, v, o, lse, **options)


@on_hopper
def test_a_mask_that_means_causal_is_causal():
    """Where both read the same blocks, in every bit."""
    q, k, v = inputs(1, 2, 512, 128)
    run, mask = with_tile(hopper_tiles.ForwardTile(2, 128, 2, True)), masks.causal()
    mask = score_mods.mask_of(mask)
    found = run(q, k, v, score_mods.ScoreMod(128**-0.5, mask=mask))
    assert same(found, run(q, k, v, True, 128**-0.5))


# -- through the public functions


@on_hopper
@pytest.mark.parametrize("method", ["hopper", "auto"])
def test_attention_with_a_mask_and_its_gradients(method, monkeypatch):
    forwards = called(monkeypatch, hopper, "forward")
    q, k, v = public_inputs(requires_grad=True)
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0], device=DEVICE, requires_grad=True)
    options = {"mask": masks.prefix(70), "sinks": sinks}
    more = {"method": method, "return_lse": True}
    o, lse = flashlib.attention(q, k, v, **options, **more)
    testing.assert_within_budget(q, k, v, o, lse, **options)
    do, dlse = output_gradients(q, q)
    found = torch.autograd.grad((o, lse), (q, k, v, sinks), (do, dlse))
    other = flashlib.attention(q, k, v, **options, return_lse=True, method="flash2")
    wanted = torch.autograd.grad(other, (q, k, v, sinks), (do, dlse))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    assert len(forwards) == 1


def public_inputs(d=64, **changes):
    return inputs(2, 4, 300, d, H_kv=2, **changes)


@on_hopper
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("method", ["hopper", "auto"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_attention_and_its_gradients(method, d, deterministic, monkeypatch):
    torch.use_deterministic_algorithms(deterministic)  # nan_filled sets it back
    forwards = called(monkeypatch, hopper, "forward")
    backwards = called(monkeypatch, hopper_backward, "backward")
    tiled = called(monkeypatch, backward, "backward")
    q, k, v = public_inputs(d, requires_grad=True)
    options = {"method": method, "return_lse": True, "deterministic": deterministic}
    o, lse = flashlib.attention(q, k, v, causal=True, **options)
    testing.assert_within_budget(q, k, v, o, lse, causal=True)
    do, dlse = output_gradients(q, q)
    found = torch.autograd.grad((o, lse), (q, k, v), (do, dlse))
    testing.assert_gradients_within_budget(q, k, v, do, *found, causal=True, dlse=dlse)
    assert list(map(len, (forwards, backwards, tiled))) == [1, 1, 0]


@on_hopper
@pytest.mark.parametrize("case, words", REFUSED.values(), ids=REFUSED)
def test_auto_takes_flash2_for_what_hopper_refuses(case, words, monkeypatch):
    forwards = called(monkeypatch, hopper, "forward")
    q, k, v = case.inputs()
    tiled = flashlib.attention(q, k, v, method="flash2")
    assert torch.equal(flashlib.attention(q, k, v), tiled)
    with pytest.raises(ValueError, match=rf"^method: .*hopper.*{words}.*, got "):
        flashlib.attention(q, k, v, method="hopper")
    assert not forwards


@on_hopper
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("method", ["hopper", "auto"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_without_a_graph_break(method, backend, dynamic, monkeypatch):
    """What a descriptor cannot read is known only when compiled code runs."""
    forwards = called(monkeypatch, hopper, "forward")

    def loss(q, k, v):
        o, lse = flashlib.attention(
            q, k, v, causal=True, method=method, return_lse=True
        )
        return o.float().square().sum() + lse.sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=backend, dynamic=dynamic)
    q, k, v = public_inputs(requires_grad=True)
    found = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    assert len(forwards) == 1
    o = flashlib.attention(q, k, v, causal=True, method=method)  # has a plan already
    ones = torch.ones(q.shape[:3], device=DEVICE)
    do = 2 * o.detach()
    testing.assert_gradients_within_budget(q, k, v, do, *found, causal=True, dlse=ones)
    unaligned = public_inputs(layout="unaligned")
    if method == "auto":
        assert torch.isfinite(compiled(*unaligned)) and len(forwards) == 1
    else:
        with pytest.raises(ValueError, match=r"^method: .*hopper.*16 bytes"):
            compiled(*unaligned)


# -- no hang


@on_hopper
@pytest.mark.slow
def test_random_shapes_for_minutes():
    """In a process of its own, which ends itself if it hangs, both passes."""
    script = Path(__file__).with_name("hopper_soak.py")
    # Before its SOAK_SECONDS begin, it compiles, which takes minutes next to other
    # tests.
    done = run([sys.executable, str(script), str(SOAK_SECONDS)], SOAK_SECONDS + 300)
    assert "all right" in output(done)
