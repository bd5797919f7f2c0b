"""What the visible tests of the assignments and the grader share. Students receive this
module; it imports Triton only where bounds are checked.
"""

import collections
import contextlib
import dataclasses
import tracemalloc
import types
import weakref
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FACTOR, DRAWS = 10, 8
OWN_BYTES = 2**17
# As they are now, whatever a student's code makes of them.
ELEMENTS, WIDTH = torch.Tensor.numel, torch.Tensor.element_size
STORAGE = torch.Tensor.untyped_storage
BYTES, ADDRESS = torch.UntypedStorage.nbytes, torch.UntypedStorage.data_ptr
# The interpreter's methods: {name: (access, position of its pointers, of its mask)}.
ACCESSES = {
    "create_masked_load": ("load", 0, 1),
    "create_masked_store": ("store", 0, 2),
    "create_atomic_rmw": ("atomic operation", 1, 3),
    "create_atomic_cas": ("atomic operation", 0, None),
}

# What divides a block, and what a division can be written with: 1 / l is exp(-log(l)).
DIVISIONS = (
    "create_fdiv", "create_precise_divf", "create_rsqrt", "create_log", "create_log2",
)  # fmt: skip


def assert_agrees(name, found, formula, *inputs):
    """Judge a tensor against a formula in PyTorch, row by row (last dimension), by the
    error of the formula itself in the same precision.

    formula(*inputs) is evaluated in the dtype of its inputs, 16 bits widened to
    float32, which gives PyTorch's own error, and in float64, where 8 further
    evaluations move every input by at most one rounding. A row of ``found`` may be off
    by ten times the largest of these errors, of this row or of the median row, plus one
    rounding of the row's size. An evaluation that overflows in a row, or underflows to
    zeros, has no error to compare with and does not count there.

    Raises AssertionError with a text for the student, and ValueError, whatever was
    found, if the formula is NaN in float64.
    """
    generator = torch.Generator().manual_seed(0)

    def real(x):
        return isinstance(x, torch.Tensor) and x.is_floating_point()

    def in_float64(x, moved=0):
        if not real(x):
            return x
        noise = 2 * torch.rand(x.shape, dtype=torch.float64, generator=generator) - 1
        return x.double() * (1 + moved * torch.finfo(x.dtype).eps * noise.to(x.device))

    if not isinstance(found, torch.Tensor):
        raise AssertionError(f"{name} must be a tensor, got {type(found).__name__}")
    plain, exact = formula(*inputs), formula(*map(in_float64, inputs))
    if exact.isnan().any():
        raise ValueError(f"{name}: expected inputs that have a result, got NaN for it")
    wanted, got = tuple(plain.shape), tuple(found.shape)
    if len(got) != len(wanted):  # more sides could spell what a student must not see
        got = f"{len(got)} dimensions"
    if got != wanted:
        raise AssertionError(f"{name} must have the shape {wanted}, got {got}")
    if found.dtype != plain.dtype:
        raise AssertionError(f"{name} must be {plain.dtype}, got {found.dtype}")
    if found.numel() == 0:
        return
    if exact.ndim == 0:
        found, exact = found[None], exact[None]
    rounded = exact.to(found.dtype)
    wrong = ~(found.isfinite() & rounded.isfinite()) & (found != rounded)
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        right = rounded[place]
        wanted = "a finite number" if right.isfinite() else right.item()
        raise AssertionError(
            f"{name} is {found[place].item()} at {place}, expected {wanted} there"
        )

    def rms(x):
        x = torch.where(rounded.isfinite(), x.double(), 0.0)
        return x.square().mean(dim=-1).sqrt()

    def error(x):
        x = x.reshape(exact.shape)
        off = rms(x.double() - exact)
        lost = ~(x != 0).any(dim=-1) & (exact != 0).any(dim=-1)
        return off.masked_fill(~off.isfinite() | lost, 0.0)

    widened = (x.float() if real(x) and x.itemsize < 4 else x for x in inputs)
    off, own = rms(found.double() - exact), error(formula(*widened))
    for _ in range(DRAWS):
        moved = formula(*(in_float64(x, moved=1) for x in inputs))
        own = torch.maximum(own, error(moved))
    budget = FACTOR * own.clamp(min=own.median().item())
    eps = torch.finfo(found.dtype).eps
    budget += torch.maximum(eps * rms(exact), rms(rounded.double() - exact))
    rows = (~(off <= budget)).nonzero()
    if len(rows):
        place = tuple(rows[0].tolist())
        raise AssertionError(
            f"{name} is wrong in {len(rows)} of {off.numel()} rows, first in row "
            f"{place}: its error is {off[place].item():.2g} (root mean square), "
            f"rounding explains {budget[place].item():.2g}"
        )


class Largest(TorchDispatchMode):
    """Within this context, how many numbers are held at once.

    ``numbers``, known at the end, is the largest of three counts: the numbers of the
    largest tensor that an operation has made; an eighth of those of all tensors that
    were alive together; and an eighth of what Python's ``tracemalloc`` has seen alive,
    as numbers of 64 bits. NumPy tells tracemalloc of its arrays, and a list of numbers
    consists of Python's objects. So do the tensors and the program itself: what they
    need at most, ``OWN_BYTES``, is not counted.
    """

    # Nothing is compiled here. Otherwise the first call would import PyTorch's
    # compiler, which takes as long as PyTorch itself.
    _should_skip_dynamo = classmethod(lambda cls: False)

    def __init__(self):
        super().__init__()
        self.numbers = 0
        self.alive = {}  # {address of a storage: (its numbers, its tensors)}

    def __enter__(self):
        self.tracing = tracemalloc.is_tracing()
        if not self.tracing:
            tracemalloc.start()
            tracemalloc.reset_peak()
        self.before, _ = tracemalloc.get_traced_memory()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        _, peak = tracemalloc.get_traced_memory()
        if not self.tracing:
            tracemalloc.stop()
        held = peak - self.before - OWN_BYTES
        self.numbers = max(self.numbers, held // 64)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = _tensors([*args, *kwargs.values()])
        fresh = "lift_fresh" in str(function)  # torch.tensor has made it
        places = {ADDRESS(STORAGE(x)) for x in tensors if not fresh}
        result = function(*args, **kwargs)
        for x in _tensors([result]):
            self._made(x, places)
        return result

    def _made(self, x, places):
        storage = STORAGE(x)
        size, place = BYTES(storage) // WIDTH(x), ADDRESS(storage)
        if place not in places or ELEMENTS(x) > size:  # more than a view of a part
            self.numbers = max(self.numbers, size, ELEMENTS(x))
        if place in places and place not in self.alive:
            return
        _, tensors = self.alive.get(place, (0, weakref.WeakValueDictionary()))
        tensors[id(x)] = x
        self.alive[place] = size, tensors
        self.alive = {place: held for place, held in self.alive.items() if held[1]}
        together = sum(size for size, _ in self.alive.values())
        self.numbers = max(self.numbers, together // 8)


def _tensors(values):
    """The tensors among values, and in the lists and tuples of an operation there."""
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


@contextlib.contextmanager
def bounds_checked():
    """Within this context every load, store and atomic operation of a kernel must be
    inside a tensor that the kernel was given.

    An access outside raises IndexError that names the nearest argument and the element.
    Compiled kernels are not checked: use ``compute-sanitizer``.

    The value of the context counts: ``largest`` is the most elements that one access
    has, ``loaded[n]`` how many elements of a kernel's n-th tensor were read, also by
    atomic operations, and ``divisions`` how often a block of floats was divided, or its
    logarithm taken.
    """
    from flashlib import kernels

    seen = types.SimpleNamespace(largest=0, divisions=0, loaded=collections.Counter())
    if not kernels.INTERPRETED:
        yield seen
        return
    from triton.runtime import interpreter

    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    make_arguments = executor._init_args_hst
    extents = []  # (name, first address, address after the last element, bytes each)

    def arguments(self, args, kwargs):
        made = make_arguments(self, args, kwargs)
        named = [*zip(self.arg_names, made[0], strict=False), *made[1].items()]
        extents[:] = [_extent(*x) for x in named if isinstance(x[1], torch.Tensor)]
        return made

    def checked(access, what, pointers, mask):
        def call(*args, **kwargs):
            used = args[pointers].data.reshape(-1).astype("int64")
            if mask is not None:
                # Block pointers and descriptors have their masks as arrays.
                kept = args[mask]
                if isinstance(kept, interpreter.TensorHandle):
                    kept = kept.data
                used = used[kept.reshape(-1).astype(bool)]
            _require_inside(what, used, extents)
            seen.largest = max(seen.largest, args[pointers].data.size)
            if what != "store" and used.size:
                inside = [first <= used[0] < end for _, first, end, _ in extents]
                seen.loaded[inside.index(True)] += used.size
            return access(*args, **kwargs)

        return call

    def counted(divide):
        def call(*args):
            seen.divisions += args[0].data.size > 1
            return divide(*args)

        return call

    calls = {x: checked(getattr(builder, x), *how) for x, how in ACCESSES.items()}
    calls |= {x: counted(getattr(builder, x)) for x in DIVISIONS}
    # It would compute whether each sum of integers overflows, and drop the answer.
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    entering = mock.patch.object(executor, "_init_args_hst", arguments)
    with entering, mock.patch.multiple(builder, options=options, **calls):
        yield seen


def _extent(name, x):
    steps = [(n - 1) * by for n, by in zip(x.shape, x.stride(), strict=True)]
    size = x.element_size() if x.numel() else 0
    return name, x.data_ptr(), x.data_ptr() + (sum(steps) + 1) * size, x.element_size()


def _require_inside(what, used, extents):
    inside = used < 0
    for _, first, end, _ in extents:
        inside |= (used >= first) & (used < end)
    if inside.all():
        return
    address = int(used[~inside][0])
    far = [max(first - address, address - end + 1) for _, first, end, _ in extents]
    name, first, end, size = extents[far.index(min(far))]
    raise IndexError(
        f"{what} out of range: element {(address - first) // size} of {name}, which "
        f"has elements 0 to {(end - first) // size - 1} (a mask is missing, or wrong)"
    )
