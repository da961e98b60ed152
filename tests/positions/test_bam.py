"""GGD-BAM: the values of the authors' parameterisation, its gradients, its options, its guards."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bampath.positions import Geometry, parse
from bampath.positions.alibi import alibi_slopes
from bampath.positions.bam import EPS, ggd_log_prior
from tests.helpers import x64
from tests.positions import oracles

GEOMETRY = Geometry(dim=16, heads=4, kv_heads=2, head_dim=8, train_length=32)


def bias(alpha, beta, distances, theta_mu=None, spec="bam"):
    """The prior of one head at i - j = distances, through the public entry."""
    params = {"theta_alpha": alpha, "theta_beta": beta} | ({} if theta_mu is None else {"theta_mu": theta_mu})
    keys = -np.asarray(distances, np.int32)
    return np.asarray(parse(spec).log_prior(params, np.zeros(1, np.int32), keys))[0, 0]


@pytest.mark.parametrize(
    ("theta", "distances", "expected"),
    [
        ((0.0, 1.0, 0.0), [0, 1, 2, 512], [-0.00001, -1.00001, -2.00001, -512.00001]),
        ((0.0, -1.0, 0.0), [0, 1, 2, 10], [-1e5, -0.99999, -0.4999975, -0.0999999]),
        ((0.3, -0.7, 0.0), [0, 1, 10, 512], [-4268.63, -1.349849, -0.269332, -0.017132]),
        ((-1.0, 0.4, 0.2), [0, 1, 2, 512], [-0.255676, -0.421201, -0.522377, -4.462211]),
        ((0.0, 0.0, 0.0), [0, 1, 2, 512], [-1.0, -1.0, -1.0, -1.0]),
        ((0.0, -0.3, 0.0), [0], [-(10**1.5)]),
        ((0.0, -0.6, 0.0), [0, 1, 2, 10, 512, 32768], [-1e3, -1.0, -0.65975, -0.251189, -0.0236831, -0.001953125]),
        ((0.0, -2.0, 0.0), [0], [-1e10]),
    ],
)
def test_values_of_the_reference(theta, distances, expected):
    alpha, beta, mu = theta
    np.testing.assert_allclose(bias(alpha, beta, distances, mu), expected, rtol=3e-5)


def test_any_value_against_float64():
    rng = np.random.default_rng(0)
    distances = np.arange(-40, 3000, 7)
    for _ in range(20):
        alpha, beta, mu = rng.normal(size=3) * [1, 0.8, 0.5]
        want = oracles.ggd(-distances, alpha, beta, mu)
        np.testing.assert_allclose(bias(alpha, beta, distances, mu, "bam(mu=trainable)"), want, rtol=3e-5)
    want = oracles.ggd_inside(-distances, -0.7, 0.6)
    np.testing.assert_allclose(bias(-0.7, 0.6, distances, spec="bam(scale=inside)"), want, rtol=3e-5)


WITHOUT_SSMAX = {1.0: [0.032059, 0.087144, 0.236883, 0.643914], -1.0: [0.423746, 0.358694, 0.217560, 0.0]}
INSIDE = {1.0: [1 / 85, 4 / 85, 16 / 85, 64 / 85], -1.0: [0.456505, 0.362329, 0.181166, 0.0]}


@pytest.mark.parametrize("beta", [1.0, -1.0])
def test_weights_of_four_keys_without_content(beta):
    """q = 0: attention is the prior alone, sharpened by ln 4 when SSMax works inside."""
    log_prior = bias(0.0, beta, [3, 2, 1, 0])
    np.testing.assert_allclose(oracles.softmax(log_prior), WITHOUT_SSMAX[beta], atol=2e-6)
    np.testing.assert_allclose(oracles.softmax(math.log(4) * log_prior), INSIDE[beta], atol=2e-6)


def test_overflow_without_guard_and_guards():
    assert bias(0.0, -7.0, [0])[0] == pytest.approx(-1e35, rel=1e-4)
    assert bias(0.0, -8.0, [0])[0] == -np.inf
    assert bias(0.0, -8.0, [0], spec="bam(guard=clip)")[0] == pytest.approx(-1e30, rel=1e-4)
    assert bias(0.0, -8.0, [0], spec="bam(guard=floor)")[0] == pytest.approx(-1e4)
    assert bias(0.0, -1.0, [5], spec="bam(guard=floor)")[0] == bias(0.0, -1.0, [5])[0]
    # A token that sees only itself: the softmax of one infinite logit has no value, of a huge one it has.
    with np.errstate(invalid="ignore"):
        assert np.isnan(oracles.softmax(bias(0.0, -8.0, [0]))).all()
    assert oracles.softmax(bias(0.0, -7.0, [0])) == 1.0
    assert oracles.softmax(bias(0.0, -7.0, [1, 0]))[1] == 0.0


def _gradients(part_spec, values, d):
    part = parse(part_spec).at(0).parts[-1]
    names = sorted(values)
    f = lambda *xs: part.log_prior(
        jax.tree.map(lambda leaf: leaf[0], part.prior_params(dict(zip(names, (x[None] for x in xs), strict=True)), 1)),
        d,
    )
    return dict(zip(names, jax.jacobian(f, argnums=tuple(range(len(names))))(*(values[n] for n in names)), strict=True))


@pytest.mark.parametrize("beta", [-2.0, -0.6, 0.0, 0.3, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("theta_mu", [0.0, 0.48121182505960347, 0.2])
def test_closed_form_gradients(beta, theta_mu):
    """With mu 0, 1 and fractional; 0.4812… makes mu the integer 1. Everything is finite, also at d = mu."""
    d = np.arange(-6, 4, dtype=np.int32)
    values = {
        "theta_alpha": jnp.float32(-0.4),
        "theta_beta": jnp.float32(beta),
        "theta_mu": jnp.float32(theta_mu),
    }
    got = _gradients("bam(mu=trainable)", values, d)
    mu = 2 * np.sinh(np.float32(theta_mu)).astype(np.float64)
    mu = np.float64(np.float32(mu)) if abs(mu - round(mu)) > 1e-6 else round(mu)
    x = np.abs(d - mu) + EPS
    b = -np.exp(-0.4) * x**beta
    clear = np.abs(d - mu) > 1e-3  # there float32 resolves x
    np.testing.assert_allclose(got["theta_alpha"][clear], b[clear], rtol=1e-4)
    np.testing.assert_allclose(got["theta_beta"][clear], (b * np.log(x))[clear], rtol=1e-4, atol=1e-6)
    want_mu = -beta * (b / x) * np.sign(d - mu) * 2 * math.cosh(theta_mu)
    np.testing.assert_allclose(got["theta_mu"][clear], want_mu[clear], rtol=1e-3, atol=1e-6)
    for gradient in got.values():
        assert np.isfinite(gradient).all()


def test_no_gradient_to_the_shift_at_the_shift():
    d = np.zeros(1, np.int32)
    for beta in (-0.5, 0.5, 1.0):
        values = {"theta_alpha": jnp.float32(0), "theta_beta": jnp.float32(beta), "theta_mu": jnp.float32(0)}
        assert _gradients("bam(mu=trainable)", values, d)["theta_mu"] == 0


def test_gradients_against_finite_differences():
    """Every parameter of every form, in float64 by central differences of the formula written down again."""
    d = np.asarray([-700, -31, -3, -1, 2], np.int32)
    weights = np.asarray([0.3, -1.2, 0.7, 2.0, 0.4])
    with x64():
        for spec, f, names in [
            ("bam(mu=trainable)", oracles.ggd, ["theta_alpha", "theta_beta", "theta_mu"]),
            ("bam(scale=inside)", oracles.ggd_inside, ["theta_alpha", "theta_beta"]),
        ]:
            at = np.asarray([0.3, -0.45, 0.31])[: len(names)]
            values = {name: jnp.asarray(v, jnp.float64) for name, v in zip(names, at, strict=True)}
            got = _gradients(spec, values, d)
            for k, name in enumerate(names):
                step = np.eye(len(names))[k] * 1e-6
                slope = (f(d, *(at + step)) - f(d, *(at - step))) / 2e-6
                np.testing.assert_allclose(weights @ np.asarray(got[name]), weights @ slope, rtol=1e-7, err_msg=name)


@given(st.floats(-7, 3), st.floats(-3, 1), st.floats(-2, 2), st.sampled_from(["none", "clip", "floor"]))
@settings(max_examples=60, deadline=None)
def test_value_and_gradients_are_finite(beta, alpha, theta_mu, guard):
    d = np.asarray([-100000, -100, -2, -1, 0, 1], np.int32)
    params = {k: jnp.float32(v) for k, v in {"theta_alpha": alpha, "theta_beta": beta, "theta_mu": theta_mu}.items()}
    part = parse(f"bam(mu=trainable,guard={guard})").at(0).parts[-1]

    def total(p):
        return jnp.sum(part.log_prior(part.prior_params(p, 1), d) * 1e-30)

    value, gradient = jax.value_and_grad(total)(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf) for leaf in gradient.values())


def test_a_floored_prior_has_no_gradient_rather_than_a_nan():
    part = parse("bam(guard=floor)").at(0).parts[-1]
    total = lambda beta: part.log_prior(
        {"theta_alpha": jnp.float32(0), "theta_beta": beta}, np.zeros(1, np.int32)
    ).sum()
    assert jax.grad(total)(jnp.float32(-30.0)) == 0


def test_uniform_start_moves_the_exponent_first():
    """b = -1 everywhere, so attention is NoPE's; the scale's gradient through a softmax is 0, the exponent's is not."""
    d = np.arange(-31, 1, dtype=np.int32)
    rng = np.random.default_rng(1)
    content, value = jnp.asarray(rng.normal(size=32), jnp.float32), jnp.asarray(rng.normal(size=32), jnp.float32)

    def out(alpha, beta):
        return jnp.vdot(jax.nn.softmax(content + ggd_log_prior(d, alpha, beta)), value)

    zero = jnp.float32(0)
    assert out(zero, zero) == pytest.approx(float(jnp.vdot(jax.nn.softmax(content), value)), rel=1e-6)
    by_alpha, by_beta = jax.grad(out, (0, 1))(zero, zero)
    assert abs(by_alpha) < 1e-6 * abs(by_beta)


def test_starts():
    params = lambda init: parse(f"bam(init={init},mu=trainable)").init_params(jax.random.key(0), GEOMETRY)["bam"]
    log_slopes = np.log(alibi_slopes(4))
    np.testing.assert_array_equal(params("uniform")["theta_alpha"], np.zeros(4))
    np.testing.assert_array_equal(params("uniform")["theta_beta"], np.zeros(4))
    np.testing.assert_array_equal(params("laplace")["theta_alpha"], np.ones(4))
    np.testing.assert_array_equal(params("laplace")["theta_beta"], np.ones(4))
    np.testing.assert_allclose(params("slopes")["theta_alpha"], log_slopes, rtol=1e-6)
    np.testing.assert_array_equal(params("slopes")["theta_beta"], np.ones(4))
    np.testing.assert_allclose(params("linear")["theta_beta"], [0, 1 / 3, 2 / 3, 1], rtol=1e-6)
    np.testing.assert_allclose(params("linear")["theta_alpha"], log_slopes, rtol=1e-6)
    sampled = params("sampled")
    assert np.all(np.asarray(sampled["theta_alpha"]) > 0)
    assert len(np.unique(sampled["theta_beta"])) == 4
    for init in ("uniform", "laplace", "slopes", "linear", "sampled"):
        np.testing.assert_array_equal(params(init)["theta_mu"], np.zeros(4))


def test_slope_start_is_alibi():
    at = jnp.arange(20)
    params = parse("bam(init=slopes)").init_params(jax.random.key(0), GEOMETRY)
    got = parse("bam(init=slopes)").log_prior(params, at, at)
    np.testing.assert_allclose(got, parse("alibi").log_prior({}, at, at, heads=4), atol=1e-5)


def test_parameter_names():
    names = lambda spec: sorted(parse(spec).init_params(jax.random.key(0), GEOMETRY)["bam"])
    assert names("bam") == ["theta_alpha", "theta_beta"]
    assert names("bam(mu=trainable)") == ["theta_alpha", "theta_beta", "theta_mu"]


def test_a_frozen_shift_gets_no_gradient():
    part = parse("bam").at(0).parts[-1]

    def total(theta_mu):
        params = {"theta_alpha": jnp.zeros(1), "theta_beta": jnp.ones(1), "theta_mu": theta_mu}
        return parse("bam").log_prior(params, jnp.arange(3), jnp.arange(3)).sum()

    assert part.prior_params({"theta_alpha": jnp.zeros(1), "theta_beta": jnp.ones(1)}, 1).keys() == {
        "theta_alpha",
        "theta_beta",
    }
    np.testing.assert_array_equal(jax.grad(total)(jnp.full(1, 0.3)), np.zeros(1))
