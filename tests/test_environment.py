"""What README, Makefile and lock promise about a fresh machine."""

import importlib.metadata
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from processes import ROOT, build_wheel, make, run

import flashlib

MAKEFILE = (ROOT / "Makefile").read_text()
BUILD_FILES = ["Makefile", "requirements.txt", "constraints.txt", "pyproject.toml"]


def pins(name):
    """{normalized name: version} of the `package==version` lines of a file."""
    pairs = re.findall(r"^([\w.-]+)==([^\s;#]+)", (ROOT / name).read_text(), re.M)
    return {normalized(package): version for package, version in pairs}


def normalized(package):
    return re.sub(r"[-_.]+", "-", package).lower()


def of_torch(package):
    """Whether the Makefile leaves this package to the host when SYSTEM_TORCH=1."""
    pattern = re.search(r"^TORCH_LINES := (.*)$", MAKEFILE, re.M).group(1)
    return re.match(pattern, f"{package}==") is not None


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


def test_environment_is_the_lock():
    """Except for what comes from the host, and packages of the hub."""
    lock = pins("constraints.txt")
    assert not [version for version in lock.values() if "+" in version]
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    own = importlib.metadata.distributions(path=folders)
    installed = {normalized(d.name): d.version.split("+")[0] for d in own}
    config = (Path(sys.prefix) / "pyvenv.cfg").read_text()
    host_torch = "include-system-site-packages = true" in config
    elsewhere = {"torch", "triton"} if host_torch else set()
    assert set(pins("requirements.txt")) - set(installed) == elsewhere
    lock |= pins("deploy/ngshare/client.txt")
    lock |= {name: installed.get(name) for name in ("pip", "flashattention-book")}
    different = {name for name, found in installed.items() if found != lock.get(name)}
    assert different == set(), "remove .venv and run make again"


def test_system_torch_leaves_out_torch_and_what_it_brings():
    left_out = {name for name in pins("constraints.txt") if of_torch(name)}
    assert {"torch", "triton"} <= left_out
    assert all(re.match(r"(torch|triton|cuda-|nvidia-)", name) for name in left_out)


def test_every_file_names_the_same_version():
    version = importlib.metadata.version("flashattention-book")
    assert flashlib.__version__ == version
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    files = {
        "CHANGELOG.md": f"\n## {version} - {citation['date-released']}\n",
        "README.md": f"{{Version {version}}}",
        "deploy/zero-to-jupyterhub.yaml": f'tag: "{version}"',
        "deploy/ngshare/ngshare.yaml": f"flashattention-ngshare:{version}",
    }
    for file, named in files.items():
        assert named in (ROOT / file).read_text(), file


def test_wheel_holds_the_library_with_its_records_and_data(tmp_path):
    with build_wheel(tmp_path, "flashlib", "benchmarks") as wheel:
        shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    kinds = (".py", ".json", ".js", ".css", ".txt", ".md")
    sources = [p for p in (ROOT / "flashlib").rglob("*") if p.suffix in kinds]
    assert shipped == {path.relative_to(ROOT).as_posix() for path in sources}


def test_every_test_file_of_a_list_exists():
    lists = re.findall(r"tests/test_%\.py,([a-z0-9_ ]+)\)", MAKEFILE)
    names = " ".join(lists).split()
    assert len(lists) == 2 and "api" in names
    assert not [n for n in names if not (ROOT / f"tests/test_{n}.py").is_file()]


def test_help_lists_every_target():
    phony = set(" ".join(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.M)).split())
    internal = {"slow", "slow-pdf", "hub-packages", "node-packages"}
    said = make("help").stdout
    listed = set(re.findall(r"^    ([a-z-]+) +\S", said, re.M))
    assert listed == phony - internal


def test_the_book_is_built_anew_when_the_library_changes():
    """Its docstrings are on pages, and figures are drawn with its models."""
    database = make("--print-data-base", "--dry-run", "help").stdout
    (sources,) = re.findall(r"^_build/pages-are-built: (.*)$", database, re.M)
    modules = [str(x.relative_to(ROOT)) for x in (ROOT / "flashlib").rglob("*.py")]
    assert {"flashlib/api.py", *modules} <= {*sources.split()}


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "book/how-to-run.md", "book/teaching.md"]
)
def test_commands_and_links_of_the_page_exist(page):
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    code = "\n".join(blocks + re.findall(r"`([^`\n]*)`", text))
    words = r"^(?:[A-Z_]+=\S+ |sudo )*make (?:[A-Z_]+=\S+ |-C \S+ )*([a-z-]+)"
    assert set(re.findall(words, code, re.M)) <= targets
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)|src=\"([^\":]+)\"", text)
    files = [a or b for a, b in links if not re.match(r"(eq|fig|alg|ex)-", a)]
    folder = (ROOT / page).parent
    assert not [file for file in files if not (folder / file).exists()]


def script(path, line):
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("user", ["0", "1000"])
def test_need_installs_what_is_missing_or_names_the_command(user, tmp_path):
    script(tmp_path / "id", f"echo {user}")
    script(tmp_path / "sudo", "exit 1")
    script(tmp_path / "apt-get", 'echo "apt-get $*"')
    script(tmp_path / "env", 'shift; "$@"')
    script(tmp_path / "flock", "")
    script(tmp_path / "there", "")
    words = ["there:a", "browser:chromium,fonts", "bwrap:bubblewrap"]
    command, env = ["/bin/bash", ROOT / ".ci/need", *words], {"PATH": str(tmp_path)}
    done = run(command, env=env)
    install = "apt-get install -y --no-install-recommends chromium fonts bubblewrap"
    if user == "0":
        assert done.stdout.splitlines()[1:] == ["apt-get update -q", install]
    else:
        assert done.returncode == 1
        assert f"Type: sudo apt-get update && sudo {install}" in done.stderr


@pytest.mark.parametrize(
    "setting, said",
    [
        ("PYTHON={old}", "Python 3.11, 3.12 or 3.13 is needed, {old} is 3.9"),
        ("PYTHON=no-such-python", "cannot run 'no-such-python'"),
        ("SYSTEM_TORCH=yes", "SYSTEM_TORCH is 1 (use"),
    ],
)
def test_a_wrong_setting_is_named(fresh, setting, said):
    old = fresh / "python3.9"
    script(old, "echo 3.9")
    done = make("lint", setting.format(old=old), folder=fresh)
    assert done.returncode != 0
    assert said.format(old=old) in done.stderr
