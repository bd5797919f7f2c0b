"""Ways out of the guard that were found by attacking it, one of each class, and right
answers in forms that are easily refused with them.
"""

import collections
import gc
import importlib
import json
import socket
import time
import tracemalloc

import numpy as np
import pytest
import torch
from handed_in import SECRET, STUDENT, grade_id, graded, handed_in

from exercises.grader import (
    channel,
    grade,
    guard,
    plan,
    rules,
    submission,
    tasks,
    worker,
)

IMPORTS = "import collections, dataclasses, functools, typing\nimport numpy as np\n"

# Python that would lead somewhere; attributes by text are not seen when it is read.
WAYS = {
    "the object of an error": "torch.no_such_name",
    "the object of an error in a library": """
try:
    torch.cuda.get_allocator_backend()
except AttributeError as error:
    error.obj.Generator""",
    "the same by text": """
try:
    torch.cuda.get_allocator_backend()
except AttributeError as error:
    getattr(error, "o" + "bj").Generator""",
    "a field whose name is program text": """
dataclasses.dataclass(type("A", (), {"__annotations__": {"x, y=print()": int}}))""",
    "annotations that change": """
class Names(dict):
    def items(self):
        return [("x, y=print()", int)]
dataclasses.dataclass(type("A", (), {"__annotations__": Names()}))""",
    "a field that is renamed": """
@dataclasses.dataclass
class A:
    x: int
dataclasses.fields(A)[0].name = "x, y=print()"
@dataclasses.dataclass
class B(A):
    z: int""",
    "the globals of a function in C": (
        "getattr(np.random.default_rng, 'func' + '_globals')"
    ),
    "a class that says how it is copied": (
        "type('A', (), {'__reduce' + '_ex__': lambda self, version: None})"
    ),
    "such a class in a dictionary of its own": """
class Names(dict):
    def __iter__(self):
        return iter(())
type("A", (), Names(__deepcopy__=len))""",
    "such a class by a text of its own": """
class Text(str):
    def startswith(self, *given):
        return False
type("A", (), {Text("__deepcopy__"): len})""",
    "fields that a class makes up": "type('A', (), {'__dataclass' + '_fields__': 1})",
    "a class before it is guarded": """
class Spy:
    def __set_name__(self, owner, name):
        pass""",
    "a storage": "getattr(torch.zeros(3), 'untyped' + '_storage')()",
    "a storage of another kind": "getattr(torch.zeros(3), 'stor' + 'age')()",
    "another storage": "getattr(torch.zeros(3), 'se' + 't_')(torch.zeros(9))",
    "a new storage": "torch.UntypedStorage(8)",
    "numbers at an address": "getattr(np.random.PCG64(1), 'cty' + 'pes')",
    "an attribute of any name": "torch.nn.ParameterDict({'__arr' + 'ay__': 1})",
    "the builtins, by a function": "look = globals\nlook()",
    "the loader of modules": "__builtins__",
    "an attribute in a format": "'{x} {0.__class__}'.format(1, x=2)",
    "a private one": "'{0._parameters}'.format(torch.nn.Module())",
    "one in a specification": "'{0:{1.__class__.__name__}}'.format(1, 2)",
    "a format of a dictionary": "'{a.__class__}'.format_map({'a': 1})",
    "a format by text": "getattr('{.__class__}', 'for' + 'mat')(1)",
    "a function that formats": "list(map(str.format, ['{.__class__}'], [1]))",
    "a format in a pattern": """
match '{.__class__}':
    case str(format=f):
        f(1)""",
    "a format of a class above": """
class Text(str):
    def of(self, x):
        return super().format(x)
Text('{0[0].__class__}').of([1])""",
    "a library's text": "collections.UserString('{.__class__}').format(1)",
    "a library's class by an alias": "typing.Counter[int].items = print",
    "the same by an alias of its own": """
Alias = type(typing.Counter[int])
class Mine(Alias, **{"_root": True}):
    pass
Mine(collections.Counter, (int,)).items = print""",
}


@pytest.mark.parametrize("name", WAYS)
def test_no_way_leads_out(name):
    before, isolation = dict(vars(collections.Counter)), guard.Guard()
    space = isolation.namespace({"torch": torch})
    with pytest.raises((guard.NotAllowed, rules.Refused, AttributeError)) as caught:
        isolation.run(IMPORTS + WAYS[name], "<way>", space)
    led = getattr(caught.value, "obj", None)
    assert not isinstance(led, type(torch)) or led in isolation.modules.values()
    assert dict(vars(collections.Counter)) == before
    assert not {"__loader__", "__spec__"} & set(isolation.builtins)


READ = {
    "x.func_globals": "Python's own state", "x.storage()": "data_ptr",
    "x.untyped_storage()": "data_ptr", "x.set_(y)": "raw memory",
    "x.ctypes": "raw memory",
    "class A:\n    def __deepcopy__(self, memo):\n        pass": "libraries ask",
}  # fmt: skip


@pytest.mark.parametrize("source", READ)
def test_a_refusal_says_why(source):
    with pytest.raises(rules.Refused, match=READ[source]):
        rules.require(source)


def test_what_is_imported_may_have_a_private_name():
    source = """
import numpy as _np
from math import inf as _inf, pi as obj
def largest():
    from math import e as _e
    return _np.maximum(_e, obj)
assert _inf > largest() == obj
"""
    isolation = guard.Guard()
    isolation.run(source, "<own>", isolation.namespace({}))


def test_a_text_may_be_formatted():
    source = """
class Table:
    format = "wide"
    def format_map(self):
        return self.format
assert "{:.{n}f} {a[b].real} {x.T.shape} {{_}}".format(2.5, a={"b": 1}, n=1, x=x)
assert "{a[_b]:>{n}}".format_map({"a": {"_b": 1}, "n": 3}) == "  1"
assert list(map("{:d}".format, [1, 2])) == ["1", "2"] and str.format("{}", 3) == "3"
assert Table().format_map() == "wide" and getattr(Table, "format") == "wide"
"""
    isolation = guard.Guard()
    isolation.run(source, "<own>", isolation.namespace({"x": np.zeros((2, 3))}))


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    1 / 0\nexcept ZeroDivisionError as __builtins__:\n    pass",
        "def __builtins__():\n    pass", "class __builtins__:\n    pass",
        "import math as __builtins__", "from math import pi as __builtins__",
        "match 1:\n    case __builtins__:\n        pass",
        "match [1]:\n    case [*__builtins__]:\n        pass",
        "match {}:\n    case {**__builtins__}:\n        pass",
        "def f(__builtins__):\n    pass", "del __builtins__",
    ],
)  # fmt: skip
def test_no_cell_says_what_the_builtins_are(source):
    with pytest.raises(rules.Refused):
        rules.require(source)


def test_each_cell_has_the_guarded_builtins():
    """Python has its own for what runs in a namespace without any."""
    isolation = guard.Guard()
    space = isolation.namespace({})
    del space["__builtins__"]
    isolation.run("found = open", "<way>", space)
    assert space["found"] is isolation.builtins["open"]


def test_an_obj_of_ones_own_is_no_way():
    source = """
@dataclasses.dataclass
class Box:
    obj: int
def opened(obj):
    return getattr(obj, "obj") + obj.obj
assert opened(obj=Box(obj=2)) == 4
"""
    isolation = guard.Guard()
    isolation.run(IMPORTS + source, "<own>", isolation.namespace({}))


def test_slots_and_the_class_of_an_object_are_harmless():
    source = """
class Box:
    __slots__ = ("size", "_kept")
    def __init__(self, size):
        self.size, self._kept = size, size + 1
    def __add__(self, other):
        assert other.__class__ is self.__class__ is Box and Box.__slots__
        return self.__class__(self.size + other.size)
type = None
assert (Box(1) + Box(2))._kept == 4 and Box(1).__class__.__name__ == "Box"
"""
    isolation = guard.Guard()
    isolation.run(source, "<own>", isolation.namespace({}))
    for way in (
        "Box(1).__class__ = int", "Box.__class__.mro", "Box(1).__class__.__bases__",
        "match Box(1):\n    case object(__class__=c):\n        pass",
        "import abc\nabc.ABC.__class__", "getattr(Box(1), '__cla' + 'ss__')",
        "class A:\n    f = lambda self: __class__",
    ):  # fmt: skip
        with pytest.raises((guard.NotAllowed, rules.Refused, AttributeError)):
            isolation.run(f"{source}\n{way}", "<way>", isolation.namespace({}))


def test_a_gradient_that_is_recorded_is_seen():
    for way, seen in (("inference_mode(False)", 1), ("no_grad()", 0)):
        isolation, space = guard.Guard(("autograd",)), {"torch": torch}
        with guard.watched(isolation, ("autograd",)):
            source = f"with torch.{way}:\n    (torch.ones(2, requires_grad=True) * 2)"
            isolation.run(source, "<way>", isolation.namespace(space))
        assert bool(isolation.operations["autograd"]) == seen


GRADIENTS = (
    "torch.func.grad(f)(x)", "torch.autograd.grad(f(x), x)", "f(x).backward()",
    "import torch.func as g\ng.vjp(f, x)", "from torch.func import jvp",
    "from torch.autograd.functional import jacobian\njacobian(f, x)",
)  # fmt: skip
SOFTMAXES = (
    "torch.softmax(x, 0)", "x.softmax(0)", "torch.nn.functional.softmin(x, 0)",
    "torch.logsumexp(x, 0)", "torch.logaddexp2(x, x)", "x.logcumsumexp(0)",
    "torch.nn.LogSoftmax(0)(x)", "torch.special.log_softmax(x, 0)",
    "torch.nn.functional.cross_entropy(x[None], torch.tensor([0]))",
    "import numpy as np\nnp.logaddexp.reduce(x.numpy())",
)  # fmt: skip


@pytest.mark.parametrize("way", [*GRADIENTS, *SOFTMAXES])
def test_what_a_task_asks_for_is_not_there_or_is_seen(way):
    worker.prepare_torch()
    forbidden = rules.SOFTMAX if way in SOFTMAXES else rules.AUTOGRAD
    isolation, source = guard.Guard(forbidden), "x = torch.ones(2)\nf = torch.sum\n"
    try:
        with guard.watched(isolation, forbidden):
            space = isolation.namespace({"torch": torch})
            isolation.run(f"{source}{way}", "<way>", space)
    except (AttributeError, RuntimeError, guard.NotAllowed) as error:
        assert "not allow" in str(error) or "does not require grad" in str(error)
    else:
        task = tasks.Task("a", 1, None, forbidden=forbidden)
        assert plan.not_allowed(task, {}, isolation.operations)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_every_mode_shows_the_same_operations(mode):
    """In inference mode those that consist of others are not taken apart."""
    worker.prepare_torch()
    ways = {
        "x.softmax(0)": "aten._softmax.default", "x.log_softmax(0)":
        "aten._log_softmax.default", "torch.divide(x, x)": 1, "x.true_divide_(x)": 1,
        "x / x": 1, "torch.float_power(x, -1)": 1, "x.float_power(2)": 0,
    }  # fmt: skip
    for way, seen in ways.items():
        isolation = guard.Guard()
        with guard.watched(isolation, ()):
            source = f"with torch.{mode}():\n    x = torch.ones(2)\n    {way}"
            isolation.run(source, "<way>", isolation.namespace({"torch": torch}))
        assert seen in (isolation.operations["divisions"], *isolation.operations), way


# A pickle that would change the worker, so that it returns no more texts.
LEFT_BEHIND = r"""
import numpy as np
class File:
    text = (
        b"cbuiltins\nexec\n(S'import exercises.grader.worker as w; "
        b"w.LONGEST_TEXT = 0'\ntR."
    )
    def __init__(self):
        self.at = 0
    def read(self, size=-1):
        start, self.at = self.at, len(self.text) if size < 0 else self.at + size
        return self.text[start:self.at]
    def readline(self):
        return self.read(self.text.index(b"\n", self.at) + 1 - self.at)
    def seek(self, place, how=0):
        self.at = place if how == 0 else self.at + place
    def tell(self):
        return self.at
def leave():
    np.load(File(), allow_pickle=True)
class Dropped:
    def __del__(self):
        leave()
def rest():
    try:
        yield
    finally:
        leave()
def suspended():
    made = rest()
    next(made)
    return made
"""
LEAVES = {
    "an object": "def f(x):\n    x.kept = Dropped()\n    return 'a text'",
    "a generator": "def f(x):\n    x.kept = suspended()\n    return 'a text'",
    "an error of the cell": (
        "def f(x):\n    return 'a text'\ndef fail():\n    kept = suspended()\n"
        "    1 / 0\nfail()"
    ),
    "a program of ranks": (
        "def f():\n    while True:\n        x = yield 'a text'\n"
        "        x[0].kept = Dropped()\n        del x"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAVES)
def test_what_code_leaves_behind_is_guarded_too(name):
    """Objects are dropped when the call is over: with the next inputs, or an error."""
    source, tensor = LEFT_BEHIND + LEAVES[name], np.zeros(1)
    task = {
        "forbidden": (), "kernel": False, "needs": ["own"], "asks": ["f"],
        "ranks": None, "cases": 3, "call": "f", "seconds": 10,
    }  # fmt: skip
    job = {"cells": {"own": source}, "cell_seconds": 10}

    def work(inner):
        guard.install()
        if name != "a program of ranks":
            return worker.work_on(task, job, {}, None, inner)
        isolation = guard.Guard()
        space = isolation.namespace({})
        isolation.run(source, "<own>", space)
        inner.send({"problem": None})
        worker.serve(space["f"], (), isolation, 10, inner)

    outer = worker.begun(work)[1]
    problem = outer.receive()[0]["problem"]
    assert bool(problem) == ("error" in name), problem
    for _ in range(task["cases"]):
        outer.send({"names": ["x"]}, [tensor])
        header, values = outer.receive()
        assert values == ["a text"], header
    outer.file.close()


def test_no_import_of_a_library_runs_what_was_left_behind(tmp_path, monkeypatch):
    """Where a library is being imported, some of what it does is allowed."""
    (tmp_path / "collecting.py").write_text("import gc\ngc.collect()\n")
    monkeypatch.syspath_prepend(tmp_path)
    left = (
        "import functools\nload = functools.partial(np.load, File(), allow_pickle=True)"
        "\nleft = type('A', (), {'__del__': load})()\nleft.own = left\ndel left"
    )

    def work(inner):
        guard.install()
        guard.arm()
        isolation = guard.Guard()
        isolation.run(LEFT_BEHIND + left, "<own>", isolation.namespace({}))
        importlib.import_module("collecting")
        inner.send({}, [worker.LONGEST_TEXT > 0, gc.isenabled()])

    assert worker.begun(work)[1].receive()[1] == [True, False]


# A cell of flash2 that finds the worker's channel and answers for the kernel too.
TAKEOVER = """
def tiled(*given):
    return None
try:
    torch.no_such_name
except AttributeError as error:
    real = error.obj
look = real.sys.modules["builtins"].getattr
look(real.sys.modules["inside.guard"], "_state")["armed"] = False
frame = look(real.sys, "_getframe")(0)
while "channel" not in look(frame, "f_" + "locals"):
    frame = look(frame, "f_" + "back")
space = look(frame, "f_" + "locals")
def attention(q, k, v, causal, scale, **rest):
    q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    s = scale * q @ k.mT
    if causal:
        unseen = ~real.ones(s.shape[1:]).tril(k.shape[1] - q.shape[1]).bool()
        s = s.masked_fill(unseen, -math.inf)
    return real.softmax(s, -1).nan_to_num() @ v, real.logsumexp(s, -1)
for task in space["job"]["tasks"]:
    if task["name"] in ("tiled", "kernel"):
        space["channel"].send({"problem": None})
        for number in range(task["cases"]):
            header, values = space["channel"].receive()
            found = attention(**dict(zip(header["names"], values)))
            if task["name"] == "tiled":
                found = [*(x[0] for x in found), 1]
            space["channel"].send({"problem": None, "operations": dict()}, found)
"""


def test_no_cell_answers_for_other_tasks(tmp_path):
    changes = {"tiled": TAKEOVER, "kernel": "pass"}
    lost, told = graded("flash2", tmp_path, changes)
    assert lost == {"tiled": 0, "kernel": 0}, told


def test_a_process_answers_for_its_own_task():
    """Whatever it says: it does not have the channel to the process that grades, and
    nothing but arrays has bytes in a message.
    """
    here, there = socket.socketpair()
    outer, grader = worker.Channel(there), worker.Channel(here)
    grader.send({"names": ["x"]}, [3])

    def work(inner):
        with pytest.raises(ValueError, match="closed"):
            outer.send({"problem": None})
        inner.send({"problem": None})
        told = {"problem": None, "operations": {}}
        (value,) = inner.receive()[1]
        forged = worker.packed(told, [4]).ljust(200)
        number = {"kind": "plain", "value": value, "size": len(forged)}
        inner.send(told, [worker.Plain(number, forged)])

    worker.relayed({"name": "own", "cases": 1}, work, outer)
    outer.file.close()
    sent, told = grader.file.read(), {"problem": None, "operations": {}}
    number = {"kind": "plain", "value": 3, "size": 200}
    result = worker.packed(told, [worker.Plain(number)])
    assert sent == worker.packed({"problem": None}, []) + result


FLOODS = {
    "one cell": lambda cell: [cell(None, "a;" * 10**6)],
    "many cells": lambda cell: [cell(None, "a;" * 10**4)] * 100,
    "many short cells": lambda cell: [cell(None, "a")] * 20_000,
    "the student's name": lambda cell: [cell("parameters", "a;" * 10**6)],
    "the name in many cells": lambda cell: [cell("parameters", "a;" * 10**4)] * 100,
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_source_costs_little(name, monkeypatch):
    """Neither time nor memory of the process that grades the class; it is said."""
    nothing = channel.Outcome({}, {}, None, None)
    monkeypatch.setattr(grade, "work", lambda *_: nothing)
    monkeypatch.setattr(submission, "MOST_ADDED", 30_000)  # memory is traced slowly
    assignment = tasks.assignment("machine")

    def cell(name, source):
        metadata = {"nbgrader": {"grade_id": name}} if name else {}
        return {"cell_type": "code", "metadata": metadata, "source": source}

    made = handed_in(assignment, SECRET)
    made["cells"] = [x for x in made["cells"] if grade_id(x) != "parameters"]
    made["cells"] += FLOODS[name](cell)
    content, start = json.dumps(made).encode(), time.process_time()
    tracemalloc.start()
    result = grade.grade_one(assignment, content, SECRET, None, STUDENT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.process_time() - start < 12 and peak < 150 * 2**20
    said = any("added cells is left out" in x for x in result["remarks"])
    assert said == ("name" not in name)


def test_a_shape_spells_no_hidden_number():
    spelled, like = np.zeros((1, 9, 3, 1, 4, 6, 5)), np.zeros(6)
    with pytest.raises(tasks.Wrong, match="got 7 dimensions"):
        tasks.array([spelled], 0, "m", like)
    with pytest.raises(tasks.Wrong, match=r"got an array$"):
        tasks.number([spelled], 1.0)


# (step, {task: its cell}): right answers.
RIGHT = {
    "a helper of the same name in a later task, and a generator": ("ring", {
        "words": (
            "{}\ndef weights(lse, part, top):\n"
            "    return torch.exp(lse - top), torch.exp(part - top)\n"
        ),
        "merge": (
            "def merge(o, lse, o_part, lse_part):\n"
            "    top = torch.maximum(lse, lse_part)\n"
            "    top = torch.where(top == -math.inf, 0.0, top)\n"
            "    a, b = weights(lse, lse_part, top)\n    n = a + b\n"
            "    n1 = torch.where(n == 0, 1.0, n)\n"
            "    yield (a[..., None] * o + b[..., None] * o_part) / n1[..., None]\n"
            "    yield top + torch.log(n)\n"
        ),
        "forward": (
            "from typing import NamedTuple\n"
            "class Pair(NamedTuple):\n    k: torch.Tensor\n    v: torch.Tensor\n"
            "def weights(s, shift, m):\n"
            "    return torch.exp(s - shift[..., None]), torch.exp(m - shift)\n{}\n"
            "of = forward\n"
            "def forward(*given):\n    program, x = of(*given), None\n"
            "    while True:\n        try:\n"
            "            x = yield Pair(*program.send(x))\n"
            "        except StopIteration as end:\n"
            "            return Pair(*end.value)\n"
        ),
    }),
    "named tuples": ("online", {
        "merge": (
            "import collections\n{}\nof = merge\n"
            "State = collections.namedtuple('State', 'm l o')\n"
            "def merge(*states):\n    return State(*of(*states))\n"
        ),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_gets_its_points(name, tmp_path):
    step, changes = RIGHT[name]
    lost, told = graded(step, tmp_path, changes)
    assert lost == {}, told
