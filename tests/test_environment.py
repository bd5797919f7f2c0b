"""What README, Makefile and lock promise about a fresh machine, as far as one machine can tell."""

import asyncio
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
MAKE = shutil.which("make")
BUILD_FILES = ["Makefile", "requirements.txt", "constraints.txt", "pyproject.toml"]


def pins(name):
    """Read `package==version` lines of a requirements file as {normalised name: version}."""
    lines = (line.split("#")[0].split(";")[0].strip() for line in (ROOT / name).read_text().splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pairs}


def of_torch(package):
    """Whether the Makefile leaves this package to the host when SYSTEM_TORCH=1."""
    pattern = re.search(r"^TORCH_LINES := (.*)$", MAKEFILE, re.M).group(1)
    return re.match(pattern, f"{package}==") is not None


def make(*arguments, folder, seconds=60, **environment):
    """Run make in `folder` without the variables that this process got from its own make."""
    own = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "SYSTEM_TORCH"}
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.run(
        [MAKE, *arguments],
        cwd=folder,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@pytest.fixture
def fresh(tmp_path):
    """A folder with the files that the environment is made from, and no environment."""
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "book" / "_static").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("name", ["requirements.txt", "deploy/requirements.txt"])
def test_every_requirement_is_locked_at_its_pin(name):
    lock = pins("constraints.txt")
    assert {package: lock.get(package) for package in pins(name)} == pins(name)


def test_lock_has_no_local_versions():
    assert [version for version in pins("constraints.txt").values() if "+" in version] == []


def test_environment_is_the_lock():
    """What this environment holds has the locked versions; what it takes from the host may differ."""
    own = importlib.metadata.distributions(
        path=[sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    )
    installed = {re.sub(r"[-_.]+", "-", d.name).lower(): d.version.split("+")[0] for d in own}
    host_torch = "include-system-site-packages = true" in (Path(sys.prefix) / "pyvenv.cfg").read_text()
    elsewhere = {"torch", "triton"} if host_torch else {"triton"} if sys.platform != "linux" else set()
    assert set(pins("requirements.txt")) - set(installed) == elsewhere
    # The hub's packages come with one that is pinned apart, because it is installed without what it asks for.
    lock = pins("constraints.txt") | pins("deploy/ngshare/client.txt")
    lock |= {name: installed.get(name) for name in ("pip", "flashattention-book")}
    different = {
        name: (version, lock.get(name)) for name, version in installed.items() if version != lock.get(name)
    }
    assert different == {}, "installed and locked versions; remove .venv and run make again"


def test_system_torch_leaves_out_torch_and_what_it_brings():
    left_out = {name for name in pins("constraints.txt") if of_torch(name)}
    assert {"torch", "triton"} <= left_out
    assert all(re.match(r"(torch|triton|cuda-.*|nvidia-.*)$", name) for name in left_out)


def test_notebooks_run_in_this_environment():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import sys; print(sys.prefix)")])
    asyncio.run(nbclient.NotebookClient(notebook, kernel_name="python3", timeout=60).async_execute())
    assert notebook.cells[0].outputs[0].text.strip() == sys.prefix


def test_distribution_is_not_the_foreign_flashlib():
    assert importlib.metadata.version("flashattention-book")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flashlib")


def test_wheel_holds_the_library_with_its_records_and_data(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("flashlib", "tests", "benchmarks", "exercises"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "out", "."]
    subprocess.run([sys.executable, *build], cwd=tmp_path, check=True, timeout=120)
    with zipfile.ZipFile(next((tmp_path / "out").glob("*.whl"))) as wheel:
        shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = (ROOT / "flashlib").rglob("*")
    kinds = (".py", ".json", ".js", ".css", ".txt", ".md")
    expected = {path.relative_to(ROOT).as_posix() for path in sources if path.suffix in kinds}
    assert shipped == expected


def test_help_lists_every_target():
    phony = {name for line in re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.M) for name in line.split()}
    internal = {"chromium", "tools", "nbval", "hub-packages"}
    listed = set(re.findall(r"^    ([a-z-]+) +\S", make("help", folder=ROOT).stdout, re.M))
    assert listed == phony - internal


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "book/how-to-run.md", "book/teaching.md"])
def test_commands_and_links_of_the_page_exist(page):
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    code = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S) + re.findall(r"`([^`\n]*)`", text))
    commands = re.findall(r"^(?:[A-Z_]+=\S+ |sudo )*make (?:[A-Z_]+=\S+ |-C \S+ )*([a-z-]+)", code, re.M)
    assert [command for command in commands if command not in targets] == []
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)|src=\"([^\":]+)\"", text)
    files = [a or b for a, b in links]
    labels = re.compile(r"(eq|fig|alg|ex)-")
    assert [f for f in files if not labels.match(f) and not (ROOT / page).parent.joinpath(f).exists()] == []


def test_make_test_stops_at_once_without_the_browser_and_the_sandbox(fresh, tmp_path):
    run = make("test", folder=fresh, PATH=str(tmp_path))
    assert run.returncode != 0
    assert "sudo apt-get install -y chromium bubblewrap" in run.stderr
    assert "environment" not in run.stdout


def test_a_python_that_is_too_old_is_named(fresh):
    old = fresh / "python3.9"
    old.write_text("#!/bin/sh\necho 3.9\n")
    old.chmod(0o755)
    run = make("lint", f"PYTHON={old}", folder=fresh)
    assert run.returncode != 0
    assert f"Python 3.11, 3.12 or 3.13 is needed, {old} is 3.9" in run.stderr


def test_a_python_that_is_missing_is_named(fresh):
    run = make("lint", "PYTHON=no-such-python", folder=fresh)
    assert run.returncode != 0
    assert "cannot run 'no-such-python'" in run.stderr


def test_system_torch_takes_two_values(fresh):
    run = make("lint", "SYSTEM_TORCH=yes", folder=fresh)
    assert run.returncode != 0
    assert "SYSTEM_TORCH is 1" in run.stderr
    assert "not 'yes'" in run.stderr
