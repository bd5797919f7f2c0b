"""Ring attention's forward pass for Hopper (sm_90), in Gluon: one launch over the
shards of all ranks, in the order in which they arrive.

Chapter *Ring attention* (``eq-ring-ranges``); the kernel is that of hopper.py, with
another producer. The shards of the other ranks are on their way when the kernel starts:
copy engines bring them into one buffer, and after each copy set its flag. The producer
waits for the flag of a shard before it reads the shard. O stays in registers until all
keys are seen, so nothing is merged, and O is rounded once.

With a causal mask a rank has two chunks of the sequence, and a tile of queries is in
one of them. It sees all chunks before its own, which need no mask, and a part of its
own.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from flashlib import plans
from flashlib.kernels.descriptors import gluon_descriptor
from flashlib.kernels.gluon_forward import (
    block_counts,
    coordinates,
    log_sum_exp,
    make_queue,
    make_ring,
    pop,
    push,
    refill,
    release,
    start_scores,
    start_values,
    tile_in,
)
from flashlib.kernels.gluon_lists import Queries
from flashlib.kernels.gluon_scores import GluonChange
from flashlib.kernels.gluon_tasks import head_and_block
from flashlib.kernels.gluon_tiles import ROWS, accumulator
from flashlib.kernels.hopper import (
    SECTION_HEADS,
    ForwardShared,
    attend,
    attend_first,
)
from flashlib.kernels.hopper_host import hopper_forward
from flashlib.kernels.hopper_tiles import PROGRAMS, TILES
from flashlib.kernels.tiles import LOG2_E, LOWEST


class RingSizes(NamedTuple):
    """What the launcher knows about the problem."""

    tiles: int
    heads: int  # B H
    section: int  # heads that are worked on at a time
    GROUP: int
    rows_q: int  # of a chunk
    rows_k: int
    rank: int
    size: int  # ranks
    parts: int  # a shard arrives in this many parts
    part_heads: int  # heads of keys in each of them
    timeout: int  # nanoseconds that a producer waits for a flag
    # What hopper.attend asks for, and this kernel does not have.
    left: Any = None
    lists: Any = None
    slopes: Any = None


class RingTask(NamedTuple):
    """A tile of O."""

    h: int  # of all B H heads
    chunk: int  # of the rank's
    position: int  # of the chunk, in the sequence
    row: int  # the first query, in the chunk


class Blocks(NamedTuple):
    """How many blocks of keys a tile sees."""

    full: int  # of a chunk that it sees whole
    own_full: int  # of its own chunk, those that each of its queries sees whole
    own_end: int  # and those that at least one of them sees
    unmasked: int  # of all chunks
    masked: int


@gluon.jit
def task_at(n, sizes, CHUNKS: gl.constexpr, BLOCK_Q: gl.constexpr):
    """The RingTask of tile n. The heads of a part come before those of the next one,
    and in a section the last queries, which see the most keys, come first.
    """
    per_chunk = gl.cdiv(sizes.rows_q, BLOCK_Q)
    blocks = CHUNKS * per_chunk
    h, block = head_and_block(n, blocks, sizes, True)
    chunk = block // per_chunk
    position = gl.where(chunk == 0, sizes.rank, 2 * sizes.size - 1 - sizes.rank)
    return RingTask(h, chunk, position, block % per_chunk * BLOCK_Q)


@gluon.jit
def blocks_of(
    task, sizes, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr
):
    """The Blocks of a tile."""
    T = sizes.rows_k
    full, end = T // BLOCK_K, gl.cdiv(T, BLOCK_K)
    own_full, own_end, whole = 0, 0, sizes.size  # chunks that the tile sees whole
    if CAUSAL:
        whole = task.position
        own_full, own_end = block_counts(task.row, BLOCK_Q, T, T, True, BLOCK_K)
    masked = own_end - own_full + whole * (end - full)
    return Blocks(full, own_full, own_end, whole * full + own_full, masked)


@gluon.jit
def wait_for(flag, timeout):
    """Wait until a flag, uint32, is not 0; a wait that is longer than the timeout, in
    nanoseconds, stops the GPU with an error.
    """
    # The copy engine has written the flag, and TMA will read what was copied before it:
    # acquire from the whole system, then a fence for TMA.
    return gl.inline_asm_elementwise(
        """{
        .reg .pred over;
        .reg .b64 begin, now;
        mov.u64 begin, %globaltimer;
        again:
        ld.acquire.sys.global.u32 $0, [$1];
        setp.ne.u32 over, $0, 0;
        @over bra done;
        mov.u64 now, %globaltimer;
        sub.u64 now, now, begin;
        setp.gt.u64 over, now, $2;
        @over trap;
        bra again;
        done:
        bar.warp.sync 0xffffffff;
        fence.proxy.async.global;
        }""",
        "=&r,l,l", [flag, timeout], dtype=gl.uint32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_keys(k, v, indices, chunk, first, end, count, shared):
    """Load blocks first to end - 1 of a chunk of a head, which has these two indices in
    K and in V; returns the new count.
    """
    SLOTS: gl.constexpr = shared.k.slots.shape[0]
    BLOCK_K: gl.constexpr = shared.k.slots.shape[1]
    for block in range(first, end):
        slot, phase = count % SLOTS, count // SLOTS & 1
        refill(k, indices[0], chunk, block * BLOCK_K, shared.k, slot, phase)
        refill(v, indices[1], chunk, block * BLOCK_K, shared.v, slot, phase)
        count += 1
    return count


@gluon.jit
def load_whole(
    own, others, flags, task, sizes, first, end, count, shared,
    CAUSAL: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """Load blocks first to end - 1 of each chunk that a tile sees whole, of this rank
    and then of the others as they arrive; returns the new count.
    """
    h = task.h // sizes.GROUP
    for chunk in gl.static_range(CHUNKS):
        stop = end
        if CAUSAL:  # the first chunk is before the second
            stop = gl.where(chunk < task.chunk, end, first)
        count = load_keys(own[0], own[1], (h, h), chunk, first, stop, count, shared)
    part = h // sizes.part_heads
    for step in range(1, sizes.size):
        source = sizes.rank - step
        source += gl.where(source < 0, sizes.size, 0)
        # Its first chunk is before its second, so it is seen if any is.
        if (not CAUSAL) | (source < task.position):
            number = (step - 1) * sizes.parts + part
            wait_for((flags + number).to(gl.int64), sizes.timeout)
            row = 2 * number * sizes.part_heads + h % sizes.part_heads
            indices = (row, row + sizes.part_heads)
            for chunk in gl.static_range(CHUNKS):
                stop = end
                if chunk == 1:
                    position = 2 * sizes.size - 1 - source
                    stop = gl.where(position < task.position, end, first)
                count = load_keys(
                    others, others, indices, chunk, first, stop, count, shared
                )
    return count


@gluon.jit
def produce(
    q, own, others, flags, counter, sizes, shared,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """The producer: for each tile Q once, then the blocks of K and V without a mask,
    then those with one, first of the tile's own chunk.
    """
    CONSUMERS: gl.constexpr = shared.q.slots.shape[0]
    BLOCK_K: gl.constexpr = shared.k.slots.shape[1]
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    count, turn, n = 0, 0, gl.program_id(0)
    while n < sizes.tiles:
        later = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        push(n, turn, shared.queue)
        task = task_at(n, sizes, CHUNKS, BLOCK_Q)
        blocks = blocks_of(task, sizes, CAUSAL, BLOCK_Q, BLOCK_K)
        for c in gl.static_range(CONSUMERS):
            row = task.row + c * ROWS
            refill(q, task.h, task.chunk, row, shared.q, c, turn & 1)
        h, full = task.h // sizes.GROUP, blocks.full
        indices, chunk = (h, h), task.chunk
        if CAUSAL:
            count = load_keys(
                own[0], own[1], indices, chunk, 0, blocks.own_full, count, shared
            )
        count = load_whole(
            own, others, flags, task, sizes, 0, full, count, shared, CAUSAL, CHUNKS
        )
        if CAUSAL:
            first, end = blocks.own_full, blocks.own_end
            count = load_keys(own[0], own[1], indices, chunk, first, end, count, shared)
        if RAGGED:
            end = full + 1
            count = load_whole(
                own, others, flags, task, sizes, full, end, count, shared,
                CAUSAL, CHUNKS,
            )  # fmt: skip
        n = later
        turn += 1
    push(n, turn, shared.queue)


@gluon.jit
def masked_block(n, i, blocks, sizes, CAUSAL: gl.constexpr, BLOCK_K: gl.constexpr):
    """Where the n-th block with a mask begins, and how many keys of its chunk each of
    the queries i [ROWS] sees.
    """
    if CAUSAL:
        own = n < blocks.own_end - blocks.own_full
        col = gl.where(own, blocks.own_full + n, blocks.full) * BLOCK_K
        seen = gl.minimum(i + 1 + gl.where(own, 0, sizes.rows_k), sizes.rows_k)
    else:
        col = blocks.full * BLOCK_K
        seen = i * 0 + sizes.rows_k
    return col, seen


@gluon.jit
def consume(
    c: gl.constexpr, o, lse, scale_log2, sizes, shared,
    CAUSAL: gl.constexpr, CHUNKS: gl.constexpr, HOLD_Q: gl.constexpr,
):  # fmt: skip
    """Consumer c: rows c ROWS and following of O and of L, tile by tile."""
    BLOCK_Q: gl.constexpr = shared.q.slots.shape[0] * ROWS
    D: gl.constexpr = shared.v.slots.shape[2]
    BLOCK_K: gl.constexpr = shared.k.slots.shape[1]
    s_layout: gl.constexpr = accumulator(BLOCK_K)
    layout: gl.constexpr = accumulator(D)
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    k_ring, v_ring = shared.k, shared.v
    q_slot, o_tile = shared.q.slots.index(c), shared.o.index(c)  # [ROWS, D]
    count, turn = 0, 0
    n = pop(turn, shared.queue)
    while n < sizes.tiles:
        task = task_at(n, sizes, CHUNKS, BLOCK_Q)
        # All consumers pass through the same blocks.
        blocks = blocks_of(task, sizes, CAUSAL, BLOCK_Q, BLOCK_K)
        row = task.row + c * ROWS
        i = row + gl.arange(0, ROWS, rows_layout)  # [ROWS]
        m = gl.full([ROWS], LOWEST, gl.float32, rows_layout)  # [ROWS], base 2
        acc = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, layout))  # [ROWS, D]

        # The first block of keys; its product P V waits for the next step.
        mbarrier.wait(shared.q.ready.index(c), turn & 1)
        if HOLD_Q:
            q_tile = q_slot.load(gl.DotOperandLayout(0, s_layout, 2))  # [ROWS, D]
            # Without the fence the copy engine may overwrite what is still being read.
            fence_async_shared()
            # The next Q is copied while this tile is computed.
            mbarrier.arrive(shared.q.empty.index(c), count=1)
        else:
            q_tile = tile_in(shared.q, c)  # [ROWS, D]
        s = warpgroup_mma_wait(0, [start_scores(q_tile, k_ring, count)])
        release(k_ring, count)
        col, seen = masked_block(0, i, blocks, sizes, CAUSAL, BLOCK_K)
        if blocks.unmasked > 0:
            p, m, l = attend_first(s, m, scale_log2, seen, col, False)
        else:
            p, m, l = attend_first(s, m, scale_log2, seen, col, True)
        bits = p.to(q_slot.dtype).to(gl.int16, bitcast=True)  # [ROWS, BLOCK_K]
        count += 1
        unchanged = GluonChange()
        queries = Queries(0, task.h, row, seen, 0.0, c, None)
        invariants = (q_tile, k_ring, v_ring, queries, sizes, scale_log2)
        for _ in range(1, blocks.unmasked):
            bits, acc, m, l = attend(
                bits, acc, m, l, invariants, unchanged, count, 0, False
            )
            count += 1
        for n_masked in range(gl.where(blocks.unmasked > 0, 0, 1), blocks.masked):
            col, seen = masked_block(n_masked, i, blocks, sizes, CAUSAL, BLOCK_K)
            queries = Queries(0, task.h, row, seen, 0.0, c, None)
            invariants = (q_tile, k_ring, v_ring, queries, sizes, scale_log2)
            bits, acc, m, l = attend(
                bits, acc, m, l, invariants, unchanged, count, col, True
            )
            count += 1

        acc = start_values(acc, bits, v_ring, count - 1)
        l = gl.convert_layout(gl.sum(l, 1), rows_layout)  # [ROWS]
        lse_rows, l = log_sum_exp(m, l)  # [ROWS] both
        rows = (task.h * CHUNKS + task.chunk).to(gl.int64) * sizes.rows_q
        gl.store(lse + rows + i, lse_rows, mask=i < sizes.rows_q)
        o_rows = warpgroup_mma_wait(0, [acc])  # [ROWS, D]
        release(v_ring, count - 1)
        inverse = gl.convert_layout(1.0 / l, gl.SliceLayout(1, layout))  # [ROWS]
        o_rows = o_rows * inverse[:, None]  # [ROWS, D]
        tma.store_wait(0)  # until the tile before has left shared memory
        o_tile.store(o_rows.to(o_tile.dtype))
        fence_async_shared()
        where = coordinates(o, task.h, task.chunk, row)
        tma.async_copy_shared_to_global(o, where, o_tile)
        if not HOLD_Q:
            tma.store_wait(0)
            mbarrier.arrive(shared.q.empty.index(c), count=1)
        turn += 1
        n = pop(turn, shared.queue)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=RingSizes._fields)
def ring_kernel(
    q, k, v, others, flags, o, lse, counter, scale_log2,
    tiles, heads, section, GROUP, rows_q, rows_k, rank, size, parts, part_heads,
    timeout,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, tile: gl.constexpr, D: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Programs take tiles [CONSUMERS ROWS, D] of O and of L until none is left;
    scale_log2 is for base 2.
    """
    CONSUMERS: gl.constexpr = tile.CONSUMERS
    SLOTS: gl.constexpr = tile.SLOTS
    BLOCK_K: gl.constexpr = tile.BLOCK_K
    HOLD_Q: gl.constexpr = tile.HOLD_Q
    CHUNKS: gl.constexpr = 2 if CAUSAL else 1
    q_ring = make_ring(q.dtype, CONSUMERS, ROWS, D, 1)
    k_ring = make_ring(k.dtype, SLOTS, BLOCK_K, D, CONSUMERS)
    v_ring = make_ring(v.dtype, SLOTS, BLOCK_K, D, CONSUMERS)
    o_tiles = q_ring.slots  # if Q stays in shared memory, O replaces it there
    if HOLD_Q:
        shape: gl.constexpr = [CONSUMERS, ROWS, D]
        o_tiles = gl.allocate_shared_memory(o.dtype, shape, o_tiles.layout)
    sizes = RingSizes(
        tiles, heads, section, GROUP, rows_q, rows_k, rank, size, parts, part_heads,
        timeout, None, None, None,
    )  # fmt: skip
    shared = ForwardShared(q_ring, k_ring, v_ring, make_queue(CONSUMERS), o_tiles, None)
    gl.warp_specialize([
        (consume, (0, o, lse, scale_log2, sizes, shared, CAUSAL, CHUNKS, HOLD_Q)),
        (consume, (1, o, lse, scale_log2, sizes, shared, CAUSAL, CHUNKS, HOLD_Q)),
        (produce, (q, (k, v), others, flags, counter, sizes, shared, CAUSAL, RAGGED,
                   CHUNKS)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@plans.planned
def launch(q, k, v, others, flags, o, lse, scale, arrival, tile):
    """Launch with one ForwardTile of two consumers; scale > 0, no tensor empty."""
    heads, chunks, rows_q, d = q.shape
    rows_k, BLOCK_Q = k.shape[2], tile.CONSUMERS * ROWS.value
    programs, options = PROGRAMS[tile.CONSUMERS]
    per_head = chunks * triton.cdiv(rows_q, BLOCK_Q)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    # About four tiles for each program, of heads that arrive together.
    together = heads // arrival.parts
    section = max(1, min(SECTION_HEADS, together, 4 * processors // per_head))
    section = triton.cdiv(together, together // section)
    plans.launch(
        ring_kernel, q, min(heads * per_head, programs * processors),
        gluon_descriptor(q, ROWS.value), gluon_descriptor(k, tile.BLOCK_K),
        gluon_descriptor(v, tile.BLOCK_K), gluon_descriptor(others, tile.BLOCK_K),
        flags, gluon_descriptor(o, ROWS.value), lse,
        plans.zeros((1,), torch.int32, q), scale * LOG2_E.value,
        heads * per_head, heads, section, heads // k.shape[0], rows_q, rows_k,
        arrival.rank, arrival.size, arrival.parts, k.shape[0] // arrival.parts,
        arrival.timeout_ns,
        CAUSAL=chunks == 2, RAGGED=rows_k % tile.BLOCK_K != 0, tile=tile, D=d,
        num_warps=4, **options,
    )  # fmt: skip


class Arrival(NamedTuple):
    """How the keys of the other ranks arrive at this one."""

    rank: int
    size: int
    parts: int  # the parts of a shard, each of as many heads
    timeout_ns: int


@plans.planned
def forward(q, k, v, others, flags, scale, arrival):
    """O and the log-sum-exp of this rank's queries and the keys of all ranks, on a
    Hopper GPU.

    q is ``[B H, chunks, rows_q, d]``, k and v ``[B H_kv, chunks, rows_k, d]``,
    contiguous, float16 or bfloat16, d one of 64, 128, 256. With two chunks the mask is
    causal, rows_q = rows_k, and the chunks are those of a zig-zag shard. others ``[2 B
    H_kv (N - 1), chunks, rows_k, d]`` has the shards of the ranks before this one, the
    nearest first. Each has arrival.parts parts: the keys of some heads, then their
    values. flags ``[(N - 1) parts]``, uint32, are 1 where a part has arrived. A program
    that waits longer than arrival.timeout_ns stops the GPU with an error.

    Returns ``(o, lse)``: o like q, and lse ``[B H, chunks, rows_q]`` in float32,
    natural logarithm. Two runs agree in every bit, in whichever order shards arrive.
    """

    def fill(q, o, lse, scale):
        tile = TILES[q.shape[3]][1]
        launch(q, k, v, others, flags, o, lse, scale, arrival, tile)

    return hopper_forward(q, k, scale, fill)
