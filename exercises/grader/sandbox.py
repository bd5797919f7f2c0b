"""A process that may only compute: bubblewrap, an unprivileged user, limits.

Inside there is no network and no file but the system's libraries, this environment and
what ``readable`` names, all of it read-only: no file can be made, by which processes
could talk to each other. The process runs as a user that owns nothing, because limits
on processes do not bind root. It gains no privileges and makes no namespaces, where it
would have some. Everything in it dies with it: it has its own process numbers.

Limits of the kernel hold for each process and are inherited. What all processes of a
worker take together is added up by the trusted process, in :func:`require_modest`.

Where there can be no sandbox, :func:`require` says what to install, and nothing runs.
"""

import contextlib
import errno
import functools
import importlib.util
import itertools
import os
import pathlib
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys

import psutil

TOOLS = {"bwrap": "bubblewrap", "setpriv": "util-linux", "prlimit": "util-linux"}
SLOTS = 16  # workers of one grader
# Each worker has an account of its own, so that processes of one do not count for
# another. Neither Debian nor systemd gives away numbers from here on, and the largest
# number of a process is 2**22, so each grader of a machine has its own. In a container
# that maps only 65,536 accounts, it claims some of the 500 behind Debian's registry.
FIRST_USER, FIRST_MAPPED, CLAIMS = 1_900_000_000, 65_000, 31
# What each process may use, and all of a worker together.
MEMORY_BYTES = 6 * 2**30  # of address space; PyTorch alone maps about two
PROCESSES, CPU_SECONDS, RESIDENT_BYTES = 32, 300, 4 * 2**30

# The worker's environment: one thread, the interpreter, nothing else.
SETTINGS = {
    "PATH": "/usr/bin", "HOME": "/", "LANG": "C.UTF-8", "TRITON_INTERPRET": "1",
    "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "",
    **{f"{x}_NUM_THREADS": "1" for x in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")},
}  # fmt: skip
ONLY = "the grader runs submissions in a sandbox only"


class SandboxMissing(RuntimeError):
    """No sandbox can be made here; the message says why, and what to do."""


class Immodest(RuntimeError):
    """A sandbox takes more than its share; the text is for feedback."""


# {machine: (number of its architecture, unshare, setns, clone, clone3)}
SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 272, 308, 56, 435),
    "aarch64": (0xC00000B7, 97, 268, 220, 435),
}
NAMESPACES = 0x7E020080  # the flags of clone that make new ones


def system_call_filter():
    """A seccomp program, as bytes, that refuses new namespaces and allows the rest.

    In a user namespace of its own a process has every privilege there, and reaches
    parts of the kernel that no solution needs.
    """
    if platform.machine() not in SYSTEM_CALLS:
        known = " and ".join(SYSTEM_CALLS)
        here = f"on {known}, not on {platform.machine()}"
        raise SandboxMissing(f"the sandbox filters system calls {here}")
    architecture, unshare, setns, clone, clone3 = SYSTEM_CALLS[platform.machine()]
    load, equal, above, bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x50000, 0x80000000
    program = [  # jumps count the lines that are skipped
        (load, 0, 0, 4),
        (equal, 0, 9, architecture),
        (load, 0, 0, 0),
        (above, 7, 0, 0x40000000),  # the other numbers of x86-64
        (equal, 7, 0, unshare),
        (equal, 6, 0, setns),
        (equal, 6, 0, clone3),  # libraries try clone next, whose flags can be read
        (equal, 0, 2, clone),
        (load, 0, 0, 16),
        (bits, 2, 0, NAMESPACES),
        (answer, 0, 0, allow),
        (answer, 0, 0, kill),
        (answer, 0, 0, refuse | errno.EPERM),
        (answer, 0, 0, refuse | errno.ENOSYS),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in program)


def command(argv, filtered, readable=(), slot=0):
    """The command line that runs argv in the sandbox.

    argv        program and arguments; the program is looked for inside
    filtered    the file descriptor of the filter, see :func:`launch`
    readable    {path outside: path inside}, files and folders to show read-only
    slot        a number below SLOTS that no other worker of this process has
    """
    root = os.geteuid() == 0
    binds = {"/usr": "/usr", **_environment()}
    binds |= {str(k): str(v) for k, v in dict(readable).items()}
    shared = ["--symlink", "usr/lib", "/lib", "--symlink", "usr/bin", "/bin"]
    if os.path.isdir("/usr/lib64"):
        shared += ["--symlink", "usr/lib64", "/lib64"]
    folders, mounts = {}, []
    settings = itertools.chain(*(("--setenv", *pair) for pair in SETTINGS.items()))
    for outside, inside in binds.items():
        for folder in reversed(pathlib.PurePosixPath(inside).parents):
            # bubblewrap would make them for their owner alone, who is not the worker.
            folders.setdefault(str(folder), ["--perms", "0755", "--dir", str(folder)])
        mounts += ["--ro-bind", outside, inside]
    folders.pop("/")
    user = str(user_of(os.getpid(), slot))
    become = ["setpriv", "--no-new-privs", "--inh-caps=-all"]
    if root:
        become += [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        become += ["--bounding-set=-all"]
        powers = ["--cap-drop", "ALL"]
        for power in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            powers += ["--cap-add", power]
        processes = PROCESSES
    else:
        powers = ["--unshare-user", "--uid", user, "--gid", user]
        # The limit counts every process of this account, so it starts from those.
        processes = PROCESSES + _own_processes()
    return [
        "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
        "--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv",
        *settings, *shared, "--proc", "/proc", "--dev", "/dev",
        "--remount-ro", "/dev", "--seccomp", str(filtered),
        *itertools.chain(*folders.values()), *mounts, "--remount-ro", "/", *powers,
        "--", *become, "--", "prlimit", f"--nproc={processes}",
        f"--as={MEMORY_BYTES}", f"--cpu={CPU_SECONDS}",
        "--fsize=0", "--core=0", "--nofile=256", "--", *argv,
    ]  # fmt: skip


def user_of(grader, slot):
    """The number of the account of a worker, by its grader and its slot."""
    user = FIRST_USER + SLOTS * grader + slot
    for line in pathlib.Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, count = map(int, line.split())
        if inside <= user < inside + count:
            return user
    return FIRST_MAPPED + SLOTS * claimed()[0] + slot


@functools.cache
def claimed():
    """(number, socket): no other grader of this container has it while this is open."""
    for number in range(CLAIMS):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0flashattention-grader-{number}")
            return number, claim
        except OSError:
            claim.close()
    raise SandboxMissing(f"{CLAIMS} graders are at work in this container")


def _environment():
    """{path: path} of this Python: the environment, what it was made from, and where a
    host has the packages that it brings along.
    """
    packages = filter(None, map(importlib.util.find_spec, ("torch", "triton", "numpy")))
    origins = [pathlib.Path(package.origin) for package in packages if package.origin]
    kept = ["/usr"]
    for place in (sys.prefix, sys.base_prefix, *(str(x.parents[1]) for x in origins)):
        if not any(pathlib.Path(place).is_relative_to(known) for known in kept):
            kept.append(place)
    return {place: place for place in sorted(kept[1:])}


def _own_processes():
    """How many threads the current account runs now."""
    every = [x.info for x in psutil.process_iter(["uids", "num_threads"])]
    own = [x for x in every if x["uids"] and x["uids"].real == os.getuid()]
    return sum(x["num_threads"] or 0 for x in own)


def require():
    """Raise SandboxMissing unless a sandbox can be made here and works."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            install = f"sudo apt-get install -y {package}"
            raise SandboxMissing(f"{ONLY}, and {tool} is missing: {install}")
    probe = (
        "import ctypes, os, socket\n"
        "assert ctypes.CDLL(None).unshare(0x10000000), 'it makes namespaces'\n"
        "assert os.getuid() != 0, 'it runs as root'\n"
        "assert len(socket.if_nameindex()) == 1, 'it sees a network'\n"
    )
    process = launch([sys.executable, "-I", "-c", probe], text=True)
    _, told = process.communicate()
    if process.returncode:
        reason = (told.strip() or "no reason given").splitlines()[-1]
        raise SandboxMissing(
            f"{ONLY}, and this machine refuses to make one: {reason}. Unprivileged "
            "user namespaces must be allowed (a profile for AppArmor, or a container "
            "with relaxed seccomp), or run it as root"
        )


def launch(argv, readable=(), slot=0, pass_fds=(), **options):
    """The process of argv in a sandbox, in a group of its own; options are Popen's."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    filtered = os.memfd_create("filter")
    try:
        os.write(filtered, system_call_filter())
        os.lseek(filtered, 0, os.SEEK_SET)
        return subprocess.Popen(
            command(argv, filtered, readable, slot), stdin=subprocess.DEVNULL,
            pass_fds=(*pass_fds, filtered), start_new_session=True, **options,
        )  # fmt: skip
    finally:
        os.close(filtered)


def start(argv, readable=(), slot=0):
    """Start argv in a sandbox: (process, socket), where the socket leads to it.

    The last argument of the worker is the file descriptor of its own socket. Its
    standard output and error are one pipe, ``process.stdout``.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        process = launch(
            [*argv, str(number)], readable, slot, pass_fds=[number],
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    return process, ours


def usage(process):
    """(bytes of memory, seconds of CPU) of a process and all that came from it."""
    memory = seconds = 0
    with contextlib.suppress(psutil.NoSuchProcess):  # also below: ended meanwhile
        first = psutil.Process(process.pid)
        for one in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds += sum(one.cpu_times()[:4])  # with its children that ended
                memory += share(one)
    return memory, seconds


def share(process):
    """Bytes of memory of a process: its share of what it has in common with others,
    since what a fork has not written yet is there once, however many processes see it.
    All its resident pages where it hides that.
    """
    try:
        return process.memory_full_info().pss
    except psutil.AccessDenied:
        return process.memory_info().rss


def require_modest(process):
    """Raise Immodest where a sandbox as a whole takes more than its limits."""
    resident, seconds = usage(process)
    if resident > RESIDENT_BYTES:
        raise Immodest(f"it takes more than {RESIDENT_BYTES >> 30} GiB of memory")
    if seconds > CPU_SECONDS:
        raise Immodest(f"it computes for more than {CPU_SECONDS} seconds")


def stop(process):
    """End a sandbox and all that runs in it."""
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
