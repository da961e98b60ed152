"""ALiBi, KERPLE, T5, Sandwich: values, golden slopes, shapes of decay, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bampath.positions import Geometry, parse
from bampath.positions.alibi import alibi_slopes
from bampath.positions.t5 import bucket_starts
from tests.helpers import x64
from tests.positions import oracles

GEOMETRY = Geometry(dim=16, heads=4, kv_heads=2, head_dim=8, train_length=32)

# ALiBi's slopes as powers of two: GOLDEN[H] lists -log2(slope).
GOLDEN = {
    1: [8],
    2: [4, 8],
    3: [4, 8, 2],
    4: [2, 4, 6, 8],
    5: [2, 4, 6, 8, 1],
    6: [2, 4, 6, 8, 1, 3],
    7: [2, 4, 6, 8, 1, 3, 5],
    8: [1, 2, 3, 4, 5, 6, 7, 8],
    9: [1, 2, 3, 4, 5, 6, 7, 8, 0.5],
    12: [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5],
    16: [0.5 * h for h in range(1, 17)],
    20: [0.5 * h for h in range(1, 17)] + [0.25, 0.75, 1.25, 1.75],
    24: [0.5 * h for h in range(1, 17)] + [0.25 + 0.5 * h for h in range(8)],
    32: [0.25 * h for h in range(1, 33)],
    40: [0.25 * h for h in range(1, 33)] + [0.125 + 0.25 * h for h in range(8)],
    48: [0.25 * h for h in range(1, 33)] + [0.125 + 0.25 * h for h in range(16)],
    64: [0.125 * h for h in range(1, 65)],
}


@pytest.mark.parametrize("heads", sorted(GOLDEN))
def test_golden_slopes(heads):
    np.testing.assert_allclose(alibi_slopes(heads), [2.0**-e for e in GOLDEN[heads]], rtol=1e-15)
    got = parse("alibi").log_prior({}, np.arange(3), np.arange(3), heads=heads)
    np.testing.assert_allclose(got[:, 2, 0], [-2 * 2.0**-e for e in GOLDEN[heads]], rtol=1e-6)


def test_slopes_are_distinct_and_counted():
    for heads in range(1, 130):
        slopes = alibi_slopes(heads)
        assert len(set(slopes)) == heads
        assert all(0 < slope < 1 for slope in slopes)
    with pytest.raises(ValueError, match="heads=0"):
        alibi_slopes(0)


def _prior(spec, params, d):
    """log π of one head at signed distances d, from its learned parameters."""
    part = parse(spec).at(0).parts[-1]
    one_head = part.prior_params({name: value[None] for name, value in params.items()}, 1)
    return part.log_prior(jax.tree.map(lambda leaf: leaf[0], one_head), d)


FORMS = {
    "alibi(trainable=true)": (oracles.alibi, ["log_slopes"]),
    "kerple": (oracles.kerple_log, ["log_r1", "log_r2"]),
    "kerple(power)": (oracles.kerple_power, ["log_r1", "logit_p"]),
}


@pytest.mark.parametrize("spec", sorted(FORMS))
def test_values_and_gradients_against_float64(spec):
    formula, names = FORMS[spec]
    rng = np.random.default_rng(3)
    d = np.asarray([-900, -77, -4, -1, 0, 3], np.int32)
    for _ in range(4):
        at = rng.normal(size=len(names)) * 0.7
        single = {name: jnp.asarray(v, jnp.float32) for name, v in zip(names, at, strict=True)}
        np.testing.assert_allclose(_prior(spec, single, d), formula(d, *at), rtol=2e-5, atol=1e-6)
        with x64():
            double = {name: jnp.asarray(v, jnp.float64) for name, v in zip(names, at, strict=True)}
            got = jax.jacobian(lambda p: _prior(spec, p, d))(double)
            for k, name in enumerate(names):
                step = np.eye(len(names))[k] * 1e-6
                slope = (formula(d, *(at + step)) - formula(d, *(at - step))) / 2e-6
                np.testing.assert_allclose(got[name], slope, rtol=1e-6, atol=1e-7, err_msg=f"{spec} {name}")


@pytest.mark.parametrize("spec", [*sorted(FORMS), "bam(mu=trainable)"])
def test_gradients_are_finite_at_the_query_itself(spec):
    part = parse(spec).at(0).parts[-1]
    params = {name: jnp.float32(0.0) for name in part.parameters(GEOMETRY)}
    with jax.debug_nans(True):
        gradient = jax.grad(lambda p: _prior(spec, p, np.zeros(1, np.int32)).sum())(params)
    assert all(np.isfinite(leaf) for leaf in gradient.values())


@given(st.sampled_from([*sorted(FORMS), "bam(mu=trainable)"]), st.lists(st.floats(-2, 2), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None)
def test_decaying_priors_are_highest_at_their_centre_and_fall(spec, values):
    part = parse(spec).at(0).parts[-1]
    params = {name: jnp.float32(v) for name, v in zip(part.parameters(GEOMETRY), values, strict=False)}
    if "theta_beta" in params:
        params["theta_beta"] = jnp.abs(params["theta_beta"]) + 0.01
        params["theta_mu"] = jnp.float32(0)
    d = np.arange(-300, 301, dtype=np.int32)
    value = np.asarray(_prior(spec, params, d), np.float64)
    assert np.argmax(value) == 300
    assert np.all(np.diff(value[300:]) <= 1e-6 * np.abs(value[300:-1]) + 1e-12)
    np.testing.assert_allclose(value, value[::-1], rtol=1e-6)


@pytest.mark.parametrize(
    "spec", ["t5", "t5(buckets=8)", "t5(max_distance=64)", "t5(bidirectional=true)", "t5(buckets=5,max_distance=9)"]
)
def test_t5_buckets_against_the_formula(spec):
    part = parse(spec).at(0).parts[-1]
    d = np.arange(-400, 401, dtype=np.int32)
    table = np.random.default_rng(0).normal(size=(1, part.buckets)).astype(np.float32)
    got = np.asarray(_prior(spec, {"table": jnp.asarray(table[0])}, d))
    bucket = oracles.t5_bucket(d, part.buckets, part.max_distance, part.bidirectional)
    np.testing.assert_array_equal(got, table[0][bucket])


def test_t5_known_buckets():
    """The first distances of the 32 causal buckets, worked out by hand from 16 · 8^(k/16)."""
    starts = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert bucket_starts(32, 128) == starts


def test_t5_table_gradient_counts_pairs():
    counts = jax.grad(lambda t: _prior("t5(buckets=8)", {"table": t}, -np.arange(200, dtype=np.int32)).sum())(
        jnp.zeros(8)
    )
    bucket = oracles.t5_bucket(-np.arange(200), 8, 128, False)
    np.testing.assert_array_equal(counts, np.bincount(bucket, minlength=8))


def test_t5_refuses_another_table():
    with pytest.raises(ValueError, match=r"table has shape \(2, 16\).*32"):
        parse("t5").log_prior({"table": jnp.zeros((2, 16))}, jnp.arange(2), jnp.arange(2))


def test_sandwich_is_an_inner_product_of_sinusoids():
    at = np.asarray([0, 1, 5, 200, 100_000], np.int32)
    got = parse("sandwich(16)").log_prior({}, at[-1:], at, heads=3)
    want = [oracles.sandwich(at - at[-1], head, 3, 16) for head in (1, 2, 3)]
    np.testing.assert_allclose(got[:, 0], want, atol=2e-5)


def test_starts():
    key = jax.random.key(0)
    big = Geometry(dim=64, heads=400, kv_heads=400, head_dim=8)
    kerple = parse("kerple").init_params(key, big)["kerple"]
    assert np.all((np.exp(kerple["log_r1"]) > 0.0099) & (np.exp(kerple["log_r1"]) < 2))
    assert np.exp(kerple["log_r1"]).mean() == pytest.approx(1, abs=0.1)
    assert np.exp(kerple["log_r2"]).mean() == pytest.approx(0.5, abs=0.06)
    power = parse("kerple(power)").init_params(key, big)["kerple"]
    assert (2 * jax.nn.sigmoid(power["logit_p"])).mean() == pytest.approx(1, abs=0.1)
    assert parse("t5").init_params(key, big)["t5"]["table"].std() == pytest.approx(1 / 8, rel=0.05)
    slopes = parse("alibi(trainable=true)").init_params(key, GEOMETRY)["alibi"]["log_slopes"]
    np.testing.assert_allclose(np.exp(slopes), alibi_slopes(4), rtol=1e-6)
