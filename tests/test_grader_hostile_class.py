"""One class with hostile and honest submissions side by side."""

import json
import os

import pytest
from handed_in import handed_in

from exercises.grader import folder, grade, gradebook, inbox, release, tasks

ONLINE = tasks.assignment("online")
MERGE = "def merge(m_a, l_a, o_a, m_b, l_b, o_b):\n    "


SECRET = b"of this test"


def notebook(student="ada", **solutions):
    return json.dumps(handed_in(ONLINE, SECRET, student, **solutions))


HONEST = {
    "solution": {},
    "without a kernel": {"kernel": None},
    "wrong merge": {"merge": MERGE + "return m_a, l_a + l_b, o_a + o_b"},
    "no output": {"merge": MERGE + "return None"},
    "a name that is missing": {"merge": MERGE + "return helper(m_a)"},
}
# What a solution cell may contain by the rules, and what no judge expects.
CELLS = {
    "an empty tuple": MERGE + "return ()",
    "a set of lists": MERGE + "return [[]], {}, set()",
    "no tensors": MERGE + "return float('nan'), float('inf'), 'x' * 10**6",
    "wide tensors": MERGE + "return m_a.double(), l_a.to(torch.complex128), o_a.bool()",
    "not finite": MERGE + "return m_a / 0, l_a - float('inf'), o_a * float('nan')",
    "no dimensions": MERGE + "return torch.tensor(1.0), torch.zeros(0), torch.zeros(0, 7777777)",
    "sparse": MERGE + "return m_a.to_sparse(), l_a, o_a",
    "quantized": MERGE + "return torch.quantize_per_tensor(m_a, 0.1, 0, torch.qint8), l_a, o_a",
    "on no device": MERGE + "return torch.empty(3, device='meta'), l_a, o_a",
    "expanded": MERGE + "return torch.zeros(1).expand(2**40), l_a, o_a",
    "a long integer": MERGE + "return 10 ** 5000, l_a, o_a",
    "a class that raises": (
        "class Bad:\n    def shape(self):\n        raise SystemExit\n" + MERGE + "return Bad(), Bad(), Bad()"
    ),
    "never ends": "while True:\n    pass",
    "sleeps": MERGE + "torch.zeros(2**14, 2**14) @ torch.zeros(2**14, 2**14)",
    "memory": MERGE + "return [torch.ones(2**28) for _ in range(100)]",
    "deep": "x = " + "-" * 40_000 + "1",
    "deep brackets": "x = " + "(" * 20_000 + ")" * 20_000,
    "a long sum": "x = " + "+".join("1" for _ in range(20_000)),
    "lone surrogates": "x = '\ud800'",
    "null": "x = '\0'",
}  # fmt: skip


def fill(place, hostile):
    """Hand in the honest ones, and the hostile ones if asked."""
    for name, changes in HONEST.items():
        (place / name).mkdir(parents=True)
        (place / name / "online.ipynb").write_text(notebook(name, **changes))
    if not hostile:
        return
    for name, source in CELLS.items():
        (place / name).mkdir()
        (place / name / "online.ipynb").write_text(
            notebook(name, merge=source, state=source)
        )
    files = {
        "empty": b"", "zeros": bytes(10**6), "nested": b"[" * 10**6, "list": b"[]",
        "digits": b'{"cells": ' + b"9" * 10**5 + b"}", "utf-16": notebook().encode("utf-16"),
        "cut off": notebook().encode()[:3000], "too large": b" " * (21 << 20),
        "cells of cells": b'{"cells": [{"metadata": {"nbgrader": {"grade_id": {"a": 1}}}, "source": [[]]}]}',
        b"not UTF-8 \xff": b"{}", "line\nbreak": b"{}", "=HYPERLINK()": b"{}",
    }  # fmt: skip
    for name, content in files.items():
        path = os.path.join(os.fsencode(place), os.fsencode(name))
        os.mkdir(path)
        with open(os.path.join(path, b"online.ipynb"), "wb") as file:
            file.write(content)
    for name in ("pipe", "link", "loop", "folder"):
        (place / name).mkdir()
    os.mkfifo(place / "pipe/online.ipynb")
    (place / "link/online.ipynb").symlink_to(place / "solution/online.ipynb")
    (place / "loop/online.ipynb").symlink_to("online.ipynb")
    (place / "folder/online.ipynb").mkdir()
    with open(place / "folder/hole.ipynb", "wb") as file:
        file.truncate(2**40)


@pytest.mark.slow
def test_the_hostile_change_nothing_for_the_honest(tmp_path, monkeypatch):
    hurried = tuple(task._replace(seconds=3.0) for task in ONLINE.tasks)
    short = ONLINE._replace(tasks=hurried)
    monkeypatch.setattr(grade, "CELL_SECONDS", 3.0)
    monkeypatch.setattr(tasks, "assignment", lambda step: short)
    (tmp_path / "course").mkdir()
    (tmp_path / "course/secret").write_bytes(SECRET)
    release.release("online", tmp_path / "course")
    course, found = tmp_path / "course", {}
    for hostile in (False, True):
        place, said = tmp_path / f"in-{hostile}", []
        fill(place, hostile)
        graded = folder.grade_all(
            "online", place, course / "graded", release.secret_of(course),
            course / "received/online", say=said.append, only=inbox.collect(place, "online"),
        )  # fmt: skip
        gradebook.record(course, "online", graded, said.append)
        lines, _ = gradebook.table(course, course / "marks.csv")
        assert not [
            line for line in said if "NOT GRADED" in line or "gradebook" in line
        ]
        everybody = inbox.collect(place, "online")
        assert lines == len(everybody) and set(graded) == set(everybody)
        found[hostile] = graded
    assert len(found[True]) == len(HONEST) + len(CELLS) + 12 + 4
    for name in HONEST:
        assert found[True][name] == found[False][name], name
    points = {name: marks["points"] for name, marks in found[True].items()}
    assert points["solution"] == 14 and points["without a kernel"] == 8
    states = folder.known(course / "graded/online/states.json")
    for name, marks in found[True].items():
        if name not in HONEST:
            # Tasks that the hostile cells leave alone keep their points.
            assert points[name] <= 8 and states[name]["status"] in (
                "graded",
                "unreadable",
            )
            told = [note for mark in marks["tasks"] for note in mark["notes"]]
            assert told or marks["remarks"], f"{name} is told nothing"
            assert "7777777" not in "".join(told)
    for name in ("pipe", "link", "loop", "folder", "empty", "too large", "utf-16"):
        assert states[name]["status"] == "unreadable" and points[name] == 0
