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
# The patterns in a mask_function of transformers that can be honored. A window reaches
# attention_forward as sliding_window.
_BIDIRECTIONAL, _PACKED = "bidirectional_mask_function", "packed_sequence_mask_function"
_KNOWN = ("causal_mask_function", _BIDIRECTIONAL, "sliding_window_overlay", _PACKED)


def register(name=NAME):
    """Register ``flashlib.attention`` with transformers, so that
    ``attn_implementation=name`` selects it.

    It serves every model that takes its attention from the table: grouped heads, a
    given scale, causal and bidirectional attention, sliding windows, softcaps, padded
    batches, sequences packed by position_ids; training, and generation with a dynamic
    or a static cache. Calling it twice does no harm.

    Raises ImportError if transformers is missing or older than 4.53, which has no
    table of mask functions; TypeError for a name that is not a string, ValueError for
    one that transformers uses itself or mistakes for the package flash-attn.
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
        message = f"transformers 4.53 or later is needed, found {found}: {error}"
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
    is_causal=None, sliding_window=None, softcap=None, **kwargs,
):  # fmt: skip
    """Attention as transformers calls it: query ``[B, H, T_q, d]``, key ``[B, H_kv,
    T_k, d]``, value ``[B, H_kv, T_k, d_v]``; returns ``(o [B, T_q, H, d_v], None)``.

    is_causal None means ``module.is_causal``. A causal mask is aligned to the
    bottom-right corner: with a cache, the last query sees every key. attention_mask is
    None, or what the function ``attention_mask`` returns, or a mask ``[…, T_q, T_k]``,
    which is read (this waits for the GPU) and must be that causal mask or hide nothing.
    sliding_window w lets a query of a causal model see its own key and the w - 1 before
    it; a softcap is that of ``flashlib.attention``.

    Raises ValueError for another mask, for dropout, and for every further argument that
    is set and not known to be harmless: sinks, biases, head masks, attention weights as
    an output. ``flashlib.attention`` checks the rest.
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
    within = getattr(attention_mask, "dtype", None) == torch.int32
    if attention_mask is not None and not within:
        causal = _is_causal(attention_mask, query.shape[2], key.shape[2])
        sliding_window = None  # the mask says what is seen
    options = {"causal": bool(causal), "scale": scaling, "softcap": softcap}
    if sliding_window is not None:
        if not causal:
            raise ValueError("sliding_window: expected causal attention")
        options["window"] = (sliding_window - 1, 0)
    if within:
        return _attend_within(attention_mask, query, key, value, options), None
    o = api.attention(query, key, value, **options)
    return o.transpose(1, 2).contiguous(), None


def _attend_within(sequences, query, key, value, options):
    """O ``[B, T_q, H, d_v]`` of queries that see keys of their own sequence only.

    sequences ``[B, n]``, integers: equal neighbors in a row belong to one sequence. They
    stand for the first n keys; the queries are those of the last T_q. Padding is a
    sequence too, which costs less than to take it out.
    """
    (B, n), T_q = sequences.shape, query.shape[2]
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    first = torch.nonzero(begins.flatten())[:, 0]  # the first key of each
    first = torch.nn.functional.pad(first, (0, 1), value=B * n)
    first_query = first // n * T_q + (first % n - (n - T_q)).clamp(min=0)
    rows = (x[:, :, :n].transpose(1, 2).flatten(0, 1) for x in (key, value))
    starts = (x.to(torch.int32) for x in (first_query, first))
    query = query.transpose(1, 2).flatten(0, 1)
    o = api.attention_varlen(query, *rows, *starts, T_q, n, **options)
    return o.unflatten(0, (B, T_q))


# It decides by values, which a trace does not have.
@torch.compiler.disable
def attention_mask(
    batch_size, kv_length, mask_function, attention_mask=None, q_length=None,
    q_offset=0, kv_offset=0, cache_position=None, **kwargs,
):  # fmt: skip
    """The mask that ``attention_forward`` gets: None, where nothing but the future and
    what a window leaves out is hidden, and otherwise to which sequence each key belongs,
    int32 ``[B, n]`` for the n keys up to that of the last query: 0 at padding, or the
    number of a packed sequence. A static cache has free space after them.

    transformers 5 gives the place of the queries by q_length and q_offset, transformers
    4 by the tensor cache_position ``[T_q]``. attention_mask ``[B, at least n]`` is False
    or 0 at padding.

    Raises ValueError for a mask_function of other parts than causal and bidirectional
    attention, sliding windows and packed sequences; for padding between two tokens of a
    row, and for padding where queries and keys are of different sequences.
    """
    parts = dict(_parts(mask_function))
    if cache_position is not None:
        q_length, q_offset = len(cache_position), cache_position[0]
    n = kv_length
    if _BIDIRECTIONAL not in parts:
        n = int(q_offset) + q_length - kv_offset
    if attention_mask is not None:
        seen = attention_mask[:, kv_offset : kv_offset + n].to(torch.int32)
        if not bool(seen.all()):
            begins = seen.diff(dim=1, prepend=torch.zeros_like(seen[:, :1])) == 1
            if int(begins.sum(1).max()) > 1:
                expected = "padding at the ends of rows"
                raise ValueError(f"attention_mask: expected {expected}, got it between")
            if _BIDIRECTIONAL in parts and q_length != n:
                got = f"{q_length} queries, {n} keys and padding"
                raise ValueError(f"attention_mask: expected self-attention, got {got}")
            return seen
    elif (packed := parts.get(_PACKED)) is not None and bool(packed.any()):
        return packed.to(torch.int32)
    if n < kv_length:
        return torch.ones(batch_size, n, dtype=torch.int32, device=kwargs.get("device"))
    return None


def _parts(mask_function):
    """(name, packed sequences ``[B, T]`` or None) for each pattern that a mask_function
    combines.
    """
    name = getattr(mask_function, "__qualname__", "").split(".")[0]
    cells = getattr(mask_function, "__closure__", None) or ()
    if name == "and_masks":
        for part in cells[0].cell_contents:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":
        yield from _parts(cells[0].cell_contents)
    elif name in _KNOWN:
        yield name, cells[0].cell_contents if name == _PACKED else None
    else:
        raise ValueError(
            "mask_function: expected causal or bidirectional attention, sliding windows "
            f"or packed sequences, got {name or mask_function}; use 'sdpa' or 'eager'"
        )


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
