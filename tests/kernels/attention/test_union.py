"""Attention to two sets of keys, joined, is attention to all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention.union import union


def attended(z: np.ndarray, v: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """(o [n, D], lse [n]) of logits [n, keys] and values [keys, D], in float64 numpy."""
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(z).sum(-1))
    weights = np.exp(z - np.where(np.isneginf(lse), 0, lse)[:, None])
    return jnp.asarray(weights @ v, jnp.float32), jnp.asarray(lse, jnp.float32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("first", "second"), [(5, 3), (0, 4), (4, 0), (0, 0)])
def test_union_is_attention_to_all_keys(seed: int, first: int, second: int) -> None:
    rng = np.random.default_rng(seed)
    z, v = 10 * rng.normal(size=(6, first + second)), rng.normal(size=(first + second, 4))
    o, lse = union(attended(z[:, :first], v[:first]), attended(z[:, first:], v[first:]))
    want_o, want_lse = attended(z, v)
    np.testing.assert_allclose(o, want_o, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_gradients_are_finite_where_a_part_is_empty() -> None:
    o = jnp.ones((3, 2))
    lse_a, lse_b = jnp.array([-jnp.inf, 1.0, -jnp.inf]), jnp.array([0.5, -jnp.inf, -jnp.inf])

    def loss(o: jax.Array, lse_a: jax.Array, lse_b: jax.Array) -> jax.Array:
        joined, lse = union((o, lse_a), (2 * o, lse_b))
        return joined.sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

    do, da, db = jax.grad(loss, (0, 1, 2))(o, lse_a, lse_b)
    np.testing.assert_array_equal(do, [[2, 2], [1, 1], [0, 0]])
    np.testing.assert_array_equal(da, [0, 1, 0])
    np.testing.assert_array_equal(db, [1, 0, 0])


@pytest.mark.parametrize("other", [-np.inf, 0.0])
def test_a_nan_is_not_hidden(other: float) -> None:
    o, lse = union((jnp.ones((1, 2)), jnp.array([jnp.nan])), (jnp.ones((1, 2)), jnp.array([other])))
    assert np.isnan(o).all()
    assert np.isnan(lse).all()
