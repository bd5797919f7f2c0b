"""Attention over the ranks of a group, in processes of their own: NCCL where there is a
GPU for each rank, otherwise gloo, on a CPU or a GPU that the ranks share.
"""

import itertools
from functools import cache, partial

import pytest
import ring_worker
import torch
from device import CUDA, DEVICE, on_cpu
from expected import same
from ring_processes import joined, judge, ranks
from torch import distributed

import flashlib
from flashlib import ring, ring_passes, testing
from flashlib.iomodel import ring as counted
from flashlib.reference import masks as reference

# What a group of this many ranks is asked for; the rank that dies ends its group.
SCENARIOS = {
    1: ("right", "layer"),
    2: ("right", "others", "layer", "wrong", "copied", "second", "ahead", "masked"),
    3: ("right", "mended"),
}
# Without GPUs, files that the ranks map stand for memory that they copy from.
if not CUDA:
    SCENARIOS[2] += "pulled", "launched", "masked_pulled"
    SCENARIOS[3] += "pulled", "launched"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every rank of a group of a size found in a scenario."""

    @cache
    def of_size(size):
        return ranks(tmp_path_factory.mktemp("ranks"), size, *SCENARIOS[size])

    return lambda size, scenario: [rank[scenario] for rank in of_size(size)]


def counted_bytes(case, size, by_copies):
    """What a rank sends or pulls in each pass."""
    (H, H_kv), T, d, d_v, _, dtype = case
    words, s = counted.ring_words(T, d + d_v, H_kv, size) // 2, dtype.itemsize
    if not by_copies:
        # dK and dV travel as often; sums of several ranks in float32.
        return [words * s, words * (s + (s if size < 3 else 4))]
    back = min(counted.copies_backward_words(T, d, H, H_kv, size, d_v)) * s
    if ring_passes.queries_travel(T, H, H_kv, size, d, d_v):
        back += 2 * H * T // size * (size - 1) * (4 - s)  # L and D are in float32
    return [words * s, back]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ring_is_attention(found, size):
    for case, *shards in zip(ring_worker.CASES, *found(size, "right"), strict=True):
        judge(case, joined(shard["once"] for shard in shards))
        for shard in shards:
            by_copies = size > 1 and shard["transport"] == "copies"
            assert shard["sent_bytes"] == counted_bytes(case, size, by_copies)
    assert all(same(shard["once"], shard["again"]) for shard in shards)


@on_cpu
@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_by_copies_is_attention(found, size):
    for case, *shards in zip(ring_worker.CASES, *found(size, "pulled"), strict=True):
        judge(case, joined(shard["once"] for shard in shards))
        for shard in shards:
            assert same(shard["once"], shard["again"])
            assert same(shard["once"], shard["other"])
        sent = counted_bytes(case, size, by_copies=True)
        assert all(shard["sent_bytes"] == sent for shard in shards)


@on_cpu
@pytest.mark.parametrize("size", [2, 3])
def test_one_launch_finds_all_shards_in_their_places(found, size):
    cases = [case for case in ring_worker.LAUNCHED for _ in range(2)]
    for case, *shards in zip(cases, *found(size, "launched"), strict=True):
        judge(case, joined(shards))


def test_other_ways_to_divide_a_sequence_are_attention(found):
    cases = [case for case in ring_worker.CASES if case.heads[1] % 2 == 0]
    for case, *shards in zip(cases, *found(2, "others"), strict=True):
        judge(case, joined(shard["gathered"] for shard in shards))
        whole = joined(
            (shard["ulysses"] for shard in shards), lambda x: torch.cat(x, 2)
        )
        judge(case, whole)
        for method in ("by_heads", "auto"):
            judge(case, joined(shard[method] for shard in shards))
        assert all(same(shard["ulysses"], shard["again"]) for shard in shards)


@pytest.mark.parametrize(
    "scenario", ["masked", pytest.param("masked_pulled", marks=on_cpu)]
)
def test_masks_and_sinks_are_those_of_the_whole_sequence(found, scenario):
    q, k, v, do = ring_worker.inputs(ring_worker.MASKED)
    cases = itertools.product(
        ring_worker.mask_cases(),
        (ring.zigzag_join, partial(torch.cat, dim=2), ring.zigzag_join),
    )
    for (options, join), *shards in zip(cases, *found(2, scenario), strict=True):
        rows = joined((shard[:4] for shard in shards), join)
        testing.assert_within_budget(q, k, v, rows[0], **options)
        testing.assert_gradients_within_budget(q, k, v, do, *rows[1:], **options)
        if "sinks" in options:
            sinks = options["sinks"].double().requires_grad_()
            wide = (x.double() for x in (q, k, v))
            o, _ = reference.attention(*wide, **options | {"sinks": sinks})
            (wanted,) = torch.autograd.grad(o, sinks, do.double())
            total = sum(shard[4] for shard in shards)
            assert (total - wanted).abs().max() <= 1e-5


def test_a_layer_divides_its_sequence(found):
    (one,), both = found(1, "layer"), found(2, "layer")
    y, dx = joined(
        ([shard["y"], shard["dx"]] for shard in both), partial(ring.zigzag_join, dim=1)
    )
    weights = [sum(x) for x in zip(*(shard["dw"] for shard in both), strict=True)]
    wanted = [one["y"], one["dx"], *one["dw"]]
    for x, x_one in zip([y, dx, *weights], wanted, strict=True):
        scale = x_one.abs().max()
        assert (x - x_one).abs().max() <= 16 * torch.finfo(x.dtype).eps * scale


def test_every_rank_hears_of_a_wrong_call(found):
    first, second = found(2, "wrong")
    differs = "expected the same {} on all ranks"
    both = {
        "another T_q": differs.format("T_q") + " (pad each shard to 12), got [8, 12]",
        "another scale": differs.format("scale") + ", got [0.25, 0.5]",
        "another causal": differs.format("causal") + ", got [False, True]",
        "odd T, causal": "q: expected an even length of each shard (pad it to 8)",
        "T_q not T_k, causal": "q: expected T_k 6 with causal=True",
        "group and mesh": "mesh: expected None where a group is given, got 1",
        "another dtype": differs.format("dtype") + ", got [torch.float32, torch.f",
        "q needs a gradient": differs.format("q.requires_grad") + ", got [False, True]",
        "v needs a gradient": differs.format("v.requires_grad") + ", got [False, True]",
        "heads of Ulysses": "k: expected a head count that the 2 ranks divide, got 1",
        "destroyed group": "group: expected one that exists, got a destroyed group",
        "another mask": differs.format("mask") + ", got ['one with key",
        "sinks of one": differs.format("sinks") + ", got ['None', 'a tensor']",
        "T_q not T_k, mask": "q: expected T_k 6 with a mask",
        "too few sinks": "sinks: expected [H] with H = 2, got [1]",
        "unknown method": "method: expected one of ring, ulysses, auto, got 'star'",
        "another method": differs.format("function") + ", got ['ring_attention', 'r",
        "heads by method": "k: expected a head count that the 2 ranks divide, got 1",
    }
    for name, said in both.items():
        assert first[name] == second[name]
        assert first[name][0] == "ValueError" and said in first[name][1]
    name = "mask that is a tensor"
    assert first[name] == second[name] and first[name][0] == "TypeError"
    assert first[name][1].startswith("mask: expected a flashlib.masks.Mask or None")
    refused = ("RuntimeError", "ring_attention: rank 1 refused its arguments")
    for name, error, said in (
        ("no tensor", "TypeError", "k: expected"),
        ("d_v too small", "ValueError", "v: expected a head dimension from 16 to 256"),
        ("no memory", "MemoryError", "no memory left"),
    ):
        assert first[name] == refused
        assert second[name][0] == error and second[name][1].startswith(said)
    for name in ("group", "mesh"):
        call = f"{name} of others"
        assert first[call] is None and second[call][0] == "ValueError"
        assert second[call][1].startswith(f"{name}: expected one that has this rank")


def test_calls_after_an_error_are_right(found):
    for number, rank in enumerate(found(3, "mended")):
        errors, right = zip(*rank, strict=True)
        assert all(right)
        for longer, wrong, other, scale in (errors[:4], errors[4:]):
            assert (
                longer[0] == "ValueError" and "the same T_q on all ranks" in longer[1]
            )
            assert wrong[0] == ("TypeError" if number == 1 else "RuntimeError")
            assert other[0] == "ValueError" and "the same function" in other[1]
            assert scale[0] == "ValueError" and "the same scale" in scale[1]


def test_a_rank_begins_before_the_others_have_said_anything(found):
    assert found(2, "ahead") == [[None, None]] * 2


def test_a_second_derivative_is_refused(found):
    said = "double backward is not supported"
    wanted = [f"flashlib.{x}: {said}" for x in ("ring_attention", "attention")]
    for rank in found(2, "second"):
        assert rank == [("NotImplementedError", x) for x in wanted]


def test_a_layer_with_a_group_is_compiled_and_copied(found):
    for rank in found(2, "copied"):
        assert same(rank["compiled"], rank["layer"]) and rank["apart"]
        assert same(rank["copy"], rank["layer"])
        kind, said = rank["pickle"]
        assert kind == "TypeError" and said.startswith(
            "group: expected None in a layer"
        )


@pytest.mark.parametrize("how", ["dies", "dies_backward", "dies_ulysses"])
def test_a_rank_that_is_lost_ends_the_call_of_the_others(tmp_path, how):
    on_gpus = torch.cuda.device_count() >= 2
    first, gone, *third = ranks(tmp_path, 2 if on_gpus else 3, how)
    assert gone is None
    doing = ["exchange parts" if how == "dies_ulysses" else "pass keys on"]
    if on_gpus:
        doing.append("compare arguments")
    for rank in (first, *third):
        kind, said = rank[how]
        assert kind == "RuntimeError" and any(f"could not {x}" in said for x in doing)


def test_auto_takes_the_method_that_waits_less():
    longest = counted.exposed_words(2**20, 128, 16, 16, 4)
    assert longest[0] == counted.WAIT_WORDS < longest[1]
    assert counted.cheaper(2**20, 128, 16, 16, 4) == "ring"
    # Steps of many ranks are too short to hide hops; with 3 key heads, 8 ranks have no
    # choice.
    assert counted.cheaper(16384, 128, 64, 64, 8) == "ulysses"
    assert counted.cheaper(16384, 128, 63, 3, 8) == "ring"
    exposed = [counted.exposed_words(16384, 128, 64, 64, 8, backward=x) for x in (0, 1)]
    sums = [sum(x) for x in zip(*exposed, strict=True)]
    training = counted.cheaper(16384, 128, 64, 64, 8, training=True)
    assert training == ("ring" if sums[0] <= sums[1] else "ulysses")


def test_without_a_group_there_is_no_ring():
    x = torch.ones(1, 1, 4, 16)
    with pytest.raises(RuntimeError, match="init_process_group"):
        ring.ring_attention(x, x, x)


# -- the division


@pytest.mark.parametrize("size", [1, 2, 5])
def test_zigzag_joins_what_it_split(size):
    x = torch.arange(2 * 20 * 3).view(2, 20, 3)
    shards = [ring.zigzag_split(x, rank, size, dim=1) for rank in range(size)]
    assert torch.equal(ring.zigzag_join(shards, dim=1), x)
    for rank, shard in enumerate(shards):
        at = ring.zigzag_positions(20, rank, size)
        assert torch.equal(shard, x[:, at])
        assert at.tolist() == counted.positions(20, rank, size).tolist()


def test_a_length_that_cannot_be_divided_says_what_to_pad():
    with pytest.raises(ValueError, match=r"T: .*2 x 3 ranks \(pad it to 12\), got 10"):
        ring.zigzag_positions(10, 0, 3)
    with pytest.raises(ValueError, match="rank: expected at most 2, got 3"):
        ring.zigzag_positions(12, 3, 3)


def test_a_lazy_negation_is_resolved():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        q, k, v = testing.make_qkv(1, 2, 8, 16, device=DEVICE)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = ring.ring_attention(torch._neg_view(q), k, v)
        found = torch.autograd.grad(o, leaves, torch._neg_view(q.detach()))
        wanted = torch.autograd.grad(flashlib.attention(-q, k, v), leaves, -q.detach())
        assert same(found, wanted)
    finally:
        distributed.destroy_process_group()
