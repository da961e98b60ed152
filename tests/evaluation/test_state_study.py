"""The state-tracking study from beginning to end in seconds: tiny models, a few steps, a short list of cells."""

import importlib
import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from bampath.evaluation.results import write_json
from bampath.evaluation.state import __main__ as command
from bampath.evaluation.state.tasks import parse_task
from experiments.state_tracking import cells, merge, report, run, training
from experiments.state_tracking.config import RECIPE, SIZES, Study, Trial

SMALL = (
    *(*RECIPE, "model.dim=8", "model.heads=2", "model.mlp_dim=8", "model.attention_impl=reference"),
    *("data.batch_size=2", "optim.warmup_steps=0", "optim.lr=0.01", "train.steps=3"),
)
TRIALS = (
    Trial("fflm(pairs=4)", SMALL, schemes=("nope",), sequences=(("", 8), ("sparse", 5))),
    Trial("words(letters=2)", SMALL, depths=(1, 2), schemes=("nope",), sequences=(("", 4),)),
)


@pytest.fixture(scope="module")
def study():
    return Study("test", TRIALS, (0, 1))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def results(study, out):
    first = run.run_study(study, out, minutes=0)  # no time: the list of cells, and none of them done
    assert not first["rows"]
    assert not first["study"]["complete"]
    return run.run_study(study, out)


def test_results_have_a_row_per_seed_and_test(results, out):
    saved = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert saved == json.loads(json.dumps(results))
    assert saved["study"]["complete"]
    scored = [row for row in saved["rows"] if row["benchmark"] == "state"]
    flips = [(r["case"], r["seed"], r["test"], r["sequences"]) for r in scored if r["trained_on"] == "fflm(pairs=4)"]
    tests = (("in-distribution", 8), ("sparse", 5), ("dense", 8))
    assert flips == [("nope", seed, *test) for seed in (0, 1) for test in tests]
    words = [(r["layers"], r["seed"]) for r in scored if r["trained_on"] == "words(letters=2)"]
    assert words == [(1, 0), (1, 1), (2, 0), (2, 1)]
    training_rows = [row for row in saved["rows"] if row["benchmark"] == "training"]
    assert all(row["curve"]["step"] == [3] and row["steps"] == 3 for row in training_rows)
    assert training_rows[0]["curve"]["loss"] != training_rows[1]["curve"]["loss"]  # seeds differ


def test_report_and_figures(results, out):
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "| `nope` | 1 |" in text
    assert "Least layers (of [1, 2])" in text
    assert "PaTH's paper" in text
    shown = sorted(path.name for path in (out / "figures").iterdir())
    assert shown == ["fflm-pairs-4.png", "words-letters-2.png"]
    assert all(f"figures/{name}" in text for name in shown)


def test_words_are_solved_where_most_are_right():
    def row(layers, seed, *right):
        by_length = [{"length": n, "right": count} for n, count in enumerate(right, 1)]
        facts = {"benchmark": "state", "case": "path", "layers": layers, "seed": seed, "sequences": 100}
        return {**facts, "by_length": by_length}

    rows = [row(1, 0, 100, 100, 60), row(1, 1, 100, 90, 20), row(2, 0, 100, 100, 95), row(2, 1, 100, 100, 80)]
    assert "| `path` | 2 | 2 |" in report.reach_table(rows, (1, 2))  # 95 % and 40 %; 100 % and 87.5 %
    assert "| `path` | > 2 (1 of 2) |" in report.layers_table(rows, (1, 2))  # of three letters, the longest word
    better = [*rows[:2], row(2, 0, 100, 100, 95), row(2, 1, 100, 100, 89)]
    assert "| `path` | 2 (1 of 2) |" in report.layers_table(better, (1, 2))


def test_finished_cells_are_read_and_others_refused(results, study, out, monkeypatch):
    monkeypatch.setattr(cells, "train", None)
    again = run.run_study(study, out, minutes=0)
    assert again["rows"] == json.loads(json.dumps(results["rows"]))
    assert again["study"]["complete"]
    with pytest.raises(ValueError, match="other options"):
        run.run_study(Study("test", TRIALS, (0, 2)), out)


@pytest.mark.slow
def test_side_by_side_gives_the_same(results, study, out, tmp_path):
    """Chains in processes of their own: the same rows but for the seconds; a cell that fails is named, others go on."""
    again = run.run_study(study, tmp_path / "both", together=2)
    timeless = lambda rows: [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]
    assert timeless(again["rows"]) == timeless(json.loads(json.dumps(results["rows"])))
    bad = replace(TRIALS[0], schemes=("nope", "learned(rows=2)"))  # fails when it is traced, in its own process
    told = run.run_study(Study("test", (bad,), (0,)), tmp_path / "bad", together=2)["study"]["failed"]
    assert list(told) == ["fflm-pairs-4-learned-rows-2-1l"]
    assert told["fflm-pairs-4-learned-rows-2-1l"].startswith("ValueError: learned: 8 positions")
    kept = json.loads((tmp_path / "bad" / "results.json").read_text(encoding="utf-8"))
    assert {row["case"] for row in kept["rows"]} == {"nope"}
    assert not kept["study"]["complete"]


def test_results_of_several_calls_are_merged(results, study, tmp_path):
    results = json.loads(json.dumps(results))
    parts = []
    for trial in study.trials:
        rows = [row for row in results["rows"] if row["trained_on"] == trial.task]
        parts.append({**results, "env": {**results["env"], "date": trial.task}, "rows": rows})
    made = merge.merge(study, parts)
    assert made["rows"] == results["rows"]
    assert [(env["date"], env["tasks"]) for env in made["runs"]] == [(t.task, [t.task]) for t in study.trials]
    assert made["study"]["complete"]
    assert made["study"]["seconds_of_this_call"] == pytest.approx(2 * results["study"]["seconds_of_this_call"], abs=0.2)
    text = report.report(made, {})
    assert all(f"`{trial.task}`: written by" in text for trial in study.trials)
    again = merge.merge(study, [made, {**parts[1], "env": {"date": "later"}}])  # what is merged keeps whose it was
    assert [(env["date"], env["tasks"]) for env in again["runs"]] == [
        (study.trials[0].task, [study.trials[0].task]),
        ("later", [study.trials[1].task]),
    ]
    assert not merge.merge(study, parts[:1])["study"]["complete"]
    longer = replace(study.trials[0], overrides=(*SMALL, "train.steps=4"))
    with pytest.raises(ValueError, match="another budget"):
        merge.merge(replace(study, trials=(longer, study.trials[1])), parts)
    with pytest.raises(ValueError, match="seeds"):
        merge.merge(replace(study, seeds=(5,)), parts)


def test_a_solved_task_needs_no_deeper_model(study):
    def row(accuracy):
        facts = {"trained_on": "words(letters=2)", "case": "nope", "layers": 1, "test": "in-distribution"}
        return {**facts, "sequence_accuracy": accuracy}

    tried = lambda rows: [c.layers for c in run.cells_of(study, rows) if c.trial.task.startswith("words")]
    assert tried([row(0.95), row(0.9)]) == [1]
    assert tried([row(0.95), row(0.8)]) == [1, 2]
    assert tried([]) == [1, 2]


def test_checkpoints_are_asked_what_they_were_trained_on(results, out, capsys):
    checkpoint = out / "cells" / "fflm-pairs-4-nope-1l" / "seed1"
    command.main([str(checkpoint), "--samples", "8", "--seed", "1", "--out", str(out / "state.json")])
    rows = json.loads((out / "state.json").read_text(encoding="utf-8"))["rows"]
    (want,) = [
        row
        for row in results["rows"]
        if row["benchmark"] == "state" and row["seed"] == 1 and row["test"] == "dense"
        if row["trained_on"] == "fflm(pairs=4)"
    ]
    assert [row["test"] for row in rows] == ["in-distribution", "sparse", "dense"]
    assert rows[2]["wrong"] == want["wrong"]
    assert rows[2]["answers"] == want["answers"]
    assert "dense" in capsys.readouterr().out
    assert "wrong answers" in (out / "state.md").read_text(encoding="utf-8")


def test_seeds_side_by_side_are_seeds_alone():
    trial = TRIALS[0]
    config, task = trial.config("nope", 1), parse_task(trial.task)
    both = training.train(config, task, (3, 4), lambda step, loss: None)
    alone = training.train(config, task, (4,), lambda step, loss: None)
    for a, b in zip(jax.tree.leaves(training.seed_of(both.params, 1)), jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_allclose(a, b[0], atol=1e-5)
    assert both.curve[0][1][1] == pytest.approx(alone.curve[0][1][0], rel=1e-5)


def test_a_seed_that_is_not_finite_is_named(monkeypatch):
    """Within a block of steps, with its depth; the cell has no rows then."""
    config, task = TRIALS[1].config("nope", 2), parse_task(TRIALS[1].task)
    sound = training._first_states

    def poisoned(*args):
        state = sound(*args)
        return state.replace(params=jax.tree.map(lambda leaf: leaf.at[1].set(np.inf), state.params))

    monkeypatch.setattr(training, "_first_states", poisoned)
    shown = []
    with pytest.raises(FloatingPointError, match=r"nope, 2 layer\(s\): .* of seeds \[6\] .* in the steps 1 to 3"):
        training.train(config, task, (5, 6), lambda step, loss: shown.append(step))
    assert not shown


def test_a_cell_that_fails_is_named_and_the_others_go_on(results, study, tmp_path, monkeypatch, capsys):
    """One at a time: status 1 at the end and nothing published; --resume runs that cell alone."""
    monkeypatch.setitem(run.SIZES, "cpu", study)
    monkeypatch.setattr(run, "HERE", tmp_path / "beside")
    tried = []

    def run_cell(cell, out, say):
        tried.append(cell.slug)
        if len(tried) == 2:
            raise FloatingPointError("nope: a loss of seeds [1] was not finite\nin a second line")
        rows = [row for row in results["rows"] if (row["trained_on"], row["layers"]) == (cell.trial.task, cell.layers)]
        write_json(out / "cells" / cell.slug / "rows.json", {"identity": cells._identity(cell), "rows": rows})
        return rows

    monkeypatch.setattr(cells, "run_cell", run_cell)
    flips, bad, deeper = "fflm-pairs-4-nope-1l", "words-letters-2-nope-1l", "words-letters-2-nope-2l"
    command_line = ["--out", str(tmp_path / "out"), "--publish"]
    with pytest.raises(SystemExit, match=f"^error: failed: {bad}; --resume"):  # a message is status 1
        run.main(command_line)
    assert tried == [flips, bad, deeper]
    why = "FloatingPointError: nope: a loss of seeds [1] was not finite"
    assert capsys.readouterr().err.splitlines() == [f"{bad} failed: {why}"]
    kept = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert {(row["trained_on"], row["layers"]) for row in kept["rows"]} == {(TRIALS[0].task, 1), (TRIALS[1].task, 2)}
    assert (kept["study"]["complete"], kept["study"]["failed"]) == (False, {bad: why})
    assert f"`{bad}` failed: {why}" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8").splitlines()
    assert not (tmp_path / "beside").exists()
    (tmp_path / "beside").mkdir()
    run.main([*command_line, "--resume"])
    assert tried[3:] == [bad]
    published = json.loads((tmp_path / "beside" / "results-test.json").read_text(encoding="utf-8"))["study"]
    assert published["complete"]
    assert "failed" not in published


def test_a_file_that_cannot_be_written_ends_the_study(study, tmp_path, monkeypatch):
    """And what had failed before, in the same chain too, is in results.json by then."""

    def train(config, *args):
        if config.model.layers == 1:
            raise FloatingPointError("a loss was not finite")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cells, "train", train)
    with pytest.raises(OSError, match="No space left"):
        run.run_study(study, tmp_path)
    why = "FloatingPointError: a loss was not finite"
    kept = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["study"]
    assert kept["failed"] == {"fflm-pairs-4-nope-1l": why, "words-letters-2-nope-1l": why}


KILLED = """
import os, signal, time

def run_chain(trial, scheme, seeds, out, latest, failed):
    if trial.task.startswith("fflm"):
        return {"fflm-cell": "ValueError: bad"}
    for _ in range(6000):  # the others wait until that is written
        if '"failed"' in (out / "results.json").read_text() and scheme == "nope":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
"""


def test_a_process_that_is_killed_is_one_line(study, tmp_path, monkeypatch, capsys):
    """Of three chains one has ended by then; the third goes with the one that is killed."""
    (tmp_path / "killed_chain.py").write_text(KILLED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # the processes of the pool have it too
    monkeypatch.setattr(run, "run_chain", importlib.import_module("killed_chain").run_chain)
    trials = (TRIALS[0], replace(TRIALS[1], schemes=("nope", "rope")))
    monkeypatch.setitem(run.SIZES, "cpu", replace(study, trials=trials))
    lost = r"words\(letters=2\) with nope, words\(letters=2\) with rope"
    line = rf"^error: a process was killed \(out of memory, perhaps\); not finished: {lost}; --resume runs"
    with pytest.raises(SystemExit, match=line):  # a message is status 1
        run.main(["--out", str(tmp_path / "out"), "--together", "2"])
    assert capsys.readouterr().err == ""
    kept = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["study"]
    assert (kept["complete"], kept["failed"]) == (False, {"fflm-cell": "ValueError: bad"})


def test_publishing_keeps_the_sizes_apart(results, out, tmp_path):
    run.publish(out, tmp_path, results)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["figures", "report-test.md", "results-test.json"]
    text = (tmp_path / "report-test.md").read_text(encoding="utf-8")
    assert "(figures/test-fflm-pairs-4.png)" in text
    assert (tmp_path / "figures" / "test-fflm-pairs-4.png").exists()


def test_command_line(tmp_path):
    options = run.parse(["--size", "gpu", "--tasks", "fflm", "--schemes", "rope", "kerple", "--seeds", "5"])
    study = run.study_of(options)
    assert [(trial.task, trial.schemes) for trial in study.trials] == [("fflm", ("rope", "kerple"))]
    assert study.seeds == (5,)
    with pytest.raises(ValueError, match="not in the study"):
        run.study_of(run.parse(["--tasks", "parity"]))
    (tmp_path / "cells").mkdir()
    with pytest.raises(ValueError, match="--resume"):
        run.folder_of(run.parse(["--out", str(tmp_path)]), run.RUNS)
    with pytest.raises(ValueError, match="--out"):
        run.folder_of(run.parse(["--resume"]), run.RUNS)
    with pytest.raises(ValueError, match="did you mean"):
        run.main(["--schemes", "roqe", "--out", str(tmp_path / "new")])


@pytest.mark.parametrize("name", sorted(SIZES))
def test_every_scheme_has_the_same_budget(name):
    for trial in SIZES[name].trials:
        configs = [trial.config(scheme, trial.depths[0]) for scheme in trial.schemes]
        assert len({(c.optim, c.data, c.train) for c in configs}) == 1
        assert {c.model.train_length for c in configs} == {parse_task(trial.task).length}
    assert len(report.describe(SIZES[name])["trials"]) == len(SIZES[name].trials)


@pytest.mark.parametrize("size", sorted(SIZES))
def test_the_committed_report_is_that_of_the_committed_results(size):
    results = json.loads((run.HERE / f"results-{size}.json").read_text(encoding="utf-8"))
    trained = {row["trained_on"] for row in results["rows"]}
    name = lambda task: "".join(c if c.isalnum() else "-" for c in task).strip("-") + ".png"
    figures = {trial["task"]: run.HERE / "figures" / name(trial["task"]) for trial in results["study"]["trials"]}
    text = report.report(results, figures).replace("(figures/", f"(figures/{size}-")
    assert text == (run.HERE / f"report-{size}.md").read_text(encoding="utf-8")
    assert all((run.HERE / "figures" / f"{size}-{name(task)}").exists() for task in trained)
    assert json.loads(json.dumps(report.describe(SIZES[size])))["trials"] == results["study"]["trials"]  # as it is now
