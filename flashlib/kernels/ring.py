"""Ring attention's merge: a finished part of the keys joins what a rank has so far.

Both are finished results, ``(O, L)``, and join by the law of softmax in pieces,
``eq-online-lse-merge``. Where more than two parts are merged, the running O is in
float32.
"""

import triton
import triton.language as tl

from flashlib import plans
from flashlib.kernels.tiles import Rows, as_rows, pointers, row_pointers

MERGED_ROWS = 32  # by a program


@triton.jit(do_not_specialize=["T"])
def merge_kernel(
    o: Rows, lse: Rows, o_part: Rows, lse_part: Rows, H, T, d,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One program merges ROWS rows of one head of o_part [B, H, T, d] and lse_part [B,
    H, T] into o and lse, in place.
    """
    blocks = tl.cdiv(T, ROWS)
    head = tl.program_id(0) // blocks
    b, h = head // H, head % H
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    real = i < T
    inside = real[:, None] & (cols < d)[None, :]
    into, from_ = pointers(o, b, h, i, cols), pointers(o_part, b, h, i, cols)
    row, row_part = row_pointers(lse, b, h, i), row_pointers(lse_part, b, h, i)
    L = tl.load(row, mask=real, other=0.0)
    L_part = tl.load(row_part, mask=real, other=0.0)
    top = tl.maximum(L, L_part)
    # A row that neither has seen keeps O = 0 and L = -inf: -inf - -inf is NaN.
    shift = tl.where(top == -float("inf"), 0.0, top)
    mass, mass_part = tl.exp(L - shift), tl.exp(L_part - shift)
    both = mass + mass_part
    share = tl.where(both == 0.0, 0.0, mass_part / both)[:, None]
    old = tl.load(into, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(from_, mask=inside, other=0.0).to(tl.float32)
    # old + share (new - old) keeps old, to the bit, where the part has no weight.
    tl.store(into, old + share * (new - old), mask=inside)
    tl.store(row, shift + tl.log(both), mask=real)


@plans.planned
def merge(o, lse, o_part, lse_part):
    """Merge o_part ``[B, H, T, d_v]`` and lse_part ``[B, H, T]`` float32 into o and lse
    of the same sizes, in place; any strides. Returns o and lse.
    """
    B, H, T, d = o.shape
    programs = B * H * triton.cdiv(T, MERGED_ROWS)
    plans.launch(
        merge_kernel, o, programs, *as_rows(o, lse, o_part, lse_part), H, T, d,
        ROWS=MERGED_ROWS, COLS=triton.next_power_of_2(d), num_warps=4,
    )  # fmt: skip
    return o, lse
