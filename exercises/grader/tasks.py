"""What is asked, and how an answer is judged: cases from a secret, a judge for each.

The checks of an assignment are a module ``exercises/grader/checks/<step>.py`` with

    TASKS       a tuple of :class:`Task`, in the order of the notebook

The numbers of its pen-and-paper tasks, which each student has for themselves, come from
``flashlib.drawn``. Everything else that is random comes from ``rng``, a NumPy generator
that :func:`generator` makes from the instructor's secret: who does not know the secret
knows neither the numbers nor the shapes that count.
"""

import hashlib
import hmac
import importlib
import itertools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from exercises.grader import submission
from flashlib import drawn

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEPS = tuple(drawn.STEPS)
# The secret and the student of practice, known to everyone.
PRACTICE, NOBODY = b"practice", "practice"
# What rounding to four significant digits changes at most, as PARAMETERS tells.
ROUNDING = 5e-4
# The cell that gives a student their numbers.
PARAMETERS = """\
# Write your name between the quotes, as your instructor's list has it.
student = "{student}"

# These numbers are yours alone. In a task on paper, assign each answer as a number that
# is written out, such as `x = 0.25` or `x = 3 / 8`: a formula with names is not marked.
# Where a cell assigns an answer more than once, the last assignment counts.
# A count is exact; for any other number four significant digits are enough.
from flashlib import drawn

my_numbers = drawn.numbers("{step}", "{salt}", student)
{names} = my_numbers.values()
my_numbers
"""


class Wrong(Exception):
    """An answer is wrong; the text is for the student, without hidden values."""


class Case(NamedTuple):
    """One call: what kind of case it is, in words that may be shown; its keyword
    arguments; and ``own``, what the judge alone sees.
    """

    title: str
    arguments: dict
    own: Any = None


class Task(NamedTuple):
    """One graded cell, whose visible tests are the cell ``<name>-test``."""

    name: str  # the grade_id of the solution cell
    points: int  # the most it gives; each case gives the same share
    # judge(case, values, parameters) raises Wrong or AssertionError with a text for the
    # student; values are what was returned or ``reads``: arrays, numbers, texts, None.
    judge: Callable[[Case, list, dict], None]
    # cases(rng, parameters) makes the Cases; None for a task on paper.
    cases: Callable[[np.random.Generator, dict], list] | None = None
    # The function that is called with each case, or None where variables are read: then
    # every case judges the same values.
    call: str | None = None
    reads: tuple = ()  # the variables that the cell must define
    # Names that no module has while the task runs, such as "softmax"; what such a name
    # stands for in ``rules.OPERATIONS`` may not run either.
    forbidden: tuple = ()
    # The variables must be numbers that are written out: they are read, and the cell is
    # not run. The solution in the notebook is their key.
    paper: bool = False
    kernel: bool = False  # it defines Triton kernels only; a given cell launches them
    # limits(**arguments) is {what: most} of what is counted: "divisions" of blocks; in
    # a kernel also "largest", the elements of one access, and "loaded:0", those loaded
    # from the first tensor, and so on.
    limits: Callable[..., dict] | None = None
    kept: bool = False  # the arguments must be unchanged after the call
    ranks: str | None = None  # the given function that runs a program, one process each
    seconds: float = 20.0  # for each case, on the interpreter

    def rules(self):
        """The fields that are not functions: what a student may know."""
        return {name: x for name, x in self._asdict().items() if not callable(x)}


class Assignment(NamedTuple):
    """The checks of a step and its notebook as the instructor has it."""

    step: str
    tasks: tuple
    notebook: pathlib.Path

    def numbers(self, secret, student):
        """{name: number} of a student's pen-and-paper tasks under a secret."""
        return drawn.numbers(self.step, salt(secret), student)

    def numbered(self, secret, student):
        """The notebook, as a dict, with a student's numbers."""
        numbers = self.numbers(secret, student).items()
        return self._with("\n".join(f"{name} = {value!r}" for name, value in numbers))

    def unnumbered(self, secret):
        """The notebook, as a dict, whose cell ``parameters`` asks for the student."""
        student = NOBODY if secret == PRACTICE else ""
        names = ", ".join(self.numbers(secret, NOBODY))
        told = {"step": self.step, "salt": salt(secret), "student": student}
        return self._with(PARAMETERS.format(**told, names=names).rstrip())

    def _with(self, parameters):
        notebook = json.loads(self.notebook.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["metadata"].get("nbgrader", {}).get("grade_id") == "parameters":
                cell["source"] = parameters.splitlines(keepends=True)
        return notebook

    def solutions(self):
        """{task: source} of the solutions in the notebook."""
        wanted = [task.name for task in self.tasks]
        return submission.read(self.notebook.read_bytes(), wanted).cells

    def key(self, task, numbers):
        """The cases of a task on paper, one for each answer: what the solution in the
        notebook gives with a student's numbers.
        """
        space = {"math": math, **numbers}
        exec(self.solutions()[task.name], space)
        given = enumerate(task.reads)
        return [Case(name, {}, (place, space[name])) for place, name in given]

    def cases(self, task, secret, student):
        """The cases of a task under a secret."""
        numbers = self.numbers(secret, student)
        if task.paper:
            return self.key(task, numbers)
        return task.cases(generator(secret, self.step, task.name), numbers)


def assignment(step):
    """The Assignment of a step.

    Raises ValueError for a step that has none.
    """
    if step not in STEPS:
        raise ValueError(f"step: expected one of {', '.join(STEPS)}, got {step!r}")
    checks = importlib.import_module(f"exercises.grader.checks.{step}")
    return Assignment(step, checks.TASKS, ROOT / "source" / step / f"{step}.ipynb")


def salt(secret):
    """What students may know of a secret, from which their numbers follow."""
    return hashlib.sha256(b"numbers" + secret).hexdigest()[:16]


def generator(secret, *path):
    """A NumPy generator that only the secret and the path decide."""
    digest = hmac.new(secret, "/".join(path).encode(), hashlib.sha256).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def padded(d):
    """The power of two, at least 16, to which a launcher pads a side of a tile."""
    return max(16, 1 << (d - 1).bit_length())


def counted(largest, *loaded):
    """The limits of a kernel: the elements of one access, and those of each tensor."""
    return {"largest": largest} | {f"loaded:{n}": x for n, x in enumerate(loaded)}


def windowed(q, k, v, left, right, BLOCK_Q, BLOCK_K, **_):
    """The limits of a kernel that takes one block of q, k and v at a time: Q once for
    each block of keys; K and V for each block of queries, as far as a window shows
    them. A side of it may be None.
    """
    (H, T_q, d), T_k, B_r, B_c, read = q.shape, k.shape[1], BLOCK_Q, BLOCK_K, 0
    left, right = (T_q + T_k if side is None else side for side in (left, right))
    for row in range(0, T_q, B_r):
        first, last = row + T_k - T_q, min(row + B_r, T_q) - 1 + T_k - T_q
        begin = max(first - left, 0) // B_c * B_c
        end = min(-(-max(last + right + 1, 0) // B_c) * B_c, T_k)
        read += H * max(end - begin, 0)
    largest = max(B_r, B_c) * max(padded(d), padded(v.shape[2]))
    return counted(largest, -(-T_k // B_c) * q.size, read * d, read * v.shape[2], 0, 0)


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def normals(rng, dtype=np.float32, **shapes):
    """{name: array} of some shapes."""
    return {name: normal(rng, *shape, dtype=dtype) for name, shape in shapes.items()}


def whole(rng, low, high, count):
    """Some whole numbers from low to high - 1, all different, as Python has them."""
    drawn = rng.choice(np.arange(low, high), count, replace=False)
    return [int(n) for n in drawn]


def hidden(s, row=None, column=None):
    """Scores of which a row, and the columns from one on, are -inf."""
    i, j = np.indices(s.shape)
    last = s.shape[1] if column is None else column
    return np.where((i == row) | (j >= last), -np.inf, s)


def heads(rng, T_q, T_k, d=16, d_v=None, heads=(1, 1)):
    """{name: array} of q [H, T_q, d], k [H_kv, T_k, d] and v [H_kv, T_k, d_v]."""
    H, H_kv = heads
    return normals(rng, q=(H, T_q, d), k=(H_kv, T_k, d), v=(H_kv, T_k, d_v or d))


def launch(d, blocks=(32, 32), causal=False, gain=1.0, turned=False):
    """What a launcher of an attention kernel wants besides its tensors."""
    sizes = {"BLOCK_Q": blocks[0], "BLOCK_K": blocks[1], "turned": turned}
    return {"causal": causal, "scale": gain / math.sqrt(d), **sizes}


def attention_cases(case, rng, keys=0):
    """The cases of a causal kernel with grouped heads: case(title, T_q, T_k, **options)
    makes one, keys are added to the longest.
    """
    short, long = 33 + int(rng.integers(0, 20)), 70 + int(rng.integers(0, 20))
    narrow, wide = int(rng.integers(5, 16)), int(rng.integers(17, 30))
    return [
        case("whole blocks", 64, 64),
        case("lengths that no block divides", short, keys + long),
        case("values of another width", short, short, d=wide, d_v=narrow),
        case("large scores", short, long, gain=60.0),
        case("grouped heads", 35, 35, sides=(6, 2)),
        case("causal", long, long, causal=True),
        case("causal, more keys than queries", short, long, causal=True),
        case("causal, queries that see no key", long, short, causal=True),
        case("other block sizes", short, 64 + long, causal=True, blocks=(16, 64)),
        case("other strides", short, long, sides=(2, 2), turned=True),
    ]


def number(values, expected, *, name="the answer", unit="", error=ROUNDING):
    """Raise Wrong unless the only value is the number, if whole exactly."""
    (value,) = values
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Wrong(f"{name} must be a number, got {kind_of(value)}")
    error = 0 if isinstance(expected, int) else error
    if not abs(value - expected) <= error * abs(expected):
        raise Wrong(f"{name} is not {value}{unit and ' '}{unit}")


def paper(name, points, variables):
    """A Task of numbers that a cell sets; each gives the same share of the points."""
    return Task(name, points, judge_paper, reads=variables, paper=True)


def judge_paper(case, values, parameters):
    place, expected = case.own
    number([values[place]], expected, name=case.title)


def array(values, position, name, like=None, hint=""):
    """The value at a position as an array; raises Wrong where it is none.

    With ``like`` it must have the shape and dtype of that array, and be finite, with a
    hint in the message where it is not.
    """
    if position >= len(values):
        expected = f"{position + 1} values are expected, {len(values)} came"
        raise Wrong(f"{name} is missing: {expected}")
    value = values[position]
    if not isinstance(value, np.ndarray):
        raise Wrong(f"{name} must be a tensor, got {kind_of(value)}")
    if like is None:
        return value
    if value.shape != like.shape:  # more sides could spell a hidden number
        got = value.shape if value.ndim == like.ndim else f"{value.ndim} dimensions"
        raise Wrong(f"{name} must have the shape {like.shape}, got {got}")
    if value.dtype != like.dtype:
        raise Wrong(f"{name} must be {like.dtype}, got {value.dtype}")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise Wrong(f"{name} has entries that are not finite{hint}")
    return value


def exact(values, position, name, wanted):
    """Raise Wrong unless the value at a position is this array."""
    if not np.array_equal(array(values, position, name, wanted), wanted):
        raise Wrong(f"{name} is not right in every place")


def judge_schedule(values, results, words):
    """Raise Wrong unless the values are those of a schedule on the counting memory, as
    the launcher in the notebook returns them: its results, the words (loaded, stored)
    of each slow array, and the words that are still held at the end.

    results     {name: array}, what the schedule must leave in slow memory, float64
    words       {name: (loaded, stored)} of every slow array, in the launcher's order
    """
    if len(values) == len(results) + 2 and isinstance(values[-1], int) and values[-1]:
        raise Wrong(f"{values[-1]} words are still held at the end: free them")
    for position, (name, exact) in enumerate(results.items()):
        hint = ": was all of it stored, and nothing used after it was freed?"
        found = array(values, position, name, exact, hint)
        # float64: what is off by more than this is no rounding.
        if not np.allclose(found, exact, rtol=0, atol=1e-9):
            raise Wrong(f"{name} is wrong")
    wanted = np.array(list(words.values()))
    found = array(values, len(results), "the words", wanted)
    for name, own, right in zip(words, found, wanted, strict=True):
        if not np.array_equal(own, right):
            moves = f"{own[0]} words loaded and {own[1]} stored"
            raise Wrong(f"{name}: {moves}, which is not what it takes")


def judged(names, formula, zeros="", changed=lambda given: given, also=None):
    """A judge: the values in turn, as tensors, against formula(**arguments)[place],
    where a case's arrays are tensors, too.

    names, zeros         texts; what zeros names must be exactly 0 where the formula
                         is, however the inputs move
    changed(arguments)   those for the formula
    also(case, values)   judges what comes after these values
    """

    def judge(case, values, parameters):
        import torch  # an assignment without tensors is judged without PyTorch

        from flashlib.exercise import assert_agrees

        others = changed(case.arguments)
        arrays = {n: x for n, x in others.items() if isinstance(x, np.ndarray)}
        results = []  # of all names: assert_agrees draws the same inputs for each

        def result(place):
            turns = itertools.count()

            def evaluated(*tensors):
                if (turn := next(turns)) == len(results):
                    given = dict(zip(arrays, tensors, strict=True))
                    results.append(formula(**{**others, **given}))
                return results[turn][place]

            return evaluated

        given = [*map(torch.from_numpy, arrays.values())]
        for place, name in enumerate(names.split()):
            found = torch.from_numpy(array(values, place, name).copy())
            assert_agrees(name, found, result(place), *given)
            if name in zeros.split():
                # Elsewhere a zero is a difference that inputs which move do not keep.
                unseen = torch.stack([x[place] == 0 for x in results]).all(dim=0)
                if (found[unseen] != 0).any():
                    raise AssertionError(f"{name} is not 0 where nothing is seen")
        if also is not None:
            also(case, values)

    return judge


def with_ones(arguments):
    """Arguments with ``ones`` [T_q, 1], of which one rounding is one of L: P may be
    made as exp(S - L).
    """
    rows = next(iter(arguments.values())).shape[-2]
    return arguments | {"ones": np.ones((rows, 1), np.float32)}


def in_float32(arguments):
    """Arguments that are exact in float32: sums are to be made there."""
    arrays = {n: x for n, x in arguments.items() if isinstance(x, np.ndarray)}
    return arguments | {n: x.astype(np.float32) for n, x in arrays.items()}


def attention(q, k, v, causal=False, scale=1.0, **_):
    """O [H, T_q, d_v] and L [H, T_q] of attention, with grouped heads."""
    from flashlib.reference import standard

    heads = (x[None] for x in (q, k, v))
    return [x[0] for x in standard.attention(*heads, causal=causal, scale=scale)]


def held(*names):
    """What judges a launcher that counts the numbers it holds at once: no more than
    the largest of these arguments, or of the results, has.
    """

    def require(case, values):
        *results, count = values
        room = max(x.size for x in [*(case.arguments[n] for n in names), *results])
        if count > room:
            held = f"{count} numbers were held at once (see the launcher)"
            raise Wrong(f"{held}, and the largest of {', '.join(names)} has {room}")

    return require


def kind_of(value: Any):
    """What a value is, for a message."""
    if value is None:
        return "nothing (the function returns None, or the variable is not set)"
    if isinstance(value, np.ndarray):
        return "an array"
    return str(getattr(value, "type_name", type(value).__name__))
