"""The page for readers who want the kernels alone: what it says of packages and GPUs,
and its ten lines where nothing but the wheel, torch and triton can be imported.
"""

import re
import tomllib

import gate
import nbformat
import pytest
import reference
from built import ROOT
from device import CUDA
from processes import build_wheel, run_python

import flashlib
from flashlib.kernels import tables

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


def test_the_page_lists_the_gpus_that_the_gate_compiles_for():
    listed = re.findall(r"^ +(\d+): \"", cell("gpus").source, re.M)
    assert [int(architecture) for architecture in listed] == sorted(gate.ALL)
    assert sorted(tables.TENSOR_CORES) == sorted(gate.TENSOR_CORES)


def test_labels_in_docstrings_become_links():
    text = "Chapter *Decoding* (``eq-a-b``,\n``alg-c-d``); ``eq(x)`` and (``lse``)."
    assert reference.linked(text) == (
        "Chapter *Decoding* :eq:`eq-a-b`,\n:prf:ref:`alg-c-d`; ``eq(x)`` and (``lse``)."
    )


# -- The wheel


WITHOUT = """
import sys
sys.path.insert(0, {folder!r})
sys.modules |= dict.fromkeys({without!r})  # None: an import of it fails
{code}
assert flashlib.__file__.startswith({folder!r})
assert not any(sys.modules.get(name) for name in ("matplotlib", "IPython"))
print("done")
"""


@pytest.mark.slow
def test_the_wheel_needs_torch_and_triton_alone(tmp_path):
    """Alone it runs on a GPU; with the extra cpu, on a CPU too."""
    (source := tmp_path / "source").mkdir()
    with build_wheel(source, "flashlib") as wheel:
        wheel.extractall(tmp_path / "packages")  # as pip does with pure Python
    values = {"folder": str(tmp_path / "packages"), "code": cell("use").source}
    without = ["matplotlib", "IPython"]
    for missing in ([*without, "numpy"], without):
        done = run_python(WITHOUT.format(without=missing, **values), PYTHONPATH=None)
        if CUDA or "numpy" not in missing:
            assert done.stdout == "True\ndone\n", done.stderr
        else:
            needed = "ImportError: flashlib's kernels run on a CPU through Triton's"
            assert f"{needed} interpreter, which needs NumPy" in done.stderr
