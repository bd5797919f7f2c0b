"""Random calls as users write them: right or wrong arguments of every type. A call is
right, or raises an error that names an argument; it is quick and changes nothing else.
"""

import fractions
import functools
import inspect
import itertools
import re
import time

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from device import CUDA, DEVICE, HOPPER
from expected import latent_layer, refused, same
from histories import FAR, MASKED, near
from hypothesis import HealthCheck, assume, given, settings

import flashlib.fp8
from flashlib import kvcache, masks, score_functions
from flashlib.block_lists import BlockLists
from flashlib.kvcache import in_eight_bits
from flashlib.reference import decoding as reference_decoding
from flashlib.reference import fp8 as reference_fp8
from flashlib.reference import masks as reference

ERRORS = (TypeError, ValueError, NotImplementedError, RuntimeError)
SECONDS = 1.0  # of this thread
HALVES = [dtype for dtype in FAR if dtype != torch.float32]
E4M3 = torch.float8_e4m3fn

# -- arguments that a function may not expect


class Subclass(torch.Tensor):
    pass


STRANGE = [
    None, True, False, 0, 1, -1, 3, 0.5, -0.0, 1e-40, 1e31, float("nan"), float("inf"),
    np.float32(0.5), np.int64(2), np.bool_(True), fractions.Fraction(1, 3), 1j,
    "auto", "hopper", "no such thing", "", b"auto", (), (1,), (1, 2, 3), (None, None),
    (2, None), [1, 0], (True, 1), (1.0, 1), (-1, 0), (2**40, 2**40), {}, {"a": 1},
    object, object(), torch.float16, torch.float64, "cuda:99", torch.device("meta"),
    np.ones((1, 2, 5, 16), np.float32), [[1.0]], torch.nn.Identity(), len,
]  # fmt: skip
HUGE = [2**31, 2**70]
TENSORS = {
    "double": torch.Tensor.double,
    "half": torch.Tensor.half,
    "int": torch.Tensor.int,
    "long": torch.Tensor.long,
    "bool": torch.Tensor.bool,
    "complex": lambda x: x.to(torch.complex64),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "number": lambda x: x.new_ones(()),
    "one less": lambda x: x[0] if x.ndim and len(x) else x,
    "one more": lambda x: x[None],
    "none": lambda x: x[:0],
    "no columns": lambda x: x[..., :0],
    "fewer columns": lambda x: x[..., :15],
    "transposed": lambda x: x.mT if x.ndim > 1 else x,
    "twice": lambda x: torch.cat([x, x]),
    "flat": torch.Tensor.flatten,
    "reversed": lambda x: x.flip(-1),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "negated": lambda x: torch.view_as_complex(
        torch.stack([x.float(), -x.float()], -1)
    ).conj().imag.to(x.dtype),
    "meta": lambda x: x.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=x.is_floating_point()),
    "needs a gradient": lambda x: x.detach().requires_grad_(x.is_floating_point()),
    "subclass": lambda x: x.as_subclass(Subclass),
    "numpy": lambda x: x.float().cpu().numpy(),
    "list": torch.Tensor.tolist,
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
}  # fmt: skip


def strange(draw, value, function):
    """Another value for an argument that has this one."""
    if isinstance(value, torch.Tensor) and draw(st.integers(0, 2)):
        change = TENSORS[draw(st.sampled_from(sorted(TENSORS)))]
        try:
            return change(value)
        except ERRORS:  # there is no such tensor
            return None
    return draw(st.sampled_from(STRANGE if function.allocates else [*STRANGE, *HUGE]))


# -- functions, with right arguments and the result that they must have


def normal(dtype, *shape):
    return torch.randn(shape).to(DEVICE, dtype)


def integers(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def drawn_options(draw):
    """Options of the scores."""
    options = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([None, 0.3, -0.3, 0, 2]))
    sides = st.one_of(st.none(), st.integers(0, 4))
    if draw(st.booleans()):
        options["window"] = draw(st.one_of(st.none(), st.tuples(sides, sides)))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([None, 1.5, 30]))
    return options


def drawn_score(draw, B, H):
    """A score that reads slopes, capped or not, or None."""
    slopes = torch.rand(draw(st.sampled_from([(H,), (B, H)])), device=DEVICE)
    lowered = score_functions.alibi(slopes)
    both = score_functions.softcap(2).then(lowered)
    return draw(st.sampled_from([None, lowered, both]))


class Attention:
    draws = allocates = False  # whether it draws random numbers, or memory of any size
    made_of = None  # a class that takes the other arguments
    call = staticmethod(functools.partial(flashlib.attention, seed=7))

    def defined(self, arguments):
        """Whether a call is either right or refused."""
        return True

    def rounding(self, **arguments):
        """How far results may be from float64 because inputs are rounded."""
        return itertools.repeat(0.0)

    def arguments(self, draw):
        B, H_kv, group = (draw(st.integers(1, 2)) for _ in range(3))
        T_q, T_k = (draw(st.sampled_from([0, 1, 5, 17])) for _ in range(2))
        d, d_v = draw(st.sampled_from([(16, 16), (24, 40), (192, 128)]))
        dtype, H = draw(st.sampled_from(list(FAR))), H_kv * group
        drawn = {"q": normal(dtype, B, H, T_q, d), "k": normal(dtype, B, H_kv, T_k, d)}
        drawn |= {"v": normal(dtype, B, H_kv, T_k, d_v)} | drawn_options(draw)
        if draw(st.booleans()):
            drawn["alibi_slopes"] = torch.rand(H, device=DEVICE)
        if draw(st.booleans()):
            seen = torch.rand(draw(st.sampled_from([1, B])), 1, T_q, T_k) < 0.7
            ids = torch.arange(T_k) // 3
            drawn["mask"] = draw(st.sampled_from([None, seen.to(DEVICE)]))
            if T_k and drawn["mask"] is None:
                drawn["mask"] = masks.documents(ids.to(DEVICE)) | masks.prefix(2)
            whole = not drawn["causal"] and drawn.get("window") is None
            if whole and drawn["mask"] is not None and draw(st.booleans()):
                tensors = (drawn[x] for x in "qkv")
                drawn["mask"] = BlockLists(drawn["mask"], *tensors)
        if draw(st.booleans()):
            drawn["bias"] = normal(dtype, draw(st.sampled_from([1, H])), T_q, T_k)
        if draw(st.booleans()):
            drawn["sinks"] = normal(torch.float32, H)
        if draw(st.booleans()):
            drawn["score"] = drawn_score(draw, B, H)
        if draw(st.booleans()):
            drawn["dropout"] = draw(st.sampled_from([0.0, 0.5]))
        if MASKED.isdisjoint(drawn):
            methods = ["auto", "standard", "flash1", "flash2"]
            drawn["method"] = draw(st.sampled_from(methods))
        return drawn | {"return_lse": draw(st.booleans())}

    def wanted(self, q, k, v, *, method=None, return_lse=False, **options):
        for unused in ("tune", "deterministic"):
            options.pop(unused, None)
        found = reference.attention(
            q.double(), k.double(), v.double(), seed=7, **plain(options)
        )
        return found if return_lse else found[:1]


class EightBits(Attention):
    call = staticmethod(flashlib.fp8.attention)

    def arguments(self, draw):
        # Each head of keys takes 64 programs to add up, which are slow on a CPU.
        B, H_kv, H = (1, 1, draw(st.integers(1, 2))) if not CUDA else (2, 2, 4)
        T_q, T_k = (draw(st.sampled_from([1, 5, 17])) for _ in range(2))
        dtype = draw(st.sampled_from(HALVES))
        drawn = {"q": normal(dtype, B, H, T_q, 64)}
        drawn |= {x: normal(dtype, B, H_kv, T_k, 64) for x in "kv"}
        drawn |= {x: draw(st.booleans()) for x in ("causal", "transform", "smooth")}
        drawn |= {"scale": draw(st.sampled_from([None, 0.1, -0.1, 0]))}
        return drawn | {"seed": draw(st.integers(0, 3)), "return_lse": True}

    def wanted(self, q, k, v, causal, scale, return_lse, **_):
        scale = None if scale is None else float(scale)
        wide = q.double(), k.double(), v.double()
        found = reference.attention(*wide, causal=causal, scale=scale)
        return found if return_lse else found[:1]

    def rounding(self, q, k, v, causal, scale, transform, smooth, seed, **_):
        """By the derivation of the chapter: a deviation, and what one draw may be."""
        wide = q.double(), k.double(), v.double()
        recipe = flashlib.fp8.RECIPE._replace(transform=transform, smooth=smooth)
        found = reference_fp8.deviation(
            *wide, causal=causal, scale=None if scale is None else float(scale),
            recipe=recipe, block_k=flashlib.fp8.BLOCK, seed=seed,
        )  # fmt: skip
        return [8 * x.nan_to_num(0.0).amax().item() for x in found]


class Quantize(Attention):
    """Judged by the numbers that what is stored stands for."""

    made_of = flashlib.fp8.quantize

    def arguments(self, draw):
        drawn = EightBits().arguments(draw)
        for name in ("causal", "scale", "return_lse"):
            del drawn[name]
        return drawn

    def call(self, q, k, v, **options):
        found = flashlib.fp8.quantize(q, k, v, **options)
        values, T = found.v.float().mT, k.shape[2]
        order = reference_fp8.key_order(values.shape[2]).to(values.device)
        values = torch.empty_like(values).index_copy_(2, order, values)[:, :, :T]
        # One block of keys, which has one scale.
        of_k, of_v = found.k_scales[..., None], found.v_scales[..., None]
        numbers = found.q.float() * found.q_scales[..., None]
        return numbers, found.k.float() * of_k, values * of_v

    def wanted(self, q, k, v, transform, smooth, seed):
        recipe = flashlib.fp8.RECIPE._replace(transform=transform, smooth=smooth)
        q, k, _ = reference_fp8.prepare(q.double(), k.double(), recipe, seed)
        return q, k, v.double()

    def rounding(self, **arguments):
        """Half of the distance of numbers near the largest, and the mean of keys, which
        has 16 bits.
        """
        return [2.0**-4 * x.abs().amax().item() for x in self.wanted(**arguments)]


class Varlen(Attention):
    call = staticmethod(functools.partial(flashlib.attention_varlen, seed=7))

    def arguments(self, draw):
        lengths = [draw(st.sampled_from([(5, 0, 3), (9,), (0, 0)])) for _ in range(2)]
        starts = [integers(*np.cumsum([0, *x[:1], *x[1:]])) for x in lengths]
        if len(starts[0]) != len(starts[1]):
            starts[1], lengths[1] = starts[0], lengths[0]
        H_kv, H = draw(st.sampled_from([(1, 2), (2, 2)]))
        dtype = draw(st.sampled_from(list(FAR)))
        total_q, total_k = map(sum, lengths)
        drawn = {
            "q": normal(dtype, total_q, H, 16),
            "k": normal(dtype, total_k, H_kv, 16),
        }
        drawn |= {"v": normal(dtype, total_k, H_kv, 16)}
        drawn |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
        drawn |= {"max_seqlen_q": max(lengths[0]), "max_seqlen_k": max(lengths[1]) + 2}
        if draw(st.booleans()):
            drawn["score"] = drawn_score(draw, len(starts[0]) - 1, H)
        if draw(st.booleans()):
            drawn["dropout"] = draw(st.sampled_from([0.0, 0.5]))
        return drawn | drawn_options(draw) | {"return_lse": draw(st.booleans())}

    def wanted(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        return_lse=False, **options
    ):  # fmt: skip
        tensors, starts = (
            (q.double(), k.double(), v.double()),
            (cu_seqlens_q, cu_seqlens_k),
        )
        options = plain(options)
        found = reference.attention_varlen(*tensors, *starts, seed=7, **options)
        return found if return_lse else found[:1]


class Decode(Attention):
    call = staticmethod(flashlib.decode)

    def defined(self, arguments):
        """The lengths, at most 21, are in the cache, which a call does not check."""
        k_cache, table = arguments["k_cache"], arguments.get("block_table")
        tensors = [
            isinstance(x, torch.Tensor) and not x.is_nested for x in (k_cache, table)
        ]
        if not tensors[0] or k_cache.ndim != 4:
            return True
        columns = table.shape[1] if tensors[1] and table.ndim == 2 else 1
        return k_cache.shape[2] * columns >= 21

    def arguments(self, draw):
        B, H_kv, H = draw(st.sampled_from([(1, 1, 2), (2, 2, 2)]))
        dtype, T_q = draw(st.sampled_from(list(FAR))), draw(st.sampled_from([1, 3]))
        drawn = {"q": normal(dtype, B, H, T_q, 16), "seq_lens": integers(*[21, 0][:B])}
        drawn |= {"k_cache": normal(dtype, B, H_kv, 32, 16)}
        drawn |= {"v_cache": normal(dtype, B, H_kv, 32, 24)}
        if draw(st.booleans()):
            drawn |= {"block_table": integers(1, 0, 0, 1).view(2, 2)[:B]}
            drawn |= {"k_cache": normal(dtype, 2, H_kv, 16, 16)}
            drawn |= {"v_cache": normal(dtype, 2, H_kv, 16, 24)}
        drawn["splits"] = draw(st.sampled_from(["auto", 1, 3]))
        drawn["window"] = draw(st.sampled_from([None, (4, 0), (None, 2)]))
        if draw(st.booleans()):
            seen = torch.rand(draw(st.sampled_from([1, B])), 1, T_q, 32) < 0.7
            drawn["mask"] = draw(st.sampled_from([None, seen.to(DEVICE)]))
            if drawn["mask"] is None:
                drawn["mask"] = masks.window(7, 0) | masks.prefix(2)
        if draw(st.booleans()):
            drawn["sinks"] = normal(dtype, H)
        if draw(st.booleans()):
            drawn["softcap"] = draw(st.sampled_from([None, 1.5]))
        if draw(st.booleans()):
            drawn["score"] = drawn_score(draw, B, H)
        if dtype != torch.float32 and draw(st.booleans()):
            for x in "kv":
                both = in_eight_bits(drawn[f"{x}_cache"])
                drawn |= zip((f"{x}_cache", f"{x}_scales"), both, strict=True)
        return drawn | {"return_lse": draw(st.booleans())}

    def wanted(
        self, q, k_cache, v_cache, seq_lens, splits="auto", return_lse=False,
        k_scales=None, v_scales=None, **options
    ):  # fmt: skip
        caches = (k_cache, k_scales), (v_cache, v_scales)
        k, v = (
            x.double() if s is None else x.double() * s[..., None] for x, s in caches
        )
        tensors = q.double(), k, v, seq_lens.tolist()
        found = reference_decoding.attention(*tensors, **plain(options))
        return found if return_lse else found[:1]


class DecodeLatent(Attention):
    call = staticmethod(flashlib.decode_latent)

    def arguments(self, draw):
        B, T_q = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
        dtype = draw(st.sampled_from(list(FAR)))
        drawn = {"q": normal(dtype, B, 2, T_q, 24), "cache": normal(dtype, B, 32, 24)}
        drawn |= {"seq_lens": integers(*[21, 0][:B]), "d_c": 16, "scale": 0.2}
        if draw(st.booleans()):
            drawn |= {"block_table": integers(1, 0, 0, 1).view(2, 2)[:B]}
            drawn |= {"cache": normal(dtype, 3, 16, 24)}  # not one for each sequence
        drawn["splits"] = draw(st.sampled_from(["auto", 1, 3]))
        if dtype != torch.float32 and draw(st.booleans()):
            c, r = (in_eight_bits(x) for x in drawn["cache"].split((16, 8), dim=2))
            drawn["cache"] = torch.cat([c[0], r[0]], dim=2)
            drawn["scales"] = torch.stack([c[1], r[1]], dim=2)
        drawn["method"] = draw(st.sampled_from(["auto", "latent"]))
        return drawn | {"return_lse": draw(st.booleans())}

    def wanted(
        self, q, cache, d_c, scale, seq_lens, block_table=None, splits="auto",
        method="auto", return_lse=False, scales=None,
    ):  # fmt: skip
        rows = cache.double()[:, None]
        if scales is not None:
            widths = torch.tensor([d_c, cache.shape[2] - d_c], device=DEVICE)
            rows = rows * scales.repeat_interleave(widths, dim=2)[:, None]
        found = reference_decoding.attention(
            q.double(), rows, rows[..., :d_c], seq_lens.tolist(),
            block_table=block_table, scale=float(scale),
        )  # fmt: skip
        return found if return_lse else found[:1]


class Ring(Attention):
    """With one rank."""

    call = staticmethod(flashlib.ring_attention)

    def arguments(self, draw):
        dtype, T = draw(st.sampled_from(list(FAR))), draw(st.sampled_from([2, 6]))
        drawn = {name: normal(dtype, 1, 2, T, 16) for name in "qkv"}
        return drawn | {"causal": draw(st.booleans()), "group": None, "mesh": None}

    def wanted(self, q, k, v, causal=False, scale=None, group=None, mesh=None):
        return super().wanted(q, k, v, causal=causal, scale=scale)


class Ulysses(Ring):
    call = staticmethod(flashlib.ulysses_attention)


class Layer(Attention):
    draws, made_of = True, flashlib.FlashSelfAttention

    def arguments(self, draw):
        dtype = draw(st.sampled_from([None, torch.float32, torch.float16]))
        drawn = {"embed_dim": 32, "num_heads": 2, "causal": draw(st.booleans())}
        drawn |= {"num_kv_heads": draw(st.sampled_from([None, 1, 2])), "dtype": dtype}
        x = normal(dtype or torch.float32, draw(st.integers(0, 2)), 5, 32)
        return drawn | {"scale": None, "method": "auto", "device": DEVICE, "x": x}

    def call(self, x, **drawn):
        self.made = flashlib.FlashSelfAttention(**drawn)
        return self.made(x)

    def wanted(self, x, causal=False, **_):
        made, d = self.made, self.made.w_o.shape[0] // self.made.num_heads
        weights = made.w_q, made.w_k, made.w_v
        q, k, v = (
            (x @ w).unflatten(2, (-1, d)).transpose(1, 2).double() for w in weights
        )
        o, _ = reference.attention(q, k, v, causal=made.causal, scale=made.scale)
        return (o.transpose(1, 2).flatten(2) @ made.w_o.double(),)


class LatentLayer(Layer):
    allocates, made_of = True, flashlib.LatentAttention

    def arguments(self, draw):
        dtype = draw(st.sampled_from([None, torch.float32, torch.float16]))
        drawn = {"embed_dim": 32, "num_heads": 2, "d_c": 24, "d_n": 16, "d_r": 8}
        drawn |= {"d_v": 16, "d_q": draw(st.sampled_from([None, 12])), "dtype": dtype}
        x = normal(dtype or torch.float32, draw(st.integers(0, 2)), 5, 32)
        return drawn | {"scale": None, "rotary_base": 100.0, "device": DEVICE, "x": x}

    def call(self, x, **drawn):
        self.made = flashlib.LatentAttention(**drawn)
        return self.made(x)

    def wanted(self, x, **_):
        return (latent_layer(self.made, x),)


def of_rows(x, dtype):
    """How far a row in a cache may be from x: half of the distance of numbers near its
    largest in eight bits.
    """
    return 2.0**-4 * x.abs().amax().item() if dtype == E4M3 and x.numel() else 0.0


class Cache(Attention):
    allocates, made_of = True, kvcache.PagedKVCache

    def rounding(self, k, v, dtype=None, **_):
        return [of_rows(x, dtype) for x in (k, v)]

    def arguments(self, draw):
        dtype = draw(st.sampled_from(list(FAR)))
        drawn = {"pages": 3, "page_size": 16, "H_kv": 2, "d": 16, "d_v": 24}
        T, start = draw(st.integers(0, 40)), draw(st.sampled_from([0, 0, 0, 1]))
        drawn |= {"k": normal(dtype, 2, T, 16), "v": normal(dtype, 2, T, 24)}
        dtype = draw(st.sampled_from([dtype, E4M3]))
        return drawn | {"dtype": dtype, "device": DEVICE, "start": start * (T > 0)}

    def call(self, k, v, start, **drawn):
        cache = kvcache.PagedKVCache(**drawn)
        sequence = cache.new()
        if isinstance(start, int) and start == 1:  # a first key, which is not judged
            both = cache.k_pages, cache.v_pages
            if cache.k_scales is not None:  # whose pages are not appended to others
                both = (x.float() for x in both)
            cache.append(sequence, *(x[0, :, :1].clone() for x in both))
        cache.write(sequence, start, k, v)
        pages = list(cache.table(sequence))
        rows = (
            x[pages].transpose(0, 1).flatten(1, 2)
            for x in (cache.k_pages, cache.v_pages)
        )
        if cache.k_scales is not None:
            scales = (
                x[pages].transpose(0, 1).flatten(1, 2)[..., None]
                for x in (cache.k_scales, cache.v_scales)
            )
            rows = (x.float() * s for x, s in zip(rows, scales, strict=True))
        return tuple(x[:, start : cache.length(sequence)] for x in rows)

    def wanted(self, k, v, **_):
        return k.double(), v.double()


class LatentCache(Attention):
    allocates, made_of = True, kvcache.PagedLatentCache

    def rounding(self, c, r, dtype=None, **_):
        return [of_rows(x, dtype) for x in (c, r)]

    def arguments(self, draw):
        dtype, T = draw(st.sampled_from(list(FAR))), draw(st.integers(0, 40))
        drawn = {"pages": 3, "page_size": 16, "d_c": 16, "d_r": 8, "dtype": dtype}
        drawn |= {"c": normal(dtype, T, 16), "r": normal(dtype, T, 8)}
        drawn["dtype"] = draw(st.sampled_from([dtype, E4M3]))
        return drawn | {"device": DEVICE, "start": 0}

    def call(self, c, r, start, **drawn):
        cache = kvcache.PagedLatentCache(**drawn)
        sequence = cache.new()
        cache.write(sequence, start, c, r)
        return cache.rows(sequence)

    def wanted(self, c, r, **_):
        return c.double(), r.double()


def plain(options):
    """The options as the references take them."""
    options = dict(options)
    if options.get("scale") is not None:
        options["scale"] = float(options["scale"])
    if options.get("softcap") is not None:
        options["softcap"] = float(options["softcap"])
    if options.get("dropout") is not None:
        options["dropout"] = float(options["dropout"])
    return options


FUNCTIONS = {
    "attention": Attention, "attention_varlen": Varlen, "decode": Decode,
    "decode_latent": DecodeLatent, "PagedLatentCache": LatentCache,
    "ring_attention": Ring, "ulysses_attention": Ulysses,
    "FlashSelfAttention": Layer, "LatentAttention": LatentLayer,
    "PagedKVCache": Cache,
}  # fmt: skip
if HOPPER or not CUDA:
    FUNCTIONS |= {"fp8.attention": EightBits, "fp8.quantize": Quantize}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    backend = "nccl" if CUDA else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state(function):
    """What a call may not change."""
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        None if function.draws else torch.get_rng_state().tolist(),
    )


def copies(arguments):
    """The tensors among the arguments that can be compared, copied."""
    found = {}
    for name, x in arguments.items():
        dense = isinstance(x, torch.Tensor) and not (x.is_nested or x.is_sparse)
        if dense and x.device.type != "meta":
            found[name] = x.detach().clone()
    return found


def names_an_argument(error, function):
    """Whether the error says which argument is wrong."""
    line = str(error).splitlines()[0]
    if isinstance(error, NotImplementedError | RuntimeError):
        functions = "flashlib.", "ring_attention:", "ulysses_attention:"
        return line.startswith(functions)
    sources = filter(None, (function.call, function.made_of))
    names = {name for x in sources for name in inspect.signature(x).parameters}
    return re.match(r"\w*", line)[0] in names


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("calls", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_call_is_right_or_says_what_is_wrong(name, calls):
    @settings(
        max_examples=calls,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def judge_calls(data):
        judge(FUNCTIONS[name](), data.draw)

    judge_calls()


def judge(function, draw):
    torch.manual_seed(draw(st.integers(0, 9)))
    arguments = function.arguments(draw)
    wrong = draw(st.lists(st.sampled_from(sorted(arguments)), max_size=2, unique=True))
    for name in wrong:
        arguments[name] = strange(draw, arguments[name], function)
    assume(function.defined(arguments))
    before, around = copies(arguments), state(function)
    begin = time.thread_time()
    try:
        found = function.call(**arguments)
        if isinstance(found, torch.Tensor):
            found = (found,)
    except ERRORS as error:
        assert wrong, f"right arguments were refused: {error}"
        assert names_an_argument(error, function), f"{type(error).__name__}: {error}"
    else:
        arguments = {
            x: y.detach() if isinstance(y, torch.Tensor) else y
            for x, y in arguments.items()
        }
        with torch.no_grad():
            wanted = function.wanted(**arguments)
            rounding = function.rounding(**arguments)
        pairs = zip(found, wanted, strict=True)
        for (x, y), far in zip(pairs, rounding, strict=False):
            assert near(x, y, found[0].dtype, far)
    if not CUDA:  # there this thread compiles kernels
        assert time.thread_time() - begin < SECONDS
    assert state(function) == around
    after = copies(arguments)
    assert all(same([before[name]], [after[name]]) for name in before)


def test_a_ring_of_one_rank_under_a_checkpoint():
    x = normal(torch.float32, 1, 2, 6, 16).requires_grad_()

    def call(x):
        return flashlib.ring_attention(x, x, x, causal=True)

    checkpoint = torch.utils.checkpoint.checkpoint
    kept = call(x), checkpoint(call, x, use_reentrant=False)
    assert same(*(torch.autograd.grad(o.square().sum(), x) for o in kept))


def test_a_ring_refuses_other_ways_to_differentiate():
    x = normal(torch.float32, 1, 2, 6, 16).requires_grad_()

    def call(x):
        return flashlib.ring_attention(x, x, x).sum()

    o, do = flashlib.ring_attention(x, x, x), torch.ones(2, *x.shape, device=DEVICE)
    for way in (
        lambda: torch.autograd.grad(o, x, do, is_grads_batched=True),
        lambda: torch.func.grad(call)(x.detach()),
        lambda: torch.func.vmap(call)(x.detach()[None]),
    ):
        with refused(NotImplementedError, "flashlib.ring_attention: .* not supported"):
            way()


def test_a_ring_without_this_rank():
    x = normal(torch.float32, 1, 2, 6, 16)
    others = dist.GroupMember.NON_GROUP_MEMBER
    for call in (
        lambda: flashlib.ring_attention(x, x, x, group=others),
        lambda: flashlib.FlashSelfAttention(32, 2, group=others),
    ):
        with refused(ValueError, "group: expected one that has this rank"):
            call()


def test_a_layer_with_a_group_refuses_a_method():
    with refused(ValueError, "method: expected 'auto' with a group, got 'flash1'"):
        flashlib.FlashSelfAttention(32, 2, method="flash1", group=dist.group.WORLD)
