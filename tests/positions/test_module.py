"""The Flax side: parameter paths, tags and dtypes of every spec, sharing, input vectors, compiling once, state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from bampath.params import axes, roles, unbox
from bampath.positions import Geometry, Slots, Tokens, parse
from bampath.positions.module import InputEmbedding, PositionalEncoding, shared_modules
from tests.positions import oracles
from tests.positions.matrix import SPECS

GEOMETRY = Geometry(dim=8, heads=4, kv_heads=2, head_dim=6, train_length=16)
LENGTH = 7


def _inputs(dtype=jnp.float32, batch=2, length=LENGTH):
    rng = np.random.default_rng(0)
    shapes = [(batch, length, 4, 6), (batch, length, 2, 6), (batch, length, 8)]
    q, k, x = (jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(dtype) for shape in shapes)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], (batch, length))
    return q, k, Tokens(x, positions, positions + 1, jnp.zeros_like(positions))


@pytest.mark.parametrize("spec", SPECS)
def test_slots_and_parameters(spec):
    """In bfloat16: q and k keep their dtype, everything positional is float32, shapes are those of the contract."""
    q, k, tokens = _inputs(jnp.bfloat16)
    for composition in parse(spec).layers:
        module = PositionalEncoding(composition, GEOMETRY)
        (slots, carry), boxed = jax.eval_shape(
            lambda m=module: m.init_with_output(jax.random.key(0), q, k, tokens, None)
        )
        params = unbox(boxed).get("params", {})
        expected = {
            part.NAME: {name: p.shape for name, p in part.parameters(GEOMETRY).items()}
            for part in composition.layer_parts
        }
        assert jax.tree.map(lambda leaf: leaf.shape, params) == {name: p for name, p in expected.items() if p}
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
        for names, leaf in zip(jax.tree.leaves(axes(boxed), is_leaf=_is_axes), jax.tree.leaves(params), strict=True):
            assert len(names) == leaf.ndim
        assert set(jax.tree.leaves(roles(boxed))) <= {"prior", "sharpness", "matrix", "bias", "conv"}
        assert carry is None
        _check(slots, composition)


def _is_axes(node):
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)


def _check(slots, composition):
    names = {part.NAME for part in composition.layer_parts}
    assert (slots.q.shape, slots.q.dtype) == ((2, LENGTH, 4, 6), jnp.bfloat16)
    assert (slots.k.shape, slots.k.dtype) == ((2, LENGTH, 2, 6), jnp.bfloat16)
    exact = any(getattr(part, "evaluate", "") == "exact" for part in composition.layer_parts)
    assert (slots.prior is not None) == (bool(names & {"alibi", "bam", "kerple", "t5", "sandwich"}) or exact)
    assert (slots.grids is not None) == ("lsh" in names and not exact)
    assert (slots.log_gates is not None) == composition.has_gates
    assert (slots.sharpness is not None) == bool(names & {"ssmax", "logn", "llama4"})
    assert (slots.householder is not None) == composition.carries_keys
    assert slots.window == composition.window
    if slots.prior is not None:
        for leaf in jax.tree.leaves(slots.prior.params):
            assert (leaf.shape[0], leaf.dtype) == (4, jnp.float32)
        hash(slots.prior.log_prior)
    for value in (slots.log_gates, slots.sharpness):
        assert value is None or (value.shape, value.dtype) == ((2, LENGTH, 4), jnp.float32)
    if slots.householder is not None:
        w, beta = slots.householder
        assert (w.shape, w.dtype) == ((2, LENGTH, 2, 6), jnp.float32)
        assert (beta.shape, beta.dtype) == ((2, LENGTH, 2), jnp.float32)


def test_tags():
    q, k, tokens = _inputs()
    module = PositionalEncoding(parse("path+bam+fox+ssmax").at(0), GEOMETRY)
    boxed = jax.eval_shape(lambda: module.init(jax.random.key(0), q, k, tokens, None))
    found = roles(boxed)["params"]
    assert found["bam"] == {"theta_alpha": "prior", "theta_beta": "prior"}
    assert found["ssmax"] == {"scale": "sharpness"}
    assert found["fox"] == {"kernel": "matrix", "bias": "bias"}
    assert found["path"] == {
        "w_down": "matrix",
        "w_up": "matrix",
        "conv": "conv",
        "beta_kernel": "matrix",
        "beta_bias": "bias",
    }
    assert axes(boxed)["params"]["bam"]["theta_beta"] == ("heads",)
    assert axes(boxed)["params"]["path"]["w_up"] == (None, "kv_heads", None)


def test_bam_adds_two_numbers_per_head_and_layer():
    """384 for 12 layers of 16 heads."""
    big = Geometry(dim=768, heads=16, kv_heads=16, head_dim=48, layers=12)
    added = parse("bam").init_params(jax.random.key(0), big)
    assert 12 * sum(leaf.size for leaf in jax.tree.leaves(added)) == 384


def test_init_params_matches_the_module():
    q, k, tokens = _inputs()
    composition = parse("bam(init=slopes)+ssmax(init=0.3)").at(0)
    made = composition.init_params(jax.random.key(0), GEOMETRY)
    own = unbox(PositionalEncoding(composition, GEOMETRY).init(jax.random.key(0), q, k, tokens, None))["params"]
    assert jax.tree.structure(made) == jax.tree.structure(own)
    np.testing.assert_array_equal(made["bam"]["theta_alpha"], own["bam"]["theta_alpha"])
    np.testing.assert_array_equal(made["ssmax"]["scale"], own["ssmax"]["scale"])


def test_log_prior_is_what_attention_gets():
    """The dense form and the slot agree on every pair, for the sum of several priors with learned values."""
    q, k, tokens = _inputs()
    composition = parse("alibi+bam(mu=trainable)+t5(scope=layer)").at(0)
    params = oracles.random_params(composition.parts, GEOMETRY)
    slots, _ = PositionalEncoding(composition, GEOMETRY).apply({"params": params}, q, k, tokens, None)
    dense = composition.log_prior(params, jnp.arange(4), jnp.arange(6))
    for h, i, j in np.ndindex(4, 4, 6):
        one = slots.prior.log_prior(jax.tree.map(lambda leaf, h=h: leaf[h], slots.prior.params), jnp.int32(j - i))
        if (h, i, j) in ((0, 0, 0), (3, 3, 5), (2, 3, 0), (1, 0, 5)):
            np.testing.assert_allclose(one, dense[h, i, j], rtol=1e-5, atol=1e-6)


class _Stack(nn.Module):
    """Two layers that share what the scheme shares, one of them rematerialised."""

    spec: str

    def setup(self):
        scheme = parse(self.spec)
        self.shared = shared_modules(scheme, GEOMETRY)
        remat = nn.remat(PositionalEncoding)
        self.first = PositionalEncoding(scheme.at(0), GEOMETRY, self.shared)
        self.second = remat(scheme.at(1), GEOMETRY, self.shared)

    def __call__(self, q, k, tokens):
        return [layer(q, k, tokens, None)[0] for layer in (self.first, self.second)]


def test_shared_parts_have_one_set_of_parameters():
    q, k, tokens = _inputs()
    stack = _Stack("bam(scope=global)+ssmax")
    params = unbox(stack.init(jax.random.key(0), q, k, tokens))["params"]
    shapes = jax.tree.map(lambda leaf: leaf.shape, params)
    assert shapes == {
        "shared_bam": {"theta_alpha": (4,), "theta_beta": (4,)},
        "first": {"ssmax": {"scale": (4,)}},
        "second": {"ssmax": {"scale": (4,)}},
    }
    f = lambda p: sum(
        jax.vmap(s.prior.log_prior, (0, None))(s.prior.params, -jnp.arange(3)).sum()
        for s in stack.apply({"params": p}, q, k, tokens)
    )
    gradient = jax.grad(f)(params)["shared_bam"]["theta_alpha"]
    np.testing.assert_allclose(gradient, np.full(4, -6.0), rtol=1e-6)  # -1 at 3 distances in each of two layers
    assert shared_modules(parse("bam+ssmax"), GEOMETRY) is None


def test_input_vectors():
    positions = np.asarray([[0, 1, 2, 0], [100_000, 0, 5, 15]], np.int32)
    assert InputEmbedding(parse("rope"), GEOMETRY).apply({}, positions) is None
    got = InputEmbedding(parse("sinusoidal"), GEOMETRY).apply({}, positions)
    omega = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    want = np.zeros((2, 4, 8))
    want[..., 0::2], want[..., 1::2] = np.sin(positions[..., None] * omega), np.cos(positions[..., None] * omega)
    np.testing.assert_allclose(got, want, atol=1e-6)
    quirk = InputEmbedding(parse("sinusoidal(1000,odd_cosines=true)"), GEOMETRY).apply({}, positions)
    omega = 1000.0 ** (-np.arange(1, 8, 2) / 8)
    np.testing.assert_allclose(quirk[..., 1::2], np.cos(positions[..., None] * omega), atol=1e-6)
    with pytest.raises(ValueError, match="even dim, got 7"):
        InputEmbedding(parse("sinusoidal"), Geometry(dim=7, heads=1, kv_heads=1, head_dim=7)).apply({}, positions)


def test_learned_vectors_end_with_their_table():
    module = InputEmbedding(parse("learned"), GEOMETRY)
    positions = jnp.arange(16, dtype=jnp.int32)[None, :]
    boxed = module.init(jax.random.key(0), positions)
    assert roles(boxed)["params"] == {"learned": {"embedding": "position"}}
    table = unbox(boxed)["params"]["learned"]["embedding"]
    np.testing.assert_array_equal(module.apply(unbox(boxed), positions)[0], table)
    with pytest.raises(ValueError, match=r"17 positions, but the table has 16 rows"):
        module.apply(unbox(boxed), jnp.zeros((1, 17), jnp.int32))
    beyond = module.apply(unbox(boxed), jnp.asarray([[15, 16, 10**6]]))  # known only at run time, as in decode
    np.testing.assert_array_equal(np.isnan(beyond).any(-1), [[False, True, True]])
    longer = InputEmbedding(parse("learned(20)+alibi"), GEOMETRY)
    assert unbox(longer.init(jax.random.key(0), positions))["params"]["learned"]["embedding"].shape == (20, 8)


def test_both_input_parts_add():
    positions = jnp.arange(5, dtype=jnp.int32)[None, :]
    both = InputEmbedding(parse("sinusoidal+learned"), GEOMETRY)
    params = unbox(both.init(jax.random.key(0), positions))
    alone = InputEmbedding(parse("sinusoidal"), GEOMETRY).apply({}, positions)
    np.testing.assert_allclose(
        both.apply(params, positions), alone + params["params"]["learned"]["embedding"][None, :5], rtol=1e-6
    )


@pytest.mark.parametrize("spec", ["rope(scaling=ntk,factor=2)+ssmax(count=absolute)", "path+fox+llama4(floor=3)"])
def test_pieces_with_state_equal_the_whole(spec):
    """Every slot of a row in one call, and of the same row in calls of 1, 5, 1 tokens with the carry handed on."""
    q, k, tokens = _inputs()
    composition = parse(spec).at(0)
    module = PositionalEncoding(composition, GEOMETRY)
    params = oracles.random_params(composition.parts, GEOMETRY)
    run = jax.jit(functools.partial(module.apply, {"params": params}))
    whole, _ = run(q, k, tokens, None)
    carry, pieces, start = composition.init_carry(GEOMETRY, 2, jnp.float32), [], 0
    for size in (1, 5, 1):
        cut = lambda a, at=slice(start, start + size): a[:, at]
        slots, after = run(cut(q), cut(k), jax.tree.map(cut, tokens), carry)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, carry)
        pieces.append(slots)
        carry, start = after, start + size
    for name in ("q", "k", "log_gates", "sharpness", "householder"):
        parts = [getattr(piece, name) for piece in pieces]
        if parts[0] is not None:
            joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts)
            jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), joined, getattr(whole, name))


def test_equal_schemes_share_one_compilation():
    q, k, tokens = _inputs()
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(module, params):
        traces.append(module)
        return module.apply({"params": params}, q, k, tokens, None)[0]

    params = parse("bam+ssmax").init_params(jax.random.key(0), GEOMETRY)
    results = [run(PositionalEncoding(parse(spec).at(0), GEOMETRY), params) for spec in ("bam+ssmax", "ssmax+bam")]
    assert len(traces) == 1
    assert isinstance(results[0], Slots)
    assert results[0].prior.log_prior == results[1].prior.log_prior
