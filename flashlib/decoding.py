"""Decoding as an operator, and what is asked of its arguments.

``flashlib.api`` is the door. As there, the operator is a ``torch.library.custom_op`` that imports its kernel
inside the call. It has no gradient: a cache is read when nothing is learnt.
"""

import torch

from flashlib import checks

AUTOMATIC = 0  # for the operator, what "auto" is for the door


@torch.library.custom_op("flashlib::decode", mutates_args=())
def forward(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor | None, splits: int, left: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(o, lse)`` as ``flashlib.decode`` has them; a left side of the window without a limit is -1."""
    from flashlib.kernels import decoding

    return decoding.forward(q, k_cache, v_cache, seq_lens, block_table, splits, left, scale)


@forward.register_fake
def _(q, k_cache, v_cache, *_):
    return q.new_empty(*q.shape[:3], v_cache.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _refuse_backward(ctx, *gradients):
    raise NotImplementedError("flashlib.decode: it has no gradient; flashlib.attention has")


forward.register_autograd(_refuse_backward)


# ------------------------------------------------------------------------------------ arguments


def cache_shapes(q, k_cache, v_cache, paged):
    """q ``[B, H, T_q, d]``; k_cache and v_cache ``[B, H_kv, T_max, d or d_v]`` or, where paged, ``[pages,
    H_kv, page_size, d or d_v]`` with one of checks.PAGE_SIZES; H a multiple of H_kv, 16 <= d, d_v <= 256.

    Raises ValueError naming the argument.
    """
    B, H, _, d = q.shape
    H_kv, rows = k_cache.shape[1:3]
    low, high = checks.HEAD_DIMS
    sizes = {name: list(x.shape) for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache))}
    if not paged and k_cache.shape[0] != B:
        raise ValueError(f"k_cache: expected batch size {B} as in q {sizes['q']}, got {sizes['k_cache']}")
    if paged and rows not in checks.PAGE_SIZES:
        listed = ", ".join(map(str, checks.PAGE_SIZES))
        raise ValueError(f"k_cache: expected pages of {listed} keys, got {rows} in {sizes['k_cache']}")
    if k_cache.shape[3] != d:
        raise ValueError(f"k_cache: expected head dimension {d} as in q {sizes['q']}, got {sizes['k_cache']}")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache: expected the sizes of k_cache {sizes['k_cache']} but for the last, got "
            f"{sizes['v_cache']}"
        )
    if (H_kv == 0) != (H == 0) or (H_kv and H % H_kv):
        raise ValueError(f"k_cache: expected a head count that divides the {H} of q, got {H_kv}")
    for name, size in (("q", d), ("v_cache", v_cache.shape[3])):
        if not low <= size <= high:
            raise ValueError(f"{name}: expected a head dimension from {low} to {high}, got {sizes[name]}")


def integers(name, x, q, sizes):
    """x is an int32 tensor on the device of q with as many dimensions as sizes, whose first is B; sizes is
    "[B]" or "[B, max_pages]".

    Raises TypeError or ValueError naming the argument.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.dtype != torch.int32:
        raise TypeError(f"{name}: expected dtype torch.int32, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name}: expected the device of q, {q.device}, got {x.device}")
    if x.ndim != sizes.count(",") + 1 or x.shape[0] != q.shape[0]:
        raise ValueError(f"{name}: expected {sizes} with B = {q.shape[0]}, got {list(x.shape)}")


def number_of_splits(splits):
    """Splits as the operator takes them. Raises TypeError or ValueError unless splits is "auto" or an integer
    from 1 to the most that the kernel merges.
    """
    from flashlib.kernels import decoding

    if isinstance(splits, str):
        checks.choice("splits", splits, ("auto",))
        return AUTOMATIC
    checks.count("splits", splits, least=1)
    if splits > decoding.LARGEST_SPLITS:
        raise ValueError(f"splits: expected at most {decoding.LARGEST_SPLITS}, got {splits}")
    return splits
