"""Processes for the ranks of a ring, and who judges what they found together."""

import multiprocessing

import ring_rank
import ring_worker
import torch
from device import CUDA

from flashlib import ring, testing


def ranks(folder, size, *scenarios):
    """What every rank of a group found, None where one wrote nothing."""
    # Ranks are forked from a process that has imported all that they need, which takes
    # seconds; where there is a GPU, nothing that starts CUDA or chooses between a GPU
    # and the interpreter.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch" if CUDA else "ring_worker"])
    running = [
        context.Process(target=ring_rank.start, args=(folder, size, rank, scenarios))
        for rank in range(size)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(300 if CUDA else 120)  # a GPU's kernels are compiled
        process.kill()  # one that has not ended leaves no file
    files = [folder / f"{rank}.pt" for rank in range(size)]
    assert any(file.exists() for file in files), "the ranks' errors are on stderr"
    return [torch.load(file) if file.exists() else None for file in files]


def joined(shards, join=ring.zigzag_join):
    """The whole tensors, from a list of them for each rank."""
    return [join(x) for x in zip(*shards, strict=True)]


def judge(case, found):
    """o, dq, dk and dv of a case are within the budget."""
    q, k, v, do = ring_worker.inputs(case)
    o, *gradients = found
    testing.assert_within_budget(q, k, v, o, causal=case.causal)
    testing.assert_gradients_within_budget(q, k, v, do, *gradients, causal=case.causal)
