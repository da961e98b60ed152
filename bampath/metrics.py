"""Metrics as (total, weight) pairs, and the files that they are written to.

`metrics.jsonl` holds one JSON object per line, with its `step` and its `kind` ("train" or "eval"). A resumed run cuts
what was written after the step that it resumes from, so no step appears twice, and a line that a crash cut short is
dropped. TensorBoard shows the same numbers under the same names.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bampath.checkpoint import SaveError

Array = jax.Array
JSONL_NAME = "metrics.jsonl"


class Mean(NamedTuple):
    """A weighted mean that has not been divided yet: numerators and denominators add up, means do not."""

    total: Array
    weight: Array

    @classmethod
    def zero(cls) -> "Mean":
        return cls(jnp.float32(0), jnp.float32(0))

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> float:
        """total / weight; NaN if nothing was counted."""
        weight = float(self.weight)
        return float(self.total) / weight if weight else math.nan


class Writer:
    """Appends records to `run_dir/metrics.jsonl` and, if asked, to TensorBoard event files beside it.

    `resumed_step`: records of later steps are removed first (0 keeps none). Each record is flushed to the operating
    system before `write` returns, so a killed process loses none. One that is not `active` writes nothing: of several
    processes one does.
    """

    def __init__(self, run_dir: Path, resumed_step: int = 0, tensorboard: bool = False, *, active: bool = True) -> None:
        self._path = Path(run_dir) / JSONL_NAME
        self._file = self._board = None
        if not active:
            return
        _cut_after(self._path, resumed_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = _tensorboard(run_dir, resumed_step) if tensorboard else None

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One record; NaN and infinity are written as null, as JSON has neither. SaveError if that fails."""
        if self._file is None:
            return
        plain = {name: _plain(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **plain}, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            file, self._file = self._file, None
            with suppress(OSError):  # closing tries to write the same line again
                file.close()
            raise SaveError(f"{self._path} could not be written: {error.strerror}") from error
        if self._board is not None:
            for name, value in plain.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def read(path: Path | str) -> Iterator[dict[str, Any]]:
    """The records of a `metrics.jsonl` file, in order. A last line that was cut short is left out.

    ValueError that names the file and the line where another one is no record.
    """
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                continue
            try:
                record = json.loads(line)
                record["kind"], record["step"]
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{path}, line {number} is no record: {line[:60]!r}; delete the line") from None
            yield record


def _cut_after(path: Path, step: int) -> None:
    """Rewrite the file without records of later steps, by a rename, so that a crash leaves the old or the new one."""
    if not path.exists():
        return
    kept = [record for record in read(path) if record["step"] <= step]
    temporary = path.with_suffix(".jsonl.partial")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _tensorboard(run_dir: Path, resumed_step: int) -> Any:
    from tensorboardX import SummaryWriter  # heavy, and only wanted when a run is really logged

    purge = resumed_step + 1 if resumed_step else None
    return SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=purge)
