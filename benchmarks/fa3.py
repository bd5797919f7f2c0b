"""FA-3, the kernels of the package flash-attn for Hopper GPUs, as a contender.

Its library is not part of this repository. Where the folder ``.fa3`` of a checkout has
the two FILES, the passes hopper and fa3 time it next to this book's kernels; elsewhere
they say what is missing and leave it out. The library came with xformers 0.0.34, which
is built for Python's stable ABI and CUDA 12, whose runtime is the second file.

Tensors are [B, H, T, d] as everywhere in the book. FA-3 takes [B, T, H, d] with any
strides, so it gets views of the same memory, and nothing is copied.
"""

import ctypes
import functools
import lzma
import os
import pathlib
import shutil
import tempfile

import torch

FOLDER = pathlib.Path(__file__).resolve().parents[1] / ".fa3"
FILES = "flash_attn_3_C.so.xz", "libcudart.so.12"
NAME = "FA-3"
METHODS = "fa3", "fa3-atomic"  # the second adds up dQ in any order, as FA-3 does


def missing():
    """Why FA-3 cannot run here, or None."""
    for name in FILES:
        if not (FOLDER / name).is_file():
            return f"expected {name} in the folder {FOLDER.name}, found none"
    if not torch.cuda.is_available():
        return "expected a CUDA GPU, found none"
    if (found := torch.cuda.get_device_capability()) != (9, 0):
        return "expected compute capability 9.0, got {}.{}".format(*found)
    return None


def unpacked(folder=None):
    """The path of the library, decompressed once in a folder for temporary files.

    It is written under another name first, so a run that is cut off leaves no half.
    """
    packed = FOLDER / FILES[0]
    folder = pathlib.Path(folder or tempfile.gettempdir())
    library = folder / f"{packed.stem}.{packed.stat().st_size}.so"
    if not library.exists():
        half = library.with_suffix(f".{os.getpid()}")
        with lzma.open(packed) as source, half.open("wb") as target:
            shutil.copyfileobj(source, target, 2**24)
        half.replace(library)
    return library


@functools.cache
def operators():
    """FA-3's operators, which its library registers with PyTorch."""
    ctypes.CDLL(str(FOLDER / FILES[1]), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(unpacked()))
    return torch.ops.flash_attn_3


class Attention(torch.autograd.Function):
    """O [B, T, H, d], with the arguments of FA-3's operators as a dict."""

    @staticmethod
    def forward(ctx, q, k, v, options, deterministic):
        o, lse, *_ = operators().fwd(q, k, v, **options)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = options | {"deterministic": deterministic}
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        operators().bwd(do, q, k, v, o, lse, *gradients, **ctx.options)
        return *gradients, None, None


def attend(method, q, k, v, causal, window=0):
    """O [B, H, T, d] by one of METHODS; a query sees its own key and the window - 1
    before it, with a window of 0 all.
    """
    options = {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal}
    if window:
        options |= {"window_size_left": window - 1, "window_size_right": 0}
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return Attention.apply(q, k, v, options, method == "fa3").transpose(1, 2)
