"""Pieces of Hopper's forward kernel for masks that are functions.

Chapter *Masks* (``eq-masks-kinds``). The producer and all consumers of a program pass
through one list of blocks of keys, which :mod:`flashlib.kernels.tile_lists` makes for
the queries of the program: first the blocks of which every pair is visible, for which
no mask is evaluated, then the others.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Queries(NamedTuple):
    """The queries of a consumer."""

    b: Any
    h: Any
    position: Any  # of the first
    seen: Any  # they see only keys before these, [ROWS]
    slope: Any  # of ALiBi, in units of the raw scores
    c: Any  # the number of the consumer
    bias_ring: Any  # of tiles of the bias, or None where none are copied


@gluon.jit
def list_of_task(task, sizes, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """A pointer to the list of a Task, which has the number of full blocks, the number
    of all blocks, and then the index of each.
    """
    number = (task.q * sizes.per_batch + task.h * sizes.per_head).to(gl.int64)
    row = number * gl.cdiv(task.T_q, BLOCK_Q) + task.row // BLOCK_Q
    return sizes.lists + row * (2 + gl.cdiv(task.T_k, BLOCK_K))


@gluon.jit
def list_bounds(blocks):
    """How many blocks of a list need no mask, and how many are read. Of an empty list
    one is read, and no query sees a key of it.
    """
    return gl.load(blocks), gl.maximum(gl.load(blocks + 1), 1)


@gluon.jit
def column(j, blocks, BLOCK_K: gl.constexpr):
    """The first key of block j, or of block j of a list."""
    if blocks is not None:
        j = gl.load(blocks + 2 + j)
    return j * BLOCK_K


@gluon.jit
def seen_by_mask(s, queries, col, mask):
    """Which of the keys from col on a mask shows, for scores s [ROWS, BLOCK_K]."""
    ROWS: gl.constexpr = s.shape[0]
    BLOCK_K: gl.constexpr = s.shape[1]
    i = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))  # [ROWS]
    j = gl.arange(0, BLOCK_K, gl.SliceLayout(0, s.type.layout))  # [BLOCK_K]
    position, key = (queries.position + i)[:, None], (col + j)[None, :]
    return mask[0](queries.b, queries.h, position, key, *mask[1])


@gluon.jit
def hide_scores(s, queries, col, sizes, change):
    """Scores s [ROWS, BLOCK_K] of the keys from col on, -inf where the mask hides a key
    and before the window of a query.
    """
    if sizes.lists is not None:  # Triton 3.6 cannot compare a Rule with None
        s = gl.where(seen_by_mask(s, queries, col, change.mask), s, -float("inf"))
    if sizes.left is not None:
        j = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))  # [BLOCK_K]
        key = queries.seen - 1 - sizes.left - col  # [ROWS]
        s = gl.where(j[None, :] >= key[:, None], s, -float("inf"))  # [ROWS, BLOCK_K]
    return s
