"""One step: parts add up to the whole, remat changes nothing, golden values, masters stay float32, bad steps undo."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath import config
from bampath.diagnose import explain, first_bad_module
from bampath.flops import body_parameters
from bampath.params import POSITIONAL_ROLES
from bampath.step import build_model, declare, gradients, init_state, make_eval_step, make_train_step, optimizer_of
from tests.helpers import relative_rms
from tests.train.small import small

BASE = small("position=bam+ssmax", "optim.name=radam", "optim.weight_decay=0")


def changed(cfg, *overrides):
    return config.override(cfg, *overrides)


def batch_for(cfg, seed=0):
    """Packed rows with uneven weights: two documents per row, padding at the end of the first one."""
    rng = np.random.default_rng(seed)
    shape = (cfg.data.batch_size, cfg.data.sequence_length)
    segments = np.tile(np.arange(shape[1]) >= 9, (shape[0], 1)).astype(np.int32)
    segments[0, -5:] = -1
    weights = rng.uniform(size=shape) * (rng.uniform(size=shape) > 0.4) * (segments >= 0)
    batch = {
        "tokens": rng.integers(0, 259, shape),
        "targets": rng.integers(0, 259, shape),
        "weights": weights.astype(np.float32),
        "segment_ids": segments,
    }
    return {name: jnp.asarray(a, None if name == "weights" else jnp.int32) for name, a in batch.items()}


@functools.cache
def compiled(cfg):
    """Model, declared parameters, the first state as numpy arrays, and the jitted step; once for all tests."""
    model = build_model(cfg)
    declared = declare(model)
    optimizer = optimizer_of(cfg, declared)
    state = jax.tree.map(np.array, init_state(cfg, model, optimizer))
    return model, declared, state, make_train_step(cfg, model, declared, optimizer)


def first_state(cfg=BASE):
    return jax.tree.map(jnp.array, compiled(cfg)[2])


@functools.cache
def grads_of(cfg):
    """(loss, gradients) of `batch_for(cfg)` at `bent_params()`."""
    run = jax.jit(lambda p, b: gradients(cfg, build_model(cfg), p, b, jax.random.key(0)))
    return run(bent_params(), batch_for(cfg))


def bent_params():
    """BASE's first parameters with priors that are not flat: at the uniform start theta_alpha has no gradient."""
    params = first_state().params
    params["layer_0"]["attention"]["position"]["bam"]["theta_beta"] = jnp.asarray([0.4, -0.3])
    return params


def assert_trees_close(got, want, tolerance):
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        scale = max(float(np.abs(b).max()), 1e-3)
        np.testing.assert_allclose(a, b, atol=tolerance * scale, rtol=0, err_msg=jax.tree_util.keystr(path))


def test_parts_add_up_to_one_big_batch():
    """Rows with few and many targets: a mean of the parts' means would be another gradient."""
    loss, grads = grads_of(BASE)
    part_loss, part_grads = grads_of(changed(BASE, "train.accumulate=4"))
    assert part_loss.value() == pytest.approx(loss.value(), rel=1e-6)
    assert float(part_loss.weight) == pytest.approx(float(loss.weight), rel=1e-6)
    assert_trees_close(part_grads, grads, 2e-6)


def test_the_gradient_is_that_of_the_mean_over_targets():
    params, batch, model = bent_params(), batch_for(BASE), compiled(BASE)[0]

    def dense(params):
        logits = model.apply({"params": params}, batch["tokens"], batch["segment_ids"])
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]
        return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])

    value, want = jax.jit(jax.value_and_grad(dense))(params)
    loss, got = grads_of(BASE)
    assert loss.value() == pytest.approx(float(value), rel=1e-6)
    assert_trees_close(got, want, 2e-6)


@pytest.mark.parametrize("remat", ["full", "attention"])
def test_remat_changes_nothing(remat):
    loss, grads = grads_of(BASE)
    other_loss, other = grads_of(changed(BASE, f"model.remat={remat}"))
    assert other_loss.value() == pytest.approx(loss.value(), rel=1e-6)
    assert_trees_close(other, grads, 2e-6)


def test_bfloat16_computes_on_float32_masters():
    narrow = changed(BASE, "model.dtype=bfloat16")
    loss, grads = grads_of(BASE)
    narrow_loss, narrow_grads = grads_of(narrow)
    assert narrow_loss.value() == pytest.approx(loss.value(), rel=1e-2)
    assert 0 < relative_rms(narrow_grads["embedding"], grads["embedding"]) < 0.05
    declared = declare(build_model(narrow))
    step = make_train_step(narrow, build_model(narrow), declared, optimizer_of(narrow, declared))
    state, _ = jax.eval_shape(step, first_state(), batch_for(narrow))
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}


# Loss, gradient norm and update norm of steps 1 and 3 from seed 42, computed once: a change of them is a change of what
# is trained, and must be meant.
GOLDEN = [[5.768717, 0.6798803, 2.039640e-3], [5.740952, 0.6935073, 9.179618e-4]]


def test_golden_values_of_a_step():
    state, step, found = first_state(), compiled(BASE)[3], []
    for i in range(3):
        state, report = step(state, batch_for(BASE, i))
        found.append([report.loss.value(), float(report.grad_norm), float(report.update_norm)])
    np.testing.assert_allclose([found[0], found[2]], GOLDEN, rtol=2e-4)


def test_the_state_that_goes_in_is_donated():
    state = first_state()
    compiled(BASE)[3](state, batch_for(BASE))
    assert state.params["embedding"].is_deleted()


def with_value(state, name, value):
    """The state with `value` in the first element of every parameter whose path ends in `name`."""
    put = lambda path, leaf: leaf.at[(0,) * leaf.ndim].set(value) if _name(path).endswith(name) else leaf
    return dataclasses.replace(state, params=jax.tree_util.tree_map_with_path(put, state.params))


def _name(path):
    return "/".join(str(key.key) for key in path)


def test_a_bad_step_leaves_everything_as_it_was_and_so_do_all_after_it():
    _, declared, _, step = compiled(BASE)
    state = with_value(first_state(), "theta_beta", jnp.nan)
    before, batch = jax.tree.map(np.array, state), batch_for(BASE)
    state, report = step(state, batch)
    assert not report.sound
    state, again = step(state, batch)
    assert not again.sound
    jax.tree.map(np.testing.assert_array_equal, dataclasses.replace(state, sound=np.True_), before)
    text = explain(BASE, declared, report, batch, state)
    assert "First bad parameter group: layer_0/attention/position/bam/theta_beta, whose values are not finite" in text


def test_a_forward_pass_that_overflows_is_traced_to_its_module():
    """theta_beta = −8 makes the prior of a token at itself infinite: values are finite, the attention layer is not."""
    _, declared, _, step = compiled(BASE)
    batch = batch_for(BASE)
    state, report = step(with_value(first_state(), "theta_beta", -8.0), batch)
    text = explain(changed(BASE, "train.accumulate=2"), declared, report, batch, state)
    assert "the loss is nan" in text
    assert "First bad parameter group: layer_0/attention" in text
    assert "bam/theta_beta -8 to " in text


def test_a_bad_gradient_or_update_alone_is_named():
    _, declared, _, step = compiled(BASE)
    batch = batch_for(BASE)
    state, report = step(first_state(), batch)
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)]
    squares = np.array(report.squares)
    squares[names.index("layer_0/mlp/up")] = np.inf
    text = explain(BASE, declared, dataclasses.replace(report, squares=squares), batch, state)
    assert "First bad parameter group: layer_0/mlp/up, whose gradient is not finite" in text
    assert first_bad_module(BASE, state.params, batch) is None
    lost = dataclasses.replace(report, update_norm=jnp.float32(np.inf))
    assert "the update (norm inf) is not: lower optim.lr" in explain(BASE, declared, lost, batch, state)


def test_a_batch_without_targets_moves_nothing():
    state, batch = first_state(), batch_for(BASE)
    state, report = compiled(BASE)[3](state, batch | {"weights": jnp.zeros_like(batch["weights"])})
    assert report.sound
    assert math.isnan(report.loss.value())
    jax.tree.map(np.testing.assert_array_equal, state.params, compiled(BASE)[2].params)


def test_evaluation_adds_up_over_batches_of_any_size():
    params, batch = bent_params(), batch_for(BASE)
    evaluate = make_eval_step(BASE, compiled(BASE)[0])
    halves = [evaluate(params, {name: a[rows] for name, a in batch.items()}) for rows in (slice(0, 2), slice(2, 4))]
    assert halves[0].merge(halves[1]).value() == pytest.approx(grads_of(BASE)[0].value(), rel=1e-6)


PAPER_TOTALS = {  # millions, BAM's code base
    "l6": 49.29, "l8": 97.53, "l12": 121.13, "l15": 274.6, "l18": 525.4, "l24": 1140.95,
    "l14.1": 431.0, "llama1b": 1107.4,
}  # fmt: skip


@pytest.mark.parametrize("name", PAPER_TOTALS)
def test_parameter_counts_of_the_papers(name):
    cfg = config.get(name, "position=nope")
    declared = declare(build_model(cfg))
    assert declared.count == body_parameters(cfg.model)
    assert declared.count / 1e6 == pytest.approx(PAPER_TOTALS[name], abs=0.06)


@pytest.mark.parametrize(
    ("spec", "extra"), [("bam", 384), ("bam+ssmax", 384 + 192), ("rope", 0), ("bam(mu=trainable)", 576)]
)
def test_bam_adds_exactly_two_numbers_per_head_and_layer(spec, extra):
    declared = declare(build_model(config.get("bam-120m", f"position={spec}")))
    assert declared.count - body_parameters(config.get("bam-120m").model) == extra
    pairs = zip(jax.tree.leaves(declared.shapes), jax.tree.leaves(declared.roles), strict=True)
    assert sum(leaf.size for leaf, role in pairs if role in POSITIONAL_ROLES) == extra


def test_path_760m_has_the_size_of_its_name():
    assert declare(build_model(config.get("path-760m"))).count == pytest.approx(760e6, rel=0.05)
