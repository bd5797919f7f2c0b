"""The ring on several Hopper GPUs of one host: copies by their copy engines, and one
launch for all shards.

What a CPU can show of both is in test_copies.py, test_hopper_ring.py and test_ring.py.
"""

import itertools
from functools import cache

import pytest
import ring_gpus
import ring_worker
import torch
from expected import same
from ring_processes import joined, judge, ranks

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(
    GPUS < 2 or torch.cuda.get_device_capability() != (9, 0),
    reason="needs two Hopper GPUs",
)
SIZES = [2, 4] if GPUS >= 4 else [2]
each_size = pytest.mark.parametrize("size", SIZES)
largest = pytest.mark.parametrize("size", SIZES[-1:])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every rank of a group found in a scenario, each in processes of its own: a
    kernel that waits forever ends the context of its GPU.
    """

    @cache
    def of(size, scenario):
        folder = tmp_path_factory.mktemp("ranks")
        return [rank[scenario] for rank in ranks(folder, size, scenario)]

    return of


@each_size
def test_a_barrier_and_copies_bring_what_was_published(found, size):
    for rank in found(size, "published"):
        assert rank == {"transport": "copies", "right": True, "flags": True}


@each_size
def test_one_launch_is_attention(found, size):
    for case, *shards in zip(ring_gpus.CASES, *found(size, "one_launch"), strict=True):
        assert all(shard["launches"] == 1 for shard in shards)
        judge(case, joined(shard["once"] for shard in shards))
        # The order in which shards arrive changes no bit, and neither do parts.
        assert all(same(shard["once"], shard["again"]) for shard in shards)
        assert all(same(shard["once"], shard["in_parts"]) for shard in shards)


@each_size
def test_steps_by_copies_are_attention(found, size):
    for case, *shards in zip(ring_gpus.CASES, *found(size, "in_steps"), strict=True):
        judge(case, joined(shard["once"] for shard in shards))
        assert all(same(shard["once"], shard["again"]) for shard in shards)


@each_size
def test_calls_in_any_order_give_the_same_bits(found, size):
    """Backward passes after several forward passes, of two groups, on two streams."""
    for rank in found(size, "mixed"):
        assert all(rank), [n for n, x in enumerate(rank) if not x]


@largest
def test_a_cuda_graph_has_the_whole_call(found, size):
    for rank in found(size, "graph"):
        assert all(rank), rank


@largest
def test_nobody_waits_for_ever(found, size):
    """Rank 1 never calls: the other ranks get an error within the timeout."""
    for number, rank in enumerate(found(size, "absent")):
        if number != 1:
            kind, seconds = rank
            assert kind in ("RuntimeError", "AcceleratorError")
            assert seconds < 3 * ring_worker.TIMEOUT.total_seconds()


@largest
def test_memory_is_what_the_chapter_counts(found, size):
    for rank, way in itertools.product(found(size, "memory"), ("forward", "both")):
        got, counted = rank[way]
        assert got <= 1.1 * counted, (way, got / counted)
