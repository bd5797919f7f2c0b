"""What launchers share: the table of configurations, how a row is chosen or found by timing, and tensor
descriptors.
"""

from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from flashlib.kernels import INTERPRETED, on_device, padded


class Configuration(NamedTuple):
    """One row of a kernel's table: which problems it is meant for, its tiles, the shared memory it needs."""

    architectures: tuple[int, ...]  # compute capability times ten
    bits: int  # of one element of q, k and v
    d: int  # the largest padded head dimension, of keys and of values
    BLOCK_Q: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    descriptor: bool  # read through tensor descriptors (TMA); for tensors whose strides allow it
    shared_bytes: int  # an upper bound on what the compiler asks for, tested in tests/test_compile.py
    causal: bool | None = None  # with a causal mask only, without only, or (None) either way


# Every step of the interpreter costs milliseconds, whatever its size: large tiles, few steps.
INTERPRETER = Configuration((), 0, 256, 64, 64, 4, 1, False, 0)


def fitting(name, table, bits, d, capability, shared_bytes, descriptors, causal):
    """The first row of a kernel's table for a problem and a device; newer devices use the rows of the latest
    architecture before them.

    name of the kernel for the message, bits of an element, d padded head dimension, capability times
    ten, shared_bytes that a program may use on the device, descriptors: whether every tensor allows them.
    Raises ValueError where no row fits.
    """
    rows = all_fitting(table, bits, d, capability, shared_bytes, descriptors, causal)
    if not rows:
        raise ValueError(
            f"{name}: no configuration for {bits}-bit elements, head dimension {d} (padded), compute "
            f"capability {capability / 10} and {shared_bytes} bytes of shared memory"
        )
    return rows[0]


def all_fitting(table, bits, d, capability, shared_bytes, descriptors, causal):
    """All rows of a table for a problem and a device, in the order of the table; as ``fitting``."""
    listed = {architecture for row in table for architecture in row.architectures}
    architecture = max((a for a in listed if a <= capability), default=None)
    return [
        row
        for row in table
        if architecture in row.architectures
        and row.bits == bits
        and row.d >= d
        and row.causal in (None, causal)
        and row.shared_bytes <= shared_bytes
        and row.descriptor <= descriptors
    ]


def configuration(name, table, tensors, causal):
    """The row of a kernel's table for the tensors ``[B, H, T, d]`` that it reads, on their device.

    Raises ValueError where no row fits.
    """
    if INTERPRETED:
        return INTERPRETER
    return fitting(name, table, *problem(tensors), causal)


def problem(tensors):
    """What decides which rows fit: bits of an element, largest padded head dimension, compute capability
    times ten and shared memory of the device, whether descriptors can read the tensors ``[B, H, T, d]``.
    """
    device = torch.cuda.get_device_properties(tensors[0].device)
    bits, d = tensors[0].element_size() * 8, max(padded(x.shape[3]) for x in tensors)
    descriptors = all(describable(x) for x in tensors)
    return bits, d, device.major * 10 + device.minor, device.shared_memory_per_block_optin, descriptors


# {what tuned() was asked: the row that was the fastest}
FASTEST = {}


def tuned(name, table, tensors, causal, run):
    """The fastest row of a kernel's table for the tensors ``[B, H, T, d]`` that it reads, on their GPU.

    The first time, every row that fits is compiled and timed by ``run(row)``, which takes some seconds.
    What was found holds for this process and the same kernel, device, dtype, padded head dimensions and mask,
    lengths with the same next power of two, and tensors that descriptors can read, or not.
    Raises ValueError where no row fits.
    """
    sizes = tuple((padded(x.shape[3]), triton.next_power_of_2(x.shape[2])) for x in tensors)
    fits = problem(tensors)
    asked = (name, tensors[0].device, tensors[0].dtype, sizes, causal, fits)
    if asked not in FASTEST:
        fitting(name, table, *fits, causal)  # raises where there is nothing to choose from
        rows = {}
        for row in all_fitting(table, *fits, causal):
            rows.setdefault(row[3:8], row)  # one row for each choice of tiles, warps, stages and descriptors
        with on_device(tensors[0]):
            FASTEST[asked] = min(rows.values(), key=lambda row: timed_ms(lambda: run(row)))
    return FASTEST[asked]


def timed_ms(run):
    """Median milliseconds of a launch, with an empty L2 cache."""
    return triton.testing.do_bench(run, return_mode="median")


def value_columns(d, d_v):
    """The padded width of a tile of values, and of the output, for head dimensions d and d_v.

    At least 64 where the keys are as wide: with narrower values beside them Triton 3.6 lets the second
    product read outside of shared memory on sm_90 (found by compute-sanitizer on an H200).
    """
    return max(padded(d_v), min(padded(d), 64))


def describable(x):
    """Whether TMA can read x: last stride 1, the rest and the address in multiples of 16 bytes."""
    if x.numel() == 0:
        return False
    used = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    in_bytes = [stride * x.element_size() for stride in used[:-1]]
    return used[-1] == 1 and x.data_ptr() % 16 == 0 and all(n > 0 and n % 16 == 0 for n in in_bytes)


def descriptor(x, rows, cols):
    """A descriptor that reads tiles [1, 1, rows, cols] of x ``[B, H, T, d]``, with zeros outside x."""
    # The stride of a dimension of size one is never used, but must be a multiple of 16 bytes.
    strides = [stride if size > 1 else 16 for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, cols])
