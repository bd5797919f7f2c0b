"""The zoo of wrong kernels: one-line mistakes in real kernels that the tests must
catch.

``data/wrong_kernels.txt`` lists the mistakes of all steps; its first lines explain the
format. :func:`wrong_module` builds the kernel with its mistake, and :func:`judge` runs
a step's kernel, right or wrong, on a named shape and holds the result against the
budgets of :mod:`flashlib.testing`.
"""

import contextlib
import importlib
import re
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import torch

from flashlib import masks, score_mods, testing
from flashlib.kvcache import in_eight_bits
from flashlib.plain_checks import check_window
from flashlib.reference import fp8

KERNELS = Path(__file__).parent / "kernels"
ENTRIES = Path(__file__).parent / "data/wrong_kernels.txt"


class WrongKernel(
    namedtuple("WrongKernel", "step name file shape caught_in reason old new")
):
    """In flashlib/kernels/``file``, ``old`` becomes ``new``: run on ``shape``, the
    tensor ``caught_in`` of ``step`` is over its budget.
    """

    def __str__(self):
        return f"{self.step}: {self.name}"


def replace_once(source, old, new):
    """The source with ``new`` for ``old``, wherever its lines break. Raises ValueError
    unless old occurs exactly once.
    """
    pattern = r"\s*".join(map(re.escape, re.findall(r"\w+|\S", old)))
    # The formatter may have added a comma before a closing bracket.
    pattern = re.sub(r"(\\[)\]}])", r"(?:,\\s*)?\1", pattern)
    patched, count = re.subn(pattern, lambda _: new, source)
    if count != 1:
        raise ValueError(f"expected {old!r} once in the source, got {count}")
    return patched


def _parse(entry):
    title, reason, *edit = entry.splitlines()
    old, new = (
        "\n".join(line[2:] for line in edit if line.startswith(sign)) for sign in "-+"
    )
    return WrongKernel(*map(str.strip, title.split("|")), reason.strip(), old, new)


WRONG_KERNELS = tuple(
    _parse(entry)
    for entry in ENTRIES.read_text("utf-8").strip().split("\n\n")
    if not entry.startswith("#")
)


def wrong_kernel(step, name):
    """The entry with this step and name; raises KeyError if there is none."""
    return {(wrong.step, wrong.name): wrong for wrong in WRONG_KERNELS}[step, name]


@contextlib.contextmanager
def wrong_module(wrong):
    """Within this context, the module of a wrong kernel's step, imported from a patched
    copy of flashlib/kernels. Raises ValueError if the patch does not fit.
    """
    # Triton reads the source when a kernel first runs, so the copy stays until the end.
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "wrong_kernels")
        copy.mkdir()
        for path in KERNELS.glob("*.py"):
            source = path.read_text("utf-8")
            if path.name == wrong.file:
                source = replace_once(source, wrong.old, wrong.new)
            source = source.replace("flashlib.kernels", copy.name)
            (copy / path.name).write_text(source, "utf-8")
        sys.path.insert(0, folder)
        try:
            yield importlib.import_module(f"{copy.name}.{wrong.step}")
        finally:
            sys.path.remove(folder)
            for name in [name for name in sys.modules if name.startswith(copy.name)]:
                del sys.modules[name]


# Sizes of make_qkv and options of the reference; lengths are those of packed sequences
# (queries, keys) or of caches. 130 rows take two blocks, the last one ragged.
SIZES = {"T_q": 130, "d": 16, "H": 1}
HOPPER = {"T_q": 300, "d": 64}
PAGED = {"T_q": 3, "H": 4, "H_kv": 2, "causal": True, "lengths": (203, 0, 90)}
PACKED = {"T_q": 76, "T_k": 81, "H": 2, "H_kv": 1, "causal": True}
SHAPES = {
    "one block": {"T_q": 17},
    "two blocks": {},
    "large scores": {"magnitude": 60.0},
    "causal": {"causal": True},
    "one more key": {"T_k": 131, "causal": True},
    "two more queries": {"T_k": 64, "T_q": 66, "causal": True},
    "more keys": {"T_q": 70, "T_k": 130, "causal": True},
    "more queries": {"T_k": 70, "causal": True},
    "fewer keys": {"T_q": 17, "T_k": 5, "H": 2},
    "grouped": {"T_q": 17, "H": 4, "H_kv": 2},
    "wide values": {"T_q": 17, "d": 16, "d_v": 32, "H": 2},
    "narrow values": {"T_q": 17, "d": 32, "d_v": 16, "H": 2},
    "transposed": {"T_q": 17, "H": 2, "layout": "transposed"},
    "negative scale": {"T_q": 17, "scale": -0.25},
    "one key": {"T_k": 1, "magnitude": 60.0},
    "narrow window": {"window": (40, 20)},
    "wide window": {"window": (70, 20)},
    "window, more keys": {"T_q": 70, "T_k": 130, "window": (30, 0)},
    "window, more queries": {"T_k": 70, "window": (30, 0)},
    "softcap": {"T_q": 70, "magnitude": 3.0, "softcap": 2.0},
    "large softcap": {"T_q": 70, "softcap": 1e4},
    "alibi": {"T_q": 70, "H": 2, "alibi_slopes": torch.tensor([0.5, 0.125])},
    "documents": {"T_q": 150, "H": 4, "H_kv": 2, "mask": "documents"},
    "wide documents": {"T_q": 70, "d": 144, "mask": "documents"},
    "bias": {"T_q": 70, "H": 2, "bias": torch.linspace(-2.0, 2.0, 70)},
    "sinks": {"T_q": 70, "H": 2, "sinks": torch.tensor([0.5, 3.0])},
    "dropout": {"T_q": 70, "H": 2, "dropout": 0.5, "seed": 3},
    "packed": {**PACKED, "lengths": ((5, 0, 70, 1), (7, 3, 70, 1))},
    "paged": PAGED,
    "paged, window": {**PAGED, "window": (70, None)},
    "latents": {**PAGED, "H_kv": 1, "d": 40, "d_v": 24},
    "eight bits": {**PAGED, "eight_bits": True},
    "latents, eight bits": {**PAGED, "H_kv": 1, "d": 40, "d_v": 24, "eight_bits": True},
    "rounded": {"T_q": 17, "T_k": 150, "d": 48, "H": 2, "eight_bits": True},
    "hopper": HOPPER,
    "hopper, large scores": {**HOPPER, "magnitude": 60.0},
    "hopper, causal": {**HOPPER, "causal": True},
    "hopper, wide": {"T_q": 270, "T_k": 300, "d": 256, "causal": True},
    "hopper, more keys": {"T_q": 130, "T_k": 300, "d": 64, "causal": True},
    "hopper, more queries": {"T_q": 300, "T_k": 130, "d": 64, "causal": True},
    "hopper, grouped": {"T_q": 70, "d": 64, "H": 4, "H_kv": 2},
    "hopper, negative scale": {"T_q": 70, "d": 64, "scale": -0.125},
}
OPTIONS = {"causal": False, "window": None, "softcap": None, "alibi_slopes": None}
OPTIONS |= {"bias": None, "sinks": None, "mask": None, "dropout": 0.0, "seed": 0}


def judge(step, module, name, device="cpu"):
    """Run the passes of a step, taken from ``module``, on the shape called ``name``. An
    AssertionError names the tensor that is over its budget.
    """
    dtype = torch.bfloat16 if step.startswith("hopper") else torch.float32
    sizes = SIZES | SHAPES[name] | {"dtype": dtype, "device": device}
    eight_bits = sizes.pop("eight_bits", False)
    if eight_bits:
        sizes["dtype"] = torch.float16  # of what is rounded, and of queries
    lengths, scale = sizes.pop("lengths", ()), sizes.pop("scale", sizes["d"] ** -0.5)
    options = {option: sizes.pop(option, OPTIONS[option]) for option in OPTIONS}
    options["scale"] = scale
    if step in ("decoding", "latent"):
        return _judge_decoding(step, module, lengths, sizes, options, eight_bits)
    if step == "fp8":
        return _judge_quantize(module, *testing.make_qkv(1, **sizes))
    q, k, v = testing.make_qkv(1, **sizes)
    sizes |= {"T_k": sizes["T_q"], "H_kv": sizes["H"]}
    _, _, do = testing.make_qkv(1, **sizes, seed=1)
    dlse = do[..., 0].float().contiguous()
    if step in ("masks", "masks_backward"):
        return _judge_masks(step, module, lengths, (q, k, v, do, dlse), options)
    how = options["causal"], scale
    if step in ("hopper", "hopper_backward"):
        how = (score_mods.unchanged(*how),)

    def forward(step):
        module = importlib.import_module(f"flashlib.kernels.{step}")
        return module.forward(q, k, v, *how)

    if step == "gradients":
        o, _, p = forward("standard")
        passes = [(p, o, do, dlse, scale)]
    elif step in ("backward", "hopper_backward"):
        saved = forward("flash2" if step == "backward" else "hopper")
        forms = [(True,), (False,)] if step == "backward" else [()]
        passes = [(*saved, do, dlse, *how, *form) for form in forms]
    else:
        o, lse, *_ = module.forward(q, k, v, *how)
        return testing.assert_within_budget(q, k, v, o, lse, **options)
    for arguments in passes:
        gradients = module.backward(q, k, v, *arguments)
        tensors = (q, k, v, do, *gradients)
        testing.assert_gradients_within_budget(*tensors, dlse=dlse, **options)


def _judge_masks(step, module, lengths, tensors, options):
    q, k, v, do, dlse = tensors
    for name in ("alibi_slopes", "bias", "sinks"):
        if options[name] is not None:
            options[name] = options[name].to(q.device)
    mask = seed = None
    if options["mask"] is not None:  # of both heads, some tiles full, some hidden
        ids = torch.arange(k.shape[2], device=q.device) // 70
        mask = options["mask"] = masks.documents(ids) | masks.prefix(3)
        mask = score_mods.mask_of(mask)
    if options["bias"] is not None:
        options["bias"] = options["bias"].expand(1, 1, q.shape[2], -1).contiguous()
    if options["dropout"]:
        seed = torch.tensor([options["seed"]], device=q.device)
    score_mod = score_mods.ScoreMod(
        options["scale"], *check_window(options["window"], options["causal"]),
        options["softcap"] or 0.0, options["alibi_slopes"], options["bias"],
        options["sinks"], mask, seed, options["dropout"],
    )  # fmt: skip
    packing = None
    if lengths:
        packing = testing.packing_of(*lengths, q.device)
        q, k, v, do, dlse = *(x[0].transpose(0, 1) for x in (q, k, v, do)), dlse[0]
    backward = step == "masks_backward"
    own = importlib.import_module("flashlib.kernels.masks") if backward else module
    o, lse = own.forward(q, k, v, score_mod, packing)
    gradients = (None,) * 3
    if backward:
        given = q, k, v, o, lse, do, dlse, score_mod, packing
        gradients = module.backward(*given)[:3]
    if lengths:
        return testing.assert_packed_within_budget(
            q, k, v, o, lse, packing, do=do, gradients=gradients, dlse=dlse, **options
        )
    testing.assert_within_budget(q, k, v, o, lse, **options)
    testing.assert_gradients_within_budget(
        q, k, v, do, *gradients, dlse=dlse, **options
    )


def _judge_quantize(module, q, k, v):
    """Numbers times scales are what was rounded, up to half of the distance between two
    numbers: 2^-4 of the larger one, or of 2^-6 under the scale.
    """
    sign, T = fp8.signs(q.shape[3], device=q.device), k.shape[2]
    q8, of_q, k8, of_k, v8, of_v, _ = module.quantize(q, k, v, sign, True)
    v8 = v8.float().mT
    v8 = torch.empty_like(v8).index_copy_(
        2, fp8.key_order(v8.shape[2]).to(v8.device), v8
    )
    of_k, of_v = (x.repeat_interleave(module.KEYS, 2)[:, :, :T] for x in (of_k, of_v))
    rounded = (q8, of_q), (k8, of_k), (v8[:, :, :T], of_v)
    q, k, _ = fp8.prepare(q.double(), k.double(), fp8.FULL)
    for name, (x, scales), y in zip("qkv", rounded, (q, k, v.double()), strict=True):
        least = 2.0**-6 * fp8.scales(y, 1 if name == "q" else module.KEYS)
        # The mean of keys has their dtype, and the transform is in float32.
        allowed = y.abs().maximum(least) / 16 + 1e-3
        near = (x.double() * scales[..., None] - y).abs() <= allowed  # not with NaN
        far = (~near).any(dim=3).nonzero().tolist()
        assert not far, f"{name}{far[0]} is not what was rounded"


def _in_eight_bits(x, widths, unseen):
    """``(stored, scales, whole)`` of rows ``[..., sum of widths]``: numbers in E4M3,
    scales ``[..., parts]``, NaN in unseen rows, and the numbers that they stand for.
    """
    parts = [in_eight_bits(part) for part in x.split(widths, -1)]
    scales = torch.stack([s for _, s in parts], dim=-1).masked_fill(unseen, torch.nan)
    whole = [y.float() * s[..., None] for y, s in parts]
    return torch.cat([y for y, _ in parts], -1), scales, torch.cat(whole, -1)


def _judge_decoding(step, module, lengths, sizes, options, eight_bits):
    """A cache in pages of 32 rows, the last page first, read in three splits; NaN
    wherever no sequence has a key. Latents are the first columns of their keys.
    """
    B, page = len(lengths), 32
    pages = -(-max(lengths) // page)  # of a sequence
    q, _, _ = testing.make_qkv(B, **sizes)
    # Two more pages than are used: a wrong row number may reach past the last one.
    _, k, v = testing.make_qkv(B * pages + 2, **sizes | {"T_k": page})
    table = torch.arange(B * pages, device=q.device).flip(0).view(B, pages)
    seq_lens = torch.tensor(lengths, device=q.device)
    rows = torch.arange(pages * page, device=q.device).view(pages, 1, page, 1)
    if step == "latent":
        v = k[..., : sizes["d_v"]]
    for x in (k, v):
        x[-2:] = torch.nan
        x[table] = x[table].masked_fill(rows >= seq_lens.view(B, 1, 1, 1, 1), torch.nan)
    left, scale = check_window(options["window"])[0], options["scale"]
    if step == "latent":
        cache, read = (k[:, 0],), (sizes["d_v"], scale)
    else:
        cache, read = (k, v), (left, scale)
    if eight_bits:
        unseen = k[..., :1].isnan()
        widths = k.shape[-1]
        if step == "latent":
            widths = [sizes["d_v"], widths - sizes["d_v"]]
        kept = [_in_eight_bits(x, widths, unseen) for x in (k, v)[: len(cache)]]
        stored, scales, whole = zip(*kept, strict=True)
        if step == "latent":
            k, v = whole[0], whole[0][..., : sizes["d_v"]]
            cache, read = (stored[0][:, 0],), (*read, scales[0][:, 0])
        else:
            (k, v), cache = whole, stored
            read = *read, module.UNCHANGED, tuple(x[..., 0] for x in scales)
    o, lse = module.forward(q, *cache, seq_lens.int(), table.int(), 3, *read)
    k, v = (x[table].transpose(1, 2).flatten(2, 3) for x in (k, v))
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        keys, values = k[one, :, :length], v[one, :, :length]
        testing.assert_within_budget(q[one], keys, values, o[one], lse[one], **options)
