"""Wrong answers to *backward*."""

WRONG = {
    "the score as if it were the weight": (
        "entry",
        [("math.exp(c * (q0 * k0 + q1 * k1) - L)", "math.exp(c * (q0 * k0 + q1 * k1))")],
        0,
    ),
    "the scale of the score forgotten": ("entry", [("math.exp(c * (q0", "math.exp((q0")], 0),
    "no D, by hand": ("entry", [("g1 * v1 - D", "g1 * v1")], 1.2),
    "the scale in dS and again in dK and dQ": ("entry", [("ds = p *", "ds = c * p *")], 1.2),
    "no scale in dK and dQ": ("entry", [("c * ds * q0", "ds * q0"), ("c * ds * k1", "ds * k1")], 1.8),
    "query and key exchanged": ("entry", [("ds * q0", "ds * k0"), ("ds * k1", "ds * q1")], 1.8),
    "the sums are not loaded": ("words", [("6 * B_c * d", "4 * B_c * d"), ("4 * d + 2", "3 * d + 2")], 2),
    "the sums are always loaded": ("words", [("(T_r - 1)", "T_r"), ("2 * T_c - 1", "2 * T_c")], 2),
    "no statistics": (
        "words",
        [("4 * d + 2", "4 * d"), ("(3 * d + 2)", "3 * d"), ("4 * T * d + T +", "4 * T * d +")],
        1.5,
    ),
    "O in every step": ("words", [("(2 * T * d + 2 * T) * T_c", "(3 * T * d + 2 * T) * T_c")], 2.5),
    "P and dS side by side": ("words", [("4 * B_c * d + B_r * B_c", "4 * B_c * d + 2 * B_r * B_c")], 2.5),
    "an eighth for each block": (
        "words",
        [("(math.isqrt((7 * d + 2) ** 2 + 4 * M) - (7 * d + 2)) // 2", "M // (8 * d)")],
        2.5,
    ),
    "the published sizes": (
        "words",
        [("(math.isqrt((7 * d + 2) ** 2 + 4 * M) - (7 * d + 2)) // 2", "M // (4 * d)")],
        2.5,
    ),
    "aligned to the top left": (
        "starts",
        [
            ("blind = T_q - T_k", "blind = 0"),
            ("(col + T_q - T_k)", "col"),
            ("B_c - 1 + T_q - T_k", "B_c - 1"),
        ],
        0,
    ),
    "the next block of queries": ("starts", [("start = (col", "start = B_r + (col")], 2),
    "the first key twice": ("starts", [("col + B_c - 1 + T_q", "col + T_q")], 2),
    "not rounded": (
        "starts",
        [
            ("(col + T_q - T_k) // B_r * B_r", "col + T_q - T_k"),
            ("-(-(col + B_c - 1 + T_q - T_k) // B_r) * B_r", "col + B_c - 1 + T_q - T_k"),
        ],
        1,
    ),
    "a softmax along the tile": (
        "tile",
        [
            (
                "p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[:, None])",
                "p = torch.softmax(s, dim=1)",
            )
        ],
        0,
    ),
    "a softmax of one's own along the tile": (
        "tile",
        [
            (
                "torch.where(lse == -math.inf, 0.0, lse)[:, None])",
                "torch.exp(s).sum(dim=1, keepdim=True).log())",
            )
        ],
        0,
    ),
    "P from the maximum": (
        "tile",
        [("torch.where(lse == -math.inf, 0.0, lse)[:, None]", "s.amax(dim=1, keepdim=True)")],
        0,
    ),
    "-inf minus -inf, in a tile": (
        "tile",
        [("torch.where(lse == -math.inf, 0.0, lse)[:, None]", "lse[:, None]")],
        3.43,
    ),
    "places in the tile": ("tile", [("i = row + ", "i = "), ("j = col + ", "j = ")], 1.71),
    "a mask off by one, in a tile": ("tile", [("> i[:, None] + shift", ">= i[:, None] + shift")], 2.29),
    "a mask aligned to the top left, in a tile": ("tile", [("> i[:, None] + shift", "> i[:, None]")], 2.86),
    "no mask, in a tile": ("tile", [("if causal:", "if False:")], 1.71),
    "D from dO alone": ("tile", [("(do * o)", "(do * do)")], 0),
    "D from this tile's keys": (
        "tile",
        [("delta = (do * o).sum(dim=1)", "delta = (p * (do @ v.T)).sum(dim=1)")],
        0.57,
    ),
    "no D, in a tile": ("tile", [("do @ v.T - delta[:, None]", "do @ v.T")], 0.57),
    "no scale, in a tile": ("tile", [("s = scale * q", "s = q")], 0.57),
    "torch.autograd.grad": (
        "tiled",
        (
            "import torch\n\n\ndef tiled(q, k, v, o, do, lse, causal, scale, B_r, B_c):\n"
            "    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))\n"
            "    for row in range(len(q)):\n"
            "        leaves = [x.detach().requires_grad_() for x in (q[row : row + 1], k, v)]\n"
            "        p = torch.exp(scale * leaves[0] @ leaves[1].T - lse[row])\n"
            "        a, b, c = torch.autograd.grad(p @ leaves[2], leaves, do[row : row + 1])\n"
            "        dq[row], dk, dv = a[0], dk + b, dv + c\n    return dq, dk, dv\n"
        ),
        0,
    ),
    "a call of backward": (
        "tiled",
        (
            "import torch\n\n\ndef tiled(q, k, v, o, do, lse, causal, scale, B_r, B_c):\n"
            "    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))\n"
            "    for row in range(len(q)):\n"
            "        leaves = [x.detach().requires_grad_() for x in (q[row : row + 1], k, v)]\n"
            "        p = torch.exp(scale * leaves[0] @ leaves[1].T - lse[row])\n"
            "        (p @ leaves[2]).backward(do[row : row + 1])\n"
            "        a, b, c = (x.grad for x in leaves)\n"
            "        dq[row], dk, dv = a[0], dk + b, dv + c\n    return dq, dk, dv\n"
        ),
        0,
    ),
    "autograd imported by another name": (
        "tiled",
        (
            "import torch\nfrom torch.autograd import grad as derivative\n\n\n"
            "def tiled(q, k, v, o, do, lse, causal, scale, B_r, B_c):\n"
            "    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))\n"
            "    for row in range(len(q)):\n"
            "        leaves = [x.detach().requires_grad_() for x in (q[row : row + 1], k, v)]\n"
            "        p = torch.exp(scale * leaves[0] @ leaves[1].T - lse[row])\n"
            "        a, b, c = derivative(p @ leaves[2], leaves, do[row : row + 1])\n"
            "        dq[row], dk, dv = a[0], dk + b, dv + c\n    return dq, dk, dv\n"
        ),
        0,
    ),
    "the helper of the tests": (
        "tiled",
        (
            "def tiled(q, k, v, o, do, lse, causal, scale, B_r, B_c):\n"
            "    return by_autograd(q, k, v, do, causal, scale)[2:]\n"
        ),
        0,
    ),
    "whole matrices": (
        "tiled",
        (
            "def tiled(q, k, v, o, do, lse, causal, scale, B_r, B_c):\n"
            "    s = scale * q @ k.T\n    if causal:\n"
            "        seen = torch.ones(len(q), len(k), device=q.device).tril(len(k) "
            "- len(q)).bool()\n        s = s.masked_fill(~seen, -math.inf)\n"
            "    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[:, None])\n"
            "    ds = p * (do @ v.T - (do * o).sum(dim=1)[:, None])\n"
            "    return scale * ds @ k, scale * ds.T @ q, p.T @ do\n"
        ),
        0,
    ),
    "strips of whole rows": (
        "tiled",
        (
            "def tiled(q, k, v, o, do, lse, causal, scale, B_r, B_c):\n"
            "    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)\n"
            "    for row in range(0, len(q), B_r):\n"
            "        I = slice(row, min(row + B_r, len(q)))\n        s = scale * q[I] @ k.T\n"
            "        if causal:\n"
            "            i = torch.arange(I.start, I.stop, device=q.device)\n"
            "            s = s.masked_fill(torch.arange(len(k), device=q.device) > "
            "i[:, None] + len(k) - len(q), -math.inf)\n"
            "        p = torch.exp(s - torch.where(lse[I] == -math.inf, 0.0, "
            "lse[I])[:, None])\n"
            "        ds = p * (do[I] @ v.T - (do[I] * o[I]).sum(dim=1)[:, None])\n"
            "        dv += p.T @ do[I]\n        dk += scale * ds.T @ q[I]\n"
            "        dq[I] = scale * ds @ k\n    return dq, dk, dv\n"
        ),
        0,
    ),
    "no D, in PyTorch": ("tiled", [(" - delta[I, None]", "")], 0),
    "P from m instead of L, in PyTorch": (
        "tiled",
        [("torch.where(lse[I] == -math.inf, 0.0, lse[I])[:, None]", "s.amax(dim=1, keepdim=True)")],
        0,
    ),
    "dK from untransposed dS": ("tiled", [("scale * ds.T @ q[I]", "scale * ds @ q[I]")], 0),
    "no scale in dK, in PyTorch": ("tiled", [("scale * ds.T", "ds.T")], 0),
    "no scale in dQ": ("tiled", [("scale * ds @ k[J]", "ds @ k[J]")], 0),
    "the scale in dV": ("tiled", [("p.T @ do[I]", "scale * p.T @ do[I]")], 0),
    "dQ of the last block of keys": ("tiled", [("dq[I] +=", "dq[I] =")], 0),
    "dK never starts anew": (
        "tiled",
        [
            ("        dk_block, dv_block = torch.zeros_like(k[J]), torch.zeros_like(v[J])\n", ""),
            (
                "    delta = (do",
                (
                    "    dk_block, dv_block = torch.zeros_like(k[:B_c]), torch.zeros_like(v[:B_c])\n"
                    "    delta = (do"
                ),
            ),
        ],
        0,
    ),
    "last keys dropped": ("tiled", [("range(0, T_k, B_c)", "range(0, T_k // B_c * B_c, B_c)")], 1),
    "last queries dropped, in PyTorch": (
        "tiled",
        [("range(0, T_q, B_r)", "range(0, T_q // B_r * B_r, B_r)")],
        1,
    ),
    "mask off by one, in PyTorch": (
        "tiled",
        [("> i[:, None] + T_k - T_q", "> i[:, None] + T_k - T_q + 1")],
        3,
    ),
    "mask aligned to the top left, in PyTorch": ("tiled", [("> i[:, None] + T_k - T_q", "> i[:, None]")], 4),
    "blind row NaN, in PyTorch": (
        "tiled",
        [("torch.where(lse[I] == -math.inf, 0.0, lse[I])[:, None]", "lse[I, None]")],
        5,
    ),
    "no D": ("kernel", [("dp - d_rows[:, None]", "dp")], 0),
    "D twice": ("kernel", [("dp - d_rows[:, None]", "dp - 2 * d_rows[:, None]")], 0),
    "P from m instead of L": (
        "kernel",
        [("p = tl.exp(s - shift[:, None])", "p = tl.exp(s - tl.max(s, 1)[:, None])")],
        0,
    ),
    "no log-sum-exp": ("kernel", [("p = tl.exp(s - shift[:, None])", "p = tl.exp(s)")], 0),
    "no scale in the scores": ("kernel", [("s = scale * tl.dot(", "s = tl.dot(")], 0),
    "no scale in dK": ("kernel", [("scale * dk_acc", "dk_acc")], 0),
    "the scale twice in dK": ("kernel", [("ds = p * (", "ds = scale * p * (")], 0),
    "dK from dS, not transposed": ("kernel", [("tl.dot(ds.T, q_tile", "tl.dot(ds, q_tile")], 0),
    "dV from P, not transposed": ("kernel", [("tl.dot(p.T, do_tile", "tl.dot(p, do_tile")], 0),
    "dV from dS": ("kernel", [("tl.dot(p.T, do_tile", "tl.dot(ds.T, do_tile")], 0),
    "dO read with the strides of Q": (
        "kernel",
        [("load_tile(do, do_strides,", "load_tile(do, q_strides,")],
        8.18,
    ),
    "dV stored with the strides of dK": (
        "kernel",
        [("store_tile(dv, dv_strides,", "store_tile(dv, dk_strides,")],
        8.18,
    ),
    "first head of the group only": ("kernel", [("range(GROUP)", "range(1)")], 8.18),
    "heads interleaved": (
        "kernel",
        [("head = key_head * GROUP + member", "head = key_head + member * tl.num_programs(1)")],
        8.18,
    ),
    "statistics of the first head": (
        "kernel",
        [("lse + head * T_q + i", "lse + i"), ("delta + head * T_q + i", "delta + i")],
        7.36,
    ),
    "last queries dropped": (
        "kernel",
        [("range(start, T_q, BLOCK_Q)", "range(start, T_q // BLOCK_Q * BLOCK_Q, BLOCK_Q)")],
        1.64,
    ),
    "last block of queries only": (
        "kernel",
        [("dv_acc = tl.dot(p.T, do_tile, dv_acc,", "dv_acc = tl.dot(p.T, do_tile,")],
        0.82,
    ),
    "mask off by one": (
        "kernel",
        [("j[None, :] <= i[:, None] + (T_k - T_q)", "j[None, :] < i[:, None] + (T_k - T_q)")],
        4.91,
    ),
    "mask aligned to the top left": (
        "kernel",
        [("j[None, :] <= i[:, None] + (T_k - T_q)", "j[None, :] <= i[:, None]")],
        6.55,
    ),
    "no mask": ("kernel", [("    if CAUSAL:\n                s", "    if False:\n                s")], 4.91),
    "every block of queries read": (
        "kernel",
        [("start = tl.maximum(col + T_q - T_k, 0) // BLOCK_Q * BLOCK_Q", "start = 0")],
        8.18,
    ),
    "diagonal block skipped": ("kernel", [("// BLOCK_Q * BLOCK_Q", "// BLOCK_Q * BLOCK_Q + BLOCK_Q")], 4.91),
    "begins below zero": (
        "kernel",
        [("tl.maximum(col + T_q - T_k, 0) // BLOCK_Q", "(col + T_q - T_k) // BLOCK_Q")],
        8.18,
    ),
    "blind row NaN": (
        "kernel",
        [('shift = tl.where(lse_rows == -float("inf"), 0.0, lse_rows)  # [BLOCK_Q]', "shift = lse_rows")],
        8.18,
    ),
    "natural exponent in base 2": ("kernel", [("p = tl.exp(", "p = tl.exp2(")], 0),
    "log-sum-exp loaded without a mask": (
        "kernel",
        [("tl.load(lse + head * T_q + i, mask=i < T_q, other=0.0)", "tl.load(lse + head * T_q + i)")],
        1.64,
    ),
    "the first block of keys only": (
        "kernel",
        [("tl.program_id(0) * BLOCK_K", "tl.program_id(0) * 0")],
        0.82,
    ),
    "atomic additions to what is not zero": (
        "kernel",
        [
            (
                "store_tile(dv, dv_strides, dv_acc, key_head, col, T_k, d_v, BLOCK_K, BLOCK_DV)",
                (
                    "tl.atomic_add(tile_pointers(dv, dv_strides, key_head, col, BLOCK_K, "
                    "BLOCK_DV), dv_acc,\n"
                    "                  mask=tile_mask(col, T_k, d_v, BLOCK_K, BLOCK_DV))"
                ),
            )
        ],
        0,
    ),
    "half precision on the way": (
        "kernel",
        [
            (
                "ds = p * (dp - d_rows[:, None])",
                "ds = (p * (dp - d_rows[:, None])).to(tl.float16).to(tl.float32)",
            )
        ],
        0,
    ),
}
