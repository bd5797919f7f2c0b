"""Scenarios of a rank on a Hopper GPU, which ring_worker runs for test_ring_gpus.py."""

import random
import time

import torch
import torch.distributed as dist
from ring_worker import Case, inputs

from flashlib import copies, ranks, ring, ring_passes
from flashlib.iomodel import ring as counted

copies.FEWEST = 2  # also where messages are as fast

BF16, F16 = torch.bfloat16, torch.float16
# Lengths of chunks that no block divides, and shards in which a tile sees nothing of
# some ranks.
CASES = [
    Case((4, 4), 4 * 2 * 256, 128, 128, True, BF16),
    Case((8, 2), 4 * 2 * 130, 128, 128, True, BF16),
    Case((4, 2), 4 * 2 * 257, 64, 64, True, F16),
    Case((2, 2), 4 * 2 * 33, 256, 256, True, BF16),
    Case((4, 1), 4 * 2 * 1, 128, 128, True, BF16),
    Case((4, 2), 4 * 333, 128, 128, False, BF16),
    Case((2, 2), 4 * 128, 64, 64, False, F16),
]


def shards_of(case, rank, size, device):
    """q, k, v, which require gradients, and do of this rank."""
    *leaves, do = (split(case, x, rank, size).to(device) for x in inputs(case))
    return [x.requires_grad_() for x in leaves], do


def split(case, x, rank, size):
    """Without a mask shards may have odd lengths, and judge joins in zig-zag order."""
    if x.shape[2] % (2 * size):
        chunks = x.tensor_split(2 * size, 2)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 2)
    return ring.zigzag_split(x, rank, size)


def both(case, leaves, do, **options):
    """o and the gradients, detached."""
    o = ring.ring_attention(*leaves, causal=case.causal, **options)
    return [x.detach() for x in (o, *torch.autograd.grad(o, leaves, do))]


def on_cpu(found):
    return [x.cpu() for x in found]


def published(rank, size, device):
    """Whether pulls bring what the others published, in many passes of all sizes, for
    which one of the GPUs is always late.
    """
    group = dist.group.WORLD
    x = torch.ones(1, 2, 8, 16, device=device)
    ring.ring_attention(x, x, x)
    channel, right = copies.CHOSEN[group].keys, []
    rng = random.Random(0)  # the same on all ranks
    flagged = []
    for number in range(40):
        count = rng.choice((16, 1000, 2**20, 2**22 + 16))
        if rank == rng.randrange(size):
            torch.cuda._sleep(10**8)  # clocks
        mine = torch.full((count,), 1000 * number + rank, device=device)
        passing = channel.publish([mine])
        others = [(rank + step) % size for step in range(1, size)]
        if number % 2:
            for other in others:
                (x,) = passing.pull(other)()
                right.append(x.eq(1000 * number + other).all())
        else:
            nbytes = passing.layout.nbytes
            memory = torch.zeros(len(others), 1, nbytes, device=device).byte()
            flags = torch.zeros(len(others), dtype=torch.uint32, device=device)
            passing.pull_parts(others, memory, flags)
            passing.close()
            for x, other in zip(memory[:, 0], others, strict=True):
                found = x.view(mine.dtype)[:count]
                right.append(found.eq(1000 * number + other).all())
            flagged.append(flags.view(torch.int32).eq(1).all())
        passing.close()
    return {
        "transport": ring.transport(),
        "right": bool(torch.stack(right).all()),
        "flags": bool(torch.stack(flagged).all()),
    }


def one_launch(rank, size, device):
    """Results of each case by the kernel for all shards, twice and in other parts, and
    how often it was launched.
    """
    found, right, count = [], ring_passes._in_one_launch, [0]

    def counting(*arguments):
        count[0] += 1
        return right(*arguments)

    ring_passes._in_one_launch = counting
    for case in CASES:
        leaves, do = shards_of(case, rank, size, device)
        count[0] = 0
        once = on_cpu(both(case, leaves, do))
        launches = count[0]
        again = on_cpu(both(case, leaves, do))
        nbytes, ring_passes.PART_BYTES = ring_passes.PART_BYTES, 1
        in_parts = on_cpu(both(case, leaves, do))
        ring_passes.PART_BYTES = nbytes
        found.append({
            "once": once, "again": again, "in_parts": in_parts, "launches": launches,
        })  # fmt: skip
    return found


def in_steps(rank, size, device):
    """As one_launch, with a launch for each shard."""
    ring_passes._arrive_in_one_launch = lambda *_: False
    found = []
    for case in CASES:
        leaves, do = shards_of(case, rank, size, device)
        once, again = (on_cpu(both(case, leaves, do)) for _ in range(2))
        found.append({"once": once, "again": again})
    return found


def mixed(rank, size, device):
    """Whether each of many calls, in an order that is the same on all ranks, gives the
    bits that it gives alone.
    """
    groups = [dist.group.WORLD, dist.new_group(list(range(size)))]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    kinds = []
    for case in CASES[:4]:
        leaves, do = shards_of(case, rank, size, device)
        wanted = both(case, leaves, do)
        both(case, leaves, do, group=groups[1])
        kinds.append((case, leaves, do, wanted))
    torch.cuda.synchronize()
    rng, open_calls, right = random.Random(1), [], []
    for _ in range(60):
        if open_calls and rng.random() < 0.5:
            kind, o, stream = open_calls.pop(rng.randrange(len(open_calls)))
            case, leaves, do, wanted = kind
            with torch.cuda.stream(stream):
                gradients = torch.autograd.grad(o, leaves, do)
                found = [o.detach(), *gradients]
                pairs = zip(found, wanted, strict=True)
                right.append([(x == y).all() for x, y in pairs])
        else:
            kind, stream = rng.choice(kinds), rng.choice(streams)
            case, leaves = kind[:2]
            with torch.cuda.stream(stream):
                options = {"causal": case.causal, "group": rng.choice(groups)}
                open_calls.append(
                    (kind, ring.ring_attention(*leaves, **options), stream)
                )
    torch.cuda.synchronize()
    return [all(x.item() for x in checks) for checks in right]


def graph(rank, size, device):
    """Whether replays of both passes, with other calls between them, are right."""
    case = CASES[0]
    leaves, do = shards_of(case, rank, size, device)
    static = [x.detach().clone().requires_grad_() for x in leaves]
    both(case, static, do)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        found = both(case, static, do)
    right = []
    for number in range(6):
        fresh = [x.detach().mul(1 + number).requires_grad_() for x in leaves]
        wanted = both(case, fresh, do)
        with torch.no_grad():
            for x, y in zip(static, fresh, strict=True):
                x.copy_(y)
        captured.replay()
        right.append(all(map(torch.equal, found, wanted)))
        if number == 2:  # larger shards need other memory
            longer = [torch.cat([x.detach()] * 64, 2).requires_grad_() for x in fresh]
            both(case, longer, torch.cat([do] * 64, 2))
    return right


def absent(rank, size, device):
    """What a rank gets, and after how many seconds, that waits for rank 1 in a kernel;
    the hosts do not talk to each other.
    """
    case = CASES[0]
    (q, k, v), _ = shards_of(case, rank, size, device)
    with torch.no_grad():
        ring.ring_attention(q, k, v, causal=True)
        torch.cuda.synchronize()
        ranks.compare = lambda *_: (True, lambda: None)
        start = time.monotonic()
        if rank == 1:
            return None
        try:
            ring.ring_attention(q, k, v, causal=True)
            torch.cuda.synchronize()
        except RuntimeError as error:
            return type(error).__name__, time.monotonic() - start
    return None


def memory(rank, size, device):
    """{pass: (bytes that a rank holds, bytes that the chapter counts)}."""
    H, T, d, found = 16, 16384 * size, 128, {}
    leaves = [
        torch.randn(1, H, T // size, d, device=device, dtype=BF16) for _ in range(4)
    ]
    *leaves, do = leaves
    leaves = [x.requires_grad_() for x in leaves]

    def forward():
        with torch.no_grad():
            return ring.ring_attention(*leaves, causal=True)

    def train():
        o = ring.ring_attention(*leaves, causal=True)
        return torch.autograd.grad(o, leaves, do)

    sizes, rows = (T, d, H, H, size), H * T // size * d
    # A launch has no sums. The sums of more than two ranks have 32 bits, and so has the
    # kernel's own sum of dQ.
    wide = 2 * rows + (3 * rows if size > 2 else 0)
    for name, call, words in (
        ("forward", forward, counted.launch_peak(*sizes) + rows),  # dO is there, too
        ("both", train, counted.copies_backward_peak(*sizes) + wide),
    ):
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        channels = copies.CHOSEN[dist.group.WORLD]
        used = (channels.keys,) if name == "forward" else channels[:2]
        slots = sum(2 * channel.capacity for channel in used)
        found[name] = torch.cuda.max_memory_allocated() + slots, 2 * words
    return found
