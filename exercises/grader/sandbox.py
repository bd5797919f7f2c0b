"""A process that may compute and nothing else: bubblewrap, an unprivileged user,
limits.

Inside there is no network and no file but the system's libraries, this environment and
what ``readable`` names, all of it read-only; ``/tmp`` is private and small. The process
runs as a user that owns nothing, because limits on processes do not bind root.
Everything in it dies with it: it has its own process numbers.

Where no sandbox can be made, :func:`require` raises and says what to install. There is
no way around it.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import NamedTuple

TOOLS = {"bwrap": "bubblewrap", "setpriv": "util-linux", "prlimit": "util-linux"}
# No account of a Debian system has a number in the thousand from here on. Each worker
# at work has its own, also those of another grader on the machine, so that processes of
# one do not count for another.
FIRST_USER = 64_000


class Limits(NamedTuple):
    """What a worker may use."""

    memory_bytes: int = 6 * 2**30  # of address space; PyTorch alone maps about two
    processes: int = 64
    scratch_bytes: int = 64 * 2**20
    cpu_seconds: int = 600


LIMITS = Limits()


class SandboxMissing(RuntimeError):
    """No sandbox can be made on this machine; the message says why and what to
    install.
    """


def command(argv, readable=(), limits=LIMITS, slot=0):
    """The command line that runs argv in the sandbox.

    argv        program and arguments; the program is looked for inside
    readable    {path outside: path inside}, files and folders to show read-only
    slot        a number below 16 that no other worker of this process has
    """
    root = os.geteuid() == 0
    binds = {
        "/usr": "/usr",
        **_environment(),
        **{str(k): str(v) for k, v in dict(readable).items()},
    }
    shared = ["--symlink", "usr/lib", "/lib", "--symlink", "usr/bin", "/bin"]
    if os.path.isdir("/usr/lib64"):
        shared += ["--symlink", "usr/lib64", "/lib64"]
    folders, mounts = {}, []
    for outside, inside in binds.items():
        for folder in reversed(pathlib.PurePosixPath(inside).parents):
            # bubblewrap would make them for their owner alone, and the worker is
            # somebody else.
            folders.setdefault(str(folder), ["--perms", "0755", "--dir", str(folder)])
        mounts += ["--ro-bind", outside, inside]
    folders.pop("/")
    user = str(user_of(os.getpid(), slot))
    become = ["setpriv", "--no-new-privs", "--inh-caps=-all"]
    if root:
        become += [
            f"--reuid={user}",
            f"--regid={user}",
            "--clear-groups",
            "--bounding-set=-all",
        ]
        powers = ["--cap-drop", "ALL"]
        for power in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            powers += ["--cap-add", power]
        processes = limits.processes
    else:
        powers = ["--unshare-user", "--uid", user, "--gid", user]
        # The limit counts every process of the account that grades, so it starts from
        # those there are.
        processes = limits.processes + _own_processes()
    return [
        "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
        "--die-with-parent", "--new-session", "--clearenv",
        *_settings(), *shared, "--proc", "/proc", "--dev", "/dev",
        "--perms", "1777", "--size", str(limits.scratch_bytes), "--tmpfs", "/tmp",
        *[word for words in folders.values() for word in words if word], *mounts, "--chdir", "/tmp", *powers,
        "--", *become, "--", "prlimit", f"--nproc={processes}", f"--as={limits.memory_bytes}",
        f"--cpu={limits.cpu_seconds}", f"--fsize={limits.scratch_bytes}", "--core=0", "--nofile=256",
        "--", *argv,
    ]  # fmt: skip


def user_of(grader, slot):
    """The number of the account of a worker: of the process that grades, and of the
    worker's slot.
    """
    return FIRST_USER + (16 * grader + slot) % 1000


def _settings():
    """The whole environment of the worker: one thread, the interpreter, nothing of the
    grader's own.
    """
    variables = {
        "PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TRITON_INTERPRET": "1",
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR"):
        variables[f"{library}_NUM_THREADS"] = "1"
    return [
        word for name, value in variables.items() for word in ("--setenv", name, value)
    ]


def _environment():
    """{path: path} of this Python: the environment and what it was made from."""
    places = {sys.prefix, sys.base_prefix}
    return {place: place for place in sorted(places) if not place.startswith("/usr")}


def _own_processes():
    """How many threads the current account runs now."""
    count = 0
    for status in pathlib.Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(
                line.split(":", 1)
                for line in status.read_text().splitlines()
                if ":" in line
            )
        except OSError:  # the process has ended meanwhile
            continue
        if lines["Uid"].split()[0] == str(os.getuid()):
            count += int(lines["Threads"])
    return count


def require():
    """Raise SandboxMissing unless a sandbox can be made here and keeps what runs in it
    from the network.
    """
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise SandboxMissing(
                f"the grader runs submissions in a sandbox only, and {tool} is missing: "
                f"sudo apt-get install -y {package}"
            )
    probe = (
        "import os, socket\n"
        "assert os.getuid() != 0, 'it runs as root'\n"
        "assert len(socket.if_nameindex()) == 1, 'it sees a network'\n"
    )
    result = subprocess.run(
        command([sys.executable, "-I", "-c", probe]),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if result.returncode:
        raise SandboxMissing(
            "the grader runs submissions in a sandbox only, and this machine refuses to make one: "
            f"{(result.stderr.strip() or 'no reason given').splitlines()[-1]}. Unprivileged user namespaces "
            "must be allowed (a profile for AppArmor, or a container with relaxed seccomp), or run it as root"
        )


def start(argv, readable=(), limits=LIMITS, slot=0):
    """Start argv in a sandbox: (process, results), where results is the end to read of
    its channel.

    The worker writes to the file descriptor that its last argument names. Its standard
    output and error are one pipe, ``process.stdout``.
    """
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            command([*argv, str(writer)], readable, limits, slot),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=(writer,), start_new_session=True,
        )  # fmt: skip
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return process, reader


def stop(process):
    """End a sandbox and all that runs in it."""
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
