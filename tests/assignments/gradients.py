"""Wrong answers to *gradients*."""

DIFFERENTIATED = """
def score_gradient(s, v, do):
    s.requires_grad_()
    o = torch.softmax(s, -1) @ v
    o.backward(do)
    return (do * o).sum(-1), s.grad
"""
FORWARD = """
def slopes(f, x, h):
    result = torch.zeros_like(x)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            step = torch.zeros_like(x)
            step[i, j] = h
            result[i, j] = (f(x + step) - f(x)) / h
    return result
"""
RESTORED = "def gradients(q, k, v, do, scale, causal):\n    return by_autograd(q, k, v, do, scale, causal)"

WRONG = {
    "the diagonal of the Jacobian only": ("hand", [("p0 * (g - D), p1 * (h - D)", "p0 * g, p1 * h")], 1),
    "equal weights": ("hand", [("p0 * g + p1 * h", "(g + h) / 2")], 0),
    "scores in place of gradients": ("hand", [("ds0, ds1 =", "ds1, ds0 =")], 1),
    "five products": ("costs", [("4 * 2 * T", "5 * 2 * T")], 3),
    "D from the large matrices": ("costs", [("(1 + 1 + 3", "(1 + 1 + 2 + 3")], 3),
    "D the other way round": (
        "costs",
        [("2 * T * T\n", "2 * T * d\n"), ("2 * T * d\nproducts", "T\nproducts")],
        2,
    ),
    "autograd": ("ds", DIFFERENTIATED, 0),
    "autograd by the name of a test's helper": ("ds", "score_gradient = differentiated", 0),
    "no D": ("ds", [(" - D[:, None])", ")")], 0),
    "D as a mean": ("ds", [(".sum(dim=-1)\n", ".mean(dim=-1)\n")], 0),
    "dP without its V": ("ds", [("do @ v.mT - D", "(do @ v.mT).mean(dim=0) - D")], 0),
    "NaN for a row that sees nothing": (
        "ds",
        [("s.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)", "s, dim=-1)")],
        4,
    ),
    "equal weights for a row that sees nothing": (
        "ds",
        [(", dim=-1).masked_fill(blind, 0.0)", ", dim=-1)")],
        4,
    ),
    "dQ without the scale": ("backward", [("scale * (ds @ k)", "ds @ k")], 0),
    "the scale in dV": ("backward", [("p.mT @ do", "scale * (p.mT @ do)")], 0),
    "P without its transpose": ("backward", [("p.mT @ do", "p @ do")], 0),
    "a mask aligned to the top left": ("backward", [("tril(T_k - T_q)", "tril()")], 4),
    "a mask that looks one key ahead": ("backward", [("tril(T_k - T_q)", "tril(T_k - T_q + 1)")], 3),
    "no mask": ("backward", [("if causal:", "if False:")], 3),
    "a query that sees nothing is NaN": (
        "backward",
        [("s.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)", "s, dim=-1)")],
        5,
    ),
    "the helper of the tests": ("backward", RESTORED, 0),
    "half precision on the way": (
        "backward",
        [("ds = p * (do @ v.mT - D)", "ds = (p * (do @ v.mT - D)).half().float()")],
        1,  # where the weights are 0 and 1, nothing is left to be rounded
    ),
    "forward differences": ("differences", FORWARD, 0),
    "half of the distance": ("differences", [("/ (2 * h)", "/ h")], 0),
    "x is changed": ("differences", [("    return result", "    x += h\n    return result")], 3),
    "a row vector only": ("differences", [("range(x.shape[0])", "range(1)")], 1),
    "columns beyond the end": ("delta", [(" & (a < d_v)[None, :]", " & (a < start + BLOCK_D)[None, :]")], 2),
    "rows beyond the end": (
        "delta",
        [
            ("(i < T)[:, None] & (a < d_v)[None, :]", "(i >= 0)[:, None] & (a < d_v)[None, :]"),
            (", mask=i < T)", ")"),
        ],
        2,
    ),
    "the last block of columns only": ("delta", [("total += tl.sum", "total = tl.sum")], 2),
    "one stride for both": ("delta", [("o + i[:, None] * stride_o", "o + i[:, None] * stride_do")], 4),
    "a kernel that is none": ("delta", "def delta_kernel(*x):\n    pass", 0),
    "P without the log-sum-exp": ("kernel", [("tl.exp(s_tile - shift[:, None])", "tl.exp(s_tile)")], 0),
    "no row sums": ("kernel", [("(dp_tile - D[:, None])", "dp_tile")], 0),
    "NaN where nothing is seen": (
        "kernel",
        [('shift = tl.where(shift == -float("inf"), 0.0, shift)', "shift = shift")],
        5,
    ),
    "a missing mask at the store": ("kernel", [("D[:, None]), mask=inside)", "D[:, None]))")], 1),
    "rows of another length": ("kernel", [("place = i[:, None] * T_k", "place = i[:, None] * T_q")], 0),
    "powers of two": ("kernel", [("tl.exp(", "tl.exp2(")], 0),
}
