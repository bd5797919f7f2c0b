"""Attention of one sequence that is divided among the ranks of a process group.

In a ring, each rank keeps its queries. Keys and values travel around, and each rank
merges what its queries find in every part (chapter *Ring attention*). With Ulysses, the
ranks exchange rows for heads, and back. With a GPU for each rank, the group is NCCL's,
otherwise gloo's; the code is the same. NumPy must be installed: the counts that choose
a way need it, and so does torch.distributed to exchange what ranks say.

With a causal mask the ring divides the sequence in zig-zag order: it is split into 2N
chunks, and rank r has chunks r and 2N - 1 - r, so that all ranks have the same work in
every step.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from flashlib import checks, internals, masks, ops, ranks, ring_passes
from flashlib.plain_checks import UNLIMITED, wrong
from flashlib.reference import ring as reference
from flashlib.reference.ring import zigzag_join, zigzag_positions, zigzag_split
from flashlib.ring_passes import How
from flashlib.score_mods import ScoreMod, mask_of

__all__ = [
    "ring_attention",
    "transport",
    "ulysses_attention",
    "zigzag_join",
    "zigzag_positions",
    "zigzag_split",
]

# -- attention


def _with_sinks(o, lse, sinks):
    """o in float32 and lse with one key more for each head, with value 0, whose score
    is the sink (``eq-online-sink``).
    """
    a = sinks.float()[:, None].expand_as(lse)
    total = torch.logaddexp(lse, a)
    share = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))
    return o.float() * share[..., None], total


def _gradient_of_sinks(sinks, o, lse, do):
    """The part of these rows in the gradient of the sinks."""
    delta = (do.float() * o.float()).sum(dim=-1)
    weight = torch.exp(sinks.float()[:, None] - lse)
    return -(weight.masked_fill(lse == -torch.inf, 0.0) * delta).sum(dim=(0, 2))


class _Gradients(torch.autograd.Function):
    """The backward pass, which has no gradient of its own."""

    @staticmethod
    def forward(ctx, ring, how, sinks, q, k, v, o, lse, do):
        found = ring_passes.backward(ring, how, q, k, v, o, lse, do)
        found = [dx.to(x.dtype) for dx, x in zip(found, (q, k, v), strict=True)]
        if sinks is None:
            return *found, None
        return *found, _gradient_of_sinks(sinks, o, lse, do).to(sinks.dtype)

    @staticmethod
    def backward(ctx, *_):
        message = "flashlib.ring_attention: double backward is not supported"
        raise NotImplementedError(message)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ring, how, q, k, v, sinks):
        o, lse = ring_passes.forward(ring, how, q, k, v)
        if sinks is not None:
            o, lse = _with_sinks(o, lse, sinks)
        o = o.to(q.dtype)
        ctx.save_for_backward(sinks, q, k, v, o, lse)
        ctx.options = ring, how
        return o

    @staticmethod
    def backward(ctx, do):
        if internals.is_batched(do):
            message = "flashlib.ring_attention: is_grads_batched is not supported"
            raise NotImplementedError(message)
        saved = ctx.saved_tensors  # read once: a checkpoint unpacks them at each read
        do = do.resolve_neg().contiguous()
        return None, None, *_Gradients.apply(*ctx.options, *saved, do)


# -- the public functions


def _attend_in_ring(ring, q, k, v, causal, scale, mask, sinks):
    how = How.of(causal, scale, mask, k.shape[2], ring.size, q.device)
    return _RingAttention.apply(ring, how, q, k, v, sinks)


def _attend_to_heads(ring, q, k, v, causal, scale, mask, sinks, zigzag=False):
    def attend(q, k, v, causal):
        if mask is None and sinks is None:
            return ops.flash(q, k, v, causal, scale, "auto", True)[0]
        H, T = q.shape[1], k.shape[2]
        first, own_mask = ring.rank * H, mask
        if mask is not None and mask.depends[1]:  # the heads of this rank
            heads = torch.arange(first, first + H, device=q.device)
            rows = torch.arange(T, device=q.device)
            own_mask = mask.part(heads, rows, rows)
        if own_mask is not None:
            own_mask = mask_of(own_mask)
        own_sinks = None if sinks is None else sinks[first : first + H]
        right = 0 if causal else UNLIMITED
        score_mod = ScoreMod(scale, right=right, sinks=own_sinks, mask=own_mask)
        return ops.attend_masked(q, k, v, score_mod, None, "auto")[0]

    # The exchange has no kernel, so the reference's runs here, around our attention.
    options = {"causal": causal, "group": ring.group, "attend": attend}
    return reference.ulysses_attention(q, k, v, **options, zigzag=zigzag)


def _attend_to_heads_of_zigzag(ring, q, k, v, causal, scale, mask, sinks):
    # If any order of the rows will do, the shards may have any lengths.
    zigzag = causal or mask is not None
    return _attend_to_heads(ring, q, k, v, causal, scale, mask, sinks, zigzag)


def _check_zigzag(ring, q, k, causal, mask):
    """Two chunks on each rank, of queries and keys that are one sequence."""
    _check_one_sequence(q, k, causal, mask)
    if (causal or mask is not None) and q.shape[2] % 2:
        expected = f"an even length of each shard (pad it to {q.shape[2] + 1})"
        raise wrong("q", expected, q.shape[2])


def _check_zigzag_and_heads(ring, q, k, causal, mask):
    _check_zigzag(ring, q, k, causal, mask)
    _check_heads(ring, q, k, causal, mask)


def _check_one_sequence(q, k, causal, mask):
    if (causal or mask is not None) and q.shape[2] != k.shape[2]:
        cause = "a mask" if mask is not None else "causal=True"
        expected = f"T_k {k.shape[2]} with {cause}, whose queries and keys are one"
        raise wrong("q", f"{expected} sequence", q.shape[2])


def _check_heads(ring, q, k, causal, mask):
    """Each rank gets as many heads."""
    if mask is not None:
        _check_one_sequence(q, k, causal, mask)
    if k.shape[1] % ring.size:
        expected = f"a head count that the {ring.size} ranks divide"
        raise wrong("k", expected, k.shape[1])


def _check_mask(mask, q, T):
    """The mask fits q and whole sequences of this length, and its part can be taken."""
    if not isinstance(mask, masks.Mask):
        expected = "a flashlib.masks.Mask or None"
        raise wrong("mask", expected, type(mask).__name__, TypeError)
    most = checks.MOST_CAPTURED - 3  # those of a part
    if len(mask.tensors()) > most:
        got = len(mask.tensors())
        raise wrong("mask", f"one that reads at most {most} tensors", got)
    mask.require_sizes(*q.shape[:2], T)
    checks.check_captured("mask", mask.tensors(), q)


class _Division(NamedTuple):
    """How a public function divides the sequence."""

    check: Callable
    attend: Callable


_DIVISIONS = {
    "ring_attention": _Division(_check_zigzag, _attend_in_ring),
    ranks.BY_HEADS: _Division(_check_zigzag_and_heads, _attend_to_heads_of_zigzag),
    "ulysses_attention": _Division(_check_heads, _attend_to_heads),
}


def _division_of(ring, function, method, q, k, causal, training):
    """The name of the division that a call of a function uses."""
    if method == "auto":
        from flashlib.iomodel import ring as counted

        (_, H, T, d), H_kv = q.shape, k.shape[1]
        sizes = T * ring.size, d, H, H_kv, ring.size
        method = counted.cheaper(*sizes, causal=causal, training=training)
    return ranks.BY_HEADS if method == "ulysses" else function


def _call(function, q, k, v, causal, scale, mask, sinks, group, mesh, method="ring"):
    """The attention of a public function."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{function}: call torch.distributed.init_process_group")
    if mesh is not None:
        if group is not None:
            raise wrong("mesh", "None where a group is given", mesh)
        group = ranks.group_of(mesh)
    ranks.check_group(group)
    ring = ranks.Neighbors(group, function, _DIVISIONS)
    with contextlib.ExitStack() as stack:
        stack.callback(ranks.refuse, ring)  # at any error: the others wait
        if internals.transforms_active():
            ops.refuse_transforms(function)
        checks.check_flags(causal=causal)
        checks.check_qkv(q, k, v)
        if mask is not None:
            _check_mask(mask, q, k.shape[2] * ring.size)
        checks.check_sinks(sinks, q, q.shape[1])
        checks.check_choice("method", method, ranks.METHODS)
        grad = torch.is_grad_enabled()
        needed = [grad and x is not None and x.requires_grad for x in (q, k, v, sinks)]
        name = _division_of(ring, function, method, q, k, causal, any(needed))
        division = _DIVISIONS[name]
        division.check(ring, q, k, causal, mask)
        scale = checks.check_scale(scale, q)
        sizes = *q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:], v.shape[3]
        sinks_are = "None" if sinks is None else "a tensor"
        key = 0 if mask is None else int(mask.key[:15], 16)
        said = name, *sizes, q.dtype, q.device.type, causal, sinks_are, *needed
        said = *said, key, scale
        q, k, v = (x.resolve_neg().contiguous() for x in (q, k, v))
        stack.pop_all()
    begins, finish = ranks.compare(ring, ranks.as_integers(said), q.device)
    if not begins:
        finish()
    o = division.attend(ring, q, k, v, causal, scale, mask, sinks)
    if begins:
        finish()
    return o


_call_outside_of_graphs = internals.outside_of_graphs(_call)


def _called(*arguments):
    """As _call; torch.compile breaks its graph here."""
    compiling = torch.compiler.is_dynamo_compiling()
    return (_call_outside_of_graphs if compiling else _call)(*arguments)


def ring_attention(
    q, k, v, *, causal=False, scale=None, mask=None, sinks=None, group=None, mesh=None,
    method="ring",
):  # fmt: skip
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
        :func:`zigzag_split`, whose positions are :func:`zigzag_positions`, and T_q =
        T_k. Without the mask, the sequence may be divided into equal shards in any way.
    scale : float or None
        Factor that multiplies the scores; None means 1/sqrt(d).
    mask : :class:`flashlib.masks.Mask` or None
        Which keys a query sees, by the positions and heads of the whole sequence: a
        window, documents, any function. The shards are those of a causal mask, and the
        mask reads at most three tensors, which all ranks have whole. Each step looks at
        all pairs of its shards for tiles that nobody sees, and skips them.
    sinks : tensor ``[H]`` or None
        As in :func:`flashlib.attention`, the same on all ranks; added once, after the
        last merge. Each rank gets the part of its own queries in their gradient: the
        sum over ranks is the gradient.
    group : torch.distributed.ProcessGroup or None
        The ranks; None is the default group.
    mesh : torch.distributed.device_mesh.DeviceMesh or None
        A one-dimensional mesh, in place of a group.
    method : "ring", "ulysses" or "auto"
        "ulysses" exchanges rows for heads, as :func:`ulysses_attention` does, of the
        same shards; N divides H_kv. "auto" takes the one whose ranks wait less, by a
        count of words on H200s (``eq-ring-exposed``). Measured on two and four GPUs it
        was right forward; with the backward pass, Ulysses was faster on four.

    Returns
    -------
    o : tensor ``[B, H, T_q / N, d_v]`` in the dtype of q

    Notes
    -----
    Differentiable once. Results are merged, and gradients accumulated, in float32 and
    in an order that does not change from run to run. The gradients of each pair of
    shards are rounded to the dtype of q before they are added. ``torch.compile`` breaks
    its graph at the call.

    With four ranks or more on one host, the GPUs' copy engines bring the shards, and
    on Hopper one launch takes them all, in the order in which they arrive; this needs
    1.2 to 1.6 times the additional memory on four. Otherwise NCCL sends them.
    :func:`transport` says which way a group takes.

    The ranks compare their arguments while they compute, or, if the sizes or the dtype
    are not those of the last call, before.

    Raises TypeError or ValueError that names the argument, on every rank if the ranks
    have different arguments; RuntimeError without a process group, if another rank
    rejected its arguments, and, within the timeout of the group, if another rank has
    died; NotImplementedError for a second derivative. A rank whose group or mesh is
    wrong cannot tell the others, which wait for it as for one that has died. On GPUs,
    where copies do not block the host, it is the next call that raises if a rank has
    died; a program that waits for its GPU before that is ended by NCCL's watchdog, or
    gets an error of CUDA.

    Source: chapter *Ring attention*; Liu et al. (2023).
    """
    arguments = q, k, v, causal, scale, mask, sinks, group, mesh, method
    return _called("ring_attention", *arguments)


def ulysses_attention(
    q, k, v, *, causal=False, scale=None, mask=None, sinks=None, group=None, mesh=None
):
    """Exact attention for one sequence that is divided among the ranks of a group, each
    of which computes some of the heads.

    Every rank of the group calls it with its shard and gets its shard of the output.
    The ranks exchange rows for heads, attend to the whole sequence with H / N heads,
    and exchange back. With many key heads they send less than :func:`ring_attention`,
    but nothing is computed meanwhile.

    Parameters
    ----------
    q, k, v, scale, group, mesh
        As in :func:`ring_attention`. N divides H_kv, so it divides H.
    causal : bool
        Query i sees key j of the whole sequence only if j <= i + T_k - T_q. The shards
        are contiguous and in the order of ranks, also without the mask if it matters
        where a row is.
    mask, sinks
        As in :func:`ring_attention`, with contiguous shards.

    Returns
    -------
    o : tensor ``[B, H, T_q / N, d_v]`` in the dtype of q

    Notes
    -----
    Differentiable once. Gradients are bitwise identical from run to run. Compares
    arguments as :func:`ring_attention` does, and raises the same errors.

    Source: chapter *Ring attention*, its depth page (``eq-ring-ulysses-words``); Jacobs
    et al. (2023).
    """
    return _called(
        "ulysses_attention", q, k, v, causal, scale, mask, sinks, group, mesh
    )


def transport(group=None):
    """How the ranks of a group pass shards on, as a string: "copies" by the GPUs' copy
    engines, or "messages: " and the reason why not. None before the first call of
    :func:`ring_attention`, which chooses for all later ones.
    """
    return ranks.transport_name(group)
