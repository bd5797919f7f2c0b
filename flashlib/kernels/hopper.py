"""FlashAttention-2, forward, for Hopper (sm_90), in Gluon: copies and products run on their own.

Chapter *Hopper*; the algorithm is that of flash2, the division of labour that of Shah et al.,
"FlashAttention-3" (NeurIPS 2024), Algorithm 2; Gluon is Triton's dialect for such kernels. A program has one
producer, a warp that only starts copies (TMA), and one, two or three consumers, groups of four warps that own
64 rows of queries each. K and V pass through rings of slots in shared memory. A slot has two barriers:
`ready`, which the copy engine completes, and `free`, which the consumers do.

A consumer starts S = Q K^T of the next block before it adds P V of this one, and computes the exponentials of
the next block while that product runs. As many programs as the GPU has room for stay until all tiles are
done: who is done with a tile draws the next from a counter, the longest first.
"""

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from flashlib.kernels import on_device
from flashlib.kernels.copies import descriptor, filled

LOG2_E = math.log2(math.e)
LN_2 = gl.constexpr(math.log(2.0))
ROWS = gl.constexpr(64)  # of a tile of queries that one consumer owns: the height of a product
# With a causal mask this many heads at most are worked on at a time, and no more than have this many keys
# together: the tiles that read them find most of K and V in the L2 cache.
SECTION_HEADS, SECTION_KEYS = 16, 2**16


@gluon.jit
def place(n, heads, section, H, T_q, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Where tile n lies: batch, head, first query."""
    blocks = gl.cdiv(T_q, BLOCK_Q)
    if CAUSAL:
        # The last queries see the most keys: the longest tiles of a section come first.
        first = n // (section * blocks) * section
        size = gl.minimum(section, heads - first)
        n -= first * blocks
        head, row = first + n % size, (blocks - 1 - n // size) * BLOCK_Q
    else:
        head, row = n // blocks, n % blocks * BLOCK_Q
    return head // H, head % H, row


@gluon.jit
def reach(row, rows: gl.constexpr, T_q, T_k, CAUSAL: gl.constexpr, BLOCK_K: gl.constexpr):
    """How many blocks of keys all of the queries row to row + rows - 1 see, and how many any of them does."""
    full, end = T_k // BLOCK_K, gl.cdiv(T_k, BLOCK_K)
    if CAUSAL:
        full = gl.minimum(full, gl.maximum(row + 1 + T_k - T_q, 0) // BLOCK_K)
        # Queries that see no key read one block, and mask all of it.
        end = gl.minimum(end, gl.cdiv(gl.maximum(row + rows + T_k - T_q, 1), BLOCK_K))
    return full, end


@gluon.jit
def send(n, turn, mail, posted, taken):
    """Tell the consumers the number of their next tile; two letters may be under way."""
    mbarrier.wait(taken.index(turn % 2), (turn // 2 & 1) ^ 1)
    mail.index(turn % 2).store(gl.full([1], n, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(posted.index(turn % 2), count=1)


@gluon.jit
def receive(turn, mail, posted, taken):
    """The number that the producer has sent."""
    mbarrier.wait(posted.index(turn % 2), turn // 2 & 1)
    n = gl.max(mail.index(turn % 2).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(taken.index(turn % 2), count=1)
    return n


@gluon.jit
def copy(x, b, h, row, slots, ready, free, slot, phase):
    """Start copying a tile of x into a slot, once nobody reads what is in it."""
    mbarrier.wait(free.index(slot), phase ^ 1)
    mbarrier.expect(ready.index(slot), x.block_type.nbytes)
    tma.async_copy_global_to_shared(x, [b, h, row, 0], ready.index(slot), slots.index(slot))


@gluon.jit
def produce(given, CAUSAL: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, SLOTS: gl.constexpr):
    """The producer: for each tile Q once, then the blocks of K and V that any of its queries sees."""
    q, k, v, counter, tiles, heads, section, H, GROUP, T_q, T_k, q_ring, k_ring, v_ring, letters = given
    count, turn, n = 0, 0, gl.program_id(0)
    while n < tiles:
        later = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        send(n, turn, *letters)
        b, h, row = place(n, heads, section, H, T_q, CAUSAL, CONSUMERS * ROWS)
        end = reach(row, CONSUMERS * ROWS, T_q, T_k, CAUSAL, BLOCK_K)[1]
        for c in gl.static_range(CONSUMERS):
            copy(q, b, h, row + c * ROWS, *q_ring, c, turn & 1)
        for j in range(end):
            slot, phase = count % SLOTS, count // SLOTS & 1
            copy(k, b, h // GROUP, j * BLOCK_K, *k_ring, slot, phase)
            copy(v, b, h // GROUP, j * BLOCK_K, *v_ring, slot, phase)
            count += 1
        n = later
        turn += 1
    send(n, turn, *letters)


@gluon.jit
def online_softmax(s, m, l, scale_log2, sight, col, MASKED: gl.constexpr):
    """Fold the raw scores s [ROWS, BLOCK_K] of the keys from col on into m and l [ROWS]; a query sees the
    keys before its sight [ROWS].

    Returns the weights, in base 2, the factor that brings earlier sums to the new maximum, and the new m and
    l.
    """
    if MASKED:
        j = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))  # [BLOCK_K]
        s = gl.where(j[None, :] < (sight - col)[:, None], s, -float("inf"))  # [ROWS, BLOCK_K]
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)  # [ROWS]
    # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
    shift = gl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new  # [ROWS]
    p = gl.exp2(s * scale_log2 - shift[:, None])  # [ROWS, BLOCK_K], a multiply-add and an exponential
    alpha = gl.exp2(m - shift)  # [ROWS]
    return p, alpha, m_new, l * alpha + gl.sum(p, 1)


@gluon.jit
def scores(q_tile, k_ring, count, layout: gl.constexpr, SLOTS: gl.constexpr):
    """Start S = Q K^T, [ROWS, BLOCK_K], for the block of keys that comes as number `count`; Q lies in shared
    memory or in registers.
    """
    k_slots, ready = k_ring[0], k_ring[1]
    mbarrier.wait(ready.index(count % SLOTS), count // SLOTS & 1)
    k_tile = k_slots.index(count % SLOTS)  # [BLOCK_K, D]
    BLOCK_K: gl.constexpr = k_tile.shape[0]
    nothing = gl.zeros([ROWS, BLOCK_K], gl.float32, layout)  # [ROWS, BLOCK_K], not read
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def add_values(acc, bits, v_ring, count, factor: gl.constexpr, SLOTS: gl.constexpr):
    """Start acc += P V, [ROWS, D], for the block of values that comes as number `count`."""
    v_slots, ready = v_ring[0], v_ring[1]
    p = gl.convert_layout(bits.to(v_slots.dtype, bitcast=True), factor)  # [ROWS, BLOCK_K], in registers
    mbarrier.wait(ready.index(count % SLOTS), count // SLOTS & 1)
    return warpgroup_mma(p, v_slots.index(count % SLOTS), acc, is_async=True)


@gluon.jit
def attend(bits, acc, m, l, q_tile, k_ring, v_ring, count, sight, col, scale_log2, MASKED: gl.constexpr,
           factor: gl.constexpr, SLOTS: gl.constexpr):
    """One step of the inner loop: scores and weights of block `count`, and P V of the one before."""
    k_free, v_free = k_ring[2], v_ring[2]
    layout: gl.constexpr = m.type.layout.parent
    s = scores(q_tile, k_ring, count, layout, SLOTS)
    acc = add_values(acc, bits, v_ring, count - 1, factor, SLOTS)
    s = warpgroup_mma_wait(1, [s])  # [ROWS, BLOCK_K]; P V goes on running
    mbarrier.arrive(k_free.index(count % SLOTS), count=1)
    p, alpha, m, l = online_softmax(s, m, l, scale_log2, sight, col, MASKED)
    o = warpgroup_mma_wait(0, [acc])  # [ROWS, D]
    mbarrier.arrive(v_free.index((count - 1) % SLOTS), count=1)
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None]  # [ROWS, D]
    # As integers: of 16-bit floats that a loop hands on, Triton 3.6 and 3.7 swap the halves of every pair.
    bits = p.to(k_ring[0].dtype).to(gl.int16, bitcast=True)  # [ROWS, BLOCK_K]
    return bits, warpgroup_mma_init(o), m, l


@gluon.jit
def consume(c: gl.constexpr, given, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, CONSUMERS: gl.constexpr,
            BLOCK_K: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, HOLD_Q: gl.constexpr):
    """Consumer c: rows c ROWS and following of O and of L, tile by tile."""
    o, lse, scale_log2, tiles, heads, section, H, T_q, T_k, q_ring, k_ring, v_ring, letters, o_tiles = given
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    q_tiles, q_ready, q_free = q_ring
    k_ready, k_free, v_ready, v_free = k_ring[1], k_ring[2], v_ring[1], v_ring[2]
    q_slot, o_tile = q_tiles.index(c), o_tiles.index(c)  # [ROWS, D]
    count, turn = 0, 0
    n = receive(turn, *letters)
    while n < tiles:
        b, h, row = place(n, heads, section, H, T_q, CAUSAL, CONSUMERS * ROWS)
        last = reach(row, CONSUMERS * ROWS, T_q, T_k, CAUSAL, BLOCK_K)[1]
        row += c * ROWS
        full, end = reach(row, ROWS, T_q, T_k, CAUSAL, BLOCK_K)
        i = row + gl.arange(0, ROWS, rows_layout)  # [ROWS]
        sight = gl.full([ROWS], T_k, gl.int32, rows_layout)  # [ROWS], how many keys a query sees
        if CAUSAL:
            sight = gl.minimum(sight, i + (T_k - T_q + 1))  # [ROWS]
        m = gl.full([ROWS], -float("inf"), gl.float32, rows_layout)  # [ROWS], base 2
        l = gl.zeros([ROWS], gl.float32, rows_layout)  # [ROWS]
        acc = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, layout))  # [ROWS, D]

        # The first block of keys; its product P V waits for the next step.
        mbarrier.wait(q_ready.index(c), turn & 1)
        if HOLD_Q:
            q_tile = q_slot.load(gl.DotOperandLayout(0, s_layout, 2))  # [ROWS, D], in registers
            fence_async_shared()  # without it the copy engine may overwrite what is still being loaded
            mbarrier.arrive(q_free.index(c), count=1)  # the next Q is copied while this tile is computed
        else:
            q_tile = q_slot  # [ROWS, D]
        s = warpgroup_mma_wait(0, [scores(q_tile, k_ring, count, s_layout, SLOTS)])  # [ROWS, BLOCK_K]
        mbarrier.arrive(k_free.index(count % SLOTS), count=1)
        if full > 0:
            p, _alpha, m, l = online_softmax(s, m, l, scale_log2, sight, 0, False)
        else:
            p, _alpha, m, l = online_softmax(s, m, l, scale_log2, sight, 0, True)
        bits = p.to(q_slot.dtype).to(gl.int16, bitcast=True)  # [ROWS, BLOCK_K]
        count += 1
        for j in range(1, full):
            bits, acc, m, l = attend(bits, acc, m, l, q_tile, k_ring, v_ring, count, sight, j * BLOCK_K,
                                     scale_log2, False, factor, SLOTS)
            count += 1
        if CAUSAL or RAGGED:
            for j in range(gl.maximum(full, 1), end):
                bits, acc, m, l = attend(bits, acc, m, l, q_tile, k_ring, v_ring, count, sight, j * BLOCK_K,
                                         scale_log2, True, factor, SLOTS)
                count += 1

        acc = add_values(acc, bits, v_ring, count - 1, factor, SLOTS)
        l = gl.where(l == 0.0, 1.0, l)  # [ROWS]; a query that sees no key has l = 0, O = 0 and L = -inf
        gl.store(lse + (b * H + h).to(gl.int64) * T_q + i, (m + gl.log2(l)) * LN_2, mask=i < T_q)
        o_rows = warpgroup_mma_wait(0, [acc])  # [ROWS, D]
        mbarrier.arrive(v_free.index((count - 1) % SLOTS), count=1)
        if CAUSAL:
            # Blocks that only the consumers of later rows see pass by.
            for _j in range(end, last):
                mbarrier.wait(k_ready.index(count % SLOTS), count // SLOTS & 1)
                mbarrier.arrive(k_free.index(count % SLOTS), count=1)
                mbarrier.wait(v_ready.index(count % SLOTS), count // SLOTS & 1)
                mbarrier.arrive(v_free.index(count % SLOTS), count=1)
                count += 1
        o_rows = o_rows * gl.convert_layout(1.0 / l, gl.SliceLayout(1, layout))[:, None]  # [ROWS, D]
        tma.store_wait(0)  # until the tile before has left shared memory
        o_tile.store(o_rows.to(o_tile.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o, [b, h, row, 0], o_tile)
        if not HOLD_Q:
            tma.store_wait(0)
            mbarrier.arrive(q_free.index(c), count=1)
        turn += 1
        n = receive(turn, *letters)
    tma.store_wait(0)


@gluon.jit
def ring(dtype: gl.constexpr, SLOTS: gl.constexpr, rows: gl.constexpr, D: gl.constexpr,
         readers: gl.constexpr):
    """Slots for tiles [rows, D] in shared memory and their barriers: (slots, ready, free)."""
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, D], dtype)
    slots = gl.allocate_shared_memory(dtype, [SLOTS, rows, D], tile)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=readers)
    return slots, ready, free


@gluon.jit(do_not_specialize=["tiles", "heads", "section", "H", "GROUP", "T_q", "T_k"])
def forward_kernel(q, k, v, o, lse, counter, scale_log2, tiles, heads, section, H, GROUP, T_q, T_k,
                   CAUSAL: gl.constexpr, RAGGED: gl.constexpr, CONSUMERS: gl.constexpr,
                   BLOCK_K: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, HOLD_Q: gl.constexpr,
                   CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr):
    """Programs draw tiles [CONSUMERS ROWS, D] of O and of L until there are no more."""
    q_ring = ring(q.dtype, CONSUMERS, ROWS, D, 1)
    k_ring = ring(k.dtype, SLOTS, BLOCK_K, D, CONSUMERS)
    v_ring = ring(v.dtype, SLOTS, BLOCK_K, D, CONSUMERS)
    # Where Q stays in shared memory, O leaves from where Q was.
    o_tiles = q_ring[0]
    if HOLD_Q:
        o_tiles = gl.allocate_shared_memory(o.dtype, [CONSUMERS, ROWS, D], o_tiles.layout)
    mail = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    posted = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(posted.index(i), count=1)
        mbarrier.init(taken.index(i), count=CONSUMERS)
    letters = (mail, posted, taken)
    to_consumers = (o, lse, scale_log2, tiles, heads, section, H, T_q, T_k, q_ring, k_ring, v_ring, letters,
                    o_tiles)
    to_producer = (q, k, v, counter, tiles, heads, section, H, GROUP, T_q, T_k, q_ring, k_ring, v_ring,
                   letters)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (0, to_consumers, CAUSAL, RAGGED, CONSUMERS, BLOCK_K, D, SLOTS, HOLD_Q)),
            (produce, (to_producer, CAUSAL, CONSUMERS, BLOCK_K, SLOTS)),
        ], [1], [PRODUCER_REGISTERS])
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (0, to_consumers, CAUSAL, RAGGED, CONSUMERS, BLOCK_K, D, SLOTS, HOLD_Q)),
            (consume, (1, to_consumers, CAUSAL, RAGGED, CONSUMERS, BLOCK_K, D, SLOTS, HOLD_Q)),
            (produce, (to_producer, CAUSAL, CONSUMERS, BLOCK_K, SLOTS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    else:
        gl.warp_specialize([
            (consume, (0, to_consumers, CAUSAL, RAGGED, CONSUMERS, BLOCK_K, D, SLOTS, HOLD_Q)),
            (consume, (1, to_consumers, CAUSAL, RAGGED, CONSUMERS, BLOCK_K, D, SLOTS, HOLD_Q)),
            (consume, (2, to_consumers, CAUSAL, RAGGED, CONSUMERS, BLOCK_K, D, SLOTS, HOLD_Q)),
            (produce, (to_producer, CAUSAL, CONSUMERS, BLOCK_K, SLOTS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])


# {d: [(CONSUMERS, BLOCK_K, SLOTS, HOLD_Q)]}: for short sequences with a causal mask, for others, for long
# ones. Rows of Q that a consumer holds in registers are not read from shared memory again for every block.
# Three consumers, and those of d = 256, have no registers left for them. From d = 128 on a consumer needs
# 240, and there is no room for a third.
TILES = {
    64: [(1, 64, 3, True), (2, 128, 4, True), (3, 128, 3, False)],
    128: [(2, 64, 4, True), (2, 128, 2, True), (2, 128, 2, True)],
    256: [(2, 64, 2, False), (2, 64, 2, False), (2, 64, 2, False)],
}
# {CONSUMERS: (programs that a multiprocessor has room for, options)}: a program begins with maxnreg registers
# a thread. The producer hands most of its own to the consumers (to the only one without being asked). All
# programs together have the 65536 of a multiprocessor.
ROOM = {
    1: (3, {"CONSUMER_REGISTERS": 136, "PRODUCER_REGISTERS": 24, "maxnreg": 80}),
    2: (1, {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24, "maxnreg": 168}),
    3: (1, {"CONSUMER_REGISTERS": 160, "PRODUCER_REGISTERS": 24, "maxnreg": 128}),
}


def tile(d, T_q, causal):
    """(CONSUMERS, BLOCK_K, SLOTS, HOLD_Q), as measured on an H200: the more of a large tile would lie above
    the diagonal, and the fewer its blocks are, the smaller it is.
    """
    short, middle, long = TILES[d]
    if causal and T_q < 2048:
        return short
    return middle if T_q < 8192 else long


def launch(q, k, v, o, lse, causal, scale, row):
    """Launch with one row of TILES; scale > 0, no tensor empty."""
    B, H, T_q, d = q.shape
    T_k = k.shape[2]
    CONSUMERS, BLOCK_K, SLOTS, HOLD_Q = row
    programs, options = ROOM[CONSUMERS]
    tiles = B * H * triton.cdiv(T_q, CONSUMERS * ROWS.value)
    group = H // k.shape[1]
    section = min(SECTION_HEADS, max(1, SECTION_KEYS // T_k) * group)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    with on_device(q):
        return forward_kernel[(min(tiles, programs * processors),)](
            descriptor(q, ROWS.value), descriptor(k, BLOCK_K), descriptor(v, BLOCK_K),
            descriptor(o, ROWS.value), lse, counter, scale * LOG2_E,
            tiles, B * H, section, H, group, T_q, T_k,
            CAUSAL=causal, RAGGED=T_k % BLOCK_K != 0, CONSUMERS=CONSUMERS, BLOCK_K=BLOCK_K, D=d, SLOTS=SLOTS,
            HOLD_Q=HOLD_Q, num_warps=4, **options,
        )  # fmt: skip


def forward(q, k, v, causal, scale):
    """O and the log-sum-exp, on a Hopper GPU, of tensors that ``flashlib.kernels.copies.refusal`` lets
    through.

    q ``[B, H, T_q, d]``, k and v ``[B, H_kv, T_k, d]``, float16 or bfloat16, d one of 64, 128, 256, scale
    finite.
    Returns ``(o, lse)``: o ``[B, H, T_q, d]`` in the dtype of q, contiguous; lse ``[B, H, T_q]`` in float32,
    natural logarithm. The results are the same in every bit on every run, whichever program draws which tile.
    """
    row = tile(q.shape[3], q.shape[2], causal)
    return filled(q, k, scale, lambda q, o, lse, scale: launch(q, k, v, o, lse, causal, scale, row))
