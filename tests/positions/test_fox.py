"""FoX: gates from the layer's input, gates without data, padding."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath.positions import Geometry, Slots, Tokens, parse
from bampath.positions.fox import FoX
from bampath.positions.slots import Part

GEOMETRY = Geometry(dim=6, heads=4, kv_heads=2, head_dim=4, train_length=64)


@functools.partial(jax.jit, static_argnums=0)
def _gates(spec, x, ids=None, params=None):
    part = next(part for part in parse(spec).at(0).parts if part.GATES)
    batch, length = x.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], (batch, length))
    tokens = Tokens(
        x, positions, positions + 1, jnp.zeros_like(positions) if ids is None else jnp.asarray(ids, jnp.int32)
    )
    params = parse(spec).init_params(jax.random.key(0), GEOMETRY).get("fox", {}) if params is None else params
    slots, _ = part.fill(params, GEOMETRY, Slots(x, x), tokens, None)
    return slots.log_gates


def test_gates_follow_the_token():
    rng = np.random.default_rng(0)
    x, kernel, bias = rng.normal(size=(2, 5, 6)), rng.normal(size=(6, 4)), rng.normal(size=4)
    params = {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}
    got = _gates("fox", jnp.asarray(x, jnp.float32), params=params)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, -np.log1p(np.exp(-(x @ kernel + bias))), rtol=1e-5)


def test_extreme_gates_stay_finite_with_their_gradients():
    x = jnp.asarray([[[1e4] * 6, [-1e4] * 6]], jnp.float32)
    params = {"kernel": jnp.ones((6, 4)), "bias": jnp.zeros(4)}
    got = _gates("fox", x, params=params)
    np.testing.assert_allclose(got[0, :, 0], [0, -6e4])
    gradient = jax.grad(lambda p: _gates("fox", x, params=p).sum())(params)
    assert all(np.isfinite(leaf).all() for leaf in gradient.values())


def test_start_forgets_half():
    start = parse("fox").init_params(jax.random.key(0), GEOMETRY)["fox"]
    np.testing.assert_array_equal(start["bias"], np.zeros(4))
    assert start["kernel"].std() == pytest.approx(0.02, rel=0.5)
    np.testing.assert_allclose(np.exp(_gates("fox", jnp.zeros((1, 2, 6)))), 0.5, rtol=1e-6)
    np.testing.assert_allclose(np.exp(_gates("fox(bias=3)", jnp.zeros((1, 2, 6)))), 1 / (1 + math.exp(-3)), rtol=1e-6)


@pytest.mark.parametrize("gate", ["fixed", "bias_only"])
def test_gates_without_data_are_alibi(gate):
    """log f = -1/T: the accumulated gate over a distance d is -d/T, a Laplace prior with slope 1/T."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 7, 6)), jnp.float32)
    got = _gates(f"fox({gate},decay_min=2,decay_max=16)", x)
    np.testing.assert_allclose(got, np.broadcast_to([-1 / 2, -1 / 4, -1 / 8, -1 / 16], (1, 7, 4)), rtol=1e-5)


def test_decay_times_default_to_the_training_length():
    np.testing.assert_allclose(FoX(gate="fixed").decay_times(GEOMETRY), [2, 2 * 32 ** (1 / 3), 2 * 32 ** (2 / 3), 64])
    one_head = Geometry(dim=6, heads=1, kv_heads=1, head_dim=4, train_length=1)
    assert FoX(gate="fixed").decay_times(one_head) == [2.0]


def test_parameters_and_roles():
    roles = lambda spec: {n: (p.shape, p.role) for n, p in parse(spec).at(0).parts[-1].parameters(GEOMETRY).items()}
    assert roles("fox") == {"kernel": ((6, 4), "matrix"), "bias": ((4,), "bias")}
    assert roles("fox(bias_only)") == {"bias": ((4,), "prior")}
    assert roles("fox(fixed)") == {}
    assert type(FoX()).log_prior is Part.log_prior  # no function of distance


def test_padding_forgets_nothing():
    got = _gates("fox", jnp.ones((2, 4, 6)), ids=[[-1, -1, 0, 0], [0, 0, 0, -1]])
    np.testing.assert_array_equal(got[..., 0] == 0, [[True, True, False, False], [False, False, False, True]])
