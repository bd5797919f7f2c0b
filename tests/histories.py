"""Random histories of calls: each result is compared with float64, whatever was called
before.

A pool has a few tensors of each kind, and a call takes any of them for any role: one
tensor twice, views that overlap, other strides, results and gradients of earlier calls.
Between calls, modes change, calls fail or are interrupted, and plans are forgotten.

``python tests/histories.py --calls 20000 --seed 1`` runs a long one, and with
``--seconds 300`` begins no other history after that time.
"""

import argparse
import contextlib
import itertools
import math
import threading
import time
from unittest import mock

import hypothesis.strategies as st
import torch
from device import CUDA, DEVICE, HOPPER
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashlib.fp8
from flashlib import block_lists, internals, plans, score_functions
from flashlib.kvcache import in_eight_bits
from flashlib.reference import decoding as reference_decoding
from flashlib.reference import fp8 as reference_fp8
from flashlib.reference import masks as reference
from flashlib.reference.online import merge_finished

B, H, d = 1, 2, 64 if CUDA else 16
LENGTHS = (5, 150) if CUDA else (4, 7)
# How far a result may be from float64, next to its largest number. A wrong role or a
# stale number is off by about as much as that number.
FAR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
DTYPES = tuple(FAR) if CUDA else (torch.float32, torch.float16)
METHODS = ("standard", "flash1", "flash2", "auto", *("hopper",) * HOPPER)
CHANGES = (
    {}, {"causal": True}, {"window": (2, 0)}, {"window": (None, 1)}, {"softcap": 1.5},
    {"scale": -0.3}, {"causal": True, "scale": 0.5}, {"alibi_slopes": (0.5, 0.1)},
    {"mask": 0}, {"mask": 1, "causal": True}, {"mask": 2}, {"bias": 1}, {"sinks": 3},
    {"dropout": 0.5, "seed": 7}, {"score": 0}, {"score": 1, "mask": 0}, {"lists": 0},
    {"lists": 2},
)  # fmt: skip
MASKED = {"window", "softcap", "alibi_slopes", "mask", "bias", "sinks", "dropout"}
MASKED |= {"score", "lists"}
PLACES = 6  # tensors of each kind in the pool
LATENT = 192, 128  # columns of keys and of values of expanded latents


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class PassingFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def float64_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def profiled():
    """Something listens to Triton's launches."""
    from triton import knobs

    seen = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)


@contextlib.contextmanager
def other_stream():
    with torch.cuda.stream(torch.cuda.Stream()) as stream:
        stream = torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.default_stream())
        yield
    torch.cuda.default_stream().wait_stream(stream)


def saved_copies():
    """Saved tensors are packed and unpacked, as checkpoints and offloading do."""
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)


MODES = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": deterministic,
    "default dtype": float64_default,
    "dispatch": Passing,
    "function": PassingFunctions,
    "saved": saved_copies,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
} | ({"profiled": profiled, "stream": other_stream} if CUDA else {})


def near(found, wanted, dtype, rounding=0.0):
    """Whether found is wanted, in float64, up to what is far for this dtype and to the
    rounding of terms that cancel.
    """
    found = found.detach().double()
    if found.shape != wanted.shape or not torch.equal(
        found == -torch.inf, wanted == -torch.inf
    ):
        return False
    finite = wanted != -torch.inf
    error = (found - wanted)[finite].abs()
    largest = wanted[finite].abs().amax().item() if finite.any() else 0.0
    return bool((error <= FAR[dtype] * max(1.0, largest) + rounding).all())


def of_cancelled(q, k, v, do, scale=None):
    """The rounding of what cancels in the gradients of q and k, [..., T, d]. In a row
    with one large weight, dP - D is small next to D = dO . O and dP = dO . V, which are
    sums in float32, and O is rounded to its dtype. A gradient adds such rows.
    """
    q, k, v, do = (x.detach() for x in (q, k, v, do))
    largest = max(q.abs().max().item(), k.abs().max().item())
    dp = do.double().norm(dim=-1).amax() * v.double().norm(dim=-1).amax()
    eps = torch.finfo(q.dtype).eps / d**0.5 + torch.finfo(torch.float32).eps
    scale = d**-0.5 if scale is None else abs(scale)
    return 2 * eps * dp.item() * scale * largest * q.shape[-2] ** 0.5


def unit(x):
    """x, made smaller if its numbers are larger than those of the pool: errors grow
    with the scores.
    """
    return x.detach() / x.detach().float().square().mean().sqrt().clamp(min=1.0).to(x)


def filled(changes, T_q, T_k):
    """The changes, with tensors for slopes, a mask (also that of lists), a score, a
    bias and sinks.
    """
    made = dict(changes)
    if "alibi_slopes" in made:
        made["alibi_slopes"] = torch.tensor(made["alibi_slopes"], device=DEVICE).float()
    near = (torch.arange(T_q)[:, None] * 3 + torch.arange(T_k)) % 4
    near = near.to(DEVICE)
    masks = (
        lambda: flashlib.masks.documents(near[0]) & flashlib.masks.causal(),
        lambda: near > 1,
        lambda: flashlib.masks.window(1, T_k % 3) | flashlib.masks.prefix(1),
    )
    for name in {"mask", "lists"} & {*made}:
        made[name] = masks[made[name]]()
    if "score" in made:
        slopes = torch.tensor([[0.5, 0.1], [0.3, 0.2]][made["score"]], device=DEVICE)
        score = score_functions.alibi(slopes)
        if made["score"]:
            score = score_functions.softcap(1.5).then(score)
        made["score"] = score
    if "bias" in made:
        made["bias"] = near.float() - 2.0
    if "sinks" in made:
        made["sinks"] = torch.arange(H, device=DEVICE) - 1.5
    return made


def pick(most):
    return st.integers(0, most - 1)


kinds = st.sampled_from(DTYPES)
lengths = st.sampled_from(LENGTHS)
roles = st.tuples(pick(PLACES), pick(PLACES), pick(PLACES))
# Half of all calls have no changes and no mode, so that calls often have one plan.
changes = st.sampled_from((*[CHANGES[0]] * (len(CHANGES) - 2), *CHANGES[1:]))
of_decoding = st.sampled_from(
    [{}, {}, {}, {"mask": 0}, {"mask": 1}, {"mask": 2}, {"sinks": 3}, {"softcap": 1.5},
     {"score": 1, "sinks": 3}]
)  # fmt: skip
modes = st.sampled_from((*["none"] * (len(MODES) - 1), *sorted(MODES)))


class Histories(RuleBasedStateMachine):
    """Calls of every public function on a small pool of tensors."""

    done = 0  # calls, of all histories

    @initialize(seed=st.integers(0, 2**16))
    def fill(self, seed):
        """The pool: {(dtype, T): tensors [B, H, T, d]}, of which some overlap."""
        plans.PLANS.clear()  # so that a history that fails can be repeated
        self.draw = torch.Generator().manual_seed(seed)
        self.last = None
        self.pool, self.lists = {}, {}
        for dtype, T in itertools.product(DTYPES, LENGTHS):
            memory = self.normal(dtype, B, H, 3 * max(LENGTHS), d)
            self.pool[dtype, T] = [
                *(self.normal(dtype, B, H, T, d) for _ in range(3)),
                self.normal(dtype, B, T, H, d).transpose(1, 2),
                memory[:, :, :T],  # the strides are those of the other length
                memory[:, :, 2 : T + 2],
            ]
        self.wide = {
            (dtype, T, columns): [self.normal(dtype, B, H, T, columns) for _ in "qkv"]
            for dtype, T, columns in itertools.product(DTYPES, LENGTHS, LATENT)
        }
        self.starts = {
            T: [
                self.integers(0, 1, T),
                self.integers(0, T - 1, T),
                self.integers(0, 0, T),
            ]
            for T in LENGTHS
        }
        self.lengths = [self.integers(n) for n in (*LENGTHS, 1)]

    def normal(self, dtype, *shape):
        return torch.randn(shape, generator=self.draw).to(DEVICE, dtype)

    def integers(self, *numbers):
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    def chosen(self, dtype, T_q, T_k, roles):
        """q, k and v, and where they are in the pool."""
        q, k, v = roles
        keys = (dtype, T_q, q), (dtype, T_k, k), (dtype, T_k, v)
        return [self.pool[dtype, T][n] for dtype, T, n in keys], keys

    def listed(self, changes, tensors, mode="none"):
        """The changes with BlockLists in place of lists, for tensors like these: those
        of an earlier call, if there are any.
        """
        mask = changes.pop("lists", None)
        if mask is None:
            return changes
        q, k, v = (x.bfloat16() if mode == "autocast" else x for x in tensors)
        about = mask.key, q.dtype, q.stride(), q.shape[2], k.shape[2]
        if about not in self.lists:
            self.lists[about] = block_lists.BlockLists(mask, q, k, v)
        return changes | {"mask": self.lists[about]}

    def compare(self, name, found, wanted, dtype, cancelled=None):
        """Judge results, of which the first has this dtype; ``cancelled`` has the
        rounding of what cancels in each.
        """
        Histories.done += 1
        assert found[0].dtype == dtype, f"{name} has another dtype"
        cancelled = cancelled or [0.0] * len(found)
        for x, y, rounding in zip(found, wanted, cancelled, strict=True):
            assert near(x, y, dtype, rounding), f"{name} is wrong after other calls"
        self.last = found[0].detach()

    @rule(
        dtype=kinds, T_q=lengths, T_k=lengths, roles=roles,
        method=st.sampled_from(METHODS),
        changes=changes, mode=modes,
    )  # fmt: skip
    def attend(self, dtype, T_q, T_k, roles, method, changes, mode):
        tensors, _ = self.chosen(dtype, T_q, T_k, roles)
        changes = self.listed(filled(changes, T_q, T_k), tensors, mode)
        if MASKED & {*changes}:
            method = "auto"
        elif method == "hopper" and dtype == torch.float32:
            method = "flash2"
        with MODES[mode]():
            found = flashlib.attention(
                *tensors, **changes, method=method, return_lse=True
            )
        if mode == "autocast":
            tensors, dtype = [x.bfloat16() for x in tensors], torch.bfloat16
        wanted = reference.attention(*(x.double() for x in tensors), **changes)
        self.compare("attention", found, wanted, dtype)

    @rule(
        dtype=kinds, T_q=lengths, T_k=lengths, causal=st.booleans(),
        roles=st.tuples(pick(3), pick(3), pick(3)), masked=st.booleans(),
        backward=st.booleans(),
    )  # fmt: skip
    def attend_to_expanded_latents(
        self, dtype, T_q, T_k, roles, causal, masked, backward
    ):
        """Values are narrower than keys."""
        keys = (dtype, T_q, LATENT[0]), (dtype, T_k, LATENT[0]), (dtype, T_k, LATENT[1])
        keys = [(key, n) for key, n in zip(keys, roles, strict=True)]
        leaves = {x: self.wide[x[0]][x[1]].requires_grad_(backward) for x in keys}
        changes = {"causal": causal} | ({"window": (2, 0)} if masked else {})
        o, lse = flashlib.attention(
            *(leaves[x] for x in keys), **changes, return_lse=True
        )
        exact = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
        wanted = reference.attention(*(exact[x] for x in keys), **changes)
        self.compare("attention to latents", (o, lse), wanted, dtype)
        if backward:
            do = self.wide[dtype, T_q, LATENT[1]][0].detach()
            found = torch.autograd.grad(o, list(leaves.values()), do)
            wanted = torch.autograd.grad(wanted[0], list(exact.values()), do.double())
            rounding = of_cancelled(*(leaves[x] for x in keys), do)
            self.compare("a gradient", found, wanted, dtype, [rounding] * len(found))

    @rule(
        dtype=kinds, T_q=lengths, T_k=lengths, roles=roles, mode=modes,
        options=st.fixed_dictionaries(
            {x: st.booleans() for x in ("causal", "transform", "smooth")}
        ),
        again=st.booleans(),
    )  # fmt: skip
    def attend_in_eight_bits(self, dtype, T_q, T_k, roles, mode, options, again):
        """What was quantized is attended to twice, or the calls are made together."""
        tensors, _ = self.chosen(dtype, T_q, T_k, roles)
        how = {x: options[x] for x in ("transform", "smooth")}
        refused = TypeError if dtype == torch.float32 else ValueError
        with MODES[mode]():
            try:
                found = flashlib.fp8.attention(*tensors, **options, return_lse=True)
                if again:
                    kept = flashlib.fp8.quantize(*tensors, **how)
                    attend = {"causal": options["causal"], "dtype": dtype}
                    for _ in range(2):
                        found = flashlib.fp8.attend(kept, **attend, return_lse=True)
            except refused:
                assert dtype == torch.float32 or (CUDA and not HOPPER)
                return
        wide = [x.detach().double() for x in tensors]
        causal = {"causal": options["causal"]}
        wanted = reference.attention(*wide, **causal)
        recipe = flashlib.fp8.RECIPE._replace(**how)
        expected = reference_fp8.deviation(
            *wide, **causal, recipe=recipe, block_k=flashlib.fp8.BLOCK
        )
        errors = [8 * x[x.isfinite()].amax().item() for x in expected]
        self.compare("attention in eight bits", found, wanted, dtype, errors)

    @rule(
        dtype=kinds, T=lengths, roles=roles, method=st.sampled_from(METHODS),
        changes=changes, mode=modes, incoming=pick(PLACES + 3), any_order=st.booleans(),
        through_lse=st.booleans(),
    )  # fmt: skip
    def differentiate(
        self, dtype, T, roles, method, changes, mode, incoming, any_order, through_lse
    ):
        tensors, keys = self.chosen(dtype, T, T, roles)
        changes, options = self.listed(filled(changes, T, T), tensors), {}
        if MASKED & {*changes}:
            method = "auto"
        elif method == "hopper" and dtype == torch.float32:
            method = "flash2"
        else:
            options["deterministic"] = mode == "deterministic" or not any_order
        if mode in ("no_grad", "inference", "autocast"):
            mode = "none"
        # One leaf for one place of the pool: an argument may come twice.
        leaves = {
            n: x.detach().requires_grad_() for n, x in zip(keys, tensors, strict=True)
        }
        q, k, v = (leaves[n] for n in keys)
        with MODES[mode]():
            o, lse = flashlib.attention(
                q, k, v, **changes, **options, method=method, return_lse=True
            )
            do = [*self.pool[dtype, T], o.detach(), q, o.new_ones(()).expand(o.shape)]
            results, sources = (o, lse), list(leaves.values())
            incoming_pair = do[incoming], o.detach()[..., 0].float()
            used = 2 if through_lse and (lse > -torch.inf).all() else 1
            found = torch.autograd.grad(results[:used], sources, incoming_pair[:used])
        exact = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
        results = reference.attention(*(exact[n] for n in keys), **changes)
        doubles = [x.detach().double() for x in incoming_pair]
        sources = list(exact.values())
        wanted = torch.autograd.grad(results[:used], sources, doubles[:used])
        rounding = of_cancelled(q, k, v, do[incoming], changes.get("scale"))
        self.compare("a gradient", found, wanted, dtype, [rounding] * len(found))
        self.pool[dtype, T][incoming % PLACES] = unit(found[0])

    @rule(
        dtype=kinds, T_q=lengths, T_k=lengths, roles=roles,
        starts=st.tuples(pick(3), pick(3)),
        changes=changes, mode=modes, backward=st.booleans(),
    )  # fmt: skip
    def pack(self, dtype, T_q, T_k, roles, starts, changes, mode, backward):
        tensors, keys = self.chosen(dtype, T_q, T_k, roles)
        leaves = {
            n: x[0].transpose(0, 1).detach().requires_grad_(backward)
            for n, x in zip(keys, tensors, strict=True)
        }
        if mode == "autocast" or (backward and mode in ("no_grad", "inference")):
            mode = "none"
        starts = self.starts[T_q][starts[0]], self.starts[T_k][starts[1]]
        if {"bias", "lists"} & {*changes} or changes.get("mask") == 1:
            changes = {"mask": 2}  # the others are for tensors [B, H, T, d]
        changes = filled(changes, T_q, T_k)
        with MODES[mode]():
            o, lse = flashlib.attention_varlen(
                *(leaves[n] for n in keys),
                *starts,
                T_q,
                T_k,
                **changes,
                return_lse=True,
            )
            found, wanted, cancelled = [o, lse], [], [0.0, 0.0]
            if backward:
                found += torch.autograd.grad(o, list(leaves.values()), o.detach())
        exact = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
        wanted += reference.attention_varlen(
            *(exact[n] for n in keys), *starts, **changes
        )
        if backward:
            do = o.detach().double()
            wanted += torch.autograd.grad(wanted[0], list(exact.values()), do)
            rows = (x.transpose(0, 1) for x in (*(leaves[n] for n in keys), o))
            cancelled += [of_cancelled(*rows, changes.get("scale"))] * len(leaves)
        self.compare("attention_varlen", found, wanted, dtype, cancelled)

    @rule(
        dtype=kinds, T_q=st.sampled_from((1, LENGTHS[0])), T=lengths, roles=roles,
        length=pick(3), splits=st.sampled_from((1, 2, "auto")), paged=st.booleans(),
        window=st.sampled_from((None, (2, 0))), changes=of_decoding,
        eight_bits=st.booleans(), mode=modes,
    )  # fmt: skip
    def decode(
        self, dtype, T_q, T, roles, length, splits, paged, window, changes, eight_bits,
        mode,
    ):  # fmt: skip
        (_, k, v), _ = self.chosen(dtype, T, T, roles)
        q = self.pool[dtype, LENGTHS[0]][roles[0]][:, :, :T_q]
        lengths, table = self.lengths[length].clamp(max=T), None
        if paged:
            pages = {id(x): x.new_zeros(3, H, 256, d) for x in (k, v)}
            table = self.integers(2)[None]
            for x in (k, v):
                pages[id(x)][2, :, :T] = x[0]
            k, v = pages[id(k)], pages[id(v)]
        changes = filled(changes, T_q, k.shape[2]) | {"window": window}
        options = {"block_table": table, "splits": splits} | changes
        exact = k.double(), v.double()
        if eight_bits and dtype != torch.float32:
            (k, of_k), (v, of_v) = in_eight_bits(k), in_eight_bits(v)
            options |= {"k_scales": of_k, "v_scales": of_v}
            exact = k.double() * of_k[..., None], v.double() * of_v[..., None]
        with MODES[mode]():
            found = flashlib.decode(
                q, k, v, seq_lens=lengths, **options, return_lse=True
            )
        exact = q.double(), *exact, lengths.tolist()
        wanted = reference_decoding.attention(*exact, block_table=table, **changes)
        self.compare("decode", found, wanted, dtype)

    @rule(
        dtype=kinds, T_q=st.sampled_from((1, LENGTHS[0])), T=lengths, roles=roles,
        length=pick(3), splits=st.sampled_from((1, 2, "auto")), paged=st.booleans(),
        eight_bits=st.booleans(), mode=modes,
    )  # fmt: skip
    def decode_latent(
        self, dtype, T_q, T, roles, length, splits, paged, eight_bits, mode
    ):
        (_, k, _), _ = self.chosen(dtype, T, T, roles)
        q = self.pool[dtype, LENGTHS[0]][roles[0]][:, :, :T_q]
        cache, d_c = k[:, 0], d - 8
        lengths, table = self.lengths[length].clamp(max=T), None
        if paged:
            cache, table = cache.new_zeros(3, 256, d), self.integers(2)[None]
            cache[2, :T] = k[0, 0]
        options = {"block_table": table, "splits": splits, "scale": 0.3, "d_c": d_c}
        rows = cache.double()[:, None]
        if eight_bits and dtype != torch.float32:
            parts = [in_eight_bits(x) for x in cache.split((d_c, 8), dim=2)]
            cache = torch.cat([x for x, _ in parts], dim=2)
            options["scales"] = torch.stack([x for _, x in parts], dim=2)
            exact = [x.double() * of_x[..., None] for x, of_x in parts]
            rows = torch.cat(exact, dim=2)[:, None]
        with MODES[mode]():
            found = flashlib.decode_latent(
                q, cache, seq_lens=lengths, **options, return_lse=True
            )
        wanted = reference_decoding.attention(
            q.double(), rows, rows[..., :d_c], lengths.tolist(), block_table=table,
            scale=0.3,
        )  # fmt: skip
        self.compare("decode_latent", found, wanted, dtype)

    @rule(dtype=kinds, T=lengths, roles=roles)
    def merge(self, dtype, T, roles):
        """What ring attention does on each rank: results of two parts of the keys."""
        from flashlib.kernels import ring

        (q, k, v), _ = self.chosen(dtype, T, T, roles)
        parts = [
            flashlib.attention(q, x, y, return_lse=True) for x, y in ((k, v), (v, k))
        ]
        exact = [tuple(x.double() for x in part) for part in parts]
        found = ring.merge(*(x.clone() for x in parts[0]), *parts[1])
        wanted = merge_finished(*exact)
        self.compare("merge", found, wanted, dtype)

    @rule(T=lengths, place=pick(PLACES), causal=st.booleans())
    def layer(self, T, place, causal):
        x = self.pool[torch.float32, T][place].transpose(1, 2).flatten(2)
        layer = flashlib.FlashSelfAttention(H * d, H, causal=causal, device=DEVICE)
        exact = [w.detach().double() for w in (layer.w_q, layer.w_k, layer.w_v)]
        heads = [(x.double() @ w).unflatten(2, (H, d)).transpose(1, 2) for w in exact]
        o, _ = reference.attention(*heads, causal=causal)
        wanted = o.transpose(1, 2).flatten(2) @ layer.w_o.detach().double()
        self.compare("the layer", [layer(x)], [wanted], torch.float32)

    # -- what happens between calls

    @rule(dtype=kinds, T=lengths, place=pick(PLACES))
    def keep_a_result(self, dtype, T, place):
        if self.last is not None and self.last.shape == (B, H, T, d):
            self.pool[dtype, T][place] = unit(self.last.to(dtype))

    @rule(dtype=kinds, T=lengths, place=pick(PLACES))
    def free_and_allocate(self, dtype, T, place):
        """Memory of one tensor becomes that of another, of other sizes."""
        self.pool[dtype, T][place] = self.last = None
        self.pool[dtype, T][place] = self.normal(dtype, B, H, T, d)

    @rule(dtype=kinds, T=lengths, place=pick(PLACES))
    def change_in_place(self, dtype, T, place):
        with torch.inference_mode(self.pool[dtype, T][place].is_inference()):
            self.pool[dtype, T][place].mul_(-0.5)

    @rule(dtype=kinds, T=lengths, roles=roles)
    def change_between_forward_and_backward(self, dtype, T, roles):
        tensors, _ = self.chosen(dtype, T, T, roles)
        q, k, v = (x.detach().clone().requires_grad_() for x in tensors)
        o = flashlib.attention(q, k, v)
        with torch.no_grad():
            k.add_(1.0)
        try:
            torch.autograd.grad(o.sum(), (q, k, v))
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            raise AssertionError("a gradient of changed inputs")

    @rule(dtype=kinds, T=lengths, roles=roles, step=pick(3))
    def interrupt(self, dtype, T, roles, step):
        """Ctrl-C in the middle of a run, or while a plan is prepared."""
        (q, k, v), _ = self.chosen(dtype, T, T, roles)
        left = step

        def counted(own):
            def call(*arguments):
                nonlocal left
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
                return own(*arguments)

            return call

        places = (plans.Spec, "__init__"), (plans, "filled")
        places = *places, (internals.CompiledLaunch, "__call__")
        with contextlib.ExitStack() as stack:
            for owner, name in places:
                patched = mock.patch.object(owner, name, counted(getattr(owner, name)))
                stack.enter_context(patched)
            with contextlib.suppress(KeyboardInterrupt):
                flashlib.attention(q, k, v, method="flash2", causal=True)

    @rule(dtype=kinds, T=lengths, roles=roles)
    def refuse(self, dtype, T, roles):
        (q, k, v), _ = self.chosen(dtype, T, T, roles)
        for wrong in (
            (q, k[..., :-1], v),
            (q, k, v[:, :, 1:]),
            (q, k.cpu().double(), v),
        ):
            try:
                flashlib.attention(*wrong)
            except (TypeError, ValueError):
                continue
            raise AssertionError("wrong arguments were taken")
        leaf = q.detach().requires_grad_()
        o = flashlib.attention(leaf, k, v, method="flash2", deterministic=False)
        torch.autograd.grad(o.sum(), leaf, retain_graph=True)
        for call in (
            lambda: flashlib.attention(q, k, v, deterministic=False),
            lambda: torch.autograd.grad(o.sum(), leaf),
        ):
            with deterministic():
                try:
                    call()
                except ValueError:
                    continue
            raise AssertionError("what the deterministic mode forbids was done")

    @rule(dtype=kinds, T=lengths, roles=roles)
    def transform(self, dtype, T, roles):
        tensors, _ = self.chosen(dtype, T, T, roles)
        try:
            torch.func.vmap(flashlib.attention)(*(x[None] for x in tensors))
        except NotImplementedError:
            return
        raise AssertionError("vmap was not refused")

    @rule(
        dtype=kinds, calls=st.lists(st.tuples(lengths, roles), min_size=2, max_size=2)
    )
    def two_threads(self, dtype, calls):
        """Two threads make a call each, at the same time."""
        found, drawn = {}, [self.chosen(dtype, T, T, roles)[0] for T, roles in calls]

        def work(n):
            found[n] = flashlib.attention(*drawn[n], causal=n == 1, return_lse=True)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n, tensors in enumerate(drawn):
            wanted = reference.attention(*(x.double() for x in tensors), causal=n == 1)
            self.compare("attention in two threads", found[n], wanted, dtype)

    @rule()
    def forget(self):
        plans.PLANS.clear()


# -- what histories must notice


class Blind(dict):
    """Plans whose key lacks what ``reduced`` removes."""

    def __init__(self, reduced):
        super().__init__()
        self.reduced = reduced

    def get(self, key):
        return super().get(self.reduced(*key))

    def __setitem__(self, key, plan):
        super().__setitem__(self.reduced(*key), plan)


def of_tensor(x):
    """Whether a part of a key is what it has of a tensor."""
    return isinstance(x, tuple) and len(x) == 5 and isinstance(x[0], torch.Size)


def blind_to(part):
    """Make the keys of plans lack a fact about tensors."""

    def reduced(*key):
        return tuple((*x[:part], *x[part + 1 :]) if of_tensor(x) else x for x in key)

    plans.PLANS = Blind(reduced)


def blind_to_options():
    plans.PLANS = Blind(lambda launcher, *rest: (launcher, *filter(of_tensor, rest)))


def blind_to_the_mode():
    plans.PLANS = Blind(lambda launcher, mode, *rest: (launcher, *rest))


def tensor_maps_of_other_addresses():
    own = plans.TensorMap.__call__

    def stale(self, tensors):
        return next(iter(self.known.values()), None) or own(self, tensors)

    plans.TensorMap.__call__ = stale


def zeros_that_were_used():
    own = plans.next_zero
    used = []

    def again(device, stream):
        used.append(own(device, stream))
        return used[0]

    plans.next_zero = again


def kernels_for_aligned_addresses():
    plans.Spec.data_ptr = lambda self: 0


BROKEN = {
    "sizes": lambda: blind_to(0),
    "strides": lambda: blind_to(1),
    "dtype": lambda: blind_to(2),
    "alignment": lambda: blind_to(4),
    "options": blind_to_options,
    "mode": blind_to_the_mode,
    "tensor maps": tensor_maps_of_other_addresses,
    "zeros": zeros_that_were_used,
    "compiled kernels": kernels_for_aligned_addresses,
}


def run(calls, first=0, steps=100, seconds=math.inf):
    """One history of so many steps after another, from this seed on, until there were
    enough calls or the time is over.
    """
    from hypothesis import HealthCheck, Phase, seed, settings
    from hypothesis.stateful import run_state_machine_as_test

    end, last = Histories.done + calls, time.monotonic() + seconds
    while Histories.done < end and time.monotonic() < last:
        first += 1000
        how = settings(
            max_examples=4, stateful_step_count=steps, deadline=None, database=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        run_state_machine_as_test(seed(first)(Histories), settings=how)
        print(f"{Histories.done} calls: none wrong", flush=True)


def main():
    """Run the histories that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--broken", choices=BROKEN, help="what is broken on purpose")
    asked = parser.parse_args()
    if asked.broken is not None:
        BROKEN[asked.broken]()
    run(asked.calls, asked.seed, seconds=asked.seconds)


if __name__ == "__main__":
    main()
