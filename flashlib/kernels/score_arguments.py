"""What launchers pass to kernels for a ScoreMod and a Packing of
:mod:`flashlib.score_mods`.
"""

import math

from flashlib import masks
from flashlib.kernels import INTERPRETED, descriptors, tables
from flashlib.kernels.scores import Change, Starts, Switches
from flashlib.kernels.tiles import LOG2_E, Rows, Sizes
from flashlib.plain_checks import UNLIMITED

# -- what a kernel takes


def for_kernel(x):
    """The Rule of a MaskOf or a FunctionOf as a kernel takes it, or None."""
    return x if x is None else masks.for_kernel(x.key, x.tensors)


def rows_of(x, packing):
    """The Rows of ``[B, H, T, d]`` or ``[B, H, T]``. The rows of a packed ``[total, H,
    d]`` or ``[H, total]`` are its batches too.
    """
    if packing is None:
        return Rows(x, x.stride())
    if x.ndim == 2:
        return Rows(x, (x.stride(1), x.stride(0), x.stride(1)))
    return Rows(x, (x.stride(0), x.stride(1), x.stride(0), x.stride(2)))


def switches_of(score_mod, packing):
    """The Switches of a ScoreMod, with packed sequences or without."""
    return Switches(
        WINDOW=score_mod.left < UNLIMITED or score_mod.right < UNLIMITED,
        SOFTCAP=score_mod.softcap != 0.0,
        ALIBI=score_mod.slopes is not None,
        FUNCTION=score_mod.function is not None,
        VARLEN=packing is not None,
        BIAS=score_mod.bias is not None,
        SINKS=score_mod.sinks is not None,
        MASK=score_mod.mask is not None,
        DROPOUT=score_mod.seed is not None,
    )


def change_of(score_mod, lists=None):
    """What kernels take for a ScoreMod and the lists of tiles of its mask."""
    x, bias = score_mod, score_mod.bias
    slopes, slope_batch, slope_head = slopes_and_strides(x.slopes, 0)
    return Change(
        scale_log2=(x.softcap or x.scale) * LOG2_E.value,
        per_cap=x.scale / (x.softcap or 1.0),
        left=x.left,
        right=x.right,
        slopes=slopes,
        slope_batch=slope_batch,
        slope_head=slope_head,
        bias=None if bias is None else Rows(bias, broadcast_strides(bias)),
        sinks=x.sinks,
        function=for_kernel(x.function),
        mask=for_kernel(x.mask),
        lists=None if lists is None else Rows(lists, broadcast_strides(lists)),
        seed=x.seed,
        threshold=math.ceil(x.dropout * 2**32),
        kept=1.0 / (1.0 - x.dropout),
    )


def slopes_and_strides(slopes, none=None):
    """The slopes of ALiBi, None or ``[H]`` or ``[B, H]``, and the strides of a batch
    and of a head, ``none`` without slopes.
    """
    strides = (none, none) if slopes is None else (0, *slopes.stride())[-2:]
    return slopes, *strides


def broadcast_strides(x):
    """The strides of x, 0 where a dimension of size one stands for any size."""
    pairs = zip(x.shape, x.stride(), strict=True)
    return tuple(0 if size == 1 else stride for size, stride in pairs)


def starts_of(packing):
    """The Starts of a Packing or None, as kernels take them."""
    return Starts(None, None) if packing is None else Starts(*packing[:2])


# -- what a launch needs


def batch_and_sizes(q, k, v, packing):
    """``(B, Sizes)``; packed, the lengths are those of the longest sequences."""
    heads = (q.shape[1], q.shape[1] // max(k.shape[1], 1))
    widths = (q.shape[-1], v.shape[-1])
    if packing is None:
        return q.shape[0], Sizes(*heads, q.shape[2], k.shape[2], *widths)
    lengths = (packing.longest_q, packing.longest_k)
    return packing.starts_q.shape[0] - 1, Sizes(*heads, *lengths, *widths)


def configuration(name, table, tensors, packing):
    """The row of a table for tensors, packed or not. Packed ones use rows without
    descriptors: a descriptor would read on into the next sequence.
    """
    if INTERPRETED or packing is None:
        return tables.configuration(name, table, tensors, False)
    *fits, _ = tables.problem(tensors)
    return tables.fitting(name, table, *fits, False, False)


def compiled_for(score_mod, packing, config, n, backward=False):
    """The switches and options that every kernel of masks is compiled for."""
    options = tables.compiled_for(config, n, backward)
    function, switches = score_mod.function, switches_of(score_mod, packing)
    if score_mod.bias is not None:
        switches = switches._replace(EVEN=n.T_k % 16 == 0)
    # Triton prefetches tiles of a bias too, for which other rows of the tables have no
    # shared memory.
    roomy = config.architectures == (90,) and config.d <= 128
    if score_mod.bias is not None and roomy:
        options["num_stages"] = min(2, config.num_stages)
    elif score_mod.bias is not None or (function is not None and function.gathers):
        options["num_stages"] = 1
    return {"ON": switches, **options}


def operands(tensors, tile, packing):
    """q, k, v and perhaps do as a kernel reads them in tiles, then their strides."""
    strides = tuple(rows_of(x, packing).strides for x in tensors)
    return *descriptors.operands(tensors, tile), strides


def backward_arguments(q, k, v, do, score_mod, packing, config, pad):
    """``(B, Sizes, operands, options)`` of a launch in the backward pass, for which D
    and L are padded to a multiple of ``pad`` rows for each sequence.
    """
    B, n = batch_and_sizes(q, k, v, packing)
    options = {"PAD": pad, **compiled_for(score_mod, packing, config, n, backward=True)}
    return B, n, operands((q, k, v, do), options["TILE"], packing), options
