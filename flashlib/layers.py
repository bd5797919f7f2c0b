"""A self-attention layer as a PyTorch module, with the backward pass of the *Appendix:
projections*.

Two functions pair a projection with its gradients by hand, and
:func:`flashlib.attention` is between them. They are autograd.Functions, not custom ops:
no Triton kernel runs in them, so torch.compile traces through both passes and may fuse
them with the code around the layer.
"""

import math

import torch

from flashlib import api, checks, internals, ops, ring


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
        layer calls :func:`flashlib.ring_attention`. None means one device. Copies of
        the layer share the group; a layer with one cannot be pickled.
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
        ring.check_group(group)
        self._group = ring.Shared(group) if group is not None else None
        self.scale = 1.0 / math.sqrt(d)
        if scale is not None:
            self.scale = checks.check_number("scale", scale)

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
            ops.refuse_transforms()
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
