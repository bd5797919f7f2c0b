"""The benchmarks of eight bits without a GPU: sizes shrunk, clock replaced, and tensor
cores whose sums are known.
"""

import itertools
import math

import pytest
import torch
from device import on_cpu
from ring_benchmark import environment

from benchmarks import __main__ as command
from benchmarks import eight_bits, probes, timing
from flashlib import records

pytestmark = on_cpu


@pytest.fixture(autouse=True)
def off_gpu(monkeypatch):
    """A CPU, and a clock that ticks and runs a call."""
    ticks = itertools.count(1)

    def time_ms(action):
        action()
        return 1.0 + next(ticks) / 1024

    monkeypatch.setattr(timing, "DEVICE", "cpu")
    monkeypatch.setattr(timing, "time_ms", time_ms)
    monkeypatch.setattr(timing, "clock_mhz", lambda make, ms: 1500)
    monkeypatch.setattr(timing, "release", lambda: None)
    monkeypatch.setattr(timing, "ceilings", lambda: {"copy_tbs": 1.0})
    monkeypatch.setattr(timing, "environment", environment)


def quiet(text):
    pass


def test_the_record_of_eight_bits_is_whole(monkeypatch, tmp_path):
    sizes = {"TOKENS": 64, "WIDTH": 64, "LENGTHS": (64,), "WIDTHS": (64,)}
    sizes |= {
        "ROWS": 8,
        "LENGTH": 40,
        "METHODS": ("fp8", "fp8+quantize"),
        "PAGES": (0, 16),
    }
    sizes |= {"CACHE": {"B": 2, "H": 2, "H_kv": 1, "T": 32, "d": 16}}
    for name, value in sizes.items():
        monkeypatch.setattr(eight_bits, name, value)
    monkeypatch.setattr(timing, "DTYPE", torch.float16)
    monkeypatch.setattr(eight_bits, "compile_all", lambda quick: None)
    path = tmp_path / "fp8.json"
    data, left = eight_bits.run(False, quiet, path, end=0.0)
    assert len(left) == 1 and not data["cells"] and not path.exists()
    data, failures = eight_bits.run(False, quiet, path)
    again, _ = eight_bits.run(False, quiet, path)  # nothing is left to measure
    assert again == data
    record = records.Record("fp8", data)
    assert failures == [] and len(record.cells) == 2 * 2
    for cell in record.cells:
        assert len(cell["round_ms"]) == 3 and cell["ms"] == sorted(cell["round_ms"])[1]
        flops = 4 * 64 * 64 * 64 / (2 if cell["causal"] else 1)
        assert cell["tflops"] == timing.digits(flops / cell["ms"] / 1e9)
    found = {x["recipe"]: x["rms"] for x in data["errors"] if x["inputs"] == "columns"}
    assert found["full"] < 0.7 * found["one scale per tensor"]
    assert found["bfloat16"] < 0.1 * found["full"]
    both = [
        record.cell("caches", cache=x)["bytes"] for x in ("float16", "float8_e4m3fn")
    ]
    assert both[0] == 2 * 2 * 32 * 16 * 2 and both[1] == both[0] / 2 + 2 * 2 * 32 * 4
    assert record.provenance().endswith(eight_bits.FLOP_RULE)


def cores(aligned, held, together, up=0.0):
    """A product as tensor cores with these properties add it; up is added before a sum
    is cut: a half rounds to nearest.
    """

    def cut(x, top, bits):
        unit = 2.0 ** (top - bits)
        return math.copysign(math.floor(abs(x) / unit + up), x) * unit if x else 0.0

    def added(terms):
        total, K = 0.0, 32  # numbers of an instruction
        for start in range(0, len(terms), together):
            parts = [total, *terms[start : start + together]]
            assert start // K == (start + together - 1) // K
            top = max((math.frexp(x)[1] - 1 for x in parts if x), default=0)
            unit = 2.0 ** (top - aligned)
            exact = sum(math.trunc(x / unit) * unit for x in parts)
            total = cut(exact, math.frexp(exact)[1] - 1, held)
        return total

    def product(a, b):
        rows = (a.double() * b[0].double()).tolist()
        sums = {row: added(row) for row in set(map(tuple, rows))}
        return torch.tensor([[sums[tuple(row)]] * 8 for row in rows])

    return product


@pytest.mark.parametrize(
    ("properties", "rounding"),
    [
        ((13, 13, 32), "toward zero"),
        ((14, 12, 16), "toward zero"),
        ((20, 10, 8, 0.5), "to nearest"),
    ],
)
def test_probes_find_what_tensor_cores_do(monkeypatch, properties, rounding):
    monkeypatch.setattr(probes, "product", cores(*properties))
    found = probes.probe(torch.float8_e4m3fn)
    aligned, held, together, *_ = properties
    assert found == {
        "dtype": "float8_e4m3fn", "numbers": 32, "aligned": aligned, "held": held,
        "rounding": rounding, "together": together,
    }  # fmt: skip


def test_the_record_of_probes_is_whole(monkeypatch):
    """And sums in two levels lose less."""
    monkeypatch.setattr(probes, "DTYPES", (torch.float8_e4m3fn,))
    monkeypatch.setattr(probes, "LENGTHS", (512,))
    monkeypatch.setattr(probes, "product", cores(13, 13, 32))
    data, _ = probes.run(False, quiet)
    record = records.Record("probes", data)
    one, two = (
        record.cell("sums", levels=x)["ratio"] for x in ("one level", "two levels")
    )
    assert 0.99 < one < two - 1e-4 < two <= 1.0
    assert record.provenance().startswith("no GPU")


def test_another_gpu_leaves_them_out(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    command.main(["fp8", "probes", "--quick"])
    said = capsys.readouterr().out
    assert said.count("its kernels need compute capability 9.0, left out") == 2
