"""The backward pass of masks that are functions, for Hopper (sm_90), in Gluon.

Chapter *Masks* (``eq-masks-kinds``); the sums, the division of labor and the adding of
dQ are those of the fused form of hopper_backward.py. A program owns a block of keys and
passes through the list of blocks of queries that see some of its keys, which
:func:`flashlib.kernels.tile_lists.in_order` makes. A list keeps the order of the
blocks, and each entry says whether its block needs the mask. Parts of dQ are added in
the order of the keys, first or last ones first, so the turn of a part is its rank among
those of its block of queries. Programs of a head start in the same order, so none waits
for one that starts later, whatever the mask.
"""

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from flashlib import plans
from flashlib.kernels import scores, tile_lists
from flashlib.kernels.descriptors import gluon_descriptor, row_descriptor
from flashlib.kernels.gluon_backward import (
    BLOCK,
    CONSUMERS,
    WARPS,
    BackwardShared,
    copy_pair,
    make_pair,
    make_rows,
    pair_in,
    store_keys,
)
from flashlib.kernels.gluon_bias import (
    bias_descriptor,
    copy_bias,
    less_bias,
    less_copied_bias,
)
from flashlib.kernels.gluon_fused import (
    FUSED,
    add_half,
    give_last_part,
    own_factors,
    start_half,
    start_scores,
)
from flashlib.kernels.gluon_order import (
    ADDERS,
    LINE,
    add_part,
    choose_order,
    count_part,
    lines_descriptor,
    make_parts,
)
from flashlib.kernels.gluon_scores import (
    change_of,
    change_transposed,
)
from flashlib.kernels.gluon_tiles import (
    ROWS,
    Ring,
    accumulator,
    make_barriers,
    make_slots,
)

# The most heads of a section in which few queries see the first keys. An H200 runs 132
# programs at a time: with 32 heads, about four of each.
MOST_HEADS = gl.constexpr(32)
# {d: the sides of the tiles that are classified}
SIDES = {d: (tile[0], BLOCK) for d, tile in FUSED.items()}


class MaskedSizes(NamedTuple):
    """What the kernel is told about the problem."""

    H_kv: int
    GROUP: int
    PADDED: int  # the length of delta and lse2
    T_q: int
    T_k: int
    B: int
    section: int  # heads whose programs start together
    mixed: int  # 1 if sections alternate, unless few queries see the first keys
    cached: int  # blocks of queries, their gradients and dQ that fit in the L2 cache
    lists: torch.Tensor  # of tile_lists.in_order
    per_batch: int  # lists of heads from one batch to the next
    per_head: int  # and from one head to the next: 0 if they share one
    width: int  # numbers of a list
    sharing: int  # heads of the group that share an entry of the list
    slopes: torch.Tensor | None  # of ALiBi, and their strides
    slope_batch: int | None
    slope_head: int | None


class ListedKeys(NamedTuple):
    """A block of keys and the list of blocks of queries that see it. If falling, dQ
    takes the parts of the last keys first, and the program the first queries first.
    """

    b: Any
    h: Any  # of keys
    col: Any
    entries: Any  # of the list, four numbers each
    count: Any  # of these
    falling: Any  # 1 or 0


class QueryBlock(NamedTuple):
    """A block of queries of the list of a program."""

    row: Any
    partial: Any  # 1 if some of its pairs are hidden
    h: Any  # its head


@gluon.jit
def take_ticket(counters, programs, sizes):
    """As gluon_order.take_ticket: the block of keys and the head of a program, and
    whether its section begins with the last keys, 0 or 1.
    """
    ticket, total = gl.atomic_add(counters, 1, sem="relaxed"), sizes.B * sizes.H_kv
    # Few queries see the first keys where there is a window or documents. All sections
    # then begin with the last keys, so that no program waits for its turn, except the
    # last section. That one begins with the first keys, so that no long program starts
    # last. Its programs hardly wait either if it has many heads: few programs of each
    # head run at a time.
    blocks = gl.load(sizes.lists)
    few = 2 * blocks < sizes.width // 4
    most = gl.minimum(MOST_HEADS, sizes.cached // gl.maximum(blocks * sizes.sharing, 1))
    size = gl.cdiv(total, gl.cdiv(total, gl.maximum(most, sizes.section)))
    size = gl.where(few, size, sizes.section)
    index = ticket // (programs * size)  # of the section
    ticket, first_head = ticket % (programs * size), index * size
    size_here = gl.minimum(size, total - first_head)  # the last section may be smaller
    number, head = ticket // size_here, first_head + ticket % size_here
    later = gl.cdiv(total, size) - 1 - index
    falling = sizes.mixed * gl.where(index > 0, later % 2, gl.minimum(later, 1))
    falling = gl.where(few, gl.minimum(later, 1), falling)
    return number + falling * (programs - 1 - 2 * number), head, falling


@gluon.jit
def own_list(number, head, falling, sizes, BLOCK_K: gl.constexpr):
    """The ListedKeys of a program: block ``number`` of keys, of a head of B H_kv."""
    b, h = head // sizes.H_kv, head % sizes.H_kv
    row = (b * sizes.per_batch + h * sizes.per_head).to(gl.int64)
    row = row * gl.cdiv(sizes.T_k, BLOCK_K) + number
    entries = sizes.lists + row * sizes.width
    count = gl.load(entries)
    return ListedKeys(b, h, number * BLOCK_K, entries + 1, count, falling)


@gluon.jit
def entry_at(number, block):
    """A pointer to the entry with this number in the order in which a program takes
    those of its list; to the last one beyond it.
    """
    number = gl.maximum(gl.minimum(number, block.count - 1), 0)
    if block.falling != 0:
        number = gl.maximum(block.count - 1 - number, 0)
    return block.entries + 4 * number


@gluon.jit
def queries_of(entry, g, block, sizes, BLOCK_Q: gl.constexpr):
    """The QueryBlock of an entry, for head g of those that share it."""
    tile = gl.load(entry)
    h = block.h * sizes.GROUP + gl.load(entry + 1) + g
    return QueryBlock(tile // 2 * BLOCK_Q, tile % 2, h)


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
def producer(q, k, v, do, lse2, delta, bias, sizes, block, notes, shared):
    """Copy a block of K and V once, then the blocks of queries of its list: of an entry
    those of all heads that share it. The notes of a block are twice its first row, plus
    1 if some of its pairs are hidden, and its head: consumers have no registers left to
    read lists.
    """
    BLOCK_Q: gl.constexpr = q.block_type.shape[2]
    ring, statistics = shared.ring, shared.statistics
    SLOTS: gl.constexpr = ring.slots[0].shape[0]
    b, H, n = block.b, sizes.H_kv * sizes.GROUP, 0
    mbarrier.expect(shared.arrived, 2 * k.block_type.nbytes)
    copy_pair((k, v), (b, block.h, block.col, 0), shared.arrived, shared.own)
    following = queries_of(entry_at(0, block), 0, block, sizes, BLOCK_Q)
    for number in range(block.count):
        queries = following
        # The next entry is on its way while this warp waits for a slot.
        following = queries_of(entry_at(number + 1, block), 0, block, sizes, BLOCK_Q)
        row = queries.row
        for g in range(sizes.sharing):
            slot, h = n % SLOTS, queries.h + g
            mbarrier.wait(ring.empty.index(slot), (n // SLOTS & 1) ^ 1)
            note(2 * row + queries.partial, notes[0], slot)
            note(h, notes[1], slot)
            ready = ring.ready.index(slot)
            mbarrier.expect(ready, 2 * q.block_type.nbytes + 2 * lse2.block_type.nbytes)
            copy_pair((q, do), (b, h, row, 0), ready, pair_in(ring.slots, slot))
            copy_pair((lse2, delta), (b * H + h, row), ready, pair_in(statistics, slot))
            if bias is not None:
                copy_bias(bias, n, (b, h, row, block.col), shared)
            n += 1


@gluon.jit
def without_hidden(p, row, col, b, h, sizes, rule, CAUSAL: gl.constexpr):
    """The weights p [ROWS, QUERIES] of the keys from col on and of the queries of head
    h from row on, 0 where the mask hides a key.
    """
    QUERIES: gl.constexpr = p.shape[1]
    j = col + gl.arange(0, ROWS, gl.SliceLayout(1, p.type.layout))  # [ROWS]
    i = row + gl.arange(0, QUERIES, gl.SliceLayout(0, p.type.layout))  # [QUERIES]
    position = (i + (sizes.T_k - sizes.T_q))[None, :]  # [1, QUERIES]
    key = j[:, None]  # [ROWS, 1]
    seen = rule[0](b, h, position, key, *rule[1]) & (key < sizes.T_k)
    if CAUSAL:
        seen = seen & (key <= position)
    return gl.where(seen, p, 0.0)  # [ROWS, QUERIES]


@gluon.jit
def add_queries(
    c: gl.constexpr, dk, dv, s, n, invariants, change, notes, shared,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """As hopper_backward.add_queries, with a mask where the notes of a block say so,
    which also have its row and its head. Notes are read where they are needed, again
    and again: registers cannot hold them.
    """
    own, b, col, steps, sizes, scale_log2 = invariants
    SLOTS: gl.constexpr = shared.ring.slots[0].shape[0]
    HALVES: gl.constexpr = shared.ring.slots[0].shape[1] // ROWS
    slot = n % SLOTS
    for half in gl.static_range(HALVES):
        dp, lse_rows = start_half(c, own, n, half, shared)  # [ROWS, ROWS], [1, ROWS]
        h = 0  # not read
        if shared.bias_ready is not None:
            lse_rows = less_copied_bias(c, lse_rows, n, half, shared)
        elif change.bias is not None:
            h, i = noted(notes[1], slot), noted(notes[0], slot) // 2 + half * ROWS
            lse_rows = less_bias(lse_rows, b, h, i, col, sizes, change, False)
        noted_row = noted(notes[0], slot)
        if sizes.slopes is not None or change.natural is not None:
            h = noted(notes[1], slot)
        i = noted_row // 2 + half * ROWS  # the first query of this half
        position = i + sizes.T_k - sizes.T_q
        s, derivative = change_transposed(
            s, b, h, col, position, sizes, scale_log2, change
        )
        p = gl.exp2(s - lse_rows)  # [ROWS, ROWS], keys in rows
        if noted_row % 2 != 0:
            mask_head = noted(notes[1], slot)
            p = without_hidden(p, i, col, b, mask_head, sizes, change.mask, CAUSAL)
        dk, dv, s = add_half(
            c, half, dk, dv, p, dp, derivative, n, steps, own, change, shared
        )
    return dk, dv, s


@gluon.jit
def consumer(
    c: gl.constexpr, dk_out, dv_out, scale, scale_log2, sizes, block, change, notes,
    shared, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute rows c ROWS and following of a block of dK and dV, and store them."""
    D: gl.constexpr = shared.own[0].shape[1]
    steps = block.count * sizes.sharing
    dk = gl.zeros([ROWS, D], gl.float32, accumulator(D))  # [ROWS, D]
    dv = gl.zeros([ROWS, D], gl.float32, accumulator(D))  # [ROWS, D]
    mbarrier.wait(shared.arrived, 0)
    own = own_factors(c, shared.own)
    invariants = own, block.b, block.col + c * ROWS, steps, sizes, scale_log2
    s = start_scores(c, own, 0, steps, shared)  # [ROWS, ROWS], unscaled
    s = warpgroup_mma_wait(0, [s])
    for n in range(steps):
        dk, dv, s = add_queries(
            c, dk, dv, s, n, invariants, change, notes, shared, CAUSAL
        )
    give_last_part(c, steps, shared)
    outputs, sums = (dk_out, dv_out), (dk, dv)
    store_keys(c, outputs, sums, (0, 0), scale, steps, block, shared)


@gluon.jit
def next_turn(n, counters, sizes, block, BLOCK_Q: gl.constexpr):
    """As gluon_order.next_turn, for step n of a list."""
    entry = entry_at(n // sizes.sharing, block)
    queries = queries_of(entry, n % sizes.sharing, block, sizes, BLOCK_Q)
    h = block.b * sizes.H_kv * sizes.GROUP + queries.h
    dq_row = h * sizes.PADDED + queries.row
    return dq_row, counters + 1 + dq_row // BLOCK_Q, gl.load(entry + 2 + block.falling)


@gluon.jit
def adder(a: gl.constexpr, held, counters, sizes, block, shared):
    """Add what this program's consumers compute of dQ, each part in its turn, as
    gluon_order.adder.
    """
    slots, ready, empty = shared.parts
    BLOCK_Q: gl.constexpr = shared.ring.slots[0].shape[1]
    D: gl.constexpr = shared.ring.slots[0].shape[2]
    PART_SLOTS: gl.constexpr = slots.shape[0] // CONSUMERS
    row_next, counter_next, turn_next = next_turn(a, counters, sizes, block, BLOCK_Q)
    done = gl.load(counter_next, volatile=True)
    for n in range(a, block.count * sizes.sharing, ADDERS):
        row, turn, counter = row_next, turn_next, counter_next
        # What the list says of the next step is on its way while this warp waits.
        row_next, counter_next, turn_next = next_turn(
            n + ADDERS, counters, sizes, block, BLOCK_Q
        )
        while done < turn:
            done = gl.load(counter, volatile=True)
        mbarrier.wait(ready.index(n % PART_SLOTS), n // PART_SLOTS & 1)
        for c in gl.static_range(CONSUMERS):
            add_part(c, held, row * (D // LINE), turn, n % PART_SLOTS, slots)
        done = gl.load(counter_next, volatile=True)
        tma.store_wait(0)
        mbarrier.arrive(empty.index(n % PART_SLOTS))
        count_part(counter)


@gluon.jit(do_not_specialize=MaskedSizes._fields)
def masked_kernel(
    q, k, v, do, lse2, delta, bias, dk, dv, held, counters, scale, scale_log2, change,
    H_kv, GROUP, PADDED, T_q, T_k, B, section, mixed, cached,
    lists, per_batch, per_head, width, sharing, slopes, slope_batch, slope_head,
    CAUSAL: gl.constexpr, SLOTS: gl.constexpr, PART_SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program writes one block of rows of dK and of dV, from all queries of the
    group that see some of the keys, and adds its parts of their dQ, each in its turn.
    q to held and counters as in hopper_backward.keys_kernel; change has the mask.
    """
    sizes = MaskedSizes(
        H_kv, GROUP, PADDED, T_q, T_k, B, section, mixed, cached,
        lists, per_batch, per_head, width, sharing, slopes, slope_batch, slope_head,
    )  # fmt: skip
    BLOCK_Q: gl.constexpr = q.block_type.shape[2]
    BLOCK_K: gl.constexpr = k.block_type.shape[2]
    programs = gl.cdiv(sizes.T_k, BLOCK_K)
    taken = take_ticket(counters, programs, sizes)
    block = own_list(*taken, sizes, BLOCK_K)

    own = pair_in(make_pair(k, v, 1), 0)
    slots = make_pair(q, do, SLOTS)
    statistics = make_rows(lse2, SLOTS), make_rows(delta, SLOTS)
    ds = make_slots(k.dtype, 2, BLOCK_K, BLOCK_Q)
    arrived = make_barriers(1, 1).index(0)
    ring = Ring(slots, make_barriers(SLOTS, 1), make_barriers(SLOTS, CONSUMERS))
    ds_ready = make_barriers(1, CONSUMERS).index(0)
    parts = make_parts(PART_SLOTS)
    bias_ready = make_barriers(2, 1) if bias is not None else None
    shared = BackwardShared(
        own, arrived, ring, statistics, ds, ds_ready, ds, ds_ready, parts, bias_ready
    )
    notes = make_notes(SLOTS), make_notes(SLOTS)
    gl.warp_specialize([
        (consumer, (0, dk, dv, scale, scale_log2,
                    sizes, block, change, notes, shared, CAUSAL)),
        (consumer, (1, dk, dv, scale, scale_log2,
                    sizes, block, change, notes, shared, CAUSAL)),
        (producer, (q, k, v, do, lse2, delta, bias, sizes, block, notes, shared)),
        (adder, (0, held, counters, sizes, block, shared)),
        (adder, (1, held, counters, sizes, block, shared)),
    ], [4, 1, 1, 1], [
        CONSUMER_REGISTERS,
        PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS,
    ])  # fmt: skip


@plans.planned
def launch(q, k, v, do, delta, lse2, dk, dv, score_mod, held, counters):
    """Launch the kernel that fills dk, dv, and held with dQ, where there is a mask; the
    arguments are those of hopper_backward.launch_keys.
    """
    d, mask = q.shape[3], score_mod.mask
    H_kv, T_k = k.shape[1:3]
    BLOCK_Q, SLOTS, PART_SLOTS = FUSED[d]
    B, n = scores.batch_and_sizes(q, k, v, None)
    problem = q, score_mod, None, B, n, BLOCK_Q, BLOCK
    lists = tile_lists.found(tile_lists.in_order, "hopper_gradients", *problem)
    by_batch, by_head = mask.depends
    per_batch, sharing = int(by_batch) * lists.shape[1], 1 if by_head else n.GROUP
    about = per_batch, int(by_head), lists.shape[3], sharing
    *order, _paired = choose_order(q, k, BLOCK, False, None)
    cache = torch.cuda.get_device_properties(q.device).L2_cache_size
    order += [cache // (BLOCK_Q * d * (2 * q.element_size() + 4))]
    sizes = H_kv, n.GROUP, delta.shape[2], n.T_q, T_k, B, *order
    plans.launch(
        masked_kernel, q, B * H_kv * triton.cdiv(T_k, BLOCK),
        gluon_descriptor(q, BLOCK_Q), gluon_descriptor(k, BLOCK),
        gluon_descriptor(v, BLOCK), gluon_descriptor(do, BLOCK_Q),
        row_descriptor(lse2, BLOCK_Q), row_descriptor(delta, BLOCK_Q),
        bias_descriptor(score_mod.bias, q, k, ROWS.value),
        gluon_descriptor(dk, ROWS.value), gluon_descriptor(dv, ROWS.value),
        lines_descriptor(held), counters,
        score_mod.scale,
        *change_of(
            score_mod.scale, mask, score_mod.softcap, score_mod.function, score_mod.bias
        ),
        *MaskedSizes(
            *sizes, lists, *about, *scores.slopes_and_strides(score_mod.slopes)
        ),
        CAUSAL=score_mod.causal, SLOTS=SLOTS, PART_SLOTS=PART_SLOTS, **WARPS,
    )  # fmt: skip
