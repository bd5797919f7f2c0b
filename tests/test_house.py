"""The rules of CONTRIBUTING.md that a program can check: who imports whom, what a kernel file looks like,
what prose never says.
"""

import ast
import functools
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest
from cases import run_python

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "flashlib"
MODULES = sorted(LIBRARY.rglob("*.py"))
KERNEL_FILES = sorted((LIBRARY / "kernels").rglob("*.py"))


def relative(path):
    return str(path.relative_to(ROOT))


def dotted(path):
    """flashlib/kernels/tiles.py -> flashlib.kernels.tiles, flashlib/kernels/__init__.py ->
    flashlib.kernels.
    """
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def tree(path):
    return ast.parse(path.read_text(), filename=str(path))


NAMES = {dotted(path) for path in MODULES}


def imports(path):
    """What a module imports: ``{(name, at the top)}``, where flashlib names are modules and others
    top-level packages.
    """
    package = dotted(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = set()

    def visit(node, top):
        for child in ast.iter_child_nodes(node):
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = (
                    ".".join([*package[: len(package) - child.level + 1], child.module or ""]).rstrip(".")
                    if child.level
                    else child.module
                )
                whole = [f"{base}.{alias.name}" for alias in child.names]
                names = [name if name in NAMES else base for name in whole]
            for name in names:
                found.add((name if name.split(".")[0] == "flashlib" else name.split(".")[0], top))
            visit(child, top and not inside)

    visit(tree(path), True)
    return found


# ------------------------------------------------------------------------------------ imports

STANDARD_LIBRARY = set(__import__("sys").stdlib_module_names)
# The order in which the book takes its steps: a reference may build on the steps before it.
STEPS = [
    "standard", "gradients", "machine", "bottleneck", "blocks", "online", "flash1", "flash2", "backward",
    "projections", "masks", "decoding", "hopper",
]  # fmt: skip


def allowed(path):
    """Names that a module of flashlib may import anywhere, and at its top; prefixes end in a dot."""
    name = dotted(path)
    if name == "flashlib":
        return set()
    if name in ("flashlib.api", "flashlib.layers"):
        inside = {"flashlib.kernels", "flashlib.kernels.", "flashlib.reference."}
        doors = {"flashlib.api", "flashlib.checks", "flashlib.decoding", "flashlib.masked"}
        return {"torch", *doors, *(("inside", x) for x in inside)}
    if name in ("flashlib.decoding", "flashlib.masked"):
        return {"torch", "flashlib.checks", ("inside", "flashlib.kernels.")}
    if name == "flashlib.kvcache":
        return {"torch", "flashlib.checks"}
    if name == "flashlib.checks":
        return {"torch"}
    if name == "flashlib.__main__":
        return {"torch", "flashlib", ("inside", "flashlib.kernels")}
    if name == "flashlib.huggingface":
        return {"torch", "flashlib.api", "flashlib.checks", ("inside", "transformers")}
    if name == "flashlib.exercise":
        return {"torch", ("inside", "flashlib.kernels"), ("inside", "triton")}
    if name == "flashlib.kernels":
        return {"torch", "triton"}
    if name in ("flashlib.kernels.tiles", "flashlib.kernels.scores"):
        return {"torch", "triton"}
    if name == "flashlib.kernels.launch":
        return {"torch", "triton", "flashlib.kernels"}
    if name == "flashlib.kernels.copies":
        return {"torch", "triton", "flashlib.kernels", "flashlib.kernels.launch"}
    if name.startswith("flashlib.kernels."):
        # The statistics that a backward pass begins with are made in one place.
        backward = {"flashlib.kernels.backward"} if name.endswith(".hopper_backward") else set()
        return backward | {
            "torch",
            "triton",
            "flashlib.kernels",
            "flashlib.kernels.copies",
            "flashlib.kernels.launch",
            "flashlib.kernels.scores",
            "flashlib.kernels.tiles",
        }
    if name == "flashlib.reference":
        return set()
    if name.startswith("flashlib.reference."):
        earlier = STEPS[: STEPS.index(name.split(".")[2])]
        return {"torch", *(f"flashlib.reference.{step}" for step in earlier)}
    if name.startswith("flashlib.iomodel"):
        return {"numpy", "flashlib.iomodel."}
    if name.startswith("flashlib.machine"):
        return {"flashlib.machine."}
    if name in ("flashlib.testing", "flashlib.notebook"):
        return {"torch", "numpy", "IPython", "flashlib.reference", "flashlib.reference."}
    if name.startswith("flashlib.stepper"):
        return {"flashlib.stepper", "flashlib.stepper."}
    if name == "flashlib.plot":
        return {"numpy", "matplotlib"}
    if name == "flashlib.records":
        return set()
    raise AssertionError(
        f"{relative(path)}: no rule says what it may import; give it one here and in CONTRIBUTING.md"
    )


def permitted(name, top, rules):
    for rule in rules:
        only_inside = isinstance(rule, tuple)
        rule = rule[1] if only_inside else rule
        if (name == rule or (rule.endswith(".") and name.startswith(rule))) and not (only_inside and top):
            return True
    return False


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_imports_only_what_its_room_allows(path):
    rules = allowed(path)
    wrong = [
        name
        for name, top in imports(path)
        if name not in STANDARD_LIBRARY and not permitted(name, top, rules)
    ]
    assert not wrong, f"{relative(path)} must not import {sorted(wrong)}"


def test_the_rules_can_fail():
    """The two rules that matter most, on sources that break them."""
    api = allowed(LIBRARY / "api.py")
    assert permitted("flashlib.kernels.flash2", False, api) and not permitted(
        "flashlib.kernels.flash2", True, api
    )
    flash2 = allowed(LIBRARY / "kernels" / "flash2.py")
    assert not permitted("flashlib.kernels.standard", True, flash2) and not permitted(
        "flashlib.reference.standard", False, flash2
    )
    assert not permitted("flashlib.reference.gradients", True, allowed(LIBRARY / "reference" / "standard.py"))
    assert ("flashlib.kernels.tiles", True) in imports(LIBRARY / "kernels" / "flash2.py")
    assert ("flashlib.kernels.flash2", False) in imports(LIBRARY / "api.py")


def cold(module):
    """Which of the heavy packages a fresh Python has loaded after importing a module."""
    heavy = ("torch", "triton", "numpy", "matplotlib", "IPython", "flashlib.kernels")
    done = run_python(f"import sys, {module}\nprint(*(name for name in {heavy} if name in sys.modules))")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


COLD = {
    "flashlib": set(),
    "flashlib.machine": set(),
    "flashlib.records": set(),
    "flashlib.iomodel": {"numpy"},
    "flashlib.plot": {"numpy", "matplotlib"},
    "flashlib.reference.gradients": {"torch", "numpy"},
    "flashlib.testing": {"torch", "numpy"},
    "flashlib.notebook": {"torch", "numpy"},
    "flashlib.api": {"torch", "numpy"},
    "flashlib.layers": {"torch", "numpy"},
    "flashlib.kvcache": {"torch", "numpy"},
}


@pytest.mark.parametrize("module", [name for name in COLD if name in NAMES])
def test_a_cold_import_loads_no_more_than_its_room_needs(module):
    assert cold(module) <= COLD[module]


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_nothing_in_the_library_imports_tests_book_or_benchmarks(path):
    assert not {name for name, _ in imports(path)} & {
        "tests",
        "book",
        "benchmarks",
        "exercises",
        "cases",
        "conftest",
    }


# ------------------------------------------------------------------------------------ code


def public_functions(path):
    """Public functions and classes of a module, and methods of public classes; a property is named by
    what it gives.
    """
    for parent in [
        tree(path),
        *(n for n in tree(path).body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")),
    ]:
        for node in parent.body:
            is_property = "property" in [ast.unparse(x) for x in getattr(node, "decorator_list", ())]
            if (
                isinstance(node, (ast.FunctionDef, ast.ClassDef))
                and not node.name.startswith("_")
                and not is_property
            ):
                yield node


def is_jit(node):
    return any("jit" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))


def raised(node):
    """Exception names that a function raises itself."""
    own = [n for child in node.body for n in ast.walk(child)]
    nested = {
        n
        for child in own
        if isinstance(child, (ast.FunctionDef, ast.Lambda))
        for n in ast.walk(child)
        if n is not child
    }
    found = set()
    for n in own:
        if isinstance(n, ast.Raise) and n.exc is not None and n not in nested:
            call = n.exc.func if isinstance(n.exc, ast.Call) else n.exc
            found.add(ast.unparse(call).split(".")[-1])
    return found


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_public_names_have_docstrings_that_tell_what_is_raised(path):
    assert ast.get_docstring(tree(path)) or not tree(path).body, f"{relative(path)}: no module docstring"
    for node in public_functions(path):
        text = ast.get_docstring(node)
        assert text, f"{relative(path)}:{node.lineno}: {node.name} has no docstring"
        if isinstance(node, ast.FunctionDef):
            for error in raised(node):
                assert error in text, (
                    f"{relative(path)}:{node.lineno}: the docstring of {node.name} does not name {error}"
                )


SHAPES = re.compile(r"\[[^\]]*\b(?:T|T_q|T_k|M|N)\b[^\]]*\]|\bshapes? of\b")


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if p.parent.name in ("kernels", "steps", "reference") and p.stem in STEPS],
    ids=relative,
)
def test_functions_that_make_tensors_say_their_shapes(path):
    for node in public_functions(path):
        makes = (
            "torch.empty" in ast.unparse(node)
            or "_kernel[" in ast.unparse(node)
            or path.parent.name == "reference"
        )
        if (
            isinstance(node, ast.FunctionDef)
            and not is_jit(node)
            and makes
            and node.name not in ("default_scale", "launch")
        ):
            text = ast.get_docstring(node)
            assert SHAPES.search(text), f"{relative(path)}:{node.lineno}: {node.name} says no shapes"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_the_library_neither_prints_nor_swallows(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type is not None and ast.unparse(node.type) not in ("Exception", "BaseException")
            assert caught, f"{relative(path)}:{node.lineno}: a bare except"
            assert not all(isinstance(x, ast.Pass) for x in node.body), (
                f"{relative(path)}:{node.lineno}: an error is swallowed"
            )
        prints = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        speaks = path.name in ("notebook.py", "__main__.py")
        assert speaks or not prints, f"{relative(path)}:{node.lineno}: print"


# ------------------------------------------------------------------------------------ kernels


def jit_functions():
    return [
        (path, node)
        for path in KERNEL_FILES
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef) and is_jit(node)
    ]


JIT = [pytest.param(path, node, id=f"{path.stem}.{node.name}") for path, node in jit_functions()]
# What makes a tile, whichever way it is called, and what makes one out of tiles; gl is Gluon's tl.
TILE_MAKERS = re.compile(
    r"\b([tg]l\.(arange|zeros|full|dot|load|where|exp2?|maximum)|warpgroup_mma|load_tile|visible|pointers)\("
    r"|\.reshape\(|\[(:, None|None, :)\]"
)


@pytest.mark.parametrize("path, node", JIT)
def test_every_tile_has_a_shape_comment(path, node):
    """An assignment in a jit function that makes a tile has a comment ``# [rows, columns]``; a scalar
    needs none.
    """
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string
    scalars = scalar_names(node)
    for statement in ast.walk(node):
        if not isinstance(statement, (ast.Assign, ast.AugAssign)):
            continue
        source = ast.unparse(statement.value)
        target = ast.unparse(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target)
        if TILE_MAKERS.search(source) and target not in scalars and "," not in target:
            comment = " ".join(
                comments.get(line, "") for line in range(statement.lineno, statement.end_lineno + 1)
            )
            assert re.search(r"\[\w+(, \w+)*\]", comment), (
                f"{relative(path)}:{statement.lineno}: {target} has no shape"
            )


def scalar_names(node):
    """Names in a jit function that are computed from program ids, sizes, loop counters and other scalars
    alone, or reduce a whole row.
    """
    makers = re.compile(
        r"\b[tg]l\.(arange|zeros|full|dot)\(|warpgroup_mma\(|load_tile\(|visible\(|pointers\("
    )
    scalars = {a.arg for a in node.args.args} | {"tl", "gl", "float", "range"}
    scalars |= {loop.target.id for loop in ast.walk(node) if isinstance(loop, ast.For)}
    scalars |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and x.id.isupper()}  # constants
    scalars |= {x.target.id for x in ast.walk(node) if isinstance(x, ast.AnnAssign)}  # x: gl.constexpr = ...
    assigned = {}
    for statement in ast.walk(node):
        if isinstance(statement, ast.Assign):
            for name in ast.walk(statement.targets[0]):
                if isinstance(name, ast.Name):
                    assigned.setdefault(name.id, []).append(statement.value)
    tiles = {
        name
        for name, values in assigned.items()
        if any(makers.search(ast.unparse(value)) for value in values)
    }
    while True:
        new = set()
        for name, values in assigned.items():
            for value in values:
                used = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} - {name}
                if not (re.fullmatch(r"[tg]l\.(max|sum)\(\w+, 0\)", ast.unparse(value)) or used <= scalars):
                    break
            else:
                new.add(name)
        new -= scalars | tiles
        if not new:
            return scalars
        scalars |= new


@pytest.mark.parametrize("path, node", JIT)
def test_a_jit_function_takes_every_stride_that_it_uses(path, node):
    """A tensor that a launcher did not allocate comes with its strides: ``x`` beside ``x_strides``."""
    arguments = {a.arg for a in node.args.args}
    strided = {name.removesuffix("_strides") for name in arguments if name.endswith("_strides")}
    assert strided <= arguments
    used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    unused = {a for a in arguments if a not in used}
    assert not unused, f"{relative(path)}: {node.name} takes {sorted(unused)} and does not use them"


KERNELS = [
    pytest.param(path, node, id=f"{path.parent.name}.{path.stem}.{node.name}")
    for path, node in jit_functions()
    if node.name.endswith("_kernel")
]


@pytest.mark.parametrize("path, node", KERNELS)
def test_a_textbook_kernel_fits_in_a_head(path, node):
    """A kernel together with the pieces of its file that it calls; those of tiles.py stand on their own."""
    # What a compiler does elsewhere stands there in the kernel: copies, barriers, layouts, who does what.
    limit = 200 if path.stem.startswith("hopper") else 100
    beside = {other.name: other for file, other in jit_functions() if file == path}
    held, waiting = {}, [node]
    while waiting:
        function = waiting.pop()
        held[function.name] = function.end_lineno - function.lineno + 1
        called = {
            n.func.id for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        waiting += [beside[name] for name in called & set(beside) - set(held)]
    assert sum(held.values()) <= limit, f"{relative(path)}: {held} lines of jit code"


# ------------------------------------------------------------------------------------ steps


@pytest.mark.parametrize(
    "path",
    [p for p in KERNEL_FILES if p.stem not in ("__init__", "copies", "launch", "scores", "tiles", "trace")],
    ids=relative,
)
def test_a_step_has_its_word_in_every_room(path):
    """The tiled kernels compute what the references `standard` and `gradients` say, in other orders. Variants
    in steps/ lead to the kernel of the same name; the two passes of hopper have a file each.
    """
    step = path.stem.removesuffix("_backward")
    assert step in STEPS
    assert (LIBRARY / "kernels" / f"{step}.py").exists()
    assert (ROOT / "tests" / f"test_{step}.py").exists()
    assert (ROOT / "book" / f"{step}.ipynb").exists()
    if step not in ("flash1", "flash2", "backward", "hopper"):
        assert (LIBRARY / "reference" / f"{step}.py").exists()
    assert re.search(rf"^{step}\s", ast.get_docstring(tree(LIBRARY / "__init__.py")), re.M), (
        f"{step} is not in flashlib's table of steps"
    )


def test_a_reference_has_a_chapter():
    for path in sorted((LIBRARY / "reference").glob("*.py")):
        if path.stem != "__init__":
            assert (ROOT / "book" / f"{path.stem}.ipynb").exists(), relative(path)


# ------------------------------------------------------------------------------------ text


@functools.cache
def project_texts():
    """Every text file of the project that git does not ignore: ``{path: text}``."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    found = {}
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__):
            data = path.read_bytes()
            if b"\0" not in data[:8000]:
                # The letters of an encoded picture say nothing.
                found[name] = re.sub(r'"image/png": "[^"]*"', '"image/png": ""', data.decode("utf-8"))
    return found


FORBIDDEN = {
    # A path of one machine; a URL may have such a part.
    "a machine's path": r"(?<![\w.:/-])/(?:home|Users|root|work|mnt|data)/\w",
    "a package registry": r"(?i)\bhttps?://[^\s\"')]*\b(?:pypi\.org|pythonhosted\.org|anaconda\.org|index-url)",
    "an unfinished thought": r"\b(?:TODO|FIXME|XXX)\b",
}


ALLOWED_TEXT = {
    ("tests/test_book.py", "a machine's path"): "what its own search for such paths must find",
}


@pytest.mark.parametrize("what, pattern", FORBIDDEN.items(), ids=FORBIDDEN.keys())
def test_no_file_contains(what, pattern):
    found = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in project_texts().items()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line) and (name, what) not in ALLOWED_TEXT
    ]
    assert not found, f"{what}:\n" + "\n".join(found)


def test_nobody_is_told_to_install_the_foreign_package():
    found = []
    for name, text in project_texts().items():
        for match in re.finditer(r"pip3? +install +[^\n`\"']*\bflashlib\b", text):
            before = text[max(0, match.start() - 120) : match.start()]
            if not re.search(r"(?i)\b(never|not|don't)\b", before):
                found.append(f"{name}: {match.group(0)}")
    assert not found, found


# A number of one's own choice, where a budget computed from the oracle belongs.
HAND_PICKED = re.compile(r"\b(rtol|atol|tolerance)\s*=\s*[\d.]|\b(allclose|assert_close|isclose|approx)\s*\(")
ALLOWED_TOLERANCES = {
    "tests/test_plot.py": "compares colours and pixels, not results",
    "tests/test_records.py": "compares rates with times of a record, both rounded when it was written",
    "tests/test_benchmarks.py": "compares rates with times",
    "tests/test_iomodel.py": "compares float64 with float64, and exponents of fitted power laws",
}


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=relative)
def test_no_test_has_a_hand_picked_tolerance(path):
    if path == Path(__file__) or relative(path) in ALLOWED_TOLERANCES:
        return
    lines = path.read_text().splitlines()
    found = [
        f"{relative(path)}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if HAND_PICKED.search(line)
    ]
    assert not found, "\n".join(found)
