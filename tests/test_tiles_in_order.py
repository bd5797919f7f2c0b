"""The blocks of keys that Hopper's forward pass reads, without a GPU: its producer and
its consumers run as Python, one after another, and compute nothing.
"""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from device import as_python
from roles import array

from flashlib import score_mods
from flashlib.kernels import (
    gluon_scores,
    gluon_tasks,
    hopper,
    hopper_tiles,
    tile_lists,
)

ROWS = hopper.ROWS.value
NONE, SOME, ALL = (x.value for x in (tile_lists.NONE, tile_lists.SOME, tile_lists.ALL))


class Anything:
    """A tensor, layout or barrier, whose value the order does not depend on."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def itself(self, *args, **options):
        return self

    __call__ = __getitem__ = __add__ = __radd__ = __mul__ = __rtruediv__ = itself
    __lt__ = __eq__ = itself


class Integers(list):
    """Integers in device memory, and a pointer to the first."""

    @property
    def shape(self):
        return (len(self),)

    def __add__(self, n):
        return Integers(self[n:])


class Language:
    """Gluon's language in one of the programs, which take turns at the tiles."""

    int64, minimum, maximum, static_range = torch.int64, min, max, range
    cdiv = staticmethod(hopper.triton.cdiv)

    def __init__(self, program, programs):
        tiles = map(array, itertools.count(program, programs))
        self.program_id = lambda axis: next(tiles)
        self.num_programs = lambda axis: programs
        self.atomic_add = lambda counter, one, sem: next(tiles) - programs

    def __getattr__(self, name):
        return Anything()

    def load(self, pointer):
        return torch.tensor(pointer[0])

    def where(self, condition, x, y):
        return x if condition else y


class Ring:
    """Slots, what is copied to them, and the blocks a consumer uses and releases."""

    def __init__(self, slots, rows):
        shape = slots, rows, 64
        self.slots = SimpleNamespace(shape=shape, index=Anything(), dtype=Anything())
        self.ready = self.empty = Anything()
        self.copied, self.used, self.released = [], [], []


RUN = ("block_counts", "window_start", "first_block", "unpack", "task_at")
RUN += ("head_and_block", "skip", "attend_first", "attend", "attend_keeping")
RUN += ("produce", "consume")
RUN += ("list_of_task", "list_bounds", "column")
LEFT_OUT = ("mbarrier", "tma", "fence_async_shared", "accumulator", "coordinates")
LEFT_OUT += ("warpgroup_mma_init", "warpgroup_mma_wait", "before_next_wait")
LEFT_OUT += ("visible_keys", "thread_sums", "tile_in", "bias_of", "store_checked")


def kernel(language, **names):
    """The kernel's functions as Python, with others in place of some."""
    names |= {"gl": language, "ROWS": ROWS, "log_sum_exp": lambda m, l: (m, l)}
    names |= dict.fromkeys(LEFT_OUT, Anything())
    return as_python(RUN, **vars(gluon_tasks) | vars(hopper) | names)


class Program:
    """One program: the tiles it takes, what it copies and what its consumers do. In a
    second launch, these are the tiles whose task is left.
    """

    def __init__(self, language, sizes, CAUSAL, RAGGED, tile, KEEP, left=None, **_):
        self.tile, self.taken, self.starts = tile, [], []
        self.q = Ring(tile.CONSUMERS, ROWS)
        self.k, self.v = (Ring(tile.SLOTS, tile.BLOCK_K) for _ in range(2))
        self.shared = SimpleNamespace(
            q=self.q, k=self.k, v=self.v, queue=None, o=Anything(), bias=None
        )
        run = kernel(
            language, push=self.push, refill=self.refill,
            has_overflowed=lambda lse, task, consumers: left(task),
        )  # fmt: skip
        tensors = "q", "k", "v", None, None, None
        run.produce(*tensors, sizes, self.shared, CAUSAL, left is not None)
        assert self.k.copied == self.v.copied
        change = gluon_scores.GluonChange()
        how = sizes, change, self.shared, CAUSAL, RAGGED, tile.HOLD_Q, KEEP
        self.used = [self.consume(c, language, how) for c in range(tile.CONSUMERS)]

    def push(self, n, turn, queue):
        assert turn == len(self.taken)
        self.taken.append(int(n))
        self.starts.append(len(self.k.copied))

    def refill(self, x, where, head, row, ring, slot, phase):
        if ring is not self.q:
            count = len(ring.copied)
            assert slot == count % self.tile.SLOTS
            assert phase == count // self.tile.SLOTS % 2
        where = tuple(map(int, where)) if isinstance(where, tuple) else int(where)
        ring.copied.append((where, int(head), int(row)))

    def consume(self, c, language, how):
        """{the count of a block that consumer c uses: whether it is masked}."""
        used, turns, limited = {}, [], []
        for ring in (self.k, self.v):
            ring.used, ring.released = [], []

        def pop(turn, queue):
            turns.append(turn)
            return array(self.taken[turn])

        def start(x, ring, count):
            ring.used.append(int(count))
            used[int(count)] = used.get(int(count), False)
            return Anything()

        def hide_scores(s, queries, col, sizes, change):
            limited.append(col)
            return s

        def new_maximum(s, m, scale, seen, col, masked):
            count = self.k.used[-1]
            assert count in self.blocks(turns[-1])
            assert not masked or limited[-1] == col == self.k.copied[count][2]
            used[count] = bool(masked)
            return s, m

        run = kernel(
            language, pop=pop, hide_scores=hide_scores, new_maximum=new_maximum,
            start_scores=start, change_tile=lambda s, *how: s,
            start_values=lambda acc, bits, ring, count: start(bits, ring, count),
            weights=lambda *args: (Anything(), Anything()),
            release=lambda ring, count: ring.released.append(int(count)),
        )  # fmt: skip
        run.consume(c, Anything(), Anything(), 1.0, *how)
        assert turns == list(range(len(self.taken)))
        assert self.k.used == self.v.used == list(used)
        assert self.k.released == self.v.released == list(range(len(self.k.copied)))
        return used

    def blocks(self, turn):
        """The counts of the blocks of a tile."""
        return range(*self.starts[turn : turn + 2])

    def tiles(self):
        """(a copy of Q, {the copy of a block: None if unused, or whether masked})."""
        for turn, c in itertools.product(
            range(len(self.taken) - 1), range(self.tile.CONSUMERS)
        ):
            used = self.used[c]
            copies = {self.k.copied[n]: used.get(n) for n in self.blocks(turn)}
            yield self.q.copied[turn * self.tile.CONSUMERS + c], copies


def judge(queries, copies, sizes, CAUSAL, tile, left, **_):
    """Every block with a visible key is used, without a mask only if all of it is."""
    (where, head, row), T_q, T_k = queries, sizes.T_q, sizes.T_k
    ((keys, key_head),) = {copy[:2] for copy in copies}
    assert key_head == head // sizes.GROUP
    if isinstance(where, tuple):
        T_q, T_k = where[1], keys[1]
    else:
        assert keys == where
    if row >= T_q:
        return  # nothing of it is stored
    offset, last = T_k - T_q, min(row + ROWS, T_q) - 1
    # The keys between these are visible to one of the queries, and to all of them.
    low, high = 0, T_k - 1
    all_low, all_high = low, high
    if CAUSAL:
        high, all_high = (min(T_k - 1, i + offset) for i in (last, row))
    if left is not None:
        low, all_low = (max(0, i + offset - left) for i in (row, last))
    masked = {col: how for (_, _, col), how in copies.items() if how is not None}
    for col in range(0, T_k, tile.BLOCK_K):
        end = col + tile.BLOCK_K - 1
        assert col in masked or end < low or high < col
        assert masked.get(col, True) or all_low <= col <= end <= all_high


def length(rng):
    longest, step = rng.choice((2, 10, 30)), rng.choice((64, 61))
    return max(1, rng.randint(0, longest) * step + rng.randint(-1, 1))


@pytest.fixture
def launched(monkeypatch):
    """A function of the arguments of launch_forward: the programs, the ForwardSizes and
    the options that it launches, on a GPU with this many multiprocessors.
    """
    launches, machine = [], SimpleNamespace()
    stub = SimpleNamespace(
        launch=lambda *x, **y: launches.append((x, y)), zeros=Anything()
    )
    monkeypatch.setattr(hopper, "plans", stub)
    monkeypatch.setattr(hopper, "gluon_descriptor", Anything())
    monkeypatch.setattr(hopper, "descriptors_of_columns", lambda *x: (None, None))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: machine)

    def launch(processors, *arguments):
        machine.multi_processor_count = processors
        hopper.launch_forward.__wrapped__(*arguments)
        (_, _, programs, *rest), options = launches[0]
        launches.clear()
        last = rest[-len(hopper.ForwardSizes._fields) :]
        return programs, hopper.ForwardSizes(*last), options

    return launch


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("d", hopper_tiles.TILES)
def test_consumers_use_and_release_what_is_copied(d, packed, mask, launched):
    rng = random.Random(f"{d}, {packed}, {mask}")
    for _ in range(8):
        processors = rng.choice((1, 2, 5))
        H_kv, B, packing = rng.randint(1, 5), rng.randint(1, 3), None
        H = H_kv * rng.choice((1, 2, 3))
        left = length(rng) if mask == "window" else None
        if packed:
            lengths = [[length(rng) for _ in range(B)] for _ in "qk"]
            starts = [Integers(itertools.accumulate(x, initial=0)) for x in lengths]
            packing = SimpleNamespace(
                starts_q=starts[0], starts_k=starts[1], longest_k=max(lengths[1])
            )
            shapes = (starts[0][-1], H, d), (starts[1][-1], H_kv, d)
            places = list(zip(starts[0], lengths[0], strict=False))
        else:
            T_q, T_k = length(rng), length(rng)
            shapes = (B, H, T_q, d), (B, H_kv, T_k, d)
            places, lengths = range(B), [[T_q] * B]
        q, k = (torch.empty(shape, device="meta") for shape in shapes)
        tile = rng.choice(hopper_tiles.TILES[d])
        how = score_mods.unchanged(mask != "full", 1.0, left), packing, tile
        keep = mask != "window" and rng.random() < 0.5
        programs, sizes, options = launched(processors, q, k, k, q, None, *how, keep)
        found = []
        for n in range(programs):
            language = Language(n, programs)
            for queries, copies in Program(language, sizes, **options).tiles():
                judge(queries, copies, sizes, left=left, **options)
                found.append(queries)
        assert len(found) == len(set(found))
        for place, T_q in zip(places, lengths[0], strict=True):
            rows = range(0, T_q, ROWS)
            assert {*itertools.product([place], range(H), rows)} <= {*found}
        every = tile.CONSUMERS * ROWS

        def overflowed(task, every=every):
            return bool((task.row // every + task.h) % 3 == 1)

        second = [
            queries
            for n in range(programs)
            for queries, _ in Program(
                Language(n, programs), sizes, **options | {"KEEP": False},
                left=overflowed,
            ).tiles()
        ]  # fmt: skip
        assert sorted(second) == sorted(
            (place, h, row) for place, h, row in found if (row // every + h) % 3 == 1
        )


def random_lists(rng, *shape):
    """The kinds of all tiles, and the lists that tile_lists would make of them; places
    that it leaves as they were are -1.
    """
    kinds, lists = torch.empty(shape), torch.full((*shape[:3], 2 + shape[3]), -1)
    for row in itertools.product(*map(range, shape[:3])):
        weights = rng.choice(((1, 0, 0), (0, 1, 0), (0, 0, 1), (3, 1, 3)))
        kinds[row] = torch.tensor(rng.choices((NONE, SOME, ALL), weights, k=shape[3]))
        full, some = ((kinds[row] == kind).nonzero()[:, 0] for kind in (ALL, SOME))
        listed = torch.cat((full, some))
        counts = torch.tensor([len(full), len(listed)])
        # Of an empty list the first tile is read.
        numbers = torch.cat((counts, listed if len(listed) else torch.zeros(1)))
        lists[row][: len(numbers)] = numbers
    return kinds, lists


@pytest.mark.parametrize("d", hopper_tiles.TILES)
def test_blocks_of_a_list(d, launched, monkeypatch):
    """Producer and consumers agree on the blocks of any list, and only blocks that are
    seen by every query need no mask.
    """
    rng = random.Random(d)
    monkeypatch.setattr(hopper.score_arguments, "for_kernel", Anything())
    for _ in range(12):
        H_kv, B = rng.randint(1, 3), rng.randint(1, 3)
        H, T_q, T_k = H_kv * rng.choice((1, 3)), length(rng), length(rng)
        q, k = torch.empty(B, H, T_q, d, device="meta"), torch.empty(B, H_kv, T_k, d)
        tile = rng.choice(
            [tile for tile in hopper_tiles.TILES[d] if tile.CONSUMERS < 3]
        )
        BLOCK_Q = ROWS * tile.CONSUMERS
        by_batch, by_head = rng.choice((False, True)), rng.choice((False, True))
        outer = B if by_batch else 1, H if by_head else 1
        blocks = -(-T_q // BLOCK_Q), -(-T_k // tile.BLOCK_K)
        kinds, lists = random_lists(rng, *outer, *blocks)
        monkeypatch.setattr(hopper.tile_lists, "of_queries", lambda *x, y=lists: y)
        mask = SimpleNamespace(depends=(by_batch, by_head), lists=score_mods.Lists())
        score_mod = score_mods.unchanged(rng.random() < 0.5, 1.0)._replace(mask=mask)
        how = score_mod, None, tile
        processors = rng.choice((1, 2, 5))
        programs, sizes, options = launched(processors, q, k, k, q, None, *how)
        sizes = sizes._replace(lists=Integers(lists.flatten().tolist()))
        kinds, found = kinds.expand(B, H, *blocks), []
        for n in range(programs):
            program = Program(Language(n, programs), sizes, **options)
            for (b, h, row), copies in program.tiles():
                found.append((b, h, row))
                kind = kinds[b, h, row // BLOCK_Q]
                wanted = {
                    (b, h // sizes.GROUP, int(j) * tile.BLOCK_K): bool(kind[j] == SOME)
                    for j in kind.nonzero()[:, 0]
                }
                assert copies == (wanted or {(b, h // sizes.GROUP, 0): True})
        rows = range(0, blocks[0] * BLOCK_Q, ROWS)
        assert sorted(found) == [*itertools.product(range(B), range(H), rows)]
