"""The loop: what it writes, refuses, resumes and keeps."""

import gzip
import io
import json
import os

import jax
import numpy as np
import pytest

from bampath import checkpoint, config, train
from bampath.checkpoint import CheckpointError
from bampath.metrics import read
from bampath.profiling import Window
from bampath.train import NonFiniteError, fit
from tests.train.small import small, text_file


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of six steps: folder, configuration, result, what it printed. Programs are cached for the rest."""
    home = tmp_path_factory.mktemp("train")
    cfg = small(f"data.source={text_file(home)}", f"data.cache_dir={home / 'cache'}", "train.eval_every=3")
    before = {name: getattr(jax.config, name) for name in CACHE}
    for name, value in {**CACHE, "jax_compilation_cache_dir": str(home / "programs")}.items():
        jax.config.update(name, value)
    out = io.StringIO()
    yield home, cfg, fit(cfg, home / "run", out=out), out.getvalue()
    for name, value in before.items():
        jax.config.update(name, value)


CACHE = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def losses(folder, kind="train"):
    return {record["step"]: record["loss"] for record in read(folder / "metrics.jsonl") if record["kind"] == kind}


def test_what_a_run_leaves_behind(run):
    home, cfg, result, printed = run
    assert result.step == 6
    assert config.from_json((home / "run/config.json").read_text()) == cfg
    assert sorted(losses(home / "run")) == [1, 2, 3, 4, 5, 6]
    assert sorted(losses(home / "run", "eval")) == [3, 6]
    assert losses(home / "run")[6] < losses(home / "run")[1]
    records = list(read(home / "run/metrics.jsonl"))
    assert {"grad_norm", "lr", "tokens", "bam/theta_beta/min", "ssmax/scale/max"} <= set(records[-2])
    assert records[-2]["tokens"] == 6 * 4 * 24
    assert [path.name for path in checkpoint.steps(home / "run/checkpoints")] == ["00000004", "00000006"]
    info = checkpoint.describe(home / "run")
    assert (info.step, info.data["step"], info.tokenizer) == (6, 6, "bytes-259-v1")
    jax.tree.map(np.testing.assert_array_equal, checkpoint.read_params(home / "run"), result.params)
    for text in (
        "bam+ssmax in all 1 layers",
        "causal, within documents",
        "no MFU",
        "259 of 272",
        "step 6/6",
        "adamw, 0.003, cosine to 0.0003 at step 6",
        " of 4: 24 places, ",
    ):
        assert text in printed


def test_a_folder_in_use_is_refused_and_a_finished_run_stays_finished(run):
    home, cfg, result, _ = run
    with pytest.raises(FileExistsError, match="--resume"):
        fit(cfg, home / "run", out=io.StringIO())
    again = fit(cfg, home / "run", resume=True, out=io.StringIO())
    assert again.step == 6
    jax.tree.map(np.testing.assert_array_equal, again.params, result.params)


def test_a_stopped_run_continues_bit_for_bit(run):
    home, cfg, result, _ = run
    calls = iter([False, False, True])
    first = fit(cfg, home / "stopped", should_stop=lambda: next(calls), out=io.StringIO())
    assert first.step == 3
    assert checkpoint.describe(home / "stopped").step == 3
    out = io.StringIO()
    resumed = fit(cfg, home / "stopped", resume=True, out=out)
    assert "continuing after step 3" in out.getvalue()
    jax.tree.map(np.testing.assert_array_equal, resumed.params, result.params)
    assert losses(home / "stopped") == losses(home / "run")
    assert losses(home / "stopped", "eval") == losses(home / "run", "eval")


def test_resuming_as_another_model_is_refused_with_names(run):
    home, cfg, *_ = run
    for override, arrays, key in (
        ("model.layers=2", r"layer_1/\S+ float32\[\S+\] is only in this model", "model.layers: saved 1, now 2"),
        ("model.mlp_dim=64", r"mlp/\S+ is float32\[\S+ \S+ in the checkpoint", "model.mlp_dim: saved 32, now 64"),
        ("model.position=rope", r"bam/theta_alpha float32\[2\] is only in the checkpoint", "model.position: saved"),
        ("model.norm_eps=1e-6", "cannot continue as another model", "model.norm_eps: saved 1e-05, now 1e-06"),
    ):
        with pytest.raises(ValueError, match=arrays) as error:
            fit(config.override(cfg, override), home / "run", resume=True, out=io.StringIO())
        assert key in str(error.value)
        assert isinstance(error.value, CheckpointError) == ("norm_eps" not in override)
    for override, message in (
        ("train.seed=7", "train.seed=7, but the run started with"),
        ("train.steps=2", "has done 6"),
        ("optim.name=radam", "optim.name=radam, but the run started with adamw"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(config.override(cfg, override), home / "run", resume=True, out=io.StringIO())
    other = config.override(cfg, "data.sequence_length=32", "model.train_length=24")
    with pytest.raises(ValueError, match="sequence_length"):
        fit(other, home / "run", resume=True, out=io.StringIO())
    assert config.from_json((home / "run/config.json").read_text()) == cfg


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_sound_state(run):
    """At lr = 1e17 the first update is finite and the forward pass after it is not."""
    home, cfg, *_ = run
    bad = config.override(cfg, "optim.lr=1e17", "train.save_every=0", "train.eval_every=0")
    message = r"step 2: the loss is (nan|inf)[\s\S]*First bad parameter group: \w+"
    with pytest.raises(NonFiniteError, match=message) as error:
        fit(bad, home / "bad", out=io.StringIO())
    assert "the state after step 1 is kept" in str(error.value)
    info = checkpoint.describe(home / "bad")
    assert (info.step, info.data["step"]) == (1, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(checkpoint.read_params(info.path)))
    assert list(losses(home / "bad")) == [1]


def test_a_hook_of_ones_own_sees_the_parameters_of_its_step(run):
    home, cfg, result, _ = run
    seen = {}

    def hook(now):
        seen[now.step] = jax.tree.map(np.array, now.params)
        return {"twice": 2.0 * now.step}

    ended = fit(cfg, home / "hook", evaluate=hook, out=io.StringIO())
    assert ended.evaluation == {"twice": 12.0}
    assert sorted(seen) == [3, 6]
    jax.tree.map(np.testing.assert_array_equal, seen[6], result.params)
    lines = [json.loads(line) for line in (home / "hook/metrics.jsonl").read_text().splitlines()]
    assert [line["twice"] for line in lines if line["kind"] == "eval"] == [6.0, 12.0]


def test_a_profile_names_its_steps_and_only_those(run):
    home, cfg, result, _ = run
    for window, message in (((0, 2), "1 <= FIRST"), ((3, 2), "must be FIRST:LAST"), ((5, 7), "not all among 1 to 6")):
        with pytest.raises(ValueError, match=message):
            fit(cfg, home / "profiled", profile=Window(*window), out=io.StringIO())
    out = io.StringIO()
    again = fit(cfg, home / "profiled", profile=Window(3, 4), out=out)
    jax.tree.map(np.testing.assert_array_equal, again.params, result.params)
    assert f"profile of the steps up to 4 in {home / 'profiled/profile'}" in out.getvalue()
    (folder,) = (home / "profiled/profile/plugins/profile").iterdir()
    assert [path.stat().st_size > 1000 for path in folder.glob("*.xplane.pb")] == [True]  # TensorBoard reads this
    events = json.loads(gzip.decompress((folder / "perfetto_trace.json.gz").read_bytes()))["traceEvents"]
    steps = {event["args"]["step_num"] for event in events if event.get("name") == "train_step"}
    assert steps == {"3", "4"}
    assert any("PjitFunction(step)" in event.get("name", "") for event in events)
    with pytest.raises(ValueError, match="not all among 7 to 6"):
        fit(cfg, home / "profiled", resume=True, profile=Window(3, 4), out=io.StringIO())


def test_windows_are_read_strictly():
    assert Window.parse("10:13") == Window(10, 13)
    for text in ("10", "10-13", "a:b", "-1:3", "1:2:3"):
        with pytest.raises(ValueError, match=r"must be FIRST:LAST, such as 10:13"):
            Window.parse(text)


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(run):
    home, cfg, *_ = run
    with pytest.raises(ValueError, match=r"259 ids, but model.vocab_size=256"):
        fit(config.override(cfg, "model.vocab_size=256"), home / "vocabulary", out=io.StringIO())
    assert not (home / "vocabulary").exists()  # a refused run leaves nothing behind
    with pytest.raises(FileNotFoundError, match="nowhere"):
        fit(config.override(cfg, "data.source=nowhere"), home / "vocabulary", out=io.StringIO())
    assert not (home / "vocabulary").exists()


def test_a_tokenizer_of_too_many_words_is_refused_before_the_text_is_read(run, tmp_path, monkeypatch):
    _, cfg, *_ = run
    monkeypatch.setattr(train, "make_loader", lambda *_, **__: pytest.fail("the text was read"))
    with pytest.raises(ValueError, match=r"has 259 ids, but model\.vocab_size=258"):
        fit(config.override(cfg, "model.vocab_size=258"), tmp_path / "run", out=io.StringIO())


def test_mistakes_from_python_are_named(run, tmp_path):
    _, cfg, *_ = run
    with pytest.raises(TypeError, match=r"config='tiny' is no Config; bampath\.config\.get"):
        fit("tiny", tmp_path / "run")
    with pytest.raises(TypeError, match=r"run_dir=None is no path; give the folder"):
        fit(cfg, None)
    with pytest.raises(TypeError, match=r"override \['position=rope'\] is no string such as 'train.steps=100'"):
        config.get("tiny", ["position=rope"])
    for given in (3, {"a": "b"}, None, {"a": 10**400}):
        with pytest.raises(TypeError, match=r"evaluate gave .*; it must be a dict of numbers"):
            fit(cfg, tmp_path / f"run {str(given)[:9]}", evaluate=lambda now, given=given: given, out=io.StringIO())


def test_a_folder_that_cannot_be_made_is_named(run, monkeypatch, tmp_path):
    _, cfg, *_ = run
    made = type(tmp_path).mkdir

    def mkdir(self, *args, **options):
        if self.name == "refused":
            raise FileNotFoundError(2, "No such file or directory")
        made(self, *args, **options)

    monkeypatch.setattr(type(tmp_path), "mkdir", mkdir)
    with pytest.raises(
        OSError, match=r"refused cannot be made \(No such file or directory\): choose another --run-dir"
    ):
        fit(cfg, tmp_path / "refused", out=io.StringIO())


def test_a_run_goes_on_when_nobody_reads_its_output_any_more(run, tmp_path):
    """From its first line on: the banner is printed before the folder is made."""
    _, cfg, result, _ = run
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as out:
        again = fit(cfg, tmp_path / "run", out=out)
    jax.tree.map(np.testing.assert_array_equal, again.params, result.params)


def test_a_run_needs_no_output_at_all(run, tmp_path, monkeypatch):
    """As under `>&-`, where Python has none."""
    _, cfg, result, _ = run
    monkeypatch.setattr("sys.stdout", None)
    again = fit(cfg, tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, again.params, result.params)
