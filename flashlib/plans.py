"""Plans: what a call allocates and launches, decided without seeing a tensor.

A launcher is a function that decides how some results are computed: tiles, grids,
buffers, kernels. It reads like PyTorch, but in place of each tensor it gets a
:class:`Spec`, which has the sizes, the strides, the dtype, the device and the alignment
of a tensor and nothing else. What the launcher asks for becomes the steps of a
:class:`Plan`, in which every argument has its own place. The first call with tensors of
some kind prepares a plan; this call and all later ones run it.

So a plan depends on nothing but its key (and, where tiles are tuned, on what was
timed), and it does not matter whether two arguments are the same tensor: a launcher
cannot know.
"""

import concurrent.futures
import copy
import functools
import itertools
import math
import operator
import threading
from typing import NamedTuple

import torch

from flashlib import internals

# The most plans, or tensor maps of one descriptor, that are kept. The oldest is dropped
# before one more is added.
MOST_KEPT = 1024
KEEPING = threading.Lock()
PLANS = {}  # {(launcher, deterministic mode, options, *facts of tensors): its Plan}
ZEROS = {}  # {(device, stream): an iterator of zeros that no launch has used}
PLAIN = (torch.Tensor, torch.nn.Parameter)
INTERPRETING = threading.RLock()  # Triton's interpreter runs one kernel at a time


def plain(*tensors):
    """Whether a call can run without PyTorch's dispatcher: nothing traces or transforms
    it, and each tensor that is not None has its values where its address says.
    """
    if internals.needs_dispatcher():
        return False
    for x in tensors:
        if x is not None and (
            type(x) not in PLAIN
            or x.layout is not torch.strided
            or x.is_nested
            or x.is_neg()
        ):
            return False
    return True


def facts(x):
    """What a plan may depend on in a tensor: sizes, strides, dtype, device, and how far
    its address is past a multiple of 16.
    """
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16


def run(launcher, tensors, options=()):
    """What launcher(*tensors, *options) computes, by running its plan. A tensor may be
    None; options must be hashable.
    """
    # Launchers may refuse what the deterministic mode forbids.
    mode = torch.are_deterministic_algorithms_enabled()
    key = launcher, mode, options, *[x if x is None else facts(x) for x in tensors]
    plan = PLANS.get(key)
    if plan is None:
        plan = Plan(launcher, tensors, options)
        keep(PLANS, key, plan)
    return plan.run(tensors)


def keep(known, key, value):
    """Add to a dictionary of at most MOST_KEPT entries, of which the oldest leaves."""
    with KEEPING:  # another thread could change it between two steps
        if len(known) >= MOST_KEPT:
            del known[next(iter(known))]
        known[key] = value


def planned(launcher):
    """Decorate a launcher so that it can be called in two ways. Another launcher calls
    it with Specs: its steps become a part of that launcher's plan. Tests, benchmarks
    and chapters call it with tensors, also inside of tuples: it runs a plan of its own.
    """

    def unfolded(*tensors_and_folded):
        *tensors, folded = tensors_and_folded
        rest = iter(tensors)
        arguments, options = mapped(lambda x: next(rest) if x is TENSOR else x, folded)
        return launcher(*arguments, **dict(options))

    @functools.wraps(launcher)
    def call(*arguments, **options):
        tensors = []

        def taken(x):
            if isinstance(x, torch.Tensor | Spec):
                tensors.append(x)
                return TENSOR
            return x

        folded = mapped(taken, (arguments, tuple(options.items())))
        specs = [x for x in tensors if isinstance(x, Spec)]
        if specs and len(specs) < len(tensors):
            raise TypeError(
                f"{launcher.__name__}: expected Specs only, got tensors too"
            )
        if specs:
            return launcher(*arguments, **options)
        return run(unfolded, tensors, (folded,))

    return call


TENSOR = object()  # the place of a tensor in nested tuples


def mapped(function, x):
    """The nested tuples x with function(y) in place of each y that is not a tuple."""
    if not isinstance(x, tuple):
        return function(x)
    parts = [mapped(function, y) for y in x]
    return type(x)(*parts) if hasattr(x, "_make") else tuple(parts)


class Plan:
    """The steps of a launcher, in their order, for tensors like these. A step is
    ``step(tensors, how)``: all tensors of a run, in a list, and on a GPU how = (stream,
    hooks), which launches need.
    """

    def __init__(self, launcher, tensors, options=()):
        self.steps, self.places, specs = [], 0, []
        for x in tensors:
            specs.append(None if x is None else Spec(self, *facts(x)))
            self.places = len(specs)  # None has one too
        first = next(x for x in specs if x is not None)
        results = launcher(*specs, *options)
        self.index = first.device.index if first.is_cuda else None
        self.unfilled = [None] * (self.places - len(specs))  # what steps allocate
        self.returned = returned(results)

    def run(self, tensors):
        """What the launcher returns for these tensors."""
        if self.index is not None and internals.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.run(tensors)
        tensors, how = [*tensors, *self.unfilled], ()
        if self.index is not None:
            how = internals.current_stream(self.index), internals.launch_hooks()
        for step in self.steps:
            step(tensors, how)
        return self.returned(tensors)


def returned(results):
    """A function that takes the tensors of a run, in the order of their places, and
    returns those that the launcher returned as Specs.
    """
    if results is None:
        return lambda tensors: None
    if isinstance(results, Spec):
        return operator.itemgetter(require_memory(results).place)
    places = [require_memory(x).place for x in results]
    return lambda tensors: tuple([tensors[n] for n in places])


# -- the Specs that a launcher gets, whose methods add steps to its plan


def require_memory(x):
    """The Spec, if a run has a tensor for it. Raises TypeError for a transposed one: a
    kernel can read that by its strides, but PyTorch would get the tensor itself.
    """
    if x.is_view:
        raise TypeError("a launcher passes a transposed Spec to kernels only")
    return x


def in_place(name):
    """A method of Spec: the method of torch.Tensor with this name, as a step."""
    method = getattr(torch.Tensor, name)

    def ask(self, *arguments):
        for x in (self, *arguments):
            if isinstance(x, Spec):
                require_memory(x)

        def change(tensors, how):
            with torch.no_grad():
                method(*filled((self, *arguments), tensors))

        self.plan.steps.append(change)
        return self

    return ask


class Spec:
    """What a launcher sees of a tensor. It has those methods of a tensor that launchers
    need; what allocates or changes a tensor becomes a step of the plan.
    """

    layout, is_nested = torch.strided, False

    def __init__(self, plan, shape, strides, dtype, device, past=0, place=None):
        self.is_view = place is not None  # of the tensor with this place
        self.plan, self.shape, self.strides = plan, torch.Size(shape), strides
        self.dtype, self.device, self.past = dtype, device, past
        self.ndim, self.is_cuda = len(shape), device.type == "cuda"
        self.place = plan.places if place is None else place
        plan.places = max(plan.places, self.place + 1)

    def __bool__(self):
        raise TypeError("a launcher cannot know what is in a tensor")

    def stride(self, n=None):
        """The strides, or that of dimension n, in elements."""
        return self.strides if n is None else self.strides[n]

    def numel(self):
        """The number of elements."""
        return math.prod(self.shape)

    def element_size(self):
        """The bytes of an element."""
        return self.dtype.itemsize

    def data_ptr(self):
        """The address modulo 16, which is all that Triton asks of it."""
        return self.past

    @property
    def mT(self):
        """The transposed matrices, in the same memory."""
        shape, strides = (
            (*x[:-2], x[-1], x[-2]) for x in (tuple(self.shape), self.strides)
        )
        return Spec(
            self.plan, shape, strides, self.dtype, self.device, self.past, self.place
        )

    def is_contiguous(self):
        """Whether the elements are dense, in the order of the dimensions."""
        pairs = zip(self.shape, self.strides, dense(self.shape), strict=True)
        return not self.numel() or all(n == 1 or a == b for n, a, b in pairs)

    def new_empty(self, *shape, dtype=None):
        """A new tensor, contiguous."""
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        return self.new_empty_strided(shape, dense(shape), dtype)

    def new_empty_strided(self, shape, strides, dtype=None):
        """A new tensor with these strides."""
        x = Spec(self.plan, shape, strides, dtype or self.dtype, self.device)
        make, place, dtype = internals.empty_strided(x.device), x.place, x.dtype
        shape = tuple(shape)

        def allocate(tensors, how):
            tensors[place] = make(shape, strides, dtype)

        self.plan.steps.append(allocate)
        return x

    def to(self, dtype):
        """The tensor, or a new one in this dtype."""
        if dtype == self.dtype:
            return self
        return empty_like(self, self.shape[-1], dtype).copy_(self)

    def contiguous(self):
        """The tensor, or a contiguous copy."""
        return self if self.is_contiguous() else self.new_empty(self.shape).copy_(self)

    def __neg__(self):
        return empty_like(self, self.shape[-1]).copy_(self).neg_()

    copy_, neg_, zero_, fill_ = map(in_place, ("copy_", "neg_", "zero_", "fill_"))
    add_, sub_, mul_, log2_ = map(in_place, ("add_", "sub_", "mul_", "log2_"))


def dense(shape):
    """The strides of a contiguous tensor."""
    steps = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
    return tuple(steps)[::-1]


def empty_like(x, columns, dtype=None):
    """A new tensor in the sizes of x, except the last, dense, and in the memory order
    of x, the last dimension contiguous.
    """
    shape, outer = (*x.shape[:-1], columns), x.stride()[:-1]
    order = range(len(outer))
    if 0 not in outer:  # not expanded
        order = sorted(order, key=lambda n: -outer[n])
    strides, step = [1] * len(shape), columns
    for n in reversed(order):
        strides[n], step = step, step * shape[n]
    return x.new_empty_strided(shape, tuple(strides), dtype=dtype or x.dtype)


def new_like(*tensors):
    """A new tensor, not filled, in the memory order of each of these."""
    return tuple(empty_like(x, x.shape[-1]) for x in tensors)


def new_results(q, v):
    """New o and lse (float32) for q ``[B, H, T, d]`` or packed ``[total, H, d]``: o in
    the memory order of q, with the columns of v.
    """
    rows = q.shape[:3] if q.ndim == 4 else (q.shape[1], q.shape[0])
    return empty_like(q, v.shape[-1]), q.new_empty(rows, dtype=torch.float32)


def launch(kernel, x, programs, *arguments, **options):
    """Launch kernel[(programs,)](*arguments, **options) on the device of x.

    Triton compiles now: of a tensor it asks the dtype and the alignment, which a Spec
    has.
    """
    from triton import JITFunction  # not what the interpreter runs

    def interpret(tensors, how):
        with INTERPRETING:
            kernel[(programs,)](*filled(arguments, tensors), **options)

    if not (x.is_cuda and isinstance(kernel, JITFunction)):
        x.plan.steps.append(interpret)
        return
    with torch.cuda.device(x.device):
        compiled = kernel.warmup(*arguments, grid=(programs,), **options)
        start = internals.CompiledLaunch(compiled, programs)
    about, flat = iter(start.of_descriptors), []
    for y in (
        *arguments,
        *(options[name] for name in kernel.arg_names[len(arguments) :]),
    ):
        if hasattr(y, "block_shape"):
            flat += [TensorMap(y, next(about)), *y.shape, *y.strides]
        else:
            flat.append(y)
    varying = [(n, addressed(y)) for n, y in enumerate(flat)]
    varying = [(n, address_of) for n, address_of in varying if address_of is not None]

    def run_compiled(tensors, how):
        values = flat.copy()
        for n, address_of in varying:
            values[n] = address_of(tensors)
        start(values, *how)

    x.plan.steps.append(run_compiled)


def filled(x, tensors):
    """An argument with tensors in place of the Specs in it."""

    def fill(y):
        if hasattr(y, "block_shape"):  # a descriptor
            y = copy.copy(y)
            y.base = tensors[y.base.place]
        return tensors[y.place] if isinstance(y, Spec) else y

    return mapped(fill, x)


def addressed(x):
    """A function of the tensors that returns the argument x with addresses in place of
    Specs; None where there are none.
    """
    if isinstance(x, Spec):
        place = x.place
        return lambda tensors: tensors[place].data_ptr()
    parts = [addressed(y) for y in x] if isinstance(x, tuple) else []
    if any(parts):
        parts = [f or (lambda tensors, y=y: y) for f, y in zip(parts, x, strict=True)]
        return lambda tensors: tuple([f(tensors) for f in parts])
    return x if isinstance(x, TensorMap) else None


class TensorMap:
    """The tensor map of a descriptor, which depends on the address of its tensor."""

    def __init__(self, descriptor, about):
        self.descriptor, self.about = descriptor, about
        self.place, self.known = descriptor.base.place, {}

    def __call__(self, tensors):
        address = tensors[self.place].data_ptr()
        made = self.known.get(address)
        if made is None:
            made = internals.tensor_map(self.descriptor, address, self.about)
            keep(self.known, address, made)
        return made


# -- zeros


def zeros(shape, dtype, x):
    """Zeros of this shape on the device of x. All are one number in memory, with stride
    0, and only for the launches of one run, which may overwrite it.
    """
    from triton import knobs

    zero = Spec(x.plan, shape, (0,) * len(shape), dtype, x.device)
    shared = x.is_cuda and not knobs.runtime.interpret

    def take(tensors, how):
        tensors[zero.place] = (
            next_zero(x.device, how[0])
            if shared
            else torch.zeros(1, dtype=dtype, device=x.device)
        )

    x.plan.steps.append(take)
    return zero


class Zero(NamedTuple):
    """Sixteen bytes of zeros in a tensor, as a launch needs them."""

    tensor: torch.Tensor  # alive until they are used
    address: int

    def data_ptr(self):
        """The address."""
        return self.address


def next_zero(device, stream):
    """A Zero for one run on the current stream. One fill makes 4096 of them; a CUDA
    graph that is being captured gets its own fill, which every replay of it repeats.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)
    zero = next(ZEROS.get((device, stream), iter(())), None)
    if zero is None:
        ZEROS[device, stream] = unused = more_zeros(device)
        zero = next(unused)
    return zero


def more_zeros(device):
    """An iterator of 4096 zeros, filled on the current stream. Another thread allocates
    them: under torch.compile, what this one allocates may belong to the pool of a CUDA
    graph and must not outlive the call.
    """
    stream = torch.cuda.current_stream(device)

    def fill():
        with torch.cuda.stream(stream):
            return torch.zeros(4096, 4, dtype=torch.int32, device=device)

    with concurrent.futures.ThreadPoolExecutor(1) as another:
        x = another.submit(fill).result()
    first = x.data_ptr()
    return map(functools.partial(Zero, x), range(first, first + x.nbytes, 16))
