"""What the figure `machine` runs in the reader's browser: a program, its counts, and
the judge of an exercise. `register_machine.py` packs this module and flashlib.machine
for Pyodide; only the standard library is at hand.
"""

import json
import re

from flashlib.machine import Machine, assemble
from flashlib.machine.assembler import lines
from flashlib.machine.exercises import EXERCISES, examples, judge
from flashlib.stepper.frame import count_text
from flashlib.stepper.program import show_program

ALT = "The program, the registers and the memory, one step at a time"
COUNTS = ("cycles", "loads", "stores")


def answer(name, text, registers=3, ports="fixed"):
    """Run a program; return JSON for the page.

    name       a key of EXERCISES, whose machine is used, or "" for a program of the
               reader's own on the machine described by ``registers`` and ``ports``

    {"said", "solved", "figure", "cycles", "loads", "stores"}, or {"said", "line"} with
    the number of the line where a program is wrong, None where it is not in one line.
    """
    try:
        return json.dumps(_answer(name, text, registers, ports))
    except (TypeError, ValueError) as error:
        line, said = _located(str(error), text)
        return json.dumps({"said": said, "line": line})


def _answer(name, text, registers, ports):
    program = assemble(text)
    if not program:
        raise ValueError("There is no instruction yet.")
    exercise = EXERCISES.get(name)
    machine = exercise.machine if exercise else Machine(registers, ports)
    run = machine.run(program, *(exercise.inputs(0) if exercise else [examples(0)]))
    fault = judge(exercise, program) if exercise else ""
    counts = {count: getattr(run, count) for count in COUNTS}
    said = [", ".join(count_text(n, count[:-1]) for count, n in counts.items()) + "."]
    said += [fault or "Solved."] if exercise else []
    title = exercise.title if exercise else "Your program"
    return counts | {
        "said": " ".join(said),
        "solved": bool(exercise) and not fault,
        "figure": show_program(run, title=title, alt=ALT)._repr_html_(),
    }


def _located(error, text):
    """(line, message) of an error: the machine counts instructions, readers count
    lines.
    """
    found = re.match(r"(line|instruction) (\d+) (.*)", error, re.DOTALL)
    if not found:
        return None, error
    number = int(found[2])
    if found[1] == "instruction":
        number = lines(text)[number - 1][0]
    return number, f"Line {number} {found[3]}"
