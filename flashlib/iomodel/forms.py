"""Closed forms, functions of sizes, and the shapes of a schedule's arrays.

T is the sequence length, d the head dimension; B_r and B_c are the rows of a block of
queries and of keys, each between 1 and T. Counts are exact integers. A size outside its
range raises ValueError, and anything but a Python int raises TypeError.
"""

import functools
import inspect
import math

from flashlib.plain_checks import check_count

MAY_BE_ZERO = ("T_q", "T_k", "I", "r", "statistics_words")


def check_sizes(**sizes):
    """Raise TypeError or ValueError unless every size is an int in its range."""
    for name, size in sizes.items():
        most = sizes.get("T", math.inf) if name in ("B_r", "B_c") else math.inf
        check_count(name, size, least=0 if name in MAY_BE_ZERO else 1, most=most)


def formula(count):
    """Make a function of sizes check them first."""
    names = list(inspect.signature(count).parameters)

    @functools.wraps(count)
    def checked(*sizes, **named):
        check_sizes(**dict(zip(names, sizes, strict=False)), **named)
        return count(*sizes, **named)

    return checked


@formula
def block_count(size, step):
    """How many blocks of ``step`` cover ``size``: size / step, rounded up."""
    return -(-size // step)


def thin(names):
    """The arrays of T rows and d columns among a schedule's inputs or results."""
    return dict.fromkeys(names.split(), "T d")


def square(names):
    """The T x T arrays."""
    return dict.fromkeys(names.split(), "T T")


def column(names):
    """The row statistics, T x 1."""
    return dict.fromkeys(names.split(), "T 1")
