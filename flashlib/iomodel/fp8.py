"""Eight bits, counted: what quantization moves, and where the exponentials are the
limit, for attention as :mod:`flashlib.reference.fp8` computes it.

    speedup(64), speedup(128)               # products and exponentials overlap
    hopper.forward("overlapped", ..., machine=EIGHT_BITS)  # flashlib.iomodel.hopper

Scales have four bytes: one for each query, one for each block of keys and one for each
block of values. Sizes are Python ints of at least 1; others raise TypeError or
ValueError.
"""

from fractions import Fraction
from typing import NamedTuple

from flashlib.timeline import HOPPER

from .forms import block_count, formula
from .roofline import Transfer, forward_flops, total_bytes, transfer_seconds

SCALE = 4  # bytes
# Hopper as eight bits find it: tensor cores multiply twice as many numbers in a clock,
# and a copy brings twice as many. Exponentials are still those of float32.
EIGHT_BITS = HOPPER._replace(flops=2 * HOPPER.flops, copy_bytes=2 * HOPPER.copy_bytes)


# -- bytes


@formula
def quantize_bytes(T, d, heads, itemsize, block):
    """The kernels that round Q, K and V, a list of Transfer; K is read twice, the first
    time for its mean. block is how many keys share a scale. As
    ``standard_forward_bytes``; the sums and the mean of the keys are left out.
    """
    rows, head = heads * T * d, heads * d * 4
    scales = SCALE * heads * block_count(T, block)
    return [
        Transfer("mean", "mean_kernel", itemsize * rows, head),
        Transfer("Q", "rows_kernel", itemsize * rows + head, rows + SCALE * heads * T),
        Transfer("K", "rows_kernel", itemsize * rows + head, rows + scales),
        Transfer("V", "values_kernel", itemsize * rows, rows + scales),
    ]


def break_even(gpu, d=128, itemsize=2, block=64):
    """The length T from which eight bits save more time than quantization takes, both
    at the full rates of a data sheet and without a mask.
    """
    T = 2**20  # long enough that the scales' blocks are whole
    moved = total_bytes(quantize_bytes(T, d, 1, itemsize, block))
    saved = forward_flops(T, d) / gpu.flops_per_second / 2
    return T * transfer_seconds(moved, gpu) / saved


# -- clocks


class Clocks(NamedTuple):
    """Clocks of one multiprocessor for one score: its part of the two products, and its
    exponential.
    """

    products: Fraction
    exponential: Fraction


@formula
def clocks(d, bits):
    """The :class:`Clocks` for head dimension d and elements of 8 or 16 bits."""
    machine = EIGHT_BITS if bits == 8 else HOPPER
    return Clocks(Fraction(4 * d, machine.flops), Fraction(1, machine.exponentials))


def speedup(d, overlapped=True):
    """How many times faster than 16 bits eight bits can be, a Fraction: with products
    and exponentials at the same time, or one after the other.
    """
    together = max if overlapped else sum
    return together(clocks(d, 16)) / together(clocks(d, 8))
