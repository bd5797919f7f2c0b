"""What a hostile worker or file does to the grader: no marks, and no harm."""

import contextlib
import copy
import csv
import json
import math
import os
import random
import shutil
import socket
import struct
import subprocess
import time
import types

import numpy as np
import pytest
from bs4 import BeautifulSoup
from handed_in import lay
from nbconvert.filters.markdown_mistune import markdown2html_mistune as markdown2html

from exercises.grader import (
    channel,
    folder,
    grade,
    gradebook,
    guard,
    inbox,
    report,
    submission,
    tasks,
    worker,
)

INPUTS = [b"zero" * 2**16, b"one", b"two"]  # the first does not go at once
ASKED = channel.Asked(
    {"state": [b""], "merge": INPUTS}, {"merge": 0.05, "state": 0.05}, 0.05
)


def packed(header, content=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack(">I", len(text)) + text + content


def result(values=(), **changes):
    header = {"problem": None, "operations": {}, "values": list(values)}
    return header | changes


def array(dtype="<f4", shape=(2,)):
    return {"kind": "array", "dtype": dtype, "shape": shape}


def listen(sent, printed=b"", until=math.inf):
    """The Outcome of a worker that writes these bytes and closes its channel."""
    with pair() as (here, there), printing(printed) as output:
        there.sendall(sent)
        there.shutdown(socket.SHUT_WR)
        return channel.listen(channel.Reader(here, output), ASKED, until)


@contextlib.contextmanager
def pair():
    """Two ends of a channel; a write that would wait raises."""
    here, there = socket.socketpair()
    there.setblocking(False)
    with here, there:
        yield here, there


@contextlib.contextmanager
def printing(content=b""):
    """The end of a pipe into which a worker has printed something."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    with os.fdopen(reading, "rb", 0) as output:
        yield output


READY = packed({"ready": True, "values": []})
MADE = packed({"problem": None, "values": []})  # what a task's cells have raised
HONEST = READY + MADE + packed(result()) + MADE
HONEST += packed(result([array(), {"kind": "plain", "value": 1.5}]), bytes(8))


def test_an_honest_worker_is_understood():
    outcome = listen(HONEST + packed(result()) * 2)
    (values, problem, operations) = outcome.results["merge", 0]
    assert np.array_equal(values[0], [0, 0]) and values[1] == 1.5
    assert problem is None and operations == {} and outcome.reason is None
    assert len(outcome.results) == 4


def test_inputs_arrive_one_case_at_a_time():
    """However early a worker asks; and one that does not read holds nobody up."""
    state = READY + MADE + packed(result())
    for sent, wanted in (
        (b"", b""),
        (READY, b""),
        (state, b""),
        (state + MADE, INPUTS[0]),
        (state + MADE + packed(result()), INPUTS[0] + INPUTS[1]),
        (state + MADE + packed(result()) * 2, b"".join(INPUTS)),
    ):
        with pair() as (here, there), printing() as output:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
            there.sendall(sent)
            reader = channel.Reader(here, output)
            outcome = channel.listen(reader, ASKED, time.monotonic() + 0.2)
            arrived = b""
            with contextlib.suppress(BlockingIOError):
                while part := there.recv(2**20):
                    arrived += part
        assert arrived + reader.pending == wanted and outcome.reason is not None
        assert len(arrived) < len(INPUTS[0])


BROKEN = {
    "longdouble": packed(result(values=[array("<f16")]), bytes(32)),
    "a number of many digits": packed(b'{"values": ' + b"9" * 5000 + b"}"),
    "a result without operations": MADE,
    "no values": packed({"problem": None, "operations": {}}),
    "fields": packed(result(values=[array("f4,f4")]), bytes(16)),
    "a dtype that is a list": packed(result(values=[array([["a", "f4"]])])),
    "a side below zero": packed(result(values=[array(shape=[-1])])),
    "a side that is huge": packed(result(values=[array(shape=[0, 2**62])])),
    "sides that are true": packed(result(values=[array(shape=[True])]), bytes(4)),
    "more than fits": packed(result(values=[array(shape=[2**30])])),
    "a number beyond 64 bits": packed(
        result(values=[{"kind": "plain", "value": 2**70}])
    ),
    "nested": packed(b'{"values":' + b"[" * 50_000),
    "no JSON": packed(b"{"),
    "a list": packed([1]),
    "a header of 4 GiB": b"\xff" * 4,
    "a problem that is text": packed(result(problem="x")),
    "operations that are a list": packed(result(operations=["aten.add"])),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_result_ends_this_worker_and_keeps_the_tasks_before(name):
    outcome = listen(HONEST + BROKEN[name] + packed(result()) * 3)
    assert outcome.reason is not None and outcome.culprit == "merge"
    assert list(outcome.results) == [("state", 0)]


def test_a_worker_that_dies_keeps_the_cases_before():
    for end in (b"", packed(result([array(shape=(1000,))]), bytes(3))):
        with pair() as (here, there), printing() as output:
            there.sendall(HONEST + end)
            there.close()  # it has not read its inputs
            outcome = channel.listen(channel.Reader(here, output), ASKED, math.inf)
        assert list(outcome.results) == [("state", 0), ("merge", 0)]
        assert outcome.reason == "the process ended before its work was done"


def test_the_worker_cannot_give_itself_time():
    start = time.monotonic()
    with pair() as (here, there), printing() as output:
        for seconds in (math.inf, math.nan):
            told = {"problem": None, "values": [], "seconds": seconds}
            there.sendall(packed(told))
        reader = channel.Reader(here, output)
        outcome = channel.listen(reader, ASKED, start + 0.2)
    assert time.monotonic() - start < 2
    assert outcome.reason == "it did not end within its time"
    assert outcome.culprit == "state"
    wait = ASKED.deadline("merge") - time.monotonic()
    assert 0 < wait < 4, "its own words decided about its time"


def test_a_flood_of_prints_ends_the_worker(monkeypatch):
    monkeypatch.setattr(channel, "LARGEST_PRINT", 100)
    assert "printed" in listen(HONEST, printed=b"x" * 1000).reason


ODD_VALUES = [
    None, [], {"kind": "other", "type": {"a": 1}}, array("<f8", [0, 5]),
    array("|b1", [3]), array("<f2", []),
    *({"kind": "plain", "value": x} for x in (
        None, True, 2**63, 2**100, 1e308, math.nan, "\ud800", "x" * 200, [1],
    )),
]  # fmt: skip


def pieces(rng):
    """A random message: an honest or broken one, or odd values, with some bytes
    changed.
    """
    odd = result(rng.choices(ODD_VALUES, k=rng.randrange(4)))
    known = [HONEST, *(broken for broken in BROKEN.values() if len(broken) < 1000)]
    sent = rng.choice([*known, *[packed(odd, rng.randbytes(rng.randrange(40)))] * 20])
    sent = bytearray(sent)
    for _ in range(rng.choice([0, 0, 1, 5])):
        sent[rng.randrange(len(sent))] = rng.randrange(256)
    return bytes(sent[: rng.choice([len(sent), rng.randrange(len(sent) + 1)])])


@pytest.mark.parametrize("count", [300, pytest.param(3_000, marks=pytest.mark.slow)])
def test_a_fuzzed_worker_stops_nothing_and_loses_nothing(count):
    """Tasks before are kept, and what is left is judged without an exception."""
    (task,) = (t for t in tasks.assignment("online").tasks if t.name == "merge")
    numbers = tasks.assignment("online").numbers(b"x", "ada")
    cases = tasks.assignment("online").cases(task, b"x", "ada")
    rng = random.Random(count)
    for _ in range(count):
        sent = b"".join(pieces(rng) for _ in range(rng.randrange(1, 5)))
        outcome = listen(HONEST + sent)
        assert ("state", 0) in outcome.results
        for (name, number), (values, problem, operations) in outcome.results.items():
            assert name in ASKED.cases and 0 <= number < len(ASKED.cases[name])
            found = values, grade.explained(problem), operations
            note = grade.note_of(task, cases[0], numbers, found, None, [])
            assert note, "junk got points"


def test_a_judge_that_fails_is_a_wrong_answer_and_a_line_for_the_instructor():
    def judge(case, values, numbers):
        raise MemoryError("\ud800" + "x" * 10_000)

    task, faults = tasks.Task("merge", 1, judge), []
    note = grade.note_of(task, tasks.Case("a", {}), {}, ([], None, {}), None, faults)
    assert "not of the kind" in note and "MemoryError" in faults[0]
    assert len(faults[0]) < 600 and faults[0].encode()


@pytest.mark.parametrize(
    ("note", "wanted"),
    [
        ("O is wrong in 17 of 70 rows", "O is wrong in … of … rows"),
        ("O must have the shape (3, 1234567)", "O must have the shape (3, …)"),
        ("m is not 7777777", "m is not …"),
        ("l must be a number, got SECRET12", "l must be a number, got …"),
        ("helper is not defined in line 123 of the cell", None),
        ("O must be float64, got int16", None),
    ],
)
def test_feedback_has_the_graders_words_and_the_students_own(note, wanted):
    words = grade.own_words() | grade.words_of(["def helper(): pass"])
    assert grade.shown(note, words) == (wanted or note)


def test_one_failure_of_a_task_is_described(monkeypatch):
    """Line numbers, names, digits and kinds could each carry a hidden input."""
    problems = [channel.Problem("ValueError", n, None) for n in range(3, 7)]
    problems.append(channel.Problem("NameError", 7, "merge"))
    results = {("merge", n): ([], x, {}) for n, x in enumerate(problems)}
    outcome = channel.Outcome({}, results, None, None)
    monkeypatch.setattr(grade, "work", lambda *_: outcome)
    assignment = tasks.assignment("online")
    content = json.dumps(assignment.numbered(b"x", "ada")).encode()
    marks = grade.grade_one(assignment, content, b"x", None, "ada")
    notes = [
        note for x in marks["tasks"] for note in x["notes"] if x["task"] == "merge"
    ]
    wanted = ["it raises ValueError in line 3 of the cell", *["this fails, too"] * 4]
    assert [x.partition(": ")[2] for x in notes[:5]] == wanted


def test_a_missing_name_is_told_if_the_source_has_it_and_no_class():
    found = channel.Problem("NameError", 3, "leak7")
    assert "leak7" not in grade.explained(found, {"helper"})
    assert "leak7 is not defined in line 3" in grade.explained(found, {"leak7"})
    for name, told in (("Leak7", "another type"), ("dict", "dict")):
        other = packed(result([{"kind": "other", "type": name}]))
        ((value,), *_) = listen(HONEST + other).results["merge", 1]
        assert value.type_name == told


# -- Files

NOTEBOOK = b'{"cells": []}'


@pytest.fixture
def handed_in(tmp_path):
    """A folder with one honest student, and what all the others put into theirs."""
    place, secret = tmp_path / "in", tmp_path / "secret"
    secret.write_text("the secret")

    def student(name):
        made = place / name
        made.mkdir(parents=True)
        return made / "online.ipynb"

    student("honest").write_bytes(NOTEBOOK)
    student("links to the secret").symlink_to(secret)
    student("links to nowhere").symlink_to(tmp_path / "nothing")
    student("links to honest").symlink_to(place / "honest/online.ipynb")
    student("a folder").mkdir()
    os.mkfifo(student("a pipe"))
    with open(student("a sparse terabyte"), "wb") as file:
        file.truncate(2**40)
    (place / "a link for a folder").symlink_to(place / "honest")
    inner = student("a link inside").parent / "online"
    inner.symlink_to(place / "honest")
    (place / "j.link").symlink_to(place / "honest")
    (place / "nothing").mkdir()
    here = os.open(place / "nothing", os.O_RDONLY)
    for _ in range(1100):  # deeper than Python's recursion, and than a path may be
        os.mkdir("deep", dir_fd=here)
        here, above = os.open("deep", os.O_RDONLY, dir_fd=here), here
        os.close(above)
    os.close(here)
    yield place
    subprocess.run(["rm", "-rf", place], check=True)  # pytest's removal is recursive


def test_only_files_are_read_and_nobody_is_lost(handed_in):
    entries = inbox.collect(handed_in, "online")
    assert set(entries) == {path.name for path in handed_in.iterdir()}
    read = {}
    for name, entry in entries.items():
        try:
            read[name] = entry.parts and inbox.read(handed_in, entry.parts)[0]
        except submission.Unreadable as reason:
            read[name] = str(reason)
    assert read.pop("honest") == NOTEBOOK
    assert read.pop("nothing") is None
    for name, said in read.items():
        assert isinstance(said, str) and "secret" not in said, name
    links = [name for name in read if "link" in name]
    assert len(links) == 6 and all("is a link" in read[name] for name in links)
    assert "more than" in read["a sparse terabyte"]
    assert inbox.left_over(handed_in, [entries]) == []


def test_what_cannot_be_read_is_said_to_be_so(tmp_path, monkeypatch):
    lay(tmp_path, "ada/online.ipynb")
    entry, opening = inbox.collect(tmp_path, "online")["ada"], os.open

    def denied(path, *rest, **options):
        if path == "online.ipynb":
            raise PermissionError(13, "Permission denied")
        return opening(path, *rest, **options)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(submission.Unreadable, match="Permission denied"):
        inbox.read(tmp_path, entry.parts)


ODD = [
    b"J\xf6rg", b"a\nb", b"\x1b[31mred", b"=cmd()", "Zo\u00eb \u6f22".encode(), b"-rf",
    b"\xe2\x80\xae", b"a,b\"c",
    b"marks.csv", b"states.json", b"x" * 255, b"<script>", b"'; drop table student; --",
    b"J\\xf6rg",
    b"?!",
]  # fmt: skip
NAMELESS = {"\\u202e", "?!"}


def test_odd_names_get_a_line_each(tmp_path):
    place = tmp_path / "in"
    for name in ODD:
        path = os.path.join(os.fsencode(place), name)
        os.makedirs(path)
        with open(os.path.join(path, b"online.ipynb"), "wb") as file:
            file.write(NOTEBOOK)
    said, arguments = [], ("online", place, tmp_path / "out", b"secret", tmp_path)
    graded = folder.grade_all(*arguments, say=said.append)
    assert len(graded) == len(ODD) - len(NAMELESS)
    assert {m["points"] for m in graded.values()} == {0}
    with open(tmp_path / "out/online/marks.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 1 + len(ODD) and len({row[0] for row in rows}) == 1 + len(ODD)
    refused = {row[0]: row[-1] for row in rows if row[-2] == "not graded"}
    assert set(refused) == NAMELESS and "with a letter or a digit" in refused["?!"]
    assert not any(row[0][:1] in "=+-@" for row in rows)
    assert all(line.isprintable() for line in said)
    page = (tmp_path / "out/online/statistics.html").read_text()
    assert "<script" not in page
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.glob("out/online/*/*")}
    assert modes == {0o600}


def test_a_failure_stops_nobody_and_a_later_run_loses_nobody(tmp_path, monkeypatch):
    place, honest, said = tmp_path / "in", grade.grade_one, []
    lay(place, "ada/online.ipynb", "cy/online.ipynb", content='{"cells": []}')
    lay(place, "ben/online.ipynb", content="boom")

    def fails(assignment, content, *rest):
        if content == b"boom":
            raise MemoryError("\ud800")
        return honest(assignment, content, *rest)

    monkeypatch.setattr(grade, "grade_one", fails)
    arguments = ("online", place, tmp_path / "out", b"secret", tmp_path)
    graded = folder.grade_all(*arguments, say=said.append, students={"dan": "dan"})
    assert set(graded) == {"ada", "cy"}
    states = folder.known(tmp_path / "out/online/states.json")
    assert {name: state["status"] for name, state in states.items()} == {
        "ada": "graded", "ben": "not graded", "cy": "graded", "dan": "missing",
    }  # fmt: skip
    assert list(states) == sorted(states), "in the order in which they were done"
    assert any("ben: NOT GRADED" in line for line in said)
    monkeypatch.setattr(grade, "grade_one", honest)
    shutil.rmtree(place / "ada")
    (tmp_path / "out/online/cy/marks.json").write_text("{cut o")
    graded = folder.grade_all(*arguments, say=said.append)
    assert set(graded) == {"ada", "ben", "cy"}


SHAPES = [
    None, True, -1, 10**400, "", "\ud800", "\0", [], [[]], ["a", 1], {}, {"a": {}},
    {"grade_id": "merge"}, {"nbgrader": {}},
    "def merge(*a):\n    return a", "(" * 300, "-" * 5000 + "1", "%%bash\nx", "!ls",
    "x = '''", 'student = ""', "m = 1e999",
    "m = " + "9" * 5000, "l = 10 ** 10 ** 10", "lambda: " * 500 + "1", "a.b" * 3000,
    "\\\n" * 1000, "m, l = 1, 2",
]  # fmt: skip


def reshaped(notebook, rng):
    """A notebook with parts exchanged, left out, repeated, and texts with other
    letters.
    """
    made = json.loads(json.dumps(notebook))
    for _ in range(rng.choice([1, 2, 5, 20])):
        place, above = made, {}
        while isinstance(place, dict | list) and place and rng.random() < 0.9:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            above, key = place, rng.choice(keys)
            place = place[key]
        if not above:
            continue
        how = rng.random()
        if isinstance(place, str) and how < 0.7:
            at, sign = rng.randrange(len(place) + 1), rng.choice("()\n'\\\ud800")
            above[key] = place[:at] + sign + place[at + rng.randrange(2) :]
        elif how < 0.3:
            del above[key]
        elif isinstance(above, list) and how < 0.5:
            above.insert(rng.randrange(len(above)), copy.deepcopy(place))
        else:
            above[key] = copy.deepcopy(rng.choice(SHAPES))
    return made


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("count", [60, pytest.param(1_500, marks=pytest.mark.slow)])
def test_notebooks_of_any_shape_are_graded(count, tmp_path, monkeypatch):
    """Nothing raises outside of the sandbox, which is left out here."""
    nothing = channel.Outcome({}, {}, None, None)
    monkeypatch.setattr(grade, "work", lambda job, *rest: json.dumps(job) and nothing)
    assignment, rng = tasks.assignment("online"), random.Random(count)
    solved = assignment.numbered(b"secret", "ada")
    for _ in range(count):
        content = json.dumps(reshaped(solved, rng)).encode()
        marks = grade.grade_one(assignment, content, b"secret", None, "ada")
        assert [m["points"] for m in marks["tasks"]] == [0.0] * 4
        assert folder.feedback("ada", marks).encode()
        (tmp_path / "received.ipynb").write_bytes(content)
        answers = gradebook.written_answers(tmp_path / "received.ipynb")
        released = assignment.unnumbered(b"secret")
        json.dumps(gradebook.with_answers(released, answers, marks)).encode()
        run = types.SimpleNamespace(assignment=assignment, output=tmp_path.parent)
        graded = {tmp_path.name: {**marks, "points": 1}}
        report.page(run, graded, {tmp_path.name: {"remarks": []}})


# -- What an instructor's browser sees

LIVE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))", "![x](data:text/html,x)",
    "[x][y]\n\n[y]: javascript:alert(1)", "<iframe src=//x>", "&lt;b&gt; <b>",
    "```\n</code></pre><script>x</script>\n```",
    "$x$<svg/onload=alert(1)>", "$$\\href{javascript:alert(1)}{x}$$",
    "~~~\n<script>\n~~~\n````\n<script>", "<!-- -->",
    "[x](&#106;avascript:alert(1))", "a\n\n    <b onclick=x>\n\n<b onclick=x>",
    "<a\nhref=javascript:x>",
    "`````\n````\n<script>x</script>", "\\def\\a{\\href}", "<" + "a" * 10_000,
    "\ud800<script>", "\x00<script>",
    "$$\n```\n$$\n<script>x</script>",
]  # fmt: skip


@pytest.mark.parametrize("text", LIVE)
def test_a_written_answer_brings_no_html_into_a_browser(text):
    page = BeautifulSoup(markdown2html(gradebook.harmless(text)), "html.parser")
    tags = {tag.name for tag in page.find_all(True)}
    assert tags <= {"div", "pre", "code", "p", "span"}, tags
    for tag in page.find_all(True):
        assert set(tag.attrs) <= {"class"}, tag.attrs


def test_a_plain_answer_keeps_its_form():
    text = "It **halves** the traffic: $O(T d)$ words.\n\n- one\n- two\n\n`exp(m)`"
    assert gradebook.harmless(text) == text


TAKEN = {
    "an attribute": "Counter.extra = 1",
    "wraps": "functools.wraps(f)(Counter)",
    "a data class": "dataclasses.dataclass(Counter)",
    "a data class with options": "dataclasses.dataclass(eq=False)(Counter)",
    "an order": "functools.total_ordering(Counter)",
    "a metaclass": (
        "class A(metaclass=lambda *x: Counter):\n    pass\nCounter.extra = 1"
    ),
}
IMPORTS = "import dataclasses, functools\ndef f():\n    pass\n"


@pytest.mark.parametrize("way", TAKEN)
def test_no_class_of_a_library_becomes_a_students_own(way):
    class Counter:
        __lt__ = object.__eq__

    isolation = guard.Guard()
    space = isolation.namespace({"Counter": Counter})
    before = dict(vars(Counter))
    with pytest.raises(guard.NotAllowed):
        isolation.run(IMPORTS + TAKEN[way], "<taken>", space)
    assert dict(vars(Counter)) == before


def test_a_students_own_classes_are_theirs_to_change():
    source = """
@dataclasses.dataclass(slots=True)
class A:
    x: int
@functools.total_ordering
@dataclasses.dataclass
class B:
    def __lt__(self, other):
        return False
class C(metaclass=type):
    pass
D = type("D", (), {})
for kind in (A, B, C, D):
    kind.name = functools.wraps(f)(lambda self: 1)
    assert kind.name(None) == 1
assert A(3).x == 3
"""
    isolation = guard.Guard()
    isolation.run(IMPORTS + source, "<own>", isolation.namespace({}))


class Told(NameError, IndexError):
    """An exception that computes when somebody looks at it."""

    looked = 0

    def look(self):
        Told.looked += 1

    name = __traceback__ = __cause__ = args = property(look)


class Text:
    def __str__(self):
        Told.looked += 1
        return "load out of range: element"


@pytest.mark.parametrize("error", [Told(), IndexError(Text()), NameError(name=Text())])
def test_no_code_of_an_exception_runs_when_it_is_described(error):
    told = worker.described(error)
    assert Told.looked == 0 and json.dumps(told)
    assert told["name"] is None and told["type"] != "outside"
