"""Launch plans: what a call allocates and launches, recorded once and then replayed.

Two calls with tensors of one kind differ in addresses only. The first one runs its
launcher, which chooses tiles, builds descriptors and lets Triton compile, and a
:class:`Tape` notes each operation on tensors and each kernel. Later calls repeat these
steps with the new tensors, at a tenth of the cost to the host. A launcher decides by
nothing but the kind of its tensors and its options.
"""

import contextlib
import functools
import operator
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST = 1024  # plans that are kept; the next one starts anew
PLANS = {}  # {what a call depends on: its Plan, or None where it cannot be replayed}
ACCEPTED = set()  # (check, kind) that have passed
ZEROS = {}  # {(device, stream): those that no launch has taken}
PLAIN = (torch.Tensor, torch.nn.Parameter)
_recording = threading.local()  # .tape, while a launcher is recorded
_STREAM = operator.itemgetter(0)  # the first value of a replay


def kind(*tensors):
    """What a plan depends on in tensors; None while PyTorch traces or transforms the
    call, and where a tensor needs the dispatcher (a subclass, a lazy negation).
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
    ):
        return None
    found = [torch.are_deterministic_algorithms_enabled()]
    for x in tensors:
        if x is None:
            found.append(None)
        elif type(x) in PLAIN and x.layout is torch.strided and not x.is_neg():
            found += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
        else:
            return None
    return tuple(found)


def clear():
    """Forget every plan and every check that has passed."""
    PLANS.clear()
    ACCEPTED.clear()


def check_once(given, check, *tensors):
    """check(*tensors), unless it has passed for tensors of the kind given."""
    if given is None or (check, given) not in ACCEPTED:
        check(*tensors)
        if len(ACCEPTED) >= LARGEST:
            ACCEPTED.clear()
        ACCEPTED.add((check, given))


def strides_in_order(x, shape):
    """The strides of a dense tensor of this shape, its last dimension contiguous and the
    others in the order in which x stores them.
    """
    outer = x.stride()[:-1]
    order = range(len(outer))
    if 0 not in outer:  # not expanded
        order = sorted(order, key=lambda n: -outer[n])
    strides, step = [1] * len(shape), shape[-1]
    for n in reversed(order):
        strides[n], step = step, step * shape[n]
    return tuple(strides)


def run(launcher, given, tensors, options, lasting=True):
    """launcher(*tensors, *options), replayed where there is a plan for tensors of the
    kind given. lasting: the plan may use memory that outlives the call, which is not so
    under torch.compile, whose memory pools account for every byte.
    """
    key = (launcher, given, options, lasting)
    plan = PLANS.get(key)
    if plan is not None and not any(plan.watchers):
        return plan.replay(tensors)
    # Empty tensors are filled without a kernel.
    empty = any(x is not None and x.numel() == 0 for x in tensors)
    if given is None or empty or key in PLANS:
        return launcher(*tensors, *options)
    with unnoted(), Tape(tensors, lasting) as _recording.tape:
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
    """Zeros that take the memory of one, which a kernel may change."""
    tape = getattr(_recording, "tape", None)
    options = {"dtype": dtype, "device": device}
    with unnoted():
        x = torch.zeros((), **options).expand(shape)
    if tape is not None and tape.lasting and x.is_cuda:
        tape.note(next_zero, (device,), x)
    elif tape is not None:
        tape.note(functools.partial(torch.zeros, 1, **options), (), x)
    return x


def next_zero(device):
    """Zeros in 16 bytes, for one launch on the current stream: of many that were filled
    at once or, while a CUDA graph is captured, which fills it again, of its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)
    stream = device, torch._C._cuda_getCurrentRawStream(device.index)
    zero = next(ZEROS.get(stream, iter(())), None)
    if zero is None:
        rows = torch.zeros(256, 4, dtype=torch.int32, device=device).unbind()
        ZEROS[stream] = rest = iter(rows)
        zero = next(rest)
    return zero


@contextlib.contextmanager
def unnoted():
    """A context in which a tape takes no notes."""
    tape, _recording.tape = getattr(_recording, "tape", None), None
    try:
        yield
    finally:
        _recording.tape = tape


class Descriptor:
    """A tensor descriptor that was checked when its plan was recorded."""

    __slots__ = ("base", "shape", "strides")
    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, base, shape, strides):
        self.base, self.shape, self.strides = base, shape, strides


class Tape(TorchDispatchMode):
    """Notes of a launcher: steps (function, arguments, [(n, how to find argument n)]).
    A replay finds them among its values: the stream, the tensors of the call, and the
    results of the steps before.
    """

    def __init__(self, tensors, lasting):
        super().__init__()
        self.lasting = lasting
        self.values, self.steps = [None, *tensors], []
        self.whole, self.launches = True, 0
        self.index = tensors[0].device.index

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        x = function(*args, **kwargs)
        name = function.name().removeprefix("aten::").split(".")[0]
        if _recording.tape is not self or (args and x is args[0] and name[-1] != "_"):
            return x
        if not torch.is_tensor(x):
            self.whole = False
            return x
        options = {"dtype": x.dtype, "device": x.device}
        if name == "detach":  # the same tensor under another name
            self.values[self.place(args[0])] = x
        elif name in ("zeros", "new_zeros"):
            self.note(functools.partial(torch.zeros, **options), (x.shape,), x)
        elif "empty" in name:
            make = functools.partial(torch.empty_strided, **options)
            self.note(make, (x.shape, x.stride()), x)
        else:
            self.whole = self.whole and not any(map(torch.is_tensor, kwargs.values()))
            self.note(functools.partial(function, **kwargs), args, x)
        return x

    def place(self, x):
        """Where x is among the values. Without it the tape is of no use."""
        found = [n for n, value in enumerate(self.values) if value is x]
        self.whole = self.whole and bool(found)
        return found[0] if found else 0

    def finder(self, x, exact):
        """A function of a replay's values that returns the successor of x; None for a
        constant. exact: named tuples keep their type.
        """
        if isinstance(x, torch.Tensor):
            return operator.itemgetter(self.place(x))
        if hasattr(x, "block_shape"):  # a tensor descriptor
            n, shape, strides = self.place(x.base), x.shape, x.strides
            return lambda values: Descriptor(values[n], shape, strides)
        inside = x if isinstance(x, tuple | list) else ()
        parts = [self.finder(y, exact) for y in inside]
        if not any(parts):
            return None
        make = x._make if exact and hasattr(x, "_make") else tuple
        # A constant finds itself; a plan holds no tensor.
        parts = [part or (lambda _, y=y: y) for part, y in zip(parts, x, strict=True)]
        return lambda values: make([find(values) for find in parts])

    def note(self, function, args, result, exact=False):
        """One more step."""
        finders = [self.finder(x, exact) for x in args]
        found = [(n, find) for n, find in enumerate(finders) if find]
        fixed = [None if find else x for find, x in zip(finders, args, strict=True)]
        self.steps.append((function, fixed, found))
        self.values.append(result)

    def note_launch(self, kernel, programs, args, options, compiled):
        """A launch of the compiled kernel, as JITFunction.run calls it, but without
        hooks; in the interpreter, which compiles nothing, of the kernel itself.
        """
        self.launches += 1
        if compiled is None:
            call = functools.partial(kernel[(programs,)], **options)
            return self.note(call, args, None, exact=True)
        named = [options[name] for name in kernel.arg_names[len(args) :]]
        fixed = (compiled.function, compiled.packed_metadata, None, None, None)
        self.note(compiled.run, (programs, 1, 1, None, *fixed, *args, *named), None)
        self.steps[-1][2].append((3, _STREAM))

    def plan(self, results):
        """The Plan that returns what the launcher returned, or None."""
        places = [self.place(x) for x in results]
        whole = self.whole and self.launches > 0
        return Plan(self.steps, places, self.index) if whole else None


class Plan:
    """Steps to replay on a device. It holds no tensor."""

    def __init__(self, steps, places, index):
        self.steps, self.places, self.index = steps, places, index
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
            return self.repeat([None, *tensors])
        if torch.cuda.current_device() == self.index:
            return self.repeat([self.stream(self.index), *tensors])
        with torch.cuda.device(self.index):
            return self.repeat([self.stream(self.index), *tensors])

    def repeat(self, values):
        """Each step with its arguments."""
        for function, fixed, found in self.steps:
            args = fixed
            if found:
                args = fixed.copy()
                for n, find in found:
                    args[n] = find(values)
            values.append(function(*args))
        return tuple([values[n] for n in self.places])
