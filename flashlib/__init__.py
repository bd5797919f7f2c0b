"""flashlib: every step of the derivation of FlashAttention, as code that runs.

Each step has one word, and its files are named after it: the chapter
``book/<step>.ipynb``, what the step means in ``flashlib/reference/<step>.py``, how it
runs in ``flashlib/kernels/<step>.py``, what it moves in ``flashlib/iomodel/<step>.py``.

=========== ============================================================================
step        what it adds
=========== ============================================================================
standard    scores, softmax and output as three kernels; T x T matrices in device memory
gradients   dV, dP, dS, dQ, dK by hand; the backward kernels that store T x T matrices
machine     loads, stores and cycles of a toy register machine (``flashlib.machine``)
bottleneck  words between two memories, as the standard passes move them
blocks      the same for attention row by row and block by block
online      the state (m, l, O) of a softmax in pieces, and its merge
flash1      FlashAttention forward: keys outside, O read and written at every step
flash2      FlashAttention-2 forward: one pass over the keys, nothing T x T in memory
backward    dQ, dK, dV from the log-sum-exp, nothing T x T in memory; split or atomic
projections the gradients of a whole layer: dX and four weights (``flashlib.layers``)
masks       any mask, bias, sinks, dropout, windows, softcap, ALiBi, packed sequences
decoding    a few queries, a long cache, in splits and pages (``flashlib.kvcache``)
hopper      both passes for one GPU: copies and products that run while others compute
ring        one sequence on many GPUs: keys travel from rank to rank, results merge
latent      a cache of one small vector per token, expanded or absorbed by the weights
fp8         attention in eight bits, forward, and caches in eight bits
=========== ============================================================================

The public API is :func:`flashlib.attention`, :func:`flashlib.attention_varlen`,
:func:`flashlib.decode`, :func:`flashlib.decode_latent`,
:func:`flashlib.scaled_dot_product_attention`, :func:`flashlib.ring_attention`,
:func:`flashlib.ulysses_attention` and the modules :class:`flashlib.FlashSelfAttention`
and :class:`flashlib.LatentAttention`. The files :mod:`flashlib.masks`,
:mod:`flashlib.score_functions`, :mod:`flashlib.block_lists`, :mod:`flashlib.kvcache`
and :mod:`flashlib.fp8` have public names too. Importing the package is cheap: they,
PyTorch and Triton are loaded when a name is first used.
"""

import ctypes
import importlib
import importlib.metadata
import os

__version__ = "3.1.0"

_HOME = {
    "FlashSelfAttention": "flashlib.layers",
    "LatentAttention": "flashlib.layers",
    "attention": "flashlib.api",
    "attention_varlen": "flashlib.api",
    "decode": "flashlib.api",
    "decode_latent": "flashlib.api",
    "ring_attention": "flashlib.ring",
    "scaled_dot_product_attention": "flashlib.api",
    "ulysses_attention": "flashlib.ring",
}
# Modules with public names of their own.
_MODULES = ("block_lists", "fp8", "kvcache", "masks", "score_functions")
__all__ = list(_HOME)

try:
    _foreign = importlib.metadata.version("flashlib")
except importlib.metadata.PackageNotFoundError:
    _foreign = None
if _foreign is not None:
    raise ImportError(
        f"an unrelated package named flashlib (version {_foreign}) is installed in "
        "this environment and its files mix with this book's library; remove it with: "
        "python -m pip uninstall flashlib"
    )


def interpret_unless(gpu):
    """Let Triton interpret its kernels unless there is a GPU, or the environment says
    what to do. Raises ImportError where Triton could run other kernels of the process
    on another GPU.
    """
    if gpu or "TRITON_INTERPRET" in os.environ:
        return
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    if "+rocm" in torch or "+xpu" in torch:
        raise ImportError(
            f"TRITON_INTERPRET: expected 0 or 1 with torch {torch}, got nothing: "
            "flashlib's kernels run on CUDA GPUs or, where it is 1, in Triton's "
            "interpreter, as all other Triton kernels of the process do then; set "
            "it before Python starts"
        )
    os.environ["TRITON_INTERPRET"] = "1"


def has_driver():
    """Whether there is a CUDA driver, without which there is no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# Triton chooses between compiler and interpreter while it is being imported, and
# torch.compile may import it before flashlib.kernels asks PyTorch for a GPU.
interpret_unless(has_driver())


def __getattr__(name):
    if name in _MODULES:  # the import makes it an attribute
        return importlib.import_module(f"flashlib.{name}")
    if name not in _HOME:
        names = ", ".join([*_HOME, *_MODULES])
        raise AttributeError(
            f"module 'flashlib' has no attribute {name!r}; it has {names}"
        )
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # where the next access finds it
    return value


def __dir__():
    return sorted({*globals(), *_HOME, *_MODULES})
