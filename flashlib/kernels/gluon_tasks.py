"""Which tile of O is next in Hopper's forward kernel, where its queries and keys are,
and where a window begins.

Chapter *Hopper*, its depth. A persistent program counts through the tiles of all heads;
sizes are the ForwardSizes of hopper.py, or in eight bits those of gluon_fp8.py.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Task(NamedTuple):
    """A tile of O: where it is, and where its queries and keys are."""

    q: Any  # a batch, or the first row of a packed sequence and its length
    k: Any
    h: int
    row: int  # the first query
    T_q: int  # of its batch or sequence
    T_k: int
    lse: int  # the offset of the rows of L


@gluon.jit
def first_block(b, sizes, BLOCK_Q: gl.constexpr):
    """The index of the first block of queries of packed sequence b. The next sequence's
    index is large enough for all blocks of this one, whatever the lengths.
    """
    return gl.load(sizes.starts_q + b) // BLOCK_Q + b


@gluon.jit
def unpack(h, block, sizes, BLOCK_Q: gl.constexpr):
    """The Task of a head and a block of packed queries."""
    b, end = 0, sizes.sequences
    while end - b > 1:
        middle = (b + end) // 2
        if first_block(middle, sizes, BLOCK_Q) <= block:
            b = middle
        else:
            end = middle
    row = (block - first_block(b, sizes, BLOCK_Q)) * BLOCK_Q
    q, k = gl.load(sizes.starts_q + b), gl.load(sizes.starts_k + b)
    T_q = gl.load(sizes.starts_q + b + 1) - q
    # After the end of a sequence a tile has no keys, and nothing of it is stored.
    T_k = gl.where(row < T_q, gl.load(sizes.starts_k + b + 1) - k, 0)
    lse = h.to(gl.int64) * sizes.T_q + q
    return Task((q, T_q), (k, T_k), h, row, T_q, T_k, lse)


@gluon.jit
def head_and_block(n, blocks, sizes, LONGEST_FIRST: gl.constexpr):
    """The head, of all batches, and the block of queries of tile n, where a head has
    this many blocks.
    """
    if LONGEST_FIRST:
        # The last queries see the most keys: the longest tiles of a section come first.
        first = n // (sizes.section * blocks) * sizes.section
        size = gl.minimum(sizes.section, sizes.heads - first)
        n -= first * blocks
        head, block = first + n % size, blocks - 1 - n // size
    else:
        head, block = n // blocks, n % blocks
    return head, block


@gluon.jit
def task_at(n, sizes, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr):
    """The Task of tile n."""
    blocks = gl.cdiv(sizes.T_q, BLOCK_Q)
    if sizes.starts_q is not None:
        blocks = sizes.T_q // BLOCK_Q + sizes.sequences
    LONGEST_FIRST: gl.constexpr = CAUSAL or sizes.lists is not None
    head, block = head_and_block(n, blocks, sizes, LONGEST_FIRST)
    if sizes.starts_q is not None:
        task = unpack(head, block, sizes, BLOCK_Q)
    else:
        b, h, lse = head // sizes.H, head % sizes.H, head.to(gl.int64) * sizes.T_q
        task = Task(b, b, h, block * BLOCK_Q, sizes.T_q, sizes.T_k, lse)
    return task


@gluon.jit
def window_start(row, rows: gl.constexpr, end, task, left, BLOCK_K: gl.constexpr):
    """The first of the blocks of keys before `end` that any query from row to row +
    rows - 1 sees, and the first that is inside the window of all of them.
    """
    first, full_start = 0, 0
    if left is not None:
        key = row + task.T_k - task.T_q - left
        first = gl.minimum(gl.maximum(key, 0) // BLOCK_K, end - 1)
        full_start = gl.cdiv(gl.maximum(key + rows - 1, 0), BLOCK_K)
    return first, full_start
