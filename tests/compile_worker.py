"""Compile kernels for a GPU that is not there: ``TRITON_INTERPRET=0 python
compile_worker.py < jobs.json`` prints a JSON line for each kernel of each job.

The library's own launchers run on CPU tensors, with a driver that only knows its
target, and every launch becomes a compilation, with the arguments of a real call.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flashlib import masks as mask_functions
from flashlib import score_functions, score_mods, testing
from flashlib.kernels import (
    backward,
    decoding,
    flash1,
    flash2,
    fp8,
    gluon_order,
    gradients,
    hopper,
    hopper_absorbed,
    hopper_backward,
    hopper_expanded,
    hopper_fp8,
    hopper_ring,
    hopper_tiles,
    hopper_wide,
    latent,
    masks,
    masks_backward,
    score_gradients,
    standard,
)
from flashlib.kernels.steps import backward as steps_backward
from flashlib.kernels.steps import flash2 as steps_flash2
from flashlib.kernels.steps import fp8 as steps_fp8
from flashlib.kernels.steps import hopper as steps_hopper
from flashlib.kernels.steps import latent as steps_latent
from flashlib.kernels.steps import small_hopper
from flashlib.kernels.tables import Configuration
from flashlib.score_functions import Score, at

# How the warps of a program share the tile that a product on the tensor cores makes:
# (rows, columns).
LAYOUT = r"nvidia_mma<.*?warpsPerCTA = \[(\d+), (\d+)\]"
# The code between the wait for the scores and the wait for P V.
ONE_LEFT = r"(?s)DEPBAR\.LE gsb0, 0x1.*?DEPBAR\.LE gsb0, 0x0"
# The code between the wait for the scores and the next product: a tile's softmax.
SOFTMAX = r"(?s)DEPBAR\.LE gsb0, 0x1(.*?)WARPGROUP\.ARRIVE"
HOPPER = (
    "hopper", "steps.hopper", "hopper_backward", "hopper_expanded", "hopper_ring",
    "hopper_wide", "gluon_order",
)  # fmt: skip
ARITHMETIC = ("MUFU.EX2", "FFMA", "FMNMX", "FADD", "F2FP", "FMUL")
# A product of Hopper: columns, first register of the sums, first one of the factor that
# is in registers (four are read), and what the factor V in shared memory has alone.
PRODUCT = r"HGMMA\.64x(\d+)x16\S* R(\d+), (?:R(\d+), )?gdesc\[UR\d+\](\.tnspB)?"


# What a launcher that spreads its programs over all multiprocessors asks of an H200.
H200 = SimpleNamespace(multi_processor_count=132, L2_cache_size=60 * 2**20)


class Driver:
    """What compiling asks of a driver; Triton keeps compiled kernels by device."""

    architecture = None

    def get_current_target(self):
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self):
        return self.architecture

    def get_current_stream(self, device):
        return 0


class Compiling:
    """Stands where a jit kernel stood and compiles instead of launching."""

    def __init__(self, kernel, found):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            compiled = self.kernel.warmup(*arguments, grid=grid, **options)
            self.found.append((self.kernel.__name__, compiled))

        return launch


def tool(*arguments):
    """Run the cuobjdump that Triton's wheel brings along."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.check_output([program, *arguments], text=True)


def registers(sass):
    """How many registers of a thread are sums of products, and weights in P V."""
    sums, weights = set(), set()
    for columns, first, factor, by_v in re.findall(PRODUCT, sass):
        sums.update(range(int(first), int(first) + int(columns) // 2))
        if factor and by_v:
            weights.update(range(int(factor), int(factor) + 4))
    return len(sums), len(weights)


def stack_in_loops(sass):
    """How often each innermost loop that multiplies reads or writes the stack."""
    code = re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?);", sass)
    code = [(int(place, 16), text) for place, text in code]
    jumps = [(place, re.search(r"\bBRA\b.* 0x([0-9a-f]+)", x)) for place, x in code]
    back = [(int(to[1], 16), place) for place, to in jumps if to]
    loops = {}
    for first, last in sorted(back, key=lambda x: x[1] - x[0]):
        body = " ".join(text for place, text in code if first <= place <= last)
        outer = any(first <= begin and end <= last for begin, end in loops)
        if "HGMMA" in body and not outer:
            loops[first, last] = len(re.findall(r"\b(?:STL|LDL)", body))
    return list(loops.values())


def facts(compiled):
    """Registers, stack (spills), shared memory and instructions of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage, sass = tool("--dump-resource-usage", cubin), tool("-sass", cubin)
    numbers = {
        name.lower(): int(value)
        for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)
    }
    instructions = re.findall(r"\b(HGMMA|QGMMA|HMMA|UTCHMMA|UTCQMMA)\b", sass)
    loads = re.findall(r"\b(UTMALDG|LDGSTS)\b", sass)
    barriers = re.findall(r"\bSYNCS\.EXCH\.64 URZ, \[UR\d+(?:\+(0x[0-9a-f]+))?\]", sass)
    return numbers | {
        "shared": compiled.metadata.shared,
        "tensor_cores": sorted(set(instructions)),
        "products": len(instructions),
        "waits": len(re.findall(r"\bWARPGROUP\.DEPBAR\b", sass)),
        # How many maxima are computed there.
        "maxima": [
            len(re.findall(r"\bFMNMX\b", part)) for part in re.findall(ONE_LEFT, sass)
        ],
        "softmax": [
            {x: len(re.findall(rf"\b{x}\b", part)) for x in ARITHMETIC}
            for part in re.findall(SOFTMAX, sass)
        ],
        "registers": registers(sass),
        "stack_in_loops": stack_in_loops(sass),
        "copies": sorted(set(loads)),
        "permutes": len(re.findall(r"\bPRMT\b", sass)),
        "byte_loads": len(re.findall(r"\bLDS\.[US]8\b", sass)),
        # Where they begin, in shared memory.
        "barriers": sorted(int(place or "0", 16) for place in barriers),
        "handed": len(re.findall(r"\bUSETMAXREG\b", sass)),
        "warps": sorted(set(re.findall(LAYOUT, compiled.asm["ttgir"]))),
    }


def run(job):
    """Call the launchers of a job's step on its shape."""
    if job["step"] in ("latent", "steps.latent", "hopper_absorbed"):
        run_latent(job)
        return
    q, k, v = testing.make_qkv(**job["sizes"], dtype=getattr(torch, job["dtype"]))
    scale, causal = 1.0 / math.sqrt(q.shape[3]), job["causal"]
    o, rows = q.new_empty(*q.shape[:3], v.shape[3]), torch.empty(q.shape[:3])
    step, row = job["step"], None
    if job["row"] and "hopper" not in step:
        row = Configuration(*job["row"])
    if step == "flash1":
        flash1.launch_forward(q, k, v, o.float(), rows, rows, causal, scale, row)
    elif step == "flash2":
        flash2.launch_forward(q, k, v, o, rows, causal, scale, row)
    elif step == "steps.flash2":
        l = rows if job["kernel"] in ("swapped", "parallel") else None
        steps_flash2.launch_forward(
            q, k, v, o, rows, l, causal, scale, job["kernel"], row
        )
    elif step in ("backward", "steps.backward"):
        run_backward(job, q, k, v, row, causal, scale)
    elif step == "steps.small_hopper":
        small_hopper.launch(*(x[0, 0] for x in (q, k, v, o, rows)), scale)
    elif step in HOPPER:
        run_hopper(job, q, k, v, causal, scale)
    elif step == "masks":
        run_masks(job, q, k, v, row, scale)
    elif step == "fp8":
        sign = torch.ones(q.shape[3]) if job["transform"] else None
        fp8.quantize(q, k, v, sign, job["smooth"])
    elif step == "steps.fp8":
        rows, scales = eight_bits(k[0, 0].shape, 0), torch.empty(k.shape[2])
        steps_fp8.launch(q[0, :, 0].contiguous(), rows, scales, rows, scales, scale)
    elif step == "hopper_fp8":
        run_hopper_fp8(job, q, k, causal, scale)
    elif step == "decoding":
        run_decoding(job, q, k, v, row, scale)
    else:
        o, _, p = standard.forward(q, k, v, causal, scale)
        if step == "gradients":
            gradients.backward(q, k, v, p, o, torch.empty_like(o), rows, scale)


def run_backward(job, q, k, v, row, causal, scale):
    """Call the launcher of one kernel of the backward pass."""
    kind = {"dtype": q.dtype, "layout": job["sizes"]["layout"]}
    do, _, _ = testing.make_qkv(*q.shape[:3], v.shape[3], **kind)
    lse, dlse = torch.empty(q.shape[:3]), torch.empty(q.shape[:3])
    o, dq, dk, dv = (torch.empty_like(x) for x in (do, q, k, v))
    rows = math.ceil(q.shape[2] / backward.LARGEST_BLOCK_Q) * backward.LARGEST_BLOCK_Q
    delta, lse2 = (torch.empty(*q.shape[:2], rows) for _ in range(2))
    read = (q, k, v, do, delta, lse2)
    if job["kernel"] == "algorithm_5":
        steps_backward.algorithm_5(q, k, v, o, lse, do, dlse, causal, scale)
    elif job["kernel"] == "algorithm_6":
        sums = (dq, dk.float(), dv.float())
        arguments = (q, k, v, o, lse, do, dlse, *sums)
        steps_backward.launch_blocks(*arguments, causal, scale, row)
    elif job["kernel"] == "delta":
        backward.launch_delta(o, lse, do, dlse, delta, lse2)
    elif job["kernel"] == "queries":
        backward.launch_queries(*read, dq, causal, scale, row)
    else:
        added = dq.float() if job["kernel"] == "fused" else None
        backward.launch_keys(*read, added, dk, dv, causal, scale, row)


def mask_of(name, T_k):
    """A mask with this name as a launcher gets it, or None."""
    if not name:
        return None
    ids = torch.zeros(1, T_k, dtype=torch.int32)
    mask = {
        "prefix": mask_functions.prefix(100),
        "documents": mask_functions.documents(ids) & mask_functions.causal(),
    }[name]
    return score_mods.mask_of(mask)


def relative(s, b, h, p, j, table, n):
    return s + at(table, h, p - j + n)


def of_relative(s, b, h, p, j, table, n):
    return 1.0


def cubed(s, b, h, p, j, weight):
    return s + weight * s * s * s


def of_cubed(s, b, h, p, j, weight):
    return 1.0 + 3.0 * weight * s * s


def function_of(name, H):
    """A score with this name as a launcher gets it, or None."""
    if not name:
        return None
    alibi = score_functions.alibi(torch.empty(H))
    score = {
        "softcap and ALiBi": score_functions.softcap(30.0).then(alibi),
        "cubed": Score(cubed, 0.05, derivative=of_cubed),
        "relative": Score(relative, torch.empty(H, 64), 32, derivative=of_relative),
    }[name]
    return score_mods.function_of(score)


def bias_of(name, q, k):
    """A bias with this name as a launcher gets it, or None."""
    if not name:
        return None
    (B, H, T_q, _), T_k = q.shape, k.shape[2]
    return {
        "each pair": torch.empty(1, H, T_q, T_k, dtype=q.dtype),
        "float32": torch.empty(B, H, T_q, T_k),
        "each key": torch.empty(B, 1, 1, T_k, dtype=q.dtype),
    }[name]


def run_hopper(job, q, k, v, causal, scale):
    """Call the launcher of one kernel for compute capability 9.0."""
    o, lse = q.new_empty(*q.shape[:3], v.shape[3]), torch.empty(q.shape[:3])
    mask = mask_of(job["mask"], k.shape[2])
    score_mod = score_mods.unchanged(causal, scale, job["left"])._replace(
        softcap=job["softcap"],
        slopes=torch.empty(q.shape[1]) if job["alibi"] else None,
        bias=bias_of(job["bias"], q, k),
        sinks=None if mask is None else torch.empty(q.shape[1]),
        mask=mask,
        function=function_of(job["score"], q.shape[1]),
    )
    if job["step"] == "hopper":
        packing, tile = None, hopper_tiles.ForwardTile(*job["row"])
        if job["packed"]:
            q, k, v, o = (x[0].transpose(0, 1) for x in (q, k, v, o))
            starts = (torch.tensor([0, 1, len(x)], dtype=torch.int32) for x in (q, k))
            packing, lse = score_mods.Packing(*starts, len(q) - 1, len(k) - 1), lse[0]
        how = score_mod, packing, tile, job["keep"]
        hopper.launch_forward(q, k, v, o, lse, *how)
        return
    if job["step"] == "hopper_ring":
        run_ring(q, k, o, causal, scale, hopper_tiles.ForwardTile(*job["row"]))
        return
    if job["step"] == "steps.hopper":
        steps_hopper.launch_forward(q, k, v, o, lse, causal, scale, job["kernel"])
        return
    rows = math.ceil(q.shape[2] / hopper_backward.PAD) * hopper_backward.PAD
    delta, lse2 = (torch.empty(*q.shape[:2], rows) for _ in range(2))
    read, results = (q, k, v, o, delta, lse2), (k.clone(), v.clone(), score_mod)
    dq_sums, counters = torch.empty(lse2.numel(), q.shape[3]), lse2.int()
    sums = dq_sums, counters, job["deterministic"]
    if job["kernel"] == "expanded_keys":
        hopper_expanded.launch_keys(*read, *results, *sums)
    elif job["kernel"] == "expanded_finish":
        hopper_expanded.launch_finish(dq_sums, q.clone(), score_mod, rows, k.shape[2])
    elif job["kernel"] == "finish":
        sizes = rows, k.shape[2], hopper_backward.FUSED[q.shape[3]][0]
        gluon_order.launch_finish(dq_sums, q.clone(), score_mod, *sizes, counters)
    elif job["kernel"] == "queries":
        hopper_wide.launch_queries(*read, q.clone(), score_mod, job["row"])
    elif job["kernel"] == "keys":
        hopper_wide.launch_keys(*read, *results, job["row"])
    else:
        hopper_backward.launch_keys(*read, *results, job["row"], *sums)


def run_ring(q, k, o, causal, scale, tile):
    """Call the launcher of the kernel for all shards, as the second of four ranks."""
    chunks, parts, others = 2 if causal else 1, 2, 3

    def by_chunks(x):
        B, H, T, d = x.shape
        return x.new_empty(B * H, chunks, T, d)

    q, k, o = by_chunks(q), by_chunks(k), by_chunks(o)
    shards = k.new_empty(2 * others * len(k), *k.shape[1:])
    flags, lse = torch.zeros(others * parts, dtype=torch.uint32), torch.empty(3)
    arrival = hopper_ring.Arrival(1, 1 + others, parts, 10**10)
    hopper_ring.launch(q, k, k, shards, flags, o, lse, scale, arrival, tile)


def run_hopper_fp8(job, q, k, causal, scale):
    """Call the launcher of attention in eight bits."""
    (B, H, T_q, d), (_, H_kv, T_k, _) = q.shape, k.shape
    blocks = math.ceil(T_k / fp8.KEYS)
    v = torch.empty(B, H_kv, d, blocks * fp8.KEYS)
    q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    of_keys = torch.empty(B, H_kv, blocks), torch.empty(B, H_kv, blocks)
    shift = torch.empty(B, H, T_q) if job["smooth"] else None
    hopper_fp8.forward(
        q8, torch.empty(B, H, T_q), k8, of_keys[0], v8, of_keys[1], shift, causal,
        scale, q.dtype,
    )  # fmt: skip


def run_masks(job, q, k, v, row, scale):
    """Call one launcher with a mask; a packed job has two sequences."""
    left, right, softcap, alibi, packed, functions = job["changes"]
    H, T_q, T_k = q.shape[1], q.shape[2], k.shape[2]
    slopes = torch.empty(H) if alibi else None
    score_mod = score_mods.ScoreMod(scale, left, right, softcap, slopes)
    if functions == "mask":
        ids = torch.zeros(2, T_k, dtype=torch.int32)
        mask = mask_functions.documents(ids) & mask_functions.causal()
        mask = score_mods.mask_of(mask)
        bias = None if packed else torch.empty(1, H, T_q, T_k, dtype=q.dtype)
        score_mod = score_mod._replace(bias=bias, sinks=torch.empty(H), mask=mask)
    if functions == "bias":
        bias = torch.empty(1, H, T_q, T_k, dtype=q.dtype)
        score_mod = score_mod._replace(bias=bias)
    if functions == "score":
        function = function_of("softcap and ALiBi", H)
        score_mod = score_mod._replace(function=function)
    if functions == "dropout":
        seed = torch.zeros(1, dtype=torch.int64)
        score_mod = score_mod._replace(seed=seed, dropout=0.1)
    packing, do = None, torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype)
    lse = torch.empty(q.shape[:3])
    if packed:
        q, k, v, do = (x[0].transpose(0, 1) for x in (q, k, v, do))
        starts = (torch.tensor([0, 1, T], dtype=torch.int32) for T in (T_q, T_k))
        packing, lse = score_mods.Packing(*starts, T_q - 1, T_k - 1), lse[0]
    o, dq, dk, dv = (torch.empty(x.shape, dtype=q.dtype) for x in (do, q, k, v))
    delta, lse2 = (torch.empty(1, H, 2 * masks_backward.PAD) for _ in range(2))
    if job["kernel"] == "delta":
        masks_backward.launch_delta(o, lse, do, lse, delta, lse2, T_q, packing)
        return
    if job["kernel"] == "sinks":
        dsinks = torch.empty(H)
        score_gradients.launch_sinks(
            delta, lse2, dsinks, 1, T_q, score_mod, packing, masks_backward.PAD
        )
    elif job["kernel"] == "bias":
        dbias = torch.empty_like(score_mod.bias)
        score_gradients.launch_bias(
            q, k, v, do, delta, lse2, dbias, score_mod, row, masks_backward.PAD
        )
    elif job["kernel"] == "forward":
        masks.launch_forward(q, k, v, o, lse, score_mod, packing, row)
    elif job["kernel"] == "queries":
        masks_backward.launch_queries(
            q, k, v, do, delta, lse2, dq, score_mod, packing, row
        )
    else:
        masks_backward.launch_keys(
            q, k, v, do, delta, lse2, dk, dv, score_mod, packing, row
        )


def eight_bits(shape, past):
    """A tensor in E4M3 that begins this many elements after an aligned address."""
    memory = torch.empty(past + math.prod(shape), dtype=torch.float8_e4m3fn)
    return memory[past:].view(shape)


def run_decoding(job, q, k, v, row, scale):
    """Call both launchers: k and v are caches, or pages of a table of 16 columns."""
    B, splits = q.shape[0], job["splits"]
    seq_lens = torch.empty(B, dtype=torch.int32)
    table = torch.empty(B, 16, dtype=torch.int32) if job["paged"] else None
    dtype = q.dtype if splits == 1 else torch.float32
    o = torch.empty(*q.shape[:3], splits, v.shape[3], dtype=dtype)
    lse = torch.empty(*q.shape[:3], splits)
    changes = decoding.UNCHANGED
    if job["changed"]:
        ids, sinks = torch.empty(4096, dtype=torch.int32), torch.empty(q.shape[1])
        mask = mask_functions.documents(ids) & mask_functions.causal()
        score = score_functions.alibi(torch.empty(q.shape[1]))
        changes = decoding.Changes(
            score_mods.mask_of(mask),
            score_mods.function_of(score),
            sinks,
        )
    scales = None, None
    if job["eight_bits"]:
        scales = torch.empty(k.shape[:3]), torch.empty(v.shape[:3])
        past = int(job["sizes"]["layout"] == "unaligned")
        k, v = (eight_bits(x.shape, past) for x in (k, v))
    how = job["left"], scale, row, changes, scales
    decoding.launch_splits(q, k, v, table, seq_lens, o, lse, *how)
    if splits > 1:
        whole = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype)
        decoding.launch_merge(o, lse, whole, lse[..., 0], changes.sinks)


def run_latent(job):
    """Call the launchers of absorbed decoding; the rows of the cache have d + d_r
    columns, in pages of a table of 16 columns.
    """
    B, H, T_q, d_c = (job["sizes"][name] for name in ("B", "H", "T_q", "d"))
    kind = {"dtype": getattr(torch, job["dtype"])}
    width, splits = d_c + job["d_r"], job["splits"]
    q = torch.empty(B, H, T_q, width + job["past"], **kind)[..., job["past"] :]
    cache = torch.empty(64, job["page"] or 4096, width + job["past"], **kind)
    cache = cache[..., job["past"] :]
    if job["step"] == "steps.latent":
        steps_latent.launch(q[0, :, 0], cache[0], d_c, 0.1)
        return
    seq_lens = torch.empty(B, dtype=torch.int32)
    table = torch.empty(B, 16, dtype=torch.int32) if job["page"] else None
    o = torch.empty(B, H, T_q, splits, d_c, **({} if splits > 1 else kind))
    lse, scales = torch.empty(o.shape[:4]), None
    if job["step"] == "hopper_absorbed":
        hopper_absorbed.launch_splits(q, cache, table, seq_lens, o, lse, 0.1)
        return
    row = Configuration(*job["row"])
    if job["eight_bits"]:
        cache = eight_bits(cache.shape, 0)
        scales = torch.empty(*cache.shape[:2], 2)
    latent.launch_splits(q, cache, table, seq_lens, o, lse, 0.1, row, scales)
    if splits > 1:
        whole = torch.empty(B, H, T_q, d_c, **kind)
        latent.launch_merge(o, lse, whole, lse[..., 0])


def frozen(x):
    """x with tuples in place of lists, so that a plan can have it in its key."""
    return tuple(map(frozen, x)) if isinstance(x, list) else x


def main():
    gpu = Driver()
    driver.set_active(gpu)
    torch.cuda.get_device_properties = lambda device: H200
    found = []
    kernels = [
        x for name, x in sys.modules.items() if name.startswith("flashlib.kernels.")
    ]
    for module in kernels:
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                setattr(module, name, Compiling(value, found))
    for number, job in enumerate(json.load(sys.stdin)):
        found.clear()
        gpu.architecture = job["architecture"]
        run({name: frozen(value) for name, value in job.items()})
        own = vars(sys.modules[f"flashlib.kernels.{job['step']}"])
        if job["kernel"] in ("bias", "sinks"):
            own = vars(score_gradients)
        if job["step"] == "masks":
            own = own | vars(masks_backward)
        if job["step"] == "latent":
            own = own | {"merge_kernel": decoding.merge_kernel}
        for name, compiled in found:
            if isinstance(own.get(name), Compiling):
                said = {"job": number, "kernel": name} | facts(compiled)
                print(json.dumps(said), flush=True)


main()
