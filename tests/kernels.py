"""Kernels that listen on sockets with names. Jupyter's default are ports, chosen before
the kernel runs, and somebody else can take one in between: CI lost a run to that.

    pytest -p kernels --nbval ...

makes nbval start such kernels.
"""

import tempfile
import uuid
from pathlib import Path

from jupyter_client.manager import KernelManager
from traitlets import default


class NamedKernelManager(KernelManager):
    @default("transport")
    def _default_transport(self):
        return "ipc"

    @default("connection_file")
    def _default_connection_file(self):
        # The sockets stand beside it, and a socket's name has at most 107 bytes.
        return str(Path(tempfile.gettempdir(), f"kernel-{uuid.uuid4().hex}.json"))


def pytest_configure():
    import nbval.kernel

    nbval.kernel.KernelManager = NamedKernelManager
