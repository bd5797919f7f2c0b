"""What a forward kernel reads, computes and writes, step by step: the trace that a
schedule of flashlib.iomodel leaves too (flashlib.stepper.forward describes it).

Triton's interpreter runs every load and store of a kernel as a call of its builder.
While a kernel is traced these calls also note the elements that they touch, and
``attend``, the step of the inner loop, notes where it begins and ends and what it
returns. The kernel itself runs unchanged, with tiny tiles.
"""

import contextlib
import inspect
import math

import torch

from flashlib.kernels import tables

LN_2 = math.log(2.0)
# What a launcher calls an array, and what the book does.
NAMES = {"q": "Q", "k": "K", "v": "V", "o": "O", "m": "m", "l": "l", "lse": "L"}


def trace_forward(kernel, q, k, v, *, B_r, B_c, causal=False):
    """The trace of ``kernel``, a module with attend and launch_forward, on one head: q
    [T_q, d], k [T_k, d], v [T_k, d_v]; B_r and B_c are powers of two. Programs follow
    each other in the order of the grid. m is a natural logarithm.
    """
    q, k, v = (torch.as_tensor(x).float().clone(memory_format=torch.contiguous_format)
               for x in (q, k, v))  # fmt: skip
    (T_q, d), (T_k, d_v) = q.shape, v.shape
    rows = {"m": torch.full((T_q,), -math.inf)}
    rows |= {"l": torch.zeros(T_q), "lse": torch.zeros(T_q)}
    tensors = {"q": q, "k": k, "v": v, "o": torch.zeros(T_q, d_v)} | rows
    arguments = {name: x[None, None] for name, x in tensors.items()}
    arguments |= {"causal": causal, "scale": d**-0.5}
    arguments["config"] = tables.INTERPRETER._replace(BLOCK_Q=B_r, BLOCK_K=B_c)
    arrays = {NAMES[name]: x for name, x in tensors.items()}
    with _recording(kernel, _Recorder(arrays)) as recorder:
        wanted = inspect.signature(kernel.launch_forward).parameters
        kernel.launch_forward(**{name: arguments[name] for name in wanted})
    return {"T_q": T_q, "T_k": T_k, "d": d, "d_v": d_v, "steps": recorder.finished()}


@contextlib.contextmanager
def _recording(kernel, recorder):
    """The recorder, told of every load, store and step of the interpreter."""
    # After flashlib.kernels, which decides whether Triton interprets.
    from triton.runtime.interpreter import interpreter_builder as builder

    attend = kernel.attend
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
    """Collects loads and stores of named arrays by steps of the inner loop."""

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
            step = {"reads": [], "read_words": 0, "writes": [], "written_words": 0}
            self.steps.append(step | {"stored": []})
            self.over = False

    def end(self, state):
        """End a step; a store before the next load still belongs to it."""
        self.over = True
        step = self.steps[-1]
        # K_J and Q_I are those that were loaded last, in this step or before.
        for key, array in (("queries", "Q"), ("keys", "K")):
            reads = [block for s in self.steps for block in s["reads"]]
            step[key] = [block[1:] for block in reads if block[0] == array][-1]
        count = step["queries"][1] - step["queries"][0]
        if state is None:
            stored = zip(step["writes"], step["stored"], strict=True)
            step |= {name: rows for (name, _, _), rows in stored}
            step |= {name: [number for (number,) in step[name]] for name in ("m", "l")}
        else:
            acc, m, l = (tensor.handle.data[:count].tolist() for tensor in state)
            step |= {"O": [row[: self.d_v] for row in acc], "l": l}
            step["m"] = [number * LN_2 for number in m]

    def touched(self, way, addresses, mask, values):
        """Note that the elements under the mask are read or will be written."""
        cells, names = {}, set()
        elements = zip(addresses.flat, mask.flat, values.flat, strict=True)
        for address, inside, number in elements:
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
            stored = [[cells[row, column] for column in columns] for row in rows]
            step["stored"].append(stored)

    def finished(self):
        """The steps, if they tell what the kernel did."""
        assert not self.stray, "the kernel touches memory outside of its arrays"
        assert self.over, "it ends without a step of its inner loop, attend"
        return self.steps
