"""Every committed notebook has the form of a chapter and shows figures of today's code.

`make nbval` compares what cells print. The tests at the end give the judges bad ones.
"""

import ast
import functools
import json
import math
import re
import shutil
import subprocess
import sys

import built
import nbformat
import notebooks
import pytest
import torch
from built import ROOT, none, source_file
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from processes import process_environment, run

NOTEBOOKS = {page: source_file(page) for page in built.NOTEBOOKS}
# These have the parts that a chapter must have.
OTHERS = re.compile("index|api|errata|depth/.*")
CHAPTERS = {p: file for p, file in NOTEBOOKS.items() if not OTHERS.fullmatch(p)}

OUTPUT_BYTES = 300_000
NOTEBOOK_BYTES = 1_500_000
# Three lines with a gap of two spaces are a table, which a phone would cut.
GAP, TABLE_LINES = r"^.*\S {2,}\S.*$", 3

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS.values(), ids=NOTEBOOKS)
each_chapter = pytest.mark.parametrize("path", CHAPTERS.values(), ids=CHAPTERS)


def read(path):
    return nbformat.read(path, as_version=4)


@each_notebook
def test_figures_were_drawn_after_their_cells_changed(path):
    notebook = read(path)
    cure = f"a figure is older than its cell: make execute NB={path.relative_to(ROOT)}"
    assert notebook.metadata.flashlib.figures == notebooks.figures(notebook), cure
    if any(map(notebooks.is_gpu, notebook.cells)):
        assert all(notebook.metadata.flashlib[key] for key in notebooks.machine())


# -- Form


def calls(tree, names):
    """The calls of `check(...)`, `notebook.check(...)` and so on in a syntax tree."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [c for c in found if ast.unparse(c.func).rpartition(".")[2] in names]


def frame_complaints(notebook):
    """What is wrong with a notebook's metadata, ids and counts."""
    lines = []
    ids = [cell.get("id") for cell in notebook.cells]
    if None in ids or len(set(ids)) != len(ids):
        lines.append("cells without an id, or with the same one")
    copy = nbformat.from_dict(json.loads(json.dumps(notebook)))
    notebooks.normalize(copy)
    if copy != notebook:
        lines.append("not normalized: run `make execute`")
    code = notebooks.code_cells(notebook)
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        lines.append("execution counts are not 1, 2, 3 ...: run `make execute`")
    gpu = sum(map(notebooks.is_gpu, code))
    if 4 * gpu > len(code):
        lines.append(f"{gpu} of {len(code)} code cells are tagged gpu, over a quarter")
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
    checks = calls(tree, {"check", "at_most", "holds"})
    if "gpu" in tags and checks:
        lines.append("is tagged gpu and holds a check, which a CPU would never run")
    if ("gpu" in tags) != ("nbval-ignore-output" in tags):
        lines.append("has only one of the tags gpu and nbval-ignore-output")
    hidden = {"nbval-skip", "raises-exception", "skip-execution"}
    if tags & hidden or "NBVAL" in cell.source:
        lines.append("is kept from nbval")
    at_top = {id(node.value) for node in tree.body if isinstance(node, ast.Expr)}
    for call in checks:
        # Inside a function or a try, reaching the call is what is tested.
        lines += check_complaints(call, reached_always=id(call) in at_top)
    for output in cell.outputs:
        lines += output_complaints(cell, output)
    return lines


def check_complaints(call, reached_always):
    """What makes one check(...), at_most(...) or holds(...) unable to fail."""
    name = ast.unparse(call.func).rpartition(".")[2]
    sides = call.args[1:]
    lines = []
    if len(sides) != (1 if name == "holds" else 2):
        lines.append(f"`{ast.unparse(call)}`: pass label and sides by position")
    if len({ast.dump(side) for side in sides}) < len(sides):
        lines.append(f"`{ast.unparse(call)}` compares an expression with itself")
    constant = sides and all(isinstance(side, ast.Constant) for side in sides)
    if reached_always and constant:
        lines.append(f"`{ast.unparse(call)}` states a constant")
    return lines


# What differs between machines. A figure after "below" is a bound, not a measurement.
UNSTABLE = {
    "a tensor": r"\btensor\(|\bParameter containing|\bdevice\(|\bdevice='",
    "an error figure": r"(?<!below )\b\d+(?:\.\d+)?e-\d+\b",
    "a number with more digits than all machines agree on": r"\d\.\d{7,}",
    "a warning": r"Warning\b|\bwarn\(",
    "an address in memory": r"\b0x[0-9a-f]{6,}\b",
}
# Only a cell that prints from a committed record may name these.
MEASURED = {
    "a timing": r"\d\s?(?:ns|us|µs|ms|s|seconds|TFLOP/s|[GT]B/s)\b",
    "a device": r"\b(?:cuda(?::\d+)?|NVIDIA|H[12]00|A100|GeForce|Tesla|interpreter)\b",
}
KINDS = {"text/plain", "text/markdown", "text/html", *notebooks.FIGURES}


def output_complaints(cell, output):
    """What is wrong with one output of a code cell."""
    if output.output_type == "error":
        return [f"failed with {output.ename}"]
    lines = []
    if output.get("name") == "stderr":
        lines.append(f"writes to stderr: {output.text[:80]!r}")
    if len(re.findall(GAP, output.get("text", ""), re.M)) >= TABLE_LINES:
        lines.append("prints a table, expected notebook.table")
    size = len(json.dumps(output))
    if size > OUTPUT_BYTES:
        lines.append(f"has an output of {size} bytes, more than {OUTPUT_BYTES}")
    data = output.get("data", {})
    lines += [f"has an output of kind {kind}" for kind in data.keys() - KINDS]
    # The stepper's figures hold data in a script element that nothing executes.
    html = data.get("text/html", "").replace('<script type="application/json">', "")
    if re.search(r"<script|<iframe|https?://[^\s\"')]+\.(?:js|css)", html):
        lines.append("has an HTML output with a script")
    if "nbval-ignore-output" in cell.metadata.get("tags", []):
        return lines
    if "text/markdown" in data and "show(" in cell.source:
        return lines  # the library's source may speak of devices
    text = [text for kind, text in data.items() if kind.startswith("text/")]
    text = "\n".join([output.get("text", ""), *text])
    patterns = UNSTABLE if "record" in cell.source else {**UNSTABLE, **MEASURED}
    for name, pattern in patterns.items():
        if found := re.search(pattern, text):
            lines.append(f"prints {name}: {found.group()!r}")
    return lines


def functions(source):
    tree = ast.parse(source)
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def is_kernel(function):
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def body(function):
    """A function's code without name, docstring and decorators; None if very short."""
    lines = function.body[ast.get_docstring(function) is not None :]
    return ast.dump(ast.Module(lines, [])) if len(lines) >= 3 else None


@functools.cache
def library_code():
    """The names of the library's kernels, and the bodies of its functions."""
    files = (ROOT / "flashlib").rglob("*.py")
    found = [node for file in files for node in functions(file.read_text())]
    return {f.name for f in found if is_kernel(f)} | {body(f) for f in found} - {None}


def retyped_complaints(notebook):
    """The functions that a notebook defines although the library has them."""
    return [
        f"cell {cell.id} retypes the library's {f.name}: use show()"
        for cell in notebooks.code_cells(notebook)
        for f in functions(cell.source)
        if library_code() & {is_kernel(f) and f.name, body(f)}
    ]


def complaints(notebook):
    """Everything that is wrong with the form of a notebook, one line each."""
    cells = notebook.cells
    lines = [f"cell {c.id} {line}" for c in cells for line in cell_complaints(c)]
    lines += frame_complaints(notebook)
    size = len(json.dumps(notebook, indent=1, ensure_ascii=False))
    if size > NOTEBOOK_BYTES:
        lines.append(f"{size} bytes, more than {NOTEBOOK_BYTES}")
    return lines


OPENING = {
    "what question it answers": r"\?|[Qq]uestion",
    "what the reader will have": r"[Yy]ou will have|[Aa]t the end",
    "what it needs": r"[Nn]eeds?\b",
}
TAKEAWAY = r"^(:{3,}|`{3,})\{\w+\} [^\n]*[Tt]ake-?away[^\n]*\n(.*?)^\1$"


def chapter_complaints(notebook):
    """The fixed parts that a chapter lacks."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    prose = "\n\n".join(cell.source for cell in cells)
    opening = prose.split("\n## ")[0]
    lacks = [part for part, said in OPENING.items() if not re.search(said, opening)]
    lines = [f"its opening does not say {part}" for part in lacks]
    boxes = re.findall(TAKEAWAY, prose, re.M | re.S)
    if not any(re.search(r"\d", text) for _, text in boxes):
        lines.append("it has no takeaway box with a number")
    if not re.search(r"\{exercise(?:-start)?\}", prose):
        lines.append("it has no exercise")
    sources = re.split(r"^## Sources\b", prose, flags=re.M)
    if len(sources) != 2 or "{cite" not in sources[-1]:
        lines.append("it does not end in a section Sources with citations")
    return lines


@each_notebook
def test_form(path):
    notebook = read(path)
    lines = complaints(notebook) + retyped_complaints(notebook)
    none(lines)
    assert not notebooks.set_up(notebook), "run: python book/_tools/notebooks.py setup"


@each_chapter
def test_parts_of_a_chapter(path):
    none(chapter_complaints(read(path)))


@pytest.mark.parametrize("page", [p for p in NOTEBOOKS if p.startswith("depth/")])
def test_chapter_and_depth_page_link_to_each_other(page):
    step = page.removeprefix("depth/")
    assert f"](../{step}.ipynb" in read(NOTEBOOKS[page]).cells[0].source
    chapter = "".join(cell.source for cell in read(NOTEBOOKS[step]).cells)
    assert re.search(rf"\]\(({page}\.ipynb|{step}-depth-)", chapter)


ROW = r"^\| \[(\d+)\]\((errata-[\w-]+)\) \|"
ENTRY = r"\((errata-[\w-]+)\)=\n### (\d+)\. "


def test_every_erratum_has_a_row_in_the_table_and_a_check():
    table = "\n".join(cell.source for cell in read(NOTEBOOKS["errata"]).cells)
    rows = [(label, number) for number, label in re.findall(ROW, table, re.M)]
    cells = read(NOTEBOOKS["depth/errata"]).cells
    found = [(re.search(ENTRY, cell.source), n) for n, cell in enumerate(cells)]
    places = {entry.groups(): n for entry, n in found if entry}
    assert rows and rows == list(places)
    numbers = map(int, re.findall(r"^\| \[?(\d+)\b", table, re.M))
    assert list(numbers) == list(range(1, len(rows) + table.count("cannot be run") + 1))
    outputs = {entry: cells[n + 1].get("outputs") for entry, n in places.items()}
    unchecked = [e for e, out in outputs.items() if "holds" not in out[0].text]
    assert unchecked == []


# -- A downloaded notebook runs alone


# Each chapter in a process of its own, which begins with what all of them import.
RUN_ALONE = """
import json, os, sys
import matplotlib.pyplot, torch
import flashlib.kernels, flashlib.notebook, flashlib.plot
from IPython.core.interactiveshell import InteractiveShell

assert flashlib.__file__.startswith(os.environ["PYTHONPATH"])
for path in sys.argv[1:]:
    child = os.fork()
    if not child:
        shell = InteractiveShell.instance()
        for cell in json.load(open(path))["cells"]:
            if cell["cell_type"] == "code":
                shell.run_cell("".join(cell["source"])).raise_error()
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{path} failed")
"""


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_downloaded_notebooks_run_alone(half, tmp_path):
    """With the library and nothing else of this checkout."""
    (tmp_path / "work").mkdir()
    shutil.copytree(ROOT / "flashlib", tmp_path / "flashlib")
    environment = process_environment(PYTHONPATH=str(tmp_path))
    command = [sys.executable, "-c", RUN_ALONE, *list(CHAPTERS.values())[half::2]]
    ended = run(command, cwd=tmp_path / "work", env=environment)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


# -- The tool

GPU_TAGS = {"tags": ["gpu", "nbval-ignore-output"]}
GPU = {"gpu": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "date": "2026-11-20"}
CPU = {"gpu": None, "torch": "2.13", "triton": "3.7", "date": "2026-11-21"}
DRAW = "from IPython.display import SVG\nSVG('<svg xmlns=\"s\"><!--{}--></svg>')"


@pytest.fixture
def write(tmp_path):
    """A function that writes code cells into a notebook and returns its path."""

    def write(*sources, tags=()):
        cells = [new_code_cell(source, id=f"c{n}") for n, source in enumerate(sources)]
        for place in tags:
            cells[place].metadata = GPU_TAGS
        nbformat.write(new_notebook(cells=cells), tmp_path / "one.ipynb")
        return tmp_path / "one.ipynb"

    return write


def test_cpu_run_keeps_what_a_gpu_wrote(write):
    path = write("print('gpu')", DRAW.format(1), DRAW.format(2), tags=[0, 2])
    notebooks.execute(path, GPU)
    notebook = read(path)
    assert notebook.metadata.flashlib == {"figures": notebooks.figures(notebook), **GPU}
    for n, source in enumerate(["print('cpu')", DRAW.format(3), DRAW.format(4)], 1):
        notebook.cells[n].source = source
    nbformat.write(notebook, path)
    notebooks.execute(path, CPU)
    after = read(path)
    assert after.cells[1].outputs[0].text == "gpu\n"
    assert after.metadata.flashlib.gpu == "NVIDIA H200"
    drawn, now = after.metadata.flashlib.figures, notebooks.figures(after)
    assert drawn["c1"] == now["c1"]
    assert drawn["c2"] != now["c2"], "this figure waits for a GPU"


def test_output_in_pieces_is_joined_and_a_failure_leaves_the_file_alone(write):
    pieces = "for i in range(3): print(i); sys.stdout.flush(); time.sleep(0.1)"
    path = write(f"import sys, time\n{pieces}")
    notebooks.execute(path, CPU)
    assert [cell.id for cell in read(path).cells] == [notebooks.SETUP_ID, "c0"]
    assert len(read(path).cells[1].outputs) == 1
    before = write("1 / 0").read_bytes()
    with pytest.raises(notebooks.RunFailed, match="ZeroDivisionError"):
        notebooks.execute(path, CPU)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "address, there", [("https://a/b", 0), ("https://a/b", 1), ("", 0)]
)
def test_setup_installs_only_where_the_library_is_missing(address, there, monkeypatch):
    ran = []

    def run(command, **options):
        assert options["check"]
        ran.append(command[1:])
        return subprocess.CompletedProcess(command, 0, stdout="GPU: one\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: there or None)
    exec(notebooks.SETUP.format(address=address), {})
    install = ["-m", "pip", "install", "--quiet", "git+https://a/b"]
    missing = address and not there
    assert ran == ([install, ["-m", "flashlib"]] if missing else [])


# -- The judges fire


def good():
    """A notebook without a complaint."""
    cells = [
        new_code_cell("check('eq-a-b', f(x), g(x))"),
        new_code_cell(
            "print(7)", outputs=printed("eq-a-b: holds (below 1e-12)\n0.125")
        ),
        new_code_cell("draw()", outputs=shown("image/svg+xml")),
        new_code_cell("print(8)", metadata=GPU_TAGS),
        new_markdown_cell("Text."),
        new_code_cell("try:\n    f()\nexcept ValueError:\n    holds('refused', True)"),
        new_code_cell("print(record.cell())", outputs=printed("512 TFLOP/s on H200")),
    ]  # fmt: skip
    for place, cell in enumerate(cells):
        cell.id = f"c{place}"
    notebook = new_notebook(cells=cells)
    for count, cell in enumerate(notebooks.code_cells(notebook), 1):
        cell.execution_count = count
    notebooks.normalize(notebook)
    return notebook


def printed(text, name="stdout"):
    return [new_output("stream", name=name, text=text)]


def shown(kind, data="AA=="):
    return [new_output("display_data", {kind: data})]


def changed(place, **values):
    """A function that changes the cell at ``place``."""
    return lambda notebook: notebook.cells[place].update(values)


def prints(text):
    return changed(1, outputs=printed(text))


FAULTS = {
    "not normalized": lambda n: n.metadata.kernelspec.update(name="venv"),
    "the same one": changed(1, id="c0"),
    "execution counts": changed(1, execution_count=9),
    "over a quarter": changed(1, metadata=nbformat.from_dict(GPU_TAGS)),
    "is empty": changed(0, source=""),
    "not plain Python": changed(0, source="%matplotlib inline"),
    "holds a check": changed(3, source="notebook.holds('eq-a-b', x > 1)"),
    "only one of the tags": lambda n: n.cells[3].metadata.update(tags=["gpu"]),
    "kept from nbval": lambda n: n.cells[0].metadata.update(tags=["nbval-skip"]),
    "with itself": changed(0, source="check('eq-a-b', f(x), f( x ))"),
    "states a constant": changed(0, source="holds('eq-a-b', True)"),
    "by position": changed(0, source="check('eq-a-b', lhs=a, rhs=b)"),
    "failed with": changed(1, outputs=[new_output("error", ename="ValueError")]),
    "stderr": changed(1, outputs=printed("hm", "stderr")),
    "has an output of": prints("7 " * OUTPUT_BYTES),
    "image/jpeg": changed(1, outputs=shown("image/jpeg")),
    "with a script": changed(1, outputs=shown("text/html", "<script>1</script>")),
    "prints a table": prints("keys  words\n   8     64\n  16    128\n"),
    "prints a tensor": prints("tensor([1., 2.])"),
    "prints an error figure": prints("largest difference 2.4e-16"),
    "more digits": prints("0.30000000000000004"),
    "prints a warning": prints("UserWarning: hm"),
    "prints an address": prints("<object at 0x7f3a5c0d1e20>"),
    "prints a timing": prints("took 3.2 ms"),
    "prints a device": prints("on NVIDIA H200"),
    f"more than {NOTEBOOK_BYTES}": changed(4, source="word " * NOTEBOOK_BYTES),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault):
    notebook = good()
    assert complaints(notebook) == []
    FAULTS[fault](notebook)
    assert any(fault in line for line in complaints(notebook))


def test_check_that_cannot_fail_is_found():
    import doubt

    x = torch.tensor([1.0, 2.0])
    doubt.check("eq-a-good", 2 * x, x + x)
    with pytest.raises(AssertionError, match=r"eq-a-wide: still holds .* 0.1 %"):
        doubt.check("eq-a-wide", 2 * x, x + x, within=0.5)
    with pytest.raises(AssertionError, match="eq-a-same: both sides are one object"):
        doubt.check("eq-a-same", x, x)


@pytest.mark.parametrize(
    ("sizes", "formula", "missed"),
    [
        ("(1, 2, 3)", "2 * n + 1", None),
        ("(1, 2, 3)", "max(2 * n + 1, 4 * n - 6)", "max(2 * n + 1, 4 * n - 12)"),
        ("(1, 2, 9)", "math.ceil(2 * n) + 1", "math.floor(2 * n) + 1"),
        ("(0,)", "2 * n + 1", "4 * n + 1"),
        ("(0,)", "2 * n + 1", "0 + 1"),
    ],
)
def test_mistake_in_a_formula_is_found(sizes, formula, missed):
    doubts(
        f"for n in {sizes}:\n    rhs = {formula}\n    check('eq-a', n + n + 1, rhs)",
        missed,
    )


@pytest.mark.parametrize(
    ("slack", "bound", "missed"),
    [
        (2, "2 * n + 1", None),
        (3, "2 * n + 1", "4 * n + 1"),
        (2, "2 * n + 1e-9", None),  # its second term moves it by less than a tenth
    ],
)
def test_mistake_in_a_bound_is_found(slack, bound, missed):
    doubts(f"n = 9\nat_most('eq-a', 18, {bound}, slack={slack})", missed)


def doubts(source, missed):
    """Run a cell under doubt, which must say that this mistake was not noticed."""
    import doubt

    tree = doubt.Doubting().visit(ast.parse(source))
    names = {"check": doubt.check, "at_most": doubt.at_most, "math": math}
    if missed is None:
        exec(compile(tree, "cell", "exec"), names)
        return
    with pytest.raises(AssertionError, match="eq-a: still holds with ") as error:
        exec(compile(tree, "cell", "exec"), names)
    assert missed in str(error.value)


def test_retyped_code_is_found():
    kernel = "@triton.jit\ndef scores_kernel(x):\n    pass"
    source = (ROOT / "flashlib/reference/gradients.py").read_text()
    copied = next(f for f in functions(source) if body(f))
    copied.name = "mine"
    own = "@triton.jit\ndef add_kernel(x):\n    pass"
    cells = [new_code_cell(text) for text in (kernel, ast.unparse(copied), own)]
    assert len(retyped_complaints(new_notebook(cells=cells))) == 2


CHAPTER = """# A chapter

What is it? At the end you will have a kernel. Needs any CPU.

:::{admonition} Takeaway
It takes 2 passes.
:::

```{exercise}
:label: ex-a-one
Do.
```

## Sources

{cite:t}`dao2022`
"""


@pytest.mark.parametrize(
    "old, new, fault",
    [
        ("What is it?", "It is.", "question"),
        ("At the end you will have", "Here is", "will have"),
        ("Needs any", "Any", "needs"),
        ("takes 2 passes", "takes passes", "takeaway box"),
        ("{exercise}", "{note}", "no exercise"),
        ("{cite:t}`dao2022`", "A paper.", "Sources"),
    ],
)
def test_missing_part_is_found(old, new, fault):
    for text, count in ((CHAPTER, 0), (CHAPTER.replace(old, new), 1)):
        found = chapter_complaints(new_notebook(cells=[new_markdown_cell(text)]))
        assert len(found) == count and all(fault in line for line in found)
