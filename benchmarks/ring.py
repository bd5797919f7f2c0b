"""Attention of one sequence on several GPUs: the record ring.

    for n in 1 2 4; do torchrun --nproc-per-node $n -m benchmarks.ring ring.json; done

Each call adds the cells of its number of ranks to the file. All methods of a shape are
judged, then timed in interleaved rounds, each in an order drawn anew. The file is
written after each shape, and a later call goes on where it ends. A shape that takes
longer than LIMIT_S gets that as its error and ends the call, so a method that hangs is
not tried again. In the method ring, NCCL sends the shards. In ring-steps copy engines
bring them, and in ring-launch they do to one launch; the library takes it with four
ranks or more. The methods whose names end in graph are replayed from a CUDA graph, at
the length where the host is the limit.

One call on a machine with 2 or 4 GPUs, of at most nine minutes, with OUT a folder: the
tests of what has never run, each group with a time limit, then the record. With
TESTED=1 and the record of an earlier call in OUT, it goes on without the tests:

    SECONDS=0; N=$(nvidia-smi -L | wc -l); export PYTHONPATH=. PYTHONUNBUFFERED=1
    t() { [ $SECONDS -gt 240 ] || timeout -k 5 75 python -m pytest -q -p \\
    no:cacheprovider "$@" || echo "FAILED $*"; }
    if [ -z "$TESTED" ]; then
    for k in barrier one_launch steps_by any_order graph ever memory; do
    t tests/test_ring_gpus.py -k $k; done
    t tests/test_ring.py -k "lost or attention or every_rank"; fi 2>&1 | tee $OUT/tests
    for n in $N $((N / 2)) 1; do timeout -k 5 $((535 - SECONDS)) python -m \\
    torch.distributed.run --nproc-per-node $n -m benchmarks.ring $OUT/ring.json \\
    --seconds $((440 - SECONDS)); done

Times are those of the slowest rank. The peak of memory is the largest of the ranks',
above what was allocated before the call, with the slots from which others copy. Bytes
are those that rank 0 sends in one call.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import flashlib
from benchmarks import passes, runs, timing
from flashlib import copies, ranks, ring_passes
from flashlib.reference import ring as reference
from flashlib.testing import assert_gradients_within_budget, assert_within_budget

copies.FEWEST = 2  # each method is judged before it is timed

TOKENS = 16384, 65536, 131072
PER_RANK = 32768  # of weak scaling, where each rank has this many tokens
LONGEST = 2**20
LIMIT_S = 150.0  # a shape: judging its methods, and all rounds
ROUNDS = 5  # two GPUs' clocks vary more than one's
H, D = 16, 128
DRAWN = 65536  # tokens of the calls whose work is recorded, both passes
WORK = {  # what a GPU does, by a part of the name that the profiler gives it
    "ring_kernel": "forward", "forward_kernel": "forward", "keys_kernel": "backward",
    "barrier_kernel": "barrier", "nccl": "message", "PtoP": "copy",
}  # fmt: skip
SINGLE = "single", "sdpa-cudnn"  # the whole sequence on each GPU, without a group
TORCH = passes.TORCH
RINGS = "ring", "ring-steps", "ring-launch"
GRAPHS = {"ring-graph": "ring-launch", "ulysses-graph": "ulysses"}
METHODS = (*RINGS, "ulysses", "all-gather", *TORCH, *SINGLE)
TIMING = (
    "median of interleaved rounds, each in an order drawn anew; a round is as many "
    "calls as take 0.3 s, from a barrier until the slowest rank's GPU is done"
)


class Shape(NamedTuple):
    """A causal sequence that all ranks share, and what is timed on it."""

    T: int
    direction: str
    methods: tuple

    def __str__(self):
        return f"{dist.get_world_size()} ranks, T = {self.T}, {self.direction}"

    def identity(self, method):
        """The fields of a record's cell that name it."""
        return {
            "method": method, "direction": self.direction, "T": self.T, "B": 1, "H": H,
            "ranks": dist.get_world_size(), "d": D, "causal": True,
            "dtype": str(timing.DTYPE).removeprefix("torch."),
        }  # fmt: skip

    def tflops(self, method, ms):
        """The rate of each GPU."""
        whole = passes.WORK[self.direction] * 2 * H * self.T**2 * D
        return whole / (1 if method in SINGLE else dist.get_world_size()) / ms / 1e9


def plan():
    """The shapes of this number of ranks."""
    size = dist.get_world_size()
    methods = METHODS if size > 1 else ("ring", *SINGLE)
    lengths = sorted({*TOKENS, PER_RANK * size})
    both = passes.FORWARD, passes.BOTH
    shapes = [Shape(T, way, methods) for T in lengths for way in both]
    if size > 1 and timing.DEVICE == "cuda":
        shapes += [Shape(TOKENS[0], way, tuple(GRAPHS)) for way in both]
    longest = [Shape(LONGEST, passes.BOTH, ("ring",))] if size > 1 else []
    return shapes + longest


# -- the methods


def attend(q, k, v, causal):
    return flashlib.attention(q, k, v, causal=causal)


@contextlib.contextmanager
def context_parallel(rotate):
    """PyTorch's scaled_dot_product_attention takes zig-zag shards in here."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import experimental
    from torch.distributed.tensor.experimental import _attention

    _attention.set_rotate_method(rotate)
    device = torch.device(timing.DEVICE).type
    mesh = DeviceMesh.from_group(dist.group.WORLD, device)
    # It shards a tensor, from which it learns that the shards are zig-zag.
    tokens = torch.zeros(1, 2 * dist.get_world_size(), device=timing.DEVICE)
    original = functional.scaled_dot_product_attention
    try:
        with (
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            experimental.context_parallel(
                mesh, buffers=[tokens], buffer_seq_dims=[1], no_restore_buffers={tokens}
            ),
        ):
            yield
    finally:  # torch 2.11 leaves its own function there after an error
        functional.scaled_dot_product_attention = original


@contextlib.contextmanager
def ring_by(method):
    """The ring sends messages in here, or launches a kernel for each shard."""
    launch, group = ring_passes._arrive_in_one_launch, dist.group.WORLD
    chosen = copies.CHOSEN.get(group)
    if method == "ring-steps":
        ring_passes._arrive_in_one_launch = lambda *_: False
    if method == "ring":
        reason = "the benchmark asks for them"
        copies.CHOSEN[group] = copies.Transport(None, None, reason)
    try:
        yield
    finally:
        ring_passes._arrive_in_one_launch = launch
        if method == "ring":
            del copies.CHOSEN[group]
        if chosen is not None:
            copies.CHOSEN[group] = chosen


def replayed(method):
    """The method that a CUDA graph holds; any other method itself."""
    return GRAPHS.get(method, method)


def pinned(method):
    """The context in which a method runs, its backward pass included."""
    method = replayed(method)
    if method in RINGS:
        return ring_by(method)
    if method in TORCH:
        return context_parallel(TORCH[method])
    return passes.pinned(method)


def call_of(method, direction, inputs):
    """The function that is timed, of a rank's inputs q, k, v and do."""
    if method in GRAPHS:
        return captured(call_of(GRAPHS[method], direction, inputs))
    *leaves, do = inputs
    ways = {
        **dict.fromkeys(RINGS, flashlib.ring_attention),
        "ulysses": flashlib.ulysses_attention,
        "all-gather": functools.partial(reference.all_gather_attention, attend=attend),
        "single": flashlib.attention,
    }

    def forward(*tensors):
        if method in ways:
            return ways[method](*tensors, causal=True)
        return functional.scaled_dot_product_attention(*tensors, is_causal=True)

    if direction == passes.FORWARD:
        return lambda: (forward(*leaves),)
    leaves = [x.detach().requires_grad_() for x in leaves]

    def both():
        o = forward(*leaves)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    return both


def captured(call):
    """A call that is replayed from a CUDA graph, which its first use captures."""
    made = []

    def replay():
        if not made:
            call()  # what is compiled, or chosen once
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                found = call()
            made.extend((graph, found))
        graph, found = made
        graph.replay()
        return found

    return replay


def positions(method, T):
    """The tokens of this rank, as a method divides the sequence."""
    method = replayed(method)
    rank, size = dist.get_rank(), dist.get_world_size()
    if method in SINGLE:
        return torch.arange(T)
    if method == "ulysses":
        return torch.arange(T).chunk(size)[rank]
    return reference.zigzag_positions(T, rank, size)


def inputs_of(T, methods):
    """{method: q, k, v and do of this rank}, and the last head of the whole tensors."""
    generator = torch.Generator(timing.DEVICE).manual_seed(T)
    found, heads, shared = {method: [] for method in methods}, [], {}
    for _ in range(4):
        options = {"generator": generator, "device": timing.DEVICE}
        whole = torch.randn(1, H, T, D, dtype=timing.DTYPE, **options)
        heads.append(whole[:, -1:].clone())
        for method in methods:
            at = positions(method, T)
            division = replayed(method) == "ulysses", len(at)
            if division not in shared:
                shared[division] = whole.index_select(2, at.to(whole.device))
            found[method].append(shared[division])
        shared.clear()
    return found, heads


# -- right, and how fast


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends to others while it is active; None after an
    operation of another name.
    """

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(x, DTensor) for x in types):
            return NotImplemented  # its own dispatch comes here with its shards
        space, _, name = func.name().partition("::")
        if space in ("c10d", "_c10d_functional"):
            sent = self.sent(name.split(".")[0].strip("_"), args)
            known = sent is not None and self.bytes is not None
            self.bytes = self.bytes + sent if known else None
        return func(*args, **(kwargs or {}))

    def sent(self, name, args):
        rank, size = dist.get_rank(), dist.get_world_size()
        if name == "send":
            return sum(x.nbytes for x in args[0])
        if name == "allgather":
            return sum(x.nbytes for x in args[1]) * (size - 1)
        if name == "allgather_base":
            return args[1].nbytes * (size - 1)
        if name == "all_gather_into_tensor":
            return args[0].nbytes * (size - 1)
        if name in ("alltoall_base", "all_to_all_single"):
            first = name == "all_to_all_single"
            x, splits = (args[0], args[2]) if first else (args[1], args[4])
            splits = list(splits) or [1] * size
            return x.nbytes * (sum(splits) - splits[rank]) // sum(splits)
        local = "recv", "barrier", "wait_tensor", "wrap_tensor_autograd"
        return 0 if name in local else None


def agree(reason):
    """The first reason that a rank has, or None; for every rank the same."""
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((x for x in reasons if x is not None), None)


def slowest(x):
    """The largest x of all ranks."""
    found = torch.tensor(x, dtype=torch.float64, device=timing.DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def finish():
    if timing.DEVICE == "cuda":
        torch.cuda.synchronize()


def joined(method, x):
    """The whole sequence, of every rank's shard as a method divides it."""
    if method in SINGLE:
        return x
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, x.contiguous())
    contiguous = replayed(method) == "ulysses"
    return torch.cat(shards, 2) if contiguous else reference.zigzag_join(shards)


def judge(method, shape, found, heads):
    """Raise AssertionError unless o and dq are within the budget of flashlib.testing,
    for the last head and the last 128 queries of this rank; up to T = 16384 the
    gradients of all keys too, from one device's reference of the whole sequence.
    """
    q, k, v, do = heads
    at = positions(method, shape.T)
    end, rows = int(at[-1]) + 1, min(128, len(at) // 2)
    last = slice(end - rows, end)
    tensors = q[:, :, last], k[:, :, :end], v[:, :, :end]
    o, *gradients = (x[:, -1:].contiguous() for x in found)
    if whole := shape.T <= 16384:  # before a rank can fail, all ranks take part
        all_gradients = [joined(method, x) for x in gradients]
    assert_within_budget(*tensors, o[:, :, -rows:], causal=True)
    if gradients and whole:
        assert_gradients_within_budget(*heads, *all_gradients, causal=True)
    elif gradients:
        some = do[:, :, last], gradients[0][:, :, -rows:], None, None
        assert_gradients_within_budget(*tensors, *some, causal=True)


def first_call(method, shape, call, heads):
    """Judge a method, and return the bytes that it sends. Those that it pulls are as
    many as others pull from it.
    """
    read, pulled = copies.Engine.bytes_of, [0]

    def reading(engine, rank, first, nbytes):
        pulled[0] += nbytes if rank != engine.rank else 0
        return read(engine, rank, first, nbytes)

    copies.Engine.bytes_of = reading
    try:
        with Sent() as sent:
            found = call()
    finally:
        copies.Engine.bytes_of = read
    finish()
    judge(method, shape, found, heads)
    unknown = sent.bytes is None or method in GRAPHS  # a replay does not come past here
    return None if unknown else sent.bytes + pulled[0]


def slot_bytes():
    """What the group's channels have of the GPU's memory, not PyTorch's allocator."""
    chosen = copies.CHOSEN.get(dist.group.WORLD)
    if chosen is None or chosen.reason is not None:
        return 0
    return sum(2 * channel.capacity for channel in (chosen.keys, chosen.sums))


def time_call(method, call):
    """(milliseconds of a call, the peak of its memory above what was allocated)."""

    def seconds(count):
        finish()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        finish()
        return slowest(time.perf_counter() - start)

    peak = None
    if timing.DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    once = seconds(1)
    if timing.DEVICE == "cuda":
        slots = slot_bytes() if method in RINGS[1:] else 0
        peak = int(slowest(torch.cuda.max_memory_allocated() - before + slots))
    count = int(0.3 / once)
    return 1e3 * (seconds(count) / count if count > 1 else once), peak


def measure(shape, say):
    """The cells of a shape, one for each method."""
    inputs, heads = inputs_of(shape.T, shape.methods)
    cells = {method: shape.identity(method) for method in shape.methods}
    calls = {}
    for method, cell in cells.items():
        call = call_of(method, shape.direction, inputs[method])
        say(f"{shape}: judging {method}")

        def judged(method=method, call=call):
            with pinned(method):
                return first_call(method, shape, call, heads)

        sent, reason = timing.attempt(judged)
        if (reason := agree(reason)) is not None:
            cell["error"] = reason
            say(f"{shape}: {method} is left out: {reason}")
            continue
        calls[method] = call
        cell["round_ms"] = []
        if sent is not None:
            cell["sent_bytes"] = sent
    for method, call in timing.rounds(calls, ROUNDS):
        say(f"{shape}: timing {method}")
        with pinned(method):
            ms, peak = time_call(method, call)
        cells[method]["round_ms"].append(timing.digits(ms))
        if peak is not None:
            cells[method]["extra_bytes"] = peak
    for method in calls:
        ms = statistics.median(cells[method]["round_ms"])
        rate = timing.digits(shape.tflops(method, ms))
        cells[method] |= {"ms": ms, "tflops": rate}
    return list(cells.values())


# -- when a GPU does what


def work_in(trace):
    """What a trace of PyTorch's profiler says of a GPU: [kind, begin, end] in
    milliseconds, of the kinds of WORK or "other"; pieces of one kind less than 10
    microseconds apart are one.
    """
    found = []
    events = [x for x in trace["traceEvents"] if "stream" in x.get("args", ())]
    for event in sorted(events, key=lambda x: x["ts"]):
        if event["cat"] not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        names = (kind for part, kind in WORK.items() if part in event["name"])
        kind = next(names, "other")
        begin, end = (1e-3 * x for x in (event["ts"], event["ts"] + event["dur"]))
        before = next((x for x in reversed(found) if x[0] == kind), None)
        if before is not None and begin - before[2] < 0.01:
            before[2] = max(before[2], end)
        else:
            found.append([kind, begin, end])
    first = found[0][1]
    return [[kind, *(round(x - first, 4) for x in times)] for kind, *times in found]


def draw(method):
    """The work of this rank's GPU in one call of both passes."""
    shape = Shape(DRAWN, passes.BOTH, (method,))
    inputs, _ = inputs_of(DRAWN, shape.methods)
    call = call_of(method, shape.direction, inputs[method])
    with pinned(method), tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            call()
        finish()
        with torch.profiler.profile() as profiler:
            dist.barrier(ranks.hosts(dist.group.WORLD))  # no work of the GPU
            call()
            finish()
        file = pathlib.Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        work = work_in(json.loads(file.read_text("utf-8")))
    return shape.identity(method) | {"work_ms": work}


# -- the record


def run(path, end, say):
    """Measure what the record at path lacks, one shape at least, until time.monotonic()
    is beyond end; returns lines that say what of ours has failed and what is left.

    Raises ValueError where earlier calls had another GPU or other versions.
    """
    fresh = {"pass": "ring", **timing.environment(), "timing": TIMING}
    fresh |= {"flop_rule": passes.FLOP_RULE, "timelines": []}
    # One rank reads the file and writes it.
    one = runs.Run(fresh, say, path if dist.get_rank() == 0 else None)
    shared = [one.record]
    dist.broadcast_object_list(shared)
    (one.record,) = shared
    doing = [""]

    def tell(text):
        doing[0] = text
        say(text)

    def give_up(task):
        """End a rank whose shape takes too long."""
        reason = f"{runs.TOO_LONG} {LIMIT_S:g} s, at the end: {doing[0]}"
        print(reason, file=sys.stderr, flush=True)
        if dist.get_rank() == 0:
            one.keep(task, [name | {"error": reason} for name in task.names])
        else:
            time.sleep(3)  # torchrun ends all ranks with the first
        os._exit(1)

    tasks = []
    for shape in plan():
        names = [shape.identity(method) for method in shape.methods]
        tasks.append(runs.Task("cells", names, functools.partial(measure, shape, tell)))
    for number, task in enumerate(one.left(tasks)):
        if number and slowest(time.monotonic() > end):
            return one.result(tasks)[1]
        limit = threading.Timer(LIMIT_S, give_up, [task])
        limit.daemon = True
        limit.start()
        cells = task.measure()
        limit.cancel()
        one.keep(task, cells)
        if timing.DEVICE == "cuda":
            timing.release()
    size = dist.get_world_size()
    drawn = [x["method"] for x in one.record["timelines"] if x["ranks"] == size]
    for method in ("ring", "ring-launch"):
        if timing.DEVICE == "cuda" and size > 1 and method not in drawn:
            say(f"drawing {method}")
            one.record["timelines"].append(draw(method))
            if one.path is not None:
                timing.write(one.record, one.path)
    return one.failures


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="benchmarks.ring", description=__doc__)
    parser.add_argument("path", type=pathlib.Path, metavar="FILE")
    help_text = "after that time, begin no other shape"
    parser.add_argument("--seconds", type=float, default=float("inf"), help=help_text)
    args = parser.parse_args(arguments)
    start = time.monotonic()
    if timing.DEVICE == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")

    def say(text):
        if dist.get_rank() == 0:
            print(f"[{time.monotonic() - start:4.0f} s] {text}", flush=True)

    failures = run(args.path, start + args.seconds, say)
    dist.destroy_process_group()
    if failures:
        sys.exit("benchmarks.ring: these were not timed:\n  " + "\n  ".join(failures))


if __name__ == "__main__":
    main()
