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
from flashlib.score_mods import Lists, ScoreMod, mask_of


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

        if torch.compiler.is_compiling():
            expected = "outside of torch.compile, and passed in"
            raise NotImplementedError(
                f"flashlib.block_lists.BlockLists: expected {expected}"
            )
        checks.check_flags(backward=backward)
        checks.check_qkv(q, k, v)
        if isinstance(mask, BlockLists):
            expected = "a flashlib.masks.Mask or a boolean tensor"
            raise wrong("mask", expected, type(mask).__name__, TypeError)
        self.mask = checks.check_mask(mask, q, k, None)
        self.sizes, self.device = sizes(q, k), q.device
        checks.check_captured("mask", self.mask.tensors(), q)
        about = mask_of(self.mask)
        checks.check_captured_count(about, None)
        wanted = wanted_lists(q, k, v, about, backward)
        own = tuple(dict.fromkeys(wanted.values()))
        made = dict(zip(own, tile_lists.made_once(q, k, v, about, own), strict=True))
        self.lists = Lists(**{name: made[how] for name, how in wanted.items()})

    def __repr__(self):
        return f"<BlockLists {self.mask!r} [B, H, H_kv, T_q, T_k] = {self.sizes}>"

    def visible(self, *sizes, **options):
        """What ``Mask.visible`` returns for its Mask."""
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
    """{name in Lists: (find, BLOCK_Q, BLOCK_K) of tile_lists.made_once}, of the
    lists that calls with tensors like these and a MaskOf need.
    """
    from flashlib.kernels import hopper_host, masks, masks_backward, tile_lists
    from flashlib.kernels.inputs import widened
    from flashlib.kernels.score_arguments import configuration

    tensors = widened(q, k, v)  # an output gradient is taken to be like q
    wanted = {}
    for name, find, table in (
        ("o", tile_lists.of_queries, masks.FORWARD),
        ("dkdv", tile_lists.of_keys, masks_backward.KEYS),
        ("dq", tile_lists.of_queries, masks_backward.QUERIES),
    ):
        row = configuration("masks", table, tensors, None)
        wanted[name] = find, row.BLOCK_Q, row.BLOCK_K
    empty = q.numel() == 0 or k.numel() == 0
    problem = q, k, v, ScoreMod(1.0, mask=mask)
    if not empty and hopper_host.forward_refusal(*problem) is None:
        from flashlib.kernels import hopper, hopper_backward

        how = {"masked": True, "narrow": mask.narrow(False)}
        tile = hopper.choose_tile(q.shape[3], q.shape[2], False, **how)
        rows = tile.CONSUMERS * hopper.ROWS.value
        wanted["hopper_o"] = tile_lists.of_queries, rows, tile.BLOCK_K
        if hopper_host.backward_refusal(*problem) is None:
            sides = hopper_backward.SIDES[q.shape[3]]
            wanted["hopper_gradients"] = (tile_lists.in_order, *sides)
    if not backward:
        wanted = {name: wanted[name] for name in ("o", "hopper_o") if name in wanted}
    return wanted
