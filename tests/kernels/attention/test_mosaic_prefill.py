"""A piece of a prompt on the Mosaic GPU kernels: the last queries of a cache whose empty slots stand in front."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention.api import DistancePrior, attention
from tests.kernels.attention import emulation

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need jax >= 0.11.2")


def test_a_piece_sees_the_cache_behind_its_empty_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty slots hold NaN, a row begins with padding, and the queries are fewer than the keys."""
    emulation.install(monkeypatch, ("2x128x8", "2x64x8", "2x64x8"))
    draws = np.random.default_rng(0)
    normal = lambda *shape: draws.normal(size=shape).astype(np.float16)
    q, k, v = normal(2, 140, 2, 64), normal(2, 328, 2, 64), normal(2, 328, 2, 64)
    ids = np.zeros((2, 328), np.int32)
    ids[:, :88] = -1  # slots that nothing was written to
    ids[1, 88:101] = -1  # padding on the left
    k[ids < 0], v[ids < 0] = np.nan, np.nan
    prior = DistancePrior({"slope": jnp.asarray([0.02, 0.2])}, _slopes)
    sharpness = jnp.asarray(draws.uniform(0.5, 2, (2, 140, 2)), jnp.float32)
    options = {
        "prior": prior,
        "sharpness": sharpness,
        "segment_ids": (jnp.zeros((2, 140), jnp.int32), jnp.asarray(ids)),
    }
    with jax.disable_jit():
        got = attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), **options, implementation="mosaic_gpu")
    exact = (jnp.asarray(np.nan_to_num(x), jnp.float32) for x in (q, k, v))
    want = attention(*exact, **options, implementation="reference")
    assert float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)) < 2e-3


def _slopes(params: dict[str, jax.Array], distance: jax.Array) -> jax.Array:
    return params["slope"] * distance
