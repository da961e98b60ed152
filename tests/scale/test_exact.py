"""Losses and gradients on a mesh are those of one device, for every scheme and every way to spread."""

from typing import Any

import jax
import numpy as np
import pytest

from bampath import checkpoint, sharding
from bampath.metrics import read
from bampath.step import build_model, declare, device_batch, init_state, make_train_step, optimizer_of
from bampath.train import fit
from tests.positions.matrix import SPECS
from tests.scale.small import MESHES, batch, largest_difference, loss_and_gradients, small
from tests.train.small import small as small_run
from tests.train.small import text_file

TOLERANCE = 1e-5  # of the largest entry of each gradient
QUICK = "model.attention_impl=reference"  # dense attention compiles fastest
# What every suite runs: priors, counts and gates over heads, parameters and tokens that are spread; `make test-meshes`
# runs every scheme on every mesh.
ALWAYS = [("bam+ssmax", "2×4"), ("fox+ssmax", "context 4")]


def check(spec: str, mesh: str) -> None:
    """The loss and every gradient of a spec on a mesh are those of one device."""
    if "lsh" in spec and "context" in str(MESHES[mesh]):
        with pytest.raises(ValueError, match=r"lsh cannot be spread over mesh\.context"):
            loss_and_gradients(f"position={spec}", *MESHES[mesh])
        return
    want, want_gradient = loss_and_gradients(f"position={spec}")
    got, gradient = loss_and_gradients(f"position={spec}", *MESHES[mesh])
    assert abs(got - want) <= TOLERANCE * abs(want), mesh
    difference, where = largest_difference(gradient, want_gradient)
    assert difference <= TOLERANCE, f"{mesh}: {where}"


@pytest.mark.parametrize(("spec", "mesh"), ALWAYS)
def test_losses_and_gradients_are_those_of_one_device(spec: str, mesh: str) -> None:
    check(spec, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_every_scheme_on_every_mesh(spec: str) -> None:
    for mesh in MESHES:
        check(spec, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [("model.kv_heads=2", "mesh.tensor=2", "mesh.context=4"), ("mesh.context=8",)])
def test_grouped_keys_and_chunks_of_two_tokens(changes: tuple[str, ...]) -> None:
    spec = "position=path(scale_gates=true)+fox+bam(init=laplace)+ssmax"
    want, want_gradient = loss_and_gradients(spec, *(c for c in changes if not c.startswith("mesh")))
    got, gradient = loss_and_gradients(spec, *changes)
    assert abs(got - want) <= TOLERANCE * abs(want)
    difference, where = largest_difference(gradient, want_gradient)
    assert difference <= TOLERANCE, where


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), ("model.remat=attention", *MESHES["mixed"])])
def test_layers_as_a_loop_are_the_same_layers(changes: tuple[str, ...]) -> None:
    spec = ("position=rope+window(5),bam+ssmax", "model.layers=4", QUICK)
    want, want_gradient = loss_and_gradients(*spec)
    got, gradient = loss_and_gradients(*spec, "model.scan=true", *changes)
    assert abs(got - want) <= TOLERANCE * abs(want)
    difference, where = largest_difference(gradient, want_gradient)
    # A loop and a mesh both sum in another order, and theta_alpha's gradient, over all pairs, nearly cancels.
    assert difference <= TOLERANCE * (1 + bool(changes)), where


def steps(*overrides: str) -> tuple[list[float], Any]:
    """Losses of three optimiser steps and the parameters after them."""
    config = small("position=bam+ssmax", "train.accumulate=2", "optim.name=radam", QUICK, *overrides)
    model = build_model(config)
    declared = declare(model)
    optimizer = optimizer_of(config, declared)
    state, losses = init_state(config, model, optimizer), []
    step = make_train_step(config, model, declared, optimizer)
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    for seed in range(3):
        state, report = step(state, device_batch(config, batch(seed)))
        losses.append(report.loss.value())
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == where  # so the next step is the same program
    return losses, jax.tree.map(np.asarray, state.params)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8 data", "8 fsdp", "mixed"])
def test_optimiser_steps_in_parts_are_those_of_one_device(mesh: str) -> None:
    # RAdam's first steps divide by nothing, so that a gradient that is 0 up to rounding moves nothing.
    changes = MESHES[mesh] if mesh == "mixed" else (MESHES[mesh][0].replace("8", "4"),)  # two parts of four rows
    (losses, params), (want, want_params) = steps(*changes), steps()
    np.testing.assert_allclose(losses, want, rtol=TOLERANCE)
    assert largest_difference(params, want_params)[0] <= TOLERANCE


def test_parameters_and_moments_lie_where_the_rules_say() -> None:
    config = small("position=bam+ssmax", "optim.name=adamw", *MESHES["mixed"])
    model = build_model(config)
    state = init_state(config, model, optimizer_of(config, declare(model)))
    name = lambda path: "/".join(str(getattr(key, "key", getattr(key, "name", ""))) for key in path)
    specs = {name(path): leaf.sharding.spec for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    sizes = {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    query = [key for key in specs if key.endswith("attention/query")]
    assert len(query) == 3  # the parameter and two moments
    for key in query:
        assert specs[key] == jax.P("fsdp", "tensor", None)
        assert sizes[key].addressable_shards[0].data.shape == (8, 2, 6)
    assert {specs[key] for key in specs if key.endswith("theta_beta")} == {jax.P("tensor")}
    assert {specs[key] for key in specs if key.endswith("final_norm/scale")} == {jax.P(None)}


@pytest.mark.slow
def test_a_run_continues_on_another_mesh(tmp_path: Any) -> None:
    text = f"data.source={text_file(tmp_path)}", f"data.cache_dir={tmp_path / 'cache'}", "optim.name=radam"
    losses = {}
    for name, first, second in (("one", (), ()), ("many", ("mesh.fsdp=4",), ("mesh.tensor=2", "mesh.context=2"))):
        folder = tmp_path / name
        fit(small_run(*text, "train.steps=2", *first), folder)
        result = fit(small_run(*text, "train.steps=4", "train.eval_every=4", *second), folder, resume=True)
        losses[name] = [record["loss"] for record in read(folder / "metrics.jsonl") if record["kind"] == "train"]
        losses[name].append(result.evaluation["loss"])
    np.testing.assert_allclose(losses["many"], losses["one"], rtol=TOLERANCE)
    info = checkpoint.describe(tmp_path / "many")
    (placement,) = {a.placement for a in info.params if a.name.endswith("query")}
    assert placement.endswith("('fsdp', 'tensor', None) on (data=1, fsdp=1, tensor=2, context=2)")


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        (("mesh.tensor=3",), ("model.heads=4", "mesh.tensor=3")),
        (("model.kv_heads=2", "mesh.tensor=4"), ("model.kv_heads=2", "mesh.tensor=4")),
        (("model.mlp_dim=25", "mesh.tensor=2"), ("model.mlp_dim=25", "mesh.tensor=2")),
        (("model.vocab_size=81", "mesh.tensor=2"), ("model.vocab_size=81", "mesh.tensor × mesh.fsdp=2")),
        (("mesh.fsdp=3", "data.batch_size=9", "model.vocab_size=81"), ("model.dim=16", "mesh.fsdp=3")),
        (("mesh.data=2", "mesh.fsdp=8"), ("data.batch_size / train.accumulate=8", "mesh.data × mesh.fsdp=16")),
        (("train.accumulate=4", "mesh.data=4"), ("data.batch_size / train.accumulate=2", "mesh.data × mesh.fsdp=4")),
        (("mesh.context=3",), ("data.sequence_length=32", "2 × mesh.context=6")),
        (("data.sequence_length=36", "mesh.context=2", "mesh.tensor=4"), ("=36", "mesh.context × mesh.tensor=8")),
        (("mesh.data=0",), ("mesh.data=0", "greater than 0")),
    ],
)
def test_uneven_shapes_are_refused_with_both_numbers(changes: tuple[str, ...], numbers: tuple[str, str]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  the message is looked at below
        small(*changes)
    for number in numbers:
        assert number in str(refused.value)


def test_a_mesh_larger_than_the_machine_is_refused() -> None:
    config = small("mesh.data=8", "mesh.context=4")
    with pytest.raises(ValueError, match=r"mesh\.data=8 .* mesh\.context=4 is a mesh of 32 devices, but there are 8"):
        sharding.mesh_of(config)


def test_explicit_positions_are_refused_with_context() -> None:
    config = small("position=rope", "mesh.context=2")
    model = build_model(config)
    tokens = jax.ShapeDtypeStruct((2, 32), "int32")

    def call(params: Any, tokens: Any) -> Any:
        with sharding.use(sharding.mesh_of(config)):
            return model.apply({"params": params}, tokens, None, tokens, method="features")

    with pytest.raises(ValueError, match=r"explicit positions cannot be spread over mesh\.context=2"):
        jax.eval_shape(call, declare(model).shapes, tokens)
