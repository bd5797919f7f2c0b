"""What plans would pass to a GPU that is not there: ``TRITON_INTERPRET=0 python
launch_worker.py`` compares the arguments of every launch with those that Triton's own
launcher passes for the same tensors, and prints how many it compared.

Tensors on the CPU stand for tensors on an H200, kernels are compiled and not run.
"""

import contextlib
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

import flashlib
import flashlib.kernels
from flashlib import internals, masks, plans, testing
from flashlib.kernels import hopper_host, inputs, tables

H200 = SimpleNamespace(
    multi_processor_count=132, L2_cache_size=60 * 2**20, major=9, minor=0,
    shared_memory_per_block_optin=232_448,
)  # fmt: skip


def tensor_map(address, *about):
    """In place of the driver's tensor map, what it is made of."""
    return ("map", address, repr(about))


class Driver:
    """What compiling and launching ask of a driver."""

    utils = SimpleNamespace(
        fill_tma_descriptor=tensor_map, fill_tma_descriptor_tiled=tensor_map
    )

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Noting:
    """Stands where Triton's C function stood, and notes its arguments."""

    def __call__(self, *arguments):
        self.last = numbers(arguments)


NOTING = Noting()


def numbers(x):
    """Arguments with addresses in place of tensors."""
    if hasattr(x, "data_ptr"):
        return x.data_ptr()
    return [numbers(y) for y in x] if isinstance(x, tuple | list) else x


class Launcher(nvidia.CudaLauncher):
    """Triton's launcher of a kernel that is not loaded."""

    def __init__(self, compiled):
        about = getattr(compiled.metadata, "tensordesc_meta", None)
        signature = compiled.src.signature
        self.launch = nvidia.wrap_handle_tensordesc(NOTING, signature, about)
        self.num_ctas, self.arg_annotations, self.kernel_signature = 1, (), b""
        self.global_scratch_size = self.profile_scratch_size = 0
        self.global_scratch_align = self.profile_scratch_align = 1
        self.launch_cooperative_grid = self.launch_pdl = False


def pretend():
    """Let tensors on the CPU be tensors on an H200."""
    driver.set_active(Driver())
    triton.compiler.CompiledKernel.run = property(Launcher)
    torch.cuda.get_device_properties = lambda device: H200
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.is_current_stream_capturing = lambda: False
    flashlib.kernels.INTERPRETED = True  # for the check of q alone
    for module in (hopper_host, inputs, tables):
        module.INTERPRETED = False
    internals.current_device = lambda: 0
    internals.current_stream = lambda device: 0
    zero = plans.Zero(torch.zeros(4, dtype=torch.int32), 1024)
    plans.next_zero = lambda device, stream: zero
    make = plans.Spec.__init__

    def initialize(self, *about, **options):
        make(self, *about, **options)
        self.is_cuda, self.device = True, torch.device("cpu", 0)

    plans.Spec.__init__ = initialize


def compared(launch, found):
    """plans.launch with a step after each launch that judges its arguments."""

    def launch_and_compare(kernel, x, programs, *arguments, **options):
        launch(kernel, x, programs, *arguments, **options)
        compiled = kernel.warmup(*arguments, grid=(programs,), **options)
        rest = [options[name] for name in kernel.arg_names[len(arguments) :]]

        def compare(tensors, how):
            planned = NOTING.last
            values = plans.filled((*arguments, *rest), tensors)
            fixed = 0, compiled.function, compiled.packed_metadata, None, None, None
            Launcher(compiled)(programs, 1, 1, *fixed, *values)
            assert planned == NOTING.last, kernel.__name__
            found.append(kernel.__name__)

        x.plan.steps.append(compare)

    return launch_and_compare


def main():
    pretend()
    found = []
    plans.launch = compared(plans.launch, found)
    options = {"dtype": torch.bfloat16, "requires_grad": True, "layout": "transposed"}
    for T, T_k, d in ((100, 100, 64), (64, 77, 256)):
        q, k, v = testing.make_qkv(1, 4, T, d, T_k=T_k, H_kv=2, **options)
        for how in (
            {"method": "flash1"}, {"method": "flash2", "deterministic": False},
            {"method": "hopper"}, {"method": "standard"}, {"window": (9, 0)},
            {"softcap": 2.0, "alibi_slopes": torch.ones(4), "scale": -0.5},
        ):  # fmt: skip
            for _ in range(2):  # another q of the same kind
                o, lse = flashlib.attention(q, k, v, **how, return_lse=True)
                torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
                torch.autograd.grad(o.sum() + lse.sum(), (q, k, v))
                q = q.detach().clone().requires_grad_()
        if d == 64:
            ids = torch.zeros(1, T_k, dtype=torch.int32)
            mask = masks.documents(ids) & masks.window(9, 3)
            bias = torch.ones(1, 4, 1, T_k, requires_grad=True)
            sinks = torch.ones(4, requires_grad=True)
            how = {"mask": mask, "bias": bias, "sinks": sinks, "dropout": 0.1}
            for _ in range(2):
                o = flashlib.attention(q, k, v, **how)
                torch.autograd.grad(o.sum(), (q, k, v, bias, sinks))
                q = q.detach().clone().requires_grad_()
        starts = torch.tensor([0, T], dtype=torch.int32), torch.tensor([0, T_k]).int()
        rows = [x[0].transpose(0, 1) for x in (q, k, v)]
        o = flashlib.attention_varlen(*rows, *starts, T, T_k, causal=True)
        torch.autograd.grad(o.sum(), q)
        lengths = torch.tensor([T_k], dtype=torch.int32)
        with torch.no_grad():
            for splits in (1, 4):
                flashlib.decode(q[:, :, :1], k, v, seq_lens=lengths, splits=splits)
    print(len(found), *sorted({*found}))


main()
