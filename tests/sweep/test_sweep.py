"""Sweeps: members have the numbers of runs alone, stopped ones go on, reports say what was asked for."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from bampath import checkpoint, config, sweep
from bampath.metrics import read
from bampath.train import fit
from experiments.sweep import __main__ as sweep_command
from experiments.sweep.group import run_group
from experiments.sweep.plan import Spec, member_of, plan, spec_json
from experiments.sweep.report import lowest, page, report, write_figures
from tests.train.small import SMALL

ROOT = Path(__file__).parents[2]


class NoStop:
    """Never stopped, or by signal 15 once a file has so many lines."""

    def __init__(self, path: Path | None = None, lines: int = 0) -> None:
        self._path, self._lines = path, lines

    @property
    def by(self) -> int:
        if self._path is None or not self._path.exists():
            return 0
        return 15 if self._path.read_text().count("\n") >= self._lines else 0


@pytest.fixture(scope="module")
def alone(spec: Spec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps: RAdam's first five are plain momentum, so that rounding is not blown up by dividing by tiny moments.

    The run that the ordinary command makes for seed 1 and 3e-3."""
    run = tmp_path_factory.mktemp("alone") / "run"
    keys = (*spec.overrides, "train.seed=1", "data.seed=1", "optim.lr=3e-3")
    with open(os.devnull, "w") as out:
        fit(config.get("tiny", *keys), run, out=out)
    return run


@pytest.fixture(scope="module")
def swept(spec: Spec, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    out = tmp_path_factory.mktemp("swept")
    return out, run_group(plan(spec)[0], out, NoStop())  # type: ignore[arg-type]


def records(run: Path) -> list[dict[str, float]]:
    speed = ("elapsed", "tokens_per_second", "mfu", "mfu_full")
    return [{k: v for k, v in r.items() if k not in speed} for r in read(run / "metrics.jsonl") if r["kind"] == "train"]


def arrays(run: Path) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(checkpoint.read_params(run))]


def assert_close(member: Path, alone: Path) -> None:
    """The stated tolerance in float32: 2e-6 of the losses, 1e-5 of the parameters, which are of order 1."""
    for a, b in zip(records(member), records(alone), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-6)
        assert a["lr"] == b["lr"]
    for a, b in zip(arrays(member), arrays(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_a_member_is_the_run_alone(alone: Path, swept: tuple[Path, list]):
    """Exactly so at first; later within what another order of sums and other choices of the compiler make."""
    member = swept[0] / "members" / "seed-1_lr-3e-3"
    assert_close(member, alone)
    first = [next(iter(records(run))) for run in (member, alone)]
    assert first[0]["loss"] == first[1]["loss"]
    found, wanted = (checkpoint.describe(run) for run in (member, alone))
    for fact in ("step", "config", "data", "tokenizer"):
        assert getattr(found, fact) == getattr(wanted, fact)
    shape = lambda info: [(array.name, array.shape, array.dtype) for array in (*info.params, *info.state)]
    assert shape(found) == shape(wanted)


@pytest.mark.slow
def test_a_member_becomes_a_run_that_goes_on(spec: Spec, alone: Path, swept: tuple[Path, list], tmp_path: Path):
    """Members and runs alone, continued by the ordinary command: optimiser, keys and data are where they should be."""
    import shutil

    for name, run in (("alone", alone), ("member", swept[0] / "members" / "seed-1_lr-3e-3")):
        shutil.copytree(run, tmp_path / name)
        saved = config.from_json((run / "config.json").read_text())
        with open(os.devnull, "w") as out:
            fit(config.override(saved, "train.steps=5"), tmp_path / name, resume=True, out=out)
    assert_close(tmp_path / "member", tmp_path / "alone")
    assert len(records(tmp_path / "member")) == 5


def test_a_member_that_is_not_finite_ends_and_the_others_go_on(swept: tuple[Path, list]):
    out, rows = swept
    by_case = {row["case"]: row for row in rows}
    assert by_case["seed-1_lr-3e-3"]["finite"]
    assert by_case["seed-1_lr-3e-3"]["steps"] == 4
    for seed in (0, 1):
        lost = by_case[f"seed-{seed}_lr-1e15"]
        assert not lost["finite"]
        assert lost["steps"] < 4
        assert len(records(out / lost["run"])) == lost["steps"]
        assert all(np.isfinite(leaf).all() for leaf in arrays(out / lost["run"]))  # the last sound state


@pytest.mark.slow
def test_members_that_share_a_device_agree_with_runs_alone(
    spec: Spec, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One device: products of all members are one, which sums in another order."""
    monkeypatch.setattr(sweep, "spread", lambda members, devices: None)
    run_group(plan(spec)[0], tmp_path, NoStop())  # type: ignore[arg-type]
    assert_close(tmp_path / "members" / "seed-1_lr-3e-3", alone)


@pytest.mark.slow
def test_a_stopped_sweep_goes_on_to_the_same_numbers(spec: Spec, swept: tuple[Path, list], tmp_path: Path):
    group = plan(spec)[0]
    watched = tmp_path / "members/seed-0_lr-3e-3/metrics.jsonl"
    assert run_group(group, tmp_path, NoStop(watched, 1)) == []  # type: ignore[arg-type]
    assert 1 <= len(records(watched.parent)) < 4
    rows = run_group(group, tmp_path, NoStop())  # type: ignore[arg-type]
    assert rows == swept[1]
    for row in rows:
        assert records(tmp_path / row["run"]) == records(swept[0] / row["run"])
    assert run_group(group, tmp_path, NoStop()) == rows  # type: ignore[arg-type]  # read, not run


def test_the_table_pools_seeds_and_the_figures_are_drawn(spec: Spec, swept: tuple[Path, list]):
    out, rows = swept
    text = report(rows, spec_json(spec))
    good = [row["validation_loss"] for row in rows if row["finite"]]
    assert f"| 3e-3 | 2 | {np.mean([r['loss'] for r in rows if r['finite']]):.4f}" in text
    assert f"{np.mean(good):.4f} ± {np.std(good, ddof=1):.4f} | – |" in text
    assert "seed-0_lr-1e15 after step" in text
    assert [path.name for path in write_figures(rows, out)] == ["loss.png", "final-lr.png"]


def test_the_page_says_what_was_asked_for_and_how_to_ask_again(spec: Spec, swept: tuple[Path, list]):
    env = {"date": "2026-11-29T00:00:00", "device": "8 x cpu", "jax": "0.10.2", "commit": None}
    text = page(swept[1], spec, plan(spec), env, ["figures/loss.png"])
    (line,) = re.findall("^    python -m experiments.sweep (.*)$", text, re.MULTILINE)
    assert sweep_command.spec_of(sweep_command.parse(shlex.split(line))) == spec
    assert "4 runs in 1 program(s): 4 steps of 4 rows of 24 tokens (384 tokens each)" in text
    assert "8 x cpu, JAX 0.10.2, commit unknown" in text
    assert report(swept[1], spec_json(spec)) in text
    assert "![loss](figures/loss.png)" in text


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (
            {"1e-3": [2.0, 2.2], "3e-3": [1.8, 2.0]},
            "`optim.lr=3e-3`, 0.2000 below `optim.lr=1e-3`: 1.4 standard errors",
        ),
        ({"1e-3": [2.0], "3e-3": [1.8]}, "with one seed it cannot be told"),
        ({"1e-3": [2.0, 2.1], "3e-3": [1.0, None]}, "nothing to compare: one combination"),
    ],
)
def test_the_lowest_loss_is_named_with_its_error(losses: dict[str, list], said: str):
    rows = [
        {"values": {"seed": str(seed), "optim.lr": lr}, "validation_loss": loss}
        for lr, own in losses.items()
        for seed, loss in enumerate(own)
    ]
    assert said in lowest(rows)


def test_spreading_takes_as_many_devices_as_divide_the_members():
    devices = jax.devices()
    assert [1 if (m := sweep.spread(n, devices)) is None else m.size for n in (1, 2, 7, 8, 9, 12)] == [1, 2, 7, 8, 3, 6]


def small(*keys: str) -> config.Config:
    return config.get("tiny", *SMALL, *keys)


@pytest.mark.parametrize(
    ("keys", "same"),
    [
        ("position=bam(init=laplace)+ssmax", True),
        ("position=rope", False),
        ("optim.weight_decay=0.3", False),
    ],
)
def test_what_is_one_program(keys: str, same: bool):
    assert sweep.same_program(small(), small(keys)) == same


def test_initial_values_of_positional_parameters(spec: Spec):
    members = [member_of(spec, {}, {"init.theta_beta": value, "seed": "3"}) for value in ("0.5", "2")]
    state = sweep.first_states([m.config for m in members], [m.starts for m in members])
    found = {"/".join(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}
    for name, leaf in found.items():
        if name.endswith("theta_beta"):
            np.testing.assert_array_equal(leaf, np.full_like(leaf, 1) * np.array([[0.5], [2.0]], np.float32))
        else:
            np.testing.assert_array_equal(leaf[0], leaf[1])
    with pytest.raises(ValueError, match=r"no positional parameter 'theta'; it has .*theta_alpha, theta_beta"):
        sweep.first_states([members[0].config], [{"theta": 1.0}])


def test_results_of_other_members_are_not_taken(spec: Spec, tmp_path: Path):
    group = plan(spec)[0]
    rows = tmp_path / "groups" / "all" / "rows.json"
    rows.parent.mkdir(parents=True)
    for text, message in (
        ('{"rows": [{"values": {"seed": "5"}}]}', "holds the results of other members"),
        ("{", "damaged"),
    ):
        rows.write_text(text)
        with pytest.raises(ValueError, match=rf"rows\.json .*{message}"):
            run_group(group, tmp_path, NoStop())  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_commands_agree(spec: Spec, tmp_path: Path):
    """With the compiler's ordinary flags, in processes of their own."""
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    run = lambda *more: subprocess.run([sys.executable, "-m", *more], cwd=ROOT, env=environ, check=True, timeout=280)
    common = ("--config", "tiny", *spec.overrides)
    run("experiments.sweep", *common, "--vary", "seed=0..2", "--out", str(tmp_path / "sweep"))
    run("experiments.train", *common, "train.seed=2", "data.seed=2", "--run-dir", str(tmp_path / "alone"))
    assert_close(tmp_path / "sweep/members/seed-2", tmp_path / "alone")


@pytest.mark.slow
def test_a_killed_sweep_goes_on_to_the_same_results(spec: Spec, tmp_path: Path):
    """kill −9 of the command; --resume ends with the results of a sweep that was never stopped, bit for bit."""
    changed = ("train.steps", "train.save_every", "position")
    keys = [key for key in spec.overrides if key.partition("=")[0] not in changed]
    keys += ["train.steps=300", "train.save_every=20", "--vary", "seed=0..2", "--structure", "position=rope,bam"]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    start = lambda *more: subprocess.Popen(
        [sys.executable, "-m", "experiments.sweep", *more], cwd=ROOT, env=environ, stdout=subprocess.DEVNULL
    )
    assert start("--config", "tiny", *keys, "--out", str(tmp_path / "whole")).wait(timeout=280) == 0
    with start("--config", "tiny", *keys, "--out", str(tmp_path / "killed")) as process:
        while not list((tmp_path / "killed/groups/position-bam").glob("checkpoints/????????")):
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert start("--resume", "--out", str(tmp_path / "killed")).wait(timeout=280) == 0
    whole, killed = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "killed"))
    assert killed["rows"] == whole["rows"]
    for row in whole["rows"]:
        assert records(tmp_path / "killed" / row["run"]) == records(tmp_path / "whole" / row["run"])
        for a, b in zip(arrays(tmp_path / "killed" / row["run"]), arrays(tmp_path / "whole" / row["run"]), strict=True):
            np.testing.assert_array_equal(a, b)
