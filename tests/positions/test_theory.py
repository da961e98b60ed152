"""The lemmas: NoPE is uniform, ALiBi is uniform × Laplace and turns local, theta_beta sets the regime."""

import jax
import numpy as np
import pytest

from bampath.positions import Geometry, parse
from bampath.positions.alibi import alibi_slopes
from bampath.positions.theory import belief, describe, exponent, posterior, regime_of_exponent, regimes
from tests.positions import oracles

GEOMETRY = Geometry(dim=16, heads=4, kv_heads=2, head_dim=8, train_length=32)


def _bam(alpha, beta):
    return {"theta_alpha": np.atleast_1d(np.float32(alpha)), "theta_beta": np.atleast_1d(np.float32(beta))}


def test_attention_is_content_times_prior_renormalised():
    """BAM's Theorem 1, with Z as it is defined there."""
    rng = np.random.default_rng(0)
    content, prior = rng.normal(size=(3, 9)) * 3, rng.normal(size=(3, 9)) * 2
    weights, z = posterior(content, prior)
    np.testing.assert_allclose(weights, oracles.softmax(content + prior), rtol=1e-12)
    product = oracles.softmax(content) * oracles.softmax(prior)
    np.testing.assert_allclose(z, 1 / product.sum(-1), rtol=1e-12)
    np.testing.assert_allclose(weights, product * z[:, None], rtol=1e-12)


@pytest.mark.parametrize("keys", [1, 2, 77])
def test_nope_is_uniform(keys):
    """Lemma 1: entropy ln n, mean distance (n - 1)/2, every key effective; so is BAM at its uniform start."""
    for spec, params in (("nope", {}), ("bam", _bam(np.zeros(2), np.zeros(2)))):
        found = belief(parse(spec).at(0), params, keys, heads=2)
        np.testing.assert_allclose(found.p, np.full((2, keys), 1 / keys), rtol=1e-6)
        np.testing.assert_allclose(found.entropy, np.log(keys), atol=1e-6)
        np.testing.assert_allclose(found.mean_distance, (keys - 1) / 2, rtol=1e-6)
        np.testing.assert_allclose(found.effective_keys, keys, rtol=1e-6)
    np.testing.assert_allclose(belief(parse("nope").at(0), {}, keys, heads=1).log_z, np.log(keys))


def test_alibi_is_uniform_times_laplace():
    """Lemma 2: the normalised product of a uniform and a Laplace density is ALiBi's prior."""
    keys = 40
    found = belief(parse("alibi").at(0), {}, keys, heads=4)
    distance = np.arange(keys - 1, -1, -1)
    for h, slope in enumerate(alibi_slopes(4)):
        laplace = slope / 2 * np.exp(-slope * distance)
        product = np.full(keys, 1 / keys) * laplace
        np.testing.assert_allclose(found.p[h], product / product.sum(), rtol=1e-5)
        z = (1 - np.exp(-slope * keys)) / (1 - np.exp(-slope))
        assert found.log_z[h] == pytest.approx(np.log(z), rel=1e-6)


def test_alibi_turns_local():
    """Lemma 3: as the context grows, its mean distance comes to a halt while that of a uniform prior keeps growing."""
    lengths = [16, 64, 256, 1024, 4096]
    found = [belief(parse("alibi").at(0), {}, n, heads=4) for n in lengths]
    slopes = np.asarray(alibi_slopes(4))
    limit = np.exp(-slopes) / (1 - np.exp(-slopes))  # mean of a geometric distribution
    np.testing.assert_allclose(found[-1].mean_distance, limit, rtol=1e-3)
    share = np.asarray([f.mean_distance / ((n - 1) / 2) for f, n in zip(found, lengths, strict=True)])
    assert np.all(np.diff(share, axis=0) < 0)
    assert np.all(share[-1] < 0.13)
    assert found[-1].effective_window.max() < 4 * limit.max()
    assert regimes(parse("alibi").at(0), {}, heads=4) == ["local"] * 4


def test_exponent_orders_how_far_a_head_looks():
    """Above 0 the mean distance falls with theta_beta; below 0 it exceeds uniform and the query cannot see itself."""
    betas = [-1.0, -0.6, -0.2, 0.0, 0.3, 1.0, 2.0]
    found = belief(parse("bam").at(0), _bam(np.zeros(7), betas), 512)
    uniform = found.mean_distance[3]
    assert np.all(found.mean_distance[:3] > uniform)
    assert np.all(np.diff(found.mean_distance[3:]) < 0)
    assert uniform == pytest.approx(255.5, rel=1e-5)
    assert np.all(found.p[:3, -1] < 1e-6)
    assert np.all(found.p[4:, -1] > 1 / 512)
    # Retrieval heads are almost NoPE among the tokens before the query.
    past = found.p[1, :-1] / found.p[1, :-1].sum()
    assert 511 * past[:-20].max() < 1.05
    assert 511 * past[:-20].min() > 0.85


def test_regimes_of_bam():
    names = {-2.0: "anti-local", -0.61: "anti-local", -0.6: "retrieval", -0.01: "retrieval", 0.0: "uniform"}
    names |= {0.01: "local", 1.0: "local", 2.0: "local"}
    assert {beta: regime_of_exponent(beta) for beta in names} == names
    betas = [-2.0, -0.3, 0.0, 0.7]
    got = regimes(parse("bam+ssmax").at(0), {"bam": _bam(np.zeros(4), betas)})
    assert got == ["anti-local", "retrieval", "uniform", "local"]
    assert regimes(parse("bam").at(0), _bam([-12.0], [0.5])) == ["uniform"]  # a scale so small that nothing is left


def test_regimes_of_any_prior_go_by_shape():
    """The same names from the curve alone: BAM beside another prior, ALiBi, KERPLE, NoPE, random tables."""
    betas = [-2.0, -0.7, -0.5, 0.4]
    params = {"bam": _bam(np.full(4, 0.5), betas), "kerple": {"log_r1": np.full(4, -20.0), "log_r2": np.zeros(4)}}
    assert regimes(parse("bam+kerple").at(0), params) == ["anti-local", "anti-local", "retrieval", "local"]
    assert regimes(parse("nope").at(0), {}, heads=2) == ["uniform"] * 2
    random = parse("kerple(power)").init_params(jax.random.key(0), GEOMETRY)
    kerple = jax.tree.map(np.zeros_like, random)  # logarithms of both parameters
    assert regimes(parse("kerple(power)").at(0), kerple) == ["local"] * 4
    assert regimes(parse("sandwich").at(0), {}, heads=4) == ["local"] * 4
    table = np.zeros((2, 32), np.float32)
    table[0, 5], table[1, 31] = 3, 3
    assert regimes(parse("t5").at(0), {"table": table}) == ["local", "retrieval"]


def test_exponent_is_read_off_the_curve():
    distance = np.arange(30)[::-1]
    for beta in (-2.0, -0.6, 0.3, 1.0, 2.0):
        curve = 5 - 0.7 * (distance + 1e-5) ** beta
        np.testing.assert_allclose(exponent(curve[None]), [beta], rtol=1e-4)
    assert np.isnan(exponent(np.zeros((1, 6))))[0]


def test_effective_window_and_sharpness():
    found = describe(np.log(np.asarray([[0.01, 0.04, 0.15, 0.8]])))
    assert found.effective_window[0] == 2
    assert describe(np.log(np.asarray([[0.01, 0.04, 0.15, 0.8]])), mass=0.96).effective_window[0] == 3
    assert found.mean_distance[0] == pytest.approx(0.15 + 2 * 0.04 + 3 * 0.01)
    one, sharp = (belief(parse("alibi").at(0), {}, 64, heads=4, sharpness=r) for r in (1.0, np.log(64)))
    assert np.all(sharp.entropy < one.entropy)
    none = belief(parse("alibi").at(0), {}, 64, heads=4, sharpness=np.zeros(4))
    np.testing.assert_allclose(none.entropy, np.log(64))


def test_a_window_cuts_the_belief():
    found = belief(parse("nope+window(8)").at(0), {}, 100, heads=1)
    assert found.p.shape == (1, 8)
    assert found.mean_distance[0] == pytest.approx(3.5)
    assert belief(parse("nope+window(8)").at(0), {}, 3, heads=1).p.shape == (1, 3)


def test_infinite_log_priors_have_no_mass_and_no_nan():
    found = belief(parse("bam").at(0), _bam([0.0], [-9.0]), 8)
    assert found.p[0, -1] == 0
    assert np.isfinite(found.entropy).all()


def test_wrong_arguments():
    for call, match in [
        (lambda: belief(parse("nope").at(0), {}, 0, heads=1), "keys=0"),
        (lambda: belief(parse("nope").at(0), {}, 3, heads=1, mass=0.0), "mass=0.0"),
        (lambda: regimes(parse("nope").at(0), {}, keys=5, heads=1), "keys=5"),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
