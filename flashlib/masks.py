"""Masks as functions: which keys a query sees (chapter *Masks*, ``eq-masks-function``).

A :class:`Mask` is a Python function of a batch b, a head h, the position p of a query
and the position j of a key, written with operators and the functions of :data:`NAMED`.
The reference evaluates it on tensors; the kernels compile the same source. All four are
int32, and so are products of them, which wrap beyond 2^31 - 1. Query i has position p =
i + T_k - T_q, so that the last query is at the last key.

    def near(b, h, p, j, width):
        return p - j < width

    mask = Mask(near, 512) & causal()

Numbers are compiled into the kernel. Tensors are read by ``at(x, a, b, ...)``, and what
a kernel is compiled for does not depend on what is in them. So put a number that
changes between calls into a tensor: each new one as an integer compiles another kernel,
and a process keeps them all.
"""

import ast
import functools
import hashlib
import types
from typing import Any, NamedTuple

import torch

from flashlib import internals
from flashlib.plain_checks import (
    UNLIMITED,
    check_count,
    check_window,
    type_name,
    wrong,
)
from flashlib.sources import require_integers, source_of, tried

# -- what a function may use, on tensors


def at(x, *indices):
    """The elements of x at these indices, one for each dimension, which broadcast. An
    index outside of x means the nearest one inside.
    """
    inside = (
        torch.as_tensor(n, device=x.device).clamp(0, size - 1)
        for n, size in zip(indices, x.shape, strict=True)
    )
    return x[tuple(inside)]


def div(a, b):
    """a / b for integers, rounded down."""
    require_integers("div", a, b)
    return a // b


def mod(a, b):
    """The remainder of ``div(a, b)``, from 0 to b - 1 for a positive b."""
    require_integers("mod", a, b)
    return a % b


def row(x, p):
    """The row of a query at position p in x ``[B, H, T_q, T_k]``."""
    return p - (x.shape[3] - x.shape[2])


def where(condition, a, b):
    """a where the condition is true, and b elsewhere."""
    return torch.where(condition, a, b)


NAMED = {"at": at, "div": div, "mod": mod, "row": row, "where": where, "abs": abs}


def in_kernels():
    """The functions of :data:`NAMED` for kernels. They are jit functions, since the
    interpreter changes Triton's own while a kernel runs.
    """
    from flashlib.kernels import functions, scores

    own = {name: getattr(functions, name) for name in NAMED if name != "abs"}
    own |= {"abs": functions.absolute, "tanh": scores.tanh, "of_tanh": scores.of_tanh}
    return own | {"exp": functions.exponential, "log": functions.logarithm}


# -- functions


@functools.cache
def compiled(code, name):
    """The function with this code for Triton's compiler or interpreter."""
    import triton
    import triton.language as tl

    from flashlib import kernels  # which chooses between them

    # The interpreter looks for tl in the scope of every function.
    scope = {**in_kernels(), "tl": tl, "__name__": kernels.__name__}
    return triton.jit(types.FunctionType(code, scope, name))


class Rule(NamedTuple):
    """A function and its arguments: numbers, tensors and Rules. That of a score may
    have a derivative of the same arguments.
    """

    function: Any
    arguments: tuple
    derivative: Any = None

    def mapped(self, number, tensor, function):
        """A Rule with number(x), tensor(x) and function(x) in place of each."""

        def part(x):
            if isinstance(x, Rule):
                return x.mapped(number, tensor, function)
            return tensor(x) if isinstance(x, torch.Tensor) else number(x)

        derivative = self.derivative and function(self.derivative)
        return Rule(
            function(self.function), tuple(map(part, self.arguments)), derivative
        )

    def text(self):
        """The function and its arguments, of tensors the dtype and the sizes."""

        def part(x):
            if isinstance(x, torch.Tensor):
                return f"{x.dtype}{[*x.shape]}"
            return x.text() if isinstance(x, Rule) else repr(x)

        name = self.function.__name__.removeprefix("_")
        return f"{name}({', '.join(map(part, self.arguments))})"

    def tensors(self):
        """The tensors of a Rule, in their order."""
        for x in self.arguments:
            if isinstance(x, Rule):
                yield from x.tensors()
            elif isinstance(x, torch.Tensor):
                yield x


CAPTURED = torch.empty(0)  # the place of a tensor that a function reads
KNOWN = {}  # {key: the Rule of a Mask, with CAPTURED in place of each of its tensors}


def both(b, h, p, j, first, second):
    """``first & second`` for two Rules."""
    return first[0](b, h, p, j, *first[1]) & second[0](b, h, p, j, *second[1])


def either(b, h, p, j, first, second):
    """``first | second`` for two Rules."""
    return first[0](b, h, p, j, *first[1]) | second[0](b, h, p, j, *second[1])


def opposite(b, h, p, j, first):
    """``~first`` for a Rule."""
    return first[0](b, h, p, j, *first[1]) == 0


def elsewhere(b, h, p, j, whole, heads, rows, keys):
    """A whole mask, given by its Rule, at these heads, positions and keys of it."""
    return whole[0](b, at(heads, h), at(rows, p), at(keys, j), *whole[1])


def register(made):
    """Add the Rule of a Mask or a Score to those that are known: one that was pickled
    may come from another process.
    """
    KNOWN.setdefault(
        made.key, made.rule.mapped(lambda x: x, lambda x: CAPTURED, lambda f: f)
    )


# torch.compile calls these two while it traces, and keeps what they return.


@internals.constant_while_tracing
def defined(function, *kinds):
    """``(key, by_batch, by_head)`` of a Mask of this function, whose arguments have
    these kinds, as ``kind_of``.

    Raises the errors of Mask.
    """
    source = source_of(function, "mask", ("b", "h", "p", "j"), len(kinds), NAMED)
    key, *depends = summary(source, kinds)
    if key not in KNOWN:

        def evaluate():
            n = torch.zeros(2, dtype=torch.int32, device="cpu")
            return function(n, n, n, n, *map(stand_in, kinds))

        seen = tried("mask", evaluate)
        if not isinstance(seen, torch.Tensor) or seen.dtype != torch.bool:
            got = getattr(seen, "dtype", type(seen).__name__)
            raise wrong("mask", "a function that returns booleans", got, TypeError)
        KNOWN[key] = Rule(function, captured(kinds))
    return key, *depends


@functools.cache
def summary(source, kinds):
    """What ``defined`` returns for a source."""
    names = {node.id for node in ast.walk(ast.parse(source)) if type(node) is ast.Name}
    key = hashlib.sha256(f"{source} {kinds}".encode()).hexdigest()
    return key, "b" in names, "h" in names


@internals.constant_while_tracing
def combined(function, *keys):
    """The key of a Mask that combines those with these keys."""
    key = hashlib.sha256(f"{function.__name__} {keys}".encode()).hexdigest()
    KNOWN.setdefault(key, Rule(function, tuple(KNOWN[key] for key in keys)))
    return key


class Mask:
    """Which keys a query sees: True where ``function(b, h, p, j, *arguments)`` is.

    function
        defined by ``def``; it may use only its parameters and the functions in NAMED,
        such as ``at`` and ``where`` of this module. It gets b, h, p and j as int32
        tensors that broadcast, and returns booleans.
    arguments
        integers, and tensors (int32, int64 or bool) on the device of the queries, which
        the function reads by ``at``. Each new integer compiles another kernel, which
        stays in memory: a number that changes between calls belongs in a tensor.

    Masks are combined by ``&``, ``|`` and ``~``. Raises TypeError or ValueError that
    names what the function may not do.
    """

    def __init__(self, function, *arguments):
        for x in arguments:
            check_argument("mask", x)
        self.key, *depends = defined(function, *map(kind_of, arguments))
        # Whether the mask can differ between batches, and between heads.
        self.depends, self.rule = tuple(depends), Rule(function, arguments)
        self.sizes = ()  # (name, tensor, least sizes) of the tensors of a named mask

    @classmethod
    def _combined(cls, function, *masks):
        for mask in masks:
            if not isinstance(mask, Mask):
                got = type(mask).__name__
                raise wrong("mask", "a Mask on both sides", got, TypeError)
        made = object.__new__(cls)
        made.key = combined(function, *[mask.key for mask in masks])
        made.rule = Rule(function, tuple([mask.rule for mask in masks]))
        by_batch, by_head = zip(*[mask.depends for mask in masks], strict=True)
        made.depends = any(by_batch), any(by_head)
        made.sizes = sum([mask.sizes for mask in masks], ())
        return made

    def __repr__(self):
        return f"<Mask {self.rule.text()}>"

    def __setstate__(self, state):
        vars(self).update(state)
        register(self)

    def __and__(self, other):
        return Mask._combined(both, self, other)

    def __or__(self, other):
        return Mask._combined(either, self, other)

    def __invert__(self):
        return Mask._combined(opposite, self)

    def part(self, heads, rows, keys):
        """The Mask of a part of this one's scores: its head h, position p and key j are
        heads[h], rows[p] and keys[j] of this one, int64 tensors. It reads three tensors
        more than this one.
        """
        made = object.__new__(Mask)
        made.key = hashlib.sha256(f"part {self.key}".encode()).hexdigest()
        rule = Rule(elsewhere, (KNOWN[self.key], *(CAPTURED,) * 3))
        KNOWN.setdefault(made.key, rule)
        made.rule = Rule(elsewhere, (self.rule, heads, rows, keys))
        made.depends, made.sizes = self.depends, ()
        return made

    def __call__(self, b, h, p, j):
        """The function on int32 tensors that broadcast."""
        return self.rule.function(b, h, p, j, *self.rule.arguments)

    def visible(self, B, H, T_q, T_k, device=None, batch=0, oldest=0):
        """Boolean ``[B, H, T_q, T_k]``, True where query i sees key j; the first batch
        and the first key may have other numbers than 0.
        """
        indices = indices_of(B, H, T_q, T_k, device, batch, oldest)
        return self(*indices).expand(B, H, T_q, T_k)

    def reach(self):
        """How many keys before its own position a query sees at most, as the mask's
        windows say.
        """
        return reach_of(self.rule)

    def tensors(self):
        """The tensors that the mask reads, in their order."""
        return tuple(self.rule.tensors())

    def require_sizes(self, B, H, T_k):
        """Raise ValueError where a tensor of a mask with a name is too small."""
        require_sizes("mask", self.sizes, B=B, H=H, T_k=T_k)


def indices_of(B, H, T_q, T_k, device, batch, oldest):
    """``(b, h, p, j)`` of all pairs ``[B, H, T_q, T_k]``, int32 tensors that broadcast;
    the first batch and the first key have these numbers.
    """
    b, h, i, j = (
        torch.arange(n, dtype=torch.int32, device=device).view([-1, *[1] * (3 - dim)])
        for dim, n in enumerate((B, H, T_q, T_k))
    )
    return b + batch, h, i + (T_k - T_q) + oldest, j + oldest


def require_sizes(name, sizes, **known):
    """Raise ValueError where a tensor in the sizes of a Mask or a Score, called name,
    is smaller than these known ones. T_k/4 are blocks of four keys.
    """

    def number(text):
        size, _, block = text.partition("/")
        return -(-known[size] // int(block or 1)) if size in known else int(text)

    for part, x, text in sizes:
        least = [number(size) for size in text.split()]
        fits = x.ndim == len(least)
        if not fits or any(n < m for n, m in zip(x.shape, least, strict=True)):
            expected = f"{part} [{text.replace(' ', ', ')}], at least {least}"
            raise wrong(name, expected, list(x.shape))


def kind_of(x):
    """An argument as a part of a key: a number, or the dtype and the dimensions of a
    tensor.
    """
    return (x.dtype, x.ndim) if isinstance(x, torch.Tensor) else x


def stand_in(kind):
    """An argument of this kind on the CPU, to try a function with."""
    if not isinstance(kind, tuple):
        return kind
    dtype, dimensions = kind
    return torch.ones([1] * dimensions, dtype=dtype, device="cpu")


def captured(kinds):
    """The arguments of these kinds, with CAPTURED in place of each tensor."""
    return tuple(CAPTURED if isinstance(kind, tuple) else kind for kind in kinds)


INTEGERS = (torch.int32, torch.int64, torch.bool)


def check_argument(name, x, dtypes=INTEGERS, numbers="integers"):
    """x is an integer, or a tensor of these dtypes that a function can read; an error
    says which numbers the caller takes.

    Raises TypeError or ValueError with the name.
    """
    if isinstance(x, torch.Tensor):
        if x.dtype not in dtypes:
            first, last = dtypes[:-1], str(dtypes[-1])
            expected = f"tensors of {', '.join(map(str, first))} or {last}"
            raise wrong(name, expected.replace("torch.", ""), x.dtype, TypeError)
        if x.numel() == 0 or not 1 <= x.ndim <= 4:
            expected = "tensors with 1 to 4 dimensions and at least one element"
            raise wrong(name, expected, list(x.shape))
    elif isinstance(x, bool) or not isinstance(x, int):
        expected = f"{numbers} and tensors as arguments"
        raise wrong(name, expected, type_name(x), TypeError)
    elif abs(x) >= 2**31:
        raise wrong(name, "integers of 32 bits", x)


class Table(NamedTuple):
    """A tensor as ``at`` reads it in a kernel."""

    ptr: Any
    sizes: tuple
    strides: tuple


def for_kernel(key, tensors):
    """The Rule of a Mask as a kernel takes it: compiled functions, constants, and a
    Table for each of the tensors.
    """
    import triton.language as tl

    from flashlib.kernels import INTERPRETED

    following = iter(tensors)

    def table(_):
        x = next(following)
        return Table(x, tuple(x.shape), tuple(x.stride()))

    # In the interpreter the sum of a constant and a tensor would be a constant.
    number = (lambda x: x) if INTERPRETED else tl.constexpr
    return KNOWN[key].mapped(number, table, lambda f: compiled(f.__code__, f.__name__))


# -- masks with names


def check_sizes(name, x, *allowed):
    """x is a tensor with as many dimensions as one of these texts, as ``[B, T_k]``."""
    expected = f"a tensor {' or '.join(allowed)}"
    if not isinstance(x, torch.Tensor):
        raise wrong(name, expected, type(x).__name__, TypeError)
    if x.ndim not in [text.count(",") + 1 for text in allowed]:
        raise wrong(name, expected, list(x.shape))


def _causal(b, h, p, j):
    return j <= p


def _window(b, h, p, j, left, right):
    return (p - j <= left) & (j - p <= right)


def _prefix(b, h, p, j, n):
    return (j < n) | (j <= p)


def _chunks(b, h, p, j, size):
    return (j <= p) & (div(j, size) == div(p, size))


def _documents(b, h, p, j, ids):
    return at(ids, p) == at(ids, j)


def _documents_of_batches(b, h, p, j, ids):
    return at(ids, b, p) == at(ids, b, j)


def _padding(b, h, p, j, starts, ends):
    return (at(starts, b) <= j) & (j < at(ends, b))


def _tree(b, h, p, j, ancestors):
    return at(ancestors, p, j)


def _blocks(b, h, p, j, chosen, size_q, size_k):
    return at(chosen, b, h, div(p, size_q), div(j, size_k))


def _nothing(b, h, p, j):
    return j < 0


def _tensor(b, h, p, j, x):
    return at(x, b, h, row(x, p), j)


def _tensor_of_cache(b, h, p, j, x, lengths, T_q):
    return at(x, b, h, p - at(lengths, b) + T_q, j)


def conjuncts(rule):
    """The Rules that must all show a key."""
    if rule.function is both:
        for one in rule.arguments:
            yield from conjuncts(one)
    else:
        yield rule


def reach_of(rule):
    """The reach of the Mask with this Rule."""
    if rule.function is _window:
        return rule.arguments[0]
    if rule.function is both:
        return min(*map(reach_of, rule.arguments))
    return UNLIMITED


def is_narrow(rule, causal):
    """Whether the Mask with this Rule, causal or not, shows a query only keys of its
    own document, or of its own chunk, up to its position, so that most tiles of a long
    sequence are hidden and few of the others are whole.
    """
    parts = list(conjuncts(rule))
    found = {x.function for x in parts}
    causal = causal or _causal in found
    causal = causal or any(x.function is _window and x.arguments[1] == 0 for x in parts)
    documents = _documents in found or _documents_of_batches in found
    return _chunks in found or (documents and causal)


def causal():
    """A query sees the keys up to its own position."""
    return Mask(_causal)


def window(left, right):
    """A query sees the keys p - left <= j <= p + right; a side that is None has no
    limit (``eq-masks-window``). Raises TypeError or ValueError
    for other sides.
    """
    return Mask(_window, *check_window((left, right)))


def prefix(n):
    """A query sees the first n keys and those up to its own position."""
    return Mask(_prefix, n)


def chunks(size):
    """A query sees the keys of its own chunk of ``size`` keys, up to its position."""
    check_count("size", size)
    return Mask(_chunks, size)


def documents(ids):
    """A query sees the keys with its own document id; ids ``[B, T_k]`` or ``[T_k]``, by
    position.
    """
    check_sizes("ids", ids, "[T_k]", "[B, T_k]")
    one = ids.ndim == 1
    made = Mask(_documents if one else _documents_of_batches, ids)
    made.sizes = (("ids", ids, "T_k" if one else "B T_k"),)
    return made


def padding(starts, ends):
    """A query sees the keys starts[b] to ends[b] - 1 of its sequence, which are not
    padding; starts and ends ``[B]``.
    """
    check_sizes("starts", starts, "[B]")
    check_sizes("ends", ends, "[B]")
    made = Mask(_padding, starts, ends)
    made.sizes = ("starts", starts, "B"), ("ends", ends, "B")
    return made


def tree(ancestors):
    """A query at a node sees the nodes on its way to the root; ancestors bool ``[T,
    T]``, True at [node, ancestor] and [node, node].
    """
    check_sizes("ancestors", ancestors, "[T, T]")
    made = Mask(_tree, ancestors)
    made.sizes = (("ancestors", ancestors, "T_k T_k"),)
    return made


def blocks(chosen, size_q, size_k):
    """A query sees the keys of the blocks that are chosen for its block: chosen bool
    ``[B or 1, H or 1, blocks of queries, of keys]``, True where a position p in block p
    // size_q sees a key j in block j // size_k.
    """
    check_sizes("chosen", chosen, "[B, H, blocks of queries, of keys]")
    check_count("size_q", size_q)
    check_count("size_k", size_k)
    made = Mask(_blocks, chosen, size_q, size_k)
    made.depends = (chosen.shape[0] > 1, chosen.shape[1] > 1)
    first = (x if more else "1" for x, more in zip("BH", made.depends, strict=True))
    made.sizes = (("chosen", chosen, f"{' '.join(first)} T_k/{size_q} T_k/{size_k}"),)
    return made


def from_tensor(x, T_q, T_k):
    """The Mask that a boolean tensor is, True where a query sees a key; x broadcasts to
    ``[B, H, T_q, T_k]``. Raises ValueError where it does not.
    """
    sizes = list(x.shape)
    x = x[(None,) * (4 - x.ndim)]
    if x.shape[2] not in (1, T_q) or x.shape[3] not in (1, T_k):
        raise wrong("mask", f"sizes that broadcast to [B, H, {T_q}, {T_k}]", sizes)
    if x.numel() == 0:  # there are no queries or no keys
        return Mask(_nothing)
    made = Mask(_tensor, x.expand(*x.shape[:2], T_q, T_k))
    made.depends = (x.shape[0] > 1, x.shape[1] > 1)
    return made


def from_cache_tensor(x, T_q, capacity, lengths):
    """As from_tensor, for a cache with up to ``capacity`` keys for each sequence; x
    broadcasts to ``[B, H, T_q, capacity]``. The queries are the last T_q of the keys,
    whose numbers are the lengths ``[B]``.
    """
    made = from_tensor(x, T_q, capacity)
    if made.tensors() and lengths.numel():
        return Mask(_tensor_of_cache, *made.tensors(), lengths, T_q)
    return made
