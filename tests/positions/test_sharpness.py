"""SSMax, log-n, Llama 4: factors per row, what n counts, and what they multiply."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath.positions import Geometry, Slots, Tokens, parse
from bampath.positions.module import PositionalEncoding
from bampath.positions.ssmax import mean_log
from tests.positions import oracles

GEOMETRY = Geometry(dim=4, heads=2, kv_heads=1, head_dim=4, train_length=512)


def _tokens(positions, segment_ids=None):
    positions = jnp.asarray(positions, jnp.int32)
    ids = jnp.zeros_like(positions) if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    return Tokens(jnp.zeros((*positions.shape, 4)), positions, positions + 1, ids)


@functools.partial(jax.jit, static_argnames=("spec", "geometry"))
def _sharpen(spec, tokens, params=None, carry=None, geometry=GEOMETRY):
    part = parse(spec).at(0).parts[-1]
    assert part.SLOT == "sharpness"
    if params is None:
        params = parse(spec).init_params(jax.random.key(0), geometry).get(part.NAME, {})
    empty = Slots(jnp.zeros((1, 1, 2, 4)), jnp.zeros((1, 1, 1, 4)))
    return part.fill(params, geometry, empty, tokens, carry)


def test_softmax_of_four_keys():
    """n^(s z): with z = (1, 0, 0, 0), n = 4, s = 1 the weights are 4/7, 1/7, 1/7, 1/7; n = 1 gives 1."""
    slots, _ = _sharpen("ssmax", _tokens([[0, 3]]))
    r = np.asarray(slots.sharpness)[0, :, 0]
    np.testing.assert_allclose(
        oracles.softmax(r[1] * np.asarray([1.0, 0, 0, 0])), [4 / 7, 1 / 7, 1 / 7, 1 / 7], rtol=1e-6
    )
    assert r[0] == 0
    assert oracles.softmax(r[0] * np.asarray([3.0])) == 1
    assert slots.sharpness.dtype == jnp.float32
    assert slots.sharpness.shape == (1, 2, 2)


def test_n_counts_within_the_document():
    """Documents of 6 and 11 tokens: n = 1..6, 1..11. Padding counts nothing and stays finite."""
    ids = [0] * 6 + [1] * 11 + [-1] * 2
    tokens = _tokens([[*range(6), *range(11), 0, 0]], [ids])
    slots, _ = _sharpen("ssmax", tokens)
    n = np.exp(np.asarray(slots.sharpness)[0, :17, 1])
    np.testing.assert_allclose(n, [*range(1, 7), *range(1, 12)], rtol=1e-5)
    assert np.isfinite(slots.sharpness).all()


def test_a_window_bounds_n():
    q, k = jnp.zeros((1, 9, 2, 4)), jnp.zeros((1, 9, 1, 4))
    module = PositionalEncoding(parse("nope+ssmax(frozen=true)+window(4)").at(0), GEOMETRY)
    slots, _ = module.apply({}, q, k, _tokens([list(range(9))]), None)
    np.testing.assert_allclose(np.exp(slots.sharpness[0, :, 0]), [1, 2, 3, 4, 4, 4, 4, 4, 4], rtol=1e-6)
    assert slots.window == 4


@pytest.mark.parametrize("length", [512, 1024, 2048])
def test_mean_log_start(length):
    want = {512: 5.246212, 1024: 5.935754, 2048: 6.626929}[length]
    assert mean_log(length) == pytest.approx(want, abs=1e-6)
    geometry = Geometry(dim=4, heads=3, kv_heads=1, head_dim=4, train_length=length)
    got = parse("ssmax(init=mean_log)").init_params(jax.random.key(0), geometry)["ssmax"]["scale"]
    np.testing.assert_allclose(got, [1 / want] * 3, rtol=1e-6)
    assert 1 / want == pytest.approx({512: 0.19061, 1024: 0.16847, 2048: 0.15090}[length], abs=5e-6)


def test_starts_and_parameters():
    params = lambda spec: parse(spec).init_params(jax.random.key(0), GEOMETRY).get("ssmax", {})
    np.testing.assert_array_equal(params("ssmax")["scale"], np.ones(2))
    np.testing.assert_allclose(params("ssmax(init=0.43)")["scale"], [0.43] * 2)
    np.testing.assert_array_equal(params("ssmax(bias=true)")["bias"], np.zeros(2))
    assert params("ssmax(frozen=true)") == {}
    assert sorted(params("ssmax(frozen=true,bias=true)")) == ["bias"]
    with pytest.raises(ValueError, match="train_length >= 2"):
        parse("ssmax(init=mean_log)").init_params(
            jax.random.key(0), Geometry(dim=4, heads=1, kv_heads=1, head_dim=4, train_length=1)
        )


def test_scale_and_bias_per_head():
    params = {"scale": jnp.asarray([1.0, 2.5]), "bias": jnp.asarray([0.5, -0.25])}
    slots, _ = _sharpen("ssmax(bias=true)", _tokens([[7]]), params)
    np.testing.assert_allclose(slots.sharpness[0, 0], [math.log(8) + 0.5, 2.5 * math.log(8) - 0.25], rtol=1e-6)
    slots, _ = _sharpen("ssmax(frozen=true,init=0.5)", _tokens([[7]]))
    np.testing.assert_allclose(slots.sharpness[0, 0], [0.5 * math.log(8)] * 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("spec", "inside"),
    [
        ("alibi+ssmax", True),
        ("alibi+ssmax(inside=false)", False),
        ("alibi+logn", False),
        ("alibi+logn(inside=true)", True),
        ("alibi+llama4", False),
        ("alibi+llama4(inside=true)", True),
    ],
)
def test_what_is_sharpened(spec, inside):
    assert _sharpen(spec, _tokens([[0, 1]]))[0].sharpen_prior is inside


def test_absolute_count_runs_over_documents_and_calls():
    """Every real token of the row so far, whatever its document; in decode the state carries it on."""
    ids = np.asarray([[0, 0, 1, 1, 1, -1], [-1, -1, 0, 0, 0, 0]])
    positions = np.asarray([[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 2, 3]])
    want = np.asarray([[1, 2, 3, 4, 5, 5], [1, 1, 1, 2, 3, 4]])
    spec = "ssmax(count=absolute,frozen=true)"
    whole, state = _sharpen(spec, _tokens(positions, ids))
    assert state is None
    np.testing.assert_allclose(np.exp(whole.sharpness[..., 0]), want, rtol=1e-5)
    carry = parse(spec).at(0).init_carry(GEOMETRY, 2, jnp.float32)["ssmax"]
    parts = []
    for piece in (slice(0, 1), slice(1, 4), slice(4, 6)):
        slots, carry = _sharpen(spec, _tokens(positions[:, piece], ids[:, piece]), carry=carry)
        parts.append(slots.sharpness)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole.sharpness, rtol=1e-6)


def test_log_n():
    tokens = _tokens([[0, 63, 511, 4095]])
    slots, _ = _sharpen("logn", tokens)
    np.testing.assert_allclose(slots.sharpness[0, :, 0], np.log([1, 64, 512, 4096]) / math.log(512), rtol=1e-6)
    slots, _ = _sharpen("logn(clip=true)", tokens)
    np.testing.assert_allclose(slots.sharpness[0, :, 1], [1, 1, 1, math.log(4096) / math.log(512)], rtol=1e-6)
    slots, _ = _sharpen("logn(64)", tokens)
    np.testing.assert_allclose(slots.sharpness[0, :, 0], np.log([1, 64, 512, 4096]) / math.log(64), rtol=1e-6)
    with pytest.raises(ValueError, match="training length"):
        _sharpen("logn", tokens, geometry=Geometry(dim=4, heads=2, kv_heads=1, head_dim=4, train_length=1))


def test_llama4_temperature():
    slots, _ = _sharpen("llama4", _tokens([[0, 8190, 8191, 16383]]))
    np.testing.assert_allclose(slots.sharpness[0, :, 0], [1, 1, 1.069315, 1.109861], rtol=1e-6)
    slots, _ = _sharpen("llama4(scale=0.5,floor=4)", _tokens([[2, 3, 11]]))
    np.testing.assert_allclose(slots.sharpness[0, :, 1], [1, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(4)], rtol=1e-6)
