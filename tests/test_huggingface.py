"""A small model of Hugging Face transformers with this library's attention: the same
logits, gradients and tokens as with its own, and a refusal by name of what cannot be
honored.
"""

import re
import sys
import types

import pytest
import torch
from cases import CUDA, DEVICE, ROOT, refused

import flashlib
from flashlib import huggingface, testing
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
    "num_key_value_heads": 2,  # two query heads share a key head, and nothing is repeated
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
    kind = transformers.AutoModelForCausalLM
    built = kind.from_config(config, attn_implementation=attention)
    assert built.config._attn_implementation == attention
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
    "GPT2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
# Gemma 2 has everything; make test-all runs the others.
OTHERS = [x for x in MODELS if x != "Gemma2"]
RUN = ["Gemma2", *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)]
SMALL = 13


PACKED = [slice(5), slice(5, 6), slice(6, SMALL)]
# Where the sequences of each row are.
PIECES = {
    "whole": [[slice(SMALL)], [slice(SMALL)]],
    "left": [[slice(SMALL)], [slice(4, SMALL)]],
    "both": [[slice(3, SMALL)], [slice(SMALL - 4)]],
    "packed": [PACKED, PACKED],
}


def padded(how):
    seen = torch.zeros(B, SMALL, dtype=torch.long, device=DEVICE)
    for row, (part,) in zip(seen, PIECES[how], strict=True):
        row[part] = 1
    return seen


def packed_places():
    lengths = [part.stop - (part.start or 0) for part in PACKED]
    return torch.cat([torch.arange(n, device=DEVICE) for n in lengths])[None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", RUN)
@pytest.mark.parametrize("how", ["whole", "both", "packed"])
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

    results = run("tiled"), run("eager"), run("eager", alone=True)
    factors = testing.OUTPUT_FACTOR, testing.GRADIENT_FACTOR
    for ours, theirs, exact, factor in zip(*results, factors, strict=True):
        error, other = (testing.rms((x - exact).flatten()) for x in (ours, theirs))
        floor = torch.finfo(dtype).eps * testing.rms(exact.flatten())
        assert error <= factor * other + floor


@pytest.mark.parametrize("model", RUN)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_padded_batches_generate_the_same_tokens(model, cache):
    options = {"max_new_tokens": 2, "do_sample": False, "disable_compile": True}
    options |= {"attention_mask": padded("left"), "cache_implementation": cache}
    models = (build(name, model, **MODELS[model]) for name in ("tiled", "eager"))
    ours, theirs = (m.generate(tokens(length=SMALL), **options) for m in models)
    assert ours.shape == (B, SMALL + 2) and torch.equal(ours, theirs)


def test_free_space_of_a_static_cache_is_no_key():
    causal = masking_utils.causal_mask_function
    seen = huggingface.attention_mask(2, 9, causal, q_length=3, q_offset=4)
    assert torch.equal(seen, torch.ones(2, 7, dtype=torch.int32))


def test_it_trains_under_autocast():
    model, ids = build().train(), tokens(length=SMALL)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_a_model_without_a_mask_compiles():
    model, ids = build(num_hidden_layers=1), tokens(length=SMALL)
    compiled = torch.compile(model, backend="eager")
    for places in (None, packed_places()):
        given = {"position_ids": places, "use_cache": False}
        assert torch.equal(compiled(ids, **given).logits, model(ids, **given).logits)


def call(mask=None, T_q=5, T_k=9, layer_is_causal=True, **arguments):
    sizes = {"T_k": T_k, "H_kv": 2, "d_v": 24}
    q, k, v = testing.make_qkv(2, 4, T_q, 16, device=DEVICE, **sizes)
    layer = torch.nn.Module()
    layer.is_causal = layer_is_causal
    o, nothing = huggingface.attention_forward(layer, q, k, v, mask, **arguments)
    assert nothing is None and o.shape == (2, T_q, 4, 24) and o.is_contiguous()
    return q, k, v, o.transpose(1, 2)


@pytest.mark.parametrize("T_q, scaling", [(1, None), (5, 0.7)])
@pytest.mark.parametrize(
    "layer, given, causal",
    [(True, None, True), (False, None, False), (True, False, False)],
)
def test_scale_and_causality_are_honoured(T_q, scaling, layer, given, causal):
    harmless = {"position_ids": 1, "use_cache": True, "softcap": None, "sinks": False}
    options = {"is_causal": given, "scaling": scaling, **harmless}
    q, k, v, o = call(T_q=T_q, layer_is_causal=layer, **options)
    assert torch.equal(o, flashlib.attention(q, k, v, causal=causal, scale=scaling))


def test_a_mask_that_says_nothing_new_is_honoured():
    causal = reference.causal_mask(5, 9, DEVICE)
    least = torch.finfo(torch.float32).min
    additive = torch.zeros(2, 1, 5, 9, device=DEVICE).masked_fill(~causal, least)
    plain = call()[-1]
    assert torch.equal(call(mask=causal.expand(2, 1, 5, 9))[-1], plain)
    assert torch.equal(call(mask=additive)[-1], plain)
    full = call(layer_is_causal=False)[-1]
    assert torch.equal(call(mask=torch.ones_like(causal))[-1], full)
    assert not torch.equal(plain, full)


# --


def off_by_one():
    return reference.causal_mask(5, 9, DEVICE).roll(1, dims=1)


@pytest.mark.parametrize(
    "mask",
    [
        off_by_one,
        lambda: off_by_one().float().log(),
        lambda: -0.5 * (~reference.causal_mask(5, 9, DEVICE)).float(),  # hides nothing
        lambda: reference.causal_mask(5, 12, DEVICE),
        lambda: torch.ones(2, 9, dtype=torch.bool, device=DEVICE),
    ],
    ids=["boolean", "additive", "bias", "longer", "padding"],
)
def test_another_mask_is_refused(mask):
    with refused(ValueError, "attention_mask: expected None, the plain causal mask"):
        call(mask=mask())


@pytest.mark.parametrize("name", ["s_aux", "output_attentions", "new"])
def test_what_is_not_known_to_be_harmless_is_refused_by_name(name):
    with refused(ValueError, f"{name}: this attention function cannot honor it"):
        call(**{name: torch.ones(4) if name == "s_aux" else 4})


def test_dropout_is_refused():
    with refused(ValueError, r"dropout: expected 0, got 0\.1"):
        call(dropout=0.1)
    model, ids = build(attention_dropout=0.25), tokens(length=5)
    model(ids)
    message = r"dropout: expected 0, got 0\.25; set attention_dropout=0"
    with refused(ValueError, message):
        model.train()(ids)


def test_padding_between_tokens_is_refused():
    ids, seen = tokens(length=6), torch.ones(B, 6, dtype=torch.long, device=DEVICE)
    seen[1, 3] = 0
    with refused(ValueError, "attention_mask: expected padding at the ends of rows"):
        build()(ids, attention_mask=seen)


def test_models_with_other_patterns_are_refused():
    def prefix(batch, head, q, k):
        return k < 3

    pattern = masking_utils.or_masks(masking_utils.causal_mask_function, prefix)
    with refused(ValueError, "mask_function: expected .*, got or_masks"):
        huggingface.attention_mask(1, 6, pattern, q_length=6)
    with refused(ValueError, "sliding_window: expected causal attention"):
        call(layer_is_causal=False, sliding_window=4)


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
