"""Absorbed latent attention in the kernel for Hopper: on a GPU against float64, and
without one its roles as threads, and which calls it refuses.
"""

import math

import pytest
import torch
from cases import spread
from device import DEVICE, on_cpu, on_hopper
from expected import same
from latents import Cache, judge, make
from roles import Threads

import flashlib
from flashlib import plans
from flashlib.kernels import gluon_forward, hopper_absorbed, hopper_host, latent

D, D_C = hopper_host.ABSORBED
SCALE = 192**-0.5
WIDTHS = {"d_c": D_C, "d_r": D - D_C}


def decode(q, cache, splits=1, scale=SCALE, method="hopper"):
    return flashlib.decode_latent(
        q, cache.rows, d_c=D_C, scale=scale, seq_lens=cache.seq_lens,
        block_table=cache.block_table, splits=splits, method=method, return_lse=True,
    )  # fmt: skip


def cached(lengths, H, T_q=1, page=64, dtype=torch.bfloat16, inside=False, **changes):
    """Queries and a cache that the kernel takes, contiguous or inside a larger one."""
    q, cache = make(lengths, H, T_q, **WIDTHS, page=page, dtype=dtype, **changes)
    rows = cache.rows.contiguous()
    if inside:
        pages, T, _ = rows.shape
        larger = rows.new_full((pages + 1, T + 3, D + 16), math.nan)
        rows = larger[1:, :T, 8:-8].copy_(rows)
    return q, cache._replace(rows=rows)


# The ends of blocks and pages, sequences without rows and with fewer than queries, more
# splits than blocks.
LEVELS = {
    "lengths": (
        (64, 0), (63, 65, 1), (128,), (1000, 129), (5, 257, 192), (2500, 3, 4096),
    ),
    "T_q": (1, 2, 5),
    "H": (16, 128, 1, 5, 64, 70),
    "page": (64, None, 128, 256),
    "splits": (1, "auto", 2, 7, 64),
    "dtype": (torch.bfloat16, torch.float16),
    "layout": ("contiguous", "transposed", "packed", "strided", "unaligned"),
    "inside": (False, True),
    "magnitude": (1.0, 60.0),
    "scale": (SCALE, 0.0, -0.25),
}  # fmt: skip


@on_hopper
@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("case", spread(LEVELS, seed=0, count=60), ids=str)
def test_within_the_budget(case):
    case = dict(case)
    splits, scale = case.pop("splits"), case.pop("scale")
    q, cache = cached(**case)
    before = q.clone()
    o, lse = decode(q, cache, splits, scale)
    judge(q, cache, o, lse, D_C, scale)
    assert same((q, decode(q, cache, splits, scale)[0]), (before, o))


@on_hopper
@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("page", [None, 64, 256])
@pytest.mark.parametrize("splits", [1, 3])
def test_sequences_without_rows_and_with_fewer_rows_than_queries(page, splits):
    q, cache = cached((0, 2, 0), 5, T_q=4, page=page)
    o, lse = decode(q, cache, splits)
    judge(q, cache, o, lse, D_C, SCALE)
    assert (o[::2] == 0).all() and (lse[::2] == -math.inf).all()
    assert (o[1, :, :2] == 0).all() and (lse[1, :, :2] == -math.inf).all()


@on_hopper
@pytest.mark.parametrize("splits", [1, 5])
def test_pages_of_any_size_in_any_order_give_the_same_bits(splits):
    lengths = 1500, 37, 640
    q, cache = cached(lengths, 128, page=None)
    first = decode(q, cache, splits)
    for page in hopper_host.ABSORBED_PAGES:
        _, pages = cached(lengths, 128, page=page)
        for b, length in enumerate(lengths):
            places = pages.block_table[b].long()
            for j in range(0, length, page):
                end = min(page, length - j)
                pages.rows[places[j // page], :end] = cache.rows[b, j : j + end]
        assert same(decode(q, pages, splits), first)


@on_hopper
@pytest.mark.parametrize("value", [-200.0, 200.0])
def test_every_score_is_equal_and_large(value):
    """O is the mean of the latents, and L the score plus ln T."""
    q, cache = cached((300,), 16)
    q, rows = torch.ones_like(q), torch.ones_like(cache.rows)
    cache = cache._replace(rows=rows)
    o, lse = decode(q, cache, 3, value / D)
    judge(q, cache, o, lse, D_C, value / D)


@on_hopper
def test_offsets_beyond_int32():
    """The last page begins 2^31 elements after the first one."""
    pages = 2**31 // (64 * D) + 2
    rows = torch.empty(pages, 64, D, dtype=torch.bfloat16, device=DEVICE)
    q, near = cached((128,), 16)
    table = torch.tensor([[pages - 1, 0]], dtype=torch.int32, device=DEVICE)
    rows[table[0].long()] = near.rows[near.block_table[0, :2].long()]
    far = Cache(rows, near.seq_lens, table)
    assert same(decode(q, far), decode(q, near))


# (H, T_q, lengths, page, splits): many programs of few blocks, which follow so fast
# that a late read meets the next, and few programs of many.
REPEATED = (
    (128, 1, (64,) * 300, 64, 1), (16, 3, (200, 70) * 64, 128, 2),
    (128, 1, (4096, 4000) * 16, 64, 2), (16, 1, (65_536,), 64, "auto"),
)  # fmt: skip


def differ(H, T_q, lengths, page, splits, repeats):
    """Whether any of the repeats differs from the first call, which is judged."""
    q, cache = cached(lengths, H, T_q, page)
    o, lse = decode(q, cache, splits)
    for b in (0, len(lengths) - 1):
        one = slice(b, b + 1)
        table = None if page is None else cache.block_table[one]
        own = Cache(cache.rows, cache.seq_lens[one], table)
        some = min(16, H)
        judge(q[one, :some], own, o[one, :some], lse[one, :some], D_C, SCALE)
    differs = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(repeats):
        again, lse_again = decode(q, cache, splits)
        differs |= (again != o).any() | (lse_again != lse).any()
    return bool(differs)


@on_hopper
@pytest.mark.parametrize("problem", REPEATED, ids=lambda x: f"{x[:2]}-{x[3:]}")
def test_repeats_agree_in_every_bit(problem):
    assert not differ(*problem, repeats=30)


@on_hopper
@pytest.mark.slow
@pytest.mark.parametrize("problem", REPEATED, ids=lambda x: f"{x[:2]}-{x[3:]}")
def test_1000_repeats_agree_in_every_bit(problem):
    assert not differ(*problem, repeats=1000)


@on_hopper
def test_both_methods_agree_and_auto_is_hoppers():
    q, cache = cached((300, 1000), 16)
    found, other = decode(q, cache), decode(q, cache, method="latent")
    assert all(map(torch.allclose, found, other, [1e-2] * 2, [1e-2] * 2))
    assert same(decode(q, cache, method="auto"), found)


# -- without a GPU

# (lengths, H, T_q, page, splits): one block, several, more splits than blocks, two
# tiles of queries.
THREADS = (
    ((70, 0), 5, 1, 64, 2), ((1, 129), 3, 2, None, 3), ((520,), 2, 3, 64, 1),
    ((700,), 33, 2, 128, 1), ((256, 70), 16, 3, 256, 5),
)  # fmt: skip
ROLES = (
    "own_task", "page_of_block", "produce", "start_output", "scaled_rows", "attend",
    "store_output", "weigh", "add", "absorbed_kernel",
    # of gluon_forward
    "make_ring", "tile_in", "coordinates", "copy", "refill", "release", "start_scores",
    "thread_sums", "log_sum_exp",
)  # fmt: skip


@on_cpu
@pytest.mark.parametrize("case", THREADS, ids=str)
def test_the_roles_as_threads(case, monkeypatch):
    """Barriers, phases, slots, pages and sums, whatever the order of the roles."""
    lengths, H, T_q, page, splits = case
    names = vars(gluon_forward) | vars(hopper_absorbed)
    kernel = Threads("absorbed_kernel", ROLES, names)
    monkeypatch.setattr(hopper_absorbed, "absorbed_kernel", kernel)
    monkeypatch.setattr(plans, "PLANS", {})
    changes = {"layout": "transposed", "inside": H % 2 == 1}
    q, cache = cached(lengths, H, T_q, page, torch.float16, **changes)
    how = cache.rows, cache.seq_lens, cache.block_table, splits, D_C
    for scale in (SCALE, -0.1):
        o, lse = hopper_absorbed.forward(q, *how, scale)
        judge(q, cache, o, lse, D_C, scale)
    assert kernel.programs == 2 * len(lengths) * math.ceil(H * T_q / 64) * splits


@pytest.fixture
def as_if_on_hopper(monkeypatch):
    """Every tensor fits, and the Triton kernel runs in place of this one."""
    calls, ran = [], latent.forward

    def spied(name):
        return lambda *x: calls.append(name) or ran(*x)

    monkeypatch.setattr(plans, "PLANS", {})
    monkeypatch.setattr(hopper_host, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hopper_absorbed, "forward", spied("hopper"))
    monkeypatch.setattr(latent, "forward", spied("latent"))
    return calls


@on_cpu
def test_the_method_chooses_the_kernel(as_if_on_hopper):
    q, cache = cached((70, 5), 2, dtype=torch.float16)
    for method in ("auto", "latent", "hopper"):
        judge(q, cache, *decode(q, cache, method=method), D_C, SCALE)
    assert as_if_on_hopper == ["hopper", "latent", "hopper"]


@on_cpu
@pytest.mark.parametrize(
    "message, changes",
    [
        ("float16 or bfloat16, got torch.float32", {"dtype": torch.float32}),
        ("pages of 64, 128, 256 rows, got 32", {"page": 32}),
        ("d_c = 512 next to 64 rotary columns, got d_c = 512 next to 32", {"d_r": 32}),
        ("cache with last stride 1, the other strides .* got strides",
         {"layout": "unaligned"}),
    ],
)  # fmt: skip
def test_a_refusal_says_what_the_kernel_cannot_take(message, changes, as_if_on_hopper):
    given = WIDTHS | {"page": 64, "dtype": torch.float16} | changes
    q, cache = make((70,), 2, **given)
    with pytest.raises(ValueError, match=rf"^method: 'hopper' expected {message}"):
        decode(q, cache)
    assert as_if_on_hopper == []


@on_cpu
def test_no_other_device_runs_it():
    q, cache = cached((70,), 2, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^method: 'hopper' expected a Hopper GPU"):
        decode(q, cache)
    with pytest.raises(ValueError, match=r"^method: expected one of .* latent"):
        decode(q, cache, method="flash2")


def test_empty():
    for B, H, T_q, T in ((0, 2, 1, 5), (1, 2, 0, 3), (2, 2, 1, 0)):
        q = torch.zeros(B, H, T_q, D, dtype=torch.float16, device=DEVICE)
        rows = torch.zeros(B, T, D, dtype=torch.float16, device=DEVICE)
        lengths = torch.full((B,), T, dtype=torch.int32, device=DEVICE)
        o, lse = hopper_absorbed.forward(q, rows, lengths, None, 0, D_C, SCALE)
        assert o.shape == (B, H, T_q, D_C) and (o == 0).all()
        assert lse.shape == (B, H, T_q) and (lse == -math.inf).all()


@pytest.mark.parametrize(
    "B, H, T, splits",
    [
        (32, 128, 4096, 2), (64, 128, 8192, 1), (128, 128, 16_384, 1),
        (64, 16, 8192, 2), (1, 16, 65_536, 128), (1, 128, 65_536, 64),
        (1, 16, 64, 1), (1, 16, 0, 1),
    ],
)  # fmt: skip
def test_the_splits_fill_the_multiprocessors(B, H, T, splits, monkeypatch):
    class H200:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    q = torch.empty(B, H, 1, D, dtype=torch.float16, device="meta")
    assert hopper_absorbed.choose_splits(q, T) == splits
