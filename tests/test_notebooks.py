"""Every committed notebook is fresh, came from a GPU or waits for one, has the form of a chapter, runs alone.

`complaints` and its parts judge one notebook and return lines; the tests at the end hand them notebooks
that are wrong in one way each and want the line.
"""

import ast
import base64
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import notebooks
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from pending import waits_for_gpu

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "book").glob("*.ipynb"))
# These have the parts that a chapter must have; index and errata are pages of another kind.
CHAPTERS = [path for path in NOTEBOOKS if path.stem not in ("index", "errata")]

OUTPUT_BYTES = 300_000
NOTEBOOK_BYTES = 1_500_000

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def none(lines):
    """Fail with these lines, if there are any."""
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_there_are_notebooks():
    assert CHAPTERS, "book/ holds no chapter, so nothing below tests anything"


# ----------------------------------------------------------------------------------------------------
# Stamps


@each_notebook
def test_stamp_is_fresh(path):
    none(notebooks.stale(path))


@each_notebook
def test_stamp_names_a_gpu(path):
    gpu = read(path).metadata.get("flashlib", {}).get("gpu")
    waits_for_gpu(path.relative_to(ROOT).as_posix(), bool(gpu))
    assert gpu, f"{path.name} was not executed on a GPU since it last changed: `make execute` on one"


# ----------------------------------------------------------------------------------------------------
# Form


def calls(tree, names):
    """The calls of functions by these names in a syntax tree, as `check(...)` or `notebook.check(...)`."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (getattr(node.func, "id", None) in names or getattr(node.func, "attr", None) in names)
    ]


def text_of(output):
    """What an output says in plain words: a stream's text, or every textual representation of a result."""
    if output.output_type == "stream":
        return output.text
    return "\n".join(text for kind, text in output.get("data", {}).items() if kind.startswith("text/"))


def frame_complaints(notebook):
    """What is wrong with a notebook's metadata, ids and tags."""
    lines = []
    if (notebook.nbformat, notebook.nbformat_minor) != (4, 5):
        lines.append(f"nbformat {notebook.nbformat}.{notebook.nbformat_minor}, expected 4.5")
    kernel = dict(notebook.metadata.get("kernelspec", {}))
    if kernel != {"display_name": "Python 3", "language": "python", "name": "python3"}:
        lines.append(f"kernelspec is {kernel}")
    ids = [cell.get("id") for cell in notebook.cells]
    if None in ids or len(set(ids)) != len(ids):
        lines.append("cells without an id, or with the same one")
    copy = nbformat.from_dict(json.loads(json.dumps(notebook)))
    try:
        notebooks.normalise(copy)
    except notebooks.RunFailed as error:
        lines.append(str(error))
    if copy != notebook:
        lines.append("not normalised: run `make execute`")
    code = notebooks.code_cells(notebook)
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        lines.append("execution counts are not 1, 2, 3 ...: it was not run from top to bottom")
    gpu = [cell for cell in code if notebooks.is_gpu(cell)]
    if 4 * len(gpu) > len(code):
        lines.append(f"{len(gpu)} of {len(code)} code cells are tagged gpu, more than one in four")
    return lines


def cell_complaints(cell):
    """What is wrong with one cell: source, tags, outputs."""
    lines = []
    tags = set(cell.metadata.get("tags", []))
    if not cell.source.strip():
        lines.append("is empty")
    if cell.cell_type != "code":
        return lines
    try:
        tree = ast.parse(cell.source)
    except SyntaxError as error:
        return [*lines, f"is not plain Python: {error}"]
    checks = calls(tree, {"check", "holds"})
    gpu = "gpu" in tags
    if gpu and checks:
        lines.append("is tagged gpu and holds a check, which would prove nothing on a CPU")
    if gpu != ("nbval-ignore-output" in tags):
        lines.append("gpu and nbval-ignore-output belong together: any other output is compared")
    if tags & {"nbval-skip", "raises-exception", "skip-execution"} or "NBVAL" in cell.source:
        lines.append("is kept from nbval")
    at_top = {id(statement.value) for statement in tree.body if isinstance(statement, ast.Expr)}
    for call in checks:
        # Inside a function or a try, reaching the call is what is tested.
        lines += check_complaints(call, reached_always=id(call) in at_top)
    for output in cell.outputs:
        lines += output_complaints(cell, output)
    return lines


def check_complaints(call, reached_always):
    """What makes one check(...) or holds(...) prove nothing; reached_always: no branch leads around it."""
    name = getattr(call.func, "id", None) or call.func.attr
    sides = call.args[1:]
    if len(sides) != (2 if name == "check" else 1):
        return [f"`{ast.unparse(call)}` passes something else than a label and what is checked, by position"]
    lines = []
    if len({ast.dump(side) for side in sides}) < len(sides):
        lines.append(f"`{ast.unparse(call)}` compares an expression with itself")
    if reached_always and all(isinstance(side, ast.Constant) for side in sides):
        lines.append(f"`{ast.unparse(call)}` states a constant")
    return lines


# What one machine prints and another does not. A figure after "below" is a bound, not a measurement.
UNSTABLE = {
    "a tensor": r"\btensor\(|\bParameter containing|\bdevice\(|\bdevice='",
    "an error figure": r"(?<!below )\b\d+(?:\.\d+)?e-\d+\b",
    "a number with more digits than all machines agree on": r"\d\.\d{7,}",
    "a warning": r"Warning\b|\bwarn\(",
    "an address in memory": r"\b0x[0-9a-f]{6,}\b",
}
# A cell that prints from a committed record may name these; any other would be timing, or naming its machine.
MEASURED = {
    "a timing": r"\d\s?(?:ns|us|µs|ms|s|seconds|TFLOP/s|[GT]B/s)\b",
    "a device": r"\b(?:cuda(?::\d+)?|NVIDIA|H100|H200|A100|GeForce|Tesla|interpreter)\b",
}


def output_complaints(cell, output):
    """What is wrong with one output of a code cell."""
    lines = []
    if output.output_type == "error":
        return [f"failed with {output.ename}"]
    if output.output_type == "stream" and output.name == "stderr":
        lines.append(f"writes to stderr: {output.text[:80]!r}")
    size = len(json.dumps(output))
    if size > OUTPUT_BYTES:
        lines.append(f"has an output of {size} bytes, more than {OUTPUT_BYTES}")
    data = output.get("data", {})
    strange = {kind for kind in data if kind not in ("text/plain", "text/markdown", "text/html", "image/png")}
    if strange:
        lines.append(f"has an output of kind {', '.join(sorted(strange))}")
    # The figures of flashlib.stepper hold data in a script element that nothing executes.
    html = data.get("text/html", "").replace('<script type="application/json">', "")
    if re.search(r"<script|<iframe|https?://[^\s\"')]+\.(?:js|css)", html):
        lines.append("has an HTML output with a script")
    if "image/png" in data:
        look = cell.metadata.get("mystnb", {})
        if not look.get("image", {}).get("alt", "").strip():
            lines.append("shows a figure without alt text (metadata mystnb: image: alt)")
        if not look.get("figure", {}).get("caption", "").strip():
            lines.append("shows a figure without a caption (metadata mystnb: figure: caption)")
    if "nbval-ignore-output" not in cell.metadata.get("tags", []):
        # The library's source, shown as Markdown, may speak of devices.
        text = "" if "text/markdown" in data and "show(" in cell.source else text_of(output)
        patterns = UNSTABLE if "record" in cell.source else {**UNSTABLE, **MEASURED}
        for name, pattern in patterns.items():
            if found := re.search(pattern, text):
                lines.append(f"prints {name}: {found.group()!r}")
    return lines


def _functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _is_kernel(function):
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _body(function):
    """A function's code without its name, docstring and decorators; None for one too short to be a copy."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return ast.dump(ast.Module(body, [])) if len(body) >= 3 else None


@functools.cache
def library_functions():
    """The library's (names of kernels, bodies of functions)."""
    found = [f for file in (ROOT / "flashlib").rglob("*.py") for f in _functions(ast.parse(file.read_text()))]
    return {f.name for f in found if _is_kernel(f)}, {body for f in found if (body := _body(f))}


def retyped_complaints(notebook, kernels, bodies):
    """The functions that a notebook defines although the library has them."""
    lines = []
    for cell in notebooks.code_cells(notebook):
        for function in _functions(ast.parse(cell.source)):
            if (_is_kernel(function) and function.name in kernels) or _body(function) in bodies:
                lines.append(f"cell {cell.id} retypes the library's {function.name}: use show()")
    return lines


def complaints(notebook):
    """Everything that is wrong with the form of a notebook, one line each."""
    lines = frame_complaints(notebook)
    for cell in notebook.cells:
        lines += [f"cell {cell.id} {line}" for line in cell_complaints(cell)]
    size = len(json.dumps(notebook, indent=1, ensure_ascii=False))
    if size > NOTEBOOK_BYTES:
        lines.append(f"{size} bytes, more than {NOTEBOOK_BYTES}")
    return lines


def chapter_complaints(notebook):
    """What a chapter lacks of its fixed parts: opening, takeaway, solved exercises, sources."""
    lines = []
    prose = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    opening = prose.split("\n## ")[0]
    for part, pattern in {
        "what question it answers": r"\?|[Qq]uestion",
        "what the reader will have": r"[Yy]ou will have|[Aa]t the end",
        "what it needs": r"[Nn]eeds?\b",
        "how long it takes": r"\b(?:minutes?|hours?)\b",
    }.items():
        if not re.search(pattern, opening):
            lines.append(f"its opening does not say {part}")
    boxes = re.findall(r"^(:{3,}|`{3,})\{\w+\} [^\n]*[Tt]ake-?away[^\n]*\n(.*?)^\1$", prose, re.M | re.S)
    if not boxes:
        lines.append("it has no takeaway box")
    elif not any(re.search(r"\d", body) for _, body in boxes):
        lines.append("its takeaway has no number")
    exercises = re.findall(r"\{exercise(?:-start)?\}.*?:label:\s*(\S+)", prose, re.S)
    if not exercises:
        lines.append("it has no exercise")
    for label in exercises:
        solution = re.search(r"\{solution(?:-start)?\}\s+" + re.escape(label) + r"\n((?::.*\n)*)", prose)
        if not solution:
            lines.append(f"exercise {label} has no solution")
        elif ":class: dropdown" not in solution.group(1):
            lines.append(f"the solution of {label} is not folded")
    sources = re.split(r"^## Sources\b", prose, flags=re.M)
    if len(sources) != 2 or "{cite" not in sources[-1]:
        lines.append("it does not end in a section Sources with citations")
    return lines


@each_notebook
def test_form(path):
    none(complaints(read(path)))


@each_notebook
def test_code_begins_with_the_cell_that_installs_the_library(path):
    notebook = read(path)
    assert not notebooks.with_setup(notebook), "run: python book/_tools/notebooks.py setup"
    assert notebooks.code_cells(notebook)[0].id == notebooks.SETUP_ID


@each_notebook
def test_no_library_code_is_retyped(path):
    none(retyped_complaints(read(path), *library_functions()))


@each_chapter
def test_parts_of_a_chapter(path):
    none(chapter_complaints(read(path)))


# ----------------------------------------------------------------------------------------------------
# A downloaded notebook runs alone


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the library installed as a package, away from this checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "flashlib", source / "flashlib", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True)
    return target


@pytest.mark.slow
@each_notebook
def test_downloaded_notebook_runs_alone(path, installed, tmp_path):
    from nbclient import NotebookClient

    notebook = read(path)
    where = f"import flashlib; assert flashlib.__file__.startswith({str(installed)!r}), flashlib.__file__"
    notebook.cells.insert(0, new_code_cell(where))
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(installed)})


# ----------------------------------------------------------------------------------------------------
# The stamps themselves, on a library of four modules

LIBRARY = {
    "__init__.py": """
import importlib
_HOME = {"attention": "flashlib.api"}
def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(name)
    return getattr(importlib.import_module(_HOME[name]), name)
""",
    "api.py": """
def attention():
    from flashlib.kernels import flash2
    return "flashlib.kernels.", flash2.run()
""",
    "kernels/__init__.py": "",
    "kernels/flash2.py": 'def run():\n    """Words."""\n    return 2  # two\n',
    "plot.py": "def draw():\n    return 'speed'\n",
    "records/__init__.py": "",
    "records/speed.json": '{"tflops": 500}',
    "other.py": "x = 1\n",
}


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A repository with a small flashlib, and a function that writes book/one.ipynb from code cells."""
    for name, text in LIBRARY.items():
        file = tmp_path / "flashlib" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "book").mkdir()
    (tmp_path / "_config.yml").write_text('title: A\nrepository:\n  url: ""\n  branch: main\n')
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)

    def write(*cells):
        path = tmp_path / "book/one.ipynb"
        nbformat.write(new_notebook(cells=list(cells)), path)
        return path

    write.root = tmp_path
    return write


GPU = {"gpu": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "date": "2026-11-20"}
CPU = {"gpu": None, "torch": "2.13", "triton": "3.7", "date": "2026-11-21"}
SETUP = "from flashlib import attention"
GPU_TAGS = {"tags": ["gpu", "nbval-ignore-output"]}


def stamp_of(path):
    return read(path).metadata.flashlib


def stamp(path):
    """What execute(path, GPU) does to the stamp, without the run."""
    notebooks._stamp(read(path), path, GPU)


def test_stamp_follows_imports_that_wait_in_functions(house):
    path = house(new_code_cell(SETUP))
    stamp(path)
    assert set(stamp_of(path).library) == {
        "flashlib",
        "flashlib.api",
        "flashlib.kernels",
        "flashlib.kernels.flash2",
    }
    assert stamp_of(path).gpu == "NVIDIA H200"
    path = house(new_code_cell("from flashlib.plot import draw"))
    stamp(path)
    assert set(stamp_of(path).library) == {"flashlib", "flashlib.plot"}, (
        "a package on the way brings only itself"
    )


@pytest.mark.parametrize(
    "file, text, reason",
    [
        ("flashlib/kernels/flash2.py", 'def run():\n    """Other words."""\n\n    return 2\n', None),
        ("flashlib/other.py", "x = 2\n", None),
        ("flashlib/kernels/flash2.py", "def run():\n    return 3\n", "kernels of its gpu cells"),
        ("flashlib/api.py", "def attention():\n    return 2\n", "`make restamp`"),
        ("flashlib/plot.py", "def draw():\n    return 'speed', 2\n", "its figures depend on flashlib.plot"),
        (
            "flashlib/records/speed.json",
            '{"tflops": 501}',
            "its figures depend on flashlib/records/speed.json",
        ),
    ],
)
def test_what_makes_a_stamp_stale(house, file, text, reason):
    cells = [SETUP, "from flashlib import plot", "attention()"]
    path = house(*map(new_code_cell, cells), new_code_cell("1", metadata=GPU_TAGS))
    stamp(path)
    assert notebooks.stale(path) == []
    (house.root / file).write_text(text)
    found = notebooks.stale(path)
    assert any(reason in line for line in found) if reason else not found, found


def test_changed_cell_makes_a_stamp_stale_and_a_comment_does_not(house):
    path = house(new_code_cell("x = 1"))
    stamp(path)
    notebook = read(path)
    for source, stale in (("x = 1  # one", False), ("x = 2", True)):
        notebook.cells[0].source = source
        nbformat.write(notebook, path)
        assert bool(notebooks.stale(path)) == stale


def test_cpu_run_keeps_what_a_gpu_wrote(house):
    path = house(
        new_code_cell(SETUP), new_code_cell("print('now')"), new_code_cell("print('cpu')", metadata=GPU_TAGS)
    )
    notebooks.execute(path, GPU)
    notebook = read(path)
    notebook.cells[1].outputs[0].text = "before\n"
    notebook.cells[2].outputs[0].text = "gpu\n"
    nbformat.write(notebook, path)
    notebooks.execute(path, CPU)
    assert [cell.outputs[0].text for cell in read(path).cells[1:]] == ["now\n", "gpu\n"]
    assert dict(stamp_of(path)).items() >= GPU.items(), "the record of the GPU survives a run that repeats it"

    kernel = house.root / "flashlib/kernels/flash2.py"
    kernel.write_text(kernel.read_text().replace("2", "3"))
    notebooks.execute(path, CPU)
    assert read(path).cells[2].outputs[0].text == "gpu\n"
    assert dict(stamp_of(path)).items() >= CPU.items(), "a changed kernel ends the record"


def test_setup_changes_nothing_but_its_cell(house, capsys):
    first = new_code_cell("import flashlib\n1 + 1", id="one", execution_count=1)
    first.outputs = [new_output("execute_result", {"text/plain": "2"}, execution_count=1)]
    path = house(
        new_markdown_cell("# One", id="title"), first, new_code_cell("2", id="two", execution_count=2)
    )
    stamp(path)
    before = read(path)
    assert notebooks.main(["setup", str(path)]) == 0
    after = read(path)
    assert [cell.id for cell in after.cells] == ["title", notebooks.SETUP_ID, "one", "two"]
    assert [cell.execution_count for cell in notebooks.code_cells(after)] == [1, 2, 3]
    assert after.cells[2].outputs[0].execution_count == 2
    assert after.cells[1].metadata.tags == ["remove-cell"]
    assert notebooks.stale(path) == [] and after.metadata == before.metadata
    written = path.read_bytes()
    assert notebooks.main(["setup", str(path)]) == 0
    assert path.read_bytes() == written

    (house.root / "_config.yml").write_text("repository:\n  branch: main\n  url: https://example.org/book\n")
    assert notebooks.main(["setup", str(path)]) == 0
    assert 'BOOK = "https://example.org/book"' in read(path).cells[1].source
    assert notebooks.stale(path) == []
    assert capsys.readouterr().out.count("its first code cell is new") == 2


@pytest.mark.parametrize(
    "address, there, installs",
    [("https://example.org/b", False, True), ("https://example.org/b", True, False), ("", False, False)],
)
def test_setup_installs_only_where_the_library_is_missing(address, there, installs, monkeypatch, capsys):
    ran = []

    def run(command, **options):
        assert options["check"]
        ran.append(command[1:])
        return subprocess.CompletedProcess(command, 0, stdout="GPU: one\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "there" if there else None)
    exec(notebooks.SETUP.format(address=address), {})
    install = ["-m", "pip", "install", "--quiet", "git+https://example.org/b"]
    assert ran == ([install, ["-m", "flashlib"]] if installs else [])
    assert capsys.readouterr().out == ("GPU: one\n\n" if installs else "")


def test_notebook_that_fails_or_shows_svg_is_left_alone(house):
    svg = "from IPython.display import SVG\nSVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>')"
    for source in ("1 / 0", svg):
        path = house(new_code_cell(source))
        before = path.read_bytes()
        with pytest.raises(notebooks.RunFailed, match=r"ZeroDivisionError|SVG"):
            notebooks.execute(path, GPU)
        assert path.read_bytes() == before


def test_execute_twice_writes_the_same_bytes(house):
    noisy = "import sys, time\nfor i in range(3):\n    print(i); sys.stdout.flush(); time.sleep(0.1)"
    path = house(new_code_cell(noisy, metadata={"collapsed": True}), new_markdown_cell("text  \n"))
    notebooks.execute(path, GPU)
    first = path.read_bytes()
    notebooks.execute(path, GPU)
    assert path.read_bytes() == first
    assert len(read(path).cells[0].outputs) == 1, "one stream, however it was cut"


def test_restamp_renews_only_what_it_proved(house, capsys):
    path = house(new_code_cell("from flashlib import other"), new_code_cell("print(other.x)"))
    notebooks.execute(path, GPU)
    module = house.root / "flashlib/other.py"
    module.write_text("x = 3 - 2\n")
    assert notebooks.run_restamp([path]) == 0
    assert notebooks.stale(path) == [] and stamp_of(path).gpu == "NVIDIA H200"
    module.write_text("x = 2\n")
    assert notebooks.run_restamp([path]) == 1
    assert notebooks.stale(path) != []
    assert "no longer" in capsys.readouterr().out
    notebook = read(path)
    notebook.cells[0].source += "\ny = 1"
    nbformat.write(notebook, path)
    assert notebooks.run_restamp([path]) == 1, "a changed cell needs a run"


# ----------------------------------------------------------------------------------------------------
# The judges fire


def good():
    """A notebook without a complaint."""
    picture = new_output(
        "display_data", {"image/png": base64.b64encode(b"png").decode(), "text/plain": "Figure"}
    )
    look = {"mystnb": {"image": {"alt": "a line"}, "figure": {"caption": "It rises."}}}
    cells = [
        new_code_cell("check('eq-a-b', f(x), g(x))", execution_count=1),
        new_code_cell(
            "print(7)", execution_count=2, outputs=[new_output("stream", name="stdout", text="7 words\n")]
        ),
        new_code_cell("draw()", execution_count=3, outputs=[picture], metadata=look),
        new_code_cell("print(8)", execution_count=4, metadata=GPU_TAGS),
        new_markdown_cell("Text."),
    ]
    for place, cell in enumerate(cells):
        cell.id = f"c{place}"
    notebook = new_notebook(cells=cells)
    notebooks.normalise(notebook)
    return notebook


def _prints(text, source="print(7)"):
    def change(notebook):
        notebook.cells[1].source = source
        notebook.cells[1].outputs = [new_output("stream", name="stdout", text=text)]

    return change


def _source(text, place=0):
    return lambda notebook: notebook.cells[place].update(source=text)


def _displays(**data):
    data = {kind.replace("_", "/"): text for kind, text in data.items()}
    return lambda notebook: notebook.cells[1].update(outputs=[new_output("display_data", data)])


FAULTS = {
    "kernelspec": lambda n: n.metadata.kernelspec.update(name="venv"),
    "the same one": lambda n: n.cells[1].update(id="c0"),
    "not normalised": lambda n: n.cells[0].metadata.update(collapsed=True),
    "execution counts": lambda n: n.cells[1].update(execution_count=9),
    "one in four": lambda n: n.cells[1].metadata.update(GPU_TAGS),
    "is empty": _source(""),
    "not plain Python": _source("%matplotlib inline"),
    "holds a check": _source("notebook.holds('eq-a-b', x > 1)", place=3),
    "belong together": lambda n: n.cells[0].metadata.update(tags=["nbval-ignore-output"]),
    "kept from nbval": lambda n: n.cells[0].metadata.update(tags=["nbval-skip"]),
    "with itself": _source("check('eq-a-b', f(x), f( x ))"),
    "states a constant": _source("holds('eq-a-b', True)"),
    "by position": _source("check('eq-a-b', lhs=a, rhs=b)"),
    "failed with ValueError": lambda n: n.cells[1].update(outputs=[new_output("error", ename="ValueError")]),
    "stderr": lambda n: n.cells[1].update(outputs=[new_output("stream", name="stderr", text="hm")]),
    "has an output of": _prints("7 " * OUTPUT_BYTES),
    "image/svg+xml": lambda n: n.cells[1].update(
        outputs=[new_output("display_data", {"image/svg+xml": "<svg/>"})]
    ),
    "with a script": _displays(text_html="<script>1</script>"),
    "without alt text": lambda n: n.cells[2].metadata.mystnb.update(image={"alt": " "}),
    "without a caption": lambda n: n.cells[2].metadata.mystnb.pop("figure"),
    "prints a tensor": _prints("tensor([1., 2.])"),
    "prints an error figure": _prints("largest difference 2.4e-16"),
    "more digits": _prints("0.30000000000000004"),
    "prints a warning": _prints("UserWarning: hm"),
    "prints an address": _prints("<object at 0x7f3a5c0d1e20>"),
    "prints a timing": _prints("took 3.2 ms"),
    "prints a device": _prints("on NVIDIA H200"),
    f"more than {NOTEBOOK_BYTES}": _source("word " * NOTEBOOK_BYTES, place=4),
}


def test_good_notebook_has_no_complaint():
    assert complaints(good()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault):
    notebook = good()
    FAULTS[fault](notebook)
    found = complaints(notebook)
    assert any(fault in line for line in found), found


def test_check_behind_a_branch_may_be_constant():
    notebook = good()
    source = "try:\n    f()\nexcept ValueError:\n    holds('refused', True)"
    _source(source)(notebook)
    assert complaints(notebook) == []


@pytest.mark.parametrize("text", ["eq-a-b: holds (below 1e-12)", "0.125 of 4096 words", "512 keys"])
def test_stable_output_is_not_a_fault(text):
    notebook = good()
    _prints(text)(notebook)
    assert complaints(notebook) == []


def test_record_may_be_quoted():
    notebook = good()
    _prints("512 TFLOP/s on NVIDIA H200", source="print(record.cell())")(notebook)
    assert complaints(notebook) == []


def test_retyped_code_is_found():
    kernels, bodies = library_functions()
    assert kernels, "the library has no kernel to compare with"
    file = ROOT / "flashlib/reference/gradients.py"
    copied = next(f for f in _functions(ast.parse(file.read_text())) if _body(f))
    copied.name = "mine"
    own = new_notebook(
        cells=[
            new_code_cell(f"@triton.jit\ndef {min(kernels)}(x):\n    pass"),
            new_code_cell(ast.unparse(copied)),
        ]
    )
    assert len(retyped_complaints(own, kernels, bodies)) == 2
    other = new_notebook(cells=[new_code_cell("@triton.jit\ndef add_kernel(x):\n    pass")])
    assert retyped_complaints(other, kernels, bodies) == []


CHAPTER = """# A chapter

What is it? At the end you will have a kernel. Needs any CPU. About 20 minutes.

## A step

:::{admonition} Takeaway
It takes 2 passes.
:::

```{exercise}
:label: ex-a-one
Do.
```

```{solution} ex-a-one
:label: sol-a-one
:class: dropdown
Done.
```

## Sources

{cite:t}`dao2022`
"""


@pytest.mark.parametrize(
    "old, new, fault",
    [
        ("", "", None),
        ("What is it?", "It is.", "question"),
        ("At the end you will have", "Here is", "will have"),
        ("Needs any", "Any", "needs"),
        ("20 minutes", "so", "how long"),
        ("Takeaway", "Note", "takeaway box"),
        ("takes 2 passes", "takes passes", "no number"),
        ("{exercise}", "{note}", "no exercise"),
        ("{solution} ex-a-one", "{solution} ex-a-two", "no solution"),
        (":class: dropdown\n", "", "not folded"),
        ("{cite:t}`dao2022`", "A paper.", "Sources"),
    ],
)
def test_missing_part_is_found(old, new, fault):
    found = chapter_complaints(
        new_notebook(cells=[new_markdown_cell(CHAPTER.replace(old, new) if old else CHAPTER)])
    )
    assert found == [] if fault is None else len(found) == 1 and fault in found[0], found
