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

from flashlib.plain_checks import (
    SOFTCAPS,
    check_count,
    check_window,
    type_name,
    wrong,
)
from flashlib.plans import Spec
from flashlib.score_mods import Packing, ScoreMod, function_of, mask_of

METHODS = ("auto", "standard", "flash1", "flash2", "hopper")
# Keywords that only "flash2" and "hopper" take.
ON_HOPPER = ("window", "mask", "sinks", "softcap", "alibi_slopes", "score", "bias")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = ("cpu", "cuda")
HEAD_DIMS = (16, 256)
LATENTS, ROTARY = (8, 512), (1, 128)  # columns of a latent, and rotary ones next to it
MOST_CAPTURED = 6  # tensors that a mask and a score may read together
LARGEST_SCALE = 1e37  # times log2(e) it is still a float32


def shape(x):
    """The sizes of x, for a message."""
    return list(x.shape)


# -- flags, choices and numbers


def check_flags(**named):
    """Every value is True or False."""
    for name, value in named.items():
        if not isinstance(value, bool):
            # NumPy's booleans print as Python's.
            numpys = type(value).__module__ == "numpy"
            got = repr(value) if isinstance(value, str) else value
            got = type_name(value) if numpys else got
            raise wrong(name, "True or False", got, TypeError)


def check_choice(name, value, allowed):
    """The value is one of the allowed strings."""
    expected = f"one of {', '.join(allowed)}"
    if not isinstance(value, str):
        raise wrong(name, expected, type(value).__name__, TypeError)
    if value not in allowed:
        raise wrong(name, expected, repr(value))


OR_NONE = "a real number or None"  # what callers of check_number expect that take None


def check_number(name, number, expected="a real number"):
    """A finite number that float32 can hold, as a float."""
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise wrong(name, expected, type_name(number), TypeError)
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
        return check_number("scale", scale, OR_NONE)
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
        on_hopper = method == "hopper" and name in ON_HOPPER
        if not_flash2 and not on_hopper:
            raise wrong(name, f"None for method {method!r}", changes[name])
        if tune:
            raise wrong("tune", f"False with {name}, whose tiles are not timed", tune)


def check_determinism(deterministic):
    """deterministic=False is allowed, unless PyTorch has been told otherwise."""
    if not deterministic and torch.are_deterministic_algorithms_enabled():
        expected = "True under torch.use_deterministic_algorithms(True)"
        got = "False, which lets dQ be accumulated in no fixed order"
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
    q, k, v, *, sizes="[B, H, T, d]", batched=True, names=("q", "k", "v"), dtype=None
):
    """Queries, keys and values that a kernel can take together: dense, with these
    sizes, of one supported dtype, on one device where kernels run, without tangents.

    k has the head dimension of q and, where batched, its batch size; v has the sizes of
    k except the last; the heads of k, in dimension 1, divide those of q. dtype is that
    of k and v, None for that of q; names are what errors call the three.
    """
    check_inputs(sizes, dtype=dtype, **dict(zip(names, (q, k, v), strict=True)))

    (B, H, *_, d), H_kv, (q_name, k_name, v_name) = q.shape, k.shape[1], names
    if batched and k.shape[0] != B:
        raise wrong(k_name, f"batch size {B} as in {q_name} {shape(q)}", shape(k))
    if k.shape[-1] != d:
        raise wrong(k_name, f"head dimension {d} as in {q_name} {shape(q)}", shape(k))
    if v.shape[:-1] != k.shape[:-1]:
        expected = f"the sizes of {k_name} {shape(k)} except the last"
        raise wrong(v_name, expected, shape(v))
    if (H_kv == 0) != (H == 0) or (H_kv and H % H_kv):
        raise wrong(k_name, f"a head count that divides the {H} of {q_name}", H_kv)
    check_head_dim(q_name, d)
    check_head_dim(v_name, v.shape[-1])

    check_tangents(q, k, v)


def check_inputs(sizes, *, dtype=None, **named):
    """The named tensors, queries first, are dense and have these sizes, one supported
    dtype and one device, where kernels run. dtype is that of the others, None for that
    of the queries.
    """
    from flashlib import kernels

    (q_name, q), *others = named.items()
    check_tensor(q_name, q, q)
    check_dtype(q_name, q.dtype)
    if q.device.type not in DEVICES:
        raise wrong(q_name, f"a tensor on {' or '.join(DEVICES)}", q.device)
    check_dimensions(q_name, q, sizes)
    for name, x in others:
        check_tensor(name, x, q, of=q_name, dtype=dtype)
        check_dimensions(name, x, sizes)
    if q.device.type == "cpu" and not kernels.INTERPRETED:
        raise wrong(
            q_name, "a CUDA tensor", "one on the cpu, where kernels run only through "
            "Triton's interpreter (set TRITON_INTERPRET=1 before Python starts)",
        )  # fmt: skip


def check_dimensions(name, x, sizes):
    """x has as many dimensions as ``sizes`` names."""
    dimensions = sizes.count(",") + 1
    if x.ndim != dimensions:
        got = f"{x.ndim}: {shape(x)}"
        raise wrong(name, f"{dimensions} dimensions {sizes}", got)


def check_tangents(*tensors):
    """No tensor has a tangent."""
    if isinstance(tensors[0], Spec) or torch.compiler.is_compiling():
        return
    unpack = torch.autograd.forward_ad.unpack_dual
    if any(unpack(x).tangent is not None for x in tensors):
        message = "flashlib: forward-mode differentiation is not supported"
        raise NotImplementedError(message)


def check_sdpa(query, key, value, attn_mask):
    """``(q, k, v, attn_mask)`` of :func:`flashlib.attention`, which have heads, from
    the tensors of PyTorch's function: with 4 dimensions, or with 3 and no heads.
    """
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        check_tensor(name, x, query, of="query")
        if x.ndim not in (3, 4) or x.ndim != query.ndim:
            expected = "[N, H, L, E] or [N, L, E], like the others"
            raise wrong(name, expected, shape(x))
    single = query.ndim == 3
    q, k, v = (x[:, None] if single else x for x in named.values())
    check_qkv(q, k, v, names=tuple(named))
    if attn_mask is not None:
        dtype = getattr(attn_mask, "dtype", None)
        check_tensor("attn_mask", attn_mask, query, of="query", dtype=dtype)
        if attn_mask.ndim > query.ndim:
            raise wrong("attn_mask", f"at most {query.ndim} dimensions", attn_mask.ndim)
        if single and attn_mask.ndim == 3:
            attn_mask = attn_mask[:, None]
        if dtype not in (torch.bool, *DTYPES):
            expected = "dtype bool, float32, float16 or bfloat16"
            raise wrong("attn_mask", expected, dtype, TypeError)
        sizes = [*q.shape[:3], k.shape[2]]
        check_mask_tensor(attn_mask, q, sizes, "attn_mask", dtype)
    return q, k, v, attn_mask


# -- masks and packed sequences


def check_score_mod(
    q, k, v, *, causal, scale, window=None, softcap=None, alibi_slopes=None, score=None,
    mask=None, bias=None, sinks=None, dropout=None, seed=None, packing=None,
):  # fmt: skip
    """The ScoreMod of a call, from its checked scale and Packing and from what else it
    says of its scores.
    """
    from flashlib.block_lists import BlockLists

    cap = 0.0 if softcap is None else check_number("softcap", softcap, OR_NONE)
    low, high = SOFTCAPS
    # The kernels compute scale / softcap in float32.
    low = max(low, abs(scale) / LARGEST_SCALE)
    if softcap is not None and not low <= cap <= high:
        raise wrong("softcap", f"a number from {low:.0e} to {high:.0e}", cap)
    if getattr(alibi_slopes, "requires_grad", False):
        expected = "constants, which get no gradient"
        raise wrong("alibi_slopes", expected, "requires_grad=True")
    if mask is not None:
        if isinstance(mask, BlockLists):
            mask = check_lists(mask, q, k, v, causal, window, packing)
        else:
            mask = check_mask(mask, q, k, packing)
            mask = mask_of(mask)
    if score is not None:
        check_score(score, (q, k, v, bias, sinks), packing)
        score = function_of(score)
    check_captured_count(mask, score)
    if bias is not None:
        check_tensor("bias", bias, q, dtype=getattr(bias, "dtype", None))
        if bias.ndim > 4:
            raise wrong("bias", "at most 4 dimensions [B, H, T_q, T_k]", shape(bias))
        bias = bias[(None,) * (4 - bias.ndim)]
    left, right = check_window(window, causal)
    if seed is not None:
        check_seed(seed, q)
    if dropout is None:
        seed, dropout = None, 0.0
    else:
        dropout = check_dropout(dropout)
        seed = seed_of(seed, q)
    return ScoreMod(
        scale=scale, left=left, right=right, softcap=cap, slopes=alibi_slopes,
        bias=bias, sinks=sinks, mask=mask, seed=seed, dropout=dropout, function=score,
    )  # fmt: skip


def dropout_or_none(dropout):
    """None for a dropout of 0, and otherwise the dropout."""
    number = isinstance(dropout, numbers.Real) and not isinstance(dropout, bool)
    return None if number and dropout == 0 else dropout


def check_dropout(dropout, name="dropout"):
    """The share of the weights that is dropped, as a float."""
    value = check_number(name, dropout)
    if not 0.0 <= value < 1.0:
        raise wrong(name, "a number from 0 to 1, but not 1", value)
    return value


def check_seed(seed, q):
    """The seed of dropout is an integer, or a tensor int64 [1] on the device of q."""
    if not isinstance(seed, torch.Tensor):
        check_count("seed", seed, least=0, most=2**63 - 1)
        return
    check_tensor("q", q, q)
    check_tensor("seed", seed, q, dtype=torch.int64)
    if tuple(seed.shape) != (1,):
        raise wrong("seed", "[1]", shape(seed))


def seed_of(seed, q):
    """A checked seed as a tensor int64 [1]; None draws one on the device of q."""
    check_tensor("q", q, q)
    if seed is None:
        return torch.randint(2**63 - 1, (1,), device=q.device)
    if isinstance(seed, torch.Tensor):
        return seed
    return torch.full((1,), seed, dtype=torch.int64, device=q.device)


def check_mask(mask, q, k, packing):
    """The mask as a :class:`flashlib.masks.Mask`, of a boolean tensor too."""
    from flashlib import masks

    for name, x in (("q", q), ("k", k)):
        check_tensor(name, x, q)
    dense = q.ndim == k.ndim == 4
    if isinstance(mask, torch.Tensor):
        if not dense:
            check_tensor("mask", mask, q, dtype=torch.bool)
            expected = "a flashlib.masks.Mask unless q and k are [B, H, T, d]"
            raise wrong("mask", expected, "a tensor", TypeError)
        check_mask_tensor(mask, q, [*q.shape[:3], k.shape[2]])
        return masks.from_tensor(mask, q.shape[2], k.shape[2])
    if not isinstance(mask, masks.Mask):
        expected = "a flashlib.masks.Mask, a boolean tensor or None"
        raise wrong("mask", expected, type(mask).__name__, TypeError)
    if packing is not None:
        sequences = packing.starts_q.shape[0] - 1
        mask.require_sizes(sequences, q.shape[1], packing.longest_k)
    elif dense:
        mask.require_sizes(*q.shape[:2], k.shape[2])
    return mask


def check_lists(lists, q, k, v, causal, window, packing):
    """A :class:`flashlib.block_lists.BlockLists` as a MaskOf with its lists."""
    if packing is not None:
        expected = "a flashlib.masks.Mask with packed sequences"
        raise wrong("mask", expected, "BlockLists", TypeError)
    check_qkv(q, k, v)
    lists.require(q, k)
    for name, value in (("causal", causal), ("window", window)):
        if value:
            expected = f"{'False' if name == 'causal' else None} with BlockLists"
            raise wrong(name, f"{expected}, whose mask has it", value)
    return mask_of(lists.mask)._replace(lists=lists.lists)


def check_mask_tensor(mask, q, sizes, name="mask", dtype=torch.bool):
    """The mask is a tensor of this dtype that broadcasts to these sizes."""
    check_tensor(name, mask, q, dtype=dtype)
    if mask.ndim > 4:
        raise wrong(name, "at most 4 dimensions [B, H, T_q, T_k]", shape(mask))
    own = zip(mask.shape, sizes[4 - mask.ndim :], strict=True)
    if any(n not in (1, size) for n, size in own):
        expected = f"sizes that broadcast to [B, H, T_q, T_k] = {sizes}"
        raise wrong(name, expected, shape(mask))


def check_captured_count(mask, score):
    """A MaskOf and a FunctionOf, or None, do not read too many tensors."""
    counts = [0 if x is None else len(x.tensors) for x in (mask, score)]
    if sum(counts) > MOST_CAPTURED:
        name = "mask" if score is None else "score"
        with_mask = "" if score is None else ", with the mask"
        expected = f"one that reads at most {MOST_CAPTURED} tensors{with_mask}"
        raise wrong(name, expected, sum(counts))


def check_score(score, tensors, packing):
    """The score fits q, k and v, which the tensors begin with, and has a derivative if
    one of the tensors needs a gradient.
    """
    from flashlib import masks, score_functions

    if not isinstance(score, score_functions.Score):
        expected = "a flashlib.score_functions.Score or None"
        raise wrong("score", expected, type(score).__name__, TypeError)
    q = tensors[0]
    for name, x in zip("qkv", tensors, strict=False):
        check_tensor(name, x, q)
    if packing is not None or q.ndim == 4:
        B = q.shape[0] if packing is None else packing.starts_q.shape[0] - 1
        masks.require_sizes("score", score.sizes, B=B, H=q.shape[1])
    for x in score.tensors():
        check_tensor("score", x, q, dtype=x.dtype)
    if any(x.requires_grad for x in score.tensors()):
        expected = "tensors without a gradient, which bias has"
        raise wrong("score", expected, "requires_grad=True")
    needed = any(getattr(x, "requires_grad", False) for x in tensors)
    if needed and score.rule.derivative is None and torch.is_grad_enabled():
        expected = "a Score with derivative=... where a tensor requires a gradient"
        raise wrong("score", expected, "one without")


def window_or_none(window):
    """None for a window whose sides have no limit, and otherwise the window."""
    limitless = isinstance(window, tuple | list) and list(window) == [None, None]
    return None if limitless else window


def check_masked(q, k, v, bias, sinks, slopes, starts_q, starts_k, seed, *captured):
    """The tensors of ``ops.masked`` fit each other; with starts, q, k and v are packed.
    Slopes are ``[H]`` or ``[B, H]``, sinks ``[H]``, a bias ``[B, H, T_q, T_k]``, where
    any size may be 1.
    """
    packed = starts_q is not None
    if packed:
        check_qkv(q, k, v, sizes="[total, H, d]", batched=False)
    else:
        check_qkv(q, k, v)
    B, H = starts_q.shape[0] - 1 if packed else q.shape[0], q.shape[1]
    if seed is not None:
        check_tensor("seed", seed, q, dtype=torch.int64)
    check_captured("mask", captured, q)
    if bias is not None:
        check_tensor("bias", bias, q, dtype=bias.dtype)
        check_dtype("bias", bias.dtype)
        if packed:
            raise wrong("bias", "None with packed sequences", "a tensor")
        wanted = (B, H, q.shape[2], k.shape[2])
        if any(n not in (1, size) for n, size in zip(bias.shape, wanted, strict=True)):
            expected = f"sizes that broadcast to [B, H, T_q, T_k] = {list(wanted)}"
            raise wrong("bias", expected, shape(bias))
    check_sinks(sinks, q, H)
    if slopes is None:
        return
    check_tensor("alibi_slopes", slopes, q, dtype=torch.float32)
    fits = slopes.ndim in (1, 2) and slopes.shape[-1] == H
    if not fits or (slopes.ndim == 2 and slopes.shape[0] != B):
        expected = f"[H] or [B, H] with B = {B}, H = {H}"
        raise wrong("alibi_slopes", expected, shape(slopes))


def check_captured(name, captured, q):
    """The tensors that a mask or a score reads, or None, are on the device of q."""
    for x in (x for x in captured if x is not None):
        check_tensor(name, x, q, dtype=x.dtype)


def check_sinks(sinks, q, H):
    """sinks are ``[H]``, or None."""
    if sinks is None:
        return
    check_tensor("sinks", sinks, q, dtype=getattr(sinks, "dtype", None))
    check_dtype("sinks", sinks.dtype)
    if tuple(sinks.shape) != (H,):
        raise wrong("sinks", f"[H] with H = {H}", shape(sinks))


def check_sequences(q, k, starts_q, starts_k, longest_q, longest_k):
    """The sequences of ``flashlib.attention_varlen`` as a Packing. The values of the
    starts are not checked under torch.compile and while a CUDA graph is captured.
    """
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
    # No sequence has more rows than there are; blocks beyond would do nothing.
    longest_q, longest_k = min(longest_q, q.shape[0]), min(longest_k, k.shape[0])
    packing = packing._replace(longest_q=longest_q, longest_k=longest_k)
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return packing
    # One copy for both, since it waits for all work that the device still has to do.
    both = torch.stack([starts_q, starts_k]).tolist()
    for (name, x, _, longest), starts in zip(sides, both, strict=True):
        lengths = [after - before for before, after in itertools.pairwise(starts)]
        rows, most = x.shape[0], max(lengths, default=0)
        if starts[0] != 0 or starts[-1] != rows or min(lengths, default=0) < 0:
            falls = [n for n, length in enumerate(lengths, 1) if length < 0]
            n = 0 if starts[0] != 0 else [*falls, len(lengths)][0]
            expected = f"0 first, {rows} (the rows of {name}) last and no decrease"
            raise wrong(f"cu_seqlens_{name}", expected, f"{starts[n]} at index {n}")
        if most > longest:
            expected = f"at least {most}, the longest sequence"
            raise wrong(f"max_seqlen_{name}", expected, longest)
    return packing


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
    check_head_dim("embed_dim / num_heads", embed_dim // num_heads)
    check_flags(causal=causal)
    check_choice("method", method, METHODS)
    check_device(device)
    check_dtype("dtype", dtype)
    return embed_dim // num_heads


def check_latent_layer(embed_dim, num_heads, d_q, widths, device, dtype):
    """The arguments of ``flashlib.LatentAttention``."""
    check_count("embed_dim", embed_dim)
    check_count("num_heads", num_heads)
    if d_q is not None:
        check_count("d_q", d_q)
    d_c, d_n, d_r, d_v = widths
    check_count("d_c", d_c, *LATENTS)
    check_count("d_n", d_n)
    check_count("d_r", d_r, *ROTARY)
    if d_r % 2:
        raise wrong("d_r", "an even number of columns", d_r)
    check_count("d_v", d_v)
    check_head_dim("d_n + d_r", d_n + d_r)
    check_head_dim("d_v", d_v)
    check_device(device)
    check_dtype("dtype", dtype)


def check_layer_cache(x, cache, sequences, widths):
    """The sequences as a list, one for each batch of x ``[B, T, E]``. The cache has
    latents of these widths, on the device of x and in its dtype, or in eight bits if
    that has 16.
    """
    from flashlib.kvcache import PagedLatentCache
    from flashlib.paging import check_name

    if not isinstance(cache, PagedLatentCache):
        raise wrong("cache", "a PagedLatentCache", type(cache).__name__, TypeError)
    d_c, _, d_r, _ = widths
    eight = cache.scales is not None and x.dtype != torch.float32
    check_tensor("cache", cache.pages, x, "x", cache.pages.dtype if eight else None)
    held = cache.d_c, cache.pages.shape[2] - cache.d_c
    if held != (d_c, d_r):
        raise wrong("cache", f"d_c and d_r = {d_c} and {d_r}", held)
    if not isinstance(sequences, list | tuple) or len(sequences) != len(x):
        raise wrong("sequences", f"a list of {len(x)}, as x {shape(x)} has", sequences)
    for name in sequences:
        check_name(name)
    if len(set(sequences)) < len(sequences):
        raise wrong("sequences", "different ones", sequences)
    return list(sequences)


def check_layer_input(x, w):
    """x ``[B, T, E]`` fits the weights w ``[E, columns]``."""
    check_tensor("x", x, w, "the weights")
    if x.ndim != 3 or x.shape[2] != w.shape[0]:
        raise wrong("x", f"[B, T, {w.shape[0]}]", shape(x))
    check_dtype("x", x.dtype)
