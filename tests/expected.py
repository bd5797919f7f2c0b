"""How tests say what they expect."""

import pytest
import torch

from flashlib.reference import latent as reference


def refused(error, message):
    """A context that expects one clear line: an error whose message starts so."""
    return pytest.raises(error, match=rf"\A{message}(?!(.|\n)*\n)")


def with_id(table):
    """Rows (error, message, ...) as parameters, each named by its message."""
    return [pytest.param(*row, id=row[1]) for row in table]


def same(found, wanted):
    """Whether two lists of tensors agree in every bit."""
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def in_memory_order(x, like):
    """Whether x is dense and stored in the order of like, unless that is expanded."""
    order = range(x.ndim - 1)
    if 0 not in like.stride():  # not expanded
        order = sorted(order, key=lambda n: -like.stride(n))
    return x.permute(*order, x.ndim - 1).is_contiguous()


def latent_layer(made, x):
    """y of a ``flashlib.LatentAttention`` in float64, from the reference, rotated by
    matrices.
    """
    weights = {name: w.detach().double() for name, w in made.named_parameters()}
    (d_c, d_n, d_r, _), x = made.widths, x.double()

    def norm(x, w):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w

    def turn(x):  # [..., T, d_r]
        positions = torch.arange(x.shape[-2])
        at = reference.rotations(positions, d_r, made.rotary_base).to(x.device)
        return (x[..., None, :] @ at)[..., 0, :]

    def heads(x):
        return x.unflatten(-1, (made.num_heads, -1)).transpose(-3, -2)

    hidden = x if made.d_q is None else norm(x @ weights["w_a"], weights["norm_q"])
    q, row = heads(hidden @ weights["w_q"]), x @ weights["w_c"]
    q = torch.cat([q[..., :d_n], turn(q[..., d_n:])], dim=-1)
    c, r = norm(row[..., :d_c], weights["norm_c"]), turn(row[..., d_c:])
    w_k, w_v = heads(weights["w_k"]), heads(weights["w_v"])
    o, _ = reference.absorbed(q, c, r, w_k, w_v, causal=True, scale=made.scale)
    return o.transpose(1, 2).flatten(2) @ weights["w_o"]
