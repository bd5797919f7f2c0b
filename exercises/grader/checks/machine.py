"""Assignment *machine*: programs handed in as text, which run on other numbers."""

import itertools
import math

import numpy as np

from exercises.grader.tasks import Case, Task, Wrong, kind_of, number, paper
from flashlib.machine import Machine, assemble, cells, exercises, programs


def solved(name, text, machine, reference, memory, registers=(), error=1e-9):
    """What a program handed in does; Wrong where it is no program, breaks off, or
    leaves other numbers than a reference, in memory or in the registers that are given.

    The memory holds floats. With whole numbers, which have no largest one, a short
    program could fill the memory of this process.
    """
    if not isinstance(text, str):
        raise Wrong(f"{name} must be the text of a program, got {kind_of(text)}")
    try:
        done = machine.run(assemble(text), memory, dict(registers))
    except ValueError as refused:
        raise Wrong(f"{name}: {refused}") from None
    for place, found, x in exercises.compared(done, reference, memory, dict(registers)):
        if found is None:
            raise Wrong(f"{name} stores nothing in {place}")
        if not abs(found - x) <= error * (1 + abs(x)):  # NaN is wrong too
            raise Wrong(f"{name} does not leave the right number in {place}")
    return done


def within(what, count, limit):
    if count > limit:
        allowed = f"at most {limit} are allowed here"
        raise Wrong(f"the program takes {count} {what}, {allowed}")


# -- matrix products


def matrices(n):
    """Two matrices with n rows. No two elements of their product are equal, so a
    program cannot store one in the place of another.
    """
    rng = np.random.default_rng(n)
    while True:
        signs = rng.choice((-1, 1), (2, n, n))
        a, b = rng.integers(1, 100, (2, n, n)) * signs
        if len(np.unique(a @ b)) == n * n:
            return a, b


def product_run(name, text, machine, n, reference=None):
    """Run a program on matrices with n rows, against a reference or the product.

    The matrices need not be secret: a program has no constants, and can only compute.
    """
    a, b = (x.astype(float).tolist() for x in matrices(n))
    reference = reference or programs.inner_product(n)
    return solved(name, text, machine, reference, cells("a", a) | cells("b", b))


def product_cases(rng, numbers):
    limits = {
        "one element": None,
        "all four elements": math.inf,
        "all four in fewer than 28 cycles": 27,
        "all four in the fewest cycles": 25,
    }
    return [Case(title, {}, own=limit) for title, limit in limits.items()]


def judge_product(case, values, numbers):
    element, product = values
    if case.own is None:
        one = programs.dot(3, numbers["row"], numbers["column"])
        done = product_run("element", element, Machine(3), 3, one)
    else:
        done = product_run("product", product, Machine(3), 2)
    within("cycles", done.cycles, case.own or 10)


def outer_cases(rng, numbers):
    rows, found = {"two rows": 2, "more rows": int(rng.integers(4, 7))}, []
    for name, n in rows.items():
        limits = {"the product": math.inf, "the fewest cycles": 2 * n**3 + n**2 + n}
        found += [Case(f"{name}: {x}", {"n": n}, own) for x, own in limits.items()]
    return found


def judge_outer(case, values, numbers):
    n = case.arguments["n"]
    done = product_run("the program", values[0], Machine(n * n + 2), n)
    within("cycles", done.cycles, case.own)


def six_cases(rng, numbers):
    orders = "one element after the other", "the fewest cycles"
    return [Case(x, {}, own=x) for x in ("the product", *orders, "fixed ports")]


def judge_six(case, values, numbers):
    inner, fixed_cycles = values
    if case.own == "fixed ports":
        number([fixed_cycles], 25, name="fixed_cycles")
        return
    done = product_run("inner", inner, Machine(6, "any"), 2)
    elements = filter(None, map(element_of, done.trace))
    order = [element for element, _ in itertools.groupby(elements)]
    if case.own == "one element after the other" and len(order) != len(set(order)):
        raise Wrong("inner begins an element before the one at work is finished")
    within("cycles", done.cycles, 20 if case.own == "the fewest cycles" else math.inf)


def element_of(step):
    """(i, j) of the element to which a step adds a product, or None."""
    if type(step.instruction).__name__ not in ("MAC", "MAC_Z"):
        return None
    a, b = sorted(operand.name for operand in step.registers[step.target].operands[:2])
    return (a[:4], b[4:]) if a.startswith("a[") and b.startswith("b[") else None


# -- softmax


def softmax_cases(rng, numbers):
    def case(title, x, fewest=False):
        return Case(title, {"n": len(x)}, own=(x.astype(np.float32), fewest))

    size = int(rng.integers(5, 10))
    x = rng.standard_normal(size)
    first = np.argmin(x)  # so that the running maximum has to move
    x[[0, first]] = x[[first, 0]]
    large = 1000 * np.abs(x)
    return [
        case("one number", x[:1]),
        case("several numbers", 3 * x),
        case("numbers of any size", np.concatenate([-large, large])),
        case("the fewest cycles", x, fewest=True),
    ]


def rising_cases(rng, numbers):
    size = int(rng.integers(5, 10))
    own = 3 * np.sort(rng.standard_normal(size)).astype(np.float32), False
    rising = Case("every number larger than the last", {"n": size}, own)
    return [*softmax_cases(rng, numbers), rising]


def judged_softmax(program, registers, loads, cycles, shift):
    """A judge of softmax programs, of n * cycles - shift cycles."""

    def judge(case, values, numbers):
        x, fewest = case.own
        memory, n = cells("x", x.astype(float).tolist()), len(x)
        machine = Machine(registers)
        done = solved("the program", values[0], machine, program(n), memory)
        within("stores", done.stores, n)
        within("loads", done.loads, loads * n)
        if fewest:
            within("cycles", done.cycles, cycles * n - shift)

    return judge


# -- variance


def variance_cases(rng, numbers):
    def draw(count):
        return [float(x) for x in rng.integers(-9, 10, count)]

    def case(title, *own):
        return Case(title, {}, own)

    size = int(rng.integers(5, 10))
    far = float(2 ** int(rng.integers(24, 28)))
    return [
        case("the first number", [], [float(rng.integers(1, 10))]),
        case("one number more", [*draw(size), 12.0], draw(1)),
        case("a row of numbers", [], [*draw(size), 11.0]),
        case("a mean far from zero", [], [far + x for x in [*draw(size), 11.0]]),
    ]


def judge_variance(case, values, numbers):
    seen, coming = case.own
    step, state = programs.welford_step(1), dict.fromkeys((1, 2, 3), 0.0)
    for place, x in enumerate([*seen, *coming]):
        memory = {"x": x, "x[1]": x, "one": 1.0}  # the book's program loads x[1]
        if place >= len(seen):
            given = values[0], Machine(5), step, memory, state
            within("loads", solved("step", *given, error=1e-6).loads, 2)
        registers = Machine(5).run(step, memory, state).registers
        state = {n: registers[n] for n in state}


TASKS = (
    Task("product", 4, judge_product, product_cases, reads=("element", "product")),
    Task("outer", 4, judge_outer, outer_cases, call="outer_product"),
    Task("six", 4, judge_six, six_cases, reads=("inner", "fixed_cycles")),
    paper("intensity", 3, ("inner_intensity", "outer_intensity", "free_intensity")),
    Task("safe", 4, judged_softmax(programs.safe_softmax, 3, 3, 11, 1), softmax_cases,
         call="safe_softmax"),
    Task("online", 5, judged_softmax(programs.online_softmax, 4, 2, 14, 4),
         rising_cases, call="online_softmax"),
    Task("variance", 4, judge_variance, variance_cases, reads=("step",)),
)  # fmt: skip
