"""What still waits for a GPU: listed in pending.json, each with its reason.

A listed test is expected to fail, and shown so. Once what it waits for is there, the entry itself fails.
"""

import json
from pathlib import Path

import pytest

PENDING = json.loads(Path(__file__).with_suffix(".json").read_text())


def waits_for_gpu(file, there):
    """Expect a failure where `file` is listed and what it needs from a GPU is not `there`."""
    if file in PENDING:
        assert not there, f"{file} no longer waits for a GPU: take it off tests/pending.json"
        pytest.xfail(f"{file} waits for a GPU: {PENDING[file]}")
