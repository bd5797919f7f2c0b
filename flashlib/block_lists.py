"""Lists of tiles that are made once and used by many calls (chapter *Masks*,
``eq-masks-kinds``).

A call with a mask classifies all tiles of S and lists those that are not hidden, for
each block of queries and, in a backward pass, for each block of keys. Where several
calls have the same mask, as the layers of a model do, :class:`BlockLists` makes the
lists once:

    lists = BlockLists(masks.documents(ids) & masks.causal(), q, k, v)
    for layer in layers:
        ... flashlib.attention(q, k, v, mask=lists) ...

A call never keeps lists for another one: what is reused is what you pass.
"""

from flashlib import checks
from flashlib.plain_checks import wrong


class BlockLists:
    """A mask with the lists of its tiles, for tensors like q, k and v; the ``mask`` of
    :func:`flashlib.attention`.

    mask
        a :class:`flashlib.masks.Mask` or a boolean tensor. It holds all that hides a
        key: a call with these lists takes neither ``causal`` nor ``window``. The lists
        are those of what is in its tensors now.
    q, k, v
        tensors with the sizes, the dtype, the device and the strides of those of the
        calls, which decide how large a tile is. What is in them does not matter.
    backward
        whether to make the lists of the backward pass too, which would make its own.

    The lists are on the device of q, and nothing waits for it. On a Hopper GPU there
    are two sets of lists, for the tiles of the kernels for Hopper and for those of
    Triton's kernels; the arguments of a call decide which kernels run. Raises TypeError
    or ValueError that names the argument; NotImplementedError under torch.compile: make
    the lists outside and pass them in.
    """

    def __init__(self, mask, q, k, v, *, backward=True):
        import torch

        from flashlib.kernels import tile_lists
        from flashlib.kernels.scores import MaskOf

        if torch.compiler.is_compiling():
            expected = "outside of torch.compile, and passed in"
            raise NotImplementedError(f"flashlib.BlockLists: expected {expected}")
        checks.check_flags(backward=backward)
        checks.check_qkv(q, k, v)
        if isinstance(mask, BlockLists):
            expected = "a flashlib.masks.Mask or a boolean tensor"
            raise wrong("mask", expected, type(mask).__name__, TypeError)
        self.mask = checks.check_mask(mask, q, k, None)
        self.sizes, self.device = sizes(q, k), q.device
        checks.check_table_devices("mask", self.mask.tensors(), q)
        about = MaskOf(self.mask.key, self.mask.depends, self.mask.tensors())
        checks.check_table_count(about, None)
        wanted = wanted_lists(q, k, v, about, backward)
        own = tuple(x for x in dict.fromkeys(wanted) if x is not None)
        lists = tile_lists.made_once(q, k, v, about, own)
        made = dict(zip(own, lists, strict=True))
        self.lists = tuple(made.get(x) for x in wanted)

    def visible(self, *sizes, **options):
        """As that of the Mask."""
        return self.mask.visible(*sizes, **options)

    def require(self, q, k):
        """Raise ValueError unless the lists are for such tensors."""
        if q.device != self.device:
            raise wrong("mask", f"lists on the device of q, {q.device}", self.device)
        if sizes(q, k) != self.sizes:
            expected = f"lists for [B, H, H_kv, T_q, T_k] = {sizes(q, k)}"
            raise wrong("mask", expected, self.sizes)


def sizes(q, k):
    """What the lists depend on in the sizes of q and k."""
    return [*q.shape[:2], k.shape[1], q.shape[2], k.shape[2]]


def wanted_lists(q, k, v, mask, backward):
    """(find, BLOCK_Q, BLOCK_K) of tile_lists.made_once for each list of a MaskOf, or
    None where tensors like these need no such list.
    """
    from flashlib.kernels import hopper_host, masks, scores, tile_lists

    finds = tile_lists.of_queries, tile_lists.of_keys, tile_lists.of_queries
    sides = masks.sides_of_tiles(q, k, v)
    wanted = [(find, *own) for find, own in zip(finds, sides, strict=True)]
    wanted += [None] * 2
    empty = q.numel() == 0 or k.numel() == 0
    problem = q, k, v, scores.ScoreMod(1.0, mask=mask)
    if not empty and hopper_host.forward_refusal(*problem) is None:
        from flashlib.kernels import hopper, hopper_masks

        tile = hopper.choose_tile(q.shape[3], q.shape[2], False, masked=True)
        rows = tile.CONSUMERS * hopper.ROWS.value
        wanted[3] = tile_lists.of_queries, rows, tile.BLOCK_K
        if hopper_host.backward_refusal(*problem) is None:
            wanted[4] = (tile_lists.in_order, *hopper_masks.SIDES[q.shape[3]])
    if not backward:
        wanted[1] = wanted[2] = wanted[4] = None
    return wanted
