"""How a sequence is divided among the ranks of a process group (chapter *Ring
attention*), and two other ways to compute attention there, to compare with
:func:`flashlib.ring_attention` (its depth page).

In these two, each rank gives its shards, and may give another function for the
attention of one device. Both are differentiable, trust their arguments, and hold all
that they need in memory at once.
"""

import torch
import torch.distributed as dist

from flashlib.plain_checks import check_count, wrong
from flashlib.reference import standard

# -- zig-zag


def zigzag_positions(T, rank, size, device=None):
    """The positions ``[T / size]`` in the whole sequence, int64, of a rank's tokens.

    Raises ValueError where 2 size does not divide T.
    """
    check_count("size", size)
    check_count("rank", rank, least=0, most=size - 1)
    check_count("T", T, least=0)
    if T % (2 * size):
        least = -(-T // (2 * size)) * 2 * size
        raise wrong("T", f"a multiple of 2 x {size} ranks (pad it to {least})", T)
    chunk = T // (2 * size)
    chunks = torch.arange(T, device=device).view(2 * size, chunk)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def zigzag_split(x, rank, size, dim=2):
    """The shard of a rank, of the tensor x of the whole sequence along dim.

    Raises ValueError where 2 size does not divide the length.
    """
    return x.index_select(dim, zigzag_positions(x.shape[dim], rank, size, x.device))


def zigzag_join(shards, dim=2):
    """The whole sequence from the shards of all ranks, in the order of ranks."""
    first, second = zip(*(shard.chunk(2, dim) for shard in shards), strict=True)
    return torch.cat([*first, *reversed(second)], dim)


# -- other ways


def to_send(x, group):
    """The tensor x where the group sends it from: with gloo, in the memory of the CPU,
    also for ranks that share a GPU.
    """
    return x.cpu() if "cuda:gloo" in dist.get_backend_config(group) else x


class _Exchange(torch.autograd.Function):
    """Part n of parts ``[N, ...]`` goes to rank n; part n of the result is rank n's.
    Gradients take the same way back.
    """

    @staticmethod
    def forward(ctx, parts, group):
        ctx.group = group
        sent = to_send(parts.contiguous(), group)
        arrived = torch.empty_like(sent)
        try:
            dist.all_to_all_single(arrived, sent, group=group)
        except RuntimeError as error:
            doing = f"rank {dist.get_rank(group)} could not exchange parts"
            raise RuntimeError(f"flashlib.ring: {doing}: {error}") from error
        return arrived.to(parts.device)

    @staticmethod
    def backward(ctx, d_arrived):
        return _Exchange.apply(d_arrived, ctx.group), None


def attend(q, k, v, causal):
    """Attention of one device, :func:`flashlib.reference.standard.attention`."""
    return standard.attention(q, k, v, causal=causal)[0]


def all_gather_attention(q, k, v, *, causal=False, group=None, attend=attend):
    """This rank's shard of the output ``[B, H, T / N, d_v]``, from all keys at once.

    With a causal mask the shards are those of :func:`zigzag_split`. A
    rank then has two chunks of queries, and for each it calls attention with the keys
    up to the chunk's end, where the causal mask is aligned.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    k, v = (_Exchange.apply(x.expand(size, *x.shape), group) for x in (k, v))
    if not causal:
        return attend(q, *(torch.cat(x.unbind(), 2) for x in (k, v)), False)
    k, v = (zigzag_join(x.unbind()) for x in (k, v))
    rows = q.shape[2] // 2
    o = []
    for chunk, queries in zip((rank, 2 * size - 1 - rank), q.chunk(2, 2), strict=True):
        end = rows * (chunk + 1)
        o.append(attend(queries, k[:, :, :end], v[:, :, :end], True))
    return torch.cat(o, 2)


def ulysses_attention(
    q, k, v, *, causal=False, group=None, attend=attend, zigzag=False
):
    """This rank's shard of the output ``[B, H, T / N, d_v]``: exchange rows for heads,
    attend to the whole sequence with H / N heads, and exchange back (Jacobs et al.,
    2023). The shards are contiguous, in the order of ranks, or those of
    :func:`zigzag_split`, and N divides H_kv.
    """
    size = dist.get_world_size(group)

    def exchange(pieces, join):
        """Send each rank its piece; join what arrives."""
        return join(_Exchange.apply(torch.stack(pieces), group).unbind())

    def join_rows(parts):
        return zigzag_join(parts) if zigzag else torch.cat(parts, 2)

    q, k, v = (exchange(x.chunk(size, 1), join_rows) for x in (q, k, v))
    o = attend(q, k, v, causal)
    pieces = o.chunk(size, 2)
    if zigzag:
        pieces = [zigzag_split(o, rank, size) for rank in range(size)]
    return exchange(pieces, lambda parts: torch.cat(parts, 1))
