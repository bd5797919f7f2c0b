"""Triton decides what a kernel is, before the interpreter runs it."""

import pytest
import torch

from exercises.grader import frontend, rules, worker

# isort: split
from flashlib import kernels  # noqa: F401 (chooses the interpreter)


@pytest.fixture(scope="module")
def front():
    return worker.front_end({}, 10.0)


def launch(front, source, *arguments, **constants):
    """Run the kernel called ``kernel`` of a cell in one program."""
    cells, forbidden = [("<kernel>", source)], rules.SOFTMAX
    found = frontend.Cells(cells, {}, (), forbidden)
    made = frontend.checked(front, found)
    made["kernel"][(1,)](*arguments, **constants)


HONEST = """
import torch
from triton import jit
import triton.language as l
SIZE = tl.constexpr(8)
LOG2E = tl.constexpr(math.log2(math.e))
rows, columns = print, 3

@jit
def combine(a, b):
    \"\"\"Two texts
    a docstring\"\"\"
    return l.maximum(a, b)

@triton.autotune(configs=[triton.Config({"N": 4}, num_warps=2)], key=[])
@triton.jit
def kernel(x, y, strides, N: l.constexpr, softmax=0):
    # tl.softmax, torch.exp and exec are named in a comment
    i = tl.arange(0, 4)
    s = tl.load(x + i * strides[0]).to(tl.float32)
    for start in tl.static_range(0, 8, SIZE):
        s += start
    a, b = 0, 1
    while a < b:
        a += 1
    top = tl.reduce(s, 0, combine) + 0.0 * tl.math.exp2(1.0) * LOG2E
    input, grad = max(1, 2), min(3, N)
    tl.static_assert(N > 0, f"{N} is too small")
    if N > 4:
        top = 0.0
    tl.store(y, tl.where(top == -float("inf"), 0.0, top), mask=None)

def try_it(x):
    kernel[(1,)](torch.ones(3))
"""


def test_an_honest_kernel_runs(front):
    x, y = torch.arange(8.0), torch.zeros(1)
    launch(front, HONEST, x, y, (2, 1))
    assert y.item() == 6
    launch(front, HONEST, x.long(), y, (1, 1))
    assert y.item() == 3
    launch(front, HONEST, x, y, (1, 1), N=16)
    assert y.item() == 0


# What a kernel does in its third line, and where it is refused.
WRONG = {
    "PyTorch": "torch.exp(x)", "a module": "tl.core.os.system('true')",
    "a library's softmax": "tl.softmax(tl.arange(0, 4) + 0.5)",
    "a library's softmax, renamed": "f(tl.arange(0, 4) + 0.5)",
    "the interpreter's array": "x.handle.data[:] = 0",
    "the interpreter's NumPy": "np.zeros(3)", "an import": "import math",
    "a lambda": "y = lambda: 1", "a list that grows": "y = [a for a in range(3)]",
    "a plain function": "helper(x)", "a private name": "x._x",
    "a global that is no constant": "tl.store(x, NUMBER)",
    "a number that is not there": "tl.store(x, y)", "an exception": "raise ValueError",
    "another method": "tl.arange(0, 4).tolist()",
    "a shape that is no power of two": "tl.arange(0, 3)",
    "shapes that do not fit": "tl.arange(0, 4) + tl.arange(0, 8)",
    "types that do not fit": "tl.store(x, x)",
    "a tile that is too small": (
        "tl.dot(tl.zeros([4, 4], tl.float32), tl.zeros([4, 4], tl.float32))"
    ),
    "another kernel in a branch that is skipped": (
        "if N:\n        pass\n    else:\n        def kernel(x, N: tl.constexpr = 1):\n"
        "            tl.store(x, 5.0)"
    ),
    "a branch that is skipped": "if not N:\n        torch.exp(x)",
    "a kernel in a text": "y = '''\n    def kernel(x): tl.store(x, 5.0)\n    '''",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_triton_does_not_compile_is_refused_with_its_line(name, front):
    head = (
        "from triton.language import softmax as f\nNUMBER = 3\n"
        "def helper(x):\n    return x\n"
    )
    source = (
        f"{head}@triton.jit\ndef kernel(x, N: tl.constexpr = 1):\n    {WRONG[name]}\n"
    )
    x = torch.zeros(8)
    with pytest.raises((rules.Refused, frontend.NotTriton)) as caught:
        launch(front, source, x)
    further = {
        "another kernel in a branch that is skipped": 3,
        "a branch that is skipped": 1,
        "a kernel in a text": 1,
    }
    assert caught.value.line == 7 + further.get(name, 0)
    assert (x == 0).all(), "it has run"


@pytest.mark.parametrize(
    "other",
    [
        "@triton.jit\ndef other(x=helper('x')):\n    pass",
        "@triton.jit\ndef other(x: helper('x')):\n    pass",
        "@helper\n@triton.jit\ndef other(x):\n    pass",
        "@triton.heuristics({'N': lambda x: helper(x)})\n@triton.jit\n"
        "def other(x, N):\n    pass",
        "@triton.heuristics({'N': helper})\n@triton.jit\ndef other(x, N):\n    pass",
    ],
)
def test_nothing_around_a_kernel_runs(other):
    source = f"def helper(x):\n    return x\n{other}\n"
    with pytest.raises(rules.Refused, match="line "):
        frontend.Cells([("<kernel>", source)], {}, (), ())
