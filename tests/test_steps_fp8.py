"""The chapter's kernel that reads a cache in eight bits, next to the reference."""

import pytest
import torch
from device import DEVICE

from flashlib import testing
from flashlib.kernels.steps import fp8 as steps
from flashlib.reference import fp8, standard

pytestmark = pytest.mark.usefixtures("nan_filled")


def cache(x):
    """Numbers and scales ``[T, d]`` and ``[T]`` of rows ``[1, 1, T, d]``, stored."""
    found = fp8.quantize(x, 1)
    stored = found.values[0, 0].to(torch.float8_e4m3fn)
    return found.numbers, (stored, found.scales[0, 0, :, 0].contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "H, T, d", [(1, 1, 16), (16, 32, 16), (20, 71, 64), (3, 40, 32)]
)
def test_the_small_kernel_attends_to_what_the_cache_holds(H, T, d, dtype):
    """Rows of very different sizes, whose scales matter; bfloat16 holds each number."""
    q, k, v = testing.make_qkv(1, 1, H, d, T_k=T, dtype=dtype, device=DEVICE)
    sizes = 10.0 ** torch.linspace(-1, 1, T, device=DEVICE)[:, None]
    k, of_k = cache(k.float() * sizes.flip(0) / 4)
    v, of_v = cache(v.float() * sizes)
    o = steps.launch(q[0, 0], *of_k, *of_v, 0.3)
    wanted, _ = standard.attention(*(x.double() for x in (q, k, v)), scale=0.3)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    assert o.dtype == dtype and not o.isnan().any()
    error = (o.double() - wanted[0, 0]).abs().max()
    assert error <= near * v.abs().max(), error
