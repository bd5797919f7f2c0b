"""Calls of the kernels for Hopper: with tiles that a test chooses, or counted."""

import functools

import pytest
import torch
from device import DEVICE

from flashlib import plans, score_mods, testing
from flashlib.kernels import gluon_keep, hopper
from flashlib.masks import div, mod
from flashlib.score_mods import unchanged


def inputs(B, H, T_q, d, dtype=torch.bfloat16, **changes):
    """q, k and v on the device under test."""
    return testing.make_qkv(B, H, T_q, d, dtype=dtype, device=DEVICE, **changes)


def keep_always(patch):
    """Keep the maximum of a tile's first block in small problems too."""
    for name in ("KEEP_FROM", "KEEP_SCORES"):
        patch.setattr(gluon_keep, name, 0)
    patch.setattr(plans, "PLANS", {})  # a plan has decided before


def with_tile(row, keep=False):
    """hopper's forward with a row of its table, whatever it would choose, as a function
    of q, k, v, causal, scale and perhaps left, or a ScoreMod in place of these. keep:
    as keep_always.
    """
    return functools.partial(hopper_with_tile, row, keep)


def hopper_with_tile(row, keep, q, k, v, *how):
    score_mod = how[0] if isinstance(how[0], score_mods.ScoreMod) else unchanged(*how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "choose_tile", lambda *problem, **how: row)
        patch.setattr(plans, "PLANS", {})  # a plan has the tile of its first call
        if keep:
            keep_always(patch)
        return hopper.forward(q, k, v, score_mod)


def hidden(b, h, p, j, n):
    """Every other n queries see nothing."""
    return (mod(div(p, n), 2) == 1) & (j <= p)


def called(monkeypatch, module, name):
    """A list that grows by one whenever the function runs, which a plan would spare."""
    plans.PLANS.clear()
    calls, own = [], getattr(module, name)
    spy = lambda *x, **options: calls.append(module) or own(*x, **options)  # noqa: E731
    monkeypatch.setattr(module, name, spy)
    return calls
