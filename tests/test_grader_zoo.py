"""Submissions whose marks are known: wrong and hostile ones next to honest ones.

A cell is the instructor's solution with something before it, after it, or in its place.
"""

import json
import re
import sys
import zipfile

import pytest
from handed_in import (
    added,
    changed,
    grade_id,
    graded,
    sources_of,
    written_out,
)
from processes import run

from exercises.grader import release, tasks

NOT_WRITTEN = """
    # YOUR CODE HERE
    raise NotImplementedError()
"""
HEURISTICS = """
@triton.heuristics({
    "WHOLE": lambda args: args["T_q"] % args["BLOCK_Q"] == 0,
    "WIDE": lambda args: triton.cdiv(args["T_k"], args["BLOCK_K"]) > 1,
})
@triton.jit
def ds_kernel(
    s, dp, lse, delta, ds, T_q, T_k, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr, WIDE: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    j = tl.arange(0, BLOCK_K)
    if WIDE:
        j += tl.program_id(1) * BLOCK_K
    inside = (j < T_k)[None, :]
    shift, D = tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    if WHOLE:
        shift, D = tl.load(lse + i), tl.load(delta + i)
    else:
        inside = inside & (i < T_q)[:, None]
        shift = tl.load(lse + i, mask=i < T_q, other=0.0)
        D = tl.load(delta + i, mask=i < T_q, other=0.0)
    shift = tl.where(shift == -float("inf"), 0.0, shift)
    place = i[:, None] * T_k + j[None, :]
    x = tl.load(s + place, mask=inside, other=0.0)
    y = tl.load(dp + place, mask=inside, other=0.0)
    x = tl.exp(x - shift[:, None]) * (y - D[:, None])
    tl.store(ds + place, x, mask=inside)
"""

HONEST = {
    "decorators, stubs that were left, answers that were tried": ("gradients", {
        "hand": (
            "D = (a * g + b * h) / (a + b)\nds0 = ds1 = 0\nds1 = -1\n"
            "D = 7  # not yet\n{}"
        ),
        "ds": "@torch.no_grad()\n{}",
        "backward": (
            "{}\nof = gradients\ndef gradients(*given):\n    with torch.no_grad():\n"
            "        with torch.inference_mode():\n            return of(*given)\n"
        ),
        "differences": f"def slopes(f, x, h):\n    'Not here.'{NOT_WRITTEN}",
        "delta": (
            "SIZE = 1\n@triton.jit\n"
            "def delta_kernel(do, stride_do, o, stride_o, delta):"
            f"{NOT_WRITTEN}"
        ),
        "kernel": HEURISTICS,
    }, ("{differences}", "{delta}")),
    "NumPy's array on the counting memory": ("blocks", {
        "product": {
            "c += x @ y": "c += np.array(x[:]) @ y[:].copy()",
            "memory.store(c)": "place, loaded = type(c), c.shape; memory.store(c)",
        },
    }, ()),
    "names, comments, classes": ("standard", {
        "softmax": (
            "import dataclasses, functools\nimport torch.nn.functional as F\n"
            "from typing import NamedTuple\n"
            "input = grad = logsumexp = softmax = autograd = 0  # torch.softmax, exec, "
            "autograd\n"
            "class Rows(NamedTuple):\n    m: 'torch.Tensor'\n"
            "    l: 'torch.Tensor' = None\n"
            "class Empty:\n    __slots__ = ()\n"
            "@dataclasses.dataclass\nclass Base(Empty):\n    s: object\n"
            "    def __post_init__(self):\n        self._s = self.s\n"
            "class Of(Base):\n    def __init__(self, s):\n        super().__init__(s)\n"
            "    def get(self):\n        assert self.__class__ is Of\n"
            "        return getattr(self, '_s')\n"
            "def logged(f):\n    @functools.wraps(f)\n    def call(*a):\n"
            "        return f(*a)\n    return call\n"
            "{}\n"
            "inner = rows_softmax\n"
            "@logged\ndef rows_softmax(s):\n"
            "    return inner(F.relu(Of(s).get()) - F.relu(-s))\n"
            "assert rows_softmax(torch.zeros(2, 2))[0].shape == (2, 2)\n"
        ),
        "heads": (
            "%%time\n{}\ndef check(module):\n    return module.ones(2).numpy().sum()\n"
            "check(torch)\n"
        ),
        "scores": (
            "from triton import jit\nimport triton.language as tl\nimport torch\n"
            "WARPS = 4\n"
            "@jit\ndef own_dot(x, y):\n    \"\"\"Not torch.matmul.\"\"\"\n"
            "    return tl.dot(x, y, input_precision='ieee')\n{}"
            "\ndef try_it():\n    return torch.softmax(torch.ones(3), 0)\ntry_it()\n"
        ),
        "rows": (
            "@triton.autotune(\n"
            "    configs=[triton.Config({ }, num_warps=w) for w in (2, 4)],\n"
            "    key=['T_k'],\n)\n"
            + "{}"
        ),
        "output": "{}\nimport matplotlib\n",
    }, ()),
    "helpers in other cells, split cells": ("online", {
        "state": "_own = max\n{}\nassert _own(m, l) >= m\nraise NotImplementedError()",
        "merge": "def merge(*a):\n    return of_merge(*a)",
        "kernel": "BLOCKS = 2",
    }, (
        "import matplotlib.pyplot as plt\nplt.plot([1])",
        "def of_merge(m_a, l_a, o_a, m_b, l_b, o_b):\n    m = torch.maximum(m_a, m_b)\n"
        "    shift = torch.where(m == -math.inf, 0.0, m)\n"
        "    a, b = torch.exp(m_a - shift), torch.exp(m_b - shift)\n"
        "    return m, a * l_a + b * l_b, a[:, None] * o_a + b[:, None] * o_b",
        "{kernel}",
    )),
    "a sum by another name, tiles counted by a program": ("masks", {
        "bias": {
            "shared = [n for n in range(4) if bias.shape[n] == 1]\n"
            "    return ds.sum(dim=shared, keepdim=True) if shared else ds":
                "return ds.sum_to_size(bias.shape)",
        },
    }, (
        "i, j = torch.arange(T)[:, None], torch.arange(T)\n"
        "seen = (j <= i) & ((i - j < near) | (j < first_keys))\n"
        "pairs = seen.reshape(T // B, B, T // B, B).sum((1, 3))\n"
        "print((pairs == 0).sum(), (pairs == B * B).sum())",
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_work_gets_its_marks(name, tmp_path):
    step, changes, extra = HONEST[name]
    lost, told = graded(step, tmp_path, changes, extra)
    assert lost == {}, told


ALL_KEYS = """
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    s = scale * q @ k.mT
    if causal:
        s = s.masked_fill(where.flatten() > where[rank][:, None], -math.inf)
    m = s.amax(dim=-1, keepdim=True)
    p = torch.exp(s - m)
    l = p.sum(dim=-1, keepdim=True)
    return p @ v / l, (m + torch.log(l))[..., 0]
"""

NUMPY_TILES = """
import numpy as np

def tiled(q, k, v, causal, scale, B_r, B_c):
    Q, V, shift = q.numpy(), v.detach().numpy(), len(k) - len(q)
    O, L = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    for row in range(0, len(q), B_r):
        x = Q[row : row + B_r]
        m, l = np.full(len(x), -np.inf), np.zeros(len(x))
        acc = np.zeros((len(x), v.shape[1]))
        for col in range(0, len(k), B_c):
            s = scale * x @ k[col : col + B_c].numpy().T
            if causal:
                i = row + np.arange(len(x))[:, None] + shift
                s = np.where(col + np.arange(s.shape[1])[None, :] <= i, s, -np.inf)
            new = np.maximum(m, s.max(axis=1))
            safe = np.where(new == -np.inf, 0.0, new)
            p, a = np.exp(s - safe[:, None]), np.exp(m - safe)
            m, l = new, a * l + p.sum(axis=1)
            acc = a[:, None] * acc + p @ V[col : col + B_c]
        l = np.where(l == 0, 1, l)
        O[row : row + B_r] = acc / l[:, None]
        L[row : row + B_r] = m + np.log(l)
    return torch.from_numpy(O.astype(np.float32)), torch.tensor(L, dtype=torch.float32)
"""

# (step, {task: its cell}, {task: points}): every task that is not named keeps its
# points.
HOSTILE = {
    "somebody else's softmax, a kernel patched from elsewhere": ("standard", {
        "softmax": (
            "soft = 'soft' + 'max'\n"
            "def rows_softmax(s):\n"
            "    return getattr(torch, soft)(s, -1), s.logsumexp(-1)\n"
        ),
        "heads": (
            "{}\ntorch.maximum = torch.minimum = torch.full = None\n"
            "triton.jit = tl.load = tl.dot = print\n"
            "scores_kernel = probabilities = wider = assert_agrees = print\n"
            "math.exp = math.log = print\n"
        ),
        "scores": (
            "class scores_kernel:\n    def __getitem__(self, grid):\n"
            "        return torch.matmul\n"
        ),
        "rows": (
            "@triton.jit\n"
            "def softmax_kernel(s, stride_s, p, lse, T_k, BLOCK: tl.constexpr):\n"
            "    '''\n"
            "def softmax_kernel(s, stride_s, p, lse, T_k, BLOCK):\n    import torch\n"
            "    '''\n    pass\n"
        ),
        "output": (
            "@triton.jit\n"
            "def output_kernel(p, p_row, v, v_row, o, T_q, T_k, d_v, BLOCK_Q, BLOCK_K, "
            "BLOCK_D):\n"
            "    o.handle.data[:] = 0\n"
        ),
    }, {"softmax": 0, "scores": 0, "rows": 0, "output": 0}),
    "texts that are run": ("standard", {
        "softmax": (
            "import functools\n@functools.singledispatch\ndef f(x):\n    return x\n"
            "try:\n    @f.register\n    def g(x: \"exec('import os') or int\"):\n"
            "        return x\n"
            "except Exception:\n    ran = 1\nelse:\n    ran = 0\n{}\n"
            "first = rows_softmax\n"
            "def rows_softmax(s):\n    return first(s) if ran else None\n"
        ),
        "heads": (
            "{}\nimport numpy as np\nfrom torch.nn import functional\n"
            "found = []\n"
            "for way in (\n"
            "    lambda: functional.torch.jit, lambda: torch.os, lambda: "
            "torch.sys.modules, lambda: np.ctypeslib,\n"
            "    lambda: np.memmap('/usr/lib/os-release'), lambda: "
            "np.load('/usr/lib/os-release'),\n"
            "    lambda: torch.zeros(1).numpy().tofile('/tmp/x'), lambda: getattr(way, "
            "'__glo' + 'bals__'),\n"
            "    lambda: type(getattr(np.zeros(1), 'cty' + 'pes').shape), lambda: "
            "torch.load('/usr/lib/os-release'),\n"
            "    lambda: torch.hub.list('x'), lambda: "
            "np.lib.stride_tricks.as_strided,\n"
            "):\n    try:\n        way()\n        found.append(way)\n"
            "    except Exception:\n        pass\n"
            "if found:\n    split_heads = found\n"
        ),
        "rows": "softmax_kernel = triton.jit(print)\n",
    }, {"rows": 0}),
    "memory and classes of others": ("standard", {
        "heads": (
            "{}\nimport abc, dataclasses, functools\nimport numpy as np\n"
            "I = {'shape': (1,), 'typestr': '<i8', 'version': 3, 'data': "
            "(torch.zeros(1).data_ptr(), False)}\n"
            "name, found = '__array_' + 'interface__', []\n"
            "class A:\n    pass\n"
            "def kept(a):\n    p = functools.cached_property(lambda self: I)\n"
            "    p.attrname = name\n"
            "    A.x = p\n    a.x\n    return a\n"
            "for way in (\n"
            "    lambda: type('A', (), {name: I})(), lambda: type(A)('A', (), {name: "
            "I})(),\n"
            "    lambda: type('A', (), {'__get' + 'attr__': lambda self, x: I})(),\n"
            "    lambda: type(abc.ABC)('A', (), {name: I})(), lambda: abc.ABCMeta('A', "
            "(), {name: I})(),\n"
            "    lambda: kept(A()), lambda: setattr(A, name, I) or A(),\n"
            "    lambda: dataclasses.make_dataclass('A', [(name, dict)])(I),\n"
            "):\n    try:\n        if np.asarray(way()).dtype != object:\n"
            "            found.append(way)\n"
            "    except Exception:\n        pass\n"
            "for way in (\n"
            "    lambda: setattr(torch.Tensor, 'data_ptr', len), lambda: "
            "delattr(torch.Tensor, 'numel'),\n"
            "    lambda: torch.from_file('/tmp/x', shared=True, size=9),\n"
            "    lambda: torch.UntypedStorage.from_file('/dev/shm/x', True, 9),\n"
            "    lambda: torch.zeros(9).share_memory_(),\n"
            "):\n    try:\n        way()\n        found.append(way)\n"
            "    except Exception:\n        pass\n"
            "try:\n    torch.Tensor.element_size = torch.Tensor.data_ptr = len\n"
            "    found.append(1)\n"
            "except Exception:\n    pass\n"
            "for torch.Tensor.numel in ():\n    pass\n"
            "if found:\n    split_heads = found\n"
        ),
    }, {}),
    "what the text forbids": ("gradients", {
        "differences": (
            "def slopes(f, x, h):\n    first = x[:, :1].expand(x.shape).clone()\n"
            "    first[:, 0] += x.sum(dim=1)\n    return 3 * x**2 + h**2 + first\n"
        ),
        "delta": (
            "@triton.jit\n"
            "def delta_kernel(do, stride_do, o, stride_o, delta, T, d_v, BLOCK_Q: "
            "tl.constexpr, BLOCK_D: tl.constexpr):\n"
            "    i = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)\n"
            "    a = tl.arange(0, 256)\n"
            "    inside = (i < T)[:, None] & (a < d_v)[None, :]\n"
            "    x = tl.load(do + i[:, None] * stride_do + a[None, :], mask=inside, "
            "other=0.0)\n"
            "    y = tl.load(o + i[:, None] * stride_o + a[None, :], mask=inside, "
            "other=0.0)\n"
            "    tl.store(delta + i, tl.sum(x * y, 1), mask=i < T)\n"
        ),
        "kernel": "{}\n    NUMBER = [x for x in range(3)]\n",
    }, {"differences": 0, "delta": 0, "kernel": 0}),
    "ranks that share a list": ("ring", {
        "merge": (
            "{}\nof_merge = merge\ndef merge(o, *rest):\n"
            "    result = of_merge(o, *rest)\n    o.add_(1)\n    return result\n"
        ),
        "forward": (
            "SHARED = dict()\ndef forward(rank, size, q, k, v, where, causal, scale):\n"
            "    SHARED[rank] = k, v\n"
            "    for _ in range(size - 1):\n        yield k, v\n"
            "    k, v = (torch.cat(x, dim=1) for x in zip(*(SHARED[r] for r in "
            "range(size))))\n"
            f"{ALL_KEYS}"
        ),
    }, {"merge": 0, "forward": 0.67}),
    "memory that ranks share": ("ring", {
        "merge": "{}\nSHARED = torch.zeros(99).share_memory_()\n",
        "forward": (
            "def forward(rank, size, q, k, v, where, causal, scale):\n"
            "    n, own = k.numel(), torch.cat([k.flatten(), v.flatten()])\n"
            "    options = {'size': size * len(own), 'dtype': k.dtype}\n"
            "    x = torch.from_file('/tmp/x', shared=True, **options).reshape(size, "
            "-1)\n"
            "    x[rank] = own\n    for _ in range(size - 1):\n        yield k, v\n"
            "    k = torch.cat([y[:n].reshape(k.shape) for y in x], dim=1)\n"
            "    v = torch.cat([y[n:].reshape(v.shape) for y in x], dim=1)\n"
            f"{ALL_KEYS}"
        ),
    }, {"forward": 0}),
    "the counting memory's arrays and counts": ("blocks", {
        "product": (
            "def product(memory, m, n, k, b_m, b_n, b_k):\n    of = []\n"
            "    for name, rows, columns in (('A', m, k), ('B', k, n)):\n"
            "        for I in ranges(rows, 1):\n"
            "            memory.free(memory.load(name, I))\n"
            "        of.append(getattr(memory, 'arr' + 'ay')(name))\n"
            "    c = of[0] @ of[1]\n"
            "    for I in ranges(m, b_m):\n        for J in ranges(n, b_n):\n"
            "            x = memory.allocate('C', I, J)\n            x[:] = c[I, J]\n"
            "            memory.store(x)\n            memory.free(x)\n"
        ),
        "attend": (
            "{}\nof = attend\ndef attend(memory, *sizes):\n"
            "    x = memory.allocate('x', slice(0, 1), slice(0, 1))\n"
            "    x.words = 10**6\n    memory.free(x)\n    of(memory, *sizes)\n"
        ),
    }, {"product": 0, "attend": 0}),
    "numbers in Python's lists": ("blocks", {
        "product": {
            "    for I in ranges(m": "    kept = []\n    for I in ranges(m",
            "c += x @ y": "c += x @ y\n                kept += x[:].tolist()",
        },
    }, {"product": 2.4}),
    "NumPy where its arrays are not counted": ("flash2", {
        "tiled": NUMPY_TILES,
    }, {"tiled": 0}),
    "other ways to NumPy": ("projections", {
        "streamed": (
            "{}\nfound, one = [], torch.ones(1)\n"
            "for way in (\n"
            "    lambda: getattr(one, 'num' + 'py'), lambda: np, lambda: torch.np,\n"
            "    lambda: torch.functional.np, lambda: torch.nn.init.np,\n"
            "    lambda: getattr(torch.testing, 'num' + 'py'),\n"
            "):\n    try:\n        found.append(way())\n"
            "    except Exception:\n        pass\n"
            "if found:\n    streamed = found\n"
        ),
    }, {}),
    "keys that nobody sees": ("flash2", {
        "kernel": {
            "end = tl.minimum(end, tl.maximum(row + BLOCK_Q + T_k - T_q, 0))": "pass",
            "    acc = tl.dot(p, v": (
                "    v_tile = tl.where(v_tile == v_tile, v_tile, 0.0)\n"
                "    acc = tl.dot(p, v"
            ),
        },
    }, {"kernel": 5.4}),
    "divisions by other names": ("flash2", {
        "tiled": {" m = m_new": " m, l = m_new, l * (l + 1) * (l + 1) ** -1"},
        "kernel": {
            "    acc = tl.dot(p, v": (
                "    l *= tl.math.rsqrt(l + 1.0) * tl.sqrt(l + 1.0)\n"
                "    acc = tl.dot(p, v"
            ),
        },
    }, {"tiled": 0, "kernel": 0}),
    "an atomic addition that loads": ("online", {
        "kernel": (
            "@triton.jit\n"
            "def states_kernel(s_ptr, stride, m_ptr, l_ptr, n, BLOCK: tl.constexpr):\n"
            "    row, m, l = tl.program_id(0), -float('inf'), 0.0\n"
            "    for start in range(0, n, BLOCK):\n"
            "        j = start + tl.arange(0, BLOCK)\n"
            "        s = tl.load(s_ptr + row * stride + j, mask=j < n, "
            "other=-float('inf'))\n"
            "        m = tl.maximum(m, tl.max(s, 0))\n"
            "    shift = tl.where(m == -float('inf'), 0.0, m)\n"
            "    for start in range(0, n, BLOCK):\n"
            "        j = start + tl.arange(0, BLOCK)\n"
            "        s = tl.atomic_add(s_ptr + row * stride + j, 0.0, mask=j < n)\n"
            "        l += tl.sum(tl.where(j < n, tl.exp(s - shift), 0.0), 0)\n"
            "    tl.store(m_ptr + row, m)\n    tl.store(l_ptr + row, l)\n"
        ),
    }, {"kernel": 0}),
    "the whole row at once, and twice": ("online", {
        "kernel": (
            "@triton.jit\n"
            "def states_kernel(s_ptr, stride, m_ptr, l_ptr, n, BLOCK: tl.constexpr):\n"
            "    j = tl.arange(0, 1024)\n    row = tl.program_id(0)\n"
            "    s = tl.load(s_ptr + row * stride + j, mask=j < n, "
            "other=-float('inf'))\n"
            "    m = tl.max(s, 0)\n    shift = tl.where(m == -float('inf'), 0.0, m)\n"
            "    tl.store(m_ptr + row, m)\n"
            "    tl.store(l_ptr + row, tl.sum(tl.exp(s - shift), 0))\n"
        ),
        "merge": (
            "def merge(m_a, l_a, o_a, m_b, l_b, o_b):\n"
            "    m = torch.logaddexp(m_a, m_b)\n    return m, l_a, o_a\n"
        ),
    }, {"kernel": 0, "merge": 0}),
    "autograd, in four disguises": ("gradients", {
        "ds": (
            "def score_gradient(s, v, do):\n    with torch.enable_grad():\n"
            "        x = s.detach().clone().requires_grad_()\n"
            "        o = x.exp() @ v\n        o.backward(do)\n"
            "    return x.grad, x.grad\n"
        ),
        "backward": (
            "def gradients(q, k, v, do, scale, causal):\n"
            "    return torch.func.vjp(lambda q, k, v: scale * q @ k.mT @ v, q, k, "
            "v)[1](do)\n"
        ),
    }, {"ds": 0, "backward": 0}),
    "PyTorch's softmax while a result is read": ("decoding", {
        "merge": (
            "def merge(o, lse):\n    w = lse.softmax(0).nan_to_num()\n"
            "    return ((w[..., None] * o).sum(0), lse.logsumexp(0))\n"
            "of = merge\ndef merge(o, lse):\n    yield from of(o, lse)\n"
        ),
    }, {"merge": 0}),
    "a matrix of scores, in Python's lists": ("flash2", {
        "tiled": (
            "{}\nof = tiled\ndef tiled(q, k, *rest):\n"
            "    s = [(row @ k.T).tolist() for row in q]\n"
            "    return of(q, k, *rest)\n"
        ),
        "kernel": (
            "from triton.language import softmax as normal\n{}\n"
            "flash2_kernel = normal\n"
        ),
    }, {"tiled": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_asked_for_gets_nothing_and_spoils_nothing(name, tmp_path):
    step, changes, wanted = HOSTILE[name]
    lost, told = graded(step, tmp_path, changes)
    assert lost == wanted, told
    assert "Traceback" not in told


def but_slow(names, fast):
    """Parameters of which some run in `make test-all` only."""
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]


def checked(step, place, changes=(), extra=(), **environment):
    """(exit status, what check.py of a step's zip says) of the solutions with some
    cells changed, and others added.
    """
    zipfile.ZipFile(release.practice(step, place / "x.zip")).extractall(place)
    made = json.loads((place / step / f"{step}.ipynb").read_text())
    assert "check.py" in "".join(made["cells"][-1]["source"])
    assignment = tasks.assignment(step)
    made = assignment.unnumbered(tasks.PRACTICE)
    written_out(assignment, made, tasks.PRACTICE, tasks.NOBODY)
    solved = sources_of(made)
    for cell in made["cells"]:
        if grade_id(cell) in dict(changes):
            cell["source"] = changed(changes[grade_id(cell)], solved[grade_id(cell)])
    made["cells"] += added(extra, solved)
    (place / step / f"{step}.ipynb").write_text(json.dumps(made))
    command = [sys.executable, "check.py"]
    environment = {"PATH": "/usr/bin", **environment}
    done = run(command, cwd=place / step, env=environment)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("step", but_slow(tasks.STEPS, ["machine"]))
def test_the_checker_in_the_zip_has_nothing_against_the_solutions(step, tmp_path):
    if step == "machine":  # it needs no PyTorch on a student's computer
        (tmp_path / "machine").mkdir()
        (tmp_path / "machine/torch.py").write_text("raise ImportError")
    status, said = checked(step, tmp_path)
    names = [task.name for task in tasks.assignment(step).tasks]
    assert said.splitlines()[:-1] == [f"{name}: breaks no rule" for name in names]
    assert status == 0
    needed = (tmp_path / step / "requirements.txt").read_text()
    assert re.fullmatch(r"notebook==\S+\n", needed) or step != "machine"
    readme = (tmp_path / step / "README.txt").read_text()
    assert ("Triton" in readme) == (step != "machine")


TRIED = "decorators, stubs that were left, answers that were tried"


@pytest.mark.parametrize("name", but_slow(HONEST, [TRIED]))
def test_the_checker_in_the_zip_has_nothing_against_honest_work(name, tmp_path):
    step, changes, extra = HONEST[name]
    status, said = checked(step, tmp_path, changes, extra)
    names = [task.name for task in tasks.assignment(step).tasks]
    assert [f"{x}: breaks no rule" in said for x in names] == [True] * len(names), said
    assert ("hand: ds0 is assigned 2 times" in said) == (name == TRIED)
    assert status == 0


WHOLE_ROW = "the whole row at once, and twice"


@pytest.mark.parametrize(
    "name", but_slow([n for n in HOSTILE if HOSTILE[n][2]], [WHOLE_ROW])
)
def test_the_checker_in_the_zip_tells_what_would_cost_points(name, tmp_path):
    """A missing name and answers on paper that are not written too."""
    step, changes, lost = HOSTILE[name]
    plain = {x: how for x, how in changes.items() if x in lost}
    if name == WHOLE_ROW:
        cells = sources_of(tasks.assignment(step).unnumbered(tasks.PRACTICE))
        plain["parameters"] = cells["parameters"].replace('"practice"', "str()")
        plain["state"] = cells["state"]
    status, said = checked(step, tmp_path, plain)
    assert status == 1
    fine = [line for line in said.splitlines() if line.endswith("breaks no rule")]
    assert not {line.split(":")[0] for line in fine} & set(plain), said
    if name == WHOLE_ROW:
        assert "student: expected your name" in said
        assert 'parameters: expected student = "..."' in said
        assert "state: line 2: m must be a number that is written out" in said


def test_the_checker_in_the_zip_counts_what_is_printed(tmp_path):
    loud = "{}\nfor _ in range(17):\n    print('x' * 2**20)"
    status, said = checked("machine", tmp_path, {"outer": loud})
    assert status == 1 and "outer: " in said
    assert "the notebook prints more than 16 MiB" in said


def test_the_checker_in_the_zip_says_what_went_wrong_in_a_rank(tmp_path):
    """A rank is a process of its own."""
    source = "def forward(rank, size, *rest):\n    yield ()\n    return missing, 0"
    status, said = checked("ring", tmp_path, {"forward": source})
    assert status == 1
    where = "forward: visible test, line 3: NameError: name 'missing' is not defined"
    assert where in said.splitlines()


WITHOUT_TRITON = """
from importlib import machinery
find = machinery.PathFinder.find_spec
def hidden(kind, name, *rest):
    return None if name.split(".")[0] == "triton" else find(name, *rest)
machinery.PathFinder.find_spec = classmethod(hidden)
"""


def test_the_checker_in_the_zip_says_what_it_could_not_check(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TRITON)
    wrong = {"merge": "import os"}
    for changes, status in (({}, 0), (wrong, 1)):
        place = tmp_path / str(status)
        place.mkdir()
        found, said = checked("online", place, changes, PYTHONPATH=str(tmp_path))
        assert found == status
        assert "kernel: NOT CHECKED, since Triton is not installed here" in said
        assert ("merge: breaks no rule" in said) == (not changes)
    assert "inputs that you do not see" not in said
