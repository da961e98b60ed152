"""`python -m experiments.train`: help, refusals in a line, dry run, the banner, saving on an interrupt."""

import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from bampath import checkpoint, config, runs, startup
from bampath.step import build_model, declare
from experiments import train
from tests.train.small import SMALL, small, text_file


def test_help_lists_configurations_and_keys(capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for line in (
        "bam-120m    12 layers of 768, 16 heads",
        "path-760m",
        "optim.prior_lr",
        "radam | adamw | muon = 'radam'",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config is missing; there are tiny, bam-120m"),
        (["--config", "tinny"], "did you mean tiny?"),
        (["--config", "tiny", "train.stpes=1"], "did you mean train.steps?"),
        (["--config", "tiny", "position=bamm"], "did you mean 'bam'?"),
        (["--config", "tiny", "--dry-run", "model.vocab_size=100"], "model.vocab_size=100"),
        (["--config", "tiny", "--dry-run", "model.attention_impl=flash"], "implementation='flash' is not one of"),
        (["--config", "tiny", "--dry-run", "data.tokenizer=none.json"], "none.json"),
        (["--config", "tiny", "--run-dir", "gs://bucket/runs/a"], "is an address, must be a folder"),
        (["--resume"], "--resume needs --run-dir"),
        (["--resume", "--run-dir", "nowhere"], "there is no run to resume"),
    ],
)
def test_refusals_are_one_line_and_status_2(arguments, message, capsys):
    assert train.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_a_used_folder_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert train.main(["--config", "tiny", *SMALL, "--run-dir", str(tmp_path)]) == 2
    assert (
        "is not empty; continue that run with --resume (in Python resume=True), or choose another --run-dir"
        in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_dry_run_says_what_would_be_trained_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pattern = "position=2*rope+window(32),path"
    assert train.main(["--config", "tiny", pattern, "model.layers=6", "optim.name=muon", "--dry-run"]) == 0
    text = capsys.readouterr().out
    for line in (
        "* model.position           2*rope+window(32),path   (was bam+ssmax)",
        "position    rope+window(32) in layers 0–1, 3–4; path in layers 2, 5",
        "kernels     attention xla in layers 0–1, 3–4; path xla in layers 2, 5",
        "mask        causal, within documents, windows of 32 in the layers that say so",
        "tokenizer   bytes, 259 of 384 embeddings used",
        "batch       8 × 128 = 1,024 tokens in 1 part(s), 200 steps = 204,800 tokens",
        "peak of this device unknown: no MFU",
    ):
        assert line in text
    assert list(tmp_path.iterdir()) == []


def test_the_run_folder_is_named_after_configuration_and_scheme():
    resolved = train.resolve(train.parse(["--config", "tiny", "position=3*rope+window(8),nope"]))
    assert str(resolved[2]) == "runs/tiny-3_rope+window_8_nope"
    given = train.resolve(train.parse(["--config", "tiny", "--run-dir=~/runs/a"]))
    assert given[2] == Path.home() / "runs/a"  # a shell leaves it as it is behind the =


def test_resuming_takes_the_runs_own_configuration(tmp_path):
    runs.write_config(small("position=rope"), tmp_path)
    options = train.parse(["--resume", "--run-dir", str(tmp_path), "train.steps=9"])
    assert train.resolve(options)[0] == config.override(small("position=rope"), "train.steps=9")


def test_kernels_that_a_run_would_use():
    assert startup.kernels(small("position=fox", "model.layers=2")) == ["attention reference"] * 2
    mixed = small("position=path,bam", "model.layers=3", "model.attention_impl=none")
    assert startup.kernels(mixed) == ["path xla", "attention xla", "path xla"]
    text = startup.banner(mixed, declare(build_model(mixed)), train_tokenizer())
    assert "kernels     path xla in layers 0, 2; attention xla in layers 1" in text


def test_the_rate_line_says_what_the_schedule_does():
    for overrides, line in (
        (["train.steps=1000"], "adamw, 0 to 0.003 over 20 steps, then cosine to 0.0003 at step 1,000"),
        (["optim.schedule=constant", "optim.warmup_steps=0"], "adamw, 0.003, constant at step 200"),
        (
            ["optim.schedule=wsd", "optim.decay_steps=50"],
            "then constant, over the last 50 steps linear to 0.0003 at step 200",
        ),
        (["train.steps=10"], "this run of 10 steps ENDS ON THIS RAMP at 0.0015: set optim.warmup_steps"),
    ):
        assert line in startup.schedule(config.get("tiny", *overrides))


def train_tokenizer():
    from bampath.data import ByteTokenizer

    return ByteTokenizer()


def test_an_interrupt_saves_and_a_second_one_would_stop_at_once(tmp_path, capsys, monkeypatch):
    """The signal arrives when the loop asks for the first time whether to stop."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    asked = []

    class Stop(train.Stop):
        @property
        def by(self):
            if not asked:
                asked.append(True)
                os.kill(os.getpid(), signal.SIGTERM)
            return self._by

        @by.setter
        def by(self, value):
            self._by = value

    monkeypatch.setattr(train, "Stop", Stop)
    arguments = ["--config", "tiny", "--run-dir", str(tmp_path / "run"), *SMALL, f"data.source={text_file(tmp_path)}"]
    try:
        status = train.main([*arguments, f"data.cache_dir={tmp_path / 'cache'}", "train.steps=50"])
        after = [signal.getsignal(number) for number in before]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert status == 128 + signal.SIGTERM
    assert after == [signal.SIG_DFL] * 2  # whichever of the two comes next
    assert checkpoint.describe(tmp_path / "run").step == 1
    out = capsys.readouterr().out
    assert "stopped after step 1; continue with --resume" in out
    assert f"python -m experiments.train --resume --run-dir {tmp_path / 'run'}" in out


def test_compiled_programs_are_kept_and_found_again(tmp_path):
    names = ("dir", "min_compile_time_secs", "min_entry_size_bytes")
    keys = ["jax_compilation_cache_dir", *(f"jax_persistent_cache_{name}" for name in names[1:])]
    before = {key: getattr(jax.config, key) for key in keys}
    try:
        assert startup.keep_programs(tmp_path / "programs").endswith("programs: 0 from earlier runs")
        jax.jit(lambda x: jnp.sin(x) * 3.25)(jnp.ones(7)).block_until_ready()
        assert any(path.name.endswith("-cache") for path in (tmp_path / "programs").iterdir())
        count = len(list((tmp_path / "programs").glob("*-cache")))
        assert startup.keep_programs(tmp_path / "programs").endswith(f"programs: {count} from earlier runs")
    finally:
        for key, value in before.items():
            jax.config.update(key, value)
        compilation_cache.reset_cache()


def test_options_that_cannot_be_are_refused_before_anything_is_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for options, message in (
        (["--profile", "10-13"], "--profile '10-13' must be FIRST:LAST"),
        (["--profile", "5:3"], "the profile's window 5:3 must be FIRST:LAST"),
        (
            ["--compile-cache", str(tmp_path / "file")],
            f"--compile-cache {tmp_path / 'file'}: {tmp_path / 'file'} is not a",
        ),
        (["--dry-run", "--profile", "10-13"], "--profile '10-13' must be FIRST:LAST"),
        (["--dry-run", "--compile-cache", str(tmp_path / "file" / "programs")], "file is not a folder; choose another"),
        (["--dry-run", "--profile", "3:201"], "the profile's steps 3 to 201 are not all among 1 to 200"),
        (["--dry-run", "--device-memory", "0"], "--device-memory 0 must be a number of GiB greater than 0"),
        (["--dry-run", "--device-memory", "nan"], "--device-memory nan must be"),
        (["--heartbeat", "0"], "--heartbeat 0 must be at least 1 second"),
        (["--processes", "2"], "--coordinator, --processes, --process belong together: --coordinator and --process is"),
    ):
        assert train.main(["--config", "tiny", "--run-dir", str(tmp_path / "run"), *options]) == train.REFUSED
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
