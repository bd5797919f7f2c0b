"""Masks, scores and sinks in decoding, against the reference."""

import pytest
import torch
from caches import make
from cases import case_name, spread
from device import CUDA, DEVICE
from expected import refused
from masks_of_tests import far, striped
from scores_of_tests import cubed, softplus

import flashlib
from flashlib import masks, testing
from flashlib.masks import Mask
from flashlib.reference import decoding as reference
from flashlib.score_functions import Score, alibi, softcap

pytestmark = pytest.mark.usefixtures("nan_filled")

LEVELS = {
    "lengths": ((17, 0), (64, 1), (130,), (70, 203), (5, 113, 64)),
    "T_q": (1, 2, 5),
    "heads": ((2, 2), (6, 2), (7, 1)),
    "page": (None, 16, 32, 256),
    "splits": (1, 2, 5, "auto"),
    "window": (None, None, (40, 0)),
    "mask": (None, "window", "striped", "padding", "documents", "tensor", "both"),
    "sinks": (False, True),
    "softcap": (None, None, 1.5),
    "score": (None, "alibi", "cube", "softplus"),
    "dtype": ("float32", "float16", "bfloat16"),
}


def mask_named(kind, q, lengths, capacity, generator):
    """A mask for queries against a cache; "tensor" is a boolean one."""

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator).to(DEVICE)

    B, _, T_q, _ = q.shape
    ids = numbers(0, 3, B, capacity)
    return {
        None: lambda: None,
        "window": lambda: masks.window(20, 3) & masks.causal(),
        "striped": lambda: Mask(striped, 4),
        "padding": lambda: masks.padding(numbers(0, 9, B), numbers(9, 99, B)),
        "documents": lambda: masks.documents(ids),
        "tensor": lambda: numbers(0, 3, B, 1, T_q, capacity) > 0,
        "both": lambda: masks.window(33, 0) & (Mask(far, 4) | masks.documents(ids)),
    }[kind]()


def score_named(kind, H):
    """A score for this many heads."""
    return {
        None: lambda: None,
        "alibi": lambda: alibi(torch.linspace(0.0, 0.1, H, device=DEVICE)),
        "cube": lambda: Score(cubed, 0.05),
        "softplus": lambda: Score(softplus, 3),
    }[kind]()


CASES = spread(LEVELS, seed=0, count=28)
CASES += [
    pytest.param(case, marks=[pytest.mark.slow])
    for case in spread(LEVELS, seed=1, count=600 if CUDA else 112)
]


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_within_the_budget(case):
    (H, H_kv), lengths = case["heads"], case["lengths"]
    dtype, page = getattr(torch, case["dtype"]), case["page"]
    q, cache = make(lengths, H, H_kv, case["T_q"], page=page, dtype=dtype)
    generator = torch.Generator().manual_seed(len(str(case)))
    capacity = cache.k.shape[2] * (cache.block_table.shape[1] if page else 1)
    options = {x: case[x] for x in ("window", "softcap")}
    options["score"] = score_named(case["score"], H)
    if case["sinks"]:
        options["sinks"] = torch.randn(H, generator=generator).to(DEVICE)
    mask = mask_named(case["mask"], q, lengths, capacity, generator)
    o, lse = flashlib.decode(
        q, cache.k, cache.v, seq_lens=cache.seq_lens, block_table=cache.block_table,
        splits=case["splits"], mask=mask, return_lse=True, **options,
    )  # fmt: skip
    wide = [x.double() for x in (q, cache.k, cache.v)]
    exact = reference.attention(
        *wide, cache.seq_lens, block_table=cache.block_table, splits=3, mask=mask,
        **options,
    )  # fmt: skip
    for b, length in enumerate(lengths):
        one, (k, v) = slice(b, b + 1), cache.rows(b)
        options["mask"] = mask
        if isinstance(mask, torch.Tensor):
            options["mask"] = mask[one, ..., :length]
        elif mask is not None:
            sizes = 1, H, q.shape[2], length, q.device
            options["mask"] = mask.visible(*sizes, batch=b)
        own = q[one], k, v, o[one], lse[one]
        testing.assert_within_budget(*own, causal=True, batch=b, **options)
        found = testing.oracle(*own[:3], causal=True, batch=b, **options)
        for x, y in zip(exact, found, strict=True):
            torch.testing.assert_close(x[one], y)


def test_a_window_reads_only_its_keys():
    """As a mask too, also with others; keys and pages before it may be anything."""
    for page in (None, 16):
        q, cache = make((150, 90), T_q=2, page=page)
        how = {"seq_lens": cache.seq_lens, "block_table": cache.block_table}
        documents = masks.documents(torch.zeros(2, 1, dtype=torch.int64, device=DEVICE))
        window = masks.window(20, 0)
        calls = {"window": (20, 0)}, {"mask": window}, {"mask": window & documents}
        wanted = flashlib.decode(q, cache.k, cache.v, **how, window=(20, 0))
        for x in (cache.k, cache.v):
            if page is None:
                x[0, :, : 150 - 22] = x[1, :, : 90 - 22] = torch.nan
        if page is not None:
            cache.block_table[0, : (150 - 22) // 16] = -(2**30)
            cache.block_table[1, : (90 - 22) // 16] = -(2**30)
        for changes in calls:
            o = flashlib.decode(q, cache.k, cache.v, **how, **changes)
            torch.testing.assert_close(o, wanted)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_sink_is_counted_once(splits):
    """A query that sees no key has the sink alone, and L is a."""
    q, cache = make((70, 0))
    sinks = torch.tensor([0.5, -1.0, 3.0, -torch.inf], device=DEVICE)
    o, lse = flashlib.decode(
        q, cache.k, cache.v, seq_lens=cache.seq_lens, splits=splits, sinks=sinks,
        return_lse=True,
    )  # fmt: skip
    assert not o[1].any() and torch.equal(lse[1, :3, 0], sinks[:3])
    without, lse_0 = flashlib.decode(
        q, cache.k, cache.v, seq_lens=cache.seq_lens, return_lse=True
    )
    share = torch.sigmoid(lse_0[0] - sinks[:, None])
    torch.testing.assert_close(o[0], without[0] * share[..., None])
    torch.testing.assert_close(lse[0], torch.logaddexp(lse_0[0], sinks[:, None]))


def test_wrong_changes_are_refused():
    q, cache = make((70, 9))
    how = {"seq_lens": cache.seq_lens}
    wide, learned = (torch.ones(2, 1, 1, 70, device=DEVICE) for _ in range(2))
    ids = torch.zeros(1, 70, dtype=torch.int64, device=DEVICE)
    for changes, message in (
        ({"mask": 3}, "mask: expected a flashlib.masks.Mask, a boolean tensor or None"),
        ({"mask": wide}, "mask: expected dtype torch.bool, got torch.float32"),
        ({"mask": wide[..., 1:] > 0}, r"mask: .* broadcast to .* = \[2, 4, 1, 70\], "),
        ({"mask": masks.documents(ids)}, r"mask: expected ids \[B, T_k\], at least"),
        ({"sinks": [1.0]}, "sinks: expected a torch.Tensor, got list"),
        ({"sinks": learned[0, 0, 0, :3]}, r"sinks: expected \[H\] with H = 4, got"),
        ({"softcap": 0}, "softcap: expected a number from 1e-30 to"),
        ({"softcap": "a"}, "softcap: expected a real number or None, got str"),
        ({"score": 3}, "score: expected a flashlib.score_functions.Score or None, got"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            flashlib.decode(q, cache.k, cache.v, **how, **changes)
    sinks = torch.zeros(4, device=DEVICE, requires_grad=True)
    score = Score(cubed, 0.05)  # without a derivative, which nobody needs
    for x, changes in ((q, {"sinks": sinks}), (q.requires_grad_(), {"score": score})):
        o = flashlib.decode(x, cache.k, cache.v, **how, **changes)
        with refused(NotImplementedError, "flashlib.decode: it has no gradient"):
            o.sum().backward()


def test_compiled_calls():
    q, cache = make((70, 9), page=16)
    ids = torch.arange(80, device=DEVICE).expand(2, -1) // 9
    sinks = torch.zeros(4, device=DEVICE)

    def decode(q, ids):
        mask = masks.documents(ids) | masks.prefix(2)
        score = alibi(sinks + 0.1).then(softcap(3.0))
        return flashlib.decode(
            q, cache.k, cache.v, seq_lens=cache.seq_lens, splits=2, softcap=5.0,
            block_table=cache.block_table, mask=mask, sinks=sinks, score=score,
        )  # fmt: skip

    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, ids), decode(q, ids))
    assert torch.equal(decode(q, ids), decode(q, ids))
