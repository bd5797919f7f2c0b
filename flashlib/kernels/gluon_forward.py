"""Pieces that the forward kernels for Hopper share: copies into rings of slots, the
queue of tiles, which blocks of keys a query sees, the two products, and the online
softmax.

Chapter *Hopper*. A warp group of four warps computes ROWS rows of queries, and passes
through the blocks of K and V that these rows see.

The barriers of hopper.forward_kernel. A program takes tiles, and for each of them
blocks of K and V, which it counts through all tiles:

=========== ========================== =================================================
barrier     a phase ends with          who waits for it
=========== ========================== =================================================
q.ready     the copy of a consumer's   this consumer, before its first scores; one for
            rows of Q                  each consumer
q.empty     these rows are in          the producer, before it copies the rows of the
            registers, or the rows of  next tile into the same slot
            O have left the same slot
k.ready     the copy of block n of K   every consumer, before S of block n; SLOTS of
                                       these
k.empty     all consumers have read    the producer, before it copies block n + SLOTS
            block n of K               into the same slot
v.ready,    the same for V             every consumer, before P V of block n, and the
v.empty                                producer, as for K
queue.ready the producer has stored    every consumer, before it reads the index; two of
            the index of tile t        these
queue.empty all consumers have read    the producer, before it stores the index of tile
            the index                  t + 2 in the same slot
bias.ready, the tiles of a bias that   as for K: gluon_bias.py
bias.empty  is copied
=========== ========================== =================================================

A consumer also waits for the blocks of its tile that only other consumers see, and
releases them, so that each phase is completed by all.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
)

from flashlib.kernels.gluon_bias import skip_bias
from flashlib.kernels.gluon_tiles import (
    ROWS,
    Ring,
    accumulator,
    first_columns,
    make_barriers,
    make_slots,
)
from flashlib.kernels.tiles import LN_2


class WideRing(NamedTuple):
    """A Ring whose tiles may have more columns than a slot; rest has the others. Where
    there are none, it is the slots again.
    """

    slots: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor


@gluon.jit
def make_ring(
    dtype: gl.constexpr,
    SLOTS: gl.constexpr,
    rows: gl.constexpr,
    D: gl.constexpr,
    readers: gl.constexpr,
):
    """A ring of slots for tiles [rows, D]. The sides of a tile must be powers of two,
    so 192 columns are 128 in the slots and 64 in the rest. If readers is 0, no barrier
    `empty` is needed, and the field has `ready` again.
    """
    FIRST: gl.constexpr = first_columns(D)
    slots = make_slots(dtype, SLOTS, rows, FIRST)
    ready = make_barriers(SLOTS, 1)
    empty = make_barriers(SLOTS, readers) if readers > 0 else ready
    rest = slots
    if FIRST < D:
        rest = make_slots(dtype, SLOTS, rows, D - FIRST)
    return WideRing(slots, ready, empty, rest)


@gluon.jit
def tile_in(ring, slot):
    """The tile in a slot, in two parts where the ring has two."""
    tile = ring.slots.index(slot)
    if ring.rest.shape[2] < ring.slots.shape[2]:
        tile = (tile, ring.rest.index(slot))
    return tile


@gluon.jit
def coordinates(x, b, h, row, col=0):
    """The coordinates of the tile of x at a row and a column of batch b; of packed x, b
    is the first row of a sequence and its length.
    """
    if len(x.block_type.shape) == 4:
        corner = b, h, row, col
    else:  # descriptors.packed_descriptor says why
        start, length, wrap = b[0], b[1], x.shape[3]
        corner = wrap, start + length, h, wrap - length + row, col
    return corner


@gluon.jit
def copy(x, b, h, row, ring, slot):
    """Start copying the tile of x at a row into a slot. Where the ring has two parts, x
    has a descriptor for each.
    """
    ready = ring.ready.index(slot)
    if ring.rest.shape[2] == ring.slots.shape[2]:
        mbarrier.expect(ready, x.block_type.nbytes)
        slots = ring.slots.index(slot)
        tma.async_copy_global_to_shared(x, coordinates(x, b, h, row), ready, slots)
    else:
        COL: gl.constexpr = ring.slots.shape[2]
        first, rest = x
        mbarrier.expect(ready, first.block_type.nbytes + rest.block_type.nbytes)
        tile, more = tile_in(ring, slot)
        tma.async_copy_global_to_shared(
            first, coordinates(first, b, h, row), ready, tile
        )
        tma.async_copy_global_to_shared(
            rest, coordinates(rest, b, h, row, COL), ready, more
        )


@gluon.jit
def refill(x, b, h, row, ring, slot, phase):
    """Start copying the tile of x at a row into a slot as soon as the slot is empty."""
    # The wait before the first use is for the phase before the first, which counts as
    # complete.
    mbarrier.wait(ring.empty.index(slot), phase ^ 1)
    copy(x, b, h, row, ring, slot)


@gluon.jit
def make_queue(readers: gl.constexpr):
    """A ring with two slots for the index of a tile."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slots = gl.allocate_shared_memory(gl.int32, [2, 1], layout)
    return Ring(slots, make_barriers(2, 1), make_barriers(2, readers))


@gluon.jit
def push(n, turn, queue):
    """Pass the consumers the index of their next tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(queue.empty.index(turn % 2), (turn // 2 & 1) ^ 1)
    queue.slots.index(turn % 2).store(gl.full([1], n, gl.int32, layout))
    mbarrier.arrive(queue.ready.index(turn % 2), count=1)


@gluon.jit
def pop(turn, queue):
    """The index that the producer has pushed."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(queue.ready.index(turn % 2), turn // 2 & 1)
    n = gl.max(queue.slots.index(turn % 2).load(layout), 0)
    mbarrier.arrive(queue.empty.index(turn % 2), count=1)
    return n


@gluon.jit
def release(ring, count):
    """Say that this consumer is done with the count-th block."""
    mbarrier.arrive(ring.empty.index(count % ring.slots.shape[0]), count=1)


@gluon.jit
def block_counts(
    row, rows: gl.constexpr, T_q, T_k, CAUSAL: gl.constexpr, BLOCK_K: gl.constexpr
):
    """How many blocks of keys every query from row to row + rows - 1 sees, and how many
    at least one of them sees.
    """
    # Queries that see no key read one block, and mask all of it.
    full_end, end = T_k // BLOCK_K, gl.cdiv(gl.maximum(T_k, 1), BLOCK_K)
    if CAUSAL:
        full_end = gl.minimum(full_end, gl.maximum(row + 1 + T_k - T_q, 0) // BLOCK_K)
        end = gl.minimum(end, gl.cdiv(gl.maximum(row + rows + T_k - T_q, 1), BLOCK_K))
    return full_end, end


@gluon.jit
def visible_keys(
    row, rows: gl.constexpr, T_q, T_k, CAUSAL: gl.constexpr, layout: gl.constexpr
):
    """How many keys each query from row on sees, [rows]."""
    seen = gl.full([rows], T_k, gl.int32, layout)  # [rows]
    if CAUSAL:
        i = row + gl.arange(0, rows, layout)  # [rows]
        seen = gl.minimum(seen, i + (T_k - T_q + 1))
    return seen


@gluon.jit
def new_maximum(s, m, scale_log2, seen, col, MASKED: gl.constexpr):
    """The raw scores s [rows, BLOCK_K] of the keys from col on, -inf where a query does
    not see a key, and the larger of m [rows] and their maximum, in base 2. A query sees
    the keys before seen [rows].
    """
    if MASKED:
        j = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))  # [BLOCK_K]
        s = gl.where(j[None, :] < (seen - col)[:, None], s, -float("inf"))
    return s, gl.maximum(m, gl.max(s, 1) * scale_log2)


@gluon.jit
def weights(s, m, m_new, scale_log2):
    """The weights of the raw scores s [rows, BLOCK_K], and the factor [rows] that
    brings earlier sums from the maximum m to m_new.
    """
    # A multiply-add and an exponential.
    p = gl.exp2(s * scale_log2 - m_new[:, None])  # [rows, BLOCK_K]
    return p, gl.exp2(m - m_new)


@gluon.jit
def thread_sums(p):
    """The sums [ROWS, 4] of the weights p [ROWS, BLOCK_K] that each of the four threads
    of a row holds. Adding those four takes shuffles, once a tile, not once a block.
    """
    pairs = gl.reshape(p, [ROWS, p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(pairs, 3), 1)


@gluon.jit
def before_next_wait(m):
    """m [ROWS], computed before the wait that comes next in the program. ptxas moves
    waits to earlier places, but not across a store, so here is a store that needs m
    and never takes place.
    """
    nowhere = gl.zeros_like(m).to(gl.int32)
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; setp.gt.f32 never, $1, 0f7F800000;"
        " @never st.volatile.shared.f32 [$2], $1; mov.f32 $0, $1; }",
        "=f,f,r", [m, nowhere], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def log_sum_exp(m, l):
    """L [rows] in natural units from m in base 2 and l, and what to divide O by; L is
    -inf where l is 0, in a row that sees no key or only scores of -inf.
    """
    l_safe = gl.where(l == 0.0, 1.0, l)  # [rows]
    return gl.where(l == 0.0, -float("inf"), (m + gl.log2(l_safe)) * LN_2), l_safe


@gluon.jit
def start_scores(q_tile, k_ring, count):
    """Start S = Q K^T, [ROWS, BLOCK_K], for the count-th block of keys; Q is in shared
    memory or in registers.
    """
    SLOTS: gl.constexpr = k_ring.slots.shape[0]
    BLOCK_K: gl.constexpr = k_ring.slots.shape[1]
    mbarrier.wait(k_ring.ready.index(count % SLOTS), count // SLOTS & 1)
    k_tile = k_ring.slots.index(count % SLOTS)  # [BLOCK_K, D]
    layout: gl.constexpr = accumulator(BLOCK_K)
    unread = gl.zeros([ROWS, BLOCK_K], gl.float32, layout)  # [ROWS, BLOCK_K]
    TWO: gl.constexpr = k_ring.rest.shape[2] < k_ring.slots.shape[2]
    first = q_tile[0] if TWO else q_tile
    s = warpgroup_mma(
        first, k_tile.permute((1, 0)), unread, use_acc=False, is_async=True
    )
    if TWO:
        k_rest = k_ring.rest.index(count % SLOTS)  # [BLOCK_K, D - FIRST]
        s = warpgroup_mma(q_tile[1], k_rest.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def start_values(acc, bits, v_ring, count):
    """Start acc += P V, [ROWS, D], for the count-th block of values; bits are those of
    P.
    """
    SLOTS: gl.constexpr = v_ring.slots.shape[0]
    D: gl.constexpr = v_ring.slots.shape[2]
    factor: gl.constexpr = gl.DotOperandLayout(0, accumulator(D), 2)
    p = gl.convert_layout(bits.to(v_ring.slots.dtype, bitcast=True), factor)
    mbarrier.wait(v_ring.ready.index(count % SLOTS), count // SLOTS & 1)
    return warpgroup_mma(p, v_ring.slots.index(count % SLOTS), acc, is_async=True)


@gluon.jit
def skip(blocks, count, shared):
    """Release blocks that only the other consumers see; returns the new count."""
    k_ring, v_ring = shared.k, shared.v
    SLOTS: gl.constexpr = k_ring.slots.shape[0]
    for _ in range(blocks):
        if shared.bias is not None:
            skip_bias(shared.bias, count)
        mbarrier.wait(k_ring.ready.index(count % SLOTS), count // SLOTS & 1)
        release(k_ring, count)
        mbarrier.wait(v_ring.ready.index(count % SLOTS), count // SLOTS & 1)
        release(v_ring, count)
        count += 1
    return count


@gluon.jit
def attend_first(s, m, scale_log2, seen, col, MASKED: gl.constexpr):
    """Weights, maximum and sums [ROWS, 4] of a tile's first block of scores."""
    s, m = new_maximum(s, m, scale_log2, seen, col, MASKED)
    p, _alpha = weights(s, m, m, scale_log2)
    return p, m, thread_sums(p)
