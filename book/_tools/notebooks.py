"""Run the book's notebooks in place, and keep their first cell up to date.

    python book/_tools/notebooks.py execute [PATH ...]   run in place and normalize
    python book/_tools/notebooks.py setup   [PATH ...]   rewrite the first code cell

Without a path: every notebook in book/ and book/depth/.

Outputs are committed. Strict nbval compares all of them except figures and the outputs
of cells tagged `gpu`, so `execute` records about these what nbval cannot tell, in the
notebook's metadata:

    flashlib:
      figures: {cell id: hash of the source of the cell that drew the figure}
      gpu, torch, triton, date: the run behind the `gpu` cells

A run without a GPU keeps the committed outputs of `gpu` cells, and their record.

The first code cell of every chapter is the same: on Colab it installs the library from
the repository named in `_config.yml`. Elsewhere it does nothing.
"""

import argparse
import datetime
import hashlib
import os
import sys
import time
from pathlib import Path

import nbformat
import yaml

ROOT = Path(__file__).resolve().parents[2]
CELL_TIMEOUT_S = 600
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
# What editors and runners leave behind is not part of the chapter.
NOTEBOOK_METADATA = {"flashlib", "kernelspec", "language_info"}
CELL_METADATA = {"mystnb", "tags"}
FIGURES = {"image/svg+xml", "image/png"}

SETUP_ID = "install-flashlib"
SETUP = """\
# Where this book's library is missing, as on Colab, this cell installs it. \
It does nothing elsewhere.
import importlib.util
import subprocess
import sys

BOOK = "{address}"
if BOOK and importlib.util.find_spec("flashlib") is None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "git+" + BOOK],
        check=True,
    )
    report = subprocess.run(
        [sys.executable, "-m", "flashlib"],
        check=True,
        capture_output=True,
        text=True,
    )
    print(report.stdout)\
"""


class RunFailed(Exception):
    """A notebook did not run."""


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def is_gpu(cell):
    return "gpu" in cell.metadata.get("tags", [])


def figures(notebook):
    """{cell id: hash of its source} of the cells whose committed output is a figure."""
    return {
        cell.id: hashlib.sha256(cell.source.encode()).hexdigest()[:16]
        for cell in code_cells(notebook)
        if any(FIGURES & output.get("data", {}).keys() for output in cell.outputs)
    }


def set_up(notebook):
    """Put the cell that installs the library first among the code cells, in place.

    Returns whether the notebook changed.
    """
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    source = SETUP.format(address=config["repository"]["url"])
    first = next(iter(code_cells(notebook)), None)
    if first and first.id == SETUP_ID:
        changed, first.source = first.source != source, source
        return changed
    cell = nbformat.v4.new_code_cell(
        source, id=SETUP_ID, metadata={"tags": ["remove-cell"]}
    )
    place = notebook.cells.index(first) if first else len(notebook.cells)
    notebook.cells.insert(place, cell)
    return True


def kernel_environment():
    """This process's environment, with the repository first on PYTHONPATH."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def client(notebook, folder):
    """What runs a notebook in a folder."""
    from nbclient import NotebookClient

    return NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # the kernel warns about its sockets
        resources={"metadata": {"path": str(folder)}},
    )


def _joined(outputs):
    """The outputs, adjacent writes to one stream joined: timing decides their cuts."""
    joined = []
    for output in outputs:
        last = joined[-1] if joined else None
        streams = last and output.output_type == last.output_type == "stream"
        if streams and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def normalize(notebook):
    """Drop, in place, what changes between runs or editors."""
    notebook.nbformat_minor = 5  # the first version with cell ids
    metadata = {k: v for k, v in notebook.metadata.items() if k in NOTEBOOK_METADATA}
    metadata |= {"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}
    notebook.metadata = nbformat.from_dict(metadata)
    for cell in notebook.cells:
        cell.source = cell.source.rstrip()
        for key in cell.metadata.keys() - CELL_METADATA:
            del cell.metadata[key]
        if cell.cell_type != "code":
            continue
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            if "metadata" in output:  # JupyterLab reads what a figure needs
                kept = FIGURES & output.metadata.keys()
                kept = {kind: output.metadata[kind] for kind in kept}
                output.metadata = nbformat.from_dict(kept)
            output.pop("transient", None)


def _write(notebook, path):
    nbformat.validate(notebook)
    part = path.with_suffix(".ipynb.part")
    nbformat.write(notebook, part)
    os.replace(part, path)


def machine():
    """{"gpu", "torch", "triton", "date"} here and now; gpu is None without one."""
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def execute(path, machine):
    """Run the notebook at ``path`` in place on ``machine`` (see :func:`machine`).

    Raises RunFailed if a cell fails, and leaves the file unchanged.
    """
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(path, as_version=4)
    set_up(notebook)
    gpu_cells = [cell for cell in code_cells(notebook) if is_gpu(cell)]
    committed = [cell.outputs for cell in gpu_cells]
    try:
        client(notebook, path.parent).execute(env=kernel_environment())
    except CellExecutionError as error:
        raise RunFailed(str(error)) from error
    record = notebook.metadata.get("flashlib", {})
    drawn = record.get("figures", {})
    if machine["gpu"]:
        record = machine
    else:
        for cell, outputs in zip(gpu_cells, committed, strict=True):
            cell.outputs = outputs
    normalize(notebook)
    now = figures(notebook)
    if not machine["gpu"]:  # a figure kept from the GPU keeps its hash, too
        now |= {cell.id: drawn.get(cell.id) for cell in gpu_cells if cell.id in now}
    keys = machine if gpu_cells else ()
    kept = {key: record.get(key) for key in keys}
    notebook.metadata["flashlib"] = nbformat.from_dict({"figures": now, **kept})
    _write(notebook, path)


def run_execute(paths):
    here = machine()
    print(f"running on {here['gpu'] or 'the CPU'}, torch {here['torch']}", flush=True)
    failed = 0
    for path in paths:
        print(f"  {os.path.relpath(path, ROOT)} ...", end=" ", flush=True)
        start = time.monotonic()
        try:
            execute(path, here)
        except RunFailed as error:
            failed += 1
            print(f"FAILED, left as it was\n{error}", flush=True)
        else:
            print(f"{time.monotonic() - start:.1f} s", flush=True)
    return min(failed, 1)


def run_setup(paths):
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        if set_up(notebook):
            _write(notebook, path)
            print(f"  {os.path.relpath(path, ROOT)}: its first code cell is new")
    return 0


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["execute", "setup"])
    parser.add_argument("paths", nargs="*", help="default: every notebook of the book")
    options = parser.parse_args(arguments)
    paths = [Path(path).resolve() for path in options.paths]
    book = ROOT / "book"
    paths = paths or sorted([*book.glob("*.ipynb"), *book.glob("depth/*.ipynb")])
    for path in paths:
        if not path.is_file():
            parser.error(f"no notebook at {path}")
    return {"execute": run_execute, "setup": run_setup}[options.command](paths)


if __name__ == "__main__":
    sys.exit(main())
