"""The reference, the oracle of all other tests, against code that shares nothing with
it.
"""

import itertools
import math

import pytest
import torch
from processes import run_python

from flashlib import testing
from flashlib.notebook import check
from flashlib.reference import gradients, standard

SHAPES = {
    "square": {"B": 2, "H": 3, "T_q": 17, "d": 16},
    "few queries": {"B": 1, "H": 2, "T_q": 3, "T_k": 11, "d": 16, "d_v": 5},
    "many queries": {"B": 1, "H": 2, "T_q": 11, "T_k": 3, "d": 7, "d_v": 16},
    "grouped": {"B": 2, "H": 6, "H_kv": 2, "T_q": 5, "T_k": 9, "d": 8},
    "one key": {"B": 1, "H": 7, "H_kv": 1, "T_q": 4, "T_k": 1, "d": 4},
    "one query": {"B": 1, "H": 1, "T_q": 1, "T_k": 13, "d": 4},
}
MASKS = {"full": False, "causal": True}
SCALES = {"default": None, "negative": -0.7, "zero": 0.0}


def by_loops(q, k, v, causal, scale):
    """Attention row by row in Python's own floats, straight from the definition."""
    B, H, T_q, d = q.shape
    T_k, d_v = v.shape[2:]
    scale = 1.0 / math.sqrt(d) if scale is None else scale
    o = torch.zeros(B, H, T_q, d_v, dtype=torch.float64)
    lse = torch.full((B, H, T_q), -math.inf, dtype=torch.float64)
    for b, h, i in itertools.product(range(B), range(H), range(T_q)):
        g = h // (H // k.shape[1])
        keys = [j for j in range(T_k) if not causal or j <= i + T_k - T_q]
        dots = [math.fsum((q[b, h, i] * k[b, g, j]).tolist()) for j in keys]
        weights = [math.exp(scale * dot) for dot in dots]
        if not keys:
            continue
        total = math.fsum(weights)
        lse[b, h, i] = math.log(total)
        for c in range(d_v):
            terms = zip(weights, v[b, g, keys, c].tolist(), strict=True)
            o[b, h, i, c] = math.fsum(w / total * x for w, x in terms)
    return o, lse


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("causal", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_attention_is_its_definition(shape, causal, scale):
    q, k, v = testing.make_qkv(**shape, dtype=torch.float64)
    o, lse = standard.attention(q, k, v, causal=causal, scale=scale)
    o_loops, lse_loops = by_loops(q, k, v, causal, scale)
    assert o.dtype == lse.dtype == torch.float64
    check("o", o, o_loops)
    check("lse", lse, lse_loops)


@pytest.mark.parametrize("with_dlse", [False, True], ids=["o", "o and lse"])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("causal", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_gradients_are_those_of_autograd(shape, causal, scale, with_dlse):
    """PyTorch's own attention has none of the reference's formulas."""
    q, k, v = testing.make_qkv(**shape, dtype=torch.float64, requires_grad=True)
    (T_q, T_k), groups = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    every_k = k.repeat_interleave(groups, dim=1)
    s = factor * torch.einsum("bhid,bhjd->bhij", q, every_k)
    seen = torch.ones(T_q, T_k, dtype=torch.bool)
    seen = seen.tril(T_k - T_q) if causal else seen
    sees = seen.any(dim=1)
    # Rows that see nothing have no softmax to differentiate.
    s = s[:, :, sees].masked_fill(~seen[sees], -math.inf)
    o = torch.softmax(s, dim=-1) @ v.repeat_interleave(groups, dim=1)
    generator = torch.Generator().manual_seed(1)
    options = {"generator": generator, "dtype": torch.float64}
    do = torch.randn(*q.shape[:3], v.shape[3], **options)
    dlse = torch.randn(*q.shape[:3], **options) if with_dlse else None
    loss = (o * do[:, :, sees]).sum()
    if with_dlse:
        loss = loss + (torch.logsumexp(s, dim=-1) * dlse[:, :, sees]).sum()
    wanted = torch.autograd.grad(loss, (q, k, v))
    found = gradients.gradients(
        q.detach(), k.detach(), v.detach(), do, causal=causal, scale=scale, dlse=dlse
    )
    for name, a, b in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        check(name, a, b)


@pytest.mark.parametrize("T_k", [0, 3])
def test_rows_that_see_no_key_are_exactly_zero(T_k):
    q, k, v = testing.make_qkv(1, 2, 5, 4, T_k=T_k, dtype=torch.float64)
    o, lse = standard.attention(q, k, v, causal=True)
    dq, dk, dv = gradients.gradients(q, k, v, torch.ones_like(o), causal=True)
    blind = slice(5 - T_k)
    assert (o[:, :, blind] == 0).all() and (lse[:, :, blind] == -math.inf).all()
    assert (dq[:, :, blind] == 0).all() and dk.shape == k.shape and dv.shape == v.shape


@pytest.mark.parametrize("magnitude", [200.0, 2000.0])
def test_large_scores_do_not_overflow(magnitude):
    q, k, v = testing.make_qkv(1, 2, 9, 16, dtype=torch.float64, magnitude=magnitude)
    s = standard.scores(q, k)
    assert s.abs().max() > 200
    o, lse = standard.attention(q, k, v)
    check("softmax", o, torch.softmax(s, dim=-1) @ v)
    check("lse", lse, torch.logsumexp(s, dim=-1))


def test_asking_for_a_kernel_where_triton_is_absent_says_what_to_do():
    code = "import sys, torch, flashlib\nsys.modules['triton'] = None\n"
    done = run_python(
        f"{code}x = torch.zeros(1, 1, 3, 16)\nflashlib.attention(x, x, x)"
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), last
    assert "Triton" in last and "Linux" in last, last
