"""Every small tensor that a public function takes may be a view: kernels read it by its
strides, or a contiguous copy.
"""

import pytest
import torch
from device import CUDA, DEVICE
from expected import same

import flashlib
from flashlib import masks, testing
from flashlib.masks import Mask, at
from flashlib.score_functions import Score, alibi

pytestmark = pytest.mark.usefixtures("nan_filled")

B, H, T, PAGE = 2, 2, 24, 16
OTHER = 7  # what is between the elements of a strided view


def strided(x):
    """x as every second column of a matrix, as every dimension of a view is strided."""
    return torch.stack([x, torch.full_like(x, OTHER)], dim=-1)[..., 0]


def expanded(x):
    """The first element of x, repeated with strides of 0."""
    return x.flatten()[0].expand(x.shape)


def numbers(*shape, low=0, high=None, dtype=torch.int32):
    """Random numbers, the same at each call: integers where there is a limit."""
    generator = torch.Generator().manual_seed(1)
    if high is None:
        return torch.rand(*shape, generator=generator).to(DEVICE)
    return torch.randint(low, high, shape, generator=generator).to(DEVICE, dtype)


def assert_same(found, wanted):
    """Every bit is the same, or on a GPU, where a kernel that is compiled for other
    strides may round otherwise, nearly so.
    """
    if not same(found, wanted):
        assert CUDA, (found, wanted)
        for x, y in zip(found, wanted, strict=True):
            assert (x - y).abs().max() < 1e-4


def lower(b, h, p, j, table):
    return at(table, b, h) <= j


def added(s, b, h, p, j, table):
    return s + at(table, h, p, j)


def of_added(s, b, h, p, j, table):
    return 1.0


def with_gradients(attend, *arguments, **options):
    """What a function returns, then the gradients of q, k and v, and of a bias and
    sinks.
    """
    learned = [options[name] for name in ("bias", "sinks") if name in options]
    learned = [x.requires_grad_() for x in (*arguments[:3], *learned)]
    o, lse = attend(*arguments, return_lse=True, **options)
    total = o.float().square().sum() + lse.sum()
    return o, lse, *torch.autograd.grad(total, learned)


def dense(dtype=torch.float32, d=16, **options):
    """A call of attention with these options."""
    made = testing.make_qkv(B, H, T, d, dtype=dtype, device=DEVICE)
    return with_gradients(flashlib.attention, *made, **options)


def plain(**options):
    return dense(**options)


def in_sixteen_bits(**options):
    return dense(dtype=torch.float16, d=64, **options)


def masked(score=None, **tensors):
    """A call whose masks and score read tensors."""
    mask = masks.documents(tensors["ids"]) | Mask(lower, tensors["table"])
    mask &= masks.padding(tensors["starts"], tensors["ends"])
    score = Score(added, score, derivative=of_added)
    return dense(mask=mask, score=score)


def chosen(ancestors, blocks, slopes):
    """A call with other masks and another score."""
    mask = masks.tree(ancestors) | masks.blocks(blocks, 8, 8)
    return dense(mask=mask, score=alibi(slopes))


def sdpa(attn_mask):
    q, k, v = testing.make_qkv(B, H, T, 16, device=DEVICE)
    return (flashlib.scaled_dot_product_attention(q, k, v, attn_mask),)


def varlen(cu_seqlens_q, cu_seqlens_k, **options):
    made = testing.make_qkv(1, H, T, 16, device=DEVICE)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in made)
    sequences = cu_seqlens_q, cu_seqlens_k, T, T
    return with_gradients(flashlib.attention_varlen, q, k, v, *sequences, **options)


def decode(mask=None, table=None, splits=1, dtype=torch.float32, **options):
    pages = 2 * B if "block_table" in options else B
    _, k, v = testing.make_qkv(pages, H, PAGE, 16, dtype=dtype, device=DEVICE)
    q, _, _ = testing.make_qkv(B, H, 2, 16, dtype=dtype, device=DEVICE)
    if "k_scales" in options:
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    if table is not None:
        options["score"] = Score(added, table)
    more = {"mask": mask, "splits": splits, "return_lse": True}
    return flashlib.decode(q, k, v, **more, **options)


def in_splits(**options):
    return decode(splits=2, **options)


def in_eight_bits(**options):
    return decode(dtype=torch.float16, **options)


def decode_latent(**options):
    dtype = torch.float16 if "scales" in options else torch.float32
    q, _, _ = testing.make_qkv(B, H, 2, 32, dtype=dtype, device=DEVICE)
    cache = numbers(2 * B, PAGE, 32).to(dtype)
    if "scales" in options:
        cache = cache.to(torch.float8_e4m3fn)
    how = {"d_c": 16, "scale": 0.2, "return_lse": True}
    return flashlib.decode_latent(q, cache, **how, **options)


def starts(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def lengths():
    return numbers(B, low=9, high=PAGE)


def table():
    return torch.arange(2 * B, dtype=torch.int32, device=DEVICE).view(B, 2)


CALLS = {
    plain: {
        "alibi_slopes": numbers(B, H), "bias": numbers(B, H, T, T), "sinks": numbers(H),
        "mask": numbers(B, H, T, T, high=2) > 0, "dropout": 0.2,
        "seed": numbers(1, high=99, dtype=torch.int64),
    },
    in_sixteen_bits: {
        "alibi_slopes": numbers(H), "sinks": numbers(H),
        "mask": numbers(B, H, T, T, high=2) > 0,
    },
    masked: {
        "ids": numbers(B, T, high=2), "table": numbers(B, H, high=T),
        "starts": numbers(B, high=9), "ends": numbers(B, low=15, high=T),
        "score": numbers(H, T, T),
    },
    chosen: {
        "ancestors": numbers(T, T, high=2) > 0, "blocks": numbers(B, H, 3, 3) > 0.5,
        "slopes": numbers(H),
    },
    sdpa: {"attn_mask": numbers(B, H, T, T)},
    varlen: {
        "cu_seqlens_q": starts(0, 9, T), "cu_seqlens_k": starts(0, 13, T),
        "alibi_slopes": numbers(B, H), "sinks": numbers(H),
    },
    decode: {
        "seq_lens": lengths(), "sinks": numbers(H), "table": numbers(H, PAGE, PAGE),
        "mask": numbers(B, H, 2, PAGE, high=2) > 0,
    },
    in_splits: {
        "seq_lens": lengths() + PAGE, "sinks": numbers(H), "block_table": table(),
    },
    in_eight_bits: {
        "seq_lens": lengths(), "k_scales": numbers(B, H, PAGE),
        "v_scales": numbers(B, H, PAGE),
    },
    decode_latent: {
        "seq_lens": lengths() + PAGE, "block_table": table(),
        "scales": numbers(2 * B, PAGE, 2),
    },
}  # fmt: skip
# Repeated starts would say that all sequences are empty.
VIEWS = [
    pytest.param(
        call, name, view, id=f"{call.__name__}-{name}-{view.__name__}",
        marks=() if view is strided or name == "sinks" else pytest.mark.slow,
    )
    for call, arguments in CALLS.items()
    for name, x in arguments.items()
    for view in (strided, expanded)
    if isinstance(x, torch.Tensor) and (view is strided or "cu_seqlens" not in name)
]  # fmt: skip


def viewed(x, view):
    """A new tensor as a view, and a contiguous copy of it."""
    x = view(x)
    return x, x.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize(("call", "name", "view"), VIEWS)
def test_a_view_counts_as_its_copy(call, name, view):
    arguments = CALLS[call]
    x, copied = viewed(arguments[name], view)
    found = call(**arguments | {name: x})
    assert_same(found, call(**arguments | {name: copied}))


def some_slow(call):
    """The first calls are quick enough for every run."""
    marks = () if call in list(CALLS)[:2] else pytest.mark.slow
    return pytest.param(call, id=call.__name__, marks=marks)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("call", [some_slow(call) for call in CALLS])
def test_views_under_the_compiler(call):
    """All tensors of a call, traced."""
    views, copies = dict(CALLS[call]), dict(CALLS[call])
    for name, x in views.items():
        if isinstance(x, torch.Tensor):
            views[name], copies[name] = viewed(x, strided)
    compiled = torch.compile(call, backend="eager")
    assert_same(compiled(**views), call(**copies))
