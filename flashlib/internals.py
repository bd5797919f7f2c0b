"""The private parts of PyTorch and Triton that a call uses, each with a test in
``tests/test_internals.py`` that fails where a version has changed it.

Three private parts are used elsewhere: ``_reinterpret`` of a Gluon tile, since only a
kernel can call it, ``_check`` of torch, which PyTorch documents, and those in
:mod:`flashlib.exercise`, since students receive that module alone.
"""

import contextlib
import copy
import functools
import inspect
from types import SimpleNamespace

import torch
from torch._C._dynamo import guards


def needs_dispatcher():
    """Whether PyTorch must see the operators of this call: it traces or transforms the
    call, or a dispatch mode is active.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def without_modes():
    """A context without dispatch modes: tensors that are made in it are real ones."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return contextlib.nullcontext()
    return torch.utils._python_dispatch._disable_current_modes()


def transforms_active():
    """Whether a transform of torch.func is active."""
    return torch._C._are_functorch_transforms_active()


def is_batched(x):
    """Whether x is a batch of gradients that torch.autograd.grad computes at once, with
    is_grads_batched. Such a tensor has no address.
    """
    return torch._C._functorch.is_legacy_batchedtensor(x)


def any_requires_grad(*arguments):
    """Whether any tensor among the arguments requires a gradient."""
    return torch._C._any_requires_grad(*arguments)


def any_autocast():
    """Whether autocast is enabled on any device."""
    return torch._C._is_any_autocast_enabled()


def apply_of(function):
    """``function.apply`` of an autograd.Function, without its checks for torch.func,
    which ``needs_dispatcher`` has made.
    """
    return super(torch.autograd.Function, function).apply


def outside_of_graphs(function):
    """The function, wrapped so that torch.compile breaks its graph at a call and traces
    nothing inside. PyTorch's public decorator would import the compiler even where
    nothing is compiled.
    """
    return torch._disable_dynamo(function)


def constant_while_tracing(function):
    """The function, marked so that torch.compile calls it while it traces, and compiles
    its result as a constant. The public decorator would import the compiler, too.
    """
    function._dynamo_marked_constant = True
    return function


def current_device():
    """The index of the current CUDA device."""
    return torch._C._cuda_getDevice()


def current_stream(device):
    """The address of the current stream of the CUDA device with this index."""
    return torch._C._cuda_getCurrentRawStream(device)


def occupy_stream(clocks):
    """Keep the current stream busy for this many clocks of its GPU."""
    torch.cuda._sleep(clocks)


def timeout_of(group, device):
    """How long a rank of a process group waits for the others, with tensors on this
    device: a timedelta.
    """
    return group._get_backend(device).options._timeout


def symmetric_memory():
    """PyTorch's module of memory that the GPUs of a host share, with its class
    ``_SymmetricMemory``. Raises ImportError where PyTorch was built without it.
    """
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


def empty_strided(device):
    """A function of (sizes, strides, dtype) that makes a tensor, not filled, on the
    current device of this type, as compiled code does: in a third of the time of
    torch.empty_strided, which a dispatch mode sees and the deterministic mode may fill.
    """
    made = {"cpu": guards._empty_strided_cpu, "cuda": guards._empty_strided_cuda}
    fast = made.get(device.type)
    if torch.are_deterministic_algorithms_enabled():
        fast = None

    def make(sizes, strides, dtype):
        if fast is None or torch._C._len_torch_dispatch_stack() > 0:
            return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
        return fast(sizes, strides, dtype)

    return make


@functools.cache
def knobs():
    """Triton's settings of launches."""
    import triton

    return triton.knobs.runtime


def launch_hooks():
    """``(enter, exit)``: what a profiler asked Triton to call around each launch, or
    None.
    """
    enter, leave = knobs().launch_enter_hook, knobs().launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return enter, leave
    return None, None


def gluon_tma_add():
    """A function for Gluon kernels, of (tensor, corner, tile), that starts adding a
    tile in shared memory to a tensor in memory (TMA). Gluon's builder has the
    operation, but its language no function.
    """
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def start_adding(tensor, corner, tile, _semantic=None):
        corner = _semantic._convert_to_ir_values(corner, require_i64=False)
        kind, builder = ir.DESCRIPTOR_REDUCE_KIND.ADD, _semantic.builder
        builder.create_async_tma_reduce(kind, tensor.handle, corner, tile.handle)

    return start_adding


class CompiledLaunch:
    """A kernel that Triton has compiled, for a grid of ``programs`` on the current
    device. Its arguments are all those of the kernel, with an address for each tensor
    and, for each tensor descriptor, a tensor map followed by its sizes and strides.
    """

    def __init__(self, compiled, programs):
        self.compiled, self.programs = compiled, programs
        # Triton's launcher makes a tensor map of each descriptor at every launch. This
        # is a copy of it that gets the maps.
        self.run = copy.copy(compiled.run)
        if inspect.isfunction(self.run.launch):  # Python that unpacks descriptors
            inside = inspect.getclosurevars(self.run.launch).nonlocals
            self.run.launch = inside["launcher"]
        # How the copy engine stores the tiles of each descriptor.
        self.of_descriptors = getattr(compiled.metadata, "tensordesc_meta", None) or ()

    def __call__(self, arguments, stream, hooks):
        compiled, about = self.compiled, None
        if hooks != (None, None):
            about = compiled.launch_metadata((self.programs, 1, 1), stream, *arguments)
        self.run(
            self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata,
            about, *hooks, *arguments,
        )  # fmt: skip


def tensor_map(descriptor, address, about):
    """The tensor map of a descriptor for a tensor at this address; ``about`` is what
    CompiledLaunch.of_descriptors says of it.
    """
    from triton.backends.nvidia import driver

    descriptor = copy.copy(descriptor)  # threads share it
    descriptor.base = SimpleNamespace(data_ptr=lambda: address)
    return driver.make_tensordesc_arg(descriptor, about)[0]
