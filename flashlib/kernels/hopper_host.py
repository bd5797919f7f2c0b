"""What launchers of the Hopper kernels share: which calls these can take, and the
results of a forward pass.

A ``..._refusal`` function returns None for what a kernel can take. Otherwise it returns
the reason, as the end of an error message ("expected …, got …").
"""

import torch

from flashlib.kernels import INTERPRETED
from flashlib.kernels.descriptors import describable
from flashlib.kernels.score_arguments import broadcast_strides
from flashlib.plain_checks import UNLIMITED
from flashlib.plans import new_results

HOPPER_WIDTHS = (64, 128, 256)
# d and d_v of latent attention, expanded: keys have 64 rotary columns next to 128
# others.
EXPANDED = 192, 128
# Columns of a row of the cache and of its latent, absorbed.
ABSORBED = 576, 512
ABSORBED_PAGES = 64, 128, 256  # rows: blocks of 64 rows are never from two pages
LONGEST_ALIBI = 2**23  # gluon_scores.with_slope takes positions below 2^24
LEAST_ALIBI_SCALE = 1e-6  # the kernels divide slopes by the scale
# Strides of a bias are less, so that offsets in a tile fit in 32 bits.
FARTHEST_BIAS = 2**24


def device_refusal(q):
    """Why no Hopper kernel can take q, whatever its shape."""
    if INTERPRETED:
        return "a Hopper GPU, got Triton's interpreter, which cannot run Gluon"
    major, minor = torch.cuda.get_device_capability(q.device)
    if (major, minor) != (9, 0):
        return f"a Hopper GPU (compute capability 9.0), got {major}.{minor}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"float16 or bfloat16, got {q.dtype}"
    return None


def address_refusal(name, x):
    """Why the copy engine cannot read x."""
    if x.numel() == 0 or describable(x):
        return None
    return (
        f"{name} with last stride 1, the other strides and the address multiples of 16 "
        f"bytes, got strides {tuple(x.stride())} at an address {x.data_ptr() % 16} "
        "bytes past a multiple of 16"
    )


def tensor_refusal(q, k, v):
    """Why the Hopper kernels cannot take q, k, v ``[B, H, T, d]``, or packed."""
    refused = device_refusal(q)
    if refused is not None:
        return refused
    d, d_v = q.shape[-1], v.shape[-1]
    if (d not in HOPPER_WIDTHS or d_v != d) and (d, d_v) != EXPANDED:
        allowed = ", ".join(map(str, HOPPER_WIDTHS))
        return (
            f"d = d_v, one of {allowed}, or d = 192 with d_v = 128, got d = {d}, "
            f"d_v = {d_v}"
        )
    refusals = (address_refusal(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    return next((refused for refused in refusals if refused is not None), None)


def score_refusal(score_mod, packed=False, longest=0):
    """Why the forward kernel cannot change scores by a ScoreMod, for sequences up to
    this length.
    """
    left, right, slopes = score_mod.left, score_mod.right, score_mod.slopes
    if score_mod.seed is not None:
        return f"no dropout, got {score_mod.dropout}"
    if score_mod.bias is not None:
        strides = broadcast_strides(score_mod.bias)[2:]
        if max(strides) >= FARTHEST_BIAS:
            most = f"of queries and keys below {FARTHEST_BIAS}"
            return f"a bias with strides {most}, got {strides}"
    if score_mod.function is not None and packed:
        return "sequences that are not packed with a score, got packed ones"
    if slopes is not None and packed:
        return "sequences that are not packed with alibi_slopes, got packed ones"
    if slopes is not None and longest > LONGEST_ALIBI:
        return f"at most {LONGEST_ALIBI} rows with alibi_slopes, got {longest}"
    if slopes is not None and 0.0 < abs(score_mod.scale) < LEAST_ALIBI_SCALE:
        least = f"a scale of magnitude at least {LEAST_ALIBI_SCALE}"
        return f"{least} with alibi_slopes, got {score_mod.scale}"
    if right != 0 and not left == right == UNLIMITED:
        got = None if right == UNLIMITED else right
        return f"causal or a right side of 0 with a window, got {got}"
    if score_mod.mask is not None and (packed or left != UNLIMITED):
        got = "packed sequences" if packed else f"a left side of {left}"
        return f"neither packed sequences nor a window with a mask, got {got}"
    return None


def forward_refusal(q, k, v, score_mod, packing=None):
    """Why hopper.py cannot compute a call with these tensors, a ScoreMod, and a Packing
    or None.
    """
    longest = max(q.shape[-2], k.shape[-2])
    refused = score_refusal(score_mod, packing is not None, longest)
    if score_mod.sinks is not None and k.numel() == 0:
        refused = refused or "keys next to sinks, got none"
    return refused or tensor_refusal(q, k, v)


def backward_refusal(q, k, v, score_mod, packing=None):
    """Why hopper_backward.py, or hopper_expanded.py at d = 192, cannot compute the
    gradients of a call.
    """
    if packing is not None:
        return "sequences that are not packed, got packed ones"
    refused = forward_refusal(q, k, v, score_mod)
    special = score_mod.mask is not None or score_mod.changed
    if refused is not None or not (special or score_mod.sinks is not None):
        return refused
    d = q.shape[-1]
    if d == EXPANDED[0]:
        return f"another d with a mask, sinks or changed scores, got {d}"
    if d > 128 and special:
        return f"d = 64 or 128 with a mask or changed scores, got {d}"
    if q.numel() == 0 or k.numel() == 0:
        return "tensors that are not empty with a mask, sinks or changed scores"
    return None


def copies_bias(q, k, bias):
    """Whether the copy engine brings the tiles of a bias to shared memory: the bias has
    a number for each pair, in the dtype of q, and the kernel has space for its tiles.
    """
    each_pair = bias.shape[2:] == (q.shape[2], k.shape[2]) and k.shape[2] > 1
    fits = bias.dtype == q.dtype and q.shape[-1] in HOPPER_WIDTHS
    return each_pair and fits and describable(bias)


def slower(q, k, score_mod):
    """Whether hopper.py is slower than the Triton kernel at a call that it can compute.
    Where rows are short, two groups of warps do not hide what each score takes: a tanh,
    or the load of a bias that is not copied.
    """
    bias = score_mod.bias
    read = bias is not None and not copies_bias(q, k, bias)
    return q.shape[-1] == 64 and (score_mod.softcap != 0.0 or read)


def absorbed_refusal(q, cache, block_table, d_c):
    """Why the Hopper kernel of absorbed latent attention cannot take q ``[B, H, T_q,
    d_c + d_r]`` and a cache.
    """
    refused = device_refusal(q)
    if refused is not None:
        return refused
    d, latent = ABSORBED
    if (q.shape[-1], d_c) != ABSORBED:
        return (
            f"d_c = {latent} next to {d - latent} rotary columns, got d_c = {d_c} next "
            f"to {q.shape[-1] - d_c}"
        )
    if cache.dtype != q.dtype:
        return f"a cache in {q.dtype}, got {cache.dtype}"
    if block_table is not None and cache.shape[1] not in ABSORBED_PAGES:
        allowed = ", ".join(map(str, ABSORBED_PAGES))
        return f"pages of {allowed} rows, got {cache.shape[1]}"
    return address_refusal("cache", cache)


def with_positive_scale(q, scale):
    """``(q, scale)`` with the same scores and a positive scale: the kernels take the
    maximum of a row before they scale, and 0 times -inf, the score of a key that is not
    seen, is NaN.
    """
    if scale > 0.0:
        return q, scale
    negated = -q  # new, so it can be overwritten
    return (negated, -scale) if scale else (negated.zero_(), 1.0)


def hopper_forward(q, k, scale, fill, v=None):
    """O ``[B, H, T_q, d_v]`` in the dtype and memory order of q and L ``[B, H, T_q]``
    in float32, contiguous, both new, which fill(q, o, lse, scale) computes; of packed q
    ``[total_q, H, d]`` O ``[total_q, H, d_v]`` and L ``[H, total_q]``. v is needed
    where d_v is not d.

    It is called with tensors that are not empty and a positive scale.
    """
    q, scale = with_positive_scale(q, scale)
    o, lse = new_results(q, q if v is None else v)
    if k.numel() == 0:
        return o.zero_(), lse.fill_(-float("inf"))
    if lse.numel():
        fill(q, o, lse, scale)
    return o, lse
