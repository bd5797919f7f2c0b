"""The checks of numbers, which need nothing but Python: counts, and the two sides of a
window. :mod:`flashlib.checks` adds those of tensors.
"""

import math

# A side of a window without a limit: beyond every distance between a query and a key,
# and small enough to add to a position in 32 bits.
UNLIMITED = 2**30
SOFTCAPS = (1e-30, 1e30)  # beyond, a score divided by one may be subnormal or infinite


def wrong(name, expected, got, error=ValueError):
    """The error of an argument, in the one form of all messages."""
    # The values of a tensor may be many, and a GPU may still be computing them.
    if hasattr(got, "layout"):
        got = got.dtype if got.is_nested else f"{[*got.shape]} of {got.dtype}"
    return error(f"{name}: expected {expected}, got {got}")


def type_name(x):
    """The name of a type, which for NumPy's numbers begins with ``numpy``."""
    kind = type(x)
    return f"numpy.{kind.__name__}" if kind.__module__ == "numpy" else kind.__name__


def check_count(name, value, least=1, most=math.inf):
    """The value is a Python integer from ``least`` to ``most``; NumPy's would overflow.

    Raises TypeError or ValueError.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(name, "an integer", type_name(value), TypeError)
    if value < least:
        raise wrong(name, f"at least {least}", value)
    if value > most:
        raise wrong(name, f"at most {most}", value)


def check_window(window, causal=False):
    """The window as ``(left, right)``, UNLIMITED for None; causal is right = 0.

    Query i is at position p = i + T_k - T_q and sees the keys p - left <= j <= p +
    right. Raises TypeError for anything but a tuple or list of None and integers, and
    ValueError unless it has two sides, of at least 0.
    """
    sides = (None, None) if window is None else window
    expected = "(left, right), each None or an integer of at least 0"
    is_sequence = isinstance(sides, (tuple, list))
    if not is_sequence or not all(_is_side(x) for x in sides):
        raise wrong("window", expected, repr(window), TypeError)
    limits = [UNLIMITED if side is None else min(side, UNLIMITED) for side in sides]
    if len(limits) != 2 or min(limits) < 0:
        raise wrong("window", expected, repr(window))
    left, right = limits
    return left, 0 if causal else right


def _is_side(x):
    """Whether x is of a type that a side of a window may have."""
    return x is None or (isinstance(x, int) and not isinstance(x, bool))
