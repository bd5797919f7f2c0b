"""The state that flash1 keeps; what it shares with flash2 is in test_flash_forward.py."""

import math

import torch
from cases import DEVICE

from flashlib import testing
from flashlib.kernels import flash1, host


def test_after_each_block_of_keys_the_state_is_that_of_the_keys_so_far():
    """A second launch carries on where the first one stopped."""
    q, k, v = testing.make_qkv(1, 2, 70, 16, T_k=192, device=DEVICE)
    o, m, l = (torch.zeros(1, 2, 70, *rest, device=DEVICE) for rest in ((16,), (), ()))
    m.fill_(-math.inf)
    for end in (64, 128, 192):
        part = (x[:, :, end - 64 : end] for x in (k, v))
        flash1.launch(q, *part, o, m, l, False, 0.25, host.INTERPRETER)
        lse = (m + l.log2()) * math.log(2)
        so_far = (x[:, :, :end] for x in (k, v))
        testing.assert_within_budget(q, *so_far, o, lse, scale=0.25)
