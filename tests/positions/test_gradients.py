"""Gradients of every learned positional number through attention, against float64 finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath.positions import Geometry, Tokens, parse
from bampath.positions.module import PositionalEncoding
from kernels.attention.api import attention
from tests.helpers import central_difference, x64
from tests.positions import oracles

GEOMETRY = Geometry(dim=6, heads=2, kv_heads=1, head_dim=4, train_length=16)
LENGTH = 11

CASES = [
    "alibi(trainable=true)",
    "bam(mu=trainable)",
    "bam(scale=inside)+ssmax(bias=true)",
    "bam+ssmax(inside=false)",
    "bam(guard=floor)+ssmax",
    "kerple",
    "kerple(power)",
    "t5(buckets=8)",
    "rope+ssmax",
    "fox",
    "fox(bias_only)+alibi(trainable=true)+ssmax",
]


def _inputs():
    rng = np.random.default_rng(0)
    shapes = {"x": (2, LENGTH, 6), "q": (2, LENGTH, 2, 4), "k": (2, LENGTH, 1, 4), "v": (2, LENGTH, 1, 4)}
    found = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    found["weights"] = rng.normal(size=(2, LENGTH, 2, 4))
    ids = np.asarray([[0] * 4 + [1] * 7, [0] * 9 + [-1] * 2], np.int32)
    positions = np.asarray([[*range(4), *range(7)], [*range(9), 0, 0]], np.int32)
    return found, ids, positions


def _loss(spec, params, dtype, implementation):
    found, ids, positions = _inputs()
    x, q, k, v, weights = (jnp.asarray(found[name], dtype) for name in ("x", "q", "k", "v", "weights"))
    tokens = Tokens(x, jnp.asarray(positions), jnp.asarray(positions + 1), jnp.asarray(ids))
    slots, _ = PositionalEncoding(parse(spec).at(0), GEOMETRY).apply({"params": params}, q, k, tokens, None)
    out = attention(
        slots.q,
        slots.k,
        v,
        prior=slots.prior,
        log_gates=slots.log_gates,
        sharpness=slots.sharpness,
        sharpen_prior=slots.sharpen_prior,
        segment_ids=tokens.segment_ids,
        implementation=implementation,
    )
    return jnp.sum(out * weights)


@pytest.mark.parametrize("spec", CASES)
def test_gradient_of_each_parameter(spec):
    rng = np.random.default_rng(4)
    composition = parse(spec).at(0)
    at = jax.tree.map(np.float64, oracles.random_params(composition.parts, GEOMETRY, seed=4, spread=0.5))
    single = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), at)
    got = jax.jit(jax.grad(lambda p: _loss(spec, p, jnp.float32, "xla")))(single)
    with x64():
        value = jax.jit(lambda p: _loss(spec, p, jnp.float64, "reference"))
        for part, leaves in at.items():
            for name, leaf in leaves.items():
                direction = rng.normal(size=leaf.shape)
                moved = lambda x, part=part, name=name: value(at | {part: at[part] | {name: jnp.asarray(x)}})
                want = central_difference(moved, leaf, direction, 1e-5)
                found = float(np.sum(np.asarray(got[part][name], np.float64) * direction))
                assert found == pytest.approx(want, rel=1e-3, abs=2e-5), f"{part}.{name}"
                assert abs(want) > 1e-6, f"{part}.{name} has no influence here"
