"""Kernels that listen on sockets with names. Jupyter's default are ports, chosen before
the kernel runs, and somebody else can take one in between: CI lost a run to that.

    pytest -p notebook_kernels --nbval ...

makes nbval start such kernels, each forked from a process that has imported PyTorch,
which takes seconds.
"""

import multiprocessing
import os
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


def start(arguments, env, folder, ready):
    """Be a kernel."""
    os.setsid()  # signals to the kernel go to its group
    os.environ.update(env)
    os.chdir(folder)
    ready.send(True)
    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance(arguments)


class Forked:
    """What jupyter_client uses of subprocess.Popen, for a kernel."""

    stdin = stdout = stderr = None

    def __init__(self, command, env, cwd, **options):
        context = multiprocessing.get_context("forkserver")
        # Nothing that starts CUDA or chooses between a GPU and Triton's interpreter.
        context.set_forkserver_preload(["torch", "ipykernel.kernelapp"])
        ready, child = context.Pipe(duplex=False)
        arguments = command[command.index("-f") :], env, cwd, child
        self.process = context.Process(target=start, args=arguments)
        self.process.start()
        ready.recv()
        self.pid, self.wait = self.process.pid, self.process.join
        self.kill, self.terminate = self.process.kill, self.process.terminate

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)


def pytest_configure():
    import nbval.kernel
    from jupyter_client.provisioning import local_provisioner

    nbval.kernel.KernelManager = NamedKernelManager
    local_provisioner.launch_kernel = Forked
