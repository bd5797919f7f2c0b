"""What is measured of attention: the shapes, the methods and how each is called, and
how a result is judged.

The passes forward, steps, backward, hopper, masks, fa3 and fa4 have a record each.
Unless a sweep says otherwise, a shape has B T = 16384 and H d = 2048. The methods of
the ladders are called through ``flashlib.attention`` or PyTorch's
``scaled_dot_product_attention``, and the kernels that only a chapter uses through their
launchers.
"""

import contextlib
import functools
import itertools
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashlib
from benchmarks import fa3, fa4, timing
from flashlib import score_mods
from flashlib.kernels import flash2, hopper, inputs, tables
from flashlib.kernels.steps import flash2 as flash2_steps
from flashlib.kernels.steps import hopper as hopper_steps
from flashlib.testing import assert_gradients_within_budget, assert_within_budget

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
# Operations in units of the forward pass; the backward pass counts as five products,
# the forward pass as two.
WORK = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}
FLOP_RULE = (
    "forward: 4 B H T_q T_k d operations, or half that with a causal mask; "
    "backward: 2.5 times that"
)
# A causal window of w keys leaves w T - w^2 / 2 scores of a head; with w = T that is
# the causal rule.
WINDOW_RULE = FLOP_RULE.replace(
    "causal mask;",
    "causal mask, with w (2 T - w) in place of T_q T_k for a window of w;",
)

# {method: arguments of flashlib.attention}
OURS = {
    "auto": {},
    "standard": {"method": "standard"},
    "flash1": {"method": "flash1"},
    "flash2": {"method": "flash2"},
    "flash2-atomic": {"method": "flash2", "deterministic": False},
    "hopper": {"method": "hopper"},
    "hopper-atomic": {"method": "hopper", "deterministic": False},
    **{changed: {"method": "flash2"} for changed in ("window", "softcap", "alibi")},
}
CHANGES = {"window": {"window": (1023, 0)}, "softcap": {"softcap": 50.0}}
RIVALS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}
FLEX = "flex", "flex-built"
TORCH = {"torch-all-gather": "allgather", "torch-ring": "alltoall"}  # context_parallel
# Kernels that are not ours.
OTHERS = (*RIVALS, *FLEX, *TORCH, *fa3.METHODS, *fa4.METHODS)


class Shape(NamedTuple):
    """q is [B, H, T, d], k and v are [B, H / group, T, d]."""

    B: int
    H: int
    T: int
    d: int
    causal: bool
    group: int = 1  # heads of queries that share a head of keys
    window: int = 0  # keys that a query of a causal mask sees, or 0: all up to its own

    def flops(self, direction):
        full = WORK[direction] * 4 * self.B * self.H * self.T**2 * self.d
        if self.window:
            full *= self.window * (2 * self.T - self.window) / self.T**2
        return full / 2 if self.causal else full

    def inputs(self, layout):
        """Normal q, k, v, do [B, heads, T, d]; "strided" is stored [B, T, heads, d], as
        a linear layer leaves it.
        """
        device = timing.DEVICE
        generator = torch.Generator(device).manual_seed(self.T + self.d)
        options = {"generator": generator, "device": device, "dtype": timing.DTYPE}
        few, tensors = self.H // self.group, []
        for heads in (self.H, few, few, self.H):
            if layout == "strided":
                x = torch.randn(self.B, self.T, heads, self.d, **options)
                tensors.append(x.transpose(1, 2))
            else:
                tensors.append(torch.randn(self.B, heads, self.T, self.d, **options))
        return tensors


class Job(NamedTuple):
    """What is called on a shape."""

    method: str
    direction: str
    layout: str

    def identity(self, shape):
        """The fields of a record's cell that name it."""
        B, H, T, d, causal, group, window = shape
        found = {
            "method": self.method, "direction": self.direction, "B": B, "H": H,
            "H_kv": H // group, "T_q": T, "T_k": T, "d": d, "causal": causal,
            "layout": self.layout, "dtype": str(timing.DTYPE).removeprefix("torch."),
        }  # fmt: skip
        compared = group > 1 or window  # of the pass fa3
        return found | {"window": window} if compared else found


class Sweep(NamedTuple):
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


class Pass(NamedTuple):
    """One record: sweeps to time, and sweeps to measure the memory of."""

    sweeps: tuple
    memory: tuple = ()

    def groups(self):
        """{(shape, direction): jobs}: what is compared, and therefore timed in turn."""
        found = {}
        for sweep in self.sweeps:
            for shape, job in sweep.jobs():
                found.setdefault((shape, job.direction), []).append(job)
        return found

    def memory_jobs(self):
        return [pair for sweep in self.memory for pair in sweep.jobs()]


# -- calls


def changes(method, H):
    """The arguments with which a method changes the mask or the scores of H heads."""
    if method == "alibi":
        h = torch.arange(1, H + 1, device=timing.DEVICE)
        return {"alibi_slopes": torch.exp2(-8 * h / H)}
    return CHANGES.get(method, {})


def attend(method, q, k, v, causal, window=0):
    """One forward call: o [B, H, T, d]. `pinned` chooses the kernel of a rival."""
    if method in fa3.METHODS:
        return fa3.attend(method, q, k, v, causal, window)
    if method in fa4.METHODS:
        return fa4.attend(method, q, k, v, causal)
    if method in OURS:
        options = OURS[method] | changes(method, q.shape[1])
        if window:
            options["window"] = (window - 1, 0)
        return flashlib.attention(q, k, v, causal=causal, **options)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def seen(method, shape):
    """`changes`, and the window of the shape."""
    window = {"window": (shape.window - 1, 0)} if shape.window else {}
    return changes(method, shape.H) | window


def pinned(method):
    """A context in which PyTorch uses only the backend of this rival."""
    if method in RIVALS:
        return sdpa_kernel([RIVALS[method]])
    return contextlib.nullcontext()


def with_warps(num_warps, q, k, v, causal, scale):
    """(o, lse) of flash2 with the tile of its table and another number of warps."""
    dtype = q.dtype
    q, k, v = inputs.widened(q, k, v)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    row = tables.configuration("flash2", flash2.CONFIGURATIONS, (q, k, v), causal)
    flash2.launch_forward(
        q, k, v, o, lse, causal, scale, row._replace(num_warps=num_warps)
    )
    return o.to(dtype), lse


def persistent(q, k, v, causal, scale):
    """(o, lse) of hopper's kernel with the maximum of every block."""
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    tile = hopper.choose_tile(q.shape[3], q.shape[2], causal)
    how = score_mods.unchanged(causal, scale), None, tile
    hopper.launch_forward(q, k, v, o, lse, *how)
    return o, lse


def loop_order(order, *arguments):
    """(dq, dk, dv) of the backward pass in the loop order of one of the slides'
    algorithms.
    """
    from flashlib.kernels.steps import backward  # only one sweep needs it

    return getattr(backward, order.replace("-", "_"))(*arguments)


# Launchers of kernels that only a chapter uses: (q, k, v, causal, scale) -> (o, lse),
# and (q, k, v, o, lse, do, dlse, causal, scale) -> (dq, dk, dv).
WARPS = {f"flash2-{n}-warps": functools.partial(with_warps, n) for n in (4, 8)}
STEPS = {
    step: functools.partial(module.forward, step=step)
    for module in (flash2_steps, hopper_steps)
    for step in module.STEPS
}
LAUNCHED = {**STEPS, **WARPS, "persistent": persistent}
LOOP_ORDERS = {
    order: functools.partial(loop_order, order)
    for order in ("algorithm-5", "algorithm-6")
}


def make_call(job, shape, inputs):
    """The call to time, without arguments: it returns o, or (o, lse) by a launcher, or
    for a backward pass (dq, dk, dv).

    inputs are q, k, v and do. For the backward pass alone, the forward pass runs here
    and is kept.
    """
    q, k, v, do = inputs
    scale = shape.d**-0.5
    if job.method in LOOP_ORDERS:
        o, lse = flash2.forward(q, k, v, shape.causal, scale)
        arguments = (q, k, v, o, lse, do, torch.zeros_like(lse), shape.causal, scale)
        return functools.partial(LOOP_ORDERS[job.method], *arguments)
    if job.method in LAUNCHED:
        return functools.partial(LAUNCHED[job.method], q, k, v, shape.causal, scale)
    if job.direction == FORWARD:
        return functools.partial(
            attend, job.method, q, k, v, shape.causal, shape.window
        )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    call = functools.partial(attend, job.method, *leaves, shape.causal, shape.window)
    if job.direction == BOTH:
        return lambda: torch.autograd.grad(call(), leaves, do)
    o = call()
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


# -- correctness


def outcome(job, shape, inputs):
    """What the job computes, as a tuple: (o,) or (o, lse), or (dq, dk, dv)."""
    if job.direction == FORWARD and job.method in OURS:
        options = {"causal": shape.causal, "return_lse": True, **OURS[job.method]}
        options |= seen(job.method, shape)
        return flashlib.attention(*inputs[:3], **options)
    results = make_call(job, shape, inputs)()
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def judge(job, shape):
    """Raise AssertionError unless the job's results on the shape are within the budget
    of flashlib.testing.

    Our forward results are judged on every row, with the log-sum-exp, some heads at a
    time so that the T x T matrices of the reference fit. A rival's results, and
    gradients, are judged on the last heads. Beyond T = 16384 only the last 128 queries
    of each head are judged, and of the gradients only dQ: the bottom-right causal mask
    is the same for these queries, while dK and dV need every query. The limit is lower
    where heads share keys, because they are judged together.
    """
    inputs = shape.inputs(job.layout)
    results = outcome(job, shape, inputs)
    q, k, v, do, *results = (
        x.reshape(1, -1, shape.T, *x.shape[3:]) for x in (*inputs, *results)
    )
    rows = shape.T if shape.T**2 * shape.group <= 2**28 else 128
    heads, some = k.shape[1], max(1, 2**28 // (rows * shape.T * shape.group))
    every = job.direction == FORWARD and job.method not in OTHERS
    for start in range(0, heads, some) if every else [max(0, heads - some)]:
        part = slice(start, start + some)
        queries = slice(part.start * shape.group, part.stop * shape.group)
        last = (slice(None), queries, slice(shape.T - rows, None))
        tensors = (q[last], k[:, part], v[:, part])
        options = {"causal": shape.causal, **seen(job.method, shape)}
        if job.method == "alibi":
            options["alibi_slopes"] = options["alibi_slopes"].repeat(shape.B)[queries]
        if job.direction == FORWARD:
            found = [x[last] for x in results]
            assert_within_budget(*tensors, *found, **options)
        else:
            dq, dk, dv = results
            found = [dq[last], dk[:, part], dv[:, part]]
            if rows < shape.T:
                found[1:] = None, None
            assert_gradients_within_budget(*tensors, do[last], *found, **options)


# -- what is measured

LADDER = ("standard", "flash1", "flash2", *RIVALS)
BACKWARD_LADDER = ("standard", "flash2", "flash2-atomic", *RIVALS)
HOPPER_LADDER = ("hopper", "flash2", *RIVALS)
ATOMIC = ("hopper", "hopper-atomic")
CHANGED = ("window", "softcap", "alibi")
LEADERBOARD = Shape(1, 16, 16384, 64, True)  # a shape that others publish times of
TOKENS, WIDTH = 16384, 2048


def ladder(d, T, causal=(False, True)):
    """The shapes with B T = TOKENS and H d = WIDTH."""
    return tuple(
        Shape(TOKENS // t, WIDTH // e, t, e, mask)
        for e, mask, t in itertools.product(d, causal, T)
    )


def long(lengths):
    """One sequence of eight heads of 128."""
    return tuple(Shape(1, 8, t, 128, False) for t in lengths)


def windows_and_groups(d, T, windows, groups):
    """The causal shapes of the pass fa3."""
    for shape in ladder(d, T, (True,)):
        yield from (shape._replace(window=w) for w in windows if w < shape.T)
        yield from (shape._replace(group=n) for n in groups)


def plan(quick=False, rival=None):
    """{name: Pass}. quick: two lengths at d = 128 and one memory. rival: whether FA-3
    is there to be compared with.
    """
    rival = fa3.missing() is None if rival is None else rival
    d, T, far = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), 4096
    memory_T, step_T, order_T = (8192, 32768, 131072), (1024, 4096, 16384), T[:3]
    narrow, leaderboard = d[:2], (LEADERBOARD,)
    if quick:
        d, T, narrow, leaderboard = (128,), (1024, 4096), (128,), ()
        memory_T, step_T, order_T = memory_T[:1], T, (512,)
    far_T = [t for t in T if t >= far]
    # flash1 runs one program a head, so the longest sequence would take minutes.
    memory = (
        Sweep(("standard", "flash2", *RIVALS), long(memory_T)),
        Sweep(("flash1",), long(memory_T[:2])),
    )
    forward = (
        Sweep(LADDER, ladder(d, T)),
        Sweep(("flash2",), ladder(d, far_T), FORWARD, "strided"),
    )
    steps = ("flash1", *flash2_steps.STEPS, "flash2")
    changes = (
        Sweep(steps, ladder(narrow, step_T)),
        Sweep(tuple(WARPS), ladder(narrow, (far,))),
    )
    backward = (
        Sweep(BACKWARD_LADDER[1:], leaderboard, BOTH),
        Sweep(tuple(LOOP_ORDERS), ladder((64,), order_T), BACKWARD),
        Sweep(BACKWARD_LADDER, ladder(d, T), BACKWARD),
        Sweep(BACKWARD_LADDER, ladder(d, T), BOTH),
    )
    asynchrony = (
        Sweep(HOPPER_LADDER, ladder(d, T)),
        # In turn with flash2 and hopper.
        Sweep((*hopper_steps.STEPS, "persistent"), ladder(d, step_T)),
        Sweep((*HOPPER_LADDER, "hopper-atomic"), ladder(narrow, T), BACKWARD),
    )
    if rival:
        wide = tuple(e for e in d if e not in narrow)
        asynchrony += (
            Sweep(("fa3",), ladder(d, T)),
            Sweep(fa3.METHODS, ladder(narrow, T), BACKWARD),
            # FA-3 has no deterministic backward pass for d = 256.
            Sweep((*HOPPER_LADDER, fa3.METHODS[1]), ladder(wide, T), BACKWARD),
        )
    compared = windows_and_groups(narrow, (T[-1], far), (256, 1024, 4096), (4, 8))
    contest = [
        Sweep((*ours, *theirs), (shape,), way)
        for shape in dict.fromkeys(compared)
        for ours in [("auto",) if shape.window else ("flash2", "hopper")]
        for way, theirs in ((FORWARD, ("fa3",)), (BACKWARD, fa3.METHODS))
    ]
    latest = (
        Sweep(("hopper", "fa4"), ladder(narrow, far_T)),
        Sweep((*ATOMIC, *fa4.METHODS), ladder(narrow, far_T), BACKWARD),
    )
    longest = [shape for shape in ladder(narrow, T[-1:]) if shape.causal]
    changed = [Sweep(("flash2", *CHANGED), longest, way) for way in (FORWARD, BACKWARD)]
    return {
        "forward": Pass(forward, memory),
        "steps": Pass(changes),
        "backward": Pass(backward, (Sweep(BACKWARD_LADDER, long(memory_T), BOTH),)),
        "hopper": Pass(asynchrony),
        "masks": Pass(changed),
        "fa3": Pass(tuple(contest)),
        "fa4": Pass(latest),
    }
