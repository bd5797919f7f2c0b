"""Times and memory of the attention kernels: the passes forward, steps, backward,
hopper, masks, fa3 and fa4.

Each result is judged against the float64 reference before it is timed. A method that
cannot run a shape, or gives a wrong result, leaves the reason in its cell in place of a
time, and the run goes on.
"""

import functools
import math
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor

from benchmarks import passes, runs, timing

SHORT_MS = 0.5  # below it, the host may be slower than the GPU
WORKERS = min(16, os.cpu_count() or 1)
TIMING = (
    "median of triton.testing.do_bench (CUDA events, L2 flushed before each call; a "
    f"call of more than {timing.LONG_MS:g} ms once), {timing.ROUNDS} interleaved "
    "rounds, each in an order drawn anew; launch: calls from Python; graph: replays of "
    "a CUDA graph of one call, taken where the fastest call of the shape is under "
    f"{SHORT_MS} ms; backward: torch.autograd.grad of a kept forward pass, everything "
    "that it launches included"
)


def kinds(item):
    """[(shape, job)] on short sequences, one for each of our kernels that is compiled
    on its own.
    """
    pairs = [(shape, job) for (shape, _), jobs in item.groups().items() for job in jobs]
    found = {}
    for shape, job in pairs + item.memory_jobs():
        if job.method not in passes.OTHERS:
            forward = job.direction == passes.FORWARD
            key = (job.method, job.layout, forward, shape.H, *shape[3:])
            found[key] = shape._replace(B=1, T=512), job
    return list(found.values())


def compile_kernels(shape, job):
    """Run the job once, for the kernels that it leaves in Triton's cache."""
    passes.outcome(job, shape, shape.inputs(job.layout))


def compile_all(item):
    """Compile a pass's kernels on all cores. A failure shows when the job is judged."""
    context = multiprocessing.get_context("spawn")  # a fork shares the CUDA context
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        for kind in kinds(item):
            pool.submit(compile_kernels, *kind)


def reason_against(shape, job):
    """Why the job is not timed on the shape, or None."""
    with passes.pinned(job.method):
        _, reason = timing.attempt(passes.judge, job, shape)
    timing.release()
    return reason


def time_jobs(makers, prepare):
    """Time {job: function that makes its call} in interleaved rounds.

    Returns {job: milliseconds of each round} and {job: why there are none}.
    """
    times, failed = {}, {}

    def attempt(job, action, *arguments):
        with passes.pinned(job.method):
            result, reason = timing.attempt(action, *arguments)
        if reason is not None:
            failed[job] = reason
            times.pop(job, None)
        return result

    calls = {job: attempt(job, prepare, make) for job, make in makers.items()}
    for job, call in timing.rounds(calls):
        if job not in failed and (ms := attempt(job, timing.time_ms, call)):
            times.setdefault(job, []).append(timing.digits(ms))
    return times, failed


def time_steps(cells, caches, judge, attend):
    """Add to the cells {job: cell} of some steps of decoding their times, or why there
    are none.

    caches are those of a model's layers, as many as a job's ``calls``. judge(job, one
    of them) raises if a step is wrong; a CUDA graph that is timed holds attend(job, x)
    for each.
    """

    def steps(job):
        return lambda: [attend(job, x) for x in caches]

    makers = {}
    for job, cell in cells.items():
        with passes.pinned(job.method):
            _, reason = timing.attempt(judge, job, caches[0])
        if reason is None:
            makers[job] = functools.partial(steps, job)
        else:
            cell["error"] = reason
    times, failed = time_jobs(makers, timing.captured)
    for job, reason in failed.items():
        cells[job]["error"] = reason
    for job, ms in times.items():
        round_us = [timing.digits(x * 1e3 / job.calls) for x in ms]
        us = statistics.median(round_us)
        tbs = timing.digits(job.bytes / us / 1e6)
        cells[job] |= {"round_us": round_us, "calls": job.calls}
        cells[job] |= {"bytes": job.bytes, "us": us, "tbs": tbs}


def measure(shape, jobs, absent):
    """The cells of one shape, one for each job; absent is {job: why it is not
    timed}.
    """
    inputs = {layout: shape.inputs(layout) for layout in {job.layout for job in jobs}}
    makers = {
        job: functools.partial(passes.make_call, job, shape, inputs[job.layout])
        for job in jobs
        if job not in absent
    }
    launched, failed = time_jobs(makers, lambda make: make())
    clocks = {}
    for job, round_ms in launched.items():
        with passes.pinned(job.method):
            clock = timing.attempt(timing.clock_mhz, makers[job], min(round_ms))
        clocks[job] = clock[0]
    graphs, refused = {}, {}
    if launched and min(map(min, launched.values())) < SHORT_MS:
        makers = {job: makers[job] for job in launched}
        graphs, refused = time_jobs(makers, timing.captured)
    cells = []
    for job in jobs:
        cell = job.identity(shape)
        cells.append(cell)
        if job not in launched:
            cell["error"] = absent.get(job) or failed[job]
            continue
        cell["launch_ms"] = launched[job]
        if job in graphs:
            cell["graph_ms"] = graphs[job]
        if job in refused:
            cell["graph_error"] = refused[job]
        cell["timed"] = "graph" if job in graphs else "launch"
        cell["ms"] = statistics.median(cell[f"{cell['timed']}_ms"])
        if clock := clocks.get(job):
            cell["clock_mhz"] = clock
        cell["tflops"] = timing.digits(shape.flops(job.direction) / cell["ms"] / 1e9)
    return cells


def measure_judged(shape, jobs):
    """As ``measure``, of the jobs whose results are right."""
    reasons = {job: reason_against(shape, job) for job in jobs}
    absent = {job: reason for job, reason in reasons.items() if reason is not None}
    return measure(shape, jobs, absent)


def measure_memory(shape, job):
    """The memory cell of a job: the peak of extra memory, or why there is none."""

    def measured():
        call = passes.make_call(job, shape, shape.inputs(job.layout))
        return timing.extra_bytes(call)

    extra, reason = None, reason_against(shape, job)
    if reason is None:
        with passes.pinned(job.method):
            extra, reason = timing.attempt(measured)
    found = {"extra_bytes": extra} if reason is None else {"error": reason}
    return [job.identity(shape) | found]


def timed(shape, jobs):
    """The task that times jobs of one shape."""
    names = [job.identity(shape) for job in jobs]
    return runs.Task("cells", names, functools.partial(measure_judged, shape, jobs))


def run(name, quick, say, path=None, end=math.inf):
    """(record of a pass as a dict, lines that say what of ours has failed and what is
    left): see benchmarks/runs.py.
    """
    item = passes.plan(quick)[name]
    grid = {"tokens": passes.TOKENS, "width": passes.WIDTH, "rounds": timing.ROUNDS}
    rule = passes.WINDOW_RULE if name == "fa3" else passes.FLOP_RULE
    fresh = {"pass": name, **timing.environment(), "flop_rule": rule, "timing": TIMING}
    fresh |= {"ceilings": None, "grid": grid}
    one = runs.Run(fresh, say, path, end)
    tasks = [timed(shape, jobs) for (shape, _), jobs in item.groups().items()]
    for shape, job in item.memory_jobs():
        measured = functools.partial(measure_memory, shape, job)
        tasks.append(runs.Task("memory", [job.identity(shape)], measured))
    if left := one.left(tasks):
        text = (
            f"{len(left)} of {len(tasks)} tasks are left; compiling on {WORKERS} cores"
        )
        say(f"{name}: {text}")
        compile_all(item)
    one.measure(left)
    return one.result(tasks)
