"""The sandbox of the grader: what runs inside reaches nothing, and its limits hold."""

import importlib.util
import os
import sys
import time
import types

import psutil
import pytest
from handed_in import inside

from exercises.grader import sandbox


def test_the_sandbox_has_no_network_no_root_and_nothing_to_write():
    program = """
import os, socket
print(os.getuid() != 0, [name for _, name in socket.if_nameindex()], sorted(os.environ))
for action in (
    lambda: os.setuid(0), lambda: os.listdir("/home"), lambda: open("/etc/shadow"),
    lambda: os.kill(1, 9),
    lambda: socket.create_connection(("192.0.2.1", 80), 1),
    *[lambda place=x: open(place + "/x", "w").name
      for x in ("/", "/dev", "/dev/shm", "/proc", "/usr")],
    lambda: os.mkdir("/tmp"),
):
    try:
        print("ALLOWED", action())
    except OSError as error:
        print(type(error).__name__)
"""
    code, output = inside(program)
    assert code == 0, output
    assert output.startswith("True ['lo']")
    assert "ALLOWED" not in output
    for name in ("HOSTNAME", "USER", "SSH", "SECRET"):
        assert f"'{name}" not in output


def test_no_two_graders_share_an_account(monkeypatch):
    graders = [1, 2, 1000, 1125, 30_000, 2**22]
    users = {sandbox.user_of(n, slot) for n in graders for slot in range(sandbox.SLOTS)}
    assert len(users) == len(graders) * sandbox.SLOTS
    assert min(users) > 2**16 and max(users) < 2**31
    code, output = inside("import os; print(os.getuid(), os.getgid())", slot=3)
    assert code == 0 and output.split() == [str(sandbox.user_of(os.getpid(), 3))] * 2


def test_in_a_small_container_each_grader_claims_its_accounts(monkeypatch):
    """Where users from 65,536 on are not mapped."""
    monkeypatch.setattr(sandbox, "FIRST_USER", 2**32)
    others = [sandbox.claimed.__wrapped__() for _ in range(3)]
    users = {sandbox.user_of(os.getpid(), slot) for slot in range(sandbox.SLOTS)}
    assert min(users) >= 65_000 and max(users) < 65_520
    taken = {number for number, _ in others}
    assert len(taken) == 3 and sandbox.claimed()[0] not in taken
    for _, claim in [*others, sandbox.claimed()]:
        claim.close()
    sandbox.claimed.cache_clear()


def test_the_limits_of_the_sandbox_hold():
    processes = """
import os, time
made = 0
try:
    while made < 1000:
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
        made += 1
except OSError:
    pass
print(made)
"""
    code, output = inside(processes)
    assert code == 0 and int(output.split()[-1]) < 1000, output
    code, output = inside("x = bytearray(2**40)")
    assert code != 0 and "MemoryError" in output


def test_no_process_gains_privileges_or_makes_namespaces():
    program = """
import ctypes, os, subprocess, threading
libc = ctypes.CDLL(None, use_errno=True)
print("NoNewPrivs:\\t1" in open("/proc/self/status").read())
for flags in (0x10000000, 0x20000, 0x40000000, 0x4000000, 0x8000000, 0x20000000,
              0x2000000, 0x80):
    print(libc.unshare(flags))
    clone = 56 if os.uname().machine == "x86_64" else 220
    print(libc.syscall(clone, flags | 17, 0, 0, 0, 0))
print(libc.setns(os.open("/proc/self/ns/pid", os.O_RDONLY), 0))
threading.Thread(target=lambda: print("thread")).start()
print(subprocess.run(["/usr/bin/true"]).returncode)
"""
    code, output = inside(program)
    assert code == 0, output
    assert sorted(output.split()) == sorted(["True", "thread", "0", *["-1"] * 17])


def test_a_hosts_own_packages_are_there(monkeypatch):
    """With SYSTEM_TORCH=1 torch is where the host has it."""
    place = types.SimpleNamespace(origin="/host/packages/torch/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: place)
    words = sandbox.command(["true"], 3)
    where = words.index("/host/packages")
    assert words[where - 1 : where + 2] == ["--ro-bind", *["/host/packages"] * 2]


def test_what_forks_share_counts_once():
    """Ranks of a program are forks of one process; together they were refused."""
    program = """
import os, time
block = bytearray(b"x") * (100 << 20)
for _ in range(7):
    if os.fork() == 0:
        break
else:
    print("forked", flush=True)
time.sleep(60)
"""
    process = sandbox.launch([sys.executable, "-I", "-c", program])
    try:
        assert process.stdout.readline() == b"forked\n"
        assert 100 << 20 < sandbox.usage(process)[0] < 200 << 20
    finally:
        sandbox.stop(process)
        process.stdout.close()
        process.stderr.close()


def test_a_process_cannot_hide_its_memory(monkeypatch):
    """What cannot be read counts as if not shared."""
    own = psutil.Process()
    assert 0 < sandbox.share(own) < own.memory_info().rss

    def refuse(*_):
        raise psutil.AccessDenied

    monkeypatch.setattr(own, "memory_full_info", refuse)
    assert sandbox.share(own) == own.memory_info().rss


def test_a_process_that_cannot_be_read_counts_for_nobody(monkeypatch):
    own = types.SimpleNamespace(real=os.getuid())
    every = [{"uids": own, "num_threads": 3}, {"uids": None, "num_threads": 5},
             {"uids": own, "num_threads": None}]  # fmt: skip
    processes = [types.SimpleNamespace(info=info) for info in every]
    monkeypatch.setattr(psutil, "process_iter", lambda names: processes)
    assert sandbox._own_processes() == 3


def test_children_count_for_the_whole_sandbox(monkeypatch):
    program = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        block = bytearray(b"x") * (100 << 20)
        while True:
            pass
time.sleep(60)
"""
    argv = [sys.executable, "-I", "-c", program]
    process = sandbox.launch(argv)
    try:
        deadline = time.monotonic() + 30
        while True:
            resident, seconds = sandbox.usage(process)
            if (resident > 300 << 20 and seconds > 0.5) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        assert resident > 300 << 20 and seconds > 0.5
        sandbox.require_modest(process)
        for name, less in (("RESIDENT_BYTES", 200 << 20), ("CPU_SECONDS", 0.3)):
            with monkeypatch.context() as changed:
                changed.setattr(sandbox, name, less)
                with pytest.raises(sandbox.Immodest, match="more than"):
                    sandbox.require_modest(process)
    finally:
        sandbox.stop(process)
        process.stdout.close()
        process.stderr.close()
    assert sandbox.usage(process) == (0, 0)


@pytest.mark.parametrize("said", ["No permissions to create new namespace", None])
def test_where_no_sandbox_can_be_made_the_grader_refuses(said, monkeypatch, tmp_path):
    if said:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH'] if said else ''}")
    message = said or "apt-get install -y bubblewrap"
    with pytest.raises(sandbox.SandboxMissing, match=message):
        sandbox.require()
