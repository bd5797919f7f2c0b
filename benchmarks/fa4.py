"""FA-4, the kernels of the package flash-attn-4 in the CuTe DSL, as a contender.

The package is no dependency of this repository: where it can be imported, the passes
fa4, latent and scores time it next to this book's kernels; elsewhere they leave it
out.

Tensors are [B, H, T, d] as everywhere in the book. FA-4 takes [B, T, H, d] with any
strides, so it gets views of the same memory, and nothing is copied.
"""

import functools

NAME = "FA-4"
METHODS = "fa4", "fa4-atomic"  # the second adds up dQ in any order, as FA-4 does


@functools.cache
def function():
    """FA-4's function of q, k and v. Raises ImportError where the package is not."""
    from flash_attn.cute import flash_attn_func

    return flash_attn_func


def missing():
    """Why FA-4 cannot be called here, or None."""
    try:
        function()
    except ImportError as error:
        return f"expected the package flash-attn-4, found none: {error}"
    return None


def attend(method, q, k, v, causal, **changes):
    """O [B, H, T, d_v] by one of METHODS; changes are keywords of FA-4, as softcap."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"causal": causal, "deterministic": method == "fa4", **changes}
    found = function()(q, k, v, softmax_scale=q.shape[-1] ** -0.5, **options)
    o = found[0] if isinstance(found, tuple | list) else found
    return o.transpose(1, 2)
