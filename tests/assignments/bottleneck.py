"""Wrong answers to *bottleneck*."""

WRONG = {
    "S and P in pieces": ("words", [("square_words = 4 * T**2", "square_words = 6 * T**2")], 0),
    "rounded down": ("words", [("math.ceil(T / B_r)", "T // B_r")], 1),
    "Q, K, V, O once": ("words", [("2 * T * d * (1 + math.ceil(T / B_r))", "4 * T * d")], 1),
    "multiplications only": ("times", [("4 * T**2 * d", "2 * T**2 * d")], 2),
    "words for bytes": ("times", [("4 * T**2 * 2 /", "4 * T**2 /")], 2),
    "a binary gigabyte": ("times", [("(W * 1e9)", "(W * 2**30)")], 2),
    "the limit itself": ("times", [("math.ceil(2000 * F / W) - 1", "math.ceil(2000 * F / W)")], 2),
    "inner without the stores": ("intensity", [("(2 * n**3 + n**2)", "(2 * n**3)")], 3),
    "outer without the stores": ("intensity", [("(2 * n**2 + n**2)", "(2 * n**2)")], 3),
    "a tile loads itself": ("intensity", [("2 * n**3 / b + n**2", "2 * n**3 / b + 2 * n**2")], 3),
    "a tile of each": ("intensity", [("b**2 + 2 * b", "3 * b**2")], 3),
    "the larger one": ("attainable", [("min(", "max(")], 0),
    "bytes over operations": ("attainable", [("flops / moved_bytes", "moved_bytes / flops")], 0),
    "D from dO alone": ("joined", [("row_sum(do * o)", "row_sum(do * do)")], 0),
    "no D": ("joined", [("do @ v.T - delta", "do @ v.T")], 0),
    "V stays": ("joined", [("memory.free(ds, v)", "memory.free(ds)")], 0),
    "dS not stored": ("joined", [("memory.store(ds)", "pass")], 0),
    "dS stored twice": (
        "joined",
        [("memory.store(ds)", "memory.store(ds)\n            memory.store(ds)")],
        0,
    ),
    "dO held to the end": ("joined", [("memory.free(do, delta)", "memory.free(delta)")], 0),
    "O held too long": ("joined", [("        memory.free(o)\n", "")], 0),
    "dP in a place of its own": (
        "joined",
        [
            (
                "p[:] = p * (do @ v.T - delta)",
                (
                    'dp = memory.allocate("dP", I, J)\n            dp[:] = do @ v.T\n'
                    "            p[:] = p * (dp - delta)\n            memory.free(dp)"
                ),
            )
        ],
        0,
    ),
    "dO loaded for every block": (
        "joined",
        [
            (
                '            v = memory.load("V", J)\n',
                (
                    '            memory.free(do)\n            do = memory.load("dO", I)\n'
                    '            v = memory.load("V", J)\n'
                ),
            )
        ],
        0,
    ),
    "counts set by hand": (
        "joined",
        [("memory.free(do, delta)", "memory.free(do, delta)\n    memory.loaded = {}")],
        0,
    ),
    "another memory": (
        "joined",
        [("for I in ranges(T, B_r)", "memory = TwoLevelMemory(10**6)\n    for I in ranges(T, B_r)")],
        0,
    ),
    "no mask for the rows": (
        "kernel",
        [("(i < T)[:, None] & (j < d)[None, :]", "(i >= 0)[:, None] & (j < d)[None, :]")],
        1.14,
    ),
    "no mask for the columns": (
        "kernel",
        [("(i < T)[:, None] & (j < d)[None, :]", "(i < T)[:, None] & (j >= 0)[None, :]")],
        1.14,
    ),
    "all rows stored": ("kernel", [("mask=i < T)", "mask=i >= 0)")], 1.14),
    "y with the strides of x": (
        "kernel",
        [("i[:, None] * y_row + j[None, :] * y_column", "i[:, None] * x_row + j[None, :] * x_column")],
        3.43,
    ),
    "the column stride is 1": ("kernel", [("* y_column", "")], 3.43),
    "what is missing counts as one": (
        "kernel",
        [
            (
                "x_row + j[None, :] * x_column, mask=inside, other=0.0",
                "x_row + j[None, :] * x_column, mask=inside, other=1.0",
            ),
            (
                "y_row + j[None, :] * y_column, mask=inside, other=0.0",
                "y_row + j[None, :] * y_column, mask=inside, other=1.0",
            ),
        ],
        1.14,
    ),
    "a sum in float16": (
        "kernel",
        [("x_tile.to(tl.float32) * y_tile.to(tl.float32)", "x_tile * y_tile")],
        3.43,
    ),
    "the other axis": ("kernel", [("tl.sum(products, 1)", "tl.sum(products, 0)")], 0),
    "program 0 only": ("kernel", [("tl.program_id(0) * BLOCK", "0 * BLOCK")], 0.57),
}
