"""Wrong answers to *projections*."""

WRONG = {
    "the forward pass alone": ("counts", [("for_weights = 2 * T", "for_weights = T")], 2.67),
    "every head has its own keys": ("counts", [("(H + 2 * H_kv)\nfor_input", "3 * H\nfor_input")], 2.67),
    "the width for the columns of all heads": (
        "counts",
        [("2 * T * E * d * (H + 2 * H_kv)", "6 * T * E * E")],
        2.67,
    ),
    "four products": ("counts", [("5 * H * 2", "4 * H * 2")], 3.33),
    "one head's attention": ("counts", [("5 * H * 2", "5 * 2")], 3.33),
    "as if S were not made again": ("counts", [("8 * E / 5", "2 * E")], 3.33),
    "operations in place of words": ("counts", [("kept = T * d", "kept = 2 * T * d")], 3.33),
    "folded once for all heads": ("counts", [("3 * H * T * E", "3 * T * E")], 3.33),
    "W_O not transposed": ("output", [("dy @ w_o.T", "dy @ w_o.reshape(w_o.shape[1], -1)")], 0),
    "dO in the layout of Y": ("output", [(".unflatten(2, (H, d_v)).transpose(1, 2)", "")], 0),
    "heads interleaved": (
        "output",
        [("unflatten(2, (H, d_v)).transpose(1, 2)", "unflatten(2, (d_v, H)).permute(0, 3, 1, 2)")],
        1,
    ),
    "heads not put side by side": (
        "output",
        [("o.transpose(1, 2).flatten(2)", "o.reshape(len(o), o.shape[2], -1)")],
        1,
    ),
    "a gradient for each sequence": ("output", [(".sum(dim=0)", "")], 0),
    "the first sequence only": ("output", [(".sum(dim=0)", "[0]")], 2),
    "a mean over the sequences": ("output", [(".sum(dim=0)", ".mean(dim=0)")], 2),
    "dW_O transposed": ("output", [("rows.mT @ dy", "dy.mT @ rows")], 0),
    "torch.autograd.grad": (
        "input",
        (
            "def input_back(x, w_q, w_k, w_v, dq, dk, dv):\n"
            "    leaves = [z.detach().requires_grad_() for z in (x, w_q, w_k, w_v)]\n"
            "    total = 0.0\n    for w, dz in zip(leaves[1:], (dq, dk, dv), strict=True):\n"
            "        total = total + ((leaves[0] @ w) * dz.transpose(1, 2).flatten(2)).sum()\n"
            "    return torch.autograd.grad(total, leaves)\n"
        ),
        0,
    ),
    "a call of backward": (
        "input",
        (
            "def input_back(x, w_q, w_k, w_v, dq, dk, dv):\n"
            "    leaves = [z.detach().requires_grad_() for z in (x, w_q, w_k, w_v)]\n"
            "    total = 0.0\n    for w, dz in zip(leaves[1:], (dq, dk, dv), strict=True):\n"
            "        total = total + ((leaves[0] @ w) * dz.transpose(1, 2).flatten(2)).sum()\n"
            "    total.backward()\n    return [leaf.grad for leaf in leaves]\n"
        ),
        0,
    ),
    "the helper of the tests": (
        "input",
        (
            "def input_back(x, w_q, w_k, w_v, dq, dk, dv):\n"
            "    return by_autograd(x, w_q, w_k, w_v, dq, 1, 1)['dx']\n"
        ),
        0,
    ),
    "dX from Q alone": ("input", [("dx += rows @ w.T", "dx = dx if weights else rows @ w.T")], 0),
    "dX without V": ("input", [("dx += rows @ w.T", "dx += rows @ w.T if len(weights) < 2 else 0.0")], 0),
    "the last of the three only": ("input", [("dx += rows", "dx = rows")], 0),
    "heads interleaved in the rows": (
        "input",
        [("dz.transpose(1, 2).flatten(2)", "dz.permute(0, 2, 3, 1).flatten(2)")],
        1,
    ),
    "rows not transposed": (
        "input",
        [("dz.transpose(1, 2).flatten(2)", "dz.reshape(len(x), x.shape[1], -1)")],
        1,
    ),
    "the scale a second time": ("input", [("(w_q, dq)", "(w_q, dq / math.sqrt(dq.shape[3]))")], 0),
    "a mean over the sequences, in three weights": ("input", [(".sum(dim=0)", ".mean(dim=0)")], 3),
    "dW_K and dW_V exchanged": (
        "input",
        [("return dx, *weights", "return dx, weights[0], weights[2], weights[1]")],
        0,
    ),
    "dX for all sequences together": ("input", [("dx += rows @ w.T", "dx += (rows @ w.T).sum(dim=0)")], 3),
    "whole dQ, dK and dV": (
        "streamed",
        (
            "def streamed(x, q, k, v, o, lse, do, w_q, w_k, w_v, causal, scale, size):\n"
            "    s = scale * q @ k.mT\n    if causal:\n"
            "        s = s.masked_fill(~torch.ones(s.shape[-2:], "
            "device=q.device).tril().bool(), -math.inf)\n"
            "    p = torch.exp(s - lse[:, :, None])\n"
            "    ds = p * (do @ v.mT - (do * o).sum(dim=2)[:, :, None])\n"
            "    dx, weights = 0.0, []\n"
            "    for w, dz in ((w_q, scale * ds @ k), (w_k, scale * ds.mT @ q), "
            "(w_v, p.mT @ do)):\n        rows = dz.transpose(0, 1).flatten(1)\n"
            "        dx = dx + rows @ w.T\n        weights.append(x.T @ rows)\n"
            "    return dx, *weights\n"
        ),
        0,
    ),
    "a whole dQ of one head": (
        "streamed",
        [("            dq = torch.zeros_like(q[h, I])\n", "            dq = torch.zeros_like(q[h])[I]\n")],
        0,
    ),
    "a whole D": (
        "streamed",
        [("delta = (do[h, I] * o[h, I]).sum(dim=1)", "delta = (do[h] * o[h]).sum(dim=1)[I]")],
        0,
    ),
    "strips of whole rows": (
        "streamed",
        [
            (
                "            for J in parts:\n                dq",
                "            for J in [slice(0, T)]:\n                dq",
            )
        ],
        0,
    ),
    "no D": ("streamed", [(" - delta[:, None]", "")], 0),
    "P from m instead of L": ("streamed", [("lse[h, I, None]", "s.amax(dim=1, keepdim=True)")], 0),
    "softmax of a tile": ("streamed", [("torch.exp(s - lse[h, I, None])", "torch.softmax(s, dim=1)")], 0),
    "no scale in dQ": ("streamed", [("dq += scale *", "dq +=")], 0),
    "no scale in dK": ("streamed", [("dk += scale *", "dk +=")], 0),
    "the scale in dV": ("streamed", [("dv += p.T", "dv += scale * p.T")], 0),
    "dK from dS, not transposed": (
        "streamed",
        [
            (
                "scale * ds.T @ q[h, I]",
                "scale * (ds[:, : len(dk)].T if ds.shape[0] != ds.shape[1] else ds) @ q[h, I]",
            )
        ],
        0,
    ),
    "no mask": ("streamed", [("if causal:", "if False:")], 5),
    "mask off by one": ("streamed", [("j[None, :] > i[:, None]", "j[None, :] > i[:, None] + 1")], 5),
    "a large number in place of -inf": ("streamed", [("-math.inf)", "-1.0)")], 5),
    "the columns of the first head": (
        "streamed",
        [("own, own_v = slice(h * d, (h + 1) * d)", "own, own_v = slice(0, d)")],
        1,
    ),
    "dX of the last head": ("streamed", [("dx[I] += dq", "dx[I] = dq")], 1),
    "dW of the last block": ("streamed", [("dw_k[:, own] +=", "dw_k[:, own] =")], 0),
    "dX without the keys": (
        "streamed",
        [
            (
                "            dx[J] += dk @ w_k[:, own].T + dv @ w_v[:, own_v].T\n",
                "            dx[J] += dv @ w_v[:, own_v].T\n",
            )
        ],
        0,
    ),
    "weights used before they are finished": (
        "streamed",
        [
            (
                "                dq += scale * tile(h, I, J)[1] @ k[h, J]\n            dx[I]",
                (
                    "                dq += scale * tile(h, I, J)[1] @ k[h, J]\n"
                    "                dw_q[:, own] += x[I].T @ dq\n            dx[I]"
                ),
            ),
            ("            dw_q[:, own] += x[I].T @ dq\n        for", "        for"),
        ],
        0,
    ),
    "the last positions dropped": (
        "streamed",
        [("range(0, T, size)]", "range(0, T // size * size, size)]")],
        4,
    ),
    "X not transposed": ("kernel", [("tl.dot(x_tile.T, dz_tile, acc,", "tl.dot(x_tile, dz_tile, acc,")], 0),
    "the first sequence only, in the kernel": ("kernel", [("range(B)", "range(1)")], 4.44),
    "the last sequence only": (
        "kernel",
        [("    for b in range(B):\n", "    for b in range(B):\n        acc = acc * 0.0\n")],
        4.44,
    ),
    "the last block of positions only": ("kernel", [("dz_tile, acc, input", "dz_tile, input")], 0.89),
    "last positions dropped": (
        "kernel",
        [("range(0, T, BLOCK_T)", "range(0, T // BLOCK_T * BLOCK_T, BLOCK_T)")],
        2.67,
    ),
    "positions without a mask": ("kernel", [("seen = (i < T)[:, None]", "seen = (i >= 0)[:, None]")], 2.67),
    "columns of X without a mask": ("kernel", [("mask=seen & (a < E)[None, :]", "mask=seen")], 2.67),
    "columns of the head without a mask": ("kernel", [("mask=seen & (c < d)[None, :]", "mask=seen")], 2.67),
    "a store over the head's end": (
        "kernel",
        [("mask=(a < E)[:, None] & (c < d)[None, :])", "mask=(a < E)[:, None])")],
        2.67,
    ),
    "a store below the last row": (
        "kernel",
        [("mask=(a < E)[:, None] & (c < d)[None, :])", "mask=(c < d)[None, :])")],
        2.67,
    ),
    "every head in the first columns": ("kernel", [("(head * d + c)", "c")], 2.67),
    "heads as far apart as the block": ("kernel", [("(head * d + c)", "(head * BLOCK_D + c)")], 2.67),
    "heads interleaved in dW": ("kernel", [("(head * d + c)", "(c * tl.num_programs(1) + head)")], 2.67),
    "the first head of dZ": ("kernel", [(" + head * dz_strides[1]", "")], 2.67),
    "dZ read as if it lay like X": (
        "kernel",
        [("i[:, None] * dz_strides[2]", "i[:, None] * dz_strides[1]")],
        0.89,
    ),
    "a stride left out": ("kernel", [("c[None, :] * dz_strides[3]", "c[None, :]")], 7.11),
    "X read row by row": ("kernel", [("a[None, :] * x_strides[2]", "a[None, :]")], 7.11),
    "half precision on the way": (
        "kernel",
        [("tl.dot(x_tile.T, dz_tile, acc,", "tl.dot(x_tile.T.to(tl.float16).to(tl.float32), dz_tile, acc,")],
        0,
    ),
    "torch in the kernel's cell": ("kernel", [("@triton.jit\n", "import torch\n\n\n@triton.jit\n")], 0),
}
