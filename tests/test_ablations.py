"""The ablations: what they plan, that each changes one thing, and that a run continues
a record.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device import on_cpu
from processes import process_environment, run
from roles import FORWARD, Threads

from benchmarks import ablations, last_step
from flashlib import plans, records
from flashlib.kernels import (
    gluon_forward,
    gluon_keep,
    gluon_lists,
    gluon_scores,
    gluon_tasks,
    hopper,
    hopper_tiles,
)


@pytest.mark.slow
def test_what_the_variants_of_the_last_step_change_as_compiled():
    worker = Path(__file__).with_name("ablations_worker.py")
    changes = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    changes["TRITON_ALWAYS_COMPILE"] = "1"
    changes["PYTHONPATH"] = str(worker.parents[1])  # it imports benchmarks
    done = run([sys.executable, worker, "128"], env=process_environment(**changes))
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert said["equal"], "something of a variant is left"
    assert not any(said["stack"].values()), said["stack"]
    # A product of blocks has an addition for each number that it adds.
    assert said["sums"]["apart"] >= said["sums"]["plain"] + 64, said["sums"]
    # The depth page quotes the record.
    cells = records.load("ablations").cells_of("code", d=128)
    assert said["code"] == [{name: x[name] for name in said["code"][0]} for x in cells]


@on_cpu
@pytest.mark.parametrize(
    "name",  # inline PTX has no meaning in Python
    sorted(last_step.CHANGES.keys() - {last_step.ORDER, last_step.POLYNOMIAL}),
)
def test_the_variants_as_threads(name, monkeypatch):
    """Barriers, phases, slots and sums, whatever the order of the roles."""
    changes = last_step.CHANGES[name]
    modules = gluon_scores, gluon_lists, gluon_forward, gluon_keep, gluon_tasks, hopper
    names = {key: x for module in modules for key, x in vars(module).items()}
    names |= {"THREAD_SUMS": names["thread_sums"], "larger": last_step.larger}
    names |= {key: x for (owner, key), x in changes.items() if owner is hopper}
    kernel = Threads("forward_kernel", (*FORWARD, "THREAD_SUMS", "larger"), names)
    kernel.arg_names = hopper.forward_kernel.arg_names
    monkeypatch.setattr(hopper, "forward_kernel", kernel)
    few = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
    tile = hopper_tiles.ForwardTile(2, 64, 3, name != last_step.SHARED_Q)
    monkeypatch.setattr(hopper, "choose_tile", lambda *x: tile)
    generator = torch.Generator().manual_seed(0)
    read = [
        torch.randn(1, 2, 200, 64, generator=generator, dtype=torch.float16)
        for _ in range(3)
    ]
    for causal in (False, True):
        results = torch.empty_like(read[0]), torch.empty(1, 2, 200)
        call = last_step.launched(name, read, results, causal)
        with ablations.compiled_with(changes):
            last_step.judge(call, read, results, causal)
    programs = {last_step.EACH: 4, last_step.KEEP: 2 * 2}  # KEEP is launched twice
    assert kernel.programs == 2 * programs.get(name, 2)


def test_a_part_makes_the_variants_that_it_plans(monkeypatch):
    monkeypatch.setattr(ablations.timing, "DEVICE", "cpu")
    monkeypatch.setattr(ablations, "TOKENS", 256)
    monkeypatch.setattr(last_step, "LENGTHS", (128, 256))
    parts = [x for x in ablations.plan() if x.make is ablations.last_step_variants]
    assert len(parts) == 10 + 4
    for part in parts:
        made = part.make(*part.arguments)
        assert [x.identity() for x in made] == part.identities()
    everything = [tuple(x.values()) for x in ablations.names()]
    assert len(set(everything)) == len(everything)


def test_what_is_compiled_with_a_change_is_forgotten():
    before = hopper.attend, plans.launch, ablations.knobs.cache.dir
    late = last_step.CHANGES[last_step.LATE]
    with ablations.compiled_with(late):
        assert hopper.attend is last_step.attend_late
        assert ablations.knobs.cache.dir == f"{before[2]}-attend_late"
    with ablations.compiled_with(last_step.CHANGES[last_step.EACH]):
        # The kernel is the same one.
        assert ablations.knobs.cache.dir == before[2]
        assert plans.launch is last_step.one_program_each
    assert (hopper.attend, plans.launch, ablations.knobs.cache.dir) == before


def test_one_program_for_each_tile(monkeypatch):
    launched = []
    monkeypatch.setattr(last_step, "LAUNCH", lambda *x, **options: launched.append(x))
    kernel = type("Kernel", (), {"arg_names": ["q", "tiles"]})
    last_step.one_program_each(kernel, "x", 132, "q", 512, num_warps=4)
    assert launched == [(kernel, "x", 512, "q", 512)]


def test_a_run_continues_a_record(monkeypatch, tmp_path):
    parts = [
        ablations.Part(lambda n=n: n, (), [("loops", "swapped", 1, n, 64)])
        for n in (1, 2)
    ]
    wrong, compiled = [1], []

    def measure(n):
        cell = dict(zip(ablations.FIELDS, parts[n - 1].rows[0], strict=True))
        if n in wrong:
            return [cell | {"error": "wrong result"}]
        return [cell | {"us": 2.0, "graph_us": [2.0] * 3}]

    about = {"gpu": {"name": "a GPU"}, "versions": {"triton": "0"}}
    about |= {"date": "today", "commit": "1234567"}
    monkeypatch.setattr(ablations, "plan", lambda *x: parts)
    monkeypatch.setattr(ablations, "measure", measure)
    monkeypatch.setattr(ablations, "compile_parts", compiled.append)
    monkeypatch.setattr(ablations.timing, "environment", lambda: about)
    monkeypatch.setattr(ablations.timing, "ceilings", dict)
    monkeypatch.setattr(ablations.timing, "release", lambda: None)
    monkeypatch.setattr(ablations.torch.cuda, "get_device_capability", lambda: (8, 0))
    path = tmp_path / "ablations.json"
    record, failed = ablations.run(False, lambda text: None, path)
    line = "loops, swapped, B = 1, T = 1, d = 64: wrong result"
    assert failed == [line] and compiled == [parts]
    records.Record("ablations", record)
    assert json.loads(path.read_text()) == record
    late, failed = ablations.run(False, lambda text: None, path, end=0.0)
    assert len(late["cells"]) == 1 and "1 of 2 tasks are left" in failed[0]
    wrong.clear()
    record, failed = ablations.run(False, lambda text: None, path)
    assert not failed and [x["T"] for x in record["cells"]] == [2, 1]
    assert all("us" in x for x in record["cells"]) and len(compiled) == 1
