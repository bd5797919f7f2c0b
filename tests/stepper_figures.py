"""What figures to step through show in tests, and how a page computes it."""

import json

import numpy as np
from bs4 import BeautifulSoup

from flashlib.iomodel.flash1 import algorithm_3, algorithm_4
from flashlib.iomodel.flash2 import flash2_forward
from flashlib.iomodel.standard import standard_forward
from flashlib.machine import Machine, cells, programs
from flashlib.paging import PagePool

WORDS = {"title": "A title", "alt": "What it shows"}
MATRICES = cells("a", [[1, 2], [3, 4]]) | cells("b", [[5, 6], [7, 8]])
DOT = Machine(3).run(programs.dot(2), MATRICES, registers={1: 2.5})


def parsed(figure):
    return BeautifulSoup(figure._repr_html_(), "html.parser")


def replay(figure):
    """Yield the data, the step and all items after it, as the page computes them."""
    data = json.loads(parsed(figure).find("script").string)
    state = [{} for _ in data["panels"]]
    for step in data["steps"]:
        for panel, change in step["set"].items():
            items = state[int(panel)] | change
            state[int(panel)] = {k: v for k, v in items.items() if v is not None}
        yield data, step, list(state)


FLASH = {run.__name__: run for run in (algorithm_3, algorithm_4, flash2_forward)}
SCHEDULES = FLASH | {"standard_forward": standard_forward}


def inputs(shape, seed=0):
    """q, k and v [T, d] of numbers that float32 holds exactly."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(3, *shape[:2])).astype(np.float32).astype(np.float64)


def schedule(name, shape, seed=0):
    options = {"capacity_words": 200, "B_r": shape[2], "B_c": shape[3], "trace": True}
    return SCHEDULES[name](*inputs(shape, seed), **options).memory


def example_pool():
    """All six actions, with a copy on write and a page shared to the end."""
    pool = PagePool(8, 4, trace=True)
    pool.new("A", 6)
    pool.fork("A", "B")
    pool.append("B")
    pool.append("A", 3)
    pool.new("C", 4)
    pool.swap_out("A")
    pool.append("C")
    pool.swap_in("A")
    pool.free("B")
    return pool
