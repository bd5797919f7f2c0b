"""The backward pass of masks that are functions, for compute capability 9.0, and the
lists that it reads. On a GPU run this file under a limit of time, as test_hopper.py.
"""

import heapq
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from cases import output_gradients
from device import DEVICE, as_python, on_hopper
from expected import same
from hopper_calls import called, hidden, inputs
from masks_of_tests import some_masks

import flashlib
from flashlib import masks, plans, score_mods, testing
from flashlib.block_lists import BlockLists
from flashlib.kernels import (
    gluon_backward,
    gluon_keys,
    gluon_order,
    hopper,
    hopper_backward,
    score_arguments,
    tile_lists,
)
from flashlib.masks import Mask

pytestmark = pytest.mark.usefixtures("nan_filled")
MASKS = 17  # of some_masks
SPARE = tile_lists.SPARE.value


def mask_of(mask):
    return score_mods.mask_of(mask)


# -- the lists, on any device


def ordered_lists(mask, q, k, BLOCK_Q, BLOCK_K):
    """Those of tile_lists.in_order, [B or 1, H_kv or 1, blocks of keys, numbers]."""

    @plans.planned
    def find(q, k, of):
        B, n = score_arguments.batch_and_sizes(q, k, k, None)
        hides = score_mods.ScoreMod(1.0, mask=of)
        return tile_lists.in_order(q, hides, None, B, n, BLOCK_Q, BLOCK_K)

    return find(q, k, mask_of(mask))


def problem(rng, place):
    """q, k, a mask, and which pairs it shows, [B, H, T_q, T_k]."""
    B, H_kv, GROUP = rng.randint(1, 2), rng.randint(1, 2), rng.choice((1, 2, 3))
    T_q, T_k = rng.randint(1, 90), rng.randint(1, 90)
    sizes = B, H_kv * GROUP, T_q, 16
    q, k, _ = testing.make_qkv(*sizes, T_k=T_k, H_kv=H_kv, device=DEVICE)
    mask = some_masks(B, sizes[1], T_q, T_k, rng)[place]
    seen = mask.visible(B, sizes[1], T_q, T_k, DEVICE)
    return q, k, mask, seen.expand(B, sizes[1], T_q, T_k).cpu()


def kinds_of(seen, BLOCK_Q, BLOCK_K):
    """{(b, h, block of queries, of keys): whether a pair is hidden} of the tiles in
    which some pair is visible.
    """
    found = {}
    for b, h in torch.cartesian_prod(*map(torch.arange, seen.shape[:2])).tolist():
        for i, rows in enumerate(seen[b, h].split(BLOCK_Q)):
            for j, tile in enumerate(rows.split(BLOCK_K, 1)):
                if tile.any():
                    whole = tile.shape[1] == BLOCK_K and bool(tile.all())
                    found[b, h, i, j] = not whole
    return found


@pytest.mark.parametrize("place", range(MASKS))
def test_lists_in_order(place):
    """Against the tiles of the mask one by one."""
    rng = random.Random(place)
    q, k, mask, seen = problem(rng, place)
    BLOCK_Q, BLOCK_K = 16, 32
    lists = ordered_lists(mask, q, k, BLOCK_Q, BLOCK_K).cpu()
    kinds = kinds_of(seen, BLOCK_Q, BLOCK_K)
    H, H_kv = q.shape[1], k.shape[1]
    group = H // H_kv if mask.depends[1] else 1
    for b, h_kv, own in torch.cartesian_prod(*map(torch.arange, lists.shape[:3])):
        count, *numbers = lists[b, h_kv, own].tolist()
        wanted = []
        for i in reversed(range(-(-seen.shape[2] // BLOCK_Q))):
            for g in range(group):
                h = int(h_kv) * group + g
                parts = [x[3] for x in kinds if x[:3] == (int(b), h, i)]
                if int(own) in parts:
                    before = sum(j < own for j in parts)
                    partial = kinds[int(b), h, i, int(own)]
                    wanted += [2 * i + partial, g, before, len(parts) - before - 1]
        assert numbers[: 4 * count] == wanted
        assert not any(numbers[4 * count :][: 4 * SPARE])


def test_what_is_read_beyond_the_end_of_a_list_is_there():
    """An adder asks where its next part of dQ goes before it knows that there is none,
    also of a list without tiles.
    """
    assert gluon_order.ADDERS.value == SPARE
    q, k, _ = testing.make_qkv(1, 2, 40, 16, T_k=96, H_kv=1, device=DEVICE)
    ends = torch.tensor([32], dtype=torch.int32, device=DEVICE)
    mask = masks.padding(torch.zeros_like(ends), ends)
    lists = ordered_lists(mask, q, k, 16, 32).cpu()
    assert (lists[0, 0, :, 0] > 0).tolist() == [True, False, False]
    assert not lists[0, 0, 1:, : 1 + 4 * SPARE].any()


class Wide(int):
    """A number of a kernel, which can be made wider."""

    def to(self, dtype):
        return self

    def __mul__(self, other):
        return Wide(int(self) * other)

    def __add__(self, other):
        return Wide(int(self) + other)

    __rmul__, __radd__ = __mul__, __add__


def programs_of(lists, q, k, mask, PADDED, BLOCK_Q, BLOCK_K, order):
    """The Keys of each program in the order of the tickets, and its turns by step, as
    ``(place, count, turn)``, by the kernel's own functions, which run as Python; order
    is a section, mixed and cached.
    """
    numbers, ticket = lists.flatten().tolist(), iter(range(10**6))
    language = SimpleNamespace(
        minimum=min,
        maximum=max,
        cdiv=lambda a, b: -(-a // b),
        where=lambda seen, a, b: a if seen else b,
        int64=None,
        atomic_add=lambda turns, one, sem: next(ticket),
        load=lambda place: numbers[place],
    )
    functions = ("take_ticket", "section_of_lists", "keys_by_list", "entry_at")
    functions += ("queries_of", "count_steps", "next_turn")
    names = {"gl": language, "MOST_HEADS": gluon_order.MOST_HEADS.value}
    kernel = as_python(functions, **vars(gluon_keys) | vars(gluon_order) | names)
    (B, H, T_q, _), (H_kv, T_k) = q.shape, k.shape[1:3]
    by_batch, by_head = mask.depends
    section, mixed, cached = order
    sizes = gluon_backward.BackwardSizes(
        H_kv, H // H_kv, PADDED, T_q, T_k, None, B, section, mixed, None, None, cached,
        0, Wide(by_batch * lists.shape[1]), Wide(by_head), lists.shape[3],
        1 if by_head else H // H_kv,
    )  # fmt: skip
    programs = -(-T_k // BLOCK_K)
    for _ in range(B * H_kv * programs):
        *taken, _ = kernel.take_ticket(None, programs, sizes, False)
        block = kernel.keys_by_list(*taken, sizes, BLOCK_K)
        steps = range(kernel.count_steps(block, sizes))
        how = sizes, block, BLOCK_Q, BLOCK_K
        yield block, [kernel.next_turn(n, 0, *how) for n in steps]


@pytest.mark.parametrize("place", range(MASKS))
def test_no_program_waits_for_a_later_one(place):
    """Every part is added once, in its turn, one program after another."""
    q, k, mask, seen = problem(random.Random(place), place)
    BLOCK_Q, BLOCK_K, PADDED = 16, 32, 96
    lists = ordered_lists(mask, q, k, BLOCK_Q, BLOCK_K).cpu()
    for order in ((1, 1, 0), (2, 1, 99), (3, 0, 9)):
        counts, added = Counter(), set()
        how = lists, q, k, mask, PADDED, BLOCK_Q, BLOCK_K, order
        for block, turns in programs_of(*how):
            for place, count, turn in turns:
                assert counts[count] == turn
                counts[count] += 1
                head, row = divmod(place, PADDED)
                tile = (*divmod(head, q.shape[1]), row // BLOCK_Q, block.col // BLOCK_K)
                assert tile not in added
                added.add(tile)
        assert added == {*kinds_of(seen, BLOCK_Q, BLOCK_K)}


def test_programs_of_documents_end_together():
    """With one program on each of 132 multiprocessors, by a count in which a step takes
    one unit of time, and the begin and the end of a program two. A part that is not in
    its turn holds up the program when two are not added.
    """
    T, heads, processors, around = 1024, 32, 132, 2
    q, k, _ = testing.make_qkv(1, heads, T, 16, device=DEVICE)
    ids = torch.arange(T, dtype=torch.int32, device=DEVICE) // (T // 4)
    mask = masks.documents(ids) & masks.causal()
    lists = ordered_lists(mask, q, k, 16, 32).cpu()
    free, added, work = [0] * processors, {}, 0
    how = lists, q, k, mask, T, 16, 32, (processors * 32 // T, 1, 10**6)
    for _, turns in programs_of(*how):
        now = heapq.heappop(free) + around
        ends = [now] * 2
        for place, _, turn in turns:
            now = max(now, ends[-2]) + 1
            ends.append(max(now, ends[-1], added.get((place, turn - 1), 0)))
            added[place, turn] = ends[-1]
        heapq.heappush(free, ends[-1])
        work += len(turns) + around
    assert max(free) <= 1.05 * work / processors


# -- gradients, on a Hopper GPU


def judged_gradients(mask, q, k, v, *, causal=False, sinks=None):
    """``(dq, dk, dv)`` after hopper's forward pass, and dsinks, judged."""
    score_mod = score_mods.unchanged(causal, q.shape[3] ** -0.5)
    score_mod = score_mod._replace(mask=mask_of(mask), sinks=sinks)
    o, lse = hopper.forward(q, k, v, score_mod)
    do, dlse = output_gradients(q, q)
    arguments = q, k, v, o, lse, do, dlse, score_mod
    runs = [hopper_backward.backward(*arguments) for _ in range(2)]
    assert same(*runs)
    options = {"causal": causal, "mask": mask, "sinks": sinks, "dlse": dlse}
    testing.assert_gradients_within_budget(q, k, v, do, *runs[0][:3], **options)
    return runs[0]


@on_hopper
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("T_q", "T_k"), [(1, 1), (128, 128), (333, 512), (512, 333), (64, 700), (700, 1)]
)
def test_gradients_of_masks(T_q, T_k, d):
    rng = random.Random(f"{T_q} {T_k} {d}")
    q, k, v = inputs(2, 4, T_q, d, T_k=T_k, H_kv=2)
    for mask in rng.sample(some_masks(2, 4, T_q, T_k, rng), 2):
        judged_gradients(mask, q, k, v)


@on_hopper
@pytest.mark.parametrize("d", [64, 128])
def test_gradients_of_rows_that_a_mask_hides(d):
    q, k, v = inputs(2, 4, 600, d, torch.float16, H_kv=2)
    dq, _dk, _dv = judged_gradients(Mask(hidden, 200), q, k, v)
    for first in (0, 400):
        assert (dq[:, :, first : first + 200] == 0).all()
    nothing = ~Mask(hidden, 200) & Mask(hidden, 200)
    assert not any(x.any() for x in judged_gradients(nothing, q, k, v))


@on_hopper
@pytest.mark.parametrize("d", [64, 128])
def test_many_heads_take_turns(d):
    """Sections of heads that begin with the first keys and with the last ones."""
    q, k, v = inputs(4, 16, 900, d, H_kv=8)
    for mask in (masks.window(300, 0), masks.causal() | masks.prefix(200)):
        judged_gradients(mask, q, k, v)


@on_hopper
@pytest.mark.parametrize(
    ("d", "mask", "causal"),
    [(64, masks.prefix(70), True), (128, masks.prefix(70), False), (128, None, True),
     (256, None, False)],
)  # fmt: skip
def test_gradients_of_sinks(d, mask, causal):
    q, k, v = inputs(2, 4, 300, d, T_k=203, H_kv=2)
    sinks = torch.tensor([-3.0, 0.0, 4.0, 9.0], device=DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    options = {"causal": causal, "sinks": sinks}
    if mask is not None:
        options["mask"] = mask
    do, dlse = output_gradients(q, q)
    results = []
    for method in ("hopper", "flash2"):
        pair = flashlib.attention(q, k, v, **options, method=method, return_lse=True)
        results.append(torch.autograd.grad(pair, leaves, (do, dlse)))
    judged = [x.detach() for x in results[0]]
    options["sinks"] = sinks.detach()
    tensors = [x.detach() for x in (q, k, v)]
    testing.assert_gradients_within_budget(
        *tensors, do, *judged[:3], dlse=dlse, **options
    )
    torch.testing.assert_close(*(x[3] for x in results), rtol=2e-3, atol=2e-2)


@on_hopper
@pytest.mark.parametrize("place", [2, 11, 13, 16])
@pytest.mark.parametrize("d", [64, 128])
def test_lists_made_once_are_those_of_a_call(d, place, monkeypatch):
    q, k, v = inputs(2, 4, 300, d, T_k=340, H_kv=2, requires_grad=True)
    mask = some_masks(2, 4, 300, 340, random.Random(0))[place]
    do, dlse = output_gradients(q, q)
    lists = BlockLists(mask, q, k, v)

    def results(mask):
        pair = flashlib.attention(q, k, v, mask=mask, method="hopper", return_lse=True)
        return *pair, *torch.autograd.grad(pair, (q, k, v), (do, dlse))

    wanted = results(mask)

    def refuse(*_):
        raise AssertionError("tiles were classified again")

    monkeypatch.setattr(tile_lists, "classified", refuse)
    plans.PLANS.clear()
    assert same(wanted, results(lists))
    with pytest.raises(AssertionError, match="classified again"):
        flashlib.attention(q, k, v, mask=mask)


@on_hopper
@pytest.mark.parametrize("scale", [None, 0.0, -0.3])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {},
        {"window": (100, 0)},
        {"mask": masks.prefix(70)},
        {"mask": masks.prefix(150), "causal": True},
    ],
    ids=["causal", "no mask", "window", "prefix", "causal prefix"],
)
@pytest.mark.parametrize("d", [64, 128])
def test_alibi(d, options, scale, monkeypatch):
    passes = [called(monkeypatch, x, "forward") for x in (hopper,)]
    passes += [called(monkeypatch, x, "backward") for x in (hopper_backward,)]
    q, k, v = inputs(2, 4, 300, d, T_k=340, H_kv=2, requires_grad=True)
    slopes = torch.tensor([[0.5, 0.1, 0.02, 0.0], [0.3, 0.0, 1.0, 0.2]], device=DEVICE)
    slopes = slopes if scale is None else slopes[0]
    options = {"alibi_slopes": slopes, "scale": scale, **options}
    how = {"method": "hopper", "return_lse": True}
    o, lse = flashlib.attention(q, k, v, **options, **how)
    do, dlse = output_gradients(q, q)
    found = torch.autograd.grad((o, lse), (q, k, v), (do, dlse))
    q, k, v, o, lse = (x.detach() for x in (q, k, v, o, lse))
    testing.assert_within_budget(q, k, v, o, lse, **options)
    testing.assert_gradients_within_budget(q, k, v, do, *found, dlse=dlse, **options)
    assert list(map(len, passes)) == [1, 1]


@on_hopper
def test_alibi_of_short_and_of_wide_sequences():
    for d, T_q in ((64, 3000), (256, 200), (128, 3000)):
        q, k, v = inputs(1, 2, T_q, d)
        options = {"alibi_slopes": torch.tensor([0.1, 0.01], device=DEVICE)}
        options["causal"] = d != 256
        o, lse = flashlib.attention(q, k, v, **options, return_lse=True, method="auto")
        testing.assert_within_budget(q, k, v, o, lse, **options)
