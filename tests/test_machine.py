"""The register machine: its programs against the page that it comes from and against other arithmetic, its
refusals, and the proved minima against a search that shares nothing with the library's.
"""

import heapq
import itertools
import json
import math
from dataclasses import fields
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from cases import run_python
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlib.machine import Machine, assemble, cells, disassemble, programs
from flashlib.machine.isa import ADD, INSTRUCTIONS, LOAD, MAC, MAC_Z, MAX, MOV, STORE, SUB
from flashlib.machine.search import min_cycles

steady = settings(derandomize=True, deadline=None, max_examples=100)


def test_it_needs_the_standard_library_only():
    code = (
        "import sys, flashlib.machine.search; "
        "print(sorted({'torch', 'numpy', 'triton', 'matplotlib'} & set(sys.modules)))"
    )
    assert run_python(code).stdout.strip() == "[]"


# ------------------------------------------------------------------------------- the page's tables
#
# The traces of the toy-machine page, cell for cell; "" is empty. The page leaves a few cells blank that hold
# a value; they are filled in here: R2 in steps 4 and 5 and R5 in step 8 of the outer product, r2 in the
# second SUB and EXP of pass 2.

MATRIX_NAMES = {f"{m}[{i}][{j}]": f"{m}{i}{j}" for m in "ab" for i in (0, 1) for j in (0, 1)} | {
    f"a{i}0*b0{j} + a{i}1*b1{j}": f"c{i}{j}" for i in (0, 1) for j in (0, 1)
}

C00 = """
LOAD a[0][0], R0   | a00 |     |
LOAD b[0][0], R1   | a00 | b00 |
MAC_Z R0, R1, R2   | a00 | b00 | a00*b00
LOAD a[0][1], R0   | a01 | b00 | a00*b00
LOAD b[1][0], R1   | a01 | b10 | a00*b00
MAC R0, R1, R2, R2 | a01 | b10 | c00
STORE R2, c[0][0]  | a01 | b10 | c00
"""

OUTER = """
LOAD a[0][0], R0   | a00 |     |         |         |         |
LOAD b[0][0], R1   | a00 | b00 |         |         |         |
MAC_Z R0, R1, R2   | a00 | b00 | a00*b00 |         |         |
LOAD b[0][1], R1   | a00 | b01 | a00*b00 |         |         |
MAC_Z R0, R1, R3   | a00 | b01 | a00*b00 | a00*b01 |         |
LOAD a[1][0], R0   | a10 | b01 | a00*b00 | a00*b01 |         |
MAC_Z R0, R1, R5   | a10 | b01 | a00*b00 | a00*b01 |         | a10*b01
LOAD b[0][0], R1   | a10 | b00 | a00*b00 | a00*b01 |         | a10*b01
MAC_Z R0, R1, R4   | a10 | b00 | a00*b00 | a00*b01 | a10*b00 | a10*b01
LOAD a[0][1], R0   | a01 | b00 | a00*b00 | a00*b01 | a10*b00 | a10*b01
LOAD b[1][0], R1   | a01 | b10 | a00*b00 | a00*b01 | a10*b00 | a10*b01
MAC R0, R1, R2, R2 | a01 | b10 | c00     | a00*b01 | a10*b00 | a10*b01
LOAD b[1][1], R1   | a01 | b11 | c00     | a00*b01 | a10*b00 | a10*b01
MAC R0, R1, R3, R3 | a01 | b11 | c00     | c01     | a10*b00 | a10*b01
LOAD a[1][1], R0   | a11 | b11 | c00     | c01     | a10*b00 | a10*b01
MAC R0, R1, R5, R5 | a11 | b11 | c00     | c01     | a10*b00 | c11
LOAD b[1][0], R1   | a11 | b10 | c00     | c01     | a10*b00 | c11
MAC R0, R1, R4, R4 | a11 | b10 | c00     | c01     | c10     | c11
STORE R2, c[0][0]  | a11 | b10 | c00     | c01     | c10     | c11
STORE R3, c[0][1]  | a11 | b10 | c00     | c01     | c10     | c11
STORE R4, c[1][0]  | a11 | b10 | c00     | c01     | c10     | c11
STORE R5, c[1][1]  | a11 | b10 | c00     | c01     | c10     | c11
"""

# The page's three passes, for n = 3.
SAFE = """
LOAD x[0], R1    |             | x0          |
LOAD x[1], R0    | x1          | x0          |
MAX R0, R1, R1   | x1          | max(x1, x0) |
LOAD x[2], R0    | x2          | max(x1, x0) |
MAX R0, R1, R1   | x2          | m           |
LOAD x[0], R0    | x0          | m           |
SUB R0, R1, R0   | x0 - m      | m           |
EXP R0, R0       | e0          | m           |
MOV R0, R2       | e0          | m           | e0
LOAD x[1], R0    | x1          | m           | e0
SUB R0, R1, R0   | x1 - m      | m           | e0
EXP R0, R0       | e1          | m           | e0
ADD R2, R0, R2   | e1          | m           | e0 + e1
LOAD x[2], R0    | x2          | m           | e0 + e1
SUB R0, R1, R0   | x2 - m      | m           | e0 + e1
EXP R0, R0       | e2          | m           | e0 + e1
ADD R2, R0, R2   | e2          | m           | S
LOAD x[0], R0    | x0          | m           | S
SUB R0, R1, R0   | x0 - m      | m           | S
EXP R0, R0       | e0          | m           | S
DIV R0, R2, R0   | e0/S        | m           | S
STORE R0, out[0] | e0/S        | m           | S
LOAD x[1], R0    | x1          | m           | S
SUB R0, R1, R0   | x1 - m      | m           | S
EXP R0, R0       | e1          | m           | S
DIV R0, R2, R0   | e1/S        | m           | S
STORE R0, out[1] | e1/S        | m           | S
LOAD x[2], R0    | x2          | m           | S
SUB R0, R1, R0   | x2 - m      | m           | S
EXP R0, R0       | e2          | m           | S
DIV R0, R2, R0   | e2/S        | m           | S
STORE R0, out[2] | e2/S        | m           | S
"""
SAFE_NAMES = {f"x[{i}]": f"x{i}" for i in range(3)} | {f"exp(x{i} - m)": f"e{i}" for i in range(3)}
SAFE_NAMES |= {"max(x2, max(x1, x0))": "m", "e0 + e1 + e2": "S"}

FIRST = """
LOAD x[0], R0  | x0     |    |   |
MOV R0, R1     | x0     | x0 |   |
SUB R0, R1, R0 | 0      | x0 |   |
EXP R0, R0     | 1      | x0 |   |
MOV R0, R2     | 1      | x0 | 1 |
"""

STEP = """
LOAD x[1], R0  | x         | m  | s            |
MOV R1, R3     | x         | m  | s            | m
MAX R1, R0, R1 | x         | m' | s            | m
SUB R3, R1, R3 | x         | m' | s            | m - m'
SUB R0, R1, R0 | x - m'    | m' | s            | m - m'
EXP R3, R3     | x - m'    | m' | s            | f
EXP R0, R0     | e         | m' | s            | f
MUL R2, R3, R2 | e         | m' | s*f          | f
ADD R2, R0, R2 | e         | m' | s'           | f
"""
STEP_NAMES = {"x[1]": "x", "R1": "m", "R2": "s", "max(m, x)": "m'", "exp(m - m')": "f", "exp(x - m')": "e"}
STEP_NAMES |= {"s*f + e": "s'"}


def table(text, registers):
    rows = []
    for number, line in enumerate(text.strip().splitlines(), start=1):
        instruction, *held = (cell.strip() for cell in line.split("|"))
        rows.append([str(number), instruction, *(held + [""] * registers)[:registers]])
    return rows


def matrices(n, m=None, p=None):
    """a and b of integers that no formula could get right by accident, and their product."""
    m, p = m or n, p or n
    a = [[3 + 7 * i + 5 * k * k + i * k for k in range(p)] for i in range(m)]
    b = [[2 + 11 * k - 3 * j + k * j * j for j in range(n)] for k in range(p)]
    c = [[sum(a[i][k] * b[k][j] for k in range(p)) for j in range(n)] for i in range(m)]
    return {**cells("a", a), **cells("b", b)}, c


@pytest.mark.parametrize(
    "registers, program, memory, names, expected",
    [
        (3, programs.dot(2), matrices(2)[0], MATRIX_NAMES, C00),
        (6, programs.outer_product(2), matrices(2)[0], MATRIX_NAMES, OUTER),
        (3, programs.safe_softmax(3), cells("x", [0.5, 2.0, 1.0]), SAFE_NAMES, SAFE),
        (
            4,
            programs.online_softmax(1)[:5],
            cells("x", [0.5]),
            {"x[0]": "x0", "x0 - x0": "0", "exp(0)": "1"},
            FIRST,
        ),
    ],
    ids=["c00", "outer", "safe", "first"],
)
def test_tables_of_the_page(registers, program, memory, names, expected):
    rows = Machine(registers).run(program, memory).rows(names)
    assert rows == table(expected, registers)


def test_table_of_the_online_step():
    run = Machine(4).run(programs.online_step(1), {"x[1]": 2.0}, registers={1: 0.5, 2: 1.25})
    assert run.rows(STEP_NAMES) == table(STEP, 4)
    assert run.registers == [1.0, 2.0, 1.25 * math.exp(-1.5) + 1, math.exp(-1.5)]


def test_page_totals():
    memory, _ = matrices(2)
    counted = [
        (run.loads, run.counts["MAC_Z"] + run.counts["MAC"], run.stores, run.cycles)
        for run in (
            Machine(3).run(programs.dot(2), memory),
            Machine(3).run(programs.inner_product(2), memory),
            Machine(6).run(programs.outer_product(2), memory),
        )
    ]
    assert counted == [(4, 2, 1, 7), (13, 8, 4, 25), (10, 8, 4, 22)]


# --------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize("n", range(1, 9))
def test_matrix_products(n):
    memory, c = matrices(n)
    dot = Machine(3).run(programs.dot(n, n - 1, 0), memory)
    assert dot.memory[f"c[{n - 1}][0]"] == c[n - 1][0]
    assert (dot.loads, dot.stores, dot.cycles) == (2 * n, 1, 3 * n + 1)

    inner = Machine(3).run(programs.inner_product(n), memory)
    assert inner.values("c") == c
    assert (inner.loads, inner.stores, inner.cycles) == (2 * n**3 - n**2 + 1, n**2, 3 * n**3 + 1)

    outer = Machine(n**2 + 2).run(programs.outer_product(n), memory)
    assert outer.values("c") == c
    assert (outer.loads, outer.stores, outer.cycles) == (n**3 + n, n**2, 2 * n**3 + n**2 + n)

    for block in range(1, n + 1):
        if n % block:
            with pytest.raises(ValueError, match="block must be a divisor"):
                programs.blocked_product(n, block)
            continue
        machine = Machine(block**2 + block + 1, ports="any")
        blocked = machine.run(programs.blocked_product(n, block), memory)
        assert blocked.values("c") == c
        assert (blocked.loads, blocked.stores) == (2 * n**3 // block, n**2)
        assert blocked.cycles == blocked.loads + n**3 + n**2


def registers_of(program):
    names = (f for i in program for f in (*i.reads, getattr(i, "target", 0)))
    return max(names) + 1


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_programs_use_the_registers_that_they_say(n):
    assert registers_of(programs.dot(n)) == 3
    assert registers_of(programs.inner_product(n)) == 3
    assert registers_of(programs.outer_product(n)) == n**2 + 2
    assert registers_of(programs.blocked_product(n, n)) == n**2 + n + 1
    assert registers_of(programs.safe_softmax(n)) == 3
    assert registers_of(programs.online_softmax(max(n, 2))) == 4


def exact_softmax(x):
    with localcontext(prec=40):
        e = [(Decimal(y) - Decimal(max(x))).exp() for y in x]
        return [y / sum(e) for y in e]


@steady
@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=30))
def test_softmax_programs(x):
    """Within the rounding that the programs do.

    The exponent t of an element is rounded once, which its exponential feels t times as much; a term of the
    sum is rounded by at most four instructions for each later element, and by its exponents, which weigh at
    most t e^-t < 1 each; the rest is a handful. Results too small for a float may be off by its least step.
    """
    n, expected = len(x), exact_softmax(x)
    safe = Machine(3).run(programs.safe_softmax(n), cells("x", x))
    online = Machine(4).run(programs.online_softmax(n), cells("x", x))
    for run in (safe, online):
        for y, p, right in zip(x, run.values("out"), expected, strict=True):
            roundings = max(x) - y + 5 * n + 8
            assert abs(Decimal(p) - right) <= Decimal(roundings * 2.0**-53) * right + Decimal(2.0**-1073)
        assert run.stores == n
    assert (safe.loads, safe.cycles) == (3 * n, 11 * n - 1)
    assert (online.loads, online.cycles) == (2 * n, 14 * n - 4)


@steady
@given(st.integers(1, 20), st.integers(1, 9))
def test_two_passes_pay_from_this_cost_of_a_load_on(n, load):
    x = cells("x", [0.25 * i for i in range(n)])
    safe = Machine(3, cycles={"LOAD": load}).run(programs.safe_softmax(n), x).cycles
    online = Machine(4, cycles={"LOAD": load}).run(programs.online_softmax(n), x).cycles
    assert (safe, online) == (3 * n * load + 8 * n - 1, 2 * n * load + 12 * n - 4)
    assert (online < safe) == (load > 4 - Fraction(3, n))


def test_a_first_score_of_minus_infinity_is_not_a_number_in_the_online_program():
    x = cells("x", [-math.inf, 0.0])
    assert Machine(3).run(programs.safe_softmax(2), x).values("out") == [0.0, 1.0]
    run = Machine(4).run(programs.online_softmax(2), x)
    assert all(map(math.isnan, run.values("out")))
    assert math.isnan(run.trace[2].registers[0].number)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: programs.dot(0), ValueError, "n must be at least 1, got 0"),
        (lambda: programs.safe_softmax(2.0), TypeError, "n must be an integer, got 2.0"),
        (lambda: programs.inner_product(True), TypeError, "n must be an integer, got True"),
        (lambda: programs.dot(2, 2), ValueError, "i must be from 0 to 1, got 2"),
        (lambda: programs.dot(2, 0, -1), ValueError, "j must be from 0 to 1, got -1"),
    ],
)
def test_programs_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call()


# -------------------------------------------------------------------------------------- assembler

register = st.integers(0, 40)
cell = st.from_regex(r"[a-z_][a-z_0-9]{0,3}(\[(0|[1-9][0-9]?)\]){0,2}", fullmatch=True).filter(
    lambda name: not (name[0] == "r" and name[1:].isdigit())
)
instruction = st.one_of(
    *(
        st.builds(cls, *(register if field.type is int else cell for field in fields(cls)))
        for cls in INSTRUCTIONS.values()
    )
)


@steady
@given(st.lists(instruction))
def test_round_trip(program):
    text = disassemble(program)
    assert assemble(text) == tuple(program)
    assert assemble(text.replace("R", "r").replace("\n", "  # and on\n\n")) == tuple(program)
    assert disassemble(assemble(text)) == text


def test_text_of_the_page():
    text = "LOAD a[0][0], R0\nMAC_Z R0, R1, R2\nMAC R0, R1, R2, R2\nSTORE R2, c[0][0]\nLOAD x[2], r1\n"
    assert assemble(text) == (
        LOAD("a[0][0]", 0),
        MAC_Z(0, 1, 2),
        MAC(0, 1, 2, 2),
        STORE(2, "c[0][0]"),
        LOAD("x[2]", 1),
    )
    assert assemble("") == assemble("\n  # nothing\n") == ()


@pytest.mark.parametrize(
    "text, message",
    [
        ("NOP", r"line 1 \(NOP\): expected one of LOAD, .*, MOV, got 'NOP'"),
        (
            "\nLOAD x, R0\nMUL R0, R1",
            r"line 3 \(MUL R0, R1\): MUL takes 3 operands \(left, right, target\), got 2",
        ),
        ("EXP", r"EXP takes 2 operands \(value, target\), got 0"),
        ("LOAD R0, x", r"source must be a memory cell such as a\[0\]\[1\], got 'R0'"),
        ("LOAD x, y", "target must be a register such as R0, got 'y'"),
        ("LOAD x[01], R0", r"source must be a memory cell .*, got 'x\[01\]'"),
        ("MOV R0, R-1", "target must be a register such as R0, got 'R-1'"),
        ("STORE R0, c[i]", r"cell must be a memory cell .*, got 'c\[i\]'"),
    ],
)
def test_assembler_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        assemble(text)


def test_what_is_no_text_or_no_instruction():
    with pytest.raises(TypeError, match="text must be a string, got bytes"):
        assemble(b"LOAD x, R0")
    with pytest.raises(TypeError, match="entry 2 must be an instruction, got 'EXP'"):
        disassemble([LOAD("x", 0), "EXP"])
    with pytest.raises(TypeError, match="LOAD: target must be the number of a register, got 'R0'"):
        LOAD("x", "R0")
    with pytest.raises(TypeError, match="LOAD: source must be the name of a memory cell, got 3"):
        LOAD(3, 0)
    with pytest.raises(ValueError, match="MOV: target must be the number of a register, 0 or more, got -1"):
        MOV(0, -1)
    with pytest.raises(ValueError, match=r"STORE: cell must name a memory cell, such as .*, got 'R7'"):
        STORE(0, "R7")
    with pytest.raises(AttributeError):
        LOAD("x", 0).target = 1


# ---------------------------------------------------------------------------------------- machine


@pytest.mark.parametrize(
    "text, message",
    [
        ("MOV R0, R1", r"instruction 1 \(MOV R0, R1\): R0 is empty, expected a register that holds a number"),
        ("LOAD x, R0\nADD R0, R2, R1", r"instruction 2 \(ADD R0, R2, R1\): R2 is empty"),
        ("LOAD x, R3", "expected a register from R0 to R2, got R3"),
        ("LOAD x, R0\nSUB R0, R0, R5", "expected a register from R0 to R2, got R5"),
        ("LOAD x, R0\nADD R0, R9, R0", "expected a register from R0 to R2, got R9"),
        ("LOAD x, R0\nLOAD x, R2\nMAC_Z R0, R2, R1", r"the factors must stand in R0 and R1, got R0 and R2"),
        ("LOAD x, R0\nMAC_Z R0, R0, R1", "the factors must stand in R0 and R1, got R0 and R0"),
        ("LOAD y, R0", "instruction 1 .*: y holds nothing, expected a memory cell that does"),
        ("LOAD x, R0\nLOAD zero, R1\nDIV R0, R1, R0", "expected a divisor other than zero, got 0.0"),
    ],
)
def test_machine_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        Machine(3).run(assemble(text), {"x": 1.0, "zero": 0.0})


def test_ports_either_way_round():
    memory = {"x": 3, "y": 5}
    load = "LOAD x, R0\nLOAD y, R1\n"
    assert Machine(2).run(assemble(load + "MAC_Z R1, R0, R0"), memory).registers == [15, 5]
    free = Machine(4, ports="any")
    assert free.run(assemble(load + "MAC_Z R1, R1, R3"), memory).registers == [3, 5, None, 25]


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: Machine(0), ValueError, "registers must be at least 1, got 0"),
        (lambda: Machine("3"), TypeError, "registers must be an integer, got '3'"),
        (lambda: Machine(3, ports="free"), ValueError, "ports must be 'fixed' or 'any', got 'free'"),
        (lambda: Machine(3, cycles={"FMA": 1}), ValueError, "cycles: expected names of .*, got 'FMA'"),
        (lambda: Machine(3, cycles={"LOAD": -1}), ValueError, r"cycles\['LOAD'\] must be 0 or more, got -1"),
        (lambda: Machine(3).run([], {"x": "1"}), TypeError, r"memory\['x'\] must be a real number, got '1'"),
        (lambda: Machine(3).run([], {"x": True}), TypeError, "must be a real number, got True"),
        (lambda: Machine(3).run([], {"x[": 1}), ValueError, r"memory: expected the name .*, got 'x\['"),
        (lambda: Machine(3).run([], {"R1": 1}), ValueError, "memory: expected the name .*, got 'R1'"),
        (lambda: Machine(3).run([], {}, registers={3: 1}), ValueError, "expected R0 to R2, got R3"),
        (lambda: Machine(3).run([], {}, registers={0: 1j}), TypeError, "must be a real number, got 1j"),
        (lambda: Machine(3).run(["MOV"], {}), TypeError, "entry 1 must be an instruction, got 'MOV'"),
        (lambda: Machine(3).run([], {}).values("c"), ValueError, "name must be one of .*, got 'c'"),
    ],
)
def test_machine_refuses_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_array_with_a_gap_is_refused():
    run = Machine(1).run([], {"x[0]": 1, "x[2]": 2})
    with pytest.raises(ValueError, match="the cells of 'x' do not form an array"):
        run.values("x")


def test_numbers_overflow_as_on_hardware():
    run = Machine(2).run(assemble("LOAD x, R0\nEXP R0, R0\nSUB R0, R0, R1\nMAX R1, R0, R1"), {"x": 1e3})
    assert run.registers[0] == math.inf
    assert math.isnan(run.registers[1]), "MAX hands NaN on"
    step = run.as_dict()["steps"][1]
    assert step["registers"] == [{"value": "inf", "text": "exp(x)"}, None]
    with pytest.raises(ValueError, match="the result is beyond the range of floats"):
        Machine(2).run([DIV_BY_THREE], {}, registers={0: 10**400, 1: 3})


DIV_BY_THREE = INSTRUCTIONS["DIV"](0, 1, 0)


def test_fractions_stay_exact():
    third = Fraction(1, 3)
    run = Machine(2).run([LOAD("x", 0), ADD(0, 0, 1), SUB(1, 0, 1), MAX(0, 1, 1)], {"x": third})
    assert run.registers == [third, third]


def test_run_tells_everything():
    memory = {"x": 2.0}
    program = assemble("LOAD x, R0\nEXP R0, R1\nSTORE R1, y\nLOAD y, R2")
    run = Machine(3, cycles={"LOAD": 10, "EXP": 4}).run(program, memory)
    assert memory == run.before == {"x": 2.0}
    assert run.memory == {"x": 2.0, "y": math.exp(2)} and run.values("y") == math.exp(2)
    assert (run.cycles, run.loads, run.stores) == (25, 2, 1)
    assert dict(run.counts) == {"LOAD": 2, "EXP": 1, "STORE": 1}
    assert [(s.target, s.read, s.written, s.cycles, s.loads, s.stores) for s in run.trace] == [
        (0, "x", None, 10, 1, 0),
        (1, None, None, 14, 1, 0),
        (None, None, "y", 15, 1, 1),
        (2, "y", None, 25, 2, 1),
    ]
    # A value keeps its history in memory.
    assert run.rows()[-1] == ["4", "LOAD y, R2", "x", "exp(x)", "exp(x)"]
    plain = run.as_dict({"exp(x)": "e"})
    assert json.loads(json.dumps(plain)) == plain
    assert plain["registers"] == ["R0", "R1", "R2"] and plain["memory"] == {"x": 2.0}
    assert plain["steps"][2] == {
        "number": 3,
        "instruction": "STORE R1, y",
        "registers": [{"value": 2.0, "text": "x"}, {"value": math.exp(2), "text": "e"}, None],
        "target": None,
        "read": None,
        "written": "y",
        "value": math.exp(2),
        "cycles": 15,
        "loads": 1,
        "stores": 1,
    }
    empty = Machine(2).run([], {}, registers={1: 7})
    assert (empty.cycles, empty.loads, empty.stores, empty.registers) == (0, 0, 0, [None, 7])


@steady
@given(st.lists(st.sampled_from(["ADD", "SUB", "MUL", "MAC", "MAX"]), max_size=8), st.data())
def test_formulas_mean_what_was_computed(operations, data):
    """The text of a value, evaluated by Python, is the value: parentheses stand where they must."""
    numbers = [Fraction(data.draw(st.integers(-9, 9)), 7) for _ in range(4)]
    program = []
    for name in operations:
        operands = [data.draw(st.integers(0, 3)) for _ in fields(INSTRUCTIONS[name])]
        program.append(INSTRUCTIONS[name](*operands))
    run = Machine(4, ports="any").run(program, {}, registers=dict(enumerate(numbers)))
    texts = run.rows()[-1][2:] if program else ["R0", "R1", "R2", "R3"]
    names = {f"R{i}": number for i, number in enumerate(numbers)}
    assert [eval(text, {"max": max}, names) for text in texts] == run.registers


# ----------------------------------------------------------------------------------------- search

FIXED = {3: 25, 4: 23, 5: 23, 6: 22, 7: 22, 12: 22}
ANY = {3: 25, 4: 22, 5: 21, 6: 20, 7: 20, 12: 20}
OPTIMA = [("fixed", *item) for item in FIXED.items()] + [("any", *item) for item in ANY.items()]


@pytest.mark.parametrize("ports, registers, cycles", OPTIMA)
def test_minimum_of_the_two_by_two_product(ports, registers, cycles):
    optimum = min_cycles(registers, ports)
    memory, c = matrices(2)
    run = Machine(registers, ports).run(optimum.program, memory)
    assert run.values("c") == c
    assert run.cycles == optimum.cycles == cycles
    assert run.loads + 8 + 4 == cycles, "no optimal program spills a sum or moves anything"


def test_the_programs_of_the_page_are_optimal():
    assert min_cycles(3).cycles == len(programs.inner_product(2))
    assert min_cycles(6).cycles == len(programs.outer_product(2))
    assert min_cycles(3, shape=(1, 1, 2)).cycles == len(programs.dot(2))


@pytest.mark.parametrize("registers", [3, 4, 5, 6])
def test_best_inner_product(registers):
    """One sum at a time: with fixed ports more registers do not help, with free ones they do."""
    for ports, cycles in (("fixed", 25), ("any", ANY[registers])):
        optimum = min_cycles(registers, ports, sums=1)
        assert optimum.cycles == cycles
        memory, c = matrices(2)
        run = Machine(registers, ports).run(optimum.program, memory)
        assert run.values("c") == c
        stores = [i for i, step in enumerate(run.trace) if step.written]
        begun = [i for i, step in enumerate(run.trace) if isinstance(step.instruction, MAC_Z)]
        assert sorted(stores + begun) == [i for pair in zip(begun, stores, strict=True) for i in pair]


@pytest.mark.parametrize("ports", ["fixed", "any"])
def test_three_registers_are_the_least(ports):
    for registers, terms in ((1, 1), (1, 2), (2, 2), (2, 3)):
        with pytest.raises(ValueError, match=f"more than {registers} .* and none of them holds it"):
            min_cycles(registers, ports, shape=(1, 1, terms))
        assert exhaustive(registers, ports, (1, 1, terms)) is None
    assert min_cycles(2, ports, shape=(1, 1, 1)).cycles == 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"registers": 0}, "registers must be an integer of at least 1, got 0"),
        ({"registers": 3.0}, "registers must be an integer of at least 1, got 3.0"),
        ({"registers": 3, "ports": "free"}, "ports must be 'fixed' or 'any', got 'free'"),
        ({"registers": 3, "shape": (2, 0, 2)}, "columns must be an integer of at least 1, got 0"),
        ({"registers": 3, "sums": 0}, "sums must be None or an integer of at least 1, got 0"),
    ],
)
def test_search_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        min_cycles(**arguments)


def exhaustive(registers, ports, shape, bounded=False, renamed=False):
    """The minimum by another search, without the library's shortcuts; None if there is no program.

    It goes through the contents of all registers and of all cells of C, instruction by instruction; anything
    may be moved, stored in any cell of C, loaded back, computed again. Only values that are an input or a
    part of an element of C are followed. renamed: registers of one kind are interchangeable. bounded: A* with
    a bound, for what is too large without.
    """
    rows, columns, inner = shape
    a = [("a", i, k) for i in range(rows) for k in range(inner)]
    b = [("b", k, j) for k in range(inner) for j in range(columns)]
    elements = list(itertools.product(range(rows), range(columns)))
    full = 2**inner - 1
    parts = [("c", i, j, terms) for i, j in elements for terms in range(1, full + 1)]
    code = {value: number for number, value in enumerate([None, *a, *b, *parts])}
    inputs = range(1, len(a) + len(b) + 1)
    goal = tuple(code["c", i, j, full] for i, j in elements)
    made_of = {}  # (factor, factor, addend or 0): result
    for (_, i, k), (_, k2, j) in itertools.product(a, b):
        if k == k2:
            for pair in itertools.permutations((code["a", i, k], code["b", k, j])):
                made_of[*pair, 0] = code["c", i, j, 1 << k]
                for terms in range(1, full + 1):
                    if not terms >> k & 1:
                        made_of[*pair, code["c", i, j, terms]] = code["c", i, j, terms | 1 << k]

    def bound(held, memory):
        if not bounded:
            return 0
        there, cycles, wanted = {*held, *memory}, 0, set()
        for (i, j), stored, final in zip(elements, memory, goal, strict=True):
            if stored == final:
                continue
            cycles += 1
            if final in there:
                continue
            ways = []
            for terms in range(full):
                if not terms or code["c", i, j, terms] in there:
                    missing = [k for k in range(inner) if not terms >> k & 1]
                    ways.append({code[v] for k in missing for v in (("a", i, k), ("b", k, j))})
            cycles += min(map(len, ways)) // 2
            wanted |= set.intersection(*ways)
        return cycles + len(wanted - set(held))

    def canonical(held):
        if not renamed:
            return held
        return tuple(sorted(held[:2]) + sorted(held[2:])) if ports == "fixed" else tuple(sorted(held))

    start = (0,) * registers, (0,) * len(elements)
    cost, queue, finished = {start: 0}, [(bound(*start), 0, start)], set()
    while queue:
        *_, state = heapq.heappop(queue)
        if state in finished:
            continue
        finished.add(state)
        held, memory = state
        if memory == goal:
            return cost[state]
        values = {*inputs, *memory, *held}  # by LOAD and MOV
        pairs = [(0, 1)] if ports == "fixed" else itertools.combinations(range(registers), 2)
        for left, right in pairs:
            if right < registers:
                for addend in (0, *held):
                    values.add(made_of.get((held[left], held[right], addend), 0))
        values.discard(0)
        after = {
            (canonical((*held[:target], value, *held[target + 1 :])), memory)
            for target in range(registers)
            for value in values
        }
        after |= {
            (held, (*memory[:number], value, *memory[number + 1 :]))
            for number in range(len(elements))
            for value in held
            if value not in inputs and value
        }
        for new in after:
            total = cost[state] + 1
            if total < cost.get(new, total + 1):
                cost[new] = total
                heapq.heappush(queue, (total + bound(*new), -total, new))
    return None


SMALL = [
    *((2, ports, shape) for ports in ("fixed", "any") for shape in ((1, 1, 1), (1, 2, 1), (2, 1, 1))),
    *((R, ports, shape) for R in (3, 4) for ports in ("fixed", "any") for shape in ((1, 1, 2), (1, 2, 1))),
]


@pytest.mark.parametrize("registers, ports, shape", SMALL)
def test_minimum_against_plain_breadth_first_search(registers, ports, shape):
    assert min_cycles(registers, ports, shape).cycles == exhaustive(registers, ports, shape)


@pytest.mark.parametrize("ports", ["fixed", "any"])
@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2), (1, 1, 3), (2, 2, 1)])
@pytest.mark.parametrize("registers", [3, 4, 5])
def test_minimum_against_the_other_search(registers, ports, shape):
    other = exhaustive(registers, ports, shape, bounded=True, renamed=True)
    assert min_cycles(registers, ports, shape).cycles == other


@pytest.mark.parametrize("registers", [4, 5, 6])
def test_free_ports_against_the_other_search(registers):
    assert exhaustive(registers, "any", (2, 2, 2), bounded=True, renamed=True) == ANY[registers]


@pytest.mark.slow
@pytest.mark.parametrize("ports, registers", [("any", 3), *(("fixed", R) for R in (3, 4, 5, 6))])
def test_two_by_two_against_the_other_search(ports, registers):
    cycles = {"fixed": FIXED, "any": ANY}[ports][registers]
    assert exhaustive(registers, ports, (2, 2, 2), bounded=True, renamed=True) == cycles


@pytest.mark.slow
@pytest.mark.parametrize(
    "registers, ports, shape", [(2, "any", (2, 2, 1)), (3, "fixed", (2, 2, 1)), (3, "any", (1, 2, 2))]
)
def test_minimum_against_plain_breadth_first_search_at_length(registers, ports, shape):
    renamed = shape == (1, 2, 2)
    assert min_cycles(registers, ports, shape).cycles == exhaustive(registers, ports, shape, renamed=renamed)


def polynomial_search(registers, ports, shape, most):
    """The minimum over all programs of up to ``most`` cycles, whatever they compute; None if none does it.

    Values are whole polynomials {monomial: coefficient}, sums and products of anything with anything; only
    those of degree 3 and more are dropped, since the degree never falls.
    """
    rows, columns, inner = shape

    def multiply(u, v):
        found = {}
        for (x, p), (y, q) in itertools.product(u, v):
            monomial = tuple(sorted(x + y))
            found[monomial] = found.get(monomial, 0) + p * q
        return frozenset(found.items()) if max(map(len, found)) <= 2 else None

    def add(u, v):
        found = dict(u)
        for monomial, p in v:
            found[monomial] = found.get(monomial, 0) + p
        return frozenset(found.items())

    def variable(*name):
        return frozenset({((name,), 1)})

    inputs = [variable("a", i, k) for i in range(rows) for k in range(inner)]
    inputs += [variable("b", k, j) for k in range(inner) for j in range(columns)]
    goal = []
    for i, j in itertools.product(range(rows), range(columns)):
        total = frozenset()
        for k in range(inner):
            total = add(total, multiply(variable("a", i, k), variable("b", k, j)))
        goal.append(total)

    def canonical(held):
        def order(values):
            return sorted(values, key=lambda value: (value is not None, hash(value)))

        return tuple(order(held[:2]) + order(held[2:]) if ports == "fixed" else order(held))

    front = {((None,) * registers, (None,) * len(goal))}
    seen = set(front)
    for cycles in range(1, most + 1):
        after = set()
        for held, memory in front:
            values = {*inputs, *memory, *held} - {None}
            pairs = itertools.combinations_with_replacement(range(registers), 2)
            for left, right in [(0, 1)] if ports == "fixed" else pairs:
                if held[left] and held[right] and (term := multiply(held[left], held[right])):
                    values |= {term, *(add(term, value) for value in held if value)}
            for place, value in itertools.product(range(registers), values):
                after.add((canonical([*held[:place], value, *held[place + 1 :]]), memory))
            for number, value in itertools.product(range(len(goal)), held):
                if value:
                    after.add((held, (*memory[:number], value, *memory[number + 1 :])))
        if any(list(memory) == goal for _, memory in after):
            return cycles
        front = after - seen
        seen |= front
    return None


@pytest.mark.parametrize(
    "registers, ports, shape",
    [(2, "any", (1, 1, 1)), (2, "fixed", (1, 2, 1)), (2, "any", (1, 2, 1)), (3, "fixed", (1, 1, 2))],
)
def test_no_other_value_is_of_use(registers, ports, shape):
    """Programs that compute other polynomials than parts of C, such as products of sums, are no shorter."""
    cycles = min_cycles(registers, ports, shape).cycles
    assert polynomial_search(registers, ports, shape, most=9) == cycles


@pytest.mark.slow
def test_no_other_value_is_of_use_with_free_ports():
    assert polynomial_search(3, "any", (1, 1, 2), most=min_cycles(3, "any", (1, 1, 2)).cycles - 1) is None
    assert polynomial_search(2, "any", (1, 1, 2), most=8) is None


@pytest.mark.slow
@pytest.mark.parametrize("ports", ["fixed", "any"])
@pytest.mark.parametrize("registers", [4, 6])
@pytest.mark.parametrize("shape", [(2, 2, 3), (3, 2, 2), (2, 3, 2)])
def test_larger_optima_run(registers, ports, shape):
    optimum = min_cycles(registers, ports, shape)
    memory, c = matrices(shape[1], shape[0], shape[2])
    run = Machine(registers, ports).run(optimum.program, memory)
    assert run.values("c") == c and run.cycles == optimum.cycles
