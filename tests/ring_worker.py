"""One rank of a group, for test_ring.py.

The rank writes what it found, {scenario: result}, to FOLDER/RANK.pt. Ranks meet in
FOLDER/meet.
"""

import contextlib
import copy
import datetime
import functools
import itertools
import os
import pickle
from typing import NamedTuple

import interpreter  # noqa: F401 (it makes Triton's faster)
import ring_copies
import torch
import torch.distributed as dist

import flashlib
from flashlib import copies, masks, ring, ring_passes
from flashlib.reference import ring as reference

TIMEOUT = datetime.timedelta(seconds=20)
FOLDER = None  # where the ranks' files are


class Case(NamedTuple):
    heads: tuple  # H and H_kv
    T: int  # two chunks for each of up to three ranks
    d: int
    d_v: int
    causal: bool
    dtype: torch.dtype


CASES = [
    Case((4, 2), 48, 16, 16, True, torch.float16),
    Case((2, 2), 36, 16, 24, False, torch.float32),
    Case((2, 1), 12, 40, 16, True, torch.float32),
]


def inputs(case):
    """q, k, v and do of the whole sequence, the same on each rank."""
    (H, H_kv), T, d, d_v, _, dtype = case
    torch.manual_seed(T)
    shapes = (1, H, T, d), (1, H_kv, T, d), (1, H_kv, T, d_v), (1, H, T, d_v)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@contextlib.contextmanager
def sent():
    """The bytes that this rank sends to its neighbor, or pulls from others, in here, in
    a list of one.
    """
    send, read, count = dist.batch_isend_irecv, copies.Engine.bytes_of, [0]

    def counting(operations):
        sends = (x for x in operations if x.op is dist.isend)
        count[0] += sum(x.tensor.nbytes for x in sends)
        return send(operations)

    def reading(engine, rank, first, nbytes):
        count[0] += nbytes if rank != engine.rank else 0
        return read(engine, rank, first, nbytes)

    dist.batch_isend_irecv, copies.Engine.bytes_of = counting, reading
    yield count
    dist.batch_isend_irecv, copies.Engine.bytes_of = send, read


def evaluate(shards, attend, **options):
    """o, dq, dk and dv of this rank, and the bytes that each pass sent."""
    *leaves, do = shards
    leaves = [x.detach().requires_grad_() for x in leaves]
    with sent() as forward:
        o = attend(*leaves, **options)
    with sent() as backward:
        gradients = torch.autograd.grad(o, leaves, do)
    found = [x.detach().cpu() for x in (o, *gradients)]
    return found, forward + backward


def right(rank, size, device):
    """This rank's results of each case, and of the last one twice."""
    found = []
    for case in CASES:
        shards = [ring.zigzag_split(x, rank, size).to(device) for x in inputs(case)]
        options = {"causal": case.causal}
        once, sent_bytes = evaluate(shards, ring.ring_attention, **options)
        by = ring.transport()
        found.append({"once": once, "sent_bytes": sent_bytes, "transport": by})
    again, _ = evaluate(shards, ring.ring_attention, **options)
    found[-1]["again"] = again
    return found


def pulled(rank, size, device):
    """As right, with copies instead of messages: bytes are those that each pass pulls.
    Before that, two forward passes and a call of another group.
    """
    engines = ring_copies.install(dist.group.WORLD, device, FOLDER, "world")
    other = dist.new_group(list(range(size)))
    ring_copies.install(other, device, FOLDER, "other")

    def count():
        return sum(engine.pulled_bytes for engine in engines)

    found = []
    for case in CASES:
        options = {"causal": case.causal}
        *leaves, do = (ring.zigzag_split(x, rank, size) for x in inputs(case))
        leaves = [x.requires_grad_() for x in leaves]
        before = [count()]
        o = ring.ring_attention(*leaves, **options)
        before.append(count())
        again = ring.ring_attention(*leaves, **options)
        in_other = ring.ring_attention(*leaves, **options, group=other)
        between = count()
        gradients = torch.autograd.grad(o, leaves, do)
        sent_bytes = [before[1] - before[0], count() - between]
        twice = torch.autograd.grad(again, leaves, do)
        elsewhere = torch.autograd.grad(in_other, leaves, do)
        found.append({
            "once": [x.detach() for x in (o, *gradients)],
            "again": [x.detach() for x in (again, *twice)],
            "other": [x.detach() for x in (in_other, *elsewhere)],
            "sent_bytes": sent_bytes,
        })  # fmt: skip
    ring_copies.uninstall(dist.group.WORLD)
    return found


LAUNCHED = [
    Case((4, 2), 48, 64, 64, True, torch.float16),
    Case((2, 2), 36, 64, 64, False, torch.float16),
]


def launched(rank, size, device):
    """This rank's results where one kernel takes all shards as they arrive, in one part
    and in two.
    """
    found = []
    ring_copies.install(dist.group.WORLD, device, FOLDER, "launched", hopper=True)
    for case, nbytes in itertools.product(LAUNCHED, (2**24, 1)):
        shards = [ring.zigzag_split(x, rank, size) for x in inputs(case)]
        ring_passes.PART_BYTES = nbytes
        with ring_copies.kernel_in_pytorch():
            found.append(evaluate(shards, ring.ring_attention, causal=case.causal)[0])
    ring_copies.uninstall(dist.group.WORLD)
    return found


def others(rank, size, device):
    """This rank's results of each case with enough heads, divided in two other ways."""
    found = []
    for case in CASES:
        if case.heads[1] % size:
            continue
        whole, options = inputs(case), {"causal": case.causal}
        zigzag = [ring.zigzag_split(x, rank, size).to(device) for x in whole]
        gathered, _ = evaluate(zigzag, reference.all_gather_attention, **options)
        rows = [x.chunk(size, 2)[rank].to(device) for x in whole]
        ulysses, again = (
            evaluate(rows, ring.ulysses_attention, **options)[0] for _ in range(2)
        )
        auto, _ = evaluate(zigzag, ring.ring_attention, **options, method="auto")
        by_heads, _ = evaluate(zigzag, ring.ring_attention, **options, method="ulysses")
        found.append({
            "gathered": gathered, "ulysses": ulysses, "again": again,
            "by_heads": by_heads, "auto": auto,
        })  # fmt: skip
    return found


def head_window(b, h, p, j, width):
    return p - j <= width * (h + 1)


def mask_cases(device="cpu"):
    """Options of attention on a whole sequence of 24 tokens, with 4 heads."""
    ids = torch.arange(24, device=device).square() // 90
    return [
        {"mask": masks.window(5, 0)},
        {"mask": masks.documents(ids), "causal": True},
        {"mask": masks.Mask(head_window, 2) & masks.causal()},
        {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
        {"mask": masks.window(3, 1), "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
        {"sinks": torch.tensor([2.0, -1.0, 3.0, 0.0]), "causal": True},
    ]


MASKED = Case((4, 2), 24, 16, 16, False, torch.float32)


by_heads = functools.partial(ring.ring_attention, method="ulysses")


def masked_pulled(rank, size, device):
    """As masked, with copies instead of messages; backward, queries travel."""
    ring_copies.install(dist.group.WORLD, device, FOLDER, "masked")
    right, ring_passes.queries_travel = ring_passes.queries_travel, lambda *_: True
    found = masked(rank, size, device)
    ring_passes.queries_travel = right
    ring_copies.uninstall(dist.group.WORLD)
    return found


def masked(rank, size, device):
    """This rank's results with each mask and sinks, in a ring and by heads."""
    found = []
    for options in mask_cases(device):
        shards = {
            ring.ring_attention: lambda x: ring.zigzag_split(x, rank, size),
            ring.ulysses_attention: lambda x: x.chunk(size, 2)[rank],
            by_heads: lambda x: ring.zigzag_split(x, rank, size),
        }
        for attend, shard in shards.items():
            *leaves, do = (shard(x).to(device) for x in inputs(MASKED))
            leaves = [x.detach().requires_grad_() for x in leaves]
            given = dict(options)
            if "sinks" in given:
                given["sinks"] = given["sinks"].to(device).requires_grad_()
                leaves.append(given["sinks"])
            o = attend(*leaves[:3], **given)
            gradients = torch.autograd.grad(o, leaves, do)
            found.append([x.detach().cpu() for x in (o, *gradients)])
    return found


def made_layer(device):
    """A layer whose sequence is divided, with the same weights on each rank."""
    torch.manual_seed(0)
    made = flashlib.FlashSelfAttention(
        64, 4, num_kv_heads=2, causal=True, group=dist.group.WORLD, device=device
    )
    with torch.no_grad():
        for w in made.parameters():
            w.copy_(torch.randn(w.shape) / 8)
    return made


def layer(rank, size, device):
    """This rank's output and gradients of a layer."""
    made = made_layer(device)
    x, dy = torch.randn(2, 2, 24, 64)
    x, dy = (ring.zigzag_split(z, rank, size, dim=1).to(device) for z in (x, dy))
    x.requires_grad_()
    y = made(x)
    dx, *dw = torch.autograd.grad(y, [x, *made.parameters()], dy)
    return {"y": y.detach().cpu(), "dx": dx.cpu(), "dw": [x.cpu() for x in dw]}


def said(call):
    """The error that a call raises, (type, message)."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)


def copied(rank, size, device):
    """What a layer, compiled or copied, computes, and what its pickle says."""
    made = made_layer(device)
    x = torch.randn(1, 4, 64).to(device)

    def both_passes(layer):
        y = layer(x)
        return [
            x.detach().cpu()
            for x in (y, *torch.autograd.grad(y.sum(), [*layer.parameters()]))
        ]

    compiled = torch.compile(made, backend="eager")
    twin = copy.deepcopy(made)
    return {
        "layer": both_passes(made),
        "compiled": both_passes(compiled),
        "copy": both_passes(twin),
        "apart": twin.group is made.group and twin.w_q is not made.w_q,
        "pickle": said(lambda: pickle.dumps(made)),
    }


def second(rank, size, device):
    """What a second derivative raises, for each function."""
    x = torch.randn(1, 2, 4, 16, device=device, requires_grad=True)

    def twice(attend):
        o = attend(x, x, x)
        (dx,) = torch.autograd.grad(o.square().sum(), x, create_graph=True)
        dx.sum().backward()

    return [
        said(lambda f=f: twice(f))
        for f in (ring.ring_attention, ring.ulysses_attention)
    ]


def ahead(rank, size, device):
    """Rank 0 does not wait for rank 1, which calls after rank 0 has begun."""
    x, token = torch.ones(1, 2, 4, 16, device=device), torch.zeros(1)
    token = token.to(device if dist.get_backend() == "nccl" else "cpu")
    found = []
    for name in ("ring_attention", "ulysses_attention"):
        division = ring._DIVISIONS[name]
        getattr(ring, name)(x, x, x)

        def attend(*arguments, division=division):
            dist.send(token, 1)
            return division.attend(*arguments)

        if rank == 0:
            ring._DIVISIONS[name] = division._replace(attend=attend)
        if rank == 1:
            dist.recv(token, 0)
            token.item()
        found.append(said(lambda name=name: getattr(ring, name)(x, x, x)))
        ring._DIVISIONS[name] = division
    return found


def mended(rank, size, device):
    """Errors of rank 1 in calls that the others have begun, each with what a right call
    computes after it.
    """
    torch.manual_seed(rank)
    q, k, v = torch.randn(3, 1, 6, 8, 16, device=device)
    odd = rank == 1
    longer = torch.cat([q, q], 2) if odd else q
    wrong = "1" if odd else None
    found = []
    for attend, other in itertools.permutations(
        (ring.ring_attention, ring.ulysses_attention)
    ):
        usual = attend(q, k, v).cpu()
        for call in (
            lambda attend=attend: attend(longer, k, v),
            lambda attend=attend: attend(q, k, v, scale=wrong),
            lambda attend=attend, other=other: (other if odd else attend)(q, k, v),
            lambda attend=attend: attend(q, k, v, scale=1.0 + rank),
        ):
            error = said(call)
            found.append((error, torch.equal(attend(q, k, v).cpu(), usual)))
    return found


class Failing(torch.Tensor):
    """A tensor of a device that has no memory left."""

    def contiguous(self):
        raise MemoryError("no memory left")


def wrong(rank, size, device):
    """What each wrong call raises here: {name: (type, message)}."""

    def x(T=8, d=16, **options):
        return torch.ones(1, 2, T, d, device=device, **options)

    odd = rank == 1  # the rank that differs
    others = dist.new_group([0])
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = dist.device_mesh.DeviceMesh(kind, [0])
    gone = dist.new_group([0, 1])
    dist.destroy_process_group(gone)
    dtype = torch.float16 if odd else torch.float32
    sinks = torch.zeros(2, device=device)
    attend, ulysses = ring.ring_attention, ring.ulysses_attention
    calls = {
        "another T_q": lambda: attend(x(12 if odd else 8), x(), x()),
        "d_v too small": lambda: attend(x(), x(), x(d=4 if odd else 16)),
        "another scale": lambda: attend(x(), x(), x(), scale=0.5 if odd else 0.25),
        "another causal": lambda: attend(x(), x(), x(), causal=odd),
        "odd T, causal": lambda: attend(x(7), x(7), x(7), causal=True),
        "T_q not T_k, causal": lambda: attend(x(8), x(6), x(6), causal=True),
        "group and mesh": lambda: attend(x(), x(), x(), group=dist.group.WORLD, mesh=1),
        "another dtype": lambda: attend(*(x(dtype=dtype) for _ in range(3))),
        "no tensor": lambda: attend(x(), None if odd else x(), x()),
        "q needs a gradient": lambda: attend(x(requires_grad=odd), x(), x()),
        "v needs a gradient": lambda: ulysses(x(), x(), x(requires_grad=odd)),
        "heads of Ulysses": lambda: ulysses(x(), x()[:, :1], x()[:, :1]),
        "no memory": lambda: attend(*(Failing(x()) if odd else x() for _ in range(3))),
        "group of others": lambda: odd and attend(x(), x(), x(), group=others),
        "mesh of others": lambda: odd and ulysses(x(), x(), x(), mesh=mesh),
        "destroyed group": lambda: attend(x(), x(), x(), group=gone),
        "another mask": lambda: attend(x(), x(), x(), mask=masks.window(1 + odd, 0)),
        "sinks of one": lambda: attend(x(), x(), x(), sinks=sinks if odd else None),
        "mask that is a tensor": lambda: attend(x(), x(), x(), mask=x(8, 8)),
        "T_q not T_k, mask": lambda: attend(x(), x(6), x(6), mask=masks.window(1, 0)),
        "too few sinks": lambda: ulysses(x(), x(), x(), sinks=sinks[:1]),
        "unknown method": lambda: attend(x(), x(), x(), method="star"),
        "another method": lambda: attend(
            x(), x(), x(), method=("ring", "ulysses")[odd]
        ),
        "heads by method": lambda: attend(
            x(), x()[:, :1], x()[:, :1], method="ulysses"
        ),
    }
    return {name: said(call) for name, call in calls.items()}


def lost(rank, device, attend, module, where):
    """What a rank gets where rank 1 is killed in the middle of a later call."""
    x = torch.ones(1, 6, 8, 16, device=device, requires_grad=True)

    def call():
        attend(x, x, x).sum().backward()

    call()
    if rank == 1:
        setattr(module, where, lambda *_, **options: os.kill(os.getpid(), 9))

    def calls():
        call()
        call()  # on GPUs, copies do not block the host

    return said(calls)


def dies(rank, size, device):
    return lost(rank, device, ring.ring_attention, ring_passes, "forward")


def dies_backward(rank, size, device):
    return lost(rank, device, ring.ring_attention, ring_passes, "backward")


def dies_ulysses(rank, size, device):
    return lost(rank, device, ring.ulysses_attention, dist, "all_to_all_single")


def main(folder, size, rank, names):
    """Run the scenarios of these names as one rank, and end the process."""
    global FOLDER
    FOLDER = folder
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    meet = f"file://{folder / 'meet'}"
    backend = "nccl" if gpus >= size else "gloo"
    dist.init_process_group(
        backend, init_method=meet, rank=rank, world_size=size, timeout=TIMEOUT
    )
    import ring_gpus  # which imports this module

    scenarios = vars(ring_gpus) | globals()
    found = {name: scenarios[name](rank, size, device) for name in names}
    torch.save(found, folder / f"{rank}.pt")
    os._exit(0)  # a group that has lost a rank cannot be destroyed
