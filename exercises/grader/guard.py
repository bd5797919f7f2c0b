"""Where a student's cells run: a namespace of their own, and a record of what runs.

Cells get stand-ins for modules, which hold what the module offers and lead to no other
module. Changing a stand-in changes nothing for anybody else. The given cells have a
namespace of their own, with the modules themselves; only the functions and kernels that
a task asks for get into it, as its cell defines them.

This file runs in the sandbox, and on a student's own machine when ``check.py`` runs.
"""

import ast
import builtins
import collections
import contextlib
import dataclasses
import functools
import gc
import importlib
import linecache
import re
import resource
import string
import sys
import types
import typing
import weakref

from . import rules

# What may compile or run texts while a student's code is at work: their own.
WRITERS = {
    module.__file__ for module in (collections, dataclasses, typing, ast, importlib)
} | {f"<frozen importlib.{name}>" for name in ("_bootstrap", "_bootstrap_external")}
REFUSED_EVENTS = (
    "code.", "ctypes.", "function.", "gc.", "mmap.", "os.", "pickle.", "shutil.",
    "socket.", "subprocess.", "sys.set", "_thread.",
)  # fmt: skip
HARMLESS_EVENTS = {"os.listdir", "os.scandir", "sys.setswitchinterval"}
# Names that no stand-in has: they look up or set attributes by texts, read raw memory,
# or start what cannot be followed.
CLOSED = {
    "ParameterDict": ("torch.nn",), "UserString": ("collections",),
    "as_strided": ("numpy.lib.stride_tricks",), "attrgetter": ("operator",),
    "autotune": ("triton",), "compile": ("torch", "triton"),
    "get_type_hints": ("typing",), "jit": ("triton",),
    "make_dataclass": ("dataclasses",), "methodcaller": ("operator",),
    "update_wrapper": ("functools",),
}  # fmt: skip


class NotAllowed(Exception):
    """Student code asked for what no solution may do."""


# By these attributes NumPy and PyTorch ask an object for an address in memory.
ADDRESSES = "array_interface", "array_struct", "cuda_array_interface", "dlpack"


class NoMemory:
    """An attribute that nobody finds or sets, whatever an instance holds."""

    def __get__(self, value, kind=None):
        raise AttributeError("an object of a solution has no memory of its own")

    __set__ = __delete__ = __get__


# Setting an attribute of one of these, such as typing.Counter[int], sets it on a class.
ALIASES = type(typing.Counter), type(typing.Counter[int])
OWN_CLASSES = weakref.WeakSet()  # those that students' code has built


def harmless(kind):
    """A student's new class, whose objects cannot have a foreign memory."""
    if isinstance(kind, type):
        for name in ADDRESSES:
            type.__setattr__(kind, f"__{name}__", NoMemory())
        OWN_CLASSES.add(kind)
    return kind


def built(*how, **options):
    """What a class statement makes."""
    if options.get("metaclass", kind_of) is not kind_of:  # it could return any class
        raise NotAllowed("the class of a class")
    return harmless(builtins.__build_class__(*how, **options))


def kind_of(value, *definition):
    """``type`` as students have it: no class makes classes past ``harmless``."""
    if definition:
        names = definition[-1]  # exact types: others could say something else later
        plain = type(names) is dict and all(type(name) is str for name in names)
        if not plain or any(name.startswith(rules.PRETENDING) for name in names):
            raise NotAllowed("a class that pretends to be something else")
        return harmless(type(value, *definition))
    kind = type(value)
    if kind is type:
        return kind_of
    if issubclass(kind, type):
        raise NotAllowed("the class of a class")
    return kind


def own(value):
    """An object that a student's code may change: no class of a library."""
    others = isinstance(value, type) and value not in OWN_CLASSES
    if others or isinstance(value, ALIASES):
        raise NotAllowed("a class of a library is not yours to change")
    return value


def found(value):
    """What a student's code looks up; a text's ``format`` keeps the source's rules."""
    method = type(value) is types.BuiltinMethodType and isinstance(value.__self__, str)
    function = type(value) is types.MethodDescriptorType and value.__objclass__ is str
    if not (method or function) or value.__name__ not in rules.FORMATS:
        return value

    def formatted(*given, **named):
        left = [value.__self__ if method else given[0]]
        while left:
            for _, field, specification, _ in string.Formatter().parse(left.pop()):
                left += [specification] if specification else []
                for name in re.findall(r"\.([^.[]*)", field or ""):
                    if rules.refused_attribute(name) or rules.private(name) != name:
                        raise NotAllowed("this attribute is not allowed in a solution")
        return value(*given, **named)

    return formatted


class Guard:
    """The isolation of one task.

    forbidden   names that no module has in this task
    operations  how often what was used of them, and PyTorch's operations that have run
    """

    def __init__(self, forbidden=()):
        self.forbidden = set(forbidden)
        # Written in C, unlike Counter: nothing changes how this one counts.
        self.operations = collections.defaultdict(int)
        self.modules = {}
        self.builtins = dict(vars(builtins))
        del self.builtins["__loader__"], self.builtins["__spec__"]  # real modules
        self.builtins |= dict.fromkeys(("type", rules.TYPE), kind_of)
        self.builtins |= {"__build_class__": built, rules.OWN: own, rules.FOUND: found}
        for name in (rules.REMOVED | self.forbidden) & set(self.builtins):
            self.builtins[name] = self._removed(name)
        self.builtins["__import__"] = self._import
        self.builtins["display"] = lambda *values: None
        for name in ("getattr", "setattr", "delattr", "hasattr"):
            self.builtins[name] = self._by_text(vars(builtins)[name])

    @staticmethod
    def _removed(name):
        def refuse(*_, **__):
            why = "it reads files, waits for input, runs texts, or finds names by text"
            raise NotAllowed(f"{name}() is not allowed in a solution: {why}")

        return refuse

    def _by_text(self, action):
        """getattr and its like, under the same rules as an attribute in the source."""

        @functools.wraps(action)
        def look(value, name, *rest):
            if type(name) is not str or rules.refused_attribute(name, self.forbidden):
                raise NotAllowed("this attribute is not allowed in a solution")
            if action in (setattr, delattr):
                own(value)
            return found(action(value, rules.private(name), *rest))

        return look

    def _import(self, name, globals=None, locals=None, fromlist=(), level=0):
        if type(fromlist) is list:
            # PyTorch's own C code asks so, and takes the module from sys.modules.
            importlib.import_module(name)
            return None
        if level or name not in rules.MODULES | rules.INNER_MODULES:
            may = "math, numpy, torch, triton and what only computes"
            raise NotAllowed(f"import of {name}: a solution may import {may}")
        made = self.module(name)
        return made if fromlist else self.module(name.split(".")[0])

    def module(self, path):
        """The stand-in of a module."""
        if self.forbidden & set(path.split(".")):
            raise NotAllowed(f"import of {path}: this task does not allow it")
        if path in self.modules:
            return self.modules[path]
        if path.startswith("triton"):
            importlib.import_module("flashlib.kernels")
        real = importlib.import_module(path)
        made = self.modules[path] = types.ModuleType(path)

        def find(name):
            if name == "__all__":
                return [x for x in vars(real) if x[0] != "_" and hasattr(made, x)]
            if name.startswith("_") and name != "__version__":
                raise AttributeError(f"{path} has no public {name}")
            if name in self.forbidden:
                self.operations[f"{path}.{name}"] += 1
                raise AttributeError(f"{path}.{name} is not allowed in this task")
            if path in CLOSED.get(name, ()) or name.endswith("Storage"):
                raise AttributeError(f"{path}.{name} is not allowed in a solution")
            value = getattr(real, name, made)
            if value is made:  # the module's own error would lead to the module
                raise AttributeError(f"{path} has no {name}")
            inner = isinstance(value, types.ModuleType)
            closed = inner and value.__name__ not in rules.MODULES | rules.INNER_MODULES
            if closed or (isinstance(value, type) and issubclass(value, type)):
                raise AttributeError(f"{path}.{name} is not allowed in a solution")
            value = self.module(value.__name__) if inner else value
            value = DECORATORS.get((path, name), value)
            vars(made)[name] = value
            return value

        made.__getattr__ = find
        return made

    def namespace(self, given):
        """A namespace for the student's cells, with what the given cells define."""
        space = {"__name__": "submission", "__builtins__": self.builtins}
        for name, value in given.items():
            if isinstance(value, types.ModuleType):
                path = value.__name__
                own = path in rules.MODULES | rules.INNER_MODULES
                if own and path.split(".")[0] not in self.forbidden:
                    space[name] = self.module(path)
            elif not name.startswith("__") and name not in self.forbidden:
                space[name] = value
        return space

    def run(self, source, name, space):
        """Execute a cell of Python in a namespace."""
        with at_work(armed=False):  # nothing of it runs yet
            tree = rules.Private().visit(rules.require(source, self.forbidden))
            remember(name, source)
            code = compile(ast.fix_missing_locations(tree), name, "exec")
        space["__builtins__"] = self.builtins  # exec sets Python's where it has none
        with at_work(code):
            exec(code, space)


# Decorators that set attributes of what they are given.


def owned(decorator):
    """A decorator of what a student's code may change."""
    return lambda given: decorator(own(given))


def dataclass(kind=None, /, **options):
    def decorate(kind):  # with slots it builds another class
        given = vars(own(kind)).get("__annotations__", {})
        fields = [vars(x).get("__dataclass_fields__", {}) for x in kind.__mro__]
        names = [*given, *(x.name for of in fields for x in of.values())]
        named = all(type(x) is str and x.isidentifier() for x in names)
        if type(given) is not dict or not named:  # they become program text
            raise NotAllowed("a field whose name is not a name")
        return harmless(dataclasses.dataclass(**options)(kind))

    return decorate if kind is None else decorate(kind)


DECORATORS = {
    ("dataclasses", "dataclass"): dataclass,
    ("functools", "total_ordering"): owned(functools.total_ordering),
    # Without the choice of attributes.
    ("functools", "wraps"): lambda wrapped: owned(functools.wraps(wrapped)),
}


def remember(name, source):
    """Keep a cell's lines where Triton and tracebacks look for them."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)


# -- while a student's code runs

_state = {"armed": False, "codes": set()}


def arm():
    """From now on a student's code is at work in this process: what it leaves behind
    may run whenever an object is dropped (``__del__``, the rest of a generator).
    Garbage is not collected, which could be while a library is being imported.
    """
    _state["armed"] = True
    gc.disable()


@contextlib.contextmanager
def at_work(code=None, armed=True):
    """Within this context the audit hook refuses what no solution does, or nothing. No
    file grows there either: processes could share it as their memory.
    """
    before, limits = dict(_state), resource.getrlimit(resource.RLIMIT_FSIZE)
    _state.update(armed=armed, codes=before["codes"] | {code})
    size = 0 if armed else limits[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        _state.update(before)


def install():
    """Refuse, from now on and in this process, texts that are run as code, foreign
    memory, files, processes and threads while a student's code is at work.
    """
    state, compilers, frame_of = _state, set(WRITERS), sys._getframe
    if "triton.runtime" in sys.modules:
        interpreter = importlib.import_module("triton.runtime.interpreter")
        compilers.add(interpreter.__file__)
    runners = compilers - {typing.__file__}
    readable = (".py", ".pyc", ".so")

    def hook(event, arguments):
        if not state["armed"]:
            return
        if event == "exec":
            file = frame_of(1).f_code.co_filename
            allowed = arguments[0] in state["codes"] or file in runners
        elif event == "compile":
            allowed = frame_of(1).f_code.co_filename in compilers
        elif event == "open":
            path, mode = arguments[:2]
            allowed = type(path) is str and path.endswith(readable)
            allowed = allowed and mode in (None, "r", "rb")
        else:
            allowed = event in HARMLESS_EVENTS or not event.startswith(REFUSED_EVENTS)
        pickled = event.startswith("pickle.")  # no library is imported from one
        if not allowed and (pickled or not importing(frame_of(1))):
            raise NotAllowed(f"{event.split('.')[0]} is not allowed in a solution")

    sys.addaudithook(hook)


def importing(frame):
    """Whether a library is being imported, on behalf of another library."""
    while frame is not None and not frame.f_code.co_filename.startswith("<given-"):
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib"):
            return True
        if name.startswith("<") and not name.startswith("<frozen"):
            return False
        frame = frame.f_back
    return False


# What divides, and what a division can be written with: l ** -1, or exp(-log(l)).
DIVISIONS = {
    "addcdiv", "div", "floor_divide", "log", "log10", "log1p", "log2", "reciprocal",
    "rsqrt",
}  # fmt: skip


def divides(name, args):
    """Whether one of PyTorch's operations, such as aten.div_.Tensor, divides."""
    operation = name.split(".")[1].rstrip("_")
    if operation == "pow":
        constant = isinstance(args[1], int | float)
        return not isinstance(args[0], int | float) and not (constant and args[1] >= 0)
    return operation in DIVISIONS


def recorder(operations):
    """A new mode that records which of PyTorch's operations run."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            name = str(function)
            operations[name] += 1
            operations["divisions"] += divides(name, args)
            if torch.is_grad_enabled():  # which by_hand has turned off
                operations["autograd"] += 1
            if any("__torch_dispatch__" in vars(kind) for kind in kinds):
                raise NotAllowed("a tensor class of its own")
            with self:  # in inference mode operations come whole: softmax, divide
                parts = function.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
            return function(*args, **(kwargs or {}))

    return Recorder()


@contextlib.contextmanager
def by_hand(operations):
    """Within this context nothing differentiates; an attempt is an operation."""
    from unittest import mock

    import torch
    from torch.autograd import forward_ad

    def refuse(*_, **__):
        operations["autograd"] += 1
        raise NotAllowed("autograd is not allowed in this task")

    engines = mock.patch.object(torch.autograd, "_engine_run_backward", refuse)
    forward = mock.patch.object(forward_ad, "make_dual", refuse)
    nested = mock.patch.object(torch._C._functorch, "_jvp_increment_nesting", refuse)
    with engines, forward, nested, torch.no_grad():
        yield


@contextlib.contextmanager
def watched(guard, forbidden):
    """The context of a call of student code: operations are recorded in the guard, and
    nothing differentiates where the task asks for a gradient by hand.
    """
    with contextlib.ExitStack() as stack:
        if "torch" in sys.modules:
            stack.enter_context(recorder(guard.operations))
            if "autograd" in forbidden:
                stack.enter_context(by_hand(guard.operations))
        stack.enter_context(at_work())
        yield
