"""What judges students' results lets through what is right and finds what is wrong."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from device import DEVICE
from processes import run_python

from flashlib import kernels
from flashlib.exercise import OWN_BYTES, Largest, assert_agrees, bounds_checked
from flashlib.reference import standard

# isort: split
import triton  # after flashlib.kernels, which chooses the interpreter
import triton.language as tl


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(DEVICE, dtype)


def log_sum_exp(x):
    return torch.logsumexp(x, dim=-1)


def attended(s, v):
    return torch.softmax(s, dim=-1) @ v


def in_base_2(x, BLOCK=16):
    """The log-sum-exp block by block in powers of two, as a kernel computes it."""
    m = torch.full_like(x[..., 0], -math.inf)
    l = torch.zeros_like(m)
    for part in (x / math.log(2)).split(BLOCK, dim=-1):
        larger = torch.maximum(m, part.amax(dim=-1))
        added = torch.exp2(part - larger[..., None]).sum(dim=-1)
        l = l * torch.exp2(m - larger) + added
        m = larger
    return (m + l.log2()) * math.log(2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("gain", [1.0, 60.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 3, 203)])
def test_another_order_of_operations_agrees(shape, gain, dtype):
    x = gain * normal(*shape, dtype=dtype)
    assert_agrees("lse", in_base_2(x), log_sum_exp, x)
    if dtype != torch.float16:
        v = normal(shape[-1], 40, dtype=dtype, seed=1)
        turned = torch.softmax(x.flip(-1), dim=-1) @ v.flip(0)
        assert_agrees("o", turned, attended, x, v)


def test_what_is_infinite_must_be_so_at_the_same_places():
    x = torch.full((3, 4), -math.inf, device=DEVICE)
    x[1] = normal(4)
    right = log_sum_exp(x)
    assert_agrees("lse", right, log_sum_exp, x)
    for found, message in (
        (torch.full_like(right, -math.inf), "-inf at (1,), expected a finite number"),
        (right.nan_to_num(neginf=0.0), "0.0 at (0,), expected -inf there"),
        (-right, "inf at (0,), expected -inf there"),
    ):
        with pytest.raises(AssertionError, match=re.escape(f"lse is {message}")):
            assert_agrees("lse", found, log_sum_exp, x)


# dtype, gains of q, k and v, scale: scores beyond the dtype, all of them below it,
# products that vanish in it, results of a few of its smallest numbers.
OVERFLOWING = [
    (torch.float16, 120.0, 120.0, 1.0, 3e-5),
    (torch.float16, -1e3, 1e3, 1.0, 1e-6),
    (torch.float16, 1e-4, 1e-4, 1.0, 1e8),
    (torch.float16, 1.0, 1.0, 2e-7, 0.25),
    (torch.float32, 1e20, 1e20, 1.0, 1e-40),
    (torch.float32, -1e20, 1e20, 1.0, 1e-40),
]


@pytest.mark.parametrize("dtype, q_gain, k_gain, v_gain, scale", OVERFLOWING)
def test_where_the_formula_fails_garbage_is_refused(
    dtype, q_gain, k_gain, v_gain, scale
):
    q, k, v = (normal(1, 1, T, 16, seed=seed) for seed, T in enumerate((7, 60, 60)))
    if q_gain < 0:  # so that all scores are below 0
        q, k = 1 + q.abs(), 1 + k.abs()
    tensors = [
        (x * gain).to(dtype) for x, gain in ((q, q_gain), (k, k_gain), (v, v_gain))
    ]
    for place in range(2):

        def formula(q, k, v, place=place):
            return standard.attention(q, k, v, scale=scale)[place]

        right = formula(*(x.double() for x in tensors)).to(dtype)
        assert_agrees("x", right, formula, *tensors)
        one_row = right.clone()
        one_row[0, 0, 3] *= 1.5
        for wrong in (0 * right, 1.5 * right, one_row):
            with pytest.raises(AssertionError, match="x is wrong in"):
                assert_agrees("x", wrong, formula, *tensors)


def test_what_overflows_in_the_dtype_is_infinite():
    x = torch.tensor([[1.0], [2e38]], device=DEVICE)
    assert_agrees("y", 3 * x, lambda x: 3 * x, x)
    with pytest.raises(
        AssertionError, match=r"^y is .* at \(1, 0\), expected inf there"
    ):
        assert_agrees("y", x.clamp(max=3.0), lambda x: 3 * x, x)


def test_a_formula_without_a_result_cannot_judge():
    x = torch.tensor([[1.0], [math.nan]], device=DEVICE)
    for found in (3 * x, torch.zeros_like(x)):
        with pytest.raises(ValueError, match="y: expected inputs that have a result"):
            assert_agrees("y", found, lambda x: 3 * x, x)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (2, 0, 3)])
def test_nothing_agrees_with_nothing(shape):
    x = torch.zeros(shape, device=DEVICE)
    assert_agrees("x", x.clone(), torch.exp, x)
    with pytest.raises(AssertionError, match="shape"):
        assert_agrees("x", torch.zeros(*shape, 1, device=DEVICE), torch.exp, x)


def test_a_single_number_and_inputs_that_are_no_tensors():
    x = normal(7)
    assert_agrees("sum", 2 * x.sum(), lambda x, factor: factor * x.sum(), x, 2)
    with pytest.raises(AssertionError, match="sum is wrong in 1 of 1 rows"):
        assert_agrees("sum", 2.01 * x.sum(), lambda x, factor: factor * x.sum(), x, 2)


X, V = normal(6, 50), normal(50, 8, seed=1)
MISTAKES = {
    "a key left out": lambda: attended(X[:, :-1], V[:-1]),
    "half precision on the way": lambda: attended(X.half().float(), V),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_nothing_changes(name):
    found, before, state = MISTAKES[name](), X.clone(), torch.get_rng_state()
    message = r"o is wrong in 6 of 6 rows, first in row \(0,\): its error is"
    with pytest.raises(AssertionError, match=message):
        assert_agrees("o", found, attended, X, V)
    assert torch.equal(X, before) and torch.equal(torch.get_rng_state(), state)


def test_one_wrong_row_among_good_ones_is_found():
    """In a small one, a thousandth of the others is far above its own rounding."""
    x = torch.tensor([1.0, 1.0, 1e-3, 1.0], device=DEVICE)[:, None] * normal(4, 30)
    for row, factor in ((0, 1 + 1e-4), (2, 1.1), (3, 1 + 1e-4)):
        found = 3 * x
        found[row] *= factor
        message = rf"y is wrong in 1 of 4 rows, first in row \({row},\):"
        with pytest.raises(AssertionError, match=message):
            assert_agrees("y", found, lambda x: 3 * x, x)


@pytest.mark.parametrize(
    "found, message",
    [
        ([[0.0]], "must be a tensor, got list"),
        (torch.zeros(1, 9, 3), "must have the shape .* got 3 dimensions"),
        (torch.zeros(8, 6), r"must have the shape \(6, 8\), got \(8, 6\)"),
        (torch.zeros(6, 8).double(), r"must be torch\.float32, got torch\.float64"),
        (torch.full((6, 8), math.nan),
         r"is nan at \(0, 0\), expected a finite number there"),
    ],
)  # fmt: skip
def test_what_is_no_result_at_all_is_named(found, message):
    found = found.to(DEVICE) if isinstance(found, torch.Tensor) else found
    with pytest.raises(AssertionError, match=f"^o {message}$"):
        assert_agrees("o", found, attended, X, V)


@triton.jit
def copy_kernel(x, y, first, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """y[:n] = x[first : first + n]."""
    i = tl.arange(0, BLOCK)
    inside = (i < n) | (not MASKED)
    tl.store(y + i, tl.load(x + first + i, mask=inside), mask=inside)


@triton.jit
def add_kernel(x, place):
    tl.atomic_add(x + place, 1.0)


@triton.jit
def swap_kernel(x, place):
    tl.atomic_cas(x + place, 0, 1)


def copy(x, y, first=0, n=None, masked=True):
    n = len(y) if n is None else n
    with bounds_checked():
        copy_kernel[(1,)](x, y, first, n, BLOCK=16, MASKED=masked)


def said(error):
    """The texts of an exception and its causes."""
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return "\n".join(texts)


interpreted = pytest.mark.skipif(
    not kernels.INTERPRETED, reason="on a GPU nothing is checked"
)


def test_accesses_inside_go_through():
    x, y = normal(40), torch.zeros(11, device=DEVICE)
    copy(x, y, first=29)
    assert torch.equal(y, x[29:])
    wide = normal(16, 3)
    # The kernel is not told the stride: it reads what lies there, within the view.
    copy(wide.T[1], y)
    assert torch.equal(y, wide.flatten()[1:12])
    with bounds_checked():
        add_kernel[(1,)](y, 10)
    assert y[10] == wide.flatten()[11] + 1


@interpreted
@pytest.mark.parametrize(
    "first, n, masked, access",
    [
        (30, 11, True,
         "load out of range: element 40 of x, which has elements 0 to 39"),
        (-1, 11, True,
         "load out of range: element -1 of x, which has elements 0 to 39"),
        (0, 12, True,
         "store out of range: element 11 of y, which has elements 0 to 10"),
        (0, 11, False,
         "store out of range: element 11 of y, which has elements 0 to 10"),
    ],
)  # fmt: skip
def test_an_access_outside_names_the_tensor(first, n, masked, access):
    x, y = normal(40), torch.zeros(11)
    with pytest.raises(Exception) as caught:
        copy(x, y, first, n, masked)
    assert f"IndexError: {access} (a mask is missing, or wrong)" in said(caught.value)
    assert (y == 0).all(), "nothing is stored by an access that is refused"


@interpreted
@pytest.mark.parametrize(
    "kernel, dtype", [(add_kernel, torch.float32), (swap_kernel, torch.int32)]
)
def test_atomic_operations_are_checked_too(kernel, dtype):
    x = torch.zeros(3, dtype=dtype)
    with bounds_checked() as seen:
        kernel[(1,)](x, 2)
    assert x.tolist() == [0, 0, 1] and seen.loaded == {0: 1}
    with pytest.raises(Exception) as caught, bounds_checked():
        kernel[(1,)](x, 3)
    assert "atomic operation out of range: element 3 of x" in said(caught.value)


@triton.jit
def block_kernel(x, y, n, size, DESCRIBED: tl.constexpr):
    """y[:n] = x[:n]; the block pointers and descriptors are told that n is size."""
    if DESCRIBED:
        rows = tl.make_tensor_descriptor(x, (size,), (1,), (16,))
        tl.make_tensor_descriptor(y, (n,), (1,), (16,)).store([0], rows.load([0]))
    else:
        source = tl.make_block_ptr(x, (size,), (1,), (0,), (16,), (0,))
        target = tl.make_block_ptr(y, (n,), (1,), (0,), (16,), (0,))
        block = tl.load(source, boundary_check=(0,), padding_option="zero")
        tl.store(target, block, boundary_check=(0,))


@interpreted
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.parametrize("described", [False, True])
def test_block_pointers_and_descriptors_are_checked_too(described):
    x, y = normal(11), torch.zeros(11)
    with bounds_checked() as seen:
        block_kernel[(1,)](x, y, 11, 11, described)
    assert torch.equal(x, y) and seen.loaded == {0: 11}
    with pytest.raises(Exception) as caught, bounds_checked():
        block_kernel[(1,)](x, y, 11, 12, described)
    assert "load out of range: element 11 of x" in said(caught.value)


@interpreted
def test_what_the_kernel_was_not_given_is_outside():
    """The neighbor in one allocation, and every element of an empty tensor."""
    for x, y, access in (
        (
            normal(20)[:10],
            torch.zeros(11),
            "element 10 of x, which has elements 0 to 9",
        ),
        (torch.zeros(0), torch.zeros(4), "load out of range"),
    ):
        with pytest.raises(Exception) as caught:
            copy(x, y)
        assert access in said(caught.value)
    copy(torch.zeros(0), torch.zeros(4), n=0)


@interpreted
def test_afterwards_nothing_is_checked():
    """Even where the context was left by an exception."""
    from triton.runtime import interpreter

    def state():
        builder, starts = interpreter.interpreter_builder, ("create_ma", "create_at")
        reach = [getattr(builder, n) for n in dir(builder) if n.startswith(starts)]
        return [*reach, interpreter.GridExecutor._init_args_hst]

    before = state()
    with bounds_checked():
        assert state() != before
        with bounds_checked():
            pass
        with pytest.raises(Exception):  # noqa: B017
            copy(normal(4), torch.zeros(5))
    assert state() == before


def test_numbers_that_are_held_are_counted_and_no_others():
    """The largest tensor, and an eighth of what is kept, in whatever objects."""
    numpy, tolist = torch.Tensor.numpy, torch.Tensor.tolist
    q, k = torch.rand(600, 6), torch.rand(600, 6)
    owned = OWN_BYTES // 64

    def tiles():
        for i, j in itertools.product(range(0, 600, 50), repeat=2):
            q[i : i + 50].numpy() @ k[j : j + 50].numpy().T

    def grown():
        return torch.empty(0).resize_(600, 600)

    def forgotten():  # until another context begins
        numpy(q) @ numpy(k).T
        with Largest():
            pass

    every, kept = 600 * 600, 600 * 600 // 8
    held = {
        tiles: (0, 100),
        lambda: (q.numpy(), k.numpy(), q[:9].tolist()): (0, 100),
        lambda: [np.zeros(10**4).sum() for _ in range(80)]: (0, 100),
        lambda: [torch.zeros(100) for _ in range(80)]: (1000, 1100),
        lambda: q @ k.T: (every, every),
        grown: (every, every),
        lambda: torch.tensor([[0.0] * 600] * 600): (every, every),
        lambda: torch.FloatTensor(600, 600): (every, every),
        forgotten: (kept / 2, kept),
        lambda: (numpy(q) @ numpy(k).T).sum(): (kept / 2, kept),
        lambda: np.float64(2) * (numpy(q) @ numpy(k).T): (kept, 2 * kept),
        lambda: (numpy(q) @ numpy(k).T)[:9]: (kept / 2, kept),
        lambda: (numpy(q) @ numpy(k).T).tolist(): (kept * 3, kept * 6),
        lambda: [tolist(k) for _ in range(100)]: (kept * 3, kept * 6),
        lambda: [x.item() for _ in range(10) for x in q.flatten()]: (kept / 3, kept),
    }
    for action, (least, most) in held.items():
        with Largest() as largest:
            action()
        assert least <= largest.numbers + owned and largest.numbers <= most
    with Largest() as outer, Largest() as inner:
        np.zeros(every)
    assert kept - owned <= inner.numbers <= outer.numbers <= kept


COUNTED = """
import sys, torch
from flashlib.exercise import Largest
with Largest() as largest:
    torch.zeros(6) + 1
print(largest.numbers, "torch._dynamo" in sys.modules)
"""


def test_counting_numbers_loads_no_compiler():
    done = run_python(COUNTED)
    assert done.stdout.split() == ["6", "False"], done.stderr
