"""The argument checks of decoding and of caches, in the manner of
:mod:`flashlib.checks`."""

import torch

from flashlib.checks import (
    LATENTS,
    OR_NONE,
    ROTARY,
    check_captured,
    check_captured_count,
    check_choice,
    check_device,
    check_dimensions,
    check_dtype,
    check_head_dim,
    check_inputs,
    check_mask_tensor,
    check_number,
    check_qkv,
    check_score,
    check_sinks,
    check_tangents,
    check_tensor,
    shape,
)
from flashlib.plain_checks import check_count, check_window, wrong
from flashlib.score_mods import function_of, mask_of

PAGE_SIZES = (16, 32, 64, 128, 256)  # keys in a page of a cache
LATENT_METHODS = ("auto", "latent", "hopper")
EIGHT_BITS = torch.float8_e4m3fn  # the dtype of a cache in eight bits
HAVE_EIGHT_BITS = (8, 9)  # the first compute capability with this type


def check_changes_of_decode(q, cache, window, softcap, score, mask):
    """``(left, mask, function)`` of a call of ``flashlib.decode``: the left side of its
    window, a MaskOf or None, and the softcap and the score as a FunctionOf or None.
    """
    left, _ = check_window(window)
    if mask is score is softcap is None:
        return left, None, None
    from flashlib import masks, score_functions
    from flashlib.kernels.cached import capacity_of

    check_cache(q, *cache)
    k_cache, _, seq_lens, block_table, *_ = cache
    if mask is not None:
        if isinstance(mask, torch.Tensor):
            T_k = capacity_of(k_cache.shape[2], block_table)
            check_mask_tensor(mask, q, [*q.shape[:3], T_k])
            mask = masks.from_cache_tensor(mask, q.shape[2], T_k, seq_lens)
        elif isinstance(mask, masks.Mask):
            # The host does not know how long the sequences are, and the capacity of
            # the cache may be far more than they need.
            mask.require_sizes(*q.shape[:2], 0)
        else:
            expected = "a flashlib.masks.Mask, a boolean tensor or None"
            raise wrong("mask", expected, type(mask).__name__, TypeError)
        left = min(left, mask.reach())
        mask = mask_of(mask)
    if softcap is not None:
        capped = score_functions.softcap(check_number("softcap", softcap, OR_NONE))
        score = capped if score is None else capped.then(score)
    if score is not None:
        # Keys and values have been checked. Decoding has no gradient, so a score needs
        # no derivative.
        check_score(score, (q.detach(),), None)
        score = function_of(score)
    check_captured_count(mask, score)
    return left, mask, score


def check_cache(
    q, k_cache, v_cache, seq_lens, block_table, k_scales=None, v_scales=None,
    sinks=None, *captured,
):  # fmt: skip
    """The tensors of ``flashlib.decode`` fit each other."""
    paged, names = block_table is not None, ("q", "k_cache", "v_cache")
    dtype = EIGHT_BITS if getattr(k_cache, "dtype", None) == EIGHT_BITS else None
    check_qkv(q, k_cache, v_cache, batched=not paged, names=names, dtype=dtype)
    check_scales("k_scales", k_scales, k_cache, q)
    check_scales("v_scales", v_scales, v_cache, q)
    if dtype is not None:
        check_reader("k_cache", k_cache, q)
    check_integers("seq_lens", seq_lens, q, "[B]")
    if paged:
        check_page_size("k_cache", k_cache.shape[2])
        check_integers("block_table", block_table, q, "[B, max_pages]")
    check_sinks(sinks, q, q.shape[1])
    check_captured("mask", captured, q)


def check_reader(name, cache, q):
    """q can read a cache in eight bits."""
    check_eight_bits(name, q.device)
    if q.dtype == torch.float32:
        expected = f"torch.float16 or torch.bfloat16 with a cache in {cache.dtype}"
        raise wrong("q", expected, q.dtype, TypeError)


def check_scales(name, x, cache, q, parts=()):
    """x has a scale for each row of a cache in eight bits, or for each of the parts of
    a row, and is None for another cache.
    """
    if (x is None) == (cache.dtype == EIGHT_BITS):
        expected, got = ("a tensor", "None") if x is None else ("None", "a tensor")
        expected = f"{expected} with a cache in {cache.dtype}"
        raise wrong(name, expected, got, TypeError)
    if x is None:
        return
    check_tensor(name, x, q, dtype=torch.float32)
    wanted = [*cache.shape[:-1], *parts]
    if shape(x) != wanted:
        raise wrong(name, f"one for each row, {wanted}", shape(x))


def check_eight_bits(name, device):
    """Kernels on this device can read the type E4M3."""
    if torch.device(device).type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < HAVE_EIGHT_BITS:
        least, got = (".".join(map(str, x)) for x in (HAVE_EIGHT_BITS, capability))
        expected = f"a GPU of compute capability {least} or later for {EIGHT_BITS}"
        raise wrong(name, expected, got)


def require_rows(name, x):
    """x ``[B, H, T, d]`` has rows."""
    if x.shape[2] == 0:
        raise wrong(name, "at least one row", shape(x))


def check_quantization(q, k, seed):
    """q and k have 16 bits, and rows of a width that a transform mixes."""
    if q.dtype == torch.float32:
        expected = "dtype torch.float16 or torch.bfloat16"
        raise wrong("q", expected, q.dtype, TypeError)
    require_rows("q", q)
    require_rows("k", k)
    if q.shape[3] % 16:
        raise wrong("q", "a head dimension that 16 divides", q.shape[3])
    check_count("seed", seed, 0, 2**63 - 1)


def check_latent_width(q, d_c):
    """d_c is a possible width of latents, and q has rotary columns after them."""
    (low, high), (least, most) = LATENTS, ROTARY
    check_count("d_c", d_c, low, high)
    check_tensor("q", q, q)
    check_dimensions("q", q, "[B, H, T_q, d_c + d_r]")
    if not least <= q.shape[3] - d_c <= most:
        expected = f"{d_c + least} to {d_c + most} columns next to d_c = {d_c}"
        raise wrong("q", expected, shape(q))


def check_latent_method(method):
    """The method of decoding latents exists."""
    check_choice("method", method, LATENT_METHODS)


def check_latent_pairs(cache, d_c):
    """The kernel can read a cache of latents in eight bits, two columns at a time."""
    if cache.dtype != EIGHT_BITS:
        return
    check_even(cache.dtype, d_c=d_c, d_r=cache.shape[2] - d_c)
    *strides, column = cache.stride()
    if column != 1 or any(n % 2 for n in (*strides, cache.data_ptr())):
        expected = f"contiguous columns and even strides with {cache.dtype}"
        raise wrong("cache", expected, f"strides {cache.stride()}")


def check_even(dtype, **widths):
    """A row of latents in eight bits has whole pairs of columns."""
    for name, width in widths.items():
        if width % 2:
            raise wrong(name, f"an even number with {dtype}", width)


def check_latent_cache(q, cache, seq_lens, block_table, scales=None):
    """The tensors of ``flashlib.decode_latent`` fit each other."""
    check_inputs("[B, H, T_q, d_c + d_r]", q=q)
    eight = getattr(cache, "dtype", None) == EIGHT_BITS
    check_tensor("cache", cache, q, dtype=EIGHT_BITS if eight else None)
    paged = block_table is not None
    first = "pages, page_size" if paged else "B, T_max"
    check_dimensions("cache", cache, f"[{first}, d_c + d_r]")
    if cache.shape[2] != q.shape[3]:
        expected = f"{q.shape[3]} columns as in q {shape(q)}"
        raise wrong("cache", expected, shape(cache))
    if not paged and cache.shape[0] != q.shape[0]:
        expected = f"batch size {q.shape[0]} as in q {shape(q)}"
        raise wrong("cache", expected, shape(cache))
    check_scales("scales", scales, cache, q, parts=(2,))
    if eight:
        check_reader("cache", cache, q)
    check_tangents(q, cache)
    check_integers("seq_lens", seq_lens, q, "[B]")
    if paged:
        check_page_size("cache", cache.shape[1])
        check_integers("block_table", block_table, q, "[B, max_pages]")


def check_integers(name, x, q, sizes):
    """x is an int32 tensor with these sizes, of which the first is B."""
    check_tensor(name, x, q, dtype=torch.int32)
    if x.ndim != sizes.count(",") + 1 or x.shape[0] != q.shape[0]:
        raise wrong(name, f"{sizes} with B = {q.shape[0]}", shape(x))


def check_splits(splits):
    """The number of splits; 0 stands for "auto"."""
    if isinstance(splits, str):
        check_choice("splits", splits, ("auto",))
        return 0
    from flashlib.kernels import decoding

    check_count("splits", splits, 1, decoding.LARGEST_SPLITS)
    return splits


def check_page_size(name, page_size):
    """A page holds 16, 32, 64, 128 or 256 keys."""
    if page_size not in PAGE_SIZES:
        listed = ", ".join(map(str, PAGE_SIZES))
        raise wrong(name, f"pages of {listed} keys", page_size)


def check_pool(pages, page_size, H_kv, d, d_v, dtype, device):
    """The sizes, the dtype and the device of a cache in pages."""
    sizes = {"pages": pages, "page_size": page_size, "H_kv": H_kv, "d": d, "d_v": d_v}
    for name, value in sizes.items():
        check_count(name, value, least=1)
    check_page_size("page_size", page_size)
    check_head_dim("d", d)
    check_head_dim("d_v", d_v)
    check_cache_dtype(dtype, device)


def check_cache_dtype(dtype, device):
    """A cache on this device can have this dtype."""
    check_device(device)
    if dtype is EIGHT_BITS:  # an array would compare its elements
        check_eight_bits("dtype", device)
    else:
        check_dtype("dtype", dtype)


def check_latent_pool(pages, page_size, d_c, d_r, dtype, device):
    """The sizes, the dtype and the device of a cache of latents in pages."""
    for name, value in {"pages": pages, "page_size": page_size}.items():
        check_count(name, value, least=1)
    check_page_size("page_size", page_size)
    check_count("d_c", d_c, *LATENTS)
    check_count("d_r", d_r, *ROTARY)
    check_cache_dtype(dtype, device)
    if dtype == EIGHT_BITS:
        check_even(dtype, d_c=d_c, d_r=d_r)


def check_latents(c, r, pages, d_c):
    """c ``[T, d_c]`` and r ``[T, d_r]`` fit the pages of a cache, and each other, as
    :func:`check_rows` says.
    """
    dtype = written_dtype("c", c, pages)
    for name, x, columns in (("c", c, d_c), ("r", r, pages.shape[2] - d_c)):
        check_tensor(name, x, pages, "the cache", dtype)
        T = c.shape[0] if c.ndim == 2 else "T"
        if shape(x) != [T, columns]:
            expected = f"[T, d_{name}] = [{T}, {columns}]"
            raise wrong(name, expected, shape(x))


def written_dtype(name, x, pages):
    """The dtype of rows that pages take: their own, None, or in eight bits that of x,
    any one of attention.
    """
    if pages.dtype != EIGHT_BITS:
        return None
    check_tensor(name, x, pages, "the cache", dtype=getattr(x, "dtype", None))
    check_dtype(name, x.dtype)
    return x.dtype


def check_rows(k, v, k_pages, v_pages):
    """k and v ``[H_kv, T, d]`` fit the pages of a cache, and each other. Pages in eight
    bits take k and v in any dtype of attention, the same for both.
    """
    dtype = written_dtype("k", k, k_pages)
    for name, x, pages in (("k", k, k_pages), ("v", v, v_pages)):
        check_tensor(name, x, pages, "the cache", dtype)
        T = k.shape[1] if k.ndim == 3 else "T"
        wanted = [pages.shape[1], T, pages.shape[3]]
        if shape(x) != wanted:
            listed = ", ".join(map(str, wanted))
            raise wrong(name, f"[H_kv, T, d] = [{listed}]", shape(x))
