"""A bias that is added to scores, in the kernels for Hopper (sm_90), in Gluon.

Chapter *Masks*, its depth (``eq-masks-bias-gradient``). Where the bias has a number for
each pair, the copy engine brings its tiles to shared memory while earlier blocks are
computed, and consumers read them from there. In the forward pass they have a ring of
slots. The backward pass has no shared memory left, but each tile of dS has as many
numbers as the bias that is needed to compute it, and is stored when that has been read:
the bias comes to where dS will be. A bias that the copy engine cannot read, as one of
another dtype or one with the same numbers for all queries, is read from memory by the
consumers.

============ ====================== ==================================================
barrier      a phase ends with      who waits for it
============ ====================== ==================================================
ready        the copies of the      every consumer, before it adds the bias to S of
             tiles of block n       block n
empty        all consumers have     the producer, before it copies block n + SLOTS into
(forward)    read their tiles       the same slot
parts.ready  both consumers have    the producer, before it copies the bias of block n +
(backward)   given their part of    2 to where dS of block n was
             dQ of block n
============ ====================== ==================================================
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from flashlib.kernels.descriptors import gluon_descriptor
from flashlib.kernels.gluon_tiles import (
    ROWS,
    Ring,
    accumulator,
    make_barriers,
    make_slots,
)
from flashlib.kernels.hopper_host import copies_bias
from flashlib.kernels.tiles import LOG2_E

SLOTS = gl.constexpr(2)  # for blocks of keys, in the forward pass


# -- read by consumers


@gluon.jit
def times(n, stride):
    """n times a stride, where None stands for a stride of 1."""
    if stride is not None:
        n = n * stride
    return n


@gluon.jit
def bias_at(b, h, row, col, i, j, sizes, change, INSIDE: gl.constexpr):
    """The bias of queries row + i and keys col + j, where i and j are two-dimensional
    and broadcast against each other. Queries beyond the last one get its bias, and keys
    beyond the last one get 0.

    If all keys are INSIDE, the load has no mask and can take two elements at once. The
    offset in a tile fits in 32 bits (``hopper_host.FARTHEST_BIAS``), which saves
    registers.
    """
    i = gl.minimum(i, sizes.T_q - 1 - row)
    by = change.strides
    head = change.bias + times(b.to(gl.int64), by[0]) + times(h.to(gl.int64), by[1])
    corner = head + times(row.to(gl.int64), by[2]) + times(col.to(gl.int64), by[3])
    pointers = corner + times(i, by[2]) + times(j.to(gl.int64), by[3])
    if INSIDE:
        bias = gl.load(pointers)
    else:
        bias = gl.load(pointers, mask=j < sizes.T_k - col, other=0.0)
    return bias


@gluon.jit
def less_bias(lse, b, h, row, col, sizes, change, INSIDE: gl.constexpr):
    """L in base 2, [1, QUERIES], less the bias [ROWS, QUERIES] of the keys from col on
    and the queries from row on, which then need not be added to the scores.
    """
    if change.bias is not None:
        layout: gl.constexpr = accumulator(lse.shape[1])
        j = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]  # [ROWS, 1]
        i = gl.arange(0, lse.shape[1], gl.SliceLayout(0, layout))[None, :]
        bias = bias_at(b, h, row, col, i, j, sizes, change, INSIDE)  # [ROWS, QUERIES]
        lse = lse - bias.to(gl.float32) * LOG2_E
    return lse


# -- copied, forward


def bias_descriptor(bias, q, k, BLOCK_K):
    """A descriptor of a bias, with tiles [ROWS, BLOCK_K]; None without one, or where it
    is not copied.
    """
    if bias is None or not copies_bias(q, k, bias):
        return None
    return gluon_descriptor(bias, ROWS.value, BLOCK_K)


@gluon.jit
def make_bias_ring(
    dtype: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """Slots for tiles of a bias, one for each consumer in a slot."""
    slots = make_slots(dtype, SLOTS * CONSUMERS, ROWS, BLOCK_K)
    ready = make_barriers(SLOTS, 1)
    return Ring(slots, ready, make_barriers(SLOTS, CONSUMERS))


@gluon.jit
def refill_bias(bias, b, h, row, col, ring, count):
    """Start copying the tiles of all consumers for the count-th block of keys, as soon
    as its slot is empty.
    """
    CONSUMERS: gl.constexpr = ring.slots.shape[0] // SLOTS
    slot, phase = count % SLOTS, count // SLOTS & 1
    mbarrier.wait(ring.empty.index(slot), phase ^ 1)
    ready = ring.ready.index(slot)
    mbarrier.expect(ready, CONSUMERS * bias.block_type.nbytes)
    # All batches, or heads, share a bias that has one.
    b, h = gl.minimum(b, bias.shape[0] - 1), gl.minimum(h, bias.shape[1] - 1)
    for c in gl.static_range(CONSUMERS):
        tile = ring.slots.index(slot * CONSUMERS + c)  # [ROWS, BLOCK_K]
        corner = [b, h, row + c * ROWS, col]
        tma.async_copy_global_to_shared(bias, corner, ready, tile)


@gluon.jit
def read_bias(c, ring, count, BLOCK_K: gl.constexpr):
    """The tile [ROWS, BLOCK_K] of consumer c for the count-th block of keys."""
    CONSUMERS: gl.constexpr = ring.slots.shape[0] // SLOTS
    slot = count % SLOTS
    mbarrier.wait(ring.ready.index(slot), count // SLOTS & 1)
    bias = ring.slots.index(slot * CONSUMERS + c).load(accumulator(BLOCK_K))
    # Without the fence the copy engine may overwrite what is still being read.
    fence_async_shared()
    mbarrier.arrive(ring.empty.index(slot), count=1)
    return bias


@gluon.jit
def skip_bias(ring, count):
    """Release the tiles of a block of keys that only the other consumers see."""
    slot = count % SLOTS
    mbarrier.wait(ring.ready.index(slot), count // SLOTS & 1)
    mbarrier.arrive(ring.empty.index(slot), count=1)


@gluon.jit
def bias_of(
    queries, count, col, sizes, change, BLOCK_K: gl.constexpr, INSIDE: gl.constexpr
):  # fmt: skip
    """The bias [ROWS, BLOCK_K] of the count-th block of keys, those from col on; 0
    without one.
    """
    bias = 0.0
    if queries.bias_ring is not None:
        bias = read_bias(queries.c, queries.bias_ring, count, BLOCK_K)
    elif change.bias is not None:
        layout: gl.constexpr = accumulator(BLOCK_K)
        row = queries.position - (sizes.T_k - sizes.T_q)
        i = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]  # [ROWS, 1]
        j = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))[None, :]  # [1, BLOCK_K]
        bias = bias_at(queries.b, queries.h, row, col, i, j, sizes, change, INSIDE)
    return bias


# -- copied, backward


@gluon.jit
def bias_tiles(ds):
    """The slots of dS as tiles [ROWS, ROWS], queries in rows, one for each half of a
    block and each consumer, where this consumer will store its dS.
    """
    TILES: gl.constexpr = ds.shape[0] * (ds.shape[1] // ROWS) * (ds.shape[2] // ROWS)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], ds.dtype)
    return ds._reinterpret(ds.dtype, [TILES, ROWS, ROWS], square)


@gluon.jit
def copy_bias(bias, n, corner, shared):
    """Start copying the bias of the n-th block of queries to where its dS will be, once
    the dS of block n - 2 is no longer read: a consumer that has given a tile of a part
    of dQ has read what it is computed from.
    """
    ds, parts = shared.ds, shared.parts
    ACROSS: gl.constexpr = ds.shape[1] // ROWS  # consumers
    HALVES: gl.constexpr = ds.shape[2] // ROWS
    PART_SLOTS: gl.constexpr = parts.slots.shape[0] // ACROSS
    before = gl.maximum(n - 2, 0)
    phase = before // PART_SLOTS & 1
    mbarrier.wait(parts.ready.index(before % PART_SLOTS), phase, pred=n >= 2)
    tiles, ready = bias_tiles(ds), shared.bias_ready.index(n % 2)
    mbarrier.expect(ready, HALVES * ACROSS * bias.block_type.nbytes)
    # All batches, or heads, share a bias that has one.
    b, h, row, col = corner
    b, h = gl.minimum(b, bias.shape[0] - 1), gl.minimum(h, bias.shape[1] - 1)
    for half in gl.static_range(HALVES):
        for c in gl.static_range(ACROSS):
            tile = tiles.index((n % 2 * HALVES + half) * ACROSS + c)  # [ROWS, ROWS]
            place = [b, h, row + half * ROWS, col + c * ROWS]
            tma.async_copy_global_to_shared(bias, place, ready, tile)


@gluon.jit
def less_copied_bias(c, lse, n, half: gl.constexpr, shared):
    """L in base 2, [1, ROWS], less the bias [ROWS, ROWS] that copy_bias has copied."""
    ACROSS: gl.constexpr = shared.ds.shape[1] // ROWS
    HALVES: gl.constexpr = shared.ds.shape[2] // ROWS
    mbarrier.wait(shared.bias_ready.index(n % 2), n // 2 & 1)
    tile = bias_tiles(shared.ds).index((n % 2 * HALVES + half) * ACROSS + c)
    bias = tile.permute((1, 0)).load(accumulator(ROWS))  # [ROWS, ROWS], keys in rows
    return lse - bias.to(gl.float32) * LOG2_E
