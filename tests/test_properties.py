"""Properties of attention on sizes that nobody chose; the examples are the same in
every run.
"""

import pytest
import torch
from cases import DEVICE, import_hypothesis

from flashlib import testing
from flashlib.kernels import backward, flash2
from flashlib.reference import standard as reference

hypothesis = import_hypothesis()
st = hypothesis.strategies

settings = hypothesis.settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
pytestmark = pytest.mark.usefixtures("nan_filled")


@st.composite
def sizes(draw):
    H_kv = draw(st.integers(1, 3))
    return {
        "B": draw(st.integers(1, 2)),
        "H": H_kv * draw(st.integers(1, 3)),
        "H_kv": H_kv,
        "T_q": draw(st.integers(1, 70)),
        "T_k": draw(st.integers(0, 70)),
        "d": draw(st.integers(16, 80)),
        "d_v": draw(st.integers(16, 80)),
        "layout": draw(st.sampled_from(testing.LAYOUTS)),
        "magnitude": draw(st.sampled_from((1e-3, 1.0, 60.0))),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@settings
@hypothesis.given(sizes(), st.booleans(), st.none() | st.floats(-2, 2))
def test_any_sizes_are_within_the_budget(sizes, causal, scale):
    q, k, v = testing.make_qkv(**sizes, device=DEVICE)
    number = reference.default_scale(q.shape[3]) if scale is None else scale
    o, lse = flash2.forward(q, k, v, causal, number)
    testing.assert_within_budget(q, k, v, o, lse, causal=causal, scale=scale)


@hypothesis.settings(settings, max_examples=8)
@hypothesis.given(sizes(), st.booleans(), st.booleans())
def test_any_gradients_are_within_the_budget(sizes, causal, deterministic):
    q, k, v = testing.make_qkv(**sizes, device=DEVICE)
    do, _, _ = testing.make_qkv(
        **{**sizes, "d": v.shape[3], "seed": sizes["seed"] + 1}, device=DEVICE
    )
    dlse = do[..., 0]
    scale = reference.default_scale(q.shape[3])
    o, lse = flash2.forward(q, k, v, causal, scale)
    found = backward.backward(q, k, v, o, lse, do, dlse, causal, scale, deterministic)
    testing.assert_gradients_within_budget(
        q, k, v, do, *found, causal=causal, dlse=dlse
    )


@settings
@hypothesis.given(sizes(), st.randoms(use_true_random=False))
def test_the_order_of_the_keys_does_not_matter(sizes, random):
    """The permuted problem is judged against the oracle of the first one."""
    q, k, v = testing.make_qkv(**sizes, device=DEVICE)
    order = list(range(k.shape[2]))
    random.shuffle(order)
    o, lse = flash2.forward(
        q, k[:, :, order], v[:, :, order], False, reference.default_scale(q.shape[3])
    )
    testing.assert_within_budget(q, k, v, o, lse)


@settings
@hypothesis.given(sizes(), st.integers(0, 70))
def test_two_parts_of_the_keys_merge_into_the_whole(sizes, cut):
    """With the weights exp(L - max L)."""
    q, k, v = testing.make_qkv(**sizes, device=DEVICE)
    scale = reference.default_scale(q.shape[3])
    parts = [(k[:, :, :cut], v[:, :, :cut]), (k[:, :, cut:], v[:, :, cut:])]
    outputs, logs = zip(
        *(flash2.forward(q, *part, False, scale) for part in parts), strict=True
    )
    lse = torch.logsumexp(torch.stack(logs).double(), dim=0)
    weights = [torch.exp(x.double() - lse).nan_to_num(0.0)[..., None] for x in logs]
    merged = sum(w * x.double() for w, x in zip(weights, outputs, strict=True))
    testing.assert_within_budget(q, k, v, merged.float(), lse.float())
