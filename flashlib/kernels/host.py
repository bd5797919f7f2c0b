"""What launchers share: the device, dtypes and padding, the tables of configurations,
tensor descriptors, and what the Hopper kernels can take.

A descriptor tells the copy engine of the GPU (TMA) where a tensor is stored. One
instruction then copies a whole tile between device memory and shared memory while the
warps do something else (chapter *Hopper*).
"""

from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from flashlib.kernels import INTERPRETED, padded
from flashlib.kernels.tiles import Sizes, Tile
from flashlib.plans import empty_like, new_results

# -- dtype and padding


def computed_dtype(dtype):
    """The dtype in which a kernel computes on tensors of the given dtype: the same,
    except that bfloat16 becomes float32 under the interpreter, which would multiply
    its bit patterns. The launcher rounds the result.
    """
    return torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype


def widened(*tensors):
    """The tensors in their computed dtype; no copy where that is their own."""
    return tuple(x.to(computed_dtype(x.dtype)) for x in tensors)


def value_columns(d, d_v):
    """The padded width of a tile of values, and of the output.

    Where keys are at least 64 wide, values are padded to at least 64 too: with narrower
    ones Triton 3.6 lets the product P V read outside of shared memory on sm_90 (found by
    compute-sanitizer on an H200).
    """
    return max(padded(d_v), min(padded(d), 64))


def sizes(q, k, v):
    """The Sizes of a problem."""
    (_, H, T_q, d), (_, H_kv, T_k, d_v) = q.shape, v.shape
    return Sizes(H, H // H_kv, T_q, T_k, d, d_v)


def new_like(*tensors):
    """A new tensor, not filled, in the memory order of each of these."""
    return tuple(empty_like(x, x.shape[-1]) for x in tensors)


def forward_tensors(q, k, v, scale):
    """``(q, k, v, scale, o, lse)`` as forward kernels take them, of batches or packed: q,
    k, v in their computed dtype, scale at least 0, o and lse new.
    """
    q, k, v = widened(q, k, v)
    if scale < 0.0:
        q, scale = -q, -scale  # the kernels take the maximum before they scale
    return q, k, v, scale, *new_results(q, v)


# -- configurations


class Configuration(NamedTuple):
    """One row of a kernel's table: the problems it is meant for, its tiles, and the
    shared memory it needs. The first row that fits a problem is used.
    """

    architectures: tuple[int, ...]  # compute capability times ten
    bits: int  # of one element of q, k and v
    d: int  # a power of two: the largest padded head dimension of keys and values
    BLOCK_Q: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    descriptor: bool  # read through tensor descriptors, if strides allow it
    shared_bytes: int  # upper bound on what the compiler asks for, tested
    # True: only with a causal mask; False: only without one; None: both.
    causal: bool | None = None


# Interpreter cost is per operation, so use large tiles.
INTERPRETER = Configuration((), 0, 256, 64, 64, 4, 1, False, 0)
# Where Triton multiplies 16-bit elements on tensor cores.
TENSOR_CORES = (80, 86, 89, 90, 100, 120)

# Rows without tensor cores, of the forward kernels and of the backward ones: for float32,
# which is multiplied without rounding to TF32, and for sm_75, for which Triton has none.
# Both operands of a product then pass through registers, so tiles are small.
FORWARD_NO_TENSOR_CORES = (
    Configuration((75,), 16, 128, 16, 32, 4, 1, False, 65_000),
    Configuration((75,), 16, 256, 16, 16, 8, 1, False, 65_000),
    Configuration((75, *TENSOR_CORES), 32, 64, 32, 32, 4, 1, False, 65_000),
    Configuration((75, *TENSOR_CORES), 32, 128, 16, 32, 4, 1, False, 65_000),
    Configuration((75, *TENSOR_CORES), 32, 256, 16, 16, 8, 1, False, 65_000),
)
BACKWARD_NO_TENSOR_CORES = (
    Configuration((75,), 16, 256, 16, 16, 8, 1, False, 50_000),
    Configuration((75, *TENSOR_CORES), 32, 64, 32, 32, 8, 1, False, 37_000),
    Configuration((75, *TENSOR_CORES), 32, 128, 16, 32, 8, 1, False, 52_000),
    Configuration(TENSOR_CORES, 32, 256, 16, 16, 8, 1, False, 67_000),
)


def simple_table(tensor_cores, others):
    """Rows without descriptors, from two dicts ``{d: (BLOCK_Q, BLOCK_K, num_warps,
    num_stages)}``: for products on tensor cores, and for all others (16 bits on sm_75,
    and float32, which is multiplied without rounding to TF32).

    A row must fit the shared memory of every device that it is meant for.
    """
    kinds = (
        (TENSOR_CORES, 16, tensor_cores, 101_376),
        ((75,), 16, others, 65_536),
        ((75, *TENSOR_CORES), 32, others, 65_536),
    )
    return tuple(
        Configuration(architectures, bits, d, *tile, False, shared_bytes)
        for architectures, bits, tiles, shared_bytes in kinds
        for d, tile in tiles.items()
    )


def all_fitting(table, bits, d, capability, shared_bytes, descriptors, causal):
    """All rows of a table for what :func:`problem` returns, in the order of the table.
    Newer devices use the rows of the latest architecture before them.
    """
    listed = {architecture for row in table for architecture in row.architectures}
    architecture = max((a for a in listed if a <= capability), default=None)

    def fits(row):
        of_device = architecture in row.architectures and row.bits == bits
        of_problem = row.d >= d and row.causal in (None, causal)
        within = row.shared_bytes <= shared_bytes and row.descriptor <= descriptors
        return of_device and of_problem and within

    return list(filter(fits, table))


def fitting(name, table, bits, d, capability, shared_bytes, descriptors, causal):
    """The first row of the table of kernel ``name`` for a problem and a device, as
    ``all_fitting``. Raises ValueError where no row fits.
    """
    rows = all_fitting(table, bits, d, capability, shared_bytes, descriptors, causal)
    if not rows:
        raise ValueError(
            f"{name}: no configuration for {bits}-bit elements, head dimension {d} "
            f"(padded), compute capability {capability / 10} and {shared_bytes} bytes "
            "of shared memory"
        )
    return rows[0]


def problem(tensors):
    """What decides which rows fit tensors whose last dimension is d: bits of an element,
    padded head dimension, compute capability times ten, bytes of shared memory that a
    program may use on the device, and whether every tensor allows descriptors.
    """
    device = torch.cuda.get_device_properties(tensors[0].device)
    return (
        tensors[0].element_size() * 8,
        max(padded(x.shape[-1]) for x in tensors),
        device.major * 10 + device.minor,
        device.shared_memory_per_block_optin,
        all(describable(x) for x in tensors),
    )


def configuration(name, table, tensors, causal):
    """The row of a kernel's table for the tensors that it reads, on their device."""
    if INTERPRETED:
        return INTERPRETER
    return fitting(name, table, *problem(tensors), causal)


def compiled_for(config, n, backward=False):
    """The options of a launch with a row of a table, for the Sizes n. In a backward pass
    either width is that of a second factor of a product, as narrow next to the other as
    ``value_columns`` allows; in a forward pass only that of the values is.
    """
    BLOCK_D = value_columns(n.d_v, n.d) if backward else padded(n.d)
    sides = (config.BLOCK_Q, config.BLOCK_K, BLOCK_D, value_columns(n.d, n.d_v))
    return {
        "TILE": Tile(*sides, config.descriptor),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


FASTEST = {}  # {what tuned() was asked: the row that was the fastest}


def tuned(name, table, tensors, causal, launch):
    """The fastest row of a kernel's table for the tensors that it reads, on their GPU.

    The first call compiles and times every row that fits by ``launch(*tensors, row)``
    with random tensors of these kinds, which takes some seconds. Its result holds for
    this process and the same kernel, device, dtype, padded head dimensions and mask,
    lengths with the same next power of two, and tensors that descriptors can read, or
    not. Raises ValueError where no row fits.
    """
    sizes = [(padded(x.shape[3]), triton.next_power_of_2(x.shape[2])) for x in tensors]
    fits = problem(tensors)
    x = tensors[0]
    asked = (name, x.device, x.dtype, tuple(sizes), causal, fits)
    if asked not in FASTEST:
        fitting(name, table, *fits, causal)  # raises where nothing fits
        rows = {}
        for row in all_fitting(table, *fits, causal):
            # BLOCK_Q, BLOCK_K, num_warps, num_stages and descriptor: rows that agree in
            # these compile to the same kernel.
            rows.setdefault(row[3:8], row)
        drawn = [random_like(x) for x in tensors]
        with torch.cuda.device_of(drawn[0]):
            times = {
                row: timed_ms(lambda row=row: launch(*drawn, row))
                for row in rows.values()
            }
            FASTEST[asked] = min(times, key=times.get)
    return FASTEST[asked]


def random_like(x):
    """A random tensor for which a plan would have a Spec like x."""
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    past = x.data_ptr() // x.element_size()
    memory = torch.randn(past + extent, dtype=x.dtype, device=x.device)
    return memory[past:].as_strided(x.shape, x.stride())


def timed_ms(run):
    """Median milliseconds of a launch, with an empty L2 cache."""
    return triton.testing.do_bench(run, return_mode="median")


# -- descriptors


def describable(x):
    """Whether TMA can read x: last stride 1, the other strides and the address
    multiples of 16 bytes.
    """
    if x.numel() == 0:
        return False
    used = [n for n, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    in_bytes = [stride * x.element_size() for stride in used[:-1]]
    return (
        used[-1] == 1
        and x.data_ptr() % 16 == 0
        and all(n > 0 and n % 16 == 0 for n in in_bytes)
    )


def descriptor(x, rows, cols):
    """A descriptor that reads tiles [1, 1, rows, cols] of x ``[B, H, T, d]``, with
    zeros outside x.
    """
    # The stride of a dimension of size one is never used, but must be a multiple of 16
    # bytes.
    outer = zip(x.stride()[:3], x.shape[:3], strict=True)
    strides = [stride if size > 1 else 16 for stride, size in outer]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, cols])


def operands(tensors, tile):
    """Tensors q, k, v and perhaps do as a kernel with this Tile reads them: themselves,
    or descriptors.
    """
    if not tile.DESCRIPTOR:
        return tensors
    rows = (tile.BLOCK_Q, tile.BLOCK_K, tile.BLOCK_K, tile.BLOCK_Q)
    cols = (tile.BLOCK_D, tile.BLOCK_D, tile.BLOCK_DV, tile.BLOCK_DV)
    return [descriptor(*of) for of in zip(tensors, rows, cols, strict=False)]


def packed_descriptor(x, rows):
    """A descriptor of packed x ``[total, H, d]`` that reads zeros and writes nothing
    outside of a sequence, as triton.tools.ragged_tma makes it.

    Row r of the rows before row e is at the coordinates (WRAP, e, h, WRAP - length + r).
    The fourth ends at WRAP, where the sequence does; what it is too large by, WRAP rows,
    the first takes back: WRAP times 2^34 elements are a multiple of 2^64 bytes.
    """
    # Strides of dimensions of one as in descriptor.
    row, head = (x.stride(n) if x.shape[n] > 1 else 16 for n in (0, 1))
    shape = [2**31 - 2**16, 2**31 - 2**16, x.shape[1], WRAP, x.shape[2]]
    strides = [2**34 - row, row, head, row, 1]
    return TensorDescriptor(x, shape, strides, [1, 1, 1, rows, x.shape[2]])


def gluon_descriptor(x, rows):
    """A descriptor of x ``[B, H, T, d]`` with tiles [1, 1, rows, d], or of packed x
    ``[total, H, d]``, for Gluon: outside of x, or of a packed sequence, it reads zeros
    and writes nothing.
    """
    # Gluon costs half a second to import, which only a Hopper GPU needs.
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia import hopper

    element = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    packed = x.ndim == 3
    plain = packed_descriptor(x, rows) if packed else descriptor(x, rows, x.shape[3])
    layout = gl.NVMMASharedLayout.get_default_for(plain.block_shape, element)
    return hopper.TensorDescriptor(
        x, plain.shape, plain.strides, plain.block_shape, layout
    )


# -- Hopper

WRAP = 2**30  # more than the rows of a packed tensor
HOPPER_WIDTHS = (64, 128, 256)


def hopper_refusal(q, k, v):
    """Why the Hopper kernels cannot take q, k, v ``[B, H, T, d]``, or packed, as the end
    of an error message ("expected …, got …"); None where they can.
    """
    if INTERPRETED:
        return "a Hopper GPU, got Triton's interpreter, which cannot run Gluon"
    major, minor = torch.cuda.get_device_capability(q.device)
    if (major, minor) != (9, 0):
        return f"a Hopper GPU (compute capability 9.0), got {major}.{minor}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"float16 or bfloat16, got {q.dtype}"
    d, d_v = q.shape[-1], v.shape[-1]
    if d not in HOPPER_WIDTHS or d_v != d:
        allowed = ", ".join(map(str, HOPPER_WIDTHS))
        return f"d = d_v, one of {allowed}, got d = {d}, d_v = {d_v}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.numel() > 0 and not describable(x):
            return (
                f"{name} with last stride 1, the other strides and the address "
                f"multiples of 16 bytes, got strides {tuple(x.stride())} at an address "
                f"{x.data_ptr() % 16} bytes past a multiple of 16"
            )
    return None


def hopper_forward(q, k, scale, launch):
    """O ``[B, H, T_q, d]`` in the dtype and memory order of q and L ``[B, H, T_q]`` in
    float32, contiguous, both new, which launch(q, o, lse, scale) fills; of packed q
    ``[total_q, H, d]`` O in its shape and L ``[H, total_q]``.

    It is called with tensors that are not empty and a positive scale: the kernels take
    the maximum of a row before they scale, and 0 times -inf, the score of a key that is
    not seen, is NaN.
    """
    if scale <= 0.0:
        negated = -q  # new, so it can be overwritten
        q, scale = (negated, -scale) if scale else (negated.zero_(), 1.0)
    o, lse = new_results(q, q)
    if k.numel() == 0:
        return o.zero_(), lse.fill_(-float("inf"))
    if lse.numel():
        launch(q, o, lse, scale)
    return o, lse
