"""Wrong answers to *flash2*."""

WRONG = {
    "the old sums as they were": (
        "state",
        [("factor, weight = math.exp(m - m_new)", "factor, weight = 1.0")],
        0.5,
    ),
    "no maximum, by hand": ("state", [("m_new = max(m, x)", "m_new = m")], 1),
    "only the denominator rescaled": (
        "state",
        [("factor * n0 + ", "n0 + "), ("factor * n1 + ", "n1 + ")],
        1.5,
    ),
    "weights without the maximum": ("state", [("math.exp(x - m_new)", "math.exp(x)")], 0.5),
    "L without the maximum": ("state", [("m_new + math.log(l_new)", "math.log(l_new)")], 2.5),
    "the numerator for the output": ("state", [("n1_new / l_new", "n1_new")], 2.5),
    "the first round loads": ("traffic", [("(2 * blocks - 1)", "2 * blocks")], 1.5),
    "two statistics": ("traffic", [("2 * blocks * T * d + T", "2 * blocks * T * d + 2 * T")], 1.5),
    "K and V once": ("traffic", [("2 * T * d + 2 * blocks * T * d + T", "4 * T * d + T")], 1.5),
    "one program a head": ("traffic", [("heads * blocks", "heads")], 1.5),
    "rounded down": ("traffic", [("math.ceil(T / B)", "T // B")], 0.5),
    "top left": (
        "band",
        [("start <= last + T_k - T_q", "start <= last"), ("end > row + T_k - T_q", "end > row")],
        0,
    ),
    "the first query decides": ("band", [("start <= last + T_k - T_q", "start <= row + T_k - T_q")], 0),
    "one block needs masking": (
        "band",
        [("masked += end > row + T_k - T_q", "masked = math.ceil(T_q / B_r)")],
        1.5,
    ),
    "every block masked": ("band", [("masked += end > row + T_k - T_q", "masked += 1")], 1.5),
    "no maximum, in PyTorch": (
        "tiled",
        [("m_new = torch.maximum(m, s.amax(dim=1))", "m_new = 0.0 * m.nan_to_num()")],
        3.33,
    ),
    "only l rescaled, in PyTorch": ("tiled", [("acc = alpha[:, None] * acc + p", "acc = acc + p")], 0),
    "only O rescaled, in PyTorch": ("tiled", [("l = alpha * l + p", "l = l + p")], 0),
    "no rescaling, in PyTorch": (
        "tiled",
        [("alpha = torch.exp(m - shift)", "alpha = torch.ones_like(m)")],
        0,
    ),
    "divided at every step": (
        "tiled",
        [
            (
                "            m = m_new\n",
                "            m = m_new\n            acc = acc / l.clamp(min=1e-30)[:, None]\n",
            )
        ],
        0,
    ),
    "last keys dropped, in PyTorch": (
        "tiled",
        [("range(0, T_k, B_c)", "range(0, T_k // B_c * B_c, B_c)")],
        0.83,
    ),
    "mask off by one, in PyTorch": (
        "tiled",
        [("j[None, :] > i[:, None] + T_k - T_q", "j[None, :] >= i[:, None] + T_k - T_q")],
        2.5,
    ),
    "mask aligned to the top left, in PyTorch": (
        "tiled",
        [("j[None, :] > i[:, None] + T_k - T_q", "j[None, :] > i[:, None]")],
        3.33,
    ),
    "blind row is NaN, in PyTorch": ("tiled", [("torch.where(l == 0.0, 1.0, l)", "l")], 4.17),
    "-inf minus -inf, in PyTorch": (
        "tiled",
        [("shift = torch.where(m_new == -math.inf, 0.0, m_new)", "shift = m_new")],
        4.17,
    ),
    "blind row is the mean of V, in PyTorch": (
        "tiled",
        [
            (
                "(j[None, :] > i[:, None] + T_k - T_q, -math.inf)",
                "(j[None, :] > i[:, None] + T_k - T_q, -1e30)",
            )
        ],
        4.17,
    ),
    "the whole matrix": (
        "tiled",
        [("    T_q, T_k = len(q), len(k)\n", "    T_q, T_k = len(q), len(k)\n    whole = scale * q @ k.T\n")],
        0,
    ),
    "whole rows": (
        "tiled",
        [
            (
                "        l = q.new_zeros(len(i))\n",
                (
                    "        l = q.new_zeros(len(i))\n"
                    "        strip = torch.cat([scale * q[queries] @ k.T] * 2)\n"
                ),
            )
        ],
        0,
    ),
    "lse without the maximum, in PyTorch": ("tiled", [("m + torch.log(l_safe)", "torch.log(l_safe)")], 0),
    "PyTorch's attention": (
        "tiled",
        [
            (
                "    T_q, T_k = len(q), len(k)\n",
                (
                    "    return torch.nn.functional.scaled_dot_product_attention(q[None], "
                    "k[None], v[None], scale=scale)[0], q[:, 0]\n    T_q, T_k = len(q), len(k)\n"
                ),
            )
        ],
        0,
    ),
    "softmax": ("tiled", [("p = torch.exp(s - shift[:, None])", "p = torch.softmax(s, dim=1)")], 0),
    "softmax by a pattern": (
        "tiled",
        [
            (
                "p = torch.exp(s - shift[:, None])",
                "match s:\n                case object(softmax=f):\n                    p = f(1)",
            )
        ],
        0,
    ),
    "the counter changed": (
        "tiled",
        [("    T_q, T_k = len(q), len(k)\n", "    Largest.numbers = 0\n    T_q, T_k = len(q), len(k)\n")],
        0,
    ),
    "softmax behind another name": (
        "tiled",
        [
            (
                "p = torch.exp(s - shift[:, None])",
                ("torch.nn.functional.cross_entropy(s, s)\n            p = torch.exp(s - shift[:, None])"),
            )
        ],
        0,
    ),
    "no rescaling": ("kernel", [("alpha = tl.exp(m - shift)", "alpha = tl.exp(shift - shift)")], 0),
    "only l rescaled": ("kernel", [("acc * alpha[:, None], input", "acc, input")], 0),
    "only O rescaled": ("kernel", [("l = l * alpha + tl.sum(p, 1)", "l = l + tl.sum(p, 1)")], 0),
    "no maximum": ("kernel", [("m_new = tl.maximum(m, tl.max(s, 1))", "m_new = tl.max(s, 1) * 0.0")], 5.73),
    "maximum of the block": (
        "kernel",
        [("m_new = tl.maximum(m, tl.max(s, 1))", "m_new = tl.max(s, 1)")],
        5.73,
    ),
    "last keys dropped": (
        "kernel",
        [
            (
                "full, end = T_k // BLOCK_K * BLOCK_K, T_k\n",
                "full, end = T_k // BLOCK_K * BLOCK_K, T_k // BLOCK_K * BLOCK_K\n",
            )
        ],
        1.64,
    ),
    "padding seen": ("kernel", [("seen = (j < T_k)[None, :]", "seen = (j >= 0)[None, :]")], 5.73),
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
    "diagonal block without a mask": (
        "kernel",
        [("tl.maximum(row + 1 + T_k - T_q, 0)", "tl.maximum(row + BLOCK_Q + T_k - T_q, 0)")],
        6.55,
    ),
    "diagonal block skipped": (
        "kernel",
        [("tl.maximum(row + BLOCK_Q + T_k - T_q, 0)", "tl.maximum(row + T_k - T_q, 0)")],
        4.91,
    ),
    "every block read": (
        "kernel",
        [("        end = tl.minimum(end, tl.maximum(row + BLOCK_Q + T_k - T_q, 0))\n", "")],
        8.18,
    ),
    "causal is not asked for": (
        "kernel",
        [("        if CAUSAL:\n            seen", "        if True:\n            seen")],
        4.91,
    ),
    "blind row is NaN": ("kernel", [("l_safe = tl.where(l == 0.0, 1.0, l)", "l_safe = l")], 8.18),
    "blind row is the mean of V": (
        "kernel",
        [('tl.where(seen, s, -float("inf"))', "tl.where(seen, s, -1.0e30)")],
        8.18,
    ),
    "-inf minus -inf": (
        "kernel",
        [('shift = tl.where(m_new == -float("inf"), 0.0, m_new)', "shift = m_new")],
        8.18,
    ),
    "K read with the strides of V": (
        "kernel",
        [("load_tile(k, k_strides,", "load_tile(k, v_strides,")],
        7.36,
    ),
    "Q read with the strides of K": (
        "kernel",
        [("load_tile(q, q_strides,", "load_tile(q, k_strides,")],
        8.18,
    ),
    "O stored with the strides of Q": (
        "kernel",
        [("store_tile(o, o_strides,", "store_tile(o, q_strides,")],
        7.36,
    ),
    "V as wide as K": (
        "kernel",
        [
            (
                "load_tile(v, v_strides, head, start, T_k, d_v, BLOCK_K",
                "load_tile(v, v_strides, head, start, T_k, d, BLOCK_K",
            )
        ],
        8.18,
    ),
    "natural exponent in base 2": (
        "kernel",
        [
            ("tl.exp(s - shift[:, None])", "tl.exp2(s - shift[:, None])"),
            ("tl.exp(m - shift)", "tl.exp2(m - shift)"),
        ],
        0,
    ),
    "lse in base 2": ("kernel", [("m + tl.log(l_safe)", "1.4426950408889634 * (m + tl.log(l_safe))")], 0),
    "lse without the maximum": ("kernel", [("m + tl.log(l_safe)", "tl.log(l_safe)")], 0),
    "last row not written": (
        "kernel",
        [("tl.log(l_safe), mask=i < T_q)", "tl.log(l_safe), mask=i + 1 < T_q)")],
        0.82,
    ),
    "lse stored without a mask": ("kernel", [("tl.log(l_safe), mask=i < T_q)", "tl.log(l_safe))")], 2.45),
    "heads interleaved": (
        "kernel",
        [
            (
                "    for start in range(0, full, BLOCK_K):\n",
                (
                    "    kv = head % (tl.num_programs(1) // GROUP)\n"
                    "    for start in range(0, full, BLOCK_K):\n"
                ),
            ),
            (
                (
                    "v, v_strides, head // GROUP, i, start, scale, T_q, T_k, d, d_v,\n"
                    "            CAUSAL, False,"
                ),
                "v, v_strides, kv, i, start, scale, T_q, T_k, d, d_v,\n            CAUSAL, False,",
            ),
            (
                (
                    "v, v_strides, head // GROUP, i, start, scale, T_q, T_k, d, d_v,\n"
                    "            CAUSAL, True,"
                ),
                "v, v_strides, kv, i, start, scale, T_q, T_k, d, d_v,\n            CAUSAL, True,",
            ),
        ],
        8.18,
    ),
    "not divided": ("kernel", [("acc / l_safe[:, None]", "acc")], 0),
    "no scale": ("kernel", [("s = scale * tl.dot(", "s = tl.dot(")], 0),
    "the first block of queries only": ("kernel", [("tl.program_id(0) * BLOCK_Q", "0 * BLOCK_Q")], 0),
    "rounded to half": (
        "kernel",
        [
            (
                'scale * tl.dot(q_tile, k_tile.T, input_precision="ieee")',
                "scale * tl.dot(q_tile.to(tl.float16), k_tile.T.to(tl.float16))",
            )
        ],
        0,
    ),
    "PyTorch's attention in the kernel": (
        "kernel",
        [
            (
                "    row, head = tl",
                "    torch.nn.functional.scaled_dot_product_attention(q, k, v)\n    row, head = tl",
            )
        ],
        0,
    ),
}
