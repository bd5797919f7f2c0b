"""`make wheelhouse`: a tar from which a machine without network gets everything but torch and triton."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from built import ROOT
from test_environment import make

SHOW = "show:\n\t@echo $$PIP_CONFIG_FILE $$PIP_NO_INDEX $$PIP_FIND_LINKS"


def test_a_checkout_with_its_packages_asks_no_index(tmp_path):
    for name in ("Makefile", "requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    kept = dict.fromkeys(("PIP_CONFIG_FILE", "PIP_NO_INDEX", "PIP_FIND_LINKS"), "")
    before = make("--eval", SHOW, "show", folder=tmp_path, **kept)
    assert before.stdout.split() == [], before.stderr
    (tmp_path / "wheelhouse").mkdir()
    after = make("--eval", SHOW, "show", folder=tmp_path, **kept)
    assert after.stdout.split() == ["/dev/null", "1", str(tmp_path / "wheelhouse")], after.stderr


@pytest.mark.slow
def test_two_lines_install_it_without_a_network(tmp_path):
    """The host's torch and triton are those of this environment; a folder of links stands for the host."""
    packed = make("SYSTEM_TORCH=1", "wheelhouse", folder=ROOT, seconds=900)
    assert packed.returncode == 0, packed.stdout + packed.stderr
    name = re.search(r"tar xf (\S+-without-torch\.tar)", packed.stdout).group(1)
    subprocess.run(["tar", "xf", ROOT / "_build" / name], cwd=tmp_path, check=True)
    folder = tmp_path / "flashattention-book"
    wheels = {path.name.split("-")[0].lower() for path in (folder / "wheelhouse").iterdir()}
    assert {"jupyterlab", "jupyterhub", "nbgrader", "numpy"} <= wheels
    assert not {wheel for wheel in wheels if re.match(r"(torch|triton|nvidia|cuda)", wheel)}
    assert all(path.suffix == ".whl" for path in (folder / "wheelhouse").iterdir())

    alone = ["bwrap", "--dev-bind", "/", "/", "--unshare-net", "--die-with-parent", "--"]
    program = [*alone, "make", f"PYTHON={sys.executable}", "SYSTEM_TORCH=1", ".venv/ready"]
    own = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "SYSTEM_TORCH"}
    kept = {name: value for name, value in os.environ.items() if name not in own}
    made = subprocess.run(program, cwd=folder, env=kept, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stdout + made.stderr
    checks = ["--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "-q"]
    checks += ["book/primer.ipynb", "book/online.ipynb", "tests/test_environment.py", "-k", "ipynb or lock"]
    tested = subprocess.run(
        [*alone, ".venv/bin/python", "-m", "pytest", *checks],
        cwd=folder, env=kept, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout + tested.stderr
