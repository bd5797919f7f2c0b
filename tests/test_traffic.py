"""The committed counts of HBM bytes: complete, of today's kernels, near the model. Then the script, off GPU.

Nothing is counted here. A record that is missing or old fails with what to do about it.
"""

import copy
import json
import pathlib
import subprocess
import sys

import pytest
import torch
from pending import waits_for_gpu

from flashlib import records
from flashlib.iomodel import formulas

ROOT = pathlib.Path(__file__).resolve().parents[1]
T = (512, 1024, 2048, 4096, 8192)
KERNELS = ("tiles", "standard", "gradients", "flash1", "flash2", "backward")
FILES = tuple(f"kernels/{name}.py" for name in KERNELS)
REDO = "run `python benchmarks/traffic.py` on a GPU and commit the new record"
BAR = 0.25  # how far measured bytes may be from the model's

# ------------------------------------------------------------------------------------------------------------
# The judges


def incomplete(record):
    """What the record does not hold of the grid that the book promises."""
    faults = [f"the grid lacks T = {t}: {REDO}" for t in T if t not in record.grid["T"]]
    if record.grid["B"] * record.grid["H"] != 32 or record.grid["d"] != 64:
        faults.append(f"the grid has other sizes than B H = 32, d = 64: {REDO}")
    if record.grid["dtype"] != "bfloat16" or set(record.grid["cache_control"]) != {"all", "none"}:
        faults.append(f"the grid is not bfloat16 under both kinds of cache control: {REDO}")
    promised = [
        ["standard", "forward", "S"], ["standard", "forward", "P"], ["standard", "forward", "O"],
        *[["standard", "backward", step] for step in ("dV", "dP", "D", "dS", "dQ", "dK")],
        ["flash1", "forward", "O"], ["flash2", "forward", "O"],
        *[["flash2", "backward", step] for step in ("D", "dK, dV", "dQ")],
        *[["flash2-atomic", "backward", step] for step in ("D", "dQ, dK, dV")],
    ]  # fmt: skip
    if [step[:3] for step in record.grid["steps"]] != promised:
        faults.append(f"the steps are not those of the standard passes, flash1 and flash2: {REDO}")
    return faults + [f"missing cell: {line}: {REDO}" for line in record.missing()]


def outdated(record):
    """The kernel files that the record does not speak of, or whose code has changed since."""
    faults = [
        f"the record has no hash of {path}: {REDO}" for path in FILES if path not in record.data["files"]
    ]
    return faults + [f"{path} has changed since the record was made: {REDO}" for path in record.stale()]


def moved(record, method, direction, t):
    """The bytes of one pass, caches emptied before each kernel. ValueError where nothing was counted."""
    cells = record.cells_of(method=method, direction=direction, T=t, cache_control="all")
    return sum(cell["read_bytes"] + cell["written_bytes"] for cell in cells)


def off_model(record):
    """Whether the standard forward pass moves other bytes at T = 4096 than the model says."""
    try:
        measured = moved(record, "standard", "forward", 4096)
    except ValueError as error:
        return [str(error)]
    predicted = formulas.total_bytes(formulas.standard_forward_bytes(4096, 64, 32, 2))
    if abs(measured / predicted - 1) <= BAR:
        return []
    return [f"the standard forward pass moves {measured} bytes, {measured / predicted:.2f} of the model's"]


def flash1_is_no_worse(record):
    """Whether flash1, whose O, m and l go out and in with every block of keys, moves no more than flash2 at
    T = 8192, where they are larger than the L2 cache; whether one of them moves as much as standard.
    """
    try:
        old, new, standard = (moved(record, m, "forward", 8192) for m in ("flash1", "flash2", "standard"))
    except ValueError as error:
        return [str(error)]
    faults = [] if old >= 2 * new else [f"flash1 moves {old} bytes, flash2 {new}"]
    return faults + ([] if new < standard / 10 else [f"flash2 moves {new} bytes, standard {standard}"])


JUDGES = (incomplete, outdated, off_model, flash1_is_no_worse)


@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.__name__)
def test_the_committed_record(judge):
    waits_for_gpu("flashlib/records/hbm.json", (ROOT / "flashlib/records/hbm.json").exists())
    faults = judge(records.load("hbm"))
    assert not faults, "\n".join(faults)


# ------------------------------------------------------------------------------------------------------------
# The script


@pytest.fixture
def traffic(monkeypatch):
    """benchmarks/traffic.py as a module, with what asks for a GPU replaced."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("run", "traffic"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import traffic

    monkeypatch.setattr(traffic.run, "release", lambda: None)
    versions = dict.fromkeys(("python", "torch", "triton", "cuda", "cudnn"), "0")
    environment = {
        "gpu": {"name": "no GPU"},
        "versions": versions,
        "date": "2000-01-01T00:00:00Z",
        "commit": "0",
    }
    monkeypatch.setattr(traffic.run, "environment", lambda: copy.deepcopy(environment))
    properties = type("Properties", (), {"L2_cache_size": 1000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return traffic


def quiet(text):
    pass


def raw_page(launches, unit="byte"):
    """What ncu writes into its log: chatter, a table's head, its units, one line a launch."""
    head = '"ID","Kernel Name","Block Size","dram__bytes_read.sum","dram__bytes_write.sum"'
    lines = ["==PROF== Connected to process 1", head, f'"","","","{unit}","{unit}"']
    lines += [
        f'"{i}","{name}","(128, 1, 1)","{read:,}","{written:,}"'
        for i, (name, read, written) in enumerate(launches)
    ]
    return "\n".join([*lines, "==PROF== Disconnected"])


def test_the_table_of_ncu_is_read(traffic):
    text = raw_page([("scores_kernel", 33554432, 2147483648), ("output_kernel(float *)", 5, 0)])
    assert traffic.parse(text) == [
        ("scores_kernel", {"read_bytes": 33554432, "written_bytes": 2147483648}),
        ("output_kernel", {"read_bytes": 5, "written_bytes": 0}),
    ]
    with pytest.raises(ValueError, match="in 'Mbyte', expected 'byte'"):
        traffic.parse(raw_page([("scores_kernel", 1, 1)], unit="Mbyte"))
    with pytest.raises(ValueError, match="no table with Kernel Name"):
        traffic.parse("==ERROR== ERR_NVGPUCTRPERM: no permission")
    with pytest.raises(ValueError, match="else than whole bytes"):
        traffic.parse(raw_page([("scores_kernel", 1.5, 1)]))


def test_kernels_are_launched_in_the_order_that_is_read(traffic, monkeypatch):
    launched = []

    class Spy:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            launched.append(self.name)
            return self.kernel[grid]

    for module in (
        traffic.standard, traffic.gradients, traffic.flash1, traffic.flash2, traffic.backward
    ):  # fmt: skip
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Spy(name, getattr(module, name)))
    grid = traffic.Grid(T=(24,), B=1, H=2, d=16)
    traffic.gate(grid, 24, "cpu")  # launches, and judges what came out
    assert launched == [kernel for *_, kernel in traffic.steps()]


def fake_ncu(traffic, monkeypatch, log, returncode=0, stdout=""):
    """Replace the profiler: it writes the text `log` where it was told to."""

    def profile(command, **options):
        if "--version" in command:
            return subprocess.CompletedProcess(
                command, 0, "NVIDIA (R) Nsight\nVersion 2025.3.1.0 (build 1)\n", ""
            )
        if "--log-file" in command:
            pathlib.Path(command[command.index("--log-file") + 1]).write_text(log)
        return subprocess.CompletedProcess(command, returncode, stdout, "")

    monkeypatch.setattr(traffic.subprocess, "run", profile)


def modelled(traffic, grid, factor=1.0):
    """The launches of a grid as ncu would list them if the model were right, times a factor."""
    launches = []
    for t in grid.T:
        for method, direction, step, kernel in traffic.steps():
            cell = {"method": method, "direction": direction, "step": step, "T": t}
            transfer = traffic.model(cell, {"B": grid.B, "H": grid.H, "d": grid.d})
            launches.append((kernel, int(factor * transfer.read_bytes), int(factor * transfer.written_bytes)))
    return launches


@pytest.fixture
def data(traffic, monkeypatch):
    """A whole made-up record, in which the model is 10 % short."""
    grid = traffic.Grid()
    monkeypatch.setattr(traffic, "gate", lambda *arguments: None)
    fake_ncu(traffic, monkeypatch, raw_page(modelled(traffic, grid, 1.1)))
    return traffic.measure(grid, [], "cpu", quiet)


def test_a_run_gives_a_whole_record(traffic, data, tmp_path):
    traffic.run.write(data, tmp_path / "hbm.json")
    record = records.Traffic("hbm", json.loads((tmp_path / "hbm.json").read_text()))
    assert [judge(record) for judge in JUDGES] == [[], [], [], []]
    assert record.versions["ncu"] == "2025.3.1.0" and record.gpu["l2_bytes"] == 1000
    assert "/" not in record.data["command"].replace("benchmarks/traffic.py", "")
    assert "no GPU, bfloat16, B H = 32, d = 64, 2000-01-01" in record.provenance()
    assert len(traffic.table(data).splitlines()) == 1 + len(record.cells) == 1 + 2 * 5 * 16
    cell = record.cells_of(T=4096, step="S", cache_control="none")[0]
    assert cell["written_bytes"] == int(1.1 * 32 * 4096**2 * 4)


def test_launches_that_do_not_match_are_refused(traffic, monkeypatch):
    grid = traffic.Grid(T=(512,))
    launches = modelled(traffic, grid)
    fake_ncu(traffic, monkeypatch, raw_page(launches[:-1]))
    with pytest.raises(RuntimeError, match="counted 15 launches, expected 16"):
        traffic.count(grid, "all", [])
    fake_ncu(traffic, monkeypatch, raw_page(launches[::-1]))
    with pytest.raises(RuntimeError, match="in another order"):
        traffic.count(grid, "all", [])
    fake_ncu(traffic, monkeypatch, "", returncode=9, stdout="==ERROR== LibraryNotLoaded")
    with pytest.raises(RuntimeError, match=r"ncu failed:\n==ERROR== LibraryNotLoaded"):
        traffic.count(grid, "all", [])


def test_main(traffic, data, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(traffic.shutil, "which", lambda name: name)
    traffic.main(["--output", str(tmp_path / "hbm.json")])
    assert "all  T 4096  standard forward S" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["hbm.json"]
    calls = []
    monkeypatch.setattr(traffic, "launch", lambda *arguments: calls.append(arguments[1]))
    traffic.main(["--launch", "--quick"])
    assert calls == [512, 1024]
    monkeypatch.setattr(traffic.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"ncu .* is not on the PATH"):
        traffic.main([])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA GPU found"):
        traffic.main([])


# ------------------------------------------------------------------------------------------------------------
# The judges and the loader can fail


def drop_cell(data):
    data["cells"].pop()


def shrink_grid(data):
    data["grid"]["T"].remove(8192)


def shrink_grid_and_cells(data):
    shrink_grid(data)
    data["cells"] = [cell for cell in data["cells"] if cell["T"] != 8192]


def one_way(data):
    data["grid"]["cache_control"] = ["all"]


def other_heads(data):
    data["grid"]["H"] = 8


def no_backward(data):
    data["grid"]["steps"] = [step for step in data["grid"]["steps"] if step[1] == "forward"]


def changed_kernel(data):
    data["files"]["kernels/gradients.py"] = "0" * 16


def unhashed_kernel(data):
    del data["files"]["kernels/tiles.py"]


def read_three_times(data):
    for cell in data["cells"]:
        if cell["step"] == "P":
            cell["read_bytes"] *= 3


def flash1_keeps_its_state(data):
    for cell in data["cells"]:
        if cell["method"] == "flash1":
            cell["read_bytes"] = cell["written_bytes"] = 10**8


def flash2_moves_a_matrix(data):
    for cell in data["cells"]:
        if (cell["method"], cell["T"]) == ("flash2", 8192):
            cell["read_bytes"] += 4 * 32 * cell["T"] ** 2


def never_measured(data):
    data["cells"] = [cell for cell in data["cells"] if cell["T"] != 4096]


@pytest.mark.parametrize(
    ("doctor", "judge"),
    [
        (drop_cell, incomplete), (shrink_grid, incomplete), (one_way, incomplete), (other_heads, incomplete),
        (no_backward, incomplete), (changed_kernel, outdated), (unhashed_kernel, outdated),
        (read_three_times, off_model), (never_measured, off_model),
        (flash1_keeps_its_state, flash1_is_no_worse), (flash2_moves_a_matrix, flash1_is_no_worse),
        (shrink_grid_and_cells, flash1_is_no_worse),
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_a_judge_catches(data, doctor, judge):
    doctor(data)
    faults = judge(records.Traffic("doctored", data))
    assert faults
    if judge in (incomplete, outdated):
        assert all("benchmarks/traffic.py" in fault for fault in faults)


def negative(data):
    data["cells"][3]["read_bytes"] = -1


def real_for_int(data):
    data["cells"][3]["read_bytes"] = 1.0


def twice(data):
    data["cells"].append(dict(data["cells"][3]))


def no_version_of_ncu(data):
    del data["versions"]["ncu"]


def no_l2(data):
    del data["gpu"]["l2_bytes"]


@pytest.mark.parametrize("doctor", [negative, real_for_int, twice, no_version_of_ncu, no_l2])
def test_a_broken_record_is_refused(data, doctor):
    doctor(data)
    with pytest.raises(ValueError, match="record 'broken'"):
        records.Traffic("broken", data)


def test_load(data, tmp_path, monkeypatch):
    (tmp_path / "hbm.json").write_text(json.dumps(data))
    monkeypatch.setattr(records.importlib.resources, "files", lambda package: tmp_path)
    record = records.load("hbm")
    assert isinstance(record, records.Traffic)
    with pytest.raises(ValueError, match="has no cell with T = 7"):
        record.cells_of(T=7)
    with pytest.raises(ValueError, match="unknown field 'ms'"):
        record.cells_of(ms=1)
