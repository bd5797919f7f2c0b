"""Doubt every check of a chapter: an IPython extension for the kernels of `make nbval`.

Under it `check(label, lhs, rhs)` must also fail when the largest entry of either side
is off by a thousandth. A check that still holds then proves nothing, and raises.
"""

import numpy as np
import torch

from flashlib import notebook

real_check = notebook.check


def moved(value):
    """The value in float64, its largest finite entry off by a thousandth."""
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu", torch.float64).numpy()
    value = np.array(value, dtype=np.float64, order="C")
    flat = value.reshape(-1)
    finite = np.where(np.isfinite(flat), np.abs(flat), -1.0)
    place = int(finite.argmax())
    if finite[place] < 0:  # only infinities
        flat[place] = 0.0
    elif finite[place] == 0:
        flat[place] = 1e-3
    else:
        flat[place] *= 1.001
    return value


def check(label, lhs, rhs, **options):
    real_check(label, lhs, rhs, **options)
    if lhs is rhs and isinstance(lhs, torch.Tensor | np.ndarray):
        raise AssertionError(f"{label}: both sides are one object")
    for sides in ((moved(lhs), rhs), (lhs, moved(rhs))):
        try:
            real_check(label, *sides, **options)
        except AssertionError:
            continue
        raise AssertionError(f"{label}: still holds with a side off by 0.1 %")


def load_ipython_extension(shell):
    notebook.check = check
    import interpreter  # noqa: F401 (it makes Triton's faster)
