"""Speeds and byte counts measured on a GPU: the JSON files next to this module, and
:class:`Record`, which reads them.

    names()                     the records that there are
    record = load("forward")
    record.cell(method="flash2", d=128, causal=False, T_q=4096)["tflops"]

``python -m benchmarks`` writes them, ``benchmarks.ring`` the record ring; ``tiles`` is
kept from a sweep. A record is there only where it was measured.

========  ==========================================================================
forward   the forward kernels, and their memory over T
steps     the changes that lead from flash1 to flash2, one at a time
backward  the backward kernels, alone and with the forward pass, and their memory
hopper    the kernels for compute capability 9.0, and the changes that lead to them
masks     a window, a softcap and ALiBi on top of a causal mask
scores    masks and changed scores next to PyTorch's FlexAttention
fa3       windows and grouped heads next to FA-3; only where it was measured
fa4       long sequences next to FA-4; only where it was measured
decoding  one step of decoding over the length of the cache
fp8       attention and caches in eight bits next to bfloat16: speed, and errors
probes    what tensor cores keep of a sum of products in 8 and 16 bits
latent    latent attention: expanded, and absorbed next to its roof
host      what a call costs the host; eager calls next to CUDA graphs; training
ring      one sequence on several GPUs, next to PyTorch's context_parallel, per GPU
traces    when each role of a Hopper kernel waits, clock by clock, in one launch
ablations what one change does to a kernel, with everything else as it was
hbm       the bytes that each kernel reads from HBM and writes to it
tiles     the sweep that chose the tiles of ``kernels/flash2.py`` for an H200
========  ==========================================================================

Every record has ``gpu``, ``versions``, ``date`` and ``cells``; ``timing`` or
``counting`` says how a number was taken. A cell of speeds holds the raw milliseconds of
each round (``launch_ms``, and ``graph_ms`` where calls are short), the median ``ms`` of
the rounds that ``timed`` names, ``tflops`` by the record's ``flop_rule``, and in newer
records the clock of the GPU under this load, ``clock_mhz``. Where something could not
be measured, the cell holds the reason, ``error``. A cell that an earlier run left, at
another ``commit``, has that and its ``date``. A direction is "forward", "backward" (of
a forward pass that was kept) or "forward+backward".
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent


class Kind(NamedTuple):
    """One list of cells: which fields name a cell, and what a figure says of them."""

    fields: tuple
    value: str  # the field that every measured cell has
    default: dict  # fields that need not be given to find a cell
    provenance: str  # filled in from the record


# How the fields of times and rates end: no integer may be 0 there. A count may.
_POSITIVE = ("ms", "us", "mhz", "seconds", "second", "tflops", "tbs")
_SHAPE = ("method", "direction", "B", "H", "H_kv", "T_q", "T_k", "d", "causal")
_SHAPE = (*_SHAPE, "layout", "dtype")
_TILE = ("BLOCK_Q", "BLOCK_K", "num_warps", "num_stages", "descriptor")
_SCORES = ("method", "direction", "variant", "B", "H", "T", "d", "dtype")
_TRAINING = ("method", "mode", "batch")
_FIRST = ("method", "direction", "cache")
_RANKS = ("method", "direction", "ranks", "T", "B", "H", "d", "causal")
_TRAFFIC = ("method", "direction", "step", "kernel", "T", "cache_control")
_TORCH = "torch {versions[torch]}, triton {versions[triton]}"
_CUDA = f"{_TORCH}, CUDA {{versions[cuda]}}, cuDNN {{versions[cudnn]}}"
_SWEEP = (
    "{gpu[name]}, {dtype}, B T = {tokens}, H d = {width}, {date}\n"
    f"{_TORCH}, one median per point\n{{rule}}"
)
_GPU = "{gpu[name]}, {date}, {cells[0][dtype]}, "
_GRID = f"{_GPU}B T = {{grid[tokens]}}, H d = {{grid[width]}}\n{_CUDA}\n{{rule}}"
_SIZES = f"{_GPU}B = {{0[B]}}, H = {{0[H]}}, d = {{0[d]}}"
_CALL = (
    "{gpu[name]}, {date}, {cells[0][dtype]}, B = {call[B]}, H = {call[H]}, "
    "d = {call[d]}, T = {call[T]}\ndecoding: one query, {call[keys]} keys\n"
    f"{_CUDA}\nfastest of {{call[rounds]}} rounds of {{call[calls]}} calls"
)
_EIGHT = f"{{gpu[name]}}, {{date}}\n{_TORCH}\n{{rule}}"
_CACHES = (
    "{gpu[name]}, {date}, {decoding[B]} sequences, {decoding[T]} keys, H = "
    "{decoding[H]}, H_kv = {decoding[H_kv]}, d = {decoding[d]}\n"
    f"{_TORCH}"
)
_PROBES = f"{{gpu[name]}}, {{date}}\n{_TORCH}"
_TRACED = (
    "{gpu[name]}, {date}, {cells[0][dtype]}, "
    f"{_TORCH}\none launch, with the clock of its multiprocessor at every wait"
)
_EXPANDED = (
    f"{_GPU}B T = {{grid[tokens]}}, H = {{0[H]}}, d = {{grid[d]}}, "
    f"d_v = {{grid[d_v]}}\n{_CUDA}\n{{rule}}"
)
_ABSORBED = (
    "{gpu[name]}, {date}, {grid[dtype]}, d_c = {grid[d_c]}, d_r = {grid[d_r]}, "
    f"pages of {{grid[page]}} rows\n{_TORCH}\nin the same run: a copy "
    "{ceilings[copy_tbs]:.2f} TB/s, a matrix product {ceilings[matmul_tflops]:.0f} "
    "TFLOP/s"
)
_SPEED = {
    "cells": Kind(_SHAPE, "tflops", {"layout": "contiguous"}, _GRID),
    # The peak of a call above its inputs and outputs.
    "memory": Kind(_SHAPE, "extra_bytes", {}, f"{_SIZES}\n{_CUDA}"),
}
KINDS = {
    **dict.fromkeys(("forward", "steps", "backward", "hopper", "masks"), _SPEED),
    "fa3": {"cells": _SPEED["cells"]._replace(fields=(*_SHAPE, "window"))},
    "fa4": {"cells": _SPEED["cells"]},
    "scores": {"cells": Kind(_SCORES, "tflops", {}, _GRID)},
    "decoding": {
        "cells": Kind(
            ("method", "B", "T_k", "page"),  # page 0: a contiguous cache
            "us",
            {"method": "decode", "page": 0},
            "{gpu[name]}, {date}, {grid[dtype]}, H = {grid[H]}, "
            f"H_kv = {{grid[H_kv]}}, d = {{grid[d]}}\n{_TORCH}, "
            "speed of a copy in the same run: {ceilings[copy_tbs]:.2f} TB/s",
        )
    },
    "fp8": {
        "cells": Kind(("method", "T", "d", "causal"), "tflops", {}, _EIGHT),
        "errors": Kind(("recipe", "inputs", "d"), "rms", {}, _EIGHT),
        "caches": Kind(("cache", "page"), "us", {"page": 0}, _CACHES),
    },
    "probes": {
        "cells": Kind(("dtype",), "held", {}, _PROBES),
        "sums": Kind(("dtype", "n", "levels"), "ratio", {}, _PROBES),
    },
    "latent": {
        "cells": Kind(_SHAPE, "tflops", {"layout": "contiguous"}, _EXPANDED),
        "absorbed": Kind(("method", "H", "B", "T_k"), "us", {}, _ABSORBED),
    },
    "host": {
        "cells": _SPEED["cells"]._replace(fields=(*_SHAPE, "mode")),
        "calls": Kind(("method", "direction"), "us", {}, _CALL),
        "training": Kind(_TRAINING, "steps_per_second", {}, f"{{gpu[name]}}, {_TORCH}"),
        "first": Kind(_FIRST, "seconds", {}, f"{{gpu[name]}}, {_TORCH}"),
    },
    "ring": {
        "cells": Kind(_RANKS, "tflops", {}, f"{_SIZES}, causal\n{_CUDA}\n{{rule}}")
    },
    "traces": {"cells": Kind(_SHAPE, "ms", {"layout": "contiguous"}, _TRACED)},
    "ablations": {
        "cells": Kind(
            ("question", "variant", "B", "T", "d"),
            "us",
            {},
            f"{{gpu[name]}}, {{date}}, {{grid[dtype]}}, {_TORCH}",
        ),
        "code": Kind(
            ("variant", "d"), "exponentials", {}, "Triton {versions[triton]}, sm_90"
        ),
    },
    "hbm": {
        "cells": Kind(
            _TRAFFIC,
            "read_bytes",
            {},
            "{gpu[name]}, {grid[dtype]}, B H = {heads}, d = {grid[d]}, {date}\n"
            f"Nsight Compute {{versions[ncu]}}, {_TORCH}",
        )
    },
    "tiles": {
        "cells": Kind(("method", "layout", "d", "causal", "T_q"), "tflops", {}, _SWEEP),
        "sweep": Kind((*_TILE, "d", "causal", "T_q"), "tflops", {}, _SWEEP),
    },
}


def names():
    """The names of the records, sorted: what ``load`` takes."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.json")))


def load(name):
    """The Record ``flashlib/records/<name>.json``. ValueError if there is none."""
    if name not in names():
        raise ValueError(f"name: expected one of {', '.join(names())}, got {name!r}")
    return Record(name, json.loads((FOLDER / f"{name}.json").read_text("utf-8")))


class Record:
    """One run of a benchmark. ``data`` is the whole JSON object; its parts are
    attributes too.

    ``grid`` has the sizes that all cells share. ``ceilings`` has the rates of a large
    copy and of a large matrix product, taken in the same run.

    Raises ValueError, naming the record and the cell, where a field is missing, a time
    or a rate is not positive and finite, a count is negative, or a cell is there twice.
    """

    def __init__(self, name, data):
        self.name, self.data = name, data
        self.gpu, self.versions = data["gpu"], data["versions"]
        self.grid, self.ceilings = data.get("grid", {}), data.get("ceilings", {})
        self.cells, self.memory = data["cells"], data.get("memory", [])
        self.sweep = data.get("sweep", [])
        self.kinds = KINDS[data["pass"]]
        for part, kind in self.kinds.items():
            seen = set()
            for place, cell in enumerate(data[part]):
                _check(f"record {name!r}, {part}[{place}]", cell, kind, seen)

    def cells_of(self, part="cells", **key):
        """The cells with these fields, measured or not, in the order of the record;
        ValueError if there is none, or no such field.
        """
        found = self._matching(part, key)
        if not found:
            raise ValueError(f"record {self.name!r} has no cell with {_text(key)}")
        return found

    def cell(self, part="cells", **key):
        """The measured cell with these fields; contiguous tensors, and flashlib's
        decoding from a contiguous cache, need not be asked for. ValueError if none,
        several, or an unmeasured one fits.
        """
        key = self._kind(part).default | key
        found = self.cells_of(part, **key)
        if len(found) > 1:
            several = f"{len(found)} cells with {_text(key)}"
            raise ValueError(f"record {self.name!r} has {several}")
        if reason := found[0].get("error"):
            lacks = f"no value for {_text(key)}: {reason}"
            raise ValueError(f"record {self.name!r} has {lacks}")
        return found[0]

    def curve(self, x, y, **key):
        """[(x, y)] of the measured cells with these fields, x ascending; ValueError if
        there is no such field.
        """
        cells = self._matching("cells", self._kind("cells").default | key)
        cells = [cell for cell in cells if "error" not in cell]
        for name, field in (("x", x), ("y", y)):
            if lacking := [cell for cell in cells if field not in cell]:
                expected = f"one of {', '.join(lacking[0])}"
                raise ValueError(f"{name}: expected {expected}, got {field!r}")
        return sorted((cell[x], cell[y]) for cell in cells)

    def _kind(self, part):
        if part not in self.kinds:
            parts = ", ".join(self.kinds)
            raise ValueError(f"part: expected one of {parts}, got {part!r}")
        return self.kinds[part]

    def _matching(self, part, key):
        fields = self._kind(part).fields
        for field in key.keys() - set(fields):
            raise ValueError(f"field: expected one of {', '.join(fields)}, got {field}")
        return [cell for cell in self.data[part] if key.items() <= cell.items()]

    def ladder(self, d, causal, direction="forward", **key):
        """{method: [(T, TFLOP/s)]} of measured cells with H d = ``grid["width"]``."""
        heads = self.grid["width"] // d
        key |= {"H": heads, "d": d, "causal": causal, "direction": direction}
        methods = dict.fromkeys(cell["method"] for cell in self.cells)
        curves = {m: self.curve("T_q", "tflops", method=m, **key) for m in methods}
        return {method: curve for method, curve in curves.items() if curve}

    def provenance(self, part="cells", cell=None):
        """Lines for a figure: GPU, days, dtype, sizes, versions, and how to count; of a
        cell with a date or a dtype of its own, these.
        """
        own, data = cell or {}, {**self.data}
        measured = [own] if cell else data[part]
        days = [x.get("date", data["date"])[:10] for x in measured]
        data["date"] = " to ".join(sorted({min(days), max(days)}))
        if "dtype" in own:
            data["grid"] = {**self.grid, "dtype": own["dtype"]}
        heads = self.grid.get("B", 1) * self.grid.get("H", 1)
        rule = self.data.get("flop_rule", "").replace("; ", "\n")
        said = self._kind(part).provenance
        return said.format(data[part][0], **data, heads=heads, rule=rule)


def _text(key):
    return ", ".join(f"{field} = {value}" for field, value in key.items())


def _check(where, cell, kind, seen):
    needed = (*kind.fields, "error" if "error" in cell else kind.value)
    if missing := [field for field in needed if field not in cell]:
        raise ValueError(f"{where}: expected the field {missing[0]!r}, got {cell}")
    for field, value in cell.items():
        for x in value if isinstance(value, list) else [value]:
            if not isinstance(x, int | float):
                continue
            count = isinstance(x, int) and not field.endswith(_POSITIVE)
            if not (0 < x < math.inf or (count and x == 0)):
                sort = "nonnegative" if count else "positive"
                raise ValueError(f"{where}: expected a {sort} number, got {x}")
    identity = tuple(cell[field] for field in kind.fields)
    if identity in seen:
        raise ValueError(f"{where}: expected each cell once, got {identity} again")
    seen.add(identity)
