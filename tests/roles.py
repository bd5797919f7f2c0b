"""The roles of a Hopper kernel as threads: a program of the kernel runs as Python, on
tensors, and its warp groups wait for each other at the barriers that it has.

Copies arrive late, and a product that was started reads its factors when it is waited
for, or at once. So a tile that is overwritten too early, a wait for the wrong phase or
an arrival too many shows as a wrong result, and one too few as a program that hangs.
What threads do not show: registers, layouts, fences, and how fast a GPU is.
"""

import math
import random
import threading
import time
from types import SimpleNamespace

import torch
from device import as_python

# The functions of hopper.forward_kernel, its own first, of keys_kernel of
# hopper_backward, and of both kernels of hopper_wide.
FORWARD = (
    "head_and_block", "task_at", "window_start", "produce", "skip", "hide_scores",
    "attend_first", "attend", "attend_keeping", "store_checked", "has_overflowed",
    "consume", "forward_kernel",
    # of gluon_forward, gluon_lists and gluon_scores
    "make_ring", "tile_in", "coordinates", "copy", "refill", "make_queue", "push",
    "pop", "release", "block_counts", "visible_keys", "new_maximum", "weights",
    "thread_sums", "log_sum_exp", "start_scores", "start_values", "column",
    "change_tile", "bias_of",
)  # fmt: skip
BACKWARD = (
    "copy_queries", "produce_queries", "add_queries", "consume_queries", "keys_kernel",
    # of gluon_backward, gluon_keys, gluon_fused, gluon_order and gluon_scores
    "make_pair", "make_rows", "pair_in", "read_rows", "meet", "copy_pair", "copy_block",
    "store_keys",
    "keys_by_formula", "block_of", "count_steps", "head_in", "row_in", "own_factors",
    "own_rows", "start_product", "start_first_scores", "start_half", "start_part",
    "add_half", "give_last_part",
    "take_ticket", "make_parts", "store_part", "part_stored", "give_part",
    "add_or_store", "add_lines", "count_part", "next_turn", "add_parts",
    "change_transposed", "less_bias", "times_derivative",
)  # fmt: skip
# What keys_kernel of hopper_backward takes from a list, with a mask that is a function.
LISTED = (
    "section_of_lists", "keys_by_list", "entry_at", "queries_of", "make_notes",
    "store_note", "read_note", "without_hidden",
)  # fmt: skip
WIDE = (
    "make_shared_tiles", "produce_queries", "hand_over", "add_product", "add_queries",
    "consume_queries", "keys_kernel",
    "produce_keys", "start_pair", "add_keys", "consume_keys", "queries_kernel",
    # of gluon_backward and gluon_keys
    "make_pair", "make_rows", "pair_in", "read_rows", "meet", "copy_pair", "copy_block",
    "keys_by_formula", "block_of",
)  # fmt: skip
SWIZZLED = 64  # columns of 16 bits that shared memory keeps together
LIMIT = 60  # seconds that a role waits at a barrier


class Array(torch.Tensor):
    """A tensor in registers. x += 1 is another one, as in Triton."""

    type = SimpleNamespace(layout=None)

    def __iadd__(self, x):
        return self + x

    def __isub__(self, x):
        return self - x

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)


def array(x):
    return torch.as_tensor(x).as_subclass(Array)


class Barrier:
    """A barrier whose phases end with the count-th arrival and the last of the bytes
    that were announced.
    """

    def __init__(self, count):
        self.count, self.arrived, self.bytes, self.done = count, 0, 0, 0
        self.changed = threading.Condition()

    def add(self, arrivals, size):
        with self.changed:
            self.arrived, self.bytes = self.arrived + arrivals, self.bytes + size
            assert self.arrived <= self.count, "more arrivals than a phase has"
            if self.arrived == self.count and self.bytes == 0:
                self.arrived, self.done = 0, self.done + 1
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            passed = self.changed.wait_for(lambda: self.done % 2 != parity, LIMIT)
        assert passed, f"waits for parity {parity} after {self.done} phases"


class Tile:
    """A tile in shared memory, or a part of it."""

    def __init__(self, x, part=False):
        self.x, self.shape, self.dtype, self.layout = x, x.shape, x.dtype, None
        self.part = part

    def index(self, n):
        return Tile(self.x[n], self.part)

    def slice(self, start, length, dim=0):
        return Tile(self.x.narrow(dim, start, length), True)

    def permute(self, order):
        return Tile(self.x.permute(order), self.part)

    def _reinterpret(self, dtype, shape, layout):
        assert not self.part, "columns of a part are as far apart as those of its tile"
        if tuple(shape[1:]) == (SWIZZLED, SWIZZLED):
            return Squares(self.x)
        return Tile(self.x.view(shape))

    def load(self, layout):
        return array(self.x.clone())

    def store(self, x):
        self.x.copy_(x)


class Squares:
    """Slots of tiles as squares [SWIZZLED, SWIZZLED], in the order of shared memory:
    the first columns of all rows of a tile come before the next columns.
    """

    def __init__(self, x):
        self.squares = [
            Tile(square, True)
            for tile in x
            for columns in tile.split(SWIZZLED, 1)
            for square in columns.split(SWIZZLED, 0)
        ]

    def index(self, n):
        return self.squares[int(n)]


class Pointer:
    """A pointer to the first number of a contiguous tensor, or pointers from there."""

    def __init__(self, x, offset=0):
        self.x, self.offset = x, offset
        self.dtype = SimpleNamespace(element_ty=x.dtype)

    def __add__(self, offset):
        return Pointer(self.x, self.offset + offset)


class Descriptor:
    """A tensor descriptor: outside of its shape it reads zeros, and addresses, which
    it computes in 64 bits, wrap around.
    """

    def __init__(self, made):
        self.dtype, size = made.base.dtype, made.base.dtype.itemsize
        self.shape, self.strides, self.layout = made.shape, made.strides, None
        nbytes = math.prod(made.block_shape) * size
        self.block_type = SimpleNamespace(shape=made.block_shape, nbytes=nbytes)
        storage = made.base.untyped_storage().nbytes() // size
        start = made.base.storage_offset()
        self.memory = made.base.as_strided((storage - start,), (1,), start)
        self.wrap = 2**64 // size

    def rows(self, corner):
        """(row of a tile, where it is in memory) of those inside the tensor."""
        rows, cols = self.block_type.shape[-2:]
        cols = min(cols, self.shape[-1] - int(corner[-1]))
        for row in range(rows):
            at = [int(x) for x in corner]
            at[-2] += row
            if all(0 <= x < n for x, n in zip(at, self.shape, strict=True)):
                place = sum(x * n for x, n in zip(at, self.strides, strict=True))
                place %= self.wrap
                yield row, slice(place, place + cols)

    def read(self, corner):
        tile = torch.zeros(self.block_type.shape[-2:], dtype=self.memory.dtype)
        for row, place in self.rows(corner):
            tile[row, : place.stop - place.start] = self.memory[place]
        return tile

    def write(self, corner, tile, add=False):
        for row, place in self.rows(corner):
            given = tile.x[row, : place.stop - place.start]
            self.memory[place] = given + (self.memory[place] if add else 0)


class Product:
    """a b + acc, read when it is waited for, or at once."""

    def __init__(self, a, b, acc, use_acc, early):
        self.factors, self.acc, self.use_acc = (a, b), acc, use_acc
        self.found = self.compute() if early else None

    def compute(self):
        a, b = (x.x if isinstance(x, Tile) else x for x in self.factors)
        found = a.float() @ b.float()
        return array(found + value(self.acc) if self.use_acc else found)


def value(x):
    """The number that a product, or a tensor, is."""
    if not isinstance(x, Product):
        return x
    return x.compute() if x.found is None else x.found


def quotient(x, y):
    """x / y, rounded up where x is not negative, as integers are divided on a GPU."""
    return torch.div(array(x) + y - 1, y, rounding_mode="trunc")


class Language:
    """What a kernel calls, for one program."""

    float32, int16, int32, int64 = torch.float32, torch.int16, torch.int32, torch.int64
    NVMMASharedLayout = SimpleNamespace(get_default_for=lambda *x: None)
    cdiv = staticmethod(quotient)
    SliceLayout = DotOperandLayout = SwizzledSharedLayout = BlockedLayout = (
        staticmethod(lambda *x, **options: None)
    )
    static_range = range

    def __init__(self, program, programs, rng):
        self.program, self.programs, self.rng = program, programs, rng
        self.copies = []
        self.own = threading.local()  # what a role has started to write

    def program_id(self, axis):
        return array(self.program)

    def num_programs(self, axis):
        return self.programs

    def pause(self, likely=0.1):
        """Let the other roles run on, now and then."""
        if self.rng.random() < likely:
            time.sleep(0.02)

    # -- registers

    exp2, log2, where = map(staticmethod, (torch.exp2, torch.log2, torch.where))
    abs = staticmethod(torch.abs)
    reshape, sum, max = map(staticmethod, (torch.reshape, torch.sum, torch.amax))
    permute = staticmethod(torch.permute)
    split = staticmethod(lambda x: x.unbind(-1))
    convert_layout = staticmethod(lambda x, layout: x)
    zeros_like = staticmethod(torch.zeros_like)

    def arange(self, start, end, layout):
        return array(torch.arange(start, end))

    def full(self, shape, x, dtype, layout):
        return array(torch.full(shape, x, dtype=dtype))

    def zeros(self, shape, dtype, layout):
        return self.full(shape, 0.0, dtype, layout)

    def minimum(self, x, y):
        return torch.minimum(array(x), array(y))

    def maximum(self, x, y):
        return torch.maximum(array(x), array(y))

    def load(self, pointer, mask=True, other=0, volatile=False):
        if isinstance(mask, torch.Tensor) and mask.dim():
            offset = torch.where(mask, pointer.offset, 0)
            return array(torch.where(mask, pointer.x.flatten()[offset], other))
        return array(pointer.x.flatten()[pointer.offset] if mask else other)

    def store(self, pointer, x, mask):
        offset, mask = torch.broadcast_tensors(pointer.offset, mask)
        x = array(x).to(pointer.x.dtype).expand_as(mask)
        pointer.x.view(-1)[offset[mask]] = x[mask]

    def atomic_add(self, pointer, x, sem):
        before = self.load(pointer).clone()
        pointer.x.view(-1)[pointer.offset] += x  # no two roles add to one number
        return before

    # -- shared memory

    def allocate_shared_memory(self, dtype, shape, layout):
        unknown = math.nan if dtype.is_floating_point else torch.iinfo(dtype).max
        return Tile(torch.full(shape, unknown, dtype=dtype))

    def make_slots(self, dtype, n, rows, columns):
        return self.allocate_shared_memory(dtype, [n, rows, columns], None)

    def make_barriers(self, n, count):
        return SimpleNamespace(index=[Barrier(count) for _ in range(n)].__getitem__)

    def wait(self, barrier, parity, pred=True):
        self.pause()
        if pred:
            barrier.wait(int(parity))

    def arrive(self, barrier, count=1, pred=True):
        if pred:
            barrier.add(count, 0)
        self.pause()

    def expect(self, barrier, size):
        barrier.add(1, size)

    def copy(self, tensor, corner, barrier, tile):
        def late():
            self.pause()
            tile.store(tensor.read(corner))
            barrier.add(0, -tensor.block_type.nbytes)

        self.copies.append(threading.Thread(target=late))
        self.copies[-1].start()

    def write(self, tensor, corner, tile, add=False):
        """Read the tile now, or when this role waits for what it started."""
        if self.rng.random() < 0.5:
            tensor.write(corner, tile, add)
        else:
            started = getattr(self.own, "started", [])
            self.own.started = [*started, (tensor, corner, tile, add)]

    def add(self, tensor, corner, tile):
        self.write(tensor, corner, tile, add=True)

    def written(self, pending=0):
        self.pause(0.3)
        for tensor, *what in getattr(self.own, "started", []):
            tensor.write(*what)
        self.own.started = []

    # -- products

    def product(self, a, b, acc, use_acc=True, is_async=True):
        return Product(a, b, acc, use_acc, self.rng.random() < 0.5)

    def products(self, pending, started):
        self.pause(0.3)
        found = tuple(map(value, started))
        return found if len(found) > 1 else found[0]

    def warp_specialize(self, roles, warps, registers):
        """Run each role in a thread, and raise what one of them raises."""
        raised = []

        def run(function, arguments):
            try:
                function(*arguments)
            except Exception as error:
                raised.append(error)

        threads = [threading.Thread(target=run, args=role) for role in roles]
        for thread in threads:
            thread.start()
        for thread in (*threads, *self.copies):
            thread.join()
        if raised:
            raise raised[0]


class Threads:
    """Stands where a kernel stood, made of the functions of these names, and runs its
    programs one after another.
    """

    def __init__(self, kernel, functions, names, seed=0):
        self.kernel, self.functions, self.names = kernel, functions, names
        self.rng, self.programs = random.Random(seed), 0

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **options):
            for program in range(grid[0]):
                self.run(program, grid[0], arguments, options)

        return launch

    def run(self, program, programs, arguments, options):
        language = Language(program, programs, self.rng)
        names = {
            name: getattr(x, "value", x) for name, x in self.names.items()
        } | {
            "gl": language, "mbarrier": language, "accumulator": lambda columns: None,
            "tma": SimpleNamespace(
                async_copy_global_to_shared=language.copy,
                async_copy_shared_to_global=language.write,
                store_wait=language.written,
            ),
            "start_adding": language.add, "wait_until_added": language.written,
            "fence_async_shared": lambda: None, "make_slots": language.make_slots,
            "before_next_wait": lambda x: x, "warpgroup_mma_init": lambda x: x,
            "make_barriers": language.make_barriers,
            "warpgroup_mma": language.product,
            "warpgroup_mma_wait": language.products,
        }  # fmt: skip
        given = []
        for x in arguments:
            if hasattr(x, "block_shape"):
                x = Descriptor(x)
            elif isinstance(x, torch.Tensor):
                x = Pointer(x)
            given.append(x)
        run = getattr(as_python(self.functions, **names), self.kernel)
        run(*given, **options)
        self.programs += 1
