"""Scores as functions: what the softmax weighs in place of scale q.k (chapter *Masks*,
``eq-masks-function``).

A :class:`Score` is a Python function of a score s, a batch b, a head h, the position p
of a query and the position j of a key, written like that of a mask
(:mod:`flashlib.masks`), and for a backward pass its derivative by s. The reference
evaluates both on tensors; the kernels compile the same source. b, h, p and j are int32.

    def cube(s, b, h, p, j, weight):
        return s + weight * s * s * s

    def of_cube(s, b, h, p, j, weight):
        return 1.0 + 3.0 * weight * s * s

    score = Score(cube, 0.01, derivative=of_cube)
    score.check_derivative()

Numbers are compiled into the kernel. Tensors are read by ``at(x, a, b, ...)`` and get
no gradient; ``bias`` of :func:`flashlib.attention` does.
"""

import ast
import functools
import hashlib
import math

import torch

from flashlib import internals, masks
from flashlib.masks import KNOWN, Rule, at
from flashlib.plain_checks import SOFTCAPS, type_name, wrong
from flashlib.sources import source_of, tried

DTYPES = (torch.float32, torch.float16, torch.bfloat16, *masks.INTEGERS)
PARAMETERS = ("s", "b", "h", "p", "j")


def exp(x):
    """e^x."""
    return torch.exp(x)


def log(x):
    """The natural logarithm."""
    return torch.log(x)


def tanh(x):
    """The hyperbolic tangent."""
    return torch.tanh(x)


def of_tanh(x):
    """The derivative of tanh, 1 / cosh^2 x."""
    return torch.cosh(x).square().reciprocal()


NAMED = masks.NAMED | {"exp": exp, "log": log, "tanh": tanh, "of_tanh": of_tanh}


def one_after_other(s, b, h, p, j, first, second):
    """The second Rule, of what the first one returns for s."""
    s = first[0](s, b, h, p, j, *first[1])
    return second[0](s, b, h, p, j, *second[1])


def chain_rule(s, b, h, p, j, first, second):
    """The derivative of ``one_after_other``."""
    between = first[0](s, b, h, p, j, *first[1])
    outer = second[2](between, b, h, p, j, *second[1])
    return outer * first[2](s, b, h, p, j, *first[1])


# torch.compile calls these two while it traces, and keeps what they return.


@internals.constant_while_tracing
def defined(function, derivative, *kinds):
    """``(key, gathers)`` of a Score of this function, as ``masks.defined``."""
    functions = {"score": function, "derivative": derivative}
    if derivative is None:
        del functions["derivative"]
    sources = [
        source_of(f, name, PARAMETERS, len(kinds), NAMED)
        for name, f in functions.items()
    ]
    key, gathers = summary(tuple(sources), repr(kinds))
    if key not in KNOWN:
        for name, f in functions.items():
            check_function(name, f, kinds)
        KNOWN[key] = Rule(function, masks.captured(kinds), derivative)
    return key, gathers


def check_function(name, function, kinds):
    """Raise unless PyTorch can evaluate the function of a Score, called name, whose
    arguments have these kinds, and gets numbers at s = 0.
    """

    def evaluate():
        s = torch.zeros(2, dtype=torch.float64, device="cpu")
        n = s.to(torch.int32)
        arguments = tuple(map(masks.stand_in, kinds))
        return evaluated(function, arguments, s, n, n, n, n).tolist()

    values = tried(name, evaluate)
    if not all(x < math.inf for x in values):
        raise wrong(name, "a number at s = 0", values[0])


@functools.cache
def summary(sources, kinds):
    """What ``defined`` returns for the sources of functions. A Score gathers if it
    reads a tensor at other places than its batch and its head: at one for each pair.
    """
    gathers = False
    for node in ast.walk(ast.parse("\n".join(sources))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "at":
            parts = [y for x in node.args[1:] for y in ast.walk(x)]
            names = {x.id for x in parts if isinstance(x, ast.Name)}
            gathers |= not names <= {"b", "h"}
    return hashlib.sha256(f"{sources} {kinds}".encode()).hexdigest(), gathers


@internals.constant_while_tracing
def combined(*keys):
    """The key of a Score that applies those with these keys one after the other."""
    key = hashlib.sha256(f"{keys}".encode()).hexdigest()
    rules = tuple(KNOWN[key] for key in keys)
    derivative = None if any(x.derivative is None for x in rules) else chain_rule
    KNOWN.setdefault(key, Rule(one_after_other, rules, derivative))
    return key


class Score:
    """What the softmax weighs in place of a score s: ``function(s, b, h, p, j,
    *arguments)``.

    function
        defined by ``def``; it may use only its parameters and the functions in NAMED.
        It gets s, scale q.k in natural units, and b, h, p and j, int32, as tensors that
        broadcast. It must not be NaN or +inf at s = 0 and the last position or key,
        where kernels evaluate it outside of S.
    arguments
        numbers, and tensors (float32, float16, bfloat16, int32, int64 or bool) on the
        device of the queries, which the function reads by ``at``. As for a mask, a
        number that changes between calls belongs in a tensor.
    derivative
        a function of the same arguments, the derivative by s, without which there is no
        backward pass.

    Raises TypeError or ValueError that names what the functions may not do.
    """

    def __init__(self, function, *arguments, derivative=None):
        for x in arguments:
            check_argument(x)
        self.key, self.gathers = defined(
            function, derivative, *map(masks.kind_of, arguments)
        )
        self.rule = Rule(function, arguments, derivative)
        self.sizes = ()  # (name, tensor, least sizes) of the tensors of a named score

    def __repr__(self):
        return f"<Score {self.rule.text()}>"

    def __setstate__(self, state):
        vars(self).update(state)
        masks.register(self)

    def then(self, other):
        """The Score that applies this one and then another to what this one made."""
        if not isinstance(other, Score):
            raise wrong("score", "a Score", type(other).__name__, TypeError)
        made = object.__new__(Score)
        made.key = combined(self.key, other.key)
        made.gathers = self.gathers or other.gathers
        known = self.rule.derivative is not None and other.rule.derivative is not None
        derivative = chain_rule if known else None
        made.rule = Rule(one_after_other, (self.rule, other.rule), derivative)
        made.sizes = self.sizes + other.sizes
        return made

    def change(self, s, batch=0, oldest=0):
        """The function for scores s ``[B, H, T_q, T_k]``, of which the first batch and
        the first key may have other numbers than 0.
        """
        return self._applied(self.rule.function, s, batch, oldest)

    def slope(self, s, batch=0):
        """The derivative for such scores."""
        return self._applied(self.rule.derivative, s, batch, 0)

    def _applied(self, function, s, batch, oldest):
        indices = masks.indices_of(*s.shape, s.device, batch, oldest)
        return evaluated(function, self.rule.arguments, s, *indices)

    def check_derivative(self, s=None):
        """Compare the derivative with PyTorch's in float64, at these scores ``[B, H,
        T_q, T_k]``, or at random ones for one head, 16 queries and 16 keys.

        A test is the place for this call: where a function has kinks, and which scores
        occur, only its author knows, and Scores are made in forward passes. Raises
        ValueError where they differ by more than 1e-6 of the larger one, or there is no
        derivative.
        """
        if self.rule.derivative is None:
            raise wrong("derivative", "a function", None)
        if s is None:
            s = 4 * torch.randn(
                1, 1, 16, 16, generator=torch.Generator().manual_seed(0)
            )
            s = s.to(next(iter([x.device for x in self.tensors()]), "cpu"))
        s = s.detach().double().requires_grad_()
        with torch.enable_grad():
            (wanted,) = torch.autograd.grad(self.change(s).sum(), s)
        slope = self.slope(s.detach())
        largest = torch.maximum(slope.abs(), wanted.abs()).clamp(min=1.0)
        far = ~((slope - wanted).abs() <= 1e-6 * largest)
        if far.any():
            place = tuple(far.nonzero()[0].tolist())
            expected = f"{wanted[place]:.9g} at s = {s[place]:.9g} of {list(place)}"
            raise wrong("derivative", expected, f"{slope[place]:.9g}")

    def tensors(self):
        """The tensors that the score reads, in their order."""
        return tuple(self.rule.tensors())


def evaluated(function, arguments, s, b, h, p, j):
    """The function of a Score on tensors, in the dtype and the sizes of s. Raises
    TypeError where it returns no floating-point numbers.
    """
    arguments = Rule(None, arguments).mapped(
        lambda x: torch.tensor(x).to(s) if isinstance(x, float) else x,
        lambda x: x.to(s.dtype) if x.is_floating_point() else x,
        lambda f: f,
    )[1]
    values = function(s, b, h, p, j, *arguments)
    if isinstance(values, torch.Tensor) and not values.is_floating_point():
        raise TypeError(f"it returns {values.dtype}")
    return torch.as_tensor(values, dtype=s.dtype, device=s.device).expand(s.shape)


def check_argument(x):
    """x is a number, or a tensor that a score can read.

    Raises TypeError or ValueError.
    """
    if not isinstance(x, float):
        masks.check_argument("score", x, DTYPES, "numbers")
    elif not abs(x) <= 1e37:
        raise wrong("score", "numbers up to 1e37", x)


# -- scores with names


def _softcap(s, b, h, p, j, cap, per_cap):
    return cap * tanh(s * per_cap)


def _of_softcap(s, b, h, p, j, cap, per_cap):
    return of_tanh(s * per_cap)


def _alibi(s, b, h, p, j, slopes):
    return s - at(slopes, h) * abs(p - j)


def _alibi_of_batches(s, b, h, p, j, slopes):
    return s - at(slopes, b, h) * abs(p - j)


def _one(s, b, h, p, j, slopes):
    return 1.0


def softcap(c):
    """``c tanh(s / c)`` (``eq-masks-softcap``), for c from 1e-30 to 1e30."""
    if isinstance(c, bool) or not isinstance(c, int | float):
        raise wrong("softcap", "a real number", type_name(c), TypeError)
    low, high = SOFTCAPS
    if not low <= c <= high:
        raise wrong("softcap", f"a number from {low:.0e} to {high:.0e}", c)
    return Score(_softcap, float(c), 1.0 / c, derivative=_of_softcap)


def alibi(slopes):
    """``s - slope |p - j|`` (``eq-masks-alibi``); slopes ``[H]`` or ``[B, H]``."""
    masks.check_sizes("slopes", slopes, "[H]", "[B, H]")
    one = slopes.ndim == 1
    made = Score(_alibi if one else _alibi_of_batches, slopes, derivative=_one)
    made.sizes = (("slopes", slopes, "H" if one else "B H"),)
    return made
