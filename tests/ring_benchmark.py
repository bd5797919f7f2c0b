"""The benchmark of the ring on CPUs, for test_ring_benchmark.py: gloo, few tokens.

Usage: ``torchrun ring_benchmark.py FILE``; with STUCK in the environment, the
ring hangs, with WRONG all-gather computes a wrong output.
"""

import os
import time

import torch

import flashlib
import flashlib.kernels  # before Triton: picks its interpreter without a GPU
from benchmarks import ring, timing


def environment():
    versions = dict.fromkeys(("torch", "triton", "cuda", "cudnn"), "0")
    about = {"date": "2000-01-01T00:00:00Z", "commit": "1234567"}
    return {"gpu": {"name": "no GPU"}, "versions": versions, **about}


if __name__ == "__main__":
    timing.DEVICE, timing.DTYPE, timing.environment = "cpu", torch.float32, environment
    ring.H, ring.D = 2, 16
    ring.TOKENS, ring.PER_RANK, ring.LONGEST = (16,), 8, 32
    if "STUCK" in os.environ:
        ring.LIMIT_S = 2.0
        flashlib.ring_attention = lambda *x, **options: time.sleep(100)
    if "WRONG" in os.environ:
        right = ring.attend
        ring.attend = lambda q, k, v, causal: 1.5 * right(q, k, v, causal)
    ring.main()
