"""Wrong answers to *machine*."""

TWO_SUMS = '''
inner = """
LOAD a[0][0], R0
LOAD b[0][0], R1
MAC_Z R0, R1, R5
LOAD b[0][1], R4
MAC_Z R0, R4, R0
LOAD a[0][1], R2
LOAD b[1][0], R3
MAC R2, R3, R5, R5
STORE R5, c[0][0]
LOAD b[1][1], R5
MAC R2, R5, R0, R0
STORE R0, c[0][1]
LOAD a[1][0], R2
MAC_Z R2, R4, R0
LOAD a[1][1], R4
MAC R4, R5, R0, R0
STORE R0, c[1][1]
MAC_Z R2, R1, R0
MAC R4, R3, R0, R0
STORE R0, c[1][0]
"""
fixed_cycles = 25
'''

SUM_OF_SQUARES = '''
step = """
MUL R2, R2, R0
MUL R1, R0, R0
ADD R3, R0, R3
LOAD x, R0
MUL R0, R0, R4
ADD R3, R4, R3
MUL R1, R2, R2
ADD R2, R0, R2
LOAD one, R4
ADD R1, R4, R1
DIV R2, R1, R2
MUL R2, R2, R4
MUL R1, R4, R4
SUB R3, R4, R3
"""
'''

SAFE_AGAIN = """
def online_softmax(n):
    lines = ["LOAD x[0], R1"]
    for i in range(1, n):
        lines += [f"LOAD x[{i}], R0", "MAX R0, R1, R1"]
    for i in range(n):
        lines += [f"LOAD x[{i}], R0", "SUB R0, R1, R0", "EXP R0, R0"]
        lines += ["ADD R2, R0, R2" if i > 0 else "MOV R0, R2"]
    for i in range(n):
        lines += [f"LOAD x[{i}], R0", "SUB R0, R1, R0", "EXP R0, R0", "DIV R0, R2, R0"]
        lines += [f"STORE R0, out[{i}]"]
    return "\\n".join(lines)
"""

WRONG = {
    "four separate elements": (
        "product",
        [
            ("LOAD b[1][1], R1        # a", "LOAD a[0][1], R0\nLOAD b[1][1], R1  # a"),
            ("LOAD a[1][0], R0        # b", "LOAD b[0][1], R1\nLOAD a[1][0], R0  # b"),
            ("LOAD b[1][0], R1        # a", "LOAD a[1][1], R0\nLOAD b[1][0], R1  # a"),
        ],
        2,
    ),
    "one load too many": (
        "product",
        [("LOAD b[1][1], R1        # a", "LOAD a[0][1], R0\nLOAD b[1][1], R1  # a")],
        3,
    ),
    "two terms of three": ("product", [("MAC R0, R1, R2, R2\nSTORE R2, c[{row}]", "STORE R2, c[{row}]")], 3),
    "an element that is never stored": ("product", [("STORE R2, c[1][1]", "STORE R2, d[1][1]")], 1),
    "a program that is not text": ("product", "element, product = ['LOAD a[0][0], R0'], 3", 0),
    "a line that is no instruction": ("product", [("STORE R2, c[0][0]", "STORE c[0][0], R2")], 1),
    "a fourth register": ("product", [("STORE R2, c[1][1]", "ADD R2, R2, R3\nSTORE R2, c[1][1]")], 1),
    "no snake": ("outer", [("range(n) if i % 2 == 0 else reversed(range(n))", "range(n)")], 2),
    "no start from zero": ("outer", [("'MAC' if k > 0 else 'MAC_Z'", "'MAC'")], 0),
    "sums share a register": ("outer", [("2 + n * i + j\n", "2 + i + j\n")], 0),
    "two rows only": ("outer", [("total = 2 + n * i + j", "total = 2 + 2 * i + j")], 2),
    "the transposed product": ("outer", [("c[{i}][{j}]", "c[{j}][{i}]")], 0),
    "no text": ("outer", [('"\\n".join(lines)', "lines")], 0),
    "two sums at a time": ("six", TWO_SUMS, 3),
    "ports that are thought to be free": ("six", [("fixed_cycles = 25", "fixed_cycles = 20")], 3),
    "an input that is loaded again": ("six", [("MAC_Z R0, R4, R5", "LOAD a[0][0], R0\nMAC_Z R0, R4, R5")], 3),
    "elements in each other's place": ("six", [("STORE R5, c[1][1]", "STORE R5, c[1][2]")], 1),
    "every product as two operations": ("intensity", [("2 * n**3 - n**2\n", "2 * n**3\n")], 0),
    "stores left out": ("intensity", [("- (n**2 - 1) + n**2)", "- (n**2 - 1))")], 2),
    "no shared factor": ("intensity", [("- (n**2 - 1) + n**2)", "+ n**2)")], 2),
    "exponentials without the maximum": (
        "safe",
        [
            ('"SUB R0, R1, R0", "EXP R0, R0"]', '"EXP R0, R0"]'),
            ('"SUB R0, R1, R0", "EXP R0, R0", "DIV', '"EXP R0, R0", "DIV'),
        ],
        3,
    ),
    "at least two numbers": (
        "safe",
        [
            ('["LOAD x[0], R1"]', '["LOAD x[0], R1", "LOAD x[1], R0", "MAX R0, R1, R1"]'),
            ("range(1, n)", "range(2, n)"),
        ],
        3,
    ),
    "a register too many": (
        "safe",
        [
            ('"MOV R0, R2"', '"MOV R0, R3"'),
            ('"ADD R2, R0, R2"', '"ADD R3, R0, R3"'),
            ("R0, R2, R0", "R0, R3, R0"),
        ],
        0,
    ),
    "exponentials kept in memory": ("safe", [('"EXP R0, R0"]', '"EXP R0, R0", f"STORE R0, e[{i}]"]')], 0),
    "an instruction for nothing": ("safe", [('"MAX R0, R1, R1"]', '"MAX R0, R1, R1", "MOV R1, R1"]')], 3),
    "three passes": ("online", SAFE_AGAIN, 0),
    "the old maximum is not saved": ("online", [('"MOV R1, R3"', '"MAX R1, R0, R3"')], 1),
    "the correction the wrong way round": ("online", [('"SUB R3, R1, R3"', '"SUB R1, R3, R3"')], 1),
    "a correction of ten instructions": ("online", [('"EXP R3, R3",', '"MOV R3, R3", "EXP R3, R3",')], 4),
    "both deviations from the old mean": ("variance", [("SUB R0, R4, R4 ", "MOV R0, R4 ")], 0),
    "the count stands still": (
        "variance",
        [("ADD R1, R4, R1", "ADD R1, R4, R4"), ("R0, R1, R4", "R0, R4, R4")],
        0,
    ),
    "sums of squares": ("variance", SUM_OF_SQUARES, 3),
    "x is loaded twice": ("variance", [("SUB R0, R4, R4 ", "LOAD x, R0\nSUB R0, R2, R4 ")], 0),
}
