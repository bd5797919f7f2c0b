"""What the source of a solution cell may not contain, found by reading it, before
anything runs.

The sandbox keeps a submission from doing harm. These rules keep it to the task: an
answer is computed by the student's own code, not by a library's attention, and not by
taking the worker apart. They are stated in every assignment, and a refusal names the
line.

Names are compared as they are written, so nothing may hide what a name means. A module
is used through its attributes only (``x = torch.nn.functional`` is followed,
``f(torch)`` is refused), attributes are not looked up by texts, and names of the given
cells mean the same in every cell.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import symtable
import types
from typing import NamedTuple

MODULES = {
    "math",
    "itertools",
    "functools",
    "numpy",
    "torch",
    "triton",
    "triton.language",
}
# What else of them may be reached. PyTorch's and NumPy's other modules lead to files,
# to processes, and to texts that are run.
INNER_MODULES = {
    "flashlib.kernels", "numpy.fft", "numpy.lib", "numpy.lib.stride_tricks", "numpy.linalg", "numpy.random",
    "torch.autograd", "torch.autograd.functional", "torch.cuda", "torch.fft", "torch.func",
    "torch.functional", "torch.linalg", "torch.nn", "torch.nn.functional", "torch.random", "torch.special",
    "triton.language.extra", "triton.language.extra.cuda", "triton.language.extra.cuda.libdevice",
    "triton.language.extra.libdevice", "triton.language.math",
}  # fmt: skip
KERNEL_MODULES = {
    "math",
    *(name for name in MODULES | INNER_MODULES if name.startswith("triton")),
}
# Solutions have a few thousand characters, and take an alias of an alias at most.
LONGEST_CELL = 50_000
LONGEST_DETOUR = 8
# Names of the given cells that mean the same in every cell.
LIBRARIES = {
    "math": "math", "np": "numpy", "numpy": "numpy", "tl": "triton.language", "torch": "torch",
    "triton": "triton",
}  # fmt: skip
# Ways to run code that cannot be read, or to reach what the worker is made of.
NAMES = {
    "breakpoint", "compile", "delattr", "eval", "exec", "exit", "getattr", "globals", "input", "locals",
    "memoryview", "open", "quit", "setattr", "vars",
}  # fmt: skip
ATTRIBUTES = {
    "DataSource", "attrgetter", "builtins", "classes", "ctypes", "ctypeslib", "from_file", "fromfile",
    "fromregex", "genfromtxt", "hub", "importlib", "inspect", "library", "load", "loadtxt", "memmap",
    "methodcaller", "modules", "ops", "os", "overrides", "package", "save", "savetxt", "savez",
    "savez_compressed", "serialization", "subprocess", "sys", "tofile", "update_wrapper", "utils", "wraps",
}  # fmt: skip
# From a generator or an exception to the frames of those who called, the worker's among
# them.
FRAMES = {
    "ag_await", "ag_code", "ag_frame", "cr_await", "cr_code", "cr_frame", "cr_origin", "f_back", "f_builtins",
    "f_code", "f_generator", "f_globals", "f_locals", "f_trace", "gi_code", "gi_frame", "gi_yieldfrom",
    "tb_frame", "tb_next",
}  # fmt: skip
# Attention as others have written it.
ATTENTION = {
    "MultiheadAttention", "Transformer", "TransformerDecoder", "TransformerDecoderLayer",
    "TransformerEncoder", "TransformerEncoderLayer", "attention", "flex_attention",
    "multi_head_attention_forward", "scaled_dot_product_attention",
}  # fmt: skip
# In the interpreter a tile carries a NumPy array, which no GPU has.
KERNEL_NAMES = {"handle"}

# For tasks that ask for a softmax: its names, and PyTorch's operations behind them and
# behind others.
SOFTMAX = (
    "LogSoftmax", "Softmax", "Softmax2d", "Softmin", "log_softmax", "logaddexp", "logaddexp2", "logcumsumexp",
    "logsumexp", "softmax", "softmin",
)  # fmt: skip
SOFTMAX_OPERATIONS = (
    "aten._log_softmax", "aten._safe_softmax", "aten._softmax", "aten.logaddexp", "aten.logaddexp2",
    "aten.logcumsumexp", "aten.logsumexp",
)  # fmt: skip
# For tasks that ask for a gradient: what differentiates, and the operations that show
# that it did.
AUTOGRAD = (
    "autograd", "backward", "enable_grad", "func", "grad", "gradcheck", "hessian", "jacfwd", "jacobian",
    "jacrev", "jvp", "linearize", "requires_grad", "requires_grad_", "set_grad_enabled", "vjp",
)  # fmt: skip
AUTOGRAD_OPERATIONS = ("aten._log_softmax_backward_data", "aten._softmax_backward_data")


class Refused(Exception):
    """A solution cell that will not be run; the text is for the student."""


class Around(NamedTuple):
    """What the other cells mean by names.

    before    functions, classes and imports of the given cells above
    anywhere  the same of all given cells
    classes   those of ``anywhere`` that are classes
    modules   {name: module} of the submission's other cells
    """

    before: frozenset = frozenset()
    anywhere: frozenset = frozenset()
    classes: frozenset = frozenset()
    modules: types.MappingProxyType = types.MappingProxyType({})


ALONE = Around()


def require(source, forbidden=(), kernel=False, around=ALONE):
    """Raise Refused unless the source of a cell is Python that keeps to the rules.

    forbidden   further names that the task does not allow, such as "softmax"
    kernel      the cell defines kernels and nothing else, so it uses no PyTorch and no NumPy
    around      what names mean in the other cells
    """
    tree, table = _read(source)
    banned = {*ATTENTION, *forbidden, *(KERNEL_NAMES if kernel else ())}
    allowed = KERNEL_MODULES if kernel else MODULES | INNER_MODULES
    for node in ast.walk(tree):
        _inspect(node, banned, allowed)
    _require_own_names(tree, table, around)
    _require_plain_modules(tree, around, allowed)
    if kernel:
        for node in tree.body:
            _require_kernel(node)


def _read(source):
    """(syntax tree, symbol table) of a cell."""
    if len(source) > LONGEST_CELL:
        raise Refused(
            f"the cell has {len(source)} characters, more than the {LONGEST_CELL} that are read"
        )
    try:
        return ast.parse(source), symtable.symtable(source, "cell", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" in line {error.lineno}" if getattr(error, "lineno", None) else ""
        text = getattr(error, "msg", None) or str(error)
        raise Refused(f"the cell is not Python{line}: {text}") from None


def _refuse(node, what):
    raise Refused(f"line {node.lineno}: {what}")


def _inspect(node, banned, allowed):
    """Refuse a node for the names in it."""

    def refuse_name(name, what="is not allowed in this task"):
        if name in banned or name in ATTRIBUTES | FRAMES:
            _refuse(node, f"{name} {what}")
        if name.startswith("_"):
            _refuse(
                node,
                f"attribute {name}: names that begin with an underscore are not allowed",
            )

    if isinstance(node, ast.Import | ast.ImportFrom):
        relative = isinstance(node, ast.ImportFrom) and (
            node.level or node.module is None
        )
        names = (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
        for name in names:
            if relative or name not in allowed:
                listed = ", ".join(sorted(allowed & MODULES))
                _refuse(
                    node,
                    f"import of {name or 'a relative module'}; this task may import {listed}",
                )
            if set(name.split(".")) & (banned | ATTRIBUTES):
                _refuse(node, f"import of {name} is not allowed in this task")
        for alias in node.names:
            meant = (
                alias.name
                if isinstance(node, ast.Import)
                else f"{node.module}.{alias.name}"
            )
            if LIBRARIES.get(alias.asname, meant) != meant:
                _refuse(node, f"{alias.asname} is the name of something else")
            if alias.name == "*":
                _refuse(node, "import * hides what it imports; import the names")
            for part in alias.name.split("."):
                refuse_name(part)
    elif isinstance(node, ast.Attribute):
        # tl.load is no file, and neither is a schedule's memory.
        owner = node.value.id if isinstance(node.value, ast.Name) else None
        if node.attr != "load" or owner not in {"tl", "memory"} or "load" in banned:
            refuse_name(node.attr)
    elif isinstance(node, ast.MatchClass):
        for name in node.kwd_attrs:
            refuse_name(name)
    elif isinstance(node, ast.Name):
        if node.id in NAMES or node.id.startswith("__"):
            _refuse(node, f"{node.id} is not allowed in a solution")
        if node.id in banned and isinstance(node.ctx, ast.Load):
            _refuse(node, f"{node.id} is not allowed in this task")


# -- what names mean


def given_names(source):
    """(functions, classes and imports of a given cell; those of them that are
    classes).
    """
    names, classes = set(), set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            classes |= {node.name} if isinstance(node, ast.ClassDef) else set()
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            names |= bound
            classes |= {name for name in bound if name[0].isupper()}
    return names, classes


def _tables(table):
    """A symbol table and all inside of it."""
    left = [table]
    while left:
        left += left[0].get_children()
        yield left.pop(0)


def _bound(node):
    """The names that a node binds or declares: targets, parameters, definitions,
    patterns, ``global``. What is imported under a name of its own counts too.
    """
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.Global | ast.Nonlocal):
        return node.names
    if isinstance(node, ast.alias):
        return (
            []
            if LIBRARIES.get(node.asname or node.name) == node.name
            else [node.asname or node.name]
        )
    if isinstance(node, ast.keyword):
        return []
    return [
        name
        for name in (getattr(node, field, None) for field in ("arg", "name", "rest"))
        if name
    ]


def _require_own_names(tree, table, around):
    """Refuse a cell that gives another meaning to a library's name, or to what a given
    cell defines.
    """
    bound = {}
    for node in ast.walk(tree):
        for name in _bound(node):
            bound.setdefault(name, []).append(node)

    def refuse(name, what):
        _refuse(min(bound[name], key=lambda node: node.lineno), f"{name} {what}")

    for name in bound:
        if name in LIBRARIES or (name == "kernels" and name in around.before):
            refuse(name, "is the name of something else")
    for place in _tables(table):
        for symbol in place.get_symbols():
            name, top = symbol.get_name(), place.get_type() == "module"
            if (
                name in bound
                and name in around.anywhere
                and symbol.is_declared_global()
                and not top
            ):
                refuse(name, "is given, and not yours to change")
            binds = name in bound and (symbol.is_assigned() or symbol.is_imported())
            if binds and name in around.before and top:
                refuse(name, "is given: choose another name")


@functools.cache
def _module(path):
    """One of the allowed modules."""
    if path.startswith("triton"):
        importlib.import_module("flashlib.kernels")  # it chooses how Triton is loaded
    return importlib.import_module(path)


def _inside(path, name):
    """The module that an attribute of an allowed module is, as a path; None where it is
    no module.
    """
    value = vars(_module(path)).get(name)
    if isinstance(value, types.ModuleType):
        return value.__name__
    package = value is None and hasattr(_module(path), "__path__")
    return (
        f"{path}.{name}"
        if package and importlib.util.find_spec(f"{path}.{name}")
        else None
    )


def _chain(node):
    """(name, attributes) of ``name.attribute.attribute``; (None, []) for everything
    else.
    """
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, parts[::-1]) if isinstance(node, ast.Name) else (None, [])


def _passed(node, modules):
    """The modules, as paths, that a chain of attributes passes through until it leaves
    the allowed ones; the last is None where the chain ends in something else than a
    module.
    """
    name, parts = _chain(node)
    passed = [modules.get(name)]
    for part in parts:
        if passed[-1] not in MODULES | INNER_MODULES:
            break
        passed.append(_inside(passed[-1], part))
    return passed


def aliases(tree):
    """{name: module} of a cell. Raises Refused for a module that is not allowed, and
    for a name that means two of them.
    """
    known = dict(LIBRARIES)

    def add(node, name, path):
        if path not in MODULES | INNER_MODULES:
            _refuse(node, f"{path} is not allowed in this task")
        if known.setdefault(name, path) != path:
            _refuse(node, f"{name} stands for {known[name]} and for {path}")

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                add(node, alias.asname or top, alias.name if alias.asname else top)
        elif (
            isinstance(node, ast.ImportFrom) and node.module in MODULES | INNER_MODULES
        ):
            for alias in node.names:
                if path := _inside(node.module, alias.name):
                    add(node, alias.asname or alias.name, path)
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    for _ in range(LONGEST_DETOUR):  # an alias of an alias may stand anywhere
        size = len(known)
        for node in assignments:
            if path := _passed(node.value, known)[-1]:
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        add(node, target.id, path)
        if len(known) == size:
            return known
    raise Refused("too many names for one module: write its own")


def around(given, solutions):
    """{task: Around} from the instructor's cells [(name, source, task or None)] and
    {task: solution}.
    """
    modules = {}
    for source in solutions.values():
        with contextlib.suppress(Refused):  # the cell will be refused for it
            modules |= aliases(_read(source)[0])
    names, classes, before = set(), set(), {}
    for _, source, task in given:
        if task is not None:
            before[task] = frozenset(names)
            continue
        more, more_classes = given_names(source)
        names |= more
        classes |= more_classes
    everywhere = frozenset(names), frozenset(classes), types.MappingProxyType(modules)
    return {task: Around(above, *everywhere) for task, above in before.items()}


def _in_class(node, parents):
    """Whether what a statement binds becomes an attribute of a class."""
    while not isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    ):
        node = parents[node]
    return isinstance(node, ast.ClassDef)


def _require_plain_modules(tree, around, allowed):
    """Refuse modules that are not allowed, modules as values, and changes to what is
    not the student's.
    """
    bound = {name for node in ast.walk(tree) for name in _bound(node)}
    modules = {
        name: path for name, path in around.modules.items() if name not in bound
    } | aliases(tree)
    if "kernels" in around.before:
        modules["kernels"] = "flashlib.kernels"
    parents = {
        child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and _in_class(node, parents):
            _refuse(node, "an import inside a class hides what it imports")
        if not isinstance(node, ast.Name | ast.Attribute):
            continue
        parent = parents[node]
        if isinstance(parent, ast.Attribute) and isinstance(
            parent.value, ast.Attribute | ast.Name
        ):
            continue  # it is looked at whole
        name, parts = _chain(node)
        if (
            parts
            and not isinstance(node.ctx, ast.Load)
            and (name in modules or name in around.anywhere)
        ):
            _refuse(node, f"{'.'.join([name, *parts])} is not yours to change")
        if not isinstance(node.ctx, ast.Load):
            continue
        *through, last = _passed(node, modules)
        if (
            parts[-1:] == ["load"]
            and name in modules
            and modules[name] != "triton.language"
        ):
            _refuse(node, "load is not allowed in this task")
        if any(path not in allowed for path in [*through, *([last] if last else [])]):
            _refuse(node, f"{'.'.join([name, *parts])} is not allowed in this task")
        renamed = isinstance(parent, ast.Assign) and all(
            isinstance(x, ast.Name) for x in parent.targets
        )
        if last is not None and (not renamed or _in_class(parent, parents)):
            _refuse(
                node,
                f"{'.'.join([name, *parts])} is a module: use what is in it by name",
            )
        called = isinstance(parent, ast.Call) and parent.func is node
        if not parts and name in around.classes and not called:
            _refuse(node, f"{name} is given: call it, or leave it")


# -- kernels


def _require_kernel(node):
    if isinstance(node, ast.FunctionDef):
        if not any(
            ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list
        ):
            raise Refused(
                f"line {node.lineno}: {node.name} must be decorated with @triton.jit"
            )
        for inner in ast.walk(node):
            if isinstance(
                inner,
                ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal | ast.Lambda,
            ):
                raise Refused(
                    f"line {inner.lineno}: a kernel imports nothing and defines nothing"
                )
        return
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    constant = isinstance(node, ast.Assign | ast.AnnAssign) and all(
        inner.id in {"tl", "math", "float"}
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)
    )
    if not (
        docstring
        or constant
        or isinstance(node, ast.Import | ast.ImportFrom | ast.Pass)
    ):
        raise Refused(
            f"line {node.lineno}: a kernel's cell holds kernels and constants only"
        )
