"""One cell: a scheme and a depth, trained on a task from every seed and tested. A finished cell is never done twice."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from bampath.checkpoint import Saver
from bampath.config import Config, to_json
from bampath.data import tokenizer_of
from bampath.evaluation.reader import ModelReader
from bampath.evaluation.results import write_json
from bampath.evaluation.state.score import score
from bampath.evaluation.state.tasks import StateTask, parse_task
from bampath.step import build_model, declare
from experiments.state_tracking.config import Trial, slug
from experiments.state_tracking.training import Trained, seed_of, train
from experiments.studies import rows_of_cell

Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """What is trained; seeds go side by side."""

    trial: Trial
    scheme: str
    layers: int
    seeds: tuple[int, ...]

    @property
    def slug(self) -> str:
        """A name for files."""
        return slug(self.trial.task, self.scheme, self.layers)


def finished(cell: Cell, out: Path) -> list[Row] | None:
    """The rows of a cell that is done; None if it is not. ValueError if the file is damaged or of other options."""
    return rows_of_cell(out / "cells" / cell.slug / "rows.json", _identity(cell))


def run_cell(cell: Cell, out: Path, say: Say) -> list[Row]:
    """Train and test one cell, keep its rows and one checkpoint per seed in out/cells/SLUG."""
    folder = out / "cells" / cell.slug
    config, task = cell.trial.config(cell.scheme, cell.layers), parse_task(cell.trial.task)
    start = time.monotonic()
    every = max(1, config.train.steps // 5)
    trained = train(config, task, cell.seeds, lambda step, loss: _tell(say, step, loss, every))
    middle = time.monotonic()
    rows = []
    for index, seed in enumerate(cell.seeds):
        facts = {"case": cell.scheme, "layers": cell.layers, "seed": seed}
        rows += _test(cell, config, task, seed_of(trained.params, index), facts, say)
    rows += _training_rows(cell, config, trained, middle - start, time.monotonic() - middle)
    _save(cell, config, trained, folder, middle - start)
    write_json(folder / "rows.json", {"identity": _identity(cell), "rows": rows})
    return rows


def solved(rows: Sequence[Row]) -> bool:
    """Whether the mean over seeds of the rows without a wrong answer, in distribution, reaches the published mark."""
    from experiments.state_tracking.config import SOLVED

    shares = [row["sequence_accuracy"] for row in rows if row.get("test") == "in-distribution"]
    return bool(shares) and sum(shares) / len(shares) > SOLVED


def _identity(cell: Cell) -> dict[str, Any]:
    config = cell.trial.config(cell.scheme, cell.layers)
    tests = {name: cell.trial.rows_of(name) for name in parse_task(cell.trial.task).tests()}
    return {"config": json.loads(to_json(config)), "seeds": list(cell.seeds), "tests": tests}


def _test(cell: Cell, config: Config, task: StateTask, params: Any, facts: Row, say: Say) -> list[Row]:
    reader, rows = ModelReader(build_model(config), params), []
    for name, asked in task.tests().items():
        found = score(reader, asked, name, cell.trial.rows_of(name), seed=1)
        rows.append({**found.row(**facts), "trained_on": cell.trial.task})
        say(f"  seed {facts['seed']}: {name:<16} {found.error:9.4%} of the answers wrong")
    return rows


def _training_rows(cell: Cell, config: Config, trained: Trained, seconds: float, tested: float) -> list[Row]:
    declared = declare(build_model(config))
    steps = [step for step, _ in trained.curve]
    return [
        {
            "benchmark": "training",
            "trained_on": cell.trial.task,
            "case": cell.scheme,
            "layers": cell.layers,
            "seed": seed,
            "steps": config.train.steps,
            "tokens": config.train.steps * config.data.batch_size * config.data.sequence_length,
            "parameters": declared.count,
            "seconds_of_all_seeds": round(seconds, 2),
            "test_seconds_of_all_seeds": round(tested, 2),
            "curve": {"step": steps, "loss": [round(losses[index], 5) for _, losses in trained.curve]},
        }
        for index, seed in enumerate(cell.seeds)
    ]


def _save(cell: Cell, config: Config, trained: Trained, folder: Path, seconds: float) -> None:
    values = asdict(config)
    for index, seed in enumerate(cell.seeds):
        facts = {"config": values, "data": {}, "tokenizer": tokenizer_of(config.data).fingerprint, "elapsed": seconds}
        facts["config"] = {**values, "train": {**values["train"], "seed": seed}}
        with Saver(folder / f"seed{seed}") as saver:
            target = saver.folder / f"{config.train.steps:08d}"
            if not target.exists():
                seed_array = jnp.uint32(seed)  # a checkpoint cannot hold nothing, and training is not continued from it
                saver.save(config.train.steps, seed_of(trained.params, index), {"seed": seed_array}, facts)


def _tell(say: Say, step: int, losses: Sequence[float], every: int) -> None:
    if step % every == 0:
        say(f"  step {step:>6,}  loss {', '.join(f'{loss:.4f}' for loss in losses)}")
