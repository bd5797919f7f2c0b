"""Kernel cells: what is taken out of them, and what a name in a kernel may mean.

The standard library and Triton only: students receive this file.
"""

import ast
import importlib
import types

if __package__:
    from exercises.grader import rules
else:
    import rules

LANGUAGE = {"triton", "triton.language", "triton.language.math", "math"}
BUILTINS = (
    "abs", "bool", "float", "int", "isinstance", "len", "list", "max", "min", "print", "range", "tuple",
)  # fmt: skip


class Kernels:
    """What a kernel cell gives: ``constants`` [(names, node)], ``functions`` {name:
    FunctionDef}, ``configs`` {name: the first configuration of an autotuned one}.

    Raises Refused for what a kernel may not contain.
    """

    STATEMENTS = (
        ast.AnnAssign, ast.Assert, ast.Assign, ast.AugAssign, ast.Break, ast.Continue, ast.Expr, ast.For, ast.If,
        ast.Pass, ast.Return, ast.While,
    )  # fmt: skip
    EXPRESSIONS = (
        ast.Attribute, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Constant, ast.FormattedValue, ast.IfExp,
        ast.JoinedStr, ast.List, ast.Name, ast.Slice, ast.Starred, ast.Subscript, ast.Tuple, ast.UnaryOp,
    )  # fmt: skip

    def __init__(self, tree, given=(), forbidden=(), known=None):
        self.forbidden, self.functions, self.configs = set(forbidden), {}, {}
        self.constants, other = [], {}
        # {name: what it means}: a path in Triton's language, or None for a value.
        self.names = {
            "tl": "triton.language",
            "triton": "triton",
            "math": "math",
            **(known or {}),
        }
        self.names |= dict.fromkeys([*given, *BUILTINS])
        for node in tree.body:
            self._add(node, other)
        for name in self.functions:
            self.names[name] = None
            if name in other:
                rules.refuse(
                    other[name],
                    f"{name} is a kernel: do not give its name to something else",
                )
        for node in self.functions.values():
            self._function(node)

    def _add(self, node, other):
        """Take what counts out of a statement of the cell."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                path = (
                    alias.name
                    if isinstance(node, ast.Import)
                    else f"{node.module}.{alias.name}"
                )
                name = (
                    alias.asname
                    or path.split(".")[0 if isinstance(node, ast.Import) else -1]
                )
                path = (
                    path if alias.asname or isinstance(node, ast.ImportFrom) else name
                )
                if path.split(".")[0] in ("triton", "math"):
                    self.names[name] = path
        elif isinstance(node, ast.FunctionDef) and self._decorated(node):
            self.functions[node.name] = node
            return
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if all(isinstance(x, ast.Name) for x in targets) and self._constant(
                node.value
            ):
                self.constants.append(([x.id for x in targets], node.value))
                for x in targets:
                    self.names[x.id] = None
        for inner in ast.walk(node):
            if inner is node or not isinstance(node, ast.FunctionDef | ast.ClassDef):
                other |= dict.fromkeys(rules.bound_by(inner), node)

    def _decorated(self, node):
        """Whether a function is a kernel."""
        found = False
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            path = self._path(call.func if call else decorator)
            if path in ("triton.jit", "triton.runtime.jit.jit"):
                found = True
            elif path == "triton.autotune" and call:
                for inner in ast.walk(call):
                    if (
                        isinstance(inner, ast.Call)
                        and (self._path(inner.func) == "triton.Config")
                        and inner.args
                    ):
                        try:
                            config = ast.literal_eval(inner.args[0])
                        except ValueError:
                            continue
                        if isinstance(config, dict):
                            self.configs.setdefault(node.name, config)
            elif (
                path != "triton.heuristics"
                and found is False
                and not self._later(node, decorator)
            ):
                return False
            elif path != "triton.heuristics":
                rules.refuse(
                    node,
                    f"{ast.unparse(decorator)[:60]}: a kernel's decorators are Triton's",
                )
        return found

    def _later(self, node, decorator):
        rest = node.decorator_list[node.decorator_list.index(decorator) + 1 :]
        return any(
            self._path(x.func if isinstance(x, ast.Call) else x) == "triton.jit"
            for x in rest
        )

    def _path(self, node):
        """The dotted path of ``name.attribute.attribute``, or None."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or self.names.get(node.id) is None:
            return None
        return ".".join([self.names[node.id], *parts[::-1]])

    def _constant(self, node):
        """Whether an expression is made from numbers, earlier constants and math alone."""
        try:
            self._expression(node, set())
        except rules.Refused:
            return False
        values = {name for names, _ in self.constants for name in names} | {
            "float",
            "int",
            "min",
            "max",
        }
        return all(
            self.names[inner.id] is not None or inner.id in values
            for inner in ast.walk(node) if isinstance(inner, ast.Name)
        )  # fmt: skip

    def _function(self, node):
        arguments = node.args
        listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        if arguments.vararg or arguments.kwarg:
            rules.refuse(node, "a kernel names its parameters")
        for argument in listed:
            if argument.annotation is not None:
                self._expression(argument.annotation, set())
        for default in [*arguments.defaults, *arguments.kw_defaults]:
            if default is not None:
                self._expression(default, set())
        own = {argument.arg for argument in listed}
        for inner in ast.walk(node):
            own |= (
                {inner.id}
                if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load)
                else set()
            )
        body = node.body
        if ast.get_docstring(node, clean=False) is not None:
            body = body[1:]
        for statement in body:
            self._statement(statement, own)

    def _statement(self, node, own):
        if ast.unparse(node) == "raise NotImplementedError()":
            return  # as nbgrader leaves it
        if not isinstance(node, self.STATEMENTS):
            what = type(node).__name__
            rules.refuse(
                node,
                f"{what}: a kernel computes with Triton's language; it imports nothing and defines nothing",
            )
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._statement(child, own)
            elif isinstance(child, ast.expr):
                self._expression(child, own)

    def _expression(self, node, own):
        if not isinstance(node, self.EXPRESSIONS):
            if isinstance(node, ast.expr):
                rules.refuse(
                    node,
                    f"{ast.unparse(node)[:60]}: Triton's language has no such expression",
                )
            for child in ast.iter_child_nodes(node):
                self._expression(child, own)
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            one_line = node.end_lineno == node.lineno
            if isinstance(node.value, bytes) or not one_line:
                rules.refuse(node, "a text in a kernel is on one line")
        root = node
        while isinstance(root, ast.Attribute):
            if root.attr.startswith("_") or root.attr == "handle":
                rules.refuse(root, f"{root.attr} is no part of Triton's language")
            root = root.value
        if isinstance(root, ast.Name):
            self._name(node, root, own)
            return
        for child in ast.iter_child_nodes(node if root is node else root):
            self._expression(child, own)
        if root is not node:
            self._expression(root, own)

    def _name(self, node, root, own):
        """Require that a name, or a chain of attributes of one, means something in a kernel."""
        if root.id in own or self.names.get(root.id, "") is None:
            return
        if root.id not in self.names:
            rules.refuse(
                node,
                f"{root.id} is not a kernel, a constant, or a part of Triton's language",
            )
        path = self._path(node)
        if path.rsplit(".")[-1] in self.forbidden:
            rules.refuse(node, f"{path} is not allowed in this task")
        if not in_language(path):
            rules.refuse(node, f"{path} is no part of Triton's language")


def in_language(path):
    """Whether a dotted path means a function, type or number of Triton's language."""
    if path.startswith("triton"):
        importlib.import_module("flashlib.kernels")  # it chooses how Triton is loaded
    top, *parts = path.split(".")
    value = importlib.import_module(top)
    for part in parts:
        value = getattr(value, part, None)
        if isinstance(value, types.ModuleType) and value.__name__ not in LANGUAGE:
            return False
    if isinstance(value, types.ModuleType):
        return False
    if path in ("triton.cdiv", "triton.next_power_of_2"):
        return True
    if top == "math" or isinstance(value, int | float):
        return value is not None
    kernel = hasattr(value, "arg_names") or getattr(value, "__triton_builtin__", False)
    own = str(getattr(value, "__module__", type(value).__module__)).startswith(
        "triton.language"
    )
    return bool(
        kernel
        or (
            own
            and (
                isinstance(value, type)
                or type(value).__module__ == "triton.language.core"
            )
        )
    )
