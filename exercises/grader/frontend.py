"""Kernel cells: Triton decides what a kernel is.

Of a kernel cell, only the ``@triton.jit`` functions and constants count. The
interpreter runs a kernel as Python, so it would run much that is no kernel. Before a
launch, a process in which Triton compiles therefore brings the kernel to TTIR, Triton's
first representation, with the types and constants of this launch. That takes no GPU.

Triton does not read what a constant condition skips. For that reason a kernel may name
nothing but itself, other kernels, constants, and what Triton's language offers.

This file runs in the sandbox, and on a student's own machine when ``check.py`` runs.
"""

import ast
import importlib
import inspect
import math
import os
import sys

from . import guard, rules

MODULES = {"math", "triton", "triton.language", "triton.language.math"}
DECORATORS = {"autotune", "heuristics", "jit"}
BUILTINS = {x.__name__: x for x in (
    abs, bool, float, int, len, list, max, min, print, range, tuple,
)}  # fmt: skip
ALLOWED = "a part of Triton's language that this task allows"
# What objects of the language have besides the public names of their classes.
ATTRIBUTES = {"dtype", "element_ty", "shape", "type"}


class NotTriton(rules.Refused):
    """Triton does not compile a kernel."""


def offered(forbidden):
    """The names and attributes that a kernel may use; no module leads elsewhere."""
    import triton.language as tl

    found = {"cdiv", "language", "math", "next_power_of_2", "tl", "triton", *BUILTINS}
    for part in (tl, tl.math, tl.tensor, tl.dtype, math):
        public = {name for name in dir(part) if not name.startswith("_")}
        found |= {x for x in public if not inspect.ismodule(getattr(part, x, None))}
    return (found | ATTRIBUTES) - set(forbidden)


class Cells:
    """What kernel cells [(name, source)] define: ``kernels`` {name: kernel} and
    ``options`` {name: {option: its value in the first configuration of an autotuned
    kernel, or the function that computes it}}.

    known       the kernels of the notebook, which ``given`` has
    forbidden   functions that this task does not allow

    Raises Refused for a name that is no part of Triton's language.
    """

    def __init__(self, cells, given, known, forbidden):
        import triton
        import triton.language

        self.kernels, self.options, self.aliases = {}, {}, {}
        self.told = {"cells": cells, "known": [*known], "forbidden": [*forbidden]}
        self.space = {"__builtins__": BUILTINS, "__name__": "submission", "math": math,
                      "tl": triton.language, "triton": triton}  # fmt: skip
        self.space |= {name: given[name] for name in known if name in given}
        self.offered = offered(forbidden)
        for name, source in cells:
            guard.remember(name, source)
            for node in rules.tree_of(source).body:
                value = getattr(node, "value", None)
                if isinstance(node, ast.Import | ast.ImportFrom):
                    self._import(node)
                elif isinstance(node, ast.FunctionDef):
                    self._function(node, name, source.split("\n"))
                elif isinstance(node, ast.Assign | ast.AnnAssign) and value:
                    self._constant(node)

    def _import(self, node):
        """Bind what comes from Triton's language; a kernel cannot use other imports."""
        for alias in node.names:
            if isinstance(node, ast.Import):
                path = alias.name if alias.asname else alias.name.split(".")[0]
            else:
                path = f"{node.module}.{alias.name}"
            name = alias.asname or path.split(".")[-1]
            if path in MODULES:
                self.space[name] = importlib.import_module(path)
            elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
                self.aliases[name] = alias.name
                if alias.name in self.offered:
                    module = importlib.import_module(node.module)
                    self.space[name] = getattr(module, alias.name)

    def _require(self, node):
        """Raise Refused for a name that is not offered, wherever it is."""
        own = {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
        names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
        own |= {x.id for x in names if not isinstance(x.ctx, ast.Load)}
        for name in names:
            if name.id == "NotImplementedError":  # as nbgrader leaves a cell
                raise NotImplementedError
            if name.id not in own | self.offered | set(self.space):
                what = f"a kernel, a constant, or {ALLOWED}"
                rules.refuse(name, f"{name.id} is not {what}")
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and inner.attr not in self.offered:
                rules.refuse(inner, f"{inner.attr} is not {ALLOWED}")

    def _constant(self, node):
        """Bind the value of a constant; leave out what is not one."""
        import triton.language as tl

        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        try:
            self._require(node.value)
            code = compile(ast.Expression(node.value), "<constant>", "eval")
            value = eval(code, dict(self.space))
        except Exception:
            return
        if isinstance(value, bool | int | float | str | tl.constexpr | tl.dtype):
            for target in targets:
                if isinstance(target, ast.Name):
                    self.space[target.id] = value

    def _function(self, node, name, lines):
        calls = [getattr(x, "func", x) for x in node.decorator_list]
        ends = [getattr(x, "attr", getattr(x, "id", "")) for x in calls]
        ends = [self.aliases.get(end, end) for end in ends]
        if "jit" not in ends:
            return
        if other := set(ends) - DECORATORS:
            rules.refuse(node, f"{other.pop()}: a kernel's decorators are Triton's")
        options = {}
        for decorator, end in zip(node.decorator_list, ends, strict=True):
            found = [x for x in ast.walk(decorator) if isinstance(x, ast.Dict)]
            for inner in found[:1]:
                for key, value in zip(inner.keys, inner.values, strict=True):
                    read = self._heuristic if end == "heuristics" else ast.literal_eval
                    options[ast.literal_eval(key)] = read(value)
        node.decorator_list = []
        # The interpreter takes the last line that begins with def for the first.
        for number in range(node.lineno, node.end_lineno + 1):
            if lines[number - 1].strip().startswith("def ") != (number == node.lineno):
                said = "in a kernel, one line alone begins with def"
                raise rules.Refused(f"line {number}: {said}", number)
        self._require(node)
        exec(compile(ast.Module([node], []), name, "exec"), self.space)
        kernel = importlib.import_module("triton").jit(self.space[node.name])
        self.space[node.name] = self.kernels[node.name] = kernel
        self.options[node.name] = options

    def _heuristic(self, node):
        """A function of a launch's arguments, of which it sees the numbers only."""
        if not isinstance(node, ast.Lambda):
            rules.refuse(node, "write a heuristic as a lambda")
        self._require(node)
        code = compile(ast.Expression(node), "<heuristic>", "eval")
        function = eval(code, self.space)

        def of_numbers(arguments):
            plain = bool, int, float, str
            given = {n: x for n, x in arguments.items() if type(x) in plain}
            value = function(given)
            if type(value) not in plain:
                rules.refuse(node, "a heuristic gives a number")
            return value

        return of_numbers


# -- the process in which Triton compiles


def checked(channel, found):
    """{name: kernel} of what Cells found in this process; each launch first asks the
    process at the other end of a Channel, and raises NotTriton where that refuses.
    """
    for name, kernel in found.kernels.items():
        told = {**found.told, "kernel": name}
        kernel.run = _asking(channel, kernel, found.options[name], told)
    return found.kernels


def _asking(channel, kernel, options, told):
    signature, run, seen = inspect.signature(kernel.fn), kernel.run, set()
    parameters = signature.parameters.items()
    constant = {name: "constexpr" in str(x.annotation) for name, x in parameters}

    def launch(*args, grid, warmup, **more):
        more = {**options, **more}
        arguments = dict(zip(constant, args, strict=False)) | more
        for name, x in options.items():
            if callable(x):  # a heuristic
                arguments[name] = more[name] = x(arguments)
        own = {name: x for name, x in more.items() if name in constant}
        bound = signature.bind(*args, **own)
        bound.apply_defaults()
        types, constants = {}, {}
        for name, x in bound.arguments.items():
            types[name] = "constexpr" if constant[name] else type_of(x)
            if constant[name]:
                constants[name] = x
        key = str((types, constants))
        if key not in seen:
            channel.send(told | {"types": types, "constants": constants})
            answer, _ = channel.parts()
            if answer["text"] is not None:
                raise NotTriton(answer["text"], answer["line"])
            seen.add(key)
        return run(*args, grid=grid, warmup=warmup, **more)

    return launch


def type_of(value):
    """Triton's name for the type of an argument of a launch."""
    from triton._utils import type_canonicalisation_dict as names

    if isinstance(value, tuple):
        return [type_of(x) for x in value]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    return "*" + names[str(value.dtype).rpartition(".")[2]]


def serve(define, channel):
    """Answer what comes over a Channel: what Triton has against a kernel, or None.

    define()    runs the instructor's cells: their namespace, and what went wrong
    """
    os.environ["TRITON_INTERPRET"] = "0"
    for name in [*sys.modules]:  # where the interpreter is in this process already
        if name.split(".")[0] in ("flashlib", "triton") and "._C" not in name:
            del sys.modules[name]
    given, known = None, {}
    while True:
        (asked, _), answer = channel.parts(), {"line": None, "text": None}
        try:
            given = define()[0] if given is None else given
            key = str((asked["cells"], asked["forbidden"]))
            if key not in known:
                names = asked["known"], asked["forbidden"]
                known[key] = Cells(asked["cells"], given, *names).kernels
            lower(known[key][asked["kernel"]], asked["types"], asked["constants"])
        except BaseException as error:
            answer |= explained(error, known.get(key, {}).values())
        channel.send(answer)


def lower(kernel, types, constants):
    """Bring a kernel to TTIR."""
    from triton._C.libtriton import ir
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def tuples(found):
        return tuple(map(tuples, found)) if isinstance(found, list) else found

    target = GPUTarget("cuda", 89, 32)  # the first that has numbers of eight bits
    backend, context = backends["nvidia"].compiler(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    types = {name: tuples(found) for name, found in types.items()}
    source = ASTSource(kernel, types, constants)
    source.make_ir(target, options, *functions, context)


def explained(error, kernels):
    """{line: where in a student's cell, text: Triton's message} of a refusal."""
    first = {kernel.src: kernel.starting_line_number for kernel in kernels}
    line, text = getattr(error, "line", None), f"{type(error).__name__}: {error}"
    while error is not None:
        node = getattr(error, "node", None)
        if getattr(error, "src", None) in first and hasattr(node, "lineno"):
            line = first[error.src] + node.lineno - 1
        text = getattr(error, "error_message", None) or text
        error = error.__cause__
    return {"line": line, "text": text}
