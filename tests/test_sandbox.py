"""The sandbox of the grader: what runs inside reaches nothing, and its limits hold."""

import os
import subprocess
import sys

import pytest

from exercises.grader import sandbox


def inside(program, **options):
    """(return code, output) of a Python program in the sandbox."""
    command = sandbox.command([sys.executable, "-I", "-c", program], **options)
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    return result.returncode, result.stdout + result.stderr


def test_the_sandbox_has_no_network_no_root_and_nothing_to_write():
    program = """
import os, socket
print(os.getuid() != 0, [name for _, name in socket.if_nameindex()], sorted(os.environ))
for action in (
    lambda: os.setuid(0), lambda: open("/usr/x", "w"), lambda: os.listdir("/home"),
    lambda: open("/etc/shadow"), lambda: os.mkdir("/x"), lambda: os.kill(1, 9),
    lambda: socket.create_connection(("192.0.2.1", 80), 1),
):
    try:
        print("ALLOWED", action())
    except OSError as error:
        print(type(error).__name__)
"""
    code, output = inside(program)
    assert code == 0, output
    assert output.startswith("True ['lo']") and "ALLOWED" not in output
    for name in ("HOSTNAME", "USER", "SSH", "SECRET"):
        assert f"'{name}" not in output


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
    code, output = inside("open('/tmp/x', 'wb').write(bytes(2**27))")
    assert code != 0, output


def test_where_no_sandbox_can_be_made_the_grader_refuses(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(sandbox.SandboxMissing, match="apt-get install -y bubblewrap"):
        sandbox.require()


def test_a_machine_that_forbids_sandboxes_is_named(monkeypatch, tmp_path):
    refuses = tmp_path / "bwrap"
    refuses.write_text(
        "#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n"
    )
    refuses.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        sandbox.SandboxMissing, match="No permissions to create new namespace"
    ):
        sandbox.require()
