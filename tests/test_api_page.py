"""The page for readers who want the kernels alone: what it says of packages and GPUs,
and its ten lines in an environment that has nothing but the installed library.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tomllib

import gate
import nbformat
import pytest
import reference
from built import ROOT
from cases import CUDA, build_wheel, process_environment

import flashlib
from flashlib.kernels import host

NOTEBOOK = nbformat.read(ROOT / "book/api.ipynb", as_version=4)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXT = "\n".join(c.source for c in NOTEBOOK.cells if c.cell_type == "markdown")
NAMES = {"NumPy": "numpy", "Matplotlib": "matplotlib", "IPython": "ipython"}


def cell(name):
    return next(cell for cell in NOTEBOOK.cells if cell.id == f"api-{name}")


def names(requirements):
    return [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]


def test_the_page_lists_the_extras():
    said = {
        extra: [NAMES.get(name, name) for name in re.split(", | and ", installed)]
        for extra, installed in re.findall(
            r"^- `(\w+)` installs (.+?), for", TEXT, re.M
        )
    }
    extras = PROJECT["optional-dependencies"]
    assert said == {extra: names(extras[extra]) for extra in extras}
    assert names(PROJECT["dependencies"]) == ["torch", "triton"]


def test_the_page_documents_every_public_name():
    documented = re.findall(r"^\.\. auto\w+:: flashlib\.(\w+)$", TEXT, re.M)
    assert sorted(documented) == sorted(flashlib.__all__)


def test_the_page_runs_ten_lines():
    assert len([line for line in cell("use").source.splitlines() if line]) <= 10


def test_the_page_lists_the_gpus_that_the_gate_compiles_for():
    listed = re.findall(r"^ +(\d+): \"", cell("gpus").source, re.M)
    assert [int(architecture) for architecture in listed] == sorted(gate.ALL)
    assert sorted(host.TENSOR_CORES) == sorted(gate.TENSOR_CORES)


def test_labels_in_docstrings_become_links():
    text = "Chapter *Decoding* (``eq-a-b``,\n``alg-c-d``); ``eq(x)`` and (``lse``)."
    assert reference.linked(text) == (
        "Chapter *Decoding* :eq:`eq-a-b`,\n:prf:ref:`alg-c-d`; ``eq(x)`` and (``lse``)."
    )


# -- The wheel


def closure(*wanted):
    """The distributions that these need, and they themselves."""
    found, left = {}, list(wanted)
    while left:
        name = left.pop()
        if name not in found:
            try:
                found[name] = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # for another machine
            needs = found[name].requires or ()
            left += names(x for x in needs if "extra ==" not in x)
    return found.values()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A function that runs code where a wheel of the library, torch and triton are
    installed and nothing else, except for the packages that it names.
    """
    folder = tmp_path_factory.mktemp("alone")
    source, base = folder / "source", folder / "venv"
    source.mkdir()
    venv = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", base]
    subprocess.run(venv, check=True, timeout=60)
    paths = {"base": str(base), "platbase": str(base)}
    packages = sysconfig.get_path("purelib", "venv", paths)
    with build_wheel(source, "flashlib") as wheel:
        wheel.extractall(packages)  # as pip does with pure Python
    link(packages, "torch", "triton")

    def run(code, *more):
        link(packages, *more)
        environment = process_environment(PYTHONPATH=None, PYTHONNOUSERSITE="1")
        return subprocess.run(
            [base / "bin/python", "-I", "-c", code],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    return run


def link(packages, *wanted):
    """Put the distributions, and what they need, into a folder of packages."""
    for distribution in closure(*wanted):
        for file in distribution.files:
            top = file.parts[0]
            target = os.path.join(packages, top)
            if top not in ("..", "__pycache__") and not os.path.lexists(target):
                os.symlink(distribution.locate_file(top), target)


ALONE = """
import importlib.util
for name in ("numpy", "matplotlib", "IPython"):
    assert importlib.util.find_spec(name) is None, name
"""
LIGHT = """
import sys
assert not {"matplotlib", "IPython"} & set(sys.modules)
assert "/venv/" in flashlib.__file__
print("done")
"""


@pytest.mark.slow
def test_the_wheel_needs_torch_and_triton_alone(alone):
    run = alone(ALONE + cell("use").source + LIGHT)
    if CUDA:
        assert run.stdout == "True\ndone\n", run.stderr
    else:
        needed = "ImportError: flashlib's kernels run on a CPU through Triton's"
        assert f"{needed} interpreter, which needs NumPy" in run.stderr
    extra = names(PROJECT["optional-dependencies"]["cpu"])
    run = alone(cell("use").source + LIGHT, *extra)
    assert run.stdout == "True\ndone\n", run.stderr
