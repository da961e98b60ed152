"""Distillation: losses and gradients of its stages, and what a teacher is."""

from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath.convert import transplant
from bampath.convert.distill import stages_of
from bampath.convert.distill.losses import attention_errors, kl_divergence
from bampath.convert.distill.step import gradients, in_attention, objective, teacher_of
from bampath.model import LM
from tests.convert.small import fresh, tiny
from tests.helpers import central_difference, x64


def batch_of(rng: np.random.Generator, rows: int = 2, length: int = 11) -> dict[str, Any]:
    weights = rng.integers(0, 2, (rows, length)).astype(np.float32)
    weights[:, -2:] = 1
    return {
        "tokens": jnp.asarray(rng.integers(0, 272, (rows, length)), jnp.int32),
        "weights": jnp.asarray(weights),
        "segment_ids": jnp.asarray(np.sort(rng.integers(0, 2, (rows, length)), axis=1), jnp.int32),
    }


def pair(position: str, *words: str) -> tuple[LM, Any, Any, Any]:
    """(student, its parameters, teacher's model and parameters) of random weights, the student as surgery makes it."""
    conf = tiny(*words)
    theirs = fresh(conf)
    model, params, _ = transplant(conf.model, theirs, position)
    return LM(model), params, LM(conf.model), theirs


@pytest.mark.parametrize("words", [(), ("model.scan=true",)])
def test_an_identical_student_has_no_error(words: tuple[str, ...]) -> None:
    student, params, teacher, theirs = pair("rope", *words)
    batch, key = batch_of(np.random.default_rng(0)), jax.random.key(0)
    run = jax.jit(lambda p: attention_errors(student, teacher, p, theirs, batch, key, "mse"))
    errors, powers = run(params)
    assert (np.asarray(powers) > 0.01).all()
    assert (np.asarray(errors) <= 1e-11 * np.asarray(powers)).all()  # two compiled copies may round differently
    moved = jax.tree.map(lambda x: x, params)
    moved["layer_1"]["attention"]["value"] += 0.1
    errors, _ = run(moved)
    assert errors[0] <= 1e-11 * powers[0]
    assert errors[1] > 1e-3 * powers[1]


@pytest.mark.slow
def test_a_loop_over_layers_has_the_numbers_of_layers_one_by_one() -> None:
    found = {}
    for scan in ("true", "false"):
        student, params, teacher, theirs = pair("bam+ssmax,nope", f"model.scan={scan}", "model.layers=4")
        batch = batch_of(np.random.default_rng(1))
        run = jax.jit(
            lambda p, student=student, teacher=teacher, theirs=theirs, batch=batch: attention_errors(
                student, teacher, p, theirs, batch, jax.random.key(0), "norm"
            )
        )
        found[scan] = run(params)
    for a, b in zip(*found.values(), strict=True):
        assert a.shape == (4,)
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_errors_are_those_of_a_teacher_walked_by_hand() -> None:
    """Layer by layer: the student's attention alone, put where the teacher's stands, against the teacher's own."""
    student, params, teacher, theirs = pair("nope")
    batch = batch_of(np.random.default_rng(2))
    batch["weights"] = jnp.ones_like(batch["weights"])
    got, _ = jax.jit(lambda p: attention_errors(student, teacher, p, theirs, batch, jax.random.key(0), "mse"))(params)
    first = jax.tree.map(jnp.zeros_like, params["layer_0"]["mlp"])
    streams = []
    for model, own in ((student, params), (teacher, theirs)):  # one layer without MLP: embedding + attention output
        alone = LM(replace(model.config, layers=1))
        cut = {"embedding": own["embedding"], "head": own["head"], "final_norm": own["final_norm"]}
        cut["layer_0"] = own["layer_0"] | {"mlp": first}
        run = jax.jit(
            lambda p, alone=alone: alone.apply(
                {"params": p},
                batch["tokens"],
                batch["segment_ids"],
                capture_intermediates=lambda m, _: m.name == "layer_0",
            )
        )
        seen = run(cut)[1]
        streams.append(seen["intermediates"]["layer_0"]["__call__"][0][0])
    want = np.mean((np.asarray(streams[0]) - np.asarray(streams[1])) ** 2, axis=-1).sum()
    assert got[0] == pytest.approx(want, rel=1e-4)


def dense_kl(hidden: Any, kernel: Any, teacher: Any, theirs: Any, weights: Any, tau: float) -> float:
    s, t = (np.einsum("btd,dv->btv", np.asarray(a, np.float64), np.asarray(b, np.float64)) / tau for a, b in (
        (hidden, kernel), (teacher, theirs)))  # fmt: skip
    log = lambda x: x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
    kl = (np.exp(log(t)) * (log(t) - log(s))).sum(-1)
    return float(tau**2 * (kl * np.asarray(weights)).sum())


def test_kl_and_its_gradient_are_the_dense_ones() -> None:
    rng = np.random.default_rng(3)
    with x64():
        arrays = [rng.normal(size=s) for s in ((2, 7, 5), (5, 9), (2, 7, 4), (4, 9))]
        weights = rng.integers(0, 3, (2, 7)).astype(np.float32)
        run = lambda h, k: kl_divergence(h, k, *map(jnp.asarray, arrays[2:]), weights, temperature=1.7, chunk=4)
        total, agreed = jax.jit(run)(*map(jnp.asarray, arrays[:2]))
        assert float(total) == pytest.approx(dense_kl(*arrays, weights, 1.7), rel=1e-12)
        same = np.argmax(arrays[0] @ arrays[1], -1) == np.argmax(arrays[2] @ arrays[3], -1)
        assert float(agreed) == (same * weights).sum()
        grads = jax.jit(jax.grad(lambda *a: run(*a)[0], argnums=(0, 1)))(*map(jnp.asarray, arrays[:2]))
        for i in (0, 1):
            direction = rng.normal(size=arrays[i].shape)
            f = lambda x, i=i: dense_kl(*[x if j == i else a for j, a in enumerate(arrays)], weights, 1.7)
            want = central_difference(f, arrays[i], direction)
            assert float((grads[i] * direction).sum()) == pytest.approx(want, rel=1e-6)


def test_tokens_without_weight_cannot_spoil_the_kl() -> None:
    rng = np.random.default_rng(4)
    hidden, kernel = jnp.asarray(rng.normal(size=(1, 6, 5)), jnp.bfloat16), jnp.asarray(rng.normal(size=(5, 9)))
    weights = jnp.ones((1, 6)).at[0, 2].set(0)
    f = lambda h, k: kl_divergence(h, k, hidden + 1, kernel, weights, chunk=4)[0]
    clean = jax.value_and_grad(f, argnums=(0, 1))(hidden, kernel)
    spoiled = jax.value_and_grad(f, argnums=(0, 1))(hidden.at[0, 2].set(jnp.nan), kernel)
    chex.assert_trees_all_equal(clean, spoiled)
    assert clean[1][0].dtype == jnp.bfloat16


def wide_norm(x: Any, scale: Any, eps: float) -> Any:
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse * scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)


@pytest.mark.parametrize(
    ("position", "kind", "words"),
    [
        ("alibi+ssmax", "attention", ("stage1.error=norm",)),
        pytest.param("bam+ssmax", "attention", (), marks=pytest.mark.slow),
        pytest.param("path+fox", "attention", (), marks=pytest.mark.slow),
        pytest.param("path", "logits", (), marks=pytest.mark.slow),
        ("bam", "logits", ("stage2.temperature=2.5",)),
    ],
)
def test_gradients_agree_with_finite_differences_in_float64(
    position: str, kind: str, words: tuple[str, ...], monkeypatch: Any
) -> None:
    monkeypatch.setattr("bampath.attention.rms_norm", wide_norm)  # the model's own works in float32 always
    student, params, teacher, theirs = pair(position, "model.layers=1" if kind == "attention" else "model.layers=2")
    stage = next(s for s in stages_of(tiny(), [f"position={position}", *words]) if s.kind == kind)
    with x64():
        for model in (student, teacher):
            object.__setattr__(model.config, "dtype", "float64")
        wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), tree)
        params, theirs, batch = wide(params), wide(theirs), batch_of(np.random.default_rng(5))
        rng, key = np.random.default_rng(6), jax.random.key(0)
        params = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), params)  # no token may be matched exactly
        mean, _, grads = jax.jit(lambda p: gradients(stage, student, teacher, p, theirs, batch, key))(params)
        loss = jax.jit(lambda p: objective(stage, student, teacher)(p, theirs, batch, key)[0].total)
        way = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
        at = lambda eps: float(loss(jax.tree.map(lambda x, d: x + eps * d, params, way)))
        want = (at(1e-5) - at(-1e-5)) / 2e-5 / float(mean.weight)
        got = sum(float((g * d).sum()) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(way), strict=True))
        assert got == pytest.approx(want, rel=1e-5)
        if kind == "attention":  # what stage 1 freezes has no part in its loss
            for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
                name = "/".join(str(k.key) for k in path)
                assert in_attention(name) == bool(np.abs(leaf).max() > 0), name


@pytest.mark.slow
def test_parts_of_a_batch_add_up() -> None:
    student, params, teacher, theirs = pair("bam")
    batch, key = batch_of(np.random.default_rng(7), rows=4), jax.random.key(0)
    found = []
    for parts in ("1", "2"):
        words = ["position=bam", f"train.accumulate={parts}"]
        stage = stages_of(tiny(), words)[0]
        found.append(jax.jit(lambda p, s=stage: gradients(s, student, teacher, p, theirs, batch, key))(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-8), *found)


@pytest.mark.slow
def test_a_teacher_in_bfloat16_is_the_model_in_bfloat16() -> None:
    conf = tiny("position=fox")
    params, tokens = fresh(conf), batch_of(np.random.default_rng(8))["tokens"]
    teacher = teacher_of(conf.model, params, conf.model, "bfloat16")
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(teacher.params)}
    assert kinds == {"bfloat16", "float32"}
    want = LM(replace(conf.model, dtype="bfloat16")).apply({"params": params}, tokens)
    np.testing.assert_array_equal(teacher.model.apply({"params": teacher.params}, tokens), want)
