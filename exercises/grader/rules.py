"""What the source of a solution cell may not contain, found by reading it, before anything runs.

The sandbox keeps a submission from doing harm. These rules keep it to the task: an answer is computed by the
student's own code, not by a library's attention, and not by taking the worker apart. They are stated in every
assignment, and a refusal names the line.
"""

import ast

MODULES = {"math", "itertools", "functools", "numpy", "torch", "triton", "triton.language"}
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
    "builtins", "classes", "ctypes", "ctypeslib", "fromfile", "hub", "importlib", "inspect", "library",
    "load", "memmap", "modules", "ops", "os", "overrides", "package", "save", "serialization",
    "subprocess", "sys", "tofile", "utils",
}  # fmt: skip
# Attention as others have written it.
ATTENTION = {
    "MultiheadAttention", "Transformer", "TransformerDecoder", "TransformerDecoderLayer",
    "TransformerEncoder", "TransformerEncoderLayer", "attention", "flex_attention",
    "multi_head_attention_forward", "scaled_dot_product_attention",
}  # fmt: skip

# For tasks that ask for a softmax: its names, and PyTorch's operations behind them and behind others.
SOFTMAX = (
    "LogSoftmax", "Softmax", "Softmin", "log_softmax", "logaddexp", "logaddexp2", "logcumsumexp", "logsumexp",
    "softmax", "softmin",
)  # fmt: skip
SOFTMAX_OPERATIONS = (
    "aten._log_softmax", "aten._safe_softmax", "aten._softmax", "aten.logaddexp", "aten.logaddexp2",
    "aten.logcumsumexp", "aten.logsumexp",
)  # fmt: skip
# For tasks that ask for a gradient: what differentiates, and the operations that show that it did.
AUTOGRAD = (
    "autograd", "backward", "enable_grad", "func", "grad", "gradcheck", "hessian", "jacfwd", "jacobian",
    "jacrev", "jvp", "linearize", "requires_grad", "requires_grad_", "set_grad_enabled", "vjp",
)  # fmt: skip
AUTOGRAD_OPERATIONS = ("aten._log_softmax_backward_data", "aten._softmax_backward_data")


class Refused(Exception):
    """A solution cell that will not be run; the text is for the student."""


def require(source, forbidden=(), kernel=False):
    """Raise Refused unless the source of a cell is Python that keeps to the rules.

    forbidden   further names that the task does not allow, such as "softmax"
    kernel      the cell defines kernels and nothing else, so it uses no PyTorch and no NumPy
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" in line {error.lineno}" if getattr(error, "lineno", None) else ""
        text = getattr(error, "msg", None) or str(error)
        raise Refused(f"the cell is not Python{line}: {text}") from None
    banned = {*ATTENTION, *forbidden}
    for node in ast.walk(tree):
        _inspect(node, banned, {"math", "triton", "triton.language"} if kernel else MODULES)
    if kernel:
        for node in tree.body:
            _require_kernel(node)


def _inspect(node, banned, modules):
    def refuse(what):
        raise Refused(f"line {node.lineno}: {what}")

    if isinstance(node, ast.Import | ast.ImportFrom):
        relative = isinstance(node, ast.ImportFrom) and (node.level or node.module is None)
        names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        for name in names:
            if relative or not (name in modules or _is_inside(name, modules)):
                allowed = ", ".join(sorted(modules))
                refuse(f"import of {name or 'a relative module'}; this task may import {allowed}")
            parts = name.split(".")
            if set(parts) & (banned | ATTRIBUTES) or any(part.startswith("_") for part in parts):
                refuse(f"import of {name} is not allowed in this task")
        for alias in node.names:
            meant = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
            if LIBRARIES.get(alias.asname, meant) != meant:
                refuse(f"{alias.asname} is the name of something else")
            if set(alias.name.split(".")) & (banned | ATTRIBUTES) or alias.name.startswith("_"):
                refuse(f"{alias.name} is not allowed in this task")
            if alias.name == "*":
                refuse("import * hides what it imports; import the names")
    elif isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else None
        if owner in LIBRARIES and not isinstance(node.ctx, ast.Load):
            refuse(f"{owner}.{node.attr} is not yours to change")
        if node.attr.startswith("_"):
            refuse(f"attribute {node.attr}: names that begin with an underscore are not allowed")
        loads = owner in {"tl", "memory"}  # tl.load is no file
        if node.attr in banned or (node.attr in ATTRIBUTES and not loads):
            refuse(f"{node.attr} is not allowed in this task")
    elif isinstance(node, ast.Name):
        if node.id in LIBRARIES and not isinstance(node.ctx, ast.Load):
            refuse(f"{node.id} is the name of something else")
        if node.id in NAMES or node.id.startswith("__"):
            refuse(f"{node.id} is not allowed in a solution")
        if node.id in banned and isinstance(node.ctx, ast.Load):
            refuse(f"{node.id} is not allowed in this task")


def _is_inside(name, modules):
    """Whether name is a module inside an allowed one whose parts are allowed too."""
    head = name.split(".")[0]
    return head in modules and head != "triton"


def _require_kernel(node):
    if isinstance(node, ast.FunctionDef):
        if not any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list):
            raise Refused(f"line {node.lineno}: {node.name} must be decorated with @triton.jit")
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal | ast.Lambda):
                raise Refused(f"line {inner.lineno}: a kernel imports nothing and defines nothing")
        return
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    constant = isinstance(node, ast.Assign | ast.AnnAssign) and all(
        inner.id in {"tl", "math", "float"}
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)
    )
    if not (docstring or constant or isinstance(node, ast.Import | ast.ImportFrom | ast.Pass)):
        raise Refused(f"line {node.lineno}: a kernel's cell holds kernels and constants only")
