"""What only a GPU shows of the tiled kernels: races, graphs, sizes, sanitizers.

The calls are functions of inputs alone, forward and backward, so that each test runs
all of them.
"""

import os
import random
import shutil
import sys

import pytest
import torch
from device import DEVICE, HOPPER
from expected import same
from processes import ROOT, process_environment, run

import flashlib
from flashlib import masks, plans, score_mods, testing
from flashlib.kernels import backward, flash1, flash2, hopper, hopper_backward
from flashlib.kernels.steps import flash2 as steps
from flashlib.kernels.steps import hopper as hopper_steps

pytestmark = pytest.mark.gpu
SANITIZER = shutil.which("compute-sanitizer")


def gradients(*form):
    def call(q, k, v, do, causal):
        o, lse = flash2.forward(q, k, v, causal, 0.125)
        arguments = (q, k, v, o, lse, do, torch.zeros_like(lse), causal, 0.125)
        return backward.backward(*arguments, *form)

    return call


def forward(kernel, **options):
    return lambda q, k, v, do, causal: kernel.forward(q, k, v, causal, 0.125, **options)


def hopper_forward(q, k, v, do, causal):
    return hopper.forward(q, k, v, score_mods.unchanged(causal, 0.125))


def hopper_gradients(q, k, v, do, causal):
    score_mod = score_mods.unchanged(causal, 0.125)
    o, lse = hopper.forward(q, k, v, score_mod)
    arguments = (q, k, v, o, lse, do, torch.zeros_like(lse), score_mod)
    return hopper_backward.backward(*arguments)


FORWARD = {
    "flash1": forward(flash1),
    "flash2": forward(flash2),
    **{step: forward(steps, step=step) for step in steps.STEPS},
}
BACKWARD = {"split": gradients(True), "atomic": gradients(False)}
TRITON = [*FORWARD, *BACKWARD]
if HOPPER:
    FORWARD |= {
        "hopper": hopper_forward,
        **{step: forward(hopper_steps, step=step) for step in hopper_steps.STEPS},
    }
    BACKWARD["hopper_backward"] = hopper_gradients
CALLS = FORWARD | BACKWARD
STEPS = (*steps.STEPS, *hopper_steps.STEPS)
# The atomic form adds to dQ in no particular order.
REPEATABLE = [name for name in CALLS if "atomic" not in name]


def inputs(T_q, T_k, *, B=2, H=6, H_kv=2, d=64, seed=0, layout="contiguous"):
    """q, k, v and do in bfloat16."""
    options = {"dtype": torch.bfloat16, "device": DEVICE, "layout": layout}
    sizes = {"T_k": T_k, "H_kv": H_kv}
    q, k, v = testing.make_qkv(B, H, T_q, d, seed=seed, **sizes, **options)
    _, _, do = testing.make_qkv(B, H, 1, d, T_k=T_q, seed=seed + 1, **options)
    return q, k, v, do


def assert_right(name, q, k, v, do, results, causal=False):
    options = {"causal": causal, "scale": 0.125}
    if name in BACKWARD:
        testing.assert_gradients_within_budget(q, k, v, do, *results, **options)
    else:
        testing.assert_within_budget(q, k, v, *results, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", REPEATABLE)
def test_250_repeats_agree_in_every_bit(name, causal):
    """A missing barrier between threads makes a difference sooner or later."""
    rng = random.Random(name)
    for seed in range(50):
        T_q, T_k = (2 * rng.randrange(9, 300) + 1 for _ in range(2))
        tensors = inputs(T_q, T_k, d=rng.choice((64, 128, 256)), seed=seed)
        first = CALLS[name](*tensors, causal)
        for _ in range(4):
            assert same(first, CALLS[name](*tensors, causal)), tensors[0].shape


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", CALLS)
def test_long_sequences(name, d, causal):
    sizes = {"B": 1, "H": 4, "d": d, "layout": "transposed"}
    tensors = inputs(4096, 4096 + 77, **sizes)
    assert_right(name, *tensors, CALLS[name](*tensors, causal), causal)


@pytest.mark.parametrize("name", CALLS)
def test_more_heads_than_a_grid_dimension_holds(name):
    tensors = inputs(1, 3, B=35000, H=2)
    assert_right(name, *tensors, CALLS[name](*tensors, False))


@pytest.mark.parametrize("name", [x for x in CALLS if x not in STEPS])
def test_memory_grows_with_T_and_not_with_its_square(name):
    """At T = 131072 a single T x T matrix of one head would take 32 GiB."""
    extra = {}
    for T in (16384, 131072):
        tensors = inputs(T, T, B=1, H=8, H_kv=8, d=128)
        CALLS[name](*(x[:, :, :256] for x in tensors), True)  # compiles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = CALLS[name](*tensors, True)
        torch.cuda.synchronize()
        extra[T] = torch.cuda.max_memory_allocated() - before
        assert all(torch.isfinite(x).all() for x in results)
        if name in FORWARD:  # the last rows, few enough that the oracle fits
            q, k, v, do = (x[:, :1] for x in tensors)
            last = [x[:, :1, -64:] for x in results]
            assert_right(name, q[:, :, -64:], k, v, do, last, True)
    assert extra[131072] < 10 * extra[16384]


FUSED = {"method": "flash2", "deterministic": False}
OPTIONS = [{"method": "flash1"}, {"method": "flash2"}, FUSED, {}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_graph_computes_on_what_its_inputs_hold_when_it_is_replayed(options):
    q, k, v, do = inputs(157, 301)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def call():
        same_for_all = {"causal": True, "scale": 0.125, "return_lse": True}
        o, lse = flashlib.attention(*leaves, **same_for_all, **options)
        return o, lse, *torch.autograd.grad(o, leaves, do)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = call()
    for old, new in zip((*leaves, do), inputs(157, 301, seed=7), strict=True):
        old.detach().copy_(new)
    graph.replay()
    assert_right("flash2", q, k, v, do, held[:2], causal=True)
    assert_right("split", q, k, v, do, held[2:], causal=True)


@pytest.mark.skipif(not HOPPER, reason="only hopper starts from a zero")
def test_compiled_calls_share_a_pool_of_graphs():
    """The zeros are filled during the first graph's warm-up, outside of its pool. Those
    that are left serve the warm-ups of the other graphs, after replays that may write
    to all of the pool.
    """

    def call(q, k, v):
        return flashlib.attention(q, k, v, causal=True, method="hopper")

    torch.compiler.reset()
    plans.ZEROS.clear()
    options = {"mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
    compiled = torch.compile(call, **options)
    for T in (256, 512, 768):
        for seed in range(5):  # the second call is captured, and later ones replay it
            q, k, v, do = inputs(T, T, seed=seed)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            wanted = call(*leaves)
            wanted = wanted, *torch.autograd.grad(wanted, leaves, do)
            torch.compiler.cudagraph_mark_step_begin()
            o = compiled(*leaves)
            found = o.detach().clone(), *torch.autograd.grad(o, leaves, do)
            assert same(found, wanted), (T, seed)


@pytest.mark.parametrize("name", CALLS)
def test_more_than_two_to_the_31_elements(name):
    """An offset in 32 bits would wrap before the last heads."""
    B, H, T, d = 4112, 16, 512, 64
    assert B * H * T * d > 2**31
    bytes_needed = 12 * 2 * B * H * T * d
    if torch.cuda.mem_get_info()[0] < bytes_needed:
        pytest.skip(f"needs {bytes_needed / 2**30:.0f} GiB of free device memory")
    options = {"device": "cuda", "dtype": torch.bfloat16}
    options["generator"] = torch.Generator("cuda").manual_seed(0)
    tensors = [torch.randn(B, H, T, d, **options) for _ in range(4)]
    results = CALLS[name](*tensors, True)
    for b in (0, B // 2, B - 1):
        part = (slice(b, b + 1), slice(H - 1, H))
        own = [x[part] for x in results]
        assert_right(name, *(x[part] for x in tensors), own, causal=True)
    for x in results:
        assert not x.isnan().any()


def call_the_rest(causal):
    """What CALLS has not: lists of a mask, also without keys, a bias and sinks, with
    gradients; decoding; latent rows; eight bits.
    """
    for T_k in (53, 0):
        q, k, v, do = inputs(81, T_k, B=1, H=2, H_kv=1)
        bias = torch.zeros(1, 2, 81, T_k, device=DEVICE, dtype=q.dtype)
        sinks = torch.zeros(2, device=DEVICE)
        leaves = [x.requires_grad_() for x in (q, k, v, bias, sinks)]
        options = {"bias": bias, "sinks": sinks, "mask": masks.prefix(20)}
        o = flashlib.attention(q, k, v, causal=causal, **options)
        torch.autograd.grad(o, leaves, do)
    q, k, v, _ = inputs(53, 53, B=1, H=2, H_kv=1)
    lengths = torch.tensor([53], dtype=torch.int32, device=DEVICE)
    flashlib.decode(q[:, :, -1:], k, v, seq_lens=lengths, splits=2)
    rows, heads = (torch.randn(1, n, 192, device=DEVICE).bfloat16() for n in (53, 16))
    options = {"d_c": 128, "scale": 0.1, "seq_lens": lengths}
    flashlib.decode_latent(heads[:, :, None], rows, **options)
    if HOPPER:
        flashlib.fp8.attention(q, k, v, causal=causal)


SMALL = """
import sys
import torch
from test_gpu import CALLS, TRITON, assert_right, call_the_rest, inputs

for causal in (False, True):
    for d in (64, 128, 256):
        tensors = inputs(81, 53, B=1, H=2, H_kv=1, d=d)
        for name in TRITON if sys.argv[1] == "racecheck" else CALLS:
            results = CALLS[name](*tensors, causal)
            torch.cuda.synchronize()
            assert_right(name, *tensors, results, causal)
    if sys.argv[1] == "memcheck":
        call_the_rest(causal)
        torch.cuda.synchronize()
print("all right")
"""


@pytest.mark.slow
@pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizers_find_nothing(tool):
    """On small ragged shapes, every tensor in an allocation of its own.

    racecheck does not know the barriers of Hopper (mbarriers), copies by TMA or reads
    by wgmma (compute-sanitizer of CUDA 13.0), so it skips the Hopper kernels; repeats
    and the soak test that no slot is overwritten too early.
    """
    options = ["--tool", tool, "--error-exitcode", "3"]
    command = [SANITIZER, *options, sys.executable, "-c", SMALL, tool]
    paths = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    changes = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": ":".join(paths)}
    environment = process_environment(**changes)
    done = run(command, 540, env=environment)
    said = (done.stdout + done.stderr)[-4000:]
    assert done.returncode == 0 and "all right" in done.stdout, said
