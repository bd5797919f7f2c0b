"""Masks and changed scores next to FlexAttention: the record scores.

A variant says which keys a query sees and what happens to the scores. ``auto`` is
``flashlib.attention`` with its keywords, ``lists`` with the mask as a function and
:class:`flashlib.block_lists.BlockLists` made before, ``lists-built`` with lists made in
the call. ``flex`` is PyTorch's FlexAttention, compiled, with a BlockMask made before,
``flex-built`` with one made in the call. With a softcap and with sinks, whose gradient
it is not asked for, FA-4 is there too, where its package can be imported
(:mod:`benchmarks.fa4`). Rates count the work of visible pairs.

Our results are judged against the float64 reference on a shorter sequence with the same
tiles; on the timed one, results of all methods are compared with each other.
"""

import contextlib
import functools
import math
import multiprocessing
import os
import statistics
import time
from typing import NamedTuple

import torch

import flashlib
from benchmarks import fa4, passes, runs, timing
from flashlib import masks, testing
from flashlib.block_lists import BlockLists
from flashlib.reference import masks as reference

BATCH, LENGTH, WIDTH = 2, 8192, 2048
JUDGED = 2048  # the shortest sequence with the tiles of LENGTH
REACHES = {"window": 1024, "prefix": 1024, "sinks-window": 128}
DOCUMENTS, CAP = 8, 30.0
DIRECTIONS = passes.FORWARD, passes.BACKWARD
FLEX = passes.FLEX
RIVALS = *FLEX, *fa4.METHODS
# {variant: methods that are ours}: those whose mask can be a function have lists.
VARIANTS = {
    "causal": ("auto", "lists", "lists-built"),
    "window": ("auto", "lists", "lists-built"),
    "prefix": ("lists", "lists-built"),
    "documents": ("lists", "lists-built"),
    "softcap": ("auto",),
    "alibi": ("auto",),
    "bias": ("auto",),
    "sinks": ("auto",),
    "sinks-window": ("auto",),
}
OF_FA4 = "softcap", "sinks", "sinks-window"
TOGETHER = 8  # problems that are compiled at a time
SHARE = 0.7  # of the time that is left, for compiling them
CLOSE = 0.02  # how far results of two methods are apart, relative to their size
RULE = (
    "forward: 4 d operations for each visible pair of a query and a key; backward: 2.5 "
    "times that"
)
TIMING = (
    f"median of triton.testing.do_bench, {timing.ROUNDS} interleaved rounds, each in "
    "an order drawn anew; backward: torch.autograd.grad of a kept forward pass; built: "
    "the lists, or the BlockMask, are made in each forward call, and ours for the "
    "backward pass in each backward call"
)


class Problem(NamedTuple):
    """A variant on q, k, v ``[B, H, T, d]``."""

    variant: str
    d: int
    B: int = BATCH
    H: int = 0  # WIDTH / d
    T: int = LENGTH

    @property
    def heads(self):
        return self.H or WIDTH // self.d

    @property
    def pairs(self):
        """Visible pairs of a head."""
        T = self.T
        n = min(REACHES.get(self.variant, T), T)
        causal, window = T * (T + 1) // 2, n * T - n * (n - 1) // 2
        size = T // DOCUMENTS
        return {
            "window": window,
            "sinks-window": window,
            "prefix": causal + n * (n - 1) // 2,
            "documents": DOCUMENTS * (size * (size + 1) // 2),
        }.get(self.variant, causal)

    def flops(self, direction):
        work = 4 * self.B * self.heads * self.d * self.pairs
        return passes.WORK[direction] * work

    def identity(self, method, direction):
        """The fields of a record's cell that name it."""
        return {
            "method": method, "direction": direction, "variant": self.variant,
            "B": self.B, "H": self.heads, "T": self.T, "d": self.d,
            "dtype": str(timing.DTYPE).removeprefix("torch."),
        }  # fmt: skip

    def tensors(self):
        """{name: tensor}: q, k, v, do, and what the variant reads."""
        device = timing.DEVICE
        generator = torch.Generator(device).manual_seed(self.T + self.d)
        options = {"generator": generator, "device": device, "dtype": timing.DTYPE}
        shape = self.B, self.heads, self.T, self.d
        made = {name: torch.randn(shape, **options) for name in ("q", "k", "v", "do")}
        h = torch.arange(1, self.heads + 1, device=device)
        if self.variant == "documents":
            rows = torch.arange(self.T, dtype=torch.int32, device=device)
            made["ids"] = rows // (self.T // DOCUMENTS)
        elif self.variant == "alibi":
            made["slopes"] = torch.exp2(-8.0 * h / self.heads)
        elif self.variant == "bias":
            made["bias"] = torch.randn(1, self.heads, self.T, self.T, **options)
        elif self.variant.startswith("sinks"):
            made["sinks"] = torch.randn(self.heads, **options).float()
        for name in ("q", "k", "v", "bias", "sinks"):
            if name in made:
                made[name].requires_grad_()
        return made


# -- ours


def mask_of(variant, x):
    """The mask of a variant as a function."""
    if variant.endswith("window"):
        return masks.window(REACHES[variant] - 1, 0)
    if variant == "prefix":
        return masks.causal() | masks.prefix(REACHES[variant])
    if variant == "documents":
        return masks.documents(x["ids"]) & masks.causal()
    return masks.causal()


def keywords(variant, x):
    """The keywords of flashlib.attention for a variant."""
    if variant == "window":
        return {"window": (REACHES[variant] - 1, 0)}
    if variant == "sinks-window":
        return {"window": (REACHES[variant] - 1, 0), "sinks": x["sinks"]}
    changes = {
        "softcap": lambda: {"softcap": CAP},
        "alibi": lambda: {"alibi_slopes": x["slopes"]},
        "bias": lambda: {"bias": x["bias"]},
        "sinks": lambda: {"sinks": x["sinks"]},
    }
    return {"causal": True} | changes.get(variant, dict)()


def ours(problem, method, x):
    """A function without arguments that returns o."""
    q, k, v = x["q"], x["k"], x["v"]
    if method == "auto":
        options = keywords(problem.variant, x)
        return functools.partial(flashlib.attention, q, k, v, **options)
    mask = mask_of(problem.variant, x)
    if method == "lists":
        mask = BlockLists(mask, q, k, v)
    return functools.partial(flashlib.attention, q, k, v, mask=mask)


# -- FlexAttention


def mask_mod(variant, x):
    """As mask_of, for FlexAttention."""
    ids, reach = x.get("ids"), REACHES.get(variant)

    def causal(b, h, i, j):
        return i >= j

    def window(b, h, i, j):
        return (i >= j) & (i - j < reach)

    def prefix(b, h, i, j):
        return (i >= j) | (j < reach)

    def documents(b, h, i, j):
        return (i >= j) & (ids[i] == ids[j])

    named = {"window": window, "prefix": prefix, "documents": documents}
    named["sinks-window"] = window
    return named.get(variant, causal)


def score_mod(variant, x):
    """What a variant does to a score, for FlexAttention; None for nothing."""
    slopes, bias = x.get("slopes"), x.get("bias")

    def softcap(s, b, h, i, j):
        return CAP * torch.tanh(s / CAP)

    def alibi(s, b, h, i, j):
        return s - slopes[h] * (i - j)

    def biased(s, b, h, i, j):
        return s + bias[0, h, i, j]

    return {"softcap": softcap, "alibi": alibi, "bias": biased}.get(variant)


def compiled_flex(problem, x):
    """(function of q, k, v and a BlockMask, function that makes the BlockMask)."""
    from torch.nn.attention import flex_attention as library

    seen, change = mask_mod(problem.variant, x), score_mod(problem.variant, x)
    T = problem.T
    sinks = x.get("sinks")

    def attend(q, k, v, block_mask):
        options = {"score_mod": change, "block_mask": block_mask}
        if sinks is None:
            return library.flex_attention(q, k, v, **options)
        o, lse = library.flex_attention(q, k, v, **options, return_lse=True)
        return o * torch.sigmoid(lse - sinks[None, :, None])[..., None].to(o.dtype)

    def build():
        return make(seen, None, None, T, T, device=timing.DEVICE)

    make = torch.compile(library.create_block_mask, dynamic=False)
    return torch.compile(attend, dynamic=False), build


def flex(problem, method, x):
    """As ours, by torch.nn.attention.flex_attention."""
    if "flex" not in x:
        x["flex"] = compiled_flex(problem, x)
    attend, build = x["flex"]
    q, k, v = x["q"], x["k"], x["v"]
    if method == "flex-built":
        return lambda: attend(q, k, v, build())
    block_mask = build()
    return lambda: attend(q, k, v, block_mask)


def rival(problem, method, x):
    """As ours, by FA-4."""
    arguments = method, x["q"], x["k"], x["v"], True
    changes = {"softcap": CAP} if problem.variant == "softcap" else {}
    if "sinks" in x:
        changes["learnable_sink"] = x["sinks"].detach().to(timing.DTYPE)
    if problem.variant == "sinks-window":
        changes["window_size"] = REACHES[problem.variant] - 1, 0
    return functools.partial(fa4.attend, *arguments, **changes)


# -- results and times


def calls_of(problem, method, x):
    """{direction: function without arguments}, and {direction: its results}."""
    call = flex if method in FLEX else rival if method in RIVALS else ours
    forward = call(problem, method, x)
    names = [name for name in ("q", "k", "v", "bias", "sinks") if name in x]
    if method in RIVALS and method not in FLEX:
        names = ["q", "k", "v"]
    leaves = [x[name] for name in names]
    o = forward()

    def backward():
        return torch.autograd.grad(o, leaves, x["do"], retain_graph=True)

    found = dict(zip((f"d{name}" for name in names), backward(), strict=True))
    calls = dict(zip(DIRECTIONS, (forward, backward), strict=True))
    if "dbias" in found:
        found["dbias"] = last_head(found["dbias"])
    return calls, {"o": o.detach(), **found}


def judge(problem, method):
    """Raise AssertionError unless our results on a short sequence, two heads of one
    batch, are within the budgets of flashlib.testing, which has none for the gradients
    of a bias and of sinks: those are close to the reference's.
    """
    small = problem._replace(B=1, H=2, T=JUDGED)
    x = small.tensors()
    _, found = calls_of(small, method, x)
    leaves = {name: y.detach() for name, y in x.items()}
    q, k, v, do = (leaves[name] for name in ("q", "k", "v", "do"))
    if problem.variant in ("prefix", "documents"):
        options = {"mask": mask_of(problem.variant, leaves)}
    else:
        options = keywords(problem.variant, leaves)
    _, lse = flashlib.attention(q, k, v, **options, return_lse=True)
    testing.assert_within_budget(q, k, v, found["o"], lse, **options)
    gradients = [found[name] for name in ("dq", "dk", "dv")]
    testing.assert_gradients_within_budget(q, k, v, do, *gradients, **options)
    added = {name: found[name] for name in ("dbias", "dsinks") if name in found}
    if added:
        exact = reference.all_gradients(*(y.double() for y in (q, k, v, do)), **options)
        wanted = {"dsinks": exact.dsinks}
        if "dbias" in added:
            wanted["dbias"] = last_head(exact.dbias)
        compare(added, wanted, "exact")


def last_head(dbias):
    """The part of this large gradient that is compared."""
    return dbias[:, -1:].clone()


def compare(found, wanted, whose="ours"):
    """Raise AssertionError where results differ by more than rounding explains."""
    for name, x in found.items():
        y = wanted[name].float()
        apart = (x.float() - y).square().mean().sqrt() / y.square().mean().sqrt()
        assert apart < CLOSE, f"{name}: {apart:.3f} from {whose}"


def prepare(problem, methods):
    """({(method, direction): call}, {method: why it is not timed, or None}): all is
    compiled and judged.
    """
    x, calls, failed, first = problem.tensors(), {}, {}, None
    for method in methods:
        if method not in (*RIVALS, "lists-built"):  # its kernels are those of lists
            _, failed[method] = timing.attempt(judge, problem, method)
        if failed.get(method) is None:
            made, failed[method] = timing.attempt(calls_of, problem, method, x)
        if failed[method] is not None:
            continue
        ways, found = made
        if first is None:
            first = found
        else:
            _, failed[method] = timing.attempt(compare, found, first)
        if failed[method] is None:
            calls |= {(method, way): call for way, call in ways.items()}
    return calls, failed


def measure(problem, methods, calls, failed):
    """The cells of a problem."""
    times = {}
    for key, call in timing.rounds(calls):
        times.setdefault(key, []).append(timing.digits(timing.time_ms(call)))
    cells = []
    for method in methods:
        for way in DIRECTIONS:
            cell = problem.identity(method, way)
            cells.append(cell)
            if failed[method] is not None:
                cell["error"] = failed[method]
                continue
            call, ms = calls[method, way], statistics.median(times[method, way])
            cell |= {"round_ms": times[method, way], "ms": ms}
            cell["clock_mhz"] = timing.clock_mhz(lambda call=call: call, ms)
            cell["tflops"] = timing.digits(problem.flops(way) / ms / 1e9)
    return cells


def work_apart(problem, methods, pipe):
    """Prepare a problem in a process of its own, and measure it when told to."""
    calls, failed = prepare(problem, methods)
    timing.release()
    pipe.send("prepared")
    pipe.recv()
    pipe.send(measure(problem, methods, calls, failed))


def compile_flex(problem):
    """Leave in the compilers' caches what FlexAttention needs, while another process
    compiles ours.
    """
    timing.attempt(calls_of, problem, FLEX[0], problem.tensors())


@contextlib.contextmanager
def prepared(work, until):
    """A function that returns the cells for each of these problems, or None for one
    that is not prepared at the time ``until`` or failed. A process compiles for each of
    them, all at a time, since compiling takes longest; nothing runs while one measures.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    context = multiprocessing.get_context("spawn")  # a fork shares the CUDA context
    started, helpers = [], []
    for problem, methods in work:
        helper = context.Process(target=compile_flex, args=(problem,), daemon=True)
        helper.start()
        helpers.append(helper)
        own, other = context.Pipe()
        arguments = problem, methods, other
        process = context.Process(target=work_apart, args=arguments, daemon=True)
        process.start()
        other.close()
        started.append((process, own))

    def cells(pipe):
        pipe.send("measure")
        return pipe.recv()

    def action(process, pipe):
        try:
            left = None if math.isinf(until) else max(0.0, until - time.monotonic())
            if pipe.poll(left) and pipe.recv():
                return functools.partial(cells, pipe)
        except EOFError:  # it has died, after it said why
            pass
        process.kill()
        process.join()
        return None

    try:
        actions = [action(*both) for both in started]
        for helper in helpers:
            helper.kill()
            helper.join()
        yield actions
    finally:
        for process, _ in started:
            process.kill()


def plan(quick=False):
    """[(Problem, methods)]."""
    rivals = {} if fa4.missing() else dict.fromkeys(OF_FA4, fa4.METHODS)
    return [
        (Problem(variant, d), (*methods, *FLEX, *rivals.get(variant, ())))
        for d in ((128,) if quick else (128, 64))
        for variant, methods in VARIANTS.items()
    ]


def task(problem, methods, action=None):
    """The cells of a problem; action is what ``prepared`` has for it."""
    names = [problem.identity(m, way) for m in methods for way in DIRECTIONS]
    return runs.Task("cells", names, action)


def run(quick, say, path=None, end=math.inf):
    """(record as a dict, lines that say what of ours has failed and what is left): see
    benchmarks/runs.py.
    """
    grid = {"tokens": BATCH * LENGTH, "width": WIDTH, "rounds": timing.ROUNDS}
    fresh = {"pass": "scores", **timing.environment(), "flop_rule": RULE}
    fresh |= {"timing": TIMING, "grid": grid}
    one, work = runs.Run(fresh, say, path, end), plan(quick)
    left = [x for x in work if one.left([task(*x)])]
    for place in range(0, len(left), TOGETHER):
        now = time.monotonic()
        if now > end:
            break
        some = left[place : place + TOGETHER]
        say(f"scores: {len(left) - place} problems are left; compiling {len(some)}")
        with prepared(some, now + SHARE * (end - now)) as actions:
            for x, action in zip(some, actions, strict=True):
                if action is None:
                    one.failures.append(f"{x[0]} was not prepared")
                else:
                    one.measure([task(*x, action)])
    return one.result([task(*x) for x in work])
