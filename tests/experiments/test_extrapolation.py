"""The extrapolation study from beginning to end, in seconds: two schemes, three steps each, on a few sentences."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bampath.evaluation import passkey, perplexity
from bampath.progress import duration
from experiments import tables
from experiments.extrapolation import cells, clock, commands, run
from experiments.extrapolation.config import SIZES, Study

SCHEMES = ("nope", "bam(init=slopes)+ssmax")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def study(folder):
    text = " ".join(
        f"The {word} of the union shall number {i} states." for i, word in enumerate(["senate", "law"] * 120)
    )
    for name in ("a", "b", "c", "d", "e", "f"):
        (folder / "text").mkdir(exist_ok=True)
        (folder / "text" / f"{name}.txt").write_text(f"{name} {text}", encoding="utf-8")
    changes = (
        f"data.source={folder / 'text'}",
        f"data.cache_dir={folder / 'cache'}",
        "data.split=hash",
        "data.validation_fraction=0.5",
        "data.batch_size=2",
        "data.workers=0",
        "model.layers=1",
        "model.heads=2",
        "model.dim=16",
        "model.mlp_dim=16",
        "train.steps=3",
        "train.save_every=3",
        "train.log_every=1",
        "optim.warmup_steps=1",
    )
    small = SIZES["cpu"]
    return replace(
        small,
        overrides=(*small.overrides, *changes),
        schemes=SCHEMES,
        vocab_size=400,
        passkey=(1, 2),
        samples=3,
        perplexity=2,
        perplexity_rows=2,
    )


@pytest.fixture(scope="module")
def results(study, folder):
    return run.run_study(study, [0], folder / "out")


def test_results_file_has_env_and_every_row(results, study, folder):
    saved = json.loads((folder / "out" / "results.json").read_text(encoding="utf-8"))
    assert saved == json.loads(json.dumps(results))
    assert {"date", "device", "python", "jax", "jaxlib", "commit"} <= set(saved["env"])
    for scheme in SCHEMES:
        own = [row for row in saved["rows"] if row["case"] == scheme]
        of = lambda kind, own=own: [row for row in own if row["benchmark"] == kind]
        assert [row["length"] for row in of("passkey")] == [128, 256]
        assert [row["end"] for row in of("perplexity")] == [128, 256]
        (training,) = of("training")
        assert training["steps"] == 3
        assert training["training_seconds"] > 0
        assert len(of("prior")) == (0 if scheme == "nope" else 2)
    assert saved["study"]["total_seconds"] > 0


def test_report_and_figures(results, folder):
    text = (folder / "out" / "report.md").read_text(encoding="utf-8")
    assert "| `bam(init=slopes)+ssmax` |" in text
    assert "Not learned at the training length" in text
    shown = sorted(path.name for path in (folder / "out" / "figures").iterdir())
    common = ["passkey-depth.png", "passkey.png", "perplexity.png"]
    assert shown == ["exponents-bam-init-slopes-ssmax.png", *common, "priors-bam-init-slopes-ssmax.png"]
    assert all(f"figures/{name}" in text for name in shown)


def test_findings_say_who_won():
    def row(case, length, correct):
        return {"benchmark": "passkey", "case": case, "length": length, "correct": correct, "samples": 20}

    hits = {"a": (20, 20, 19), "b": (20, 3, 0), "c": (5, 20, 20)}
    rows = [row(case, 128 * 2**i, n) for case, numbers in hits.items() for i, n in enumerate(numbers)]
    said = tables.findings({"rows": rows, "study": {"train_length": 128}})
    assert said == [
        "Not learned at the training length (below 90% there): `c`.",
        "At least 90% of the keys up to 4× the training length: `a`.",
        "At least 90% of the keys up to 1× the training length: `b`.",
    ]


def test_seeds_are_shown_apart():
    hits = {("a", 0): (20, 20), ("a", 1): (20, 3), ("b", 0): (5, 20)}
    rows = [
        {"benchmark": "passkey", "case": case, "seed": seed, "length": 128 * 2**i, "correct": n, "samples": 20}
        for (case, seed), numbers in hits.items()
        for i, n in enumerate(numbers)
    ]
    table = tables.seed_table({"rows": rows, "study": {"train_length": 128}}).splitlines()
    assert table[0] == "| at least 90% found up to | seed 0 | seed 1 |"
    assert table[2:] == ["| `a` | 2× | 1× |", "| `b` | 0× |  |"]


def test_speed_that_was_not_measured_is_not_zero():
    row = {"benchmark": "training", "case": "a", "seed": 0, "parameters": 9, "positional_parameters": 1, "loss": 2.0}
    row |= {"tokens_per_second": None, "training_seconds": 3.0, "evaluation_seconds": 4.0}
    assert "| `a` | 9 | 1 | 2.000 | not measured | 3 s | 4 s |" in tables.time_table({"rows": [row]})
    assert "| 5,000 |" in tables.time_table({"rows": [row | {"tokens_per_second": 5000.0}]})


def test_a_finished_cell_is_read_and_not_trained_again(results, study, folder, monkeypatch):
    monkeypatch.setattr(cells, "fit", None)
    again = run.run_study(study, [0], folder / "out")
    assert again["rows"] == json.loads(json.dumps(results["rows"]))
    with pytest.raises(ValueError, match="other options"):
        run.run_study(replace(study, samples=4), [0], folder / "out")


def test_what_is_published_is_what_the_study_took(results, study, folder, monkeypatch):
    """Not what reading it again takes, nor where and when that is done; cells that are run later count."""
    out = folder / "out"
    took, date = results["study"]["total_seconds"], results["env"]["date"]
    assert took == pytest.approx(sum(json.loads((out / "seconds.json").read_text(encoding="utf-8"))["calls"]))
    today = {**results["env"], "date": "2099-01-01T00:00:00+0000"}
    monkeypatch.setattr("bampath.evaluation.results.environment", lambda: today)
    passed = iter(range(0, 10**9, 1000))  # seconds: every look at the clock is 1000 later
    with monkeypatch.context() as patch:
        patch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: next(passed)))
        again = run.run_study(study, [0], out)
        assert (again["study"]["total_seconds"], again["env"]["date"]) == (took, date)
        assert json.loads((out / "results.json").read_text(encoding="utf-8"))["study"] == again["study"]
        assert f"Total {duration(took)} (" in (out / "report.md").read_text(encoding="utf-8")
        kept = out / "cells" / "nope-seed0" / "rows.json"
        rows = kept.read_text(encoding="utf-8")
        kept.unlink()
        more = run.run_study(study, [0], out)
        kept.write_text(rows, encoding="utf-8")
    assert more["study"]["total_seconds"] - took in range(1000, 10_000, 1000)
    assert more["env"] == today


def test_seconds_of_calls_are_added(tmp_path, monkeypatch):
    now = SimpleNamespace(monotonic=lambda: now.value, value=0.0)
    monkeypatch.setattr(clock, "time", now)

    def call(seconds, measures=True, stop=None):
        with clock.Clock(tmp_path, measures) as one:
            now.value += seconds / 2
            one.keep()
            now.value += seconds / 2
            if stop:
                raise stop
            return one.keep()

    assert call(7.0, measures=False) == 7.0  # finished cells whose seconds nobody has kept
    assert call(10.0) == 10.0
    with pytest.raises(KeyboardInterrupt):
        call(4.0, stop=KeyboardInterrupt())
    assert call(3.0, measures=False) == 14.0
    assert call(1.5) == 15.5
    assert json.loads((tmp_path / "seconds.json").read_text(encoding="utf-8")) == {"calls": [10.0, 4.0, 1.5]}
    (tmp_path / "seconds.json").unlink()  # of a study that had no such file
    (tmp_path / "results.json").write_text('{"study": {"total_seconds": 423.0}}', encoding="utf-8")
    assert call(9.0, measures=False) == 423.0
    assert call(2.0) == 425.0
    wrong = {"seconds.json": ("[]", "{}", '{"calls": null}'), "results.json": ("{}", '{"study": {}}')}
    for name, texts in wrong.items():
        (tmp_path / "seconds.json").unlink(missing_ok=True)
        for text in texts:
            (tmp_path / name).write_text(text, encoding="utf-8")
            with pytest.raises(ValueError, match=f"{name} does not say how long the study took"):
                call(1.0)


def test_an_unfinished_cell_continues_from_its_checkpoint(results, study, folder):
    cell = cells.Cell("nope", 0)
    finished = folder / "out" / "cells" / cell.slug / "rows.json"
    before = finished.read_text(encoding="utf-8")
    finished.unlink()
    rows = cells.run_cell(study, cell, folder / "out", folder / "out" / "tokenizer.json", lambda kind, value: None)
    log = (finished.parent / "training.log").read_text(encoding="utf-8")
    assert "continuing after step 3" in log
    old = [row for row in json.loads(before)["rows"] if row["benchmark"] != "training"]
    assert [row for row in rows if row["benchmark"] != "training"] == old


def test_commands_on_its_checkpoints(results, folder, capsys):
    checkpoint = str(folder / "out" / "cells" / "nope-seed0" / "run")
    out = folder / "passkey.json"
    passkey.main([checkpoint, "--lengths", "1x,2x", "--samples", "3", "--out", str(out)])
    (first, second) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    study_rows = [row for row in results["rows"] if row["case"] == "nope" and row["benchmark"] == "passkey"]
    assert [first["answer_loss"], second["answer_loss"]] == pytest.approx([row["answer_loss"] for row in study_rows])
    perplexity.main([checkpoint, "--length", "2x", "--rows", "2", "--out", str(out)])
    windows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    study_rows = [row for row in results["rows"] if row["case"] == "nope" and row["benchmark"] == "perplexity"]
    assert [row["loss"] for row in windows] == pytest.approx([row["loss"] for row in study_rows])
    assert "128 to 256" in capsys.readouterr().out


def test_publishing_writes_the_numbers_into_the_readme(results, folder, monkeypatch):
    here = folder / "here"
    (here / "figures").mkdir(parents=True)
    (here / "figures" / "stale.png").write_bytes(b"")
    (here / "README.md").write_text(f"before\n{run.BEGIN}\nold\n{run.END}\nafter\n", encoding="utf-8")
    (folder / "FRONT.md").write_text("<!-- passkey table -->\nold\n<!-- end of passkey table -->", encoding="utf-8")
    monkeypatch.setattr(run, "HERE", here)
    monkeypatch.setattr(run, "FRONT", folder / "FRONT.md")
    run.publish(folder / "out", results)
    front = (folder / "FRONT.md").read_text(encoding="utf-8")
    assert front == f"<!-- passkey table -->\n{tables.passkey_table(results)}\n<!-- end of passkey table -->"
    text = (here / "README.md").read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| `nope` |" in text
    assert "old" not in text
    assert not (here / "figures" / "stale.png").exists()
    assert (here / "results.json").exists()


def test_marks_that_are_missing_are_named(tmp_path):
    (tmp_path / "page.md").write_text("a <b> c", encoding="utf-8")
    with pytest.raises(ValueError, match=r"page.md has no '<b>' … '<c>'"):
        tables.replace_between(tmp_path / "page.md", "<b>", "<c>", "text")


def test_what_the_commands_cost_is_measured_and_written(tmp_path, monkeypatch):
    """`make` is a stand-in that prints what the real one would; the third step fails."""
    (tmp_path / "README.md").write_text(f"before\n{commands.BEGIN}\n{commands.END}\nafter\n", encoding="utf-8")
    (tmp_path / "bin").mkdir()
    make = tmp_path / "bin" / "make"
    script = """#!/bin/sh
    case $1 in demo) echo "total     364 s" ;; test) echo "1 failed, 2 passed in 3.21s"; exit 2 ;; esac
    """
    make.write_text(script, encoding="utf-8")
    make.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(commands, "HERE", tmp_path)
    monkeypatch.setattr(commands.subprocess, "run", _without_clone(commands.subprocess.run))
    assert commands.main([]) == 2
    rows = json.loads((tmp_path / "commands.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["case"], row["status"], row["closing"]) for row in rows] == [
        ("setup", 0, ""),
        ("demo", 0, "total     364 s"),
        ("test", 2, "1 failed, 2 passed in 3.21s"),
    ]
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| test | `make test` | 0 | 2 | 1 failed, 2 passed in 3.21s |" in text
    assert text.endswith("after\n")
    assert commands.main(["--only", "setup"]) == 0
    kept = json.loads((tmp_path / "commands.json").read_text(encoding="utf-8"))["rows"]
    assert [row["case"] for row in kept] == ["setup", "demo", "test"]
    assert "make demo" in (tmp_path / "README.md").read_text(encoding="utf-8")


def _without_clone(real):
    def run(command, **options):
        return None if command[:2] == ["git", "clone"] else real(command, **options)

    return run


def test_command_line(tmp_path):
    options = run.parse(["--schemes", "rope", "bam(init=laplace)+ssmax", "train.steps=7", "--out", str(tmp_path)])
    study = run.study_of(options)
    assert study.schemes == ("rope", "bam(init=laplace)+ssmax")
    assert study.config("rope", 3).train.steps == 7
    assert study.config("rope", 3).train.seed == 3
    assert run.folder_of(options) == tmp_path
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="holds a run"):
        run.folder_of(options)
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "cells").mkdir()
    with pytest.raises(ValueError, match="--resume"):
        run.folder_of(options)
    with pytest.raises(ValueError, match="did you mean"):
        run.main(["--schemes", "roqe"])


@pytest.mark.parametrize("name", sorted(SIZES))
def test_every_scheme_gets_the_same_budget(name):
    study: Study = SIZES[name]
    configs = [study.config(scheme, 0) for scheme in study.schemes]
    assert len({(c.optim, c.data, c.train) for c in configs}) == 1
    assert len({replace(c.model, position="nope") for c in configs}) == 1
