"""The table that fills while the study runs: live in a terminal, line by line everywhere else."""

import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from bampath.analysis.figures import short_names, short_number
from bampath.evaluation.passkey import PasskeyResult
from bampath.evaluation.perplexity import PositionLoss
from bampath.progress import duration
from experiments.extrapolation.cells import Cell, Row
from experiments.extrapolation.config import Study


class Board:
    """Rows of cells; `watch(cell)` gives the callback that a running cell reports to. Use as a context manager."""

    def __init__(self, study: Study, train_length: int, cells: Sequence[Cell], out: TextIO = sys.stdout) -> None:
        self._study, self._train_length, self._cells = study, train_length, cells
        self._names = short_names(cell.scheme for cell in cells)
        self._console = Console(file=out)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._state: dict[Cell, str] = dict.fromkeys(cells, "")
        self._loss: dict[Cell, dict[int, float]] = {cell: {} for cell in cells}
        self._passkey: dict[Cell, dict[int, str]] = {cell: {} for cell in cells}
        self._started = time.monotonic()
        self._said = 0.0

    def __enter__(self) -> "Board":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._live is not None:
            self._refresh()
            self._live.stop()

    def say(self, text: str) -> None:
        """A line above the table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def watch(self, cell: Cell) -> Any:
        """The `notify` of a cell."""
        return lambda kind, value: self._notify(cell, kind, value)

    def finish(self, cell: Cell, rows: Sequence[Row]) -> None:
        """Fill in a cell from its rows, also one that was finished before."""
        for row in rows:
            if row["benchmark"] == "perplexity":
                self._loss[cell][row["end"]] = row["loss"]
            elif row["benchmark"] == "passkey":
                self._passkey[cell][row["length"]] = _share(row["accuracy"])
            elif row["benchmark"] == "training":
                seconds = row["training_seconds"] + row["evaluation_seconds"]
                rate = f", {row['tokens_per_second']:,.0f} tok/s" if row["tokens_per_second"] else ""
                self._state[cell] = f"done in {duration(seconds)}{rate}"
        self._refresh()
        if self._live is None:
            self.say(self._line(cell))

    def _notify(self, cell: Cell, kind: str, value: Any) -> None:
        if isinstance(value, PositionLoss):
            self._loss[cell] |= dict(zip(np.cumsum(value.counts).tolist(), value.loss.tolist(), strict=True))
            self._state[cell] = "passkey…"
        elif isinstance(value, PasskeyResult):
            self._passkey[cell][value.length] = _share(value.accuracy)
        else:
            self._state[cell] = value
        self._refresh()
        if self._live is None and kind == "training" and time.monotonic() - self._said > 5:
            self._said = time.monotonic()
            self.say(f"  {cell.scheme} seed {cell.seed}: {value}")

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self.table())

    def table(self) -> Table:
        """What is known now."""
        passed = duration(time.monotonic() - self._started)
        title = f"extrapolation ({self._study.name}), trained at {self._train_length} tokens, {passed}"
        table = Table(title=title, caption="ppl: perplexity by position; key: share of passkeys found", expand=False)
        table.add_column("scheme")
        table.add_column("seed", justify="right")
        for name, lengths in self._columns():
            for length in lengths:
                times = f"{length // self._train_length}×"
                table.add_column(f"{name}\n{short_number(length)}\n{times}", justify="right")
        table.add_column("state", overflow="fold")
        for cell in self._cells:
            table.add_row(self._names[cell.scheme], str(cell.seed), *self._numbers(cell), self._state[cell])
        return table

    def _columns(self) -> list[tuple[str, list[int]]]:
        one, last = self._train_length, self._study.perplexity * self._train_length
        return [("ppl", [one, last]), ("key", [times * one for times in self._study.passkey])]

    def _numbers(self, cell: Cell) -> list[str]:
        (_, ends), (_, lengths) = self._columns()
        losses = [f"{np.exp(self._loss[cell][end]):.1f}" if end in self._loss[cell] else "" for end in ends]
        return losses + [self._passkey[cell].get(length, "") for length in lengths]

    def _line(self, cell: Cell) -> str:
        low, high, *keys = self._numbers(cell)
        found = " ".join(f"{times}×:{key}" for times, key in zip(self._study.passkey, keys, strict=True))
        return (
            f"{cell.scheme} seed {cell.seed}: perplexity {low} at 1×, {high} at {self._study.perplexity}×; "
            f"keys found {found}; {self._state[cell]}"
        )


def _share(accuracy: float) -> str:
    return f"{accuracy:.0%}"
