"""The machine: runs a program on numbers, counts cycles, loads and stores, and keeps the whole trace.

It has R registers, all empty at first, and a memory of named cells. Arithmetic works on registers only; LOAD
and STORE are the only way between registers and memory (chapter *A machine with three registers*, after the
toy machine of the page "Flash attention").
"""

import math
from collections import Counter
from dataclasses import dataclass
from numbers import Real

from .isa import CELL, INSTRUCTIONS, LOAD, MAC, MAC_Z, REGISTER, STORE, Instruction

PORTS = ("fixed", "any")


@dataclass(frozen=True, eq=False)
class Value:
    """A number in a register or a memory cell, with the operation that made it.

    operation   the instruction's name; "" for what was there from the start
    operands    the Values that it was made of
    name        the cell or register that held it from the start
    """

    number: Real
    operation: str = ""
    operands: tuple = ()
    name: str = ""

    def text(self, names=None):
        """How it was computed: ``a[0][0]*b[0][0] + a[0][1]*b[1][0]``.

        names: {text: shorter text}, applied from the inside out, so that a longer formula is written with the
        short names of its parts.
        """
        return _text(self, names or {}, {})[0]


# How a formula is written: the pattern, how tightly its parts must bind, and how tightly it binds itself
# (1 a sum, 2 a product, 3 a name or a call).
_FORMULA = {
    "MAC_Z": ("{}*{}", (2, 3), 2),
    "MAC": ("{2} + {0}*{1}", (2, 3, 1), 1),
    "MAX": ("max({}, {})", (1, 1), 3),
    "SUB": ("{} - {}", (1, 2), 1),
    "EXP": ("exp({})", (1,), 3),
    "ADD": ("{} + {}", (1, 1), 1),
    "MUL": ("{}*{}", (2, 3), 2),
    "DIV": ("{}/{}", (2, 3), 2),
}


def _text(value, names, known):
    """(text, binding) of a Value; known: what was written before, by identity."""
    if id(value) not in known:
        if not value.operation:
            text, binding = value.name, 3
        else:
            pattern, needed, binding = _FORMULA[value.operation]
            parts = [_text(operand, names, known) for operand in value.operands]
            texts = [
                part if tight >= need else f"({part})"
                for (part, tight), need in zip(parts, needed, strict=True)
            ]
            text = pattern.format(*texts)
        known[id(value)] = (names[text], 3) if text in names else (text, binding)
    return known[id(value)]


@dataclass(frozen=True)
class Step:
    """One line of a trace: an instruction and the state after it.

    registers               a Value or None (empty) for each register
    target                  the register that was written, None for a STORE
    read, written           the memory cell that was read or written, else None
    cycles, loads, stores   the counters, from the first instruction on
    """

    number: int
    instruction: Instruction
    registers: tuple
    target: int | None
    read: str | None
    written: str | None
    cycles: int
    loads: int
    stores: int


@dataclass(frozen=True)
class Run:
    """What a program did.

    initial     the registers before the first instruction, a Value or None each
    before      the memory before the first instruction, {cell: number}
    memory      the memory afterwards, {cell: number}
    trace       a Step for each instruction
    """

    initial: tuple
    before: dict
    memory: dict
    trace: tuple

    @property
    def cycles(self):
        return self.trace[-1].cycles if self.trace else 0

    @property
    def loads(self):
        return self.trace[-1].loads if self.trace else 0

    @property
    def stores(self):
        return self.trace[-1].stores if self.trace else 0

    @property
    def counts(self):
        """How often each instruction was executed, {name: times}."""
        return Counter(type(step.instruction).__name__ for step in self.trace)

    @property
    def registers(self):
        """The number in each register afterwards, None where it is empty."""
        last = self.trace[-1].registers if self.trace else self.initial
        return [value and value.number for value in last]

    def values(self, name):
        """The numbers in the cells ``name[...]`` as nested lists, or the number of the cell ``name``.

        Raises ValueError when there is no such cell, or when its indices have gaps.
        """
        if name in self.memory:
            return self.memory[name]
        found = {
            tuple(int(index) for index in cell[len(name) + 1 : -1].split("][")): number
            for cell, number in self.memory.items()
            if cell.startswith(f"{name}[")
        }
        if not found:
            raise ValueError(f"name must be one of the memory's cells or arrays, got {name!r}")
        nested = _nested(found)
        if cells(name, nested).keys() != {cell for cell in self.memory if cell.startswith(f"{name}[")}:
            raise ValueError(f"the cells of {name!r} do not form an array: {sorted(found)}")
        return nested

    def rows(self, names=None):
        """The trace as a table of texts: for each step its number, the instruction, and each register.

        An empty register is "". names: as for :meth:`Value.text`.
        """
        known = {}
        return [
            [
                str(step.number),
                str(step.instruction),
                *(_text(value, names or {}, known)[0] if value else "" for value in step.registers),
            ]
            for step in self.trace
        ]

    def as_dict(self, names=None):
        """The trace as plain dictionaries, lists, strings and numbers, for JSON.

        ``{"registers": ["R0", ...], "memory": {cell: number}, "steps": [...]}``; a step is ``{"number",
        "instruction", "registers": [{"value", "text"} or None, ...], "target", "read", "written", "value",
        "cycles", "loads", "stores"}``. ``target`` is the name of the register that was written; ``read`` and
        ``written`` name cells; ``value`` is the number that was written, to either. Numbers that JSON does
        not know are texts: "inf", "-inf", "nan".
        """
        known = {}

        def shown(value):
            if value is None:
                return None
            return {"value": _plain(value.number), "text": _text(value, names or {}, known)[0]}

        steps = []
        for step in self.trace:
            source = step.instruction.value if step.target is None else step.target
            steps.append(
                {
                    "number": step.number,
                    "instruction": str(step.instruction),
                    "registers": [shown(value) for value in step.registers],
                    "target": None if step.target is None else f"R{step.target}",
                    "read": step.read,
                    "written": step.written,
                    "value": _plain(step.registers[source].number),
                    "cycles": step.cycles,
                    "loads": step.loads,
                    "stores": step.stores,
                }
            )
        return {
            "registers": [f"R{i}" for i in range(len(self.initial))],
            "memory": {cell: _plain(number) for cell, number in self.before.items()},
            "steps": steps,
        }


class Machine:
    """A machine with ``registers`` registers R0, R1, ...

    ports       "fixed": the two factors of MAC_Z and MAC stand in R0 and R1, either way round, as on the page
                that the machine comes from; "any": in any registers. Addend and target are free in both.
    cycles      {name of an instruction: cycles that it takes}; one cycle for those that are not named

    Raises TypeError when ``registers`` is no integer; ValueError when it is below 1, for other ports, and for
    unknown instructions or negative times in ``cycles``.
    """

    def __init__(self, registers, ports="fixed", cycles=None):
        if not isinstance(registers, int) or isinstance(registers, bool):
            raise TypeError(f"registers must be an integer, got {registers!r}")
        if registers < 1:
            raise ValueError(f"registers must be at least 1, got {registers}")
        if ports not in PORTS:
            raise ValueError(f"ports must be 'fixed' or 'any', got {ports!r}")
        cycles = dict(cycles or {})
        for name, time in cycles.items():
            if name not in INSTRUCTIONS:
                raise ValueError(f"cycles: expected names of {', '.join(INSTRUCTIONS)}, got {name!r}")
            if not time >= 0:
                raise ValueError(f"cycles[{name!r}] must be 0 or more, got {time!r}")
        self.registers, self.ports, self.cycles = registers, ports, cycles

    def run(self, program, memory, registers=None):
        """Execute a program; returns a :class:`Run`.

        program     instructions, for instance from ``assemble``
        memory      {cell: real number} before the program; it is copied
        registers   {register: number} that are not empty at the start

        Numbers are kept as they come: exact with int and Fraction (as far as no EXP is involved), IEEE
        doubles with float. As on real hardware an EXP that overflows gives infinity, and infinity minus
        infinity is NaN. Raises TypeError for what is no real number or no instruction; ValueError, naming
        the instruction, its number, what was expected and what came, for an illegal program: a register that
        the machine does not have, a register that is empty, a factor outside the ports, a memory cell that
        holds nothing, a division by zero, a result beyond the range of floats.
        """
        before = {cell: _number(f"memory[{cell!r}]", number) for cell, number in memory.items()}
        for cell in before:
            if not isinstance(cell, str) or not CELL.fullmatch(cell) or REGISTER.fullmatch(cell):
                raise ValueError(f"memory: expected the name of a cell, such as a[0][1], got {cell!r}")
        store = {cell: Value(number, name=cell) for cell, number in before.items()}
        held = [None] * self.registers
        for register, number in (registers or {}).items():
            if register not in range(self.registers):
                raise ValueError(f"registers: expected R0 to R{self.registers - 1}, got R{register}")
            held[register] = Value(_number(f"registers[{register}]", number), name=f"R{register}")
        initial, trace = tuple(held), []
        cycles = loads = stores = 0
        for number, instruction in enumerate(program, start=1):
            if not isinstance(instruction, Instruction):
                raise TypeError(f"program: entry {number} must be an instruction, got {instruction!r}")
            where = f"instruction {number} ({instruction})"
            operands = self._operands(where, instruction, held)
            target, read, written = getattr(instruction, "target", None), None, None
            if isinstance(instruction, LOAD):
                read = instruction.source
                if read not in store:
                    raise ValueError(f"{where}: {read} holds nothing, expected a memory cell that does")
                held[target] = store[read]
                loads += 1
            elif isinstance(instruction, STORE):
                written = instruction.cell
                store[written] = operands[0]
                stores += 1
            else:
                held[target] = _compute(where, type(instruction).__name__, operands)
            cycles += self.cycles.get(type(instruction).__name__, 1)
            trace.append(
                Step(number, instruction, tuple(held), target, read, written, cycles, loads, stores)
            )
        memory = {cell: value.number for cell, value in store.items()}
        return Run(initial, before, memory, tuple(trace))

    def _operands(self, where, instruction, held):
        """The Values that an instruction reads from registers; ValueError where it may not."""
        last = f"R{self.registers - 1}"
        target = getattr(instruction, "target", 0)
        for register in (*instruction.reads, target):
            if register >= self.registers:
                raise ValueError(f"{where}: expected a register from R0 to {last}, got R{register}")
        if isinstance(instruction, MAC_Z | MAC) and self.ports == "fixed":
            factors = instruction.left, instruction.right
            if set(factors) != {0, 1}:
                raise ValueError(
                    f"{where}: the factors must stand in R0 and R1, got R{factors[0]} and R{factors[1]}"
                )
        for register in instruction.reads:
            if held[register] is None:
                raise ValueError(f"{where}: R{register} is empty, expected a register that holds a number")
        return tuple(held[register] for register in instruction.reads)


def _compute(where, name, operands):
    """The Value that an arithmetic instruction makes of its operands."""
    if name == "MOV":
        return operands[0]
    x, y = operands[0].number, operands[-1].number
    try:
        if name == "MAC_Z" or name == "MUL":
            number = x * y
        elif name == "MAC":
            number = x * operands[1].number + y
        elif name == "MAX":
            number = x if x != x or x >= y else y  # NaN is handed on, from either side
        elif name == "SUB":
            number = x - y
        elif name == "ADD":
            number = x + y
        elif name == "DIV":
            number = x / y
        else:
            number = _exp(x)
    except ZeroDivisionError:
        raise ValueError(f"{where}: expected a divisor other than zero, got {y!r}") from None
    except OverflowError:
        raise ValueError(f"{where}: the result is beyond the range of floats") from None
    return Value(number, name, operands)


def _exp(x):
    try:
        return math.exp(x)
    except OverflowError:  # also for an integer far below zero, which no float holds
        return math.inf if x > 0 else 0.0


def cells(name, values):
    """The cells of an array: ``cells("x", [5, 7])`` is ``{"x[0]": 5, "x[1]": 7}``; lists may be nested."""
    if isinstance(values, list | tuple):
        found = {}
        for index, value in enumerate(values):
            found |= cells(f"{name}[{index}]", value)
        return found
    return {name: values}


def _nested(found):
    """Nested lists from {(i, j, ...): number}."""
    if () in found:
        return found[()]
    parts = {}
    for index, number in sorted(found.items()):
        parts.setdefault(index[0], {})[index[1:]] = number
    return [_nested(part) for part in parts.values()]


def _number(what, number):
    if not isinstance(number, Real) or isinstance(number, bool):
        raise TypeError(f"{what} must be a real number, got {number!r}")
    return number.item() if hasattr(number, "item") else number  # NumPy's integers wrap around


def _plain(number):
    """A number as JSON knows it."""
    if isinstance(number, int):
        return number
    number = float(number)
    return number if math.isfinite(number) else str(number)
