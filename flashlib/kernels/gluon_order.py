"""dQ by the kernel that computes dK and dV, for Hopper (sm_90), in Gluon.

Chapter *Hopper*, its depth. Consumers leave their parts of dQ in shared memory. A role
of its own lets the copy engine add them to a buffer in memory, in one order: block i of
queries takes the part of the first keys, then that of the next ones, or from the last
keys to the first. So two runs agree in every bit, although every program adds. Where
d = 64, steps are short, and two warps share the role.

A program never waits for one that starts later. Programs take their place in line by a
ticket, and all go through the queries from the last block to the first, so each is a
step behind the one before and nobody stands still. With a causal mask, the first keys,
which most queries see, start first, and their program ends last, in the order in which
the programs of the next head start.

A program with several heads of queries would then wait, at each of them, for that of
the first keys. So every other section of heads begins with the last keys, whose programs
have the least to do and are through first. Behind them start, in the next section, those
of the first keys, which have the most to do.
"""

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashlib import plans
from flashlib.kernels.gluon_tiles import CONSUMERS, ROWS, block_of
from flashlib.kernels.tiles import Rows


@builtin
def start_adding(tensor, corner, tile, _semantic=None):
    """Start adding a tile in shared memory to a tensor in memory (TMA); Gluon's builder
    has the operation, but its language no function.
    """
    corner = _semantic._convert_to_ir_values(corner, require_i64=False)
    add = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(add, tensor.handle, corner, tile.handle)


@gluon.jit
def wait_until_added():
    """Wait until this warp sees in memory what it started to add or store; after
    tma.store_wait it has only left shared memory.
    """
    lanes = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
        "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def next_turn(n, turns, sizes, block, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """The first row of dQ, of all heads, that step n of a program adds to, where its
    parts are counted, and how many of them come first.
    """
    b, h_kv, col, row, band, rest, falling = block
    GROUP = sizes.GROUP
    if n < GROUP * rest:
        g, i = block_of(n, rest, row + band * BLOCK_Q, BLOCK_Q)
    else:
        g, i = block_of(n - GROUP * rest, band, row, BLOCK_Q)
    place = ((b * sizes.heads + h_kv) * GROUP + g) * sizes.PADDED + i
    turn = col // BLOCK_K
    if falling:
        end = gl.minimum(i + BLOCK_Q + sizes.T_k - sizes.T_q, sizes.T_k)
        turn = (end - 1) // BLOCK_K - turn
    return place, turns + 1 + place // BLOCK_Q, turn


@gluon.jit
def adder(a: gl.constexpr, held, turns, sizes, block, shared):
    """Add what this program's consumers compute of dQ, each part when it is its turn.
    With two adders, each adds every other part; adder a begins with part a.

    held is the descriptor of the sums, [B H PADDED, D]; turns has the ticket, then the
    number of parts that each block of queries has.
    """
    slots, ready, empty = shared.parts
    BLOCK_Q: gl.constexpr = slots.shape[1]
    COLUMNS: gl.constexpr = slots.shape[2]
    PARTS: gl.constexpr = slots.shape[0] // CONSUMERS
    ADDERS: gl.constexpr = PARTS // 2
    BLOCK_K: gl.constexpr = shared.own[0].shape[0]
    steps = sizes.GROUP * (block.rest + block.band)
    following = gl.minimum(a, steps - 1)
    later, count, then = next_turn(following, turns, sizes, block, BLOCK_Q, BLOCK_K)
    done = gl.load(count, volatile=True)
    for n in range(a, steps, ADDERS):
        place, turn = later, then
        while done != turn:
            done = gl.load(count, volatile=True)
        mbarrier.wait(ready.index(n % PARTS), n // PARTS & 1)
        for c in gl.static_range(CONSUMERS):
            part = slots.index(n % PARTS * CONSUMERS + c)  # [BLOCK_Q, COLUMNS]
            if turn == 0:
                tma.async_copy_shared_to_global(held, [place, c * COLUMNS], part)
            else:
                start_adding(held, [place, c * COLUMNS], part)
        # The next count is on its way while this part is.
        own, following = count, gl.minimum(n + ADDERS, steps - 1)
        later, count, then = next_turn(following, turns, sizes, block, BLOCK_Q, BLOCK_K)
        done = gl.load(count, volatile=True)
        wait_until_added()
        mbarrier.arrive(empty.index(n % PARTS))
        # Other multiprocessors may see the sum later than this warp does, but not later
        # than a count that releases it. Reading needs no acquire: nothing of the sum is
        # in a cache of theirs, since the copy engine adds in L2.
        gl.atomic_add(own, 1, sem="release")


@triton.jit
def finish_kernel(
    held, dq, scale, first, H, T, PADDED, ROWS: tl.constexpr, D: tl.constexpr
):
    """One program scales and rounds a block of dQ; rows before `first` see no key."""
    blocks = tl.cdiv(T, ROWS)
    row, head = tl.program_id(0) % blocks * ROWS, tl.program_id(0) // blocks
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    i = (row + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # [ROWS, 1]
    k = tl.arange(0, D)[None, :]
    held += (head.to(tl.int64) * PADDED + i) * D + k  # [ROWS, D]
    tile = tl.load(held, mask=i >= first, other=0.0) * scale  # [ROWS, D]
    at = b * dq.strides[0] + h * dq.strides[1] + i * dq.strides[2] + k * dq.strides[3]
    tl.store(dq.ptr + at, tile.to(dq.ptr.dtype.element_ty), mask=i < T)


def launch_finish(held, dq, padded, causal, scale, T_k):
    """Launch the kernel that fills dq from what the fused kernel summed."""
    B, H, T_q, d = dq.shape
    first = max(T_q - T_k, 0) if causal else 0
    return plans.launch(
        finish_kernel, dq, B * H * triton.cdiv(T_q, ROWS.value),
        held, Rows(dq, dq.stride()), scale, first, H, T_q, padded, ROWS.value, d,
    )  # fmt: skip
