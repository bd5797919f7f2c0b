"""Wrong answers to *blocks*."""

WRONG = {
    "the root of M": ("tile", [("math.isqrt(M + 1) - 1", "math.isqrt(M)")], 0),
    "three square tiles": ("tile", [("math.isqrt(M + 1) - 1", "math.isqrt(M // 3)")], 0),
    "without rounding": ("tile", [("math.ceil(n / b)", "n // b")], 1),
    "the stores left out": ("tile", [("n**2 + 2 * n**2", "2 * n**2")], 1),
    "no statistics": ("sizes", [("(2 * d + B_c + s))", "(2 * d + B_c))")], 3.56),
    "K and V together": ("sizes", [("(M - B_c * d) //", "(M - 2 * B_c * d) //")], 2.67),
    "the approximation": ("sizes", [("max(0, (M - B_c * d) // (2 * d + B_c + s))", "M // (4 * d)")], 1.78),
    "a block less than nothing": (
        "sizes",
        [("max(0, (M - B_c * d) // (2 * d + B_c + s))", "(M - B_c * d) // (2 * d + B_c + s)")],
        3.56,
    ),
    "strictly less": ("sizes", [("+ B_c * d <= M", "+ B_c * d < M")], 3.56),
    "the quarters always fit": ("sizes", [("B_r * (2 * d + B_c + s) + B_c * d <= M", "True")], 3.56),
    "no minimum": ("sizes", [("B_c = min(B_r, d)\n    return", "B_c = B_r\n    return")], 3.56),
    "tiles hold no output": ("compare", [("(2 * d + 1)", "(d + 1)")], 3),
    "rows rounded up": (
        "compare",
        [("math.ceil(T / ((fast - d) // (d + 1)))", "T // ((fast - d) // (d + 1))")],
        3,
    ),
    "the square of d": ("compare", [("d**2 / 2 + d", "d**2")], 3),
    "tiles over strips": ("compare", [("T / (2 * d)", "2 * d / T")], 3),
    "not zeroed": ("product", [("            c[:] = 0.0\n", "")], 0),
    "overwritten": ("product", [("c += x @ y", "c[:] = x @ y")], 0),
    "stored at every step": (
        "product",
        [("memory.free(x, y)", "memory.store(c)\n                memory.free(x, y)")],
        0,
    ),
    "not stored": ("product", [("            memory.store(c)\n", "")], 0),
    "the factors stay": ("product", [("                memory.free(x, y)\n", "")], 0),
    "A stays for a block row": (
        "product",
        [
            (
                "        for J in ranges(n, b_n):\n",
                '        row = memory.load("A", I)\n        for J in ranges(n, b_n):\n',
            ),
            ('x = memory.load("A", I, K)', "x = row[:, K]"),
            ("memory.free(x, y)", "memory.free(y)"),
        ],
        0,
    ),
    "a copy on the side": (
        "product",
        [('x = memory.load("A", I, K)', 'x = memory.load("A", I, K)\n                z = x[:].copy()')],
        0,
    ),
    "K and V held together": (
        "attend",
        [
            (
                (
                    '            memory.free(k)\n            v = memory.load("V", J)\n'
                    "            o += s @ v\n            memory.free(v, s)"
                ),
                (
                    '            v = memory.load("V", J)\n            o += s @ v\n'
                    "            memory.free(k, v, s)"
                ),
            )
        ],
        0,
    ),
    "the launcher written anew": (
        "attend",
        [("def attend(", "def run_product(A, B, *_):\n    return A @ B, [], 0\n\n\ndef attend(")],
        0,
    ),
    "the counting changed from inside": (
        "product",
        [
            (
                "    for I in ranges(m, b_m):\n",
                "    global moved_words\n    moved_words = print\n    for I in ranges(m, b_m):\n",
            )
        ],
        0,
    ),
    "no scale": ("attend", [("scale * (q @ k.T)", "q @ k.T")], 0),
    "the last keys left out": ("attend", [("ranges(T_k, B_c)", "ranges(T_k // B_c * B_c, B_c)")], 1.6),
    "keys as many as queries": ("attend", [("ranges(T_k, B_c)", "ranges(T_q, B_c)")], 0.8),
    "O starts anew": ("attend", [("o += s @ v", "o[:] = s @ v")], 0),
    "a strip of scores": (
        "attend",
        [
            (
                (
                    '        for J in ranges(T_k, B_c):\n            k = memory.load("K", J)\n'
                    '            s = memory.allocate("S", I, J)\n'
                    "            s[:] = scale * (q @ k.T)\n            memory.free(k)\n"
                ),
                (
                    '        s = memory.allocate("S", I, slice(0, T_k))\n'
                    '        for J in ranges(T_k, B_c):\n            k = memory.load("K", J)\n'
                    "            s[:, J] = scale * (q @ k.T)\n            memory.free(k)\n"
                    "        for J in ranges(T_k, B_c):\n"
                ),
            ),
            ("o += s @ v\n            memory.free(v, s)", "o += s[:, J] @ v\n            memory.free(v)"),
            ("memory.free(o, q)", "memory.free(o, q, s)"),
        ],
        0,
    ),
    "Q loaded for every block": (
        "attend",
        [
            (
                "            memory.free(k)\n",
                '            memory.free(k, q)\n            q = memory.load("Q", I)\n',
            )
        ],
        0,
    ),
    "the end of the sum not masked": (
        "kernel",
        [
            (
                "a_inside = (i < m)[:, None] & (x < k)[None, :]",
                "a_inside = (i < m)[:, None] & (x >= 0)[None, :]",
            ),
            (
                "b_inside = (x < k)[:, None] & (j < n)[None, :]",
                "b_inside = (x >= 0)[:, None] & (j < n)[None, :]",
            ),
        ],
        2.25,
    ),
    "the end of the rows not masked": (
        "kernel",
        [("a_inside = (i < m)[:, None]", "a_inside = (i >= 0)[:, None]")],
        2.25,
    ),
    "stored without a mask": (
        "kernel",
        [
            (
                "c_inside = (i < m)[:, None] & (j < n)[None, :]",
                "c_inside = (i >= 0)[:, None] & (j >= 0)[None, :]",
            )
        ],
        1.5,
    ),
    "the last block of the sum dropped": (
        "kernel",
        [("range(0, k, BLOCK_K)", "range(0, k // BLOCK_K * BLOCK_K, BLOCK_K)")],
        2.25,
    ),
    "the first block only": ("kernel", [("range(0, k, BLOCK_K)", "range(0, BLOCK_K, BLOCK_K)")], 0.75),
    "missing numbers count": (
        "kernel",
        [
            ("a_column, mask=a_inside, other=0.0", "a_column, mask=a_inside, other=1.0"),
            ("b_column, mask=b_inside, other=0.0", "b_column, mask=b_inside, other=1.0"),
        ],
        2.25,
    ),
    "a sum in float16": (
        "kernel",
        [
            (
                'acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")',
                "acc = (acc + tl.dot(a_tile, b_tile)).to(tl.float16).to(tl.float32)",
            )
        ],
        0,
    ),
    "a block without its sum": (
        "kernel",
        [
            (
                'acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")',
                'acc = tl.dot(a_tile, b_tile, input_precision="ieee")',
            )
        ],
        0.75,
    ),
    "columns next to each other": (
        "kernel",
        [("a + i[:, None] * a_row + x[None, :] * a_column", "a + i[:, None] * a_row + x[None, :]")],
        5.25,
    ),
    "c with the strides of b": (
        "kernel",
        [
            (
                "c + i[:, None] * c_row + j[None, :] * c_column",
                "c + i[:, None] * b_row + j[None, :] * b_column",
            )
        ],
        5.25,
    ),
    "block row and column exchanged": (
        "kernel",
        [("i = tl.program_id(0)", "i = tl.program_id(1)"), ("j = tl.program_id(1)", "j = tl.program_id(0)")],
        3,
    ),
    "PyTorch in the kernel": (
        "kernel",
        [("acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)", "acc = torch.zeros(BLOCK_M, BLOCK_N)")],
        0,
    ),
}
