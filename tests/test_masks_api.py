"""Windows, softcap, ALiBi and packed sequences through the public functions."""

import pytest
import torch
from cases import slopes
from device import DEVICE, each_backend
from expected import refused, same

import flashlib
from flashlib import checks, testing
from flashlib.plain_checks import UNLIMITED

pytestmark = pytest.mark.usefixtures("nan_filled")


def small(**changes):
    sizes = {"T_k": 12, "H_kv": 2, "device": DEVICE} | changes
    return testing.make_qkv(1, 4, 9, 16, **sizes)


def floats(*shape, **changes):
    return torch.ones(*shape, **{"device": DEVICE} | changes)


seen = torch.ones(50, 50, dtype=torch.bool)
WRONG = [
    ({"softcap": 0}, ValueError,
     r"softcap: expected a number from 1e-30 to 1e\+30, got 0.0"),
    ({"softcap": 1e-40}, ValueError,
     "softcap: expected a number from 1e-30 .* got 1e-40"),
    ({"softcap": 1e31}, ValueError,
     r"softcap: expected a number from 1e-30 .* got 1e\+31"),
    ({"softcap": 1e-9, "scale": -1e30}, ValueError,
     "softcap: expected a number from 1e-07 .* got 1e-09"),
    ({"softcap": "5"}, TypeError, "softcap: expected a real number or None, got str"),
    ({"alibi_slopes": [1.0]}, TypeError, "alibi_slopes: expected a torch.Tensor, got"),
    ({"alibi_slopes": floats(4, dtype=torch.float64)}, TypeError,
     "alibi_slopes: expected dtype torch.float32, got torch.float64"),
    ({"alibi_slopes": floats(3)}, ValueError,
     r"alibi_slopes: expected \[H\] or \[B, H\] with B = 1, H = 4, got \[3\]"),
    ({"alibi_slopes": floats(4, device="meta")}, ValueError,
     "alibi_slopes: expected the device of q, .*, got meta"),
    ({"alibi_slopes": floats(4, requires_grad=True)}, ValueError,
     "alibi_slopes: expected constants, .* got requires_grad=True"),
    ({"window": (1, 1), "method": "standard"}, ValueError,
     "window: expected None for method 'standard'"),
    ({"mask": seen, "method": "flash1"}, ValueError,
     r"mask: expected None for method 'flash1', got \[50, 50\] of torch.bool"),
    ({"causal": seen}, TypeError,
     r"causal: expected True or False, got \[50, 50\] of torch.bool"),
]  # fmt: skip


@pytest.mark.parametrize("changes, error, message", WRONG)
def test_wrong_argument_gets_one_clear_line(changes, error, message):
    with refused(error, message):
        flashlib.attention(*small(), **changes)


def starts(*values, dtype=torch.int32, device=DEVICE):
    return torch.tensor(values, dtype=dtype, device=device)


WRONG_PACKING = [
    ({"cu_seqlens_q": [0, 9]}, TypeError,
     "cu_seqlens_q: expected a torch.Tensor, got list"),
    ({"cu_seqlens_k": starts(0, 9, dtype=torch.int64)}, TypeError,
     "cu_seqlens_k: expected dtype torch.int32, got torch.int64"),
    ({"cu_seqlens_k": starts(0, 9, device="meta")}, ValueError,
     "cu_seqlens_k: expected the device of q"),
    ({"cu_seqlens_q": starts()}, ValueError,
     r"cu_seqlens_q: expected \[B \+ 1\], got \[0\]"),
    ({"cu_seqlens_k": starts(0, 5, 9)}, ValueError,
     r"cu_seqlens_k: expected the shape of cu_seqlens_q, \[2\], got \[3\]"),
    ({"cu_seqlens_q": starts(1, 9)}, ValueError,
     r"cu_seqlens_q: expected 0 first, 9 \(the rows of q\) last .* got 1 at index 0"),
    ({"cu_seqlens_k": starts(0, 8)}, ValueError, "cu_seqlens_k: .* got 8 at index 1"),
    ({"cu_seqlens_q": starts(0, 8, 7, 9), "cu_seqlens_k": starts(0, 1, 2, 9)},
     ValueError,
     "cu_seqlens_q: .* no decrease, got 7 at index 2"),
    ({"max_seqlen_k": 8}, ValueError,
     "max_seqlen_k: expected at least 9, the longest sequence, got 8"),
    ({"max_seqlen_q": 9.0}, TypeError, "max_seqlen_q: expected an integer, got"),
    ({"q": floats(1, 4, 9, 16)}, ValueError,
     r"q: expected 3 dimensions \[total, H, d\], got 4: \[1, 4, 9, 16\]"),
    ({"alibi_slopes": floats(2, 4)}, ValueError,
     "alibi_slopes: expected .* B = 1, H = 4, got"),
    ({"causal": 1}, TypeError, "causal: expected True or False, got 1"),
]  # fmt: skip


def test_a_bound_beyond_all_rows_starts_no_more_blocks():
    """On a GPU 2^40 rows would be more blocks than a launch can have."""
    q, k, _ = (x[0].transpose(0, 1) for x in small())
    cu_q, cu_k = starts(0, 4, 9), starts(0, 12, 12)
    packing = checks.check_sequences(q, k, cu_q, cu_k, 2**40, 2**40)
    assert packing[2:] == (9, 12)


@pytest.mark.parametrize("changes, error, message", WRONG_PACKING)
def test_wrong_packing_gets_one_clear_line(changes, error, message):
    arguments = {"q": floats(9, 4, 16), "k": floats(9, 2, 16), "v": floats(9, 2, 16)}
    arguments |= {"cu_seqlens_q": starts(0, 9), "cu_seqlens_k": starts(0, 9)}
    arguments |= {"max_seqlen_q": 9, "max_seqlen_k": 9}
    with refused(error, message):
        flashlib.attention_varlen(**arguments | changes)


def test_autocast_casts_packed_inputs():
    q, k, v = (floats(9, 2, 16, requires_grad=True) for _ in range(3))
    with torch.autocast(DEVICE, dtype=torch.float16):
        cu = starts(0, 9)
        o = flashlib.attention_varlen(q, k, v, cu, cu, 9, 9, softcap=3)
    assert o.dtype == torch.float16
    assert torch.autograd.grad(o.float().sum(), q)[0].dtype == torch.float32


@each_backend
def test_torch_compile_without_a_graph_break(backend):
    q, k, v = small(requires_grad=True)
    packing = testing.packing_of((4, 5), (8, 4), DEVICE)

    def loss(q, k, v):
        changes = {"window": (3, 1), "softcap": 2.0, "alibi_slopes": slopes(4)}
        dense = flashlib.attention(q, k, v, **changes)
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        packed = flashlib.attention_varlen(*rows, *packing, causal=True)
        return dense.sum() + packed.sum()

    torch.compiler.reset()
    plain = loss(q, k, v)
    fused = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    compiled = fused(q, k, v)
    gradients = [torch.autograd.grad(x, (q, k, v)) for x in (plain, compiled)]
    if backend == "aot_eager":
        assert torch.equal(plain, compiled)
        assert same(*gradients)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_compiled_call_reads_the_longest_length():
    """.item() has no value while it is traced."""
    torch.compiler.reset()

    def call(x, starts):
        longest = starts.diff().max().item()
        return flashlib.attention_varlen(x, x, x, starts, starts, longest, longest)

    x, compiled = floats(5, 2, 16), torch.compile(call, backend="eager", fullgraph=True)
    for lengths in (starts(0, 2, 5), starts(0, 5, 5)):
        assert torch.equal(compiled(x, lengths), call(x, lengths))


def test_errors_of_packed_sequences_name_their_function():
    x, cu = floats(5, 2, 16, requires_grad=True), starts(0, 2, 5)

    def call(x):
        return flashlib.attention_varlen(x, x, x, cu, cu, 3, 3)

    (dx,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    named = r"flashlib\.attention_varlen: "
    with pytest.raises(NotImplementedError, match=named + "double backward"):
        dx.sum().backward()
    with pytest.raises(NotImplementedError, match=named + "torch.func"):
        torch.func.grad(lambda x: call(x).sum())(x.detach())


@pytest.mark.parametrize("of_packed", [False, True], ids=["dense", "packed"])
def test_custom_ops_are_registered_properly(of_packed):
    leaves = small(requires_grad=True)
    packing = (None, None, 0, 0)
    if of_packed:
        leaves = [x[0].transpose(0, 1).detach().requires_grad_() for x in leaves]
        packing = tuple(testing.packing_of((4, 5), (8, 4), DEVICE))
    mask = flashlib.masks.padding(*torch.tensor([[0, 1], [3, 9]], device=DEVICE))
    bias = None if of_packed else floats(1, 4, 1, 12, requires_grad=True)
    more = bias, floats(4, requires_grad=True), slopes(4)
    options = (2, UNLIMITED, 1.5, 0.25, mask.key, *mask.depends, "", False, 0.5)
    options = (*options, not of_packed, "auto")
    rest, longest = torch.tensor([3], device=DEVICE), packing[2:]
    rest = *packing[:2], rest, *mask.tensors(), *(None,) * 9
    arguments = (*leaves, *more, *rest, *longest, *options)
    # The rest is compiled above.
    utils = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.flashlib.masked, arguments, test_utils=utils)
    o, lse = (x.detach() for x in torch.ops.flashlib.masked(*arguments))
    leaves, more = (
        [x if x is None else x.detach() for x in some] for some in (leaves, more)
    )
    inputs = (*leaves, *more, *rest, o, lse, o, lse)
    torch.library.opcheck(
        torch.ops.flashlib.masked_backward,
        (*inputs, *longest, *options),
        test_utils=utils,
    )


@pytest.mark.gpu
def test_cuda_graph_of_packed_sequences():
    """Nothing in the graph is fixed but the maxima."""
    q, k, v = (
        torch.randn(256, 4, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)
    )
    cu, other = starts(0, 100, 256), starts(0, 17, 256)
    calls = {"max_seqlen_q": 256, "max_seqlen_k": 256, "causal": True}
    flashlib.attention_varlen(q, k, v, cu, cu, **calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashlib.attention_varlen(q, k, v, cu, cu, **calls)
    cu.copy_(other)
    graph.replay()
    assert torch.equal(
        captured, flashlib.attention_varlen(q, k, v, other, other, **calls)
    )
