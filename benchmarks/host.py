"""What a call costs the host, next to what it costs the GPU: the record host.

first     seconds of the first call of a process
calls     microseconds from one call to the next where the GPU waits for the host: of
          the fastest round, since other work on the host only adds time
cells     calls from Python (eager) and replays of a CUDA graph of the same calls
training  steps per second of a model of GPT-2's size: eager, compiled, and compiled
          into CUDA graphs
"""

import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from torch.nn import functional

import flashlib
from benchmarks import passes, runs, timing
from flashlib.kvcache import PagedKVCache

METHODS = ("flash2", "hopper", "auto", *passes.RIVALS)
COMPILED = "flash2", "hopper"  # whose first call is timed
LENGTHS = (256, 512, 1024, 2048)
CALLS = 10  # that a CUDA graph holds
# A call so short that the GPU waits for the host, and how often it is timed.
SHORT = {"B": 1, "H": 4, "T": 256, "d": 64, "keys": 1000, "calls": 200, "rounds": 5}
STEPS = 30  # of training that are timed together
TIMING = (
    "first: one process each, host clock, from the call until its result is on the "
    f"host, PyTorch and flashlib imported before; calls: {SHORT['calls']} calls after "
    "as many others, host clock, fastest round; cells: CUDA events around 20 times "
    f"{CALLS} calls or around 20 replays of a CUDA graph that holds as many; training: "
    f"{STEPS} steps, host clock, median; all but first: interleaved rounds, each in an "
    "order drawn anew, cells medians of them"
)
FIRST = """
import json, sys, time
import torch
import flashlib

method, device, T = sys.argv[1:]
sizes = 1, 8, int(T), 128
options = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
leaves = [torch.randn(sizes, **options) for _ in range(3)]
torch.zeros(1, device=device).cpu()

start = time.perf_counter()
o = flashlib.attention(*leaves, causal=True, method=method)
o.cpu()
forward = time.perf_counter()
torch.autograd.grad(o, leaves, o)[0].cpu()
backward = time.perf_counter()
print(json.dumps({"forward": forward - start, "backward": backward - forward}))
"""


def first(T=1024, methods=COMPILED):
    """The cells of a process's first call: B = 1, H = 8, d = 128. Triton's cache is
    empty (cold), or a process before has filled it (warm).
    """
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for method, state in itertools.product(methods, ("cold", "warm")):
            command = [sys.executable, "-c", FIRST, method, timing.DEVICE, str(T)]
            environment = os.environ | {"TRITON_CACHE_DIR": f"{folder}/{method}"}
            printed = subprocess.check_output(command, env=environment, text=True)
            for direction, seconds in json.loads(printed).items():
                cell = {"method": method, "direction": direction, "cache": state}
                cells.append(cell | {"seconds": timing.digits(seconds)})
    return cells


def attend(method, q, k, v, causal=False):
    """O by one method; a rival's is pinned by the caller."""
    if method in passes.RIVALS:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return flashlib.attention(q, k, v, causal=causal, method=method)


def per_call_us(action):
    """Microseconds of the host for each call, after as many calls that warm up."""
    calls = SHORT["calls"]
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            action()
        us = (time.perf_counter() - start) / calls * 1e6
    return timing.digits(us)


def decoding():
    """{method: one step of decoding}, on a cache with room for 1024 keys; cache: keys
    and values of one position are stored first.
    """
    options = {"device": timing.DEVICE, "dtype": timing.DTYPE}
    B, H, d, keys = (SHORT[name] for name in ("B", "H", "d", "keys"))
    q, k, v = (torch.randn(B, H, T, d, **options) for T in (1, 1024, 1024))
    lengths = torch.tensor([keys] * B, dtype=torch.int32, device=timing.DEVICE)
    cache = PagedKVCache(64, 64, H, d, **options)
    name = cache.new()
    cache.append(name, k[0, :, :keys], v[0, :, :keys])
    table, _ = cache.batch([name])
    pages = cache.k_pages, cache.v_pages

    def stored():
        cache.write(name, keys - 1, k[0, :, :1], v[0, :, :1])
        table, lengths = cache.batch([name])
        return flashlib.decode(q, *pages, seq_lens=lengths, block_table=table)

    return {
        "decode": lambda: flashlib.decode(q, k, v, seq_lens=lengths),
        "decode, pages": lambda: flashlib.decode(
            q, *pages, seq_lens=lengths, block_table=table
        ),
        "decode, cache": stored,
    }


def compile_alone(function, mode=None):
    """The function, compiled. PyTorch keeps what it compiles with the code, which all
    closures made by the same lines share, so this function gets its own copy.
    """
    function.__code__ = function.__code__.replace()
    return torch.compile(function, fullgraph=True, mode=mode)


def attending(method):
    """{(method, direction): (call, whether gradients are recorded)}."""
    shape = passes.Shape(*(SHORT[name] for name in "BHTd"), False)
    *qkv, do = shape.inputs("contiguous")
    leaves = [x.detach().requires_grad_() for x in qkv]
    forward = functools.partial(attend, method)
    with passes.pinned(method):
        o = forward(*leaves)
    backward = functools.partial(torch.autograd.grad, o, leaves, do, retain_graph=True)
    found = {
        "forward": (functools.partial(forward, *qkv), True),
        "forward, grad": (functools.partial(forward, *leaves), True),
        "backward": (backward, True),
    }
    if method not in ("auto", "sdpa-cudnn"):
        call = compile_alone(lambda q, k, v: attend(method, q, k, v))
        call = functools.partial(call, *leaves)
        found["forward, compiled"] = call, True
        found["forward, compiled, no grad"] = call, False
    return {(method, direction): pair for direction, pair in found.items()}


def calls():
    """The cells of what a call costs the host, in interleaved rounds."""
    B, H, T, d = (SHORT[name] for name in "BHTd")
    layer = flashlib.FlashSelfAttention(H * d, H, device="cuda", dtype=timing.DTYPE)
    x = torch.randn(B, T, H * d, device="cuda", dtype=timing.DTYPE)
    actions = {
        ("layer", "forward, grad"): (functools.partial(layer, x), True),
        ("layer", "forward"): (functools.partial(layer, x), False),
    }
    for method, action in decoding().items():
        actions[method, "forward"] = action, True
    for method in METHODS:
        actions |= attending(method)
    times = {}
    for key, (action, grad) in timing.rounds(actions, SHORT["rounds"]):
        with passes.pinned(key[0]), torch.set_grad_enabled(grad):
            times.setdefault(key, []).append(per_call_us(action))
    return [
        {"method": method, "direction": direction}
        | {"round_us": round_us, "us": min(round_us)}
        for (method, direction), round_us in times.items()
    ]


def event_ms(action, calls):
    """Milliseconds of each of ``calls`` calls, by events around all of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    action()
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        action()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


TIMED = ("flash2", "hopper", *passes.RIVALS)


def shapes(quick=False):
    """What eager calls and graphs are compared on."""
    lengths, d = LENGTHS, (64, 128)
    if quick:
        lengths, d = LENGTHS[:1], d[:1]
    return [shape for T in lengths for shape in passes.ladder(d, (T,))]


def jobs(methods=TIMED):
    """The jobs of a shape: every method, forward and backward."""
    pairs = itertools.product(methods, (passes.FORWARD, passes.BACKWARD))
    return [passes.Job(*pair, "contiguous") for pair in pairs]


def cells(shape, methods=TIMED):
    """Eager calls and graphs of a shape's jobs."""
    calls, found = {}, []
    for job in jobs(methods):
        make = functools.partial(passes.make_call, job, shape, shape.inputs(job.layout))

        def several(make=make):
            call = make()
            return lambda: [call() for _ in range(CALLS)]

        with passes.pinned(job.method):
            calls[job, "eager"] = several()
            graph, reason = timing.attempt(timing.captured, several)
        if reason is None:
            calls[job, "graph"] = graph
        else:
            found.append(job.identity(shape) | {"mode": "graph", "error": reason})
    times = {}
    for (job, mode), call in timing.rounds(calls):
        with passes.pinned(job.method):
            ms = event_ms(call, 20) / CALLS
        times.setdefault((job, mode), []).append(timing.digits(ms))
    for (job, mode), round_ms in times.items():
        ms = statistics.median(round_ms)
        cell = job.identity(shape) | {"mode": mode, "round_ms": round_ms, "ms": ms}
        cell["tflops"] = timing.digits(shape.flops(job.direction) / ms / 1e9)
        found.append(cell)
    return found


class Block(torch.nn.Module):
    """A block of GPT-2's size."""

    def __init__(self, attention, width=768, heads=12):
        super().__init__()
        self.attention, self.heads = attention, heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = (torch.nn.Linear(width, n * width) for n in (3, 1))
        self.up, self.down = (
            torch.nn.Linear(width, 4 * width),
            torch.nn.Linear(4 * width, width),
        )

    def forward(self, x):
        """x [B, T, width]."""
        qkv = self.qkv(self.norms[0](x)).unflatten(2, (3, self.heads, -1))
        q, k, v = (z.transpose(1, 2) for z in qkv.unbind(2))
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(torch.nn.Module):
    """12 blocks, a vocabulary of 50304."""

    def __init__(self, attention, layers=12, width=768, words=50304):
        super().__init__()
        self.words = torch.nn.Embedding(words, width)
        self.places = torch.nn.Embedding(1024, width)
        self.blocks = torch.nn.Sequential(*(Block(attention) for _ in range(layers)))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        """The mean loss of predicting each token of [B, T + 1] from those before."""
        x = self.words(tokens[:, :-1]) + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


MODES = {"eager": None, "compiled": "default", "graphs": "reduce-overhead"}


def trainer(method, batch, mode):
    """One step of training, bfloat16 weights and AdamW."""
    torch.manual_seed(0)
    model = Model(functools.partial(attend, method, causal=True))
    model = model.to(timing.DEVICE, timing.DTYPE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, 50304, (batch, 1025), device=timing.DEVICE)
    loss = model
    if mode != "eager":
        loss = compile_alone(lambda tokens: model(tokens), MODES[mode])

    def step():
        with passes.pinned(method):
            loss(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


TRAINED = ("flash2", "auto", *passes.RIVALS)


def training(batch, mode, methods=TRAINED):
    """Steps per second, in interleaved rounds."""
    steps, rates = {}, {}
    for method in methods:
        step = trainer(method, batch, mode)
        for _ in range(3):
            step()
        steps[method] = step
    for method, step in timing.rounds(steps, 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        rate = timing.digits(STEPS / (time.perf_counter() - start))
        rates.setdefault(method, []).append(rate)
    found = []
    for method, rounds in rates.items():
        cell = {"method": method, "mode": mode, "batch": batch, "rounds": rounds}
        found.append(cell | {"steps_per_second": statistics.median(rounds)})
    return found


def tasks(quick):
    """What is measured together."""
    pairs = itertools.product(COMPILED, ("cold", "warm"))
    callers = "layer", "decode", "decode, pages", "decode, cache", *METHODS
    found = [
        runs.Task("first", [{"method": m, "cache": x} for m, x in pairs], first),
        runs.Task("calls", [{"method": m} for m in callers], calls),
    ]
    for shape in shapes(quick):
        names = [
            job.identity(shape) | {"mode": mode}
            for job in jobs()
            for mode in ("eager", "graph")
        ]
        found.append(runs.Task("cells", names, functools.partial(cells, shape)))
    for batch, mode in itertools.product((8,) if quick else (8, 1), MODES):
        names = [{"method": m, "mode": mode, "batch": batch} for m in TRAINED]
        action = functools.partial(training, batch, mode)
        found.append(runs.Task("training", names, action))
    return found


def run(quick, say, path=None, end=math.inf):
    """(record as a dict, lines that say what of ours has failed and what is left): see
    benchmarks/runs.py.
    """
    grid = {"tokens": passes.TOKENS, "width": passes.WIDTH}
    fresh = {"pass": "host", **timing.environment(), "timing": TIMING}
    fresh |= {"flop_rule": passes.FLOP_RULE, "call": SHORT, "grid": grid}
    one, work = runs.Run(fresh, say, path, end), tasks(quick)
    one.measure(one.left(work))
    return one.result(work)
