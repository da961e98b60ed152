"""One cell of the study: train a scheme with a seed, then measure it. A finished cell is never done twice."""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from bampath.analysis import read_heads
from bampath.config import Config, to_json
from bampath.data import Tokenizer, load_corpus, tokenizer_of
from bampath.evaluation.passkey import PasskeyTask
from bampath.evaluation.passkey import evaluate as evaluate_passkey
from bampath.evaluation.perplexity import PositionLoss, loss_by_position, rows_of
from bampath.evaluation.reader import ModelReader
from bampath.evaluation.results import write_json
from bampath.flops import body_parameters
from bampath.metrics import read as read_metrics
from bampath.step import build_model, declare
from bampath.train import Result, fit
from experiments.extrapolation.config import Study, slug
from experiments.studies import rows_of_cell

Row = dict[str, Any]
Notify = Callable[[str, Any], None]  # ("training", line), ("passkey", PasskeyResult), ("perplexity", PositionLoss)


@dataclass(frozen=True)
class Cell:
    """A scheme and a seed."""

    scheme: str
    seed: int

    @property
    def slug(self) -> str:
        """A name for files."""
        return f"{slug(self.scheme)}-seed{self.seed}"


def is_finished(cell: Cell, out: Path) -> bool:
    """Whether `run_cell` would only read it."""
    return _rows_file(cell, out).exists()


def _rows_file(cell: Cell, out: Path) -> Path:
    return out / "cells" / cell.slug / "rows.json"


def run_cell(study: Study, cell: Cell, out: Path, tokenizer: Path, notify: Notify) -> list[Row]:
    """Train and measure one cell in out/cells/SLUG, or read what is there if it is finished.

    A cell whose training was interrupted continues from its last checkpoint. ValueError if the folder holds a cell of
    another study (other options or budget).
    """
    finished = _rows_file(cell, out)
    folder, config = finished.parent, study.config(cell.scheme, cell.seed, tokenizer)
    asked = {name: value for name, value in asdict(study).items() if name not in ("name", "schemes", "overrides")}
    identity = {"study": json.loads(json.dumps(asked)), "config": json.loads(to_json(config))}
    done = rows_of_cell(finished, identity)
    if done is not None:
        return done
    start = time.monotonic()
    result = _train(config, folder / "run", notify)
    trained = time.monotonic()
    rows = _measure(study, cell, config, result, notify)
    rows.insert(0, _training_row(cell, config, folder / "run", result, trained - start, time.monotonic() - trained))
    write_json(finished, {"identity": identity, "rows": rows})
    return rows


def _train(config: Config, run_dir: Path, notify: Notify) -> Result:
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    resume = run_dir.exists()
    with (run_dir.parent / "training.log").open("a", encoding="utf-8") as log:
        return fit(config, run_dir, resume=resume, out=cast(TextIO, _Lines(log, notify)))


def _measure(study: Study, cell: Cell, config: Config, result: Result, notify: Notify) -> list[Row]:
    reader = ModelReader(build_model(config), result.params)
    tokenizer = tokenizer_of(config.data)
    facts: dict[str, Any] = {"case": cell.scheme, "seed": cell.seed}
    by_position = _perplexity(study, config, reader, tokenizer)
    notify("perplexity", by_position)
    found = evaluate_passkey(
        reader,
        tokenizer,
        [times * config.model.train_length for times in study.passkey],
        PasskeyTask(samples=study.samples),
        batch_tokens=study.batch_tokens,
        on_result=lambda result: notify("passkey", result),
    )
    heads = read_heads(config.model, result.params, max(study.passkey) * config.model.train_length)
    return [
        *by_position.rows(**facts),
        *(length.row(**facts) for length in found),
        *(head.row(**facts) for head in heads),
    ]


def _perplexity(study: Study, config: Config, reader: ModelReader, tokenizer: Tokenizer) -> PositionLoss:
    trained = config.model.train_length
    corpus = load_corpus(config.data, "validation", tokenizer)
    rows = rows_of(corpus, study.perplexity * trained, limit=study.perplexity_rows)
    return loss_by_position(reader, rows, trained, batch_tokens=study.batch_tokens)


def _training_row(cell: Cell, config: Config, run_dir: Path, result: Result, trained: float, measured: float) -> Row:
    rates = [r["tokens_per_second"] for r in read_metrics(run_dir / "metrics.jsonl") if "tokens_per_second" in r]
    declared = declare(build_model(config))
    return {
        "case": cell.scheme,
        "seed": cell.seed,
        "benchmark": "training",
        "steps": result.step,
        "tokens": result.step * config.data.batch_size * config.data.sequence_length,
        "loss": result.train.get("loss"),
        "parameters": declared.count,
        "positional_parameters": declared.count - body_parameters(config.model),
        "tokens_per_second": statistics.median(rates) if rates else None,
        "training_seconds": round(trained, 2),
        "evaluation_seconds": round(measured, 2),
    }


class _Lines:
    """A text stream for `fit`: into the log, and its lines to whoever watches."""

    def __init__(self, log: TextIO, notify: Notify) -> None:
        self._log, self._notify = log, notify

    def write(self, text: str) -> int:
        self._log.write(text)
        for line in text.splitlines():
            if line.startswith("step "):
                self._notify("training", line)
        return len(text)

    def flush(self) -> None:
        self._log.flush()

    def isatty(self) -> bool:
        return False
