"""Caches of keys and values for tests of decoding."""

import math
from typing import NamedTuple

import torch
from cases import in_pages
from device import DEVICE

from flashlib import testing
from flashlib.reference import decoding as reference


class Cache(NamedTuple):
    """Keys and values of some sequences, NaN wherever no sequence has a key."""

    k: torch.Tensor
    v: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None

    def rows(self, b):
        """The keys and values of a sequence, ``[1, H_kv, length, d]``."""
        length = int(self.seq_lens[b])
        return tuple(
            reference.rows(x, b, length, self.block_table)[None]
            for x in (self.k, self.v)
        )


def make(
    lengths, H=4, H_kv=2, T_q=1, d=16, d_v=None, page=None, T_max=None,
    dtype=torch.float32, **options,
):  # fmt: skip
    """q and the cache of sequences with these lengths, as ``testing.make_qkv`` makes
    tensors; pages shuffled, and one more column in the table than any sequence needs.
    """
    longest = max(lengths, default=0) if T_max is None else T_max
    columns = math.ceil(longest / page) + 1 if page else 0
    batches = len(lengths) * columns + 2 if page else len(lengths)
    rows = page or longest
    options |= {"T_q": T_q, "H_kv": H_kv, "d_v": d_v, "dtype": dtype, "device": DEVICE}
    _, k, v = testing.make_qkv(batches, H, d=d, T_k=rows, **options)
    q, _, _ = testing.make_qkv(len(lengths), H, d=d, T_k=1, **options)
    table, seen = in_pages(lengths, page, batches, rows, columns)
    for x in (k, v):
        x.masked_fill_(~seen[:, None, :, None].to(DEVICE), math.nan)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return q, Cache(k, v, seq_lens, table.to(DEVICE) if page else None)
