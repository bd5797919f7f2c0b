"""Bytes, operations and seconds on a GPU: data sheets and the roofline (chapter *The
memory bottleneck*).

``*_bytes`` in the files of the steps are what kernels read and write if HBM delivers
each input once (in flash1 some of them once for each block of keys); ``*_seconds`` are
lower bounds of a time, at the rates of a data sheet.
"""

from typing import NamedTuple

from .forms import formula


class Transfer(NamedTuple):
    """What one kernel moves between HBM and the multiprocessors."""

    step: str
    kernel: str
    read_bytes: int
    written_bytes: int


def total_bytes(transfers):
    """Bytes that a list of Transfer reads and writes in all."""
    return sum(transfer.read_bytes + transfer.written_bytes for transfer in transfers)


@formula
def forward_flops(T, d):
    """Operations of one head with T queries and keys, by the field's convention: the
    two matrix products and nothing else, a multiply-add counted as two.
    """
    return 4 * T * T * d


def backward_flops(T, d):
    """Operations of the backward pass of one head, by the convention of Dao (2024): 2.5
    times ``forward_flops``, five products, of which S is computed a second time.
    """
    return 5 * forward_flops(T, d) // 2


class GPU(NamedTuple):
    """A data sheet. Rates are decimal, sizes of memories binary, also where the sheet
    says GB.
    """

    name: str
    flops_per_second: float  # dense 16-bit products on the tensor cores, at boost clock
    hbm_bytes_per_second: float
    hbm_bytes: int
    l2_bytes: int  # the cache that all multiprocessors share
    multiprocessors: int
    shared_bytes: int  # of one, apart from the L1 cache; a thread block: 1 KiB less
    register_bytes: int  # of one
    source: str  # the documents that have the numbers

    @property
    def ridge_flops_per_byte(self):
        """The intensity at which arithmetic and HBM take equally long."""
        return self.flops_per_second / self.hbm_bytes_per_second


KIB, MIB, GIB = 2**10, 2**20, 2**30

A100 = GPU(
    "A100 80GB SXM", 312e12, 2.039e12, 80 * GIB, 40 * MIB, 108, 164 * KIB, 256 * KIB,
    "NVIDIA A100 Tensor Core GPU, data sheet (2021); NVIDIA A100 Tensor Core GPU "
    "Architecture, white paper V1.0 (2020), for the chip",
)  # fmt: skip
H100 = GPU(
    "H100 SXM", 989.4e12, 3.35e12, 80 * GIB, 50 * MIB, 132, 228 * KIB, 256 * KIB,
    "NVIDIA H100 Tensor Core GPU Architecture, white paper (2022); its rates with "
    "sparsity are halved here",
)  # fmt: skip
H200 = GPU(
    "H200 SXM", 989.5e12, 4.8e12, 141 * GIB, 60 * MIB, 132, 228 * KIB, 256 * KIB,
    "NVIDIA H200 Tensor Core GPU, data sheet (2024), rate with sparsity halved; the "
    "chip is that of the H100 with the L2 cache that the device reports",
)  # fmt: skip
GPUS = (A100, H100, H200)


def attainable_flops_per_second(flops_per_byte, gpu):
    """The roofline: the lesser of what tensor cores do and what HBM can feed them."""
    return min(gpu.flops_per_second, flops_per_byte * gpu.hbm_bytes_per_second)


def compute_seconds(flops, gpu):
    """Time of the operations alone, at the peak rate of the tensor cores."""
    return flops / gpu.flops_per_second


def transfer_seconds(moved_bytes, gpu):
    """Time of the bytes alone, at the full rate of HBM."""
    return moved_bytes / gpu.hbm_bytes_per_second


def roofline_seconds(flops, moved_bytes, gpu):
    """The longer of the two: operations and transfers overlap perfectly."""
    return max(compute_seconds(flops, gpu), transfer_seconds(moved_bytes, gpu))
