"""What a forward kernel reads, computes and writes, step by step, under Triton's interpreter.

    trace_forward(flash2, q, k, v, B_r=2, B_c=2)

The interpreter runs every load and store of a kernel as a call of its builder. While a kernel is traced these
calls also note the elements that they touch, and ``attend``, the kernel module's step of the inner loop, is
replaced by itself with a note of where it begins and ends and of what it returns: the state that a kernel
keeps in registers, which no load or store shows. The kernel itself runs unchanged, with tiny tiles.

This module knows the kernels by the names that they share, ``attend`` and ``launch``, and imports none.
"""

import contextlib
import inspect
import math

import torch
import triton
from triton.runtime.interpreter import interpreter_builder

from flashlib.kernels import INTERPRETED
from flashlib.kernels import launch as launchers

LN_2 = math.log(2.0)
# What a launcher calls an array, and what the book does.
NAMES = {"q": "Q", "k": "K", "v": "V", "o": "O", "m": "m", "l": "l", "lse": "L"}


def trace_forward(kernel, q, k, v, *, B_r, B_c, causal=False, scale=None):
    """The trace of a forward pass of a kernel, as ``flashlib.stepper.show_forward`` takes it.

    kernel      a module with ``attend`` and ``launch``: flashlib.kernels.flash1 or flash2
    q, k, v     one head, [T_q, d], [T_k, d] and [T_k, d_v], tensors or arrays; computed in float32
    B_r, B_c    rows of a tile of queries and of keys, powers of two
    causal      whether query i sees only keys j <= i + T_k - T_q; then T_q <= T_k
    scale       1/sqrt(d) unless given, at least 0

    The trace, an object for JSON, is described in flashlib.stepper.forward. Its m is a natural logarithm,
    though the kernels compute in base 2. A step's ``m``, ``l`` and ``O`` are what ``attend`` returned or,
    where it returns nothing, what it stored. Programs follow each other in the order of the grid.

    Raises RuntimeError where kernels are compiled, for then nothing can be noted, and where one touches other
    memory than its arrays or does not call ``attend``; TypeError and ValueError for other arguments.
    """
    if not INTERPRETED:
        raise RuntimeError(
            "trace_forward needs Triton's interpreter, but kernels are compiled here: set TRITON_INTERPRET=1 "
            "before Python starts"
        )
    if not all(callable(getattr(kernel, name, None)) for name in ("attend", "launch")):
        raise TypeError(f"kernel must be a module with attend and launch, got {kernel!r}")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    q, k, v = _matrices(q, k, v)
    if causal and q.shape[0] > k.shape[0]:
        raise ValueError(
            f"q must have no more rows than k where causal, so that each has a step, got {q.shape[0]} and "
            f"{k.shape[0]}"
        )
    for name, size in (("B_r", B_r), ("B_c", B_c)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an integer, got {size!r}")
        if size < 1 or size != triton.next_power_of_2(size):
            raise ValueError(f"{name} must be a power of two, got {size}")
    (T_q, d), (T_k, d_v) = q.shape, v.shape
    scale = 1.0 / math.sqrt(d) if scale is None else float(scale)
    if not (math.isfinite(scale) and scale >= 0.0):
        raise ValueError(f"scale must be finite and at least 0, got {scale}")

    heads = {"q": q, "k": k, "v": v, "o": torch.zeros(T_q, d_v)}
    rows = {"m": torch.full((T_q,), -math.inf), "l": torch.zeros(T_q), "lse": torch.zeros(T_q)}
    arrays = {NAMES[name]: array for name, array in (heads | rows).items()}
    arguments = {name: x[None, None] for name, x in (heads | rows).items()}
    arguments |= {"causal": causal, "scale": scale}
    # A row of the table of one kernel, a tile of the other.
    arguments["config"] = launchers.INTERPRETER._replace(BLOCK_Q=B_r, BLOCK_K=B_c)
    arguments["tile"] = (B_r, B_c, 1)
    wanted = inspect.signature(kernel.launch).parameters
    unknown = [name for name in wanted if name not in arguments]
    if unknown:
        raise TypeError(f"kernel must have a launch that takes no {', '.join(unknown)}")
    with _recording(kernel, _Recorder(arrays)) as recorder:
        kernel.launch(**{name: arguments[name] for name in wanted})
    return {"T_q": T_q, "T_k": T_k, "d": d, "d_v": d_v, "steps": recorder.finished()}


def _matrices(q, k, v):
    """q, k and v as contiguous float32 matrices on the CPU; TypeError, ValueError for what is none."""
    matrices = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "shape"):
            raise TypeError(f"{name} must be a tensor or an array, got {type(x).__name__}")
        x = torch.as_tensor(x)
        if x.ndim != 2 or x.numel() == 0 or x.dtype.is_complex:
            got = f"{x.dtype} of shape {tuple(x.shape)}"
            raise ValueError(f"{name} must be a real matrix that is not empty, got {got}")
        matrices.append(x.detach().to("cpu", torch.float32).clone(memory_format=torch.contiguous_format))
    q, k, v = matrices
    if k.shape[1] != q.shape[1]:
        raise ValueError(f"k must have {q.shape[1]} columns, as q has, got {k.shape[1]}")
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"v must have {k.shape[0]} rows, as k has, got {v.shape[0]}")
    return q, k, v


@contextlib.contextmanager
def _recording(kernel, recorder):
    """The recorder, told of every load and store of the interpreter and of every step of the kernel."""
    builder, attend = interpreter_builder, kernel.attend
    load, store = builder.create_masked_load, builder.create_masked_store

    def masked_load(ptrs, mask, *rest, **options):
        loaded = load(ptrs, mask, *rest, **options)
        recorder.touched("reads", ptrs.data, mask.data, loaded.data)
        return loaded

    def masked_store(ptrs, value, mask, *rest, **options):
        recorder.touched("writes", ptrs.data, mask.data, value.data)
        return store(ptrs, value, mask, *rest, **options)

    def step(*arguments, **options):
        recorder.begin()
        state = attend(*arguments, **options)
        recorder.end(state)
        return state

    # On the instance, so that deleting them brings the methods of the class back.
    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    kernel.attend = step
    try:
        yield recorder
    finally:
        del builder.create_masked_load, builder.create_masked_store
        kernel.attend = attend


class _Recorder:
    """Loads and stores as blocks of named arrays, gathered to steps of the inner loop."""

    def __init__(self, arrays):
        self.places, self.steps = {}, []
        self.over = True  # whether the last step's attend has returned
        self.stray = False  # whether other memory was touched
        self.d_v = arrays["V"].shape[1]
        for name, array in arrays.items():
            columns = array.shape[1] if array.ndim == 2 else 1
            for number in range(array.numel()):
                address = array.data_ptr() + number * array.element_size()
                self.places[address] = (name, *divmod(number, columns))

    def begin(self):
        """The next step, unless a load before its attend has begun it."""
        if self.over:
            self.steps.append({"reads": [], "read_words": 0, "writes": [], "written_words": 0, "stored": []})
            self.over = False

    def end(self, state):
        """attend has returned a state, or None where it lies in memory; what is stored from now on, before
        another load, still belongs to the step.
        """
        self.over = True
        step = self.steps[-1]
        # K_J and Q_I are those that were loaded last, in this step or before.
        for key, array in (("queries", "Q"), ("keys", "K")):
            blocks = [block for s in self.steps for block in s["reads"] if block[0] == array]
            step[key] = blocks[-1][1:]
        count = step["queries"][1] - step["queries"][0]
        if state is None:
            stored = zip(step["writes"], step["stored"], strict=True)
            step |= {name: rows for (name, _, _), rows in stored}
            step |= {name: [number for (number,) in step[name]] for name in ("m", "l")}
        else:
            acc, m, l = (tensor.handle.data[:count].tolist() for tensor in state)
            step |= {"O": [row[: self.d_v] for row in acc], "m": [number * LN_2 for number in m], "l": l}

    def touched(self, way, addresses, mask, values):
        """The elements of a tile, those under the mask, have been read or are about to be written."""
        cells, names = {}, set()
        for address, inside, number in zip(addresses.flat, mask.flat, values.flat, strict=True):
            if inside:
                name, row, column = self.places.get(int(address), (None, 0, 0))
                cells[row, column] = float(number) * (LN_2 if name == "m" else 1.0)
                names.add(name)
        if way == "reads" and cells:
            self.begin()
        if None in names or (cells and not self.steps):
            self.stray = True
        if self.stray or not cells:
            return
        step, rows = self.steps[-1], sorted({row for row, _ in cells})
        columns = sorted({column for _, column in cells})
        step[way].append([name, rows[0], rows[-1] + 1])
        step["read_words" if way == "reads" else "written_words"] += len(cells)
        if way == "writes":
            step["stored"].append([[cells[row, column] for column in columns] for row in rows])

    def finished(self):
        """The steps; RuntimeError where they do not tell what the kernel did."""
        if self.stray:
            raise RuntimeError("trace_forward: the kernel touches memory that is none of its arrays")
        if not self.over:
            raise RuntimeError("trace_forward: the kernel ends without a step of its inner loop, attend")
        return self.steps
