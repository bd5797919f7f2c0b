"""How the forward kernel for Hopper divides its work: the tiles of hopper.py and how a
launcher chooses one.

Chapter *Hopper*.
"""

from typing import NamedTuple


class ForwardTile(NamedTuple):
    """How a program computes: its consumers, the keys of a block, the slots for blocks
    of K and of V, and whether consumers hold Q in registers.
    """

    CONSUMERS: int
    BLOCK_K: int
    SLOTS: int
    HOLD_Q: bool


# {d: tiles for short sequences with a causal mask, for others, for long ones}. Rows of
# Q that a consumer holds in registers are not read from shared memory again for every
# block. Three consumers, and those of d = 256, have no registers left for them. From
# d = 128 on a consumer needs 240, so a third one does not fit.
TILES = {
    d: tuple(ForwardTile(*row) for row in rows)
    for d, rows in {
        64: ((1, 64, 3, True), (2, 128, 4, True), (3, 128, 3, False)),
        128: ((2, 64, 4, True), (2, 128, 2, True), (2, 128, 2, True)),
        192: ((2, 64, 4, False), (2, 128, 2, False), (2, 128, 2, False)),
        256: ((2, 64, 2, False),) * 3,
    }.items()
}
# {CONSUMERS: (programs that fit on a multiprocessor, options)}: a program begins with
# maxnreg registers per thread, and the producer gives most of its own to the consumers.
# All programs together have the 65536 of a multiprocessor.
PROGRAMS = {
    1: (3, {"CONSUMER_REGISTERS": 136, "PRODUCER_REGISTERS": 24, "maxnreg": 80}),
    2: (1, {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24, "maxnreg": 168}),
    3: (1, {"CONSUMER_REGISTERS": 160, "PRODUCER_REGISTERS": 24, "maxnreg": 128}),
}


def choose_tile(
    d, T_q, causal, left=None, packed=False, masked=False, changed=False, biased=False,
    narrow=False,
):  # fmt: skip
    """The ForwardTile for a problem, as measured on an H200: small ones for short
    sequences or windows with a causal mask and for packed sequences, where much of a
    large tile would be above the diagonal or behind the end of its sequence. A narrow
    mask (``flashlib.masks.is_narrow``) gets small ones at every length: with them eight
    documents in 8,192 tokens took 0.73 times as long at d = 64. A mask that is a
    function counts as causal, and allows no three consumers: the sides of a tile that
    is classified are powers of two. A changed score (a softcap, a function or
    a bias) needs the registers of a third consumer, or those that hold Q. Where tiles
    of a bias are copied, d = 64 has a slot less: a tenth faster with a causal mask,
    about as fast without one.
    """
    short, middle, long = TILES[d]
    reach = T_q if left is None else min(T_q, left)
    tile = long
    if narrow or reach < (2048 if causal or masked else 512 if packed else 0):
        tile = short
    elif masked or changed or reach < (16384 if causal else 2048):
        tile = middle
    if changed and (d == 128 or tile.CONSUMERS == 1):
        tile = tile._replace(HOLD_Q=False)
    if biased and d == 64:
        tile = tile._replace(SLOTS=3)
    return tile
