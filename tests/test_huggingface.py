"""A small model of Hugging Face transformers with this library's attention: the same logits, gradients and
tokens as with its own, and a refusal by name of what cannot be honoured.
"""

import builtins
import pathlib
import re
import sys
import types

import pytest
import torch
from cases import CUDA, DEVICE

import flashlib
from flashlib import huggingface, testing
from flashlib.reference import standard as reference

transformers = pytest.importorskip("transformers", minversion="4.53")

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
    built = getattr(transformers, f"{model}ForCausalLM")._from_config(config, attn_implementation=attention)
    assert built.config._attn_implementation == attention
    return built.eval().to(device=DEVICE, dtype=dtype)


def tokens(rows=B, length=T):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def in_float64(dtype=torch.float32):
    """The same weights in a model that computes in float64 throughout; transformers' own norm drops to
    float32.
    """
    model = build("sdpa", dtype=dtype).double()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                norm = torch.nn.RMSNorm(child.weight.shape, child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model


def logits_and_gradients(model, ids, weights):
    """Logits ``[B, T, vocabulary]`` and the gradients of their weighted sum by parameter, in float64."""
    logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    (logits.double() * weights).sum().backward()
    return logits.detach().double(), {name: p.grad.double() for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------------ what must be the same


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_and_gradients_are_those_of_its_own_attention(dtype):
    """Over the budget of ``flashlib.testing``: PyTorch's error is the worse of eager and sdpa."""
    ids = tokens()
    weights = torch.randn(B, T, VOCABULARY, generator=torch.Generator().manual_seed(2)).double().to(DEVICE)
    wanted, wanted_gradients = logits_and_gradients(in_float64(dtype), ids, weights)
    logits, gradients = logits_and_gradients(build(dtype=dtype), ids, weights)
    theirs = [logits_and_gradients(build(name, dtype=dtype), ids, weights) for name in ("sdpa", "eager")]
    eps = torch.finfo(dtype).eps

    def judge(name, got, others, exact, factor):
        assert torch.isfinite(got).all(), name
        error, other = (testing.rms(x - exact) for x in (got, torch.stack(others)))
        budget = factor * other.amax(dim=0) + eps * testing.rms(exact)
        assert (error <= budget).all(), f"{name}: {(error / budget).max():.3g} times its budget"

    judge("logits", logits, [x for x, _ in theirs], wanted, testing.OUTPUT_FACTOR)
    for name, exact in wanted_gradients.items():
        others = [x[name] for _, x in theirs]
        flat = [x.flatten() for x in (gradients[name], *others, exact)]
        judge(name, flat[0], flat[1:-1], flat[-1], testing.GRADIENT_FACTOR)
    assert len(gradients) > 10 and all(bool(x.any()) for x in gradients.values())


def test_generation_with_a_cache_gives_the_same_tokens():
    ids = tokens(length=7)
    ours, theirs = (
        build(name).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        for name in ("tiled", "sdpa")
    )
    assert ours.shape == (B, 13) and torch.equal(ours, theirs)


def test_a_prompt_in_pieces_is_the_prompt():
    """With keys in the cache the mask is aligned to the bottom right corner."""
    ids, model = tokens(), build()
    whole = model(ids).logits
    start = model(ids[:, :8], use_cache=True)
    rest = model(ids[:, 8:], past_key_values=start.past_key_values, use_cache=True).logits
    exact = in_float64()(ids).logits
    pieces = torch.cat([start.logits, rest], dim=1)
    error, other = testing.rms(pieces - exact), testing.rms(whole - exact)
    floor = torch.finfo(torch.float32).eps * testing.rms(exact)
    assert (error <= testing.OUTPUT_FACTOR * other.amax() + floor).all()


class Layer(torch.nn.Module):
    """What an attention function sees of the layer that calls it."""

    def __init__(self, is_causal=True):
        super().__init__()
        self.is_causal = is_causal


def call(mask=None, T_q=5, T_k=9, layer_is_causal=True, **arguments):
    q, k, v = testing.make_qkv(2, 4, T_q, 16, T_k=T_k, H_kv=2, d_v=24, device=DEVICE, layout="transposed")
    o, nothing = huggingface.attention_forward(Layer(layer_is_causal), q, k, v, mask, **arguments)
    assert nothing is None and o.shape == (2, T_q, 4, 24) and o.is_contiguous()
    return q, k, v, o.transpose(1, 2)


@pytest.mark.parametrize("T_q", [1, 5, 9])
@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize(
    "layer, given, causal", [(True, None, True), (False, None, False), (True, False, False)]
)
def test_scale_and_causality_are_honoured(T_q, scaling, layer, given, causal):
    harmless = {"position_ids": 1, "use_cache": True, "softcap": None, "output_attentions": False}
    q, k, v, o = call(T_q=T_q, layer_is_causal=layer, is_causal=given, scaling=scaling, **harmless)
    assert torch.equal(o, flashlib.attention(q, k, v, causal=causal, scale=scaling))
    testing.assert_within_budget(q, k, v, o.contiguous(), causal=causal, scale=scaling)


def test_a_mask_that_says_nothing_new_is_honoured():
    causal = reference.causal_mask(5, 9, DEVICE)
    additive = torch.zeros(2, 1, 5, 9, device=DEVICE).masked_fill(~causal, torch.finfo(torch.float32).min)
    plain = call()[-1]
    assert torch.equal(call(mask=causal.expand(2, 1, 5, 9))[-1], plain)
    assert torch.equal(call(mask=additive)[-1], plain)
    full = call(layer_is_causal=False)[-1]
    assert torch.equal(call(mask=torch.ones_like(causal))[-1], full) and not torch.equal(plain, full)


# ------------------------------------------------------------------------------------ what is refused


def off_by_one():
    return reference.causal_mask(5, 9, DEVICE).roll(1, dims=1)


@pytest.mark.parametrize(
    "mask",
    [
        off_by_one,
        lambda: off_by_one().float().log(),
        lambda: -0.5 * (~reference.causal_mask(5, 9, DEVICE)).float(),  # a bias hides nothing
        lambda: reference.causal_mask(5, 12, DEVICE),
        lambda: torch.ones(2, 9, dtype=torch.bool, device=DEVICE),
    ],
    ids=["boolean", "additive", "bias", "longer", "padding"],
)
def test_another_mask_is_refused(mask):
    with pytest.raises(ValueError, match="attention_mask: expected None, the plain causal mask"):
        call(mask=mask())


UNKNOWN = (
    "sliding_window",
    "softcap",
    "s_aux",
    "sinks",
    "position_bias",
    "head_mask",
    "cu_seq_lens_q",
    "new",
)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_to_be_harmless_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}: this attention function cannot honour it"):
        call(**{name: torch.ones(4) if name == "s_aux" else 4})


def test_dropout_is_refused():
    with pytest.raises(ValueError, match=r"dropout: expected 0, got 0\.1"):
        call(dropout=0.1)
    model, ids = build(attention_dropout=0.25), tokens(length=5)
    model(ids)
    with pytest.raises(ValueError, match=r"dropout: expected 0, got 0\.25; set attention_dropout=0"):
        model.train()(ids)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_refused(side):
    ids, seen = tokens(length=6), torch.ones(B, 6, dtype=torch.long, device=DEVICE)
    model = build()
    model(ids, attention_mask=seen)
    seen[1, 0 if side == "left" else -1] = 0
    with pytest.raises(ValueError, match="attention_mask: expected no padding"):
        model(ids, attention_mask=seen)
    with pytest.raises(ValueError, match="attention_mask: expected no padding"):
        model.generate(ids, attention_mask=seen, max_new_tokens=2, do_sample=False)


def test_models_with_other_patterns_are_refused():
    ids = tokens(length=6)
    with pytest.raises(ValueError, match="mask_function: expected plain causal or bidirectional"):
        build(model="Mistral", sliding_window=4)(ids)
    build(model="Mistral", sliding_window=None)(ids)
    with pytest.raises(ValueError, match="mask_function: expected plain causal or bidirectional"):
        build()(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]], device=DEVICE), use_cache=False)
    with pytest.raises(ValueError, match="output_attentions: this attention function cannot honour it"):
        call(output_attentions=True)


def test_a_static_cache_is_refused():
    with pytest.raises(ValueError, match="past_key_values: expected a cache that ends with the last query"):
        build().generate(tokens(length=6), max_new_tokens=3, do_sample=False, cache_implementation="static")


def test_heads_that_are_too_narrow_are_refused_by_the_library():
    with pytest.raises(ValueError, match="q: expected a head dimension from 16 to 256"):
        build(hidden_size=32)(tokens(length=5))


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "two words", ""])
def test_a_name_in_use_is_refused(name):
    with pytest.raises(ValueError, match="name: expected a word that transformers does not use"):
        huggingface.register(name)


def test_a_name_that_transformers_takes_for_another_package_is_refused():
    with pytest.raises(ValueError, match="name: expected one without 'flash' in it, got 'flashlib'"):
        huggingface.register("flashlib")
    with pytest.raises(TypeError, match="name: expected a string, got int"):
        huggingface.register(3)


def test_transformers_that_is_missing_or_old_is_named(monkeypatch):
    old = types.ModuleType("transformers")
    old.__version__ = "4.48.3"
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(ImportError, match=r"transformers 4\.53 or later is needed, found 4\.48\.3"):
        huggingface.register()
    monkeypatch.delitem(sys.modules, "transformers")
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="transformers is not installed"):
        huggingface.register()


def test_the_recipe_of_the_book_runs():
    page = (pathlib.Path(__file__).resolve().parent.parent / "book/how-to-run.md").read_text()
    section = page.split("## In a model of Hugging Face transformers")[1].split("\n## ")[0]
    (recipe,) = re.findall(r"```python\n(.*?)```", section, re.S)
    names = {}
    with torch.device(DEVICE):
        exec(recipe, names)
    assert names["logits"].shape == (1, 64, 256) and bool(torch.isfinite(names["logits"]).all())
