"""Wrong answers to *standard*."""

WRONG = {
    "weights without exponentials": ("hand", [("a / (a + b)", "math.log(a) / math.log(a * b)")], 1),
    "the larger score alone": ("hand", [("math.log(a + b)", "math.log(max(a, b))")], 2),
    "numbers as text": ("hand", "p, o, lse = '0.5', [1.0], None", 0),
    "multiplications only": ("costs", [("(d + (d - 1) + 1)", "d")], 3),
    "half of the traffic": ("costs", [("2 * 2 * T**2", "2 * T**2")], 2),
    "both matrices in 4 bytes": ("costs", [("(4 + 2)", "(4 + 4)")], 3),
    "a root that is not whole": (
        "costs",
        [("math.isqrt(gib * 2**30 // (heads * (4 + 2)))", "(gib * 2**30 / heads / 6) ** 0.5")],
        3,
    ),
    "torch.softmax": (
        "softmax",
        "def rows_softmax(s):\n    return torch.softmax(s, -1), torch.logsumexp(s, -1)",
        0,
    ),
    "softmax by way of cross-entropy": (
        "softmax",
        "def rows_softmax(s):\n    rows = torch.arange(s.shape[1])\n"
        "    loss = torch.nn.functional.cross_entropy\n"
        "    log_p = -torch.stack([loss(s, j.expand(len(s)), reduction='none') for j in rows], 1)\n"
        "    return log_p.exp(), (s - log_p)[:, 0]",
        0,
    ),
    "no maximum": (
        "softmax",
        [("torch.where(m == -math.inf, 0.0, m))\n", "(m := torch.zeros_like(m)))\n")],
        4 * 2 / 5,
    ),
    "one maximum for all rows": (
        "softmax",
        [("s.amax(dim=-1, keepdim=True)", "s.max().expand(len(s), 1)")],
        4 * 3 / 5,
    ),
    "NaN where nothing is seen": ("softmax", [("torch.where(m == -math.inf, 0.0, m)", "m")], 4 * 4 / 5),
    "equal weights where nothing is seen": (
        "softmax",
        [("return e /", "e = torch.where(l == 0, 1 / s.shape[1], e)\n    return e /")],
        4 * 4 / 5,
    ),
    "no log-sum-exp": ("softmax", [(", (m + torch.log(torch.where(l == 0, 1.0, l)))[:, 0]", "")], 0),
    "the wrong axes": (
        "heads",
        [("x.view(T, H, width // H).transpose(0, 1)", "x.reshape(H, T, width // H)")],
        1,
    ),
    "a copy": ("heads", [("transpose(0, 1)\n", "transpose(0, 1).contiguous()\n")], 3),
    "tokens before heads": ("heads", [("o.transpose(0, 1).reshape", "o.reshape")], 3),
    "scores without a scale": ("scores", [("scale * tl.dot", "tl.dot")], 0),
    "attention of a library": ("scores", "from torch.nn.functional import scaled_dot_product_attention", 0),
    "PyTorch in a kernel's cell": ("scores", "import torch\ndef scores_kernel(*x):\n    pass", 0),
    "no mask for the columns": (
        "scores",
        [
            ("(i < T_q)[:, None] & (a < d)[None, :]", "(i < T_q)[:, None]"),
            ("(j < T_k)[:, None] & (a < d)[None, :]", "(j < T_k)[:, None]"),
        ],
        3,
    ),
    "no mask at the store": ("scores", [(", mask=(i < T_q)[:, None] & (j < T_k)[None, :])", ")")], 1),
    "a mask that looks one key ahead": ("scores", [("<= i[:, None] + T_k", "<= i[:, None] + 1 + T_k")], 3),
    "a mask that hides the diagonal": ("scores", [("j[None, :] <= i", "j[None, :] < i")], 3),
    "a mask aligned to the top left": ("scores", [("i[:, None] + T_k - T_q", "i[:, None]")], 4),
    "rows without gaps": ("scores", [("i[:, None] * stride_q", "i[:, None] * d")], 4),
    "a row that sees nothing is NaN": ("rows", [('tl.where(m == -float("inf"), 0.0, m)', "m")], 5),
    "division by zero": ("rows", [("l = tl.where(l == 0.0, 1.0, l)\n", "l = l + 0.0\n")], 5),
    "no maximum in the kernel": (
        "rows",
        [('shift = tl.where(m == -float("inf"), 0.0, m)', "shift = 0.0\n    m = 0.0")],
        4,
    ),
    "missing scores read as 0": (
        "rows",
        [
            (
                "l += tl.sum(tl.exp(x - shift), 0)",
                "l += tl.sum(tl.where(j < T_k, tl.exp(x - shift), tl.exp(-shift)), 0)",
            )
        ],
        2,
    ),
    "the softmax of Triton": (
        "rows",
        [("l += tl.sum(tl.exp(x - shift), 0)", "l += tl.sum(tl.softmax(x), 0)")],
        0,
    ),
    "a log-sum-exp without the maximum": ("rows", [("m + tl.log(l)", "tl.log(l)")], 0),
    "the last block only": ("output", [("acc += tl.dot", "acc = tl.dot")], 0),
    "the last keys left out": (
        "output",
        [("range(0, T_k, BLOCK_K)", "range(0, T_k - BLOCK_K + 1, BLOCK_K)")],
        3,
    ),
    "keys beyond the end": (
        "output",
        [
            ("(i < T_q)[:, None] & (j < T_k)[None, :]", "(i < T_q)[:, None]"),
            ("(j < T_k)[:, None] & (a < d_v)[None, :]", "(a < d_v)[None, :]"),
        ],
        3,
    ),
    "columns beyond the end": (
        "output",
        [
            ("(j < T_k)[:, None] & (a < d_v)[None, :]", "(j < T_k)[:, None]"),
            ("mask=(i < T_q)[:, None] & (a < d_v)[None, :])", "mask=(i < T_q)[:, None])"),
        ],
        3,
    ),
}
