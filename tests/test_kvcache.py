"""The paged cache: contents, owners, all or nothing; any sequence of calls against lists of numbers."""

import importlib

import pytest
import torch
from cases import CUDA, DEVICE

import flashlib
from flashlib import testing
from flashlib.kvcache import OutOfPages, PagedKVCache

# A GPU server brings its own torch and may lack hypothesis; every other machine has it from the pins.
hypothesis = pytest.importorskip("hypothesis") if CUDA else importlib.import_module("hypothesis")
stateful = importlib.import_module("hypothesis.stateful")
st = hypothesis.strategies

H_KV, D, D_V = 2, 16, 24


def make(pages=6, page_size=16, dtype=torch.float32):
    return PagedKVCache(pages, page_size, H_KV, D, D_V, dtype=dtype, device=DEVICE)


def rows(T, start=0.0):
    """Keys and values of T positions, each number different."""
    k = start + torch.arange(H_KV * T * D, dtype=torch.float32, device=DEVICE).reshape(H_KV, T, D)
    v = -start - torch.arange(H_KV * T * D_V, dtype=torch.float32, device=DEVICE).reshape(H_KV, T, D_V)
    return k, v


def contents(cache):
    """All that a caller can see of every sequence."""
    return {
        name: (cache.length(name), cache.table(name), *(x.clone() for x in cache.gather(name)))
        for name in cache._sequences
    }


def same(a, b):
    return a.keys() == b.keys() and all(
        x[:2] == y[:2] and all(torch.equal(s, t) for s, t in zip(x[2:], y[2:], strict=True))
        for x, y in zip(a.values(), b.values(), strict=True)
    )


# ------------------------------------------------------------------------------------ one by one


def test_what_is_appended_is_there():
    cache = make()
    name = cache.new()
    k, v = rows(40)
    for start, stop in ((0, 0), (0, 7), (7, 16), (16, 17), (17, 40)):
        cache.append(name, k[:, start:stop], v[:, start:stop])
    assert all(torch.equal(a, b) for a, b in zip(cache.gather(name), (k, v), strict=True))
    assert cache.length(name) == 40 and len(cache.table(name)) == 3
    block_table, seq_lens = cache.batch([name, cache.new()])
    assert block_table.tolist() == [list(cache.table(name)), [-1, -1, -1]] and seq_lens.tolist() == [40, 0]
    assert block_table.dtype == seq_lens.dtype == torch.int32 and block_table.device == cache.k_pages.device


def test_nothing_in_a_batch():
    block_table, seq_lens = make().batch([])
    assert block_table.shape == (0, 1) and seq_lens.shape == (0,)


def test_a_fork_shares_until_somebody_writes():
    cache = make()
    first = cache.new()
    cache.append(first, *rows(20))
    second, third = cache.fork(first), cache.fork(first)
    assert cache.table(first) == cache.table(second) == cache.table(third)
    assert cache.statistics().free == 4 and [cache.holders(page) for page in cache.table(first)] == [3, 3]
    cache.append(second, *rows(1, start=1e4))
    cache.append(first, *rows(1, start=2e4))
    cache.append(third, *rows(1, start=3e4))  # the last one holds its page alone: no copy
    tables = [cache.table(name) for name in (first, second, third)]
    assert len({table[0] for table in tables}) == 1 and len({table[1] for table in tables}) == 3
    assert cache.statistics().free == 2
    for name, start in ((second, 1e4), (first, 2e4), (third, 3e4)):
        wanted = (torch.cat(pair, dim=1) for pair in zip(rows(20), rows(1, start), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(cache.gather(name), wanted, strict=True))


def test_a_fork_at_the_end_of_a_page_copies_nothing():
    cache = make()
    first = cache.new()
    cache.append(first, *rows(16))
    second = cache.fork(first)
    cache.append(second, *rows(1))
    assert cache.table(second)[0] == cache.table(first)[0] and cache.holders(cache.table(first)[0]) == 2


def test_writing_over_what_is_there():
    cache = make()
    first = cache.new()
    k, v = rows(30)
    cache.append(first, k, v)
    second = cache.fork(first)
    new_k, new_v = rows(20, start=1e4)
    cache.write(second, 14, new_k, new_v)  # through the end of both pages and on into a third
    assert cache.length(second) == 34
    assert all(torch.equal(a, b) for a, b in zip(cache.gather(first), (k, v), strict=True))
    wanted = torch.cat([k[:, :14], new_k], dim=1), torch.cat([v[:, :14], new_v], dim=1)
    assert all(torch.equal(a, b) for a, b in zip(cache.gather(second), wanted, strict=True))
    assert not set(cache.table(first)) & set(cache.table(second))


def test_an_exhausted_pool_says_what_was_asked_and_loses_nothing():
    cache = make(pages=3)
    first = cache.new()
    cache.append(first, *rows(20))
    second = cache.fork(first)
    before, statistics = contents(cache), cache.statistics()
    # A copy of the shared last page, and two pages behind it.
    message = r"^PagedKVCache: asked for 3 pages, 1 are free$"
    with pytest.raises(OutOfPages, match=message) as caught:
        cache.append(second, *rows(40))
    assert (caught.value.asked, caught.value.free) == (3, 1)
    assert same(contents(cache), before) and cache.statistics() == statistics
    cache.append(second, *rows(12))  # what fits, fits
    cache.free(first)
    cache.append(second, *rows(16))
    assert cache.statistics().free == 0


def test_freed_pages_are_used_again():
    cache = make(pages=2)
    for _ in range(5):
        name = cache.new()
        cache.append(name, *rows(32))
        cache.free(name)
    assert cache.statistics().free == 2
    with pytest.raises(ValueError, match=r"^sequence: expected the name of one that has not been freed"):
        cache.length(name)


def test_statistics():
    cache = make(pages=8)
    first, other = cache.new(), cache.new()
    cache.append(first, *rows(16))
    cache.append(other, *rows(3))
    cache.append(first, *rows(4))
    second = cache.fork(first)
    found = cache.statistics()
    assert found._asdict() == {
        "pages": 8, "free": 5, "shared": 2, "listed": 5, "keys": 16 + 4 + 3, "wasted": 12 + 13, "jumps": 2,
    }  # fmt: skip
    cache.append(second, *rows(1))
    assert cache.statistics().shared == 1 and cache.statistics().free == 4


def test_a_cache_keeps_no_graph():
    cache = make()
    name = cache.new()
    cache.append(name, *(x.requires_grad_() for x in rows(3)))
    assert not cache.k_pages.requires_grad and not cache.gather(name)[0].requires_grad


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
        q, cache.k_pages, cache.v_pages, seq_lens=seq_lens, block_table=block_table, return_lse=True
    )  # fmt: skip
    for b, name in enumerate(sequences):
        k, v = (x[None] for x in cache.gather(name))
        testing.assert_within_budget(q[b : b + 1], k, v, o[b : b + 1], lse[b : b + 1], causal=True)


@pytest.mark.parametrize(
    "kind, message, changes",
    [
        (TypeError, "pages: expected an integer", {"pages": 2.0}),
        (ValueError, "pages: expected at least 1", {"pages": 0}),
        (ValueError, "page_size: expected one of 16, 32", {"page_size": 24}),
        (TypeError, "page_size: expected an integer", {"page_size": True}),
        (ValueError, "H_kv: expected at least 1", {"H_kv": 0}),
        (ValueError, "d: expected at least 16", {"d": 8}),
        (ValueError, "d_v: expected a head dimension from 16 to 256", {"d_v": 300}),
        (TypeError, "dtype: expected dtype float32, .* got float64", {"dtype": torch.float64}),
    ],
)
def test_a_wrong_pool_is_refused(kind, message, changes):
    with pytest.raises(kind, match=f"^{message}"):
        PagedKVCache(**{"pages": 2, "page_size": 16, "H_kv": 2, "d": 16, **changes})


@pytest.mark.parametrize(
    "kind, message, call",
    [
        (TypeError, "k: expected a torch.Tensor", lambda c, s, k, v: c.append(s, k.tolist(), v)),
        (TypeError, "v: expected the dtype of the cache", lambda c, s, k, v: c.append(s, k, v.half())),
        (ValueError, r"k: expected \[H_kv, T, d\] = \[2, T, 16\]", lambda c, s, k, v: c.append(s, k[0], v)),
        (ValueError, r"v: expected .* = \[2, 3, 24\]", lambda c, s, k, v: c.append(s, k, v[:, 1:])),
        (ValueError, r"k: expected \[H_kv, T, d\]", lambda c, s, k, v: c.append(s, k[:1], v[:1])),
        (ValueError, "start: expected at most the length 0", lambda c, s, k, v: c.write(s, 1, k, v)),
        (TypeError, "start: expected an integer", lambda c, s, k, v: c.write(s, None, k, v)),
        (ValueError, "v: expected the device of the cache", lambda c, s, k, v: c.append(s, k, v.to("meta"))),
        (ValueError, "sequence: expected the name", lambda c, s, k, v: c.append(99, k, v)),
        (ValueError, "sequence: expected the name", lambda c, s, k, v: c.batch([s, 99])),
        (ValueError, "page: expected less than 6", lambda c, s, k, v: c.holders(6)),
    ],
)
def test_a_wrong_argument_is_named(kind, message, call):
    cache = make()
    name = cache.new()
    with pytest.raises(kind, match=f"^{message}"):
        call(cache, name, *rows(3))
    assert cache.length(name) == 0 and cache.statistics().free == 6


# ------------------------------------------------------------------------------------ any sequence of calls


class Calls(stateful.RuleBasedStateMachine):
    """The cache beside a model of it: each sequence is a list of numbers, one for each position, which stand
    in every element of its keys and, negative, of its values.
    """

    names = stateful.Bundle("names")

    def __init__(self):
        super().__init__()
        self.cache, self.model, self.written = make(pages=5), {}, 0

    def fresh(self, T):
        """T numbers that were never written, and the keys and values that hold them."""
        numbers = list(range(self.written + 1, self.written + 1 + T))
        self.written += T
        column = torch.tensor(numbers, dtype=torch.float32, device=DEVICE)[None, :, None]
        return numbers, column.expand(H_KV, T, D), -column.expand(H_KV, T, D_V)

    def shared(self):
        return {page: self.cache.holders(page) for page in range(5)}

    def change(self, name, start, T):
        """Write T positions from start on; where the pool is exhausted nothing may change."""
        numbers, k, v = self.fresh(T)
        before, others = contents(self.cache), self.cache.statistics()
        held, holders = self.cache.table(name), self.shared()
        try:
            self.cache.write(name, start, k, v)
        except OutOfPages as error:
            assert error.asked > error.free == others.free
            assert same(contents(self.cache), before) and self.cache.statistics() == others
            return
        self.model[name][start : start + T] = numbers
        touched = range(start // 16, -(-(start + T) // 16)) if T else ()
        for n in touched:
            page = self.cache.table(name)[n]
            assert self.cache.holders(page) == 1  # nobody writes to a page that another one holds
            if n < len(held):
                assert (page == held[n]) == (holders[held[n]] == 1)  # and nobody copies his own

    @stateful.rule(target=names)
    def new(self):
        name = self.cache.new()
        assert name not in self.model
        self.model[name] = []
        return name

    @stateful.rule(target=names, parent=names)
    def fork(self, parent):
        name = self.cache.fork(parent)
        self.model[name] = list(self.model[parent])
        return name

    @stateful.rule(name=names, T=st.integers(0, 40))
    def append(self, name, T):
        self.change(name, len(self.model[name]), T)

    @stateful.rule(name=names, T=st.integers(0, 40), where=st.floats(0, 1))
    def write(self, name, T, where):
        self.change(name, int(where * len(self.model[name])), T)

    @stateful.rule(name=stateful.consumes(names))
    def free(self, name):
        self.cache.free(name)
        del self.model[name]

    @stateful.invariant()
    def contents_are_right(self):
        for name, numbers in self.model.items():
            assert self.cache.length(name) == len(numbers)
            k, v = self.cache.gather(name)
            wanted = torch.tensor(numbers, dtype=torch.float32, device=DEVICE)[None, :, None]
            assert torch.equal(k, wanted.expand(k.shape)) and torch.equal(v, -wanted.expand(v.shape))

    @stateful.invariant()
    def every_page_is_counted(self):
        tables = [self.cache.table(name) for name in self.model]
        for page in range(5):
            assert self.cache.holders(page) == sum(table.count(page) for table in tables)
        found = self.cache.statistics()
        assert found.free == sum(self.cache.holders(page) == 0 for page in range(5))
        assert found.listed == sum(len(table) for table in tables)
        assert found.keys + found.wasted == 16 * (5 - found.free)
        for numbers, table in zip(self.model.values(), tables, strict=True):
            assert len(table) == -(-len(numbers) // 16)

    def teardown(self):
        for name in list(self.model):
            self.cache.free(name)
        assert self.cache.statistics()._replace(pages=0) == (0, 5, 0, 0, 0, 0, 0)


Calls.TestCase.settings = hypothesis.settings(
    max_examples=60, stateful_step_count=30, derandomize=True, deadline=None, database=None
)
TestAnySequenceOfCalls = Calls.TestCase
