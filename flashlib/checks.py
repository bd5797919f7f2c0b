"""The argument checks of all public functions: each error is one line, ``name: expected
X, got Y``.

A check returns nothing, or the argument as the operators of :mod:`flashlib.ops` take
it. TypeError is for a wrong type, dtype or layout, ValueError for a wrong value, size
or device. Counts and windows are in :mod:`flashlib.plain_checks`.
"""

import itertools
import math
import numbers

import torch

from flashlib.plain_checks import check_count, check_window, wrong
from flashlib.plans import Spec

METHODS = ("auto", "standard", "flash1", "flash2", "hopper")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EIGHT_BITS, HAVE_EIGHT_BITS = torch.float8_e4m3fn, (8, 9)  # compute capability
DEVICES = ("cpu", "cuda")
HEAD_DIMS = (16, 256)
MOST_TABLES = 6  # tensors that a mask may read
PAGE_SIZES = (16, 32, 64, 128, 256)  # keys in a page of a cache
LARGEST_SCALE = 1e37  # times log2(e) it is still a float32
SOFTCAPS = (1e-30, 1e30)  # beyond, a score divided by one may be subnormal or infinite


def shape(x):
    """The sizes of x, for a message."""
    return list(x.shape)


# -- flags, choices and numbers


def check_flags(**named):
    """Every value is True or False."""
    for name, value in named.items():
        if not isinstance(value, bool):
            raise wrong(name, "True or False", repr(value), TypeError)


def check_choice(name, value, allowed):
    """The value is one of the allowed strings."""
    expected = f"one of {', '.join(allowed)}"
    if not isinstance(value, str):
        raise wrong(name, expected, type(value).__name__, TypeError)
    if value not in allowed:
        raise wrong(name, expected, repr(value))


def check_number(name, number):
    """A finite number that float32 can hold, as a float."""
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise wrong(name, "a real number or None", type(number).__name__, TypeError)
    try:
        value = float(number)
    except OverflowError:  # an integer beyond the largest float
        value = math.inf
    if not -math.inf < value < math.inf:  # torch.compile cannot trace math.isfinite
        raise wrong(name, "a finite number", value)
    if abs(value) > LARGEST_SCALE:
        raise wrong(name, f"a magnitude up to {LARGEST_SCALE:.0e}", value)
    return value


def check_scale(scale, q):
    """The scale as a float; None means 1/sqrt(d), d the last dimension of q."""
    if scale is not None:
        return check_number("scale", scale)
    if not isinstance(q, torch.Tensor) or q.is_nested:
        check_tensor("q", q, q)  # it has no sizes
    return 1.0 / math.sqrt(max([1, *q.shape[-1:]]))


def check_dtype(name, dtype):
    """The dtype is float32, float16 or bfloat16."""
    expected = "dtype float32, float16 or bfloat16"
    if not isinstance(dtype, torch.dtype):
        raise wrong(name, expected, type(dtype).__name__, TypeError)
    if dtype not in DTYPES:
        raise wrong(name, expected, dtype, TypeError)


def check_device(device):
    """PyTorch can allocate on the device; None is its default."""
    try:
        torch.empty(0, device=device)
    except (TypeError, RuntimeError, AssertionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise wrong(
            "device", "one that PyTorch has here", repr(device), kind
        ) from error


def check_head_dim(name, d):
    """d is a head dimension, 16 to 256."""
    low, high = HEAD_DIMS
    if not low <= d <= high:
        raise wrong(name, f"a head dimension from {low} to {high}", d)


def check_method(method, tune, changes):
    """The method exists and takes tuning and the changes that are not None."""
    check_choice("method", method, METHODS)
    check_flags(tune=tune)
    not_flash2 = method not in ("auto", "flash2")
    if tune and not_flash2:
        raise wrong("tune", f"False for method {method!r}, which is not tuned", tune)
    for name in (name for name, value in changes.items() if value is not None):
        if not_flash2 and (name, method) != ("window", "hopper"):
            raise wrong(name, f"None for method {method!r}", changes[name])
        if tune:
            raise wrong("tune", f"False with {name}, whose tiles are not timed", tune)


def check_determinism(deterministic):
    """deterministic=False is allowed, unless PyTorch has been told otherwise."""
    if not deterministic and torch.are_deterministic_algorithms_enabled():
        expected = "True under torch.use_deterministic_algorithms(True)"
        got = "False, which accumulates dQ in no fixed order"
        raise wrong("deterministic", expected, got)


# -- tensors


def check_tensor(name, x, like, of="q", dtype=None):
    """x is dense, of this dtype, or that of ``like``, called ``of``, on its device."""
    if not isinstance(x, torch.Tensor | Spec):
        raise wrong(name, "a torch.Tensor", type(x).__name__, TypeError)
    if x.is_nested or x.layout is not torch.strided:
        got = "a nested one" if x.is_nested else f"layout {x.layout}"
        raise wrong(name, "a dense (strided) tensor", got, TypeError)
    if x.dtype != (dtype or like.dtype):
        raise wrong(name, f"dtype {dtype or like.dtype}", x.dtype, TypeError)
    if x.device != like.device:
        raise wrong(name, f"the device of {of}, {like.device}", x.device)


def check_qkv(
    q, k, v, *, sizes="[B, H, T, d]", batched=True, names=("k", "v"), dtype=None
):
    """Queries, keys and values that a kernel can take together: dense, with these
    sizes, of one supported dtype, on one device where kernels run, without tangents.

    k has the head dimension of q and, where batched, its batch size; v has the sizes of
    k except the last; the heads of k, in dimension 1, divide those of q. dtype is that
    of k and v, None for that of q.
    """
    from flashlib import kernels

    check_tensor("q", q, q)
    check_dtype("q", q.dtype)
    if q.device.type not in DEVICES:
        raise wrong("q", f"a tensor on {' or '.join(DEVICES)}", q.device)
    dimensions = sizes.count(",") + 1
    for name, x in zip(("q", *names), (q, k, v), strict=True):
        check_tensor(name, x, q, dtype=None if x is q else dtype)
        if x.ndim != dimensions:
            got = f"{x.ndim}: {shape(x)}"
            raise wrong(name, f"{dimensions} dimensions {sizes}", got)
    if q.device.type == "cpu" and not kernels.INTERPRETED:
        raise wrong(
            "q", "a CUDA tensor", "one on the cpu, where kernels run only through "
            "Triton's interpreter (set TRITON_INTERPRET=1 before Python starts)",
        )  # fmt: skip

    (B, H, *_, d), H_kv, (k_name, v_name) = q.shape, k.shape[1], names
    if batched and k.shape[0] != B:
        raise wrong(k_name, f"batch size {B} as in q {shape(q)}", shape(k))
    if k.shape[-1] != d:
        raise wrong(k_name, f"head dimension {d} as in q {shape(q)}", shape(k))
    if v.shape[:-1] != k.shape[:-1]:
        expected = f"the sizes of {k_name} {shape(k)} except the last"
        raise wrong(v_name, expected, shape(v))
    if (H_kv == 0) != (H == 0) or (H_kv and H % H_kv):
        raise wrong(k_name, f"a head count that divides the {H} of q", H_kv)
    check_head_dim("q", d)
    check_head_dim(v_name, v.shape[-1])

    if isinstance(q, Spec) or torch.compiler.is_compiling():
        return
    unpack = torch.autograd.forward_ad.unpack_dual
    if any(unpack(x).tangent is not None for x in (q, k, v)):
        message = "flashlib.attention: forward-mode differentiation is not supported"
        raise NotImplementedError(message)


def check_sdpa(query, key, value, attn_mask):
    """The tensors of PyTorch's function: 4 dimensions, or 3 without heads."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, query, of="query")
        if x.ndim not in (3, 4) or x.ndim != query.ndim:
            expected = "[N, H, L, E] or [N, L, E], like the others"
            raise wrong(name, expected, shape(x))
    if attn_mask is not None:
        dtype = getattr(attn_mask, "dtype", None)
        check_tensor("attn_mask", attn_mask, query, of="query", dtype=dtype)
        if attn_mask.ndim > query.ndim:
            raise wrong("attn_mask", f"at most {query.ndim} dimensions", attn_mask.ndim)


# -- masks and packed sequences


def check_score_mod(
    q, k, *, causal, scale, window=None, softcap=None, alibi_slopes=None, mask=None,
    bias=None, sinks=None, dropout=None, seed=None, packing=None,
):  # fmt: skip
    """What a call says of its scores, with the checked scale and perhaps a Packing, as
    a ScoreMod.
    """
    from flashlib.kernels.scores import MaskOf, ScoreMod

    cap = 0.0 if softcap is None else check_number("softcap", softcap)
    low, high = SOFTCAPS
    # The kernels compute scale / softcap in float32.
    low = max(low, abs(scale) / LARGEST_SCALE)
    if softcap is not None and not low <= cap <= high:
        raise wrong("softcap", f"a number from {low:.0e} to {high:.0e}", cap)
    if getattr(alibi_slopes, "requires_grad", False):
        expected = "constants, which get no gradient"
        raise wrong("alibi_slopes", expected, "requires_grad=True")
    if mask is not None:
        mask = check_mask(mask, q, k, packing)
        mask = MaskOf(mask.key, mask.depends, mask.tensors())
    if bias is not None:
        check_tensor("bias", bias, q, dtype=getattr(bias, "dtype", None))
        if bias.ndim > 4:
            raise wrong("bias", "at most 4 dimensions [B, H, T_q, T_k]", shape(bias))
        bias = bias[(None,) * (4 - bias.ndim)]
    sides = check_window(window, causal)
    if dropout is None:
        return ScoreMod(scale, *sides, cap, alibi_slopes, bias, sinks, mask)
    dropout = check_dropout(dropout)
    seed = check_seed(seed, q)
    return ScoreMod(scale, *sides, cap, alibi_slopes, bias, sinks, mask, seed, dropout)


def dropout_or_none(dropout):
    """None for a dropout of 0.0, and otherwise the dropout."""
    return None if type(dropout) is float and dropout == 0.0 else dropout


def check_dropout(dropout):
    """The share of the weights that is dropped, as a float."""
    value = check_number("dropout", dropout)
    if not 0.0 <= value < 1.0:
        raise wrong("dropout", "a number from 0 to 1, but not 1", value)
    return value


def check_seed(seed, q):
    """The seed of dropout as a tensor int64 [1]; None draws one on the device of q."""
    check_tensor("q", q, q)
    if seed is None:
        return torch.randint(2**63 - 1, (1,), device=q.device)
    if isinstance(seed, torch.Tensor):
        check_tensor("seed", seed, q, dtype=torch.int64)
        if tuple(seed.shape) != (1,):
            raise wrong("seed", "[1]", shape(seed))
        return seed
    check_count("seed", seed, least=0, most=2**63 - 1)
    return torch.full((1,), seed, dtype=torch.int64, device=q.device)


def check_mask(mask, q, k, packing):
    """The mask as a :class:`flashlib.masks.Mask`, of a boolean tensor too."""
    from flashlib import masks

    for name, x in (("q", q), ("k", k)):
        check_tensor(name, x, q)
    dense = q.ndim == k.ndim == 4
    if isinstance(mask, torch.Tensor):
        check_tensor("mask", mask, q, dtype=torch.bool)
        if not dense:
            expected = "a flashlib.masks.Mask unless q and k are [B, H, T, d]"
            raise wrong("mask", expected, "a tensor", TypeError)
        if mask.ndim > 4:
            raise wrong("mask", "at most 4 dimensions [B, H, T_q, T_k]", shape(mask))
        outer = zip(mask.shape[-4:-2], q.shape[max(0, 4 - mask.ndim) :], strict=False)
        if any(n not in (1, size) for n, size in outer):
            sizes = [*q.shape[:3], k.shape[2]]
            expected = f"sizes that broadcast to [B, H, T_q, T_k] = {sizes}"
            raise wrong("mask", expected, shape(mask))
        return masks.from_tensor(mask, q.shape[2], k.shape[2])
    if not isinstance(mask, masks.Mask):
        expected = "a flashlib.masks.Mask, a boolean tensor or None"
        raise wrong("mask", expected, type(mask).__name__, TypeError)
    if len(mask.tensors()) > MOST_TABLES:
        got = len(mask.tensors())
        raise wrong("mask", f"one that reads at most {MOST_TABLES} tensors", got)
    if packing is not None:
        mask.require_sizes(packing.starts_q.shape[0] - 1, packing.longest_k)
    elif dense:
        mask.require_sizes(q.shape[0], k.shape[2])
    return mask


def window_or_none(window):
    """None for a window whose sides have no limit, and otherwise the window."""
    limitless = isinstance(window, tuple | list) and list(window) == [None, None]
    return None if limitless else window


def check_masked(q, k, v, bias, sinks, slopes, starts_q, starts_k, seed, *tables):
    """q, k and v fit each other, the slopes, ``[H]`` or ``[B, H]``, the sinks ``[H]``,
    the bias ``[B, H, T_q, T_k]``, each of whose sizes may be one, and the tensors of a
    mask; with starts they are packed.
    """
    packed = starts_q is not None
    if packed:
        check_qkv(q, k, v, sizes="[total, H, d]", batched=False)
    else:
        check_qkv(q, k, v)
    B, H = starts_q.shape[0] - 1 if packed else q.shape[0], q.shape[1]
    if seed is not None:
        check_tensor("seed", seed, q, dtype=torch.int64)
    for table in (x for x in tables if x is not None):
        check_tensor("mask", table, q, dtype=table.dtype)
    if bias is not None:
        check_tensor("bias", bias, q, dtype=bias.dtype)
        check_dtype("bias", bias.dtype)
        if packed:
            raise wrong("bias", "None with packed sequences", "a tensor")
        wanted = (B, H, q.shape[2], k.shape[2])
        if any(n not in (1, size) for n, size in zip(bias.shape, wanted, strict=True)):
            expected = f"sizes that broadcast to [B, H, T_q, T_k] = {list(wanted)}"
            raise wrong("bias", expected, shape(bias))
    if sinks is not None:
        check_tensor("sinks", sinks, q, dtype=getattr(sinks, "dtype", None))
        check_dtype("sinks", sinks.dtype)
        if tuple(sinks.shape) != (H,):
            raise wrong("sinks", f"[H] with H = {H}", shape(sinks))
    if slopes is None:
        return
    check_tensor("alibi_slopes", slopes, q, dtype=torch.float32)
    fits = slopes.ndim in (1, 2) and slopes.shape[-1] == H
    if not fits or (slopes.ndim == 2 and slopes.shape[0] != B):
        expected = f"[H] or [B, H] with B = {B}, H = {H}"
        raise wrong("alibi_slopes", expected, shape(slopes))


def check_sequences(q, k, starts_q, starts_k, longest_q, longest_k):
    """The sequences as a Packing, if they are as ``flashlib.attention_varlen`` says;
    what the starts hold is not read under torch.compile and while a CUDA graph is
    captured.
    """
    from flashlib.kernels.scores import Packing

    sides = (("q", q, starts_q, longest_q), ("k", k, starts_k, longest_k))
    for name, _, starts, longest in sides:
        check_tensor(f"cu_seqlens_{name}", starts, q, dtype=torch.int32)
        if starts.ndim != 1 or starts.shape[0] < 1:
            raise wrong(f"cu_seqlens_{name}", "[B + 1]", shape(starts))
        if torch.compiler.is_compiling() and isinstance(longest, int):
            torch._check(longest >= 0)  # what .item() returned has no value yet
        check_count(f"max_seqlen_{name}", longest, least=0)
    if starts_k.shape != starts_q.shape:
        expected = f"the shape of cu_seqlens_q, {shape(starts_q)}"
        raise wrong("cu_seqlens_k", expected, shape(starts_k))
    packing = Packing(
        starts_q.contiguous(), starts_k.contiguous(), longest_q, longest_k
    )
    # Dynamo cannot trace the second question, so ask the first one before it.
    if torch.compiler.is_compiling():
        return packing
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return packing
    # One copy for both, since it waits for all work that the device still has to do.
    both = torch.stack([starts_q, starts_k]).tolist()
    for (name, x, _, longest), starts in zip(sides, both, strict=True):
        lengths = [after - before for before, after in itertools.pairwise(starts)]
        rows, most = x.shape[0], max(lengths, default=0)
        if starts[0] != 0 or starts[-1] != rows or min(lengths, default=0) < 0:
            expected = f"0 first, {rows} (the rows of {name}) last and no decrease"
            raise wrong(f"cu_seqlens_{name}", expected, starts)
        if most > longest:
            expected = f"at least {most}, the longest sequence"
            raise wrong(f"max_seqlen_{name}", expected, longest)
    return packing


# -- decoding and the cache


def check_cache(
    q, k_cache, v_cache, seq_lens, block_table, k_scales=None, v_scales=None
):
    """The tensors of ``flashlib.decode`` fit each other."""
    paged, names = block_table is not None, ("k_cache", "v_cache")
    dtype = EIGHT_BITS if getattr(k_cache, "dtype", None) == EIGHT_BITS else None
    check_qkv(q, k_cache, v_cache, batched=not paged, names=names, dtype=dtype)
    scales = ("k_scales", k_scales, k_cache), ("v_scales", v_scales, v_cache)
    for name, x, cache in scales:
        if (x is None) == (dtype is not None):
            expected, got = ("a tensor", "None")[:: -1 if dtype is None else 1]
            expected = f"{expected} with a cache in {cache.dtype}"
            raise wrong(name, expected, got, TypeError)
        if x is None:
            continue
        check_tensor(name, x, q, dtype=torch.float32)
        if x.shape != cache.shape[:3]:
            raise wrong(name, f"one for each row, {shape(cache)[:3]}", shape(x))
    if dtype is not None:
        check_eight_bits("k_cache", q.device)
        if q.dtype == torch.float32:
            expected = f"torch.float16 or torch.bfloat16 with a cache in {dtype}"
            raise wrong("q", expected, q.dtype, TypeError)
    check_table("seq_lens", seq_lens, q, "[B]")
    if paged:
        check_page_size("k_cache", k_cache.shape[2])
        check_table("block_table", block_table, q, "[B, max_pages]")


def check_eight_bits(name, device):
    """Kernels on this device can read the type E4M3."""
    if torch.device(device).type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < HAVE_EIGHT_BITS:
        least, got = (".".join(map(str, x)) for x in (HAVE_EIGHT_BITS, capability))
        expected = f"a GPU of compute capability {least} or later for {EIGHT_BITS}"
        raise wrong(name, expected, got)


def check_quantization(q, k, seed):
    """q and k have 16 bits, and rows of a width that a transform mixes."""
    if q.dtype == torch.float32:
        expected = "dtype torch.float16 or torch.bfloat16"
        raise wrong("q", expected, q.dtype, TypeError)
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] == 0:
            raise wrong(name, "at least one row", shape(x))
    if q.shape[3] % 16:
        raise wrong("q", "a head dimension that 16 divides", q.shape[3])
    check_count("seed", seed, least=0)


def check_table(name, x, q, sizes):
    """x is an int32 tensor with these sizes, of which the first is B."""
    check_tensor(name, x, q, dtype=torch.int32)
    if x.ndim != sizes.count(",") + 1 or x.shape[0] != q.shape[0]:
        raise wrong(name, f"{sizes} with B = {q.shape[0]}", shape(x))


def check_splits(splits):
    """The number of splits; 0 stands for "auto"."""
    from flashlib.kernels import decoding

    if isinstance(splits, str):
        check_choice("splits", splits, ("auto",))
        return 0
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
    check_device(device)
    if dtype == EIGHT_BITS:
        check_eight_bits("dtype", device)
    else:
        check_dtype("dtype", dtype)


def check_rows(k, v, k_pages, v_pages):
    """k and v ``[H_kv, T, d]`` fit the pages of a cache, and each other. Pages in eight
    bits take k and v in any dtype of attention, the same for both.
    """
    dtype = None
    if k_pages.dtype == EIGHT_BITS:
        check_tensor("k", k, k_pages, "the cache", dtype=getattr(k, "dtype", None))
        check_dtype("k", dtype := k.dtype)
    for name, x, pages in (("k", k, k_pages), ("v", v, v_pages)):
        check_tensor(name, x, pages, "the cache", dtype)
        T = k.shape[1] if k.ndim == 3 else "T"
        wanted = [pages.shape[1], T, pages.shape[3]]
        if shape(x) != wanted:
            listed = ", ".join(map(str, wanted))
            raise wrong(name, f"[H_kv, T, d] = [{listed}]", shape(x))


# -- layers


def check_layer(embed_dim, num_heads, num_kv_heads, causal, method, device, dtype):
    """The arguments of ``flashlib.FlashSelfAttention``; returns its head dimension."""
    check_count("embed_dim", embed_dim, least=1)
    check_count("num_heads", num_heads, least=1)
    check_count("num_kv_heads", num_kv_heads, least=1)
    if embed_dim % num_heads:
        raise wrong("num_heads", f"a divisor of embed_dim = {embed_dim}", num_heads)
    if num_heads % num_kv_heads:
        expected = f"a divisor of num_heads = {num_heads}"
        raise wrong("num_kv_heads", expected, num_kv_heads)
    check_head_dim("num_heads", embed_dim // num_heads)
    check_flags(causal=causal)
    check_choice("method", method, METHODS)
    check_device(device)
    check_dtype("dtype", dtype)
    return embed_dim // num_heads


def check_layer_input(x, w):
    """x ``[B, T, E]`` fits the weights w ``[E, columns]``."""
    check_tensor("x", x, w, "the weights")
    if x.ndim != 3 or x.shape[2] != w.shape[0]:
        raise wrong("x", f"[B, T, {w.shape[0]}]", shape(x))
    check_dtype("x", x.dtype)
