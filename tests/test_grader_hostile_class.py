"""One class with wrong, hostile and honest submissions side by side."""

import json
import os

import pytest
from handed_in import SECRET, handed_in

from exercises.grader import folder, grade, gradebook, inbox, release, submission, tasks

ONLINE = tasks.assignment("online")
FULL = {task.name: task.points for task in ONLINE.tasks}
KERNEL = submission.read(ONLINE.notebook.read_bytes(), ["kernel"]).cells["kernel"]
# {student: (changed cells, {task: points})}; a task that is not named has full marks.
HONEST = {
    "solution": ({}, {}), "without a kernel": ({"kernel": None}, {"kernel": 0}),
    "missing and refused": (
        {"state": None, "merge": "import os"}, {"state": 0, "merge": 0},
    ),
    "without a mask": (
        {"kernel": KERNEL.replace(', mask=column < n, other=-float("inf")', "")},
        {"kernel": 1.0},
    ),
}  # fmt: skip
MERGE = "def merge(m_a, l_a, o_a, m_b, l_b, o_b):\n    "
FOREVER = "while True:\n        "
# {student: (the cell of the task merge, its points)}: what a solution cell may contain
# by the rules, and what no judge expects. The other tasks have full marks.
CELLS = {
    "no rescaling": (
        MERGE + "return torch.maximum(m_a, m_b), l_a + l_b, o_a + o_b", 2.0,
    ),
    "an empty set breaks it": (
        MERGE + "m = torch.maximum(m_a, m_b)\n"
        "    a, b = torch.exp(m_a - m), torch.exp(m_b - m)\n"
        "    return m, a * l_a + b * l_b, a[:, None] * o_a + b[:, None] * o_b",
        3.33,
    ),
    "None": (MERGE + "return None", 0), "one value": (MERGE + "return m_a", 0),
    "a set of lists": (MERGE + "return [[]], {}, set()", 0),
    "no tensors": (MERGE + "return float('nan'), float('inf'), 'x' * 10**6", 0),
    "wide tensors": (
        MERGE + "return m_a.double(), l_a.to(torch.complex128), o_a.bool()", 0,
    ),
    "not finite": (MERGE + "return m_a / 0, l_a - float('inf'), o_a * float('nan')", 0),
    "no dimensions": (
        MERGE + "return torch.tensor(1.0), torch.zeros(0), torch.zeros(0, 7777777)", 0,
    ),
    "sparse": (MERGE + "return m_a.to_sparse(), l_a, o_a", 0),
    "quantized": (
        MERGE + "m = torch.quantize_per_tensor(m_a, 0.1, 0, torch.qint8)\n"
        "    return m, l_a, o_a",
        0,
    ),
    "on no device": (MERGE + "return torch.empty(3, device='meta'), l_a, o_a", 0),
    "a gigabyte": (
        MERGE + "return torch.zeros(2**28), torch.zeros(1), torch.zeros(1)", 0,
    ),
    "a long integer": (MERGE + "return 10 ** 5000, l_a, o_a", 0),
    "equal to everything": (
        "class Yes:\n    def __eq__(self, other):\n        return True\n"
        "    shape = dtype = 0\n"
        + MERGE + "return Yes(), Yes(), Yes()",
        0,
    ),
    "a tensor that lies": (
        "class Yes(torch.Tensor):\n    def __eq__(self, other):\n        return True\n"
        + MERGE + "return Yes(), Yes(), Yes()",
        0,
    ),
    "raises": (MERGE + "raise ValueError(str(o_a.tolist()))", 0),
    "raises a class of its own": (
        MERGE + "raise type('Leak' + str(m_a.tolist()), (Exception,), {})()", 0,
    ),
    "raises a hidden name": (MERGE + "raise NameError('x', name='n' + '7' * 90)", 0),
    "exits": (MERGE + "raise SystemExit(0)", 0),
    "a name that is not there": (MERGE + "return helper(m_a)", 0),
    "recursion": (MERGE + "return merge(m_a, l_a, o_a, m_b, l_b, o_b)", 0),
    "never ends": (
        MERGE + FOREVER + "try:\n            while True:\n                pass\n"
        "        except BaseException:\n            pass",
        0,
    ),
    "the cell never ends": ("while True:\n    pass", 0),
    "prints without end": (MERGE + FOREVER + "print('x' * 1_000_000)", 0),
    "sleeps": (MERGE + "torch.zeros(2**14, 2**14) @ torch.zeros(2**14, 2**14)", 0),
    "memory": (MERGE + "return [torch.ones(2**28) for _ in range(100)]", 0),
    "overwrites torch": (
        "torch.maximum = torch.minimum\n" + MERGE + "return m_a, l_a, o_a", 1.33,
    ),
}  # fmt: skip


def notebook(student, **changes):
    return json.dumps(handed_in(ONLINE, SECRET, student, **changes))


def hand_in(place, known):
    """Hand in the notebooks of known students, and files that are no notebooks."""
    files = {
        "empty": b"", "utf-16": notebook("ada").encode("utf-16"), "too large": b" " *
        (21 << 20),
        b"not UTF-8 \xff": b"{}", "line\nbreak": b"{}", "=HYPERLINK()": b"{}",
    }  # fmt: skip
    for name, (changes, _) in known.items():
        files[name] = notebook(name, **changes).encode()
    for name, content in files.items():
        path = os.path.join(os.fsencode(place), os.fsencode(name))
        os.makedirs(path)
        with open(os.path.join(path, b"online.ipynb"), "wb") as file:
            file.write(content)


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_everybody_gets_the_marks_of_their_own_work(half, tmp_path, monkeypatch):
    cells = list(CELLS.items())[half::2]
    known = HONEST | {x: ({"merge": cell}, {"merge": of}) for x, (cell, of) in cells}
    hurried = tuple(task._replace(seconds=3.0) for task in ONLINE.tasks)
    short = ONLINE._replace(tasks=hurried)
    monkeypatch.setattr(grade, "CELL_SECONDS", 3.0)
    monkeypatch.setattr(tasks, "assignment", lambda step: short)
    course, place, said = tmp_path / "course", tmp_path / "in", []
    course.mkdir()
    (course / "secret").write_bytes(SECRET)
    release.release("online", course)
    hand_in(place, known)
    graded = folder.grade_all(
        "online", place, course / "graded", SECRET, course / "received/online",
        say=said.append
    )  # fmt: skip
    gradebook.record(course, "online", graded, said.append)
    lines, _ = gradebook.table(course, course / "marks.csv")
    assert not [line for line in said if "NOT GRADED" in line or "gradebook" in line]
    assert lines == len(graded) == len(inbox.collect(place, "online"))
    states = folder.known(course / "graded/online/states.json")
    for name, marks in graded.items():
        told = " ".join(note for mark in marks["tasks"] for note in mark["notes"])
        if name in known:
            points = {mark["task"]: mark["points"] for mark in marks["tasks"]}
            assert points == FULL | known[name][1], f"{name}: {told}"
            assert states[name]["status"] == "graded"
        else:
            assert marks["points"] == 0 and states[name]["status"] in (
                "graded",
                "unreadable",
            )
        assert told or marks["remarks"] or name == "solution", f"{name} is told nothing"
        for hidden in ("tensor(", "[[", "Leak", "7" * 7):
            assert hidden not in told, f"{name}: hidden inputs are shown"
    for name, hint in {
        "missing and refused": "what no solution may do",
        "without a mask": "outside of its tensors",
        "raises a class of its own": "exception of its own",
    }.items():  # fmt: skip
        assert name not in graded or hint in json.dumps(graded[name]["tasks"])
    for name in ("empty", "too large", "utf-16"):
        assert states[name]["status"] == "unreadable"
