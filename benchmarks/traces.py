"""When the warps of a kernel for Hopper wait, and for what, by the clock of their
multiprocessor: the record traces.

A kernel that is traced is the kernel that the library runs, from the same source:
while Triton compiles it here, each wait of Gluon becomes a wait between two records of
Triton's profiler Proton, which store the clock. So the kernels have nothing in them
that would have to be switched off. A traced kernel has a cache of its own, since Triton
does not know that a wait has changed, and a case has a process of its own: a launch
that fails leaves a process without a GPU.
"""

import ast
import contextlib
import functools
import inspect
import json
import math
import multiprocessing
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks import runs, timing
from flashlib import plans, score_mods

LONG = 16384
# {T: records that a warp has space for}, more than it writes, two for a wait.
ENTRIES = {4096: 4096, LONG: 16384}
# A record keeps all waits of a program if no role has more than the first number, or
# as many as the second.
KEPT = 520, 300
LIMIT = 60  # seconds for a case
TIMING = (
    "ms: median of triton.testing.do_bench without a trace; waits: in clocks of the "
    "multiprocessor, by Proton's records before and after each wait, of one warp for "
    "each role in one launch after some milliseconds of other work"
)
# What kernels import by name, next to the waits of mbarrier and tma; a product waits
# unless it is asynchronous.
WAITS = {"warpgroup_mma", "warpgroup_mma_wait", "thread_barrier"}


class Case(NamedTuple):
    """A launch to trace: B = 1, and T queries and keys."""

    method: str
    direction: str
    d: int
    causal: bool
    T: int = 4096

    @property
    def heads(self):
        """So many that most multiprocessors get about four tiles of 128 rows."""
        return max(1, 16 * 4096 // self.T)

    def identity(self):
        sizes = {"B": 1, "H": self.heads, "H_kv": self.heads, "T_q": self.T}
        sizes |= {"T_k": self.T, "d": self.d, "causal": self.causal}
        kind = {"layout": "contiguous", "dtype": "bfloat16"}
        return {"method": self.method, "direction": self.direction, **sizes, **kind}


def awaited(call):
    """What a call of WAITS waits for: the barrier without its index, the product or its
    first factor, or what the call is; None if it does not wait.
    """
    name = ast.unparse(call.func)
    if name == "warpgroup_mma" and any(x.arg == "is_async" for x in call.keywords):
        return None
    if name in ("tma.store_wait", "thread_barrier"):
        return name.rpartition(".")[2]
    found = call.args[1].elts[0] if name == "warpgroup_mma_wait" else call.args[0]
    found = (
        found.func if isinstance(found, ast.Call) and name != "mbarrier.wait" else found
    )
    return re.sub(r"\.index\(.*", "", ast.unparse(found))


def scoped(wait):
    """The wait, a builtin of Gluon, between two records, named by the function that
    has it and by what it waits for.
    """
    from triton.profiler import language

    @functools.wraps(wait)
    def call(*arguments, _semantic=None, _generator=None, **options):
        name = awaited(_generator.cur_node)
        if name is None:
            return wait(*arguments, _semantic=_semantic, **options)
        name = f"{_generator.jit_fn.__name__}: {name}"
        language.enter_scope(name, _semantic=_semantic)
        result = wait(*arguments, _semantic=_semantic, **options)
        language.exit_scope(name, _semantic=_semantic)
        return result

    # Triton reads it to see that the call wants the generator, which knows the place.
    parts = [inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)]
    for name in ("_semantic", "_generator"):
        parts.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
    parts.append(inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD))
    call.signature = call.__signature__ = inspect.Signature(parts)
    del call.__wrapped__
    return call


@contextlib.contextmanager
def scopes():
    """While it lasts, every wait that Triton compiles in a module of flashlib.kernels
    is recorded.
    """
    from triton.experimental.gluon.language.nvidia import hopper

    before = []

    def put(owner, name, value):
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    put(hopper.mbarrier, "wait", scoped(hopper.mbarrier.wait))
    put(hopper.tma, "store_wait", scoped(hopper.tma.store_wait))
    for name, module in list(sys.modules.items()):
        if name.startswith("flashlib.kernels"):
            for wait in WAITS & vars(module).keys():
                put(module, wait, scoped(getattr(module, wait)))
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def mode(warps, entries):
    """Proton's mode: one warp of each role writes to memory, not to shared memory, of
    which these kernels use nearly all, and only the lower half of the clock.
    """
    return (
        "default:buffer_type=global:sampling_strategy=selective:sampling_options="
        f"{','.join(map(str, warps))}:buffer_size={8 * entries * len(warps)}"
        ":optimizations=clock32"
    )


def first_warps(sizes):
    """The first warp of each partition with so many warps: Triton fills the last four
    with partitions that do nothing, and begins with the widest.
    """
    lacking, sizes = -sum(sizes) % 4, list(sizes)
    count = len(sizes)
    while lacking:
        sizes.append(2 ** (lacking.bit_length() - 1))
        lacking -= sizes[-1]
    order = sorted(range(1, len(sizes)), key=lambda n: -sizes[n])
    found = {0: 0}
    for n, before in zip(order, [0, *order], strict=False):
        found[n] = found[before] + sizes[before]
    return [found[n] for n in range(count)]


def partitions(groups, *others):
    """{role: its first warp} of groups of four warps and of roles of one warp."""
    names = [*(f"group {c}" for c in range(groups)), *others]
    sizes = [4] * groups + [1] * len(others)
    return dict(zip(names, first_warps(sizes), strict=True))


class Traced:
    """Stands where a jit kernel stood: compiles it, and launches it once."""

    def __init__(self, kernel, before):
        self.kernel, self.before = kernel, before

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            arguments = [
                torch.zeros(1, dtype=torch.int32, device=timing.DEVICE)
                if isinstance(x, plans.Zero)
                else x
                for x in arguments
            ]
            self.kernel.warmup(*arguments, grid=grid, **options)
            self.before()
            self.kernel[grid](*arguments, **options)

        return launch


class Launch(NamedTuple):
    """A module, its kernel that is traced, {role: its first warp}, a call that launches
    the kernel, and what the kernel fills.
    """

    module: Any
    kernel: str
    roles: dict
    call: Callable
    results: tuple


def inputs(case, count):
    generator = torch.Generator(timing.DEVICE).manual_seed(0)
    options = {"generator": generator, "device": timing.DEVICE, "dtype": timing.DTYPE}
    shape = 1, case.heads, case.T, case.d
    return [torch.randn(shape, **options) for _ in range(count)]


def forward_launch(case):
    """The Launch of a forward kernel."""
    from flashlib.kernels import hopper
    from flashlib.kernels.steps import hopper as steps

    q, k, v = inputs(case, 3)
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    how, results = (case.causal, case.d**-0.5), (o, lse)
    if case.method == "hopper":
        tile = hopper.choose_tile(case.d, case.T, case.causal)
        roles = partitions(tile.CONSUMERS, "producer")

        def call():
            score_mod = score_mods.unchanged(*how)
            hopper.launch_forward(q, k, v, o, lse, score_mod, None, tile)

        return Launch(hopper, "forward_kernel", roles, call, results)

    def call():
        steps.launch_forward(q, k, v, o, lse, *how, case.method)

    kernel, roles = "apart_kernel", partitions(2, "producer")
    if case.method == "copies":  # eight warps without roles
        kernel, roles = "together_kernel", partitions(2)
    return Launch(steps, kernel, roles, call, results)


def backward_launch(case):
    """The Launch of the kernel for dK and dV that, unless d = 256, adds up dQ too."""
    from flashlib.kernels import hopper, hopper_backward, hopper_wide
    from flashlib.kernels.backward import DELTA_ROWS, launch_delta
    from flashlib.kernels.gluon_order import ADDERS

    q, k, v, do = inputs(case, 4)
    score_mod = score_mods.unchanged(case.causal, case.d**-0.5)
    o, lse = hopper.forward(q, k, v, score_mod)
    delta, lse2 = (torch.empty_like(lse) for _ in range(2))
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    turns = lse.new_empty(delta.numel() // DELTA_ROWS, dtype=torch.int32)
    launch_delta(o, lse, do, torch.zeros_like(lse), delta, lse2, turns)
    module, rest, adders = hopper_wide, (hopper_wide.KEYS,), []
    if case.d in hopper_backward.FUSED:
        module, dq_sums = hopper_backward, lse.new_empty(delta.numel(), case.d)
        rest = hopper_backward.FUSED[case.d], dq_sums, turns
        adders = [f"adder {a}" for a in range(ADDERS.value)]

    def call():
        turns.zero_()
        read = q, k, v, do, delta, lse2
        module.launch_keys(*read, dk, dv, score_mod, *rest)

    roles = partitions(2, "producer", *adders)
    return Launch(module, "keys_kernel", roles, call, (dk, dv))


def launch_of(case):
    """The Launch of a case."""
    make = forward_launch if case.direction == "forward" else backward_launch
    return make(case)


def events(path, kernel, roles):
    """{(multiprocessor, program): {role: [(scope, begin, end)]}} of a chrome trace of
    Proton's, in clocks from the program's first record on.
    """
    place = re.compile(rf"{kernel} Core(\d+) CTA(\d+)")
    names = {f"warp {warp} ": role for role, warp in roles.items()}
    found = {}
    for event in json.loads(pathlib.Path(path).read_text("utf-8"))["traceEvents"]:
        if not (at := place.fullmatch(event["pid"])):
            continue
        role = names[event["tid"].partition("(")[0]]
        program = found.setdefault(tuple(map(int, at.groups())), {x: [] for x in roles})
        # Proton prints microseconds as if the clock ran at 1 GHz.
        begin = round(1000 * event["ts"])
        program[role].append((event["name"], begin, begin + round(1000 * event["dur"])))
    for program in found.values():
        first = min(begin for spans in program.values() for _, begin, _ in spans)
        for role, spans in program.items():
            moved = [(name, a - first, b - first) for name, a, b in spans]
            program[role] = sorted(moved, key=lambda span: span[1:])
    return found


def heat():
    """Some milliseconds of products, so that the clock is what it is under load."""
    x = torch.zeros(8192, 8192, device=timing.DEVICE, dtype=timing.DTYPE)
    for _ in range(10):
        torch.matmul(x, x)


def traced(launch, entries):
    """The events of one launch, as ``events`` gives them."""
    from triton import knobs, profiler

    module, kernel, roles, call, _ = launch
    plain, folder = getattr(module, kernel), knobs.cache.dir
    setattr(module, kernel, Traced(plain, heat))
    # Triton does not know that waits have changed: they get a cache of their own.
    knobs.cache.dir = f"{folder}-waits"
    plain.device_caches.clear()
    plans.PLANS.clear()
    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(temporary, "trace")
        how = {"backend": "instrumentation", "mode": mode(roles.values(), entries)}
        session = profiler.start(str(path), data="trace", **how)
        try:
            with scopes():
                call()
            torch.cuda.synchronize()
        finally:
            profiler.finalize(session)
            knobs.cache.dir = folder
            setattr(module, kernel, plain)
            plain.device_caches.clear()
            plans.PLANS.clear()
        return events(f"{path}.chrome_trace", kernel, roles)


def trace(case):
    """The cell of a case: milliseconds without a trace, the clock under this load,
    whether a trace left every bit of the results as it was, and what ``reduced`` keeps.
    """
    launch = launch_of(case)
    launch.call()
    expected = [x.clone() for x in launch.results]
    ms = timing.time_ms(launch.call)
    date = timing.environment()["date"]
    cell = case.identity() | {"date": date, "ms": timing.digits(ms)}
    cell["clock_mhz"] = timing.clock_mhz(lambda: launch.call, ms)
    for x in launch.results:
        x.zero_()
    found = traced(launch, ENTRIES[case.T])
    pairs = zip(launch.results, expected, strict=True)
    cell["equal"] = all(torch.equal(x, y) for x, y in pairs)
    return cell | reduced(found)


def window(roles):
    """The waits of one program, {role: [(scope, begin, end)]}, or, of many, those
    around the end of its first tile: where group 0 waits for Q the second time.
    """
    most, kept = KEPT
    if max(map(len, roles.values())) <= most:
        return roles
    spans = roles["group 0"]
    second = [n for n, x in enumerate(spans) if x[0].endswith("q.ready")][1]
    first = max(0, second - kept // 2)
    begin, end = spans[first][1], spans[first + kept - 1][2]
    return {
        role: [x for x in spans if begin <= x[1] and x[2] <= end]
        for role, spans in roles.items()
    }


def reduced(found):
    """What a record keeps of events: of all programs how often and how long each role
    waits on average, and of one program every wait of a ``window``, as [scope, begin,
    end].
    """
    waits = {}
    for program in found.values():
        for role, spans in program.items():
            for scope, begin, end in spans:
                waits.setdefault(role, {}).setdefault(scope, []).append(end - begin)
    for role, scopes in waits.items():
        for scope, clocks in scopes.items():
            mean = timing.digits(max(1, sum(clocks)) / len(clocks))
            waits[role][scope] = {"count": len(clocks), "mean": mean}
    place = sorted(found)[len(found) // 2]
    names = sorted({name for scopes in waits.values() for name in scopes})
    kept = {
        role: [[names.index(name), *span] for name, *span in spans]
        for role, spans in window(found[place]).items()
    }
    clocks = [
        max(end for spans in program.values() for *_, end in spans)
        for program in found.values()
    ]
    return {
        "programs": len(found),
        "clocks": [min(clocks), max(clocks)],
        "waits": waits,
        "multiprocessor": place[0],
        "scopes": names,
        "roles": kept,
    }


# In the order in which they are traced.
CASES = (
    *(Case("hopper", "forward", d, False) for d in (128, 64, 256)),
    *(Case(x, "forward", 128, False, LONG) for x in ("hopper", "overlapped")),
    Case("copies", "forward", 64, False),
    *(Case("hopper", "backward", d, False) for d in (64, 128)),
)


def tell(pipe, case):
    """Send (the cell of a case, None), or (None, why it has none)."""
    pipe.send(timing.attempt(trace, case))


def traced_apart(case):
    """What ``tell`` sends, from a process of its own that has LIMIT seconds. A launch
    that failed under Proton has passed the second time, so there is one.
    """
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=tell, args=(there, case))
        process.start()
        there.close()
        try:
            late = None, f"no trace after {LIMIT} seconds"
            cell, error = here.recv() if here.poll(LIMIT) else late
        except EOFError:
            process.join()
            cell, error = None, f"its process ended with {process.exitcode}"
        finally:
            process.kill()
            process.join()
        if not error:
            break
    return cell, error


def measure(case):
    """The cell of a case, as a list."""
    cell, error = traced_apart(case)
    return [case.identity() | {"error": error} if error else cell]


def run(quick, say, path=None, end=math.inf):
    """(the record, lines that say what has failed and what is left): see
    benchmarks/runs.py.
    """
    fresh = {"pass": "traces", **timing.environment(), "timing": TIMING}
    one = runs.Run(fresh, say, path, end)
    tasks = [
        runs.Task("cells", [case.identity()], functools.partial(measure, case))
        for case in (CASES[:1] if quick else CASES)
    ]
    one.measure(one.left(tasks))
    record, failures = one.result(tasks)
    for cell in record["cells"]:
        if not cell.get("equal", True):
            text = "{method}, {direction}, d = {d}: the trace changed the results"
            failures.append(text.format(**cell))
    return record, failures
