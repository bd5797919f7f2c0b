"""The instruction set: one frozen record per instruction.

A program is a sequence of these records. Registers are numbers, written ``R0``, ``R1``,
...; memory cells are names such as ``a[0][1]`` or ``m``. The fields have the order of
the written operands, and ``str`` of a record is the written instruction::

    >>> str(MAC(0, 1, 2, 2))
    'MAC R0, R1, R2, R2'

An operand of the wrong type raises TypeError; a negative number or a malformed name
raises ValueError. The machine checks the rest when it runs a program: that a register
exists, that it holds a number and that it may feed the multiplier.
"""

import re
from dataclasses import dataclass, fields

CELL = re.compile(r"[A-Za-z_][A-Za-z_0-9]*(\[(0|[1-9][0-9]*)\])*")
REGISTER = re.compile(r"[Rr](0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Instruction:
    """The base of all instructions; not an instruction itself."""

    def __post_init__(self):
        for field in fields(self):
            operand = getattr(self, field.name)
            if field.type is str:
                expected, good = "a memory cell such as a[0][1]", is_cell(operand)
            else:
                expected = "a register (0 for R0)"
                good = type(operand) is int and operand >= 0
            if not good:
                error = ValueError if type(operand) is field.type else TypeError
                where = f"{type(self).__name__}: {field.name}"
                raise error(f"{where}: expected {expected}, got {_written(operand)}")

    def __str__(self):
        operands = [getattr(self, field.name) for field in fields(self)]
        texts = [x if isinstance(x, str) else _written(x) for x in operands]
        return f"{type(self).__name__} {', '.join(texts)}"

    @property
    def reads(self):
        """The registers that the instruction reads, in the order of its operands."""
        names = (f.name for f in fields(self) if f.type is int and f.name != "target")
        return tuple(getattr(self, name) for name in names)


@dataclass(frozen=True)
class LOAD(Instruction):
    """target = memory[source]."""

    source: str
    target: int


@dataclass(frozen=True)
class STORE(Instruction):
    """memory[cell] = value."""

    value: int
    cell: str


@dataclass(frozen=True)
class MAC(Instruction):
    """target = left * right + addend: multiply and accumulate."""

    left: int
    right: int
    addend: int
    target: int


@dataclass(frozen=True)
class Unary(Instruction):
    """The base of instructions with one operand; not an instruction itself."""

    value: int
    target: int


class EXP(Unary):
    """target = e to the power of value."""


class MOV(Unary):
    """target = value."""


@dataclass(frozen=True)
class Binary(Instruction):
    """The base of instructions with two operands; not an instruction itself."""

    left: int
    right: int
    target: int


class MAC_Z(Binary):
    """target = left * right: a multiply-accumulate that starts from zero."""


class MAX(Binary):
    """target = the larger of left and right."""


class SUB(Binary):
    """target = left - right."""


class ADD(Binary):
    """target = left + right."""


class MUL(Binary):
    """target = left * right."""


class DIV(Binary):
    """target = left / right."""


_ALL = LOAD, STORE, MAC_Z, MAC, MAX, SUB, EXP, ADD, MUL, DIV, MOV
INSTRUCTIONS = {cls.__name__: cls for cls in _ALL}


def _written(operand):
    return f"R{operand}" if type(operand) is int and operand >= 0 else repr(operand)


def is_cell(name):
    """Return whether ``name`` can be the name of a memory cell."""
    text = isinstance(name, str)
    return text and bool(CELL.fullmatch(name) and not REGISTER.fullmatch(name))


def check_instruction(number, entry):
    """Raise TypeError unless entry ``number`` of a program is an instruction."""
    if type(entry) not in _ALL:
        expected = f"expected an instruction as entry {number}"
        raise TypeError(f"program: {expected}, got {entry!r}")
