"""Lists of tiles that a caller makes once and passes to several calls."""

import random

import numpy as np
import pytest
import torch
from cases import output_gradients
from device import CUDA, DEVICE
from expected import refused, same
from masks_of_tests import some_masks

import flashlib
from flashlib import masks, testing
from flashlib.block_lists import BlockLists
from flashlib.kernels import tile_lists
from flashlib.masks import Mask

pytestmark = pytest.mark.usefixtures("nan_filled")


def gradients(o, lse, leaves, pair):
    return torch.autograd.grad((o, lse), leaves, pair)


@pytest.mark.parametrize(
    "place", [11, 16, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 14))]
)
def test_every_bit_is_that_of_a_call_that_makes_lists(place, monkeypatch):
    B, H, T_q, T_k = (2, 4, 300, 340) if CUDA else (2, 2, 70, 90)
    q, k, v = testing.make_qkv(
        B, H, T_q, 16, T_k=T_k, H_kv=1, d_v=24, device=DEVICE, requires_grad=True
    )
    mask, pair = some_masks(B, H, T_q, T_k, random.Random(0))[place], None
    wanted, pair = (), output_gradients(q, v)
    o, lse = flashlib.attention(q, k, v, mask=mask, return_lse=True)
    wanted = o, lse, *gradients(o, lse, (q, k, v), pair)
    lists = BlockLists(mask, q, k, v)

    def refuse(*_):
        raise AssertionError("tiles were classified again")

    monkeypatch.setattr(tile_lists, "classified", refuse)
    flashlib.plans.PLANS.clear()
    for _ in range(2):
        o, lse = flashlib.attention(q, k, v, mask=lists, return_lse=True)
        assert same(wanted, (o, lse, *gradients(o, lse, (q, k, v), pair)))
    with pytest.raises(AssertionError, match="classified again"):
        flashlib.attention(q, k, v, mask=mask)


def test_lists_of_the_forward_pass_alone():
    q, k, v = testing.make_qkv(1, 2, 40, 16, device=DEVICE, requires_grad=True)
    results = []
    for mask in (
        masks.causal(),
        BlockLists(masks.causal(), q, k, v, backward=False),
        BlockLists(torch.ones(40, 40, device=DEVICE).tril() > 0, q, k, v),
    ):
        o = flashlib.attention(q, k, v, mask=mask)
        results.append((o, *torch.autograd.grad(o.sum(), (q, k, v))))
    assert same(*results[:2])
    for x, y in zip(results[0], results[2], strict=True):
        torch.testing.assert_close(x, y)


def test_learned_selection():
    """As in NSA: for each block of 16 queries, the three blocks of keys that score
    highest by their means, and the query's own block, causal. Hidden blocks of keys are
    never read.
    """
    size, T = 16, 96
    q, k, v = testing.make_qkv(1, 4, T, 16, H_kv=2, device=DEVICE)
    means = [x.unflatten(2, (-1, size)).mean(3) for x in (q, k.repeat_interleave(2, 1))]
    scores = means[0] @ means[1].mT  # [B, H, blocks of queries, of keys]
    earlier = torch.ones_like(scores[0, 0]).tril() > 0
    best = scores.masked_fill(~earlier, -torch.inf).topk(3, -1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    chosen |= torch.eye(T // size, dtype=torch.bool, device=DEVICE)
    mask = masks.blocks(chosen, size, size) & masks.causal()
    lists = BlockLists(mask, q, k, v)
    o, lse = flashlib.attention(q, k, v, mask=lists, return_lse=True)
    seen = chosen.repeat_interleave(size, 2).repeat_interleave(size, 3)
    seen = seen & (torch.ones(T, T, device=DEVICE).tril() > 0)
    assert torch.equal(mask.visible(1, 4, T, T, DEVICE), seen)
    testing.assert_within_budget(q, k, v, o, lse, mask=seen)


def test_blocks_of_one_batch_and_one_head_are_for_all():
    chosen = torch.eye(3, device=DEVICE)[None, None] > 0
    q, k, v = testing.make_qkv(2, 2, 48, 16, device=DEVICE)
    mask = masks.blocks(chosen, 16, 16)
    assert mask.depends == (False, False)
    found = flashlib.attention(q, k, v, mask=mask)
    wanted = flashlib.attention(q, k, v, mask=masks.chunks(16) | ~masks.causal() & mask)
    torch.testing.assert_close(found, wanted)


def test_tensors_may_change_where_lists_stay_right():
    """Lists say which tiles are hidden, full or partial; a mask that is evaluated in a
    partial tile reads its tensors in the call.
    """
    q, k, v = testing.make_qkv(1, 2, 12, 16, device=DEVICE)
    ids = torch.arange(12, device=DEVICE) // 4
    lists = BlockLists(masks.documents(ids), q, k, v)
    first = flashlib.attention(q, k, v, mask=lists)
    ids.copy_(torch.arange(12, device=DEVICE) // 6)
    second = flashlib.attention(q, k, v, mask=lists)
    assert not torch.equal(first, second)
    assert torch.equal(second, flashlib.attention(q, k, v, mask=masks.documents(ids)))


def test_what_does_not_fit_is_refused(monkeypatch):
    q, k, v = testing.make_qkv(2, 4, 40, 16, T_k=70, H_kv=2, device=DEVICE)
    lists = BlockLists(masks.causal(), q, k, v)
    starts = torch.tensor([0, 40], dtype=torch.int32, device=DEVICE)
    packed = [x[0].transpose(0, 1)[:40] for x in (q, k, v)]
    for call, message in (
        (
            lambda: flashlib.attention(q[:, :, :33], k, v, mask=lists),
            r"mask: expected lists for \[B, H, H_kv, T_q, T_k\] = \[2, 4, 2, 33",
        ),
        (
            lambda: flashlib.attention(q[:1], k[:1], v[:1], mask=lists),
            r"mask: expected lists for .* = \[1, 4, 2, 40, 70\], got \[2, 4",
        ),
        (
            lambda: flashlib.attention(q, k, v, mask=lists, causal=True),
            "causal: expected False with BlockLists, whose mask has it, got True",
        ),
        (
            lambda: flashlib.attention(q, k, v, mask=lists, window=(3, 0)),
            "window: expected None with BlockLists, whose mask has it, got",
        ),
        (
            lambda: flashlib.attention_varlen(
                *packed, starts, starts, 40, 40, mask=lists
            ),
            "mask: expected a flashlib.masks.Mask with packed sequences, got Block",
        ),
        (
            lambda: flashlib.decode(q, k, v, seq_lens=starts, mask=lists),
            "mask: expected a flashlib.masks.Mask, a boolean tensor or None, got Block",
        ),
        (lambda: BlockLists(lists, q, k, v), "mask: expected a flashlib.masks.Mask or"),
        (lambda: BlockLists(3, q, k, v), "mask: expected a flashlib.masks.Mask, a bo"),
        (lambda: BlockLists(masks.causal(), q, k, v[:, :1]), "v: expected the sizes"),
        (
            lambda: BlockLists(masks.causal(), q, 3, v),
            "k: expected a torch.Tensor, got",
        ),
        (
            lambda: BlockLists(masks.causal(), q, k, v, backward=1),
            "backward: expected True or False, got 1",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call()
    lists.device = torch.device("meta")
    with refused(ValueError, "mask: expected lists on the device of q, .*, got meta"):
        flashlib.attention(q, k, v, mask=lists)
    # Tiles of another size, as other strides or another dtype may have.
    lists = BlockLists(masks.causal(), q, k, v)
    shorter = [x if x is None else x[..., :-1] for x in lists.lists]
    lists.lists = type(lists.lists)(*shorter)
    message = "mask: expected lists made for q, k and v with the strides and dtype of "
    message += "this call, got lists whose sizes do not fit tiles of "
    with refused(ValueError, message):
        flashlib.attention(q, k, v, mask=lists)


def test_lists_in_compiled_functions():
    q, k, v = testing.make_qkv(1, 2, 40, 16, device=DEVICE, requires_grad=True)
    lists = BlockLists(masks.prefix(9), q, k, v)

    def call(q):
        return flashlib.attention(q, k, v, mask=lists)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    results = [(o, *torch.autograd.grad(o.sum(), q)) for o in (compiled(q), call(q))]
    assert same(*results)

    def make(q):
        return flashlib.attention(q, k, v, mask=BlockLists(masks.causal(), q, k, v))

    with pytest.raises(Exception, match=r"outside of torch\.compile"):
        torch.compile(make, backend="aot_eager", fullgraph=True)(q)


def test_a_mask_of_no_queries_or_no_keys():
    for T_q, T_k in ((0, 5), (5, 0)):
        q, k, v = testing.make_qkv(1, 2, T_q, 16, T_k=T_k, device=DEVICE)
        lists = BlockLists(Mask(nothing_hidden), q, k, v)
        assert not flashlib.attention(q, k, v, mask=lists).any()


def nothing_hidden(b, h, p, j):
    return j >= 0


def test_a_list_of_no_tiles_has_two_numbers():
    kinds = torch.empty(1, dtype=torch.int8, device=DEVICE)
    lists = torch.full((16,), 7, dtype=torch.int32, device=DEVICE)
    sizes = 1, 0, 0, 1, 0, 0, 1, 2  # one list, no tiles, WIDTH
    tile_lists.lists_kernel[(1,)](kinds, lists, *sizes, PADDED=16)
    assert lists.tolist() == [0, 0] + 14 * [7]


def test_kinds_of_heads_beyond_int32():
    """The third head is where a product in 32 bits would be before the first one."""
    n, stride = 64, 2**31 - 16
    table = torch.from_numpy(np.zeros(2 * n + 2 * stride, dtype=np.int8))  # untouched
    kinds = (table if DEVICE == "cpu" else table.to(DEVICE))[n:]
    kinds[2 * stride : 2 * stride + 4] = tile_lists.SOME.value
    lists = torch.zeros(2 + 3 * 4, dtype=torch.int32, device=DEVICE)
    strides = {"row_stride": 4, "col_stride": 1, "head_stride": stride}
    tile_lists.lists_kernel[(1,)](
        kinds, lists, 1, 4, **strides, group_stride=0, GROUP=3, WIDTH=14, PADDED=16
    )
    assert lists[:6].tolist() == [0, 4, 8, 9, 10, 11]
