"""`make wheelhouse`: a tar that installs everything without a network."""

import re
import shutil
import subprocess
import sys

import pytest
from processes import OWN_MAKE, ROOT, make, output, process_environment, run

SHOW = "show:\n\t@echo $$PIP_CONFIG_FILE $$PIP_NO_INDEX $$PIP_FIND_LINKS"


def test_a_checkout_with_its_packages_asks_no_index(tmp_path):
    for name in ("Makefile", "requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    kept = dict.fromkeys(("PIP_CONFIG_FILE", "PIP_NO_INDEX", "PIP_FIND_LINKS"), "")
    before = make("--eval", SHOW, "show", folder=tmp_path, **kept)
    assert before.stdout.split() == [], before.stderr
    (tmp_path / "wheelhouse").mkdir()
    after = make("--eval", SHOW, "show", folder=tmp_path, **kept)
    shown = ["/dev/null", "1", str(tmp_path / "wheelhouse")]
    assert after.stdout.split() == shown, after.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it downloads what it packs
def test_two_lines_install_it_without_a_network(tmp_path):
    """A folder of links stands for the host with its torch and triton."""
    packed = output(make("SYSTEM_TORCH=1", "wheelhouse", seconds=900))
    name = re.search(r"tar xf (\S+-without-torch\.tar)", packed).group(1)
    subprocess.run(["tar", "xf", ROOT / "_build" / name], cwd=tmp_path, check=True)
    folder = tmp_path / "flashattention-book"
    names = [path.name for path in (folder / "wheelhouse").iterdir()]
    wheels = {name.split("-")[0].lower() for name in names}
    assert {"jupyterlab", "jupyterhub", "nbgrader", "numpy"} <= wheels
    assert not [w for w in wheels if re.match(r"(torch|triton|nvidia|cuda)", w)]
    assert {name for name in names if not name.endswith(".whl")} == {"node_modules"}

    alone = ["bwrap", "--dev-bind", "/", "/", "--unshare-net", "--die-with-parent"]
    ready = [f"PYTHON={sys.executable}", "SYSTEM_TORCH=1"]
    ready += [".venv/ready", "node-packages"]
    options = {"env": process_environment(**OWN_MAKE), "cwd": folder}
    output(run([*alone, "make", *ready], 600, **options))
    checks = "-q --nbval --nbval-current-env"
    checks += " --nbval-sanitize-with=book/_tools/nbval.cfg -p no:cacheprovider"
    checks += " book/primer.ipynb book/online.ipynb"
    checks += " tests/test_environment.py -k"
    command = [*alone, ".venv/bin/python", "-m", "pytest", *checks.split()]
    output(run([*command, "ipynb or lock"], 600, **options))
