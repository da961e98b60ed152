"""One step of every recipe against numbers worked out by hand, and the mapping from roles leaf by leaf."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers

from bampath.config import OptimConfig
from bampath.optim import learning_rate, make_optimizer, muon_dimensions
from bampath.step import build_model, declare
from tests.train.small import small

ROLES = {
    "embedding": "embedding",
    "head": "embedding",
    "query": "matrix",
    "out": "matrix",
    "gate": "matrix",
    "stack": "matrix",
    "conv": "conv",
    "norm": "norm",
    "bias": "bias",
    "alpha": "prior",
    "s": "sharpness",
    "w": "position",
}
AXES = {
    "embedding": ("vocab", "embed"),
    "head": ("embed", "vocab"),
    "query": ("embed", "heads", None),
    "out": ("heads", None, "embed"),
    "gate": ("embed", "mlp"),
    "stack": ("layers", "embed", "heads", None),
    "conv": (None, "heads"),
    "norm": ("embed",),
    "bias": ("embed",),
    "alpha": ("heads",),
    "s": ("heads",),
    "w": ("embed", None),
}
SIZES = {"vocab": 10, "embed": 6, "heads": 2, "mlp": 8, "layers": 3, None: 4}


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=[SIZES[a] for a in axes]), jnp.float32) for k, axes in AXES.items()}


def one_step(config, params, grads, steps=100, count=1):
    optimizer = make_optimizer(config, steps, ROLES, AXES)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(count):
        updates, state = update(grads, state, params)
    return updates


def ones(params):
    return jax.tree.map(jnp.ones_like, params)


@pytest.mark.parametrize(("step", "factor"), [(1, 1.0), (5, 1.0), (6, 0.1824), (7, 0.2331)])
def test_radam_is_momentum_for_five_steps_and_then_rectified(step, factor):
    """With a constant gradient of 1 both bias-corrected moments are 1, so the step is RAdam's factor alone."""
    params = parameters()
    config = OptimConfig(name="radam", lr=1e-3, schedule="constant", weight_decay=0.0, clip_norm=0)
    updates = one_step(config, params, ones(params), count=step)
    for name, update in updates.items():
        np.testing.assert_allclose(update, np.full(params[name].shape, -1e-3 * factor), rtol=3e-4, err_msg=name)


@pytest.mark.parametrize("name", ["radam", "adamw", "muon"])
def test_decay_follows_the_role(name):
    params = parameters()
    config = OptimConfig(name=name, lr=0.5, schedule="constant", weight_decay=0.1, clip_norm=0)
    updates = one_step(config, params, jax.tree.map(jnp.zeros_like, params))
    for leaf, update in updates.items():
        decays = ROLES[leaf] in ("matrix", "embedding", "conv")
        np.testing.assert_allclose(
            update, -0.05 * params[leaf] if decays else 0 * params[leaf], rtol=1e-6, err_msg=leaf
        )
    kept = one_step(OptimConfig(name=name, decay_embedding=False), params, jax.tree.map(jnp.zeros_like, params))
    assert not kept["embedding"].any()
    assert kept["query"].any()


def test_prior_has_its_own_decay_and_rate():
    params = parameters()
    config = OptimConfig(name="adamw", lr=1.0, schedule="constant", prior_decay=20.0, prior_lr=0.5, position_lr=0.1)
    updates = one_step(config, params, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_allclose(updates["alpha"], -10 * params["alpha"], rtol=1e-6)
    moved = one_step(OptimConfig(name="adamw", lr=1.0, schedule="constant", position_lr=0.1), params, ones(params))
    np.testing.assert_allclose(moved["w"], jnp.full_like(params["w"], -0.1), rtol=1e-4)
    np.testing.assert_allclose(moved["s"], jnp.full_like(params["s"], -1.0), rtol=1e-4)


def test_adamw_first_step_is_the_sign_plus_decay():
    params = parameters()
    grads = {k: jnp.asarray(np.random.default_rng(7).normal(size=p.shape), jnp.float32) for k, p in params.items()}
    config = OptimConfig(name="adamw", lr=1e-3, schedule="constant", weight_decay=0.01, clip_norm=1.0)
    updates = one_step(config, params, grads)
    clipped = grads["gate"] / np.sqrt(sum(np.sum(np.square(g)) for g in grads.values()))
    want = -1e-3 * (clipped / (np.abs(clipped) + 1e-8) + 0.01 * params["gate"])
    np.testing.assert_allclose(updates["gate"], want, rtol=1e-5)


@pytest.mark.parametrize("counted", [True, False])
def test_clipping_with_and_without_positional_parameters(counted):
    params = parameters()
    grads = ones(params)
    # RAdam's first step is the clipped gradient itself
    config = OptimConfig(lr=1.0, schedule="constant", weight_decay=0, clip_norm=0.5, clip_positional=counted)
    updates = one_step(config, params, grads)
    positional = {"alpha", "s", "w"}
    sizes = {k: p.size for k, p in params.items() if counted or k not in positional}
    factor = 0.5 / np.sqrt(sum(sizes.values()))
    np.testing.assert_allclose(updates["gate"], -factor * grads["gate"], rtol=1e-5)
    np.testing.assert_allclose(updates["alpha"], -(factor if counted else 1.0) * grads["alpha"], rtol=1e-5)


def test_muon_takes_matrices_only():
    dims = muon_dimensions(ROLES, AXES)
    assert dims == {
        **dict.fromkeys(ROLES),
        "query": MuonDimensionNumbers(0, (1, 2)),
        "out": MuonDimensionNumbers((0, 1), 2),
        "gate": MuonDimensionNumbers(0, 1),
        "stack": MuonDimensionNumbers(1, (2, 3)),
    }
    low_rank = muon_dimensions({"x": "matrix"}, {"x": (None, "kv_heads", None)})
    assert low_rank == {"x": MuonDimensionNumbers(0, (1, 2))}


def test_muon_takes_these_leaves_of_a_model_and_no_others():
    declared = declare(build_model(small("position=path+fox+bam+ssmax", "model.qk_norm=true")))
    dims = muon_dimensions(declared.roles, declared.axes)
    is_leaf = lambda node: node is None or isinstance(node, MuonDimensionNumbers)
    leaves = jax.tree_util.tree_leaves_with_path(dims, is_leaf=is_leaf)
    taken = {"/".join(key.key for key in path): dim for path, dim in leaves if dim is not None}
    wide, flat, out = MuonDimensionNumbers(0, (1, 2)), MuonDimensionNumbers(0, 1), MuonDimensionNumbers((0, 1), 2)
    assert taken == {
        **{f"layer_0/attention/{name}": wide for name in ("query", "key", "value")},
        "layer_0/attention/out": out,
        **{f"layer_0/mlp/{name}": flat for name in ("gate", "up", "down")},
        **{f"layer_0/attention/position/path/{name}": flat for name in ("w_down", "beta_kernel")},
        "layer_0/attention/position/path/w_up": wide,
        "layer_0/attention/position/fox/kernel": flat,
    }


def test_muon_steps_are_orthogonal_for_matrices_and_adams_elsewhere():
    params = parameters()
    grads = {k: jnp.asarray(np.random.default_rng(3).normal(size=p.shape), jnp.float32) for k, p in params.items()}
    config = OptimConfig(name="muon", lr=1.0, schedule="constant", weight_decay=0, clip_norm=0)
    updates = one_step(config, params, grads)
    matrix = np.asarray(updates["query"]).reshape(6, 8) / (0.2 * np.sqrt(8))
    singular = np.linalg.svd(matrix, compute_uv=False)
    assert (singular > 0.5).all()
    assert (singular < 1.5).all()
    for leaf in ("embedding", "head", "conv", "norm", "bias", "alpha", "s", "w"):
        np.testing.assert_allclose(updates[leaf], -np.sign(grads[leaf]), rtol=1e-4, err_msg=leaf)


def test_muon_in_bfloat16_makes_the_steps_of_float32():
    """Two steps of momentum against Newton-Schulz in float64; and what is kept between steps stays float32."""
    random = np.random.default_rng(5)
    draw = lambda: {"a": jnp.asarray(random.normal(size=(96, 64)), jnp.float32)}
    params, seen, updates, states = draw(), [], {}, {}
    for _ in range(2):
        seen.append(draw())
        for dtype in ("float32", "bfloat16"):
            plain = OptimConfig(name="muon", lr=1.0, schedule="constant", weight_decay=0, clip_norm=0)
            made = make_optimizer(replace(plain, muon_dtype=dtype), 10, {"a": "matrix"}, {"a": ("embed", "mlp")})
            state = states.get(dtype, made.init(params))
            updates[dtype], states[dtype] = made.update(seen[-1], state, params)
    first, second = (np.asarray(grads["a"], np.float64) for grads in seen)
    mu = 0.95 * 0.05 * first + 0.05 * second
    x = 0.95 * mu / (1 - 0.95**3) + 0.05 * second / (1 - 0.95**2)  # Nesterov's, with optax's corrections of the bias
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    want = -0.2 * np.sqrt(96) * x
    error = {dtype: np.linalg.norm(np.asarray(u["a"]) - want) / np.linalg.norm(want) for dtype, u in updates.items()}
    assert error["float32"] < 1e-5
    assert 1e-5 < error["bfloat16"] < 0.1  # each step multiplies what was rounded in small singular values by 3.4
    singular = np.linalg.svd(np.asarray(updates["bfloat16"]["a"]) / (0.2 * np.sqrt(96)), compute_uv=False)
    assert (singular > 0.5).all()
    assert (singular < 1.5).all()
    assert updates["bfloat16"]["a"].dtype == jnp.float32
    assert all(leaf.dtype != jnp.bfloat16 for leaf in jax.tree.leaves(states["bfloat16"]))


def test_schedules_pass_through_their_corners():
    at = lambda step, **options: float(learning_rate(OptimConfig(lr=2.0, **options), 100)(step))
    assert at(0) == 2.0
    assert at(50) == pytest.approx(1.1)
    assert at(100) == pytest.approx(0.2)
    path = {"warmup_steps": 10, "lr_start": 0.03, "lr_end": 0.03}
    assert at(0, **path) == pytest.approx(0.06)
    assert at(5, **path) == pytest.approx(1.03)
    assert at(10, **path) == pytest.approx(2.0)
    assert at(100, **path) == pytest.approx(0.06)
    assert at(55, schedule="linear", warmup_steps=10) == pytest.approx(1.1)
    assert at(99, schedule="constant") == 2.0
    wsd = {"schedule": "wsd", "decay_steps": 20, "warmup_steps": 10}
    assert at(79, **wsd) == 2.0
    assert at(90, **wsd) == pytest.approx(1.1)
    assert float(learning_rate(OptimConfig(lr=2.0, warmup_steps=10), 5)(4)) == pytest.approx(0.8)  # ends on the ramp
    with pytest.raises(ValueError, match="decay_steps=95"):
        at(0, schedule="wsd", decay_steps=95, warmup_steps=10)


def test_state_is_float32_and_as_large_as_two_copies():
    params = parameters()
    state = make_optimizer(OptimConfig(name="adamw"), 10, ROLES, AXES).init(params)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert sum(m.size for m in moments) == 2 * sum(p.size for p in params.values())
    assert {m.dtype for m in moments} == {jnp.dtype("float32")}
