"""What the workers that compile for a Hopper GPU need where there is none."""

import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget

SHARED_BYTES = 232_448  # that a program may use


class Driver:
    """What compiling and Proton ask of a driver."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES}
    )

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def cuobjdump(cubin, option):
    """What Triton's cuobjdump says of machine code."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.check_output([program, option, path], text=True)
