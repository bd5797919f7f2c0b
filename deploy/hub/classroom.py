"""What the hub of a class does beside JupyterHub: accounts, limits, secrets, who may
read what.

Each person has an account of this machine, made when their server first starts, and a
home that nobody else can open. The hub never touches an account that it has not made.
The instructor's first password is made by the hub and lies in a file for root alone;
students sign up, and wait until the instructor lets them in.
"""

import contextlib
import grp
import os
import pathlib
import pwd
import re
import resource
import secrets
import subprocess
import sys
from typing import NamedTuple

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = pathlib.Path(sys.executable).parent
EVERYBODY, TEACHING = "flashattention", "flashattention-teaching"
NAME = re.compile(r"[a-z][a-z0-9]{1,30}")


class Room(NamedTuple):
    """The settings of one class."""

    state: pathlib.Path
    shared: pathlib.Path
    port: int
    instructor: str
    memory_gib: float
    cpus: float
    processes: int
    gpu_seats: int

    @classmethod
    def from_environment(cls, environment):
        """Read the variables that jupyterhub_config.py lists; ValueError names one that
        does not fit.
        """

        def number(name, default, kind=int):
            text = environment.get(name, str(default))
            try:
                value = kind(text)
            except ValueError:
                value = 0
            if not value > 0:
                raise ValueError(f"{name}: expected a positive number, got {text!r}")
            return value

        instructor = environment.get("HUB_INSTRUCTOR", "instructor")
        if not NAME.fullmatch(instructor):
            raise ValueError(
                "HUB_INSTRUCTOR: expected lower-case letters and digits, "
                f"got {instructor!r}"
            )
        return cls(
            pathlib.Path(environment.get("HUB_STATE", "/var/lib/flashattention-hub")),
            pathlib.Path(environment.get("HUB_SHARED", "/srv/flashattention-class")),
            number("HUB_PORT", 8000),
            instructor,
            number("HUB_MEMORY_GIB", 8, float),
            number("HUB_CPUS", 2, float),
            number("HUB_PROCESSES", 512),
            number("HUB_GPU_SEATS", 4),
        )

    @property
    def course(self):
        return pathlib.Path("/home") / self.instructor / "flashattention-course"

    @property
    def exchange(self):
        return self.shared / "exchange"

    @property
    def queue(self):
        return self.shared / "gpu"

    def prepare(self):
        """Make groups and folders, close the solutions to students. PermissionError
        unless root runs it.
        """
        if os.geteuid() != 0:
            raise PermissionError(
                "the hub makes accounts and must be started by root: sudo make hub"
            )
        for group in (EVERYBODY, TEACHING):
            with contextlib.suppress(KeyError):
                grp.getgrnam(group)
                continue
            subprocess.run(["groupadd", group], check=True)
        self.state.mkdir(parents=True, exist_ok=True)
        os.chmod(self.state, 0o700)
        self.shared.mkdir(parents=True, exist_ok=True)
        os.chown(self.shared, 0, grp.getgrnam(EVERYBODY).gr_gid)
        os.chmod(self.shared, 0o750)
        for folder in (self.exchange, self.queue):
            folder.mkdir(exist_ok=True)
            # nbgrader wants 0777. Only the class gets here; nobody may remove what
            # another has put here.
            os.chmod(folder, 0o1777)
        exercises = CHECKOUT / "exercises"
        os.chown(exercises, 0, grp.getgrnam(TEACHING).gr_gid)
        os.chmod(exercises, 0o750)
        unreadable = [
            folder
            for folder in (CHECKOUT, *CHECKOUT.parents)
            if not folder.stat().st_mode & 0o005
        ]
        if unreadable:
            raise PermissionError(
                f"students cannot read {unreadable[0]}: put the checkout where they "
                "can, such as under /opt"
            )

    def limits(self):
        """What each process of a person is held to: {resource: value}; `hold` limits
        them together.
        """
        return {
            resource.RLIMIT_NPROC: self.processes,
            resource.RLIMIT_DATA: int(self.memory_gib * 2**30),
            resource.RLIMIT_CORE: 0,
        }


def may_have(name):
    """Whether the hub may serve an account: a plain name, and the hub's own or not
    there yet.
    """
    if not NAME.fullmatch(name):
        return False
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        return True
    return EVERYBODY in {
        grp.getgrgid(number).gr_name for number in os.getgrouplist(name, account.pw_gid)
    }


def ensure_account(name, teaches):
    """Make the account where it is missing, with a home for its owner alone."""
    if not may_have(name):
        raise ValueError(
            f"{name}: this machine has an account of that name which is not the hub's"
        )
    groups = ",".join([EVERYBODY, TEACHING] if teaches else [EVERYBODY])
    try:
        pwd.getpwnam(name)
    except KeyError:
        command = [
            "useradd",
            "--create-home",
            "--shell",
            "/bin/bash",
            "--groups",
            groups,
            name,
        ]
        subprocess.run(command, check=True)
    os.chmod(pwd.getpwnam(name).pw_dir, 0o700)


def first_password(state):
    """The instructor's first password, made once; its file is for its owner alone."""
    path = state / "instructor-password"
    if not path.exists():
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
        ) as file:
            file.write(secrets.token_urlsafe(18) + "\n")
    return path.read_text().strip()


def templates():
    """The pages of the sign-up."""
    import nativeauthenticator

    return str(pathlib.Path(nativeauthenticator.__file__).parent / "templates")


def authenticator(room):
    """Sign-up with names that the machine can have, and an instructor who has a
    password from the start.
    """
    from nativeauthenticator import NativeAuthenticator

    class ClassAuthenticator(NativeAuthenticator):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if not self.user_exists(room.instructor):
                self.create_user(room.instructor, first_password(room.state))

        def validate_username(self, username):
            return may_have(username) and super().validate_username(username)

    return ClassAuthenticator


def spawner(room):
    """Servers as the person's own account, within limits."""
    from jupyterhub.spawner import LocalProcessSpawner

    class ClassSpawner(LocalProcessSpawner):
        def make_preexec_fn(self, name):
            become, limits = super().make_preexec_fn(name), room.limits()

            def preexec():
                for what, value in limits.items():
                    resource.setrlimit(what, (value, value))
                become()

            return preexec

        def get_env(self):
            teaches = self.user.name == room.instructor
            settings = [CHECKOUT / "deploy/jupyter"] + (
                [] if teaches else [CHECKOUT / "deploy/jupyter-student"]
            )
            return super().get_env() | {
                "PATH": f"{PROGRAMS}:/usr/local/bin:/usr/bin:/bin",
                "PYTHON": str(
                    PROGRAMS / "python"
                ),  # for make, in the instructor's terminal
                "JUPYTER_PREFER_ENV_PATH": "1",
                "JUPYTER_CONFIG_PATH": ":".join(map(str, reversed(settings))),
                "HUB_EXCHANGE": str(room.exchange),
                # Kernels begin with the queue for the GPU.
                "PYTHONSTARTUP": str(CHECKOUT / "deploy/hub/kernel/startup.py"),
                "GPU_QUEUE": str(room.queue),
                "GPU_SEATS": str(room.gpu_seats),
            }

        async def start(self):
            ensure_account(self.user.name, self.user.name == room.instructor)
            address = await super().start()
            where = hold(self.user.name, self.pid, room)
            self.log.info(
                "%s: limits of the whole person %s",
                self.user.name,
                where or "not available here",
            )
            return address

    return ClassSpawner


def hold(name, pid, room, root=pathlib.Path("/sys/fs/cgroup")):
    """Put a server and all that it starts under one limit of memory, CPU and processes.

    Returns the folder of the group, or None where there is no cgroup v2 that can be
    written; then only the limits of each process hold. In a container, the root of the
    groups may have processes, and the kernel then refuses limits below it (EBUSY).
    """
    if not (root / "cgroup.controllers").exists() or not os.access(root, os.W_OK):
        return None
    above = root / "flashattention-hub"
    group = above / name
    try:
        group.mkdir(parents=True, exist_ok=True)
        for folder in (root, above):
            (folder / "cgroup.subtree_control").write_text("+memory +cpu +pids")
        (group / "memory.max").write_text(str(int(room.memory_gib * 2**30)))
        (group / "cpu.max").write_text(f"{int(room.cpus * 100_000)} 100000")
        (group / "pids.max").write_text(str(room.processes))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        return None
    return group
