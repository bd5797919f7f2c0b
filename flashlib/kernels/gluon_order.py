"""dQ by the kernel that computes dK and dV, for Hopper (sm_90), in Gluon.

Chapter *Hopper*, its depth. What a program computes of dQ for one block of queries is a
part. Each consumer leaves one tile of it in shared memory, ROWS queries and as many
columns. Two warps, the adders, let the copy engine add parts to a buffer in memory,
`dq_sums`. The first part of a block of queries is stored. The others are added in one
order, from the first keys to the last or the other way round, so two runs agree in
every bit, although every program adds; or they are added as they come.

Numbers of a tile are in lines of 128 bytes, in shared memory and in the buffer: for
every 8 columns the four numbers of one thread together, then those of the next thread.
So a thread stores 16 bytes at once, no two in the same bank, and the copy engine reads
and adds what is contiguous. The kernel that rounds the sums brings them into the order
of dQ.

A program never waits for one that starts later: programs take their place in line by a
ticket. With a causal mask, the first keys, which most queries see, start first, and go
through the queries from the last block to the first, each program a step behind the
one before. They end almost together, too close for the programs of the next heads,
which would have to be a step apart. So where caches allow, every other section of heads
begins with the last keys, and its programs go from the first queries that see their
keys to the last. The program before each is then ahead by as many queries as a block
has keys, and they end as far apart, in the order in which the next section starts. With
a window, all sections do, since nearly all programs of a head take the same time. The
queries of a wide group do not fit in the L2 cache. There a section is twice as large,
and its second half goes through the queries upward, although the parts keep their
order.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlib import internals, plans
from flashlib.kernels.gluon_backward import CONSUMERS
from flashlib.kernels.gluon_keys import block_of, count_steps, entry_at, queries_of
from flashlib.kernels.gluon_tiles import ROWS, Ring, make_barriers, make_slots
from flashlib.kernels.tiles import Rows

LINE = gl.constexpr(32)  # numbers, 128 bytes
# Warps, which take parts in turn: one may add its part while the last part of the other
# is on its way to memory.
ADDERS = gl.constexpr(2)
# The most heads of a section in which few queries see the first keys. An H200 runs 132
# programs at a time: with 32 heads, about four of each.
MOST_HEADS = gl.constexpr(32)
start_adding = internals.gluon_tma_add()


def choose_order(q, k, BLOCK_K, causal, left):
    """The section, mixed and paired of BackwardSizes, for q ``[B, H, T_q, d]`` and
    blocks of BLOCK_K keys of k ``[B, H_kv, T_k, d]``.
    """
    device = torch.cuda.get_device_properties(q.device)
    (H, T_q, d), (H_kv, T_k) = q.shape[1:], k.shape[1:3]
    programs, group = triton.cdiv(T_k, BLOCK_K), H // H_kv
    # A group counts as wide if its heads have more than 256 columns together. No record
    # compares other limits.
    paired = int(causal and left is None and group * d > 256)
    # The programs of this many heads fill the multiprocessors once, or twice if paired:
    # each multiprocessor then runs a long program and after it a short one.
    section = max(1, round((1 + paired) * device.multi_processor_count / programs))
    # Programs that begin with the last keys read queries far apart: Q, dO and dQ of a
    # section should stay in the L2 cache.
    query_bytes = (
        section * group * T_q * d * (2 * q.element_size() + torch.float32.itemsize)
    )
    return section, int(query_bytes <= device.L2_cache_size // 2), paired


@gluon.jit
def section_of_lists(sizes):
    """How many heads a section has with a mask that is a function, and whether few
    queries see the first keys.
    """
    total = sizes.B * sizes.H_kv
    # Few do where there is a window or documents. All sections then begin with the last
    # keys, so that no program waits for its turn, except the last section. That one
    # begins with the first keys, so that no long program starts last. Its programs
    # hardly wait either if it has many heads: few programs of each head run at a time.
    blocks = gl.load(sizes.lists)
    few = 2 * blocks < sizes.width // 4
    most = gl.minimum(MOST_HEADS, sizes.cached // gl.maximum(blocks * sizes.sharing, 1))
    size = gl.cdiv(total, gl.cdiv(total, gl.maximum(most, sizes.section)))
    return gl.where(few, size, sizes.section), few


@gluon.jit
def take_ticket(counters, programs, sizes, CAUSAL: gl.constexpr):
    """The block of keys and the head of a program, whether its section begins with the
    last keys, 0 or 1, and whether it reads queries upward, 0 or 1.
    """
    # Programs need not start in the order of their numbers, so they take tickets.
    ticket = gl.atomic_add(counters, 1, sem="relaxed")
    section = sizes.section
    if sizes.lists is not None:
        section, few = section_of_lists(sizes)
    # The programs of a head start one after the other, those of the other heads of its
    # section in between.
    index = ticket // (programs * section)  # of the section
    ticket, first_head = ticket % (programs * section), index * section
    size = gl.minimum(section, sizes.B * sizes.H_kv - first_head)
    number, head, falling, second = ticket // size, first_head + ticket % size, 0, 0
    if sizes.left is not None:
        # Programs that run together read different queries, whichever keys come first.
        falling = 1
    elif CAUSAL or sizes.lists is not None:
        # Sections alternate, counted from the last one, which begins with the first
        # keys, so no long program starts last. The first section always begins with the
        # last keys, unless it is the only one.
        later = gl.cdiv(sizes.B * sizes.H_kv, section) - 1 - index
        falling = sizes.mixed * (later % 2 if index > 0 else gl.minimum(later, 1))
        if sizes.lists is not None:
            falling = gl.where(few, gl.minimum(later, 1), falling)
        else:
            # The later a program of the second half starts, the later is its first
            # query. Going upward, all of them read the same queries at the same time.
            second = sizes.paired * (2 * ticket // (programs * size))
    number += falling * (programs - 1 - 2 * number)  # if falling, from the last block
    return number, head, falling, gl.maximum(falling, second)


@gluon.jit
def make_parts(PART_SLOTS: gl.constexpr):
    """Slots for parts of dQ, in each a tile of each consumer, and their barriers: a
    Ring of tiles [LINES, LINE].
    """
    LINES: gl.constexpr = ROWS * ROWS // LINE
    tiles = make_slots(gl.float32, PART_SLOTS * CONSUMERS, LINES, LINE)
    ready = make_barriers(PART_SLOTS, CONSUMERS)
    return Ring(tiles, ready, make_barriers(PART_SLOTS, 1))


@gluon.jit
def store_part(c: gl.constexpr, part, n, parts):
    """Store consumer c's tile [ROWS, ROWS] of the n-th part where an adder takes it, as
    lines, once that slot is free. Of every 8 columns of a product a thread holds two
    numbers of each of two rows, which become neighbors; then come those of the next
    thread.
    """
    PART_SLOTS: gl.constexpr = parts.slots.shape[0] // CONSUMERS
    # Rows are 16 warp + 8 lower + r, columns 8 j + 2 quarter + even.
    part = gl.reshape(part, [4, 2, 8, ROWS // 8, 4, 2])
    part = gl.permute(part, (3, 0, 2, 4, 1, 5))
    mbarrier.wait(parts.empty.index(n % PART_SLOTS), (n // PART_SLOTS & 1) ^ 1)
    lines = parts.slots.index(n % PART_SLOTS * CONSUMERS + c)  # [LINES, LINE]
    lines.store(gl.reshape(part, [lines.shape[0], LINE]))


@gluon.jit
def part_stored(n, parts, pred=True):
    """Say, if pred, that this consumer has stored and fenced its tile of part n."""
    PART_SLOTS: gl.constexpr = parts.slots.shape[0] // CONSUMERS
    mbarrier.arrive(parts.ready.index(n % PART_SLOTS), pred=pred)


@gluon.jit
def give_part(c: gl.constexpr, part, n, parts):
    """Store consumer c's tile of the n-th part, and say so."""
    store_part(c, part, n, parts)
    fence_async_shared()
    part_stored(n, parts)


@gluon.jit
def wait_until_added():
    """Wait until what this warp started to add or store is in memory, where the warp
    can see it. After tma.store_wait it has only left shared memory.
    """
    lanes = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
        "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_or_store(dq_sums, corner, tile, turn):
    """Start adding a tile in shared memory to dq_sums, the descriptor of the sums, at a
    corner; if turn is 0, nothing is there yet, and the tile is stored.
    """
    if turn == 0:
        tma.async_copy_shared_to_global(dq_sums, corner, tile)
    else:
        start_adding(dq_sums, corner, tile)


@gluon.jit
def add_lines(c: gl.constexpr, dq_sums, line, turn, slot, slots):
    """Start adding consumer c's tile in this slot to the sums of its block of queries,
    which begin at this line, or storing it there if turn is 0. dq_sums is the
    descriptor of lines.
    """
    LINES: gl.constexpr = slots.shape[1]
    part = slots.index(slot * CONSUMERS + c)  # [LINES, LINE]
    add_or_store(dq_sums, (line + c * LINES, 0), part, turn)


@gluon.jit
def count_part(counter):
    """Count a part that this warp has started to add, once it is in memory."""
    wait_until_added()
    # Other multiprocessors may see the sum later than this warp does, but not later
    # than a count that releases it. Reading needs no acquire: nothing of the sum is in
    # a cache of theirs, since the copy engine adds in L2.
    gl.atomic_add(counter, 1, sem="release")


def lines_descriptor(dq_sums):
    """The descriptor by which the adders write to dq_sums, float32 and contiguous: it
    has lines [dq_sums.numel() / LINE, LINE], in blocks of one tile.
    """
    LINES = ROWS.value**2 // LINE.value
    shape, block = [dq_sums.numel() // LINE.value, LINE.value], [LINES, LINE.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32)
    return TensorDescriptor(dq_sums, shape, [LINE.value, 1], block, layout)


@gluon.jit
def next_turn(n, counters, sizes, block, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """Where step n of a program adds its part of dQ: the first row, counted through all
    heads, the counter of the parts of this block, and how many parts are added before
    this one.
    """
    if sizes.lists is None:
        g, i = block_of(n, block, sizes.GROUP, BLOCK_Q)
        h = (block.b * sizes.H_kv + block.h) * sizes.GROUP + g
        dq_row, turn = h * sizes.PADDED + i, block.col // BLOCK_K
        if block.falling:
            end = gl.minimum(i + BLOCK_Q + sizes.T_k - sizes.T_q, sizes.T_k)
            turn = (end - 1) // BLOCK_K - turn
    else:
        entry = entry_at(n // sizes.sharing, block)
        queries = queries_of(entry, n % sizes.sharing, block, sizes, BLOCK_Q)
        h = block.b * sizes.H_kv * sizes.GROUP + queries.h
        dq_row = h * sizes.PADDED + queries.row
        turn = gl.load(entry + 2 + block.falling)
    return dq_row, counters + 1 + dq_row // BLOCK_Q, turn


@gluon.jit
def add_parts(a: gl.constexpr, dq_sums, counters, sizes, block, shared):
    """Add what this program's consumers compute of dQ: each part in its turn or, where
    any order will do, once the first part is there, which is stored. Each adder adds
    every other part; adder a begins with part a.

    dq_sums is the descriptor of the sums, as lines. counters, int32, has the ticket,
    and then for each block of queries the number of parts that are in its sums. Parts
    for which no program waits are not counted.
    """
    slots, ready, empty = shared.parts
    BLOCK_Q: gl.constexpr = shared.ring.slots[0].shape[1]
    D: gl.constexpr = shared.ring.slots[0].shape[2]
    PART_SLOTS: gl.constexpr = slots.shape[0] // CONSUMERS
    BLOCK_K: gl.constexpr = shared.own[0].shape[0]
    steps, n_next = count_steps(block, sizes), a
    if sizes.lists is None:
        n_next = gl.maximum(gl.minimum(a, steps - 1), 0)  # there may be no step
    row_next, counter_next, turn_next = next_turn(
        n_next, counters, sizes, block, BLOCK_Q, BLOCK_K
    )
    done = gl.load(counter_next, volatile=True)
    for n in range(a, steps, ADDERS):
        row, counter, turn = row_next, counter_next, turn_next
        if sizes.lists is not None:
            # What the list says of the next step is on its way while this warp waits.
            row_next, counter_next, turn_next = next_turn(
                n + ADDERS, counters, sizes, block, BLOCK_Q, BLOCK_K
            )
        needed = turn
        if sizes.awaited is not None:
            needed = gl.minimum(turn, sizes.awaited)
        while done < needed:
            done = gl.load(counter, volatile=True)
        mbarrier.wait(ready.index(n % PART_SLOTS), n // PART_SLOTS & 1)
        for c in gl.static_range(CONSUMERS):
            add_lines(c, dq_sums, row * (D // LINE), turn, n % PART_SLOTS, slots)
        if sizes.lists is None:
            # A formula loads nothing, so this is early enough.
            n_next = gl.minimum(n + ADDERS, steps - 1)
            row_next, counter_next, turn_next = next_turn(
                n_next, counters, sizes, block, BLOCK_Q, BLOCK_K
            )
        # The next count is on its way while this part is.
        done = gl.load(counter_next, volatile=True)
        tma.store_wait(0)
        mbarrier.arrive(empty.index(n % PART_SLOTS))
        if sizes.awaited is None or turn < sizes.awaited:
            count_part(counter)


@triton.jit(do_not_specialize=["first_row", "T", "PADDED"])
def finish_kernel(
    dq_sums, dq, scale, first_row, H, T, PADDED, counters,
    TILE_ROWS: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """One program scales and rounds TILE_ROWS rows of dQ, whose sums are in dq_sums [B,
    H, PADDED, D], float32, as lines of tiles. Rows before `first_row` see no key and
    get 0. So do blocks of BLOCK_Q rows for which the adders' counters count no part;
    without counters every other row has sums.
    """
    ACROSS: tl.constexpr = D // TILE_ROWS  # parts that have these rows
    blocks = tl.cdiv(T, TILE_ROWS)
    row, head = tl.program_id(0) % blocks * TILE_ROWS, tl.program_id(0) // blocks
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    i = (row + tl.arange(0, TILE_ROWS)).to(tl.int64)[:, None]  # [TILE_ROWS, 1]
    k = tl.arange(0, D)[None, :]
    if counters is not None:
        counted = tl.load(counters + 1 + (head * PADDED + row) // BLOCK_Q) > 0
        first_row = tl.where(counted, first_row, PADDED)
    dq_sums += (head.to(tl.int64) * PADDED + row) * D
    tile = tl.load(dq_sums + tl.arange(0, TILE_ROWS * D))
    # Part, j, warp, r, quarter, lower, even, as store_part has them.
    tile = tl.reshape(tile, [ACROSS, TILE_ROWS // 8, 4, 8, 4, 2, 2])
    tile = tl.reshape(tl.permute(tile, (2, 5, 3, 0, 1, 4, 6)), [TILE_ROWS, D])
    seen = i >= first_row
    tile = tl.where(seen, tile, 0.0) * scale  # [TILE_ROWS, D]
    at = b * dq.strides[0] + h * dq.strides[1] + i * dq.strides[2] + k * dq.strides[3]
    tl.store(dq.ptr + at, tile.to(dq.ptr.dtype.element_ty), mask=i < T)


@plans.planned
def launch_finish(dq_sums, dq, score_mod, padded, T_k, BLOCK_Q, counters=None):
    """Launch the kernel that fills dq ``[B, H, T_q, d]`` from dq_sums, float32 ``[B H
    padded, d]``, what the fused kernel summed in blocks of BLOCK_Q queries, as lines.
    Where a mask may leave blocks of queries that see no key, counters are as the fused
    kernel left them.
    """
    B, H, T_q, d = dq.shape
    first_row = max(T_q - T_k, 0) if score_mod.causal else 0
    plans.launch(
        finish_kernel, dq, B * H * triton.cdiv(T_q, ROWS.value),
        dq_sums, Rows(dq, dq.stride()), score_mod.scale, first_row, H, T_q, padded,
        counters, ROWS.value, d, BLOCK_Q,
    )  # fmt: skip
