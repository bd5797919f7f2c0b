"""Hash what every public kernel computes on a GPU, to compare two versions bit by bit.

Usage: ``PYTHONPATH=TREE python tests/gpu_bits.py OUT.json`` for each tree, then
``python tests/gpu_bits.py OLD.json NEW.json``, which lists the cases that differ. Most
of the time goes into compiling, so the cases are spread over processes.
"""

import hashlib
import importlib
import itertools
import json
import multiprocessing
import sys
from pathlib import Path

import torch

import flashlib
from flashlib import testing
from flashlib.kernels import flash2

WINDOWED = {"window": (40, 0)}, {"softcap": 20.0}, {"alibi": True}, {"window": (5, 90)}


def digest(*tensors):
    """Return one hash of the bits of all tensors."""
    state = hashlib.sha256()
    for x in tensors:
        state.update(x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return state.hexdigest()[:16]


def inputs(T_q, T_k, d, dtype, layout):
    """Return q, k, v and dO in one layout, on the GPU."""
    options = {"dtype": dtype, "device": "cuda", "layout": layout}
    q, k, v = testing.make_qkv(2, 4, T_q, d, T_k=T_k, H_kv=2, **options)
    do, _, _ = testing.make_qkv(2, 4, T_q, d, seed=1, **options)
    return *(x.detach().requires_grad_() for x in (q, k, v)), do


def attention_hash(method, T_q, T_k, d, causal, dtype, layout):
    """Return the hash of O, L and the gradients of ``flashlib.attention``."""
    q, k, v, do = inputs(T_q, T_k, d, dtype, layout)
    o, lse = flashlib.attention(q, k, v, causal=causal, method=method, return_lse=True)
    grads = torch.autograd.grad((o, lse), (q, k, v), (do, do[..., 0].float()))
    return digest(o, lse, *grads)


def masked_hash(changes, d, dtype, packed):
    """Return the hash of a window, softcap or slopes, forward and backward."""
    q, k, v, do = inputs(203, 203, d, dtype, "contiguous")
    options = {key: x for key, x in changes.items() if key != "alibi"}
    if "alibi" in changes:
        options["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.1, 0.05]).cuda()
    if not packed:
        o = flashlib.attention(q, k, v, **options)
        return digest(o, *torch.autograd.grad(o, (q, k, v), do))
    rows = [x[0].transpose(0, 1).detach().requires_grad_() for x in (q, k, v)]
    starts = torch.tensor([0, 70, 70, 203], dtype=torch.int32, device="cuda")
    o = flashlib.attention_varlen(
        *rows, starts, starts, 133, 133, causal=True, **options
    )
    return digest(o, *torch.autograd.grad(o, rows, do[0].transpose(0, 1)))


def decoding_hash(d, dtype, page, T_q, window, splits):
    """Return the hash of decoding from a contiguous (page 0) or paged cache."""
    q, _, _, _ = inputs(T_q, 1024, d, dtype, "contiguous")
    _, k, v, _ = inputs(T_q, 1024, d, dtype, "contiguous")
    q, k, v = (x.detach() for x in (q, k, v))
    table = None
    if page:
        k, v = (
            x.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1).contiguous()
            for x in (k, v)
        )
        table = torch.arange(len(k), dtype=torch.int32, device="cuda").view(2, -1)
    seq_lens = torch.tensor([1000, 513], dtype=torch.int32, device="cuda")
    options = {"seq_lens": seq_lens, "block_table": table, "splits": splits}
    return digest(*flashlib.decode(q, k, v, **options, window=window, return_lse=True))


def step_hash(module, step, d, causal):
    """Return the hash of a kernel that changes one thing."""
    steps = importlib.import_module(f"flashlib.kernels.steps.{module}")
    q, k, v, do = inputs(300, 203, d, torch.float16, "contiguous")
    q, k, v = (x.detach() for x in (q, k, v))
    if module != "backward":
        return digest(*steps.forward(q, k, v, causal, 0.1, step))
    o, lse = flash2.forward(q, k, v, causal, 0.1)
    return digest(steps.algorithm_6(q, k, v, o, lse, do, lse * 0, causal, 0.1)[0])


FORWARD_STEPS = ("swapped", "parallel", "deferred", "skipping")
HOPPER_STEPS = ("copies", "specialized", "overlapped", "turns")
HALVES = (torch.float16, torch.bfloat16)
SIZES = ((130, 130), (257, 385), (300, 70), (1, 200))


def every_case():
    """Yield the function and the arguments of every case."""
    for method, (T_q, T_k), d, causal, dtype, layout in itertools.product(
        ("standard", "flash1", "flash2", "auto"),
        SIZES,
        (40, 64, 128, 256),
        (False, True),
        (torch.float32, *HALVES),
        ("contiguous", "transposed", "unaligned"),
    ):
        if layout != "contiguous" and ((T_q, T_k) != SIZES[0] or d == 40):
            continue
        yield attention_hash, (method, T_q, T_k, d, causal, dtype, layout)
    widths, dtypes = (64, 128, 256), (torch.float32, torch.bfloat16)
    for case in itertools.product(WINDOWED, widths, dtypes, (False, True)):
        yield masked_hash, case
    windows, splits = (None, (100, 0)), ("auto", 1, 5)
    for case in itertools.product(
        widths, HALVES, (0, 16, 128), (1, 3), windows, splits
    ):
        yield decoding_hash, case
    kernels = [("flash2", step) for step in FORWARD_STEPS]
    kernels += [("hopper", step) for step in HOPPER_STEPS] + [("backward", "")]
    for (module, step), d, causal in itertools.product(kernels, widths, (False, True)):
        yield step_hash, (module, step, d, causal)


def hashes(number, count):
    """Return ``{name: hash}`` of every count-th case from a number on."""
    mine = itertools.islice(every_case(), number, None, count)
    return {f"{f.__name__} {arguments}": f(*arguments) for f, arguments in mine}


def main(*paths):
    if len(paths) == 2:
        old, new = (json.loads(Path(path).read_text()) for path in paths)
        differ = [name for name in old if old[name] != new.get(name)]
        print(f"{len(old)} cases, {len(differ)} differ", *differ[:50], sep="\n")
        return len(differ) > 0
    workers = 8
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        parts = pool.starmap(hashes, [(number, workers) for number in range(workers)])
    found = {name: bits for part in parts for name, bits in part.items()}
    Path(paths[0]).write_text(json.dumps(found, indent=0, sort_keys=True))
    print(f"{len(found)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
