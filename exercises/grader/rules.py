"""What a solution cell may contain, found by reading it, and which cells a task needs.

These rules are few, because most of what a task forbids shows when the code runs
(``guard``).

A **kernel cell** is not run as Python, and Triton decides what it may contain
(``frontend``).

A **Python cell** runs in a guarded namespace. Here only attributes are refused that
lead from an object to the interpreter's own state, or by which it would pretend to be
something else.

Standard library only: students receive this file.
"""

import ast
import builtins
import re
import symtable

MODULES = {
    "__future__", "abc", "cmath", "collections", "collections.abc", "dataclasses",
    "fractions", "functools", "itertools", "math", "numbers", "numpy", "operator",
    "random", "statistics", "time", "torch", "triton", "triton.language", "typing",
}  # fmt: skip
INNER_MODULES = {
    "flashlib.kernels", "numpy.fft", "numpy.lib", "numpy.lib.stride_tricks",
    "numpy.linalg", "numpy.random", "torch.autograd", "torch.autograd.functional",
    "torch.backends", "torch.cuda", "torch.fft", "torch.func", "torch.linalg",
    "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.random", "torch.special",
    "torch.testing", "triton.language.math",
}  # fmt: skip
LONGEST_CELL = 50_000
# Levels of a syntax tree; each term of a sum is one. Whatever goes through a tree here
# or in Python's library calls itself a few times for each, and may 1,000 times.
DEEPEST_CELL = 150
# Builtins that read files, wait for a person, run texts, or look up names by texts.
REMOVED = {
    "breakpoint", "compile", "eval", "exec", "exit", "globals", "help", "input",
    "locals", "memoryview", "open", "quit", "vars",
}  # fmt: skip
# From a generator or an exception to its callers' frames, from a class to its bases.
FRAMES = {
    "ag_await", "ag_code", "ag_frame", "cr_await", "cr_code", "cr_frame", "cr_origin",
    "f_back", "f_builtins", "f_code", "f_generator", "f_globals", "f_locals", "f_trace",
    "func_closure", "func_code", "func_defaults", "func_dict", "func_globals",
    "gi_code", "gi_frame", "gi_yieldfrom", "mro", "tb_frame", "tb_next",
}  # fmt: skip
# From a tensor or a generator of random numbers to memory of any address.
MEMORY = {"cffi", "ctypes", "set_", "storage", "typed_storage", "untyped_storage"}
SPECIAL = {f"__{name}__" for name in (
    "add", "call", "contains", "doc", "enter", "eq", "exit", "ge", "getitem", "gt",
    "hash", "init", "iter", "le", "len", "lt", "matmul", "mul", "name", "ne", "neg",
    "next", "post_init", "pow", "radd", "repr", "rmul", "rsub", "setitem", "slots",
    "str", "sub", "truediv", "version",
)}  # fmt: skip
# By these an object would tell PyTorch, NumPy, copy or dataclasses what it is, and a
# namespace would tell Python what its builtins are.
PRETENDING = (
    "__array", "__builtins", "__copy", "__cuda", "__dataclass", "__deepcopy",
    "__dlpack", "__getattr", "__getstate", "__match_args", "__reduce", "__set_name",
    "__setstate", "__torch",
)  # fmt: skip
OWN, TYPE, FOUND = "<own>", "<type>", "<found>"  # names that no source can have
FORMATS = "format", "format_map"  # methods of texts that look up attributes by text
NAMED_TUPLE = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}

# For tasks that ask for a softmax or a gradient.
SOFTMAX, AUTOGRAD = ("softmax", "logaddexp", "logaddexp2"), ("autograd", "func")
# For tasks whose launcher counts what is held, which no array of NumPy tells it.
HELD = "Largest", "numpy"
# {name: the beginnings of operations that show its use}; attention is never allowed.
OPERATIONS = {
    "softmax": (
        "aten._log_softmax", "aten._safe_softmax", "aten._softmax", "aten.logaddexp",
        "aten.logcumsumexp", "aten.logsumexp",
    ),
    "autograd": ("autograd", "aten._softmax_backward_data"),
    "attention": (
        "aten._native_multi_head_attention", "aten._transformer_encoder_layer_fwd",
        "aten._scaled_dot_product", "aten.scaled_dot_product_attention",
        "aten._flash_attention", "aten._efficient_attention",
    ),
}  # fmt: skip


class Refused(Exception):
    """A solution cell that will not be run; the text is for the student.

    line    where in the cell, or None
    """

    def __init__(self, text, line=None):
        super().__init__(text)
        self.line = line


def refuse(node, what):
    raise Refused(f"line {node.lineno}: {what}", node.lineno)


# %time, !ls, ?max, max?, x.sum??
NOT_PYTHON = re.compile(r"\s*([%!?].*|[\w.*\[\]]+\?\??\s*)", re.DOTALL)


def clean(source):
    """The source without IPython's own lines; others stay. A line ends as in Python."""
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    if len(source) > LONGEST_CELL:  # tree_of refuses it unread
        return source
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        lines = source.split("\n")
        return "\n".join("" if NOT_PYTHON.fullmatch(x) else x for x in lines)
    return source


def tree_of(source):
    """The syntax tree of a cell. Raises Refused where it is not Python, or too deep."""
    if len(source) > LONGEST_CELL:
        size = f"the cell has {len(source)} characters"
        raise Refused(f"{size}, more than the {LONGEST_CELL} that are read")
    try:
        symtable.symtable(source, "cell", "exec")
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" in line {error.lineno}" if getattr(error, "lineno", None) else ""
        text = getattr(error, "msg", None) or "it cannot be read"
        raise Refused(f"the cell is not Python{line}: {text}") from None
    level = [tree]
    for _ in range(DEEPEST_CELL):
        level = [inner for node in level for inner in ast.iter_child_nodes(node)]
    if level:
        raise Refused("the cell is nested too deeply")
    return tree


# -- Python


def refused_attribute(name, forbidden=()):
    """Why no cell may look up an attribute of this name, or None. Where a task forbids
    NumPy, neither may it make an array of a tensor.
    """
    special = name.startswith("__") and name.endswith("__") and name not in SPECIAL
    if special or name in FRAMES:
        return "it leads to Python's own state"
    if name in MEMORY:
        return "it leads to raw memory; data_ptr() tells whose memory a tensor uses"
    if name == "numpy" and name in forbidden:
        return "this task does not allow NumPy"
    return None


def require(source, forbidden=()):
    """The syntax tree of a cell of Python. Raises Refused for an attribute that leads
    out of it. What else no solution may do, ``guard`` refuses when it is done.

    forbidden: the names that its task forbids
    """
    tree = tree_of(source)
    for node in ast.walk(tree):
        attribute = isinstance(node, ast.Attribute) and not reads_class(node)
        attributes = [node.attr] if attribute else []
        if isinstance(node, ast.MatchClass):
            if node.patterns:
                refuse(node, "name the attributes of a class pattern")
            if set(FORMATS) & set(node.kwd_attrs):
                refuse(node, "a pattern does not ask for format")
            attributes = node.kwd_attrs
        for name in attributes:
            if why := refused_attribute(name, forbidden):
                refuse(node, f"the attribute {name} is not allowed here: {why}")
        if isinstance(node, ast.Name) and refused_attribute(node.id):
            refuse(node, f"the name {node.id} is not allowed in a solution")
        for name in bound_by(node):
            if name.startswith(PRETENDING):
                why = "libraries ask an object for it"
                refuse(node, f"{name} is not yours to define: {why}")
    return tree


def reads_class(node):
    """Whether an attribute is a value's class, which ``type`` tells as well."""
    return node.attr == "__class__" and isinstance(node.ctx, ast.Load)


def bound_by(node):
    """The names that a node binds: targets, parameters, definitions, imports."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.alias):
        return [(node.asname or node.name).split(".")[0]]
    if isinstance(node, ast.keyword):
        return []
    names = (getattr(node, field, None) for field in ("arg", "name", "rest"))
    return [name for name in names if isinstance(name, str)]


class Private(ast.NodeTransformer):
    """Renames what begins with one underscore: it is the student's own and never what a
    library keeps to itself. So is ``obj``, by which an AttributeError leads to a
    library's objects, and ``__slots__``, whose texts nothing renames: without it the
    same code runs. An object whose attribute is set goes through ``guard.own``, one
    that is asked for its class through ``guard.kind_of``, and what may be a text's
    ``format`` through ``guard.found``.
    """

    def generic_visit(self, node):
        if isinstance(node, ast.ImportFrom):  # the names are the library's
            for alias in node.names:
                alias.asname = alias.asname and private(alias.asname)
            return node
        for field in ("id", "attr", "name", "arg", "asname", "rest"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                setattr(node, field, private(name))
        for field in ("names", "kwd_attrs"):
            listed = getattr(node, field, None)
            if isinstance(listed, list) and listed and isinstance(listed[0], str):
                setattr(node, field, [private(name) for name in listed])
        node = super().generic_visit(node)
        if isinstance(node, ast.Attribute) and reads_class(node):
            return ast.Call(ast.Name(TYPE, ast.Load()), [node.value], [])
        if getattr(node, "attr", "") in FORMATS and isinstance(node.ctx, ast.Load):
            return ast.Call(ast.Name(FOUND, ast.Load()), [node], [])
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            node.value = ast.Call(ast.Name(OWN, ast.Load()), [node.value], [])
        return node


def private(name):
    """The name under which a student's private name is kept."""
    own = name.startswith("_") and not name.startswith("__") and name != "_"
    own = (own and name not in NAMED_TUPLE) or name in ("obj", "__slots__")
    return f"own{name}" if own else name


# -- answers on paper

# What a number that is written out consists of: 5, -0.25, 3 / 8, 10**6.
WRITTEN = (
    ast.BinOp, ast.Constant, ast.List, ast.Tuple, ast.UnaryOp, ast.expr_context,
    ast.operator, ast.unaryop,
)  # fmt: skip
TARGETS = ast.Name, ast.List, ast.Tuple, ast.expr_context


def assignments(source, names):
    """{name: the statements of a cell of answers that bind it, as syntax trees}."""
    found = {}
    for node in tree_of(source).body:
        for name in set(_bound_here(node)) & set(names):
            found.setdefault(name, []).append(node)
    return found


def repeated(source, names):
    """What to tell of answers that a cell assigns more than once."""
    return [
        f"{name} is assigned {len(nodes)} times: line {nodes[-1].lineno} counts"
        for name, nodes in assignments(clean(source), names).items()
        if len(nodes) > 1
    ]


def answers(source, names):
    """The lines of a cell that assign numbers to these names, as source: the last for
    each name, or None without one. The rest of the cell may be anything.

    Raises Refused where a name gets something that is computed from other names: that
    would be right for every student's numbers.
    """
    lines, found = [f"{name} = None" for name in names], assignments(source, names)
    last = {nodes[-1]: name for name, nodes in found.items()}
    for node in sorted(last, key=lambda node: (node.lineno, node.col_offset)):
        targets = getattr(node, "targets", None) or [getattr(node, "target", node)]
        value = getattr(node, "value", None)
        plain = isinstance(node, ast.Assign | ast.AnnAssign) and value is not None
        plain = plain and _consists(value, WRITTEN)
        if not plain or not all(_consists(x, TARGETS) for x in targets):
            name, example = last[node], f"such as {last[node]} = 0.25"
            written = f"{name} must be a number that is written out, {example}"
            refuse(node, f"{written}, on a line of its own")
        lines.append(" = ".join(map(ast.unparse, [*targets, value])))
    return "\n".join(lines)


def _consists(node, kinds):
    return all(isinstance(inner, kinds) for inner in ast.walk(node))


FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
SCOPES = *FUNCTIONS, ast.ClassDef, ast.comprehension


def _bound_here(node):
    """The names that a statement binds outside of the functions and classes in it."""
    yield from bound_by(node)
    if not isinstance(node, SCOPES):
        for inner in ast.iter_child_nodes(node):
            yield from _bound_here(inner)


# -- which cells a task needs


def bound(source):
    """The names that a cell binds at its top level."""
    return set(_bound_here(ast.parse(source)))


def without_stubs(cells):
    """{name: source} of cells, in which a function that has not been written is left
    out where another cell has it. Every other line stays where it is.
    """
    stubs, made = {name: _stubs(source) for name, source in cells.items()}, {}
    written = set().union(*(bound(x) - set(stubs[name]) for name, x in cells.items()))
    for name, source in cells.items():
        lines = source.split("\n")
        for function, (first, end) in stubs[name].items():
            if function in written:
                lines[first - 1 : end] = [""] * (end - first + 1)
        made[name] = "\n".join(lines)
    return made


def _stubs(source):
    """{name: (first line, last line)} of functions as nbgrader leaves them."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            (*before, last) = node.body
            raised = getattr(last, "exc", None)
            raised = getattr(getattr(raised, "func", raised), "id", "")
            before = [getattr(x, "value", None) for x in before]
            texts = all(isinstance(value, ast.Constant) for value in before)
            if texts and raised == "NotImplementedError":
                first = min(x.lineno for x in [node, *node.decorator_list])
                found[node.name] = first, node.end_lineno
    return found


def used(source):
    """The names that a cell looks up outside of itself."""
    left, names = [symtable.symtable(source, "cell", "exec")], set()
    while left:
        table = left.pop()
        left += table.get_children()
        outside = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (outside or symbol.is_global()):
                names.add(symbol.get_name())
    return names - bound(source)


def needs(name, cells, wanted, given):
    """The cells, in order, that must run for a task: its own, and those that define
    names which it uses, before it where there are any.

    cells   {name: source} of a submission in its order
    wanted  the names that the task asks for
    given   the names that the notebook defines itself
    """
    before, later = {}, {}  # {name: the cells that bind it}
    binding = before
    for other, source in cells.items():
        for x in bound(source):
            binding.setdefault(x, []).append(other)
        binding = later if other == name else binding
    left = (used(cells[name]) | set(wanted)) - bound(cells[name])
    taken, known = {name}, set(given) | set(vars(builtins))
    while left:
        x = left.pop()
        if x not in known:
            known.add(x)
            for other in set(before.get(x) or later.get(x, ())) - taken:
                taken.add(other)
                left |= used(cells[other])
    return [other for other in cells if other in taken and other != name] + [name]
