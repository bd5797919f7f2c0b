"""The register machine: its refusals, its runs, and the proved minima against a search
that shares nothing with the library's. The chapters check what its programs compute.
"""

import heapq
import itertools
import json
import math
from dataclasses import fields
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlib.machine import Machine, assemble, disassemble, isa, programs
from flashlib.machine.isa import LOAD, MOV, STORE
from flashlib.machine.search import min_cycles

steady = settings(derandomize=True, deadline=None, max_examples=50)


# -- Text

register = st.integers(0, 40)
cell = st.from_regex(r"[a-z_][a-z_0-9]{0,3}(\[(0|[1-9][0-9]?)\]){0,2}", fullmatch=True)
operand = {int: register, str: cell.filter(isa.is_cell)}
instruction = st.one_of(
    st.builds(cls, *(operand[field.type] for field in fields(cls)))
    for cls in isa.INSTRUCTIONS.values()
)


@steady
@given(st.lists(instruction, max_size=8))
def test_assembler_and_disassembler_are_inverse(program):
    text = disassemble(program)
    assert assemble(text) == tuple(program)
    commented = text.replace("R", "r").replace("\n", "  # and on\n\n")
    assert assemble(commented) == tuple(program)


# -- Refusals


def run(text, memory=None, registers=None):
    memory = {"x": 1.0, "zero": 0.0} if memory is None else memory
    return Machine(3).run(assemble(text), memory, registers)


# fmt: off
REFUSED = [
    (lambda: assemble(b"MOV R0, R1"), TypeError, "text: expected a string, got bytes"),
    (lambda: assemble("NOP"), ValueError,
     r"line 1 \(NOP\): expected one of LOAD, .*, MOV, got 'NOP'"),
    (lambda: assemble("\nLOAD x, R0\nMUL R0, R1"), ValueError,
     r"line 3 \(MUL R0, R1\): MUL takes 3 operands \(left, right, target\), got 2"),
    (lambda: assemble("EXP"), ValueError,
     r"EXP takes 2 operands \(value, target\), got 0"),
    (lambda: assemble("LOAD R0, x"), ValueError,
     r"\(LOAD R0, x\): LOAD: source: expected a memory cell .*, got R0"),
    (lambda: assemble("LOAD x[01], R0"), ValueError,
     r"source: expected a memory cell .*, got 'x\[01\]'"),
    (lambda: assemble("MOV R0, R-1"), ValueError,
     "target: expected a register .*, got 'R-1'"),
    (lambda: LOAD("x", "R0"), TypeError,
     "LOAD: target: expected a register .*, got 'R0'"),
    (lambda: LOAD("x", True), TypeError, "target: expected a register .*, got True"),
    (lambda: MOV(0, -1), ValueError, "MOV: target: expected a register .*, got -1"),
    (lambda: STORE(0, "R7"), ValueError,
     r"STORE: cell: expected a memory cell such as a\[0\]\[1\], got 'R7'"),
    (lambda: disassemble([LOAD("x", 0), "EXP"]), TypeError,
     "expected an instruction as entry 2, got 'EXP'"),
    (lambda: Machine(3).run(["MOV"], {}), TypeError,
     "expected an instruction as entry 1, got 'MOV'"),
    (lambda: run("MOV R0, R1"), ValueError,
     r"instruction 1 \(MOV R0, R1\): R0 is empty, expected a register that"),
    (lambda: run("LOAD x, R3"), ValueError,
     "expected a register from R0 to R2, got R3"),
    (lambda: run("LOAD x, R0\nADD R0, R9, R0"), ValueError,
     "expected a register from R0 to R2, got R9"),
    (lambda: run("LOAD x, R0\nLOAD x, R2\nMAC_Z R0, R2, R1"), ValueError,
     "expected the factors in R0 and R1, got R0 and R2"),
    (lambda: run("LOAD y, R0"), ValueError,
     "y holds nothing, expected a memory cell that does"),
    (lambda: run("LOAD x, R0\nLOAD zero, R1\nDIV R0, R1, R0"), ValueError,
     "other than zero, got 0.0"),
    (lambda: run("DIV R0, R1, R0", registers={0: 10**400, 1: 3}), ValueError,
     "beyond the range of floats"),
    (lambda: run("", {"x": "1"}), TypeError,
     r"memory\['x'\]: expected a real number, got '1'"),
    (lambda: run("", {"x": True}), TypeError, "expected a real number, got True"),
    (lambda: run("", {"x[": 1}), ValueError, r"memory: expected cells .*, got 'x\['"),
    (lambda: run("", registers={3: 1}), ValueError, "expected R0 to R2, got R3"),
    (lambda: run("").values("c"), ValueError,
     "name: expected a cell or an array without gaps, got 'c'"),
    (lambda: run("", {"x[0]": 1, "x[2]": 2}).values("x"), ValueError,
     "array without gaps, got 'x'"),
    (lambda: Machine(0), ValueError, "registers: expected at least 1, got 0"),
    (lambda: Machine("3"), TypeError, "registers: expected an integer, got str"),
    (lambda: Machine(3, ports="free"), ValueError,
     "ports: expected 'fixed' or 'any', got 'free'"),
    (lambda: Machine(3, cycles={"FMA": 1}), ValueError,
     "cycles: expected names of .*, got 'FMA'"),
    (lambda: Machine(3, cycles={"LOAD": -1}), ValueError,
     r"cycles\['LOAD'\]: expected 0 or more, got -1"),
    (lambda: programs.dot(2, 2), ValueError, "i: expected 0 to 1, got 2"),
    (lambda: programs.safe_softmax(True), TypeError,
     "n: expected an integer, got bool"),
    (lambda: programs.blocked_product(4, 3), ValueError,
     "block: expected a divisor of n = 4, got 3"),
    (lambda: min_cycles(3, shape=(2, 2)), ValueError,
     r"shape: expected \(rows, columns, inner\)"),
    (lambda: min_cycles(3, shape=(2, 0, 2)), ValueError,
     "columns: expected at least 1, got 0"),
    (lambda: min_cycles(3, sums=0), ValueError, "sums: expected at least 1, got 0"),
    (lambda: min_cycles(3, "free"), ValueError,
     "ports: expected 'fixed' or 'any', got 'free'"),
]
# fmt: on


@pytest.mark.parametrize("call, error, message", REFUSED)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


# -- Runs


def test_free_ports_and_swapped_factors():
    memory, load = {"x": 3, "y": 5}, "LOAD x, R0\nLOAD y, R1\n"
    fixed = Machine(2).run(assemble(load + "MAC_Z R1, R0, R0"), memory)
    free = Machine(4, ports="any").run(assemble(load + "MAC_Z R1, R1, R3"), memory)
    assert fixed.registers == [15, 5] and free.registers == [3, 5, None, 25]


def test_numbers_overflow_as_on_hardware():
    done = run("LOAD x, R0\nEXP R0, R0\nSUB R0, R0, R1\nMAX R1, R0, R1", {"x": 1e3})
    assert done.registers[0] == math.inf
    assert math.isnan(done.registers[1]), "MAX passes NaN on"
    step = done.as_dict()["steps"][1]
    assert step["registers"][:2] == [{"value": "inf", "text": "exp(x)"}, None]


def test_run_records_everything():
    memory = {"x": 2.0}
    program = assemble("LOAD x, R0\nEXP R0, R1\nSTORE R1, y\nLOAD y, R2")
    done = Machine(3, cycles={"LOAD": 10, "EXP": 4}).run(program, memory)
    assert memory == done.before == {"x": 2.0}
    assert done.memory == {"x": 2.0, "y": math.exp(2)}
    assert done.values("y") == math.exp(2)
    assert (done.cycles, done.loads, done.stores) == (25, 2, 1)
    assert dict(done.counts) == {"LOAD": 2, "EXP": 1, "STORE": 1}
    assert [(s.target, s.read, s.written, s.cycles) for s in done.trace] == [
        (0, "x", None, 10),
        (1, None, None, 14),
        (None, None, "y", 15),
        (2, "y", None, 25),
    ]
    # A value keeps its history in memory.
    assert done.rows()[-1] == ["4", "LOAD y, R2", "x", "exp(x)", "exp(x)"]
    plain = done.as_dict({"exp(x)": "e"})
    assert json.loads(json.dumps(plain)) == plain
    held = [{"value": 2.0, "text": "x"}, {"value": math.exp(2), "text": "e"}, None]
    assert plain["steps"][2] == {
        "number": 3, "instruction": "STORE R1, y", "registers": held,
        "target": None, "read": None, "written": "y", "value": math.exp(2),
        "cycles": 15, "loads": 1, "stores": 1,
    }  # fmt: skip
    empty = Machine(2).run([], {"x": Fraction(1, 2)}, registers={1: 7})
    assert empty.as_dict()["memory"] == {"x": 0.5} and empty.registers == [None, 7]


SUMS = ["ADD", "SUB", "MUL", "MAC", "MAX"]


@steady
@given(st.lists(st.sampled_from(SUMS), max_size=8), st.data())
def test_formulas_mean_what_was_computed(operations, data):
    """Python evaluates the text of a value to the value, exactly."""
    numbers = [Fraction(data.draw(st.integers(-9, 9)), 7) for _ in range(4)]
    program = []
    for name in operations:
        cls = isa.INSTRUCTIONS[name]
        program.append(cls(*(data.draw(st.integers(0, 3)) for _ in fields(cls))))
    done = Machine(4, ports="any").run(program, {}, registers=dict(enumerate(numbers)))
    texts = done.rows()[-1][2:] if program else ["R0", "R1", "R2", "R3"]
    names = {f"R{i}": number for i, number in enumerate(numbers)}
    assert [eval(text, {"max": max}, names) for text in texts] == done.registers


# -- Minima

OPTIMA = [("fixed", 3, 25), ("fixed", 4, 23), ("fixed", 6, 22)]
OPTIMA += [("any", 3, 25), ("any", 4, 22), ("any", 5, 21), ("any", 6, 20)]


@pytest.mark.parametrize("ports", ["fixed", "any"])
def test_three_registers_are_the_least(ports):
    for registers, terms in ((1, 1), (2, 2)):
        with pytest.raises(ValueError, match=f"more than {registers} .* none of them"):
            min_cycles(registers, ports, shape=(1, 1, terms))
        assert exhaustive(registers, ports, (1, 1, terms)) is None


def canonical(held, ports):
    """Registers of one kind are interchangeable."""
    split = 2 if ports == "fixed" else 0
    return (*sorted(held[:split]), *sorted(held[split:]))


def exhaustive(registers, ports, shape):
    """The minimum by another search, without the library's normal form, or None: it
    visits the contents of all registers and of all cells of C, instruction by
    instruction; anything may be moved, stored in any cell of C, loaded back, computed
    again. It follows only values that are an input or a part of an element of C.
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
    sums = {}  # (factor, factor, addend or 0): result
    for (i, j), k in itertools.product(elements, range(inner)):
        for pair in itertools.permutations((code["a", i, k], code["b", k, j])):
            for terms in range(full + 1):
                if not terms >> k & 1:
                    addend = code["c", i, j, terms] if terms else 0
                    sums[*pair, addend] = code["c", i, j, terms | 1 << k]

    def bound(held, memory):
        there, cycles, wanted = {*held, *memory}, 0, set()
        for (i, j), stored, final in zip(elements, memory, goal, strict=True):
            cycles += stored != final
            if final in there:
                continue
            ways = []
            for terms in range(full):
                if not terms or code["c", i, j, terms] in there:
                    missing = [k for k in range(inner) if not terms >> k & 1]
                    needed = [(("a", i, k), ("b", k, j)) for k in missing]
                    ways.append({code[x] for pair in needed for x in pair})
            cycles += min(map(len, ways)) // 2
            wanted |= set.intersection(*ways)
        return cycles + len(wanted - set(held))

    start = (0,) * registers, (0,) * len(elements)
    pairs = list(itertools.combinations(range(registers), 2))
    if ports == "fixed":
        pairs = pairs[:1]
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
        for (left, right), addend in itertools.product(pairs, (0, *held)):
            values.add(sums.get((held[left], held[right], addend), 0))
        after = set()
        for target, value in itertools.product(range(registers), values - {0}):
            changed = (*held[:target], value, *held[target + 1 :])
            after.add((canonical(changed, ports), memory))
        for number, value in itertools.product(range(len(elements)), held):
            if value and value not in inputs:
                after.add((held, (*memory[:number], value, *memory[number + 1 :])))
        for new in after:
            total = cost[state] + 1
            if total < cost.get(new, total + 1):
                cost[new] = total
                heapq.heappush(queue, (total + bound(*new), -total, new))
    return None


@pytest.mark.parametrize("ports", ["fixed", "any"])
@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2), (1, 1, 3), (2, 2, 1)])
@pytest.mark.parametrize("registers", [3, 5])
def test_minimum_against_the_other_search(registers, ports, shape):
    other = exhaustive(registers, ports, shape)
    assert min_cycles(registers, ports, shape).cycles == other


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in OPTIMA[:-2]]


@pytest.mark.parametrize("ports, registers, cycles", [*OPTIMA[-2:], *SLOW])
def test_two_by_two_against_the_other_search(ports, registers, cycles):
    assert min_cycles(registers, ports).cycles == cycles
    assert exhaustive(registers, ports, (2, 2, 2)) == cycles
