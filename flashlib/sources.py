"""What the Python function of a mask or a score may be written with.

Kernels compile the source of such a function, and the reference evaluates it. So it may
use only what means the same to both; everything else is refused, by an
error that says what to write instead.
"""

import ast
import builtins
import functools
import inspect
import itertools
import textwrap
import types

import torch
from torch.overrides import TorchFunctionMode

from flashlib import internals
from flashlib.plain_checks import wrong


def source_of(function, name, first, count, named):
    """The source of a function that a kernel can compile, called name in errors, whose
    first parameters have these names, with ``count`` more, and which may use the
    functions in ``named``. Raises TypeError or ValueError that says what to
    write instead.
    """
    if not isinstance(function, types.FunctionType) or function.__name__ == "<lambda>":
        got = "a lambda" if isinstance(function, types.FunctionType) else function
        raise wrong(name, "a function that is defined by def", got, TypeError)
    code, scope = function.__code__, vars(builtins) | function.__globals__
    foreign = [x for x in code.co_names if scope.get(x) is not named.get(x, code)]
    if foreign := [*code.co_freevars, *foreign]:
        module = "masks" if name == "mask" else "score_functions"
        expected = "a function of its parameters and, of flashlib."
        expected += f"{module}, {', '.join(named)} only"
        got = f"{foreign[0]!r} in {code.co_name}: pass it as an argument of the {name}"
        raise wrong(name, expected, got)
    return checked_source(code, name, first, count)


@functools.cache
def checked_source(code, name, first, count):
    """The rest of source_of, for the code of a function."""
    label = code.co_name
    try:
        source = textwrap.dedent(inspect.getsource(code))
    except OSError as error:
        expected = "a function from a file or a notebook, whose source can be read"
        raise wrong(name, expected, label) from error
    variable = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    variable = variable or code.co_kwonlyargcount
    own = code.co_varnames[: code.co_argcount]
    if len(own) != len(first) + count or own[: len(first)] != first or variable:
        expected = f"a function of ({', '.join(first)}) and {count} more"
        parameters = ", ".join(own)
        raise wrong(name, expected, f"{label}({parameters}{', *' * bool(variable)})")
    if any(isinstance(x, types.CodeType) for x in code.co_consts):
        expected = "a function without functions and comprehensions inside"
        raise wrong(name, expected, label)
    body = ast.parse(source).body[0].body
    for node in itertools.chain.from_iterable(map(ast.walk, body)):
        operator = getattr(node, "op", None)
        literal = getattr(node, "value", None)
        if isinstance(literal, int) and literal >= 2**31:
            raise wrong(name, "integers of 32 bits", f"{literal} in {label}")
        if isinstance(node, ast.AugAssign):
            # PyTorch's would change the tensor that the function was given.
            changed = ast.BinOp(node.target, node.op, node.value)
            expected = f"{ast.unparse(node.target)} = {ast.unparse(changed)}"
            raise wrong(name, expected, f"{ast.unparse(node)} in {label}")
        if isinstance(operator, ast.FloorDiv | ast.Mod):
            expected = "div(a, b) and mod(a, b), which round down on every device"
            raise wrong(name, expected, f"// or % in {label}")
        if isinstance(operator, ast.And | ast.Or | ast.Not) or (
            isinstance(node, ast.Compare) and len(node.ops) > 1
        ):
            expected = "&, | and ~ between comparisons in parentheses"
            raise wrong(name, expected, f"and, or, not or a chain in {label}")
        if isinstance(node, ast.Subscript):
            expected = "at(x, a, b, ...) for an element of a tensor"
            raise wrong(name, expected, f"{ast.unparse(node)} in {label}")
        if isinstance(operator, ast.UAdd):
            expected = "no + in front of an operand"
            raise wrong(name, expected, f"{ast.unparse(node)} in {label}")
        if isinstance(operator, ast.Pow):
            expected = "products in place of powers, such as a * a"
            raise wrong(name, expected, f"{ast.unparse(node)} in {label}")
    return source


def require_integers(name, *operands):
    """Raise TypeError unless the operands of this function are integers."""
    for x in operands:
        dtype = getattr(x, "dtype", type(x))
        if dtype not in (torch.int32, torch.int64, int):
            got = getattr(dtype, "__name__", dtype)
            raise wrong(name, "integers", got, TypeError)


def tried(name, evaluate):
    """What ``evaluate()`` returns, computed by PyTorch even while it traces the call.
    Raises ValueError with the name where PyTorch cannot compute it, or it does
    arithmetic with two booleans.
    """
    try:
        with internals.without_modes(), NoSums():
            return evaluate()
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        expected = "a function that PyTorch can evaluate on tensors"
        raise wrong(name, expected, f"{type(error).__name__}: {error}") from error


class NoSums(TorchFunctionMode):
    """While it is active, arithmetic of two booleans raises ValueError: their sum is
    "or" for PyTorch and exclusive or for a kernel.
    """

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function.__name__ in ("add", "sub", "__rsub__", "mul"):
            kinds = {getattr(x, "dtype", type(x)) for x in arguments}
            if kinds <= {torch.bool, bool}:
                expected, got = "| in place of + and & in place of *", function.__name__
                # Python's operators would replace a TypeError by their own.
                raise wrong("two booleans", expected, got)
        return function(*arguments, **(options or {}))
