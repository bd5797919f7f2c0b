"""Caches of latents for tests, and who judges what is decoded from them."""

import math
from typing import NamedTuple

import torch
from cases import in_pages
from device import DEVICE

from flashlib import testing
from flashlib.reference import decoding as reference


class Cache(NamedTuple):
    """The rows of some sequences, NaN wherever no sequence has one."""

    rows: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None

    def of(self, b):
        """The rows of a sequence, ``[1, 1, length, d_c + d_r]``."""
        own = (self.rows[:, None], b, int(self.seq_lens[b]), self.block_table)
        return reference.rows(*own)[None]


def make(
    lengths, H=4, T_q=1, d_c=24, d_r=8, page=None, dtype=torch.float32,
    layout="contiguous", magnitude=1.0,
):  # fmt: skip
    """Absorbed queries and the cache of sequences with these lengths; pages shuffled,
    and one more column in the table than any sequence needs.
    """
    longest, B = max(lengths), len(lengths)
    columns = math.ceil(longest / page) + 1 if page else 0
    batches, rows = (B * columns + 2, page) if page else (B, longest)
    options = {"dtype": dtype, "device": DEVICE, "layout": layout}
    q, _, _ = testing.make_qkv(B, H, T_q, d_c + d_r, magnitude=magnitude, **options)
    cache, _, _ = testing.make_qkv(batches, 1, rows, d_c + d_r, seed=1, **options)
    cache = cache[:, 0]
    table, seen = in_pages(lengths, page, batches, rows, columns)
    cache.masked_fill_(~seen[:, :, None].to(DEVICE), math.nan)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return q, Cache(cache, seq_lens, table.to(DEVICE) if page else None)


def judge(q, cache, o, lse, d_c=24, scale=0.2):
    """Every sequence against the budget."""
    for b in range(q.shape[0]):
        one, rows = slice(b, b + 1), cache.of(b)
        testing.assert_within_budget(
            q[one], rows, rows[..., :d_c], o[one], lse[one], causal=True, scale=scale
        )
