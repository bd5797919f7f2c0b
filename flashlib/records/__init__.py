"""What was measured: the JSON files beside this one, what they must hold, and how to read them.

    names()                            ("forward", "tiles"), say: those that have been measured
    record = load("forward")
    record.cell(method="flash2", d=128, causal=False, T_q=4096)["tflops"]

``benchmarks/run.py`` writes four records on a GPU, ``forward``, ``steps``, ``backward`` and ``hopper``;
chapters and tests read them. These are the only speeds in the book. Such a record holds

    gpu, versions, date, commit     where, with what and when it was measured
    files                           {file of flashlib: syntax hash}, the kernels that the timed calls run
    flop_rule, timing               how a time was taken, and how many operations it is divided into
    ceilings                        the copy rate and the matrix product's rate of the same run
    grid                            what was to be measured; ``missing`` compares the cells with it
    cells                           one for each method, direction, shape and layout: the raw time of every
                                    round (``launch_ms``, and ``graph_ms`` where the calls are short), the
                                    median ``ms`` of the rounds named by ``timed``, ``tflops``; or ``error``,
                                    the reason why there is none
    memory                          one for each method and shape: ``extra_bytes``, the peak of a call above
                                    its inputs and output; or ``error``

A direction is "forward", "backward" (of a forward pass that was kept) or "forward+backward".

``benchmarks/traffic.py`` writes a record of another kind, with ``pass`` "traffic": the bytes that each kernel
reads from HBM and writes to it, as the GPU's counters saw them.

    record = load("hbm")
    record.cells_of(method="standard", direction="forward", T=4096, cache_control="all")

gpu, versions (with ``ncu``), date, commit and files are as above; ``counting`` says what is counted,
``command`` how; ``grid`` and ``cells`` are those of :class:`Traffic`.

``benchmarks/decoding.py`` writes the times of one step of decoding, with ``pass`` "decoding": see
:class:`Decoding`.

    load("decoding").cell(method="decode", B=1, T_k=16384, page=0)["us"]

``tiles.json``, with ``pass`` "tiles", is the sweep from which the tile sizes of ``kernels/flash2.py`` were
chosen: see :class:`Tiles`.

Standard library only.
"""

import ast
import hashlib
import importlib.resources
import itertools
import json
import math
import re

KEYS = {
    "pass": str, "gpu": dict, "versions": dict, "date": str, "commit": str, "files": dict, "flop_rule": str,
    "timing": str, "ceilings": dict, "grid": dict, "cells": list, "memory": list,
}  # fmt: skip
VERSIONS = {"python": str, "torch": str, "triton": str, "cuda": str, "cudnn": str}
GRID = {"tokens": int, "width": int, "rounds": int, "sweeps": list, "memory": list}
SWEEP = {"methods": list, "direction": str, "layout": str, "shapes": list}
TRAFFIC_KEYS = {
    "pass": str, "gpu": dict, "versions": dict, "date": str, "commit": str, "files": dict, "counting": str,
    "command": str, "grid": dict, "cells": list,
}  # fmt: skip
TRAFFIC_GRID = {
    "T": list, "B": int, "H": int, "d": int, "dtype": str, "cache_control": list, "steps": list,
    "flash1_block_k": int,
}  # fmt: skip
TRAFFIC_CELL = {
    "method": str, "direction": str, "step": str, "kernel": str, "T": int, "cache_control": str,
    "read_bytes": int, "written_bytes": int,
}  # fmt: skip
TILES_KEYS = {
    "pass": str, "gpu": dict, "versions": dict, "date": str, "timing": str, "flop_rule": str, "dtype": str,
    "tokens": int, "width": int, "cells": list, "sweep": list,
}  # fmt: skip
DECODING_KEYS = {
    "pass": str, "gpu": dict, "versions": dict, "date": str, "commit": str, "files": dict, "timing": str,
    "ceilings": dict, "grid": dict, "cells": list,
}  # fmt: skip
DECODING_GRID = {
    "H": int, "H_kv": int, "T_q": int, "d": int, "dtype": str, "rounds": int, "jobs": list,
}  # fmt: skip
DECODING_IDENTITY = {"method": str, "B": int, "T_k": int, "page": int}
DECODING_CELL = {"calls": int, "bytes": int, "round_us": list, "us": float, "tbs": float}
RATE = {"d": int, "causal": bool, "T_q": int, "tflops": float}
TILES_CELL = {**RATE, "method": str, "layout": str}
TILES_SWEEP = {
    **RATE, "BLOCK_Q": int, "BLOCK_K": int, "num_warps": int, "num_stages": int, "descriptor": bool,
}  # fmt: skip
IDENTITY = {
    "method": str, "direction": str, "B": int, "H": int, "H_kv": int, "T_q": int, "T_k": int, "d": int,
    "causal": bool, "layout": str, "dtype": str,
}  # fmt: skip


def names():
    """The names of the records that are there, sorted: what ``load`` takes."""
    files = importlib.resources.files(__package__).iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def load(name):
    """The record ``flashlib/records/<name>.json``: a Record, a Traffic, a Decoding or a Tiles, by its
    ``pass``.

    ValueError if there is none, or none that is whole; TypeError if name is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"load: name must be the name of a record, got {type(name).__name__}")
    file = importlib.resources.files(__package__) / f"{name}.json"
    if not re.fullmatch(r"\w+", name) or not file.is_file():
        raise ValueError(
            f"there is no record {name!r}, only {', '.join(names())}: run `make bench` on a GPU to make it, "
            "or `python benchmarks/traffic.py` for 'hbm'"
        )
    try:
        data = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"record {name!r} is not valid JSON: {error}") from error
    kind = data.get("pass") if isinstance(data, dict) else None
    kinds = {"traffic": Traffic, "tiles": Tiles, "decoding": Decoding}
    return kinds.get(kind, Record)(name, data)


def syntax_hash(source):
    """Hash of the syntax tree of Python source: comments, layout and docstrings do not count."""
    return hashlib.sha256(repr(_canonical(ast.parse(source))).encode()).hexdigest()[:16]


def file_hashes(paths):
    """{path: syntax hash} of files of the installed flashlib; paths are relative to it, such as
    ``kernels/flash2.py``.

    A file that does not exist has the hash "missing".
    """
    root = importlib.resources.files("flashlib")
    files = {path: root / path for path in paths}
    return {
        path: syntax_hash(file.read_text()) if file.is_file() else "missing" for path, file in files.items()
    }


def _changed(files):
    """Of {path: syntax hash}, the paths whose file has another hash now."""
    now = file_hashes(files)
    return [path for path, old in files.items() if now[path] != old]


class Record:
    """One pass of the benchmarks. ``data`` is the whole JSON object; its parts are attributes too.

    ``grid`` has the sweeps whose cells were to be measured, each with methods, a direction, a layout and
    shapes [B, H, T, d, causal]; the sizes B T = ``tokens`` and H d = ``width`` of the ladder; ``rounds``.

    Raises ValueError, naming the record and the place, for a part or a field that is absent, of a wrong type,
    or not finite.
    """

    def __init__(self, name, data):
        self.name = name
        self.data = data
        _check_types(f"record {name!r}", data, KEYS)
        _check_types(f"record {name!r}, gpu", data["gpu"], {"name": str})
        _check_types(f"record {name!r}, versions", data["versions"], VERSIONS)
        _check_types(f"record {name!r}, grid", data["grid"], GRID)
        self.gpu, self.versions, self.grid = data["gpu"], data["versions"], data["grid"]
        self.cells, self.memory, self.ceilings = data["cells"], data["memory"], data["ceilings"]
        for part in ("sweeps", "memory"):
            for place, sweep in enumerate(self.grid[part]):
                _check_types(f"record {name!r}, grid {part}[{place}]", sweep, SWEEP)
        for part, check in (("cells", _check_cell), ("memory", _check_memory)):
            seen = set()
            for place, cell in enumerate(data[part]):
                where = f"record {name!r}, {part}[{place}]"
                _check_types(where, cell, IDENTITY)
                check(where, cell)
                key = tuple(cell[field] for field in IDENTITY)
                if key in seen:
                    raise ValueError(f"{where}: the same cell stands there twice: {cell}")
                seen.add(key)

    def cell(self, *, layout="contiguous", **key):
        """The one measured cell with these fields. ValueError if none, several, or an unmeasured one fits."""
        return self._one("cells", {"layout": layout, **key})

    def memory_cell(self, **key):
        """The one measured memory cell with these fields. ValueError as for ``cell``."""
        return self._one("memory", key)

    def _one(self, part, key):
        unknown = key.keys() - IDENTITY.keys()
        if unknown:
            raise ValueError(
                f"unknown field {sorted(unknown)[0]!r}: a cell is named by {', '.join(IDENTITY)}"
            )
        found = [
            cell for cell in self.data[part] if all(cell[field] == value for field, value in key.items())
        ]
        wanted = ", ".join(f"{field} = {value}" for field, value in key.items())
        if len(found) != 1:
            count = "no cell" if not found else f"{len(found)} cells"
            raise ValueError(f"record {self.name!r} has {count} in {part} with {wanted}")
        if "error" in found[0]:
            raise ValueError(f"record {self.name!r}: {wanted} was not measured: {found[0]['error']}")
        return found[0]

    def ladder(self, d, causal, direction="forward"):
        """{method: [(T, TFLOP/s)]} of the contiguous cells of the ladder that were measured, T ascending."""
        sizes = {"d": d, "H": self.grid["width"] // d, "causal": causal, "direction": direction}
        return _rates(
            c
            for c in self.cells
            if c["B"] * c["T_q"] == self.grid["tokens"] and all(c[key] == sizes[key] for key in sizes)
        )

    def missing(self):
        """The cells of the grid that are not there, one line each. A cell with an ``error`` is there."""
        lines = []
        for part, of, sweeps in (
            ("cells", "", self.grid["sweeps"]),
            ("memory", "memory of ", self.grid["memory"]),
        ):
            fields = ("method", "direction", "layout", "B", "H", "T_q", "d", "causal")
            have = {tuple(cell[field] for field in fields) for cell in self.data[part]}
            for sweep in sweeps:
                for method, (B, H, T, d, causal) in itertools.product(sweep["methods"], sweep["shapes"]):
                    if (method, sweep["direction"], sweep["layout"], B, H, T, d, causal) not in have:
                        lines.append(
                            f"{of}{method}, {sweep['direction']}, {sweep['layout']}, B = {B}, H = {H}, "
                            f"T = {T}, d = {d}, causal = {causal}"
                        )
        return lines

    def stale(self):
        """The files of flashlib that have changed since the record was measured."""
        return _changed(self.data["files"])

    def provenance(self):
        """Four lines for a figure: GPU, date, dtype and sizes of the ladder; versions; how operations are
        counted.
        """
        return f"{self._where()}, B T = {self.grid['tokens']}, H d = {self.grid['width']}\n{self._how()}"

    def memory_provenance(self):
        """Two lines for a figure of the memory: GPU, dtype, sizes and date; versions."""
        first = self.memory[0]
        sizes = f"B = {first['B']}, H = {first['H']}, d = {first['d']}"
        return f"{self._where()}, {sizes}\n{self._how().splitlines()[0]}"

    def _where(self):
        return f"{self.gpu['name']}, {self.data['date'][:10]}, {self.cells[0]['dtype']}"

    def _how(self):
        versions = self.versions
        return (
            f"torch {versions['torch']}, triton {versions['triton']}, CUDA {versions['cuda']}, "
            f"cuDNN {versions['cudnn']}\n{self.data['flop_rule'].replace('; ', chr(10))}"
        )


class Traffic:
    """One run of ``benchmarks/traffic.py``: bytes between the L2 cache and HBM, kernel by kernel.

    grid    T, and one each of B, H, d and dtype; ``cache_control``, the ways of ncu; ``steps``, the
            [method, direction, step, kernel] of each launch, in order; ``flash1_block_k``, the keys of one
            block of flash1
    cells   one for each T, way and step: ``read_bytes`` from HBM, ``written_bytes`` to it

    Raises ValueError as Record does, and for a negative count or a cell that stands there twice.
    """

    def __init__(self, name, data):
        self.name, self.data = name, data
        _check_types(f"record {name!r}", data, TRAFFIC_KEYS)
        _check_types(f"record {name!r}, gpu", data["gpu"], {"name": str, "l2_bytes": int})
        _check_types(f"record {name!r}, versions", data["versions"], {**VERSIONS, "ncu": str})
        _check_types(f"record {name!r}, grid", data["grid"], TRAFFIC_GRID)
        self.gpu, self.versions, self.grid, self.cells = (
            data[part] for part in ("gpu", "versions", "grid", "cells")
        )
        seen = set()
        for place, cell in enumerate(self.cells):
            where = f"record {name!r}, cells[{place}]"
            _check_types(where, cell, TRAFFIC_CELL)
            if min(cell["read_bytes"], cell["written_bytes"]) < 0:
                raise ValueError(f"{where}: a count is negative: {cell}")
            key = self._key(cell)
            if key in seen:
                raise ValueError(f"{where}: the same cell stands there twice: {cell}")
            seen.add(key)

    @staticmethod
    def _key(cell):
        return tuple(cell[field] for field in ("T", "cache_control", "method", "direction", "step"))

    def cells_of(self, **key):
        """The cells with these fields, in the order of the launches. ValueError if there is none."""
        for field in key:
            if field not in TRAFFIC_CELL:
                raise ValueError(f"unknown field {field!r}: a cell has {', '.join(TRAFFIC_CELL)}")
        found = [cell for cell in self.cells if all(cell[field] == value for field, value in key.items())]
        if not found:
            wanted = ", ".join(f"{field} = {value}" for field, value in key.items())
            raise ValueError(f"record {self.name!r} has no cell with {wanted}")
        return found

    def missing(self):
        """The cells of the grid that are not there, one line each."""
        have = {self._key(cell) for cell in self.cells}
        return [
            f"{method}, {direction}, {step}, T = {T}, cache control {way}"
            for way, T, (method, direction, step, _) in itertools.product(
                self.grid["cache_control"], self.grid["T"], self.grid["steps"]
            )
            if (T, way, method, direction, step) not in have
        ]

    def stale(self):
        """The files of flashlib that have changed since the record was measured."""
        return _changed(self.data["files"])

    def provenance(self):
        """Two lines for a figure: GPU, dtype, sizes and date; versions."""
        grid, versions = self.grid, self.versions
        return (
            f"{self.gpu['name']}, {grid['dtype']}, B H = {grid['B'] * grid['H']}, d = {grid['d']}, "
            f"{self.data['date'][:10]}\nNsight Compute {versions['ncu']}, torch {versions['torch']}, "
            f"triton {versions['triton']}"
        )


class Decoding:
    """One run of ``benchmarks/decoding.py``: microseconds of one step of decoding.

    grid    H, H_kv, T_q, d, dtype; ``jobs``, the [method, B, T_k, page] that were to be timed; a page of 0 is
            a contiguous cache
    cells   one for each job: ``round_us`` of every round and their median ``us``, the ``bytes`` of keys and
            values that the step reads, ``tbs``; or ``error``, the reason why there is none

    Raises ValueError as Record does.
    """

    def __init__(self, name, data):
        self.name, self.data = name, data
        _check_types(f"record {name!r}", data, DECODING_KEYS)
        _check_types(f"record {name!r}, gpu", data["gpu"], {"name": str})
        _check_types(f"record {name!r}, versions", data["versions"], VERSIONS)
        _check_types(f"record {name!r}, grid", data["grid"], DECODING_GRID)
        _check_types(f"record {name!r}, ceilings", data["ceilings"], {"copy_tbs": float})
        self.gpu, self.versions, self.grid = data["gpu"], data["versions"], data["grid"]
        self.cells, self.copy_tbs = data["cells"], data["ceilings"]["copy_tbs"]
        seen = set()
        for place, cell in enumerate(self.cells):
            where = f"record {name!r}, cells[{place}]"
            _check_types(where, cell, DECODING_IDENTITY)
            if "error" not in cell:
                _check_types(where, cell, DECODING_CELL)
                numbers = [*cell["round_us"], cell["us"], cell["tbs"]]
                if not all(isinstance(x, float) and math.isfinite(x) and x > 0 for x in numbers):
                    raise ValueError(f"{where}: times and rates must be finite and positive, got {numbers}")
            key = tuple(cell[field] for field in DECODING_IDENTITY)
            if key in seen:
                raise ValueError(f"{where}: the same cell stands there twice: {cell}")
            seen.add(key)

    def cell(self, *, method="decode", B, T_k, page=0):
        """The measured cell of a job. ValueError if there is none."""
        for cell in self.cells:
            if (cell["method"], cell["B"], cell["T_k"], cell["page"]) == (method, B, T_k, page):
                if "error" not in cell:
                    return cell
                raise ValueError(f"record {self.name!r}: it was not measured: {cell}")
        raise ValueError(f"record {self.name!r} has no cell of {method}, B = {B}, T_k = {T_k}, page = {page}")

    def share(self, **key):
        """The bytes per second of a cell, as a part of those that a large copy reads and writes."""
        return self.cell(**key)["tbs"] / self.copy_tbs

    def curve(self, B, method="decode", page=0):
        """[(T_k, microseconds)] of the cells that were measured, T_k ascending."""
        return sorted(
            (cell["T_k"], cell["us"])
            for cell in self.cells
            if (cell["method"], cell["B"], cell["page"]) == (method, B, page) and "us" in cell
        )

    def missing(self):
        """The jobs without a cell, one line each. A cell with an ``error`` is there."""
        have = {tuple(cell[field] for field in DECODING_IDENTITY) for cell in self.cells}
        return [
            f"{method}, B = {B}, T_k = {T_k}, page = {page}"
            for method, B, T_k, page in self.grid["jobs"]
            if (method, B, T_k, page) not in have
        ]

    def stale(self):
        """The files of flashlib that have changed since the record was measured."""
        return _changed(self.data["files"])

    def provenance(self):
        """Two lines for a figure: GPU, date, dtype and sizes; versions and the copy rate."""
        grid, versions = self.grid, self.versions
        return (
            f"{self.gpu['name']}, {self.data['date'][:10]}, {grid['dtype']}, H = {grid['H']}, "
            f"H_kv = {grid['H_kv']}, d = {grid['d']}\ntorch {versions['torch']}, triton "
            f"{versions['triton']}, a copy in the same run: {self.copy_tbs:.2f} TB/s"
        )


class Tiles:
    """A sweep over tile sizes: one median each, so rates are good to a few percent.

    cells   the rates of flash2 with the tiles that were chosen and of PyTorch's pinned kernels
    sweep   the rates of flash2 with other tiles, for each d, mask and length

    Raises ValueError as Record does.
    """

    def __init__(self, name, data):
        self.name, self.data = name, data
        _check_types(f"record {name!r}", data, TILES_KEYS)
        _check_types(f"record {name!r}, gpu", data["gpu"], {"name": str})
        _check_types(f"record {name!r}, versions", data["versions"], {"torch": str, "triton": str})
        self.cells, self.sweep = data["cells"], data["sweep"]
        for part, types in (("cells", TILES_CELL), ("sweep", TILES_SWEEP)):
            for place, cell in enumerate(data[part]):
                where = f"record {name!r}, {part}[{place}]"
                _check_types(where, cell, types)
                if not (math.isfinite(cell["tflops"]) and cell["tflops"] > 0):
                    raise ValueError(f"{where}: a rate must be finite and positive, got {cell['tflops']}")

    def ladder(self, d, causal, direction="forward"):
        """{method: [(T, TFLOP/s)]} of the contiguous cells, T ascending; the direction is always forward."""
        return _rates(c for c in self.cells if (c["d"], c["causal"], direction) == (d, causal, "forward"))

    def provenance(self):
        """Three lines for a figure: GPU, dtype, sizes and date; versions; how operations are counted."""
        data, versions = self.data, self.data["versions"]
        return (
            f"{data['gpu']['name']}, {data['dtype']}, B T = {data['tokens']}, H d = {data['width']}, "
            f"{data['date']}\ntorch {versions['torch']}, triton {versions['triton']}, one median a point\n"
            f"{data['flop_rule']}"
        )


def _check_types(where, data, types):
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object, got {type(data).__name__}")
    for key, kind in types.items():
        if key not in data:
            raise ValueError(f"{where} has no {key!r}")
        # bool is an int to Python
        if not isinstance(data[key], kind) or (kind is int and isinstance(data[key], bool)):
            raise ValueError(f"{where}: {key!r} must be {kind.__name__}, got {data[key]!r:.80}")


def _check_cell(where, cell):
    if "error" in cell:
        _check_types(where, cell, {"error": str})
        return
    _check_types(where, cell, {"launch_ms": list, "timed": str, "ms": float, "tflops": float})
    if cell["timed"] not in ("launch", "graph") or f"{cell['timed']}_ms" not in cell:
        raise ValueError(f"{where}: 'timed' must name the rounds that were used, got {cell['timed']!r}")
    numbers = [*cell["launch_ms"], *cell.get("graph_ms", []), cell["ms"], cell["tflops"]]
    if not cell["launch_ms"] or not all(isinstance(x, float) and math.isfinite(x) and x > 0 for x in numbers):
        raise ValueError(f"{where}: times and rates must be finite and positive, got {numbers}")


def _check_memory(where, cell):
    _check_types(where, cell, {"error": str} if "error" in cell else {"extra_bytes": int})
    if cell.get("extra_bytes", 0) < 0:
        raise ValueError(f"{where}: a size is negative: {cell}")


def _rates(cells):
    found = {}
    for cell in cells:
        if cell["layout"] == "contiguous" and "tflops" in cell:
            found.setdefault(cell["method"], []).append((cell["T_q"], cell["tflops"]))
    return {method: sorted(points) for method, points in found.items()}


def _canonical(node):
    """A syntax tree as nested tuples without docstrings, the same under every Python version.

    `ast.dump` will not do: 3.12 added empty `type_params` fields, and 3.13 leaves empty fields out.
    """
    if isinstance(node, ast.AST):
        fields = []
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                first = value[0] if value else None
                if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                    value = value[1:]
            if value is not None and value != []:
                fields.append((name, _canonical(value)))
        return (type(node).__name__, *fields)
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    return repr(node)
