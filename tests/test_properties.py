"""Properties of attention on random sizes, the same in every run."""

import pytest
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
@hypothesis.given(sizes(), st.booleans(), st.booleans(), st.none() | st.floats(-2, 2))
def test_any_sizes_are_within_the_budget(sizes, causal, deterministic, scale):
    """Both passes, with gradients through the log-sum-exp."""
    q, k, v = testing.make_qkv(**sizes, device=DEVICE)
    number = reference.default_scale(q.shape[3]) if scale is None else scale
    o, lse = flash2.forward(q, k, v, causal, number)
    options = {"causal": causal, "scale": scale}
    testing.assert_within_budget(q, k, v, o, lse, **options)
    changed = {"d": v.shape[3], "seed": sizes["seed"] + 1}
    do, _, _ = testing.make_qkv(**sizes | changed, device=DEVICE)
    given = (q, k, v, o, lse, do, do[..., 0], causal, number, deterministic)
    found = backward.backward(*given)
    options["dlse"] = do[..., 0]
    testing.assert_gradients_within_budget(q, k, v, do, *found, **options)
