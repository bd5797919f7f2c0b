"""What the rules refuse in the cells of a submission, and what they must let through."""

import pytest

from exercises.grader import rules

REFUSED = {
    "attention of PyTorch": "import torch\no = torch.nn.functional.scaled_dot_product_attention",
    "attention of PyTorch by import": "from torch.nn.functional import scaled_dot_product_attention as f",
    "flashlib": "from flashlib import attention",
    "flashlib's kernels": "import flashlib.kernels.flash2",
    "the operating system": "import os",
    "the operating system through torch": "import torch\ntorch.os.system('true')",
    "importlib": "import importlib",
    "a name built at run time": "import torch\nf = getattr(torch, 'soft' + 'max')",
    "exec": "exec('import os')",
    "a file": "open('/etc/passwd')",
    "a file through NumPy": "import numpy\nnumpy.load('/job/arrays.npz', allow_pickle=True)",
    "pickle": "import torch\ntorch.load('x')",
    "dunder attributes": "x = ().__class__.__bases__[0].__subclasses__()",
    "builtins": "x = __builtins__",
    "a private name": "import torch\ntorch._C._nn",
    "raw operations": "import torch\ntorch.ops.aten",
    "a private module": "from torch._C import default_generator",
    "what no attribute may name, by import": "from torch.overrides import TorchFunctionMode",
    "star": "from torch import *",
    "not Python": "def f(:",
    "a library taken over": "triton.jit = print",
    "a library's name": "tl = 1",
    "a library's name by import": "import torch as triton",
    "magic": "%time x = 1",
    "null byte": "x = '\0'",
    # Names that hide what they mean.
    "a module under another name": "x = torch\nx.load('x')",
    "a module under a name that may load": "memory = torch\nmemory.load('x')",
    "what may load does nothing else": "memory = torch\nmemory.os.system('true')",
    "a library changed under another name": "x = torch\nx.maximum = torch.minimum",
    "a library changed deep inside": "torch.nn.functional.relu = print",
    "a library changed under an imported name": "import torch.nn.functional as F\nF.relu = print",
    "a library changed by a loop": "for torch.maximum in [print]:\n    pass",
    "a module passed on": "def f(x):\n    return x.maximum\nf(torch)",
    "a module as a default": "def f(x=torch):\n    pass",
    "modules in a list": "x = [torch.nn, torch]",
    "modules at once": "x, y = torch, torch",
    "a module by walrus": "if (x := torch):\n    pass",
    "a module in a pattern": "match torch:\n    case object(exp=f):\n        pass",
    "a name in a pattern": "match x:\n    case object(os=f):\n        pass",
    "a name for two modules": "x = torch\nx = torch.nn",
    "a module that runs texts": "torch.jit.CompilationUnit('def f(x): return x')",
    "a module that runs texts, renamed": "x = torch\ny = x.fx",
    "a module that runs texts, by import": "from torch import fx as f",
    "a module that is loaded late": "torch.onnx",
    "NumPy's compiler": "import numpy as np\nnp.f2py",
    "what Triton is made of": "triton.runtime.interpreter.interpreter_builder",
    "another module's modules": "torch.functional.torch.jit",
    "attributes by text": "import functools\nfunctools.update_wrapper(Box(), torch.Tensor, assigned=['exp'])",
    "attributes by text, by import": "from functools import wraps",
    "a parameter with a library's name": "def f(torch):\n    pass",
    "a function with a library's name": "def torch():\n    pass",
    "a pattern with a library's name": "match x:\n    case tl:\n        pass",
    "an exception with a library's name": "try:\n    pass\nexcept ValueError as math:\n    pass",
    "a library's name, imported and taken": "import torch\ntorch = 1",
    "a module in a class": "class A:\n    x = torch\ny = A.x.jit",
    "a module imported in a class": "class A:\n    if True:\n        import torch as x\ny = A.x.jit",
    "the frames of the worker": "g = (x for x in ())\ny = g.gi_frame.f_back",
    "the frames of an exception": "try:\n    1 / 0\nexcept ValueError as e:\n    y = e.tb_frame.f_builtins",
    "a frame in a pattern": "match x:\n    case object(gi_frame=f):\n        pass",
    "a chain of names": "\n".join(f"def f{n}():\n    x{n} = x{n + 1}" for n in range(9))
    + "\nx9 = torch",
    "too long": "x = 1\n" * 10_000,
    "deep": "x = " + "lambda: " * 6_000 + "1",
    "a long chain": "x = torch" + ".a" * 24_000,
    "other letters": "torch.lo\u1d43d('x')",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cell_that_leaves_the_task_is_refused(name):
    with pytest.raises(rules.Refused):
        rules.require(REFUSED[name])


@pytest.mark.parametrize(
    "source",
    [
        "torch.softmax(s, -1)",
        "s.softmax(-1)",
        "torch.special.logsumexp(s, -1)",
        "x = torch\nx.softmax(s, -1)",
        "from torch import softmax as f",
        "from torch.nn.functional import softmax as f",
        "import torch.nn.functional as F\nF.softmax(s, -1)",
        "F = torch.nn.functional\nf = F.softmax",
        "f = torch.Tensor.softmax",
        "match s:\n    case object(softmax=f):\n        pass",
        "s.ſoftmax(-1)",
    ],
)
def test_what_a_task_forbids_is_refused(source):
    with pytest.raises(rules.Refused, match=r"softmax|logsumexp"):
        rules.require(source, forbidden=("softmax", "logsumexp"))


HONEST_CELLS = """
import torch.nn.functional as F
def f(x):
    return F.relu(x) + F.pad(x, (0, 1))
---
from torch import nn
from torch.nn import functional
N = nn.functional
y, z = N.relu, functional.pad
---
import numpy as np
rng = np.random.default_rng(0)
x = np.linalg.norm(rng.standard_normal(3))
---
e = torch.exp
def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return e(x), torch.finfo(x.dtype).max
---
class State:
    def __init__(self, m):
        self.m = m
    def add(self, x):
        self.m.best = x
---
import functools
import itertools
@functools.cache
def f(n):
    return sum(itertools.repeat(1, n))
---
device = "cuda" if torch.cuda.is_available() else "cpu"
---
def schedule(memory, T):
    block = memory.load("Q", slice(0, T))
    block[:] = 0
    memory.free(block)
---
def f(x):
    global count
    match x.shape:
        case (T, d):
            count = T * d
---
def f(scores):
    parts = [ranges(x) for x in scores]
    return isinstance(parts, list) and type(x) is int
---
F = 312
x = [F, F / 2]
---
try:
    x = math.log(0)
except ValueError as error:
    x = -math.inf
---
class Rows:
    size = torch.float32.itemsize
    def total(self, x):
        F = torch.nn.functional
        return F.normalize(x).sum()
---
import triton
import triton.language as tl
@triton.jit
def f(x, N: tl.constexpr):
    y = tl.load(x + tl.arange(0, N)).to(tl.float32)
    tl.store(x, tl.math.exp2(y) + math.pi)
"""


@pytest.mark.parametrize("source", HONEST_CELLS.split("---"))
def test_an_honest_cell_is_not_refused(source):
    rules.require(source, rules.SOFTMAX, around=AROUND)


GIVEN = "import torch\nfrom flashlib import kernels\nclass Largest:\n    x = 0\ndef ranges(n):\n    pass"
LATER = "def run_product():\n    pass\ndef moved_words():\n    pass"
CELLS = [
    ("given-0", GIVEN, None),
    ("a", None, "a"),
    ("given-2", LATER, None),
    ("b", None, "b"),
]
AROUND = rules.around(CELLS, {"a": "import torch.nn.functional as F"})["b"]


@pytest.mark.parametrize(
    "source",
    [
        "def ranges(n):\n    return []",
        "run_product = print",
        "from math import exp as run_product",
        "class Largest:\n    pass",
        "for run_product in [print]:\n    pass",
        "if True:\n    def moved_words():\n        return 0",
        "def f():\n    global moved_words\n    moved_words = print",
        "def f():\n    global moved_words\n    def moved_words():\n        pass",
        "Largest.x = 0",
        "x = Largest",
        "def f(x):\n    x.x = 0\nf(Largest)",
        "kernels.padded = print",
        "kernels = 1",
        "x = kernels.torch.jit",
        "F.relu = print",
    ],
)
def test_what_is_given_stays_what_it_is(source):
    with pytest.raises(rules.Refused, match="line "):
        rules.require(source, around=AROUND)


def test_what_is_given_later_may_have_been_something_else():
    """The given cell runs later; only ``global`` reaches it, from inside a call."""
    before = rules.around(CELLS, {})["a"]
    rules.require("def run_product():\n    pass", around=before)
    with pytest.raises(rules.Refused, match="line 2: run_product is given"):
        rules.require(
            "def f():\n    global run_product\n    run_product = print", around=before
        )


@pytest.mark.parametrize(
    "source",
    [
        "torch.autograd.grad(o, q)",
        "o.backward()",
        "q.requires_grad_()",
        "torch.func.linearize(o, q)",
        "from torch.autograd import functional",
        "from torch.autograd import grad as g",
        "import torch.autograd as a",
    ],
)
def test_what_differentiates_is_refused(source):
    with pytest.raises(rules.Refused, match="not allowed"):
        rules.require(source, forbidden=rules.AUTOGRAD)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\n",
        "def kernel(x):\n    pass",
        "@other\ndef kernel(x):\n    pass",
        "import triton\n@triton.jit\ndef kernel(x):\n    import torch",
        "for i in range(3):\n    pass",
        "import triton\n@triton.jit\ndef kernel(x):\n    y = lambda: 1",
        "kernel = Pretender()",
        "kernel = helper",
        "@triton.jit\ndef kernel(x):\n    torch.exp(x)",
        "@triton.jit\ndef kernel(x):\n    x.handle.data[:] = 0",
        "import numpy as np",
    ],
)
def test_a_kernels_cell_holds_kernels_only(source):
    with pytest.raises(rules.Refused):
        rules.require(source, kernel=True)
