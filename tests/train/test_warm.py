"""A new run with another run's weights: what is taken over is the same to the bit, the rest fresh, all reported."""

import io

import jax
import numpy as np
import pytest

from bampath import runs, warm
from bampath.checkpoint import CheckpointError, Saver, index
from bampath.config import override
from bampath.data import ByteTokenizer
from bampath.sharding import mesh_of
from bampath.step import abstract_state, build_model, declare, init_state, optimizer_of
from bampath.train import fit
from tests.train.small import small, text_file

POSITIONAL = {"layer_0/attention/position/path/beta_kernel", "layer_0/attention/position/fox/bias"}


def fresh(config, seed=0):
    """Random parameters of a model as arrays where they belong, their shapes, and abstract ones with their places."""
    model = build_model(config)
    declared = declare(model)
    like = abstract_state(config, model, optimizer_of(config, declared), mesh_of(config)).params
    rng = np.random.default_rng(seed)
    draw = lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype(leaf.dtype), leaf.sharding)
    return jax.tree.map(draw, like), declared.shapes, like


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of `bam+ssmax` as a run's step 3: its folder and parameters."""
    run = tmp_path_factory.mktemp("source")
    params, *_ = fresh(small("model.layers=2"), seed=7)
    with Saver(run) as saver:
        saver.save(3, params, {}, {"config": {}, "data": {}, "tokenizer": ByteTokenizer().fingerprint, "elapsed": 0.0})
    return run, params


def flat(params):
    return {array.name: np.asarray(leaf) for array, leaf in zip(index(params), jax.tree.leaves(params), strict=True)}


def test_another_scheme_keeps_everything_but_its_own_parameters(source):
    run, theirs = source
    config = small("model.layers=2", "position=path+fox", f"train.init_from={run}")
    params, shapes, like = fresh(config)
    before, theirs = flat(params), flat(theirs)
    plan = warm.plan(config, shapes, ByteTokenizer())
    after = flat(warm.take_over(plan, like, lambda: params))
    assert list(after) == list(before)
    loaded = {array.name for array in plan.loaded}
    assert loaded == {name for name in after if "/position/" not in name}
    assert {array.name for array in plan.missing} == set(after) - loaded
    assert {array.name for array in plan.unused} == {name for name in theirs if "/position/" in name}
    assert set(after) - loaded >= POSITIONAL
    for name, value in after.items():
        np.testing.assert_array_equal(value, (theirs if name in loaded else before)[name], err_msg=name)
    text = str(plan)
    size = sum(array.size for array in plan.loaded)
    for line in (
        f"weights of {run}/checkpoints/00000003 (3 steps); optimiser, step and data start anew",
        f"loaded: {len(loaded)} arrays of {size:,} parameters:",
        "    layer_{0–1}/mlp/up",
        "missing, so fresh: 14 arrays",
        "    layer_{0–1}/attention/position/path/w_down",
        "unused: 6 arrays of 12 parameters:",
        "    layer_{0–1}/attention/position/bam/theta_alpha",
    ):
        assert line in text


def test_positional_parameters_come_along_if_asked_for_and_land_on_the_mesh(source):
    run, theirs = source
    options = ["model.layers=3", "mesh.fsdp=2", "mesh.tensor=2", f"train.init_from={run}", "train.init_positional=true"]
    config = small(*options)
    params, shapes, like = fresh(config)
    plan = warm.plan(config, shapes, ByteTokenizer())
    assert not plan.unused
    assert {array.name.split("/")[0] for array in plan.missing} == {"layer_2"}
    placed = jax.tree.map(lambda leaf: leaf.sharding, params)
    after = warm.take_over(plan, like, lambda: params)
    assert jax.tree.map(lambda leaf: leaf.sharding, after) == placed
    for name, value in flat(theirs).items():
        np.testing.assert_array_equal(flat(after)[name], value)


def test_what_does_not_fit_is_refused_with_names_and_shapes(source, tmp_path):
    run, _ = source

    def refused(message, *overrides, tokenizer=None, path=run):
        config = small(f"train.init_from={path}", *overrides)
        with pytest.raises(CheckpointError, match=message):
            warm.plan(config, declare(build_model(config)).shapes, tokenizer or ByteTokenizer())

    refused(r"another shape:\n  layer_0/mlp/down is \[32, 16\] there and \[64, 16\] here", "model.mlp_dim=64")
    refused(r"model of another shape:[\s\S]* and \d+ more", "model.dim=32", "model.head_dim=8")
    refused("nowhere does not exist", path=tmp_path / "nowhere")
    other = type("Other", (ByteTokenizer,), {"fingerprint": "other"})()
    refused(r"fingerprint bytes-259-v1, but data.tokenizer='bytes' has other", tokenizer=other)
    with pytest.raises(ValueError, match=r"train\.init_positional=True has no effect with train\.init_from="):
        small("train.init_positional=true")


def test_only_what_is_missing_is_drawn_and_as_a_fresh_run_draws_it(source):
    """No program draws what is read; the state is otherwise that of a run without a checkpoint, to the bit."""
    run, theirs = source
    config = small("model.layers=2", "position=path+fox", "train.seed=5", f"train.init_from={run}")
    model = build_model(config)
    declared = declare(model)
    optimizer = optimizer_of(config, declared)
    plan = warm.plan(config, declared.shapes, ByteTokenizer())
    state = runs.first_state(config, model, declared, None, runs.Start(), plan)
    wanted = init_state(config, model, optimizer)
    fresh_names, got = {array.name for array in plan.missing}, flat(state.params)
    for name, value in flat(wanted.params).items():
        np.testing.assert_array_equal(got[name], value if name in fresh_names else flat(theirs)[name], err_msg=name)
    pair = jax.tree.map(np.asarray, [(s.step, s.opt_state, s.key, s.sound) for s in (state, wanted)])
    jax.tree.map(np.testing.assert_array_equal, *pair)
    assert jax.tree.map(lambda a: (a.dtype, a.sharding), state) == jax.tree.map(lambda a: (a.dtype, a.sharding), wanted)


def test_a_run_begins_with_the_weights_and_a_resumed_one_with_its_own(source, tmp_path, monkeypatch):
    """At this rate a step changes no weight by more than its last bit. Nothing is missing, so no parameter is drawn."""

    def drawn(*_):
        raise AssertionError("parameters are drawn")

    monkeypatch.setattr(runs, "first_params", drawn)
    monkeypatch.setattr(runs, "init_state", drawn)
    run, theirs = source
    config = small(
        *("position=rope", f"train.init_from={run}", "optim.lr=1e-30", "train.steps=1"),
        *(f"data.source={text_file(tmp_path)}", f"data.cache_dir={tmp_path / 'cache'}"),
    )
    out = io.StringIO()
    result = fit(config, tmp_path / "run", out=out)
    assert "weights of" in out.getvalue()
    wanted = flat(theirs)
    for name, value in flat(result.params).items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)
    again = io.StringIO()
    assert fit(config, tmp_path / "run", resume=True, out=again).step == 1
    assert "weights of" not in again.getvalue()
    with pytest.raises(ValueError, match=r"train\.init_from=, but the run started with"):
        fit(override(config, "train.init_from="), tmp_path / "run", resume=True, out=io.StringIO())


def test_names_that_are_positional():
    for name in (
        "layer_0/attention/position/bam/theta",
        "shared_position_bam/theta",
        "input_position/learned/embedding",
    ):
        assert warm.positional(name)
    for name in ("embedding", "layer_0/attention/query", "layer_0/mlp/positions", "head"):
        assert not warm.positional(name)


def test_layers_are_collapsed():
    names = [f"layer_{i}/a/b" for i in (0, 1, 2, 5)] + ["head", "layer_7/c"]
    assert warm.collapsed(names) == ["layer_{0–2,5}/a/b", "head", "layer_7/c"]
