"""Attention of one sequence that is divided among several processes.

torchrun --nproc-per-node 2 -m flashlib.examples.ring FOLDER
"""

import os
import sys

import torch
import torch.distributed as dist

import flashlib
from flashlib.ring import zigzag_split


def main():
    """Run the program on this rank."""
    gpus, size = torch.cuda.device_count(), int(os.environ["WORLD_SIZE"])
    # NCCL needs a GPU for each rank. With gloo, ranks share a GPU or use the CPU.
    dist.init_process_group("nccl" if gpus >= size else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")

    torch.manual_seed(0)  # the same whole sequence on every rank
    whole = torch.randn(4, 1, 4, 48, 16)
    q, k, v, do = (zigzag_split(x, rank, size).to(device) for x in whole)
    for x in (q, k, v):
        x.requires_grad_()

    o = flashlib.ring_attention(q, k, v, causal=True)
    o.backward(do)

    found = [o.detach(), q.grad, k.grad, v.grad]
    torch.save([x.cpu() for x in found], f"{sys.argv[1]}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
