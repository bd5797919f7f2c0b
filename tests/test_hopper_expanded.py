"""Keys of 192 columns and values of 128 in the Hopper kernels: latent attention,
expanded. Its backward pass has a kernel of its own.
"""

import itertools

import pytest
import torch
from cases import output_gradients
from device import DEVICE, on_cpu, on_hopper, other_backward, other_forward
from expected import in_memory_order, same

import flashlib
from flashlib import masks, plans, testing
from flashlib.kernels import (
    backward,
    hopper,
    hopper_backward,
    hopper_expanded,
    hopper_host,
    hopper_tiles,
)
from flashlib.score_mods import unchanged

pytestmark = pytest.mark.usefixtures("nan_filled")
D, D_V = hopper_host.EXPANDED
SCALE = D**-0.5
# (H, H_kv, T_q, T_k): the ends of blocks, rows that see nothing, groups.
SIZES = (
    (2, 2, 128, 128), (2, 1, 300, 300), (4, 2, 257, 257), (4, 1, 130, 1000),
    (2, 2, 1000, 130), (3, 3, 1, 640), (2, 1, 65, 1), (8, 2, 2500, 2500),
)  # fmt: skip


def inputs(H, H_kv, T_q, T_k, dtype=torch.bfloat16, B=1, **changes):
    kind = {"dtype": dtype, "device": DEVICE}
    sizes = {"T_k": T_k, "H_kv": H_kv, "d_v": D_V}
    return testing.make_qkv(B, H, T_q, D, **sizes, **kind, **changes)


@on_hopper
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_forward_and_gradients(sizes, causal, layout):
    dtype = torch.float16 if layout == "transposed" else torch.bfloat16
    q, k, v = inputs(*sizes, dtype, B=2, layout=layout)
    before = [x.clone() for x in (q, k, v)]
    for row in dict.fromkeys(hopper_tiles.TILES[D]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hopper, "choose_tile", lambda *x, row=row, **how: row)
            patch.setattr(plans, "PLANS", {})
            o, lse = hopper.forward(q, k, v, unchanged(causal, SCALE))
        options = {"causal": causal, "scale": SCALE}
        testing.assert_within_budget(q, k, v, o, lse, **options)
        assert in_memory_order(o, q) and lse.is_contiguous()
    do, dlse = output_gradients(q, v)
    arguments = q, k, v, o, lse, do, dlse, unchanged(causal, SCALE)
    found = hopper_expanded.backward(*arguments)
    testing.assert_gradients_within_budget(q, k, v, do, *found, dlse=dlse, **options)
    assert all(map(in_memory_order, found, (q, k, v)))
    if causal:
        assert (found[0][:, :, : max(sizes[2] - sizes[3], 0)] == 0).all()
    assert same((q, k, v), before)
    for _ in range(30):
        assert same(found, hopper_expanded.backward(*arguments))
    any_order = hopper_expanded.backward(*arguments, deterministic=False)
    testing.assert_gradients_within_budget(
        q, k, v, do, *any_order, dlse=dlse, **options
    )


@on_hopper
@pytest.mark.parametrize("causal, left", [(False, None), (True, None), (True, 1000)])
@pytest.mark.parametrize("group", [1, 8])
def test_programs_that_fill_the_gpu_repeat_every_bit(group, causal, left):
    q, k, v = inputs(16, 16 // group, 4096, 4096, B=4)
    do, dlse = output_gradients(q, v)
    score_mod = unchanged(causal, SCALE, left)
    o, lse = hopper.forward(q, k, v, score_mod)
    arguments = q, k, v, o, lse, do, dlse, score_mod
    found = hopper_expanded.backward(*arguments)
    for _ in range(30):
        assert same((o, lse), hopper.forward(q, k, v, score_mod))
        assert same(found, hopper_expanded.backward(*arguments))
    q, do, dlse = (x[:1, :group] for x in (q, do, dlse))
    k, v, options = k[:1, :1], v[:1, :1], {"causal": causal, "dlse": dlse}
    if left is not None:
        options["window"] = (left, 0)
    results = found[0][:1, :group], found[1][:1, :1], found[2][:1, :1]
    testing.assert_gradients_within_budget(q, k, v, do, *results, **options)


@on_hopper
@pytest.mark.parametrize("T_q, T_k, left", [(300, 300, 0), (700, 900, 150)])
def test_windows(T_q, T_k, left):
    q, k, v = inputs(4, 2, T_q, T_k)
    do, dlse = output_gradients(q, v)
    score_mod = unchanged(True, SCALE, left)
    o, lse = hopper.forward(q, k, v, score_mod)
    testing.assert_within_budget(q, k, v, o, lse, window=(left, 0))
    arguments = q, k, v, o, lse, do, dlse, score_mod
    found = hopper_expanded.backward(*arguments)
    options = {"window": (left, 0), "dlse": dlse}
    testing.assert_gradients_within_budget(q, k, v, do, *found, **options)


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_and_masks(causal):
    q, k, v = inputs(4, 2, 500, 500)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    starts = torch.tensor([0, 1, 130, 500], dtype=torch.int32, device=DEVICE)
    o = flashlib.attention_varlen(*packed, starts, starts, 370, 370, causal=causal)
    for first, end in itertools.pairwise(starts.tolist()):
        one = [x[:, :, first:end] for x in (q, k, v)]
        own = o[first:end].transpose(0, 1)[None]
        testing.assert_within_budget(*one, own.contiguous(), causal=causal)
    o = flashlib.attention(q, k, v, mask=masks.prefix(100), method="hopper")
    hidden = torch.arange(500) > torch.arange(500)[:, None]
    hidden[:, :100] = False
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, *(y.repeat_interleave(2, 1) for y in (k, v)))),
        attn_mask=~hidden.to(DEVICE),
    )
    assert testing.rms(o - wanted).max() < 0.02 * testing.rms(wanted).max()


@on_hopper
@pytest.mark.parametrize("value", [-200.0, 200.0])
def test_every_score_is_equal_and_large(value):
    """O is the mean of V, and L the score plus ln T_k."""
    q, _, v = inputs(1, 1, 300, 300)
    q = torch.ones_like(q)
    o, lse = hopper.forward(q, q.clone(), v, unchanged(False, value / D))
    testing.assert_within_budget(q, q, v, o, lse, scale=value / D)


@pytest.fixture
def as_if_on_hopper(monkeypatch):
    """Every tensor fits, and flash2 runs in place of the kernels."""
    calls = []
    monkeypatch.setattr(plans, "PLANS", {})
    monkeypatch.setattr(hopper_host, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def spied(name, ran):
        return lambda *x, **options: calls.append(name) or ran(*x, **options)

    for module, ran in (
        (hopper_backward, other_backward), (hopper_expanded, other_backward),
        (backward, backward.backward),
    ):  # fmt: skip
        monkeypatch.setattr(module, "backward", spied(module.__name__, ran))
    monkeypatch.setattr(hopper, "forward", spied(hopper.__name__, other_forward))
    return calls


@on_cpu
@pytest.mark.parametrize("d, d_v", [(D, D_V), (128, 128), (D, 64)])
@pytest.mark.parametrize("window", [None, (20, 0)])
def test_auto_chooses_the_kernels_by_width(d, d_v, window, as_if_on_hopper):
    q, k, v = testing.make_qkv(
        1, 1, 40, d, d_v=d_v, dtype=torch.float16, requires_grad=True
    )
    o = flashlib.attention(q, k, v, causal=True, window=window)
    testing.assert_within_budget(q, k, v, o, causal=True, window=window)
    torch.autograd.grad(o.sum(), q)
    names = [name.rpartition(".")[2] for name in as_if_on_hopper]
    if d_v == 64:
        assert names == ([] if window else ["backward"])
    else:
        assert names == ["hopper", "hopper_expanded" if d == D else "hopper_backward"]


@on_cpu
def test_other_widths_of_values_are_refused(as_if_on_hopper):
    for d, d_v in ((D, 64), (D, D), (128, 192)):
        q, k, v = testing.make_qkv(1, 1, 8, d, d_v=d_v, dtype=torch.float16)
        with pytest.raises(ValueError, match=f"d = 192 .*, got d = {d}, d_v = {d_v}"):
            flashlib.attention(q, k, v, method="hopper")
