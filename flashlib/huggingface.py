"""Attention for the models of Hugging Face transformers: one registered name, and a
refusal of what it cannot honor.

transformers keeps two tables. One maps a name to the function that computes attention;
the other maps the same name to the function that turns padding, cache and window into
that function's mask. A name in the first table only gets no mask at all, and padding
would be silently ignored. So both are filled.

Not every model reads the first table. Some compute attention in code of their own, but
take their mask from the second: with None for "causal", they would silently see the
future. So the mask is an object that only this module can read (:class:`Mask`), and a
model with attention code of its own is refused when it is created.
"""

import functools
import sys

import torch
from torch.nn.functional import pad

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
# The patterns in a mask_function of transformers that can be honored.
_CAUSAL, _BIDIRECTIONAL = "causal_mask_function", "bidirectional_mask_function"
_WINDOW, _PACKED = "sliding_window_overlay", "packed_sequence_mask_function"
_KNOWN = (_CAUSAL, _BIDIRECTIONAL, _WINDOW, _PACKED)
_EXPECTED = "attn_implementation: expected a model that reads ALL_ATTENTION_FUNCTIONS"
_USES_ITS_MASK = f"{_EXPECTED}, got one that uses its mask itself; use 'eager' for it"


def register(name=NAME):
    """Register ``flashlib.attention`` with transformers, so that
    ``attn_implementation=name`` selects it.

    It serves every model that takes its attention from the table: grouped heads, a
    given scale, causal and bidirectional attention, cross attention, sliding windows,
    softcaps, padded batches, sequences packed by position_ids; training, and generation
    with a dynamic or a static cache. Calling it twice does no harm.

    A model with attention code of its own raises ValueError when it is created; where
    only a part of a model has such code, it raises when that part uses its mask.

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
    _check_new_models()


@functools.cache  # once, even if several names are registered
def _check_new_models():
    """Let a model with a registered name raise when it is created with attention code
    of its own. transformers makes such a check for names of its own alone.
    """
    from transformers import AttentionInterface, PreTrainedModel

    initialize, table = PreTrainedModel.__init__, AttentionInterface()

    @functools.wraps(initialize)
    def checked(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        named = table.get(self.config._attn_implementation) is attention_forward
        if named and _has_own_attention(type(self)):
            got = f"{type(self).__name__}, which has attention code of its own"
            raise ValueError(f"{_EXPECTED}, got {got}; use 'eager' for it")

    PreTrainedModel.__init__ = checked


def _has_own_attention(model):
    """Whether the module that defines a class of models has a table of attention of its
    own, or classes of attention but not the table of transformers.
    """
    defined = vars(sys.modules[model.__module__])
    tables = [x for x in defined.values() if isinstance(x, dict) and "eager" in x]
    classes = [
        value
        for name, value in defined.items()
        if "Attention" in name
        and torch.nn.Module in getattr(value, "__bases__", ())
        and value.__module__ == model.__module__
    ]
    return bool(tables or (classes and "ALL_ATTENTION_FUNCTIONS" not in defined))


class Mask:
    """Which keys a query sees, for :func:`attention_forward` alone to read: code that
    uses a Mask as a tensor raises an error.

    causal; window (left, right) or None; packed: None, or cu_seqlens_q and cu_seqlens_k
    of ``flashlib.attention_varlen``, and the sizes B, T_q and n of rows that have T_q
    queries and see some of the first n keys.
    """

    ndim = 4  # transformers takes a mask of 2 dimensions for padding

    def __init__(self, causal, window=None, packed=None):
        self.causal, self.window, self.packed = causal, window, packed

    def contiguous(self):
        """The Mask itself: generate calls this on a mask for a static cache."""
        return self

    def _refuse(self, *args, **kwargs):
        raise ValueError(_USES_ITS_MASK)

    __torch_function__ = classmethod(_refuse)  # every operation with a tensor
    __getitem__ = __eq__ = _refuse
    __hash__ = None

    def __getattr__(self, name):
        raise AttributeError(f"{name}: {_USES_ITS_MASK}")


def attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None,
    is_causal=None, sliding_window=None, softcap=None, **kwargs,
):  # fmt: skip
    """Attention as transformers calls it: query ``[B, H, T_q, d]``, key ``[B, H_kv,
    T_k, d]``, value ``[B, H_kv, T_k, d_v]``; returns ``(o [B, T_q, H, d_v], None)``.

    The mask alone says which keys a query sees. It is what the function
    ``attention_mask`` returns; or None, which hides nothing; or a tensor ``[…, T_q,
    T_k]``, which is read (this waits for the GPU) and must be the causal mask, aligned
    to the bottom-right corner, or hide nothing. A softcap is that of
    ``flashlib.attention``.

    Raises ValueError for another mask, for None where is_causal (or if that is None,
    ``module.is_causal``) or sliding_window ask for one, for dropout, and for every
    further argument that is set and not known to be harmless: sinks, biases, head
    masks, attention weights as an output. ``flashlib.attention`` checks the rest.
    """
    if dropout:
        setting = _dropout_setting(getattr(module, "config", module), dropout)
        cure = f"create the model with {setting}=0"
        raise ValueError(f"dropout: expected 0, got {dropout}; {cure}")
    for name, extra in kwargs.items():
        if name not in _HARMLESS and extra is not None and extra is not False:
            got = list(extra.shape) if isinstance(extra, torch.Tensor) else extra
            cure = "use 'eager' if the model needs it"
            raise ValueError(f"{name}: expected None or False, got {got}; {cure}")
    mask = attention_mask
    if not isinstance(mask, Mask):
        mask = _read(mask, module, query, key, is_causal, sliding_window)
    options = {"causal": mask.causal, "window": mask.window}
    options |= {"scale": scaling, "softcap": softcap}
    if mask.packed is not None:
        return _attend_within(mask.packed, query, key, value, options), None
    o = api.attention(query, key, value, **options)
    return o.transpose(1, 2).contiguous(), None


def _dropout_setting(config, dropout):
    """What a model's config calls the dropout of attention, which has this value."""
    settings = vars(config).items()
    names = [name for name, value in settings if "drop" in name and value == dropout]
    names = [name for name in names if "att" in name] or names or ["attention_dropout"]
    return f"{type(config).__name__}.{names[0]}"


def _read(mask, module, query, key, is_causal, sliding_window):
    """The Mask that a tensor or None stands for; raises ValueError if there is none."""
    T_q, T_k = query.shape[2], key.shape[2]
    if mask is not None:
        return Mask(_is_causal(mask, T_q, T_k))
    # Without a mask, 'eager' hides nothing, but 'sdpa' does what is_causal says.
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if (causal and T_q > 1) or sliding_window:
        got = f"None, is_causal={causal} and sliding_window={sliding_window}"
        raise ValueError(f"attention_mask: expected the mask of a model, got {got}")
    return Mask(False)


def _attend_within(packed, query, key, value, options):
    """O ``[B, T_q, H, d_v]`` by the packed sequences of a Mask."""
    *starts, B, T_q, n = packed
    T_k, causal = key.shape[2], options["causal"]
    fits = n <= T_k if causal else n == T_k  # a static cache has space after n keys
    if (len(query), query.shape[2]) != (B, T_q) or not fits:
        expected = f"[B, T_q, T_k] = {[len(query), query.shape[2], T_k]}"
        raise ValueError(f"attention_mask: expected {expected}, got {[B, T_q, n]}")
    rows = (x.transpose(1, 2) for x in (query, key[:, :, :n], value[:, :, :n]))
    rows = (x.flatten(0, 1) for x in rows)
    starts = (x.to(query.device) for x in starts)  # layers may be on several devices
    o = api.attention_varlen(*rows, *starts, T_q, n, **options)
    return o.unflatten(0, (B, T_q))


# It decides by values, which a trace does not have.
@torch.compiler.disable
def attention_mask(
    batch_size, kv_length, mask_function, attention_mask=None, q_length=None,
    q_offset=0, kv_offset=0, cache_position=None, **kwargs,
):  # fmt: skip
    """The Mask that ``attention_forward`` gets. It is packed only where padding, packed
    sequences or the free space of a static cache hide keys.

    transformers 5 gives the place of the queries by q_length and q_offset, transformers
    4 by the tensor cache_position ``[T_q]``. attention_mask ``[B, at least n]`` is
    False or 0 at padding; n is the number of keys up to that of the last query.

    Raises ValueError for a mask_function of other parts than causal and bidirectional
    attention, sliding windows and packed sequences, and for padding between two tokens
    of a row.
    """
    if isinstance(attention_mask, Mask):  # generate made it, for a static cache
        return attention_mask
    parts = dict(_parts(mask_function))
    causal, n, sequences = _BIDIRECTIONAL not in parts, kv_length, None
    if cache_position is not None:
        q_length, q_offset = len(cache_position), cache_position[0]
    if causal:
        n = int(q_offset) + q_length - kv_offset
    window = (parts[_WINDOW] - 1, 0) if _WINDOW in parts else None
    if attention_mask is not None:
        seen = attention_mask[:, kv_offset:].to(torch.int32)
        seen = pad(seen, (0, n - seen.shape[1]))  # cuts what is too long
        if not bool(seen.all()):
            begins = seen.diff(dim=1, prepend=torch.zeros_like(seen[:, :1])) == 1
            if int(begins.sum(1).max()) > 1:
                names = "attention_mask" + (not causal) * " or encoder_attention_mask"
                expected = "padding at the ends of rows"
                raise ValueError(f"{names}: expected {expected}, got it between")
            sequences = seen
    elif (packed := parts.get(_PACKED)) is not None and bool(packed.any()):
        sequences = packed
    if sequences is None and n < kv_length:
        sequences = torch.ones(batch_size, n, device=kwargs.get("device"))
    if sequences is None:
        return Mask(causal, window)
    B, T_q = len(sequences), q_length
    return Mask(causal, window, (*_starts(sequences, T_q, causal), B, T_q, n))


def _starts(sequences, T_q, causal):
    """cu_seqlens_q and cu_seqlens_k for rows of T_q queries and sequences ``[B, n]``,
    where neighbors that are equal belong together and 0 is padding.

    In causal attention the queries are those of the last T_q of the n keys, and padding
    is a sequence too, which costs less than to take it out. Otherwise all queries of a
    row see all that is not padding, and the padding is a sequence without a query.
    """
    B, n = sequences.shape
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    first = torch.nonzero(begins.flatten())[:, 0]  # the first key of each
    row, place = first // n, first % n
    if causal:
        first_query = row * T_q + (place - (n - T_q)).clamp(min=0)
    else:
        behind = (place > 0) & (sequences.flatten()[first] == 0)
        first_query = (row + behind.int()) * T_q
    ends = (first_query, B * T_q), (first, B * n)
    return (pad(x, (0, 1), value=end).to(torch.int32) for x, end in ends)


def _parts(mask_function):
    """(name, what it was made with, or None) for each pattern that a mask_function
    combines: the width of a window, the numbers ``[B, T]`` of packed sequences.
    """
    name = getattr(mask_function, "__qualname__", "").split(".")[0]
    cells = getattr(mask_function, "__closure__", None) or ()
    if name == "and_masks":
        for part in cells[0].cell_contents:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":
        yield from _parts(cells[0].cell_contents)
    elif name in _KNOWN:
        yield name, cells[0].cell_contents if cells else None
    else:
        raise ValueError(
            "mask_function: expected causal or bidirectional attention, sliding "
            "windows or packed sequences, "
            f"got {name or mask_function}; use 'sdpa' or 'eager'"
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
