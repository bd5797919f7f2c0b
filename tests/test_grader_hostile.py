"""What a hostile worker or file does to the grader: it gets no marks, and harms nobody."""

import json
import math
import os
import random
import struct
import time

import numpy as np
import pytest

from exercises.grader import channel, grade, tasks

ASKED = channel.Asked({"merge": 3, "state": 1}, {"merge": 0.05, "state": 0.05}, 0.05)


def packed(header, content=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack(">I", len(text)) + text + content


def result(task="merge", case=0, values=(), **changes):
    header = {"result": task, "case": case, "problem": None, "operations": []}
    return header | {"values": list(values)} | changes


def array(dtype="<f4", shape=(2,)):
    return {"kind": "array", "dtype": dtype, "shape": shape}


def listen(sent, printed=b"", until=math.inf):
    """The Outcome of a worker that writes these bytes and closes its channel."""
    ends = []
    for content in (sent, printed):
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        assert os.write(writing, content) == len(content) if content else True
        os.close(writing)
        ends.append(reading)
    with os.fdopen(ends[1], "rb", 0) as output:
        outcome = channel.listen(channel.Reader(ends[0], output), ASKED, until)
    os.close(ends[0])
    return outcome


HONEST = packed({"start": "merge", "seconds": 1}) + packed(
    result(values=[array(), {"kind": "plain", "value": 1.5}]), bytes(8)
)


def test_an_honest_worker_is_understood():
    outcome = listen(HONEST + packed({"end": True}))
    (values, problem, operations) = outcome.results["merge", 0]
    assert np.array_equal(values[0], [0, 0]) and values[1] == 1.5
    assert problem is None and operations == [] and outcome.reason is None


PROBLEM = {"type": "ValueError", "line": 1, "name": None, "outside": False}
BROKEN = {
    "longdouble": packed(result(values=[array("<f16")]), bytes(32)),
    "objects": packed(result(values=[array("|O")]), bytes(16)),
    "fields": packed(result(values=[array("f4,f4")]), bytes(16)),
    "a dtype that is a list": packed(result(values=[array([["a", "f4"]])])),
    "a side below zero": packed(result(values=[array(shape=[-1])])),
    "a side that is huge": packed(result(values=[array(shape=[0, 2**62])])),
    "sides that are true": packed(result(values=[array(shape=[True])]), bytes(4)),
    "more than fits": packed(result(values=[array(shape=[2**30])])),
    "a case of many digits": packed(b'{"result": "merge", "case": ' + b"9" * 5000 + b"}"),
    "a case below zero": packed(result(case=-1)),
    "a case too many": packed(result(case=3)),
    "a case that is true": packed(result(case=True)),
    "an unknown task": packed(result("other")),
    "a list for a task": packed(result(["merge"])),
    "a number beyond 64 bits": packed(result(values=[{"kind": "plain", "value": 2**70}])),
    "nested": packed(b'{"values":' + b"[" * 50_000),
    "nested values": packed(result(values=[[[[]]]])),
    "no JSON": packed(b"{"),
    "not UTF-8": packed(b'{"result": "\xff"}'),
    "a list": packed([1]),
    "null": packed(None),
    "a header of 4 GiB": b"\xff" * 4,
    "cut off": packed(result(values=[array()]), bytes(3)),
    "a problem that is text": packed(result(problem="x")),
    "operations that are a number": packed(result(operations=1)),
    "no end to the messages": packed({"start": "x"}) * 3000,
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_result_ends_this_worker_and_keeps_the_results_before(name):
    outcome = listen(HONEST + BROKEN[name])
    assert outcome.reason is not None
    assert list(outcome.results) == [("merge", 0)]


def test_the_worker_cannot_give_itself_time():
    reading, writing = os.pipe()
    said, quiet = os.pipe()
    os.write(writing, packed({"start": "merge", "seconds": math.inf}))
    os.write(writing, packed({"start": "merge", "seconds": math.nan}))
    start = time.monotonic()
    with os.fdopen(said, "rb", 0) as output:
        reader = channel.Reader(reading, output)
        outcome = channel.listen(reader, ASKED, start + 0.2)
        assert time.monotonic() - start < 2
        assert outcome.reason == "it did not end within its time"
        assert outcome.culprit == "merge"
    for number in (reading, writing, quiet):
        os.close(number)
    wait = ASKED.deadline("merge") - time.monotonic()
    assert 0 < wait < 4, "its own words decided about its time"


def test_a_flood_of_prints_ends_the_worker(monkeypatch):
    monkeypatch.setattr(channel, "LARGEST_PRINT", 100)
    assert "printed" in listen(HONEST, printed=b"x" * 1000).reason


def pieces(rng):
    """Random messages: honest ones with something changed, and bytes."""
    junk = [
        None, True, 0, -1, 2**63, 2**100, 1e308, math.nan, math.inf, "", "x" * 200, "\ud800", "merge",
        [], [[]], {}, {"kind": "array"}, array("<f8", [0, 5]), array("|b1", [3]), {"kind": "plain", "value": [1]},
        {"kind": "other", "type": {"a": 1}}, {"kind": "plain", "value": "\udcff"},
    ]  # fmt: skip
    made = {
        0: lambda: {"start": rng.choice(junk), "seconds": rng.choice(junk)},
        1: lambda: {"done": rng.choice(junk), "problem": rng.choice([*junk, PROBLEM])},
        2: lambda: result(
            rng.choice(["merge", "merge", rng.choice(junk)]),
            rng.choice([0, 1, rng.choice(junk)]),
            rng.choices(junk, k=rng.randrange(4)),
        ),
        3: lambda: {rng.choice("abc"): rng.choice(junk)},
        4: lambda: rng.choice(junk),
    }
    message = made[rng.randrange(5)]()
    if isinstance(message, dict) and message not in junk and rng.random() < 0.5:
        message[rng.choice(["result", "case", "problem", "operations", "values"])] = rng.choice(junk)  # fmt: skip
    sent = bytearray(packed(message, rng.randbytes(rng.randrange(40))))
    for _ in range(rng.choice([0, 0, 1, 5])):
        sent[rng.randrange(len(sent))] = rng.randrange(256)
    return bytes(sent[: rng.choice([len(sent), rng.randrange(len(sent) + 1)])])


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_fuzzed_worker_stops_nothing_and_loses_nothing(count):
    """What was sent before is kept, and what is left is judged without an exception."""
    (task,) = (t for t in tasks.assignment("online").tasks if t.name == "merge")
    numbers = tasks.assignment("online").numbers(b"x")
    cases = tasks.assignment("online").cases(task, b"x")
    rng = random.Random(count)
    for _ in range(count):
        outcome = listen(HONEST + b"".join(pieces(rng) for _ in range(rng.randrange(1, 5))))  # fmt: skip
        assert ("merge", 0) in outcome.results
        for (name, number), (values, problem, operations) in outcome.results.items():
            assert name in ASKED.cases and 0 <= number < ASKED.cases[name]
            found = values, grade.explained(problem), operations
            note = grade.note_of(task, cases[0], numbers, found, None, [])
            assert note, "junk got points"


class Unforeseen(Exception):
    pass


def test_a_judge_that_fails_is_a_wrong_answer_and_a_line_for_the_instructor():
    def judge(case, values, numbers):
        raise Unforeseen("\ud800" + "x" * 10_000)

    task, faults = tasks.Task("merge", 1, judge), []
    note = grade.note_of(task, tasks.Case("a", {}), {}, ([], None, []), None, faults)
    assert "not of the kind" in note and "Unforeseen" in faults[0]
    assert len(faults[0]) < 600 and faults[0].encode()


@pytest.mark.parametrize(
    ("note", "wanted"),
    [
        ("O is wrong in 17 of 70 rows", "O is wrong in … of … rows"),
        ("O must have the shape (3, 1234567)", "O must have the shape (3, …)"),
        ("m is not 7777777", "m is not …"),
        ("m is not 42", "m is not 42"),
        ("l must be a number, got SECRET12", "l must be a number, got …"),
        ("helper is not defined in line 123 of the cell", None),
        ("O must be float64, got int16", None),
    ],
)
def test_feedback_has_the_graders_words_and_the_students_own(note, wanted):
    source = "def helper(): pass\nm = 42"
    words = grade.vocabulary([source])
    assert grade.shown(note, words, source) == (wanted or note)


def test_a_missing_name_is_told_if_the_source_has_it():
    found = channel.Problem("NameError", 3, "leak7", False)
    assert "leak7" not in grade.explained(found, {"helper"})
    assert "leak7 is not defined in line 3" in grade.explained(found, {"leak7"})


def test_the_class_of_a_value_is_not_told():
    assert "Leak" not in repr(channel.Other("submission.Leak7"))
    assert "dict" in repr(channel.Other("builtins.dict"))
