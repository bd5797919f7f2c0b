"""The private parts of PyTorch and Triton: each is there and says what we think it
says.
"""

import datetime
import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from device import CUDA, DEVICE, HOPPER
from histories import Passing
from processes import output, process_environment, run
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flashlib import internals
from flashlib.kernels import triton


def test_what_needs_the_dispatcher():
    x, found = torch.zeros(2, device=DEVICE), []

    def look(y):
        found.append(internals.needs_dispatcher())
        return y

    look(x)
    with Passing():
        look(x)
    torch.func.vmap(look)(x)
    torch.func.grad(lambda y: look(y).sum())(x)
    with torch.autograd.forward_ad.dual_level():
        look(x)
    with torch.no_grad(), torch.inference_mode(), torch.autocast(DEVICE):
        look(x)
    assert found == [False, True, True, True, True, False]


def test_without_modes_tensors_are_real():
    with FakeTensorMode(), Passing():
        with internals.without_modes():
            assert type(torch.zeros(2)) is torch.Tensor
        assert isinstance(torch.zeros(2), FakeTensor)
    with internals.without_modes():
        assert type(torch.zeros(2)) is torch.Tensor


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_tracing_needs_the_dispatcher():
    found = []

    def look(y):
        found.append(internals.needs_dispatcher())
        return y + found[-1]

    x = torch.zeros(2, device=DEVICE)
    torch.jit.trace(look, x, check_trace=False)
    assert found == [True]
    compiled = torch.compile(
        lambda y: y + internals.needs_dispatcher(), backend="eager"
    )
    assert torch.equal(compiled(x), x + 1)


def test_a_function_outside_of_graphs_is_not_traced():
    compiling, graphs = [], []

    def look(x):
        compiling.append(torch.compiler.is_compiling())
        return x * 2

    def keep(graph, _):
        graphs.append(graph)
        return graph

    look_outside = internals.outside_of_graphs(look)
    compiled = torch.compile(lambda x: look_outside(x + 1) + 1, backend=keep)
    x = torch.ones(2, device=DEVICE)
    assert torch.equal(compiled(x), 2 * (x + 1) + 1)
    assert compiling == [False] and len(graphs) == 2


def test_batched_gradients_are_recognized():
    x, found = torch.ones(2, device=DEVICE, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda dy: found.append(internals.is_batched(dy)))
    torch.autograd.grad(y, x, torch.eye(2, device=DEVICE), is_grads_batched=True)
    found.append(internals.is_batched(x))
    assert found == [True, False]


@pytest.mark.parametrize("which", [*itertools.product((False, True), repeat=2)])
def test_any_requires_grad(which):
    tensors = [torch.zeros(2, requires_grad=needed) for needed in which]
    assert internals.any_requires_grad(*tensors, None, 0.5, "x") == any(which)


def test_any_autocast():
    assert not internals.any_autocast()
    with torch.autocast("cpu"):
        assert internals.any_autocast()


def test_apply_of_differentiates():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, number, x):
            return x * number

        @staticmethod
        def backward(ctx, dx):
            return None, dx * 3.0

    x = torch.ones(2, requires_grad=True)
    y = internals.apply_of(Twice)(2.0, x)
    assert torch.equal(y, torch.full((2,), 2.0))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, torch.full((2,), 3.0))


def test_launch_hooks():
    assert internals.launch_hooks() == (None, None)
    runtime, hook = triton.knobs.runtime, lambda metadata: None
    runtime.launch_enter_hook.add(hook)
    try:
        hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
        assert internals.launch_hooks() == hooks
    finally:
        runtime.launch_enter_hook.remove(hook)


def test_a_launcher_makes_tensor_maps_in_a_function_around_another():
    """What CompiledLaunch takes apart."""
    from triton.backends.nvidia import driver

    def inner(*arguments):
        raise NotImplementedError

    wrapped = driver.wrap_handle_tensordesc(
        inner, {"x": "tensordesc<fp16[1, 64]>"}, None
    )
    assert inspect.isfunction(wrapped)
    assert inspect.getclosurevars(wrapped).nonlocals["launcher"] is inner
    assert driver.wrap_handle_tensordesc(inner, {"x": "*fp16"}, None) is inner
    parameters = [*inspect.signature(driver.CudaLauncher.__call__).parameters]
    assert parameters[:6] == ["self", "gridX", "gridY", "gridZ", "stream", "function"]
    assert parameters[-1] == "args"


def test_a_tensor_map_is_made_of_an_address(monkeypatch):
    """With a driver that writes down what it is asked for."""
    from triton.backends.nvidia import driver
    from triton.tools.tensor_descriptor import TensorDescriptor

    asked = []

    def fill(address, *rest):
        asked.append(address)
        return "map"

    names = "fill_tma_descriptor", "fill_tma_descriptor_tiled"
    utils = SimpleNamespace(**dict.fromkeys(names, fill))
    active = SimpleNamespace(utils=utils)
    monkeypatch.setattr(driver.triton.runtime.driver, "_active", active, raising=False)
    about = {
        "swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [1, 64],
        "fp4_padded": False,
    }  # fmt: skip
    descriptor = TensorDescriptor(torch.zeros(8, 64).half(), [8, 64], [64, 1], [1, 64])
    base = descriptor.base
    assert internals.tensor_map(descriptor, 4096, about) == "map"
    assert asked == [4096] and descriptor.base is base


def test_gluon_adds_tiles_and_reinterprets_them():
    """For internals.gluon_tma_add, and _reinterpret in kernels, which must be inline:
    another view of a tile is no copy, and the copy engine adds.
    """
    program = Path(__file__).with_name("gluon_worker.py")
    environment = process_environment(TRITON_INTERPRET="0")
    code = output(run([sys.executable, program], env=environment))
    assert re.search(r"cp\.reduce\.async\.bulk\.tensor\.2d\.\S*\.add", code)
    assert "ttg.memdesc_reinterpret" in code and "ld.shared" not in code


def test_symmetric_memory_has_what_copies_use():
    """Only GPUs can run it."""
    symmetric = pytest.importorskip("torch.distributed._symmetric_memory")
    assert internals.symmetric_memory() is symmetric
    assert {"rendezvous", "get_backend"} <= vars(symmetric).keys()
    names = "empty_strided_p2p", "memset32", "stream_write_value32", "get_buffer"
    assert {*names, "barrier"} <= {*dir(symmetric._SymmetricMemory)}
    said = symmetric._SymmetricMemory.memset32.__doc__
    assert all(f"{name}:" in said for name in ("offset", "val", "count"))


def test_the_timeout_of_a_group():
    timeout, store = datetime.timedelta(seconds=7), dist.HashStore()
    options = {"store": store, "rank": 0, "world_size": 1, "timeout": timeout}
    dist.init_process_group("gloo", **options)
    try:
        found = internals.timeout_of(dist.group.WORLD, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert found == timeout


@pytest.mark.gpu
def test_a_stream_is_occupied():
    internals.occupy_stream(10**8)
    assert not torch.cuda.current_stream().query()


def test_what_other_modules_use():
    """What the docstring of internals names."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.runtime import interpreter

    torch._check(True)
    assert hasattr(TorchDispatchMode, "__torch_dispatch__")
    assert callable(interpreter.GridExecutor._init_args_hst)


@pytest.mark.gpu
def test_streams_and_devices():
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        stream = torch.cuda.current_stream()
        index = stream.device.index
        assert internals.current_device() == index == torch.cuda.current_device()
        assert internals.current_stream(index) == stream.cuda_stream


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_tensor_is_made_as_by_torch(mode):
    device = torch.zeros((), device=DEVICE).device
    for sizes, dtype in (((2, 3), torch.float16), ((0, 1), torch.float32)):
        strides = (1, sizes[0])
        with mode():
            x = internals.empty_strided(device)(sizes, strides, dtype)
            y = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
        for about in ("size", "stride", "is_inference"):
            assert getattr(x, about)() == getattr(y, about)()
        assert (x.dtype, x.device, x.requires_grad) == (dtype, device, False)
        assert x.untyped_storage().nbytes() == y.untyped_storage().nbytes()


def test_a_dispatch_mode_sees_new_tensors():
    class Seen(Passing):
        names = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names += (function.__name__,)
            return super().__torch_dispatch__(function, types, args, kwargs)

    make = internals.empty_strided(torch.zeros((), device=DEVICE).device)
    with Seen() as seen:
        make((3,), (1,), torch.float32)
    assert seen.names == ("empty_strided.default",)


def test_in_the_deterministic_mode_a_new_tensor_may_be_filled(nan_filled):
    device = torch.zeros((), device=DEVICE).device
    assert internals.empty_strided(device)((3,), (1,), torch.float32).isnan().all()


@pytest.mark.gpu
def test_a_compiled_kernel_is_launched_with_addresses():
    from flashlib import plans
    from flashlib.kernels import backward

    assert CUDA
    o = torch.randn(1, 2, 64, 64, device=DEVICE)
    lse, delta, lse2 = (torch.empty(1, 2, 64, device=DEVICE) for _ in range(3))
    lse.fill_(2.0)
    plans.PLANS.clear()
    for scale in (1.0, 2.0):
        delta.fill_(torch.nan)
        backward.launch_delta(o, lse, scale * o, torch.zeros_like(lse), delta, lse2)
        torch.testing.assert_close(delta, scale * o.square().sum(-1))
    (plan,) = plans.PLANS.values()
    (step,) = plan.steps
    assert "run_compiled" in step.__qualname__


def test_a_constant_while_tracing_is_marked_as_pytorch_marks_it():
    def own():
        return 1

    def public():
        return 1

    internals.constant_while_tracing(own)
    torch.compiler.assume_constant_result(public)
    assert vars(own) == vars(public) != {}


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_a_profiler_sees_every_launch():
    import flashlib

    q = torch.randn(1, 2, 128, 64, device=DEVICE, dtype=torch.bfloat16)
    names = []
    hook = lambda metadata: names.append(metadata.get()["name"])  # noqa: E731
    for _ in range(2):
        names.clear()
        triton.knobs.runtime.launch_enter_hook.add(hook)
        try:
            found = flashlib.attention(q, q, q)
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(hook)
        assert names == ["forward_kernel"]
        assert torch.equal(found, flashlib.attention(q, q, q))


@pytest.mark.slow
@pytest.mark.skipif(CUDA, reason="acts out a GPU on a CPU")
def test_plans_launch_with_the_arguments_of_triton():
    program = Path(__file__).with_name("launch_worker.py")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    found = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    launches, *kernels = found.stdout.split()
    assert int(launches) > 150 and len(kernels) == 17
