"""Runs at the start of every kernel on the hub, as PYTHONSTARTUP."""

import os as _os
import runpy as _runpy

_runpy.run_path(
    _os.path.join(_os.path.dirname(_os.environ["PYTHONSTARTUP"]), "gpu_queue.py"),
    run_name="kernel",
)
del _os, _runpy
