"""Decoding against the reference: what is computed, and which keys are read."""

import math
import random
from collections import Counter

import pytest
import torch
from caches import Cache, make
from cases import case_name, far_apart, spread
from device import CUDA, DEVICE
from expected import refused, same, with_id

import flashlib
from flashlib import plans, testing
from flashlib.kernels import INTERPRETED, decoding
from flashlib.plain_checks import UNLIMITED
from flashlib.reference import decoding as reference
from flashlib.reference import online

pytestmark = pytest.mark.usefixtures("nan_filled")


def run(q, cache, splits=1, left=UNLIMITED, scale=None):
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return decoding.forward(
        q, cache.k, cache.v, cache.seq_lens, cache.block_table, splits, left, scale
    )


def judge(q, cache, o, lse, left=UNLIMITED, scale=None):
    """Every sequence against the budget."""
    window = None if left == UNLIMITED else (left, None)
    options = {"causal": True, "window": window, "scale": scale}
    for b in range(q.shape[0]):
        one = slice(b, b + 1)
        k, v = cache.rows(b)
        testing.assert_within_budget(q[one], k, v, o[one], lse[one], **options)


LEVELS = {
    "lengths": ((17, 0), (64, 1), (130,), (70, 203), (5, 113, 64)),
    "T_q": (1, 2, 5),
    "heads": ((2, 2), (6, 2), (7, 1), (16, 1)),
    "d": (16, 40, 64, 72, 80, 111, 128, 256),
    "d_v": (None, 24, 80),
    "page": (None, 16, 32, 64, 256),
    "splits": (1, 2, 5, 9),
    "left": (UNLIMITED, 0, 1, 40, 203),
    "dtype": ("float32", "float16", "bfloat16"),
    "layout": testing.LAYOUTS[:5],  # a cache is written to, so no expanded one
    "magnitude": (1.0, 60.0),
    "scale": (None, 0.0, -0.25),
}


FEW = spread(LEVELS, seed=0, count=16)
MANY = [
    pytest.param(case, marks=[pytest.mark.slow])
    for case in spread(LEVELS, seed=1, count=600 if CUDA else 30)
]


@pytest.mark.parametrize("case", FEW + MANY, ids=case_name)
def test_within_the_budget(case):
    case = dict(case)
    splits, left, scale = (case.pop(key) for key in ("splits", "left", "scale"))
    (H, H_kv), dtype = case.pop("heads"), getattr(torch, case.pop("dtype"))
    q, cache = make(**case, H=H, H_kv=H_kv, dtype=dtype)
    o, lse = run(q, cache, splits, left, scale)
    judge(q, cache, o, lse, left, scale)


# -- splits


def in_parts(q, cache, splits, left=UNLIMITED):
    """The split kernel's ``(o, lse)``, with the splits after the queries."""
    B, H, T_q, d = q.shape
    o = torch.empty(B, H, T_q, splits, cache.v.shape[3], device=DEVICE)
    lse = torch.empty(B, H, T_q, splits, device=DEVICE)
    row = decoding.configuration(cache.k, cache.v)
    read = (q, cache.k, cache.v, cache.block_table, cache.seq_lens)
    decoding.launch_splits(*read, o, lse, left, d**-0.5, row)
    return o, lse


def merged(o_parts, lse_parts, dtype):
    o = torch.empty(*o_parts.shape[:3], o_parts.shape[4], dtype=dtype, device=DEVICE)
    lse = torch.empty(o.shape[:3], device=DEVICE)
    decoding.launch_merge(o_parts.contiguous(), lse_parts.contiguous(), o, lse)
    return o, lse


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_split_is_the_unsplit_kernel_in_every_bit(dtype):
    q, cache = make((130, 0, 17), T_q=2, dtype=dtype)
    assert same(run(q, cache, 1), merged(*in_parts(q, cache, 1), dtype))


def test_empty_splits_change_no_bit():
    """All keys in one block: the first split has them, and the others are empty."""
    q, cache = make((16, 0), H=2, H_kv=1, T_q=2)
    unsplit = run(q, cache, 1)
    for splits in (2, 7, 33):
        assert same(run(q, cache, splits), unsplit)


@pytest.mark.parametrize("splits", [3, 16])
def test_any_order_of_merging(splits):
    """By the merge kernel in any order, and by the merge law two by two."""
    q, cache = make((203, 64), T_q=3, page=16)
    o_parts, lse_parts = in_parts(q, cache, splits)
    for seed in range(2):
        order = random.Random(seed).sample(range(splits), splits)
        o, lse = merged(o_parts[:, :, :, order], lse_parts[..., order], q.dtype)
        judge(q, cache, o, lse)
        pairs = [(o_parts[:, :, :, n], lse_parts[..., n]) for n in order]
        while len(pairs) > 1:
            pairs = [*pairs[2:], online.merge_finished(*pairs[:2])]
        judge(q, cache, *pairs[0])


@pytest.mark.parametrize(
    "splits, d_v, shares",
    [(1, 16, 1), (5, 512, 1), (33, 72, 2), (128, 72, 4), (65, 40, 2)],
)
def test_a_query_is_merged_by_one_program_or_several(splits, d_v, shares, monkeypatch):
    """One that has columns of no value, and parts without keys, change nothing."""
    generator = torch.Generator().manual_seed(splits)
    sizes = 2, 3, 2, splits
    parts = torch.randn(*sizes, d_v, generator=generator)
    lse = 9 * torch.randn(sizes, generator=generator)
    empty = torch.rand(sizes, generator=generator) < 0.3
    empty[0, 0] = True
    lse[empty], parts[empty] = -math.inf, 0.0
    launched = []
    launch = plans.launch
    monkeypatch.setattr(plans, "PLANS", {})
    monkeypatch.setattr(
        plans,
        "launch",
        lambda *x, **options: launched.append(x[2]) or launch(*x, **options),
    )
    for sinks in (None, torch.randn(3, generator=generator)):
        o, found = torch.empty(2, 3, 2, d_v), torch.empty(2, 3, 2)
        o, found, read, read_lse = (x.to(DEVICE) for x in (o, found, parts, lse))
        decoding.launch_merge(
            read, read_lse, o, found, None if sinks is None else sinks.to(DEVICE)
        )
        every = lse.double()
        if sinks is not None:
            sink = sinks.double()[None, :, None, None].expand(2, 3, 2, 1)
            every = torch.cat([every, sink], dim=-1)
        weights = every.softmax(-1).nan_to_num(0.0)[..., None, :splits]
        wanted = (weights @ parts.double())[..., 0, :]
        torch.testing.assert_close(o.cpu().double(), wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            found.cpu().double(), every.logsumexp(-1), rtol=1e-5, atol=1e-5
        )
    assert launched == [12 * shares] * 2


def test_each_split_is_that_of_the_reference():
    q, cache = make((203,), page=32)
    o_parts, lse_parts = in_parts(q, cache, 3)
    block = decoding.configuration(cache.k, cache.v).BLOCK_K
    k, v = cache.rows(0)
    for n, (start, stop) in enumerate(reference.bounds(203, 3, block)):
        part = slice(start, stop)
        o, lse = o_parts[:, :, :, n].contiguous(), lse_parts[..., n].contiguous()
        testing.assert_within_budget(q, k[:, :, part], v[:, :, part], o, lse)


@pytest.mark.parametrize("tiles", (1, 8, 64, 100, 512, 5000))
@pytest.mark.parametrize("blocks", (0, 1, 7, 256, 16384))
@pytest.mark.parametrize("slots, enough", ((264, None), (396, 264)))
def test_the_number_of_splits(tiles, blocks, slots, enough):
    splits = decoding.busiest(tiles, blocks, slots, enough)
    assert 1 <= splits <= max(1, min(blocks, decoding.LARGEST_SPLITS))
    if tiles >= 10 * slots:
        assert splits == 1  # the heads alone keep the device busy
    if tiles * blocks >= 4 * slots and tiles * decoding.LARGEST_SPLITS >= slots:
        waves, last = divmod(tiles * splits, slots)
        drawn = waves * slots + (max(last, enough or slots) if last else 0)
        assert tiles * splits > 0.85 * drawn


def test_a_last_wave_is_not_left_to_a_few_programs():
    """512 tiles on 132 multiprocessors: uncut, 116 programs would run alone."""
    assert decoding.busiest(512, 256, 3 * 132, 2 * 132) == 2
    assert decoding.busiest(64, 256, 3 * 132, 2 * 132) == 4  # 256 programs are enough


# -- edges


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("splits", [1, 3])
def test_sequences_without_keys_and_with_fewer_keys_than_queries(page, splits):
    q, cache = make((0, 2, 0), T_q=4, page=page)
    o, lse = run(q, cache, splits)
    judge(q, cache, o, lse)
    assert (o[::2] == 0).all() and (lse[::2] == -math.inf).all()
    assert (o[1, :, :2] == 0).all() and (lse[1, :, :2] == -math.inf).all()


@pytest.mark.parametrize("page", [None, 16])
def test_a_window_leaves_splits_and_queries_without_keys(page):
    """Each of five queries sees one key, in one of two blocks; the rest is empty."""
    q, cache = make((66, 2), 2, 1, T_q=5, page=page)
    o_parts, lse_parts = in_parts(q, cache, 4, left=0)
    found = lse_parts > -math.inf
    assert found[0].any(1).tolist() == [[True, True, False, False]] * 2
    assert found.sum(3)[:, 0].tolist() == [[1] * 5, [0, 0, 0, 1, 1]]
    assert (o_parts[~found] == 0).all()
    judge(q, cache, *merged(o_parts, lse_parts, q.dtype), left=0)


@pytest.mark.parametrize(
    "B, H, H_kv, T_q, T_max",
    [(0, 4, 2, 1, 0), (1, 4, 2, 0, 3), (1, 0, 0, 1, 3), (2, 4, 2, 1, 0)],
)
def test_empty(B, H, H_kv, T_q, T_max):
    q = torch.zeros(B, H, T_q, 16, device=DEVICE)
    k = v = torch.zeros(B, H_kv, T_max, 16, device=DEVICE)
    seq_lens = torch.full((B,), T_max, dtype=torch.int32, device=DEVICE)
    for splits in ("auto", 3):
        o, lse = flashlib.decode(
            q, k, v, seq_lens=seq_lens, splits=splits, return_lse=True
        )
        assert o.shape == (B, H, T_q, 16) and (o == 0).all()
        assert lse.shape == (B, H, T_q) and (lse == -math.inf).all()


def test_a_table_without_columns():
    q, cache = make((0, 0), page=16)
    table = torch.empty(2, 0, dtype=torch.int32, device=DEVICE)
    o, lse = flashlib.decode(
        q, cache.k, cache.v, seq_lens=cache.seq_lens, block_table=table, return_lse=True
    )  # fmt: skip
    assert (o == 0).all() and (lse == -math.inf).all()


def test_pages_in_any_order_give_the_same_bits():
    """The same keys in a contiguous cache and in pages, shared ones among them."""
    q, cache = make((100, 100, 37), T_q=2, page=16)
    cache.block_table[1] = cache.block_table[0]
    flat = [torch.full((3, 2, 112, 16), math.nan, device=DEVICE) for _ in range(2)]
    for b in range(3):
        for x, rows in zip(flat, cache.rows(b), strict=True):
            x[b, :, : rows.shape[2]] = rows[0]
    contiguous = Cache(*flat, cache.seq_lens, None)
    for splits, left in ((1, UNLIMITED), (3, UNLIMITED), (2, 20)):
        assert same(run(q, cache, splits, left), run(q, contiguous, splits, left))


@pytest.mark.gpu
@pytest.mark.parametrize("page", [None, 16])
def test_250_runs_agree_in_every_bit(page):
    q, cache = make((203, 70), 6, 2, 3, 40, page=page, dtype=torch.float16)
    first = run(q, cache, 3)
    for _ in range(250):
        assert same(run(q, cache, 3), first)


@pytest.mark.parametrize("dimension", ["page", "head", "row"])
def test_offsets_beyond_int32(dimension):
    """The last page, head or row is more than 2^31 elements after the first."""
    q, near = make((19, 33), H=6, H_kv=3, page=16, dtype=torch.float16)
    far = far_apart((near.k, near.v), dimension)
    o, lse = run(q, near._replace(k=far[0], v=far[1]), 2)
    judge(q, near, o, lse)


# -- what is read


def first_read(length, T_q, left):
    """The first key that a query sees."""
    return 0 if left == UNLIMITED else max(length - T_q - left, 0)


READS = [(None, UNLIMITED, 3, 3), (16, UNLIMITED, 1, 1), (None, 0, 1, 1)]
READS += [(16, 40, 2, 3), (16, 500, 1, 3), (128, 70, 2, 3), (None, 70, 3, 2)]


@pytest.mark.skipif(not INTERPRETED, reason="loads are counted in Triton's interpreter")
@pytest.mark.parametrize("page, left, T_q, splits", READS)
def test_every_key_that_is_seen_is_read_once_for_its_group(
    monkeypatch, page, left, T_q, splits
):
    """And no other key, and no entry of the table but those of the keys. In place of
    rows that no query sees, a program reads the first or the last that is seen again.
    """
    from triton.runtime.interpreter import interpreter_builder

    lengths = (203, 0, 64)
    q, cache = make(lengths, 6, 2, T_q, page=page)
    tensors = {"k": cache.k, "v": cache.v, "table": cache.block_table}
    tensors = {name: x for name, x in tensors.items() if x is not None}
    read = {name: [] for name in tensors}
    load = interpreter_builder.create_masked_load

    def counted(pointers, mask, *rest, **options):
        inside = pointers.data[mask.data.astype(bool)]  # of a number, integers
        for name, x in tensors.items():
            start = x.data_ptr()
            stop = start + x.numel() * x.element_size()
            read[name] += inside[(inside >= start) & (inside < stop)].tolist()
        return load(pointers, mask, *rest, **options)

    monkeypatch.setattr(interpreter_builder, "create_masked_load", counted)
    run(q, cache, splits, left)
    keys = [range(first_read(length, T_q, left), length) for length in lengths]
    for name in "kv":
        counts = Counter(read[name])
        assert len(counts) == sum(map(len, keys)) * 2 * 16
        again = sum(count > 1 for count in counts.values())
        assert again <= 2 * len(lengths) * 2 * 16
    if page:
        columns, start = cache.block_table.shape[1], cache.block_table.data_ptr()
        entries = {b * columns + t // page for b, x in enumerate(keys) for t in x}
        assert {*read["table"]} == {start + 4 * entry for entry in entries}


def evicted(cache, T_q, left):
    """The cache without what these queries do not see: inf and NaN in rows, and in the
    table, for pages without a row that they see, no page, another one, any integer.
    """
    k, v, seq_lens, table = (None if x is None else x.clone() for x in cache)
    for b, length in enumerate(seq_lens.tolist()):
        oldest = first_read(length, T_q, left)
        for x, number in ((k, math.inf), (v, math.nan)):
            if table is None:
                x[b, :, :oldest] = number
                continue
            for n in range(math.ceil(oldest / x.shape[2])):
                x[table[b, n], :, : oldest - n * x.shape[2]] = number
        if table is not None:
            stale = int(table[b, 0])
            for n in range(oldest // k.shape[2]):
                table[b, n] = (-1, stale, 2**30)[n % 3]
    return Cache(k, v, seq_lens, table)


CALLS = {
    "one query": (1, 1, 100, "float32"),
    "three queries": (3, 1, 0, "float16"),
    "one query, in parts": (1, 4, 70, "bfloat16"),
    "four queries, in parts": (4, 3, 100, "float16"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("page", [None, 16, 128])
def test_what_no_query_sees_may_be_anything(page, call):
    T_q, splits, left, dtype = CALLS[call]
    options = {"T_q": T_q, "page": page, "dtype": getattr(torch, dtype)}
    q, cache = make((203, 2), 2, 1, **options)
    o, lse = run(q, cache, splits, left)
    judge(q, cache, o, lse, left)
    assert same(run(q, evicted(cache, T_q, left), splits, left), (o, lse))


@pytest.mark.parametrize("page", [None, 16, 128])
def test_the_reference_reads_what_a_query_sees(page):
    q, cache = make((203, 2, 0), T_q=3, page=page)
    options = {"splits": 2, "window": (70, None)}
    wanted, found = (
        reference.attention(q, *x[:3], block_table=x.block_table, **options)
        for x in (cache, evicted(cache, 3, 70))
    )
    assert same(found, wanted)
    judge(q, cache, *found, left=70)


# -- public function


def arguments(**changes):
    q, cache = make((70, 5), T_q=2, page=16)
    keywords = {
        "q": q,
        "k_cache": cache.k,
        "v_cache": cache.v,
        "seq_lens": cache.seq_lens,
    }
    return {**keywords, "block_table": cache.block_table, **changes}


def test_the_public_function():
    keywords = arguments()
    q, cache = keywords["q"], Cache(*list(keywords.values())[1:])
    o, lse = flashlib.decode(**keywords, return_lse=True)
    judge(q, cache, o, lse)
    assert torch.equal(flashlib.decode(**keywords), o)
    options = {"splits": 3, "scale": 0.5}
    o, lse = flashlib.decode(**keywords, **options, window=(20, None), return_lse=True)
    judge(q, cache, o, lse, left=20, scale=0.5)
    assert torch.equal(flashlib.decode(**keywords, **options, window=[20, 7]), o)
    lengths, table = keywords["seq_lens"], keywords["block_table"].T.contiguous().T
    spread = torch.stack([lengths, torch.zeros_like(lengths)], dim=1)[:, 0]
    strided = arguments(seq_lens=spread, block_table=table)
    assert torch.equal(flashlib.decode(**strided), flashlib.decode(**keywords))


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


CACHES = {"k_cache": zeros(4, 2, 24, 16), "v_cache": zeros(4, 2, 24, 16)}
WRONG = [
    (ValueError, "k_cache: expected pages of 16", CACHES),
    (ValueError, "k_cache: expected batch size 2", {"block_table": None}),
    (ValueError, "v_cache: expected the sizes of k_cache",
     {"v_cache": zeros(4, 2, 32, 16)}),
    (TypeError, "seq_lens: expected dtype torch.int32", {"seq_lens": zeros(2)}),
    (ValueError, r"seq_lens: expected \[B\] with B = 2",
     {"seq_lens": zeros(3, dtype=torch.int32)}),
    (TypeError, "block_table: expected dtype torch.int32",
     {"block_table": zeros(2, 5)}),
    (ValueError, r"block_table: expected \[B, max_pages\]",
     {"block_table": zeros(2, dtype=torch.int32)}),
    (ValueError, "splits: expected one of auto", {"splits": "many"}),
    (TypeError, "splits: expected an integer", {"splits": 2.0}),
    (ValueError, "splits: expected at least 1", {"splits": 0}),
    (ValueError, "splits: expected at most 128", {"splits": 129}),
    (ValueError, "scale: expected a finite number", {"scale": math.inf}),
    (TypeError, r"window: expected \(left, right\)", {"window": 5}),
    (TypeError, "return_lse: expected True or False", {"return_lse": 1}),
]  # fmt: skip


@pytest.mark.parametrize("error, message, changes", with_id(WRONG))
def test_a_wrong_argument_is_named(error, message, changes):
    with refused(error, message):
        flashlib.decode(**arguments(**changes))


def test_there_is_no_gradient():
    keywords = arguments()
    refused = r"^flashlib\.decode: it has no gradient"
    o = flashlib.decode(**{**keywords, "q": keywords["q"].requires_grad_()})
    with pytest.raises(NotImplementedError, match=refused):
        o.sum().backward()
    with torch.autograd.forward_ad.dual_level():
        q = torch.autograd.forward_ad.make_dual(
            keywords["q"], torch.ones_like(keywords["q"])
        )
        with pytest.raises(NotImplementedError, match="forward-mode"):
            flashlib.decode(**{**keywords, "q": q})


def test_the_operator_is_registered_properly():
    q, *rest = arguments().values()
    operator = torch.ops.flashlib.decode.default
    tests = ("test_schema", "test_faketensor")
    more = None, None, torch.zeros(4, device=DEVICE), *(None,) * 6
    options = 2, UNLIMITED, 0.25, "", "", False
    torch.library.opcheck(operator, (q, *rest, *more, *options), test_utils=tests)


def test_torch_compile():
    keywords = arguments()

    def decode(q):
        return flashlib.decode(**{**keywords, "q": 2 * q}) + 1

    backend = "inductor" if CUDA else "aot_eager"
    compiled = torch.compile(decode, fullgraph=True, backend=backend)
    assert torch.equal(compiled(keywords["q"]), decode(keywords["q"]))


@pytest.mark.gpu
def test_a_cuda_graph_follows_lengths_and_tables():
    keywords = arguments()
    flashlib.decode(**keywords, splits=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flashlib.decode(**keywords, splits=4)
    keywords["seq_lens"].copy_(torch.tensor([33, 2], dtype=torch.int32))
    keywords["block_table"][0, :3] = keywords["block_table"][0, :3].flip(0).clone()
    graph.replay()
    assert torch.equal(o, flashlib.decode(**keywords, splits=4))


@pytest.mark.gpu
@pytest.mark.parametrize("page", [None, 16, 64])
def test_a_long_cache(page):
    options = {"page": page, "T_max": 70_400, "dtype": torch.bfloat16}
    q, cache = make((40_000, 70_001), 32, 8, 1, 128, **options)
    k, v, seq_lens, block_table = cache
    o, lse = flashlib.decode(
        q, k, v, seq_lens=seq_lens, block_table=block_table, return_lse=True
    )
    judge(q, cache, o, lse)
