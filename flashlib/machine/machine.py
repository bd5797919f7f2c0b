"""The machine: it runs a program on numbers, counts cycles, loads and stores, and keeps
the whole trace.

It has R registers, all empty at first, and a memory of named cells. Arithmetic works on
registers only; LOAD and STORE are the only way between registers and memory (chapter *A
machine with three registers*, after the toy machine of the page "Flash attention").
"""

import math
import operator
from collections import Counter
from dataclasses import dataclass
from numbers import Real

from flashlib.plain_checks import check_count, wrong

from . import isa


def check_ports(ports):
    """Raise ValueError unless the factors of a MAC are in R0 and R1, or anywhere."""
    if ports not in ("fixed", "any"):
        raise wrong("ports", "'fixed' or 'any'", repr(ports))


@dataclass(frozen=True, eq=False)
class Value:
    """A number in a register or a memory cell, with the operation that computed it."""

    number: Real
    operation: str = ""  # the instruction's name, unless it was there from the start
    operands: tuple = ()  # the Values that it was computed from
    name: str = ""  # the cell or register that held it from the start


def _exp(x):
    try:
        return math.exp(x)
    except OverflowError:  # also for an integer far below zero, which no float holds
        return math.inf if x > 0 else 0.0


def _maximum(x, y):
    return x if x != x or x >= y else y  # NaN is passed on from either side


# How each instruction computes, and how its formula is written: the pattern, how
# tightly its parts must bind, and how tightly it binds itself (1 a sum, 2 a product, 3
# a name or a call).
# fmt: off
_ARITHMETIC = {
    "MAC_Z": (operator.mul, "{}*{}", (2, 3), 2),
    "MAC": (lambda x, y, addend: x * y + addend, "{2} + {0}*{1}", (2, 3, 1), 1),
    "MAX": (_maximum, "max({}, {})", (1, 1), 3),
    "SUB": (operator.sub, "{} - {}", (1, 2), 1),
    "EXP": (_exp, "exp({})", (1,), 3),
    "ADD": (operator.add, "{} + {}", (1, 1), 1),
    "MUL": (operator.mul, "{}*{}", (2, 3), 2),
    "DIV": (operator.truediv, "{}/{}", (2, 3), 2),
}
# fmt: on


class _Writer:
    """Writes the formula of a Value, such as ``max(x[0], x[1])``; names as for
    ``rows``.
    """

    def __init__(self, names):
        self.names, self.known = names or {}, {}  # known: results by identity

    def text(self, value):
        return self._bound(value)[0] if value else ""

    def _bound(self, value):
        """The text of a Value and how tightly it binds."""
        if id(value) not in self.known:
            text, binding = value.name, 3
            if value.operation:
                _, pattern, needed, binding = _ARITHMETIC[value.operation]
                parts = zip(map(self._bound, value.operands), needed, strict=True)
                texts = [x if tight >= need else f"({x})" for (x, tight), need in parts]
                text = pattern.format(*texts)
            short = self.names.get(text)
            self.known[id(value)] = (text, binding) if short is None else (short, 3)
        return self.known[id(value)]


@dataclass(frozen=True)
class Step:
    """One line of a trace: an instruction, the state after it, the totals so far."""

    number: int
    instruction: isa.Instruction
    registers: tuple  # a Value or None (empty) for each
    cycles: int
    loads: int
    stores: int

    @property
    def target(self):
        """The register that was written, None for a STORE."""
        return getattr(self.instruction, "target", None)

    @property
    def read(self):
        """The memory cell that was read, or None."""
        return getattr(self.instruction, "source", None)

    @property
    def written(self):
        """The memory cell that was written, or None."""
        return getattr(self.instruction, "cell", None)


@dataclass(frozen=True)
class Run:
    """What a program did."""

    initial: tuple  # the registers at the start, a Value or None (empty) each
    before: dict  # the memory at the start, {cell: number}
    memory: dict  # and at the end
    trace: tuple  # a Step for each instruction
    registers: list  # the number in each register at the end, or None
    cycles: int
    loads: int
    stores: int

    @property
    def counts(self):
        """How often each instruction was executed, {name: times}."""
        return Counter(type(step.instruction).__name__ for step in self.trace)

    def values(self, name):
        """Return the cells ``name[...]`` as nested lists, or the number in cell
        ``name``; ValueError when there is no such cell, or when its indices have gaps.
        """

        def array(prefix):
            if prefix in self.memory:
                return self.memory[prefix]
            parts = []
            while any(cell.startswith(f"{prefix}[{len(parts)}]") for cell in found):
                parts.append(array(f"{prefix}[{len(parts)}]"))
            return parts

        found = {cell for cell in self.memory if cell.startswith(f"{name}[")}
        nested = array(name)
        whole = found and cells(name, nested).keys() == found
        if name not in self.memory and not whole:
            got = f"{name!r} with the cells {sorted(found)}"
            raise wrong("name", "a cell or an array without gaps", got)
        return nested

    def rows(self, names=None):
        """Return the trace as a table of texts: the number, instruction and registers
        of each step. names: {formula: shorter text}, applied from the inside out, so
        that a longer formula uses the short names of its parts.
        """
        text = _Writer(names).text
        return [
            [str(step.number), str(step.instruction), *map(text, step.registers)]
            for step in self.trace
        ]

    def as_dict(self, names=None):
        """Return the trace as plain dictionaries, lists, strings and numbers, for JSON.

        ``{"registers": ["R0", ...], "memory": {cell: number}, "steps": [...]}``; a step
        is ``{"number", "instruction", "registers": [{"value", "text"} or None, ...],
        "target", "read", "written", "value", "cycles", "loads", "stores"}``. ``target``
        is the name of the register that was written; ``read`` and ``written`` name
        cells; ``value`` is the number that was written, to either. Numbers that JSON
        does not know are texts: "inf", "-inf", "nan". names: as for :meth:`rows`.
        """
        text = _Writer(names).text

        def content(value):
            return value and {"value": _plain(value.number), "text": text(value)}

        steps = []
        for step in self.trace:
            registers = [content(value) for value in step.registers]
            to_memory = step.target is None
            source = step.instruction.value if to_memory else step.target
            one = {"instruction": str(step.instruction), "registers": registers}
            one["target"] = None if to_memory else f"R{step.target}"
            one["value"] = registers[source]["value"]
            counts = ("number", "read", "written", "cycles", "loads", "stores")
            steps.append(one | {name: getattr(step, name) for name in counts})
        return {
            "registers": [f"R{i}" for i in range(len(self.initial))],
            "memory": {cell: _plain(number) for cell, number in self.before.items()},
            "steps": steps,
        }


class Machine:
    """A machine with ``registers`` registers R0, R1, ..., an integer of at least 1.

    ports       where the two factors of MAC_Z and MAC must be: "fixed" for R0 and R1,
                in either order, as on the page that the machine comes from; "any" for
                any registers. Addend and target are free in both.
    cycles      {name of an instruction: its cycles}; all others take one cycle

    Raises TypeError or ValueError that names the argument.
    """

    def __init__(self, registers, ports="fixed", cycles=None):
        check_count("registers", registers)
        check_ports(ports)
        cycles = dict(cycles or {})
        for name, time in cycles.items():
            if name not in isa.INSTRUCTIONS:
                names = ", ".join(isa.INSTRUCTIONS)
                raise wrong("cycles", f"names of {names}", repr(name))
            if not time >= 0:
                raise wrong(f"cycles[{name!r}]", "0 or more", repr(time))
        self.registers, self.ports, self.cycles = registers, ports, cycles

    def run(self, program, memory, registers=None):
        """Execute a program; return a :class:`Run`.

        program     instructions, for instance from ``assemble``
        memory      {cell: real number} before the program; it is copied
        registers   {register: number} that are not empty at the start

        Arithmetic is exact with int and Fraction as long as no EXP is involved, and
        IEEE double with float. As on real hardware an EXP that overflows gives
        infinity, and infinity minus infinity is NaN.

        Raises TypeError for an entry that is not a real number or not an instruction,
        and ValueError, naming the instruction and its number, for an illegal program.
        """
        for cell in memory:
            if not isa.is_cell(cell):
                raise wrong("memory", "cells such as a[0][1]", repr(cell))
        before = {cell: _number(f"memory[{cell!r}]", x) for cell, x in memory.items()}
        store = {cell: Value(number, name=cell) for cell, number in before.items()}
        held = [None] * self.registers
        for register, number in (registers or {}).items():
            if register not in range(self.registers):
                raise wrong("registers", f"R0 to R{self.registers - 1}", f"R{register}")
            number = _number(f"registers[{register}]", number)
            held[register] = Value(number, name=f"R{register}")
        initial, trace = tuple(held), []
        cycles = loads = stores = 0
        for number, instruction in enumerate(program, start=1):
            isa.check_instruction(number, instruction)
            where = f"instruction {number} ({instruction})"
            operands = self._operands(where, instruction, held)
            name = type(instruction).__name__
            if isinstance(instruction, isa.LOAD):
                if (cell := instruction.source) not in store:
                    expected = "expected a memory cell that does"
                    raise ValueError(f"{where}: {cell} holds nothing, {expected}")
                held[instruction.target] = store[instruction.source]
                loads += 1
            elif isinstance(instruction, isa.STORE):
                store[instruction.cell] = operands[0]
                stores += 1
            else:
                held[instruction.target] = _compute(where, name, operands)
            cycles += self.cycles.get(name, 1)
            counts = cycles, loads, stores
            trace.append(Step(number, instruction, tuple(held), *counts))
        memory = {cell: value.number for cell, value in store.items()}
        numbers = [value and value.number for value in held]
        totals = cycles, loads, stores
        return Run(initial, before, memory, tuple(trace), numbers, *totals)

    def _operands(self, where, instruction, held):
        """The Values that an instruction reads; ValueError where it must not."""
        for register in (*instruction.reads, getattr(instruction, "target", 0)):
            if register >= self.registers:
                expected = f"a register from R0 to R{self.registers - 1}"
                raise wrong(where, expected, f"R{register}")
        if isinstance(instruction, isa.MAC_Z | isa.MAC) and self.ports == "fixed":
            left, right = instruction.left, instruction.right
            if {left, right} != {0, 1}:
                got = f"R{left} and R{right}"
                raise wrong(where, "the factors in R0 and R1", got)
        for register in instruction.reads:
            if held[register] is None:
                expected = "expected a register that holds a number"
                raise ValueError(f"{where}: R{register} is empty, {expected}")
        return tuple(held[register] for register in instruction.reads)


def _compute(where, name, operands):
    """The Value that an arithmetic instruction computes."""
    if name == "MOV":
        return operands[0]
    numbers = [operand.number for operand in operands]
    try:
        return Value(_ARITHMETIC[name][0](*numbers), name, operands)
    except ZeroDivisionError:
        raise wrong(where, "a divisor other than zero", repr(numbers[1])) from None
    except OverflowError:
        raise ValueError(f"{where}: the result is beyond the range of floats") from None


def cells(name, values):
    """The cells of nested lists: ``cells("x", [5])`` is ``{"x[0]": 5}``."""
    if not isinstance(values, list | tuple):
        return {name: values}
    found = {}
    for index, value in enumerate(values):
        found |= cells(f"{name}[{index}]", value)
    return found


def _number(what, number):
    if not isinstance(number, Real) or isinstance(number, bool):
        raise wrong(what, "a real number", repr(number), TypeError)
    # NumPy's integers wrap around, Python's do not.
    return number.item() if hasattr(number, "item") else number


def _plain(number):
    """A number that JSON knows, or a text."""
    if isinstance(number, int):
        return number
    number = float(number)
    return number if math.isfinite(number) else str(number)
