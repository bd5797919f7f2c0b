"""Both passes of a ring (chapter *Ring attention*): which pairs of shards a rank
computes, and how keys and gradients travel meanwhile.

Shards pass from neighbor to neighbor in messages, with a launch for each shard, and a
merge. On one host with four GPUs or more, copy engines (:mod:`flashlib.copies`) pull
them straight from the rank that has them, and where a kernel can take them as they
arrive, the forward pass is one launch.
"""

from typing import NamedTuple

import torch

from flashlib import masks, ops, plans
from flashlib.reference.ring import zigzag_positions
from flashlib.score_mods import ScoreMod, mask_of

MOST_PARTS = 4  # of a shard: the host needs microseconds for every copy
PART_BYTES = 2**24  # smaller copies are much slower

# -- a step of the ring


class _Visit(NamedTuple):
    """What a rank computes when the keys of a source are there."""

    rows_q: slice
    rows_k: slice
    causal: bool


class How(NamedTuple):
    """How all ranks attend: what they must agree on."""

    causal: bool
    scale: float
    mask: masks.Mask | None  # of the whole sequence
    positions: tuple  # of the rows of each rank, if there is a mask

    @classmethod
    def of(cls, causal, scale, mask, rows, size, device):
        """For this many rows on each of this many ranks."""
        if mask is None:
            return cls(causal, scale, None, ())
        whole = mask & masks.causal() if causal else mask
        ranks = range(size)
        positions = (zigzag_positions(rows * size, r, size, device) for r in ranks)
        return cls(causal, scale, whole, tuple(positions))

    def masked(self, rank, source, heads):
        """The arguments of ``ops.masked`` after q, k and v, for these heads of a rank's
        rows and the keys of a source.
        """
        mask = self.mask.part(heads, self.positions[rank], self.positions[source])
        return ops.masked_arguments(ScoreMod(self.scale, mask=mask_of(mask)))


def _visit(rank, source, how, T_q, T_k):
    """The queries of a rank and keys of a source in one step; all pairs outside of them
    are hidden.
    """
    everything, half_q, half_k = slice(None), slice(T_q // 2, None), slice(T_k // 2)
    if how.mask is not None:  # it hides them
        return _Visit(everything, everything, False)
    if not how.causal or source == rank:
        return _Visit(everything, everything, how.causal)
    if source < rank:  # its first chunk is before all queries, its second after them
        return _Visit(everything, half_k, False)
    return _Visit(half_q, everything, False)  # both chunks are between the queries'


# -- forward


def forward(ring, how, q, k, v):
    """``(o, lse)`` of this rank's queries and all keys, o like q or in float32."""
    if ring.size > 1 and _arrive_in_one_launch(ring, how, q, k, v):
        return _in_one_launch(ring, how, q, k, v)
    return _in_steps(ring, how, q, k, v)


def _arrive_in_one_launch(ring, how, q, k, v):
    """Whether one kernel takes all shards as they arrive; for all ranks the same."""
    transport = ring.transport(q.device)
    if transport.reason is not None or not transport.hopper or how.mask is not None:
        return False
    from flashlib.iomodel import ring as counted
    from flashlib.kernels.hopper_host import HOPPER_WIDTHS

    (_, H, T, d), H_kv, size = q.shape, k.shape[1], ring.size
    fits = d in HOPPER_WIDTHS and v.shape[3] == d and q.element_size() == 2
    if not fits or not q.numel() or not k.numel():
        return False
    # All shards of the others at once need no more than a step of training does.
    sizes = max(T, k.shape[2]) * size, d, H, H_kv, size
    return counted.launch_peak(*sizes) <= counted.copies_backward_peak(*sizes)


def parts_of(head_count, nbytes):
    """The number of equal parts in which a shard of this many key heads and bytes
    arrives: a kernel begins with the first part while the others are on their way.
    """
    parts = 1
    while (
        parts < MOST_PARTS
        and head_count % (2 * parts) == 0
        and nbytes >= 2 * parts * PART_BYTES
    ):
        parts *= 2
    return parts


def _aligned(x):
    """x at an address that TMA can read."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _in_one_launch(ring, how, q, k, v):
    """As forward, by a kernel that waits for the shards of the other ranks itself."""
    from flashlib.kernels import hopper_ring as kernels

    chunks, others = 2 if how.causal else 1, ring.size - 1

    def by_chunks(x):
        B, H, T, d = x.shape
        return _aligned(x).view(B * H, chunks, T // chunks, d)

    queries, keys, values = map(by_chunks, (q, k, v))
    head_count = k.shape[0] * k.shape[1]
    parts = parts_of(head_count, k.nbytes + v.nbytes)
    kind = {"device": q.device, "dtype": q.dtype}
    memory = torch.empty(others * 2 * head_count, *keys.shape[1:], **kind)
    flags = torch.zeros(others * parts, dtype=torch.uint32, device=q.device)
    pieces = zip(keys.chunk(parts), values.chunk(parts), strict=True)
    published = ring.publish("keys", [x for pair in pieces for x in pair])
    # All copies are enqueued before the kernel that waits for them.
    in_bytes = memory.view(others, parts, -1).view(torch.uint8)
    ranks = [ring.source(step) for step in range(1, ring.size)]
    published.pull_parts(ranks, in_bytes, flags)
    timeout_ns = published.engine.timeout_ms * 10**6
    arrival = kernels.Arrival(ring.rank, ring.size, parts, timeout_ns)
    tensors = queries, keys, values, memory, flags
    o, lse = plans.run(kernels.forward, tensors, (how.scale, arrival))
    published.close()
    return o.view(q.shape), lse.view(q.shape[:3])


def _results(ring, how, source, causal, part):
    """``(o, lse)`` of the rows of a visit."""
    if how.mask is None:
        options = causal, how.scale, "auto", True
        return plans.run(ops.flash.forward, part, options)
    heads = torch.arange(part[0].shape[1], device=part[0].device)
    tensors, options = how.masked(ring.rank, source, heads)
    return plans.run(ops.masked.forward, (*part, *tensors), options)


def _in_steps(ring, how, q, k, v):
    """As forward, by a kernel and a merge for each shard."""
    from flashlib.kernels import ring as kernels

    keys, travel = (k, v), ring.travel(k, v)
    for step in range(ring.size):
        if step + 1 < ring.size:  # travel while this step computes
            arrive = travel.begin(step + 1, keys)
        source = ring.source(step)
        rows_q, rows_k, causal = _visit(ring.rank, source, how, q.shape[2], k.shape[2])
        part = q[:, :, rows_q], *(x[:, :, rows_k] for x in keys)
        found = _results(ring, how, source, causal, part)
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
    travel.end()
    return o, lse


# -- backward


def _gradients(how, of_queries, of_keys, queries, keys, heads=slice(None)):
    """``(visit, dq, dk, dv)`` of the queries of one rank and the keys of another, for
    these key heads.
    """
    T_q, T_k, group = queries[0].shape[2], keys[0].shape[2], queries[0].shape[1]
    group //= keys[0].shape[1]
    visit = _visit(of_queries, of_keys, how, T_q, T_k)
    rows_q, rows_k, causal = visit
    first, last, _ = heads.indices(keys[0].shape[1])
    heads_q = slice(first * group, last * group)
    q, *results = (None if x is None else x[:, heads_q, rows_q] for x in queries)
    k, v = (x[:, heads, rows_k] for x in keys)
    if how.mask is None:
        tensors, options = (q, k, v, *results), (causal, how.scale, "auto", True)
        return visit, *plans.run(ops.flash.backward, tensors, options)
    numbers = torch.arange(heads_q.start, heads_q.stop, device=q.device)
    tensors, options = how.masked(of_queries, of_keys, numbers)
    tensors = q, k, v, *tensors, *results
    return visit, *plans.run(ops.masked.backward, tensors, options)[:3]


def _on_all_rows(share, rows, T, dtype):
    """A share of some rows, as T rows with zeros in the others."""
    if share.shape[2] == T:
        return share.to(dtype)
    B, H, _, d = share.shape
    x = share.new_zeros(B, H, T, d, dtype=dtype)
    x[:, :, rows] = share
    return x


def _early_and_late(H_kv):
    """The heads of its own keys that a rank visits first, and a quarter that it leaves
    for the end, to hide the last hop.
    """
    return slice(0, H_kv - H_kv // 4), slice(H_kv - H_kv // 4, H_kv)


def backward(ring, how, q, k, v, o, lse, do):
    """``(dq, dk, dv)`` in the dtypes of q, k, v or float32."""
    queries, keys = (q, o, lse, do, None), (k, v)
    if ring.size == 1:
        return _gradients(how, ring.rank, ring.rank, queries, keys)[1:]
    if ring.transport(q.device).reason is None:
        return _by_copies(ring, how, queries, keys)
    return _by_messages(ring, how, queries, keys)


def _by_messages(ring, how, queries, keys):
    """As backward. dq stays. What the other ranks add to dk and dv follows the keys
    around the ring and, after the last step, home.
    """
    q, (k, v), size = queries[0], keys, ring.size
    T_q, (H_kv, T_k), group = q.shape[2], k.shape[1:3], q.shape[1] // k.shape[1]
    # Of two ranks, each sum has one share of the other, which is rounded already.
    wide = torch.float32 if size > 2 else q.dtype

    def heads_of_queries(heads):
        return slice(heads.start * group, heads.stop * group)

    def visit_own(heads):
        """The gradients by this rank's own keys, of some key heads."""
        return _gradients(how, ring.rank, ring.rank, queries, (k, v), heads)[1:]

    early, late = _early_and_late(H_kv)
    arrive, arrive_sums = ring.pass_on(k, v), None
    dq_early, *own = visit_own(early)
    shares = [(early, own)]
    for step in range(1, size):
        keys, arrive = arrive(), None  # the function holds what has arrived
        if step + 1 < size:
            arrive = ring.pass_on(*keys)
        source = ring.source(step)
        visit, part, *sums = _gradients(how, ring.rank, source, queries, keys)
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


def queries_travel(T, H, H_kv, size, d, d_v):
    """Whether a backward pass by copies moves fewer words if the queries visit the
    keys, and not the keys the queries.
    """
    from flashlib.iomodel import ring as counted

    by_keys, by_queries = counted.copies_backward_words(T, d, H, H_kv, size, d_v)
    return by_queries < by_keys


def _minus_delta(o, lse, do):
    """-D ``[B, H, T]``, of the outputs and their gradients."""
    from flashlib.kernels import backward as kernels

    B, H, T = lse.shape
    padded = -(-T // kernels.DELTA_ROWS) * kernels.DELTA_ROWS
    delta, lse2 = (lse.new_empty(B, H, padded) for _ in range(2))
    no_dlse = lse.new_zeros(1).expand(lse.shape)
    kernels.launch_delta(o, lse, do, no_dlse, delta, lse2)
    return delta[:, :, :T].neg().contiguous()


def _by_copies(ring, how, queries, keys):
    """As backward. The keys of the others visit this rank's queries, or their queries
    its keys; each pair of shards leaves one share for this rank and one for the other,
    which pulls it during the next step.
    """
    (q, o, lse, do, _), (k, v), size = queries, keys, ring.size
    (H, T_q), (H_kv, T_k) = q.shape[1:3], k.shape[1:3]
    group = H // H_kv
    by_queries = queries_travel(size * T_k, H, H_kv, size, q.shape[3], v.shape[3])
    sent = k, v
    if by_queries:
        # D is rowsum(dO o O), less the gradient of L: where O is 0, that is -D.
        dlse, no_output = _minus_delta(o, lse, do), do.new_zeros(1).expand(do.shape)
        sent = q, do, lse, dlse
    published = ring.publish("keys", sent)
    published.start()
    arrive = ring.pull(published, ring.source(1))
    wide = torch.float32 if size > 2 else q.dtype
    sums = [x.new_empty(x.shape, dtype=wide) for x in (q, k, v)]

    def parts(heads):
        """The sums of some key heads."""
        of_queries = slice(heads.start * group, heads.stop * group)
        return [x[:, n] for x, n in zip(sums, (of_queries, heads, heads), strict=True)]

    def visit_own(heads):
        """Pairs of sums and the gradients by this rank's own queries and keys."""
        found = _gradients(how, ring.rank, ring.rank, queries, keys, heads)[1:]
        return zip(parts(heads), found, strict=True)

    early, late = _early_and_late(H_kv)
    for x, own in visit_own(early):
        x.copy_(own)
    for x in parts(late):
        x.zero_()
    away, shares = slice(0, 1) if by_queries else slice(1, 3), None
    for step in range(1, size):
        source, others = ring.source(step), arrive()
        if step + 1 < size:
            arrive = ring.pull(published, ring.source(step + 1))
        if by_queries:
            q_other, do_other, lse_other, dlse_other = others
            visitors = q_other, no_output, lse_other, do_other, dlse_other
            visit, *found = _gradients(how, source, ring.rank, visitors, keys)
        else:
            visit, *found = _gradients(how, ring.rank, source, queries, others)
        del others
        rows = (visit.rows_q, T_q), *[(visit.rows_k, T_k)] * 2
        leaving = []
        for n, (x, (some, T)) in enumerate(zip(found, rows, strict=True)):
            if n in range(3)[away]:
                leaving.append(_on_all_rows(x, some, T, x.dtype))
            else:
                sums[n][:, :, some] += x
        del found, x
        if shares is not None:  # of the step before
            shares.add_to(sums[away])
        # In this step, the rank that is as far behind computed with this one's shard.
        shares = Shares.of(ring, leaving, (ring.rank + step) % size)
        del leaving
    if late.start < late.stop:
        for x, own in visit_own(late):
            x += own
    shares.add_to(sums[away])
    published.close()
    return tuple(sums)


class Shares(NamedTuple):
    """Gradients on their way to the rank that sums them."""

    published: object
    arrive: object

    @classmethod
    def of(cls, ring, leaving, rank):
        """Let others read those that leave, and begin to pull what a rank has."""
        published = ring.publish("sums", leaving)
        return cls(published, ring.pull(published, rank))

    def add_to(self, sums):
        """Add those that have arrived."""
        for x, share in zip(sums, self.arrive(), strict=True):
            x += share
        self.published.close()
