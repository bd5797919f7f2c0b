"""Commands that tests run in processes of their own."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def process_environment(**changes):
    """The environment of a process of its own; a variable that is None is removed."""
    both = {**os.environ, **changes}
    return {name: value for name, value in both.items() if value is not None}


def run(command, seconds=300, **options):
    """A command when it has ended, with what it said."""
    options |= {"capture_output": True, "text": True, "timeout": seconds}
    return subprocess.run(command, **options)


def output(ended):
    """What a command printed; AssertionError with its messages if it failed."""
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


def run_python(code, **environment):
    """Run code in a Python process of its own."""
    command = [sys.executable, "-c", code]
    return run(command, env=process_environment(**environment))


# The variables of this process's own make, which another one is run without.
OF_MAKE = "MAKEFLAGS MAKELEVEL MFLAGS PYTHON SYSTEM_TORCH COURSE STEP SUBMISSIONS NB T"
OWN_MAKE = dict.fromkeys(OF_MAKE.split())


def make(*arguments, folder=ROOT, seconds=600, **environment):
    """Run make in a folder."""
    env = process_environment(**OWN_MAKE | environment)
    return run(["make", *arguments], seconds, cwd=folder, env=env)


def build_wheel(folder, *packages):
    """A wheel of the library, built in a folder that has these packages alone."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in packages:
        shutil.copytree(ROOT / name, folder / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", "out", "."]
    pip += ["--no-deps", "--no-build-isolation"]
    subprocess.run(pip, cwd=folder, check=True, timeout=120)
    return zipfile.ZipFile(next((folder / "out").glob("*.whl")))
