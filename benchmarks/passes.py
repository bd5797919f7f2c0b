"""What the benchmarks measure: the methods, how each is called, the shapes, and how a result is judged.

Four passes, a record each:

forward     the ladder of forward kernels, and their memory over T
steps       the changes that lead from flash1 to flash2, one at a time, and a tile with 4 and with 8 warps
backward    the backward pass alone and together with the forward pass, their memory over T, one shape of a
            public leaderboard, and the loop orders of the chapter
hopper      the kernels for compute capability 9.0, forward and backward, and the changes that lead from
            flash2 to them, one at a time

Unless a sweep says otherwise a shape has B T = 16384 and H d = 2048. The methods of the ladders go through
``flashlib.attention`` or PyTorch's ``scaled_dot_product_attention``, the kernels of a chapter through their
launchers.
"""

import contextlib
import dataclasses
import functools
import itertools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashlib
from flashlib import kernels
from flashlib.kernels import flash2, launch
from flashlib.kernels.steps import flash2 as flash2_steps
from flashlib.kernels.steps import hopper as hopper_steps
from flashlib.testing import assert_gradients_within_budget, assert_within_budget

DTYPE = torch.bfloat16
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
# Operations of a pass, in units of the forward's: the backward pass is counted as five products for two.
WORK = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}
FLOP_RULE = "forward: 4 B H T_q T_k d operations, half of them with a causal mask; backward: 2.5 times that"

# What `flashlib.attention` is told.
OURS = {
    "standard": {"method": "standard"},
    "flash1": {"method": "flash1"},
    "flash2": {"method": "flash2"},
    "flash2-atomic": {"method": "flash2", "deterministic": False},
    "hopper": {"method": "hopper"},
    "hopper-atomic": {"method": "hopper", "deterministic": False},
}
RIVALS = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclasses.dataclass(frozen=True)
class Shape:
    """q, k and v of shape [B, H, T, d]."""

    B: int
    H: int
    T: int
    d: int
    causal: bool

    def __str__(self):
        return (
            f"d = {self.d}, {'causal' if self.causal else 'full'}, B = {self.B}, H = {self.H}, T = {self.T}"
        )

    def flops(self, direction):
        return WORK[direction] * 4 * self.B * self.H * self.T**2 * self.d / (2 if self.causal else 1)

    def inputs(self, layout, device):
        """Normal q, k, v, do [B, H, T, d]; "strided" is stored [B, T, H, d], as a linear layer leaves it."""
        generator = torch.Generator(device).manual_seed(self.T + self.d)
        stored = (
            (self.B, self.H, self.T, self.d) if layout == "contiguous" else (self.B, self.T, self.H, self.d)
        )
        tensors = [torch.randn(stored, generator=generator, device=device, dtype=DTYPE) for _ in range(4)]
        return tensors if layout == "contiguous" else [x.transpose(1, 2) for x in tensors]


@dataclasses.dataclass(frozen=True)
class Job:
    """What is called on a shape."""

    method: str
    direction: str
    layout: str

    def __str__(self):
        return f"{self.method}, {self.direction}, {self.layout}"

    def identity(self, shape):
        """The fields of a record's cell that name it."""
        return {
            "method": self.method, "direction": self.direction, "B": shape.B, "H": shape.H, "H_kv": shape.H,
            "T_q": shape.T, "T_k": shape.T, "d": shape.d, "causal": shape.causal, "layout": self.layout,
            "dtype": str(DTYPE).removeprefix("torch."),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Every method on every shape."""

    methods: tuple
    shapes: tuple
    direction: str = FORWARD
    layout: str = "contiguous"

    def jobs(self):
        """[(shape, job)]."""
        return [
            (shape, Job(method, self.direction, self.layout))
            for shape in self.shapes
            for method in self.methods
        ]

    def description(self):
        """The sweep as a record's grid has it."""
        shapes = [list(dataclasses.astuple(shape)) for shape in self.shapes]
        return {
            "methods": list(self.methods), "direction": self.direction, "layout": self.layout,
            "shapes": shapes,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pass:
    """One record: sweeps to time, sweeps to measure the memory of, the files of flashlib that they run, and
    the compute capability that its kernels are written for, where they run on no other.
    """

    name: str
    sweeps: tuple
    memory: tuple
    files: tuple
    capability: tuple | None = None

    def groups(self):
        """{(shape, direction): jobs}: what is timed in turn, because it is compared."""
        found = {}
        for shape, job in itertools.chain.from_iterable(sweep.jobs() for sweep in self.sweeps):
            found.setdefault((shape, job.direction), []).append(job)
        return found

    def memory_jobs(self):
        return [pair for sweep in self.memory for pair in sweep.jobs()]


# -------------------------------------------------------------------------------------------------
# calls


def attend(method, q, k, v, causal):
    """One forward call: o [B, H, T, d]. A rival is the one that the surrounding `pinned` names."""
    if method in OURS:
        return flashlib.attention(q, k, v, causal=causal, **OURS[method])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def pinned(method):
    """A context in which PyTorch has only the backend that the method names."""
    return sdpa_kernel([RIVALS[method]]) if method in RIVALS else contextlib.nullcontext()


def with_warps(num_warps, q, k, v, causal, scale):
    """(o, lse) of flash2 with the tile of its table and another number of warps."""
    dtype = q.dtype
    q, k, v = kernels.widened(q, k, v)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    row = launch.configuration("flash2", flash2.CONFIGURATIONS, (q, k, v), causal)
    flash2.launch(q, k, v, o, lse, causal, scale, row._replace(num_warps=num_warps))
    return o.to(dtype), lse


def loop_order(order, *arguments):
    """(dq, dk, dv) of the backward pass in the loop order of one of the slides' algorithms."""
    from flashlib.kernels.steps import backward  # only one sweep needs it

    return getattr(backward, order.replace("-", "_"))(*arguments)


# The kernels of a chapter, by their launchers: (q, k, v, causal, scale) -> (o, lse), and
# (q, k, v, o, lse, do, dlse, causal, scale) -> (dq, dk, dv).
WARPS = {f"flash2-{n}-warps": functools.partial(with_warps, n) for n in (4, 8)}
STEPS = {
    step: functools.partial(module.forward, step=step)
    for module in (flash2_steps, hopper_steps)
    for step in module.STEPS
}
LAUNCHED = {**STEPS, **WARPS}
LOOP_ORDERS = {order: functools.partial(loop_order, order) for order in ("algorithm-5", "algorithm-6")}


def make_call(job, shape, inputs):
    """The call to time, without arguments: it returns o, or (o, lse) by a launcher; for the backward pass
    (dq, dk, dv).

    inputs are q, k, v and do; for the backward pass alone the forward pass runs here and is kept.
    """
    q, k, v, do = inputs
    scale = shape.d**-0.5
    if job.method in LOOP_ORDERS:
        o, lse = flash2.forward(q, k, v, shape.causal, scale)
        arguments = (q, k, v, o, lse, do, torch.zeros_like(lse), shape.causal, scale)
        return functools.partial(LOOP_ORDERS[job.method], *arguments)
    if job.direction == FORWARD and job.method in LAUNCHED:
        return functools.partial(LAUNCHED[job.method], q, k, v, shape.causal, scale)
    if job.direction == FORWARD:
        return functools.partial(attend, job.method, q, k, v, shape.causal)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if job.direction == BOTH:
        return lambda: torch.autograd.grad(attend(job.method, *leaves, shape.causal), leaves, do)
    o = attend(job.method, *leaves, shape.causal)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


# -------------------------------------------------------------------------------------------------
# correctness


def outcome(job, shape, inputs):
    """What the job computes, as a tuple: (o,) or (o, lse), or (dq, dk, dv)."""
    if job.direction == FORWARD and job.method in OURS:
        q, k, v, _ = inputs
        return flashlib.attention(q, k, v, causal=shape.causal, return_lse=True, **OURS[job.method])
    results = make_call(job, shape, inputs)()
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def judge(job, shape, device):
    """Raise AssertionError unless the job's results on the shape are within the budget of flashlib.testing.

    Our forward results are judged on every row, with the log-sum-exp, some heads at a time, so that the
    T x T matrices of the reference fit. A rival's, and gradients, are judged on the last heads. Beyond
    T = 16384 only the last 128 queries of each head are judged, and of the gradients only dQ: on these
    queries the bottom-right causal mask is the same, while dK and dV need every query.
    """
    inputs = shape.inputs(job.layout, device)
    results = outcome(job, shape, inputs)
    q, k, v, do, *results = (x.reshape(1, -1, shape.T, *x.shape[3:]) for x in (*inputs, *results))
    rows = shape.T if shape.T <= 16384 else 128
    heads, some = q.shape[1], max(1, 2**28 // (rows * shape.T))
    every = job.direction == FORWARD and job.method not in RIVALS
    for start in range(0, heads, some) if every else [max(0, heads - some)]:
        part = slice(start, start + some)
        last = (slice(None), part, slice(shape.T - rows, None))
        keys = k[:, part], v[:, part]
        if job.direction == FORWARD:
            assert_within_budget(q[last], *keys, *(x[last] for x in results), causal=shape.causal)
        else:
            dq, dk, dv = results
            others = (dk[:, part], dv[:, part]) if rows == shape.T else (None, None)
            assert_gradients_within_budget(q[last], *keys, do[last], dq[last], *others, causal=shape.causal)


# -------------------------------------------------------------------------------------------------
# what is measured

LADDER = ("standard", "flash1", "flash2", *RIVALS)
BACKWARD_LADDER = ("standard", "flash2", "flash2-atomic", *RIVALS)
HOPPER_LADDER = ("hopper", "flash2", *RIVALS)
MEMORY_T = (8192, 32768, 131072)
TOKENS, WIDTH = 16384, 2048


def ladder(d, T, causal=(False, True)):
    """The shapes with B T = TOKENS and H d = WIDTH."""
    return tuple(Shape(TOKENS // t, WIDTH // e, t, e, mask) for e, mask, t in itertools.product(d, causal, T))


def long(lengths):
    """One sequence of eight heads of 128."""
    return tuple(Shape(1, 8, t, 128, False) for t in lengths)


def kernel_files(*names):
    """The files that a timed call runs: a record is old once the code of one of these has changed."""
    return tuple(f"kernels/{name}.py" for name in ("__init__", "launch", "tiles", *names))


def plan(quick=False):
    """{name: Pass}, the slowest last. quick: two lengths at d = 128 and one memory."""
    d, T = ((128,), (1024, 4096)) if quick else ((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384))
    far = tuple(t for t in T if t >= 4096)
    memory_T = MEMORY_T[:1] if quick else MEMORY_T
    step_d, step_T = ((128,), (1024,)) if quick else ((64, 128), (1024, 4096, 16384))
    order_T = (512,) if quick else (512, 1024, 2048)
    forward = Pass(
        "forward",
        sweeps=(Sweep(LADDER, ladder(d, T)), Sweep(("flash2",), ladder(d, far), layout="strided")),
        memory=(
            Sweep(("standard", "flash2", *RIVALS), long(memory_T)),
            Sweep(("flash1",), long(memory_T[:2])),  # a program a head: the longest would take minutes
        ),
        files=kernel_files("standard", "flash1", "flash2"),
    )
    changes = Pass(
        "steps",
        sweeps=(
            Sweep(("flash1", *flash2_steps.STEPS, "flash2"), ladder(step_d, step_T)),
            Sweep(tuple(WARPS), ladder(step_d, far[:1])),
        ),
        memory=(),
        files=kernel_files("flash1", "flash2", "steps/flash2"),
    )
    leaderboard = Shape(1, 16, 16384, 64, True)
    gradients = Pass(
        "backward",
        sweeps=(
            Sweep(BACKWARD_LADDER[1:], () if quick else (leaderboard,), BOTH),
            Sweep(tuple(LOOP_ORDERS), ladder((64,), order_T), BACKWARD),
            Sweep(BACKWARD_LADDER, ladder(d, T), BACKWARD),
            Sweep(BACKWARD_LADDER, ladder(d, T), BOTH),
        ),
        memory=(Sweep(BACKWARD_LADDER, long(memory_T), BOTH),),
        files=kernel_files("standard", "gradients", "flash2", "backward", "steps/backward"),
    )
    asynchrony = Pass(
        "hopper",
        sweeps=(
            Sweep(HOPPER_LADDER, ladder(d, T)),
            # hopper and flash2, between which they stand, are timed in turn with them
            Sweep(hopper_steps.STEPS, ladder(d, (1024, 4096) if quick else (1024, 4096, 16384))),
            Sweep(HOPPER_LADDER, ladder(tuple(x for x in d if x <= 128), T), BACKWARD),
            Sweep(("hopper-atomic",), ladder(d[:1], far), BACKWARD),
        ),
        memory=(),
        files=kernel_files(
            "flash2", "backward", "copies", "hopper", "hopper_backward", "steps/hopper"
        ),
        capability=(9, 0),
    )
    return {item.name: item for item in (forward, changes, gradients, asynchrony)}


# -------------------------------------------------------------------------------------------------
# how long it takes


def kinds(item):
    """[(shape, job)] of a pass's own kernels, one for each that is compiled on its own; short sequences."""
    pairs = [(shape, job) for (shape, _), jobs in item.groups().items() for job in jobs]
    found = {}
    for shape, job in pairs + item.memory_jobs():
        if job.method not in RIVALS:
            key = job.method, job.layout, job.direction == FORWARD, shape.H, shape.d, shape.causal
            found[key] = dataclasses.replace(shape, B=1, T=512), job
    return list(found.values())


def compile_kernels(shape, job, device):
    """Run the job once, for the kernels that it leaves in Triton's cache."""
    outcome(job, shape, shape.inputs(job.layout, device))


# TFLOP/s on one H200, to tell minutes from hours; of a kernel with one program a head, for each head.
SUPPOSED = {
    "standard": 25, "sdpa-flash": 300, "sdpa-cudnn": 450, "flash2-atomic": 200, "parallel": 200,
    "hopper": 500,
}  # fmt: skip
SUPPOSED_A_HEAD = {"flash1": 1.0, "swapped": 1.5, **dict.fromkeys(LOOP_ORDERS, 0.5)}
COMPILE_S, JUDGE_S, OVERHEAD_S = 8.0, 5e-11, 0.03  # a kind on one core; an entry of S; a round


def seconds(item, rounds, short_ms, long_ms, cores):
    """About how long a pass takes on an H200."""

    def ms(shape, job):
        rate = SUPPOSED_A_HEAD.get(job.method, 0) * shape.B * shape.H or SUPPOSED.get(job.method, 350)
        return shape.flops(job.direction) / rate / 1e9

    total = 20 + COMPILE_S * len(kinds(item)) / cores
    for (shape, direction), jobs in item.groups().items():
        judged = shape.B * shape.H * shape.T**2 if direction == FORWARD else 3 * 2**28
        total += len(jobs) * JUDGE_S * judged
        times = [ms(shape, job) for job in jobs]
        twice = 2 if min(times) < short_ms else 1
        for once in times:
            flushed = once + 0.06
            calls = 1 if once > long_ms else 7 + max(1, 20 / flushed) + max(1, 60 / flushed)
            total += twice * rounds * (calls * flushed / 1e3 + OVERHEAD_S)
    return total + sum(3 * ms(shape, job) / 1e3 for shape, job in item.memory_jobs())
