"""The exercises that ask for a program, and who judges them.

A program is right when, on several inputs, it leaves the numbers that a program of
:mod:`flashlib.machine.programs` leaves, and takes no more than the exercise allows.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from . import programs
from .machine import Machine, cells

INPUTS = 6
TOLERANCE = 1e-9  # between orders of a short sum in float64


@dataclass(frozen=True)
class Exercise:
    """One exercise; its key in EXERCISES is its label in the book after ex-machine-."""

    title: str
    registers: int
    reference: tuple  # a program with the same results, for any machine
    most: dict  # {"cycles", "loads" or "stores": how many are allowed}
    ports: str = "fixed"
    state: Callable = None  # for steps of a running state, such as softmax_state
    one_sum: bool = False  # whether an element is stored before the next one begins

    @property
    def machine(self):
        return Machine(self.registers, self.ports)

    def inputs(self, number):
        """(memory, registers) of input ``number``; 0 is that of the book."""
        own, registers = self.state(number) if self.state else ({}, {})
        memory = examples(number) | own
        # All of a matrix, but no more of a row than the exercise is about.
        needed = {step.source for step in self.reference if hasattr(step, "source")}
        matrices = {cell[0] for cell in needed} - {"x"}
        wanted = [cell for cell in memory if cell in needed or cell[0] in matrices]
        return {cell: memory[cell] for cell in wanted}, registers


def examples(number):
    """The cells of 2 x 2 matrices a and b and of a row x of four numbers, as floats:
    integers would grow without limit. Number 0 has the matrices of the chapter.
    """
    chance = random.Random(number)
    a, b = ([[float(chance.choice((-1, 1)) * chance.randint(1, 9)) for _ in range(2)]
             for _ in range(2)] for _ in range(2))  # fmt: skip
    if number == 0:
        a, b = [[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]
    # Rising, falling and mixed rows, so that the running maximum has to move; in the
    # last one exponentials overflow unless the maximum is subtracted.
    spread = 2 if number < INPUTS - 1 else 1000
    x = [round(chance.gauss(0, spread), 2) for _ in range(4)]
    x = [sorted(x), sorted(x, reverse=True), x][number % 3]
    return {**cells("a", a), **cells("b", b), **cells("x", x)}


def softmax_state(number):
    """Return the cells that an input has in addition to its examples, here none, and
    the registers that hold the state before and after the program: a maximum and a sum.
    """
    chance = random.Random(number)
    return {}, {1: round(chance.uniform(-2, 2), 2), 2: round(chance.uniform(1, 3), 2)}


def welford_state(number):
    """Return the same for Welford's algorithm: an element and 1; how many elements
    there were, their mean and z.
    """
    chance = random.Random(number)
    x, mean = (round(chance.gauss(0, 9), 2) for _ in range(2))
    state = float(number), mean, round(chance.uniform(1, 99), 2)
    if number == 1:
        state = 0.0, 0.0, 0.0  # before the first element
    if number in (0, INPUTS - 1):
        # The book's 4, 7, 13 and then 16, also around 1e9. There a difference of
        # squares cancels, and every step of Welford's algorithm is exact.
        far = 1e9 if number else 0.0
        x, state = 16 + far, (3.0, 8 + far, 42.0)
    return {"x[1]": x, "one": 1.0}, dict(enumerate(state, start=1))


# fmt: off
EXERCISES = {
    "c00": Exercise(
        "The first element", 3, programs.dot(2), {"cycles": 7}),
    "locality": Exercise(
        "Fewer than 28", 3, programs.inner_product(2), {"cycles": 27}),
    "outer": Exercise(
        "Six registers", 6, programs.outer_product(2), {"cycles": 22}),
    "inner-six": Exercise(
        "The inner product with six registers", 6, programs.inner_product(2),
        {"cycles": 20}, ports="any", one_sum=True),
    "safe": Exercise(
        "Safe softmax with three registers", 3, programs.safe_softmax(3),
        {"loads": 9, "stores": 3}),
    "online": Exercise(
        "Online softmax with four registers", 4, programs.online_step(1),
        {"cycles": 9}, state=softmax_state),
    "eight": Exercise(
        "Eight instead of nine", 4, programs.online_step(1) + programs.online_step(2),
        {"cycles": 16}, state=softmax_state),
    "turn": Exercise(
        "Turn around", 3, programs.safe_softmax(4), {"loads": 10, "stores": 4}),
    "three-online": Exercise(
        "Online with three registers", 3, programs.online_step(1),
        {"loads": 2}, state=softmax_state),
    "welford-program": Exercise(
        "Welford on the machine", 5, programs.welford_step(1),
        {"cycles": 9}, state=welford_state),
}
# fmt: on


def compared(run, reference, memory, registers):
    """Return [(place, the number that a run has left there or None, the right one)] of
    every place, in memory or among these registers, in which a reference leaves one.
    """
    right = Machine(40, "any").run(reference, memory, registers)
    wanted = {cell: x for cell, x in right.memory.items() if cell not in memory}
    wanted |= {f"R{register}": right.registers[register] for register in registers}
    found = run.memory | {f"R{i}": x for i, x in enumerate(run.registers)}
    return [(place, found.get(place), x) for place, x in wanted.items()]


def judge(exercise, program):
    """Return what is wrong with a program as one sentence, "" if it solves the
    exercise.

    Raises ValueError, as ``Machine.run`` does, for an illegal program.
    """
    for number in range(INPUTS):
        memory, registers = exercise.inputs(number)
        run = exercise.machine.run(program, memory, registers)
        for place, found, x in compared(run, exercise.reference, memory, registers):
            if found is None:
                return f"Nothing is stored in {place}."
            if not math.isclose(found, x, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                said = f"{place} holds {found:.4g}, expected {x:.4g}, for "
                said += ", ".join(f"{cell} = {x:.12g}" for cell, x in memory.items())
                if registers:
                    held = (f"R{i} = {x:.12g}" for i, x in registers.items())
                    said += f", starting with {', '.join(held)}"
                return f"{said}."
    for count, most in exercise.most.items():
        if getattr(run, count) > most:
            return (
                f"The result is right. It takes {getattr(run, count)} {count}; find a "
                f"program with at most {most}."
            )
    if exercise.one_sum and _sums_at_once(run) > 1:
        return "The result is right. But a sum begins before the last one is stored."
    return ""


def _sums_at_once(run):
    """The most sums begun and not yet stored, if none is stored in between."""
    open_sums = most = 0
    for step in run.trace:
        name = type(step.instruction).__name__
        open_sums += (name == "MAC_Z") - (name == "STORE")
        most = max(most, open_sums)
    return most
