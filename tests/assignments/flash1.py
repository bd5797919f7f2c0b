"""Wrong answers to *flash1*."""

WRONG = {
    "the old sum as it was": ("visit", [("l * math.exp(m - m_new)", "l")], 0.75),
    "the factor without the sum": (
        "visit",
        [("a = l * math.exp(m - m_new)", "a = math.exp(m - m_new)")],
        0.75,
    ),
    "the old maximum kept": ("visit", [("m_new = max(m, s0, s1)", "m_new = m")], 0.75),
    "not divided": ("visit", [("(a * o + p0 * v0 + p1 * v1) / l_new", "a * o + p0 * v0 + p1 * v1")], 2.25),
    "the old output as a sum": ("visit", [("(a * o +", "(a / l * o +")], 2.25),
    "one statistic": (
        "words",
        [("B_r * (2 * d + 2)", "B_r * (2 * d + 1)"), ("B_r * (d + 2)", "B_r * (d + 1)")],
        2,
    ),
    "K and V in every visit": ("words", [("B_r * (2 * d + 2)", "B_r * (2 * d + 2) + 2 * B_c * d")], 3),
    "the first round loads too": ("words", [("(2 * T_c - 1) * T * (d + 2)", "2 * T_c * T * (d + 2)")], 2),
    "queries outside": (
        "words",
        [
            (
                "total = 2 * T * d + T_c * T * d + (2 * T_c - 1) * T * (d + 2)",
                "total = 2 * T * d * (1 + math.ceil(T / B_r)) + T",
            )
        ],
        2,
    ),
    "without the statistics": ("words", [("(2 * T_c - 1) * T * (d + 2)", "(2 * T_c - 1) * T * d")], 2),
    "no maximum, in PyTorch": (
        "update",
        [("shift = torch.where(m_new == -math.inf, 0.0, m_new)", "shift = torch.zeros_like(m_new)")],
        0,
    ),
    "-inf minus -inf, in PyTorch": (
        "update",
        [("shift = torch.where(m_new == -math.inf, 0.0, m_new)", "shift = m_new")],
        2.67,
    ),
    "blind row is NaN, in PyTorch": ("update", [("torch.where(l_new == 0.0, 1.0, l_new)", "l_new")], 2.67),
    "blind row is the mean of V, in PyTorch": (
        "update",
        [("masked_fill(~seen, -math.inf)", "masked_fill(~seen, -1e30)")],
        2.67,
    ),
    "O not multiplied back, in PyTorch": (
        "update",
        [("(a[:, None] * o + p @ v)", "(torch.exp(m - shift)[:, None] * o + p @ v)")],
        2.67,
    ),
    "no rescaling, in PyTorch": ("update", [("a = l * torch.exp(m - shift)", "a = l")], 1.33),
    "the mask forgotten": ("update", [(".masked_fill(~seen, -math.inf)", "")], 2.67),
    "PyTorch's attention": (
        "update",
        [
            (
                "    s = (scale * q @ k.T).masked_fill(~seen, -math.inf)\n",
                (
                    "    new = torch.nn.functional.scaled_dot_product_attention(q[None], "
                    "k[None], v[None], seen[None], scale=scale)\n"
                    "    s = (scale * q @ k.T).masked_fill(~seen, -math.inf)\n"
                ),
            )
        ],
        0,
    ),
    "softmax": ("update", [("p = torch.exp(s - shift[:, None])", "p = torch.softmax(s, dim=1)")], 0),
    "softmax by another name": (
        "update",
        [
            (
                "p = torch.exp(s - shift[:, None])",
                "torch.nn.functional.cross_entropy(s, s)\n    p = torch.exp(s - shift[:, None])",
            )
        ],
        0,
    ),
    "K and V again in every visit": (
        "schedule",
        [
            (
                '            q = memory.load("Q", I)\n',
                (
                    '            memory.free(k, v)\n            k = memory.load("K", J)\n'
                    '            v = memory.load("V", J)\n            q = memory.load("Q", I)\n'
                ),
            )
        ],
        0,
    ),
    "Q and O together": (
        "schedule",
        [("            memory.free(q)\n", ""), ("memory.free(o, s, factor)", "memory.free(o, s, factor, q)")],
        2,
    ),
    "O of no key stored beforehand": (
        "schedule",
        [
            (
                "    for J in ranges(T, B_c):\n        first = J.start == 0\n",
                (
                    '    for I in ranges(T, B_r):\n        o = state("O", I, True, 0.0)\n'
                    "        memory.store(o)\n        memory.free(o)\n    for J in ranges(T, B_c):\n"
                    "        first = J.start == 0\n"
                ),
            )
        ],
        0,
    ),
    "O not stored": ("schedule", [("            memory.store(o)\n", "")], 0),
    "l not stored, on the memory": ("schedule", [("            memory.store(l)\n", "")], 0),
    "no maximum, on the memory": (
        "schedule",
        [("factor[:] = np.maximum(m, row_max(s))", "factor[:] = 0.0 * m")],
        0,
    ),
    "the maximum of the block, on the memory": ("schedule", [("np.maximum(m, row_max(s))", "row_max(s)")], 0),
    "only l rescaled, on the memory": (
        "schedule",
        [("            factor /= l\n", "            factor[:] = 1.0\n")],
        0,
    ),
    "queries outside, on the memory": (
        "schedule",
        [
            (
                "    for J in ranges(T, B_c):\n        first = J.start == 0\n",
                "    for J in ranges(T, T):\n        first = J.start == 0\n",
            )
        ],
        0,
    ),
    "O not multiplied back": (
        "kernel",
        [("a[:, None] * o_tile", "tl.exp(m_old - shift)[:, None] * o_tile")],
        0,
    ),
    "O not divided": ("kernel", [("o_tile / l_safe[:, None]", "o_tile")], 0),
    "O starts anew": ("kernel", [("a[:, None] * o_tile + ", "")], 0),
    "only l rescaled": ("kernel", [("a[:, None] * o_tile", "l_old[:, None] * o_tile")], 0),
    "only O rescaled": ("kernel", [("l_new = a + tl.sum(p, 1)", "l_new = l_old + tl.sum(p, 1)")], 0),
    "no rescaling": ("kernel", [("l_old * tl.exp(m_old - shift)", "l_old")], 0),
    "l not stored": (
        "kernel",
        [("tl.store(l + head * T_q + i, l_new,", "tl.store(l + head * T_q + i, l_old,")],
        0,
    ),
    "m not stored": (
        "kernel",
        [("tl.store(m + head * T_q + i, m_new,", "tl.store(m + head * T_q + i, m_old,")],
        0,
    ),
    "no maximum": ("kernel", [("m_new = tl.maximum(m_old, tl.max(s, 1))", "m_new = tl.max(s, 1) * 0.0")], 4),
    "maximum of the block": ("kernel", [("tl.maximum(m_old, tl.max(s, 1))", "tl.max(s, 1)")], 4),
    "last keys dropped": (
        "kernel",
        [("range(0, T_k, BLOCK_K)", "range(0, T_k // BLOCK_K * BLOCK_K, BLOCK_K)")],
        0.8,
    ),
    "last queries dropped": (
        "kernel",
        [("range(0, T_q, BLOCK_Q)", "range(0, T_q // BLOCK_Q * BLOCK_Q, BLOCK_Q)")],
        0.8,
    ),
    "padding seen": ("kernel", [("seen = (j < T_k)[None, :]", "seen = (j >= 0)[None, :]")], 4.8),
    "mask off by one": (
        "kernel",
        [("j[None, :] <= i[:, None] + (T_k - T_q)", "j[None, :] < i[:, None] + (T_k - T_q)")],
        4.8,
    ),
    "mask aligned to the top left": (
        "kernel",
        [("j[None, :] <= i[:, None] + (T_k - T_q)", "j[None, :] <= i[:, None]")],
        5.6,
    ),
    "diagonal block without a mask": (
        "kernel",
        [("j[None, :] <= i[:, None] + (T_k - T_q)", "start <= row + BLOCK_Q - 1 + (T_k - T_q)")],
        4.8,
    ),
    "diagonal block skipped": (
        "kernel",
        [("j[None, :] <= i[:, None] + (T_k - T_q)", "start + BLOCK_K - 1 <= row + (T_k - T_q)")],
        4.8,
    ),
    "no mask": ("kernel", [("if CAUSAL:", "if False:")], 4.8),
    "blind row is NaN": ("kernel", [("l_safe = tl.where(l_new == 0.0, 1.0, l_new)", "l_safe = l_new")], 7.2),
    "blind row is the mean of V": (
        "kernel",
        [('tl.where(seen, s, -float("inf"))', "tl.where(seen, s, -1.0e30)")],
        7.2,
    ),
    "-inf minus -inf": (
        "kernel",
        [('shift = tl.where(m_new == -float("inf"), 0.0, m_new)', "shift = m_new")],
        7.2,
    ),
    "no scale": ("kernel", [("s = scale * tl.dot(", "s = tl.dot(")], 0),
    "natural exponent in base 2": (
        "kernel",
        [
            ("tl.exp(s - shift[:, None])", "tl.exp2(s - shift[:, None])"),
            ("tl.exp(m_old - shift)", "tl.exp2(m_old - shift)"),
        ],
        0,
    ),
    "m in base 2": (
        "kernel",
        [
            ("s = scale * tl.dot(", "s = 1.4426950408889634 * scale * tl.dot("),
            ("tl.exp(s - shift[:, None])", "tl.exp2(s - shift[:, None])"),
            ("tl.exp(m_old - shift)", "tl.exp2(m_old - shift)"),
        ],
        0,
    ),
    "the first head only": ("kernel", [("head = tl.program_id(0)", "head = tl.program_id(0) * 0")], 6.4),
    "statistics of the first head": (
        "kernel",
        [
            ("m_old = tl.load(m + head * T_q + i", "m_old = tl.load(m + i"),
            ("tl.store(m + head * T_q + i", "tl.store(m + i"),
            ("l_old = tl.load(l + head * T_q + i", "l_old = tl.load(l + i"),
            ("tl.store(l + head * T_q + i", "tl.store(l + i"),
        ],
        6.4,
    ),
    "O stored with the strides of Q": (
        "kernel",
        [("store_tile(o, o_strides,", "store_tile(o, q_strides,")],
        7.2,
    ),
    "Q read with the strides of K": ("kernel", [("load_tile(q, q_strides,", "load_tile(q, k_strides,")], 7.2),
    "last row not written": ("kernel", [("l_new, mask=i < T_q)", "l_new, mask=i + 1 < T_q)")], 0),
    "statistics stored without a mask": ("kernel", [("m_new, mask=i < T_q)", "m_new)")], 0.8),
    "PyTorch's attention in the kernel": (
        "kernel",
        [
            (
                "    head = tl.program_id(0)\n",
                (
                    "    head = tl.program_id(0)\n"
                    "    torch.nn.functional.scaled_dot_product_attention(q, k, v)\n"
                ),
            )
        ],
        0,
    ),
}
