"""A machine of its own for the hub's test, made by bubblewrap: this machine's programs,
read-only, with a copy of /etc and of the checkout, a new /home, /srv, /tmp and /var.
"""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from built import ROOT

LOOPBACK = "0100007F"  # 127.0.0.1, as Linux writes it
INIT = """
set -e
# Bubblewrap's own /proc is masked in places, and the grader's sandbox could not mount
# one inside of it.
mount -t proc proc /proc
exec "$@"
"""


def copy_of_the_checkout(place):
    """Tracked and new files, with their times, which make looks at."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)


class Machine:
    """Runs programs as its root; `folder` holds etc, home, srv, var, the checkout."""

    def __init__(self, folder):
        self.folder = folder
        shutil.copytree("/etc", folder / "etc", symlinks=True)
        for name in ("passwd", "shadow", "group", "gshadow"):
            self.only_system_accounts(name)
        for name in ("home", "srv", "tmp", "var/lib", "var/log", "checkout"):
            (folder / name).mkdir(parents=True)
        os.chmod(folder / "tmp", 0o1777)
        copy_of_the_checkout(folder / "checkout")

    def only_system_accounts(self, name):
        people = {p.pw_name for p in pwd.getpwall() if 1000 <= p.pw_uid < 60_000}
        path = self.folder / "etc" / name
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(x for x in lines if x.split(":")[0] not in people))

    def command(self, *argv):
        base = Path(sys.base_prefix).resolve()
        binds, folders = [], {"/"}
        shown = [("--ro-bind", "/usr", "/usr")]
        for name in ("etc", "home", "srv", "tmp", "var"):
            shown.append(("--bind", str(self.folder / name), f"/{name}"))
        if not base.is_relative_to("/usr"):
            shown.append(("--ro-bind", str(base), str(base)))
        shown.append(("--bind", str(self.folder / "checkout"), str(ROOT)))
        shown.append(("--ro-bind", sys.prefix, sys.prefix))
        for how, outside, inside in shown:
            for above in reversed(Path(inside).parents):
                # Bubblewrap would make them for root alone. They may lie inside of what
                # was shown before.
                if str(above) not in folders:
                    folders.add(str(above))
                    binds += ["--perms", "0755", "--dir", str(above)]
            binds += [how, outside, inside]
        for name in ("bin", "sbin", "lib", "lib64"):
            if Path("/usr", name).is_dir():
                binds += ["--symlink", f"usr/{name}", f"/{name}"]
        return [
            "bwrap", "--die-with-parent", "--cap-add", "ALL", "--hostname", "classroom",
            "--unshare-pid", "--unshare-ipc", "--unshare-uts",
            "--dir", "/proc", "--dev", "/dev", "--perms", "0755", "--tmpfs", "/run",
            *binds,
            "--clearenv", "--setenv", "PATH", f"{sys.prefix}/bin:/usr/sbin:/usr/bin",
            "--setenv", "LANG", "C.UTF-8", "--setenv", "PYTHON",
            f"{sys.prefix}/bin/python",
            "--chdir", str(ROOT), "--", "bash", "-c", INIT, "init", *argv,
        ]  # fmt: skip

    def start(self, log, *argv, **environment):
        settings = [f"{name}={value}" for name, value in environment.items()]
        command = self.command("env", *settings, *argv)
        with open(log, "w") as file:
            streams = {"stdout": file, "stderr": file, "stdin": subprocess.DEVNULL}
            return subprocess.Popen(command, **streams)


def free_ports():
    """The first of three neighbouring ports that are free."""
    for _ in range(50):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        try:
            for port in (first, first + 1, first + 2):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return first
    raise AssertionError("no three neighbouring ports are free")


def listened(ports):
    """The addresses that something listens on at these ports, as Linux writes them."""
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    listening = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, port in listening if int(port, 16) in ports}


def until(ready, what, seconds=90):
    """The first true value of ready(); AssertionError where there is none in time."""
    for _ in range(seconds * 5):
        if found := ready():
            return found
        time.sleep(0.2)
    raise AssertionError(f"{what} in {seconds} s")


def wait_for(address, process):
    """Wait until the address answers; AssertionError where the process ends before."""

    def answers():
        assert process.poll() is None, "the hub ended"
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return True

    until(answers, f"{address} did not answer")
