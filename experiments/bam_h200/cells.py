"""One process per compiled program: it trains and asks its cells, one after the other, when it is its turn."""

import json
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from bampath.config import Config, to_json
from bampath.data.loader import row_options
from experiments.bam_h200.config import CLAMPED, LOOKED_AT, SIZES, Asked, Cell, without_recipe
from experiments.studies import rows_of_cell

Row = dict[str, Any]
FAR_CHUNK = 32_768  # tokens that are read at a time at the far lengths, unless keys are carried
FAR_LOST = "its far lengths (remove the cell's folder to train it and ask it again): "


@dataclass(frozen=True)
class Materials:
    """Where prepared things lie: the tokenizer, the batches, held-out rows, needles; and the text's name and further
    overrides of every cell's configuration."""

    out: Path
    source: str
    overrides: tuple[str, ...] = ()

    @property
    def tokenizer(self) -> Path:
        return self.out / "tokenizer.json"

    @property
    def needles(self) -> Path:
        return self.out / "needles.npz"

    @property
    def held_out(self) -> Path:
        return self.out / "held_out.npy"

    def rows(self, cell: Cell) -> Path:
        """The folder of a cell's batches, one for all cells that see the same rows; its name has what a case changes of
        them: small-retrieval-seed0-2500,batch_size=32."""
        config, plain = self.config(cell), self.config(replace(cell, case=cell.scheme))
        options = row_options(config.data).items()
        changed = [f"{name}={value}" for name, value in options if attrgetter(name)(plain.data) != value]
        name = f"{cell.size}-{cell.mix}-seed{cell.seed}-{config.train.steps}"
        return self.out / "rows" / ",".join([name, *changed])

    def config(self, cell: Cell) -> Config:
        return cell.config(self.tokenizer, self.source, self.overrides)


def finished(cell: Cell, materials: Materials) -> list[Row] | None:
    """The rows of a cell that is done; None if it is not. ValueError if the file is damaged or of other options."""
    return rows_of_cell(materials.out / "cells" / cell.slug / "rows.json", identity(cell, materials))


def identity(cell: Cell, materials: Materials) -> dict[str, Any]:
    """Everything that decides a cell's rows."""
    config = json.loads(to_json(materials.config(cell)))
    config["data"]["tokenizer"] = materials.tokenizer.name  # wherever the study lies
    return {"cell": asdict(cell), "config": config, "asked": json.loads(json.dumps(asdict(SIZES[cell.size].asked)))}


def work(cells: Sequence[Cell], materials: Materials, far: bool, parent: Connection, gpu: str | None = None) -> None:
    """Compile for `cells`, which share their programs, then train and ask each when `parent` answers "go".

    Sends ("want", cell, last) to use the device (last: after all others), ("free",) when it no longer does, ("say",
    text), ("rows", cell, rows), ("failed", cell, why), and ends with ("end",). far: ask the first cell also at the far
    lengths, if it finds a key at the last of the others. gpu: the only one that this process may use.
    """
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    cell, what = cells[0], ""
    try:
        worker = Worker(cells[0], materials, parent)
        for cell in cells:
            try:
                if not worker.run(cell, keep=far and cell == cells[0]):
                    break
            except FloatingPointError as error:  # the next seed may do better
                parent.send(("failed", cell, str(error)))
        cell, what = cells[0], FAR_LOST
        worker.ask_far()
    except Exception as error:
        parent.send(("failed", cell, f"{what}{error}\n{traceback.format_exc(limit=-6)}"))
    parent.send(("end",))


class Worker:
    """Compiled programs of one case, and what they are used for."""

    def __init__(self, first: Cell, materials: Materials, parent: Connection) -> None:
        from concurrent.futures import ThreadPoolExecutor

        from bampath.data import tokenizer_of
        from bampath.step import build_model
        from experiments.bam_h200 import measure
        from experiments.bam_h200.training import Trainer

        begin, pool = time.monotonic(), ThreadPoolExecutor(8)
        self.materials, self.parent, self.asked = materials, parent, SIZES[first.size].asked
        self.kept: tuple[Cell, Any, list[Row]] | None = None
        config, asked = materials.config(first), self.asked
        self.tokens, self.tokenizer = SIZES[first.size].study.batch_tokens, tokenizer_of(config.data)
        self.trainer = Trainer(config, pool, 0.0 if CLAMPED in first.changes else None)
        model, shapes = build_model(config), self.trainer.declared.shapes
        widths = sorted({max(group) for group in (*asked.passkey, *asked.niah)})
        self.reader = measure.CompiledReader(model, shapes, asked.chunk, widths, asked.perplexity, self.tokens, pool)
        lengths = asked.attention if without_recipe(first.case)[0] in LOOKED_AT else ()
        unrolled = self.trainer.model  # a loop over layers hides what is inside
        self.attention = measure.Attention(unrolled, shapes, self.tokenizer, lengths, pool)
        self.trainer.wait()
        parent.send(("say", f"{first.case}: compiled in {time.monotonic() - begin:.0f} s"))

    def run(self, cell: Cell, keep: bool) -> bool:
        """Train and ask one cell; whether there was time for it. keep: for `ask_far`."""
        from experiments.bam_h200 import measure, needles, slim

        self.parent.send(("want", cell, False))
        if self.parent.recv() != "go":
            return False
        config = self.materials.config(cell)
        watch = partial(_tell, self.parent, cell, config.train.steps)
        trained = self.trainer.train(config.train.seed, self.materials.rows(cell), watch)
        middle, self.reader.params = time.monotonic(), trained.params
        questions = needles.read(self.materials.needles)
        text = np.load(self.materials.held_out)[: self.asked.perplexity_rows, : self.asked.perplexity + 1]
        window = config.model.train_length
        rows = measure.ask(self.reader, self.tokenizer, self.asked, questions, text, window, self.tokens)
        rows += self.attention.rows(trained.params)
        self.parent.send(("free",))
        rows += measure.heads(config, trained.params, max(map(max, self.asked.passkey)))
        rows.insert(0, _training(config, self.trainer, trained, time.monotonic() - middle))
        facts = {"case": cell.case, "seed": cell.seed, "mix": cell.mix, "size": cell.size}
        rows = slim.slim([{**facts, **row} for row in rows])
        self.parent.send(("rows", cell, rows))
        if keep:
            self.kept = (cell, trained.params, rows)
        return True

    def ask_far(self) -> None:
        """Ask the model that was kept at the far lengths, after all other cells."""
        from experiments.bam_h200 import measure, slim

        if self.kept is None or not self.asked.far:
            return
        cell, self.reader.params, rows = self.kept
        near = [row for row in rows if row["benchmark"] == "passkey"]
        if not max(near, key=lambda row: row["length"])["correct"]:
            return
        self.parent.send(("want", cell, True))
        if self.parent.recv() != "go":
            return
        self.reader.chunk = far_chunk(cell.scheme, self.asked)
        found = measure.far(self.reader, self.tokenizer, self.asked, self.tokens)
        self.parent.send(("free",))
        facts = {name: rows[0][name] for name in ("case", "seed", "mix", "size")}
        self.parent.send(("rows", cell, [*rows, *slim.slim([{**facts, **row} for row in found])]))


def far_chunk(scheme: str, asked: Asked) -> int:
    """Tokens that are read at a time at the far lengths: the whole row where a layer carries its keys along (PaTH),
    since for each piece it would move all keys so far, and its kernels take the row."""
    from bampath.positions.registry import parse

    carried = any(layer.carries_keys for layer in parse(scheme).layers)
    return 2 * max(asked.far) if carried else FAR_CHUNK


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
