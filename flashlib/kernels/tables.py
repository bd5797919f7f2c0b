"""Tables of configurations: which tile a kernel uses for a problem on a device."""

from typing import NamedTuple

import torch
import triton

from flashlib.kernels import INTERPRETED, padded
from flashlib.kernels.descriptors import describable
from flashlib.kernels.tiles import Tile
from flashlib.plain_checks import wrong


class Configuration(NamedTuple):
    """One row of a kernel's table: the problems it is meant for, its tiles, and the
    shared memory it needs. The first row that fits a problem is used.
    """

    architectures: tuple[int, ...]  # compute capability times ten
    bits: int  # of one element of q, k and v
    d: int  # the largest padded head dimension of keys and values, or SPLIT
    BLOCK_Q: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    descriptor: bool  # read through tensor descriptors, if strides allow it
    shared_bytes: int  # upper bound on what the compiler asks for, tested
    # True: only with a causal mask; False: only without one; None: both.
    causal: bool | None = None


# The width of keys that have tiles of 128 columns and of 64, where a table has a row
# for it; values then have at most 128 columns.
SPLIT = 192

# Interpreter cost is per operation, so use large tiles.
INTERPRETER = Configuration((), 0, 256, 64, 64, 4, 1, False, 0)
# Where Triton multiplies 16-bit elements on tensor cores.
TENSOR_CORES = (80, 86, 89, 90, 100, 120)

# Rows without tensor cores, of the forward kernels and of the backward ones: for
# float32, which is multiplied without rounding to TF32, and for sm_75, for which Triton
# has none. Both operands of a product then pass through registers, so tiles are small.
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

# Rows without descriptors of the backward kernels that own a block of keys, and of
# those that own a block of queries; both fit 99 KiB of shared memory.
OWN_KEYS = (
    Configuration(TENSOR_CORES, 16, 64, 32, 64, 4, 2, False, 101_000),
    Configuration(TENSOR_CORES, 16, 128, 32, 64, 8, 2, False, 101_000),
    Configuration(TENSOR_CORES, 16, SPLIT, 32, 32, 8, 1, False, 101_000),
    Configuration(TENSOR_CORES, 16, 256, 32, 32, 8, 1, False, 101_000),
    *BACKWARD_NO_TENSOR_CORES,
    Configuration((75,), 32, 256, 16, 8, 8, 1, False, 50_000),
)
OWN_QUERIES = (
    Configuration(TENSOR_CORES, 16, 64, 64, 64, 4, 2, False, 101_000),
    Configuration((80, 86, 89, 90, 120), 16, 128, 64, 64, 8, 2, False, 101_000),
    Configuration((100,), 16, 128, 64, 64, 8, 2, False, 116_000),
    Configuration(TENSOR_CORES, 16, SPLIT, 32, 32, 8, 1, False, 101_000),
    Configuration(TENSOR_CORES, 16, 256, 32, 32, 8, 1, False, 101_000),
    *BACKWARD_NO_TENSOR_CORES,
    Configuration((75,), 32, 256, 16, 16, 8, 1, False, 65_536),
)


def unsplit(table):
    """The rows of a table for kernels that read all columns of Q or K in one tile."""
    return tuple(row for row in table if row.d != SPLIT)


def with_and_without_descriptors(*rows):
    """The rows, and after them the same ones for tensors that TMA cannot read."""
    return *rows, *(row._replace(descriptor=False) for row in rows)


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
        expected = f"a GPU with a tile of {name} for {bits} bits and {d} columns"
        got = f"compute capability {capability / 10}, {shared_bytes} bytes of shared"
        raise wrong("q", expected, f"{got} memory")
    return rows[0]


def width(tensors):
    """The d by which a row is chosen, from the widths of keys (those of the first
    tensor) and of values (the last one): SPLIT, or the larger of both, padded.
    """
    d, d_v = tensors[0].shape[-1], tensors[-1].shape[-1]
    return SPLIT if 128 < d <= SPLIT and d_v <= 128 else max(padded(d), padded(d_v))


def problem(tensors):
    """What decides which rows fit the tensors: the bits of an element, ``width``, the
    compute capability times ten, the bytes of shared memory that a program may use, and
    whether every tensor allows descriptors.
    """
    device = torch.cuda.get_device_properties(tensors[0].device)
    return (
        tensors[0].element_size() * 8,
        width(tensors),
        device.major * 10 + device.minor,
        device.shared_memory_per_block_optin,
        all(describable(x) for x in tensors),
    )


def configuration(name, table, tensors, causal):
    """The row of a kernel's table for the tensors that it reads, on their device."""
    if INTERPRETED:
        split = width(tensors) == SPLIT and any(row.d == SPLIT for row in table)
        return INTERPRETER._replace(d=SPLIT) if split else INTERPRETER
    return fitting(name, table, *problem(tensors), causal)


def value_columns(d, d_v):
    """The padded width of a tile of values, and of the output.

    Where keys are at least 64 wide, values are padded to at least 64 too: with narrower
    ones Triton 3.6 lets the product P V read outside of shared memory on sm_90 (found
    by compute-sanitizer on an H200).
    """
    return max(padded(d_v), min(padded(d), 64))


def compiled_for(config, n, backward=False):
    """The options of a launch with a row of a table, for the Sizes n. A tile that is
    the second factor of a product is as wide as ``value_columns`` says: that of values
    in a forward pass, in a backward pass also those of queries and keys.
    """
    d = 128 if config.d == SPLIT else n.d
    BLOCK_D = value_columns(n.d_v, d) if backward else padded(d)
    sides = (config.BLOCK_Q, config.BLOCK_K, BLOCK_D, value_columns(d, n.d_v))
    return {
        "TILE": Tile(*sides, config.descriptor, SPLIT - 128 if d < n.d else 0),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


FASTEST = {}  # {what tuned() was asked: the row that was the fastest}


def tuned(name, table, tensors, causal, launch_row):
    """The fastest row of a kernel's table for the tensors that it reads, on their GPU.

    The first call compiles and times every row that fits by ``launch_row(*tensors,
    row)`` with random tensors like these, which takes some seconds. Later calls in this
    process reuse the result for the same kernel, device, dtype, padded head dimensions
    and mask, for lengths with the same next power of two, and for tensors that
    descriptors can read, or cannot, as these. Raises ValueError where no row fits.
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
                row: timed_ms(lambda row=row: launch_row(*drawn, row))
                for row in rows.values()
            }
            FASTEST[asked] = min(times, key=times.get)
    return FASTEST[asked]


def random_like(x):
    """A random tensor with the sizes, strides, dtype and alignment of x."""
    extent = 1 + sum(
        max(0, n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)
    )
    past = x.data_ptr() // x.element_size()
    memory = torch.randn(past + extent, dtype=x.dtype, device=x.device)
    return memory[past:].as_strided(x.shape, x.stride())


def timed_ms(run):
    """Median milliseconds of a launch, with an empty L2 cache."""
    return triton.testing.do_bench(run, return_mode="median")
