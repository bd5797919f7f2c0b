"""How each step runs: Triton kernels, one module per step, on a CUDA GPU or through
Triton's interpreter.

Triton decides while it is imported whether kernels are compiled or interpreted, from
the environment variable ``TRITON_INTERPRET``. :func:`flashlib.interpret_unless` chooses
the interpreter where there is no CUDA device; it honors an explicit value of the
variable.

The kernels for Hopper GPUs are in Gluon, Triton's dialect, which no interpreter runs. A
module ``hopper*.py`` has a kernel, the roles of its warps and its launchers, except
``hopper_tiles.py``, how the forward kernel divides its work, and ``hopper_host.py``,
which calls these kernels take. The pieces that they share are in

============================ ===========================================================
``gluon_tiles.py``           barriers, slots in shared memory, layouts of products
``gluon_forward.py``         forward: copies, the queue of tiles, the online softmax
``gluon_tasks.py``           forward: which tile is next, where a window begins
``gluon_scores.py``          softcap, ALiBi and functions of scores, both passes
``gluon_bias.py``            a bias, copied to shared memory or read, both passes
``gluon_lists.py``           forward: masks that are functions, windows
``gluon_keep.py``            forward: one maximum for the blocks of a tile
``gluon_keys.py``            backward: the blocks of queries that see a block of keys
``gluon_backward.py``        backward: memory, copies, and how results leave
``gluon_fused.py``           a step of dK, dV and dQ in one kernel, d = 64 and 128
``gluon_order.py``           adding parts of dQ in memory, in one order
``gluon_fp8.py``             forward in eight bits
============================ ===========================================================

Raises ImportError where Triton is missing (macOS, Windows), or was imported earlier
with the other choice, and where the interpreter has no NumPy.

Unless they say otherwise, launchers take q ``[B, H, T_q, d]``, k ``[B, H_kv, T_k, d]``
and v ``[B, H_kv, T_k, d_v]`` with any strides and a finite scale, and return ``(o,
lse)``: o ``[B, H, T_q, d_v]`` in the dtype and memory order of q, lse ``[B, H, T_q]``
in float32, contiguous, natural logarithm. Backward passes take both, do and dlse in
their shapes, and return ``(dq, dk, dv)`` in the shapes, dtypes and memory order of q, k
and v, dK and dV summed over the heads of a group. A query that sees no key has o = 0,
lse = -inf and zero gradient, and contributes nothing. On a CPU bfloat16 is widened to
float32 and the results are rounded. Where no configuration fits the device they raise
ValueError.
"""

import torch

import flashlib

flashlib.interpret_unless(torch.cuda.is_available())

try:
    import triton
    import triton.language as tl
except ImportError as error:
    if error.name == "numpy":
        raise ImportError(
            "flashlib's kernels run on a CPU through Triton's interpreter, which needs "
            "NumPy: python -m pip install numpy"
        ) from error
    raise ImportError(
        "flashlib's kernels need Triton, which runs on Linux; without it "
        "flashlib.reference, flashlib.notebook and the simulators still work"
    ) from error

INTERPRETED = bool(triton.knobs.runtime.interpret)

# Triton decorated its own helpers when it was imported: their type shows its choice.
if INTERPRETED is isinstance(tl.sum, triton.JITFunction):
    raise ImportError(
        "Triton was imported before flashlib.kernels "
        f"{'without' if INTERPRETED else 'with'} its interpreter and cannot change; "
        "restart Python and import flashlib.kernels first, or set TRITON_INTERPRET"
    )


def padded(d):
    """The power of two, at least 16, to which a side d of a tile is padded."""
    return max(16, triton.next_power_of_2(d))
