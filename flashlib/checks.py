"""The input contract of the public functions, and the one clear line that a wrong argument gets."""

import math
import numbers

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = ("cpu", "cuda")
HEAD_DIMS = (16, 256)
PAGE_SIZES = (16, 32, 64, 128, 256)  # keys in a page of a cache
LARGEST_SCALE = 1e37  # times log2(e) it is still a float32


def _shape(x):
    return "[" + ", ".join(str(int(n)) for n in x.shape) + "]"


def flag(name, value):
    """Raise TypeError unless value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def determinism(deterministic):
    """Raise ValueError for deterministic=False where PyTorch has been told to allow no such thing."""
    if not deterministic and torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "deterministic: expected True under torch.use_deterministic_algorithms(True), got False, "
            "which adds up dQ in no particular order"
        )


def choice(name, value, allowed):
    """Raise ValueError unless value is one of the allowed strings (TypeError for another type)."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {', '.join(allowed)}, got {type(value).__name__}")
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")


def finite_scale(scale, d):
    """The scale as a float; None means 1/sqrt(d). Raises as ``finite_number``."""
    return 1.0 / math.sqrt(d) if scale is None else finite_number("scale", scale)


def finite_number(name, given):
    """A number as a float. Raises TypeError for a non-number, ValueError for inf, NaN and what float32
    cannot hold.
    """
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"{name}: expected a real number or None, got {type(given).__name__}")
    try:
        value = float(given)
    except OverflowError:  # an integer beyond the largest float
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    if abs(value) > LARGEST_SCALE:
        raise ValueError(f"{name}: expected a magnitude up to {LARGEST_SCALE:.0e}, got {value}")
    return value


def count(name, value, least):
    """Raise TypeError unless value is an integer, ValueError unless it is at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def head_dimension(name, value):
    """Raise TypeError unless value is an integer, ValueError unless it is a head dimension, 16 to 256."""
    low, high = HEAD_DIMS
    count(name, value, least=low)
    if value > high:
        raise ValueError(f"{name}: expected a head dimension from {low} to {high}, got {value}")


def supported(name, dtype):
    """Raise TypeError unless dtype is float32, float16 or bfloat16."""
    if dtype not in DTYPES:
        listed = ", ".join(str(t).removeprefix("torch.") for t in DTYPES)
        raise TypeError(f"{name}: expected dtype {listed}, got {str(dtype).removeprefix('torch.')}")


def tensors(sizes="[B, H, T, d]", /, **named):
    """Each argument is a dense tensor with these sizes, of a supported dtype; all of one dtype and on one
    device.

    Raises TypeError (not a tensor, dtype, layout) or ValueError (dimensions, device), naming the
    argument.
    """
    first_name, first = next(iter(named.items()))
    for name, x in named.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense (strided) tensor, got layout {x.layout}")
        supported(name, x.dtype)
        if x.device.type not in DEVICES:
            raise ValueError(f"{name}: expected a tensor on {' or '.join(DEVICES)}, got {x.device}")
        dimensions = sizes.count(",") + 1
        if x.ndim != dimensions:
            raise ValueError(f"{name}: expected {dimensions} dimensions {sizes}, got {x.ndim}: {_shape(x)}")
        if x.dtype != first.dtype:
            raise TypeError(f"{name}: expected the dtype of {first_name}, {first.dtype}, got {x.dtype}")
        if x.device != first.device:
            raise ValueError(f"{name}: expected the device of {first_name}, {first.device}, got {x.device}")


def attention_shapes(q, k, v):
    """q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]``, v ``[B, H_kv, T_k, d_v]``, H a multiple of H_kv,
    16 <= d, d_v <= 256.

    Raises ValueError naming the argument, what was expected and what came.
    """
    B, H, _, d = q.shape
    H_kv = k.shape[1]
    low, high = HEAD_DIMS
    if k.shape[0] != B:
        raise ValueError(f"k: expected batch size {B} as in q {_shape(q)}, got {_shape(k)}")
    if k.shape[3] != d:
        raise ValueError(f"k: expected head dimension {d} as in q {_shape(q)}, got {_shape(k)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: expected [B, H_kv, T_k, d_v] with the sizes of k {_shape(k)}, got {_shape(v)}")
    if (H_kv == 0) != (H == 0) or (H_kv and H % H_kv):
        raise ValueError(f"k: expected a head count that divides the {H} of q, got {H_kv} in {_shape(k)}")
    for name, x in (("q", q), ("v", v)):
        if not low <= x.shape[3] <= high:
            raise ValueError(f"{name}: expected a head dimension from {low} to {high}, got {_shape(x)}")
