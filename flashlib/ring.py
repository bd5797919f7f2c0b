"""Attention of one sequence that is divided among the ranks of a process group.

Each rank keeps its queries. Keys and values travel around the ring, and each rank merges
what its queries find in every part (chapter *Ring attention*). On GPUs the group is
NCCL's, on CPUs gloo's, and the code is the same.

With a causal mask the sequence is divided in zig-zag order: it is split into 2N
chunks, and rank r has chunks r and 2N - 1 - r, so that all ranks have the same work in
every step.
"""

import contextlib
import struct
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from flashlib import checks, ops, plans
from flashlib.plain_checks import wrong
from flashlib.reference.ring import zigzag_join, zigzag_positions, zigzag_split

__all__ = ["ring_attention", "zigzag_join", "zigzag_positions", "zigzag_split"]

# -- a step of the ring


class _Visit(NamedTuple):
    """What a rank computes when the keys of a source are there."""

    rows_q: slice
    rows_k: slice
    causal: bool


def _visit(rank, source, causal, T_q, T_k):
    """The queries and keys of one step; all pairs outside of them are hidden."""
    everything, half_q, half_k = slice(None), slice(T_q // 2, None), slice(T_k // 2)
    if not causal or source == rank:
        return _Visit(everything, everything, causal)
    if source < rank:  # its first chunk is before all queries, its second after them
        return _Visit(everything, half_k, False)
    return _Visit(half_q, everything, False)  # both chunks are between the queries'


# -- the group


HOSTS = weakref.WeakKeyDictionary()  # {a group of GPUs: its ranks' group of hosts}


def _hosts(group):
    """A group of the same ranks in which hosts talk without waiting for their GPUs."""
    if "gloo" in dist.get_backend_config(group):
        return group
    if group not in HOSTS:
        backend = group._get_backend(torch.device("cuda"))
        HOSTS[group] = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="gloo",
            timeout=backend.options._timeout,
            use_local_synchronization=True,
        )
    return HOSTS[group]


def check_group(group):
    """The group is None, or has this rank. Raises TypeError or ValueError."""
    if group is None:
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise wrong("group", "one that has this rank", "a group of other ranks")
    if not isinstance(group, dist.ProcessGroup):
        expected = "a torch.distributed.ProcessGroup or None"
        raise wrong("group", expected, type(group).__name__, TypeError)


class _Ring:
    """The neighbors of this rank in a group."""

    def __init__(self, group):
        self.group = group or dist.group.WORLD
        self.rank, self.size = self.group.rank(), self.group.size()
        ranks = dist.get_process_group_ranks(self.group)
        self.next = ranks[(self.rank + 1) % self.size]
        self.previous = ranks[(self.rank - 1) % self.size]

    def source(self, step):
        """The rank whose keys are here in a step."""
        return (self.rank - step) % self.size

    def pass_on(self, *tensors):
        """Begin to send tensors to the next rank and to receive the previous rank's;
        returns a function that waits for both and returns what has arrived.
        """
        received = [torch.empty_like(x) for x in tensors]
        calls = [(dist.isend, x, self.next) for x in tensors]
        calls += [(dist.irecv, x, self.previous) for x in received]
        with self.named("pass keys on"):
            work = dist.batch_isend_irecv([dist.P2POp(*x, self.group) for x in calls])

        def arrive():
            with self.named("pass keys on"):
                for item in work:
                    item.wait()
            return received

        return arrive

    @contextlib.contextmanager
    def named(self, doing):
        """An error of the group in here says which operation it ended."""
        try:
            yield
        except RuntimeError as error:
            message = f"ring_attention: rank {self.rank} could not {doing}: {error}"
            raise RuntimeError(message) from error


# What all ranks must agree on, in this order; an error of a rank's own comes first.
_SIZES = ("B", "H", "H_kv", "T_q", "T_k", "d", "d_v")
_SAID = ("error", *_SIZES, "dtype", "causal", "scale")


def _agree(ring, said, error):
    """Raise on every rank where one has an error or says something else.

    Without this, the others would wait for a rank that never sends.
    """
    bits = struct.unpack("q", struct.pack("d", said[-1]))[0]
    mine = torch.tensor([error is not None, *said[:-1], bits], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(ring.size)]
    with ring.named("compare arguments"):
        dist.all_gather(everyone, mine, _hosts(ring.group))
    everyone = torch.stack(everyone).tolist()
    if error is not None:
        raise error
    failed = [rank for rank, found in enumerate(everyone) if found[0]]
    if failed:
        raise RuntimeError(f"ring_attention: rank {failed[0]} refused its arguments")
    for name, *values in zip(_SAID, *everyone, strict=True):
        if len(set(values)) > 1:
            if name == "scale":
                values = [struct.unpack("d", struct.pack("q", x))[0] for x in values]
            if name == "dtype":
                values = [checks.DTYPES[x] for x in values]
            expected = f"the same {name} on all ranks"
            if name in ("T_q", "T_k"):
                expected += f" (pad each shard to {max(values)})"
            raise wrong("ring_attention", expected, values)


# -- attention


def _forward(ring, q, k, v, causal, scale):
    """``(o, lse)`` of this rank's queries and all keys, o in the dtype of q or float32."""
    from flashlib.kernels import ring as kernels

    keys = k, v
    for step in range(ring.size):
        if step + 1 < ring.size:  # travel while this step computes
            arrive = ring.pass_on(*keys)
            if q.is_cuda:
                # The Hopper kernel occupies every multiprocessor until it ends. Ten
                # microseconds let NCCL's kernel, launched before it, start before it.
                torch.cuda._sleep(20_000)  # clocks
        rows_q, rows_k, mask = _visit(
            ring.rank, ring.source(step), causal, q.shape[2], k.shape[2]
        )
        part = q[:, :, rows_q], *(x[:, :, rows_k] for x in keys)
        found = plans.run(ops.flash.forward, *part, mask, scale, "auto", True)
        if step == 0:
            o, lse = found
        else:
            if step == 1 and ring.size > 2:
                o = o.float()  # more than one merge would round more than once
            found = o[:, :, rows_q], lse[:, :, rows_q], *found
            kernels.merge(*found)
        del part, found  # free them before the next step
        if step + 1 < ring.size:
            keys = arrive()
    return o, lse


def _gradients(visit, queries, keys, scale):
    """dq, dk and dv of the rows of a visit."""
    rows_q, rows_k, mask = visit
    q, o, lse, do = (x[:, :, rows_q] for x in queries)
    k, v = (x[:, :, rows_k] for x in keys)
    given = q, k, v, o, lse, do, None, mask, scale, "auto", True
    return plans.run(ops.flash.backward, *given)


def _on_all_rows(share, rows, T, dtype):
    """A share of some of T rows, with zeros in the others."""
    if share.shape[2] == T:
        return share.to(dtype)
    B, H, _, d = share.shape
    x = share.new_zeros(B, H, T, d, dtype=dtype)
    x[:, :, rows] = share
    return x


def _backward(ring, q, k, v, o, lse, do, causal, scale):
    """``(dq, dk, dv)`` in the dtypes of q, k, v or float32. dq stays. What the other ranks
    add to dk and dv follows the keys around the ring and, after the last step, home. To
    hide that hop, too, the rank leaves a quarter of the heads of its own keys for the end.
    """
    T_q, (H_kv, T_k), size = q.shape[2], k.shape[1:3], ring.size
    queries, group = (q, o, lse, do), q.shape[1] // H_kv
    # Of two ranks, each sum has one share of the other, which is rounded already.
    wide = torch.float32 if size > 2 else q.dtype

    def heads_of_queries(heads):
        return slice(heads.start * group, heads.stop * group)

    def visit_own(heads):
        """The gradients by this rank's own keys, of some key heads."""
        visit = _visit(ring.rank, ring.rank, causal, T_q, T_k)
        parts = [x[:, heads_of_queries(heads)] for x in queries]
        return _gradients(visit, parts, [x[:, heads] for x in (k, v)], scale)

    if size == 1:
        return visit_own(slice(0, H_kv))
    early, late = slice(0, H_kv - H_kv // 4), slice(H_kv - H_kv // 4, H_kv)
    arrive, arrive_sums = ring.pass_on(k, v), None
    dq_early, *own = visit_own(early)
    shares = [(early, own)]
    for step in range(1, size):
        keys, arrive = arrive(), None  # the function holds what has arrived
        if step + 1 < size:
            arrive = ring.pass_on(*keys)
        visit = _visit(ring.rank, ring.source(step), causal, T_q, T_k)
        part, *sums = _gradients(visit, queries, keys, scale)
        del keys  # frees them before the sums arrive
        if step == 1:
            dq = _on_all_rows(part, visit.rows_q, T_q, wide)
            dq[:, heads_of_queries(early)] += dq_early
            del dq_early
        else:
            dq[:, :, visit.rows_q] += part
        del part
        sums = [_on_all_rows(x, visit.rows_k, T_k, wide) for x in sums]
        if step > 1:
            for x, of_others in zip(sums, arrive_sums(), strict=True):
                x += of_others
        arrive_sums = ring.pass_on(*sums)
    if late.start < late.stop:
        dq_late, *own = visit_own(late)
        dq[:, heads_of_queries(late)] += dq_late
        shares.append((late, own))
    dk, dv = arrive_sums()
    for heads, (dk_own, dv_own) in shares:
        dk[:, heads] += dk_own
        dv[:, heads] += dv_own
    return dq, dk, dv


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ring, causal, scale, q, k, v):
        o, lse = _forward(ring, q, k, v, causal, scale)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = ring, causal, scale
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        ring, causal, scale = ctx.options
        saved = ctx.saved_tensors  # read once: a checkpoint unpacks them at each read
        do = do.resolve_neg().contiguous()
        found = _backward(ring, *saved, do, causal, scale)
        given = zip(found, saved[:3], strict=True)
        return None, None, None, *(dx.to(x.dtype) for dx, x in given)


def _check(q, k, v, causal, scale):
    """The scale as a float, if the arguments of this rank are right."""
    checks.check_flags(causal=causal)
    checks.check_qkv(q, k, v)
    if causal and q.shape[2] != k.shape[2]:
        expected = f"T_k {k.shape[2]} with causal=True, whose queries and keys are one"
        raise wrong("q", f"{expected} sequence", q.shape[2])
    if causal and q.shape[2] % 2:
        expected = f"an even length of each shard (pad it to {q.shape[2] + 1})"
        raise wrong("q", expected, q.shape[2])
    return checks.check_scale(scale, q)


def ring_attention(q, k, v, *, causal=False, scale=None, group=None, mesh=None):
    """Exact attention for one sequence that is divided among the ranks of a group.

    Every rank of the group calls it with its shard and gets its shard of the output.

    Parameters
    ----------
    q : tensor ``[B, H, T_q / N, d]``
        This rank's queries, as in :func:`flashlib.attention`. N is the size of the
        group, and all shards have the same sizes.
    k, v : tensors ``[B, H_kv, T_k / N, d]`` and ``[B, H_kv, T_k / N, d_v]``
        This rank's keys and values.
    causal : bool
        Query i of the whole sequence sees key j only if j <= i. The shards are those of
        :func:`zigzag_split`, whose positions are :func:`zigzag_positions`, and T_q = T_k.
        Without the mask, the sequence may be divided into equal shards in any way.
    scale : float or None
        Factor that multiplies the scores; None means 1/sqrt(d).
    group : torch.distributed.ProcessGroup or None
        The ranks; None is the default group.
    mesh : torch.distributed.device_mesh.DeviceMesh or None
        A one-dimensional mesh, in place of a group.

    Returns
    -------
    o : tensor ``[B, H, T_q / N, d_v]`` in the dtype of q

    Notes
    -----
    Differentiable once. Results are merged, and gradients accumulated, in float32 and in
    an order that does not change from run to run. The gradients of each pair of shards
    are rounded to the dtype of q before they are added.

    Raises TypeError or ValueError that names the argument, on every rank if the ranks
    have different arguments; RuntimeError without a process group, if another rank
    rejected its arguments, and, within the timeout of the group, if another rank has
    died. On GPUs, where copies do not block the host, it is the next call that raises; a
    program that waits for its GPU before that is ended by NCCL's watchdog.

    Source: chapter *Ring attention*; Liu et al. (2023).
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("ring_attention: call torch.distributed.init_process_group")
    if mesh is not None:
        if group is not None:
            raise wrong("mesh", "None where a group is given", mesh)
        if not isinstance(mesh, dist.device_mesh.DeviceMesh):
            raise wrong("mesh", "a DeviceMesh or None", type(mesh).__name__, TypeError)
        if mesh.ndim != 1:
            raise wrong("mesh", "one dimension", mesh.ndim)
        group = mesh.get_group()
    check_group(group)
    ring = _Ring(group)
    error, said = None, [0] * (len(_SAID) - 2) + [0.0]
    try:
        scale = _check(q, k, v, causal, scale)
        sizes = q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2]
        kind = checks.DTYPES.index(q.dtype), causal
        said = [*sizes, q.shape[3], v.shape[3], *kind, scale]
    except (TypeError, ValueError, NotImplementedError) as caught:
        error = caught
    _agree(ring, said, error)
    q, k, v = (x.resolve_neg().contiguous() for x in (q, k, v))
    return _RingAttention.apply(ring, causal, scale, q, k, v)
