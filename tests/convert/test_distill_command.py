"""Distillation as a command: its stages, what is trained and what is frozen, resuming, and what is refused."""

import io
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from bampath import checkpoint
from bampath.checkpoint import CheckpointError
from bampath.convert import transplant
from bampath.convert.__main__ import main
from bampath.convert.distill import distill, plan
from bampath.convert.distill.step import in_attention
from bampath.convert.surgery import write_start
from bampath.data import tokenizer_of
from bampath.load import load
from bampath.metrics import read
from bampath.startup import keep_programs
from tests.convert.small import fresh, tiny
from tests.train.small import text_file

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
