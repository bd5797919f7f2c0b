"""A self-attention layer as a module of PyTorch, with the backward pass of the *Appendix: projections*.

The two functions below pair a projection with its gradients by hand. What lies between them is
:func:`flashlib.attention`. They are autograd.Functions, not custom ops: no Triton kernel runs in them, so
torch.compile traces through both passes and may fuse them with what stands around the layer.
"""

import math

import torch

from flashlib import api, checks


def _rows(x):
    """``[B, T, m]`` or, head by head, ``[B, H, T, d]`` as one row for each position: ``[B T, m]``."""
    return (x if x.ndim == 3 else x.transpose(1, 2).flatten(start_dim=2)).flatten(end_dim=1)


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
        dx = None
        if ctx.needs_input_grad[0]:
            dx = gradients[0] @ weights[0].mT
            for dz, w in zip(gradients[1:], weights[1:], strict=True):
                dx = torch.addmm(dx, dz, w.mT)
            dx = dx.view(x.shape)
        dw = [
            _rows(x).mT @ dz if needed else None
            for dz, needed in zip(gradients, ctx.needs_input_grad[1:], strict=True)
        ]
        return dx, *dw


class _OutputProjection(torch.autograd.Function):
    """Y ``[B, T, E]`` from o ``[B, H, T, d]``, which is saved as it came: attention keeps the same tensor."""

    @staticmethod
    def forward(ctx, o, w_o):
        ctx.save_for_backward(o, w_o)
        return (_rows(o) @ w_o).view(o.shape[0], o.shape[2], w_o.shape[1])

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
    """Multi-head self-attention, Y = Attention(X W_Q, X W_K, X W_V) W_O, without a T x T matrix in memory.

    Parameters
    ----------
    embed_dim : int
        Width E of input and output.
    num_heads : int
        Heads H of the queries, a divisor of embed_dim; embed_dim / num_heads = d from 16 to 256.
    num_kv_heads : int or None
        Heads H_kv of keys and values, a divisor of num_heads; None means num_heads. Query head h reads key
        head h // (H / H_kv), and no copy of K or V is made for that.
    causal : bool
        Each position sees itself and those before it.
    scale : float or None
        Factor of the scores; None means 1/sqrt(d).
    method : str
        As in :func:`flashlib.attention`.
    device, dtype
        Of the weights, which are ``w_q`` ``[E, H d]``, ``w_k`` and ``w_v`` ``[E, H_kv d]`` and ``w_o``
        ``[H d, E]``: the matrices of the book, each the transpose of what ``torch.nn.Linear`` keeps. There
        are no biases. dtype is float32, float16 or bfloat16; None means PyTorch's default.

    The call takes x ``[B, T, E]``, any strides, in the dtype of the weights or under autocast, and returns y
    ``[B, T, E]``. For the backward pass x, Q, K, V, O, the log-sum-exp and the weights are kept, nothing
    T x T. Raises TypeError or ValueError naming the argument; NotImplementedError for double backward and
    forward-mode differentiation.

    Source: *Appendix: projections* (``alg-projections-backward``); Vaswani et al. (2017), section 3.2.2.
    """

    def __init__(
        self, embed_dim, num_heads, *, num_kv_heads=None, causal=False, scale=None, method="auto",
        device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if embed_dim % num_heads:
            raise ValueError(f"num_heads: expected a divisor of embed_dim = {embed_dim}, got {num_heads}")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of num_heads = {num_heads}, got {num_kv_heads}"
            )
        d = embed_dim // num_heads
        low, high = checks.HEAD_DIMS
        if not low <= d <= high:
            raise ValueError(f"num_heads: expected embed_dim / num_heads from {low} to {high}, got {d}")
        checks.flag("causal", causal)
        checks.choice("method", method, api.METHODS)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in checks.DTYPES:
            raise TypeError(f"dtype: expected float32, float16 or bfloat16, got {dtype}")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.causal, self.scale, self.method = causal, checks.finite_scale(scale, d), method
        options = {"device": device, "dtype": dtype}
        self.w_q = torch.nn.Parameter(torch.empty(embed_dim, num_heads * d, **options))
        self.w_k = torch.nn.Parameter(torch.empty(embed_dim, num_kv_heads * d, **options))
        self.w_v = torch.nn.Parameter(torch.empty(embed_dim, num_kv_heads * d, **options))
        self.w_o = torch.nn.Parameter(torch.empty(num_heads * d, embed_dim, **options))
        self.reset_parameters()

    def reset_parameters(self):
        """Draw every weight uniformly from +-1/sqrt(embed_dim), as ``torch.nn.Linear`` does."""
        bound = 1.0 / math.sqrt(self.embed_dim)
        for w in self.parameters():
            torch.nn.init.uniform_(w, -bound, bound)

    def forward(self, x):
        """y ``[B, T, E]`` from x ``[B, T, E]``; raises TypeError and ValueError for another x."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
        if x.layout is not torch.strided:
            raise TypeError(f"x: expected a dense (strided) tensor, got layout {x.layout}")
        if x.ndim != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x: expected [B, T, {self.embed_dim}], got {[int(n) for n in x.shape]}")
        if x.device != self.w_q.device:
            raise ValueError(f"x: expected the device of the weights, {self.w_q.device}, got {x.device}")
        x, w_q, w_k, w_v, w_o = (api._autocast(z) for z in (x, self.w_q, self.w_k, self.w_v, self.w_o))
        if x.dtype != w_q.dtype or x.dtype not in checks.DTYPES:
            raise TypeError(
                f"x: expected float32, float16 or bfloat16, as the weights ({w_q.dtype}), got {x.dtype}"
            )
        d = self.embed_dim // self.num_heads
        q, k, v = _Projections.apply(x, w_q, w_k, w_v)
        q, k, v = (
            z.unflatten(2, (heads, d)).transpose(1, 2)  # a view
            for z, heads in ((q, self.num_heads), (k, self.num_kv_heads), (v, self.num_kv_heads))
        )
        o = api.attention(q, k, v, causal=self.causal, scale=self.scale, method=self.method)
        return _OutputProjection.apply(o, w_o)

    def extra_repr(self):
        """The arguments that made the layer, for ``print``."""
        return (
            f"{self.embed_dim}, {self.num_heads}, num_kv_heads={self.num_kv_heads}, causal={self.causal}, "
            f"method={self.method!r}"
        )
