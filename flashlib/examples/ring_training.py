"""Training a small transformer on one sequence that is divided among the ranks.

torchrun --nproc-per-node 2 -m flashlib.examples.ring_training
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import flashlib
from flashlib.ring import zigzag_positions

T, E, H, STEPS = 48, 32, 2, 4


class Block(nn.Module):
    """Attention over the whole sequence, then a small network for each token."""

    def __init__(self, group):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(E), nn.LayerNorm(E)])
        self.attention = flashlib.FlashSelfAttention(E, H, causal=True, group=group)
        self.mlp = nn.Sequential(nn.Linear(E, 4 * E), nn.GELU(), nn.Linear(4 * E, E))

    def forward(self, x):
        """x ``[1, T / N, E]`` with what both have added."""
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Predicts the next of 16 symbols."""

    def __init__(self, group):
        super().__init__()
        self.symbols, self.positions = nn.Embedding(16, E), nn.Embedding(T, E)
        self.blocks = nn.Sequential(Block(group), Block(group))
        self.head = nn.Linear(E, 16)

    def forward(self, tokens, positions):
        """The logits ``[1, T / N, 16]`` of this rank's tokens."""
        x = self.symbols(tokens) + self.positions(positions)
        return self.head(self.blocks(x))


def main():
    """Run the program on this rank."""
    gpus, size = torch.cuda.device_count(), int(os.environ["WORLD_SIZE"])
    # NCCL needs a GPU for each rank. With gloo, ranks share a GPU or use the CPU.
    dist.init_process_group("nccl" if gpus >= size else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")

    torch.manual_seed(0)  # the same weights and the same text on every rank
    model = Model(dist.group.WORLD).to(device)
    text = torch.randint(16, (1, T + 1))
    positions = zigzag_positions(T, rank, size)  # of this rank's tokens
    tokens, wanted = (text[:, positions + n].to(device) for n in (0, 1))
    positions = positions.to(device)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        logits = model(tokens, positions)
        # Each rank's share of the mean over all T tokens.
        loss = nn.functional.cross_entropy(logits[0], wanted[0], reduction="sum") / T
        optimizer.zero_grad()
        loss.backward()
        for w in model.parameters():  # every rank has a part of each gradient
            dist.all_reduce(w.grad)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"{total.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
