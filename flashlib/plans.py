"""Launch plans: what a call allocates and launches, recorded once and then replayed.

A launcher is a function ``(*tensors, *options)`` that allocates results and launches
kernels. What it does depends only on its options and on the kind of its tensors (shape,
strides, dtype, device, alignment), not on their values. So the first call with tensors
of a kind runs the launcher, which chooses tiles, builds descriptors and lets Triton
compile, while a :class:`Tape` writes down each operation on tensors and each launch.
Later calls repeat these steps with the new tensors, at a tenth of the cost to the host.
"""

import concurrent.futures
import contextlib
import copy
import functools
import inspect
import itertools
import threading
from types import SimpleNamespace

import torch
from torch._C._dynamo import guards
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST = 1024  # plans that are kept; with the next one, all are forgotten
PLANS = {}  # {what a call depends on: its Plan, or None where it cannot be replayed}
ACCEPTED = set()  # (check, kind) that have passed
LAST = {}  # {(deterministic, *types of tensors): (guards or None, the last kind)}
ZEROS = {}  # {(device, stream): an iterator of zeros that no launch has used}
PLAIN = (torch.Tensor, torch.nn.Parameter)
_recording = threading.local()  # .tape, while a launcher is recorded
# Inductor's functions of (shape, strides, dtype), which bypass the dispatcher.
EMPTY = {"cpu": guards._empty_strided_cpu, "cuda": guards._empty_strided_cuda}


def kind(*tensors):
    """What a plan depends on in tensors; None while PyTorch traces or transforms the
    call, under a dispatch mode, and where a tensor needs the dispatcher (a subclass, a
    lazy negation).

    A kind that comes twice in a row is then recognized by the guards of torch.compile,
    which are written in C++.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
    ):
        return None
    deterministic = torch.are_deterministic_algorithms_enabled()  # launchers may refuse
    key = deterministic, *map(type, tensors)
    there = [x for x in tensors if x is not None]
    known, last = LAST.get(key, (None, None))
    if known is not None and known.check(*there) and aligned(there):
        return last
    found = [deterministic]
    for x in tensors:
        if x is None:
            found.append(None)
        elif type(x) in PLAIN and x.layout is torch.strided and not x.is_neg():
            found += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
        else:
            return None
    # A recording knows a tensor by its identity, so it holds only for calls in which
    # the same arguments are the same tensor.
    found += [next(n for n, y in enumerate(tensors) if y is x) for x in tensors]
    found = tuple(found)
    LAST[key] = guards_of(there) if found == last else None, found
    return found


def aligned(tensors):
    """Whether every address is a multiple of 16 bytes."""
    return all(x.data_ptr() % 16 == 0 for x in tensors)


def guards_of(tensors):
    """``check(*others)`` tells whether others have the types, dispatch keys, dtypes,
    devices, shapes, strides and need for gradients of these tensors, which it does not
    keep. None for tensors that are not aligned, since guards do not read addresses, and
    if a tensor is there twice, which guards refuse.
    """
    if not aligned(tensors) or len({*map(id, tensors)}) < len(tensors):
        return None
    sizes = [list(x.shape) for x in tensors]
    strides = [list(x.stride()) for x in tensors]
    dimensions = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
    return guards.TensorGuards(*tensors, **dimensions)


def clear():
    """Forget every plan and every check that has passed."""
    PLANS.clear()
    ACCEPTED.clear()
    LAST.clear()
    MAPS.clear()


def check_once(given, check, *tensors):
    """check(*tensors), unless it has passed for tensors of the kind given."""
    if given is None:  # a trace must not depend on what was accepted before
        check(*tensors)
    elif (check, given) not in ACCEPTED:
        check(*tensors)
        if len(ACCEPTED) >= LARGEST:
            ACCEPTED.clear()
        ACCEPTED.add((check, given))


def empty_like(x, columns, dtype=None):
    """A new tensor in the sizes of x, except the last, dense, and in the memory order of
    x, the last dimension contiguous.
    """
    shape, outer = (*x.shape[:-1], columns), x.stride()[:-1]
    order = range(len(outer))
    if 0 not in outer:  # not expanded
        order = sorted(order, key=lambda n: -outer[n])
    strides, step = [1] * len(shape), columns
    for n in reversed(order):
        strides[n], step = step, step * shape[n]
    return torch.empty_strided(shape, strides, dtype=dtype or x.dtype, device=x.device)


def new_results(q, v):
    """New o and lse (float32) for q ``[B, H, T, d]`` or packed ``[total, H, d]``: o in
    the memory order of q, with the columns of v.
    """
    rows = q.shape[:3] if q.ndim == 4 else (q.shape[1], q.shape[0])
    lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    return empty_like(q, v.shape[-1]), lse


def run(launcher, given, tensors, options):
    """launcher(*tensors, *options), replayed where there is a plan for tensors of the
    kind given.
    """
    key = (launcher, given, options)
    plan = PLANS.get(key)
    if plan is not None and not any(plan.watchers):
        return plan.replay(tensors)
    # Empty tensors are filled without a kernel.
    empty = any(x is not None and x.numel() == 0 for x in tensors)
    if given is None or empty or key in PLANS:
        return launcher(*tensors, *options)
    with unnoted(), Tape(tensors) as _recording.tape:
        results = launcher(*tensors, *options)
        plan = _recording.tape.plan(results)
    if len(PLANS) >= LARGEST:
        PLANS.clear()
    PLANS[key] = plan
    return results


def launch(kernel, x, programs, *args, **options):
    """kernel[(programs,)](*args, **options), on the device of x."""
    tape = getattr(_recording, "tape", None)
    # The interpreter copies tensors, which is no step of the launcher.
    with torch.cuda.device_of(x), unnoted():
        compiled = kernel[(programs,)](*args, **options)
    if tape is not None:
        tape.note_launch(kernel, programs, args, options, compiled)
    return compiled


def zeros(shape, dtype, device):
    """Zeros of this shape, all in the memory of a single one, for one launch, which may
    overwrite it. In a replay on a GPU it has 16 bytes, whatever the dtype.
    """
    tape = getattr(_recording, "tape", None)
    options = {"dtype": dtype, "device": device}
    with unnoted():
        x = torch.zeros((), **options).expand(shape)
    if tape is not None and x.is_cuda:
        tape.note_zero(device, x)
    elif tape is not None:
        tape.note(functools.partial(torch.zeros, 1, **options), (), x)
    return x


def next_zero(device):
    """``(tensor, address)``: 16 bytes of zeros in the tensor, for one launch on the
    current stream. One fill makes zeros for 4096 launches; a CUDA graph that is being
    captured gets its own fill, which every replay of the graph repeats.
    """
    if torch.cuda.is_current_stream_capturing():
        x = torch.zeros(4, dtype=torch.int32, device=device)
        return x, x.data_ptr()
    stream = device, torch._C._cuda_getCurrentRawStream(device.index)
    found = next(ZEROS.get(stream, iter(())), None)
    if found is None:
        ZEROS[stream] = rest = more_zeros(device)
        found = next(rest)
    return found


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
    return zip(itertools.repeat(x), range(first, first + x.nbytes, 16), strict=False)


@contextlib.contextmanager
def unnoted():
    """A context in which a tape takes no notes."""
    tape, _recording.tape = getattr(_recording, "tape", None), None
    try:
        yield
    finally:
        _recording.tape = tape


class Descriptor:
    """What the copy engine must know about a tensor, except its address. Triton checked
    it when the plan was recorded.
    """

    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, shape, strides, compiled_for):
        self.shape, self.strides, self.compiled_for = shape, strides, compiled_for

    def at(self, address):
        """The tensor map of a tensor at this address."""
        from triton.backends.nvidia import driver

        x = copy.copy(self)  # threads share self
        x.base = SimpleNamespace(data_ptr=lambda: address)
        return driver.make_tensordesc_arg(x, self.compiled_for)[0]


class TensorMaps(dict):
    """{(descriptor, address): its tensor map}. When full, it is cleared."""

    def __missing__(self, key):
        descriptor, address = key
        if len(self) >= 8 * LARGEST:
            self.clear()
        self[key] = found = descriptor.at(address)
        return found


MAPS = TensorMaps()


class Code(str):
    """Python that a tape copies into its function."""


def varies(x):
    """Whether x is, or has in it, what differs from one replay to the next."""
    inside = x if isinstance(x, tuple | list) else ()
    return isinstance(x, Code | torch.Tensor) or any(map(varies, inside))


class Tape(TorchDispatchMode):
    """Writes a Python function that repeats a launcher: a line for each operation on
    tensors, x7 = function(x3, c4), with constants c, and for each launch, which takes
    addresses a3 = x3.data_ptr().
    """

    # Nothing is compiled here. Otherwise the first call would import PyTorch's compiler,
    # which takes as long as PyTorch itself.
    _should_skip_dynamo = classmethod(lambda cls: False)

    def __init__(self, tensors):
        super().__init__()
        self.index = tensors[0].device.index
        self.whole, self.launches = True, 0
        self.names, self.lines, self.constants = [], [], {"maps": MAPS}
        self.addressed = set()  # names of tensors whose address has one
        self.parameters = ", ".join(["stream", *map(self.name, tensors)])

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        x = function(*args, **kwargs)
        name = function.name().removeprefix("aten::").split(".")[0]
        if _recording.tape is not self or (args and x is args[0] and name[-1] != "_"):
            return x
        if not torch.is_tensor(x):
            self.whole = False
            return x
        if name == "detach":  # the same tensor under another name
            self.names.append((x, self.place(args[0])))
        elif name in ("zeros", "new_zeros"):
            make = functools.partial(torch.zeros, dtype=x.dtype, device=x.device)
            self.note(make, (x.shape,), x)
        elif "empty" in name:
            make = EMPTY[x.device.type]
            self.note(make, (tuple(x.shape), x.stride(), x.dtype), x)
        else:
            self.whole = self.whole and not any(map(torch.is_tensor, kwargs.values()))
            self.note(functools.partial(function, **kwargs), args, x)
        return x

    def name(self, x):
        """A name for a new tensor."""
        self.names.append((x, f"x{len(self.names)}"))
        return self.names[-1][1]

    def place(self, x):
        """The name of a tensor. If it has none, there will be no plan."""
        found = [name for y, name in self.names if y is x]
        self.whole = self.whole and bool(found)
        return found[-1] if found else "None"

    def address(self, x):
        """The name of a tensor's address."""
        place = self.place(x)
        if place not in self.addressed:
            self.addressed.add(place)
            self.lines.append(f"a{place} = {place}.data_ptr()")
        return "a" + place

    def constant(self, x):
        """A name for what is the same in every replay. A plan holds no tensor."""
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        return name

    def write(self, x, tensor):
        """x as Python; tensor writes the tensors in it."""
        if isinstance(x, Code):
            return x
        if isinstance(x, torch.Tensor):
            return tensor(x)
        if not varies(x):
            return self.constant(x)
        parts = "".join(self.write(y, tensor) + ", " for y in x)
        # The interpreter reads tuples by the names of their fields.
        named = tensor == self.place and hasattr(x, "_make")
        make = self.constant(x._make) if named else ""
        return f"{make}(({parts}))"

    def note(self, function, args, result=None, tensor=None):
        """One more line."""
        args = [self.write(x, tensor or self.place) for x in args]
        call = f"{self.constant(function)}({', '.join(args)})"
        self.lines.append(f"{self.name(result)} = {call}")

    def note_zero(self, device, x):
        """The line of a zero, which comes with its address."""
        call = f"{self.constant(next_zero)}({self.constant(device)})"
        name = self.name(x)
        self.addressed.add(name)
        self.lines.append(f"{name}, a{name} = {call}")

    def note_launch(self, kernel, programs, args, options, compiled):
        """A launch: a call to Triton's C function with the compiled kernel, without
        hooks. The interpreter compiles nothing, so there it is a call to the kernel.
        """
        self.launches += 1
        if compiled is None:
            call = functools.partial(kernel[(programs,)], **options)
            return self.note(call, args)
        launcher = copy.copy(compiled.run)
        about = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        flat = []
        for x in (*args, *(options[name] for name in kernel.arg_names[len(args) :])):
            if hasattr(x, "block_shape"):
                descriptor = self.constant(Descriptor(x.shape, x.strides, next(about)))
                there = Code(f"maps[{descriptor}, {self.address(x.base)}]")
                flat += [there, *x.shape, *x.strides]
            else:
                flat.append(x)
        function = launcher.launch
        if inspect.isfunction(function):  # Python that unpacks descriptors
            function = inspect.getclosurevars(function).nonlocals["launcher"]
        # What the C function gets depends on Triton's version, so let a copy of the
        # launcher call something that writes it down.
        launcher.launch = lambda *given: self.note(function, given, None, self.address)
        fixed = Code("stream"), compiled.function, compiled.packed_metadata
        launcher(programs, 1, 1, *fixed, None, None, None, *flat)

    def plan(self, results):
        """The Plan that returns what the launcher returned, or None."""
        places = "".join(self.place(x) + ", " for x in results)
        body = "\n    ".join([*self.lines, f"return ({places})"])
        if not (self.whole and self.launches):
            return None
        exec(f"def repeat({self.parameters}):\n    {body}", self.constants)
        return Plan(self.constants["repeat"], self.index)


class Plan:
    """A function that repeats the steps of a launcher on the device with this index,
    for a stream and tensors of the same kind.
    """

    def __init__(self, repeat, index):
        self.repeat, self.index = repeat, index
        self.watchers = []  # what a profiler asked Triton to call at each launch
        if index is not None:
            from triton import knobs
            from triton.runtime import driver

            self.stream = driver.active.get_current_stream
            hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
            self.watchers = [hook.calls for hook in hooks]

    def replay(self, tensors):
        """What the launcher returns for tensors of the same kind."""
        if self.index is None:
            return self.repeat(None, *tensors)
        if torch._C._cuda_getDevice() == self.index:
            return self.repeat(self.stream(self.index), *tensors)
        with torch.cuda.device(self.index):
            return self.repeat(self.stream(self.index), *tensors)
