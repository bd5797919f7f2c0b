"""Attention for the models of Hugging Face transformers: one registered name, and a
refusal of what it cannot honor.

transformers keeps two tables. One maps a name to the function that computes attention;
the other maps the same name to the function that turns padding, cache and window into
that function's mask. A name in the first table only gets no mask at all, and padding
would be silently ignored. So both are filled.
"""

import torch

from flashlib import api

NAME = "tiled"

# What models pass to every attention function without changing what attention is.
_HARMLESS = (
    "cache_position",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
)
_PLAIN = ("causal_mask_function", "bidirectional_mask_function")


def register(name=NAME):
    """Register ``flashlib.attention`` with transformers, so that
    ``attn_implementation=name`` selects it.

    It serves every model that takes its attention from the table: grouped heads, a
    given scale, causal and bidirectional attention, training, generation with a cache
    that grows. Calling it twice does no harm.

    Raises ImportError where transformers is missing or older than 4.53, which has no
    table of mask functions; TypeError for a name that is not a string, ValueError for
    one that transformers uses itself or takes for the package flash-attn.
    """
    try:
        import transformers
    except ImportError as error:
        message = "transformers is not installed: python -m pip install transformers"
        raise ImportError(message) from error
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        found = transformers.__version__
        message = f"transformers 4.53 or later is needed, found {found}"
        raise ImportError(message) from error
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {type(name).__name__}")
    taken = AttentionInterface().get(name, attention_forward) is not attention_forward
    if taken or name == "eager" or not name.isidentifier():
        expected = "a word that transformers does not use"
        raise ValueError(f"name: expected {expected}, got {name!r}")
    if "flash" in name:
        raise ValueError(
            f"name: expected one without 'flash' in it, got {name!r}: for such a name "
            "transformers prepares inputs for the package flash-attn"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None,
    is_causal=None, **kwargs,
):  # fmt: skip
    """Attention as transformers calls it: query ``[B, H, T_q, d]``, key ``[B, H_kv,
    T_k, d]``, value ``[B, H_kv, T_k, d_v]``; returns ``(o [B, T_q, H, d_v], None)``.

    is_causal None means ``module.is_causal``. A causal mask is aligned to the
    bottom-right corner: with a cache, the last query sees every key. attention_mask is
    None, or it is read (which waits for the GPU) and must be that causal mask or hide
    nothing.

    Raises ValueError for another mask, for dropout, and for every further argument that
    is set and not known to be harmless: sliding windows, soft caps, sinks, biases,
    packed sequences, head masks, attention weights as an output. ``flashlib.attention``
    checks the rest.
    """
    if dropout:
        cure = "set attention_dropout=0 in the model's config"
        raise ValueError(f"dropout: expected 0, got {dropout}; {cure}")
    for name, given in kwargs.items():
        if name not in _HARMLESS and given is not None and given is not False:
            raise ValueError(
                f"{name}: this attention function cannot honor it; use 'sdpa' or 'eager'"
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        causal = _is_causal(attention_mask, query.shape[2], key.shape[2])
    o = api.attention(query, key, value, causal=bool(causal), scale=scaling)
    return o.transpose(1, 2).contiguous(), None


def attention_mask(
    batch_size, kv_length, mask_function, attention_mask=None, q_length=None,
    q_offset=0, kv_offset=0, cache_position=None, **kwargs,
):  # fmt: skip
    """The mask that ``attention_forward`` gets: None, where neither padding nor pattern
    hides anything but the future.

    transformers 5 gives the place of the queries by q_length and q_offset, transformers
    4 by the tensor cache_position ``[T_q]``. attention_mask ``[B, at least T_k]`` is
    False or 0 at padding.

    Raises ValueError for a batch with padding; for a mask_function other than the plain
    causal and the plain bidirectional one (sliding windows, chunks, packed sequences,
    which is what transformers 4 assumes of a batch without cache and mask); for a cache
    with free space, such as a static one.
    """
    cure = "use 'sdpa' or 'eager'"
    if getattr(mask_function, "__qualname__", "") not in _PLAIN:
        raise ValueError(
            "mask_function: expected plain causal or bidirectional attention, got a "
            f"window, chunks or packed sequences; {cure}, or pass an attention_mask of "
            "ones if no position_ids start anew"
        )
    if cache_position is not None:
        q_length, q_offset = len(cache_position), cache_position[0]
    causal, q_offset = mask_function.__qualname__ == _PLAIN[0], int(q_offset)
    if causal and q_offset + q_length != kv_offset + kv_length:
        raise ValueError(
            "past_key_values: expected a cache that ends with the last query, got space "
            f"for {kv_length} keys and {q_length} queries from {q_offset} on; use a "
            "dynamic cache"
        )
    keys = slice(kv_offset, kv_offset + kv_length)
    if attention_mask is not None and not bool(attention_mask[:, keys].all()):
        got = f"a batch with padded rows; {cure}"
        raise ValueError(f"attention_mask: expected no padding, got {got}")


def _is_causal(mask, T_q, T_k):
    """Whether the mask is causal, or hides nothing; raises ValueError otherwise."""
    if isinstance(mask, torch.Tensor) and mask.shape[-2:] == (T_q, T_k):
        boolean = mask.dtype == torch.bool
        seen = mask if boolean else mask == 0
        hidden = ~mask if boolean else mask <= torch.finfo(mask.dtype).min
        causal = torch.ones_like(seen).tril(T_k - T_q)
        if bool((seen == causal).all() and (hidden != causal).all()):
            return True
        if bool(seen.all()):
            return False
    raise ValueError(
        "attention_mask: expected None, the plain causal mask or one that hides nothing"
    )
