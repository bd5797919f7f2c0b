"""Programs as text, one instruction per line, such as ``LOAD a[0][0], R0``.

Empty lines and comments, which begin with ``#``, are ignored. Names of instructions and
registers may be lowercase. ``assemble(disassemble(program)) == program`` for every
program.
"""

from dataclasses import fields

from .isa import INSTRUCTIONS, REGISTER, check_instruction


def assemble(text):
    """Return the program that a text describes, as a tuple of instructions.

    Raises TypeError when ``text`` is not a string, and ValueError with the line's
    number for an unknown instruction, a wrong number of operands, or a register where
    a memory cell belongs or the other way around.
    """
    if not isinstance(text, str):
        raise TypeError(f"text: expected a string, got {type(text).__name__}")
    return tuple(_instruction(line, f"line {n} ({line})") for n, line in lines(text))


def lines(text):
    """Return (number, instruction) of the lines of a program that have an instruction,
    without comments; the first line is number 1.
    """
    bare = [line.split("#")[0].strip() for line in text.splitlines()]
    return [(number, line) for number, line in enumerate(bare, start=1) if line]


def _instruction(line, where):
    name, _, rest = " ".join(line.split()).partition(" ")
    cls = INSTRUCTIONS.get(name.upper())
    if cls is None:
        expected = ", ".join(INSTRUCTIONS)
        raise ValueError(f"{where}: expected one of {expected}, got {name!r}")
    operands = [operand.strip() for operand in rest.split(",")] if rest else []
    names = [field.name for field in fields(cls)]
    if len(operands) != len(names):
        takes = f"{cls.__name__} takes {len(names)} operands ({', '.join(names)})"
        raise ValueError(f"{where}: {takes}, got {len(operands)}")
    try:
        return cls(*map(_operand, operands))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _operand(text):
    register = REGISTER.fullmatch(text)
    return int(register[1]) if register else text


def disassemble(program):
    """Return the text of a program; TypeError for what is not an instruction."""
    program = tuple(program)
    for number, instruction in enumerate(program, start=1):
        check_instruction(number, instruction)
    return "".join(f"{instruction}\n" for instruction in program)
