"""The paged cache: any sequence of calls, and what decoding reads of it."""

import pytest
import torch
from device import DEVICE
from expected import same

import flashlib
from flashlib import testing
from flashlib.kvcache import OutOfPages, PagedKVCache

H_KV, D, D_V = 2, 16, 24


def gather(cache, name):
    """The keys [H_kv, T, d] and values [H_kv, T, d_v] of a sequence, in order."""
    pages, T = list(cache.table(name)), cache.length(name)
    both = (cache.k_pages, cache.v_pages)
    return [x[pages].transpose(0, 1).flatten(1, 2)[:, :T] for x in both]


def make(pages=6, page_size=16, dtype=torch.float32):
    return PagedKVCache(pages, page_size, H_KV, D, D_V, dtype=dtype, device=DEVICE)


def rows(T):
    """Keys and values of T positions, each number different."""
    k = torch.arange(H_KV * T * D, dtype=torch.float32, device=DEVICE)
    v = -torch.arange(H_KV * T * D_V, dtype=torch.float32, device=DEVICE)
    return k.reshape(H_KV, T, D), v.reshape(H_KV, T, D_V)


def test_what_is_appended_is_there():
    cache = make()
    name = cache.new()
    k, v = rows(40)
    for start, stop in ((0, 0), (0, 7), (7, 16), (16, 17), (17, 40)):
        part = slice(start, stop)
        cache.append(name, k[:, part].requires_grad_(), v[:, part])
    found = gather(cache, name)
    assert torch.equal(found[0], k) and torch.equal(found[1], v)
    assert not found[0].requires_grad and not cache.k_pages.requires_grad
    block_table, seq_lens = cache.batch([name, cache.new()])
    assert block_table.tolist() == [list(cache.table(name)), [-1, -1, -1]]
    assert seq_lens.tolist() == [40, 0]
    assert block_table.dtype == seq_lens.dtype == torch.int32
    assert block_table.device == cache.k_pages.device
    assert same(cache.batch(iter([name])), cache.batch([name]))
    block_table, seq_lens = cache.batch([])
    assert block_table.shape == (0, 1) and seq_lens.shape == (0,)


@pytest.mark.parametrize("start", [1, 8, 16, 40])
def test_rows_may_be_views_of_the_pages(start):
    cache, wanted = make(), [x.clone() for x in rows(56)]
    name = cache.new()
    cache.append(name, *(x[:, :40] for x in wanted))
    first = [x[cache.table(name)[0]] for x in (cache.k_pages, cache.v_pages)]
    cache.write(name, start, *first)
    for x in wanted:
        x[:, start : start + 16] = x[:, :16].clone()
    length = max(40, start + 16)
    assert same(gather(cache, name), [x[:, :length] for x in wanted])


def test_statistics():
    cache = make(pages=8)
    first, other = cache.new(), cache.new()
    cache.append(first, *rows(16))
    cache.append(other, *rows(3))
    cache.append(first, *rows(4))
    second = cache.fork(first)
    assert cache.statistics()._asdict() == {
        "pages": 8, "free": 5, "shared": 2, "listed": 5, "keys": 16 + 4 + 3,
        "wasted": 12 + 13, "jumps": 2,
    }  # fmt: skip
    cache.append(second, *rows(1))
    assert cache.statistics().shared == 1 and cache.statistics().free == 4


def test_decoding_reads_it():
    cache, sequences = make(pages=12), []
    for T in (40, 0, 17):
        sequences.append(cache.new())
        cache.append(sequences[-1], *(x.sin() for x in rows(T)))
    sequences.append(cache.fork(sequences[0]))
    cache.append(sequences[-1], *(x.cos() for x in rows(3)))
    q, _, _ = testing.make_qkv(4, 6, 2, D, device=DEVICE)
    block_table, seq_lens = cache.batch(sequences)
    o, lse = flashlib.decode(
        q, cache.k_pages, cache.v_pages, seq_lens=seq_lens, block_table=block_table,
        return_lse=True,
    )  # fmt: skip
    for b, name in enumerate(sequences):
        k, v = (x[None] for x in gather(cache, name))
        part = slice(b, b + 1)
        testing.assert_within_budget(q[part], k, v, o[part], lse[part], causal=True)


def pool(**changes):
    return PagedKVCache(**{"pages": 2, "page_size": 16, "H_kv": 2, "d": 16} | changes)


@pytest.mark.parametrize(
    "kind, message, call",
    [
        (TypeError, "pages: expected an integer", lambda *_: pool(pages=2.0)),
        (ValueError, "page_size: expected pages of 16, 32",
         lambda *_: pool(page_size=24)),
        (ValueError, "d: expected a head dimension from 16", lambda *_: pool(d=8)),
        (ValueError, "d_v: expected a head dimension from 16 to 256",
         lambda *_: pool(d_v=300)),
        (TypeError, "dtype: expected dtype float32, .* got torch.float64",
         lambda *_: pool(dtype=torch.float64)),
        (TypeError, "v: expected dtype torch.float32, got",
         lambda c, s, k, v: c.append(s, k, v.half())),
        (ValueError, r"k: expected \[H_kv, T, d\] = \[2, T, 16\]",
         lambda c, s, k, v: c.append(s, k[0], v)),
        (ValueError, r"v: expected .* = \[2, 3, 24\]",
         lambda c, s, k, v: c.append(s, k, v[:, 1:])),
        (ValueError, "start: expected at most 0",
         lambda c, s, k, v: c.write(s, 1, k, v)),
        (ValueError, "start: expected at least 0",
         lambda c, s, k, v: c.write(s, -1, k, v)),
        (TypeError, "start: expected an integer",
         lambda c, s, k, v: c.write(s, 0.0, k, v)),
        (ValueError, "sequence: expected the name",
         lambda c, s, k, v: c.append(99, k, v)),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(kind, message, call):
    cache = make()
    name = cache.new()
    with pytest.raises(kind, match=f"^{message}"):
        call(cache, name, *rows(3))
    assert cache.length(name) == 0 and cache.statistics().free == 6


def test_a_cache_made_in_inference_mode_is_written_outside_of_it():
    with torch.inference_mode():
        cache = make()
    name, (k, v) = cache.new(), rows(3)
    cache.append(name, k, v)
    assert same(gather(cache, name), (k, v))


def test_a_shared_page_is_copied_before_a_write_and_a_refused_write_changes_nothing():
    cache = make(pages=5)
    first = cache.new()
    cache.append(first, *rows(40))
    second = cache.fork(first)
    old, new = rows(40), [-x - 1 for x in rows(12)]
    cache.write(second, 10, *new)  # in the first page and in the second
    changed = [x.clone() for x in old]
    for x, y in zip(changed, new, strict=True):
        x[:, 10:22] = y
    before = cache.statistics()
    said = "PagedKVCache: asked for 2 pages, 0 are free"
    for start in (40, 30):  # both pages are new; or one is a copy
        with pytest.raises(OutOfPages, match=said) as caught:
            cache.write(first, start, *rows(24))
        assert (caught.value.asked, caught.value.free) == (2, 0)
    assert same(gather(cache, first), old) and same(gather(cache, second), changed)
    assert cache.statistics() == before
    cache.free(first)
    assert same(gather(cache, second), changed)
    cache.free(second)
    assert cache.statistics()._replace(pages=0) == (0, 5, 0, 0, 0, 0, 0)
