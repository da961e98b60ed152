"""Tiles that forget gates leave out of the Mosaic GPU kernels weigh less than the bound says, in every row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention.gates import running_sums, starts_of

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need jax >= 0.11.2")


def decay(p: Any, d: Any) -> Any:
    return p["slope"] * d.astype(jnp.float32)


def leaves(r: np.random.Generator, length: int, bias: float, sharp: bool, packed: bool, prior: bool) -> dict[str, Any]:
    normal = lambda heads: jnp.asarray(r.standard_normal((2, length, heads, 64)), jnp.float32)
    ids = jnp.asarray(np.sort(r.integers(0, 3, (2, length)), axis=1), jnp.int32) if packed else None
    gates = jnp.asarray(-np.logaddexp(0, -r.standard_normal((2, length, 2)) - bias), jnp.float32)
    sums = running_sums(gates, None if ids is None else starts_of(ids))
    return {
        "q": normal(2),
        "k": normal(1),
        "v": normal(1),
        "params": {"slope": jnp.asarray(r.uniform(0, 0.2, 2), jnp.float32)} if prior else None,
        "sharpness": jnp.asarray(r.uniform(0.5, 2, (2, length, 2)), jnp.float32) if sharp else None,
        "gates": (*sums, *sums),
        "q_segments": ids,
        "kv_segments": ids,
    }


def weights(x: dict[str, Any], inside: bool) -> np.ndarray:
    """Softmax weights [B, H, T, S] in float64."""
    f = lambda a: np.asarray(a, np.float64)
    length = x["q"].shape[1]
    z = np.einsum("bthd,bsd->bhts", f(x["q"]), f(x["k"])[:, :, 0]) / 8
    ahead = np.arange(length)[:, None] - np.arange(length)[None]
    total = (f(x["gates"][0]) + f(x["gates"][1])).transpose(0, 2, 1)
    offset = total[:, :, :, None] - total[:, :, None, :]
    if x["params"] is not None:
        offset = offset - f(x["params"]["slope"])[None, :, None, None] * ahead
    r = 1.0 if x["sharpness"] is None else f(x["sharpness"]).transpose(0, 2, 1)[..., None]
    z = r * (z + offset) if inside else r * z + offset
    seen = np.broadcast_to(ahead >= 0, (2, 1, length, length))
    if x["q_segments"] is not None:
        ids = np.asarray(x["q_segments"])
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :]) & (ids >= 0)[:, None, None, :]
    z = np.where(seen, z, -1e9)
    w = np.where(seen, np.exp(z - z.max(3, keepdims=True)), 0)
    return w / np.maximum(w.sum(3, keepdims=True), 1)


def bounds(options: Any, x: dict[str, Any], of_queries: bool) -> np.ndarray:
    from kernels.attention.mosaic_gpu_fused import bounds_of, make_spec, prior_table

    def find(x: dict[str, Any]) -> jax.Array:
        spec = make_spec(options, x)
        mine, others = ("q_segments", "kv_segments") if of_queries else ("kv_segments", "q_segments")
        return bounds_of(spec, x, mine, others, options.tiles[0], prior_table(options, spec, x))["bounds"]

    return np.asarray(jax.jit(find)(x))[..., :2]


@pytest.mark.parametrize(
    ("bias", "sharp", "packed", "prior", "inside", "seed"),
    [(-1.0, True, False, True, True, 0), (0.0, True, True, False, False, 1), (2.0, False, True, True, True, 2)],
)
def test_what_is_left_out_weighs_less_than_the_bound(
    bias: float, sharp: bool, packed: bool, prior: bool, inside: bool, seed: int
) -> None:
    from kernels.attention.mosaic_gpu_fused import Options
    from kernels.attention.mosaic_gpu_skip import LOST
    from kernels.attention.mosaic_gpu_spec import Tiles

    length = 700
    x = leaves(np.random.default_rng(seed), length, bias, sharp, packed, prior)
    options = Options(decay, 0.125, True, None, inside, (length, length), (Tiles(2, 64),) * 3, skip=True)
    w = weights(x, inside)
    of_queries, of_keys = bounds(options, x, True), bounds(options, x, False)
    lost = np.zeros((2, 2, length))
    for b, h in np.ndindex(2, 2):
        for n, (start, stop) in enumerate(of_queries[b, h]):
            rows = w[b, h, n * 128 : (n + 1) * 128]
            assert (rows[:, : start * 64].sum(1) + rows[:, stop * 64 :].sum(1)).max() < LOST
        for n, (start, stop) in enumerate(of_keys[b, 0]):  # one key head for both
            columns = w[b, h, :, n * 128 : (n + 1) * 128].sum(1)
            lost[b, h, : start * 64] += columns[: start * 64]
            lost[b, h, stop * 64 :] += columns[stop * 64 :]
    assert lost.max() < LOST
    assert bias > 1 or of_queries[..., 0].max() > 0  # something is left out


def test_nothing_is_left_out_where_the_bound_does_not_hold() -> None:
    """A negative sharpness turns forgetting round; a query that does not see its own key may see only far ones."""
    from kernels.attention.mosaic_gpu_fused import Options
    from kernels.attention.mosaic_gpu_spec import Tiles

    options = Options(None, 0.125, True, None, True, (700, 700), (Tiles(2, 64),) * 3, skip=True)
    x = leaves(np.random.default_rng(0), 700, -1.0, True, False, False)
    kept = lambda y: bounds(options, y, True)
    assert kept(x)[..., 0].max() > 0
    assert kept(x | {"sharpness": -x["sharpness"]})[..., 0].max() == 0
    ids = jnp.zeros((2, 700), jnp.int32)
    moved = x | {"q_segments": ids, "kv_segments": ids.at[:, 350:].set(1)}
    start, stop = np.moveaxis(kept(moved), -1, 0)
    assert start.max() == 0
    assert (stop[:, :, -1] >= 350 // 64).all()
