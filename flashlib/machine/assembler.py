"""Programs as text: one instruction a line, as in ``LOAD a[0][0], R0`` (chapter *A machine with three
registers*).

Empty lines, and everything behind a ``#``, are left out. Names of instructions and registers may be written
in
small letters. ``assemble(disassemble(program)) == program`` for every program.
"""

from dataclasses import fields

from .isa import CELL, INSTRUCTIONS, REGISTER, Instruction


def assemble(text):
    """The program that a text describes, as a tuple of instructions.

    Raises TypeError when ``text`` is no string; ValueError, with the number of the line, for an unknown
    instruction, a wrong number of operands, or an operand that is not the register or the memory cell that it
    has to be.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, got {type(text).__name__}")
    program = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.split("#")[0].strip()
        if line:
            program.append(_instruction(line, f"line {number} ({line})"))
    return tuple(program)


def _instruction(line, where):
    name, *rest = line.split(None, 1)
    rest = "".join(rest)
    cls = INSTRUCTIONS.get(name.upper())
    if cls is None:
        raise ValueError(f"{where}: expected one of {', '.join(INSTRUCTIONS)}, got {name!r}")
    operands = [operand.strip() for operand in rest.split(",")] if rest.strip() else []
    expected = fields(cls)
    if len(operands) != len(expected):
        names = ", ".join(field.name for field in expected)
        raise ValueError(
            f"{where}: {cls.__name__} takes {len(expected)} operands ({names}), got {len(operands)}"
        )
    values = []
    for field, operand in zip(expected, operands, strict=True):
        register = REGISTER.fullmatch(operand)
        if field.type is int:
            if not register:
                raise ValueError(f"{where}: {field.name} must be a register such as R0, got {operand!r}")
            values.append(int(register[1]))
        else:
            if register or not CELL.fullmatch(operand):
                raise ValueError(
                    f"{where}: {field.name} must be a memory cell such as a[0][1], got {operand!r}"
                )
            values.append(operand)
    return cls(*values)


def disassemble(program):
    """The text of a program, one instruction a line. Raises TypeError for what is not an instruction."""
    lines = []
    for number, instruction in enumerate(program, start=1):
        if not isinstance(instruction, Instruction):
            raise TypeError(f"program: entry {number} must be an instruction, got {instruction!r}")
        lines.append(f"{instruction}\n")
    return "".join(lines)
