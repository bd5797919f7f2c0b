"""A cache in eight bits: what it holds, and what decoding reads of it."""

import math

import pytest
import torch
from device import DEVICE
from expected import refused, same, with_id

import flashlib
from flashlib import cache_checks, checks, masks, score_functions, testing
from flashlib.kernels import decoding, tables
from flashlib.kvcache import PagedKVCache, in_eight_bits
from flashlib.plain_checks import UNLIMITED
from flashlib.reference import decoding as decoding_reference
from flashlib.reference import fp8 as reference
from flashlib.reference import standard

pytestmark = pytest.mark.usefixtures("nan_filled")
E4M3 = torch.float8_e4m3fn


def make(pages=8, page_size=16, d=16, d_v=24, dtype=E4M3):
    return PagedKVCache(pages, page_size, 2, d, d_v, dtype=dtype, device=DEVICE)


def rows(T, d=16, d_v=24, seed=0, dtype=torch.float32):
    """Keys and values of T positions of 2 heads, of very different sizes."""
    _, k, v = testing.make_qkv(1, 2, T, d, d_v=d_v, seed=seed, device=DEVICE)
    sizes = 10.0 ** torch.linspace(-3, 3, T, device=DEVICE)[:, None]
    return (k[0] * sizes).to(dtype), (v[0] * sizes.flip(0)).to(dtype)


def held(cache, name):
    """Numbers and scales that a cache holds of a sequence."""
    table, T = list(cache.table(name)), cache.length(name)
    both = (cache.k_pages, cache.v_pages, cache.k_scales, cache.v_scales)
    return [x[table].transpose(0, 1).flatten(1, 2)[:, :T] for x in both]


# -- what it holds


@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_a_row_holds_what_the_reference_rounds(dtype):
    cache, (k, v) = make(), rows(40, dtype=dtype)
    k[0, 3] = 0.0
    name = cache.new()
    cache.append(name, k, v)
    of_k, of_v = held(cache, name)[::2], held(cache, name)[1::2]
    for x, (numbers, scales) in ((k, of_k), (v, of_v)):
        wanted = reference.quantize(x.float()[None], 1)
        assert torch.equal(numbers.float(), wanted.values[0])
        assert torch.equal(scales, wanted.scales[0, ..., 0])


def test_a_row_too_small_for_a_scale_is_zero():
    numbers, scales = in_eight_bits(torch.tensor([[1e-44, 0.0], [0.0, 0.0]]))
    assert numbers.float().eq(0.0).all() and scales.eq(1.0).all()


def test_a_row_does_not_depend_on_when_others_are_written():
    k, v = rows(40)
    whole, pieces = make(), make()
    name, other = whole.new(), pieces.new()
    whole.append(name, k, v)
    for start, stop in ((0, 1), (1, 17), (17, 40)):
        pieces.append(other, k[:, start:stop], v[:, start:stop])
    pieces.write(other, 5, k[:, 5:30], v[:, 5:30])
    for x, y in zip(held(whole, name), held(pieces, other), strict=True):
        assert torch.equal(x.float(), y.float())


def test_a_copied_page_takes_its_scales_along():
    cache, (k, v) = make(), rows(20)
    first = cache.new()
    cache.append(first, k, v)
    before = [x.float().clone() for x in held(cache, first)]
    second = cache.fork(first)
    cache.append(second, *rows(3, seed=1))
    assert cache.table(first)[1] != cache.table(second)[1]
    assert same([x.float() for x in held(cache, first)], before)
    assert same([x[:, :20].float() for x in held(cache, second)], before)


@pytest.mark.parametrize("d, d_v", [(16, 24), (128, 128)])
def test_its_bytes_are_those_counted(d, d_v):
    cache = make(d=d, d_v=d_v)
    held = (cache.k_pages, cache.v_pages, cache.k_scales, cache.v_scales)
    assert sum(x.nbytes for x in held) == 8 * 16 * 2 * (d + d_v + 2 * 4)
    assert make(dtype=torch.float16).k_scales is None


# -- what decoding reads


def call(lengths, page, T_q=1, H=4, dtype=torch.float16, d=16, d_v=24, sizes=1.0):
    """The arguments of ``flashlib.decode``, NaN where no sequence has a row, and the
    keys and values of each sequence, ``[1, H_kv, T, d]`` in float32.
    """
    longest = max(lengths)
    columns = math.ceil(longest / page) if page else 0
    shape = (len(lengths) * columns + 1, page) if page else (len(lengths), longest)
    _, k, v = testing.make_qkv(shape[0], 2, shape[1], d, d_v=d_v, device=DEVICE)
    q, _, _ = testing.make_qkv(len(lengths), H, T_q, d, dtype=dtype, device=DEVICE)
    k, v = (in_eight_bits(x * sizes) for x in (k, v))
    seen = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    table = torch.full((len(lengths), columns), -1, dtype=torch.int32, device=DEVICE)
    free = iter(reversed(range(shape[0])))
    for b, length in enumerate(lengths):
        if not page:
            seen[b, :length] = True
        for n in range(math.ceil(length / page) if page else 0):
            table[b, n] = next(free)
            seen[table[b, n], : length - n * page] = True
    unseen = ~seen[:, None]
    for numbers, scales in (k, v):
        numbers.view(torch.uint8).masked_fill_(unseen[..., None], 0x7F)  # NaN
        scales.masked_fill_(unseen, math.nan)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    keywords = {"q": q, "k_cache": k[0], "v_cache": v[0], "seq_lens": lengths}
    keywords |= {"k_scales": k[1], "v_scales": v[1]}
    if page:
        keywords["block_table"] = table
    whole = [numbers.float() * scales[..., None] for numbers, scales in (k, v)]
    of_table = table if page else None
    sequences = [
        [decoding_reference.rows(x, b, int(n), of_table)[None] for x in whole]
        for b, n in enumerate(lengths)
    ]
    return keywords, sequences


CALLS = {
    "contiguous": ((203, 5), None, {}, {}),
    "pages": ((203, 0, 64), 16, {}, {}),
    "large pages, in parts": ((130, 300), 256, {}, {"splits": 3}),
    "grouped, a window": ((203, 70), 32, {"T_q": 3, "H": 6}, {"window": (40, None)}),
    "bfloat16, in parts": ((203, 5), 64, {"dtype": torch.bfloat16}, {"splits": 2}),
    "wide": ((100, 70), 64, {"d": 128, "d_v": 80, "T_q": 2}, {"scale": -0.3}),
    "tiny": ((203, 5), 16, {"sizes": 1e-4}, {"scale": 1e4}),
    "large": ((203, 5), 16, {"sizes": 5e3}, {"scale": 1e-4}),
    "an odd width": ((203, 5), 16, {"d": 17, "d_v": 25}, {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_read_within_the_budget(name):
    lengths, page, kind, options = CALLS[name]
    keywords, sequences = call(lengths, page, **kind)
    o, lse = flashlib.decode(**keywords, **options, return_lse=True)
    asked = {x: options[x] for x in ("window", "scale") if x in options}
    for b, (k, v) in enumerate(sequences):
        one = slice(b, b + 1)
        testing.assert_within_budget(
            keywords["q"][one], k, v, o[one], lse[one], causal=True, **asked
        )


def assert_read(keywords, sequences):
    """What ``flashlib.decode`` reads is within the budget."""
    o, lse = flashlib.decode(**keywords, return_lse=True)
    for b, (k, v) in enumerate(sequences):
        one = slice(b, b + 1)
        testing.assert_within_budget(
            keywords["q"][one], k, v, o[one], lse[one], causal=True
        )


def strided(x, how):
    """x in other memory, where its numbers are not two by two."""
    *outer, columns = x.shape
    if how == "columns apart":
        memory = x.new_empty(*outer, 2 * columns)
        return memory[..., ::2].copy_(x)
    if how == "odd rows":
        return x.new_empty(*outer, columns + 1)[..., :columns].copy_(x)
    memory = x.new_empty(x.numel() + 1)
    return memory[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("how", ["columns apart", "odd rows", "odd address"])
def test_a_cache_in_other_memory_is_read(how):
    keywords, sequences = call((203, 70), 32, T_q=2)
    for name in ("k_cache", "v_cache"):
        keywords[name] = strided(keywords[name], how)
    assert_read(keywords, sequences)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("power", [-12, 12])
def test_rows_of_queries_of_any_size_keep_their_bits(dtype, power):
    """Products are in float16, whose range bfloat16 exceeds; scores are of size 1."""
    keywords, sequences = call((203, 70), 16, dtype=dtype, sizes=2.0**-power)
    sizes = 2.0 ** (power - torch.arange(4.0, device=DEVICE))[:, None, None]
    keywords["q"] = (keywords["q"].float() * sizes).to(dtype)
    assert_read(keywords, sequences)


def test_a_value_counts_by_its_scale_and_its_weight():
    """A row with the largest weight may have the smallest value."""
    keywords, _ = call((203,), 0, dtype=torch.bfloat16)
    for name, numbers in (("k_cache", 0.0), ("v_cache", 1.0)):
        keywords[name] = torch.full_like(keywords[name].float(), numbers).to(E4M3)
    keywords["k_cache"][:, :, 7] = 1.0
    keywords["k_scales"].fill_(1.0)
    keywords["q"] = torch.full_like(keywords["q"], 10.0)  # that key has most weight
    for most, least in ((2.0**30, 2.0**-30), (2.0**-70, 2.0**-95), (1.0, 0.0)):
        keywords["v_scales"] = torch.full_like(keywords["k_scales"], most)
        keywords["v_scales"][:, :, 7] = least
        o, lse = flashlib.decode(**keywords, scale=0.1, return_lse=True)
        p = torch.full((203,), math.exp(-16.0), dtype=torch.float64)
        p[7] = 1.0
        wanted = (p * keywords["v_scales"][0, 0].double().cpu()).sum() / p.sum()
        assert ((o.double() / wanted.item() - 1.0).abs() < 2.0**-8).all()
        assert (lse - 16.0 - p.sum().log().item()).abs().max() < 1e-5


def test_a_scale_of_nan_is_seen():
    keywords, _ = call((203,), 16)
    keywords["v_scales"][keywords["block_table"][0, 2], :, 3] = math.nan
    assert flashlib.decode(**keywords).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("page", [0, 16, 64])
def test_repeats_are_equal_in_every_bit(page):
    keywords, _ = call((4096, 1000), page, H=8, dtype=torch.bfloat16, d=128, d_v=128)
    wanted = flashlib.decode(**keywords, return_lse=True)
    for _ in range(100):
        assert same(flashlib.decode(**keywords, return_lse=True), wanted)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_mask_a_score_and_sinks_change_it(splits):
    keywords, sequences = call((203, 70), 16)
    changes = {
        "mask": masks.prefix(40) | masks.window(20, 0), "softcap": 2.0,
        "score": score_functions.alibi(torch.linspace(0.01, 0.3, 4, device=DEVICE)),
        "sinks": torch.linspace(-1.0, 2.0, 4, device=DEVICE),
    }  # fmt: skip
    o, lse = flashlib.decode(**keywords, **changes, splits=splits, return_lse=True)
    for b, (k, v) in enumerate(sequences):
        one = slice(b, b + 1)
        wide = [x.double() for x in (keywords["q"][one], k, v)]
        wanted, wanted_lse = decoding_reference.attention(
            *wide, keywords["seq_lens"][one].tolist(), **changes
        )
        torch.testing.assert_close(o[one].double(), wanted, atol=2e-3, rtol=0.0)
        torch.testing.assert_close(lse[one].double(), wanted_lse, atol=1e-4, rtol=0.0)


def test_pages_of_a_cache_are_read():
    cache, sequences = make(), []
    for T in (40, 0, 17):
        sequences.append(cache.new())
        cache.append(sequences[-1], *(x.clamp(-3, 3) for x in rows(T, seed=T)))
    q, _, _ = testing.make_qkv(3, 4, 1, 16, dtype=torch.float16, device=DEVICE)
    block_table, seq_lens = cache.batch(sequences)
    o, lse = flashlib.decode(
        q, cache.k_pages, cache.v_pages, seq_lens=seq_lens, block_table=block_table,
        k_scales=cache.k_scales, v_scales=cache.v_scales, return_lse=True,
    )  # fmt: skip
    for b, name in enumerate(sequences):
        k, v, of_k, of_v = held(cache, name)
        k, v = k.float() * of_k[..., None], v.float() * of_v[..., None]
        one = slice(b, b + 1)
        testing.assert_within_budget(q[one], k[None], v[None], o[one], lse[one])


def test_the_error_is_the_one_to_expect():
    """Half of the variance of a forward pass: queries and weights keep their bits."""
    q, k, v = (x.half() for x in testing.make_qkv(1, 4, 64, 64, T_k=256, device=DEVICE))
    (k_cache, k_scales), (v_cache, v_scales) = in_eight_bits(k), in_eight_bits(v)
    lengths = torch.tensor([256], dtype=torch.int32, device=DEVICE)
    o, lse = flashlib.decode(
        q, k_cache, v_cache, seq_lens=lengths, k_scales=k_scales, v_scales=v_scales,
        return_lse=True,
    )  # fmt: skip
    wide = [x.double() for x in (q, k, v)]
    wanted, wanted_lse = standard.attention(*wide, causal=True)
    of_o, of_lse = reference.deviation(*wide, causal=True, recipe=reference.CACHE)
    found, expected = testing.rms(o - wanted), testing.rms(of_o)
    assert (found <= 4 * expected).all()
    for error, deviation in ((o - wanted, of_o), (lse - wanted_lse, of_lse)):
        ratio = (error.square().mean() / deviation.square().mean()).sqrt()
        assert 0.85 < ratio < 1.15


# -- the public function


def test_torch_compile_and_the_operator():
    keywords, _ = call((70, 5), 16)
    compiled = torch.compile(flashlib.decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**keywords), flashlib.decode(**keywords))
    names = "q", "k_cache", "v_cache", "seq_lens", "block_table", "k_scales", "v_scales"
    options = 2, UNLIMITED, 0.25, "", "", False
    arguments = *map(keywords.get, names), *(None,) * 7, *options
    # PyTorch's test of the schema cannot compare numbers of this type.
    operator = torch.ops.flashlib.decode.default
    torch.library.opcheck(operator, arguments, test_utils=("test_faketensor",))


HALF = torch.zeros(3, 2, 16, 16, dtype=torch.float16, device=DEVICE)
WRONG = [
    (TypeError, "k_scales: expected a tensor with a cache in torch.float8_e4m3fn, got",
     {"k_scales": None}),
    (TypeError, "v_scales: expected a tensor with a cache in torch.float8_e4m3fn, got",
     {"v_scales": None}),
    (TypeError, "k_scales: expected None with a cache in torch.float16, got a tensor",
     {"k_cache": HALF, "v_cache": HALF}),
    (TypeError, "v_cache: expected dtype torch.float8_e4m3fn, got torch.float16",
     {"v_cache": HALF}),
    (TypeError, "k_cache: expected dtype torch.float16, got torch.float8_e5m2",
     {"k_cache": HALF.to(torch.float8_e5m2)}),
    (TypeError, "k_scales: expected dtype torch.float32, got torch.float16",
     {"k_scales": HALF[..., 0]}),
    (ValueError, r"v_scales: expected one for each row, \[3, 2, 16\], got \[3, 2, 15\]",
     {"v_scales": torch.zeros(3, 2, 15, device=DEVICE)}),
    (TypeError, "q: expected torch.float16 or torch.bfloat16 with a cache in",
     {"q": torch.zeros(2, 4, 1, 16, device=DEVICE)}),
]  # fmt: skip


@pytest.mark.parametrize("error, message, changes", with_id(WRONG))
def test_a_wrong_argument_is_named(error, message, changes):
    keywords, _ = call((10, 5), 16, d_v=16)
    with refused(error, message):
        flashlib.decode(**keywords | changes)


def test_rows_in_eight_bits_are_refused_and_both_have_one_dtype():
    cache, (k, v) = make(), rows(3)
    name = cache.new()
    with refused(TypeError, "k: expected dtype float32, float16 or bfloat16"):
        cache.append(name, k.to(E4M3), v.to(E4M3))
    with refused(TypeError, "v: expected dtype torch.float32, got torch.float16"):
        cache.append(name, k, v.half())
    assert cache.length(name) == 0


def test_gpus_without_the_type_are_refused(monkeypatch):
    capability = [(8, 6)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability[0])
    message = "k_cache: expected a GPU of compute capability 8.9 or later for "
    with refused(ValueError, f"{message}torch.float8_e4m3fn, got 8.6"):
        cache_checks.check_eight_bits("k_cache", "cuda:0")
    capability[0] = (8, 9)
    cache_checks.check_eight_bits("k_cache", "cuda:0")
    with pytest.raises(ValueError, match="a tile of decoding for 8 bits"):
        rows = decoding.CONFIGURATIONS
        tables.fitting("decoding", rows, 8, 128, 86, 101_376, False, None)
