"""Self-attention layers as PyTorch modules: one with the backward pass of the
*Appendix: projections*, and one whose keys and values are projections of latents
(chapter *Latent attention*).

In the first, two functions pair a projection with its gradients by hand, and
:func:`flashlib.attention` is between them. They are autograd.Functions, not custom ops:
no Triton kernel runs in them, so torch.compile traces through both passes and may fuse
them with the code around the layer.
"""

import math

import torch

from flashlib import api, checks, internals, ops, ranks, ring
from flashlib.plain_checks import wrong


def _rows(x):
    """``[B, T, m]`` or ``[B, H, T, d]`` with a row for each position: ``[B T, m]``."""
    x = x if x.ndim == 3 else x.transpose(1, 2)
    return x.reshape(x.shape[0] * x.shape[1], math.prod(x.shape[2:]))


class _Projections(torch.autograd.Function):
    """Q, K and V ``[B, T, columns]`` from x ``[B, T, E]``."""

    @staticmethod
    def forward(ctx, x, w_q, w_k, w_v):
        ctx.save_for_backward(x, w_q, w_k, w_v)
        return x @ w_q, x @ w_k, x @ w_v

    @staticmethod
    def backward(ctx, dq, dk, dv):
        x, *weights = ctx.saved_tensors
        gradients = [_rows(dz) for dz in (dq, dk, dv)]
        wants_dx, *wants_dw = ctx.needs_input_grad
        dx = None
        if wants_dx:
            dx = gradients[0] @ weights[0].mT
            for dz, w in zip(gradients[1:], weights[1:], strict=True):
                dx = torch.addmm(dx, dz, w.mT)
            dx = dx.view(x.shape)
        pairs = zip(gradients, wants_dw, strict=True)
        return dx, *(_rows(x).mT @ dz if wanted else None for dz, wanted in pairs)


class _OutputProjection(torch.autograd.Function):
    """Y ``[B, T, E]`` from o ``[B, H, T, d]``, the tensor that attention saves too."""

    @staticmethod
    def forward(ctx, o, w_o):
        ctx.save_for_backward(o, w_o)
        B, _, T, _ = o.shape
        # A view of the product could not be changed in place.
        return _rows(o).view(B, T, w_o.shape[0]) @ w_o

    @staticmethod
    def backward(ctx, dy):
        o, w_o = ctx.saved_tensors
        B, H, T, d = o.shape
        do = dw_o = None
        if ctx.needs_input_grad[0]:
            do = (_rows(dy) @ w_o.mT).view(B, T, H, d).transpose(1, 2)
        if ctx.needs_input_grad[1]:
            dw_o = _rows(o).mT @ _rows(dy)
        return do, dw_o


class FlashSelfAttention(torch.nn.Module):
    """Multi-head self-attention, Y = Attention(X W_Q, X W_K, X W_V) W_O, without a T x
    T matrix in memory.

    Parameters
    ----------
    embed_dim : int
        Width E of input and output.
    num_heads : int
        Heads H of the queries, a divisor of embed_dim; embed_dim / num_heads = d from
        16 to 256.
    num_kv_heads : int or None
        Key heads H_kv, a divisor of num_heads; None means num_heads.
        Query head h reads key head h // (H / H_kv), without a copy of K or V.
    causal, scale, method :
        As in :func:`flashlib.attention`.
    group : torch.distributed.ProcessGroup or None
        The ranks among which the sequence is divided, each with the same weights: the
        layer calls :func:`flashlib.ring_attention`, and method is "auto". None means
        one device. Copies of the layer share the group; a layer with one cannot be
        pickled.
    device, dtype
        Device and dtype of the weights ``w_q`` ``[E, H d]``, ``w_k`` and ``w_v`` ``[E,
        H_kv d]`` and ``w_o`` ``[H d, E]``. These are the book's matrices; each is the
        transpose of the corresponding ``torch.nn.Linear`` weight. There are no biases.
        dtype is float32, float16 or bfloat16; None means PyTorch's default.

    Notes
    -----
    The call takes x ``[B, T, E]``, any strides, in the dtype of the weights or under
    autocast, and returns y ``[B, T, E]``. The backward pass needs x, Q, K, V, O, the
    log-sum-exp and the weights, nothing T x T. Raises the errors of
    :func:`flashlib.attention`.

    Source: *Projections* (``alg-projections-backward``); Vaswani et al.
    (2017), section 3.2.2.
    """

    def __init__(
        self, embed_dim, num_heads, *, num_kv_heads=None, causal=False, scale=None,
        method="auto", group=None, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        dtype = torch.get_default_dtype() if dtype is None else dtype
        heads = num_heads, num_kv_heads
        d = checks.check_layer(embed_dim, *heads, causal, method, device, dtype)
        self.embed_dim, self.causal, self.method = embed_dim, causal, method
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        ranks.check_group(group)
        if group is not None and method != "auto":
            raise wrong("method", "'auto' with a group", repr(method))
        self._group = ranks.LayerGroup(group) if group is not None else None
        self.scale = 1.0 / math.sqrt(d)
        if scale is not None:
            self.scale = checks.check_number("scale", scale, checks.OR_NONE)

        def weight(*shape):
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.w_q = weight(embed_dim, num_heads * d)
        self.w_k = weight(embed_dim, num_kv_heads * d)
        self.w_v = weight(embed_dim, num_kv_heads * d)
        self.w_o = weight(num_heads * d, embed_dim)
        self.reset_parameters()

    @property
    def group(self):
        """The ranks among which the sequence is divided, or None."""
        return self._group and self._group.group

    def reset_parameters(self):
        """Draw weights from +-1/sqrt(embed_dim), as ``torch.nn.Linear`` does."""
        bound = 1.0 / math.sqrt(self.embed_dim)
        for w in self.parameters():
            torch.nn.init.uniform_(w, -bound, bound)

    def forward(self, x):
        """y ``[B, T, E]`` from x ``[B, T, E]``; raises TypeError or ValueError."""
        if internals.transforms_active():
            ops.refuse_transforms("FlashSelfAttention")
        weights = self.w_q, self.w_k, self.w_v, self.w_o
        x, *w_qkv, w_o = ops.autocast(x, *weights)
        checks.check_layer_input(x, w_qkv[0])
        d = self.embed_dim // self.num_heads
        q, k, v = (
            z.unflatten(2, (-1, d)).transpose(1, 2)  # a view
            for z in _Projections.apply(x, *w_qkv)
        )
        options = {"causal": self.causal, "scale": self.scale}
        if self.group is None:
            o = api.attention(q, k, v, **options, method=self.method)
        else:
            o = ring.ring_attention(q, k, v, **options, group=self.group)
        return _OutputProjection.apply(o, w_o)

    def extra_repr(self):
        """The arguments that made the layer, for ``print``."""
        return (
            f"{self.embed_dim}, {self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"causal={self.causal}, scale={self.scale}, method={self.method!r}"
        )


class LatentAttention(torch.nn.Module):
    """Causal self-attention whose keys and values are projections of one latent per
    token, as in DeepSeek-V2 and V3.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E of input and output, and heads H.
    d_c, d_n, d_r, d_v : int
        Columns of a latent, of a key without and with rotation, and of a value. d_c is
        8 to 512, d_r even and at most 128; d_n + d_r and d_v are 16 to 256.
    d_q : int or None
        Columns of the queries' own latent; None means queries are projections of x.
    scale : float or None
        Factor on the scores; None means 1/sqrt(d_n + d_r).
    rotary_base : float
        Columns 2n and 2n + 1 of the d_r turn by position rotary_base^(-2n / d_r).
    device, dtype
        Device and dtype of the weights: ``w_c`` ``[E, d_c + d_r]``, ``norm_c``
        ``[d_c]``, ``w_k`` ``[d_c, H d_n]``, ``w_v`` ``[d_c, H d_v]``, ``w_q`` ``[E, H
        (d_n + d_r)]`` and ``w_o`` ``[H d_v, E]``; with d_q, ``w_q`` ``[d_q, ...]``
        after ``w_a`` ``[E, d_q]`` and ``norm_q`` ``[d_q]``. As in
        :class:`FlashSelfAttention`, each is the transpose of a ``torch.nn.Linear``'s.

    Notes
    -----
    ``layer(x)`` takes x ``[B, T, E]``, B whole sequences, and returns y ``[B, T, E]``;
    it expands the latents, and is differentiable. ``layer(x, cache, sequences)`` takes
    the next T tokens of B sequences of a :class:`flashlib.kvcache.PagedLatentCache`,
    appends their latents to it, of all or where it raises OutOfPages of none, and has
    no gradient. Each sequence is expanded or absorbed, whichever takes fewer operations
    (``eq-latent-crossing``). The cache has the dtype of x or, if that is float16 or
    bfloat16, float8_e4m3fn.

    Raises TypeError or ValueError that names the argument, and the errors of
    :func:`flashlib.attention`, :func:`flashlib.decode_latent` and the cache.
    """

    def __init__(
        self, embed_dim, num_heads, *, d_c=512, d_n=128, d_r=64, d_v=128, d_q=None,
        scale=None, rotary_base=10_000.0, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "d_q": d_q}
        checks.check_latent_layer(
            **sizes, widths=(d_c, d_n, d_r, d_v), device=device, dtype=dtype
        )
        self.embed_dim, self.num_heads, self.d_q = embed_dim, num_heads, d_q
        self.widths = d_c, d_n, d_r, d_v
        scale = (d_n + d_r) ** -0.5 if scale is None else scale
        self.scale = checks.check_number("scale", scale, checks.OR_NONE)
        self.rotary_base = checks.check_number("rotary_base", rotary_base)
        if rotary_base <= 0:
            raise wrong("rotary_base", "a positive number", rotary_base)

        def weight(*shape):
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.w_a = self.norm_q = None
        if d_q is not None:
            self.w_a, self.norm_q = weight(embed_dim, d_q), weight(d_q)
        self.w_q = weight(embed_dim if d_q is None else d_q, num_heads * (d_n + d_r))
        self.w_c, self.norm_c = weight(embed_dim, d_c + d_r), weight(d_c)
        self.w_k, self.w_v = weight(d_c, num_heads * d_n), weight(d_c, num_heads * d_v)
        self.w_o = weight(num_heads * d_v, embed_dim)
        self.reset_parameters()

    def reset_parameters(self):
        """Draw matrices from +-1/sqrt(rows), as ``torch.nn.Linear`` does, and set norms
        to one.
        """
        for w in self.parameters():
            bound = 1.0 / math.sqrt(len(w))
            if w.ndim == 1:
                torch.nn.init.ones_(w)
            else:
                torch.nn.init.uniform_(w, -bound, bound)

    def forward(self, x, cache=None, sequences=None):
        """y ``[B, T, E]`` from x ``[B, T, E]``; raises TypeError or ValueError."""
        x, *weights = ops.autocast(
            x, self.w_a, self.norm_q, self.w_q, self.w_c, self.norm_c
        )
        w_a, norm_q, w_q, w_c, norm_c = weights
        checks.check_layer_input(x, w_c)
        d_c, d_n, _, _ = self.widths
        starts = [0] * len(x)
        if cache is not None:
            sequences = self._check_cache(x, cache, sequences)
            starts = [cache.length(sequence) for sequence in sequences]
        elif sequences is not None:
            raise wrong("sequences", "None without a cache", sequences)
        turns = self._turns(starts, x)

        hidden = x if w_a is None else _normalized(x @ w_a, norm_q)
        q = self._heads(hidden @ w_q)
        q = torch.cat([q[..., :d_n], _turned(q[..., d_n:], turns[:, None])], dim=-1)
        row = x @ w_c
        c, r = _normalized(row[..., :d_c], norm_c), _turned(row[..., d_c:], turns)
        if cache is None:
            o = self._expanded(q, c, r)
        else:
            cache.require_pages(sequences, x.shape[1])  # for all, or change nothing
            for sequence, *new in zip(sequences, c, r, strict=True):
                cache.append(sequence, *new)
            o = self._cached(q, cache, sequences)
        (w_o,) = ops.autocast(self.w_o)
        return o.transpose(1, 2).flatten(2) @ w_o

    def _heads(self, x):
        """``[B, T, H n]`` as a view ``[B, H, T, n]``."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def _turns(self, starts, x):
        """The rotations ``[B, T, d_r / 2]`` of the T positions from each start on, as
        complex numbers.
        """
        kind, d_r = {"device": x.device, "dtype": torch.float64}, self.widths[2]
        rates = self.rotary_base ** (-torch.arange(0, d_r, 2, **kind) / d_r)
        first = torch.tensor(starts, **kind)[:, None, None]
        angles = (first + torch.arange(x.shape[1], **kind)[:, None]) * rates
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    def _expanded(self, q, c, r):
        """O ``[B, H, T_q, d_v]`` by keys and values of all heads."""
        w_k, w_v = ops.autocast(self.w_k, self.w_v)
        k, shared = self._heads(c @ w_k), r[:, None].expand(-1, self.num_heads, -1, -1)
        k = torch.cat([k, shared], dim=-1)
        return api.attention(q, k, self._heads(c @ w_v), causal=True, scale=self.scale)

    def _absorbed(self, q, cache, sequences):
        """The same on the latents (``eq-latent-absorb``, ``eq-latent-output``)."""
        d_c, d_n, _, _ = self.widths
        w_k, w_v = (
            w.unflatten(1, (self.num_heads, -1))
            for w in ops.autocast(self.w_k, self.w_v)
        )
        plain = torch.einsum("bhtn,chn->bhtc", q[..., :d_n], w_k)
        q = torch.cat([plain, q[..., d_n:]], dim=-1)
        table, lengths = cache.batch(sequences)
        o = api.decode_latent(
            q,
            cache.pages,
            d_c=d_c,
            scale=self.scale,
            seq_lens=lengths,
            block_table=table,
            scales=cache.scales,
        )
        return torch.einsum("bhtc,chv->bhtv", o, w_v)

    def _cached(self, q, cache, sequences):
        """O ``[B, H, T_q, d_v]`` of the last positions of sequences, each by the way
        that takes fewer operations.
        """
        from flashlib.iomodel.latent import (  # which needs NumPy, as caches
            Widths,
            absorbs,
        )

        T, widths = q.shape[2], Widths(*self.widths)
        few = [absorbs(T, cache.length(x), widths, causal=True) for x in sequences]
        o = q.new_empty(*q.shape[:3], widths.d_v)
        chosen = [b for b, absorbed in enumerate(few) if absorbed]
        if chosen:
            o[chosen] = self._absorbed(q[chosen], cache, [sequences[b] for b in chosen])
        for b, absorbed in enumerate(few):
            if not absorbed:
                c, r = (x[None].to(q.dtype) for x in cache.rows(sequences[b]))
                o[b] = self._expanded(q[b : b + 1], c, r)[0]
        return o

    def _check_cache(self, x, cache, sequences):
        """The sequences as a list, if they and the cache fit the call."""
        if torch.is_grad_enabled() and internals.any_requires_grad(
            x, *self.parameters()
        ):
            said = "with a cache it has no gradient; call it under torch.no_grad()"
            raise NotImplementedError(f"flashlib.LatentAttention: {said}")
        return checks.check_layer_cache(x, cache, sequences, self.widths)

    def extra_repr(self):
        """The arguments that made the layer, for ``print``."""
        names = ("d_c", "d_n", "d_r", "d_v")
        pairs = zip(names, self.widths, strict=True)
        widths = ", ".join(f"{name}={n}" for name, n in pairs)
        return (
            f"{self.embed_dim}, {self.num_heads}, {widths}, d_q={self.d_q}, "
            f"scale={self.scale}, rotary_base={self.rotary_base}"
        )


def _normalized(x, weight):
    """x over the root of its mean square, times the weight, in the dtype of x, which
    autocast would change.
    """
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6).to(x.dtype)


def _turned(x, turns):
    """Pairs of neighboring columns, turned by complex numbers, in the dtype of x."""
    pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
