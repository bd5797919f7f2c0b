"""Attention for the models of Hugging Face transformers: one registered name, and a
refusal of what it cannot honor.

transformers keeps two tables. One maps a name to the function that computes attention;
the other maps the same name to the function that turns padding, cache and window into
that function's mask. A name that is only in the first table gets no mask at all,
and padding would be silently ignored. So both are filled.

Not every model reads the first table. Some compute attention in code of their own, but
take their mask from the second: with None for "causal", they would silently see the
future. So the mask is an object that only this module can read (:class:`Mask`), and a
model with attention code of its own is refused when it is created.
"""

import functools
import operator
import sys

import torch
from torch.nn.functional import pad

from flashlib import api, masks
from flashlib.masks import at, div

NAME = "tiled"

# What models pass to every attention function without changing what attention is.
_HARMLESS = (
    "cache_position",
    "deterministic",  # flashlib.attention is
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
)
# The functions of transformers.masking_utils that are translated.
_CAUSAL, _BIDIRECTIONAL = "causal_mask_function", "bidirectional_mask_function"
_WINDOW, _BOTH_SIDES = "sliding_window_overlay", "sliding_window_bidirectional_overlay"
_PACKED, _CHUNKS = "packed_sequence_mask_function", "chunked_overlay"
_BLOCKS, _OR = "blockwise_overlay", "or_masks"
# Those that attention can have without a mask, if all of them must hold.
_CLOSED = {_CAUSAL, _BIDIRECTIONAL, _WINDOW, _BOTH_SIDES, _PACKED}
_KNOWN = {*_CLOSED, _CHUNKS, _BLOCKS, _OR}
_EXPECTED = "attn_implementation: expected a model that reads ALL_ATTENTION_FUNCTIONS"
_USES_ITS_MASK = f"{_EXPECTED}, got one that uses its mask itself; use 'eager' for it"


def register(name=NAME):
    """Register ``flashlib.attention`` with transformers, so that
    ``attn_implementation=name`` selects it.

    It serves every model that takes its attention from the table: grouped heads, a
    given scale, causal and bidirectional attention, cross attention, sliding windows,
    chunks, softcaps, sinks, position biases, dropout, padding anywhere, custom masks,
    sequences packed by position_ids; training, and generation with a dynamic or a
    static cache.
    Calling it twice does no harm.

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
        version = transformers.__version__
        message = f"transformers 4.53 or later is needed, found {version}: {error}"
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
    of its own. transformers makes such a check only for its own names.
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
    """Whether a class of models computes attention in code of its own. Of a subclass of
    a model of transformers, that model's file decides: the subclass inherits its
    attention, and may use another kind for something else.
    """
    from transformers import PreTrainedModel

    names = [
        x.__module__
        for x in model.__mro__
        if issubclass(x, PreTrainedModel) and x is not PreTrainedModel
    ]
    theirs = [name for name in names if name.startswith("transformers.")]
    return any(_defines_attention(sys.modules[name]) for name in theirs[:1] or names)


def _defines_attention(module):
    """Whether a module has a table of attention of its own, or classes of attention but
    not the table of transformers.
    """
    defined = vars(module)
    tables = [x for x in defined.values() if isinstance(x, dict) and "eager" in x]
    classes = [
        value
        for name, value in defined.items()
        if "Attention" in name
        and torch.nn.Module in getattr(value, "__bases__", ())
        and value.__module__ == module.__name__
    ]
    return bool(tables or (classes and "ALL_ATTENTION_FUNCTIONS" not in defined))


class Mask:
    """Which keys a query sees, for :func:`attention_forward` alone to read: code that
    uses a Mask as a tensor raises an error.

    causal; window (left, right) or None; sizes: B, T_q, T_k and n of rows that have T_q
    queries and T_k keys, of which they see some of the first n, or None for any sizes.
    Where these do not say it all, make returns what does, for a device: a
    :class:`flashlib.masks.Mask` or a boolean tensor. packed: None, or cu_seqlens_q and
    cu_seqlens_k of ``flashlib.attention_varlen``, which say the same with causal and
    window.
    """

    ndim = 4  # transformers takes a mask of 2 dimensions for padding

    def __init__(self, causal, window=None, sizes=None, packed=None, make=None):
        self.causal, self.window, self.sizes = causal, window, sizes
        self.packed, self.make, self.made = packed, make, {}

    @torch.compiler.disable
    def on(self, device):
        """What make returns, which the layers of a model share."""
        if device not in self.made:
            self.made[device] = self.make(device)
        return self.made[device]

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
    is_causal=None, sliding_window=None, softcap=None, position_bias=None, s_aux=None,
    **kwargs,
):  # fmt: skip
    """Attention as transformers calls it: query ``[B, H, T_q, d]``, key ``[B, H_kv,
    T_k, d]``, value ``[B, H_kv, T_k, d_v]``; returns ``(o [B, T_q, H, d_v], None)``.

    The mask alone says which keys a query sees. It is what the function
    ``attention_mask`` returns; or None, which hides nothing; or a tensor of 4
    dimensions that broadcasts to ``[B, H, T_q, T_k]``, which is read (this waits for
    the GPU): True where a query sees a key, or numbers that are added to the scores and
    hide a key where they are the least of their dtype. A query that sees no key gets 0,
    where 'eager' gets the mean of all values. position_bias, softcap and s_aux are
    bias, softcap and sinks of ``flashlib.attention``.

    Raises ValueError for another mask, for None where is_causal (or if that is None,
    ``module.is_causal``) or sliding_window ask for one, and for every further argument
    that is set and not known to be harmless: head masks, chosen keys, attention weights
    as an output. ``flashlib.attention`` checks the rest.
    """
    for name, extra in kwargs.items():
        if name not in _HARMLESS and extra is not None and extra is not False:
            got = list(extra.shape) if isinstance(extra, torch.Tensor) else extra
            cure = "use 'eager' if the model needs it"
            raise ValueError(f"{name}: expected None or False, got {got}; {cure}")
    mask, bias = attention_mask, position_bias
    if not isinstance(mask, Mask):
        mask, added = _read(mask, module, query, key, is_causal, sliding_window)
        both = bias is not None and added is not None
        bias = bias + added if both else added if bias is None else bias
    if mask.sizes is not None:
        n = _check_sizes(mask, query, key)
        key, value = key[:, :, :n], value[:, :, :n]
        bias = bias if bias is None else bias[..., :n]
    options = {"causal": mask.causal, "window": mask.window}
    options |= {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    options |= {"dropout": dropout}
    if mask.packed is not None and bias is None:
        return _attend_packed(mask.packed, query, key, value, options), None
    if mask.make is not None:
        options |= {"causal": False, "window": None, "mask": mask.on(query.device)}
    o = api.attention(query, key, value, bias=bias, **options)
    return o.transpose(1, 2).contiguous(), None


def _read(mask, module, query, key, is_causal, sliding_window):
    """The Mask that a tensor or None stands for, and what it adds to scores or None;
    raises ValueError if there is no Mask.
    """
    T_q, T_k = query.shape[2], key.shape[2]
    if mask is None:
        # Without a mask, 'eager' hides nothing, but 'sdpa' does what is_causal says.
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        if (causal and T_q > 1) or sliding_window:
            got = f"None, is_causal={causal} and sliding_window={sliding_window}"
            raise ValueError(f"attention_mask: expected the mask of a model, got {got}")
        return Mask(False), None
    sizes = (*query.shape[:3], T_k)
    if not _broadcasts(mask, sizes):
        expected = f"booleans or floats that broadcast to [B, H, T_q, T_k] = {[*sizes]}"
        got = type(mask).__name__
        if isinstance(mask, torch.Tensor):
            got = f"{list(mask.shape)} of {mask.dtype}"
        raise ValueError(f"attention_mask: expected {expected}, got {got}")
    seen, added = mask, None
    if mask.dtype != torch.bool:
        seen = ~(mask <= torch.finfo(mask.dtype).min)
        if mask.requires_grad or bool(((mask != 0) & seen).any()):
            added = mask.masked_fill(~seen, 0.0)
    if bool(seen.all()):
        return Mask(False), added
    if bool((seen == seen.new_ones(T_q, T_k).tril(T_k - T_q)).all()):
        return Mask(True), added
    return Mask(False, make=seen.to), added


def _broadcasts(mask, sizes):
    """Whether the mask is a tensor that can be broadcast to these sizes and added."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != len(sizes):
        return False
    fits = all(n in (1, size) for n, size in zip(mask.shape, sizes, strict=True))
    return fits and (mask.dtype == torch.bool or mask.is_floating_point())


def _check_sizes(mask, query, key):
    """The number of keys that a Mask speaks of; raises ValueError for other tensors,
    such as keys that a model adds to those of its mask.
    """
    (B, T_q, T_k, n), sizes = mask.sizes, [len(query), query.shape[2], key.shape[2]]
    if mask.make is None:
        B = sizes[0]  # all rows see the same
    if sizes[:2] != [B, T_q] or not n <= sizes[2] <= T_k:
        expected, got = f"[B, T_q, T_k] = {sizes}", [B, T_q, T_k]
        raise ValueError(f"attention_mask: expected {expected}, got {got}")
    return n


def _attend_packed(packed, query, key, value, options):
    """O ``[B, T_q, H, d_v]`` by the packed sequences of a Mask."""
    B, T_q, n = len(query), query.shape[2], key.shape[2]
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    starts = (x.to(query.device) for x in packed)  # layers may be on several devices
    o = api.attention_varlen(*rows, *starts, T_q, n, **options)
    return o.unflatten(0, (B, T_q))


# It decides by values, which a trace does not have.
@torch.compiler.disable
def attention_mask(
    batch_size, kv_length, mask_function, attention_mask=None, q_length=None,
    q_offset=0, kv_offset=0, cache_position=None, **kwargs,
):  # fmt: skip
    """The Mask that ``attention_forward`` gets. It is packed where padding at the ends
    of rows or packed sequences hide keys, and a function where others are hidden: by
    padding between tokens, by chunks, by blocks, by windows in padded encoders. A
    mask_function that has parts of a model's own becomes a boolean tensor.

    transformers 5 gives the place of the queries by q_length and q_offset, transformers
    4 by the tensor cache_position ``[T_q]``. attention_mask ``[B, at least n]`` is
    False or 0 at padding; n is the number of keys up to that of the last query, or of
    all keys where attention is not causal.

    Raises ValueError for an attention_mask of other sizes.
    """
    if isinstance(attention_mask, Mask):  # generate made it, for a static cache
        return attention_mask
    B, padding = batch_size, attention_mask
    if padding is not None and (padding.ndim != 2 or len(padding) != B):
        got = list(padding.shape)
        raise ValueError(f"attention_mask: expected [B, T] with B = {B}, got {got}")
    where = {"q_length": q_length, "q_offset": q_offset}
    if cache_position is not None:
        where = {"cache_position": cache_position}
        q_length, q_offset = len(cache_position), cache_position[0]
    T_q, first = q_length, int(q_offset) - kv_offset  # the key of the first query
    listed = list(_parts(mask_function))  # a kind of part may occur twice
    parts = dict(listed)
    causal, (ids,) = _CAUSAL in parts, parts.get(_PACKED, [None])
    n = first + T_q if causal else kv_length
    # Query i of a flashlib.masks.Mask is at key i + n - T_q, a chunk of a packed
    # sequence counts the positions in it, and a block may go on after key n.
    if (
        set(parts) - _KNOWN
        or (set(parts) != {_BIDIRECTIONAL} and first != n - T_q)
        or {_CHUNKS, _PACKED} <= set(parts)
        or (_OR in parts and n < kv_length)
    ):
        from transformers import AttentionMaskInterface

        skip = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
        options = kwargs | where | dict.fromkeys(skip, False)
        options |= {"mask_function": mask_function, "attention_mask": attention_mask}
        options |= {"kv_length": kv_length, "kv_offset": kv_offset}
        seen = AttentionMaskInterface()["sdpa"](batch_size=B, **options)
        return Mask(False, sizes=(B, T_q, kv_length, kv_length), make=seen.to)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + n] != 0
        padding = pad(padding, (0, n - padding.shape[1]))
        padding = None if bool(padding.all()) else padding
    if _CHUNKS in parts and kv_offset + n <= parts[_CHUNKS][0]:
        del parts[_CHUNKS]  # all tokens are in the first chunk
    ids = ids if ids is not None and bool(ids.any()) else None
    window = None
    if _WINDOW in parts:
        window = (parts[_WINDOW][0] - 1, 0)
    elif _BOTH_SIDES in parts:
        window = (parts[_BOTH_SIDES][0],) * 2
    closed = set(parts) <= _CLOSED and len(dict(listed)) == len(listed)
    sizes = (B, T_q, kv_length, n)
    if closed and padding is None and ids is None:
        return Mask(causal, window, sizes)

    def make(device):
        mask = _translated(mask_function, kv_offset, n, device)
        return mask if padding is None else mask & masks.Mask(_at, padding.to(device))

    packed = None
    if closed and (causal or window is None) and (padding is None or ids is None):
        sequences = ids if padding is None else padding
        if padding is None or not _has_holes(padding):
            packed = tuple(_starts(sequences, T_q, causal))
    return Mask(causal, window, sizes, packed, make)


def _has_holes(seen):
    """Whether padding is between two tokens of a row."""
    begins = seen.int().diff(dim=1, prepend=torch.zeros_like(seen[:, :1]).int()) == 1
    return int(begins.sum(1).max()) > 1


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


def _named(function):
    """What transformers calls a function for masks, and what it was made with."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return function, ()  # a model's own
    cells = function.__closure__ or ()
    return function.__qualname__.split(".")[0], [x.cell_contents for x in cells]


def _parts(function):
    """(name, what it was made with) of each function that a mask_function combines, and
    of _OR.
    """
    name, made_with = _named(function)
    if name == "remap_positions_for_packed_sequence":
        yield from _parts(made_with[0])
    elif name in ("and_masks", _OR):
        if name == _OR:
            yield name, made_with
        for part in made_with[0]:
            yield from _parts(part)
    else:
        yield name, made_with


def _at(b, h, p, j, seen):
    return at(seen, b, j)


def _all(b, h, p, j):
    return j >= 0


def _chunks(b, h, p, j, size, starts):
    return div(j - at(starts, b), size) == div(p - at(starts, b), size)


def _blocks(b, h, p, j, ids):
    return (at(ids, b, p) == at(ids, b, j)) & (at(ids, b, p) >= 0)


def _translated(function, offset, n, device):
    """The :class:`flashlib.masks.Mask` on a device of a mask_function, for n keys of
    which the first is the key with this number.
    """
    name, made_with = _named(function)
    if name in ("and_masks", _OR):
        combine = operator.or_ if name == _OR else operator.and_
        parts = (_translated(part, offset, n, device) for part in made_with[0])
        return functools.reduce(combine, parts)
    if name == "remap_positions_for_packed_sequence":
        # Windows and causality compare positions within a sequence only.
        return _translated(made_with[0], offset, n, device)

    def chunks(size, *left):  # older versions do not say how much padding is there
        left = left[0] if left else torch.zeros(1, dtype=torch.int64)
        return masks.Mask(_chunks, size, (left - offset).to(device))

    def blocks(ids):
        return masks.Mask(_blocks, ids[:, offset : offset + n].to(device))

    make = {
        _CAUSAL: masks.causal,
        _BIDIRECTIONAL: lambda: masks.Mask(_all),
        _WINDOW: lambda width: masks.window(width - 1, None),
        _BOTH_SIDES: lambda width: masks.window(width, width),
        _PACKED: lambda ids: masks.documents(ids.to(device)),
        _CHUNKS: chunks,
        _BLOCKS: blocks,
    }
    return make[name](*made_with)
