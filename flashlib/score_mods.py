"""What a call asks of its scores, and where packed sequences are stored, as launchers
get it.

A launcher gets one :class:`ScoreMod` and, for packed sequences, a :class:`Packing`.
Both are tuples of numbers and tensors, which checks and operators build without Triton.
"""

from typing import NamedTuple

import torch

from flashlib import masks
from flashlib.plain_checks import UNLIMITED


class Packing(NamedTuple):
    """Sequences packed one after the other: sequence b owns rows starts[b] to starts[b
    + 1] - 1, int32.
    """

    starts_q: torch.Tensor  # [B + 1], contiguous
    starts_k: torch.Tensor
    longest_q: int
    longest_k: int


class Lists(NamedTuple):
    """The lists of tiles that a caller has made for a mask, each by the function of
    tile_lists.py that is named here, or None: the kernel makes its own.
    """

    o: torch.Tensor | None = None  # of_queries
    dkdv: torch.Tensor | None = None  # of_keys
    dq: torch.Tensor | None = None  # of_queries
    hopper_o: torch.Tensor | None = None  # of_queries
    hopper_gradients: torch.Tensor | None = None  # in_order


class MaskOf(NamedTuple):
    """A :class:`flashlib.masks.Mask` as a launcher gets it."""

    key: str  # of its Rule
    depends: tuple  # whether it can differ between batches, and between heads
    tensors: tuple
    lists: Lists = Lists()

    def narrow(self, causal):
        """As :func:`flashlib.masks.is_narrow`."""
        return masks.is_narrow(masks.KNOWN[self.key], causal)


class FunctionOf(NamedTuple):
    """A :class:`flashlib.score_functions.Score` as a launcher gets it."""

    key: str  # of its Rule
    gathers: bool  # whether it reads an element of a tensor for each pair
    tensors: tuple


class ScoreMod(NamedTuple):
    """What a caller asks for: how scores change and which are seen. FlexAttention's
    score_mod and mask_mod, with sides as ``plain_checks.check_window`` returns them.
    """

    scale: float  # natural units, as in softmax(scale q k^T)
    left: int = UNLIMITED
    right: int = UNLIMITED
    softcap: float = 0.0  # none
    slopes: torch.Tensor | None = None  # float32 [H] or [B, H]
    bias: torch.Tensor | None = None  # broadcasts to [B, H, T_q, T_k]
    sinks: torch.Tensor | None = None  # [H], contiguous in a launcher
    mask: MaskOf | None = None
    seed: torch.Tensor | None = None  # int64 [1]
    dropout: float = 0.0
    function: FunctionOf | None = None

    @property
    def causal(self):
        """Whether no query sees a key after its own position."""
        return self.right == 0

    @property
    def window(self):
        """The left side, None where it has no limit, as the Hopper kernels take it."""
        return None if self.left == UNLIMITED else self.left

    @property
    def changed(self):
        """Whether scores change before some are hidden."""
        added = self.slopes is not None or self.bias is not None
        return self.softcap != 0.0 or added or self.function is not None


def mask_of(mask):
    """The MaskOf of a Mask, without lists."""
    return MaskOf(mask.key, mask.depends, mask.tensors())


def function_of(score):
    """The FunctionOf of a Score."""
    return FunctionOf(score.key, score.gathers, score.tensors())


def unchanged(causal, scale, left=None):
    """The ScoreMod that changes no score, of queries that see all keys or, if causal,
    those up to their own position, at most ``left`` of them before it.
    """
    left = UNLIMITED if left is None else left
    return ScoreMod(scale, left, 0 if causal else UNLIMITED)


def mask_and_function(key, depends, function_key, gathers, captured, lists):
    """The MaskOf and the FunctionOf of these fields, each None for an empty key. The
    tensors that both read are captured, those of the mask first.
    """
    captured = tuple(x for x in captured if x is not None)
    count = len(tuple(masks.KNOWN[key].tensors())) if key else 0
    mask = MaskOf(key, depends, captured[:count], lists) if key else None
    function = FunctionOf(function_key, gathers, captured[count:])
    return mask, function if function_key else None


def packing_or_none(starts_q, *rest):
    """The Packing of these fields; None without starts."""
    return None if starts_q is None else Packing(starts_q, *rest)
