"""The backward pass of masks that are functions, for Hopper (sm_90), in Gluon.

Chapter *Masks* (``eq-masks-kinds``); the sums, the division of labor and the adding of
dQ are those of the fused form of hopper_backward.py. A program owns a block of keys and
passes through the list of blocks of queries that see some of its keys, which
:func:`flashlib.kernels.tile_lists.in_order` makes. A list keeps the order of the
blocks: its step says whether it needs the mask. Parts of dQ are added in the order of
the keys, first or last ones first, so the turn of a part is its rank among those of its
block of queries. Programs of a head start in the same order, so none waits for one that
starts later, whatever the mask.
"""

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlib import plans
from flashlib.kernels import scores, tile_lists
from flashlib.kernels.descriptors import gluon_descriptor, row_descriptor
from flashlib.kernels.gluon_backward import (
    CONSUMERS,
    at,
    copy_pair,
    make_pair,
    make_rows,
    read_row,
    start_pair,
)
from flashlib.kernels.gluon_order import (
    choose_order,
    deferred,
    give_part,
    part_stored,
    start_adding,
    start_part,
    store_part,
    wait_until_added,
)
from flashlib.kernels.gluon_scores import (
    change_of,
    changed_keys,
    less_bias,
    times_derivative,
)
from flashlib.kernels.gluon_tiles import (
    ROWS,
    Ring,
    accumulator,
    make_barriers,
    make_slots,
)
from flashlib.kernels.hopper_backward import (
    BLOCK,
    FUSED,
    WARPS,
    Shared,
)
from flashlib.plain_checks import UNLIMITED

# Of a section whose first keys few queries see. About 132 programs run at a time, so of
# as many heads only four of each do.
MOST_HEADS = gl.constexpr(32)
# {d: the sides of the tiles that are classified}
SIDES = {d: (tile[0], BLOCK) for d, tile in FUSED.items()}


class MaskedSizes(NamedTuple):
    """What the kernel is told about the problem."""

    heads: int  # of keys
    GROUP: int
    PADDED: int  # the length of delta and lse2
    T_q: int
    T_k: int
    B: int
    section: int  # heads whose programs start together
    mixed: int  # 1 if every other section begins with the last keys
    cached: int  # blocks of queries, their gradients and dQ that fit in the L2 cache
    lists: torch.Tensor  # of tile_lists.in_order
    per_batch: int  # lists of heads from one batch to the next
    per_head: int  # and from one head to the next: 0 if they share one
    width: int  # numbers of a list
    sharing: int  # heads of the group that share an entry of the list
    slopes: torch.Tensor | None  # of ALiBi, and their strides
    slope_batch: int | None
    slope_head: int | None


class Listed(NamedTuple):
    """A block of keys and the list of blocks of queries that see it. If falling, dQ
    takes the parts of the last keys first, and the program the first queries first.
    """

    b: Any
    h: Any  # of keys
    col: Any
    entries: Any  # of the list, four numbers each
    count: Any  # of these
    falling: Any  # 1 or 0


class Step(NamedTuple):
    """A block of queries that a program takes."""

    row: Any
    partial: Any  # 1 if some of its pairs are hidden
    h: Any  # its head


@gluon.jit
def take_place(turns, programs, sizes):
    """As gluon_order.take_place: the block of keys and the head of a program, and
    whether its section begins with the last keys, 0 or 1.
    """
    place, total = gl.atomic_add(turns, 1, sem="relaxed"), sizes.B * sizes.heads
    # Where few queries see the first keys, as with a window or documents, programs that
    # begin with the last keys do not wait for their turn. If a section has many heads,
    # few programs of each run at a time, which hardly wait in the other order either.
    # So the last section begins with the first keys, whose programs are the longest.
    blocks = gl.load(sizes.lists)
    few = 2 * blocks < sizes.width // 4
    most = gl.minimum(MOST_HEADS, sizes.cached // gl.maximum(blocks * sizes.sharing, 1))
    size = gl.cdiv(total, gl.cdiv(total, gl.maximum(most, sizes.section)))
    size = gl.where(few, size, sizes.section)
    section = place // (programs * size)
    place, first = place % (programs * size), section * size
    heads = gl.minimum(size, total - first)
    number, head = place // heads, first + place % heads
    later = gl.cdiv(total, size) - 1 - section
    falling = sizes.mixed * gl.where(section > 0, later % 2, gl.minimum(later, 1))
    falling = gl.where(few, gl.minimum(later, 1), falling)
    return number + falling * (programs - 1 - 2 * number), head, falling


@gluon.jit
def own_list(number, head, falling, sizes, BLOCK_K: gl.constexpr):
    """The Listed of a program: a block of keys, of one of the heads of all batches."""
    b, h = head // sizes.heads, head % sizes.heads
    row = (b * sizes.per_batch + h * sizes.per_head).to(gl.int64)
    row = row * gl.cdiv(sizes.T_k, BLOCK_K) + number
    entries = sizes.lists + row * sizes.width
    count = gl.load(entries)
    return Listed(b, h, number * BLOCK_K, entries + 1, count, falling)


@gluon.jit
def entry(place, block):
    """Where entry number ``place`` of a program's list is, in the order in which it
    takes them, or the last one.
    """
    place = gl.maximum(gl.minimum(place, block.count - 1), 0)
    if block.falling != 0:
        place = gl.maximum(block.count - 1 - place, 0)
    return block.entries + 4 * place


@gluon.jit
def step_of(found, g, block, sizes, BLOCK_Q: gl.constexpr):
    """The Step of an entry for head g of those that share it."""
    tile = gl.load(found)
    h = block.h * sizes.GROUP + gl.load(found + 1) + g
    return Step(tile // 2 * BLOCK_Q, tile % 2, h)


@gluon.jit
def make_notes(SLOTS: gl.constexpr):
    """Slots for a number that the producer tells the consumers with a block."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [SLOTS, 1], layout)


@gluon.jit
def note(x, slots, slot):
    """Store a number, in a producer."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slots.index(slot).store(gl.full([1], x, gl.int32, layout))


@gluon.jit
def noted(slots, slot):
    """The number that the producer has stored."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(slots.index(slot).load(layout), 0)


@gluon.jit
def producer(q, k, v, do, lse2, delta, sizes, block, notes, shared):
    """Copy a block of K and V once, then the blocks of queries of its list: of an entry
    those of all heads that share it. The notes of a block are twice its first row, plus
    1 if some of its pairs are hidden, and its head: consumers have no registers left to
    read lists.
    """
    BLOCK_Q: gl.constexpr = q.block_type.shape[2]
    ring, statistics = shared.ring, shared.statistics
    SLOTS: gl.constexpr = ring.slots[0].shape[0]
    b, H, n = block.b, sizes.heads * sizes.GROUP, 0
    mbarrier.expect(shared.arrived, 2 * k.block_type.nbytes)
    copy_pair((k, v), (b, block.h, block.col, 0), shared.arrived, shared.own)
    following = step_of(entry(0, block), 0, block, sizes, BLOCK_Q)
    for place in range(block.count):
        step = following
        # The next entry is on its way while this warp waits for a slot.
        following = step_of(entry(place + 1, block), 0, block, sizes, BLOCK_Q)
        for g in range(sizes.sharing):
            slot, h = n % SLOTS, step.h + g
            mbarrier.wait(ring.empty.index(slot), (n // SLOTS & 1) ^ 1)
            note(2 * step.row + step.partial, notes[0], slot)
            note(h, notes[1], slot)
            ready = ring.ready.index(slot)
            mbarrier.expect(ready, 2 * q.block_type.nbytes + 2 * lse2.block_type.nbytes)
            copy_pair((q, do), (b, h, step.row, 0), ready, at(ring.slots, slot))
            copy_pair((lse2, delta), (b * H + h, step.row), ready, at(statistics, slot))
            n += 1


@gluon.jit
def without_hidden(p, row, col, b, h, sizes, rule, CAUSAL: gl.constexpr):
    """The weights p [ROWS, BLOCK_Q] of the keys from col on and of the queries of head
    h from row on, 0 where the mask hides a key.
    """
    BLOCK_Q: gl.constexpr = p.shape[1]
    j = col + gl.arange(0, ROWS, gl.SliceLayout(1, p.type.layout))  # [ROWS]
    i = row + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, p.type.layout))  # [BLOCK_Q]
    position = (i + (sizes.T_k - sizes.T_q))[None, :]  # [1, BLOCK_Q]
    key = j[:, None]  # [ROWS, 1]
    seen = rule[0](b, h, position, key, *rule[1]) & (key < sizes.T_k)
    if CAUSAL:
        seen = seen & (key <= position)
    return gl.where(seen, p, 0.0)  # [ROWS, BLOCK_Q]


@gluon.jit
def add_queries(
    c: gl.constexpr, dk, dv, n, invariants, change, notes, shared, CAUSAL: gl.constexpr
):  # fmt: skip
    """As hopper_backward.add_queries, with a mask where the notes say so."""
    own, k_columns, b, col, sizes, scale_log2 = invariants
    q_slots, do_slots = shared.ring.slots
    DEFERRED: gl.constexpr = deferred(q_slots.shape[2])
    SLOTS: gl.constexpr = q_slots.shape[0]
    BLOCK_Q: gl.constexpr = q_slots.shape[1]
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(BLOCK_Q))
    factor: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    slot = n % SLOTS
    q_tile, do_tile = q_slots.index(slot), do_slots.index(slot)  # [BLOCK_Q, D] each
    mbarrier.wait(shared.ring.ready.index(slot), n // SLOTS & 1)
    s, dp = start_pair(own, shared.ring.slots, slot)  # [ROWS, BLOCK_Q] each
    lse_rows = read_row(shared.statistics[0], slot, columns)[None, :]  # [1, BLOCK_Q]
    h = 0
    if change.bias is not None:
        h, row = noted(notes[1], slot), noted(notes[0], slot) // 2
        lse_rows = less_bias(lse_rows, b, h, col, row, sizes, change, False)
    s = warpgroup_mma_wait(1, [s])  # [ROWS, BLOCK_Q], unscaled; dP is still running
    place = noted(notes[0], slot)
    if sizes.slopes is not None or change.natural is not None:
        h = noted(notes[1], slot)
    at_query = place // 2 + sizes.T_k - sizes.T_q
    s, derivative = changed_keys(s, b, h, col, at_query, sizes, scale_log2, change)
    p = gl.exp2(s - lse_rows)  # [ROWS, BLOCK_Q]
    if place % 2 != 0:
        g = noted(notes[1], slot)
        p = without_hidden(p, place // 2, col, b, g, sizes, change.mask, CAUSAL)
    p_factor = gl.convert_layout(p.to(q_tile.dtype), factor)  # [ROWS, BLOCK_Q]
    p = times_derivative(p, derivative, change)
    before = gl.maximum(n - 1, 0)  # what the first step computes of it is not used
    if DEFERRED:
        part = start_part(n - 1, k_columns, shared)  # [BLOCK_Q, COLUMNS]
        dv = warpgroup_mma(p_factor, do_tile, dv, is_async=True)  # [ROWS, D]
        dp, part = warpgroup_mma_wait(1, [dp, part])  # dV is still running
    else:
        dv = warpgroup_mma(p_factor, do_tile, dv, is_async=True)  # [ROWS, D]
        dp = warpgroup_mma_wait(1, [dp])  # [ROWS, BLOCK_Q]; dV is still running
    delta_rows = read_row(shared.statistics[1], slot, columns)  # [BLOCK_Q]
    ds = (p * (dp - delta_rows[None, :])).to(q_tile.dtype)  # [ROWS, BLOCK_Q]
    if DEFERRED:
        store_part(c, part, before, shared.parts)
    # Both consumers read what both store here. The other one read this slot last, two
    # blocks ago, before it stored its rows of the last block.
    shared.ds.index(n % 2).slice(c * ROWS, ROWS).store(ds)
    fence_async_shared()
    mbarrier.arrive(shared.ds_ready)
    if DEFERRED:
        part_stored(before, shared.parts, n > 0)
    ds_factor = gl.convert_layout(ds, factor)  # [ROWS, BLOCK_Q]
    dk = warpgroup_mma(ds_factor, q_tile, dk, is_async=True)  # [ROWS, D], unscaled
    if DEFERRED:
        dk, dv = warpgroup_mma_wait(0, [dk, dv])
    else:
        part = start_part(n, k_columns, shared)  # [BLOCK_Q, COLUMNS]
        dk, dv, part = warpgroup_mma_wait(0, [dk, dv, part])
    mbarrier.arrive(shared.ring.empty.index(slot))
    if not DEFERRED:
        give_part(c, part, n, shared.parts)
    return dk, dv


@gluon.jit
def consumer(
    c: gl.constexpr, dk_out, dv_out, scale, scale_log2, sizes, block, change, notes,
    shared, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute rows c ROWS and following of a block of dK and dV, and store them."""
    BLOCK_Q: gl.constexpr = shared.ring.slots[0].shape[1]
    D: gl.constexpr = shared.own[0].shape[1]
    COLUMNS: gl.constexpr = D // CONSUMERS  # of dQ, that a consumer adds
    s_layout: gl.constexpr = accumulator(BLOCK_Q)
    layout: gl.constexpr = accumulator(D)
    k_tile = shared.own[0].slice(c * ROWS, ROWS)  # [ROWS, D]
    v_tile = shared.own[1].slice(c * ROWS, ROWS)  # [ROWS, D]
    k_columns = shared.own[0].slice(c * COLUMNS, COLUMNS, dim=1)  # [BLOCK_K, COLUMNS]
    col = block.col + c * ROWS
    dk = gl.zeros([ROWS, D], gl.float32, layout)  # [ROWS, D]
    dv = gl.zeros([ROWS, D], gl.float32, layout)  # [ROWS, D]
    mbarrier.wait(shared.arrived, 0)
    own = k_tile, v_tile
    if D == 64:  # as in hopper_backward.keys_consumer
        in_registers: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
        own = k_tile.load(in_registers), v_tile.load(in_registers)
    invariants = own, k_columns, block.b, col, sizes, scale_log2
    steps = block.count * sizes.sharing
    for n in range(steps):
        dk, dv = add_queries(c, dk, dv, n, invariants, change, notes, shared, CAUSAL)
    if deferred(D) and steps > 0:
        part = start_part(steps - 1, k_columns, shared)  # [BLOCK_Q, COLUMNS]
        part = warpgroup_mma_wait(0, [part])
        give_part(c, part, steps - 1, shared.parts)
    # The other consumer may still read these rows of K.
    mbarrier.arrive(shared.ds_ready)
    mbarrier.wait(shared.ds_ready, steps & 1)
    k_tile.store((dk * scale).to(k_tile.dtype))
    v_tile.store(dv.to(v_tile.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_out, [block.b, block.h, col, 0], k_tile)
    tma.async_copy_shared_to_global(dv_out, [block.b, block.h, col, 0], v_tile)
    tma.store_wait(0)


@gluon.jit
def next_turn(n, turns, sizes, block, BLOCK_Q: gl.constexpr):
    """As gluon_order.next_turn, for step n of a list."""
    found = entry(n // sizes.sharing, block)
    step = step_of(found, n % sizes.sharing, block, sizes, BLOCK_Q)
    h = block.b * sizes.heads * sizes.GROUP + step.h
    place = h * sizes.PADDED + step.row
    return place, turns + 1 + place // BLOCK_Q, gl.load(found + 2 + block.falling)


@gluon.jit
def adder(a: gl.constexpr, held, turns, sizes, block, shared):
    """Add what this program's consumers compute of dQ, each part in its turn, as
    gluon_order.adder.
    """
    slots, ready, empty = shared.parts
    BLOCK_Q: gl.constexpr = slots.shape[1]
    COLUMNS: gl.constexpr = slots.shape[2]
    PARTS: gl.constexpr = slots.shape[0] // CONSUMERS
    ADDERS: gl.constexpr = PARTS // 2
    later, count, then = next_turn(a, turns, sizes, block, BLOCK_Q)
    done = gl.load(count, volatile=True)
    for n in range(a, block.count * sizes.sharing, ADDERS):
        place, turn, own = later, then, count
        # What the list says of the next step is on its way while this warp waits.
        later, count, then = next_turn(n + ADDERS, turns, sizes, block, BLOCK_Q)
        while done < turn:
            done = gl.load(own, volatile=True)
        mbarrier.wait(ready.index(n % PARTS), n // PARTS & 1)
        for c in gl.static_range(CONSUMERS):
            part = slots.index(n % PARTS * CONSUMERS + c)  # [BLOCK_Q, COLUMNS]
            if turn == 0:
                tma.async_copy_shared_to_global(held, [place, c * COLUMNS], part)
            else:
                start_adding(held, [place, c * COLUMNS], part)
        done = gl.load(count, volatile=True)
        wait_until_added()
        mbarrier.arrive(empty.index(n % PARTS))
        gl.atomic_add(own, 1, sem="release")  # gluon_order.adder says why it is enough


@gluon.jit(do_not_specialize=MaskedSizes._fields)
def masked_kernel(
    q, k, v, do, lse2, delta, dk, dv, held, turns, scale, scale_log2, change,
    heads, GROUP, PADDED, T_q, T_k, B, section, mixed, cached,
    lists, per_batch, per_head, width, sharing, slopes, slope_batch, slope_head,
    CAUSAL: gl.constexpr, SLOTS: gl.constexpr, PARTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program writes one block of rows of dK and of dV, from all queries of the
    group that see some of the keys, and adds its parts of their dQ, each in its turn;
    change has the mask.
    """
    sizes = MaskedSizes(
        heads, GROUP, PADDED, T_q, T_k, B, section, mixed, cached,
        lists, per_batch, per_head, width, sharing, slopes, slope_batch, slope_head,
    )  # fmt: skip
    BLOCK_Q: gl.constexpr = q.block_type.shape[2]
    BLOCK_K: gl.constexpr = k.block_type.shape[2]
    D: gl.constexpr = q.block_type.shape[3]
    programs = gl.cdiv(sizes.T_k, BLOCK_K)
    taken = take_place(turns, programs, sizes)
    block = own_list(*taken, sizes, BLOCK_K)

    own = at(make_pair(k, v, 1), 0)
    slots = make_pair(q, do, SLOTS)
    statistics = make_rows(lse2, SLOTS), make_rows(delta, SLOTS)
    ds = make_slots(k.dtype, 2, BLOCK_K, BLOCK_Q)
    arrived = make_barriers(1, 1).index(0)
    ring = Ring(slots, make_barriers(SLOTS, 1), make_barriers(SLOTS, CONSUMERS))
    ds_ready = make_barriers(1, CONSUMERS).index(0)
    tiles = make_slots(gl.float32, PARTS * CONSUMERS, BLOCK_Q, D // CONSUMERS)
    parts = Ring(tiles, make_barriers(PARTS, CONSUMERS), make_barriers(PARTS, 1))
    shared = Shared(own, arrived, ring, statistics, ds, ds_ready, ds, ds_ready, parts)
    notes = make_notes(SLOTS), make_notes(SLOTS)
    if PARTS == 2:
        gl.warp_specialize([
            (consumer, (0, dk, dv, scale, scale_log2,
                        sizes, block, change, notes, shared, CAUSAL)),
            (consumer, (1, dk, dv, scale, scale_log2,
                        sizes, block, change, notes, shared, CAUSAL)),
            (producer, (q, k, v, do, lse2, delta, sizes, block, notes, shared)),
            (adder, (0, held, turns, sizes, block, shared)),
        ], [4, 1, 1], [
            CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS,
        ])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, dk, dv, scale, scale_log2,
                        sizes, block, change, notes, shared, CAUSAL)),
            (consumer, (1, dk, dv, scale, scale_log2,
                        sizes, block, change, notes, shared, CAUSAL)),
            (producer, (q, k, v, do, lse2, delta, sizes, block, notes, shared)),
            (adder, (0, held, turns, sizes, block, shared)),
            (adder, (1, held, turns, sizes, block, shared)),
        ], [4, 1, 1, 1], [
            CONSUMER_REGISTERS,
            PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS,
        ])  # fmt: skip


def refusal(q):
    """Why this pass cannot take a mask for q, which hopper_host.hopper_refusal accepts;
    None where it can.
    """
    d = q.shape[3]
    return None if d in SIDES else f"d = 64 or 128 with a mask, got {d}"


@plans.planned
def launch(
    q, k, v, do, delta, lse2, dk, dv, causal, scale, mask, held, turns, slopes=None,
    softcap=0.0, function=None, bias=None,
):  # fmt: skip
    """Launch the kernel that fills dk, dv, and held ``[B H PADDED, d]``, float32, with
    dQ, unscaled, but for blocks of queries that see no key; turns are its counters:
    zeros, int32, at least one more than held has blocks.
    """
    d = q.shape[3]
    H_kv, T_k = k.shape[1:3]
    BLOCK_Q, SLOTS, PARTS = FUSED[d]
    B, n = scores.batch_and_sizes(q, k, v, None)
    hides = scores.ScoreMod(1.0, right=0 if causal else UNLIMITED, mask=mask)
    how = q, hides, None, B, n, BLOCK_Q, BLOCK
    lists = tile_lists.found(tile_lists.in_order, 4, *how)
    by_batch, by_head = mask.depends
    per_batch, sharing = int(by_batch) * lists.shape[1], 1 if by_head else n.GROUP
    about = per_batch, int(by_head), lists.shape[3], sharing
    *order, _paired = choose_order(q, k, BLOCK, False, None)
    cache = torch.cuda.get_device_properties(q.device).L2_cache_size
    order += [cache // (BLOCK_Q * d * (2 * q.element_size() + 4))]
    shape = [BLOCK_Q, d // CONSUMERS.value]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.float32)
    held = TensorDescriptor(held, [held.shape[0], d], [d, 1], shape, layout)
    sizes = H_kv, n.GROUP, delta.shape[2], n.T_q, T_k, B, *order
    plans.launch(
        masked_kernel, q, B * H_kv * triton.cdiv(T_k, BLOCK),
        gluon_descriptor(q, BLOCK_Q), gluon_descriptor(k, BLOCK),
        gluon_descriptor(v, BLOCK), gluon_descriptor(do, BLOCK_Q),
        row_descriptor(lse2, BLOCK_Q), row_descriptor(delta, BLOCK_Q),
        gluon_descriptor(dk, ROWS.value), gluon_descriptor(dv, ROWS.value), held, turns,
        scale, *change_of(scale, mask, softcap, function, bias),
        *MaskedSizes(*sizes, lists, *about, *scores.slopes_and_strides(slopes)),
        CAUSAL=causal, SLOTS=SLOTS, PARTS=PARTS, **WARPS,
    )  # fmt: skip
