"""A small model of Hugging Face transformers with this library's attention: the same
logits, gradients and tokens as with its own, and a refusal by name of what cannot be
honored.
"""

import importlib
import inspect
import operator
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from device import CUDA, DEVICE
from expected import refused
from processes import ROOT

import flashlib
from flashlib import checks, huggingface, masks, testing
from flashlib.kvcache import PagedLatentCache
from flashlib.reference import masks as reference_masks
from flashlib.reference import standard as reference

transformers = pytest.importorskip("transformers", minversion="4.53")
masking_utils = pytest.importorskip("transformers.masking_utils")

DTYPES = (torch.float32, torch.float16, torch.bfloat16) if CUDA else (torch.float32,)
B, T = 2, 203 if CUDA else 21
VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # two query heads share a key head; nothing is repeated
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": None,
}


@pytest.fixture(autouse=True)
def registered():
    huggingface.register()


def build(attention="tiled", model="Llama", dtype=torch.float32, **config):
    """A randomly initialised model; the weights depend on the sizes alone."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{model}Config")(**SIZES | config)
    kind = {"T5": "Seq2SeqLM", "ModernBert": "MaskedLM"}.get(model, "CausalLM")
    options = {"attn_implementation": attention}
    if model == "GptOss":  # its other experts are none of float64
        options["experts_implementation"] = "eager"
    built = getattr(transformers, f"AutoModelFor{kind}").from_config(config, **options)
    assert built.config._attn_implementation == attention
    for name, x in built.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(x)
    return built.eval().to(device=DEVICE, dtype=dtype)


def tokens(rows=B, length=T):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator).to(DEVICE)


# --


def test_a_prompt_in_pieces_is_the_prompt():
    """With keys in the cache the mask is aligned to the bottom right corner."""
    ids, model = tokens(), build()
    whole = model(ids).logits
    start = model(ids[:, :8], use_cache=True)
    cache = {"past_key_values": start.past_key_values, "use_cache": True}
    rest = model(ids[:, 8:], **cache).logits
    exact = build("sdpa").double()(ids).logits
    pieces = torch.cat([start.logits, rest], dim=1)
    error, other = testing.rms(pieces - exact), testing.rms(whole - exact)
    floor = torch.finfo(torch.float32).eps * testing.rms(exact)
    assert (error <= testing.OUTPUT_FACTOR * other.amax() + floor).all()


MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"sliding_window": 5, "head_dim": 32, "attn_logit_softcapping": 2.0},
    "Qwen2": {},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "first_k_dense_replace": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
    },
    "GPT2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
SLOW = pytest.mark.slow
SMALL = 13


def each_model(ways, **run):
    """Parameters (model, way), each way for all models. Of these, ``make test`` runs
    Gemma 2, which has everything but latents, and DeepSeek, in the ways given here;
    ``make test-all`` runs the others.
    """
    return [
        pytest.param(model, way, marks=() if run.get(model) == way else SLOW)
        for model in MODELS
        for way in ways
    ]


LAYERS = ["sliding_attention", "full_attention"]
# Models whose masks or scores need more than causality and a window.
MORE = {
    "GptOss": {
        "head_dim": 32, "sliding_window": 5, "layer_types": LAYERS,
        "num_local_experts": 1, "num_experts_per_tok": 1,
    },
    "Llama4Text": {
        "head_dim": 32, "attention_chunk_size": 5, "intermediate_size_mlp": 64,
        "layer_types": ["chunked_attention", "full_attention"], "moe_layers": [],
    },
    "ModernBert": {
        "local_attention": 8, "layer_types": LAYERS, "bos_token_id": 1,
        "cls_token_id": 1, "sep_token_id": 2,
    },
    "T5": {
        "d_kv": 32, "d_ff": 64, "num_layers": 1, "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "Bert": {"num_hidden_layers": 1},
}  # fmt: skip

PACKED = [slice(5), slice(5, 6), slice(6, SMALL)]
# Where the sequences of each row are.
PIECES = {
    "whole": [[slice(SMALL)], [slice(SMALL)]],
    "left": [[slice(SMALL)], [slice(4, SMALL)]],
    "both": [[slice(3, SMALL)], [slice(SMALL - 4)]],
    "packed": [PACKED, PACKED],
}


def padded(how):
    if how == "holes":
        seen = tokens(length=SMALL) % 4 > 0
        seen[:, 0] = True  # eager in float64 has NaN where a query sees no key
        return seen.long()
    seen = torch.zeros(B, SMALL, dtype=torch.long, device=DEVICE)
    for row, (part,) in zip(seen, PIECES[how], strict=True):
        row[part] = 1
    return seen


def packed_places():
    lengths = [part.stop - (part.start or 0) for part in PACKED]
    return torch.cat([torch.arange(n, device=DEVICE) for n in lengths])[None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "model, how",
    each_model(["whole", "both", "packed"], Gemma2="packed", DeepseekV3="both"),
)
def test_models_give_the_logits_and_gradients_of_eager(model, how, dtype):
    """As precisely as eager, against each sequence alone in float64."""
    ids = tokens(length=SMALL)
    pieces = [(b, part) for b, parts in enumerate(PIECES[how]) for part in parts]
    inputs = {"position_ids": packed_places()}
    if how != "packed":
        seen = padded(how)
        places = (seen.cumsum(1) - 1).clamp(min=0)
        inputs = {"attention_mask": seen, "position_ids": places}

    def run(attention, alone=False):
        built = build(attention, model, dtype, **MODELS[model])
        if alone:
            built = built.double()
            logits = [built(ids[None, b, part]).logits[0] for b, part in pieces]
        else:
            whole = built(ids, use_cache=False, **inputs).logits
            logits = [whole[b, part] for b, part in pieces]
        logits = torch.cat(logits)
        logits.sin().sum().backward()
        gradients = [p.grad.flatten() for p in built.parameters()]
        return [x.double() for x in (logits.detach(), torch.cat(gradients))]

    assert_as_precise(run("tiled"), run("eager"), run("eager", alone=True), dtype)


def assert_as_precise(ours, theirs, exact, dtype):
    """Logits and gradients have no more than the budgeted multiple of eager's error."""
    factors = testing.OUTPUT_FACTOR, testing.GRADIENT_FACTOR
    for *found, wanted, factor in zip(ours, theirs, exact, factors, strict=True):
        error, other = (testing.rms((x - wanted).flatten()) for x in found)
        floor = torch.finfo(dtype).eps * testing.rms(wanted.flatten())
        assert error <= factor * other + floor


HOLES = [(model, "holes") for model in MORE if model != "Bert"]
ENDS = [(model, how) for model in MORE for how in ("whole", "left", "both")]
ENDS += [("Gemma2", "holes"), ("Bert", "holes")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "model, how", [*HOLES, *(pytest.param(*x, marks=SLOW) for x in ENDS)]
)
def test_models_with_sinks_biases_chunks_and_padding_between_tokens(model, how, dtype):
    """As precisely as eager, against eager in float64; also of encoders' padding."""
    ids, seen = tokens(length=SMALL), padded(how)
    inputs = {"attention_mask": seen}
    if model == "T5":
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": seen}

    def run(attention, exact=False):
        built = build(attention, model, dtype, **(MODELS | MORE)[model])
        built = built.double() if exact else built
        logits = built(ids, **inputs).logits[seen > 0]
        logits.sin().sum().backward()
        learned = [p.grad.flatten() for p in built.parameters() if p.grad is not None]
        return [x.double() for x in (logits.detach(), torch.cat(learned))]

    assert_as_precise(run("tiled"), run("eager"), run("eager", exact=True), dtype)


@pytest.mark.parametrize(
    "model", ["GptOss", pytest.param("Llama4Text", marks=SLOW), "T5"]
)
@pytest.mark.parametrize("cache", ["dynamic", pytest.param("static", marks=SLOW)])
@pytest.mark.parametrize("how", ["left", pytest.param("holes", marks=SLOW)])
def test_models_with_sinks_biases_and_chunks_generate_the_same(model, cache, how):
    if (model, cache) == ("Llama4Text", "static"):
        taken = inspect.signature(masking_utils.create_chunked_causal_mask).parameters
        if "block_sequence_ids" not in taken:
            pytest.skip("generate passes what this version of transformers refuses")
    options = {"max_new_tokens": 3, "do_sample": False, "disable_compile": True}
    options |= {"attention_mask": padded(how), "cache_implementation": cache}
    models = (build(name, model, **MORE[model]) for name in ("tiled", "eager"))
    ours, theirs = (m.generate(tokens(length=SMALL), **options) for m in models)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", [pytest.param("hides", marks=SLOW), "hides and adds"])
def test_a_mask_of_the_callers_own_gives_the_logits_of_eager(kind):
    """Of 4 dimensions, boolean or added, in several heads; all rows see a key."""
    ids, generator = tokens(length=SMALL), torch.Generator().manual_seed(5)
    seen = torch.rand(B, 1, SMALL, SMALL, generator=generator) < 0.4
    seen = (seen | torch.eye(SMALL, dtype=torch.bool)).to(DEVICE)
    least = torch.finfo(torch.float32).min
    added = torch.randn(1, 4, SMALL, SMALL, generator=generator).to(DEVICE)
    added = (added * (kind != "hides")).masked_fill(~seen, least).requires_grad_()
    given = seen if kind == "hides" else added

    def run(attention, mask, dtype=torch.float32):
        built = build(attention, dtype=dtype)
        logits = built(ids, attention_mask=mask, use_cache=False).logits
        learned = [x for x in (mask, *built.parameters()) if x.requires_grad]
        gradients = torch.autograd.grad(logits.sin().sum(), learned)
        # Gradients of what hides a key are rounding errors in eager.
        gradients = [g * seen if g.ndim == 4 else g for g in gradients]
        return [
            x.detach().double()
            for x in (logits, torch.cat([g.flatten() for g in gradients]))
        ]

    theirs = added.detach() if kind == "hides" else added
    exact = theirs.detach().double().masked_fill(~seen, torch.finfo(torch.float64).min)
    exact.requires_grad_(theirs.requires_grad)
    results = (
        run("tiled", given),
        run("eager", theirs),
        run("eager", exact, torch.float64),
    )
    assert_as_precise(*results, torch.float32)


@pytest.mark.parametrize(
    "model, cache",
    each_model(["dynamic", "static"], Gemma2="static", DeepseekV3="dynamic"),
)
def test_padded_batches_generate_the_same_tokens(model, cache):
    options = {"max_new_tokens": 2, "do_sample": False, "disable_compile": True}
    options |= {"attention_mask": padded("left"), "cache_implementation": cache}
    models = (build(name, model, **MODELS[model]) for name in ("tiled", "eager"))
    ours, theirs = (m.generate(tokens(length=SMALL), **options) for m in models)
    assert ours.shape == (B, SMALL + 2) and torch.equal(ours, theirs)


transformers_5 = pytest.mark.skipif(
    not hasattr(masking_utils, "bidirectional_mask_function"),
    reason="models of transformers 4 make bidirectional masks themselves",
)


@transformers_5
@pytest.mark.parametrize("how", ["both", "holes"])
@pytest.mark.parametrize("keys", [None, SMALL, 9, 17])
def test_padding_is_hidden_from_every_query_of_bidirectional_attention(keys, how):
    """In an encoder, and in cross attention to as many keys as queries or others."""
    seen, config = padded(how), {"num_hidden_layers": 1}
    inputs = {"attention_mask": seen}
    if keys:
        config |= {"is_decoder": True, "add_cross_attention": True}
        hidden = torch.randn(B, keys, 128, generator=torch.Generator().manual_seed(2))
        inputs = {"encoder_hidden_states": hidden.to(DEVICE)}
        inputs["encoder_attention_mask"] = torch.cat([seen, seen], dim=1)[:, :keys]
    models = [build(name, "Bert", **config) for name in ("tiled", "eager", "eager")]
    exact = models.pop().double()
    ours, theirs = (model(tokens(length=SMALL), **inputs).logits for model in models)
    if keys:
        inputs["encoder_hidden_states"] = hidden.to(DEVICE).double()
    exact = exact(tokens(length=SMALL), **inputs).logits
    error, other = testing.rms(ours - exact), testing.rms(theirs - exact)
    floor = torch.finfo(torch.float32).eps * testing.rms(exact)
    assert (error <= testing.OUTPUT_FACTOR * other.amax() + floor).all()


def test_free_space_of_a_static_cache_is_no_key():
    causal = masking_utils.causal_mask_function
    mask = huggingface.attention_mask(2, 9, causal, q_length=3, q_offset=4)
    q, k, v, o = call(mask, T_q=3)
    assert torch.equal(o, flashlib.attention(q, k[:, :, :7], v[:, :, :7], causal=True))


def test_it_trains_under_autocast():
    model, ids = build().train(), tokens(length=SMALL)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_a_model_without_a_mask_compiles():
    model, ids = build(num_hidden_layers=1), tokens(length=SMALL)
    compiled = torch.compile(model, backend="eager")
    for places in (None, packed_places()):
        options = {"position_ids": places, "use_cache": False}
        assert torch.equal(
            compiled(ids, **options).logits, model(ids, **options).logits
        )


def call(mask=None, T_q=5, T_k=9, **arguments):
    sizes = {"T_k": T_k, "H_kv": 2, "d_v": 24}
    q, k, v = testing.make_qkv(2, 4, T_q, 16, device=DEVICE, **sizes)
    layer = torch.nn.Module()
    o, nothing = huggingface.attention_forward(layer, q, k, v, mask, **arguments)
    assert nothing is None and o.shape == (2, T_q, 4, 24) and o.is_contiguous()
    return q, k, v, o.transpose(1, 2)


CAUSAL = huggingface.Mask(True)


@pytest.mark.parametrize("T_q, scaling", [(1, None), (5, 0.7)])
@pytest.mark.parametrize("mask", [CAUSAL, huggingface.Mask(False), None])
def test_scale_and_causality_are_honoured(T_q, scaling, mask):
    causal = mask is CAUSAL
    options = {"is_causal": mask and not causal, "scaling": scaling}  # the mask decides
    options |= {
        "position_ids": 1,
        "use_cache": True,
        "softcap": None,
        "head_mask": False,
    }
    q, k, v, o = call(mask, T_q, **options)
    assert torch.equal(o, flashlib.attention(q, k, v, causal=causal, scale=scaling))


def test_the_window_is_that_of_the_mask():
    """Some models do not tell their attention of it, Qwen2-MoE for one."""
    pattern = masking_utils.sliding_window_causal_mask_function(3)
    mask = huggingface.attention_mask(2, 9, pattern, q_length=5, q_offset=4)
    q, k, v, o = call(mask)
    assert torch.equal(o, flashlib.attention(q, k, v, causal=True, window=(2, 0)))


def test_a_mask_that_says_nothing_new_is_honoured():
    causal = reference.causal_mask(5, 9, DEVICE)
    least = torch.finfo(torch.float32).min
    additive = torch.zeros(2, 1, 5, 9, device=DEVICE).masked_fill(~causal, least)
    plain, full = call(CAUSAL)[-1], call()[-1]
    assert torch.equal(call(causal.expand(2, 1, 5, 9))[-1], plain)
    assert torch.equal(call(additive)[-1], plain)
    assert torch.equal(call(torch.ones_like(causal)[None, None])[-1], full)
    assert not torch.equal(plain, full)


def test_a_tensor_says_what_is_seen_and_what_is_added():
    """Added numbers hide a key only if they are the least of their dtype."""
    seen = reference.causal_mask(5, 9, DEVICE).roll(1, dims=1)[None, None]
    added = -0.5 * (~seen).float()
    bias = torch.randn(1, 4, 5, 9, generator=torch.Generator().manual_seed(3))
    bias = bias.to(DEVICE)
    for mask, options in (
        (seen, {"mask": seen}),
        (seen.float().log(), {"mask": seen}),
        (added, {"bias": added}),
        (added.masked_fill(~seen, -torch.inf), {"mask": seen}),
        (bias + seen.float().log(), {"mask": seen, "bias": bias}),
    ):
        q, k, v, o = call(mask)
        assert torch.equal(o, flashlib.attention(q, k, v, **options))
        o = call(mask, position_bias=bias)[-1]
        options["bias"] = options.get("bias", 0) + bias
        assert torch.equal(o, flashlib.attention(q, k, v, **options))


def near(batch, head, q, k):
    return (q - k) % 3 == 0


def patterns(rows, T_k):
    """Functions for masks that transformers makes, for the first T_k tokens."""
    u = masking_utils
    ids = torch.arange(T_k, device=DEVICE).expand(rows, T_k)
    left, blocks = torch.arange(rows, device=DEVICE), ids // 4 - 1
    places, packed = ids % 5 + 7, ids // 5
    causal, window = u.causal_mask_function, u.sliding_window_causal_mask_function(4)
    chunks = u.chunked_causal_mask_function(3, left)
    local = u.sliding_window_bidirectional_mask_function(2)
    found = {
        "causal": causal,
        "window": window,
        "two windows": u.and_masks(window, u.sliding_window_overlay(6)),
        "chunks": chunks,
        "one chunk": u.chunked_causal_mask_function(T_k, left * 0),
        "local": local,
        "blocks": u.or_masks(causal, u.blockwise_overlay(blocks)),
        "own": u.and_masks(causal, near),
        "or own": u.or_masks(causal, near),
        "bidirectional": u.bidirectional_mask_function,
    }
    if hasattr(u, "packed_sequence_compatibility_function"):  # later than 5.17
        pack = u.packed_sequence_compatibility_function
        found["packed"] = pack(window, places, packed)
        found["packed chunks"] = pack(chunks, places, packed)
    return found


NAMES_OF_PATTERNS = [
    "causal", "window", "two windows", "chunks", "one chunk", "local", "blocks", "own",
    "or own", "bidirectional", "packed", "packed chunks",
]  # fmt: skip


@transformers_5
@pytest.mark.parametrize("name", NAMES_OF_PATTERNS)
def test_patterns_of_transformers_mean_what_sdpa_takes_them_for(name):
    """Without padding, with padding at the ends and between tokens; for a prompt, in a
    cache, and in a cache that has lost its first keys or has free space.
    """
    T_k = 15
    function = patterns(2, T_k).get(name)
    if function is None:
        pytest.skip("this version of transformers has no such function")
    ends, holes = torch.ones(2, 2, T_k, dtype=torch.bool, device=DEVICE)
    ends[0, :3] = ends[1, -4:] = holes[0, 4:6] = holes[1, 9] = holes[1, 0] = False
    prompt, space = (T_k, 0, 0, T_k), (4, 6, 0, T_k)
    cases = [(prompt, None)]
    if not name.startswith("packed"):
        cases += [(prompt, ends), (prompt, holes), (space, None), (space, holes)]
        cases += [((4, 9, 2, 11), ends), ((1, 14, 3, 12), holes)]
    for (T_q, q_offset, kv_offset, n), padding in cases:
        where = {"q_length": T_q, "q_offset": q_offset, "kv_offset": kv_offset}
        where |= {"device": DEVICE, "attention_mask": padding}
        mask = huggingface.attention_mask(2, n, function, **where)
        skip = {"allow_is_causal_skip": False, "mask_function": function}
        seen = masking_utils.sdpa_mask(2, kv_length=n, **where, **skip)
        q, k, v, o = call(mask, T_q, n)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, enable_gqa=True
        )
        rows = seen.any(-1)[:, 0]
        if padding is not None:
            rows &= padding[:, q_offset : q_offset + T_q]
        o, wanted = o.transpose(1, 2)[rows], wanted.transpose(1, 2)[rows]
        torch.testing.assert_close(o, wanted)


@transformers_5
def test_what_is_known_of_a_pattern_needs_no_boolean_tensor():
    """Plain attention where nothing else hides a key, packed sequences, or a function
    of memory O(T)."""
    T_k = 15
    holes = torch.ones(2, T_k, dtype=torch.bool, device=DEVICE)
    ends = holes.clone()
    holes[0, 4], ends[0, :4] = False, False
    kinds, functions = {}, patterns(2, T_k)
    for name, function in functions.items():
        for how, padding in (("", None), (" ends", ends), (" holes", holes)):
            mask = huggingface.attention_mask(
                2, T_k, function, padding, q_length=T_k, device=DEVICE
            )
            made = mask.make and type(mask.on(torch.device(DEVICE)))
            kinds[name + how] = "packed" if mask.packed is not None else made
    plain = {name for name, kind in kinds.items() if kind is None}
    assert plain == {"causal", "window", "one chunk", "local", "bidirectional"}
    packed = {name for name, kind in kinds.items() if kind == "packed"}
    ends = {f"{name} ends" for name in plain - {"local"}}
    assert packed == ends | {"packed"} & {*functions}
    dense = {name for name, kind in kinds.items() if kind is torch.Tensor}
    hows = ("", " ends", " holes")
    own = {"own", "or own", "packed chunks"} & {*functions}
    assert dense == {name + how for name in own for how in hows}
    assert set(kinds.values()) == {None, "packed", torch.Tensor, masks.Mask}


def test_sinks_and_biases_of_a_packed_mask():
    function = masking_utils.causal_mask_function
    ends = torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    ends[0, :3] = ends[1, -1] = False
    mask = huggingface.attention_mask(2, 9, function, ends, q_length=5, q_offset=4)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE)
    bias = torch.randn(1, 4, 5, 9, generator=torch.Generator().manual_seed(3))
    bias = bias.to(DEVICE)
    seen = reference.causal_mask(5, 9, DEVICE) & ends[:, None, None]
    for options in ({}, {"bias": bias}):
        given = {"position_bias": bias} if options else {}
        q, k, v, o = call(mask, s_aux=sinks, **given)
        wanted = flashlib.attention(q, k, v, mask=seen, sinks=sinks, **options)
        assert mask.packed is not None
        torch.testing.assert_close(o[0], wanted[0])
        torch.testing.assert_close(o[1, :, :-1], wanted[1, :, :-1])


# --


@pytest.mark.parametrize(
    "mask, got",
    [
        (torch.ones(2, 1, 5, 12), r"\[2, 1, 5, 12\] of torch.float32"),
        (torch.ones(2, 9), r"\[2, 9\] of torch.float32"),
        (torch.ones(2, 1, 5, 9).long(), r"\[2, 1, 5, 9\] of torch.int64"),
        ([1, 2], "list"),
    ],
    ids=["longer", "padding", "integers", "list"],
)
def test_another_mask_is_refused(mask, got):
    expected = (
        r"booleans or floats that broadcast to \[B, H, T_q, T_k\] = \[2, 4, 5, 9\]"
    )
    with refused(ValueError, f"attention_mask: expected {expected}, got {got}"):
        call(mask=mask)


@pytest.mark.parametrize("sizes", [(2, 9, 9), (1, 9)])
def test_padding_of_other_sizes_is_refused(sizes):
    function = masking_utils.causal_mask_function
    expected = r"\[B, T\] with B = 2"
    with refused(ValueError, f"attention_mask: expected {expected}, got "):
        huggingface.attention_mask(2, 9, function, torch.ones(sizes), q_length=9)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"sliding_window": 4}])
def test_no_mask_where_one_is_needed_is_refused(options):
    """'eager' would hide nothing there, 'sdpa' the future."""
    with refused(ValueError, "attention_mask: expected the mask of a model, got None"):
        call(**options)


@transformers_5
@pytest.mark.parametrize("sizes", [(2, 5, 8), (2, 6, 9), (1, 5, 9)])
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_a_mask_of_other_sizes_is_refused(sizes, kind):
    """DeepSeek-V4 adds keys to those of its mask, if that is a tensor."""
    rows, T_q, T_k = sizes
    seen = torch.ones(rows, T_k, device=DEVICE)
    seen[0, 0] = 0
    pattern = getattr(masking_utils, f"{kind}_mask_function")
    where = {"q_length": T_q, "q_offset": T_k - T_q}
    expected = r"attention_mask: expected \[B, T_q, T_k\] = \[2, 5, 9\], got"
    for padding in (seen, None)[: 1 + (rows == 2)]:
        mask = huggingface.attention_mask(rows, T_k, pattern, padding, **where)
        with refused(ValueError, expected):
            call(mask)


@pytest.mark.parametrize("name", ["sinks", "output_attentions", "new"])
def test_what_is_not_known_to_be_harmless_is_refused_by_name(name):
    got, value = (r"\[4\]", torch.ones(4)) if name == "sinks" else ("4", 4)
    with refused(ValueError, f"{name}: expected None or False, got {got}; use 'eager'"):
        call(**{name: value})


def test_a_dropout_that_is_no_number_is_refused_by_name():
    with refused(TypeError, "dropout: expected a real number, got str"):
        call(dropout="a lot")


def test_dropout_in_training_is_that_of_eager(monkeypatch):
    """With the factors that the kernels draw, in float64 on the other side."""
    ids, rate = tokens(length=7), 0.25
    seed = torch.tensor([7], device=DEVICE)
    monkeypatch.setattr(checks, "seed_of", lambda *_: seed)

    def drop(x, p=0.5, training=True, inplace=False):
        if not (training and p):
            return x
        return x * reference_masks.kept(*x.shape, p, 7, x.device).to(x)

    def gradients(model):
        logits = model(ids).logits
        loss = logits.square().mean()
        return logits, *torch.autograd.grad(loss, list(model.parameters()))

    own = build(attention_dropout=rate)
    quiet, found = own(ids).logits, gradients(own.train())
    assert not torch.equal(quiet, found[0])
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", drop)
        model = build("eager", attention_dropout=rate, dtype=torch.float64)
        wanted = gradients(model.train())
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).abs().max() <= 1e-5 * y.abs().max()


@pytest.mark.parametrize("model", ["CodeGen", "XLNet", "Git"])
def test_a_model_with_attention_code_of_its_own_is_refused(model):
    """CodeGen would lose its mask, XLNet not use this attention; Git has both kinds."""
    message = f"attn_implementation: expected a model that reads .*, got {model}"
    with refused(ValueError, message):
        config = getattr(transformers, f"{model}Config")()
        with torch.device("meta"):  # the defaults are large
            transformers.AutoModel.from_config(config, attn_implementation="tiled")


@transformers_5
def test_a_mask_is_not_lost_where_a_part_of_a_model_uses_it():
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 40}
    config = transformers.BigBirdPegasusConfig(**sizes, attention_type="original_full")
    kind = transformers.AutoModel
    model = kind.from_config(config, attn_implementation="tiled").eval()
    with refused(
        ValueError, ".* got one that uses its mask itself; use 'eager' for it"
    ):
        model(tokens(length=5).cpu())


@pytest.mark.parametrize(
    "use",
    [
        operator.add,
        lambda scores, mask: scores.add_(mask),
        lambda scores, mask: scores.masked_fill(mask, 0.0),
        lambda scores, mask: scores.masked_fill(mask == 0, 0.0),
        lambda scores, mask: scores * (1.0 - mask),
        lambda scores, mask: mask[:, :, :, :2],
        lambda scores, mask: mask.to(scores.dtype),
        lambda scores, mask: torch.where(mask, scores, 0.0),
        lambda scores, mask: torch.nn.functional.scaled_dot_product_attention(
            scores, scores, scores, attn_mask=mask
        ),
    ],
)
def test_a_mask_is_no_tensor(use):
    with pytest.raises((ValueError, TypeError, AttributeError), match=r"(?i)mask"):
        use(torch.ones(1, 1, 2, 2), CAUSAL)


# A softmax that is not attention, or models of other files and of the package timm.
NOT_ATTENTION = {
    "chmv2",
    "pp_ocrv6_tiny_rec",
    "rag",
    "shieldgemma2",
    "superpoint",
    "timm_backbone",
    "timm_wrapper",
    "vision_text_dual_encoder",
}


@transformers_5
def test_attention_is_recognized_in_every_file_of_models():
    """A file that computes attention reads the table, or its models are refused."""
    computes = r"softmax\(|Softmax\(|scaled_dot_product_attention|MultiheadAttention"
    own, unknown = [], set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        source = path.read_text()
        if "ALL_ATTENTION_FUNCTIONS" in source:
            continue
        if re.search(r"^class \w*Attention\w*\(nn\.Module\)", source, re.M):
            own.append(f"transformers.models.{path.parent.name}.{path.stem}")
        elif re.search(computes, source):
            unknown.add(path.parent.name)
    assert unknown == NOT_ATTENTION, "read these files: do they compute attention?"
    for name in sorted(own)[::8]:  # an import takes a tenth of a second
        module = importlib.import_module(name)
        models = [
            x
            for x in vars(module).values()
            if isinstance(x, type)
            and issubclass(x, transformers.PreTrainedModel)
            and x.__module__ == name
        ]
        assert models and all(map(huggingface._has_own_attention, models))


def test_a_model_of_the_callers_own_inherits_the_attention_of_its_base(monkeypatch):
    """Its file may have attention for something else, here a pooling of rows."""

    def made(name, base, pools):
        module = types.ModuleType(name)
        module.Own = type("Own", (base,), {"__module__": name})
        if pools:
            about = {"__module__": name}
            module.AttentionPooling = type("Pooling", (torch.nn.Module,), about)
        monkeypatch.setitem(sys.modules, name, module)
        return module.Own

    bases = transformers.LlamaModel, transformers.CodeGenModel
    found = [made(x.__name__, x, pools=x is bases[0]) for x in bases]
    found.append(made("two", made("three", transformers.PreTrainedModel, True), False))
    assert [*map(huggingface._has_own_attention, found)] == [False, True, True]


TAKEN = "name: expected a word that transformers does not use"
NO_FLASH = "name: expected one without 'flash' in it, got 'flashlib'"
NAMES = [(ValueError, TAKEN, name) for name in ("sdpa", "two words", "")]
NAMES += [
    (ValueError, NO_FLASH, "flashlib"),
    (TypeError, "name: expected a string, got int", 3),
]


@pytest.mark.parametrize("error, message, name", NAMES)
def test_a_name_that_transformers_takes_for_another_is_refused(error, message, name):
    with refused(error, message):
        huggingface.register(name)


def test_transformers_that_is_missing_or_old_is_named(monkeypatch):
    old = types.ModuleType("transformers")
    old.__version__ = "4.48.3"
    monkeypatch.setitem(sys.modules, "transformers", old)
    message = r"transformers 4\.53 or later is needed, found 4\.48\.3"
    with pytest.raises(ImportError, match=message):
        huggingface.register()
    monkeypatch.setitem(sys.modules, "transformers", None)  # Python then refuses it
    with pytest.raises(ImportError, match="transformers is not installed"):
        huggingface.register()


def test_the_recipe_of_the_book_runs():
    page = (ROOT / "book/how-to-run.md").read_text()
    _, section = page.split("## In a Hugging Face transformers model")
    (recipe,) = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.S)
    names = {}
    with torch.device(DEVICE):
        exec(recipe, names)
    logits = names["logits"]
    assert logits.shape == (1, 64, 256) and bool(torch.isfinite(logits).all())


# -- flashlib.LatentAttention in a model


def latent_attention(module, dtype):
    """A ``flashlib.LatentAttention`` with the weights of DeepSeek-V3's layer."""
    c = module.config
    layer = flashlib.LatentAttention(
        c.hidden_size, c.num_attention_heads, d_c=c.kv_lora_rank,
        d_n=c.qk_nope_head_dim, d_r=c.qk_rope_head_dim, d_v=c.v_head_dim,
        d_q=c.q_lora_rank, rotary_base=c.rope_parameters["rope_theta"],
        scale=module.scaling, device=DEVICE, dtype=dtype,
    )  # fmt: skip
    both = module.kv_b_proj.weight.mT.unflatten(1, (layer.num_heads, -1))
    w_k, w_v = both.split([c.qk_nope_head_dim, c.v_head_dim], dim=2)
    weights = {
        "w_a": module.q_a_proj.weight.mT, "norm_q": module.q_a_layernorm.weight,
        "w_q": module.q_b_proj.weight.mT, "w_c": module.kv_a_proj_with_mqa.weight.mT,
        "norm_c": module.kv_a_layernorm.weight, "w_k": w_k.flatten(1),
        "w_v": w_v.flatten(1), "w_o": module.o_proj.weight.mT,
    }  # fmt: skip
    layer.load_state_dict(weights)
    return layer


class InModel(torch.nn.Module):
    """The layer where a model has its own, perhaps with a cache in pages."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.cached = layer, ()

    def forward(self, hidden_states, **_):
        return self.layer(hidden_states, *self.cached), None


def with_latent_attention(dtype=torch.float32):
    model = build("eager", "DeepseekV3", dtype, **MODELS["DeepseekV3"])
    for block in model.model.layers:
        block.self_attn = InModel(latent_attention(block.self_attn, dtype))
    return model


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_with_latents_gives_the_logits_and_gradients_of_eager(dtype):
    ids = tokens(length=SMALL)

    def gradients(model):
        """Logits, and the gradients of the layers' weights in one order."""
        logits = model(ids, use_cache=False).logits
        logits.sin().sum().backward()
        found = []
        for block in model.model.layers:
            module = block.self_attn
            if isinstance(module, InModel):
                x = module.layer
                by_head = [
                    w.grad.unflatten(1, (x.num_heads, -1)) for w in (x.w_k, x.w_v)
                ]
                found += [w.grad for w in (x.w_a, x.w_q, x.w_c, x.w_o, x.norm_c)]
                found += [torch.cat(by_head, dim=2).flatten(1)]
            else:
                names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
                found += [getattr(module, name).weight.grad.mT for name in names]
                found += [module.kv_a_layernorm.weight.grad]
                found += [module.kv_b_proj.weight.grad.mT]
        return [
            logits.detach().double(),
            torch.cat([g.flatten().double() for g in found]),
        ]

    eager = build("eager", "DeepseekV3", dtype, **MODELS["DeepseekV3"])
    exact = build("eager", "DeepseekV3", dtype, **MODELS["DeepseekV3"]).double()
    found = gradients(with_latent_attention(dtype)), gradients(eager), gradients(exact)
    assert_as_precise(*found, dtype)


def test_a_layer_with_latents_in_pages_generates_the_same_tokens():
    """Of prompts of two lengths, in pieces: expanded first, then absorbed."""
    model = with_latent_attention()
    eager = build("eager", "DeepseekV3", **MODELS["DeepseekV3"])
    taken = []
    for block in model.model.layers:
        layer = block.self_attn.layer
        for way in ("_expanded", "_absorbed"):
            call = getattr(layer, way)

            def noted(*arguments, way=way, call=call):
                taken.append(way)
                return call(*arguments)

            setattr(layer, way, noted)
        cache = PagedLatentCache(8, 16, 32, 16, device=DEVICE)
        block.self_attn.cached = cache, [cache.new() for _ in range(B)]
    ids, more = tokens(length=SMALL), 4
    with torch.no_grad():
        wanted = eager.generate(ids, max_new_tokens=more, do_sample=False)
        step = ids
        for _ in range(more):
            logits = model(step, use_cache=False).logits
            step = logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, step], dim=1)
    assert torch.equal(ids, wanted)
    first = ["_expanded"] * B * 2  # each sequence of two layers
    assert taken == [*first, *["_absorbed"] * (more - 1) * 2]
