"""One process per compiled program: it trains and asks its cells, one after the other, when it is its turn."""

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np

from bampath.config import Config, override, to_json
from experiments.bam_h200.config import CLAMPED, LOOKED_AT, SIZES, Asked, Cell

Row = dict[str, Any]


@dataclass(frozen=True)
class Materials:
    """Where prepared things lie: the tokenizer, the batches per seed and mix, held-out rows, needles; and the text's
    name and further overrides of every cell's configuration."""

    out: Path
    source: str
    overrides: tuple[str, ...] = ()

    @property
    def tokenizer(self) -> Path:
        return self.out / "tokenizer.json"

    @property
    def needles(self) -> Path:
        return self.out / "needles.json"

    @property
    def held_out(self) -> Path:
        return self.out / "held_out.npy"

    def rows(self, cell: Cell) -> Path:
        return self.out / "rows" / f"{cell.size}-{cell.mix}-seed{cell.seed}"

    def config(self, cell: Cell) -> Config:
        return cell.config(self.tokenizer, self.source, self.overrides)


def asked_of(cell: Cell) -> Asked:
    """What the cell is asked: schemes without a fused kernel only up to `slow`."""
    asked = SIZES[cell.size].asked
    if not cell.scheme.startswith("path"):
        return asked
    short = lambda groups: tuple(kept for g in groups if (kept := tuple(n for n in g if n <= asked.slow)))
    perplexity = min(asked.perplexity, asked.slow)
    return replace(asked, passkey=short(asked.passkey), niah=short(asked.niah), perplexity=perplexity, far=())


def finished(cell: Cell, materials: Materials) -> list[Row] | None:
    """The rows of a cell that is done; None if it is not. ValueError if what is there has other options."""
    path = materials.out / "cells" / cell.slug / "rows.json"
    if not path.exists():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["identity"] != identity(cell, materials):
        raise ValueError(f"{path.parent} is a cell with other options; choose another --out")
    return cast(list[Row], kept["rows"])


def identity(cell: Cell, materials: Materials) -> dict[str, Any]:
    """Everything that decides a cell's rows."""
    config = json.loads(to_json(materials.config(cell)))
    config["data"]["tokenizer"] = materials.tokenizer.name  # wherever the study lies
    return {"cell": asdict(cell), "config": config, "asked": json.loads(json.dumps(asdict(asked_of(cell))))}


def work(cells: Sequence[Cell], materials: Materials, parent: Connection) -> None:
    """Compile for `cells`, which share their programs, then train and ask each when `parent` answers "go".

    Sends ("want", cell), ("say", text), ("rows", cell, rows), ("failed", text), and ends with ("end",).
    """
    try:
        _work(cells, materials, parent)
    except Exception as error:
        parent.send(("failed", f"{cells[0].slug}: {error}\n{traceback.format_exc(limit=-6)}"))
    parent.send(("end",))


def _work(cells: Sequence[Cell], materials: Materials, parent: Connection) -> None:
    from bampath.data import tokenizer_of
    from bampath.step import build_model
    from experiments.bam_h200 import measure, needles
    from experiments.bam_h200.training import Trainer

    first, asked = cells[0], asked_of(cells[0])
    config = materials.config(first)
    begin = time.monotonic()
    trainer = Trainer(config, 0.0 if CLAMPED in first.changes else None)
    compiled = time.monotonic() - begin
    tokenizer = tokenizer_of(config.data)
    batch_tokens, window = SIZES[first.size].study.batch_tokens, config.model.train_length
    shapes, widths = trainer.declared.shapes, sorted({max(group) for group in (*asked.passkey, *asked.niah)})
    reader = measure.CompiledReader(trainer.model, shapes, asked.chunk, widths, asked.perplexity, batch_tokens)
    unrolled = build_model(override(config, "model.scan=false"))  # a loop over layers hides what is inside
    attention = measure.Attention(unrolled, shapes, tokenizer, asked.attention if first.case in LOOKED_AT else ())
    parent.send(("say", f"{first.case}: compiled in {compiled:.0f} + {time.monotonic() - begin - compiled:.0f} s"))
    for cell in cells:
        parent.send(("want", cell))
        if parent.recv() != "go":
            return
        own = materials.config(cell)
        watch = partial(_tell, parent, cell, own.train.steps)
        trained = trainer.train(own.train.seed, materials.rows(cell), watch)
        middle = time.monotonic()
        reader.params = trained.params
        questions = needles.read(materials.needles, tokenizer)
        text = np.load(materials.held_out)[: asked.perplexity_rows, : asked.perplexity + 1]
        rows = measure.ask(reader, tokenizer, asked, questions, text, window, batch_tokens)
        rows += measure.heads(own, trained.params, max(map(max, asked.passkey)))
        rows += attention.rows(trained.params)
        facts = {"case": cell.case, "seed": cell.seed, "mix": cell.mix, "size": cell.size}
        rows.insert(0, _training(own, trainer, trained, time.monotonic() - middle))
        parent.send(("rows", cell, [{**facts, **row} for row in rows]))
        del trained


def _training(config: Config, trainer: Any, trained: Any, asked: float) -> Row:
    from bampath.flops import body_parameters

    tokens = trained.steps * config.data.batch_size * config.data.sequence_length
    return {
        "benchmark": "training",
        "train_length": config.model.train_length,
        "steps": trained.steps,
        "tokens": tokens,
        "loss": trained.curve[-1]["loss"],
        "parameters": trainer.declared.count,
        "positional_parameters": trainer.declared.count - body_parameters(config.model),
        "tokens_per_second": tokens / trained.seconds,
        "training_seconds": round(trained.seconds, 2),
        "evaluation_seconds": round(asked, 2),
        "curve": trained.curve,
    }


def _tell(parent: Connection, cell: Cell, steps: int, step: int, values: dict[str, float]) -> None:
    if step % max(1, steps // 10) < 50:
        parent.send(("say", f"{cell.slug}: step {step}  loss {values['loss']:.3f}  |g| {values['grad_norm']:.2f}"))
