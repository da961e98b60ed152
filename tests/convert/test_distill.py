"""Distillation: losses and gradients of its stages, what is trained and what is frozen, resuming, and the command."""

import io
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from bampath import checkpoint, config
from bampath.checkpoint import CheckpointError
from bampath.config import Config
from bampath.convert import transplant
from bampath.convert.__main__ import main
from bampath.convert.distill import distill, plan, stages_of
from bampath.convert.distill.losses import attention_errors, kl_divergence
from bampath.convert.distill.step import gradients, in_attention, objective, teacher_of
from bampath.convert.surgery import write_start
from bampath.data import tokenizer_of
from bampath.load import load
from bampath.metrics import read
from bampath.model import LM
from bampath.startup import keep_programs
from bampath.step import declare
from tests.helpers import central_difference, x64
from tests.train.small import SMALL, text_file

TINY = (
    *(word for word in SMALL if not word.startswith("model.layers")),
    *("model.layers=2", "model.kv_heads=1", "position=rope", "model.train_length=24"),
)
CACHE = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
STAGES = (
    *("stage1.steps=6", "stage1.batch=8", "stage1.length=16", "stage1.lr=0.02"),
    *("stage2.steps=6", "stage2.batch=8", "stage2.lr=0.01"),
    *("stage3.steps=3", "stage3.batch=4", "stage3.lr=0.003"),
    *("train.log_every=1", "train.save_every=2", "data.workers=0"),
)


def tiny(*words: str) -> Config:
    return config.override(config.get("tiny", *TINY), *words)


def fresh(conf: Config, seed: int = 0) -> Any:
    """Parameters away from their initial values, so that every one of them matters."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> Any:
        mean = 1 if path[-1].key == "scale" else 0
        return jnp.asarray(rng.normal(mean, 0.2, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, declare(LM(conf.model)).shapes)


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
    jax.tree.map(np.testing.assert_array_equal, clean, spoiled)
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


@pytest.fixture(scope="module")
def home(tmp_path_factory: Any) -> Iterator[Path]:
    """A folder with a text and a teacher, and one for programs: those that continue are compiled once."""
    folder = tmp_path_factory.mktemp("distill")
    before = {name: getattr(jax.config, name) for name in CACHE}
    keep_programs(folder / "programs")
    conf = tiny("model.layers=1", f"data.source={text_file(folder)}", f"data.cache_dir={folder / 'cache'}")
    write_start(folder / "teacher", conf, fresh(conf), tokenizer_of(conf.data))
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """All three stages by the command, never interrupted."""
    arguments = ["distill", str(home / "teacher"), "position=bam+ssmax", *STAGES, "--out", str(home / "whole")]
    assert main(arguments) == 0
    return home / "whole"


def flat(folder: Path) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(checkpoint.read_params(folder))
    return {"/".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in leaves}


def test_the_command_runs_three_stages_whose_losses_fall(home: Path, whole: Path) -> None:
    for stage in ("stage1", "stage2", "stage3"):
        losses = [r["loss"] for r in read(whole / stage / "metrics.jsonl") if r["kind"] == "train"]
        assert losses[-1] < losses[0], (stage, losses)
    record = next(iter(read(whole / "stage1" / "metrics.jsonl")))
    assert record["layer_00/relative"] > 0
    assert record["loss"] == pytest.approx(record["layer_00/error"], rel=1e-5)
    record = next(iter(read(whole / "stage2" / "metrics.jsonl")))
    assert 0 <= record["agreement"] <= 1
    assert record["layer_00/grad_norm"] > 0
    loaded = load(whole / "stage3")
    assert (loaded.config.model.position, loaded.step) == ("bam+ssmax", 3)
    logits = jax.jit(loaded.model.apply)({"params": loaded.params}, jnp.ones((1, 5), jnp.int32))
    assert jnp.isfinite(logits).all()


def test_a_student_starts_as_surgery_says_and_stage_1_leaves_the_rest(home: Path, whole: Path) -> None:
    teacher = load(home / "teacher")
    _, params, report = transplant(teacher.config.model, teacher.params, "bam+ssmax", seed=42)
    start, one, two = flat(whole / "start"), flat(whole / "stage1"), flat(whole / "stage2")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        np.testing.assert_array_equal(start["/".join(str(key.key) for key in path)], leaf)
    old = flat(home / "teacher")
    for name in report.loaded:
        np.testing.assert_array_equal(start[name], old[name])
    for name, value in start.items():
        assert np.array_equal(value, one[name]) != in_attention(name), name
        assert not np.array_equal(one[name], two[name]), name
    factor = {name: np.abs(two[name] - one[name]).mean() for name in ("layer_0/mlp/up", "layer_0/attention/query")}
    assert factor["layer_0/mlp/up"] < 0.2 * factor["layer_0/attention/query"]  # stage2.rest is 0.07


class Killed(BaseException):
    pass


def test_killed_anywhere_it_continues_bit_for_bit(home: Path, whole: Path) -> None:
    words = ["position=bam+ssmax", *STAGES]
    out, log = home / "killed", io.StringIO()
    deaths = [random.Random("distillation").randint(1, 12)]
    for death in deaths:
        steps = iter(range(1, 100))

        def dies(death: int = death, steps: Any = steps) -> bool:
            if next(steps) == death:
                raise Killed
            return False

        try:
            distill(plan(home / "teacher", words), out, resume=True, should_stop=dies, say=log.write, log=log)
        except Killed:
            continue
    assert distill(plan(home / "teacher", words), out, resume=True, say=log.write, log=log) == out / "stage3"
    for stage in ("stage1", "stage2", "stage3"):
        a, b = flat(out / stage), flat(whole / stage)
        assert a.keys() == b.keys()
        for name, value in a.items():
            np.testing.assert_array_equal(value, b[name], err_msg=f"{stage} {name}, killed at {deaths}")
        losses = [[(r["step"], r["loss"]) for r in read(f / stage / "metrics.jsonl")] for f in (out, whole)]
        assert losses[0] == losses[1]
    with pytest.raises(FileExistsError, match="--resume"):
        distill(plan(home / "teacher", words), out, log=log)
    other = plan(home / "teacher", [word.replace("stage1.lr=0.02", "stage1.lr=0.03") for word in words])
    with pytest.raises(ValueError, match=r"stages.stage1.config.optim.lr was 0.02, now 0.03"):
        distill(other, out, resume=True, log=log)


def test_an_interrupted_command_asks_the_stage_to_save(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupted(found: Any, out: Path, *, resume: bool, should_stop: Any) -> None:
        assert not should_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert should_stop()

    monkeypatch.setattr("bampath.convert.distill.distill", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["distill", str(home / "teacher"), "position=nope", "--out", str(tmp_path / "out")]) == 143
    assert "the same command with --resume goes on" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_stopped_it_says_how_to_go_on(home: Path) -> None:
    words = [word for word in STAGES if not word.startswith(("stage2", "stage3"))]
    found = plan(home / "teacher", [*words, "position=nope", "stage2.steps=0", "stage3.steps=0"])
    log = io.StringIO()
    assert distill(found, home / "stopped", should_stop=lambda: True, log=log) is None
    assert "stopped after step 1; continue with --resume" in log.getvalue()
    assert distill(found, home / "stopped", resume=True, log=log) == home / "stopped" / "stage1"


def test_mistakes_are_refused_before_an_array_is_read(
    home: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = home / "teacher"
    wide = tiny("model.layers=1", "model.dim=32")
    write_start(tmp_path / "wide", wide, fresh(wide), tokenizer_of(wide.data))
    more = tiny("model.layers=1", "model.vocab_size=300")
    write_start(tmp_path / "words", more, fresh(more), tokenizer_of(more.data))
    other = tmp_path / "tokenizer"
    write_start(other, load(teacher).config, load(teacher).params, tokenizer_of(more.data))
    info = next(other.rglob("checkpoint.json"))
    info.write_text(json.dumps(json.loads(info.read_text()) | {"tokenizer": "another"}))
    monkeypatch.setattr(checkpoint, "_read", None)
    for words, said in (
        (["position=pathh"], "did you mean 'path'"),
        (["data.source=x"], "position=SPEC is missing"),
        (["position=path", "stage4.steps=1"], "stage1, stage2 and stage3"),
        (["position=path", "stage1.step=1"], "a stage has kind"),
        (["position=path", "stage1.model.scan=true"], "write model.scan without a stage"),
        (["position=path", "stage1.temperature=2"], "no effect"),
        (["position=path", "stage2.temperature=0"], "must be positive"),
        (["position=path", "stage2.kind=kl"], "not one of attention, logits, text"),
        (["position=path", "model.dim=32"], "model.dim is 32 in the student and 16 in its teacher"),
        (["position=path", "mesh.data=2"], "one device"),
        (["position=path", "train.eval_every=5"], "stage3.train.eval_every"),
        (["position=path", "stage1.steps=0", "stage2.steps=0", "stage3.steps=0"], "nothing would be trained"),
        (["position=learned(8)", "stage1.length=16"], "positions only"),
        (["--student", str(tmp_path / "wide")], "model.dim is 32"),
        (["--student", str(tmp_path / "words")], "model.vocab_size is 300"),
        (["--student", str(other)], "fingerprint another"),
        (["--student", str(teacher), "position=path"], "has rope"),
    ):
        assert main(["distill", str(teacher), *words, "--out", str(tmp_path / "out")]) == 2, words
        assert said in capsys.readouterr().err, words
        assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError):
        plan(tmp_path, ["position=path"])
