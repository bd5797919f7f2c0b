"""The instruction set: one frozen record for each instruction (chapter *A machine with three registers*).

A program is a sequence of these records. Registers are numbers, written ``R0``, ``R1``, ...; memory cells are
names such as ``a[0][1]`` or ``m``. The fields stand in the order of the written operands, and ``str`` of a
record is the written instruction::

    >>> str(MAC(0, 1, 2, 2))
    'MAC R0, R1, R2, R2'

A record is refused when an operand is not a register number or a cell's name: TypeError for another type,
ValueError for a negative number or a malformed name. Whether a register exists, whether it holds anything and
whether it may feed the multiplier is the machine's business (:mod:`flashlib.machine.machine`).
"""

import re
from dataclasses import dataclass, fields

CELL = re.compile(r"[A-Za-z_][A-Za-z_0-9]*(\[(0|[1-9][0-9]*)\])*")
REGISTER = re.compile(r"[Rr](0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Instruction:
    """What all instructions have in common; not an instruction itself."""

    def __post_init__(self):
        for field in fields(self):
            operand = getattr(self, field.name)
            where = f"{type(self).__name__}: {field.name}"
            if field.type is str:
                if not isinstance(operand, str):
                    raise TypeError(f"{where} must be the name of a memory cell, got {operand!r}")
                if not CELL.fullmatch(operand) or REGISTER.fullmatch(operand):
                    raise ValueError(f"{where} must name a memory cell, such as a[0][1], got {operand!r}")
            else:
                if not isinstance(operand, int) or isinstance(operand, bool):
                    raise TypeError(f"{where} must be the number of a register, got {operand!r}")
                if operand < 0:
                    raise ValueError(f"{where} must be the number of a register, 0 or more, got {operand}")

    def __str__(self):
        operands = (getattr(self, field.name) for field in fields(self))
        texts = (operand if isinstance(operand, str) else f"R{operand}" for operand in operands)
        return f"{type(self).__name__} {', '.join(texts)}"

    @property
    def reads(self):
        """The registers that it reads, in the order in which they are written."""
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
class MAC_Z(Instruction):
    """target = left * right: a multiply-accumulate that starts from zero."""

    left: int
    right: int
    target: int


@dataclass(frozen=True)
class MAC(Instruction):
    """target = left * right + addend: multiply and accumulate."""

    left: int
    right: int
    addend: int
    target: int


@dataclass(frozen=True)
class MAX(Instruction):
    """target = the larger of left and right."""

    left: int
    right: int
    target: int


@dataclass(frozen=True)
class SUB(Instruction):
    """target = left - right."""

    left: int
    right: int
    target: int


@dataclass(frozen=True)
class EXP(Instruction):
    """target = e to the power of value."""

    value: int
    target: int


@dataclass(frozen=True)
class ADD(Instruction):
    """target = left + right."""

    left: int
    right: int
    target: int


@dataclass(frozen=True)
class MUL(Instruction):
    """target = left * right."""

    left: int
    right: int
    target: int


@dataclass(frozen=True)
class DIV(Instruction):
    """target = left / right."""

    left: int
    right: int
    target: int


@dataclass(frozen=True)
class MOV(Instruction):
    """target = value."""

    value: int
    target: int


INSTRUCTIONS = {cls.__name__: cls for cls in (LOAD, STORE, MAC_Z, MAC, MAX, SUB, EXP, ADD, MUL, DIV, MOV)}
