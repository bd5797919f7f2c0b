"""Run the book's notebooks, stamp them, and say which stamps are stale.

    python book/_tools/notebooks.py execute [PATH ...]   run in place, normalise, stamp
    python book/_tools/notebooks.py restamp [PATH ...]   prove the outputs by nbval, renew the stamp
    python book/_tools/notebooks.py setup   [PATH ...]   put the first cell where it is missing or old
    python book/_tools/notebooks.py check   [PATH ...]   list what is stale, and why

Without a path: every notebook of book/.

The committed outputs of a chapter come from a GPU. A stamp in the notebook's metadata says from
which one, and what the outputs were made of:

    flashlib:
      cells:   hash of the syntax trees of its code cells
      files:   {file: hash} of the data files that it names, records above all
      library: {module: hash} of the flashlib modules that it uses, directly or not (docstrings aside)
      gpu, torch, triton, date: the run; gpu is null when it was not a GPU's

Two rules keep a GPU's record alive on a machine without one:

* A run without a GPU never writes the outputs of a cell tagged `gpu`.
* The record (gpu, torch, triton, date) survives such a run, and a restamp, unless a code cell has
  changed, or a kernel that a chapter with `gpu` cells uses. All other outputs are the same on every
  machine, which strict nbval tests.

The first code cell of every chapter is the same: on Colab and its like it installs the library from the
repository that `_config.yml` names. It does nothing elsewhere, so no stamp depends on it.

Needs nbformat and nbclient with ipykernel; `restamp` also pytest with nbval. Where the library is not
installed, PYTHONPATH must name the repository.
"""

import argparse
import ast
import datetime
import hashlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat

from flashlib.records import syntax_hash

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "flashlib"
CELL_TIMEOUT_S = 600
# What editors and runners leave behind: none of it belongs to the chapter.
VOLATILE_NOTEBOOK_METADATA = {"accelerator", "colab", "interpreter", "jupytext", "toc", "vscode", "widgets"}
VOLATILE_CELL_METADATA = {
    "ExecuteTime", "collapsed", "colab", "editable", "execution", "jupyter", "lines_to_next_cell",
    "outputId", "pycharm", "scrolled", "slideshow", "trusted", "vscode",
}  # fmt: skip


SETUP_ID = "install-flashlib"
SETUP = """\
# Where this book's library is missing, as on Colab, this cell installs it. It does nothing elsewhere.
import importlib.util
import subprocess
import sys

BOOK = "{address}"
if BOOK and importlib.util.find_spec("flashlib") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "git+" + BOOK], check=True)
    report = subprocess.run([sys.executable, "-m", "flashlib"], check=True, capture_output=True, text=True)
    print(report.stdout)\
"""


class RunFailed(Exception):
    """A notebook did not run, or gave an output that may not be committed."""


def chapters(paths=()):
    """The notebooks named, or all of book/ in order, as paths. FileNotFoundError if one is missing."""
    found = [Path(p).resolve() for p in paths] or sorted((ROOT / "book").glob("*.ipynb"))
    for path in found:
        if not path.is_file():
            raise FileNotFoundError(f"no notebook at {path}")
    return found


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def address():
    """The address of the repository in _config.yml; empty where none is set."""
    settings = (ROOT / "_config.yml").read_text()
    return re.search(r"^repository:\n(?: .*\n)*?  url: *[\"']?([^\"'\s]*)", settings, re.M).group(1)


def with_setup(notebook):
    """Whether the notebook had to be changed, in place, to begin its code with the cell that installs the
    library. Counts go on as if the notebook had been run with it.
    """
    source = SETUP.format(address=address())
    for cell in notebook.cells:
        if cell.id == SETUP_ID:
            changed, cell.source = cell.source != source, source
            return changed
    for holder in [part for cell in code_cells(notebook) for part in (cell, *cell.outputs)]:
        if holder.get("execution_count") is not None:
            holder.execution_count += 1
    cell = nbformat.v4.new_code_cell(source, id=SETUP_ID, metadata={"tags": ["remove-cell"]})
    cell.execution_count = 1
    first = next(
        (n for n, cell in enumerate(notebook.cells) if cell.cell_type == "code"), len(notebook.cells)
    )
    notebook.cells.insert(first, cell)
    return True


def is_gpu(cell):
    return "gpu" in cell.metadata.get("tags", [])


# ----------------------------------------------------------------------------------------------------
# What a notebook depends on


def _hash(text):
    data = text if isinstance(text, bytes) else text.encode()
    return hashlib.sha256(data).hexdigest()[:16]


def _module_file(name):
    """The file of a module of the library, or None if there is none by that name."""
    parts = name.split(".")
    if parts[0] != LIBRARY or not all(part.isidentifier() for part in parts):
        return None
    base = ROOT.joinpath(*parts)
    for file in (base / "__init__.py", base.with_suffix(".py")):
        if file.is_file():
            return file
    return None


def _nodes(tree, lazy):
    """The nodes of a tree; without `lazy` not those inside functions, which run only when called."""
    for child in ast.iter_child_nodes(tree):
        if lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _nodes(child, lazy)


def _imports(tree, package, lazy=True):
    """The (module, whole) pairs that a tree imports.

    package: what relative imports start from. whole is False for a package that is only passed through on
    the way to one of its modules: its module-level imports happen, those that wait inside its functions do
    not. A string that is a module's full name counts as such a waiting import: lazy tables name modules so.
    """
    for node in _nodes(tree, lazy):
        names = []
        if isinstance(node, ast.Import):
            for alias in node.names:
                names.append(alias.name)
                if not alias.asname:  # `import a.b` binds a, whose every attribute is then within reach
                    names.append(alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")
                base = ".".join(up[: len(up) - node.level + 1] + ([base] if base else []))
            modules = [f"{base}.{alias.name}" for alias in node.names if _module_file(f"{base}.{alias.name}")]
            names += modules
            if len(modules) < len(node.names):
                names.append(base)
        elif lazy and isinstance(node, ast.Constant) and str(node.value).startswith(LIBRARY + "."):
            names.append(str(node.value))
        for name in names:
            if _module_file(name):
                yield name, True
                parts = name.split(".")
                for size in range(1, len(parts)):
                    yield ".".join(parts[:size]), False


def library_modules(trees):
    """{module: file} of every library module that the trees use, directly or through other modules."""
    todo = [pair for tree in trees for pair in _imports(tree, "")]
    done = set()
    while todo:
        name, whole = todo.pop()
        if (name, whole) in done or (name, True) in done:
            continue
        done.add((name, whole))
        file = _module_file(name)
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        todo += _imports(ast.parse(file.read_text()), package, lazy=whole)
    return {name: _module_file(name) for name, _ in sorted(done)}


def data_files(trees, folder):
    """The data files that strings in the trees name: beside the notebook, or records by name or stem."""
    strings = {
        n.value
        for tree in trees
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and type(n.value) is str
    }
    records = ROOT / LIBRARY / "records"
    found = set()
    for text in strings:
        if not text or len(text) > 200 or "\n" in text or "\0" in text:
            continue
        for file in (folder / text, records / text, records / f"{text}.json"):
            if file.is_file() and file.suffix != ".py":
                found.add(file.resolve())
    return sorted(found)


def contents(notebook, folder):
    """The part of a stamp that says what the outputs were made of: {"cells", "files", "library"}."""
    code = [cell for cell in code_cells(notebook) if cell.get("id") != SETUP_ID]
    sources = [cell.source for cell in code]
    trees = [ast.parse(source) for source in sources]
    modules = library_modules(trees)
    # A figure may name its record inside flashlib.plot instead of in the chapter.
    drawing = [ast.parse(file.read_text()) for name, file in modules.items() if draws(name)]
    marks = [(syntax_hash(cell.source), is_gpu(cell)) for cell in code]
    files = data_files(trees + drawing, folder)
    return {
        "cells": _hash(repr(marks)),
        "files": {os.path.relpath(file, ROOT): _hash(file.read_bytes()) for file in files},
        "library": {name: syntax_hash(file.read_text()) for name, file in modules.items()},
    }


def draws(module):
    """Whether a library module makes figures, which nbval does not compare."""
    return module.startswith((f"{LIBRARY}.plot", f"{LIBRARY}.records"))


def _changed(old, new):
    """The keys whose values differ between two dicts, sorted."""
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


class Differences:
    """How a notebook's stamp differs from what the notebook would be stamped with now."""

    def __init__(self, notebook, folder):
        stamp = notebook.metadata.get(LIBRARY, {})
        now = contents(notebook, folder)
        self.unstamped = not stamp
        self.cells = stamp.get("cells") != now["cells"]
        self.files = _changed(stamp.get("files", {}), now["files"])
        self.library = _changed(stamp.get("library", {}), now["library"])
        self.has_gpu_cells = any(is_gpu(cell) for cell in code_cells(notebook))
        self.kernels = (
            [m for m in self.library if m.startswith(f"{LIBRARY}.kernels.")] if self.has_gpu_cells else []
        )
        self.drawing = [m for m in self.library if draws(m)]
        self.gpu = stamp.get("gpu")

    def keeps_record(self):
        """Whether the record of the run (gpu, torch, triton, date) still describes the outputs."""
        return not (self.unstamped or self.cells or self.kernels)

    def reasons(self):
        """What is stale, one line each; each ends with the cure."""
        if self.unstamped:
            return ["has no stamp: `make execute` on a GPU"]
        lines = []
        if self.cells:
            lines.append("its code cells have changed: `make execute` on a GPU")
        if self.kernels:
            names = ", ".join(self.kernels)
            lines.append(f"the kernels of its gpu cells have changed ({names}): `make execute` on a GPU")
        redraw = self.files + self.drawing
        if redraw:
            names = ", ".join(redraw)
            lines.append(f"its figures depend on {names}, which changed: `make execute` on any machine")
        rest = [m for m in self.library if m not in self.kernels and m not in self.drawing]
        if rest:
            lines.append(f"the library has changed ({', '.join(rest)}): `make restamp` on any machine")
        return lines


def stale(path):
    """Why the stamp of the notebook at `path` is stale, one line for each reason; empty when it is fresh."""
    return Differences(nbformat.read(path, as_version=4), Path(path).parent).reasons()


# ----------------------------------------------------------------------------------------------------
# Running and normalising


def _machine():
    """{"gpu", "torch", "triton", "date"} of a run here and now."""
    import torch

    try:
        import triton
    except ImportError:  # macOS and Windows have none
        triton = None
    return {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "triton": triton and triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def kernel_environment():
    """This process's environment, with the repository first on PYTHONPATH."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def _joined(outputs):
    """The outputs with neighbouring writes to one stream joined, as where they are cut depends on timing."""
    joined = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def normalise(notebook):
    """Drop, in place, what changes from run to run or from editor to editor. RunFailed on an SVG output."""
    notebook.nbformat_minor = max(notebook.nbformat_minor, 5)  # 4.5 is the first with cell ids
    notebook.metadata = nbformat.from_dict(
        {
            **{k: v for k, v in notebook.metadata.items() if k not in VOLATILE_NOTEBOOK_METADATA},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for place, cell in enumerate(notebook.cells):
        cell.source = cell.source.rstrip()
        for key in VOLATILE_CELL_METADATA & cell.metadata.keys():
            del cell.metadata[key]
        cell.setdefault("id", f"cell-{place}")
        if cell.cell_type != "code":
            continue
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            if "image/svg+xml" in output.get("data", {}):
                raise RunFailed(f"cell {cell.id} shows an SVG, which nbval cannot compare: draw a PNG")
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            output.pop("transient", None)


def _read(path):
    notebook = nbformat.read(path, as_version=4)
    # nbformat gives random ids to cells that have none; ids must not change from run to run.
    raw = nbformat.reader.reads(Path(path).read_text())
    for place, (cell, before) in enumerate(zip(notebook.cells, raw.get("cells", []), strict=False)):
        if "id" not in before:
            cell.id = f"cell-{place}"
    return notebook


def _write(notebook, path):
    nbformat.validate(notebook)
    part = path.with_suffix(".ipynb.part")
    nbformat.write(notebook, part)
    os.replace(part, path)


def execute(path, machine):
    """Run the notebook at `path` in place, normalise it and stamp it; machine: see _machine.

    Returns the notebook's Differences before the run. RunFailed if it fails; the file is then untouched.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = _read(path)
    before = Differences(notebook, path.parent)
    committed = {cell.id: cell.outputs for cell in code_cells(notebook) if is_gpu(cell)}
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # the kernel warns of its own sockets otherwise
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        client.execute(env=kernel_environment())
    except CellExecutionError as error:
        raise RunFailed(str(error)) from error
    if machine["gpu"] is None:
        for cell in code_cells(notebook):
            if cell.id in committed:
                cell.outputs = committed[cell.id]
    normalise(notebook)
    _stamp(notebook, path, machine if machine["gpu"] or not before.keeps_record() else None)
    return before


def _stamp(notebook, path, machine):
    """Write the notebook with a fresh stamp; machine None keeps the record of the last run."""
    old = notebook.metadata.get(LIBRARY, {})
    record = machine or {key: old.get(key) for key in ("gpu", "torch", "triton", "date")}
    notebook.metadata[LIBRARY] = nbformat.from_dict({**contents(notebook, path.parent), **record})
    _write(notebook, path)


# ----------------------------------------------------------------------------------------------------
# Commands


def run_execute(paths):
    machine = _machine()
    print(
        f"running on {machine['gpu'] or 'the CPU'}, torch {machine['torch']}, triton {machine['triton']}",
        flush=True,
    )
    failed = 0
    for path in paths:
        print(f"  {path.name} ...", end=" ", flush=True)
        start = time.monotonic()
        try:
            before = execute(path, machine)
        except RunFailed as error:
            failed += 1
            print(f"FAILED, left as it was\n{error}", flush=True)
            continue
        print(f"{time.monotonic() - start:.1f} s", flush=True)
        if machine["gpu"] is None and not (before.keeps_record() and before.gpu):
            print("    its stamp names no GPU: run `make execute` on one before you commit")
    return 1 if failed else 0


def run_restamp(paths):
    failed = 0
    for path in paths:
        print(f"  {path.name} ...", end=" ", flush=True)
        notebook = _read(path)
        before = Differences(notebook, path.parent)
        if not before.keeps_record() or before.files or before.drawing:
            failed += 1
            print("needs more than a restamp: " + "; ".join(before.reasons()))
            continue
        if not before.reasons():
            print("fresh")
            continue
        command = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env"]
        command += [f"--nbval-cell-timeout={CELL_TIMEOUT_S}", "-p", "no:cacheprovider", str(path)]
        result = subprocess.run(command, cwd=ROOT, env=kernel_environment(), capture_output=True, text=True)
        if result.returncode:
            failed += 1
            print(f"its outputs are no longer what the library gives\n{result.stdout}{result.stderr}")
            continue
        _stamp(notebook, path, machine=None)
        print("outputs proved, stamp renewed")
    return 1 if failed else 0


def run_setup(paths):
    for path in paths:
        notebook = _read(path)
        if with_setup(notebook):
            _write(notebook, path)
            print(f"  {path.name}: its first code cell is new")
    return 0


def run_check(paths):
    count = 0
    for path in paths:
        for reason in stale(path):
            count += 1
            print(f"{os.path.relpath(path, ROOT)}: {reason}")
    return 1 if count else 0


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["execute", "restamp", "setup", "check"])
    parser.add_argument("paths", nargs="*", help="notebooks; all of book/ when none is given")
    options = parser.parse_args(arguments)
    commands = {"execute": run_execute, "restamp": run_restamp, "setup": run_setup, "check": run_check}
    try:
        return commands[options.command](chapters(options.paths))
    except FileNotFoundError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
